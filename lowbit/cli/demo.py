"""`lowbit demo`: layers of a trained model, quantised and multiplied by the generated kernels, with errors and speed.

Knows where kernels can run and how to judge them; it must not know how models are stored (model.py).
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.cli.options import counts, progress, say, table

if TYPE_CHECKING:
    from torch import Tensor

    from lowbit.cli.model import Layer
    from lowbit.jit.compile import Compiled
    from lowbit.nn.linear import Linear
    from lowbit.plan.plan import Plan
    from lowbit.problem import Problem

HELP = (
    "Quantise layers of a real model and run their kernels: on the GPU, else in the CPU emulator, else the reference."
)
EXAMPLES = """examples:
  lowbit demo
  lowbit demo --arch sm_80 --m 1,16
  lowbit demo --model model.safetensors --spec int4_g32 --spec fp8_e4m3"""

_EMULATED_WEIGHTS = 1 << 20  # of a layer at most: about two seconds for 64 tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--model", type=Path, help="any safetensors file (default: the packaged all-MiniLM-L6-v2)")
    parser.add_argument("--spec", action="append", help="weight format, repeatable (default: five kinds)")
    parser.add_argument("--m", type=counts, default=(1, 8, 64), help="numbers of tokens, with commas (1,8,64)")
    parser.add_argument("--act", help="activation type, bf16 or fp16 (default: bf16 where the chip has it)")
    parser.add_argument("--arch", help="the chip that is emulated where there is no GPU (sm_90a)")
    parser.add_argument("--json", action="store_true", help="for programs")


@dataclass(frozen=True)
class Row:
    """One product: how it was computed, how right it is, how fast."""

    layer: str
    shape: str
    spec: str
    m: int
    plan: str
    registers: int | None
    smem_bytes: int
    compile_seconds: float | None
    kernel_error: float  # relative Frobenius, against float64 with the dequantised weight
    worst: float  # largest element error, as a share of the derived bound: right if at most 1
    quantisation_error: float  # relative Frobenius of the exact products, against the original weight
    us: float | None = None
    floor_us: float | None = None


def run(arguments: argparse.Namespace) -> int:
    """Run all products and print the table; 1 if a result is outside its bound."""
    started = time.perf_counter()
    from lowbit.cli import model

    place = _place(arguments)
    path = arguments.model or model.packaged_model()
    say(place.banner)
    layers = model.read_layers(path, max(arguments.m))
    if place.kind == "emulator":
        layers = [layer.cut(_EMULATED_WEIGHTS) for layer in layers]
    rows = _rows(layers, arguments, place)
    wrong = [row for row in rows if not row.worst <= 1]
    seconds = time.perf_counter() - started
    if arguments.json:
        facts = {
            "ran_on": place.kind,
            "arch": place.arch.name,
            "chip": place.chip,
            "model": str(path),
            "seconds": seconds,
        }
        print(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))
        return int(bool(wrong))
    print(f"{place.banner}\n\nmodel: {path}")
    for layer in layers:
        print(f"  {layer.name}: {layer.weight.shape[0]}x{layer.weight.shape[1]}, inputs from {layer.origin}")
    print(f"\n{_text(rows)}\n")
    print(
        "kernel error: relative, against float64 with the dequantised weight; bound: the worst element's share of what"
    )
    print(
        "the arithmetic of the tensor cores and the rounding of the output allow; quant error: what the format costs."
    )
    verdict = (
        "every result is within its bound"
        if not wrong
        else f"{len(wrong)} of {len(rows)} results are OUTSIDE their bound"
    )
    print(f"\n{len(rows)} products in {seconds:.0f} s: {verdict}.\n{place.banner}")
    return int(bool(wrong))


@dataclass(frozen=True)
class Place:
    """Where products are computed, and for which chip."""

    kind: str  # "gpu", "emulator" or "reference"
    arch: Any
    chip: str
    act: str
    banner: str


def _place(arguments: argparse.Namespace) -> Place:
    import torch

    from lowbit import api
    from lowbit.testing import emulate

    gpu = torch.cuda.is_available() and not arguments.arch
    arch = api.current_arch() if gpu else api.parse_arch(arguments.arch or "sm_90a")
    act = arguments.act or ("bf16" if arch.bf16 else "fp16")
    if gpu:
        chip = torch.cuda.get_device_name()
        return Place("gpu", arch, chip, act, f"Where: on a GPU, {chip} ({arch.name}).")
    obstacle = emulate.obstacle()
    if obstacle:
        banner = f"Where: the PyTorch REFERENCE on the CPU, no kernel ({obstacle}). Plans are for {arch.name}."
        return Place("reference", arch, "CPU", act, banner)
    banner = f"Where: the CPU EMULATOR, computing as {arch.name} ({arch.chip}); no GPU, so no times."
    return Place("emulator", arch, "CPU", act, banner)


def _specs(layer: Layer, wanted: Sequence[str] | None) -> list[str]:
    """The formats for a layer: what the user named, or five kinds with the largest group that fits."""
    if wanted:
        return list(wanted)
    group = next((g for g in (128, 64, 32) if g <= layer.weight.shape[1]), 16)
    return [f"int4_g{group}", "int8", "fp8_e4m3", "mxfp4", "nvfp4"]


@dataclass(frozen=True, eq=False)
class Job:
    """One product to run: a quantised layer with its exact weights (N, K) float32, and how many tokens."""

    layer: Layer
    linear: Linear
    w: Tensor
    problem: Problem
    plan: Plan
    m: int

    @property
    def pair(self) -> tuple[Problem, Plan]:
        """What a kernel is made from."""
        return self.problem, self.plan


def _jobs(layers: Sequence[Layer], arguments: argparse.Namespace, place: Place) -> list[Job]:
    """Every layer in every format for every M, quantised and planned."""
    from lowbit.nn.linear import Linear
    from lowbit.ops.gemm import problem_of
    from lowbit.plan.choose import choose
    from lowbit.problem import check
    from lowbit.quantize import quantize
    from lowbit.weights import spec as spec_of

    jobs = []
    for layer in layers:
        for name in _specs(layer, arguments.spec):
            check(spec_of(name), place.act, place.arch)
            qw = quantize(layer.weight, name)
            linear, w = Linear(qw, layer.bias, place.act), qw.dequantize()
            problem = problem_of(linear.layout, linear.act, linear.out, place.arch)
            jobs += [Job(layer, linear, w, problem, choose(problem, m), m) for m in arguments.m]
    return jobs


def _rows(layers: Sequence[Layer], arguments: argparse.Namespace, place: Place) -> list[Row]:
    """Quantise, plan and compile everything, then run one product after the other."""
    from lowbit.ops.checks import DTYPES
    from lowbit.testing import emulate

    jobs = _jobs(layers, arguments, place)
    pairs = list(dict.fromkeys(job.pair for job in jobs))
    compiled = _compile(pairs)
    kernels = None
    if place.kind == "emulator":
        say(f"building {len(pairs)} kernels for the emulator with the C++ compiler")
        kernels = emulate.build_all(pairs)
    report, rows = progress("running"), []
    for job in jobs:
        x, us, linear = job.layer.x[: job.m].to(DTYPES[place.act]), None, job.linear
        if kernels is not None:
            y = kernels.matmul(x, linear.packed(), act=place.act, bias=linear.bias, arch=place.arch, plan=job.plan)
        elif place.kind == "gpu":
            y, us = _on_gpu(linear, x)
        else:
            y = linear(x)
        rows.append(_judged(job, x, y, compiled.get(job.pair), us))
        report(len(rows), len(jobs), f"{job.layer.name} {job.problem.spec} M={job.m}")
    return rows


def _compile(pairs: Sequence[tuple[Problem, Plan]]) -> dict[tuple[Problem, Plan], Compiled]:
    """The cubins, for their registers and compile times; none where there is no CUDA compiler."""
    from lowbit.errors import MissingKernel, Unsupported
    from lowbit.jit.generate import generate
    from lowbit.jit.pool import compile_many

    sources = [generate(*pair) for pair in pairs]
    try:
        return dict(zip(pairs, compile_many(sources, progress=progress("compiling")), strict=True))
    except (Unsupported, MissingKernel) as error:
        say(f"no registers and compile times: {error}")
        return {}


def _on_gpu(linear: Linear, x: Tensor) -> tuple[Tensor, float]:
    """y, and the microseconds of a call with cold weights."""
    from lowbit.testing.timing import graph_us, num_copies

    x = x.cuda()
    copies = [copy.deepcopy(linear).cuda() for _ in range(num_copies(linear.units.nbytes))]
    return copies[0](x).cpu(), graph_us([partial(layer, x) for layer in copies])


def _judged(job: Job, x: Tensor, y: Tensor, kernel: Compiled | None, us: float | None) -> Row:
    """The row of one product, its errors measured."""
    from lowbit.api import floor_us
    from lowbit.plan.plan import launch_geometry, rounds
    from lowbit.testing.tolerance import bound, operand_rounding

    problem, plan, bias = job.problem, job.plan, job.linear.bias
    rounding = operand_rounding(problem.spec, problem.act, rounds(problem, plan))
    exact, original = (x.double() @ weight.double().T for weight in (job.w, job.layer.weight))
    right = exact if bias is None else exact + bias.double()
    allowed = bound(x, job.w, bias, y.dtype, level=problem.arch.level, rounding=rounding)
    return Row(
        layer=job.layer.name,
        shape=f"{problem.n}x{problem.k}",
        spec=str(problem.spec),
        m=job.m,
        plan=str(plan),
        registers=None if kernel is None else kernel.registers,
        smem_bytes=launch_geometry(problem, plan, job.m).smem,
        compile_seconds=None if kernel is None else kernel.seconds,
        kernel_error=float((y.double() - right).norm() / right.norm()),
        worst=float(((y.double() - right).abs() / allowed).max()),
        quantisation_error=float((exact - original).norm() / original.norm()),
        us=us,
        floor_us=None if us is None else floor_us(problem, job.m),
    )


def _text(rows: Sequence[Row]) -> str:
    """The table; columns of times only where there are any."""
    timed = any(row.us is not None for row in rows)
    head = ["layer", "weights", "M", "plan", "regs", "smem KB", "compile s", "kernel error", "of bound", "quant error"]
    lines = [head + ["us", "floor us", "share"] * timed]
    for row in rows:
        cells = [
            _short(row.layer) + " " + row.shape,
            row.spec,
            str(row.m),
            row.plan,
            _cell(row.registers, "d"),
            f"{row.smem_bytes / 1024:.1f}",
            _cell(row.compile_seconds, ".2f"),
            f"{row.kernel_error:.1e}",
            f"{row.worst:.2f}",
            f"{row.quantisation_error:.1e}",
        ]
        if timed:
            share = row.floor_us / row.us if row.us and row.floor_us else None
            cells += [_cell(row.us, ".2f"), _cell(row.floor_us, ".2f"), _cell(share, ".0%")]
        lines.append(cells)
    return table(lines, left=2)


def _short(name: str) -> str:
    """The end of a tensor's name, from its number on: `encoder.layer.0.output.dense` -> `0.output.dense`."""
    parts = name.split(".")
    start = next((i for i, part in enumerate(parts) if part.isdecimal()), max(0, len(parts) - 3))
    return ".".join(parts[start:])


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

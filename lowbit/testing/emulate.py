"""Runs the generated kernels on CPU tensors in the emulator, under the rules and with the arithmetic of a chip.

Knows tensors, plans and the emulator of a source checkout; it must not know devices, or what the numbers should be.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.activations import ActSpec
from lowbit.arch import Arch
from lowbit.arch import arch as arch_row
from lowbit.errors import BadInput, CompileError, LaunchError, Unsupported
from lowbit.jit.generate import generate, generate_act
from lowbit.jit.source import Source
from lowbit.layout.pack import PackedWeight
from lowbit.ops import activation, checks, gemm
from lowbit.plan.choose import MAX_GRID_Y, choose
from lowbit.plan.plan import WGMMA_FAMILIES, Plan, blocks_of, launch_geometry, x_box_k
from lowbit.problem import EIGHT_BITS, ActProblem, Problem
from lowbit.quantize import activations

_CHECKOUT = Path(__file__).resolve().parents[2] / "emulator"


_REMEDY = "it belongs to the source checkout, not to the wheel: run from a checkout, or use lowbit.reference"


def emulator() -> Any:
    """The emulator package, with its C++ compiler checked. Raises Unsupported with the remedy."""
    package = sys.modules.get("emulator") or _from_checkout()
    if package is None or not hasattr(package, "build_engine"):
        raise Unsupported([f"there is no emulator here; {_REMEDY}"])
    try:
        importlib.import_module("emulator.build").compiler()
    except (CompileError, OSError) as error:
        raise Unsupported(
            [f"kernels cannot be emulated without a C++ compiler: {error} (Debian, Ubuntu: apt install g++)"]
        ) from error
    return package


def obstacle() -> str:
    """Why kernels cannot be emulated here; empty if they can."""
    try:
        emulator()
    except Unsupported as error:
        return str(error)
    return ""


def _from_checkout() -> Any:
    """The package beside lowbit's own folder, or None: an editable install has lowbit alone on its import path."""
    found = importlib.util.spec_from_file_location(
        "emulator", _CHECKOUT / "__init__.py", submodule_search_locations=[str(_CHECKOUT)]
    )
    if found is None or found.loader is None or not (_CHECKOUT / "__init__.py").is_file():
        return None
    module = importlib.util.module_from_spec(found)
    sys.modules["emulator"] = module
    try:
        found.loader.exec_module(module)
    except ImportError as error:
        del sys.modules["emulator"]
        raise Unsupported([f"the emulator cannot be imported ({error}): pip install numpy"]) from error
    return module


@dataclass(frozen=True, eq=False)
class Kernels:
    """Kernels of many (problem, plan) pairs in one emulator library; made by `build_all`."""

    library: Any
    sources: dict[tuple[Problem, Plan], Source]

    def matmul(
        self,
        x: Tensor,
        packed: PackedWeight,
        *,
        act: str = "bf16",
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        arch: str | Arch = "sm_90a",
        plan: Plan | None = None,
        seed: int = 1,
        gap: int = 0,
        batch_invariant: bool = False,
    ) -> Tensor:
        """As the function `matmul`; raises BadInput if the kernel it needs was not built."""
        problem, m = _prepare(x, packed, act, out_dtype, arch, batch_invariant)
        bias = None if bias is None else gemm.check_bias(bias, packed.layout.n)
        if m == 0:
            return x.new_empty((*x.shape[:-1], packed.layout.n), dtype=checks.DTYPES[problem.out])
        plan = plan or choose(problem, m)
        source = self.sources.get((problem, plan))
        if source is None:
            raise BadInput(
                f"the kernel of {problem.label} on {problem.arch.name} with plan {plan} was not built: "
                "give the pair to build_all"
            )
        rows, x_scales = gemm.in_packed_order(x, packed.perm).reshape(m, -1), None
        if problem.operand_bits == 8:
            rows, x_scales = activations.quantize_act(rows, act)
            rows = torch.nn.functional.pad(rows, (0, problem.k - rows.shape[1]))
        else:
            rows = gemm.rows_of(rows, packed.layout.natural.k)
        y = _launch(self.library, source, problem, plan, rows, x_scales, packed, bias, seed, gap)
        return y.view(*x.shape[:-1], packed.layout.n)


def build_all(pairs: Iterable[tuple[Problem, Plan]]) -> Kernels:
    """One library with the kernels of all pairs: compiling is the costly part, and the headers are read once.

    Equal kernels are built once; what was built before comes from the cache. Raises Unsupported without an emulator or
    for an illegal plan, CompileError.
    """
    package = emulator()
    sources = {(problem, plan): generate(problem, plan) for problem, plan in pairs}
    unique = {source.key: source for source in sources.values()}
    if not unique:
        raise BadInput("build_all needs at least one (problem, plan) pair")
    return Kernels(package.build(list(unique.values())), {pair: unique[source.key] for pair, source in sources.items()})


def matmul(
    x: Tensor,
    packed: PackedWeight,
    *,
    act: str = "bf16",
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    arch: str | Arch = "sm_90a",
    plan: Plan | None = None,
    seed: int = 1,
    gap: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """`lowbit.matmul` for CPU tensors by the very kernel that `arch` would run: (..., K) x packed (N, K) -> (..., N).

    act: also "fp8" or "int8", for weights packed for 8-bit operands: x of bf16 or fp16 is quantised first, by the reference.
    plan: default, the one the library chooses for as many tokens. seed: the order of threads and when copies land; any
    gives the same bits. gap: 8-element vectors of NaN between the rows of x, as in a view of a wider tensor.
    Raises what `lowbit.matmul` raises; Unsupported without an emulator; CompileError; EmulatorFault, a LowbitError, for
    a kernel that breaks a rule of the machine; LaunchError for one that leaves a part of y unwritten.
    """
    problem, m = _prepare(x, packed, act, out_dtype, arch, batch_invariant)
    pair = (problem, plan or choose(problem, max(m, 1)))
    kernels = _built(pair) if m else Kernels(None, {})
    return kernels.matmul(
        x, packed, act=act, bias=bias, out_dtype=out_dtype, arch=arch, plan=pair[1], seed=seed, gap=gap,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def quantize_act(
    x: Tensor, act: str, scale: Tensor | None = None, *, arch: str | Arch = "sm_90a", seed: int = 1, gap: int = 0
) -> tuple[Tensor, Tensor]:
    """`quantize_act` for a CPU tensor x (..., K) by the very kernel that `arch` would run, codes uint8 (..., K rounded up to 16).

    seed, gap and errors: as `matmul`.
    """
    spec = ActSpec.parse(act)
    activations.check_act_input(x, spec, scale)
    row = arch_row(arch) if isinstance(arch, str) else arch
    rows = gemm.rows_of(x, x.shape[-1])
    (m, k), groups = rows.shape, spec.groups(x.shape[-1])
    problem = ActProblem(spec, checks.NAMES[x.dtype], k, row)
    source = generate_act(problem)
    library = emulator().build([source])
    pitch = k + 8 * gap
    span = torch.full(((m - 1) * pitch + k,), float("nan"), dtype=rows.dtype)
    span.as_strided((m, k), (pitch, 1)).copy_(rows)
    columns = -(-k // activation.CODE_COLUMNS) * activation.CODE_COLUMNS
    with emulator().Memory() as memory:
        params = activation.ActParams()
        params.x = memory.alloc("x", span, read_only=True, dependent=row.bulk)
        params.codes = memory.alloc("codes", m * columns, output=True, dependent=row.bulk)
        params.scales = memory.alloc("scales", m * groups * 4, output=True, dependent=row.bulk)
        params.scale = None if scale is None else memory.alloc("scale", scale, read_only=True, dependent=row.bulk)
        params.x_pitch, params.m = 2 * pitch, m
        library.launch(
            source, bytes(params), grid=(m, 1), block=problem.threads, smem=activation.SMEM_BYTES, seed=seed, arch=row.level, resident=min(2, m)
        )
        for name, address, size in (("codes", params.codes, m * columns), ("scales", params.scales, m * groups * 4)):
            if missing := memory.unwritten(address):
                raise LaunchError(f"{source.label} on {source.arch}: {missing} of {size} bytes of {name} were never written")
        codes: Tensor = memory.tensor(params.codes, (m, columns), torch.uint8)
        scales: Tensor = memory.tensor(params.scales, (m, groups), torch.float32)
    return codes.view(*x.shape[:-1], columns), scales.view(*x.shape[:-1], groups)


@lru_cache(maxsize=256)
def _built(pair: tuple[Problem, Plan]) -> Kernels:
    return build_all([pair])


def _prepare(
    x: Tensor, packed: PackedWeight, act: str, out_dtype: torch.dtype | None, arch: str | Arch, batch_invariant: bool
) -> tuple[Problem, int]:
    """What to compute and for how many tokens; raises for arguments that do not fit."""
    x_type = checks.NAMES[x.dtype] if act in EIGHT_BITS else act
    out = checks.out_name(x_type, out_dtype)
    checks.check_act(x_type, out)
    checks.check_input(x, packed.layout.k, x_type)
    if x.device.type != "cpu" or packed.units.device.type != "cpu":
        raise BadInput(f"the emulator takes CPU tensors; got x on {x.device}, weights on {packed.units.device}")
    if packed.experts is not None:
        raise BadInput(f"matmul takes one weight (N, K); got {packed.experts} experts")
    checks.check_operands(packed.layout, 8 if act in EIGHT_BITS else 16)
    row = arch_row(arch) if isinstance(arch, str) else arch
    return gemm.problem_of(packed.layout, act, out, row, batch_invariant), math.prod(x.shape[:-1])


def _launch(
    library: Any,
    source: Source,
    problem: Problem,
    plan: Plan,
    rows: Tensor,
    x_scales: Tensor | None,
    packed: PackedWeight,
    bias: Tensor | None,
    seed: int,
    gap: int,
) -> Tensor:
    """rows (M, k of the problem) -> y (M, N). What the kernel may touch, and how, is what each allocation says."""
    (m, k), element = rows.shape, rows.element_size()
    geometry = launch_geometry(problem, plan, m)
    if blocks_of(problem, plan)[1]:  # so few that each goes through several tiles
        geometry = replace(geometry, grid_x=min(geometry.grid_x, 2))
    if m > MAX_GRID_Y * plan.tokens:
        raise BadInput(f"one call takes at most {MAX_GRID_Y * plan.tokens} tokens; got {m}: split the batch")
    pitch = max(rows.stride(0) if m > 1 else k, k) + 16 // element * gap
    poison = 0x7F if element == 1 else float("nan")  # whatever lies between the rows; of fp8 it is NaN, too
    span = torch.full(((m - 1) * pitch + k,), poison, dtype=rows.dtype)
    span.as_strided((m, k), (pitch, 1)).copy_(rows)
    with emulator().Memory() as memory:
        params = gemm.Params()
        params.units = memory.alloc("units", packed.units, read_only=True)
        params.channel = None if packed.channel is None else memory.alloc("channel", packed.channel, read_only=True)
        params.bias = None if bias is None else memory.alloc("bias", bias, read_only=True)
        params.x = memory.alloc("x", span, read_only=True, dependent=problem.arch.bulk)
        params.y = memory.alloc(
            "y", problem.out_bytes * m * problem.n, output=True, dependent=problem.arch.bulk
        )  # a number of bytes: poisoned, each to be written once
        params.x_scales = None if x_scales is None else memory.alloc("x_scales", x_scales, read_only=True, dependent=problem.arch.bulk)
        params.x_pitch = element * pitch
        params.m = m
        if plan.family in WGMMA_FAMILIES:
            words = emulator().tensor_map(
                params.x, width=k, height=m, pitch=element * pitch, elem=element, box_width=x_box_k(problem), box_height=plan.tokens, swizzle=128
            )
            params.x_map[:] = struct.unpack("<16Q", words)
        # Two clusters at a time show what blocks do to each other; more only cost stacks. The order is the seed's.
        resident = min(2, geometry.grid_x // geometry.cluster * geometry.grid_y)
        library.launch(
            source,
            bytes(params),
            grid=(geometry.grid_x, geometry.grid_y),
            block=geometry.block,
            smem=geometry.smem,
            cluster=geometry.cluster,
            seed=seed,
            arch=problem.arch.level,
            resident=resident,
        )
        missing = memory.unwritten(params.y)
        if missing:
            raise LaunchError(
                f"{source.label} on {source.arch}: {missing} of {problem.out_bytes * m * problem.n} bytes of y were never written"
            )
        y: Tensor = memory.tensor(params.y, (m, problem.n), checks.DTYPES[problem.out])
        return y

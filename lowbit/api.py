"""Questions and errands of users: what is supported, which plan a layer gets and why, compiling ahead.

Wiring around plan/ and jit/; it must not know how plans are made or what a kernel's text means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import nn

from lowbit.arch import ARCHS, Arch
from lowbit.arch import arch as arch_row
from lowbit.errors import BadInput, BadType, CompileError, MissingKernel, Unsupported
from lowbit.jit.cache import Cache
from lowbit.jit.compile import Compiled
from lowbit.jit.generate import generate
from lowbit.jit.pool import Progress, compile_many
from lowbit.nn.linear import Linear
from lowbit.ops.gemm import device_arch, problem_of, runner
from lowbit.plan import choose as chooser
from lowbit.plan.cost import Cost
from lowbit.plan.plan import Plan, launch_geometry, layout_of
from lowbit.problem import Problem, unsupported
from lowbit.weights import WeightSpec
from lowbit.weights import spec as spec_of

__all__ = ["Explanation", "current_arch", "explain", "parse_arch", "supports", "warmup", "warmup_problems"]

_RUNNERS_UP = 3  # other legal plans shown
_REFUSALS = 4  # illegal plans shown, one a reason


def supports(spec: str | WeightSpec, act: str = "bf16", arch: str | Arch | None = None) -> tuple[str, ...]:
    """Why weights of `spec` cannot be multiplied with `act` on `arch`, a remedy in each reason; () if they can.

    arch: a name such as "sm_90a"; None means the current GPU. On a machine without one, None asks whether any known
    chip can: () if one does, else the shortest list of what is lacking. Raises UnknownSpec, for a name that does not
    parse, and BadInput.
    """
    parsed = spec_of(spec)
    if arch is None and not torch.cuda.is_available():
        answers = [unsupported(parsed, act, row) for row in ARCHS.values()]
        return min(reversed(answers), key=len)
    return unsupported(parsed, act, current_arch() if arch is None else parse_arch(arch))


def current_arch() -> Arch:
    """The chip of PyTorch's current device. Raises BadInput where there is no GPU."""
    if not torch.cuda.is_available():
        raise BadInput(f"there is no GPU here: name the arch, one of {', '.join(ARCHS)}")
    return device_arch(torch.cuda.current_device())


def parse_arch(arch: str | Arch) -> Arch:
    """The row called "sm_90a", or "sm_90a:114" for a chip of 114 SMs: plans depend on their number. Raises BadInput."""
    if isinstance(arch, Arch):
        return arch
    name, colon, sms = arch.partition(":")
    if colon and not (sms.isdecimal() and int(sms)):
        raise BadInput(f"an arch is a name, or name:number of SMs, such as sm_90a:114; got {arch!r}")
    return replace(arch_row(name), sms=int(sms)) if colon else arch_row(name)


def bytes_moved(problem: Problem, m: int) -> int:
    """Weights, scales, x and y of a call with `m` tokens, each once."""
    layout = layout_of(problem)
    channel = 4 * problem.n if layout.has_channel else 0
    return layout.expert_bytes + channel + m * (2 * problem.k + problem.out_bytes * problem.n)


def floor_us(problem: Problem, m: int) -> float:
    """Microseconds that no kernel can be under: `bytes_moved` at the chip's read rate, or its products at the tensor cores' peak."""
    return problem.arch.floor_us(bytes_moved(problem, m), 2 * m * problem.n * problem.k)


@dataclass(frozen=True)
class Explanation:
    """Why a problem is computed as it is for `m` tokens; `str` is meant to be read. Times are estimates, in us."""

    problem: Problem
    m: int
    plan: Plan
    cost: Cost
    others: tuple[tuple[Plan, Cost], ...]
    """The other legal plans, of the lowest estimate first."""
    refused: tuple[tuple[Plan, tuple[str, ...]], ...]
    """Plans that are not legal, with their reasons."""
    compiled: Compiled | None
    """The kernel, from the cache or compiled for this answer; None if neither was possible, see `note`."""
    note: str
    measured: bool = False
    """The plan comes from a file of measured plans, and is not the one of the lowest estimate."""

    @property
    def bytes_moved(self) -> int:
        """Weights, scales, x and y, each once."""
        return bytes_moved(self.problem, self.m)

    @property
    def floor_us(self) -> float:
        """Microseconds that no kernel can be under, by the chip's read rate or its tensor cores."""
        return floor_us(self.problem, self.m)

    @property
    def parts(self) -> dict[str, float]:
        """What the estimate is made of, in microseconds; parts overlap, so they do not add up to it."""
        return {field.name: float(getattr(self.cost, field.name)) for field in fields(self.cost) if field.name != "us"}

    @property
    def why(self) -> str:
        """One sentence on what decided."""
        part = max(self.parts, key=lambda name: self.parts[name])
        largest = f"the estimate's largest part is {part.removesuffix('_us')} ({self.parts[part]:.1f} us)"
        size = chooser.size(self.m)
        what = f"up to {size} tokens" if size == chooser.bucket(self.m) else f"all beyond {chooser.BUCKETS[-2]} tokens"
        if self.problem.batch_invariant:
            parts, slices = self.plan.cut
            kind = "a measured plan" if self.measured else f"the lowest estimate of {len(self.others) + 1} legal plans"
            return f"{kind} of those that cut k in {parts} x {slices} parts, the order of sums of all sizes; {largest}"
        if self.measured:
            return f"measured to be the fastest for {what}; {largest}"
        return f"the lowest estimate of {len(self.others) + 1} legal plans for {what}, compared at {size}; {largest}"

    def __str__(self) -> str:
        problem, arch, geometry = self.problem, self.problem.arch, launch_geometry(self.problem, self.plan, self.m)
        parts = ", ".join(f"{name.removesuffix('_us')} {value:.1f}" for name, value in self.parts.items())
        lines = [
            f"{problem.label}, M = {self.m}, {arch.name} ({arch.chip}, {arch.sms} SMs)",
            f"  plan      {self.plan}",
            f"  why       {self.why}",
            f"  estimate  {self.cost.us:.1f} us ({parts}; parts overlap)",
            f"  floor     {self.floor_us:.2f} us: {self.bytes_moved:,} bytes, {arch.roof}",
            f"  launch    {geometry.grid_x} x {geometry.grid_y} blocks of {geometry.block} threads, "
            f"{geometry.smem:,} bytes of shared memory, clusters of {geometry.cluster}",
            f"  kernel    {self._kernel()}",
        ]
        lines += [
            f"  other     {plan}: {cost.us:.1f} us ({cost.us / self.cost.us:.2f}x)"
            for plan, cost in self.others[:_RUNNERS_UP]
        ]
        lines += [f"  refused   {plan}: {'; '.join(reasons)}" for plan, reasons in self._telling_refusals()]
        return "\n".join(lines)

    def _kernel(self) -> str:
        kernel = self.compiled
        if kernel is None:
            return f"not compiled: {self.note}"
        return f"{kernel.report}, compiled in {kernel.seconds:.2f} s by {kernel.compiler}"

    def _telling_refusals(self) -> list[tuple[Plan, tuple[str, ...]]]:
        """One refused plan per kind of reason, numbers apart."""
        found: dict[str, tuple[Plan, tuple[str, ...]]] = {}
        for plan, reasons in self.refused:
            found.setdefault("".join(c for c in reasons[0] if not c.isdigit()), (plan, reasons))
        return list(found.values())[:_REFUSALS]


def explain(
    layer: Linear | Problem,
    m: int,
    arch: str | Arch | None = None,
    *,
    compiled: bool = True,
    cache: Cache | None = None,
) -> Explanation:
    """The plan of `layer` for `m` tokens (M >= 1): why, the alternatives, the kernel, bytes moved and their floor.

    arch: default the layer's GPU (a Problem's own); a layer on the CPU needs the current GPU or a name. With
    `compiled=False` the kernel is looked up in the cache only. Raises BadInput, BadType; Unsupported if nothing can
    compute it.
    """
    if not isinstance(m, int) or m < 1:
        raise BadInput(f"m must be a whole number of at least 1; got {m!r}")
    problem = _problem(layer, arch)
    choice = chooser.explain(problem, m)
    kernel, note = _kernel(problem, choice.plan, cache or Cache(), compiled)
    return Explanation(problem, m, choice.plan, choice.cost, choice.others, choice.rejected, kernel, note, choice.measured)


def _problem(layer: Linear | Problem, arch: str | Arch | None) -> Problem:
    if isinstance(layer, Problem):
        return layer if arch is None else replace(layer, arch=parse_arch(arch))
    if not isinstance(layer, Linear):
        raise BadType(f"explain takes a lowbit.Linear or a Problem; got {type(layer).__name__}")
    if arch is not None:
        row = parse_arch(arch)
    else:
        row = device_arch(layer.units.device.index) if layer.units.is_cuda else current_arch()
    return problem_of(layer.layout, layer.act, layer.out, row, layer.batch_invariant)


def _kernel(problem: Problem, plan: Plan, cache: Cache, compile_it: bool) -> tuple[Compiled | None, str]:
    source = generate(problem, plan)
    if not compile_it:
        return cache.get(source), "it is not in the cache"
    try:
        return cache.get_or_compile(source), ""
    except (Unsupported, MissingKernel, CompileError) as error:
        return None, str(error)


def warmup(
    model: nn.Module,
    max_m: int = 8192,
    progress: Progress | None = None,
    *,
    archs: Sequence[str | Arch] = (),
    directory: str | Path | None = None,
) -> tuple[Compiled, ...]:
    """Compile every kernel that the lowbit layers of `model` need for 1 <= M <= max_m, in parallel processes.

    model: a Linear or any module that holds some. Without `archs`, kernels are for the GPUs the layers are on, and are
    loaded. With `archs` ("sm_90a", or "sm_90a:114" for a chip of 114 SMs) they are only compiled, which needs no GPU.
    directory: the cache they go to, to be shipped and named by LOWBIT_CACHE; default, the usual one. progress(done,
    all, label) is called in this thread. Raises BadInput, CompileError, Unsupported.
    """
    if not isinstance(model, nn.Module):
        raise BadType(f"warmup takes a module; got {type(model).__name__}")
    if isinstance(archs, str):
        raise BadType(f"archs is a list of names; got the text {archs!r}: give [{archs!r}]")
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    if not layers:
        raise BadInput(f"{type(model).__name__} has no lowbit.Linear in it: quantise its layers first")
    on_cpu = [layer for layer in layers if not layer.units.is_cuda]
    if not archs and on_cpu:
        raise BadInput(
            f"{len(on_cpu)} of {len(layers)} layers are on the CPU: "
            "move them to the GPU, or name the archs to compile for"
        )
    problems = [_problem(layer, arch) for layer in layers for arch in (archs or (None,))]
    found = warmup_problems(problems, max_m, progress, directory)
    if not archs and directory is None:
        for layer in layers:
            layout, index = layer.layout.natural, layer.units.device.index
            runner(layout.spec, layout.n, layout.k, layer.act, layer.out, index, layer.batch_invariant).warm(max_m)
    return found


def warmup_problems(
    problems: Sequence[Problem],
    max_m: int = 8192,
    progress: Progress | None = None,
    directory: str | Path | None = None,
) -> tuple[Compiled, ...]:
    """As `warmup` for bare problems: every kernel for 1 <= M <= max_m, equal ones once; compiled, not loaded."""
    if max_m < 1:
        raise BadInput(f"max_m must be at least 1; got {max_m}")
    sizes = [size for size in chooser.BUCKETS if size <= chooser.bucket(max_m)]
    sources = (generate(problem, chooser.choose(problem, size)) for problem in problems for size in sizes)
    unique = {source.key: source for source in sources}
    cache = Cache() if directory is None else Cache(Path(directory))
    if directory is not None and cache.writable != Path(directory):
        raise BadInput(f"kernels cannot be written to {directory}: name a folder that can be")
    return tuple(compile_many(list(unique.values()), progress=progress, cache=cache))

"""Which of many plans is the fastest on the GPU here, for one layer and number of tokens.

Knows how to run one plan and whom to try; it must not know what becomes of the answer (plan/store.py). Cold weights and one CUDA graph, as in
bench.py; a plan whose output is wrong is an error, not a slow plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from lowbit.errors import CompileError, LaunchError, LowbitError
from lowbit.jit.cache import Cache
from lowbit.jit.compile import Compiled
from lowbit.jit.generate import generate
from lowbit.jit.pool import compile_many
from lowbit.jit.source import Source
from lowbit.layout.pack import Layout, pack
from lowbit.ops.gemm import Runner
from lowbit.plan.choose import ranked
from lowbit.plan.plan import Plan
from lowbit.problem import Problem
from lowbit.quantize import quantize
from lowbit.testing.timing import graph_us, num_copies

REPLAYS, FINAL_REPLAYS = 5, 15
_FINALISTS = 4
_ERROR = 0.01  # relative, of the whole output: 16-bit rounding is 0.002

Times = Callable[[Sequence[Plan], int], list[float]]
"""Microseconds of plans, by the median of so many replays."""


@dataclass(frozen=True)
class Found:
    """What was measured for one problem and bucket."""

    problem: Problem
    tokens: int
    estimated: Plan
    """What is chosen without measuring,"""
    estimated_us: float
    """and how long it takes."""
    plan: Plan
    us: float
    tried: int


def fastest(problem: Problem, tokens: int, most: int, times: Times) -> Found:
    """Try the `most` plans of the lowest estimates once, the best of them and the first again; the fastest of those wins."""
    plans = [plan for plan, _ in ranked(problem, tokens)[:most]]
    first = times(plans, REPLAYS)
    if not min(first) < math.inf:
        raise LowbitError(f"none of {len(plans)} plans for {problem.label}, {tokens} tokens, could be compiled and launched")
    order = sorted(range(len(plans)), key=lambda i: first[i])[:_FINALISTS]
    finalists = list(dict.fromkeys([plans[0], *(plans[i] for i in order)]))
    final = times(finalists, FINAL_REPLAYS)
    best = min(range(len(finalists)), key=lambda i: final[i])
    return Found(problem, tokens, plans[0], final[0], finalists[best], final[best], len(plans))


def _compiled(sources: Sequence[Source]) -> list[Compiled | None]:
    """In parallel, into a cache that is gone afterwards; None for what no compiler takes, which is no reason to end hours of measuring."""
    with TemporaryDirectory() as folder:
        cache = Cache(Path(folder))
        with suppress(CompileError):
            compile_many(sources, cache=cache)
        return [cache.get(source) for source in sources]


class OnePlan(Runner):
    """A runner that has no choice."""

    def __init__(self, layout: Layout, act: str, index: int, plan: Plan, compiled: Compiled) -> None:
        super().__init__(layout, act, act, index)
        self._only = plan, compiled

    def _kernel(self, m: int) -> tuple[Plan, Compiled]:
        return self._only


class Bench:
    """One layer with random weights on a GPU, many times over so that they are cold."""

    def __init__(self, layout: Layout, act: str, index: int, x_dtype: torch.dtype) -> None:
        self.layout, self.act, self.index = layout, act, index
        device = torch.device("cuda", index)
        self._random = torch.Generator(device).manual_seed(0)
        weight = torch.randn(layout.n, layout.k, device=device, generator=self._random) * 0.05
        qw = quantize(weight, layout.spec)
        packed = pack(qw)
        self._w = qw.dequantize()
        self._channel = packed.channel
        self._units = [packed.units.clone() for _ in range(num_copies(packed.units.nbytes))]
        self._x_dtype = x_dtype

    def times(self, problem: Problem, tokens: int, plans: Sequence[Plan], replays: int) -> list[float]:
        """Of calls with `tokens` tokens, infinite for a plan that does not compile or launch. LowbitError if a result is wrong."""
        x = torch.randn(tokens, self.layout.k, device=self._w.device, generator=self._random).to(self._x_dtype)
        want = x.float() @ self._w.T
        found = []
        for plan, compiled in zip(plans, _compiled([generate(problem, plan) for plan in plans]), strict=True):
            runner = compiled and OnePlan(self.layout, self.act, self.index, plan, compiled)
            found.append(self._us(runner, x, want, replays) if runner else math.inf)
        return found

    def _us(self, runner: OnePlan, x: Tensor, want: Tensor, replays: int) -> float:
        try:
            y = runner(x, self._units[0], self._channel, None)
        except LaunchError:
            return math.inf
        error = float((y.float() - want).norm() / want.norm())
        if not error <= _ERROR:
            what = f"{runner.problem.label}, {len(x)} tokens, {runner._only[0]}"
            raise LowbitError(f"wrong numbers, relative error {error:.3g}, from {what}; please report it")
        return graph_us([partial(runner, x, units, self._channel, None) for units in self._units], replays)

"""Which plan a layer uses for how many tokens, and why.

Enumerates, filters, scores, explains; a pure function of the problem and of files that are named, so that every rank and every run choose alike.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from lowbit.errors import BadInput, Unsupported
from lowbit.plan import store
from lowbit.plan.candidates import BUCKETS, LAST_M, bucket, candidates, rejected
from lowbit.plan.cost import Cost, estimate
from lowbit.plan.plan import FAMILIES, Plan, illegal
from lowbit.problem import Problem

__all__ = ["BUCKETS", "MAX_GRID_Y", "Choice", "bucket", "choose", "explain"]

MAX_GRID_Y = 65535
_MEASURED = 0.92  # how long a measured plan takes against the lowest estimate's (docs/notes/2026-12-01-tuning.md)


@dataclass(frozen=True)
class Choice:
    """The plan for a bucket of M, and the others by their estimates."""

    plan: Plan
    cost: Cost
    others: tuple[tuple[Plan, Cost], ...]
    rejected: tuple[tuple[Plan, tuple[str, ...]], ...]
    measured: bool
    """It comes from a file of measured plans, and is not the one of the lowest estimate."""


def choose(problem: Problem, m: int) -> Plan:
    """The plan for `m` tokens (M >= 1): one that was measured (store.py), else the one of the lowest estimate.

    Raises Unsupported with the reasons if nothing can compute the problem.
    """
    return _choose(problem, bucket(m), os.environ.get("LOWBIT_PLAN", ""), os.environ.get("LOWBIT_TUNED", ""))


def explain(problem: Problem, m: int) -> Choice:
    """As `choose`, with the estimates of every legal plan for just `m` tokens, and the reasons against the others."""
    plans, plan = [plan for plan, _ in ranked(problem, m)], choose(problem, m)
    costs = {p: estimate(problem, p, m) for p in (plan, *plans)}
    others = sorted(((p, costs[p]) for p in plans if p != plan), key=lambda pair: pair[1].us)
    refused = rejected(problem, bucket(m), os.environ.get("LOWBIT_PLAN", ""))
    return Choice(plan, costs[plan], tuple(others), tuple(refused), plan != plans[0])


def ranked(problem: Problem, m: int) -> Sequence[tuple[Plan, Cost]]:
    """Every legal plan with its estimate, the lowest first, whatever was measured."""
    return _ranked(problem, bucket(m), os.environ.get("LOWBIT_PLAN", ""), os.environ.get("LOWBIT_TUNED", ""))


@lru_cache(maxsize=4096)
def _choose(problem: Problem, m: int, forced: str, tuned: str) -> Plan:
    files = None if forced else tuned
    plans = _measured(problem, m, files)
    if problem.batch_invariant and plans:
        cut = _invariant_cut(problem, files)
        plans = [plan for plan in plans if plan.cut == cut]
    return plans[0] if plans else _ranked(problem, m, forced, tuned)[0][0]


def _measured(problem: Problem, m: int, tuned: str | None) -> list[Plan]:
    """The plan measured for a bucket, and where one order of sums is asked for the same with others; none without files (None)."""
    found = None if tuned is None else store.find(problem, m, tuned)
    if not found or found.family != "stream" or not problem.batch_invariant:
        return [found] if found else []
    orders = [slices for slices in range(1, found.k_warps + 1) if found.k_warps % slices == 0]
    return [plan for slices in orders if not illegal(problem, plan := replace(found, slices=slices))]


def _ranked(problem: Problem, m: int, forced: str, tuned: str) -> Sequence[tuple[Plan, Cost]]:
    reasons = problem.obstacles
    if reasons:
        raise Unsupported(reasons)
    if forced and forced not in FAMILIES:
        raise BadInput(f"LOWBIT_PLAN must name a kernel family, one of {', '.join(FAMILIES)}; got {forced!r}")
    plans = candidates(problem, m, forced)
    if not plans:
        obstacles = rejected(problem, m, forced)
        why = f"the first obstacle: {'; '.join(obstacles[0][1])}" if obstacles else f"it is not for {m} tokens and more"
        kind, remedy = (f"{forced} plan", ": unset LOWBIT_PLAN") if forced else ("plan", "")
        raise Unsupported([f"no {kind} is legal for {problem.label} on {problem.arch.name}; {why}{remedy}"])
    if problem.batch_invariant:
        cut = _invariant_cut(problem, None if forced else tuned)
        plans = [plan for plan in plans if plan.cut == cut]
        if not plans:  # one family was asked for
            raise Unsupported([f"{forced} has no plan for {m} tokens that cuts k in {cut[0]} x {cut[1]} parts, as all sizes can for "
                               f"{problem.label}: unset LOWBIT_PLAN or use batch_invariant=False"])  # fmt: skip
    scored = [(plan, estimate(problem, plan, size(m))) for plan in plans]
    return sorted(scored, key=lambda pair: pair[1].us)  # stable: ties keep the order of enumeration


def size(m: int) -> int:
    """The number of tokens that plans for m are compared for: the most that share the kernel, LAST_M where there is no end."""
    return LAST_M if bucket(m) == BUCKETS[-1] else bucket(m)


@lru_cache(maxsize=1024)
def _invariant_cut(problem: Problem, tuned: str | None) -> tuple[int, int]:
    """The cut that some enumerated plan of every bucket has, and that costs least for the smallest three."""
    best: list[dict[tuple[int, int], float]] = []
    for m in BUCKETS:
        costs: dict[tuple[int, int], float] = {}
        for plan in candidates(problem, m):
            costs[plan.cut] = min(costs.get(plan.cut, math.inf), estimate(problem, plan, size(m)).us)
        measured = {plan.cut for plan in _measured(problem, m, tuned)} & costs.keys()
        costs |= dict.fromkeys(measured, _MEASURED * min(costs.values(), default=math.inf))
        best.append(costs)
    shared = [cut for cut in best[0] if all(cut in costs for costs in best)]
    if not shared:
        raise Unsupported([f"no one order of sums serves every number of tokens for {problem.label} on {problem.arch.name}: "
                           "use batch_invariant=False"])  # fmt: skip
    return min(shared, key=lambda cut: sum(costs[cut] / min(costs.values()) for costs in best[:3]))

"""Plans that were measured to be the fastest, in files: which problem, how many tokens, which plan.

Knows the file's form; it must not know how plans are measured (testing/tune.py) or compared otherwise (choose.py). Every rank and every run
must choose alike, so no file is searched for: it is the one that LOWBIT_TUNED names, then the one that comes with lowbit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import astuple, fields
from functools import lru_cache
from pathlib import Path

from lowbit.errors import BadInput
from lowbit.plan.candidates import BUCKETS
from lowbit.plan.plan import FAMILIES, Plan, illegal
from lowbit.problem import Problem

SHIPPED = Path(__file__).with_name("tuned.json")  # what `lowbit tune` found on an H200
_FORMAT = 2
_MOST_BYTES = 2**24
_TYPES = [str if field.name == "family" else int for field in fields(Plan)]

Tuned = Mapping[str, Mapping[int, Plan]]
"""`name_of` a problem -> {the largest number of tokens of a bucket: plan}."""


def name_of(problem: Problem) -> str:
    """What plans are kept for: chip and number of SMs, format, activation, shape. The output's type does not matter."""
    return f"{problem.arch.name}:{problem.arch.sms} {problem.spec} {problem.act} {problem.n}x{problem.k}"


def find(problem: Problem, tokens: int, named: str = "") -> Plan | None:
    """The plan measured for a bucket, in the file `named` or in what comes with lowbit, if there is one and it is legal.

    Raises BadInput, also for a plan of the file `named` that is not legal.
    """
    for path in (named, str(SHIPPED)):
        plan = read(path).get(name_of(problem), {}).get(tokens) if path else None
        reasons = illegal(problem, plan) if plan else ()
        if plan is not None and not reasons:
            return plan
        if reasons and path == named and not problem.batch_invariant:  # which may need more registers
            raise BadInput(f"{path}: the plan of {name_of(problem)!r} for {tokens} tokens is not legal: {'; '.join(reasons)}; tune it again")
    return None


@lru_cache(maxsize=16)
def read(path: str) -> Tuned:
    """The content of a file, read once in a process. Raises BadInput."""
    remedy = "name another file, or write one with `lowbit tune`"
    try:
        if not Path(path).is_file():
            raise FileNotFoundError("there is no such file")
        if Path(path).stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        content = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"the tuned plans in {path} cannot be read ({error}): {remedy}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT or not isinstance(content.get("plans"), dict):
        held = f"those of format {content['format']!r}" if isinstance(content, dict) and "format" in content else "something else"
        raise BadInput(f"{path} must hold tuned plans of format {_FORMAT}; it holds {held}: name another file, or have `lowbit tune` write a new one")
    found: dict[str, dict[int, Plan]] = {}
    for name, plans in content["plans"].items():
        if not isinstance(plans, dict) or not plans.keys() <= set(map(str, BUCKETS)):
            sizes = ", ".join(map(str, BUCKETS))
            raise BadInput(f"{path}: plans of a layer are kept by numbers of tokens, {sizes}; got {plans!r:.200} for {name!r:.200}")
        for tokens, values in plans.items():
            if not isinstance(values, list) or [type(value) for value in values] != _TYPES or values[0] not in FAMILIES:
                names = ", ".join(field.name for field in fields(Plan))
                raise BadInput(f"{path}: a plan has {len(_TYPES)} values, {names}; got {values!r:.200} for {name!r:.200}: {remedy}")
            found.setdefault(name, {})[int(tokens)] = Plan(*values)
    return found


def write(path: Path, tuned: Tuned) -> None:
    """Whole or not at all; a line for each problem. Raises BadInput where it cannot be written."""
    lines = []
    for name, plans in sorted(tuned.items()):
        values = {str(tokens): list(astuple(plan)) for tokens, plan in sorted(plans.items())}
        lines.append(f"{json.dumps(name)}: {json.dumps(values, separators=(',', ':'))}")
    path = path.resolve()  # a link stays one
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        draft.write_text(f'{{"format": {_FORMAT}, "plans": {{\n' + ",\n".join(lines) + "\n}}\n", "utf-8")
        draft.replace(path)
    except OSError as error:
        raise BadInput(f"tuned plans cannot be written to {path}: {error}") from error

"""What a benchmark found: rows of figures, ratios between libraries, a summary, and the JSON file that keeps it all.

Arithmetic alone, without PyTorch; it must not know how figures were measured, or how they are shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from lowbit.errors import BadInput, LowbitError

FORMAT = "lowbit bench 1"
"""What a file of results calls itself; the number changes with the meaning of a field."""

FACTS = (
    *("date", "command", "stopped", "versions", "roof", "arch"),
    *("device", "sms", "l2_bytes", "max_clock_mhz", "clock_mhz", "driver"),
)
"""Keys of `Results.facts`; a Meter brings the second line. `stopped` says why a run has fewer rows than it should."""

REGIMES = (("M <= 16", 1, 16), ("16 < M <= 256", 17, 256), ("M > 256", 257, math.inf))
"""Bound by memory, in between, bound by tensor cores: averages over all M would hide which of them is good."""


@dataclass(frozen=True)
class Row:
    """One layer of one provider with `m` tokens. Times in microseconds; without one, `fault` says why."""

    provider: str
    spec: str  # of the weights; the activation's name where they are not quantised
    act: str
    n: int
    k: int
    m: int
    moved_bytes: int  # weights, scales, x and y, each once
    floor_us: float
    us: float | None = None
    error: float | None = None  # relative Frobenius, against the float32 product with the unquantised weight
    fault: str = ""
    layer: str = ""  # what models call it

    def check(self) -> None:
        """Raises ValueError for what no measurement gives: a file may be damaged."""
        texts = (self.provider, self.spec, self.act, self.fault, self.layer)
        counts = (self.n, self.k, self.m, self.moved_bytes)
        times = [v for v in (self.floor_us, self.us, self.error) if v is not None]
        if not all(isinstance(t, str) for t in texts) or not all(isinstance(c, int) and c > 0 for c in counts):
            raise ValueError(f"a row needs texts and positive counts; got {self}")
        if not all(isinstance(v, (int, float)) and math.isfinite(v) and v >= 0 for v in times) or self.us == 0 or not self.floor_us:
            raise ValueError(f"times and errors are positive numbers; got {self}")

    @property
    def quantised(self) -> bool:
        return self.spec != self.act

    @property
    def tflops(self) -> float | None:
        return None if self.us is None else 2 * self.m * self.n * self.k / (self.us * 1e6)

    @property
    def gbs(self) -> float | None:
        return None if self.us is None else self.moved_bytes / (self.us * 1e3)

    @property
    def share(self) -> float | None:
        """Of the floor: 1 is the best that is possible."""
        return None if self.us is None else self.floor_us / self.us

    @property
    def where(self) -> str:
        return f"{self.n}x{self.k} {self.spec} M = {self.m}"


@dataclass(frozen=True)
class Summary:
    """One provider in one regime. `share`: of the floor; `speed`: of lowbit as a multiple of the provider's. Geometric means."""

    regime: str
    provider: str
    cells: int
    share: float
    share_worst: float
    share_worst_at: str
    speed: float | None = None  # None for lowbit itself, and where it has no figure to compare
    speed_worst: float | None = None
    speed_worst_at: str = ""
    speed_cells: int = 0


@dataclass(frozen=True)
class Results:
    """What a run measured, and everything needed to judge and repeat it."""

    facts: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def providers(self) -> list[str]:
        """lowbit first, then as measured."""
        return sorted(dict.fromkeys(row.provider for row in self.rows), key=lambda name: name != "lowbit")

    @property
    def specs(self) -> list[str]:
        return list(dict.fromkeys(row.spec for row in self.rows if row.provider == "lowbit"))

    @property
    def faults(self) -> list[tuple[str, str]]:
        """(what, why) of rows without a time, those of one layer together."""
        found: dict[tuple[str, str, str], list[str]] = {}
        for row in self.rows:
            if row.fault:
                found.setdefault((row.provider, f"{row.n}x{row.k} {row.spec}", row.fault), []).append(str(row.m))
        return [(f"{name}, {where}, M = {', '.join(ms)}", fault) for (name, where, fault), ms in found.items()]

    def rivals_of(self, row: Row) -> dict[str, Row]:
        """Provider -> its row for the same product; a provider that does not quantise has one for all formats."""
        return {
            other.provider: other
            for other in self.beside(row)
            if other.provider != row.provider and (other.spec == row.spec or not other.quantised)
        }

    def beside(self, row: Row) -> Sequence[Row]:
        """All rows of the same shape and number of tokens, in any format."""
        return self._cells[row.n, row.k, row.m]

    @cached_property
    def _cells(self) -> dict[tuple[int, int, int], list[Row]]:
        found: dict[tuple[int, int, int], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.n, row.k, row.m), []).append(row)
        return found

    def speeds(self, row: Row) -> dict[str, float]:
        """Provider -> how many times as fast `row` is."""
        rivals = self.rivals_of(row)
        return {name: rival.us / row.us for name, rival in rivals.items() if rival.us is not None and row.us}

    def summary(self) -> list[Summary]:
        """Per regime and provider, over the rows that have a time."""
        found = []
        for regime, low, high in REGIMES:
            for name in self.providers:
                rows = [r for r in self.rows if r.provider == name and low <= r.m <= high and r.share]
                if not rows:
                    continue
                shares = [(row.share or 0.0, row.where) for row in rows]
                speeds = [] if name == "lowbit" else [
                    (speed, row.where) for row in self.rows if row.provider == "lowbit" and low <= row.m <= high
                    for other, speed in self.speeds(row).items() if other == name
                ]  # fmt: skip
                worst, at = min(speeds, default=(None, ""))
                found.append(Summary(
                    regime, name, len(rows), geomean([s for s, _ in shares]), *min(shares),
                    geomean([s for s, _ in speeds]) if speeds else None, worst, at, len(speeds),
                ))  # fmt: skip
        return found

    def to_json(self) -> str:
        """All of it, with derived figures for other programs to read."""
        rows = []
        for row in self.rows:
            derived = {"tflops": row.tflops, "gbs": row.gbs, "share": row.share, "speed_against": self.speeds(row)}
            rows.append({**asdict(row), **derived})
        summary = [asdict(line) for line in self.summary()]
        return json.dumps({"format": FORMAT, **self.facts, "summary": summary, "rows": rows}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, path: Path) -> Results:
        """The results that `to_json` wrote to a file. Raises BadInput for any other."""
        try:
            found = json.loads(path.read_text("utf-8"))
            if found["format"] != FORMAT:
                raise BadInput(
                    f"{path} has the format {found['format']!r}; this version reads {FORMAT!r}: measure again"
                )
            names = [field.name for field in fields(Row)]
            rows = tuple(Row(**{name: row[name] for name in names}) for row in found["rows"])
            for row in rows:
                row.check()
            facts = {name: value for name, value in found.items() if name not in ("format", "rows", "summary")}
            if set(FACTS) - set(facts):
                raise KeyError(*sorted(set(FACTS) - set(facts))[:1])
            if not isinstance(facts["versions"], dict) or not {"lowbit", "torch"} <= facts["versions"].keys():
                raise ValueError("versions must name lowbit and torch")
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, LowbitError):
                raise
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise BadInput(f"results are a file that `lowbit bench --json` wrote; {path}: {what}") from error
        return cls(facts, rows)


def geomean(values: Sequence[float]) -> float:
    """Of at least one positive number."""
    return math.exp(sum(map(math.log, values)) / len(values))

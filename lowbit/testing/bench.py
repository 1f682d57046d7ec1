"""Times layers of several libraries side by side, and keeps what came out: rows, ratios, a summary, one JSON file.

Knows the protocol and the arithmetic on its figures; it must not know how a library builds a layer, or how results are shown.

Protocol: a layer's weights are cold, since so many copies of it are called in turn that together they are twenty times the L2 (at
least 2, at most 256 copies); all calls sit in one CUDA graph; inputs are random normal numbers; a figure is the median over replays,
in microseconds per call. Every output is compared with the float32 product of the unquantised weight before it is timed.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import api
from lowbit.arch import Arch
from lowbit.errors import BadInput, LowbitError
from lowbit.jit.compile import find_compiler
from lowbit.layout.pack import Layout
from lowbit.ops.gemm import DTYPES, problem_of
from lowbit.problem import check
from lowbit.quantize import quantize
from lowbit.testing.rivals import Lowbit, Provider, versions
from lowbit.testing.timing import graph_us, num_copies
from lowbit.weights import WeightSpec

FORMAT = "lowbit bench 1"
"""What a file of results calls itself; the number changes with the meaning of a field."""

REGIMES = (("M <= 16", 1, 16), ("16 < M <= 256", 17, 256), ("M > 256", 257, math.inf))
"""Bound by memory, in between, bound by tensor cores: averages over all M would hide which of them is good."""

_ROUNDING = 0.01  # relative error that 16-bit inputs and outputs may add: ample for any order of sums


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
            facts = {name: value for name, value in found.items() if name not in ("format", "rows", "summary")}
            if set(FACTS) - set(facts):
                raise KeyError(*sorted(set(FACTS) - set(facts))[:1])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, LowbitError):
                raise
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise BadInput(f"results are a file that `lowbit bench --json` wrote; {path}: {what}") from error
        return cls(facts, rows)


def geomean(values: Sequence[float]) -> float:
    """Of at least one positive number."""
    return math.exp(sum(map(math.log, values)) / len(values))


# ---- where it is measured -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meter:
    """A place to run layers, and its clock; tests bring one that needs no GPU."""

    device: torch.device
    arch: Arch
    l2_bytes: int
    us: Callable[[Sequence[Callable[[], object]]], float]
    facts: Mapping[str, Any]


FACTS = (
    *("date", "command", "stopped", "versions", "roof", "arch"),
    *("device", "sms", "l2_bytes", "max_clock_mhz", "clock_mhz", "driver"),
)
"""Keys of `Results.facts`; a Meter brings the second line. `stopped` says why a run has fewer rows than it should."""


def gpu_meter() -> Meter:
    """PyTorch's current GPU. Raises BadInput where there is none."""
    if not torch.cuda.is_available():
        raise BadInput(
            "measuring needs an NVIDIA GPU, and torch.cuda.is_available() is False; "
            "--report FILE.json shows what was measured elsewhere"
        )
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    kilohertz = getattr(properties, "clock_rate", None)
    facts = {
        "device": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "max_clock_mhz": kilohertz and kilohertz / 1000,
        "clock_mhz": _clock_mhz(),
        "driver": _driver(),
    }
    return Meter(torch.device("cuda", index), api.current_arch(), properties.L2_cache_size, graph_us, facts)


def _clock_mhz() -> int | None:
    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # it needs a package that PyTorch does not bring, and a driver that answers
        return None


def _driver() -> str | None:
    """The version of the kernel driver, where Linux shows it."""
    try:
        found = re.search(r"Kernel Module\D*([\d.]+)", Path("/proc/driver/nvidia/version").read_text("utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def facts_of(meter: Meter, providers: Sequence[Provider], command: str) -> dict[str, Any]:
    """What to keep beside the rows: when, where, by which command, with which versions, against which floor."""
    try:
        compiler = find_compiler().name
    except LowbitError:
        compiler = None
    libraries = {
        "lowbit": Lowbit().version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "compiler": compiler,
    }
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "stopped": "",
        "versions": {**libraries, "python": platform.python_version(), **versions(providers)},
        "roof": meter.arch.roof,
        "arch": meter.arch.name,
        **meter.facts,
    }


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What to measure: every shape (N, K) with every format and number of tokens."""

    shapes: Mapping[tuple[int, int], str]
    """(N, K) -> what models call the layer, or nothing."""
    specs: Sequence[WeightSpec]
    act: str
    ms: Sequence[int]

    def check(self, arch: Arch) -> None:
        """Raises for formats and shapes that lowbit cannot multiply on that chip, before anything runs."""
        for spec in self.specs:
            check(spec, self.act, arch)
            quantize(torch.linspace(-1, 1, 256).view(2, 128), spec)  # unsigned integers need zero points
            for n, k in self.shapes:
                Layout(spec, n, k)

    def num_rows(self, rivals: Sequence[Provider]) -> int:
        """How many rows `measure` will yield."""
        quantised = sum(rival.supports(spec) for rival in (Lowbit(), *rivals) if rival.quantised for spec in self.specs)
        return (quantised + sum(not rival.quantised for rival in rivals)) * len(self.shapes) * len(self.ms)


def measure(work: Work, rivals: Sequence[Provider], meter: Meter) -> Iterator[list[Row]]:
    """The rows of one provider, format and shape at a time, so that what a long run has found can be kept.

    A provider that cannot build or run a layer, or computes something else, gets rows with a `fault`. What remains is PyTorch's
    RuntimeError, where the inputs do not fit in memory or a provider has left the GPU unusable.
    """
    dtype = DTYPES[work.act]
    for (n, k), layer in work.shapes.items():
        random = torch.Generator(meter.device).manual_seed(0)
        weight = torch.randn(n, k, device=meter.device, dtype=dtype, generator=random) * 0.05
        xs = [torch.randn(m, k, device=meter.device, dtype=dtype, generator=random) for m in work.ms]
        for rival in rivals:
            if not rival.quantised:  # once for all formats; which one it is given means nothing
                yield _rows(rival, work.specs[0], work.act, weight, xs, [_limit(0.0)] * len(xs), meter, layer)
        for spec in work.specs:
            limits = _limits(weight, spec, xs)
            for provider in (Lowbit(), *rivals):
                if provider.quantised and provider.supports(spec):
                    yield _rows(provider, spec, work.act, weight, xs, limits, meter, layer)


def _blank(provider: Provider, spec: WeightSpec, act: str, n: int, k: int, m: int, arch: Arch, layer: str) -> Row:
    """A row without figures."""
    if provider.quantised:
        moved = api.bytes_moved(problem_of(Layout(spec, n, k), act, act, arch), m)
    else:
        moved = 2 * n * k + 2 * m * (n + k)
    name = str(spec) if provider.quantised else act
    return Row(provider.name, name, act, n, k, m, moved, arch.floor_us(moved, 2 * m * n * k), layer=layer)


def _limits(weight: Tensor, spec: WeightSpec, xs: Sequence[Tensor]) -> list[float]:
    """For each x the error beyond which a provider's output is garbage."""
    rounded = quantize(weight, spec).dequantize().T
    return [_limit(_error(x.float() @ rounded, x, weight)) for x in xs]


def _limit(quantisation_error: float) -> float:
    """Twice the format's own error, for other ways to round and to choose scales; always nearer to it than to 1, what zeros would have."""
    return min(2 * quantisation_error + _ROUNDING, (1 + quantisation_error) / 2)


def _rows(
    provider: Provider,
    spec: WeightSpec,
    act: str,
    weight: Tensor,
    xs: Sequence[Tensor],
    limits: Sequence[float],
    meter: Meter,
    layer: str,
) -> list[Row]:
    """The rows of one layer. Its copies are gone when this returns."""
    n, k = weight.shape
    blanks = [_blank(provider, spec, act, n, k, len(x), meter.arch, layer) for x in xs]
    weight_bytes = weight.numel() * (spec.value.bits if provider.quantised else 16) // 8
    try:
        first = provider.build(spec, act, weight)
        copies = num_copies(max(1, weight_bytes), meter.l2_bytes)
        layers = [first, *(copy.deepcopy(first) for _ in range(copies - 1))]
    except Exception as error:  # a provider's failure is a result
        return [replace(row, fault=f"not built: {words(error)}") for row in blanks]
    finally:
        _free(meter)
    try:
        todo = zip(blanks, xs, limits, strict=True)
        return [_row(row, layers, weight, x, limit, meter) for row, x, limit in todo]
    finally:
        del first, layers
        _free(meter)


def _row(row: Row, layers: Sequence[nn.Module], weight: Tensor, x: Tensor, limit: float, meter: Meter) -> Row:
    try:
        error = _error(layers[0](x), x, weight)
        if not math.isfinite(error):
            return replace(row, fault="wrong: the output is not finite")
        if error > limit:
            return replace(row, error=error, fault=f"wrong: relative error {error:.3f}, where {limit:.3f} is the most")
        return replace(row, error=error, us=meter.us([partial(layer, x) for layer in layers]))
    except Exception as error:
        return replace(row, fault=f"not run: {words(error)}")


def _error(y: Tensor, x: Tensor, weight: Tensor) -> float:
    """Relative Frobenius error of y (M, N) against the float32 product."""
    exact = x.float() @ weight.float().T
    return float((y.float() - exact).norm() / exact.norm())


def words(error: Exception) -> str:
    """One line, short enough for a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else f"{type(error).__name__} without a message"


def _free(meter: Meter) -> None:
    """Give the memory of layers that nobody holds any more to the next provider."""
    if meter.device.type == "cuda":
        gc.collect()  # some libraries' layers hold each other
        with suppress(RuntimeError):  # after an illegal access everything fails: the next provider's rows will say so
            torch.cuda.empty_cache()

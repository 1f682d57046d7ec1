"""Times layers of several libraries side by side, one row of figures for each.

Knows the protocol; it must not know how a library builds a layer, or what becomes of the rows (results.py).

Protocol: a layer's weights are cold, since so many copies of it are called in turn that together they are twenty times the L2 (at
least 2, at most 256 copies); all calls sit in one CUDA graph; inputs are random normal numbers; a figure is the median over replays,
in microseconds per call. Every output is compared with the float32 product of the unquantised weight before it is timed.
"""

from __future__ import annotations

import copy
import gc
import math
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit import api
from lowbit.arch import Arch
from lowbit.errors import BadInput, LowbitError
from lowbit.jit.compile import find_compiler
from lowbit.layout.pack import Layout
from lowbit.ops.checks import DTYPES
from lowbit.ops.gemm import problem_of
from lowbit.problem import check
from lowbit.quantize import quantize
from lowbit.testing.results import Row
from lowbit.testing.rivals import Lowbit, Provider, versions
from lowbit.testing.timing import graph_us, num_copies
from lowbit.weights import WeightSpec

_ROUNDING = 0.01  # relative error that 16-bit inputs and outputs may add: ample for any order of sums


@dataclass(frozen=True)
class Meter:
    """A place to run layers, and its clock; tests bring one that needs no GPU."""

    device: torch.device
    arch: Arch
    l2_bytes: int
    us: Callable[[Sequence[Callable[[], object]]], float]
    facts: Mapping[str, Any]


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


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of the kernel driver, where Linux shows it."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", path.read_text("utf-8"))
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

"""Plots of `lowbit bench`, as PNG: time and share of the floor over the number of tokens, a panel for each shape.

Knows matplotlib, which is optional; it must not know files or how anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit.testing.results import Results, Row

_COLOURS = {"lowbit": "#0b6bcb", "torch": "#8a8f98", "humming": "#e8590c"}
_MORE_COLOURS = ("#2b8a3e", "#9c36b5", "#c92a2a", "#0c8599")
_MARKERS = {"lowbit": "o", "torch": "s", "humming": "^"}
_COLUMNS = 3


def draw(results: Results) -> dict[str, bytes]:
    """File name -> PNG: two figures per weight format that has a time."""
    images = {}
    for spec in results.specs:
        rows = [row for row in results.rows if row.us and (row.spec == spec or not row.quantised)]
        if not any(row.spec == spec for row in rows):
            continue
        images[f"time_{spec}.png"] = _figure(results, spec, rows, _time_panel, "Time of one call")
        images[f"share_{spec}.png"] = _figure(results, spec, rows, _share_panel, "Share of each one's own floor")
    return images


def _figure(results: Results, spec: str, rows: list[Row], panel: Callable[..., None], title: str) -> bytes:
    from matplotlib.figure import Figure  # without pyplot: no global state, no window system

    shapes = list(dict.fromkeys((row.n, row.k) for row in rows if row.spec == spec))
    columns = min(_COLUMNS, len(shapes))
    lines = math.ceil(len(shapes) / columns)
    figure = Figure(figsize=(max(6.5, 4.3 * columns), 3.5 * lines + 1.1), dpi=130, layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.12, h_pad=0.1)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    labelled: dict[str, Any] = {}
    for (n, k), ax in zip(shapes, axes, strict=False):
        here = [row for row in rows if (row.n, row.k) == (n, k)]
        panel(ax, results, here)
        ms = sorted({row.m for row in here})
        ax.set_xscale("log", base=2)
        ax.set_xticks(_thinned(ms), [str(m) for m in _thinned(ms)])
        ax.minorticks_off()
        if len(ms) == 1:
            ax.set_xlim(ms[0] / 2, ms[0] * 2)
        ax.set_title(f"N x K = {n} x {k}", fontsize=10)
        ax.set_xlabel("M, tokens", fontsize=9)
        ax.grid(True, which="major", color="#e3e5e8", linewidth=0.8)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        labelled.update(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    for ax in list(axes):
        ax.set_visible(False)  # what is left of the last line
    act = rows[0].act
    figure.suptitle(f"{title}: {spec} x {act} on {results.facts['device']}", fontsize=12)
    labels = sorted(labelled, key=lambda label: label != "lowbit")
    figure.legend(
        [labelled[label] for label in labels], labels, loc="outside lower center", ncols=len(labels), frameon=False
    )
    image = BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _time_panel(ax: Any, results: Results, rows: list[Row]) -> None:
    """Microseconds, with the floor of the quantised weights below them."""
    for name, line in _lines(results, rows):
        ax.plot([row.m for row in line], [row.us for row in line], label=_label(line[0]), **_look(results, name))
    floor = sorted({(row.m, row.floor_us) for row in rows if row.quantised})
    ax.plot(*zip(*floor, strict=True), label="floor, quantised weights", color="#222", linestyle="--", linewidth=1.1)
    ax.set_yscale("log")
    ax.set_ylabel("time, us", fontsize=9)
    times = [row.us or 0.0 for row in rows] + [us for _, us in floor]
    low, high = min(times) / 1.4, max(times) * 1.4
    ticks = _decimal_ticks(low, high)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_ylim(low, high)


def _share_panel(ax: Any, results: Results, rows: list[Row]) -> None:
    """Percent of each provider's own floor."""
    for name, line in _lines(results, rows):
        ax.plot(
            [row.m for row in line],
            [100 * (row.share or 0) for row in line],
            label=_label(line[0]),
            **_look(results, name),
        )
    ax.axhline(100, color="#222", linestyle="--", linewidth=1.1, label="floor")
    ax.set_ylim(0, max(105.0, *(103 * (row.share or 0) for row in rows)))
    ax.set_ylabel("share of floor, %", fontsize=9)


def _lines(results: Results, rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Each provider's rows by M, lowbit's last so that it lies on top."""
    found = [
        (name, sorted((r for r in rows if r.provider == name), key=lambda r: r.m))
        for name in reversed(results.providers)
    ]
    return [(name, line) for name, line in found if line]


def _label(row: Row) -> str:
    return row.provider if row.quantised else f"{row.provider}, {row.spec} weights"


def _look(results: Results, name: str) -> dict[str, Any]:
    place = results.providers.index(name) % len(_MORE_COLOURS)
    colour = _COLOURS.get(name, _MORE_COLOURS[place])
    return {"color": colour, "marker": _MARKERS.get(name, "D"), "markersize": 4, "linewidth": 1.6}


def _thinned(ms: list[int]) -> list[int]:
    """At most eight of them, the first and the last among them, so that labels do not meet."""
    step = math.ceil(len(ms) / 8)
    return sorted({*ms[::-1][::step], ms[0]})


def _decimal_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... within the limits: more of them within a decade, decades alone if there are more than four."""
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if high / low <= 10 else (1, 2, 5) if high / low <= 1e4 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for power in powers for step in steps if low <= (tick := step * 10.0**power) <= high]

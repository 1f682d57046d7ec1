"""Results of `lowbit bench` as text for a terminal, as markdown, and as one HTML page that needs nothing else.

Knows how figures are worded and arranged; it must not know how they were measured, or how images are drawn.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from lowbit.cli.options import table

if TYPE_CHECKING:
    from lowbit.testing.results import Results, Row, Summary

_NOTE = (
    "us: median time of one call, weights cold (copies of the layer called in turn are 20 times the L2), calls in one CUDA graph, "
    "random inputs. floor: the longer of moving weights, scales, x and y once and of the operations, at {roof}. error: relative, "
    "against the float32 product of the unquantised weight."
)


def text(results: Results) -> str:
    """For a terminal: one line per product, each rival's time and how many times as fast lowbit is."""
    rivals = [name for name in results.providers if name != "lowbit"]
    head = ["weights", "N x K", "M", "us", "TFLOP/s", "GB/s", "of floor", "error"]
    named = any(row.layer for row in results.rows)
    lines = [head + [word for name in rivals for word in (f"{name} us", "ratio")] + ["layer"] * named]
    for row in results.rows:
        if row.provider != "lowbit":
            continue
        others, speeds = results.rivals_of(row), results.speeds(row)
        cells = [row.spec, f"{row.n}x{row.k}", str(row.m), _number(row.us, ".2f"), _number(row.tflops, ".1f")]
        cells += [_number(row.gbs, ".0f"), _number(row.share, ".0%"), _number(row.error, ".4f")]
        for name in rivals:
            us = others[name].us if name in others else None
            cells += [_number(us, ".2f"), _number(speeds.get(name), ".2f", "x")]
        lines.append(cells + [row.layer] * named)
    parts = ["\n".join(_where(results)), table(lines, left=2), "\n".join(_sentence(line) for line in results.summary())]
    faults = [f"no time: {what}: {why}" for what, why in results.faults]
    notes = _NOTE.format(roof=results.facts["roof"])
    return "\n\n".join(part for part in (*parts, "\n".join(faults), notes) if part)


def markdown(results: Results) -> str:
    """A table per weight format, shapes by numbers of tokens; what it takes to repeat the run."""
    facts = results.facts
    rival = next((r.provider for r in results.rows if r.provider != "lowbit" and r.quantised), None)
    rival = rival or next((name for name in results.providers if name != "lowbit"), None)
    beside = f"the speed against {rival} measured beside it (above 1: lowbit is faster) and " if rival else ""
    lines = [
        f"# Speed of lowbit {facts['versions']['lowbit']}",
        "",
        *(f"{line}  " for line in _where(results)),
        "",
        f"```\n{facts['command']}\n```",
        "",
        f"{_NOTE.format(roof=facts['roof'])}",
        "",
        "## Summary",
        "",
        *_markdown_table(_SUMMARY_HEAD, [_summary_cells(line) for line in results.summary()]),
        "",
        "Geometric means, in brackets the worst cell.",
    ]
    for spec in results.specs:
        rows = [row for row in results.rows if row.provider == "lowbit" and row.spec == spec]
        lines += [
            "",
            f"## {spec} x {rows[0].act}",
            "",
            f"Microseconds; in brackets {beside}the share of the floor.",
            "",
        ]
        lines += _grid(results, rows, rival)
    for name in results.providers:
        rows = [row for row in results.rows if row.provider == name and not row.quantised]
        if rows:
            title = f"## {name}, weights not quantised ({rows[0].act})"
            lines += [
                "",
                title,
                "",
                "Microseconds; in brackets the share of its floor.",
                "",
                *_grid(results, rows, None),
            ]
    if results.faults:
        lines += ["", "## Without a time", "", *(f"* {what}: {why}" for what, why in results.faults)]
    return "\n".join(lines) + "\n"


def html(results: Results, images: Mapping[str, bytes]) -> str:
    """One page with everything in it: summary, `images` (name -> PNG), all rows, versions."""
    facts = results.facts
    flat = {name: value for name, value in facts.items() if name != "versions"} | facts["versions"]
    head = [
        "provider",
        "weights",
        "N x K",
        "layer",
        "M",
        "us",
        "TFLOP/s",
        "GB/s",
        "floor us",
        "of floor",
        "error",
        "lowbit is",
    ]
    body = [_row_cells(results, row) for row in results.rows]
    pictures = [
        f'<img alt="{escape(name)}" src="data:image/png;base64,{b64encode(image).decode()}">'
        for name, image in images.items()
    ]
    faults = [f"<li>{escape(what)}: {escape(why)}</li>" for what, why in results.faults]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f"<title>lowbit bench, {escape(str(facts['device']))}</title><style>{_STYLE}</style></head><body>",
            f"<h1>Speed of lowbit {escape(facts['versions']['lowbit'])} on {escape(str(facts['device']))}</h1>",
            *(f"<p>{escape(line)}</p>" for line in _where(results)),
            f"<p>{escape(_NOTE.format(roof=facts['roof']))}</p>",
            "<h2>Summary</h2>",
            "<p>Geometric means, in brackets the worst cell. A ratio above 1 means that lowbit is faster.</p>",
            _html_table(_SUMMARY_HEAD, [_summary_cells(line) for line in results.summary()], left=2),
            "<h2>Plots</h2>" if pictures else "",
            *pictures,
            "<h2>All rows</h2>",
            _html_table(head, body, left=4),
            "<h2>Without a time</h2><ul>" if faults else "",
            *faults,
            "</ul>" if faults else "",
            "<h2>Where and with what</h2>",
            _html_table(["", ""], [[name, _fact(value)] for name, value in flat.items()], left=2),
            "</body></html>\n",
        ]
    )


_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;margin:2em auto;max-width:1200px;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;margin:1em 0}"
    "th,td{padding:3px 10px;text-align:right;border-bottom:1px solid #ddd;white-space:nowrap}"
    ".l{text-align:left}th{background:#f3f3f3;position:sticky;top:0}img{max-width:100%;height:auto;display:block;margin:1.5em 0}"
)


def _where(results: Results) -> list[str]:
    """The machine and the versions, a line each; one more for a run that is not whole."""
    facts = results.facts
    known = {"driver": facts["driver"], **facts["versions"]}
    versions = ", ".join(f"{name} {value}" for name, value in known.items() if value)
    clock = f", up to {facts['max_clock_mhz']:.0f} MHz" if facts["max_clock_mhz"] else ""
    where = f"{facts['device']} ({facts['arch']}), {facts['sms']} SMs{clock}, {facts['date'][:10]}"
    return [where, versions, *([f"INCOMPLETE: {facts['stopped']}"] if facts["stopped"] else [])]


def _sentence(line: Summary) -> str:
    """One line of the summary, for people."""
    own = f"{line.share:.0%} of the floor (worst {line.share_worst:.0%}, {line.share_worst_at}), {line.cells} cells"
    start = f"{line.regime:13} {line.provider:8}"
    if line.speed is None or line.speed_worst is None:
        return f"{start} {own}"
    ratio = (
        f"lowbit is {line.speed:.2f}x (worst {line.speed_worst:.2f}x, {line.speed_worst_at}), {line.speed_cells} cells"
    )
    return f"{start} {own}; {ratio}"


_SUMMARY_HEAD = ["tokens", "provider", "share of floor", "cells", "lowbit is", "cells compared"]


def _summary_cells(line: Summary) -> list[str]:
    share = f"{line.share:.0%} ({line.share_worst:.0%}: {line.share_worst_at})"
    ratio = "-" if line.speed is None else f"{line.speed:.2f}x ({line.speed_worst:.2f}x: {line.speed_worst_at})"
    return [line.regime, line.provider, share, str(line.cells), ratio, str(line.speed_cells or "-")]


def _grid(results: Results, rows: Sequence[Row], rival: str | None) -> list[str]:
    """Shapes by numbers of tokens: `us (ratio, share)`."""
    ms = list(dict.fromkeys(row.m for row in rows))
    found: dict[str, dict[int, str]] = {}
    for row in rows:
        speed = results.speeds(row).get(rival or "")
        notes = ([f"{speed:.2f}x"] if speed else []) + [_number(row.share, ".0%")]
        cell = "-" if row.us is None else f"{_us(row.us)} ({', '.join(notes)})"
        shape = f"{row.n}x{row.k}" + (f" ({row.layer})" if row.layer else "")
        found.setdefault(shape, {})[row.m] = cell
    head = ["N x K", *(f"M = {m}" for m in ms)]
    return _markdown_table(head, [[shape, *(cells.get(m, "-") for m in ms)] for shape, cells in found.items()])


def _row_cells(results: Results, row: Row) -> list[str]:
    """A row of the page's large table; a rival's ends with how many times as fast lowbit is."""
    ratios = []
    for own in results.beside(row):
        speed = results.speeds(own).get(row.provider)
        if own.provider == "lowbit" and speed is not None and row.spec in (own.spec, own.act):
            ratios.append(f"{speed:.2f}x" + ("" if row.quantised else f" {own.spec}"))
    figures = [(row.us, ".2f"), (row.tflops, ".1f"), (row.gbs, ".0f"), (row.floor_us, ".2f"), (row.share, ".0%")]
    cells = [row.provider, row.spec, f"{row.n}x{row.k}", row.layer, str(row.m)]
    cells += [_number(value, form) for value, form in figures]
    return [*cells, _number(row.error, ".4f"), ", ".join(ratios) or ("" if row.us else "no time")]


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines = ["| " + " | ".join(row) + " |" for row in escaped]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        marks = (' class="l"' if i < left else "" for i in range(len(cells)))
        return "<tr>" + "".join(f"<{tag}{m}>{escape(c)}</{tag}>" for m, c in zip(marks, cells, strict=True)) + "</tr>"

    top = line("th", head) if any(head) else ""
    return "<table>" + top + "".join(line("td", row) for row in rows) + "</table>"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit


def _us(value: float) -> str:
    """Three digits."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _fact(value: object) -> str:
    return "not known" if value is None else str(value)

"""`lowbit bench`: times layers beside other libraries on the GPU here, or shows again what was measured elsewhere.

Knows options, files and their order; it must not know how layers are measured (testing/bench.py), kept (testing/results.py) or shown (report.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.cli.options import counts, layers, say, shapes
from lowbit.errors import BadInput
from lowbit.testing.shapes import MODELS

if TYPE_CHECKING:
    from lowbit.testing.bench import Work
    from lowbit.testing.results import Results, Row

HELP = (
    "Time layers with cold weights on this GPU, beside PyTorch and rivals that are installed; tables, plots, a report."
)
EXAMPLES = f"""models: {", ".join(MODELS)}

examples:
  lowbit bench --shape 8192x8192,4096x4096 --spec int4_g128,mxfp4 --m 1,8,16 --json rows.json
  lowbit bench --model llama-3.1-8b,qwen3-32b --rivals torch --plot plots/
  lowbit bench --report rows.json --plot plots/ --markdown RESULTS.md

A ratio above 1 means that lowbit is faster. The floor is the longer of moving every byte once and of the operations."""

_MEASURED = ("model", "shape", "spec", "act", "m", "rivals", "json")  # options that make no sense with --report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--model", help="the linear layers of these models, with commas (default: grid)")
    parser.add_argument("--shape", type=shapes, help="NxK, output x input features, with commas")
    parser.add_argument("--spec", help="weight formats, with commas (int4_g128)")
    parser.add_argument("--act", help="activation type, bf16 or fp16 (bf16)")
    parser.add_argument("--m", type=counts, help="numbers of tokens, with commas (1,2,4,8,16)")
    parser.add_argument("--rivals", help="torch, humming, none, or auto: whatever is installed (auto)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows, kept up to date while measuring")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots and report.html there (needs matplotlib)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as markdown")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="measure nothing, show what --json wrote; needs no GPU"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure or read, print the table, write what was asked for; 1 if rows are missing or lowbit's are wrong."""
    _check_outputs(arguments)
    if arguments.report:
        given = [f"--{name}" for name in _MEASURED if getattr(arguments, name) is not None]
        if given:
            raise BadInput(f"--report shows a file, whose content is what it is: leave out {', '.join(given)}")
    from lowbit.cli import report
    from lowbit.testing.results import Results

    results = Results.from_json(arguments.report) if arguments.report else _measured(arguments)
    print(report.text(results))
    if arguments.markdown:
        _write(arguments.markdown, report.markdown(results))
    if arguments.plot:
        from lowbit.cli import plots

        images = plots.draw(results)
        for name, image in images.items():
            (arguments.plot / name).write_bytes(image)
        _write(arguments.plot / "report.html", report.html(results, images))
    return int(bool(results.facts["stopped"]) or any(row.fault and row.provider == "lowbit" for row in results.rows))


def _measured(arguments: argparse.Namespace) -> Results:
    """Run everything; what is there after every layer goes to --json, and an end before time ends measuring, not the report."""
    from lowbit.testing import bench
    from lowbit.testing.results import Results
    from lowbit.testing.rivals import find_rivals

    rivals = find_rivals(arguments.rivals or "auto")
    work = _work(arguments)
    meter = bench.gpu_meter()
    work.check(meter.arch)
    facts = bench.facts_of(meter, rivals, shlex.join(["lowbit", *arguments.words]))
    say(f"{facts['device']}: {len(work.shapes)} shapes beside {', '.join(r.name for r in rivals) or 'nobody'}")
    for rival in rivals:
        missing = [str(spec) for spec in work.specs if not rival.supports(spec)]
        if missing:
            say(f"{rival.name} is not compared for {', '.join(missing)}: it is not known to have that format")
    rows: list[Row] = []
    total = work.num_rows(rivals)
    why = "killed"  # what the file says while this runs
    try:
        for more in bench.measure(work, rivals, meter):
            rows += more
            say(f"{len(rows)}/{total}  {_line(more)}")
            so_far = f"{why} after {len(rows)} of {total} rows"
            _keep(arguments.json, Results({**facts, "stopped": so_far}, tuple(rows)))
        why = ""
    except KeyboardInterrupt:
        why = "interrupted"
    except RuntimeError as error:
        why = bench.words(error)
    stopped = f"{why} after {len(rows)} of {total} rows" if why else ""
    results = Results({**facts, "stopped": stopped}, tuple(rows))
    _keep(arguments.json, results)
    return results


def _line(rows: Sequence[Row]) -> str:
    """What one provider's layer took, for whoever watches."""
    row, times = rows[0], ", ".join(f"{row.us:.2f}" if row.us else "-" for row in rows)
    faults = "; ".join(dict.fromkeys(row.fault for row in rows if row.fault))
    return f"{row.provider} {row.spec} {row.n}x{row.k}: {times} us{'; ' * bool(faults)}{faults}"


def _keep(path: Path | None, results: Results) -> None:
    if path:
        _write(path, results.to_json())


def _work(arguments: argparse.Namespace) -> Work:
    """What the options name; layers of one shape are measured once."""
    from lowbit.testing.bench import Work
    from lowbit.weights import WeightSpec

    specs = list(dict.fromkeys(WeightSpec.parse(name) for name in (arguments.spec or "int4_g128").split(",")))
    ms = list(dict.fromkeys(arguments.m or (1, 2, 4, 8, 16)))
    return Work(layers(arguments), specs, arguments.act or "bf16", ms)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Raises BadInput for what could not be written in the end: hours may lie between."""
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise BadInput(
            "--plot needs matplotlib, which is not installed: pip install 'lowbit[bench]' or matplotlib alone"
        )
    for option in ("json", "markdown"):
        path = getattr(arguments, option)
        if path and (path.is_dir() or not os.access(path.parent, os.W_OK)):
            raise BadInput(f"--{option} must name a file that can be written; {path} cannot")
    if arguments.plot:
        try:
            arguments.plot.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"--plot must name a folder that can be written: {error}") from error


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a run may be killed at any time."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, "utf-8")
    draft.replace(path)

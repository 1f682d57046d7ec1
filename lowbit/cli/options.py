"""Arguments that several subcommands read the same way, and their progress on stderr; it must import nothing heavy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from lowbit.testing.shapes import layers_of


def shape(text: str) -> tuple[int, int]:
    """'4096x14336' -> (n, k): rows of the weight x columns, output x input features."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"a shape is NxK, output x input features, such as 4096x14336; got {text!r}")
    return int(parts[0]), int(parts[1])


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    """'4096x4096,4096x14336' -> ((4096, 4096), (4096, 14336))."""
    return tuple(shape(part) for part in text.split(","))


def counts(text: str) -> tuple[int, ...]:
    """'1,8,64' -> (1, 8, 64)."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"numbers of tokens are positive and separated by commas; got {text!r}")
    return tuple(int(part) for part in parts)


def layers(arguments: argparse.Namespace) -> dict[tuple[int, int], str]:
    """(N, K) of --shape and of the layers of --model (grid without either), with what models call them; equal ones once."""
    names: dict[tuple[int, int], list[str]] = {shape: [] for shape in arguments.shape or ()}
    models = arguments.model.split(",") if arguments.model else [] if arguments.shape else ["grid"]
    for model in models:
        for layer, shape in layers_of(model).items():
            names.setdefault(shape, []).extend([f"{model} {layer}"] if model.lower() != "grid" else [])
    return {shape: ", ".join(found) for shape, found in names.items()}


def progress(prefix: str) -> Callable[[int, int, str], None]:
    """Reports (done, all, label) on stderr: one line that is rewritten on a terminal, every tenth part elsewhere."""

    def report(done: int, total: int, label: str) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\r\x1b[2K{prefix} {done}/{total}  {label[:90]}", end=end, file=sys.stderr, flush=True)
        elif done == total or done % max(1, total // 10) == 0:
            print(f"{prefix} {done}/{total}", file=sys.stderr, flush=True)

    return report


def say(text: str) -> None:
    """One line on stderr at once: what is going on is not part of the result."""
    print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]], left: int) -> str:
    """Columns as wide as they need, the first `left` of them aligned left; rows[0] is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

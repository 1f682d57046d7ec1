"""Reads the golden cases (emulator/golden/cases.h) and the recorded data (golden.bin).

Knows the file format and the case list; it must not know what the primitives compute.
"""

from __future__ import annotations

import ast
import operator
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import emulator

GOLDEN = Path(emulator.__file__).parent / "golden"
FILE = Path(__file__).with_name("golden.bin")


@dataclass(frozen=True)
class Case:
    """One line of CASES: a primitive, how to launch it, and its sizes in bytes."""

    label: str
    kernel: str
    ctas: int
    threads: int
    in_bytes: int
    out_bytes: int
    arg: int
    generator: str


_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul, ast.BitOr: operator.or_, ast.LShift: operator.lshift}


def _number(text: str) -> int:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        return int(ast.literal_eval(node))

    return value(ast.parse(text.strip(), mode="eval").body)


def cases() -> list[Case]:
    """All cases, in the order of the list."""
    found = []
    for line in re.findall(r"^    X\((.*)\)\s*\\?$", (GOLDEN / "cases.h").read_text(), re.M):
        label, kernel, *numbers, generator = (part.strip() for part in line.split(","))
        found.append(Case(label.strip('"'), kernel, *(_number(n) for n in numbers), generator))
    return found


def records(path: Path = FILE) -> dict[str, tuple[bytes, bytes]]:
    """Case label -> recorded (input, output)."""
    data, at, out = path.read_bytes(), 0, {}
    while at < len(data):
        name, n_in, n_out = struct.unpack_from("<32sII", data, at)
        at += 40
        out[name.rstrip(b"\0").decode()] = (data[at : at + n_in], data[at + n_in : at + n_in + n_out])
        at += n_in + n_out
    return out

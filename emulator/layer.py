"""Reads the functions of the hardware layer out of its two folders, for the tests that keep them in step.

Knows only the layer's own style of C++; it must not know what any function does.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from emulator.build import CUDA, ROOT

DEVICE, TWINS = CUDA / "hw" / "hw.h", ROOT / "hw" / "hw.h"
_FUNCTION = re.compile(
    r"(?:template\s*<\s*int\s+(?P<parameter>\w+)\s*>\s*)?HW_MARK\s+(?P<result>(?:const )?\w+[&*]?)\s+"
    r"(?P<name>\w+)\((?P<args>[^{;]*?)\)\s*\{(?P<body>(?:[^{}]|\{[^{}]*\})*)\}"
)


@dataclass(frozen=True)
class Function:
    """One function of the layer; `needs` is the arch its twin demands (0: any), `exactly` whether no other will do."""

    name: str
    result: str
    args: tuple[str, ...]
    template: bool
    needs: int = 0
    exactly: bool = False

    @property
    def signature(self) -> tuple[str, str, tuple[str, ...], bool]:
        return self.result, self.name, self.args, self.template


def functions(header: Path) -> list[Function]:
    """All HW_FN functions outside structs that `header` and its includes define, in order."""
    defines = ["-D__device__=", "-D__forceinline__=HW_MARK", "-D__global__=", "-DHW_FN=HW_MARK"]
    if header == DEVICE:
        defines.pop()
    command = ["g++", "-E", "-P", "-std=c++20", "-x", "c++", *defines, str(header)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = re.sub(r'"(?:[^"\\]|\\.)*"', lambda m: m.group().replace("{", "<").replace("}", ">").replace(";", ","), text)
    text = text[text.index("namespace hw {") :]
    out = []
    for m in _FUNCTION.finditer(text):
        if m["name"].startswith("operator"):
            continue
        args = tuple(
            re.sub(r"2 \* (\d+)", lambda n: str(2 * int(n[1])), re.sub(r"\s+", " ", a.strip()))
            for a in _split(m["args"])
        )
        need = re.search(r"emu::need(_exactly)?\((\d+)", m["body"])
        out.append(
            Function(
                m["name"],
                m["result"],
                args,
                m["parameter"] is not None,
                int(need[2]) if need else 0,
                bool(need and need[1]),
            )
        )
    return out


def _split(args: str) -> list[str]:
    parts, depth = [""], 0
    for c in args:
        depth += (c in "<(") - (c in ">)")
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return [p for p in parts if p.strip()]

"""The text of one kernel with everything it includes: a value that can be hashed, sent to a process and compiled.

It must not know what the kernel computes, which compiler will read it, or where anything lies on the disk.
"""

from __future__ import annotations

import functools
import hashlib
import json
import posixpath
import re
from dataclasses import dataclass
from pathlib import Path

from lowbit.errors import BadInput

_INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*")([^"\n]+)(")', re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """One kernel, ready to compile: `text` includes `headers`, nothing else."""

    text: str
    """The generated translation unit."""
    entry: str
    """Name of its `extern "C"` kernel."""
    arch: str
    """The chip, such as "sm_90a"."""
    label: str
    """What the kernel is, for people (spec, family); changes no bit of the result, so it is not part of `key`."""
    headers: tuple[tuple[str, str], ...] = ()
    """(include name, text) of every header reached from `text`; see `gather_headers`."""
    target: str = ""
    """What the compiler of another maker's chip is asked for, such as "sm_80"; NVIDIA's are asked for `arch`."""

    @property
    def machine(self) -> str:
        """What the compiler is asked for: a real architecture."""
        return self.target or self.arch

    @functools.cached_property
    def key(self) -> str:
        """SHA-256 (64 hex digits) of everything that decides what is compiled, the compiler apart.

        JSON keeps the fields apart: no two different sources give the same bytes to hash.
        """
        fields = [self.entry, self.arch, self.text, self.headers, *([self.target] if self.target else [])]
        return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def gather_headers(root_text: str, include_dir: Path) -> tuple[tuple[str, str], ...]:
    """Collect every header that `root_text` includes with quotes, directly or not, sorted by name.

    A name is looked up beside the including file first, then in `include_dir`, as C++ compilers do. Headers held in
    memory have no folder to be beside, so the texts returned spell each name from `include_dir` on.
    Raises BadInput for a header that is not there.
    """
    headers: dict[str, str] = {}

    def resolve(name: str, includer: str) -> str:
        beside = posixpath.join(posixpath.dirname(includer), name)
        for candidate in map(posixpath.normpath, (beside, name)):
            if not candidate.startswith(("..", "/")) and (include_dir / candidate).is_file():
                return candidate
        raise BadInput(
            f'{includer or "the kernel text"} includes "{name}", which is not in {include_dir}; '
            "headers lie below that folder and are named from it"
        )

    def visit(text: str, includer: str) -> str:
        def rewrite(match: re.Match[str]) -> str:
            name = resolve(match[2], includer)
            if name not in headers:
                headers[name] = ""  # seen: a cycle ends here, `#pragma once` ends it for the compiler
                headers[name] = visit((include_dir / name).read_text(encoding="utf-8"), name)
            return match[1] + name + match[3]

        return _INCLUDE.sub(rewrite, text)

    visit(root_text, "")
    return tuple(sorted(headers.items()))

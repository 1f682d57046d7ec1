"""Builds the engine and generated kernel texts into shared libraries, cached by content.

Knows the compiler and the cache folder; it must not know what a kernel computes or how a launch runs (run.py).
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lowbit.errors import BadInput, CompileError

ROOT = Path(__file__).resolve().parent
CUDA = ROOT.parent / "lowbit" / "cuda"  # the kernel headers; hw/ in it is for the chip and stays out

# -O1 for kernels: compile time counts more than their speed. No -march=native: the cache may travel between machines.
# Registers start with garbage (auto-var-init), kernels pun types freely (no-strict-aliasing), -g1 gives line numbers,
# large local arrays are touched page by page (stack-clash) so that they cannot step over the guard page of a fiber.
KERNEL_FLAGS = (
    *(
        "-std=c++17",
        "-O1",
        "-g1",
        "-fPIC",
        "-w",
        "-Wno-psabi",
        "-fvisibility=hidden",
        "-ftrivial-auto-var-init=pattern",
    ),
    *("-fno-strict-aliasing", "-fno-math-errno", "-ffp-contract=off", "-fstack-clash-protection"),
)
ENGINE_FLAGS = (
    *("-std=c++20", "-O3", "-g1", "-fPIC", "-Wall", "-Wno-psabi", "-fvisibility-inlines-hidden"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.M)
_LOG_LINES = 30


@dataclass(frozen=True)
class KernelText:
    """The least a kernel needs to be built: lowbit.jit.source.Source has the same attributes and serves as well.

    headers: include name -> text; what is not given there is read from lowbit/cuda.
    """

    text: str
    entry: str
    arch: str = "sm_90a"
    label: str = ""
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def default_directory() -> Path:
    """`$LOWBIT_CACHE/emu`, or `~/.cache/lowbit/emu`."""
    return Path(os.environ.get("LOWBIT_CACHE") or Path.home() / ".cache" / "lowbit") / "emu"


@functools.cache
def compiler() -> tuple[str, str]:
    """The host C++ compiler and its version line; CompileError when there is none."""
    path = shutil.which("g++")
    if path is None:
        raise CompileError("the emulator needs g++ 12 or later on the PATH, found none: install it")
    return path, subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def digest(parts: Sequence[str]) -> str:
    """A content key: every part is hashed with its length, so that no two lists collide by concatenation."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode()
        h.update(b"%d:" % len(data))
        h.update(data)
    return h.hexdigest()[:24]


def _publish(directory: Path, name: str, product: str, make: Callable[[Path], None]) -> Path:
    """The file `product` of the cache entry `name`; `make(folder)` builds it aside, a rename publishes it."""
    final = directory / name
    if (final / product).is_file():
        return final / product
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory))
    try:
        make(aside)
        if final.exists() and not (final / product).is_file():  # damaged
            shutil.rmtree(final)
        try:
            aside.rename(final)
        except OSError:
            if not (final / product).is_file():
                raise
            # another process was faster; its files are the same
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final / product


def _compile(command: list[str], what: str, keep: Path | None, directory: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    kept = ""
    if keep is not None:
        target = directory / ("failed" + keep.name.rpartition("-")[0].replace(".kernels", ""))
        shutil.copytree(keep, target, dirs_exist_ok=True)
        kept = f"\nsource kept in {target}"
    log = "\n".join(done.stderr.splitlines()[:_LOG_LINES])
    raise CompileError(f"the emulator build of {what} failed: {' '.join(command)}\n{log}{kept}")


@functools.cache
def _engine_texts() -> tuple[tuple[Path, str], ...]:
    return tuple((p, p.read_text()) for folder in ("emu", "hw") for p in sorted((ROOT / folder).iterdir()))


def build_engine(directory: Path | None = None) -> Path:
    """Path of the engine's shared library, built on first use (about 10 s)."""
    directory = directory or default_directory()
    path, version = compiler()
    texts = [(p, t) for p, t in _engine_texts() if p.parent.name == "emu"]
    key = digest([version, *ENGINE_FLAGS, *(f"{p.name}\n{t}" for p, t in texts)])

    def make(folder: Path) -> None:
        sources = [str(p) for p, _ in texts if p.suffix == ".cpp"]
        _compile(
            [path, *ENGINE_FLAGS, "-shared", "-o", str(folder / "libemu.so"), *sources, "-ldl"],
            "the engine",
            None,
            directory,
        )

    return _publish(directory, f"engine-{key}", "libemu.so", make)


def header_texts(source: Any, cuda: Path = CUDA) -> dict[str, str]:
    """Include name -> text of all headers a source reaches, without the hw layer; CompileError when one is missing."""
    given = dict(getattr(source, "headers", ()) or ())
    found: dict[str, str] = {}
    todo = [(name, "") for name in _INCLUDE.findall(source.text)]
    while todo:
        name, parent = todo.pop()
        beside = os.path.normpath(os.path.join(os.path.dirname(parent), name))
        name = beside if beside in given or (cuda / beside).is_file() else os.path.normpath(name)
        if name in found or name.startswith("hw" + os.sep):
            continue
        if name not in given and not (cuda / name).is_file():
            raise CompileError(
                f"{getattr(source, 'label', '') or source.entry} includes {name!r}, "
                f"which is neither among its headers nor in {cuda}"
            )
        found[name] = given[name] if name in given else (cuda / name).read_text()
        todo += [(other, name) for other in _INCLUDE.findall(found[name])]
    return found


def _bound(source: Any) -> str:
    """The thread count in HW_KERNEL(...) or HW_KERNEL_RESIDENT(..., blocks) of the entry, as an expression; "0" when the
    entry is not in the text."""
    count, blocks = r"\(((?:[^(),]|\([^()]*\))*)", r"(?:,(?:[^(),]|\([^()]*\))*)?\)"
    head = r"HW_KERNEL(?:_RESIDENT)?\s*" + count + blocks + r"\s*"
    m = re.search(head + re.escape(source.entry) + r"\b", source.text)
    return m.group(1) if m else "0"


def _unit(sources: Sequence[Any]) -> str:
    """One translation unit of all texts, each in its own namespace, with one exported launcher each."""
    names = dict.fromkeys(name for s in sources for name in _INCLUDE.findall(s.text))
    lines = [f'#include "{name}"' for name in ("hw/hw.h", *names)]
    for i, s in enumerate(sources):
        label = re.sub(r"[^\w.+-]+", "_", getattr(s, "label", "") or s.entry)
        body = _INCLUDE.sub("", s.text)
        lines += [f"namespace lowbit_text_{i} {{", f'#line 1 "{label}.cu"', body, '#line 1 "launchers"']
        lines += [
            'extern "C" __attribute__((visibility("default")))',
            f"int lowbit_emu_{i}(const emu::Launch* l, const void* p, emu::u64 n) {{",
            f'    return emu::run(*l, emu::u32({_bound(s)}), "{s.entry}", &{s.entry}, p, n);',
            "}",
            "}",
        ]
    return "\n".join(lines) + "\n"


def build_kernels(sources: Sequence[Any], directory: Path | None = None, *, cuda: Path = CUDA) -> Path:
    """Path of the shared library of `sources`, in their order; CompileError with the compiler's first lines."""
    if not sources:
        raise BadInput("build: no sources given")
    directory = directory or default_directory()
    path, version = compiler()
    headers: dict[str, str] = {}
    for s in sources:
        for name, text in header_texts(s, cuda).items():
            if headers.setdefault(name, text) != text:
                raise BadInput(
                    f"build: two sources bring different texts of {name!r}; build them in separate libraries"
                )
    unit = _unit(sources)
    layer = [f"{p.parent.name}/{p.name}\n{t}" for p, t in _engine_texts() if p.suffix == ".h"]
    key = digest([version, *KERNEL_FLAGS, *layer, *(f"{n}\n{t}" for n, t in sorted(headers.items())), unit])

    def make(folder: Path) -> None:
        for name, text in headers.items():
            target = folder / "cuda" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        (folder / "unit.cpp").write_text(unit)
        command = [
            path,
            *KERNEL_FLAGS,
            "-shared",
            f"-I{ROOT}",
            f"-I{folder / 'cuda'}",
            "-o",
            str(folder / "kernels.so"),
            str(folder / "unit.cpp"),
        ]
        what = ", ".join(dict.fromkeys(getattr(s, "label", "") or s.entry for s in sources[:4])) + (
            ", ..." if len(sources) > 4 else ""
        )
        _compile(command, what, folder, directory)

    return _publish(directory, f"kernels-{key}", "kernels.so", make)


def mutate(sources: Sequence[Any], file: str, old: str, new: str, *, cuda: Path = CUDA) -> list[Any]:
    """The sources with one text replaced in one file, to plant a fault: lowbit/cuda itself stays as it is.

    file: an include name ("stream.cuh"), or "" for the generated texts themselves. `old` must occur exactly once in a
    header, and once in each text when file is "". BadInput otherwise, also when no source uses the header.
    """

    def change(text: str, where: str) -> str:
        if text.count(old) != 1:
            raise BadInput(
                f"mutate: the text to change must occur once in {where}, it occurs {text.count(old)} times: {old!r}"
            )
        return text.replace(old, new)

    if not file:
        return [replace(s, text=change(s.text, getattr(s, "label", "") or s.entry)) for s in sources]
    out, used = [], False
    for s in sources:
        headers: Mapping[str, str] = header_texts(s, cuda)
        if file in headers:
            used = True
            s = replace(s, headers=tuple({**headers, file: change(headers[file], file)}.items()))
        out.append(s)
    if not used:
        raise BadInput(f"mutate: none of the sources includes {file!r}")
    return out

"""One kernel text to one cubin, with what the compiler reports about it; a pure function, picklable both ways.

It must not know about the cache, tensors or GPUs, and importing it loads no compiler.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lowbit.errors import CompileError, Unsupported
from lowbit.jit.directory import default_directory, writable_directory
from lowbit.jit.nvcc import Nvcc
from lowbit.jit.nvrtc import Nvrtc
from lowbit.jit.source import Source
from lowbit.jit.toolkit import find_nvcc

UNKNOWN = -1
"""Stands for a figure that the compiler's log does not hold."""

_SERIALISED = re.compile(r"\(C751[0-3]\)|wgmma\S* instructions are serialized")
_REPORT_LINE = re.compile(r"ptxas (info\b|\s+\.)|\s*\d+ bytes stack frame")
_LOG_LINES = 12


class Compiler(Protocol):
    """What lowbit needs of a compiler; `Nvrtc` and `Nvcc` are two, tests bring their own."""

    name: str
    """Product and version, such as "nvrtc 13.5"."""
    identity: str
    """Everything about it that may change its output; part of the cache key."""

    def options(self, arch: str) -> tuple[str, ...]: ...

    def build(self, source: Source) -> tuple[bytes | None, str]: ...


@dataclass(frozen=True)
class Compiled:
    """A cubin and its report. Figures the compiler did not give are UNKNOWN."""

    cubin: bytes
    log: str
    source: Source
    compiler: str
    seconds: float
    registers: int
    """Per thread."""
    spill_bytes: int
    """Bytes of spill stores plus spill loads in the code, per thread."""
    stack_bytes: int
    """Stack frame of the entry, per thread."""
    static_smem: int
    """Bytes of statically declared shared memory, per block."""

    @property
    def report(self) -> str:
        """Registers and spills, for people."""
        if self.registers == UNKNOWN:
            return "registers not reported"
        return f"{self.registers} registers, {self.spill_bytes} bytes spilled"


def compile_source(
    source: Source, *, compiler: Compiler | None = None, failed_directory: Path | None = None
) -> Compiled:
    """Compile `source` with `compiler`, or the one `compiler_for` gives.

    A source that fails is kept, with its log, in `failed_directory` (default: the folder `failed` of the cache).

    Raises Unsupported without a compiler; CompileError if it refuses the text, or if ptxas serialised the wgmma
    instructions: such a kernel is right but several times too slow, and only a remark in the log says so.
    """
    compiler = compiler or compiler_for(source.arch, source.target)
    start = time.perf_counter()
    cubin, log = compiler.build(source)
    seconds = time.perf_counter() - start
    if cubin is None:
        raise _failure(source, compiler, "the compiler refused it", log, failed_directory)
    if remark := _SERIALISED.search(log):
        reason = f"its wgmma instructions were serialised: {remark[0]}"
        raise _failure(source, compiler, reason, log, failed_directory)
    return Compiled(cubin, log, source, compiler.name, seconds, **read_report(log, source.entry))


def compiler_for(arch: str, target: str = "") -> Compiler:
    """`find_compiler()`; for a chip of another maker, with a `target`, only if LOWBIT_COMPILER names one: code from NVIDIA's compilers
    would not run there. Raises Unsupported with the remedy.
    """
    if target and _setting() in _OPENERS:
        found = f"LOWBIT_COMPILER is {_setting()!r}" if _setting() else "LOWBIT_COMPILER is not set"
        raise Unsupported(
            [
                f"kernels for {arch} come from its maker's own compiler, and {found}: set it to the path or full command "
                f"of one that takes nvcc's arguments, -arch={target} among them"
            ]
        )
    return find_compiler()


def _setting() -> str:
    return os.environ.get("LOWBIT_COMPILER", "").strip()


def find_compiler(setting: str | None = None) -> Compiler:
    """The compiler that `setting` names, by default the environment's LOWBIT_COMPILER; opened once per process.

    Settings: "nvrtc"; "nvcc"; a path to nvcc or to a libnvrtc.so; the full command of a driver that takes nvcc's
    arguments. Without one: NVRTC of PyTorch or of a toolkit, else nvcc. Raises Unsupported with the remedy.
    """
    return _open(_setting() if setting is None else setting.strip())


@functools.cache
def _open(setting: str) -> Compiler:
    if setting in _OPENERS:
        return _OPENERS[setting]()
    if re.search(r"\.so(\.\d+)*$", setting):
        return Nvrtc.open(setting)
    try:
        command = [setting] if Path(setting).is_file() else shlex.split(setting)
    except ValueError:  # an open quotation mark
        command = [setting]
    if shutil.which(command[0]) is None:
        reason = f"LOWBIT_COMPILER names {command[0]!r}, which is no program that can be run"
        raise Unsupported([f"{reason}: set it to nvrtc, nvcc, a path to nvcc or a full command"])
    return Nvcc(command)


def _open_any() -> Compiler:
    try:
        return Nvrtc.open()
    except Unsupported as no_nvrtc:
        try:
            return _open_nvcc()
        except Unsupported as no_nvcc:
            raise Unsupported([*no_nvrtc.reasons, *no_nvcc.reasons]) from None


def _open_nvcc() -> Compiler:
    path = find_nvcc()
    if path is None:
        reason = "no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda*"
        raise Unsupported([f"{reason}: pip install nvidia-cuda-nvrtc, or set LOWBIT_COMPILER to a path of nvcc"])
    return Nvcc([path])


_OPENERS: Mapping[str, Callable[[], Compiler]] = {"": _open_any, "nvrtc": Nvrtc.open, "nvcc": _open_nvcc}


def read_report(log: str, entry: str) -> dict[str, int]:
    """Registers, spill bytes, stack bytes and static shared memory of `entry` from the lines `ptxas -v` wrote.

    The report of an entry runs from its "Compiling entry function" to the next one.
    """
    _, found, tail = log.partition(f"Compiling entry function '{entry}'")
    report = tail.partition("Compiling entry function")[0]
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    used = re.search(r"Used (\d+) registers(.*)", report)
    if not found or not frame or not used:
        return dict.fromkeys(("registers", "spill_bytes", "stack_bytes", "static_smem"), UNKNOWN)
    smem = re.search(r"(\d+) bytes smem", used[2])
    return {
        "registers": int(used[1]),
        "spill_bytes": int(frame[2]) + int(frame[3]),
        "stack_bytes": int(frame[1]),
        "static_smem": int(smem[1]) if smem else 0,
    }


def _failure(source: Source, compiler: Compiler, reason: str, log: str, directory: Path | None) -> CompileError:
    lines = [line for line in log.splitlines() if line.strip()]
    # The report on resources comes first and would push the errors out of the excerpt.
    telling = [line for line in lines if not _REPORT_LINE.match(line) or _SERIALISED.search(line)] or lines
    rest = len(telling) - _LOG_LINES
    excerpt = telling[:_LOG_LINES] + ([f"... and {rest} more lines"] if rest > 0 else [])
    head = [
        f"{source.label} for {source.arch} did not compile: {reason}",
        f"compiler: {compiler.name} {' '.join(compiler.options(source.machine))}",
        f"source: {_keep(source, log, directory)}",
    ]
    return CompileError("\n  ".join(head + excerpt))


def _keep(source: Source, log: str, directory: Path | None) -> str:
    """Write text and log where they can be looked at, and say where; a full disk must not hide the compile error."""
    try:
        folder = directory or writable_directory(default_directory()) / "failed"
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"{source.key}.cu"
        path.write_text(source.text, encoding="utf-8")
        path.with_suffix(".log").write_text(log, encoding="utf-8")
    except OSError as error:
        return f"not kept ({error})"
    return str(path)

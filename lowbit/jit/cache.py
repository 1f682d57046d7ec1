"""Compiled kernels on disk, found by content: shared by processes, safe against crashes, damage and upgrades.

It must not know what kernels compute or how they are launched. Nothing depends on time stamps, or on where files lie.

    <directory>/v1/sm_90a/<source key>/                  what was asked for, whoever compiles it
        lock
        nvrtc-13.5-<hash of compiler and options>/       who compiled it, and how
            source.cu  key.json  log.txt  kernel.cubin  SHA256SUMS

Two levels, so that a machine without a compiler finds the kernels frozen for it by their source alone, while another
compiler or other options never serve the entry of the first. `sha256sum -c SHA256SUMS` checks an entry by hand.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from lowbit.errors import MissingKernel, Unsupported
from lowbit.jit.compile import Compiled, Compiler, compile_source, compiler_for
from lowbit.jit.directory import default_directory, writable_directory
from lowbit.jit.source import Source

_FORMAT = "v1"
"""Changes with the files of an entry or their meaning: an upgraded library does not see the old entries."""

_FILES = ("source.cu", "key.json", "log.txt", "kernel.cubin")
_CHECKSUMS = "SHA256SUMS"
_REPORT = ("seconds", "registers", "spill_bytes", "stack_bytes", "static_smem")

_PATIENCE_SECONDS = 60.0
"""Longest wait for another process's compile. A dead holder's lock is free at once, but a stopped holder keeps it, and
so does a child forked while it was held: better to compile twice than to hang."""


def _jit_allowed() -> bool:
    return os.environ.get("LOWBIT_NO_JIT", "").strip().lower() in ("", "0", "no", "off", "false")


@dataclass(frozen=True)
class Cache:
    """Where compiled kernels are looked up and kept. A value: workers get a copy and see the same kernels."""

    directory: Path = field(default_factory=default_directory)
    """Read and written; made when first written. If it cannot be written, a private folder takes the writes."""
    shared: tuple[Path, ...] = ()
    """More folders of the same layout, only read, searched after `directory`."""
    jit: bool = field(default_factory=_jit_allowed)
    """Whether missing kernels may be compiled; by default unless LOWBIT_NO_JIT is set."""

    def get(self, source: Source, compiler: Compiler | None = None) -> Compiled | None:
        """The kernel of `source` by `compiler`, or by whichever compiler if None; None if no sound entry has it.

        Writes nothing. Among several compilers' entries the choice is by name, so always the same.
        """
        for root in self._roots():
            folder = _source_folder(root, source)
            names = [_entry_name(compiler, source.machine)] if compiler else _entry_names(folder)
            for name in names:
                if found := _read(folder / name, source):
                    return found
        return None

    def get_or_compile(self, source: Source, compiler: Compiler | None = None) -> Compiled:
        """The kernel of `source`, from the cache or compiled now and kept; several processes compile it once.

        Raises MissingKernel if it would have to be compiled and may not be; Unsupported if there is no compiler;
        CompileError if it does not compile.
        """
        try:
            compiler = (compiler or compiler_for(source.arch, source.target)) if self.jit else None
        except Unsupported:
            if found := self.get(source):
                return found
            raise
        if found := self.get(source, compiler):
            return found
        if compiler is None:
            raise self._missing(source)
        folder = _source_folder(self.writable, source)
        with _locked(folder):
            if found := self.get(source, compiler):  # made by another process while this one waited
                return found
            compiled = compile_source(source, compiler=compiler, failed_directory=self.writable / "failed")
            _publish(folder / _entry_name(compiler, source.machine), compiled, compiler)
        return compiled

    @cached_property
    def writable(self) -> Path:
        """The folder that is written: `directory`, or a private one if that refuses. Made if it is not there."""
        folder = writable_directory(self.directory)
        if folder != self.directory:
            logging.getLogger("lowbit").warning("%s cannot be written: kernels are kept in %s", self.directory, folder)
        return folder

    def _roots(self) -> list[Path]:
        resolved = self.__dict__.get("writable", self.directory)  # not found out, hence not written, by a mere look-up
        return list(dict.fromkeys([self.directory, resolved, *self.shared]))

    def _missing(self, source: Source) -> MissingKernel:
        places = ", ".join(map(str, self._roots()))
        return MissingKernel(
            f"{source.label} for {source.arch} (key {source.key[:32]}) may not be compiled and is not in {places}: "
            f"compile its layer with `lowbit warmup --freeze FOLDER` (see its --help; with LOWBIT_TUNED and LOWBIT_PLAN as they are here), "
            "or unset LOWBIT_NO_JIT"
        )


def _source_folder(root: Path, source: Source) -> Path:
    return root / _FORMAT / source.arch / source.key[:32]


def _entry_name(compiler: Compiler, machine: str) -> str:
    product = re.sub(r"[^\w.]+", "-", compiler.name)
    facts = json.dumps([compiler.identity, compiler.options(machine)])
    return f"{product}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def _entry_names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # what is no entry, such as the lock, does not read as one
    except OSError:
        return []


def _checksums(files: Mapping[str, bytes]) -> bytes:
    return "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in _FILES).encode()


def _read(folder: Path, source: Source) -> Compiled | None:
    """The entry in `folder`, or None if it is absent, cut short, altered, or another source's."""
    try:
        files = {name: (folder / name).read_bytes() for name in _FILES}
        if (folder / _CHECKSUMS).read_bytes() != _checksums(files):
            return None
    except OSError:
        return None
    facts = json.loads(files["key.json"])
    if facts["key"] != source.key:
        return None
    report = {name: facts[name] for name in _REPORT}
    return Compiled(files["kernel.cubin"], files["log.txt"].decode(), source, facts["compiler"], **report)


def _publish(folder: Path, compiled: Compiled, compiler: Compiler) -> None:
    """Make the entry `folder` out of sight and rename it into place, over a damaged one if need be.

    Called with the lock held, so build folders lying about are those of processes that died. Where locks do not work
    one may be alive: its rename then fails, and the worst is a second compile. A cache that cannot be written is no
    reason to fail: the kernel is there.
    """
    source = compiled.source
    facts = {
        "key": source.key,
        "label": source.label,
        "entry": source.entry,
        "arch": source.arch,
        "headers": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in source.headers},
        "compiler": compiled.compiler,
        "options": compiler.options(source.machine),
        **{name: getattr(compiled, name) for name in _REPORT},
    }
    contents = (source.text.encode(), json.dumps(facts, indent=1).encode(), compiled.log.encode(), compiled.cubin)
    files = dict(zip(_FILES, contents, strict=True))
    try:
        for stale in folder.parent.glob(".build-*"):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder.parent, ignore_cleanup_errors=True) as build:
            fresh = Path(build) / "fresh"
            fresh.mkdir(mode=0o700)
            for name, content in {**files, _CHECKSUMS: _checksums(files)}.items():
                (fresh / name).write_bytes(content)
            with suppress(FileNotFoundError):
                folder.rename(Path(build) / "damaged")
            fresh.rename(folder)
    except OSError as error:
        if _read(folder, source) is None:
            logging.getLogger("lowbit").warning("%s was compiled but could not be kept: %s", source.label, error)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, made if need be, while the caller compiles what belongs there.

    An flock dies with its process, whatever killed it. File systems without locks, folders that cannot be made and
    patience at an end mean going on without: the lock saves work, what makes the result right is the rename.
    """
    descriptor = _open_lock(folder)
    if descriptor is None:
        yield
        return
    try:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _try_lock(descriptor) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone would leave it with a child forked meanwhile
        os.close(descriptor)


def _open_lock(folder: Path) -> int | None:
    try:
        for part in (*reversed(folder.parents[:3]), folder):  # from the root on, which may have been deleted meanwhile
            part.mkdir(mode=0o700, exist_ok=True)
        return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True

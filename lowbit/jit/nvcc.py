"""nvcc, or any driver that takes its command line: files in a private folder, one process per kernel.

It must not know about caches or GPUs, and nothing of the folder's name may reach the result or the log.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lowbit.errors import Unsupported
from lowbit.jit.source import Source


class Nvcc:
    """A compiler command, such as ("nvcc",) or ("ccache", "nvcc", "--threads=2")."""

    def __init__(self, command: Sequence[str]) -> None:
        """Ask the command for its version. Raises Unsupported if it does not run."""
        self.command = tuple(command)
        try:
            text = _run([*self.command, "--version"], cwd=None, check=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"the compiler command {' '.join(self.command)!r} does not answer --version ({error})"
            raise Unsupported([f"{reason}: set LOWBIT_COMPILER to nvrtc, nvcc or a command that works"]) from error
        version = re.search(r"\bV(\d+(?:\.\d+)+)", text) or re.search(r"\b(\d+(?:\.\d+)+)", text)
        self.name = f"{Path(self.command[0]).name} {version[1] if version else 'of unknown version'}"
        # Arguments after the program are the user's own and change the code; the program's folder does not.
        self.identity = "\n".join([self.name, *self.command[1:], hashlib.sha256(text.encode()).hexdigest()])

    def options(self, arch: str) -> tuple[str, ...]:
        """The options for `arch`; the same meaning as NVRTC's, see there."""
        return ("-cubin", f"-arch={arch}", "-std=c++17", "-Xptxas=-v", "-Xptxas=--warn-on-spills")

    def build(self, source: Source) -> tuple[bytes | None, str]:
        """Compile and return (cubin, log); no cubin if the compiler refused."""
        with tempfile.TemporaryDirectory(prefix="lowbit-nvcc-") as name:
            folder = Path(name)
            for header, text in source.headers:
                path = folder / "include" / header
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            kernel, cubin = folder / f"{source.entry}.cu", folder / "kernel.cubin"
            kernel.write_text(source.text, encoding="utf-8")
            places = ("-I", str(folder / "include"), "-o", str(cubin), str(kernel))
            run = _run([*self.command, *self.options(source.machine), *places], cwd=folder)
            log = run.stdout.replace(f"{folder}{os.sep}", "").strip()
            if run.returncode or not cubin.is_file():
                return None, log or f"the compiler ended with status {run.returncode}"
            return cubin.read_bytes(), log


def _run(command: Sequence[str], *, cwd: Path | None, check: bool = False) -> subprocess.CompletedProcess[str]:
    """Run to the end, both outputs as one text, without the variables that add options behind the cache key's back."""
    hidden = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={name: value for name, value in os.environ.items() if name not in hidden},
        cwd=cwd,
        check=check,
    )

"""NVRTC, the compiler in a library: headers and text go in from memory, a cubin and a log come out.

It must not know about caches, kernels or GPUs; NVRTC itself needs neither a device nor a driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from lowbit.errors import Unsupported
from lowbit.jit.source import Source
from lowbit.jit.toolkit import builtins_beside, find_nvrtc


class Nvrtc:
    """One loaded libnvrtc. Safe to use from several threads: each compile is a program of its own."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.name = f"nvrtc {major.value}.{minor.value}"
        self.identity = self.name

    @classmethod
    def open(cls, path: str | None = None) -> Nvrtc:
        """Load the library at `path`, or the best one found. Raises Unsupported if there is none that loads."""
        obstacles = []
        for candidate in [path] if path else find_nvrtc():
            try:
                for builtins in builtins_beside(candidate):
                    ctypes.CDLL(builtins)
                return cls(ctypes.CDLL(candidate))
            except (OSError, AttributeError, Unsupported) as error:
                obstacles.append(str(error))
        found = ", ".join(obstacles[:3])
        raise Unsupported([f"no NVRTC library could be loaded ({found}): pip install nvidia-cuda-nvrtc"])

    def options(self, arch: str) -> tuple[str, ...]:
        """The options for `arch`: a real architecture, so that the result is a cubin and the driver compiles nothing.

        All that bears on numbers is left at the default both compilers share (IEEE division, no flush to zero;
        where contraction into an FMA matters the kernels say so themselves).
        """
        return (f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v", "--ptxas-options=--warn-on-spills")

    def build(self, source: Source) -> tuple[bytes | None, str]:
        """Compile and return (cubin, log); no cubin if the compiler refused."""
        names = [name.encode() for name, _ in source.headers]
        texts = [text.encode() for _, text in source.headers]
        options = [option.encode() for option in self.options(source.machine)]
        program = ctypes.c_void_p()
        # The name puts the text into a folder that does not exist: NVRTC searches that folder for quoted includes, and
        # with a bare name that would be whatever the current directory holds.
        title = f"/lowbit/generated/{source.entry}.cu".encode()
        create = ("nvrtcCreateProgram", ctypes.byref(program), source.text.encode(), title)
        self._call(*create, len(names), _strings(texts), _strings(names))
        try:
            status = self._function("nvrtcCompileProgram")(program, len(options), _strings(options))
            log = self._fetch("ProgramLog", program).rstrip(b"\0").decode(errors="replace").strip()
            if status:
                return None, log or f"NVRTC: {self._explain(status)}"
            return self._fetch("CUBIN", program), log
        finally:
            self._function("nvrtcDestroyProgram")(ctypes.byref(program))

    def _fetch(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, buffer)
        return buffer.raw

    def _function(self, name: str) -> Callable[..., int]:
        return getattr(self._library, name)  # type: ignore[no-any-return]

    def _call(self, name: str, *arguments: object) -> None:
        status = self._function(name)(*arguments)
        if status:
            raise Unsupported([f"{name} failed: {self._explain(status)}; reinstall nvidia-cuda-nvrtc"])

    def _explain(self, status: int) -> str:
        describe = self._library.nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        return str(describe(status).decode())


def _strings(values: list[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*values)

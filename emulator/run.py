"""Runs built kernels: device memory, launches, fault reports.

Talks to the engine through ctypes; it must not know how kernels are written or compiled (build.py).
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from emulator import build as _build
from lowbit.errors import BadInput, LowbitError

_READ_ONLY, _OUTPUT, _DEPENDENT = 1, 2, 4


class EmulatorFault(LowbitError):
    """A kernel broke a rule of the machine. The message names block, thread, kernel file:line, instruction, address
    and the other party; or lists who waits for what (deadlock)."""


class _Launch(ctypes.Structure):
    _fields_ = [
        *(
            (n, ctypes.c_uint32)
            for n in ("grid_x", "grid_y", "grid_z", "threads", "smem", "cluster", "resident", "arch")
        ),
        ("seed", ctypes.c_uint64),
    ]


class _Engine:
    """The loaded engine library. A process holds one: kernels of all libraries share its memory."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()  # one launch at a time
        lib = ctypes.CDLL(str(path), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        u64, u32, ptr, text = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_char_p
        for name, result, args in (
            ("emu_alloc", u64, (text, u64, ptr, u32, u32)),
            ("emu_free", ctypes.c_int, (u64,)),
            ("emu_read", ctypes.c_int, (u64, ptr, u64)),
            ("emu_write", ctypes.c_int, (u64, ptr, u64)),
            ("emu_unwritten", u64, (u64,)),
            ("emu_error", text, ()),
            ("emu_profile", text, (u32,)),
        ):
            f = getattr(lib, name)
            f.restype, f.argtypes = result, list(args)
        self.lib = lib


_engines: list[_Engine] = []  # at most one, loaded on first use: two copies of its symbols cannot live in one process


def _engine(directory: Path | None = None) -> _Engine:
    if not _engines:
        _engines.append(_Engine(_build.build_engine(directory)))
    return _engines[0]


def arch_number(arch: int | str) -> int:
    """90 for 90, "90", "sm_90" and "sm_90a"; ValueError for anything else."""
    m = re.fullmatch(r"(?:sm_)?(\d+)[af]?", str(arch))
    if m is None:
        raise BadInput(f"arch {arch!r} is not of the form 90 or 'sm_90a'")
    return int(m.group(1))


def profile(arch: int | str) -> dict[str, str]:
    """Shared memory per block, numerics and their basis (golden, published, assumed) of an arch; all as text."""
    text = _engine().lib.emu_profile(arch_number(arch)).decode()
    if not text:
        raise BadInput(f"the emulator has no profile for arch {arch!r}; see emulator/emu/profile.h for those it has")
    return dict(item.split("=") for item in text.split(";"))


def _bytes_of(data: Any) -> tuple[int, int, Any]:
    """Address, size and an object that keeps the memory alive, of a numpy array, CPU torch tensor or bytes."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        data = np.frombuffer(data, np.uint8)
    if hasattr(data, "data_ptr"):
        t = data.detach().contiguous()
        if t.device.type != "cpu":
            raise BadInput(f"the emulator takes CPU tensors, this one is on {t.device}")
        return t.data_ptr(), t.numel() * t.element_size(), t
    a = np.ascontiguousarray(data)
    return a.ctypes.data, a.nbytes, a


class Memory:
    """Emulated global memory. Every allocation has its own rules and knows its exact end; leaving `with` frees all."""

    def __init__(self, directory: Path | None = None) -> None:
        self._lib = _engine(directory).lib
        self._addresses: list[int] = []

    def alloc(
        self,
        name: str,
        data: Any,
        *,
        read_only: bool = False,
        output: bool = False,
        dependent: bool = False,
        offset: int = 0,
    ) -> int:
        """The address of a new allocation, a multiple of 256 plus `offset` bytes.

        data: a numpy array, torch tensor or bytes (copied), or a number of bytes (0xff, and reading them is a fault).
        read_only: any write is a fault. output: a second write of a byte by another thread of one launch is a fault.
        dependent: comes from the previous kernel, may be touched only after griddepcontrol.wait.
        """
        if isinstance(data, (int, np.integer)):
            address, size, keep = 0, int(data), None
        else:
            address, size, keep = _bytes_of(data)
            address = address or 1  # an empty array still has content
        flags = read_only * _READ_ONLY | output * _OUTPUT | dependent * _DEPENDENT
        got = (
            int(self._lib.emu_alloc(name.encode(), size, address or None, flags, offset))
            if size or not address
            else self._empty(name, flags, offset)
        )
        del keep
        if not got:
            raise BadInput(f"alloc {name!r}: no room for {size} bytes")
        self._addresses.append(got)
        return got

    def _empty(self, name: str, flags: int, offset: int) -> int:
        one = ctypes.c_uint8()
        return int(self._lib.emu_alloc(name.encode(), 0, ctypes.addressof(one), flags, offset))

    def read(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A copy of `nbytes` bytes at `address`; BadInput when they do not lie in one allocation."""
        out = np.empty(nbytes, np.uint8)
        if self._lib.emu_read(address, out.ctypes.data, nbytes):
            raise BadInput(f"read: {nbytes} bytes at 0x{address:x} do not lie inside one allocation")
        return out

    def array(self, address: int, shape: Sequence[int], dtype: Any) -> npt.NDArray[Any]:
        """A copy of what lies at `address` as a numpy array."""
        kind = np.dtype(dtype)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        out: npt.NDArray[Any] = self.read(address, nbytes).view(kind).reshape(shape)
        return out

    def tensor(self, address: int, shape: Sequence[int], dtype: Any) -> Any:
        """A copy of what lies at `address` as a torch tensor of a torch dtype."""
        import torch

        out = torch.empty(tuple(shape), dtype=dtype)
        if self._lib.emu_read(address, out.data_ptr(), out.numel() * out.element_size()):
            raise BadInput(f"tensor: {tuple(shape)} of {dtype} at 0x{address:x} do not lie inside one allocation")
        return out

    def write(self, address: int, data: Any) -> None:
        """Overwrites the bytes at `address`, as a copy from the host between launches does."""
        source, size, keep = _bytes_of(data)
        if self._lib.emu_write(address, source, size):
            raise BadInput(f"write: {size} bytes at 0x{address:x} do not lie inside one allocation")
        del keep

    def unwritten(self, address: int) -> int:
        """How many bytes of the allocation that was made with a number of bytes have never been written."""
        return int(self._lib.emu_unwritten(address))

    def free_all(self) -> None:
        """Frees what this object allocated."""
        for a in self._addresses:
            self._lib.emu_free(a)
        self._addresses.clear()

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free_all()


def tensor_map(
    base: int, *, width: int, height: int, pitch: int, elem: int, box_width: int, box_height: int, swizzle: int = 0
) -> bytes:
    """The 128 bytes that stand for a CUtensorMap in kernel parameters.

    width, height, box_width, box_height in elements and rows, pitch in bytes between rows, elem in bytes,
    swizzle in bytes: 0, 32, 64 or 128.
    """
    modes = {0: 0, 128: 1, 64: 2, 32: 3}
    if swizzle not in modes:
        raise BadInput(f"tensor_map: swizzle of {swizzle} bytes; use 0, 32, 64 or 128")
    if base % 16 or pitch % 16:
        raise BadInput(f"tensor_map: base 0x{base:x} and pitch {pitch} must be multiples of 16 bytes")
    if not (1 <= box_width <= 256 and 1 <= box_height <= 256) or box_width * elem % 16:
        raise BadInput(f"tensor_map: box {box_width} x {box_height}; each side 1..256, rows a multiple of 16 bytes")
    return struct.pack("<Q7I", base, width, height, pitch, elem, box_width, box_height, modes[swizzle]) + bytes(92)


class Library:
    """Built kernels, ready to launch."""

    def __init__(self, path: Path, sources: Sequence[Any], directory: Path | None = None) -> None:
        self.path, self.sources = path, tuple(sources)
        self._engine = _engine(directory)
        self._lib = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)

    def _find(self, which: Any) -> int:
        hits = [
            i
            for i, s in enumerate(self.sources)
            if s == which or which in (s.entry, getattr(s, "label", None) or s.entry)
        ]
        if len(hits) == 1:
            return hits[0]
        if not hits:
            known = ", ".join(sorted({s.entry for s in self.sources}))
            raise BadInput(f"launch: no kernel {which!r} in this library; it has {known}")
        raise BadInput(f"launch: {which!r} names {len(hits)} kernels of this library; give the Source itself")

    def launch(
        self,
        which: Any,
        params: bytes,
        *,
        grid: int | Sequence[int],
        block: int,
        smem: int = 0,
        cluster: int = 1,
        seed: int = 1,
        arch: int | str | None = None,
        resident: int = 1,
    ) -> None:
        """Runs one launch to its end; EmulatorFault with the report when the kernel breaks a rule.

        which: the Source, its label or its entry name. params: the bytes of the kernel's parameter struct.
        seed: chooses the order of threads and when copies land (0..: any value must give the same bits).
        arch: instructions and numerics, default the source's own. resident: clusters that run at the same time.
        """
        index = self._find(which)
        x, y, z = (*((grid,) if isinstance(grid, int) else tuple(grid)), 1, 1)[:3]
        number = arch_number(self.sources[index].arch if arch is None else arch)
        args = _Launch(x, y, z, block, smem, cluster, resident, number, seed)
        function = self._lib[f"lowbit_emu_{index}"]
        function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64]
        with self._engine.lock:
            if function(ctypes.addressof(args), bytes(params), len(params)):
                raise EmulatorFault(self._engine.lib.emu_error().decode())


def build(sources: Sequence[Any], directory: Path | None = None, *, cuda: Path = _build.CUDA) -> Library:
    """All sources compiled into one library, cached by content in `directory`, and loaded; CompileError if it fails."""
    _engine(directory)
    return Library(_build.build_kernels(sources, directory, cuda=cuda), sources, directory)

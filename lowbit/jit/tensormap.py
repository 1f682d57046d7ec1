"""Tensor maps: what tensor copies of a kernel are told about a matrix in global memory, encoded by the driver.

It must not know what the matrix means; the map is a field of the kernel's parameter struct.
"""

from __future__ import annotations

import ctypes

from lowbit.jit.driver import Driver

ALIGNMENT = 64  # of the 128 bytes of a map, as the driver wants it
_UINT16, _SWIZZLE_128, _PROMOTE_256 = 1, 3, 3


class RowsMap:
    """The map of one matrix of 16-bit numbers with rows of `width`, read in boxes of `box_width` x `box_rows`, swizzled by 128 bytes.

    `target`: the address of the map, a multiple of ALIGNMENT. Encoding costs 1-2 us of host time, so it is done only for another
    matrix than the last one. Serves one thread at a time, like the Launch whose parameters it fills.
    """

    def __init__(self, driver: Driver, target: int, width: int, box_width: int, box_rows: int) -> None:
        self._driver = driver
        self._encode = driver.library.cuTensorMapEncodeTiled
        self._last = (0, 0, 0)
        self._dims = (ctypes.c_uint64 * 2)(width, 1)
        self._pitch = (ctypes.c_uint64 * 1)()
        box, steps = (ctypes.c_uint32 * 2)(box_width, box_rows), (ctypes.c_uint32 * 2)(1, 1)
        self._head = (ctypes.c_void_p(target), _UINT16, 2)
        self._tail = (self._dims, self._pitch, box, steps, 0, _SWIZZLE_128, _PROMOTE_256, 0)  # 0: outside lie zeros

    def __call__(self, base: int, rows: int, pitch: int) -> None:
        """Describe `rows` rows from address `base`, a multiple of 16, `pitch` bytes apart (any number if there is one row).

        Raises LaunchError if the driver refuses.
        """
        if (base, rows, pitch) == self._last:
            return
        self._dims[1] = rows
        self._pitch[0] = pitch if rows > 1 else 2 * self._dims[0]
        status = self._encode(*self._head, ctypes.c_void_p(base), *self._tail)
        if status:
            self._last = (0, 0, 0)
            doing = f"a tensor map of {rows} rows of {self._dims[0]} numbers, {pitch} bytes apart, at {base:#x}"
            raise self._driver.error(doing, "cuTensorMapEncodeTiled", status)
        self._last = (base, rows, pitch)


def aligned_struct(kind: type[ctypes.Structure], offset: int) -> ctypes.Structure:
    """A zeroed struct of that kind whose field at `offset` bytes lies at a multiple of ALIGNMENT."""
    memory = bytearray(ctypes.sizeof(kind) + ALIGNMENT)
    start = -(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + offset) % ALIGNMENT
    return kind.from_buffer(memory, start)

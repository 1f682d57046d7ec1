"""libcuda by ctypes: the few driver functions lowbit calls, their structs, and errors that say what happened.

It must not know about compilers, caches or torch; importing it loads nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

from lowbit.errors import LaunchError, Unsupported

ATTRIBUTE_CLUSTER_DIMENSION = 4
ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6
FUNCTION_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
FUNCTION_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14

_EARLIER = "an earlier kernel on this device failed and this call only reports it: run with CUDA_LAUNCH_BLOCKING=1"
_HINTS = {
    1: "grid, block, shared memory or cluster exceed what the device allows",
    201: "the current device is not the kernel's: call under torch.cuda.device(index)",
    209: "the cubin was compiled for another architecture than the device's",
    400: "the stream or the kernel belongs to another device: call under torch.cuda.device(index)",
    **dict.fromkeys((700, 714, 715, 716, 717, 718, 719), _EARLIER),
}


class LaunchAttributeValue(ctypes.Union):
    """CUlaunchAttributeValue: 64 bytes of which lowbit uses two readings."""

    _fields_: ClassVar = [
        ("bytes", ctypes.c_char * 64),
        ("cluster", ctypes.c_uint32 * 3),
        ("flag", ctypes.c_int32),
        ("align", ctypes.c_uint64),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: 4 bytes of id, 4 of padding (from the union's alignment), 64 of value."""

    _fields_: ClassVar = [("id", ctypes.c_uint32), ("value", LaunchAttributeValue)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig, 56 bytes."""

    _fields_: ClassVar = [
        ("grid_x", ctypes.c_uint32),
        ("grid_y", ctypes.c_uint32),
        ("grid_z", ctypes.c_uint32),
        ("block_x", ctypes.c_uint32),
        ("block_y", ctypes.c_uint32),
        ("block_z", ctypes.c_uint32),
        ("smem_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint32),
    ]


class Driver:
    """A loaded libcuda, or an object with the same functions."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.call("loading the driver", "cuInit", 0)

    @classmethod
    def open(cls) -> Driver:
        """Load libcuda. Raises Unsupported where there is no NVIDIA driver."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unsupported([f"running kernels needs the NVIDIA driver's libcuda.so.1 ({error})"]) from error
        for needed in ("cuLaunchKernelEx", "cuTensorMapEncodeTiled"):
            if not hasattr(library, needed):
                raise Unsupported([f"the NVIDIA driver has no {needed}: install a driver for CUDA 12 or later"])
        return cls(library)

    def call(self, doing: str, name: str, *arguments: Any) -> None:
        """Call function `name`. Raises LaunchError with the driver's own words if it fails."""
        status = getattr(self.library, name)(*arguments)
        if status:
            raise self.error(doing, name, status)

    def error(self, doing: str, name: str, status: int) -> LaunchError:
        hint = f"; {_HINTS[status]}" if status in _HINTS else ""
        words = f"{self._words('cuGetErrorName', status)} ({self._words('cuGetErrorString', status)})"
        return LaunchError(f"{doing}: {name} failed with {words}{hint}")

    def primary_context(self, device_index: int) -> int:
        """The device's primary context, which torch uses too; kept alive for the life of the process."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        doing = f"opening device {device_index}"
        self.call(doing, "cuDeviceGet", ctypes.byref(device), device_index)
        self.call(doing, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return context.value or 0

    def _words(self, function: str, status: int) -> str:
        text = ctypes.c_char_p()
        getattr(self.library, function)(status, ctypes.byref(text))
        return text.value.decode() if text.value else f"error {status}"

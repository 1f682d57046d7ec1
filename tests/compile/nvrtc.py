"""A minimal NVRTC call for tests of the hardware layer alone: text in, status and log out.

Must not depend on lowbit.jit, which has its own compiler wrapper and tests.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path


@functools.cache
def library() -> ctypes.CDLL | None:
    """libnvrtc of the pip wheel, or None."""
    found = [f for p in sys.path if p for f in Path(p).glob("nvidia/*/lib/libnvrtc.so.*")]
    return ctypes.CDLL(str(found[0])) if found else None


def compile_text(text: str, arch: str, include: Path) -> tuple[bool, str]:
    """Whether `text` compiles to a cubin for `arch`, and the log."""
    nvrtc = library()
    if nvrtc is None:
        raise RuntimeError("libnvrtc is missing: pip install nvidia-cuda-nvrtc")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"test.cu", 0, None, None)
    options = [f"-arch={arch}", "-std=c++17", f"-I{include}"]
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    )
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status == 0, log.value.decode()

"""Marks of unit tests that need more than Python; `make test` installs it all and fails on a skip."""

import pytest

from lowbit.errors import Unsupported
from lowbit.jit.compile import find_compiler


def _has_compiler() -> bool:
    try:
        find_compiler()
    except Unsupported:
        return False
    return True


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="no CUDA compiler (pip install nvidia-cuda-nvrtc)")

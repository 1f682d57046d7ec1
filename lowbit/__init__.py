"""lowbit: fast CUDA matrix products with weights of 1 to 8 bits, compiled on demand.

Only names; importing it starts no CUDA, no compiler and not even torch (names are resolved at first use).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowbit.api import explain, supports, warmup
    from lowbit.dtypes import DType, codebook, dtype
    from lowbit.errors import (
        BadCheckpoint,
        BadInput,
        BadType,
        CompileError,
        LaunchError,
        LowbitError,
        MissingKernel,
        UnknownSpec,
        Unsupported,
    )
    from lowbit.layout.pack import PackedWeight, pack, unpack
    from lowbit.nn.linear import Linear
    from lowbit.ops.gemm import matmul
    from lowbit.quantize import quantize
    from lowbit.weights import QuantWeight, WeightSpec

__version__ = "0.1.0"

_HOMES = {
    "lowbit.api": ("explain", "supports", "warmup"),
    "lowbit.dtypes": ("DType", "codebook", "dtype"),
    "lowbit.errors": (
        "BadCheckpoint",
        "BadInput",
        "BadType",
        "CompileError",
        "LaunchError",
        "LowbitError",
        "MissingKernel",
        "UnknownSpec",
        "Unsupported",
    ),
    "lowbit.layout.pack": ("PackedWeight", "pack", "unpack"),
    "lowbit.nn.linear": ("Linear",),
    "lowbit.ops.gemm": ("matmul",),
    "lowbit.quantize": ("quantize",),
    "lowbit.weights": ("QuantWeight", "WeightSpec"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BadCheckpoint",
    "BadInput",
    "BadType",
    "CompileError",
    "DType",
    "LaunchError",
    "Linear",
    "LowbitError",
    "MissingKernel",
    "PackedWeight",
    "QuantWeight",
    "UnknownSpec",
    "Unsupported",
    "WeightSpec",
    "codebook",
    "dtype",
    "explain",
    "matmul",
    "pack",
    "quantize",
    "supports",
    "unpack",
    "warmup",
]


class _Package(ModuleType):
    """Keeps public names what they are: importing the subpackage `quantize` would bind it over the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lowbit' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

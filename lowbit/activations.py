"""What activations become before a product: 16-bit floats as they are, or 8-bit codes with scales.

Knows formats and granularity; it must not know weights, kernels or chips.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from lowbit.dtypes import DType, dtype, nearest_name
from lowbit.errors import UnknownSpec

GROUP_K = 128  # columns that share a scale in the names that end in _g128
_VALUES = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "int8": "int8"}
NAMES = ("bf16", "fp16", *(f"{value}{how}" for value in ("fp8", "fp8_e5m2", "int8") for how in ("", "_g128", "_t")))


@dataclass(frozen=True)
class ActSpec:
    """One format of activations; make one with `ActSpec.parse`.

    x[m, k] is code[m, k] * scale[m, group(k)]: a scale for every token, for 128 columns of a token (`_g128`), or one that is known before (`_t`).
    16-bit formats have no scales.
    """

    value: DType
    k: int = 0
    """Columns that share a scale; 0: all."""
    static: bool = False
    """One scale for all tokens, given rather than found."""

    @property
    def quantised(self) -> bool:
        return self.value.bits == 8

    @property
    def limit(self) -> float:
        """The largest code, as a number: what the largest value of a group becomes. The same on both sides of zero."""
        return min(self.value.max, -self.value.min) if self.value.is_float else 127.0

    def groups(self, k: int) -> int:
        """Scales of a token with k columns."""
        return -(-k // self.k) if self.k else 1

    def __str__(self) -> str:
        name = next(short for short, full in _VALUES.items() if full == self.value.name)
        return name + (f"_g{self.k}" if self.k else "") + ("_t" if self.static else "")

    @classmethod
    def parse(cls, name: str) -> ActSpec:
        """The format called `name`, one of NAMES. Raises UnknownSpec with the nearest."""
        return _parse(name)


@cache
def _parse(name: str) -> ActSpec:
    if name not in NAMES:
        raise UnknownSpec(f"activations are one of {', '.join(NAMES)}; got {name!r}: did you mean {nearest_name(name, NAMES)!r}?")
    value = re.sub(r"_(g128|t)$", "", name)
    return ActSpec(dtype(_VALUES[value]), GROUP_K if name.endswith("_g128") else 0, name.endswith("_t"))

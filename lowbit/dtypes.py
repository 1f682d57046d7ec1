"""Number formats of weights and scales: range, exact decode table, encoder that rounds to nearest even and saturates.

A format is a value that can be compared, hashed and pickled; nothing here knows about groups, layouts or kernels.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Final, Literal

import torch
from torch import Tensor

from lowbit.errors import BadInput, BadType, UnknownSpec

Kind = Literal["int", "uint", "float", "codebook"]
Specials = Literal["none", "fn", "ieee", "e8m0"]

MAX_CODEBOOK: Final = 16

# Formats that keep codes for Inf or NaN: OFP8 E4M3 gives up one mantissa pattern, E5M2 and E3M4 the whole top exponent.
_SPECIALS: Final[dict[tuple[int, int], Specials]] = {(4, 3): "fn", (5, 2): "ieee", (3, 4): "ieee"}

_NATIVE: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Quantiles of a normal distribution, each side scaled to reach 1 (QLoRA, arXiv 2305.14314, appendix E), as float32.
_NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class DType:
    """A number format; make one with `dtype(name)` or `codebook(name, values)`.

    Integers are two's complement in the low bits. Floats are sign, `exponent` bits with bias 2**(exponent-1) - 1, and
    `mantissa` bits, with subnormals; `specials` says which codes are not finite. `e8m0` is a bare power of two.
    """

    name: str
    kind: Kind
    bits: int
    exponent: int = 0
    mantissa: int = 0
    signed: bool = True
    specials: Specials = "none"
    codebook: tuple[float, ...] = ()

    def __str__(self) -> str:
        """The name that `dtype` parses; a user's codebook spells out its values."""
        if self.kind != "codebook" or self.name == "nf4":
            return self.name
        return f"{self.name}({','.join(repr(value) for value in self.codebook)})"

    @property
    def is_int(self) -> bool:
        """True for signed and unsigned integers."""
        return self.kind in ("int", "uint")

    @property
    def is_float(self) -> bool:
        """True for formats with an exponent, also e8m0 and the 16- and 32-bit formats."""
        return self.kind == "float"

    @property
    def storage(self) -> torch.dtype:
        """The torch dtype of tensors of this format: native for bf16, fp16, fp32, else one uint8 code per number."""
        return _NATIVE.get(self.name, torch.uint8)

    @property
    def max(self) -> float:
        """The largest finite value."""
        return torch.finfo(self.storage).max if self.bits > 8 else max(v for v in self.values if math.isfinite(v))

    @property
    def min(self) -> float:
        """The smallest (most negative) finite value."""
        return torch.finfo(self.storage).min if self.bits > 8 else min(v for v in self.values if math.isfinite(v))

    @property
    def num_finite(self) -> int:
        """How many magnitude codes (code without the sign bit of a float) are finite; they come first."""
        if self.kind == "codebook":
            return len(self.codebook)
        if self.is_int:
            return 1 << self.bits
        all_codes = 1 << (self.exponent + self.mantissa)
        return all_codes - {"none": 0, "fn": 1, "ieee": 1 << self.mantissa, "e8m0": 1}[self.specials]

    @property
    def magnitude_mask(self) -> int:
        """The bits of a code that are not the sign bit of a float."""
        return (1 << (self.bits - int(self.is_float and self.signed))) - 1

    @cached_property
    def values(self) -> tuple[float, ...]:
        """The exact value of every code, indexed by code; NaN or Inf where the code is not a finite number.

        Raises BadInput for formats of more than 8 bits, which are never stored as codes.
        """
        if self.bits > 8:
            raise BadInput(f"only formats of up to 8 bits have a table of values; {self.name} has {self.bits} bits")
        return tuple(self._value(code) for code in range(1 << self.bits))

    def _value(self, code: int) -> float:
        if self.kind == "uint":
            return float(code)
        if self.kind == "int":
            return float(code - ((code >> (self.bits - 1)) << self.bits))
        if self.kind == "codebook":
            return self.codebook[code] if code < len(self.codebook) else math.nan
        magnitude = code & self.magnitude_mask
        sign = 1.0 if magnitude == code else -1.0
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa)
        if magnitude >= self.num_finite:
            return sign * math.inf if self.specials == "ieee" and mantissa == 0 else math.nan
        if self.specials == "e8m0":
            return math.ldexp(1.0, code - 127)
        if exponent > 0:
            mantissa += 1 << self.mantissa
        return sign * math.ldexp(mantissa, max(exponent, 1) - (1 << (self.exponent - 1)) + 1 - self.mantissa)

    def decode_table(self, device: torch.device | str | None = None) -> Tensor:
        """Float32 (2**bits,) on `device`: the exact value of every code. Raises BadInput above 8 bits."""
        return torch.tensor(self.values, dtype=torch.float32, device=device)

    def is_special(self, codes: Tensor) -> Tensor:
        """Bool tensor: which uint8 `codes` are NaN, Inf, or beyond the end of a codebook."""
        return (codes & self.magnitude_mask) > self.num_finite - 1  # 256 itself is no uint8

    def decode(self, codes: Tensor) -> Tensor:
        """Float32 values of `codes`, a tensor of dtype `storage` with every code below 2**bits. Raises BadType."""
        if codes.dtype != self.storage:
            raise BadType(f"{self.name} is stored as {self.storage}, but the tensor is {codes.dtype}")
        if self.bits > 8:
            return codes.float()
        if self.is_int:  # flipping the sign bit turns two's complement into an offset: no table, one pass
            offset = (1 << (self.bits - 1)) if self.kind == "int" else 0
            return (codes ^ offset).float().sub_(offset)
        table = self.decode_table(codes.device)
        return table.index_select(0, codes.flatten().int()).view(codes.shape)

    def encode(self, x: Tensor) -> Tensor:
        """Codes (dtype `storage`) of a float tensor: nearest value, ties to the even code, saturating, same shape.

        Ties between two codebook entries go to the lower index. Infinities saturate to the largest finite value, and a
        format without a sign takes negative numbers to its smallest value. Raises BadType for integer tensors, BadInput
        for NaN.
        """
        if not x.is_floating_point():
            raise BadType(f"encode takes a floating-point tensor, not {x.dtype}")
        if bool(torch.isnan(x).any()):
            raise BadInput(f"NaN cannot be encoded as {self.name}; replace the NaNs of the tensor first")
        x = (x if x.dtype == torch.float64 else x.float()).contiguous()
        if self.bits > 8:
            return x.clamp(self.min, self.max).to(self.storage)
        if self.is_int:
            rounded = x.round().clamp_(self.min, self.max)
            codes = rounded.to(torch.uint8) if self.kind == "uint" else rounded.to(torch.int8).view(torch.uint8)
            return codes.bitwise_and_((1 << self.bits) - 1)
        if self.kind == "codebook":
            order = sorted(range(len(self.codebook)), key=self.codebook.__getitem__)
            limits = _rounding_limits([self.codebook[i] for i in order], [a > b for a, b in pairwise(order)], x)
            rank = torch.bucketize(x, limits, out_int32=True)
            return torch.tensor(order, dtype=torch.uint8, device=x.device).index_select(0, rank.flatten()).view(x.shape)
        # Magnitude codes of floats ascend with their value, so the rank among the finite values is the code.
        ties_up = [code % 2 == 1 for code in range(self.num_finite - 1)]
        limits = _rounding_limits(self.values[: self.num_finite], ties_up, x)
        codes = torch.bucketize(x.abs() if self.signed else x, limits, out_int32=True).to(torch.uint8)
        return codes.bitwise_or_(torch.signbit(x).to(torch.uint8) << (self.bits - 1)) if self.signed else codes


def _rounding_limits(grid: Sequence[float], ties_up: Sequence[bool], x: Tensor) -> Tensor:
    """For each ascending grid value but the last: the largest number of x's dtype that still rounds down to it.

    That is the midpoint to the next value, or the number before the midpoint where a tie goes up: rounding to nearest
    even becomes plain comparisons, exact in float32 as in float64.
    """
    middle = torch.tensor([(a + b) / 2 for a, b in pairwise(grid)], dtype=torch.float64)
    below = torch.tensor(-math.inf, dtype=torch.float64)
    limit = torch.where(torch.tensor(ties_up, dtype=torch.bool), middle.nextafter(below), middle)
    cut = limit.to(x.dtype)
    return torch.where(cut > limit, cut.nextafter(below.to(x.dtype)), cut).to(x.device)


def codebook(name: str, values: Sequence[float]) -> DType:
    """A format of 2 to 16 arbitrary finite values, indexed by code; values are rounded to float32.

    `name` is a lower-case identifier without underscores that no other format has. Raises BadInput.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*", name) or name in dtype_names():
        raise BadInput(f"a codebook needs a new name of lower-case letters and digits, not {name!r}")
    if not 2 <= len(values) <= MAX_CODEBOOK:
        raise BadInput(f"a codebook has 2 to {MAX_CODEBOOK} values; {name!r} has {len(values)}")
    rounded = tuple(torch.tensor(values, dtype=torch.float32).tolist())
    if not all(math.isfinite(value) for value in rounded):
        raise BadInput(f"codebook values must be finite in float32; {name!r} has {rounded}")
    return DType(name, "codebook", (len(values) - 1).bit_length(), codebook=rounded)


@cache
def dtype_names() -> tuple[str, ...]:
    """Every name `dtype` knows, short aliases (e4m3) included, user codebooks excluded."""
    integers = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 9)]
    signed = [(bits - 1 - m, m) for bits in range(3, 9) for m in range(bits - 1)]
    unsigned = [(bits - m, m) for bits in range(1, 9) for m in range(bits)]
    floats = [f"fp{1 + e + m}_e{e}m{m}" for e, m in signed] + [f"e{e}m{m}" for e, m in signed]
    common = ["fp8_e4m3", "fp4_e2m1", "e8m0", "nf4", *_NATIVE]
    return tuple(dict.fromkeys([*common, *integers, *floats, *(f"ue{e}m{m}" for e, m in unsigned)]))


def nearest_name(name: str, known: Sequence[str]) -> str:
    """The first of the `known` names that begins with `name`, else the most similar one."""
    name = name.lower()
    begins = [candidate for candidate in known if candidate.startswith(name)]
    return begins[0] if begins else difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]


@cache
def dtype(name: str) -> DType:
    """The format called `name`: int4, uint8, fp4_e2m1, fp8_e4m3 (short: e4m3), e8m0, ue5m3, bf16, fp16, fp32, nf4.

    Also parses what `str` prints for a user's codebook. Raises UnknownSpec with the nearest known name.
    """
    if found := re.fullmatch(r"([a-z][a-z0-9]*)\(([-+.,\de]+)\)", name):
        try:
            values = [float(value) for value in found[2].split(",")]
        except ValueError:
            raise UnknownSpec(f"a codebook is written name(value,value,...); got {name!r}") from None
        return codebook(found[1], values)
    if name not in dtype_names():
        raise UnknownSpec(f"unknown number format {name!r}; did you mean {nearest_name(name, dtype_names())!r}?")
    if name in ("e8m0", "ue8m0"):
        return DType("e8m0", "float", 8, 8, 0, signed=False, specials="e8m0")
    if name == "nf4":
        return DType("nf4", "codebook", 4, codebook=_NF4)
    if name in _NATIVE:
        exponent, mantissa = {"bf16": (8, 7), "fp16": (5, 10), "fp32": (8, 23)}[name]
        return DType(name, "float", 1 + exponent + mantissa, exponent, mantissa, specials="ieee")
    if found := re.fullmatch(r"(u?)int(\d)", name):
        return DType(name, "uint" if found[1] else "int", int(found[2]), signed=not found[1])
    e, m = int(name[-3]), int(name[-1])
    specials = _SPECIALS.get((e, m), "none")
    if name.startswith("ue"):
        return DType(name, "float", e + m, e, m, signed=False, specials=specials)
    return DType(f"fp{1 + e + m}_e{e}m{m}", "float", 1 + e + m, e, m, specials=specials)

"""What is to be computed: one frozen value per layer shape and format, without the number of tokens.

Knows formats and chips; it must not know tiles, warps or stages (see plan/).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from lowbit.activations import ActSpec
from lowbit.arch import Arch
from lowbit.dtypes import DType, dtype
from lowbit.errors import BadInput, Unsupported
from lowbit.weights import WeightSpec

ACTIVATIONS = ("bf16", "fp16")  # what x becomes before the product
EIGHT_BITS = ("fp8", "int8")  # ... with a scale a token; of kernels alone as yet, no layer takes them
OUTPUTS = {"bf16": 2, "fp16": 2, "fp32": 4}  # what sums are rounded to: bytes of an element


@dataclass(frozen=True)
class Problem:
    """y (M, n) = x (M, k) @ w (n, k)^T, with w as `spec` says; any M."""

    spec: WeightSpec
    act: str  # one of ACTIVATIONS or EIGHT_BITS
    out: str  # one of OUTPUTS
    n: int
    k: int
    arch: Arch
    batch_invariant: bool = False  # one order of sums for every M, so that a row's bits do not depend on the rows around it

    def __post_init__(self) -> None:
        if self.spec.act_order:
            raise BadInput(f"kernels compute groups in natural order, {self.spec} has others: use problem_of(layout, ...)")

    @property
    def operand_bits(self) -> int:
        return 8 if self.act in EIGHT_BITS else 16

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why no kernel can compute it, whatever its size; () if one may."""
        return (unsupported_eight_bits if self.operand_bits == 8 else unsupported)(self.spec, self.act, self.arch)

    @cached_property
    def folds(self) -> bool:
        """Group scales may multiply the operands instead of fp32 sums: nothing would be rounded."""
        if self.spec.zero != "none" or self.operand_bits == 8:
            return False
        return product_rounding(self.spec.value, self.spec.scale, self.act) == 0.0

    @property
    def out_bytes(self) -> int:
        """Of an element of y."""
        return OUTPUTS[self.out]

    @property
    def label(self) -> str:
        """For messages and file names: `int4_g128 x bf16 -> bf16, 4096x4096`."""
        return f"{self.spec} x {self.act} -> {self.out}, {self.n}x{self.k}{', batch-invariant' * self.batch_invariant}"


MOST_COLUMNS = 65536  # of a token that is quantised: a block keeps them in registers


@dataclass(frozen=True)
class ActProblem:
    """Activations (M, k) of 16 bits become codes and scales as `spec` says; any M."""

    spec: ActSpec
    x: str  # one of ACTIVATIONS
    k: int  # a multiple of 8
    arch: Arch

    @property
    def threads(self) -> int:
        """Of the block that quantises a token."""
        return min(1024, -(-self.k // 256) * 32)

    @property
    def label(self) -> str:
        """For messages and file names: `quantise bf16 to fp8_g128, 4096 columns`."""
        return f"quantise {self.x} to {self.spec}, {self.k} columns"

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why the chip cannot do it; () if it can."""
        reasons = []
        if self.spec.value.is_float and self.arch.level < 89:
            reasons.append(f"{self.spec} activations need sm_89 or newer; {self.arch.name} has no such numbers: use int8")
        if self.x == "bf16" and not self.arch.bf16:
            reasons.append(f"bf16 activations need sm_80 or newer; {self.arch.name} has none: use fp16")
        if not 8 <= self.k <= MOST_COLUMNS:
            reasons.append(f"activations are quantised with 8 to {MOST_COLUMNS} columns; got {self.k}")
        return tuple(reasons)


def merges(value: DType, scale: DType) -> bool:
    """A scale in the operand is free: it joins the factor that a float's conversion multiplies with. As `kMerges` in cuda/dequant.cuh."""
    return value.is_float and scale.bits <= 8 and scale.specials != "e8m0" and scale.exponent <= 5


@cache
def product_rounding(value: DType, scale: DType, act: str) -> float | None:
    """The largest relative error of a value times a scale as an operand of type `act`: 0 where every product is an operand, found by trying
    all; None where kernels may not multiply so, since range would be lost.

    Operands lack a power of two, which is taken back on fp32: 2^6 of integers as bf16, 2^9 as fp16, and where scales merge the one that
    all of them are below twice of. Products beyond float32 do not count. Products of bf16 scales may become subnormal operands below
    2^-120: then they lose more than is said here, 2^-128 each at most.
    """
    if scale.name == "bf16" and act == "bf16":
        return 2.0**-8
    if scale.bits > 8 or value.kind == "codebook" or (act == "fp16" and (value.is_int or scale.specials == "e8m0")):
        return None
    values = torch.tensor([v for v in value.values if math.isfinite(v)], dtype=torch.float64)
    scales = torch.tensor([v for v in scale.values if math.isfinite(v)], dtype=torch.float64)
    exact = (values[:, None] * scales).flatten()
    exact = exact[exact.abs() <= torch.finfo(torch.float32).max]
    left = 2.0**6 if value.is_int else 2.0 ** (1 << (scale.exponent - 1)) if merges(value, scale) else 1.0
    operands = (exact / left).to(torch.bfloat16 if act == "bf16" else torch.float16).double() * left
    error = ((operands - exact).abs() / exact.abs().clamp_min(torch.finfo(torch.float64).tiny)).max().item()
    return error if error <= 2.0**-8 else None


def unsupported(spec: WeightSpec, act: str, arch: Arch) -> tuple[str, ...]:
    """Why weights of `spec` cannot be multiplied with `act` activations on `arch`; () if they can."""
    reasons = []
    if act not in ACTIVATIONS:
        reasons.append(f"act must be one of {', '.join(ACTIVATIONS)}; got {act!r}")
    if act == "bf16" and not arch.bf16:
        reasons.append(f"bf16 products need sm_80 or newer; {arch.name} has none: use act='fp16'")
    if act in ACTIVATIONS and (largest := max(spec.value.max, -spec.value.min)) > (limit := dtype(act).max):
        remedy = "use act='bf16'" if largest <= dtype("bf16").max else "divide its values, multiply the scales"
        reasons.append(f"{spec.value.name} reaches {largest:g}, beyond {act}'s {limit:g}: {remedy}")
    if spec.k % 16 and not spec.act_order:  # which is packed in steps that suit
        reasons.append(f"group sizes must be multiples of 16; {spec} has {spec.k}")
    return tuple(reasons)


def unsupported_eight_bits(spec: WeightSpec, act: str, arch: Arch) -> tuple[str, ...]:
    """The same for activations of EIGHT_BITS, which kernels take and layers do not yet."""
    reasons, value = [], spec.value
    if not arch.wgmma:
        reasons.append(f"8-bit activations are multiplied on Hopper (sm_90a) alone as yet; this is {arch.name}: use act='fp16'")
    if act == "int8" and not (value.is_int and value.max < 128):
        reasons.append(f"int8 activations take integers of up to 8 bits that are int8 themselves; {value.name} is not: use act='fp8' or 'bf16'")
    exact = (value.is_int and max(value.max, -value.min) <= 16) or (value.is_float and value.exponent <= 4 and value.mantissa <= 3)
    if act == "fp8" and not exact:
        reasons.append(f"fp8 activations take weights that are e4m3 numbers, integers up to 16 among them; {value.name} is not: use act='bf16'")
    if spec.zero != "none":
        reasons.append(f"zero points are not for 8-bit activations yet; {spec} has them: use act='bf16'")
    if spec.k % 32:
        reasons.append(f"group sizes must be multiples of 32 with 8-bit activations; {spec} has {spec.k}: use act='bf16'")
    return tuple(reasons)


def rounded_codebook(value: DType, act: str) -> Tensor:
    """The entries of a codebook as kernels multiply them: float32 rounded to the nearest of the operands' type, in that type."""
    return dtype(act).encode(torch.tensor(value.codebook))


def check(spec: WeightSpec, act: str, arch: Arch) -> None:
    """Raises Unsupported with every reason, or returns."""
    reasons = unsupported(spec, act, arch)
    if reasons:
        raise Unsupported(reasons)

"""What is to be computed: one frozen value per layer shape and format, without the number of tokens.

Knows formats and chips; it must not know tiles, warps or stages (see plan/).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from lowbit.arch import Arch
from lowbit.dtypes import DType, dtype
from lowbit.errors import BadInput, Unsupported
from lowbit.weights import WeightSpec

ACTIVATIONS = ("bf16", "fp16")  # what x becomes before the product
OUTPUTS = {"bf16": 2, "fp16": 2, "fp32": 4}  # what sums are rounded to: bytes of an element


@dataclass(frozen=True)
class Problem:
    """y (M, n) = x (M, k) @ w (n, k)^T, with w as `spec` says; any M."""

    spec: WeightSpec
    act: str  # one of ACTIVATIONS
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
        return 16

    @cached_property
    def folds(self) -> bool:
        """Group scales may multiply the operands instead of fp32 sums: nothing would be rounded."""
        return self.spec.zero == "none" and exact_products(self.spec.value, self.spec.scale, self.act)

    @property
    def merges(self) -> bool:
        """Folding is free: the scale joins the factor that a float's conversion multiplies with. As `kMerges` in cuda/dequant.cuh."""
        return self.folds and self.spec.scale.specials != "e8m0"

    @property
    def out_bytes(self) -> int:
        """Of an element of y."""
        return OUTPUTS[self.out]

    @property
    def label(self) -> str:
        """For messages and file names: `int4_g128 x bf16 -> bf16, 4096x4096`."""
        return f"{self.spec} x {self.act} -> {self.out}, {self.n}x{self.k}{', batch-invariant' * self.batch_invariant}"


@cache
def exact_products(value: DType, scale: DType, act: str) -> bool:
    """Every product of a value and a scale that float32 can hold is an operand of type `act`, so multiplying rounds nothing.

    But for e8m0 scales, operands lack the power of two that all scales are below twice of: it is taken back on fp32.
    """
    if value.is_int or value.kind == "codebook" or scale.bits > 8 or (act == "fp16" and scale.specials == "e8m0"):
        return False
    values = torch.tensor([v for v in value.values if math.isfinite(v)], dtype=torch.float64)
    scales = torch.tensor([v for v in scale.values if math.isfinite(v)], dtype=torch.float64)
    if scale.specials != "e8m0":
        scales = scales / 2.0 ** (1 << (scale.exponent - 1))
    products = (values[:, None] * scales).flatten()
    products = products[products.abs() <= torch.finfo(torch.float32).max]
    operand = torch.bfloat16 if act == "bf16" else torch.float16
    return bool((products.to(operand).double() == products).all())


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


def rounded_codebook(value: DType, act: str) -> Tensor:
    """The entries of a codebook as kernels multiply them: float32 rounded to the nearest of the operands' type, in that type."""
    return dtype(act).encode(torch.tensor(value.codebook))


def check(spec: WeightSpec, act: str, arch: Arch) -> None:
    """Raises Unsupported with every reason, or returns."""
    reasons = unsupported(spec, act, arch)
    if reasons:
        raise Unsupported(reasons)

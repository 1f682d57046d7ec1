"""What is to be computed: one frozen value per layer shape and format, without the number of tokens.

Knows formats and chips; it must not know tiles, warps or stages (see plan/).
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.arch import Arch
from lowbit.errors import Unsupported
from lowbit.weights import WeightSpec

ACTIVATIONS = ("bf16", "fp16")  # what x becomes before the product
OUTPUTS = {"bf16": 2, "fp16": 2, "fp32": 4}  # what sums are rounded to: bytes of an element
FP16_MAX = 65504.0


@dataclass(frozen=True)
class Problem:
    """y (M, n) = x (M, k) @ w (n, k)^T, with w as `spec` says; any M."""

    spec: WeightSpec
    act: str  # one of ACTIVATIONS
    out: str  # one of OUTPUTS
    n: int
    k: int
    arch: Arch

    @property
    def operand_bits(self) -> int:
        return 16

    @property
    def out_bytes(self) -> int:
        """Of an element of y."""
        return OUTPUTS[self.out]

    @property
    def label(self) -> str:
        """For messages and file names: `int4_g128 x bf16 -> bf16, 4096x4096`."""
        return f"{self.spec} x {self.act} -> {self.out}, {self.n}x{self.k}"


def unsupported(spec: WeightSpec, act: str, arch: Arch) -> tuple[str, ...]:
    """Why weights of `spec` cannot be multiplied with `act` activations on `arch`; () if they can."""
    reasons = []
    if act not in ACTIVATIONS:
        reasons.append(f"act must be one of {', '.join(ACTIVATIONS)}; got {act!r}")
    if act == "bf16" and not arch.bf16:
        reasons.append(f"bf16 products need sm_80 or newer; {arch.name} has none: use act='fp16'")
    if spec.value.kind == "codebook":
        reasons.append(f"no kernel looks up codebooks yet; {spec} has one: quantise to integers or floats")
    elif act == "fp16" and spec.value.max > FP16_MAX:
        reasons.append(f"{spec.value.name} reaches {spec.value.max:g}, beyond fp16's {FP16_MAX:g}: use act='bf16'")
    if spec.act_order:
        reasons.append(
            f"kernels need groups in natural order; {spec} has a group index per k: quantise without act-order"
        )
    if spec.k % 16:
        reasons.append(f"group sizes must be multiples of 16; {spec} has {spec.k}")
    return tuple(reasons)


def check(spec: WeightSpec, act: str, arch: Arch) -> None:
    """Raises Unsupported with every reason, or returns."""
    reasons = unsupported(spec, act, arch)
    if reasons:
        raise Unsupported(reasons)

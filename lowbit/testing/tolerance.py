"""How far a right kernel may be from the exact product, element by element: derived, not tuned.

Knows how tensor cores add and how numbers are rounded; it must not know plans or which kernel is judged.

Operands are exact: codes become 16-bit numbers without an error, and products of 16-bit numbers fit the sums below. Two things
make them differ from w by a relative error of up to R, `operand_rounding`: codebooks have entries that are no 16-bit numbers, at
most 2^-8 (bf16) or 2^-11 (fp16) unless an entry is a subnormal operand; and plans may round weights times scales to bf16
(`plan.rounds`), 2^-8 where operands are no subnormals. So R T is theirs. What is left, with T = sum over k of |x w|, of the
operands (1 + R) times that of w, which no partial sum exceeds:

1. Tensor cores add blocks of products to the accumulator. Every term is cut toward zero `fraction` bits below the
   largest exponent and so loses less than 2^-fraction T; a block has `size` products and the accumulator. Its result is
   cut to 23 fraction bits, less than 2^-23 T. So a block loses ((size + 1) 2^-fraction + 2^-23) T at most; there are
   K / size blocks. (16, 25) is bit-exact on data recorded on an H200; older chips' pairs are published or assumed.
2. Group scales act on partial sums by one FMA per 16 of k at the most often: 2^-24 T each.
3. Partial sums of warps and of the blocks of a cluster are added in float32, one per 128 of k at most: 2^-24 T each.
4. w is (code * scale) * scale2, rounded twice to float32; the kernel scales sums instead: 2 * 2^-24 T.
5. The factor per row and the bias come in one FMA: 2^-24 (T + |bias|).
6. Rounding to the output type: half a unit in the last place of a result up to |y| + all of the above.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.errors import BadType
from lowbit.problem import product_rounding, rounded_codebook
from lowbit.weights import WeightSpec

_SUMS = ((90, 16, 25), (80, 8, 24), (0, 4, 24))  # from this capability x 10 on: products in a block, fraction bits
_FRACTION = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}  # stored fraction bits of the output types


def operand_rounding(spec: WeightSpec, act: str, scaled: bool = False) -> float:
    """The largest relative error of a weight that kernels multiply with `act` activations: 0 but for codebooks, and where
    group scales multiply operands that cannot hold the product (`scaled`, which `plan.rounds` says of a plan).
    """
    scales = (product_rounding(spec.value, spec.scale, act) or 0.0) if scaled else 0.0
    if spec.value.kind != "codebook":
        return scales
    exact, rounded = torch.tensor(spec.value.codebook).double(), rounded_codebook(spec.value, act).double()
    entries = float(((rounded - exact).abs() / exact.abs().clamp_min(torch.finfo(torch.float32).tiny)).max())
    return entries + scales * (1 + entries)


def bound(
    x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *, level: int = 90, rounding: float = 0.0
) -> Tensor:
    """The largest |kernel - exact| of y = x w^T + bias, float64 (M, N); infinite beyond out_dtype's range.

    x: (M, K) as the kernel reads it, already of the activation type; w: (N, K) float32, `QuantWeight.dequantize()`;
    bias: (N,) or None; level: compute capability x 10 of the chip that computes; rounding: `operand_rounding` of the weights.
    Raises BadType for other output types.
    """
    if out_dtype not in _FRACTION:
        raise BadType(f"out_dtype must be one of {', '.join(map(str, _FRACTION))}; got {out_dtype}")
    x64, w64 = x.double(), w.double()
    k = x.shape[1]
    offset = torch.zeros(w.shape[0], dtype=torch.float64, device=w.device) if bias is None else bias.double()
    total = x64.abs() @ w64.abs().T
    size, fraction = next((size, fraction) for since, size, fraction in _SUMS if level >= since)
    loss = -(-k // size) * ((size + 1) * 2.0**-fraction + 2.0**-23)
    loss += (-(-k // 16) + -(-k // 128) + 3) * 2.0**-24
    before = (rounding + (1 + rounding) * loss) * total + 2.0**-24 * offset.abs()
    largest = (x64 @ w64.T + offset).abs() + before
    fraction = _FRACTION[out_dtype]
    finfo = torch.finfo(out_dtype)
    half_unit = torch.exp2(torch.floor(torch.log2(largest.clamp_min(finfo.tiny))) - fraction - 1)
    return torch.where(largest > finfo.max, torch.inf, before + half_unit)

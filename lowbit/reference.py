"""What the kernels compute, in plain PyTorch on any device: the meaning that every kernel is measured against.

Knows QuantWeight and activation types; it must not know plans, tiles or packed layouts, and it is not built for speed.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from lowbit.errors import BadInput, BadType, Unsupported
from lowbit.weights import QuantWeight

_ACTIVATIONS: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Rows of the weight taken to float64 at a time: bounds the memory, changes no number.
_ROWS: Final = 1024


def matmul(x: Tensor, qw: QuantWeight, *, act: str = "bf16", bias: Tensor | None = None,
           out_dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    """x (..., K) x weight (N, K) -> (..., N); with experts x (E, ..., K) x (E, N, K) -> (E, ..., N), each by its own.

    x is rounded to the activation type, weights are their exact float32 meaning, products are summed in float64, then
    bias (N,) or (E, N) is added and the sum rounded to float32 and to `out_dtype` (default: x's), as an epilogue does.
    NaN and Inf spread as in IEEE arithmetic. Raises Unsupported for an unknown `act`, BadInput, BadType.
    """
    if act not in _ACTIVATIONS:
        raise Unsupported([f"activation type {act!r} is unknown; use one of {', '.join(_ACTIVATIONS)}"])
    _check(x, qw, bias)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    dense = qw.experts is None
    xs = x.unsqueeze(0) if dense else x
    out = torch.empty((*xs.shape[:-1], qw.n), dtype=out_dtype, device=x.device)
    for expert in range(qw.num_experts):
        operand = xs[expert].to(_ACTIVATIONS[act]).double()
        w = qw.dequantize(expert)
        for first in range(0, qw.n, _ROWS):
            rows = slice(first, first + _ROWS)
            y = operand @ w[rows].double().T
            if bias is not None:
                y += (bias if dense else bias[expert])[rows].double()
            out[expert, ..., rows] = y.float().to(out_dtype)
    return out[0] if dense else out


def _check(x: Tensor, qw: QuantWeight, bias: Tensor | None) -> None:
    if not x.is_floating_point():
        raise BadType(f"x must be a float tensor; found {x.dtype}")
    if x.ndim < 1 or x.shape[-1] != qw.k:
        raise BadInput(f"x must be (..., K) with K = {qw.k}; found shape {tuple(x.shape)}")
    if qw.experts is not None and (x.ndim < 2 or x.shape[0] != qw.experts):
        raise BadInput(f"x must be (E, ..., K) with E = {qw.experts}; found shape {tuple(x.shape)}")
    if bias is not None and bias.shape != qw.shape[:-1]:
        raise BadInput(f"bias must have shape {qw.shape[:-1]}; found {tuple(bias.shape)}")
    for name, t in (("x", x), ("bias", bias)):
        if t is not None and t.device != qw.device:
            raise BadInput(f"x, bias and weight must be on one device; {name} is on {t.device}, weight on {qw.device}")

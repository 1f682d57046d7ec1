"""Round to nearest: from the range of a block of weights to its scale, its zero point and its codes.

Works on plain tensors of one expert; it must not know how scales are shared between blocks or experts.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from lowbit.dtypes import DType
from lowbit.errors import BadInput
from lowbit.weights import Zero

# Forgiven when a scale is rounded up: a quotient that is an ulp too large must not cost a whole step of the scale.
_SLACK: Final = 2.0**-20

# A block far from zero compared with its width needs a large zero point; this keeps it below 2**18 in 8 bits, so that
# float32 resolves it to 1/64 of a step.
_MIN_RELATIVE_WIDTH: Final = 2.0**-10


def split_blocks(w: Tensor, rows: int, k: int) -> Tensor:
    """(N, K) -> (R, rows, G, k), a view where the blocks fit; blocks at the edge repeat the last row and column.

    0 rows or k means all of them.
    """
    n, width = w.shape
    rows, k = min(rows or n, n), min(k or width, width)
    r, g = -(-n // rows), -(-width // k)
    if r * rows != n:
        w = w[torch.arange(r * rows, device=w.device).clamp_(max=n - 1)]
    if g * k != width:
        w = w[:, torch.arange(g * k, device=w.device).clamp_(max=width - 1)]
    return w.reshape(r, rows, g, k)


def join_blocks(blocks: Tensor, n: int, k: int) -> Tensor:
    """(R, rows, G, k) -> (N, K): the inverse of `split_blocks`."""
    r, rows, g, width = blocks.shape
    return blocks.reshape(r * rows, g * width)[:n, :k]


def block_range(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(R, rows, G, k) -> least and greatest weight of every block, (R, G) each."""
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def divide(t: Tensor, number: float) -> Tensor:
    """t / number, the same bits on every device: on CUDA, PyTorch multiplies by the reciprocal of a Python number."""
    return t / torch.full_like(t, number)


def fitting_scale(value: DType, zero: Zero, lo: Tensor, hi: Tensor) -> Tensor:
    """The least scale with which weights from `lo` to `hi` do not saturate; 1 for blocks of zeros. Shape of `lo`.

    Formats that lack a sign ignore the weights of that sign: int1 holds -1 and 0.
    """
    if zero == "none":
        below = divide(lo, value.min) if value.min < 0 else torch.zeros_like(lo)
        above = divide(hi, value.max) if value.max > 0 else torch.zeros_like(hi)
        scale = torch.maximum(below, above)
    else:
        if zero == "int":  # the zero point itself must be a code, so the range has to reach zero
            lo, hi = lo.clamp(max=0), hi.clamp(min=0)
        width = torch.maximum(hi - lo, torch.maximum(-lo, hi) * _MIN_RELATIVE_WIDTH)
        scale = divide(width, value.max - value.min)
    return torch.where(scale > 0, scale, 1.0)


def round_scale(scale: DType, wanted: Tensor, *, up: bool) -> Tensor:
    """`wanted` (float32, positive) in the format of scales: nearest, or the next above with `up`; never zero.

    Raises BadInput where the format cannot reach it.
    """
    if bool((wanted * (1 - _SLACK) > scale.max).any()):
        raise BadInput(f"a scale of {wanted.max().item():.4g} is needed, but {scale} ends at {scale.max:.4g}; "
                       f"use wider scales or a second level")  # fmt: skip
    codes = scale.encode(wanted)
    found = scale.decode(codes)
    short = found < wanted * (1 - _SLACK) if up else found == 0
    # Positive floats are ordered like their bit patterns: adding 1 gives the next one.
    patterns = codes.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[codes.itemsize])
    return (patterns + short).view(codes.dtype)


def refuse_vanishing(scale: DType, wanted: Tensor) -> None:
    """Raises BadInput where `wanted` (float32, positive) all lie below the format: single blocks may vanish beside larger ones, all may not."""
    least = 2.0**-24 if scale.name == "fp16" else min((v for v in scale.values if v > 0), default=0.0) if scale.bits <= 8 else 0.0
    if least > 2.0**-60 and bool((wanted < least / 2).all()):
        raise BadInput(f"no scale above {wanted.max().item():.4g} is needed, but {scale} begins at {least:.4g}: all weights would become 0; "
                       f"use wider scales or a second level")  # fmt: skip


def zero_points(value: DType, zero: Zero, lo: Tensor, scales: Tensor) -> Tensor | None:
    """What to add to weight / scale to get a code, so that `lo` becomes the least code: int16, float32 or None."""
    if zero == "none":
        return None
    if zero == "float":
        return value.min - lo / scales
    points = value.min - lo.clamp(max=0) / scales
    return points.round().clamp(value.min, value.max).to(torch.int16)


def nearest_codes(value: DType, blocks: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Uint8 codes (R, rows, G, k) of weights, given the decoded scales and the zero points of their blocks (R, G)."""
    q = blocks / scales[:, None, :, None]
    if zeros is not None:
        q += zeros[:, None, :, None]
    return value.encode(q)

"""`quantize`: float weights to a QuantWeight of any spec, without data, expert by expert.

Knows specs and tensors, on CPU or GPU; it must not know checkpoints, kernels or packed layouts.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from lowbit import weights
from lowbit.errors import BadInput, BadType
from lowbit.layout.bits import num_words, pack_bits
from lowbit.quantize.block_float import has_shared_exponents, second_level, shared_exponents
from lowbit.quantize.rtn import (
    block_range,
    fitting_scale,
    join_blocks,
    nearest_codes,
    refuse_vanishing,
    round_scale,
    split_blocks,
    zero_points,
)
from lowbit.weights import QuantWeight, WeightSpec, refuse_where

__all__ = ["quantize"]

# Tried by `clip_search`: below half the range, saturation costs more than finer steps gain, even in 2 bits.
_CLIP_RATIOS: Final = tuple(1 - i / 20 for i in range(1, 11))


def quantize(weight: Tensor, spec: str | WeightSpec, *, clip_search: bool = False) -> QuantWeight:
    """Rounds a float tensor (N, K), or (E, N, K) with experts, to nearest: scales first, then codes for these scales.

    Integer and float scales span the range of their block, e8m0 scales follow OCP MX (or, for integers, the next power
    of two above), second levels span the row or the tensor. Blocks of zeros get scale 1. `clip_search` tries narrower
    ranges and keeps, per block, the one with the least squared error. Columns keep their order, also with act_order.

    Weights are taken as float32. uint formats without zero points refuse negative weights; int1 without zero points
    has -1 and 0 only, so positive weights become 0. Raises BadType for tensors that are not floating point, BadInput
    for other shapes, for NaN or Inf (named by index), and where a scale does not fit its format.
    """
    spec = weights.spec(spec)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise BadType(f"weight must be a float tensor; found {getattr(weight, 'dtype', type(weight).__name__)}")
    if weight.ndim not in (2, 3) or weight.numel() == 0:
        raise BadInput(f"weight must be a non-empty (N, K) or (E, N, K) tensor; found shape {tuple(weight.shape)}")
    if weight.is_meta or weight.layout != torch.strided:
        raise BadType(f"weight must be a dense tensor with values; found {'one on meta' if weight.is_meta else weight.layout}")
    dense = weight.ndim == 2
    experts = weight.detach().unsqueeze(0) if dense else weight.detach()
    e, n, k = experts.shape
    per_group, device = (e, *spec.scale_shape(n, k)), weight.device
    codes = torch.empty((e, n, num_words(k, spec.value.bits)), dtype=torch.int32, device=device)
    scales = torch.empty(per_group, dtype=spec.scale.storage, device=device)
    zeros = scale2 = g_idx = None
    if spec.zero != "none":
        zeros = torch.empty(per_group, dtype=torch.int16 if spec.zero == "int" else torch.float32, device=device)
    if spec.scale2 != "none":
        scale2 = torch.empty((e,) if spec.scale2 == "tensor" else (e, n), dtype=torch.float32, device=device)
    if spec.act_order:
        g_idx = (torch.arange(k, dtype=torch.int32, device=device) // spec.k).repeat(e, 1)
    for i in range(e):
        w = experts[i].float()
        _check(spec, w, () if dense else (i,))
        factor = second_level(spec, w)
        if scale2 is not None and factor is not None:
            scale2[i] = factor
            w = w / factor.view(-1, 1)
        blocks = split_blocks(w, spec.rows, spec.k)
        lo, hi = block_range(blocks)
        if clip_search:
            lo, hi = _best_range(spec, blocks, lo, hi)
        fit = _fit(spec, blocks, lo, hi)
        codes[i] = pack_bits(join_blocks(fit.codes, n, k), spec.value.bits)
        scales[i] = fit.scales
        if zeros is not None and fit.zeros is not None:
            zeros[i] = fit.zeros
    return QuantWeight(spec, None if dense else e, n, k, codes, scales, zeros, scale2, g_idx)


class _Fit(NamedTuple):
    scales: Tensor  # (R, G), as stored
    zeros: Tensor | None  # (R, G), as stored
    codes: Tensor  # uint8 (R, rows, G, k)


def _fit(spec: WeightSpec, blocks: Tensor, lo: Tensor, hi: Tensor) -> _Fit:
    """Scales and zero points for weights from `lo` to `hi` (R, G), and the codes that are nearest under them."""
    if has_shared_exponents(spec):
        scales = shared_exponents(spec.value, lo, hi)
    else:
        # Integers round scales up: saturating by more than half a step would break their error bound. Floats have
        # their largest steps at the end of the range anyway, and gain from the nearest scale.
        wanted = fitting_scale(spec.value, spec.zero, lo, hi)
        if spec.scale2 == "none":
            refuse_vanishing(spec.scale, wanted)
        scales = round_scale(spec.scale, wanted, up=spec.value.is_int)
    decoded = spec.scale.decode(scales)
    zeros = zero_points(spec.value, spec.zero, lo, decoded)
    return _Fit(scales, zeros, nearest_codes(spec.value, blocks, decoded, zeros))


def _best_range(spec: WeightSpec, blocks: Tensor, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    """The range (R, G) between half and all of `lo` to `hi` with the least squared error, the wider one if equal."""
    middle = (lo + hi) / 2 if spec.zero == "float" else torch.zeros_like(lo)
    best_lo, best_hi, least = lo, hi, _squared_error(spec, blocks, lo, hi)
    for ratio in _CLIP_RATIOS:
        trial_lo, trial_hi = middle + (lo - middle) * ratio, middle + (hi - middle) * ratio
        error = _squared_error(spec, blocks, trial_lo, trial_hi)
        better = error < least
        best_lo, best_hi = torch.where(better, trial_lo, best_lo), torch.where(better, trial_hi, best_hi)
        least = torch.where(better, error, least)
    return best_lo, best_hi


def _squared_error(spec: WeightSpec, blocks: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    fit = _fit(spec, blocks, lo, hi)
    w = spec.value.decode(fit.codes)
    if fit.zeros is not None:
        w -= fit.zeros[:, None, :, None]
    w *= spec.scale.decode(fit.scales)[:, None, :, None]
    return (w - blocks).square_().sum((1, 3))


def _check(spec: WeightSpec, w: Tensor, index: tuple[int, ...]) -> None:
    refuse_where(~torch.isfinite(w), w, "weights must be finite in float32", index)
    if spec.zero == "none" and spec.value.min >= 0:
        refuse_where(w < 0, w, f"{spec.value} without zero points holds no negative weights; use a signed format or "
                               f"zero points", index)  # fmt: skip

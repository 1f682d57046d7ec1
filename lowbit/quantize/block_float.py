"""Scales of block floating point: the shared exponents of OCP MX, and the second level under group scales (NVFP4).

Chooses scales only; codes are made by rtn, whatever the scales are.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from lowbit.dtypes import DType
from lowbit.quantize.rtn import block_range, divide, fitting_scale, split_blocks
from lowbit.weights import WeightSpec

_E8M0_BIAS: Final = 127


def has_shared_exponents(spec: WeightSpec) -> bool:
    """Whether scales follow the rule of OCP MX: powers of two that may let the largest weights saturate.

    Integers under a second level, or with zero points, round the power of two up instead and never saturate.
    """
    fits_up = spec.zero != "none" or (spec.value.is_int and spec.scale2 != "none")
    return spec.scale.specials == "e8m0" and not fits_up


def shared_exponents(value: DType, lo: Tensor, hi: Tensor) -> Tensor:
    """E8m0 codes (uint8) of 2**(floor(log2(absmax)) - emax), emax the exponent of the format's largest number.

    The rule of the OCP Microscaling Formats specification 1.0, section 6.3, clamped to e8m0; 1 for blocks of zeros.
    """
    absmax = torch.maximum(-lo, hi)
    largest = max(value.max, 1.0 if value.is_int else -value.min)  # of integers the positive end: int8 has emax 6
    emax = math.frexp(largest)[1] - 1
    exponent = torch.frexp(absmax).exponent - 1 - emax
    exponent = torch.where(absmax > 0, exponent, 0)
    return (exponent + _E8M0_BIAS).clamp(0, 254).to(torch.uint8)


def second_level(spec: WeightSpec, w: Tensor) -> Tensor | None:
    """Float32 factor of (N, K) weights, () per tensor or (N,) per channel, or None without a second level.

    It brings the largest group scale to the largest number of an 8-bit scale format (NVFP4: absmax / (6 * 448)), and
    to 1 in e8m0, where nothing is gained by large numbers, and in the 16- and 32-bit formats.
    """
    if spec.scale2 == "none":
        return None
    lo, hi = block_range(split_blocks(w, 0 if spec.scale2 == "tensor" else 1, 0))
    if spec.zero != "none":  # a block may join the least weights of one row with the greatest of another
        hi = torch.maximum(-lo, hi)
        lo = -hi
    largest = 1.0 if spec.scale.bits > 8 or spec.scale.specials == "e8m0" else spec.scale.max
    factor = divide(fitting_scale(spec.value, spec.zero, lo, hi), largest)
    factor = factor.clamp(min=torch.finfo(torch.float32).tiny)  # a subnormal factor would lose its precision
    return factor.view(()) if spec.scale2 == "tensor" else factor.view(-1)

"""8-bit activations in plain PyTorch, on any device: bit for bit what the kernel makes (cuda/quantize_act.cuh).

Knows activation formats; it must not know products.

A group's scale is its largest magnitude over the format's limit, both in float32; a code is x times the limit over that magnitude, rounded to the
nearest, ties to even, and cut at the limit. Magnitudes below 2^-100 count as that, so that rows of zeros have a scale, codes of zero and nothing
special. A token with a NaN or an infinity in it has codes of zero and scales of NaN throughout, and so has every output of it, whatever the
weights are; other tokens never notice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbit.activations import ActSpec
from lowbit.errors import BadInput, BadType

LEAST = 2.0**-100  # of a magnitude that a scale is made of: its reciprocal is still a number


def quantize_act(x: Tensor, act: str | ActSpec, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x (..., K) of bf16 or fp16 -> codes uint8 (..., K) and scales float32 (..., groups of K).

    act: an 8-bit format of `ActSpec.parse`, such as "fp8" (e4m3, a scale a token) or "int8". Codes are bit patterns: of a float8, or of an int8 in
    two's complement. scale: float32, one element, for formats whose scale is known before (`_t`), positive and finite, which is not checked on a
    GPU; else None.
    Raises UnknownSpec, BadInput, BadType.
    """
    spec = ActSpec.parse(act) if isinstance(act, str) else act
    check_act_input(x, spec, scale)
    values, columns = x.float(), x.shape[-1]
    size = spec.k or max(columns, 1)
    padded = torch.nn.functional.pad(values, (0, -columns % size)).view(*x.shape[:-1], -(-columns // size), size)
    amax = padded.abs().amax(-1)  # NaN wins
    finite = amax.amax(-1, keepdim=True).isfinite()
    limit = torch.tensor(spec.limit, dtype=torch.float32, device=x.device)
    if scale is None:
        largest = amax.clamp_min(LEAST)
        scales, factor = largest / limit, limit / largest
    else:
        scales = scale.reshape(1).expand(amax.shape)
        factor = 1.0 / scales
    scaled = torch.where(finite.unsqueeze(-1), padded, 0.0) * torch.where(finite, factor, 1.0).unsqueeze(-1)
    codes = spec.value.encode(scaled.clamp(-spec.limit, spec.limit).flatten(-2)[..., :columns])
    return codes, torch.where(finite, scales, math.nan)


def dequantize_act(codes: Tensor, scales: Tensor, act: str | ActSpec) -> Tensor:
    """The float32 (..., K) that codes and scales of `quantize_act` mean."""
    spec = ActSpec.parse(act) if isinstance(act, str) else act
    columns = codes.shape[-1]
    return spec.value.decode(codes) * scales.repeat_interleave(spec.k or max(columns, 1), -1)[..., :columns]


def check_act_input(x: Tensor, spec: ActSpec, scale: Tensor | None) -> None:
    """One clear error for what cannot be quantised so. Raises BadInput, BadType."""
    if not spec.quantised:
        raise BadInput(f"{spec} activations are not quantised: name an 8-bit format, such as fp8 or int8")
    if not isinstance(x, Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise BadType(f"activations are quantised from torch.bfloat16 or torch.float16; got {found}: convert x")
    if x.dim() < 1 or not x.shape[-1]:
        raise BadInput(f"x must have columns to quantise; got shape {tuple(x.shape)}")
    if spec.static and scale is None:
        raise BadInput(f"{spec} has a scale that is known before: give scale, a float32 tensor of one element")
    if scale is None:
        return
    if not spec.static:
        raise BadInput(f"{spec} finds its own scales and takes no scale: leave it out, or use the format with _t")
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() != 1:
        given = f"{scale.dtype} {tuple(scale.shape)}" if isinstance(scale, Tensor) else type(scale).__name__
        raise BadType(f"the scale of {spec} must be a float32 tensor of one element; got {given}")
    if scale.device != x.device:
        raise BadInput(f"scale must be on the device of x, {x.device}; got {scale.device}")
    if scale.device.type == "cpu" and not (math.isfinite(scale.item()) and scale.item() >= LEAST):
        raise BadInput(f"the scale of {spec} must be a finite number of at least 2^-100; got {scale.item()}")

"""Activations quantised on the chip: the bits of the reference."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit.activations import NAMES, ActSpec
from lowbit.ops.activation import quantize_act
from lowbit.ops.gemm import device_arch
from lowbit.problem import ActProblem
from lowbit.quantize import activations


def able(act: str) -> bool:
    if not torch.cuda.is_available():
        return False
    spec = ActSpec.parse(act)
    return spec.quantised and not ActProblem(spec, "fp16", 64, device_arch(torch.cuda.current_device())).obstacles


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", [name for name in NAMES if able(name)] or ["int8"])
def test_codes_and_scales_are_those_of_the_reference(act: str, dtype: torch.dtype) -> None:
    random = torch.Generator("cuda").manual_seed(0)
    scale = torch.full((1,), 0.02, device="cuda") if act.endswith("_t") else None
    for m, k in ((1, 8), (5, 133), (33, 4096), (300, 2880), (7, 28672), (2, 65536)):
        x = (torch.randn(m, k, generator=random, device="cuda") * 10.0 ** torch.arange(m, device="cuda").remainder(7).sub(3)[:, None]).to(dtype)
        x[m // 2, k // 2], x[-1] = math.nan, 0
        wide = torch.full((m, k + 24), math.nan, device="cuda", dtype=dtype)
        wide[:, 8 : k + 8] = x
        for given in (x, wide[:, 8 : k + 8]):
            codes, scales = quantize_act(given, act, scale)
            want_codes, want_scales = activations.quantize_act(x.cpu(), act, None if scale is None else scale.cpu())
            assert torch.equal(codes.cpu(), want_codes), (m, k)
            assert torch.equal(scales.cpu().view(torch.int32), want_scales.contiguous().view(torch.int32)), (m, k)


def test_an_input_written_just_before_is_read_and_any_shape_will_do() -> None:
    x = torch.zeros(2, 3, 4096, device="cuda", dtype=torch.float16)
    for value in (1.0, 2.0, 0.0, 5.0):
        x.fill_(value)
        codes, scales = quantize_act(x, "int8")
        assert (codes.shape, scales.shape) == ((2, 3, 4096), (2, 3, 1))
        assert set(codes.flatten().tolist()) == {127 if value else 0}
        assert set(scales.flatten().tolist()) == {float(torch.tensor(max(value, activations.LEAST)) / 127)}

"""The derived bound: its pieces by hand, and that it is tight enough to see what it is there to see."""

from __future__ import annotations

import pytest
import torch

from lowbit.errors import BadType
from lowbit.testing.tolerance import bound, operand_rounding
from lowbit.weights import spec


def test_rounding_is_half_a_unit_of_the_output() -> None:
    x, w = torch.tensor([[1.0]]), torch.tensor([[1.5]])
    for dtype, unit in ((torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10), (torch.float32, 2.0**-23)):
        accumulated = 1.5 * (17 * 2.0**-25 + 2.0**-23 + (1 + 1 + 3) * 2.0**-24)
        assert float(bound(x, w, None, dtype)) == pytest.approx(unit / 2 + accumulated, rel=1e-12)
    assert float(bound(x, 2 * w, None, torch.bfloat16)) == pytest.approx(2 * float(bound(x, w, None, torch.bfloat16)))


def test_accumulation_grows_with_k_and_with_cancelled_sums() -> None:
    k = 64
    x = torch.ones(1, k)
    w = torch.ones(1, k)
    w[:, ::2] = -1  # the sum is 0, so nothing but accumulation is left
    exact = bound(x, w, None, torch.float32).item()
    assert exact == pytest.approx(k * (4 * (17 * 2.0**-25 + 2.0**-23) + (4 + 1 + 3) * 2.0**-24), rel=1e-4)
    assert bound(x, w, None, torch.float32, level=80).item() > exact
    assert bound(x, w, None, torch.float32, level=75).item() > bound(x, w, None, torch.float32, level=80).item()


def test_bias_counts_and_overflow_is_unbounded() -> None:
    x, w = torch.ones(1, 1), torch.ones(2, 1)
    with_bias = bound(x, w, torch.tensor([0.0, 1000.0]), torch.float16)
    assert with_bias[0, 1] == pytest.approx(0.25, rel=1e-2)  # half a unit of 1001 in fp16
    assert with_bias[0, 0] < 2.0**-10
    assert bound(torch.full((1, 1), 300.0), torch.full((1, 1), 300.0), None, torch.float16).isinf().all()
    assert bound(torch.full((1, 1), 300.0), torch.full((1, 1), 300.0), None, torch.bfloat16).isfinite().all()


@pytest.mark.parametrize(("k", "share"), [(128, 0.9), (4096, 0.8), (16384, 0.4)])
def test_a_group_scaled_wrongly_is_seen(k: int, share: float) -> None:
    """One group of 128 too large by 2: a good part of all outputs leaves the bound, though it grows with K."""
    random = torch.Generator().manual_seed(k)
    x, w = torch.randn(8, k, generator=random).bfloat16(), torch.randn(64, k, generator=random) * 0.02
    exact = x.double() @ w.double().T
    allowed = bound(x, w, None, torch.bfloat16)
    rounded = exact.float().bfloat16()
    assert ((rounded.double() - exact).abs() <= allowed).all()
    wrong = w.clone()
    wrong[:, :128] *= 2
    outside = (x.double() @ wrong.double().T - exact).abs() > allowed
    assert outside.double().mean() > share


def test_rounding_of_a_codebook_counts_and_of_nothing_else() -> None:
    assert operand_rounding(spec("int4_g128"), "bf16") == operand_rounding(spec("nvfp4"), "fp16") == 0
    assert operand_rounding(spec("cb(-1.5,0.0,0.25)"), "bf16") == 0
    third = operand_rounding(spec("cb(0.0,-0.3333333)"), "fp16")
    assert third == pytest.approx(2.0**-12, rel=2e-3)  # 0x3555 is 0.33325
    assert 2.0**-10 < operand_rounding(spec("nf4"), "bf16") < 2.0**-8
    assert 2.0**-13 < operand_rounding(spec("nf4"), "fp16") < 2.0**-11
    assert operand_rounding(spec("cb(1.0,1e-9)"), "fp16") == 1  # below half of the smallest subnormal
    x, w = torch.ones(1, 8), torch.full((1, 8), 3.0)
    plain = bound(x, w, None, torch.float32).item()
    assert bound(x, w, None, torch.float32, rounding=0.001).item() - plain == pytest.approx(24 * 0.001, rel=1e-3)


def test_other_output_types_are_refused() -> None:
    with pytest.raises(BadType, match=r"got torch\.int8"):
        bound(torch.ones(1, 1), torch.ones(1, 1), None, torch.int8)

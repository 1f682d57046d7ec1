"""The reference product: one-hot probes are exact, everything else is checked against float64 arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit.errors import BadInput, BadType, Unsupported
from lowbit.quantize import quantize
from lowbit.reference import matmul
from lowbit.weights import QuantWeight

NAMES = ["int4_g16", "int3z_g16", "uint4zf_g16", "fp8_e4m3_b16x16", "mxfp4", "nvfp4", "nf4", "int8", "int4_g16_e8m0"]
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(name: str = "int4z_g16", *shape: int) -> QuantWeight:
    return quantize(randn(*(shape or (24, 40)), seed=1), name)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("act", ["bf16", "fp16"])
def test_one_hot_gives_a_column_of_the_weight(name: str, act: str) -> None:
    qw = weight(name)
    y = matmul(torch.eye(40), qw, act=act)
    assert torch.equal(y, qw.dequantize().T)
    for out_dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(matmul(torch.eye(40), qw, act=act, out_dtype=out_dtype), y.to(out_dtype))


@pytest.mark.parametrize("act", ["bf16", "fp16"])
def test_activations_are_rounded_first_and_the_result_once(act: str) -> None:
    x, qw, bias = randn(5, 40), weight(), randn(24, seed=2)
    exact = x.to(NARROW[act]).double() @ qw.dequantize().double().T + bias.double()
    assert torch.equal(matmul(x, qw, act=act, bias=bias), exact.float())
    assert torch.equal(matmul(x, qw, act=act, bias=bias, out_dtype=torch.float16), exact.float().half())
    assert not torch.equal(matmul(x, qw, act=act, bias=bias), (x.double() @ qw.dequantize().double().T + bias).float())


def test_sums_that_cancel_are_kept() -> None:
    qw = quantize(torch.tensor([[1.0, 1.0, -1.0]]), "int8")
    w = qw.dequantize()[0, 0].item()
    assert matmul(torch.tensor([[2.0**30, 2.0**-8, 2.0**30]]), qw).item() == w * 2.0**-8


def test_many_rows_of_weights() -> None:
    qw = weight("int4_g16", 2500, 32)  # more than two slices of rows
    x, bias = randn(3, 32), randn(2500, seed=2)
    exact = x.bfloat16().double() @ qw.dequantize().double().T + bias.double()
    assert torch.equal(matmul(x, qw, bias=bias), exact.float())


def test_experts_each_take_their_own_tokens() -> None:
    qw, x, bias = weight("mxfp4", 3, 24, 40), randn(3, 2, 5, 40), randn(3, 24, seed=2)
    y = matmul(x, qw, bias=bias)
    assert y.shape == (3, 2, 5, 24)
    for expert in range(3):
        alone = quantize(randn(3, 24, 40, seed=1)[expert], "mxfp4")
        assert torch.equal(y[expert], matmul(x[expert], alone, bias=bias[expert]))


@pytest.mark.parametrize("shape", [(40,), (0, 40), (1, 40), (2, 3, 40), (2, 0, 40)])
def test_leading_dimensions(shape: tuple[int, ...]) -> None:
    qw, x = weight(), randn(*shape)
    y = matmul(x, qw)
    assert y.shape == (*shape[:-1], 24)
    assert torch.equal(y.reshape(-1, 24), matmul(x.reshape(-1, 40), qw))


def test_output_type_follows_x_and_strides_do_not_matter() -> None:
    qw, x = weight(), randn(6, 80)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert matmul(x[:, :40].to(dtype), qw).dtype == dtype
    assert torch.equal(matmul(x[::2, ::2], qw), matmul(x[::2, ::2].contiguous(), qw))


def test_nan_and_inf_stay_in_their_row() -> None:
    x = randn(3, 40)
    clean = matmul(x, weight())
    x[1, 3] = float("nan")
    y = matmul(x, weight())
    assert bool(y[1].isnan().all())
    assert torch.equal(y[::2], clean[::2])
    assert bool(matmul(torch.full((1, 40), 1e5), weight(), act="fp16").isnan().any())  # beyond fp16: Inf - Inf
    assert bool(matmul(torch.full((1, 40), 1e5), weight(), act="bf16").isfinite().all())


@pytest.mark.parametrize(("x", "options", "error", "rule"), [
    (torch.ones(2, 40), {"act": "int8"}, Unsupported, "activation type 'int8' is unknown; use one of bf16, fp16"),
    (torch.ones(2, 41), {}, BadInput, r"\(\.\.\., K\) with K = 40; found shape \(2, 41\)"),
    (torch.ones(()), {}, BadInput, r"found shape \(\)"),
    (torch.ones(2, 40, dtype=torch.int8), {}, BadType, r"float tensor; found torch\.int8"),
    (torch.ones(2, 40), {"bias": torch.ones(40)}, BadInput, r"bias must have shape \(24,\); found \(40,\)"),
    (torch.ones(2, 40, device="meta"), {}, BadInput, "x is on meta, weight on cpu"),
    (torch.ones(2, 40), {"bias": torch.ones(24, device="meta")}, BadInput, "bias is on meta, weight on cpu"),
])  # fmt: skip
def test_wrong_arguments_are_refused(x: Tensor, options: dict[str, object], error: type[Exception], rule: str) -> None:
    with pytest.raises(error, match=rule):
        matmul(x, weight(), **options)  # type: ignore[arg-type]


def test_wrong_experts_are_refused() -> None:
    qw = weight("int4_g16", 3, 24, 40)
    with pytest.raises(BadInput, match=r"\(E, \.\.\., K\) with E = 3; found shape \(2, 40\)"):
        matmul(torch.ones(2, 40), qw)
    with pytest.raises(BadInput, match=r"bias must have shape \(3, 24\); found \(24,\)"):
        matmul(torch.ones(3, 40), qw, bias=torch.ones(24))

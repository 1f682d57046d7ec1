"""8-bit activations in PyTorch: names, exact codes and scales by hand, errors, bad input."""

from __future__ import annotations

import math
import re

import pytest
import torch

from lowbit.activations import NAMES, ActSpec
from lowbit.arch import arch
from lowbit.errors import BadInput, BadType, LowbitError, UnknownSpec, Unsupported
from lowbit.jit.generate import generate_act
from lowbit.ops.activation import quantize_act
from lowbit.problem import MOST_COLUMNS, ActProblem
from lowbit.quantize.activations import LEAST, dequantize_act

QUANTISED = [name for name in NAMES if ActSpec.parse(name).quantised]


def test_every_name_is_what_its_format_prints() -> None:
    assert [str(ActSpec.parse(name)) for name in NAMES] == list(NAMES)
    assert {name: (ActSpec.parse(name).limit, ActSpec.parse(name).value.bits) for name in ("fp8", "fp8_e5m2_t", "int8_g128", "bf16")} == {
        "fp8": (448.0, 8), "fp8_e5m2_t": (57344.0, 8), "int8_g128": (127.0, 8), "bf16": (torch.finfo(torch.bfloat16).max, 16)}  # fmt: skip
    assert [ActSpec.parse(name).groups(300) for name in ("fp8", "fp8_g128", "int8_t")] == [1, 3, 1]


@pytest.mark.parametrize(("name", "nearest"), [("fp8e5m2", "fp8_e5m2"), ("int4", "int8"), ("int8_g", "int8_g128"), ("", "bf16")])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str, nearest: str) -> None:
    with pytest.raises(UnknownSpec, match=rf"one of bf16, fp16, fp8, .*; got {name!r}: did you mean {nearest!r}"):
        ActSpec.parse(name)


def test_codes_and_scales_by_hand() -> None:
    x = torch.tensor([[0.5, -1.0, 0.25, 0.0, 1.0, -0.125, 0.75, 1e-6]], dtype=torch.bfloat16)
    codes, scales = quantize_act(x, "fp8")
    assert scales.tolist() == [[torch.tensor(1 / 448).float().item()]]
    #  448 x: 224, -448, 112, 0, 448, -56, 336 (between 320 and 352: to even), 0.00045 (below half of the smallest, 2^-10)
    assert codes.tolist() == [[0x76, 0xFE, 0x6E, 0x00, 0x7E, 0xE6, 0x7A, 0x00]]
    codes, scales = quantize_act(x, "int8")
    #  127 x: 63.5 (to even), -127, 31.75, 0, 127, -15.875, 95.25, 0.0001
    assert codes.view(torch.int8).tolist() == [[64, -127, 32, 0, 127, -16, 95, 0]]
    codes, scales = quantize_act(x, "int8_t", torch.tensor(0.005))
    assert codes.view(torch.int8).tolist() == [[100, -127, 50, 0, 127, -25, 127, 0]]
    assert scales.tolist() == [[pytest.approx(0.005, rel=1e-7)]]


def test_groups_have_scales_of_their_own() -> None:
    x = torch.cat([torch.full((2, 128), 2.0), torch.full((2, 128), 0.5), torch.full((2, 8), -8.0)], 1).half()
    codes, scales = quantize_act(x, "int8_g128")
    assert torch.equal(scales, (torch.tensor([[2.0, 0.5, 8.0]]) / 127.0).expand(2, 3))
    assert set(codes.view(torch.int8)[:, :256].flatten().tolist()) == {127}
    assert set(codes.view(torch.int8)[:, 256:].flatten().tolist()) == {-127}


@pytest.mark.parametrize("act", [name for name in QUANTISED if not name.endswith("_t")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_error_is_within_half_a_step_of_the_largest(act: str, dtype: torch.dtype) -> None:
    x = (torch.randn(6, 515, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-3, 3)[:, None]).to(dtype)
    error = (dequantize_act(*quantize_act(x, act), act) - x.float()).abs()
    step = {"fp8": 2.0**-4, "fp8_e5m2": 2.0**-3, "int8": 0.5 / 127}[re.sub("_g128", "", act)]  # of the value (floats), of the largest (int8)
    size = x.float().abs() if act.startswith("fp8") else x.float().abs().amax(-1, keepdim=True)
    smallest = x.float().abs().amax(-1, keepdim=True) * {"fp8": 2.0**-10 / 448, "fp8_e5m2": 2.0**-17 / 57344, "int8": 0}[re.sub("_g128", "", act)]
    assert (error <= step * size * 1.001 + smallest * 1.001).all()
    assert (error > step * size * 0.7).any()


@pytest.mark.parametrize("act", QUANTISED)
def test_zeros_are_zeros_and_tokens_that_are_not_finite_are_nan_alone(act: str) -> None:
    x = torch.ones(4, 264, dtype=torch.bfloat16)
    x[0] = 0
    x[1, 200] = math.nan
    x[2, 3] = -math.inf
    scale = torch.tensor([0.25]) if act.endswith("_t") else None
    codes, scales = quantize_act(x, act, scale)
    assert not codes[:3].any()
    assert scales[1:3].isnan().all()
    assert scales[[0, 3]].isfinite().all()
    assert (scales[[0, 3]] > 0).all()
    w = dequantize_act(codes, scales, act)
    assert (w[0] == 0).all()
    assert w[1:3].isnan().all()
    assert torch.allclose(w[3], torch.ones(264))


def test_the_smallest_and_the_largest_numbers_keep_their_scale_finite() -> None:
    tiny, huge = 2.0**-133, torch.finfo(torch.bfloat16).max
    x = torch.tensor([[tiny] * 8, [LEAST] * 8, [huge] * 8, [-huge, huge / 2, 0, 0, 0, 0, 0, 0]], dtype=torch.bfloat16)
    codes, scales = quantize_act(x, "fp8")
    assert scales.isfinite().all()
    assert scales[0] == scales[1] == torch.tensor(LEAST) / 448
    assert codes[:, 0].tolist() == [0, 0x7E, 0x7E, 0xFE]
    assert codes[3, 1] == 0x76


def test_any_leading_shape_and_no_token_at_all() -> None:
    x = torch.randn(2, 3, 40).half()
    codes, scales = quantize_act(x, "int8")
    assert (codes.shape, scales.shape) == ((2, 3, 40), (2, 3, 1))
    assert torch.equal(codes[1, 2], quantize_act(x[1, 2], "int8")[0])
    assert [tuple(t.shape) for t in quantize_act(x[:0], "fp8_g128")] == [(0, 3, 40), (0, 3, 1)]


@pytest.mark.parametrize(
    ("x", "act", "scale", "error", "words"),
    [
        (torch.zeros(2, 8), "fp8", None, BadType, "from torch.bfloat16 or torch.float16; got torch.float32"),
        ([1.0], "fp8", None, BadType, "got list"),
        (torch.zeros(2, 0).half(), "fp8", None, BadInput, r"must have columns to quantise; got shape \(2, 0\)"),
        (torch.tensor(1.0).half(), "fp8", None, BadInput, "must have columns"),
        (torch.zeros(2, 8).half(), "bf16", None, BadInput, "bf16 activations are not quantised: name an 8-bit format"),
        (torch.zeros(2, 8).half(), "int8_t", None, BadInput, "int8_t has a scale that is known before: give scale"),
        (torch.zeros(2, 8).half(), "int8", torch.ones(1), BadInput, "finds its own scales and takes no scale: leave it out"),
        (torch.zeros(2, 8).half(), "fp8_t", torch.ones(2), BadType, r"one element; got torch.float32 \(2,\)"),
        (torch.zeros(2, 8).half(), "fp8_t", torch.ones(1).half(), BadType, "must be a float32 tensor"),
        (torch.zeros(2, 8).half(), "fp8_t", 0.5, BadType, "got float"),
        (torch.zeros(2, 8).half(), "fp8_t", torch.zeros(1), BadInput, "at least 2\\^-100; got 0.0"),
        (torch.zeros(2, 8).half(), "fp8_t", torch.tensor([math.nan]), BadInput, "must be a finite number"),
        (torch.zeros(2, 8).half(), "fp8_t", torch.ones(1, device="meta"), BadInput, "on the device of x, cpu; got meta"),
        (torch.zeros(2, 8).half(), "fp9", None, UnknownSpec, "did you mean 'fp8'"),
    ],
)
def test_bad_input_gets_one_clear_error(x: object, act: str, scale: object, error: type[LowbitError], words: str) -> None:
    with pytest.raises(error, match=words):
        quantize_act(x, act, scale)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chip", "act", "x", "k", "words"),
    [
        ("sm_86", "fp8", "bf16", 64, "fp8 activations need sm_89 or newer; sm_86 has no such numbers: use int8"),
        ("sm_75", "int8", "bf16", 64, "bf16 activations need sm_80 or newer; sm_75 has none: use fp16"),
        ("sm_90a", "int8", "bf16", MOST_COLUMNS + 8, f"8 to {MOST_COLUMNS} columns; got {MOST_COLUMNS + 8}"),
    ],
)
def test_what_a_chip_cannot_quantise_is_refused(chip: str, act: str, x: str, k: int, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        generate_act(ActProblem(ActSpec.parse(act), x, k, arch(chip)))

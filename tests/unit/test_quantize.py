"""Quantising to nearest: error bounds, lossless cases, scale rules against hand values, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowbit.dtypes import codebook
from lowbit.errors import BadInput, BadType, UnknownSpec
from lowbit.quantize import quantize
from lowbit.weights import QuantWeight, WeightSpec, spec

INTEGERS = [f"int{bits}" for bits in range(2, 9)]
INTEGERS += [f"{kind}{bits}z" for kind in ("int", "uint") for bits in range(1, 9)]
FLOATS = ["fp8_e4m3", "fp8_e5m2", "fp8_e3m4", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "fp5_e2m2", "fp3_e1m1"]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def step(qw: QuantWeight) -> Tensor:
    """The step of every weight of an integer format: its scale, all levels included. Float32 in the shape of qw."""
    steps = torch.stack([qw.expand(qw.scale_values(), expert) for expert in range(qw.num_experts)])
    if qw.scale2 is not None:
        steps = steps * qw.scale2.view(qw.num_experts, -1, 1)
    return steps.view(qw.shape)


@pytest.mark.parametrize("value", INTEGERS)
@pytest.mark.parametrize("tail", ["", "_t", "_g16", "_g16_fp16", "_g16_e4m3_s2t", "_g16_e8m0", "_b24x32_ue5m3_s2c"])
def test_integers_are_within_half_a_step(value: str, tail: str) -> None:
    # 100 rows and 72 columns leave edge blocks everywhere; the offset makes ranges lopsided.
    w = randn(100, 72) * torch.logspace(-2, 2, 100)[:, None] + 0.3
    qw = quantize(w, value + tail)
    assert qw.spec == spec(value + tail)
    error = (qw.dequantize() - w).abs()
    assert bool((error <= 0.5 * step(qw) * (1 + 1e-4)).all())


@pytest.mark.parametrize("value", [f"{kind}{bits}zf" for kind in ("int", "uint") for bits in range(1, 9)])
@pytest.mark.parametrize("shift", [0.0, 5.0, -1000.0, 1e5])
def test_float_zero_points_follow_ranges_far_from_zero(value: str, shift: float) -> None:
    w = randn(20, 64) + shift
    qw = quantize(w, value + "_g16")
    # The zero point itself is resolved to 1/64 of a step at the worst, see the width floor of rtn.
    assert bool(((qw.dequantize() - w).abs() <= (0.5 + 1 / 64) * step(qw)).all())
    ranges = w.view(20, 4, 16).amax(-1) - w.view(20, 4, 16).amin(-1)
    floor = abs(shift) * 1.01 * 2.0**-10
    assert bool((qw.scale_values()[0] * (2**qw.spec.value.bits - 1) <= ranges.clamp(min=floor) * 1.02).all())


@pytest.mark.parametrize("value", FLOATS)
@pytest.mark.parametrize("tail", ["", "_g16", "_b24x32_fp32", "_g16_e8m0", "_g16_e4m3_s2t"])
def test_floats_take_the_nearest_value_under_their_scale(value: str, tail: str) -> None:
    w = randn(40, 72)
    qw = quantize(w, value + tail)
    table = qw.spec.value.decode_table()
    options = step(qw)[..., None] * table[table.isfinite()]
    nearest = (options - w[..., None]).abs().amin(-1)
    assert torch.allclose((qw.dequantize() - w).abs(), nearest, rtol=0, atol=1e-5)
    assert float((qw.dequantize() - w).norm() / w.norm()) < 0.7 * 2.0**-qw.spec.value.mantissa
    assert float(qw.dequantize().norm() / w.norm()) == pytest.approx(1, abs=0.1)


def test_symmetric_scale_uses_both_ends_of_the_range() -> None:
    w = torch.tensor([[-8.0, 3.0, 7.0, 0.0], [-1.0, 7.0, 2.0, 3.0], [-16.0, 7.0, 0.0, 2.0]])
    qw = quantize(w, "int4")
    assert qw.scales[0, :, 0].tolist() == [1.0, 1.0, 2.0]
    assert qw.dequantize().tolist() == [[-8.0, 3.0, 7.0, 0.0], [-1.0, 7.0, 2.0, 3.0], [-16.0, 8.0, 0.0, 2.0]]


def test_affine_scale_and_zero_by_hand() -> None:
    w = torch.tensor([[-3.0, 12.0, 0.0, 5.0], [2.0, 30.0, 4.0, 8.0], [-15.0, -3.0, -1.0, -2.0]])
    qw = quantize(w, "uint4z")
    assert qw.scales[0, :, 0].tolist() == [1.0, 2.0, 1.0]
    assert qw.zeros is not None
    assert qw.zeros[0, :, 0].tolist() == [3, 0, 15]
    assert qw.code_values()[0].tolist() == [[0, 15, 3, 8], [1, 15, 2, 4], [0, 12, 14, 13]]
    signed = quantize(w, "int4z")
    assert signed.zeros is not None
    assert signed.zeros[0, :, 0].tolist() == [-5, -8, 7]
    assert torch.equal(signed.dequantize(), qw.dequantize())


def test_mx_scales_by_hand() -> None:
    # floor(log2(absmax)) - emax, emax = 2 for e2m1; 7.9 saturates at 6, the price of the rule.
    w = torch.zeros(6, 32)
    w[:, 3] = torch.tensor([6.0, 7.9, 4.0, -3.9, 2.0**-130, 0.0])
    qw = quantize(w, "mxfp4")
    assert qw.scales[0, :, 0].tolist() == [127, 127, 127, 126, 0, 127]
    assert qw.dequantize()[:, 3].tolist() == [6.0, 6.0, 4.0, -3.0, 0.0, 0.0]
    for name, emax in (("mxfp8", 8), ("mxfp6", 4), ("mxint8", 6), ("fp8_e5m2_g32_e8m0", 15), ("fp6_e2m3_g32_e8m0", 2)):
        scales = quantize(w, name).scale_values()[0, :, 0]
        expected = [2.0 ** (2 - emax), 2.0 ** (2 - emax), 2.0 ** (2 - emax), 2.0 ** (1 - emax), 2.0**-127, 1.0]
        assert scales.tolist() == expected, name
    assert quantize(w, "mxint8").code_values()[0, :4, 3].tolist() == [96, 126, 64, 256 - 125]


@pytest.mark.parametrize("exponent", [-126, -20, 0, 20, 127])
def test_mx_scale_changes_exactly_at_powers_of_two(exponent: int) -> None:
    power = torch.tensor(2.0**exponent)
    w = torch.stack([power, power.nextafter(torch.tensor(0.0))])[:, None].repeat(1, 32)
    scales = quantize(w, "mxfp8").scales[0, :, 0].tolist()
    assert scales == [max(127 + exponent - 8, 0), max(127 + exponent - 9, 0)]


def test_nvfp4_two_levels_by_hand() -> None:
    w = torch.zeros(2, 48)
    w[0, 5], w[0, 20], w[1, 40] = 6 * 448.0, -6 * 3.0, 6 * 0.002
    qw = quantize(w, "nvfp4")
    assert qw.scale2 is not None
    assert qw.scale2.tolist() == [1.0]
    assert qw.scale_values()[0].tolist() == [[448.0, 3.0, 1.0], [1.0, 1.0, 2.0**-9]]  # 0.002 rounds to the subnormal
    assert qw.dequantize()[0, [5, 20]].tolist() == [2688.0, -18.0]
    assert qw.dequantize()[1, 40].item() == 6 * 2.0**-9
    scaled = quantize(w * 2.0**-10, "nvfp4")
    assert scaled.scale2 is not None
    assert scaled.scale2.tolist() == [2.0**-10]
    assert torch.equal(scaled.codes, qw.codes)


def test_nvfp4_groups_that_vanish_keep_a_positive_scale() -> None:
    w = torch.full((1, 32), 1e-9)
    w[0, 0] = 1.0
    qw = quantize(w, "nvfp4")
    assert qw.scale_values()[0].tolist() == [[448.0, 2.0**-9]]
    assert qw.dequantize()[0, 1:].abs().max().item() == 0.0


def test_power_of_two_group_scales_over_a_channel_scale() -> None:
    w = torch.zeros(2, 96)
    w[0, 0], w[0, 40], w[0, 70] = 21.0, -12.0, 5.0  # 21 = 7 * 3; the group of 12 fits 8 * 1.5, that of 5 needs 0.75
    w[1, 0] = 0.7
    qw = quantize(w, "int4_g32_e8m0")
    assert qw.scale2 is not None
    assert qw.scale2[0].tolist() == pytest.approx([3.0, 0.1])
    assert qw.scale_values()[0].tolist() == [[1.0, 0.5, 0.25], [1.0, 1.0, 1.0]]
    assert qw.dequantize()[0, [0, 40, 70]].tolist() == [21.0, -12.0, 5.25]


@pytest.mark.parametrize("name", ["int4_g16_e8m0", "int8_g16_e8m0", "mxfp4", "mxfp6", "mxfp8", "mxint8", "nvfp4",
                                  "fp8_e4m3_b32x32_e8m0"])  # fmt: skip
def test_scaling_by_a_power_of_two_changes_no_code(name: str) -> None:
    w = randn(64, 96)
    small = quantize(w * 2.0**-7, name)
    assert torch.equal(small.codes, quantize(w, name).codes)
    assert torch.equal(small.dequantize() * 2.0**7, quantize(w, name).dequantize())


REPRESENTABLE = [
    "int2_g16", "int4_g16", "int8_g16_fp16", "int5_b20x24", "int4_b20x24_e8m0", "int8_g16_e8m0", "uint4_g16",
    "int8_g16_e4m3", "int4z_g16", "uint8z_g16", "uint3z_b20x24", "int4z_g16_e8m0_s2n", "fp8_e4m3_g16",
    "fp8_e5m2_b20x24", "fp4_e2m1_g16", "fp6_e3m2_g16_fp16", "nf4", "mxfp4", "mxfp6", "mxfp8", "mxint8", "nvfp4",
    "fp6_e2m3_g16_ue5m3_s2c",
]  # fmt: skip


@pytest.mark.parametrize("name", REPRESENTABLE)
@pytest.mark.parametrize("experts", [1, 2])
def test_what_is_representable_is_lossless(name: str, experts: int) -> None:
    # Random codes with both ends of the range in every block, and random scales with the largest one in every row. The
    # scales of MX suit symmetric ranges: -128 in mxint8 would cost a power of two.
    one, gen, (n, k) = spec(name), torch.Generator().manual_seed(4), (60, 72)
    blocks = (experts, *one.scale_shape(n, k))
    w = torch.randn(experts, n, k, generator=gen) * one.value.max / 3
    w[..., 0 :: one.k] = one.value.min
    w[..., 1 :: one.k] = one.value.max
    codes = one.value.encode(w.clamp(min=-one.value.max) if name == "mxint8" else w)
    zeros = None
    if one.zero == "int":
        zeros = torch.randint(int(one.value.min), int(one.value.max) + 1, blocks, generator=gen).to(torch.int16)
    largest = one.scale.max if one.scale.bits == 8 and one.scale.name != "e8m0" and one.scale2 != "none" else 1.0
    wanted = 2.0 ** (-6 * torch.rand(blocks, generator=gen)) * largest
    wanted[..., 0] = largest
    second = {"none": (), "tensor": (experts,), "channel": (experts, n)}[one.scale2]
    scale2 = 0.1 + torch.rand(second, generator=gen) if second else None
    scales = one.scale.encode(wanted)
    original = QuantWeight.from_values(one, codes, scales, zeros=zeros, scale2=scale2, experts=experts)

    again = quantize(original.dequantize(), name)

    assert torch.allclose(again.dequantize(), original.dequantize(), rtol=0 if scale2 is None else 1e-6, atol=0)
    assert torch.equal(again.scales, original.scales)
    if zeros is not None:
        assert torch.equal(again.zeros if again.zeros is not None else zeros[:0], zeros)


@pytest.mark.parametrize("value", ["int4", "uint4z", "uint4zf", "fp8_e4m3", "nf4"])
def test_one_group_by_any_name_is_the_same(value: str) -> None:
    w = randn(12, 80)
    one = spec(value + "_c")
    expected = quantize(w, one)
    for k in (0, -1, None, 80, 128):
        same = WeightSpec.make(one.value, k=k, scale="fp32", zero=one.zero)
        assert torch.equal(quantize(w, same).dequantize(), expected.dequantize()), k
        assert torch.equal(quantize(w, same).codes, expected.codes)
    for rows in (0, 12, 64):
        same = WeightSpec.make(one.value, rows=rows, k=0, scale="fp32", zero=one.zero)
        assert torch.equal(quantize(w, same).dequantize(), quantize(w, value + "_t_fp32").dequantize()), rows


ALL = [*INTEGERS, *FLOATS, "int1", "uint4", "uint1", "int1zf", "uint8zf", "nf4"]


@pytest.mark.parametrize("value", ALL)
@pytest.mark.parametrize("tail", ["_g16", "_b8x16_fp32", "_g16_e8m0", "_g16_e4m3_s2t", "_t", "_c"])
def test_blocks_of_zeros_have_scale_one_and_stay_zero(value: str, tail: str) -> None:
    w = torch.zeros(16, 48)
    assert quantize(w, value + tail).dequantize().abs().max().item() == 0.0
    assert bool((quantize(w, value + tail).scale_values() == 1).all())
    w[8:, 16:32] = randn(8, 16).abs()
    mixed = quantize(w, value + tail)
    if tail[1] in "gb":
        assert mixed.dequantize()[:8].abs().max().item() == 0.0
        assert mixed.dequantize()[8:, :16].abs().max().item() == 0.0
        assert bool((mixed.scale_values()[0, 0] == 1).all())
    assert bool(mixed.dequantize().isfinite().all())


@pytest.mark.parametrize("value", ["fp8_e4m3", "int4", "uint4z"])
def test_edge_blocks_cover_their_weights_only(value: str) -> None:
    # 4.5 blocks each way, every block with its own power of two: a scale taken from a neighbour is a factor of two.
    index = torch.arange(576) // 128
    factor = 2.0 ** ((index[:, None] * 5 + index) % 13).float()
    w = randn(576, 576).clamp(-3, 3) * factor
    qw = quantize(w, value + "_b128x128")
    assert qw.scales.shape == (1, 5, 5)
    extreme = {"fp8_e4m3": 448.0, "int4": 7.0, "uint4z": 15.0}[value]
    for r in range(5):
        for g in range(5):
            block = w[128 * r : 128 * r + 128, 128 * g : 128 * g + 128]
            reach = block.abs().max() if value != "uint4z" else block.max() - block.min()
            scale = qw.scale_values()[0, r, g]
            assert float(scale * extreme / reach) == pytest.approx(1, abs=0.15 if value == "int4" else 0.01)
    assert float((qw.dequantize() - w).norm() / w.norm()) < 0.3


def test_experts_are_quantised_one_by_one() -> None:
    w = randn(3, 24, 40) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    for name in ("int4z_g16", "nvfp4", "mxfp4", "int4_g16_e8m0", "uint4zf_t"):
        qw = quantize(w, name)
        assert qw.shape == (3, 24, 40)
        for expert in range(3):
            assert torch.equal(qw.dequantize(expert), quantize(w[expert], name).dequantize())
    assert quantize(w[:1], "int4").experts == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_input_types_and_strides_give_the_same(dtype: torch.dtype) -> None:
    w = randn(48, 40).to(dtype)
    for name in ("int4_g16", "nvfp4", "fp8_e4m3"):
        expected = quantize(w.float(), name)
        assert torch.equal(quantize(w, name).codes, expected.codes)
        assert torch.equal(quantize(w.T.contiguous().T, name).codes, expected.codes)
        assert torch.equal(quantize(w.requires_grad_(), name).scales, expected.scales)


def test_the_weight_is_left_alone() -> None:
    w = randn(33, 40)
    before = w.clone()
    for name in ("int4", "int4z_g16", "nvfp4", "mxfp8"):
        quantize(w, name, clip_search=True)
    assert torch.equal(w, before)


@pytest.mark.parametrize(("name", "shift"), [
    ("int2_g32", 0), ("int3z_g32", 0), ("uint4zf_g32", 1000), ("int4_g32_e8m0", 0), ("nvfp4", 0), ("fp3_e1m1_g32", 0),
])  # fmt: skip
def test_clip_search_never_loses_and_wins_on_outliers(name: str, shift: float) -> None:
    w = randn(16, 96) ** 3 + shift
    error, plain = ((quantize(w, name, clip_search=on).dequantize() - w).square() for on in (True, False))
    blocks = (16, quantize(w, name).scales.shape[2], -1)
    assert bool((error.view(blocks).sum(-1) <= plain.view(blocks).sum(-1) * (1 + 1e-5)).all())
    assert float(error.sum()) < float(plain.sum())


def test_clip_search_finds_the_best_ratio() -> None:
    groups = (randn(8, 64) ** 3).view(8, 2, 32)
    qw = quantize(groups.view(8, 64), "int3_g32_fp32", clip_search=True)
    widest = torch.maximum(groups.amax(-1, True) / 3, groups.amin(-1, True) / -4)
    errors = []
    for percent in range(50, 101, 5):
        scale = widest * percent / 100
        errors.append(((groups / scale).round().clamp(-4, 3) * scale - groups).square().sum(-1))
    found = (qw.dequantize().view(8, 2, 32) - groups).square().sum(-1)
    assert torch.allclose(found, torch.stack(errors).amin(0), rtol=1e-4)
    assert len(set(torch.stack(errors).argmin(0).flatten().tolist())) > 2


@pytest.mark.parametrize("name", ["nvfp4", "int4_g16_e8m0", "mxfp4", "int4z_g16", "int4zf_g16", "fp8_e4m3"])
@pytest.mark.parametrize("size", [1e-45, 1e-41, 1e-38, 1e36])
def test_weights_at_the_ends_of_float32(name: str, size: float) -> None:
    w = randn(8, 32).clamp(-2, 2) * size
    deq = quantize(w, name).dequantize()
    assert bool(deq.isfinite().all())
    assert bool(((deq - w).abs() <= 2 * w.abs().max()).all())  # steps may be wider than the weights, not wilder


def test_codebooks_fit_both_signs() -> None:
    lopsided = WeightSpec.make(codebook("lopsided", [-1.0, 0.0, 1.0, 4.0]))
    qw = quantize(torch.tensor([[-2.0, 8.0, 1.9, 0.0], [-3.0, 4.0, 0.0, 0.0]]), lopsided)
    assert qw.scales[0, :, 0].tolist() == [2.0, 3.0]
    assert qw.dequantize().tolist() == [[-2.0, 8.0, 2.0, 0.0], [-3.0, 3.0, 0.0, 0.0]]


def test_one_bit() -> None:
    w = torch.tensor([[-0.5, 0.2, -0.1, -0.3]])
    assert quantize(w, "int1").dequantize().tolist() == [[-0.5, 0.0, 0.0, -0.5]]
    assert quantize(w.abs(), "uint1").dequantize().tolist() == [[0.5, 0.0, 0.0, 0.5]]
    assert quantize(w.sign() * 3, "uint1zf").dequantize().tolist() == [[-3.0, 3.0, -3.0, -3.0]]


def test_act_order_keeps_the_columns_in_order() -> None:
    w = randn(4, 40)
    qw = quantize(w, "int4_g16_ao")
    assert qw.g_idx is not None
    assert qw.g_idx[0].tolist() == [0] * 16 + [1] * 16 + [2] * 8
    assert torch.equal(qw.dequantize(), quantize(w, "int4_g16").dequantize())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["int4_g16", "fp8_e4m3", "mxfp4", "nvfp4"])
def test_weights_that_are_not_finite_are_named(bad: float, name: str) -> None:
    w = randn(2, 8, 32)
    w[1, 5, 7] = bad
    w[1, 6, 0] = bad
    with pytest.raises(BadInput, match=rf"weights must be finite in float32; found {bad} at index \(1, 5, 7\)"):
        quantize(w, name)
    with pytest.raises(BadInput, match=rf"found {bad} at index \(5, 7\)"):
        quantize(w[1], name)
    with pytest.raises(BadInput, match=r"finite in float32; found inf at index \(0, 0\)"):
        quantize(torch.full((2, 32), 1e39, dtype=torch.float64), name)


@pytest.mark.parametrize(("w", "name", "error", "rule"), [
    (torch.tensor([[1.0, -0.5]]), "uint4", BadInput,
     r"uint4 without zero points holds no negative.*-0\.5 at index \(0, 1\)"),
    (torch.full((1, 16), 1e6), "int4_g16_fp16", BadInput,
     r"scale of 1\.429e\+05 is needed, but fp16 ends at 6\.55e\+04"),
    (torch.full((1, 16), 1e4), "int4_g16_e4m3", BadInput,
     "but fp8_e4m3 ends at 448; use wider scales or a second level"),
    (torch.tensor([[-3e38, 3e38]]), "uint4z", BadInput, "scale of inf is needed, but fp32 ends"),
    (torch.ones(2, 2, dtype=torch.int32), "int4", BadType, r"float tensor; found torch\.int32"),
    ([[1.0]], "int4", BadType, "float tensor; found list"),
    (torch.ones(4), "int4", BadInput, r"\(N, K\) or \(E, N, K\) tensor; found shape \(4,\)"),
    (torch.ones(1, 1, 1, 4), "int4", BadInput, r"found shape \(1, 1, 1, 4\)"),
    (torch.ones(0, 4), "int4", BadInput, r"non-empty .* found shape \(0, 4\)"),
    (torch.ones(2, 2), "int44", UnknownSpec, "did you mean 'int4'"),
])  # fmt: skip
def test_wrong_arguments_are_refused(w: Tensor, name: str, error: type[Exception], rule: str) -> None:
    with pytest.raises(error, match=rule):
        quantize(w, name)


@pytest.mark.parametrize(("spec", "size"), [("int4_g32_e4m3", 1e-4), ("int4_g32_fp16", 1e-9)])
def test_weights_below_all_scales_are_refused_not_lost(spec: str, size: float) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * size
    with pytest.raises(BadInput, match="all weights would become 0; use wider scales or a second level"):
        quantize(weight, spec)
    weight[0, :32] = 1.0  # beside larger ones, small ones may vanish
    assert (quantize(weight, spec).dequantize()[0, :32] - 1).abs().max() < 0.1

"""QuantWeight: the exact meaning on examples worked by hand, and one clear error for each way to build a wrong one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.dtypes import codebook
from lowbit.errors import BadInput, BadType
from lowbit.layout.bits import pack_bits
from lowbit.weights import QuantWeight, WeightSpec, spec


def u8(*rows: object) -> Tensor:
    return torch.tensor(rows, dtype=torch.uint8)


def random_weight(name: str, n: int, k: int, experts: int | None = None) -> QuantWeight:
    """Random codes with a distinct power of two for every scale and second-level scale."""
    gen = torch.Generator().manual_seed(0)
    one, e = spec(name), experts or 1
    shape = (e, *one.scale_shape(n, k))
    codes = torch.randint(0, min(2**one.value.bits, one.value.num_finite), (e, n, k), dtype=torch.uint8, generator=gen)
    count = shape[0] * shape[1] * shape[2]
    scales = one.scale.encode(2.0 ** (torch.arange(count).float() % 8).view(shape))
    zeros = scale2 = g_idx = None
    if one.zero == "int":
        zeros = torch.randint(int(one.value.min), int(one.value.max) + 1, shape, generator=gen).to(torch.int16)
    elif one.zero == "float":
        zeros = torch.randn(shape, generator=gen)
    if one.scale2 != "none":
        scale2 = 2.0 ** torch.arange(e * (n if one.scale2 == "channel" else 1)).remainder(9).float()
        scale2 = scale2.view((e, n) if one.scale2 == "channel" else (e,))
    if one.act_order:
        g_idx = torch.stack([torch.randperm(k, generator=gen).to(torch.int32) // one.k for _ in range(e)])
    return QuantWeight.from_values(one, codes, scales, zeros=zeros, scale2=scale2, g_idx=g_idx, experts=experts)


def meaning(qw: QuantWeight) -> Tensor:
    """Float32 (E, N, K), element by element from the definition."""
    one = qw.spec
    codes, scales, zeros = qw.code_values(), qw.scale_values(), qw.zero_values()
    w = torch.empty(codes.shape)
    for e in range(codes.shape[0]):
        for n in range(qw.n):
            for k in range(qw.k):
                r = n // one.rows if one.rows else 0
                g = int(qw.g_idx[e, k]) if qw.g_idx is not None else k // one.k if one.k else 0
                value = torch.tensor(one.value.values[int(codes[e, n, k])])
                if zeros is not None:
                    value = value - zeros[e, r, g]
                value = value * scales[e, r, g]
                if qw.scale2 is not None:
                    value = value * (qw.scale2[e] if one.scale2 == "tensor" else qw.scale2[e, n])
                w[e, n, k] = value
    return w


NAMES = ["int4", "int4_t", "int4z_g8", "uint3z_g5", "uint4zf_g8_fp16", "fp8_e4m3_b3x8", "fp8_e5m2_b0x8", "int8_b3x0",
         "mxfp4", "nvfp4", "nf4_g8", "int5_g8_e8m0", "int2z_g4_ao", "fp6_e3m2_g8_ue5m3", "int1zf_g8",
         "int8_g8_e4m3_s2t"]  # fmt: skip


def test_the_meaning_on_an_example_worked_by_hand() -> None:
    qw = QuantWeight.from_values(
        spec("int4z_g2_fp16_s2c"),
        u8([1, 15, 7, 8], [0, 0, 3, 3]),  # as int4: 1, -1, 7, -8 and 0, 0, 3, 3
        torch.tensor([[2.0, 0.5], [1.0, 4.0]], dtype=torch.float16),
        zeros=torch.tensor([[1, -8], [0, 3]], dtype=torch.int16),
        scale2=torch.tensor([10.0, 0.25]),
    )
    assert qw.dequantize().tolist() == [[0.0, -40.0, 75.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    assert qw.codes.tolist() == [[[0x87F1], [0x3300]]]
    assert (qw.shape, qw.num_experts, qw.n, qw.k) == ((2, 4), 1, 2, 4)


def test_order_of_operations_is_that_of_the_definition() -> None:
    third, seventh, zero = torch.tensor([[1 / 3]]), torch.tensor(1 / 7), torch.tensor([[0.1]])
    qw = QuantWeight.from_values(spec("int8zf_c_s2t"), u8([100]), third, zeros=zero, scale2=seventh)
    assert qw.dequantize().item() == (((100 - zero) * third) * seventh).item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("experts", [None, 1, 3])
def test_dequantize_is_the_definition(name: str, experts: int | None) -> None:
    qw = random_weight(name, 7, 19, experts)
    w = meaning(qw)
    assert torch.equal(qw.dequantize(), w[0] if experts is None else w)
    assert qw.dequantize().shape == qw.shape
    for expert in range(qw.num_experts):
        assert torch.equal(qw.dequantize(expert), w[expert])


def test_expand_covers_edge_blocks() -> None:
    qw = random_weight("fp8_e4m3_b128x128", 576, 320)
    index = torch.arange(15.0).view(1, 5, 3)
    expanded = qw.expand(index, 0)
    assert expanded.shape == (576, 320)
    assert torch.equal(expanded, (torch.arange(576)[:, None] // 128 * 3 + torch.arange(320) // 128).float())


def test_code_values_of_experts_and_rows() -> None:
    codes = torch.randint(0, 8, (3, 5, 21), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    qw = QuantWeight.from_values(spec("uint3"), codes, torch.ones(3, 5, 1), experts=3)
    assert torch.equal(qw.code_values(), codes)
    assert torch.equal(qw.code_values(1), codes[1])
    assert torch.equal(qw.code_values(2, slice(1, 3)), codes[2, 1:3])
    assert qw.code_values(2, slice(5, 9)).shape == (0, 21)


def test_identity_device_and_repr() -> None:
    qw = random_weight("mxfp4", 4, 64, 2)
    assert qw.to("cpu") is qw
    assert qw != replace(qw)
    assert qw.total_bytes == 2 * 4 * (32 + 2)
    assert repr(qw) == "QuantWeight(mxfp4, 2x4x64, 0.000272 MB, cpu)"


def good() -> dict[str, object]:
    """The fields of a valid 3x40 int4z_g16_bf16_s2c_ao weight."""
    return {
        "spec": spec("int4z_g16_s2c_ao"), "experts": None, "n": 3, "k": 40,
        "codes": torch.zeros(1, 3, 5, dtype=torch.int32), "scales": torch.ones(1, 3, 3, dtype=torch.bfloat16),
        "zeros": torch.zeros(1, 3, 3, dtype=torch.int16), "scale2": torch.ones(1, 3),
        "g_idx": torch.arange(40, dtype=torch.int32)[None] // 16,
    }  # fmt: skip


def at(t: object, index: tuple[int, ...], value: float) -> Tensor:
    """A copy of a tensor with one number replaced."""
    assert isinstance(t, Tensor)
    t = t.clone()
    t[index] = value
    return t


def test_the_good_weight_is_good() -> None:
    assert QuantWeight(**good()).dequantize().shape == (3, 40)  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value", "error", "message"), [
    ("n", 0, BadInput, "must be positive; found n=0, k=40, experts=None"),
    ("experts", 0, BadInput, "experts=0"),
    ("experts", 2, BadInput, r"codes of a 3x40 .* with 2 expert\(s\) must have shape \(2, 3, 5\); found \(1, 3, 5\)"),
    ("k", 41, BadInput, r"codes .* must have shape \(1, 3, 6\); found \(1, 3, 5\)"),
    ("codes", torch.zeros(1, 3, 5), BadType, r"codes of .* must be torch\.int32; found torch\.float32"),
    ("codes", torch.zeros(3, 5, dtype=torch.int32), BadInput, r"codes .* must have shape \(1, 3, 5\); found \(3, 5\)"),
    ("scales", torch.ones(1, 3, 3), BadType, r"scales of .* must be torch\.bfloat16; found torch\.float32"),
    ("scales", torch.ones(1, 2, 3, dtype=torch.bfloat16), BadInput, r"scales .* \(1, 3, 3\); found \(1, 2, 3\)"),
    ("scales", torch.ones(1, 3, 0, dtype=torch.bfloat16), BadInput, r"scales .* \(1, 3, 1\); found \(1, 3, 0\)"),
    ("scales", torch.ones(1, 3, 5, dtype=torch.bfloat16), BadInput, r"zeros .* \(1, 3, 5\); found \(1, 3, 3\)"),
    ("scales", at(good()["scales"], (0, 1, 2), float("nan")), BadInput,
     r"scales must be finite; found nan at index \(0, 1, 2\)"),
    ("zeros", None, BadInput, "has the tensors codes, scales, zeros, scale2, g_idx; found codes, scales, scale2, g_"),
    ("zeros", torch.zeros(1, 3, 3), BadType, r"zeros of .* must be torch\.int16; found torch\.float32"),
    ("zeros", at(good()["zeros"], (0, 2, 0), 8), BadInput,
     r"zero points of int4 must lie in -8\.\.7; found 8 at index \(0, 2, 0\)"),
    ("scale2", torch.ones(1), BadInput, r"scale2 .* must have shape \(1, 3\); found \(1,\)"),
    ("scale2", at(good()["scale2"], (0, 1), float("inf")), BadInput,
     r"scale2 must be finite; found inf at index \(0, 1\)"),
    ("g_idx", at(good()["g_idx"], (0, 7), 3), BadInput, r"g_idx must lie in 0\.\.2; found 3 at index \(0, 7\)"),
    ("g_idx", at(good()["g_idx"], (0, 7), -1), BadInput, r"g_idx must lie in 0\.\.2; found -1 at index \(0, 7\)"),
    ("spec", spec("int4z_g16_s2c"), BadInput, "has the tensors codes, scales, zeros, scale2; found .*g_idx"),
    ("scales", torch.ones(1, 3, 3, dtype=torch.bfloat16, device="meta"), BadInput,
     "on one device; codes are on cpu, scales on meta"),
])  # fmt: skip
def test_wrong_tensors_are_refused(field: str, value: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        QuantWeight(**{**good(), field: value})  # type: ignore[arg-type]


def test_a_slice_of_columns_keeps_the_scales_of_all_groups() -> None:
    whole = random_weight("int4z_g16_ao", 3, 40)
    part = QuantWeight.from_values(whole.spec, whole.code_values(0)[:, 5:17], whole.scales[0], zeros=None if whole.zeros is None else whole.zeros[0],
                                   g_idx=None if whole.g_idx is None else whole.g_idx[0, 5:17])  # fmt: skip
    assert part.scales.shape[2] == 3
    assert torch.equal(part.dequantize(), whole.dequantize()[:, 5:17])


@pytest.mark.parametrize(("name", "code", "found"), [
    ("fp8_e4m3", 0x7F, 127), ("fp8_e4m3", 0xFF, 255), ("fp8_e5m2", 0xFC, 252), ("fp8_e3m4", 0x70, 112),
])  # fmt: skip
def test_codes_that_are_not_finite_are_refused(name: str, code: int, found: int) -> None:
    codes = torch.zeros(2, 3, 40, dtype=torch.uint8)
    codes[1, 2, 39] = code
    with pytest.raises(BadInput, match=rf"codes of {name} must be finite numbers; found {found} at index \(1, 2, 39\)"):
        QuantWeight.from_values(spec(name), codes, torch.ones(2, 3, 1), experts=2)


def test_codes_beyond_a_codebook_and_nan_scales_are_refused() -> None:
    third = WeightSpec.make(codebook("third", [-1.0, 0.0, 1.0]))
    with pytest.raises(BadInput, match=r"codes of third.* must be finite numbers; found 3 at index \(0, 0, 1\)"):
        QuantWeight.from_values(third, u8([2, 3]), torch.ones(1, 1))
    with pytest.raises(BadInput, match=r"scales must be finite; found nan at index \(0, 0, 1\)"):
        QuantWeight.from_values(spec("mxfp4"), u8([0] * 64), u8([127, 255]))


def test_bits_after_the_last_code_must_be_zero() -> None:
    codes = pack_bits(u8([[7] * 12]).view(1, 1, 12), 3)
    assert QuantWeight(spec("uint3"), None, 1, 12, codes, torch.ones(1, 1, 1)).dequantize().tolist() == [[7.0] * 12]
    with pytest.raises(BadInput, match="the last 28 bits of every row of codes must be 0"):
        QuantWeight(spec("uint3"), None, 1, 12, codes | 16, torch.ones(1, 1, 1))


def test_from_values_wants_matching_experts() -> None:
    codes = torch.zeros(2, 3, 8, dtype=torch.uint8)
    with pytest.raises(BadInput, match=r"\(2, 3, 8\) with experts=None; pass experts=2"):
        QuantWeight.from_values(spec("int4"), codes, torch.ones(2, 3, 1))
    with pytest.raises(BadInput, match=r"\(N, K\) or \(E, N, K\); found shape \(8,\)"):
        QuantWeight.from_values(spec("int4"), codes[0, 0], torch.ones(1))
    with pytest.raises(BadInput, match="4-bit code must be below 16; found 16"):
        QuantWeight.from_values(spec("int4"), codes + 16, torch.ones(2, 3, 1), experts=2)
    dense = QuantWeight.from_values(spec("int4"), codes[:1], torch.ones(1, 3, 1))
    assert dense.shape == (3, 8)
    assert QuantWeight.from_values(spec("int4"), codes[:1], torch.ones(1, 3, 1), experts=1).shape == (1, 3, 8)


def test_scales_whose_products_leave_float32_are_refused() -> None:
    """Kernels multiply in one order or another; an infinity in one of them only would be a wrong number."""
    codes = torch.full((16, 32), 6, dtype=torch.uint8)
    for code, fits in ((252, True), (253, False), (254, False)):
        scales = torch.full((16, 1), code, dtype=torch.uint8)
        if fits:
            assert torch.isfinite(QuantWeight.from_values("mxfp4", codes, scales).dequantize()).all()
        else:
            with pytest.raises(BadInput, match=r"scales times the largest fp4_e2m1 must be finite in float32; found .* at index \(0, 0, 0\)"):
                QuantWeight.from_values("mxfp4", codes, scales)

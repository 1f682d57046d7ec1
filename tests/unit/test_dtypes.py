"""Number formats: decode tables against independent values, encoders against a brute-force nearest-even search."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from lowbit.dtypes import DType, codebook, dtype, dtype_names
from lowbit.errors import BadInput, BadType, UnknownSpec

UNSORTED = codebook("zigzag", [0.5, -0.25, 8.0, 0.0, -3.0])
NATIVE = ("bf16", "fp16", "fp32")
CODED = [*(dtype(name) for name in dtype_names() if name not in NATIVE and not name.startswith("e")), dtype("e8m0"),
         UNSORTED]  # fmt: skip

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M3 = [i / 8 for i in range(16)] + [2 + i / 4 for i in range(8)] + [4 + i / 2 for i in range(8)]
E3M2 = [i / 16 for i in range(8)] + [2.0**e * (1 + i / 4) for e in range(-1, 5) for i in range(4)]


def bit_pattern_value(fmt: DType, code: int) -> Fraction | None:
    """The value of a float code read from its written-out bits, None if special; shares no code with the library."""
    text = f"{code:0{fmt.bits}b}"
    sign, text = (text[0], text[1:]) if fmt.signed else ("0", text)
    exponent, mantissa = text[: fmt.exponent], text[fmt.exponent :]
    special = {"none": False, "fn": "0" not in text, "ieee": "0" not in exponent, "e8m0": "0" not in text}
    if special[fmt.specials]:
        return None
    bias = 2 ** (fmt.exponent - 1) - 1
    if fmt.specials == "e8m0":
        return Fraction(2) ** (int(exponent, 2) - bias)
    implicit, power = ("1", int(exponent, 2)) if "1" in exponent else ("0", 1)
    return (-1) ** int(sign) * Fraction(int(implicit + mantissa, 2), 2 ** len(mantissa)) * Fraction(2) ** (power - bias)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal as float32 bit patterns, all NaNs being one."""
    nan = a.isnan() & b.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.view(torch.int32)[~nan], b.view(torch.int32)[~nan])


def test_every_format_of_the_grammar_has_a_name() -> None:
    names = set(dtype_names())
    assert {f"{kind}int{bits}" for kind in ("", "u") for bits in range(1, 9)} <= names
    assert {f"fp{1 + e + m}_e{e}m{m}" for e in range(1, 8) for m in range(7) if 3 <= 1 + e + m <= 8} <= names
    assert {f"ue{e}m{m}" for e in range(1, 9) for m in range(8) if e + m <= 8} <= names
    assert {"e8m0", "bf16", "fp16", "fp32", "nf4", "e4m3", "e5m2"} <= names


@pytest.mark.parametrize("fmt", [f for f in CODED if f.is_float], ids=str)
def test_float_tables_match_their_bit_patterns(fmt: DType) -> None:
    table = fmt.decode_table()
    assert table.dtype == torch.float32
    assert table.shape == (2**fmt.bits,)
    for code, value in enumerate(table.tolist()):
        expected = bit_pattern_value(fmt, code)
        if expected is None:
            assert not math.isfinite(value)
        else:
            assert Fraction(value) == expected, f"code {code:#x}"


@pytest.mark.parametrize(("name", "torch_dtype"), [
    ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2), ("e8m0", torch.float8_e8m0fnu),
])  # fmt: skip
def test_8_bit_tables_match_torch(name: str, torch_dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert same_bits(dtype(name).decode(codes), codes.view(torch_dtype).float())


@pytest.mark.parametrize(("name", "magnitudes"), [("fp4_e2m1", E2M1), ("fp6_e2m3", E2M3), ("fp6_e3m2", E3M2)])
def test_small_float_tables_match_values_written_by_hand(name: str, magnitudes: list[float]) -> None:
    expected = torch.tensor(magnitudes + [-m for m in magnitudes])
    assert same_bits(dtype(name).decode_table(), expected)  # the sign of zero included


@pytest.mark.parametrize(("name", "low", "high"), [
    ("int1", -1, 0), ("int2", -2, 1), ("int4", -8, 7), ("int8", -128, 127), ("uint1", 0, 1), ("uint4", 0, 15),
    ("uint8", 0, 255), ("fp8_e4m3", -448, 448), ("fp8_e5m2", -57344, 57344), ("fp8_e3m4", -15.5, 15.5),
    ("fp3_e1m1", -3, 3), ("fp8_e7m0", -(2.0**64), 2.0**64), ("ue4m3", 0, 448), ("ue5m3", 0, 122880),
    ("e8m0", 2.0**-127, 2.0**127), ("fp16", -65504, 65504), ("nf4", -1, 1),
])  # fmt: skip
def test_range(name: str, low: float, high: float) -> None:
    assert (dtype(name).min, dtype(name).max) == (low, high)


@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_are_twos_complement_in_the_low_bits(bits: int) -> None:
    codes = torch.arange(2**bits, dtype=torch.uint8)
    values = list(range(2**bits))
    assert dtype(f"uint{bits}").decode(codes).tolist() == values
    assert dtype(f"int{bits}").decode(codes).tolist() == [v - 2**bits if v >= 2 ** (bits - 1) else v for v in values]
    assert dtype(f"int{bits}").decode_table().tolist() == dtype(f"int{bits}").decode(codes).tolist()


def test_nf4_holds_quantiles_of_the_normal_distribution() -> None:
    edge = (1 - 1 / 32 + 1 - 1 / 30) / 2  # the mean of the outermost quantiles for 16 and for 15 levels
    positive = [NormalDist().inv_cdf(edge + (0.5 - edge) * i / 8) for i in range(8)]
    negative = [-NormalDist().inv_cdf(edge + (0.5 - edge) * i / 7) for i in range(7)]
    expected = sorted([*negative, 0.0, *positive])
    assert dtype("nf4").decode_table().tolist() == pytest.approx([v / positive[0] for v in expected], abs=2e-7)


@pytest.mark.parametrize("fmt", CODED, ids=str)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_encode_is_nearest_even(fmt: DType, x_dtype: torch.dtype) -> None:
    table = fmt.decode_table().double()
    finite = table[table.isfinite()].unique()
    middle = ((finite[1:] + finite[:-1]) / 2).to(x_dtype)
    noise = torch.randn(500, dtype=x_dtype, generator=torch.Generator().manual_seed(0)) * min(fmt.max, 1e6)
    up, down = torch.tensor(math.inf, dtype=x_dtype), torch.tensor(-math.inf, dtype=x_dtype)
    edges = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0, 3e38, -3e38], dtype=x_dtype)
    x = torch.cat([finite.to(x_dtype), middle, middle.nextafter(up), middle.nextafter(down), noise, edges])

    codes = fmt.encode(x)

    assert codes.dtype == torch.uint8
    assert int(codes.max()) < 2**fmt.bits
    assert not bool(fmt.is_special(codes).any())
    distance = (x.double()[:, None] - table).abs().nan_to_num(math.inf, math.inf)
    nearest = distance.min(1).values
    found = distance.gather(1, codes.long()[:, None])[:, 0]
    assert torch.equal(found, nearest)
    # Where values on both sides are equally near, the code must be the even one (codebooks: the lower index).
    candidates = (distance == nearest[:, None]) & table.isfinite()
    tied = (candidates & (table > x.double()[:, None])).any(1) & (candidates & (table < x.double()[:, None])).any(1)
    if fmt.kind == "codebook":
        assert torch.equal(codes[tied].long(), candidates[tied].int().argmax(1))
    else:
        assert not bool((codes[tied] & 1).any())
    if fmt.is_float and fmt.signed:  # the sign of zero survives
        assert torch.equal(codes >> (fmt.bits - 1), x.signbit().to(torch.uint8))
    assert int(tied.sum()) > 0


@pytest.mark.parametrize("fmt", CODED, ids=str)
def test_every_finite_code_survives_a_round_trip(fmt: DType) -> None:
    codes = torch.arange(2**fmt.bits).to(torch.uint8)
    codes = codes[~fmt.is_special(codes)]
    assert torch.equal(fmt.encode(fmt.decode(codes)), codes)


@pytest.mark.parametrize(("name", "torch_dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_encode_matches_torch_casts_in_range(name: str, torch_dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    x = (torch.randn(20000, generator=torch.Generator().manual_seed(1)) * 100).clamp(-448, 448).to(x_dtype)
    x = torch.cat([x, x * 2.0**-14])
    assert torch.equal(dtype(name).encode(x), x.to(torch_dtype).view(torch.uint8))


def test_infinities_saturate_and_nan_is_refused() -> None:
    x = torch.tensor([math.inf, -math.inf])
    for fmt in CODED:
        if fmt != UNSORTED:
            assert fmt.decode(fmt.encode(x)).tolist() == [fmt.max, fmt.min], fmt
        with pytest.raises(BadInput, match=f"NaN cannot be encoded as {fmt.name}"):
            fmt.encode(torch.tensor([1.0, math.nan]))


def test_16_and_32_bit_formats_are_stored_natively() -> None:
    x = torch.tensor([1.0, 1e5, -math.inf, 1 + 2.0**-8])
    assert dtype("bf16").encode(x).tolist() == [1.0, 99840.0, torch.finfo(torch.bfloat16).min, 1.0]
    assert dtype("fp16").encode(x).tolist() == [1.0, 65504.0, -65504.0, 1 + 2.0**-8]
    assert dtype("fp16").encode(x.bfloat16()).tolist() == [1.0, 65504.0, -65504.0, 1.0]
    assert dtype("fp32").encode(x.double() * 1e36).max().item() == torch.finfo(torch.float32).max
    for name, storage in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        assert dtype(name).storage == storage
        assert dtype(name).decode(torch.ones(3, dtype=storage)).dtype == torch.float32
        with pytest.raises(BadInput, match="up to 8 bits"):
            dtype(name).decode_table()


def test_shapes_and_strides_are_kept() -> None:
    x = torch.randn(6, 4, 10, generator=torch.Generator().manual_seed(2))[::2, :, 1::3]
    for fmt in (dtype("int4"), dtype("e4m3"), dtype("nf4")):
        codes = fmt.encode(x)
        assert codes.shape == x.shape
        assert torch.equal(codes, fmt.encode(x.contiguous()))
        assert torch.equal(fmt.decode(codes.transpose(0, 2)), fmt.decode(codes).transpose(0, 2))
        assert fmt.encode(x[:0]).shape == (0, 4, 3)


def test_wrong_tensors_are_refused() -> None:
    with pytest.raises(BadType, match=r"floating-point tensor, not torch\.int64"):
        dtype("int4").encode(torch.tensor([1]))
    with pytest.raises(BadType, match=r"int4 is stored as torch.uint8, but the tensor is torch.int8"):
        dtype("int4").decode(torch.tensor([1], dtype=torch.int8))


def test_names_round_trip_and_formats_are_values() -> None:
    for name in dtype_names():
        fmt = dtype(name)
        assert dtype(str(fmt)) == fmt
        assert pickle.loads(pickle.dumps(fmt)) == fmt
    assert len({dtype(name) for name in dtype_names()}) == 16 + 27 + 35 + 1 + 3 + 1
    assert str(dtype("e4m3")) == "fp8_e4m3"
    assert dtype("ue8m0") == dtype("e8m0")
    assert dtype(str(UNSORTED)) == UNSORTED
    assert str(UNSORTED) == "zigzag(0.5,-0.25,8.0,0.0,-3.0)"


@pytest.mark.parametrize(("name", "nearest"), [
    ("int9", "int8"), ("fp8", "fp8_e4m3"), ("fp8_e4m4", "fp8_e4m3"), ("bfloat16", "bf16"), ("INT4", "int4"),
    ("fp8_e2m1", "fp8_e6m1"), ("fp16_e5m10", "fp6_e5m0"),
])  # fmt: skip
def test_unknown_names_are_refused_with_a_suggestion(name: str, nearest: str) -> None:
    with pytest.raises(UnknownSpec, match=f"unknown number format {name!r}; did you mean {nearest!r}"):
        dtype(name)


@pytest.mark.parametrize(("name", "values", "rule"), [
    ("int4", [0.0, 1.0], "new name"), ("Mine", [0.0, 1.0], "new name"), ("a_b", [0.0, 1.0], "new name"),
    ("mine", [0.0], "2 to 16 values"), ("mine", [0.0] * 17, "2 to 16 values"), ("mine", [0.0, math.nan], "finite"),
    ("mine", [0.0, 1e39], "finite in float32"),
])  # fmt: skip
def test_bad_codebooks_are_refused(name: str, values: list[float], rule: str) -> None:
    with pytest.raises(BadInput, match=rule):
        codebook(name, values)


def test_codebook_width_and_unused_codes() -> None:
    assert [codebook("cb", [float(i) for i in range(n)]).bits for n in (2, 3, 4, 5, 9, 16)] == [1, 2, 2, 3, 4, 4]
    assert UNSORTED.is_special(torch.arange(8, dtype=torch.uint8)).tolist() == [False] * 5 + [True] * 3
    assert codebook("third", [0.0, 1 / 3]).values[1] == torch.tensor(1 / 3).item()  # rounded to float32

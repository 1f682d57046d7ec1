"""Names of weight specs: one parser, one printer, over the whole product of fields."""

from __future__ import annotations

import pickle
from itertools import product

import pytest

from lowbit.dtypes import codebook, dtype, dtype_names
from lowbit.errors import BadInput, BadType, UnknownSpec
from lowbit.weights import WeightSpec, spec

VALUES = [dtype(name) for name in dtype_names() if name.startswith(("int", "uint", "fp")) and dtype(name).bits <= 8]
VALUES += [dtype("nf4"), codebook("ternary", [-1.0, 0.0, 1.0]), codebook("tiny", [1e-30, -2.5e20])]
SCALES = [dtype(name) for name in ("bf16", "fp16", "fp32", "e8m0", "e4m3", "e5m2", "e3m2", "ue4m3", "ue5m3")]
GRANULARITIES = [(1, 0), (0, 0), (1, 16), (1, 100), (128, 128), (32, 1), (0, 64), (8, 0)]


def test_parse_inverts_str_for_every_spec() -> None:
    names = {}
    for value, scale, (rows, k), zero, scale2, act_order in product(
        VALUES, SCALES, GRANULARITIES, ("none", "int", "float"), ("none", "tensor", "channel"), (False, True)
    ):
        if (zero != "none" and not value.is_int) or (act_order and (rows, k) not in ((1, 16), (1, 100))):
            continue
        one = WeightSpec(value, scale, rows, k, zero, scale2, act_order)
        assert WeightSpec.parse(str(one)) == one
        names[str(one)] = one
    # Distinct specs have distinct names.
    integers = 16 * len(SCALES) * 3 * 3 * (len(GRANULARITIES) + 2)
    others = (27 + 3) * len(SCALES) * 3 * (len(GRANULARITIES) + 2)
    assert len(names) == integers + others


@pytest.mark.parametrize(("name", "value", "scale", "rows", "k", "zero", "scale2", "act_order"), [
    ("int4_g128", "int4", "bf16", 1, 128, "none", "none", False),
    ("int4z_g64", "int4", "bf16", 1, 64, "int", "none", False),
    ("uint4zf_g64_fp16", "uint4", "fp16", 1, 64, "float", "none", False),
    ("uint4", "uint4", "fp32", 1, 0, "none", "none", False),
    ("int8", "int8", "fp32", 1, 0, "none", "none", False),
    ("fp8_e4m3", "e4m3", "fp32", 1, 0, "none", "none", False),
    ("fp8_e4m3_t", "e4m3", "fp32", 0, 0, "none", "none", False),
    ("fp8_e4m3_b128x128", "e4m3", "bf16", 128, 128, "none", "none", False),
    ("fp8_e4m3_b32x32_e8m0", "e4m3", "e8m0", 32, 32, "none", "none", False),
    ("int4_g128_e8m0", "int4", "e8m0", 1, 128, "none", "channel", False),
    ("int4_g128_e8m0_s2t", "int4", "e8m0", 1, 128, "none", "tensor", False),
    ("mxfp4", "fp4_e2m1", "e8m0", 1, 32, "none", "none", False),
    ("mxfp6", "fp6_e3m2", "e8m0", 1, 32, "none", "none", False),
    ("mxfp8", "fp8_e4m3", "e8m0", 1, 32, "none", "none", False),
    ("mxint8", "int8", "e8m0", 1, 32, "none", "none", False),
    ("nvfp4", "fp4_e2m1", "e4m3", 1, 16, "none", "tensor", False),
    ("fp6_e3m2_g16_e4m3", "fp6_e3m2", "e4m3", 1, 16, "none", "none", False),
    ("int4_g16_e4m3", "int4", "e4m3", 1, 16, "none", "none", False),
    ("fp4_e2m1_g16_e4m3_s2n", "fp4_e2m1", "e4m3", 1, 16, "none", "none", False),
    ("nf4", "nf4", "fp32", 1, 64, "none", "none", False),
    ("nf4_c", "nf4", "fp32", 1, 0, "none", "none", False),
    ("int4z_g128_fp16_ao", "int4", "fp16", 1, 128, "int", "none", True),
])  # fmt: skip
def test_names_mean_what_the_grammar_says(
    name: str, value: str, scale: str, rows: int, k: int, zero: str, scale2: str, act_order: bool
) -> None:
    expected = WeightSpec(dtype(value), dtype(scale), rows, k, zero, scale2, act_order)  # type: ignore[arg-type]
    assert WeightSpec.parse(name) == expected
    assert str(expected) == name


@pytest.mark.parametrize(("name", "printed"), [
    ("fp4_e2m1_g32_e8m0", "mxfp4"), ("fp4_e2m1_g16_e4m3", "nvfp4"), ("nf4_g64_fp32", "nf4"),
    ("int8_g32_e8m0_s2n", "mxint8"), ("int4_c", "int4"), ("int4_g0", "int4"), ("int4_g-1", "int4"),
    ("int4_b0x0", "int4_t"), ("int4_b1x128", "int4_g128"),
    ("int4_g128_bf16_s2n", "int4_g128"), ("e4m3_t_fp32", "fp8_e4m3_t"), ("int4_g128_fp8_e4m3", "int4_g128_e4m3"),
])  # fmt: skip
def test_other_spellings_print_as_the_shortest(name: str, printed: str) -> None:
    assert str(WeightSpec.parse(name)) == printed


def test_make_takes_every_spelling_of_all() -> None:
    for everything in (0, -1, None):
        assert WeightSpec.make("int4", k=everything) == spec("int4")
        assert WeightSpec.make("int4", rows=everything) == spec("int4_t")
    assert WeightSpec.make(dtype("int4"), k=64, scale=dtype("fp16"), zero="int") == spec("int4z_g64_fp16")


@pytest.mark.parametrize(("name", "nearest"), [
    ("int4g128", "int4_g128"), ("int9_g128", "int8_g128"), ("nvfp5", "nvfp4"), ("fp8", "fp8_e4m3"), ("fp4", "fp4_e2m1"),
    ("INT4", "int4"), ("fp8_e4m3_b128", "fp8_e4m3_b128x128"), ("mxfp", "mxfp4"),
])  # fmt: skip
def test_unknown_names_suggest_a_valid_one(name: str, nearest: str) -> None:
    with pytest.raises(UnknownSpec, match=f"unknown weight spec {name!r}; did you mean {nearest!r}"):
        spec(name)
    spec(nearest)


@pytest.mark.parametrize("name", [
    "", "_g128", "int4_", "int4__g128", "int4_g", "int4_g128_g128", "int4_ao_g128", " int4", "int4\n", "int4_g128_int8",
    "nf4_g64z", "int4_g-2", "fp8_e4m3_b128x", "mxfp4_g32",
])  # fmt: skip
def test_malformed_names_are_unknown(name: str) -> None:
    with pytest.raises(UnknownSpec, match="did you mean"):
        spec(name)


@pytest.mark.parametrize(("name", "rule"), [
    ("bf16", "up to 8 bits, not bf16"), ("e8m0_g32", "signed floats or codebooks of up to 8 bits, not e8m0"),
    ("fp8_e4m3z", "zero points belong to integer weights, not to fp8_e4m3"), ("nf4zf_g64", "zero points belong"),
    ("int4_ao", "act_order needs groups of K within a row; found rows=1, k=0"), ("int4_b8x32_ao", "found rows=8, k=32"),
    ("int4_g128_fp8_e2m1", "unknown number format 'fp8_e2m1'"),
])  # fmt: skip
def test_contradictions_in_a_name_are_refused(name: str, rule: str) -> None:
    with pytest.raises(BadInput, match=rule):
        spec(name)


@pytest.mark.parametrize(("fields", "rule"), [
    ({"rows": -2}, "found rows=-2, k=128"), ({"k": -2}, "found rows=1, k=-2"),
    ({"scale": dtype("int8")}, "scales are floating-point numbers, not int8"), ({"scale": dtype("nf4")}, "not nf4"),
    ({"zero": "z"}, "found zero='z'"), ({"scale2": "row"}, "scale2='row'"),
])  # fmt: skip
def test_bad_fields_are_refused(fields: dict[str, object], rule: str) -> None:
    good = {"value": dtype("int4"), "scale": dtype("bf16"), "rows": 1, "k": 128}
    with pytest.raises(BadInput, match=rule):
        WeightSpec(**{**good, **fields})  # type: ignore[arg-type]


def test_spec_passes_specs_through_and_refuses_other_types() -> None:
    one = spec("int4_g128")
    assert spec(one) is one
    assert pickle.loads(pickle.dumps(one)) == one
    assert len({one, spec("int4_g128"), spec("mxfp4")}) == 2
    with pytest.raises(BadType, match="not int"):
        spec(4)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "shape"), [
    ("int4", (576, 1)), ("int4_t", (1, 1)), ("int4_g128", (576, 5)), ("int4_g576", (576, 1)), ("int4_b128x128", (5, 5)),
    ("int4_b0x64", (1, 9)), ("int4_b64x0", (9, 1)),
])  # fmt: skip
def test_scale_shape_counts_edge_blocks(name: str, shape: tuple[int, int]) -> None:
    assert spec(name).scale_shape(576, 576) == shape

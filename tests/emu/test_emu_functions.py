"""Arithmetic and conversions of the twins against numpy, computed another way: what no recording covers yet.

Every function is called through a kernel, as kernels call it.
"""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest

import emulator

N = 2048
HEAD = """#include "hw/hw.h"
using namespace hw;
struct Params { const u8* in; u8* out; };
"""
# name: the u32 results of one element; x, y, z are floats and v their bits
CALLS = {
    "float": "as_u32(add_f32(x, y)), as_u32(sub_f32(x, y)), as_u32(mul_f32(x, y)), as_u32(fma_f32(x, y, z))",
    "divide": "as_u32(div_f32(x, y)), as_u32(max_f32(x, y)), as_u32(min_f32(x, y)), (u32)cvt_rni_s32_f32(x)",
    "convert": "as_u32(cvt_f32_bf16((u16)v.x)), as_u32(cvt_f32_f16((u16)v.x)), "
    "(u32)cvt_rn_bf16_f32(x), (u32)cvt_rn_f16_f32(x)",
    "pairs": "cvt_bf16x2_f32(x, y), cvt_f16x2_f32(x, y), cvt_bf16x2_f32(z, z), cvt_f16x2_f32(z, z)",
    "fp8": "cvt_e4m3x2_f32(x, y), cvt_e5m2x2_f32(x, y), cvt_f16x2_e4m3x2((u16)v.x), cvt_f16x2_e5m2x2((u16)v.x)",
    "half": "add_f16x2(v.x, v.y), sub_f16x2(v.x, v.y), mul_f16x2(v.x, v.y), fma_f16x2(v.x, v.y, v.z)",
    "bits": "prmt(v.x, v.y, v.z), lop3<0xea>(v.x, v.y, v.z), lop3<0x96>(v.x, v.y, v.z), as_u32(ex2_approx_f32(x))",
}


def source(name: str) -> emulator.KernelText:
    text = f"""{HEAD}HW_KERNEL(32) k(const HW_GRID_CONST Params p) {{
    for (u32 i = tid_x(); i < {N}; i += 32) {{
        const U4 v = ld_global_v4(p.in + i * 16);
        const float x = as_f32(v.x), y = as_f32(v.y), z = as_f32(v.z);
        (void)x; (void)y; (void)z;
        st_global_v4(p.out + i * 16, U4{{{CALLS[name]}}});
    }}
}}
"""
    return emulator.KernelText(text, "k", "sm_90a", name)


@pytest.fixture(scope="module")
def library() -> emulator.Library:
    return emulator.build([source(n) for n in CALLS])


def run(library: emulator.Library, name: str, data: np.ndarray) -> np.ndarray:
    with emulator.Memory() as memory:
        out = memory.alloc("out", N * 16, output=True)
        library.launch(name, struct.pack("<QQ", memory.alloc("in", data, read_only=True), out), grid=1, block=32)
        return memory.array(out, (N, 4), np.uint32)


def floats(kind: str) -> np.ndarray:
    """(N, 4) float32: moderate values, close exponents with ties, or arbitrary bits."""
    rng = np.random.default_rng(7)
    if kind == "bits":
        return rng.integers(0, 2**32, (N, 4), dtype=np.uint32).view(np.float32)
    if kind == "ties":  # few mantissa bits beyond 16-bit formats, so that halves are common
        return np.ldexp(rng.integers(-(2**13), 2**13, (N, 4)).astype(np.float32), rng.integers(-24, 6, (N, 4))).astype(
            np.float32
        )
    return (rng.standard_normal((N, 4)) * np.exp2(rng.integers(-20, 20, (N, 4)))).astype(np.float32)


def same(got: np.ndarray, want: np.ndarray, nan: int) -> None:
    """Equal bits; a NaN must have the bits `nan`."""
    kinds = {2: np.uint16, 4: np.uint32}
    bits = want.view(kinds[want.itemsize])
    expected = np.where(np.isnan(want), bits.dtype.type(nan), bits).astype(np.uint32)
    wrong = np.flatnonzero(got.astype(np.uint32) != expected)
    assert wrong.size == 0, (
        f"{wrong.size} differ, first at {wrong[0]}: {got[wrong[0]]:#x}, want {expected[wrong[0]]:#x}"
    )


KINDS = ("normal", "ties", "bits")


@pytest.mark.parametrize("kind", KINDS)
@np.errstate(all="ignore")
def test_float_arithmetic(kind: str, library: emulator.Library) -> None:
    data = floats(kind)
    x, y = data[:, 0], data[:, 1]
    got = run(library, "float", data)
    for i, want in enumerate((x + y, x - y, x * y)):
        same(got[:, i], want, 0x7FFFFFFF)
    got = run(library, "divide", data)
    for i, want in enumerate((x / y, np.fmax(x, y), np.fmin(x, y))):
        same(got[:, i], want, 0x7FFFFFFF)
    finite = np.nan_to_num(x.astype(np.float64), nan=0, posinf=1e30, neginf=-1e30)
    assert np.array_equal(got[:, 3].view(np.int32), np.clip(np.rint(finite), -(2**31), 2**31 - 1).astype(np.int64))


@pytest.mark.parametrize("kind", KINDS)
def test_fma_rounds_once(kind: str, library: emulator.Library) -> None:
    data = floats(kind)
    got = run(library, "float", data)[:, 3].view(np.float32)
    checked = 0
    for (x, y, z, _), r in zip(data.tolist(), got.tolist(), strict=True):
        if not all(np.isfinite((x, y, z, r))) or r == 0:
            continue
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        below, above = (float(np.nextafter(np.float32(r), np.float32(s))) for s in (-np.inf, np.inf))
        error = abs(exact - Fraction(r))
        for other in (below, above):
            if np.isfinite(other):
                assert error <= abs(exact - Fraction(other))
        checked += 1
    assert checked > N // 3


def test_max_and_min_of_zeros(library: emulator.Library) -> None:
    data = np.zeros((N, 4), np.float32)
    data[::2, 0] = -0.0
    data[::3, 1] = -0.0
    got = run(library, "divide", data)
    both = np.signbit(data[:, 0]) & np.signbit(data[:, 1])
    either = np.signbit(data[:, 0]) | np.signbit(data[:, 1])
    assert np.array_equal(got[:, 1] == 0x80000000, both)
    assert np.array_equal(got[:, 2] == 0x80000000, either)


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> bf16 bits, to nearest even, by the definition: the nearer of the two neighbours."""
    low = x.view(np.uint32) & 0xFFFF0000
    rest = (x.view(np.uint32) & 0xFFFF).astype(np.int64)
    up = (rest > 0x8000) | ((rest == 0x8000) & ((low >> 16) & 1 == 1))
    return np.where(np.isnan(x), 0x7FFF, (low.astype(np.int64) >> 16) + up).astype(np.uint32)


@pytest.mark.parametrize("kind", KINDS)
@np.errstate(all="ignore")
def test_conversions(kind: str, library: emulator.Library) -> None:
    data = floats(kind)
    x, y, z, bits = data[:, 0], data[:, 1], data[:, 2], data.view(np.uint32)[:, 0]
    got = run(library, "convert", data)
    assert np.array_equal(got[:, 0], bits << 16)
    same(got[:, 1], (bits & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32), 0x7FFFFFFF)
    assert np.array_equal(got[:, 2], bf16(x))
    same(got[:, 3], x.astype(np.float16), 0x7FFF)
    got = run(library, "pairs", data)
    assert np.array_equal(got[:, 0], bf16(x) | bf16(y) << 16)
    assert np.array_equal(got[:, 2], bf16(z) * np.uint32(0x10001))
    same(got[:, 1] & 0xFFFF, x.astype(np.float16), 0x7FFF)
    same(got[:, 1] >> 16, y.astype(np.float16), 0x7FFF)


def small_float(exponent: int, mantissa: int) -> np.ndarray:
    """Values of the 128 non-negative codes, NaN and infinity included."""
    out, bias = [], 2 ** (exponent - 1) - 1
    for code in range(128):
        e, m = code >> mantissa, code & (2**mantissa - 1)
        if (exponent == 4 and code == 127) or (exponent == 5 and e == 31):
            out.append(np.nan if m else np.inf)
        else:
            out.append((m / 2**mantissa + (e > 0)) * 2.0 ** (max(e, 1) - bias))
    return np.array(out)


@pytest.mark.parametrize(("column", "exponent", "mantissa"), [(0, 4, 3), (1, 5, 2)])
@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_fp8_takes_the_nearest_code_and_saturates(
    kind: str, column: int, exponent: int, mantissa: int, library: emulator.Library
) -> None:
    data = floats(kind)
    values = small_float(exponent, mantissa)
    finite = values[np.isfinite(values)]
    got = run(library, "fp8", data)[:, column]
    for x, code in ((data[:, 0], got & 0xFF), (data[:, 1], got >> 8 & 0xFF)):
        distance = np.abs(np.abs(x.astype(np.float64))[:, None] - finite[None, :])
        best = distance.min(axis=1)
        chosen = code & 0x7F
        assert np.array_equal(distance[np.arange(N), chosen], best)
        tied = (distance == best[:, None]).sum(axis=1) == 2
        assert (chosen[tied] % 2 == 0).all()
        assert np.array_equal(code >> 7 == 1, np.signbit(x))


def test_fp8_decoding_of_all_codes(library: emulator.Library) -> None:
    data = np.zeros((N, 4), np.uint32)
    data[:, 0] = np.arange(N) * 37 % 65536
    got = run(library, "fp8", data)
    for column, exponent, mantissa in ((2, 4, 3), (3, 5, 2)):
        table = small_float(exponent, mantissa)
        for shift in (0, 8):
            code = data[:, 0] >> shift & 0xFF
            want = (table[code & 0x7F] * np.where(code >> 7, -1.0, 1.0)).astype(np.float16)
            same(got[:, column] >> (2 * shift) & 0xFFFF, want, 0x7FFF)


@pytest.mark.parametrize("kind", ["ties", "bits"])
@np.errstate(all="ignore")
def test_packed_half(kind: str, library: emulator.Library) -> None:
    data = (
        floats(kind)
        if kind == "bits"
        else floats(kind).astype(np.float16).repeat(2, axis=1).copy().view(np.uint32)[:, :4]
    )
    halves = np.ascontiguousarray(data).view(np.float16).reshape(N, 4, 2)
    x, y, z = (halves[:, i, :].astype(np.float64) for i in range(3))
    got = run(library, "half", np.ascontiguousarray(data)).view(np.uint16).reshape(N, 4, 2)
    for i, want in enumerate((x + y, x - y, x * y, x * y + z)):  # exact or all but exact in double
        same(got[:, i].ravel(), want.astype(np.float16).ravel(), 0x7FFF)


def test_bit_tricks(library: emulator.Library) -> None:
    rng = np.random.default_rng(3)
    data = rng.integers(0, 2**32, (N, 4), dtype=np.uint32)
    data[:, 2] &= 0xFFFF
    x, y, z = data[:, 0], data[:, 1], data[:, 2]
    got = run(library, "bits", data)
    assert np.array_equal(got[:, 1], (x & y) | z)
    assert np.array_equal(got[:, 2], x ^ y ^ z)
    table = np.concatenate([x[:, None], y[:, None]], axis=1).view(np.uint8)
    for i in range(4):
        selector = z >> (4 * i) & 15
        byte = table[np.arange(N), selector & 7]
        want = np.where(selector & 8, np.where(byte & 128, 255, 0), byte)
        assert np.array_equal(got[:, 0] >> (8 * i) & 255, want)


def test_exp2_is_within_two_units(library: emulator.Library) -> None:
    data = np.zeros((N, 4), np.float32)
    data[:, 0] = np.linspace(-120, 120, N)
    got = run(library, "bits", data)[:, 3].view(np.float32)
    assert np.allclose(got, np.exp2(data[:, 0].astype(np.float64)), rtol=2.0**-22, atol=0)

"""A launch is held to its arch: instructions, shared memory, clusters, and the arithmetic of its tensor cores.

The arch each function needs is checked against NVRTC in tests/compile/test_hw.py; here that the launch refuses.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

import emulator
from emulator import layer

# function of the layer: (call, instruction, arch it needs, an arch that lacks it)
GATES = {
    "cp_async_16": ("cp_async_16(s, p.in, 16);", "cp.async", "sm_80", 75),
    "mma_bf16": (
        "float d[4] = {}; u32 a[4] = {}, b[2] = {}; mma_m16n8k16_bf16(d, a, b);",
        "mma.m16n8k16.bf16",
        "sm_80",
        75,
    ),
    "mma_f16_k16": (
        "float d[4] = {}; u32 a[4] = {}, b[2] = {}; mma_m16n8k16_f16(d, a, b);",
        "mma.m16n8k16.f16",
        "sm_80",
        75,
    ),
    "fma_bf16x2": ("fma_bf16x2(1, 2, 3);", "fma.bf16x2", "sm_80", 75),
    "add_bf16x2": ("add_bf16x2(1, 2);", "add.bf16x2", "sm_90", 89),
    "e4m3": ("cvt_e4m3x2_f32(1, 2);", "cvt.e4m3x2", "sm_89", 86),
    "mma_fp8": (
        "float d[4] = {}; u32 a[4] = {}, b[2] = {}; mma_m16n8k32_e4m3(d, a, b);",
        "mma.m16n8k32.e4m3",
        "sm_89",
        80,
    ),
    "try_wait": ("mbar_init(s, 1); mbar_try_wait(s, 1);", "mbarrier.try_wait", "sm_90", 89),
    "bulk": ("bulk_load(s, p.in, 16, s + 16);", "cp.async.bulk", "sm_90", 89),
    "griddep": ("griddep_wait();", "griddepcontrol.wait", "sm_90", 86),
    "cluster_relaxed": ("cluster_arrive_relaxed();", "barrier.cluster.arrive.relaxed", "sm_90", 89),
    "elect": ("elect_one();", "elect.sync", "sm_90", 80),
    "stmatrix": ("u32 r[4] = {}; stmatrix_x4(s, r);", "stmatrix", "sm_90", 89),
    "setmaxnreg": ("setmaxnreg_dec<40>();", "setmaxnreg", "sm_90", 89),
    "wgmma on sm_89": ("wgmma_fence();", "wgmma.fence", "exactly sm_90", 89),
    "wgmma on sm_100": ("wgmma_fence();", "wgmma.fence", "exactly sm_90", 100),
    "wgmma on sm_120": ("wgmma_fence();", "wgmma.fence", "exactly sm_90", 120),
}
HEAD = """#include "hw/hw.h"
using namespace hw;
struct Params { u8* in; u8* out; };
"""
# One fragment product per type: in: per lane a, b, c as in the golden cases; out: d
MMA = """HW_KERNEL(32) k(const HW_GRID_CONST Params p) {{
    const u8* q = p.in + lane_id() * 40;
    u32 a[4], b[2]; float d[4];
    for (int i = 0; i < 4; ++i) {{ a[i] = ld_global_u32(q + i * 4); d[i] = as_f32(ld_global_u32(q + 24 + i * 4)); }}
    for (int i = 0; i < 2; ++i) b[i] = ld_global_u32(q + 16 + i * 4);
    {0}(d, a, b);
    for (int i = 0; i < 4; ++i) st_global_u32(p.out + lane_id() * 16 + i * 4, as_u32(d[i]));
}}
"""
MMAS = ("mma_m16n8k16_f16", "mma_m16n8k16_bf16", "mma_m16n8k32_e4m3")


def gate_source(name: str) -> emulator.KernelText:
    body = f"const u32 s = smem_base(); (void)s; {GATES[name][0]}"
    return emulator.KernelText(
        f"{HEAD}HW_KERNEL(32) k(const HW_GRID_CONST Params p) {{ {body} }}\n", "k", "sm_90a", name
    )


@pytest.fixture(scope="module")
def library() -> emulator.Library:
    sources = [gate_source(n) for n in GATES]
    sources += [emulator.KernelText(HEAD + MMA.format(f), "k", "sm_90a", f) for f in MMAS]
    sources += [
        emulator.KernelText(
            HEAD + "HW_KERNEL(256) k(const HW_GRID_CONST Params p) { syncthreads(); }\n", "k", "sm_75", "idle"
        )
    ]
    return emulator.build(sources)


@pytest.mark.parametrize("name", GATES, ids=lambda n: n.replace(" ", "_"))
def test_newer_instruction_is_refused_with_its_name(
    name: str, library: emulator.Library, memory: emulator.Memory
) -> None:
    _, instruction, needs, arch = GATES[name]
    params = struct.pack("<QQ", memory.alloc("in", bytes(1024)), memory.alloc("out", 1024))
    with pytest.raises(emulator.EmulatorFault) as e:
        library.launch(name, params, grid=1, block=32, smem=1024, arch=arch)
    assert f"{instruction} needs {needs}, this launch is for sm_{arch}" in str(e.value)
    assert f"{name.replace(' ', '_')}.cu:4" in str(e.value)


def test_every_gated_instruction_stands_in_the_layer() -> None:
    assert {f.needs for f in layer.functions(layer.TWINS)} == {0, 75, 80, 89, 90}


LIMITS = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}


@pytest.mark.parametrize("arch", LIMITS)
def test_shared_memory_limit(arch: int, library: emulator.Library) -> None:
    most = LIMITS[arch] * 1024
    library.launch("idle", bytes(16), grid=1, block=64, smem=most, arch=arch)
    with pytest.raises(
        emulator.EmulatorFault, match=f"{most + 16} bytes of shared memory, sm_{arch} has {most} per block"
    ):
        library.launch("idle", bytes(16), grid=1, block=64, smem=most + 16, arch=arch)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("clusters need sm_90, this is sm_80", {"cluster": 2, "arch": 80}),
        ("grid x = 3 is no multiple of the cluster size 2", {"grid": 3, "cluster": 2, "arch": 90}),
        ("cluster of 16, at most 8", {"grid": 16, "cluster": 16, "arch": 90}),
        ("no profile for arch 70", {"arch": 70}),
        ("must be positive", {"grid": 0}),
        ("exceeds 65535 in y or z", {"grid": (1, 65536, 1)}),
        ("320 threads, but the kernel is HW_KERNEL(256)", {"block": 320}),
    ],
)
def test_launch_limits(words: str, change: dict[str, object], library: emulator.Library) -> None:
    with pytest.raises(emulator.EmulatorFault) as e:
        library.launch("idle", bytes(16), **{"grid": 2, "block": 64, "arch": 80, **change})
    assert words in str(e.value)


@pytest.mark.parametrize(("given", "number"), [(90, 90), ("90", 90), ("sm_90a", 90), ("sm_120f", 120), ("sm_75", 75)])
def test_arch_names(given: int | str, number: int) -> None:
    assert emulator.arch_number(given) == number


def test_unknown_arch_names() -> None:
    with pytest.raises(ValueError, match="hopper"):
        emulator.arch_number("hopper")
    with pytest.raises(ValueError, match="no profile for arch 70"):
        emulator.profile(70)


def test_only_sm_90_claims_golden_data() -> None:
    assert [a for a in LIMITS if emulator.profile(a)["basis"] == "golden"] == [90]
    assert {emulator.profile(a)["basis"] for a in LIMITS} == {"golden", "published", "assumed"}


def product(
    library: emulator.Library, kernel: str, arch: int, a: np.ndarray, b: np.ndarray, c: np.ndarray
) -> np.ndarray:
    """d = a (16 x row bytes) * b (8 x row bytes) + c (16 x 8 float32) by one mma."""
    words_a, words_b = a.view(np.uint32), b.view(np.uint32)
    lane = np.zeros((32, 10), np.uint32)
    for t in range(32):
        for j in range(4):
            lane[t, j] = words_a[t // 4 + 8 * (j & 1), t % 4 + 4 * (j >> 1)]
            lane[t, 6 + j] = c.view(np.uint32)[t // 4 + 8 * (j >> 1), 2 * (t % 4) + (j & 1)]
        for j in range(2):
            lane[t, 4 + j] = words_b[t // 4, t % 4 + 4 * j]
    with emulator.Memory() as memory:
        out = memory.alloc("out", 512, output=True)
        library.launch(
            kernel, struct.pack("<QQ", memory.alloc("in", lane, read_only=True), out), grid=1, block=32, arch=arch
        )
        d = memory.array(out, (32, 4), np.float32)
    full = np.zeros((16, 8), np.float32)
    for t in range(32):
        for j in range(4):
            full[t // 4 + 8 * (j >> 1), 2 * (t % 4) + (j & 1)] = d[t, j]
    return full


def sum_of(terms: list[float], kernel: str, arch: int, library: emulator.Library, start: float = 0) -> float:
    """start + the sum of up to 16 products of f16, as element (0, 0) of one mma."""
    a, b, c = np.zeros((16, 16), np.float16), np.zeros((8, 16), np.float16), np.zeros((16, 8), np.float32)
    a[0, : len(terms)] = terms
    b[0, :] = 1
    c[0, 0] = start
    return float(product(library, kernel, arch, a, b, c)[0, 0])


@pytest.mark.parametrize(("arch", "fraction"), [(80, 24), (86, 24), (90, 25), (100, 25), (120, 25)])
def test_terms_are_cut_at_the_profiles_fraction(arch: int, fraction: int, library: emulator.Library) -> None:
    """Terms of 2^-fraction of the largest survive and add up to the result's last place; half that size is lost."""
    tiny = 2.0**-24  # the least f16
    big = 2.0 ** (fraction - 24)
    terms = [tiny] * 2 ** (fraction - 23)
    assert sum_of(terms, MMAS[0], arch, library, start=big) == big * (1 + 2.0**-23)
    assert sum_of(terms, MMAS[0], arch, library, start=2 * big) == 2 * big
    assert sum_of(terms[1:], MMAS[0], arch, library, start=big) == big


def test_blocks_of_a_product_differ_by_arch(library: emulator.Library) -> None:
    """Cancelling terms 8 apart: one sum over 16 keeps the small term, two sums over 8 round it away in between."""
    terms = [0.0] * 16
    terms[0], terms[1], terms[8] = 2.0**15, 2.0**-9, -(2.0**15)
    assert sum_of(terms, MMAS[0], 90, library) == 2.0**-9
    assert sum_of(terms, MMAS[0], 80, library) == 0


@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_exact_sums_agree_everywhere(arch: int, library: emulator.Library) -> None:
    rng = np.random.default_rng(arch)
    a, b = rng.integers(-8, 9, (16, 16)).astype(np.float16), rng.integers(-8, 9, (8, 16)).astype(np.float16)
    c = rng.integers(-100, 100, (16, 8)).astype(np.float32)
    want = a.astype(np.float32) @ b.astype(np.float32).T + c
    assert np.array_equal(product(library, MMAS[0], arch, a, b, c), want)
    up = lambda x: (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)  # noqa: E731
    assert np.array_equal(product(library, MMAS[1], arch, up(a), up(b), c), want)


def test_fp8_keeps_13_bits_on_ada_and_25_on_hoppers_split_path(library: emulator.Library) -> None:
    a, b, c = np.zeros((16, 32), np.uint8), np.zeros((8, 32), np.uint8), np.zeros((16, 8), np.float32)
    a[0, 0], a[0, 1], b[0, 0], b[0, 1] = 0x78, 0x08, 0x38, 0x38  # 256 * 1 + 2^-6 * 1
    assert product(library, MMAS[2], 90, a, b, c)[0, 0] == 256 + 2.0**-6
    assert product(library, MMAS[2], 89, a, b, c)[0, 0] == 256


def test_overflow_between_two_sums_stays_infinite(library: emulator.Library) -> None:
    a, b, c = np.zeros((16, 16), np.uint16), np.zeros((8, 16), np.uint16), np.zeros((16, 8), np.float32)
    a[0, 0], a[0, 8], b[0, 0], b[0, 8] = 0x7F00, 0xFF00, 0x7F00, 0x7F00  # bf16 2^127 squared, then minus that
    assert product(library, MMAS[1], 80, a, b, c)[0, 0] == np.inf
    assert product(library, MMAS[1], 90, a, b, c)[0, 0] == 0  # one sum: exact

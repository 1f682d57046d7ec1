"""The products worth trying, each a value named for the risk it covers: one list for every test that runs kernels.

Knows shapes, formats and plans; it must not know who runs a case, or what may come out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from lowbit.arch import ARCHS, Arch
from lowbit.plan.plan import FAMILIES, WGMMA_FAMILIES, Plan, has_wgmma
from lowbit.problem import ACTIVATIONS, Problem, unsupported
from lowbit.weights import WeightSpec

INTEGERS = tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 9))
ZERO_POINTS = tuple(f"{name}{zero}" for name in INTEGERS for zero in ("z", "zf"))
FLOATS = tuple(f"fp{bits}_e{bits - 1 - m}m{m}" for bits in range(3, 9) for m in range(bits - 1))
BLOCK_FLOATS = ("mxfp4", "mxfp6", "mxfp8", "mxint8", "nvfp4")
SIXTEEN = "hex(-1.5,0.25,7.0,-0.0625,12.0,-3.25,0.5,-9.0,-0.125,3.0,-6.5,0.0,1.625,-0.75,10.0,-2.0)"
"""Every bit of a bf16 pattern is 0 and 1 for entries of the same and of another half."""
CODEBOOKS = (
    *("nf4", "two(-1.5,0.3)", "three(-1.0,0.1,1.0)", "four(3.0,-0.25,0.0,-2.0)", "six(-1.0,7.0,0.5,-3.0,0.0,1.25)"),
    *("eight(0.1,-0.2,0.3,-0.4,0.5,-0.6,0.7,-0.8)", "eleven(-1.5,0.25,7.0,-0.0625,12.0,-3.25,0.5,-9.0,-0.125,3.0,0.0)", SIXTEEN),
)
SCALES = ("fp32", "bf16", "fp16", "e8m0", "e4m3", "e5m2", "ue5m3")
GROUPS = ("t", "c", "g16", "g32", "g64", "g128", "g256", "b128x128")
"""Everything that weights may be: what a row of the support table and a sweep over all formats are made of."""
SWEPT = (*INTEGERS, *ZERO_POINTS, *FLOATS, *BLOCK_FLOATS, *CODEBOOKS)
"""Values that `sweep` gives all scales and granularities; formats that have theirs in their names are swept as they are."""

FORMATS = ("int4_g128", "int4_g32", "int8", "fp8_e4m3", "mxfp4", "nvfp4", "nf4")
"""What most layers use: integers, floats and a codebook of 4 and 8 bits, with every kind of scale."""

MORE_FORMATS = {
    "group of one MMA step": "int4_g16",
    "group of half a unit": "int4_g64",
    "group of two units": "int4_g256",
    "one group, K": "int4",
    "8-bit groups": "int8_g128",
    "float groups": "fp8_e4m3_g64",
    "one scale a tensor": "fp8_e4m3_t",
    "scales of blocks of rows": "fp8_e4m3_b128x128",
    "blocks smaller than a warp's rows": "int8_b32x64",
    "fp16 scales": "int4_g128_fp16",
    "fp32 scales": "int4_g64_fp32",
    "e4m3 scales without a second level": "fp4_e2m1_g16_e4m3_s2n",
    "power-of-two scales over a channel scale": "int4_g128_e8m0",
    "8-bit floats, power-of-two scales": "mxfp8",
    "codebook of 16 values, channel scales": "nf4_c",
}


@dataclass(frozen=True)
class Pick:
    """One point of the product of all formats, chips, kernel families and activations."""

    spec: str
    arch: Arch
    family: str
    act: str
    out: str  # the activation's type where every weight fits it, else fp32


def sweep(everything: bool) -> Iterator[Pick]:
    """Every value format on every chip in every family with every activation that there is; scales and granularities take turns, so
    that every pair of two dimensions occurs. Else a thinned one: every format in every family on one chip each, all chips in turn.
    """
    for (i, value), (f, family) in product(enumerate(SWEPT), enumerate(FAMILIES)):
        archs = [arch for arch in ARCHS.values() if family not in WGMMA_FAMILIES or by_wgmma(value, arch)]
        if not archs:
            continue
        points = list(product(archs, ACTIVATIONS)) if everything else [(archs[(2 * i + f + i // 6) % len(archs)], ACTIVATIONS[i % 2])]
        j = 0
        for arch, act in points:
            group, scale = GROUPS[(i + 3 * f + j) % len(GROUPS)], SCALES[(2 * i + f + j) % len(SCALES)]
            spec = value if value in BLOCK_FLOATS else f"{value}_{group}_{scale}"
            acts = [a for a in (act, *ACTIVATIONS) if not unsupported(WeightSpec.parse(spec), a, arch)]
            if act in acts or not everything:
                act = acts[0]  # the other one where the chip or the format leaves no choice
                yield Pick(spec, arch, family, act, act if (i // 2 + j) % 2 and _fits_outputs(spec) else "fp32")
                j += 1


def by_wgmma(value: str, arch: Arch) -> bool:
    """WGMMA_FAMILIES exist for weights of that value format, or spec."""
    return has_wgmma(Problem(WeightSpec.parse(value), "bf16", "bf16", 64, 256, arch))


def _fits_outputs(name: str) -> bool:
    """Weights keep to bf16's 8 bits and fp16's range, also times scales of up to 2^7."""
    spec = WeightSpec.parse(name)
    return spec.value.bits < 8 - 2 * (spec.zero == "float") and spec.value.max < 512


@dataclass(frozen=True)
class Case:
    """One layer, the numbers of tokens to try it with, and what could go wrong in it."""

    name: str
    spec: str
    n: int
    k: int
    ms: tuple[int, ...]
    act: str = "bf16"
    bias: bool = False
    plan: Plan | None = None  # None: whatever the library chooses
    gap: int = 0  # 16-byte vectors between the rows of x: a view of a wider tensor

    def problem(self, arch: Arch) -> Problem:
        """What a kernel computes for it: k rounded up to 8."""
        return Problem(WeightSpec.parse(self.spec), self.act, self.act, self.n, -(-self.k // 8) * 8, arch)

    def __str__(self) -> str:
        return f"{self.name}: {self.spec} {self.n}x{self.k}"


def cases(arch: Arch) -> Iterator[Case]:
    """Every case for a chip; operands are bf16 where it has them, fp16 elsewhere."""
    act = "bf16" if arch.bf16 else "fp16"
    yield from _shapes(act)
    yield from _formats(act)
    yield from _plans(arch, act)


def _shapes(act: str) -> Iterator[Case]:
    tokens = (1, 7, 8, 9, 33)  # below, at and above a token tile, and several of them
    for spec in ("int4_g128", "int8"):
        yield Case("exact tiles", spec, 256, 512, tokens, act)
        yield Case("K ends within a unit, many blocks", spec, 32, 2880, (1, 9), act)
        yield Case("K ends in the first MMA step of a unit", spec, 64, 136, tokens, act)
        yield Case("K shorter than a unit", spec, 64, 104, (1, 9), act)
        yield Case("K no multiple of 8", spec, 48, 133, (1, 9), act)
        yield Case("N ends within a block of 64 rows", spec, 40, 256, tokens, act, bias=True)
        yield Case("N of four and a half panels", spec, 576, 128, (1, 33), act)
        yield Case("N one block beyond whole panels", spec, 1040, 128, (1, 9), act)
        yield Case("N odd", spec, 37, 128, (1, 9), act, bias=True)
        yield Case("one block of rows", spec, 16, 384, tokens, act)
        yield Case("one row", spec, 1, 128, (1, 2), act)
        yield Case("x is a view of a wider tensor", spec, 64, 256, (1, 9, 70), act, gap=3)
        yield Case("tokens beyond the stream tiles", spec, 128, 256, (63, 64, 65, 129), act)


def _formats(act: str) -> Iterator[Case]:
    for spec in FORMATS:
        yield Case("format", spec, 80, 640, (1, 9, 70), act, bias=True)
        if act != "fp16":
            yield Case("format, fp16 operands", spec, 80, 384, (1, 70), "fp16")
    for name, spec in MORE_FORMATS.items():
        yield Case(name, spec, 144, 384, (1, 9), act)
    yield Case("group longer than K", "int4_g256", 32, 128, (1,), act)
    yield Case("group ends within the last unit", "int4_g32", 32, 336, (1, 9), act)
    for spec in ("four(-3.0,-1.1,0.7,2.2)_g32", "nine(-4.0,-3.0,-2.0,-1.0,-0.6,0.6,1.0,2.0,3.0)"):
        yield Case("padding of a codebook without zero", spec, 37, 100, (1, 9), act)
    yield Case("blocks end within the matrix", "fp8_e4m3_b128x128", 192, 320, (1, 9), act)


def _plans(arch: Arch, act: str) -> Iterator[Case]:
    chunks = 4 if arch.bulk else 1
    plans = {
        "the smallest plan": Plan("stream", 8, 1, 1, stages=2),
        "fewer tokens than an MMA": Plan("stream", 1, 1, 2, stages=2),
        "ragged rows: three warps": Plan("stream", 8, 1, 3, stages=2),
        "warps without rows in the last tile": Plan("stream", 8, 2, 5, stages=2),
        "k cut between warps, unevenly": Plan("stream", 16, 1, 2, k_warps=4, stages=2, x_chunks=chunks),
        "k warps without work": Plan("stream", 8, 1, 1, k_warps=8, stages=2),
        "k warps in slices": Plan("stream", 8, 1, 2, k_warps=6, stages=2, slices=3, x_chunks=chunks),
        "more stages than k blocks": Plan("stream", 8, 1, 4, stages=12),
        "two blocks an SM": Plan("stream", 8, 1, 4, stages=3, blocks_per_sm=2),
        "several row blocks a warp": Plan("stream", 16, 4, 1, stages=2),
        "tile of the smallest plan": Plan("tile_mma", 32, 1, 2, token_warps=2, stages=2),
        "one token warp": Plan("tile_mma", 16, 1, 4, token_warps=1, stages=2),
        "tile of a whole panel": Plan("tile_mma", 64, 2, 4, token_warps=2, stages=2),
        "an odd number of token tiles": Plan("tile_mma", 24, 1, 4, stages=2),
        "one token tile": Plan("tile_mma", 8, 2, 2, stages=2),
    }
    if arch.wgmma:
        plans |= {
            "one warpgroup": Plan("stream_wgmma", 8, 1, 4, stages=2),
            "warpgroups cut k, unevenly": Plan("stream_wgmma", 16, 2, 4, k_warps=4, stages=2),
            "warpgroups without rows in the last tile": Plan("stream_wgmma", 8, 1, 8, k_warps=2, stages=2),
            "more wgmma stages than k blocks": Plan("stream_wgmma", 24, 1, 4, k_warps=2, stages=6),
            "many tokens, one wgmma": Plan("stream_wgmma", 64, 1, 4, stages=3),
            "three warpgroups of rows": Plan("stream_wgmma", 8, 1, 12, split=2, stages=3),
            "cluster of warpgroups": Plan("stream_wgmma", 32, 2, 4, k_warps=2, split=4, stages=3),
            "cluster of three, five warpgroups of rows": Plan("stream_wgmma", 8, 1, 20, split=3, stages=2),
        }
        for stages in (2, 3, 4):
            plans[f"warpgroup ring of {stages} stages wraps"] = Plan("stream_wgmma", 8, 2, 4, stages=stages)
            plans[f"producer's ring of {stages} stages wraps"] = Plan("tile_wgmma", 16, 1, 8, stages=stages)
        plans |= {
            "one consumer": Plan("tile_wgmma", 8, 1, 4, stages=2),
            "more stages than a tile has k blocks": Plan("tile_wgmma", 16, 1, 4, stages=12),
            "scales in operands that round, or not": Plan("tile_wgmma", 64, 1, 4, stages=2),
            "consumers without rows": Plan("tile_wgmma", 32, 2, 8, stages=2),
            "cluster of tiles cuts k, unevenly": Plan("tile_wgmma", 16, 1, 8, split=2, stages=3),
            "cluster of three tiles": Plan("tile_wgmma", 16, 2, 4, split=3, stages=4),
        }
    for stages in (2, 3, 4, 5):
        plans[f"ring of {stages} stages wraps"] = Plan("stream", 8, 1, 2, stages=stages)
    for stages in (2, 3, 4):
        plans[f"block ring of {stages} stages wraps"] = Plan("tile_mma", 32, 1, 2, token_warps=2, stages=stages)
    if arch.clusters:
        for split in (2, 3, 4, 5, 8):  # 3 and 5 do not divide the 8 row quads
            plans[f"cluster of {split} cuts k"] = Plan("stream", 8, 1, 2, split=split, stages=2, x_chunks=chunks)
        plans["more sums than threads, uneven cluster"] = Plan("stream", 24, 1, 2, split=3, stages=4)
        plans["slices in a cluster"] = Plan("stream", 1, 1, 2, k_warps=4, split=2, stages=2, slices=2)
        plans["cluster, k warps and ragged rows"] = Plan(
            "stream", 8, 2, 3, k_warps=2, split=2, stages=3, x_chunks=chunks
        )
    for name, plan in plans.items():
        for spec in ("int4_g128", "nvfp4", "int8"):
            # nine blocks of 128 wrap every ring above, and leave cut k uneven
            yield Case(name, spec, 104, 1144, (1, plan.tokens + 1), act, bias=plan.split > 1, plan=plan)
    panels = Plan("tile_mma", 64, 4, 4, stages=2) if act == "bf16" else Plan("tile_mma", 32, 2, 8, stages=2)  # bf16: scales in operands that round
    specs = (("int4_g128", 216), ("nvfp4", 296), ("int8", 392), ("uint4z_g32_bf16", 216), ("int8_g64_e4m3", 56), ("nf4_g64_bf16", 216))
    for spec, n in (*specs, ("int4_g64_e8m0", 216)):
        yield Case("tile of two panels", spec, n, 408, (1, panels.tokens + 1), act, plan=panels)

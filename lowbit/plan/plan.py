"""How a problem is computed: the Plan value, its shared-memory map, and the one predicate that says whether it is legal.

Knows tiles, warps and limits of a chip; it must not know how fast anything is (cost.py) or how kernels are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.arch import Arch
from lowbit.layout.pack import PANEL_BLOCKS, Layout
from lowbit.problem import Problem, merges, product_rounding

FAMILIES = ("stream", "stream_wgmma", "tile_mma", "tile_wgmma")
WGMMA_FAMILIES = ("stream_wgmma", "tile_wgmma")
MAX_CLUSTER = 8  # portable limit
WGMMA_TOKENS = (8, 16, 24, 32, 48, 64)
TILE_TOKENS = (8, 16, 32, 64, 128, 192, 256)  # of tile_wgmma
X_BOX_BYTES = 128  # wgmma families: k of one tensor copy of x
PRODUCER_WARPS = 4  # tile_wgmma: a warpgroup, since registers are given to whole ones
PRODUCER_REGISTERS = 40
MOST_INT8_K = 131072  # 128 * 127 * k < 2^31
RESERVED_SMEM = 1024  # bytes the driver takes of a block's shared memory


@dataclass(frozen=True)
class Plan:
    """Kernel family and tile of one kernel. `tokens` is the largest number a block takes; grids cover any M."""

    family: str
    tokens: int  # per block: 1..8, 16, 24, 32, ... (stream), WGMMA_TOKENS, multiples of 8 up to 256 (tile_mma), TILE_TOKENS
    warp_blocks: int  # row blocks of 16 per warp: 1, 2, 4, 8
    row_warps: int
    k_warps: int = 1  # stream, stream_wgmma: warps (warpgroups) that share the rows and cut k
    token_warps: int = 1  # tile_mma: warps that share the rows and cut tokens
    split: int = 1  # all but tile_mma: blocks of a cluster that cut k once more
    stages: int = 3  # 128-k stages in flight: per warp (stream), warpgroup (stream_wgmma), block (tile_mma, tile_wgmma)
    x_chunks: int = 1  # stream: pieces in which x arrives
    blocks_per_sm: int = 1  # the compiler leaves registers for so many
    slices: int = 1  # stream: k_warps share so many slices of k, each as a block of a cluster has one, and add in that order

    @property
    def warps(self) -> int:
        """That multiply."""
        return self.row_warps * self.k_warps * self.token_warps

    @property
    def threads(self) -> int:
        return 32 * (self.warps + (PRODUCER_WARPS if self.family == "tile_wgmma" else 0))

    @property
    def tile_rows(self) -> int:
        return 16 * self.row_warps * self.warp_blocks

    @property
    def cut(self) -> tuple[int, int]:
        """Parts of a slice of k, and slices. It alone decides the order of sums: k by k in a part, then part by part, in every family."""
        return self.k_warps // self.slices, self.split * self.slices

    def __str__(self) -> str:
        name = f"{self.family} {self.tile_rows}x{self.tokens} warps {self.row_warps}x{self.k_warps * self.token_warps}"
        cut = f"split {self.split}" + (f" slices {self.slices}" if self.slices > 1 else "")
        return f"{name} {cut} stages {self.stages} blocks/SM {self.blocks_per_sm}"


@dataclass(frozen=True)
class SmemMap:
    """Byte offsets of a block's shared memory; emitted as constants and checked by static_assert in the kernels."""

    stage: int  # of one warp (stream), warpgroup (stream_wgmma) or block (tile_mma, tile_wgmma)
    x: int
    bars: int
    total: int


def smem_map(problem: Problem, plan: Plan) -> SmemMap:
    layout = layout_of(problem)
    if plan.family == "stream":
        stage = plan.warp_blocks * layout.unit_bytes
        x = plan.warps * plan.stages * stage
        slice_blocks = -(-layout.k_blocks // plan.split)
        bars = x + plan.tokens * (slice_blocks * 256 + 16)
        return SmemMap(stage, x, bars, bars + 8 * (plan.x_chunks + plan.warps * plan.stages))
    if plan.family == "stream_wgmma":
        stage = 4 * plan.warp_blocks * layout.unit_bytes + plan.tokens * 256
        ring = -(-plan.stages * stage // 1024) * 1024  # tensor copies are swizzled by address
        groups = plan.warps // 4
        return SmemMap(stage, 0, groups * ring, groups * (ring + 8 * plan.stages))
    stage = plan.tile_rows // 16 * layout.unit_bytes + plan.tokens * 16 * problem.operand_bits
    ring = stage * plan.stages
    if plan.family == "tile_wgmma":
        bars = ring + plan.row_warps * 8 * (plan.warp_blocks * 16 + 4) * 4  # eight tokens of each warp's rows, on their way out
        return SmemMap(stage, 0, bars, bars + 16 * plan.stages)
    return SmemMap(stage, 0, ring, max(ring, plan.tokens * (plan.tile_rows + 4) * 4))


@dataclass(frozen=True)
class Geometry:
    """The launch of one call: blocks along x (rows, cluster by cluster) and y (tokens), threads and bytes of a block."""

    grid_x: int
    grid_y: int
    block: int
    smem: int
    cluster: int


def launch_geometry(problem: Problem, plan: Plan, m: int) -> Geometry:
    """How `plan` is launched for `m` tokens, on a device and in the emulator alike."""
    blocks, most = blocks_of(problem, plan)
    token_tiles = -(-m // plan.tokens)
    grid = (min(blocks * token_tiles, most), 1) if most else (blocks, token_tiles)
    return Geometry(*grid, plan.threads, smem_map(problem, plan).total, plan.split)


def blocks_of(problem: Problem, plan: Plan) -> tuple[int, int]:
    """Blocks for every tile of tokens, and how many there are at most where blocks stay and go through tiles by turns, else 0."""
    blocks = -(-problem.n // plan.tile_rows) * plan.split
    return blocks, problem.arch.sms * plan.blocks_per_sm if plan.family == "tile_wgmma" and plan.split == 1 else 0


def x_box_k(problem: Problem) -> int:
    """Columns of one tensor copy of x."""
    return X_BOX_BYTES * 8 // problem.operand_bits


def layout_of(problem: Problem) -> Layout:
    return Layout(problem.spec, problem.n, problem.k, problem.operand_bits)


def folds(problem: Problem, plan: Plan) -> bool:
    """Group scales multiply the operands: at no cost, or four FMAs per 16 k against tokens / 2 per group on the sums.

    For all numbers of tokens alike where bits must not depend on it.
    """
    step = layout_of(problem).step
    tokens = 32 if problem.batch_invariant else plan.tokens // plan.token_warps
    exact = step > 0 and problem.folds and (fold_is_free(problem) or step < 2 * tokens)
    return exact or rounds(problem, plan)


def fold_is_free(problem: Problem) -> bool:
    """Scales in the operands join a factor that conversion multiplies with anyway."""
    return merges(problem.spec.value, problem.spec.scale)


def rounds(problem: Problem, plan: Plan) -> bool:
    """Group scales multiply the operands although that rounds products to bf16: where tokens are many and group sums cost a larger tile.

    376 and 411 TFLOP/s without and with it (tile_mma, int4_g128, 8192x8192, M = 8192, H200). Never where bits must not depend on M.
    """
    spec = problem.spec
    if plan.family not in ("tile_mma", "tile_wgmma") or plan.tokens < 64 * plan.token_warps or problem.batch_invariant or problem.act != "bf16":
        return False
    if not layout_of(problem).grouped or spec.zero == "float" or (spec.zero == "int" and spec.scale.name != "bf16"):
        return False
    return bool(product_rounding(spec.value, spec.scale, problem.act))


def has_wgmma(problem: Problem) -> bool:
    """stream_wgmma and tile_wgmma exist for it: on Hopper, for all but float zero points."""
    return problem.arch.wgmma and problem.spec.zero != "float"


def mover(arch: Arch, family: str) -> str:
    """How bytes travel to shared memory: the name of a `Mover` in ring.cuh."""
    if arch.bulk and family != "tile_mma":
        return "kBulk"
    return "kCpAsync" if arch.cp_async else "kPlain"


def illegal(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """Why `plan` cannot compute `problem`, one reason each; () if it can. The only judge of legality."""
    arch = problem.arch
    reasons = list(problem.obstacles)
    if reasons:
        return tuple(reasons)
    if plan.family not in FAMILIES:
        return (f"family {plan.family!r} is none of {', '.join(FAMILIES)}",)
    if plan.family in WGMMA_FAMILIES and not arch.wgmma:
        return (f"{plan.family} multiplies by wgmma, which only Hopper (sm_90a) has; {arch.name} has none",)
    for name in (
        "tokens",
        "warp_blocks",
        "row_warps",
        "k_warps",
        "token_warps",
        "split",
        "stages",
        "x_chunks",
        "blocks_per_sm",
        "slices",
    ):
        if getattr(plan, name) < 1:
            return (f"{name} must be at least 1; got {getattr(plan, name)}",)
    if problem.operand_bits == 8 and plan.family != "tile_wgmma":
        reasons.append(f"{plan.family} multiplies 16-bit activations; {problem.act} ones are for tile_wgmma")
    if problem.k * problem.operand_bits % 128:
        reasons.append(
            f"rows of x must be multiples of 16 bytes: k must be a multiple of {128 // problem.operand_bits}; got {problem.k} (pad x and the weights)"
        )
    if PANEL_BLOCKS % plan.warp_blocks:
        reasons.append(f"warp_blocks must divide {PANEL_BLOCKS}; got {plan.warp_blocks}")
    if plan.threads > 1024:
        reasons.append(f"a block has at most 1024 threads; {plan.threads // 32} warps make {plan.threads}")
    if plan.threads * plan.blocks_per_sm > arch.threads_per_sm:
        reasons.append(
            f"{plan.blocks_per_sm} blocks of {plan.threads} threads exceed {arch.threads_per_sm} threads per SM"
        )
    token_step = 8 * plan.token_warps
    if (plan.tokens % token_step and not (plan.family == "stream" and plan.tokens < 8)) or plan.tokens > 256:
        reasons.append(
            f"tokens must be a multiple of {token_step} and at most 256, or (stream) below 8; got {plan.tokens}"
        )
    if plan.family == "tile_mma":
        reasons += _illegal_tile(plan)
    else:
        reasons += _illegal_cut(problem, plan)
        reasons += _ILLEGAL[plan.family](problem, plan)
    registers, limit = least_registers(problem, plan), register_limit(plan)
    if registers > limit:
        reasons.append(
            f"about {registers} registers a thread are needed, {limit} are there with {plan.threads} threads x {plan.blocks_per_sm} blocks"
        )
    total = smem_map(problem, plan).total
    if total > arch.smem_per_block:
        reasons.append(f"{total} bytes of shared memory exceed {arch.smem_per_block} per block on {arch.name}")
    elif (total + RESERVED_SMEM) * plan.blocks_per_sm > arch.smem_per_sm:
        reasons.append(
            f"{plan.blocks_per_sm} blocks of {total} bytes of shared memory exceed {arch.smem_per_sm} per SM on {arch.name}"
        )
    return tuple(reasons)


def register_limit(plan: Plan) -> int:
    """Registers a thread can have: each of an SM's four sub-cores has 16384, given to warps in units of 8 per thread."""
    warps = -(-(plan.threads // 32) * plan.blocks_per_sm // 4)
    at_launch = min(255, 16384 // (32 * warps) // 8 * 8)
    if not moves_registers(plan):
        return at_launch
    return min(232, (at_launch * plan.threads // 32 - PRODUCER_WARPS * PRODUCER_REGISTERS) // plan.warps // 8 * 8)


def moves_registers(plan: Plan) -> bool:
    """The producer gives registers back, the consumers take them: where there are too few for all alike."""
    return plan.family == "tile_wgmma" and plan.threads * plan.blocks_per_sm > 256


def natural_registers(problem: Problem, plan: Plan) -> int:
    """About what the compiler takes where it may: with several groups in a unit it keeps all their scales alive."""
    if plan.family in WGMMA_FAMILIES:
        return least_registers(problem, plan)
    return least_registers(problem, plan) * (29 if layout_of(problem).steps > 1 else 20) // 20


def least_registers(problem: Problem, plan: Plan) -> int:
    """About what a thread needs, so that nothing spills: fitted to compile reports of all formats."""
    layout = layout_of(problem)
    token_tiles = -(-plan.tokens // (8 * plan.token_warps))
    tiles = token_tiles * plan.warp_blocks
    sums = 2 if layout.grouped and not folds(problem, plan) else 1  # accumulators, and partial sums of a group
    scale_words = -(-layout.scale_bytes // 32) * plan.warp_blocks  # of a lane: rows g and g + 8
    several = 0  # where a unit has several groups, the compiler keeps more alive at once
    if layout.steps > 1 and not (plan.family == "tile_mma" and sums == 1):
        several = 6 * tiles if tiles >= 8 else 3 * tiles + 20 if tiles >= 4 else 8 if tiles >= 2 else 0
    zeros = {
        "none": 0,
        "int": 3 * plan.warp_blocks,
        "float": 4 * token_tiles + 2 * plan.warp_blocks + (max(8, 6 * tiles) if layout.steps > 1 else 0),
    }[problem.spec.zero]
    if problem.spec.zero == "float" and plan.family == "tile_mma" and layout.steps == 8 and tiles >= 4:
        zeros += 80  # all loads of a unit's zero points are hoisted (sm_120a)
    words = 4 * (problem.spec.value.bits.bit_count() - 1) * plan.warp_blocks  # beyond one vector, and codes in pieces
    words += 8 if problem.spec.value.kind == "codebook" else 0  # the bytes of 16 entries
    if plan.family in WGMMA_FAMILIES:  # fragments of two vectors; the sums of all groups of a vector are alive at once
        vector = 32 if problem.spec.value.bits == 8 else 64
        parts = 4 * tiles * max(1, vector // layout.step) if sums == 2 else 0
        if plan.family == "tile_wgmma":  # those of one row block after the other; fp8 sums move even without groups
            parts = parts // plan.warp_blocks or (4 * token_tiles if problem.act == "fp8" else 0)
        at_once = 1 if plan.family == "tile_wgmma" and parts else plan.warp_blocks  # row blocks whose codes are in registers
        fragments = 22 + 28 * at_once if layout.grouped else 30 + 12 * at_once
        if problem.operand_bits == 8:
            fragments = 24 + 12 * at_once  # half as many steps
        factors = 8 if folds(problem, plan) else 0
        return 4 * tiles + parts + zeros + fragments + factors + words // 2
    return 4 * tiles * sums + zeros + words + 5 * token_tiles + 4 * plan.warp_blocks + scale_words + several + 40


def _illegal_cut(problem: Problem, plan: Plan) -> list[str]:
    """Of k, between warps and the blocks of a cluster."""
    reasons = []
    layout = layout_of(problem)
    if plan.token_warps != 1:
        reasons.append(f"{plan.family} has no token warps")
    if plan.split > MAX_CLUSTER or (plan.split > 1 and not problem.arch.clusters):
        reasons.append(
            f"split {plan.split} needs a cluster of as many blocks; {problem.arch.name} allows {MAX_CLUSTER if problem.arch.clusters else 1}"
        )
    if plan.slices > 1 and (plan.family != "stream" or plan.k_warps % plan.slices):
        reasons.append(f"slices must divide the k warps of stream; got {plan.slices} for {plan.k_warps} of {plan.family}")
    if plan.split * plan.k_warps > layout.k_blocks:
        reasons.append(f"{plan.split} x {plan.k_warps} parts of k exceed its {layout.k_blocks} blocks of 128")
    return reasons


def _illegal_stream(problem: Problem, plan: Plan) -> list[str]:
    reasons = []
    layout = layout_of(problem)
    if plan.tokens * (plan.warp_blocks * 16 + 4) * 4 > plan.stages * plan.warp_blocks * layout.unit_bytes:
        reasons.append(f"partial sums of {plan.tokens} tokens do not fit the ring of {plan.stages} stages they reuse")
    return reasons


def _illegal_wgmma(problem: Problem, plan: Plan) -> list[str]:
    reasons = []
    smem = smem_map(problem, plan)
    if plan.row_warps % 4:
        reasons.append(f"a warpgroup is four warps: row_warps must be a multiple of 4; got {plan.row_warps}")
        return reasons
    if plan.warps // 4 > 15:
        reasons.append(f"a block has 15 named barriers, one a warpgroup; {plan.warps} warps are {plan.warps // 4} warpgroups")
    if plan.warp_blocks > 2:
        reasons.append(f"the rows of a warpgroup must lie in one panel: warp_blocks must be 1 or 2; got {plan.warp_blocks}")
    if plan.tokens not in WGMMA_TOKENS:
        reasons.append(f"tokens must be one of {', '.join(map(str, WGMMA_TOKENS))}; got {plan.tokens}")
    if problem.spec.zero == "float":
        reasons.append("float zero points need sums of x, which this family does not make")
    if 4 * plan.tokens * (plan.warp_blocks * 16 + 4) * 4 > smem.bars // (plan.warps // 4):
        reasons.append(f"partial sums of {plan.tokens} tokens do not fit the ring of {plan.stages} stages they reuse")
    return reasons


def _illegal_tile_wgmma(problem: Problem, plan: Plan) -> list[str]:
    reasons = []
    if plan.row_warps % 4:
        reasons.append(f"a warpgroup is four warps: row_warps must be a multiple of 4; got {plan.row_warps}")
    if PANEL_BLOCKS % (plan.row_warps * plan.warp_blocks) and plan.row_warps * plan.warp_blocks % PANEL_BLOCKS:
        reasons.append(f"the rows of a tile must divide {16 * PANEL_BLOCKS} or be a multiple of it; got {plan.tile_rows}")
    if plan.warp_blocks > 2:
        reasons.append(f"warp_blocks must be 1 or 2; got {plan.warp_blocks}")
    if plan.tokens not in TILE_TOKENS:
        reasons.append(f"tokens must be one of {', '.join(map(str, TILE_TOKENS))}; got {plan.tokens}")
    if plan.k_warps != 1:
        reasons.append(f"the warps of tile_wgmma do not cut k; got k_warps {plan.k_warps}")
    if plan.stages < 2:
        reasons.append("tile_wgmma needs two stages")
    if problem.spec.zero == "float":
        reasons.append("float zero points need sums of x, which this family does not make")
    if problem.act == "int8" and not layout_of(problem).grouped and problem.k > MOST_INT8_K:
        reasons.append(f"int8 sums of more than {MOST_INT8_K} columns may exceed 32 bits; got {problem.k}")
    smem = smem_map(problem, plan)
    if plan.split > 1 and plan.row_warps * plan.tokens * (plan.warp_blocks * 16 + 4) * 4 > smem.stage * plan.stages:
        reasons.append(f"partial sums of {plan.tokens} tokens do not fit the ring of {plan.stages} stages they reuse")
    return reasons


_ILLEGAL = {"stream": _illegal_stream, "stream_wgmma": _illegal_wgmma, "tile_wgmma": _illegal_tile_wgmma}


def _illegal_tile(plan: Plan) -> list[str]:
    reasons = []
    if (plan.k_warps, plan.split, plan.slices) != (1, 1, 1):
        reasons.append("tile_mma does not cut k")
    if PANEL_BLOCKS % (plan.row_warps * plan.warp_blocks) and plan.tile_rows != 32 * PANEL_BLOCKS:
        reasons.append(f"the rows of a tile must divide {16 * PANEL_BLOCKS} or be {32 * PANEL_BLOCKS}; got {plan.tile_rows}")
    if plan.stages < 2:
        reasons.append("tile_mma needs two stages")
    return reasons

"""How long a plan will take: an analytic estimate that has to rank plans, not to predict microseconds.

Knows rates and counts; it must not know whether a plan is legal. The form is a steady state: layers follow one another, each kernel
fills its rings while the one before it ends. The coefficients were fitted to thousands of timings of both streaming families on an H200
(docs/notes/2026-12-01-stream-plans.md, 2026-12-01-stream-wgmma.md, with the spread); other chips scale them by their bandwidth and number of SMs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.plan.plan import (
    RESERVED_SMEM,
    Plan,
    fold_is_free,
    folds,
    layout_of,
    natural_registers,
    register_limit,
    smem_map,
)
from lowbit.problem import Problem

CLUSTER_SMS = (10, 11)  # share of an H200's SMs that clusters of 3 and more are taken to fill: 4 and 8 can fill 120 of 132, 2 fill all
CLOCK_MHZ = 1755.0
UNEVEN = 0.56  # with 2 blocks an SM and room for 3 a kernel takes 1.28 times as long (H200, 131 timings)


@dataclass(frozen=True)
class Rates:
    """The coefficients of a streaming family."""

    start_us: float  # dependent launch, wait, barrier, last store
    cold_start_us: float  # more, where no block of the next kernel fits beside this one's
    crowded_us: float  # per MB an SM reads and block that it could hold beyond its own and the next kernel's: they pile up on some SMs
    wave_us: float  # each further wave of blocks
    cluster_us: float  # a cluster's two barriers
    cluster_block_us: float  # each block of it beyond the first
    overlap: float  # of start and cluster with the other blocks of an SM: they are divided by their number to this power
    sm_rate: float  # what one SM could read alone with unlimited bytes in flight, times its fair share of memory bandwidth
    flight_bytes: float  # in flight per SM for half of that rate
    prefetched: float  # share of the next kernel's rings that fills while this one runs
    x_us: float  # per MB of activations to one SM
    issue_cycles: float  # of a warp: per 8 weights of a lane
    mma_cycles: float  # per product with 8 tokens (stream), up to 16 (stream_wgmma)
    stage_cycles: float
    latency_cycles: float  # the same for a warp that has its sub-core to itself
    latency_mma: float
    latency_stage: float
    reduce_us: float  # one partial sum of one row and token, per thread
    exposed: float  # share of the shorter of reading and computing that is not hidden behind the longer
    conversion: float  # cycles of a conversion beyond int4's, against what its issue slots say


RATES = {
    "stream": Rates(
        start_us=1.62, cold_start_us=0.45, crowded_us=1.0, wave_us=2.6, cluster_us=0.79,
        cluster_block_us=0.035, overlap=0.0, sm_rate=3.46, flight_bytes=93e3, prefetched=0.38,
        x_us=21.9, issue_cycles=10.9, mma_cycles=7.2, stage_cycles=6.7, latency_cycles=3.0,
        latency_mma=6.4, latency_stage=604.0, reduce_us=0.0081, exposed=0.25, conversion=1.0,
    ),
    "stream_wgmma": Rates(
        start_us=1.18, cold_start_us=0.81, crowded_us=1.12, wave_us=2.71, cluster_us=1.2,
        cluster_block_us=0.147, overlap=0.82, sm_rate=4.88, flight_bytes=145e3, prefetched=0.066,
        x_us=1.3, issue_cycles=8.5, mma_cycles=8.5, stage_cycles=56.7, latency_cycles=11.75,
        latency_mma=4.77, latency_stage=447.0, reduce_us=0.0165, exposed=0.21, conversion=2.1,
    ),
}  # fmt: skip

@dataclass(frozen=True)
class TileRates:
    """The coefficients of tile_mma, cycles of an SM's sub-core unless said otherwise. Fitted to 1900 timings on an H200
    (docs/notes/2026-12-01-tile-mma.md)."""

    start_us: float = 2.0
    mma: float = 0.85  # products at the chip's mma.sync rate
    issue: float = 1.0  # an issue slot
    copy: float = 11.6  # 16-byte copies of a warp
    smem: float = 0.446  # 128 bytes of shared memory read or written, by the SM
    exposed: float = 0.94  # share of all but the longest of products, issue slots and shared memory that is not hidden ...
    overlap: float = 0.36  # ... with one warp a sub-core; divided by their number to this power
    stage: float = 98.0  # the path through a stage of 128 k: so much, and ...
    alone: float = 1.01  # ... this share of products and issue slots, however few warps there are
    latency: float = 667.0  # until a copy is there; blocks of an SM hide it from each other


TILE = TileRates()


@dataclass(frozen=True)
class TileWgmmaRates:
    """The coefficients of tile_wgmma, of one SM. Taken from a prototype's timings, not fitted: they have to tell shapes of tiles apart."""

    start_us: float = 3.0
    x_bytes: float = 36.0  # a cycle, from L2, of x and weights together
    issue: float = 1.0  # cycles of a sub-core per slot of conversion
    exposed: float = 0.1  # share of the shorter ones of products, conversion and loads that is not hidden
    stage: float = 60.0  # cycles
    store: float = 0.012  # cycles of an output value, while no products run
    cluster_us: float = 1.2
    reduce: float = 0.05  # cycles of a partial sum
    latency: float = 800.0  # until a stage is there


TILE_WGMMA = TileWgmmaRates()

# Issue slots of a weight's conversion against int4's 36 for 32 weights. Integers of 1, 2, 4 and 8 bits: measured alike.
_INTEGER = {1: 1.0, 2: 1.0, 3: 1.15, 4: 1.0, 5: 1.35, 6: 1.3, 7: 1.45, 8: 1.0}
_BF16 = {"fp4_e2m1": 1.7, "fp6_e3m2": 1.6, "fp8_e4m3": 1.15}  # for which the layout is made (docs/FORMATS.md)
_FLOAT = {3: 2.0, 4: 2.0, 5: 2.1, 6: 2.3, 7: 2.3, 8: 2.4}


@dataclass(frozen=True)
class Cost:
    """Microseconds: the estimate, and the parts it is made of (they overlap)."""

    us: float
    memory_us: float  # all weights at the chip's read bandwidth
    stream_us: float  # what the busiest SM still has to read when x arrives
    issue_us: float  # conversion and products on the busiest SM
    x_us: float
    fixed_us: float  # launch, waves, reduction


def estimate(problem: Problem, plan: Plan, m: int) -> Cost:
    """The time of one call with `m` tokens and cold weights."""
    if plan.family == "tile_mma":
        return _tile(problem, plan, m)
    if plan.family == "tile_wgmma":
        return _tile_wgmma(problem, plan, m)
    return _stream(problem, plan, m, RATES[plan.family])


def _convert(problem: Problem) -> float:
    """Issue slots of a weight's conversion against int4's: one FMA and, counted from the SASS, so many masks and shifts."""
    value = problem.spec.value
    if problem.operand_bits == 8:  # a mask and a shift for int8 and floats, six more for integers as e4m3
        return 0.3 if problem.act == "int8" or value.is_float else 1.0
    if value.kind == "codebook":
        return 2.8 if value.bits == 4 else 2.2  # look-ups by PRMT
    scales = 0.04 * layout_of(problem).steps
    if not value.is_float:
        return scales + _INTEGER[value.bits]
    return scales + ((_BF16.get(value.name) if problem.act == "bf16" else None) or _FLOAT[value.bits])


def _room(problem: Problem, plan: Plan) -> int:
    """Blocks of this plan that fit one SM at a time, by shared memory, threads and registers."""
    arch = problem.arch
    blocks = min(
        arch.smem_per_sm // (smem_map(problem, plan).total + RESERVED_SMEM), arch.threads_per_sm // plan.threads
    )
    used = -(-min(register_limit(plan), natural_registers(problem, plan)) // 8) * 8
    return max(1, min(blocks, 4 * (16384 // (32 * used)) // plan.warps))


def _stream(problem: Problem, plan: Plan, m: int, rates: Rates) -> Cost:
    arch, layout = problem.arch, layout_of(problem)
    blocks = -(-problem.n // plan.tile_rows) * plan.split * -(-m // plan.tokens)
    sms = max(1, arch.sms * CLUSTER_SMS[0] // CLUSTER_SMS[1]) if plan.split > 2 else arch.sms
    room = _room(problem, plan)
    per_sm = -(-blocks // sms)  # blocks the busiest SM runs, `resident` of them at a time
    resident = min(per_sm, room)
    k_blocks = -(-layout.k_blocks // plan.split)
    tokens = min(m, plan.tokens)
    wgmma = plan.family == "stream_wgmma"

    share = arch.read_gbs * 1e3 / arch.sms  # bytes per us
    memory = layout.expert_bytes / (arch.read_gbs * 1e3)
    block_bytes = plan.tile_rows // 16 * k_blocks * layout.unit_bytes
    ring = plan.row_warps * plan.k_warps * plan.stages * plan.warp_blocks * layout.unit_bytes
    beside = max(0, room - resident)
    early = min(per_sm * block_bytes, min(beside, per_sm) * ring) * rates.prefetched
    rate = rates.sm_rate * share * resident * ring / (resident * ring + rates.flight_bytes)
    stream = max(0.0, per_sm * block_bytes - early) / rate

    stages = -(-k_blocks // plan.k_warps)
    words = plan.warp_blocks * 8
    products = words * (max(1.0, plan.tokens / 16) if wgmma else -(-plan.tokens // 8))
    convert = 1 + rates.conversion * (_convert(problem) - 1)
    rounds = -(-per_sm // resident)
    per_sub_core = -(-resident * plan.warps // 4)
    issue = per_sub_core * stages * (words * rates.issue_cycles * convert + products * rates.mma_cycles + rates.stage_cycles)
    alone = stages * (words * rates.latency_cycles * convert + products * rates.latency_mma + rates.latency_stage)
    work = rounds * max(issue, alone) / CLOCK_MHZ

    # x goes to every warpgroup that has rows of its own, or once to the block
    x_bytes = plan.tokens * plan.row_warps // 4 * per_sm if wgmma else tokens * resident
    x = x_bytes * k_blocks * 256 * rates.x_us / 1e6
    waves = -(-blocks // (sms * room))
    ends = rates.cold_start_us if room <= per_sm else 0.0
    if plan.split > 1:
        ends += rates.cluster_us + rates.cluster_block_us * (plan.split - 1)
    fixed = rates.start_us + ends / resident**rates.overlap + rates.wave_us * (waves - 1)
    fixed += rates.crowded_us * max(0, room - per_sm - 1) * block_bytes / 1e6
    fixed += rates.reduce_us * per_sm * plan.k_warps * tokens * plan.tile_rows / plan.threads
    path = fixed + x + max(work, stream) + rates.exposed * min(work, stream)
    if per_sm < room < 2 * per_sm:  # the next kernel's first blocks fill what is free, its last ones go where room comes first
        path *= 1 + UNEVEN * (room / per_sm - 1)
    return Cost(max(memory, path) + 0.1 * min(memory, path), memory, stream, work, x, fixed)


def _tile(problem: Problem, plan: Plan, m: int) -> Cost:
    arch, layout, rates = problem.arch, layout_of(problem), TILE
    blocks = -(-problem.n // plan.tile_rows) * -(-m // plan.tokens)
    room = _room(problem, plan)
    per_sm = -(-blocks // arch.sms)
    resident = min(per_sm, room)
    rounds = -(-blocks // (arch.sms * resident))
    warps = plan.warps / 4  # a sub-core
    tiles = -(-plan.tokens // (8 * plan.token_warps))
    stage_bytes = smem_map(problem, plan).stage

    products = warps * 8 * plan.warp_blocks * tiles
    scaling = 4 if folds(problem, plan) and not fold_is_free(problem) else 0
    slots = warps * 8 * plan.warp_blocks * (10 * _convert(problem) + scaling)
    if layout.grouped and not folds(problem, plan):
        slots += warps * plan.warp_blocks * tiles * 6 * 128 / layout.step  # sums of groups
    slots += warps * 8 * -(-tiles // 2)
    moves = plan.row_warps * plan.tokens * 256 + plan.token_warps * plan.tile_rows // 16 * layout.unit_bytes + stage_bytes
    mma = rates.mma * products * 4096 * 4 * arch.sms * CLOCK_MHZ / (arch.mma_tflops * 1e6)  # one is of 16 rows, 8 tokens, 16 k
    issue = rates.issue * (slots + products) + rates.copy * stage_bytes / 2048
    parts = [mma * resident, issue * resident, rates.smem * moves / 128 * resident]
    stage = max(parts) + rates.exposed * (sum(parts) - max(parts)) / (resident * warps) ** rates.overlap
    stage = max(stage, rates.stage + rates.alone * (mma + issue))
    ahead = plan.stages - 2 + (0.5 if plan.stages == 2 else 0.14)  # stages that pass between a copy and its use
    stage += max(0.0, rates.latency - ahead * stage) / resident
    work = rounds * layout.k_blocks * stage / CLOCK_MHZ
    memory = layout.expert_bytes / (arch.read_gbs * 1e3)
    ring = resident * plan.stages * plan.tile_rows // 16 * layout.unit_bytes
    stream = memory * (1 + RATES["stream"].flight_bytes / ring) / RATES["stream"].sm_rate
    longest = max(memory, work, stream)
    return Cost(longest + 0.1 * min(memory, work) + rates.start_us, memory, stream, work, 0.0, rates.start_us)


def _tile_wgmma(problem: Problem, plan: Plan, m: int) -> Cost:
    arch, layout, rates = problem.arch, layout_of(problem), TILE_WGMMA
    tiles = -(-problem.n // plan.tile_rows) * -(-m // plan.tokens)
    sms = max(1, arch.sms * CLUSTER_SMS[0] // CLUSTER_SMS[1]) if plan.split > 2 else arch.sms
    rounds = -(-tiles * plan.split // sms)
    bytes_per_stage = smem_map(problem, plan).stage
    peak = (arch.peak_tflops or arch.mma_tflops) * 1e6 / arch.sms / CLOCK_MHZ * 16 / problem.operand_bits  # operations a cycle
    products = 2 * plan.tile_rows * plan.tokens * 128 / peak
    scaling = 4 if folds(problem, plan) and not fold_is_free(problem) else 0
    slots = 8 * plan.warp_blocks * (10 * _convert(problem) + scaling)
    if layout.grouped and not folds(problem, plan):
        slots += plan.warp_blocks * plan.tokens / 2 * 128 / layout.step
    convert = rates.issue * slots * plan.warps / 4
    loads = bytes_per_stage / rates.x_bytes
    parts = (products, convert, loads)
    stage = max(parts) + rates.exposed * (sum(parts) - max(parts)) + rates.stage
    stage = max(stage, rates.latency / (plan.stages - 0.5))
    stages = -(-layout.k_blocks // plan.split)
    work = rounds * (stages * stage + rates.store * plan.tile_rows * plan.tokens) / CLOCK_MHZ
    fixed = rates.start_us
    if plan.split > 1:
        fixed += rates.cluster_us + rates.reduce * plan.tile_rows * plan.tokens / CLOCK_MHZ
    memory = layout.expert_bytes / (arch.read_gbs * 1e3)
    return Cost(max(memory, work) + 0.1 * min(memory, work) + fixed, memory, loads * stages * rounds / CLOCK_MHZ, work, 0.0, fixed)

"""How long a plan will take: an analytic estimate that has to rank plans, not to predict microseconds.

Knows rates and counts; it must not know whether a plan is legal. The form is a steady state: layers follow one another, each kernel
fills its rings while the one before it ends. The coefficients were fitted to 4641 timings of `stream` plans on an H200
(docs/notes/2026-12-01-stream-plans.md, with the spread); other chips scale them by their bandwidth and number of SMs.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowbit.plan.plan import RESERVED_SMEM, Plan, layout_of, natural_registers, register_limit, smem_map
from lowbit.problem import Problem

CLUSTER_SMS = (10, 11)  # share of an H200's SMs that clusters of 4 or 8 can fill, 120 of 132; clusters of 2 fill all
CLOCK_MHZ = 1755.0

START_US = 1.62  # dependent launch, wait, barrier, last store
COLD_START_US = 0.45  # more, where no block of the next kernel fits beside this one's
CROWDED_US = 1.0  # per MB an SM reads and block that it could hold beyond its own and the next kernel's: they pile up on some SMs
WAVE_US = 2.6  # each further wave of blocks
CLUSTER_US, CLUSTER_BLOCK_US = 0.79, 0.035  # a cluster's two barriers, and each block beyond the first
SM_RATE = 3.46  # what one SM could read alone with unlimited bytes in flight, times its fair share of memory bandwidth
FLIGHT_BYTES = 93e3  # in flight per SM for half of that rate
PREFETCHED = 0.38  # share of the next kernel's rings that fills while this one runs
X_BYTES_PER_US = 45.6e3  # activations from L2 to one SM
ISSUE_CYCLES, MMA_CYCLES, STAGE_CYCLES = 10.9, 7.2, 6.7  # of a warp: per 8 weights of a lane, per product, per stage
LATENCY_CYCLES, LATENCY_MMA, LATENCY_STAGE = 3.0, 6.4, 604.0  # the same for a warp that has its sub-core to itself
REDUCE_US = 0.0081  # one partial sum of one row and token, per thread

TILE_EFFICIENCY = 0.55  # of the mma.sync peak that tile_mma reaches, roughly
TILE_STAGE_US = 0.45  # a 128-k step of one block on an otherwise idle SM

# Issue slots of a weight's conversion against int4's 36 for 32 weights. Integers of 1, 2, 4 and 8 bits: measured alike.
_INTEGER = {1: 1.0, 2: 1.0, 3: 1.15, 4: 1.0, 5: 1.35, 6: 1.3, 7: 1.45, 8: 1.0}
_BF16 = {"fp4_e2m1": 1.7, "fp6_e3m2": 1.6, "fp8_e4m3": 1.6}  # for which the layout is made (docs/FORMATS.md)
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
    return _stream(problem, plan, m) if plan.family == "stream" else _tile(problem, plan, m)


def _convert(problem: Problem) -> float:
    """Issue slots of a weight's conversion against int4's: one FMA and, counted from the SASS, so many masks and shifts."""
    value = problem.spec.value
    if not value.is_float:
        return _INTEGER[value.bits]
    return (_BF16.get(value.name) if problem.act == "bf16" else None) or _FLOAT[value.bits]


def _room(problem: Problem, plan: Plan) -> int:
    """Blocks of this plan that fit one SM at a time, by shared memory, threads and registers."""
    arch = problem.arch
    blocks = min(
        arch.smem_per_sm // (smem_map(problem, plan).total + RESERVED_SMEM), arch.threads_per_sm // plan.threads
    )
    used = -(-min(register_limit(plan), natural_registers(problem, plan)) // 8) * 8
    return max(1, min(blocks, 4 * (16384 // (32 * used)) // plan.warps))


def _stream(problem: Problem, plan: Plan, m: int) -> Cost:
    arch, layout, smem = problem.arch, layout_of(problem), smem_map(problem, plan)
    blocks = -(-problem.n // plan.tile_rows) * plan.split * -(-m // plan.tokens)
    sms = max(1, arch.sms * CLUSTER_SMS[0] // CLUSTER_SMS[1]) if plan.split > 2 else arch.sms
    room = _room(problem, plan)
    per_sm = -(-blocks // sms)  # blocks the busiest SM runs, `resident` of them at a time
    resident = min(per_sm, room)
    k_blocks = -(-layout.k_blocks // plan.split)
    tokens = min(m, plan.tokens)

    share = arch.read_gbs * 1e3 / arch.sms  # bytes per us
    memory = layout.expert_bytes / (arch.read_gbs * 1e3)
    block_bytes = plan.tile_rows // 16 * k_blocks * layout.unit_bytes
    ring = smem.x
    beside = max(0, room - resident)
    early = min(per_sm * block_bytes, min(beside, per_sm) * ring) * PREFETCHED
    rate = SM_RATE * share * resident * ring / (resident * ring + FLIGHT_BYTES)
    stream = max(0.0, per_sm * block_bytes - early) / rate

    stages = -(-k_blocks // plan.k_warps)
    words = plan.warp_blocks * 8
    products = plan.warp_blocks * 8 * -(-plan.tokens // 8)
    convert = _convert(problem)
    rounds = -(-per_sm // resident)
    per_sub_core = -(-resident * plan.warps // 4)
    issue = per_sub_core * stages * (words * ISSUE_CYCLES * convert + products * MMA_CYCLES + STAGE_CYCLES)
    alone = stages * (words * LATENCY_CYCLES * convert + products * LATENCY_MMA + LATENCY_STAGE)
    work = rounds * max(issue, alone) / CLOCK_MHZ

    x = tokens * k_blocks * 256 * resident / X_BYTES_PER_US
    waves = -(-blocks // (sms * room))
    fixed = START_US + (COLD_START_US if room <= per_sm else 0.0) + WAVE_US * (waves - 1)
    fixed += CROWDED_US * max(0, room - per_sm - 1) * block_bytes / 1e6
    if plan.split > 1:
        fixed += CLUSTER_US + CLUSTER_BLOCK_US * (plan.split - 1)
    fixed += REDUCE_US * per_sm * plan.k_warps * tokens * plan.tile_rows / plan.threads
    path = fixed + x + max(work, stream) + 0.25 * min(work, stream)
    return Cost(max(memory, path) + 0.1 * min(memory, path), memory, stream, work, x, fixed)


def _tile(problem: Problem, plan: Plan, m: int) -> Cost:
    arch, layout = problem.arch, layout_of(problem)
    row_tiles, token_tiles = -(-problem.n // plan.tile_rows), -(-m // plan.tokens)
    room = _room(problem, plan)
    rounds = -(-row_tiles * token_tiles // (arch.sms * room))
    memory = layout.expert_bytes / (arch.read_gbs * 1e3)
    flops_per_block = 2.0 * plan.tile_rows * plan.tokens * layout.k_blocks * 128
    per_us = arch.mma_tflops * 1e6 / arch.sms * TILE_EFFICIENCY
    # Each token warp converts the same weights anew.
    convert = 1.0 + 2.0 * plan.token_warps * _convert(problem) / (plan.tokens / 8)
    work = rounds * max(
        room * flops_per_block * convert / per_us, layout.k_blocks * TILE_STAGE_US / max(1, plan.stages - 2)
    )
    fixed = START_US + COLD_START_US
    return Cost(max(memory, work) + fixed, memory, 0.0, work, 0.0, fixed)

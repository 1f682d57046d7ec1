"""Which plans are worth looking at for a problem and a number of tokens.

Enumerates, drops what cannot be good, keeps what is legal; it must not know which is fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from lowbit.plan.plan import TILE_TOKENS, WGMMA_TOKENS, Plan, has_wgmma, illegal, layout_of
from lowbit.problem import Problem

BUCKETS = (
    1,
    8,
    16,
    32,
    64,
    128,
)  # one kernel serves all M up to each of these, the last all beyond: six kernels a layer
LAST_M = 2048  # what the last bucket's kernel is chosen for: many waves of blocks, as most of what it serves
STREAM_TOKENS = 32  # the largest token tile of `stream`
_ROW_WARPS = (1, 2, 3, 4, 5, 7, 8, 9, 14, 15)  # also odd ones, so that some row tile fills the SMs in one balanced wave
_FLIGHT = 48 * 1024  # bytes of weights in flight that an SM needs; beyond 200 KB more never helped (H200)
_MOST_FLIGHT = 200 * 1024


def bucket(m: int) -> int:
    """The largest M that shares a kernel with `m`."""
    return next((b for b in BUCKETS if m <= b), BUCKETS[-1])


def candidates(problem: Problem, m: int, family: str = "") -> list[Plan]:
    """Legal plans for about `m` tokens, in a fixed order; of one family if that is named."""
    return [plan for plan in enumerate_plans(problem, m, family) if not illegal(problem, plan)]


def rejected(problem: Problem, m: int, family: str = "") -> list[tuple[Plan, tuple[str, ...]]]:
    """Enumerated plans that are not legal, with their reasons."""
    pairs = ((plan, illegal(problem, plan)) for plan in enumerate_plans(problem, m, family))
    return [(plan, reasons) for plan, reasons in pairs if reasons]


def enumerate_plans(problem: Problem, m: int, family: str = "") -> Iterator[Plan]:
    """Plans whose shape suits the layer; not all of them are legal. A family that is named is looked at where it would lose, too."""
    return (plan for plan in _enumerate(problem, bucket(m), family) if plan.family == (family or plan.family))


def _enumerate(problem: Problem, tokens: int, family: str) -> Iterator[Plan]:
    if problem.operand_bits == 8:
        yield from _tile_wgmma(problem, tokens)
        return
    # Where it can, stream_wgmma beats stream: by 1.0 to 1.2 at M = 8, by up to 1.9 at M = 32 (H200). Beyond 64 tokens it reads weights anew
    # for every 64, from L2, and still beats tile_mma: 62 us against 90 at M = 256, though 58 against 54 at 128 (8192x8192 int4_g128).
    wgmma = has_wgmma(problem) and tokens > 1
    streams: list[Plan] = []
    if wgmma or family == "stream_wgmma":
        streams += _stream_wgmma(problem, min(max(tokens, WGMMA_TOKENS[0]), WGMMA_TOKENS[-1]))
    if (not wgmma or family == "stream") and tokens <= 2 * STREAM_TOKENS:  # beyond, reading the weights anew for every 32 tokens loses
        streams += _stream(problem, min(tokens, STREAM_TOKENS))
    yield from streams
    if family == "tile_wgmma":  # not timed yet: only by name
        yield from _tile_wgmma(problem, tokens)
    # At 16 tokens tile_mma takes 1.3 times as long as stream (H200); but where it alone serves many tokens, the one order of sums for all sizes may
    # need it for few.
    beaten = not family and (wgmma or (tokens <= 16 and not problem.batch_invariant))
    if beaten and not all(illegal(problem, plan) for plan in streams):
        return
    for narrower in sorted({max(8, tokens), max(8, tokens // 2), max(8, tokens // 4)}, reverse=True):
        yield from _tile(narrower)
    # Small plans that are legal wherever anything is: the last resort of the smallest layers and chips. Not so small in the last
    # bucket, whose grid must reach a million tokens.
    if tokens <= 2 * STREAM_TOKENS:
        yield Plan("stream", min(tokens, 8), 1, 1, stages=2)
    yield Plan("tile_mma", 32 if tokens == BUCKETS[-1] else 8, 1, 2, stages=2)


def _stream(problem: Problem, tokens: int) -> Iterator[Plan]:
    arch, layout = problem.arch, layout_of(problem)
    unit, row_blocks = layout.unit_bytes, layout.row_blocks
    enough = min(_FLIGHT, layout.expert_bytes // arch.sms // 2)
    cuts = [(k_warps, 1) for k_warps in (1, 2, 4, 8, 16)]
    if problem.batch_invariant and has_wgmma(problem):  # one order of sums is that of some stream_wgmma plan, whose clusters k warps may stand for
        cuts = [(k_warps, slices) for k_warps in (1, 2, 3, 4, 6, 8, 12, 16) for slices in (1, 2, 3, 4) if k_warps % slices == 0]
    for blocks_per_sm, warp_blocks, row_warps, (k_warps, slices) in product((1, 2), (1, 2, 4), _ROW_WARPS, cuts):
        warps = row_warps * k_warps
        if not 4 <= warps <= 18 or 32 * warps * blocks_per_sm > arch.threads_per_sm:
            continue
        row_tiles = -(-row_blocks // (row_warps * warp_blocks))
        for split in (1, 2, 4, 8) if arch.clusters else (1,):
            blocks, sms = row_tiles * split, arch.sms if split <= 2 else arch.sms * 10 // 11
            if split > 1 and blocks > 2 * sms * blocks_per_sm:
                continue  # cutting k costs; it only pays where rows alone do not fill the chip
            for stages in (2, 3, 4):
                ring = warps * stages * warp_blocks * unit
                if enough <= ring * blocks_per_sm <= _MOST_FLIGHT:
                    yield Plan("stream", tokens, warp_blocks, row_warps, k_warps=k_warps, split=split, stages=stages,
                               x_chunks=4 if arch.bulk and tokens > 4 else 1, blocks_per_sm=blocks_per_sm, slices=slices)  # fmt: skip


def _stream_wgmma(problem: Problem, tokens: int) -> Iterator[Plan]:
    arch, layout = problem.arch, layout_of(problem)
    enough = min(_FLIGHT, layout.expert_bytes // arch.sms // 2)
    for warp_blocks, row_warps, k_warps, split in product((1, 2), (4, 8, 12), (1, 2, 3, 4), (1, 2, 3, 4)):
        warps, tile_blocks = row_warps * k_warps, row_warps * warp_blocks
        blocks = -(-layout.row_blocks // tile_blocks) * split
        sms = arch.sms if split <= 2 else arch.sms * 10 // 11
        if not 8 <= warps <= 16:  # one warpgroup alone waits too much (1.1 to 1.3 times, H200)
            continue
        if split > 1 and blocks > (2 if split == 4 else 4) * sms:  # 3 or 4 small blocks an SM even out, the rest never won (10240x8192, H200)
            continue
        if split == 3 and blocks <= 2 * sms:  # clusters of three leave SMs idle unless there are many (up to 1.8 times the estimate, H200)
            continue
        for stages, blocks_per_sm in product((2, 3, 4, 5, 6), (1, 2)):
            ring = stages * k_warps * tile_blocks * layout.unit_bytes
            if enough <= 2 * ring and ring * blocks_per_sm <= _MOST_FLIGHT:
                yield Plan("stream_wgmma", tokens, warp_blocks, row_warps, k_warps=k_warps, split=split, stages=stages,
                           blocks_per_sm=blocks_per_sm)  # fmt: skip


def _tile_wgmma(problem: Problem, tokens: int) -> Iterator[Plan]:
    arch, row_blocks = problem.arch, layout_of(problem).row_blocks
    sizes = [t for t in TILE_TOKENS if t >= 128] if tokens == BUCKETS[-1] else [max(tokens, TILE_TOKENS[0])]
    for size, (row_warps, warp_blocks), split in product(sizes, ((8, 1), (8, 2), (4, 1), (4, 2)), (1, 2, 4)):
        blocks = -(-row_blocks // (row_warps * warp_blocks)) * split
        if split > 1 and blocks > (arch.sms if split == 2 else arch.sms * 10 // 11):
            continue  # a cluster shares one tile and ends with it
        for stages in (8, 6, 5, 4, 3, 2):
            yield Plan("tile_wgmma", size, warp_blocks, row_warps, split=split, stages=stages)


def _tile(tokens: int) -> Iterator[Plan]:
    # Narrow token tiles let all warps share the rows; wide ones split tokens, so that each conversion serves more products.
    narrow = ((8, 1, 1), (4, 1, 1), (4, 2, 2), (4, 1, 2), (2, 2, 2), (2, 2, 1), (2, 1, 2), (2, 1, 1))
    wide = ((4, 2, 4), (4, 1, 4), (8, 1, 2), (4, 2, 2), (4, 1, 2), (8, 1, 1), (2, 4, 2), (2, 2, 4), (2, 2, 2), (2, 2, 1))
    shapes = wide if tokens >= 64 else narrow
    for (row_warps, token_warps, warp_blocks), stages, blocks_per_sm in product(shapes, (4, 3, 2), (1, 2, 3)):
        yield Plan(
            "tile_mma",
            tokens,
            warp_blocks,
            row_warps,
            token_warps=token_warps,
            stages=stages,
            blocks_per_sm=blocks_per_sm,
        )

// Family `tile_mma`: any number of tokens on any chip, mma.sync with a shared-memory ring of 128-k stages.
// Wiring only: conversion is in product.cuh, output in epilogue.cuh.
//
// A block of kRowWarps x kTokenWarps warps makes kRowWarps * kWarpBlocks * 16 rows x kTokens tokens. A stage is the tile's units (one
// contiguous piece a panel) followed by x: 256 bytes a token, 16-byte chunk c of token i at c ^ (i & 7) so that ldmatrix meets 8 bank groups.
//
// Tensor cores must not wait. Whatever a step of 16 k needs is asked for a step ahead, also across stages: a block meets once a stage, before
// the products of its last step, and leaves with the first operands of the next. Copies of a later stage go out a few a step.
#pragma once
#include "epilogue.cuh"
#include "product.cuh"
#include "ring.cuh"

namespace lowbit {
template <class C> struct TileMma {
    static constexpr u32 kThreads = C::kRowWarps * C::kTokenWarps * 32, kWarpTokens = C::kTokens / C::kTokenWarps, kTokenTiles = kWarpTokens / 8;
    static constexpr u32 kTileBlocks = C::kRowWarps * C::kWarpBlocks, kTileRows = kTileBlocks * 16;
    static constexpr u32 kPanelBlocks = smaller<u32>(8, kTileBlocks), kPanels = kTileBlocks / kPanelBlocks;  // of the tile
    static constexpr u32 kRowBlocks = (C::kN + 15) / 16, kKBlocks = (C::kK + 127) / 128;
    static constexpr u32 kUnits = kTileBlocks * C::kUnitBytes, kStageBytes = kUnits + C::kTokens * 256;
    static constexpr u32 kUnitCopies = (kPanelBlocks * C::kUnitBytes / 16 + kThreads - 1) / kThreads, kXCopies = (C::kTokens * 16 + kThreads - 1) / kThreads;  // of a thread
    static constexpr int kSteps = 8, kCopySteps = C::kStages == 2 ? 4 : kSteps - 1;  // of two stages the next is waited for at the end
    using W = Weights<C, C::kWarpBlocks>;
    using Partial = PartialTile<kTileRows>;
    static_assert(8 % kTileBlocks == 0 || kTileBlocks == 16, "a tile lies inside one panel or is two");
    static_assert(kStageBytes == C::kSmemStage, "plan/plan.py and tile_mma.cuh disagree");

    const Params& p;
    const u32 smem, lane, warp, row_warp, token_warp, first_block, num_blocks;
    const u64 token0;
    const u32 tokens;
    const u32 x_token, x_chunk;  // of this thread's first copy
    const u8* const x;

    HW_FN explicit TileMma(const Params& params)
        : p(params), smem(smem_base()), lane(lane_id()), warp(warp_uniform(tid_x() / 32)), row_warp(warp % C::kRowWarps), token_warp(warp / C::kRowWarps),
          first_block(ctaid_x() * kTileBlocks), num_blocks(smaller<u32>(kTileBlocks, kRowBlocks - first_block)), token0(static_cast<u64>(ctaid_y()) * C::kTokens),
          tokens(static_cast<u32>(smaller<u64>(p.m - token0, C::kTokens))), x_token(tid_x() / 16), x_chunk(tid_x() % 16),
          x(p.x + (token0 + x_token) * p.x_pitch + x_chunk * 16) {}

    HW_FN void run() {
        for (u32 i = 0; i < C::kStages - 1; ++i) load_units(i, i);  // weights do not depend on the previous kernel
        if constexpr (C::kLevel >= 90) { griddep_wait(); griddep_launch(); }
        for (u32 i = 0; i < C::kStages - 1; ++i) { load_x(i, i); copy_commit<C>(); }
        clear_x();

        float acc[C::kWarpBlocks][kTokenTiles][4], part[C::kWarpBlocks][kTokenTiles][4], x_sum[kTokenTiles][4];
        HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
            HW_UNROLL for (u32 n = 0; n < kTokenTiles; ++n)
                HW_UNROLL for (int e = 0; e < 4; ++e) acc[r][n][e] = 0;
        u32 b[2][kTokenTiles][2], unit[C::kWarpBlocks];  // of this step and of the next
        W weights;
        const u32 x_row = (token_warp * kWarpTokens + lane / 16 * 8 + lane % 8) * 256 + ((lane / 8 % 2 ^ lane % 8) << 4);
        auto load_b = [&](u32 (&to)[kTokenTiles][2], u32 stage, int step) {
            const u32 at = stage + kUnits + (x_row ^ step << 5);
            HW_UNROLL for (u32 n = 0; n + 1 < kTokenTiles; n += 2) {
                u32 two[4];
                ldmatrix_x4(two, at + n * 2048);
                to[n][0] = two[0]; to[n][1] = two[1]; to[n + 1][0] = two[2]; to[n + 1][1] = two[3];
            }
            if constexpr (kTokenTiles % 2) ldmatrix_x2(to[kTokenTiles - 1], at + (kTokenTiles - 1) * 2048);
        };
        auto enter = [&](u32 stage) {  // sets where this warp's units lie
            HW_UNROLL for (u32 r = 0; r < C::kWarpBlocks; ++r) unit[r] = stage + smaller(row_warp * C::kWarpBlocks + r, num_blocks - 1) * C::kUnitBytes;
        };

        if constexpr (C::kMover == kCpAsync) cp_async_wait<C::kStages - 2>();
        syncthreads();
        enter(smem);
        weights.load(unit, 0);
        load_b(b[0], smem, 0);
        u32 slot = 0, fill = C::kStages - 1;  // the stage in use, and the one that copies go to
        for (u32 block = 0; block < kKBlocks; ++block) {
            const u32 later = block + C::kStages - 1, next = slot + 1 == C::kStages ? 0 : slot + 1;
            const u32 stage = smem + slot * kStageBytes, next_stage = block + 1 < kKBlocks ? smem + next * kStageBytes : stage;
            HW_UNROLL for (int step = 0; step < kSteps; ++step) {
                const int v = step / W::kSteps, in = step % W::kSteps;
                const bool last = step == kSteps - 1, vector_ends = in == W::kSteps - 1;
                if (!last) {
                    load_b(b[(step + 1) % 2], stage, step + 1);
                    load_units(later, fill, step, kCopySteps);
                    load_x(later, fill, step, kCopySteps);
                }
                u32 a[C::kWarpBlocks][4];
                HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r) weights.fragment(a[r], r, v, in);
                if (last) {
                    copy_commit<C>();
                    if constexpr (C::kMover == kCpAsync) cp_async_wait<C::kStages - 2>();
                    syncthreads();  // the next stage is here for all, and all have left this one: their last operands are in registers
                    enter(next_stage);
                    load_b(b[0], next_stage, 0);
                }
                if (vector_ends) weights.load_operands(unit, last ? 0 : v + 1);
                if (W::kSums && W::begins(v, in))
                    HW_UNROLL for (u32 n = 0; n < kTokenTiles; ++n)
                        HW_UNROLL for (int e = 0; e < 4; ++e) {
                            HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r) part[r][n][e] = 0;
                            x_sum[n][e] = 0;
                        }
                HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
                    HW_UNROLL for (u32 n = 0; n < kTokenTiles; ++n) C::Operand::template mma<C::kLevel>(W::kSums ? part[r][n] : acc[r][n], a[r], b[step % 2][n]);
                if constexpr (C::kZero == kFloatZero) {
                    constexpr u32 kUnit = Bits<typename C::Operand>::kUnit;
                    const u32 ones[4] = {kUnit, kUnit, kUnit, kUnit};
                    HW_UNROLL for (u32 n = 0; n < kTokenTiles; ++n) C::Operand::template mma<C::kLevel>(x_sum[n], ones, b[step % 2][n]);
                }
                if (W::kSums && W::ends(v, in))
                    HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
                        HW_UNROLL for (u32 n = 0; n < kTokenTiles; ++n)
                            HW_UNROLL for (int e = 0; e < 4; ++e) weights.add(acc[r][n][e], part[r][n][e], x_sum[n][e], r, W::group(in), e);
                if (vector_ends) weights.load_sums(unit, last ? 0 : v + 1);
            }
            fill = slot;
            slot = next;
        }
        if constexpr (C::kMover == kCpAsync) cp_async_wait<0>();
        syncthreads();  // the ring is free: partial sums take its place
        if (token_warp * kWarpTokens < tokens)
            store_partials(smem + token_warp * kWarpTokens * Partial::kTokenBytes + row_warp * C::kWarpBlocks * 64, Partial::kTokenBytes, acc, tokens - token_warp * kWarpTokens);
        syncthreads();
        for (u32 id = tid_x(); id < tokens * (kTileRows / 4); id += kThreads) {
            const u32 token = id / (kTileRows / 4), row = id % (kTileRows / 4) * 4, out = first_block * 16 + row;
            if (out >= C::kN) continue;
            const U4 v = ld_shared_v4(smem + token * Partial::kTokenBytes + row * 4);
            const float sum[4] = {as_f32(v.x), as_f32(v.y), as_f32(v.z), as_f32(v.w)};
            store_quad<C>(p, token0 + token, out, sum, 1, load_affine<C>(p, out));
        }
    }

    // Part `part` of `parts` of what this thread copies of k block `block`, if there is one.
    HW_FN void load_units(u32 block, u32 slot, u32 part = 0, u32 parts = 1) const {
        HW_UNROLL for (u32 q = 0; q < kPanels; ++q) {
            const u32 panel = first_block / 8 + q, panel_blocks = smaller<u32>(8, kRowBlocks - panel * 8), here = q * 8 + kPanelBlocks;
            const u32 bytes = block < kKBlocks && num_blocks > q * 8 ? (smaller(num_blocks, here) - q * 8) * C::kUnitBytes : 0;
            const u8* const from = p.units + (static_cast<u64>(panel) * 8 * kKBlocks + static_cast<u64>(block) * panel_blocks + first_block % 8) * C::kUnitBytes;
            HW_UNROLL for (u32 j = 0; j < kUnitCopies; ++j) {
                const u32 at = (tid_x() + j * kThreads) * 16;
                if (j * parts / kUnitCopies == part && at < bytes) copy_16<C>(smem + slot * kStageBytes + q * 8 * C::kUnitBytes + at, from + at);
            }
        }
    }
    HW_FN void load_x(u32 block, u32 slot, u32 part = 0, u32 parts = 1) const {
        const u32 end = block < kKBlocks ? tokens : 0;
        HW_UNROLL for (u32 j = 0; j < kXCopies; ++j) {
            const u32 token = x_token + j * (kThreads / 16), to = smem + slot * kStageBytes + kUnits + token * 256 + ((x_chunk ^ (token & 7)) << 4);
            if (j * parts / kXCopies != part || token >= end) continue;
            if (C::kK % 128 == 0 || block * 128 + x_chunk * 8 < C::kK) copy_16<C>(to, x + j * (kThreads / 16) * p.x_pitch + block * 256);
            else st_shared_v4(to, U4{0, 0, 0, 0});  // k past the end multiplies zero codes, but must not be NaN
        }
    }
    HW_FN void clear_x() const {  // of tokens past the end, which are read and multiplied
        for (u32 i = tokens * 16 + tid_x(); i < C::kTokens * 16; i += kThreads)
            for (u32 s = 0; s < C::kStages; ++s) st_shared_v4(smem + s * kStageBytes + kUnits + i * 16, U4{0, 0, 0, 0});
    }
};
}  // namespace lowbit

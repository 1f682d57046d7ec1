// Family `tile_mma`: any number of tokens on any chip, mma.sync with a shared-memory ring of 128-k stages.
// Wiring only: conversion and products are in product.cuh, output in epilogue.cuh.
//
// A block of kRowWarps x kTokenWarps warps makes kRowWarps * kWarpBlocks * 16 rows x kTokens tokens. A stage is the tile's units (one
// contiguous piece) followed by x: 256 bytes a token, 16-byte chunk c of token i at c ^ (i & 7) so that ldmatrix meets 8 banks groups.
#pragma once
#include "epilogue.cuh"
#include "product.cuh"
#include "ring.cuh"

namespace lowbit {
template <class C> struct TileMma {
    static constexpr u32 kThreads = C::kRowWarps * C::kTokenWarps * 32, kWarpTokens = C::kTokens / C::kTokenWarps;
    static constexpr u32 kTileBlocks = C::kRowWarps * C::kWarpBlocks, kTileRows = kTileBlocks * 16;
    static constexpr u32 kRowBlocks = (C::kN + 15) / 16, kKBlocks = (C::kK + 127) / 128;
    static constexpr u32 kUnits = kTileBlocks * C::kUnitBytes, kStageBytes = kUnits + C::kTokens * 256;
    using Partial = PartialTile<kTileRows>;
    static_assert(8 % kTileBlocks == 0, "a tile lies inside one panel, so that a stage is contiguous");
    static_assert(kStageBytes == C::kSmemStage, "plan/plan.py and tile_mma.cuh disagree");

    const Params& p;
    const u32 smem, lane, warp, row_warp, token_warp, first_block, num_blocks;
    const u64 token0;
    const u32 tokens, panel_blocks;
    const u8* const units;

    HW_FN explicit TileMma(const Params& params)
        : p(params), smem(smem_base()), lane(lane_id()), warp(warp_uniform(tid_x() / 32)), row_warp(warp % C::kRowWarps), token_warp(warp / C::kRowWarps),
          first_block(ctaid_x() * kTileBlocks), num_blocks(smaller<u32>(kTileBlocks, kRowBlocks - first_block)), token0(static_cast<u64>(ctaid_y()) * C::kTokens),
          tokens(static_cast<u32>(smaller<u64>(p.m - token0, C::kTokens))), panel_blocks(smaller<u32>(8, kRowBlocks - first_block / 8 * 8)),
          units(p.units + (static_cast<u64>(first_block / 8) * 8 * kKBlocks + first_block % 8) * C::kUnitBytes) {}

    HW_FN void run() {
        for (u32 i = 0; i < C::kStages - 1; ++i) load_units(i);  // weights do not depend on the previous kernel
        if constexpr (C::kLevel >= 90) { griddep_wait(); griddep_launch(); }
        for (u32 i = 0; i < C::kStages - 1; ++i) { load_x(i); copy_commit<C>(); }

        float acc[C::kWarpBlocks][kWarpTokens / 8][4];
        HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
            HW_UNROLL for (u32 n = 0; n < kWarpTokens / 8; ++n)
                HW_UNROLL for (int e = 0; e < 4; ++e) acc[r][n][e] = 0;
        u32 x_row[kWarpTokens / 8], x_swizzle[kWarpTokens / 8];
        HW_UNROLL for (u32 n = 0; n < kWarpTokens / 8; ++n) {
            const u32 token = smaller(token_warp * kWarpTokens + n * 8 + lane % 8, tokens - 1);
            x_row[n] = kUnits + token * 256;
            x_swizzle[n] = token & 7;
        }
        for (u32 block = 0; block < kKBlocks; ++block) {
            if constexpr (C::kMover == kCpAsync) cp_async_wait<C::kStages - 2>();
            syncthreads();  // stage `block` is here for all, and all have left the stage that is filled next
            load_units(block + C::kStages - 1);
            load_x(block + C::kStages - 1);
            copy_commit<C>();
            const u32 stage = smem + block % C::kStages * kStageBytes;
            u32 unit[C::kWarpBlocks];
            HW_UNROLL for (u32 r = 0; r < C::kWarpBlocks; ++r) unit[r] = stage + smaller(row_warp * C::kWarpBlocks + r, num_blocks - 1) * C::kUnitBytes;
            multiply_units<C>(acc, unit, [&](u32 (&b)[kWarpTokens / 8][4], int pair) {
                HW_UNROLL for (u32 n = 0; n < kWarpTokens / 8; ++n) ldmatrix_x4(b[n], stage + x_row[n] + (((pair * 4 + lane / 8) ^ x_swizzle[n]) << 4));
            }, [] {});
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
            store_quad<C>(p, token0 + token, out, sum, load_affine<C>(p, out));
        }
    }

    HW_FN void load_units(u32 block) {
        if (block >= kKBlocks) return;
        const u32 target = smem + block % C::kStages * kStageBytes;
        const u8* const from = units + static_cast<u64>(block) * panel_blocks * C::kUnitBytes;
        for (u32 i = tid_x() * 16; i < num_blocks * C::kUnitBytes; i += kThreads * 16) copy_16<C>(target + i, from + i);
    }
    HW_FN void load_x(u32 block) {
        if (block >= kKBlocks) return;
        const u32 target = smem + block % C::kStages * kStageBytes + kUnits;
        for (u32 i = tid_x(); i < tokens * 16; i += kThreads) {
            const u32 token = i / 16, chunk = i % 16, to = target + token * 256 + ((chunk ^ (token & 7)) << 4);
            const u8* const from = p.x + (token0 + token) * p.x_pitch + block * 256 + chunk * 16;
            if (C::kK % 128 == 0 || block * 128 + chunk * 8 < C::kK) copy_16<C>(to, from);
            else st_shared_v4(to, U4{0, 0, 0, 0});  // k past the end multiplies zero codes, but must not be NaN
        }
    }
};
}  // namespace lowbit

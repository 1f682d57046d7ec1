// Family `stream_wgmma` (Hopper): few tokens, a race against memory as in stream.cuh, where products by mma.sync would be the bottleneck.
// Wiring only: conversion and products are in product.cuh, sums in reduce.cuh, output in epilogue.cuh.
//
// A block is kRowWarps / 4 x kKWarps warpgroups; a warpgroup owns 64 kWarpBlocks rows and every kKWarps-th k block of 128. A cluster of
// kSplit blocks cuts k once more. Each warpgroup has its own ring: a stage is the units of its rows (one contiguous copy) and the tokens' x of
// the k block (two tensor copies, swizzled as wgmma wants it, zeros past the end of tokens and k). One barrier a stage counts both;
// the units are asked for before the wait for the previous kernel, x after it. The warpgroup's barrier orders a refill after all reads of the stage,
// without a proxy fence: by then every code has gone through a product that was waited for (docs/notes/2026-12-01-proxy-fence.md).
#pragma once
#include "product.cuh"
#include "reduce.cuh"
#include "ring.cuh"

namespace lowbit {
template <class C> struct StreamWgmma {
    static constexpr u32 kThreads = C::kRowWarps * C::kKWarps * 32, kTokenTiles = C::kTokens / 8, kRegs = C::kTokens / 2;
    static constexpr u32 kRowWarpgroups = C::kRowWarps / 4, kWarpgroupBlocks = 4 * C::kWarpBlocks, kTileBlocks = kRowWarpgroups * kWarpgroupBlocks;
    static constexpr u32 kRowBlocks = (C::kN + 15) / 16, kKBlocks = (C::kK + 127) / 128;
    static constexpr u32 kXHalf = C::kTokens * C::kXBox * 2, kXStage = 2 * kXHalf;  // of 64 k: eight tokens are 1024 bytes, a token 128
    static constexpr u32 kUnitsStage = kWarpgroupBlocks * C::kUnitBytes, kUnits = C::kStages * kXStage;  // in a warpgroup's ring x comes first
    static constexpr u32 kRing = (kUnits + C::kStages * kUnitsStage + 1023) / 1024 * 1024, kBars = C::kSmemBars;
    static_assert(kBars == C::kKWarps * kRowWarpgroups * kRing, "plan/plan.py and stream_wgmma.cuh disagree");
    static_assert(C::kXBox == 64, "a row of a tensor copy is the 128 bytes of a swizzle");
    using Reduce = lowbit::Reduce<C>;
    static constexpr u32 kPartials = C::kTokens * Reduce::Partial::kTokenBytes;  // of a warp, where its ring was
    static_assert(4 * kPartials <= kRing, "partial sums reuse the ring of their warpgroup");
    static_assert(C::kRowWarps % 4 == 0 && 8 % kWarpgroupBlocks == 0, "a warpgroup's rows lie in one panel, so that its units are contiguous");

    const Params& p;
    const u32 warp, warpgroup, k_warp, rank, tile, ring, bars;
    const u32 k_begin, k_end;           // k blocks of this block's slice
    const u64 token0;
    const u32 tokens;                   // of this block, 1..kTokens
    const u32 first_block, num_blocks;  // row blocks of this warpgroup; past the last row it repeats the last ones, and nobody stores them
    const u32 panel_blocks;
    const bool leader;                  // the thread that asks for copies

    HW_FN explicit StreamWgmma(const Params& params)
        : p(params), warp(warp_uniform(tid_x() / 32)), warpgroup(warp / 4), k_warp(warpgroup / kRowWarpgroups), rank(C::kSplit > 1 ? ctaid_x() % C::kSplit : 0), tile(ctaid_x() / C::kSplit),
          ring(smem_base() + warpgroup * kRing), bars(smem_base() + kBars + warpgroup * 8 * C::kStages), k_begin(rank * kKBlocks / C::kSplit), k_end((rank + 1) * kKBlocks / C::kSplit),
          token0(static_cast<u64>(ctaid_y()) * C::kTokens), tokens(static_cast<u32>(smaller<u64>(p.m - token0, C::kTokens))),
          first_block(smaller(tile * kTileBlocks + warpgroup % kRowWarpgroups * kWarpgroupBlocks, (kRowBlocks - 1) / kWarpgroupBlocks * kWarpgroupBlocks)),
          num_blocks(smaller<u32>(kWarpgroupBlocks, kRowBlocks - first_block)), panel_blocks(smaller<u32>(8, kRowBlocks - first_block / 8 * 8)), leader(tid_x() % 128 == 0) {}

    HW_FN void run() {
        const u32 stages = k_begin + k_warp < k_end ? (k_end - k_begin - k_warp + C::kKWarps - 1) / C::kKWarps : 0;
        const u64 policy = l2_evict_first();
        if (leader) {
            HW_UNROLL for (u32 s = 0; s < C::kStages; ++s) mbar_init(bars + 8 * s, 1);
            fence_mbar_init();
            HW_UNROLL for (u32 s = 0; s < C::kStages; ++s)
                if (s < stages) load_units(s, s, policy);
        }
        const Reduce reduce(p, tile, rank, token0, tokens);
        bar_sync(1 + warpgroup, 128);  // barriers are visible to all; still before the wait, so off the critical path
        griddep_wait();
        griddep_launch();  // not earlier: see stream.cuh
        if (leader)
            HW_UNROLL for (u32 s = 0; s < C::kStages; ++s)
                if (s < stages) load_x(s, s);

        Regs<float, kRegs> sums[C::kWarpBlocks];
        HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
            HW_UNROLL for (u32 e = 0; e < kRegs; ++e) sums[r][e] = 0;
        u32 slot = 0, phase = 0;
        for (u32 i = 0; i < stages; ++i) {
            mbar_wait(bars + 8 * slot, phase);
            u32 unit[C::kWarpBlocks];
            HW_UNROLL for (u32 r = 0; r < C::kWarpBlocks; ++r) unit[r] = ring + kUnits + slot * kUnitsStage + smaller(warp % 4 * C::kWarpBlocks + r, num_blocks - 1) * C::kUnitBytes;
            const u64 desc = static_cast<u64>((ring + slot * kXStage) >> 4) | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;  // mode 1: swizzled by 128 bytes
            multiply_units_wgmma<C>(sums, unit, desc, [](int step) { return static_cast<u64>(step / 4 * kXHalf + step % 4 * 32) >> 4; });
            bar_sync(1 + warpgroup, 128);  // all four warps have read the stage
            if (leader && i + C::kStages < stages) {
                load_units(i + C::kStages, slot, policy);
                load_x(i + C::kStages, slot);
            }
            if (++slot == C::kStages) { slot = 0; phase ^= 1; }
        }
        // As many barriers as the longest warpgroup: compute-sanitizer's racecheck compares their number, whatever their names.
        if (stages < (k_end - k_begin + C::kKWarps - 1) / C::kKWarps) bar_sync(1 + warpgroup, 128);
        float acc[C::kWarpBlocks][kTokenTiles][4];
        HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
            HW_UNROLL for (u32 e = 0; e < kRegs; ++e) acc[r][e / 4][e % 4] = sums[r][e];
        store_partials(ring + warp % 4 * kPartials, Reduce::Partial::kTokenBytes, acc, tokens);
        reduce.run([&](u32 r, u32 k) { return smem_base() + (k * kRowWarpgroups + r / 4) * kRing + r % 4 * kPartials; });
    }

    HW_FN void load_units(u32 i, u32 slot, u64 policy) const {  // and says that x will come to the same barrier
        const u32 bytes = num_blocks * C::kUnitBytes, block = k_begin + k_warp + i * C::kKWarps;
        const u8* const from = p.units + (static_cast<u64>(first_block / 8) * 8 * kKBlocks + static_cast<u64>(block) * panel_blocks + first_block % 8) * C::kUnitBytes;
        mbar_arrive_expect_tx(bars + 8 * slot, bytes + kXStage);
        bulk_load_hint(ring + kUnits + slot * kUnitsStage, from, bytes, bars + 8 * slot, policy);
    }
    HW_FN void load_x(u32 i, u32 slot) const {
        const u32 k = (k_begin + k_warp + i * C::kKWarps) * 128, to = ring + slot * kXStage;
        HW_UNROLL for (u32 half = 0; half < 2; ++half) tma_load_2d(to + half * kXHalf, &p.x_map, static_cast<int>(k + half * C::kXBox), static_cast<int>(token0), bars + 8 * slot);
    }
};
}  // namespace lowbit

// Family `stream`: few tokens, a race against memory. Every warp streams its own rows and k through its own ring of stages.
// Wiring only: conversion and products are in product.cuh, the ring in ring.cuh, sums in reduce.cuh, output in epilogue.cuh.
//
// A block is kRowWarps x kKWarps warps; a warp owns kWarpBlocks row blocks of 16 and every kStride-th k block of 128 of its slice of k. Slices
// are the kSplit blocks of a cluster, and in a block kSlices groups of k warps, for the same order of sums. All tokens' x of the block's k slice are staged in shared memory, in kXChunks pieces that arrive one by one.
// Rings are full before the wait for the previous kernel: weights never depend on it (1.7 us a kernel on an H200).
#pragma once
#include "product.cuh"
#include "reduce.cuh"
#include "ring.cuh"

namespace lowbit {
template <class C> struct Stream {
    static constexpr u32 kWarps = C::kRowWarps * C::kKWarps, kThreads = kWarps * 32, kTokenTiles = (C::kTokens + 7) / 8;
    static constexpr u32 kRowBlocksPerTile = C::kRowWarps * C::kWarpBlocks, kTileRows = kRowBlocksPerTile * 16;
    static constexpr u32 kRowBlocks = (C::kN + 15) / 16, kKBlocks = (C::kK + 127) / 128;
    static constexpr u32 kSliceBlocks = (kKBlocks + C::kSplit - 1) / C::kSplit;               // k blocks of the largest slice
    static constexpr u32 kChunkBlocks = (kSliceBlocks + C::kXChunks - 1) / C::kXChunks;
    static constexpr u32 kXPitch = kSliceBlocks * 256 + 16;                                   // +16: ldmatrix without bank conflicts
    static constexpr u32 kStageBytes = C::kWarpBlocks * C::kUnitBytes;
    static constexpr u32 kWarpRing = C::kStages * kStageBytes;
    static constexpr u32 kX = kWarps * kWarpRing, kBars = kX + C::kTokens * kXPitch;
    static constexpr u32 kRingBars = kBars + 8 * C::kXChunks;
    static_assert(kX == C::kSmemX && kBars == C::kSmemBars, "plan/plan.py and stream.cuh disagree");
    using Partial = PartialTile<C::kWarpBlocks * 16>;
    static_assert(C::kTokens * Partial::kTokenBytes <= kWarpRing, "partial sums reuse the ring of their warp");
    using Reduce = lowbit::Reduce<C>;

    static constexpr bool kBulkX = C::kMover == kBulk && C::kTokens > 4;  // for few tokens 16-byte copies arrive sooner (0.4 us, H200)
    static constexpr u32 kStride = C::kKWarps / C::kSlices;  // from one k block of a warp to the next

    const Params& p;
    const u32 smem, lane, warp, row_warp, k_warp, rank, tile;
    const u32 k_begin, k_end;           // k blocks of this block's slice
    const u32 first_k, last_k;          // k blocks of this warp: every kStride-th of a slice within it
    const u64 token0;
    const u32 tokens;                   // of this block, 1..kTokens
    const u32 first_block, num_blocks;  // row blocks of this warp; num_blocks may be 0 in the last tile

    HW_FN explicit Stream(const Params& params)
        : p(params), smem(smem_base()), lane(lane_id()), warp(warp_uniform(tid_x() / 32)), row_warp(warp % C::kRowWarps), k_warp(warp / C::kRowWarps),
          rank(C::kSplit > 1 ? ctaid_x() % C::kSplit : 0), tile(ctaid_x() / C::kSplit), k_begin(slice_begin(rank * C::kSlices)), k_end(slice_begin((rank + 1) * C::kSlices)),
          first_k(slice_begin(rank * C::kSlices + k_warp / kStride) + k_warp % kStride), last_k(slice_begin(rank * C::kSlices + k_warp / kStride + 1)),
          token0(static_cast<u64>(ctaid_y()) * C::kTokens), tokens(static_cast<u32>(smaller<u64>(p.m - token0, C::kTokens))),
          first_block(tile * kRowBlocksPerTile + row_warp * C::kWarpBlocks),
          num_blocks(first_block < kRowBlocks ? smaller<u32>(C::kWarpBlocks, kRowBlocks - first_block) : 0) {}

    HW_FN static u32 slice_begin(u32 i) { return i * kKBlocks / (C::kSplit * C::kSlices); }

    HW_FN void run() {
        WarpRing<C> ring(smem + warp * kWarpRing, smem + kRingBars + warp * 8 * C::kStages);
        ring.init();
        const u32 stages = num_blocks && first_k < last_k ? (last_k - first_k + kStride - 1) / kStride : 0;
        const u32 panel = first_block / 8, panel_blocks = smaller<u32>(8, kRowBlocks - panel * 8);
        const u8* const units = p.units + (static_cast<u64>(panel) * 8 * kKBlocks + static_cast<u64>(first_k) * panel_blocks + first_block % 8) * C::kUnitBytes;
        if constexpr (C::kMover != kBulk) begin_x();
        ring.start(units, kStride * panel_blocks * C::kUnitBytes, num_blocks * C::kUnitBytes, stages);
        Reduce reduce(p, tile, rank, token0, tokens);
        if constexpr (C::kMover == kBulk) {
            zero_x_tail();
            if (tid_x() == 0)
                for (u32 c = 0; c < C::kXChunks; ++c) mbar_init(smem + kBars + 8 * c, 1);
            fence_mbar_init();
            syncthreads();  // barriers and zeros are visible to all; still before the wait, so off the critical path
            griddep_wait();
            griddep_launch();  // right after the wait: 11.4 us against 17.6 at the top of the kernel (8192x8192, H200)
            if constexpr (kBulkX) {
                for (u32 c = warp; c < C::kXChunks; c += kWarps) load_x_chunk(c);
            } else {
                begin_x();
                cp_async_wait<0>();
                syncthreads();
            }
        } else {
            zero_x_tail();
            if constexpr (C::kMover == kCpAsync) cp_async_wait<C::kStages>();  // x was issued before the ring
            syncthreads();
        }

        float acc[C::kWarpBlocks][kTokenTiles][4];
        HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
            HW_UNROLL for (u32 n = 0; n < kTokenTiles; ++n)
                HW_UNROLL for (int e = 0; e < 4; ++e) acc[r][n][e] = 0;
        u32 x_address[kTokenTiles];  // of this lane's row of the 8x8 matrices: tokens past the end repeat the last one
        HW_UNROLL for (u32 n = 0; n < kTokenTiles; ++n) x_address[n] = smem + kX + smaller(n * 8 + lane % 8, tokens - 1) * kXPitch + lane / 8 * 16;
        u32 seen = 0;  // x chunks known to be here
        for (u32 i = 0; i < stages; ++i) {
            const u32 block = first_k - k_begin + i * kStride;  // within the block's slice
            if constexpr (kBulkX)
                for (; seen <= block / kChunkBlocks; ++seen) mbar_wait(smem + kBars + 8 * seen, 0);
            const u32 stage = ring.wait();
            u32 unit[C::kWarpBlocks];
            HW_UNROLL for (u32 r = 0; r < C::kWarpBlocks; ++r) unit[r] = stage + smaller(r, num_blocks - 1) * C::kUnitBytes;
            multiply_units<C>(acc, unit, [&](u32 (&b)[kTokenTiles][4], int pair) {
                HW_UNROLL for (u32 n = 0; n < kTokenTiles; ++n) ldmatrix_x4(b[n], x_address[n] + block * 256 + pair * 64);
            }, [&] { ring.release(); });
        }
        if constexpr (C::kMover == kCpAsync) cp_async_wait<0>();  // trailing empty groups
        syncwarp();
        if (num_blocks) store_partials(smem + warp * kWarpRing, Partial::kTokenBytes, acc, tokens);
        reduce.run([&](u32 r, u32 k) { return smem + (k * C::kRowWarps + r) * kWarpRing; });
    }

    // ---- x -----------------------------------------------------------------------------------------------------------------
    HW_FN u32 slice_bytes() const { return smaller<u32>(k_end * 128, C::kK) * 2 - k_begin * 256; }  // of one token
    HW_FN const u8* x_row(u32 token) const { return p.x + (token0 + token) * p.x_pitch + k_begin * 256; }

    HW_FN void zero_x_tail() {  // k past the end multiplies zero codes, but must not be NaN
        if constexpr (C::kK % 128 != 0) {
            const u32 vectors = (k_end - k_begin) * 16 - slice_bytes() / 16;
            for (u32 i = tid_x(); i < tokens * vectors; i += kThreads)
                st_shared_v4(smem + kX + i / vectors * kXPitch + slice_bytes() + i % vectors * 16, U4{0, 0, 0, 0});
        }
    }
    HW_FN void load_x_chunk(u32 c) {  // one warp: a lane copies its token's piece
        const u32 begin = smaller(c * kChunkBlocks * 256, slice_bytes()), end = smaller((c + 1) * kChunkBlocks * 256, slice_bytes());
        const u32 bar = smem + kBars + 8 * c;
        if (lane == 0) mbar_arrive_expect_tx(bar, (end - begin) * tokens);
        syncwarp();
        if (end > begin)
            for (u32 token = lane; token < tokens; token += 32) bulk_load(smem + kX + token * kXPitch + begin, x_row(token) + begin, end - begin, bar);
    }
    HW_FN void begin_x() {  // all threads, one group of copies
        const u32 vectors = slice_bytes() / 16;
        for (u32 i = tid_x(); i < tokens * vectors; i += kThreads)
            copy_16<C>(smem + kX + i / vectors * kXPitch + i % vectors * 16, x_row(i / vectors) + i % vectors * 16);
        copy_commit<C>();
    }
};
}  // namespace lowbit

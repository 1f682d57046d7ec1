// Family `stream`: few tokens, a race against memory. Every warp streams its own rows and k through its own ring of stages.
// Wiring only: conversion and products are in product.cuh, the ring in ring.cuh, sums and output in epilogue.cuh.
//
// A block is kRowWarps x kKWarps warps; a warp owns kWarpBlocks row blocks of 16 and every kKWarps-th k block of 128. A cluster of kSplit
// blocks cuts k once more. All tokens' x of the block's k slice are staged in shared memory, in kXChunks pieces that arrive one by one.
// Rings are full before the wait for the previous kernel: weights never depend on it (1.7 us a kernel on an H200).
// kWgmma: four warps share their k (a warpgroup) and multiply by wgmma; x then lies as its descriptors want it.
#pragma once
#include "epilogue.cuh"
#include "product.cuh"
#include "ring.cuh"

namespace lowbit {
template <class C> struct Stream {
    static constexpr u32 kWarps = C::kRowWarps * C::kKWarps, kThreads = kWarps * 32, kTokenTiles = (C::kTokens + 7) / 8;
    static constexpr u32 kRowBlocksPerTile = C::kRowWarps * C::kWarpBlocks, kTileRows = kRowBlocksPerTile * 16;
    static constexpr u32 kRowBlocks = (C::kN + 15) / 16, kKBlocks = (C::kK + 127) / 128;
    static constexpr u32 kSliceBlocks = (kKBlocks + C::kSplit - 1) / C::kSplit;               // k blocks of the largest slice
    static constexpr u32 kChunkBlocks = (kSliceBlocks + C::kXChunks - 1) / C::kXChunks;
    static constexpr u32 kXPitch = kSliceBlocks * 256 + (C::kWgmma ? 0 : 16);                 // +16: ldmatrix without bank conflicts
    static constexpr u32 kXVectors = kSliceBlocks * 16;                                       // of 16 bytes, of a token
    static constexpr u32 kXTokens = C::kWgmma ? kTokenTiles * 8 : C::kTokens;
    static constexpr u32 kStageBytes = C::kWarpBlocks * C::kUnitBytes;
    static constexpr u32 kWarpRing = C::kStages * kStageBytes;
    static constexpr u32 kX = C::kWgmma ? (kWarps * kWarpRing + 1023) / 1024 * 1024 : kWarps * kWarpRing, kBars = kX + kXTokens * kXPitch;
    static constexpr u32 kRingBars = kBars + 8 * C::kXChunks;
    static_assert(kX == C::kSmemX && kBars == C::kSmemBars, "plan/plan.py and stream.cuh disagree");
    using Partial = PartialTile<C::kWarpBlocks * 16>;
    static_assert(C::kTokens * Partial::kTokenBytes <= kWarpRing, "partial sums reuse the ring of their warp");
    static_assert(kTileRows / 4 % C::kSplit == 0, "each block of a cluster finishes an equal share of the rows");
    static_assert(!C::kWgmma || C::kRowWarps % 4 == 0, "the warps of a warpgroup share their k");

    static constexpr bool kBulkX = C::kMover == kBulk && C::kTokens > 4 && !C::kWgmma;  // for few tokens 16-byte copies arrive sooner (0.4 us, H200)

    const Params& p;
    const u32 smem, lane, warp, row_warp, k_warp, rank, tile;
    const u32 k_begin, k_end;           // k blocks of this block's slice
    const u64 token0;
    const u32 tokens;                   // of this block, 1..kTokens
    const u32 first_block, num_blocks;  // row blocks of this warp; num_blocks may be 0 in the last tile

    HW_FN explicit Stream(const Params& params)
        : p(params), smem(smem_base()), lane(lane_id()), warp(warp_uniform(tid_x() / 32)), row_warp(warp % C::kRowWarps), k_warp(warp / C::kRowWarps),
          rank(C::kSplit > 1 ? ctaid_x() % C::kSplit : 0), tile(ctaid_x() / C::kSplit), k_begin(rank * kKBlocks / C::kSplit), k_end((rank + 1) * kKBlocks / C::kSplit),
          token0(static_cast<u64>(ctaid_y()) * C::kTokens), tokens(static_cast<u32>(smaller<u64>(p.m - token0, C::kTokens))),
          first_block(warps_first_block(tile * kRowBlocksPerTile + row_warp * C::kWarpBlocks)),
          num_blocks(first_block < kRowBlocks ? smaller<u32>(C::kWarpBlocks, kRowBlocks - first_block) : 0) {}

    // wgmma needs all four warps: those past the last row repeat the last row blocks, and nobody stores their sums.
    HW_FN static u32 warps_first_block(u32 block) { return C::kWgmma ? smaller(block, (kRowBlocks - 1) / C::kWarpBlocks * C::kWarpBlocks) : block; }

    HW_FN void run() {
        WarpRing<C> ring(smem + warp * kWarpRing, smem + kRingBars + warp * 8 * C::kStages);
        ring.init();
        const u32 stages = num_blocks && k_begin + k_warp < k_end ? (k_end - k_begin - k_warp + C::kKWarps - 1) / C::kKWarps : 0;
        const u32 panel = first_block / 8, panel_blocks = smaller<u32>(8, kRowBlocks - panel * 8);
        const u8* const units = p.units + (static_cast<u64>(panel) * 8 * kKBlocks + static_cast<u64>(k_begin + k_warp) * panel_blocks + first_block % 8) * C::kUnitBytes;
        if constexpr (C::kMover != kBulk) begin_x();
        ring.start(units, C::kKWarps * panel_blocks * C::kUnitBytes, num_blocks * C::kUnitBytes, stages);
        const Affine first_affine = load_affine<C>(p, tile * kTileRows + (rank * kQuads + tid_x() % kQuads) * 4);
        zero_x();
        if constexpr (C::kMover == kBulk) {
            if (kBulkX && tid_x() == 0)
                for (u32 c = 0; c < C::kXChunks; ++c) mbar_init(smem + kBars + 8 * c, 1);
            fence_mbar_init();
            syncthreads();  // barriers and zeros are visible to all; still before the wait, so off the critical path
            griddep_wait();
            griddep_launch();  // right after the wait: 11.4 us against 17.6 at the top of the kernel (8192x8192, H200)
            if constexpr (kBulkX) {
                for (u32 c = warp; c < C::kXChunks; c += kWarps) load_x_chunk(c);
            } else {
                begin_x();
                if constexpr (!C::kWgmma) {
                    cp_async_wait<0>();
                    syncthreads();
                }
            }
        } else {
            if constexpr (C::kMover == kCpAsync) cp_async_wait<C::kStages>();  // x was issued before the ring
            syncthreads();
        }
        if constexpr (C::kWgmma) multiply_wgmma(ring, stages); else multiply(ring, stages);
        finish(first_affine);
    }

    // ---- products ------------------------------------------------------------------------------------------------------------
    HW_FN void units_of(u32 (&unit)[C::kWarpBlocks], u32 stage) const {
        HW_UNROLL for (u32 r = 0; r < C::kWarpBlocks; ++r) unit[r] = stage + smaller(r, num_blocks - 1) * C::kUnitBytes;
    }
    HW_FN void multiply(WarpRing<C>& ring, u32 stages) {
        float acc[C::kWarpBlocks][kTokenTiles][4];
        HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
            HW_UNROLL for (u32 n = 0; n < kTokenTiles; ++n)
                HW_UNROLL for (int e = 0; e < 4; ++e) acc[r][n][e] = 0;
        u32 x_address[kTokenTiles];  // of this lane's row of the 8x8 matrices: tokens past the end repeat the last one
        HW_UNROLL for (u32 n = 0; n < kTokenTiles; ++n) x_address[n] = smem + kX + smaller(n * 8 + lane % 8, tokens - 1) * kXPitch + lane / 8 * 16;
        u32 seen = 0;  // x chunks known to be here
        for (u32 i = 0; i < stages; ++i) {
            const u32 block = k_warp + i * C::kKWarps;  // within the slice
            if constexpr (kBulkX)
                for (; seen <= block / kChunkBlocks; ++seen) mbar_wait(smem + kBars + 8 * seen, 0);
            u32 unit[C::kWarpBlocks];
            units_of(unit, ring.wait());
            multiply_units<C>(acc, unit, [&](u32 (&b)[kTokenTiles][4], int pair) {
                HW_UNROLL for (u32 n = 0; n < kTokenTiles; ++n) ldmatrix_x4(b[n], x_address[n] + block * 256 + pair * 64);
            }, [&] { ring.release(); });
        }
        store(acc);
    }
    HW_FN void multiply_wgmma(WarpRing<C>& ring, u32 stages) {
        Regs<float, kTokenTiles * 4> sums[C::kWarpBlocks];
        HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
            HW_UNROLL for (u32 e = 0; e < kTokenTiles * 4; ++e) sums[r][e] = 0;
        // rows of 128 bytes, swizzled by 128; eight tokens are 1024 bytes, 64 of k are kXTokens * 128
        const u64 desc = static_cast<u64>((smem + kX) >> 4) | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
        u32 seen = 0;
        for (u32 i = 0; i < stages; ++i) {
            const u32 block = k_warp + i * C::kKWarps;
            for (; seen <= block / kChunkBlocks; ++seen) wait_x_chunk(seen);
            u32 unit[C::kWarpBlocks];
            units_of(unit, ring.wait());
            multiply_units_wgmma<C>(sums, unit, desc + block * (kXTokens * 256 >> 4), [](int step) { return static_cast<u64>(step / 4 * (kXTokens * 128) + step % 4 * 32) >> 4; },
                                    [&] { ring.release(); });
        }
        wgmma_wait<0>();
        for (; seen < C::kXChunks; ++seen) wait_x_chunk(seen);  // all warps meet at each
        float acc[C::kWarpBlocks][kTokenTiles][4];
        HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
            HW_UNROLL for (u32 e = 0; e < kTokenTiles * 4; ++e) acc[r][e / 4][e % 4] = sums[r][e];
        store(acc);
    }
    HW_FN void store(const float (&acc)[C::kWarpBlocks][kTokenTiles][4]) {  // into this warp's ring, which is done
        if constexpr (C::kMover == kCpAsync) cp_async_wait<0>();  // trailing empty groups
        syncwarp();
        if (num_blocks) store_partials(smem + warp * kWarpRing, Partial::kTokenBytes, acc, tokens);
    }

    // ---- x -----------------------------------------------------------------------------------------------------------------
    HW_FN u32 slice_bytes() const { return smaller<u32>(k_end * 128, C::kK) * 2 - k_begin * 256; }  // of one token
    HW_FN const u8* x_row(u32 token) const { return p.x + (token0 + token) * p.x_pitch + k_begin * 256; }

    HW_FN static u32 x_at(u32 token, u32 vector) {  // of 16 bytes
        if constexpr (C::kWgmma) return kX + vector / 8 * (kXTokens * 128) + token / 8 * 1024 + token % 8 * 128 + (vector ^ token) % 8 * 16;
        return kX + token * kXPitch + vector * 16;
    }
    HW_FN void zero_x() {  // k past the end multiplies zero codes, but must not be NaN; wgmma also reads tokens past the end
        if constexpr (C::kK % 128 != 0) {
            const u32 vectors = (k_end - k_begin) * 16 - slice_bytes() / 16;
            for (u32 i = tid_x(); i < tokens * vectors; i += kThreads) st_shared_v4(smem + x_at(i / vectors, slice_bytes() / 16 + i % vectors), U4{0, 0, 0, 0});
        }
        if constexpr (C::kWgmma)
            for (u32 i = tid_x(); i < (kXTokens - tokens) * kXVectors; i += kThreads) st_shared_v4(smem + x_at(tokens + i / kXVectors, i % kXVectors), U4{0, 0, 0, 0});
    }
    HW_FN void load_x_chunk(u32 c) {  // one warp: a lane copies its token's piece
        const u32 begin = smaller(c * kChunkBlocks * 256, slice_bytes()), end = smaller((c + 1) * kChunkBlocks * 256, slice_bytes());
        const u32 bar = smem + kBars + 8 * c;
        if (lane == 0) mbar_arrive_expect_tx(bar, (end - begin) * tokens);
        syncwarp();
        if (end > begin)
            for (u32 token = lane; token < tokens; token += 32) bulk_load(smem + kX + token * kXPitch + begin, x_row(token) + begin, end - begin, bar);
    }
    HW_FN void begin_x() {  // all threads; each chunk is one group of copies
        const u32 vectors = slice_bytes() / 16;
        constexpr u32 kChunkVectors = kChunkBlocks * 16;
        HW_UNROLL for (u32 c = 0; c < (C::kWgmma ? C::kXChunks : 1); ++c) {
            constexpr u32 kVectors = C::kWgmma ? kChunkVectors : kXVectors;
            for (u32 i = tid_x(); i < tokens * kVectors; i += kThreads) {
                const u32 token = i / kVectors, vector = c * kVectors + i % kVectors;
                if (vector < vectors) copy_16<C>(smem + x_at(token, vector), x_row(token) + vector * 16);
            }
            copy_commit<C>();
        }
    }
    HW_FN void wait_x_chunk(u32 c) {  // all threads' copies of chunk c are here, and wgmma sees them
        if (c == 0) cp_async_wait<C::kXChunks - 1>();
        else if (c == 1) cp_async_wait<(C::kXChunks > 2 ? C::kXChunks - 2 : 0)>();
        else if (c == 2) cp_async_wait<(C::kXChunks > 3 ? C::kXChunks - 3 : 0)>();
        else cp_async_wait<0>();
        fence_async();
        syncthreads();
    }

    // ---- sum over k warps and cluster blocks, in that order always ------------------------------------------------------------
    static constexpr u32 kQuads = kTileRows / 4 / C::kSplit;  // groups of four rows this block finishes, per token
    HW_FN void finish(const Affine& first) {
        if constexpr (C::kSplit > 1) { cluster_arrive(); cluster_wait(); } else syncthreads();
        for (u32 id = tid_x(); id < kQuads * tokens; id += kThreads) {
            const u32 token = id / kQuads, row = (rank * kQuads + id % kQuads) * 4;  // row within the tile
            if (tile * kTileRows + row >= C::kN) continue;
            const u32 rows = C::kWarpBlocks * 16, at = smem + row / rows * kWarpRing + token * Partial::kTokenBytes + row % rows * 4;
            float sum[4] = {0, 0, 0, 0};
            HW_UNROLL for (u32 s = 0; s < C::kSplit; ++s) {
                const u32 remote = C::kSplit > 1 ? mapa(at, s) : at;
                HW_UNROLL for (u32 k = 0; k < C::kKWarps; ++k) {
                    const u32 from = remote + k * C::kRowWarps * kWarpRing;
                    U4 v;
                    if constexpr (C::kSplit > 1) v = ld_cluster_v4(from); else v = ld_shared_v4(from);
                    sum[0] = add_f32(sum[0], as_f32(v.x));
                    sum[1] = add_f32(sum[1], as_f32(v.y));
                    sum[2] = add_f32(sum[2], as_f32(v.z));
                    sum[3] = add_f32(sum[3], as_f32(v.w));
                }
            }
            const u32 out = tile * kTileRows + row;
            store_quad<C>(p, token0 + token, out, sum, kThreads % kQuads == 0 || id < kThreads ? first : load_affine<C>(p, out));
        }
        if constexpr (C::kSplit > 1) { cluster_arrive_relaxed(); cluster_wait(); }  // no block leaves while its sums are being read
    }
};
}  // namespace lowbit

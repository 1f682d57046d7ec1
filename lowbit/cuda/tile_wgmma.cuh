// Family `tile_wgmma` (Hopper): many tokens, a race of the tensor cores, which must never run dry.
// Wiring only: conversion is in dequant.cuh and product.cuh, sums over a cluster in reduce.cuh, output in epilogue.cuh.
//
// A block is kRowWarps / 4 consumer warpgroups and one producer. A consumer owns 64 kWarpBlocks rows of the tile and all its tokens. One thread of the
// producer asks for stages of 128 k: the units of all rows (one contiguous copy a panel) and x (one or two tensor copies, swizzled as wgmma wants it,
// zeros past the end of tokens and k). `full` counts their bytes, `empty` the warps that have read them. Without a cluster a block goes through tiles by turns,
// rows first, so that neighbours share x and weights stay in L2, and its ring fills for the next tile while this one is stored. A cluster of kSplit blocks
// shares one tile and cuts k.
//
// While one group of products runs (the steps of a vector of codes), the fragments of the next are converted into other registers, also across
// stages and tiles. No barrier is waited for while more than one group is under way: ptxas would serialise all products (C7513).
#pragma once
#include "product.cuh"
#include "reduce.cuh"
#include "ring.cuh"

namespace lowbit {
template <class C> struct TileWgmma {
    static constexpr u32 kConsumers = C::kRowWarps * 32, kRegs = C::kTokens / 2;
    static constexpr u32 kTileBlocks = C::kRowWarps * C::kWarpBlocks, kRowBlocks = (C::kN + 15) / 16, kKBlocks = (C::kK + 127) / 128;
    static constexpr u32 kRowTiles = (kRowBlocks + kTileBlocks - 1) / kTileBlocks, kPanels = (kTileBlocks + 7) / 8;
    static constexpr u32 kXBytes = C::kTokens * 128, kXBoxes = C::Operand::kBytes, kXStage = kXBoxes * kXBytes, kUnits = C::kStages * kXStage;
    static constexpr u32 kUnitsStage = kTileBlocks * C::kUnitBytes, kRing = kUnits + C::kStages * kUnitsStage;
    using Chunk = PartialTile<C::kWarpBlocks * 16>;  // eight tokens of a warp's rows on their way out
    static constexpr u32 kChunk = 8 * Chunk::kTokenBytes, kChunks = kRing, kBars = C::kSmemBars;
    static_assert(kBars == kChunks + C::kRowWarps * kChunk, "plan/plan.py and tile_wgmma.cuh disagree");
    static_assert(C::kXBox * C::Operand::kBytes == 128, "a row of a tensor copy is the 128 bytes of a swizzle");
    static_assert(8 % kTileBlocks == 0 || kTileBlocks % 8 == 0, "the rows of a tile are whole panels, or divide one");
    static_assert(C::kZero != kFloatZero, "float zero points need sums of x");
    // Products add up in `sums` at once or, where a group's scale is still to come, in `part`. So do those of fp8, whose sums keep 13 fraction bits after
    // every instruction: they move to fp32 every 128 k, whatever the plan. Then one row block goes through all of a stage before the next, so
    // that one `part` serves both. Sums of int8 are exact, and below 2^31 for 132096 k.
    static constexpr bool kMoves = C::Operand::kBits == 8 && !C::Operand::kExactSums && C::kStep == 0, kParts = kMoves || (C::kStep != 0 && !C::kFold);
    static constexpr int kAtOnce = kParts ? 1 : C::kWarpBlocks;  // row blocks whose codes are in registers
    using W = Weights<C, kAtOnce>;
    using Sum = typename C::Operand::Sum;
    template <bool kFloat, class S> struct SumOf { using Type = float; };
    template <class S> struct SumOf<false, S> { using Type = S; };
    using Sums = Regs<typename SumOf<kParts, Sum>::Type, kRegs>[C::kWarpBlocks];  // as the tensor core has them where nothing moves
    static constexpr int kGroups = W::kVectors * C::kWarpBlocks;  // of products, in a stage
    static_assert(kGroups % 2 == 0, "fragments take turns in two buffers, alike in every stage");

    struct Tile {  // a number of them in turn are a block's; producer and consumers count alike
        const u32 first_block, num_blocks, panel_blocks, tokens;  // row blocks, and tokens, 1..kTokens
        const u64 token0;
        HW_FN Tile(const Params& p, u32 index)
            : first_block(index % kRowTiles * kTileBlocks), num_blocks(smaller(kTileBlocks, kRowBlocks - first_block)), panel_blocks(smaller<u32>(8, kRowBlocks - first_block / 8 * 8)),
              tokens(static_cast<u32>(smaller<u64>(p.m - static_cast<u64>(index / kRowTiles) * C::kTokens, C::kTokens))), token0(static_cast<u64>(index / kRowTiles) * C::kTokens) {}
    };

    const Params& p;
    const u32 smem, warp, rank, k_begin, k_stages, tiles;  // tiles there are, this block's slice of k

    HW_FN explicit TileWgmma(const Params& params)
        : p(params), smem(smem_base()), warp(warp_uniform(tid_x() / 32)), rank(C::kSplit > 1 ? ctaid_x() % C::kSplit : 0), k_begin(rank * kKBlocks / C::kSplit),
          k_stages((rank + 1) * kKBlocks / C::kSplit - k_begin), tiles(kRowTiles * ((p.m + C::kTokens - 1) / C::kTokens)) {}

    HW_FN u32 first_tile() const { return C::kSplit > 1 ? ctaid_y() * kRowTiles + ctaid_x() / C::kSplit : ctaid_x(); }
    HW_FN u32 stride() const { return C::kSplit > 1 ? tiles : nctaid_x(); }  // to the next tile of this block
    HW_FN u32 full(u32 slot) const { return smem + kBars + 8 * slot; }
    HW_FN u32 empty(u32 slot) const { return smem + kBars + 8 * (C::kStages + slot); }

    HW_FN void run() {
        if (tid_x() == 0) {
            HW_UNROLL for (u32 s = 0; s < C::kStages; ++s) { mbar_init(full(s), 1); mbar_init(empty(s), C::kRowWarps); }
            fence_mbar_init();
        }
        syncthreads();
        if (warp >= C::kRowWarps) {
            if constexpr (C::kProducerRegs != 0) setmaxnreg_dec<C::kProducerRegs>();
            if (tid_x() == kConsumers) produce();  // the cluster's barriers in reduce.cuh wait for no thread that has exited
        } else {
            if constexpr (C::kConsumerRegs != 0) setmaxnreg_inc<C::kConsumerRegs>();
            consume();
        }
    }

    // ---- producer: one thread -----------------------------------------------------------------------------------------------
    HW_FN void produce() const {
        const u32 early = smaller<u32>(C::kStages, k_stages);
        const Tile first(p, first_tile());
        HW_NO_UNROLL for (u32 s = 0; s < early; ++s) load_units(first, k_begin + s, s);
        griddep_wait();
        griddep_launch();
        u32 slot = 0, phase = 1, count = 0;  // stages so far
        HW_NO_UNROLL for (u32 index = first_tile(); index < tiles; index += stride()) {
            const Tile tile(p, index);
            HW_NO_UNROLL for (u32 k = k_begin; k < k_begin + k_stages; ++k, ++count) {
                if (count >= C::kStages) mbar_wait(empty(slot), phase);
                if (count >= early) load_units(tile, k, slot);
                load_x(tile, k, slot);
                if (++slot == C::kStages) { slot = 0; phase ^= 1; }
            }
        }
    }
    HW_FN void load_units(const Tile& t, u32 k, u32 slot) const {  // and says that x will come to the same barrier
        const u32 to = smem + kUnits + slot * kUnitsStage;
        const u8* const from = p.units + (static_cast<u64>(t.first_block / 8) * 8 * kKBlocks + static_cast<u64>(k) * t.panel_blocks + t.first_block % 8) * C::kUnitBytes;
        mbar_arrive_expect_tx(full(slot), t.num_blocks * C::kUnitBytes + kXStage);
        bulk_load(to, from, smaller<u32>(8, t.num_blocks) * C::kUnitBytes, full(slot));
        HW_UNROLL for (u32 j = 1; j < kPanels; ++j) {
            if (t.num_blocks <= 8 * j) break;
            const u32 panel = t.first_block / 8 + j, blocks = smaller<u32>(8, kRowBlocks - panel * 8);
            bulk_load(to + j * 8 * C::kUnitBytes, p.units + (static_cast<u64>(panel) * 8 * kKBlocks + static_cast<u64>(k) * blocks) * C::kUnitBytes, blocks * C::kUnitBytes, full(slot));
        }
    }
    HW_FN void load_x(const Tile& t, u32 k, u32 slot) const {
        HW_UNROLL for (u32 box = 0; box < kXBoxes; ++box)
            tma_load_2d(smem + slot * kXStage + box * kXBytes, &p.x_map, static_cast<int>(k * 128 + box * C::kXBox), static_cast<int>(t.token0), full(slot));
    }

    // ---- consumers ----------------------------------------------------------------------------------------------------------
    HW_FN void consume() const {
        if constexpr (C::kSplit > 1) {
            const Tile tile(p, first_tile());
            const Reduce<C> reduce(p, first_tile() % kRowTiles, rank, tile.token0, tile.tokens);
            griddep_wait();
            multiply([&](u32, Sums& sums) { store_cluster(reduce, sums); });
        } else {
            griddep_wait();  // y may be what the kernel before reads
            multiply([&](u32 index, Sums& sums) { store(index, sums); });
        }
    }
    template <class Store> HW_FN void multiply(Store store_sums) const {
        W weights;
        Regs<u32, 4> a[2][W::kSteps];
        u32 unit[C::kWarpBlocks], slot = 0, phase = 0;
        auto arrive = [&](u32 index) {  // of the next stage, of that tile
            mbar_wait(full(slot), phase);
            const u32 last = smaller(kTileBlocks, kRowBlocks - index % kRowTiles * kTileBlocks) - 1;
            HW_UNROLL for (u32 r = 0; r < C::kWarpBlocks; ++r) unit[r] = smem + kUnits + slot * kUnitsStage + smaller(warp * C::kWarpBlocks + r, last) * C::kUnitBytes;
        };
        arrive(first_tile());
        convert(a[0], weights, unit, 0);
        load_sums(weights, unit, 0);
        HW_NO_UNROLL for (u32 index = first_tile(); index < tiles; index += stride()) {
            Sums sums;
            Regs<Sum, kRegs> part[kParts ? W::kGroups : 1];
            HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
                HW_UNROLL for (u32 e = 0; e < kRegs; ++e) sums[r][e] = 0;
            u32 before = 0;  // the slot of the stage before
            HW_NO_UNROLL for (u32 i = 0; i < k_stages; ++i) {
                const u32 here = slot;
                const u64 desc = static_cast<u64>((smem + here * kXStage) >> 4) | static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;  // mode 1: swizzled by 128 bytes
                auto turn = [&](const Regs<u32, 4> (&now)[W::kSteps], Regs<u32, 4> (&then)[W::kSteps], int group) {
                    const int v = vector_of(group), r = block_of(group);
                    wgmma_fence();
                    HW_UNROLL for (int step = 0; step < W::kSteps; ++step) {
                        const int k_step = v * W::kSteps + step;
                        const u64 x = desc + (static_cast<u64>(k_step / 4 * kXBytes + k_step % 4 * 32) >> 4);
                        if constexpr (!kParts) C::Operand::wgmma(sums[r], now[step], x, true);
                        else if constexpr (kMoves) C::Operand::wgmma(part[0], now[step], x, k_step > 0);
                        else C::Operand::wgmma(part[W::group(step)], now[step], x, !W::begins(v, step));
                    }
                    wgmma_commit();
                    wgmma_wait<1>();
                    if (group == 0 && i > 0) release(before);
                    if (group == kGroups - 1) {  // on to the next stage, of this tile or another; after the last one this one once more, for nobody
                        if (++slot == C::kStages) { slot = 0; phase ^= 1; }
                        const u32 next = i + 1 < k_stages ? index : index + stride();
                        if (next < tiles) arrive(next);
                    }
                    convert(then, weights, unit, (group + 1) % kGroups);
                    if constexpr (kParts) {
                        if (kMoves ? v == W::kVectors - 1 : W::ends(v, W::kSteps - 1)) {
                            wgmma_wait<0>();
                            HW_UNROLL for (int g = 0; g < W::kGroups; ++g)
                                HW_UNROLL for (u32 e = 0; e < kRegs; ++e) {
                                    if constexpr (kMoves) sums[r][e] = add_f32(sums[r][e], static_cast<float>(part[g][e]));
                                    else weights.add(sums[r][e], static_cast<float>(part[g][e]), 0, 0, g, e);
                                }
                        }
                        load_sums(weights, unit, (group + 1) % kGroups);
                    }
                };
                HW_UNROLL for (int group = 0; group < kGroups; group += 2) {
                    turn(a[0], a[1], group);
                    turn(a[1], a[0], group + 1);
                }
                before = here;
            }
            wgmma_wait<0>();
            release(before);
            store_sums(index, sums);
        }
    }
    HW_FN static constexpr int vector_of(int group) { return kParts ? group % W::kVectors : group / C::kWarpBlocks; }
    HW_FN static constexpr int block_of(int group) { return kParts ? group / W::kVectors : group % C::kWarpBlocks; }
    // The fragments of a group of products. Buffers are named by the caller, in turns: indexed by `group % 2`, some loops stayed rolled and theirs went to
    // local memory (NVRTC 13.0, fp8_e2m5_g16).
    HW_FN static void convert(Regs<u32, 4> (&a)[W::kSteps], W& weights, const u32 (&unit)[C::kWarpBlocks], int group) {
        const int v = vector_of(group), r = block_of(group);
        if constexpr (kParts) {
            const u32 one[1] = {unit[r]};
            weights.load_operands(one, v);
        } else {
            if (r == 0) weights.load_operands(unit, v);
        }
        HW_UNROLL for (int step = 0; step < W::kSteps; ++step) {
            u32 fragment[4];
            weights.fragment(fragment, kParts ? 0 : r, v, step);
            HW_UNROLL for (int i = 0; i < 4; ++i) a[step][i] = fragment[i];
            wgmma_pin(a[step]);
        }
    }
    HW_FN static void load_sums(W& weights, const u32 (&unit)[C::kWarpBlocks], int group) {  // the scales of its row block and vector
        if constexpr (kParts) {
            const u32 one[1] = {unit[block_of(group)]};
            weights.load_sums(one, vector_of(group));
        }
    }
    HW_FN void release(u32 slot) const {  // its products are done; codes are in registers since their conversion
        syncwarp();
        if (lane_id() == 0) mbar_arrive(empty(slot));
    }

    // Eight tokens at a time through shared memory of the warp, four rows a lane: 32 bytes of y side by side at least.
    HW_FN void store(u32 index, Sums& sums) const {
        const Tile tile(p, index);
        const u32 lane = lane_id(), chunk = smem + kChunks + warp * kChunk, tokens = tile.tokens, row0 = (tile.first_block + warp * C::kWarpBlocks) * 16;
        constexpr u32 kQuads = C::kWarpBlocks * 4;
        static_assert(32 % kQuads == 0, "a lane keeps its rows");
        const u32 quad = lane % kQuads * 4;
        const Affine affine = load_affine<C>(p, row0 + quad);
        float x_scale[(C::kTokens + 31) / 32];  // of token `lane` of every 32, so that no load is waited for between stores
        HW_UNROLL for (u32 j = 0; j < (C::kTokens + 31) / 32; ++j) x_scale[j] = token_scale<C>(p, tile.token0 + smaller(j * 32 + lane, tokens - 1));
        HW_UNROLL for (u32 n = 0; n < C::kTokens / 8; ++n) {
            if (n * 8 >= tokens) break;
            float some[C::kWarpBlocks][1][4];
            HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
                HW_UNROLL for (int e = 0; e < 4; ++e) some[r][0][e] = static_cast<float>(sums[r][n * 4 + e]);
            syncwarp();  // the chunk before has been read
            store_partials(chunk, Chunk::kTokenBytes, some, tokens - n * 8);
            syncwarp();
            HW_UNROLL for (u32 i = 0; i < 8 * kQuads / 32; ++i) {
                const u32 token = lane / kQuads + i * (32 / kQuads);
                float of_token = 1;
                if constexpr (C::Operand::kBits == 8) of_token = as_f32(shfl_idx(as_u32(x_scale[n / 4]), n % 4 * 8 + token));
                if (n * 8 + token >= tokens || row0 + quad >= C::kN) continue;
                const U4 v = ld_shared_v4(chunk + token * Chunk::kTokenBytes + quad * 4);
                const float sum[4] = {as_f32(v.x), as_f32(v.y), as_f32(v.z), as_f32(v.w)};
                store_quad<C>(p, tile.token0 + n * 8 + token, row0 + quad, sum, of_token, affine);
            }
        }
    }
    HW_FN void store_cluster(const Reduce<C>& reduce, Sums& sums) const {
        constexpr u32 kPartials = C::kTokens * Chunk::kTokenBytes;
        static_assert(C::kSplit == 1 || C::kRowWarps * kPartials <= kChunks, "partial sums reuse the ring");
        float acc[C::kWarpBlocks][C::kTokens / 8][4];
        HW_UNROLL for (int r = 0; r < C::kWarpBlocks; ++r)
            HW_UNROLL for (u32 e = 0; e < kRegs; ++e) acc[r][e / 4][e % 4] = static_cast<float>(sums[r][e]);
        bar_sync(1, kConsumers);  // all warps have read the ring
        store_partials(smem + warp * kPartials, Chunk::kTokenBytes, acc, reduce.tokens);
        reduce.run([&](u32 r, u32) { return smem + r * kPartials; });
    }
};
}  // namespace lowbit

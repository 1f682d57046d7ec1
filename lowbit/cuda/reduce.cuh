// From the partial sums of many warps to y: added over the warps that cut k, then over the blocks of a cluster, in that order always.
// Knows where partial sums lie (a functor says) and who adds which rows; it must not know how they were made.
#pragma once
#include "epilogue.cuh"

namespace lowbit {
template <class C> struct Reduce {
    static constexpr u32 kThreads = C::kRowWarps * C::kKWarps * 32, kWarpRows = C::kWarpBlocks * 16, kTileRows = C::kRowWarps * kWarpRows;
    static constexpr u32 kTileQuads = kTileRows / 4, kQuads = (kTileQuads + C::kSplit - 1) / C::kSplit;  // groups of four rows this block finishes, per token
    using Partial = PartialTile<kWarpRows>;

    const Params& p;
    const u32 tile, rank;
    const u64 token0;
    const u32 tokens;
    const Affine first;  // of this thread's first quad, loaded long before it is needed

    HW_FN Reduce(const Params& params, u32 tile_, u32 rank_, u64 token0_, u32 tokens_)
        : p(params), tile(tile_), rank(rank_), token0(token0_), tokens(tokens_), first(load_affine<C>(p, tile * kTileRows + (rank * kQuads + tid_x() % kQuads) * 4)) {}

    // partials(row_warp, k_warp): address of that warp's [token][row] sums, the same in every block of the cluster
    template <class Partials> HW_FN void run(Partials partials) const {
        if constexpr (C::kSplit > 1) { cluster_arrive(); cluster_wait(); } else syncthreads();
        for (u32 id = tid_x(); id < kQuads * tokens; id += kThreads) {
            const u32 token = id / kQuads, row = (rank * kQuads + id % kQuads) * 4, out = tile * kTileRows + row;  // row within the tile
            if (out >= C::kN || (kTileQuads % C::kSplit && row >= kTileRows)) continue;
            const float of_token = token_scale<C>(p, token0 + token);
            float sum[4] = {0, 0, 0, 0};
            HW_UNROLL for (u32 s = 0; s < C::kSplit; ++s)
                HW_UNROLL for (u32 k = 0; k < C::kKWarps; ++k) {
                    const u32 at = partials(row / kWarpRows, k) + token * Partial::kTokenBytes + row % kWarpRows * 4;
                    U4 v;
                    if constexpr (C::kSplit > 1) v = ld_cluster_v4(mapa(at, s)); else v = ld_shared_v4(at);
                    sum[0] = add_f32(sum[0], as_f32(v.x));
                    sum[1] = add_f32(sum[1], as_f32(v.y));
                    sum[2] = add_f32(sum[2], as_f32(v.z));
                    sum[3] = add_f32(sum[3], as_f32(v.w));
                }
            store_quad<C>(p, token0 + token, out, sum, of_token, kThreads % kQuads == 0 || id < kThreads ? first : load_affine<C>(p, out));
        }
        if constexpr (C::kSplit > 1) { cluster_arrive_relaxed(); cluster_wait(); }  // no block leaves while its sums are being read
    }
};
}  // namespace lowbit

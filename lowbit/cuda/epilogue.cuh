// From fp32 accumulators to y: partial sums through shared memory, added in a fixed order, channel scale, bias, one rounding.
// Knows the output and where partial sums lie; it must not know formats or how the sums were made.
#pragma once
#include "dequant.cuh"

namespace lowbit {
// Rows of a token's partial sums, padded so that the 8 rows and 4 token pairs a warp stores at once hit 32 different banks.
template <int kRows> struct PartialTile { static constexpr u32 kPitch = kRows + 4, kTokenBytes = 4 * kPitch; };

// A warp writes its accumulators ([row block][token tile], lane 4g+t: rows g, g+8, tokens 2t, 2t+1) as [token][row] floats.
template <int kRowBlocks, int kTokenTiles>
HW_FN void store_partials(u32 smem, u32 token_bytes, const float (&acc)[kRowBlocks][kTokenTiles][4], u32 tokens) {
    const u32 g = lane_id() / 4, t = lane_id() % 4;
    HW_UNROLL for (int n = 0; n < kTokenTiles; ++n)
        HW_UNROLL for (int e = 0; e < 4; ++e) {
            const u32 token = n * 8 + 2 * t + (e & 1);
            if (token < tokens)
                HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) st_shared_f32(smem + token * token_bytes + (r * 16 + g + e / 2 * 8) * 4, acc[r][n][e]);
        }
}

// Factor and bias of four rows, as float bits.
struct Affine { U4 scale, bias; };

template <class C> HW_FN U4 load_rows(const u8* table, u32 row, U4 absent) {  // table: float per row, or null
    if (!table || row >= C::kN) return absent;
    if constexpr (C::kN % 4 == 0) return ld_global_nc_v4(table + row * 4);
    u32 v[4] = {absent.x, absent.y, absent.z, absent.w};
    HW_UNROLL for (u32 i = 0; i < 4; ++i)
        if (row + i < C::kN) v[i] = ld_global_nc_u32(table + (row + i) * 4);
    return {v[0], v[1], v[2], v[3]};
}
template <class C> HW_FN Affine load_affine(const Params& p, u32 row) {
    constexpr u32 kOne = 0x3f800000;
    return {load_rows<C>(p.channel, row, {kOne, kOne, kOne, kOne}), load_rows<C>(p.bias, row, {0, 0, 0, 0})};
}

// One element of y, and four of them whose address is a multiple of their size.
template <class Out> HW_FN void store_value(u8* y, float v) {
    if constexpr (Out::kBytes == 4) st_global_u32(y, as_u32(v)); else st_global_u16(y, Out::narrow(v));
}
template <class Out> HW_FN void store_values(u8* y, const float (&v)[4]) {
    if constexpr (Out::kBytes == 4) st_global_v4(y, {as_u32(v[0]), as_u32(v[1]), as_u32(v[2]), as_u32(v[3])});
    else st_global_v2(y, {Out::pack(v[0], v[1]), Out::pack(v[2], v[3])});
}

// y[token, row .. row+3] = sum * scale + bias, of 8-bit activations times the token's scale; sums still lack the factor of their conversion. It is taken
// back here and not with the group scales, which may lie near the end of float's range.
template <class C> HW_FN float token_scale(const Params& p, u64 token) {
    if constexpr (C::Operand::kBits == 8) return as_f32(ld_global_u32(p.x_scales + token * 4));
    return 1;
}
template <class C> HW_FN void store_quad(const Params& p, u64 token, u32 row, const float (&sum)[4], float of_token, const Affine& f) {
    const u32 scale[4] = {f.scale.x, f.scale.y, f.scale.z, f.scale.w}, bias[4] = {f.bias.x, f.bias.y, f.bias.z, f.bias.w};
    constexpr float kFactor = left_on_sums<C>();
    float v[4];
    HW_UNROLL for (int i = 0; i < 4; ++i) {
        float factor = as_f32(scale[i]);
        if constexpr (C::Operand::kBits == 8) factor = mul_f32(factor, of_token);  // first, since sums times one of them may be too large
        v[i] = fma_f32(mul_f32(sum[i], kFactor), factor, as_f32(bias[i]));
    }
    u8* const y = p.y + (token * C::kN + row) * C::Out::kBytes;
    if constexpr (C::kN % 4 == 0) {
        store_values<typename C::Out>(y, v);
    } else {
        HW_UNROLL for (u32 i = 0; i < 4; ++i)
            if (row + i < C::kN) store_value<typename C::Out>(y + i * C::Out::kBytes, v[i]);
    }
}
}  // namespace lowbit

// 16-bit activations to 8-bit codes and their scales, one block a token; quantize/activations.py says exactly which.
// Knows rows and formats; it must not know what the codes are multiplied with.
//
// A thread keeps its vectors of eight columns in registers between finding the largest magnitude and rounding. Magnitudes are compared as bit
// patterns, where NaN is the largest and Inf the next.
#pragma once
#include "types.cuh"

namespace lowbit {
struct ActParams {  // one call; pointers 16-byte aligned
    const u8* x;      // (m, kK), rows x_pitch bytes apart, a multiple of 16
    u8* codes;        // (m, kK rounded up to 16), contiguous, zeros past the end
    u8* scales;       // float (m, groups)
    const u8* scale;  // one float, where it is known before
    u64 x_pitch;
    u32 m, reserved;
};

struct E5m2 {
    HW_FN static u32 four(const float (&v)[4]) { return cvt_e5m2x2_f32(v[0], v[1]) | static_cast<u32>(cvt_e5m2x2_f32(v[2], v[3])) << 16; }
};
template <class In> struct Wide;
template <> struct Wide<Bf16> {
    static constexpr u32 kInf = 0x7f80;
    HW_FN static float value(u32 pattern) { return cvt_f32_bf16(static_cast<u16>(pattern)); }
};
template <> struct Wide<F16> {
    static constexpr u32 kInf = 0x7c00;
    HW_FN static float value(u32 pattern) { return cvt_f32_f16(static_cast<u16>(pattern)); }
};

template <class C> struct QuantizeAct {
    using In = Wide<typename C::In>;
    static constexpr u32 kVectors = C::kK / 8, kStored = (kVectors + 1) / 2 * 2, kPer = (kStored + C::kThreads - 1) / C::kThreads, kWarps = C::kThreads / 32;
    static constexpr u32 kGroups = C::kGroup ? (C::kK + C::kGroup - 1) / C::kGroup : 1;
    static_assert(C::kK % 8 == 0 && C::kThreads % 32 == 0 && (C::kGroup == 0 || C::kGroup == 128), "a group is the vectors of 16 lanes");

    const ActParams& p;
    HW_FN explicit QuantizeAct(const ActParams& params) : p(params) {}

    HW_FN void run() const {
        if constexpr (C::kLevel >= 90) { griddep_wait(); griddep_launch(); }
        const u32 tid = tid_x();
        const u64 token = ctaid_x();
        U4 v[kPer];
        u32 group_most[kPer], most = 0;  // magnitudes: of this thread's groups, of the token
        HW_UNROLL for (u32 j = 0; j < kPer; ++j) {
            const u32 i = tid + j * C::kThreads;
            v[j] = U4{0, 0, 0, 0};
            if (i < kVectors) v[j] = ld_global_v4(p.x + token * p.x_pitch + i * 16);
            group_most[j] = larger(larger(magnitude(v[j].x), magnitude(v[j].y)), larger(magnitude(v[j].z), magnitude(v[j].w)));
            if constexpr (C::kGroup != 0) {
                HW_UNROLL for (u32 d = 1; d < 16; d *= 2) group_most[j] = larger(group_most[j], shfl_xor(group_most[j], d));
            }
            most = larger(most, group_most[j]);
        }
        most = of_block(most);
        const bool finite = most < In::kInf;
        HW_UNROLL for (u32 j = 0; j < kPer; ++j) {
            const u32 i = tid + j * C::kThreads;
            if (i >= kStored) continue;
            float scale, factor;
            if constexpr (C::kStatic) {
                scale = as_f32(ld_global_u32(p.scale));
                factor = div_f32(1.0f, scale);
            } else {
                const float largest = max_f32(In::value(C::kGroup ? group_most[j] : most), as_f32(0x0d800000));  // 2^-100
                scale = div_f32(largest, C::kLimit);
                factor = div_f32(C::kLimit, largest);
            }
            const U2 codes = {four(v[j].x, v[j].y, factor), four(v[j].z, v[j].w, factor)};
            st_global_v2(p.codes + token * (kStored * 8) + i * 8, finite ? codes : U2{0, 0});
            if (C::kGroup ? i % 16 == 0 && i < kVectors : i == 0) st_global_u32(p.scales + (token * kGroups + (C::kGroup ? i / 16 : 0)) * 4, finite ? as_u32(scale) : 0x7fc00000);
        }
    }

    HW_FN static u32 larger(u32 a, u32 b) { return a > b ? a : b; }
    HW_FN static u32 magnitude(u32 pair) { return larger(pair & 0x7fff, pair >> 16 & 0x7fff); }
    HW_FN static u32 four(u32 a, u32 b, float factor) {  // columns, two a word
        const float x[4] = {mul_f32(In::value(a & 0xffff), factor), mul_f32(In::value(a >> 16), factor), mul_f32(In::value(b & 0xffff), factor), mul_f32(In::value(b >> 16), factor)};
        return C::Code::four(x);
    }
    HW_FN static u32 of_block(u32 v) {
        HW_UNROLL for (u32 d = 1; d < 32; d *= 2) v = larger(v, shfl_xor(v, d));
        if constexpr (kWarps == 1) return v;
        const u32 lane = lane_id();
        if (lane == 0) st_shared_u32(smem_base() + tid_x() / 32 * 4, v);
        syncthreads();
        v = lane < kWarps ? ld_shared_u32(smem_base() + lane * 4) : 0;
        HW_UNROLL for (u32 d = 1; d < 32; d *= 2) v = larger(v, shfl_xor(v, d));
        return v;
    }
};
}  // namespace lowbit

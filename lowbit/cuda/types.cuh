// What every kernel is given, the operand and output types as traits.
// Knows registers and arithmetic only; it must not know layouts, tiles or formats.
#pragma once
#include "hw/hw.h"

namespace lowbit {
using namespace hw;

struct Params {  // one layer, one call; all pointers 16-byte aligned
    const u8* units;    // packed weights, layout/pack.py
    const u8* channel;  // float per row, or null
    const u8* bias;     // float per row, or null
    const u8* x;        // (m, k) activations, rows x_pitch bytes apart, a multiple of 16
    u8* y;              // (m, n), contiguous
    u64 x_pitch;
    u32 m, reserved;
    const u8* x_scales;  // float per token, of 8-bit activations
    TensorMap x_map;     // x in boxes of 128 bytes x kTokens, swizzled by as much; for the wgmma families
};

struct Bf16 {
    static constexpr u32 kBytes = 2;
    static constexpr int kBits = 16;  // of an operand
    using Sum = float;
    static constexpr bool kExactSums = false;
    HW_FN static u32 fma(u32 a, u32 b, u32 c) { return fma_bf16x2(a, b, c); }
    HW_FN static u32 pack(float lo, float hi) { return cvt_bf16x2_f32(lo, hi); }
    HW_FN static u16 narrow(float v) { return cvt_rn_bf16_f32(v); }
    template <int kLevel> HW_FN static void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { mma_m16n8k16_bf16(d, a, b); }
    template <int kRegs> HW_FN static void wgmma(Regs<float, kRegs>& d, const Regs<u32, 4>& a, u64 b, bool accumulate) { wgmma_bf16_rs(d, a, b, accumulate); }
};

struct F16 {
    static constexpr u32 kBytes = 2;
    static constexpr int kBits = 16;
    using Sum = float;
    static constexpr bool kExactSums = false;
    template <int kRegs> HW_FN static void wgmma(Regs<float, kRegs>& d, const Regs<u32, 4>& a, u64 b, bool accumulate) { wgmma_f16_rs(d, a, b, accumulate); }
    HW_FN static u32 fma(u32 a, u32 b, u32 c) { return fma_f16x2(a, b, c); }
    HW_FN static u32 pack(float lo, float hi) { return cvt_f16x2_f32(lo, hi); }
    HW_FN static u16 narrow(float v) { return cvt_rn_f16_f32(v); }
    template <int kLevel> HW_FN static void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
        if constexpr (kLevel >= 80) {
            mma_m16n8k16_f16(d, a, b);
        } else {  // Turing has k = 8 only: registers a0, a1 are its lower half, a2, a3 the upper
            const u32 a_lo[2] = {a[0], a[1]}, a_hi[2] = {a[2], a[3]}, b_lo[1] = {b[0]}, b_hi[1] = {b[1]};
            mma_m16n8k8_f16(d, a_lo, b_lo);
            mma_m16n8k8_f16(d, a_hi, b_hi);
        }
    }
};

struct F32 { static constexpr u32 kBytes = 4; };  // output only

// 8-bit operands. four(): four codes, the first in the lowest byte.
struct E4m3 {
    static constexpr u32 kBytes = 1;
    static constexpr int kBits = 8;
    using Sum = float;
    static constexpr bool kExactSums = false;  // wgmma keeps 13 fraction bits after every instruction
    template <int kRegs> HW_FN static void wgmma(Regs<float, kRegs>& d, const Regs<u32, 4>& a, u64 b, bool accumulate) { wgmma_e4m3_rs(d, a, b, accumulate); }
    HW_FN static u32 four(const float (&v)[4]) { return cvt_e4m3x2_f32(v[0], v[1]) | static_cast<u32>(cvt_e4m3x2_f32(v[2], v[3])) << 16; }
};
struct S8 {
    static constexpr u32 kBytes = 1;
    static constexpr int kBits = 8;
    using Sum = int;
    static constexpr bool kExactSums = true;
    template <int kRegs> HW_FN static void wgmma(Regs<int, kRegs>& d, const Regs<u32, 4>& a, u64 b, bool accumulate) { wgmma_s8_rs(d, a, b, accumulate); }
    HW_FN static u32 four(const float (&v)[4]) {
        u32 r = 0;
        HW_UNROLL for (int i = 0; i < 4; ++i) r |= (static_cast<u32>(cvt_rni_s32_f32(min_f32(max_f32(v[i], -127.0f), 127.0f))) & 0xff) << 8 * i;
        return r;
    }
};

template <class T> HW_FN constexpr T smaller(T a, T b) { return a < b ? a : b; }
}  // namespace lowbit

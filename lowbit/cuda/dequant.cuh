// Packed codes and scales to numbers, exactly, in registers: one Convert per (operand type, value format), one struct per scale format.
// Knows bit patterns only; it must not know where codes come from or what they are multiplied with.
//
// A step is one m16n8k16: its four A registers hold two elements each. In every 16-bit half of a packed word, field i (bits
// 4i..4i+3 or 8i..8i+7) belongs to A register i; the lower half is the first element. 4-bit formats take one word a step, 8-bit two.
#pragma once
#include "types.cuh"

namespace lowbit {
struct Int4 { static constexpr int kBits = 4; };
struct Int8 { static constexpr int kBits = 8; };
struct E2m1 { static constexpr int kBits = 4; };
struct E4m3 { static constexpr int kBits = 8; };

// step(): the A registers of one step, each value times 1 / kFactor.
template <class Operand, class Value> struct Convert;

// Integers of n bits are stored as u = value + 2^(n-1). A 16-bit float whose exponent field is 0 or 1 is linear in its bits: the
// pattern u << f, f + n <= 8 (bf16) or 11 (fp16), is exactly u * 2^(f-133) or u * 2^(f-24). So one mask leaves a number, and one FMA
// brings it to (u - 2^(n-1)) * 2^-6 (bf16: times 2^(127-f)) or * 2^-9 (fp16: times 2^(15-f)), exact. kFactor takes the power of two
// back on fp32. Against the usual or-in of an exponent this saves two shifts and, since a LOP3 has room for one constant, four
// moves per eight weights: 10 issue slots a word instead of 18 (8192x8192, sm_90a).
template <> struct Convert<Bf16, Int4> {
    static constexpr float kFactor = 64.0f;
    HW_FN static void step(u32 (&a)[4], const u32* w) {
        HW_UNROLL for (int i = 0; i < 4; i += 2) {
            const u32 v = w[0] >> 4 * i;
            a[i] = Bf16::fma(v & 0x000f000f, 0x7f007f00, 0xbe00be00);
            a[i + 1] = Bf16::fma(v & 0x00f000f0, 0x7d007d00, 0xbe00be00);
        }
    }
};
template <> struct Convert<F16, Int4> {
    static constexpr float kFactor = 512.0f;
    HW_FN static void step(u32 (&a)[4], const u32* w) {
        HW_UNROLL for (int i = 0; i < 4; i += 2) {
            const u32 v = w[0] >> 4 * i;
            a[i] = F16::fma(v & 0x000f000f, 0x78007800, 0xa400a400);
            a[i + 1] = F16::fma(v & 0x00f000f0, 0x68006800, 0xa400a400);
        }
    }
};
template <> struct Convert<Bf16, Int8> {
    static constexpr float kFactor = 64.0f;
    HW_FN static void step(u32 (&a)[4], const u32* w) {
        HW_UNROLL for (int i = 0; i < 4; ++i) a[i] = Bf16::fma(w[i / 2] >> 8 * (i & 1) & 0x00ff00ff, 0x7f007f00, 0xc000c000);
    }
};
template <> struct Convert<F16, Int8> {
    static constexpr float kFactor = 512.0f;
    HW_FN static void step(u32 (&a)[4], const u32* w) {
        HW_UNROLL for (int i = 0; i < 4; ++i) a[i] = F16::fma(w[i / 2] >> 8 * (i & 1) & 0x00ff00ff, 0x78007800, 0xb400b400);
    }
};

// Floats: the exponent and mantissa bits move to the top of the operand's mantissa and the bottom of its exponent, the sign to
// bit 15; the number is then too small by 2^(bias difference). Multiplying by that power of two is exact, also for subnormals
// (the operand's own subnormals carry them), and adding -0 keeps the sign of zero.
template <class Operand> struct FloatScale;
template <> struct FloatScale<Bf16> { static constexpr u32 kE4m3 = 0x7b807b80 /* 2^120 */, kE2m1 = 0x7e807e80 /* 2^126 */; };
template <> struct FloatScale<F16> { static constexpr u32 kE4m3 = 0x5c005c00 /* 2^8 */, kE2m1 = 0x74007400 /* 2^14 */; };
HW_FN u32 shift(u32 v, int left) { return left >= 0 ? v << left : v >> -left; }

// e4m3  s|eeee|mmm  ->  bf16 s|0000eeee|mmm0000, fp16 s|0eeee|mmm0000000
template <class Operand> struct Convert<Operand, E4m3> {
    static constexpr float kFactor = 1.0f;
    HW_FN static void step(u32 (&a)[4], const u32* w) {
        constexpr bool kBf16 = FloatScale<Operand>::kE4m3 == 0x7b807b80;
        HW_UNROLL for (int i = 0; i < 4; ++i) {
            const u32 v = w[i / 2], magnitude = kBf16 ? shift(v, 4 - 8 * (i & 1)) & 0x07f007f0 : shift(v, 7 - 8 * (i & 1)) & 0x3f803f80;
            a[i] = Operand::fma((shift(v, 8 - 8 * (i & 1)) & 0x80008000) | magnitude, FloatScale<Operand>::kE4m3, 0x80008000);
        }
    }
};
// e2m1  s|ee|m  ->  bf16 s|000000ee|m000000, fp16 s|000ee|m000000000
template <class Operand> struct Convert<Operand, E2m1> {
    static constexpr float kFactor = 1.0f;
    HW_FN static void step(u32 (&a)[4], const u32* w) {
        constexpr bool kBf16 = FloatScale<Operand>::kE2m1 == 0x7e807e80;
        HW_UNROLL for (int i = 0; i < 4; ++i) {
            const u32 magnitude = kBf16 ? shift(w[0], 6 - 4 * i) & 0x01c001c0 : shift(w[0], 9 - 4 * i) & 0x0e000e00;
            a[i] = Operand::fma((shift(w[0], 12 - 4 * i) & 0x80008000) | magnitude, FloatScale<Operand>::kE2m1, 0x80008000);
        }
    }
};

// ---- scales: a lane's own, packed into words; value(w, i) is number i -------------------------------------------------------
struct NoScale { static constexpr int kBytes = 0; };
struct ScaleF32 {
    static constexpr int kBytes = 4;
    HW_FN static float value(const u32* w, int i) { return as_f32(w[i]); }
};
struct ScaleBf16 {
    static constexpr int kBytes = 2;
    HW_FN static float value(const u32* w, int i) { return as_f32(i & 1 ? w[i / 2] & 0xffff0000 : w[i / 2] << 16); }
};
struct ScaleF16 {
    static constexpr int kBytes = 2;
    HW_FN static float value(const u32* w, int i) { return cvt_f32_f16(static_cast<u16>(w[i / 2] >> 16 * (i & 1))); }
};
struct ScaleE8m0 {  // 2^(code - 127): the code is float's exponent; code 0 is the subnormal 2^-127. 255 (NaN) never gets here.
    static constexpr int kBytes = 1;
    HW_FN static float value(const u32* w, int i) {
        const u32 bits = (w[i / 4] >> 8 * (i & 3) & 0xff) << 23;
        return as_f32(bits > 0x00400000 ? bits : 0x00400000);
    }
};
struct ScaleE4m3 {  // as above: bits in place, times 2^120
    static constexpr int kBytes = 1;
    HW_FN static float value(const u32* w, int i) {
        const u32 code = w[i / 4] >> 8 * (i & 3);
        return mul_f32(as_f32((code & 0x80) << 24 | (code & 0x7f) << 20), 0x1p120f);
    }
};

// The scales of kGroups consecutive groups of rows g and g + 8, of the kSteps groups of a unit: [group][row], contiguous for a lane.
template <class Scale, int kSteps, int kGroups> struct UnitScales {
    static constexpr u32 kBytes = 2 * kGroups * Scale::kBytes, kWords = (kBytes + 3) / 4;
    u32 w[kWords];
    HW_FN void load(u32 smem_scales, u32 first) {  // the first-th set of kGroups
        const u32 at = smem_scales + lane_id() / 4 * (2 * kSteps * Scale::kBytes) + first * kBytes;
        if constexpr (kBytes == 2) w[0] = ld_shared_u16(at);
        if constexpr (kBytes == 4) w[0] = ld_shared_u32(at);
        if constexpr (kBytes == 8) { const U2 v = ld_shared_v2(at); w[0] = v.x; w[1] = v.y; }
        if constexpr (kBytes >= 16)
            HW_UNROLL for (u32 i = 0; i < kWords; i += 4) { const U4 v = ld_shared_v4(at + 4 * i); w[i] = v.x; w[i + 1] = v.y; w[i + 2] = v.z; w[i + 3] = v.w; }
    }
    HW_FN float get(int group, int half) const { return Scale::value(w, 2 * group + half); }
};
template <int kSteps, int kGroups> struct UnitScales<NoScale, kSteps, kGroups> {
    HW_FN void load(u32, u32) {}
    HW_FN float get(int, int) const { return 1.0f; }
};
}  // namespace lowbit

// Bit tricks, float arithmetic, packed 16-bit arithmetic, conversions: twins of lowbit/cuda/hw/arith.h.
// Results are bit-exact but for ex2_approx_f32, whose last two bits are the chip's own.
#pragma once
namespace hw {
HW_FN u32 as_u32(float f) { u32 r; __builtin_memcpy(&r, &f, 4); return r; }
HW_FN float as_f32(u32 u) { float r; __builtin_memcpy(&r, &u, 4); return r; }
HW_FN u32 prmt(u32 a, u32 b, u32 sel) {
    const u64 v = (u64)b << 32 | a;
    u32 r = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 s = sel >> (4 * i) & 15, byte = v >> (8 * (s & 7)) & 255;
        r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
    }
    return r;
}
template <int LUT> HW_FN u32 lop3(u32 a, u32 b, u32 c) {  // bit i of LUT: the result for a, b, c = bits 2, 1, 0 of i
    return (LUT & 1 ? ~a & ~b & ~c : 0) | (LUT & 2 ? ~a & ~b & c : 0) | (LUT & 4 ? ~a & b & ~c : 0) | (LUT & 8 ? ~a & b & c : 0) |
           (LUT & 16 ? a & ~b & ~c : 0) | (LUT & 32 ? a & ~b & c : 0) | (LUT & 64 ? a & b & ~c : 0) | (LUT & 128 ? a & b & c : 0);
}

HW_FN float add_f32(float a, float b) { return emu::canonical(a + b); }
HW_FN float sub_f32(float a, float b) { return emu::canonical(a - b); }
HW_FN float mul_f32(float a, float b) { return emu::canonical(a * b); }
HW_FN float fma_f32(float a, float b, float c) { return emu::fma_f32(a, b, c); }
HW_FN float div_f32(float a, float b) { return emu::canonical(a / b); }
// The other operand when one is NaN; -0 < +0.
HW_FN float max_f32(float a, float b) { return a != a ? emu::canonical(b) : b != b ? a : a > b ? a : b > a ? b : as_f32(as_u32(a) & as_u32(b)); }
HW_FN float min_f32(float a, float b) { return a != a ? emu::canonical(b) : b != b ? a : a < b ? a : b < a ? b : as_f32(as_u32(a) | as_u32(b)); }
HW_FN float ex2_approx_f32(float a) { return emu::canonical(emu::exp2_f32(a)); }

HW_FN u32 add_f16x2(u32 a, u32 b) { return emu::add_f16x2(a, b); }
HW_FN u32 sub_f16x2(u32 a, u32 b) { return emu::sub_f16x2(a, b); }
HW_FN u32 mul_f16x2(u32 a, u32 b) { return emu::mul_f16x2(a, b); }
HW_FN u32 fma_f16x2(u32 a, u32 b, u32 c) { return emu::fma_f16x2(a, b, c); }
HW_FN u32 add_bf16x2(u32 a, u32 b) { emu::need(90, "add.bf16x2"); return emu::add_bf16x2(a, b); }
HW_FN u32 sub_bf16x2(u32 a, u32 b) { emu::need(90, "sub.bf16x2"); return emu::sub_bf16x2(a, b); }
HW_FN u32 mul_bf16x2(u32 a, u32 b) { emu::need(90, "mul.bf16x2"); return emu::mul_bf16x2(a, b); }
HW_FN u32 fma_bf16x2(u32 a, u32 b, u32 c) { emu::need(80, "fma.bf16x2"); return emu::fma_bf16x2(a, b, c); }

HW_FN float cvt_f32_bf16(u16 v) { return as_f32((u32)v << 16); }
HW_FN float cvt_f32_f16(u16 v) { return emu::f32_of_f16(v); }
HW_FN u16 cvt_rn_bf16_f32(float v) { emu::need(80, "cvt.rn.bf16.f32"); return emu::bf16_of(v); }
HW_FN u16 cvt_rn_f16_f32(float v) { return emu::f16_of(v); }
HW_FN int cvt_rni_s32_f32(float v) { return emu::round_s32(v); }
HW_FN u32 cvt_bf16x2_f32(float lo, float hi) { emu::need(80, "cvt.rn.bf16x2.f32"); return emu::bf16_of(lo) | (u32)emu::bf16_of(hi) << 16; }
HW_FN u32 cvt_f16x2_f32(float lo, float hi) { return emu::f16_of(lo) | (u32)emu::f16_of(hi) << 16; }
HW_FN u16 cvt_e4m3x2_f32(float lo, float hi) { emu::need(89, "cvt.e4m3x2"); return u16(emu::e4m3_of(lo) | emu::e4m3_of(hi) << 8); }
HW_FN u16 cvt_e5m2x2_f32(float lo, float hi) { emu::need(89, "cvt.e5m2x2"); return u16(emu::e5m2_of(lo) | emu::e5m2_of(hi) << 8); }
HW_FN u16 cvt_e4m3x2_f16x2(u32 v) {
    emu::need(89, "cvt.e4m3x2"); return u16(emu::e4m3_of(emu::f32_of_f16(u16(v))) | emu::e4m3_of(emu::f32_of_f16(u16(v >> 16))) << 8);
}
HW_FN u32 cvt_f16x2_e4m3x2(u16 v) { emu::need(89, "cvt.f16x2.e4m3x2"); return emu::f16_of_e4m3(u8(v)) | (u32)emu::f16_of_e4m3(u8(v >> 8)) << 16; }
HW_FN u32 cvt_f16x2_e5m2x2(u16 v) { emu::need(89, "cvt.f16x2.e5m2x2"); return emu::f16_of_e5m2(u8(v)) | (u32)emu::f16_of_e5m2(u8(v >> 8)) << 16; }
}  // namespace hw

// Bit tricks, float arithmetic that rounds the same on chip and CPU, packed 16-bit arithmetic, conversions.
// Pairs: the low half holds the first element. Nothing here flushes subnormals.
#pragma once
namespace hw {
HW_FN u32 prmt(u32 a, u32 b, u32 sel) { u32 r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sel)); return r; }
template <int LUT> HW_FN u32 lop3(u32 a, u32 b, u32 c) { u32 r; asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(LUT)); return r; }
HW_FN u32 as_u32(float f) { u32 r; asm("mov.b32 %0, %1;" : "=r"(r) : "f"(f)); return r; }
HW_FN float as_f32(u32 u) { float r; asm("mov.b32 %0, %1;" : "=f"(r) : "r"(u)); return r; }

// With .rn the compiler may not contract a product and a sum into one rounding: plain `a * b + c` may be either.
HW_FN float add_f32(float a, float b) { float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
HW_FN float sub_f32(float a, float b) { float r; asm("sub.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
HW_FN float mul_f32(float a, float b) { float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
HW_FN float fma_f32(float a, float b, float c) { float r; asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c)); return r; }
HW_FN float div_f32(float a, float b) { float r; asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
HW_FN float max_f32(float a, float b) { float r; asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }  // a NaN loses
HW_FN float min_f32(float a, float b) { float r; asm("min.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }  // a NaN loses
// 2^x to about 2 units in the last place: the one function whose bits differ between chip and CPU
HW_FN float ex2_approx_f32(float a) { float r; asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(a)); return r; }

#define HW_PACKED(T)                                                                                                           \
    HW_FN u32 add_##T(u32 a, u32 b) { u32 r; asm("add.rn." #T " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }             \
    HW_FN u32 sub_##T(u32 a, u32 b) { u32 r; asm("sub.rn." #T " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }             \
    HW_FN u32 mul_##T(u32 a, u32 b) { u32 r; asm("mul.rn." #T " %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }             \
    HW_FN u32 fma_##T(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn." #T " %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
HW_PACKED(bf16x2)  // add, sub, mul: sm_90; fma: sm_80, so a * 1 + b and a * b + -0.0 are the portable forms
HW_PACKED(f16x2)
#undef HW_PACKED

HW_FN float cvt_f32_bf16(u16 v) { return as_f32((u32)v << 16); }
HW_FN float cvt_f32_f16(u16 v) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v)); return r; }
HW_FN u16 cvt_rn_bf16_f32(float v) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }  // sm_80
HW_FN u16 cvt_rn_f16_f32(float v) { u16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
HW_FN int cvt_rni_s32_f32(float v) { int r; asm("cvt.rni.s32.f32 %0, %1;" : "=r"(r) : "f"(v)); return r; }  // saturates; NaN gives 0
HW_FN u32 cvt_bf16x2_f32(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }  // sm_80
HW_FN u32 cvt_f16x2_f32(float lo, float hi) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // the packed conversion came with sm_80
    return cvt_rn_f16_f32(lo) | (u32)cvt_rn_f16_f32(hi) << 16;
#else
    u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
#endif
}
// 8-bit floats: sm_89
HW_FN u16 cvt_e4m3x2_f32(float lo, float hi) { u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo)); return r; }
HW_FN u16 cvt_e5m2x2_f32(float lo, float hi) { u16 r; asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo)); return r; }
HW_FN u16 cvt_e4m3x2_f16x2(u32 v) { u16 r; asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(r) : "r"(v)); return r; }
HW_FN u32 cvt_f16x2_e4m3x2(u16 v) { u32 r; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(v)); return r; }
HW_FN u32 cvt_f16x2_e5m2x2(u16 v) { u32 r; asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(r) : "h"(v)); return r; }
}  // namespace hw

// Warp-level tensor-core products, d += a * b: twins of lowbit/cuda/hw/mma.h.
// The arithmetic of a launch's arch is in emu/tensor.cpp.
#pragma once
namespace hw {
HW_FN void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { emu::need(80, "mma.m16n8k16.bf16"); emu::mma_sync(emu::Type::bf16, 32, d, a, b); }
HW_FN void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { emu::need(80, "mma.m16n8k16.f16"); emu::mma_sync(emu::Type::f16, 32, d, a, b); }
HW_FN void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { emu::need(89, "mma.m16n8k32.e4m3"); emu::mma_sync(emu::Type::e4m3, 32, d, a, b); }
HW_FN void mma_m16n8k32_e5m2(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { emu::need(89, "mma.m16n8k32.e5m2"); emu::mma_sync(emu::Type::e5m2, 32, d, a, b); }
HW_FN void mma_m16n8k8_f16(float (&d)[4], const u32 (&a)[2], const u32 (&b)[1]) { emu::need(75, "mma.m16n8k8.f16"); emu::mma_sync(emu::Type::f16, 16, d, a, b); }
HW_FN void mma_m16n8k32_s8(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { emu::need(80, "mma.m16n8k32.s8"); emu::mma_sync(emu::Type::s8, 32, d, a, b); }
HW_FN void mma_m8n8k16_s8(int (&d)[2], const u32 (&a)[1], const u32 (&b)[1]) { emu::need(75, "mma.m8n8k16.s8"); emu::mma_m8n8k16_s8(d, a, b); }
}  // namespace hw

// Warp-level tensor-core products, d += a * b.
// Fragments are plain registers of the 32 lanes, in the order the PTX manual draws for each shape.
#pragma once
namespace hw {
#define HW_MMA(NAME, SHAPE_TYPES)                                                                                 \
    HW_FN void NAME(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {                                        \
        asm volatile("mma.sync.aligned." SHAPE_TYPES " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"     \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                         \
    }
HW_MMA(mma_m16n8k16_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")  // sm_80
HW_MMA(mma_m16n8k16_f16, "m16n8k16.row.col.f32.f16.f16.f32")     // sm_80
HW_MMA(mma_m16n8k32_e4m3, "m16n8k32.row.col.f32.e4m3.e4m3.f32")  // sm_89; on sm_90 two f16 products, no faster than f16
HW_MMA(mma_m16n8k32_e5m2, "m16n8k32.row.col.f32.e5m2.e5m2.f32")  // sm_89
#undef HW_MMA
HW_FN void mma_m16n8k8_f16(float (&d)[4], const u32 (&a)[2], const u32 (&b)[1]) {  // sm_75
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}
HW_FN void mma_m16n8k32_s8(int (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {  // sm_80; wraps beyond 32 bits
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
HW_FN void mma_m8n8k16_s8(int (&d)[2], const u32 (&a)[1], const u32 (&b)[1]) {  // sm_75; wraps beyond 32 bits
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+r"(d[0]), "+r"(d[1]) : "r"(a[0]), "r"(b[0]));
}
}  // namespace hw

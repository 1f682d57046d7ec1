// Plain loads and stores, atomics, matrix moves. Shared addresses are 32-bit shared-space addresses.
// Vector accesses must be aligned to their size; nothing here waits or synchronises unless its name says so.
#pragma once
namespace hw {
HW_FN U4 ld_global_v4(const void* p) {
    U4 v; asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v;
}
HW_FN U2 ld_global_v2(const void* p) { U2 v; asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory"); return v; }
HW_FN u32 ld_global_u32(const void* p) { u32 v; asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
HW_FN u16 ld_global_u16(const void* p) { u16 v; asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory"); return v; }
HW_FN u8 ld_global_u8(const void* p) { u32 v; asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return (u8)v; }
// nc: data that no kernel writes while this one runs. No "memory" clobber, so the compiler may move these loads up,
// also above griddep_wait: only for weights, never for what the previous kernel wrote.
HW_FN U4 ld_global_nc_v4(const void* p) {
    U4 v; asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p)); return v;
}
HW_FN U2 ld_global_nc_v2(const void* p) { U2 v; asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p)); return v; }
HW_FN u32 ld_global_nc_u32(const void* p) { u32 v; asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p)); return v; }
HW_FN u16 ld_global_nc_u16(const void* p) { u16 v; asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p)); return v; }
HW_FN u32 ld_global_acquire_u32(const void* p) { u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }

HW_FN void st_global_v4(void* p, U4 v) { asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
HW_FN void st_global_v2(void* p, U2 v) { asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory"); }
HW_FN void st_global_u32(void* p, u32 v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
HW_FN void st_global_u16(void* p, u16 v) { asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory"); }
HW_FN void st_global_u8(void* p, u8 v) { asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"((u32)v) : "memory"); }
HW_FN void st_global_release_u32(void* p, u32 v) { asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

HW_FN void red_global_add_f32(void* p, float v) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory"); }
HW_FN void red_global_release_add_u32(void* p, u32 v) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
// The value before. Acquire and release: who arrives last sees what all that arrived before had written.
HW_FN u32 atom_global_add_u32(void* p, u32 v) {
    u32 r; asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(r) : "l"(p), "r"(v) : "memory"); return r;
}
HW_FN u32 atom_shared_add_u32(u32 a, u32 v) {
    u32 r; asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(r) : "r"(a), "r"(v) : "memory"); return r;
}

HW_FN U4 ld_shared_v4(u32 a) {
    U4 v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory"); return v;
}
HW_FN U2 ld_shared_v2(u32 a) { U2 v; asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory"); return v; }
HW_FN u32 ld_shared_u32(u32 a) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
HW_FN u16 ld_shared_u16(u32 a) { u16 v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a) : "memory"); return v; }
HW_FN u8 ld_shared_u8(u32 a) { u32 v; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return (u8)v; }
HW_FN float ld_shared_f32(u32 a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory"); return v; }
HW_FN void st_shared_v4(u32 a, U4 v) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
HW_FN void st_shared_v2(u32 a, U2 v) { asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(v.x), "r"(v.y) : "memory"); }
HW_FN void st_shared_u32(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
HW_FN void st_shared_u16(u32 a, u16 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"(v) : "memory"); }
HW_FN void st_shared_u8(u32 a, u8 v) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(a), "r"((u32)v) : "memory"); }
HW_FN void st_shared_f32(u32 a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }

// a: an address made by mapa; sm_90
HW_FN U4 ld_cluster_v4(u32 a) {
    U4 v; asm volatile("ld.shared::cluster.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory"); return v;
}
HW_FN u32 ld_cluster_u32(u32 a) { u32 v; asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
HW_FN void st_cluster_v4(u32 a, U4 v) { asm volatile("st.shared::cluster.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
HW_FN void st_cluster_u32(u32 a, u32 v) { asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }

#define HW_LDMATRIX(SUFFIX, MOD)                                                                                     \
    HW_FN void ldmatrix_x1##SUFFIX(u32 (&r)[1], u32 a) {                                                             \
        asm volatile("ldmatrix.sync.aligned.m8n8.x1" MOD ".shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(a) : "memory"); \
    }                                                                                                                \
    HW_FN void ldmatrix_x2##SUFFIX(u32 (&r)[2], u32 a) {                                                             \
        asm volatile("ldmatrix.sync.aligned.m8n8.x2" MOD ".shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(a) : "memory"); \
    }                                                                                                                \
    HW_FN void ldmatrix_x4##SUFFIX(u32 (&r)[4], u32 a) {                                                             \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" MOD ".shared.b16 {%0,%1,%2,%3}, [%4];"                          \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");                          \
    }
HW_LDMATRIX(, "")
HW_LDMATRIX(_trans, ".trans")
#undef HW_LDMATRIX
#define HW_STMATRIX(SUFFIX, MOD) /* sm_90 */                                                                         \
    HW_FN void stmatrix_x2##SUFFIX(u32 a, const u32 (&r)[2]) {                                                       \
        asm volatile("stmatrix.sync.aligned.m8n8.x2" MOD ".shared.b16 [%0], {%1,%2};" ::"r"(a), "r"(r[0]), "r"(r[1]) : "memory"); \
    }                                                                                                                \
    HW_FN void stmatrix_x4##SUFFIX(u32 a, const u32 (&r)[4]) {                                                       \
        asm volatile("stmatrix.sync.aligned.m8n8.x4" MOD ".shared.b16 [%0], {%1,%2,%3,%4};"                          \
                     ::"r"(a), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");                               \
    }
HW_STMATRIX(, "")
HW_STMATRIX(_trans, ".trans")
#undef HW_STMATRIX
}  // namespace hw

// Plain loads and stores, atomics, matrix moves: twins of lowbit/cuda/hw/access.h.
// Every byte goes through emu::global_bytes or the shared-memory shadow.
#pragma once
namespace emu {
template <class T> T global_load(const void* p, Access how, const char* what) {
    T v; __builtin_memcpy(&v, global_bytes(p, sizeof v, sizeof v, how, what), sizeof v); return v;
}
template <class T> void global_store(void* p, const T& v, Access how, const char* what) {
    __builtin_memcpy(global_bytes(p, sizeof v, sizeof v, how, what), &v, sizeof v);
}
template <class T> T global_add(void* p, T v, Access how, const char* what) {
    T old; u8* at = global_bytes(p, sizeof v, sizeof v, how, what);
    __builtin_memcpy(&old, at, sizeof v); v += old; __builtin_memcpy(at, &v, sizeof v); return old;
}
template <class T> T shared_load(u32 a, bool remote = false) { T v; load_shared(a, &v, sizeof v, remote); return v; }
}  // namespace emu
namespace hw {
HW_FN U4 ld_global_v4(const void* p) { return emu::global_load<U4>(p, emu::READ, "ld.global.v4"); }
HW_FN U2 ld_global_v2(const void* p) { return emu::global_load<U2>(p, emu::READ, "ld.global.v2"); }
HW_FN u32 ld_global_u32(const void* p) { return emu::global_load<u32>(p, emu::READ, "ld.global.u32"); }
HW_FN u16 ld_global_u16(const void* p) { return emu::global_load<u16>(p, emu::READ, "ld.global.u16"); }
HW_FN u8 ld_global_u8(const void* p) { return emu::global_load<u8>(p, emu::READ, "ld.global.u8"); }
HW_FN U4 ld_global_nc_v4(const void* p) { return emu::global_load<U4>(p, emu::READ_NC, "ld.global.nc.v4"); }
HW_FN U2 ld_global_nc_v2(const void* p) { return emu::global_load<U2>(p, emu::READ_NC, "ld.global.nc.v2"); }
HW_FN u32 ld_global_nc_u32(const void* p) { return emu::global_load<u32>(p, emu::READ_NC, "ld.global.nc.u32"); }
HW_FN u16 ld_global_nc_u16(const void* p) { return emu::global_load<u16>(p, emu::READ_NC, "ld.global.nc.u16"); }
HW_FN u32 ld_global_acquire_u32(const void* p) { emu::yield(); return emu::global_load<u32>(p, emu::ACQUIRE, "ld.acquire.global.u32"); }
HW_FN void st_global_v4(void* p, U4 v) { emu::global_store(p, v, emu::WRITE, "st.global.v4"); }
HW_FN void st_global_v2(void* p, U2 v) { emu::global_store(p, v, emu::WRITE, "st.global.v2"); }
HW_FN void st_global_u32(void* p, u32 v) { emu::global_store(p, v, emu::WRITE, "st.global.u32"); }
HW_FN void st_global_u16(void* p, u16 v) { emu::global_store(p, v, emu::WRITE, "st.global.u16"); }
HW_FN void st_global_u8(void* p, u8 v) { emu::global_store(p, v, emu::WRITE, "st.global.u8"); }
HW_FN void st_global_release_u32(void* p, u32 v) { emu::global_store(p, v, emu::RELEASE, "st.release.global.u32"); }
HW_FN void red_global_add_f32(void* p, float v) { emu::global_add(p, v, emu::ATOMIC, "red.global.add.f32"); }
HW_FN void red_global_release_add_u32(void* p, u32 v) { emu::global_add(p, v, emu::RELEASE, "red.release.global.add.u32"); }
HW_FN u32 atom_global_add_u32(void* p, u32 v) { return emu::global_add(p, v, emu::ACQ_REL, "atom.acq_rel.global.add.u32"); }
HW_FN u32 atom_shared_add_u32(u32 a, u32 v) { return emu::atom_shared_add(a, v); }

HW_FN U4 ld_shared_v4(u32 a) { return emu::shared_load<U4>(a); }
HW_FN U2 ld_shared_v2(u32 a) { return emu::shared_load<U2>(a); }
HW_FN u32 ld_shared_u32(u32 a) { return emu::shared_load<u32>(a); }
HW_FN u16 ld_shared_u16(u32 a) { return emu::shared_load<u16>(a); }
HW_FN u8 ld_shared_u8(u32 a) { return emu::shared_load<u8>(a); }
HW_FN float ld_shared_f32(u32 a) { return emu::shared_load<float>(a); }
HW_FN void st_shared_v4(u32 a, U4 v) { emu::store_shared(a, &v, 16, false); }
HW_FN void st_shared_v2(u32 a, U2 v) { emu::store_shared(a, &v, 8, false); }
HW_FN void st_shared_u32(u32 a, u32 v) { emu::store_shared(a, &v, 4, false); }
HW_FN void st_shared_u16(u32 a, u16 v) { emu::store_shared(a, &v, 2, false); }
HW_FN void st_shared_u8(u32 a, u8 v) { emu::store_shared(a, &v, 1, false); }
HW_FN void st_shared_f32(u32 a, float v) { emu::store_shared(a, &v, 4, false); }

HW_FN U4 ld_cluster_v4(u32 a) { emu::need(90, "ld.shared::cluster"); return emu::shared_load<U4>(a, true); }
HW_FN u32 ld_cluster_u32(u32 a) { emu::need(90, "ld.shared::cluster"); return emu::shared_load<u32>(a, true); }
HW_FN void st_cluster_v4(u32 a, U4 v) { emu::need(90, "st.shared::cluster"); emu::store_shared(a, &v, 16, true); }
HW_FN void st_cluster_u32(u32 a, u32 v) { emu::need(90, "st.shared::cluster"); emu::store_shared(a, &v, 4, true); }

HW_FN void ldmatrix_x1(u32 (&r)[1], u32 a) { emu::need(75, "ldmatrix"); emu::move_matrices(false, a, r, 1, false); }
HW_FN void ldmatrix_x2(u32 (&r)[2], u32 a) { emu::need(75, "ldmatrix"); emu::move_matrices(false, a, r, 2, false); }
HW_FN void ldmatrix_x4(u32 (&r)[4], u32 a) { emu::need(75, "ldmatrix"); emu::move_matrices(false, a, r, 4, false); }
HW_FN void ldmatrix_x1_trans(u32 (&r)[1], u32 a) { emu::need(75, "ldmatrix"); emu::move_matrices(false, a, r, 1, true); }
HW_FN void ldmatrix_x2_trans(u32 (&r)[2], u32 a) { emu::need(75, "ldmatrix"); emu::move_matrices(false, a, r, 2, true); }
HW_FN void ldmatrix_x4_trans(u32 (&r)[4], u32 a) { emu::need(75, "ldmatrix"); emu::move_matrices(false, a, r, 4, true); }
HW_FN void stmatrix_x2(u32 a, const u32 (&r)[2]) { emu::need(90, "stmatrix"); emu::move_matrices(true, a, const_cast<u32*>(r), 2, false); }
HW_FN void stmatrix_x4(u32 a, const u32 (&r)[4]) { emu::need(90, "stmatrix"); emu::move_matrices(true, a, const_cast<u32*>(r), 4, false); }
HW_FN void stmatrix_x2_trans(u32 a, const u32 (&r)[2]) { emu::need(90, "stmatrix"); emu::move_matrices(true, a, const_cast<u32*>(r), 2, true); }
HW_FN void stmatrix_x4_trans(u32 a, const u32 (&r)[4]) { emu::need(90, "stmatrix"); emu::move_matrices(true, a, const_cast<u32*>(r), 4, true); }
}  // namespace hw

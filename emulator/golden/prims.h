// One small kernel per primitive, run on the chip (device/golden.cu records) and in the emulator (tests/emu compares).
// All have the same parameters; layouts of in and out are in the comments. The list of cases is cases.h.
#pragma once
#include "hw/hw.h"
using namespace hw;
struct Prim { TensorMap map; const u8* in; u8* out; int arg, pad; };
#define PRIM(threads, NAME) HW_KERNEL(threads) NAME(const HW_GRID_CONST Prim prim)
#define IN_OUT [[maybe_unused]] const u8* in = prim.in; [[maybe_unused]] u8* out = prim.out; [[maybe_unused]] const int arg = prim.arg;

// Copies n bytes (multiple of 16) of global memory to shared memory, all threads.
HW_FN void fill_shared(u32 dst, const u8* src, u32 n) {
    for (u32 i = tid_x() * 16; i < n; i += ntid_x() * 16) st_shared_v4(dst + i, ld_global_v4(src + i));
}
HW_FN void dump_shared(u8* dst, u32 src, u32 n) {
    for (u32 i = tid_x() * 16; i < n; i += ntid_x() * 16) st_global_v4(dst + i, ld_shared_v4(src + i));
}

// in: 1024 B of matrices; out: 14 u32 per lane (x1 x2 x4, then the same transposed), then 512 B stored by stmatrix
PRIM(32, p_ldmatrix) { IN_OUT
    const u32 s = smem_base(), t = lane_id();
    fill_shared(s, in, 1024);
    syncthreads();
    const u32 row = s + ((t * 13 + 5) % 64) * 16;
    u32 r1[1], r2[2], r4[4];
    u32* o = (u32*)out + t * 14;
    ldmatrix_x1(r1, row); ldmatrix_x2(r2, row); ldmatrix_x4(r4, row);
    st_global_u32(o, r1[0]);
    for (int i = 0; i < 2; ++i) st_global_u32(o + 1 + i, r2[i]);
    for (int i = 0; i < 4; ++i) st_global_u32(o + 3 + i, r4[i]);
    stmatrix_x4(s + 1024 + ((t * 11) % 32) * 16, r4);
    ldmatrix_x1_trans(r1, row); ldmatrix_x2_trans(r2, row); ldmatrix_x4_trans(r4, row);
    st_global_u32(o + 7, r1[0]);
    for (int i = 0; i < 2; ++i) st_global_u32(o + 8 + i, r2[i]);
    for (int i = 0; i < 4; ++i) st_global_u32(o + 10 + i, r4[i]);
    syncthreads();
    dump_shared(out + 14 * 128, s + 1024, 512);
}

// in: per trial 10 u32 per lane (a4 b2 c4); out: d4 per lane. arg = trials
#define P_MMA(NAME, OP, T, NA, NB)                                                                     \
    PRIM(32, NAME) { IN_OUT                                                                         \
        for (int i = 0; i < arg; ++i) {                                                                \
            const u32* p = (const u32*)in + (i * 32 + lane_id()) * 10;                                 \
            u32 a[NA], b[NB];                                                                          \
            T d[4];                                                                                    \
            HW_UNROLL for (int j = 0; j < NA; ++j) a[j] = ld_global_u32(p + j);                        \
            HW_UNROLL for (int j = 0; j < NB; ++j) b[j] = ld_global_u32(p + 4 + j);                    \
            HW_UNROLL for (int j = 0; j < 4; ++j) ((u32*)d)[j] = ld_global_u32(p + 6 + j);             \
            OP(d, a, b);                                                                               \
            HW_UNROLL for (int j = 0; j < 4; ++j) st_global_u32((u32*)out + (i * 32 + lane_id()) * 4 + j, ((u32*)d)[j]); \
        }                                                                                              \
    }
P_MMA(p_mma_f16_k8, mma_m16n8k8_f16, float, 2, 1)
P_MMA(p_mma_f16, mma_m16n8k16_f16, float, 4, 2)
P_MMA(p_mma_bf16, mma_m16n8k16_bf16, float, 4, 2)
P_MMA(p_mma_e4m3, mma_m16n8k32_e4m3, float, 4, 2)
P_MMA(p_mma_e5m2, mma_m16n8k32_e5m2, float, 4, 2)
P_MMA(p_mma_s8, mma_m16n8k32_s8, int, 4, 2)

// A tile of `rows` rows of `width` bytes, dense in global memory, written to shared memory in the layout of `mode`
// (0 none: 8x16-byte core matrices, k-major within 8 rows; 1/2/3: 128/64/32-byte swizzle) by generic stores.
HW_FN void fill_tile(u32 dst, const u8* src, u32 rows, u32 width, int mode) {
    for (u32 i = tid_x(); i < rows * width / 16; i += ntid_x()) {
        const u32 r = i / (width / 16), c = i % (width / 16);
        u32 off = mode ? r * width + c * 16 : (r / 8) * (width * 8) + c * 128 + (r % 8) * 16;
        if (mode) off ^= ((off >> 7) & (mode == 1 ? 7 : mode == 2 ? 3 : 1)) << 4;
        st_shared_v4(dst + off, ld_global_v4(src + i * 16));
    }
}
HW_FN u64 tile_desc(u32 addr, u32 width, int mode) {  // mode 0: LBO = next core matrix along k, SBO = next 8 rows
    return (u64)((addr & 0x3ffff) >> 4) | (u64)(mode ? 1 : 128 >> 4) << 16 | (u64)(width * 8 >> 4) << 32 | (u64)mode << 62;
}
// in: A 64 x width, B 64 x width, C 32 u32 per thread; out: D. arg = mode | width << 4
#define P_WGMMA_SS(NAME, OP, T)                                                                        \
    PRIM(128, NAME) { IN_OUT                                                                        \
        const u32 mode = arg & 15, width = arg >> 4, sa = smem_base(), sb = sa + 8192, t = tid_x();    \
        fill_tile(sa, in, 64, width, mode);                                                            \
        fill_tile(sb, in + 64 * width, 64, width, mode);                                               \
        const u32* c = (const u32*)(in + 128 * width) + t * 32;                                        \
        Regs<T, 32> d;                                                                                 \
        HW_UNROLL for (int i = 0; i < 32; ++i) *(u32*)&d[i] = ld_global_u32(c + i);                    \
        fence_async();                                                                                 \
        syncthreads();                                                                                 \
        wgmma_fence();                                                                                 \
        for (u32 k = 0; k < width / 32; ++k) {                                                         \
            const u32 step = mode ? 32 : 256;                                                          \
            OP##_ss(d, tile_desc(sa + k * step, width, mode), tile_desc(sb + k * step, width, mode), true); \
        }                                                                                              \
        wgmma_commit();                                                                                \
        wgmma_wait<0>();                                                                               \
        HW_UNROLL for (int i = 0; i < 32; ++i) st_global_u32((u32*)out + t * 32 + i, *(u32*)&d[i]);    \
    }
P_WGMMA_SS(p_wgmma_bf16_ss, wgmma_bf16, float)
P_WGMMA_SS(p_wgmma_f16_ss, wgmma_f16, float)
P_WGMMA_SS(p_wgmma_e4m3_ss, wgmma_e4m3, float)
P_WGMMA_SS(p_wgmma_s8_ss, wgmma_s8, int)
// in: A as 16 u32 per thread (4 k-steps), B 64 x 128 bytes; out: D. The first k-step overwrites d.
#define P_WGMMA_RS(NAME, OP, T)                                                                        \
    PRIM(128, NAME) { IN_OUT                                                                        \
        const u32 sb = smem_base(), t = tid_x();                                                       \
        fill_tile(sb, in + 8192, 64, 128, 1);                                                          \
        Regs<u32, 4> a[4];                                                                             \
        Regs<T, 32> d;                                                                                 \
        HW_UNROLL for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = ld_global_u32((const u32*)in + t * 16 + i); \
        fence_async();                                                                                 \
        syncthreads();                                                                                 \
        wgmma_fence();                                                                                 \
        HW_UNROLL for (int k = 0; k < 4; ++k) OP##_rs(d, a[k], tile_desc(sb + k * 32, 128, 1), k > 0);  \
        wgmma_commit();                                                                                \
        wgmma_wait<0>();                                                                               \
        HW_UNROLL for (int i = 0; i < 32; ++i) st_global_u32((u32*)out + t * 32 + i, *(u32*)&d[i]);    \
    }
P_WGMMA_RS(p_wgmma_bf16_rs, wgmma_bf16, float)
P_WGMMA_RS(p_wgmma_f16_rs, wgmma_f16, float)
P_WGMMA_RS(p_wgmma_e4m3_rs, wgmma_e4m3, float)
P_WGMMA_RS(p_wgmma_s8_rs, wgmma_s8, int)

// in: 40 x 104 u16 (map: 40 x 100, box 32 rows x arg bytes); out: three dumps of the box: inside, over the end, before the start
PRIM(128, p_tma) { IN_OUT
    const u32 s = smem_base(), bar = s + 4096;
    const int w = arg / 2;
    if (tid_x() == 0) { mbar_init(bar, 1); fence_mbar_init(); }
    syncthreads();
    for (int i = 0; i < 3; ++i) {
        if (tid_x() == 0) {
            mbar_arrive_expect_tx(bar, 32 * arg);
            tma_load_2d(s, &prim.map, i == 0 ? 8 : i == 1 ? 104 - w : -8, i == 0 ? 3 : i == 1 ? 21 : -2, bar);
        }
        while (!mbar_try_wait(bar, i & 1)) {}
        dump_shared(out + i * 32 * arg, s, 32 * arg);
        fence_async();
        syncthreads();
    }
}
// in: 1024 B; out: bulk copy there, +1 per byte-lane word, bulk store back
PRIM(32, p_bulk) { IN_OUT
    const u32 s = smem_base(), bar = s + 1024;
    if (tid_x() == 0) {
        mbar_init(bar, 1);
        fence_mbar_init();
        mbar_arrive_expect_tx(bar, 1024);
        bulk_load(s, in, 512, bar);
        bulk_load(s + 512, in + 512, 512, bar);
    }
    syncwarp();
    while (!mbar_try_wait(bar, 0)) {}
    for (u32 i = tid_x(); i < 256; i += 32) st_shared_u32(s + i * 4, ld_shared_u32(s + i * 4) + 1);
    fence_async();
    syncwarp();
    if (tid_x() == 0) { bulk_store(out, s, 1024); bulk_commit(); bulk_wait<0>(); }
}
// in: 1024 B; out: the same bytes by 4-, 8- and 16-byte copies with every count of valid bytes
PRIM(32, p_cp_async) { IN_OUT
    const u32 s = smem_base(), t = tid_x();
    cp_async_16(s + t * 16, in + t * 16, t % 17);
    cp_async_8(s + 512 + t * 8, in + 512 + t * 8, t % 9);
    cp_async_4(s + 768 + t * 4, in + 768 + t * 4, t % 5);
    cp_async_commit();
    cp_async_wait<0>();
    syncthreads();
    dump_shared(out, s, 896);
}
// in: 4 u32 per element (1024 elements); out: 8 u32
PRIM(32, p_packed_bf16) { IN_OUT
    for (u32 i = tid_x(); i < 1024; i += 32) {
        const U4 v = ld_global_v4(in + i * 16);
        st_global_v4(out + i * 16, U4{add_bf16x2(v.x, v.y), sub_bf16x2(v.x, v.y), mul_bf16x2(v.x, v.y), fma_bf16x2(v.x, v.y, v.z)});
    }
}
PRIM(32, p_packed_f16) { IN_OUT
    for (u32 i = tid_x(); i < 1024; i += 32) {
        const U4 v = ld_global_v4(in + i * 16);
        st_global_v4(out + i * 16, U4{add_f16x2(v.x, v.y), sub_f16x2(v.x, v.y), mul_f16x2(v.x, v.y), fma_f16x2(v.x, v.y, v.z)});
    }
}
PRIM(32, p_bits) { IN_OUT
    for (u32 i = tid_x(); i < 1024; i += 32) {
        const U4 v = ld_global_v4(in + i * 16);
        const u32 lane = lane_id();
        U4 r{prmt(v.x, v.y, v.z), lop3<0xea>(v.x, v.y, v.z), lop3<0x6a>(v.x, v.y, v.w), 0};
        r.w = shfl_xor(v.x, (i >> 5) & 31) ^ shfl_idx(v.y, (lane * 7 + 3) & 31);
        st_global_v4(out + i * 16, r);
    }
}
// in: 4 floats per element; out: e4m3x2, e5m2x2, bf16x2, f16x2 of the first pair | e4m3 from f16x2 bits, f16 of e4m3 bits, of e5m2 bits
PRIM(32, p_cvt) { IN_OUT
    for (u32 i = tid_x(); i < 2048; i += 32) {
        const U4 v = ld_global_v4(in + i * 16);
        const float x = as_f32(v.x), y = as_f32(v.y);
        st_global_v4(out + i * 32, U4{cvt_e4m3x2_f32(x, y), cvt_e5m2x2_f32(x, y), cvt_bf16x2_f32(x, y), cvt_f16x2_f32(x, y)});
        st_global_v4(out + i * 32 + 16, U4{cvt_e4m3x2_f16x2(v.z), cvt_f16x2_e4m3x2((u16)v.z), cvt_f16x2_e5m2x2((u16)(v.z >> 16)), 0});
    }
}
// cluster of 2: each CTA writes its neighbour's shared memory, reads it back across, arrives on the neighbour's mbarrier
PRIM(32, p_cluster) { IN_OUT
    const u32 s = smem_base(), t = tid_x(), me = cluster_ctarank(), other = me ^ 1;
    if (t == 0) { mbar_init(s + 512, 32); fence_mbar_init(); }
    syncthreads();
    cluster_arrive(); cluster_wait();
    st_cluster_u32(mapa(s + t * 4, other), ld_global_u32((const u32*)in + me * 32 + t));
    mbar_arrive_cluster(mapa(s + 512, other));
    while (!mbar_try_wait(s + 512, 0)) {}
    const u32 mine = ld_shared_u32(s + t * 4);
    cluster_arrive(); cluster_wait();
    const u32 theirs = ld_cluster_u32(mapa(s + t * 4, other));
    st_global_u32((u32*)out + (me * 32 + t) * 2, mine);
    st_global_u32((u32*)out + (me * 32 + t) * 2 + 1, theirs);
    cluster_arrive(); cluster_wait();
}


// ---- additions to the first recording ---------------------------------------------------------------------------------
// in: 4 u32 per element (2048 elements, FLOATS); out: 16 u32: rounding of float arithmetic
PRIM(32, p_f32) { IN_OUT
    for (u32 i = tid_x(); i < 2048; i += 32) {
        const U4 v = ld_global_v4(in + i * 16);
        const float x = as_f32(v.x), y = as_f32(v.y), z = as_f32(v.w);
        u8* o = out + i * 48;
        st_global_v4(o, U4{as_u32(add_f32(x, y)), as_u32(sub_f32(x, y)), as_u32(mul_f32(x, y)), as_u32(fma_f32(x, y, z))});
        st_global_v4(o + 16, U4{as_u32(div_f32(x, y)), as_u32(max_f32(x, y)), as_u32(min_f32(x, y)), (u32)cvt_rni_s32_f32(x)});
        st_global_v4(o + 32, U4{as_u32(cvt_f32_bf16((u16)v.x)), as_u32(cvt_f32_f16((u16)v.z)),
                                (u32)cvt_rn_bf16_f32(x) | (u32)cvt_rn_f16_f32(x) << 16, (u32)cvt_rni_s32_f32(y * 100)});
    }
}
// in: 512 B; out: by 1, 2, 4, 8 and 16 bytes, global to shared and back
PRIM(32, p_access) { IN_OUT
    const u32 s = smem_base(), t = tid_x();
    st_shared_u8(s + t, ld_global_u8(in + t));
    st_shared_u16(s + 64 + t * 2, ld_global_nc_u16(in + 32 + t * 2));
    st_shared_u16(s + 128 + t * 2, ld_global_u16(in + 96 + t * 2));
    st_shared_f32(s + 256 + t * 4, as_f32(ld_global_nc_u32(in + 160 + 32 + t * 4)));
    const U2 a = ld_global_v2(in + t * 8), b = ld_global_nc_v2(in + 256 + t * 8);
    st_shared_v2(s + 512 + t * 8, U2{a.y, b.x});
    st_shared_v4(s + 768 + t * 16, ld_global_nc_v4(in + t * 16));
    syncwarp();
    const u32 o = (t * 5 + 3) % 32;
    st_global_u8(out + t, ld_shared_u8(s + o));
    st_global_u16(out + 64 + t * 2, ld_shared_u16(s + 64 + o * 2));
    st_global_u16(out + 128 + t * 2, ld_shared_u16(s + 128 + o * 2));
    st_global_u32(out + 256 + t * 4, as_u32(ld_shared_f32(s + 256 + o * 4)));
    const U2 c = ld_shared_v2(s + 512 + o * 8);
    st_global_v2(out + 512 + t * 8, U2{c.y, c.x});
    st_global_v4(out + 768 + t * 16, ld_shared_v4(s + 768 + o * 16));
}
// in: 32 u32; out: shfl_up by 1, 4, 31, warp_uniform, vote_ballot, the number of elected lanes, grid facts
PRIM(32, p_warp) { IN_OUT
    const u32 t = tid_x(), v = ld_global_u32(in + t * 4);
    u8* o = out + (ctaid_z() * 32 + t) * 32;
    st_global_v4(o, U4{shfl_up(v, 1), shfl_up(v, 4), shfl_up(v, 31), warp_uniform(v)});
    const u32 elected = vote_ballot(elect_one());
    st_global_v4(o + 16, U4{vote_ballot(v & 1), elected != 0 && (elected & (elected - 1)) == 0, nctaid_z() * 4 + nctaid_y() * 2 + nctaid_x(),
                            ctaid_x() + ctaid_y() + ntid_x()});
}
// in: 32 u32; out: 32 results of atom_global (sorted), its sum, the same for shared memory. One cell of `out` is the counter.
PRIM(32, p_atomics) { IN_OUT
    const u32 s = smem_base(), t = tid_x();
    if (t == 0) { st_shared_u32(s, 7); st_global_release_u32(out + 256, 5); st_global_u32(out + 260, as_u32(1.5f)); st_global_u32(out + 264, 0); }
    syncthreads();
    const u32 before = atom_global_add_u32(out + 256, 3), mine = atom_shared_add_u32(s, 2);  // every lane gets another value
    st_global_u32(out + (before - 5) / 3 * 4, before);
    st_global_u32(out + 128 + (mine - 7) / 2 * 4, mine);
    red_global_add_f32(out + 260, 0.25f);
    red_global_release_add_u32(out + 264, 1);
    while (ld_global_acquire_u32(out + 264) != 32) {}
}
// in: 1024 B; out: as stored by stmatrix x2, x4 and both transposed
PRIM(32, p_stmatrix) { IN_OUT
    const u32 s = smem_base(), t = tid_x();
    u32 r2[2], r4[4];
    for (int i = 0; i < 2; ++i) r2[i] = ld_global_u32(in + (t * 2 + i) * 4);
    for (int i = 0; i < 4; ++i) r4[i] = ld_global_u32(in + 256 + (t * 4 + i) * 4);
    stmatrix_x2(s + t % 16 * 16, r2);
    stmatrix_x4(s + 256 + ((t * 11) % 32) * 16, r4);
    stmatrix_x2_trans(s + 768 + (t * 3) % 16 * 16, r2);
    stmatrix_x4_trans(s + 1024 + ((t * 7) % 32) * 16, r4);
    syncthreads();
    dump_shared(out, s, 1536);
}
// in: 32 lanes x (a, b, c0, c1) per trial; out: d. arg = trials
PRIM(32, p_mma_s8_m8) { IN_OUT
    for (int i = 0; i < arg; ++i) {
        const U4 v = ld_global_v4(in + (i * 32 + lane_id()) * 16);
        const u32 a[1] = {v.x}, b[1] = {v.y};
        int d[2] = {(int)v.z, (int)v.w};
        mma_m8n8k16_s8(d, a, b);
        st_global_v2(out + (i * 32 + lane_id()) * 8, U2{(u32)d[0], (u32)d[1]});
    }
}
// in: 1024 B; out: the same, by copies with L2 policies and both waits, as a cluster of one
PRIM(32, p_bulk_hint) { IN_OUT
    const u32 s = smem_base(), bar = s + 1024;
    if (tid_x() == 0) {
        mbar_init(bar, 2);
        fence_mbar_init();
        mbar_expect_tx(bar, 1024);
        bulk_load_hint(s, in, 512, bar, l2_evict_first());
        bulk_load_hint(s + 512, in + 512, 512, bar, l2_evict_last());
        mbar_arrive(bar);
        mbar_arrive(bar);
    }
    syncwarp();
    mbar_wait(bar, 0);
    while (!mbar_try_wait_cluster(bar, 0)) {}
    mbar_wait_cluster(bar, 0);
    dump_shared(out, s, 1024);
}
// as p_tma, the box inside the tensor, with a policy
PRIM(128, p_tma_hint) { IN_OUT
    const u32 s = smem_base(), bar = s + 4096;
    if (tid_x() == 0) {
        mbar_init(bar, 1);
        fence_mbar_init();
        mbar_arrive_expect_tx(bar, 32 * arg);
        tma_load_2d_hint(s, &prim.map, 8, 3, bar, l2_evict_last());
    }
    syncthreads();
    mbar_wait(bar, 0);
    dump_shared(out, s, 32 * arg);
}
// cluster of 2: vectors across
PRIM(32, p_cluster_v4) { IN_OUT
    const u32 s = smem_base(), t = tid_x(), me = cluster_ctarank(), other = me ^ 1;
    st_cluster_v4(mapa(s + t * 16, other), ld_global_v4(in + (me * 32 + t) * 16));
    cluster_arrive(); cluster_wait();
    const U4 mine = ld_shared_v4(s + t * 16), theirs = ld_cluster_v4(mapa(s + t * 16, other));
    st_global_v4(out + (me * 32 + t) * 16, U4{mine.x ^ theirs.x, mine.y, theirs.z, cluster_nctarank()});
    cluster_arrive(); cluster_wait();
}
// One wgmma of every token count: in: A as 4 u32 per thread (2048 B), B n x 32 bytes; out: n / 2 u32 per thread. arg = n
template <class T, int N, class F>
HW_FN void wgmma_width(const u8* in, u8* out, F product) {
    const u32 sb = smem_base(), t = tid_x();
    fill_tile(sb, in + 2048, N, 32, 3);
    Regs<u32, 4> a;
    Regs<T, N / 2> d;
    HW_UNROLL for (int i = 0; i < 4; ++i) a[i] = ld_global_u32(in + (t * 4 + i) * 4);
    HW_UNROLL for (int i = 0; i < N / 2; ++i) d[i] = 0;
    wgmma_pin(a);
    fence_async();
    syncthreads();
    wgmma_fence();
    product(d, a, tile_desc(sb, 32, 3));
    wgmma_commit();
    wgmma_wait<0>();
    HW_UNROLL for (int i = 0; i < N / 2; ++i) st_global_u32(out + (t * (N / 2) + i) * 4, *(u32*)&d[i]);
    syncthreads();
}
#define WIDTH(N, OP, T) \
    wgmma_width<T, N>(in, out + 256 * at, [&](auto& d, const auto& a, u64 b) { OP##_rs(d, a, b, true); }); at += N;
#define P_WIDTHS(NAME, OP, T)                                                                          \
    PRIM(128, NAME) { IN_OUT                                                                           \
        u32 at = 0;  /* columns so far */                                                              \
        WIDTH(8, OP, T) WIDTH(16, OP, T) WIDTH(24, OP, T) WIDTH(32, OP, T) WIDTH(48, OP, T)            \
        WIDTH(64, OP, T) WIDTH(96, OP, T) WIDTH(128, OP, T) WIDTH(192, OP, T) WIDTH(256, OP, T)        \
    }
P_WIDTHS(p_widths_bf16, wgmma_bf16, float)
P_WIDTHS(p_widths_f16, wgmma_f16, float)
P_WIDTHS(p_widths_e4m3, wgmma_e4m3, float)
P_WIDTHS(p_widths_s8, wgmma_s8, int)
// cluster of 2: rank 0 publishes, rank 1 arrives relaxed and reads across; the last barrier only keeps rank 0 from leaving
PRIM(32, p_cluster_relaxed) { IN_OUT
    const u32 s = smem_base(), t = tid_x(), me = cluster_ctarank();
    const U4 own = ld_global_v4(in + (me * 32 + t) * 16);
    if (me == 0) { st_shared_v4(s + t * 16, own); cluster_arrive(); } else cluster_arrive_relaxed();
    cluster_wait();
    U4 v = own;
    if (me == 1) { const U4 other = ld_cluster_v4(mapa(s + (t ^ 5) * 16, 0)); v = U4{own.x ^ other.x, other.y, own.z, other.w}; }
    st_global_v4(out + (me * 32 + t) * 16, v);
    cluster_arrive_relaxed(); cluster_wait();
}

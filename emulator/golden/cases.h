// The golden cases, their inputs, and the file format, for the program that records them on a chip (device/golden.cu).
// The emulator needs only the list below and the file: both are read by tests/emu.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

// X(label, kernel, ctas, threads, in bytes, out bytes, arg, generator): generators are below
#define CASES(X)                                                                                        \
    X("ldmatrix", p_ldmatrix, 1, 32, 1024, 14 * 128 + 512, 0, BITS)                                     \
    X("mma_f16_k8", p_mma_f16_k8, 1, 32, 16 * 1280, 16 * 512, 16, MMA_F16)                              \
    X("mma_f16", p_mma_f16, 1, 32, 16 * 1280, 16 * 512, 16, MMA_F16)                                    \
    X("mma_bf16", p_mma_bf16, 1, 32, 16 * 1280, 16 * 512, 16, MMA_BF16)                                 \
    X("mma_e4m3", p_mma_e4m3, 1, 32, 16 * 1280, 16 * 512, 16, MMA_E4M3)                                 \
    X("mma_e5m2", p_mma_e5m2, 1, 32, 16 * 1280, 16 * 512, 16, MMA_E5M2)                                 \
    X("mma_s8", p_mma_s8, 1, 32, 16 * 1280, 16 * 512, 16, BITS)                                         \
    X("mma_f16_bits", p_mma_f16, 1, 32, 16 * 1280, 16 * 512, 16, BITS)                                  \
    X("mma_bf16_bits", p_mma_bf16, 1, 32, 16 * 1280, 16 * 512, 16, BITS)                                \
    X("mma_e4m3_bits", p_mma_e4m3, 1, 32, 16 * 1280, 16 * 512, 16, BITS)                                \
    X("wgmma_bf16_rs_bits", p_wgmma_bf16_rs, 1, 128, 16384, 16384, 0, BITS)                             \
    X("wgmma_e4m3_rs_bits", p_wgmma_e4m3_rs, 1, 128, 16384, 16384, 0, BITS)                             \
    X("wgmma_bf16_ss_none", p_wgmma_bf16_ss, 1, 128, 128 * 64 + 16384, 16384, 0 | 64 << 4, WG_BF16)     \
    X("wgmma_bf16_ss_sw128", p_wgmma_bf16_ss, 1, 128, 128 * 128 + 16384, 16384, 1 | 128 << 4, WG_BF16)  \
    X("wgmma_bf16_ss_sw64", p_wgmma_bf16_ss, 1, 128, 128 * 64 + 16384, 16384, 2 | 64 << 4, WG_BF16)     \
    X("wgmma_bf16_ss_sw32", p_wgmma_bf16_ss, 1, 128, 128 * 32 + 16384, 16384, 3 | 32 << 4, WG_BF16)     \
    X("wgmma_f16_ss_sw128", p_wgmma_f16_ss, 1, 128, 128 * 128 + 16384, 16384, 1 | 128 << 4, WG_F16)     \
    X("wgmma_f16_ss_sw32", p_wgmma_f16_ss, 1, 128, 128 * 32 + 16384, 16384, 3 | 32 << 4, WG_F16)        \
    X("wgmma_e4m3_ss_none", p_wgmma_e4m3_ss, 1, 128, 128 * 64 + 16384, 16384, 0 | 64 << 4, WG_E4M3)     \
    X("wgmma_e4m3_ss_sw128", p_wgmma_e4m3_ss, 1, 128, 128 * 128 + 16384, 16384, 1 | 128 << 4, WG_E4M3)  \
    X("wgmma_e4m3_ss_sw64", p_wgmma_e4m3_ss, 1, 128, 128 * 64 + 16384, 16384, 2 | 64 << 4, WG_E4M3)     \
    X("wgmma_e4m3_ss_sw32", p_wgmma_e4m3_ss, 1, 128, 128 * 32 + 16384, 16384, 3 | 32 << 4, WG_E4M3)     \
    X("wgmma_s8_ss_sw128", p_wgmma_s8_ss, 1, 128, 128 * 128 + 16384, 16384, 1 | 128 << 4, BITS)         \
    X("wgmma_bf16_rs", p_wgmma_bf16_rs, 1, 128, 16384, 16384, 0, RS_BF16)                               \
    X("wgmma_f16_rs", p_wgmma_f16_rs, 1, 128, 16384, 16384, 0, RS_F16)                                  \
    X("wgmma_e4m3_rs", p_wgmma_e4m3_rs, 1, 128, 16384, 16384, 0, RS_E4M3)                               \
    X("wgmma_s8_rs", p_wgmma_s8_rs, 1, 128, 16384, 16384, 0, BITS)                                      \
    X("tma_none", p_tma, 1, 128, 8320, 3 * 32 * 64, 64, TMA0)                                           \
    X("tma_sw128", p_tma, 1, 128, 8320, 3 * 32 * 128, 128, TMA1)                                        \
    X("tma_sw64", p_tma, 1, 128, 8320, 3 * 32 * 64, 64, TMA2)                                           \
    X("tma_sw32", p_tma, 1, 128, 8320, 3 * 32 * 32, 32, TMA3)                                           \
    X("bulk", p_bulk, 1, 32, 1024, 1024, 0, BITS)                                                       \
    X("cp_async", p_cp_async, 1, 32, 1024, 896, 0, BITS)                                                \
    X("packed_bf16", p_packed_bf16, 1, 32, 16384, 16384, 0, PAIRS_BF16)                                 \
    X("packed_f16", p_packed_f16, 1, 32, 16384, 16384, 0, PAIRS_F16)                                    \
    X("bits", p_bits, 1, 32, 16384, 16384, 0, BITS)                                                     \
    X("cvt", p_cvt, 1, 32, 32768, 65536, 0, FLOATS)                                                     \
    X("cluster", p_cluster, 2, 32, 256, 512, 0, BITS)   \
    /* additions to the first recording: append only, the inputs depend on the place in this list */    \
    X("f32", p_f32, 1, 32, 32768, 98304, 0, FLOATS)                                                     \
    X("f32_bits", p_f32, 1, 32, 32768, 98304, 0, BITS)                                                  \
    X("access", p_access, 1, 32, 512, 1280, 0, BITS)                                                    \
    X("warp", p_warp, 1, 32, 128, 1024, 0, BITS)                                                        \
    X("atomics", p_atomics, 1, 32, 128, 268, 0, BITS)                                                   \
    X("stmatrix", p_stmatrix, 1, 32, 1024, 1536, 0, BITS)                                               \
    X("mma_s8_m8", p_mma_s8_m8, 1, 32, 8 * 512, 8 * 256, 8, BITS)                                       \
    X("bulk_hint", p_bulk_hint, 1, 32, 1024, 1024, 0, BITS)                                             \
    X("tma_hint", p_tma_hint, 1, 128, 8320, 32 * 128, 128, TMA1)                                        \
    X("cluster_v4", p_cluster_v4, 2, 32, 1024, 1024, 0, BITS)                                           \
    X("widths_bf16", p_widths_bf16, 1, 128, 2048 + 256 * 32, 864 * 256, 0, RS_BF16)                     \
    X("widths_f16", p_widths_f16, 1, 128, 2048 + 256 * 32, 864 * 256, 0, RS_F16)                        \
    X("widths_e4m3", p_widths_e4m3, 1, 128, 2048 + 256 * 32, 864 * 256, 0, RS_E4M3)                     \
    X("widths_s8", p_widths_s8, 1, 128, 2048 + 256 * 32, 864 * 256, 0, BITS)                            \
    X("cluster_relaxed", p_cluster_relaxed, 2, 32, 1024, 1024, 0, BITS)

enum Gen { BITS, FLOATS, PAIRS_BF16, PAIRS_F16, MMA_F16, MMA_BF16, MMA_E4M3, MMA_E5M2,
           WG_BF16, WG_F16, WG_E4M3, RS_BF16, RS_F16, RS_E4M3, TMA0, TMA1, TMA2, TMA3 };

struct Rng {
    uint64_t s;
    uint32_t operator()() { s ^= s << 13; s ^= s >> 7; s ^= s << 17; return uint32_t(s >> 16); }
};
// A random number of 1 sign, eb exponent, mb mantissa bits with its exponent within `spread` of the middle.
inline uint32_t random_float(Rng& r, int eb, int mb, int spread, int top = 0) {
    const int bias = (1 << (eb - 1)) - 1, max_e = (1 << eb) - (mb == 3 ? 1 : 2);
    int e = bias + top - int(r() % (spread + 1));
    e = e < 0 ? 0 : e > max_e ? max_e : e;
    uint32_t m = r() & ((1u << mb) - 1);
    if (mb == 3 && e == 15 && m == 7) m = 6;  // e4m3's NaN
    return (r() & 1) << (eb + mb) | uint32_t(e) << mb | m;
}
inline void random_bytes(Rng& r, uint8_t* p, size_t n, Gen g, int spread) {  // elements of an MMA operand
    const bool bf = g == MMA_BF16 || g == WG_BF16 || g == RS_BF16, f8 = g == MMA_E4M3 || g == WG_E4M3 || g == RS_E4M3;
    if (f8 || g == MMA_E5M2)
        for (size_t i = 0; i < n; ++i) p[i] = random_float(r, f8 ? 4 : 5, f8 ? 3 : 2, spread < 12 ? spread : 12, spread / 2 < 6 ? spread / 2 : 6);
    else
        for (size_t i = 0; i < n / 2; ++i) {
            const uint16_t v = random_float(r, bf ? 8 : 5, bf ? 7 : 10, bf ? spread : spread < 24 ? spread : 24, spread / 2 < 8 ? spread / 2 : 8);
            memcpy(p + 2 * i, &v, 2);
        }
}
inline std::vector<uint8_t> make_input(Gen g, size_t n, int arg, uint64_t seed) {
    Rng r{seed * 0x9E3779B97F4A7C15ull + 12345};
    for (int i = 0; i < 8; ++i) r();
    std::vector<uint8_t> v(n);
    uint32_t* w = reinterpret_cast<uint32_t*>(v.data());
    for (size_t i = 0; i < n / 4; ++i) w[i] = r();
    const int spreads[4] = {0, 4, 12, 30};
    if (g >= MMA_F16 && g <= MMA_E5M2)
        for (int t = 0; t < arg; ++t)
            for (int l = 0; l < 32; ++l) {
                uint32_t* p = w + (t * 32 + l) * 10;
                random_bytes(r, reinterpret_cast<uint8_t*>(p), 24, g, spreads[t % 4]);
                for (int j = 0; j < 4; ++j) p[6 + j] = t % 3 == 0 ? 0 : random_float(r, 8, 23, 2 + spreads[t % 4], 4);
            }
    if (g >= WG_BF16 && g <= WG_E4M3) {
        random_bytes(r, v.data(), n - 16384, g, 8);
        for (size_t i = (n - 16384) / 4; i < n / 4; ++i) w[i] = random_float(r, 8, 23, 8, 6);
    }
    if (g >= RS_BF16 && g <= RS_E4M3) random_bytes(r, v.data(), n, g, 4);
    if (g == PAIRS_BF16 || g == PAIRS_F16)  // half the elements arbitrary bits, half of close magnitude
        for (size_t i = n / 8; i < n / 4; ++i) {
            auto one = [&] { return g == PAIRS_BF16 ? random_float(r, 8, 7, 6) : random_float(r, 5, 10, 6); };
            w[i] = one() | one() << 16;
        }
    if (g == FLOATS)
        for (size_t i = 0; i < n / 4; ++i) {
            if (i % 4 == 2) w[i] = (i / 4 * 0x0101) ^ (r() << 16);
            else if (i > n / 16) w[i] = random_float(r, 8, 23, 30, 12);
        }
    return v;
}

struct Record { std::string name; std::vector<uint8_t> in, out; };
inline void write_record(FILE* f, const char* name, const std::vector<uint8_t>& in, const std::vector<uint8_t>& out) {
    char head[32] = {};
    strncpy(head, name, 31);
    const uint32_t n[2] = {uint32_t(in.size()), uint32_t(out.size())};
    fwrite(head, 1, 32, f); fwrite(n, 4, 2, f);
    fwrite(in.data(), 1, in.size(), f); fwrite(out.data(), 1, out.size(), f);
}
inline bool read_record(FILE* f, Record& r) {
    char head[32];
    uint32_t n[2];
    if (fread(head, 1, 32, f) != 32 || fread(n, 4, 2, f) != 2) return false;
    r.name = head; r.in.resize(n[0]); r.out.resize(n[1]);
    return fread(r.in.data(), 1, n[0], f) == n[0] && fread(r.out.data(), 1, n[1], f) == n[1];
}

// Conversions between float formats and packed 16-bit arithmetic, each rounded once to nearest even.
// It must not know kernels; bit-exact on the golden cases packed_bf16, packed_f16 and cvt.
#include "machine.h"

namespace emu {
namespace {
double bits_double(u64 u) { double d; memcpy(&d, &u, 8); return d; }
u64 double_bits(double d) { u64 u; memcpy(&u, &d, 8); return u; }
float bits_float(u32 u) { float f; memcpy(&f, &u, 4); return f; }
u32 float_bits(float f) { u32 u; memcpy(&u, &f, 4); return u; }

// Small floats of eb exponent and mb mantissa bits. eb == 4 is e4m3 without infinities.
template <int eb, int mb> double from_bits(u32 u) {
    constexpr int bias = (1 << (eb - 1)) - 1;
    const u32 e = u >> mb & ((1 << eb) - 1), m = u & ((1 << mb) - 1);
    const u64 sign = u64(u >> (eb + mb) & 1) << 63;
    if (eb == 4 ? (e == 15 && m == 7) : e == (1 << eb) - 1) return bits_double(sign | 0x7ffull << 52 | u64(m) << (52 - mb));
    if (e) return bits_double(sign | u64(int(e) - bias + 1023) << 52 | u64(m) << (52 - mb));
    return bits_double(sign | double_bits(double(m) * bits_double(u64(1023 + 1 - bias - mb) << 52)));
}
template <int eb, int mb> u32 to_bits(double v, bool saturate) {
    constexpr int bias = (1 << (eb - 1)) - 1, top = (1 << eb) - 1;
    constexpr u32 largest = eb == 4 ? 0x7e : (u32(top) << mb) - 1, inf = u32(top) << mb;
    const u64 u = double_bits(v);
    const u32 sign = u32(u >> 63) << (eb + mb);
    const u64 a = u << 1 >> 1;
    if (a > 0x7ffull << 52) return (1u << (eb + mb)) - 1;  // canonical NaN: all ones, positive
    if (a == 0x7ffull << 52) return sign | (saturate ? largest : inf);
    int e = int(a >> 52) - 1023;
    if (e < -1022) return sign;  // double subnormals are below half of any format's least value
    u64 m = (a & ((1ull << 52) - 1)) | 1ull << 52;
    int drop = 52 - mb;  // bits to round away
    if (e < 1 - bias) { drop += 1 - bias - e; e = 1 - bias; }
    if (drop > 54) return sign;
    const u64 half = 1ull << (drop - 1), rest = m & ((1ull << drop) - 1);
    m >>= drop;
    if (rest > half || (rest == half && (m & 1))) ++m;
    const u32 r = u32(e + bias - 1) * (1u << mb) + u32(m);  // m carries into the exponent by itself
    if (r > largest) return sign | (saturate ? largest : inf);
    return sign | r;
}
// a * b + c rounded once: the product is exact in double; the sum is made odd when inexact, so that the second rounding is harmless.
double fma_odd(double a, double b, double c) {
    const double p = a * b, s = p + c, t = s - p, err = (p - (s - t)) + (c - t);
    if (err == 0 || !std::isfinite(s)) return s;
    u64 u = double_bits(s);
    if (!(u & 1)) u += (err > 0) == (s > 0) ? 1 : u64(-1);
    return bits_double(u);
}
template <int eb, int mb> u32 fma2(u32 a, u32 b, u32 c) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 16)
        r |= to_bits<eb, mb>(fma_odd(from_bits<eb, mb>(a >> i & 0xffff), from_bits<eb, mb>(b >> i & 0xffff), from_bits<eb, mb>(c >> i & 0xffff)), false) << i;
    return r;
}
template <int eb, int mb> u32 sum2(u32 a, u32 b, double sign) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 16) r |= to_bits<eb, mb>(fma_odd(from_bits<eb, mb>(a >> i & 0xffff), 1, sign * from_bits<eb, mb>(b >> i & 0xffff)), false) << i;
    return r;
}
template <int eb, int mb> u32 mul2(u32 a, u32 b) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 16) r |= to_bits<eb, mb>(from_bits<eb, mb>(a >> i & 0xffff) * from_bits<eb, mb>(b >> i & 0xffff), false) << i;
    return r;
}
}  // namespace
u32 add_f16x2(u32 a, u32 b) { return sum2<5, 10>(a, b, 1); }
u32 sub_f16x2(u32 a, u32 b) { return sum2<5, 10>(a, b, -1); }
u32 mul_f16x2(u32 a, u32 b) { return mul2<5, 10>(a, b); }
u32 fma_f16x2(u32 a, u32 b, u32 c) { return fma2<5, 10>(a, b, c); }
u32 add_bf16x2(u32 a, u32 b) { return sum2<8, 7>(a, b, 1); }
u32 sub_bf16x2(u32 a, u32 b) { return sum2<8, 7>(a, b, -1); }
u32 mul_bf16x2(u32 a, u32 b) { return mul2<8, 7>(a, b); }
u32 fma_bf16x2(u32 a, u32 b, u32 c) { return fma2<8, 7>(a, b, c); }

float canonical(float v) { return v != v ? bits_float(0x7fffffff) : v; }
float fma_f32(float a, float b, float c) { return canonical(std::fma(a, b, c)); }
float exp2_f32(float a) { return float(std::exp2(double(a))); }
int round_s32(float v) {
    if (v != v) return 0;
    if (v >= 2147483648.0f) return 2147483647;
    if (v < -2147483648.0f) return -2147483647 - 1;
    return int(std::nearbyint(double(v)));
}
float f32_of_f16(u16 v) { return canonical(float(from_bits<5, 10>(v))); }
u16 f16_of(float v) { return u16(to_bits<5, 10>(v, false)); }
u16 bf16_of(float v) {  // the same rounding on the bits of the float: bf16 is its upper half
    const u32 u = float_bits(v);
    if ((u << 1) > 0xff000000u) return 0x7fff;
    return u16((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
u8 e4m3_of(float v) { return u8(to_bits<4, 3>(v, true)); }
u8 e5m2_of(float v) { return u8(to_bits<5, 2>(v, true)); }
u16 f16_of_e4m3(u8 v) { return u16(to_bits<5, 10>(from_bits<4, 3>(v), false)); }
u16 f16_of_e5m2(u8 v) { return u16(to_bits<5, 10>(from_bits<5, 2>(v), false)); }
}  // namespace emu

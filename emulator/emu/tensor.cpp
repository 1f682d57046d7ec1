// The tensor cores: mma.sync, wgmma, and the arithmetic behind both, which is bit-exact to an H200 on the golden data.
// It must not know how a chip differs from another beyond its Profile.
#include "machine.h"
#include "profile.h"
#include <exception>

namespace emu {
// ---- arithmetic -----------------------------------------------------------------------------------------------------------
namespace {
constexpr int nothing = -100000;
constexpr u32 max_n = 256, max_k = 32;
struct Num { double v; int e; bool special; };  // value (0 for NaN and infinity), the exponent the multiplier sees
struct Table { std::vector<Num> num; std::vector<double> exact; };
const Table& table(Type t) {  // all values of a type
    static Table tables[4];
    Table& out = tables[int(t)];
    if (!out.num.empty()) return out;
    const int eb = t == Type::bf16 ? 8 : t == Type::e4m3 ? 4 : 5, mb = t == Type::bf16 ? 7 : t == Type::f16 ? 10 : t == Type::e4m3 ? 3 : 2;
    const int bias = (1 << (eb - 1)) - 1;
    for (u32 bits = 0; bits < 1u << (1 + eb + mb); ++bits) {
        const int e = bits >> mb & ((1 << eb) - 1), m = bits & ((1 << mb) - 1);
        const double sign = bits >> (eb + mb) & 1 ? -1 : 1;
        if (t == Type::e4m3 ? (e == 15 && m == 7) : e == (1 << eb) - 1) {
            out.num.push_back({0, 0, true});
            out.exact.push_back(m ? NAN : sign * INFINITY);
            continue;
        }
        const double v = sign * (e ? std::ldexp((1 << mb) + m, e - bias - mb) : std::ldexp(m, 1 - bias - mb));
        out.num.push_back({v, e ? e - bias : m ? 1 - bias : nothing, false});
        out.exact.push_back(v);
    }
    return out;
}
inline double power(int e) { const u64 u = u64(1023 + e) << 52; double d; memcpy(&d, &u, 8); return d; }
inline float toward_zero(double x, int bits) {  // keeps `bits` fraction bits
    u64 u;
    memcpy(&u, &x, 8);
    u &= ~0ull << (52 - bits);
    double y;
    memcpy(&y, &u, 8);
    if (std::fabs(y) >= 0x1p-126) return float(y);
    return float(std::trunc(x * 0x1p149) * 0x1p-149);
}
// c[n] = c[n] + sum over k of a[k] b[k][n], as one sum (see Sum in profile.h); n and k multiples of 4, four columns at a time.
// A scaled term is below 2^(fraction + 2) <= 2^27, so truncation by a conversion to int is exact and eight terms fit an int.
typedef double D4 __attribute__((vector_size(32)));
typedef i64 L4 __attribute__((vector_size(32)));
typedef int I4 __attribute__((vector_size(16)));
EMU_HOT void fused_sum(u32 n, u32 k, const double* av, const int* ae, const double* bv, const int* be, float* c, int fraction, int result) {
    for (u32 j0 = 0; j0 < n; j0 += 4, bv += 4, be += 4, c += 4) {
        I4 top, u;
        memcpy(&u, c, 16);
        const I4 ce = (u >> 23) & 255, zero = {};
        top = ((u << 1) == 0) ? zero + nothing : ((ce == 0) ? zero + 1 : ce) - 127;
        for (u32 i = 0; i < k; ++i) {
            I4 e;
            memcpy(&e, be + i * n, 16);
            e += ae[i];
            top = top > e ? top : e;
        }
        top = top > -900 ? top : zero - 900;
        const L4 scale_bits = __builtin_convertvector(1023 + fraction - top, L4) << 52;
        const D4 scale = (D4)scale_bits, cd = {c[0], c[1], c[2], c[3]};
        D4 sum = __builtin_convertvector(__builtin_convertvector(cd * scale, I4), D4);
        for (u32 i = 0; i < k; i += 4) {
            I4 part = {};
            for (u32 h = i; h < i + 4; ++h) {
                D4 b;
                memcpy(&b, bv + h * n, 32);
                part += __builtin_convertvector(av[h] * b * scale, I4);
            }
            sum += __builtin_convertvector(part, D4);
        }
        for (u32 j = 0; j < 4; ++j) c[j] = toward_zero(sum[j] * power(top[j] - fraction), result);
    }
}
}  // namespace

void multiply(const Profile& p, Type t, bool warpgroup, u32 rows, u32 n, u32 kbytes, const u8* a, const u8* b, u32* c) {
    if (t == Type::s8) {
        for (u32 i = 0; i < rows; ++i)
            for (u32 j = 0; j < n; ++j) {
                u32 s = c[i * n + j];
                for (u32 k = 0; k < kbytes; ++k) s += u32(int(static_cast<signed char>(a[i * kbytes + k])) * static_cast<signed char>(b[j * kbytes + k]));
                c[i * n + j] = s;
            }
        return;
    }
    const u32 bytes = t == Type::bf16 || t == Type::f16 ? 2 : 1, k = kbytes / bytes;
    const bool split = bytes == 1 && !warpgroup && p.fp8_mma == Fp8::split;
    const Sum sum = bytes == 1 && !split ? p.fp8 : p.half;
    const u32 per_sum = split ? k / 2 : std::min(sum.block, k);
    const Table& values = table(t);
    auto code = [&](const u8* q) { return bytes == 2 ? u32(q[0] | q[1] << 8) : q[0]; };
    // split: of every four k the lower pair goes into the first product, the upper into the second
    auto place = [&](u32 i) { return split ? (i % 4 / 2) * 16 + i / 4 * 2 + i % 2 : i; };
    static std::vector<double> bv;
    static std::vector<int> be;
    bv.resize(k * n); be.resize(k * n);
    double av[max_k];
    int ae[max_k];
    float from_zero[max_n], full[max_n];
    bool odd[max_n] = {}, any_odd = false;  // columns of B with a NaN or infinity
    for (u32 j = 0; j < n; ++j)
        for (u32 i = 0; i < k; ++i) {
            const Num& x = values.num[code(b + j * kbytes + i * bytes)];
            bv[place(i) * n + j] = x.v; be[place(i) * n + j] = x.e;
            odd[j] |= x.special;
            any_odd |= x.special;
        }
    for (u32 r = 0; r < rows; ++r) {
        float *cr = reinterpret_cast<float*>(c) + r * n, old[max_n];
        bool odd_row = any_odd;
        for (u32 i = 0; i < k; ++i) {
            const Num& x = values.num[code(a + r * kbytes + i * bytes)];
            av[place(i)] = x.v; ae[place(i)] = x.e;
            odd_row |= x.special;
        }
        for (u32 j = 0; j < n; ++j) {
            old[j] = cr[j];
            if (!std::isfinite(old[j])) { odd_row = true; cr[j] = 0; }
        }
        bool any_full = false;
        float* d = split ? from_zero : cr;
        if (split) memset(from_zero, 0, 4 * n);
        for (u32 i = 0; i < k; i += per_sum) {
            fused_sum(n, per_sum, av + i, ae + i, &bv[i * n], &be[i * n], d, sum.fraction, sum.result);
            if (i + per_sum >= k) break;
            for (u32 j = 0; j < n; ++j)  // overflowed between two sums: infinity stays
                if (std::isinf(d[j])) {
                    if (!any_full) memset(full, 0, 4 * n);
                    any_full = true;
                    full[j] = d[j];
                    d[j] = 0;
                }
        }
        if (any_full) for (u32 j = 0; j < n; ++j) if (full[j] != 0) d[j] = full[j];
        if (split) for (u32 j = 0; j < n; ++j) cr[j] += d[j];
        if (!odd_row) continue;
        for (u32 j = 0; j < n; ++j) {  // NaN and infinity
            double s = old[j];
            bool special = !std::isfinite(old[j]) || odd[j];
            for (u32 i = 0; i < k; ++i) {
                const u32 x = code(a + r * kbytes + i * bytes), y = code(b + j * kbytes + i * bytes);
                special |= values.num[x].special;
                s += values.exact[x] * values.exact[y];
            }
            if (!special) continue;
            const u32 nan = 0x7fffffff;
            if (std::isnan(s)) memcpy(&cr[j], &nan, 4);
            else cr[j] = float(s);
        }
    }
}

// ---- mma.sync -----------------------------------------------------------------------------------------------------------
namespace {
struct MmaArgs { Type t; u32 words; u32* d; const u32 *a, *b; };  // words: 32-bit words in a row of A
void warp_product(Warp& w) {
    auto* arg = reinterpret_cast<MmaArgs**>(w.args);
    const u32 words = arg[0]->words;
    for (u32 l = 1; l < 32; ++l)
        if (arg[l]->t != arg[0]->t || arg[l]->words != words) fault("diverged warp: mma.sync of different shapes or types");
    u32 a[16 * 8], b[8 * 8], c[16 * 8];
    for (u32 l = 0; l < 32; ++l) {
        for (u32 j = 0; j < words / 2; ++j) a[(l / 4 + 8 * (j & 1)) * words + l % 4 + 4 * (j >> 1)] = arg[l]->a[j];
        for (u32 j = 0; j < words / 4; ++j) b[(l / 4) * words + l % 4 + 4 * j] = arg[l]->b[j];
        for (u32 i = 0; i < 4; ++i) c[(l / 4 + 8 * (i >> 1)) * 8 + 2 * (l % 4) + (i & 1)] = arg[l]->d[i];
    }
    multiply(*current_run.profile, arg[0]->t, false, 16, 8, words * 4, reinterpret_cast<u8*>(a), reinterpret_cast<u8*>(b), c);
    for (u32 l = 0; l < 32; ++l)
        for (u32 i = 0; i < 4; ++i) arg[l]->d[i] = c[(l / 4 + 8 * (i >> 1)) * 8 + 2 * (l % 4) + (i & 1)];
}
void small_product(Warp& w) {  // m8n8k16, one register of A and of B a lane
    auto* arg = reinterpret_cast<MmaArgs**>(w.args);
    u32 a[8 * 4], b[8 * 4], c[8 * 8];
    for (u32 l = 0; l < 32; ++l) {
        a[l] = arg[l]->a[0];
        b[l] = arg[l]->b[0];
        for (u32 i = 0; i < 2; ++i) c[2 * l + i] = arg[l]->d[i];
    }
    multiply(*current_run.profile, Type::s8, false, 8, 8, 16, reinterpret_cast<u8*>(a), reinterpret_cast<u8*>(b), c);
    for (u32 l = 0; l < 32; ++l)
        for (u32 i = 0; i < 2; ++i) arg[l]->d[i] = c[2 * l + i];
}
}  // namespace
void mma_sync(Type t, u32 kbytes, void* d, const u32* a, const u32* b) {
    MmaArgs m{t, kbytes / 4, static_cast<u32*>(d), a, b};
    collective("mma.sync", &m, warp_product);
}
void mma_m8n8k16_s8(int* d, const u32* a, const u32* b) {
    MmaArgs m{Type::s8, 4, reinterpret_cast<u32*>(d), a, b};
    collective("mma.sync.m8n8k16", &m, small_product);
}

// ---- wgmma: issued operations run when the first thread waits for them --------------------------------------------------------
namespace {
struct Desc {
    u32 start, lbo, sbo, mode;
    explicit Desc(u64 d) : start((d & 0x3fff) << 4), lbo((d >> 16 & 0x3fff) << 4), sbo((d >> 32 & 0x3fff) << 4), mode(u32(d >> 62)) {
        if (d & 0x3ffec000c000c000ull) fault("wgmma: matrix descriptor 0x%llx has reserved or base-offset bits set", d);
    }
    u32 address(u32 row, u32 chunk) const {  // of 16 bytes of a row of 32 bytes
        if (mode == 0) return start + row / 8 * sbo + chunk * lbo + row % 8 * 16;
        const u32 pitch = 256 >> mode, a = start + row / 8 * sbo + row % 8 * pitch + chunk * 16;
        return a ^ ((a >> 7) & (pitch / 16 - 1)) << 4;
    }
};
void read_operand(Cta& c, const WgOp& op, u64 desc, u32 rows, u32 warp0, u32 time, bool is_a, u8* out) {
    const Desc d(desc);
    const char* what = is_a ? "wgmma (A)" : "wgmma (B)";
    for (u32 r = 0; r < rows; ++r)
        for (u32 j = 0; j < 2; ++j) {
            const u32 at = d.address(r, j);
            memcpy(out + r * 32 + j * 16, c.bytes(at, 16, 16, what), 16);
            c.check_read(at, 16, op.seen, ASYNC, what);
            for (u32 w = 0; w < 4; ++w)
                if (!is_a || w == r / 16) c.note_read(at, 16, c.slot_wgmma(warp0 + w), time, true);
        }
}
void execute(Cta& c, u32 warp0, WgOp& op, u32 index) {
    static std::vector<u8> a, b;
    static std::vector<u32> acc;
    a.resize(64 * 32); b.resize(op.n * 32); acc.assign(64 * op.n, 0);
    if (op.rs) {
        for (u32 t = 0; t < 128; ++t)
            for (u32 j = 0; j < 4; ++j) memcpy(&a[(16 * (t / 32) + t % 32 / 4 + 8 * (j & 1)) * 32 + (t % 4 + 4 * (j >> 1)) * 4], &op.a_regs[t][j], 4);
    } else read_operand(c, op, op.a, 64, warp0, index + 1, true, a.data());
    read_operand(c, op, op.b, op.n, warp0, index + 1, false, b.data());
    auto each = [&](auto fn) {
        for (u32 t = 0; t < 128; ++t)
            for (u32 i = 0; i < op.n / 2; ++i)
                fn(acc[(16 * (t / 32) + t % 32 / 4 + 8 * (i / 2 & 1)) * op.n + 8 * (i / 4) + 2 * (t % 4) + (i & 1)], op.d[t]->hidden[i]);
    };
    if (op.accumulate) each([](u32& m, u32& reg) { m = reg; });
    multiply(*current_run.profile, op.type, true, 64, op.n, 32, a.data(), b.data(), acc.data());
    each([](u32& m, u32& reg) { reg = m; });
    op.executed = true;
}
}  // namespace

void RegState::refuse(u32 i) const {
    if (i >= count) fault("register index %u of %u", i, count);
    fault("register %u of a wgmma in flight is accessed (no wgmma.wait_group for it yet)", i);
}
void RegState::drop() {
    if (hidden && !std::uncaught_exceptions()) fault("accumulators of a wgmma in flight go out of scope");
    free(hidden);
    Fiber& f = me();
    for (size_t i = 0; i < f.wg_regs.size(); ++i) {
        if (f.wg_regs[i].d == this) f.wg_regs[i].d = nullptr;
        if (f.wg_regs[i].a == this) f.wg_regs[i].a = nullptr;
    }
}

void wgmma(Type t, u32 n, RegState& d, const u32* a_regs, RegState* a_state, u64 a, u64 b, bool accumulate) {
    Fiber& f = me();
    Cta& c = *f.cta;
    if (f.tid / 128 * 128 + 128 > c.threads) fault("wgmma: thread is in no whole warpgroup");
    if (f.wg_fences == 1) fault("wgmma: no wgmma.fence before the first wgmma");
    if (!d.flights && d.touched == f.wg_fences) fault("wgmma: accumulator registers were accessed after the last wgmma.fence");
    if (a_state && !a_state->flights && a_state->touched == f.wg_fences) fault("wgmma: registers of A were accessed after the last wgmma.fence");
    WarpGroup& g = c.groups[f.tid / 128];
    const u32 index = f.wg_issued++ - g.base, me_in_group = f.tid % 128;
    if (index == g.ops.size()) {
        auto op = std::make_unique<WgOp>();
        op->type = t; op->n = n; op->rs = a_state; op->accumulate = accumulate; op->a = a; op->b = b; op->seen = f.clock;
        g.ops.push_back(std::move(op));
    }
    WgOp& op = *g.ops[index];
    if (op.type != t || op.n != n || op.rs != (a_state != nullptr) || op.accumulate != accumulate || op.a != a || op.b != b)
        fault("wgmma: operation %u differs between threads of the warpgroup (shape, descriptor or scale-d)", index + g.base);
    op.seen.meet(f.clock);
    op.d[me_in_group] = &d;
    if (!d.flights++) {
        d.hidden = static_cast<u32*>(malloc(4 * d.count));
        memcpy(d.hidden, d.visible, 4 * d.count);
        memset(d.visible, 0xff, 4 * d.count);
    }
    if (a_state) { memcpy(op.a_regs[me_in_group], a_regs, 16); ++a_state->flights; }
    f.wg_regs.push_back({&d, a_state});
    if (++op.issued == 128) wake(g.waiting);
}
void wgmma_commit() { me().wg_groups.push_back(me().wg_issued); }
void wgmma_wait(u32 keep) {
    Fiber& f = me();
    Cta& c = *f.cta;
    if (f.tid / 128 * 128 + 128 > c.threads) fault("wgmma.wait_group: thread is in no whole warpgroup");
    WarpGroup& g = c.groups[f.tid / 128];
    u32 target = f.wg_retired;
    while (f.wg_groups.size() > keep) { target = f.wg_groups.front(); f.wg_groups.pop_front(); }
    auto land = [](RegState* r) {
        if (!r || --r->flights || !r->hidden) return;
        memcpy(r->visible, r->hidden, r->count * 4);
        free(r->hidden);
        r->hidden = nullptr;
    };
    for (; f.wg_retired < target; ++f.wg_retired) {
        while (g.ops[f.wg_retired - g.base]->issued < 128) { g.waiting.push_back(&f); block("wgmma", f.wg_retired); }
        WgOp& op = *g.ops[f.wg_retired - g.base];
        if (!op.executed) execute(c, f.tid / 128 * 4, op, f.wg_retired);
        land(f.wg_regs.front().d);
        land(f.wg_regs.front().a);
        f.wg_regs.pop_front();
        f.clock.hb(c.slot_wgmma(f.warp)) = f.wg_retired + 1;
    }
    while (!g.ops.empty() && g.ops.front()->executed) {  // forget what all threads have retired
        for (u32 t = 0; t < 128; ++t) if (c.fibers[f.tid / 128 * 128 + t].wg_retired <= g.base) return;
        g.ops.pop_front();
        ++g.base;
    }
}
}  // namespace emu

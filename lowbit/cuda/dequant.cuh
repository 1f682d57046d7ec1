// Packed codes, scales and zero points to numbers, exactly, in registers.
// Knows bit patterns only; it must not know where codes come from or what they are multiplied with.
//
// A step is one product of 16 k (32 k with 8-bit operands): its four A registers hold two (four) elements each, the lowest bits the first. Codes of b
// bits for four (two) steps are b words of a lane (layout/fields.py); every 16-bit (8-bit) part of a word holds bits of one element, so shifts and
// masks serve all.
#pragma once
#include "types.cuh"

namespace lowbit {
template <int kBits_> struct Uint { static constexpr int kBits = kBits_, kOffset = 0; };
template <int kBits_> struct Int { static constexpr int kBits = kBits_, kOffset = 1 << (kBits_ - 1); };  // stored as value + kOffset
template <int kExponent_, int kMantissa_> struct Float { static constexpr int kBits = 1 + kExponent_ + kMantissa_, kOffset = 0, kExponent = kExponent_, kMantissa = kMantissa_; };

HW_FN u32 shift(u32 v, int left) { return left >= 0 ? v << left : v >> -left; }
HW_FN constexpr u32 both(u32 half) { return half * 0x10001u; }
template <int kPart> HW_FN constexpr u32 parts(u32 part) { return kPart == 16 ? both(part) : part * 0x01010101u; }

template <class Value> constexpr bool kIsFloat = false;
template <int kExponent, int kMantissa> constexpr bool kIsFloat<Float<kExponent, kMantissa>> = true;

// What makes up the codes of kRegisters registers: count[r] pieces, each a word shifted left (right if negative) and masked.
struct Piece { int word, left; u32 mask; };
template <int kRegisters, int kBits> struct Pieces { Piece piece[kRegisters][kBits]; int count[kRegisters]; };

// A lane's codes of one vector: 64 k, of 8-bit codes 32; register r = 4 * step + register of the step.
template <class Value, int kPart = 16> struct Codes {
    static constexpr int kBits = Value::kBits, kSteps = kPart / (kBits == 8 ? 8 : 4), kVectors = kPart / 2 / kSteps, kRegisters = 4 * kSteps;
    static constexpr int kWords = kBits * kRegisters / kPart, kFours = kWords & 4;
    u32 words[kWords];
    HW_FN void load(u32 smem_unit, int v) {  // runs of four words, two and one, each for all lanes side by side
        const u32 at = smem_unit + v * (128 * kWords), lane = lane_id();
        if constexpr (kFours != 0) { const U4 q = ld_shared_v4(at + lane * 16); words[0] = q.x; words[1] = q.y; words[2] = q.z; words[3] = q.w; }
        if constexpr ((kWords & 2) != 0) { const U2 q = ld_shared_v2(at + 128 * kFours + lane * 8); words[kFours] = q.x; words[kFours + 1] = q.y; }
        if constexpr ((kWords & 1) != 0) words[kWords - 1] = ld_shared_u32(at + 128 * (kWords - 1) + lane * 4);
    }
    // kPart * word + bit of its parts where bit c of register r lies; layout/fields.py in C++.
    HW_FN static constexpr int place(int r, int c) {
        constexpr bool kSpread = kPart == 16 && kIsFloat<Value> && kBits % 2 == 0;
        constexpr int kFields = kPart / kBits, kLeft = kPart - kBits * kFields, kWhole = kBits * kFields;
        constexpr int kMiddle = kSpread && kLeft ? 15 - kLeft : kBits * ((kFields + 1) / 2);
        const int field = r % kFields;
        if (kSpread && r < kWhole) {  // a nibble for each field: its lowest magnitude bit, its sign
            constexpr int kMagnitude = kBits == 4 ? 0xc036 : kBits == 6 ? 0x05 : 0x04, kSign = kBits == 4 ? 0xa9bf : kBits == 6 ? 0xaf : 0xbf;
            const int above = kBits == 8 && field == 1 && c >= 4 ? 8 : 0;
            return r / kFields * kPart + (c == kBits - 1 ? kSign >> 4 * field & 15 : (kMagnitude >> 4 * field & 15) + c + above);
        }
        if (kLeft == 0 || r < kWhole) return r / kFields * kPart + field * kBits + c + (field * kBits >= kMiddle ? kLeft : 0);
        constexpr int kMain = kBits - (kLeft ? kBits % kLeft : 0), kGap = kLeft ? kLeft : 1;
        const int i = r - kWhole, bit = (c + i % 2 * kMain) % kBits;
        const int number = bit < kMain ? i * kMain + bit : kLeft * kMain + i * (kBits - kMain) + bit - kMain;
        return number / kGap * kPart + kMiddle + number % kGap;
    }
    // The pieces that bring bit c of every code to bit to(c) of both halves: one for each shift of a word.
    template <class To> HW_FN static constexpr Pieces<kRegisters, kBits> pieces(To to) {
        Pieces<kRegisters, kBits> p{};
        for (int r = 0; r < kRegisters; ++r)
            for (int c = 0; c < kBits; ++c) {
                const int word = place(r, c) / kPart, left = to(c) - place(r, c) % kPart;
                int j = 0;
                while (j < p.count[r] && (p.piece[r][j].word != word || p.piece[r][j].left != left)) ++j;
                p.piece[r][j] = {word, left, p.piece[r][j].mask | parts<kPart>(1u << to(c))};
                if (j == p.count[r]) ++p.count[r];
            }
        return p;
    }
    // Register r put together from its pieces, all of it `to` bits higher.
    HW_FN u32 gather(const Pieces<kRegisters, kBits>& p, int r, int to) const {
        u32 v = 0;
        HW_UNROLL for (int j = 0; j < kBits; ++j)
            if (j < p.count[r]) v |= shift(words[p.piece[r][j].word], p.piece[r][j].left + to) & p.piece[r][j].mask << to;
        return v;
    }
    struct Whole { HW_FN constexpr int operator()(int c) const { return c; } };
    // The code of register i of step s in bits to .. to + kBits - 1 of every part, all other bits 0.
    HW_FN u32 at(int s, int i, int to) const {
        constexpr Pieces<kRegisters, kBits> kPieces = pieces(Whole{});
        return gather(kPieces, 4 * s + i, to);
    }
};

// Facts of an operand type: fraction bits, the pattern of 2^(kTop - f), that of -2^p / kFactor, the float factor left on fp32.
template <class Operand> struct Bits;
template <> struct Bits<Bf16> {
    static constexpr int kFraction = 7, kExponent = 8, kBias = 127;
    static constexpr float kFactor = 64.0f;
    HW_FN static constexpr u32 power(int p) { return both(static_cast<u32>(kBias + p) << kFraction); }
    static constexpr u32 kUnit = both(0x3c80);  // 1 / kFactor
};
template <> struct Bits<F16> {
    static constexpr int kFraction = 10, kExponent = 5, kBias = 15;
    static constexpr float kFactor = 512.0f;
    HW_FN static constexpr u32 power(int p) { return both(static_cast<u32>(kBias + p) << kFraction); }
    static constexpr u32 kUnit = both(0x1800);
};
constexpr u32 kMinusZero = 0x80008000;  // adding it keeps the sign of zero

// step(): the A registers of one step, each value times 1 / kFactor. minus[h]: what to add for rows g and g + 8, from `offset`.
template <class Operand, class Value> struct Convert;

// Integers. A 16-bit float whose exponent field is 0 or 1 is linear in its bits: the pattern u << f, f + n <= 8 (bf16) or 11 (fp16), is
// exactly u * 2^(f-133) or u * 2^(f-24). So one mask leaves a number, and one FMA brings it to (u - offset) * 2^-6 (bf16: times
// 2^(127-f)) or * 2^-9 (fp16: times 2^(15-f)), exact for |u - offset| <= 256; the offset may be a zero point of the row. kFactor takes the
// power of two back on fp32. Against or-ing in an exponent this saves two shifts and, since a LOP3 has room for one constant, four
// moves per eight 4-bit weights: 10 issue slots a word instead of 18 (8192x8192, sm_90a).
template <class Operand, class Value> struct ConvertInteger {
    using B = Bits<Operand>;
    using C = Codes<Value>;
    static constexpr float kFactor = B::kFactor;
    HW_FN static constexpr u32 fixed_offset() {  // -kOffset / kFactor
        int log = -1;
        for (int o = Value::kOffset; o; o >>= 1) ++log;
        return log < 0 ? kMinusZero : B::power(log - (B::kFraction == 7 ? 6 : 9)) | kMinusZero;
    }
    HW_FN static u32 offset(u32 o) { return Operand::fma(both(o), B::power(B::kBias) | kMinusZero, kMinusZero); }  // of 0 .. 255
    // The bit that each register's code starts at: where it takes the fewest shifts that no register before it has made. A word needs no shift
    // for the fields of its lower byte and one, by 8, for those of the upper; FORMATS.md counts them.
    struct Targets { int to[C::kRegisters]; };
    HW_FN static constexpr Targets targets() {
        const auto p = C::pieces(typename C::Whole{});
        Targets t{};
        bool made[C::kWords][32] = {};  // by how much a word has been shifted right, plus 16
        for (int r = 0; r < C::kRegisters; ++r) {
            int best = 1 << 30;
            for (int to = 0; to <= B::kFraction + 1 - Value::kBits; ++to) {
                int cost = 0;
                for (int j = 0; j < p.count[r]; ++j) {
                    const int left = p.piece[r][j].left + to;
                    cost += left == 0 || made[p.piece[r][j].word][16 - left] ? 0 : left == -8 ? 2 : 3;
                }
                if (cost < best) { best = cost; t.to[r] = to; }
            }
            for (int j = 0; j < p.count[r]; ++j) made[p.piece[r][j].word][16 - p.piece[r][j].left - t.to[r]] = true;
        }
        return t;
    }
    HW_FN static void step(u32 (&a)[4], const C& codes, int s, const u32 (&minus)[2]) {
        constexpr Targets kTargets = targets();
        HW_UNROLL for (int i = 0; i < 4; ++i) {
            const int to = kTargets.to[4 * s + i];
            a[i] = Operand::fma(codes.at(s, i, to), B::power(B::kBias - to), minus[i & 1]);
        }
    }
};
template <class Operand, int kBits> struct Convert<Operand, Int<kBits>> : ConvertInteger<Operand, Int<kBits>> {};
template <class Operand, int kBits> struct Convert<Operand, Uint<kBits>> : ConvertInteger<Operand, Uint<kBits>> {};

// Floats  s|e..e|m..m. The exponent and mantissa bits move to the top of the operand's mantissa and the bottom of its exponent, the
// sign to bit 15: bf16 s|0..0e..e|m..m0..0. The number is then too small by 2^(bias difference); multiplying by that power of two is exact,
// also for subnormals (the operand's own carry them). Formats that exceed fp16 are not for it (problem.py). The bits cannot go elsewhere, as
// an integer's may: so the layout has them where e2m1, e3m2 and e4m3 as bf16 need the fewest masks and shifts.
template <class Operand, int kExponent, int kMantissa> struct Convert<Operand, Float<kExponent, kMantissa>> {
    using B = Bits<Operand>;
    using C = Codes<Float<kExponent, kMantissa>>;
    static constexpr float kFactor = 1.0f;
    static constexpr int kUp = B::kBias - ((1 << (kExponent - 1)) - 1);  // patterns are 2^kUp too small
    HW_FN static constexpr u32 fixed_offset() { return kMinusZero; }
    HW_FN static u32 offset(u32) { return kMinusZero; }
    struct Target { HW_FN constexpr int operator()(int c) const { return c == C::kBits - 1 ? 15 : B::kFraction - kMantissa + c; } };
    HW_FN static u32 pattern(const C& codes, int s, int i) {  // register i of step s, over the multiplier
        constexpr auto kPieces = C::pieces(Target{});
        return codes.gather(kPieces, 4 * s + i, 0);
    }
    HW_FN static void step(u32 (&a)[4], const C& codes, int s, const u32 (&minus)[2]) {
        HW_UNROLL for (int i = 0; i < 4; ++i) a[i] = Operand::fma(pattern(codes, s, i), B::power(kUp), minus[i & 1]);
    }
    HW_FN static void scaled_step(u32 (&a)[4], const C& codes, int s, const u32 (&factor)[2]) {  // factor: 2^kUp and all else, of rows g and g + 8
        HW_UNROLL for (int i = 0; i < 4; ++i) a[i] = Operand::fma(pattern(codes, s, i), factor[i & 1], kMinusZero);
    }
};

// Codebooks. Entries come as operand patterns, cut into their low and their high bytes; one PRMT looks four codes up in eight bytes, so
// 16 entries take two and a choice by the codes' top bits. c_i, d_i: the codes of elements 0 and 1 of register i.
//
//     word            d3 d2 d1 d0 c3 c2 c1 c0     a nibble each, without the top bit where there are 16 entries
//     sel[0]                      d1 d0 c1 c0     bytes 0 and 2: two whole registers in the 16 bits that PRMT reads;  sel[1]: 1 and 3
//     low, high       d1 | d0 | c1 | c0           a byte each, by sel[0]
//     a[0]            high d0 | low d0 | high c0 | low c0
//
// Eight codes of 4 bits: 1 to mask, 2 to cut, 8 to look up, 3 for masks of the top bits (a PRMT repeats a byte's), 4 to choose, 4 to put
// together: 22 operations, where int4 takes 9. Up to 8 entries: 2 + 4 + 4, and 4 (2 bits) to 10 (3 bits) to make a word of nibbles.
template <int kBits_, u16... kEntries> struct Codebook {
    static constexpr int kBits = kBits_, kOffset = 0;
    HW_FN static constexpr u32 bytes(int first, int shift) {  // of entries first .. first + 3: bits shift .. shift + 7
        constexpr u16 entries[16] = {kEntries...};
        u32 r = 0;
        for (int i = 0; i < 4; ++i) r |= (static_cast<u32>(entries[first + i]) >> shift & 0xff) << 8 * i;
        return r;
    }
};
template <class Operand, int kBits, u16... kEntries> struct Convert<Operand, Codebook<kBits, kEntries...>> {
    static constexpr float kFactor = 1.0f;
    HW_FN static constexpr u32 fixed_offset() { return kMinusZero; }
    HW_FN static u32 offset(u32) { return kMinusZero; }
    template <int kShift> HW_FN static u32 look_up(u32 sel, u32 top) {
        using Table = Codebook<kBits, kEntries...>;
        constexpr u32 k0 = Table::bytes(0, kShift), k4 = Table::bytes(4, kShift), k8 = Table::bytes(8, kShift), k12 = Table::bytes(12, kShift);
        const u32 r = prmt(k0, k4, sel);
        if constexpr (kBits < 4) return r;
        return (prmt(k8, k12, sel) & top) | (r & ~top);
    }
    HW_FN static void step(u32 (&a)[4], const Codes<Codebook<kBits, kEntries...>>& codes, int s, const u32 (&)[2]) {
        const u32 word = codes.at(s, 0, 0) | codes.at(s, 1, 4) | codes.at(s, 2, 8) | codes.at(s, 3, 12), left = word << 4;
        const u32 index = kBits < 4 ? word : word & 0x77777777;
        HW_UNROLL for (int pair = 0; pair < 2; ++pair) {
            const u32 sel = prmt(index, 0, pair ? 0x4431 : 0x4420), top = prmt(left, word, pair ? 0xfbd9 : 0xeac8);
            const u32 low = look_up<0>(sel, top), high = look_up<8>(sel, top);
            a[2 * pair] = prmt(low, high, 0x6240);
            a[2 * pair + 1] = prmt(low, high, 0x7351);
        }
    }
};

// ---- 8-bit operands: four elements a register, a byte each --------------------------------------------------------------------

// Integers for int8 products: at the top of their bytes, so that the sign needs no spreading and products are 2^(8 - bits) times too large, of unsigned ones
// one bit lower. Stored signed codes have their top bit flipped.
//
//     u  (4 bits, value + 8)     0000 uuuu -> uuuu 0000, top bit flipped: (u - 8) 2^4 in two's complement
template <int kBits> struct Convert<S8, Int<kBits>> {
    using C = Codes<Int<kBits>, 8>;
    static constexpr float kFactor = 1.0f / (1 << (8 - kBits));
    HW_FN static constexpr u32 fixed_offset() { return 0; }
    HW_FN static void step(u32 (&a)[4], const C& codes, int s, const u32 (&)[2]) {
        HW_UNROLL for (int i = 0; i < 4; ++i) a[i] = codes.at(s, i, 8 - kBits) ^ 0x80808080;
    }
};
template <int kBits> struct Convert<S8, Uint<kBits>> {
    static_assert(kBits < 8, "255 is no int8");
    using C = Codes<Uint<kBits>, 8>;
    static constexpr float kFactor = 1.0f / (1 << (7 - kBits));
    HW_FN static constexpr u32 fixed_offset() { return 0; }
    HW_FN static void step(u32 (&a)[4], const C& codes, int s, const u32 (&)[2]) {
        HW_UNROLL for (int i = 0; i < 4; ++i) a[i] = codes.at(s, i, 7 - kBits);
    }
};

// Integers for e4m3 products: the bytes 0 .. 16 of e4m3 are 0 .. 16 times 2^-9, subnormals and the first binade in one line, so a magnitude is its own
// pattern and only signed values take arithmetic. With h = 2^(bits - 1), u = value + h as stored:
//
//     n = (u & h) ^ h          h where the value is negative, else 0
//     m = u & (h - 1)          the magnitude, or of a negative value h - magnitude
//     byte = ((m ^ (n - (n >> bits - 1))) + (n >> bits - 1)) | n << 8 - bits          h - m = ~m + 1 within its bits, and the sign on top
template <int kBits> struct Convert<E4m3, Int<kBits>> {
    static_assert(kBits <= 5, "e4m3 has no integers beyond 16 without gaps");
    using C = Codes<Int<kBits>, 8>;
    static constexpr float kFactor = 512.0f;
    HW_FN static constexpr u32 fixed_offset() { return 0; }
    HW_FN static void step(u32 (&a)[4], const C& codes, int s, const u32 (&)[2]) {
        constexpr u32 kHalf = parts<8>(1u << (kBits - 1)), kRest = parts<8>((1u << (kBits - 1)) - 1);
        HW_UNROLL for (int i = 0; i < 4; ++i) {
            const u32 u = codes.at(s, i, 0), n = (u & kHalf) ^ kHalf, one = n >> (kBits - 1);
            a[i] = (((u & kRest) ^ (n - one)) + one) | n << (8 - kBits);
        }
    }
};
template <int kBits> struct Convert<E4m3, Uint<kBits>> {
    static_assert(kBits <= 4, "e4m3 has no integers beyond 16 without gaps");
    using C = Codes<Uint<kBits>, 8>;
    static constexpr float kFactor = 512.0f;
    HW_FN static constexpr u32 fixed_offset() { return 0; }
    HW_FN static void step(u32 (&a)[4], const C& codes, int s, const u32 (&)[2]) {
        HW_UNROLL for (int i = 0; i < 4; ++i) a[i] = codes.at(s, i, 0);
    }
};

// Floats for e4m3 products: sign to bit 7, the rest to the bottom of e4m3's exponent and the top of its mantissa; 2^(7 - bias) too small, subnormals too.
//
//     s|ee|m  (e2m1) -> s 00ee m00
template <int kExponent, int kMantissa> struct Convert<E4m3, Float<kExponent, kMantissa>> {
    static_assert(kExponent <= 4 && kMantissa <= 3, "not every value is an e4m3");
    using C = Codes<Float<kExponent, kMantissa>, 8>;
    static constexpr float kFactor = static_cast<float>(1 << (8 - (1 << (kExponent - 1))));
    HW_FN static constexpr u32 fixed_offset() { return 0; }
    struct Target { HW_FN constexpr int operator()(int c) const { return c == C::kBits - 1 ? 7 : 3 - kMantissa + c; } };
    HW_FN static void step(u32 (&a)[4], const C& codes, int s, const u32 (&)[2]) {
        constexpr auto kPieces = C::pieces(Target{});
        HW_UNROLL for (int i = 0; i < 4; ++i) a[i] = codes.gather(kPieces, 4 * s + i, 0);
    }
};

// ---- scales: a lane's own, packed into words; value(w, i) is number i -------------------------------------------------------
// pair<Operand, kUp>(w, group): numbers 2 group and 2 group + 1, the scales of rows g and g + 8, times 2^kUp, as the halves of an operand. kTop:
// all are below 2^(kTop + 1); 0 where that is nothing to build on.
HW_FN u32 spread_bytes(const u32* w, int group, bool high) {  // two bytes, each the upper or the lower of a half
    return prmt(w[group / 2], 0, high ? (group & 1 ? 0x3424 : 0x1404) : (group & 1 ? 0x4342 : 0x4140));
}
struct NoScale { static constexpr int kBytes = 0, kTop = 0; };
struct ScaleF32 {
    static constexpr int kBytes = 4, kTop = 0;
    HW_FN static float value(const u32* w, int i) { return as_f32(w[i]); }
};
struct ScaleBf16 {
    static constexpr int kBytes = 2, kTop = 0;
    HW_FN static float value(const u32* w, int i) { return as_f32(i & 1 ? w[i / 2] & 0xffff0000 : w[i / 2] << 16); }
    template <class Operand, int kUp> HW_FN static u32 pair(const u32* w, int group) {
        static_assert(Bits<Operand>::kExponent == 8 && kUp == 0);
        return w[group];
    }
};
struct ScaleF16 {
    static constexpr int kBytes = 2, kTop = 0;
    HW_FN static float value(const u32* w, int i) { return cvt_f32_f16(static_cast<u16>(w[i / 2] >> 16 * (i & 1))); }
};
struct ScaleE8m0 {  // 2^(code - 127): the code is float's exponent; code 0 is the subnormal 2^-127. 255 (NaN) never gets here.
    static constexpr int kBytes = 1, kTop = 0;
    HW_FN static float value(const u32* w, int i) {
        return max_f32(as_f32((w[i / 4] >> 8 * (i & 3) & 0xff) << 23), as_f32(0x00400000));  // one instruction, where a choice takes two
    }
    template <class Operand, int kUp> HW_FN static u32 pair(const u32* w, int group) {
        static_assert(Bits<Operand>::kExponent == 8 && kUp == 0);  // bf16 has float's exponent
        const u32 codes = spread_bytes(w, group, false);
        return codes << 7 | (~(codes + 0x00ff00ff) >> 2 & 0x00400040);  // bit 8 of a sum says that a code is not 0
    }
};
template <int kExponent, int kMantissa, bool kSigned> struct ScaleFloat {  // as above: bits in place, times a power of two
    static constexpr int kBytes = 1, kBias = (1 << (kExponent - 1)) - 1, kTop = kExponent <= 5 ? 1 << (kExponent - 1) : 0;  // 2^32 less: sums may underflow
    HW_FN static float value(const u32* w, int i) {
        constexpr u32 kMagnitude = ((1u << (kExponent + kMantissa)) - 1) << (23 - kMantissa);
        const u32 code = w[i / 4] << (31 + !kSigned - kExponent - kMantissa - 8 * (i & 3));  // its sign on top
        const u32 bits = kSigned ? static_cast<u32>(static_cast<int>(code) >> (8 - kExponent)) & (kMagnitude | 0x80000000) : code >> (9 - kExponent) & kMagnitude;
        return mul_f32(as_f32(bits), as_f32(static_cast<u32>(254 - kBias) << 23));
    }
    template <class Operand, int kUp> HW_FN static u32 pair(const u32* w, int group) {
        using B = Bits<Operand>;
        constexpr int kWidth = kExponent + kMantissa, kAll = B::kBias - kBias + kUp;  // bits are 2^(B::kBias - kBias) too small
        const u32 codes = spread_bytes(w, group, true);  // of each half: magnitude at bit 8, sign above it
        const u32 magnitude = shift(codes, B::kFraction - kMantissa - 8) & both(((1u << kWidth) - 1) << (B::kFraction - kMantissa));
        const u32 bits = kSigned ? (shift(codes, 7 - kWidth) & 0x80008000) | magnitude : magnitude;
        if constexpr (kAll <= B::kBias) return Operand::fma(bits, B::power(kAll), kMinusZero);
        return Operand::fma(Operand::fma(bits, B::power(B::kBias - kBias), kMinusZero), B::power(kUp), kMinusZero);
    }
};

// Where scales that fold multiply the patterns of a float in its conversion's own FMA, at no cost: 2^kTop stays out of them, so that no factor is too
// large, and is taken back on fp32.
template <class C> constexpr bool kMerges = C::kFold && kIsFloat<typename C::Value> && C::Scale::kTop > 0;
HW_FN constexpr float power_of_two(int p) { return p ? 2 * power_of_two(p - 1) : 1; }
template <class C> HW_FN constexpr float left_on_sums() {
    if constexpr (kMerges<C>) return power_of_two(C::Scale::kTop);
    return Convert<typename C::Operand, typename C::Value>::kFactor;
}

// The scales of kGroups consecutive groups of rows g and g + 8, of the kSteps groups of a unit: [group][row], contiguous for a lane.
template <class Scale, int kSteps, int kGroups> struct UnitScales {
    static constexpr u32 kBytes = 2 * kGroups * Scale::kBytes, kWords = (kBytes + 3) / 4;
    u32 w[kWords];
    HW_FN void load(u32 smem_scales, u32 first) {  // the first-th set of kGroups
        const u32 at = smem_scales + lane_id() / 4 * (2 * kSteps * Scale::kBytes) + first * kBytes;
        if constexpr (kBytes == 2) w[0] = ld_shared_u16(at);
        if constexpr (kBytes == 4) w[0] = ld_shared_u32(at);
        if constexpr (kBytes == 8) { const U2 v = ld_shared_v2(at); w[0] = v.x; w[1] = v.y; }
        if constexpr (kBytes >= 16) {
            HW_UNROLL for (u32 i = 0; i < kWords; i += 4) { const U4 v = ld_shared_v4(at + 4 * i); w[i] = v.x; w[i + 1] = v.y; w[i + 2] = v.z; w[i + 3] = v.w; }
        }
    }
    HW_FN auto get(int group, int half) const { return Scale::value(w, 2 * group + half); }
    template <class Operand, int kUp> HW_FN u32 pair(int group) const { return Scale::template pair<Operand, kUp>(w, group); }
};
template <int kSteps, int kGroups> struct UnitScales<NoScale, kSteps, kGroups> {
    HW_FN void load(u32, u32) {}
    HW_FN float get(int, int) const { return 1.0f; }
};

// Zero points lie after the scales and like them: a byte each for integers, in the value's own sign; floats otherwise.
enum Zero { kNoZero, kIntZero, kFloatZero };
struct ZeroByte {
    static constexpr int kBytes = 1;
    HW_FN static u32 value(const u32* w, int i) { return w[i / 4] >> 8 * (i & 3) & 0xff; }
};
}  // namespace lowbit

// Warpgroup tensor-core products (sm_90a): d (+)= A * B, B (and A of _ss) from shared-memory descriptors, K-major.
// d and A registers belong to the hardware from the call to the wait: do not name them in between.
#pragma once
namespace hw {
HW_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
HW_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> HW_FN void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// No instruction: keeps ptxas from computing a fragment of A later than here, which would serialise the products (C7510).
HW_FN void wgmma_pin(Regs<u32, 4>& a) { asm volatile("" : "+r"(a.v[0]), "+r"(a.v[1]), "+r"(a.v[2]), "+r"(a.v[3])::"memory"); }

// Operand lists: HW_Ln are the constraints of n registers, HW_Sn their places in the text.
#define HW_R4(C, i) C(d.v[i]), C(d.v[i + 1]), C(d.v[i + 2]), C(d.v[i + 3])
#define HW_R8(C, i) HW_R4(C, i), HW_R4(C, i + 4)
#define HW_R32(C, i) HW_R8(C, i), HW_R8(C, i + 8), HW_R8(C, i + 16), HW_R8(C, i + 24)
#define HW_L4(C) HW_R4(C, 0)
#define HW_L8(C) HW_R8(C, 0)
#define HW_L12(C) HW_R8(C, 0), HW_R4(C, 8)
#define HW_L16(C) HW_R8(C, 0), HW_R8(C, 8)
#define HW_L24(C) HW_L16(C), HW_R8(C, 16)
#define HW_L32(C) HW_R32(C, 0)
#define HW_L48(C) HW_R32(C, 0), HW_R8(C, 32), HW_R8(C, 40)
#define HW_L64(C) HW_R32(C, 0), HW_R32(C, 32)
#define HW_L96(C) HW_L64(C), HW_R32(C, 64)
#define HW_L128(C) HW_L96(C), HW_R32(C, 96)
#define HW_S4 "%0,%1,%2,%3"
#define HW_S8 HW_S4 ",%4,%5,%6,%7"
#define HW_S12 HW_S8 ",%8,%9,%10,%11"
#define HW_S16 HW_S12 ",%12,%13,%14,%15"
#define HW_S24 HW_S16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define HW_S32 HW_S24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define HW_S48 HW_S32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define HW_S64 HW_S48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define HW_S96 HW_S64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83" \
    ",%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define HW_S128 HW_S96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115" \
    ",%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// T, R, C: type, count and constraint of the accumulators, S and L: their lists, p0..p5: the operand numbers after them
#define HW_WGMMA_SS(NAME, T, R, C, TEXT, S, L, TAIL, p0, p1, p2)                                                          \
    HW_FN void NAME##_ss(Regs<T, R>& d, u64 a, u64 b, bool accumulate) {                                               \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %" #p2 ", 0; wgmma.mma_async.sync.aligned." TEXT " {" S "}, %" #p0 \
                     ", %" #p1 ", p" TAIL ";}" : L(C) : "l"(a), "l"(b), "r"((int)accumulate) : "memory");                 \
    }
#define HW_WGMMA_RS(NAME, T, R, C, TEXT, S, L, TAIL, p0, p1, p2, p3, p4, p5)                                              \
    HW_FN void NAME##_rs(Regs<T, R>& d, const Regs<u32, 4>& a, u64 b, bool accumulate) {                               \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %" #p5 ", 0; wgmma.mma_async.sync.aligned." TEXT " {" S "}, {%" #p0 \
                     ",%" #p1 ",%" #p2 ",%" #p3 "}, %" #p4 ", p" TAIL ";}"                                             \
                     : L(C) : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "l"(b), "r"((int)accumulate) : "memory"); \
    }
#define HW_WGMMA_N(N, R, S, L, p0, p1, p2, p3, p4, p5)                                                                  \
    HW_WGMMA_SS(wgmma_bf16, float, R, "+f", "m64n" #N "k16.f32.bf16.bf16", S, L, ", 1, 1, 0, 0", p0, p1, p2)            \
    HW_WGMMA_RS(wgmma_bf16, float, R, "+f", "m64n" #N "k16.f32.bf16.bf16", S, L, ", 1, 1, 0", p0, p1, p2, p3, p4, p5)   \
    HW_WGMMA_SS(wgmma_f16, float, R, "+f", "m64n" #N "k16.f32.f16.f16", S, L, ", 1, 1, 0, 0", p0, p1, p2)               \
    HW_WGMMA_RS(wgmma_f16, float, R, "+f", "m64n" #N "k16.f32.f16.f16", S, L, ", 1, 1, 0", p0, p1, p2, p3, p4, p5)      \
    HW_WGMMA_SS(wgmma_e4m3, float, R, "+f", "m64n" #N "k32.f32.e4m3.e4m3", S, L, ", 1, 1", p0, p1, p2)                  \
    HW_WGMMA_RS(wgmma_e4m3, float, R, "+f", "m64n" #N "k32.f32.e4m3.e4m3", S, L, ", 1, 1", p0, p1, p2, p3, p4, p5)      \
    HW_WGMMA_SS(wgmma_s8, int, R, "+r", "m64n" #N "k32.s32.s8.s8", S, L, "", p0, p1, p2)                                \
    HW_WGMMA_RS(wgmma_s8, int, R, "+r", "m64n" #N "k32.s32.s8.s8", S, L, "", p0, p1, p2, p3, p4, p5)
// The token counts (N) in use; the accumulator count N / 2 selects the overload.
HW_WGMMA_N(8, 4, HW_S4, HW_L4, 4, 5, 6, 7, 8, 9)
HW_WGMMA_N(16, 8, HW_S8, HW_L8, 8, 9, 10, 11, 12, 13)
HW_WGMMA_N(24, 12, HW_S12, HW_L12, 12, 13, 14, 15, 16, 17)
HW_WGMMA_N(32, 16, HW_S16, HW_L16, 16, 17, 18, 19, 20, 21)
HW_WGMMA_N(48, 24, HW_S24, HW_L24, 24, 25, 26, 27, 28, 29)
HW_WGMMA_N(64, 32, HW_S32, HW_L32, 32, 33, 34, 35, 36, 37)
HW_WGMMA_N(96, 48, HW_S48, HW_L48, 48, 49, 50, 51, 52, 53)
HW_WGMMA_N(128, 64, HW_S64, HW_L64, 64, 65, 66, 67, 68, 69)
HW_WGMMA_N(192, 96, HW_S96, HW_L96, 96, 97, 98, 99, 100, 101)
HW_WGMMA_N(256, 128, HW_S128, HW_L128, 128, 129, 130, 131, 132, 133)
}  // namespace hw

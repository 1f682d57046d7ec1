// Warpgroup tensor-core products (sm_90a): twins of lowbit/cuda/hw/wgmma.h.
// Operations run when the first thread waits for them; until then the accumulators are out of reach.
#pragma once
namespace hw {
HW_FN void wgmma_fence() { emu::need_exactly(90, "wgmma.fence"); ++emu::self->wg_fences; }
HW_FN void wgmma_commit() { emu::need_exactly(90, "wgmma.commit_group"); emu::wgmma_commit(); }
template <int N> HW_FN void wgmma_wait() { emu::need_exactly(90, "wgmma.wait_group"); emu::wgmma_wait(N); }
HW_FN void wgmma_pin(Regs<u32, 4>& a) { if (a.state.flights) a.state.refuse(0); }  // no instruction, so no access for the fence

#define HW_WGMMA(NAME, TYPE, T, R)                                                                                    \
    HW_FN void NAME##_ss(Regs<T, R>& d, u64 a, u64 b, bool accumulate) {                                              \
        emu::need_exactly(90, "wgmma.mma_async");                                                                     \
        emu::wgmma(emu::Type::TYPE, 2 * R, d.state, nullptr, nullptr, a, b, accumulate);                              \
    }                                                                                                                 \
    HW_FN void NAME##_rs(Regs<T, R>& d, const Regs<u32, 4>& a, u64 b, bool accumulate) {                              \
        emu::need_exactly(90, "wgmma.mma_async");                                                                     \
        emu::wgmma(emu::Type::TYPE, 2 * R, d.state, a.v, &a.state, 0, b, accumulate);                                 \
    }
#define HW_WGMMA_N(R)                   \
    HW_WGMMA(wgmma_bf16, bf16, float, R) \
    HW_WGMMA(wgmma_f16, f16, float, R)   \
    HW_WGMMA(wgmma_e4m3, e4m3, float, R) \
    HW_WGMMA(wgmma_s8, s8, int, R)
HW_WGMMA_N(4)
HW_WGMMA_N(8)
HW_WGMMA_N(12)
HW_WGMMA_N(16)
HW_WGMMA_N(24)
HW_WGMMA_N(32)
HW_WGMMA_N(48)
HW_WGMMA_N(64)
HW_WGMMA_N(96)
HW_WGMMA_N(128)
}  // namespace hw

// How bytes get from global to shared memory on each generation, and the ring of stages one warp keeps in flight.
// Knows addresses and barriers; it must not know what the bytes mean.
#pragma once
#include "types.cuh"

namespace lowbit {
enum Mover {
    kPlain,    // Turing: loads through registers
    kCpAsync,  // sm_80..89: 16-byte asynchronous copies by every lane
    kBulk,     // sm_90 and later: one thread starts a copy of a whole stage, an mbarrier tells when it is here
};

template <class C> HW_FN void copy_16(u32 smem, const u8* gmem) {
    if constexpr (C::kMover == kPlain) st_shared_v4(smem, ld_global_v4(gmem)); else cp_async_16(smem, gmem, 16);
}
template <class C> HW_FN void copy_commit() {
    if constexpr (C::kMover != kPlain) cp_async_commit();
}

// The stages of one warp: start(), then per stage wait() -> address and release().
template <class C> struct WarpRing {
    const u32 smem, bars;
    const u8* next = nullptr;  // source of the stage to issue next
    u32 stride = 0, bytes = 0, to_issue = 0, slot = 0, phase = 0;
    u64 policy = 0;
    static constexpr u32 kStageBytes = C::kWarpBlocks * C::kUnitBytes;

    HW_FN WarpRing(u32 smem_, u32 bars_) : smem(smem_), bars(bars_) {}

    HW_FN void init() {
        if constexpr (C::kMover == kBulk) {
            if (lane_id() == 0)
                HW_UNROLL for (u32 s = 0; s < C::kStages; ++s) mbar_init(bars + 8 * s, 1);
            fence_mbar_init();
            syncwarp();
        }
    }
    // `count` stages of bytes_ bytes, stride_ bytes apart; as many as fit are issued now
    HW_FN void start(const u8* from, u32 stride_, u32 bytes_, u32 count) {
        next = from; stride = stride_; bytes = bytes_; to_issue = count;
        if constexpr (C::kMover == kBulk) policy = l2_evict_first();
        HW_UNROLL for (u32 s = 0; s < C::kStages; ++s) issue(s);
    }
    HW_FN void issue(u32 s) {
        const bool more = to_issue != 0;
        const u32 target = smem + s * kStageBytes;
        if constexpr (C::kMover == kBulk) {
            if (more && lane_id() == 0) {
                mbar_arrive_expect_tx(bars + 8 * s, bytes);
                bulk_load_hint(target, next, bytes, bars + 8 * s, policy);
            }
        } else {
            if (more)
                for (u32 i = lane_id() * 16; i < bytes; i += 512) copy_16<C>(target + i, next + i);
            copy_commit<C>();
        }
        if (more) { --to_issue; next += stride; }
    }
    HW_FN u32 wait() {
        if constexpr (C::kMover == kBulk) mbar_wait(bars + 8 * slot, phase);
        if constexpr (C::kMover == kCpAsync) cp_async_wait<C::kStages - 1>();
        if constexpr (C::kMover != kBulk) syncwarp();
        return smem + slot * kStageBytes;
    }
    HW_FN void release() {
        // Every lane has read the stage. A bulk copy writes through another proxy: without the fence it may overtake reads that
        // are still queued (seen on an H200 as one wrong row block in some thousand launches).
        if constexpr (C::kMover == kBulk) fence_async();
        syncwarp();
        issue(slot);
        if (++slot == C::kStages) { slot = 0; phase ^= 1; }
    }
};
}  // namespace lowbit

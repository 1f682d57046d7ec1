// Asynchronous copies, mbarriers, proxy fences: twins of lowbit/cuda/hw/async.h.
// The engine decides when a copy lands; L2 policies are checked for being policies and change nothing else.
#pragma once
namespace hw {
HW_FN void cp_async_4(u32 dst, const void* src, u32 n) { emu::need(80, "cp.async"); emu::cp_async(dst, src, 4, n); }
HW_FN void cp_async_8(u32 dst, const void* src, u32 n) { emu::need(80, "cp.async"); emu::cp_async(dst, src, 8, n); }
HW_FN void cp_async_16(u32 dst, const void* src, u32 n) { emu::need(80, "cp.async"); emu::cp_async(dst, src, 16, n); }
HW_FN void cp_async_commit() { emu::need(80, "cp.async.commit_group"); emu::cp_async_commit(); }
template <int N> HW_FN void cp_async_wait() { emu::need(80, "cp.async.wait_group"); emu::cp_async_wait(N); }

HW_FN void mbar_init(u32 bar, u32 count) { emu::need(80, "mbarrier.init"); emu::mbar_init(bar, count); }
HW_FN void mbar_arrive(u32 bar) { emu::need(80, "mbarrier.arrive"); emu::mbar_arrive(bar, 0, 1, false, "mbarrier.arrive"); }
HW_FN void mbar_arrive_expect_tx(u32 bar, u32 bytes) { emu::need(90, "mbarrier.arrive.expect_tx"); emu::mbar_arrive(bar, bytes, 1, false, "mbarrier.arrive.expect_tx"); }
HW_FN void mbar_expect_tx(u32 bar, u32 bytes) { emu::need(90, "mbarrier.expect_tx"); emu::mbar_arrive(bar, bytes, 0, false, "mbarrier.expect_tx"); }
HW_FN void mbar_arrive_cluster(u32 bar) { emu::need(90, "mbarrier.arrive.shared::cluster"); emu::mbar_arrive(bar, 0, 1, true, "mbarrier.arrive.shared::cluster"); }
HW_FN bool mbar_try_wait(u32 bar, u32 parity) { emu::need(90, "mbarrier.try_wait"); return emu::mbar_try_wait(bar, parity); }
HW_FN bool mbar_try_wait_cluster(u32 bar, u32 parity) { emu::need(90, "mbarrier.try_wait"); return emu::mbar_try_wait(bar, parity); }
HW_FN void mbar_wait(u32 bar, u32 parity) { emu::need(90, "mbarrier.try_wait"); while (!mbar_try_wait(bar, parity)) {} }
HW_FN void mbar_wait_cluster(u32 bar, u32 parity) { emu::need(90, "mbarrier.try_wait"); while (!mbar_try_wait_cluster(bar, parity)) {} }
HW_FN void fence_mbar_init() { emu::need(90, "fence.mbarrier_init"); emu::fence_mbar_init(); }
HW_FN void fence_async() { emu::need(90, "fence.proxy.async"); emu::fence_async(); }

HW_FN u64 l2_evict_first() { emu::need(80, "createpolicy"); return emu::policy(0); }
HW_FN u64 l2_evict_last() { emu::need(80, "createpolicy"); return emu::policy(1); }

HW_FN void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) { emu::need(90, "cp.async.bulk"); emu::bulk_load(dst, src, bytes, bar); }
HW_FN void bulk_load_hint(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
    emu::need(90, "cp.async.bulk"); emu::check_policy(policy); emu::bulk_load(dst, src, bytes, bar);
}
HW_FN void tma_load_2d(u32 dst, const TensorMap* map, int x, int y, u32 bar) { emu::need(90, "cp.async.bulk.tensor"); emu::load_tensor_2d(dst, map, x, y, bar); }
HW_FN void tma_load_2d_hint(u32 dst, const TensorMap* map, int x, int y, u32 bar, u64 policy) {
    emu::need(90, "cp.async.bulk.tensor"); emu::check_policy(policy); emu::load_tensor_2d(dst, map, x, y, bar);
}
HW_FN void bulk_store(void* dst, u32 src, u32 bytes) { emu::need(90, "cp.async.bulk"); emu::bulk_store(dst, src, bytes); }
HW_FN void bulk_commit() { emu::need(90, "cp.async.bulk.commit_group"); emu::bulk_commit(); }
template <int N> HW_FN void bulk_wait() { emu::need(90, "cp.async.bulk.wait_group"); emu::bulk_wait(N); }
}  // namespace hw

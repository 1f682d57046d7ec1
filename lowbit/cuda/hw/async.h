// Asynchronous copies, mbarriers, proxy fences. cp.async needs sm_80, the rest sm_90.
// A copy has landed only after the wait that belongs to it; until then its target must not be touched.
#pragma once
namespace hw {
// n <= size bytes are read, the rest of the destination is zero-filled
HW_FN void cp_async_4(u32 dst, const void* src, u32 n) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory"); }
HW_FN void cp_async_8(u32 dst, const void* src, u32 n) { asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory"); }
HW_FN void cp_async_16(u32 dst, const void* src, u32 n) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory"); }
HW_FN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> HW_FN void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

HW_FN void mbar_init(u32 bar, u32 count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory"); }
HW_FN void mbar_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory"); }
HW_FN void mbar_arrive_expect_tx(u32 bar, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
HW_FN void mbar_expect_tx(u32 bar, u32 bytes) { asm volatile("mbarrier.expect_tx.relaxed.cta.shared.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory"); }
HW_FN void mbar_arrive_cluster(u32 bar) { asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory"); }
HW_FN bool mbar_try_wait(u32 bar, u32 parity) {
    u32 r;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(r) : "r"(bar), "r"(parity) : "memory");
    return r != 0;
}
HW_FN bool mbar_try_wait_cluster(u32 bar, u32 parity) {  // also acquires what other CTAs of the cluster released
    u32 r;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(r) : "r"(bar), "r"(parity) : "memory");
    return r != 0;
}
HW_FN void mbar_wait(u32 bar, u32 parity) { while (!mbar_try_wait(bar, parity)) {} }
HW_FN void mbar_wait_cluster(u32 bar, u32 parity) { while (!mbar_try_wait_cluster(bar, parity)) {} }
HW_FN void fence_mbar_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
HW_FN void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// L2 policies for the _hint copies: weights are read once (evict first), activations by every CTA (evict last).
HW_FN u64 l2_evict_first() { u64 p; asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p)); return p; }
HW_FN u64 l2_evict_last() { u64 p; asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p)); return p; }

// bytes, dst and src are multiples of 16; completes `bytes` on the mbarrier
HW_FN void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src), "r"(bytes), "r"(bar) : "memory");
}
HW_FN void bulk_load_hint(u32 dst, const void* src, u32 bytes, u32 bar, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(dst), "l"(src), "r"(bytes), "r"(bar), "l"(policy) : "memory");
}
// x: element of the row, x * element size a multiple of 16 bytes; y: row. Outside the tensor: zeros.
HW_FN void tma_load_2d(u32 dst, const TensorMap* map, int x, int y, u32 bar) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(dst), "l"(map), "r"(x), "r"(y), "r"(bar) : "memory");
}
HW_FN void tma_load_2d_hint(u32 dst, const TensorMap* map, int x, int y, u32 bar, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                 ::"r"(dst), "l"(map), "r"(x), "r"(y), "r"(bar), "l"(policy) : "memory");
}
HW_FN void bulk_store(void* dst, u32 src, u32 bytes) { asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory"); }
HW_FN void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> HW_FN void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
}  // namespace hw

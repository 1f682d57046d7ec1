// Who am I, barriers, warp exchange, launch control.
// Nothing here touches data in memory.
#pragma once
namespace hw {
#define HW_SREG(NAME, REG) \
    HW_FN u32 NAME() { u32 v; asm volatile("mov.u32 %0, %%" REG ";" : "=r"(v)); return v; }
HW_SREG(tid_x, "tid.x")
HW_SREG(ntid_x, "ntid.x")
HW_SREG(lane_id, "laneid")
HW_SREG(ctaid_x, "ctaid.x")
HW_SREG(ctaid_y, "ctaid.y")
HW_SREG(ctaid_z, "ctaid.z")
HW_SREG(nctaid_x, "nctaid.x")
HW_SREG(nctaid_y, "nctaid.y")
HW_SREG(nctaid_z, "nctaid.z")
HW_SREG(cluster_ctarank, "cluster_ctarank")    // sm_90
HW_SREG(cluster_nctarank, "cluster_nctarank")  // sm_90
#undef HW_SREG

// Shared-space address of the dynamic shared memory of this CTA.
HW_FN u32 smem_base() {
    extern __shared__ __align__(1024) u8 hw_dynamic_smem[];
    u32 a;
    asm("{.reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t;}" : "=r"(a) : "l"(hw_dynamic_smem));
    return a;
}

HW_FN void syncthreads() { asm volatile("barrier.sync.aligned 0;" ::: "memory"); }
HW_FN void bar_sync(u32 id, u32 n) { asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(n) : "memory"); }
HW_FN void bar_arrive(u32 id, u32 n) { asm volatile("barrier.arrive.aligned %0, %1;" ::"r"(id), "r"(n) : "memory"); }
HW_FN void syncwarp() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// Exchanges among the 32 lanes, which must all take part.
HW_FN u32 shfl_xor(u32 v, u32 m) {
    u32 r; asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(r) : "r"(v), "r"(m)); return r;
}
HW_FN u32 shfl_idx(u32 v, u32 src) {
    u32 r; asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(r) : "r"(v), "r"(src)); return r;
}
HW_FN u32 shfl_up(u32 v, u32 delta) {  // the lowest `delta` lanes keep their own value
    u32 r; asm volatile("shfl.sync.up.b32 %0, %1, %2, 0, 0xffffffff;" : "=r"(r) : "r"(v), "r"(delta)); return r;
}
HW_FN u32 warp_uniform(u32 v) { return shfl_idx(v, 0); }  // lane 0's value: ptxas keeps it in a uniform register
HW_FN u32 vote_ballot(bool p) {
    u32 r;
    asm volatile("{.reg .pred p; setp.ne.b32 p, %1, 0; vote.sync.ballot.b32 %0, p, 0xffffffff;}" : "=r"(r) : "r"((u32)p));
    return r;
}
HW_FN bool elect_one() {  // sm_90; one lane of the warp gets true
    u32 r; asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(r)); return r != 0;
}

template <int N> HW_FN void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }  // sm_90a
template <int N> HW_FN void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }  // sm_90a
HW_FN void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }                 // sm_90
HW_FN void griddep_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }  // sm_90

// Clusters: sm_90.
HW_FN void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
HW_FN void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }  // publishes nothing
HW_FN void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
HW_FN u32 mapa(u32 addr, u32 rank) {
    u32 r; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(rank)); return r;
}
}  // namespace hw

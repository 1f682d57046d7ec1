// Who am I, barriers, warp exchange, launch control: twins of lowbit/cuda/hw/core.h.
// Nothing here touches data in memory.
#pragma once
namespace hw {
HW_FN u32 tid_x() { return emu::self->tid; }
HW_FN u32 ntid_x() { return emu::self->block->threads; }
HW_FN u32 lane_id() { return emu::self->lane; }
HW_FN u32 ctaid_x() { return emu::self->block->x; }
HW_FN u32 ctaid_y() { return emu::self->block->y; }
HW_FN u32 ctaid_z() { return emu::self->block->z; }
HW_FN u32 nctaid_x() { return emu::self->block->grid_x; }
HW_FN u32 nctaid_y() { return emu::self->block->grid_y; }
HW_FN u32 nctaid_z() { return emu::self->block->grid_z; }
HW_FN u32 cluster_ctarank() { emu::need(90, "%cluster_ctarank"); return emu::self->block->rank; }
HW_FN u32 cluster_nctarank() { emu::need(90, "%cluster_nctarank"); return emu::self->block->cluster_size; }

HW_FN u32 smem_base() { return emu::smem_origin; }

HW_FN void syncthreads() { emu::barrier(0, 0, true); }
HW_FN void bar_sync(u32 id, u32 n) { emu::barrier(id, n, true); }
HW_FN void bar_arrive(u32 id, u32 n) { emu::barrier(id, n, false); }
HW_FN void syncwarp() { emu::warp_barrier(); }

HW_FN u32 shfl_xor(u32 v, u32 m) { return emu::shuffle("shfl.bfly", v, emu::self->lane ^ m); }
HW_FN u32 shfl_idx(u32 v, u32 src) { return emu::shuffle("shfl.idx", v, src); }
HW_FN u32 shfl_up(u32 v, u32 delta) { return emu::shuffle("shfl.up", v, emu::self->lane >= delta ? emu::self->lane - delta : emu::self->lane); }
HW_FN u32 warp_uniform(u32 v) { return shfl_idx(v, 0); }
HW_FN u32 vote_ballot(bool p) { return emu::ballot(p); }
HW_FN bool elect_one() { emu::need(90, "elect.sync"); return emu::elect(); }

template <int N> HW_FN void setmaxnreg_inc() { emu::need(90, "setmaxnreg"); emu::setmaxnreg(N); }
template <int N> HW_FN void setmaxnreg_dec() { emu::need(90, "setmaxnreg"); emu::setmaxnreg(N); }
HW_FN void griddep_wait() { emu::need(90, "griddepcontrol.wait"); emu::griddep_wait(); }
HW_FN void griddep_launch() { emu::need(90, "griddepcontrol.launch_dependents"); emu::griddep_launch(); }

HW_FN void cluster_arrive() { emu::need(90, "barrier.cluster.arrive"); emu::cluster_arrive(true); }
HW_FN void cluster_arrive_relaxed() { emu::need(90, "barrier.cluster.arrive.relaxed"); emu::cluster_arrive(false); }
HW_FN void cluster_wait() { emu::need(90, "barrier.cluster.wait"); emu::cluster_wait(); }
HW_FN u32 mapa(u32 addr, u32 rank) { emu::need(90, "mapa"); return emu::mapa(addr, rank); }
}  // namespace hw

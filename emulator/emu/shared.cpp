// Shared memory with its shadow: every access is checked against the clocks of all that touched the bytes before.
// It must not know when copies land (async.cpp) or what matrices mean (tensor.cpp).
#include "machine.h"

namespace emu {
Cta& home(u32& addr, bool cluster_ok, const char* what) {
    Cta& own = *me().cta;
    if (addr >> 24 == 0) return own;
    if (!cluster_ok) fault("%s: 0x%x is a cluster address, this instruction takes addresses of its own CTA", what, addr);
    const u32 rank = (addr >> 24) - 1;
    if (rank >= own.cluster->ctas.size()) fault("%s: 0x%x is no address of this cluster", what, addr);
    Cta& c = *own.cluster->ctas[rank];
    if (!c.live) fault("%s: cluster CTA %u has already exited", what, c.rank);
    if (rank != own.rank) c.remote[me().slot] = {me().now(), me().cluster_phase + 1};
    addr &= 0xffffff;
    return c;
}
u8* Cta::bytes(u32 addr, u32 n, u32 align, const char* what) {
    if (addr % align) fault("%s: shared address 0x%x is not %u-byte aligned", what, addr, align);
    if (addr < smem_origin || addr + n > smem_origin + smem_size)
        fault("%s: shared bytes 0x%x..0x%x are outside 0x%x..0x%x (out of bounds)", what, addr, addr + n, smem_origin, smem_origin + smem_size);
    return smem.data() + (addr - smem_origin);
}
namespace {
// Calls fn(granule, mask, address) for the granules of a byte range.
template <class F>
void granules(Cta& c, u32 addr, u32 n, F fn) {
    for (u32 a = addr - smem_origin, end = a + n; a < end;) {
        const u32 stop = std::min(end, a / 16 * 16 + 16);
        fn(c.shadow[a / 16], u16(((1u << (stop - a)) - 1) << (a % 16)), a / 16 * 16 + smem_origin);
        a = stop;
    }
}
void strip(std::vector<Mark>& v, u16 mask) {
    for (size_t i = 0; i < v.size();) {
        v[i].mask = u16(v[i].mask & ~mask);
        if (v[i].mask) ++i;
        else { v[i] = v.back(); v.pop_back(); }
    }
}
}  // namespace
// An access from another CTA has ended before this one leaves if one of its threads knows of it, or waited for the phase of
// barrier.cluster at which the other thread arrived (or exited) next, relaxed or not: that orders the two, whatever it publishes.
void Cta::check_exit() {
    for (auto& [slot, last] : remote) {
        bool ended = false;
        for (const Fiber& f : fibers) ended |= f.clock.hb(slot) >= last.time || f.cluster_waited >= last.phase;
        if (!ended) fault("race: cluster CTA %u exits, and %s may still be accessing its shared memory (no barrier.cluster between)", rank, slot_name(*this, slot).c_str());
    }
}
void Cta::check_read(u32 addr, u32 n, const Clock& seen, Proxy p, const char* what) {
    granules(*this, addr, n, [&](Granule& g, u16 m, u32 at) {
        if (g.flight & m) fault("%s: reads shared 0x%x, the target of an asynchronous copy that has not been waited for", what, at);
        if (g.mbar & m) fault("%s: reads shared 0x%x, which is an mbarrier", what, at);
        if (~g.init & m) fault("%s: reads shared 0x%x, which was never written", what, at);
        for (const Mark& w : g.writes) {
            if (!(w.mask & m) || (p == GENERIC ? seen.hb(w.slot) : seen.av(w.slot)) >= w.time) continue;
            if (seen.hb(w.slot) >= w.time)
                fault("%s: reads shared 0x%x through the async proxy; %s wrote it through the generic proxy and no fence.proxy.async lies between", what, at, slot_name(*this, w.slot).c_str());
            fault("race: %s reads shared 0x%x, written by %s, with no synchronisation between", what, at, slot_name(*this, w.slot).c_str());
        }
    });
}
void Cta::note_read(u32 addr, u32 n, u32 slot, u32 time, bool async) {
    granules(*this, addr, n, [&](Granule& g, u16 m, u32) {
        for (Mark& r : g.reads)
            if (r.slot == slot && r.async == async && (r.time == time || !(r.mask & ~m))) { r.mask |= m; r.time = time; return; }
        g.reads.push_back({u16(slot), m, time, 0, async});
    });
}
void Cta::check_write(u32 addr, u32 n, const Clock& seen, Proxy p, const char* what, bool atomic) {
    granules(*this, addr, n, [&](Granule& g, u16 m, u32 at) {
        if (g.flight & m) fault("%s: writes shared 0x%x, the target of an asynchronous copy that has not been waited for", what, at);
        if (g.mbar & m) fault("%s: writes shared 0x%x, which is an mbarrier", what, at);
        for (const Mark& w : g.writes)
            if ((w.mask & m) && !(atomic && w.atomic) && (p == GENERIC ? seen.hb(w.slot) : seen.av(w.slot)) < w.time)
                fault("race: %s writes shared 0x%x, written by %s, with no %s between", what, at, slot_name(*this, w.slot).c_str(),
                      seen.hb(w.slot) < w.time ? "synchronisation" : "fence.proxy.async");
        for (const Mark& r : g.reads)
            if ((r.mask & m) && seen.hb(r.slot) < r.time)
                fault("race: %s overwrites shared 0x%x, which %s may still be reading", what, at, slot_name(*this, r.slot).c_str());
        if (p == GENERIC) return;
        const Fiber& f = me();
        for (const Mark& r : g.reads)
            if ((r.mask & m) && !r.async && u32(r.slot - (f.slot - f.lane)) < 32 && f.drained[r.slot - (f.slot - f.lane)] < r.time)
                fault("%s: overwrites shared 0x%x, which %s read through the generic proxy; that thread executed no fence.proxy.async between its read and "
                      "the barrier before this copy (bar.warp.sync or program order alone let the copy overtake the read)", what, at, slot_name(*this, r.slot).c_str());
    });
}
void Cta::note_write(u32 addr, u32 n, u32 slot, u32 time, bool atomic) {
    granules(*this, addr, n, [&](Granule& g, u16 m, u32) {
        g.init |= m;
        if (!atomic) strip(g.writes, m);
        else  // unordered atomics all stay, one mark a thread
            for (Mark& w : g.writes) if (w.slot == slot && w.atomic && w.mask == m) { w.time = time; return; }
        strip(g.reads, m);
        g.writes.push_back({u16(slot), m, time, atomic, 0});
    });
}
void Cta::take_off(u32 addr, u32 n) {
    granules(*this, addr, n, [](Granule& g, u16 m, u32) { g.flight |= m; });
    memset(bytes(addr, n, 1, ""), 0xff, n);
}
void Cta::land(u32 addr, const u8* data, u32 n, u32 slot, u32 time) {
    granules(*this, addr, n, [](Granule& g, u16 m, u32) { g.flight = u16(g.flight & ~m); });
    memcpy(bytes(addr, n, 1, ""), data, n);
    note_write(addr, n, slot, time);
}
void load_shared(u32 addr, void* v, u32 n, bool remote) {
    const char* what = remote ? "ld.shared::cluster" : "ld.shared";
    Fiber& f = me();
    Cta& c = home(addr, remote, what);
    memcpy(v, c.bytes(addr, n, n, what), n);
    c.check_read(addr, n, f.clock, GENERIC, what);
    c.note_read(addr, n, f.slot, f.now());
}
void store_shared(u32 addr, const void* v, u32 n, bool remote) {
    const char* what = remote ? "st.shared::cluster" : "st.shared";
    Fiber& f = me();
    Cta& c = home(addr, remote, what);
    u8* p = c.bytes(addr, n, n, what);
    c.check_write(addr, n, f.clock, GENERIC, what);
    memcpy(p, v, n);
    c.note_write(addr, n, f.slot, f.now());
}
u32 atom_shared_add(u32 addr, u32 v) {  // relaxed: moves no clocks
    const char* what = "atom.shared.add";
    Fiber& f = me();
    Cta& c = home(addr, false, what);
    u8* p = c.bytes(addr, 4, 4, what);
    granules(c, addr, 4, [&](Granule& g, u16 m, u32 at) { if (~g.init & m) fault("%s: reads shared 0x%x, which was never written", what, at); });
    c.check_write(addr, 4, f.clock, GENERIC, what, true);
    u32 old;
    memcpy(&old, p, 4);
    v += old;
    memcpy(p, &v, 4);
    c.note_write(addr, 4, f.slot, f.now(), true);
    return old;
}

// ---- ldmatrix, stmatrix -------------------------------------------------------------------------------------------------
namespace {
struct MatrixArgs { u32 addr; u32* r; u32 count; bool trans; };
void move(Warp& w, bool store) {
    auto* arg = reinterpret_cast<MatrixArgs**>(w.args);
    Thread* caller = self;
    const char* what = store ? "stmatrix" : "ldmatrix";
    for (u32 m = 0; m < arg[0]->count; ++m)
        for (u32 row = 0; row < 8; ++row) {
            const u32 l = m * 8 + row;
            self = w.fibers[l];  // the lane that gave this row's address
            Fiber& f = me();
            u32 addr = arg[l]->addr;
            Cta& c = home(addr, false, what);
            u8* p = c.bytes(addr, 16, 16, what);
            if (store) c.check_write(addr, 16, f.clock, GENERIC, what);
            else c.check_read(addr, 16, f.clock, GENERIC, what);
            for (u32 i = 0; i < 8; ++i) {  // element (row, i) of the matrix
                const u32 lane = arg[0]->trans ? i * 4 + row / 2 : row * 4 + i / 2, half = arg[0]->trans ? row % 2 : i % 2;
                u8* q = reinterpret_cast<u8*>(&arg[lane]->r[m]) + half * 2;
                if (store) memcpy(p + i * 2, q, 2);
                else memcpy(q, p + i * 2, 2);
            }
            if (store) c.note_write(addr, 16, f.slot, f.now());
            else c.note_read(addr, 16, f.slot, f.now());
        }
    self = caller;
}
}  // namespace
void move_matrices(bool store, u32 addr, u32* r, u32 count, bool trans) {
    MatrixArgs a{addr, r, count, trans};
    if (store) collective("stmatrix", &a, [](Warp& w) { move(w, true); });
    else collective("ldmatrix", &a, [](Warp& w) { move(w, false); });
}
}  // namespace emu

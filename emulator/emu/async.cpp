// Asynchronous copies and mbarriers: what is in flight, when it lands, who may look.
// Copies land as late as the memory model allows, or at random moments; the seed decides.
#include "machine.h"

namespace emu {
// fence.proxy.async: what is ordered before is shown to the async proxy; the thread's own generic reads are done. The second was measured
// (docs/notes/2026-12-01-proxy-fence.md): after bar.warp.sync alone a bulk copy overtakes loads that are still queued. An order through an
// mbarrier or a block or cluster barrier counts as done, too.
void fence_async() {
    Fiber& f = me();
    memcpy(f.clock.v.get() + f.clock.n, f.clock.v.get(), 4 * size_t(f.clock.n));
    f.drained[f.lane] = f.now();
    f.tick();
}

// ---- cp.async: lands at the wait ------------------------------------------------------------------------------------------
void cp_async(u32 dst, const void* src, u32 size, u32 n) {
    Fiber& f = me();
    if (n > size) fault("cp.async: %u source bytes for a copy of %u", n, size);
    if (u64(src) % size) fault("cp.async: global address %p is not %u-byte aligned", src, size);
    if (n) global_bytes(src, n, 1, READ, "cp.async");
    Cta& c = home(dst, false, "cp.async");
    c.bytes(dst, size, size, "cp.async");
    c.check_write(dst, size, f.clock, GENERIC, "cp.async");
    c.take_off(dst, size);
    f.copies.push_back({dst, size, n, src});
}
void cp_async_commit() { Fiber& f = me(); f.copy_groups.push_back(std::move(f.copies)); f.copies.clear(); }
void cp_async_wait(u32 keep) {
    Fiber& f = me();
    while (f.copy_groups.size() > keep) {
        for (const CpAsync& a : f.copy_groups.front()) {
            u8 buf[16] = {};
            if (a.n) memcpy(buf, global_bytes(a.src, a.n, 1, READ, "cp.async"), a.n);
            f.cta->land(a.dst, buf, a.size, f.slot, f.now());
        }
        f.copy_groups.pop_front();
    }
}

// ---- mbarriers ----------------------------------------------------------------------------------------------------------
void mbar_init(u32 addr, u32 count) {
    Fiber& f = me();
    Cta& c = home(addr, false, "mbarrier.init");
    c.bytes(addr, 8, 8, "mbarrier.init");
    if (!count || count >= 1 << 20) fault("mbarrier.init: count %u is not in 1..2^20-1", count);
    if (c.mbars.count(addr)) fault("mbarrier.init: 0x%x is already an mbarrier", addr);
    c.check_write(addr, 8, f.clock, GENERIC, "mbarrier.init");
    const u32 room = Cta::max_mbars(c.threads);
    if (c.mbars.size() >= room) fault("mbarrier.init: the emulator has room for %u mbarriers in a block of %u threads", room, c.threads);
    Mbar& m = c.mbars[addr];
    m.addr = addr; m.count = m.pending = count; m.agent = u32(c.mbars.size()) - 1;
    m.init_slot = f.slot; m.init_time = f.now();
    m.current = m.done = Clock(c.cluster->slots);
    const u32 a = addr - smem_origin;
    c.shadow[a / 16].mbar |= u16(0xff << (a % 16));
}
Mbar& Cta::mbar(u32 addr, const char* what, Proxy p) {
    auto it = mbars.find(addr);
    if (it == mbars.end()) fault("%s: no mbarrier was initialised at 0x%x", what, addr);
    Mbar& m = it->second;
    if (!self) return m;
    const Clock& seen = me().clock;
    if (seen.hb(m.init_slot) < m.init_time) fault("race: %s on mbarrier 0x%x, whose initialisation by %s is not ordered before", what, addr, slot_name(*this, m.init_slot).c_str());
    const bool fenced = m.fence_time && seen.hb(m.init_slot) >= m.fence_time;
    if (p == ASYNC && !fenced && seen.av(m.init_slot) < m.init_time) fault("%s on mbarrier 0x%x: no fence.mbarrier_init after its initialisation", what, addr);
    return m;
}
void fence_mbar_init() {  // publishes this thread's initialisations, and nothing else, to the async proxy
    Fiber& f = me();
    for (auto& [addr, m] : f.cta->mbars) if (m.init_slot == f.slot && !m.fence_time) m.fence_time = f.now();
    f.tick();
}
void settle(Mbar& m) {  // completes the phase if nothing is missing
    if (m.pending || m.tx) return;
    m.done.join(m.current);
    m.pending = m.count;
    ++m.phase;
    wake(m.waiting);
}
void mbar_arrive(u32 addr, u32 tx, u32 arrivals, bool remote, const char* what) {
    Cta& c = home(addr, remote, what);
    Mbar& m = c.mbar(addr, what);
    if (m.pending < arrivals) fault("%s: mbarrier 0x%x gets more than its %u arrivals in phase %u", what, addr, m.count, m.phase);
    m.tx += tx;
    if (m.tx >= 1 << 20) fault("%s: mbarrier 0x%x expects %lld bytes, more than 2^20-1", what, addr, m.tx);
    m.pending -= arrivals;
    me().release(m.current);
    settle(m);
}
bool mbar_try_wait(u32 addr, u32 parity) {
    Cta& c = home(addr, false, "mbarrier.try_wait");
    if (parity > 1) fault("mbarrier.try_wait: parity %u", parity);
    Mbar& m = c.mbar(addr, "mbarrier.try_wait");
    Fiber& f = me();
    if ((m.phase & 1) == parity) {
        if (rng.one_in(16)) { yield(); return false; }  // the instruction may give up
        while ((m.phase & 1) == parity) { m.waiting.push_back(&f); block("mbarrier", addr, parity); }
    }
    f.clock.join(m.done);
    f.drain(m.done);
    return true;
}

// ---- bulk copies: land when the scheduler decides, at the latest when every thread waits ----------------------------------
static void issue_copy(u32 dst, u32 bytes, u32 bar, const char* what, std::function<void(std::vector<u8>&)> fetch) {
    Fiber& f = me();
    Cta& c = home(dst, false, what);
    home(bar, false, what);
    c.bytes(dst, bytes, 16, what);
    c.mbar(bar, what, ASYNC);
    c.check_write(dst, bytes, f.clock, ASYNC, what);
    c.take_off(dst, bytes);
    pending.push_back({&c, dst, bytes, bar, std::move(fetch)});
}
void land_copy(size_t i) {
    Copy k = std::move(pending[i]);
    pending.erase(pending.begin() + long(i));
    std::vector<u8> data(k.bytes);
    k.fetch(data);
    Mbar& m = k.cta->mbars[k.bar];
    const u32 slot = k.cta->slot_mbar(m.agent), time = ++k.cta->agent_time[m.agent];
    k.cta->land(k.dst, data.data(), k.bytes, slot, time);
    m.current.hb(slot) = m.current.av(slot) = time;
    m.tx -= k.bytes;
    settle(m);
}
void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar) {
    if (!bytes || bytes % 16) fault("cp.async.bulk: size %u is no positive multiple of 16", bytes);
    global_bytes(src, bytes, 16, READ, "cp.async.bulk");
    issue_copy(dst, bytes, bar, "cp.async.bulk", [=](std::vector<u8>& out) { memcpy(out.data(), global_bytes(src, bytes, 16, READ, "cp.async.bulk"), bytes); });
}
void load_tensor_2d(u32 dst, const TensorMap* map, int x, int y, u32 bar) {
    const char* what = "cp.async.bulk.tensor";
    const TensorMap m = *map;
    const u32 row = m.box_width * m.elem, repeat = m.swizzle ? 2048 >> m.swizzle : 128;
    if (!m.base || !row || !m.box_height) fault("%s: the tensor map is empty", what);
    if (m.swizzle && row > 256u >> m.swizzle) fault("%s: box rows of %u bytes exceed the swizzle span of %u", what, row, 256u >> m.swizzle);
    if (dst % repeat) fault("%s: shared address 0x%x is not %u-byte aligned", what, dst, repeat);
    if (x * int(m.elem) % 16) fault("%s: inner coordinate %d is no multiple of 16 bytes (illegal instruction on the chip)", what, x);
    auto each = [=](auto fn) {  // (place in the box, address, bytes) of every 16 bytes inside the tensor
        for (u32 r = 0; r < m.box_height; ++r)
            for (u32 c = 0; c < row; c += 16) {
                const i64 gx = x * i64(m.elem) + c, gy = y + i64(r), end = i64(m.width) * m.elem;
                if (gx < 0 || gy < 0 || gx >= end || gy >= m.height) continue;
                u32 at = r * row + c;
                if (m.swizzle) at ^= ((at >> 7) & ((8 >> (m.swizzle - 1)) - 1)) << 4;
                fn(at, static_cast<const char*>(m.base) + gy * m.pitch + gx, u32(end - gx < 16 ? end - gx : 16));
            }
    };
    each([&](u32, const char* p, u32 n) { global_bytes(p, n, 1, READ, what); });
    issue_copy(dst, row * m.box_height, bar, what, [=](std::vector<u8>& out) {  // what lies outside the tensor stays zero
        each([&](u32 at, const char* p, u32 n) { memcpy(&out[at], global_bytes(p, n, 1, READ, what), n); });
    });
}
void bulk_store(void* dst, u32 src, u32 bytes) {
    const char* what = "cp.async.bulk (store)";
    Fiber& f = me();
    if (!bytes || bytes % 16) fault("%s: size %u is no positive multiple of 16", what, bytes);
    global_bytes(dst, bytes, 16, WRITE, what);
    Cta& c = home(src, false, what);
    c.bytes(src, bytes, 16, what);
    c.check_read(src, bytes, f.clock, ASYNC, what);
    f.stores.push_back({dst, src, bytes, f.clock});
    f.tick();  // own later writes are after the snapshot
}
void bulk_commit() { Fiber& f = me(); f.store_groups.push_back(std::move(f.stores)); f.stores.clear(); }
void bulk_wait(u32 keep) {  // reads shared memory now; a write since the issue is a race
    Fiber& f = me();
    while (f.store_groups.size() > keep) {
        for (const BulkStore& s : f.store_groups.front()) {
            f.cta->check_read(s.src, s.bytes, s.seen, ASYNC, "cp.async.bulk (store, when it completes)");
            memcpy(global_bytes(s.dst, s.bytes, 16, WRITE, "cp.async.bulk (store)"), f.cta->bytes(s.src, s.bytes, 16, ""), s.bytes);
            f.cta->note_read(s.src, s.bytes, f.slot, f.now(), true);
        }
        f.store_groups.pop_front();
    }
}

// ---- L2 policies: only that a policy is one ---------------------------------------------------------------------------
static constexpr u64 policy_mark = 0x12f0000000000000ull;
u64 policy(u32 kind) { return policy_mark | kind; }
void check_policy(u64 p) { if (p != policy(0) && p != policy(1)) fault("L2 cache hint: 0x%llx was not made by createpolicy", p); }
}  // namespace emu

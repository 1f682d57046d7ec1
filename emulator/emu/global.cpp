// Global memory: allocations, what a kernel may do with each, and who wrote which byte in this launch.
// Pointers handed out lie in a range without access rights; the bytes are elsewhere, so only hw functions reach them.
#include "machine.h"
#include <sys/mman.h>

namespace emu {
extern std::string last_error;

namespace {
enum Flags : u32 { READ_ONLY = 1, OUTPUT = 2, DEPENDENT = 4, CONTENT = 8 };
struct Stamp { u32 cluster = 0, time = 0; u16 slot = 0, atomic = 0; };  // cluster: serial number; 0: never written
struct Alloc {
    u64 base;
    std::string name;
    u32 flags;
    std::vector<u8> data;
    std::vector<bool> filled;    // empty when the host gave the content
    std::vector<Stamp> stamps;   // empty until a kernel writes
    u32 last_writer = 0;         // highest cluster serial that wrote
};
struct Sync { std::shared_ptr<Knowledge> known = std::make_shared<Knowledge>(); u32 version = 0; };

constexpr u64 arena_bytes = 1ull << 40, gap = 4096;
u8* arena;
u64 arena_used;
std::vector<std::unique_ptr<Alloc>> allocs;  // by rising address
Alloc* last_hit;
std::map<u64, Sync> syncs;  // by the address of the atomic

Alloc* find(u64 a, u64 n) {
    if (last_hit && a >= last_hit->base && a + n <= last_hit->base + last_hit->data.size()) return last_hit;
    for (auto& m : allocs)
        if (a >= m->base && a + n <= m->base + m->data.size()) return last_hit = m.get();
    return nullptr;
}
bool dependency_seen() {  // this thread, or one ordered before it, waited for the previous kernel
    for (auto [slot, time] : me().cta->dep_waits) if (me().clock.hb(slot) >= time) return true;
    return false;
}
bool ordered(const Stamp& w) {  // was it written before, as far as this thread can know?
    const Fiber& f = me();
    if (w.cluster < current_run.first_serial) return true;
    if (w.cluster == f.cta->cluster->serial) return f.clock.hb(w.slot) >= w.time;
    for (const Acquire& a : f.cta->cluster->acquires) {
        if (f.clock.hb(a.slot) < a.time) continue;
        auto it = a.known->find(w.cluster);
        if (it != a.known->end() && it->second[w.slot] >= w.time) return true;
    }
    return false;
}
std::string writer(const Stamp& w) {
    const Launch& l = current_run.cfg;
    const u32 per = Cta::slots(l.threads), id = (w.cluster - current_run.first_serial) * l.cluster + w.slot / per;
    char s[96];
    snprintf(s, sizeof s, "thread %u of block (%u,%u,%u)", w.slot % per, id % l.grid_x, id / l.grid_x % l.grid_y, id / l.grid_x / l.grid_y);
    return s;
}
// A release adds what this thread knows to the atomic; an acquire takes what was there.
void synchronise(u64 address, bool acquire, bool release) {
    Fiber& f = me();
    Cluster& cl = *f.cta->cluster;
    auto it = syncs.find(address);
    if (acquire && it != syncs.end()) {
        const Sync& s = it->second;
        const u64 seen = address * 0x9E3779B97F4A7C15ull + s.version;
        if (f.acquired != seen) {
            f.acquired = seen;
            auto own = s.known->find(cl.serial);
            if (own != s.known->end()) {
                for (u32 i = 0; i < f.clock.n; ++i) f.clock.hb(i) = std::max(f.clock.hb(i), i == f.slot ? 0 : own->second[i]);
                for (u32 i = 0; i < 32 && f.slot - f.lane + i < f.clock.n; ++i) f.drained[i] = std::max(f.drained[i], own->second[f.slot - f.lane + i]);
            }
            cl.acquires.push_back({f.slot, f.now(), s.known});
            f.tick();
        }
    }
    if (release) {
        Sync& s = it != syncs.end() ? it->second : syncs[address];
        auto known = std::make_shared<Knowledge>(*s.known);
        auto add = [&](u32 serial, const u32* hb, u32 n) {
            auto& to = (*known)[serial];
            to.resize(n);
            for (u32 i = 0; i < n; ++i) to[i] = std::max(to[i], hb[i]);
        };
        add(cl.serial, f.clock.v.get(), f.clock.n);
        for (const Acquire& a : cl.acquires)
            if (f.clock.hb(a.slot) >= a.time)
                for (auto& [serial, hb] : *a.known) add(serial, hb.data(), u32(hb.size()));
        s.known = std::move(known);
        ++s.version;
        f.tick();
    }
}
}  // namespace

bool owns(u64 a) { return arena && a >= u64(arena) && a < u64(arena) + arena_bytes; }
void begin_global_epoch() { syncs.clear(); }
void griddep_wait() { Fiber& f = me(); f.cta->dep_waits.push_back({f.slot, f.now()}); f.tick(); }
void griddep_launch() { me().launched = true; }

u8* global_bytes(const void* p, u32 n, u32 align, Access how, const char* what) {
    const u64 a = u64(p);
    if (a % align) fault("%s: global address 0x%llx is not %u-byte aligned", what, a, align);
    Alloc* m = find(a, n);
    if (!m) {
        const Alloc* near = nullptr;  // the allocation that begins or ends closest to the address
        i64 least = 1ll << 62;
        for (auto& o : allocs) {
            const i64 before = i64(o->base - a), after = i64(a - (o->base + o->data.size())), distance = std::max<i64>(std::max(before, after), 0);
            if (distance < least) { least = distance; near = o.get(); }
        }
        if (!near || !owns(a)) fault("%s: %u bytes at 0x%llx, which is not global memory (out of bounds)", what, n, a);
        fault("%s: %u bytes at offset %lld of '%s', which has %zu bytes (out of bounds)", what, n, i64(a - near->base), near->name.c_str(), near->data.size());
    }
    u8* bytes = m->data.data() + (a - m->base);
    if (!self) return bytes;  // a copy that lands: checked when it was issued
    const u64 at = a - m->base;
    const char* name = m->name.c_str();
    if ((m->flags & DEPENDENT) && !dependency_seen()) fault("%s: '%s' comes from the previous kernel and no griddepcontrol.wait lies before", what, name);
    const bool write = how == WRITE || how == ATOMIC || how == RELEASE || how == ACQ_REL, atomic = how >= ATOMIC;
    if (write && (m->flags & READ_ONLY)) fault("%s: writes to read-only allocation '%s' at offset %llu", what, name, at);
    if (atomic && how != ATOMIC) synchronise(a, how != RELEASE, how != ACQUIRE);
    Fiber& f = me();
    const u32 serial = f.cta->cluster->serial;
    const bool reads = !write || (atomic && how != RELEASE) || (how == RELEASE && strncmp(what, "red", 3) == 0);
    if (reads && !m->filled.empty())
        for (u64 i = at; i < at + n; ++i)
            if (!m->filled[i]) fault("%s: reads '%s' at offset %llu, which was never written", what, name, i);
    if (m->last_writer >= current_run.first_serial)  // written in this launch
        for (u64 i = at; i < at + n; ++i) {
            const Stamp& w = m->stamps[i];
            if (w.cluster < current_run.first_serial) continue;
            if (how == READ_NC) fault("%s: '%s' offset %llu was written by this kernel, a non-coherent load may not see it", what, name, i);
            if (w.cluster == serial && w.slot == f.slot) continue;
            if (write && (m->flags & OUTPUT)) fault("%s: writes output '%s' at offset %llu a second time, after %s", what, name, i, writer(w).c_str());
            if (atomic && w.atomic) continue;
            if (!ordered(w)) fault("race: %s %s '%s' at offset %llu, written by %s, with no synchronisation between", what, write ? "writes" : "reads", name, i, writer(w).c_str());
        }
    if (write) {
        if (m->stamps.empty()) m->stamps.resize(m->data.size());
        m->last_writer = std::max(m->last_writer, serial);
        const Stamp stamp{serial, f.now(), u16(f.slot), u16(atomic)};
        for (u64 i = at; i < at + n; ++i) m->stamps[i] = stamp;
        if (!m->filled.empty()) for (u64 i = at; i < at + n; ++i) m->filled[i] = true;
    }
    return bytes;
}
}  // namespace emu

// ---- for Python (emulator/run.py) ---------------------------------------------------------------------------------------
#define EMU_EXPORT extern "C" __attribute__((visibility("default")))
using namespace emu;
// The address, or 0 when there is no room. flags: see Flags; content may be null. offset moves the address off its alignment of 256.
EMU_EXPORT u64 emu_alloc(const char* name, u64 bytes, const void* content, u32 flags, u32 offset) {
    if (!arena) {
        void* m = mmap(nullptr, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (m == MAP_FAILED) return 0;
        arena = static_cast<u8*>(m);
    }
    const u64 room = (bytes + offset + gap + 255) / 256 * 256;
    if (arena_used + gap + room > arena_bytes) return 0;
    auto a = std::make_unique<Alloc>();
    a->base = u64(arena) + gap + arena_used + offset;
    a->name = name;
    a->flags = flags | (content ? u32(CONTENT) : 0);
    a->data.assign(bytes, 0xff);
    if (content) memcpy(a->data.data(), content, bytes);
    else a->filled.resize(bytes);
    arena_used += room;
    allocs.push_back(std::move(a));
    return allocs.back()->base;
}
EMU_EXPORT int emu_free(u64 address) {
    last_hit = nullptr;
    for (size_t i = 0; i < allocs.size(); ++i)
        if (allocs[i]->base == address) {
            allocs.erase(allocs.begin() + long(i));
            if (allocs.empty()) arena_used = 0;
            return 0;
        }
    return 1;
}
// Bytes [address, address + n) to or from the host; 1: not inside one allocation.
EMU_EXPORT int emu_read(u64 address, void* to, u64 n) {
    Alloc* m = find(address, n);
    if (!m) return 1;
    if (n) memcpy(to, m->data.data() + (address - m->base), n);
    return 0;
}
EMU_EXPORT int emu_write(u64 address, const void* from, u64 n) {
    Alloc* m = find(address, n);
    if (!m) return 1;
    if (n) memcpy(m->data.data() + (address - m->base), from, n);
    for (u64 i = address - m->base; i < address - m->base + n; ++i) {
        if (!m->filled.empty()) m->filled[i] = true;
        if (!m->stamps.empty()) m->stamps[i] = Stamp();
    }
    return 0;
}
// How many bytes of an allocation no kernel and no host ever wrote.
EMU_EXPORT u64 emu_unwritten(u64 address) {
    Alloc* m = find(address, 0);
    if (!m || m->filled.empty()) return 0;
    return u64(std::count(m->filled.begin(), m->filled.end(), false));
}
EMU_EXPORT const char* emu_error() { return last_error.c_str(); }

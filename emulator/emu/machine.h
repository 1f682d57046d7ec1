// The emulator's state: clocks, fibers, blocks, clusters, the shadow of shared memory, asynchronous operations.
// Included by the engine's own files only; kernels and twins see api.h.
#pragma once
#include "api.h"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

// Two versions of a hot loop, chosen when the library is loaded: the build is cached, so it may not use -march=native.
#define EMU_HOT __attribute__((target_clones("avx2", "default")))

namespace emu {
using i64 = long long;

struct Fault : std::runtime_error { using runtime_error::runtime_error; };

struct Rng {
    u64 s = 1;
    u32 operator()() { s ^= s << 13; s ^= s >> 7; s ^= s << 17; return u32(s >> 20); }
    bool one_in(u32 n) { return (*this)() % n == 0; }
};

// A queue without the half kilobyte that an empty std::deque allocates: there are several per thread.
template <class T>
struct Queue {
    std::vector<T> items;
    size_t head = 0;
    bool empty() const { return head == items.size(); }
    size_t size() const { return items.size() - head; }
    T& front() { return items[head]; }
    T& back() { return items.back(); }
    T& operator[](size_t i) { return items[head + i]; }
    void push_back(T v) { items.push_back(std::move(v)); }
    void pop_front() {
        items[head++] = T();
        if (head == items.size()) { items.clear(); head = 0; }
    }
};

// ---- happens-before ---------------------------------------------------------------------------------------------
// A vector clock with one slot per thread of the cluster and per asynchronous agent (see Cta::slot_*).
// hb: everything ordered before now. av: the part of it that the async proxy sees too (fence.proxy.async).
struct Clock {
    u32 n = 0;
    std::unique_ptr<u32[]> v;  // hb, then av
    explicit Clock(u32 slots = 0) : n(slots), v(slots ? new u32[2 * slots]() : nullptr) {}
    Clock(const Clock& o) : Clock(o.n) { *this = o; }
    Clock(Clock&&) = default;
    Clock& operator=(Clock&&) = default;
    Clock& operator=(const Clock& o) {
        if (n != o.n) *this = Clock(o.n);
        if (n) memcpy(v.get(), o.v.get(), 8 * size_t(n));
        return *this;
    }
    u32& hb(u32 i) { return v[i]; }
    u32 hb(u32 i) const { return v[i]; }
    u32& av(u32 i) { return v[n + i]; }
    u32 av(u32 i) const { return v[n + i]; }
    void join(const Clock& o);
    void meet(const Clock& o);
    void clear() { if (n) memset(v.get(), 0, 8 * size_t(n)); }
};
enum Proxy { GENERIC, ASYNC };
struct Mark { u16 slot, mask; u32 time : 30, atomic : 1, async : 1; };  // an access to the bytes `mask` of a 16-byte granule; async: by that proxy
struct Granule {
    std::vector<Mark> writes, reads;
    u16 init = 0, flight = 0, mbar = 0;  // byte masks: ever written, target of a copy in flight, part of an mbarrier
};

// ---- the machine ------------------------------------------------------------------------------------------------
struct Cta;
struct Cluster;
struct CpAsync { u32 dst, size, n; const void* src; };
struct BulkStore { void* dst; u32 src, bytes; Clock seen; };
struct WgRegs { RegState *d, *a; };

struct Fiber : Thread {
    void* sp = nullptr;
    Cta* cta = nullptr;
    bool done = false, launched = false;  // launched: executed griddepcontrol.launch_dependents
    const char* wait = nullptr;           // what it is blocked in, with two numbers for the report
    u32 wait_a = 0, wait_b = 0;
    Clock clock;
    std::vector<CpAsync> copies;
    Queue<std::vector<CpAsync>> copy_groups;
    std::vector<BulkStore> stores;
    Queue<std::vector<BulkStore>> store_groups;
    u32 wg_issued = 0, wg_retired = 0, cluster_phase = 0, cluster_waited = 0;  // phases of barrier.cluster: of the last arrive, of the last wait
    Queue<u32> wg_groups;   // operations issued at each commit
    Queue<WgRegs> wg_regs;  // registers of each operation not yet waited for
    u64 acquired = 0;       // address and version of the last acquire, hashed: polling adds nothing
    u32 now() const { return clock.hb(slot); }
    void tick() { ++clock.hb(slot); }
    void release(Clock& to) { to.join(clock); tick(); }
    // Up to when the generic reads of each lane of this warp are known to be done for the async proxy: see fence_async. Threads of other
    // warps can be ordered before this one only by something that counts as done, so that a warp's own lanes are all there is to know.
    u32 drained[32] = {};
    void drain(const Clock& by) { for (u32 i = 0; i < 32 && slot - lane + i < by.n; ++i) drained[i] = std::max(drained[i], by.hb(slot - lane + i)); }
};
inline Fiber& me() { return *static_cast<Fiber*>(self); }

struct Barrier { u32 expected = 0, arrived = 0; Clock clock; std::vector<Fiber*> waiting; };
struct Mbar {
    u32 addr = 0, count = 0, pending = 0, phase = 0, agent = 0, init_slot = 0, init_time = 0, fence_time = 0;
    i64 tx = 0;
    Clock current, done;
    std::vector<Fiber*> waiting;
};
struct Warp { u32 size = 0, count = 0; const char* op = nullptr; void* args[32] = {}; Fiber* fibers[32] = {}; };
struct WgOp {
    Type type; u32 n = 0, issued = 0; bool rs = false, accumulate = false, executed = false;
    u64 a = 0, b = 0;
    u32 a_regs[128][4];
    RegState* d[128] = {};
    Clock seen;  // what all issuing threads had seen
};
struct WarpGroup { Queue<std::unique_ptr<WgOp>> ops; u32 base = 0; std::vector<Fiber*> waiting; };

struct Remote { u32 time, phase; };  // last access from another CTA, and the phase of barrier.cluster that its thread arrives at next

struct Copy {  // a bulk or tensor copy into shared memory that has not landed
    Cta* cta; u32 dst, bytes, bar;
    std::function<void(std::vector<u8>&)> fetch;
};

struct Cta : Block {
    Cluster* cluster; u32 live, smem_size;
    std::vector<std::pair<u32, u32>> dep_waits;  // slot and time of every griddepcontrol.wait
    std::vector<u8> smem;
    std::vector<Granule> shadow;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<WarpGroup> groups;
    Barrier barriers[16];
    std::map<u32, Mbar> mbars;
    std::map<u32, Remote> remote;  // by slot
    u32 slot_base;
    std::vector<u32> agent_time;  // of the copies of each mbarrier
    static u32 max_mbars(u32 threads) { return 64 + threads / 4; }  // eight a warp and some more: every one costs a clock slot
    static u32 slots(u32 threads) { return threads + max_mbars(threads) + (threads + 31) / 32; }
    u32 slot_mbar(u32 agent) const { return slot_base + threads + agent; }
    u32 slot_wgmma(u32 warp) const { return slot_base + threads + max_mbars(threads) + warp; }

    u8* bytes(u32 addr, u32 n, u32 align, const char* what);  // range and alignment checks
    void check_read(u32 addr, u32 n, const Clock& seen, Proxy p, const char* what);
    void note_read(u32 addr, u32 n, u32 slot, u32 time, bool async = false);
    void check_write(u32 addr, u32 n, const Clock& seen, Proxy p, const char* what, bool atomic = false);
    void note_write(u32 addr, u32 n, u32 slot, u32 time, bool atomic = false);
    void take_off(u32 addr, u32 n);  // a copy was issued: poison, in flight
    void land(u32 addr, const u8* data, u32 n, u32 slot, u32 time);
    Mbar& mbar(u32 addr, const char* what, Proxy p = GENERIC);
    void check_exit();  // the last thread leaves: has every access from other CTAs ended?
};

// What is known of other clusters, by their serial numbers: how far each of their slots is ordered before.
using Knowledge = std::map<u32, std::vector<u32>>;
struct Acquire { u32 slot, time; std::shared_ptr<const Knowledge> known; };
struct Cluster {
    u32 serial = 0;
    std::vector<std::unique_ptr<Cta>> ctas;
    u32 arrived = 0, missing = 0, phase = 0, slots = 0;  // missing: threads that run and have not arrived
    Clock current, done;
    std::vector<Fiber*> waiting;
    std::vector<Acquire> acquires;
};

struct Profile;  // profile.h
struct Run {     // the launch under way
    Launch cfg;
    const Profile* profile = nullptr;
    u32 first_serial = 0;  // of its clusters; smaller ones belong to earlier launches
};
extern Run current_run;
extern Rng rng;
extern std::vector<Copy> pending;  // bulk copies that have not landed

void block(const char* what, u32 a = 0, u32 b = 0);
void wake(std::vector<Fiber*>& list);
Cta& home(u32& addr, bool cluster_ok, const char* what);  // the CTA an address belongs to; strips the rank bits
std::string slot_name(const Cta& c, u32 slot);
void land_copy(size_t i);
void settle(Mbar& m);
[[noreturn]] void escape(void* pc, const char* text);  // leaves a fiber that hit memory it may not touch
void catch_segv();
bool owns(u64 address);      // is it inside the range of emulated global memory?
void begin_global_epoch();   // a launch starts: forget synchronisation through global memory

// Warp-collective operation: the last lane to arrive runs all(args of the lanes).
void collective(const char* op, void* arg, void (*all)(Warp&));

// numerics, tensor.cpp: C (rows x n, 32-bit) += A (rows x k bytes) * B (n x k bytes), as the unit does it
void multiply(const Profile& p, Type t, bool warpgroup, u32 rows, u32 n, u32 kbytes, const u8* a, const u8* b, u32* c);
}  // namespace emu

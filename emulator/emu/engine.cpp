// Fibers, the scheduler, barriers, warp exchange, and what a fault report says.
// It must not know memory or arithmetic; it runs one launch at a time, in one host thread.
#include "machine.h"
#include "profile.h"
#include <cstdarg>
#include <csignal>
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

extern "C" void emu_switch(void** save, void* to);
asm(R"(.text
.globl emu_switch
.hidden emu_switch
.type emu_switch, @function
emu_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
.size emu_switch, .-emu_switch
)");

namespace emu {
Thread* self = nullptr;
u32 arch = 0;
const u32 smem_origin = 1024;  // where dynamic shared memory starts on the chip
Rng rng;
Run current_run;
std::vector<Copy> pending;
std::string last_error;

namespace {
constexpr size_t stack_bytes = 256 << 10;  // reserved; pages become real when touched
constexpr size_t poll_limit = 5000000;
void* main_sp;
std::vector<Fiber*> ready[64];  // by warp number modulo 64
u64 ready_mask;
std::vector<std::unique_ptr<Cluster>> running;
std::string error;
void (*body)(const void*);
const void* context;
std::vector<u8*> stacks;  // kept between launches
size_t used_stacks, polls;  // polls: yields since something happened
u32 priority[64];
bool uniform;

void make_ready(Fiber* f) {
    const u32 w = f->warp % 64;
    ready[w].push_back(f);
    ready_mask |= 1ull << w;
}
void forget_ready() {
    for (auto& r : ready) r.clear();
    ready_mask = 0;
}

std::string who(const Fiber& f) {
    const Cta& c = *f.cta;
    char s[96];
    snprintf(s, sizeof s, "block (%u,%u,%u) thread %u (warp %u lane %u)", c.x, c.y, c.z, f.tid, f.warp, f.lane);
    return s;
}
// Where the frames are in kernel text, innermost first: "ring.cuh:31 from stream.cuh:210". Emulator frames are left out.
std::string where(void* const* frames, int n) {
    std::vector<std::string> found;
    for (int i = 0; i < n && found.size() < 3; ++i) {
        Dl_info info;
        if (!dladdr(frames[i], &info) || !info.dli_fname) continue;
        const char* base = strrchr(info.dli_fname, '/');
        if (strcmp(base ? base + 1 : info.dli_fname, "kernels.so")) continue;  // build.py calls every library of kernels that
        char cmd[4096], line[2048];
        snprintf(cmd, sizeof cmd, "addr2line -i -e '%s' 0x%llx 2>/dev/null", info.dli_fname,
                 (unsigned long long)(static_cast<char*>(frames[i]) - static_cast<char*>(info.dli_fbase)) - 1);
        FILE* p = popen(cmd, "r");
        if (!p) break;
        while (fgets(line, sizeof line, p)) {  // the inlined frames of one address, innermost first
            std::string s(line);
            s = s.substr(0, s.find_first_of(" \n"));
            if (s[0] == '?' || s.find("/emulator/hw/") != s.npos || s.find("/emulator/emu/") != s.npos || s.find("launchers") != s.npos || s.find("unit.cpp") != s.npos) continue;
            s = s.substr(s.rfind('/') + 1);
            if (found.size() < 3 && (found.empty() || found.back() != s)) found.push_back(s);
        }
        pclose(p);
    }
    std::string out;
    for (const std::string& s : found) out += (out.empty() ? "" : " from ") + s;
    return out.empty() ? "?" : out;
}
// barrier.cluster waits for the threads that have not exited.
void complete_cluster(Cluster& cl) {
    if (cl.missing || !cl.arrived) return;
    cl.arrived = 0; ++cl.phase;
    for (auto& c : cl.ctas) cl.missing += c->live;
    cl.done = cl.current;
    wake(cl.waiting);
}
void leave_cluster(Fiber& f) {
    Cluster& cl = *f.cta->cluster;
    if (f.cluster_phase <= cl.phase) { --cl.missing; complete_cluster(cl); }
}
void to_main() { emu_switch(&me().sp, main_sp); }
void entry() {
    try {
        body(context);
        Fiber& f = me();
        f.copy_groups.push_back(std::move(f.copies));
        cp_async_wait(0);  // leaving with copies in flight is legal
        if (f.wg_issued != f.wg_retired) fault("thread exits with wgmma operations it never waited for");
        if (!f.stores.empty() || !f.store_groups.empty()) fault("thread exits with bulk stores still reading shared memory (no cp.async.bulk.wait_group)");
        if (f.cta->live == 1) f.cta->check_exit();
    } catch (const Fault& e) { error = e.what(); }
    Fiber& f = me();
    f.done = true;
    --f.cta->live;
    leave_cluster(f);
    to_main();
    __builtin_unreachable();
}
std::string deadlock() {
    std::map<std::string, std::vector<u32>> kinds;
    for (auto& cl : running)
        for (auto& c : cl->ctas)
            for (Fiber& f : c->fibers) {
                if (f.done) continue;
                char s[256] = "?";
                if (!f.wait) snprintf(s, sizeof s, "nothing");
                else if (!strcmp(f.wait, "barrier")) snprintf(s, sizeof s, "barrier %u: %u of %u threads arrived", f.wait_a, c->barriers[f.wait_a].arrived, f.wait_b);
                else if (!strcmp(f.wait, "mbarrier")) {
                    const Mbar& m = c->mbars[f.wait_a];
                    snprintf(s, sizeof s, "mbarrier 0x%x, parity %u: in phase %u, %u of %u arrivals missing, %lld bytes of copies missing",
                             f.wait_a, f.wait_b, m.phase, m.pending, m.count, m.tx);
                } else if (!strcmp(f.wait, "cluster")) snprintf(s, sizeof s, "cluster barrier: %u threads arrived", cl->arrived);
                else if (!strcmp(f.wait, "wgmma")) snprintf(s, sizeof s, "wgmma.wait_group: operation %u was not issued by the whole warpgroup", f.wait_a);
                else snprintf(s, sizeof s, "%s, for the other lanes of its warp (%u of %u are there)", f.wait, c->warps[f.warp].count, c->warps[f.warp].size);
                char head[64];
                snprintf(head, sizeof head, "block (%u,%u,%u) ", c->x, c->y, c->z);
                kinds[std::string(head) + "waits in " + s].push_back(f.tid);
            }
    std::string out = "deadlock:";
    for (auto& [k, t] : kinds) {
        out += "\n  " + k + "; threads";
        for (size_t i = 0, j; i < t.size(); i = j) {
            for (j = i + 1; j < t.size() && t[j] == t[j - 1] + 1;) ++j;
            out += " " + std::to_string(t[i]) + (j - i > 1 ? "-" + std::to_string(t[j - 1]) : "");
        }
    }
    return out;
}
void start(Cluster& cl, const Launch& cfg, u32 first) {
    const u32 threads = cfg.threads, per_cta = Cta::slots(threads);
    cl.serial = current_run.first_serial + first / cfg.cluster;
    cl.slots = per_cta * cfg.cluster;
    cl.current = cl.done = Clock(cl.slots);
    cl.missing = threads * cfg.cluster;
    for (u32 r = 0; r < cfg.cluster; ++r) {
        auto c = std::make_unique<Cta>();
        const u32 id = first + r;
        c->cluster = &cl; c->rank = r; c->cluster_size = cfg.cluster; c->threads = c->live = threads; c->slot_base = per_cta * r;
        c->x = id % cfg.grid_x; c->y = id / cfg.grid_x % cfg.grid_y; c->z = id / cfg.grid_x / cfg.grid_y;
        c->grid_x = cfg.grid_x; c->grid_y = cfg.grid_y; c->grid_z = cfg.grid_z;
        c->smem_size = cfg.smem;
        c->smem.assign(cfg.smem, 0xff);
        c->shadow.resize((cfg.smem + 15) / 16);
        c->fibers.resize(threads);
        c->warps.resize((threads + 31) / 32);
        c->groups.resize((threads + 127) / 128);
        c->agent_time.resize(Cta::max_mbars(threads));
        for (u32 t = 0; t < threads; ++t) {
            Fiber& f = c->fibers[t];
            f.block = c.get(); f.cta = c.get(); f.tid = t; f.warp = t / 32; f.lane = t % 32; f.slot = c->slot_base + t; f.wg_fences = 1;
            f.clock = Clock(cl.slots);
            f.clock.hb(f.slot) = 1;
            Warp& w = c->warps[f.warp];
            w.fibers[w.size++] = &f;
            if (used_stacks == stacks.size()) {
                void* m = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
                if (m == MAP_FAILED) throw Fault("the emulator has no memory for another thread's stack");
                mprotect(m, 4096, PROT_NONE);
                stacks.push_back(static_cast<u8*>(m));
            }
            void** sp = reinterpret_cast<void**>(stacks[used_stacks++] + stack_bytes) - 1;
            *sp = nullptr;  // return address of entry: ends backtraces
            *--sp = reinterpret_cast<void*>(&entry);
            f.sp = sp - 6;
            make_ready(&f);
        }
        cl.ctas.push_back(std::move(c));
    }
}
Fiber* pick() {
    u32 best;
    if (uniform) {  // any warp that can run
        u64 m = ready_mask;
        for (u32 skip = rng() % u32(__builtin_popcountll(m)); skip; --skip) m &= m - 1;
        best = u32(__builtin_ctzll(m));
    } else {  // a random order of the warps that changes now and then: starves some of them for long
        if (rng.one_in(256)) priority[rng() % 64] = rng();
        best = u32(__builtin_ctzll(ready_mask));
        for (u64 m = ready_mask; m; m &= m - 1)
            if (priority[__builtin_ctzll(m)] > priority[best]) best = u32(__builtin_ctzll(m));
    }
    auto& list = ready[best];
    const size_t i = rng() % list.size();
    Fiber* f = list[i];
    list[i] = list.back();
    list.pop_back();
    if (list.empty()) ready_mask &= ~(1ull << best);
    return f;
}
void run(const Launch& cfg) {
    rng.s = cfg.seed * 0x9E3779B97F4A7C15ull + 0x1234567;
    for (int i = 0; i < 8; ++i) rng();
    uniform = cfg.seed % 2;
    const u32 eager = u32(cfg.seed / 2 % 4) * 64;  // bulk copies land one in so many steps; 0: only when all threads wait
    for (u32& p : priority) p = rng();
    const u32 total = cfg.grid_x * cfg.grid_y * cfg.grid_z / cfg.cluster;
    std::vector<u32> order(total);
    for (u32 i = 0; i < total; ++i) { order[i] = i; std::swap(order[i], order[rng() % (i + 1)]); }
    u32 next = 0;
    while (next < total) {  // waves of `resident` clusters
        used_stacks = 0;
        polls = 0;
        for (u32 i = 0; i < cfg.resident && next < total; ++i) {
            running.push_back(std::make_unique<Cluster>());
            start(*running.back(), cfg, order[next++] * cfg.cluster);
        }
        for (;;) {
            if (!pending.empty() && (!ready_mask || (eager && rng.one_in(eager)))) {
                self = nullptr;
                land_copy(rng() % pending.size());
                continue;
            }
            if (!ready_mask) break;
            Fiber* f = pick();
            f->wait = nullptr;
            self = f;
            emu_switch(&main_sp, f->sp);
            if (!error.empty()) throw Fault(error);
        }
        for (auto& cl : running)
            for (auto& c : cl->ctas)
                if (c->live) throw Fault(deadlock());
        running.clear();
    }
}
std::string check(const Launch& l, u32 bound) {
    char s[256] = "";
    const Profile* p = find_profile(l.arch);
    if (!p) snprintf(s, sizeof s, "launch: the emulator has no profile for arch %u", l.arch);
    else if (!l.grid_x || !l.grid_y || !l.grid_z || !l.threads || !l.cluster || !l.resident) snprintf(s, sizeof s, "launch: grid, block, cluster and resident must be positive");
    else if (l.grid_y > 65535 || l.grid_z > 65535) snprintf(s, sizeof s, "launch: grid (%u,%u,%u) exceeds 65535 in y or z", l.grid_x, l.grid_y, l.grid_z);
    else if (l.threads > 1024) snprintf(s, sizeof s, "launch: %u threads in a block, at most 1024", l.threads);
    else if (bound && l.threads > bound) snprintf(s, sizeof s, "launch: %u threads, but the kernel is HW_KERNEL(%u)", l.threads, bound);
    else if (l.smem > p->smem_bytes) snprintf(s, sizeof s, "launch: %u bytes of shared memory, sm_%u has %u per block", l.smem, l.arch, p->smem_bytes);
    else if (l.cluster > 1 && l.arch < 90) snprintf(s, sizeof s, "launch: clusters need sm_90, this is sm_%u", l.arch);
    else if (l.cluster > 8) snprintf(s, sizeof s, "launch: cluster of %u, at most 8 is portable", l.cluster);
    else if (l.grid_x % l.cluster) snprintf(s, sizeof s, "launch: grid x = %u is no multiple of the cluster size %u", l.grid_x, l.cluster);
    return s;
}
}  // namespace

EMU_HOT static void join_max(u32* a, const u32* b, u32 n) { for (u32 i = 0; i < n; ++i) a[i] = a[i] > b[i] ? a[i] : b[i]; }
EMU_HOT static void meet_min(u32* a, const u32* b, u32 n) { for (u32 i = 0; i < n; ++i) a[i] = a[i] < b[i] ? a[i] : b[i]; }
void Clock::join(const Clock& o) { join_max(v.get(), o.v.get(), 2 * n); }
void Clock::meet(const Clock& o) { meet_min(v.get(), o.v.get(), 2 * n); }

void fault(const char* format, ...) {
    char s[1024];
    va_list v;
    va_start(v, format);
    vsnprintf(s, sizeof s, format, v);
    va_end(v);
    if (!self) throw Fault(s);
    void* frames[64];
    const int n = backtrace(frames, 64);
    throw Fault(who(me()) + " at " + where(frames, n) + ": " + s);
}
void missing(u32 needs, bool exactly, const char* instruction) {
    fault("%s needs %ssm_%u, this launch is for sm_%u", instruction, exactly ? "exactly " : "", needs, arch);
}
void escape(void* pc, const char* text) {
    char* after = static_cast<char*>(pc) + 1;  // where() looks one byte back, as for return addresses
    void* frames[1] = {after};
    error = who(me()) + " at " + where(frames, 1) + ": " + text;
    to_main();
    __builtin_unreachable();
}
std::string slot_name(const Cta& c, u32 slot) {
    const u32 per = Cta::slots(c.threads), r = slot / per, i = slot % per;
    const std::string of = r == c.rank ? "" : " of cluster CTA " + std::to_string(r);
    if (i < c.threads) return "thread " + std::to_string(i) + of;
    if (i < c.threads + Cta::max_mbars(c.threads)) return "a bulk copy" + of;
    return "wgmma of warp " + std::to_string(i - c.threads - Cta::max_mbars(c.threads)) + of;
}

void block(const char* what, u32 a, u32 b) {
    Fiber& f = me();
    f.wait = what; f.wait_a = a; f.wait_b = b;
    to_main();
}
void yield() {
    if (++polls > poll_limit) fault("livelock: threads only poll, nothing else happens (waiting for a block that is not resident?)");
    make_ready(&me());
    me().wait = "yield";
    to_main();
}
void wake(std::vector<Fiber*>& list) {
    polls = 0;
    for (Fiber* f : list) make_ready(f);
    list.clear();
}

int launch(const Launch& l, u32 bound, void (*fn)(const void*), const void* ctx) {
    static u32 next_serial = 1;
    last_error = check(l, bound);
    if (!last_error.empty()) return 1;
    body = fn; context = ctx; arch = l.arch;
    error.clear();
    current_run.cfg = l;
    current_run.profile = find_profile(l.arch);
    current_run.first_serial = next_serial;
    next_serial += l.grid_x * l.grid_y * l.grid_z / l.cluster;
    begin_global_epoch();
    catch_segv();
    try { run(l); } catch (const Fault& e) { last_error = e.what(); }
    self = nullptr;
    forget_ready();
    running.clear();
    pending.clear();
    return !last_error.empty();
}
int refuse_params(const char* entry, u64 want, u64 got) {
    last_error = std::string("launch: the parameters of ") + entry + " are " + std::to_string(want) + " bytes, got " + std::to_string(got);
    return 1;
}

// ---- a plain access through a global pointer: the range has no rights, so it ends here -------------------------------
namespace {
struct sigaction previous;
alignas(16) u8 escape_stack[256 << 10], signal_stack[64 << 10];
u64 segv_address;
void escape_here(void* pc) {
    const bool ours = owns(segv_address);
    bool stack = false;
    for (u8* s : stacks) stack |= segv_address >= u64(s) && segv_address < u64(s) + 4096;
    char s[128];
    snprintf(s, sizeof s, "%s (address 0x%llx)", ours ? "global memory dereferenced without an hw function"
             : stack ? "stack overflow: local arrays of more than 200 KB" : "segmentation fault in the kernel", segv_address);
    escape(pc, s);
}
void on_segv(int, siginfo_t* info, void* uc) {
    if (!self) {  // not a kernel: whoever handled it before does so again
        sigaction(SIGSEGV, &previous, nullptr);
        return;
    }
    segv_address = u64(info->si_addr);
    auto* g = static_cast<ucontext_t*>(uc)->uc_mcontext.gregs;
    g[REG_RDI] = g[REG_RIP];
    g[REG_RIP] = reinterpret_cast<greg_t>(&escape_here);
    g[REG_RSP] = reinterpret_cast<greg_t>(escape_stack + sizeof escape_stack - 8);  // as after a call: 16-byte aligned plus 8
}
}  // namespace
void catch_segv() {
    struct sigaction now {};
    sigaction(SIGSEGV, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_segv) return;
    stack_t ss{};
    sigaltstack(nullptr, &ss);
    if (ss.ss_flags & SS_DISABLE) {
        ss = {};
        ss.ss_sp = signal_stack;
        ss.ss_size = sizeof signal_stack;
        sigaltstack(&ss, nullptr);
    }
    struct sigaction sa {};
    sa.sa_sigaction = on_segv;
    sa.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &sa, &previous);
}

// ---- warp exchange ----------------------------------------------------------------------------------------------------
void collective(const char* op, void* arg, void (*all)(Warp&)) {
    Fiber& f = me();
    Warp& w = f.cta->warps[f.warp];
    if (w.count && w.op != op && strcmp(w.op, op)) fault("diverged warp: this lane executes %s while other lanes wait in %s", op, w.op);
    if (w.size != 32) fault("%s in a warp of %u threads", op, w.size);
    w.op = op;
    w.args[f.lane] = arg;
    if (++w.count < w.size) return block(op);
    w.count = 0;
    all(w);
    for (u32 l = 0; l < 32; ++l) if (w.fibers[l] != &f) make_ready(w.fibers[l]);
}
void warp_barrier() {
    collective("bar.warp.sync", nullptr, [](Warp& w) {
        Clock c = w.fibers[0]->clock;
        u32 drained[32] = {};
        for (u32 l = 1; l < 32; ++l) c.join(w.fibers[l]->clock);
        for (Fiber* f : w.fibers)
            for (u32 l = 0; l < 32; ++l) drained[l] = std::max(drained[l], f->drained[l]);
        for (Fiber* f : w.fibers) { f->clock = c; f->tick(); memcpy(f->drained, drained, sizeof drained); }
    });
}
namespace { struct Shuffle { u32 v, src, out; }; }
u32 shuffle(const char* op, u32 v, u32 source_lane) {
    Shuffle s{v, source_lane, 0};
    collective(op, &s, [](Warp& w) {
        auto* a = reinterpret_cast<Shuffle**>(w.args);
        for (u32 l = 0; l < 32; ++l) a[l]->out = a[a[l]->src & 31]->v;
    });
    return s.out;
}
u32 ballot(bool p) {
    u32 v = p;
    collective("vote.ballot", &v, [](Warp& w) {
        u32 all = 0;
        for (u32 l = 0; l < 32; ++l) all |= *static_cast<u32*>(w.args[l]) << l;
        for (void* a : w.args) *static_cast<u32*>(a) = all;
    });
    return v;
}
bool elect() {  // some lane: the chip takes lane 0, the emulator any
    u32 leader = 0;
    collective("elect", &leader, [](Warp& w) {
        const u32 l = rng() % 32;
        for (void* p : w.args) *static_cast<u32*>(p) = l;
    });
    return leader == self->lane;
}
void setmaxnreg(u32 n) {  // collective over the warp; the count itself has no meaning here
    if (n % 8 || n < 24 || n > 256) fault("setmaxnreg: %u is no multiple of 8 in 24..256", n);
    collective("setmaxnreg", nullptr, [](Warp&) {});
}

// ---- barriers of a block and of a cluster --------------------------------------------------------------------------------
void barrier(u32 id, u32 n, bool wait) {
    Fiber& f = me();
    Cta& c = *f.cta;
    if (id > 15) fault("barrier %u does not exist", id);
    if (n == 0) n = (c.threads + 31) / 32 * 32;
    if (n % 32) fault("barrier %u: thread count %u is no multiple of 32", id, n);
    if (n > c.threads && c.threads % 32 == 0) fault("barrier %u: %u threads expected in a block of %u", id, n, c.threads);
    const u32 expected = std::min(n, c.threads);  // a ragged last warp counts as a whole one
    Barrier& b = c.barriers[id];
    if (b.arrived == 0) {
        b.expected = expected;
        if (b.clock.n) b.clock.clear(); else b.clock = Clock(c.cluster->slots);
    }
    if (b.expected != expected) fault("barrier %u: this thread expects %u threads, the first to arrive expected %u", id, expected, b.expected);
    for (Fiber* w : b.waiting) if (w == &f) fault("barrier %u: thread arrives twice", id);
    f.release(b.clock);
    const bool last = ++b.arrived == expected;
    if (!last) { if (wait) { b.waiting.push_back(&f); block("barrier", id, expected); } return; }
    for (Fiber* w : b.waiting) { w->clock.join(b.clock); w->drain(b.clock); }
    if (wait) { f.clock.join(b.clock); f.drain(b.clock); }
    b.arrived = 0;
    wake(b.waiting);
}
void cluster_arrive(bool release) {
    Fiber& f = me();
    Cluster& cl = *f.cta->cluster;
    if (f.cluster_phase > cl.phase) fault("barrier.cluster.arrive twice without a wait between");
    if (release) f.release(cl.current);
    f.cluster_phase = cl.phase + 1;
    ++cl.arrived;
    --cl.missing;
    complete_cluster(cl);
}
void cluster_wait() {
    Fiber& f = me();
    Cluster& cl = *f.cta->cluster;
    if (f.cluster_phase == 0) fault("barrier.cluster.wait without arrive");
    while (cl.phase < f.cluster_phase) { cl.waiting.push_back(&f); block("cluster"); }
    f.clock.join(cl.done);
    f.drain(cl.done);
    f.cluster_waited = f.cluster_phase;
}
u32 mapa(u32 addr, u32 rank) {
    if (rank >= self->block->cluster_size) fault("mapa: rank %u in a cluster of %u", rank, self->block->cluster_size);
    return addr | (rank + 1) << 24;
}
}  // namespace emu

// ---- for Python (emulator/run.py) -----------------------------------------------------------------------------------------
extern "C" __attribute__((visibility("default"))) const char* emu_profile(emu::u32 arch) {  // "" when there is none
    static char s[256];
    const emu::Profile* p = emu::find_profile(arch);
    const char* fp8[] = {"none", "split", "native"};
    s[0] = 0;
    if (p)
        snprintf(s, sizeof s, "arch=%u;smem_bytes=%u;half_block=%u;half_fraction=%d;half_result=%d;fp8_mma=%s;fp8_block=%u;fp8_fraction=%d;fp8_result=%d;basis=%s",
                 p->arch, p->smem_bytes, p->half.block, p->half.fraction, p->half.result, fp8[int(p->fp8_mma)], p->fp8.block, p->fp8.fraction, p->fp8.result, p->basis);
    return s;
}

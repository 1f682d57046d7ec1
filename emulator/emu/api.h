// What the twins in emulator/hw call: the engine's operations, with no C++ library header, so that kernels compile fast.
// It must not know how the engine keeps its state (machine.h does).
#pragma once
#ifndef __x86_64__
#error "the emulator runs on x86-64 hosts only: its fiber switch is x86-64 assembly (emu/engine.cpp)"
#endif
namespace emu {
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// ---- who is running ---------------------------------------------------------------------------------------------
struct Block { u32 x, y, z, threads, grid_x, grid_y, grid_z, rank, cluster_size; };
struct Thread { u32 tid, warp, lane, slot, wg_fences; const Block* block; };
extern Thread* self;  // the running thread
extern u32 arch;      // of this launch: 75, 80, 86, ...
extern const u32 smem_origin;

[[noreturn]] void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void missing(u32 needs, bool exactly, const char* instruction);
inline void need(u32 least, const char* instruction) { if (arch < least) missing(least, false, instruction); }
inline void need_exactly(u32 only, const char* instruction) { if (arch != only) missing(only, true, instruction); }

// ---- threads and barriers ---------------------------------------------------------------------------------------
void yield();
u32 shuffle(const char* op, u32 v, u32 source_lane);
u32 ballot(bool p);
bool elect();
void barrier(u32 id, u32 n, bool wait);
void warp_barrier();
void setmaxnreg(u32 n);
void griddep_wait();
void griddep_launch();
void cluster_arrive(bool release);
void cluster_wait();
u32 mapa(u32 addr, u32 rank);

// ---- memory -----------------------------------------------------------------------------------------------------
enum Access { READ, READ_NC, WRITE, ATOMIC, ACQUIRE, RELEASE, ACQ_REL };  // the last three move clocks, too
u8* global_bytes(const void* p, u32 n, u32 align, Access how, const char* what);
void load_shared(u32 addr, void* v, u32 n, bool remote);
void store_shared(u32 addr, const void* v, u32 n, bool remote);
u32 atom_shared_add(u32 addr, u32 v);
void move_matrices(bool store, u32 addr, u32* r, u32 count, bool trans);

// ---- asynchronous operations ------------------------------------------------------------------------------------
struct alignas(64) TensorMap {  // 2-D, width x height elements; swizzle as in matrix descriptors (0, 1: 128, 2: 64, 3: 32 bytes)
    const void* base;
    u32 width, height, pitch, elem, box_width, box_height, swizzle;
    u32 unused[23];  // to the 128 bytes of the chip's map
};
static_assert(sizeof(TensorMap) == 128, "kernel parameters have one layout on chip and CPU");
void cp_async(u32 dst, const void* src, u32 size, u32 n);
void cp_async_commit();
void cp_async_wait(u32 keep);
void mbar_init(u32 addr, u32 count);
void mbar_arrive(u32 addr, u32 tx, u32 arrivals, bool remote, const char* what);
bool mbar_try_wait(u32 addr, u32 parity);
void fence_async();
void fence_mbar_init();
void bulk_load(u32 dst, const void* src, u32 bytes, u32 bar);
void load_tensor_2d(u32 dst, const TensorMap* map, int x, int y, u32 bar);
void bulk_store(void* dst, u32 src, u32 bytes);
void bulk_commit();
void bulk_wait(u32 keep);
u64 policy(u32 kind);             // createpolicy
void check_policy(u64 policy);    // is it one that policy() made?

// ---- arithmetic -------------------------------------------------------------------------------------------------
u32 add_f16x2(u32 a, u32 b);
u32 sub_f16x2(u32 a, u32 b);
u32 mul_f16x2(u32 a, u32 b);
u32 fma_f16x2(u32 a, u32 b, u32 c);
u32 add_bf16x2(u32 a, u32 b);
u32 sub_bf16x2(u32 a, u32 b);
u32 mul_bf16x2(u32 a, u32 b);
u32 fma_bf16x2(u32 a, u32 b, u32 c);
float canonical(float v);  // NaN results of the chip's float unit: 0x7fffffff
float fma_f32(float a, float b, float c);
float exp2_f32(float a);
int round_s32(float v);
float f32_of_f16(u16 v);
u16 f16_of(float v);
u16 bf16_of(float v);
u8 e4m3_of(float v);
u8 e5m2_of(float v);
u16 f16_of_e4m3(u8 v);
u16 f16_of_e5m2(u8 v);

// ---- tensor cores -----------------------------------------------------------------------------------------------
enum class Type { f16, bf16, e4m3, e5m2, s8 };
struct RegState;
void mma_sync(Type t, u32 k_bytes, void* d, const u32* a, const u32* b);  // 16 x 8
void mma_m8n8k16_s8(int* d, const u32* a, const u32* b);
void wgmma(Type t, u32 n, RegState& d, const u32* a_regs, RegState* a_state, u64 a, u64 b, bool accumulate);
void wgmma_commit();
void wgmma_wait(u32 keep);

// Watches registers given to wgmma: touched = the fence count at the last access, flights = operations in flight.
struct RegState {
    u32 touched = 0, flights = 0, count = 0;
    u32 *visible = nullptr, *hidden = nullptr;  // hidden: the true accumulators while in flight; the visible ones are NaN
    [[noreturn]] void refuse(u32 i) const;
    void touch(u32 i) {
        if (i >= count || flights) refuse(i);
        touched = self->wg_fences;
    }
    void drop();  // destroyed while in flight
};

// ---- a launch -----------------------------------------------------------------------------------------------------
struct Launch { u32 grid_x, grid_y, grid_z, threads, smem, cluster, resident, arch; u64 seed; };
int launch(const Launch& l, u32 bound, void (*body)(const void*), const void* context);  // 0, or 1 with emu_error()
int refuse_params(const char* entry, u64 want, u64 got);

// Runs a kernel of one trivially copyable parameter, given as bytes.
template <class P>
struct Call { void (*kernel)(P); P params; };
template <class P>
int run(const Launch& l, u32 bound, const char* entry, void (*kernel)(P), const void* params, u64 bytes) {
    static_assert(__is_trivially_copyable(P), "kernel parameters travel as bytes");
    if (bytes != sizeof(P)) return refuse_params(entry, sizeof(P), bytes);
    union Slot { Call<P> call; char raw; Slot() : raw(0) {} } slot;
    slot.call.kernel = kernel;
    __builtin_memcpy(&slot.call.params, params, sizeof(P));
    return launch(l, bound, [](const void* c) { auto* call = static_cast<const Call<P>*>(c); call->kernel(call->params); }, &slot.call);
}
}  // namespace emu

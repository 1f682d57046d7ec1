// The thin hardware layer, CPU side: the names and signatures of lowbit/cuda/hw/hw.h, mapped onto the emulator.
// It must not keep state of its own; `need` names the instruction and the arch it came with.
#pragma once
#include "../emu/api.h"
#ifndef HW_FN
#define HW_FN inline
#endif
#define HW_KERNEL(threads) inline void
#define HW_KERNEL_RESIDENT(threads, blocks) inline void
#define HW_GRID_CONST
#define HW_UNROLL
#define HW_NO_UNROLL

namespace hw {
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(8) U2 { u32 x, y; };
struct alignas(16) U4 { u32 x, y, z, w; };
using emu::TensorMap;

// Registers handed to wgmma: poisoned at birth, every access checked while an operation is in flight.
template <class T, int N>
struct Regs {
    T v[N];
    mutable emu::RegState state;
    Regs() { __builtin_memset(v, 0xff, sizeof v); state.visible = reinterpret_cast<u32*>(v); state.count = N; }
    Regs(const Regs& o) : Regs() { o.state.touch(0); __builtin_memcpy(v, o.v, sizeof v); }
    Regs& operator=(const Regs& o) { o.state.touch(0); state.touch(0); __builtin_memcpy(v, o.v, sizeof v); return *this; }
    ~Regs() noexcept(false) { if (state.flights) state.drop(); }
    T& operator[](int i) { state.touch(u32(i)); return v[i]; }
    const T& operator[](int i) const { state.touch(u32(i)); return v[i]; }
};
}  // namespace hw

#include "core.h"
#include "access.h"
#include "async.h"
#include "arith.h"
#include "mma.h"
#include "wgmma.h"

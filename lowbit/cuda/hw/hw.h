// The thin hardware layer, chip side: one small function per PTX instruction, no toolkit headers.
// It must not know kernels or formats; the layer of the same names for the CPU lives in the emulator, and a test compares both.
#pragma once
#define HW_FN __device__ __forceinline__
#define HW_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define HW_KERNEL_RESIDENT(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define HW_GRID_CONST __grid_constant__
#define HW_UNROLL _Pragma("unroll")
#define HW_NO_UNROLL _Pragma("unroll 1")

namespace hw {
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(8) U2 { u32 x, y; };
struct alignas(16) U4 { u32 x, y, z, w; };
struct alignas(64) TensorMap { u64 opaque[16]; };  // the bytes of a CUtensorMap

// Registers handed to wgmma. A struct, so that the CPU side can watch every access.
template <class T, int N>
struct Regs {
    T v[N];
    HW_FN T& operator[](int i) { return v[i]; }
    HW_FN const T& operator[](int i) const { return v[i]; }
};
}  // namespace hw

#include "core.h"
#include "access.h"
#include "async.h"
#include "arith.h"
#include "mma.h"
#include "wgmma.h"

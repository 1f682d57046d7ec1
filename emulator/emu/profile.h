// Facts per arch that a launch is held to: shared memory of a block and the arithmetic of the tensor cores.
// It must not know instructions; the arch each of them needs stands in its twin (hw/*.h).
#pragma once
#include "api.h"

namespace emu {
// How a tensor core adds. `block` products and the accumulator form one sum: every term is cut toward zero `fraction` bits
// below the largest exponent, the sum is exact, the result is cut toward zero to `result` fraction bits; the next block goes on from it.
struct Sum { u32 block; int fraction, result; };
enum class Fp8 { none, split, native };  // mma.sync on fp8: split = two f16 products from zero, then one fp32 addition (as ptxas does on sm_90)

struct Profile {
    u32 arch, smem_bytes;
    Sum half;      // f16, bf16: mma.sync and wgmma
    Fp8 fp8_mma;
    Sum fp8;       // native mma.sync, wgmma
    const char* basis;
};

// golden:    bit-exact on data recorded on that chip (tests/emu/golden.bin).
// published: block and fraction as reported for one chip of that generation (A100: Fasi et al., PeerJ CS 7:e330, 2021;
//            Khattak and Mikaitis, arXiv 2512.07004). Entered by hand, no data of ours: do not rest a test on last bits.
// assumed:   the nearest chip's arithmetic carried over; only shared memory and instruction set are from documents.
// Integer products are exact everywhere. Shared memory per block: CUDA programming guide, table of compute capabilities.
constexpr Profile profiles[] = {
    // arch   shared        f16/bf16         fp8 mma.sync  fp8              basis
    {75,  64 * 1024,  {4, 24, 23},  Fp8::none,   {0, 0, 0},    "assumed"},
    {80,  163 * 1024, {8, 24, 23},  Fp8::none,   {0, 0, 0},    "published"},
    {86,  99 * 1024,  {8, 24, 23},  Fp8::none,   {0, 0, 0},    "assumed"},
    {87,  163 * 1024, {8, 24, 23},  Fp8::none,   {0, 0, 0},    "assumed"},
    {89,  99 * 1024,  {8, 24, 23},  Fp8::native, {16, 13, 13}, "assumed"},
    {90,  227 * 1024, {16, 25, 23}, Fp8::split,  {32, 13, 13}, "golden"},
    {100, 227 * 1024, {16, 25, 23}, Fp8::native, {32, 25, 23}, "assumed"},
    {103, 227 * 1024, {16, 25, 23}, Fp8::native, {32, 25, 23}, "assumed"},
    {110, 227 * 1024, {16, 25, 23}, Fp8::native, {32, 25, 23}, "assumed"},
    {120, 99 * 1024,  {16, 25, 23}, Fp8::native, {32, 25, 23}, "assumed"},
    {121, 99 * 1024,  {16, 25, 23}, Fp8::native, {32, 25, 23}, "assumed"},
};
inline const Profile* find_profile(u32 arch) {
    for (const Profile& p : profiles) if (p.arch == arch) return &p;
    return nullptr;
}
}  // namespace emu

// One warp multiplies units (16 rows x 128 k) of packed weights in shared memory with token tiles.
// The inner loop of every mma.sync family; it must not know where tokens lie (a functor loads them) or how stages arrive.
#pragma once
#include "dequant.cuh"

namespace lowbit {
// acc[r][n] += unit[r] (16 x 128) * tokens n (128 x 8), over kFactor where there are no group scales. load_b(b, pair): the B registers of k = 32 pair .. 32 pair + 31,
// b[n] = {first step lo, hi, second step lo, hi}. after_reads() is called once the units are in registers: their stage may go, while
// most of the arithmetic is still to come.
// Group scales act on fp32 partial sums, acc += scale * part, once per kStep of k: exact products for every scale format, so the
// only error is fp32 accumulation. Scaling the operands instead would round int4 x bf16 scale to bf16 (2^-9 relative per weight).
template <class C, int kRowBlocks, int kTokenTiles, class LoadB, class AfterReads>
HW_FN void multiply_units(float (&acc)[kRowBlocks][kTokenTiles][4], const u32 (&smem_unit)[kRowBlocks], LoadB load_b, AfterReads after_reads) {
    using Value = typename C::Value;
    using Convert = lowbit::Convert<typename C::Operand, Value>;
    constexpr int kVectorSteps = 16 / Value::kBits, kWordsPerStep = Value::kBits / 4;  // a vector is 16 bytes a lane
    constexpr bool kGrouped = C::kStep != 0;
    constexpr int kSteps = kGrouped ? 128 / (kGrouped ? C::kStep : 1) : 1;
    const u32 lane_offset = lane_id() * 16;
    UnitScales<typename C::Scale, kSteps> scales[kRowBlocks];
    if constexpr (kGrouped)
        HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) scales[r].load(smem_unit[r] + C::kCodeBytes);
    float part[kRowBlocks][kTokenTiles][4];
    HW_UNROLL for (int v = 0; v < 8 / kVectorSteps; ++v) {
        U4 q[kRowBlocks];
        HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) q[r] = ld_shared_v4(smem_unit[r] + v * 512 + lane_offset);
        if (v == 8 / kVectorSteps - 1) after_reads();
        HW_UNROLL for (int pair = 0; pair < kVectorSteps / 2; ++pair) {
            u32 b[kTokenTiles][4];
            load_b(b, v * kVectorSteps / 2 + pair);
            HW_UNROLL for (int j = 0; j < 2; ++j) {
                const int in_vector = pair * 2 + j, step = v * kVectorSteps + in_vector;
                if (kGrouped && step * 16 % (kGrouped ? C::kStep : 1) == 0)
                    HW_UNROLL for (int r = 0; r < kRowBlocks; ++r)
                        HW_UNROLL for (int n = 0; n < kTokenTiles; ++n)
                            HW_UNROLL for (int e = 0; e < 4; ++e) part[r][n][e] = 0;
                HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) {
                    const u32 words[4] = {q[r].x, q[r].y, q[r].z, q[r].w};
                    u32 a[4];
                    Convert::step(a, words + in_vector * kWordsPerStep);
                    HW_UNROLL for (int n = 0; n < kTokenTiles; ++n) {
                        const u32 bn[2] = {b[n][2 * j], b[n][2 * j + 1]};
                        C::Operand::template mma<C::kLevel>(kGrouped ? part[r][n] : acc[r][n], a, bn);
                    }
                }
                if (kGrouped && (step + 1) * 16 % (kGrouped ? C::kStep : 1) == 0)
                    HW_UNROLL for (int r = 0; r < kRowBlocks; ++r)
                        HW_UNROLL for (int n = 0; n < kTokenTiles; ++n)
                            HW_UNROLL for (int e = 0; e < 4; ++e)
                                acc[r][n][e] = fma_f32(mul_f32(scales[r].get(step * 16 / (kGrouped ? C::kStep : 1), e / 2), Convert::kFactor), part[r][n][e], acc[r][n][e]);
            }
        }
    }
}
}  // namespace lowbit

// One warp multiplies units (16 rows x 128 k) of packed weights in shared memory with token tiles.
// The inner loop of every mma.sync family; it must not know where tokens lie (a functor loads them) or how stages arrive.
#pragma once
#include "dequant.cuh"

namespace lowbit {
// acc[r][n] += unit[r] (16 x 128) * tokens n (128 x 8), over the conversion's kFactor. load_b(b, pair): the B registers of
// k = 32 pair .. 32 pair + 31, b[n] = {first step lo, hi, second step lo, hi}. after_reads() is called once the units are in registers:
// their stage may go, while most of the arithmetic is still to come.
//
// Group scales act on fp32 partial sums, acc += scale * part, once per kStep of k: exact products for every scale format, so the
// only error is fp32 accumulation. Scaling the operands instead would round int4 x bf16 scale to bf16 (2^-9 relative per weight).
template <class C, int kRowBlocks, int kTokenTiles, class LoadB, class AfterReads>
HW_FN void multiply_units(float (&acc)[kRowBlocks][kTokenTiles][4], const u32 (&smem_unit)[kRowBlocks], LoadB load_b, AfterReads after_reads) {
    using Value = typename C::Value;
    using Convert = lowbit::Convert<typename C::Operand, Value>;
    constexpr int kVectorSteps = 16 / Value::kBits, kWordsPerStep = Value::kBits / 4;  // a vector is 16 bytes a lane
    constexpr int kVectors = 8 / kVectorSteps, kVectorK = 16 * kVectorSteps;
    constexpr bool kGrouped = C::kStep != 0;
    constexpr int kStep = kGrouped ? C::kStep : 128;                                // k that shares a scale
    constexpr int kGroups = kStep < kVectorK ? kVectorK / kStep : 1;                // in a vector
    constexpr int kVectorsPerGroup = kStep > kVectorK ? kStep / kVectorK : 1;
    UnitScales<typename C::Scale, 128 / kStep, kGroups> scales[kRowBlocks];
    float part[kRowBlocks][kTokenTiles][4];

    auto multiply_vector = [&](int v) {
        U4 q[kRowBlocks];
        HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) q[r] = ld_shared_v4(smem_unit[r] + v * 512 + lane_id() * 16);
        if (kGrouped && v % kVectorsPerGroup == 0)
            HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) scales[r].load(smem_unit[r] + C::kCodeBytes, v / kVectorsPerGroup);
        if (v == kVectors - 1) after_reads();
        HW_UNROLL for (int pair = 0; pair < kVectorSteps / 2; ++pair) {
            u32 b[kTokenTiles][4];
            load_b(b, v * kVectorSteps / 2 + pair);
            HW_UNROLL for (int j = 0; j < 2; ++j) {
                const int step = pair * 2 + j;
                if (kGrouped && v % kVectorsPerGroup == 0 && step * 16 % kStep == 0)
                    HW_UNROLL for (int r = 0; r < kRowBlocks; ++r)
                        HW_UNROLL for (int n = 0; n < kTokenTiles; ++n)
                            HW_UNROLL for (int e = 0; e < 4; ++e) part[r][n][e] = 0;
                HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) {
                    const u32 words[4] = {q[r].x, q[r].y, q[r].z, q[r].w};
                    u32 a[4];
                    Convert::step(a, words + step * kWordsPerStep);
                    HW_UNROLL for (int n = 0; n < kTokenTiles; ++n) {
                        const u32 bn[2] = {b[n][2 * j], b[n][2 * j + 1]};
                        C::Operand::template mma<C::kLevel>(kGrouped ? part[r][n] : acc[r][n], a, bn);
                    }
                }
                if (kGrouped && v % kVectorsPerGroup == kVectorsPerGroup - 1 && (step * 16 + 16) % smaller(kStep, kVectorK) == 0)
                    HW_UNROLL for (int r = 0; r < kRowBlocks; ++r)
                        HW_UNROLL for (int n = 0; n < kTokenTiles; ++n)
                            HW_UNROLL for (int e = 0; e < 4; ++e)
                                acc[r][n][e] = fma_f32(scales[r].get(step * 16 / kStep, e / 2), part[r][n][e], acc[r][n][e]);
            }
        }
    };
    // Unrolled, ptxas hoists the loads of all vectors; with many accumulators that spills.
    if constexpr (kRowBlocks * kTokenTiles < 8) {
        HW_UNROLL for (int v = 0; v < kVectors; ++v) multiply_vector(v);
    } else {
        HW_NO_UNROLL for (int v = 0; v < kVectors; ++v) multiply_vector(v);
    }
}
}  // namespace lowbit

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
    using UnitCodes = Codes<Value>;
    constexpr int kVectorSteps = UnitCodes::kSteps, kVectors = UnitCodes::kVectors, kVectorK = 16 * kVectorSteps;
    constexpr bool kGrouped = C::kStep != 0;
    constexpr int kStep = kGrouped ? C::kStep : 128;                                // k that shares a scale
    constexpr int kGroups = kStep < kVectorK ? kVectorK / kStep : 1;                // in a vector
    constexpr int kVectorsPerGroup = kStep > kVectorK ? kStep / kVectorK : 1;
    UnitScales<typename C::Scale, 128 / kStep, kGroups> scales[kRowBlocks];
    UnitScales<ZeroByte, 128 / kStep, kGroups> int_zeros[kRowBlocks];
    UnitScales<ScaleF32, 128 / kStep, kGroups> float_zeros[kRowBlocks];
    u32 minus[kRowBlocks][2];  // what conversion adds, for rows g and g + 8
    HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) minus[r][0] = minus[r][1] = Convert::fixed_offset();
    float part[kRowBlocks][kTokenTiles][4];
    float x_sum[kTokenTiles][4];  // of a group, over kFactor: float zero points act on it

    auto multiply_vector = [&](int v) {
        UnitCodes codes[kRowBlocks];
        HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) codes[r].load(smem_unit[r], v);
        if (kGrouped && v % kVectorsPerGroup == 0)
            HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) {
                scales[r].load(smem_unit[r] + C::kCodeBytes, v / kVectorsPerGroup);
                if constexpr (C::kZero == kIntZero) int_zeros[r].load(smem_unit[r] + C::kCodeBytes + C::kScaleBytes, v / kVectorsPerGroup);
                if constexpr (C::kZero == kFloatZero) float_zeros[r].load(smem_unit[r] + C::kCodeBytes + C::kScaleBytes, v / kVectorsPerGroup);
            }
        if (v == kVectors - 1) after_reads();
        HW_UNROLL for (int pair = 0; pair < kVectorSteps / 2; ++pair) {
            u32 b[kTokenTiles][4];
            load_b(b, v * kVectorSteps / 2 + pair);
            HW_UNROLL for (int j = 0; j < 2; ++j) {
                const int step = pair * 2 + j, group = step * 16 / kStep;
                if (kGrouped && v % kVectorsPerGroup == 0 && step * 16 % kStep == 0) {
                    HW_UNROLL for (int n = 0; n < kTokenTiles; ++n)
                        HW_UNROLL for (int e = 0; e < 4; ++e) {
                            HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) part[r][n][e] = 0;
                            x_sum[n][e] = 0;
                        }
                    if constexpr (C::kZero == kIntZero) {
                        HW_UNROLL for (int r = 0; r < kRowBlocks; ++r)
                            HW_UNROLL for (int h = 0; h < 2; ++h) minus[r][h] = Convert::offset((int_zeros[r].get(group, h) + Value::kOffset) & 0xff);
                    }
                }
                HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) {
                    u32 a[4];
                    Convert::step(a, codes[r], step, minus[r]);
                    HW_UNROLL for (int n = 0; n < kTokenTiles; ++n) {
                        const u32 bn[2] = {b[n][2 * j], b[n][2 * j + 1]};
                        C::Operand::template mma<C::kLevel>(kGrouped ? part[r][n] : acc[r][n], a, bn);
                    }
                }
                if constexpr (C::kZero == kFloatZero) {
                    HW_UNROLL for (int n = 0; n < kTokenTiles; ++n) {
                        constexpr u32 kUnit = Bits<typename C::Operand>::kUnit;
                        const u32 ones[4] = {kUnit, kUnit, kUnit, kUnit}, bn[2] = {b[n][2 * j], b[n][2 * j + 1]};
                        C::Operand::template mma<C::kLevel>(x_sum[n], ones, bn);
                    }
                }
                if (kGrouped && v % kVectorsPerGroup == kVectorsPerGroup - 1 && (step * 16 + 16) % smaller(kStep, kVectorK) == 0)
                    HW_UNROLL for (int r = 0; r < kRowBlocks; ++r)
                        HW_UNROLL for (int n = 0; n < kTokenTiles; ++n)
                            HW_UNROLL for (int e = 0; e < 4; ++e) {
                                float sum = part[r][n][e];
                                if constexpr (C::kZero == kFloatZero) sum = fma_f32(-float_zeros[r].get(group, e / 2), x_sum[n][e], sum);
                                acc[r][n][e] = fma_f32(scales[r].get(group, e / 2), sum, acc[r][n][e]);
                            }
            }
        }
    };
    // Unrolled, ptxas hoists the loads of all vectors; with many accumulators, or the scales and float zero points of many groups, that spills.
    if constexpr (kRowBlocks * kTokenTiles < (C::kZero == kFloatZero && kGroups > 1 ? 2 : 8)) {
        HW_UNROLL for (int v = 0; v < kVectors; ++v) multiply_vector(v);
    } else {
        HW_NO_UNROLL for (int v = 0; v < kVectors; ++v) multiply_vector(v);
    }
}
}  // namespace lowbit

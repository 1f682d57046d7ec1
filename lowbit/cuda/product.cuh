// A warp, or a warpgroup, multiplies units (16 rows x 128 k) of packed weights in shared memory with token tiles.
// The inner loops of every family; they must not know where tokens lie (a functor or a descriptor says) or how stages arrive.
#pragma once
#include "dequant.cuh"

namespace lowbit {
// The weights of kRowBlocks units as a warp reads them, vector by vector: codes, and the scales and zero points of their groups.
//
// Group scales act in one of two ways:
// * on fp32 partial sums, acc += scale * part, once per kStep of k. Any scale format, exact products, so that the only error is fp32 accumulation.
// * in the operand (C::kFold), by the FMA of a float's conversion (kMerges) or one more per register. Exact where every product of a value and a scale
//   is an operand (problem.folds): 8-bit scales of narrow floats. A bf16 scale times anything rounds to bf16, 2^-8 of a weight at most: tile_mma at
//   many tokens alone does that (plan.rounds).
template <class C, int kRowBlocks> struct Weights {
    using Value = typename C::Value;
    using Convert = lowbit::Convert<typename C::Operand, Value>;
    using UnitCodes = Codes<Value, C::Operand::kBits>;
    static constexpr int kStepK = 256 / C::Operand::kBits, kSteps = UnitCodes::kSteps, kVectors = UnitCodes::kVectors, kVectorK = kStepK * kSteps;
    static constexpr bool kGrouped = C::kStep != 0, kSums = kGrouped && !C::kFold;
    static constexpr int kStep = kGrouped ? C::kStep : 128;                          // k that shares a scale
    static constexpr int kGroups = kStep < kVectorK ? kVectorK / kStep : 1;          // in a vector
    static constexpr int kVectorsPerGroup = kStep > kVectorK ? kStep / kVectorK : 1;
    UnitCodes codes[kRowBlocks];
    UnitScales<typename C::Scale, 128 / kStep, kGroups> scales[kRowBlocks];
    UnitScales<ZeroByte, 128 / kStep, kGroups> int_zeros[kRowBlocks];
    UnitScales<ScaleF32, 128 / kStep, kGroups> float_zeros[kRowBlocks];
    u32 minus[kRowBlocks][2], factor[kRowBlocks][2];  // what conversion adds and then multiplies with, for rows g and g + 8

    HW_FN Weights() {
        HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) minus[r][0] = minus[r][1] = Convert::fixed_offset();
    }
    HW_FN static constexpr int group(int step) { return step * kStepK / kStep; }  // of the vector
    HW_FN static constexpr bool begins(int v, int step) { return kGrouped && v % kVectorsPerGroup == 0 && step * kStepK % kStep == 0; }
    HW_FN static constexpr bool ends(int v, int step) {
        return kGrouped && v % kVectorsPerGroup == kVectorsPerGroup - 1 && (step * kStepK + kStepK) % smaller(kStep, kVectorK) == 0;
    }
    HW_FN void load(const u32 (&smem_unit)[kRowBlocks], int v) {
        load_operands(smem_unit, v);
        load_sums(smem_unit, v);
    }
    HW_FN void load_operands(const u32 (&smem_unit)[kRowBlocks], int v) {  // what `fragment` needs
        HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) codes[r].load(smem_unit[r], v);
        if (kGrouped && v % kVectorsPerGroup == 0)
            HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) {
                if constexpr (C::kFold) scales[r].load(smem_unit[r] + C::kCodeBytes, v / kVectorsPerGroup);
                if constexpr (C::kZero == kIntZero) int_zeros[r].load(smem_unit[r] + C::kCodeBytes + C::kScaleBytes, v / kVectorsPerGroup);
            }
    }
    HW_FN void load_sums(const u32 (&smem_unit)[kRowBlocks], int v) {  // what `add` needs
        if (kSums && v % kVectorsPerGroup == 0)
            HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) {
                scales[r].load(smem_unit[r] + C::kCodeBytes, v / kVectorsPerGroup);
                if constexpr (C::kZero == kFloatZero) float_zeros[r].load(smem_unit[r] + C::kCodeBytes + C::kScaleBytes, v / kVectorsPerGroup);
            }
    }
    HW_FN void fragment(u32 (&a)[4], int r, int v, int step) {
        if (begins(v, step)) begin_group(r, group(step));
        if constexpr (kMerges<C>) {
            Convert::scaled_step(a, codes[r], step, factor[r]);
        } else {
            Convert::step(a, codes[r], step, minus[r]);
            if constexpr (C::kFold) {
                HW_UNROLL for (int i = 0; i < 4; ++i) a[i] = C::Operand::fma(a[i], factor[r][i & 1], kMinusZero);
            }
        }
    }
    HW_FN void begin_group(int r, int group) {
        if constexpr (C::kZero == kIntZero) {
            HW_UNROLL for (int h = 0; h < 2; ++h) minus[r][h] = Convert::offset((int_zeros[r].get(group, h) + Value::kOffset) & 0xff);
        }
        if constexpr (C::kFold) {
            const u32 pair = scales[r].template pair<typename C::Operand, up()>(group);
            factor[r][0] = prmt(pair, 0, 0x1010);
            factor[r][1] = prmt(pair, 0, 0x3232);
        }
    }
    HW_FN static constexpr int up() {
        if constexpr (kMerges<C>) return Convert::kUp - C::Scale::kTop;
        return 0;
    }
    // The sum of a group, in register e of a tile, to its accumulator.
    HW_FN void add(float& acc, float part, float x_sum, int r, int group, int e) const {
        if constexpr (C::kZero == kFloatZero) part = fma_f32(-float_zeros[r].get(group, e / 2 % 2), x_sum, part);
        acc = fma_f32(scales[r].get(group, e / 2 % 2), part, acc);
    }
};

// mma.sync: acc[r][n] += unit[r] (16 x 128) * tokens n (128 x 8), over the conversion's kFactor. load_b(b, pair): the B registers of
// k = 32 pair .. 32 pair + 31, b[n] = {first step lo, hi, second step lo, hi}. after_reads() is called once the units are in registers:
// their stage may go, while most of the arithmetic is still to come.
template <class C, int kRowBlocks, int kTokenTiles, class LoadB, class AfterReads>
HW_FN void multiply_units(float (&acc)[kRowBlocks][kTokenTiles][4], const u32 (&smem_unit)[kRowBlocks], LoadB load_b, AfterReads after_reads) {
    using W = Weights<C, kRowBlocks>;
    W weights;
    float part[kRowBlocks][kTokenTiles][4];
    float x_sum[kTokenTiles][4];  // of a group, over kFactor: float zero points act on it

    auto multiply_vector = [&](int v) {
        weights.load(smem_unit, v);
        if (v == W::kVectors - 1) after_reads();
        HW_UNROLL for (int pair = 0; pair < W::kSteps / 2; ++pair) {
            u32 b[kTokenTiles][4];
            load_b(b, v * W::kSteps / 2 + pair);
            HW_UNROLL for (int j = 0; j < 2; ++j) {
                const int step = pair * 2 + j;
                if (W::kSums && W::begins(v, step))
                    HW_UNROLL for (int n = 0; n < kTokenTiles; ++n)
                        HW_UNROLL for (int e = 0; e < 4; ++e) {
                            HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) part[r][n][e] = 0;
                            x_sum[n][e] = 0;
                        }
                HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) {
                    u32 a[4];
                    weights.fragment(a, r, v, step);
                    HW_UNROLL for (int n = 0; n < kTokenTiles; ++n) {
                        const u32 bn[2] = {b[n][2 * j], b[n][2 * j + 1]};
                        C::Operand::template mma<C::kLevel>(W::kSums ? part[r][n] : acc[r][n], a, bn);
                    }
                }
                if constexpr (C::kZero == kFloatZero) {
                    HW_UNROLL for (int n = 0; n < kTokenTiles; ++n) {
                        constexpr u32 kUnit = Bits<typename C::Operand>::kUnit;
                        const u32 ones[4] = {kUnit, kUnit, kUnit, kUnit}, bn[2] = {b[n][2 * j], b[n][2 * j + 1]};
                        C::Operand::template mma<C::kLevel>(x_sum[n], ones, bn);
                    }
                }
                if (W::kSums && W::ends(v, step))
                    HW_UNROLL for (int r = 0; r < kRowBlocks; ++r)
                        HW_UNROLL for (int n = 0; n < kTokenTiles; ++n)
                            HW_UNROLL for (int e = 0; e < 4; ++e) weights.add(acc[r][n][e], part[r][n][e], x_sum[n][e], r, W::group(step), e);
            }
        }
    };
    // Unrolled, ptxas hoists the loads of all vectors; with many accumulators, or the scales and float zero points of many groups, that spills.
    if constexpr (kRowBlocks * kTokenTiles < (C::kZero == kFloatZero && W::kGroups > 1 ? 2 : 8)) {
        HW_UNROLL for (int v = 0; v < W::kVectors; ++v) multiply_vector(v);
    } else {
        HW_NO_UNROLL for (int v = 0; v < W::kVectors; ++v) multiply_vector(v);
    }
}

// wgmma, the same for the warps of a warpgroup at once (each with its own 16 rows): tokens come from shared memory and products run beside the
// conversion of the next vector, which is what bounds mma.sync from 8 tokens on. desc: of the unit's tokens; desc_of(step): what to add for a
// step of 16 k. Fragments take turns in two buffers, so one group of products may be under way; none is at the end.
template <class C, int kRowBlocks, int kRegs, class DescOf>
HW_FN void multiply_units_wgmma(Regs<float, kRegs> (&acc)[kRowBlocks], const u32 (&smem_unit)[kRowBlocks], u64 desc, DescOf desc_of) {
    using W = Weights<C, kRowBlocks>;
    static_assert(C::kZero != kFloatZero, "float zero points need sums of x");
    W weights;
    Regs<float, kRegs> part[W::kGroups][kRowBlocks];  // all groups of a vector, so that one wait serves them
    Regs<u32, 4> a[2][W::kSteps];
    HW_UNROLL for (int v = 0; v < W::kVectors; ++v) {
        weights.load(smem_unit, v);
        HW_UNROLL for (int r = 0; r < kRowBlocks; ++r) {
            Regs<u32, 4>(&turn)[W::kSteps] = a[(v * kRowBlocks + r) % 2];
            HW_UNROLL for (int step = 0; step < W::kSteps; ++step) {
                u32 fragment[4];
                weights.fragment(fragment, r, v, step);
                HW_UNROLL for (int i = 0; i < 4; ++i) turn[step][i] = fragment[i];
                wgmma_pin(turn[step]);
            }
            wgmma_fence();
            HW_UNROLL for (int step = 0; step < W::kSteps; ++step)
                C::Operand::wgmma(W::kSums ? part[W::group(step)][r] : acc[r], turn[step], desc + desc_of(v * W::kSteps + step), !(W::kSums && W::begins(v, step)));
            wgmma_commit();
            wgmma_wait<1>();
        }
        const bool sums = W::kSums && W::ends(v, W::kSteps - 1);
        if (sums || v == W::kVectors - 1) wgmma_wait<0>();
        if (sums)
            HW_UNROLL for (int g = 0; g < W::kGroups; ++g)
                HW_UNROLL for (int r = 0; r < kRowBlocks; ++r)
                    HW_UNROLL for (int e = 0; e < kRegs; ++e) weights.add(acc[r][e], part[g][r][e], 0, r, g, e);
    }
}
}  // namespace lowbit

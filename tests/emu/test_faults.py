"""Faults planted into private copies of the kernels, one at a time: each must be reported, with every seed.

A fault that passes here would pass everywhere: mend the emulator or the tests, never the list. What the numbers of sound
kernels are is the matter of test_kernels.py.
"""

# ruff: noqa: E501 - a fault a line, so that the list reads as a table
from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
from test_kernels import DTYPES, Run, telling

import emulator
from lowbit.errors import LaunchError
from lowbit.jit.generate import INCLUDE_DIR, generate
from lowbit.plan.plan import Plan
from lowbit.testing import emulate
from lowbit.testing.cases import SIXTEEN

SEEDS = (1, 2, 5)

# Two tiles of rows with a ragged end, nine blocks of k with a ragged end, two tiles of tokens, rows of x apart.
CLUSTER = Run(
    "sm_90a",
    "int4_g32",
    104,
    1144,
    11,
    "bf16",
    Plan("stream", 8, 2, 2, k_warps=2, split=2, stages=2, x_chunks=2),
    bias=True,
    gap=1,
)
BULK = replace(CLUSTER, plan=Plan("stream", 8, 2, 2, k_warps=1, stages=2, x_chunks=3))
FEW = replace(CLUSTER, plan=Plan("stream", 4, 1, 2, k_warps=2, stages=3), m=5)
ODD = replace(CLUSTER, plan=Plan("stream", 8, 1, 2, stages=2), n=37)
INT8 = replace(CLUSTER, spec="int8")
AMPERE = replace(CLUSTER, chip="sm_80", plan=Plan("stream", 8, 2, 2, k_warps=2, stages=2))
TURING = replace(AMPERE, chip="sm_75", act="fp16")
TILE = replace(AMPERE, plan=Plan("tile_mma", 32, 2, 2, token_warps=2, stages=3), m=35)
TILE_TURING = replace(TILE, chip="sm_75", act="fp16", plan=Plan("tile_mma", 16, 2, 2, token_warps=2, stages=2))
TILE_HOPPER = replace(TILE, chip="sm_90a")
WGMMA = replace(CLUSTER, plan=Plan("stream_wgmma", 8, 1, 4, k_warps=2, stages=2))
TILE_WGMMA = replace(CLUSTER, n=104, m=35, plan=Plan("tile_wgmma", 16, 1, 4, stages=2))
SETTINGS = {
    "wgmma": WGMMA, "wgmma, cluster": replace(WGMMA, plan=Plan("stream_wgmma", 8, 2, 4, split=2, stages=2)), "wgmma, fold": replace(WGMMA, spec="mxfp4", m=35, plan=Plan("stream_wgmma", 32, 1, 4, k_warps=2, stages=3)), "wgmma, merged": replace(WGMMA, spec="nvfp4", m=19, plan=Plan("stream_wgmma", 16, 1, 4, k_warps=2, stages=2)),
    "wgmma, rows past the end": replace(WGMMA, n=40, plan=Plan("stream_wgmma", 8, 1, 8, stages=2)), "wgmma, int8": replace(WGMMA, spec="int8"),
    "slices": replace(CLUSTER, plan=Plan("stream", 8, 2, 2, k_warps=4, split=2, stages=2, slices=2)), "uneven cluster, many sums": replace(INT8, m=25, plan=Plan("stream", 24, 1, 2, split=3, stages=4)), "uneven cluster": replace(CLUSTER, plan=Plan("stream", 8, 1, 3, split=5, stages=2)),
    "tile wgmma": TILE_WGMMA, "tile wgmma, sums": replace(TILE_WGMMA, spec="int4_g64"), "tile wgmma, two panels": replace(TILE_WGMMA, n=168, plan=Plan("tile_wgmma", 8, 2, 8, stages=2)),
    "tile wgmma, folded": replace(TILE_WGMMA, spec="mxfp4", m=70, plan=Plan("tile_wgmma", 32, 1, 4, stages=2)), "tile wgmma, short k": replace(TILE_WGMMA, k=232, m=16), "tile wgmma, cluster": replace(TILE_WGMMA, plan=Plan("tile_wgmma", 8, 1, 4, split=2, stages=4)),
    "cluster": CLUSTER, "bulk": BULK, "few tokens": FEW, "odd rows": ODD, "int8": INT8, "fp16": replace(AMPERE, act="fp16"),
    "cp.async": AMPERE, "registers": TURING, "tile": TILE, "tile, registers": TILE_TURING, "tile, sm_90": TILE_HOPPER,
    "mxfp4": replace(BULK, spec="mxfp4"), "fp8": replace(BULK, spec="fp8_e4m3"), "nvfp4": replace(BULK, spec="nvfp4"), "seven bits": replace(BULK, spec="int7_g32"), "codebook": replace(BULK, spec=f"{SIXTEEN}_g32"),
    "e4m3 scales on sums": replace(BULK, spec="int4_g16_e4m3"), "tile, two panels": replace(TILE, n=296, plan=Plan("tile_mma", 16, 2, 8, stages=2)),
    "zero points": replace(BULK, spec="int4z_g32"), "float zero points": replace(BULK, spec="uint4zf_g32"),
    "e8m0, two words": replace(BULK, spec="fp4_e2m1_g16_e8m0"), "registers, one stage": replace(TURING, plan=Plan("stream", 8, 2, 2, stages=1)),
    "fp32 outputs": replace(TILE, out="fp32"), "odd rows, fp32": replace(ODD, out="fp32"),
}  # fmt: skip

UNWAITED = "target of an asynchronous copy that has not been waited for"
RACE = "race: "
UNWRITTEN = "which was never written"
UNORDERED = f"{RACE}|{UNWAITED}|{UNWRITTEN}"  # the order of the run decides which of them is met first
NUMBERS = "wrong numbers"
EXIT = "cluster CTA . exits, and|cluster CTA . has already exited"


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in one header; the outcome of every seed must match the pattern `want`."""

    risk: str
    where: str  # of SETTINGS
    file: str
    old: str
    new: str
    want: str


FAULTS = [
    # ---- the ring of a warp
    Fault("stage not waited for", "bulk", "ring.cuh", "mbar_wait(bars + 8 * slot, phase);", ";", UNORDERED),
    Fault("phase never flips", "bulk", "ring.cuh", "phase ^= 1;", "phase ^= 0;", f"{UNWAITED}|deadlock"),
    Fault("phase flips every stage", "bulk", "ring.cuh", "{ slot = 0; phase ^= 1; }", "slot = 0; phase ^= 1;", f"{UNWAITED}|deadlock"),
    Fault("missing proxy fence at release", "bulk", "ring.cuh", "if constexpr (C::kMover == kBulk) fence_async();", "", "executed no fence.proxy.async between its read and the barrier"),
    Fault("missing proxy fence at release, cluster", "cluster", "ring.cuh", "if constexpr (C::kMover == kBulk) fence_async();", "", "executed no fence.proxy.async between its read and the barrier"),
    Fault("proxy fence after the warp's barrier", "bulk", "ring.cuh", "if constexpr (C::kMover == kBulk) fence_async();\n        syncwarp();", "syncwarp();\n        fence_async();", "executed no fence.proxy.async between its read and the barrier"),
    Fault("released without the warp's barrier", "bulk", "ring.cuh", "        syncwarp();\n        issue(slot);", "        issue(slot);", "may still be reading|" + UNWAITED),
    Fault("released without the warp's barrier, cp.async", "cp.async", "ring.cuh", "        syncwarp();\n        issue(slot);", "        issue(slot);", "may still be reading|" + UNWAITED),
    Fault("released before the reads", "bulk", "product.cuh", "if (v == W::kVectors - 1) after_reads();", "if (v == 0) after_reads();", UNORDERED),
    Fault("released before the reads, cp.async", "cp.async", "product.cuh", "if (v == W::kVectors - 1) after_reads();", "if (v == 0) after_reads();", UNWAITED),
    Fault("released before the reads, registers", "registers", "product.cuh", "if (v == W::kVectors - 1) after_reads();", "if (v == 0) after_reads();", f"{RACE}|{NUMBERS}"),
    Fault("no fence after the ring's barriers are made", "bulk", "ring.cuh", "            fence_mbar_init();\n", "", "no fence.mbarrier_init"),
    Fault("ring barrier expects an arrival nobody makes", "bulk", "ring.cuh", "mbar_init(bars + 8 * s, 1);", "mbar_init(bars + 8 * s, 2);", "deadlock"),
    Fault("stage expects 16 bytes more", "bulk", "ring.cuh", "mbar_arrive_expect_tx(bars + 8 * s, bytes);", "mbar_arrive_expect_tx(bars + 8 * s, bytes + 16);", "deadlock"),
    Fault("stage expects 16 bytes less", "bulk", "ring.cuh", "mbar_arrive_expect_tx(bars + 8 * s, bytes);", "mbar_arrive_expect_tx(bars + 8 * s, bytes - 16);", "deadlock"),
    Fault("cp.async wait one group short", "cp.async", "ring.cuh", "cp_async_wait<C::kStages - 1>();", "cp_async_wait<C::kStages>();", UNWAITED),
    Fault("no commit for an empty stage", "cp.async", "ring.cuh", "            copy_commit<C>();\n        }\n        if (more)", "            if (more) copy_commit<C>();\n        }\n        if (more)", UNWAITED),
    Fault("stage copied by other lanes, no barrier", "cp.async", "ring.cuh", "if constexpr (C::kMover != kBulk) syncwarp();", "", UNORDERED),
    Fault("stage stored by other lanes, no barrier", "registers, one stage", "ring.cuh", "if constexpr (C::kMover != kBulk) syncwarp();", "", UNORDERED),
    Fault("one stage too many issued", "bulk", "ring.cuh", "to_issue = count;", "to_issue = count + 1;", "out of bounds|deadlock|exits|target of an asynchronous copy"),
    Fault("one stage too few issued", "bulk", "ring.cuh", "to_issue = count;", "to_issue = count - (count > 2);", "deadlock"),
    Fault("source does not advance", "bulk", "ring.cuh", "next += stride;", "next += 0;", NUMBERS),
    # ---- stream: weights
    Fault("ragged tile copies whole stages", "bulk", "stream.cuh", "num_blocks * C::kUnitBytes, stages", "C::kWarpBlocks * C::kUnitBytes, stages", f"out of bounds|{NUMBERS}"),
    Fault("short panel taken for a whole one", "cluster", "stream.cuh", "panel_blocks = smaller<u32>(8, kRowBlocks - panel * 8)", "panel_blocks = 8", f"out of bounds|{NUMBERS}"),
    Fault("row block past the end read", "bulk", "stream.cuh", "smaller(r, num_blocks - 1)", "r", UNWRITTEN),
    Fault("last k block of an uneven cut dropped", "cluster", "stream.cuh", "return i * kKBlocks / (C::kSplit * C::kSlices);", "return i * (kKBlocks / (C::kSplit * C::kSlices));", NUMBERS),
    Fault("k warp starts one block late", "cluster", "stream.cuh", "const u32 block = first_k - k_begin + i * kStride;", "const u32 block = (first_k - k_begin ^ 1) + i * kStride;", f"{NUMBERS}|{UNWRITTEN}|out of bounds|{UNWAITED}|deadlock"),
    # ---- stream: x
    Fault("x read before griddepcontrol.wait", "bulk", "stream.cuh", "            griddep_wait();\n", "", "no griddepcontrol.wait lies before"),
    Fault("x read before griddepcontrol.wait, small copies", "few tokens", "stream.cuh", "            griddep_wait();\n", "", "no griddepcontrol.wait lies before"),
    Fault("no barrier after x barriers are made", "bulk", "stream.cuh", "            syncthreads();  // barriers and zeros are visible to all; still before the wait, so off the critical path\n", "", f"initialisation|no mbarrier was initialised|{UNWRITTEN}|{RACE}"),
    Fault("no fence after x barriers are made", "bulk", "stream.cuh", "            fence_mbar_init();\n", "", "no fence.mbarrier_init"),
    Fault("x chunk waited for one late", "bulk", "stream.cuh", "seen <= block / kChunkBlocks", "seen < block / kChunkBlocks", UNORDERED),
    Fault("x chunk expects the bytes of one token", "bulk", "stream.cuh", "(end - begin) * tokens", "(end - begin)", UNWAITED),
    Fault("every warp copies every x chunk", "bulk", "stream.cuh", "for (u32 c = warp; c < C::kXChunks; c += kWarps)", "for (u32 c = 0; c < C::kXChunks; ++c)", "more than its 1 arrivals|target of an asynchronous copy"),
    Fault("small copies of x not waited for", "few tokens", "stream.cuh", "                cp_async_wait<0>();\n", "", UNWAITED),
    Fault("small copies of x not shared", "few tokens", "stream.cuh", "                cp_async_wait<0>();\n                syncthreads();", "                cp_async_wait<0>();", UNORDERED),
    Fault("x not waited for before the ring's stages", "cp.async", "stream.cuh", "cp_async_wait<C::kStages>();  // x", "cp_async_wait<C::kStages + 1>();  // x", UNORDERED),
    Fault("x stored by other threads, no barrier", "registers", "stream.cuh", "            syncthreads();\n        }\n\n", "        }\n\n", UNORDERED),
    Fault("k tail of x not zeroed", "bulk", "stream.cuh", "if constexpr (C::kK % 128 != 0) {", "if constexpr (false) {", UNWRITTEN),
    Fault("k tail of x zeroed for one token only", "bulk", "stream.cuh", "i < tokens * vectors; i += kThreads)\n                st_shared", "i < vectors; i += kThreads)\n                st_shared", UNWRITTEN),
    Fault("x read past the end of a row", "bulk", "stream.cuh", "smaller<u32>(k_end * 128, C::kK) * 2", "k_end * 256", f"out of bounds|{NUMBERS}"),
    Fault("tokens past the end read", "bulk", "stream.cuh", "smaller(n * 8 + lane % 8, tokens - 1)", "(n * 8 + lane % 8)", UNWRITTEN),
    Fault("pitch of x ignored", "bulk", "stream.cuh", "* p.x_pitch", "* (C::kK * 2)", NUMBERS),
    Fault("second token tile reads the first one's x", "bulk", "stream.cuh", "p.x + (token0 + token)", "p.x + (token)", NUMBERS),
    # ---- stream: sums
    Fault("no barrier before the sum", "cp.async", "reduce.cuh", "else syncthreads();\n        for (u32 id", "\n        for (u32 id", UNORDERED),
    Fault("no cluster barrier before the sum", "cluster", "reduce.cuh", "{ cluster_arrive(); cluster_wait(); } else", "syncthreads(); else", UNORDERED),
    Fault("cluster arrival without a wait before the sum", "cluster", "reduce.cuh", "{ cluster_arrive(); cluster_wait(); } else", "cluster_arrive(); else", f"{RACE}|{UNWRITTEN}|{UNWAITED}|twice without a wait"),
    Fault("relaxed arrival before the sum", "cluster", "reduce.cuh", "{ cluster_arrive(); cluster_wait(); } else", "{ cluster_arrive_relaxed(); cluster_wait(); } else", RACE),
    Fault("no cluster barrier before the exit", "cluster", "reduce.cuh", "if constexpr (C::kSplit > 1) { cluster_arrive_relaxed(); cluster_wait(); }", "", EXIT),
    Fault("cluster barrier before the exit not waited for", "cluster", "reduce.cuh", "{ cluster_arrive_relaxed(); cluster_wait(); }", "cluster_arrive_relaxed();", EXIT),
    Fault("partial sums of two warps overlap", "cluster", "stream.cuh", "store_partials(smem + warp * kWarpRing,", "store_partials(smem + warp / 2 * 2 * kWarpRing,", UNORDERED),
    Fault("partial sums of the wrong k warp", "cluster", "stream.cuh", "(k * C::kRowWarps + r) * kWarpRing", "(k + r) * kWarpRing", f"{NUMBERS}|{UNWRITTEN}"),
    Fault("sums of the own block only", "cluster", "reduce.cuh", "mapa(at, s)", "mapa(at, rank)", NUMBERS),
    Fault("all blocks of a cluster finish the same rows", "cluster", "reduce.cuh", "row = (rank * kQuads + id % kQuads) * 4", "row = (id % kQuads) * 4", "a second time"),
    Fault("a slice of k warps begins too late", "slices", "stream.cuh", "first_k(slice_begin(rank * C::kSlices + k_warp / kStride)", "first_k(slice_begin(rank * C::kSlices + k_warp / kStride) + 1", f"{NUMBERS}|deadlock"),
    Fault("slices overlap", "slices", "stream.cuh", "k_warp / kStride + 1)),", "k_warp / kStride + 1) + 1),", f"{NUMBERS}|{UNWRITTEN}|out of bounds"),
    Fault("slices of a cluster's blocks mixed up", "slices", "stream.cuh", "first_k(slice_begin(rank * C::kSlices", "first_k(slice_begin((1 - rank) * C::kSlices", f"{NUMBERS}|{UNWRITTEN}|out of bounds|deadlock|no mbarrier"),
    Fault("rows of the next tile stored by an uneven cluster", "uneven cluster", "reduce.cuh", " || (kTileQuads % C::kSplit && row >= kTileRows)", "", f"{UNWRITTEN}|a second time|out of bounds|{NUMBERS}|{RACE}"),
    Fault("scale and bias of a thread's first rows for all", "uneven cluster, many sums", "reduce.cuh", "kThreads % kQuads == 0 || id < kThreads ? first : load_affine<C>(p, out)", "first", NUMBERS),
    Fault("rows past the end stored", "bulk", "reduce.cuh", "out >= C::kN || ", "", f"{UNWRITTEN}|a second time|out of bounds"),
    Fault("all token tiles store to the first", "bulk", "reduce.cuh", "store_quad<C>(p, token0 + token,", "store_quad<C>(p, token,", "a second time"),
    # ---- conversion and scales
    Fault("registers of a fragment swapped", "bulk", "dequant.cuh", "a[i] = Operand::fma(codes.at(s, i, to)", "a[i ^ 2] = Operand::fma(codes.at(s, i, to)", NUMBERS),
    Fault("low and high nibble swapped", "fp16", "dequant.cuh", "codes.at(s, i, to), B::power(B::kBias - to)", "codes.at(s, i & 2, to), B::power(B::kBias - to)", NUMBERS),
    Fault("offset of int8 halved", "int8", "dequant.cuh", "for (int o = Value::kOffset; o;", "for (int o = Value::kOffset / 2; o;", NUMBERS),
    Fault("bytes of int8 in the wrong order", "int8", "dequant.cuh", "r / kFields * kPart + field * kBits + c", "r / kFields * 16 + (field ^ 1) * kBits + c", NUMBERS),
    Fault("sign of e2m1 lost", "mxfp4", "dequant.cuh", "c == C::kBits - 1 ? 15 : B::kFraction", "B::kFraction", NUMBERS),
    Fault("sign of e4m3 lost", "fp8", "dequant.cuh", "c == C::kBits - 1 ? 15 : B::kFraction", "B::kFraction", NUMBERS),
    Fault("scales of rows g and g + 8 swapped", "bulk", "dequant.cuh", "Scale::value(w, 2 * group + half)", "Scale::value(w, 2 * group + (half ^ 1))", NUMBERS),
    Fault("low and high bytes of a codebook swapped", "codebook", "dequant.cuh", "low = look_up<0>(sel, top), high = look_up<8>(sel, top)", "high = look_up<0>(sel, top), low = look_up<8>(sel, top)", NUMBERS),
    Fault("top bit of a codebook's code ignored", "codebook", "dequant.cuh", "return (prmt(k8, k12, sel) & top) | (r & ~top);", "return r;", NUMBERS),
    Fault("top bits of another pair of registers", "codebook", "dequant.cuh", "pair ? 0xfbd9 : 0xeac8", "0xeac8", NUMBERS),
    Fault("magnitude of e4m3 closed over the sign", "fp8", "dequant.cuh", "c >= 4 ? 8 : 0", "c >= 4 ? 7 : 0", NUMBERS),
    Fault("sign of e2m1 taken from another register", "mxfp4", "dequant.cuh", "0xa9bf", "0xa9fb", NUMBERS),
    Fault("all pieces of a code but the first lost", "seven bits", "dequant.cuh", "if (j < p.count[r]) v |=", "if (j < 1) v |=", NUMBERS),
    Fault("upper field read from the gap", "seven bits", "dequant.cuh", "field * kBits >= kMiddle", "field * kBits > kMiddle", NUMBERS),
    Fault("rest of an odd register taken for its highest bits", "seven bits", "dequant.cuh", "(c + i % 2 * kMain) % kBits", "c", NUMBERS),
    Fault("rests of two registers from the same bits", "seven bits", "dequant.cuh", "kLeft * kMain + i * (kBits - kMain)", "kLeft * kMain", NUMBERS),
    Fault("run of two words read from that of four", "seven bits", "dequant.cuh", "at + 128 * kFours + lane * 8", "at + lane * 8", NUMBERS),
    Fault("single word of another lane", "seven bits", "dequant.cuh", "128 * (kWords - 1) + lane * 4", "128 * (kWords - 1) + (lane ^ 1) * 4", NUMBERS),
    Fault("codes of the first half of a unit for both", "seven bits", "dequant.cuh", "smem_unit + v * (128 * kWords)", "smem_unit", NUMBERS),
    Fault("zero points ignored", "zero points", "product.cuh", "if constexpr (C::kZero == kIntZero) {\n            HW_UNROLL for (int h", "if constexpr (false) {\n            HW_UNROLL for (int h", NUMBERS),
    Fault("zero points of rows g and g + 8 swapped", "zero points", "product.cuh", "int_zeros[r].get(group, h)", "int_zeros[r].get(group, h ^ 1)", NUMBERS),
    Fault("zero points read from the scales", "zero points", "product.cuh", "int_zeros[r].load(smem_unit[r] + C::kCodeBytes + C::kScaleBytes", "int_zeros[r].load(smem_unit[r] + C::kCodeBytes", NUMBERS),
    Fault("stored offset left out of zero points", "zero points", "product.cuh", "+ Value::kOffset) & 0xff", ") & 0xff", NUMBERS),
    Fault("float zero points ignored", "float zero points", "product.cuh", "part = fma_f32(-float_zeros[r].get(group, e / 2 % 2), x_sum, part)", "", NUMBERS),
    Fault("sum of x not started anew", "float zero points", "product.cuh", "x_sum[n][e] = 0;", "if (v + step == 0) x_sum[n][e] = 0;", NUMBERS),
    Fault("sum of x without the factor of the products", "float zero points", "dequant.cuh", "kUnit = both(0x3c80)", "kUnit = both(0x3f80)", NUMBERS),
    Fault("scale of the first group for all", "bulk", "dequant.cuh", "Scale::value(w, 2 * group + half)", "Scale::value(w, half)", NUMBERS),
    Fault("scales of another row", "bulk", "dequant.cuh", "smem_scales + lane_id() / 4 *", "smem_scales + lane_id() % 8 *", NUMBERS),
    Fault("only the first word of e8m0 scales read", "e8m0, two words", "dequant.cuh", "as_f32((w[i / 4] >> 8 * (i & 3) & 0xff) << 23)", "as_f32((w[0] >> 8 * (i & 3) & 0xff) << 23)", NUMBERS),
    Fault("only the first word of e4m3 scales read", "e4m3 scales on sums", "dequant.cuh", "const u32 code = w[i / 4] << (31", "const u32 code = w[0] << (31", NUMBERS),
    Fault("exponent offset of the conversion left in", "bulk", "epilogue.cuh", "mul_f32(sum[i], kFactor)", "sum[i]", NUMBERS),
    Fault("exponent offset of the conversion left in, channel scales", "int8", "epilogue.cuh", "mul_f32(sum[i], kFactor)", "sum[i]", NUMBERS),
    Fault("partial sums of a group not started anew", "bulk", "product.cuh", "part[r][n][e] = 0;", "if (v + step == 0) part[r][n][e] = 0;", NUMBERS),
    Fault("second half of a pair multiplied with the first's tokens", "bulk", "product.cuh", "const u32 bn[2] = {b[n][2 * j], b[n][2 * j + 1]}", "const u32 bn[2] = {b[n][0], b[n][1]}", NUMBERS),
    # ---- epilogue
    Fault("rows past an odd end stored", "odd rows", "epilogue.cuh", "if (row + i < C::kN) store_value", "store_value", "a second time|out of bounds"),
    Fault("bias read past an odd end", "odd rows", "epilogue.cuh", "        if (row + i < C::kN) v[i]", "        v[i]", "out of bounds"),
    Fault("bias forgotten", "bulk", "epilogue.cuh", "load_rows<C>(p.bias, row, {0, 0, 0, 0})", "U4{0, 0, 0, 0}", NUMBERS),
    Fault("bias multiplied with the channel scale", "int8", "epilogue.cuh", "fma_f32(mul_f32(sum[i], kFactor), factor, as_f32(bias[i]))", "mul_f32(add_f32(mul_f32(sum[i], kFactor), as_f32(bias[i])), as_f32(scale[i]))", NUMBERS),
    Fault("sums of rows g + 8 stored to rows g", "bulk", "epilogue.cuh", "(r * 16 + g + e / 2 * 8) * 4", "(r * 16 + g) * 4", f"{UNWRITTEN}|{NUMBERS}|{UNWAITED}"),
    Fault("two outputs swapped", "bulk", "epilogue.cuh", "Out::pack(v[0], v[1])", "Out::pack(v[1], v[0])", NUMBERS),
    Fault("two outputs swapped, fp32", "fp32 outputs", "epilogue.cuh", "{as_u32(v[0]), as_u32(v[1])", "{as_u32(v[1]), as_u32(v[0])", NUMBERS),
    Fault("fp32 outputs two bytes apart", "fp32 outputs", "epilogue.cuh", "(token * C::kN + row) * C::Out::kBytes", "(token * C::kN + row) * 2", "a second time|byte aligned|never written"),
    Fault("fp32 outputs past an odd end two bytes apart", "odd rows, fp32", "epilogue.cuh", "y + i * C::Out::kBytes", "y + i * 2", "a second time|byte aligned|never written"),
    # ---- tile_wgmma
    Fault("producer: stage not waited for", "tile wgmma", "tile_wgmma.cuh", "            mbar_wait(full(slot), phase);\n", "", UNORDERED),
    Fault("producer: full phase never flips", "tile wgmma", "tile_wgmma.cuh", "if (++slot == C::kStages) { slot = 0; phase ^= 1; }\n                        const", "if (++slot == C::kStages) slot = 0;\n                        const", f"{UNORDERED}|deadlock"),
    Fault("producer: refill not waited for", "tile wgmma", "tile_wgmma.cuh", "if (count >= C::kStages) mbar_wait(empty(slot), phase);", "", f"{UNORDERED}|may still be reading|wgmma"),
    Fault("producer: empty phase off by one", "tile wgmma", "tile_wgmma.cuh", "u32 slot = 0, phase = 1, count = 0;", "u32 slot = 0, phase = 0, count = 0;", f"more than its 1 arrivals|deadlock|{UNORDERED}|may still be reading"),
    Fault("producer: released before its products are done", "tile wgmma", "tile_wgmma.cuh", "if (group == 0 && i > 0) release(before);", "if (group == 0) release(here);", f"{UNORDERED}|may still be reading|a wgmma|second time|deadlock"),
    Fault("producer: last stage of a tile never released", "tile wgmma", "tile_wgmma.cuh", "            release(before);\n            store_sums", "            store_sums", "deadlock"),
    Fault("producer: one warp does not release", "tile wgmma", "tile_wgmma.cuh", "if (lane_id() == 0) mbar_arrive(empty(slot));", "if (lane_id() == 0 && warp != 1) mbar_arrive(empty(slot));", "deadlock"),
    Fault("producer: released by a lane ahead of its warp", "tile wgmma", "tile_wgmma.cuh", "        syncwarp();\n        if (lane_id() == 0) mbar_arrive", "        if (lane_id() == 0) mbar_arrive", "may still be reading|" + RACE),
    Fault("producer: barriers used before they are seen", "tile wgmma", "tile_wgmma.cuh", "        syncthreads();\n        if (warp >=", "        if (warp >=", f"no mbarrier|{RACE}"),
    Fault("producer: no fence after the barriers are made", "tile wgmma", "tile_wgmma.cuh", "            fence_mbar_init();\n", "", "no fence.mbarrier_init"),
    Fault("producer: x read before griddepcontrol.wait", "tile wgmma", "tile_wgmma.cuh", "        griddep_wait();\n        griddep_launch();", "        griddep_launch();", "no griddepcontrol.wait"),
    Fault("producer: y written before griddepcontrol.wait", "tile wgmma, short k", "tile_wgmma.cuh", "            griddep_wait();  // y may", "            // y may", "no griddepcontrol.wait"),
    Fault("producer: x not expected", "tile wgmma", "tile_wgmma.cuh", "t.num_blocks * C::kUnitBytes + kXStage);", "t.num_blocks * C::kUnitBytes);", f"{UNORDERED}|deadlock|more bytes"),
    Fault("producer: second half of x forgotten", "tile wgmma", "tile_wgmma.cuh", "for (u32 box = 0; box < kXBoxes; ++box)", "for (u32 box = 0; box < 1; ++box)", "deadlock"),
    Fault("producer: second panel forgotten", "tile wgmma, two panels", "tile_wgmma.cuh", "for (u32 j = 1; j < kPanels; ++j)", "for (u32 j = 1; j < 1; ++j)", "deadlock"),
    Fault("producer: second panel at the first one's stride", "tile wgmma, two panels", "tile_wgmma.cuh", "static_cast<u64>(k) * blocks) * C::kUnitBytes", "static_cast<u64>(k) * 8) * C::kUnitBytes", f"out of bounds|{NUMBERS}"),
    Fault("producer: tokens of the first tile for all", "tile wgmma", "tile_wgmma.cuh", "static_cast<int>(t.token0)", "0", NUMBERS),
    Fault("producer: early stages asked for twice", "tile wgmma", "tile_wgmma.cuh", "if (count >= early) load_units", "if (count >= 1) load_units", f"more than its 1 arrivals|deadlock|{UNORDERED}|more bytes|second"),
    Fault("producer: k of a cluster's first block for all", "tile wgmma, cluster", "tile_wgmma.cuh", "for (u32 k = k_begin; k < k_begin + k_stages; ++k, ++count)", "for (u32 k = 0; k < k_stages; ++k, ++count)", NUMBERS),
    Fault("tile wgmma: steps of another half", "tile wgmma", "tile_wgmma.cuh", "k_step / 4 * kXBytes", "k_step / 4 * 0", NUMBERS),
    Fault("tile wgmma: descriptor of the stage before", "tile wgmma", "tile_wgmma.cuh", "(smem + here * kXStage) >> 4", "(smem + slot % 1 * kXStage) >> 4", f"{NUMBERS}|{UNORDERED}"),
    Fault("tile wgmma: row block past the end read", "tile wgmma", "tile_wgmma.cuh", "smaller(warp * C::kWarpBlocks + r, last)", "(warp * C::kWarpBlocks + r)", f"{UNWRITTEN}|{UNORDERED}"),
    Fault("tile wgmma: products not waited for before they are stored", "tile wgmma, folded", "tile_wgmma.cuh", "            wgmma_wait<0>();\n            release(before);", "            release(before);", "in flight"),
    Fault("tile wgmma: fragments overwritten under way", "tile wgmma, folded", "tile_wgmma.cuh", "                    wgmma_wait<1>();\n", "", "in flight"),
    Fault("tile wgmma: no fence", "tile wgmma", "tile_wgmma.cuh", "                    wgmma_fence();\n", "", "wgmma.fence"),
    Fault("tile wgmma: sums of groups added early", "tile wgmma, sums", "tile_wgmma.cuh", "                            wgmma_wait<0>();\n", "", "in flight"),
    Fault("tile wgmma: scales of the next group", "tile wgmma, sums", "tile_wgmma.cuh", "load_sums(weights, unit, (group + 1) % kGroups);", "", f"{NUMBERS}|never written"),
    Fault("tile wgmma: chunk overwritten while read", "tile wgmma", "tile_wgmma.cuh", "            syncwarp();  // the chunk before has been read\n", "", RACE),
    Fault("tile wgmma: chunk read before it is there", "tile wgmma", "tile_wgmma.cuh", "some, tokens - n * 8);\n            syncwarp();", "some, tokens - n * 8);", f"{RACE}|{UNWRITTEN}"),
    Fault("tile wgmma: rows past the end stored", "tile wgmma", "tile_wgmma.cuh", " || row0 + quad >= C::kN", "", f"a second time|out of bounds|{UNWRITTEN}"),
    Fault("tile wgmma: tokens past the end stored", "tile wgmma", "tile_wgmma.cuh", "n * 8 + token >= tokens || ", "", f"a second time|out of bounds|{UNWRITTEN}"),
    Fault("tile wgmma: partial sums over a ring still read", "tile wgmma, cluster", "tile_wgmma.cuh", "        bar_sync(1, kConsumers);  // all warps have read the ring\n", "", f"{RACE}|may still|wgmma"),
    # ---- stream_wgmma
    Fault("wgmma: stage not waited for", "wgmma", "stream_wgmma.cuh", "            mbar_wait(bars + 8 * slot, phase);\n", "", UNORDERED),
    Fault("wgmma: phase never flips", "wgmma", "stream_wgmma.cuh", "phase ^= 1;", "phase ^= 0;", f"{UNWAITED}|deadlock"),
    Fault("wgmma: stage refilled while warps read", "wgmma", "stream_wgmma.cuh", "            bar_sync(1 + warpgroup, 128);  // all four", "            // all four", f"executed no fence.proxy.async|may still be reading|{UNWAITED}|{RACE}"),
    Fault("wgmma: barriers used before they are seen", "wgmma", "stream_wgmma.cuh", "        bar_sync(1 + warpgroup, 128);  // barriers", "        // barriers", "initialisation|no mbarrier was initialised"),
    Fault("wgmma: no fence after the barriers are made", "wgmma", "stream_wgmma.cuh", "            fence_mbar_init();\n", "", "no fence.mbarrier_init"),
    Fault("wgmma: x read before griddepcontrol.wait", "wgmma", "stream_wgmma.cuh", "        griddep_wait();\n", "", "no griddepcontrol.wait lies before"),
    Fault("wgmma: x not expected", "wgmma", "stream_wgmma.cuh", "mbar_arrive_expect_tx(bars + 8 * slot, bytes + kXStage);", "mbar_arrive_expect_tx(bars + 8 * slot, bytes);", f"{UNWAITED}|transaction|deadlock|more than"),
    Fault("wgmma: second half of x forgotten", "wgmma", "stream_wgmma.cuh", "for (u32 half = 0; half < 2; ++half) tma", "for (u32 half = 0; half < 1; ++half) tma", "deadlock"),
    Fault("wgmma: tokens of the first block for all", "wgmma", "stream_wgmma.cuh", "static_cast<int>(token0)", "0", NUMBERS),
    Fault("wgmma: steps of another half", "wgmma", "stream_wgmma.cuh", "step / 4 * kXHalf", "step / 4 * 0", NUMBERS),
    Fault("wgmma: descriptor of another swizzle", "wgmma", "stream_wgmma.cuh", "1ull << 62", "2ull << 62", NUMBERS),
    Fault("wgmma: row block past the end read", "wgmma", "stream_wgmma.cuh", "smaller(warp % 4 * C::kWarpBlocks + r, num_blocks - 1)", "(warp % 4 * C::kWarpBlocks + r)", UNWRITTEN),
    Fault("wgmma: warpgroup past the end not sent back", "wgmma, rows past the end", "stream_wgmma.cuh", "smaller(tile * kTileBlocks + warpgroup % kRowWarpgroups * kWarpgroupBlocks, (kRowBlocks - 1) / kWarpgroupBlocks * kWarpgroupBlocks)", "tile * kTileBlocks + warpgroup % kRowWarpgroups * kWarpgroupBlocks", "out of bounds|deadlock|multiple of 16"),
    Fault("wgmma: k block of another warpgroup", "wgmma", "stream_wgmma.cuh", "block = k_begin + k_warp + i * C::kKWarps;", "block = k_begin + (k_warp ^ 1) + i * C::kKWarps;", f"{NUMBERS}|out of bounds"),
    Fault("wgmma: sums of one warpgroup for all", "wgmma", "stream_wgmma.cuh", "(k * kRowWarpgroups + r / 4) * kRing", "(0 * k + r / 4) * kRing", NUMBERS),
    Fault("wgmma: sums of a cluster's other slice dropped", "wgmma, cluster", "reduce.cuh", "ld_cluster_v4(mapa(at, s))", "ld_cluster_v4(mapa(at, rank))", NUMBERS),
    Fault("wgmma: no wgmma.fence", "wgmma", "product.cuh", "            wgmma_fence();\n", "", "wgmma.fence"),
    Fault("wgmma: fragments overwritten in flight", "wgmma, int8", "product.cuh", "            wgmma_wait<1>();\n", "", "in flight is accessed"),
    Fault("wgmma: sums read in flight", "wgmma", "product.cuh", "if (sums || v == W::kVectors - 1) wgmma_wait<0>();", "if (v == W::kVectors - 1) wgmma_wait<0>();", "in flight is accessed"),
    Fault("wgmma: stage left with products in flight", "wgmma, int8", "product.cuh", "if (sums || v == W::kVectors - 1) wgmma_wait<0>();", "if (sums) wgmma_wait<0>();", f"race|in flight|{UNWAITED}|never waited for"),
    Fault("wgmma: sums of a group not started anew", "wgmma", "product.cuh", "!(W::kSums && W::begins(v, step))", "true", NUMBERS),
    Fault("wgmma: all groups of a vector in one sum", "wgmma", "product.cuh", "part[W::group(step)][r] : acc[r]", "part[0][r] : acc[r]", f"{NUMBERS}|flight"),
    Fault("folded scales of rows g and g + 8 swapped", "wgmma, fold", "product.cuh", "factor[r][i & 1], kMinusZero", "factor[r][i / 2], kMinusZero", NUMBERS),
    Fault("merged scales of rows g and g + 8 swapped", "wgmma, merged", "dequant.cuh", "factor[i & 1], kMinusZero", "factor[i / 2], kMinusZero", NUMBERS),
    Fault("merged scales: a byte of another row", "nvfp4", "dequant.cuh", "group & 1 ? 0x3424 : 0x1404", "group & 1 ? 0x2424 : 0x1404", NUMBERS),
    Fault("merged scales of another word", "nvfp4", "dequant.cuh", "prmt(w[group / 2], 0, high", "prmt(w[0], 0, high", NUMBERS),
    Fault("merged scales: sign of the scale lost", "nvfp4", "dequant.cuh", "kSigned ? (shift(codes, 7 - kWidth) & 0x80008000) | magnitude : magnitude", "magnitude", NUMBERS),
    Fault("merged scales: what stays out not taken back", "nvfp4", "dequant.cuh", "if constexpr (kMerges<C>) return power_of_two(C::Scale::kTop);", "if constexpr (kMerges<C>) return 1.0f;", NUMBERS),
    Fault("folded e8m0 scales of another row", "wgmma, fold", "dequant.cuh", "group & 1 ? 0x4342 : 0x4140", "group & 1 ? 0x4242 : 0x4140", NUMBERS),
    Fault("folded scales of the first group for all", "wgmma, fold", "product.cuh", "pair<typename C::Operand, up()>(group)", "pair<typename C::Operand, up()>(0)", NUMBERS),
    # ---- tile_mma
    Fault("tile: first stage not waited for", "tile", "tile_mma.cuh", "cp_async_wait<C::kStages - 2>();\n        syncthreads();\n        enter", "cp_async_wait<C::kStages - 1>();\n        syncthreads();\n        enter", UNWAITED),
    Fault("tile: cp.async wait one group short", "tile", "tile_mma.cuh", "cp_async_wait<C::kStages - 2>();\n                    syncthreads", "cp_async_wait<C::kStages - 1>();\n                    syncthreads", UNWAITED),
    Fault("tile: no barrier before the first stage", "tile", "tile_mma.cuh", "        syncthreads();\n        enter", "        enter", UNORDERED),
    Fault("tile: no barrier per stage", "tile", "tile_mma.cuh", "                    syncthreads();  // the next", "                    // the next", UNORDERED),
    Fault("tile: no barrier per stage, registers", "tile, registers", "tile_mma.cuh", "                    syncthreads();  // the next", "                    // the next", UNORDERED),
    Fault("tile: copies of a step lost", "tile", "tile_mma.cuh", "load_x(later, fill, step, kCopySteps);", "load_x(later, fill, step + 1, kCopySteps);", f"{UNWRITTEN}|{NUMBERS}"),
    Fault("tile: ring refilled one stage early", "tile", "tile_mma.cuh", "fill = C::kStages - 1;", "fill = 0;", "reading|asynchronous copy|never written|wrong numbers|race"),
    Fault("tile: another block's stage copied", "tile", "tile_mma.cuh", "later = block + C::kStages - 1,", "later = block + C::kStages - 2,", NUMBERS),
    Fault("tile: stage after the last entered", "tile", "tile_mma.cuh", "block + 1 < kKBlocks ? smem + next * kStageBytes : stage", "smem + (next + C::kStages) * kStageBytes", "out of bounds|never written|wrong numbers"),
    Fault("tile: operands of a step one late", "tile", "tile_mma.cuh", "load_b(b[(step + 1) % 2], stage, step + 1);", "load_b(b[(step + 1) % 2], stage, step);", NUMBERS),
    Fault("tile: scales of the next group for this one", "tile", "tile_mma.cuh", "if (vector_ends) weights.load_operands(unit, last ? 0 : v + 1);", "if (vector_ends) weights.load(unit, last ? 0 : v + 1);", NUMBERS),
    Fault("tile: tokens past the end not cleared", "tile", "tile_mma.cuh", "        clear_x();\n", "", UNWRITTEN),
    Fault("tile: second panel taken from the first", "tile, two panels", "tile_mma.cuh", "panel = first_block / 8 + q,", "panel = first_block / 8,", NUMBERS),
    Fault("tile: second panel over the first", "tile, two panels", "tile_mma.cuh", "+ q * 8 * C::kUnitBytes + at", "+ at", f"{RACE}|{UNWRITTEN}|{NUMBERS}|asynchronous copy"),
    Fault("tile: partial sums over stages still read", "tile, registers", "tile_mma.cuh", "        syncthreads();  // the ring is free", "        // the ring is free", RACE),
    Fault("tile: no barrier before the sums are read", "tile", "tile_mma.cuh", "        syncthreads();\n        for (u32 id", "        for (u32 id", UNORDERED),
    Fault("tile: swizzle of x not undone", "tile", "tile_mma.cuh", "((lane / 8 % 2 ^ lane % 8) << 4)", "(lane / 8 % 2 << 4)", NUMBERS),
    Fault("tile: x read before griddepcontrol.wait", "tile, sm_90", "tile_mma.cuh", "{ griddep_wait(); griddep_launch(); }", "{ griddep_launch(); }", "no griddepcontrol.wait lies before"),
    Fault("tile: k tail of x not zeroed", "tile", "tile_mma.cuh", "C::kK % 128 == 0 || block * 128 + x_chunk * 8 < C::kK", "true", f"out of bounds|{NUMBERS}"),
    Fault("tile: row block past the end read", "tile", "tile_mma.cuh", "smaller(row_warp * C::kWarpBlocks + r, num_blocks - 1)", "(row_warp * C::kWarpBlocks + r)", UNWRITTEN),
    Fault("tile: tokens past the end copied", "tile", "tile_mma.cuh", "end = block < kKBlocks ? tokens : 0;", "end = block < kKBlocks ? C::kTokens : 0;", "out of bounds"),
    Fault("tile: rows past the end stored", "tile", "tile_mma.cuh", "if (out >= C::kN) continue;", "", "a second time|out of bounds|never written"),
    Fault("tile: short panel taken for a whole one", "tile", "tile_mma.cuh", "panel_blocks = smaller<u32>(8, kRowBlocks - panel * 8)", "panel_blocks = 8", f"out of bounds|{NUMBERS}"),
    Fault("tile: units past the end copied", "tile", "tile_mma.cuh", "(smaller(num_blocks, here) - q * 8) * C::kUnitBytes", "kPanelBlocks * C::kUnitBytes", f"out of bounds|{NUMBERS}"),
    Fault("tile: sums of the second token warp misplaced", "tile", "tile_mma.cuh", "store_partials(smem + token_warp * kWarpTokens * Partial::kTokenBytes", "store_partials(smem + token_warp * 8 * Partial::kTokenBytes", f"{RACE}|{UNWRITTEN}|{NUMBERS}"),
]  # fmt: skip


def outcome(kernels: emulate.Kernels, run: Run, seed: int) -> str:
    """What became of a run: the report, "wrong numbers" with the first of them, or "" if all was right."""
    _, packed, w = telling(run.spec, run.n, run.k, powers=3)
    generator = torch.Generator().manual_seed(11)
    x = torch.randint(-2, 3, (run.m, run.k), generator=generator).to(DTYPES[run.act])
    bias = torch.randint(-9, 9, (run.n,), generator=generator).float()
    out = DTYPES[run.out or run.act]
    want = (x.double() @ w.double().T + bias.double()).to(out)
    try:
        y = kernels.matmul(x, packed, act=run.act, bias=bias, out_dtype=out, arch=run.chip, plan=run.plan, seed=seed, gap=run.gap)
    except (emulator.EmulatorFault, LaunchError) as error:
        return str(error)
    exact = run.spec != "fp8_e4m3"  # whose sums have more bits than float32
    wrong = (y != want) if exact else (y.double() - want.double()).abs() > 0.02 * want.double().abs() + 0.1
    wrong |= torch.isnan(y)
    return f"{NUMBERS}: {int(wrong.sum())} of {y.numel()}, first {wrong.nonzero()[0].tolist()}" if wrong.any() else ""


@functools.cache
def sound() -> emulate.Kernels:
    return emulate.build_all((run.problem, run.plan) for run in SETTINGS.values())


@pytest.mark.parametrize("where", SETTINGS)
def test_sound_kernels_pass_with_every_seed(where: str) -> None:
    run = SETTINGS[where]
    assert [outcome(sound(), run, seed) for seed in SEEDS] == [""] * len(SEEDS)


def test_every_fault_changes_a_text_that_is_there_once() -> None:
    headers = {fault.file: (INCLUDE_DIR / fault.file).read_text() for fault in FAULTS}
    assert [(fault.risk, fault.file) for fault in FAULTS if headers[fault.file].count(fault.old) != 1 or fault.old == fault.new] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.risk.replace(" ", "_"))
def test_planted_fault_is_reported_with_every_seed(fault: Fault) -> None:
    run = SETTINGS[fault.where]
    mutated = emulator.mutate([generate(run.problem, run.plan)], fault.file, fault.old, fault.new)
    kernels = emulate.Kernels(emulator.build(mutated), {(run.problem, run.plan): mutated[0]})
    said = [outcome(kernels, run, seed) for seed in SEEDS]
    assert all(re.search(fault.want, text) if text else False for text in said), said


def test_faults_differ_and_every_setting_has_some() -> None:
    assert max(Counter(f.risk for f in FAULTS).values()) == 1
    assert max(Counter((f.where, f.file, f.old, f.new) for f in FAULTS).values()) == 1
    assert {f.where for f in FAULTS} == set(SETTINGS)
    assert len(FAULTS) >= 80

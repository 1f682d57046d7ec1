"""Kernel text from (Problem, Plan): one include, one struct of named constants, one instantiation.

A pure function; it must not know compilers, caches or devices.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from lowbit.dtypes import DType
from lowbit.errors import Unsupported
from lowbit.jit.source import Source, gather_headers
from lowbit.plan.plan import (
    PRODUCER_REGISTERS,
    Plan,
    folds,
    illegal,
    layout_of,
    mover,
    moves_registers,
    register_limit,
    smem_map,
    x_box_k,
)
from lowbit.problem import ActProblem, Problem, rounded_codebook

INCLUDE_DIR = Path(__file__).parent.parent / "cuda"

_ZEROS = {"none": "kNoZero", "int": "kIntZero", "float": "kFloatZero"}
_TYPES = {"bf16": "Bf16", "fp16": "F16", "fp32": "F32", "fp8": "E4m3", "int8": "S8"}
_CODES = {"fp8_e4m3": "E4m3", "fp8_e5m2": "E5m2", "int8": "S8"}
_CLASSES = {"stream": "Stream", "stream_wgmma": "StreamWgmma", "tile_mma": "TileMma", "tile_wgmma": "TileWgmma"}


def generate(problem: Problem, plan: Plan) -> Source:
    """The kernel of `plan` for `problem`; Unsupported with the reasons if the plan is not legal."""
    reasons = illegal(problem, plan)
    if reasons:
        raise Unsupported(reasons)
    layout, smem = layout_of(problem), smem_map(problem, plan)
    constants = {
        "kN": problem.n,
        "kK": problem.k,
        "kLevel": problem.arch.level,
        "kUnitBytes": layout.unit_bytes,
        "kCodeBytes": layout.code_bytes,
        "kScaleBytes": layout.scale_bytes,
        "kStep": layout.step,
        "kTokens": plan.tokens,
        "kWarpBlocks": plan.warp_blocks,
        "kRowWarps": plan.row_warps,
        "kStages": plan.stages,
    }
    if plan.family == "stream":
        constants |= {
            "kKWarps": plan.k_warps,
            "kSplit": plan.split,
            "kSlices": plan.slices,
            "kXChunks": plan.x_chunks,
            "kSmemX": smem.x,
            "kSmemBars": smem.bars,
        }
    elif plan.family == "stream_wgmma":
        constants |= {"kKWarps": plan.k_warps, "kSplit": plan.split, "kSmemBars": smem.bars, "kXBox": x_box_k(problem)}
    elif plan.family == "tile_wgmma":
        registers = (register_limit(plan), PRODUCER_REGISTERS) if moves_registers(plan) else (0, 0)  # 0: all keep what they have
        constants |= {
            "kKWarps": 1,
            "kSplit": plan.split,
            "kSmemBars": smem.bars,
            "kXBox": x_box_k(problem),
            "kConsumerRegs": registers[0],
            "kProducerRegs": registers[1],
        }
    else:
        constants |= {"kTokenWarps": plan.token_warps, "kSmemStage": smem.stage}
    lines = [f"    static constexpr u32 {name} = {value};" for name, value in constants.items()]
    types = {
        "Operand": _TYPES[problem.act],
        "Out": _TYPES[problem.out],
        "Value": _value(problem.spec.value, problem.act),
        "Scale": _scale(problem.spec.scale) if layout.grouped else "NoScale",
    }
    lines += [f"    using {name} = lowbit::{value};" for name, value in types.items()]
    config = "\n".join(
        [
            "struct Config {",
            "    using u32 = hw::u32;",
            *lines,
            f"    static constexpr lowbit::Zero kZero = lowbit::{_ZEROS[problem.spec.zero]};",
            f"    static constexpr bool kFold = {str(folds(problem, plan)).lower()};",
            f"    static constexpr lowbit::Mover kMover = lowbit::{mover(problem.arch, plan.family)};",
            "};",
        ]
    )
    return _source(problem, plan.family, config, "Params", _CLASSES[plan.family], plan.threads, plan.blocks_per_sm, str(plan))


def generate_act(problem: ActProblem) -> Source:
    """The kernel that quantises activations; Unsupported with the reasons if the chip cannot."""
    reasons = problem.obstacles
    if reasons:
        raise Unsupported(reasons)
    spec = problem.spec
    constants = {"kK": problem.k, "kThreads": problem.threads, "kLevel": problem.arch.level, "kGroup": spec.k}
    lines = [f"    static constexpr u32 {name} = {value};" for name, value in constants.items()]
    config = "\n".join(
        [
            "struct Config {",
            "    using u32 = hw::u32;",
            *lines,
            f"    using In = lowbit::{_TYPES[problem.x]};",
            f"    using Code = lowbit::{_CODES[spec.value.name]};",
            f"    static constexpr bool kStatic = {str(spec.static).lower()};",
            f"    static constexpr float kLimit = {spec.limit}f;",
            "};",
        ]
    )
    return _source(problem, "quantize_act", config, "ActParams", "QuantizeAct", problem.threads, 1, "")


def _source(
    problem: Problem | ActProblem, header: str, config: str, params: str, kernel: str, threads: int, blocks_per_sm: int, plan: str
) -> Source:
    """One kernel: the headers that it is made of, its constants, one instantiation."""
    head = f'// {problem.label}, {problem.arch.name}{f": {plan}" * bool(plan)}\n#include "{header}.cuh"\n'
    entry = f"lowbit_{header}_{hashlib.sha256((head + config).encode()).hexdigest()[:12]}"
    body = (
        f"HW_KERNEL_RESIDENT({threads}, {blocks_per_sm}) {entry}(const HW_GRID_CONST lowbit::{params} p) {{\n"
        f"    lowbit::{kernel}<Config>(p).run();\n}}\n"
    )
    text = f"{head}{config}\n{body}"
    return Source(
        text=text,
        entry=entry,
        arch=problem.arch.name,
        label=f"{problem.label} ({plan})" if plan else problem.label,
        headers=gather_headers(text, INCLUDE_DIR),
        target=problem.arch.target,
    )


def _value(value: DType, act: str) -> str:
    """The C++ name of a value format in dequant.cuh; codebooks spell out their entries, rounded to the operands' type."""
    if value.is_int:
        return f"{'Int' if value.kind == 'int' else 'Uint'}<{value.bits}>"
    if value.kind == "codebook":
        patterns = rounded_codebook(value, act).view(torch.int16).tolist()
        return f"Codebook<{value.bits}, {', '.join(f'{pattern & 0xFFFF:#06x}' for pattern in patterns)}>"
    return f"Float<{value.exponent}, {value.mantissa}>"


def _scale(scale: DType) -> str:
    wide = {"fp32": "ScaleF32", "bf16": "ScaleBf16", "fp16": "ScaleF16", "e8m0": "ScaleE8m0"}
    return wide.get(scale.name) or f"ScaleFloat<{scale.exponent}, {scale.mantissa}, {str(scale.signed).lower()}>"

"""What the plan chooser gives compiles for every architecture: no spills, no stack, registers that fit the blocks it counts on.

Real compilers, no GPU. Numbers are the matter of tests/emu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from lowbit.activations import NAMES, ActSpec
from lowbit.arch import ARCHS, arch
from lowbit.errors import Unsupported
from lowbit.jit.compile import UNKNOWN, Compiled, compile_source, find_compiler
from lowbit.jit.generate import generate, generate_act
from lowbit.jit.pool import compile_many
from lowbit.jit.source import Source
from lowbit.jit.toolkit import find_nvcc
from lowbit.plan.candidates import candidates
from lowbit.plan.choose import BUCKETS, choose
from lowbit.plan.cost import estimate
from lowbit.plan.plan import FAMILIES, WGMMA_FAMILIES, Plan, layout_of, smem_map
from lowbit.problem import MOST_COLUMNS, ActProblem, Problem
from lowbit.testing.cases import sweep
from lowbit.weights import WeightSpec


def _nvrtc_obstacle() -> str:
    try:
        find_compiler("nvrtc")
    except Unsupported as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(_nvrtc_obstacle()), reason=_nvrtc_obstacle() or "NVRTC is here")

FORMATS = (
    "int4_g128",
    "nvfp4",
    "int8",
    "int4_g32",
    "fp8_e4m3",
    "mxfp4",
    "fp8_e4m3_b128x128",
    "int4_g64",
    "int4",
    "mxfp8",
    "int3_g128",
    "uint4z_g128",
    "uint5zf_g32",
    "mxfp6",
    "nf4",
    "six(-1.0,7.0,0.5,-3.0,0.0,1.25)_g32",
)
COPIES = ("sm_87", "sm_103a", "sm_110a", "sm_121a", "zhenwu_810e")  # chips whose code is that of another row: three formats will do
SHAPES = ((4096, 4096), (2880, 2880), (576, 7168), (7168, 18432), (37, 136))
REGISTERS_PER_SM = 65536


def families(chip: str) -> set[str]:
    return {family for family in FAMILIES if family not in WGMMA_FAMILIES or arch(chip).wgmma}


def problem_of(spec: str, n: int, k: int, chip: str, act: str, out: str = "") -> Problem:
    return Problem(WeightSpec.parse(spec), act, out or act, n, k, arch(chip))


def chosen(chip: str, copy: bool) -> Iterator[tuple[Problem, Plan]]:
    """For every format all buckets of one shape; shapes and activations take turns."""
    row = arch(chip)
    for i, spec in enumerate(FORMATS[:3] if copy else FORMATS):
        n, k = SHAPES[(i + row.level) % len(SHAPES)]
        act = "fp16" if i % 3 == 2 or not row.bf16 else "bf16"
        problem = problem_of(spec, n, k, chip, act, "fp32" if i % 5 == 2 else act)
        for m in BUCKETS:
            yield problem, choose(problem, m)


def extremes(chip: str) -> Iterator[tuple[Problem, Plan]]:
    """Legal candidates at the ends of what the chooser looks at: most threads, blocks, accumulators, shared memory."""
    row = arch(chip)
    problem = problem_of("nvfp4", 4096, 4096, chip, "bf16" if row.bf16 else "fp16")
    unit = layout_of(problem).unit_bytes
    for m in (8, 32, 128):
        for family in FAMILIES:
            plans = candidates(problem, m, family)
            if plans:
                yield problem, max(plans, key=lambda p: (p.threads * p.blocks_per_sm, p.warp_blocks))
                yield (
                    problem,
                    max(plans, key=lambda p: p.warp_blocks * p.tokens / p.token_warps * p.threads * p.blocks_per_sm),
                )
                yield problem, max(plans, key=lambda p: (smem_map(problem, p).total * p.blocks_per_sm, p.threads))
                yield problem, min(plans, key=lambda p: (p.threads, p.stages * p.warp_blocks * unit))


def swept(chip: str, everything: bool) -> Iterator[tuple[Problem, Plan]]:
    """The sweep over all formats, with the best plans of all families for layers of real sizes."""
    for i, pick in enumerate(pick for pick in sweep(everything) if pick.arch.name == chip):
        n, k = SHAPES[i % len(SHAPES)]
        problem = problem_of(pick.spec, n, k, chip, pick.act, pick.out)
        for m in (16, 1, 128):  # x of 16 tokens may not fit beside the ring, nor that of one for the largest k on the smallest chip
            plans = candidates(problem, m, pick.family)
            if plans:
                yield problem, min(plans, key=lambda plan: estimate(problem, plan, m).us)
                break


def pairs(chip: str, everything: bool) -> dict[Source, Plan]:
    copy = chip in COPIES and not everything
    found = [*chosen(chip, copy), *(() if copy else extremes(chip)), *swept(chip, everything)]
    return {nvidias(generate(problem, plan)): plan for problem, plan in found}


def nvidias(source: Source) -> Source:
    """The same text as code for the NVIDIA chip whose instructions another maker's has; its own compiler is not here."""
    return replace(source, arch=source.machine, target="")


def fault(compiled: Compiled, plan: Plan) -> str:
    """What is wrong with the compiler's report on a plan's kernel; empty if nothing is."""
    return fault_of(compiled, plan.threads, plan.blocks_per_sm)


def fault_of(compiled: Compiled, threads: int, blocks_per_sm: int) -> str:
    whole = -(-compiled.registers // 8) * 8  # how they are handed out
    bad = []
    if UNKNOWN in (compiled.registers, compiled.spill_bytes, compiled.stack_bytes, compiled.static_smem):
        bad.append("the log has no report")
    if compiled.spill_bytes or compiled.stack_bytes:
        bad.append(f"spills {compiled.spill_bytes} bytes, stack {compiled.stack_bytes}")
    if not 16 <= compiled.registers <= 255 or whole * threads * blocks_per_sm > REGISTERS_PER_SM:
        bad.append(f"{compiled.registers} registers for {blocks_per_sm} blocks of {threads} threads")
    if compiled.static_smem:
        bad.append(f"{compiled.static_smem} bytes of static shared memory")
    return f"{compiled.source.arch} {compiled.source.label}: {'; '.join(bad)}" if bad else ""


@pytest.mark.parametrize("chip", ARCHS)
def test_kernels_that_quantise_activations_compile_without_spills(chip: str) -> None:
    specs = [spec for spec in map(ActSpec.parse, NAMES) if spec.quantised]
    problems = [ActProblem(spec, "fp16", k, arch(chip)) for spec in specs for k in (8, 4096, 28672, MOST_COLUMNS)]
    sources = {nvidias(generate_act(problem)): problem for problem in problems if not problem.obstacles}
    assert len(sources) == (36 if arch(chip).level >= 89 else 12)
    compiled = compile_many(list(sources), workers=2)
    assert [text for c in compiled if (text := fault_of(c, sources[c.source].threads, 1))] == []


def test_kernels_of_8_bit_activations_compile_without_spills() -> None:
    """On Hopper, which alone has them: what would be chosen, and the largest tiles."""
    specs = {"fp8": ("int4_g128", "int4", "mxfp4", "fp8_e4m3", "fp8_e4m3_b128x128", "int5_g64"), "int8": ("int4_g128", "int8", "int3_g32", "uint7")}
    plans = {}
    for act, names in specs.items():
        for name in names:
            problem = problem_of(name, 4096, 4096, "sm_90a", act, "bf16")
            found = [choose(problem, m) for m in BUCKETS]
            largest = max(candidates(problem, BUCKETS[-1]), key=lambda plan: (plan.tokens * plan.warp_blocks, plan.threads))
            plans |= {generate(problem, plan): plan for plan in (*found, largest)}
    compiled = compile_many(list(plans), workers=2)
    assert len(plans) > 40
    assert [text for c in compiled if (text := fault(c, plans[c.source]))] == []


@pytest.mark.parametrize("chip", ARCHS)
def test_kernels_of_the_chooser_compile_without_spills(chip: str, pytestconfig: pytest.Config) -> None:
    plans = pairs(chip, pytestconfig.getoption("all"))
    assert {plan.family for plan in plans.values()} == families(chip)
    assert len(plans) >= (12 if chip in COPIES else 50)
    compiled = compile_many(list(plans), workers=2)
    assert [text for c in compiled if (text := fault(c, plans[c.source]))] == []
    assert all(c.cubin.startswith(b"\x7fELF") for c in compiled)


def test_a_kernel_that_spills_would_be_seen() -> None:
    """The same kernel, promised to fit more blocks than its registers allow."""
    problem = problem_of("int4_g32", 1024, 1024, "sm_90a", "bf16")
    plan = Plan("stream", 16, 2, 4, stages=2)
    source = generate(problem, plan)
    crowded = Source(
        source.text.replace("HW_KERNEL_RESIDENT(128, 1)", "HW_KERNEL_RESIDENT(128, 16)"),
        source.entry, source.arch, source.label, source.headers,
    )  # fmt: skip
    assert crowded.text != source.text
    assert "spills" in fault(compile_source(crowded, compiler=find_compiler("nvrtc")), plan)


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda*")
@pytest.mark.parametrize(("chip", "family"), [(c, f) for c in ("sm_75", "sm_80", "sm_90a") for f in sorted(families(c))])
def test_nvcc_takes_a_kernel_of_each_family(family: str, chip: str) -> None:
    problem = problem_of("int4_g128", 512, 1024, chip, "fp16")
    plan = {
        "stream": Plan("stream", 8, 2, 4, stages=2),
        "stream_wgmma": Plan("stream_wgmma", 16, 2, 4, k_warps=2, stages=2),
        "tile_mma": Plan("tile_mma", 32, 2, 2, token_warps=2),
        "tile_wgmma": Plan("tile_wgmma", 128, 1, 8),
    }[family]
    compiled = compile_source(generate(problem, plan), compiler=find_compiler("nvcc"))
    assert fault(compiled, plan) == ""
    assert compiled.compiler.startswith("nvcc")

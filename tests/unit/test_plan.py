"""The plan chooser: only legal plans come out, the same ones everywhere, few per layer, and every refusal has a reason.

Properties over sweeps; which plan is fastest is no matter here.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lowbit.arch import ARCHS, Arch, arch
from lowbit.errors import BadInput, Unsupported
from lowbit.jit.generate import generate
from lowbit.plan import plan as plan_module
from lowbit.plan import store
from lowbit.plan.candidates import candidates
from lowbit.plan.choose import BUCKETS, MAX_GRID_Y, bucket, choose, explain
from lowbit.plan.plan import FAMILIES, Plan, folds, illegal, launch_geometry, layout_of, rounds, smem_map
from lowbit.problem import Problem, product_rounding, unsupported
from lowbit.testing.tolerance import operand_rounding
from lowbit.weights import WeightSpec

FORMATS = ("int4_g128", "int4_g32", "int4", "int8", "fp8_e4m3", "fp8_e4m3_b128x128", "mxfp4", "nvfp4")
ODD = [(8 * a, 8 * b) for a, b in ((1, 1), (3, 5), (5, 17))] + [(16 * 7, 16 * 9), (32 * 5, 32 * 3), (32 * 33, 32 * 65)]
REAL = [(40, 2880), (2880, 2880), (576, 7168), (2112, 7168), (7392, 2048), (4096, 10944), (10944, 4096)]
EXTREME = [(1, 8), (37, 136), (262144, 4096), (128, 65536), (5120, 53248)]
SHAPES = ODD + REAL + EXTREME
EDGES = sorted({1, 2, 1000, 2**20} | {b + d for b in BUCKETS for d in (-1, 0, 1) if b + d})


def problem_of(spec: str, n: int, k: int, chip: Arch) -> Problem:
    act = "bf16" if chip.bf16 else "fp16"
    return Problem(WeightSpec.parse(spec), act, act, n, k, chip)


def sweep() -> Iterator[Problem]:
    """A sixth of all triples, so that every pair of arch, format and shape occurs."""
    for i, chip in enumerate(ARCHS.values()):
        for j, spec in enumerate(FORMATS):
            for h, (n, k) in enumerate(SHAPES):
                if (i + j + h) % 6 == 0:
                    yield problem_of(spec, n, k, chip)


SWEEP = list(sweep())


def test_the_sweep_holds_every_pair() -> None:
    triples = [(p.arch.name, str(p.spec), (p.n, p.k)) for p in SWEEP]
    for a, b, size in ((0, 1, len(ARCHS) * len(FORMATS)), (0, 2, len(ARCHS) * len(SHAPES)), (1, 2, 8 * len(SHAPES))):
        assert len({(t[a], t[b]) for t in triples}) == size


@pytest.mark.parametrize("chip", ARCHS)
def test_choose_returns_legal_plans_for_every_number_of_tokens(chip: str) -> None:
    mine = [p for p in SWEEP if p.arch.name == chip]
    assert len(mine) > 20
    for problem in mine:
        plans = {m: choose(problem, m) for m in EDGES}
        assert len(set(plans.values())) <= 6, problem
        for m, plan in plans.items():
            assert illegal(problem, plan) == (), (problem, m)
            geometry = launch_geometry(problem, plan, m)
            assert geometry.grid_y <= MAX_GRID_Y, (problem, m)
            assert geometry.grid_y * plan.tokens >= m
            assert geometry.grid_x // geometry.cluster * plan.tile_rows >= problem.n
            assert geometry.grid_x % geometry.cluster == 0


def test_legal_plans_have_sound_maps_of_shared_memory() -> None:
    """Offsets that the hardware needs aligned are, and the map ends inside what the chip has."""
    looked = 0
    for problem in SWEEP[::7]:
        unit = layout_of(problem).unit_bytes
        assert unit % 16 == 0
        for plan in candidates(problem, 1) + candidates(problem, 64):
            smem = smem_map(problem, plan)
            assert smem.stage % 16 == smem.x % 16 == smem.bars % 8 == 0
            assert smem.stage >= plan.warp_blocks * unit
            assert smem.x <= smem.bars <= smem.total <= problem.arch.smem_per_block
            assert plan.threads * plan.blocks_per_sm <= problem.arch.threads_per_sm
            looked += 1
    assert looked > 1000


@pytest.mark.parametrize(
    ("spec", "act", "chip", "words"),
    [
        ("int4_g128", "bf16", "sm_75", "bf16 products need sm_80"),
        ("int4_g128", "fp64", "sm_90a", "act must be one of"),
        ("big(-70000.0,1.0)_g32", "fp16", "sm_100a", "big reaches 70000, beyond fp16's 65504: use act='bf16'"),
        ("huge(-1.0,3.4e38)_g32", "bf16", "sm_90a", "beyond bf16's 3.38953e+38: divide its values, multiply the scales"),
        ("fp8_e6m1", "fp16", "sm_75", "beyond fp16's 65504"),
        ("fp7_e5m1", "fp16", "sm_90a", "fp7_e5m1 reaches 98304"),
        ("int4_g8", "bf16", "sm_90a", "multiples of 16"),
    ],
)
def test_what_no_kernel_computes_is_refused_with_its_reason(spec: str, act: str, chip: str, words: str) -> None:
    problem = Problem(WeightSpec.parse(spec), act, "bf16", 256, 256, arch(chip))
    for ask in (choose, explain):
        with pytest.raises(Unsupported) as caught:
            ask(problem, 1)
        assert any(words in reason for reason in caught.value.reasons)
    assert any(words in reason for reason in illegal(problem, Plan("stream", 8, 1, 1)))


def test_the_sweep_is_of_what_kernels_compute() -> None:
    """The pairs above are the only obstacle: nothing of the sweep may be refused by `unsupported`."""
    assert [p for p in SWEEP if unsupported(p.spec, p.act, p.arch)] == []
    assert len(SWEEP) > 200


_PRINT = """
import json, sys
from lowbit.arch import arch
from lowbit.plan.choose import choose
from lowbit.problem import Problem
from lowbit.weights import WeightSpec
out = []
for spec, act, n, k, chip in json.loads(sys.argv[1]):
    problem = Problem(WeightSpec.parse(spec), act, act, n, k, arch(chip))
    out.append([repr(choose(problem, m)) for m in (1, 16, 4096)])
print(json.dumps(out))
"""


def test_processes_agree_whatever_their_hash_seed() -> None:
    some = SWEEP[::17]
    told = json.dumps([(str(p.spec), p.act, p.n, p.k, p.arch.name) for p in some])
    want = [[repr(choose(p, m)) for m in (1, 16, 4096)] for p in some]
    assert len({text for row in want for text in row}) > 10
    for seed in ("1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(plan_module.__file__).parents[2])}
        done = subprocess.run([sys.executable, "-c", _PRINT, told], capture_output=True, text=True, check=True, env=env)
        assert json.loads(done.stdout) == want


def test_buckets_cover_all_sizes_in_order() -> None:
    sizes = [*range(1, 300), 2**20]
    assert list(BUCKETS) == sorted(set(BUCKETS))
    assert [bucket(m) for m in sizes] == sorted(bucket(m) for m in sizes)
    assert all(bucket(m) >= min(m, BUCKETS[-1]) for m in sizes)
    assert {bucket(m) for m in sizes} == set(BUCKETS)


def test_batch_invariant_plans_cut_k_alike_whatever_the_batch() -> None:
    """The cut decides the order of sums; scales act alike, too. Where sizes differ without it, it had to do something."""
    mended = 0
    for problem in SWEEP[::5]:
        invariant = replace(problem, batch_invariant=True)
        plans = {m: choose(invariant, m) for m in BUCKETS}
        assert all(illegal(invariant, plan) == () for plan in plans.values())
        assert len({plan.cut for plan in plans.values()}) == 1
        assert len({folds(invariant, plan) for plan in plans.values()}) == 1
        free = {choose(problem, m) for m in BUCKETS}
        mended += len({plan.cut for plan in free}) > 1
    assert mended > 20


def test_batch_invariant_layers_take_measured_plans_of_their_common_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    problem = replace(problem_of("int4_g128", 4096, 2048, arch("sm_90a")), batch_invariant=True)
    stream, few, other = Plan("stream", 1, 1, 4, k_warps=4, stages=2), Plan("stream_wgmma", 8, 1, 4, k_warps=2, split=2, stages=3), \
        Plan("stream_wgmma", 16, 1, 4, k_warps=3, stages=2)  # fmt: skip
    store.write(tmp_path / "a.json", {store.name_of(problem): {1: stream, 8: few, 16: other}})
    monkeypatch.setenv("LOWBIT_TUNED", str(tmp_path / "a.json"))
    plans = {m: choose(problem, m) for m in BUCKETS}
    assert {plan.cut for plan in plans.values()} == {(2, 2)}
    assert (plans[1], plans[8]) == (replace(stream, slices=2), few)
    assert [explain(problem, m).plan for m in BUCKETS] == list(plans.values())
    assert [explain(problem, m).measured for m in (1, 8, 16)] == [True, True, False]
    assert [choose(replace(problem, batch_invariant=False), m) for m in (1, 8, 16)] == [stream, few, other]


@pytest.mark.parametrize(
    ("spec", "act", "error"),
    [
        ("nvfp4", "bf16", 0.0), ("nvfp4", "fp16", 0.0), ("mxfp4", "bf16", 0.0), ("mxfp4", "fp16", None), ("int4_g128_e8m0", "bf16", 0.0),
        ("int4_g64_e4m3", "bf16", 0.0), ("int4_g64_e4m3", "fp16", None), ("int8_g64_e4m3", "bf16", 1 / 259), ("mxfp8", "bf16", None),
        ("int4_g128_bf16", "bf16", 2**-8), ("int4_g128_bf16", "fp16", None), ("int4_g128_fp32", "bf16", None), ("fp4_e2m1_g16_ue7m1", "bf16", 0.0),
        ("fp4_e2m1_g16_e5m2", "fp16", None), ("fp8_e5m2_g32_ue7m0", "bf16", 0.0), ("nf4_g64_bf16", "bf16", 2**-8), ("nf4_g64_e4m3", "bf16", None),
    ],
)  # fmt: skip
def test_what_a_scale_in_the_operand_rounds(spec: str, act: str, error: float | None) -> None:
    of = WeightSpec.parse(spec)
    assert product_rounding(of.value, of.scale, act) == (error if error is None else pytest.approx(error, rel=1e-12))
    assert problem_of(spec, 64, 256, arch("sm_80")).folds == (product_rounding(of.value, of.scale, "bf16") == 0)


def test_only_many_tokens_of_tile_mma_round_scales_into_operands() -> None:
    layer, plan = problem_of("int4_g128_bf16", 512, 1024, arch("sm_80")), Plan("tile_mma", 128, 4, 2, token_warps=2, stages=2)
    assert rounds(layer, plan)
    assert folds(layer, plan)
    assert operand_rounding(layer.spec, "bf16", True) == 2**-8
    assert operand_rounding(layer.spec, "bf16") == 0
    nf4 = WeightSpec.parse("nf4_g64_bf16")
    assert operand_rounding(nf4, "bf16", True) == pytest.approx((1 + operand_rounding(nf4, "bf16")) * (1 + 2**-8) - 1)
    others = [
        (layer, replace(plan, tokens=64)), (layer, replace(plan, token_warps=4)), (layer, Plan("stream", 64, 1, 4)),
        (replace(layer, batch_invariant=True), plan), (replace(layer, act="fp16"), plan),
        *((problem_of(spec, 512, 1024, arch("sm_80")), plan) for spec in
          ("int4", "int4_g128_fp32", "int4_g128_fp16", "uint4zf_g128", "uint4z_g128_e4m3", "mxfp8", "nvfp4", "int4_g128_e8m0")),
    ]  # fmt: skip
    assert not any(rounds(*pair) for pair in others)
    for spec in ("uint4z_g128_bf16", "int8_g64_e4m3", "nf4_g64_bf16", "fp8_e4m3_b128x128_bf16"):
        assert rounds(problem_of(spec, 512, 1024, arch("sm_80")), plan), spec


def test_a_forced_family_that_cannot_be_batch_invariant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_PLAN", "tile_mma")
    problem = replace(problem_of("int4_g128", 4096, 4096, arch("sm_90a")), batch_invariant=True)
    with pytest.raises(Unsupported, match=r"tile_mma has no plan for 16 tokens that cuts k in 4 x 2 parts.*unset LOWBIT_PLAN"):
        choose(problem, 16)


def test_explain_ranks_the_legal_and_gives_reasons_against_the_rest() -> None:
    problem = problem_of("int4_g128", 4096, 8192, arch("sm_86"))
    for m in (1, 32, 4096):
        told = explain(problem, m)
        ranked = [(told.plan, told.cost), *told.others]
        assert told.plan == choose(problem, m)
        assert {plan for plan, _ in ranked} == set(candidates(problem, bucket(m)))
        assert [cost.us for _, cost in ranked] == sorted(cost.us for _, cost in ranked)
        assert all(cost.us > 0 for _, cost in ranked)
        for plan, reasons in told.rejected:
            assert reasons == illegal(problem, plan) != ()
        assert not {plan for plan, _ in ranked} & {plan for plan, _ in told.rejected}
    told = explain(problem, 32)
    assert any("shared memory" in reason for _, reasons in told.rejected for reason in reasons)


def test_a_family_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("int8", 512, 1024, arch("sm_90a"))
    for family in FAMILIES:
        monkeypatch.setenv("LOWBIT_PLAN", family)
        assert choose(problem, 16).family == explain(problem, 16).plan.family == family
        assert {plan.family for plan, _ in explain(problem, 16).others} <= {family}
    monkeypatch.setenv("LOWBIT_PLAN", "tile")
    with pytest.raises(BadInput, match="LOWBIT_PLAN must name a kernel family, one of stream, stream_wgmma, tile_mma, tile_wgmma; got 'tile'"):
        choose(problem, 16)


# ---- every reason of `illegal` ------------------------------------------------------------------------------------------

STREAM = Plan("stream", 8, 1, 4, stages=2)
TILE = Plan("tile_mma", 32, 2, 2, token_warps=2, stages=2)
WGMMA = Plan("stream_wgmma", 16, 2, 4, k_warps=2, stages=2)
TILE_WGMMA = Plan("tile_wgmma", 64, 1, 8, stages=2)
LAYER = problem_of("int4_g128", 512, 1024, arch("sm_90a"))
NARROW = problem_of("int4_g128", 512, 1024, arch("sm_86"))
BAD: list[tuple[Problem, Plan, str]] = [
    (LAYER, replace(STREAM, family="wave"), "family 'wave' is none of stream, stream_wgmma, tile_mma, tile_wgmma"),
    *(
        (LAYER, Plan(**{**vars(STREAM), field: value}), f"{field} must be at least 1; got {value}")
        for field in ("tokens", "warp_blocks", "row_warps", "k_warps", "token_warps", "split", "stages", "x_chunks", "slices")
        for value in (0, -1)
    ),
    (LAYER, replace(TILE, blocks_per_sm=0), "blocks_per_sm must be at least 1; got 0"),
    (replace(LAYER, k=1028), STREAM, "k must be a multiple of 8; got 1028"),
    (LAYER, replace(STREAM, warp_blocks=3), "warp_blocks must divide 8; got 3"),
    (LAYER, replace(STREAM, row_warps=33), "33 warps make 1056"),
    (NARROW, replace(STREAM, row_warps=16, blocks_per_sm=4), "4 blocks of 512 threads exceed 1536 threads per SM"),
    (LAYER, replace(STREAM, tokens=12), "tokens must be a multiple of 8 and at most 256, or (stream) below 8; got 12"),
    (LAYER, replace(STREAM, tokens=264), "at most 256, or (stream) below 8; got 264"),
    (LAYER, replace(TILE, tokens=24), "tokens must be a multiple of 16"),
    (LAYER, replace(TILE, tokens=4, token_warps=1), "or (stream) below 8; got 4"),
    (LAYER, replace(STREAM, token_warps=2, tokens=16), "stream has no token warps"),
    (LAYER, replace(STREAM, split=16), "split 16 needs a cluster of as many blocks; sm_90a allows 8"),
    (NARROW, replace(STREAM, split=2), "split 2 needs a cluster of as many blocks; sm_86 allows 1"),
    (LAYER, replace(STREAM, split=4, k_warps=4), "4 x 4 parts of k exceed its 8 blocks of 128"),
    (LAYER, replace(STREAM, k_warps=3, slices=2), "slices must divide the k warps of stream; got 2 for 3 of stream"),
    (LAYER, replace(WGMMA, slices=2), "slices must divide the k warps of stream; got 2 for 2 of stream_wgmma"),
    (LAYER, replace(TILE, slices=2), "tile_mma does not cut k"),
    (LAYER, replace(STREAM, tokens=32, stages=1), "partial sums of 32 tokens do not fit the ring of 1 stages"),
    (NARROW, WGMMA, "stream_wgmma multiplies by wgmma, which only Hopper (sm_90a) has; sm_86 has none"),
    (LAYER, replace(WGMMA, row_warps=6), "row_warps must be a multiple of 4; got 6"),
    (LAYER, replace(WGMMA, row_warps=64), "a block has 15 named barriers, one a warpgroup; 128 warps are 32 warpgroups"),
    (LAYER, replace(WGMMA, warp_blocks=4), "warp_blocks must be 1 or 2; got 4"),
    (LAYER, replace(WGMMA, tokens=40), "tokens must be one of 8, 16, 24, 32, 48, 64; got 40"),
    (LAYER, replace(WGMMA, tokens=4), "tokens must be one of 8, 16, 24, 32, 48, 64; got 4"),
    (LAYER, replace(WGMMA, tokens=64, stages=1), "partial sums of 64 tokens do not fit the ring of 1 stages"),
    (LAYER, replace(WGMMA, token_warps=2), "stream_wgmma has no token warps"),
    (problem_of("uint4zf_g128", 512, 1024, arch("sm_90a")), WGMMA, "float zero points need sums of x"),
    (NARROW, TILE_WGMMA, "tile_wgmma multiplies by wgmma, which only Hopper (sm_90a) has; sm_86 has none"),
    (LAYER, replace(TILE_WGMMA, row_warps=6), "row_warps must be a multiple of 4; got 6"),
    (LAYER, replace(TILE_WGMMA, row_warps=12), "the rows of a tile must divide 128 or be a multiple of it; got 192"),
    (LAYER, replace(TILE_WGMMA, row_warps=32), "a block has at most 1024 threads; 36 warps make 1152"),
    (LAYER, replace(TILE_WGMMA, warp_blocks=4), "warp_blocks must be 1 or 2; got 4"),
    (LAYER, replace(TILE_WGMMA, tokens=24), "tokens must be one of 8, 16, 32, 64, 128, 192, 256; got 24"),
    (LAYER, replace(TILE_WGMMA, k_warps=2), "the warps of tile_wgmma do not cut k; got k_warps 2"),
    (LAYER, replace(TILE_WGMMA, stages=1), "tile_wgmma needs two stages"),
    (LAYER, replace(TILE_WGMMA, slices=2), "slices must divide the k warps of stream; got 2 for 1 of tile_wgmma"),
    (LAYER, replace(TILE_WGMMA, tokens=128, split=2, stages=2, row_warps=16), "partial sums of 128 tokens do not fit the ring of 2 stages"),
    (LAYER, replace(TILE_WGMMA, tokens=256, warp_blocks=2), "registers a thread are needed, 232 are there with 384 threads x 1 blocks"),
    (problem_of("uint4zf_g128", 512, 1024, arch("sm_90a")), TILE_WGMMA, "float zero points need sums of x"),
    (replace(LAYER, act="fp8"), WGMMA, "stream_wgmma multiplies 16-bit activations; fp8 ones are for tile_wgmma"),
    (replace(problem_of("int8", 512, 131088, arch("sm_90a")), act="int8"), TILE_WGMMA, "int8 sums of more than 131072 columns may exceed 32 bits"),
    (replace(LAYER, act="fp8", arch=arch("sm_100a")), TILE_WGMMA, "are multiplied on Hopper (sm_90a) alone as yet; this is sm_100a"),
    (replace(problem_of("int6", 512, 1024, arch("sm_90a")), act="fp8"), TILE_WGMMA, "that are e4m3 numbers, integers up to 16 among them; int6 is"),
    (replace(problem_of("mxfp4", 512, 1024, arch("sm_90a")), act="int8"), TILE_WGMMA, "int8 activations take integers of up to 8 bits that are int8"),
    (replace(problem_of("int4z_g128", 512, 1024, arch("sm_90a")), act="int8"), TILE_WGMMA, "zero points are not for 8-bit activations yet"),
    (replace(problem_of("int4_g16", 512, 1024, arch("sm_90a")), act="int8"), TILE_WGMMA, "multiples of 32 with 8-bit activations; int4_g16 has 16"),
    (LAYER, replace(TILE, k_warps=2), "tile_mma does not cut k"),
    (LAYER, replace(TILE, split=2), "tile_mma does not cut k"),
    (LAYER, replace(TILE, row_warps=3), "the rows of a tile must divide 128 or be 256; got 96"),
    (LAYER, replace(TILE, stages=1), "tile_mma needs two stages"),
    (LAYER, replace(TILE, tokens=256, warp_blocks=4, row_warps=2), "registers a thread are needed, 255 are there"),
    (LAYER, replace(TILE, stages=40), "exceed 232448 per block on sm_90a"),
    (LAYER, replace(TILE, stages=16, blocks_per_sm=2), "of shared memory exceed 233472 per SM on sm_90a"),
    (replace(LAYER, act="fp64"), STREAM, "act must be one of bf16, fp16; got 'fp64'"),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "plan", "words"), BAD, ids=[words[:50] for *_, words in BAD])
def test_a_bad_plan_is_refused_with_its_reason_and_never_generated(problem: Problem, plan: Plan, words: str) -> None:
    reasons = illegal(problem, plan)
    assert any(words in reason for reason in reasons), reasons
    with pytest.raises(Unsupported) as caught:
        generate(problem, plan)
    assert caught.value.reasons == reasons


@pytest.mark.parametrize("plan", [STREAM, TILE], ids=str)
def test_the_plans_that_the_bad_ones_were_made_of_are_legal(plan: Plan) -> None:
    assert illegal(LAYER, plan) == illegal(NARROW, plan) == ()
    assert generate(LAYER, plan).arch == "sm_90a"
    assert illegal(LAYER, WGMMA) == illegal(LAYER, TILE_WGMMA) == ()


def test_act_order_is_supported_but_no_problem_of_a_kernel() -> None:
    assert unsupported(WeightSpec.parse("int4_g40_ao"), "bf16", arch("sm_90a")) == ()
    with pytest.raises(BadInput, match="natural order, int4_g128_ao has others: use problem_of"):
        replace(LAYER, spec=WeightSpec.parse("int4_g128_ao"))


def test_a_codebook_is_spelled_out_in_the_type_of_the_operands() -> None:
    spec = WeightSpec.parse("cb(-1.0,0.0,1.00390625,0.1)_g32")  # the third lies between two numbers of bf16: ties to even
    for act, patterns in (("bf16", "0xbf80, 0x0000, 0x3f80, 0x3dcd"), ("fp16", "0xbc00, 0x0000, 0x3c04, 0x2e66")):
        text = generate(replace(LAYER, spec=spec, act=act), STREAM).text
        assert f"using Value = lowbit::Codebook<2, {patterns}>;" in text


def written_reasons() -> list[str]:
    """A pattern for every reason that stands in the predicate's text."""
    found = []
    for function in ast.parse(inspect.getsource(plan_module)).body:
        if not isinstance(function, ast.FunctionDef) or "illegal" not in function.name:
            continue
        for node in ast.walk(function):
            sentences: list[ast.expr] = []
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
                sentences = node.args
            elif isinstance(node, ast.Return) and isinstance(node.value, (ast.Tuple, ast.List)):
                sentences = node.value.elts
            for sentence in sentences:
                if isinstance(sentence, ast.Constant):
                    found.append(re.escape(str(sentence.value)))
                elif isinstance(sentence, ast.JoinedStr):
                    parts = [re.escape(str(v.value)) if isinstance(v, ast.Constant) else ".+" for v in sentence.values]
                    found.append("".join(parts))
    return found


def test_every_reason_in_the_text_of_the_predicate_is_reached() -> None:
    said = {reason for problem, plan, _ in BAD for reason in illegal(problem, plan)}
    patterns = written_reasons()
    assert len(patterns) >= 16
    assert [p for p in patterns if not any(re.fullmatch(p, reason) for reason in said)] == []

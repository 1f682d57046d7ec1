"""The bridge to the emulator: shapes, types, seeds, poison, errors; and what the list of cases promises to cover.

The cases themselves are run by test_kernels.py.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lowbit
from lowbit.arch import ARCHS, Arch, arch
from lowbit.errors import BadInput, BadType, LaunchError, Unsupported
from lowbit.plan.choose import BUCKETS, choose
from lowbit.plan.plan import FAMILIES, WGMMA_FAMILIES, Plan, illegal
from lowbit.problem import ACTIVATIONS, unsupported
from lowbit.testing import emulate
from lowbit.testing.cases import BLOCK_FLOATS, GROUPS, SCALES, SWEPT, Case, Pick, by_wgmma, cases, sweep
from lowbit.weights import WeightSpec

pytestmark = pytest.mark.skipif(bool(emulate.obstacle()), reason=emulate.obstacle() or "the emulator is here")
CHIPS = ("sm_75", "sm_80", "sm_90a")  # copies through registers, cp.async, bulk copies with clusters


def legal(case: Case, chip: str) -> bool:
    return case.plan is None or not illegal(case.problem(arch(chip)), case.plan)


def test_only_small_shared_memory_rules_a_plan_out() -> None:
    """A case that is skipped on some chip runs on another, and only sm_75 skips any."""
    for chip in CHIPS:
        refused = [case for case in cases(arch(chip)) if not legal(case, chip)]
        assert not refused or chip == "sm_75", refused
        for case in refused:
            assert all("shared memory" in reason for reason in illegal(case.problem(arch(chip)), case.plan)), case


def test_cases_differ_and_cover_what_they_promise() -> None:
    found = list(cases(arch("sm_90a")))
    assert len({(case.name, case.spec, case.n, case.k, case.act) for case in found}) == len(found)
    assert {104, 133, 136, 2880} <= {case.k for case in found}
    assert {1, 16, 37, 40, 576, 1040} <= {case.n for case in found}
    assert set(FAMILIES) == {case.plan.family for case in found if case.plan}
    assert {1, 2, 3, 4, 5, 8} == {case.plan.split for case in found if case.plan}
    for case in found:
        if case.plan and "wraps" in case.name:
            assert -(-case.k // 128) > case.plan.stages


def has(value: str, family: str, row: Arch) -> bool:
    """Does the family exist there, for such weights?"""
    return family not in WGMMA_FAMILIES or by_wgmma(value, row)


def points(everything: bool) -> list[tuple[str, str, str, Pick]]:
    """(value, granularity, scale, pick); formats that bring their own scales have no granularity."""
    picks = list(sweep(everything))
    return [(*(pick.spec.rsplit("_", 2) if pick.spec not in BLOCK_FLOATS else (pick.spec, "", "")), pick) for pick in picks]


def test_the_thin_sweep_meets_every_format_in_every_family_and_all_chips() -> None:
    found = points(False)
    assert {(value, pick.family) for value, _, _, pick in found} == {(v, f) for v in SWEPT for f in FAMILIES if has(v, f, arch("sm_90a"))}
    assert {(pick.arch.name, pick.family) for *_, pick in found} == {(a, f) for a, row in ARCHS.items() for f in FAMILIES if has("int4", f, row)}
    assert {(group, scale) for _, group, scale, _ in found} - {("", "")} == {(g, s) for g in GROUPS for s in SCALES}
    assert {(pick.act, pick.out) for *_, pick in found} == {(a, o) for a in ACTIVATIONS for o in (a, "fp32")}
    assert len(found) == len({(value, pick.family) for value, _, _, pick in found})


def test_the_whole_sweep_meets_all_that_is_supported() -> None:
    found = points(True)
    assert all(unsupported(WeightSpec.parse(pick.spec), pick.act, pick.arch) == () for *_, pick in found)
    met = {(value, pick.arch.name, pick.family, pick.act) for value, *_, pick in found}
    able = {(v, name, f, act) for v in SWEPT for name, row in ARCHS.items() for f in FAMILIES for act in ACTIVATIONS
            if has(v, f, row) and not unsupported(WeightSpec.parse(v), act, row)}  # fmt: skip
    assert met == able
    values = set(SWEPT) - set(BLOCK_FLOATS)
    assert {(value, group) for value, group, _, _ in found if group} == {(v, g) for v in values for g in GROUPS}
    assert {(value, scale) for value, _, scale, _ in found if scale} == {(v, s) for v in values for s in SCALES}
    for index, kinds in ((1, GROUPS), (2, SCALES)):
        for facts in (lambda p: p.arch.name, lambda p: p.family, lambda p: p.act):
            assert len({(point[index], facts(point[3])) for point in found if point[index]}) == len(kinds) * len({facts(p[3]) for p in found})


# ---- emulate itself -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed() -> lowbit.PackedWeight:
    return lowbit.pack(lowbit.quantize(torch.linspace(-1, 1, 32 * 128).view(32, 128), "int4_g128"))


SMALL = Plan("stream", 8, 1, 1, stages=2)


def test_leading_dimensions_and_no_tokens(packed: lowbit.PackedWeight) -> None:
    x = torch.randn(2, 3, 128).bfloat16()
    y = emulate.matmul(x, packed, plan=SMALL)
    assert y.shape == (2, 3, 32)
    assert torch.equal(y.view(6, 32), emulate.matmul(x.view(6, 128), packed, plan=SMALL))
    assert emulate.matmul(x[:0], packed).shape == (0, 3, 32)


def test_output_type_and_bias(packed: lowbit.PackedWeight) -> None:
    x = torch.zeros(1, 128).bfloat16()
    bias = torch.linspace(0, 1, 32) + 2.0**-9  # fp16 keeps what bf16 does not
    y = emulate.matmul(x, packed, bias=bias, out_dtype=torch.float16, plan=SMALL)
    assert y.dtype == torch.float16
    assert torch.equal(y[0], bias.half())


def test_every_seed_gives_the_same_bits(packed: lowbit.PackedWeight) -> None:
    x = torch.randn(9, 128).bfloat16()
    first = emulate.matmul(x, packed, plan=SMALL, seed=0)
    assert all(torch.equal(first, emulate.matmul(x, packed, plan=SMALL, seed=seed)) for seed in range(1, 6))


def test_one_hot_tokens_give_the_columns_of_the_weight(packed: lowbit.PackedWeight) -> None:
    y = emulate.matmul(torch.eye(128).bfloat16(), packed, plan=SMALL)
    assert torch.equal(y.T, lowbit.unpack(packed).dequantize().bfloat16())


@pytest.mark.parametrize(("chip", "act", "plan"), [
    ("sm_90a", "bf16", SMALL), ("sm_90a", "bf16", Plan("stream_wgmma", 8, 1, 4, stages=3)), ("sm_75", "fp16", SMALL),
    ("sm_80", "bf16", Plan("tile_mma", 32, 1, 2, token_warps=2, stages=2)),
])  # fmt: skip
@pytest.mark.parametrize("name", ["int4z_g32_ao", "uint4zf_g64_ao"])
def test_act_order_gives_every_column_its_own_group(name: str, chip: str, act: str, plan: Plan) -> None:
    """One-hot tokens, scales by powers of two of their own: exact, for full groups and for a slice with unequal and empty ones."""
    n, k, random = 37, 133, torch.Generator().manual_seed(5)
    spec = lowbit.WeightSpec.parse(name)
    if spec.zero == "float" and plan.family in WGMMA_FAMILIES:
        plan = SMALL  # that family has no float zero points
    full = torch.arange(k) // spec.k
    few = torch.randint(0, 4, (k,), generator=random) * 2
    for g_idx in (full, full[torch.randperm(k, generator=random)], few):
        num_groups = 8 if g_idx is few else int(full[-1]) + 1
        codes = torch.randint(0, 16, (n, k), generator=random).to(torch.uint8)
        scales = torch.exp2((torch.arange(n)[:, None] * 3 + torch.arange(num_groups) * 5) % 9 - 4.0).to(spec.scale.storage)
        zeros = torch.randint(-3, 4, (n, num_groups), generator=random)
        zeros = zeros.to(torch.int16) if spec.zero == "int" else zeros * 0.5
        qw = lowbit.QuantWeight.from_values(spec, codes, scales, zeros=zeros, g_idx=g_idx.int())
        x = torch.eye(k).to(emulate.checks.DTYPES[act])
        got = emulate.matmul(x, lowbit.pack(qw), act=act, arch=chip, plan=plan)
        assert torch.equal(got.T.float(), qw.dequantize())


@pytest.mark.parametrize("spec", ["int4_g128", "nvfp4", "int8", "uint4z_g32"])
def test_another_makers_chip_runs_the_kernels_of_its_target(spec: str) -> None:
    """Its arithmetic is assumed to be the target's; no instruction beyond those may be used."""
    weight = lowbit.pack(lowbit.quantize(torch.randn(72, 400, generator=torch.Generator().manual_seed(0)), spec))
    x = torch.randn(21, 400, generator=torch.Generator().manual_seed(1))
    for act, plan in (("bf16", Plan("stream", 8, 1, 2, stages=4)), ("fp16", Plan("tile_mma", 32, 1, 2, token_warps=2))):
        operand = x.to(emulate.checks.DTYPES[act])
        y = emulate.matmul(operand, weight, act=act, arch="zhenwu_810e", plan=plan)
        assert torch.equal(y, emulate.matmul(operand, weight, act=act, arch="sm_80", plan=plan))
    assert torch.isfinite(emulate.matmul(x.bfloat16(), weight, arch="zhenwu_810e")).all()


def test_nan_and_inf_stay_in_their_rows(packed: lowbit.PackedWeight) -> None:
    x = torch.randn(9, 128).bfloat16()
    clean = emulate.matmul(x, packed, plan=SMALL)
    x[3, 5], x[7, 127] = float("nan"), float("inf")
    y = emulate.matmul(x, packed, plan=SMALL)
    assert y[3].isnan().all()
    assert not y[7].isfinite().any()
    others = [0, 1, 2, 4, 5, 6, 8]
    assert torch.equal(y[others], clean[others])


def test_kernel_that_leaves_y_unwritten_is_reported(packed: lowbit.PackedWeight) -> None:
    """Launched for fewer rows than there are."""
    problem = emulate.gemm.problem_of(packed.layout, "bf16", "bf16", arch("sm_90a"))
    narrow = replace(problem, n=16)
    built = emulate.build_all([(narrow, SMALL)])
    pretended = emulate.Kernels(built.library, {(problem, SMALL): built.sources[narrow, SMALL]})
    with pytest.raises(LaunchError, match="64 of 128 bytes of y were never written"):
        pretended.matmul(torch.randn(2, 128).bfloat16(), packed, plan=SMALL)


def test_bad_arguments_are_refused_before_anything_runs(packed: lowbit.PackedWeight) -> None:
    x = torch.randn(1, 128).bfloat16()
    with pytest.raises(BadInput, match="k=128; got x of shape"):
        emulate.matmul(x[:, :64], packed)
    with pytest.raises(BadType, match="float16"):
        emulate.matmul(x.half(), packed)
    with pytest.raises(Unsupported, match="act='fp16'"):
        emulate.matmul(x, packed, arch="sm_75")
    with pytest.raises(Unsupported, match="bytes of shared memory exceed"):
        emulate.matmul(x, packed, plan=replace(SMALL, stages=1000))
    with pytest.raises(BadInput, match="was not built: give the pair to build_all"):
        emulate.Kernels(None, {}).matmul(x, packed)
    with pytest.raises(BadInput, match="at least one"):
        emulate.build_all([])


def test_without_a_checkout_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulate, "_CHECKOUT", Path("/nonexistent/emulator"))
    monkeypatch.delitem(sys.modules, "emulator")
    assert "run from a checkout, or use lowbit.reference" in emulate.obstacle()
    with pytest.raises(Unsupported, match="there is no emulator here"):
        emulate.build_all([])


def test_without_a_compiler_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    build = importlib.import_module("emulator.build")
    build.compiler.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    try:
        assert "apt install g++" in emulate.obstacle()
    finally:
        build.compiler.cache_clear()


@pytest.mark.parametrize(("chip", "act"), [("sm_90a", "bf16"), ("sm_80", "bf16"), ("sm_75", "fp16")])
@pytest.mark.parametrize("spec", ["int4_g32", "nvfp4", "int8", "uint4zf_g64"])
def test_rows_of_any_batch_have_the_same_bits(spec: str, chip: str, act: str) -> None:
    """With batch_invariant every kernel of a layer adds in one order; without it they do not, so the test can fail."""
    random = torch.Generator().manual_seed(2)
    packed = lowbit.pack(lowbit.quantize(torch.randn(144, 1160, generator=random), spec))
    x = torch.randn(70, 1160, generator=random).to(emulate.checks.DTYPES[act])
    problem = emulate.gemm.problem_of(packed.layout, act, "fp32", arch(chip), True)
    plans = [choose(problem, m) for m in BUCKETS]
    assert len({plan.cut for plan in plans}) == 1
    assert len({plan.tokens for plan in plans}) >= 3
    ys = {m: emulate.matmul(x[:m], packed, act=act, arch=chip, out_dtype=torch.float32, batch_invariant=True) for m in (70, 1, 5, 16, 30, 50)}
    for m, y in ys.items():
        assert torch.equal(y, ys[70][:m]), m
    free = [choose(replace(problem, batch_invariant=False), m) for m in BUCKETS]
    if len({plan.cut for plan in free}) > 1:
        one = next(m for m, plan in zip(BUCKETS, free, strict=True) if plan.cut != free[-1].cut)
        y = emulate.matmul(x[: min(one, 70)], packed, act=act, arch=chip, out_dtype=torch.float32)
        assert not torch.equal(y, emulate.matmul(x, packed, act=act, arch=chip, out_dtype=torch.float32, plan=free[-1])[: len(y)])


def test_the_cut_of_k_decides_the_bits() -> None:
    """Warps that share slices of k add as the blocks of a cluster do, in every family."""
    random = torch.Generator().manual_seed(4)
    packed = lowbit.pack(lowbit.quantize(torch.randn(72, 1432, generator=random), "int4_g128"))
    x = torch.randn(3, 1432, generator=random).to(torch.bfloat16)
    plans = {
        (2, 2): [Plan("stream_wgmma", 8, 1, 4, k_warps=2, split=2, stages=2), Plan("stream", 8, 1, 2, k_warps=2, split=2, stages=2),
                 Plan("stream", 8, 1, 2, k_warps=4, stages=2, slices=2)],
        (1, 4): [Plan("stream_wgmma", 8, 1, 4, split=4, stages=2), Plan("stream", 8, 1, 2, k_warps=2, split=2, stages=2, slices=2),
                 Plan("stream", 8, 1, 1, k_warps=4, stages=2, slices=4)],
        (4, 1): [Plan("stream", 8, 1, 2, k_warps=4, stages=2)],
    }  # fmt: skip
    ys = {}
    for cut, same in plans.items():
        assert {plan.cut for plan in same} == {cut}
        first, *others = (emulate.matmul(x, packed, act="bf16", arch="sm_90a", out_dtype=torch.float32, plan=plan) for plan in same)
        assert all(torch.equal(y, first) for y in others), cut
        ys[cut] = first
    assert not any(torch.equal(ys[a], ys[b]) for a, b in (((2, 2), (1, 4)), ((1, 4), (4, 1)), ((2, 2), (4, 1))))

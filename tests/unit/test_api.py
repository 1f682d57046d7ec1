"""explain, supports, warmup: what they answer, for whom, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from needs import needs_compiler
from torch import nn

import lowbit
from lowbit import api
from lowbit.arch import ARCHS, arch
from lowbit.errors import BadInput, BadType, UnknownSpec, Unsupported
from lowbit.jit.cache import Cache
from lowbit.jit.generate import generate
from lowbit.ops.gemm import problem_of
from lowbit.plan.choose import BUCKETS, choose, size
from lowbit.plan.plan import illegal
from lowbit.problem import ACTIVATIONS


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def linear(spec: str = "int4_g128", n: int = 64, k: int = 256, **options: object) -> lowbit.Linear:
    weight = torch.linspace(-1, 1, n * k).view(n, k)
    return lowbit.Linear(lowbit.quantize(weight, spec), **options)


# ---- supports -------------------------------------------------------------------------------------------------------


def test_supported_format_gives_no_reasons() -> None:
    assert lowbit.supports("int4_g128", "bf16", "sm_90a") == ()
    assert lowbit.supports("nf4", "fp16", "sm_75") == lowbit.supports("third(-1.0,0.0,1.0)_g32", "bf16", "sm_120a") == ()
    assert lowbit.supports(lowbit.WeightSpec.parse("mxfp4"), act="fp16", arch=arch("sm_75")) == ()


def test_act_order_is_explained_as_what_kernels_see() -> None:
    assert lowbit.supports("int4_g40_ao", "bf16", "sm_90a") == ()
    layer = linear("int4_g96_ao", n=64, k=192)
    explained = lowbit.explain(layer, m=1, arch="sm_90a", compiled=False)
    assert (str(explained.problem.spec), explained.problem.k) == ("int4_g32", 192)


def test_every_reason_is_given_with_a_remedy() -> None:
    reasons = lowbit.supports("huge(1.0,3.4e38)_g40", "bf16", "sm_75")
    assert len(reasons) == 3  # no bf16, a value beyond it, a group of 40
    assert "use act='fp16'" in reasons[0]
    assert "divide its values" in reasons[1]
    assert "multiples of 16" in reasons[2]


def test_unknown_names_are_errors_that_suggest() -> None:
    with pytest.raises(UnknownSpec, match="int4_g128"):
        lowbit.supports("int4_g128x")
    with pytest.raises(BadInput, match=r"sm_90a.*got 'sm_60'"):
        lowbit.supports("int8", arch="sm_60")
    assert "fp9" in lowbit.supports("int8", act="fp9", arch="sm_80")[0]


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_some_known_chip_must_do() -> None:
    assert lowbit.supports("int8", "bf16") == ()  # though sm_75 has no bf16
    assert len(lowbit.supports("int4_g40", "bf16")) == 1  # and not the bf16 reason of sm_75


# ---- explain --------------------------------------------------------------------------------------------------------


def test_plan_is_the_one_the_library_runs_and_is_legal() -> None:
    layer = linear(n=4096, k=4096)
    for name in ("sm_80", "sm_90a"):
        problem = problem_of(layer.layout, "bf16", "bf16", arch(name))
        for m in (1, 9, 200):
            answer = lowbit.explain(layer, m, name, compiled=False)
            assert answer.plan == choose(problem, m)
            assert not illegal(problem, answer.plan)
            assert not any(illegal(problem, plan) for plan, _ in answer.others)
            assert [cost.us for _, cost in answer.others] == sorted(cost.us for _, cost in answer.others)
            if not answer.measured and m == size(m):
                assert all(cost.us >= answer.cost.us for _, cost in answer.others)
            assert all(illegal(problem, plan) == reasons != () for plan, reasons in answer.refused)


def test_no_estimate_is_below_its_floor_and_what_the_plan_serves_is_said() -> None:
    layer = linear(n=4096, k=4096)
    for m in (1, 5, 16, 100, 8192):
        answer = lowbit.explain(layer, m, "sm_80", compiled=False)
        assert answer.cost.us >= 0.9 * answer.floor_us
    told = {m: lowbit.explain(layer, m, "sm_80", compiled=False).why for m in (5, 100, 8192)}
    assert "legal plans for up to 8 tokens, compared at 8;" in told[5]
    assert "legal plans for all beyond 64 tokens, compared at 2048;" in told[100]
    assert told[100].split(";")[0] == told[8192].split(";")[0]


def test_bytes_and_floor_are_those_of_the_problem() -> None:
    answer = lowbit.explain(linear(n=4096, k=4096), 4, "sm_90a", compiled=False)
    codes, scales, x, y = 4096 * 4096 // 2, 4096 * 4096 // 128 * 2, 4 * 4096 * 2, 4 * 4096 * 2
    assert answer.bytes_moved == codes + scales + x + y
    assert answer.floor_us == pytest.approx(answer.bytes_moved / 4.57e6)
    many = lowbit.explain(linear(n=4096, k=4096), 1024, "sm_90a", compiled=False)
    assert many.floor_us == pytest.approx(2 * 1024 * 4096 * 4096 / 790e6)  # the tensor cores decide
    assert "4,570 GB/s and 790 TFLOP/s, measured on one H200" in str(many)
    channel = lowbit.explain(linear("int8", 256, 512), 1, "sm_90a", compiled=False)
    assert channel.bytes_moved == 256 * 512 + 256 * 4 + 2 * (256 + 512)


def test_text_names_everything() -> None:
    answer = lowbit.explain(linear(n=4096, k=4096), 16, "sm_90a", compiled=False)
    text = str(answer)
    for part in ("int4_g128 x bf16 -> bf16, 4096x4096, M = 16, sm_90a", str(answer.plan), answer.why, "floor", "refused"):
        assert part in text
    for name, value in answer.parts.items():
        assert f"{name.removesuffix('_us')} {value:.1f}" in text
    assert 1 <= text.count("  refused ") <= 4
    assert text.count("  other ") == 3


@needs_compiler
def test_kernel_report_comes_from_the_compiler_or_the_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    layer = linear()
    cold = lowbit.explain(layer, 1, "sm_80", compiled=False, cache=cache)
    assert cold.compiled is None
    assert "not compiled: it is not in the cache" in str(cold)
    warm = lowbit.explain(layer, 1, "sm_80", cache=cache)
    assert warm.compiled is not None
    assert 16 <= warm.compiled.registers <= 255
    assert f"{warm.compiled.registers} registers, {warm.compiled.spill_bytes} bytes spilled" in str(warm)
    assert lowbit.explain(layer, 1, "sm_80", compiled=False, cache=cache).compiled is not None


def test_missing_compiler_is_a_note_not_an_error(tmp_path: Path) -> None:
    answer = lowbit.explain(linear(), 1, "sm_80", cache=Cache(tmp_path, jit=False))
    assert answer.compiled is None
    assert "lowbit warmup --freeze" in answer.note


@pytest.mark.usefixtures("no_gpu")
def test_layer_on_the_cpu_needs_an_arch() -> None:
    with pytest.raises(BadInput, match="name the arch, one of sm_75"):
        lowbit.explain(linear(), 1)


def test_problem_explains_itself_and_can_move_to_another_chip() -> None:
    problem = problem_of(linear().layout, "bf16", "fp16", arch("sm_80"))
    assert lowbit.explain(problem, 1, compiled=False).problem == problem
    assert lowbit.explain(problem, 1, "sm_90a:114", compiled=False).problem.arch.sms == 114


def test_explain_refuses_what_it_cannot_answer() -> None:
    with pytest.raises(BadInput, match="at least 1; got 0"):
        lowbit.explain(linear(), 0, "sm_80")
    with pytest.raises(BadType, match="got Linear"):
        lowbit.explain(nn.Linear(2, 2), 1, "sm_80")
    with pytest.raises(Unsupported, match="act='fp16'"):
        lowbit.explain(linear(), 1, "sm_75")


@pytest.mark.parametrize("name", ["sm_90a:", "sm_90a:0", "sm_90a:x", "sm_90a:-3"])
def test_number_of_sms_must_be_one(name: str) -> None:
    with pytest.raises(BadInput, match="sm_90a:114"):
        api.parse_arch(name)


# ---- warmup ---------------------------------------------------------------------------------------------------------


@needs_compiler
def test_freezing_writes_every_kernel_a_layer_asks_for(tmp_path: Path) -> None:
    model = nn.Sequential(linear(), nn.ReLU(), linear("int8", 40, 136, act="fp16"))
    seen: list[tuple[int, int]] = []
    kernels = lowbit.warmup(
        model, 20, lambda done, total, label: seen.append((done, total)), archs=["sm_80"], directory=tmp_path
    )
    assert seen == [(i + 1, len(kernels)) for i in range(len(kernels))]
    frozen = Cache(tmp_path, jit=False)
    for layer in (model[0], model[2]):
        problem = problem_of(layer.layout, layer.act, layer.out, arch("sm_80"))
        for m in (1, 8, 9, 16, 17, 20):
            assert frozen.get_or_compile(generate(problem, choose(problem, m))).cubin
    assert {kernel.source.arch for kernel in kernels} == {"sm_80"}


@needs_compiler
def test_max_m_bounds_what_is_compiled(tmp_path: Path) -> None:
    layer = linear(n=2048, k=2048)
    problem = problem_of(layer.layout, "bf16", "bf16", arch("sm_90a"))
    for max_m in (1, BUCKETS[-1]):
        wanted = {generate(problem, choose(problem, b)).key for b in BUCKETS if b <= max(max_m, BUCKETS[0])}
        found = lowbit.warmup(layer, max_m, archs=["sm_90a"], directory=tmp_path)
        assert {kernel.source.key for kernel in found} == wanted


def test_warmup_refuses_what_it_cannot_do() -> None:
    with pytest.raises(BadInput, match=r"Sequential has no lowbit\.Linear"):
        lowbit.warmup(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(BadInput, match="1 of 1 layers are on the CPU"):
        lowbit.warmup(linear())
    with pytest.raises(BadInput, match="max_m must be at least 1; got 0"):
        lowbit.warmup(linear(), 0, archs=["sm_80"])
    with pytest.raises(Unsupported, match="act='fp16'"):
        lowbit.warmup(linear(), archs=["sm_75"])
    with pytest.raises(BadInput, match="cannot be written to /dev/null/x"):
        lowbit.warmup(linear(), archs=["sm_80"], directory="/dev/null/x")


def test_every_arch_and_activation_gets_an_answer() -> None:
    for name in ARCHS:
        answers = {act: lowbit.supports("int4_g128", act, name) for act in ACTIVATIONS}
        assert answers["fp16"] == ()
        assert (answers["bf16"] == ()) == (name != "sm_75")

"""The kernels of every chip in the emulator: right numbers, exact ones where possible, for every format and shape at risk.

The emulator itself reports races, missing fences, reads and writes out of bounds, bytes of y written twice or never.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.arch import ARCHS as ROWS
from lowbit.arch import arch
from lowbit.dtypes import codebook
from lowbit.layout.pack import PackedWeight, pack
from lowbit.plan.choose import BUCKETS, choose
from lowbit.plan.plan import FAMILIES, Plan, folds, illegal, rounds
from lowbit.problem import Problem, rounded_codebook
from lowbit.testing import cases, emulate, tolerance
from lowbit.weights import QuantWeight, WeightSpec

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
# One chip per way of moving bytes tries every case; the others generate the same text but for the level, and try the common formats.
# With --all every row of lowbit.arch tries everything.
THOROUGH = ("sm_75", "sm_80", "sm_90a")
SEEDS = (1, 2, 5)  # any warp next; starved warps; copies that land early
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PROBE_FORMATS = (
    "int4_g128", "int4_g64", "int4_g32", "int4", "int4_g128_e8m0", "int8", "int8_g128",
    "fp8_e4m3", "fp8_e4m3_b128x128", "mxfp8", "mxfp4", "nvfp4", "fp4_e2m1_g16_e8m0", "nf4",
)  # fmt: skip


def acts_of(chip: str) -> tuple[str, ...]:
    return ("bf16", "fp16") if arch(chip).bf16 else ("fp16",)


Pair = tuple[Problem, Plan]
BATCH = 150  # kernels of a library


@dataclass(frozen=True)
class Run:
    """One kernel with one number of tokens."""

    chip: str
    spec: str
    n: int
    k: int
    m: int
    act: str
    plan: Plan
    out: str = ""  # the activation's type unless given
    bias: bool = False
    gap: int = 0

    @property
    def problem(self) -> Problem:
        k8 = -(-self.k // 8) * 8
        return Problem(WeightSpec.parse(self.spec), self.act, self.out or self.act, self.n, k8, arch(self.chip))

    def __call__(self, x: Tensor, packed: PackedWeight, bias: Tensor | None = None, seed: int = 1) -> Tensor:
        return library(self).matmul(
            x, packed, act=self.act, bias=bias, out_dtype=DTYPES[self.out or self.act], arch=self.chip, plan=self.plan,
            seed=seed, gap=self.gap,
        )  # fmt: skip


def name(run: Run) -> str:
    return f"{run.chip}-{run.spec}-{run.act}-{run.out}-{run.plan}".replace("--", "-").replace(" ", "_")


# ---- what is run -------------------------------------------------------------------------------------------------------

STREAM = Plan("stream", 16, 2, 2, stages=2)
TILE = Plan("tile_mma", 32, 1, 2, token_warps=2, stages=2)
WGMMA = Plan("stream_wgmma", 16, 1, 4, k_warps=2, stages=2)
TILE_WGMMA = Plan("tile_wgmma", 64, 1, 4, stages=2)


def probe_plans(chip: str) -> dict[str, Plan]:
    """One small plan of each family, and what only some chips have; k of three blocks must suffice."""
    row = arch(chip)
    plans = {
        "stream": Plan("stream", 16, 2, 2, stages=2, x_chunks=2 if row.bulk else 1),
        "tile_mma": TILE,
    }
    if row.bulk:
        plans["stream, x by small copies"] = Plan("stream", 4, 1, 2, k_warps=2, stages=2)
    if row.wgmma:
        plans |= {"stream_wgmma": WGMMA, "tile_wgmma": TILE_WGMMA, "tile_wgmma, sums of groups": replace(TILE_WGMMA, tokens=32, row_warps=8)}
    if row.clusters:
        plans["stream, cluster"] = Plan("stream", 8, 1, 2, split=2, stages=2, x_chunks=2)
    return plans


def probes(chip: str) -> list[Run]:
    """Both common plans with common formats and every operand; the special ones with one integer and two float formats."""
    runs = []
    for name, plan in probe_plans(chip).items():
        for act in acts_of(chip):
            for spec in PROBE_FORMATS if name in FAMILIES else ("int4_g32", "mxfp4", "fp8_e4m3"):
                n = 152 if "_b128x128" in spec else 40
                runs.append(Run(chip, spec, n, 264, 264, act, plan))
    return runs


@functools.cache
def swept(everything: bool) -> tuple[Run, ...]:
    """All formats there are, on all chips."""
    runs = []
    for pick in cases.sweep(everything):
        chip, plan = pick.arch.name, probe_plans(pick.arch.name)[pick.family]
        run = Run(chip, pick.spec, 152 if "_b128x128" in pick.spec else 40, 264, 264, pick.act, plan, pick.out)
        few_bits = bool(illegal(run.problem, plan))  # partial sums need a longer ring of smaller stages
        runs.append(replace(run, plan=replace(plan, stages=6)) if few_bits else run)
    return tuple(runs)


def wide_probes(chip: str) -> list[Run]:
    """K cut eight ways, and every ring wrapped more than twice."""
    if not arch(chip).clusters:
        return []
    plan = Plan("stream", 8, 1, 2, split=8, stages=2, x_chunks=3)
    wrap = Plan("stream", 32, 1, 2, k_warps=1, split=2, stages=3, x_chunks=2)
    runs = [Run(chip, "int4_g64", 72, 1160, 48, "bf16", plan), Run(chip, "nvfp4", 37, 1928, 70, "fp16", wrap)]
    if arch(chip).wgmma:  # every number of tokens: scales on sums and in operands
        sizes = (("int4_g64", 8, 1), ("nvfp4", 8, 2), ("mxfp4", 16, 1), ("mxfp4", 24, 2), ("int8_g32", 32, 1), ("nvfp4", 48, 1), ("int4", 64, 2))
        for spec, tokens, blocks in sizes:
            wgmma = Plan("stream_wgmma", tokens, blocks, 4, k_warps=2, split=2, stages=3)
            runs.append(Run(chip, spec, 136, 3208, tokens + 5, "bf16", wgmma))
    return runs


def real(chip: str) -> list[Run]:
    """Plans that the library chooses for real layers, on layers as small as they allow."""
    runs = {}
    act = acts_of(chip)[0]
    layers = (("int4_g128", 4096, 4096), ("nvfp4", 2880, 2880), ("int8", 576, 7168), ("fp8_e4m3_b128x128", 18432, 7168))
    for spec, n, k in layers:
        for m in BUCKETS:
            plan = choose(Problem(WeightSpec.parse(spec), act, act, n, k, arch(chip)), m)
            blocks = max(plan.split * plan.k_warps + 1, 3)
            tokens = plan.tokens + 3 if plan.tokens < 64 else plan.tokens + 1
            run = Run(chip, spec, plan.tile_rows + 24, 128 * blocks - 40, min(tokens, 140), act, plan, bias=True)
            if illegal(run.problem, plan):  # more stages than fit beside x of so few k blocks, say
                run = Run(chip, spec, plan.tile_rows + 24, k, 1, act, plan, bias=True)
            runs[plan] = run
    found = list(runs.values())
    return found[:: -(-len(found) // 6)]


def crossed(chip: str) -> list[Run]:
    """Outputs of another type than the activations: stored one by one where N is odd, four at a time where 4 divides it."""
    pairs = [(act, out) for act in acts_of(chip) for out in (*acts_of(chip), "fp32") if act != out]
    shapes = (((37, STREAM), (40, TILE)), ((37, TILE), (40, STREAM)))  # each output meets all four
    return [
        Run(chip, "int4_g32", n, 136, 9, act, plan, out, bias=True)
        for i, (act, out) in enumerate(pairs)
        for n, plan in shapes[i // 2]
    ]


def of_case(chip: str, case: cases.Case) -> list[Run]:
    """The case's runs; none where its plan is not legal on the chip."""
    problem = case.problem(arch(chip))
    if case.plan is not None and illegal(problem, case.plan):
        return []
    return [
        Run(chip, case.spec, case.n, case.k, m, case.act, case.plan or choose(problem, m), "", case.bias, case.gap)
        for m in case.ms
    ]


def cases_of(chip: str, everything: bool) -> list[cases.Case]:
    found = list(cases.cases(arch(chip)))
    thorough = everything or chip in THOROUGH
    return found if thorough else [c for c in found if c.name.startswith("format") or "K ends" in c.name]


@functools.cache
def kernels(chip: str, everything: bool) -> tuple[Pair, ...]:
    """Every kernel that a test runs for the chip, each once; those of --all alone come last."""
    runs = [run for run in swept(False) if run.chip == chip]
    if chip in ARCHS or everything:
        runs += [run for case in cases_of(chip, False) for run in of_case(chip, case)]
        runs += probes(chip) + wide_probes(chip) + real(chip) + crossed(chip)
    if everything:
        runs += [run for case in cases_of(chip, True) for run in of_case(chip, case)]
        runs += [run for run in swept(True) if run.chip == chip]
    return tuple(dict.fromkeys((run.problem, run.plan) for run in runs))


@functools.cache
def numbers(chip: str, everything: bool) -> dict[Pair, int]:
    return {pair: number for number, pair in enumerate(kernels(chip, everything))}


def library(run: Run) -> emulate.Kernels:
    """The kernels built together with the run's, which are as many as a compiler takes at a time."""
    pair = (run.problem, run.plan)
    everything = pair not in numbers(run.chip, False)
    return batch(run.chip, everything, numbers(run.chip, everything)[pair] // BATCH)


@functools.cache
def batch(chip: str, everything: bool, index: int) -> emulate.Kernels:
    return emulate.build_all(kernels(chip, everything)[index * BATCH : (index + 1) * BATCH])


# ---- weights and reference -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def quantised(spec: str, n: int, k: int) -> tuple[QuantWeight, PackedWeight, Tensor]:
    """Random weights of one layer: canonical, packed, and their meaning."""
    generator = torch.Generator().manual_seed(n * 65537 + k)
    weight = torch.randn(n, k, generator=generator) * torch.exp2(torch.randint(-3, 3, (n, 1), generator=generator))
    qw = lowbit.quantize(weight, spec)
    return qw, pack(qw), qw.dequantize()


def tokens_of(run: Run) -> tuple[Tensor, Tensor | None]:
    """Random activations and bias."""
    generator = torch.Generator().manual_seed(run.m * 31 + run.k)
    x = torch.randn(run.m, run.k, generator=generator).to(DTYPES[run.act])
    return x, torch.randn(run.n, generator=generator) * 3 if run.bias else None


@functools.lru_cache(maxsize=64)
def telling(spec_name: str, n: int, k: int, powers: int = 13) -> tuple[QuantWeight, PackedWeight, Tensor]:
    """Weights whose every mistake shows: every code in every place of an MMA step, and scales that are powers of two and
    differ between neighbouring rows, groups and blocks, so that a wrong code or scale index gives another number.
    """
    spec = WeightSpec.parse(spec_name)
    rows, columns = torch.arange(n)[:, None], torch.arange(k)[None, :]
    # Eight elements of a lane share a step of the MMA: `place` tells them apart, `turn` counts the others of their place.
    place = columns % 2 + columns // 8 % 2 * 2 + rows // 8 % 2 * 4
    turn = rows % 8 * 32 + columns // 2 % 4 * 8 + columns // 16 % 8
    codes = (turn + place * 67 + rows // 16 * 37 + columns // 128 * 11) % (len(spec.value.codebook) or 2**spec.value.bits)
    codes[~torch.isfinite(spec.value.decode_table()[codes])] = 0x2B
    shape = spec.scale_shape(n, k)
    power = (torch.arange(shape[0])[:, None] * 5 + torch.arange(shape[1])[None, :] * 7) % powers - powers // 2
    scale = torch.exp2(power)
    if spec.scale.signed:
        scale = torch.where((torch.arange(shape[0])[:, None] + torch.arange(shape[1])[None, :]) % 3 == 1, -scale, scale)
    scales = spec.scale.encode(scale) if spec.scale.bits <= 8 else scale.to(spec.scale.storage)
    scale2 = {
        "none": None,
        "tensor": torch.tensor(0.5),
        "channel": torch.exp2(torch.arange(n) % 3 - 1.0),
    }[spec.scale2]
    turns = torch.arange(shape[0])[:, None] * 3 + torch.arange(shape[1])[None, :] * 5
    least, greatest = int(spec.value.min), int(spec.value.max)
    zeros = {
        "none": None,
        "int": (least + turns % (greatest - least + 1)).to(torch.int16) if spec.value.is_int else None,
        "float": (turns % 7 - 3) * 0.5,
    }[spec.zero]
    qw = QuantWeight.from_values(spec, codes.to(torch.uint8), scales, zeros=zeros, scale2=scale2)
    return qw, pack(qw), qw.dequantize()


def as_operands(qw: QuantWeight, act: str) -> QuantWeight:
    """What kernels multiply with: the same weight but for a codebook, whose entries become numbers of the operands' type."""
    if qw.spec.value.kind != "codebook":
        return qw
    value = codebook("rounded", rounded_codebook(qw.spec.value, act).tolist())
    return replace(qw, spec=replace(qw.spec, value=value))


def one_hot(ks: Sequence[int], k: int, act: str) -> Tensor:
    x = torch.zeros(len(ks), k, dtype=DTYPES[act])
    x[torch.arange(len(ks)), torch.tensor(ks)] = 1
    return x


def same(got: Tensor, want: Tensor) -> None:
    """Equal numbers; says where not."""
    wrong = (got != want).nonzero()
    assert wrong.numel() == 0, f"{len(wrong)} differ, first (token, row) {wrong[0].tolist()}: got " + str(
        [(got[i, j].item(), want[i, j].item()) for i, j in wrong[:4].tolist()]
    )


def exact(chip: str) -> list[Run]:
    return [r for r in probes(chip) if r.spec in ("int4_g32", "int4", "int8", "mxfp4", "int4_g128_e8m0")]


# ---- tests -----------------------------------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`run`: of the function that the mark `runs` names, for each chip; `swept`; `chip` and `case`."""
    everything = metafunc.config.getoption("all")
    chips = tuple(ROWS) if everything else ARCHS
    if mark := metafunc.definition.get_closest_marker("runs"):
        metafunc.parametrize("run", [run for chip in chips for run in mark.kwargs["of"](chip)], ids=name)
    elif "point" in metafunc.fixturenames:
        metafunc.parametrize("point", swept(everything), ids=name)
    elif "case" in metafunc.fixturenames:
        found = [(chip, case) for chip in chips for case in cases_of(chip, everything) if of_case(chip, case)]
        metafunc.parametrize(("chip", "case"), found, ids=[f"{chip}-{i}-{case}" for i, (chip, case) in enumerate(found)])


@pytest.mark.runs(of=probes)
def test_one_hot_tokens_give_columns_of_the_weight(run: Run) -> None:
    columns(run)


def test_every_format_gives_columns_of_the_weight(point: Run) -> None:
    columns(point)


def columns(run: Run) -> None:
    """Every k, every code in every place, every scale by a power of two of its own: exact."""
    qw, packed, _ = telling(run.spec, run.n, run.k)
    w = as_operands(qw, run.act).dequantize()
    got = run(one_hot(range(run.k), run.k, run.act), packed)
    assert torch.isfinite(w).all()
    same(got, w.T.to(got.dtype))
    assert w.T.to(got.dtype).float().equal(w.T)  # nothing was hidden by rounding


@pytest.mark.runs(of=wide_probes)
def test_one_hot_tokens_with_k_cut_and_rings_wrapped(run: Run) -> None:
    _, packed, w = telling(run.spec, run.n, run.k)
    step = run.k // run.m + 1
    ks = sorted({min(i * step + i % 3, run.k - 1) for i in range(run.m)})
    got = run(one_hot(ks, run.k, run.act), packed)
    same(got, w.T[ks].to(got.dtype))
    slots = run.plan.split * run.plan.k_warps * run.plan.stages
    assert -(-run.k // 128) > (2 * slots if run.plan.split < 8 else 8)


@pytest.mark.parametrize("family", ["stream", "stream_wgmma", "tile_mma", "tile_wgmma"])
def test_scales_at_the_ends_of_their_range_are_exact_in_operands(family: str) -> None:
    """e8m0 scales as small and as large as float32 allows, subnormal operands included, on all codes of e2m1: folded and on sums alike."""
    exponents = [*range(7), 10, 60, 120, 127, 200, 240, 250, 251, 252]
    spec = WeightSpec.parse("mxfp4")
    codes = (torch.arange(48)[:, None] + torch.arange(512)).remainder(16).to(torch.uint8)
    scales = torch.tensor(exponents, dtype=torch.uint8).repeat(48, 1)
    qw = QuantWeight.from_values(spec, codes, scales)
    w, packed = qw.dequantize(), pack(qw)
    for tokens in (8, 32):
        plan = {"stream": Plan("stream", tokens, 1, 2, stages=4), "stream_wgmma": Plan("stream_wgmma", tokens, 1, 4, stages=2),
                "tile_mma": Plan("tile_mma", tokens, 1, 2, stages=2), "tile_wgmma": Plan("tile_wgmma", tokens, 1, 4, stages=2)}[family]  # fmt: skip
        run = Run("sm_90a", "mxfp4", 48, 512, tokens, "bf16", plan, "fp32")
        assert folds(run.problem, plan) == (tokens == 32)
        kernel = emulate.build_all([(run.problem, plan)])
        for start in range(0, 512, 64):
            x = one_hot(range(start, start + 64), 512, "bf16")
            y = kernel.matmul(x, packed, arch="sm_90a", plan=plan, out_dtype=torch.float32)
            same(y, w.T[start : start + 64])


@pytest.mark.runs(of=exact)
def test_sums_of_small_integers_are_exact(run: Run) -> None:
    """All k at once: every partial sum fits float32, in whatever order, so the result is the exact one, rounded once."""
    _, packed, w = telling(run.spec, run.n, run.k, powers=3)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-2, 3, (19, run.k), generator=generator).to(DTYPES[run.act])
    want = x.double() @ w.double().T
    assert ((x.double().abs() @ w.double().abs().T) / w[w != 0].abs().min()).max() < 2**23
    same(run(x, packed), want.to(DTYPES[run.act]))


@pytest.mark.parametrize(
    "spec",
    ["int4", "int8", "fp8_e4m3", "mxfp4", "int3_g128", "uint6z_g32", "int7_g16", "fp5_e2m2_g64", "nf4",
     "eight(0.1,-0.2,0.3,-0.4,0.5,-0.6,0.7,-0.8)_g32"],
)  # fmt: skip
def test_telling_weights_hold_every_code_in_every_place_of_a_step(spec: str) -> None:
    """So the one-hot tests above convert all codes with all eight instruction sequences of `Convert::step`."""
    qw, _, w = telling(spec, 40, 264)
    rows, columns = torch.arange(40)[:, None], torch.arange(264)[None, :]
    codes, table = qw.code_values()[0], qw.spec.value.decode_table()
    numbers = int((~torch.isnan(table)).sum())
    for place in range(8):
        here = (columns % 2 == place & 1) & (columns // 8 % 2 == place >> 1 & 1) & (rows // 8 % 2 == place >> 2)
        assert len(torch.unique(codes[here])) == numbers == 2**qw.spec.value.bits - 2 * (spec == "fp8_e4m3")
    assert len(torch.unique(w)) > 50


def test_case(chip: str, case: cases.Case) -> None:
    runs = of_case(chip, case)
    for run in runs:
        compare(run, SEEDS if run is runs[-1] else SEEDS[:1])


@pytest.mark.runs(of=real)
def test_plan_of_a_real_layer(run: Run) -> None:
    compare(run, SEEDS[:2])


@pytest.mark.runs(of=crossed)
def test_output_of_another_type(run: Run) -> None:
    compare(run, SEEDS)


def compare(run: Run, seeds: Sequence[int]) -> None:
    """Within the derived bound of the exact product, and the same bits with every seed."""
    _, packed, w = quantised(run.spec, run.n, run.k)
    x, bias = tokens_of(run)
    y = run(x, packed, bias, seeds[0])
    want = x.double() @ w.double().T + (0 if bias is None else bias.double())
    limit = tolerance.bound(x, w, bias, y.dtype, level=arch(run.chip).level,
                            rounding=tolerance.operand_rounding(WeightSpec.parse(run.spec), run.act, rounds(run.problem, run.plan)))  # fmt: skip
    error = (y.double() - want).abs()
    worst = (error / limit).max().item()
    assert worst <= 1, (run, worst)
    ratio = (y.double().norm() / want.norm()).item()
    assert abs(ratio - 1) <= (limit.norm() / want.norm()).item(), run
    for seed in seeds[1:]:
        assert torch.equal(run(x, packed, bias, seed), y), (run, seed)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("chip", [*THOROUGH, "sm_120a"])
def test_a_token_that_is_not_finite_spoils_no_other(chip: str, value: float) -> None:
    for run in probes(chip):
        if run.spec not in ("int4_g32", "fp8_e4m3"):
            continue
        _, packed, _ = quantised(run.spec, run.n, run.k)
        x, _ = tokens_of(Run(chip, run.spec, run.n, run.k, 21, run.act, run.plan))
        clean = run(x, packed)
        x[6, run.k - 1] = value
        got = run(x, packed)
        others = [i for i in range(21) if i != 6]
        assert torch.equal(got[others], clean[others])
        assert torch.isfinite(clean).all()
        assert not torch.isfinite(got[6]).any()
        if value != value:
            assert torch.isnan(got[6]).all()

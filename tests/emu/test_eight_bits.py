"""Products with 8-bit activations: every code of every format that they take, exactly; sums within what the hardware keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import emulator
from lowbit.activations import ActSpec
from lowbit.arch import arch
from lowbit.errors import BadInput, LowbitError
from lowbit.jit.generate import generate
from lowbit.layout.pack import PackedWeight, pack
from lowbit.ops.gemm import problem_of
from lowbit.plan.choose import choose
from lowbit.plan.plan import Plan
from lowbit.problem import EIGHT_BITS, unsupported_eight_bits
from lowbit.quantize.activations import dequantize_act, quantize_act
from lowbit.testing import emulate
from lowbit.testing.cases import SWEPT
from lowbit.weights import QuantWeight, WeightSpec

pytestmark = pytest.mark.skipif(bool(emulate.obstacle()), reason=emulate.obstacle() or "the emulator is here")

HOPPER = arch("sm_90a")
GROUPS = ("c", "g32", "g64", "g128", "g256", "b128x128", "t")
PLANS = (
    Plan("tile_wgmma", 16, 1, 4, stages=2), Plan("tile_wgmma", 32, 2, 8, stages=2), Plan("tile_wgmma", 16, 2, 4, stages=3),
    Plan("tile_wgmma", 16, 1, 8, split=2, stages=4),
)  # fmt: skip


# An instruction cuts each of its 33 terms toward zero at 2^-13 of the largest; four instructions make the sum of 128 k that moves to fp32.
FP8_ROUNDING = 4 * 33 * 2.0**-13


def pairs() -> Iterator[tuple[str, str, Plan]]:
    """(spec, activation, plan): all value formats that go together, granularities and plans in turn."""
    i = 0
    for act in EIGHT_BITS:
        for value in SWEPT:
            spec = value if value.startswith(("mx", "nv")) else f"{value}_{GROUPS[i % len(GROUPS)]}_bf16"
            if not unsupported_eight_bits(WeightSpec.parse(spec), act, HOPPER):
                yield spec, act, PLANS[i % len(PLANS)]
                i += 1


PAIRS = list(pairs())


def all_codes(name: str, n: int, k: int) -> QuantWeight:
    """Every finite code in every lane and step sooner or later; scales that differ from group to group, powers of two and odd numbers."""
    spec = WeightSpec.parse(name)
    value = spec.value
    finite = torch.tensor([code for code, number in enumerate(value.values) if abs(number) < 1e30], dtype=torch.uint8)
    codes = finite[(torch.arange(n)[:, None] * 7 + torch.arange(k) * 3 + torch.arange(k) // 32).remainder(len(finite))]
    shape = spec.scale_shape(n, k)
    exponents = torch.arange(shape[0] * shape[1]).view(shape).remainder(7) - 3
    scales = spec.scale.encode(2.0**exponents * (1 + 0.25 * exponents.remainder(2)))
    return QuantWeight.from_values(spec, codes, scales, scale2=torch.tensor([0.5]) if spec.scale2 == "tensor" else None)


def one_hot(k: int, act: str) -> Tensor:
    """(k, k): a token for every column, its number the largest code, so that its scale is one."""
    return (torch.eye(k) * ActSpec.parse(act).limit).bfloat16()


def test_every_format_that_goes_together_is_met() -> None:
    met = {(WeightSpec.parse(spec).value.name, act) for spec, act, _ in PAIRS}
    assert {("int8", "int8"), ("uint7", "int8"), ("int1", "int8"), ("int5", "fp8"), ("uint4", "fp8"), ("fp8_e4m3", "fp8"), ("fp4_e2m1", "fp8")} <= met
    no_numbers = {("int6", "fp8"), ("uint5", "fp8"), ("fp8_e5m2", "fp8"), ("fp8_e3m4", "fp8"), ("uint8", "int8"), ("fp4_e2m1", "int8")}
    assert not (no_numbers | {("nf4", "fp8")}) & met
    assert len(PAIRS) > 35


@pytest.mark.parametrize(("spec", "act", "plan"), PAIRS, ids=[f"{spec}-{act}" for spec, act, _ in PAIRS])
def test_one_hot_tokens_show_every_weight_exactly(spec: str, act: str, plan: Plan) -> None:
    qw = all_codes(spec, 152, 296)
    got = emulate.matmul(one_hot(296, act), pack(qw, 8), act=act, arch="sm_90a", plan=plan, out_dtype=torch.float32)
    want = qw.dequantize().double().T * ActSpec.parse(act).limit
    assert torch.equal(want.float().double(), want)
    assert torch.equal(got, want.float())


@pytest.mark.parametrize("seed", [1, 2, 5])
@pytest.mark.parametrize(("spec", "act", "plan"), PAIRS[::5], ids=[f"{spec}-{act}" for spec, act, _ in PAIRS[::5]])
def test_sums_of_real_numbers(spec: str, act: str, plan: Plan, seed: int) -> None:
    """int8 sums are exact before scales; for those of fp8 see FP8_ROUNDING."""
    random = torch.Generator().manual_seed(seed)
    qw = all_codes(spec, 104, 1160)
    x, bias = torch.randn(37, 1160, generator=random).bfloat16(), torch.randn(104, generator=random)
    got = emulate.matmul(x, pack(qw, 8), act=act, bias=bias, arch="sm_90a", plan=plan, out_dtype=torch.float32, seed=seed, gap=1).double()
    quantised, w = dequantize_act(*quantize_act(x, act), act).double(), qw.dequantize().double()
    want, size = quantised @ w.T + bias.double(), quantised.abs() @ w.abs().T + bias.abs().double()
    rounding = 2.0**-19 if act == "int8" else FP8_ROUNDING
    assert ((got - want).abs() <= rounding * size).all()
    assert (got - want).norm() / want.norm() < (1e-6 if act == "int8" else 1e-3)
    assert (got - want).norm() > 0


def test_the_largest_int8_sums_are_exact() -> None:
    """-128 x -127 over many columns: 2^27, which no 24 bits of a float sum would keep with what is added."""
    k = 8320
    qw = QuantWeight.from_values(WeightSpec.parse("int8_t"), torch.full((16, k), 0x80, dtype=torch.uint8), torch.ones(1, 1))
    x = torch.full((2, k), -127.0).bfloat16()
    x[1, 0] = -126
    y = emulate.matmul(x, pack(qw, 8), act="int8", arch="sm_90a", plan=PLANS[0], out_dtype=torch.float32)
    assert y[:, 0].tolist() == [float(128 * 127 * k), float(torch.tensor(128.0 * 127 * k - 128))]


@pytest.mark.parametrize("spec", ["fp8_e4m3_t", "fp8_e4m3_g128"])
@pytest.mark.parametrize("plan", PLANS[:3], ids=str)
def test_fp8_sums_move_before_small_numbers_are_lost_beside_large_ones(spec: str, plan: Plan) -> None:
    """One product of 448^2 and 4095 of 15: what is added to the large sum within 128 k may be cut, all that follows is kept."""
    k = 4096
    w, x = torch.full((16, k), 4.0), torch.full((1, k), 3.75)
    w[:, 0], x[:, 0] = 448, 448
    scales = torch.ones(16 if "_g" in spec else 1, k // 128 if "_g" in spec else 1).bfloat16()
    parsed = WeightSpec.parse(spec)
    qw = QuantWeight.from_values(parsed, parsed.value.encode(w), scales.to(parsed.scale.storage))
    y = emulate.matmul(x.bfloat16(), pack(qw, 8), act="fp8", arch="sm_90a", plan=plan, out_dtype=torch.float32).double()
    want = (x.double() @ w.double().T).expand(1, 16)
    assert ((y - want).abs() <= FP8_ROUNDING * (448.0**2 + 127 * 15)).all()
    assert ((y - want).abs() > 0).all()  # the tensor core does cut


def test_fp8_bits_do_not_depend_on_the_plan() -> None:
    qw, x = all_codes("fp8_e4m3_c_bf16", 152, 1160), torch.randn(5, 1160, generator=torch.Generator().manual_seed(1)).bfloat16()
    ys = [emulate.matmul(x, pack(qw, 8), act="fp8", arch="sm_90a", plan=plan, out_dtype=torch.float32) for plan in PLANS[:3]]
    assert torch.equal(ys[0], ys[1])
    assert torch.equal(ys[0], ys[2])


@pytest.mark.parametrize("act", EIGHT_BITS)
@pytest.mark.parametrize("m", [1, 16, 33, 70, 200])
def test_plans_that_the_library_would_choose(act: str, m: int) -> None:
    qw = all_codes("int4_g128", 272, 776)
    x = torch.randn(m, 776, generator=torch.Generator().manual_seed(m)).half()
    problem = problem_of(pack(qw, 8).layout, act, "fp16", HOPPER)
    assert choose(problem, m).family == "tile_wgmma"
    y = emulate.matmul(x, pack(qw, 8), act=act, arch="sm_90a").double()
    want = dequantize_act(*quantize_act(x, act), act).double() @ qw.dequantize().double().T
    assert (y - want).norm() / want.norm() < 1e-3


@pytest.mark.parametrize("act", EIGHT_BITS)
def test_a_token_that_is_not_finite_is_nan_alone_and_zeros_give_the_bias(act: str) -> None:
    qw = all_codes("int4_g128", 40, 264)
    x = torch.ones(4, 264).bfloat16()
    x[1, 7], x[2] = torch.inf, 0
    bias = torch.arange(40.0)
    y = emulate.matmul(x, pack(qw, 8), act=act, bias=bias, arch="sm_90a", plan=PLANS[0])
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()
    assert torch.equal(y[2], bias.bfloat16())
    assert torch.equal(y[0], y[3])


def test_columns_that_are_no_multiple_of_16() -> None:
    for k in (8, 133, 264):
        qw = all_codes("int4_c_fp32", 37, k)
        x = torch.randn(5, k, generator=torch.Generator().manual_seed(k)).bfloat16()
        y = emulate.matmul(x, pack(qw, 8), act="int8", arch="sm_90a", plan=PLANS[0], out_dtype=torch.float32).double()
        want = dequantize_act(*quantize_act(x, "int8"), "int8").double() @ qw.dequantize().double().T
        assert (y - want).norm() / want.norm() < 1e-6


def test_weights_packed_for_other_operands_are_refused() -> None:
    qw = all_codes("int4_g128", 40, 264)
    for operand_bits, act in ((16, "fp8"), (8, "bf16")):
        with pytest.raises(BadInput, match=f"packed for {24 - operand_bits}-bit operands; .* is for {operand_bits} bits"):
            emulate.matmul(torch.ones(2, 264).bfloat16(), pack(qw, operand_bits), act=act, arch="sm_90a", plan=PLANS[0])


FAULTS = [
    ("int8_c_bf16", "int8", "dequant.cuh", "codes.at(s, i, 8 - kBits) ^ 0x80808080", "codes.at(s, i, 8 - kBits)"),
    ("uint4_g64_bf16", "int8", "dequant.cuh", "a[i] = codes.at(s, i, 7 - kBits);", "a[i] = codes.at(s, i, 8 - kBits);"),
    ("int4_g64_bf16", "fp8", "dequant.cuh", "(n - one)) + one)", "(n - one)) + 0 * one)"),
    ("int4_g64_bf16", "fp8", "dequant.cuh", "| n << (8 - kBits)", "| n << (7 - kBits)"),
    ("fp6_e3m2_c_bf16", "fp8", "dequant.cuh", "? 7 : 3 - kMantissa + c", "? 7 : 2 - kMantissa + c"),
    ("fp8_e4m3_c_bf16", "fp8", "tile_wgmma.cuh", "now[step], x, k_step > 0);", "now[step], x, k_step > 0 || i > 0);"),
    ("fp8_e4m3_c_bf16", "fp8", "tile_wgmma.cuh", "kMoves ? v == W::kVectors - 1", "kMoves ? v == 0"),
    ("int4_g128_bf16", "int8", "tile_wgmma.cuh", "kParts ? group / W::kVectors : group", "kParts ? 0 : group"),
    ("int4_g128_bf16", "int8", "tile_wgmma.cuh", "box < kXBoxes", "box < 2"),
    ("int4_g128_bf16", "int8", "epilogue.cuh", "p.x_scales + token * 4", "p.x_scales + (token ^ 1) * 4"),
]


@pytest.mark.parametrize(("spec", "act", "file", "old", "new"), FAULTS, ids=[f"{spec}-{new}"[:70] for spec, _, _, _, new in FAULTS])
def test_planted_faults_are_found(spec: str, act: str, file: str, old: str, new: str) -> None:
    plan = Plan("tile_wgmma", 16, 2, 4, stages=2) if "kParts ? 0" in new else PLANS[0]
    qw = all_codes(spec, 104, 776)
    packed: PackedWeight = pack(qw, 8)
    problem = problem_of(packed.layout, act, "fp32", HOPPER)
    mutated = emulator.mutate([generate(problem, plan)], file, old, new)
    kernels = emulate.Kernels(emulator.build(mutated), {(problem, plan): mutated[0]})
    x = torch.randn(21, 776, generator=torch.Generator().manual_seed(3)).bfloat16() * torch.arange(1, 22)[:, None]
    want = dequantize_act(*quantize_act(x, act), act).double() @ qw.dequantize().double().T
    sound = emulate.matmul(x, packed, act=act, out_dtype=torch.float32, arch="sm_90a", plan=plan)
    assert (sound - want).norm() / want.norm() < 2e-3
    said = ""
    try:
        y = kernels.matmul(x, packed, act=act, out_dtype=torch.float32, plan=plan)
    except LowbitError as error:
        said, y = str(error), torch.full(want.shape, torch.nan)
    assert not said or re.search("never written|deadlock|race|out of bounds|more bytes|has not been waited for", said), said
    assert not (y - want).norm() / want.norm() < 2e-3

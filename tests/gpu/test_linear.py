"""Linear on the chip: right numbers for every format and shape, and everything a serving stack does with a layer."""

import copy
import threading

import pytest
import torch
from torch import Tensor

import lowbit
from lowbit.ops.checks import DTYPES
from lowbit.ops.gemm import device_arch
from lowbit.plan.plan import rounds
from lowbit.testing.tolerance import bound, operand_rounding
from lowbit.weights import QuantWeight, WeightSpec

FORMATS = [
    "int4_g128", "int4_g32", "int4", "int8", "int8_g64", "fp8_e4m3", "fp8_e4m3_b128x128", "mxfp4", "nvfp4",
    "int1_g64", "int2_g64", "int3_g128", "int5_g32", "int6_g128", "int7", "uint4z_g128", "int8z", "int4zf_g64", "mxfp6", "fp5_e2m2_g64",
    "nf4", "nf4_c", "six(-1.1,7.0,0.5,-3.0,0.3,1.25)_g32",
]  # fmt: skip
SHAPES = [(1040, 1024), (576, 2880), (40, 136), (37, 100), (2112, 7168), (256, 10944)]


def acts() -> list[str]:
    if not torch.cuda.is_available():
        return ["fp16"]
    return ["bf16", "fp16"] if device_arch(torch.cuda.current_device()).bf16 else ["fp16"]


def make(name: str, n: int, k: int, act: str, *, bias: bool = False, seed: int = 0) -> tuple[lowbit.Linear, Tensor, Tensor | None]:
    """A layer, its exact float32 weights, and its bias."""
    random = torch.Generator("cuda").manual_seed(seed)
    qw = lowbit.quantize(torch.randn(n, k, generator=random, device="cuda") * 0.05, name)
    b = torch.randn(n, generator=random, device="cuda") if bias else None
    return lowbit.Linear(qw, bias=b, act=act), qw.dequantize(), b


def tokens(m: int, k: int, act: str, seed: int = 1) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(DTYPES[act])


def assert_right(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None, rounding: float = 0.0) -> None:
    want = x.double() @ w.double().T + (0 if bias is None else bias.double())
    excess = (y.double() - want).abs() - bound(x, w, bias, y.dtype, rounding=rounding).double()
    assert torch.isfinite(y).all()
    assert excess.max() <= 0, f"worst {excess.max().item()} at {excess.argmax().item()}"
    assert abs(y.double().norm() / want.norm() - 1) < 2e-3


def rounding(layer: lowbit.Linear, m: int) -> float:
    """What the plan for m tokens rounds of a weight."""
    told = lowbit.explain(layer, m, compiled=False)
    return operand_rounding(layer.spec, layer.act, rounds(told.problem, told.plan))


@pytest.mark.parametrize("act", acts())
@pytest.mark.parametrize("name", FORMATS)
def test_numbers(name: str, act: str) -> None:
    for n, k in SHAPES:
        layer, w, bias = make(name, n, k, act, bias=True)
        for m in (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 129, 300):
            x = tokens(m, k, act)
            assert_right(layer(x), x, w, bias, rounding(layer, m))


@pytest.mark.parametrize("act", acts())
@pytest.mark.parametrize("n", [272, 37])
def test_float32_outputs(n: int, act: str) -> None:
    qw = lowbit.quantize(torch.randn(n, 1024, generator=torch.Generator("cuda").manual_seed(0), device="cuda"), "int4_g128")
    bias = torch.randn(n, device="cuda")
    layer, narrow = (lowbit.Linear(qw, bias, act, out_dtype=out) for out in (torch.float32, None))
    for m in (1, 8, 16, 33, 65, 300):
        x = tokens(m, 1024, act)
        y = layer(x)
        assert y.dtype == torch.float32
        assert_right(y, x, qw.dequantize(), bias, rounding(layer, m))
        assert torch.equal(y.to(x.dtype), narrow(x))  # the same sums, rounded later


@pytest.mark.parametrize("act", acts())
@pytest.mark.parametrize("name", ["int4_g128", "int8", "fp8_e4m3", "mxfp4", "nvfp4"])
def test_one_hot_tokens_give_columns(name: str, act: str) -> None:
    n, k = 304, 384
    layer, w, _ = make(name, n, k, act)
    for m in (1, 8, 16, 32, 64, 128):  # every kernel of the layer
        for start in range(0, k, m):
            x = torch.zeros(m, k, device="cuda", dtype=DTYPES[act])
            columns = torch.arange(start, min(start + m, k), device="cuda")
            x[torch.arange(len(columns)), columns] = 1
            assert torch.equal(layer(x)[: len(columns)], w.T[columns].to(DTYPES[act]))


def test_every_row_and_group_has_its_own_scale() -> None:
    n, k = 272, 512
    spec = lowbit.WeightSpec.parse("int4_g128")
    codes = torch.ones(n, k, dtype=torch.uint8, device="cuda")
    exponents = (torch.arange(n * 4, device="cuda").view(n, 4) * 7) % 40 - 20
    scales = torch.exp2(exponents.float()).bfloat16()
    layer = lowbit.Linear(lowbit.QuantWeight.from_values(spec, codes, scales))
    for m in (1, 8, 16, 32, 64, 128):
        x = torch.zeros(m, k, device="cuda", dtype=torch.bfloat16)
        for row in range(m):
            x[row, row % 4 * 128 + 5] = 1
        want = torch.stack([scales[:, row % 4] for row in range(m)])
        assert torch.equal(layer(x), want)


@pytest.mark.parametrize("name", ["int4_g128_ao", "int4z_g64_ao", "uint4zf_g32_ao"])
def test_act_order_of_any_slice(name: str) -> None:
    spec, random = lowbit.WeightSpec.parse(name), torch.Generator("cuda").manual_seed(3)
    n, k = 272, 1000
    whole = lowbit.quantize(torch.randn(n, 2 * k, generator=random, device="cuda"), name)
    shuffled = whole.g_idx[0][torch.randperm(2 * k, generator=random, device="cuda")]
    for columns in (slice(0, 2 * k), slice(0, k), slice(k - 1, 2 * k)):
        codes = whole.code_values(0)[:, columns].contiguous()
        zeros = None if whole.zeros is None else whole.zeros[0]
        qw = lowbit.QuantWeight.from_values(spec, codes, whole.scales[0], zeros=zeros, g_idx=shuffled[columns].contiguous())
        layer, w = lowbit.Linear(qw), qw.dequantize()
        assert torch.equal(layer.quant_weight().dequantize(), w)
        assert torch.equal(lowbit.pack(qw.to("cpu")).units, layer.units.cpu())
        for m in (1, 8, 33, 130):
            x = tokens(m, qw.k, "bf16")
            assert_right(layer(x), x, w, rounding=rounding(layer, m))
    x = tokens(8, qw.k, "bf16")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(tokens(8, qw.k, "bf16", 2))
    graph.replay()
    assert_right(y, x, w)


def test_same_bits_two_thousand_times() -> None:
    for n, k, m in ((1040, 1024, 8), (4096, 512, 16), (4096, 4096, 16), (512, 4096, 1), (2048, 2048, 33), (1024, 1024, 130)):
        layer, _, _ = make("int4_g128", n, k, "bf16")
        x = tokens(m, k, "bf16")
        first = layer(x)
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(2000):
            bad += (layer(x) != first).any()
        assert bad.item() == 0, (n, k, m)


@pytest.mark.parametrize("name", ["int4_g128", "nvfp4", "int8"])
def test_rows_of_any_batch_have_the_same_bits(name: str) -> None:
    qw = lowbit.quantize(torch.randn(1040, 2880, generator=torch.Generator("cuda").manual_seed(0), device="cuda") * 0.05, name)
    layer = lowbit.Linear(qw, batch_invariant=True)
    x = tokens(300, 2880, "bf16")
    y = layer(x)
    for m in (1, 2, 8, 9, 16, 17, 33, 64, 65, 130):
        assert torch.equal(layer(x[:m]), y[:m])
        assert torch.equal(layer(x[100 : 100 + m]), y[100 : 100 + m])


def test_any_leading_dimensions_strides_and_alignment() -> None:
    layer, w, _ = make("int4_g128", 272, 256, "bf16")
    x = tokens(24, 256, "bf16")
    y = layer(x)
    assert layer(x.view(2, 3, 4, 256)).shape == (2, 3, 4, 272)
    assert torch.equal(layer(x.view(2, 3, 4, 256)).view(24, 272), y)
    assert torch.equal(layer(x[5]), y[5:6][0]) or torch.allclose(layer(x[5]).float(), y[5].float(), rtol=1e-2)
    wide = torch.full((24, 1000), float("nan"), device="cuda", dtype=torch.bfloat16)
    for offset in (0, 8, 1, 3):  # 16-byte aligned rows, and not
        wide[:, offset : offset + 256] = x
        assert torch.equal(layer(wide[:, offset : offset + 256]), y)
    flat = torch.empty(24 * 256 + 1, device="cuda", dtype=torch.bfloat16)
    flat[1:] = x.view(-1)
    assert torch.equal(layer(flat[1:].view(24, 256)), y)
    assert torch.equal(layer(x.repeat_interleave(2, 0)[::2]), y)
    assert torch.equal(layer(x.T.contiguous().T), y)
    assert torch.equal(layer(x[:1].expand(24, 256)), layer(x[:1].repeat(24, 1)))
    assert layer(x[:0]).shape == (0, 272)
    assert layer(x.view(2, 12, 256)[:, :0]).shape == (2, 0, 272)


def test_nan_stays_in_its_token() -> None:
    layer, w, _ = make("int4_g128", 272, 384, "bf16")
    for m in (8, 16, 64):
        x = tokens(m, 384, "bf16")
        clean = layer(x)
        x[3, 100] = float("nan")
        dirty = layer(x)
        assert dirty[3].isnan().all()
        keep = torch.arange(m, device="cuda") != 3
        assert torch.equal(dirty[keep], clean[keep])


def test_outliers_stay_finite() -> None:
    layer, w, _ = make("int4_g128", 272, 512, "bf16")
    x = tokens(8, 512, "bf16")
    x[:, ::37] *= 1e4
    assert_right(layer(x), x, w)


@pytest.mark.parametrize("m", [1, 8, 64])
def test_graph_replay_sees_new_inputs_and_reloaded_weights(m: int) -> None:
    layer, w, _ = make("int4_g128", 1040, 1024, "bf16")
    other, w2, _ = make("int4_g128", 1040, 1024, "bf16", seed=5)
    x = tokens(m, 1024, "bf16")
    layer(x)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        out = [layer(y) for _ in range(4)]
    pointer = layer.units.data_ptr()
    for seed in (2, 3):
        x.copy_(tokens(m, 1024, "bf16", seed))
        graph.replay()
        for y in out:
            assert_right(y, x, w)
    layer.load_state_dict(other.state_dict())
    assert layer.units.data_ptr() == pointer
    graph.replay()
    for y in out:
        assert_right(y, x, w2)


def test_first_capture_compiles_and_is_right() -> None:
    layer, w, _ = make("int4_g64", 528, 640, "bf16")  # a shape no other test has compiled
    x = tokens(8, 640, "bf16")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    graph.replay()
    assert_right(y, x, w)


def test_weights_written_just_before_are_read() -> None:
    """A kernel may start before the one ahead of it ends: never before a writer of weights."""
    layer, w, _ = make("int4_g128", 4096, 4096, "bf16")
    other, w2, _ = make("int4_g128", 4096, 4096, "bf16", seed=9)
    x = tokens(8, 4096, "bf16")
    ones, twos = layer(x).clone(), other(x).clone()
    units = [layer.units.clone(), other.units.clone()]
    for i in range(200):
        layer.units.copy_(units[i % 2])
        assert torch.equal(layer(x), (ones, twos)[i % 2])


def test_inputs_written_just_before_are_read() -> None:
    layer, _, _ = make("int4_g128", 4096, 1024, "bf16")
    down, _, _ = make("int4_g128", 1024, 4096, "bf16", seed=2)
    for m in (1, 8, 16, 64):
        xs = [tokens(m, 1024, "bf16", seed) for seed in range(8)]
        want = []
        for x in xs:
            torch.cuda.synchronize()
            hidden = layer(x)
            torch.cuda.synchronize()
            want.append(down(hidden))
        torch.cuda.synchronize()
        for _ in range(20):
            for x, y in zip(xs, want, strict=True):
                assert torch.equal(down(layer(x * 1)), y)


def test_streams_and_threads() -> None:
    layer, _, _ = make("int4_g128", 2048, 2048, "bf16")
    xs = [tokens(m, 2048, "bf16", m) for m in (1, 5, 8, 16)]
    want = [layer(x) for x in xs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(200):
                j = (index + i) % 4
                if not torch.equal(layer(xs[j]), want[j]):
                    wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_traced_by_inductor() -> None:
    torch._dynamo.reset()
    layer, w, bias = make("int4_g128", 512, 1024, "bf16", bias=True)
    traced = torch.compile(lambda x: layer(x) * 2, fullgraph=True, dynamic=True)
    for m in (3, 17, 64):
        x = tokens(m, 1024, "bf16")
        assert torch.equal(traced(x), layer(x) * 2)
    torch.library.opcheck(torch.ops.lowbit.gemm, (tokens(3, 1024, "bf16"), layer.units, layer.channel, layer.bias, "int4_g128", 512, "bf16", "bf16"))


@pytest.mark.parametrize("n", [272, 37])
def test_output_tensors(n: int) -> None:
    layer, w, _ = make("int4_g128", n, 1024, "bf16")
    for shape in ((1,), (8,), (3, 5), (64,), (300,), (0,)):
        x = torch.randn(*shape, 1024, device="cuda").bfloat16()
        y = torch.full((*shape, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        assert layer(x, out=y) is y
        assert torch.equal(y, layer(x))
    x, y = tokens(8, 1024, "bf16"), torch.empty(8, n, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x, out=y)
    y.zero_()
    graph.replay()
    assert_right(y, x, w)
    with pytest.raises(lowbit.BadInput, match="share memory with x"):
        layer(x, out=x.view(-1)[: 8 * n].view(8, n))
    torch._dynamo.reset()
    traced = torch.compile(lambda x, y: layer(x, out=y) * 2, fullgraph=True, dynamic=True)
    for m in (3, 17, 64):
        x, y = tokens(m, 1024, "bf16"), torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(traced(x, y), layer(x) * 2)
        assert torch.equal(y, layer(x))


def test_weights_written_by_a_layer_are_read() -> None:
    """The output of one call is the next one's packed weights: that kernel may not begin before this one ends."""
    writer, _, _ = make("int8", 4096, 4096, "bf16")
    layer, _, _ = make("int4_g128", 64, 4096, "bf16")
    y = layer.units[0, : 8 * 4096 * 2].view(torch.bfloat16).view(8, 4096)
    x = tokens(8, 4096, "bf16")
    for _ in range(50):
        xs = torch.randn(8, 4096, device="cuda").bfloat16()
        layer(x)
        writer(xs, out=y)
        got = layer(x)
        torch.cuda.synchronize()
        assert torch.equal(got.nan_to_num(), layer(x).nan_to_num())


def test_copies_moves_and_files(tmp_path) -> None:  # type: ignore[no-untyped-def]
    layer, w, bias = make("nvfp4", 272, 512, "bf16", bias=True)
    x = tokens(5, 512, "bf16")
    y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    home = copy.deepcopy(layer).to("cpu")
    assert home.units.device.type == "cpu"
    assert torch.allclose(home(x.cpu()).float(), y.cpu().float(), rtol=2e-2, atol=1e-3)
    assert torch.equal(home.to("cuda")(x), y)
    assert torch.equal(layer.half()(x), y)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    again = lowbit.Linear.empty("nvfp4", 272, 512, bias=True, device="cuda")
    again.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(again(x), y)


def test_packing_on_the_gpu_is_packing_on_the_cpu() -> None:
    for name in FORMATS:
        qw = lowbit.quantize(torch.randn(144, 512, generator=torch.Generator().manual_seed(3)), name)
        cpu, gpu = lowbit.pack(qw), lowbit.pack(qw.to("cuda"))
        assert torch.equal(cpu.units, gpu.units.cpu())
        assert torch.equal(lowbit.unpack(gpu).codes.cpu(), qw.codes)


@pytest.mark.parametrize(("n", "k", "m"), [(65536, 128, 32896), (64, 65536, 32896)], ids=["m*n > 2^31", "m*k > 2^31"])
def test_beyond_two_to_the_thirty_one_elements(n: int, k: int, m: int) -> None:
    layer, w, _ = make("int4_g128", n, k, "bf16")
    x = torch.empty(m, k, device="cuda", dtype=torch.bfloat16)
    x[:] = tokens(1, k, "bf16")
    x[-300:] = tokens(300, k, "bf16", 4)
    y = layer(x)
    assert_right(y[-300:], x[-300:], w, rounding=rounding(layer, m))
    assert_right(y[:1], x[:1], w, rounding=rounding(layer, m))


def test_beyond_two_to_the_thirty_one_weights() -> None:
    n, k, last = 262144, 8320, 300  # 4-bit codes of 1.1 GB
    random = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(-(2**31), 2**31, (1, n, k // 8), generator=random, device="cuda", dtype=torch.int32)
    scales = (torch.rand(1, n, k // 128, generator=random, device="cuda") * 0.01 + 0.005).bfloat16()
    spec = WeightSpec.parse("int4_g128")
    layer = lowbit.Linear(QuantWeight(spec, None, n, k, codes, scales))
    for rows in (slice(0, last), slice(n - last, n)):
        w = QuantWeight(spec, None, last, k, codes[:, rows].clone(), scales[:, rows].clone()).dequantize()
        for m in (1, 8, 40, 200):
            x = tokens(m, k, "bf16", m)
            assert_right(layer(x)[:, rows], x, w, rounding=rounding(layer, m))


def test_errors() -> None:
    layer, _, _ = make("int4_g128", 64, 256, "bf16")
    with pytest.raises(lowbit.BadInput, match="one device"):
        layer(torch.randn(2, 256, dtype=torch.bfloat16))
    with pytest.raises(lowbit.BadType, match=r"x must be torch\.bfloat16"):
        layer(torch.randn(2, 256, device="cuda", dtype=torch.float16))
    with pytest.raises(lowbit.BadInput, match="last dimension of x must be k=256"):
        layer(torch.randn(2, 128, device="cuda", dtype=torch.bfloat16))

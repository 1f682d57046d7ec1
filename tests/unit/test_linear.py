"""Linear and matmul on the CPU: the reference's numbers, and everything that must hold of a layer wherever it runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import lowbit
from lowbit.errors import BadInput
from lowbit.jit.cache import Cache
from lowbit.ops import checks, gemm
from lowbit.testing.tolerance import bound

FORMATS = ["int4_g128", "int8", "fp8_e4m3", "mxfp4", "nvfp4", "uint4z_g32", "int3_g64", "nf4", "fp8_e4m3_b128x128"]


def make(
    spec: str = "int4_g128", n: int = 48, k: int = 256, *, bias: bool = True, act: str = "bf16", seed: int = 0
) -> tuple[lowbit.Linear, Tensor, Tensor | None]:
    """A layer, its exact float32 weights, and its bias."""
    generator = torch.Generator().manual_seed(seed)
    qw = lowbit.quantize(torch.randn(n, k, generator=generator), spec)
    b = torch.randn(n, generator=generator) if bias else None
    return lowbit.Linear(qw, bias=b, act=act), qw.dequantize(), b


def tokens(*shape: int, act: str = "bf16") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(checks.DTYPES[act])


@pytest.mark.parametrize("act", ["bf16", "fp16"])
@pytest.mark.parametrize("spec", FORMATS)
def test_numbers_of_linear_and_matmul(spec: str, act: str) -> None:
    layer, w, b = make(spec, act=act)
    x = tokens(5, 256, act=act)
    want = x.double() @ w.double().T
    assert ((layer(x).double() - want - b.double()).abs() <= bound(x, w, b, x.dtype)).all()
    packed = layer.packed()
    assert ((lowbit.matmul(x, packed, act=act).double() - want).abs() <= bound(x, w, None, x.dtype)).all()
    assert torch.equal(lowbit.matmul(x, packed, act=act, bias=b), layer(x))
    crossed = torch.float16 if act == "bf16" else torch.bfloat16
    assert lowbit.matmul(x, packed, act=act, out_dtype=crossed).dtype == crossed
    wide = lowbit.matmul(x, packed, act=act, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert ((wide.double() - want).abs() <= bound(x, w, None, torch.float32)).all()
    assert torch.equal(lowbit.Linear(layer.quant_weight(), b, act, out_dtype=torch.float32)(x).to(x.dtype), layer(x))


def test_any_leading_dimensions_and_strides() -> None:
    layer, _, _ = make()
    x = tokens(24, 256)
    y = layer(x)
    assert torch.equal(layer(x.view(2, 3, 4, 256)), y.view(2, 3, 4, 48))
    assert layer(x[0]).shape == (48,)
    assert layer(x[:0]).shape == (0, 48)
    assert layer(x.view(2, 12, 256)[:, :0]).shape == (2, 0, 48)
    wide = torch.zeros(24, 300, dtype=torch.bfloat16)
    wide[:, 3:259] = x
    assert torch.equal(layer(wide[:, 3:259]), y)
    assert torch.equal(layer(x.T.contiguous().T), y)
    assert torch.equal(layer(x[::2]), y[::2])


def test_rows_are_views_where_a_kernel_can_read_them_and_copies_where_not() -> None:
    x = tokens(6, 256)
    wide = torch.zeros(6, 512, dtype=torch.bfloat16)
    flat = torch.zeros(6 * 256 + 1, dtype=torch.bfloat16)
    views = [x, x.view(2, 3, 256), wide[:, 8:264], x[:1].expand(1, 256), x[::2], x[1:]]
    copies = [x[:1].expand(6, 256), wide[:, 1:257], flat[1:].view(6, 256), x.T.contiguous().T, torch.zeros(6, 258, dtype=torch.bfloat16)[:, :256]]
    for given in views + copies:
        rows = gemm.rows_of(given, 256)
        assert torch.equal(rows, given.reshape(-1, 256))
        assert rows.stride(1) == 1
        assert rows.stride(0) % 8 == 0
        assert rows.data_ptr() % 16 == 0
        assert (rows.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()) == any(given is v for v in views)
    padded = gemm.rows_of(tokens(3, 100), 100)
    assert padded.shape == (3, 104)
    assert not padded[:, 100:].any()


def test_copies_moves_and_casts_keep_the_numbers() -> None:
    layer, _, _ = make("nvfp4")
    x = tokens(3, 256)
    y = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).half(), copy.deepcopy(layer).double(),
                  copy.deepcopy(layer).to(torch.bfloat16), copy.deepcopy(layer).to("cpu")):  # fmt: skip
        assert other.channel.dtype == other.bias.dtype == torch.float32
        assert torch.equal(other(x), y)
        assert other.units.data_ptr() != layer.units.data_ptr()


def test_state_dict_loads_elsewhere(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    layer, _, _ = make("nvfp4")
    x = tokens(3, 256)
    state = layer.state_dict()
    assert set(state) == {"units", "channel", "bias", "tag"}
    torch.save(state, tmp_path / "layer.pt")
    save_file(state, tmp_path / "layer.safetensors")
    for assign in (False, True):
        for loaded in (torch.load(tmp_path / "layer.pt", weights_only=True), load_file(tmp_path / "layer.safetensors")):
            empty = lowbit.Linear.empty("nvfp4", 48, 256, bias=True)
            empty.load_state_dict(loaded, assign=assign)
            assert torch.equal(empty(x), layer(x))
            assert empty.channel.data_ptr() % 16 == 0


def act_order(name: str = "int4z_g32_ao", n: int = 48, k: int = 133, *, num_groups: int = 7, seed: int = 0) -> lowbit.QuantWeight:
    """Columns of five of the groups, in any order: a slice, as tensor parallelism cuts one."""
    random, s = torch.Generator().manual_seed(seed), lowbit.WeightSpec.parse(name)
    codes = torch.randint(0, 2**s.value.bits, (n, k), generator=random).to(torch.uint8)
    zeros = {"none": None, "int": torch.randint(-8, 8, (n, num_groups), generator=random).to(torch.int16),
             "float": torch.randn(n, num_groups, generator=random)}[s.zero]  # fmt: skip
    g_idx = (torch.randint(0, 5, (k,), generator=random) + 1).int()
    return lowbit.QuantWeight.from_values(s, codes, torch.rand(n, num_groups, generator=random).to(s.scale.storage), zeros=zeros, g_idx=g_idx)


@pytest.mark.parametrize("name", ["int4_g32_ao", "int4z_g32_ao", "uint4zf_g32_ao", "fp8_e4m3_g40_ao"])
def test_act_order_multiplies_the_columns_where_they_are(name: str) -> None:
    qw = lowbit.quantize(torch.randn(48, 133), name) if "fp8" in name else act_order(name)
    layer, x = lowbit.Linear(qw), tokens(2, 3, 133)
    assert torch.equal(layer(x), lowbit.reference.matmul(x, qw))
    assert torch.equal(lowbit.matmul(x, lowbit.pack(qw)), layer(x))
    assert layer(x[0, 0]).shape == (48,)
    assert layer(x[:0]).shape == (0, 3, 48)
    assert layer.in_features == 133
    assert torch.equal(layer.quant_weight().dequantize(), qw.dequantize())
    x[1, 2, 5] = float("nan")
    y = layer(x)
    assert y[1, 2].isnan().all()
    assert torch.isfinite(y.view(6, 48)[:5]).all()
    with pytest.raises(lowbit.BadInput, match="last dimension of x must be k=133"):
        layer(tokens(2, layer.layout.packed_k))


def test_act_order_is_copied_saved_and_loaded(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    qw, x = act_order(), tokens(3, 133)
    layer = lowbit.Linear(qw, bias=torch.randn(48))
    y = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).half(), copy.deepcopy(layer).to("cpu")):
        assert torch.equal(other(x), y)
        assert other.perm.dtype == other.groups.dtype == torch.int32
    state = layer.state_dict()
    assert set(state) == {"units", "bias", "tag", "perm", "groups"}
    save_file(state, tmp_path / "layer.safetensors")
    loaded = load_file(tmp_path / "layer.safetensors")
    for assign in (False, True):
        empty = lowbit.Linear.like(loaded["tag"], bias=True)
        assert empty.layout == layer.layout
        empty.load_state_dict(loaded, assign=assign)
        assert torch.equal(empty(x), y)
    whole = lowbit.Linear(lowbit.quantize(torch.randn(48, 256), "int4_g64_ao"))
    empty = lowbit.Linear.empty("int4_g64_ao", 48, 256)  # all groups are full
    empty.load_state_dict(whole.state_dict())
    assert torch.equal(empty(tokens(3, 256)), whole(tokens(3, 256)))
    with pytest.raises(RuntimeError, match=r"this layer needs .*:k160s32'.* or Linear.like of the saved tag"):
        lowbit.Linear.empty("int4z_g32_ao", 48, 133, bias=True).load_state_dict(state)
    for name in ("perm", "groups"):
        empty = lowbit.Linear.like(layer.layout.tag, bias=True)
        with pytest.raises(RuntimeError, match=f"{name} must .*the tensor is damaged"):
            empty.load_state_dict({**state, name: state[name] + 1})
        assert not empty.units.any()
    for tag in ("int4", torch.zeros(3), layer.tag[:-1]):
        with pytest.raises(lowbit.BadInput, match=r"a layout's tag reads|steps of"):
            lowbit.Linear.like(tag)


def test_act_order_is_traced_without_graph_breaks() -> None:
    torch._dynamo.reset()
    for qw in (act_order(), lowbit.quantize(torch.randn(48, 128), "int4_g32_ao")):  # with padding and without
        layer, packed = lowbit.Linear(qw), lowbit.pack(qw)
        traced = torch.compile(lambda x, layer=layer: layer(x) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
        functional = torch.compile(lambda x, p: lowbit.matmul(x, p), fullgraph=True, dynamic=True, backend="aot_eager")
        for m in (3, 17):
            x = tokens(m, qw.k)
            assert torch.equal(traced(x), layer(x) * 2)
            assert torch.equal(functional(x, packed), layer(x))


def test_bad_state_dicts_are_refused_before_anything_is_written() -> None:
    layer, _, _ = make("nvfp4")
    good = layer.state_dict()
    changes = {
        "channel must be torch.float32": {"channel": good["channel"].half()},
        "bias must be": {"bias": good["bias"][:-1]},
        "units must be torch.uint8": {"units": good["units"].float()},
        "no layout tag": {"tag": torch.zeros(3)},
        "this layer needs 'lowbit2:nvfp4:48x256:a16'": {"tag": make("mxfp4")[0].tag},
        "no layout tag.*": {"tag": good["tag"].view(1, -1)},
    }
    for message, change in changes.items():
        for assign in (False, True):
            empty = lowbit.Linear.empty("nvfp4", 48, 256, bias=True)
            with pytest.raises(RuntimeError, match=message):
                empty.load_state_dict({**good, **change}, assign=assign)
            assert not empty.units.any(), message
    for name in ("units", "channel", "bias"):
        for strict in (True, False):
            empty = lowbit.Linear.empty("nvfp4", 48, 256, bias=True)
            with pytest.raises(RuntimeError, match=f"loaded whole; missing: {name}; not of this layer: nothing"):
                empty.load_state_dict({k: v for k, v in good.items() if k != name}, strict=strict)
            assert not empty.units.any()
            assert not empty.bias.any()
    empty = lowbit.Linear.empty("nvfp4", 48, 256)
    with pytest.raises(RuntimeError, match="missing: nothing; not of this layer: bias"):
        empty.load_state_dict(good)
    assert not empty.units.any()


def test_no_memory_is_shared_with_what_a_layer_was_made_of() -> None:
    for spec in ("int4_g32_s2c", "int8", "nvfp4", "int4_g32"):
        qw = lowbit.quantize(torch.randn(48, 256), spec)
        layer = lowbit.Linear(qw)
        x = tokens(3, 256)
        y = layer(x)
        again = layer.quant_weight()
        for weight in (qw, again):
            for t in (weight.codes, weight.scales, weight.scale2):
                if t is not None:
                    t.zero_()
        assert torch.equal(layer(x), y)


def test_runner_refuses_replaced_tensors_that_kernels_cannot_read() -> None:
    layout = gemm.Layout(lowbit.WeightSpec.parse("nvfp4"), 48, 256)
    runner = gemm.Runner.__new__(gemm.Runner)
    runner.layout, runner.index = layout, -1  # what get_device says of CPU tensors
    packed = make("nvfp4")[0].packed()
    bias = torch.zeros(64)[:48]
    runner._check(packed.units, packed.channel, bias)
    bad = [
        (packed.units.float(), packed.channel, bias), (packed.units, packed.channel.half(), bias), (packed.units, packed.channel, bias.half()),
        (packed.units[:, 16:], packed.channel, bias), (packed.units, packed.channel, torch.zeros(64)[1:49]), (packed.units, None, bias),
        (packed.units, packed.channel, torch.zeros(48, 2)[:, 0]),
    ]  # fmt: skip
    for tensors in bad:
        with pytest.raises(lowbit.BadInput, match=r"must be contiguous|packed bytes"):
            runner._check(*tensors)


def test_empty_has_float32_tensors_whatever_the_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = lowbit.Linear.empty("int8", 16, 64, bias=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.channel.dtype == layer.bias.dtype == torch.float32


def test_traced_without_graph_breaks_for_any_number_of_tokens() -> None:
    for spec in ("int4_g128", "nvfp4"):
        torch._dynamo.reset()
        layer, _, b = make(spec)
        packed = layer.packed()
        traced = torch.compile(lambda x, layer=layer: layer(x) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
        functional = torch.compile(lambda x, p, b: lowbit.matmul(x, p, bias=b), fullgraph=True, dynamic=True, backend="aot_eager")
        for m in (3, 17, 4):
            x = tokens(m, 256)
            assert torch.equal(traced(x), layer(x) * 2)
            assert torch.equal(functional(x, packed, b), layer(x))
        torch.library.opcheck(torch.ops.lowbit.gemm, (tokens(3, 256), layer.units, layer.channel, layer.bias, spec, 48, "bf16", "bf16"))


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_output_tensor_of_the_caller_is_written_and_returned(out_dtype: torch.dtype | None) -> None:
    qw = lowbit.quantize(torch.randn(48, 256, generator=torch.Generator().manual_seed(0)), "nvfp4")
    bias = torch.randn(48)
    layer = lowbit.Linear(qw, bias, out_dtype=out_dtype)
    for shape in ((5,), (2, 3), (), (0,), (2, 0)):
        x = tokens(*shape, 256)
        want = layer(x)
        for call in (layer, lambda x, out: lowbit.matmul(x, layer.packed(), bias=bias, out_dtype=out_dtype, out=out)):
            y = torch.full_like(want, torch.nan)
            version = y._version
            assert call(x, out=y) is y
            assert torch.equal(y, want)
            assert y._version > version
    table = torch.zeros(7, 48, dtype=want.dtype)
    x = tokens(2, 256)
    layer(x, out=table[3:5])  # rows of a larger tensor
    assert torch.equal(table[3:5], layer(x))
    assert table.count_nonzero() == table[3:5].count_nonzero()
    with torch.inference_mode():
        assert torch.equal(layer(x, out=torch.empty_like(table[:2])), layer(x))
    with torch.no_grad():
        layer(x, out=table[:2].clone().requires_grad_())


def test_output_tensors_are_traced_without_graph_breaks() -> None:
    torch._dynamo.reset()
    layer, _, bias = make("nvfp4")
    packed = layer.packed()

    def into(x: Tensor, y: Tensor) -> Tensor:
        return layer(x, out=y) * 2 + lowbit.matmul(x, packed, bias=bias, out=torch.empty_like(y))

    traced = torch.compile(into, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (3, 17, 4):
        x, y = tokens(m, 256), torch.zeros(m, 48, dtype=torch.bfloat16)
        assert torch.equal(traced(x, y), layer(x) * 2 + layer(x))
        assert torch.equal(y, layer(x))
    arguments = (tokens(3, 256), layer.units, layer.channel, layer.bias, "nvfp4", 48, "bf16", "bf16")
    torch.library.opcheck(torch.ops.lowbit.gemm_into, (*arguments, torch.zeros(3, 48, dtype=torch.bfloat16)))
    with pytest.raises(lowbit.BadInput, match="share memory with the packed weights"):
        torch.ops.lowbit.gemm_into(*arguments, layer.units[0, :288].view(torch.bfloat16).view(3, 48))
    with pytest.raises(Exception, match=r"must have the shape of the result, \(3, 48\)"):
        torch.compile(lambda x, y: layer(x, out=y), fullgraph=True, backend="aot_eager")(tokens(3, 256), torch.zeros(3, 47).bfloat16())


def plain(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("make_out", "error", "message"),
    [
        (lambda layer, x: [1.0], lowbit.BadType, "out must be a tensor; got list"),
        (lambda layer, x: plain(2, 48).half(), lowbit.BadType, r"must be torch\.bfloat16, the output type; got torch\.float16: give out_dtype"),
        (lambda layer, x: plain(48), lowbit.BadInput, r"shape of the result, \(2, 48\); got \(48,\)"),
        (lambda layer, x: plain(2, 47), lowbit.BadInput, r"got \(2, 47\)"),
        (lambda layer, x: plain(2, 48).to("meta"), lowbit.BadInput, "on the device of x, cpu; got meta"),
        (lambda layer, x: plain(48, 2).T, lowbit.BadInput, r"contiguous; got strides \(1, 2\)"),
        (lambda layer, x: plain(2, 56)[:, :48], lowbit.BadInput, "contiguous"),
        (lambda layer, x: plain(97)[1:].view(2, 48), lowbit.BadInput, "multiple of 16 bytes"),
        (lambda layer, x: plain(2, 48).requires_grad_(), lowbit.BadInput, "no gradients and out requires one"),
        (lambda layer, x: x.view(-1)[:96].view(2, 48), lowbit.BadInput, "share memory with x, which is read"),
        (lambda layer, x: x.view(-1)[416:512].view(2, 48), lowbit.BadInput, "share memory with x"),
        (lambda layer, x: layer.units[0, 64:256].view(torch.bfloat16).view(2, 48), lowbit.BadInput, "share memory with the packed weights"),
        (lambda layer, x: layer.channel.view(torch.bfloat16).view(2, 48), lowbit.BadInput, "share memory with the channel scales"),
        (lambda layer, x: layer.bias.view(torch.bfloat16).view(2, 48), lowbit.BadInput, "share memory with the bias"),
    ],
)  # fmt: skip
def test_output_tensors_that_cannot_be_written_are_refused(make_out: Any, error: type[Exception], message: str) -> None:
    layer, _, bias = make("nvfp4")
    layer.bias = bias
    x = tokens(2, 256)
    before = copy.deepcopy(layer.state_dict())
    out = make_out(layer, x)
    with pytest.raises(error, match=message):
        layer(x, out=out)
    with pytest.raises(error, match=message):
        lowbit.matmul(x, layer.packed(), bias=bias, out=out)
    assert all(torch.equal(t, before[name]) for name, t in layer.state_dict().items())


def test_neighbours_in_one_buffer_do_not_overlap() -> None:
    layer, _, _ = make()
    buffer = torch.zeros(2 * 256 + 2 * 48, dtype=torch.bfloat16)
    buffer[:512] = tokens(2, 256).view(-1)
    x, y = buffer[:512].view(2, 256), buffer[512:].view(2, 48)
    assert torch.equal(layer(x, out=y), layer(x))


def test_weights_may_be_read_early_only_if_nothing_may_just_have_written_them(monkeypatch: pytest.MonkeyPatch) -> None:
    units, channel, bias = torch.zeros(4), torch.ones(4), torch.ones(4)
    capturing = False
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing, raising=False)

    def now(stream: int = 1, channel: Tensor | None = channel, bias: Tensor | None = bias) -> Any:
        return gemm._seen_now(stream, units, channel, bias)

    seen = now()
    assert not gemm._settled(now(), None)
    assert gemm._settled(now(), seen)
    assert not gemm._settled(now(stream=2), seen)
    assert not gemm._settled(now(bias=torch.ones(4)), seen)
    assert not gemm._settled(now(bias=None), seen)
    assert not gemm._settled(now(channel=torch.ones(4)), seen)
    for t in (units, channel, bias):
        t.mul_(2)
        assert not gemm._settled(now(), seen)
        seen = now()
        assert gemm._settled(now(), seen)
    capturing = True
    assert gemm._settled(now(stream=2), seen)
    bias.add_(1)
    assert not gemm._settled(now(stream=2), seen)
    with torch.inference_mode():
        assert gemm._seen_now(1, torch.zeros(4), None, None) is None
    layer, _, _ = make()
    setattr(layer.units, gemm._SEEN, seen)
    layer.weights_changed()
    assert not hasattr(layer.units, gemm._SEEN)


def test_a_copied_or_saved_layer_has_been_seen_by_no_call() -> None:
    """Addresses and versions repeat in another process; what stands in a file says nothing about the kernels ahead of the next call."""
    layer, _, _ = make()
    setattr(layer.units, gemm._SEEN, gemm._seen_now(1, layer.units, layer.channel, layer.bias))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert getattr(other.units, gemm._SEEN, None) is None
    assert getattr(layer.units, gemm._SEEN) is not None


def test_bias_is_read_at_multiples_of_16_bytes() -> None:
    for given in (torch.randn(100)[1:65], torch.randn(64, 2)[:, 1], torch.randn(64).bfloat16()):
        got = gemm.aligned(gemm.check_bias(given, 64))
        assert torch.equal(got, given.float())
        assert got.data_ptr() % 16 == 0
        assert got.is_contiguous()
    kept = torch.randn(64)
    layer = lowbit.Linear(lowbit.quantize(torch.randn(64, 64), "int8"), bias=kept)
    kept.zero_()
    assert layer.bias.abs().sum() > 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda layer: layer(torch.zeros(2, 256)), lowbit.BadType, r"x must be torch\.bfloat16 for act='bf16'; got torch\.float32: convert x$"),
        (lambda layer: layer(torch.zeros(2, 256, dtype=torch.float16)), lowbit.BadType, "build the layer with act='fp16'"),
        (lambda layer: layer(tokens(2, 128)), lowbit.BadInput, r"last dimension of x must be k=256; got x of shape \(2, 128\)"),
        (lambda layer: layer(torch.zeros((), dtype=torch.bfloat16)), lowbit.BadInput, "last dimension of x"),
        (lambda layer: layer([1.0]), lowbit.BadType, "x must be a tensor; got list"),
        (lambda layer: layer(tokens(2, 256).requires_grad_()), lowbit.BadInput, "computes no gradients"),
        (lambda layer: layer(tokens(2, 256).to("meta")), lowbit.BadInput, "one device; got x on meta"),
        (lambda layer: lowbit.Linear(torch.zeros(4, 4)), lowbit.BadType, "Linear takes a QuantWeight"),
        (lambda layer: lowbit.Linear(layer.quant_weight(), act="fp8"), lowbit.Unsupported, "act must be one of bf16, fp16; got 'fp8'"),
        (lambda layer: lowbit.Linear(layer.quant_weight(), out_dtype=torch.float64), lowbit.BadType, r"out_dtype .*float32; got torch\.float64"),
        (lambda layer: lowbit.Linear(layer.quant_weight(), bias=torch.zeros(47)), lowbit.BadInput, r"bias must have shape \(48,\); got \(47,\)"),
        (lambda layer: lowbit.Linear(layer.quant_weight(), bias=torch.zeros(48, dtype=torch.int64)), lowbit.BadType, "bias must be a float tensor"),
        (lambda layer: lowbit.Linear(layer.quant_weight(), bias=torch.zeros(48, device="meta")), lowbit.BadInput, "one device"),
        (lambda layer: lowbit.Linear(lowbit.quantize(torch.ones(2, 4, 16), "int8")), lowbit.BadInput, "takes one weight .N, K.; got 2 experts"),
        (lambda layer: lowbit.Linear.empty("int4_g12x", 8, 8), lowbit.UnknownSpec, "did you mean 'int4_g128'"),
        (lambda layer: lowbit.matmul(tokens(2, 256), lowbit.pack(lowbit.quantize(torch.ones(2, 4, 256), "int8"))), lowbit.BadInput, "got 2 experts"),
        (lambda layer: lowbit.matmul(tokens(2, 256), layer.quant_weight()), lowbit.BadType, "matmul takes a PackedWeight, as lowbit.pack returns"),
        (lambda layer: lowbit.matmul(tokens(2, 256), lowbit.pack(layer.quant_weight(), 8)), lowbit.BadInput, "packed for 16-bit operands"),
        (lambda layer: lowbit.pack(layer), lowbit.BadType, "pack takes a QuantWeight"),
        (lambda layer: lowbit.unpack(layer.quant_weight()), lowbit.BadType, "unpack takes a PackedWeight"),
        (lambda layer: lowbit.Linear(layer.quant_weight(), bias=torch.full((48,), torch.nan)), lowbit.BadInput, "bias must be finite; got nan"),
        (lambda layer: lowbit.QuantWeight.from_values("int8", [1], torch.ones(1, 1)), lowbit.BadType, "codes must be a tensor; found list"),
        (lambda layer: lowbit.WeightSpec.parse("cb(1,)_g32"), lowbit.UnknownSpec, "a codebook is written"),
        (lambda layer: gemm.gemm_op(tokens(2, 256), layer.units[:, 16:], None, None, "int4_g128", 48, "bf16", "bf16"), lowbit.BadInput, "units"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(call: Any, error: type[Exception], message: str) -> None:
    layer, _, _ = make()
    with pytest.raises(error, match=message):
        call(layer)


def test_layers_on_a_gpu_are_refused_at_construction(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Without a compiler, with frozen kernels missing, and for what no kernel computes; the device is pretended."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    gemm.device_arch.cache_clear()
    gemm.runner.cache_clear()
    spec = lowbit.WeightSpec.parse("int4_g128")
    try:
        monkeypatch.setenv("LOWBIT_COMPILER", str(tmp_path / "nothing"))
        with pytest.raises(lowbit.Unsupported, match="LOWBIT_COMPILER names"):
            gemm.runner(spec, 48, 256, "bf16", "bf16", 0)
        monkeypatch.setenv("LOWBIT_NO_JIT", "1")
        with pytest.raises(lowbit.MissingKernel, match="int4_g128 x bf16"):
            gemm.runner(spec, 48, 256, "bf16", "bf16", 0)
        frozen = gemm.Runner(gemm.Layout(spec, 48, 256), "bf16", "bf16", 0)
        kernels = {"get": lambda self, source, compiler=None: source.text.count("kTokens = 8;") or None}
        monkeypatch.setattr(Cache, "get", kernels["get"])
        frozen.check_compiler()  # one bucket is enough
        with pytest.raises(lowbit.Unsupported, match="multiples of 16"):
            gemm.runner(lowbit.WeightSpec.parse("int4_g40"), 48, 256, "bf16", "bf16", 0)
    finally:
        gemm.device_arch.cache_clear()
        gemm.runner.cache_clear()


def test_weights_packed_for_another_operand_width_are_refused() -> None:
    """Their bytes are as many, but lie elsewhere: a layer that took them would give wrong numbers."""
    packed = lowbit.pack(lowbit.quantize(torch.randn(48, 256), "int4_g128"), 8)
    for build in (lambda: lowbit.Linear.like(packed.layout.tag), lambda: lowbit.Linear.like(packed.layout)):
        with pytest.raises(BadInput, match=r"weights packed for 16-bit operands; .* is for 8 bits"):
            build()


@pytest.mark.parametrize(("name", "change", "words"), [
    ("units", lambda t: [1, 2], "units must be a tensor with data; got list"),
    ("units", lambda t: t.to("meta"), "units must be a tensor with data; got a meta tensor"),
    ("bias", lambda t: None, "bias must be a tensor with data; got NoneType"),
    ("bias", lambda t: t * float("nan"), "bias must be finite; got nan"),
    ("channel", lambda t: t / 0, "channel must be finite; got inf"),
    ("perm", lambda t: t.to("meta"), "perm must be a tensor with data; got a meta tensor"),
    ("perm", lambda t: torch.zeros_like(t), "perm must hold each of the 256 columns once"),
])  # fmt: skip
@pytest.mark.parametrize("assign", [False, True])
def test_a_damaged_state_dict_changes_nothing(name: str, change: Callable[[Tensor], object], words: str, assign: bool) -> None:
    spec = {"channel": "int8", "perm": "int4_g128_ao"}.get(name, "int4_g128")
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(1)).abs() + 0.1
    layer, other = (lowbit.Linear(lowbit.quantize(w, spec), bias=torch.ones(48)) for w in (weight, weight * 2))
    before = {key: t.clone() for key, t in layer.state_dict().items()}
    state = other.state_dict()
    state[name] = change(state[name])
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=words):
            layer.load_state_dict(dict(state), strict=strict, assign=assign)
        assert all(torch.equal(t, before[key]) for key, t in layer.state_dict().items())


def test_an_output_over_the_order_of_columns_is_refused() -> None:
    layer = lowbit.Linear(lowbit.quantize(torch.randn(64, 256), "int4_g128_ao"))
    over = layer.perm.view(torch.bfloat16)[:256].view(4, 64)
    with pytest.raises(BadInput, match="out must not share memory with the order of columns"):
        layer(torch.ones(4, 256, dtype=torch.bfloat16), out=over)

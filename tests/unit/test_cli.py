"""The command line: what inspect and warmup print, for people and for programs, and how errors look."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jit_fakes import count_compiles, write_compiler_command
from needs import needs_compiler
from safetensors.torch import save_file

import lowbit
from lowbit.arch import ARCHS
from lowbit.cli import inspect, main
from lowbit.cli.options import table
from lowbit.problem import unsupported
from lowbit.weights import WeightSpec

ROOT = Path(__file__).resolve().parents[2]


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspect", "--spec", "int4_g128x"), "did you mean 'int4_g128'"),
        (("inspect", "--spec", "fp8_e6m1", "--act", "fp16"), "beyond fp16's 65504: use act='bf16'"),
        (("inspect", "--arch", "sm_60"), "arch must be one of sm_75"),
        (("inspect", "--arch", "sm_75"), "use act='fp16'"),
        (("inspect", "--act", "fp9"), "act must be one of bf16, fp16"),
        (("warmup",), "name the layers"),
        (("warmup", "--spec", "int8"), "--spec and --shape go together"),
        (("warmup", "--weights", "/nonexistent"), "must be a safetensors file"),
        (("warmup", "--spec", "int8", "--shape", "64x64", "--arch", "sm_80", "--max-m", "0"), "at least 1; got 0"),
        (("warmup", "--spec", "int8", "--shape", "64x64", "--out", "fp64"), "output must be one of bf16, fp16, fp32"),
        (("inspect", "--out", "e4m3"), "output must be one of bf16, fp16, fp32"),
        (("demo", "--model", "/nonexistent"), "must be a safetensors file"),
    ],
    ids=lambda value: "_".join(value).replace("/", "") if isinstance(value, tuple) else "",
)
def test_error_is_one_line_and_code_2(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    found = capsys.readouterr()
    last = found.err.rstrip("\n").splitlines()[-1]
    assert last.startswith(f"lowbit {arguments[0]}: ")
    assert words in last
    assert "Traceback" not in found.err
    assert found.out == ""


@pytest.mark.parametrize("text", ["4096", "4096x", "0x16", "axb", "1x2x3", "-1x5"])
def test_bad_shape_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["inspect", f"--shape={text}"])
    assert end.value.code == 2
    assert f"such as 4096x14336; got '{text}'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1,x", "-1"])
def test_bad_number_of_tokens_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["inspect", f"--m={text}"])
    assert end.value.code == 2
    assert "numbers of tokens are positive" in capsys.readouterr().err


def test_command_is_required_and_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"lowbit {lowbit.__version__}\n"


def test_reader_that_leaves_early_causes_no_traceback() -> None:
    command = [sys.executable, "-m", "lowbit.cli", "inspect", "--arch", "sm_90a", "--m", "1", "--all", "--no-compile"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("int4_g128: 4-bit int4")
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait()


# ---- inspect --------------------------------------------------------------------------------------------------------


def test_inspect_json_holds_the_layout_and_a_plan_for_every_m(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("inspect", "--spec", "nvfp4", "--shape", "100x300", "--m", "1,70", "--arch", "sm_80", "--no-compile")
    found = json.loads(output(capsys, *arguments, "--json"))
    units = 7 * 3  # blocks of 16 rows x blocks of 128 k
    assert found["layout"] == {
        "tag": "lowbit2:nvfp4:100x300:a16",
        "row_blocks": 7,
        "k_blocks": 3,
        "unit_bytes": 1024 + 16 * 8,
        "code_bytes": 1024,
        "scale_bytes": 16 * 8,
        "zero_bytes": 0,
        "channel_bytes": 400,
        "total_bytes": units * 1152 + 400,
    }
    assert [plan["m"] for plan in found["plans"]] == [1, 70]
    for plan in found["plans"]:
        assert plan["bytes_moved"] == units * 1152 + 400 + 2 * plan["m"] * (304 + 100)
        assert plan["floor_us"] == pytest.approx(plan["bytes_moved"] / 1750e3)
        assert "source" not in plan
    everything = json.loads(output(capsys, *arguments, "--json", "--all", "--source"))
    for plan in everything["plans"]:
        assert all(refused["reasons"] for refused in plan["refused"])
        assert "#include" in plan["source"]


def test_inspect_text_shows_layout_plan_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("inspect", "--shape", "4096x4096", "--m", "7,8", "--arch", "sm_90a", "--no-compile")
    text = output(capsys, *arguments)
    assert "256 x 32 units of 1056 bytes (1024 codes, 32 scales, 0 zero points)" in text
    assert "8,650,752 bytes in all, 4.125 bits a weight" in text
    assert text.count("  plan ") == 2
    assert "struct Config" not in text
    source = output(capsys, *arguments, "--source")
    assert source.count("struct Config") == 1  # M = 7 and 8 share a kernel
    assert "static constexpr u32 kN = 4096;" in source
    assert "using Out = lowbit::Bf16;" in source
    wide = output(capsys, *arguments, "--source", "--out", "fp32")
    assert "using Out = lowbit::F32;" in wide
    floors = [int(re.findall(r"floor .*?: ([\d,]+) bytes", t)[0].replace(",", "")) for t in (text, wide)]
    assert floors[1] - floors[0] == 2 * 7 * 4096
    assert len(output(capsys, *arguments, "--all").splitlines()) > len(text.splitlines()) + 10


@needs_compiler
def test_inspect_compiles_and_reports(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    arguments = ("inspect", "--spec", "int8", "--shape", "64x128", "--m", "1", "--arch", "sm_80", "--json")
    (plan,) = json.loads(output(capsys, *arguments))["plans"]
    assert 16 <= plan["registers"] <= 255
    assert plan["compile_seconds"] > 0
    assert plan["compiler"]
    assert list(tmp_path.rglob("kernel.cubin"))


def test_table_is_what_the_code_supports(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "inspect", "--table").splitlines()
    assert lines[0] == "| weights | " + " | ".join(ARCHS) + " |"
    rows = {cells[0]: dict(zip(ARCHS, cells[1:], strict=True)) for cells in (line.strip("| ").split(" | ") for line in lines[2:])}
    assert list(rows) == list(inspect.TABLE_FORMATS)
    for name, cells in rows.items():
        for arch, cell in cells.items():
            acts = [act for act in ("bf16", "fp16") if not unsupported(WeightSpec.parse(name), act, ARCHS[arch])]
            assert cell == (" ".join(acts) or "-")
    assert rows["int4_g128"]["sm_75"] == "fp16"
    found = json.loads(output(capsys, "inspect", "--table", "--json"))
    for name, cells in rows.items():
        for arch, cell in cells.items():
            assert found[name][arch]["acts"] == [act for act in cell.split() if act != "-"]
            assert cell != "-" or found[name][arch]["reasons"]


def test_brief_table_has_a_row_per_family_and_a_column_per_kind_of_chip(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "inspect", "--table", "--brief").splitlines()
    assert lines[0] == "| weights | " + " | ".join(inspect.COLUMNS) + " |"
    assert len(lines) == 2 + len(inspect.families())
    assert lines[2].endswith(" | fp16 | bf16, fp16 | bf16, fp16 | bf16, fp16 | bf16, fp16 |")


def test_columns_line_up() -> None:
    assert table([["a", "value"], ["long name", "1"]], left=1) == "a          value\nlong name      1"


# ---- warmup ---------------------------------------------------------------------------------------------------------


@needs_compiler
def test_warmup_freezes_for_chips_that_are_not_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ("warmup", "--spec", "int8", "--shape", "64x128", "--arch", "sm_80", "--arch", "sm_90a", "--max-m", "8")
    rows = json.loads(output(capsys, *arguments, "--freeze", str(tmp_path), "--json"))
    assert {row["arch"] for row in rows} == {"sm_80", "sm_90a"}
    assert len(list(tmp_path.rglob("kernel.cubin"))) == len(rows) >= 2
    text = output(capsys, *arguments, "--freeze", str(tmp_path))
    assert text.splitlines()[-1] == f"{len(rows)} kernels for 1 layer kinds on 2 chips in {tmp_path}"


def test_another_makers_chip_is_planned_anywhere_and_compiled_by_its_own_compiler(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LOWBIT_COMPILER", raising=False)
    text = output(capsys, "inspect", "--shape", "4096x4096", "--m", "1", "--arch", "zhenwu_810e:60")
    assert "zhenwu_810e (T-Head Zhenwu 810E, 60 SMs)" in text
    assert "not compiled: kernels for zhenwu_810e come from its maker's own compiler, and LOWBIT_COMPILER is not set" in text
    arguments = ("warmup", "--spec", "int8", "--shape", "64x128", "--arch", "zhenwu_810e", "--max-m", "16", "--json")
    frozen = ("--freeze", str(tmp_path / "kernels"))
    assert main([*arguments, *frozen]) == 2
    assert "LOWBIT_COMPILER is not set" in capsys.readouterr().err
    command = write_compiler_command(tmp_path / "ppucc")
    monkeypatch.setenv("LOWBIT_COMPILER", str(command))
    rows = json.loads(output(capsys, *arguments, *frozen))
    assert {(row["arch"], row["compiler"]) for row in rows} == {("zhenwu_810e", "ppucc 1.0")}
    assert count_compiles(command) == len(rows) >= 2
    monkeypatch.delenv("LOWBIT_COMPILER")  # frozen kernels need no compiler
    assert [row["label"] for row in json.loads(output(capsys, *arguments, *frozen))] == [row["label"] for row in rows]


@needs_compiler
def test_warmup_reads_the_layouts_of_saved_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({name: lowbit.Linear(lowbit.quantize(torch.ones(n, 128), s)) for name, s, n in
                                 (("a", "int8", 32), ("b", "mxfp4", 48), ("c", "int8", 32))})  # fmt: skip
    path = tmp_path / "layers.safetensors"
    save_file(model.state_dict(), path)
    arguments = ("warmup", "--weights", str(path), "--arch", "sm_80", "--max-m", "1", "--freeze", str(tmp_path / "k"), "--json")
    labels = [row["label"] for row in json.loads(output(capsys, *arguments))]
    assert sorted(label.partition(" (")[0] for label in labels) == ["int8 x bf16 -> bf16, 32x128", "mxfp4 x bf16 -> bf16, 48x128"]


def test_warmup_refuses_files_without_layers_and_other_layouts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(2, 2)}, path)
    assert main(["warmup", "--weights", str(path), "--arch", "sm_80"]) == 2
    assert "holds no lowbit layers" in capsys.readouterr().err
    save_file({"tag": torch.tensor(list(b"lowbit999:int8:32x128:a16"), dtype=torch.uint8)}, path)
    assert main(["warmup", "--weights", str(path), "--arch", "sm_80"]) == 2
    assert "a layout's tag reads lowbit2:<spec>" in capsys.readouterr().err


def test_warmup_without_a_gpu_asks_for_the_arch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["warmup", "--spec", "int8", "--shape", "64x128"]) == 2
    assert "there is no GPU here: name the arch" in capsys.readouterr().err

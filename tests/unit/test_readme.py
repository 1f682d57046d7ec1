"""README and ARCHITECTURE tell the truth: the example runs; commands, options and files exist; the table is the code's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowbit
from lowbit.arch import ARCHS
from lowbit.cli import inspect, main
from lowbit.dtypes import dtype, dtype_names
from lowbit.testing.cases import CODEBOOKS, INTEGERS, SCALES
from lowbit.weights import WeightSpec

USER = {name.partition("(")[0] for name in CODEBOOKS if "(" in name}

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text("utf-8")


def test_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "LOWBIT_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 0, done.stderr
    errors = re.match(r"kernel error (\S+), quantisation error (\S+)\n", done.stdout)
    assert errors is not None
    assert 0 < float(errors[1]) < 2**-8  # one rounding to bf16
    assert 0.05 < float(errors[2]) < 0.2  # 4 bits
    assert "use act='fp16'" in done.stdout
    assert "int4_g128 x bf16 -> bf16, 1024x4096, M = 4, sm_90a" in done.stdout
    assert len(code.splitlines()) <= 25


def helps(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return capsys.readouterr().out


def test_commands_and_their_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    calls = re.findall(r"`lowbit (\w+)([^`]*)`", README + ARCHITECTURE)
    assert {"demo", "bench", "tune", "inspect", "warmup"} == {command for command, _ in calls}
    for command, rest in calls:
        text = helps(command, capsys)
        for option in re.findall(r"--[\w-]+", rest):
            assert option in text, (command, option)


def test_commands_run_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that inspect, which cost nothing; compiling is left out."""
    for rest in re.findall(r"`lowbit (inspect [^`]*)`", README):
        assert main([*rest.split(), *(["--no-compile"] if "--table" not in rest else [])]) == 0
        assert capsys.readouterr().out


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"^make ([\w-]+)|`make ([\w-]+)", README, re.MULTILINE))
    assert {a or b for a, b in named} <= targets
    assert {"setup", "demo", "test", "check", "test-gpu", "clean"} <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_named_files_exist() -> None:
    text = README + ARCHITECTURE
    for name in set(re.findall(r"`((?:lowbit|emulator|docs|tests)/[\w/.]+|\w+\.md)`", text)):
        assert (ROOT / name).exists(), name


def test_architecture_names_every_module() -> None:
    (tree,) = re.findall(r"## Tree\n\n(.*?)\n\n[A-Z]", ARCHITECTURE, re.DOTALL)
    for path in sorted((ROOT / "lowbit").rglob("*.py")):
        if not path.name.startswith("__") and path.parent.name != "quantize":
            assert re.search(rf"\b{path.stem}\b", tree), path


def test_support_table_is_what_the_code_says() -> None:
    """After a change: `lowbit inspect --table --brief`, between the two marks."""
    (table,) = re.findall(r"<!-- lowbit inspect --table --brief -->\n(.*?)\n<!-- end of the table -->", README, re.DOTALL)
    assert table == inspect.support_summary()


def test_support_table_has_every_chip_format_and_scale() -> None:
    assert sorted(name for names in inspect.COLUMNS.values() for name in names) == sorted(ARCHS)
    specs = [WeightSpec.parse(name) for names in inspect.families().values() for name in names]
    weights = [n for n in dtype_names() if dtype(n).bits <= 8 and (not dtype(n).is_float or dtype(n).signed)]
    assert {spec.value for spec in specs if spec.value.name not in USER} == {dtype(name) for name in weights}
    assert {spec.value.name for spec in specs} >= USER
    for zero in ("none", "int", "float"):
        assert {spec.value for spec in specs if spec.value.is_int and spec.zero == zero} == {dtype(n) for n in INTEGERS}
    assert {"mxfp4", "mxfp6", "mxfp8", "mxint8", "nvfp4", "nf4"} <= set(map(str, specs))
    (scales,) = re.findall(r"or per block of rows x k \| ([\w, ]*);", README)
    assert {dtype(name) for name in scales.split(", ")} == {dtype(name) for name in SCALES}
    assert {(spec.rows, spec.k) for spec in specs} >= {(0, 0), (1, 0), (1, 16), (1, 256), (128, 128)}


def test_answers_differ_only_as_the_table_says() -> None:
    """The title of each row speaks for all of its formats: asked one by one, on the chips at both ends of every column."""
    for names in inspect.families().values():
        for column in inspect.COLUMNS.values():
            answers = {tuple(act for act in ("bf16", "fp16") if not lowbit.supports(name, act, chip)) for name in names for chip in column}
            assert len(answers) == 1, (names, column, answers)

"""README and ARCHITECTURE tell the truth: the example runs; commands, options and files exist; the table is the code's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowbit
from lowbit.arch import ARCHS
from lowbit.cli import main

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
    assert {"demo", "inspect", "warmup"} == {command for command, _ in calls}
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


COLUMNS = {"sm_75": ["sm_75"], "sm_80 to 89": ["sm_80", "sm_86", "sm_87", "sm_89"], "sm_90a": ["sm_90a"],
           "sm_100a to 121a": ["sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"], "zhenwu_810e": ["zhenwu_810e"]}  # fmt: skip
ROWS = {
    "`int4`, `int8`": ["int4", "int4_t", "int4_g16", "int4_g128", "int8", "int8_t", "int8_g16", "int8_b32x64"],
    "`int1` to `int7`, `uint1` to `uint8`, integer or float zero points": [
        f"{kind}{bits}{zero}_g64" for kind in ("int", "uint") for bits in range(1, 9) for zero in ("", "z", "zf")
    ],
    "`fp8_e4m3`, `mxfp8`, `mxfp4`, `nvfp4`": ["fp8_e4m3", "fp8_e4m3_t", "fp8_e4m3_b128x128", "mxfp4", "mxfp8", "nvfp4"],
    "floats of 3 to 8 bits that fit fp16, `mxfp6`, `mxint8`": ["fp3_e1m1", "fp5_e2m2_g64", "fp8_e5m2", "fp8_e3m4", "mxfp6", "mxint8"],
    "floats beyond fp16, such as `fp8_e6m1`": ["fp8_e6m1", "fp8_e7m0", "fp7_e5m1"],
}


def test_support_table_is_what_the_code_says() -> None:
    lines = [line.strip("| ").split(" | ") for line in README.splitlines() if line.startswith("| ")]
    start = next(i for i, cells in enumerate(lines) if cells[:2] == ["weights", "scales"])
    assert lines[start][2:] == list(COLUMNS)
    assert sorted(name for names in COLUMNS.values() for name in names) == sorted(ARCHS)
    assert [cells[0] for cells in lines[start + 1 : start + 1 + len(ROWS)]] == list(ROWS)
    for cells in lines[start + 1 : start + 1 + len(ROWS)]:
        for column, cell in zip(COLUMNS, cells[2:], strict=True):
            for spec in ROWS[cells[0]]:
                for name in COLUMNS[column]:
                    acts = [act for act in ("bf16", "fp16") if not lowbit.supports(spec, act, name)]
                    assert cell == (", ".join(acts) or "-"), (spec, name)

"""`lowbit bench` on the chip: every provider that is here is right and timed, and its file can be shown again."""

from pathlib import Path

import pytest
import torch

from lowbit.cli import main
from lowbit.ops.gemm import device_arch
from lowbit.testing.results import Results


def test_bench_measures_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    act = "bf16" if device_arch(torch.cuda.current_device()).bf16 else "fp16"
    path = tmp_path / "rows.json"
    words = ["--shape", "4096x4096,576x2880", "--spec", "int4_g32,mxfp4", "--m", "1,40", "--act", act, "--rivals", "torch"]
    assert main(["bench", *words, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    found = Results.from_json(path)
    assert len(found.rows) == 2 * 3 * 2
    assert found.facts["device"] == torch.cuda.get_device_name()
    for row in found.rows:
        assert row.fault == ""
        assert row.us is not None
        assert row.us > 0.5
    assert main(["bench", "--report", str(path)]) == 0
    assert capsys.readouterr().out == text


"""The benchmark without a GPU: a clock that counts and rivals that are made up; what is measured, worded, drawn and refused."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowbit
from lowbit.arch import arch, arch_of_capability
from lowbit.cli import main, report
from lowbit.errors import BadInput, Unsupported
from lowbit.testing import bench, rivals
from lowbit.testing.bench import Meter, Work, measure
from lowbit.testing.results import Results, Row, geomean
from lowbit.testing.rivals import Humming, Torch, find_rivals
from lowbit.testing.shapes import MODELS, layers_of
from lowbit.testing.timing import MOST_COPIES, num_copies
from lowbit.weights import WeightSpec

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="pip install matplotlib")
H200 = arch("sm_90a")
L2_BYTES = 512  # so small that a few copies of a layer are cold
FACTS = {
    "device": "a <GPU>", "sms": 132, "l2_bytes": L2_BYTES, "max_clock_mhz": 1980.0, "clock_mhz": None, "driver": None,
}  # fmt: skip


class Scaled(nn.Module):
    """y = factor * x w^T, in float32."""

    def __init__(self, weight: Tensor, factor: float = 1.0) -> None:
        super().__init__()
        self.weight, self.factor = weight, factor

    def forward(self, x: Tensor) -> Tensor:
        return (self.factor * (x.float() @ self.weight.float().T)).to(x.dtype)


@dataclass
class Fake:
    """A rival of any name that builds whatever it is given."""

    name: str
    make: Callable[[Tensor], nn.Module] = Scaled
    quantised: bool = True
    formats: tuple[str, ...] = ("int8", "int4_g32")

    def version(self) -> str:
        return "1.2"

    def supports(self, spec: WeightSpec) -> bool:
        return str(spec) in self.formats

    def build(self, spec: WeightSpec, act: str, weight: Tensor) -> nn.Module:
        return self.make(weight)


class Clock:
    """Takes 10 us for the first layer it is given, 20 for the second, ...; remembers how many calls each had."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def us(self, calls: Sequence[Callable[[], object]]) -> float:
        results = [call() for call in calls]
        assert len({result.data_ptr() for result in results if isinstance(result, Tensor)}) == len(calls)
        self.calls.append(len(calls))
        return 10.0 * len(self.calls)


def meter(clock: Clock | None = None) -> Meter:
    return Meter(torch.device("cpu"), H200, L2_BYTES, (clock or Clock()).us, FACTS)


def work(*specs: str, ms: tuple[int, ...] = (1, 3)) -> Work:
    return Work({(48, 128): "toy qkv"}, [WeightSpec.parse(spec) for spec in specs or ("int8",)], "bf16", ms)


def rows_of(*others: Fake, specs: tuple[str, ...] = (), clock: Clock | None = None) -> list[Row]:
    return [row for rows in measure(work(*specs), others, meter(clock)) for row in rows]


def row(provider: str, us: float | None, m: int = 1, spec: str = "int8", n: int = 64, floor: float = 1.0, fault: str = "") -> Row:
    return Row(provider, spec, "bf16", n, 128, m, 1000, floor, us, None if us is None else 0.01, fault)


def results(*rows: Row) -> Results:
    extra = {"date": "2026-01-02T03:04:05+00:00", "command": "lowbit bench --m 1", "stopped": "", "roof": H200.roof, "arch": "sm_90a"}
    return Results({**FACTS, **extra, "versions": {"lowbit": "0.1.0", "torch": "2.9", "cuda": None}}, rows)


# ---- measuring ------------------------------------------------------------------------------------------------------


def test_every_provider_is_timed_over_cold_copies() -> None:
    clock = Clock()
    rows = rows_of(Fake("plain", quantised=False), Fake("other"), specs=("int8", "int4_g32", "int2_g32"), clock=clock)
    found = [(r.provider, r.spec, r.m) for r in rows]
    expected = [("plain", "bf16"), ("lowbit", "int8"), ("other", "int8"), ("lowbit", "int4_g32"), ("other", "int4_g32"), ("lowbit", "int2_g32")]
    assert found == [(*pair, m) for pair in expected for m in (1, 3)]
    assert [r.us for r in rows] == [10.0 * (i + 1) for i in range(12)]
    assert clock.calls == [max(2, math.ceil(20 * L2_BYTES / (48 * 128 * bits / 8))) for bits in (16, 8, 8, 4, 4, 2) for _ in (1, 3)]
    assert clock.calls[-1] == 7
    assert all(r.layer == "toy qkv" and not r.fault for r in rows)
    assert work("int8", "int4_g32", "int2_g32").num_rows([Fake("plain", quantised=False), Fake("other")]) == 12


def test_errors_are_those_of_the_formats() -> None:
    errors = {r.spec: r.error for r in rows_of(Fake("plain", quantised=False), specs=("int8", "int4_g32"))}
    assert errors["bf16"] == pytest.approx(2**-9, rel=0.5)  # half a unit of bf16 at the most
    assert errors["int8"] == pytest.approx(0.008, rel=0.5)
    assert errors["int4_g32"] == pytest.approx(0.09, rel=0.3)


def test_bytes_and_floor_count_what_a_provider_moves() -> None:
    plain, _, own, _ = rows_of(Fake("plain", quantised=False))
    assert plain.moved_bytes == 2 * 48 * 128 + 2 * (48 + 128)
    assert own.moved_bytes == 48 * 128 + 4 * 48 + 2 * (48 + 128)
    assert own.floor_us == pytest.approx(own.moved_bytes / 4.57e6)
    timed = replace(own, us=2.0, m=16)
    assert timed.gbs == pytest.approx(own.moved_bytes / 2e3)
    assert timed.tflops == pytest.approx(2 * 16 * 48 * 128 / 2e6)
    assert timed.share == pytest.approx(own.floor_us / 2)
    assert H200.floor_us(4_570_000, 0) == pytest.approx(1)
    assert H200.floor_us(1000, 790_000_000) == pytest.approx(1)


def test_unknown_chip_says_whose_rates_bound_it() -> None:
    assert "the rates of the GB10" in arch_of_capability(13, 7).roof
    assert arch("sm_80").roof == "1,750 GB/s and 312 TFLOP/s, data-sheet rates"


def refuse(weight: Tensor) -> nn.Module:
    raise AssertionError


class Crash(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 3:
            raise RuntimeError("no kernel for this M\nbacktrace\n")
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "faults"),
    [
        (refuse, ["not built: AssertionError without a message"] * 2),
        (Crash, ["", "not run: RuntimeError: no kernel for this M"]),
        (lambda w: Scaled(w, float("nan")), ["wrong: the output is not finite"] * 2),
        (lambda w: Scaled(w, 0.0), ["wrong: relative error 1.000"] * 2),
        (lambda w: Scaled(w, 1.05), ["wrong: relative error 0.05"] * 2),  # as much as two layers of int8 would not cost
        (lambda w: Scaled(w.flip(0)), ["wrong: relative error 1."] * 2),
        (lambda w: Scaled(w, 1.015), ["", ""]),  # rounded and scaled otherwise, but right
    ],
    ids=["refuses to build", "fails for one M", "nan", "zeros", "5 % off", "rows mixed up", "another rounding"],
)
def test_failure_of_a_rival_is_a_row(make: Callable[[Tensor], nn.Module], faults: list[str]) -> None:
    own = rows_of(Fake("other", make))
    assert [r.provider for r in own] == ["lowbit", "lowbit", "other", "other"]
    assert all(r.us for r in own[:2])
    for found, fault in zip(own[2:], faults, strict=True):
        assert found.fault.startswith(fault) if fault else found.fault == ""
        assert (found.us is None) == bool(fault)


@pytest.mark.parametrize("spec", ["int1_g32", "uint1z_g32", "int2_g32", "mxfp4", "nvfp4", "fp8_e4m3", "fp3_e1m1"])
def test_coarse_formats_are_not_taken_for_garbage(spec: str) -> None:
    assert [r.fault for r in rows_of(specs=(spec,))] == ["", ""]


def test_what_lowbit_cannot_multiply_is_found_before_anything_runs() -> None:
    with pytest.raises(Unsupported, match="use act='fp16'"):
        work().check(arch("sm_75"))
    with pytest.raises(BadInput, match="holds no negative weights"):
        work("uint4").check(H200)
    work("int4_g32", "uint4z_g128").check(H200)


def test_copies_follow_the_l2() -> None:
    assert num_copies(1 << 20, 1 << 20) == 20
    assert num_copies(1 << 40, 1 << 20) == 2
    assert num_copies(1, 1 << 20) == MOST_COPIES
    assert num_copies(32 << 20) == math.ceil(20 * 60 / 32)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue Nov  4\nGCC version: 12.3", "580.159.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("something else 1.2", None),
    ],
)
def test_driver_is_read_where_linux_shows_it(text: str, version: str | None, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(text)
    assert bench._driver(tmp_path / "version") == version
    assert bench._driver(tmp_path / "nothing") is None


# ---- figures --------------------------------------------------------------------------------------------------------

TABLE = (
    row("torch", 40.0, spec="bf16", floor=20),
    row("lowbit", 10.0, floor=8),
    row("lowbit", 20.0, floor=5, spec="mxfp4"),
    row("humming", 15.0, floor=8),
    row("humming", 16.0, floor=5, spec="mxfp4"),
    row("lowbit", 50.0, m=64, floor=40),
    row("humming", None, m=64, fault="not run: boom"),
    row("lowbit", 10.0, n=96),
)  # fmt: skip


def test_geometric_means_and_worst_cells() -> None:
    found = {(line.regime, line.provider): line for line in results(*TABLE).summary()}
    assert list(found) == [
        ("M <= 16", "lowbit"),
        ("M <= 16", "torch"),
        ("M <= 16", "humming"),
        ("16 < M <= 256", "lowbit"),
    ]
    own = found["M <= 16", "lowbit"]
    assert own.share == pytest.approx((0.8 * 0.25 * 0.1) ** (1 / 3))
    assert (own.cells, own.share_worst, own.share_worst_at) == (3, 0.1, "96x128 int8 M = 1")
    assert own.speed is None
    rival = found["M <= 16", "humming"]
    assert rival.speed == pytest.approx(math.sqrt(1.5 * 0.8))
    assert (rival.speed_worst, rival.speed_worst_at, rival.speed_cells) == (0.8, "64x128 mxfp4 M = 1", 2)
    plain = found["M <= 16", "torch"]
    assert plain.speed == pytest.approx(math.sqrt(4 * 2))  # one figure of torch for both formats
    assert (plain.speed_worst, plain.speed_worst_at, plain.cells) == (2.0, "64x128 mxfp4 M = 1", 1)
    assert geomean([2, 8]) == pytest.approx(4)


def test_terminal_table_has_a_line_per_product() -> None:
    lines = report.text(results(*TABLE)).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("weights"))
    cells = [line.split() for line in lines[head : head + 5]]
    assert cells[0][-4:] == ["torch", "us", "ratio", "humming", "us", "ratio"][-4:]
    assert cells[1] == ["int8", "64x128", "1", "10.00", "0.0", "0", "80%", "0.0100", "40.00", "4.00x", "15.00", "1.50x"]
    assert cells[2][-4:] == ["40.00", "2.00x", "16.00", "0.80x"]
    assert cells[3][2:4] + cells[3][-4:] == ["64", "50.00", "-", "-", "-", "-"]
    text = "\n".join(lines)
    assert "no time: humming, 64x128 int8, M = 64: not run: boom" in text
    assert "lowbit is 1.10x (worst 0.80x, 64x128 mxfp4 M = 1), 2 cells" in text
    assert "790 TFLOP/s, measured on one H200" in text


def test_markdown_has_a_table_per_format_and_how_to_repeat_it() -> None:
    lines = report.markdown(results(*TABLE)).splitlines()
    start = lines.index("## int8 x bf16")
    assert "speed against humming" in lines[start + 2]
    assert lines[start + 4 : start + 8] == [
        "| N x K | M = 1 | M = 64 |",
        "|---|---|---|",
        "| 64x128 | 10.0 (1.50x, 80%) | 50.0 (80%) |",
        "| 96x128 | 10.0 (10%) | - |",
    ]
    assert "| 64x128 | 20.0 (0.80x, 25%) |" in lines
    assert "| 64x128 | 40.0 (50%) |" in lines  # torch's own table
    assert "lowbit bench --m 1" in lines
    assert "lowbit 0.1.0, torch 2.9" in lines[3]
    assert "* humming, 64x128 int8, M = 64: not run: boom" in lines


def test_json_keeps_everything(tmp_path: Path) -> None:
    before = results(*TABLE)
    path = tmp_path / "rows.json"
    path.write_text(before.to_json())
    assert Results.from_json(path) == before
    found = json.loads(path.read_text())
    assert found["rows"][1]["speed_against"] == {"torch": 4.0, "humming": 1.5}
    assert found["rows"][1]["share"] == 0.8
    assert found["summary"][0]["provider"] == "lowbit"
    assert (found["device"], found["clock_mhz"]) == ("a <GPU>", None)


class Page(HTMLParser):
    """Collects the addresses a page refers to and the cells of its tables; tags must be closed as they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.cells: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def test_page_needs_nothing_else() -> None:
    text = report.html(results(*TABLE), {"time_int8.png": b"\x89PNG not really"})
    page = Page(text)
    assert page.open == []
    assert page.addresses == ["data:image/png;base64,iVBORyBub3QgcmVhbGx5"]
    assert not any(word in text for word in ("http", "//", "@import", "<script", "<link"))
    assert "a &lt;GPU&gt;" in text
    assert page.cells.count("humming") >= 3
    assert "1.50x" in page.cells
    assert "4.00x int8, 2.00x mxfp4" in page.cells  # torch is one row for both
    assert "no time" in page.cells


@needs_matplotlib
def test_plots_are_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = tmp_path / "rows.json", tmp_path / "plots"
    path.write_text(results(*TABLE).to_json())
    assert main(["bench", "--report", str(path), "--plot", str(folder), "--markdown", str(tmp_path / "R.md")]) == 0
    assert sorted(file.name for file in folder.iterdir()) == [
        *("report.html", "share_int8.png", "share_mxfp4.png", "time_int8.png", "time_mxfp4.png"),
    ]
    for image in folder.glob("*.png"):
        data = image.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        assert width >= 600
        assert height >= 400
    page = Page((folder / "report.html").read_text())
    assert len(page.addresses) == 4
    assert all(address.startswith("data:image/png;base64,iVBORw0KGgo") for address in page.addresses)
    assert (tmp_path / "R.md").read_text() == report.markdown(Results.from_json(path))
    assert "measured on one H200" in capsys.readouterr().out


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A GPU that is none, with torch as the one rival that is installed."""
    clock = Clock()
    monkeypatch.setattr(bench, "gpu_meter", lambda: meter(clock))
    monkeypatch.setattr(rivals, "_missing", lambda provider: getattr(provider, "package", ""))
    return clock


@pytest.mark.usefixtures("gpu")
def test_command_measures_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    words = ["bench", "--shape", "48x128,32x64", "--spec", "int8,mxfp4", "--m", "1,4", "--json", str(path)]
    assert main(words) == 0
    captured = capsys.readouterr()
    found = Results.from_json(path)
    assert [(r.provider, r.n, r.spec, r.m) for r in found.rows] == [
        (provider, n, spec, m)
        for n in (48, 32)
        for provider, spec in (("torch", "bf16"), ("lowbit", "int8"), ("lowbit", "mxfp4"))
        for m in (1, 4)
    ]
    assert found.facts["command"] == f"lowbit {' '.join(words)}"
    assert found.facts["versions"]["lowbit"] == lowbit.__version__
    assert found.facts["versions"]["torch"]
    assert f"{report.text(found)}\n" == captured.out
    assert captured.err.splitlines()[1:3] == [
        "2/12  torch bf16 48x128: 10.00, 20.00 us",
        "4/12  lowbit int8 48x128: 30.00, 40.00 us",
    ]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("gpu")
def test_fault_of_lowbit_itself_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rivals.Lowbit, "build", lambda self, spec, act, weight: Scaled(weight, 0.5))
    assert main(["bench", "--shape", "48x128", "--m", "1", "--rivals", "none"]) == 1
    captured = capsys.readouterr()
    assert "no time: lowbit, 48x128 int4_g128, M = 1: wrong: relative error 0.5" in captured.out
    assert "1/1  lowbit int4_g128 48x128: - us; wrong: relative error 0.5" in captured.err


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("error", "why"),
    [(KeyboardInterrupt(), "interrupted"), (RuntimeError("CUDA error: gone\nhints"), "RuntimeError: CUDA error: gone")],
    ids=["interrupt", "device lost"],
)
def test_end_before_time_keeps_what_there_is(
    error: BaseException, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"

    def stopped(*arguments: object) -> Iterator[list[Row]]:
        yield [row("lowbit", 10.0)]
        assert Results.from_json(path).facts["stopped"] == "killed after 1 of 10 rows"
        raise error

    monkeypatch.setattr(bench, "measure", stopped)
    assert main(["bench", "--shape", "48x128", "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"INCOMPLETE: {why} after 1 of 10 rows" in out
    assert "10.00" in out
    found = Results.from_json(path)
    assert (len(found.rows), found.facts["stopped"]) == (1, f"{why} after 1 of 10 rows")
    assert f"INCOMPLETE: {why}" in report.markdown(found)
    assert f"INCOMPLETE: {why}" in report.html(found, {})


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "llama-3-8b"), "did you mean 'llama-3.1-8b'"),
        (("--spec", "int4_g128x"), "did you mean 'int4_g128'"),
        (("--spec", "int4_g24"), "group sizes must be multiples of 16"),
        (("--rivals", "huming"), "did you mean 'humming'"),
        (("--rivals", "torch,humming"), "pip install humming-kernels"),
        (("--act", "fp8"), "act must be one of bf16, fp16"),
        (("--json", "/nonexistent/x.json"), "--json must name a file that can be written"),
        (("--plot", "/dev/null"), "--plot "),
        (("--markdown", "/"), "--markdown must name a file that can be written"),
        (("--report", "/nonexistent"), "a file that `lowbit bench --json` wrote"),
        (("--report", "/dev/null", "--spec", "int8", "--m", "1"), "leave out --spec, --m"),
    ],
    ids=lambda value: "_".join(value).replace("/", "") if isinstance(value, tuple) else "",
)
def test_error_is_one_line_before_anything_runs(words: tuple[str, ...], message: str, gpu: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("lowbit bench: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert captured.out == ""
    assert gpu.calls == []


def test_bad_shape_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "--shape", "4096x4096,4096"])
    assert end.value.code == 2
    assert "such as 4096x14336; got '4096'" in capsys.readouterr().err


def test_without_a_gpu_there_is_one_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "--rivals", "none"]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "lowbit bench: measuring needs an NVIDIA GPU, and torch.cuda.is_available() is False; "
        "--report FILE.json shows what was measured elsewhere\n"
    )


@pytest.mark.usefixtures("gpu")
def test_missing_matplotlib_is_found_first(gpu: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--plot", "/nonexistent"]) == 2
    assert "pip install 'lowbit[bench]'" in capsys.readouterr().err
    assert gpu.calls == []


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "Expecting value"), ("[]", "list indices"), ("{}", "it has no 'format'"), ('{"format": "lowbit bench 0"}', "measure again"),
     ('{"format": "lowbit bench 1", "rows": []}', "it has no 'arch'"), ('{"format": "lowbit bench 1", "rows": [{}]}', "it has no 'provider'")],
)  # fmt: skip
def test_other_files_are_refused(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(BadInput, match="lowbit bench") as caught:
        Results.from_json(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("us", "fast"), ("us", 0), ("us", float("nan")), ("m", None), ("m", 0), ("floor_us", -1.0), ("spec", 4)])
def test_a_damaged_row_is_refused_before_anything_is_shown(name: str, value: object, tmp_path: Path) -> None:
    found = json.loads(results(*TABLE).to_json())
    found["rows"][1][name] = value
    path = tmp_path / "x.json"
    path.write_text(json.dumps(found))
    with pytest.raises(BadInput, match="positive"):
        Results.from_json(path)


def test_versions_must_name_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for versions in ("1.0", {"torch": "2.11"}):
        path.write_text(json.dumps({**json.loads(results(*TABLE).to_json()), "versions": versions}))
        with pytest.raises(BadInput, match="versions must name lowbit and torch"):
            Results.from_json(path)


# ---- what is compared -----------------------------------------------------------------------------------------------


def test_shapes_are_those_of_the_models() -> None:
    assert layers_of("Llama-3.1-8B") == {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    assert layers_of("llama-3.1-70b") == {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)}
    assert layers_of("qwen3-32b") == {"qkv": (10240, 5120), "o": (5120, 8192), "gate_up": (51200, 5120), "down": (5120, 25600)}
    assert layers_of("gpt-oss") == {"qkv": (5120, 2880), "o": (2880, 4096)}
    deepseek = layers_of("deepseek-v3")
    assert (deepseek["kv_a"], deepseek["q_kv_a"], deepseek["q_b"]) == ((576, 7168), (2112, 7168), (24576, 1536))
    assert (deepseek["kv_b"], deepseek["o"], deepseek["down"]) == ((32768, 512), (7168, 16384), (7168, 18432))
    assert {"mistral-7b", "qwen3-8b", "grid"} < set(MODELS)


@pytest.mark.usefixtures("gpu")
def test_equal_layers_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Work] = []
    monkeypatch.setattr(bench, "measure", lambda work, *rest: seen.append(work) or iter([]))
    assert main(["bench", "--model", "llama-3.1-8b,qwen3-8b", "--shape", "4096x4096", "--spec", "int8,int8_c", "--m", "1,1"]) == 0
    assert main(["bench"]) == 0
    names = seen[0].shapes
    assert names[4096, 4096] == "llama-3.1-8b o, qwen3-8b o"
    assert len(names) == 6
    assert ([str(spec) for spec in seen[0].specs], seen[0].ms) == (["int8"], [1])
    assert list(seen[1].shapes) == list(layers_of("grid").values())
    assert set(seen[1].shapes.values()) == {""}


def test_humming_gets_its_own_words() -> None:
    words = {name: Humming().weight_config(WeightSpec.parse(name)) for name in ("int4_g128", "int8", "mxfp4", "int4z_g64", "int2_g64", "fp6_e3m2")}
    assert words == {
        "int4_g128": {"dtype": "int4", "group_size": 128},
        "int8": {"dtype": "int8"},
        "mxfp4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
        "int4z_g64": {"dtype": "int4", "group_size": 64, "has_zero_point": True},
        "int2_g64": {"dtype": "int2", "group_size": 64},
        "fp6_e3m2": {"dtype": "float6e3m2"},
    }
    for name in ("int4_g128_e8m0", "int4_g128_fp32", "mxfp8", "int8_t", "int2", "nf4", "int4_g128_ao"):
        assert not Humming().supports(WeightSpec.parse(name))


def test_rivals_are_those_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "_missing", lambda provider: "")
    assert [provider.name for provider in find_rivals("auto")] == ["torch", "humming"]
    assert [provider.name for provider in find_rivals("humming")] == ["humming"]
    assert find_rivals("none") == []
    monkeypatch.setattr(Humming, "package", "not-a-package-of-anybody")
    assert rivals.versions([Torch(), Humming()]) == {"torch": torch.__version__, "humming": "unknown"}


def test_torch_multiplies_with_the_weight_as_it_is() -> None:
    weight, x = torch.randn(8, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    layer = Torch().build(WeightSpec.parse("int8"), "bf16", weight)
    assert torch.equal(layer(x), x @ weight.T)

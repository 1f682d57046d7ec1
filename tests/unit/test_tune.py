"""Measured plans: how they are found with a made-up clock, kept, read again, preferred, and refused when damaged."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lowbit.api import explain
from lowbit.arch import ARCHS, arch, arch_of_capability
from lowbit.cli import main
from lowbit.errors import BadInput, LowbitError
from lowbit.plan import store
from lowbit.plan.candidates import LAST_M
from lowbit.plan.choose import BUCKETS, choose, ranked, size
from lowbit.plan.plan import Plan, illegal
from lowbit.problem import Problem
from lowbit.testing.tune import Found, fastest
from lowbit.weights import WeightSpec

H200 = arch_of_capability(9, 0, 132)


def problem(spec: str = "int4_g128", n: int = 1280, k: int = 2048, act: str = "bf16", chip: str = "sm_90a") -> Problem:
    return Problem(WeightSpec.parse(spec), act, act, n, k, arch(chip))


class Clock:
    """Says that every plan takes 10 us but for some; remembers what it was asked."""

    def __init__(self, us: dict[Plan, Sequence[float]]) -> None:
        self.us, self.asked = us, []

    def __call__(self, plans: Sequence[Plan], replays: int) -> list[float]:
        self.asked.append((list(plans), replays))
        turn = len(self.asked) - 1
        return [self.us[plan][turn] if plan in self.us else 10.0 for plan in plans]


def test_the_fastest_of_the_promising_plans_wins_after_a_second_look() -> None:
    layer = problem()
    plans = [plan for plan, _ in ranked(layer, 8)]
    lucky, steady, broken = plans[5], plans[9], plans[3]
    clock = Clock({lucky: (5.0, 9.0), steady: (6.0, 6.5), broken: (math.inf, math.inf), plans[20]: (1.0, 1.0)})
    found = fastest(layer, 8, 12, clock)
    assert found == Found(layer, 8, plans[0], 10.0, steady, 6.5, 12)
    (first, few), (second, many) = clock.asked
    assert first == plans[:12]  # the one that takes 1 us is not among them
    assert second[0] == plans[0]
    assert {lucky, steady} <= set(second)
    assert broken not in second
    assert many > few
    assert fastest(layer, 8, 12, Clock({})).plan == plans[0]  # nothing gained, nothing changed


def test_a_plan_that_never_ran_does_not_win() -> None:
    layer = problem()
    with pytest.raises(LowbitError, match=r"none of 3 plans for int4_g128 .* 8 tokens, could be compiled and launched"):
        fastest(layer, 8, 3, lambda plans, replays: [math.inf] * len(plans))


def test_plans_are_tuned_for_the_number_of_tokens_that_they_are_compared_for() -> None:
    assert [size(m) for m in (1, 2, 8, 9, 16, 33, 64)] == [1, 8, 8, 16, 16, 64, 64]
    assert size(65) == size(8192) == LAST_M > 1000


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Problem, Plan]:
    """A file that prefers the last of the plans for 8 tokens of a layer, and is named."""
    layer = problem()
    plan = ranked(layer, 8)[-1][0]
    path = tmp_path / "tuned.json"
    store.write(path, {store.name_of(layer): {8: plan}})
    monkeypatch.setenv("LOWBIT_TUNED", str(path))
    return path, layer, plan


def test_a_named_file_decides_for_its_layer_chip_and_number_of_tokens(tuned: tuple[Path, Problem, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    _, layer, plan = tuned
    assert all(choose(layer, m) == plan for m in (2, 5, 8))
    assert choose(replace(layer, out="fp32"), 8) == plan
    others = [(layer, 1), (layer, 9), (replace(layer, n=1296), 8), (replace(layer, act="fp16", out="fp16"), 8)]
    others += [(replace(layer, arch=replace(H200, sms=114)), 8)]
    assert all(choose(p, m) != plan for p, m in others)
    assert all(choose(p, m) == ranked(p, m)[0][0] for p, m in others)
    told = explain(layer, 8, compiled=False)
    assert (told.plan, told.measured) == (plan, True)
    assert told.why.startswith("measured to be the fastest for up to 8 tokens")
    assert [p for p, _ in told.others] == [p for p, _ in ranked(layer, 8) if p != plan]
    assert not explain(layer, 1, compiled=False).measured
    monkeypatch.setenv("LOWBIT_PLAN", "stream")
    assert choose(layer, 8) == ranked(layer, 8)[0][0]
    assert choose(layer, 8).family == "stream"
    monkeypatch.delenv("LOWBIT_PLAN")
    monkeypatch.delenv("LOWBIT_TUNED")
    assert choose(layer, 8) == ranked(layer, 8)[0][0]


def test_a_plan_that_is_not_legal_is_refused_in_a_named_file_and_passed_over_in_lowbits_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = problem()
    store.write(tmp_path / "old.json", {store.name_of(layer): {8: replace(ranked(layer, 8)[0][0], stages=40)}})
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "old.json")
    assert choose(layer, 8) == ranked(layer, 8)[0][0]
    monkeypatch.setenv("LOWBIT_TUNED", str(tmp_path / "old.json"))
    with pytest.raises(BadInput, match=r"old.json: the plan of 'sm_90a:132 .*' for 8 tokens is not legal: .* shared memory .*; tune it again"):
        choose(layer, 8)


@pytest.mark.parametrize("place", ["folder/t.json", "x" * 300, "/proc/t.json", "/dev/null/t.json"])
def test_a_place_that_cannot_be_written_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="tuned plans cannot be written to"):
        store.write(tmp_path / place, {})


def test_a_link_stays_a_link_and_no_special_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to(tmp_path / "b.json")
    store.write(tmp_path / "a.json", {})
    assert (tmp_path / "a.json").is_symlink()
    assert store.read(str(tmp_path / "b.json")) == {}
    with pytest.raises(BadInput, match="there is no such file"):
        store.read("/dev/zero")
    (tmp_path / "large.json").write_bytes(b" " * (2**24 + 1))
    with pytest.raises(BadInput, match="it has more than 16777216 bytes"):
        store.read(str(tmp_path / "large.json"))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    kept = {store.name_of(problem(n=n)): {m: ranked(problem(n=n), m)[0][0] for m in BUCKETS} for n in (64, 1280)}
    store.write(tmp_path / "a.json", kept)
    assert store.read(str(tmp_path / "a.json")) == kept
    assert len((tmp_path / "a.json").read_text().splitlines()) == 2 + len(kept)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, r"the tuned plans in .* cannot be read .*: name another file, or write one with `lowbit tune`"),
        ("{", "cannot be read"),
        ("[]", "must hold tuned plans of format 2"),
        ('{"format": 1, "plans": {}}', "must hold tuned plans of format 2"),
        ('{"format": 2, "plans": {"a": {"8": ["stream", 8]}}}', r"a plan has 11 values, family, tokens, .*; got \['stream', 8\] for 'a'"),
        ('{"format": 2, "plans": {"a": {"8": ["stream", 8, 1, 1, 1, 1, 1, 2, 1, 1, true]}}}', "a plan has 11 values"),
        ('{"format": 2, "plans": {"a": {"8": 7}}}', "a plan has 11 values"),
        ('{"format": 2, "plans": {"a": {"8": ["wave", 8, 1, 1, 1, 1, 1, 2, 1, 1, 1]}}}', r"a plan has 11 values, .*got \['wave'"),
        ('{"format": 2, "plans": {"a": {"9": ["stream", 8, 1, 1, 1, 1, 1, 2, 1, 1]}}}', "by numbers of tokens, 1, 8, 16, 32, 64, 128; got"),
        ("[" * 100000, "cannot be read"),
        (f'{{"format": 2, "plans": {{"a": {{"{"9" * 5000}": []}}}}}}', "by numbers of tokens"),
        ('{"format": 2, "plans": {"a": 7}}', "by numbers of tokens"),
        ('{"format": 2, "plans": {"a": {"eight": ["stream", 8, 1, 1, 1, 1, 1, 2, 1, 1]}}}', "by numbers of tokens"),
    ],
)
def test_a_damaged_file_is_refused(text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("LOWBIT_TUNED", str(path))
    with pytest.raises(BadInput, match=words):
        choose(problem(n=2560), 8)


def test_what_comes_with_lowbit_is_legal_and_is_used() -> None:
    shipped = store.read(str(store.SHIPPED))
    assert len(shipped) > 20
    for name, plans in shipped.items():
        chip, spec, act, shape = name.split()
        row, sms = chip.split(":")
        n, k = map(int, shape.split("x"))
        layer = Problem(WeightSpec.parse(spec), act, act, n, k, replace(ARCHS[row], sms=int(sms)))
        assert store.name_of(layer) == name
        for tokens, plan in plans.items():
            assert tokens in BUCKETS
            assert illegal(layer, plan) == ()
            assert choose(layer, tokens) == plan


def test_the_command_refuses_before_it_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(tmp_path / "t.json")
    for arguments, words in (
        (["--plans", str(tmp_path)], "--plans must name a file; "),
        (["--plans", file, "--tries", "0"], "--tries must be at least 1; got 0"),
        (["--plans", file, "--act", "fp8"], "act"),
        (["--plans", file, "--spec", "int9"], "int9"),
        (["--plans", file, "--model", "llama"], "llama"),
        (["--plans", file, "--spec", "uint4_g128"], "zero point"),
        (["--plans", file], "measuring needs an NVIDIA GPU"),
    ):
        assert main(["tune", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert not Path(file).exists()
    Path(file).write_text(json.dumps({"format": 7}))
    assert main(["tune", "--plans", file]) == 2
    assert "must hold tuned plans of format 2" in capsys.readouterr().err
    monkeypatch.setenv("LOWBIT_PLAN", "stream")
    assert main(["tune", "--plans", file]) == 2
    assert "LOWBIT_PLAN=stream leaves nothing to choose from: unset it" in capsys.readouterr().err

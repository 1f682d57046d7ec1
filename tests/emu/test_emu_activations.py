"""The kernel that quantises activations, on every chip: the codes and scales of the reference, bit for bit; faults in it are found."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

import emulator
from lowbit.activations import NAMES, ActSpec
from lowbit.arch import ARCHS, arch
from lowbit.errors import LowbitError
from lowbit.jit.generate import generate_act
from lowbit.ops.checks import NAMES as DTYPE_NAMES
from lowbit.problem import ActProblem
from lowbit.quantize.activations import quantize_act
from lowbit.testing import emulate

pytestmark = pytest.mark.skipif(bool(emulate.obstacle()), reason=emulate.obstacle() or "the emulator is here")

QUANTISED = [name for name in NAMES if ActSpec.parse(name).quantised]
SEEDS = (1, 2, 5)


def rows(k: int, dtype: torch.dtype) -> Tensor:
    """Ordinary, small, large, zero, with a NaN, with an infinity, on ties of int8."""
    x = torch.randn(7, k, generator=torch.Generator().manual_seed(k)) * torch.tensor([1, 1e-4, 3e3, 0, 1, 1, 0])[:, None]
    x[4, k // 2], x[5, k - 1] = math.nan, -math.inf
    x[6] = torch.arange(k).remainder(255) - 127 + 0.5
    x[6, 0] = 127
    return x.to(dtype)


def same(act: str, x: Tensor, chip: str, seed: int = 1, gap: int = 0) -> bool:
    scale = torch.tensor([0.02]) if act.endswith("_t") else None
    k = x.shape[-1]
    codes, scales = emulate.quantize_act(x, act, scale, arch=chip, seed=seed, gap=gap)
    want_codes, want_scales = quantize_act(x, act, scale)
    bits, want_bits = scales.view(torch.int32), want_scales.contiguous().view(torch.int32)
    return torch.equal(codes[..., :k], want_codes) and not codes[..., k:].any() and torch.equal(bits, want_bits)


@pytest.mark.parametrize("chip", list(ARCHS))
def test_codes_and_scales_are_those_of_the_reference(chip: str) -> None:
    """Columns: fewer than a group, an odd number of vectors, no multiple of 8, several warps, several vectors a thread."""
    met = 0
    for i, act in enumerate(QUANTISED):
        dtype = torch.float16 if i % 2 or not arch(chip).bf16 else torch.bfloat16
        if not ActProblem(ActSpec.parse(act), DTYPE_NAMES[dtype], 64, arch(chip)).obstacles:
            for k in (8, 24, 133, 264, 1144):
                assert same(act, rows(k, dtype), chip, SEEDS[met % 3], gap=2 * (k % 8 == 0)), (act, k)
                met += 1
    assert met == (45 if arch(chip).level >= 89 else 15)
    assert same("int8", rows(9216, torch.float16), chip)


@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        ("{ griddep_wait(); griddep_launch(); }", "{ griddep_launch(); }", "no griddepcontrol.wait"),
        ("        syncthreads();\n", "", "race: |never written"),
        ("v = lane < kWarps ? ld", "v = lane < kWarps - 1 ? ld", "wrong"),
        ("if (i >= kStored) continue;", "", "out of bounds|a second time|wrong"),
        ("if (i >= kStored) continue;", "if (i >= kVectors) continue;", "never written"),
        ("i * 16);", "i * 16 + 16);", "out of bounds|wrong"),
        ("kStored * 8) + i * 8", "kVectors * 8) + i * 8", "a second time|never written|misaligned|wrong"),
        ("d < 16; d *= 2", "d < 8; d *= 2", "wrong"),
        ("finite ? codes : U2{0, 0}", "codes", "wrong"),
        ("most < In::kInf", "most <= In::kInf", "wrong"),
        ("as_f32(0x0d800000)", "as_f32(0x00000001)", "wrong"),
    ],
)
def test_planted_faults_are_found(old: str, new: str, want: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = emulator.build

    def mutated(sources: list[object]) -> object:
        changed = emulator.mutate(sources, "quantize_act.cuh", old, new)
        library = build(changed)
        launch = library.launch
        monkeypatch.setattr(library, "launch", lambda source, *args, **named: launch(changed[0], *args, **named), raising=False)
        return library

    monkeypatch.setattr(emulator, "build", mutated)
    found = []
    for act in ("fp8_g128", "int8"):
        x = rows(1144, torch.bfloat16)
        x[1] = 2.0**-120
        try:
            found.append("" if same(act, x, "sm_90a") else "wrong")
        except LowbitError as error:
            found.append(str(error))
    assert any(re.search(want, text) for text in found if text), found


def test_the_generated_kernel_names_its_format() -> None:
    source = generate_act(ActProblem(ActSpec.parse("fp8_g128"), "bf16", 4096, arch("sm_90a")))
    assert source.label == "quantise bf16 to fp8_g128, 4096 columns"
    assert source.entry.startswith("lowbit_quantize_act_")

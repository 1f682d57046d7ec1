"""Every function of lowbit/cuda/hw through NVRTC: it compiles for the archs its twin allows, and for no earlier one.

The arch table under test is the one the emulator enforces (`emu::need` in emulator/hw).
"""

from __future__ import annotations

import re

import nvrtc
import pytest

from emulator import layer
from emulator.build import CUDA

pytestmark = pytest.mark.skipif(
    nvrtc.library() is None, reason="libnvrtc is not installed (pip install nvidia-cuda-nvrtc)"
)
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
BELOW = {80: "sm_75", 89: "sm_86", 90: "sm_89"}
FUNCTIONS = layer.functions(layer.TWINS)
HEAD = """#include "hw/hw.h"
using namespace hw;
struct Params { TensorMap map; const u8* in; u8* out; };
HW_FN u32 word(const u8* p, int i) { return ld_global_u32(p + i * 4); }
"""


def number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def allowed(f: layer.Function, arch: str) -> bool:
    return number(arch) == f.needs if f.exactly else number(arch) >= f.needs


def kernel(f: layer.Function, index: int) -> str:
    """A kernel that calls `f` with run-time arguments and stores what it gives."""
    lines, args, keep = [], [], []
    for i, arg in enumerate(f.args):
        kind = arg if "(&" in arg else arg.rsplit(" ", 1)[0]
        value = f"word(p.in, {i})"
        array = re.fullmatch(r"(const )?(\w+) \(&\w+\)\[(\d+)\]", arg)
        registers = re.fullmatch(r"(const )?Regs<(\w+), (\d+)>&", kind)
        if array or registers:
            count = int((array or registers)[3])
            element = (array or registers)[2]
            lines.append(f"{element} x{i}[{count}];" if array else f"Regs<{element}, {count}> x{i};")
            lines.append(f"HW_UNROLL for (int j = 0; j < {count}; ++j) x{i}[j] = ({element})word(p.in, j + {i});")
            if not (array or registers)[1]:
                keep.append(f"HW_UNROLL for (int j = 0; j < {count}; ++j) st_global_u32(p.out + j * 4, (u32)x{i}[j]);")
            args.append(f"x{i}")
            continue
        args.append(
            {
                "u32": value, "int": f"(int){value}", "u64": f"(u64){value}", "u16": f"(u16){value}",
                "u8": f"(u8){value}", "bool": f"{value} != 0",
                "float": f"as_f32({value})", "U2": f"U2{{{value}, 1}}", "U4": f"U4{{{value}, 1, 2, 3}}",
                "const void*": "p.in", "void*": "p.out", "const TensorMap*": "&p.map",
            }[kind]
        )  # fmt: skip
    parameter = "" if not f.template else "<40>" if f.name.startswith("setmaxnreg") else "<1>"
    call = f"{f.name}{parameter}({', '.join(args)})"
    if f.result != "void":
        value = {
            "U2": "r.x ^ r.y",
            "U4": "r.x ^ r.y ^ r.z ^ r.w",
            "float": "as_u32(r)",
            "u64": "(u32)r ^ (u32)(r >> 32)",
        }.get(f.result, "(u32)r")
        call = f"const auto r = {call}; st_global_u32(p.out, {value})"
    body = " ".join([*lines, call + ";", *keep])
    return f"HW_KERNEL(128) k{index}_{f.name}(const HW_GRID_CONST Params p) {{ {body} }}\n"


@pytest.mark.parametrize("arch", ARCHS)
def test_all_functions_an_arch_has_compile(arch: str) -> None:
    mine = [f for f in FUNCTIONS if allowed(f, arch)]
    assert len(mine) >= 60
    ok, log = nvrtc.compile_text(HEAD + "".join(kernel(f, i) for i, f in enumerate(mine)), arch, CUDA)
    assert ok, log[:3000]


@pytest.mark.parametrize("needs", sorted(BELOW))
def test_no_function_works_on_an_arch_before_its_own(needs: int) -> None:
    """If one did, the emulator's table would refuse kernels that the chip runs."""
    later = [f for f in FUNCTIONS if f.needs == needs and not f.exactly]
    assert later
    works = [f.name for f in later if nvrtc.compile_text(HEAD + kernel(f, 0), BELOW[needs], CUDA)[0]]
    assert works == []


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100a", "sm_120a"])
def test_wgmma_is_refused_outside_sm_90a(arch: str) -> None:
    sample = [f for f in FUNCTIONS if f.exactly and f.args[:1] in ((), ("Regs<float, 4>& d",))]
    assert len(sample) >= 5
    works = [f.name for f in sample if nvrtc.compile_text(HEAD + kernel(f, 0), arch, CUDA)[0]]
    assert works == []

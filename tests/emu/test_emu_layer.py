"""The two folders of the hardware layer stay in step, every function has a golden case, and kernels use no other door.

These tests read texts; they run no kernel.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from golden_data import GOLDEN

from emulator import layer
from emulator.build import CUDA

# Functions that no golden case can hold, with the reason.
NO_GOLDEN = {
    "ex2_approx_f32": "its last bits are the chip's own; compared with a tolerance",
    "griddep_wait": "orders two kernels; no value",
    "griddep_launch": "orders two kernels; no value",
    "setmaxnreg_inc": "moves registers; no value",
    "setmaxnreg_dec": "moves registers; no value",
    "bar_sync": "orders threads; no value",
    "bar_arrive": "orders threads; no value",
}
FORBIDDEN = {
    r"\basm\b": "PTX belongs into lowbit/cuda/hw",
    r"__shared__": "shared memory is an address from smem_base()",
    r"#\s*include\s*<": "no toolkit or libc header",
    r"\b__\w+\s*\(": "no compiler intrinsic: use the hw function",
    r"\b(?:threadIdx|blockIdx|blockDim|gridDim|warpSize)\b": "use tid_x(), ctaid_x(), ...",
    r"__global__|__device__": "use HW_KERNEL, HW_FN",
}


def offences(text: str) -> list[str]:
    """What of FORBIDDEN a kernel header contains, outside comments."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    return [f"{m.group()!r}: {why}" for pattern, why in FORBIDDEN.items() for m in re.finditer(pattern, code)]


def kernel_headers() -> list[Path]:
    return [p for p in sorted(CUDA.rglob("*")) if p.is_file() and p.relative_to(CUDA).parts[0] != "hw"]


def test_the_two_folders_agree_on_every_name_and_signature() -> None:
    device, twins = layer.functions(layer.DEVICE), layer.functions(layer.TWINS)
    assert len(device) >= 200
    assert len({f.signature for f in device}) == len(device)
    assert {f.signature for f in device} == {f.signature for f in twins}


def test_the_parser_sees_every_function_of_both_folders() -> None:
    """Counted another way, so that a function the parser cannot read does not slip through the comparison."""
    for header in (layer.DEVICE, layer.TWINS):
        seen = {f.name for f in layer.functions(header)}
        text = "".join(p.read_text() for p in sorted(header.parent.glob("*.h")) if p.name != "hw.h")
        named = set(re.findall(r"^(?:template <int \w+> )?HW_FN \w+ (\w+)\(", text, re.M))
        assert len(named) > 90
        assert named <= seen


def test_both_folders_define_the_same_macros_for_kernels() -> None:
    for macro in (
        "HW_FN",
        "HW_KERNEL(threads)",
        "HW_KERNEL_RESIDENT(threads, blocks)",
        "HW_GRID_CONST",
        "HW_UNROLL",
        "HW_NO_UNROLL",
    ):
        for header in (layer.DEVICE, layer.TWINS):
            assert f"#define {macro}" in header.read_text(), (macro, header)


def test_every_function_occurs_in_a_golden_case() -> None:
    prims = (GOLDEN / "prims.h").read_text()
    called = set(re.findall(r"\b(\w+)\s*[(<]", prims))
    products = {
        f"{stem}{form}" for stem in re.findall(r"\b(wgmma_(?:bf16|f16|e4m3|s8))\b", prims) for form in ("_rs", "_ss")
    }
    mma = set(re.findall(r"\bmma_m\w+", prims))
    names = {f.name for f in layer.functions(layer.TWINS)}
    assert names - called - products - mma - set(NO_GOLDEN) == set()
    assert set(NO_GOLDEN) <= names
    assert not set(NO_GOLDEN) & called


@pytest.mark.parametrize("path", kernel_headers(), ids=lambda p: p.name)
def test_a_loop_after_if_constexpr_is_in_braces(path: Path) -> None:
    """NVRTC 13.0 drops the statement after a discarded one that begins with a pragma: products were missing, without a word."""
    code = re.sub(r"//.*", "", path.read_text("utf-8"))
    for start in re.finditer(r"\bif constexpr \(", code):
        depth, end = 1, start.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        assert not code[end:].lstrip().startswith("HW_"), code[start.start() : end + 60]


@pytest.mark.parametrize("path", kernel_headers(), ids=lambda p: p.name)
def test_kernel_headers_use_only_the_layer(path: Path) -> None:
    assert offences(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        'asm volatile("");',
        "__shared__ int x;",
        "#include <cuda_bf16.h>",
        "# include <stdint.h>",
        "__syncthreads();",
        "x = __ldg(p);",
        "int i = threadIdx.x;",
        "__device__ int f();",
    ],
)
def test_the_lint_sees_each_offence(text: str) -> None:
    assert offences(f"HW_FN void f() {{}}\n{text}\n")
    assert offences(f"HW_FN void f() {{}}  // {text}\n") == []


def test_each_hw_file_is_written_without_toolkit_names() -> None:
    for path in sorted((CUDA / "hw").glob("*.h")):
        assert not re.search(r"#\s*include\s*<", path.read_text()), path

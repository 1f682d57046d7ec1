"""NVRTC for real, on kernels of a few lines: options, report, headers in memory, errors; no GPU."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from lowbit.errors import CompileError
from lowbit.jit.cache import Cache
from lowbit.jit.compile import Compiled, compile_source, find_compiler
from lowbit.jit.nvrtc import Nvrtc
from lowbit.jit.pool import compile_many
from lowbit.jit.source import Source, gather_headers
from lowbit.jit.toolkit import find_nvcc

KERNEL = 'extern "C" __global__ void k(float* p) { p[threadIdx.x] = p[threadIdx.x] * 2.0f + 1.0f; }\n'

SHARED = """
#include "a.h"
extern "C" __global__ void k(float* p) {
    __shared__ float s[kFloats];
    s[threadIdx.x] = p[threadIdx.x];
    p[threadIdx.x] = s[kFloats - 1 - threadIdx.x];
}
"""

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) k(float* p) {
    float v[64];
    #pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = p[i * 4096 + threadIdx.x];
    #pragma unroll 1
    for (int j = 0; j < 8; ++j) {
        #pragma unroll
        for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i * 7 + 1) % 64] + p[j];
    }
    #pragma unroll
    for (int i = 0; i < 64; ++i) p[i * 4096 + threadIdx.x] = v[i];
}
"""


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc.open()


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path / "cache"))


def compile_text(nvrtc: Nvrtc, text: str, arch: str = "sm_90a", headers: tuple[tuple[str, str], ...] = ()) -> Compiled:
    return compile_source(Source(text, "k", arch, "a test kernel", headers), compiler=nvrtc)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_every_architecture_gives_a_cubin(nvrtc: Nvrtc, arch: str) -> None:
    compiled = compile_text(nvrtc, KERNEL, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert f"Compiling entry function 'k' for '{arch}'" in compiled.log
    assert 0 < compiled.registers < 32
    assert (compiled.spill_bytes, compiled.stack_bytes, compiled.static_smem) == (0, 0, 0)
    assert compiled.compiler == nvrtc.name


def test_headers_come_from_memory_through_folders(nvrtc: Nvrtc, tmp_path: Path) -> None:
    (tmp_path / "hw").mkdir()
    (tmp_path / "a.h").write_text('#pragma once\n#include "hw/hw.h"\n')
    (tmp_path / "hw" / "hw.h").write_text('#pragma once\n#include "core.h"\n#include "core.h"\n#include "../a.h"\n')
    (tmp_path / "hw" / "core.h").write_text("#pragma once\nconstexpr int kFloats = 96;\n")
    headers = gather_headers(SHARED, tmp_path)
    assert compile_text(nvrtc, SHARED, headers=headers).static_smem == 96 * 4


def test_headers_on_the_disk_are_not_seen(nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.h").write_text("constexpr int kFloats = 96;\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CompileError, match=r'source file "a\.h"'):
        compile_text(nvrtc, SHARED)


def test_spills_are_reported(nvrtc: Nvrtc) -> None:
    compiled = compile_text(nvrtc, SPILLING, "sm_80")
    assert compiled.registers == 32
    assert compiled.spill_bytes > 200
    assert compiled.stack_bytes > 100
    assert "spill" in compiled.log.lower()


def test_the_same_text_gives_the_same_cubin(nvrtc: Nvrtc) -> None:
    assert compile_text(nvrtc, KERNEL).cubin == compile_text(nvrtc, KERNEL).cubin


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc on this machine")
def test_nvcc_takes_the_same_source(nvrtc: Nvrtc) -> None:
    headers = (("a.h", '#include "hw/b.h"\n'), ("hw/b.h", "constexpr int kFloats = 96;\n"))
    source = Source(SHARED, "k", "sm_90a", "a test kernel", headers)
    compiled = compile_source(source, compiler=find_compiler("nvcc"))
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.compiler.startswith("nvcc ")
    report = compile_source(source, compiler=nvrtc)
    assert (compiled.static_smem, compiled.spill_bytes) == (report.static_smem, report.spill_bytes) == (96 * 4, 0)
    assert 0 < compiled.registers < 32


@pytest.mark.parametrize(
    ("text", "arch", "words"),
    [
        ("#error this is why\n", "sm_90a", "this is why"),
        ('extern "C" __global__ void k() { asm volatile("wgmma.fence.sync.aligned;"); }\n', "sm_80", "wgmma.fence"),
        (KERNEL, "sm_35", "gpu-architecture"),
    ],
    ids=["front end", "ptxas", "options"],
)
def test_errors_of_every_stage_reach_the_message(
    nvrtc: Nvrtc, text: str, arch: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(CompileError) as caught:
        compile_text(nvrtc, text, arch)
    message = str(caught.value)
    for part in (words, f"a test kernel for {arch}", nvrtc.name, f"--gpu-architecture={arch}"):
        assert part in message
    (kept,) = (tmp_path / "cache" / "failed").glob("*.cu")
    assert str(kept) in message
    assert kept.read_text() == text


def test_threads_compile_at_the_same_time(nvrtc: Nvrtc) -> None:
    cubins: dict[int, bytes] = {}
    texts = [KERNEL.replace("2.0f", f"{i + 2}.0f") for i in range(4)]

    def compile_one(i: int) -> None:
        cubins[i] = compile_text(nvrtc, texts[i]).cubin

    threads = [threading.Thread(target=compile_one, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cubins == {i: compile_text(nvrtc, text).cubin for i, text in enumerate(texts)}


def test_workers_compile_what_this_process_would(nvrtc: Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_COMPILER", "nvrtc")
    sources = [Source(KERNEL, "k", arch, arch) for arch in ("sm_80", "sm_90a", "sm_120a")]
    compiled = compile_many(sources, workers=2, cache=Cache(tmp_path / "pool"))
    assert [c.cubin for c in compiled] == [compile_source(s, compiler=nvrtc).cubin for s in sources]

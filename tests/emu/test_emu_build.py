"""Building and launching: many texts in one library, the cache, error messages, planted faults.

What kernels compute is not the matter here.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import emulator
from lowbit.errors import CompileError, LowbitError

HEAD = """#include "hw/hw.h"
#include "helper.cuh"
using namespace hw;
struct Params { u8* out; u32 n; };
struct Constants { static constexpr u32 kStep = %d; };
"""
BODY = """HW_KERNEL(2 * 32) %s(const HW_GRID_CONST Params p) {
    if (tid_x() < p.n) put<Constants>(p.out, tid_x());
}
"""
HELPER = """#pragma once
#include "hw/hw.h"
#include "deep/inner.cuh"
template <class C>
HW_FN void put(hw::u8* out, hw::u32 i) {
    hw::st_global_u32(out + i * 4, inner(i) * C::kStep);
}
"""
INNER = "#pragma once\nHW_FN hw::u32 inner(hw::u32 i) { return i + 1; }\n"
HEADERS = (("helper.cuh", HELPER), ("deep/inner.cuh", INNER))


def source(step: int, entry: str = "steps", headers: tuple[tuple[str, str], ...] = HEADERS) -> emulator.KernelText:
    text = HEAD % step + BODY % entry
    return emulator.KernelText(text, entry, "sm_80", f"step {step}", headers)


def run(library: emulator.Library, which: object, n: int = 64, block: int = 64, **kwargs: object) -> list[int]:
    with emulator.Memory() as memory:
        out = memory.alloc("out", 256, output=True)
        library.launch(which, struct.pack("<QI4x", out, n), grid=1, block=block, **kwargs)
        return memory.array(out, (n,), np.uint32).tolist()


def test_texts_with_the_same_names_live_in_one_library() -> None:
    sources = [source(3), source(5), source(7, "other")]
    library = emulator.build(sources)
    assert run(library, sources[0])[:3] == [3, 6, 9]
    assert run(library, "step 5")[:3] == [5, 10, 15]
    assert run(library, "other")[:3] == [7, 14, 21]
    with pytest.raises(ValueError, match="'steps' names 2 kernels"):
        run(library, "steps")
    with pytest.raises(ValueError, match="no kernel 'nothing' in this library; it has other, steps"):
        run(library, "nothing")


def test_cache_is_keyed_by_all_that_is_compiled(tmp_path: Path) -> None:
    from emulator.build import build_kernels

    first = build_kernels([source(3)], tmp_path)
    stamp = first.stat().st_mtime_ns
    assert build_kernels([source(3)], tmp_path) == first
    assert first.stat().st_mtime_ns == stamp
    changed = tuple((n, t.replace("i + 1", "i + 2")) for n, t in HEADERS)
    others = [
        build_kernels([source(4)], tmp_path),
        build_kernels([source(3, headers=changed)], tmp_path),
        build_kernels([source(3), source(4)], tmp_path),
    ]
    assert len({first, *others}) == 4
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]  # nothing half built is left


def test_damaged_cache_entry_is_rebuilt(tmp_path: Path) -> None:
    from emulator.build import build_kernels

    path = build_kernels([source(3)], tmp_path)
    size = path.stat().st_size
    path.unlink()
    assert build_kernels([source(3)], tmp_path).stat().st_size == size


def test_compile_error_names_kernel_command_and_place(tmp_path: Path) -> None:
    from emulator.build import build_kernels

    broken = emulator.KernelText(
        source(3).text.replace("tid_x() < p.n", "tid_x() < p.missing"), "steps", "sm_80", "int4 broken", HEADERS
    )
    with pytest.raises(CompileError) as e:
        build_kernels([broken], tmp_path)
    message = str(e.value)
    for part in ("int4 broken", "g++", "missing"):
        assert part in message
    assert "int4_broken.cu:7:" in message  # the line of the text, not of the unit
    kept = Path(message.rsplit("source kept in ", 1)[1].strip())
    assert (kept / "unit.cpp").is_file()
    assert (kept / "cuda" / "deep" / "inner.cuh").read_text() == INNER
    with pytest.raises(CompileError, match=r"includes 'helper\.cuh', which is neither"):
        build_kernels([source(3, headers=())], tmp_path)


def test_wrong_parameter_size_and_block_size_are_refused() -> None:
    library = emulator.build([source(3)])
    with (
        emulator.Memory() as memory,
        pytest.raises(emulator.EmulatorFault, match="parameters of steps are 16 bytes, got 12"),
    ):
        library.launch("steps", struct.pack("<QI", memory.alloc("out", 8), 1), grid=1, block=32)
    with pytest.raises(emulator.EmulatorFault, match=r"96 threads, but the kernel is HW_KERNEL\(64\)"):
        run(library, "steps", 64, 96)
    resident = source(3, "resident")
    resident = replace(resident, text=resident.text.replace("HW_KERNEL(2 * 32)", "HW_KERNEL_RESIDENT((32 + 32), 2)"))
    library = emulator.build([resident])
    assert run(library, "resident")[:2] == [3, 6]
    with pytest.raises(emulator.EmulatorFault, match=r"96 threads, but the kernel is HW_KERNEL\(64\)"):
        run(library, "resident", 64, 96)
    assert issubclass(emulator.EmulatorFault, LowbitError)


def test_fault_names_file_and_line_through_the_headers() -> None:
    library = emulator.build([source(3)])
    with emulator.Memory() as memory:
        out = memory.alloc("out", 100, output=True)
        with pytest.raises(emulator.EmulatorFault) as e:
            library.launch("steps", struct.pack("<QI4x", out, 64), grid=1, block=64)
    assert "at helper.cuh:6 from step_3.cu:7: st.global.u32: 4 bytes at offset" in str(e.value)


def test_a_fault_leaves_the_engine_usable_and_seeds_do_not_change_results() -> None:
    library = emulator.build([source(3)])
    for seed in range(6):
        with pytest.raises(emulator.EmulatorFault), emulator.Memory() as memory:
            library.launch("steps", struct.pack("<QI4x", memory.alloc("out", 4), 64), grid=1, block=64, seed=seed)
        assert run(library, "steps", seed=seed) == [3 * (i + 1) for i in range(64)]


def test_mutate_changes_one_place_of_a_private_copy() -> None:
    sources = [source(3), source(5)]
    changed = emulator.mutate(sources, "deep/inner.cuh", "i + 1", "i + 2")
    library = emulator.build(changed)
    assert run(library, "step 3")[:2] == [6, 9]
    assert run(emulator.build(sources), "step 3")[:2] == [3, 6]
    assert emulator.mutate(sources, "", "tid_x() < p.n", "tid_x() <= p.n")[1].text.count("<= p.n") == 1
    with pytest.raises(ValueError, match="it occurs 0 times"):
        emulator.mutate(sources, "deep/inner.cuh", "i + 9", "")
    with pytest.raises(ValueError, match="it occurs 2 times"):
        emulator.mutate(sources, "", "tid_x()", "")
    with pytest.raises(ValueError, match=r"none of the sources includes 'stream\.cuh'"):
        emulator.mutate(sources, "stream.cuh", "a", "b")


def test_sources_that_disagree_on_a_header_are_refused() -> None:
    other = emulator.mutate([source(5)], "deep/inner.cuh", "i + 1", "i + 2")
    with pytest.raises(ValueError, match=r"two sources bring different texts of 'deep/inner.cuh'"):
        emulator.build([source(3), *other])
    with pytest.raises(ValueError, match="no sources"):
        emulator.build([])


def test_importing_builds_nothing(tmp_path: Path) -> None:
    code = "import emulator, sys; assert 'torch' not in sys.modules"
    root = str(Path(emulator.__file__).parent.parent)
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"LOWBIT_CACHE": str(tmp_path), "PATH": "", "PYTHONPATH": root}
    )
    assert not any(tmp_path.iterdir())


def test_the_example_of_the_package_runs(capsys: pytest.CaptureFixture[str]) -> None:
    import textwrap

    example = emulator.__doc__.split("How to run a kernel:\n")[1].split("A broken rule")[0]
    exec(textwrap.dedent(example), {})
    assert "[  0   2   4   6" in capsys.readouterr().out
    assert "198]" in str(np.arange(0, 200, 2))


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("swizzle of 48", {"swizzle": 48}),
        ("multiples of 16", {"pitch": 200}),
        ("rows a multiple of 16 bytes", {"box_width": 4}),
    ],
)
def test_tensor_map_refuses_what_the_driver_refuses(words: str, change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=words):
        emulator.tensor_map(
            256,
            **{
                "width": 100,
                "height": 40,
                "pitch": 208,
                "elem": 2,
                "box_width": 32,
                "box_height": 8,
                "swizzle": 64,
                **change,
            },
        )

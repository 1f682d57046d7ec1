"""The rules of global memory: bounds, read-only, write-once outputs, order between threads and blocks, several launches.

Kernels here are a few lines each; what they must be told is in the report's words.
"""

# ruff: noqa: E501 - a kernel a line, so that the list reads as a table
from __future__ import annotations

import struct

import numpy as np
import pytest

import emulator

HEAD = """#include "hw/hw.h"
using namespace hw;
struct Params { u8* in; u8* out; u8* work; u8* counter; };
"""
# name: (body, words of the report or "", grid)
BODIES = {
    "copy, right": ("st_global_u32(p.out + i * 4, ld_global_u32(p.in + i * 4));", "", 2),
    "misaligned vector": ("ld_global_v2(p.in + 4 + i * 8);", "not 8-byte aligned", 1),
    "reads past the end": ("ld_global_u32(p.in + 16 + i * 16);", "4 bytes at offset 1024 of 'in', which has 1024 bytes (out of bounds)", 1),
    "reads before the start": ("ld_global_u32(p.in - 4 + i * 4);", "offset -4 of 'in'", 1),
    "vector past the end": ("ld_global_v4(p.in + 1024 - 16 + i / 63 * 16);", "offset 1024 of 'in'", 1),
    "pointer to nowhere": ("ld_global_u32((const u8*)0 + 64);", "not global memory", 1),
    "writes a read-only input": ("if (i == 0) st_global_u32(p.in, 1);", "writes to read-only allocation 'in' at offset 0", 1),
    "two threads write one output": ("st_global_u32(p.out + i / 2 * 4, 1);", "writes output 'out' at offset", 1),
    "two blocks write one output": ("st_global_u32(p.out + t * 4, 1);", "a second time, after thread", 2),
    "overlapping bytes of an output": ("st_global_u16(p.out + i * 2, 1); if (i == 9) st_global_u8(p.out + 21, 1);", "writes output 'out' at offset 21", 1),
    "one thread writes its output twice, right": ("st_global_u32(p.out + i * 4, 1); st_global_u32(p.out + i * 4, 2);", "", 1),
    "atomics on an output": ("if (i == 0) st_global_u32(p.out, 0); syncthreads(); if (i) red_global_add_f32(p.out, 1.0f);", "writes output 'out' at offset 0 a second time", 1),
    "reads an output never written": ("ld_global_u32(p.out + i * 4);", "reads 'out' at offset", 1),
    "reads its own output, right": ("st_global_u32(p.out + i * 4, 7); if (ld_global_u32(p.out + i * 4) != 7) emu::fault(\"wrong\");", "", 1),
    "non-coherent load of what it wrote": ("st_global_u32(p.work + i * 4, 7); syncthreads(); ld_global_nc_u32(p.work + (i ^ 1) * 4);", "non-coherent", 1),
    "exchange through memory in a block, right": ("st_global_u32(p.work + i * 4, 7); syncthreads(); ld_global_u32(p.work + (i ^ 1) * 4);", "", 1),
    "exchange through memory in a block, no barrier": ("st_global_u32(p.work + i * 4, 7); ld_global_u32(p.work + (i ^ 1) * 4);", "'work'", 1),
    "last block sums, right": (
        "st_global_u32(p.work + i * 4, i); syncthreads(); u32 last = 0; if (t == 0) { last = atom_global_add_u32(p.counter, 1) == 2; st_shared_u32(smem_base(), last); }"
        " syncthreads(); last = ld_shared_u32(smem_base()); if (last && t == 0) { u32 s = 0; for (u32 k = 0; k < 192; ++k) s += ld_global_u32(p.work + k * 4);"
        " if (s != 191 * 96) emu::fault(\"wrong\"); st_global_u32(p.out, s); }",
        "", 3,
    ),
    "last block sums, no barrier before the counter": (
        "u32 last = 0; if (t == 0) { last = atom_global_add_u32(p.counter, 1) == 2; st_shared_u32(smem_base(), last); } st_global_u32(p.work + i * 4, i);"
        " syncthreads(); last = ld_shared_u32(smem_base()); if (last && t == 0) for (u32 k = 0; k < 192; ++k) ld_global_u32(p.work + k * 4);",
        "race: ld.global.u32 reads 'work'", 3,
    ),
    "counter added to without release": (
        "st_global_u32(p.work + i * 4, i); syncthreads(); if (t == 0) red_global_add_f32(p.counter, 1.0f);"
        " if (t == 0 && ctaid_x() == 1) { while (ld_global_acquire_u32(p.counter) != 0x40000000) {} ld_global_u32(p.work); ld_global_u32(p.work + 256); }",
        "race: ld.global.u32 reads 'work'", 2,
    ),
    "flag by store-release, right": (
        "if (ctaid_x() == 0) { if (t == 0) { st_global_u32(p.work, 5); st_global_release_u32(p.counter, 1); } }"
        " else if (t == 0) { while (ld_global_acquire_u32(p.counter) == 0) {} if (ld_global_u32(p.work) != 5) emu::fault(\"wrong\"); }", "", 2,
    ),
    "flag by a plain store": (
        "if (ctaid_x() == 0) { if (t == 0) { st_global_u32(p.work, 5); st_global_u32(p.counter, 1); } }"
        " else if (t == 0) { while (ld_global_acquire_u32(p.counter) == 0) {} }", "race", 2,
    ),
    "knowledge passes through a third block, right": (
        "if (t == 0) { if (ctaid_x() == 0) { st_global_u32(p.work, 5); st_global_release_u32(p.counter, 1); }"
        " if (ctaid_x() == 1) { while (ld_global_acquire_u32(p.counter) == 0) {} st_global_release_u32(p.counter + 4, 1); }"
        " if (ctaid_x() == 2) { while (ld_global_acquire_u32(p.counter + 4) == 0) {} ld_global_u32(p.work); } }", "", 3,
    ),
}  # fmt: skip
ALL = {
    **BODIES,
    "write": ("st_global_u32(p.work + i * 4, i + 1);", "", 1),
    "read": ('if (ld_global_nc_u32(p.work + (63 - i) * 4) != 64 - i) emu::fault("wrong");', "", 1),
}


def source(name: str) -> emulator.KernelText:
    body = f"const u32 t = tid_x(), i = ctaid_x() * 64 + t; {ALL[name][0]}"
    return emulator.KernelText(
        f"{HEAD}HW_KERNEL(64) k(const HW_GRID_CONST Params p) {{\n    {body}\n}}\n", "k", "sm_80", name
    )


@pytest.fixture(scope="module")
def library() -> emulator.Library:
    return emulator.build([source(n) for n in ALL])


def allocate(memory: emulator.Memory) -> tuple[int, int, int, int]:
    return (
        memory.alloc("in", np.zeros(256, np.uint32), read_only=True),
        memory.alloc("out", 1024, output=True),
        memory.alloc("work", 1024),
        memory.alloc("counter", np.zeros(2, np.uint32)),
    )


@pytest.mark.parametrize("name", BODIES, ids=lambda n: n.replace(" ", "_"))
def test_rule(name: str, library: emulator.Library) -> None:
    _, want, grid = BODIES[name]
    for seed in range(4):
        with emulator.Memory() as memory:
            params = struct.pack("<4Q", *allocate(memory))
            if not want:
                library.launch(name, params, grid=grid, block=64, smem=16, seed=seed, resident=grid)
                continue
            with pytest.raises(emulator.EmulatorFault) as e:
                library.launch(name, params, grid=grid, block=64, smem=16, seed=seed, resident=grid)
            assert want in str(e.value)


def test_a_launch_sees_what_the_one_before_wrote_and_outputs_may_be_written_again(
    library: emulator.Library, memory: emulator.Memory
) -> None:
    addresses = allocate(memory)
    params = struct.pack("<4Q", *addresses)
    for seed in range(3):
        library.launch("write", params, grid=1, block=64, seed=seed)
        library.launch("read", params, grid=1, block=64, seed=seed)  # nc loads: the write is of an earlier launch
        library.launch("copy, right", params, grid=2, block=64, seed=seed)
    assert memory.array(addresses[1], (128,), np.uint32).tolist() == [0] * 128


def test_what_no_thread_wrote_stays_poisoned(library: emulator.Library, memory: emulator.Memory) -> None:
    addresses = allocate(memory)
    library.launch("copy, right", struct.pack("<4Q", *addresses), grid=1, block=64)
    out = memory.read(addresses[1], 1024)
    assert not out[:256].any()
    assert (out[256:] == 0xFF).all()
    assert memory.unwritten(addresses[1]) == 768


def test_addresses_alignment_and_host_access(memory: emulator.Memory) -> None:
    a = memory.alloc("a", np.arange(10, dtype=np.int16), offset=2)
    b = memory.alloc("b", 0)
    empty = memory.alloc("empty", np.zeros(0, np.float32))
    assert (a % 256, b % 256, empty % 256) == (2, 0, 0)
    assert b - a > 20 + 4000  # guard range
    memory.write(a + 4, np.array([-7], np.int16))
    assert memory.array(a, (2, 5), np.int16).tolist() == [[0, 1, -7, 3, 4], [5, 6, 7, 8, 9]]
    with pytest.raises(ValueError, match="do not lie inside one allocation"):
        memory.read(a, 21)
    with pytest.raises(ValueError, match="do not lie inside one allocation"):
        memory.write(b, b"x")


def test_torch_tensors_travel_both_ways(memory: emulator.Memory) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4).to(torch.bfloat16)
    assert torch.equal(memory.tensor(memory.alloc("x", x.t()), (4, 3), torch.bfloat16), x.t())


def test_one_memory_does_not_free_the_others(memory: emulator.Memory) -> None:
    a = memory.alloc("a", b"abc")
    with emulator.Memory() as other:
        b = other.alloc("b", b"def")
        assert other.read(b, 3).tobytes() == b"def"
    assert memory.read(a, 3).tobytes() == b"abc"
    with pytest.raises(ValueError, match="one allocation"):
        memory.read(b, 3)

"""Replays what an H200 computed for every primitive and compares bit by bit.

A case in the file must match; a case in no list fails: a new hw function needs a recording, or a line in AWAITING.
"""

from __future__ import annotations

import struct

import golden_data as golden
import numpy as np
import pytest

import emulator

# Cases whose recording is still to be made (emulator/device/golden.cu on a chip, then delete the line here).
AWAITING: set[str] = set()
CASES = golden.cases()
RECORDS = golden.records()


def run(library: emulator.Library, memory: emulator.Memory, case: golden.Case, data: bytes, seed: int) -> bytes:
    given = memory.alloc("in", data, read_only=True)
    out = memory.alloc("out", case.out_bytes)
    swizzle = {"TMA1": 128, "TMA2": 64, "TMA3": 32}.get(case.generator, 0)
    tma = case.generator.startswith("TMA")
    tile = (
        emulator.tensor_map(
            given, width=100, height=40, pitch=208, elem=2, box_width=case.arg // 2, box_height=32, swizzle=swizzle
        )
        if tma
        else bytes(128)
    )
    params = tile + struct.pack("<QQii40x", given, out, case.arg, 0)
    library.launch(case.kernel, params, grid=case.ctas, block=case.threads, smem=32768, cluster=case.ctas, seed=seed)
    return memory.read(out, case.out_bytes).tobytes()


def test_every_case_is_recorded_or_awaited_and_not_both() -> None:
    labels = [c.label for c in CASES]
    assert len(labels) == len(set(labels))
    assert set(RECORDS) | AWAITING == set(labels)
    assert not set(RECORDS) & AWAITING, "recorded by now: delete these from AWAITING"
    assert len(set(labels) - AWAITING) >= 53  # what was recorded by 2026-12-01


@pytest.mark.parametrize("case", [c for c in CASES if c.label not in AWAITING], ids=lambda c: c.label)
def test_bit_exact(case: golden.Case, primitives: emulator.Library) -> None:
    data, want = RECORDS[case.label]
    assert (len(data), len(want)) == (case.in_bytes, case.out_bytes)
    for seed in (1, 2, 4):
        with emulator.Memory() as memory:
            got = run(primitives, memory, case, data, seed)
        differ = np.flatnonzero(np.frombuffer(got, np.uint8) != np.frombuffer(want, np.uint8))
        assert differ.size == 0, (
            f"seed {seed}: {differ.size} bytes differ, first at {differ[0]}: "
            f"{got[differ[0]]:02x}, chip {want[differ[0]]:02x}"
        )


def test_a_flipped_bit_is_seen(primitives: emulator.Library, memory: emulator.Memory) -> None:
    case = next(c for c in CASES if c.label == "mma_bf16")
    data, want = RECORDS[case.label]
    changed = bytearray(data)
    changed[1] ^= 0x10
    assert run(primitives, memory, case, bytes(changed), 1) != want


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.label)
def test_case_obeys_the_rules_and_does_not_depend_on_the_order(case: golden.Case, primitives: emulator.Library) -> None:
    """On other numbers than the recorded ones: that a recording is well defined, also one that is still to be made."""
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, case.in_bytes, dtype=np.uint8)
    data[1::2] &= 0x3F  # no NaN or infinity in any 16-bit format
    got = []
    for seed in range(4):
        with emulator.Memory() as memory:
            got.append(run(primitives, memory, case, data.tobytes(), seed))
    assert got[0] == got[1] == got[2] == got[3]
    assert len(set(got[0])) > 2

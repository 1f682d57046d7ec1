"""Shared fixtures of the emulator's tests: built libraries, kept for the session.

Must not hold expectations; those stand in the tests.
"""

from __future__ import annotations

import pytest
from golden_data import GOLDEN, cases

import emulator


@pytest.fixture(scope="session")
def primitives() -> emulator.Library:
    """All primitives of the golden cases in one library, by kernel name."""
    headers = (("prims.h", (GOLDEN / "prims.h").read_text()),)
    names = dict.fromkeys(c.kernel for c in cases())
    return emulator.build(
        [emulator.KernelText('#include "prims.h"\n', name, "sm_90a", name, headers) for name in names]
    )


@pytest.fixture
def memory() -> emulator.Memory:
    """Emulated memory, freed after the test."""
    with emulator.Memory() as m:
        yield m

"""Which row a device gets: its own, its generation's plain one, another maker's; and never another maker's for an NVIDIA device."""

from __future__ import annotations

import pytest

from lowbit.arch import ARCHS, Arch, arch, arch_of_capability, arch_of_device
from lowbit.errors import BadInput

FOREIGN = [row for row in ARCHS.values() if row.target]
NVIDIA = [row for row in ARCHS.values() if not row.target]


@pytest.mark.parametrize("row", NVIDIA, ids=lambda row: row.name)
def test_an_nvidia_device_gets_the_row_of_its_capability_with_its_own_sms(row: Arch) -> None:
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H200", "", "Orin", "NVIDIA PPU-ZW810E"):
        found = arch_of_device(name, *divmod(row.level, 10), 77)
        assert (found.name, found.sms, found.target) == (row.name, 77, "")
        assert found.smem_per_block == row.smem_per_block


@pytest.mark.parametrize("capability", [(8, 8), (9, 1), (11, 0), (12, 3), (13, 0)])
def test_an_unknown_nvidia_device_gets_no_other_makers_row(capability: tuple[int, int]) -> None:
    found = arch_of_capability(*capability)
    assert found.target == found.devices == ""
    assert found.level == 10 * capability[0] + capability[1]
    assert (found.smem_per_block, found.clusters) == (99 * 1024, False) or found.name in ARCHS


def test_too_old_a_device_is_refused() -> None:
    with pytest.raises(BadInput, match=r"7\.5\) or newer; got 7\.0"):
        arch_of_device("Tesla V100", 7, 0, 80)


@pytest.mark.parametrize("name", ["PPU-ZW810E", "PPU-ZW810"])
def test_another_makers_device_is_known_by_its_name(name: str) -> None:
    found = arch_of_device(name, 8, 0, 64)
    assert (found.name, found.sms, found.target, found.level) == ("zhenwu_810e", 64, "sm_80", 80)
    assert arch("zhenwu_810e").sms == 72


def test_other_makers_rows_ask_for_nothing_that_their_target_lacks() -> None:
    assert FOREIGN
    for row in FOREIGN:
        target = arch(row.target)
        assert row.level == target.level
        assert row.smem_per_block <= target.smem_per_block
        assert row.smem_per_sm <= target.smem_per_sm
        assert row.threads_per_sm <= target.threads_per_sm
        assert not row.clusters
        assert row.devices

"""Tensor maps: what the driver is asked for, how seldom, and where the map lies."""

from __future__ import annotations

import ctypes

import pytest
from jit_fakes import FakeCuda

from lowbit.errors import LaunchError
from lowbit.jit.driver import Driver
from lowbit.jit.tensormap import ALIGNMENT, RowsMap, aligned_struct
from lowbit.ops.gemm import Params


def test_rows_are_described_as_boxes_swizzled_by_128_bytes_with_zeros_outside() -> None:
    cuda = FakeCuda(current=[0x100])
    RowsMap(Driver(cuda), 0x1000, width=264, box_width=64, box_rows=16)(0x7F00, rows=7, pitch=1024)
    # 16-bit numbers in two dimensions; no interleaving, swizzle 3 (128 bytes), promotion to 256 bytes in L2, no fill but zeros
    assert cuda.named("map") == [(0x1000, 1, 2, 0x7F00, (264, 7), (1024,), (64, 16), (1, 1), (0, 3, 3, 0))]


def test_only_another_matrix_is_encoded_again() -> None:
    cuda = FakeCuda(current=[0x100])
    rows_map = RowsMap(Driver(cuda), 0x1000, width=64, box_width=64, box_rows=8)
    for base, rows, pitch in ((16, 3, 128), (16, 3, 128), (32, 3, 128), (32, 4, 128), (32, 4, 256), (32, 4, 256), (16, 3, 128)):
        rows_map(base, rows, pitch)
    assert [(call[3], call[4][1], call[5][0]) for call in cuda.named("map")] == [
        (16, 3, 128), (32, 3, 128), (32, 4, 128), (32, 4, 256), (16, 3, 128),
    ]  # fmt: skip


def test_one_row_needs_no_pitch() -> None:
    cuda = FakeCuda(current=[0x100])
    RowsMap(Driver(cuda), 0x1000, width=64, box_width=64, box_rows=8)(16, rows=1, pitch=0)
    assert cuda.named("map")[0][5] == (128,)


def test_a_refusal_names_the_matrix_and_is_not_remembered_as_done() -> None:
    cuda = FakeCuda(current=[0x100], fail={"cuTensorMapEncodeTiled": 1})
    rows_map = RowsMap(Driver(cuda), 0x1000, width=64, box_width=64, box_rows=8)
    with pytest.raises(LaunchError, match=r"a tensor map of 3 rows of 64 numbers, 100 bytes apart, at 0x10: cuTensorMapEncodeTiled failed"):
        rows_map(16, rows=3, pitch=100)
    cuda.fail.clear()
    rows_map(16, rows=3, pitch=100)
    assert len(cuda.named("map")) == 1


def test_the_map_in_the_parameters_is_aligned_as_the_driver_wants_it() -> None:
    offset = Params.x_map.offset
    for _ in range(20):
        params = aligned_struct(Params, offset)
        assert (ctypes.addressof(params) + offset) % ALIGNMENT == 0
        assert bytes(params) == bytes(ctypes.sizeof(Params))
        params.m = 5
        assert params.m == 5
    assert (offset, ctypes.sizeof(Params)) == (64, 192)  # as C++ lays out lowbit::Params

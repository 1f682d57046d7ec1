"""Loading and launching against a fake libcuda: what reaches the driver, byte for byte, and what its errors become."""

from __future__ import annotations

import ctypes
import struct
import threading

import pytest
from jit_fakes import FakeCuda, make_compiled

from lowbit.errors import LaunchError
from lowbit.jit.driver import Driver, LaunchAttribute, LaunchAttributeValue, LaunchConfig
from lowbit.jit.module import Kernel, Modules


class Params(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint64), ("m", ctypes.c_uint32), ("n", ctypes.c_uint32))


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(current=[0x100])


@pytest.fixture
def kernel(cuda: FakeCuda) -> Kernel:
    return Modules(Driver(cuda)).load(make_compiled(), 0)


def test_struct_layouts_are_those_of_the_driver() -> None:
    assert ctypes.sizeof(LaunchAttributeValue) == 64
    assert (ctypes.sizeof(LaunchAttribute), LaunchAttribute.id.size, LaunchAttribute.value.offset) == (72, 4, 8)
    assert ctypes.sizeof(LaunchConfig) == 56
    assert [getattr(LaunchConfig, name).offset for name, *_ in LaunchConfig._fields_] == [
        *range(0, 28, 4),
        *(32, 40, 48),
    ]


def test_a_launch_passes_grid_block_stream_and_the_bytes_of_the_struct(cuda: FakeCuda, kernel: Kernel) -> None:
    params = Params(0x7F00DEADBEEF, 5, 6)
    launch = kernel.prepare(params, (384, 2, 1), 1024)
    launch(132, 3, 0x7F1234567890)
    params.m = 17
    launch(1, 1, 0)
    first, second = cuda.launches
    assert (first.grid, first.block, first.smem_bytes) == ((132, 3, 1), (384, 2, 1), 1024)
    assert first.stream == 0x7F1234567890
    assert first.function == kernel.function
    assert first.params == struct.pack("<QII", 0x7F00DEADBEEF, 5, 6)
    assert first.attributes == []
    assert (second.grid, second.stream) == ((1, 1, 1), None)
    assert second.params == struct.pack("<QII", 0x7F00DEADBEEF, 17, 6)


def test_cluster_and_pdl_become_attributes(cuda: FakeCuda, kernel: Kernel) -> None:
    kernel.launch((8, 4, 2), (32, 1, 1), 0, Params(), 9, cluster=4, pdl=True)
    kernel.launch((8, 4, 2), (32, 1, 1), 0, Params(), 9, pdl=True)
    kernel.launch((8, 4, 2), (32, 1, 1), 0, Params(), 9, cluster=2)
    pdl = (6, struct.pack("<i", 1).ljust(64, b"\0"))
    both, only_pdl, only_cluster = cuda.launches
    assert both.grid == (8, 4, 2)
    assert both.attributes == [(4, struct.pack("<III", 4, 1, 1).ljust(64, b"\0")), pdl]
    assert only_pdl.attributes == [pdl]
    assert only_cluster.attributes == [(4, struct.pack("<III", 2, 1, 1).ljust(64, b"\0"))]


def test_large_shared_memory_and_clusters_are_asked_for_once(cuda: FakeCuda, kernel: Kernel) -> None:
    for smem_bytes in (48 * 1024, 100_000, 90_000, 100_000, 200_000):
        kernel.prepare(Params(), (32, 1, 1), smem_bytes)
    kernel.prepare(Params(), (32, 1, 1), cluster=8)
    kernel.prepare(Params(), (32, 1, 1), cluster=16)
    assert cuda.named("attribute") == [(0x100, 8, 100_000), (0x100, 8, 200_000), (0x100, 14, 1)]


def test_attributes_are_set_in_the_kernels_context_whatever_is_current(cuda: FakeCuda) -> None:
    kernel = Modules(Driver(cuda)).load(make_compiled(), 1)
    kernel.prepare(Params(), (32, 1, 1), 100_000)
    assert cuda.named("attribute") == [(0x101, 8, 100_000)]
    assert cuda.current == [0x100]


def test_each_device_has_its_own_module_and_the_current_context_stays(cuda: FakeCuda) -> None:
    modules = Modules(Driver(cuda))
    kernels = [modules.load(make_compiled(), index) for index in (0, 1, 0, 1)]
    assert cuda.named("load") == [(0x100, b"one"), (0x101, b"one")]
    assert kernels[0] is kernels[2]
    assert kernels[1] is kernels[3]
    assert kernels[0].function != kernels[1].function
    assert [kernel.context for kernel in kernels[:2]] == [0x100, 0x101]
    assert cuda.current == [0x100]
    assert cuda.named("retain") == [(0,), (1,)]


def test_loading_without_any_current_context_leaves_none() -> None:
    cuda = FakeCuda()
    Modules(Driver(cuda)).load(make_compiled(), 1)
    assert cuda.current == []
    assert cuda.named("load") == [(0x101, b"one")]


def test_modules_are_told_apart_by_content_not_by_label(cuda: FakeCuda) -> None:
    modules = Modules(Driver(cuda))
    same = [modules.load(make_compiled("one", label=label), 0) for label in ("a", "b")]
    other = modules.load(make_compiled("two"), 0)
    assert same[0] is same[1]
    assert other is not same[0]
    assert cuda.named("load") == [(0x100, b"one"), (0x100, b"two")]


def test_functions_are_loaded_with_their_module_where_the_driver_can(cuda: FakeCuda, kernel: Kernel) -> None:
    assert cuda.named("funcload") == [(kernel.function,)]


def test_threads_loading_the_same_kernel_load_it_once(cuda: FakeCuda) -> None:
    modules, found = Modules(Driver(cuda)), []
    barrier = threading.Barrier(8)

    def load() -> None:
        barrier.wait()
        found.append(modules.load(make_compiled(), 0))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert len(cuda.named("load")) == 1


def test_launching_while_another_device_is_current_is_refused(cuda: FakeCuda, kernel: Kernel) -> None:
    launch = kernel.prepare(Params(), (32, 1, 1))
    cuda.current = [0x101]
    with pytest.raises(LaunchError, match=r"int4_g128 stream.*device 0.*torch\.cuda\.device\(0\)"):
        launch(1, 1, 0)
    assert cuda.launches == []
    assert cuda.current == [0x101]


def test_a_thread_without_a_context_gets_the_kernels(cuda: FakeCuda) -> None:
    launch = Modules(Driver(cuda)).load(make_compiled(), 1).prepare(Params(), (32, 1, 1))
    cuda.current = []
    launch(1, 1, 0)
    launch(2, 1, 0)
    assert cuda.current == [0x101]
    assert [record.grid for record in cuda.launches] == [(1, 1, 1), (2, 1, 1)]


def test_a_refused_launch_says_what_was_asked_for(cuda: FakeCuda, kernel: Kernel) -> None:
    launch = kernel.prepare(Params(), (1024, 1, 1), 300_000, cluster=2)
    cuda.fail["cuLaunchKernelEx"] = 1
    with pytest.raises(LaunchError) as caught:
        launch(7, 5, 0)
    for part in ("int4_g128 stream", "(7, 5, 1)", "(1024, 1, 1)", "300000", "CUDA_ERROR_1", "words for 1", "exceed"):
        assert part in str(caught.value)


def test_a_sticky_error_is_laid_on_the_earlier_kernel(cuda: FakeCuda, kernel: Kernel) -> None:
    launch = kernel.prepare(Params(), (32, 1, 1))
    cuda.fail["cuLaunchKernelEx"] = 700
    with pytest.raises(LaunchError, match="an earlier kernel on this device failed"):
        launch(1, 1, 0)


def test_a_struct_of_another_size_than_the_kernels_is_refused(cuda: FakeCuda, kernel: Kernel) -> None:
    cuda.param_bytes = 24
    with pytest.raises(LaunchError, match="has 24 bytes, the one given has 16"):
        kernel.prepare(Params(), (32, 1, 1))


def test_a_cubin_for_another_architecture_names_both(cuda: FakeCuda) -> None:
    cuda.fail["cuModuleLoadData"] = 209
    with pytest.raises(LaunchError, match=r"int4_g128 stream for sm_90a on device 1.*CUDA_ERROR_209.*architecture"):
        Modules(Driver(cuda)).load(make_compiled(), 1)
    assert cuda.current == [0x100]


def test_a_load_that_failed_is_unloaded_and_can_be_tried_again(cuda: FakeCuda) -> None:
    modules = Modules(Driver(cuda))
    cuda.fail["cuModuleGetFunction"] = 500
    with pytest.raises(LaunchError, match="CUDA_ERROR_500"):
        modules.load(make_compiled(), 0)
    assert cuda.named("unload") == [(0x1001,)]
    cuda.fail.clear()
    assert modules.load(make_compiled(), 0).function == 0x1002 << 4


def test_a_driver_that_does_not_start_is_a_launch_error() -> None:
    with pytest.raises(LaunchError, match="cuInit failed with CUDA_ERROR_100"):
        Driver(FakeCuda(fail={"cuInit": 100}))

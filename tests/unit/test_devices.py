"""Two pretended GPUs: the tensors' device decides what is compiled, loaded and launched where, whichever device is current.

The driver is jit_fakes.FakeCuda, tensors are CPU tensors that name another device; nothing is computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jit_fakes import FakeCuda, write_compiler_command
from torch import Tensor

import lowbit
from lowbit.jit.driver import ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, Driver
from lowbit.jit.module import Modules
from lowbit.ops import gemm

CHIPS = [SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132),
         SimpleNamespace(name="NVIDIA A100-SXM4-80GB", major=8, minor=0, multi_processor_count=108)]  # fmt: skip


class OnGpu(Tensor):
    """A CPU tensor that says it lies on cuda:`index`."""

    index: int
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", self.index))

    def get_device(self) -> int:
        return self.index


def on(t: Tensor, index: int) -> Tensor:
    found = t.as_subclass(OnGpu)
    found.index = index
    return found


class Machine:
    """What a test sees of the pretended machine."""

    def __init__(self, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda = cuda
        self.made: list[torch.device] = []  # where outputs were allocated
        self._empty = torch.empty
        modules = Modules(Driver(cuda))
        monkeypatch.setattr(gemm, "load", modules.load)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: CHIPS[index])
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: cuda.current[-1] - 0x100, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x7000 + index, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
        monkeypatch.setattr(torch, "empty", self.empty)

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        self.cuda.current.append(0x100 + index)
        try:
            yield
        finally:
            self.cuda.current.pop()

    def empty(self, *size: Any, device: Any = "cpu", **options: Any) -> Tensor:
        if torch.device(device).type != "cuda":
            return self._empty(*size, device=device, **options)
        self.made.append(device)
        return on(self._empty(*size, **options), device.index)

    def images(self, context: int) -> list[str]:
        """The kernel texts loaded into a context; the pretended compiler hands them through."""
        return [image.decode() for where, image in self.cuda.named("load") if where == context]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path))
    monkeypatch.setenv("LOWBIT_COMPILER", str(write_compiler_command(tmp_path / "nvcc")))
    gemm.device_arch.cache_clear()
    gemm.runner.cache_clear()
    yield Machine(FakeCuda(param_bytes=ctypes.sizeof(gemm.Params), current=[0x100]), monkeypatch)
    gemm.device_arch.cache_clear()
    gemm.runner.cache_clear()


def layer_on(index: int) -> lowbit.Linear:
    layer = lowbit.Linear.empty("int4_g128", 48, 256)
    layer._buffers["units"] = on(layer.units, index)
    return layer


def tokens(index: int, *shape: int) -> Tensor:
    return on(torch.zeros(*shape, 256, dtype=torch.bfloat16), index)


def test_each_device_gets_kernels_of_its_own_chip_whatever_is_current(machine: Machine) -> None:
    cuda, layers = machine.cuda, [layer_on(0), layer_on(1)]
    for index in (1, 0, 1):
        y = layers[index](tokens(index, 3))
        assert y.shape == (3, 48)
        assert y.get_device() == index
        assert cuda.current == [0x100]
    assert [device.index for device in machine.made] == [1, 0, 1]
    assert [record.stream for record in cuda.launches] == [0x7001, 0x7000, 0x7001]
    here, there = machine.images(0x100), machine.images(0x101)
    assert len(here) == len(there) == 1
    assert "kLevel = 90;" in here[0]
    assert "kLevel = 80;" in there[0]
    functions = [record.function for record in cuda.launches]
    assert functions[0] == functions[2] != functions[1]
    assert [len(record.attributes) for record in cuda.launches][0::2] == [0, 0]  # no overlap of kernels on sm_80
    layers[0](tokens(0, 3))  # the second call on Hopper may start before the kernel ahead of it ends
    assert ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION in [id for id, _ in cuda.launches[-1].attributes]


def test_a_layer_that_moved_takes_the_kernels_of_its_new_device(machine: Machine) -> None:
    layer = layer_on(0)
    layer(tokens(0, 1))
    layer._buffers["units"] = on(torch.zeros_like(layer.units).as_subclass(Tensor), 1)
    layer(tokens(1, 1))
    assert [record.stream for record in machine.cuda.launches] == [0x7000, 0x7001]
    assert machine.cuda.launches[0].function != machine.cuda.launches[1].function


def test_equal_chips_share_compiled_code_but_no_module(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: CHIPS[0])
    for index in (0, 1):
        layer_on(index)(tokens(index, 1))
    assert machine.images(0x100) == machine.images(0x101)
    assert machine.cuda.launches[0].function != machine.cuda.launches[1].function


@pytest.mark.parametrize(("x_on", "weights_on"), [(0, 1), (1, 0)])
def test_x_on_another_device_than_the_weights_is_refused(machine: Machine, x_on: int, weights_on: int) -> None:
    with pytest.raises(lowbit.BadInput, match=f"one device; got x on cuda:{x_on}, weights on cuda:{weights_on}"):
        layer_on(weights_on)(tokens(x_on, 3))
    with pytest.raises(lowbit.BadInput, match=f"out must be on the device of x, cuda:{x_on}; got cuda:{weights_on}"):
        layer_on(x_on)(tokens(x_on, 3), out=on(torch.zeros(3, 48, dtype=torch.bfloat16), weights_on))
    assert machine.cuda.launches == []


def test_output_tensors_of_the_caller_reach_the_kernel_and_are_counted_as_changed(machine: Machine) -> None:
    layer = layer_on(1)
    for shape in ((3,), (2, 3)):
        x, y = tokens(1, *shape), on(torch.zeros(*shape, 48, dtype=torch.bfloat16), 1)
        version = y._version
        assert layer(x, out=y) is y
        assert y._version > version
        params = gemm.Params.from_buffer_copy(machine.cuda.launches[-1].params)
        assert (params.x, params.y, params.m) == (x.data_ptr(), y.data_ptr(), x.numel() // 256)
    y = on(torch.zeros(0, 48, dtype=torch.bfloat16), 1)
    assert layer(tokens(1, 0), out=y) is y
    assert len(machine.cuda.launches) == 2
    assert machine.made == []


def test_batch_invariant_layers_have_kernels_of_their_own(machine: Machine) -> None:
    plain, invariant = layer_on(0), lowbit.Linear.empty("int4_g128", 48, 256, batch_invariant=True)
    invariant._buffers["units"] = on(invariant.units, 0)
    for layer in (plain, invariant):
        layer(tokens(0, 3))
    seen = [layer._runner for layer in (plain, invariant)]
    assert [found is not None and found.problem.batch_invariant for found in seen] == [False, True]
    assert "batch-invariant" in machine.images(0x100)[1]
    assert "batch-invariant" in repr(invariant)
    assert "batch-invariant" not in repr(plain)

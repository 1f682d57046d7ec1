"""8-bit activations on tensors of any device: the kernel on CUDA, the same numbers in PyTorch elsewhere (quantize/activations.py).

It must not know weights or products.
"""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache

import torch
from torch import Tensor

from lowbit.activations import ActSpec
from lowbit.errors import Unsupported
from lowbit.jit.cache import Cache
from lowbit.jit.generate import generate_act
from lowbit.jit.module import Launch, load
from lowbit.ops.checks import NAMES
from lowbit.ops.gemm import device_arch, rows_of
from lowbit.problem import ActProblem
from lowbit.quantize import activations

CODE_COLUMNS = 16  # rows of codes are padded to a multiple of it, with zeros
SMEM_BYTES = 128  # one word a warp


class ActParams(ctypes.Structure):
    """`lowbit::ActParams` in cuda/quantize_act.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("x_pitch", ctypes.c_uint64),
        ("m", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


def quantize_act(x: Tensor, act: str | ActSpec, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x (..., K) of bf16 or fp16 -> codes uint8 (..., K) and scales float32 (..., groups); see `lowbit.quantize.activations`.

    On CUDA rows of codes lie a multiple of 16 bytes apart. Raises UnknownSpec, BadInput, BadType, Unsupported.
    """
    spec = ActSpec.parse(act) if isinstance(act, str) else act
    activations.check_act_input(x, spec, scale)
    if x.device.type != "cuda":
        return activations.quantize_act(x, spec, scale)
    rows = rows_of(x, x.shape[-1])
    codes, scales = _runner(spec, NAMES[x.dtype], rows.shape[1], x.get_device())(rows, scale)
    leading, k = x.shape[:-1], x.shape[-1]
    return codes[:, :k].view(*leading, k), scales.view(*leading, spec.groups(k))


class _Runner:
    """One kernel on one device; every thread fills arguments of its own."""

    def __init__(self, problem: ActProblem, index: int) -> None:
        if reasons := problem.obstacles:
            raise Unsupported(reasons)
        self.problem, self.index = problem, index
        self._compiled = Cache().get_or_compile(generate_act(problem))
        self._local = threading.local()

    def __call__(self, rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """rows (M, k) as `rows_of` gives them, on this device -> codes (M, k rounded up), scales (M, groups)."""
        m, k = rows.shape
        codes = torch.empty((m, -(-k // CODE_COLUMNS) * CODE_COLUMNS), dtype=torch.uint8, device=rows.device)
        scales = torch.empty((m, self.problem.spec.groups(k)), dtype=torch.float32, device=rows.device)
        if m:
            with torch.cuda.device(self.index):
                launch = self._launch()
                params = launch.params
                params.x, params.codes, params.scales = rows.data_ptr(), codes.data_ptr(), scales.data_ptr()
                params.scale = None if scale is None else scale.data_ptr()
                params.x_pitch, params.m = rows.stride(0) * 2, m
                launch(m, 1, torch._C._cuda_getCurrentRawStream(self.index))
        return codes, scales

    def _launch(self) -> Launch:
        try:
            found: Launch = self._local.launch
        except AttributeError:
            kernel = load(self._compiled, self.index)
            found = kernel.prepare(ActParams(), (self.problem.threads, 1, 1), SMEM_BYTES, pdl=self.problem.arch.bulk)
            self._local.launch = found
        return found


@lru_cache(maxsize=256)
def _runner(spec: ActSpec, x: str, k: int, index: int) -> _Runner:
    return _Runner(ActProblem(spec, x, k, device_arch(index)), index)

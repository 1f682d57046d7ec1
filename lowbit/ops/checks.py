"""What tensors must be for a product: types, shapes, devices, places in memory, each refusal with the value found and the remedy.

Knows tensors and layouts; it must not know kernels or how a product is run (gemm.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.errors import BadInput, BadType, Unsupported
from lowbit.layout.pack import Layout
from lowbit.problem import ACTIVATIONS, OUTPUTS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def check_input(x: Tensor, k: int, act: str) -> None:
    """One clear error for an x that does not fit the weights. Raises BadInput or BadType."""
    if not isinstance(x, Tensor):
        raise BadType(f"x must be a tensor; got {type(x).__name__}")
    if x.dtype != DTYPES[act]:
        name = NAMES.get(x.dtype)
        other = f", or build the layer with act={name!r}" if name in ACTIVATIONS else ""
        raise BadType(f"x must be {DTYPES[act]} for act={act!r}; got {x.dtype}: convert x{other}")
    if x.dim() < 1 or x.shape[-1] != k:
        raise BadInput(f"the last dimension of x must be k={k}; got x of shape {tuple(x.shape)}")
    if x.requires_grad and torch.is_grad_enabled():
        raise BadInput("lowbit computes no gradients and x requires one; call under torch.no_grad() or pass x.detach()")


def check_into(y: Tensor, x: Tensor, n: int, out: str, weights: tuple[Tensor | None, ...]) -> None:
    """One clear error for an output tensor of the caller's that kernels cannot write, or must not: what they read lies there.

    weights: units, channel, bias and, if there is one, perm. Raises BadInput or BadType.
    """
    check_into_form(y, x, n, out)
    if y.data_ptr() % 16:
        raise BadInput(f"out must begin at a multiple of 16 bytes, as new tensors do; got address {y.data_ptr():#x}")
    begin, end = _span(y)
    names = ("x", "the packed weights", "the channel scales", "the bias", "the order of columns")
    for name, t in zip(names, (x, *weights), strict=False):
        if t is not None and t.device == y.device:
            first, last = _span(t)
            if first < end and begin < last:
                raise BadInput(f"out must not share memory with {name}, which is read while out is written: give another tensor")


def check_into_form(y: Tensor, x: Tensor, n: int, out: str) -> None:
    """The part of `check_into` that can be told before there are addresses."""
    if not isinstance(y, Tensor):
        raise BadType(f"out must be a tensor; got {type(y).__name__}")
    if y.dtype != DTYPES[out]:
        raise BadType(f"out must be {DTYPES[out]}, the output type; got {y.dtype}: give out_dtype to have another")
    shape = (*x.shape[:-1], n)
    if tuple(y.shape) != shape:
        raise BadInput(f"out must have the shape of the result, {shape}; got {tuple(y.shape)}")
    if y.device != x.device:
        raise BadInput(f"out must be on the device of x, {x.device}; got {y.device}")
    if not y.is_contiguous():
        raise BadInput(f"out must be contiguous; got strides {y.stride()}")
    if y.requires_grad and torch.is_grad_enabled():
        raise BadInput("lowbit computes no gradients and out requires one; call under torch.no_grad() or pass out.detach()")


def _span(t: Tensor) -> tuple[int, int]:
    """First address of a tensor's elements, and the one behind the last."""
    begin = t.data_ptr()
    if not t.numel():
        return begin, begin
    return begin, begin + t.element_size() * (
        1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    )


def check_operands(layout: Layout, bits: int = 16) -> None:
    """Raises BadInput for weights packed for activations of another width: their codes lie elsewhere."""
    if layout.operand_bits != bits:
        raise BadInput(f"{bits}-bit activations need weights packed for {bits}-bit operands; {layout.tag} is for {layout.operand_bits} bits")


def check_act(act: str, out: str) -> None:
    """Raises Unsupported for an activation or output type that no kernel has."""
    if act not in ACTIVATIONS:
        raise Unsupported([f"act must be one of {', '.join(ACTIVATIONS)}; got {act!r}"])
    if out not in OUTPUTS:
        raise Unsupported([f"the output must be one of {', '.join(OUTPUTS)}; got {out!r}"])


def out_name(act: str, out_dtype: torch.dtype | None) -> str:
    """The output type's name; by default the activation's."""
    if out_dtype is None:
        return act
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in NAMES:
        raise BadType(f"out_dtype must be one of {', '.join(map(str, NAMES))}; got {out_dtype}")
    return NAMES[out_dtype]

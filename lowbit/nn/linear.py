"""Linear: a packed weight, its kernels and a bias as an nn.Module that can be saved, copied, moved, traced and captured.

Wiring around ops/gemm.py; it must not know kernels, plans or checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.errors import BadInput, BadType
from lowbit.layout.pack import Layout, PackedWeight, check_order, pack, tag_text, unpack
from lowbit.ops import checks, gemm
from lowbit.weights import QuantWeight, WeightSpec, spec


class Linear(nn.Module):
    """y = x w^T + bias with quantised weights: x (..., K) of the activation type -> y (..., N).

    qw: a dense QuantWeight (N, K); it is packed on the device where it lies and not kept. bias: float (N,), kept in float32.
    act: "bf16" or "fp16", what x must be and is multiplied as. out_dtype: torch.bfloat16, float16 or float32, default x's.
    Weights are multiplied exactly, but for two cases: codebooks, whose values are rounded to the activation type, and bf16 activations of
    more than 32 tokens on chips other than Hopper (there in plans of tile_mma and tile_wgmma, which are taken by name alone), where a weight times
    its group's scale may be rounded to bf16, by at most 2^-8 (not with batch_invariant). On the CPU nothing is rounded.
    batch_invariant: a row's bits do not depend on how many rows there are, nor on the others: one order of sums for every M, for up to 1.3
    times the time up to 16 tokens on Hopper, more elsewhere (`explain` tells).
    On CUDA tensors it runs the compiled kernels, on CPU tensors the reference. Any number of tokens, including none; inference only.

    The state dict holds `units` (uint8, packed), `channel` and `bias` (float32, where there are any), `tag` (uint8 text naming the
    layout) and, with act-order, `perm` and `groups` (int32, see PackedWeight); it loads into a Linear of the same layout on any machine,
    see `Linear.empty` and `Linear.like`. Casts such as `.half()` leave them alone. With act-order each call gathers the columns of x
    first: one more kernel and a copy.
    Weights may be changed in place at any time (load_state_dict, copy_; after writing through `.data` see `weights_changed`); pointers
    stay, captured graphs see the new weights.

    Raises BadInput, BadType or Unsupported at construction.
    """

    units: Tensor
    channel: Tensor | None
    bias: Tensor | None
    perm: Tensor | None
    groups: Tensor | None
    tag: Tensor

    def __init__(
        self,
        qw: QuantWeight,
        bias: Tensor | None = None,
        act: str = "bf16",
        *,
        out_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(qw, QuantWeight):
            raise BadType(f"Linear takes a QuantWeight, as lowbit.quantize returns; got {type(qw).__name__}")
        if qw.experts is not None:
            raise BadInput(f"Linear takes one weight (N, K); got {qw.experts} experts: use one Linear per expert")
        self._set_up(Layout.of(qw), act, out_dtype, batch_invariant, qw.device)
        if bias is not None:
            bias = gemm.check_bias(bias, qw.n)
            if bias.device != qw.device:
                raise BadInput(f"bias and weights must be on one device; got {bias.device} and {qw.device}")
            if not bool(torch.isfinite(bias).all()):
                raise BadInput(f"bias must be finite; got {bias[~torch.isfinite(bias)][0].item()}")
            bias = bias.clone()  # never an alias of the caller's tensor
        packed = pack(qw)
        self._register(packed.units, packed.channel, bias, packed.perm, packed.groups)

    @classmethod
    def empty(
        cls,
        weight_spec: str | WeightSpec,
        n: int,
        k: int,
        *,
        bias: bool = False,
        act: str = "bf16",
        out_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
        device: torch.device | str = "cpu",
    ) -> Linear:
        """A Linear of that layout with zeroed tensors, to load a state dict into.

        With act-order it is the layout of groups that all have the spec's number of columns; for any other see `like`.
        """
        layout = Layout(spec(weight_spec), n, k)
        return cls.like(layout, bias=bias, act=act, out_dtype=out_dtype, batch_invariant=batch_invariant, device=device)

    @classmethod
    def like(
        cls,
        tag: Tensor | str | Layout,
        *,
        bias: bool = False,
        act: str = "bf16",
        out_dtype: torch.dtype | None = None,
        batch_invariant: bool = False,
        device: torch.device | str = "cpu",
    ) -> Linear:
        """As `empty`, of the layout that the `tag` of a state dict names. Raises BadInput for anything else."""
        text = tag if isinstance(tag, str) else tag_text(tag)
        layout = tag if isinstance(tag, Layout) else Layout.parse(text or "")
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        device = torch.device(device)
        self._set_up(layout, act, out_dtype, batch_invariant, device)

        def zeros(there: bool, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return torch.zeros(shape, dtype=dtype, device=device) if there else None

        order, steps = layout.spec.act_order, layout.packed_k // (layout.order_step or 1)
        self._register(
            torch.zeros((1, layout.expert_bytes), dtype=torch.uint8, device=device),
            zeros(layout.has_channel, 1, layout.n),
            zeros(bias, layout.n),
            zeros(order, layout.packed_k, dtype=torch.int32),
            zeros(order, steps, dtype=torch.int32),
        )
        return self

    def _set_up(
        self, layout: Layout, act: str, out_dtype: torch.dtype | None, batch_invariant: bool, device: torch.device
    ) -> None:
        if not isinstance(batch_invariant, bool):
            raise BadType(f"batch_invariant must be True or False; got {batch_invariant!r}")
        out = checks.out_name(act, out_dtype)
        checks.check_act(act, out)
        checks.check_operands(layout)
        self.layout, self._natural = layout, layout.natural
        self.act, self.out, self.batch_invariant = act, out, batch_invariant
        self._name = str(self._natural.spec)  # what the traced op gets: tracing must not walk through the spec
        self._runner: gemm.Runner | None = None
        if device.type == "cuda":
            self._find_runner(_index(device))  # refuses here, not at the first request

    def _register(
        self, units: Tensor, channel: Tensor | None, bias: Tensor | None, perm: Tensor | None, groups: Tensor | None
    ) -> None:
        self.register_buffer("units", units)
        self.register_buffer("channel", channel)
        self.register_buffer("bias", bias)
        self.register_buffer("perm", perm)
        self.register_buffer("groups", groups)
        device = "cpu" if units.is_meta else units.device  # text that must not be lost
        self.register_buffer("tag", torch.tensor(list(self.layout.tag.encode()), dtype=torch.uint8, device=device))

    @property
    def in_features(self) -> int:
        return self.layout.k

    @property
    def out_features(self) -> int:
        return self.layout.n

    @property
    def spec(self) -> WeightSpec:
        return self.layout.spec

    def forward(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        """x (..., K) -> (..., N). Raises BadInput or BadType for an x or out that does not fit.

        out: a contiguous (..., N) of the output type to write to and return, at a multiple of 16 bytes and apart from all that is read.
        """
        checks.check_input(x, self.layout.k, self.act)
        if torch.compiler.is_compiling():
            x = gemm.in_packed_order(x, self.perm)
            return gemm.traced(
                x,
                self.units,
                self.channel,
                self.bias,
                self._name,
                self.layout.n,
                self.act,
                self.out,
                out,
                self.batch_invariant,
            )
        buffers = self._buffers  # attribute look-up through nn.Module costs 0.7 us a piece
        units, channel, bias, perm = buffers["units"], buffers["channel"], buffers["bias"], buffers["perm"]
        if out is not None:
            checks.check_into(out, x, self.layout.n, self.out, (units, channel, bias, perm))
        if perm is not None:
            x = gemm.in_packed_order(x, perm)
        if units is None or not x.is_cuda or x.get_device() != units.get_device():
            return gemm.run(x, self.units, channel, bias, self._natural, self.act, self.out, out, self.batch_invariant)
        index = x.get_device()
        runner = self._runner
        if runner is None or runner.index != index:
            self._runner = runner = self._find_runner(index)
        if torch._C._cuda_getDevice() == index:
            return runner(x, units, channel, bias, out)
        with torch.cuda.device(index):
            return runner(x, units, channel, bias, out)

    def _find_runner(self, index: int) -> gemm.Runner:
        seen = self._natural
        return gemm.runner(seen.spec, seen.n, seen.k, self.act, self.out, index, self.batch_invariant)

    def packed(self) -> PackedWeight:
        """The weights as packed tensors (shared, not copied)."""
        return PackedWeight(self.layout, None, self.units, self.channel, self.perm, self.groups)

    def quant_weight(self) -> QuantWeight:
        """The canonical weights, unpacked anew."""
        return unpack(self.packed())

    def weights_changed(self) -> None:
        """To be called after weights were written in a way that PyTorch does not count: through `.data`, by a collective, by a foreign
        kernel. The next call then waits for what is ahead of it in the stream. `load_state_dict`, `copy_` and the like need no call.
        """
        gemm.weights_changed(self.units)

    def extra_repr(self) -> str:
        more = ", batch-invariant" if self.batch_invariant else ""
        return f"{self.layout.k} -> {self.layout.n}, {self.layout.spec} x {self.act} -> {self.out}, bias={self.bias is not None}{more}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        # Casts of a whole model must not touch float32 scales and bias: they pass as integers.
        def keep_dtype(t: Tensor) -> Tensor:
            return fn(t.view(torch.int32)).view(torch.float32) if t.dtype == torch.float32 else fn(t)

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runner": None}

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found = tag_text(state_dict.get(prefix + "tag"))
        if found != self.layout.tag:
            what = "no layout tag" if found is None else f"layout {found!r}"
            remedy = "build it with Linear.empty of the saved spec and shape, or Linear.like of the saved tag"
            error_msgs.append(
                f"{prefix or 'Linear'}: the saved weights have {what}, this layer needs {self.layout.tag!r}: {remedy}"
            )
            return
        here = {key[len(prefix) :] for key in state_dict if key.startswith(prefix)}
        ours = {name for name, t in self._buffers.items() if t is not None}
        if here != ours:  # an error also where Module would be lenient: half a weight is none
            missing, extra = (", ".join(sorted(names)) or "nothing" for names in (ours - here, here - ours))
            error_msgs.append(f"{prefix or 'Linear'}: a layer is loaded whole; missing: {missing}; not of this layer: {extra}")
            return
        loaded = {name: state_dict[prefix + name] for name in ours - {"tag"}}
        if fault := self._fault(loaded):  # found before anything is written
            error_msgs.append(prefix + fault)
            return
        for name, new in loaded.items():
            state_dict[prefix + name] = gemm.aligned(new)  # of the copy that load_state_dict makes; matters where it assigns
        lists = (missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def _fault(self, loaded: dict[str, Any]) -> str:
        """Why tensors are not those of this layer; empty if they are."""
        for name, new in loaded.items():
            own = self._buffers[name]
            if not isinstance(new, Tensor) or new.is_meta:
                return f"{name} must be a tensor with data; got {'a meta tensor' if isinstance(new, Tensor) else type(new).__name__}"
            if own is not None and (new.dtype != own.dtype or new.shape != own.shape):
                return f"{name} must be {own.dtype} {tuple(own.shape)} for {self.layout.tag}; got {new.dtype} {tuple(new.shape)}"
            if new.is_floating_point() and not bool(torch.isfinite(new).all()):
                return f"{name} must be finite; got {new[~torch.isfinite(new)][0].item()}"
        if "groups" in loaded:
            try:
                check_order(self.layout, loaded["perm"], loaded["groups"])
            except BadInput as error:
                return f"perm, groups: {error}"
        return ""


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index

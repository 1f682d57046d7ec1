"""y = x w^T on tensors: the eager path to the launcher, the torch custom ops for tracing.

Knows tensors, streams and packed weights; it must not know modules (nn/) or checkpoints.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from lowbit import reference
from lowbit.arch import Arch, arch_of_device
from lowbit.errors import BadInput, BadType, Unsupported
from lowbit.jit.cache import Cache
from lowbit.jit.compile import Compiled, compiler_for
from lowbit.jit.generate import generate
from lowbit.jit.module import Launch, load
from lowbit.jit.tensormap import RowsMap, aligned_struct
from lowbit.layout.pack import Layout, PackedWeight, unpack
from lowbit.ops.checks import DTYPES, check_act, check_input, check_into, check_into_form, check_operands, out_name
from lowbit.plan.choose import BUCKETS, MAX_GRID_Y, bucket, choose
from lowbit.plan.plan import WGMMA_FAMILIES, Plan, blocks_of, launch_geometry, x_box_k
from lowbit.problem import EIGHT_BITS, Problem, check
from lowbit.weights import WeightSpec

_SEEN = "_lowbit_seen"  # attribute of a weight tensor: its state at the last call
_BUCKET = tuple(bucket(m) for m in range(BUCKETS[-1] + 1))


class Params(ctypes.Structure):
    """The kernels' one argument; the same fields as lowbit::Params in cuda/types.cuh."""

    _fields_ = (
        ("units", ctypes.c_void_p),
        ("channel", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_pitch", ctypes.c_uint64),
        ("m", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("x_scales", ctypes.c_void_p),  # the map after it is aligned to 64 bytes
        ("x_map", ctypes.c_uint64 * 16),
    )


def problem_of(layout: Layout, act: str, out: str, arch: Arch, batch_invariant: bool = False) -> Problem:
    """What the kernel computes: columns in natural order, and k rounded up so that rows of x are multiples of 16 bytes (the padding
    meets codes of value zero)."""
    layout, vector = layout.natural, 16 if act in EIGHT_BITS else 8
    return Problem(layout.spec, act, out, layout.n, -(-layout.k // vector) * vector, arch, batch_invariant)


@lru_cache(maxsize=64)
def device_arch(index: int) -> Arch:
    """The chip of CUDA device `index`, with its own number of SMs."""
    properties = torch.cuda.get_device_properties(index)
    return arch_of_device(properties.name, properties.major, properties.minor, properties.multi_processor_count)


_Prepared: TypeAlias = tuple[Launch, int, int, int, RowsMap | None]  # blocks of a token tile, the most at once or 0, tokens of a tile


class Runner:
    """The kernels of one (layout, activation, output) on one device; each is compiled when first needed.

    Thread-safe: every thread fills argument structs of its own. A call costs microseconds of host time, so the path of an aligned
    2-D x looks nothing up that it can know beforehand.
    """

    def __init__(self, layout: Layout, act: str, out: str, index: int, batch_invariant: bool = False) -> None:
        self.problem = problem_of(layout, act, out, device_arch(index), batch_invariant)
        self.layout = layout
        self.index = index
        self.x_dtype, self.y_dtype = DTYPES[act], DTYPES[out]
        self._device = torch.device("cuda", index)
        self._k, self._n = layout.k, layout.n
        # One order of sums for all calls, whatever becomes of the environment; the others choose when they need a kernel.
        self._plans = {size: choose(self.problem, size) for size in BUCKETS} if batch_invariant else {}
        self._pitch = layout.k * 2 if layout.k % 8 == 0 else 0  # bytes of a row of x that needs no copy, if there is any
        self._local = threading.local()

    def __call__(
        self, x: Tensor, units: Tensor, channel: Tensor | None, bias: Tensor | None, into: Tensor | None = None
    ) -> Tensor:
        """x (..., K) on this device, which must be current -> y (..., N), launched into the current stream.

        into: y itself, which has passed `check_into`; default a new tensor.
        """
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        now = _seen_now(stream, units, channel, bias)
        if self._pitch and x.dim() == 2 and x.is_contiguous() and x.data_ptr() % 16 == 0:
            rows, pitch = x, self._pitch
        else:
            rows = rows_of(x, self._k)
            pitch = rows.stride(0) * 2
        m = rows.shape[0]
        if into is None:
            y = torch.empty((m, self._n), dtype=self.y_dtype, device=self._device)
        else:
            y = into
            increment_version(y)  # other layers' weights may lie there
        if m:
            overlap = _settled(now, getattr(units, _SEEN, None))
            if not overlap:
                self._check(units, channel, bias)
            launch, blocks, most, tokens, x_map = self._launch(m, overlap)
            params = launch.params
            params.units = units.data_ptr()
            params.channel = None if channel is None else channel.data_ptr()
            params.bias = None if bias is None else bias.data_ptr()
            params.x = rows.data_ptr()
            params.y = y.data_ptr()
            params.x_pitch = pitch
            params.m = m
            if x_map is not None:
                launch.bind()
                x_map(rows.data_ptr(), m, pitch)
            if most:
                launch(min(blocks * -(-m // tokens), most), 1, stream)
            else:
                launch(blocks, -(-m // tokens), stream)
            if not overlap:
                setattr(units, _SEEN, now)
        return y if x.dim() == 2 or into is not None else y.view(*x.shape[:-1], self._n)

    def _check(self, units: Tensor, channel: Tensor | None, bias: Tensor | None) -> None:
        """Whatever replaced a layer's tensors since: kernels read bytes and trust them. Raises BadInput."""
        wanted = {"units": (units, torch.uint8), "channel": (channel, torch.float32), "bias": (bias, torch.float32)}
        for name, (t, dtype) in wanted.items():
            if t is not None and (
                t.dtype != dtype or t.get_device() != self.index or not t.is_contiguous() or t.data_ptr() % 16
            ):
                raise BadInput(
                    f"{name} must be contiguous {dtype} on cuda:{self.index}, aligned to 16 bytes; got {t.dtype} on {t.device}, "
                    f"strides {t.stride()}, address {t.data_ptr():#x}"
                )
        if units.numel() != self.layout.expert_bytes or (channel is not None) != self.layout.has_channel:
            raise BadInput(f"{self.layout.tag} has {self.layout.expert_bytes} packed bytes; got {units.numel()}")

    def _launch(self, m: int, overlap: bool) -> _Prepared:
        key = (_BUCKET[m] if m < len(_BUCKET) else BUCKETS[-1], overlap)
        try:
            found: _Prepared = self._local.launches[key]
        except (AttributeError, KeyError):
            found = self._prepare(m, overlap)
            self._local.__dict__.setdefault("launches", {})[key] = found
        if m > MAX_GRID_Y * found[3]:
            raise BadInput(f"one call takes at most {MAX_GRID_Y * found[3]} tokens; got {m}: split the batch")
        return found

    def _prepare(self, m: int, overlap: bool) -> _Prepared:
        plan, compiled = self._kernel(m)
        kernel = load(compiled, self.index)
        pdl = overlap and self.problem.arch.bulk
        geometry = launch_geometry(self.problem, plan, m)
        params = aligned_struct(Params, Params.x_map.offset)
        launch = kernel.prepare(params, (geometry.block, 1, 1), geometry.smem, cluster=geometry.cluster, pdl=pdl)
        x_map = None
        if plan.family in WGMMA_FAMILIES:
            target = ctypes.addressof(params) + Params.x_map.offset
            x_map = RowsMap(kernel.driver, target, self.problem.k, x_box_k(self.problem), plan.tokens)
        return launch, *blocks_of(self.problem, plan), plan.tokens, x_map

    def _kernel(self, m: int) -> tuple[Plan, Compiled]:
        plan = self._plans.get(bucket(m)) or choose(self.problem, m)
        return plan, Cache().get_or_compile(generate(self.problem, plan))

    def check_compiler(self) -> None:
        """Raises now what calls would raise: BadInput for LOWBIT_TUNED, Unsupported without a compiler, MissingKernel if kernels must
        be frozen and none is.
        """
        choose(self.problem, 1)  # raises for plans that cannot be read
        cache = Cache()
        if cache.jit:
            try:
                compiler_for(self.problem.arch.name, self.problem.arch.target)
            except Unsupported:
                cache.get_or_compile(generate(self.problem, choose(self.problem, 1)))
            return
        found = []
        for size in BUCKETS:
            with suppress(Unsupported):  # a family that is named need not serve all sizes
                found.append(cache.get(generate(self.problem, choose(self.problem, size))))
        if not any(found):  # a set frozen for few tokens serves few tokens: a call beyond names what it lacks
            cache.get_or_compile(generate(self.problem, choose(self.problem, 1)))

    def warm(self, max_m: int) -> None:
        """Compile and load every kernel for 1 <= M <= max_m, in parallel processes."""
        from lowbit.jit.pool import compile_many

        sizes = [b for b in BUCKETS if bucket(b) <= bucket(max_m)]
        compile_many([generate(self.problem, choose(self.problem, b)) for b in sizes])
        for size in sizes:
            self._launch(size, True)


class _Seen(NamedTuple):
    """The weights of a call, so that the next one can tell whether they are still the same.

    Holds the small tensors themselves: an address or a version may come back with another tensor, an object that is held cannot.
    Copied or saved along with its tensor it becomes None: no call has seen that one.
    """

    stream: int
    address: int
    versions: tuple[int, int, int]
    channel: Tensor | None
    bias: Tensor | None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def same_weights(self, other: _Seen) -> bool:
        return (
            self.versions == other.versions
            and self.address == other.address
            and self.channel is other.channel
            and self.bias is other.bias
        )


def _seen_now(stream: int, units: Tensor, channel: Tensor | None, bias: Tensor | None) -> _Seen | None:
    """None for tensors made in inference mode, whose changes nothing counts."""
    try:
        versions = (units._version, 0 if channel is None else channel._version, 0 if bias is None else bias._version)
    except RuntimeError:
        return None
    return _Seen(stream, units.data_ptr(), versions, channel, bias)


def _settled(now: _Seen | None, seen: _Seen | None) -> bool:
    """May a kernel read weights before the kernel ahead of it has ended? Not if that one may just have written them.

    They must be those of an earlier call in this stream, which did wait. A captured graph runs after all that was launched before
    it, on whatever stream; writes inside it count like others.
    """
    if now is None or seen is None or not now.same_weights(seen):
        return False
    return now.stream == seen.stream or torch._C._cuda_isCurrentStreamCapturing()


def weights_changed(units: Tensor) -> None:
    """Say that weights were written in a way that PyTorch does not count: through `.data`, by a collective or a foreign kernel."""
    if hasattr(units, _SEEN):
        delattr(units, _SEEN)


@lru_cache(maxsize=4096)
def runner(spec: WeightSpec, n: int, k: int, act: str, out: str, index: int, batch_invariant: bool = False) -> Runner:
    """The process's runner for these values; layers of one shape share kernels."""
    layout = Layout(spec, n, k)
    arch = device_arch(index)
    check(spec, act, arch)
    found = Runner(layout, act, out, index, batch_invariant)
    found.check_compiler()
    return found


def rows_of(x: Tensor, k: int) -> Tensor:
    """x (..., k) as rows a kernel can read: (M, k8) of unit stride, 16-byte aligned rows; a view where that is possible."""
    rows = x.reshape(-1, x.shape[-1]) if x.dim() != 2 else x
    if k % 8:
        return torch.nn.functional.pad(rows, (0, -k % 8))
    if rows.stride(1) == 1 and rows.stride(0) % 8 == 0 and (rows.stride(0) >= k or rows.shape[0] < 2) and rows.data_ptr() % 16 == 0:
        return rows
    return rows.contiguous() if not rows.is_contiguous() else rows.clone(memory_format=torch.contiguous_format)


def in_packed_order(x: Tensor, perm: Tensor | None) -> Tensor:
    """x (..., K) -> (..., packed_k) with the columns as act-order weights are stored, zeros where they are padded; x itself without `perm`.

    So that a NaN of x still spreads to its own rows, and to nothing else. Raises BadInput for tensors of two devices.
    """
    if perm is None:
        return x
    if x.device != perm.device:
        raise BadInput(f"x and the weights must be on one device; got x on {x.device}, weights on {perm.device}")
    if perm.shape[0] != x.shape[-1]:  # the index of padding is K
        x = torch.nn.functional.pad(x, (0, 1))
    return x.index_select(-1, perm)


def run(
    x: Tensor,
    units: Tensor,
    channel: Tensor | None,
    bias: Tensor | None,
    layout: Layout,
    act: str,
    out: str,
    into: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """y (..., N) = x (..., K) w^T + bias on the tensors' device: kernels on CUDA, the reference on the CPU.

    Columns are in natural order: of an act-order weight the layout is `layout.natural` and x is `in_packed_order`.
    into: y itself, which has passed `check_into`; default a new tensor.
    """
    if x.device != units.device:
        raise BadInput(f"x and the weights must be on one device; got x on {x.device}, weights on {units.device}")
    if x.is_cuda:
        index = x.get_device()
        call = runner(layout.spec, layout.n, layout.k, act, out, index, batch_invariant)
        with torch.cuda.device(index):
            return call(x, units, channel, None if bias is None else aligned(bias), into)
    qw = unpack(PackedWeight(layout, None, units, channel))
    y = reference.matmul(x, qw, act=act, bias=bias, out_dtype=DTYPES[out])
    return y if into is None else into.copy_(y)


@torch.library.custom_op("lowbit::gemm", mutates_args=())
def gemm_op(
    x: Tensor,
    units: Tensor,
    channel: Tensor | None,
    bias: Tensor | None,
    spec: str,
    n: int,
    act: str,
    out: str,
    batch_invariant: bool = False,
) -> Tensor:
    """The traced form of `run`: x (..., K) -> (..., n)."""
    layout = _layout(spec, n, x.shape[-1])
    PackedWeight(layout, None, units, channel)  # refuses weights of another layout
    return run(x, units, channel, bias, layout, act, out, batch_invariant=batch_invariant)


@torch.library.custom_op("lowbit::gemm_into", mutates_args=("into",))
def gemm_into_op(
    x: Tensor,
    units: Tensor,
    channel: Tensor | None,
    bias: Tensor | None,
    spec: str,
    n: int,
    act: str,
    out: str,
    into: Tensor,
    batch_invariant: bool = False,
) -> None:
    """The traced form of `run` with an output tensor: x (..., K) -> into (..., n)."""
    layout = _layout(spec, n, x.shape[-1])
    PackedWeight(layout, None, units, channel)
    check_into(into, x, n, out, (units, channel, bias))
    run(x, units, channel, bias, layout, act, out, into, batch_invariant)


@lru_cache(maxsize=4096)
def _layout(spec: str, n: int, k: int) -> Layout:
    return Layout(WeightSpec.parse(spec), n, k)


@gemm_op.register_fake
def _(
    x: Tensor,
    units: Tensor,
    channel: Tensor | None,
    bias: Tensor | None,
    spec: str,
    n: int,
    act: str,
    out: str,
    batch_invariant: bool = False,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=DTYPES[out])


@gemm_into_op.register_fake
def _(
    x: Tensor,
    units: Tensor,
    channel: Tensor | None,
    bias: Tensor | None,
    spec: str,
    n: int,
    act: str,
    out: str,
    into: Tensor,
    batch_invariant: bool = False,
) -> None:
    check_into_form(into, x, n, out)


def matmul(
    x: Tensor,
    packed: PackedWeight,
    *,
    act: str = "bf16",
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """(..., K) x packed (N, K) -> (..., N), for weights packed by `lowbit.pack`.

    x is of the activation type; `bias` float (N,), applied in float32 before the one rounding to `out_dtype` (default: x's).
    out: a contiguous (..., N) of the output type to write to and return, at a multiple of 16 bytes and apart from all that is read.
    batch_invariant: a row's bits do not depend on how many rows there are; see `Linear`. Raises BadInput, BadType, Unsupported.
    """
    if not isinstance(packed, PackedWeight):
        raise BadType(f"matmul takes a PackedWeight, as lowbit.pack returns; got {type(packed).__name__}")
    name = out_name(act, out_dtype)
    check_act(act, name)
    layout = packed.layout
    check_operands(layout)
    check_input(x, layout.k, act)
    if packed.experts is not None:
        raise BadInput(f"matmul takes one weight (N, K); got {packed.experts} experts")
    if bias is not None:
        bias = check_bias(bias, layout.n).to(x.device)
    if torch.compiler.is_compiling():
        x = in_packed_order(x, packed.perm)
        return traced(x, packed.units, packed.channel, bias, packed.name, layout.n, act, name, out, batch_invariant)
    if out is not None:
        check_into(out, x, layout.n, name, (packed.units, packed.channel, bias, packed.perm))
    x = in_packed_order(x, packed.perm)
    return run(x, packed.units, packed.channel, bias, layout.natural, act, name, out, batch_invariant)


def traced(
    x: Tensor,
    units: Tensor,
    channel: Tensor | None,
    bias: Tensor | None,
    spec: str,
    n: int,
    act: str,
    out: str,
    into: Tensor | None,
    batch_invariant: bool,
) -> Tensor:
    """One of the two custom ops, for torch.compile."""
    if into is None:
        return torch.ops.lowbit.gemm(x, units, channel, bias, spec, n, act, out, batch_invariant)  # type: ignore[no-any-return]
    torch.ops.lowbit.gemm_into(x, units, channel, bias, spec, n, act, out, into, batch_invariant)
    return into


def check_bias(bias: Tensor, n: int) -> Tensor:
    """The bias as float32 (n,). Raises BadType, BadInput."""
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        raise BadType(
            f"bias must be a float tensor; got {bias.dtype if isinstance(bias, Tensor) else type(bias).__name__}"
        )
    if tuple(bias.shape) != (n,):
        raise BadInput(f"bias must have shape ({n},); got {tuple(bias.shape)}")
    return bias.detach().to(torch.float32)


def aligned(t: Tensor) -> Tensor:
    """`t` as kernels read it: contiguous, at a multiple of 16 bytes; a copy only where it is not."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t

"""The packed layout every kernel reads, and its inverse.

Turns a QuantWeight into one contiguous buffer per expert and back, bit for bit; it must not know plans, kernels or devices.

Rows come in blocks of 16, k in blocks of 128; one (row block, k block) is a *unit*: the codes in fragment order (see fragments.py),
then the group scales and zero points of its rows, so that one contiguous copy brings everything a warp needs. Eight row blocks
(128 rows) form a panel; a panel stores its units k block by k block: [panel][k block][row block][unit]. The last panel holds only
the row blocks that exist. Bit drawings: docs/FORMATS.md.

Act-order is undone here: columns are sorted by group, each group is padded to whole steps, and what is stored is a weight of natural
order and `packed_k` columns, which kernels multiply with x in the same order (`PackedWeight.perm`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from lowbit.errors import BadInput, BadType, Unsupported
from lowbit.layout.fields import Piece, pieces
from lowbit.layout.fragments import UNIT_K, UNIT_ROWS, FragmentMap
from lowbit.weights import QuantWeight, WeightSpec

PANEL_BLOCKS = 8
VERSION = 2  # part of the tag: raise it whenever the meaning of the bytes changes
LANES = 32
ORDER_STEPS = (128, 64, 32, 16)  # k that share a scale in packed act-order weights: what every kernel takes
GROUPS = 2  # of operand_bits registers a lane, in a unit


@dataclass(frozen=True)
class Layout:
    """How the weights of one layer lie in memory: a pure function of (spec, n, k, operand width).

    Act-order adds two numbers: the columns that are stored, groups padded to whole steps, and the step, one of ORDER_STEPS. Left out,
    they are those of groups of spec.k columns, as quantisation makes them.
    """

    spec: WeightSpec
    n: int
    k: int
    operand_bits: int = 16
    packed_k: int = 0  # k without act-order
    order_step: int = 0  # 0 without act-order

    def __post_init__(self) -> None:
        if self.operand_bits not in (8, 16):
            raise BadInput(f"operand_bits must be 8 or 16; got {self.operand_bits}")
        if type(self.n) is not int or type(self.k) is not int or self.n < 1 or self.k < 1:
            raise BadInput(f"a layout needs whole numbers n >= 1 and k >= 1; got {self.n!r}x{self.k!r}")
        if not self.packed_k and not self.order_step:
            packed = (self.k, 0) if not self.spec.act_order else _order_size(self, _full_groups(self.k, self.spec.k))
            object.__setattr__(self, "packed_k", packed[0])
            object.__setattr__(self, "order_step", packed[1])
        if self.spec.act_order and (
            self.order_step not in ORDER_STEPS or self.packed_k < self.k or self.packed_k % self.order_step
        ):
            raise BadInput(
                f"act-order is packed in steps of {', '.join(map(str, ORDER_STEPS))} that hold all {self.k} columns; "
                f"got {self.packed_k} columns in steps of {self.order_step}"
            )
        if not self.spec.act_order and (self.packed_k, self.order_step) != (self.k, 0):
            raise BadInput(f"{self.spec} is packed in natural order; got {self.packed_k} columns in steps of {self.order_step}")
        if self.grouped and self.step < 1:
            raise Unsupported([f"group sizes must be multiples of 8; {self.spec} has {self.spec.k}"])

    @property
    def tag(self) -> str:
        """Identifies the meaning of the bytes; an op refuses a buffer with another tag."""
        order = f":k{self.packed_k}s{self.order_step}" if self.spec.act_order else ""
        return f"lowbit{VERSION}:{self.spec}:{self.n}x{self.k}:a{self.operand_bits}{order}"

    @classmethod
    def of(cls, qw: QuantWeight, operand_bits: int = 16) -> Layout:
        """The layout that `pack` gives a weight."""
        if qw.g_idx is None:
            return cls(qw.spec, qw.n, qw.k, operand_bits)
        if qw.experts is not None:
            raise Unsupported([f"act-order is packed one weight at a time; this one has {qw.experts} experts: pack each alone"])
        counts = torch.bincount(qw.g_idx[0], minlength=qw.scales.shape[2]).tolist()
        return cls(qw.spec, qw.n, qw.k, operand_bits, *_order_size(cls(qw.spec, qw.n, qw.k, operand_bits), counts))

    @cached_property
    def natural(self) -> Layout:
        """What kernels see: itself, or with act-order the layout of the sorted and padded columns, which has the same bytes."""
        if not self.spec.act_order:
            return self
        spec = replace(self.spec, k=self.order_step, act_order=False)
        return Layout(spec, self.n, self.packed_k, self.operand_bits)

    @classmethod
    def parse(cls, tag: str) -> Layout:
        """The layout whose tag this is. Raises BadInput for any other text."""
        found = re.fullmatch(r"lowbit(\d+):(.+):(\d{1,10})x(\d{1,10}):a(8|16)(?::k(\d{1,10})s(\d{1,3}))?", tag, re.ASCII)
        if found is None or int(found[1]) != VERSION:
            raise BadInput(f"a layout's tag reads lowbit{VERSION}:<spec>:<n>x<k>:a<operand bits>[:k<columns>s<step>]; got {tag!r}")
        layout = cls(WeightSpec.parse(found[2]), *(int(number or 0) for number in found.groups()[2:]))
        if layout.tag != tag:
            raise BadInput(f"the tag {tag!r} is not how this version writes that layout, {layout.tag!r}")
        return layout

    @property
    def fragments(self) -> FragmentMap:
        return FragmentMap(self.operand_bits)

    @property
    def row_blocks(self) -> int:
        return -(-self.n // UNIT_ROWS)

    @property
    def k_blocks(self) -> int:
        return -(-self.packed_k // UNIT_K)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """How the codes of operand_bits registers share words; a unit holds two such groups."""
        return pieces(self.spec.value.bits, self.operand_bits, self.spec.value.is_float)

    @property
    def grouped(self) -> bool:
        """Scales travel inside the units (they vary along k, or a second level takes the channel's place)."""
        return self.spec.k != 0 or self.spec.scale2 != "none" or self.spec.zero != "none"

    @property
    def step(self) -> int:
        """k values that share a scale inside a unit: the largest divisor of both the group and the unit; 0 without group scales."""
        return self.order_step or (math.gcd(self.spec.k, UNIT_K) // 8 * 8 if self.grouped else 0)

    @property
    def steps(self) -> int:
        """Scales of one row in a unit."""
        return UNIT_K // self.step if self.grouped else 0

    @property
    def code_bytes(self) -> int:
        return UNIT_ROWS * UNIT_K // 8 * self.spec.value.bits

    @property
    def scale_bytes(self) -> int:
        """Of all group scales of a unit."""
        return UNIT_ROWS * self.steps * self.spec.scale.storage.itemsize if self.grouped else 0

    @property
    def zero_bytes(self) -> int:
        """Of all zero points of a unit: one byte each for integers, float32 otherwise."""
        return {"none": 0, "int": UNIT_ROWS * self.steps, "float": UNIT_ROWS * self.steps * 4}[self.spec.zero]

    @property
    def unit_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes + self.zero_bytes

    @property
    def expert_bytes(self) -> int:
        return self.row_blocks * self.k_blocks * self.unit_bytes

    @property
    def has_channel(self) -> bool:
        """A float32 factor per row is applied after the sum over k."""
        return not self.grouped or self.spec.scale2 != "none"


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """`units` uint8 (E, expert_bytes) and, where layout.has_channel, `channel` float32 (E, n): scale or second-level scale per row.

    With act-order: `perm` int32 (packed_k,), the column of the weight that each stored column is, k for padding; `groups` int32
    (packed_k / step,), the group of each step.
    """

    layout: Layout
    experts: int | None
    units: torch.Tensor
    channel: torch.Tensor | None
    perm: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    name: str = field(init=False)  # of the spec that kernels see, as traced code needs it

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", str(self.layout.natural.spec))
        e = self.experts or 1
        if self.units.dtype != torch.uint8 or tuple(self.units.shape) != (e, self.layout.expert_bytes):
            raise BadInput(
                f"packed units must be uint8 {(e, self.layout.expert_bytes)} for {self.layout.tag}; "
                f"got {self.units.dtype} {tuple(self.units.shape)}"
            )
        if (self.channel is not None) != self.layout.has_channel:
            raise BadInput(f"{self.layout.tag} {'needs' if self.layout.has_channel else 'has no'} channel scales")
        if self.channel is not None and (
            self.channel.dtype != torch.float32 or tuple(self.channel.shape) != (e, self.layout.n)
        ):
            raise BadInput(
                f"channel scales must be float32 {(e, self.layout.n)}; got {self.channel.dtype} {tuple(self.channel.shape)}"
            )
        columns, step = self.layout.packed_k, self.layout.order_step
        for name, t, size in (("perm", self.perm, columns), ("groups", self.groups, columns // (step or 1))):
            if (t is not None) != self.layout.spec.act_order:
                raise BadInput(f"{self.layout.tag} {'needs' if t is None else 'has no'} {name}")
            if t is not None and (t.dtype != torch.int32 or tuple(t.shape) != (size,)):
                raise BadInput(f"{name} must be int32 {(size,)} for {self.layout.tag}; got {t.dtype} {tuple(t.shape)}")


def tag_text(tag: object) -> str | None:
    """What a saved tag tensor says; None for anything that is no tag."""
    if not isinstance(tag, torch.Tensor) or tag.dtype != torch.uint8 or tag.ndim != 1 or tag.is_meta:
        return None
    return bytes(tag.tolist()).decode(errors="replace")


def stored_codes(spec: WeightSpec, codes: torch.Tensor) -> torch.Tensor:
    """Codes as the kernels want them; its own inverse. Signed integers are stored with the sign bit flipped
    (value + 2^(bits-1)), so that one subtraction removes offset and bias together; all others as they are."""
    value = spec.value
    return codes ^ (1 << (value.bits - 1)) if value.kind == "int" else codes


def pack(qw: QuantWeight, operand_bits: int = 16) -> PackedWeight:
    """QuantWeight -> PackedWeight on the same device; peak memory is the result plus one chunk of 1024 rows. Raises BadType."""
    if not isinstance(qw, QuantWeight):
        raise BadType(f"pack takes a QuantWeight, as lowbit.quantize returns; got {type(qw).__name__}")
    layout = Layout.of(qw, operand_bits)
    perm, groups = (None, _natural_groups(layout)) if qw.g_idx is None else _order(layout, qw.g_idx[0], qw.scales.shape[2])
    groups = groups.to(qw.device)
    e = qw.experts or 1
    units = torch.empty((e, layout.expert_bytes), dtype=torch.uint8, device=qw.codes.device)
    chunk = PANEL_BLOCKS * UNIT_ROWS * 8
    for expert in range(e):
        for row in range(0, qw.n, chunk):
            rows = slice(row, min(row + chunk, qw.n))
            start = row // UNIT_ROWS * layout.k_blocks * layout.unit_bytes
            block = _pack_rows(layout, qw, expert, rows, perm, groups)
            units[expert, start : start + block.numel()] = block.view(-1)
    return PackedWeight(layout, qw.experts, units, _channel(layout, qw), perm, None if perm is None else groups)


def unpack(packed: PackedWeight) -> QuantWeight:
    """The exact inverse of `pack`; shares no memory with it. Raises BadType."""
    if not isinstance(packed, PackedWeight):
        raise BadType(f"unpack takes a PackedWeight, as lowbit.pack returns; got {type(packed).__name__}")
    layout, spec = packed.layout, packed.layout.spec
    e = packed.experts or 1
    groups = _natural_groups(layout).to(packed.units.device)
    if packed.perm is not None and packed.groups is not None:
        check_order(layout, packed.perm, packed.groups)
        groups = packed.groups
    firsts = torch.searchsorted(groups, torch.arange(int(groups[-1]) + 1, dtype=groups.dtype, device=groups.device))
    codes, scales, zeros = [], [], []
    for expert in range(e):
        units = _row_major(layout, packed.units[expert])
        values = _from_words(layout, units[..., : layout.code_bytes])[: layout.n, : layout.packed_k]
        codes.append(stored_codes(spec, values))
        side = units[..., layout.code_bytes :]
        if layout.grouped:
            scales.append(_collect(layout, side[..., : layout.scale_bytes], spec.scale.storage, firsts))
        if spec.zero != "none":
            dtype = torch.float32 if spec.zero == "float" else torch.int8 if spec.value.kind == "int" else torch.uint8
            zeros.append(_collect(layout, side[..., layout.scale_bytes :], dtype, firsts))
    channel = packed.channel
    if layout.grouped:
        scale, scale2 = torch.stack(scales), None
        if channel is not None:
            scale2 = channel[:, 0].clone() if spec.scale2 == "tensor" else channel.clone()
    else:
        if channel is None:
            raise BadInput(f"{layout.tag} needs channel scales")
        rows = spec.rows or layout.n
        scale, scale2 = _narrow(spec, channel[:, ::rows, None].clone()), None
    zero = None if not zeros else torch.stack(zeros)
    if zero is not None and spec.zero == "int":
        zero = zero.to(torch.int16)
    values, g_idx = torch.stack(codes), None
    if packed.perm is not None:
        there = (packed.perm < layout.k).nonzero()[:, 0]  # perm[there] is every column once
        place = torch.empty_like(there).scatter_(0, packed.perm[there].long(), there)
        values, g_idx = values[..., place], groups[place // layout.step].unsqueeze(0)
    return QuantWeight.from_values(spec, values, scale, zeros=zero, scale2=scale2, g_idx=g_idx, experts=packed.experts)


# ---- codes ----------------------------------------------------------------------------------------------------------------------


def _pack_rows(
    layout: Layout, qw: QuantWeight, expert: int, rows: slice, perm: torch.Tensor | None, groups: torch.Tensor
) -> torch.Tensor:
    """Units of whole panels of rows (the last one may be short), in storage order."""
    values = stored_codes(layout.spec, qw.code_values(expert, rows))
    zero_code = int(stored_codes(layout.spec, layout.spec.value.encode(torch.zeros(1)).to(torch.uint8)).item())
    if perm is not None:
        values = _pad(values, values.shape[0], layout.k + 1, zero_code).index_select(1, perm)
    blocks = -(-values.shape[0] // UNIT_ROWS)
    padded = _pad(values, blocks * UNIT_ROWS, layout.k_blocks * UNIT_K, zero_code)
    parts = [_to_words(layout, padded)]
    if layout.grouped:
        parts.append(_spread(layout, qw.scales[expert], rows, blocks, groups))
    if layout.spec.zero != "none" and qw.zeros is not None:
        dtype = (
            torch.float32
            if layout.spec.zero == "float"
            else torch.int8
            if layout.spec.value.kind == "int"
            else torch.uint8
        )
        parts.append(_spread(layout, qw.zeros[expert].to(dtype), rows, blocks, groups))
    return _panels(torch.cat(parts, -1))


def _pad(t: torch.Tensor, rows: int, columns: int, value: int) -> torch.Tensor:
    if t.shape == (rows, columns):
        return t
    out = torch.full((rows, columns), value, dtype=t.dtype, device=t.device)
    out[: t.shape[0], : t.shape[1]] = t
    return out


def _to_words(layout: Layout, codes: torch.Tensor) -> torch.Tensor:
    """uint8 (blocks*16, k_blocks*128) -> uint8 (blocks, k_blocks, code_bytes)."""
    bits, part = layout.spec.value.bits, _part(layout)
    view = layout.fragments.split(codes)
    blocks, k_blocks, steps, elements = *view.shape[:2], view.shape[4], view.shape[7]
    view = view.unflatten(4, (2, steps // 2)).permute(5, 6, 7, 0, 1, 4, 2, 3, 8).flatten(-2)  # type: ignore[no-untyped-call]
    chunks = view.view(torch.int64).contiguous()  # the codes of four lanes, eight bytes at a time
    registers = chunks.view(torch.uint8).view(layout.operand_bits, blocks, k_blocks, GROUPS, LANES, elements)
    words: list[torch.Tensor | None] = [None] * bits
    for piece in layout.pieces:
        code = registers[piece.register]
        if piece.width < bits:
            code = (code >> piece.low) & ((1 << piece.width) - 1)
        code = code.to(part) << piece.at if piece.at else code.to(part)
        so_far = words[piece.word]
        words[piece.word] = code if so_far is None else so_far.bitwise_or_(code)
    lanes = [word.view(torch.int32) for word in words if word is not None]
    runs = [torch.cat(lanes[run], -1).view(blocks, k_blocks, GROUPS, -1) for run in _runs(bits)]
    return torch.cat(runs, -1).view(torch.uint8).view(blocks, k_blocks, -1)


def _from_words(layout: Layout, data: torch.Tensor) -> torch.Tensor:
    """Inverse of `_to_words`."""
    fragments, bits, part = layout.fragments, layout.spec.value.bits, _part(layout)
    blocks, k_blocks = data.shape[:2]
    groups = data.contiguous().view(torch.int32).view(blocks, k_blocks, GROUPS, LANES * bits)
    words: list[torch.Tensor] = []
    for run in _runs(bits):
        lanes = groups[..., LANES * run.start : LANES * run.stop].unflatten(-1, (LANES, -1))  # type: ignore[no-untyped-call]
        words += [word.contiguous().view(part) for word in lanes.split(1, -1)]
    registers = torch.zeros(
        (layout.operand_bits, blocks, k_blocks, GROUPS, LANES, fragments.elements), dtype=torch.uint8, device=data.device
    )
    for piece in layout.pieces:
        field = (words[piece.word] >> piece.at) & ((1 << piece.width) - 1)
        registers[piece.register] |= field.to(torch.uint8) << piece.low
    steps = fragments.steps
    view = registers.view(steps // 2, 2, 2, blocks, k_blocks, GROUPS, 8, 4, fragments.elements)
    return fragments.join(view.permute(3, 4, 6, 7, 5, 0, 1, 2, 8).flatten(4, 5))


def _part(layout: Layout) -> torch.dtype:
    """One element's part of a 32-bit word."""
    return torch.int16 if layout.operand_bits == 16 else torch.uint8


def _runs(bits: int) -> list[slice]:
    """The words of a group as a lane loads them, four, two or one at a time; the 32 lanes of a run lie side by side."""
    starts = [*range(0, bits & 12, 4), *(bits & ~(2 * run - 1) for run in (2, 1) if bits & run)]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], bits], strict=True)]


# ---- the order of columns -------------------------------------------------------------------------------------------------------


def _full_groups(k: int, size: int) -> list[int]:
    """The columns of each group where all are full but perhaps the last."""
    return [min(size, k - start) for start in range(0, k, size)]


def _order_size(layout: Layout, counts: list[int]) -> tuple[int, int]:
    """(columns stored, step) for groups of so many columns: no padding if all are full, which saves a copy of x, else the fewest bytes.

    Short steps pad less, long ones repeat fewer scales.
    """
    natural = math.gcd(layout.spec.k, UNIT_K)
    if natural in ORDER_STEPS and all(count == layout.spec.k for count in counts):
        return layout.k, natural
    found = []
    for step in ORDER_STEPS:
        columns = sum(step * max(1, -(-count // step)) for count in counts)  # one step keeps the scale of a group without columns
        spec = replace(layout.spec, k=step, act_order=False)
        found.append((Layout(spec, layout.n, columns, layout.operand_bits).expert_bytes, -step, columns))
    _, step, columns = min(found)
    return columns, -step


def _natural_groups(layout: Layout) -> torch.Tensor:
    """int32: the group of each step, of columns in natural order."""
    return (torch.arange(0, layout.k, layout.step or layout.k) // (layout.spec.k or layout.k)).int()


def _order(layout: Layout, g_idx: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """g_idx (K,) -> perm (packed_k,) and the groups of all steps; columns of a group keep their order."""
    step, counts = layout.order_step, torch.bincount(g_idx, minlength=num_groups)
    steps = ((counts + step - 1) // step).clamp(min=1)
    columns = torch.argsort(g_idx, stable=True)
    sorted_groups = g_idx[columns].long()
    begin, packed_begin = (sizes.cumsum(0) - sizes for sizes in (counts, steps * step))
    at = packed_begin[sorted_groups] + torch.arange(layout.k, device=g_idx.device) - begin[sorted_groups]
    perm = torch.full((layout.packed_k,), layout.k, dtype=torch.int32, device=g_idx.device)
    perm[at] = columns.int()
    return perm, torch.arange(num_groups, dtype=torch.int32, device=g_idx.device).repeat_interleave(steps)


def check_order(layout: Layout, perm: torch.Tensor, groups: torch.Tensor) -> None:
    """Raises BadInput unless every column is stored once and groups ascend without a gap."""
    columns = perm[perm != layout.k].sort().values
    if not torch.equal(columns, torch.arange(layout.k, dtype=torch.int32, device=perm.device)):
        raise BadInput(f"perm must hold each of the {layout.k} columns once, and {layout.k} elsewhere: the tensor is damaged")
    if int(groups[0]) != 0 or bool(((groups.diff() != 0) & (groups.diff() != 1)).any()):
        raise BadInput("groups must ascend from 0 by 0 or 1 a step: the tensor is damaged")


# ---- scales and zero points -----------------------------------------------------------------------------------------------------


def _spread(layout: Layout, t: torch.Tensor, rows: slice, blocks: int, k_index: torch.Tensor) -> torch.Tensor:
    """(row groups, k groups) of one expert -> bytes (blocks, k_blocks, [g][step][row g, row g+8]); padding is zero bytes.

    k_index: the group of each step.
    """
    spec = layout.spec
    row_index = torch.arange(rows.start, rows.stop, device=t.device) // (spec.rows or layout.n)
    full = torch.zeros((blocks * UNIT_ROWS, layout.k_blocks * layout.steps), dtype=t.dtype, device=t.device)
    full[: row_index.numel(), : k_index.numel()] = t[row_index][:, k_index]
    view = full.view(blocks, 2, 8, layout.k_blocks, layout.steps).permute(0, 3, 2, 4, 1).contiguous()
    return view.view(torch.uint8).view(blocks, layout.k_blocks, -1)


def _collect(layout: Layout, data: torch.Tensor, dtype: torch.dtype, firsts: torch.Tensor) -> torch.Tensor:
    """Inverse of `_spread` over all rows of an expert; firsts: the first step of each group."""
    spec = layout.spec
    view = data.contiguous().view(dtype).view(layout.row_blocks, layout.k_blocks, 8, layout.steps, 2)
    full = view.permute(0, 4, 2, 1, 3).reshape(layout.row_blocks * UNIT_ROWS, -1)
    rows = torch.arange(0, layout.n, spec.rows or layout.n, device=data.device)
    return full[rows][:, firsts].contiguous()


def _channel(layout: Layout, qw: QuantWeight) -> torch.Tensor | None:
    if not layout.has_channel:
        return None
    e = qw.experts or 1
    if layout.grouped:  # second level
        if qw.scale2 is None:
            raise BadInput(f"{qw.spec} needs a second-level scale")
        return qw.scale2.view(e, -1).expand(e, qw.n).clone()  # never an alias of the QuantWeight
    rows = torch.arange(qw.n, device=qw.scales.device) // (qw.spec.rows or qw.n)
    wide = qw.spec.scale.decode(qw.scales) if qw.scales.dtype == torch.uint8 else qw.scales.float()
    return wide[:, rows, 0].contiguous()


def _narrow(spec: WeightSpec, channel: torch.Tensor) -> torch.Tensor:
    """float32 channel scales back to the storage type they came from; exact because they came from it."""
    return spec.scale.encode(channel) if spec.scale.storage == torch.uint8 else channel.to(spec.scale.storage)


# ---- panels ---------------------------------------------------------------------------------------------------------------------


def _panels(units: torch.Tensor) -> torch.Tensor:
    """(row blocks, k_blocks, bytes) -> flat bytes in the order [panel][k block][row block]."""
    blocks, k_blocks, size = units.shape
    whole = blocks // PANEL_BLOCKS * PANEL_BLOCKS
    parts = [units[:whole].view(-1, PANEL_BLOCKS, k_blocks, size).transpose(1, 2).reshape(-1)]
    if whole < blocks:
        parts.append(units[whole:].transpose(0, 1).reshape(-1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _row_major(layout: Layout, flat: torch.Tensor) -> torch.Tensor:
    """Inverse of `_panels` over a whole expert: flat bytes -> (row blocks, k_blocks, unit_bytes)."""
    whole = layout.row_blocks // PANEL_BLOCKS * PANEL_BLOCKS
    cut = whole * layout.k_blocks * layout.unit_bytes
    head = flat[:cut].view(-1, layout.k_blocks, PANEL_BLOCKS, layout.unit_bytes).transpose(1, 2)
    parts = [head.reshape(whole, layout.k_blocks, layout.unit_bytes)]
    if whole < layout.row_blocks:
        parts.append(flat[cut:].view(layout.k_blocks, -1, layout.unit_bytes).transpose(0, 1))
    return torch.cat(parts)

"""The one description of quantised weights: `WeightSpec` (what the numbers mean) and `QuantWeight` (the numbers).

Canonical and unpermuted: nothing here knows about checkpoints, kernels, packed layouts or chips.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Final, Literal

import torch
from torch import Tensor

from lowbit.dtypes import DType, dtype, dtype_names, nearest_name
from lowbit.errors import BadInput, BadType, UnknownSpec
from lowbit.layout.bits import num_words, pack_bits, unpack_bits

Zero = Literal["none", "int", "float"]
Scale2 = Literal["none", "tensor", "channel"]

_ALIASES: Final = {
    "mxfp4": "fp4_e2m1_g32_e8m0",
    "mxfp6": "fp6_e3m2_g32_e8m0",
    "mxfp8": "fp8_e4m3_g32_e8m0",
    "mxint8": "int8_g32_e8m0_s2n",
    "nvfp4": "fp4_e2m1_g16_e4m3",
    "nf4": "nf4_g64",
}
_ZERO_SUFFIX: Final[dict[str, Zero]] = {"": "none", "z": "int", "zf": "float"}
_SCALE2_SUFFIX: Final[dict[str, Scale2]] = {"n": "none", "t": "tensor", "c": "channel"}
_NAME: Final = re.compile(
    r"(?P<value>[a-z][a-z0-9]*\([^()]*\)|(?:fp\d_)?e\dm\d|[a-z]+\d+)(?P<zero>zf|z|)"
    r"(?:_(?:g(?P<group>-1|\d+)|b(?P<rows>\d+)x(?P<k>\d+)|(?P<tensor>t)|c))?"
    r"(?:_(?P<scale>(?:bf|fp)\d\d|(?:fp\d_)?e\dm\d|ue\dm\d))?(?:_s2(?P<scale2>[ntc]))?(?P<act_order>_ao)?"
)


@dataclass(frozen=True)
class WeightSpec:
    """How codes become weights: `w = (decode(code) - zero) * scale * scale2`, in float32, in that order.

    One scale (and zero point) covers `rows` rows of N by `k` columns of K; 0 means all of them. `scale2` is a float32
    factor per tensor or per row. With `act_order`, an index says which group each column of K belongs to. Names are
    `<value>[z|zf][_g<k>|_b<rows>x<k>|_t|_c][_<scale>][_s2n|_s2t|_s2c][_ao]`, per output channel without a suffix;
    `make` fills in the defaults. Raises BadInput for fields that contradict each other.
    """

    value: DType
    scale: DType
    rows: int = 1
    k: int = 0
    zero: Zero = "none"
    scale2: Scale2 = "none"
    act_order: bool = False

    def __post_init__(self) -> None:
        if self.value.bits > 8 or (self.value.is_float and not self.value.signed):
            raise BadInput(f"weights are integers, signed floats or codebooks of up to 8 bits, not {self.value}")
        if not self.scale.is_float:
            raise BadInput(f"scales are floating-point numbers, not {self.scale}; use fp32, bf16, fp16, e8m0 or e4m3")
        if self.rows < 0 or self.k < 0:
            raise BadInput(f"rows and k per scale are positive, or 0 for all; found rows={self.rows}, k={self.k}")
        if self.zero not in _ZERO_SUFFIX.values() or self.scale2 not in _SCALE2_SUFFIX.values():
            raise BadInput(f"zero is none, int or float and scale2 is none, tensor or channel; "
                           f"found zero={self.zero!r}, scale2={self.scale2!r}")  # fmt: skip
        if self.zero != "none" and not self.value.is_int:
            raise BadInput(f"zero points belong to integer weights, not to {self.value}; use zero='none'")
        if self.act_order and (self.rows != 1 or self.k == 0):
            raise BadInput(f"act_order needs groups of K within a row; found rows={self.rows}, k={self.k}")

    @classmethod
    def make(cls, value: DType | str, *, rows: int | None = 1, k: int | None = None, scale: DType | str | None = None,
             zero: Zero = "none", scale2: Scale2 | None = None, act_order: bool = False) -> WeightSpec:  # fmt: skip
        """A spec with defaults filled in: for `rows` and `k`, each of 0, -1 and None means all.

        Default scale: bf16 for groups and blocks, fp32 per channel, per tensor and for codebooks. Default scale2:
        channel for integers with e8m0 scales, tensor for 4-bit floats with e4m3 scales (NVFP4), else none.
        """
        value = dtype(value) if isinstance(value, str) else value
        rows, k = (0 if count in (None, -1) else count for count in (rows, k))
        if scale is None:
            scale = "bf16" if (k or rows > 1) and value.kind != "codebook" else "fp32"
        scale = dtype(scale) if isinstance(scale, str) else scale
        return cls(value, scale, rows, k, zero, scale2 or _default_scale2(value, scale), act_order)

    @classmethod
    def parse(cls, name: str) -> WeightSpec:
        """The spec called `name`, inverse of `str`. Raises UnknownSpec with the nearest valid name, BadInput for a
        name whose parts contradict each other.
        """
        found = _NAME.fullmatch(_ALIASES.get(name, name))
        if found is None or not ("(" in found["value"] or found["value"] in dtype_names()):
            raise UnknownSpec(f"unknown weight spec {name!r}; did you mean {nearest_name(name, _common_names())!r}?")
        rows = 0 if found["tensor"] else int(found["rows"] or 1)
        return cls.make(
            found["value"],
            rows=rows,
            k=int(found["group"] or found["k"] or 0),
            scale=found["scale"],
            zero=_ZERO_SUFFIX[found["zero"]],
            scale2=_SCALE2_SUFFIX[found["scale2"]] if found["scale2"] else None,
            act_order=found["act_order"] is not None,
        )

    def __str__(self) -> str:
        """The alias if there is one, else the shortest name that parses to this spec."""
        return _alias_names().get(self) or self._long_name()

    def _long_name(self) -> str:
        name = str(self.value) + {"none": "", "int": "z", "float": "zf"}[self.zero]
        if (self.rows, self.k) == (1, 0):
            name += "_c" if name in _ALIASES else ""
        elif self.rows == 1:
            name += f"_g{self.k}"
        else:
            name += f"_b{self.rows}x{self.k}" if self.rows or self.k else "_t"
        default = WeightSpec.make(self.value, rows=self.rows, k=self.k)
        if self.scale != default.scale:
            name += "_" + self.scale.name.split("_")[-1]
        if self.scale2 != _default_scale2(self.value, self.scale):
            name += "_s2" + self.scale2[0]
        return name + ("_ao" if self.act_order else "")

    def scale_shape(self, n: int, k: int) -> tuple[int, int]:
        """How many scales an (n, k) weight has along N and along K."""
        return (-(-n // self.rows) if self.rows else 1), (-(-k // self.k) if self.k else 1)


def spec(x: str | WeightSpec) -> WeightSpec:
    """`x` itself, or the spec of that name. Raises UnknownSpec, BadInput, BadType."""
    if isinstance(x, WeightSpec):
        return x
    if not isinstance(x, str):
        raise BadType(f"a weight spec is a name like 'int4_g128' or a WeightSpec, not {type(x).__name__}")
    return WeightSpec.parse(x)


def _default_scale2(value: DType, scale: DType) -> Scale2:
    if value.is_int and scale.specials == "e8m0":
        return "channel"
    return "tensor" if value.is_float and value.bits == 4 and scale.name == "fp8_e4m3" else "none"


@cache
def _alias_names() -> dict[WeightSpec, str]:
    return {WeightSpec.parse(alias): alias for alias in _ALIASES}


@cache
def _common_names() -> tuple[str, ...]:
    """Names to suggest: every value format with the usual granularities and scales."""
    values = [n for n in dtype_names() if re.match(r"u?int|fp\d_|nf4", n)]
    values += [n + zero for n in values if "int" in n for zero in ("z", "zf")]
    parts = ("", "_t", "_g16", "_g32", "_g64", "_g128", "_g256", "_b128x128")
    scales = ("", "_e8m0", "_fp16", "_e4m3")
    names = (value + part + scale for value in values for part in parts for scale in scales)
    return (*_ALIASES, "fp8_e4m3", "fp4_e2m1", *names)


@dataclass(frozen=True, eq=False, repr=False)
class QuantWeight:
    """A quantised weight (N, K), or one per expert (E, N, K), in canonical form; compares by identity.

    Tensors, all on one device, with E = 1 for a dense weight, R and G from `spec.scale_shape(n, k)`:
      codes   int32 (E, N, ceil(K * bits / 32)), dense little-endian bits along K, zero bits after the last code
      scales  `spec.scale.storage` (E, R, G)
      zeros   for zero points only: int16 within the range of the value format, or float32, (E, R, G)
      scale2  for a second level only: float32 (E,) per tensor or (E, N) per channel
      g_idx   for act_order only: int32 (E, K), the group of each column. G is then whatever `scales` has, so that a slice
              of columns keeps the scales of all groups; a group may have any number of columns, also none
    Raises BadType or BadInput at construction for a tensor that is missing, not called for, or has a wrong dtype, shape
    or device; for scales, zero points and codes that are not finite numbers; for indices out of range.
    """

    spec: WeightSpec
    experts: int | None
    n: int
    k: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    scale2: Tensor | None = None
    g_idx: Tensor | None = None

    def __post_init__(self) -> None:
        if self.n < 1 or self.k < 1 or (self.experts is not None and self.experts < 1):
            raise BadInput(f"n, k and experts must be positive; found n={self.n}, k={self.k}, experts={self.experts}")
        self._check_tensors()
        self._check_numbers()

    @classmethod
    def from_values(cls, spec: WeightSpec | str, code_values: Tensor, scales: Tensor, *, zeros: Tensor | None = None,
                    scale2: Tensor | None = None, g_idx: Tensor | None = None,
                    experts: int | None = None) -> QuantWeight:  # fmt: skip
        """Packs uint8 codes into canonical bits; the other tensors as in the class, `experts` None for a dense weight.

        With codes (N, K), the other tensors lack the leading dimension too; with (E, N, K) they have it.
        """
        spec = WeightSpec.parse(spec) if isinstance(spec, str) else spec
        for name, t in (("codes", code_values), ("scales", scales)):
            if not isinstance(t, Tensor):
                raise BadType(f"{name} must be a tensor; found {type(t).__name__}")
        if code_values.ndim not in (2, 3):
            raise BadInput(f"codes are (N, K) or (E, N, K); found shape {tuple(code_values.shape)}")
        if code_values.ndim == 2:
            code_values, scales = code_values.unsqueeze(0), scales.unsqueeze(0)
            zeros, scale2, g_idx = (None if t is None else t.unsqueeze(0) for t in (zeros, scale2, g_idx))
        e, n, k = code_values.shape
        if e != (1 if experts is None else experts):
            raise BadInput(f"codes (E, N, K) = {tuple(code_values.shape)} with experts={experts}; pass experts={e}")
        codes = pack_bits(code_values, spec.value.bits)
        return cls(spec, experts, n, k, codes, scales, zeros, scale2, g_idx)

    def __repr__(self) -> str:
        shape = "x".join(str(size) for size in self.shape)
        return f"QuantWeight({self.spec}, {shape}, {self.total_bytes / 1e6:.3g} MB, {self.device})"

    @property
    def num_experts(self) -> int:
        """The leading dimension of every tensor: 1 for a dense weight."""
        return 1 if self.experts is None else self.experts

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K), or (E, N, K) with experts."""
        return (self.n, self.k) if self.experts is None else (self.experts, self.n, self.k)

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.codes.device

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for _, t in self._tensors())

    def to(self, device: torch.device | str) -> QuantWeight:
        """The same weight on another device; itself if it is there already."""
        codes = self.codes.to(device)
        if codes is self.codes:
            return self
        zeros, scale2, g_idx = (None if t is None else t.to(device) for t in (self.zeros, self.scale2, self.g_idx))
        return QuantWeight(self.spec, self.experts, self.n, self.k, codes, self.scales.to(device), zeros, scale2, g_idx)

    def code_values(self, expert: int | None = None, rows: slice = slice(None)) -> Tensor:
        """Uint8 codes (E, N, K); of one expert (N, K); of a slice of rows only, if given."""
        codes = self.codes if expert is None else self.codes[expert]
        return unpack_bits(codes[..., rows, :], self.spec.value.bits, self.k)

    def scale_values(self) -> Tensor:
        """Float32 (E, R, G): the decoded scales, without the second level."""
        return self.spec.scale.decode(self.scales)

    def zero_values(self) -> Tensor | None:
        """Float32 (E, R, G): the zero points, or None."""
        return None if self.zeros is None else self.zeros.float()

    def expand(self, t: Tensor, expert: int) -> Tensor:
        """One expert of a tensor per group (E, R, G) spread over its weights: (N, K), a broadcast view if it can be."""
        t = t[expert]
        if self.spec.rows > 1:
            t = t.repeat_interleave(self.spec.rows, 0)[: self.n]
        if self.g_idx is not None:
            t = t.index_select(1, self.g_idx[expert])
        elif t.shape[1] > 1:
            t = t.repeat_interleave(self.spec.k, 1)[:, : self.k]
        return t.expand(self.n, self.k)

    def dequantize(self, expert: int | None = None) -> Tensor:
        """Float32 weights, the exact meaning: (N, K), or (E, N, K) with experts; (N, K) of one expert, if given."""
        if expert is None and self.experts is not None:
            out = torch.empty(self.shape, dtype=torch.float32, device=self.device)
            for i in range(self.experts):
                out[i] = self.dequantize(i)
            return out
        expert = expert or 0
        w = self.spec.value.decode(self.code_values(expert))
        zeros = self.zero_values()
        if zeros is not None:
            w -= self.expand(zeros, expert)
        w *= self.expand(self.scale_values(), expert)
        if self.scale2 is not None:
            w *= self.scale2[expert].view(-1, 1)
        return w

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value

    def _check_tensors(self) -> None:
        e, (rows, groups) = self.num_experts, self.spec.scale_shape(self.n, self.k)
        if self.spec.act_order and isinstance(self.scales, Tensor) and self.scales.ndim == 3:
            groups = max(1, self.scales.shape[2])
        per_group = (e, rows, groups)
        words = num_words(self.k, self.spec.value.bits)
        expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "codes": (torch.int32, (e, self.n, words)),
            "scales": (self.spec.scale.storage, per_group),
        }
        if self.spec.zero != "none":
            expected["zeros"] = (torch.int16 if self.spec.zero == "int" else torch.float32, per_group)
        if self.spec.scale2 != "none":
            expected["scale2"] = (torch.float32, (e,) if self.spec.scale2 == "tensor" else (e, self.n))
        if self.spec.act_order:
            expected["g_idx"] = (torch.int32, (e, self.k))
        found = dict(self._tensors())
        if found.keys() != expected.keys():
            raise BadInput(f"{self.spec} has the tensors {', '.join(expected)}; found {', '.join(found)}")
        for name, (kind, shape) in expected.items():
            t = found[name]
            if t.dtype != kind:
                raise BadType(f"{name} of {self.spec} must be {kind}; found {t.dtype}")
            if t.shape != shape:
                raise BadInput(f"{name} of a {self.n}x{self.k} {self.spec} with {e} expert(s) must have shape {shape}; "
                               f"found {tuple(t.shape)}")  # fmt: skip
            if t.device != self.device:
                raise BadInput(f"all tensors must be on one device; codes are on {self.device}, {name} on {t.device}")

    def _check_numbers(self) -> None:
        value = self.spec.value
        for name, t in (("scales", self.scale_values()), ("zeros", self.zero_values()), ("scale2", self.scale2)):
            if t is not None:
                refuse_where(~torch.isfinite(t), t, f"{name} must be finite")
        # Kernels multiply scales in one order or another: what is finite in one must be so in all.
        reach = value.max - value.min if self.zeros is not None else max(value.max, -value.min)
        largest = self.scale_values().abs() * reach
        if self.scale2 is not None:
            largest = largest * self.scale2.abs().view(self.num_experts, -1).amax(1).view(-1, 1, 1)
        refuse_where(~torch.isfinite(largest), self.scale_values(), f"scales times the largest {value} must be finite in float32")
        if self.zeros is not None and self.spec.zero == "int":
            outside = (self.zeros < int(value.min)) | (self.zeros > int(value.max))
            refuse_where(outside, self.zeros, f"zero points of {value} must lie in {value.min:.0f}..{value.max:.0f}")
        if self.g_idx is not None:
            groups = self.scales.shape[2]
            refuse_where((self.g_idx < 0) | (self.g_idx >= groups), self.g_idx, f"g_idx must lie in 0..{groups - 1}")
        padding = -self.k * value.bits % 32
        if padding and bool((self.codes[..., -1] >> (32 - padding) != 0).any()):
            raise BadInput(f"the last {padding} bits of every row of codes must be 0; pack codes with pack_bits")
        if value.num_finite <= value.magnitude_mask:
            for expert in range(self.num_experts):
                codes = self.code_values(expert)
                refuse_where(value.is_special(codes), codes, f"codes of {value} must be finite numbers", (expert,))


def refuse_where(bad: Tensor, t: Tensor, rule: str, index: tuple[int, ...] = ()) -> None:
    """Raises BadInput if `bad` holds anywhere, with `rule`, the first such number of `t` and `index` + its own."""
    if bool(bad.any()):
        first = tuple(bad.nonzero()[0].tolist())
        raise BadInput(f"{rule}; found {t[first].item()} at index {index + first}")

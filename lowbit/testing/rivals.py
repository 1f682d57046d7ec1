"""Who can be timed on a linear layer: lowbit, PyTorch without quantisation, and other libraries where they are installed.

Knows how each builds a layer from a 16-bit weight; it must not know shapes, clocks or what is done with the figures.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Sequence
from importlib import metadata
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

import lowbit
from lowbit.errors import BadInput
from lowbit.nn.linear import Linear
from lowbit.quantize import quantize
from lowbit.weights import WeightSpec


class Provider(Protocol):
    """A library under test; tests bring their own."""

    name: str
    quantised: bool
    """False: it multiplies with the weight as it is, and is timed once for all formats."""

    def version(self) -> str: ...

    def supports(self, spec: WeightSpec) -> bool:
        """Whether it has a format of the same meaning."""

    def build(self, spec: WeightSpec, act: str, weight: Tensor) -> nn.Module:
        """A layer x (M, K) -> y (M, N), both of the weight's dtype, that can be deep-copied.

        act: "bf16" or "fp16", the dtype's name; weight: (N, K). A provider that does not quantise ignores the spec.
        """


class Lowbit:
    """This library."""

    name, quantised = "lowbit", True

    def version(self) -> str:
        return lowbit.__version__

    def supports(self, spec: WeightSpec) -> bool:
        return True

    def build(self, spec: WeightSpec, act: str, weight: Tensor) -> nn.Module:
        return Linear(quantize(weight, spec), act=act)


class Torch:
    """cuBLAS through `torch.nn.functional.linear`, with the 16-bit weight."""

    name, quantised = "torch", False

    def version(self) -> str:
        return metadata.version("torch")

    def supports(self, spec: WeightSpec) -> bool:
        return True

    def build(self, spec: WeightSpec, act: str, weight: Tensor) -> nn.Module:
        n, k = weight.shape
        layer = nn.Linear(k, n, bias=False, device="meta", dtype=weight.dtype)
        layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
        return layer


class Humming:
    """humming-kernels with its default settings."""

    name, quantised = "humming", True
    package, module = "humming-kernels", "humming"
    formats: ClassVar[dict[str, dict[str, Any]]] = {  # names of specs, any size of group, in its words
        "int2_g": {"dtype": "int2"},
        "int3_g": {"dtype": "int3"},
        "int4": {"dtype": "int4"},
        "int4_g": {"dtype": "int4"},
        "int4z_g": {"dtype": "int4", "has_zero_point": True},
        "int8": {"dtype": "int8"},
        "int8_g": {"dtype": "int8"},
        "fp6_e2m3": {"dtype": "float6e2m3"},
        "fp6_e3m2": {"dtype": "float6e3m2"},
        "fp8_e4m3": {"dtype": "float8e4m3"},
        "fp8_e4m3_b128x128": {"dtype": "float8e4m3", "group_size_n": 128},
        "mxfp4": {"dtype": "float4e2m1", "scale_dtype": "float8e8m0"},
        "nvfp4": {"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "scale_2_type": "tensor"},
    }

    def version(self) -> str:
        return metadata.version(self.package)

    def supports(self, spec: WeightSpec) -> bool:
        return self.weight_config(spec) is not None

    def build(self, spec: WeightSpec, act: str, weight: Tensor) -> nn.Module:
        from humming.layer import HummingLayer

        n, k = weight.shape
        config = self.weight_config(spec)
        layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=weight.dtype).to(weight.device)
        layer.load_from_unquantized(weight)
        layer.transform()
        found: nn.Module = layer
        return found

    def weight_config(self, spec: WeightSpec) -> dict[str, Any] | None:
        """Its words for `spec`; None for a format that it is not known to have."""
        words = self.formats.get(re.sub(r"(?<=_g)\d+", "", str(spec)))
        return None if words is None else {**words, **({"group_size": spec.k} if spec.k else {})}


def find_rivals(wanted: str) -> list[Provider]:
    """The providers that `wanted` names: "auto" (all that are installed), "none", or names with commas.

    Raises BadInput for a name that is unknown, with the most similar one, or a library that is not installed.
    """
    known: dict[str, Provider] = {"torch": Torch(), "humming": Humming()}
    if wanted == "auto":
        return [provider for provider in known.values() if not _missing(provider)]
    found: list[Provider] = []
    for name in () if wanted == "none" else dict.fromkeys(wanted.split(",")):
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]
            raise BadInput(f"rivals are {', '.join(known)}, auto or none; got {name!r}: did you mean {nearest!r}?")
        if package := _missing(known[name]):
            raise BadInput(f"rival {name} is not installed here: pip install {package}, or leave it out of --rivals")
        found.append(known[name])
    return found


def _missing(provider: Provider) -> str:
    """The package to install before it can run; empty if there is none."""
    module = getattr(provider, "module", None)
    package: str = getattr(provider, "package", "")
    return package if module and importlib.util.find_spec(module) is None else ""


def versions(providers: Sequence[Provider]) -> dict[str, str]:
    """Name -> version of the library behind it; "unknown" for one that was not installed as a package."""
    found = {}
    for provider in providers:
        try:
            found[provider.name] = provider.version()
        except metadata.PackageNotFoundError:
            found[provider.name] = "unknown"
    return found

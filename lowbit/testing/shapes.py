"""The linear layers of well-known models, derived from the numbers in their public configurations.

Plain arithmetic on names and sizes; it must not know formats, tensors or devices.
"""

from __future__ import annotations

import difflib

from lowbit.errors import BadInput

Layers = dict[str, tuple[int, int]]
"""Name of a layer -> (N, K), output x input features."""


def _attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> Layers:
    """Grouped-query attention: q, k and v merged in one layer, as inference engines run them, then o."""
    q, kv = heads * head_dim, kv_heads * head_dim
    return {"qkv": (q + 2 * kv, hidden), "o": (hidden, q)}


def _mlp(hidden: int, inner: int) -> Layers:
    """SwiGLU: gate and up merged, then down."""
    return {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}


def _decoder(hidden: int, heads: int, kv_heads: int, head_dim: int, inner: int) -> Layers:
    return {**_attention(hidden, heads, kv_heads, head_dim), **_mlp(hidden, inner)}


def _latent_attention(hidden: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, value: int) -> Layers:
    """Multi-head latent attention: projections down to two low ranks (alone and merged), up to the heads, then o."""
    kv = kv_rank + rope  # the rotary part of the key is shared by all heads
    return {
        "kv_a": (kv, hidden),
        "q_kv_a": (q_rank + kv, hidden),
        "q_b": (heads * (nope + rope), q_rank),
        "kv_b": (heads * (nope + value), kv_rank),
        "o": (hidden, heads * value),
    }


def _deepseek_v3() -> Layers:
    """The dense layers (18432) and the shared expert (2048); routed experts are no linear layers."""
    hidden = 7168
    shared = {f"shared_{name}": shape for name, shape in _mlp(hidden, 2048).items()}
    return {**_latent_attention(hidden, 128, 1536, 512, 128, 64, 128), **_mlp(hidden, 18432), **shared}


MODELS: dict[str, Layers] = {
    "llama-3.1-8b": _decoder(4096, 32, 8, 128, 14336),
    "llama-3.1-70b": _decoder(8192, 64, 8, 128, 28672),
    "qwen3-8b": _decoder(4096, 32, 8, 128, 12288),
    "qwen3-32b": _decoder(5120, 64, 8, 128, 25600),
    "mistral-7b": _decoder(4096, 32, 8, 128, 14336),
    "gpt-oss": _attention(2880, 64, 8, 64),  # 20b and 120b alike; the rest of a block are experts
    "deepseek-v3": _deepseek_v3(),
    "grid": {f"{n}x{k}": (n, k) for n, k in
             ((8192, 8192), (4096, 4096), (28672, 4096), (4096, 14336), (10240, 8192), (6144, 4096))},
}  # fmt: skip
"""Models, and `grid`: a few of their shapes, large and small, wide and tall."""


def layers_of(model: str) -> Layers:
    """The layers of the model of that name. Raises BadInput with the most similar name."""
    found = MODELS.get(model.lower())
    if found is None:
        nearest = difflib.get_close_matches(model.lower(), MODELS, 1, cutoff=0.0)[0]
        raise BadInput(f"models are {', '.join(MODELS)}; got {model!r}: did you mean {nearest!r}?")
    return found

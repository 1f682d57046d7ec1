"""Times `lowbit.Linear` on the GPU here, and humming-kernels beside it where that is installed: one run, one protocol.

Protocol: weights are cold (so many copies of the layer are called in turn that they exceed the L2 20 times), all calls sit in one
CUDA graph, inputs are random, a figure is the median over replays in microseconds per call. The error is against a float32 product
of the unquantised weights, so it is mostly that of the format.

    python bench/dense.py --spec int4_g128 --shapes 8192x8192,4096x4096 --m 1,8,16 [--json FILE]
"""

import argparse
import copy
import importlib.util
import json
import sys

import torch

import lowbit
from lowbit.testing.timing import graph_us, num_copies

RIVAL = {  # humming-kernels' names of the same formats
    "int4_g128": {"dtype": "int4", "group_size": 128},
    "int8": {"dtype": "int8"},
    "fp8_e4m3": {"dtype": "float8e4m3"},
    "mxfp4": {"dtype": "float4e2m1", "group_size": 32, "scale_dtype": "float8e8m0"},
    "nvfp4": {"dtype": "float4e2m1", "group_size": 16, "scale_dtype": "float8e4m3", "scale_2_type": "tensor"},
}


def build_lowbit(spec: str, weight: torch.Tensor) -> torch.nn.Module:
    return lowbit.Linear(lowbit.quantize(weight, spec))


def build_humming(spec: str, weight: torch.Tensor) -> torch.nn.Module:
    from humming.layer import HummingLayer

    n, k = weight.shape
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=dict(RIVAL[spec]), torch_dtype=torch.bfloat16).to("cuda")
    layer.load_from_unquantized(weight)
    layer.transform()
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", default="int4_g128", help="weight specs, separated by commas")
    parser.add_argument("--shapes", default="8192x8192,4096x4096,28672x4096,4096x14336", help="NxK, separated by commas")
    parser.add_argument("--m", default="1,8,16", help="numbers of tokens, separated by commas")
    parser.add_argument("--json", help="write all rows to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench/dense.py needs an NVIDIA GPU, and torch.cuda.is_available() is False")
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, {properties.multi_processor_count} SMs, torch {torch.__version__}, lowbit {lowbit.__version__}")
    builders = {"lowbit": build_lowbit}
    if importlib.util.find_spec("humming"):
        builders["humming"] = build_humming
    rows = []
    for shape in options.shapes.split(","):
        n, k = map(int, shape.split("x"))
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.05
        for spec in options.spec.split(","):
            copies = num_copies(weight.numel() * lowbit.WeightSpec.parse(spec).value.bits // 8)
            for name, build in builders.items():
                if name == "humming" and spec not in RIVAL:
                    continue
                first = build(spec, weight)
                layers = [first] + [copy.deepcopy(first) for _ in range(copies - 1)]
                for m in map(int, options.m.split(",")):
                    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                    want = x.float() @ weight.float().T
                    error = float((first(x).float() - want).norm() / want.norm())
                    us = graph_us([lambda layer=layer, x=x: layer(x) for layer in layers])
                    rows.append({"spec": spec, "n": n, "k": k, "m": m, "provider": name, "us": us, "error": error})
                    print(f"{spec:10s} {n}x{k} M={m:<5d} {name:8s} {us:9.2f} us  error {error:.4f}", flush=True)
                del layers, first
                torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file)


if __name__ == "__main__":
    main()

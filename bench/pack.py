"""How long a weight takes to pack, on the CPU and on a GPU where there is one: the best of five, kernels finished.

    python bench/pack.py [--shape 8192x8192] [--spec int4_g128,int8,mxfp4,nvfp4]
"""

import argparse
import time

import torch

import lowbit
from lowbit.cli.options import shape


def pack_ms(weight: lowbit.QuantWeight, synchronize: bool) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        lowbit.pack(weight)
        if synchronize:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=shape, default="8192x8192", help="NxK")
    parser.add_argument("--spec", default="int4_g128,int8,mxfp4,nvfp4", help="comma-separated")
    args = parser.parse_args()
    n, k = args.shape
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for spec in args.spec.split(","):
        weight = lowbit.quantize(torch.randn(n, k), spec)
        times = [f"{device} {pack_ms(weight.to(device), device == 'cuda'):.1f} ms" for device in devices]
        print(f"{spec:12} {n}x{k}: {', '.join(times)}")


if __name__ == "__main__":
    main()

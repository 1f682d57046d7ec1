"""What one layer costs the host: compiling and loading its kernels, and an eager call. Needs an NVIDIA GPU.

    python bench/host.py
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import lowbit
from lowbit.jit.cache import Cache
from lowbit.jit.generate import generate
from lowbit.ops.gemm import device_arch, problem_of
from lowbit.plan.choose import BUCKETS, choose


def seconds(call) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench/host.py needs an NVIDIA GPU, and torch.cuda.is_available() is False")
    layer = lowbit.Linear(lowbit.quantize(torch.randn(4096, 4096, device="cuda"), "int4_g128"))
    problem = problem_of(layer.layout, "bf16", "bf16", device_arch(torch.cuda.current_device()))
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder))
        sources = [generate(problem, choose(problem, m)) for m in BUCKETS]
        cold = [seconds(lambda source=source: cache.get_or_compile(source)) for source in sources]
        warm = [seconds(lambda source=source: cache.get_or_compile(source)) for source in sources]
    print(f"compile: median {median(cold):.2f} s, worst {max(cold):.2f} s a kernel; from the cache {median(warm) * 1e3:.2f} ms")
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(20):
        layer(x)
        torch.cuda.synchronize()
        times.append(seconds(lambda: [layer(x) for _ in range(100)]) / 100)
    print(f"eager call: {median(times) * 1e6:.1f} us of host time")


if __name__ == "__main__":
    main()

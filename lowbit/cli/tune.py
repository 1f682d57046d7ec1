"""`lowbit tune`: measures which plans are the fastest for some layers on this GPU, and keeps them in a file.

Knows options, files and their order; it must not know how plans are tried (testing/tune.py) or found again (plan/store.py).
"""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.cli.options import counts, layers, say, shapes, table
from lowbit.errors import BadInput

if TYPE_CHECKING:
    from lowbit.testing.tune import Found

HELP = "Measure which plans are the fastest for some layers on this GPU, and keep them in a file for LOWBIT_TUNED."
EXAMPLES = """examples:
  lowbit tune --shape 8192x8192,4096x14336 --spec int4_g128 --plans tuned.json
  lowbit tune --model llama-3.1-8b --spec fp8_e4m3,mxfp4 --m 1,8,16,32,64,8192 --plans tuned.json

Later: LOWBIT_TUNED=tuned.json. A file that is there is added to. What comes with lowbit was measured so on an H200."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--model", help="the linear layers of these models, with commas (default: grid)")
    parser.add_argument("--shape", type=shapes, help="NxK, output x input features, with commas")
    parser.add_argument("--spec", default="int4_g128", help="weight formats, with commas (%(default)s)")
    parser.add_argument("--act", default="bf16", help="activation type, bf16 or fp16 (%(default)s)")
    parser.add_argument(
        "--m",
        type=counts,
        default=(1, 8, 16, 32, 64),
        help="numbers of tokens, with commas (1,8,16,32,64); all beyond 64 share a kernel, which is tuned for 2048",
    )
    parser.add_argument("--tries", type=int, default=48, help="plans to try for each (%(default)s)")
    parser.add_argument("--plans", type=Path, required=True, metavar="FILE", help="where to keep them")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Measure, keep what is found layer by layer, and list it."""
    import torch

    from lowbit.layout.pack import Layout
    from lowbit.ops.checks import DTYPES, check_act
    from lowbit.ops.gemm import device_arch, problem_of
    from lowbit.plan import store
    from lowbit.plan.choose import bucket, size
    from lowbit.problem import check
    from lowbit.quantize import quantize
    from lowbit.testing.tune import Bench, fastest
    from lowbit.weights import WeightSpec

    path: Path = arguments.plans
    if os.path.isdir(path):
        raise BadInput(f"--plans must name a file; {path} is a folder")
    if forced := os.environ.get("LOWBIT_PLAN"):
        raise BadInput(f"LOWBIT_PLAN={forced} leaves nothing to choose from: unset it to measure all kernel families")
    if arguments.tries < 1:
        raise BadInput(f"--tries must be at least 1; got {arguments.tries}")
    check_act(arguments.act, arguments.act)
    specs = list(dict.fromkeys(WeightSpec.parse(name) for name in arguments.spec.split(",")))
    layouts = [Layout(spec, n, k) for n, k in layers(arguments) for spec in specs]
    for spec in specs:
        quantize(torch.linspace(-1, 1, 256).view(2, 128), spec)  # unsigned integers need zero points
    kept = {name: dict(plans) for name, plans in store.read(str(path)).items()} if os.path.lexists(path) else {}
    if not torch.cuda.is_available():
        raise BadInput("measuring needs an NVIDIA GPU, and torch.cuda.is_available() is False: run it where one is, then use its file")
    index = torch.cuda.current_device()
    arch = device_arch(index)
    for spec in specs:
        check(spec, arguments.act, arch)
    store.write(path, kept)  # fails now rather than after the first layer
    found: list[Found] = []
    buckets = sorted({bucket(m) for m in arguments.m})
    for layout in layouts:
        problem = problem_of(layout, arguments.act, arguments.act, arch)
        try:
            bench = Bench(layout, arguments.act, index, DTYPES[arguments.act])
        except torch.OutOfMemoryError as error:
            raise BadInput(f"{problem.label} does not fit in this GPU's memory often enough to be cold: tune smaller layers") from error
        for most in buckets:
            tokens = size(most)
            found.append(fastest(problem, tokens, arguments.tries, partial(bench.times, problem, tokens)))
            kept.setdefault(store.name_of(problem), {})[most] = found[-1].plan
            store.write(path, kept)
            done, last = f"{len(found)}/{len(layouts) * len(buckets)}", found[-1]
            say(f"{done}  {problem.label}, {tokens} tokens: {last.us:.2f} us, untuned {last.estimated_us:.2f}")
    if arguments.json:
        print(json.dumps([_row(f) for f in found], indent=1))
        return 0
    rows = [["layer", "tokens", "untuned us", "tuned us", "gain", "tried", "plan"]]
    for f in found:
        gain = f"{f.estimated_us / f.us - 1:.0%}"
        rows.append([f.problem.label, str(f.tokens), f"{f.estimated_us:.2f}", f"{f.us:.2f}", gain, str(f.tried), str(f.plan)])
    print(table(rows, 1))
    print(f"{len(found)} plans in {path}: LOWBIT_TUNED={path.resolve()}")
    return 0


def _row(found: Found) -> dict[str, object]:
    return {
        "layer": found.problem.label,
        "tokens": found.tokens,
        "untuned_us": found.estimated_us,
        "us": found.us,
        "tried": found.tried,
        "plan": str(found.plan),
    }

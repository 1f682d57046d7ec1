"""`lowbit warmup`: compiles the kernels of layers ahead of time, for this GPU or frozen for others.

Knows how to turn options into problems; it must not know how kernels are compiled or kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from lowbit.cli.options import progress, shape
from lowbit.errors import BadInput

if TYPE_CHECKING:
    from lowbit.layout.pack import Layout

HELP = "Compile ahead every kernel that some layers need; with --freeze, for any chip and without a GPU."
EXAMPLES = """examples:
  lowbit warmup --spec int4_g128 --shape 4096x4096 --shape 4096x14336
  lowbit warmup --weights layers.safetensors --arch sm_80 --arch sm_90a --freeze kernels/

Where the kernels go to run: LOWBIT_CACHE=kernels/ LOWBIT_NO_JIT=1"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--spec", action="append", help="weight format of the shapes; repeat it for several")
    parser.add_argument("--shape", action="append", type=shape, help="NxK, output x input features; repeatable")
    parser.add_argument("--weights", type=Path, help="a safetensors file with the state dict of lowbit layers")
    parser.add_argument("--act", default="bf16", help="activation type, bf16 or fp16 (%(default)s)")
    parser.add_argument("--out", help="output type (default: the activation's)")
    parser.add_argument("--batch-invariant", action="store_true", help="kernels of layers with batch_invariant=True")
    parser.add_argument("--max-m", type=int, default=8192, help="the most tokens a call will have (%(default)s)")
    parser.add_argument(
        "--arch", action="append", help="chip, such as sm_90a or sm_90a:114 (SMs); default the GPU here"
    )
    parser.add_argument("--freeze", type=Path, metavar="DIR", help="write the kernels to DIR instead of the cache")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Compile, and list what there is now."""
    from lowbit import api
    from lowbit.ops.checks import check_act
    from lowbit.ops.gemm import problem_of
    from lowbit.problem import check

    layouts = _layouts(arguments)
    out = arguments.out or arguments.act
    check_act(arguments.act, out)
    archs = [api.parse_arch(name) for name in arguments.arch] if arguments.arch else [api.current_arch()]
    for layout in layouts:
        for arch in archs:
            check(layout.spec, arguments.act, arch)
    invariant = arguments.batch_invariant
    problems = [problem_of(layout, arguments.act, out, arch, invariant) for layout in layouts for arch in archs]
    kernels = api.warmup_problems(problems, arguments.max_m, progress("compiling"), arguments.freeze)
    if arguments.json:
        keys = ("registers", "spill_bytes", "seconds", "compiler")
        rows = [
            {"label": k.source.label, "arch": k.source.arch, **{key: getattr(k, key) for key in keys}} for k in kernels
        ]
        print(json.dumps(rows, indent=1))
        return 0
    for kernel in kernels:
        print(f"{kernel.source.arch:8} {kernel.report}, {kernel.seconds:.2f} s  {kernel.source.label}")
    where = arguments.freeze or "the cache"
    print(f"{len(kernels)} kernels for {len(layouts)} layer kinds on {len(archs)} chips in {where}")
    return 0


def _layouts(arguments: argparse.Namespace) -> list[Layout]:
    """The distinct layouts that the options name."""
    from lowbit.layout.pack import Layout
    from lowbit.weights import WeightSpec

    found = [Layout(WeightSpec.parse(s), n, k) for s in arguments.spec or () for n, k in arguments.shape or ()]
    if bool(arguments.spec) != bool(arguments.shape):
        raise BadInput("--spec and --shape go together: one names the format, the other the size of the layers")
    if arguments.weights:
        found += _saved_layouts(arguments.weights)
    if not found:
        raise BadInput("name the layers: --spec and --shape, or --weights FILE")
    return list(dict.fromkeys(found))


def _saved_layouts(path: Path) -> list[Layout]:
    """The layouts of the lowbit layers in a saved state dict: each has a `tag` that names its own."""
    from safetensors import SafetensorError, safe_open

    from lowbit.layout.pack import Layout, tag_text

    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.rpartition(".")[2] == "tag"]  # noqa: SIM118
            tags = [tag_text(file.get_tensor(name)) for name in names]
    except (OSError, SafetensorError) as error:
        raise BadInput(f"--weights must be a safetensors file; {path}: {error}") from error
    # A checkpoint may have tensors of that name that are none of ours.
    layouts = [Layout.parse(tag) for tag in tags if tag is not None and tag.startswith("lowbit")]
    if not layouts:
        raise BadInput(f"{path} holds no lowbit layers: save the state dict of a model with lowbit.Linear layers")
    return layouts

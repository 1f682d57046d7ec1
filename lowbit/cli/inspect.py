"""`lowbit inspect`: layout, plans, kernels and source of one layer, or what is supported where; runs nothing.

Knows how to print what api.py answers; it must not know why the answer is so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lowbit.cli.options import counts, shape

if TYPE_CHECKING:
    from lowbit.api import Explanation
    from lowbit.layout.pack import Layout

HELP = "Show a layer's packed layout, its plan for some numbers of tokens and why, and the compiled kernel."
EXAMPLES = """examples:
  lowbit inspect --spec int4_g128 --shape 4096x4096 --m 1,8,64 --arch sm_90a
  lowbit inspect --spec mxfp4 --shape 4096x2880 --m 1 --arch sm_80 --source
  lowbit inspect --table --brief"""

TABLE_FORMATS = (
    *("int4_g128", "int4_g32", "int4", "int8", "int8_g128", "fp8_e4m3", "fp8_e4m3_b128x128", "mxfp4", "mxfp8", "nvfp4"),
    *("int4z_g128", "uint4z_g128", "int2_g64", "int3_g128", "int5_g128", "int6_g128", "fp8_e5m2", "mxfp6", "nf4"),
)
COLUMNS = {
    "sm_75": ("sm_75",),
    "sm_80 to 89": ("sm_80", "sm_86", "sm_87", "sm_89"),
    "sm_90a": ("sm_90a",),
    "sm_100a to 121a": ("sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a"),
    "zhenwu_810e": ("zhenwu_810e",),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the subcommand."""
    parser.add_argument("--spec", default="int4_g128", help="weight format (%(default)s)")
    parser.add_argument("--shape", type=shape, default=(4096, 4096), help="NxK, output x input features (4096x4096)")
    parser.add_argument("--act", default="bf16", help="activation type, bf16 or fp16 (%(default)s)")
    parser.add_argument("--out", help="output type, bf16, fp16 or fp32 (default: the activation's)")
    parser.add_argument("--m", type=counts, default=(1, 8, 64), help="numbers of tokens, with commas (1,8,64)")
    parser.add_argument("--arch", help="chip, such as sm_90a or sm_90a:114 (SMs); default the GPU here, else sm_90a")
    parser.add_argument("--batch-invariant", action="store_true", help="of a layer with batch_invariant=True")
    parser.add_argument("--source", action="store_true", help="print the generated kernels")
    parser.add_argument("--all", action="store_true", help="list every other and every refused plan")
    parser.add_argument("--no-compile", action="store_true", help="take kernels from the cache only")
    parser.add_argument("--table", action="store_true", help="print formats x chips and stop (markdown)")
    parser.add_argument("--brief", action="store_true", help="with --table: kinds of formats x kinds of chips, as in the README")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print what was asked for."""
    if arguments.table:
        table = support_summary() if arguments.brief else support_table()
        print(json.dumps(support(), indent=1) if arguments.json else table)
        return 0
    from lowbit import api
    from lowbit.layout.pack import Layout
    from lowbit.ops.checks import check_act
    from lowbit.ops.gemm import problem_of
    from lowbit.problem import check
    from lowbit.weights import WeightSpec

    spec = WeightSpec.parse(arguments.spec)
    arch = api.parse_arch(arguments.arch) if arguments.arch else _arch_here()
    out = arguments.out or arguments.act
    check_act(arguments.act, out)
    check(spec, arguments.act, arch)
    n, k = arguments.shape
    layout = Layout(spec, n, k)
    problem = problem_of(layout, arguments.act, out, arch, arguments.batch_invariant)
    answers = [api.explain(problem, m, compiled=not arguments.no_compile) for m in arguments.m]
    if arguments.json:
        print(json.dumps({"layout": _layout(layout), "plans": [_facts(a, arguments) for a in answers]}, indent=1))
        return 0
    print(_layout_text(layout))
    for answer in answers:
        print(f"\n{answer}")
        if arguments.all:
            print(_everything(answer))
    if arguments.source:
        for text in dict.fromkeys(_source(answer) for answer in answers):
            print(f"\n{text}", end="")
    return 0


def _arch_here() -> Any:
    import torch

    from lowbit import api

    return api.current_arch() if torch.cuda.is_available() else api.parse_arch("sm_90a")


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "tag": layout.tag,
        "row_blocks": layout.row_blocks,
        "k_blocks": layout.k_blocks,
        "unit_bytes": layout.unit_bytes,
        "code_bytes": layout.code_bytes,
        "scale_bytes": layout.scale_bytes,
        "zero_bytes": layout.zero_bytes,
        "channel_bytes": 4 * layout.n if layout.has_channel else 0,
        "total_bytes": layout.expert_bytes + (4 * layout.n if layout.has_channel else 0),
    }


def _layout_text(layout: Layout) -> str:
    facts, spec = _layout(layout), layout.spec
    zero, bits = "no zero points" if spec.zero == "none" else f"{spec.zero} zero points", 8 * facts["total_bytes"]
    rows = "all rows" if spec.rows == 0 else f"{spec.rows} row{'s' * (spec.rows > 1)}"
    columns = "all of k" if spec.k == 0 else f"{spec.k} of k"
    return (
        f"{spec}: {spec.value.bits}-bit {spec.value.name}, one {spec.scale.name} scale per {rows} x {columns}, {zero}, "
        f"second-level scale: {spec.scale2}\n"
        f"layout {facts['tag']}: {facts['row_blocks']} x {facts['k_blocks']} units of {facts['unit_bytes']} bytes "
        f"({facts['code_bytes']} codes, {facts['scale_bytes']} scales, {facts['zero_bytes']} zero points)\n"
        f"{facts['total_bytes']:,} bytes in all, {bits / layout.n / layout.k:.3f} bits a weight"
    )


def _facts(answer: Explanation, arguments: argparse.Namespace) -> dict[str, Any]:
    """One answer as JSON; all other and refused plans with --all, the source with --source."""
    kernel = answer.compiled
    facts: dict[str, Any] = {
        "m": answer.m,
        "arch": answer.problem.arch.name,
        "plan": asdict(answer.plan),
        "why": answer.why,
        "measured": answer.measured,
        "estimate_us": {"total": answer.cost.us, **answer.parts},
        "floor_us": answer.floor_us,
        "bytes_moved": answer.bytes_moved,
        "registers": kernel and kernel.registers,
        "spill_bytes": kernel and kernel.spill_bytes,
        "compile_seconds": kernel and kernel.seconds,
        "compiler": kernel and kernel.compiler,
        "note": answer.note,
    }
    if arguments.all:
        facts["others"] = [{"plan": str(plan), "estimate_us": cost.us} for plan, cost in answer.others]
        facts["refused"] = [{"plan": str(plan), "reasons": reasons} for plan, reasons in answer.refused]
    if arguments.source:
        facts["source"] = _source(answer)
    return facts


def _everything(answer: Explanation) -> str:
    lines = [f"  {cost.us:8.1f} us  {plan}" for plan, cost in answer.others]
    lines += [f"   refused    {plan}: {'; '.join(reasons)}" for plan, reasons in answer.refused]
    return "\n".join(lines)


def _source(answer: Explanation) -> str:
    from lowbit.jit.generate import generate

    return generate(answer.problem, answer.plan).text


def support(formats: Sequence[str] = TABLE_FORMATS) -> dict[str, dict[str, dict[str, Any]]]:
    """Format -> arch -> {"acts": types that work, "reasons": why another does not}, as `problem.unsupported` says."""
    from lowbit.arch import ARCHS
    from lowbit.problem import ACTIVATIONS, unsupported
    from lowbit.weights import WeightSpec

    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name in formats:
        spec = WeightSpec.parse(name)
        found[name] = {}
        for arch in ARCHS.values():
            answers = {act: unsupported(spec, act, arch) for act in ACTIVATIONS}
            acts = [act for act, reasons in answers.items() if not reasons]
            found[name][arch.name] = {
                "acts": acts,
                "reasons": sorted({r for reasons in answers.values() for r in reasons}),
            }
    return found


def support_table() -> str:
    """`support` as a markdown table: the activation types that work, or a dash."""
    found = support()
    archs = list(next(iter(found.values())))
    lines = ["| weights | " + " | ".join(archs) + " |", "|" + "---|" * (len(archs) + 1)]
    for name, cells in found.items():
        lines.append(f"| {name} | " + " | ".join(" ".join(cells[arch]["acts"]) or "-" for arch in archs) + " |")
    return "\n".join(lines)


def families() -> dict[str, list[str]]:
    """Rows of the README's table: what each is called, and every format it stands for."""
    import torch

    from lowbit.testing.cases import BLOCK_FLOATS, CODEBOOKS, FLOATS, GROUPS, INTEGERS, SCALES, ZERO_POINTS
    from lowbit.weights import WeightSpec

    fits = [name for name in FLOATS if WeightSpec.parse(name).value.max <= torch.finfo(torch.float16).max]
    beyond = [name for name in FLOATS if name not in fits]
    scaled = [f"int4_{group}_{scale}" for group in GROUPS for scale in SCALES]
    return {
        "`int1` to `int8` (`int2`: ternary too), `uint1` to `uint8`": [*INTEGERS, *scaled],
        "the same with zero points, integers (`uint4z`) or floats (`uint4zf`)": list(ZERO_POINTS),
        f"{len(fits)} floats of 3 to 8 bits, such as `fp8_e4m3`, `fp8_e5m2`, `fp6_e2m3`, `fp4_e2m1`": fits,
        f"{len(beyond)} floats beyond fp16's range: {', '.join(f'`{name}`' for name in beyond)}": beyond,
        "MX (`mxfp4`, `mxfp6`, `mxfp8`, `mxint8`) and `nvfp4`": list(BLOCK_FLOATS),
        "codebooks, such as `nf4`": list(CODEBOOKS),
        "act-order (`int4_g128_ao`)": ["int4_g128_ao"],
        "groups that are no multiple of 16": ["int4_g8", "int8_g24", "uint4z_g40"],
    }


def support_summary() -> str:
    """`support` of every format as a markdown table of a row per family and a column per kind of chip."""
    lines = ["| weights | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    for title, names in families().items():
        found = support(names)
        cells = []
        for archs in COLUMNS.values():
            answers = {", ".join(found[name][arch]["acts"]) or "-" for name in names for arch in archs}
            cells.append(" or ".join(sorted(answers)))  # one answer, unless a row or column must be split
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)

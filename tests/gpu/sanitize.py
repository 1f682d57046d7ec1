"""What compute-sanitizer watches: every format, kernel family and edge once, on small shapes; `make test-sanitizer` runs it.

A plain script, since a test runner would only be slowed down with it. Arguments, if any, are the weight specs to run.
"""

import sys

import torch

import lowbit
from lowbit.ops.checks import DTYPES
from lowbit.plan.plan import rounds
from lowbit.testing.tolerance import bound, operand_rounding

FORMATS = ("int4_g128", "int4_g32", "int8", "fp8_e4m3", "mxfp4", "nvfp4", "int3_g128", "uint4z_g128", "int4zf_g64", "mxfp6", "nf4")
SHAPES = ((272, 384), (576, 2880), (37, 100))
TOKENS = (1, 7, 16, 20, 40, 200)  # one for each kernel of a layer


def main() -> None:
    torch.manual_seed(0)
    checked = 0
    for act in ("bf16", "fp16"):
        for name in sys.argv[1:] or FORMATS:
            for n, k in SHAPES:
                qw = lowbit.quantize(torch.randn(n, k) * 0.05, name)
                bias, w = torch.randn(n), qw.dequantize()
                layer = lowbit.Linear(qw, bias=bias, act=act).to("cuda")
                for m in TOKENS:
                    x = torch.randn(m, k).to(DTYPES[act])
                    for _ in range(2):  # the second call overlaps with the first
                        y = layer(x.cuda()).cpu().double()
                    want = x.double() @ w.double().T + bias.double()
                    told = lowbit.explain(layer, m, compiled=False)
                    rounding = operand_rounding(layer.spec, act, rounds(told.problem, told.plan))
                    allowed = bound(x, w, bias, x.dtype, rounding=rounding)
                    if not ((y - want).abs() <= allowed).all():
                        raise SystemExit(f"wrong: {name} x {act}, {n}x{k}, {m} tokens")
                    checked += 1
    print(f"{checked} products right")


if __name__ == "__main__":
    main()

"""The command `lowbit`: parses, runs one subcommand, turns the library's errors into one line.

It must stay light: every --help works without CUDA, a compiler or PyTorch, so subcommands import what they need late.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import lowbit
from lowbit.cli import bench, demo, inspect, tune, warmup
from lowbit.errors import LowbitError

_COMMANDS = {"demo": demo, "bench": bench, "tune": tune, "inspect": inspect, "warmup": warmup}

_ABOUT = "Matrix products with weights of 1 to 8 bits, their CUDA kernels compiled on demand."
_ENVIRONMENT = (
    "environment: LOWBIT_CACHE folder of compiled kernels (~/.cache/lowbit); LOWBIT_COMPILER nvrtc, nvcc, a path or a full command; "
    "LOWBIT_NO_JIT=1 run frozen kernels only; LOWBIT_WORKERS compiling processes; LOWBIT_PLAN kernel family to force, "
    "one of stream, stream_wgmma, tile_mma, tile_wgmma; "
    "LOWBIT_TUNED file of plans that `lowbit tune` found"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's); 0, 1 for a failed check, 2 for an error of the library."""
    parser = argparse.ArgumentParser(prog="lowbit", description=_ABOUT, epilog=_ENVIRONMENT)
    parser.add_argument("--version", action="version", version=f"lowbit {lowbit.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, module in _COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP, epilog=module.EXAMPLES)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(words)
    arguments.words = words
    try:
        return int(arguments.run(arguments))
    except LowbitError as error:
        print(f"lowbit {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1

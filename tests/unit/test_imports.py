"""Importing lowbit and asking for help cost nothing and need nothing: no PyTorch, CUDA, compiler, thread or process.

Every check runs in a process of its own, in which whatever is optional cannot be found.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = ("triton", "cuda", "pynvml", "pytest", "nvidia", "numba", "cupy", "matplotlib", "humming")
HIDE = f"""
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HIDDEN}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""
REPORT = """
import json, os, sys, threading
maps = open("/proc/self/maps").read()
loaded = [name for name in ("libnvrtc", "libcuda.so", "libemu.so") if name in maps]
tops = sorted({name.partition(".")[0] for name in sys.modules})
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
print(json.dumps({"modules": tops, "threads": threading.active_count(), "libraries": loaded, "children": children}))
"""


def process(code: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` where no compiler is on the PATH, nothing optional can be imported and the cache is new."""
    env = {"PATH": "/nonexistent", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "LOWBIT_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", HIDE + code]
    return subprocess.run(command, capture_output=True, text=True, env=env | environment, cwd=tmp_path, check=False)


def facts(code: str, tmp_path: Path) -> dict[str, object]:
    done = process(code + REPORT, tmp_path)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_import_loads_only_the_standard_library(tmp_path: Path) -> None:
    found = facts("import lowbit; lowbit.__version__; dir(lowbit)", tmp_path)
    others = set(found["modules"]) - set(sys.stdlib_module_names) - {"lowbit", "__main__"}
    assert not {name for name in others if "editable" not in name and not name.startswith(("_distutils", "sitecustomize"))}
    assert (found["threads"], found["libraries"], found["children"]) == (1, [], [])
    assert not (tmp_path / "cache").exists()


def test_every_public_name_resolves_without_starting_anything(tmp_path: Path) -> None:
    code = "import lowbit, torch\nfor name in lowbit.__all__: getattr(lowbit, name)\nassert not torch.cuda.is_initialized()\n"
    found = facts(code, tmp_path)
    assert (found["threads"], found["libraries"], found["children"]) == (1, [], [])
    assert not set(found["modules"]) & set(HIDDEN)
    assert not (tmp_path / "cache").exists()


def test_public_names_do_not_depend_on_what_was_imported_first(tmp_path: Path) -> None:
    """`lowbit.quantize` is the function, though a subpackage has its name."""
    code = """
from lowbit.quantize import quantize
from lowbit.quantize.rtn import round_scale
import lowbit
assert lowbit.quantize is quantize
from lowbit import quantize as other
assert other is quantize
import lowbit.quantize.block_float
assert lowbit.quantize is quantize
"""
    done = process(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_unknown_name_is_an_attribute_error(tmp_path: Path) -> None:
    done = process("import lowbit; lowbit.nothing", tmp_path)
    assert "module 'lowbit' has no attribute 'nothing'" in done.stderr


@pytest.mark.parametrize("command", [(), ("demo",), ("bench",), ("inspect",), ("warmup",)], ids=lambda c: c[0] if c else "lowbit")
def test_help_needs_no_torch(command: tuple[str, ...], tmp_path: Path) -> None:
    code = f"""
from lowbit.cli import main
try:
    main({[*command, "--help"]!r})
except SystemExit as end:
    assert end.code == 0
"""
    done = process(code + REPORT, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: lowbit {command[0] if command else '[-h]'}")
    found = json.loads(done.stdout.splitlines()[-1])
    assert not {"torch", "numpy", "safetensors", *HIDDEN} & set(found["modules"])
    assert (found["threads"], found["libraries"], found["children"]) == (1, [], [])


def test_layer_runs_on_the_cpu_without_any_compiler(tmp_path: Path) -> None:
    code = """
import torch, lowbit
layer = lowbit.Linear(lowbit.quantize(torch.eye(16), "int8"))
print(layer(torch.arange(16.0).bfloat16().view(1, 16)).tolist())
"""
    done = process(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[float(i) for i in range(16)]]


RANKS = (
    ("errors",), ("layout.bits", "dtypes"), ("arch",), ("weights", "activations"), ("problem",),
    ("quantize", "layout", "plan", "jit", "reference"), ("ops",), ("nn",), ("api", "testing"), ("cli",),
)  # fmt: skip


def rank(module: str) -> int:
    """The layer a module belongs to; the longest matching name counts (layout.bits lies below the rest of layout)."""
    ranks = {name: i for i, names in enumerate(RANKS) for name in names}
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in ranks:
            return ranks[name]
    raise AssertionError(f"lowbit.{module} has no place in RANKS")


def imports(path: Path) -> set[str]:
    """What a file imports from lowbit, within functions as well."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "lowbit" else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.removeprefix("lowbit.") for name in names if name.startswith("lowbit.")}
    return found


def test_imports_go_one_way() -> None:
    package = ROOT / "lowbit"
    wrong = []
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        if module == "__init__":  # the public names: resolved late, checked above
            continue
        wrong += [f"{module} -> {other}" for other in sorted(imports(path)) if rank(other) > rank(module)]
    assert wrong == []


def test_no_environment_variable_but_the_documented_ones() -> None:
    allowed = {"LOWBIT_CACHE", "LOWBIT_COMPILER", "LOWBIT_NO_JIT", "LOWBIT_PLAN", "LOWBIT_TUNED", "LOWBIT_WORKERS", "LOWBIT_LOG"}
    text = "".join(path.read_text() for path in (ROOT / "lowbit").rglob("*.py"))
    assert set(re.findall(r"LOWBIT_[A-Z_]+", text)) <= allowed

"""Where compilers lie on this machine: pip wheels beside PyTorch, CUDA toolkits, the loader's own path.

It only looks at folders and environment variables; it loads nothing, runs nothing and imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def find_nvrtc(search_path: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """Names to try as libnvrtc, best first: wheels of the interpreter, then toolkits, then what the loader knows.

    Wheels come as full paths. Among several wheels the one of PyTorch's own CUDA version is first: the driver that runs that PyTorch
    takes its cubins.
    """
    folders = [Path(entry) for entry in (sys.path if search_path is None else search_path) if entry]
    wheels = [library for folder in folders for library in _libraries(folder, ("nvidia/*/lib", "torch/lib"))]
    wanted = next(filter(None, map(_torch_cuda_major, folders)), None)
    yield from map(str, sorted(wheels, key=lambda library: (_major(library) != wanted, -_major(library))))
    for root in toolkit_roots(environ):
        yield from map(str, _libraries(root, ("lib64", "lib", "targets/*/lib")))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def builtins_beside(library: str) -> list[str]:
    """The builtins libraries in the folder of a libnvrtc that is named by its path, to be loaded before it.

    It opens them by name when it first compiles, and the one of the 13.0 wheels does not look beside itself.
    """
    path = Path(library)
    found = path.parent.glob("libnvrtc-builtins*.so*") if path.is_absolute() else ()
    return sorted(str(found) for found in found if ".alt." not in found.name)


def find_nvcc(environ: Mapping[str, str] | None = None) -> str | None:
    """Path of nvcc: of a toolkit the environment names, on PATH, or in a usual place; None if there is none."""
    named = [str(root / "bin" / "nvcc") for root in toolkit_roots(environ)]
    return next(filter(None, map(shutil.which, [*named, "nvcc"])), None)


def toolkit_roots(environ: Mapping[str, str] | None = None, usual: Path = Path("/usr/local")) -> list[Path]:
    """Existing toolkit folders: CUDA_HOME, CUDA_PATH, then /usr/local/cuda*, newest first.

    The variables are written by hand and by install scripts: stray colons, spaces, quotes and missing folders are
    passed over instead of making the lookup fail.
    """
    values = os.environ if environ is None else environ
    named = (part.strip(" \t\"'") for name in ("CUDA_HOME", "CUDA_PATH") for part in values.get(name, "").split(":"))
    places = [Path(part).expanduser() for part in named if part]
    versions = sorted(usual.glob("cuda-*"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
    places += [usual / "cuda", *reversed(versions)]
    return list(dict.fromkeys(place for place in places if place.is_dir()))


def _libraries(root: Path, patterns: Sequence[str]) -> list[Path]:
    """libnvrtc.so, libnvrtc.so.13, libnvrtc-1a2b3c.so.12 below `root`; not the builtins, not the `.alt` variant."""
    found = (library for pattern in patterns for library in sorted(root.glob(f"{pattern}/libnvrtc*.so*")))
    return [library for library in found if re.match(r"libnvrtc(-(?!builtins)\w+)?\.so", library.name)]


def _major(library: Path) -> int:
    match = re.search(r"\.so\.(\d+)", library.name)
    return int(match[1]) if match else 0


def _torch_cuda_major(folder: Path) -> int | None:
    """CUDA major version of the PyTorch in `folder`, read from its version file: importing torch takes seconds."""
    try:
        match = re.search(r"^cuda\b.*=\s*['\"](\d+)", (folder / "torch/version.py").read_text("utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[1]) if match else None

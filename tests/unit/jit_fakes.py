"""Stand-ins for compilers and for libcuda: fast, countable, breakable on purpose.

They must not know what the tests check.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbit.jit.compile import Compiled
from lowbit.jit.source import Source

LOG = """\
ptxas info    : Compiling entry function 'other' for 'sm_80'
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 99 registers, used 1 barriers, 7 bytes smem
ptxas info    : Compiling entry function 'k' for 'sm_80'
ptxas info    : Function properties for k
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 24 bytes cumulative stack size, 2048 bytes smem, 400 bytes cmem[0]
"""


def make_source(text: str = "one", arch: str = "sm_80", **changes: Any) -> Source:
    fields = {"entry": "k", "label": "int4_g128 stream", "headers": (("a.h", "#define A 1\n"),), **changes}
    return Source(text=text, arch=arch, **fields)


@dataclass
class FakeCompiler:
    """Appends a line to `tally` per compile, so that compiles of several processes can be counted."""

    tally: Path
    name: str = "fake 1.0"
    log: str = LOG
    seconds: float = 0.0
    refuse: bool = False
    flags: tuple[str, ...] = ()
    build_number: int = 1

    @property
    def identity(self) -> str:
        return f"{self.name} build {self.build_number}"

    def options(self, arch: str) -> tuple[str, ...]:
        return (f"--arch={arch}", *self.flags)

    def build(self, source: Source) -> tuple[bytes | None, str]:
        with self.tally.open("a") as file:
            file.write(source.text.strip() + "\n")
        time.sleep(self.seconds)
        return None if self.refuse else f"cubin of {source.text} by {self.name}".encode() * 20, self.log

    @property
    def count(self) -> int:
        return len(self.tally.read_text().splitlines()) if self.tally.exists() else 0


def make_compiled(text: str = "one", arch: str = "sm_90a", label: str = "int4_g128 stream") -> Compiled:
    return Compiled(text.encode(), "", make_source(text, arch, label=label), "fake 1.0", 0.1, 40, 0, 0, 0)


def write_compiler_command(path: Path, version: str = "1.0", extra: str = "") -> Path:
    """A shell script that takes nvcc's arguments; every compile adds a line to `<path>.tally`.

    The cubin is the kernel's text; a text with "refuse" in it is refused, one with "crash" kills the calling process.
    """
    path.write_text(f"""#!/bin/sh
case " $* " in *" --version "*) echo "Fake compiler, release {version}, V{version}"; exit 0;; esac
echo "$*" >> {path}.tally
while [ $# -gt 1 ]; do
    if [ "$1" = -o ]; then out=$2; fi
    shift
done
{extra}
if grep -q refuse "$1"; then echo "$1(3): error: refused"; exit 1; fi
if grep -q crash "$1"; then kill -9 $PPID; exit 1; fi
cp "$1" "$out"
cat <<'LOG'
{LOG}
LOG
""")
    path.chmod(0o755)
    return path


def count_compiles(command: Path) -> int:
    tally = Path(f"{command}.tally")
    return len(tally.read_text().splitlines()) if tally.exists() else 0


@dataclass
class LaunchRecord:
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    stream: int | None
    function: int
    params: bytes
    attributes: list[tuple[int, bytes]]


@dataclass
class FakeCuda:
    """libcuda with two devices whose primary contexts are 0x100 and 0x101; `fail` maps a function to its status."""

    param_bytes: int = 16
    current: list[int] = field(default_factory=list)
    fail: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    launches: list[LaunchRecord] = field(default_factory=list)

    def __getattr__(self, name: str) -> Callable[..., int]:
        handler = self.__class__.__dict__.get(f"_{name}")
        if handler is None:
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            if name in self.fail:
                return self.fail[name]
            handler(self, *arguments)
            return 0

        return function

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """The calls noted under `name`."""
        return [call[1:] for call in self.calls if call[0] == name]

    def _cuInit(self, flags: int) -> None:
        self.calls.append(("init", flags))

    def _cuDeviceGet(self, device: Any, index: int) -> None:
        device._obj.value = index

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        self.calls.append(("retain", device.value))
        context._obj.value = 0x100 + device.value

    def _cuCtxGetCurrent(self, context: Any) -> None:
        context._obj.value = self.current[-1] if self.current else None

    def _cuCtxSetCurrent(self, context: Any) -> None:
        self.current = [context.value]

    def _cuCtxPushCurrent_v2(self, context: Any) -> None:
        self.current.append(context.value)

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        context._obj.value = self.current.pop()

    def _cuModuleLoadData(self, module: Any, image: bytes) -> None:
        time.sleep(0.005)  # long enough for other threads to come in between
        self.calls.append(("load", self.current[-1], image))
        module._obj.value = 0x1000 + len(self.named("load"))

    def _cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> None:
        self.calls.append(("function", name))
        function._obj.value = module.value << 4

    def _cuModuleUnload(self, module: Any) -> None:
        self.calls.append(("unload", module.value))

    def _cuFuncLoad(self, function: Any) -> None:
        self.calls.append(("funcload", function.value))

    def _cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> None:
        self.calls.append(("attribute", self.current[-1], attribute, value))

    def _cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> None:
        size._obj.value = self.param_bytes

    def _cuGetErrorName(self, status: int, text: Any) -> None:
        text._obj.value = f"CUDA_ERROR_{status}".encode()

    def _cuGetErrorString(self, status: int, text: Any) -> None:
        text._obj.value = f"words for {status}".encode()

    def _cuTensorMapEncodeTiled(self, target: Any, kind: int, rank: int, base: Any, *rest: Any) -> None:
        if not self.current:
            raise AssertionError("the driver encodes a tensor map for the current context, and there is none")
        self.calls.append(("map", target.value, kind, rank, base.value, *map(tuple, rest[:4]), rest[4:]))

    def _cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: None) -> None:
        c = config._obj
        attributes = [(c.attributes[i].id, bytes(c.attributes[i].value)) for i in range(c.num_attributes)]
        self.launches.append(
            LaunchRecord(
                grid=(c.grid_x, c.grid_y, c.grid_z),
                block=(c.block_x, c.block_y, c.block_z),
                smem_bytes=c.smem_bytes,
                stream=c.stream,
                function=function.value,
                params=ctypes.string_at(params[0], self.param_bytes),
                attributes=attributes,
            )
        )

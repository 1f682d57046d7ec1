"""Sources, the search for compilers, the reading of their logs and the errors of failed compiles; no real compiler."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jit_fakes import LOG, FakeCompiler, count_compiles, make_source, write_compiler_command

from lowbit.errors import BadInput, CompileError, Unsupported
from lowbit.jit import compile as compile_module
from lowbit.jit.compile import UNKNOWN, compile_source, compiler_for, find_compiler, read_report
from lowbit.jit.nvcc import Nvcc
from lowbit.jit.nvrtc import Nvrtc
from lowbit.jit.source import gather_headers
from lowbit.jit.toolkit import builtins_beside, find_nvcc, find_nvrtc, toolkit_roots


@pytest.fixture
def compiler(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path / "tally")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path / "cache"))


def test_importing_the_jit_starts_nothing() -> None:
    modules = "cache, compile, directory, driver, module, nvcc, nvrtc, pool, source, toolkit"
    program = f"""
import sys, ctypes, subprocess, threading
def refuse(*arguments, **named): raise RuntimeError("started something")
ctypes.CDLL.__init__ = subprocess.Popen.__init__ = threading.Thread.start = refuse
sys.path[:] = {sys.path!r}
from lowbit.jit import {modules}
print(*sorted({{"torch", "numpy", "multiprocessing"}} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "\n", "")


# --- sources ---------------------------------------------------------------------------------------------------------


def test_headers_are_gathered_through_cycles_and_named_from_the_root(tmp_path: Path) -> None:
    (tmp_path / "hw").mkdir()
    (tmp_path / "stream.h").write_text('#pragma once\n#include "hw/hw.h"\n#include <cstdint>\n')
    (tmp_path / "hw" / "hw.h").write_text('#pragma once\n  #  include "core.h"\n#include "../stream.h"\n')
    (tmp_path / "hw" / "core.h").write_text('#include "common.h"\n// #include "absent.h"\n')
    (tmp_path / "common.h").write_text("#define ROOT 1\n")
    (tmp_path / "unused.h").write_text("")
    assert gather_headers('#include "stream.h"\n#include "common.h"\n', tmp_path) == (
        ("common.h", "#define ROOT 1\n"),
        ("hw/core.h", '#include "common.h"\n// #include "absent.h"\n'),
        ("hw/hw.h", '#pragma once\n  #  include "hw/core.h"\n#include "stream.h"\n'),
        ("stream.h", '#pragma once\n#include "hw/hw.h"\n#include <cstdint>\n'),
    )


def test_a_header_beside_the_including_one_comes_first(tmp_path: Path) -> None:
    (tmp_path / "hw").mkdir()
    (tmp_path / "core.h").write_text("root\n")
    (tmp_path / "hw" / "core.h").write_text("hw\n")
    (tmp_path / "hw" / "hw.h").write_text('#include "core.h"\n')
    headers = dict(gather_headers('#include "hw/hw.h"\n', tmp_path))
    assert headers == {"hw/core.h": "hw\n", "hw/hw.h": '#include "hw/core.h"\n'}


@pytest.mark.parametrize("name", ["absent.h", "../outside.h", "/etc/passwd"])
def test_a_header_that_is_not_there_is_named_with_its_includer(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "cuda"
    folder.mkdir()
    (tmp_path / "outside.h").write_text("")
    (folder / "a.h").write_text(f'#include "{name}"\n')
    with pytest.raises(BadInput, match=rf'a\.h includes "{name}"'):
        gather_headers('#include "a.h"\n', folder)


def test_a_source_survives_pickling_with_its_key() -> None:
    source = make_source()
    copy = pickle.loads(pickle.dumps(source))
    assert copy == source
    assert copy.key == source.key
    assert len(source.key) == 64


# --- finding a compiler ----------------------------------------------------------------------------------------------


def make_library(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return str(path)


def test_wheels_come_before_toolkits_and_builtins_are_no_compiler(tmp_path: Path) -> None:
    site, toolkit = tmp_path / "site", tmp_path / "toolkit"
    newest = make_library(site / "nvidia/cu13/lib/libnvrtc.so.13")
    oldest = make_library(site / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12")
    bundled = make_library(site / "torch/lib/libnvrtc-b51b459d.so.12")
    make_library(site / "nvidia/cu13/lib/libnvrtc-builtins.so.13.5")
    make_library(site / "nvidia/cu13/lib/libnvrtc.alt.so.13")
    in_toolkit = make_library(toolkit / "lib64/libnvrtc.so")
    found = list(find_nvrtc([str(tmp_path / "absent"), "", str(site)], {"CUDA_HOME": str(toolkit)}))
    assert found[:3] == [newest, oldest, bundled]
    assert found.index(in_toolkit) == 3
    assert found[-1] == "libnvrtc.so"
    assert not [path for path in found if "builtins" in path or ".alt." in path]


@pytest.mark.parametrize(
    ("version", "first"), [("cuda: Optional[str] = '12.8'", 12), ("cuda = '13.0'", 13), ("cuda = None", 13)]
)
def test_the_wheel_of_pytorchs_own_cuda_version_is_first(tmp_path: Path, version: str, first: int) -> None:
    libraries = {major: make_library(tmp_path / f"nvidia/cu{major}/lib/libnvrtc.so.{major}") for major in (12, 13)}
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text(f"debug = False\n{version}\ncuda_other = '11'\n")
    assert next(find_nvrtc([str(tmp_path)], {})) == libraries[first]


def test_builtins_beside_a_library_are_loaded_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The libnvrtc of some wheels looks for them only where the loader does."""
    names = ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0", "libnvrtc.alt.so.13")
    for name in names:
        (tmp_path / name).touch()
    assert builtins_beside(str(tmp_path / names[0])) == [str(tmp_path / names[1])]
    assert builtins_beside("libnvrtc.so.13") == []
    loaded: list[str] = []

    def load(path: str) -> object:
        loaded.append(path)
        if path.endswith(names[0]):
            raise OSError("a file without content")
        return object()

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(Unsupported, match="a file without content"):
        Nvrtc.open(str(tmp_path / names[0]))
    assert [Path(path).name for path in loaded] == [names[1], names[0]]


def test_stray_characters_in_cuda_home_do_no_harm(tmp_path: Path) -> None:
    good = tmp_path / "my cuda"
    good.mkdir()
    usual = tmp_path / "local"
    for name in ("cuda-12.9", "cuda-13.0", "cuda-9.2"):
        (usual / name).mkdir(parents=True)
    environment = {"CUDA_HOME": f": '{good}' ::/no/such/place:", "CUDA_PATH": f'"{good}"'}
    newest_first = [usual / name for name in ("cuda-13.0", "cuda-12.9", "cuda-9.2")]
    assert toolkit_roots(environment, usual) == [good, *newest_first]
    assert toolkit_roots({}, tmp_path / "absent") == []


def test_nvcc_of_the_named_toolkit_beats_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / "toolkit/bin", tmp_path / "path"):
        folder.mkdir(parents=True)
        write_compiler_command(folder / "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_nvcc({"CUDA_HOME": f"{tmp_path / 'toolkit'}:"}) == str(tmp_path / "toolkit/bin/nvcc")


def test_settings_name_a_path_or_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my tools").mkdir()
    command = write_compiler_command(tmp_path / "my tools" / "ppucc", version="2.1.7")
    by_path = find_compiler(str(command))
    by_command = find_compiler(f"'{command}' --threads 2")
    assert by_path.name == by_command.name == "ppucc 2.1.7"
    assert by_path.identity != by_command.identity
    monkeypatch.setenv("LOWBIT_COMPILER", f"  {command} ")
    assert find_compiler() is by_path


@pytest.mark.parametrize("setting", ["", "nvrtc", "nvcc"])
def test_another_makers_chip_needs_a_compiler_of_its_own(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_COMPILER", setting)
    found = f"is '{setting}'" if setting else "is not set"
    with pytest.raises(Unsupported, match=rf"zhenwu_810e.*LOWBIT_COMPILER {found}: set it to .* command .*nvcc's arguments, -arch=sm_80"):
        compiler_for("zhenwu_810e", "sm_80")


def test_another_makers_compiler_is_asked_for_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = write_compiler_command(tmp_path / "ppucc")
    monkeypatch.setenv("LOWBIT_COMPILER", f"{command} --ppu")
    source = make_source(arch="zhenwu_810e", target="sm_80")
    compiled = compile_source(source)
    assert compiled.compiler == "ppucc 1.0"
    assert "-arch=sm_80 " in Path(f"{command}.tally").read_text()
    assert source.key != make_source(arch="zhenwu_810e").key
    with pytest.raises(CompileError, match=r"for zhenwu_810e did not compile[^$]*-arch=sm_80"):
        compile_source(make_source("refuse", arch="zhenwu_810e", target="sm_80"), failed_directory=tmp_path)
    assert compiled.report == "40 registers, 36 bytes spilled"
    assert replace(compiled, registers=UNKNOWN).report == "registers not reported"


@pytest.mark.parametrize("setting", ["no-such-compiler -x", "/no/such/libnvrtc.so.13"])
def test_a_setting_that_names_nothing_says_so(setting: str) -> None:
    with pytest.raises(Unsupported, match=setting.partition(" ")[0]):
        find_compiler(setting)


def test_a_command_that_does_not_work_says_so(tmp_path: Path) -> None:
    command = tmp_path / "broken"
    command.write_text("#!/bin/sh\nexit 3\n")
    command.chmod(0o755)
    with pytest.raises(Unsupported, match=r"broken.*--version.*LOWBIT_COMPILER"):
        find_compiler(str(command))


def test_no_compiler_at_all_gives_both_reasons_and_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> compile_module.Compiler:
        raise Unsupported(["no NVRTC library could be loaded: pip install nvidia-cuda-nvrtc"])

    monkeypatch.setattr(compile_module.Nvrtc, "open", nothing)
    monkeypatch.setattr(compile_module, "find_nvcc", lambda: None)
    with pytest.raises(Unsupported) as caught:
        compile_module._open_any()
    assert len(caught.value.reasons) == 2
    assert "pip install nvidia-cuda-nvrtc" in caught.value.reasons[0]
    assert "LOWBIT_COMPILER" in caught.value.reasons[1]


# --- compiling -------------------------------------------------------------------------------------------------------


def test_the_report_is_the_entrys_own_and_unknown_when_absent() -> None:
    assert read_report(LOG, "k") == {"registers": 40, "spill_bytes": 36, "stack_bytes": 24, "static_smem": 2048}
    assert read_report(LOG, "other")["registers"] == 99
    assert read_report(LOG, "kk") == dict.fromkeys(read_report(LOG, "k"), UNKNOWN)
    assert read_report("no report here", "k")["spill_bytes"] == UNKNOWN
    cut_short = f"ptxas info    : Compiling entry function 'first' for 'sm_80'\n{LOG}"
    assert read_report(cut_short, "first")["registers"] == UNKNOWN


def test_a_compiled_kernel_survives_pickling(compiler: FakeCompiler) -> None:
    compiled = compile_source(make_source(), compiler=compiler)
    assert pickle.loads(pickle.dumps(compiled)) == compiled
    assert compiled.compiler == "fake 1.0"
    assert compiled.log == LOG


@pytest.mark.parametrize("code", ["C7510", "C7511", "C7512", "C7513"])
def test_serialised_wgmma_is_an_error(compiler: FakeCompiler, code: str) -> None:
    remark = (
        f"ptxas info    : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x"
    )
    with pytest.raises(CompileError, match=rf"wgmma instructions were serialised: \({code}\)") as caught:
        compile_source(make_source(), compiler=replace(compiler, log=f"{LOG}{remark}\n"))
    assert remark in str(caught.value)
    assert "Used 40 registers" not in str(caught.value)


def test_ptxas_errors_are_not_taken_for_its_report(compiler: FakeCompiler) -> None:
    lines = [
        'k.cu(1): warning #177-D: variable "x" was declared but never referenced',
        "ptxas application ptx input, line 20; error   : Instruction 'wgmma.fence' not supported on .target 'sm_80'",
        "ptxas fatal   : Ptx assembly aborted due to errors",
    ]
    with pytest.raises(CompileError) as caught:
        compile_source(make_source(), compiler=replace(compiler, refuse=True, log=LOG + "\n".join(lines)))
    assert str(caught.value).splitlines()[3:] == [f"  {line}" for line in lines]


def test_other_remarks_are_no_error(compiler: FakeCompiler) -> None:
    remark = "ptxas info    : (C7519) Potential Performance Loss: wgmma.mma_async pipeline crosses function boundary"
    assert compile_source(make_source(), compiler=replace(compiler, log=f"{LOG}{remark}\n")).registers == 40


def test_an_error_has_spec_arch_command_place_and_the_first_lines(compiler: FakeCompiler, tmp_path: Path) -> None:
    lines = [f'k.cu({i}): error: identifier "y{i}" is undefined' for i in range(40)]
    with pytest.raises(CompileError) as caught:
        compile_source(make_source(), compiler=replace(compiler, refuse=True, log=LOG + "\n".join(lines)))
    message = str(caught.value)
    kept = tmp_path / "cache" / "failed" / f"{make_source().key}.cu"
    for part in ("int4_g128 stream for sm_80", "fake 1.0 --arch=sm_80", str(kept), lines[0], lines[11], "28 more"):
        assert part in message
    assert lines[12] not in message
    assert kept.read_text() == "one"
    assert lines[39] in kept.with_suffix(".log").read_text()


def test_an_error_is_not_hidden_by_a_folder_that_cannot_be_written(compiler: FakeCompiler, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CompileError, match=r"source: not kept .*\n.*why it failed"):
        compile_source(
            make_source(),
            compiler=replace(compiler, refuse=True, log="why it failed"),
            failed_directory=tmp_path / "file" / "failed",
        )


# --- the command-line compiler ---------------------------------------------------------------------------------------


def test_a_command_gets_text_headers_and_architecture(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    extra = f'cp -r "$(dirname "$1")/include" {seen}; echo "in $1" >&2'
    command = write_compiler_command(tmp_path / "cc", extra=extra)
    headers = (("hw/core.h", "#define A 1\n"), ("s.h", "é\n"))
    compiled = compile_source(make_source("text é", "sm_90a", headers=headers), compiler=Nvcc([str(command)]))
    assert compiled.cubin == "text é".encode()
    assert (compiled.registers, compiled.spill_bytes) == (40, 36)
    assert {str(path.relative_to(seen)): path.read_text() for path in seen.rglob("*.h")} == dict(headers)
    assert compiled.log.startswith("in k.cu\n")  # nothing of the private folder's name
    arguments = Path(f"{command}.tally").read_text().split()
    assert arguments[:2] == ["-cubin", "-arch=sm_90a"]
    assert not Path(arguments[-1]).parent.exists()


def test_options_in_the_environment_do_not_reach_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-G")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-use_fast_math")
    command = write_compiler_command(tmp_path / "cc", extra='env | grep "NVCC_.*FLAGS"')
    assert "NVCC_" not in compile_source(make_source(), compiler=Nvcc([str(command)])).log


def test_a_command_that_refuses_is_a_compile_error_with_its_words(tmp_path: Path) -> None:
    command = write_compiler_command(tmp_path / "cc")
    with pytest.raises(CompileError, match=r"\n  k\.cu\(3\): error: refused"):
        compile_source(make_source("refuse"), compiler=Nvcc([str(command)]))
    assert count_compiles(command) == 1


def test_a_command_that_writes_nothing_is_a_compile_error(tmp_path: Path) -> None:
    command = write_compiler_command(tmp_path / "cc", extra="echo all well; exit 0")
    with pytest.raises(CompileError, match="all well"):
        compile_source(make_source(), compiler=Nvcc([str(command)]))

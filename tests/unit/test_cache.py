"""The kernel cache under everything that happens to caches: races, kills, damage, read-only folders, upgrades."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jit_fakes import FakeCompiler, count_compiles, make_source, write_compiler_command

import lowbit.jit.cache as cache_module
from lowbit.errors import CompileError, MissingKernel, Unsupported
from lowbit.jit import directory
from lowbit.jit.cache import Cache
from lowbit.jit.compile import Compiled
from lowbit.jit.source import gather_headers


@pytest.fixture
def compiler(tmp_path: Path) -> FakeCompiler:
    return FakeCompiler(tmp_path / "tally")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def entries(cache: Cache) -> list[Path]:
    return sorted(path.parent for path in cache.directory.rglob("SHA256SUMS"))


def leftovers(cache: Cache) -> list[str]:
    return [path.name for path in cache.directory.rglob(".*")]


# --- hits and keys ---------------------------------------------------------------------------------------------------


def test_a_hit_is_what_was_compiled(cache: Cache, compiler: FakeCompiler) -> None:
    source = make_source()
    made = cache.get_or_compile(source, compiler)
    assert made.cubin == b"cubin of one by fake 1.0" * 20
    assert (made.registers, made.spill_bytes, made.stack_bytes, made.static_smem) == (40, 36, 24, 2048)
    assert cache.get(source, compiler) == made
    assert cache.get_or_compile(source, compiler) == made
    assert compiler.count == 1
    assert leftovers(cache) == []


def test_an_entry_can_be_read_by_people_and_checked_by_hand(cache: Cache, compiler: FakeCompiler) -> None:
    cache.get_or_compile(make_source("the text"), compiler)
    (entry,) = entries(cache)
    assert entry.name.startswith("fake-1.0-")
    assert entry.parent.parent.name == "sm_80"
    assert sorted(path.name for path in entry.iterdir()) == [
        *("SHA256SUMS", "kernel.cubin", "key.json", "log.txt", "source.cu"),
    ]
    assert (entry / "source.cu").read_text() == "the text"
    check = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=entry, capture_output=True, text=True, check=False)
    assert check.returncode == 0
    assert check.stdout.count(": OK") == 4


@pytest.mark.parametrize(
    "change",
    [
        {"text": "two"},
        {"arch": "sm_90a"},
        {"entry": "other"},
        {"headers": (("a.h", "#define A 2\n"),)},
        {"headers": (("b.h", "#define A 1\n"),)},
        {"headers": (("a.h", "#define A 1\n"), ("b.h", ""))},
        {"headers": ()},
    ],
    ids="-".join,
)
def test_everything_that_is_compiled_is_in_the_key(
    cache: Cache, compiler: FakeCompiler, change: dict[str, Any]
) -> None:
    cache.get_or_compile(make_source(), compiler)
    other = replace(make_source(), **change)
    assert cache.get(other, compiler) is None
    cache.get_or_compile(other, compiler)
    assert compiler.count == 2
    assert len(entries(cache)) == 2


def test_a_label_is_not_in_the_key_and_the_hit_carries_the_new_one(cache: Cache, compiler: FakeCompiler) -> None:
    cache.get_or_compile(make_source(), compiler)
    assert cache.get_or_compile(make_source(label="renamed"), compiler).source.label == "renamed"
    assert compiler.count == 1


@pytest.mark.parametrize(
    "change", [{"name": "fake 1.1"}, {"build_number": 2}, {"flags": ("-O2",)}], ids=["version", "identity", "options"]
)
def test_another_compiler_or_options_never_serve_the_first_ones_entry(
    cache: Cache, compiler: FakeCompiler, change: dict[str, Any]
) -> None:
    first = cache.get_or_compile(make_source(), compiler)
    other = replace(compiler, **change)
    assert cache.get(make_source(), other) is None
    cache.get_or_compile(make_source(), other)
    assert compiler.count == 2
    assert cache.get(make_source(), compiler) == first


def test_two_architectures_share_a_directory(cache: Cache, compiler: FakeCompiler) -> None:
    for arch in ("sm_80", "sm_90a"):
        cache.get_or_compile(make_source(arch=arch), compiler)
    assert sorted(entry.parent.parent.name for entry in entries(cache)) == ["sm_80", "sm_90a"]
    assert cache.get(make_source(arch="sm_75"), compiler) is None


def test_a_header_changed_under_the_same_time_stamp_is_another_kernel(
    cache: Cache, compiler: FakeCompiler, tmp_path: Path
) -> None:
    header = tmp_path / "a.h"
    text = '#include "a.h"\n'
    for content in ("#define A 1\n", "#define A 2\n"):
        header.write_text(content)
        os.utime(header, (1_000_000_000, 1_000_000_000))
        cache.get_or_compile(make_source(text, headers=gather_headers(text, tmp_path)), compiler)
    assert compiler.count == 2


def test_an_entry_of_another_library_version_is_not_seen(
    cache: Cache, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.get_or_compile(make_source(), compiler)
    monkeypatch.setattr(cache_module, "_FORMAT", "v999")
    assert cache.get(make_source(), compiler) is None
    cache.get_or_compile(make_source(), compiler)
    assert compiler.count == 2


def test_an_entry_moved_to_another_kernels_place_is_not_taken(cache: Cache, compiler: FakeCompiler) -> None:
    cache.get_or_compile(make_source("one"), compiler)
    cache.get_or_compile(make_source("two"), compiler)
    one, two = sorted(entries(cache), key=lambda entry: (entry / "source.cu").read_text())
    for path in one.iterdir():
        path.write_bytes((two / path.name).read_bytes())
    assert cache.get(make_source("one"), compiler) is None


# --- damage ----------------------------------------------------------------------------------------------------------


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "bit-flipped": _flip_a_bit,
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", ["source.cu", "key.json", "log.txt", "kernel.cubin", "SHA256SUMS"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_and_repaired(cache: Cache, compiler: FakeCompiler, name: str, damage: str) -> None:
    made = cache.get_or_compile(make_source(), compiler)
    (entry,) = entries(cache)
    DAMAGE[damage](entry / name)
    assert cache.get(make_source(), compiler) is None
    assert cache.get(make_source()) is None
    again = cache.get_or_compile(make_source(), compiler)
    assert again.cubin == made.cubin
    assert compiler.count == 2
    assert cache.get(make_source(), compiler) == again
    assert leftovers(cache) == []


def test_an_emptied_entry_folder_is_rebuilt(cache: Cache, compiler: FakeCompiler) -> None:
    cache.get_or_compile(make_source(), compiler)
    (entry,) = entries(cache)
    for path in entry.iterdir():
        path.unlink()
    assert cache.get_or_compile(make_source(), compiler).cubin
    assert cache.get(make_source(), compiler) is not None


def test_what_a_killed_publisher_left_is_swept_away(cache: Cache, compiler: FakeCompiler) -> None:
    cache.get_or_compile(make_source(), compiler)
    (entry,) = entries(cache)
    half = entry.parent / ".build-dead" / "fresh"
    half.mkdir(parents=True)
    (half / "kernel.cubin").write_bytes(b"half a cub")
    assert cache.get(make_source()) == cache.get(make_source(), compiler)
    cache.get_or_compile(make_source(), replace(compiler, name="fake 2.0"))
    assert leftovers(cache) == []


# --- processes -------------------------------------------------------------------------------------------------------

_COMPILE = """
import sys
from pathlib import Path
sys.path[:] = {path!r}
from jit_fakes import FakeCompiler, make_source
from lowbit.jit.cache import Cache
compiler = FakeCompiler(Path({tally!r}), seconds={seconds})
print("ready", flush=True)
sys.stdin.readline()
for text in {texts!r}:
    print(len(Cache(Path({directory!r})).get_or_compile(make_source(text), compiler).cubin), flush=True)
"""


def start_process(cache: Cache, compiler: FakeCompiler, texts: list[str], seconds: float) -> subprocess.Popen[str]:
    program = _COMPILE.format(
        path=sys.path, tally=str(compiler.tally), texts=texts, directory=str(cache.directory), seconds=seconds
    )
    command = [sys.executable, "-S", "-c", program]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.005)


def test_eight_processes_on_a_cold_cache_compile_each_kernel_once(cache: Cache, compiler: FakeCompiler) -> None:
    texts = ["one", "two", "three"]
    # Each starts with another kernel, so that they meet at different places; all are at the line before any starts.
    orders = [texts[i % 3 :] + texts[: i % 3] for i in range(8)]
    processes = [start_process(cache, compiler, order, seconds=0.1) for order in orders]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    sizes = {text: str(len(f"cubin of {text} by fake 1.0" * 20)) for text in texts}
    assert outputs == [[sizes[text] for text in order] for order in orders]
    assert sorted(compiler.tally.read_text().split()) == sorted(texts)
    assert leftovers(cache) == []


def test_a_killed_compile_hangs_nobody_and_leaves_nothing_half_made(cache: Cache, compiler: FakeCompiler) -> None:
    victim = start_process(cache, compiler, ["one"], seconds=600)
    assert victim.stdin is not None
    victim.stdin.write("go\n")
    victim.stdin.flush()
    wait_for(lambda: compiler.count == 1)  # it holds the lock and compiles
    heir = start_process(cache, compiler, ["one"], seconds=0)
    assert heir.stdin is not None
    heir.stdin.write("go\n")
    heir.stdin.flush()
    assert cache.get(make_source("one"), compiler) is None
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert heir.communicate(timeout=30)[0].split() == ["ready", str(24 * 20)]
    assert compiler.count == 2
    assert cache.get(make_source("one"), compiler) is not None
    victim.communicate()


def test_a_lock_that_is_never_released_only_costs_patience(
    cache: Cache, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_PATIENCE_SECONDS", 0.05)
    folder = cache.directory / "v1" / "sm_80" / make_source().key[:32]
    with cache_module._locked(folder):
        assert cache.get_or_compile(make_source(), compiler).cubin
    assert cache.get(make_source(), compiler) is not None


def test_a_file_system_without_locks_still_caches(
    cache: Cache, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache_module.fcntl, "flock", refuse)
    cache.get_or_compile(make_source(), compiler)
    cache.get_or_compile(make_source(), compiler)
    assert compiler.count == 1


def test_who_loses_the_race_to_publish_keeps_its_kernel(cache: Cache, compiler: FakeCompiler) -> None:
    class Slow(FakeCompiler):
        def build(self, source: Any) -> tuple[bytes | None, str]:
            cache_module._publish(entry, other, self)  # as a process without the lock would, in mid-compile
            return super().build(source)

    other = cache.get_or_compile(make_source(), compiler)
    (entry,) = entries(cache)
    (entry / "kernel.cubin").unlink()
    slow = Slow(compiler.tally)
    assert cache.get_or_compile(make_source(), slow).cubin == other.cubin
    assert cache.get(make_source(), slow) is not None
    assert leftovers(cache) == []


# --- places ----------------------------------------------------------------------------------------------------------


def _refuse_writes_below(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only mount, which unlike permission bits binds root too: every way to write refuses."""
    real_open, real_mkdir, real_rename = os.open, os.mkdir, os.rename

    def check(*paths: Any) -> None:
        for path in paths:
            if isinstance(path, str | Path) and Path(path).is_relative_to(folder):
                raise OSError(30, "Read-only file system", str(path))

    def guarded_open(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            check(path)
        return real_open(path, flags, *rest, **named)

    def guarded_mkdir(path: Any, *rest: Any, **named: Any) -> None:
        if not Path(path).exists():
            check(path)
        real_mkdir(path, *rest, **named)

    def guarded_rename(first: Any, second: Any, **named: Any) -> None:
        check(first, second)
        real_rename(first, second, **named)

    monkeypatch.setattr(os, "open", guarded_open)
    monkeypatch.setattr(os, "mkdir", guarded_mkdir)
    monkeypatch.setattr(os, "rename", guarded_rename)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory, for this test only."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(directory.tempfile, "tempdir", str(folder))
    return folder


def test_a_read_only_cache_is_read_and_misses_go_to_a_private_folder(
    cache: Cache,
    compiler: FakeCompiler,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache.get_or_compile(make_source("one"), compiler)
    before = sorted(cache.directory.rglob("*"))
    _refuse_writes_below(cache.directory, monkeypatch)
    cold = Cache(cache.directory)
    cold.get_or_compile(make_source("one"), compiler)
    assert compiler.count == 1
    assert list(temporary.iterdir()) == []
    with caplog.at_level(logging.WARNING, logger="lowbit"):
        cold.get_or_compile(make_source("two"), compiler)
        cold.get_or_compile(make_source("three"), compiler)
    assert len(caplog.records) == 1
    (private,) = temporary.iterdir()
    assert str(cache.directory) in caplog.text
    assert str(private) in caplog.text
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert compiler.count == 3
    Cache(cache.directory).get_or_compile(make_source("two"), compiler)  # as a later process of this user
    assert compiler.count == 3
    assert sorted(cache.directory.rglob("*")) == before


def test_a_cache_below_a_file_falls_back_too(compiler: FakeCompiler, temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = Cache(tmp_path / "file" / "cache")
    assert cache.get(make_source(), compiler) is None
    made = cache.get_or_compile(make_source(), compiler)
    assert cache.get(make_source(), compiler) == made
    assert compiler.count == 1


@pytest.mark.parametrize("trap", ["symlink", "open to others"])
def test_a_private_folder_laid_out_by_somebody_else_is_not_used(temporary: Path, tmp_path: Path, trap: str) -> None:
    place = temporary / f"lowbit-{os.geteuid()}"
    if trap == "symlink":
        (tmp_path / "theirs").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "theirs")
    else:
        place.mkdir()
        place.chmod(0o777)
    (tmp_path / "file").write_text("")
    chosen = directory.writable_directory(tmp_path / "file" / "cache")
    assert chosen != place
    assert chosen.resolve() != place.resolve()
    assert stat.S_IMODE(chosen.stat().st_mode) == 0o700


def test_a_cache_deleted_under_a_running_process_is_made_again(cache: Cache, compiler: FakeCompiler) -> None:
    cache.get_or_compile(make_source("one"), compiler)
    shutil.rmtree(cache.directory)
    cache.get_or_compile(make_source("one"), compiler)
    assert compiler.count == 2
    assert cache.get(make_source("one"), compiler) is not None


def test_a_cache_that_became_a_file_loses_the_entry_not_the_kernel(
    cache: Cache, compiler: FakeCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(cache.writable)
    cache.directory.write_text("")
    with caplog.at_level(logging.WARNING, logger="lowbit"):
        assert cache.get_or_compile(make_source(), compiler).cubin
    assert "could not be kept" in caplog.text


def test_a_disk_that_fills_up_loses_the_entry_not_the_kernel(
    cache: Cache, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with caplog.at_level(logging.WARNING, logger="lowbit"):
        assert cache.get_or_compile(make_source(), compiler).cubin
    assert "No space left on device" in caplog.text
    assert entries(cache) == []
    assert leftovers(cache) == []


def test_everything_made_is_private(cache: Cache, compiler: FakeCompiler) -> None:
    cache.get_or_compile(make_source(), compiler)
    folders = [cache.directory, *(path for path in cache.directory.rglob("*") if path.is_dir())]
    assert len(folders) == 5
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


def test_shared_folders_are_read_after_the_own_one_and_never_written(
    cache: Cache, compiler: FakeCompiler, tmp_path: Path
) -> None:
    shared = Cache(tmp_path / "shared")
    made = shared.get_or_compile(make_source("one"), compiler)
    before = sorted(shared.directory.rglob("*"))
    both = Cache(cache.directory, shared=(tmp_path / "nowhere", shared.directory))
    assert both.get_or_compile(make_source("one"), compiler) == made
    both.get_or_compile(make_source("two"), compiler)
    assert compiler.count == 2
    assert sorted(shared.directory.rglob("*")) == before
    assert cache.get(make_source("two"), compiler) is not None


def test_the_default_directory_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWBIT_CACHE", str(tmp_path / "own"))
    assert Cache().directory == tmp_path / "own"
    assert not (tmp_path / "own").exists()
    monkeypatch.delenv("LOWBIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache().directory == tmp_path / "xdg" / "lowbit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Cache().directory == tmp_path / "home" / ".cache" / "lowbit"


def test_a_copy_in_another_process_writes_to_the_same_place(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (temporary / f"lowbit-{os.geteuid()}").write_text("in the way, so that the private folder is a fresh one")
    cache = Cache(tmp_path / "file" / "cache")
    assert cache.writable.parent == temporary
    assert pickle.loads(pickle.dumps(cache)).writable == cache.writable


# --- without compiling -----------------------------------------------------------------------------------------------


def test_frozen_kernels_need_no_compiler(
    cache: Cache, compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cache.get_or_compile(make_source(), compiler)
    monkeypatch.setenv("LOWBIT_COMPILER", str(tmp_path / "no-such-compiler"))
    assert Cache(cache.directory, jit=False).get_or_compile(make_source()) == made
    assert Cache(cache.directory, jit=True).get_or_compile(make_source()) == made
    with pytest.raises(Unsupported, match="no-such-compiler"):
        Cache(cache.directory, jit=True).get_or_compile(make_source("two"))


def test_a_kernel_missing_while_compiling_is_off_is_named(
    cache: Cache, compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWBIT_NO_JIT", "1")
    source = make_source(arch="sm_90a")
    with pytest.raises(MissingKernel) as caught:
        Cache(cache.directory).get_or_compile(source, compiler)
    for part in ("int4_g128 stream", "sm_90a", source.key[:32], str(cache.directory), "warmup --freeze"):
        assert part in str(caught.value)
    assert compiler.count == 0
    assert not cache.directory.exists()


@pytest.mark.parametrize(("value", "jit"), [("", True), ("0", True), ("1", False), ("yes", False)])
def test_no_jit_setting(monkeypatch: pytest.MonkeyPatch, value: str, jit: bool) -> None:
    monkeypatch.setenv("LOWBIT_NO_JIT", value)
    assert Cache().jit is jit


def test_the_choice_among_frozen_compilers_is_always_the_same(cache: Cache, compiler: FakeCompiler) -> None:
    for name in ("zeta 1.0", "alpha 2.0", "alpha 1.0"):
        cache.get_or_compile(make_source(), replace(compiler, name=name))
    found = cache.get(make_source())
    assert isinstance(found, Compiled)
    assert found.compiler == "alpha 1.0"


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_kernel_that_does_not_compile_is_kept_with_its_log_and_not_cached(
    cache: Cache, compiler: FakeCompiler
) -> None:
    refusing = replace(compiler, refuse=True, log='k.cu(7): error: identifier "y" is undefined')
    for _ in range(2):
        with pytest.raises(CompileError) as caught:
            cache.get_or_compile(make_source("bad text"), refusing)
    kept = cache.directory / "failed" / f"{make_source('bad text').key}.cu"
    assert kept.read_text() == "bad text"
    assert kept.with_suffix(".log").read_text() == refusing.log
    assert str(kept) in str(caught.value)
    assert refusing.count == 2
    assert cache.get(make_source("bad text")) is None


def test_a_command_of_another_version_is_another_compiler(
    cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("a", "1.0"), ("b", "1.1")):
        command = write_compiler_command(tmp_path / name, version)
        monkeypatch.setenv("LOWBIT_COMPILER", str(command))
        assert cache.get_or_compile(make_source()).compiler == f"{name} {version}"
        assert cache.get_or_compile(make_source()).compiler == f"{name} {version}"
        assert count_compiles(command) == 1
    assert len(entries(cache)) == 2

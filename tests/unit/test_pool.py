"""Kernels compiled by worker processes, with a shell script for a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from jit_fakes import count_compiles, make_source, write_compiler_command

from lowbit.errors import BadInput, CompileError, MissingKernel, Unsupported
from lowbit.jit import pool
from lowbit.jit.cache import Cache
from lowbit.jit.pool import compile_many


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_compiler_command(tmp_path / "cc")
    monkeypatch.setenv("LOWBIT_COMPILER", str(path))
    monkeypatch.delenv("LOWBIT_WORKERS", raising=False)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(worker: object, source: object) -> None:
        raise RuntimeError("a worker process was asked for")

    monkeypatch.setattr(pool._Worker, "compile", refuse)


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order_and_equal_sources_compile_once(command: Path, cache: Cache, workers: int) -> None:
    texts = ["one", "two", "three", "one", "four"]
    sources = [make_source(text, label=f"kernel {i}") for i, text in enumerate(texts)]
    compiled = compile_many(sources, workers=workers, cache=cache)
    assert [result.cubin.decode() for result in compiled] == texts
    assert [result.source for result in compiled] == sources
    assert {result.registers for result in compiled} == {40}
    assert count_compiles(command) == 4
    assert all(cache.get(source) for source in sources)


def test_a_warm_cache_needs_no_process(command: Path, cache: Cache, no_processes: None) -> None:
    sources = [make_source(str(i)) for i in range(4)]
    for source in sources:
        cache.get_or_compile(source)
    assert [c.cubin for c in compile_many(sources, workers=4, cache=cache)] == [b"0", b"1", b"2", b"3"]
    assert count_compiles(command) == 4


def test_one_missing_kernel_is_compiled_here(command: Path, cache: Cache, no_processes: None) -> None:
    assert compile_many([make_source()], workers=4, cache=cache)[0].cubin == b"one"
    assert compile_many([], workers=4, cache=cache) == []


def test_progress_counts_hits_and_compiles_in_this_thread(command: Path, cache: Cache) -> None:
    cache.get_or_compile(make_source("one"))
    seen: list[tuple[int, int, str]] = []
    sources = [make_source(text, label=text) for text in ("two", "one", "three")]
    compile_many(sources, workers=2, progress=lambda *arguments: seen.append(arguments), cache=cache)
    assert [(done, total) for done, total, _ in seen] == [(1, 3), (2, 3), (3, 3)]
    assert seen[0][2] == "one"
    assert sorted(label for *_, label in seen) == ["one", "three", "two"]


@pytest.mark.parametrize("workers", [1, 2])
def test_all_kernels_are_tried_before_the_errors_are_raised(command: Path, cache: Cache, workers: int) -> None:
    texts = ["refuse a", "good", "refuse b", "fine"]
    sources = [make_source(text, label=f"label {text}") for text in texts]
    with pytest.raises(CompileError) as caught:
        compile_many(sources, workers=workers, cache=cache)
    message = str(caught.value)
    assert message.startswith("2 of 4 kernels failed:\n")
    assert "label refuse a for sm_80" in message
    assert "label refuse b for sm_80" in message
    assert "good" not in message
    assert [cache.get(source) is not None for source in sources] == [False, True, False, True]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_single_error_is_raised_as_it_is(command: Path, cache: Cache, workers: int) -> None:
    with pytest.raises(CompileError, match=r"^int4_g128 stream for sm_80 did not compile"):
        compile_many([make_source("refuse"), make_source("a"), make_source("b")], workers=workers, cache=cache)


def test_a_worker_that_dies_costs_one_kernel(command: Path, cache: Cache) -> None:
    texts = ["crash", "one", "two", "three", "four"]
    with pytest.raises(CompileError, match=r"^int4_g128 stream for sm_80: .* died with status -9.*LOWBIT_WORKERS"):
        compile_many([make_source(text) for text in texts], workers=2, cache=cache)
    assert [cache.get(make_source(text)) is not None for text in texts] == [False, True, True, True, True]


def test_what_a_compiler_prints_does_not_disturb_the_pipe(command: Path, cache: Cache) -> None:
    write_compiler_command(command, extra="echo noise > /proc/$PPID/fd/1")
    compiled = compile_many([make_source("one"), make_source("two")], workers=2, cache=cache)
    assert [result.cubin for result in compiled] == [b"one", b"two"]


def test_workers_share_the_callers_private_folder(
    command: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    (temporary / f"lowbit-{os.geteuid()}").write_text("in the way, so that every process would make its own")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    cache = Cache(command / "cache")  # below a file: cannot be made
    sources = [make_source(text) for text in ("one", "two", "three")]
    compile_many(sources, workers=2, cache=cache)
    assert all(cache.get(source) for source in sources)
    assert [path for path in temporary.iterdir() if path.is_dir()] == [cache.writable]


def test_missing_kernels_are_all_named_when_compiling_is_off(command: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingKernel) as caught:
        compile_many([make_source(t, label=t) for t in ("one", "two")], workers=2, cache=Cache(tmp_path, jit=False))
    assert "one for sm_80" in str(caught.value)
    assert "two for sm_80" in str(caught.value)
    assert count_compiles(command) == 0


def test_without_a_compiler_only_missing_kernels_fail(
    command: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cache.get_or_compile(make_source("one"))
    monkeypatch.setenv("LOWBIT_COMPILER", "/no/such/compiler")
    assert compile_many([make_source("one")], workers=2, cache=cache) == [made]
    with pytest.raises(Unsupported, match="/no/such/compiler"):
        compile_many([make_source("one"), make_source("two"), make_source("three")], workers=2, cache=cache)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.005)


def test_an_interrupted_caller_leaves_no_process(command: Path, cache: Cache, tmp_path: Path) -> None:
    pids = tmp_path / "pids"  # of a worker and of the compiler it runs
    write_compiler_command(command, extra=f'if grep -q slow "$1"; then echo $PPID $$ > {pids}; exec sleep 60; fi')

    def interrupt(done: int, total: int, label: str) -> None:
        wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        assert all(map(is_running, map(int, pids.read_text().split())))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_many([make_source("slow"), make_source("quick")], workers=2, progress=interrupt, cache=cache)
    worker, compiler = map(int, pids.read_text().split())
    assert not is_running(worker)
    wait_for(lambda: not is_running(compiler))


def test_workers_do_not_import_torch_or_the_callers_program(command: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # No `if __name__ == "__main__"`: scripts that have none must not be run again by their workers.
    program.write_text(f"""
import sys
sys.path[:] = {sys.path!r}
print("the program ran")
from pathlib import Path
from jit_fakes import make_source
from lowbit.jit import pool
from lowbit.jit.cache import Cache
pool._BOOT += "; print(sorted({{'torch', 'numpy'}} & set(sys.modules)), file=sys.stderr)"
compile_many = pool.compile_many
pool._Worker.stop = lambda worker: (worker._process.stdin.close(), worker._process.wait())
print(len(compile_many([make_source("one"), make_source("two")], workers=2, cache=Cache(Path({str(tmp_path)!r})))))
""")
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert run.stdout == "the program ran\n2\n"
    assert run.stderr == "[]\n[]\n"


@pytest.mark.parametrize(("text", "limit"), [("3", 3), (" 12 ", 12)])
def test_the_number_of_workers_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, text: str, limit: int
) -> None:
    monkeypatch.setenv("LOWBIT_WORKERS", text)
    assert pool._worker_limit(None) == limit
    assert pool._worker_limit(2) == 2


def test_the_default_number_of_workers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWBIT_WORKERS", raising=False)
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda pid: set(range(128)))
    assert pool._worker_limit(None) == 8
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda pid: {5})
    assert pool._worker_limit(None) == 1


@pytest.mark.parametrize(("argument", "text"), [(0, ""), (-1, ""), (None, "0"), (None, "many"), (None, "-2")])
def test_a_bad_number_of_workers_is_refused(monkeypatch: pytest.MonkeyPatch, argument: int | None, text: str) -> None:
    monkeypatch.setenv("LOWBIT_WORKERS", text)
    with pytest.raises(BadInput, match="at least 1"):
        compile_many([], workers=argument)

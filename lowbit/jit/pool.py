"""Many kernels compiled at once by worker processes that import neither torch nor the caller's program.

It must not know what the kernels are for. Workers are plain child processes speaking pickles over their own pipes:
`multiprocessing` would run the caller's main module again, and daemonic processes may not use it at all.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue

from lowbit.errors import BadInput, CompileError, MissingKernel, Unsupported
from lowbit.jit.cache import Cache
from lowbit.jit.compile import Compiled, Compiler, compiler_for
from lowbit.jit.source import Source

Progress = Callable[[int, int, str], None]
"""Called in the caller's thread with (kernels finished, kernels in all, label of the one just finished)."""

_Failure = CompileError | MissingKernel
_Outcome = tuple[Source, Compiled | _Failure]

_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from lowbit.jit.pool import serve; serve()"
_MAX_DEFAULT_WORKERS = 8  # each holds a compiler of some 200 MB; a layer has about six kernels


def compile_many(
    sources: Sequence[Source],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    cache: Cache | None = None,
) -> list[Compiled]:
    """Compile `sources`, or find them in `cache` (default: `Cache()`), and return the results in the same order.

    `workers` is the number of processes; by default LOWBIT_WORKERS, else the number of CPUs, kernels to compile or 8,
    whichever is least. One worker means this process. Equal sources are compiled once.
    All kernels are tried; then the errors are raised as one CompileError (MissingKernel, if compiling is switched off).
    Raises Unsupported if kernels are missing and there is no compiler, BadInput for a bad number of workers.
    """
    limit = _worker_limit(workers)
    cache = cache or Cache()
    unique = {source.key: source for source in sources}
    results: dict[str, Compiled] = {}
    failures: list[_Failure] = []
    for source, outcome in _outcomes(list(unique.values()), limit, cache):
        if isinstance(outcome, Compiled):
            results[source.key] = outcome
        else:
            failures.append(outcome)
        if progress:
            progress(len(results) + len(failures), len(unique), source.label)
    if failures:
        raise _joined(failures, len(unique))
    return [replace(results[source.key], source=source) for source in sources]


def serve() -> None:
    """The worker: compile what standard input asks for until it ends, which is also when the parent died."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a compiler prints must not end up among the replies
    while True:
        try:
            cache, source = pickle.load(requests)
        except EOFError:
            return
        outcome: Compiled | str
        try:
            outcome = cache.get_or_compile(source)
        except CompileError as error:
            outcome = str(error)
        except Exception:  # a fault of this library: report it with its place, and go on with the next kernel
            outcome = f"{source.label} for {source.arch}: {traceback.format_exc()}"
        pickle.dump(outcome, replies)
        replies.flush()


class _Worker:
    """One child process, started when first needed and again after it died."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, source: Source) -> Compiled:
        if self._process is None:
            command = [sys.executable, "-I", "-c", _BOOT, *sys.path]
            # In a session of its own: Ctrl-C is for the caller, who then ends the worker with whatever it has started.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        requests, replies = self._process.stdin, self._process.stdout
        try:
            if requests is None or replies is None:
                raise EOFError
            pickle.dump((self._cache, source), requests)
            requests.flush()
            outcome = pickle.load(replies)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            status = self.stop()
            raise CompileError(
                f"{source.label} for {source.arch}: the compiling process died with status {status}; "
                "if memory was short, set LOWBIT_WORKERS lower"
            ) from error
        if isinstance(outcome, Compiled):
            return outcome
        raise CompileError(outcome)

    def stop(self) -> int | None:
        """End the process, if there is one, and return its status (negative: the signal it died of)."""
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not yet sent has no reader any more
                    pipe.close()
        return process.wait()


def _outcomes(sources: Sequence[Source], limit: int, cache: Cache) -> Iterator[_Outcome]:
    """Every source with its result, as they come: cached ones first, at no cost of a process."""
    chips = {(source.arch, source.target) for source in sources}
    compilers = {chip: _compiler(*chip) if cache.jit else None for chip in chips}
    pending = []
    for source in sources:
        if found := cache.get(source, compilers[source.arch, source.target]):
            yield source, found
        else:
            pending.append(source)
    workers = min(limit, len(pending))
    if workers > 1 and all(compilers[source.arch, source.target] for source in pending) and sys.executable:
        yield from _in_workers(pending, workers, cache)
        return
    for source in pending:
        yield source, _attempt(cache.get_or_compile, source, compilers[source.arch, source.target])


def _compiler(arch: str, target: str) -> Compiler | None:
    try:
        return compiler_for(arch, target)
    except Unsupported:
        return None


def _in_workers(sources: Sequence[Source], workers: int, cache: Cache) -> Iterator[_Outcome]:
    _ = cache.writable  # settled here, so that all workers share what may be a private folder
    team = [_Worker(cache) for _ in range(workers)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in team:
        idle.put(worker)

    def compile_in_worker(source: Source) -> Compiled:
        worker = idle.get()
        try:
            return worker.compile(source)
        finally:
            idle.put(worker)

    executor = ThreadPoolExecutor(workers, thread_name_prefix="lowbit-compile")
    try:
        futures: dict[Future[Compiled], Source] = {executor.submit(compile_in_worker, s): s for s in sources}
        for future in as_completed(futures):
            yield futures[future], _attempt(future.result)
    finally:
        # Leaving early: no new work, end what runs, wait for the threads, end what one of them may still have started.
        executor.shutdown(wait=False, cancel_futures=True)
        for worker in team:
            worker.stop()
        executor.shutdown()
        for worker in team:
            worker.stop()


def _attempt(action: Callable[..., Compiled], *arguments: object) -> Compiled | _Failure:
    try:
        return action(*arguments)
    except (CompileError, MissingKernel) as error:
        return error


def _joined(failures: Sequence[_Failure], total: int) -> _Failure:
    if len(failures) == 1:
        return failures[0]
    kind = MissingKernel if all(isinstance(failure, MissingKernel) for failure in failures) else CompileError
    return kind("\n".join([f"{len(failures)} of {total} kernels failed:", *map(str, failures)]))


def _worker_limit(workers: int | None) -> int:
    if workers is None:
        text = os.environ.get("LOWBIT_WORKERS", "").strip()
        if not text:
            return min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_WORKERS)
        if not text.isdecimal():
            raise BadInput(f"LOWBIT_WORKERS must be a number of processes, at least 1, not {text!r}")
        workers = int(text)
    if workers < 1:
        raise BadInput(f"the number of worker processes must be at least 1, not {workers}")
    return workers

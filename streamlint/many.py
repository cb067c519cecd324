"""Judges many traces: here, in worker processes, or on a cluster (`cluster`).

What comes back of a trace is its outcome: a report, or the error that says why there
is none. A worker that dies takes one trace with it, which is judged again when
nothing else runs; a trace that ends a second worker is an error, the others go on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeAlias

import polars as pl

from streamlint.engine import Report
from streamlint.errors import StreamlintError
from streamlint.files import out_of_space, unwritable
from streamlint.machine import cpus, free_memory
from streamlint.sources import Source, opened
from streamlint.trace.convert import REPORT_SUFFIXES
from streamlint.trace.model import Trace

Judge: TypeAlias = Callable[[Trace], Report]
"""Judges one trace; must pickle."""
Outcome: TypeAlias = Report | StreamlintError

_MIB = 1 << 20
_BASE_BYTES = 150 * _MIB
_BYTES_PER_BYTE = ((16 * _MIB, 18), (None, 13))
"""Memory of a lint for each byte of the export: of the first ones, of the rest.

Generated traces of 17, 52 and 180 MB peak at 0.40, 0.80 and 2.2 GB.
"""
_EXPORT_GROWTH = 8
"""How much larger than its report or parquet files a SQLite export is, at most."""
_UNKNOWN_BYTES = 64 * _MIB
_MEMORY_SHARE = 0.8
_BYTES_A_SECOND = 6 * _MIB
_SECONDS_A_TRACE = 0.08
_POOL_FROM_S = 2.0
"""Work that a pool is worth: starting one takes about a second."""
_GRACE_S = 5.0


def outcome_of(judge: Judge, source: Source) -> Outcome:
    """Judge one trace; whatever goes wrong comes back as an error."""
    name = source.path.name
    try:
        with opened(source) as trace:
            report = judge(trace)
    except StreamlintError as error:
        return error
    # A bug outside the rules, or a panic of polars, which is a BaseException.
    except (Exception, pl.exceptions.PanicException) as error:
        if isinstance(error, Exception) and out_of_space(error):
            return unwritable("a temporary file", error)
        return StreamlintError(
            f"{name} could not be judged: {type(error).__name__} in streamlint, a bug",
            hint="lint it alone, and report what that prints",
        )
    return report._replace(path=source.path, url=source.url)


def workers_for(sources: Sequence[Source], jobs: int | None) -> int:
    """How many processes to judge these in; 0 for this one.

    Without ``jobs``, what the CPUs and the free memory allow, and none for so little
    work that they would not pay.
    """
    if len(sources) < 2:
        return 0
    if jobs is None:
        sizes = [_bytes(source) for source in sources]
        seconds = len(sizes) * _SECONDS_A_TRACE + sum(sizes) / _BYTES_A_SECOND
        if seconds < _POOL_FROM_S:
            return 0
    least = min(map(memory_need, sources))
    free = free_memory()
    fitting = len(sources) if free is None else int(_MEMORY_SHARE * free // least)
    return min(jobs or cpus(), max(1, fitting), len(sources))


def memory_need(source: Source) -> int:
    """Bytes that linting ``source`` takes at its peak, rather too many than too few."""
    left, need = _bytes(source), _BASE_BYTES
    for span, factor in _BYTES_PER_BYTE:
        part = left if span is None else min(left, span)
        need += part * factor
        left -= part
    return need


def judged_here(
    judge: Judge, sources: Sequence[Source]
) -> Generator[tuple[int, Outcome], None, None]:
    """Outcomes, judged one after the other in this process."""
    for index, source in enumerate(sources):
        yield index, outcome_of(judge, source)


def judged_by_processes(
    judge: Judge, sources: Sequence[Source], count: int
) -> Generator[tuple[int, Outcome], None, None]:
    """Outcomes in the order in which ``count`` processes come by them.

    No more run at a time than fit into the free memory. Ends its processes however
    it ends itself.
    """
    pool = _Pool(judge, count)
    waiting, again = deque(range(len(sources))), deque[int]()
    deaths = Counter[int]()
    needs = [memory_need(source) for source in sources]
    free = free_memory()
    budget = None if free is None else int(_MEMORY_SHARE * free)
    try:
        while waiting or again or pool.busy:
            while waiting and pool.has_room:
                used = sum(needs[worker.index] for worker in pool.busy)
                left = None if budget is None else budget - used
                index = _fitting(waiting, needs, left)
                if index is None and pool.busy:
                    break
                index = waiting[0] if index is None else index  # never fits better
                waiting.remove(index)
                pool.give(index, sources[index])
            if not waiting and not pool.busy and again:
                index = again.popleft()
                pool.give(index, sources[index])
            for worker, outcome in pool.finished():
                index = worker.index
                if outcome is not None:
                    yield index, outcome
                elif deaths[index]:
                    yield index, killed(sources[index], worker.exitcode)
                else:
                    deaths[index] += 1
                    again.append(index)
            if not waiting:
                pool.dismiss()
    finally:
        pool.end()


def killed(source: Source, exitcode: int | None) -> StreamlintError:
    """The error of a trace that has ended two workers."""
    how, hint = "", "report this as a bug, with what `streamlint info` says of it"
    if exitcode is not None and exitcode < 0:
        with suppress(ValueError):
            how = f" ({signal.Signals(-exitcode).name})"
    if exitcode is None or exitcode == -signal.SIGKILL:
        hint = "most often memory ran out: judge it alone on a machine with more"
    return StreamlintError(
        f"{source.path.name} crashed: it ended its worker twice{how}", hint=hint
    )


def _fitting(
    waiting: deque[int], needs: Sequence[int], budget: int | None
) -> int | None:
    """The first trace whose need is within the budget."""
    if budget is None:
        return waiting[0]
    return next((index for index in waiting if needs[index] <= budget), None)


def _bytes(source: Source) -> int:
    size = source.size
    if size is None:
        return _UNKNOWN_BYTES if source.is_url else 0
    packed = source.path.suffix.lower() in REPORT_SUFFIXES
    grows = packed or Path(source.named).is_dir()  # parquet is compressed too
    return size * _EXPORT_GROWTH if grows else size


class _Worker:
    """A process that judges the traces it is told, one at a time."""

    def __init__(self, judge: Judge) -> None:
        context = multiprocessing.get_context("spawn")  # polars can't be forked
        self.pipe, theirs = context.Pipe()
        self.index = -1
        self._process = context.Process(
            target=_serve, args=(theirs, judge), daemon=True
        )
        with _deaf_to_interrupts():
            self._process.start()
        theirs.close()

    @property
    def exitcode(self) -> int | None:
        """How the process ended; negative for a signal."""
        self._process.join(_GRACE_S)
        return self._process.exitcode

    def stop(self) -> None:
        """Let an idle process end by itself."""
        self.pipe.close()
        self._process.join(_GRACE_S)
        self.kill()

    def terminate(self) -> None:
        """Ask a process to give up what it does."""
        self.pipe.close()
        self._process.terminate()

    def kill(self) -> None:
        """Make sure that the process is gone."""
        self._process.join(_GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


class _Pool:
    """Up to ``count`` workers, started when there is work for them."""

    def __init__(self, judge: Judge, count: int) -> None:
        self._judge = judge
        self._count = count
        self._idle: list[_Worker] = []
        self.busy: list[_Worker] = []

    @property
    def has_room(self) -> bool:
        return len(self.busy) < self._count

    def give(self, index: int, source: Source) -> None:
        if not self._idle:
            with _threads(max(1, cpus() // self._count)):
                self._idle.append(_Worker(self._judge))
        worker = self._idle.pop()
        worker.index = index
        self.busy.append(worker)
        with suppress(OSError):  # it has died: its pipe says so as well
            worker.pipe.send(source)

    def finished(self) -> list[tuple[_Worker, Outcome | None]]:
        """Wait for workers that have an outcome, or None: that died."""
        pipes = {worker.pipe: worker for worker in self.busy}
        done: list[tuple[_Worker, Outcome | None]] = []
        for pipe in wait(list(pipes)):
            assert isinstance(pipe, Connection)
            worker = pipes[pipe]
            self.busy.remove(worker)
            try:
                done.append((worker, pipe.recv()))
                self._idle.append(worker)
            except (EOFError, OSError):
                pipe.close()
                done.append((worker, None))
        return done

    def dismiss(self) -> None:
        """End the workers that have nothing to do."""
        while self._idle:
            self._idle.pop().stop()

    def end(self) -> None:
        """End all workers at once."""
        workers = [*self._idle, *self.busy]
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.kill()


def _serve(pipe: Connection, judge: Judge) -> None:
    """What a worker process does until its pipe closes."""
    # The terminal sends Ctrl-C to all processes; ours are ended by the first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with suppress(EOFError, OSError):
        while True:
            pipe.send(outcome_of(judge, pipe.recv()))


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes started meanwhile ignore Ctrl-C from their first instruction."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Processes started meanwhile compute on so many threads."""
    wanted = {"POLARS_MAX_THREADS": str(count), "OPENBLAS_NUM_THREADS": str(count)}
    ours = {name: text for name, text in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]

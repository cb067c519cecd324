"""Judges many traces on a Dask cluster.

Dask places the work and gives that of a lost worker to another. It blames a lost
worker on everything that the worker had been given, though, and how often it tries
again is a setting of the scheduler. So each trace leaves a mark with the scheduler
while it is judged: one that finds its own mark was being judged on a worker that died,
and is left to the end, when it is tried once more with nothing else running.
"""

from __future__ import annotations

import logging
import pickle
import queue
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from streamlint import __version__
from streamlint.errors import StreamlintError, TraceError, UsageError
from streamlint.many import Judge, Outcome, killed, outcome_of
from streamlint.sources import Source, without_credentials

if TYPE_CHECKING:
    from distributed import Client, Future

Answer: TypeAlias = tuple[str, bytes | None]
"""A worker's streamlint version and, if that is ours, the pickled outcome.

No outcome: the trace was being judged on a worker that died.
"""

_CONNECT_S = 10
_WAIT_S = 5.0
_NO_WORKER_S = 60.0
"""A worker that comes later, such as one that a batch system starts, has so long."""


def judged_by_cluster(
    judge: Judge, sources: Sequence[Source], address: str
) -> Generator[tuple[int, Outcome], None, None]:
    """Outcomes in the order in which the cluster at ``address`` comes by them.

    Raises `UsageError` where there is no such cluster or its workers have another
    streamlint.
    """
    cluster = _Cluster(address)
    try:
        again: list[int] = []
        for index, outcome in cluster.judged(judge, dict(enumerate(sources))):
            if outcome is None:
                again.append(index)
            else:
                yield index, outcome
        for index in again:
            for _, outcome in cluster.judged(judge, {index: sources[index]}):
                yield index, outcome or killed(sources[index], None)
    finally:
        cluster.close()


def judge_remotely(
    version: str, judge: bytes, source: Source, mark: str
) -> Answer:  # runs on a worker
    """Judge one trace as part of a cluster, unless its mark is found there."""
    if version != __version__:
        return __version__, None
    from distributed import Event, get_client

    client = get_client()
    judging = Event(mark, client)

    async def found_or_left() -> bool:
        found: bool = await judging.is_set()
        await (judging.clear() if found else judging.set())
        return found

    if client.sync(found_or_left):
        return __version__, None
    outcome: Outcome
    if source.is_url or Path(source.named).exists():
        try:
            outcome = outcome_of(pickle.loads(judge), source)
        except StreamlintError as error:  # a rule that this machine lacks
            outcome = error
    else:
        outcome = TraceError(
            f"{source.named} does not exist where a worker looked for it",
            hint="name files in a folder that all workers share, or URLs",
        )
    if client.loop is not None:  # always there on a worker
        client.loop.add_callback(judging.clear)  # nobody waits for it
    return __version__, pickle.dumps(outcome)


class _Cluster:
    """A connection to a scheduler."""

    def __init__(self, address: str) -> None:
        self._shown = without_credentials(address)
        self._client = self._connected(address)

    def close(self) -> None:
        """Give up whatever has not been judged."""
        self._client.close()

    def _connected(self, address: str) -> Client:
        try:
            from distributed import Client
        except ImportError as error:
            raise UsageError(
                "--scheduler needs Dask, which is not installed",
                hint="pip install 'streamlint[distributed]'",
            ) from error
        # What it would say comes back as errors of traces. Each logger has its level.
        for name in list(logging.root.manager.loggerDict):
            if name.partition(".")[0] == "distributed":
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        try:
            return Client(address, timeout=_CONNECT_S, set_as_default=False)
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"no Dask scheduler answers at {self._shown}",
                hint="start one with `dask scheduler`, and name the address it prints",
            ) from error

    def judged(
        self, judge: Judge, sources: dict[int, Source]
    ) -> Iterator[tuple[int, Outcome | None]]:
        """Outcomes by index; None for what was judged on a worker that died."""
        run, packed = secrets.token_hex(4), pickle.dumps(judge)
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        futures: dict[int, Future[Answer]] = {}
        for index, source in sources.items():
            absolute = source if source.is_url else _absolute(source)
            futures[index] = self._client.submit(
                judge_remotely,
                __version__,
                packed,
                absolute,
                _mark(run, index),
                key=_mark(run, index),
                pure=False,
            )
            futures[index].add_done_callback(lambda _, index=index: done.put(index))
        alone_since: float | None = None
        while futures:
            try:
                index = done.get(timeout=_WAIT_S)
            except queue.Empty:
                now = time.monotonic()
                alone_since = None if self._has_workers() else alone_since or now
                if alone_since is None or now - alone_since < _NO_WORKER_S:
                    continue
                break
            try:
                outcome = self._outcome(futures[index], sources[index])
            except CancelledError:  # the connection is lost
                break
            del futures[index]
            if outcome is None:
                self._unmark(_mark(run, index))
            yield index, outcome
        for index in futures:
            yield index, self._deserted(sources[index])

    def _has_workers(self) -> bool:
        try:
            return bool(self._client.nthreads())
        except (OSError, TimeoutError):
            return False

    def _unmark(self, mark: str) -> None:
        from distributed import Event

        with suppress(OSError, TimeoutError):
            Event(mark, client=self._client).clear()

    def _deserted(self, source: Source) -> StreamlintError:
        return StreamlintError(
            f"{source.path.name} was not judged: nobody is left at {self._shown}",
            hint="see the logs of the Dask scheduler and its workers",
        )

    def _outcome(self, future: Future[Answer], source: Source) -> Outcome | None:
        from distributed import KilledWorker

        try:
            version, packed = future.result()
        except KilledWorker:
            return None
        except ImportError as error:
            raise self._other("none") from error
        if version != __version__:
            raise self._other(version)
        if packed is None:
            return None
        outcome: Outcome = pickle.loads(packed)
        if isinstance(outcome, StreamlintError) or source.is_url:
            return outcome
        return outcome._replace(path=source.path)

    def _other(self, version: str) -> UsageError:
        return UsageError(
            f"a worker at {self._shown} has another streamlint ({version}) than this "
            f"({__version__})",
            hint=f"install streamlint {__version__} where the workers run",
        )


def _mark(run: str, index: int) -> str:
    return f"streamlint-{run}-{index}"


def _absolute(source: Source) -> Source:
    return source._replace(named=str(Path(source.named).absolute()))

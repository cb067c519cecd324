"""Builds the dependency graph of a trace: what waited for what, and how long after.

Nodes are host calls and GPU operations. A constraint says that a node can't start
(or a call can't return) before the first ``count`` members of a group are done: the
operations of a stream, of a copy engine, of a process, and so on, in issue or
service order. One form covers stream order, barriers, events, waits and engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache, cached_property
from itertools import compress, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import polars as pl
from numpy.typing import NDArray

from streamlint.arrays import as_series, ascending, numbered, stable_order
from streamlint.changes import Change
from streamlint.intervals import Bools, Int64
from streamlint.replay.schedule import NEVER, OPERATION
from streamlint.steady import column, distinct, groups, in_time
from streamlint.trace.calls import HOST_WAITS
from streamlint.trace.lookup import first_rows
from streamlint.trace.model import Trace
from streamlint.trace.part import MARGIN_NS

HANDOVER_NS = 10_000
"""What an operation starts later than its last constraint still belongs to it."""
RETURN_NS = 1_000_000
"""The same for calls: the host part after a copy takes up to a millisecond."""
WAIT_BASE_NS = 2_500
"""A wait with nothing to wait for (measured 0.4 to 3.8 us, H200)."""
STAGED_BYTES = 2 << 20
"""Pageable HtoD copies up to this size return once staged; 4 MiB wait (H200)."""
HANDOFF_NS = 50_000
"""A thread silent for this long may have been waiting for another one."""
HANDOFF_SHARE = 0.25
"""It was, if the other's last call ended within this part of the silence."""


BARRIER_NS = 1_300
"""From the end of a NULL-stream barrier to the next start (probes, H200)."""
EVENT_NS = 2_000
"""From a recorded event to the start of the operation that waits for it."""
QUEUE_NS = 1_000
"""From the start of a queue's operation to the next one (probes, H200)."""
KERNEL_GAP_NS = 0
"""Kernels of different streams follow each other without a gap of their own."""
DEFAULT_GAP_NS = 1_000
"""Between queued operations, where the trace shows none."""
RETURN_DEFAULT_NS = 3_000
"""From the end of the work to the return of the wait."""
MIN_SAMPLES = 3
"""Fewer gaps of a kind say nothing about it."""

_COPIES = ("HtoD", "DtoH")
_PLACE = (
    *("pid", "gpu_id", "device_id", "context_id", "stream_id", "stream_kind"),
    *("engine", "kind"),
)
_NONE = np.empty(0, dtype=np.int64)
_NO_ROWS = np.empty(0, dtype=np.int32)

Indexes: TypeAlias = NDArray[np.int32]
Kinds: TypeAlias = NDArray[np.int8]


class Edge(IntEnum):
    """Why a constraint exists."""

    STREAM = 0
    BARRIER = 1
    EVENT = 2
    ENGINE = 3
    QUEUE = 4
    WAIT = 5
    COPY = 6
    FREE = 7


_OF_CALLS = (Edge.WAIT, Edge.COPY, Edge.FREE)
_REPEATING = (Edge.EVENT, Edge.WAIT)
"""A group may hold one node several times: after several waits before it, or rows."""


@dataclass(eq=False, repr=False)
class Graph:
    """Arrays only; see the module docstring. Times in ns.

    Operations are the rows of `Trace.gpu_ops` followed by one entry a NULL-stream
    event record; calls are ``calls``. ``op_constraints`` and ``call_constraints``
    index the constraint arrays (``group``, ``count``, ``kind``, ``node``).

    What no constraint ties together, such as processes on GPUs of their own, are
    parts: ``part`` has the number of each operation's and then each call's, and
    ``event_bounds`` where the events of each part begin and the last ones end.
    """

    ops: pl.DataFrame
    calls: pl.DataFrame
    op_start: Int64
    op_duration: Int64
    op_delay: Int64
    issue_call: Indexes
    issue_latency: Int64
    fixed_start: Int64
    call_first: Int64
    call_end: Int64
    call_duration: Int64
    call_delay: Int64
    previous_call: Indexes
    think_ns: Int64
    handover_call: Indexes
    handover_ns: Int64
    op_constraints: Indexes
    call_constraints: Indexes
    node: Indexes
    kind: Kinds
    group: Indexes
    count: Indexes
    latency: Int64
    plain_latency: Int64
    plain_issue_latency: Int64
    active: Bools
    group_offset: Int64
    group_by_start: Bools
    member: Indexes
    part: Indexes
    event_kind: Kinds
    event_index: Indexes
    event_bounds: Int64

    def nodes_of(self, change: Change) -> Int64:
        """What a change is about: operations, or calls + number of operations."""
        first_call = len(self.op_start)
        return np.concatenate(
            [
                self.node[change.drop],
                self.node[change.latency[0]],
                change.op_duration[0],
                change.issue_latency[0],
                change.call_duration[0] + first_call,
                change.think[0] + first_call,
            ]
        )


def build(trace: Trace) -> Graph:
    """The graph of the whole trace; every process, thread and device."""
    calls = _calls(trace)
    ops = _with_records(trace)
    return _Builder(trace, ops, calls).graph()


def _calls(trace: Trace) -> pl.DataFrame:
    """Outermost calls in the order of their starts, with their index."""
    there = _around_time(trace) & ~pl.col("nested") & (pl.col("kind") != "noise")
    calls = (
        trace.runtime_calls.lazy()
        .filter(there)
        .select("pid", "tid", "start_ns", "end_ns", "correlation_id", "kind")
        .collect()
    )
    later = np.diff(column(calls, "start_ns"))
    longer = np.diff(column(calls, "end_ns")) >= 0
    if not ((later > 0) | ((later == 0) & longer)).all():
        calls = calls.sort("start_ns", "end_ns", maintain_order=True)
    return calls.with_columns(pl.int_range(pl.len()).alias("call_index"))


def _around_time(trace: Trace) -> pl.Expr:
    """Calls near the times of the scope, from the launch of what starts in them on.

    Others aren't replayed, and what they launched starts when it did: where a part of a
    trace is read not all of them are known, and the threads that made them would seem
    to think instead, or to wait for nothing.
    """
    near = pl.lit(value=True)
    if trace.settings.scope.time is None:
        return near
    start, end = trace.settings.scope.time
    if start is not None:
        issued = pl.col("issue_ns").filter(in_time(trace)).min()
        first = trace.gpu_ops.select(issued).item()
        since = start - MARGIN_NS
        since = since if first is None else min(since, first)
        near &= pl.col("end_ns") >= since
    return near if end is None else near & (pl.col("start_ns") < end + MARGIN_NS)


def _with_records(trace: Trace) -> pl.DataFrame:
    """Operations, then the event records on NULL streams: barriers without work."""
    filled = pl.col("device_id", "context_id").fill_null(-1)
    ops = trace.gpu_ops.select(
        *("pid", "gpu_id", "stream_id", "stream_kind", "correlation_id"),
        *("graph_node_id", "start_ns", "end_ns", "kind", "engine", "size_bytes"),
        *("sm_fraction", "issue_ns"),
        filled,
        pl.coalesce(_issued_at(trace), "start_ns").alias("order_ns"),
    )
    marks = (
        trace.event_records.join(
            trace.streams.filter(pl.col("kind") == "null"),
            on=["pid", "stream_id"],
            how="semi",
        )
        .drop_nulls("start_ns")
        .select(
            *("pid", "stream_id", "correlation_id", "start_ns"),
            filled,
            pl.col("start_ns").alias("end_ns"),
            pl.col("start_ns").alias("issue_ns"),
            pl.col("start_ns").alias("order_ns"),
            pl.lit("null", pl.Categorical).alias("stream_kind"),
            pl.lit("record", pl.Categorical).alias("kind"),
            pl.lit("record", pl.Categorical).alias("engine"),
        )
    )
    return pl.concat([ops, marks], how="diagonal").with_columns(
        pl.int_range(pl.len()).alias("op")
    )


def _issued_at(trace: Trace) -> pl.Expr:
    """When each operation was queued: as its call returned, or just before it started.

    Where threads share a stream it runs their work in that order, not in that of the
    beginnings of calls (H200: launches of four threads block each other for up to
    0.7 ms). Calls that end together may be the other way: execution decides.
    """
    latest = pl.min_horizontal("issue_end_ns", "start_ns") - 1
    at = pl.max_horizontal("issue_ns", latest)
    several = trace.gpu_ops["tid"].drop_nulls().n_unique() > 1
    return at.cum_min(reverse=True).over("pid", "stream_id") if several else at


class _Members(NamedTuple):
    """A group: its number, and its operations in issue order."""

    group: int
    rows: Indexes


class _Part(NamedTuple):
    """Constraints of one kind by one group.

    ``node`` are operations, or calls + number of operations; ``wanted`` is how many of
    the group they wait for, ``usual_ns`` the usual latency.
    """

    kind: Edge
    node: Indexes
    group: int
    wanted: Indexes
    usual_ns: Int64 | int


class _Sorted(NamedTuple):
    """Constraints by node: of node n from ``first[n]`` to before ``first[n + 1]``.

    ``done`` is when the group was in the trace, `NEVER` if the node didn't wait for it.
    Latencies make no node later than it was there.
    """

    first: Indexes
    node: Indexes
    kind: Kinds
    group: Indexes
    wanted: Indexes
    done: Int64
    latency: Int64
    usual_ns: Int64
    active: Bools

    def of(self, begin: int, end: int) -> _Sorted:
        """Those of the nodes from ``begin`` to before ``end``, which count from 0.

        Views, but for the numbers of nodes.
        """
        first = self.first[begin : end + 1]
        rows = slice(first[0], first[-1])
        arrays: list[Any] = [values[rows] for values in self[2:]]
        node = self.node[rows] - begin if begin else self.node[rows]
        return _Sorted(first - first[0], node, *arrays)


class _Builder:
    """Collects groups and constraints, then fits their latencies to the trace."""

    def __init__(self, trace: Trace, ops: pl.DataFrame, calls: pl.DataFrame) -> None:
        self.trace = trace
        self.ops = ops.drop("order_ns")
        self.calls = calls
        self.start = column(ops, "start_ns").copy()
        self.end = column(ops, "end_ns").copy()
        self.order = column(ops, "order_ns")
        self.call_start = column(calls, "start_ns")
        self.call_end = column(calls, "end_ns")
        self.issued_by = _index(first_rows(calls, ops))  # outermost calls
        # Operations are few of a kind: group by that, never by the columns again.
        self.place, first = _numbered(ops, *_PLACE)
        self.places: dict[str, list[Any]] = ops.select_seq(*_PLACE)[
            as_series(first)
        ].to_dict(as_series=False)
        self.by_issue = _index(np.lexsort((self.start, self.order)))
        self.by_start = _index(np.argsort(self.start, kind="stable"))
        self.place_by_issue = self.place[self.by_issue]
        self.place_by_start = self.place[self.by_start]
        self.members: list[Indexes] = []
        self.started: list[bool] = []
        self.parts: list[_Part] = []
        self.stream: dict[tuple[object, ...], _Members] = {}

    def graph(self) -> Graph:
        """Build everything."""
        self._barriers()
        self._streams()
        self._events()
        self._engines()
        self._queues()
        self._waits()
        return self._fit()

    # Groups and constraints ---------------------------------------------------

    def _group(self, rows: Indexes, *, by_start: bool = False) -> int:
        """A group of operations in the order of ``rows``; returns its number."""
        self.members.append(rows)
        self.started.append(by_start)
        return len(self.members) - 1

    def _issue_group(self, rows: Indexes) -> _Members:
        """A group of operations in issue order."""
        return _Members(self._group(rows), rows)

    def _constrain(
        self,
        kind: Edge,
        node: Int64 | Indexes,
        group: int,
        count: Int64,
        usual_ns: Int64 | int,
    ) -> None:
        """``node`` (operation, or call + number of operations) waits for a prefix."""
        keep = count > 0
        if not keep.all():
            node, count = node[keep], count[keep]
            usual_ns = usual_ns if isinstance(usual_ns, int) else usual_ns[keep]
        if len(node):
            part = _Part(kind, _index(node), group, _index(count), usual_ns)
            self.parts.append(part)

    def _rows(
        self, *by: str, only: Bools | None = None, started: bool = False
    ) -> Iterator[tuple[tuple[object, ...], Indexes]]:
        """Operations by columns of `places`, each in issue order (or by start).

        ``only`` chooses places.
        """
        keys: dict[tuple[object, ...], int] = {}
        columns = [self.places[name] for name in by]
        numbers = np.zeros(len(columns[0]), dtype=np.int64)
        for place, key in enumerate(zip(*columns, strict=True)):
            if only is None or only[place]:
                numbers[place] = keys.setdefault(key, len(keys) + 1)
        order = self.by_start if started else self.by_issue
        number = numbers[self.place_by_start if started else self.place_by_issue]
        sorted_by_key = stable_order(number, len(keys) + 1)
        ends = np.cumsum(np.bincount(number, minlength=len(keys) + 1))
        found = [sorted_by_key[a:b] for a, b in pairwise(ends)]
        by_first = sorted(zip(keys, found, strict=True), key=lambda pair: pair[1][0])
        for one, at in by_first:
            yield one, order[at]

    def _places_with(self, name: str, *values: str) -> Bools:
        """Places that have one of these values in a column."""
        return np.array([value in values for value in self.places[name]], np.bool_)

    def _barriers(self) -> None:
        """NULL-stream work against the blocking streams of its context."""
        key = ("pid", "context_id")
        null = dict(self._rows(*key, only=self._places_with("stream_kind", "null")))
        synced = self._places_with("stream_kind", "blocking", "per-thread")
        blocking = dict(self._rows(*key, only=synced))
        is_record = self._places_with("kind", "record")[self.place]
        for context, rows in null.items():
            others = blocking.get(context, _NO_ROWS)
            # A record takes effect when all work before it is done.
            records = rows[is_record[rows]]
            for before in (others, rows[~is_record[rows]]):
                count = _before(self.order[before], self.order[records])
                done = _prefix(self.end[before], count)
                self.start[records] = np.maximum(self.start[records], done)
            self.end[records] = self.start[records]
            own, other = self._issue_group(rows), self._issue_group(others)
            count = _before(self.order[others], self.order[rows])
            self._constrain(Edge.BARRIER, rows, other.group, count, BARRIER_NS)
            count = _before(self.order[rows], self.order[others])
            self._constrain(Edge.BARRIER, others, own.group, count, BARRIER_NS)

    def _streams(self) -> None:
        """Operations of a stream run in the order of their issue."""
        engine, kinds = self._engine_codes
        code = engine[self.place]
        for key, rows in self._rows("pid", "stream_id"):
            self.stream[key] = self._issue_group(rows)
        pairs = [
            code[rows[:-1]] * kinds + code[rows[1:]] for _, rows in self.stream.values()
        ]
        usual = self._usual_gaps(pairs, kinds)
        for (group, rows), pair in zip(self.stream.values(), pairs, strict=True):
            count = np.arange(1, len(rows))
            self._constrain(Edge.STREAM, rows[1:], group, count, usual[pair])

    @cached_property
    def _engine_codes(self) -> tuple[Int64, int]:
        """A number for the engine of each place, and how many engines there are."""
        engines = self.places["engine"]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(engines))}
        return np.array([numbers[name] for name in engines], np.int64), len(numbers)

    def _usual_gaps(self, of_streams: list[Int64], kinds: int) -> Int64:
        """Median gap by pair of engines, of operations queued behind another one.

        Gaps of operations that were not queued show the host, not the GPU.
        """
        gaps, pairs = [_NONE], [_NONE]
        for (_, rows), pair in zip(self.stream.values(), of_streams, strict=True):
            ended = self.end[rows[:-1]]
            gap = self.start[rows[1:]] - ended
            queued = self.order[rows[1:]] < ended
            good = queued & (gap >= 0) & (gap <= HANDOVER_NS)
            gaps.append(gap[good])
            pairs.append(pair[good])
        gap, pair = np.concatenate(gaps), np.concatenate(pairs)
        usual = np.full(kinds * kinds, DEFAULT_GAP_NS)
        # From one engine to another takes longer than from an operation to its like.
        like = np.arange(kinds * kinds) % (kinds + 1) == 0
        for alike in (True, False):
            if len(known := gap[like[pair] == alike]):
                usual[like == alike] = int(np.median(known))
        samples = np.bincount(pair, minlength=kinds * kinds)
        for one in np.flatnonzero(samples >= MIN_SAMPLES):
            usual[one] = int(np.median(gap[pair == one]))
        return usual

    def _events(self) -> None:
        """Streams that wait for an event: the next operation waits for its record."""
        if "stream wait" not in self.trace.call_kinds:
            return
        targets = self._records_of(self.trace.event_waits)
        is_null = self._places_with("stream_kind", "null")

        @cache
        def order(pid: object, stream: object) -> Int64:
            return self.order[self.stream[pid, stream].rows]

        for row in groups(targets, "pid", "stream_id", "recorded_stream_id"):
            (pid, stream, recorded), waits = row
            waiting, source = (
                self.stream.get((pid, stream)),
                self.stream.get((pid, recorded)),
            )
            if waiting is None or source is None:
                continue
            first = _before(order(pid, stream), column(waits, "start_ns"))
            count = _before(order(pid, recorded), column(waits, "recorded_ns"))
            # A record on the NULL stream is a member of that stream itself.
            null = int(is_null[self.place[source.rows[0]]])
            count = np.minimum(count + null, len(source.rows))
            there = first < len(waiting.rows)
            node = waiting.rows[np.minimum(first, len(waiting.rows) - 1)]
            self._constrain(
                Edge.EVENT, node[there], source.group, count[there], EVENT_NS
            )

    def _records_of(self, waits: pl.DataFrame) -> pl.DataFrame:
        """Waits with the record they wait for: recorded_ns, recorded_stream_id.

        By record instance; where the export has none, the event's latest record
        before the wait.
        """
        if self._instances.height:
            return waits.join(
                self._instances,
                on=["pid", "event_sync_id"],
                how="inner",
                validate="m:1",
                maintain_order="left",
            )
        return (
            waits.drop_nulls("event_id")
            .sort("start_ns", maintain_order=True)
            .join_asof(
                self._records.drop("event_sync_id").sort(
                    "start_ns", maintain_order=True
                ),
                on="start_ns",
                by=["pid", "event_id"],
                check_sortedness=False,
            )
            .drop_nulls("recorded_ns")
        )

    @cached_property
    def _records(self) -> pl.DataFrame:
        """Event records whose call is known."""
        return self.trace.event_records.drop_nulls("start_ns").select(
            *("pid", "event_id", "event_sync_id", "start_ns"),
            pl.col("start_ns").alias("recorded_ns"),
            pl.col("stream_id").alias("recorded_stream_id"),
        )

    @cached_property
    def _instances(self) -> pl.DataFrame:
        """The records that say which of their event they are."""
        return (
            self._records.filter(pl.col("event_sync_id") > 0)
            .drop("event_id", "start_ns")
            .unique(["pid", "event_sync_id"], keep="last")
        )

    def _engines(self) -> None:
        """Copy engines serve one copy at a time; kernels share the multiprocessors."""
        gpus = self.trace.gpus
        counts = zip(gpus["gpu_id"], gpus["async_engines"], strict=True)
        single = {gpu for gpu, engines in counts if engines == 1} - {None}
        copies = self._places_with("engine", *_COPIES)
        at = zip(self.places["gpu_id"], self.places["engine"], copies, strict=True)
        self.places["lane"] = [
            "copy" if gpu in single and copying else engine
            for gpu, engine, copying in at
        ]
        place = ("gpu_id", "device_id")
        for _, rows in self._rows(*place, "lane", only=copies, started=True):
            group = self._group(rows)
            gap = self.start[rows[1:]] - self.end[rows[:-1]]
            close = gap[(gap >= 0) & (gap <= HANDOVER_NS)]
            usual = int(np.median(close)) if len(close) else DEFAULT_GAP_NS
            self._constrain(Edge.ENGINE, rows, group, np.arange(len(rows)), usual)
        fraction = self.ops["sm_fraction"].fill_null(0.0).to_numpy()
        for _, rows in self._rows(
            *place, "pid", only=self._places_with("kind", "kernel"), started=True
        ):
            group = self._group(rows)
            used = np.concatenate([[0.0], np.cumsum(fraction[rows])])
            room = used[1:] - 1.0 - 1e-9
            count = np.searchsorted(used, room, side="left")
            count = np.minimum(count, np.arange(len(rows)))
            self._constrain(Edge.ENGINE, rows, group, count, KERNEL_GAP_NS)

    def _queues(self) -> None:
        """Streams beyond the connection count share a queue: starts keep its order.

        An operation waits until the last earlier one of the queue, of whatever
        stream, has started (probes, H200).
        """
        queues = connections(self.trace)
        contexts = [*zip(self.places["pid"], self.places["context_id"], strict=True)]
        used = dict[tuple[int, int], set[int]]()
        for context, stream in zip(contexts, self.places["stream_id"], strict=True):
            used.setdefault(context, set()).add(stream)
        crowded = np.array([len(used[one]) > queues for one in contexts], np.bool_)
        if not crowded.any():
            return
        streams = pl.Series(self.places["stream_id"], dtype=pl.Int64).to_numpy()
        for _, rows in self._rows("pid", "context_id", only=crowded):
            place = self.place[rows]
            numbers = np.unique(streams[ascending(place)])
            rank = np.searchsorted(numbers, streams)[place]
            for queue in range(queues):
                here = rows[rank % queues == queue]
                if len(here):
                    group = self._group(here, by_start=True)
                    self._constrain(
                        Edge.QUEUE, here, group, np.arange(len(here)), QUEUE_NS
                    )

    # Host waits ---------------------------------------------------------------

    def _waits(self) -> None:
        """Calls that return only when GPU work is done."""
        self.device_groups = {
            key: self._issue_group(rows) for key, rows in self._rows("pid", "device_id")
        }
        kinds = self.trace.call_kinds
        if not kinds.isdisjoint(HOST_WAITS):
            self._synchronizations()
        if not kinds.isdisjoint(("sync memcpy", "async memcpy")):
            self._copy_waits()
        frees = ("device free", "host free", "host unregister")
        if not kinds.isdisjoint(frees):
            freeing = self.calls.filter(pl.col("kind").is_in(frees))
            self._device_waits(freeing, Edge.FREE)

    def _synchronizations(self) -> None:
        key = ["pid", "tid", "start_ns"]
        waits = self.trace.synchronizations
        waiting = (
            starting_with(self.calls.select(*key, "call_index"), waits)
            .join(waits, on=key, how="semi", maintain_order="left")
            .unique(key, keep="first")
        )
        syncs = waits.join(waiting, on=key, how="inner", maintain_order="left")
        for kind, made in groups(syncs, "kind"):
            if kind == ("device sync",):
                self._device_waits(made, Edge.WAIT)
            elif kind == ("stream sync",):
                streams = made.drop_nulls("stream_id")
                self._stream_waits(streams, "stream_id", "start_ns")
            else:
                events = self._records_of(made)
                self._stream_waits(events, "recorded_stream_id", "recorded_ns")

    def _stream_waits(self, calls: pl.DataFrame, stream_id: str, instant: str) -> None:
        """Calls that wait for what a stream was given before an instant."""
        for (pid, stream), waits in groups(calls, "pid", stream_id):
            if (pid, stream) in self.stream:
                group, rows = self.stream[pid, stream]
                count = _before(self.order[rows], column(waits, instant))
                self._constrain(
                    Edge.WAIT, self._call_nodes(waits), group, count, RETURN_DEFAULT_NS
                )

    def _call_nodes(self, calls: pl.DataFrame) -> Int64:
        return column(calls, "call_index") + self.ops.height

    def _device_waits(self, calls: pl.DataFrame, kind: Edge) -> None:
        """Calls that wait for everything that their device was given before."""
        if not calls.height:
            return
        latency = RETURN_DEFAULT_NS if kind is Edge.WAIT else 0
        for (pid, device), (group, rows) in self.device_groups.items():
            here = calls.filter(pl.col("pid") == pid)
            several = len([1 for p, _ in self.device_groups if p == pid]) > 1
            if several:
                here = here.filter(self._last_device(here) == device)
            at = column(here, "start_ns")
            count = _before(self.order[rows], at)
            if kind is Edge.FREE:
                # Waits only for work that was running; a free on an idle GPU is none.
                done = _prefix(self.end[rows], count)
                count = np.where(
                    (done > at) & (done <= column(here, "end_ns")), count, 0
                )
            self._constrain(kind, self._call_nodes(here), group, count, latency)

    def _last_device(self, calls: pl.DataFrame) -> pl.Series:
        """The device that the calling thread used last before each call."""
        found = calls.select("pid", "tid", "start_ns").join_asof(
            self._used, on="start_ns", by=["pid", "tid"], check_sortedness=False
        )
        return found["device_id"]

    @cached_property
    def _used(self) -> pl.DataFrame:
        """pid, tid, device_id and start_ns (the issue) of every operation issued."""
        issued = np.flatnonzero(self.issued_by >= 0)
        return (
            self.ops.select("pid", "device_id")[issued]
            .with_columns(
                as_series(self.order[issued], "start_ns"),
                self.calls["tid"][as_series(self.issued_by[issued])],
            )
            .sort("start_ns", maintain_order=True)
        )

    def _copy_waits(self) -> None:
        """Synchronous copies, and asynchronous ones of pageable memory."""
        key = ["pid", "correlation_id"]
        host = self.trace.memcpys.filter(
            pl.col("copy_kind").is_in(("HtoD", "DtoH"))
            & pl.col("graph_node_id").is_null()
        )
        pageable = pl.col("copy_pageable")
        copies = (
            host.with_columns(
                (
                    (pl.col("src_kind") == "pageable")
                    | (pl.col("dst_kind") == "pageable")
                ).alias("copy_pageable"),
                pl.col("start_ns").alias("copy_ns"),
            )
            .select(
                *key, "stream_id", "copy_kind", "copy_pageable", "size_bytes", "copy_ns"
            )
            .unique(key, keep="last", maintain_order=True)
            .join(
                self.calls.filter(
                    pl.col("kind").is_in(("async memcpy", "sync memcpy"))
                ),
                on=key,
                how="inner",
                validate="1:m",
                maintain_order="left",
            )
        )
        late = (pl.col("copy_kind") == "DtoH") | (pl.col("size_bytes") > STAGED_BYTES)
        waiting = copies.filter(
            (late & (pageable | (pl.col("kind") == "sync memcpy")))
            & (pl.col("end_ns") >= pl.col("copy_ns"))
        )
        for (pid, stream), waits in groups(waiting, "pid", "stream_id"):
            group, rows = self.stream[pid, stream]
            count = _before(self.order[rows], column(waits, "start_ns")) + 1
            self._constrain(
                Edge.COPY,
                self._call_nodes(waits),
                group,
                np.minimum(count, len(rows)),
                RETURN_DEFAULT_NS,
            )

    # Fitting ------------------------------------------------------------------

    def _fit(self) -> Graph:
        """Latencies that reproduce the trace exactly, and the plain ones."""
        number_ops = self.ops.height
        every = self._sorted()
        of_ops = every.of(0, number_ops)
        of_calls = every.of(number_ops, len(every.first) - 1)
        call = of_calls.node
        slack = self.call_end[call] - of_calls.done
        copies = of_calls.active & (of_calls.kind == Edge.COPY)
        for some in (copies & (slack < 0), copies & (slack >= 0)):
            # The host's own part of a copy: staging ends early, unstaging late.
            own = int(np.median(slack[some])) if some.any() else 0
            of_calls.usual_ns[some] = own

        free_at = np.full(number_ops, NEVER)
        filled, highest = _highest(of_ops.done, of_ops.first)
        free_at[filled] = highest
        issue_call, issue_latency, plain_issue = self._issue(free_at)
        called = issue_call >= 0
        issued = self.start.copy()
        issued[called] = self.call_start[issue_call[called]] + issue_latency[called]

        duration = self.call_end - self.call_start
        waited = of_calls.active & (slack < duration[call])
        freed = waited & (of_calls.kind == Edge.FREE)
        waits = np.zeros(len(duration), dtype=np.bool_)
        waits[call[waited]] = True
        waits[call[freed]] = False
        base = np.where(waits, np.minimum(duration, WAIT_BASE_NS), duration)
        base[call[freed]] = slack[freed]

        op_delay, late = _settled(self.start, issued, of_ops, HANDOVER_NS)
        issue_latency += np.where(called, late, 0)
        fixed = self.start + np.where(called, 0, late)
        call_delay, late = _settled(
            self.call_end, self.call_start + base, of_calls, RETURN_NS
        )
        base += late
        returned = waited & (of_calls.kind == Edge.WAIT)
        if returned.any():
            usual = int(np.median(of_calls.latency[returned]))
            of_calls.usual_ns[of_calls.kind == Edge.WAIT] = usual
        part = self._parts()
        kinds, indexes, bounds = self._event_order(np.diff(of_calls.first) > 0, part)
        previous, think, handover, handover_ns = self._threads()
        return Graph(
            ops=self.ops,
            calls=self.calls,
            op_start=self.start,
            op_duration=self.end - self.start,
            op_delay=op_delay,
            issue_call=issue_call,
            issue_latency=issue_latency,
            fixed_start=fixed,
            call_first=self.call_start,
            call_end=self.call_end,
            call_duration=base,
            call_delay=call_delay,
            previous_call=previous,
            think_ns=think,
            handover_call=handover,
            handover_ns=handover_ns,
            op_constraints=every.first[: number_ops + 1],
            call_constraints=every.first[number_ops:],
            node=every.node,
            kind=every.kind,
            group=every.group,
            count=every.wanted,
            latency=every.latency,
            plain_latency=every.usual_ns,
            plain_issue_latency=plain_issue,
            active=every.active,
            group_offset=np.cumsum([0, *map(len, self.members)])[:-1],
            group_by_start=np.array(self.started, dtype=np.bool_),
            member=np.concatenate([_NO_ROWS, *self.members]),
            part=part,
            event_kind=kinds,
            event_index=indexes,
            event_bounds=bounds,
        )

    def _sorted(self) -> _Sorted:
        """All constraints by their nodes, those of one in the order of their making."""
        number_ops = len(self.start)
        at = np.zeros(number_ops + len(self.call_end), dtype=np.int32)
        for part in self.parts:
            if part.kind in _REPEATING:
                np.add.at(at, part.node, 1)
            else:
                at[part.node] += 1
        first = np.zeros(len(at) + 1, dtype=np.int32)
        np.cumsum(at, out=first[1:])
        at[:] = first[:-1]
        total = int(first[-1])
        node, number, wanted = (np.empty(total, dtype=np.int32) for _ in range(3))
        done, latency, usual_ns = (np.empty(total, dtype=np.int64) for _ in range(3))
        kinds = np.array([part.kind for part in self.parts], dtype=np.int8)
        groups = np.array([part.group for part in self.parts], dtype=np.int32)
        left = Counter(groups.tolist())
        self.parts.reverse()
        reached = dict[int, Int64]()
        for one in range(len(kinds)):
            part = self.parts.pop()
            rows, early = self.members[part.group], self.started[part.group]
            if part.group not in reached:
                times = (self.start if early else self.end)[rows]
                reached[part.group] = np.maximum.accumulate(times)
            ends = reached[part.group]
            if part.kind in _OF_CALLS:
                free = self.call_end[part.node - number_ops]
            else:
                free = self.start[part.node]
            prefix = self._shorter_prefixes(part, free, ends)
            ended = ends[prefix - 1]
            slack = free - ended
            # Programmatic launches start before their predecessor ends, and a call may
            # return before its staged copy is done; anything else is no wait.
            holds, usual = slack >= 0, part.usual_ns
            if part.kind in (Edge.STREAM, Edge.COPY) and not holds.all():
                begun = np.maximum.accumulate(self.start[rows])[prefix - 1]
                sooner = ~holds & (begun <= free)
                holds, usual = holds | sooner, np.where(sooner, slack, usual)
            to = at[part.node].astype(np.int64)
            if part.kind in _REPEATING:
                to += _repeats(part.node)
            at[part.node] = to + 1  # of a node that is there twice, the last one holds
            node[to], number[to], wanted[to] = part.node, one, prefix
            done[to] = np.where(holds, ended, NEVER)
            usual_ns[to], latency[to] = usual, np.minimum(usual, slack)
            left[part.group] -= 1
            if not left[part.group]:
                del reached[part.group]
        return _Sorted(
            *(first, node, kinds[number], groups[number], wanted),
            *(done, latency, usual_ns, done != NEVER),
        )

    def _shorter_prefixes(self, part: _Part, at: Int64, reached: Int64) -> Indexes:
        """Parallel branches of a graph follow the last node that had ended."""
        count = part.wanted
        if part.kind is not Edge.STREAM or self._in_graph is None:
            return count
        late = (reached[count - 1] > at) & self._in_graph[part.node]
        ended = np.searchsorted(reached, at[late], side="right")
        count = count.copy()
        count[late] = np.minimum(count[late], np.maximum(ended, 1))
        return count

    @cached_property
    def _in_graph(self) -> Bools | None:
        """Which operations are nodes of a graph; None if there are none."""
        nodes = self.ops["graph_node_id"]
        recorded = nodes.null_count() < len(nodes)
        return nodes.is_not_null().to_numpy() if recorded else None

    def _issue(self, free_at: Int64) -> tuple[Indexes, Int64, Int64]:
        """Issuing call, and fitted and plain latency from its start.

        A call hands its work over about when it returns; how much before or after
        is learned from operations that nothing else held back: ``free_at``, the time
        from which their constraints let them start, was before the call.
        """
        call = self.issued_by.copy()
        if not len(self.call_start):
            none = np.zeros(len(call), dtype=np.int64)
            return call, none.copy(), none
        since = self.start - self.call_start[call]
        call[(call >= 0) & (since < 0)] = -1
        idle = (call >= 0) & (free_at <= self.call_start[call])
        kind = self.calls["kind"].to_physical().cast(pl.Int64).to_numpy()
        # Operations without a call are a kind of their own, the last one.
        made = np.append(kind, kind.max() + 1)
        engine, engines = self._engine_codes
        sort = engine[self.place] * (made[-1] + 1) + made[self.issued_by]
        sorts = engines * int(made[-1] + 1)
        tails = self.start[idle] - self.call_end[call[idle]]
        tail = _of_sorts(sort[idle], tails, sorts, pl.col("ns").median())
        rare = (np.bincount(sort[idle], minlength=sorts) < MIN_SAMPLES)[sort]
        least = _of_sorts(sort[rare], since[rare], sorts, pl.col("ns").quantile(0.05))
        duration = self.call_end[call] - self.call_start[call]
        plain = duration + tail[sort]
        unknown = np.minimum(least[sort[rare]], duration[rare])
        plain[rare] = np.where(idle[rare], since[rare], unknown)
        plain = plain.clip(0)
        plain[self._places_with("kind", "record")[self.place]] = 0
        return call, np.minimum(plain, since), plain

    def _threads(self) -> tuple[Indexes, Int64, Indexes, Int64]:
        """Chains of calls: previous call, host time since, and handovers."""
        thread, first = numbered(self.calls["pid"], self.calls["tid"])
        previous = np.full(len(thread), -1, dtype=np.int32)
        order = stable_order(thread, len(first))
        same = thread[order[1:]] == thread[order[:-1]]
        previous[order[1:][same]] = order[:-1][same]
        think = np.where(previous >= 0, self.call_start - self.call_end[previous], 0)
        handover = np.full(len(previous), -1, dtype=np.int32)
        handover_ns = np.zeros(len(previous), dtype=np.int64)
        silent = (previous < 0) | (think > HANDOFF_NS)
        pids = column(self.calls, "pid")[first]
        for pid in ascending(pids):
            if (pids == pid).sum() < 2:
                continue
            index = np.flatnonzero((pids == pid)[thread])
            by_end = index[np.argsort(self.call_end[index], kind="stable")]
            index = index[silent[index]]
            ends = self.call_end[by_end]
            at = np.searchsorted(ends, self.call_start[index], side="right") - 1
            last = by_end[np.maximum(at, 0)]
            passed = self.call_start[index] - ends[np.maximum(at, 0)]
            handed = (at >= 0) & (thread[last] != thread[index])
            handed &= (previous[index] < 0) | (passed <= HANDOFF_SHARE * think[index])
            handover[index[handed]] = last[handed]
            handover_ns[index[handed]] = passed[handed]
        return previous, think.clip(0), handover, handover_ns

    def _parts(self) -> Indexes:
        """The part of each operation and call: processes that share a copy engine."""
        number = {pid: index for index, pid in enumerate(distinct(self.calls, "pid"))}
        for pid in self.places["pid"]:
            number.setdefault(pid, len(number))
        sharing = dict[tuple[object, ...], int]()
        copies = self._places_with("engine", *_COPIES)
        by = ("gpu_id", "device_id", "pid")
        for *gpu, pid in compress(
            zip(*(self.places[name] for name in by), strict=True), copies
        ):
            one, other = number[pid], number[sharing.setdefault((*gpu,), pid)]
            if one != other:
                number = {p: other if at == one else at for p, at in number.items()}
        numbers = {at: index for index, at in enumerate(dict.fromkeys(number.values()))}
        part = np.zeros(len(self.start) + len(self.call_start), dtype=np.int32)
        if len(numbers) > 1:
            of_place = [numbers[number[pid]] for pid in self.places["pid"]]
            of_ops, of_calls = np.split(part, [len(self.start)])
            of_ops[:] = np.array(of_place)[self.place]
            for pid, at in number.items():
                of_calls[column(self.calls, "pid") == pid] = numbers[at]
        return part

    def _event_order(
        self, waiting: Bools, part: Indexes
    ) -> tuple[Kinds, Indexes, Int64]:
        """All events by recorded time, part by part, and where each part begins.

        A thread's own keep their sequence. Ends of calls are events where the call is
        ``waiting`` for something.
        """
        waits = np.flatnonzero(waiting)
        starts = np.arange(0, 2 * len(waiting), 2, dtype=np.int32)
        events = np.insert(starts, waits + 1, 2 * waits + 1)
        times = np.insert(self.call_start, waits + 1, self.call_end[waits])
        order = np.argsort(times, kind="stable")
        events, times = events[order], times[order]
        order = np.argsort(self.start, kind="stable")
        # Operations come after the events of calls at the same time.
        at = np.searchsorted(times, self.start[order], side="right")
        at += np.arange(len(at))
        kinds = np.empty(len(events) + len(at), dtype=np.int8)
        indexes = np.empty(len(kinds), dtype=np.int32)
        of_call = np.ones(len(kinds), dtype=np.bool_)
        of_call[at] = False
        kinds[at], indexes[at] = OPERATION, order
        # Starts are CALL_START, ends CALL_END: 0 and 1.
        kinds[of_call], indexes[of_call] = events & 1, events >> 1
        parts = int(part.max(initial=0)) + 1
        if parts == 1:
            return kinds, indexes, np.array([0, len(kinds)])
        part_of_op, part_of_call = np.split(part, [len(self.start)])
        of_event = np.empty(len(kinds), dtype=np.int64)
        of_event[at] = part_of_op[order]
        of_event[of_call] = part_of_call[events >> 1]
        order = stable_order(of_event, parts)
        bounds = np.searchsorted(of_event[order], np.arange(parts + 1))
        return kinds[order], indexes[order], bounds


def _of_sorts(sort: Int64, times: Int64, sorts: int, of_one: pl.Expr) -> Int64:
    """What ``of_one`` makes of the times (ns) of each sort, 0 where it has none."""
    columns = [as_series(sort, "sort"), as_series(times, "ns")]
    made = pl.DataFrame(columns).group_by("sort").agg(of_one.cast(pl.Int64))
    table = np.zeros(sorts, dtype=np.int64)
    table[made["sort"].to_numpy()] = made["ns"].to_numpy()
    return table


def _index(values: Int64 | Indexes) -> Indexes:
    """Row numbers in 32 bits: a pass is bound by the memory that it reads."""
    return values.astype(np.int32, copy=False)


def _repeats(values: Indexes) -> Int64:
    """How many earlier values are the same, for each."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    repeats = np.empty(len(values), dtype=np.int64)
    lengths = np.diff(np.append(begins, len(values)))
    repeats[order] = np.arange(len(values)) - np.repeat(begins, lengths)
    return repeats


def connections(trace: Trace) -> int:
    """Work queues of a process: CUDA_DEVICE_MAX_CONNECTIONS, 8 by default."""
    text = trace.capture.environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return min(32, max(1, int(text))) if text.isdigit() else 8


def spans(first: Int64 | Indexes, last: Int64 | Indexes) -> Int64:
    """All indexes from each first one up to its last one, that excluded."""
    lengths = last - first
    begins = np.cumsum(lengths) - lengths
    indexes: Int64 = np.arange(lengths.sum()) + np.repeat(first - begins, lengths)
    return indexes


def starting_with(frame: pl.DataFrame, rows: pl.DataFrame) -> pl.DataFrame:
    """The rows of ``frame``, sorted by start_ns, that start as any of ``rows``.

    Or all, where there are many: few are looked up in a tenth of the time of a join.
    """
    if 4 * rows.height > frame.height:
        return frame
    instants = ascending(column(rows.select("start_ns").drop_nulls(), "start_ns"))
    starts = column(frame, "start_ns")
    first = np.searchsorted(starts, instants, side="left")
    last = np.searchsorted(starts, instants, side="right")
    return frame[as_series(spans(first, last))]


def _numbered(frame: pl.DataFrame, *by: str) -> tuple[Int64, Int64]:
    """A number for each row's values of the columns, and the first row of each."""
    rows = frame.with_row_index("row")
    first = rows.select(pl.col("row").first().over(by)).to_series().to_numpy()
    firsts = np.flatnonzero(first == np.arange(len(first)))
    number = np.zeros(len(first), dtype=np.int64)
    number[firsts] = np.arange(len(firsts))
    return number[first], firsts


def _before(order: Int64, instants: Int64) -> Int64:
    """How many members of a group were issued before each instant."""
    return np.searchsorted(order, instants, side="left")


def _prefix(values: Int64, count: Int64) -> Int64:
    """Maximum of the first ``count`` values, `NEVER` for none."""
    reached = np.concatenate([[NEVER], np.maximum.accumulate(values)])
    return reached[count]


def _highest(through: Int64, first: Indexes) -> tuple[Int64, Int64]:
    """The nodes that have constraints, and the latest bound of each."""
    filled = np.flatnonzero(first[1:] > first[:-1])
    if not len(filled):
        return filled, _NONE
    return filled, np.maximum.reduceat(through, first[filled])


def _settled(
    exact: Int64, lower: Int64, held: _Sorted, limit_ns: int
) -> tuple[Int64, Int64]:
    """What nodes are later than the latest of their bounds: delays, and in the host.

    ``exact`` is when they were free, ``lower`` a bound that is no constraint. What is
    later than a constraint goes into its latency up to ``limit_ns``, else it is a
    delay; what is later than ``lower`` alone is returned second.
    """
    through = held.done + held.latency
    filled, highest = _highest(through, held.first)
    better = highest >= lower[filled]
    bound = filled[better]
    late = exact - lower
    late[bound] = 0
    residual = exact[bound] - highest[better]
    # The first constraint that reaches the bound of its node.
    latest = np.empty(len(exact), dtype=np.int64)
    latest[filled] = highest
    reaches = np.flatnonzero(through == latest[held.node])
    node = held.node[reaches]
    first = reaches[np.append(True, node[1:] != node[:-1])[: len(reaches)]]
    within = residual <= limit_ns
    held.latency[first[better][within]] += residual[within]
    delay = np.zeros(len(exact), dtype=np.int64)
    delay[bound[~within]] = residual[~within]
    return delay, late

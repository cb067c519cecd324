"""What each host wait waited for, and what the GPU did afterwards.

Shared by the rules about synchronization. Waiting for a busy GPU costs nothing by
itself; the harm is the GPU running dry until the waiting thread issues new work.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series, ascending, earlier_max, in_order
from streamlint.changes import Change
from streamlint.intervals import Bools, Int64, Intervals, union
from streamlint.replay import Edge, replay_of
from streamlint.steady import column, groups, in_time, issued_ns, of_process
from streamlint.trace.model import Trace

READBACK_BYTES = 1_024
"""A copy of at most this size brings back a result, such as PyTorch's `.item()`."""

_NEVER = np.iinfo(np.int64).max
_WAITING = ("device sync", "stream sync", "event sync", "sync memcpy")


def host_waits(trace: Trace) -> pl.DataFrame:
    """Calls that block the host until GPU work is done, sorted by start.

    Synchronizations and synchronous copies to or from the host. pid, tid,
    start_ns, end_ns, correlation_id, name, kind, callchain_id, backtrace_ns;
    stream_id (of a stream synchronization or copy); pending_streams (how many
    streams of the process had unfinished work when it began); next_issue_ns,
    next_stream_id (the thread's next call that issued work; null after the last);
    next_was_pending (that stream was one of the pending ones); over_broad (a
    device-wide wait that also waited for streams which the next work doesn't
    follow); readback (the thread's work before it was a copy of at most 1 KiB to
    the host); idle_ns (no
    operation ran on the device, from the call's start to the start of that work or
    to the thread's next wait); saving_ns (the smaller of idle and time in the
    call: what not waiting can gain at most).
    """
    return trace.derived(_host_waits)


def waiting_calls(trace: Trace) -> pl.DataFrame:
    """The calls of `host_waits` without what they waited for, sorted by start."""
    return trace.derived(_waiting_calls)


def issue_delay_ns(trace: Trace) -> int:
    """Median time from a launch call to its start where nothing was queued, ns.

    0 where the trace shows no such launch.
    """
    return trace.derived(_issue_delay_ns)


def without_waits(trace: Trace, calls: pl.DataFrame) -> Change:
    """None of these waits (rows of `host_waits`) is made: no waiting, no call."""
    replay = replay_of(trace)
    rows = replay.calls_of(calls)
    return Change(
        drop=replay.constraints(Edge.WAIT, calls=rows),
        call_duration=(rows, np.zeros_like(rows)),
    )


def without_readbacks(trace: Trace, calls: pl.DataFrame) -> Change:
    """None of these waits is made, nor the small copy to the host before it."""
    replay = replay_of(trace)
    waits = without_waits(trace, calls)
    copies = (
        trace.gpu_ops.filter(pl.col("engine") == "DtoH")
        .select("pid", "tid", "correlation_id", "issue_ns", "start_ns")
        .sort("issue_ns")
    )
    copied = (
        calls.filter("readback")
        .select("pid", "tid", pl.col("start_ns").alias("issue_ns"))
        .sort("issue_ns")
        .join_asof(copies, on="issue_ns", by=["pid", "tid"], check_sortedness=False)
        .drop_nulls("start_ns")
    )
    graph, rows = replay.graph, replay.ops_of(copied)
    made = graph.issue_call[rows].astype(np.int64)
    made = ascending(made[made >= 0])
    # Neither they nor what follows them wait for the switch from engine to engine.
    order, node, before = replay.in_streams
    copy = np.zeros(graph.ops.height, dtype=np.bool_)
    copy[rows] = True
    follows = order[copy[node] | copy[before]]
    gone = np.concatenate([waits.call_duration[0], made])
    return Change(
        drop=np.concatenate(
            [
                waits.drop,
                replay.constraints(Edge.ENGINE, ops=rows),
                replay.constraints(Edge.COPY, calls=made),
            ]
        ),
        op_duration=(rows, np.zeros_like(rows)),
        call_duration=(gone, np.zeros_like(gone)),
        latency=(follows, np.zeros_like(follows)),
    )


def device_busy(trace: Trace) -> dict[tuple[int, int], Intervals]:
    """When each device ran anything, by (pid, device id).

    The processes that share one physical GPU share its busy time.
    """
    return trace.derived(_device_busy)


def _device_busy(trace: Trace) -> dict[tuple[int, int], Intervals]:
    ops = trace.gpu_ops
    if ops["device_id"].null_count():
        ops = ops.drop_nulls("device_id")
    start, end = column(ops, "start_ns"), column(ops, "end_ns")
    pids, devices = column(ops, "pid"), column(ops, "device_id")
    gpus = ops["gpu_id"].fill_null(-1).to_numpy()
    found: dict[tuple[int, int], Intervals] = {}
    for pid, device_id, gpu_id in trace.devices.drop_nulls("device_id").iter_rows():
        if gpu_id is None:
            here = (pids == pid) & (devices == device_id)
        else:
            here = gpus == gpu_id
        found[pid, device_id] = union(start[here], end[here])
    return found


def _host_waits(trace: Trace) -> pl.DataFrame:
    calls = waiting_calls(trace)
    ops = trace.gpu_ops
    busy = device_busy(trace)
    parts: list[pl.DataFrame] = []
    for (pid,), waits in groups(calls, "pid"):
        own = of_process(ops, pid)
        issued = _issued(own)
        by_thread = dict(groups(issued, "tid"))
        of_threads = [
            _after_waits(mine, by_thread.get(tid, issued.clear()), busy)
            for tid, mine in groups(waits, "tid")
        ]
        parts.append(_with_pending(pl.concat(of_threads), own))
    if not parts:
        parts = [_with_pending(_after_waits(calls, _issued(ops.clear()), busy), ops)]
    return pl.concat(parts).sort("start_ns", "end_ns")


def _waiting_calls(trace: Trace) -> pl.DataFrame:
    columns = (
        *("pid", "tid", "start_ns", "end_ns", "correlation_id", "name", "kind"),
        *("callchain_id", "backtrace_ns", "stream_id"),
    )
    waits = trace.synchronizations.select(columns)
    if "sync memcpy" not in trace.call_kinds:
        return waits
    key = ["pid", "correlation_id"]
    # Device-to-device copies do not wait; the others name the stream they used.
    copied = (
        trace.memcpys.filter(pl.col("copy_kind").is_in(("HtoD", "DtoH")))
        .unique(key, keep="first", maintain_order=True)
        .select(*key, "stream_id")
    )
    copies = trace.launches.filter(pl.col("kind") == "sync memcpy").join(
        copied, on=key, how="inner", validate="1:1", maintain_order="left"
    )
    return pl.concat([waits, copies.select(columns)]).sort("start_ns", "end_ns")


def _issued(ops: pl.DataFrame) -> pl.DataFrame:
    """What each call of each thread of a process issued, in the order of the calls."""
    columns = (
        *("tid", "correlation_id", "pid", "issue_ns", "start_ns", "stream_id"),
        *("device_id", "engine", "size_bytes"),
    )
    issued = ops.select(columns)
    ids = ops["correlation_id"]
    # Where none of the calls made a graph run, each issued one operation.
    if ids.null_count() or len(ascending(column(ops, "correlation_id"))) < len(ids):
        issued = ops.group_by("tid", "correlation_id").agg(
            pl.col("pid").first(),
            pl.col("issue_ns").min(),
            pl.col("start_ns").min(),
            pl.col("stream_id").first(),
            pl.col("device_id").first(),
            pl.col("engine").first(),
            pl.col("size_bytes").max(),
        )
    return issued.sort("issue_ns")


def _after_waits(
    waits: pl.DataFrame, issued: pl.DataFrame, busy: dict[tuple[int, int], Intervals]
) -> pl.DataFrame:
    """The waits of one thread with what followed them of ``issued``, its own."""
    starts, ends = column(waits, "start_ns"), column(waits, "end_ns")
    issue = column(issued, "issue_ns")
    after = np.searchsorted(issue, ends, side="left")
    has_next = after < len(issue)
    at = np.minimum(after, max(0, len(issue) - 1))
    begins = (
        column(issued, "start_ns")[at] if len(issue) else np.full(len(starts), _NEVER)
    )
    next_wait = np.append(starts[1:], _NEVER) if len(starts) else starts
    until = np.where(
        has_next, np.maximum(np.minimum(begins, next_wait), starts), starts
    )
    idle = np.zeros(len(starts), dtype=np.int64)
    if len(issue):
        # The device meant is the one that the thread used before the wait.
        before = np.maximum(np.searchsorted(issue, starts, side="left") - 1, 0)
        devices = issued["device_id"].to_numpy()[before]
        pid = int(issued["pid"][0])
        for device_id in {*issued["device_id"].unique()} - {None}:
            here = devices == device_id
            running = busy[pid, device_id].overlap_ns(starts[here], until[here])
            idle[here] = until[here] - starts[here] - running
    return waits.with_columns(
        _nullable("next_issue_ns", issued["issue_ns"], at, has_next),
        _nullable("next_stream_id", issued["stream_id"], at, has_next),
        as_series(_after_readback(issued, starts), "readback"),
        as_series(idle, "idle_ns"),
        as_series(np.minimum(idle, ends - starts), "saving_ns"),
    )


def _with_pending(waits: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """The waits of a process with what its operations ``ops`` had left to do."""
    count, next_was_pending = _pending(
        ops, column(waits, "start_ns"), waits["next_stream_id"]
    )
    waits_for_more = (count > 1) | ((count == 1) & ~next_was_pending)
    of_device = (waits["kind"] == "device sync").to_numpy()
    has_next = waits["next_issue_ns"].is_not_null().to_numpy()
    return waits.with_columns(
        as_series(count, "pending_streams"),
        as_series(next_was_pending, "next_was_pending"),
        as_series(of_device & has_next & waits_for_more, "over_broad"),
    )


def _after_readback(issued: pl.DataFrame, instants: Int64) -> Bools:
    """Whether the thread's last work before each instant was a tiny DtoH copy."""
    before = np.searchsorted(column(issued, "issue_ns"), instants, side="left") - 1
    if not issued.height:
        return np.zeros(len(instants), dtype=np.bool_)
    small = issued.select(
        (pl.col("engine") == "DtoH")
        & (pl.col("size_bytes").fill_null(_NEVER) <= READBACK_BYTES)
    )
    tiny: Bools = small.to_series().to_numpy()[np.maximum(before, 0)] & (before >= 0)
    return tiny


def _pending(
    ops: pl.DataFrame, instants: Int64, next_stream: pl.Series
) -> tuple[Int64, Bools]:
    """How many streams had unfinished work at each instant; if the next one had."""
    if not ops.height:
        nothing = np.zeros(len(instants), dtype=np.int64)
        return nothing, nothing > 0
    # A stream that isn't named is one too, but not that of an unnamed next one.
    stream = ops["stream_id"].fill_null(-2).cast(pl.Int64).to_numpy()
    issued = issued_ns(ops)
    order = in_order(issued, stream)
    issued, stream = issued[order], stream[order]
    end = column(ops, "end_ns")[order]
    # Spans in which a stream has unfinished work: some op is issued and none is open
    # when the next one is. One pass over all streams: there may be very many.
    opens = issued >= earlier_max(as_series(end), as_series(stream))
    first = np.flatnonzero(opens)
    stream, start = stream[first], issued[first]
    end = np.maximum.reduceat(end, first)
    some = start < end
    stream, start, end = stream[some], start[some], end[some]
    count = np.searchsorted(np.sort(start), instants, side="left") - np.searchsorted(
        np.sort(end), instants, side="right"
    )
    # Of each instant's next stream, the last span that starts before it.
    after = next_stream.fill_null(-1).to_numpy()
    order = np.argsort(start, kind="stable")
    rank = np.empty(len(start), dtype=np.int64)
    rank[order] = np.arange(len(start))
    ids = ascending(stream)
    width = len(start) + 1
    keys = np.searchsorted(ids, stream) * width + rank
    before = np.searchsorted(start[order], instants, side="left")
    which = np.searchsorted(ids, after)
    at = np.searchsorted(keys, which * width + before, side="left") - 1
    if not len(start):
        return count, at >= 0
    held = np.maximum(at, 0)
    return count, (at >= 0) & (stream[held] == after) & (end[held] > instants)


def _nullable(name: str, values: pl.Series, index: Int64, present: Bools) -> pl.Series:
    """``values[index]`` where present, else null."""
    if not len(values):
        return pl.Series(name, [None] * len(index), dtype=values.dtype)
    taken = values[as_series(index)].alias(name)
    return taken.set(as_series(~present), None)


def _issue_delay_ns(trace: Trace) -> int:
    ops = (
        trace.gpu_ops.lazy()
        .filter(pl.col("issue_ns").is_not_null() & (pl.col("kind") != "graph"))
        .select("pid", "stream_id", "issue_ns", "start_ns", "end_ns")
        .collect()
    )
    issue, start = column(ops, "issue_ns"), column(ops, "start_ns")
    before = earlier_max(ops["end_ns"], ops["pid"], ops["stream_id"])
    timed = ops.select(in_time(trace)).to_series().to_numpy()
    delays = (start - issue)[timed & (before <= issue)]
    return max(0, int(np.median(delays))) if len(delays) else 0

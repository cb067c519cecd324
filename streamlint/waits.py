"""What each host wait waited for, and what the GPU did afterwards.

Shared by the rules about synchronization. Waiting for a busy GPU costs nothing by
itself; the harm is the GPU running dry until the waiting thread issues new work.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.changes import Change
from streamlint.intervals import Bools, Int64, Intervals, union
from streamlint.replay import Edge, Replay
from streamlint.steady import column
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


def without_waits(replay: Replay, calls: pl.DataFrame) -> Change:
    """None of these waits (rows of `host_waits`) is made: no waiting, no call."""
    rows = replay.calls_of(calls)
    return Change(
        drop=replay.constraints(Edge.WAIT, calls=rows),
        call_duration=(rows, np.zeros_like(rows)),
    )


def without_readbacks(replay: Replay, calls: pl.DataFrame, ops: pl.DataFrame) -> Change:
    """None of these waits is made, nor the small copy to the host before it."""
    waits = without_waits(replay, calls)
    copies = (
        ops.filter(pl.col("engine") == "DtoH")
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
    made = graph.issue_call[rows]
    made = np.unique(made[made >= 0])
    # Neither they nor what follows them wait for the switch from engine to engine.
    before = graph.member[graph.group_offset[graph.group] + graph.count - 1]
    beside = np.isin(graph.node, rows) | np.isin(before, rows)
    follows = np.flatnonzero(beside & (graph.kind == Edge.STREAM))
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
    ops = trace.gpu_ops.filter(pl.col("device_id").is_not_null())
    start, end = column(ops, "start_ns"), column(ops, "end_ns")
    pids, devices = column(ops, "pid"), column(ops, "device_id")
    gpus = ops["gpu_id"].fill_null(-1).to_numpy()
    found: dict[tuple[int, int], Intervals] = {}
    pairs = ops.select("pid", "device_id", "gpu_id").unique().sort("pid", "device_id")
    for pid, device_id, gpu_id in pairs.iter_rows():
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
    pids = {*ops["pid"].unique()}
    parts: list[pl.DataFrame] = []
    for (pid, tid), waits in calls.group_by("pid", "tid", maintain_order=True):
        own = ops if pids == {pid} else ops.filter(pl.col("pid") == pid)
        mine = own.filter(pl.col("tid") == tid)
        parts.append(_after_waits(waits, own, mine, busy))
    if not parts:
        parts = [_after_waits(calls, ops, ops.clear(), busy)]
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


def _after_waits(
    waits: pl.DataFrame,
    ops: pl.DataFrame,
    own: pl.DataFrame,
    busy: dict[tuple[int, int], Intervals],
) -> pl.DataFrame:
    """The waits of one thread with what followed them.

    ``ops`` are the operations of its process, ``own`` those that it issued itself.
    """
    starts, ends = column(waits, "start_ns"), column(waits, "end_ns")
    issued = (
        own.group_by("correlation_id")
        .agg(
            pl.col("issue_ns").min(),
            pl.col("start_ns").min(),
            pl.col("stream_id").first(),
            pl.col("device_id").first(),
            pl.col("engine").first(),
            pl.col("size_bytes").max(),
        )
        .sort("issue_ns")
    )
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
        pid = int(ops["pid"][0])
        for device_id in {*issued["device_id"].unique()} - {None}:
            here = devices == device_id
            running = busy[pid, device_id].overlap_ns(starts[here], until[here])
            idle[here] = until[here] - starts[here] - running
    next_stream = _nullable("next_stream_id", issued["stream_id"], at, has_next)
    count, next_was_pending = _pending(ops, starts, next_stream)
    waits_for_more = (count > 1) | ((count == 1) & ~next_was_pending)
    of_device = (waits["kind"] == "device sync").to_numpy()
    return waits.with_columns(
        pl.Series("pending_streams", count, dtype=pl.Int64),
        _nullable("next_issue_ns", issued["issue_ns"], at, has_next),
        next_stream,
        pl.Series("next_was_pending", next_was_pending, dtype=pl.Boolean),
        pl.Series("readback", _after_readback(issued, starts), dtype=pl.Boolean),
        pl.Series("idle_ns", idle, dtype=pl.Int64),
        pl.Series("saving_ns", np.minimum(idle, ends - starts), dtype=pl.Int64),
        pl.Series("over_broad", of_device & has_next & waits_for_more),
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
    count = np.zeros(len(instants), dtype=np.int64)
    next_was_pending = np.zeros(len(instants), dtype=np.bool_)
    next_ids = next_stream.fill_null(-1).to_numpy()
    queued = ops.select(
        pl.coalesce("issue_ns", "start_ns").alias("issue_ns"),
        "end_ns",
        # A stream that isn't named is one too, but not that of an unnamed next one.
        pl.col("stream_id").fill_null(-2),
    ).sort("issue_ns")
    issue, end = column(queued, "issue_ns"), column(queued, "end_ns")
    streams = queued["stream_id"].to_numpy()
    for stream_id in queued["stream_id"].unique():
        here = streams == stream_id
        last_end = np.maximum.accumulate(end[here])
        before = np.searchsorted(issue[here], instants, side="left")
        unfinished = (before > 0) & (last_end[np.maximum(before - 1, 0)] > instants)
        count += unfinished
        next_was_pending |= unfinished & (next_ids == stream_id)
    return count, next_was_pending


def _nullable(name: str, values: pl.Series, index: Int64, present: Bools) -> pl.Series:
    """``values[index]`` where present, else null."""
    if not len(values):
        return pl.Series(name, [None] * len(index), dtype=pl.Int64)
    taken = pl.Series(name, values.gather(index), dtype=pl.Int64)
    return taken.set(pl.Series(~present), None)


def _issue_delay_ns(trace: Trace) -> int:
    before = pl.col("end_ns").cum_max().shift(1).over("pid", "stream_id")
    delays = (
        trace.gpu_ops.filter(
            pl.col("issue_ns").is_not_null() & (pl.col("kind") != "graph")
        )
        .with_columns(before.alias("before_ns"))
        .filter(
            pl.col("before_ns").is_null() | (pl.col("before_ns") <= pl.col("issue_ns"))
        )
        .select((pl.col("start_ns") - pl.col("issue_ns")).median())
    )
    value = delays.item()
    return 0 if value is None else max(0, int(value))

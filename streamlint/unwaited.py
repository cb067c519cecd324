"""GPU work that the host never waits for, until the end of the recording.

Shared by the rules about results that nobody can know to be there. What counts as a
wait: synchronizations of the device, the stream or an event, copies that block the
host, queries of work that was done, frees (they wait for the device) and host
functions; through events and the legacy default stream also for other streams.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.completeness import defects
from streamlint.findings import NotAssessed
from streamlint.intervals import Int64
from streamlint.steady import column, distinct, groups, of_process
from streamlint.trace.model import Trace, schema

_FREES = ("device free", "host free", "host unregister", "host func")
_CUT = (
    *("partial range", "filtered export", "events perhaps lost", "size limit reached"),
    *("buffers not collected", "buffers not allocated", "incomplete events dropped"),
    *("events lost on import", "launches without GPU rows", "GPU rows without calls"),
)
_BEFORE = np.iinfo(np.int64).min


def unwaited(trace: Trace) -> pl.DataFrame:
    """Operations that no recorded wait covers: rows of `Trace.gpu_ops`.

    Those whose call wasn't recorded are left out.
    """
    return trace.derived(_unwaited)


def cut_off(trace: Trace) -> NotAssessed | None:
    """Why waits may be missing from the recording; None for a whole one."""
    missing = [defect for defect in defects(trace) if defect.kind in _CUT]
    if not missing:
        return None
    return NotAssessed(
        f"the wait for some work may be missing from the recording: {missing[0].words}",
        missing[0].recapture,
    )


def _unwaited(trace: Trace) -> pl.DataFrame:
    ops = trace.gpu_ops
    parts = [ops.clear()]
    for pid in distinct(ops, "pid"):
        resolved = _resolved(trace, pid)
        everything = _waits_for_all(trace, pid, resolved)
        own = (pl.col("pid") == pid) & pl.col("issue_ns").is_not_null()
        left = ops.filter(own & (pl.col("issue_ns") >= everything))
        if left.height:
            covered = _covered(trace, pid, ops.filter(own), resolved)
            left = left.join(covered, on="stream_id", how="left", validate="m:1")
            left = left.filter(pl.col("issue_ns") >= pl.col("until_ns"))
            parts.append(left.drop("until_ns"))
    return pl.concat(parts)


def _waits_for_all(trace: Trace, pid: int, resolved: pl.DataFrame) -> int:
    """The last wait for everything; a wait for something unknown counts as one."""
    syncs = of_process(trace.synchronizations, pid)
    named = (pl.col("kind") == "stream sync") & pl.col("stream_id").is_not_null()
    of_event = pl.col("correlation_id").is_in(resolved["correlation_id"].implode())
    broad = syncs.filter(~(named | ((pl.col("kind") == "event sync") & of_event)))
    if trace.call_kinds.isdisjoint(_FREES):
        return _last(broad)
    calls = trace.runtime_calls.filter(
        (pl.col("pid") == pid) & pl.col("kind").is_in(_FREES)
    )
    return max(_last(broad), _last(calls))


def _last(calls: pl.DataFrame) -> int:
    latest = calls["start_ns"].max()
    return latest if isinstance(latest, int) else _BEFORE


def _resolved(trace: Trace, pid: int) -> pl.DataFrame:
    """Event syncs with the record they wait for: stream_id, until_ns."""
    syncs = trace.synchronizations.filter(
        (pl.col("pid") == pid) & (pl.col("kind") == "event sync")
    )
    return _with_records(trace, pid, syncs)


def _with_records(trace: Trace, pid: int, waits: pl.DataFrame) -> pl.DataFrame:
    """``waits`` with recorded_stream_id and recorded_ns; by instance or the latest."""
    if not waits.height:
        return waits.with_columns(
            recorded_stream_id=pl.lit(None, pl.Int32),
            recorded_ns=pl.lit(None, pl.Int64),
        )
    records = of_process(trace.event_records, pid).drop_nulls("start_ns")
    found = (
        pl.col("stream_id").alias("recorded_stream_id"),
        pl.col("start_ns").alias("recorded_ns"),
    )
    exact = records.filter(pl.col("event_sync_id") > 0)
    if exact.height and "event_sync_id" in waits.columns:
        instances = exact.unique("event_sync_id", keep="last", maintain_order=True)
        return waits.join(
            instances.select("event_sync_id", *found),
            on="event_sync_id",
            how="inner",
            validate="m:1",
        )
    return (
        waits.drop_nulls("event_id")
        .sort("start_ns")
        .join_asof(
            records.select("event_id", *found, "start_ns").sort("start_ns"),
            on="start_ns",
            by="event_id",
            check_sortedness=False,
        )
        .drop_nulls("recorded_ns")
    )


def _covered(
    trace: Trace, pid: int, ops: pl.DataFrame, resolved: pl.DataFrame
) -> pl.DataFrame:
    """Until when the work issued to each stream is waited for: stream_id, until_ns."""
    until = dict.fromkeys(ops["stream_id"].unique().sort().to_list(), _BEFORE)
    pairs = _event_pairs(trace, pid)
    # A stream without work can pass a wait on as well.
    until |= dict.fromkeys((stream for pair in pairs for stream in pair), _BEFORE)
    for stream, at in _direct(trace, pid, ops, resolved):
        until[stream] = max(until.get(stream, _BEFORE), at)
    barriers = _null_barriers(ops)
    # Each round follows one more hop, of which there are fewer than streams.
    for _ in range(len(until)):
        before = dict(until)
        for (waiting, recorded), (waits, records) in pairs.items():
            seen = int(np.searchsorted(waits, until[waiting], side="left"))
            if seen:
                until[recorded] = max(until[recorded], int(records[seen - 1]))
        _through_null_stream(barriers, until)
        if until == before:
            break
    return pl.DataFrame(
        {"stream_id": list(until), "until_ns": list(until.values())},
        schema=schema("stream_id", "until_ns"),
    )


def _direct(
    trace: Trace, pid: int, ops: pl.DataFrame, resolved: pl.DataFrame
) -> list[tuple[int, int]]:
    """Streams and the times until which their work is waited for by the host."""
    own = pl.col("pid") == pid
    syncs = trace.synchronizations.filter(own & (pl.col("kind") == "stream sync"))
    at = [syncs.select("stream_id", "start_ns")]
    blocking = (
        trace.memcpys.filter(own & pl.col("copy_kind").is_in(("HtoD", "DtoH")))
        .select("correlation_id", "stream_id", "dst_kind")
        .unique("correlation_id", keep="last")
        .join(
            trace.launches.filter(own).select("correlation_id", "kind", "end_ns"),
            on="correlation_id",
            how="inner",
        )
        .filter(
            (pl.col("kind") == "sync memcpy")
            | ((pl.col("kind") == "async memcpy") & (pl.col("dst_kind") == "pageable"))
        )
        .select("stream_id", pl.col("end_ns").alias("start_ns"))
    )
    at.append(blocking)
    events = resolved.select(
        pl.col("recorded_stream_id").alias("stream_id"),
        pl.col("recorded_ns").alias("start_ns"),
    )
    at += [events, _answered(trace, pid, ops)]
    latest = (
        pl.concat(at).drop_nulls().group_by("stream_id").agg(pl.col("start_ns").max())
    )
    return list(latest.iter_rows())


def _answered(trace: Trace, pid: int, ops: pl.DataFrame) -> pl.DataFrame:
    """Queries made when the work they ask about was done: stream_id, start_ns."""
    queries = of_process(trace.queries, pid)
    if not queries.height:
        return queries.select("stream_id", "start_ns")
    streams = queries.drop_nulls("stream_id").select(
        "stream_id", pl.col("start_ns").alias("recorded_ns"), "start_ns"
    )
    events = _with_records(
        trace, pid, queries.filter(pl.col("stream_id").is_null())
    ).select(pl.col("recorded_stream_id").alias("stream_id"), "recorded_ns", "start_ns")
    done = ops.sort("issue_ns").select(
        "stream_id",
        pl.col("issue_ns").alias("recorded_ns"),
        pl.col("end_ns").cum_max().over("stream_id"),
    )
    return (
        pl.concat([streams, events])
        .sort("recorded_ns")
        .join_asof(done, on="recorded_ns", by="stream_id", check_sortedness=False)
        .filter(pl.col("end_ns") <= pl.col("start_ns"))
        .select("stream_id", pl.col("recorded_ns").alias("start_ns"))
    )


def _event_pairs(trace: Trace, pid: int) -> dict[tuple[int, int], tuple[Int64, Int64]]:
    """By waiting and recorded stream: when waits were issued, and until when they
    cover the other stream's work."""
    found: dict[tuple[int, int], tuple[Int64, Int64]] = {}
    if not trace.event_waits.height:
        return found
    waits = of_process(trace.event_waits, pid).drop_nulls("stream_id")
    resolved = _with_records(trace, pid, waits).sort("start_ns")
    for (waiting, recorded), here in groups(
        resolved, "stream_id", "recorded_stream_id"
    ):
        assert isinstance(waiting, int)
        assert isinstance(recorded, int)
        latest = np.maximum.accumulate(column(here, "recorded_ns"))
        found[waiting, recorded] = (column(here, "start_ns"), latest)
    return found


def _null_barriers(ops: pl.DataFrame) -> list[tuple[int, Int64, list[int]]]:
    """Legacy default streams, when work was issued to them, streams they wait for."""
    found: list[tuple[int, Int64, list[int]]] = []
    if not {"blocking", "per-thread"} & {*ops["stream_kind"].unique()}:
        return found
    synced = ops.filter(pl.col("stream_kind").is_in(("blocking", "per-thread")))
    for (context, null), here in groups(
        ops.filter(pl.col("stream_kind") == "null"), "context_id", "stream_id"
    ):
        assert isinstance(null, int)
        issued = np.sort(column(here, "issue_ns"))
        others = synced.filter(pl.col("context_id").eq_missing(context))
        found.append((null, issued, others["stream_id"].unique().to_list()))
    return found


def _through_null_stream(
    barriers: list[tuple[int, Int64, list[int]]], until: dict[int, int]
) -> None:
    """A wait for the legacy default stream is one for the blocking streams too."""
    for null, issued, streams in barriers:
        for stream in streams:
            # Work of the default stream that an operation waited for had to wait.
            before = int(np.searchsorted(issued, until[stream], side="left"))
            if before:
                until[null] = max(until[null], int(issued[before - 1]) + 1)
        for stream in streams:
            until[stream] = max(until[stream], until[null])

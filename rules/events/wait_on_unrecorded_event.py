"""Rule wait-on-unrecorded-event."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.completeness import defects
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.rule import Outcome, rule
from streamlint.steady import column, groups, in_scope
from streamlint.trace.model import Trace
from streamlint.where import locate, sites


@rule(needs=("runtime_calls", "synchronizations", "event_records"))
def wait_on_unrecorded_event(trace: Trace) -> Outcome:
    """A wait for an event that was never recorded waits for nothing.

    What it does
        Finds cudaStreamWaitEvent and cudaEventSynchronize calls on an event without
        an earlier record, in the whole process.
    Why it costs time
        It costs none: such a wait succeeds at once. The order that it was meant to
        keep is missing, so results can be wrong now and then.
    Evidence
        The export gives every record a number and every wait the number that it
        waits for; 0 means that there was no record. Only events count for which, at
        one wait at least, another stream still had work to wait for. An event without
        any record in the process is an error. One that is recorded later, but never
        waited for after that, is for information: the two calls may be in the wrong
        order.
    Exemptions
        Events that later waits find recorded (loops that wait for the iteration
        before have nothing to wait for in the first one), waits with nothing else
        going on (NCCL sets up that way), waits while a stream is being captured,
        events of other processes, calls that failed, queries. A process that is not
        recorded from its start can't be judged.
    Fix
        Record the event, after the work to wait for, before the wait is issued.
    References
        CUDA Runtime API, cudaStreamWaitEvent and cudaEventRecord: without a record
        the call has no effect and returns cudaSuccess.
    """
    waits = _waits(trace)
    if not waits.height:
        return []
    if waits["event_sync_id"].null_count() == waits.height:
        return NotAssessed(
            "the export doesn't say which record a wait is for",
            "record and export with nsys 2025.1 or newer",
        )
    empty = waits.filter(pl.col("event_sync_id") == 0)
    if not empty.height:
        return []
    found = waits.filter(pl.col("event_sync_id") > 0)
    empty = empty.join(found, on=["pid", "event_id"], how="anti")
    empty = _outside_captures(trace, empty)
    opens = [name for name in trace.call_names if "IpcOpenEvent" in name]
    if opens:
        shared = trace.runtime_calls.filter(pl.col("name").is_in(opens))
        empty = empty.join(shared, on="pid", how="anti")
    if not empty.height:
        return []
    empty = empty.with_columns(_pending(trace, empty))
    empty = empty.filter(pl.col("pending").any().over("pid", "event_id"))
    empty = empty.filter(in_scope(trace))
    if not empty.height:
        return []
    partial = [
        d for d in defects(trace) if d.kind in ("partial range", "filtered export")
    ]
    if partial:
        return NotAssessed(
            "events recorded before the recording began can't be seen",
            partial[0].recapture,
        )
    recorded = trace.event_records.select("pid", "event_id").unique()
    empty = empty.join(
        recorded.with_columns(pl.lit(value=True).alias("later")),
        on=["pid", "event_id"],
        how="left",
        validate="m:1",
        maintain_order="left",
    ).with_columns(sites(trace, empty), pl.col("later").fill_null(value=False))
    place = ("pid", "name", "later", "site")
    return [
        _finding(trace, here, bool(later), str(name), site)
        for (_, name, later, site), here in groups(empty, *place)
    ]


def _waits(trace: Trace) -> pl.DataFrame:
    """Waits for events, of streams and of the host, columns of event_waits and more.

    callchain_id and backtrace_ns are those of the call; failed calls are left out.
    """
    columns = (
        *("pid", "tid", "start_ns", "end_ns", "correlation_id", "name"),
        *("stream_id", "event_id", "event_sync_id"),
    )
    host = trace.synchronizations.filter(pl.col("kind") == "event sync")
    waits = pl.concat([trace.event_waits.select(columns), host.select(columns)])
    if (waits["event_sync_id"] > 0).all(ignore_nulls=False):
        return waits.clear()  # each waits for a record
    key = ["pid", "tid", "start_ns"]
    calls = trace.runtime_calls.filter(
        pl.col("kind").is_in(("stream wait", "event sync")),
        pl.col("return_value").fill_null(0) == 0,
        ~pl.col("nested"),
    )
    calls = calls.select(*key, "callchain_id", "backtrace_ns").unique(key)
    return (
        waits.drop_nulls("event_id")
        .join(calls, on=key, how="inner", validate="m:1")
        .sort("start_ns")
    )


def _outside_captures(trace: Trace, waits: pl.DataFrame) -> pl.DataFrame:
    """Waits that no capture of the process was going on beside.

    A wait that is captured names no record either.
    """
    if not trace.captures.height or not waits.height:
        return waits
    going_on = trace.captures.select(
        "pid", pl.col("start_ns").alias("begin_ns"), pl.col("end_ns").alias("done_ns")
    ).sort("begin_ns")
    # Captures of several threads can overlap: the latest end of all begun so far.
    going_on = going_on.with_columns(pl.col("done_ns").cum_max().over("pid"))
    return waits.join_asof(
        going_on,
        left_on="start_ns",
        right_on="begin_ns",
        by="pid",
        check_sortedness=False,
    ).filter((pl.col("start_ns") >= pl.col("done_ns")).fill_null(value=True))


def _pending(trace: Trace, waits: pl.DataFrame) -> pl.Series:
    """Whether a stream other than the waiting one had unfinished work at each wait."""
    at = column(waits, "start_ns")
    pid = column(waits, "pid")
    waiting = waits["stream_id"].fill_null(-1).to_numpy()
    pending = np.zeros(len(at), dtype=np.bool_)
    columns = ("pid", "stream_id", "issue_ns", "end_ns")
    queued = trace.gpu_ops.select(columns).drop_nulls("issue_ns").sort("issue_ns")
    for (owner, stream_id), here in groups(queued, "pid", "stream_id"):
        last_end = np.maximum.accumulate(column(here, "end_ns"))
        before = np.searchsorted(column(here, "issue_ns"), at, side="left")
        unfinished = (before > 0) & (last_end[np.maximum(before - 1, 0)] > at)
        pending |= unfinished & (pid == owner) & (waiting != stream_id)
    return as_series(pending, "pending")


def _finding(
    trace: Trace, waits: pl.DataFrame, later: bool, name: str, site: object
) -> Finding:
    events = waits["event_id"].n_unique()
    plural = "s" if events > 1 else ""
    when = "is not recorded before" if later else "is never recorded"
    if events > 1:
        when = when.replace("is", "are")
    calls = trace.runtime_calls.join(
        waits, on=["pid", "tid", "start_ns"], how="semi", maintain_order="left"
    )
    return Finding(
        message=f"{waits.height} call{'s' if waits.height > 1 else ''} of {name} wait"
        f"{'' if waits.height > 1 else 's'} for {events} event{plural} that {when}: "
        "nothing is waited for",
        severity=Severity.INFO if later else Severity.ERROR,
        confidence=Confidence.LOW if later else Confidence.HIGH,
        cost=Cost(Claim.NONE, None, None, "a fault of order, not of time"),
        where=locate(trace, calls=calls),
        occurrences=waits.height,
        evidence=tuple(
            Evidence(
                row["start_ns"],
                row["end_ns"],
                f"{name} finds no record of event {row['event_id']}",
                row["correlation_id"],
            )
            for row in waits.head(5).iter_rows(named=True)
        ),
        fix="call cudaEventRecord on the stream to wait for, after its work and before "
        "the wait is issued",
        identity=("unrecorded", name, "later" if later else "never", str(site or "")),
    )

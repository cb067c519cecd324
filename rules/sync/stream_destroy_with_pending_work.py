"""Rule stream-destroy-with-pending-work."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding, Severity
from streamlint.rule import Outcome, rule
from streamlint.steady import column, groups, in_scope, of_process
from streamlint.trace.model import Trace
from streamlint.unwaited import cut_off, unwaited
from streamlint.where import locate, sites


@rule(needs=("runtime_calls",))
def stream_destroy_with_pending_work(trace: Trace) -> Outcome:
    """A stream is destroyed while its work runs, and nothing waits for that work.

    What it does
        Finds cudaStreamDestroy calls made while a stream that gets no further work
        had unfinished operations that no later call of the process waits for.
    Why it costs time
        It costs none; it is a matter of correctness. The call returns at once (10
        to 12 us with 20 ms of work pending, H200) and the work goes on. Code that
        takes the destruction for a wait reads results too early, and once the
        stream is gone only a device-wide wait or an older event can tell the end.
    Evidence
        The call and the operations that ended after it, of streams without later
        work, whose end no synchronization, blocking copy, answered query, free or
        host function of the rest of the recording tells. A trace doesn't name the
        stream that is destroyed: confidence is high only where every stream alive
        was such a one.
    Exemptions
        Streams waited for before or after the call, per-thread and default streams,
        recordings that were cut off or lost events (not assessed).
    Fix
        Call cudaStreamSynchronize before cudaStreamDestroy, or record an event
        after the last operation and wait for that before results are used.
    References
        CUDA Runtime API, cudaStreamDestroy: "the function will return immediately
        and the resources associated with the stream will be released automatically
        once the device has completed all work".
    """
    calls = trace.runtime_calls.filter(
        (pl.col("kind") == "stream destroy")
        & ~pl.col("nested")
        & (pl.col("return_value").fill_null(0) == 0)
        & in_scope(trace)
    )
    if not calls.height:
        return []
    made = pl.col("stream_kind").is_in(("blocking", "non-blocking", "unknown"))
    work = trace.gpu_ops.filter(made & pl.col("issue_ns").is_not_null())
    streams = work.group_by("pid", "stream_id").agg(
        pl.col("issue_ns").max().alias("last_ns"), pl.col("end_ns").max()
    )
    calls = _with_candidates(trace, calls, streams)
    if not calls.height:
        return []
    # The dearer question last: whether something later waits after all.
    left = unwaited(trace).filter(made)
    streams = streams.join(left, on=["pid", "stream_id"], how="semi")
    calls = _with_candidates(trace, calls.select(trace.runtime_calls.columns), streams)
    if not calls.height:
        return []
    if unable := cut_off(trace):
        return unable
    calls = calls.with_columns(sites(trace, calls))
    return [
        _finding(trace, here, left, site)
        for (_, site), here in groups(calls, "pid", "site")
    ]


def _with_candidates(
    trace: Trace, calls: pl.DataFrame, streams: pl.DataFrame
) -> pl.DataFrame:
    """Calls at which streams had their last work pending.

    With how many (pending) of how many (alive), and when the last ended (until_ns).
    """
    parts: list[pl.DataFrame] = []
    for (pid,), here in groups(calls, "pid"):
        at = column(here, "start_ns")
        own = of_process(streams, pid).sort("last_ns")
        ends = column(own, "end_ns")
        issued = np.searchsorted(column(own, "last_ns"), at)
        ended = np.searchsorted(np.sort(ends), at, side="right")
        until = np.concatenate([[0], np.maximum.accumulate(ends)])[issued]
        alive = np.zeros(len(at), dtype=np.int64)
        for kind, sign in (("stream create", 1), ("stream destroy", -1)):
            of_kind = trace.runtime_calls.filter(
                (pl.col("pid") == pid) & (pl.col("kind") == kind) & ~pl.col("nested")
            )
            alive += sign * np.searchsorted(column(of_kind, "start_ns"), at)
        parts.append(
            here.with_columns(
                as_series(issued - ended, "pending"),
                as_series(alive, "alive"),
                as_series(until, "until_ns"),
            )
        )
    return pl.concat(parts).filter(pl.col("pending") > 0)


def _finding(
    trace: Trace, calls: pl.DataFrame, left: pl.DataFrame, site: object
) -> Finding:
    first, last = calls["start_ns"].min(), calls["start_ns"].max()
    pid = calls["pid"][0]
    pending = left.filter(
        (pl.col("pid") == pid)
        & (pl.col("issue_ns") < last)
        & (pl.col("end_ns") > first)
    )
    certain = (calls["pending"] >= calls["alive"]).all()
    found = min(calls.height, pending["stream_id"].n_unique())
    longest = int((column(calls, "until_ns") - column(calls, "start_ns")).max())
    one = found == 1
    return Finding(
        message=f"{found} stream{' is' if one else 's are'} destroyed up to "
        f"{longest / 1e6:.2f} ms before the work on "
        f"{'it' if one else 'them'} ends, and nothing waits for that work",
        severity=Severity.MEDIUM,
        confidence=Confidence.HIGH if certain else Confidence.LOW,
        cost=Cost(Claim.NONE, None, None, "cudaStreamDestroy doesn't wait"),
        where=locate(trace, calls=calls, ops=pending),
        occurrences=found,
        evidence=tuple(
            Evidence(start, end, f"{name} while work is pending", correlation_id)
            for start, end, name, correlation_id in calls.select(
                "start_ns", "end_ns", "name", "correlation_id"
            )
            .head(5)
            .iter_rows()
        ),
        fix="call cudaStreamSynchronize before cudaStreamDestroy, or wait for an event "
        "recorded after the last operation before results are used",
        identity=("destroy", str(site or "")),
    )

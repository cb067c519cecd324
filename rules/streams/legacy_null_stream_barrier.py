"""Rule legacy-null-stream-barrier."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from streamlint.arrays import as_series, earlier_max
from streamlint.blocking import concurrent_regions
from streamlint.changes import Change
from streamlint.completeness import sizes_unknown
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.intervals import Bools, Int64, Intervals, union
from streamlint.replay import Edge, replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, in_scope, in_time, of_process
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

HANDOVER_NS = 10_000
"""An operation that starts this soon after another ended was waiting for it.

Measured on an H200: 1.0 to 3.4 us from the end of a barrier to the next start.
"""
MIN_HELD = Threshold(
    "min-held",
    3,
    "held operations",
    "Fewer held operations are start-up, not a pattern.",
)
LATENT_TURNS = Threshold(
    "min-turns",
    6,
    "turns between NULL-stream and blocking work",
    "Three rounds of NULL-stream and blocking work, there and back.",
)

_BEFORE = np.iinfo(np.int64).min


@rule(needs=("runtime_calls",))
def legacy_null_stream_barrier(trace: Trace) -> Outcome:
    """Work on the legacy default stream keeps other streams from running beside it.

    What it does
        Finds work on a context's NULL stream (kernel, copy, memset or event
        record) that held back operations of the context's blocking streams, or
        was held back by them.
    Why it costs time
        The legacy default stream synchronizes with every blocking stream of its
        context: it starts after all their earlier work and their later work
        starts after it, so streams that could overlap take turns.
    Evidence
        An operation counts as held when it was issued and at the head of its
        stream, and started within 10 us of the end of the barrier (or the barrier
        of the last blocking work before it). The cost is an upper bound: the run
        replayed without these barriers. A trace can't show whether the work on the
        NULL stream depends on the other streams.
    Exemptions
        Non-blocking streams, per-thread default streams among themselves, other
        contexts, a process that uses only one stream, barriers with nothing to
        hold, kernels that fill the GPU anyway, streams that wait for an event.
    Fix
        Create streams with cudaStreamNonBlocking, pass a stream to every launch,
        copy, memset and event record, or compile with --default-stream
        per-thread. Where the order was needed, replace it by an event
        (cudaEventRecord, cudaStreamWaitEvent), or results may race.
    References
        CUDA Runtime API, "Stream synchronization behavior"; CUDA C++ Programming
        Guide, "Default stream" and "Implicit synchronization".
    """
    findings: list[Finding] = []
    unable: NotAssessed | None = None
    for pid, region in concurrent_regions(trace).items():
        ops = of_process(trace.gpu_ops, pid)
        for (context,), here in groups(ops, "context_id"):
            if here["stream_id"].n_unique() < 2:
                continue
            if (here["stream_kind"] == "unknown").any():
                unable = _unknown_streams(here)
                continue
            kinds = {*here["stream_kind"].unique()}
            barrier = "null" in kinds or trace.event_records.height
            if not barrier or kinds.isdisjoint(("blocking", "per-thread")):
                continue
            records = trace.event_records.filter(
                (pl.col("pid") == pid) & pl.col("context_id").eq_missing(context)
            )
            finding = _judge(trace, region, _in_issue_order(here), records)
            findings += [finding] if finding else []
    return findings or unable or []


class _Holds(NamedTuple):
    """Operations that the barrier held back; one entry a hold.

    ``rows`` index the operations; ``starts`` and ``ends`` are the waiting times;
    ``by_record`` tells that an event record was the barrier.
    """

    rows: Int64
    starts: Int64
    ends: Int64
    by_record: Bools


def _judge(
    trace: Trace, region: Region, ops: pl.DataFrame, records: pl.DataFrame
) -> Finding | None:
    null = ops.filter(pl.col("stream_kind") == "null")
    records = records.join(
        trace.streams.filter(pl.col("kind") == "null"),
        on=["pid", "stream_id"],
        how="semi",
    )
    holds = _holds(ops, records, _behind_event_wait(trace, ops), region)
    held = len(holds.rows)
    if held < trace.limit(MIN_HELD):
        return _latent(trace, region, ops, null)
    change = replayed(_change, trace, ops)
    waited = union(holds.starts, holds.ends)
    cost = price_change(
        trace,
        region,
        change,
        Claim.UPPER_BOUND,
        "the same work without the barriers, as if the default stream's work did not "
        "depend on the other streams",
        direct=price(
            Claim.UPPER_BOUND,
            _most_that_overlap_saves(ops, waited, region),
            region,
            "time in which the barrier held something back, at most the busy time "
            "less the longest single stream",
        ),
    )
    null, records = null.filter(in_time(trace)), records.filter(in_time(trace))
    causes = _cause_words(null, int(holds.by_record.any()) and records.height)
    strongest = np.argsort(holds.starts - holds.ends, kind="stable")[:5]
    evidence = tuple(
        Evidence(
            int(holds.starts[i]),
            int(holds.ends[i]),
            f"{row['name']} on stream {row['stream_id']} was held back",
            row["correlation_id"],
        )
        for i in strongest
        for row in [ops.row(int(holds.rows[i]), named=True)]
    )
    calls = calls_behind(trace, null)
    others = ops.filter(pl.col("stream_kind") != "null", in_time(trace))
    streams = others["stream_id"].n_unique()
    return Finding(
        message=f"work on the legacy default stream ({causes}) takes turns with "
        f"{streams} other stream{'s' if streams > 1 else ''}: "
        f"{held} operations were held back",
        severity=severity_of(cost),
        # Kernels that fill the GPU would take turns anyway.
        confidence=Confidence.LOW if sizes_unknown(ops) else Confidence.MEDIUM,
        cost=cost,
        where=locate(
            trace,
            calls=calls,
            ops=pl.concat([ops[as_series(holds.rows)], null.filter(in_scope(trace))]),
        ),
        occurrences=held,
        evidence=evidence,
        fix=_FIX,
        identity=("barrier", *sorted(null["name"].unique())[:8]),
        change=change,
    )


def _change(trace: Trace, ops: pl.DataFrame) -> Change:
    """Nothing waits for barriers in this context, all of whose operations are given."""
    replay = replay_of(trace)
    pid, context = ops.select("pid", "context_id").row(0)
    here = replay.graph.ops.select(
        (pl.col("pid") == pid)
        & (pl.col("context_id") == (-1 if context is None else context))
        & (pl.col("kind") != "record")
    )
    rows = np.flatnonzero(here.to_series().to_numpy())
    return Change(drop=replay.constraints(Edge.BARRIER, ops=rows))


_FIX = (
    "create the streams with cudaStreamNonBlocking, or give the default-stream work a "
    "stream of its own; keep an order that is needed with an event, or results may race"
)


def _latent(
    trace: Trace, region: Region, ops: pl.DataFrame, null: pl.DataFrame
) -> Finding | None:
    """Info where the streams take turns in issue order but nothing had to wait."""
    judged = ops.filter(
        region.holds() & (pl.col("stream_kind") != "non-blocking")
    ).select((pl.col("stream_kind") == "null").alias("null"))["null"]
    turns = int((judged != judged.shift(1)).sum()) if judged.len() else 0
    if turns < trace.limit(LATENT_TURNS):
        return None
    null = null.filter(in_scope(trace))
    first = null.row(0, named=True)
    calls = calls_behind(trace, null)
    return Finding(
        message="the legacy default stream and blocking streams are used in turn "
        f"{turns} times; they can't overlap, but nothing waited in this run",
        severity=Severity.INFO,
        confidence=Confidence.HIGH,
        cost=Cost(Claim.NONE, None, None, "no operation was held back"),
        where=locate(trace, calls=calls, ops=null),
        occurrences=turns,
        evidence=(
            Evidence(
                first["start_ns"],
                first["end_ns"],
                f"{first['name']} on the legacy default stream",
                first["correlation_id"],
            ),
        ),
        fix=_FIX,
        identity=("latent", *sorted(null["name"].unique())[:8]),
    )


def _in_issue_order(ops: pl.DataFrame) -> pl.DataFrame:
    """Operations with ready_ns: issued, and the earlier ones of the stream done."""
    ordered = ops.with_columns(
        pl.coalesce("issue_ns", "start_ns").alias("issue_ns")
    ).sort("issue_ns", maintain_order=True)  # by start_ns they are sorted
    before = as_series(earlier_max(ordered["end_ns"], ordered["stream_id"]))
    return ordered.with_columns(pl.max_horizontal("issue_ns", before).alias("ready_ns"))


def _holds(
    ops: pl.DataFrame, records: pl.DataFrame, excused: Bools, region: Region
) -> _Holds:
    """Finds the held operations with two running maxima over the issue order."""
    issue, ready = column(ops, "issue_ns"), column(ops, "ready_ns")
    start, end = column(ops, "start_ns"), column(ops, "end_ns")
    null = (ops["stream_kind"] == "null").to_numpy()
    synced = ops["stream_kind"].is_in(("blocking", "per-thread")).to_numpy()

    if not null.any() and not records.height:
        nothing = np.empty(0, dtype=np.int64)
        return _Holds(nothing, nothing, nothing, nothing.astype(np.bool_))

    # What each operation waits for: a NULL-stream operation for the last blocking
    # one issued before it, a blocking one for the last barrier issued before it.
    blocking_end, holder = _running_max(end[synced])
    blocking_row = np.flatnonzero(synced)[holder]
    record_at = column(records.drop_nulls("start_ns"), "start_ns")
    done, by = _at(blocking_end, blocking_row, issue[synced], record_at)
    barrier_at = np.concatenate([issue[null], record_at])
    barrier_end = np.concatenate([end[null], done])
    barrier_row = np.concatenate([np.flatnonzero(null), by])
    is_record = np.arange(len(barrier_at)) >= int(null.sum())
    order = np.argsort(barrier_at, kind="stable")
    latest, which = _running_max(barrier_end[order])
    until, index = _at(latest, which, barrier_at[order], issue)
    cause = np.where(index >= 0, barrier_row[order][index], -1)
    recorded = (index >= 0) & is_record[order][index]
    null_until, null_cause = _at(blocking_end, blocking_row, issue[synced], issue)
    until = np.where(null, null_until, until)
    cause = np.where(null, null_cause, cause)

    pinned = (until > ready) & (start >= until) & (start - until <= HANDOVER_NS)
    held = (null | synced) & (cause >= 0) & pinned & ~excused
    held &= _could_run_together(ops, cause)
    held &= (start > region.start_ns) & (ready < region.end_ns) & region.chosen(ops)
    rows = np.flatnonzero(held)
    starts = ready[rows].clip(region.start_ns, region.end_ns)
    ends = start[rows].clip(region.start_ns, region.end_ns)
    return _Holds(rows, starts, ends, (recorded & ~null)[rows])


def _running_max(values: Int64) -> tuple[Int64, Int64]:
    """Running maximum and the index of its latest holder."""
    latest = np.maximum.accumulate(values)
    last = np.where(values == latest, np.arange(len(values)), 0)
    return latest, np.maximum.accumulate(last)


def _at(
    latest: Int64, holder: Int64, ascending: Int64, instants: Int64
) -> tuple[Int64, Int64]:
    """The running values just before each instant; minimum and -1 before the first."""
    before = np.searchsorted(ascending, instants, side="left") - 1
    if not len(latest):
        return np.full(len(instants), _BEFORE), np.full(len(instants), -1)
    known = before >= 0
    return (
        np.where(known, latest[before], _BEFORE),
        np.where(known, holder[before], -1),
    )


def _could_run_together(ops: pl.DataFrame, cause: Int64) -> Bools:
    """Whether each operation could share the GPU with the one it waited for."""
    engine = ops["engine"].to_physical().to_numpy()
    is_compute = (ops["engine"] == "compute").to_numpy()
    is_memset = (ops["engine"] == "memset").to_numpy()
    fraction = ops["sm_fraction"].fill_null(0.0).to_numpy()
    other = np.maximum(cause, 0)
    same_engine = engine == engine[other]
    both_compute = same_engine & is_compute
    full = (fraction >= 1.0) | (fraction[other] >= 1.0)
    shared: Bools = ~same_engine | is_memset | (both_compute & ~full)
    return shared


def _behind_event_wait(trace: Trace, ops: pl.DataFrame) -> Bools:
    """Operations with a cudaStreamWaitEvent between them and their predecessor."""
    if "stream wait" not in trace.call_kinds:
        return np.zeros(ops.height, dtype=np.bool_)
    waits = (
        trace.event_waits.drop_nulls("stream_id")
        .select("pid", "stream_id", pl.col("start_ns").alias("wait_ns"))
        .sort("wait_ns")
    )
    previous = as_series(earlier_max(ops["issue_ns"], ops["stream_id"]), "previous_ns")
    behind = (
        ops.select("pid", "stream_id", "issue_ns", previous)
        .join_asof(
            waits,
            left_on="issue_ns",
            right_on="wait_ns",
            by=["pid", "stream_id"],
            check_sortedness=False,
        )
        .select((pl.col("wait_ns") > pl.col("previous_ns")).fill_null(value=False))
    )
    return behind.to_series().to_numpy()


def _most_that_overlap_saves(
    ops: pl.DataFrame, waited: Intervals, region: Region
) -> int:
    """Upper bound in ns: each busy span can shrink to its longest stream at best."""
    spans = union(column(ops, "issue_ns"), column(ops, "end_ns"))
    spans = region.clip(spans)
    longest = np.zeros(len(spans), dtype=np.int64)
    for _, stream in groups(ops.select("stream_id", "start_ns", "end_ns"), "stream_id"):
        running = union(column(stream, "start_ns"), column(stream, "end_ns"))
        longest = np.maximum(longest, running.overlap_ns(spans.starts, spans.ends))
    room = spans.ends - spans.starts - longest
    lost = waited.overlap_ns(spans.starts, spans.ends)
    return int(np.minimum(room, lost).sum())


def _cause_words(null: pl.DataFrame, records: int) -> str:
    counts = null.group_by("kind").len().sort("len", "kind", descending=[True, False])
    words = [_counted(n, kind) for kind, n in counts.iter_rows()]
    words += [_counted(records, "event record")] if records else []
    return ", ".join(words)


def _counted(number: int, noun: str) -> str:
    noun = {"memcpy": "copy"}.get(noun, noun)
    plural = "copies" if noun == "copy" else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def _unknown_streams(ops: pl.DataFrame) -> NotAssessed:
    unknown = ops.filter(pl.col("stream_kind") == "unknown")["stream_id"].n_unique()
    return NotAssessed(
        f"the export doesn't say whether {unknown} used streams are blocking",
        "record and export with nsys 2023.3 or newer, -t cuda",
    )

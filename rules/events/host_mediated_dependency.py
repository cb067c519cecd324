"""Rule host-mediated-dependency."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from streamlint.blocking import launches_block
from streamlint.changes import Change
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Evidence, Finding
from streamlint.intervals import Int64
from streamlint.replay import Edge, replay_of, replayed, spans
from streamlint.replay.graph import EVENT_NS
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, of_process, regions
from streamlint.trace.model import Trace
from streamlint.waits import host_waits
from streamlint.where import locate, sites, work_of

_WAITS = ("stream sync", "event sync")

MIN_HANDOVERS = Threshold(
    "min-handovers",
    3,
    "handovers",
    "Fewer are phases of the program, not a loop.",
)
MAX_HOST_NS = Threshold(
    "max-host-time",
    20_000,
    "ns",
    "A host that takes longer between wait and launch does something with the result.",
)
MIN_WAIT_NS = 4_000
"""Shorter waits found the work done (0.4 to 3.8 us, H200)."""


@rule(needs=("runtime_calls", "synchronizations"))
def host_mediated_dependency(trace: Trace) -> Outcome:
    """The host waits for one stream only to launch on another one.

    What it does
        Finds stream and event synchronizations after which the same thread, within
        20 us, issues work on a different stream.
    Why it costs time
        The GPU idles from the end of the one stream's work until the host has woken
        up, returned, launched, and the launch has arrived: 10 to 15 us each time. An
        event keeps the same order on the GPU, in about 2 us, while the host goes on.
    Evidence
        Waits for a stream that still had work, at least three times at one place,
        with nothing read back: no copy to the host in that stream since it was
        waited for before. The cost is a what-if that keeps the order: the run
        replayed with the other stream's work 2 us after that of the first, and the
        host issuing it while it waited, as far as that time sufficed.
    Exemptions
        Read-backs, waits for several streams in a row that include the one used
        next (a join), device-wide waits, waits that found the work done, other work
        of the host in between, launches that block.
    Fix
        Replace the wait by cudaEventRecord on the first stream and
        cudaStreamWaitEvent on the second. The host then runs ahead: wait before it
        reads or refills buffers of these streams, or data may race.
    References
        CUDA C++ Programming Guide, "Events" and "Explicit synchronization"; CUDA
        Runtime API, cudaStreamWaitEvent.
    """
    findings: list[Finding] = []
    if trace.call_kinds.isdisjoint(_WAITS) or trace.gpu_ops["stream_id"].n_unique() < 2:
        return findings
    waits = _waits_for_other_streams(trace)
    if waits.height < trace.limit(MIN_HANDOVERS):
        return findings
    for pid, region in regions(trace).items():
        here = waits.filter(region.holds())
        if here.height < trace.limit(MIN_HANDOVERS) or launches_block(trace, pid):
            continue
        calls = _without_readback(trace, here)
        if calls.height >= trace.limit(MIN_HANDOVERS):
            calls = _without_joins(trace, calls)
        if calls.height < trace.limit(MIN_HANDOVERS):
            continue
        calls = calls.with_columns(sites(trace, calls))
        place = ("tid", "name", "site")
        for (_, name, site), group in groups(calls, *place):
            if group.height >= trace.limit(MIN_HANDOVERS):
                findings.append(_finding(trace, region, group, str(name), site))
    return findings


def _waits_for_other_streams(trace: Trace) -> pl.DataFrame:
    """Waits for a stream followed at once by work on another: rows of host_waits.

    stream_id is that of the event for event synchronizations.
    """
    lasting = pl.col("end_ns") - pl.col("start_ns")
    # What they waited for is looked up for those alone that can be hand-overs.
    waits = host_waits(trace).filter(
        pl.col("kind").is_in(_WAITS)
        & (pl.col("next_issue_ns") - pl.col("end_ns") <= trace.limit(MAX_HOST_NS))
        & (pl.col("pending_streams") > 0)
        & (lasting >= MIN_WAIT_NS)
    )
    elsewhere = pl.col("stream_id") != pl.col("next_stream_id")
    few = waits.height < trace.limit(MIN_HANDOVERS)
    if few or not (waits["kind"] == "event sync").any():
        return waits.filter(elsewhere)
    key = ["pid", "correlation_id"]
    records = (
        trace.event_records.filter(pl.col("event_sync_id") > 0)
        .select("pid", "event_sync_id", pl.col("stream_id").alias("recorded_stream_id"))
        .unique(["pid", "event_sync_id"])
    )
    events = (
        trace.synchronizations.filter(pl.col("event_sync_id") > 0)
        .join(records, on=["pid", "event_sync_id"], how="inner", validate="m:1")
        .select(*key, "recorded_stream_id")
        .unique(key)
    )
    return (
        waits.join(events, on=key, how="left", validate="m:1", maintain_order="left")
        .with_columns(pl.coalesce("recorded_stream_id", "stream_id").alias("stream_id"))
        .drop("recorded_stream_id")
        .filter(elsewhere)
    )


def _without_readback(trace: Trace, waits: pl.DataFrame) -> pl.DataFrame:
    """Waits with no copy to the host in their stream since the wait before for it."""
    copies = (
        trace.gpu_ops.filter(pl.col("engine") == "DtoH")
        .select("pid", "stream_id", pl.col("issue_ns").alias("copy_ns"))
        .drop_nulls()
        .sort("copy_ns")
    )
    if not copies.height:
        return waits
    every = host_waits(trace).select(
        "pid", "stream_id", pl.col("end_ns").alias("waited_ns")
    )
    found = waits
    for frame, at in ((copies, "copy_ns"), (every.drop_nulls(), "waited_ns")):
        found = found.join_asof(
            frame.sort(at),
            left_on="start_ns",
            right_on=at,
            by=["pid", "stream_id"],
            check_sortedness=False,
        )
    read = pl.col("copy_ns") > pl.col("waited_ns").fill_null(np.iinfo(np.int64).min)
    return found.filter(~read.fill_null(value=False)).drop("copy_ns", "waited_ns")


def _without_joins(trace: Trace, waits: pl.DataFrame) -> pl.DataFrame:
    """Waits with none for the stream used next since the last work of the thread.

    ``waits`` are of one process.
    """
    pid = int(waits["pid"][0])
    issued = (
        of_process(trace.gpu_ops.select("pid", "tid", "issue_ns"), pid)
        .drop_nulls()
        .select("tid", pl.col("issue_ns").alias("worked_ns"))
        .sort("worked_ns")
    )
    every = of_process(host_waits(trace), pid).select(
        *("tid", "kind"),
        pl.col("stream_id").alias("next_stream_id"),
        pl.col("start_ns").alias("joined_ns"),
    )
    found = waits.join_asof(
        issued,
        left_on="start_ns",
        right_on="worked_ns",
        by="tid",
        check_sortedness=False,
    )
    of_device = every.filter(pl.col("kind") == "device sync")
    for frame, by in (
        (every.drop("kind").drop_nulls(), ["tid", "next_stream_id"]),
        (of_device.select("tid", "joined_ns"), ["tid"]),
    ):
        found = (
            found.join_asof(
                frame.sort("joined_ns"),
                left_on="next_issue_ns",
                right_on="joined_ns",
                by=by,
                check_sortedness=False,
            )
            .filter((pl.col("joined_ns") <= pl.col("worked_ns")).fill_null(value=True))
            .drop("joined_ns")
        )
    return found.drop("worked_ns")


def _finding(
    trace: Trace, region: Region, calls: pl.DataFrame, name: str, site: object
) -> Finding:
    change = replayed(_change, trace, calls)
    idle = int(calls["idle_ns"].sum())
    cost = price_change(
        trace,
        region,
        change,
        Claim.WHAT_IF,
        "the same order kept by events, the host issuing ahead",
        direct=price(
            Claim.UPPER_BOUND,
            idle,
            region,
            "device idle from the calls to the work after",
        ),
    )
    longest = calls.sort("idle_ns", descending=True, maintain_order=True).head(5)
    streams = {*calls["stream_id"].unique(), *calls["next_stream_id"].unique()}
    return Finding(
        message=f"{calls.height} times {name} waits for one stream and the thread goes "
        f"on with another at once; the GPU idles {idle / calls.height / 1e3:.1f} us "
        "on average at these hand-overs",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=calls, ops=work_of(trace, region, streams)),
        occurrences=calls.height,
        evidence=tuple(
            Evidence(
                row["start_ns"],
                row["next_issue_ns"],
                f"waits for stream {row['stream_id']}, then issues on stream "
                f"{row['next_stream_id']}",
                row["correlation_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix="record an event on the first stream and let the second wait for it "
        "(cudaStreamWaitEvent) instead of the host; wait before the host reads or "
        "refills their buffers, or data may race",
        identity=("hand-over", name, str(site or "")),
        change=change,
    )


def _change(trace: Trace, calls: pl.DataFrame) -> Change:
    """The host's way from the wait to the next work goes away, the order stays.

    What it does until its next wait it can do during this one, as far as time allows.
    """
    replay = replay_of(trace)
    graph = replay.graph
    waits = replay.calls_of(calls)
    after, covered = _host_work_after(trace, waits)
    remaining = 1.0 - covered
    ops = replay.ops_issued_by(after)
    early = covered[np.searchsorted(after, graph.issue_call[ops])]
    issue = graph.issue_latency[ops] * (1.0 - early) + EVENT_NS * early
    returns = replay.constraints(Edge.WAIT, calls=waits)
    return Change(
        call_duration=(after, _rounded(graph.call_duration[after] * remaining)),
        think=(after, _rounded(graph.think_ns[after] * remaining)),
        latency=(returns, np.zeros(len(returns), dtype=np.int64)),
        issue_latency=(ops, _rounded(issue)),
    )


def _host_work_after(trace: Trace, waits: Int64) -> tuple[Int64, np.ndarray]:
    """Calls between these waits and the next ones, and which part fits in the wait."""
    graph = replay_of(trace).graph
    segments = trace.derived(_segments)
    # Waits begin segments, each its own.
    number = segments.number[waits]
    blocked = graph.call_end[waits] - graph.call_first[waits]
    blocked = blocked - graph.call_duration[waits]
    part = (blocked / segments.work_ns[number].clip(1)).clip(0.0, 1.0)
    first, last = segments.begins[number] + 1, segments.begins[number + 1]
    after = segments.calls[spans(first, last)]
    covered = np.repeat(part, last - first)
    order = np.argsort(after, kind="stable")
    return after[order], covered[order]


class _Segments(NamedTuple):
    """Calls of a thread from one wait to the next.

    ``number`` is that of each call's segment, ``calls`` has them segment by segment,
    in which each ``begins`` (one more than there are), and ``work_ns`` what the thread
    does there but for the wait.
    """

    number: Int64
    calls: Int64
    begins: Int64
    work_ns: Int64


def _segments(trace: Trace) -> _Segments:
    graph = replay_of(trace).graph
    blocking = ("stream sync", "event sync", "device sync", "sync memcpy")
    is_wait = graph.calls["kind"].is_in(blocking).to_numpy()
    pid, tid = column(graph.calls, "pid"), column(graph.calls, "tid")
    by_thread = np.lexsort((tid, pid))
    begins = is_wait[by_thread]
    begins[:1] = True
    begins[1:] |= (np.diff(pid[by_thread]) != 0) | (np.diff(tid[by_thread]) != 0)
    number = np.empty(len(begins), dtype=np.int64)
    number[by_thread] = np.cumsum(begins) - 1
    work = np.where(is_wait, 0, graph.call_duration + graph.think_ns)
    work_ns = np.zeros(int(begins.sum()), dtype=np.int64)
    np.add.at(work_ns, number, work)
    return _Segments(
        number, by_thread, np.append(np.flatnonzero(begins), len(begins)), work_ns
    )


def _rounded(values: np.ndarray) -> Int64:
    rounded: Int64 = np.rint(values).astype(np.int64)
    return rounded

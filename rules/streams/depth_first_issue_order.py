"""Rule depth-first-issue-order."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series, earlier_max
from streamlint.blocking import concurrent_regions
from streamlint.cost import price, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding, NotAssessed
from streamlint.intervals import union
from streamlint.readiness import with_ready
from streamlint.replay import Edge
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

MIN_GAPS = Threshold(
    "min-gaps",
    3,
    "gaps",
    "Fewer idle gaps of a copy engine are no pattern; four pieces leave three.",
)
MIN_IDLE_NS = Threshold(
    "min-gap",
    10_000,
    "ns",
    "Shorter gaps are the hand-over from one copy to the next (1 to 2 us).",
)
HANDOVER_NS = 10_000
"""A copy that starts this soon after another one was waiting for the engine."""


@rule(needs=("memcpys", "runtime_calls"))
def depth_first_issue_order(trace: Trace) -> Outcome:
    """A copy engine idles although a copy is ready, because another was issued first.

    What it does
        Finds times in which a copy engine had nothing to do, while a copy that was
        ready stood in line behind one issued earlier, on another stream, that was
        waiting for its kernel.
    Why it costs time
        Where one engine serves uploads and downloads, it takes them in the order in
        which they were issued. Upload, kernel and download of one piece before
        those of the next (depth first) puts the next upload behind a download that
        can't start before its kernel has ended.
    Evidence
        At least three gaps of over 10 us between copies of one engine, each with a
        copy whose call had returned and whose dependencies were done, which was
        issued after the copy that ended the gap and followed it on the engine
        without pause. The cost is the idle time of the engine while such a copy
        was ready, nothing more: what another order saves depends on the lengths of
        copies and kernels.
    Exemptions
        Engines that were never idle with work in line, which is the rule on GPUs
        with an engine for each direction, whatever the order of issue; copies that
        wait for an event, for pageable memory or for a shared work queue.
    Fix
        Issue breadth-first: the uploads of all pieces, then all kernels, then all
        downloads, each on its stream. The streams keep every dependency, so no
        wait is needed that wasn't before.
    References
        CUDA C++ Programming Guide, "Overlapping behavior" of streams; CUDA C++ Best
        Practices Guide, "Asynchronous and overlapping transfers with computation".
    """
    findings = _judge(trace, _in_lanes(trace))
    if findings or not trace.gpu_ops.filter(_engines_unknown(trace)).height:
        return findings
    if not _judge(trace, _in_lanes(trace, _engines_unknown(trace))):
        return findings
    return NotAssessed(
        "the export doesn't say how many copy engines the GPU has: with one, copies "
        "waited for copies that were issued first",
        "export again with nsys 2021.3 or newer, all tables and columns",
    )


def _judge(trace: Trace, copies: pl.DataFrame) -> list[Finding]:
    findings: list[Finding] = []
    if not copies.height:
        return findings
    gaps = _gaps(trace, copies)
    judged = [
        region
        for region in concurrent_regions(trace).values()
        if gaps.filter(region.holds("until_ns")).height >= trace.limit(MIN_GAPS)
    ]
    if judged:
        gaps = _gaps(trace, with_ready(trace, copies.drop("ready_ns"), Edge.ENGINE))
    for region in judged:
        here = gaps.filter(region.holds("until_ns"))
        for _, of_lane in groups(here, "lane", "context_id"):
            if of_lane.height >= trace.limit(MIN_GAPS):
                findings.append(_finding(trace, region, of_lane))
    return findings


def _engines_unknown(trace: Trace) -> pl.Expr:
    """Whether an operation's GPU has an unknown number of copy engines."""
    known = trace.gpus.drop_nulls("async_engines")["gpu_id"].implode()
    copies = pl.col("engine").is_in(("HtoD", "DtoH"))
    return copies & ~pl.col("gpu_id").is_in(known).fill_null(value=False)


def _in_lanes(trace: Trace, one_engine: pl.Expr | None = None) -> pl.DataFrame:
    """Copies by the engine that serves them (lane), of lanes with several streams.

    Where ``one_engine`` holds, one serves both directions, as on GPUs with only one.

    ready_ns leaves out what only the replay knows: events, barriers and queues.
    """
    single = trace.gpus.filter(pl.col("async_engines") == 1)["gpu_id"].implode()
    place = pl.concat_str(
        pl.coalesce("gpu_id", pl.col("pid") * 1_000 + pl.col("device_id")),
        pl.when(
            pl.col("gpu_id").is_in(single)
            | (False if one_engine is None else one_engine)
        )
        .then(pl.lit("copies"))
        .otherwise("engine"),
        separator=" ",
    )
    ops = trace.gpu_ops
    before = as_series(earlier_max(ops["end_ns"], ops["pid"], ops["stream_id"]))
    called = pl.min_horizontal("issue_end_ns", "start_ns")
    return (
        ops.with_columns(
            pl.when(pl.col("issue_ns").is_null())
            .then("start_ns")
            .otherwise(pl.max_horizontal(called, before))
            .alias("ready_ns")
        )
        .filter(pl.col("engine").is_in(("HtoD", "DtoH")))
        .with_columns(place.fill_null("?").alias("lane"))
        .filter(pl.struct("pid", "stream_id").n_unique().over("lane") > 1)
        .sort("start_ns", "end_ns")
    )


def _gaps(trace: Trace, copies: pl.DataFrame) -> pl.DataFrame:
    """Copies that ended an idle gap of their engine while another one was ready.

    With idle_ns and until_ns, the part of the gap with a copy ready, and the kind and
    stream of that copy (waiting, waiting_stream).
    """
    parts: list[pl.DataFrame] = []
    for _, lane in groups(copies, "lane"):
        start, end = column(lane, "start_ns"), column(lane, "end_ns")
        free = lane["ready_ns"].to_numpy()
        pid, stream = column(lane, "pid"), column(lane, "stream_id")
        issued = lane["issue_ns"].fill_null(0).to_numpy()
        reached = np.maximum.accumulate(end)
        first, then = np.arange(len(start) - 1), np.arange(1, len(start))
        idle = np.concatenate([start[:1], reached[:-1]])[first]
        since = np.maximum(idle, free[then])
        # Not the copy's own latency, but what it depends on, left the engine idle.
        held = free[first] - since >= trace.limit(MIN_IDLE_NS)
        held &= pid[then] == pid[first]
        held &= (stream[then] != stream[first]) & (issued[then] > issued[first])
        held &= (start[then] >= end[first]) & (start[then] - end[first] <= HANDOVER_NS)
        rows = np.flatnonzero(held)
        parts.append(
            lane[as_series(rows)].with_columns(
                as_series(since[rows], "idle_ns"),
                as_series(start[rows], "until_ns"),
                lane["engine"][as_series(rows + 1)].alias("waiting"),
                lane["stream_id"][as_series(rows + 1)].alias("waiting_stream"),
            )
        )
    return pl.concat(parts)


def _cost(gaps: pl.DataFrame, region: Region) -> Cost:
    """The replay keeps the order in which engines serve copies, so the gaps alone."""
    idle = union(column(gaps, "idle_ns"), column(gaps, "until_ns"))
    return price(
        Claim.DIRECT,
        region.clip(idle).total_ns,
        region,
        "time in which the copy engine idled with a copy ready",
    )


def _finding(trace: Trace, region: Region, gaps: pl.DataFrame) -> Finding:
    cost = _cost(gaps, region)
    longest = gaps.sort(pl.col("until_ns") - pl.col("idle_ns"), descending=True)
    calls = calls_behind(trace, gaps)
    engine = "the copy engine" if gaps["lane"][0].endswith("copies") else "an engine"
    return Finding(
        message=f"{engine} idled {(cost.ns or 0) / 1e6:.2f} ms in {gaps.height} gaps "
        "while a copy that was ready stood in line behind one that waited for its "
        "kernel",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=calls, ops=gaps),
        occurrences=gaps.height,
        evidence=tuple(
            Evidence(
                row["idle_ns"],
                row["until_ns"],
                f"idle: the {row['waiting']} copy of stream {row['waiting_stream']} is "
                f"ready behind the {row['engine']} copy of stream {row['stream_id']}",
                row["correlation_id"],
            )
            for row in longest.head(5).iter_rows(named=True)
        ),
        fix="issue breadth-first: the uploads of all pieces, then all kernels, then "
        "all downloads, each on the stream of its piece",
        identity=("head of line", *sorted(set(gaps["engine"]))),
    )

"""Rule graph-exec-self-serialization."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.blocking import concurrent_regions
from streamlint.changes import Change
from streamlint.completeness import graphs_unknown
from streamlint.cost import price, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding
from streamlint.held import in_issue_order, price_without_delay, without_delay
from streamlint.intervals import union
from streamlint.replay import Edge, replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, in_time
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate, ops_asked_by, sites

MIN_HELD = Threshold(
    "min-held",
    3,
    "held launches",
    "Fewer launches in turn are start-up, not a pattern.",
)
HANDOVER_NS = 10_000
"""A launch that begins this soon after another has ended waited for it.

Measured on an H200: 2.3 us.
"""
MAX_FRACTION = Threshold(
    "max-gpu-share",
    0.5,
    "share",
    "Kernels that fill more than half of the GPU would hardly run beside each other.",
)


@rule(needs=("runtime_calls",))
def graph_exec_self_serialization(trace: Trace) -> Outcome:
    """Launches of one executable graph in several streams wait for each other.

    What it does
        Finds an executable graph that is launched into more than one stream, where
        a launch had to wait for the one before it in another stream.
    Why it costs time
        An executable graph never runs beside itself: its launches are ordered, in
        whatever stream they are, so streams made to overlap take turns.
    Evidence
        Launches that were issued and at the head of their stream while the launch
        before was still running, and began within 10 us of its end, at least three
        times. The cost is an upper bound: the run replayed without these delays, as
        if the launches did not depend on each other and shared the GPU freely; each
        stream keeps its own order.
    Exemptions
        Streams that wait for an event, work on the legacy default stream beside
        blocking streams, graphs whose kernels fill more than half of the GPU.
    Fix
        Instantiate the graph once for each stream (cudaGraphInstantiate) and launch
        each executable graph into one stream only. Both use the same buffers unless
        the parameters of their nodes are set apart, or results may race.
    References
        CUDA C++ Programming Guide, "Using graph APIs": an executable graph does not
        run concurrently with itself; cudaGraphLaunch.
    """
    findings: list[Finding] = []
    if "graph launch" not in trace.call_kinds:
        return findings
    launched = trace.runtime_calls.filter(pl.col("kind") == "graph launch")
    in_graph = (pl.col("kind") == "graph") | pl.col("graph_node_id").is_not_null()
    streams = trace.gpu_ops.filter(in_graph)["stream_id"]
    if launched.height <= trace.limit(MIN_HELD):
        return findings
    if streams.n_unique() < 2:
        return graphs_unknown(trace) or findings
    for pid, region in concurrent_regions(trace).items():
        launches = _launches(trace, pid)
        shared = pl.col("stream_id").n_unique().over("exec") > 1
        held = _held(trace, launches.filter(shared)).filter(region.holds())
        if held.height < trace.limit(MIN_HELD):
            continue
        calls = launched.join(held, on=["pid", "correlation_id"], how="semi")
        place = calls.with_columns(sites(trace, calls)).select("correlation_id", "site")
        placed = held.join(place, on="correlation_id", how="left", validate="1:1")
        for (site,), here in groups(placed, "site"):
            if here.height >= trace.limit(MIN_HELD):
                findings.append(_finding(trace, region, launches, here, site))
    return findings


def _launches(trace: Trace, pid: int) -> pl.DataFrame:
    """Graph launches of a process, one row each, in issue order.

    pid, exec, correlation_id, stream_id, stream_kind, issue_ns, ready_ns, after_wait,
    start_ns, end_ns, fraction (largest part of the GPU that a kernel asks for).
    """
    key = ["pid", "correlation_id"]
    traced = trace.graph_traces.select(*key, pl.col("graph_exec_id").alias("traced"))
    return (
        in_issue_order(trace, pid)
        .join(traced.unique(key), on=key, how="left", validate="m:1")
        .with_columns(
            pl.coalesce(pl.col("graph_node_id") // 2**32, "traced").alias("exec")
        )
        .drop_nulls("exec")
        .sort("issue_ns", "start_ns", maintain_order=True)
        .group_by(*key, "exec", maintain_order=True)
        .agg(
            pl.col("stream_id", "stream_kind", "issue_ns", "ready_ns").first(),
            pl.col("after_wait").first(),
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            pl.col("sm_fraction").max().alias("fraction"),
        )
    )


def _held(trace: Trace, launches: pl.DataFrame) -> pl.DataFrame:
    """Launches that waited for the one before of their executable graph: + until_ns."""
    before = pl.col("end_ns", "stream_id", "stream_kind").shift(1).over("exec")
    kinds = ("stream_kind", "before_stream_kind")
    ordered_anyway = pl.any_horizontal(pl.col(kinds) == "null") & pl.any_horizontal(
        pl.col(kinds).is_in(("blocking", "per-thread"))
    )
    late = pl.col("start_ns") - pl.col("before_end_ns")
    return launches.with_columns(before.name.prefix("before_")).filter(
        (pl.col("stream_id") != pl.col("before_stream_id"))
        & (pl.col("ready_ns") < pl.col("before_end_ns"))
        & late.is_between(0, HANDOVER_NS)
        & ~pl.col("after_wait")
        & ~ordered_anyway
        & (pl.col("fraction").fill_null(0.0) <= trace.limit(MAX_FRACTION))
    )


def _finding(
    trace: Trace,
    region: Region,
    launches: pl.DataFrame,
    held: pl.DataFrame,
    site: object,
) -> Finding:
    alike = launches.filter(in_time(trace)).join(held, on="exec", how="semi")
    change = replayed(_change, trace, alike, held)
    ops = ops_asked_by(trace, held)
    cost = price_without_delay(
        trace,
        region,
        change,
        ops,
        "the same work with an executable graph for each stream",
        _cost(alike.filter(region.holds()), held, region),
    )
    calls = calls_behind(trace, held)
    streams = alike["stream_id"].n_unique()
    waiting = (pl.col("start_ns") - pl.col("ready_ns")).alias("waiting_ns")
    longest = held.sort(waiting, descending=True, maintain_order=True).head(5)
    return Finding(
        message=f"one executable graph is launched into {streams} streams: "
        f"{held.height} launches waited for the one before in another stream",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=calls, ops=ops),
        occurrences=held.height,
        evidence=tuple(
            Evidence(
                row["ready_ns"],
                row["start_ns"],
                f"launch on stream {row['stream_id']} waits for the one on stream "
                f"{row['before_stream_id']}",
                row["correlation_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix="instantiate the graph once for each stream, with buffers of its own where "
        "the launches may now overlap, or results may race",
        identity=(
            "one executable graph",
            str(site or ""),
            *sorted(ops["name"].unique())[:8],
        ),
        change=change,
    )


def _cost(launches: pl.DataFrame, held: pl.DataFrame, region: Region) -> Cost:
    """The launches would still take as long as those of the busiest stream."""
    waited = union(column(held, "ready_ns"), column(held, "start_ns"))
    lasting = pl.col("end_ns") - pl.col("start_ns")
    by_stream = launches.group_by("stream_id").agg(lasting.sum())["end_ns"]
    others = int(by_stream.sum()) - int(np.max(by_stream.to_numpy(), initial=0))
    return price(
        Claim.UPPER_BOUND,
        min(region.clip(waited).total_ns, others),
        region,
        "time in which a launch waited for the one before, at most that of the "
        "launches in all streams but the busiest",
    )


def _change(trace: Trace, launches: pl.DataFrame, held: pl.DataFrame) -> Change:
    """Held launches start when they can; their kernels share the multiprocessors.

    The recorded order of the kernels is that of the launches in turn, and would keep
    them in turn.
    """
    replay = replay_of(trace)
    key = ["pid", "correlation_id"]
    ops = trace.gpu_ops
    late = without_delay(replay, replay.ops_of(ops.join(held, on=key, how="semi")))
    kernels = ops.filter(pl.col("kind") == "kernel").join(launches, on=key, how="semi")
    room = replay.constraints(Edge.ENGINE, ops=replay.ops_of(kernels))
    return Change(drop=room, latency=late.latency, issue_latency=late.issue_latency)

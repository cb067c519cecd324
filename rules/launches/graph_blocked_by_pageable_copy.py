"""Rule graph-blocked-by-pageable-copy."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.blocking import concurrent_regions
from streamlint.changes import Change
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Evidence, Finding, NotAssessed
from streamlint.replay import replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups
from streamlint.trace.model import Trace
from streamlint.where import locate, ops_asked_by, sites

MIN_LAUNCHES = Threshold(
    "min-launches",
    3,
    "blocked launches",
    "Fewer are start-up, not a loop.",
)
MIN_BLOCKED_NS = Threshold(
    "min-blocked",
    200_000,
    "ns",
    "A launch that takes longer was blocked. Traced by node, launches of 50 nodes take "
    "66 to 74 us and the first 168 us (H200); launches with copies of pageable memory "
    "took 1.5 to 141 ms.",
)
LAUNCH_NS = 70_000
"""A launch that nothing blocks, traced by node (H200)."""


@rule(needs=("memcpys", "runtime_calls"))
def graph_blocked_by_pageable_copy(trace: Trace) -> Outcome:
    """cudaGraphLaunch waits because the graph copies pageable host memory.

    What it does
        Finds launches of graphs with copies from or to pageable host memory that
        returned only after such a copy had begun.
    Why it costs time
        A launch of a graph returns at once, unless the graph copies pageable memory:
        then the host takes part in the copies and the launch waits for them and for
        all work of the graph before them. Such launches took 1.5 to 141 ms.
    Evidence
        Copies of the launch whose host side is pageable, in launches of at least
        200 us that ended after the start of the copy, at least three times. The
        cost is a lower bound: the run replayed with launches of 70 us, the copies
        themselves as slow as they are.
    Exemptions
        Graphs that copy page-locked memory only, launches that returned before the
        copies. Graphs traced as a whole don't show their copies: where a launch
        takes long, the rule can't tell.
    Fix
        Allocate the buffers of the copies with cudaHostAlloc, or register them with
        cudaHostRegister, once. The launch then returns before the copies are done:
        synchronize before the host reads or refills the buffers, or data may race.
    References
        CUDA C++ Programming Guide, "Page-locked host memory"; CUDA Runtime API,
        cudaGraphLaunch, "API synchronization behavior".
    """
    launches = trace.runtime_calls.filter(
        (pl.col("kind") == "graph launch")
        & ~pl.col("nested")
        & (pl.col("end_ns") - pl.col("start_ns") >= trace.limit(MIN_BLOCKED_NS))
    )
    findings: list[Finding] = []
    if launches.height < trace.limit(MIN_LAUNCHES):
        return findings
    pageable = pl.any_horizontal(pl.col("src_kind", "dst_kind") == "pageable")
    blocked = _during_copies(trace, launches, pageable)
    for region in concurrent_regions(trace).values():
        here = blocked.filter(region.holds())
        here = here.with_columns(sites(trace, here))
        for (site,), place in groups(here, "site"):
            if place.height >= trace.limit(MIN_LAUNCHES):
                findings.append(_finding(trace, region, place, site))
    return findings or _unknown(trace, launches) or []


def _during_copies(
    trace: Trace, launches: pl.DataFrame, of_memory: pl.Expr
) -> pl.DataFrame:
    """Launches still in the call as a copy of such memory in their graph began.

    Adds copy_ns (when the first one began) and copies.
    """
    key = ["pid", "correlation_id"]
    copies = (
        trace.memcpys.filter(of_memory)
        .join(launches, on=key, how="semi")
        .group_by(key, maintain_order=True)
        .agg(pl.col("start_ns").min().alias("copy_ns"), pl.len().alias("copies"))
    )
    return launches.join(
        copies, on=key, how="inner", validate="1:1", maintain_order="left"
    ).filter(pl.col("end_ns") >= pl.col("copy_ns"))


def _unknown(trace: Trace, launches: pl.DataFrame) -> NotAssessed | None:
    """Graphs of unknown copies that ran while their launch was still in the call."""
    host = pl.coalesce(
        pl.when(pl.col("copy_kind") == "HtoD").then("src_kind"),
        pl.when(pl.col("copy_kind") == "DtoH").then("dst_kind"),
    )
    unknown = _during_copies(trace, launches, host == "unknown")
    if unknown.height >= trace.limit(MIN_LAUNCHES):
        return NotAssessed(
            "the export doesn't say what memory the copies in "
            f"{unknown.height} graphs used",
            "export again with nsys, all columns",
        )
    graphs = trace.graph_traces.select(
        "pid", "correlation_id", pl.col("end_ns").alias("done_ns")
    )
    waited = launches.join(graphs, on=["pid", "correlation_id"], how="inner").filter(
        pl.col("end_ns") >= pl.col("done_ns")
    )
    if waited.height < trace.limit(MIN_LAUNCHES):
        return None
    return NotAssessed(
        f"{waited.height} graph launches returned after their graph was done, and "
        "graphs were traced as a whole, without their copies",
        "record with --cuda-graph-trace=node",
    )


def _finding(
    trace: Trace, region: Region, launches: pl.DataFrame, site: object
) -> Finding:
    change = replayed(_change, trace, launches)
    spent = int((column(launches, "end_ns") - column(launches, "start_ns")).sum())
    cost = price_change(
        trace,
        region,
        change,
        Claim.LOWER_BOUND,
        "launches of 70 us, the copies as they are",
        direct=price(Claim.DIRECT, spent, region, "time in these launches"),
    )
    ops = ops_asked_by(trace, launches)
    longest = launches.sort(
        launches["end_ns"] - launches["start_ns"], descending=True, maintain_order=True
    ).head(5)
    count = int(launches["copies"].sum())
    return Finding(
        message=f"{launches.height} graph launches took {spent / 1e6:.2f} ms because "
        f"they waited for {count} copies of pageable host memory",
        severity=severity_of(cost),
        confidence=Confidence.HIGH,
        cost=cost,
        where=locate(trace, calls=launches, ops=ops),
        occurrences=launches.height,
        evidence=tuple(
            Evidence(start, end, f"{name} waits for the graph's copies", correlation_id)
            for start, end, name, correlation_id in longest.select(
                "start_ns", "end_ns", "name", "correlation_id"
            ).iter_rows()
        ),
        fix="page-lock the buffers of the graph's copies once (cudaHostAlloc, or "
        "cudaHostRegister), and synchronize before the host reads or refills them, or "
        "data may race",
        identity=("pageable copy", str(site or ""), *sorted(ops["name"].unique())[:8]),
        change=change,
    )


def _change(trace: Trace, launches: pl.DataFrame) -> Change:
    calls = replay_of(trace).calls_of(launches)
    return Change(call_duration=(calls, np.full(len(calls), LAUNCH_NS)))

"""Rule pdl-candidate."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.blocking import launches_block
from streamlint.changes import Change
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import (
    Claim,
    Confidence,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.held import in_issue_order
from streamlint.replay import Edge, replay_of
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, in_time, regions
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

MIN_PAIRS = Threshold(
    "min-pairs",
    100,
    "pairs of kernels",
    "A hundred gaps of 1 us are the least that is worth changing kernels for.",
)
MIN_GAP_NS, MAX_GAP_NS = 500, 3_000
"""Between queued kernels of a stream (0.6 to 1.8 us, H200); more has other causes."""
HIDDEN_NS = 240
"""What programmatic launches save beyond the gap: 1.40 and 1.42 us for gaps of 1.09
and 1.25 us (H200, kernels without work before the wait)."""
MIN_MAJOR = 9
"""Programmatic dependent launch needs compute capability 9.0."""


@rule(needs=("kernels", "runtime_calls"))
def pdl_candidate(trace: Trace) -> Outcome:
    """Queued kernels of one stream leave gaps that programmatic launches would close.

    What it does
        Finds streams in which at least a hundred kernels, queued in time, start 0.5
        to 3 us after their predecessor has ended.
    Why it costs time
        A kernel is launched on the GPU only when its predecessor has ended and its
        memory is flushed. With programmatic dependent launch its blocks are already
        there, have done what doesn't depend on the predecessor, and wait.
    Evidence
        Gaps between kernels that follow each other in a stream, the second one
        issued before the first ended, on a GPU of compute capability 9.0 or later.
        The cost is an estimate: the run replayed with each of these kernels starting
        0.24 us before its predecessor ends, as measured on an H200; work that a
        kernel can do before it waits comes on top.
    Exemptions
        Kernels that already overlap a neighbour in their stream, kernels of graphs,
        pairs with an event wait between them, gaps that show a late launch, and gaps
        that cost less than 1 % of the run.
    Fix
        Launch the second kernel with cudaLaunchKernelEx and the attribute
        programmatic stream serialization, and call cudaGridDependencySynchronize in
        it before it touches what the first one writes, or results may race; let the
        first one call cudaTriggerProgrammaticLaunchCompletion early.
    References
        CUDA C++ Programming Guide, "Programmatic dependent launch and
        synchronization".
    """
    findings: list[Finding] = []
    known = trace.gpus.drop_nulls("compute_major")
    able = known.filter(pl.col("compute_major") >= MIN_MAJOR)["gpu_id"]
    unknown = ~pl.col("gpu_id").is_in(known["gpu_id"].implode()).fill_null(value=False)
    can = pl.col("gpu_id").is_in(able.implode()).fill_null(value=False) | unknown
    used = trace.gpu_ops.filter((pl.col("kind") == "kernel") & can)
    if used.height < trace.limit(MIN_PAIRS):
        return findings
    unable: NotAssessed | None = None
    for pid, region in regions(trace).items():
        if launches_block(trace, pid):
            continue
        pairs = _pairs(trace, in_issue_order(trace, pid), can)
        if pairs.height < trace.limit(MIN_PAIRS):
            continue
        pairs = pairs.filter(region.holds())
        pairs = pairs.filter(pl.len().over("stream_id") >= trace.limit(MIN_PAIRS))
        if pairs.filter(unknown).height:
            unable = NotAssessed(
                "the export doesn't say which compute capability the GPU has; "
                f"programmatic launches need {MIN_MAJOR}.0",
                "export again with nsys 2021.3 or newer, all tables and columns",
            )
        elif pairs.height:
            finding = _finding(trace, region, pairs)
            findings += [finding] if finding else []
    return findings or unable or []


def _pairs(trace: Trace, ordered: pl.DataFrame, able: pl.Expr) -> pl.DataFrame:
    """Second kernels of the pairs, columns of gpu_ops with gap_ns and before_end_ns.

    ``able`` selects operations of GPUs that may have programmatic launches.
    """
    alone = (pl.col("kind") == "kernel") & pl.col("graph_node_id").is_null()
    pairs = (
        ordered.with_columns(alone.alias("alone"))
        .with_columns(
            pl.col("end_ns", "name", "alone")
            .shift(1)
            .over("stream_id")
            .name.prefix("before_")
        )
        .filter("alone", "before_alone")
        .with_columns((pl.col("start_ns") - pl.col("before_end_ns")).alias("gap_ns"))
    )
    overlapping = pairs.filter(pl.col("gap_ns") < 0, in_time(trace))
    known = pl.concat([overlapping["name"], overlapping["before_name"]]).unique()
    return pairs.filter(
        pl.col("gap_ns").is_between(MIN_GAP_NS, MAX_GAP_NS)
        & (pl.col("issue_end_ns") <= pl.col("before_end_ns"))
        & able
        & ~pl.col("after_wait")
        & ~pl.any_horizontal(pl.col("name", "before_name").is_in(known.implode()))
    )


def _finding(trace: Trace, region: Region, pairs: pl.DataFrame) -> Finding | None:
    """None for gaps beside a busy host or other streams, which most programs have.

    Such gaps cost nothing.
    """
    change = _change(trace, pairs)
    total = int(pairs["gap_ns"].sum())
    cost = price_change(
        trace,
        region,
        change,
        Claim.WHAT_IF,
        "an estimate, each of these kernels 0.24 us before the end of the one before",
        direct=price(Claim.DIRECT, total, region, "sum of the gaps"),
    )
    severity = severity_of(cost)
    if severity is Severity.INFO:
        return None
    calls = calls_behind(trace, pairs)
    longest = pairs.sort("gap_ns", descending=True, maintain_order=True).head(5)
    return Finding(
        message=f"{pairs.height} queued kernels start {total / pairs.height / 1e3:.1f} "
        "us on average after the end of the one before in their stream",
        severity=severity,
        confidence=Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=calls, ops=pairs),
        occurrences=pairs.height,
        evidence=tuple(
            Evidence(
                row["before_end_ns"],
                row["start_ns"],
                f"between {row['before_name']} and {row['name']}",
                row["correlation_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix="launch the second kernel with cudaLaunchKernelEx and programmatic stream "
        "serialization, and call cudaGridDependencySynchronize in it before it touches "
        "what the first one writes, or results may race",
        identity=(
            "gaps",
            *sorted({*pairs["before_name"].unique(), *pairs["name"].unique()})[:8],
        ),
        change=change,
    )


def _change(trace: Trace, pairs: pl.DataFrame) -> Change:
    """Kernels that start a little before their predecessor ends."""
    replay = replay_of(trace)
    order = replay.constraints(Edge.STREAM, ops=replay.ops_of(pairs))
    return Change(latency=(order, np.full(len(order), -HIDDEN_NS)))

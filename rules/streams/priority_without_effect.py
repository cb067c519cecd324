"""Rule priority-without-effect."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.blocking import concurrent_regions
from streamlint.changes import Change
from streamlint.completeness import sizes_unknown
from streamlint.cost import price_change, severity_of
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.intervals import union
from streamlint.readiness import with_ready
from streamlint.replay import Edge, replay_of
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, in_time, of_process
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

MIN_HELD = Threshold(
    "min-held",
    3,
    "held kernels",
    "Fewer urgent kernels that waited are start-up, not a pattern.",
)
MIN_WAIT_NS = Threshold(
    "min-wait",
    50_000,
    "ns",
    "Shorter waits are the last blocks of a short kernel: priority does work there.",
)


@rule(needs=("kernels", "runtime_calls", "streams"))
def priority_without_effect(trace: Trace) -> Outcome:
    """Urgent kernels wait for a long low-priority kernel that fills the GPU.

    What it does
        Finds kernels of a high-priority stream that were ready, and were kept from
        running until a kernel of lower priority that had started before made room.
    Why it costs time
        Priority decides which waiting block starts next; blocks that run are not
        stopped for it (an urgent kernel waited 472 of the 500 us that the resident
        blocks took, H200). A long kernel that fills the GPU holds up urgent work,
        and the host that waits for its result, for nearly all of its time. The
        first urgent block may get in early: then the kernel starts, and takes until
        the others find room (1.23 ms for 0.14 ms of work, H200).
    Evidence
        Urgent kernels that waited over 50 us, with all their dependencies done,
        while a kernel of lower priority of the same process ran that leaves no room
        for them. The cost is the run replayed with those kernels started as soon as
        they were ready, without the time that both ran, or as long as the shortest
        of their kind with nothing of lower priority running: an upper bound, as
        shorter low-priority kernels come close to it at best. Where the run gets no
        shorter there is no finding: later results alone may not matter.
    Exemptions
        Streams of equal priority, waits for kernels of the same or a higher
        priority, kernels that leave room, copies (priorities don't apply to them),
        priorities that never mattered.
    Fix
        Split the low-priority kernel into shorter ones, or give it fewer blocks
        than the GPU has room for, so that urgent blocks get in between. Splitting
        costs launches: 0.1 to 0.5 ms each is a fair length.
    References
        CUDA Runtime API, cudaStreamCreateWithPriority ("only compute kernels
        launched in priority streams are affected"); CUDA C++ Programming Guide,
        "Stream priorities".
    """
    findings: list[Finding] = []
    kernels = (
        trace.gpu_ops.filter(pl.col("kind") == "kernel")
        .join(
            trace.streams.select("pid", "stream_id", "priority"),
            on=["pid", "stream_id"],
            how="left",
            validate="m:1",
        )
        .drop_nulls("priority")
    )
    urgent = pl.col("priority") < pl.col("priority").max().over("pid", "device_id")
    late = pl.col("start_ns") - pl.col("issue_end_ns") >= trace.limit(MIN_WAIT_NS)
    several = (urgent & late).sum().over("pid", "device_id") >= trace.limit(MIN_HELD)
    kernels = kernels.filter(several)
    if not kernels.height:
        return findings
    unsized = sizes_unknown(kernels.filter(in_time(trace)))
    unable: NotAssessed | None = None
    for pid, region in concurrent_regions(trace).items():
        own = of_process(kernels, pid)
        for _, here in groups(own, "device_id"):
            held = _held(trace, here).filter(region.holds())
            if held.height >= trace.limit(MIN_HELD) and unsized:
                unable = unsized
            elif held.height >= trace.limit(MIN_HELD):
                finding = _finding(trace, region, held, here)
                if finding.severity is not Severity.INFO:
                    findings.append(finding)
    return findings or unable or []


def _held(trace: Trace, kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels that one of lower priority kept out: ready_ns, until_ns and its name.

    Until they started, or for as long as both ran after that.
    """
    kernels = with_ready(trace, kernels, Edge.ENGINE).sort("start_ns")
    parts = [
        kernels.clear().with_columns(
            pl.col("name").alias("holder"), pl.col("end_ns").alias("until_ns")
        )
    ]
    for level in kernels["priority"].unique().sort()[:-1]:
        urgent = kernels.filter(pl.col("priority") == level)
        lower = kernels.filter(pl.col("priority") > level)
        ends = np.maximum.accumulate(column(lower, "end_ns"))
        last = np.where(ends == column(lower, "end_ns"), np.arange(len(ends)), 0)
        last = np.maximum.accumulate(last)
        # The kernel that was running when the urgent one got ready, if any.
        at = column(urgent, "ready_ns")
        before = np.searchsorted(column(lower, "start_ns"), at, side="right") - 1
        holder = last[np.maximum(before, 0)]
        # Of unknown size: too large, for all that is known.
        taken = lower["sm_fraction"].fill_null(1.0).to_numpy()[holder]
        wanted = urgent["sm_fraction"].fill_null(1.0).to_numpy()
        until = np.minimum(ends[np.maximum(before, 0)], column(urgent, "start_ns"))
        waited = (
            (before >= 0)
            & (until - at >= trace.limit(MIN_WAIT_NS))
            & (taken + wanted > 1)
        )
        # What ended long before the start wasn't it.
        waited &= column(urgent, "start_ns") - until < until - at
        both = np.minimum(ends[np.maximum(before, 0)], column(urgent, "end_ns"))
        parts.append(
            urgent.with_columns(
                lower["name"][as_series(holder)].alias("holder"),
                as_series(np.maximum(both, column(urgent, "start_ns")), "until_ns"),
            ).filter(as_series(waited))
        )
    return pl.concat(parts).sort("start_ns")


def _undisturbed(
    trace: Trace, held: pl.DataFrame, kernels: pl.DataFrame
) -> pl.DataFrame:
    """``held`` with took_ns: how long each takes at least if nothing holds it up."""
    kind = ["name", "sm_fraction", "priority"]
    shortest = [held.select(*kind, pl.lit(0).alias("alone_ns")).clear()]
    for level in held["priority"].unique():
        lower = kernels.filter(pl.col("priority") > level)
        taken = union(column(lower, "start_ns"), column(lower, "end_ns"))
        urgent = kernels.filter(pl.col("priority") == level, in_time(trace))
        start, end = column(urgent, "start_ns"), column(urgent, "end_ns")
        alone = urgent.filter(as_series(taken.overlap_ns(start, end) == 0))
        took = (pl.col("end_ns") - pl.col("start_ns")).min().alias("alone_ns")
        shortest.append(alone.group_by(kind).agg(took))
    return held.join(
        pl.concat(shortest, how="vertical_relaxed"),
        on=kind,
        how="left",
        validate="m:1",
        nulls_equal=True,
        maintain_order="left",
    ).with_columns(
        pl.max_horizontal("alone_ns", pl.col("end_ns") - pl.col("until_ns")).alias(
            "took_ns"
        )
    )


def _change(trace: Trace, held: pl.DataFrame, kernels: pl.DataFrame) -> Change:
    """Urgent kernels start when they are ready, and nothing slows them down."""
    replay = replay_of(trace)
    parts = _undisturbed(trace, held, kernels).group_by("took_ns", maintain_order=True)
    rows = [(replay.ops_of(part), took) for (took,), part in parts]
    ops = np.concatenate([index for index, _ in rows])
    took_ns = np.concatenate([np.full(len(index), took) for index, took in rows])
    return Change(
        drop=replay.constraints(Edge.ENGINE, ops=ops),
        op_duration=(ops, took_ns),
        issue_latency=(ops, replay.graph.plain_issue_latency[ops]),
    )


def _cost(trace: Trace, region: Region, held: pl.DataFrame, change: Change) -> Cost:
    none = Cost(Claim.NONE, None, None, "later results may not lengthen the run")
    method = "urgent kernels run as soon as they are ready, unhindered"
    return price_change(trace, region, change, Claim.UPPER_BOUND, method, direct=none)


def _finding(
    trace: Trace, region: Region, held: pl.DataFrame, kernels: pl.DataFrame
) -> Finding:
    change = _change(trace, held, kernels)
    cost = _cost(trace, region, held, change)
    waits = column(held, "until_ns") - column(held, "ready_ns")
    holders = held["holder"].value_counts(sort=True)["holder"].to_list()
    calls = calls_behind(trace, held)
    longest = held.sort(pl.col("until_ns") - pl.col("ready_ns"), descending=True)
    return Finding(
        message=f"{held.height} kernels of higher priority were held up for "
        f"{float(np.median(waits)) / 1e6:.2f} ms (median) by {holders[0]}, which was "
        "running and left no room",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=calls, ops=held),
        occurrences=held.height,
        evidence=tuple(
            Evidence(
                row["ready_ns"],
                row["until_ns"],
                f"{row['name']} is ready; {row['holder']} fills the GPU",
                row["correlation_id"],
            )
            for row in longest.head(5).iter_rows(named=True)
        ),
        fix="split the low-priority kernel into shorter ones, or launch it with fewer "
        "blocks than the GPU has room for",
        identity=(
            "waits for",
            *sorted(set(holders))[:4],
            *sorted(held["name"].unique()),
        ),
        change=change,
    )

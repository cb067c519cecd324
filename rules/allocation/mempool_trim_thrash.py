"""Rule mempool-trim-thrash."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.changes import Change
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding
from streamlint.replay import Edge, replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, of_process, regions
from streamlint.trace.model import Trace
from streamlint.where import locate, sites

MIN_TRIMS = Threshold(
    "min-trims",
    3,
    "trims",
    "Fewer are phases of the program, not a loop.",
)
HIT_NS = 5_000
"""An allocation that the pool holds memory for (measured 4.1 us under nsys, H200)."""
RETURN_NS = 3_000
"""From the end of the work to the return of a wait that gives nothing back."""
WAIT_NS = 2_500
"""A wait with nothing to wait for (measured 0.4 to 3.8 us, H200)."""


@rule(needs=("runtime_calls",))
def mempool_trim_thrash(trace: Trace) -> Outcome:
    """A memory pool gives its memory back at each wait and fetches it again.

    What it does
        Finds pools of cudaMallocAsync that are trimmed at synchronizations in the
        judged region and have to grow again for the allocations that follow.
    Why it costs time
        By default a pool keeps nothing: at each synchronization of a stream, event
        or device it returns its unused memory to the system (release threshold 0),
        which took 130 us for 32 MiB on an H200. The next cudaMallocAsync maps
        memory anew, 150 us for 1 MiB and 335 for 256, instead of 4 from the pool.
    Evidence
        Pool events that say trimmed with less memory left than before, each followed
        by an allocation from a pool, at least three times. Needs
        --cuda-memory-usage=true. The cost is a replay of the run in which
        allocations after a trim take 5 us and the waits that trimmed return 3 us
        after the work they waited for.
    Exemptions
        Events that say trimmed and leave the size as it was, the last trim of a
        program, trims by cudaMemPoolTrimTo, programs without cudaMallocAsync.
    Fix
        Raise the pool's release threshold once: cudaMemPoolSetAttribute with
        cudaMemPoolAttrReleaseThreshold. The pool then keeps its memory from other
        processes and from cudaMalloc; give it back with cudaMemPoolTrimTo.
    References
        CUDA C++ Programming Guide, "Stream-Ordered Memory Allocator", physical page
        caching behavior; CUDA Runtime API, cudaMemPoolAttrReleaseThreshold.
    """
    findings: list[Finding] = []
    allocs = trace.runtime_calls.filter(
        (pl.col("kind") == "async alloc")
        & ~pl.col("nested")
        & (pl.col("return_value").fill_null(0) == 0)
    )
    for pid, region in regions(trace).items():
        if allocs.filter(region.holds()).height < trace.limit(MIN_TRIMS):
            continue
        if trace.pool_events.is_empty() and not (
            trace.capture.memory_usage is True and trace.memory_events.height
        ):
            return trace.missing("pool_events") or []
        own = of_process(allocs, pid)
        trims = _trims(trace, region, own)
        if trims.height < trace.limit(MIN_TRIMS):
            continue
        trims = trims.with_columns(sites(trace, trims))
        for (site,), here in groups(trims, "site"):
            if here.height >= trace.limit(MIN_TRIMS):
                grown = _after(own, here)
                findings.append(_finding(trace, region, here, grown, site))
    return findings


def _trims(trace: Trace, region: Region, allocs: pl.DataFrame) -> pl.DataFrame:
    """Waits that made a pool shrink which had to grow again, one row a trim.

    Columns of `synchronizations`, with trim_ns and until_ns (of the pool's next
    trim). Pools grow without an event, so how much was given back is not known.
    """
    pool = ["pid", "address"]
    events = of_process(trace.pool_events, region.pid).sort("start_ns")
    most = pl.col("size_bytes").cum_max().shift(1).over(pool)
    shrinks = (pl.col("size_bytes") == 0) | (pl.col("size_bytes") < pl.col("most"))
    trims = (
        events.with_columns(most.alias("most"))
        .filter((pl.col("operation") == "trimmed") & shrinks)
        .with_columns(
            pl.col("start_ns").shift(-1).over(pool).alias("until_ns"),
        )
        .filter(region.holds())
        .select(
            *("pid", "correlation_id", "until_ns"),
            pl.col("start_ns").alias("trim_ns"),
        )
    )
    grows = allocs.select("pid", pl.col("start_ns").alias("grow_ns")).sort("grow_ns")
    regrown = trims.join_asof(
        grows,
        left_on="trim_ns",
        right_on="grow_ns",
        by="pid",
        strategy="forward",
        check_sortedness=False,
    ).filter(
        pl.col("grow_ns").is_not_null()
        & (pl.col("until_ns").is_null() | (pl.col("grow_ns") < pl.col("until_ns")))
    )
    key = ["pid", "correlation_id"]
    waits = trace.synchronizations.unique(key, keep="first", maintain_order=True)
    return waits.join(regrown, on=key, how="inner", maintain_order="left")


def _after(allocs: pl.DataFrame, trims: pl.DataFrame) -> pl.DataFrame:
    """Allocations between one of these trims and the pool's next that took long."""
    since = trims.select("pid", "trim_ns", "until_ns").sort("trim_ns")
    return (
        allocs.sort("start_ns")
        .join_asof(
            since,
            left_on="start_ns",
            right_on="trim_ns",
            by="pid",
            check_sortedness=False,
        )
        .filter(
            pl.col("trim_ns").is_not_null()
            & (pl.col("until_ns").is_null() | (pl.col("start_ns") < pl.col("until_ns")))
            & (pl.col("end_ns") - pl.col("start_ns") > HIT_NS)
        )
    )


def _finding(
    trace: Trace,
    region: Region,
    trims: pl.DataFrame,
    grown: pl.DataFrame,
    site: object,
) -> Finding:
    change = replayed(_change, trace, trims, grown)
    cost = _cost(trace, region, trims, grown, change)
    spent = int((grown["end_ns"] - grown["start_ns"]).sum())
    names = sorted(trims["name"].unique())
    calls = pl.concat([trims, grown], how="diagonal").sort("start_ns")
    longest = calls.sort(
        pl.col("end_ns") - pl.col("start_ns"), descending=True, maintain_order=True
    ).head(5)
    return Finding(
        message=f"a memory pool gave memory back to the system at {trims.height} calls "
        f"of {', '.join(names)} and had to fetch it again: {grown.height} allocations "
        f"after that took {spent / 1e6:.2f} ms",
        severity=severity_of(cost),
        confidence=Confidence.HIGH,
        cost=cost,
        where=locate(trace, calls=calls),
        occurrences=trims.height,
        evidence=tuple(
            Evidence(
                row["start_ns"],
                row["end_ns"],
                row["name"]
                + (" trims the pool" if row["name"] in names else " grows the pool"),
                row["correlation_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix="let the pool keep its memory: cudaMemPoolSetAttribute with "
        "cudaMemPoolAttrReleaseThreshold, once after start; return memory that other "
        "processes need with cudaMemPoolTrimTo",
        identity=("trim", *names, str(site or "")),
        change=change,
    )


def _change(trace: Trace, trims: pl.DataFrame, grown: pl.DataFrame) -> Change:
    """Allocations hit the pool; waits return when their work is done."""
    replay = replay_of(trace)
    allocs, waits = replay.calls_of(grown), replay.calls_of(trims)
    calls = np.concatenate([allocs, waits])
    took = np.repeat([HIT_NS, WAIT_NS], [len(allocs), len(waits)])
    returns = replay.constraints(Edge.WAIT, calls=waits)
    return Change(
        call_duration=(calls, took),
        latency=(returns, np.full(len(returns), RETURN_NS)),
    )


def _cost(
    trace: Trace,
    region: Region,
    trims: pl.DataFrame,
    grown: pl.DataFrame,
    change: Change | None,
) -> Cost:
    more = int((grown["end_ns"] - grown["start_ns"] - HIT_NS).sum())
    ops = of_process(trace.gpu_ops, region.pid).sort("end_ns")
    ends = np.append(0, column(ops, "end_ns"))
    start, end = column(trims, "start_ns"), column(trims, "end_ns")
    last = ends[np.searchsorted(ends, end, side="left") - 1]
    giving = int((end - np.maximum(start, last) - RETURN_NS).clip(0).sum())
    return price_change(
        trace,
        region,
        change,
        Claim.WHAT_IF,
        "allocations after a trim take 5 us, waits that trimmed return 3 us after "
        "their work",
        direct=price(
            Claim.DIRECT,
            min(more + giving, region.duration_ns),
            region,
            "host time in allocations after a trim over 5 us each, and in waits that "
            "trimmed after the last GPU work over 3 us each",
        ),
    )

"""Rule busy-poll."""

from __future__ import annotations

import polars as pl

from streamlint.cost import price, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding, Severity
from streamlint.intervals import union
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, regions
from streamlint.trace.model import Trace
from streamlint.where import locate

MIN_QUERIES = Threshold(
    "min-queries",
    100,
    "queries in a row",
    "Fewer queries in a row are an occasional look (rule catalogue).",
)
MAX_GAP_NS = Threshold(
    "max-gap",
    10_000,
    "ns",
    "A host that does something else for this long between queries isn't only polling.",
)


@rule(needs=("runtime_calls",))
def busy_poll(trace: Trace) -> Outcome:
    """The host asks again and again whether work is done, and does nothing else.

    What it does
        Finds runs of at least 100 queries of one stream or event with less than
        10 us between them.
    Why it costs time
        Each query takes the driver's lock and keeps a processor core busy, which
        other threads of the program (loading data, launching work) then lack. The
        GPU is no faster for it: the work isn't done any sooner.
    Evidence
        The runs and their queries, counted exactly where nsys records a row for a
        query that finds the work unfinished (2025.3 does). The cost is the host
        time from the first to the last query of each run. It is no time of the
        GPU, so the finding is never above low. Tracing slows polling down: the
        program itself asks several times as often.
    Exemptions
        Queries with other host work between them, which is what they are for, and
        shorter runs.
    Fix
        Wait with cudaEventSynchronize on an event made with cudaEventBlockingSync
        (the thread sleeps), or do other work for tens of microseconds between
        queries. Waking up takes longer than a poll: keep polling where those
        microseconds matter more than the core.
    References
        CUDA Runtime API, cudaStreamQuery, cudaEventQuery and
        cudaEventCreateWithFlags; CUDA C++ Programming Guide, "Explicit
        synchronization".
    """
    queries = _queries(trace)
    findings: list[Finding] = []
    if queries.height < trace.limit(MIN_QUERIES):
        return findings
    for region in regions(trace).values():
        runs = _runs(trace, queries.filter(region.holds()))
        for (asked,), here in groups(runs, "asked"):
            findings.append(_finding(trace, region, here, str(asked)))
    return findings


def _queries(trace: Trace) -> pl.DataFrame:
    """pid, start_ns, end_ns, asked ("stream", "event"), target; sorted by start.

    From the calls where a version of nsys recorded no other row; then the thread
    stands for the target.
    """
    queries = trace.queries.select(
        *("pid", "start_ns", "end_ns"),
        pl.when(pl.col("stream_id").is_null())
        .then(pl.lit("event"))
        .otherwise(pl.lit("stream"))
        .alias("asked"),
        pl.coalesce("stream_id", "event_id").alias("target"),
    )
    if not queries.height:
        queries = trace.runtime_calls.filter(
            (pl.col("kind") == "query") & ~pl.col("nested")
        ).select(
            *("pid", "start_ns", "end_ns"),
            pl.when(pl.col("name").cast(pl.String).str.contains("Event"))
            .then(pl.lit("event"))
            .otherwise(pl.lit("stream"))
            .alias("asked"),
            pl.col("tid").alias("target"),
        )
    return queries.sort("start_ns")


def _runs(trace: Trace, queries: pl.DataFrame) -> pl.DataFrame:
    """Queries of one target in close succession: pid, asked, times and how many."""
    target = ["pid", "asked", "target"]
    pause = pl.col("start_ns") - pl.col("end_ns").shift(1).over(target)
    return (
        queries.with_columns(
            (pause > trace.limit(MAX_GAP_NS))
            .fill_null(value=False)
            .cum_sum()
            .over(target)
            .alias("run")
        )
        .group_by(*target, "run", maintain_order=True)
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max(), pl.len().alias("count"))
        .filter(pl.col("count") >= trace.limit(MIN_QUERIES))
    )


def _finding(trace: Trace, region: Region, runs: pl.DataFrame, asked: str) -> Finding:
    cost = _cost(runs, region)
    count = int(runs["count"].sum())
    longest = runs.sort(pl.col("end_ns") - pl.col("start_ns"), descending=True)
    call = f"cuda{asked.title()}Query"
    calls = trace.runtime_calls.filter(
        (pl.col("kind") == "query")
        & pl.col("name").cast(pl.String).str.contains(asked.title())
    ).filter(region.holds() & ~pl.col("nested"))
    # Which streams an event belongs to isn't the point; a stream asked is.
    polled = pl.col("stream_id").is_in(runs["target"].implode())
    ops = trace.gpu_ops.filter(region.holds() & polled & (asked == "stream"))
    is_minor = severity_of(cost) is Severity.INFO
    return Finding(
        message=f"{call} was called {count} times in {runs.height} "
        f"run{'' if runs.height == 1 else 's'} without pause; a processor core did "
        f"nothing else for {(cost.ns or 0) / 1e6:.2f} ms",
        # Another core's time isn't the run's: polling delays nothing by itself.
        severity=Severity.INFO if is_minor else Severity.LOW,
        confidence=Confidence.HIGH,
        cost=cost,
        where=locate(trace, calls=calls, ops=ops),
        occurrences=count,
        evidence=tuple(
            Evidence(start, end, f"{number} queries of one {asked}")
            for start, end, number in longest.select("start_ns", "end_ns", "count")
            .head(5)
            .iter_rows()
        ),
        fix="wait with cudaEventSynchronize on an event made with "
        "cudaEventBlockingSync, or do other work between queries",
        identity=("poll", asked),
    )


def _cost(runs: pl.DataFrame, region: Region) -> Cost:
    """Host time in the runs; the GPU loses none."""
    polled = union(column(runs, "start_ns"), column(runs, "end_ns"))
    return price(
        Claim.DIRECT,
        region.clip(polled).total_ns,
        region,
        "host time from the first to the last query of each run; no time of the GPU",
    )

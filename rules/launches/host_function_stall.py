"""Rule host-function-stall."""

from __future__ import annotations

import polars as pl

from streamlint.blocking import concurrent_regions
from streamlint.cost import price, severity_of
from streamlint.findings import Claim, Confidence, Evidence, Finding
from streamlint.held import (
    in_issue_order,
    price_without_delay,
    unexplained,
    without_delay,
)
from streamlint.replay import replay_of
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, groups, of_process
from streamlint.trace.model import Trace
from streamlint.where import locate, sites

MIN_STALLS = Threshold(
    "min-stalls",
    3,
    "stalls",
    "Fewer are phases of the program, not a loop.",
)
MIN_STALL_NS = Threshold(
    "min-stall",
    20_000,
    "ns",
    "Shorter delays are the scatter of launches (rule catalogue).",
)


@rule(needs=("runtime_calls",))
def host_function_stall(trace: Trace) -> Outcome:
    """A stream stands still while a host function that it was given runs.

    What it does
        Finds streams whose next operation had to wait, at least three times, after
        a cudaLaunchHostFunc or cudaStreamAddCallback between it and the operation
        before.
    Why it costs time
        A stream runs a host function like any operation: later work waits until it
        has returned. A host thread has to wake up first: on an H200 an empty function
        added 65 to 76 us to its stream and one of 1000 us added 1095, unrecorded.
    Evidence
        Operations that started more than 20 us later than their stream, their
        launch, events, engines and barriers explain, in the stream that the
        function's thread had used last. The trace doesn't name the stream of a host
        function, nor its own time. The cost is an upper bound: the run replayed
        without these delays, as if no later work needed what the functions do.
    Exemptions
        Functions after the last work of a stream, or that end before the host
        issues more; streams of their own for the functions.
    Fix
        Record an event instead and let a worker thread wait for it
        (cudaEventSynchronize) and do the work, or give the functions a stream of
        their own that waits for an event. Work that needs what the function does
        must then wait for it in another way, or data may race.
    References
        CUDA C++ Programming Guide, "Host functions (callbacks)"; CUDA Runtime API,
        cudaLaunchHostFunc, cudaStreamAddCallback ("slated for deprecation").
    """
    functions = trace.runtime_calls.filter(
        (pl.col("kind") == "host func")
        & ~pl.col("nested")
        & (pl.col("return_value").fill_null(0) == 0)
    )
    findings: list[Finding] = []
    if functions.height < trace.limit(MIN_STALLS):
        return findings
    for pid, region in concurrent_regions(trace).items():
        own = of_process(functions, pid)
        if own.height < trace.limit(MIN_STALLS):
            continue
        stalls = _stalls(trace, region, own.with_columns(sites(trace, own)))
        for (name, site), here in groups(stalls, "call", "site"):
            if here.height >= trace.limit(MIN_STALLS):
                findings.append(_finding(trace, region, here, str(name), site))
    return findings


def _stalls(trace: Trace, region: Region, functions: pl.DataFrame) -> pl.DataFrame:
    """Operations held by a host function: rows of gpu_ops with delay_ns, function_id.

    call and site are those of the function.
    """
    key = ["pid", "correlation_id", "start_ns"]
    late = unexplained(trace).filter(
        region.holds() & (pl.col("delay_ns") > trace.limit(MIN_STALL_NS))
    )
    ordered = in_issue_order(trace, region.pid)
    last_used = ordered.select(
        "tid", "issue_ns", pl.col("stream_id").alias("used_stream_id")
    )
    given = (
        functions.join_asof(
            last_used.drop_nulls("tid"),
            left_on="start_ns",
            right_on="issue_ns",
            by="tid",
            check_sortedness=False,
        )
        .select(
            pl.col("used_stream_id").alias("stream_id"),
            pl.col("start_ns").alias("function_ns"),
            pl.col("correlation_id").alias("function_id"),
            pl.col("name").alias("call"),
            "site",
        )
        .drop_nulls("stream_id")
        .sort("function_ns")
    )
    return (
        ordered.drop("call")
        .join(late.select(*key, "delay_ns").unique(key), on=key, validate="m:1")
        .join_asof(
            given,
            left_on="issue_ns",
            right_on="function_ns",
            by="stream_id",
            check_sortedness=False,
        )
        .filter(pl.col("function_ns") > pl.col("before_ns"))
    )


def _finding(
    trace: Trace, region: Region, stalls: pl.DataFrame, name: str, site: object
) -> Finding:
    stalled = int(stalls["delay_ns"].sum())
    replay = replay_of(trace)
    change = without_delay(replay, replay.ops_of(stalls))
    cost = price_without_delay(
        trace,
        region,
        change,
        stalls,
        "the same work without these delays",
        price(Claim.UPPER_BOUND, stalled, region, "sum of the delays"),
    )
    functions = trace.runtime_calls.filter(
        (pl.col("pid") == region.pid)
        & pl.col("correlation_id").is_in(stalls["function_id"].implode())
    )
    longest = stalls.sort("delay_ns", descending=True, maintain_order=True).head(5)
    return Finding(
        message=f"a stream stood still {stalls.height} times after {name}, for "
        f"{stalled / stalls.height / 1e6:.2f} ms on average, until the host function "
        "had run",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=functions, ops=stalls),
        occurrences=stalls.height,
        evidence=tuple(
            Evidence(
                row["start_ns"] - row["delay_ns"],
                row["start_ns"],
                f"stream {row['stream_id']} waits, then runs {row['name']}",
                row["function_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix="record an event instead and let a worker thread wait for it and do the "
        "work, or give the host functions a stream of their own that waits for the "
        "event; later work that needs what they do must then wait for it in another "
        "way, or data may race",
        identity=("host function", name, str(site or "")),
        change=change,
    )

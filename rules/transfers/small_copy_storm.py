"""Rule small-copy-storm."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.blocking import launches_block
from streamlint.changes import Change
from streamlint.copies import (
    BUS_RATE,
    SMALL_BYTES,
    at_pinned_rate,
    host_copies,
    size_words,
)
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding
from streamlint.intervals import Int64
from streamlint.replay import Edge, replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, groups, regions
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate, ops_asked_by, sites

MIN_RUN = Threshold(
    "min-copies",
    32,
    "copies in a row",
    "Shorter runs cost less than 0.2 ms at the 5 us that a traced call takes.",
)
MAX_BYTES = Threshold(
    "max-size",
    SMALL_BYTES,
    "bytes",
    "Up to this size a pageable copy to the device is only staged.",
)
MAX_GAP_NS = Threshold(
    "max-gap",
    50_000,
    "ns",
    "Calls further apart are not issued by one loop over copies.",
)


@rule(needs=("runtime_calls", "memcpys"))
def small_copy_storm(trace: Trace) -> Outcome:
    """Many tiny copies in a row cost a call each; one packed copy costs one call.

    What it does
        Finds runs of at least 32 copies of one direction that follow each other on
        one stream with nothing between, each under 64 KiB.
    Why it costs time
        A small copy moves its bytes in about a microsecond; the call that asks for
        it takes several. The host is busy issuing and the copy engine waits for it.
        On an H200 packing 512 copies of 4 KiB saved 2.2 of 2.6 us a copy, unrecorded
        and with the gathering.
    Evidence
        Calls at most 50 us apart whose issuing takes longer than the copies
        themselves. The cost is an upper bound on what packing each run into one copy
        saves: a replay of the run in which only the first call takes time and the
        other copies follow it without gaps, at the pinned rate. Batching saves less:
        measured on an H200, 512 copies of 4 KiB as one batch took 15 to 40 % less
        time, not profiled. Gathering the data on the host isn't counted.
    Exemptions
        Copies made by a batch call or a graph, runs interrupted by a kernel or a
        memset in the stream, copies between devices, unified-memory migrations,
        processes whose every launch blocks.
    Fix
        Gather the pieces in one pinned buffer, allocated once, and copy it whole;
        or hand the list to cudaMemcpyBatchAsync (CUDA 12.8, not on the legacy
        default stream). The sources must stay unchanged until the copy is done.
    References
        CUDA C++ Best Practices Guide, "Data transfer between host and device";
        CUDA Runtime API, cudaMemcpyBatchAsync.
    """
    findings: list[Finding] = []
    copies = _numbered_runs(trace)
    if copies.height < trace.limit(MIN_RUN):
        return findings
    for pid, region in regions(trace).items():
        here = copies.filter(region.holds())
        if here.height < trace.limit(MIN_RUN) or launches_block(trace, pid):
            continue
        runs = (
            here.group_by("run", maintain_order=True)
            .agg(
                pl.len().alias("copies"),
                pl.col("size_bytes").sum(),
                pl.col("start_ns", "issue_ns", "direction").first(),
                pl.col("pid", "correlation_id").first(),
                pl.col("end_ns").max(),
                (pl.col("end_ns") - pl.col("start_ns")).sum().alias("copying_ns"),
                pl.col("issue_end_ns").first().alias("first_done_ns"),
                pl.col("issue_end_ns").last().alias("last_done_ns"),
                pl.col("issue_ns").last().alias("last_issue_ns"),
            )
            .filter(
                (pl.col("copies") >= trace.limit(MIN_RUN))
                & (pl.col("copying_ns") < pl.col("last_issue_ns") - pl.col("issue_ns"))
            )
        )
        key = ["run", "correlation_id"]
        first = here.join(runs, on=key, how="semi").unique("run", keep="first")
        first = first.with_columns(sites(trace, first)).select("run", "site")
        runs = runs.join(first, on="run", how="left", validate="1:1")
        for (site,), place in groups(runs, "site"):
            stormed = here.join(place, on="run", how="semi", maintain_order="left")
            findings.append(_finding(trace, region, stormed, place, site))
    return findings


def _numbered_runs(trace: Trace) -> pl.DataFrame:
    """Small copies with the number of the run in their stream that they belong to."""
    single = pl.col("copy_count").fill_null(1) <= 1
    small = host_copies(trace).filter(
        (pl.col("size_bytes") < trace.limit(MAX_BYTES))
        & single
        & pl.col("graph_node_id").is_null()
        & pl.col("call_kind").is_in(("async memcpy", "sync memcpy"))
    )
    if small.height < trace.limit(MIN_RUN):
        return small
    key = ["pid", "stream_id", "correlation_id", "start_ns"]
    stream = ["pid", "stream_id"]
    follows = pl.col("place") - pl.col("place").shift(1) <= 1
    near = pl.col("issue_ns") - pl.col("issue_ns").shift(1) <= trace.limit(MAX_GAP_NS)
    same = pl.col("direction") == pl.col("direction").shift(1)
    goes_on = (follows & near & same).over(stream).fill_null(value=False)
    places = (
        trace.gpu_ops.lazy()
        .select(*key, "engine", pl.int_range(pl.len()).over(stream).alias("place"))
        .filter(pl.col("engine").is_in(("HtoD", "DtoH")))
        .drop("engine")
        .collect()
    )
    return (
        places.join(small, on=key, how="inner", maintain_order="left_right")
        .sort("pid", "stream_id", maintain_order=True)
        .with_columns((~goes_on).cum_sum().alias("run"))
        .drop("place")
    )


def _finding(
    trace: Trace, region: Region, copies: pl.DataFrame, runs: pl.DataFrame, site: object
) -> Finding:
    change = replayed(_change, trace, copies)
    cost = _cost(trace, region, runs, change)
    total = int(runs["size_bytes"].sum())
    directions = sorted(runs["direction"].unique())
    several = f", in {runs.height} runs" if runs.height > 1 else ""
    longest = runs.sort("copies", descending=True).head(5)
    return Finding(
        message=f"{copies.height} {' and '.join(directions)} copies of "
        f"{size_words(total // copies.height)} on average follow each other on one "
        f"stream{several}; together they hold {size_words(total)}",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM,
        cost=cost,
        where=locate(
            trace,
            calls=calls_behind(trace, copies),
            ops=ops_asked_by(trace, copies),
        ),
        occurrences=copies.height,
        evidence=tuple(
            Evidence(
                row["start_ns"],
                row["end_ns"],
                f"{row['copies']} {row['direction']} copies, "
                f"{size_words(row['size_bytes'])} in all",
                row["correlation_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix="gather the pieces in one pinned buffer that is allocated once and copy it "
        "whole, or use cudaMemcpyBatchAsync (CUDA 12.8, not on the legacy default "
        "stream); keep the sources unchanged until the copy is done",
        identity=("small copies", *directions, str(site or "")),
        change=change,
    )


def _change(trace: Trace, copies: pl.DataFrame) -> Change:
    """Each run as one copy: one call, no gaps, all bytes at the pinned rate."""
    replay = replay_of(trace)
    rest = copies.filter(~pl.col("run").is_first_distinct())
    before_last = copies.filter(~pl.col("run").is_last_distinct())
    calls = _calls(trace, rest)
    ops = replay.ops_of(rest)
    gaps = replay.constraints(Edge.STREAM, Edge.ENGINE, Edge.QUEUE, ops=ops)
    return Change(
        # The one call of synchronous copies waits as the last of them did.
        drop=replay.constraints(Edge.COPY, calls=_calls(trace, before_last)),
        op_duration=(ops, at_pinned_rate(trace, ops, unknown=BUS_RATE)),
        call_duration=(calls, np.zeros_like(calls)),
        think=(calls, np.zeros_like(calls)),
        latency=(gaps, np.zeros_like(gaps)),
        issue_latency=(ops, np.zeros_like(ops)),
    )


def _calls(trace: Trace, copies: pl.DataFrame) -> Int64:
    asked = copies.select("pid", "tid", pl.col("issue_ns").alias("start_ns"))
    return replay_of(trace).calls_of(asked)


def _cost(
    trace: Trace, region: Region, runs: pl.DataFrame, change: Change | None
) -> Cost:
    host = pl.col("last_done_ns") - pl.col("first_done_ns")
    device = pl.col("end_ns") - pl.col("start_ns") - pl.col("copying_ns")
    most = runs.select(pl.max_horizontal(host, device).sum()).item()
    return price_change(
        trace,
        region,
        change,
        Claim.UPPER_BOUND,
        "each run is one copy at the pinned rate, asked for by one call",
        direct=price(
            Claim.UPPER_BOUND,
            min(int(most), region.duration_ns),
            region,
            "by run: the larger of host time from the end of the first call to the "
            "end of the last, and time on the GPU less the copies",
        ),
    )

"""Rule carveout-switch-serialization."""

from __future__ import annotations

import polars as pl

from streamlint.arrays import ascending
from streamlint.blocking import launches_block
from streamlint.changes import Change
from streamlint.completeness import sizes_unknown
from streamlint.cost import price, severity_of
from streamlint.findings import Claim, Confidence, Evidence, Finding, NotAssessed
from streamlint.held import in_issue_order, price_without_delay, without_delay
from streamlint.intervals import union
from streamlint.replay import replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, regions
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

MIN_HELD = Threshold(
    "min-held",
    3,
    "held kernels",
    "Fewer held kernels are chance.",
)
HANDOVER_NS = 10_000
"""Blocks that begin this close to the end of another kernel may have waited for it.

Measured on an H200: 0.7 us before the end, as multiprocessors empty one by one, to 1.
"""
HANDOVER_SHARE = 0.1
"""The same as a part of the wait: in ten kernels two would be that close by chance."""
MIN_WAIT_NS = Threshold(
    "min-wait",
    10_000,
    "ns",
    "Shorter waits are the scatter of launches.",
)
MIN_HELD_SHARE = Threshold(
    "min-held-share",
    0.5,
    "share",
    "Where most delayed kernels waited for something else, so may these have.",
)
USUAL_QUANTILE = 0.25
"""How long a kernel takes that waits for nobody, even where most of its kind wait."""


@rule(needs=("kernels", "runtime_calls"))
def carveout_switch_serialization(trace: Trace) -> Outcome:
    """Kernels that need different shared memory configurations wait for each other.

    What it does
        Finds kernels of independent streams, executed with different amounts of
        shared memory a multiprocessor, that began, or whose last blocks began, only
        when one of the other configuration ended, although both had room.
    Why it costs time
        A multiprocessor splits one memory into L1 and shared memory. Blocks of a
        kernel with another split can start on it only when it is empty, so blocks
        that would fit wait. On an H200 two streams of such kernels took 6 to 7.5 ms,
        and 5 with one configuration; the split that the driver chooses by itself
        does it too.
    Evidence
        Kernels that were issued and at the head of their stream, whose start, or
        whose end less the usual time of such kernels, lies within 10 us of the end
        of a kernel of another stream and configuration: at least three, and half of
        all kernels of these configurations that were delayed. Other causes can look
        like this and the preferred carve-out is not recorded, so confidence is low.
        The cost is an upper bound: the run replayed without these waits.
    Exemptions
        Streams that wait for an event, work on the legacy default stream, kernels
        that don't fit on the GPU together, one configuration only.
    Fix
        Give the kernels that should overlap the same carve-out
        (cudaFuncSetAttribute, cudaFuncAttributePreferredSharedMemoryCarveout), large
        enough for the one that needs most, and measure. Streams that now overlap
        may race if they relied on taking turns.
    References
        CUDA C++ Programming Guide, "Implicit synchronization" and "Shared memory"
        of the compute capability.
    """
    findings: list[Finding] = []
    executed, streams = trace.kernels.select(
        pl.col("shared_executed_bytes").drop_nulls().n_unique(),
        pl.struct("pid", "stream_id").n_unique(),
    ).row(0)
    if not executed and streams > 1:
        return NotAssessed(
            "the export doesn't say with which shared memory configuration kernels ran",
            "export again with nsys, all tables and columns",
        )
    if executed < 2:
        return findings
    unable: NotAssessed | None = None
    for pid, region in regions(trace).items():
        kernels = _kernels(trace, pid)
        several = ("stream_id", "shared_executed_bytes")
        if launches_block(trace, pid) or any(
            kernels[name].n_unique() < 2 for name in several
        ):
            continue
        delayed = kernels.filter(
            region.holds() & (pl.col("wait_ns") >= trace.limit(MIN_WAIT_NS))
        )
        held = _held(kernels, delayed)
        apart = ["low_bytes", "high_bytes"]
        for (low, high), here in groups(held, *apart):
            alike = delayed.filter(pl.col("shared_executed_bytes").is_in((low, high)))
            most = trace.limit(MIN_HELD_SHARE) * alike.height
            if here.height >= max(trace.limit(MIN_HELD), most):
                unsized = sizes_unknown(here)
                unable = unsized or unable
                findings += [] if unsized else [_finding(trace, region, here)]
    return findings or unable or []


def _kernels(trace: Trace, pid: int) -> pl.DataFrame:
    """Kernels in issue order, columns of gpu_ops, with their configuration.

    Adds last_ns (when the last blocks began, if they took the usual time) and
    wait_ns (since all of the kernel could have begun).
    """
    key = ["pid", "correlation_id", "start_ns"]
    executed = trace.kernels.select(*key, "shared_executed_bytes").unique(key)
    kind = ("name", "sm_fraction", "shared_executed_bytes")
    lasting = pl.col("end_ns") - pl.col("start_ns")
    usual = lasting.quantile(USUAL_QUANTILE, "lower").over(kind).cast(pl.Int64)
    ready = pl.max_horizontal("ready_ns", "issue_end_ns")
    return (
        in_issue_order(trace, pid)
        .filter((pl.col("kind") == "kernel") & pl.col("graph_node_id").is_null())
        .join(executed, on=key, how="left", validate="m:1", maintain_order="left")
        .drop_nulls("shared_executed_bytes")
        .with_columns(
            (pl.col("start_ns") + (lasting - usual).clip(0)).alias("last_ns"),
            pl.min_horizontal(ready, "start_ns").alias("ready_ns"),
        )
        .with_columns((pl.col("last_ns") - pl.col("ready_ns")).alias("wait_ns"))
    )


def _held(kernels: pl.DataFrame, delayed: pl.DataFrame) -> pl.DataFrame:
    """Of these, kernels that waited for one of another stream and configuration.

    Adds until_ns (its end), other_stream_id, low_bytes and high_bytes (both
    configurations).
    """
    own, other = pl.col("shared_executed_bytes"), pl.col("other_bytes")
    ended = kernels.select(
        pl.col("end_ns").alias("until_ns"),
        pl.col("device_id"),
        pl.col("stream_id").alias("other_stream_id"),
        own.alias("other_bytes"),
        pl.col("sm_fraction").alias("other_fraction"),
    ).sort("until_ns")
    nearest = [
        here.sort("last_ns").join_asof(
            ended.filter(other != size),
            left_on="last_ns",
            right_on="until_ns",
            by="device_id",
            strategy="nearest",
            check_sortedness=False,
        )
        for (size,), here in groups(delayed, "shared_executed_bytes")
    ]
    if not nearest:
        return delayed.clear().with_columns(low_bytes=own, high_bytes=own)
    close = pl.min_horizontal(
        pl.lit(HANDOVER_NS), (HANDOVER_SHARE * pl.col("wait_ns")).cast(pl.Int64)
    )
    return (
        pl.concat(nearest)
        .filter(
            (pl.col("stream_id") != pl.col("other_stream_id"))
            & ((pl.col("last_ns") - pl.col("until_ns")).abs() <= close)
            & (
                # Of unknown size: the rule can't tell then.
                pl.col("sm_fraction").fill_null(0.0)
                + pl.col("other_fraction").fill_null(1.0)
                <= 1.0
            )
            & ~pl.col("after_wait")
            & (pl.col("stream_kind") != "null")
        )
        .with_columns(
            pl.min_horizontal(own, other).alias("low_bytes"),
            pl.max_horizontal(own, other).alias("high_bytes"),
        )
        .sort("start_ns", "stream_id")
    )


def _finding(trace: Trace, region: Region, held: pl.DataFrame) -> Finding:
    change = replayed(_change, trace, held)
    waited = union(column(held, "ready_ns"), column(held, "last_ns"))
    cost = price_without_delay(
        trace,
        region,
        change,
        held,
        "the same work without these waits",
        price(
            Claim.UPPER_BOUND,
            region.clip(waited).total_ns,
            region,
            "time in which a kernel or its last blocks waited",
        ),
    )
    low, high = held["low_bytes"][0], held["high_bytes"][0]
    calls = calls_behind(trace, held)
    longest = held.sort("wait_ns", descending=True, maintain_order=True).head(5)
    return Finding(
        message=f"{held.height} kernels or their last blocks began only when one of "
        f"another stream ended, though both fit: they run with {low // 1024} and "
        f"{high // 1024} KiB of shared memory a multiprocessor",
        severity=severity_of(cost),
        confidence=Confidence.LOW,
        cost=cost,
        where=locate(trace, calls=calls, ops=held),
        occurrences=held.height,
        evidence=tuple(
            Evidence(
                row["ready_ns"],
                row["last_ns"],
                f"blocks of {row['name']} wait for stream {row['other_stream_id']}",
                row["correlation_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix="give kernels that should overlap the same preferred carve-out, large "
        "enough for both, and measure; what relied on taking turns may then race",
        identity=("carve-out", *sorted(held["name"].unique())[:8]),
        change=change,
    )


def _change(trace: Trace, held: pl.DataFrame) -> Change:
    """Held kernels start when they can and take their usual time."""
    replay = replay_of(trace)
    key = ["pid", "correlation_id", "start_ns"]
    usual = (pl.col("end_ns") - pl.col("last_ns")).alias("usual_ns")
    rows = replay.graph.ops.select(*key, "op").join(
        held.select(*key, usual), on=key, how="inner", maintain_order="left"
    )
    ops = column(rows, "op")
    late = without_delay(replay, ascending(ops))
    return Change(
        op_duration=(ops, column(rows, "usual_ns")),
        latency=late.latency,
        issue_latency=late.issue_latency,
    )

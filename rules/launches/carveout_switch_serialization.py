"""Rule carveout-switch-serialization."""

from __future__ import annotations

import polars as pl

from streamlint.blocking import launches_block
from streamlint.cost import price
from streamlint.findings import Claim, Confidence, Evidence, Finding, Severity
from streamlint.held import in_issue_order, price_released, released
from streamlint.intervals import union
from streamlint.replay import replay_of
from streamlint.rule import Outcome, rule
from streamlint.steady import Region, column, regions
from streamlint.trace.model import Trace
from streamlint.where import locate

MIN_HELD = 3
"""Fewer held kernels are chance."""
HANDOVER_NS = 10_000
"""A kernel that starts this soon after another has ended may have waited for it."""
MIN_WAIT_NS = 10_000
"""Shorter waits are the scatter of launches."""


@rule(needs=("kernels", "runtime_calls"))
def carveout_switch_serialization(trace: Trace) -> Outcome:
    """Kernels with different shared memory configurations never run side by side.

    What it does
        Finds kernels of independent streams, executed with different amounts of
        shared memory a multiprocessor, that took turns although both had room.
    Why it costs time
        A multiprocessor splits one memory into L1 and shared memory. A kernel with
        another split can start on it only when it is empty, so kernels that would
        fit together can end up one after the other.
    Evidence
        Kernels that were issued and at the head of their stream, yet started within
        10 us of the end of a kernel of another stream and configuration, at least
        three times, while kernels of these two configurations never overlapped in
        the whole process. Other causes can look like this and the preferred
        carve-out is not recorded, so this is for information only. The cost is an
        upper bound: the run replayed without these waits.
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
    if trace.kernels["shared_executed_bytes"].drop_nulls().n_unique() < 2:
        return findings
    for pid, region in regions(trace).items():
        kernels = _kernels(trace, pid)
        several = ("stream_id", "shared_executed_bytes")
        if launches_block(trace, pid) or any(
            kernels[name].n_unique() < 2 for name in several
        ):
            continue
        held = _held(kernels).filter(region.holds())
        apart = ["low_bytes", "high_bytes"]
        for _, here in held.group_by(apart, maintain_order=True):
            if here.height >= MIN_HELD and not _overlap(kernels, here):
                findings.append(_finding(trace, region, here))
    return findings


def _kernels(trace: Trace, pid: int) -> pl.DataFrame:
    """Kernels in issue order, columns of gpu_ops, with their configuration."""
    key = ["pid", "correlation_id", "start_ns"]
    executed = trace.kernels.select(*key, "shared_executed_bytes").unique(key)
    return (
        in_issue_order(trace, pid)
        .filter((pl.col("kind") == "kernel") & pl.col("graph_node_id").is_null())
        .join(executed, on=key, how="left", validate="m:1", maintain_order="left")
        .drop_nulls("shared_executed_bytes")
    )


def _held(kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels that waited for one of another stream and configuration.

    Adds until_ns (its end), low_bytes and high_bytes (both configurations).
    """
    ended = kernels.select(
        pl.col("end_ns").alias("until_ns"),
        pl.col("device_id"),
        pl.col("stream_id").alias("other_stream_id"),
        pl.col("shared_executed_bytes").alias("other_bytes"),
        pl.col("sm_fraction").alias("other_fraction"),
    ).sort("until_ns")
    own, other = pl.col("shared_executed_bytes"), pl.col("other_bytes")
    return (
        kernels.sort("start_ns")
        .join_asof(
            ended,
            left_on="start_ns",
            right_on="until_ns",
            by="device_id",
            check_sortedness=False,
        )
        .filter(
            (pl.col("stream_id") != pl.col("other_stream_id"))
            & (own != other)
            & (pl.col("start_ns") - pl.col("until_ns") <= HANDOVER_NS)
            & (pl.col("until_ns") - pl.col("ready_ns") >= MIN_WAIT_NS)
            & (pl.col("sm_fraction") + pl.col("other_fraction") <= 1.0)
            & ~pl.col("after_wait")
            & (pl.col("stream_kind") != "null")
        )
        .with_columns(
            pl.min_horizontal(own, other).alias("low_bytes"),
            pl.max_horizontal(own, other).alias("high_bytes"),
        )
    )


def _overlap(kernels: pl.DataFrame, held: pl.DataFrame) -> bool:
    """Whether kernels of these two configurations ever ran at the same time."""
    running = [
        union(column(here, "start_ns"), column(here, "end_ns"))
        for size in (held["low_bytes"][0], held["high_bytes"][0])
        for here in [kernels.filter(pl.col("shared_executed_bytes") == size)]
    ]
    return len(running[0] & running[1]) > 0


def _finding(trace: Trace, region: Region, held: pl.DataFrame) -> Finding:
    replay = replay_of(trace)
    ops = replay.ops_of(held)
    change = released(replay, ops)
    waited = union(column(held, "ready_ns"), column(held, "start_ns"))
    cost = price_released(
        trace,
        region,
        change,
        ops,
        "the same work without these waits",
        price(
            Claim.UPPER_BOUND,
            waited.clip(region.start_ns, region.end_ns).total_ns,
            region,
            "time in which a kernel waited",
        ),
    )
    low, high = held["low_bytes"][0], held["high_bytes"][0]
    key = ["pid", "correlation_id"]
    calls = trace.launches.join(held, on=key, how="semi", maintain_order="left")
    waiting = (pl.col("until_ns") - pl.col("ready_ns")).alias("waiting_ns")
    longest = held.sort(waiting, descending=True, maintain_order=True).head(5)
    return Finding(
        message=f"{held.height} kernels waited for one of another stream whose "
        f"multiprocessors were set to {low // 1024} or {high // 1024} KiB of shared "
        "memory; kernels of the two configurations never overlap",
        severity=Severity.INFO,
        confidence=Confidence.LOW,
        cost=cost,
        where=locate(trace, calls=calls, ops=held),
        occurrences=held.height,
        evidence=tuple(
            Evidence(
                row["ready_ns"],
                row["start_ns"],
                f"{row['name']} waits for stream {row['other_stream_id']}",
                row["correlation_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix="give kernels that should overlap the same preferred carve-out, large "
        "enough for both, and measure; what relied on taking turns may then race",
        identity=("carve-out", *sorted(set(held["name"]))[:8]),
        change=change,
    )

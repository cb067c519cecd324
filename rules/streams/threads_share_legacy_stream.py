"""Rule threads-share-legacy-stream."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.blocking import concurrent_regions
from streamlint.completeness import sizes_unknown
from streamlint.cost import price, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding, NotAssessed
from streamlint.intervals import Bools, Int64, union
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, in_time, of_process
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

MIN_HELD = Threshold(
    "min-held",
    3,
    "held operations",
    "Fewer operations that waited for another thread's are start-up.",
)
MIN_WAIT_NS = Threshold(
    "min-wait",
    10_000,
    "ns",
    "Shorter waits are launch delays.",
)
HANDOVER_NS = 10_000
"""An operation that starts this soon after another ended was waiting for it."""
MIN_TOGETHER = Threshold(
    "min-together",
    0.1,
    "share",
    "Threads that are in CUDA calls at the same time for less than this part of the "
    "time in calls hand work to each other (PyTorch's autograd: never at once).",
)

_KIND_UNKNOWN = NotAssessed(
    "the export doesn't say which stream is the legacy default stream",
    "record and export with a current nsys, all tables",
)


@rule(needs=("runtime_calls",))
def threads_share_legacy_stream(trace: Trace) -> Outcome:
    """Several host threads launch into the one legacy default stream.

    What it does
        Finds threads of a process that are in CUDA calls at the same time and issue
        work without a stream, so that it lands on the context's legacy default
        stream, where operations of one thread waited for those of another.
    Why it costs time
        The legacy default stream is one for the whole process and runs its work in
        order. Threads that know nothing of each other take turns on the GPU, and
        each one's cudaStreamSynchronize waits for the work of all.
    Evidence
        Operations whose own thread's work was done, and which started within 10 us
        of the end of another thread's operation that left room for them. The cost
        is an upper bound: for each busy span of the stream the time with something
        held, at most the span less the busiest thread and less what the kernels
        need of the whole GPU. A trace can't show whether the threads' work depends
        on each other.
    Exemptions
        Threads that hand work to each other (never in CUDA calls at once), such as
        PyTorch's backward pass; per-thread default streams; kernels that fill the
        GPU; copies that use the same engine.
    Fix
        Compile with --default-stream per-thread, or give each thread a stream of
        its own (cudaStreamPerThread, or one made with cudaStreamNonBlocking). Order
        that the shared stream gave for free must then be kept with events.
    References
        CUDA Runtime API, "Stream synchronization behavior", per-thread default
        stream; measured on an H200: four threads 8.0 ms, 2.9 ms with a stream each.
    """
    findings: list[Finding] = []
    known = trace.streams.filter(pl.col("kind") == "null")["pid"].unique().implode()
    maybe = (pl.col("stream_kind") == "unknown") & ~pl.col("pid").is_in(known)
    shared = trace.gpu_ops.filter(
        ((pl.col("stream_kind") == "null") | maybe) & pl.col("issue_ns").is_not_null()
    )
    unable: NotAssessed | None = None
    threads = pl.col("tid").n_unique().over("pid", "context_id", "stream_id")
    shared = shared.filter(threads > 1)
    if not shared.height:
        return findings
    for pid, region in concurrent_regions(trace).items():
        own = of_process(shared, pid).filter(in_time(trace))
        place = ("context_id", "stream_id", "stream_kind")
        for (*_, kind), here in groups(own, *place):
            ops = _of_concurrent_threads(trace, here)
            held = _held(trace, ops).filter(region.holds())
            if held.height >= trace.limit(MIN_HELD):
                why = _KIND_UNKNOWN if kind == "unknown" else sizes_unknown(ops)
                unable = why or unable
                findings += [] if why else [_finding(trace, region, ops, held)]
    return findings or unable or []


def _of_concurrent_threads(trace: Trace, ops: pl.DataFrame) -> pl.DataFrame:
    """Operations of threads that were in CUDA calls while another of them was."""
    calls = trace.runtime_calls.lazy().filter(
        (pl.col("pid") == ops["pid"][0])
        & ~pl.col("nested")
        & pl.col("tid").is_in(ops["tid"].unique().implode())
        & pl.col("start_ns").is_between(ops["issue_ns"].min(), ops["end_ns"].max())
    )
    spans = {
        tid: union(column(here, "start_ns"), column(here, "end_ns"))
        for (tid,), here in groups(
            calls.select("tid", "start_ns", "end_ns").collect(), "tid"
        )
    }
    # One sweep for all threads: where the depth of the spans is over one.
    starts = np.concatenate([span.starts for span in spans.values()])
    ends = np.concatenate([span.ends for span in spans.values()])
    points = np.concatenate([starts, ends])
    order = np.argsort(points, kind="stable")
    points = points[order]
    depth = np.cumsum(np.where(order < len(starts), 1, -1))
    several = depth[:-1] > 1
    together = union(points[:-1][several], points[1:][several])
    concurrent = [
        tid
        for tid, span in spans.items()
        if (span & together).total_ns > trace.limit(MIN_TOGETHER) * span.total_ns
    ]
    return ops.filter(pl.col("tid").is_in(concurrent))


def _held(trace: Trace, ops: pl.DataFrame) -> pl.DataFrame:
    """Operations that waited for another thread's, with ready_ns and other_tid.

    The order is that of execution: calls of several threads block each other, so the
    one that began first may queue its work last.
    """
    ops = ops.sort("start_ns", "issue_ns", maintain_order=True)
    own_end = pl.col("end_ns").cum_max().shift(1).over("tid")
    ops = ops.with_columns(
        pl.max_horizontal(pl.min_horizontal("issue_end_ns", "start_ns"), own_end).alias(
            "ready_ns"
        ),
        pl.col("tid").shift(1).alias("other_tid"),
    )
    if ops.height < 2:
        return ops.clear()
    ends = np.maximum.accumulate(column(ops, "end_ns"))[:-1]
    before = np.concatenate([[np.iinfo(np.int64).min], ends])
    start, free = column(ops, "start_ns"), column(ops, "ready_ns")
    held = (before - free >= trace.limit(MIN_WAIT_NS)) & (start >= before)
    held &= (start - before <= HANDOVER_NS) & _had_room(ops)
    held &= (ops["tid"] != ops["other_tid"]).fill_null(value=False).to_numpy()
    return ops.filter(as_series(held))


def _had_room(ops: pl.DataFrame) -> Bools:
    """Whether each operation could run beside the one before it in the stream."""
    engine = ops["engine"].to_physical().to_numpy()
    # Of unknown size: small, for all that is known.
    fraction = ops["sm_fraction"].fill_null(0.0).to_numpy()
    same = engine == np.roll(engine, 1)
    compute = (ops["engine"] == "compute").to_numpy()
    room: Bools = ~same | (compute & (fraction + np.roll(fraction, 1) <= 1))
    return room


def _cost(ops: pl.DataFrame, held: pl.DataFrame, region: Region) -> Cost:
    """Each busy span shrinks to its busiest thread at best.

    The replay can drop the order of a stream only as a whole, that within each
    thread included.
    """
    spans = union(column(ops, "issue_ns"), column(ops, "end_ns"))
    spans = region.clip(spans)
    waited = union(column(held, "ready_ns"), column(held, "start_ns"))
    least: Int64 = np.zeros(len(spans), dtype=np.int64)
    for _, own in groups(ops, "tid"):
        running = union(column(own, "start_ns"), column(own, "end_ns"))
        least = np.maximum(least, running.overlap_ns(spans.starts, spans.ends))
    kernels = ops.filter(pl.col("engine") == "compute")
    at = np.searchsorted(spans.starts, column(kernels, "start_ns"), side="right") - 1
    area = (column(kernels, "end_ns") - column(kernels, "start_ns")) * kernels[
        "sm_fraction"
    ].fill_null(1.0).to_numpy()
    known = at >= 0
    filled = np.bincount(at[known], weights=area[known], minlength=len(spans))
    least = np.maximum(least, filled.astype(np.int64))
    room = (spans.ends - spans.starts - least).clip(0)
    lost = waited.overlap_ns(spans.starts, spans.ends)
    return price(
        Claim.UPPER_BOUND,
        int(np.minimum(room, lost).sum()),
        region,
        "time with an operation held by another thread's, at most the busy time of "
        "the stream less the busiest thread",
    )


def _finding(
    trace: Trace, region: Region, ops: pl.DataFrame, held: pl.DataFrame
) -> Finding:
    here = ops.filter(region.holds())
    cost = _cost(here, held, region)
    longest = held.sort(pl.col("start_ns") - pl.col("ready_ns"), descending=True)
    calls = calls_behind(trace, held)
    return Finding(
        message=f"{here['tid'].n_unique()} threads launch {here.height} operations "
        "into the one legacy default stream, where one waited for another "
        f"{held.height} times though the GPU had room for both",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=calls, ops=held),
        occurrences=held.height,
        evidence=tuple(
            Evidence(
                row["ready_ns"],
                row["start_ns"],
                f"{row['name']} of thread {row['tid']} waits for thread "
                f"{row['other_tid']}",
                row["correlation_id"],
            )
            for row in longest.head(5).iter_rows(named=True)
        ),
        fix="compile with --default-stream per-thread, or pass each thread a stream of "
        "its own; keep an order that is needed with events, or results may race",
        identity=("threads", *sorted(held["name"].unique())[:8]),
    )

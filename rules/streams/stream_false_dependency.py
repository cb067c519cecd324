"""Rule stream-false-dependency."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.blocking import concurrent_regions
from streamlint.changes import Change
from streamlint.completeness import sizes_unknown
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding
from streamlint.intervals import Int64, union
from streamlint.readiness import ready, released
from streamlint.replay import Edge, Replay, replay_of
from streamlint.replay.graph import connections
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, of_process
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

MIN_HELD = Threshold(
    "min-held",
    5,
    "held operations",
    "Fewer operations that start with another stream's are chance.",
)
MIN_WAIT_NS = Threshold(
    "min-wait",
    10_000,
    "ns",
    "Shorter waits are launch delays (catalogue: 2 to 30 us).",
)
START_NS = 5_000
"""From the start of the queue's operation to the next (0.3 to 1.8 us, H200)."""
MOST_QUEUES = 32
"""CUDA_DEVICE_MAX_CONNECTIONS goes from 1 to 32."""


@rule(needs=("runtime_calls",))
def stream_false_dependency(trace: Trace) -> Outcome:
    """Streams that share a work queue wait for each other without depending.

    What it does
        Finds operations that were ready and had room on the GPU, but started only
        once an operation of an unrelated stream had started.
    Why it costs time
        A process feeds its streams through a few hardware work queues, 8 by default
        (CUDA_DEVICE_MAX_CONNECTIONS). With more streams than that, several share a
        queue, and a queue is served in order: what is behind an operation that must
        wait for its own stream waits as well.
    Evidence
        More used streams than queues in a context, and at least five operations
        that waited over 10 us, with all their own dependencies done and room for
        them, until 5 us or less after the start of the last earlier operation of
        the queue. Which streams share a queue isn't in a trace; it is taken to go
        by their creation, as measured. The cost is the run replayed without the
        order of shared queues, an upper bound as kernels that then run together
        may slow each other down.
    Exemptions
        Many streams without such waits, however many; streams that wait for an
        event, the default stream or room on the GPU. A value that the program sets
        itself is not in the trace. Recording events with time stamps
        (--cuda-event-trace=true) adds such waits: confidence is low with events.
    Fix
        Set CUDA_DEVICE_MAX_CONNECTIONS to the number of streams (at most 32) in
        the environment before the program starts, use fewer streams, or issue
        breadth-first: one operation for each stream in turn. Some frameworks set
        1 to keep an order they need; look before raising that.
    References
        CUDA C++ Programming Guide, "CUDA environment variables"; H200 probe: 16
        streams on 8 queues ran 7.2 ms of work that fits into 4.
    """
    queues = connections(trace)
    findings: list[Finding] = []
    for pid, region in concurrent_regions(trace).items():
        ops = of_process(trace.gpu_ops, pid)
        used = (
            ops.filter(region.holds())
            .group_by("context_id", maintain_order=True)
            .agg(pl.col("stream_id").n_unique())
        )
        for context, streams in used.iter_rows():
            if streams <= queues:
                continue
            holds = _holds(trace, replay_of(trace), region, context)
            if len(holds.rows) >= trace.limit(MIN_HELD):
                findings.append(_finding(trace, region, holds, streams, queues))
    return findings


class _Holds(NamedTuple):
    """Operations held by their queue: rows of the graph, and from when until when.

    ``context`` has the rows of all operations of the context.
    """

    rows: Int64
    starts: Int64
    ends: Int64
    context: Int64


def _holds(trace: Trace, replay: Replay, region: Region, context: object) -> _Holds:
    graph = replay.graph
    inside = graph.ops.select(
        (pl.col("pid") == region.pid)
        & pl.col("context_id").eq_missing(-1 if context is None else context)
    )
    of_context = inside.to_series().to_numpy()
    free, queue = ready(graph, Edge.QUEUE), released(graph, [Edge.QUEUE])
    start = graph.op_start
    held = (
        of_context
        & (queue - free >= trace.limit(MIN_WAIT_NS))
        & (start - queue <= START_NS)
    )
    held &= (start > region.start_ns) & (start < region.end_ns)
    held &= (graph.ops["kind"] != "record").to_numpy() & region.chosen(graph.ops)
    rows = np.flatnonzero(held)
    return _Holds(rows, free[rows], queue[rows], np.flatnonzero(of_context))


def _change(replay: Replay, holds: _Holds) -> Change:
    """Every stream has a queue of its own."""
    return Change(drop=replay.constraints(Edge.QUEUE, ops=holds.context))


def _cost(trace: Trace, region: Region, holds: _Holds, change: Change) -> Cost:
    waited = region.clip(union(holds.starts, holds.ends))
    direct = price(
        Claim.UPPER_BOUND,
        waited.total_ns,
        region,
        "time with an operation held by its queue",
    )
    method = "operations don't wait for their queue, only for what they depend on"
    return price_change(trace, region, change, Claim.UPPER_BOUND, method, direct=direct)


def _finding(
    trace: Trace, region: Region, holds: _Holds, streams: int, queues: int
) -> Finding:
    replay = replay_of(trace)
    change = _change(replay, holds)
    cost = _cost(trace, region, holds, change)
    held = replay.graph.ops[holds.rows.tolist()].with_columns(
        as_series(holds.starts, "free_ns"), as_series(holds.ends, "waited")
    )
    key = ["pid", "correlation_id"]
    ops = trace.gpu_ops.join(held, on=[*key, "start_ns"], how="semi")
    calls = calls_behind(trace, held)
    longest = held.sort(pl.col("waited") - pl.col("free_ns"), descending=True).head(5)
    unsure = of_process(trace.event_records, region.pid).height > 0
    # Kernels that fill the GPU wait for room, not for their queue.
    unsure |= sizes_unknown(ops) is not None
    kernels = ops.filter(pl.col("kind") == "kernel")["name"]
    return Finding(
        message=f"{streams} streams share {queues} work queue"
        f"{'' if queues == 1 else 's'}: {len(holds.rows)} operations that were ready "
        "waited for another stream's operation to start",
        severity=severity_of(cost),
        confidence=Confidence.LOW if unsure else Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=calls, ops=ops),
        occurrences=len(holds.rows),
        evidence=tuple(
            Evidence(
                start,
                end,
                f"{kind} on stream {stream} is ready and waits for its queue",
                correlation_id,
            )
            for start, end, kind, stream, correlation_id in longest.select(
                "free_ns", "waited", "kind", "stream_id", "correlation_id"
            ).iter_rows()
        ),
        fix=_FIX if streams <= MOST_QUEUES else f"use fewer streams, and {_FIX}",
        identity=("queue", *sorted(kernels.unique())[:8]),
        change=change,
    )


_FIX = (
    "set CUDA_DEVICE_MAX_CONNECTIONS to the number of streams (at most 32) before the "
    "program starts, or issue one operation for each stream in turn"
)

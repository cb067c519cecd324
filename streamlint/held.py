"""Operations that started later than anything the replay knows of explains.

Shared by rules that know one more reason for an operation to wait. The replay keeps
such a delay as it was recorded; `without_delay` takes it out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from streamlint.arrays import NOTHING, as_series, earlier_max
from streamlint.changes import Change
from streamlint.cost import price, trusted, unreplayed
from streamlint.findings import Claim, Cost
from streamlint.intervals import Bools, Int64
from streamlint.replay import Edge, Replay, Schedule, replay_of, span_ns
from streamlint.steady import Region, of_process
from streamlint.trace.model import Trace

ISSUE_TAIL_NS = 3_000
"""From the return of a launch to the start of what nothing holds (1.9 to 3.1 us)."""


def in_issue_order(trace: Trace, pid: int) -> pl.DataFrame:
    """Operations of a process, columns of `Trace.gpu_ops`, in the order of their calls.

    issue_ns (where unrecorded: the start), before_ns (issue of the operation before
    it in its stream, null for the first), ready_ns (it was issued and the earlier
    ones of its stream were done), after_wait (a `cudaStreamWaitEvent` stands between
    it and the operation before).
    """
    waits = (
        of_process(trace.event_waits, pid)
        .drop_nulls("stream_id")
        .select("stream_id", pl.col("start_ns").alias("wait_ns"))
        .sort("wait_ns")
    )
    ordered = (
        of_process(trace.gpu_ops, pid)
        .with_columns(pl.coalesce("issue_ns", "start_ns").alias("issue_ns"))
        .sort("issue_ns", maintain_order=True)  # by start_ns they are sorted
    )
    stream = ordered["stream_id"]
    before = as_series(earlier_max(ordered["issue_ns"], stream), "before_ns")
    done = as_series(earlier_max(ordered["end_ns"], stream))
    ordered = ordered.with_columns(
        before.set(before == NOTHING, None),
        pl.max_horizontal("issue_ns", done).alias("ready_ns"),
    )
    if not waits.height:
        return ordered.with_columns(pl.lit(value=False).alias("after_wait"))
    since = pl.col("before_ns").fill_null(np.iinfo(np.int64).min)
    return (
        ordered.join_asof(
            waits,
            left_on="issue_ns",
            right_on="wait_ns",
            by="stream_id",
            check_sortedness=False,
        )
        .with_columns(
            (pl.col("wait_ns") > since).fill_null(value=False).alias("after_wait")
        )
        .drop("wait_ns")
    )


def unexplained(trace: Trace) -> pl.DataFrame:
    """Operations as the replay has them, with delay_ns: later than it can explain.

    Columns of `streamlint.replay.Graph.ops`.
    """
    graph = replay_of(trace).graph
    issued_late = graph.issue_latency - graph.plain_issue_latency
    delay = np.where(graph.op_delay > 0, graph.op_delay, issued_late.clip(0))
    return graph.ops.with_columns(as_series(delay, "delay_ns"))


def without_delay(replay: Replay, ops: Int64) -> Change:
    """These operations start as soon as all that the replay knows of lets them."""
    graph = replay.graph
    delay = graph.op_delay[ops]
    called = graph.call_duration[graph.issue_call[ops]] + ISSUE_TAIL_NS
    usual = np.minimum(graph.plain_issue_latency[ops], called)
    issue = np.minimum(graph.issue_latency[ops], usual) - delay
    # The delay comes after all bounds: less on each of them takes it out.
    bounds = replay.constraints(*Edge, ops=ops)
    latency = graph.latency[bounds] - graph.op_delay[graph.node[bounds]]
    return Change(latency=(bounds, latency), issue_latency=(ops, issue))


def price_without_delay(
    trace: Trace,
    region: Region,
    change: Change | None,
    held: pl.DataFrame,
    method: str,
    direct: Cost,
) -> Cost:
    """What the replay saves at most with ``change``, which lets ``held`` go.

    ``held`` are operations (rows of `Trace.gpu_ops` or parts of them). Without a change
    the cost is ``direct``.

    Their delays are what the bare model lacks, so its error is judged with them, and
    in the region alone: elsewhere others are late for the same reason.
    """
    if change is None:
        return unreplayed(direct)
    replay = replay_of(trace)
    ops = replay.ops_of(held)
    inside = replay.inside(region)
    error = _error_with_delays(replay, ops, inside)
    if not trusted(error):
        return unreplayed(direct, error)
    schedule = replay.run([change])
    saving = max(0, replay.saving_ns(schedule, region))
    saving += _first_wait(replay, schedule, region, ops, inside)
    saving += round(2 * abs(error) * saving)
    return price(Claim.UPPER_BOUND, saving, region, f"replay of the run: {method}")


def _first_wait(
    replay: Replay, schedule: Schedule, region: Region, ops: Int64, inside: Bools
) -> int:
    """How long the first operation of the region waited in it, if it is one of these.

    `Replay.saving_ns` counts from the start of that operation.
    """
    rows = np.flatnonzero(inside)
    if not len(rows):
        return 0
    starts = replay.recorded.op_start
    first = rows[starts[rows].argmin()]
    if first not in ops:
        return 0
    began = max(int(schedule.op_start[first]), region.start_ns)
    return max(0, int(starts[first]) - began)


def _error_with_delays(replay: Replay, ops: Int64, inside: Bools) -> float:
    """The error of the bare model where it knows the delays of these operations."""
    graph = replay.graph
    known = np.zeros(len(graph.op_delay), dtype=np.bool_)
    known[ops] = True
    bare = replace(
        graph,
        latency=graph.plain_latency,
        issue_latency=np.where(known, graph.issue_latency, graph.plain_issue_latency),
        op_delay=np.where(known, graph.op_delay, 0),
        call_delay=np.zeros_like(graph.call_delay),
    )
    recorded = span_ns(replay.recorded, inside)
    return span_ns(Replay(bare).run(), inside) / recorded - 1.0 if recorded else 0.0

"""Rule cross-context-serialization."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.completeness import sizes_unknown
from streamlint.cost import price, severity_of
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Where,
)
from streamlint.intervals import Intervals, union
from streamlint.readiness import with_ready
from streamlint.replay import Edge
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, in_scope, in_time, regions
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

MIN_HELD = Threshold(
    "min-held",
    3,
    "held kernels",
    "Fewer kernels that were held are start-up of the other process, not a pattern.",
)
MIN_HELD_NS = Threshold(
    "min-wait",
    50_000,
    "ns",
    "Shorter waits are the GPU's own scheduling; time slices take longer (0.33 ms seen "
    "on an H200).",
)
MIN_HELD_SHARE = Threshold(
    "min-held-share",
    0.5,
    "share",
    "Taking turns, one context or the other is held nearly all of the time.",
)
MAX_TOGETHER = 1.1
"""Kernels that run together run for longer, in sum, than the time that passes."""


@rule(needs=("kernels", "runtime_calls"))
def cross_context_serialization(trace: Trace) -> Outcome:
    """Kernels of several processes take turns on one GPU that has room for all.

    What it does
        Finds contexts, of one or of several processes, that had kernels ready on
        one physical GPU at the same time and ran them in turn.
    Why it costs time
        Without the Multi-Process Service a GPU runs one context at a time and
        switches between them in time slices. What one context leaves unused of the
        GPU stays unused until the switch.
    Evidence
        Time in which two contexts had kernels ready; their run time in it, a kernel
        counted with the median of its kind since a suspended one seems to run on,
        adds up to no more than the time that passed, and for at least half of it
        kernels were kept waiting or suspended for over 50 us. The cost is an upper
        bound: how much sooner the last context is done if each loses nothing of that
        time, to other contexts or to the switches. Which devices are one GPU is
        taken from the physical ids, not from the numbers that the processes use. A
        trace shows only the processes that were recorded.
    Exemptions
        Green contexts, processes on GPUs of their own, kernels that together ask
        for more than the GPU has, contexts that overlap (as under MPS or MIG).
    Fix
        Run the work as streams of one process, or start the Multi-Process Service
        (nvidia-cuda-mps-control -d) before the processes. Under MPS a fault in one
        client can take the others down.
    References
        CUDA C++ Programming Guide, "Concurrent kernel execution": kernels of
        different contexts can't run at the same time; NVIDIA Multi-Process Service.
    """
    green = trace.contexts.filter("is_green").select("pid", "context_id")
    kernels = trace.gpu_ops.filter(
        (pl.col("kind") == "kernel") & (pl.col("green_context_id").fill_null(0) == 0),
        in_time(trace),
    ).join(green, on=["pid", "context_id"], how="anti", nulls_equal=True)
    context = pl.struct("pid", "context_id")
    shared = kernels.filter(context.n_unique().over("gpu_id") > 1)
    findings: list[Finding] = []
    unable: NotAssessed | None = None
    for (gpu,), here in groups(shared, "gpu_id"):
        if not _overlapping_runs(here):
            continue
        if gpu is None:
            unable = _unknown_gpu(here) or unable
            continue
        turns = _turns(trace, here)
        if turns is not None:
            unsized = sizes_unknown(here)
            unable = unsized or unable
            fits = turns.asked <= 1 and not unsized
            findings += [_finding(trace, turns)] if fits else []
    return findings or unable or []


def _unknown_gpu(kernels: pl.DataFrame) -> NotAssessed | None:
    """Whether contexts whose GPU isn't known may be on one, and ran at a time."""
    alone = kernels.filter(pl.col("context_id").n_unique().over("pid", "device_id") > 1)
    if kernels["pid"].n_unique() < 2 and not alone.height:
        return None
    return NotAssessed(
        "the export doesn't say which of the contexts ran on one GPU",
        "export again with nsys 2025.1 or newer, all tables",
    )


class _Turns(NamedTuple):
    """Contexts that take turns: the time contended for, and what that costs at most.

    ``held`` has the kernels that were kept waiting or suspended, with ready_ns and
    held_ns; ``asked`` is the part of the GPU that all contexts ask for together.
    """

    contended: Intervals
    sooner_ns: int
    asked: float
    held: pl.DataFrame
    contexts: int
    region: Region


def _overlapping_runs(kernels: pl.DataFrame) -> bool:
    """Whether any two contexts were in use at the same time at all."""
    spans = (
        kernels.group_by("pid", "context_id")
        .agg(pl.col("start_ns").min(), pl.col("end_ns").max())
        .sort("start_ns")
    )
    return bool((spans["start_ns"] < spans["end_ns"].cum_max().shift(1)).any())


def _turns(trace: Trace, kernels: pl.DataFrame) -> _Turns | None:
    took = pl.col("end_ns") - pl.col("start_ns")
    # Without the engine: whoever holds the multiprocessors is the question.
    kernels = (
        with_ready(trace, kernels, Edge.ENGINE)
        .with_columns(took.median().over("name", "sm_fraction").alias("usual_ns"))
        .with_columns(
            pl.min_horizontal("usual_ns", took).cast(pl.Int64).alias("ran_ns")
        )
    )
    own = [here for _, here in kernels.group_by("pid", "context_id")]
    wanted = [union(column(c, "ready_ns"), column(c, "end_ns")) for c in own]
    pids = kernels["pid"].unique()
    judged = [region for pid, region in regions(trace).items() if pid in pids]
    if not judged:
        return None
    contended = union(*np.empty((2, 0), dtype=np.int64))
    for one, other in combinations(wanted, 2):
        contended = contended | (one & other)
    judged_times = union(*np.empty((2, 0), dtype=np.int64))
    for region in judged:
        judged_times = judged_times | region.times
    contended = contended & judged_times
    ran = [_ran_ns(context, contended) for context in own]
    held = pl.concat([_held(trace, context, contended) for context in own])
    held = held.filter(in_scope(trace))
    waited = _lost(held)
    taking_turns = (
        held.height >= trace.limit(MIN_HELD)
        and sum(ran) <= MAX_TOGETHER * contended.total_ns
        and (waited & contended).total_ns
        >= trace.limit(MIN_HELD_SHARE) * contended.total_ns
    )
    if not taking_turns:
        return None
    asked = sum(_fraction(context) for context in own)
    longest = max(judged, key=lambda region: region.duration_ns)
    sooner = _sooner_ns(trace, own, wanted, contended)
    return _Turns(contended, sooner, asked, held, len(own), longest)


def _sooner_ns(
    trace: Trace,
    contexts: list[pl.DataFrame],
    wanted: list[Intervals],
    contended: Intervals,
) -> int:
    """How much sooner the last context is done if none is held by another.

    Each is then done earlier by the contended time in which it had kernels ready,
    less what its busiest stream needed of it, or by all that its held kernels lost:
    the GPU may switch back to the last one long after the others are done.
    """
    done, sooner = [], []
    for context, ready in zip(contexts, wanted, strict=True):
        needed = max(
            _ran_ns(stream, contended) for _, stream in groups(context, "stream_id")
        )
        lost = _lost(_held(trace, context, contended)).total_ns
        done.append(int(ready.ends[-1]))
        sooner.append(done[-1] - max(lost, (ready & contended).total_ns - needed))
    return max(done) - max(sooner)


def _lost(held: pl.DataFrame) -> Intervals:
    """When these kernels were waiting or suspended, as if all before they ran."""
    ready = column(held, "ready_ns")
    return union(ready, ready + column(held, "held_ns"))


def _ran_ns(context: pl.DataFrame, contended: Intervals) -> int:
    """How long the context's kernels really ran in the contended time."""
    start, end = column(context, "start_ns"), column(context, "end_ns")
    inside = contended.overlap_ns(start, end)
    apart = int(np.minimum(inside, column(context, "ran_ns")).sum())
    return min(apart, (union(start, end) & contended).total_ns)


def _held(trace: Trace, context: pl.DataFrame, contended: Intervals) -> pl.DataFrame:
    """Kernels that waited or were suspended in the contended time."""
    lost = pl.col("end_ns") - pl.col("ready_ns") - pl.col("ran_ns")
    held = context.with_columns(lost.alias("held_ns"))
    inside = contended.overlap_ns(column(held, "ready_ns"), column(held, "end_ns"))
    return held.filter(
        (pl.col("held_ns") >= trace.limit(MIN_HELD_NS))
        & as_series(inside >= trace.limit(MIN_HELD_NS))
    )


def _fraction(context: pl.DataFrame) -> float:
    """Part of the GPU that the context's kernels ask for, weighed by run time."""
    asked = context["sm_fraction"].fill_null(1.0).to_numpy()
    return float(np.average(asked, weights=column(context, "ran_ns").clip(1)))


def _cost(turns: _Turns) -> Cost:
    """The replay knows no order between contexts that it could drop."""
    return price(
        Claim.UPPER_BOUND,
        turns.sooner_ns,
        turns.region,
        "how much sooner the last context is done, if none is ever held by another",
    )


def _finding(trace: Trace, turns: _Turns) -> Finding:
    cost = _cost(turns)
    held = turns.held
    processes = held["pid"].n_unique()
    who = f"{processes} processes" if processes > 1 else f"{turns.contexts} contexts"
    names = trace.processes.filter(pl.col("pid").is_in(held["pid"].implode()))["name"]
    longest = held.sort("held_ns", descending=True).head(5)
    return Finding(
        message=f"kernels of {who} take turns on one GPU: for "
        f"{turns.contended.total_ns / 1e6:.2f} ms several had kernels ready and one "
        f"ran at a time; {held.height} kernels were kept waiting or suspended",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM,
        cost=cost,
        where=_where(trace, held),
        occurrences=held.height,
        evidence=tuple(
            Evidence(
                row["ready_ns"],
                row["end_ns"],
                f"{row['name']} of process {row['pid']} is held for "
                f"{row['held_ns'] / 1e6:.2f} ms",
                row["correlation_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix="run the work as streams of one process, or start the Multi-Process "
        "Service (nvidia-cuda-mps-control -d) before the processes",
        identity=("contexts", *sorted(set(names.drop_nulls()))[:8]),
    )


def _where(trace: Trace, held: pl.DataFrame) -> Where:
    """The kernels, and more only where one process has all the contexts."""
    if held["pid"].n_unique() == 1:
        calls = calls_behind(trace, held)
        return locate(trace, calls=calls, ops=held)
    longest = held.group_by("name").agg(pl.col("ran_ns").sum())
    names = longest.sort("ran_ns", "name", descending=[True, False])["name"]
    return Where(kernels=tuple(names.head(3)))

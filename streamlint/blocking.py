"""Whether a process launches without concurrency: every launch waits for its kernel.

CUDA_LAUNCH_BLOCKING does that, and so do some debuggers. What other rules see in such
a run (host waits, streams in turn, launches in the way of the GPU) has this one cause.
"""

from __future__ import annotations

import polars as pl

from streamlint.steady import Region, in_time, regions
from streamlint.trace.model import Trace

VARIABLE = "CUDA_LAUNCH_BLOCKING"
MIN_BLOCKED_SHARE = 0.95
"""Part of the launches that return after the end of their kernel (cases, B28).

In ordinary captures of an H200 up to 3 % do, and none with a kernel of 20 us or more.
"""
MIN_LAUNCHES = 3
"""Fewer launches can't confirm what the environment says."""
MIN_LONG = 20
"""Without the environment's word, so many launches must have waited."""
LONG_NS = 20_000
"""A kernel of this length does not end within a launch that doesn't wait for it."""


def launches_block(trace: Trace, pid: int) -> bool:
    """Whether the launches of this process wait for their kernels.

    Rules about overlap, host waits and launch costs have nothing to say then.
    """
    return pid in trace.derived(_blocking)


def concurrent_regions(trace: Trace) -> dict[int, Region]:
    """The judged regions, by pid, of the processes whose launches don't wait."""
    return {
        pid: region
        for pid, region in regions(trace).items()
        if not launches_block(trace, pid)
    }


def said_by_environment(trace: Trace) -> bool:
    """Whether the recorded environment asks for blocking launches."""
    return trace.capture.environment.get(VARIABLE, "").strip() not in ("", "0")


def launches_with_kernels(trace: Trace, pid: int) -> pl.DataFrame:
    """Kernels launched one by one, columns of `Trace.gpu_ops`, with blocked and long.

    blocked: the call returned after the kernel's end; long: the kernel took 20 us.
    """
    return _launches_with_kernels(trace, pid).collect()


def _launches_with_kernels(trace: Trace, pid: int) -> pl.LazyFrame:
    return (
        trace.gpu_ops.lazy()
        .filter(
            (pl.col("pid") == pid)
            & (pl.col("kind") == "kernel")
            & pl.col("graph_node_id").is_null()
            & pl.col("issue_end_ns").is_not_null()
            & in_time(trace)
        )
        .with_columns(
            (pl.col("issue_end_ns") >= pl.col("end_ns")).alias("blocked"),
            (pl.col("end_ns") - pl.col("start_ns") >= LONG_NS).alias("long"),
        )
    )


def _blocking(trace: Trace) -> frozenset[int]:
    found: set[int] = set()
    for pid in trace.gpu_ops["pid"].unique():
        launches = (
            _launches_with_kernels(trace, pid).select("blocked", "long").collect()
        )
        telling = launches.filter("long")
        least = MIN_LONG
        if said_by_environment(trace):
            telling, least = launches, MIN_LAUNCHES
        blocked = int(telling["blocked"].sum())
        if telling.height >= least and blocked >= MIN_BLOCKED_SHARE * telling.height:
            found.add(pid)
    return frozenset(found)

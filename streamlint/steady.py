"""Which part of a run is judged: its repeated work, without start-up.

With NVTX ranges that repeat and hold most of the GPU work, the iterations after the
first. Without, the span of the GPU work; where a long start-up precedes the first
repetition of the work, from there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from streamlint.intervals import Int64, union
from streamlint.trace.model import Trace

MIN_ITERATIONS = 3
"""Fewer ranges of one name are no loop."""
MIN_ITERATION_WORK = 0.5
"""Iterations hold at least this part of the GPU work issued while they go on."""
MAX_STARTUP_SHARE = 0.25
"""A start-up longer than this part of the run is left out."""
_MAX_CANDIDATES = 20
_GROUP_SCHEMA = {
    "pid": pl.Int64,
    "group": pl.String,
    "start_ns": pl.Int64,
    "end_ns": pl.Int64,
}


class Region(NamedTuple):
    """The judged time of one process, in ns; ``iterations`` is 0 without NVTX."""

    pid: int
    start_ns: int
    end_ns: int
    iterations: int = 0
    nvtx: str | None = None

    @property
    def duration_ns(self) -> int:
        """Length in ns."""
        return self.end_ns - self.start_ns

    def holds(self, column: str = "start_ns") -> pl.Expr:
        """Rows of this process whose ``column`` lies inside."""
        inside = pl.col(column).is_between(self.start_ns, self.end_ns, closed="left")
        return (pl.col("pid") == self.pid) & inside


def regions(trace: Trace) -> dict[int, Region]:
    """The judged region of every process with GPU work, by pid."""
    return trace.derived(_regions)


def _regions(trace: Trace) -> dict[int, Region]:
    iterations = _iteration_groups(trace)
    found: dict[int, Region] = {}
    for (pid,), ops in trace.gpu_ops.partition_by("pid", as_dict=True).items():
        assert isinstance(pid, int)
        by_range = _by_iterations(iterations, ops, pid)
        found[pid] = by_range or _by_repetition(ops, pid)
    return found


def _iteration_groups(trace: Trace) -> pl.DataFrame:
    """NVTX ranges that could be iterations: pid, group, start_ns, end_ns."""
    key = ["pid", "tid", "domain", "group"]
    if trace.nvtx_ranges["mark"].all():
        return pl.DataFrame(schema=_GROUP_SCHEMA)
    ranges = trace.nvtx_ranges.filter(~pl.col("mark")).with_columns(
        pl.col("text").str.replace_all(r"\d+", "#").alias("group")
    )
    alone = (
        ranges.sort("start_ns")
        .with_columns(pl.col("end_ns").shift(1).over(key).alias("before_ns"))
        .group_by(key)
        .agg(
            pl.len().alias("count"),
            (pl.col("start_ns") < pl.col("before_ns")).any().alias("overlapping"),
            (pl.col("end_ns") - pl.col("start_ns")).sum().alias("total_ns"),
        )
        .filter((pl.col("count") >= MIN_ITERATIONS) & ~pl.col("overlapping"))
        .sort("total_ns", descending=True)
        .head(_MAX_CANDIDATES)
    )
    return ranges.join(alone, on=key, how="semi", nulls_equal=True).sort("start_ns")


def _by_iterations(groups: pl.DataFrame, ops: pl.DataFrame, pid: int) -> Region | None:
    if not groups.height:
        return None
    issued = ops["issue_ns"].drop_nulls().sort().to_numpy()
    if not len(issued):
        return None
    best: tuple[int, int, Region] | None = None
    of_process = groups.filter(pl.col("pid") == pid)
    for (name,), ranges in of_process.group_by("group", maintain_order=True):
        starts, ends = ranges["start_ns"].to_numpy(), ranges["end_ns"].to_numpy()
        counts = np.searchsorted(issued, ends) - np.searchsorted(issued, starts)
        held = int(counts.sum())
        around = np.searchsorted(issued, [starts[0], ends.max()])
        if held == 0 or held < MIN_ITERATION_WORK * (around[1] - around[0]):
            continue
        # Iterations follow each other; the first warms up and isn't judged.
        start, end = int(starts[1]), int(ends.max())
        tail = ops.filter(pl.col("issue_ns").is_between(start, end))["end_ns"].max()
        end = max(end, int(tail)) if isinstance(tail, int) else end
        total = int((ends - starts).sum())
        region = Region(pid, start, end, len(starts) - 1, str(name))
        if best is None or (held, total) > best[:2]:
            best = (held, total, region)
    return best[2] if best else None


def _by_repetition(ops: pl.DataFrame, pid: int) -> Region:
    start, end = _int(ops["start_ns"].min()), _int(ops["end_ns"].max())
    key = ["kind", "name", "stream_id"]
    starts = pl.col("start_ns").sort()
    groups = ops.group_by(key).agg(pl.len(), starts.slice(1, 1).first().alias("second"))
    second = groups.filter(pl.col("len") >= MIN_ITERATIONS)["second"].min()
    second = second if isinstance(second, int) else None
    if second is not None and second - start > MAX_STARTUP_SHARE * (end - start):
        start = second
    return Region(pid, start, end)


def busy(ops: pl.DataFrame) -> int:
    """Time with at least one of these operations running, in ns."""
    return union(column(ops, "start_ns"), column(ops, "end_ns")).total_ns


def column(frame: pl.DataFrame, name: str) -> Int64:
    """A column without nulls as an int64 array."""
    return frame[name].cast(pl.Int64).to_numpy()


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value

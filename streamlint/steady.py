"""Which part of a run is judged: its repeated work, without start-up, or a scope.

With NVTX ranges that repeat and hold most of the GPU work, the iterations after the
first. Without, the span of the GPU work; where a long start-up precedes the first
repetition of the work, from there. A user can name another part (`Scope`). Only what
rules judge is limited by it: what explains it, such as the flags of a stream, is seen
wherever it is in the trace. Of some time what is usual is measured there, too
(`in_time`), and no more is read than that takes (`streamlint.trace.part`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import polars.selectors as cs

from streamlint.arrays import as_series, ascending
from streamlint.errors import ScopeError
from streamlint.escape import printable
from streamlint.intervals import Bools, Int64, Intervals, union
from streamlint.settings import WHOLE, Scope
from streamlint.trace.model import Trace, schema

MIN_ITERATIONS = 3
"""Fewer ranges of one name are no loop."""
MIN_ITERATION_WORK = 0.5
"""Iterations hold at least this part of the GPU work issued while they go on."""
MAX_STARTUP_SHARE = 0.25
"""A start-up longer than this part of the run is left out."""
_MAX_CANDIDATES = 20
_GROUP_SCHEMA = {"pid": pl.Int32, "group": pl.String, **schema("start_ns", "end_ns")}


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """NVTX ranges that are judged: their calls, and the time of those and their work.

    ``times`` reaches over the ranges and, for what was launched within one on its
    thread, from the call to the end of the operation. ``calls`` has correlation ids.
    """

    times: Intervals
    calls: pl.Series


class Region(NamedTuple):
    """What is judged of one process, times in ns; ``iterations`` is 0 without NVTX.

    With ``device`` only the operations of that one, with ``ranges`` only calls within
    them and operations that such calls launched.
    """

    pid: int
    start_ns: int
    end_ns: int
    iterations: int = 0
    nvtx: str | None = None
    device: int | None = None
    ranges: Ranges | None = None

    @property
    def duration_ns(self) -> int:
        """Length in ns, without what lies between ranges."""
        if self.ranges is not None:
            return self.ranges.times.total_ns
        return self.end_ns - self.start_ns

    def holds(self, column: str = "start_ns") -> pl.Expr:
        """Rows of this process whose ``column`` lies inside.

        The device and the calls are asked of rows that have a device_id or a
        correlation_id.
        """
        inside = pl.col(column).is_between(self.start_ns, self.end_ns, closed="left")
        inside = (pl.col("pid") == self.pid) & inside
        asked: list[pl.Expr] = []
        if self.device is not None:
            asked.append(cs.by_name("device_id", require_all=False) == self.device)
        if self.ranges is not None:
            inside &= pl.col(column).map_batches(self._within, return_dtype=pl.Boolean)
            of_calls = cs.by_name("correlation_id", require_all=False)
            asked.append(of_calls.is_in(self.ranges.calls.implode()))
        if not asked:
            return inside
        return pl.all_horizontal(inside, *asked).fill_null(value=False)

    def chosen(self, rows: pl.DataFrame) -> Bools:
        """Which rows the device and the ranges leave, whenever they were."""
        if self.device is None and self.ranges is None:
            return np.ones(rows.height, dtype=np.bool_)
        chosen: Bools = rows.select(self.holds()).to_series().to_numpy()
        return chosen

    @property
    def times(self) -> Intervals:
        """The judged time."""
        if self.ranges is not None:
            return self.ranges.times
        return union(np.array([self.start_ns]), np.array([self.end_ns]))

    def clip(self, times: Intervals) -> Intervals:
        """The part of ``times`` that is judged."""
        clipped = times.clip(self.start_ns, self.end_ns)
        return clipped if self.ranges is None else clipped & self.ranges.times

    def _within(self, instants: pl.Series) -> pl.Series:
        assert self.ranges is not None
        times = self.ranges.times
        at = instants.fill_null(np.iinfo(np.int64).min).to_numpy()
        part = np.searchsorted(times.starts, at, side="right") - 1
        ends = np.append(times.ends, np.iinfo(np.int64).min)
        return as_series((part >= 0) & (at < ends[part]))


def regions(trace: Trace) -> dict[int, Region]:
    """The judged region of every process with GPU work, by pid."""
    return trace.derived(_regions)


def in_scope(trace: Trace) -> pl.Expr:
    """Rows that may be judged at all, for rules that look at whole processes."""
    if not trace.settings.scope.explicit:
        return pl.lit(value=True)
    held = [region.holds() for region in regions(trace).values()]
    return pl.any_horizontal(pl.lit(value=False), *held)


def in_time(trace: Trace) -> pl.Expr:
    """Rows that start in the times of the scope, for what is usual in a trace.

    All rows where it names none, or where the whole trace tells (`Scope.time`).
    """
    if trace.settings.scope.time is None:
        return pl.lit(value=True)
    start, end = trace.settings.scope.time
    after = pl.lit(value=True) if start is None else pl.col("start_ns") >= start
    return after if end is None else after & (pl.col("start_ns") < end)


def _regions(trace: Trace) -> dict[int, Region]:
    if trace.settings.scope != WHOLE:
        return _scoped(trace, trace.settings.scope)
    iterations = _iteration_groups(trace)
    found: dict[int, Region] = {}
    columns = ("pid", "kind", "name", "stream_id", "issue_ns", "start_ns", "end_ns")
    for (pid,), ops in groups(trace.gpu_ops.select(columns), "pid"):
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


def _by_iterations(ranges: pl.DataFrame, ops: pl.DataFrame, pid: int) -> Region | None:
    if not ranges.height:
        return None
    issued = ops["issue_ns"].drop_nulls().sort().to_numpy()
    if not len(issued):
        return None
    best: tuple[int, int, Region] | None = None
    for (name,), alike in groups(of_process(ranges, pid), "group"):
        starts, ends = alike["start_ns"].to_numpy(), alike["end_ns"].to_numpy()
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
    alike = ops.group_by(key).agg(pl.len(), starts.slice(1, 1).first().alias("second"))
    second = alike.filter(pl.col("len") >= MIN_ITERATIONS)["second"].min()
    second = second if isinstance(second, int) else None
    if second is not None and second - start > MAX_STARTUP_SHARE * (end - start):
        start = second
    return Region(pid, start, end)


# A scope that a user names ----------------------------------------------------------


def _scoped(trace: Trace, scope: Scope) -> dict[int, Region]:
    """The regions that ``scope`` leaves; raises `ScopeError` where that is nothing."""
    if not trace.gpu_ops.height:
        return {}  # no rule can judge the trace, and each says why
    ops = _of_device(_of_processes(trace, scope), scope)
    found: dict[int, Region] = {}
    ranges = _named(trace, scope.nvtx or scope.steady_nvtx)
    iterations = _iteration_groups(trace)
    for (pid,), own in ops.partition_by("pid", as_dict=True).items():
        assert isinstance(pid, int)
        named = ranges.filter(pl.col("pid") == pid)
        region: Region | None
        if scope.nvtx is not None:
            region = _by_ranges(trace, named, own, pid, scope.nvtx)
        elif scope.timed and not scope.steady_state:
            region = _all_of(own, pid)
        else:
            region = _by_named_iterations(named, own, pid, scope.steady_nvtx)
            if scope.steady_nvtx is None or not scope.steady_state:
                region = region or _by_iterations(iterations, own, pid)
            if not scope.steady_state:
                region = region or _by_repetition(own, pid)
        if region is not None:
            found[pid] = region._replace(device=scope.device)
    unmatched = scope.steady_nvtx is not None and not ranges.height
    if not found or unmatched:
        raise _without_ranges(trace, scope)
    starts = ranges if ranges.height else iterations
    timed = {
        pid: part
        for pid, region in found.items()
        if (part := _timed(region, scope, ops, starts)) is not None
    }
    if not timed:
        first, last = _int(ops["start_ns"].min()), _int(ops["end_ns"].max())
        raise ScopeError(
            "no GPU work starts in --time",
            hint=f"what is left runs from {first / 1e9:.6f}s to {last / 1e9:.6f}s",
        )
    return timed


def _of_processes(trace: Trace, scope: Scope) -> pl.DataFrame:
    """The operations of the processes that ``scope`` names."""
    if scope.process is None:
        return trace.gpu_ops
    names = dict(trace.processes.select("pid", "name").iter_rows())
    used = trace.gpu_ops["pid"].unique(maintain_order=True)
    chosen = [
        pid
        for pid in used
        if scope.process == str(pid) or fnmatchcase(names.get(pid) or "", scope.process)
    ]
    if not chosen:
        there = ", ".join(f"{names.get(pid) or '?'} ({pid})" for pid in used[:8])
        raise ScopeError(
            f"no process with GPU work is called {printable(scope.process, 80)}",
            hint=f"there are {printable(there)}",
        )
    return trace.gpu_ops.filter(pl.col("pid").is_in(chosen))


def _of_device(ops: pl.DataFrame, scope: Scope) -> pl.DataFrame:
    """The operations on the device that ``scope`` names."""
    if scope.device is None:
        return ops
    here = ops.filter(pl.col("device_id") == scope.device)
    if not here.height:
        used = ", ".join(map(str, ops["device_id"].drop_nulls().unique().sort()))
        raise ScopeError(
            f"nothing ran on device {scope.device}",
            hint=f"devices with work: {used or 'none is recorded'}",
        )
    return here


def _named(trace: Trace, pattern: str | None) -> pl.DataFrame:
    """NVTX ranges whose text fits the pattern; with group, as `_iteration_groups`."""
    ranges = trace.nvtx_ranges.filter(~pl.col("mark"))
    fitting: Iterable[str] = ()
    if pattern is not None:
        fitting = [t for t in ranges["text"].unique() if fnmatchcase(t, pattern)]
    ranges = ranges.filter(pl.col("text").is_in([*fitting]))
    return ranges.with_columns(pl.lit(pattern).alias("group")).sort("start_ns")


def _by_ranges(
    trace: Trace, ranges: pl.DataFrame, ops: pl.DataFrame, pid: int, pattern: str
) -> Region | None:
    """What was called within the ranges, on their threads, and what that launched."""
    calls = trace.runtime_calls.filter(pl.col("pid") == pid).drop_nulls(
        "correlation_id"
    )
    ids: list[pl.Series] = []
    for (tid,), own in ranges.partition_by("tid", as_dict=True).items():
        times = union(column(own, "start_ns"), column(own, "end_ns"))
        here = calls.filter(pl.col("tid") == tid)
        at = column(here, "start_ns")
        part = np.searchsorted(times.starts, at, side="right") - 1
        within = (part >= 0) & (at < times.ends[np.maximum(part, 0)])
        ids.append(here["correlation_id"].filter(as_series(within)))
    if not ids:
        return None
    called = pl.concat(ids).unique()
    launched = ops.filter(
        pl.col("correlation_id").is_in(called.implode())
        & pl.col("issue_ns").is_not_null()
    )
    if not launched.height:
        return None
    times = union(column(ranges, "start_ns"), column(ranges, "end_ns"))
    times = times | union(column(launched, "issue_ns"), column(launched, "end_ns"))
    return Region(
        pid,
        int(times.starts[0]),
        int(times.ends[-1]),
        ranges.height if ranges.height >= MIN_ITERATIONS else 0,
        pattern,
        ranges=Ranges(times, called),
    )


def _by_named_iterations(
    ranges: pl.DataFrame, ops: pl.DataFrame, pid: int, pattern: str | None
) -> Region | None:
    """From the second range on, as the first warms up; a single one is all there is."""
    if not ranges.height:
        return None
    starts = column(ranges, "start_ns")
    start, end = int(starts[min(1, len(starts) - 1)]), _int(ranges["end_ns"].max())
    launched = ops.filter(pl.col("issue_ns").is_between(start, end))
    if not launched.height:
        return None
    end = max(end, _int(launched["end_ns"].max()))
    return Region(pid, start, end, len(starts) - 1, pattern)


def _all_of(ops: pl.DataFrame, pid: int) -> Region:
    """From the first call that launched work on."""
    first = ops.select(pl.min_horizontal("issue_ns", "start_ns").min()).item()
    return Region(pid, _int(first), _int(ops["end_ns"].max()))


def _timed(
    region: Region, scope: Scope, ops: pl.DataFrame, ranges: pl.DataFrame
) -> Region | None:
    """The part of ``region`` in the times of ``scope``, None where nothing starts."""
    if scope.timed:
        start, end = region.start_ns, region.end_ns
        start = max(start, start if scope.start_ns is None else scope.start_ns)
        end = min(end, end if scope.end_ns is None else scope.end_ns)
        if end <= start:
            return None
        begun = ranges.filter(
            (pl.col("pid") == region.pid)
            & (pl.col("group") == (region.nvtx or ""))
            & pl.col("start_ns").is_between(start, end, closed="left")
        ).height
        held = region.ranges
        if held is not None:
            held = Ranges(held.times.clip(start, end), held.calls)
        region = region._replace(
            start_ns=start,
            end_ns=end,
            iterations=min(region.iterations, begun),
            ranges=held,
        )
    return region if ops.filter(region.holds()).height else None


def _without_ranges(trace: Trace, scope: Scope) -> ScopeError:
    """There are no ranges as asked, or nothing is launched within."""
    import difflib

    ranges = trace.nvtx_ranges.filter(~pl.col("mark"))
    counts = ranges["text"].value_counts(sort=True).head(1_000)
    texts = list(counts["text"])
    pattern = scope.nvtx or scope.steady_nvtx
    if pattern is None:
        message = "no NVTX ranges repeat and hold most of the GPU work"
    elif _named(trace, pattern).height:
        message = f'nothing is launched within NVTX ranges "{printable(pattern, 80)}"'
    else:
        message = f'no NVTX range fits "{printable(pattern, 80)}"'
    near = difflib.get_close_matches(pattern or "", texts, n=3, cutoff=0.5)
    there = ", ".join(f'"{printable(text, 60)}"' for text in near or texts[:5])
    if not there:
        return ScopeError(message, hint="record with -t cuda,nvtx and mark the ranges")
    if pattern is None:
        return ScopeError(
            message, hint=f"name them in steady-state-nvtx; seen: {there}"
        )
    return ScopeError(message, hint=f"there are {there}")


def busy(ops: pl.DataFrame) -> int:
    """Time with at least one of these operations running, in ns."""
    return union(column(ops, "start_ns"), column(ops, "end_ns")).total_ns


def of_process(frame: pl.DataFrame, pid: int) -> pl.DataFrame:
    """The rows of one process: the frame itself where there is no other."""
    pids = frame["pid"]
    if not len(pids) or (pids.min() == pid == pids.max() and not pids.null_count()):
        return frame
    return frame.filter(pl.col("pid") == pid)


def issued_ns(ops: pl.DataFrame) -> Int64:
    """When each operation was issued; its start where that was not recorded."""
    issued = ops["issue_ns"]
    if issued.null_count():
        issued = issued.zip_with(issued.is_not_null(), ops["start_ns"])
    return issued.to_numpy()


def done_before(ops: pl.DataFrame, instants: Int64) -> Int64:
    """When all of the operations issued before each instant had ended, if any.

    The instant itself where there are none.
    """
    issued = issued_ns(ops)
    order = np.argsort(issued, kind="stable")
    ended = np.maximum.accumulate(column(ops, "end_ns")[order])
    before = np.searchsorted(issued[order], instants, side="left") - 1
    done = instants.copy()
    done[before >= 0] = ended[before[before >= 0]]
    return done


def groups(
    frame: pl.DataFrame, *by: str
) -> Iterator[tuple[tuple[Any, ...], pl.DataFrame]]:
    """Rows alike in these columns with what they have there, by their first rows.

    As ``group_by`` with ``maintain_order``, which takes ten times as long to begin.
    """
    if frame.height and all(_alike(frame[name]) for name in by):
        yield tuple(frame[name][0] for name in by), frame
        return
    for rows in frame.partition_by(*by):
        yield tuple(rows[name][0] for name in by), rows


def _alike(values: pl.Series) -> bool:
    """Whether all of these, at least one, are the same, or null."""
    if values.dtype.is_integer() and not values.null_count():
        return values.min() == values.max()
    return values.n_unique() == 1


def distinct(frame: pl.DataFrame, name: str) -> list[int]:
    """The numbers in a column, ascending, each once and without null."""
    numbers = frame[name]
    if numbers.null_count():
        numbers = numbers.drop_nulls()
    return [*map(int, ascending(numbers.to_numpy()))]


def column(frame: pl.DataFrame, name: str) -> Int64:
    """A column without nulls as an int64 array."""
    return frame[name].cast(pl.Int64).to_numpy()


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value

"""What a run would have cost without a fault: a replay of the recorded schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import polars as pl

from streamlint.changes import Change
from streamlint.intervals import Bools, Int64
from streamlint.replay.graph import Edge, Graph, build
from streamlint.replay.schedule import evaluate
from streamlint.steady import Region, column
from streamlint.trace.model import Trace

__all__ = [
    "Edge",
    "Graph",
    "Replay",
    "ReplayNeeded",
    "Schedule",
    "replay_of",
    "replayed",
    "span_ns",
]

_T = TypeVar("_T")
_P = ParamSpec("_P")


class ReplayNeeded(Exception):
    """A rule can't tell without a replay, and the settings want none."""


class Schedule(NamedTuple):
    """Times in ns of every operation (rows of `Graph.ops`) and call (`Graph.calls`)."""

    op_start: Int64
    op_end: Int64
    call_start: Int64
    call_end: Int64


class Replay:
    """The graph of one trace and its schedules."""

    def __init__(self, graph: Graph) -> None:
        """Wrap a built graph."""
        self.graph = graph
        self._in_region: dict[Region, Bools] = {}

    def run(self, changes: Iterable[Change] = ()) -> Schedule:
        """The schedule with the changes made; without any, the recorded one exactly.

        Where two changes give one thing different values, the smaller holds.
        """
        return _schedule(_changed(self.graph, changes))

    @cached_property
    def recorded(self) -> Schedule:
        """The schedule of the trace itself."""
        graph = self.graph
        ends = graph.op_start + graph.op_duration
        return Schedule(graph.op_start, ends, graph.call_first, graph.call_end)

    @cached_property
    def plain(self) -> Schedule:
        """The schedule of the bare model, with usual latencies only."""
        graph = self.graph
        bare = replace(
            graph,
            latency=graph.plain_latency,
            issue_latency=graph.plain_issue_latency,
            op_delay=np.zeros_like(graph.op_delay),
            call_delay=np.zeros_like(graph.call_delay),
        )
        return _schedule(bare)

    @cached_property
    def error(self) -> float:
        """How far the bare model is off: its GPU span over the recorded one, less 1."""
        recorded, plain = span_ns(self.recorded), span_ns(self.plain)
        return plain / recorded - 1.0 if recorded else 0.0

    def saving_ns(self, schedule: Schedule, region: Region) -> int:
        """How much sooner the work of ``region`` is done in ``schedule``, in ns.

        From the start of its first operation to the end of its last, or to the end
        of its last iteration where the host works on after that.
        """
        inside = self._inside(region)
        if not inside.any():
            return 0
        recorded = self.recorded
        first = np.flatnonzero(inside)[recorded.op_start[inside].argmin()]
        begins_sooner = recorded.op_start[first] - schedule.op_start[first]
        end, new_end = recorded.op_end[inside].max(), schedule.op_end[inside].max()
        own = column(self.graph.calls, "pid") == region.pid
        made = np.flatnonzero(own & (recorded.call_end <= region.end_ns))
        if region.iterations and len(made) and end < region.end_ns:
            last = made[recorded.call_end[made].argmax()]
            host = region.end_ns - recorded.call_end[last]
            end, new_end = region.end_ns, max(new_end, schedule.call_end[last] + host)
        return int(end - new_end - begins_sooner)

    # Selecting what a change is about -----------------------------------------

    def ops_of(self, rows: pl.DataFrame) -> Int64:
        """Indexes of these operations (rows of `Trace.gpu_ops` or parts of them).

        ``rows`` needs pid, correlation_id and start_ns.
        """
        key = ["pid", "correlation_id", "start_ns"]
        return _indexes(self.graph.ops.join(rows, on=key, how="semi")["op"])

    def calls_of(self, rows: pl.DataFrame) -> Int64:
        """Indexes of these calls (rows of `Trace.runtime_calls` or parts of them).

        ``rows`` needs pid, tid and start_ns.
        """
        key = ["pid", "tid", "start_ns"]
        return _indexes(self.graph.calls.join(rows, on=key, how="semi")["call_index"])

    def constraints(
        self, *kinds: Edge, ops: Int64 | None = None, calls: Int64 | None = None
    ) -> Int64:
        """Indexes of the constraints of these kinds, on these operations or calls."""
        graph = self.graph
        chosen = np.isin(graph.kind, [int(kind) for kind in kinds])
        nodes = [ops] if ops is not None else []
        nodes += [calls + graph.ops.height] if calls is not None else []
        if nodes:
            chosen &= np.isin(graph.node, np.concatenate(nodes))
        return np.flatnonzero(chosen)

    def _inside(self, region: Region) -> Bools:
        if region not in self._in_region:
            rows = self.graph.ops.select(
                region.holds() & (pl.col("kind") != "record")
            ).to_series()
            self._in_region[region] = rows.to_numpy()
        return self._in_region[region]


def replay_of(trace: Trace) -> Replay:
    """The replay of ``trace``, built once.

    Raises `ReplayNeeded` where the settings want none: the rule is then not assessed.
    """
    if not trace.settings.replay:
        raise ReplayNeeded
    return trace.derived(_replay_of)


def replayed(
    make: Callable[Concatenate[Trace, _P], _T],
    trace: Trace,
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _T | None:
    """What ``make`` gives, such as the `Change` of a fix; None without a replay."""
    return make(trace, *args, **kwargs) if trace.settings.replay else None


def _replay_of(trace: Trace) -> Replay:
    return Replay(build(trace))


def _changed(graph: Graph, changes: Iterable[Change]) -> Graph:
    active = graph.active.copy()
    values = {
        name: getattr(graph, field).copy()
        for name, field in (
            ("op_duration", "op_duration"),
            ("call_duration", "call_duration"),
            ("think", "think_ns"),
            ("latency", "latency"),
            ("issue_latency", "issue_latency"),
        )
    }
    for change in changes:
        active[change.drop] = False
        for name, array in values.items():
            index, value = getattr(change, name)
            array[index] = np.minimum(array[index], value)
    return replace(
        graph,
        active=active,
        op_duration=values["op_duration"],
        call_duration=values["call_duration"],
        think_ns=values["think"],
        handover_ns=graph.handover_ns,
        latency=values["latency"],
        issue_latency=values["issue_latency"],
    )


def _schedule(graph: Graph) -> Schedule:
    starts, begins, ends = evaluate(graph)
    return Schedule(starts, starts + graph.op_duration, begins, ends)


def span_ns(schedule: Schedule, rows: Bools | None = None) -> int:
    """From the first start to the last end of the operations, in ns."""
    starts, ends = schedule.op_start, schedule.op_end
    if rows is not None:
        starts, ends = starts[rows], ends[rows]
    return int(ends.max() - starts.min()) if len(starts) else 0


def _indexes(series: pl.Series) -> Int64:
    return series.cast(pl.Int64).to_numpy()

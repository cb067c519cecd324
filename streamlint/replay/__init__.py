"""What a run would have cost without a fault: a replay of the recorded schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import polars as pl

from streamlint.arrays import ascending
from streamlint.changes import Change
from streamlint.intervals import Bools, Int64
from streamlint.once import once
from streamlint.replay.graph import (
    Edge,
    Graph,
    Indexes,
    build,
    spans,
    starting_with,
)
from streamlint.replay.schedule import NEVER, Schedule, evaluate, prepare
from streamlint.steady import Region, column, in_time
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
    "spans",
]

_T = TypeVar("_T")
_P = ParamSpec("_P")


class ReplayNeeded(Exception):
    """A rule can't tell without a replay, and the settings want none."""


class Replay:
    """The graph of one trace and its schedules."""

    def __init__(self, graph: Graph, around: Bools | None = None) -> None:
        """Wrap a built graph; ``around`` are operations that its error is told by."""
        self.graph = graph
        ends = graph.op_start + graph.op_duration
        self.recorded = Schedule(graph.op_start, ends, graph.call_first, graph.call_end)
        """The schedule of the trace itself."""
        self._around = around
        self._in_region: dict[Region, _Held | None] = {}

    def run(self, changes: Iterable[Change] = ()) -> Schedule:
        """The schedule with the changes made; without any, the recorded one exactly.

        Where two changes give one thing different values, the smaller holds. Only
        parts of the graph that any is about are evaluated, from the first time that
        any is about, or all without any.
        """
        graph, changes = self.graph, list(changes)
        if not changes:
            return self._schedule(graph)
        nodes = np.concatenate([graph.nodes_of(change) for change in changes])
        parts = np.flatnonzero(np.bincount(graph.part[nodes]))
        ops, calls = nodes[nodes < graph.ops.height], nodes[nodes >= graph.ops.height]
        first_op = graph.op_start[ops].min(initial=-NEVER)
        first_call = graph.call_first[calls - graph.ops.height].min(initial=-NEVER)
        since_ns = min(first_op, first_call)
        return evaluate(_changed(graph, changes), self.recorded, parts, since_ns)

    def _plain(self) -> Schedule:
        """The schedule of the bare model, with usual latencies only."""
        graph = self.graph
        bare = replace(
            graph,
            latency=graph.plain_latency,
            issue_latency=graph.plain_issue_latency,
            op_delay=np.zeros_like(graph.op_delay),
            call_delay=np.zeros_like(graph.call_delay),
        )
        return self._schedule(bare)

    def _schedule(self, graph: Graph) -> Schedule:
        parts = range(len(graph.event_bounds) - 1)
        return evaluate(graph, self.recorded, parts)

    @once
    def error(self) -> float:
        """How far the bare model is off: its GPU span over the recorded one, less 1."""
        recorded, plain = self.span_ns(self.recorded), self.span_ns(self._plain())
        return plain / recorded - 1.0 if recorded else 0.0

    def span_ns(self, schedule: Schedule) -> int:
        """From the first start to the last end of what the error is told by, in ns."""
        return span_ns(schedule, self._around)

    def saving_ns(self, schedule: Schedule, region: Region) -> int:
        """How much sooner the work of ``region`` is done in ``schedule``, in ns.

        From the start of its first operation to the end of its last, or to the end
        of its last iteration where the host works on after that.
        """
        held = self._held(region)
        if held is None:
            return 0
        recorded = self.recorded
        begins_sooner = recorded.op_start[held.first] - schedule.op_start[held.first]
        end, new_end = held.end_ns, schedule.op_end[held.ops].max()
        if held.call is not None:
            host = region.end_ns - recorded.call_end[held.call]
            new_end = max(new_end, schedule.call_end[held.call] + host)
            end = region.end_ns
        return int(end - new_end - begins_sooner)

    # Selecting what a change is about -----------------------------------------

    def ops_of(self, rows: pl.DataFrame) -> Int64:
        """Indexes of these operations (rows of `Trace.gpu_ops` or parts of them).

        ``rows`` needs pid, correlation_id and start_ns.
        """
        key = ["pid", "correlation_id", "start_ns"]
        return _indexes(self.ops_at(rows).join(rows, on=key, how="semi")["op"])

    def ops_at(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The operations that start as any of these rows: few to compare with them.

        pid, correlation_id, start_ns, op (their index); those that start together
        in the order of their indexes.
        """
        return starting_with(self._by_start, rows)

    def ops_issued_by(self, calls: Int64) -> Int64:
        """Indexes of the operations that these calls (indexes, each once) issued."""
        order, issue_call = self._by_call
        first = np.searchsorted(issue_call, calls, side="left")
        last = np.searchsorted(issue_call, calls, side="right")
        return np.sort(order[spans(first, last)])

    def calls_of(self, rows: pl.DataFrame) -> Int64:
        """Indexes of these calls (rows of `Trace.runtime_calls` or parts of them).

        ``rows`` needs pid, tid and start_ns.
        """
        key = ["pid", "tid", "start_ns"]
        calls = starting_with(self.graph.calls.select(*key, "call_index"), rows)
        return _indexes(calls.join(rows, on=key, how="semi")["call_index"])

    def constraints(
        self, *kinds: Edge, ops: Int64 | None = None, calls: Int64 | None = None
    ) -> Int64:
        """Indexes of the constraints of these kinds, on these operations or calls."""
        graph = self.graph
        numbers = [int(kind) for kind in kinds]
        if ops is None and calls is None:
            return np.flatnonzero(np.isin(graph.kind, numbers))
        on = []
        for nodes, first in (
            (ops, graph.op_constraints),
            (calls, graph.call_constraints),
        ):
            if nodes is not None:
                each = ascending(nodes)
                on.append(spans(first[each], first[each + 1]))
        found = np.concatenate(on)
        return found[np.isin(graph.kind[found], numbers)]

    @once
    def in_streams(self) -> tuple[Int64, Indexes, Indexes]:
        """Constraints of the order of streams: indexes, operations, those before."""
        graph = self.graph
        order = self.constraints(Edge.STREAM)
        last = graph.group_offset[graph.group[order]] + graph.count[order] - 1
        return order, graph.node[order], graph.member[last]

    def inside(self, region: Region) -> Bools:
        """Which operations are judged."""
        rows = self.graph.ops.select(region.holds() & (pl.col("kind") != "record"))
        inside: Bools = rows.to_series().to_numpy()
        return inside

    def _held(self, region: Region) -> _Held | None:
        if region not in self._in_region:
            self._in_region[region] = self._made_held(region)
        return self._in_region[region]

    def _made_held(self, region: Region) -> _Held | None:
        ops, recorded = np.flatnonzero(self.inside(region)), self.recorded
        if not len(ops):
            return None
        first = int(ops[recorded.op_start[ops].argmin()])
        end = int(recorded.op_end[ops].max())
        own = column(self.graph.calls, "pid") == region.pid
        made = np.flatnonzero(own & (recorded.call_end <= region.end_ns))
        call = None
        if region.iterations and len(made) and end < region.end_ns:
            call = int(made[recorded.call_end[made].argmax()])
        return _Held(ops, first, end, call)

    @once
    def _by_start(self) -> pl.DataFrame:
        ops = self.graph.ops.select("pid", "correlation_id", "start_ns", "op")
        return ops.sort("start_ns", maintain_order=True)

    @once
    def _by_call(self) -> tuple[Int64, Indexes]:
        """Operations in the order of the calls that issued them, and these calls."""
        order: Int64 = np.argsort(self.graph.issue_call, kind="stable")
        return order, self.graph.issue_call[order]


class _Held(NamedTuple):
    """What of a region a saving is told by; ``call`` is its last where that counts."""

    ops: Int64
    first: int
    end_ns: int
    call: int | None


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
    prepare(trace.runtime_calls.height + trace.gpu_ops.height)
    graph = build(trace)
    if trace.settings.scope.time is None:
        return Replay(graph)
    # What a part of the trace tells must be what all of it tells.
    judged = graph.ops.select(in_time(trace) & (pl.col("kind") != "record"))
    return Replay(graph, judged.to_series().to_numpy())


_CHANGING = {
    "op_duration": "op_duration",
    "call_duration": "call_duration",
    "think": "think_ns",
    "latency": "latency",
    "issue_latency": "issue_latency",
}
"""Of a `Change` and of a `Graph`."""


def _changed(graph: Graph, changes: Iterable[Change]) -> Graph:
    changed: dict[str, Any] = {}

    def own(field: str) -> Any:
        if field not in changed:
            changed[field] = getattr(graph, field).copy()
        return changed[field]

    for change in changes:
        if len(change.drop):
            own("active")[change.drop] = False
        for name, field in _CHANGING.items():
            index, value = getattr(change, name)
            if len(index):
                values = own(field)
                values[index] = np.minimum(values[index], value)
    return replace(graph, **changed)


def span_ns(schedule: Schedule, rows: Bools | None = None) -> int:
    """From the first start to the last end of the operations, in ns."""
    starts, ends = schedule.op_start, schedule.op_end
    if rows is not None:
        starts, ends = starts[rows], ends[rows]
    return int(ends.max() - starts.min()) if len(starts) else 0


def _indexes(series: pl.Series) -> Int64:
    return np.sort(series.cast(pl.Int64).to_numpy())

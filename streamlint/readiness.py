"""When each operation could have started, by the kind of constraint that held it.

Shared by the rules about operations that wait for what they don't depend on. The
constraints are those of the replay, with the times of the trace itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.intervals import Int64
from streamlint.replay import Edge, Graph, replay_of
from streamlint.replay.schedule import NEVER
from streamlint.steady import column
from streamlint.trace.model import Trace


def released(graph: Graph, kinds: Iterable[Edge]) -> Int64:
    """When the last constraint of these kinds let each operation start, ns.

    One entry a row of ``graph.ops``; `NEVER` where there is no such constraint.
    """
    result = np.full(graph.ops.height, NEVER)
    chosen = np.zeros(len(Edge), dtype=np.bool_)
    chosen[list(kinds)] = True
    of_ops = slice(graph.op_constraints[-1])
    rows = np.flatnonzero(chosen[graph.kind[of_ops]] & graph.active[of_ops])
    if not len(rows):
        return result
    ends = graph.op_start + graph.op_duration
    bounds = np.append(graph.group_offset, len(graph.member))
    reached = np.full(len(graph.member), NEVER)
    for group in np.flatnonzero(np.bincount(graph.group[rows])):
        part = slice(bounds[group], bounds[group + 1])
        times = graph.op_start if graph.group_by_start[group] else ends
        reached[part] = np.maximum.accumulate(times[graph.member[part]])
    last = bounds[graph.group[rows]] + graph.count[rows] - 1
    # Constraints are in the order of their nodes.
    node = graph.node[rows]
    begins = np.flatnonzero(np.append(True, node[1:] != node[:-1]))
    result[node[begins]] = np.maximum.reduceat(reached[last], begins)
    return result


def ready(graph: Graph, held_by: Edge) -> Int64:
    """When each operation could have started but for constraints of this kind, ns.

    Its call had returned and all else it waits for was done. An operation whose call
    wasn't recorded counts as ready when it started.
    """
    issued = graph.op_start.copy()
    called = graph.issue_call >= 0
    returned = graph.call_end[graph.issue_call[called]]
    issued[called] = np.minimum(returned, issued[called])
    others = [kind for kind in Edge if kind is not held_by]
    free: Int64 = np.maximum(issued, released(graph, others))
    return free


def with_ready(trace: Trace, ops: pl.DataFrame, held_by: Edge) -> pl.DataFrame:
    """``ops`` (rows of `Trace.gpu_ops` or parts of them) with ready_ns; see `ready`."""
    replay = replay_of(trace)
    key = ["pid", "correlation_id", "start_ns"]
    free = replay.ops_at(ops)
    ready_ns = ready(replay.graph, held_by)[column(free, "op")]
    free = free.select(*key, as_series(ready_ns, "ready_ns"))
    return ops.join(
        free.unique(key, keep="first"),
        on=key,
        how="left",
        validate="m:1",
        nulls_equal=True,
        maintain_order="left",
    )

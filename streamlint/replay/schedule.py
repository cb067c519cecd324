"""Evaluates a dependency graph in one pass: earliest times under its constraints.

Events are taken in their recorded order, in which every constraint points back, so
each time is a maximum of sums of times already known. That makes the result exact,
linear in events and constraints, and monotone: dropping a constraint or shortening
anything never makes a time later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from streamlint.intervals import Int64

if TYPE_CHECKING:
    from streamlint.replay.graph import Graph

CALL_START, CALL_END, OPERATION = 0, 1, 2
NEVER = -(2**62)
COMPILED_FROM = 600_000
"""Events of all passes from which on they are compiled.

Interpreting so many takes about the time that compiling does: no process takes more
than twice as long as the better way would have.
"""
AHEAD_FROM = 100_000
"""Calls and operations of a trace from which on compiling begins beside the building.

A trace of 40,000 kernels and 28 passes takes 1.8 s with its replay, else 3.0 s; one
with few passes loses a part of the second that compiling takes.
"""
_interpreted = 0
_is_prepared = False
_ONE_AT_A_TIME = Lock()
_COLUMNS = {
    "event_kind": "int8",
    "event_index": "uint32",
    "previous_call": "int32",
    "think_ns": "int64",
    "handover_call": "int32",
    "handover_ns": "int64",
    "call_first": "int64",
    "call_duration": "int64",
    "call_delay": "int64",
    "issue_call": "int32",
    "issue_latency": "int64",
    "fixed_start": "int64",
    "op_duration": "int64",
    "op_delay": "int64",
    "op_constraints": "uint32",
    "call_constraints": "uint32",
    "active": "bool",
    "group": "uint32",
    "count": "uint32",
    "latency": "int64",
    "group_offset": "int64",
    "group_by_start": "bool",
    "member": "uint32",
}
"""Of a graph, what a pass reads, in the order of its parameters.

Row numbers that are never -1 are unsigned to it: compiled code tests others for being
counted from the end, which takes a seventh of its time.
"""


class Schedule(NamedTuple):
    """Times in ns of every operation (rows of `Graph.ops`) and call (`Graph.calls`)."""

    op_start: Int64
    op_end: Int64
    call_start: Int64
    call_end: Int64


def evaluate(
    graph: Graph,
    recorded: Schedule,
    parts: Iterable[int],
    since_ns: int = NEVER,
) -> Schedule:
    """The schedule: of these parts from ``since_ns`` on anew, else as recorded."""
    global _interpreted
    times = [values.copy() for values in recorded]
    reached = np.empty(len(graph.member), dtype=np.int64)
    known = np.zeros(len(graph.group_offset), dtype=np.int64)
    results = [*times, reached, known]
    slices = [_events_since(graph, recorded, part, since_ns) for part in parts]
    columns = [
        getattr(graph, name).view(dtype) if dtype[0] == "u" else getattr(graph, name)
        for name, dtype in _COLUMNS.items()
    ]
    events = _interpreted + sum(last - first for first, last in slices)
    compiles = _is_prepared or events >= COMPILED_FROM
    run = _compiling().result() if compiles else None
    if run is None:
        _interpreted = events
        # Lists are several times faster than arrays to a plain interpreter.
        columns, results = (
            [values.tolist() for values in arrays] for arrays in (columns, results)
        )
        run = _pass
    for first, last in slices:
        run(first, last, *columns, *results)
    return Schedule(*(np.asarray(values, dtype=np.int64) for values in results[:4]))


def _events_since(
    graph: Graph, recorded: Schedule, part: int, instant: int
) -> tuple[int, int]:
    times = {
        CALL_START: recorded.call_start,
        CALL_END: recorded.call_end,
        OPERATION: recorded.op_start,
    }

    def happened(event: int) -> int:
        return int(times[graph.event_kind[event]][graph.event_index[event]])

    first, last = graph.event_bounds[part : part + 2].tolist()
    return first + bisect_left(range(first, last), instant, key=happened), last


def prepare(nodes: int) -> None:
    """Begin to compile the pass, if a graph of so many nodes is being built."""
    global _is_prepared
    if nodes >= AHEAD_FROM:
        _is_prepared = True
        _compiling()


def _pass(
    first_event: int,
    last_event: int,
    event_kind: Sequence[int],
    event_index: Sequence[int],
    previous_call: Sequence[int],
    think_ns: Sequence[int],
    handover_call: Sequence[int],
    handover_ns: Sequence[int],
    call_first: Sequence[int],
    call_duration: Sequence[int],
    call_delay: Sequence[int],
    issue_call: Sequence[int],
    issue_latency: Sequence[int],
    fixed_start: Sequence[int],
    op_duration: Sequence[int],
    op_delay: Sequence[int],
    op_constraints: Sequence[int],
    call_constraints: Sequence[int],
    active: Sequence[bool],
    group: Sequence[int],
    count: Sequence[int],
    latency: Sequence[int],
    group_offset: Sequence[int],
    group_by_start: Sequence[bool],
    member: Sequence[int],
    op_start: MutableSequence[int],
    op_end: MutableSequence[int],
    call_start: MutableSequence[int],
    call_end: MutableSequence[int],
    reached: MutableSequence[int],
    known: MutableSequence[int],
) -> None:
    """The pass itself, in the subset of Python that numba compiles.

    The last six are its results, and how far it came with each group.
    """
    for event in range(first_event, last_event):
        kind = event_kind[event]
        index = event_index[event]
        if kind == CALL_START:
            before = previous_call[index]
            if before < 0:
                time = call_first[index]
            else:
                time = call_end[before]
                if handover_call[index] < 0:
                    time += think_ns[index]
            if handover_call[index] >= 0:
                handed = call_end[handover_call[index]] + handover_ns[index]
                if handed > time:  # max() is a call, which an interpreter feels
                    time = handed
            call_start[index] = time
            if call_constraints[index] == call_constraints[index + 1]:
                # Waits for nothing: has no end of its own in the order of events.
                call_end[index] = time + call_duration[index] + call_delay[index]
            continue
        if kind == CALL_END:
            time = call_start[index] + call_duration[index]
            first, last = call_constraints[index], call_constraints[index + 1]
        else:
            time = fixed_start[index]
            if issue_call[index] >= 0:
                time = call_start[issue_call[index]] + issue_latency[index]
            first, last = op_constraints[index], op_constraints[index + 1]
        for constraint in range(first, last):
            if not active[constraint]:
                continue
            here = group[constraint]
            offset = group_offset[here]
            wanted = count[constraint]
            at = known[here]
            if at < wanted:
                best = reached[offset + at - 1] if at else NEVER
                while at < wanted:
                    one = member[offset + at]
                    value = op_start[one] if group_by_start[here] else op_end[one]
                    if value > best:
                        best = value
                    reached[offset + at] = best
                    at += 1
                known[here] = at
            bound = reached[offset + wanted - 1] + latency[constraint]
            if bound > time:
                time = bound
        if kind == CALL_END:
            call_end[index] = time + call_delay[index]
        else:
            time += op_delay[index]
            op_start[index] = time
            op_end[index] = time + op_duration[index]


def _compiling() -> Future[Callable[..., None] | None]:
    """The pass as `_compiled` makes it, once, whichever thread asks first."""
    with _ONE_AT_A_TIME:
        return _begun()


@cache
def _begun() -> Future[Callable[..., None] | None]:
    pool = ThreadPoolExecutor(1)
    compiling = pool.submit(_compiled)
    pool.shutdown(wait=False)
    return compiling


def _compiled() -> Callable[..., None] | None:
    """The pass compiled by numba, None where numba isn't installed."""
    try:
        import numba
        from numba import types
    except ImportError:
        return None

    def array(dtype: str, *, readonly: bool) -> types.Array:
        return types.Array(getattr(types, dtype), 1, "C", readonly=readonly)

    columns = [array(dtype, readonly=True) for dtype in _COLUMNS.values()]
    results = [array("int64", readonly=False)] * 6
    signature = types.void(types.int64, types.int64, *columns, *results)
    run: Callable[..., None] = numba.njit(signature, nogil=True)(_pass)
    return run

"""Evaluates a dependency graph in one pass: earliest times under its constraints.

Events are taken in their recorded order, in which every constraint points back, so
each time is a maximum of sums of times already known. That makes the result exact,
linear in events and constraints, and monotone: dropping a constraint or shortening
anything never makes a time later.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from functools import cache
from typing import TYPE_CHECKING

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
_interpreted = 0


def evaluate(graph: Graph) -> tuple[Int64, Int64, Int64]:
    """Start of every operation, start and end of every call, in ns."""
    columns = (
        graph.event_kind,
        graph.event_index,
        graph.previous_call,
        graph.think_ns,
        graph.handover_call,
        graph.handover_ns,
        graph.call_first,
        graph.call_duration,
        graph.call_delay,
        graph.issue_call,
        graph.issue_latency,
        graph.fixed_start,
        graph.op_duration,
        graph.op_delay,
        graph.op_constraints,
        graph.call_constraints,
        graph.active,
        graph.group,
        graph.count,
        graph.latency,
        graph.group_offset,
        graph.group_by_start,
        graph.member,
    )
    calls, ops = len(graph.call_first), len(graph.op_duration)
    op_times = [np.full(ops, NEVER) for _ in range(2)]
    call_times = [np.zeros(calls, dtype=np.int64) for _ in range(2)]
    reached = np.empty(len(graph.member), dtype=np.int64)
    known = np.zeros(len(graph.group_offset), dtype=np.int64)
    results = [*op_times, *call_times, reached, known]
    global _interpreted
    events = _interpreted + len(graph.event_kind)
    if events >= COMPILED_FROM and (compiled := _compiled()):
        compiled(*columns, *results)
    else:
        _interpreted = events
        # Lists are several times faster than arrays to a plain interpreter.
        listed = [values.tolist() for values in results]
        _pass(*(values.tolist() for values in columns), *listed)
        results = [np.array(values, dtype=np.int64) for values in listed]
    return results[0], results[2], results[3]


def _pass(
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
    for event in range(len(event_kind)):
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


@cache
def _compiled() -> Callable[..., None] | None:
    """The pass compiled by numba, None where numba isn't installed."""
    try:
        import numba
    except ImportError:
        return None
    run: Callable[..., None] = numba.njit(nogil=True)(_pass)
    return run

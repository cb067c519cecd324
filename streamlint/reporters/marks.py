"""The operations and calls that a piece of evidence is about, and their roles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from streamlint.escape import printable
from streamlint.findings import Evidence, Finding
from streamlint.intervals import Int64
from streamlint.reporters.lanes import WAITING, Lane
from streamlint.steady import column
from streamlint.trace.model import Trace

MAX_MARKS = 24
"""Operations marked for one piece of evidence."""
HANDOVER_NS = 10_000
"""What ended this shortly before an operation started may have held it back."""


class _Mark(NamedTuple):
    role: str
    group: str
    rows: Int64


def marks(
    trace: Trace, finding: Finding, item: Evidence, lanes: Sequence[Lane]
) -> list[dict[str, Any]]:
    """The operations and calls that a piece of evidence is about, and their roles."""
    ops, calls = trace.gpu_ops, trace.runtime_calls
    pid = finding.where.pid
    found: list[_Mark] = []
    own_ops = own_calls = np.empty(0, dtype=np.int64)
    is_call = False
    if item.correlation_id is not None:
        same = pl.col("correlation_id") == item.correlation_id
        # Correlation ids are unique in a process only.
        whose = pid if pid is not None else _nearest_pid(trace, same, item)
        same &= pl.col("pid") == whose
        own_ops = _rows(ops, same)
        own_calls = _rows(calls, same & ~pl.col("nested"))
    if len(own_calls):
        call = calls.row(int(own_calls[0]), named=True)
        is_call = (call["start_ns"], call["end_ns"]) == (item.start_ns, item.end_ns)
        if call["kind"] in WAITING or is_call:
            found.append(_Mark("host call that waits", "host", own_calls[:1]))
            found += _around(ops, call, waits_for_own=bool(len(own_ops)))
        else:
            found.append(_Mark("host call that issued it", "host", own_calls[:1]))
    if len(own_ops):
        held = _held(ops, own_ops, item, is_call)
        role = "held-back operation" if held else "operation of the call"
        found.append(_Mark(role, "gpu", own_ops[:MAX_MARKS]))
        if held:
            found += _holder(ops, int(own_ops[0]), item)
    if not any(mark.group == "gpu" for mark in found):
        inside = (pl.col("start_ns") < item.end_ns) & (pl.col("end_ns") > item.start_ns)
        if pid is not None:
            inside &= pl.col("pid") == pid
        if finding.where.streams:
            inside &= pl.col("stream_id").is_in(finding.where.streams)
        found.append(_Mark("operation", "gpu", _rows(ops, inside)[:MAX_MARKS]))
    frames = {"gpu": ops, "host": calls}
    return [
        {
            "role": mark.role,
            "lane": lane,
            "start": frame["start_ns"][row],
            "end": frame["end_ns"][row],
            "name": printable(frame["name"][row] or "?", 200),
        }
        for mark in sorted(found, key=lambda m: _first(frames[m.group], m.rows))
        for frame in [frames[mark.group]]
        for row in mark.rows.tolist()
        for lane in [_lane_of(lanes, mark.group, frame, row)]
        if lane is not None
    ]


def _nearest_pid(trace: Trace, same: pl.Expr, item: Evidence) -> int | None:
    """The process whose call or operation of this kind is nearest to the evidence."""
    columns = ("pid", "start_ns", "end_ns")
    found = [
        (max(0, start - item.end_ns, item.start_ns - end), pid)
        for frame in (trace.runtime_calls, trace.gpu_ops)
        for pid, start, end in frame.filter(same).select(columns).iter_rows()
    ]
    return min(found)[1] if found else None


def _first(frame: pl.DataFrame, rows: Int64) -> int:
    return int(frame["start_ns"][int(rows[0])]) if len(rows) else 0


def _rows(frame: pl.DataFrame, chosen: pl.Expr) -> Int64:
    return np.flatnonzero(frame.select(chosen.fill_null(value=False)).to_series())


def _held(ops: pl.DataFrame, rows: Int64, item: Evidence, call: bool) -> bool:
    """Whether the evidence is the time in which the operation waited to start.

    It isn't where the evidence is the ``call`` itself.
    """
    if call or not len(rows):
        return False
    start = ops["start_ns"][int(rows[0])]
    return bool(item.start_ns < start and abs(start - item.end_ns) <= HANDOVER_NS)


def _holder(ops: pl.DataFrame, row: int, item: Evidence) -> list[_Mark]:
    """The operation that ended last before the held one started."""
    held = ops.row(row, named=True)
    candidates = _rows(
        ops,
        (pl.col("pid") == held["pid"])
        & pl.col("device_id").eq_missing(held["device_id"])
        & pl.col("end_ns").is_between(
            max(item.start_ns, held["start_ns"] - HANDOVER_NS), held["start_ns"]
        ),
    )
    if not len(candidates):
        return []
    ends = column(ops[candidates], "end_ns")
    latest = candidates[ends >= ends.max()]
    other = latest[column(ops[latest], "stream_id") != held["stream_id"]]
    return [_Mark("held it back", "gpu", (other if len(other) else latest)[:1])]


def _around(
    ops: pl.DataFrame, call: dict[str, Any], *, waits_for_own: bool
) -> list[_Mark]:
    """What a waiting call waited for, and the work that came only after it."""
    own = pl.col("pid") == call["pid"]
    earlier = pl.col("issue_ns").fill_null(call["start_ns"]) <= call["start_ns"]
    before = _rows(
        ops,
        own
        & earlier
        & (pl.col("end_ns") > call["start_ns"])
        & (pl.col("end_ns") <= call["end_ns"] + HANDOVER_NS),
    )
    after = _rows(
        ops,
        own & (pl.col("tid") == call["tid"]) & (pl.col("issue_ns") >= call["end_ns"]),
    )
    found: list[_Mark] = []
    if len(before) and not waits_for_own:
        last = before[[int(column(ops[before], "end_ns").argmax())]]
        found.append(_Mark("the call waited for it", "gpu", last))
    if len(after):
        first = after[[int(column(ops[after], "issue_ns").argmin())]]
        found.append(_Mark("waited for the call", "gpu", first))
    return found


def _lane_of(
    lanes: Sequence[Lane], group: str, frame: pl.DataFrame, row: int
) -> int | None:
    start = frame["start_ns"][row]
    for number, lane in enumerate(lanes):
        if lane.group != group or lane.rows is None:
            continue
        at = int(np.searchsorted(lane.rows, row))
        if at < len(lane.rows) and lane.rows[at] == row and lane.starts[at] == start:
            return number
    return None

"""What a page shows of one trace: its facts, lanes, findings and replayed schedules.

Above `MAX_DETAIL` operations its lanes are held in full only near findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from streamlint.engine import Report
from streamlint.escape import printable
from streamlint.findings import Finding, Severity
from streamlint.intervals import Int64, union
from streamlint.replay import Replay, Schedule, replay_of
from streamlint.reporters.lanes import (
    Details,
    Lane,
    build,
    device_key,
    gpu_name,
    grouped,
    split,
)
from streamlint.reporters.marks import marks
from streamlint.reporters.packing import Packer
from streamlint.reporters.text import cost_words, place_words
from streamlint.rule import Rule
from streamlint.steady import column
from streamlint.trace.model import Trace
from streamlint.where import describe

MAX_DETAIL = 2_000_000
"""Operations of a trace that a page holds in full (a browser's memory, measured)."""
MAX_REPLAYED = 4_000_000
"""Intervals of all replayed schedules together that a page holds in full."""


class Capture(NamedTuple):
    """One trace for a page: ``head`` is JSON, ``blobs`` the packed lanes in base64."""

    head: dict[str, Any]
    blobs: list[str]


def capture(trace: Trace, report: Report) -> Capture:
    """Everything that a page needs; the trace may be closed afterwards."""
    lanes, details, idle = build(trace)
    first, last = _bounds(lanes)
    packer = Packer(first, last)
    total = sum(len(lane.starts) for lane in lanes)
    if trace.gpu_ops.height > MAX_DETAIL:
        packer.keep(_windows(report, packer), lanes)
    findings = [_finding(trace, rule, f, lanes) for rule, f in _pairs(report)]
    head = {
        "file": printable(trace.path.name),
        "facts": _facts(trace, report, idle),
        "not_assessed": [
            {
                "rule": rule.name,
                "reason": printable(why.reason),
                "recapture": printable(why.recapture),
            }
            for rule, why in report.not_assessed
        ],
        "crashed": [
            {
                "rule": rule.name,
                "origin": printable(rule.origin),
                "summary": printable(crash.summary),
            }
            for rule, crash in report.crashed
        ],
        "first": first,
        "last": last,
        "work": _work(trace, first, last),
        "intervals": total,
        "lanes": [packer.lane(lane) for lane in lanes],
        "findings": findings,
        "changes": sum(f.change is not None for _, f in report.findings),
        "replays": _replays(trace, report, lanes, details, packer),
        "details": packer.details(details),
        "bin_ns": packer.bin_ns,
        "bins": packer.bins,
        "detailed": packer.detailed_ranges(),
        "held": packer.held,
    }
    return Capture(head, packer.blobs)


def _bounds(lanes: Sequence[Lane]) -> tuple[int, int]:
    used = [lane for lane in lanes if len(lane.starts)]
    if not used:
        return 0, 1
    first = min(int(lane.starts[0]) for lane in used)
    return first, max(first + 1, *(int(lane.ends.max()) for lane in used))


def _windows(report: Report, packer: Packer) -> Iterator[tuple[int, int]]:
    """Times around the evidence of all findings, the strongest of each first."""
    pairs = _pairs(report)
    most = max((len(f.evidence) for _, f in pairs), default=0)
    for rank in range(most):
        for _, finding in pairs:
            if rank < len(finding.evidence):
                item = finding.evidence[rank]
                margin = max(item.end_ns - item.start_ns, 2 * packer.bin_ns)
                yield item.start_ns - margin, item.end_ns + margin


def _pairs(report: Report) -> list[tuple[Rule, Finding]]:
    """Errors first, then the dearest."""
    return sorted(
        report.findings,
        key=lambda pair: (
            pair[1].severity is not Severity.ERROR,
            1 if pair[1].cost.ns is None else -pair[1].cost.ns,
        ),
    )


def _work(trace: Trace, first: int, last: int) -> tuple[int, int]:
    ops = trace.gpu_ops
    if not ops.height:
        return first, last
    return int(column(ops, "start_ns").min()), int(column(ops, "end_ns").max())


def _facts(
    trace: Trace, report: Report, idle: list[tuple[str, dict[str, int]]]
) -> dict[str, Any]:
    """The head of the page. Shares are unions of time over the span of GPU work."""
    facts = report.overview
    ops = trace.gpu_ops.with_columns(device_key())
    devices = []
    for (gpu, device), at in grouped(ops, "gpu_id", "device_id"):
        here = ops[at]
        first = int(column(here, "start_ns").min())
        last = int(column(here, "end_ns").max())
        busy = {name: _busy(here.filter(chosen)) for name, chosen in _BUSY.items()}
        name = gpu_name(trace, gpu, device)
        devices.append(
            {
                "name": name,
                "span_ns": last - first,
                "busy_ns": busy,
                "idle_ns": dict(idle).get(name, {}),
            }
        )
    model = report.model
    return {
        "processes": [
            {"pid": pid, "name": printable(name or "?", 80)}
            for pid, name in facts.processes
        ],
        "gpus": [printable(name, 60) for name in facts.gpus],
        "exporter": printable(report.capture.exporter or "", 40),
        "span_ns": facts.span_ns,
        "counts": {
            "kernels": facts.kernels,
            "copies": facts.memcpys,
            "memsets": facts.memsets,
            "API calls": facts.runtime_calls,
        },
        "dropped": facts.invalid_rows,
        "devices": devices,
        "judged": [
            {
                "pid": pid,
                "start": start,
                "end": end,
                "iterations": iterations,
                "nvtx": printable(nvtx or "", 80),
            }
            for pid, start, end, iterations, nvtx, _ in facts.judged
        ],
        "model": None
        if model is None
        else {
            "error": model.error,
            "fixes": model.joint_fixes,
            "joint_ns": model.joint_ns,
            "joint_share": model.joint_share,
        },
        "silent": sum(j.silent for j in report.judgements),
        "suppressed": len(report.suppressed),
        "below": report.below,
    }


_BUSY = {
    "any": pl.lit(value=True),
    "compute": pl.col("engine") == "compute",
    "HtoD": pl.col("engine") == "HtoD",
    "DtoH": pl.col("engine") == "DtoH",
}


def _busy(ops: pl.DataFrame) -> int:
    return union(column(ops, "start_ns"), column(ops, "end_ns")).total_ns


def _finding(
    trace: Trace, rule: Rule, finding: Finding, lanes: Sequence[Lane]
) -> dict[str, Any]:
    cost = finding.cost
    return {
        "rule": rule.name,
        "summary": rule.summary,
        "severity": finding.severity.value,
        "confidence": finding.confidence.value,
        "claim": cost.claim.value,
        "ns": cost.ns,
        "share": cost.share,
        "cost": printable(cost_words(cost, finding)),
        "message": printable(finding.message),
        "pid": finding.where.pid,
        "place": place_words(finding),
        "source": [printable(describe(frame), 200) for frame in finding.where.source],
        "fix": printable(finding.fix),
        "occurrences": finding.occurrences,
        "fingerprint": finding.fingerprint(rule.name),
        "evidence": [
            {
                "start": item.start_ns,
                "end": item.end_ns,
                "what": printable(item.what, 300),
                "correlation": item.correlation_id,
                "marks": marks(trace, finding, item, lanes),
            }
            for item in finding.evidence
        ],
    }


def _replays(
    trace: Trace,
    report: Report,
    lanes: Sequence[Lane],
    details: Details,
    packer: Packer,
) -> list[dict[str, Any]]:
    """The schedule without each finding that the replay can take away.

    Where they get too large for a page, findings of note are held as overviews and
    those too cheap to act on are left out.
    """
    pairs = list(enumerate(_pairs(report)))
    if not trace.gpu_ops.height or not any(f.change for _, (_, f) in pairs):
        return []
    replay = replay_of(trace)
    call_row = _call_rows(trace, replay)
    left = MAX_REPLAYED
    found: list[dict[str, Any]] = []
    for number, (_, finding) in pairs:
        of_note = finding.severity is not Severity.INFO
        if finding.change is None or not (of_note or left > 0):
            continue
        after = replay.run([finding.change])
        moved = _moved(lanes, after, call_row, details)
        size = sum(len(lane.starts) for _, lane in moved)
        overview = size > left or packer.detailed is not None
        if overview and not of_note:
            left = 0
            continue
        left -= 0 if overview else size
        was, now = (
            _span(trace, s, finding.where.pid) for s in (replay.recorded, after)
        )
        found.append(
            {
                "finding": number,
                "was": was,
                "now": now,
                "saved": (was[1] - was[0]) - (now[1] - now[0]),
                "intervals": size,
                "overview": overview,
                "lanes": [
                    packer.moved(lane, lanes[of], of, overview=overview)
                    for of, lane in moved
                ],
            }
        )
    return found


def _span(trace: Trace, schedule: Schedule, pid: int | None) -> tuple[int, int]:
    """When the GPU work of a process starts and ends; of all, for None."""
    pids = trace.gpu_ops["pid"].to_numpy()
    starts, ends = schedule.op_start[: len(pids)], schedule.op_end[: len(pids)]
    if pid is not None and (own := pids == pid).any():
        starts, ends = starts[own], ends[own]
    return int(starts.min()), int(ends.max())


def _moved(
    lanes: Sequence[Lane], after: Schedule, call_row: Int64, details: Details
) -> list[tuple[int, Lane]]:
    """Streams and threads as replayed, with the recorded lane's number.

    All rows of a stream or thread are put together and split anew.
    """
    moved: list[tuple[int, Lane]] = []
    for number, lane in enumerate(lanes):
        if lane.rows is None or lane.depth:
            continue
        rows, code = lane.rows, lane.code
        for part in lanes[number + 1 :]:
            if not part.depth:
                break
            if part.rows is not None:
                rows = np.concatenate([rows, part.rows])
                code = np.concatenate([code, part.code])
        if lane.group == "gpu":
            starts, ends = after.op_start[rows], after.op_end[rows]
        else:
            at = call_row[rows]
            known = at >= 0
            rows, code, at = rows[known], code[known], at[known]
            starts, ends = after.call_start[at], after.call_end[at]
        order = np.lexsort((rows, ends, starts))
        whole = Lane(
            *(lane.group, lane.heading, lane.label, lane.kind),
            *(starts[order], ends[order], code[order]),
            rows=rows[order],
            pid=lane.pid,
        )
        moved += [(number, part) for part in split(whole, details)]
    return moved


def _call_rows(trace: Trace, replay: Replay) -> Int64:
    """The replay's call of every row of `Trace.runtime_calls`, -1 where none."""
    key = ["pid", "tid", "start_ns", "end_ns"]
    known = replay.graph.calls.select(*key, "call_index").unique(key, keep="first")
    rows = trace.runtime_calls.select(*key, "nested").join(
        known, on=key, how="left", validate="m:1", maintain_order="left"
    )
    usable = pl.when(~pl.col("nested")).then("call_index").fill_null(-1)
    return rows.select(usable.alias("at"))["at"].to_numpy()

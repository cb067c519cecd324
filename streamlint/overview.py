"""A trace as a whole, in a few numbers."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from streamlint.steady import busy, groups, regions
from streamlint.trace.model import Trace


class DeviceTime(NamedTuple):
    """What a GPU did within the span of the trace, or the part of it in `Scope.time`.

    Times in ns.

    ``gpu`` is its index on the machine, None where the trace doesn't tell. Kernels,
    and copies and memsets, may run at the same time: the two do not add up to
    ``busy_ns``. ``idle_ns`` is the rest of the span.
    """

    gpu: int | None
    name: str | None
    busy_ns: int
    kernels_ns: int
    copies_ns: int
    idle_ns: int


class Judged(NamedTuple):
    """The judged region of a process; see `streamlint.steady.Region`.

    ``duration_ns`` is less than from start to end where ranges are judged.
    """

    pid: int
    start_ns: int
    end_ns: int
    iterations: int
    nvtx: str | None
    duration_ns: int


class Overview(NamedTuple):
    """The trace in a few numbers; times in ns.

    ``span_ns`` reaches from the first GPU operation to the end of the last, None
    without any; ``process_spans`` is the same of each process with some. ``judged``
    has one entry a process.
    """

    gpus: tuple[str, ...]
    processes: tuple[tuple[int, str | None], ...]
    span_ns: int | None
    kernels: int
    memcpys: int
    memsets: int
    runtime_calls: int
    invalid_rows: dict[str, int]
    judged: tuple[Judged, ...]
    devices: tuple[DeviceTime, ...] = ()
    process_spans: dict[int, int] = {}  # noqa: RUF012 - never changed


def overview(trace: Trace) -> Overview:
    """Count and measure ``trace``."""
    ops = trace.gpu_ops
    kinds = dict(ops["kind"].value_counts().iter_rows())
    more = trace.left_out.of
    first, last = ops["start_ns"].min(), ops["end_ns"].max()
    used = set(ops["gpu_id"].drop_nulls().unique()) if ops.height else set()
    gpus = [
        (gpu_id, name or "unnamed GPU")
        for gpu_id, name in trace.gpus["gpu_id", "name"].iter_rows()
    ]
    reach = (first, last) if isinstance(first, int) and isinstance(last, int) else None
    span = reach and reach[1] - reach[0]
    return Overview(
        gpus=tuple(name for gpu_id, name in gpus if not used or gpu_id in used),
        processes=tuple(trace.processes["pid", "name"].iter_rows()),
        span_ns=span,
        kernels=int(kinds.get("kernel", 0)) + more("kernels"),
        memcpys=int(kinds.get("memcpy", 0)) + more("memcpys"),
        memsets=int(kinds.get("memset", 0)) + more("memsets"),
        runtime_calls=trace.runtime_calls.height + more("runtime_calls"),
        invalid_rows=trace.invalid_rows,
        judged=tuple(
            Judged(*r[:5], duration_ns=r.duration_ns) for r in regions(trace).values()
        ),
        devices=_devices(trace, *reach) if reach is not None else (),
        process_spans=_process_spans(ops, span) if span is not None else {},
    )


def _process_spans(ops: pl.DataFrame, span_ns: int) -> dict[int, int]:
    pids = ops["pid"].unique()
    if len(pids) == 1:  # most often; grouping would cost a small trace a millisecond
        return {pid: span_ns for pid in pids if pid is not None}
    rows = ops.group_by("pid").agg(
        pl.col("end_ns").max() - pl.col("start_ns").min().alias("span")
    )
    return {pid: span for pid, span in rows.iter_rows() if pid is not None}


def _devices(trace: Trace, first: int, last: int) -> tuple[DeviceTime, ...]:
    names = dict(trace.gpus["gpu_id", "name"].iter_rows())
    ops = trace.gpu_ops.select("gpu_id", "kind", "start_ns", "end_ns")
    if trace.settings.scope.time is not None:
        start, end = trace.settings.scope.time
        first = first if start is None else max(first, start)
        last = last if end is None else min(last, end)
        ops = ops.filter(pl.col("start_ns") < last, pl.col("end_ns") > first)
        ops = ops.with_columns(pl.col("start_ns", "end_ns").clip(first, last))
    span_ns = last - first
    found = [
        (gpu, ops)
        for (gpu,), ops in groups(ops, "gpu_id")
        if gpu is None or isinstance(gpu, int)
    ]
    made = []
    for gpu, ops in sorted(found, key=lambda pair: (pair[0] is None, pair[0])):
        kernel = pl.col("kind").is_in(("memcpy", "memset")).not_()
        total = busy(ops)
        made.append(
            DeviceTime(
                gpu=gpu,
                name=names.get(gpu),
                busy_ns=total,
                kernels_ns=busy(ops.filter(kernel)),
                copies_ns=busy(ops.filter(~kernel)),
                idle_ns=max(0, span_ns - total),
            )
        )
    return tuple(made)

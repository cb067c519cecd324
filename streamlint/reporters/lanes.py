"""Lanes of a timeline: rows of intervals that never overlap, and what they are.

Streams, copy engines, host threads, NVTX ranges and idle gaps of a trace. Where work
of one stream or thread overlaps, it is spread over several rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from streamlint.escape import printable
from streamlint.intervals import Int64, Intervals, union
from streamlint.steady import column
from streamlint.trace.calls import GPU_WORK, HOST_WAITS
from streamlint.trace.model import Trace

MAX_DEPTH = 6
"""Rows of a stream or thread whose intervals overlap; deeper ones are merged."""
MAX_NAME = 2_000
"""Characters of a name that the page holds; templates grow to many thousands."""
KINDS = (
    *("kernel", "graph", "HtoD", "DtoH", "copy", "memset", "migration"),
    *("wait", "launch", "call", "range", "mark"),
    *("idle-wait", "idle-call", "idle-host", "idle-queued", "idle-unknown"),
    "merged",
)
"""What an interval is; the page has one colour and one word for each."""
CAUSES = KINDS[12:17]
"""Why a GPU was idle, from the operation that ended the gap. See `_idle`."""
MEMORY = ("unknown", "pageable", "pinned", "device", "managed", "array")
PARTS = 8
"""Numbers that an interval's hover shows, such as a kernel's grid."""
U32 = 2**32
_PLAIN = {f"p{i}": pl.lit(0, dtype=pl.Int64) for i in range(PARTS)}
WAITING = (*HOST_WAITS, "sync memcpy")
"""Kinds of calls that wait for the GPU."""


@dataclass(eq=False)
class Lane:
    """One row: intervals sorted by start that don't overlap, and what they are.

    ``code`` numbers the rows of `Details`; ``rows`` the operations or calls that
    the intervals show, where the replay knows them too.
    """

    group: str
    heading: str
    label: str
    kind: str
    starts: Int64
    ends: Int64
    code: Int64
    correlation: Int64 | None = None
    rows: Int64 | None = None
    pid: int | None = None
    depth: int = 0
    merged: int = 0


@dataclass(eq=False)
class Details:
    """Everything that hovering shows, once for all intervals that are alike."""

    names: dict[str, int] = field(default_factory=dict)
    kinds: list[int] = field(default_factory=list)
    name_ids: list[int] = field(default_factory=list)
    parts: list[tuple[int, ...]] = field(default_factory=list)

    def codes(self, frame: pl.DataFrame) -> Int64:
        """Number the rows of ``frame`` (kind, name, p0 to p7) by what they show."""
        key = ["kind", "name", *_PLAIN]
        found = frame.select(key).unique(maintain_order=True).with_row_index("code")
        first = len(self.kinds)
        for kind, name, *parts in found.drop("code").iter_rows():
            shown = printable(name or "?", MAX_NAME)
            self.kinds.append(KINDS.index(kind))
            self.name_ids.append(self.names.setdefault(shown, len(self.names)))
            self.parts.append(tuple(part or 0 for part in parts))
        numbered = frame.select(key).join(
            found, on=key, how="left", nulls_equal=True, maintain_order="left"
        )
        return column(numbered, "code") + first

    def one(self, kind: str, name: str) -> int:
        """The number of one more entry."""
        frame = pl.DataFrame({"kind": [kind], "name": [name]}).with_columns(**_PLAIN)
        return int(self.codes(frame)[0])


class Lanes(NamedTuple):
    """The lanes of a trace before packing."""

    lanes: list[Lane]
    details: Details
    idle: list[tuple[str, dict[str, int]]]


def build(trace: Trace) -> Lanes:
    """The lanes of ``trace`` from top to bottom."""
    details = Details()
    idle, totals = _idle(trace, details)
    lanes = [*_host(trace, details), *_work_lanes(trace, details), *idle]
    lanes += _nvtx(trace, details)
    # Streams stand below the threads of their process.
    order = {"host": 0, "gpu": 0, "engine": 1, "idle": 2, "nvtx": 3}
    lanes.sort(key=lambda lane: (order[lane.group], lane.pid or 0))
    return Lanes(lanes, details, totals)


def depths(starts: Int64, ends: Int64) -> Int64:
    """A row for each interval (sorted by start) so that none overlap in a row."""
    depth = np.zeros(len(starts), dtype=np.int64)
    if not len(starts):
        return depth
    # Only intervals that touch another one need a look each.
    apart = np.concatenate([[True], starts[1:] >= np.maximum.accumulate(ends)[:-1]])
    rest = np.flatnonzero(~(apart & np.append(apart[1:], True)))
    open_ends: list[tuple[int, int]] = []
    free: list[int] = []
    rows = 0
    begins, stops = starts[rest].tolist(), ends[rest].tolist()
    for index, begin, stop in zip(rest.tolist(), begins, stops, strict=True):
        while open_ends and open_ends[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(open_ends)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, rows = rows, rows + 1
        depth[index] = row
        heapq.heappush(open_ends, (stop, row))
    return depth


def split(lane: Lane, details: Details) -> Iterator[Lane]:
    """``lane`` as rows without overlap; what is too deep is merged into the last."""
    depth = depths(lane.starts, lane.ends)
    for level in range(min(int(depth.max(initial=0)) + 1, MAX_DEPTH)):
        deepest = level == MAX_DEPTH - 1
        chosen = np.flatnonzero(depth >= level if deepest else depth == level)
        part = Lane(
            lane.group,
            lane.heading,
            lane.label if not level else f"{lane.label} · level {level + 1}",
            lane.kind,
            lane.starts[chosen],
            lane.ends[chosen],
            lane.code[chosen],
            None if lane.correlation is None else lane.correlation[chosen],
            None if lane.rows is None else lane.rows[chosen],
            lane.pid,
            level,
        )
        if deepest and (depth > level).any():
            whole = union(part.starts, part.ends)
            part.merged = len(chosen)
            part.starts, part.ends = whole.starts, whole.ends
            code = details.one("merged", "several overlapping ones")
            part.code = np.full(len(whole), code)
            part.correlation = part.rows = None
        yield part


def _work_lanes(trace: Trace, details: Details) -> list[Lane]:
    """Streams, copy engines and page migrations of every process and device."""
    ops = _described(trace)
    if not ops.height:
        return []
    starts, ends = column(ops, "start_ns"), column(ops, "end_ns")
    code = details.codes(ops)
    correlation = ops["correlation_id"].fill_null(0).to_numpy()
    priorities = {
        (pid, stream): priority
        for pid, stream, priority in trace.streams.select(
            "pid", "stream_id", "priority"
        ).iter_rows()
    }

    def lane(
        rows: Int64, group: str, heading: str, label: str, kind: str, pid: int | None
    ) -> Lane:
        own = rows if group == "gpu" else None
        return Lane(
            *(group, heading, label, kind, starts[rows], ends[rows], code[rows]),
            *(correlation[rows], own, pid),
        )

    lanes: list[Lane] = []
    places = ("pid", "gpu_id", "device_id", "stream_id", "green_context_id")
    for key, rows in grouped(ops, *places, "stream_kind"):
        pid, gpu, device, stream, green, kind = key
        words = [f"stream {stream}", _STREAM_WORDS.get(kind, kind)]
        if priorities.get((pid, stream)):
            words.append(f"priority {priorities[pid, stream]}")
        words += [f"green context {green}"] if green else []
        heading = _heading(trace, pid, gpu, device)
        whole = lane(rows, "gpu", heading, " · ".join(words), "kernel", pid)
        lanes += split(whole, details)
    engines = ops.filter(pl.col("engine").is_in(("HtoD", "DtoH", "PtoP")))
    copies = column(engines, "row")
    for (gpu, device, engine), at in grouped(
        engines.with_columns(device_key()), "gpu_id", "device_id", "engine"
    ):
        heading = f"{gpu_name(trace, gpu, device)}, all processes"
        kind = engine if engine in KINDS else "copy"
        label = f"copy engine {engine}"
        whole = lane(copies[at], "engine", heading, label, kind, None)
        lanes += split(whole, details)
    moved = _with_texts(trace.migrations)
    for (pid, device), at in grouped(moved, "pid", "device_id"):
        here = moved[at].with_columns(
            pl.lit("migration").alias("kind"), pl.lit("page migration").alias("name")
        )
        here = here.with_columns(**{**_PLAIN, **_copy_parts()})
        whole = Lane(
            "engine",
            _heading(trace, pid, None, device),
            "unified memory migrations",
            "migration",
            column(here, "start_ns"),
            column(here, "end_ns"),
            details.codes(here),
        )
        lanes += split(whole, details)
    return lanes


_STREAM_WORDS = {
    "null": "NULL (legacy default)",
    "unknown": "kind unknown",
    "per-thread": "per-thread default",
}


def _described(trace: Trace) -> pl.DataFrame:
    """Operations with their row number and what hovering shows of them."""
    key = ["pid", "correlation_id", "stream_id", "start_ns", "graph_node_id"]
    grid = {
        f"p{i}": pl.col(name)
        for i, name in enumerate(
            ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")
        )
    }
    shared = pl.col("static_shared_bytes").fill_null(0).cast(pl.Int64)
    shared += pl.col("dynamic_shared_bytes").fill_null(0)
    kernels = _with_texts(trace.kernels).select(
        *key,
        pl.coalesce("full_name", "name").alias("full_name"),
        pl.lit("kernel").alias("kind"),
        *(expression.cast(pl.Int64).alias(name) for name, expression in grid.items()),
        shared.alias("p6"),
        pl.col("registers_per_thread").cast(pl.Int64).alias("p7"),
    )
    copies = _with_texts(trace.memcpys).select(
        *key, pl.lit("memcpy").alias("kind"), "src_kind", "dst_kind"
    )
    parts = {f"p{i}": f"p{i}" for i in range(PARTS)}
    ops = (
        _with_texts(trace.gpu_ops)
        .with_row_index("row")
        .with_columns(pl.col("row").cast(pl.Int64))
        .join(_once(kernels, key), on=[*key, "kind"], how="left", nulls_equal=True)
        .join(_once(copies, key), on=[*key, "kind"], how="left", nulls_equal=True)
        .sort("row")
    )
    sized = pl.col("kind") != "kernel"
    copied = _copy_parts()
    ops = ops.with_columns(
        pl.when(sized).then(copied[name]).otherwise(pl.col(name)).alias(name)
        if name in copied
        else pl.col(name).fill_null(0).alias(name)
        for name in parts
    )
    engine = pl.col("engine")
    return ops.with_columns(
        pl.when(pl.col("kind") == "memcpy")
        .then(
            pl.when(engine.is_in(("HtoD", "DtoH")))
            .then(engine)
            .otherwise(pl.lit("copy"))
        )
        .otherwise("kind")
        .alias("kind"),
        pl.coalesce("full_name", "name").alias("name"),
    )


def _with_texts(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with texts for categories: here they meet other texts."""
    return frame.with_columns(pl.col(pl.Categorical).cast(pl.String))


def _copy_parts() -> dict[str, pl.Expr]:
    size = pl.col("size_bytes").fill_null(0)

    def code(name: str) -> pl.Expr:
        words = {word: number for number, word in enumerate(MEMORY)}
        return (
            pl.col(name)
            .replace_strict(words, default=0, return_dtype=pl.Int64)
            .fill_null(0)
        )

    return {
        "p0": size % U32,
        "p1": size // U32,
        "p2": code("src_kind"),
        "p3": code("dst_kind"),
    }


def _once(frame: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    return frame.unique(key, keep="first", maintain_order=True)


def grouped(frame: pl.DataFrame, *by: str) -> Iterator[tuple[tuple[Any, ...], Int64]]:
    """Row numbers by these columns, sorted by them."""
    rows = (
        frame.select(*by)
        .with_row_index("at")
        .group_by(*by)
        .agg(pl.col("at").cast(pl.Int64).sort())
        .sort(*by, nulls_last=True)
    )
    for *key, at in rows.iter_rows():
        yield tuple(key), np.array(at, dtype=np.int64)


def device_key() -> pl.Expr:
    """One number a device where the physical one is known: processes share it."""
    known = pl.col("gpu_id").is_not_null()
    return pl.when(known).then(0).otherwise("device_id").alias("device_id")


def _host(trace: Trace, details: Details) -> list[Lane]:
    calls = trace.runtime_calls.with_columns(
        pl.when(pl.col("kind").is_in(WAITING))
        .then(pl.lit("wait"))
        .when(pl.col("kind").is_in(GPU_WORK))
        .then(pl.lit("launch"))
        .otherwise(pl.lit("call"))
        .alias("kind")
    ).with_columns(**{**_PLAIN, "p0": pl.col("return_value").fill_null(0) % U32})
    starts, ends = column(calls, "start_ns"), column(calls, "end_ns")
    code = details.codes(calls)
    correlation = calls["correlation_id"].fill_null(0).to_numpy()
    lanes: list[Lane] = []
    names = {(pid, tid): name for pid, tid, name in trace.threads.iter_rows()}
    for (pid, tid), at in grouped(calls, "pid", "tid"):
        whole = Lane(
            *("host", _process(trace, pid), _thread(names, pid, tid), "call"),
            *(starts[at], ends[at], code[at], correlation[at], at),
            pid=pid,
        )
        lanes += split(whole, details)
    return lanes


def _nvtx(trace: Trace, details: Details) -> list[Lane]:
    ranges = trace.nvtx_ranges.with_columns(
        pl.when("mark").then(pl.lit("mark")).otherwise(pl.lit("range")).alias("kind"),
        pl.when(pl.col("domain").is_null())
        .then("text")
        .otherwise(pl.format("{}: {}", pl.col("domain").fill_null(""), "text"))
        .alias("name"),
    ).with_columns(**_PLAIN)
    # The outer of two ranges that start together comes first.
    ranges = ranges.sort("start_ns", -pl.col("end_ns"), maintain_order=True)
    starts, ends = column(ranges, "start_ns"), column(ranges, "end_ns")
    code = details.codes(ranges)
    names = {(pid, tid): name for pid, tid, name in trace.threads.iter_rows()}
    lanes: list[Lane] = []
    for (pid, tid), at in grouped(ranges, "pid", "tid"):
        label = f"NVTX {_thread(names, pid, tid)}"
        whole = Lane(
            *("nvtx", _process(trace, pid), label, "range"),
            *(starts[at], ends[at], code[at]),
            pid=pid,
        )
        lanes += split(whole, details)
    return lanes


def _idle(
    trace: Trace, details: Details
) -> tuple[list[Lane], list[tuple[str, dict[str, int]]]]:
    """Gaps of each device by what the host did, and exact sums by cause.

    The operation that ends a gap says whose fault it is: before its call began,
    its thread waited in a synchronization, was in another CUDA call or in none;
    after that, the operation was on its way or held back. A gap gets the colour
    of its largest part.
    """
    ops = trace.gpu_ops.with_columns(device_key())
    lanes: list[Lane] = []
    totals: list[tuple[str, dict[str, int]]] = []
    code: dict[str, int] = {}
    calls = trace.runtime_calls.filter(~pl.col("nested"))
    for (gpu, device), at in grouped(ops, "gpu_id", "device_id"):
        here = ops[at]
        starts, ends = column(here, "start_ns"), column(here, "end_ns")
        gaps = union(starts, ends).gaps(int(starts.min()), int(ends.max()))
        ender = here[np.searchsorted(starts, gaps.ends)]
        parts = _by_cause(gaps, ender, calls)
        name = gpu_name(trace, gpu, device)
        sums = parts.sum(axis=1).tolist()
        totals.append((name, dict(zip(CAUSES, sums, strict=True))))
        if not len(gaps):
            continue
        main = parts.argmax(axis=0)
        for number in np.unique(main).tolist():
            cause = CAUSES[number]
            if cause not in code:
                code[cause] = details.one(cause, _CAUSE_WORDS[cause])
        main = np.array([code.get(cause, 0) for cause in CAUSES])[main]
        heading = f"{name}, all processes"
        label = "GPU idle, by main cause"
        lanes.append(
            Lane("idle", heading, label, CAUSES[0], gaps.starts, gaps.ends, main)
        )
    return lanes, totals


_CAUSE_WORDS = {
    "idle-wait": "GPU idle: the host waited in a synchronization",
    "idle-call": "GPU idle: the host was in other CUDA calls",
    "idle-host": "GPU idle: the host was outside CUDA",
    "idle-queued": "GPU idle: work was issued but had not started",
    "idle-unknown": "GPU idle: the issuing call was not recorded",
}


def _by_cause(gaps: Intervals, ender: pl.DataFrame, calls: pl.DataFrame) -> Int64:
    """Time of every cause in every gap, in ns: one row a cause."""
    parts = np.zeros((len(CAUSES), len(gaps)), dtype=np.int64)
    length = gaps.ends - gaps.starts
    known = (ender["issue_ns"].is_not_null() & ender["tid"].is_not_null()).to_numpy()
    issue = ender["issue_ns"].fill_null(0).to_numpy().clip(gaps.starts, gaps.ends)
    for (pid, tid), at in grouped(ender, "pid", "tid"):
        at = at[known[at]]
        if not len(at):
            continue
        own = calls.filter((pl.col("pid") == pid) & (pl.col("tid") == tid))
        waits = own.filter(pl.col("kind").is_in(WAITING))
        in_waits = union(column(waits, "start_ns"), column(waits, "end_ns"))
        in_calls = union(column(own, "start_ns"), column(own, "end_ns"))
        waited = in_waits.overlap_ns(gaps.starts[at], issue[at])
        called = in_calls.overlap_ns(gaps.starts[at], issue[at])
        parts[0, at] = waited
        parts[1, at] = called - waited
        parts[2, at] = issue[at] - gaps.starts[at] - called
        parts[3, at] = gaps.ends[at] - issue[at]
    parts[4, ~known] = length[~known]
    return parts


def _process(trace: Trace, pid: int | None) -> str:
    names = trace.processes.filter(pl.col("pid").eq_missing(pid))["name"]
    name = names[0] if len(names) and names[0] else "process"
    return f"{printable(name, 60)} ({pid})"


def _heading(trace: Trace, pid: int | None, gpu: int | None, device: int | None) -> str:
    return f"{_process(trace, pid)} · {gpu_name(trace, gpu, device)}"


def gpu_name(trace: Trace, gpu: int | None, device: int | None) -> str:
    """A device in words; ``device`` counts where the physical GPU is not known."""
    if gpu is None:
        return f"device {device}" if device is not None else "GPU"
    names = trace.gpus.filter(pl.col("gpu_id") == gpu)["name"]
    name = names[0] if len(names) and names[0] else "GPU"
    return f"{printable(name, 60)} (GPU {gpu})"


def _thread(names: dict[tuple[int, int], str | None], pid: int, tid: int) -> str:
    name = names.get((pid, tid))
    return f"thread {tid}" + (f" {printable(name, 40)}" if name else "")

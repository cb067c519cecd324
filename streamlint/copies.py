"""Copies between host and device, with the call that asked for each.

Shared by the rules about transfers: whether the host side is page-locked decides
whether a copy is asynchronous at all.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.changes import Change
from streamlint.findings import NotAssessed
from streamlint.intervals import Int64
from streamlint.replay import Edge, replay_of
from streamlint.replay.devices import pinned_rate
from streamlint.replay.graph import STAGED_BYTES
from streamlint.steady import in_time
from streamlint.trace.lookup import with_first
from streamlint.trace.model import Trace, schema

SMALL_BYTES = 65_536
"""Up to this size a pageable copy to the device is only staged, then returns.

CUDA Runtime API, "API synchronization behavior"; measured on an H200.
"""
LARGE_BYTES = 1 << 20
"""From this size on a copy shows the rate of the bus: 49 of 52 GB/s on an H200."""
BUS_RATE = 64.0
"""PCIe 5.0 x16 in bytes a ns: no discrete GPU copies faster from the host's memory."""
RETURN_NS = 4_000
"""Median time in the call of an asynchronous pinned copy: 3.9 us in public traces."""
MIN_SAMPLES = 3
"""Fewer copies say nothing about what is usual."""

_COHERENT = r"\bG[BH]\d00\b"


def host_copies(trace: Trace) -> pl.DataFrame:
    """Copies from host to device or back, one row a copy, sorted by start.

    pid, device_id, context_id, stream_id, correlation_id, start_ns, end_ns,
    size_bytes, copy_count, graph_node_id; direction ("HtoD", "DtoH"), host_kind
    ("pageable", "pinned", "managed", "unknown", ...); integrated and coherent (the
    GPU shares the CPU's memory, or reads it coherently as GH200 does; false where
    unknown); from the call that issued it, null where unrecorded: tid, issue_ns,
    issue_end_ns, call, call_kind, callchain_id, backtrace_ns.
    """
    return trace.derived(_host_copies)


def pinned_rates(trace: Trace) -> pl.DataFrame:
    """Rates of page-locked copies: pid, device_id, direction, rate (bytes a ns).

    The median of the trace's own ones of at least 1 MiB, else what was measured on
    this model of GPU; no row where neither is known.
    """
    return trace.derived(_pinned_rates)


def return_ns(trace: Trace) -> int:
    """How long the call of an asynchronous page-locked copy takes, median in ns."""
    return trace.derived(_return_ns)


def asynchronous(trace: Trace, copies: pl.DataFrame) -> Change:
    """These copies (rows of `host_copies`) made asynchronously from pinned memory.

    Their calls return at once and wait for nothing; large pageable ones run at the
    pinned rate, where that is known. The order of their streams is kept.
    """
    replay = replay_of(trace)
    calls = replay.calls_of(
        copies.select("pid", "tid", pl.col("issue_ns").alias("start_ns"))
    )
    slow = copies.filter(
        (pl.col("host_kind") == "pageable") & (pl.col("size_bytes") > STAGED_BYTES)
    )
    ops, staged = replay.ops_of(copies), replay.ops_of(slow)
    back = return_ns(trace)
    return Change(
        drop=replay.constraints(Edge.COPY, calls=calls),
        op_duration=(staged, at_pinned_rate(trace, staged)),
        call_duration=(calls, np.full(len(calls), back)),
        issue_latency=(ops, np.full(len(ops), back)),
    )


def at_pinned_rate(trace: Trace, ops: Int64, unknown: float | None = None) -> Int64:
    """Durations in ns of these copies (indexes of the replay) at the pinned rate.

    Where that is not known: at ``unknown`` bytes a ns, or as recorded.
    """
    graph = replay_of(trace).graph
    key = ["pid", "device_id", "direction"]
    rates = pinned_rates(trace).with_columns(pl.col("device_id").fill_null(-1))
    rate = pl.coalesce("rate", pl.lit(unknown, dtype=pl.Float64))
    took = (
        graph.ops[as_series(ops)]
        .rename({"engine": "direction"})
        .join(rates, on=key, how="left", validate="m:1", maintain_order="left")
        .select(pl.col("size_bytes") / rate)
        .to_series()
    )
    recorded = as_series(graph.op_duration[ops]).cast(pl.Float64)
    return took.zip_with(took.is_not_null(), recorded).cast(pl.Int64).to_numpy()


def memory_unknown(copies: pl.DataFrame) -> NotAssessed | None:
    """Why it can't be told what memory copies used (rows of `host_copies`)."""
    unknown = copies.filter(pl.col("host_kind") == "unknown").height
    if not unknown:
        return None
    return NotAssessed(
        f"the export doesn't say what memory {unknown} asynchronous copies used",
        "export again with nsys, record with -t cuda",
    )


def size_words(size_bytes: int) -> str:
    """A size as people say it: "64 B", "4.0 MiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _host_copies(trace: Trace) -> pl.DataFrame:
    calls = trace.launches.select(
        *("pid", "correlation_id", "tid"),
        pl.col("start_ns").alias("issue_ns"),
        pl.col("end_ns").alias("issue_end_ns"),
        pl.col("name").alias("call"),
        pl.col("kind").alias("call_kind"),
        *("callchain_id", "backtrace_ns"),
    )
    gpus = trace.gpus.select(
        "gpu_id",
        (pl.col("is_discrete") == 0).alias("integrated"),
        pl.col("name").str.contains(_COHERENT).alias("coherent"),
    )
    devices = trace.devices.join(gpus, on="gpu_id", how="left", validate="m:1")
    return (
        trace.memcpys.filter(pl.col("copy_kind").is_in(("HtoD", "DtoH")))
        .with_columns(
            pl.col("copy_kind").alias("direction"),
            pl.when(pl.col("copy_kind") == "HtoD")
            .then("src_kind")
            .otherwise("dst_kind")
            .alias("host_kind"),
        )
        .pipe(with_first, calls)
        .join(
            devices,
            on=["pid", "device_id"],
            how="left",
            validate="m:1",
            nulls_equal=True,
        )
        .select(
            *("pid", "device_id", "context_id", "stream_id", "correlation_id"),
            *("start_ns", "end_ns", "size_bytes", "copy_count", "graph_node_id"),
            *("direction", "host_kind"),
            pl.col("integrated", "coherent").fill_null(value=False),
            *("tid", "issue_ns", "issue_end_ns", "call", "call_kind"),
            *("callchain_id", "backtrace_ns"),
        )
        .sort("start_ns", "end_ns")
    )


def _pinned_rates(trace: Trace) -> pl.DataFrame:
    key = ["pid", "device_id"]
    host = host_copies(trace)
    large = host.filter(
        in_time(trace)
        & (pl.col("host_kind") == "pinned")
        & (pl.col("size_bytes") >= LARGE_BYTES)
    )
    rates = pl.col("size_bytes") / (pl.col("end_ns") - pl.col("start_ns")).clip(1)
    seen = (
        large.group_by(*key, "direction")
        .agg(rates.median().alias("rate"), pl.len().alias("samples"))
        .filter(pl.col("samples") >= MIN_SAMPLES)
    )
    named = trace.devices.join(
        trace.gpus.select("gpu_id", "name"), on="gpu_id", how="left"
    )
    measured = pl.DataFrame(
        [
            (pid, device, direction, rate)
            for pid, device, _, name in named.iter_rows()
            for direction in ("HtoD", "DtoH")
            if (rate := pinned_rate(name, direction)) is not None
        ],
        schema=schema("pid", "device_id", direction=pl.Categorical, rate=pl.Float64),
        orient="row",
    )
    columns = (*key, "direction", "rate")
    return pl.concat([seen.select(columns), measured]).unique(
        [*key, "direction"], keep="first", maintain_order=True
    )


def _return_ns(trace: Trace) -> int:
    calls = host_copies(trace).filter(
        (pl.col("host_kind") == "pinned") & (pl.col("call_kind") == "async memcpy"),
        in_time(trace),
    )
    if calls.height < MIN_SAMPLES:
        return RETURN_NS
    took = calls.select((pl.col("issue_end_ns") - pl.col("issue_ns")).median())
    return int(took.item())

"""Places findings: streams, threads, kernels, NVTX ranges and source lines."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import polars as pl

from streamlint.findings import Rows, SourceFrame, Where
from streamlint.trace.model import Trace
from streamlint.trace.stacks import Frame

_MAX_NAMES = 3
_MAX_CALLS = 64
_LIBRARY_FILE = re.compile(
    r"(^|/)(site-packages|dist-packages|lib/python\d[\d.]*)/|^<|^$"
)
_SYSTEM_MODULE = re.compile(
    r"^/(usr/)?lib|^\[|site-packages|dist-packages|/lib(cu|nv|torch|c10|python)"
    r"|(^|/)python[\d.]*$"
)


def locate(
    trace: Trace,
    *,
    calls: pl.DataFrame | None = None,
    ops: pl.DataFrame | None = None,
) -> Where:
    """Where these calls (rows of runtime_calls) and these operations are.

    Device and context are named only where all share one; kernels are the three
    that ran longest, NVTX ranges the three innermost ones seen most.
    """
    parts = [part for part in (calls, ops) if part is not None and part.height]
    pids = {pid for part in parts for pid in part["pid"].unique()}
    pid = pids.pop() if len(pids) == 1 else None
    names = [name for of, name in trace.processes.iter_rows() if of == pid]
    kernels: tuple[str, ...] = ()
    if ops is not None:
        longest = (
            ops.filter(pl.col("kind") == "kernel")
            .group_by("name")
            .agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("total"))
            .sort("total", "name", descending=[True, False])
            .head(_MAX_NAMES)
        )
        kernels = tuple(longest["name"])
    return Where(
        pid=pid,
        process=names[0] if names else None,
        device=_only(ops, "device_id"),
        context=_only(ops, "context_id"),
        streams=_distinct(ops, "stream_id"),
        threads=_distinct(calls, "tid") or _distinct(ops, "tid"),
        kernels=kernels,
        nvtx=_enclosing(trace, calls),
        source=_frames(trace, calls),
        rows=Rows(calls, ops),
    )


def calls_behind(trace: Trace, ops: pl.DataFrame) -> pl.DataFrame:
    """The rows of launches that asked for these operations, in their order."""
    return _sharing_key(trace.launches, ops)


def ops_asked_by(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """The rows of gpu_ops that these calls asked for, in their order."""
    return _sharing_key(trace.gpu_ops, calls)


def _sharing_key(rows: pl.DataFrame, keys: pl.DataFrame) -> pl.DataFrame:
    on = ["pid", "correlation_id"]
    return rows.join(keys, on=on, how="semi", maintain_order="left")


def sites(trace: Trace, calls: pl.DataFrame) -> pl.Series:
    """The place in the user's code of each call, null where the trace has none.

    One string a call, "file:line function" (Python) or "function (module)".
    """
    found = user_frames(trace, calls)
    keys = zip(calls["pid"], calls["correlation_id"], strict=True)
    texts = [
        None if (frame := found.get(key)) is None else describe(frame) for key in keys
    ]
    return pl.Series("site", texts, dtype=pl.String)


def describe(frame: SourceFrame) -> str:
    """One line for a frame."""
    if frame.line is None:
        return f"{frame.function} ({frame.file})"
    return f"{frame.file}:{frame.line} {frame.function}"


def in_own_code(frame: SourceFrame) -> bool:
    """Whether a frame is a line of the user's, not of a library or of Python."""
    return frame.line is not None and not _LIBRARY_FILE.search(frame.file)


def user_frames(
    trace: Trace, calls: pl.DataFrame
) -> dict[tuple[int, int], SourceFrame]:
    """The user's own innermost frame by (pid, correlation id)."""
    if not calls.height:
        return {}
    chosen: dict[tuple[tuple[int, int, int], ...], SourceFrame] = {}
    found: dict[tuple[int, int], SourceFrame] = {}
    for key, stack in _python_stacks(trace, calls).items():
        frames = tuple(stack)
        if frames not in chosen:
            named = [
                SourceFrame(trace.string(file), line, trace.string(function))
                for function, file, line in frames
            ]
            chosen[frames] = next(filter(in_own_code, named), named[0])
        found[key] = chosen[frames]
    if calls["callchain_id"].null_count() == calls.height:
        return found
    chained = calls.filter(pl.col("callchain_id").is_not_null())
    stacks = trace.native_stacks(chained["callchain_id"].unique())
    native = {chain: _native_frame(stack) for chain, stack in stacks.items()}
    columns = ("pid", "correlation_id", "callchain_id")
    for pid, correlation_id, chain in chained.select(columns).iter_rows():
        frame = native.get(chain)
        if frame is not None:
            found.setdefault((pid, correlation_id), frame)
    return found


def _python_stacks(
    trace: Trace, calls: pl.DataFrame
) -> dict[tuple[int, int], list[Frame]]:
    """`Trace.python_stacks`, which is dear, where these calls can have any."""
    if calls["backtrace_ns"].null_count() == calls.height:
        return {}
    return trace.python_stacks(calls)


def _native_frame(stack: list[tuple[str, str]]) -> SourceFrame | None:
    """The innermost frame outside system, CUDA and framework libraries."""
    for symbol, module in stack:
        if module and not _SYSTEM_MODULE.search(module):
            return SourceFrame(module.rpartition("/")[2], None, symbol)
    return None


def _frames(trace: Trace, calls: pl.DataFrame | None) -> tuple[SourceFrame, ...]:
    if calls is None:
        return ()
    counts = Counter(user_frames(trace, calls).values())
    return tuple(frame for frame, _ in counts.most_common(_MAX_NAMES))


def _enclosing(trace: Trace, calls: pl.DataFrame | None) -> tuple[str, ...]:
    """Innermost NVTX ranges around the calls, the most frequent first.

    Looks at `_MAX_CALLS` calls spread over all of them.
    """
    if calls is None or not calls.height:
        return ()
    if not trace.nvtx_ranges.height:
        return ()
    ranges = trace.nvtx_ranges.filter(~pl.col("mark"))
    counts: Counter[str] = Counter()
    some = calls.gather_every(-(-calls.height // _MAX_CALLS))
    for (pid, tid), here in some.group_by("pid", "tid", maintain_order=True):
        own = ranges.filter((pl.col("pid") == pid) & (pl.col("tid") == tid))
        starts, ends = own["start_ns"].to_numpy(), own["end_ns"].to_numpy()
        for at in here["start_ns"]:
            before = int(np.searchsorted(starts, at, side="right"))
            open_ranges = np.flatnonzero(ends[:before] > at)
            if len(open_ranges):
                counts[own["text"][int(open_ranges[-1])]] += 1
    return tuple(text for text, _ in counts.most_common(_MAX_NAMES))


def _distinct(frame: pl.DataFrame | None, name: str) -> tuple[int, ...]:
    if frame is None or name not in frame.columns:
        return ()
    return tuple(sorted({*frame[name].unique()} - {None}))


def _only(frame: pl.DataFrame | None, name: str) -> int | None:
    values = _distinct(frame, name)
    return values[0] if len(values) == 1 else None

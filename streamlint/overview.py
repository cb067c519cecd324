"""A trace as a whole, in a few numbers."""

from __future__ import annotations

from typing import NamedTuple

from streamlint.steady import regions
from streamlint.trace.model import Trace


class Overview(NamedTuple):
    """The trace in a few numbers; times in ns.

    ``span_ns`` reaches from the first GPU operation to the end of the last, None
    without any. ``judged`` has one (pid, start, end, iterations, NVTX name) a process.
    """

    gpus: tuple[str, ...]
    processes: tuple[tuple[int, str | None], ...]
    span_ns: int | None
    kernels: int
    memcpys: int
    memsets: int
    runtime_calls: int
    invalid_rows: dict[str, int]
    judged: tuple[tuple[int, int, int, int, str | None], ...]


def overview(trace: Trace) -> Overview:
    """Count and measure ``trace``."""
    ops = trace.gpu_ops
    kinds = dict(ops["kind"].value_counts().iter_rows())
    first, last = ops["start_ns"].min(), ops["end_ns"].max()
    used = set(ops["gpu_id"].drop_nulls().unique()) if ops.height else set()
    gpus = [
        (gpu_id, name or "unnamed GPU")
        for gpu_id, name in trace.gpus["gpu_id", "name"].iter_rows()
    ]
    span = last - first if isinstance(first, int) and isinstance(last, int) else None
    return Overview(
        gpus=tuple(name for gpu_id, name in gpus if not used or gpu_id in used),
        processes=tuple(trace.processes["pid", "name"].iter_rows()),
        span_ns=span,
        kernels=int(kinds.get("kernel", 0)),
        memcpys=int(kinds.get("memcpy", 0)),
        memsets=int(kinds.get("memset", 0)),
        runtime_calls=trace.runtime_calls.height,
        invalid_rows=trace.invalid_rows,
        judged=tuple(
            (r.pid, r.start_ns, r.end_ns, r.iterations, r.nvtx)
            for r in regions(trace).values()
        ),
    )

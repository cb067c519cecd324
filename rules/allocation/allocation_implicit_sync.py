"""Rule allocation-implicit-sync."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.changes import Change
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding
from streamlint.intervals import union
from streamlint.replay import Edge, replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, done_before, groups, of_process, regions
from streamlint.trace.model import Trace
from streamlint.trace.tables import NO_ID
from streamlint.where import locate, sites

MIN_CALLS = Threshold(
    "min-waits",
    2,
    "waiting frees",
    "One wait is tear-down or chance.",
)
MIN_WAIT_NS = Threshold(
    "min-wait",
    20_000,
    "ns",
    "A shorter overlap may be chance: a free without a wait takes 70 to 120 us (H200).",
)

_NAMES = ("cudaFree", "cudaFreeHost", "cuMemFree", "cuMemFreeHost")
"""Measured to wait. Whether cudaHostUnregister and cudaFreeArray do is not known."""
_OF_POOL = NO_ID
"""Context of a free whose memory is from cudaMallocAsync: such a free never waits."""


@rule(needs=("runtime_calls",))
def allocation_implicit_sync(trace: Trace) -> Outcome:
    """cudaFree or cudaFreeHost makes the host wait for all work of the device.

    What it does
        Finds at least two calls of cudaFree or cudaFreeHost in the judged region
        that began while the GPU worked and returned once that work was done.
    Why it costs time
        A free waits for everything that was given to the device before, on all
        streams, non-blocking ones too, and whether it uses the memory or not. The
        host issues nothing meanwhile, so streams that could overlap take turns. On
        an H200 a free took 20.2 ms beside a kernel of 20 ms in another stream.
    Evidence
        Work outstanding at the start of the call for 20 us or more, all of it done
        before the end, and nothing running then. With --cuda-memory-usage=true the
        moment of the release must follow that work too. The cost is a replay of the
        run in which these calls do not wait; their own time stays
        (resource-churn-in-loop judges that). It is an upper bound where a copy to
        the host was outstanding, as the host may count on its result.
    Exemptions
        Frees on an idle GPU, allocations (they don't wait), cudaFreeAsync, memory of
        cudaMallocAsync; in processes that use several devices, frees of unknown
        device.
    Fix
        Reuse the memory, free it when the GPU is idle, or use cudaMallocAsync and
        cudaFreeAsync, which keep the order of a stream. Where the program counts on
        the wait, to read a result or to reuse memory, replace it by an event, or
        data may race.
    References
        CUDA Runtime API, cudaFree and cudaFreeHost; CUDA C++ Programming Guide,
        "Implicit synchronization" and "Stream-Ordered Memory Allocator".
    """
    findings: list[Finding] = []
    if trace.call_kinds.isdisjoint(("device free", "host free")):
        return findings
    frees = trace.runtime_calls.filter(
        pl.col("name").is_in(_NAMES)
        & ~pl.col("nested")
        & (pl.col("return_value").fill_null(0) == 0)
    )
    for pid, region in regions(trace).items():
        here = frees.filter(region.holds())
        if here.height < trace.limit(MIN_CALLS):
            continue
        ops = of_process(trace.gpu_ops, pid)
        begun = column(here, "start_ns")
        # Work on all devices lasts at least as long as that on one.
        waiting = done_before(ops, begun) - begun >= trace.limit(MIN_WAIT_NS)
        if np.sum(waiting) < trace.limit(MIN_CALLS):
            continue
        waits = _waits(trace, here, ops)
        if waits.height < trace.limit(MIN_CALLS):
            continue
        waits = waits.with_columns(sites(trace, waits))
        for (name, site), calls in groups(waits, "name", "site"):
            if calls.height >= trace.limit(MIN_CALLS):
                identity = (str(name), "" if site is None else str(site))
                findings.append(_finding(trace, region, calls, ops, identity))
    return findings


def _waits(trace: Trace, frees: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """Frees that waited: with done_ns (end of that work), released_ns, result.

    released_ns is null where memory usage was not recorded; result tells that a copy
    to the host was among the work.
    """
    key = ["pid", "correlation_id"]
    released = (
        trace.memory_events.filter(pl.col("operation") == "deallocation")
        .unique(key, keep="first", maintain_order=True)
        .select(
            *(*key, "device_id", "context_id"), pl.col("start_ns").alias("released_ns")
        )
    )
    known = frees.join(
        released, on=key, how="left", validate="m:1", maintain_order="left"
    ).filter(pl.col("context_id").ne_missing(_OF_POOL))
    devices = ops["device_id"].unique()
    parts: list[pl.DataFrame] = []
    for device in devices:
        mine = pl.col("device_id").eq_missing(device)
        calls = known if len(devices) == 1 else known.filter(mine)
        parts.append(_waits_on(calls, ops.filter(mine)))
    waited = (pl.col("done_ns") - pl.col("start_ns") >= trace.limit(MIN_WAIT_NS)) & (
        pl.col("done_ns") <= pl.col("end_ns")
    )
    after = (pl.col("released_ns") >= pl.col("done_ns")).fill_null(value=True)
    return pl.concat(parts).filter(waited & after & ~pl.col("busy")).sort("start_ns")


def _waits_on(calls: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """The calls with done_ns (end of the device's work before it), busy, result."""
    start, end = column(calls, "start_ns"), column(calls, "end_ns")
    running = union(column(ops, "start_ns"), column(ops, "end_ns"))
    return calls.with_columns(
        as_series(done_before(ops, start), "done_ns"),
        as_series(running.overlap_ns(end, end + 1) > 0, "busy"),
        as_series(
            done_before(ops.filter(pl.col("engine") == "DtoH"), start) > start, "result"
        ),
    )


def _finding(
    trace: Trace,
    region: Region,
    calls: pl.DataFrame,
    ops: pl.DataFrame,
    identity: tuple[str, str],
) -> Finding:
    name = identity[0]
    waited = union(column(calls, "start_ns"), column(calls, "done_ns")).total_ns
    change = replayed(_change, trace, calls)
    cost = _cost(trace, region, calls, change, waited)
    exact = calls["released_ns"].null_count() == 0
    longest = calls.sort(
        pl.col("done_ns") - pl.col("start_ns"), descending=True, maintain_order=True
    ).head(5)
    last = calls.select("pid", pl.col("done_ns").alias("end_ns"))
    return Finding(
        message=f"{calls.height} calls of {name} kept the host waiting for GPU work "
        f"that was still running, {waited / 1e6:.2f} ms in all",
        severity=severity_of(cost),
        confidence=Confidence.HIGH if exact else Confidence.MEDIUM,
        cost=cost,
        where=locate(
            trace, calls=calls, ops=ops.join(last, on=["pid", "end_ns"], how="semi")
        ),
        occurrences=calls.height,
        evidence=tuple(
            Evidence(
                row["start_ns"],
                row["end_ns"],
                f"{name} waits {(row['done_ns'] - row['start_ns']) / 1e3:.0f} us for "
                "the GPU",
                row["correlation_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix=_FIX_HOST if "Host" in name else _FIX,
        identity=identity,
        change=change,
    )


def _change(trace: Trace, calls: pl.DataFrame) -> Change:
    """The calls take the time that they need by themselves."""
    replay = replay_of(trace)
    return Change(drop=replay.constraints(Edge.FREE, calls=replay.calls_of(calls)))


def _cost(
    trace: Trace,
    region: Region,
    calls: pl.DataFrame,
    change: Change | None,
    waited: int,
) -> Cost:
    return price_change(
        trace,
        region,
        change,
        Claim.UPPER_BOUND if calls["result"].any() else Claim.WHAT_IF,
        "these calls do not wait for the GPU, their own time stays",
        direct=price(
            Claim.DIRECT,
            min(waited, region.duration_ns),
            region,
            "time from the start of the calls to the end of the GPU work before them",
        ),
    )


_FIX = (
    "reuse the memory, free it when the GPU is idle, or use cudaMallocAsync and "
    "cudaFreeAsync in the stream that uses it (in long loops: the first call creates "
    "the pool, 9 to 13 ms measured); where the program counts on the wait, keep an "
    "event, or data may race"
)
_FIX_HOST = (
    "keep pinned buffers in a pool and reuse them, or free them when the GPU is idle; "
    "wait for an event after the last copy of a buffer before reusing it, or data may "
    "race"
)

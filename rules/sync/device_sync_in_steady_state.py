"""Rule device-sync-in-steady-state."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.blocking import concurrent_regions
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding, Severity
from streamlint.intervals import union
from streamlint.replay import replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, of_process
from streamlint.trace.model import Trace
from streamlint.waits import host_waits, without_waits
from streamlint.where import locate, sites, work_of

MIN_CALLS = Threshold(
    "min-calls",
    3,
    "calls",
    "Fewer device-wide waits are set-up or timing, not a pattern.",
)


@rule(needs=("runtime_calls",))
def device_sync_in_steady_state(trace: Trace) -> Outcome:
    """A wait for the whole device stops streams that had no need to wait.

    What it does
        Finds cudaDeviceSynchronize and cuCtxSynchronize calls in the repeated part
        of the run that waited for several streams, or for a stream that the
        thread's next work doesn't use.
    Why it costs time
        The host can't issue work for the other streams until everything is done,
        so copies and kernels that could overlap run one after another and the GPU
        idles until the next launch arrives.
    Evidence
        The calls, the streams with unfinished work at each, and the stream of the
        work issued next. The cost is an upper bound: the run replayed without these
        calls, the host's own time kept. Without any device idle after the calls the
        finding is info.
    Exemptions
        Calls with nothing outstanding, the last wait of a thread, waits for the
        one stream that is used next (host-sync-drains-gpu judges those).
    Fix
        Wait for the stream or the event whose result the host needs. Data that the
        host reads must still be waited for: keep a narrower wait before each read.
    References
        CUDA Runtime API, cudaDeviceSynchronize, cudaStreamSynchronize and
        cudaEventSynchronize; CUDA C++ Programming Guide, "Explicit
        synchronization".
    """
    findings: list[Finding] = []
    waits = host_waits(trace).filter(
        (pl.col("kind") == "device sync") & (pl.col("pending_streams") > 0)
    )
    for pid, region in concurrent_regions(trace).items():
        calls = waits.filter(region.holds())
        calls = calls.with_columns(sites(trace, calls))
        ops = of_process(trace.gpu_ops, pid)
        for (name, site), here in groups(calls, "name", "site"):
            if int(here["over_broad"].sum()) >= trace.limit(MIN_CALLS):
                findings.append(_finding(trace, region, here, ops, str(name), site))
    return findings


def _finding(
    trace: Trace,
    region: Region,
    calls: pl.DataFrame,
    ops: pl.DataFrame,
    name: str,
    site: object,
) -> Finding:
    broad = calls.filter("over_broad")
    change = replayed(without_waits, trace, broad)
    cost = price_change(
        trace,
        region,
        change,
        Claim.UPPER_BOUND,
        "the same work without these calls",
        direct=_cost(broad, ops, region),
    )
    idle = int(broad["saving_ns"].sum())
    idles = price(Claim.UPPER_BOUND, idle, region, "device idle after the calls")
    causes_idle = severity_of(idles) is not Severity.INFO
    several = int((broad["pending_streams"] > 1).sum())
    held = (
        f"{several} of them waited for several streams"
        if several
        else f"{broad.height} waited for a stream that the next work doesn't use"
    )
    longest = broad.sort(pl.col("end_ns") - pl.col("start_ns"), descending=True).head(5)
    return Finding(
        message=f"{calls.height} calls of {name} wait for the whole device while the "
        f"work goes on in other streams ({held})",
        severity=severity_of(cost) if causes_idle else Severity.INFO,
        confidence=Confidence.HIGH if several else Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=calls, ops=work_of(trace, region)),
        occurrences=calls.height,
        evidence=tuple(
            Evidence(start, end, f"{name} blocks the host", correlation_id)
            for start, end, correlation_id in longest.select(
                "start_ns", "end_ns", "correlation_id"
            ).iter_rows()
        ),
        fix="replace it by cudaStreamSynchronize on the stream, or an event before the "
        "place, whose result the host reads; drop it where the host reads nothing",
        identity=(name, str(site or "")),
        change=change,
    )


def _cost(calls: pl.DataFrame, ops: pl.DataFrame, region: Region) -> Cost:
    """Time from each call to the next work, bounded by what stays serial anyway."""
    issued = ops.select("issue_ns", "start_ns").drop_nulls("issue_ns").sort("issue_ns")
    issue, starts = column(issued, "issue_ns"), column(issued, "start_ns")
    after = np.searchsorted(issue, column(calls, "next_issue_ns"), side="left")
    until = starts[np.minimum(after, len(starts) - 1)]
    waited = union(column(calls, "start_ns"), until)
    waited = region.clip(waited)
    here = ops.filter(region.holds())
    serial = pl.coalesce(
        pl.when(pl.col("kind") == "memcpy").then(pl.col("engine")),
        pl.when(pl.col("sm_fraction") >= 1).then(pl.lit("compute")),
    )
    longest = 0
    for lane in (serial, pl.col("stream_id")):
        lanes = here.select(lane.alias("lane"), "start_ns", "end_ns")
        for _, part in groups(lanes.drop_nulls("lane"), "lane"):
            running = union(column(part, "start_ns"), column(part, "end_ns"))
            longest = max(longest, running.total_ns)
    return price(
        Claim.UPPER_BOUND,
        min(waited.total_ns, max(0, region.duration_ns - longest)),
        region,
        "time from each call to the start of the next work, at most the run less "
        "its busiest stream or engine",
    )

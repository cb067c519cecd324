"""Rule host-sync-drains-gpu."""

from __future__ import annotations

import polars as pl

from streamlint.blocking import concurrent_regions
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Evidence, Finding
from streamlint.replay import replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, groups, in_scope, of_process
from streamlint.trace.model import Trace
from streamlint.waits import (
    host_waits,
    issue_delay_ns,
    without_readbacks,
    without_waits,
)
from streamlint.where import locate, sites, work_of

MIN_CALLS = Threshold(
    "min-calls",
    3,
    "calls",
    "Fewer drains are phases of the program, not a loop.",
)
MIN_IDLE_NS = Threshold(
    "min-idle",
    10_000,
    "ns",
    "Shorter idle after a wait is the ordinary cost of a launch.",
)
MIN_IDLE_DELAYS = Threshold(
    "min-idle-delays",
    3,
    "factor",
    "For traces whose launches take long: idle shorter than so many median issue "
    "delays is the ordinary cost of a launch.",
)


@rule(needs=("runtime_calls",))
def host_sync_drains_gpu(trace: Trace) -> Outcome:
    """The host waits for the GPU each iteration, and the GPU then waits for the host.

    What it does
        Finds stream, event and device synchronizations in the repeated part of the
        run after which the device had nothing to run until the same thread issued
        more work.
    Why it costs time
        While the host waits it prepares nothing; once the GPU is done it idles for
        as long as the host needs to prepare and launch the next work.
    Evidence
        Waits followed by device idle of more than 10 us and three issue delays, at
        least three times at one place. The cost is an upper bound: the run
        replayed without these calls, and without the small copies that they wait
        for, the host's own time kept. A wait that is short because the GPU was
        already done costs nothing.
    Exemptions
        The last wait of a thread, device-wide waits over several streams
        (device-sync-in-steady-state judges those), waits with no idle after them.
    Fix
        Read results one iteration later, double-buffer, or keep them on the
        device; where the value steers the program, gather several into one copy.
        Without the wait the host may read a result too early: wait before the read.
    References
        CUDA C++ Best Practices Guide, "Asynchronous and overlapping transfers with
        computation"; PyTorch documentation, "Avoid unnecessary CPU-GPU
        synchronization".
    """
    least = max(
        trace.limit(MIN_IDLE_NS), trace.limit(MIN_IDLE_DELAYS) * issue_delay_ns(trace)
    )
    waits = host_waits(trace).filter(
        (pl.col("kind") != "sync memcpy") & ~pl.col("over_broad")
    )
    drains = (
        pl.col("next_issue_ns").is_not_null()
        & (pl.col("idle_ns") > least)
        & (pl.col("pending_streams") > 0)
    )
    findings: list[Finding] = []
    for pid, region in concurrent_regions(trace).items():
        calls = of_process(waits, pid).filter(in_scope(trace))
        calls = calls.with_columns(
            sites(trace, calls), (drains & region.holds()).alias("drains")
        )
        place = ("tid", "name", "readback", "site")
        for key, here in groups(calls, *place):
            if int(here["drains"].sum()) >= trace.limit(MIN_CALLS):
                findings.append(_finding(trace, region, here, *key[1:]))
    return findings


def _finding(
    trace: Trace,
    region: Region,
    calls: pl.DataFrame,
    name: object,
    readback: object,
    site: object,
) -> Finding:
    drains = calls.filter("drains")
    make = without_readbacks if readback else without_waits
    change = replayed(make, trace, drains)
    cost = price_change(
        trace,
        region,
        change,
        Claim.UPPER_BOUND,
        "the same work without these calls"
        + (" and the copies before them" if readback else ""),
        direct=price(
            Claim.UPPER_BOUND,
            int(drains["saving_ns"].sum()),
            region,
            "sum over the waits of the smaller of time in the call and device idle",
        ),
    )
    idle = int(drains["idle_ns"].sum())
    what = f"{calls.height} calls of {name}"
    if readback:
        what += " after a copy of at most 1 KiB to the host (such as .item())"
    strongest = drains.sort("saving_ns", "idle_ns", descending=True).head(5)
    waited = work_of(trace, region, drains["stream_id"].unique())
    return Finding(
        message=f"{what}: after {drains.height} of them the GPU ran dry, "
        f"{idle / 1e6:.2f} ms in all, until the thread issued more work",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=drains, ops=waited),
        occurrences=calls.height,
        evidence=tuple(
            Evidence(start, end, f"{name} blocks the host, then the GPU idles", corr)
            for start, end, corr in strongest.select(
                "start_ns", "end_ns", "correlation_id"
            ).iter_rows()
        ),
        fix=_READBACK_FIX if readback else _FIX,
        identity=(str(name), str(readback), str(site or "")),
        change=change,
    )


_READBACK_FIX = (
    "keep the value on the device and read it every n-th iteration or one iteration "
    "later (asynchronous copy to pinned memory and an event), where the program allows"
)
_FIX = (
    "issue the next work before waiting (double-buffer what the host reads), and wait "
    "for an event just before the host needs the result"
)

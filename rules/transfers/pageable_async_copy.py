"""Rule pageable-async-copy."""

from __future__ import annotations

import polars as pl

from streamlint.blocking import launches_block
from streamlint.changes import Change
from streamlint.copies import (
    SMALL_BYTES,
    asynchronous,
    host_copies,
    memory_unknown,
    pinned_rates,
    size_words,
)
from streamlint.cost import MIN_SHARE, price, price_change, severity_of
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.intervals import union
from streamlint.replay import replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, in_time, regions
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate, ops_asked_by, sites

MIN_COPIES = Threshold(
    "min-copies",
    3,
    "blocking copies",
    "Fewer copies are a one-time transfer: page-locking memory for it costs more. "
    "Measured on an H200: 0.6 to 1.3 ms for each MiB allocated page-locked.",
)


@rule(needs=("runtime_calls", "memcpys"))
def pageable_async_copy(trace: Trace) -> Outcome:
    """An asynchronous copy of pageable memory blocks the host.

    What it does
        Finds asynchronous copy calls (cudaMemcpyAsync and its relatives) whose host
        side is pageable memory.
    Why it costs time
        The copy engines reach page-locked memory only, so the driver copies through
        a staging buffer of its own while the caller waits: to the device until the
        data is staged, to the host until the copy, and all work before it in the
        stream, is done. Large copies also run at a fraction of the pinned rate (8
        against 52 GB/s to an H200).
    Evidence
        Copies to the host of any size, and to the device of more than 64 KiB, at
        least three of them in the judged region or more than 1 % of it blocked.
        The cost is a replay of the run in which these calls return as early as
        those of pinned copies do, and copies over 1 MiB run at the pinned rate: that
        of the trace's own pinned copies, else that measured on this model of GPU.
        Where neither is known the copies keep their durations and the cost is a
        lower bound. Fewer than three copies are info: pinning a buffer for them
        rarely pays.
    Exemptions
        Places that copy at most 64 KiB to the device (staged within microseconds),
        managed memory, buffers that a runtime pinned, integrated GPUs, processes
        whose every launch blocks (launch-blocking judges those); where the GPU reads
        CPU memory coherently (GH200, GB200) the severity is at most low.
    Fix
        Allocate page-locked buffers once (cudaHostAlloc, cudaHostRegister,
        DataLoader(pin_memory=True)) and reuse them; pinning for each copy costs
        more than it saves. The call then returns at once: use two buffers in turn
        and an event, or the host may overwrite a source that is still being read.
    References
        CUDA Runtime API, "API synchronization behavior", memcpy asynchronous; CUDA
        C++ Best Practices Guide, "Pinned memory".
    """
    findings: list[Finding] = []
    unable: NotAssessed | None = None
    copies = host_copies(trace).filter(
        (pl.col("call_kind") == "async memcpy") & ~pl.col("integrated"),
        in_time(trace),
    )
    for pid, region in regions(trace).items():
        own = copies.filter(
            (pl.col("pid") == pid) & pl.col("host_kind").is_in(("pageable", "unknown"))
        )
        if own.is_empty() or launches_block(trace, pid):
            continue
        own = own.with_columns(sites(trace, own))
        pageable = own.filter(pl.col("host_kind") == "pageable")
        for (site,), here in groups(pageable, "site"):
            if _bites(trace, here, region):
                findings.append(_finding(trace, region, here, site))
        if pageable.height < own.height and _bites(trace, own, region):
            unable = memory_unknown(own)
    return findings or unable or []


def _blocking(copies: pl.DataFrame, region: Region) -> pl.DataFrame:
    """Copies of the judged region that block the host for the whole transfer."""
    large = (pl.col("direction") == "DtoH") | (pl.col("size_bytes") > SMALL_BYTES)
    return copies.filter(region.holds() & large)


def _bites(trace: Trace, copies: pl.DataFrame, region: Region) -> bool:
    blocking = _blocking(copies, region)
    blocked = _in_calls_ns(blocking)
    return (
        blocking.height >= trace.limit(MIN_COPIES)
        or blocked > MIN_SHARE * region.duration_ns
    )


def _in_calls_ns(copies: pl.DataFrame) -> int:
    return union(column(copies, "issue_ns"), column(copies, "issue_end_ns")).total_ns


def _finding(
    trace: Trace, region: Region, copies: pl.DataFrame, site: object
) -> Finding:
    judged = copies.filter(region.holds())
    blocked = _in_calls_ns(judged)
    change = replayed(asynchronous, trace, judged)
    cost = _cost(trace, region, judged, change)
    large = int((copies["size_bytes"] > SMALL_BYTES).sum())
    some = "" if large == copies.height else f", {large} of them over 64 KiB"
    number = f"{copies.height} asynchronous cop{'y' if copies.height == 1 else 'ies'}"
    slowest = judged.sort(
        pl.col("issue_end_ns") - pl.col("issue_ns"), descending=True
    ).head(5)
    directions = sorted(copies["direction"].unique())
    return Finding(
        message=f"{number} of pageable host memory ({', '.join(directions)}{some}) "
        f"kept the host inside the calls for {blocked / 1e6:.2f} ms of the judged "
        "region",
        severity=_severity(trace, cost, copies, region),
        confidence=Confidence.LOW if copies["coherent"].any() else Confidence.HIGH,
        cost=cost,
        where=locate(
            trace,
            calls=calls_behind(trace, judged),
            ops=ops_asked_by(trace, judged),
        ),
        occurrences=copies.height,
        evidence=tuple(
            Evidence(
                row["issue_ns"],
                row["issue_end_ns"],
                f"{row['call']} of {size_words(row['size_bytes'])} {row['direction']} "
                "blocks the host",
                row["correlation_id"],
            )
            for row in slowest.iter_rows(named=True)
        ),
        fix="allocate page-locked buffers once (cudaHostAlloc, cudaHostRegister, "
        "pin_memory=True) and reuse them; the call then returns early, so fill two "
        "buffers in turn and wait for an event before overwriting one",
        identity=("pageable", *directions, str(site or "")),
        change=change,
    )


def _cost(
    trace: Trace, region: Region, copies: pl.DataFrame, change: Change | None
) -> Cost:
    on = ["pid", "device_id", "direction"]
    rates = pinned_rates(trace)
    unknown = copies.join(rates, on=on, how="anti", nulls_equal=True).height
    return price_change(
        trace,
        region,
        change,
        Claim.LOWER_BOUND if unknown else Claim.WHAT_IF,
        "these calls return at once"
        + ("" if unknown else " and copies over 1 MiB run at the pinned rate"),
        direct=price(
            Claim.DIRECT,
            _in_calls_ns(copies),
            region,
            "time in which a thread was inside the call of a copy of the judged region",
        ),
    )


def _severity(
    trace: Trace, cost: Cost, copies: pl.DataFrame, region: Region
) -> Severity:
    severity = severity_of(cost)
    if _blocking(copies, region).height < trace.limit(MIN_COPIES):
        return Severity.INFO
    if copies["coherent"].any() and severity.at_least(Severity.LOW):
        return Severity.LOW
    return severity

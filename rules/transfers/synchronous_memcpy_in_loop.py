"""Rule synchronous-memcpy-in-loop."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.changes import Change
from streamlint.copies import SMALL_BYTES, asynchronous, host_copies, size_words
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding, Severity
from streamlint.intervals import Int64
from streamlint.replay import replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, regions
from streamlint.trace.model import Trace
from streamlint.waits import host_waits
from streamlint.where import locate, ops_asked_by, sites

MIN_ROUNDS = Threshold(
    "min-rounds",
    3,
    "rounds",
    "Copies with kernels launched in between, this many times, are a loop.",
)
MIN_LOOP_SHARE = Threshold(
    "min-loop-share",
    0.1,
    "share",
    "A free loop over a smaller part of the region is set-up or the final readback.",
)


@rule(needs=("runtime_calls", "memcpys"))
def synchronous_memcpy_in_loop(trace: Trace) -> Outcome:
    """A synchronous copy in the main loop holds the host until the GPU is done.

    What it does
        Finds cudaMemcpy and its relatives (calls without Async) between host and
        device that are made again and again between kernel launches.
    Why it costs time
        The call first waits for all earlier work of its stream, then for the copy.
        Meanwhile the host can't launch what comes next, so the GPU idles from the
        end of the copy until the next launch arrives.
    Evidence
        At least three rounds of copies with kernel launches in between. A copy
        counts if it lies between two launches, or looks (direction and size) like
        copies of three rounds. The cost is an upper bound: a replay of the run in
        which these calls return at once, as asynchronous copies of pinned memory,
        and the host waits only where it synchronizes anyway. It assumes that the
        host needs no result earlier. Where the GPU never ran dry it is info.
    Exemptions
        Device-to-device copies (they don't wait), pageable copies to the device of
        up to 64 KiB with nothing outstanding (staged, then returned), uploads
        before the first kernel, the final readback.
    Fix
        Use cudaMemcpyAsync with pinned memory on a stream, record an event, and
        wait for it just before the host needs the data. The copy is then no longer
        done when the call returns: keep source and result untouched until the event.
    References
        CUDA Runtime API, "API synchronization behavior", memcpy; CUDA C++ Best
        Practices Guide, "Asynchronous and overlapping transfers with computation".
    """
    findings: list[Finding] = []
    waits = host_waits(trace).filter(pl.col("kind") == "sync memcpy")
    if not waits.height:
        return findings
    key = ["pid", "correlation_id"]
    copies = host_copies(trace).unique(key, keep="first", maintain_order=True)
    waits = waits.join(
        copies.select(
            *(*key, "direction", "host_kind", "size_bytes"),
            pl.col("start_ns").alias("ran_ns"),
        ),
        on=key,
        how="left",
        validate="1:1",
        maintain_order="left",
    ).filter(~_only_staged())
    for pid, region in regions(trace).items():
        here = waits.filter(region.holds("ran_ns"))
        if here.is_empty():
            continue
        here = here.with_columns(sites(trace, here))
        launched = _launches(trace, pid)
        for (site,), calls in groups(here, "site"):
            looped = _in_loop(trace, calls, launched)
            rounds = looped.group_by("tid").agg(pl.col("round").n_unique())
            if not (rounds["round"] >= trace.limit(MIN_ROUNDS)).any():
                continue
            own = copies.join(looped, on=key, how="semi", maintain_order="left")
            finding = _finding(trace, region, looped, own, site)
            first, last = looped["start_ns"][0], looped["start_ns"][-1]
            spread = (last - first) >= trace.limit(MIN_LOOP_SHARE) * region.duration_ns
            if spread or finding.severity is not Severity.INFO:
                findings.append(finding)
    return findings


def _only_staged() -> pl.Expr:
    """Copies that return before they ran; of unknown memory none is accused."""
    return (
        (pl.col("direction") == "HtoD")
        & pl.col("host_kind").is_in(("pageable", "unknown"))
        & (pl.col("size_bytes") <= SMALL_BYTES)
        & (pl.col("pending_streams") == 0)
    )


def _launches(trace: Trace, pid: int) -> Int64:
    """When the process launched kernels or graphs, ascending."""
    kinds = ("kernel launch", "graph launch")
    calls = trace.launches.filter((pl.col("pid") == pid) & pl.col("kind").is_in(kinds))
    return np.sort(column(calls, "start_ns"))


def _in_loop(trace: Trace, calls: pl.DataFrame, launched: Int64) -> pl.DataFrame:
    """Calls that recur between launches, with their round."""
    rounds = np.searchsorted(launched, column(calls, "start_ns"))
    between = (pl.col("round") > 0) & (pl.col("round") < len(launched))
    alike = pl.col("round").n_unique().over("name", "direction", "size_bytes")
    return calls.with_columns(as_series(rounds, "round")).filter(
        between | (alike >= trace.limit(MIN_ROUNDS))
    )


def _finding(
    trace: Trace,
    region: Region,
    calls: pl.DataFrame,
    copies: pl.DataFrame,
    site: object,
) -> Finding:
    change = replayed(asynchronous, trace, copies)
    cost = _cost(trace, region, calls, change)
    idle = int(calls["idle_ns"].sum())
    names = sorted(calls["name"].unique())
    inside = int((calls["end_ns"] - calls["start_ns"]).sum())
    strongest = calls.sort(
        "saving_ns", pl.col("end_ns") - pl.col("start_ns"), descending=True
    ).head(5)
    return Finding(
        message=f"{calls.height} synchronous copies ({', '.join(names)}) between "
        f"kernel launches blocked the host for {inside / 1e6:.2f} ms; the GPU idled "
        f"{idle / 1e6:.2f} ms until the next work",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM,
        cost=cost,
        where=locate(
            trace,
            calls=calls,
            ops=ops_asked_by(trace, calls),
        ),
        occurrences=calls.height,
        evidence=tuple(
            Evidence(
                row["start_ns"],
                row["end_ns"],
                f"{row['name']} of {size_words(row['size_bytes'])} "
                f"{row['direction']} blocks the host",
                row["correlation_id"],
            )
            for row in strongest.iter_rows(named=True)
        ),
        fix="use cudaMemcpyAsync with pinned memory on a stream and wait for an event "
        "just before the data is needed; until then neither side may touch the buffers",
        identity=(
            "sync copy",
            *names,
            *sorted(calls["direction"].unique()),
            str(site or ""),
        ),
        change=change,
    )


def _cost(
    trace: Trace, region: Region, calls: pl.DataFrame, change: Change | None
) -> Cost:
    return price_change(
        trace,
        region,
        change,
        Claim.UPPER_BOUND,
        "these calls return at once, as asynchronous copies of pinned memory",
        direct=price(
            Claim.UPPER_BOUND,
            int(calls["saving_ns"].sum()),
            region,
            "sum over the calls of the smaller of time in the call and device idle "
            "after",
        ),
    )

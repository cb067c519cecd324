"""Rule l2-setaside-oversubscribed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.copies import size_words
from streamlint.cost import MIN_SHARE
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.intervals import Intervals, union
from streamlint.l2 import MARKS_PAGE, l2_marks, without_marks
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, busy, column, groups, regions
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

TOLERANCE = 1.01
"""Hit ratios are rounded; 1 % more than the set-aside is meant to fit."""
MIN_KERNELS = Threshold(
    "min-kernels",
    3,
    "kernels",
    "Fewer kernels are start-up, not a pattern.",
)
MIN_TOGETHER = Threshold(
    "min-together",
    0.1,
    "share",
    "Less of the windows' kernel time together is the tail of one kernel in the next.",
)


@rule(needs=("runtime_calls",))
def l2_setaside_oversubscribed(trace: Trace) -> Outcome:
    """Persisting windows ask for more L2 than is set aside for them.

    What it does
        Finds kernels under a persisting access policy window whose size times hit
        ratio exceeds the L2 set-aside, and windows that fit one by one but not
        together, in kernels that run at the same time. Needs the program's own
        NVTX marks (docs/l2-marks.md): a trace holds neither size.
    Why it costs time
        Persisting lines that do not fit evict each other, and every line is
        fetched again before it is reused: the window costs cache and saves no
        access to memory. On an H200 kernels under a window of twice the set-aside
        took 100 us at hit ratio 1.0 and 80 at 0.5.
    Evidence
        l2.window ranges around launches and the l2.setaside mark that held when
        they were issued. Windows that share addresses count once, with the
        smallest demand among them. What kernels would gain is not in the trace,
        so no cost is claimed.
    Exemptions
        Streaming and normal windows, fewer than 3 kernels, an excess of up to 1 %,
        windows that fit the set-aside that was asked for and not the one granted
        (l2-request-clamped-or-unsupported); together, windows without a base
        address and an excess for less than 10 % of the kernels' time.
    Fix
        Lower hitRatio to set-aside over window size (of all windows together, if
        their kernels overlap), make the window smaller, or set aside more.
    References
        CUDA C++ Programming Guide, "L2 policy for persisting accesses" and
        "Manage utilization of L2 set-aside cache".
    """
    marks = l2_marks(trace)
    if not marks.any:
        return without_marks(trace) or []
    unable = marks.unusable()
    if unable is not None:
        return unable
    persisting = marks.windows.filter(pl.col("hit_property") == "persisting").select(
        "window",
        *("base", "hit_ratio"),
        pl.col("bytes").alias("window_bytes"),
        (pl.col("bytes") * pl.col("hit_ratio")).alias("demand"),
    )
    under = marks.kernels.join(persisting, on="window", how="inner", validate="m:1")
    known = under.filter(pl.col("set_aside_bytes").is_not_null())
    if under.height and not known.height:
        return NotAssessed(
            "no l2.setaside mark precedes the launches under L2 windows",
            f"mark the size of the set-aside ({MARKS_PAGE})",
        )
    # What would fit the request was not cut by the window.
    asked = pl.when(pl.col("demand") <= TOLERANCE * pl.col("requested_bytes"))
    known = known.with_columns(
        asked.then("requested_bytes")
        .otherwise("set_aside_bytes")
        .alias("set_aside_bytes")
    )
    too_large = pl.col("demand") > TOLERANCE * pl.col("set_aside_bytes")
    findings: list[Finding] = []
    for region in regions(trace).values():
        here = known.filter(region.holds())
        alone = here.filter(too_large)
        if alone.height >= trace.limit(MIN_KERNELS):
            findings.append(_too_large(trace, region, alone))
        # Without an address, two windows may be about the same data.
        fitting = here.filter(~too_large & pl.col("base").is_not_null())
        together = _together(trace, fitting)
        if together is not None:
            findings.append(_too_many(trace, region, together))
    return findings


def _too_large(trace: Trace, region: Region, kernels: pl.DataFrame) -> Finding:
    """Windows that do not fit by themselves; the one with most excess speaks."""
    excess = pl.col("demand") - pl.col("set_aside_bytes")
    ranked = kernels.sort(excess, descending=True, maintain_order=True)
    worst = ranked.row(0, named=True)
    size, reserved = worst["window_bytes"], worst["set_aside_bytes"]
    others = kernels.select("base", "window_bytes", "hit_ratio").n_unique() - 1
    more = f" (and {others} other window{'s' if others > 1 else ''})" if others else ""
    aside = f"{size_words(reserved)} are" if reserved else "nothing is"
    fit = int(100 * reserved / size) / 100
    lower = (
        f"set hitRatio to at most {fit:.2f}, make the window smaller or reserve more"
    )
    return _finding(
        trace,
        region,
        kernels,
        message=f"{kernels.height} kernels ran under a persisting window of "
        f"{size_words(size)} at hit ratio {worst['hit_ratio']:g}{more}, while {aside} "
        "set aside in L2",
        fix=(lower if fit > 0 else "reserve L2 before the window is set")
        + " (cudaLimitPersistingL2CacheSize), then compare the kernels' durations",
        evidence=tuple(
            Evidence(
                row["start_ns"],
                row["end_ns"],
                f"{row['name']} under a window that asks for "
                f"{size_words(int(row['demand']))} of L2",
                row["correlation_id"],
            )
            for row in ranked.head(5).iter_rows(named=True)
        ),
        cause="window too large",
    )


class _Together(NamedTuple):
    """Kernels that ran while the windows of all asked for too much.

    ``demand`` and ``set_aside`` are those of the greatest excess.
    """

    kernels: pl.DataFrame
    times: Intervals
    demand: float
    set_aside: int


def _together(trace: Trace, kernels: pl.DataFrame) -> _Together | None:
    """Times in which running kernels' windows exceed the set-aside together."""
    found: list[_Together] = []
    clustered = _clusters(kernels)
    for (reserved,), here in groups(clustered, "set_aside_bytes"):
        assert isinstance(reserved, int)
        edges: list[tuple[Intervals, float]] = []
        for _, cluster in groups(here, "cluster"):
            running = union(column(cluster, "start_ns"), column(cluster, "end_ns"))
            edges.append((running, float(cluster["demand"].to_numpy().min())))
        at = np.concatenate([np.r_[i.starts, i.ends] for i, _ in edges])
        step = np.concatenate([np.repeat([d, -d], len(i)) for i, d in edges])
        order = np.lexsort((step, at))
        at, total = at[order], np.cumsum(step[order])
        over = total[:-1] > TOLERANCE * reserved
        times = union(at[:-1][over], at[1:][over])
        if times.total_ns < trace.limit(MIN_TOGETHER) * busy(here) or not len(times):
            continue
        during = times.overlap_ns(column(here, "start_ns"), column(here, "end_ns")) > 0
        hit = here.filter(as_series(during))
        found.append(_Together(hit, times, float(total.max()), reserved))
    if sum(part.kernels.height for part in found) < trace.limit(MIN_KERNELS):
        return None
    worst = max(found, key=lambda part: part.demand - part.set_aside)
    times = union(
        np.concatenate([part.times.starts for part in found]),
        np.concatenate([part.times.ends for part in found]),
    )
    kernels = pl.concat([part.kernels for part in found])
    return _Together(kernels, times, worst.demand, worst.set_aside)


def _clusters(kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels with cluster: windows of one cluster share addresses."""
    key = ["base", "window_bytes", "hit_ratio"]
    reached = (pl.col("base") + pl.col("window_bytes")).cum_max().shift(1)
    distinct = (
        kernels.select(key)
        .unique()
        .sort(key)
        .with_columns(
            (pl.col("base") >= reached).fill_null(value=True).cum_sum().alias("cluster")
        )
    )
    return kernels.join(
        distinct, on=key, how="left", validate="m:1", maintain_order="left"
    )


def _too_many(trace: Trace, region: Region, found: _Together) -> Finding:
    """Windows that fit by themselves but not together."""
    longest = np.argsort(found.times.starts - found.times.ends, kind="stable")[:5]
    kernels = found.kernels
    scale = int(100 * found.set_aside / found.demand) / 100
    return _finding(
        trace,
        region,
        kernels,
        message=f"{kernels.height} kernels under {kernels['cluster'].n_unique()} "
        "persisting windows ran at the same time and asked for up to "
        f"{size_words(int(found.demand))} of L2 together, while "
        f"{size_words(found.set_aside)} are set aside",
        fix=f"multiply the hit ratios by {scale:.2f}, make the windows smaller, or run "
        "the kernels one after the other, then compare the kernels' durations",
        evidence=tuple(
            Evidence(
                int(found.times.starts[i]),
                int(found.times.ends[i]),
                "kernels whose windows do not fit together",
            )
            for i in longest
        ),
        cause="windows too large together",
    )


def _finding(
    trace: Trace,
    region: Region,
    kernels: pl.DataFrame,
    *,
    message: str,
    fix: str,
    evidence: tuple[Evidence, ...],
    cause: str,
) -> Finding:
    calls = calls_behind(trace, kernels)
    # A trace prices no cache miss, and without a price any finding would be info.
    # But by the program's own figures the window can't work as it was meant.
    share = busy(kernels) / max(1, region.duration_ns)
    return Finding(
        message=message,
        severity=Severity.LOW if share >= MIN_SHARE else Severity.INFO,
        confidence=Confidence.HIGH
        if cause == "window too large"
        else Confidence.MEDIUM,
        cost=Cost(
            Claim.NONE,
            None,
            None,
            "what a fitting window gains is not in a trace: compare the kernels' "
            "durations",
        ),
        where=locate(trace, calls=calls, ops=kernels),
        occurrences=kernels.height,
        evidence=evidence,
        fix=fix,
        identity=(cause, *sorted(kernels["name"].unique())[:8]),
    )

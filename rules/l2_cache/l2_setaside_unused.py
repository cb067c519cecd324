"""Rule l2-setaside-unused."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.copies import size_words
from streamlint.cost import MIN_SHARE
from streamlint.findings import (
    Confidence,
    Evidence,
    Finding,
    Severity,
)
from streamlint.l2 import (
    DEFAULT_LIMIT,
    l2_calls,
    l2_marks,
    launched_during,
    no_set_aside,
    set_aside_by_environment,
    unknown_gain,
    unseen,
)
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, busy, column, of_process, regions
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

MIN_KERNELS = Threshold(
    "min-kernels",
    5,
    "kernels",
    "Fewer kernels run between reserving L2 and setting the window, as set-up.",
)

_WINDOW_CALLS = ("stream attribute", "node attribute")


@rule(needs=("runtime_calls",))
def l2_setaside_unused(trace: Trace) -> Outcome:
    """L2 cache is set aside for persisting accesses that never come.

    What it does
        Finds times in which part of L2 is reserved
        (cudaLimitPersistingL2CacheSize) and kernels run, but no access policy
        window lets any of them use it. The program's own NVTX marks
        (docs/l2-marks.md) tell the size of the reservation, which a trace does not
        hold. Without marks, but with all APIs recorded, it judges by the calls.
    Why it costs time
        The reserved part serves persisting accesses only. Without any, all other
        data have to do with the rest of L2 and miss more often. On an H200 kernels
        that read and write 16 MiB took 16.5 us with a set-aside of 37.5 MiB alone and
        12 without it or with a window; for 8 MiB it made no difference.
    Evidence
        An l2.setaside mark above 0, kernels launched before the next such mark, no
        persisting l2.window range until then and no successful call that sets a
        stream or graph node attribute. Without marks: a limit was set, and no such
        attribute ever; which limit is not in a trace, so the confidence is low and
        it is info, unless a reset of persisting lines or the environment tells that
        L2 is meant. What kernels would gain is not in the trace either, so no cost
        is claimed.
    Exemptions
        Fewer than 5 kernels in the judged region; a set-aside of 0. Accesses that
        are persisting by themselves (cuda::annotated_ptr) can't be seen: mark
        their launches as a window.
    Fix
        Set an access policy window for the data that are reused, or give the
        cache back: cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 0).
    References
        CUDA C++ Programming Guide, "L2 cache set-aside for persisting accesses"
        and "L2 policy for persisting accesses".
    """
    marks = l2_marks(trace)
    if not marks.any:
        return _by_calls(trace)
    unable = marks.unusable()
    if unable is not None:
        return unable
    findings: list[Finding] = []
    for pid, region in regions(trace).items():
        unused = _unused(
            trace,
            of_process(marks.set_asides, pid),
            of_process(marks.windows, pid),
        )
        ran = launched_during(unused, marks.kernels.filter(region.holds()))
        if ran.height >= trace.limit(MIN_KERNELS):
            findings.append(_told_by_marks(trace, region, ran))
    return findings


def _by_calls(trace: Trace) -> Outcome:
    """What the calls alone tell: a limit was set, and no window."""
    if no_set_aside(trace):
        return []
    unable = unseen(trace)
    if unable is not None:
        return unable
    calls = l2_calls(trace)
    by_environment = set_aside_by_environment(trace)
    findings: list[Finding] = []
    for pid, region in regions(trace).items():
        own = pl.col("pid") == pid
        limits = calls.limits.filter(own)
        if calls.windows.filter(own).height or not (limits.height or by_environment):
            continue
        since = 0 if by_environment else limits["start_ns"].min()
        at = pl.coalesce("issue_ns", "start_ns")
        ran = trace.gpu_ops.filter(
            region.holds() & pl.col("kind").is_in(("kernel", "graph")) & (at > since)
        )
        if ran.height >= trace.limit(MIN_KERNELS):
            resets = calls.resets.filter(own).height
            findings.append(_told_by_calls(trace, region, limits, ran, resets))
    return findings


def _told_by_calls(
    trace: Trace, region: Region, limits: pl.DataFrame, ran: pl.DataFrame, resets: int
) -> Finding:
    """Something was reserved, by a limit that may be that of L2 or by default."""
    if set_aside_by_environment(trace):
        message = f"{DEFAULT_LIMIT} reserves L2, but {ran.height} kernels ran "
    elif resets:
        message = "persisting L2 lines are reset, but "
        message += f"{ran.height} kernels ran after {limits['name'][0]} "
    else:
        message = f"if {limits['name'][0]} reserved L2, {ran.height} kernels ran "
    told = limits.select("start_ns", "end_ns", "name", "correlation_id").head(5)
    start, end = ran.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    certain = resets > 0 or set_aside_by_environment(trace)
    return _finding(
        trace,
        ran,
        message=message + "without any call that sets an access policy window",
        severity=_severity(region, ran) if certain else Severity.INFO,
        confidence=Confidence.LOW,
        evidence=tuple(
            Evidence(at, until, f"{name} sets a limit", correlation_id)
            for at, until, name, correlation_id in told.iter_rows()
        )
        or (Evidence(start, end, f"{ran.height} kernels"),),
    )


def _unused(
    trace: Trace, set_asides: pl.DataFrame, windows: pl.DataFrame
) -> pl.DataFrame:
    """Set-asides above 0 that no window of the process can have used."""
    persisting = windows.filter(
        (pl.col("hit_property") == "persisting")
        & (pl.col("bytes") > 0)
        & (pl.col("hit_ratio") > 0)
    )
    calls = trace.runtime_calls.join(set_asides, on="pid", how="semi").filter(
        pl.col("kind").is_in(_WINDOW_CALLS) & (pl.col("return_value").fill_null(0) == 0)
    )
    kept = set_asides.filter(pl.col("bytes") > 0)
    # A window that was set stays set, so one set before the mark counts as well.
    first = calls["start_ns"].min()
    if isinstance(first, int):
        kept = kept.filter(pl.col("end_ns") <= first)
    opened = column(persisting, "start_ns")
    closed = np.maximum.accumulate(column(persisting, "end_ns"))
    before = np.searchsorted(opened, column(kept, "end_ns"), side="left")
    last = np.append(closed, 0)[before - 1]
    used = (before > 0) & (last > column(kept, "start_ns"))
    return kept.filter(as_series(~used))


def _told_by_marks(trace: Trace, region: Region, ran: pl.DataFrame) -> Finding:
    largest = ran["bytes"].max()
    assert isinstance(largest, int)
    spans = (
        ran.group_by("since_ns", maintain_order=True)
        .agg(
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            pl.len().alias("kernels"),
            pl.col("bytes").first(),
        )
        .sort("kernels", descending=True, maintain_order=True)
        .head(5)
    )
    return _finding(
        trace,
        ran,
        message=f"{size_words(largest)} of L2 are set aside for persisting accesses, "
        f"but {ran.height} kernels ran without any access policy window",
        severity=_severity(region, ran),
        confidence=Confidence.MEDIUM,
        evidence=tuple(
            Evidence(
                start, end, f"{kernels} kernels with {size_words(size)} of L2 reserved"
            )
            for start, end, kernels, size in spans.select(
                "start_ns", "end_ns", "kernels", "bytes"
            ).iter_rows()
        ),
    )


def _finding(
    trace: Trace,
    ran: pl.DataFrame,
    *,
    message: str,
    severity: Severity,
    confidence: Confidence,
    evidence: tuple[Evidence, ...],
) -> Finding:
    calls = calls_behind(trace, ran)
    return Finding(
        message=message,
        severity=severity,
        confidence=confidence,
        cost=unknown_gain("set-aside"),
        where=locate(trace, calls=calls, ops=ran),
        occurrences=ran.height,
        evidence=evidence,
        fix="set an access policy window (cudaStreamSetAttribute) for the data that "
        "are reused, or set the limit cudaLimitPersistingL2CacheSize back to 0; mark "
        "launches that use cuda::annotated_ptr as a window",
        identity=("unused", *sorted(ran["name"].unique())[:8]),
    )


def _severity(region: Region, ran: pl.DataFrame) -> Severity:
    """Low, where the kernels matter to the region.

    A trace prices no cache miss, and without a price any finding would be info. But
    a reservation that nothing uses can't help: acting on it is always right.
    """
    share = busy(ran) / max(1, region.duration_ns)
    return Severity.LOW if share >= MIN_SHARE else Severity.INFO

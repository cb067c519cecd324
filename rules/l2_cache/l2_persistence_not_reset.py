"""Rule l2-persistence-not-reset."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.cost import MIN_SHARE
from streamlint.findings import (
    Confidence,
    Evidence,
    Finding,
    Severity,
)
from streamlint.l2 import (
    L2Marks,
    l2_calls,
    l2_marks,
    no_set_aside,
    unknown_gain,
    unseen,
)
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, busy, column, regions
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

MIN_KERNELS = Threshold(
    "min-kernels",
    5,
    "kernels",
    "Fewer kernels after the last window are the end of the program.",
)
MIN_LASTING_NS = Threshold(
    "min-kernel-time",
    1_000_000,
    "ns",
    "Unless they run for longer than this, too few kernels are the end of the program.",
)


@rule(needs=("runtime_calls",))
def l2_persistence_not_reset(trace: Trace) -> Outcome:
    """Persisting lines stay in L2 after the last kernel that used them.

    What it does
        Finds kernels that run after the last one under a persisting access policy
        window, without a reset in between. The program's own NVTX marks
        (docs/l2-marks.md) tell which kernels a window was for. Without marks, but
        with all APIs recorded, it judges by the calls.
    Why it costs time
        Lines that were marked persisting keep their place in the set-aside part of
        L2 long after they were last used. The hardware demotes them in its own time;
        until then all other data have to do with less cache. On an H200 kernels that
        took 36 us after a reset took 83 to 89 without, and 45 to 47 after 40 of them.
    Evidence
        At least 5 kernels, or more than 1 ms of them, launched after the last one
        under an l2.window range with persisting accesses, and no l2.reset mark and
        no call of cudaCtxResetPersistingL2Cache until then. Without marks: a window
        attribute was set again later and kernels followed, but persisting lines
        never were reset. That may be on purpose, so it is info at low confidence.
        What kernels would gain is not in the trace, so no cost is claimed.
    Exemptions
        Windows in use to the end of the process, kernels outside of windows between
        others under them (they may leave the lines in place on purpose), a set-aside
        of 0 after the window.
    Fix
        When the data are no longer reused, wait for their last kernel, set a window
        with num_bytes 0 and call cudaCtxResetPersistingL2Cache. Without the wait the
        reset comes while kernels still make lines persist.
    References
        CUDA C++ Programming Guide, "Reset L2 access to normal".
    """
    marks = l2_marks(trace)
    if not marks.any:
        return _by_calls(trace)
    unable = marks.unusable()
    if unable is not None:
        return unable
    findings: list[Finding] = []
    for region in regions(trace).values():
        last, after = _left_behind(trace, marks, region)
        many = after.height >= trace.limit(MIN_KERNELS)
        if many or busy(after) >= trace.limit(MIN_LASTING_NS):
            findings.append(_told_by_marks(trace, region, last, after))
    return findings


def _left_behind(
    trace: Trace, marks: L2Marks, region: Region
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The last kernel under a persisting window, and those after it before a reset."""
    own = pl.col("pid") == region.pid
    windows = marks.windows.filter(
        own
        & (pl.col("hit_property") == "persisting")
        & (pl.col("bytes") > 0)
        & (pl.col("hit_ratio") > 0)
    )
    kernels = marks.kernels.filter(own).with_columns(
        pl.coalesce("issue_ns", "start_ns").alias("at_ns")
    )
    under = kernels.join(windows.select("window"), on="window", how="semi")
    last = under.filter(pl.col("at_ns") == pl.col("at_ns").max()).head(1)
    if last.is_empty():
        return last, last
    at = last["at_ns"][0]
    emptied = marks.set_asides.filter(own & (pl.col("bytes") == 0))
    resets = l2_calls(trace).resets.filter(own)
    ends = [
        frame.filter(pl.col("start_ns") >= at)["start_ns"].min()
        for frame in (marks.resets.filter(own), emptied, resets)
    ]
    until = min((end for end in ends if isinstance(end, int)), default=None)
    after = kernels.filter(region.holds() & (pl.col("at_ns") > at))
    if until is not None:
        after = after.filter(pl.col("at_ns") < until)
    return last, after


def _told_by_marks(
    trace: Trace, region: Region, last: pl.DataFrame, after: pl.DataFrame
) -> Finding:
    start, end, name, correlation_id = last.select(
        "start_ns", "end_ns", "name", "correlation_id"
    ).row(0)
    first, until = after.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    share = busy(after) / max(1, region.duration_ns)
    return _finding(
        trace,
        after,
        message=f"{after.height} kernels ran after the last one under a persisting "
        "window, and the persisting L2 lines were not reset",
        # A trace prices no cache miss, but giving back what nobody uses is right.
        severity=Severity.LOW if share >= MIN_SHARE else Severity.INFO,
        confidence=Confidence.MEDIUM,
        evidence=(
            Evidence(start, end, f"{name}, the last under a window", correlation_id),
            Evidence(first, until, f"{after.height} kernels without a window"),
        ),
        identity=("not reset", *sorted(after["name"].unique())[:8]),
    )


def _by_calls(trace: Trace) -> Outcome:
    """What the calls alone tell: a window, kernels, another one, kernels, no reset."""
    if no_set_aside(trace):
        return []
    unable = unseen(trace)
    if unable is not None:
        return unable
    calls = l2_calls(trace)
    findings: list[Finding] = []
    for pid, region in regions(trace).items():
        own = pl.col("pid") == pid
        windows = calls.windows.filter(own)
        if windows.height < 2 or calls.resets.filter(own).height:
            continue
        if calls.limits.filter(own).is_empty():
            continue
        at = pl.coalesce("issue_ns", "start_ns").alias("at_ns")
        kernels = (
            trace.gpu_ops.filter(own & pl.col("kind").is_in(("kernel", "graph")))
            .with_columns(at)
            .sort("at_ns")
        )
        set_ns = column(windows, "start_ns")
        before = np.searchsorted(column(kernels, "at_ns"), set_ns)
        after = kernels[int(before[-1]) :].filter(region.holds())
        if min(before[-1] - before[0], after.height) >= trace.limit(MIN_KERNELS):
            findings.append(_told_by_calls(trace, windows, after))
    return findings


def _told_by_calls(trace: Trace, windows: pl.DataFrame, after: pl.DataFrame) -> Finding:
    name = windows["name"][0]
    return _finding(
        trace,
        after,
        message=f"{windows.height} calls of {name} may change access policy windows, "
        f"and {after.height} kernels ran after the last of them, but "
        "cudaCtxResetPersistingL2Cache is never called",
        severity=Severity.INFO,
        confidence=Confidence.LOW,
        evidence=tuple(
            Evidence(start, end, called, correlation_id)
            for start, end, called, correlation_id in windows.tail(5)
            .select("start_ns", "end_ns", "name", "correlation_id")
            .iter_rows()
        ),
        identity=("not reset by calls", name),
    )


def _finding(
    trace: Trace,
    after: pl.DataFrame,
    *,
    message: str,
    severity: Severity,
    confidence: Confidence,
    evidence: tuple[Evidence, ...],
    identity: tuple[str, ...],
) -> Finding:
    calls = calls_behind(trace, after)
    return Finding(
        message=message,
        severity=severity,
        confidence=confidence,
        cost=unknown_gain("reset"),
        where=locate(trace, calls=calls, ops=after),
        occurrences=after.height,
        evidence=evidence,
        fix="when the data are no longer reused, wait for their last kernel, set a "
        "window of num_bytes 0 and call cudaCtxResetPersistingL2Cache; a reset before "
        "that wait is undone by the kernels still running",
        identity=identity,
    )

"""Rule l2-request-clamped-or-unsupported."""

from __future__ import annotations

import polars as pl

from streamlint.copies import size_words
from streamlint.cost import MIN_SHARE
from streamlint.cuda_errors import error_name
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.l2 import (
    MARKS_PAGE,
    L2Marks,
    l2_calls,
    l2_marks,
    launched_during,
    no_set_aside,
    unseen,
)
from streamlint.rule import Outcome, rule
from streamlint.steady import Region, busy, groups, in_scope, regions
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

_NO_COST = Cost(
    Claim.NONE,
    None,
    None,
    "what a request that is granted gains is not in a trace: compare the kernels' "
    "durations",
)


@rule(needs=("runtime_calls",))
def l2_request_clamped_or_unsupported(trace: Trace) -> Outcome:
    """The program asks for more L2 than the GPU grants, or for what it refuses.

    What it does
        Finds L2 set-asides above the maximum of the GPU, access policy windows above
        its maximum, either on a GPU that has no set-aside, and calls for a limit or
        a stream attribute that failed.
    Why it costs time
        A set-aside that is not granted holds less than the hit ratio of the window
        was made for, and its lines evict each other. Kernels run without a window that
        was refused. An H200 cuts nothing down: it refuses both with
        cudaErrorInvalidValue, and the set-aside and the window of before stay in
        force. A program that doesn't look never knows.
    Evidence
        The program's own marks (docs/l2-marks.md): l2.setaside above persistMax of
        l2.props, kernels under an l2.window above maxWindow. Without marks, calls of
        cudaDeviceSetLimit, cudaStreamSetAttribute or cudaGraphKernelNodeSetAttribute
        that returned an error: at low confidence, as a trace does not hold which
        limit or attribute they were about. An H200 has 60 MiB of L2, of which 37.5
        can be set aside (62.5 %), and windows of up to 128 MiB. What is gained is
        not in the trace, so no cost is claimed.
    Exemptions
        Requests that the GPU can grant. That a multi-instance GPU or an MPS server
        ignores the limit can't be seen: mark what cudaDeviceGetLimit returns.
    Fix
        Ask cudaDeviceProp for persistingL2CacheMaxSize and
        accessPolicyMaxWindowSize, use what cudaDeviceGetLimit returns for the hit
        ratio, and check the result of each call.
    References
        CUDA C++ Programming Guide, "L2 cache set-aside for persisting accesses",
        "Query L2 cache properties" and "Control L2 cache set-aside size".
    """
    marks = l2_marks(trace)
    refused = l2_calls(trace).refused
    if not marks.any and refused.is_empty():
        return _unmarked(trace) or []
    if marks.any:
        unable = marks.unusable()
        if unable is not None:
            return unable
    findings: list[Finding] = []
    for pid, region in regions(trace).items():
        own = pl.col("pid") == pid
        found = _by_marks(trace, marks, region)
        findings += found
        # Of what the marks show to be too large, the refusal is no news.
        failed = refused.filter(own & (len(found) == 0) & in_scope(trace))
        for (name, code), calls in groups(failed, "name", "return_value"):
            marked = marks.windows.filter(own).height > 0
            findings.append(_refused(trace, calls, str(name), code, marked))
    if not findings and marks.any and not _limits_known(trace, marks):
        return NotAssessed(
            "no l2.props mark says how much L2 the GPU grants",
            f"mark the properties of the device ({MARKS_PAGE})",
        )
    return findings


def _unmarked(trace: Trace) -> NotAssessed | None:
    """Without marks and failures: whether a request may not have been granted."""
    if no_set_aside(trace):
        return None
    unable = unseen(trace)
    if unable is None and l2_calls(trace).limits.height:
        return NotAssessed(
            "a limit of the device is set, but a trace does not hold which and how "
            "large: what was granted for L2 may be less than what was asked for",
            f"mark the program's L2 control (NVTX, {MARKS_PAGE}) and record with "
            "-t cuda,nvtx",
        )
    return unable


def _limits_known(trace: Trace, marks: L2Marks) -> bool:
    """Whether a request that is too large would have been found."""
    props = marks.properties
    known = (
        props["max_set_aside_bytes"].len() - props["max_set_aside_bytes"].null_count()
    )
    return known > 0 or no_set_aside(trace)


def _by_marks(trace: Trace, marks: L2Marks, region: Region) -> list[Finding]:
    """What the marks ask for, against what they say that the GPU has."""
    own = pl.col("pid") == region.pid
    props = marks.properties.filter(own)
    most, widest = props["max_set_aside_bytes"].max(), props["max_window_bytes"].max()
    if no_set_aside(trace):
        most = widest = 0
    kernels = marks.kernels.filter(region.holds())
    found: list[Finding] = []
    if isinstance(most, int):
        asides = marks.set_asides.filter(own & (pl.col("requested_bytes") > most))
        under = launched_during(asides, kernels)
        if under.height:
            limits = l2_calls(trace).refused.filter(
                own & (pl.col("kind") == "set limit")
            )
            found.append(_set_aside(trace, region, under, most, limits.height > 0))
    if isinstance(widest, int):
        wide = marks.windows.filter(own & (pl.col("bytes") > widest)).select(
            "window", pl.col("bytes").alias("window_bytes")
        )
        under = kernels.join(wide, on="window", how="inner", validate="m:1")
        if under.height:
            found.append(_window(trace, region, under, widest))
    return found


def _set_aside(
    trace: Trace, region: Region, kernels: pl.DataFrame, most: int, refused: bool
) -> Finding:
    asked = kernels["requested_bytes"].max()
    assert isinstance(asked, int)
    limit = f"at most {size_words(most)}" if most else "no L2 at all"
    return _of_kernels(
        trace,
        region,
        kernels,
        message=f"{size_words(asked)} of L2 are asked for as set-aside, but this GPU "
        f"grants {limit}{' and refused the call' if refused else ''}; {kernels.height} "
        "kernels ran with less than they were made for",
        what="ran with a smaller set-aside than asked for",
        fix=f"ask for at most persistingL2CacheMaxSize ({size_words(most)}) and size "
        "the hit ratio for what cudaDeviceGetLimit returns"
        if most
        else "reserve L2 only where persistingL2CacheMaxSize is not 0",
        identity="set-aside",
    )


def _window(
    trace: Trace, region: Region, kernels: pl.DataFrame, widest: int
) -> Finding:
    asked = kernels["window_bytes"].max()
    assert isinstance(asked, int)
    limit = f"at most {size_words(widest)}" if widest else "none"
    return _of_kernels(
        trace,
        region,
        kernels,
        message=f"an access policy window of {size_words(asked)} is asked for, but "
        f"this GPU allows {limit}; {kernels.height} kernels ran without it",
        what="ran without the window that was asked for",
        fix=f"keep num_bytes within accessPolicyMaxWindowSize ({size_words(widest)}), "
        "set the window for the part that is reused most, and check the result"
        if widest
        else "set windows only where accessPolicyMaxWindowSize is not 0",
        identity="window",
    )


def _of_kernels(
    trace: Trace,
    region: Region,
    kernels: pl.DataFrame,
    *,
    message: str,
    what: str,
    fix: str,
    identity: str,
) -> Finding:
    # A trace prices no cache miss; but the program does not do what it was meant to.
    share = busy(kernels) / max(1, region.duration_ns)
    calls = calls_behind(trace, kernels)
    longest = kernels.sort(
        pl.col("end_ns") - pl.col("start_ns"), descending=True, maintain_order=True
    ).head(5)
    return Finding(
        message=message,
        severity=Severity.LOW if share >= MIN_SHARE else Severity.INFO,
        confidence=Confidence.HIGH,
        cost=_NO_COST,
        where=locate(trace, calls=calls, ops=kernels),
        occurrences=kernels.height,
        evidence=tuple(
            Evidence(start, end, f"{name} {what}", correlation_id)
            for start, end, name, correlation_id in longest.select(
                "start_ns", "end_ns", "name", "correlation_id"
            ).iter_rows()
        ),
        fix=fix,
        identity=(identity, *sorted(kernels["name"].unique())[:8]),
    )


def _refused(
    trace: Trace, calls: pl.DataFrame, name: str, code: object, marked: bool
) -> Finding:
    """A failed call; without marks it may have been about something else than L2."""
    assert isinstance(code, int)
    times = "1 call" if calls.height == 1 else f"{calls.height} calls"
    maybe = "" if marked else ", perhaps for L2,"
    what = "what it asks for" if calls.height == 1 else "what they ask for"
    return Finding(
        message=f"{times} of {name}{maybe} failed with {error_name(code)} ({code}): "
        f"{what} is not set",
        severity=Severity.LOW if marked else Severity.INFO,
        confidence=Confidence.MEDIUM if marked else Confidence.LOW,
        cost=_NO_COST,
        where=locate(trace, calls=calls),
        occurrences=calls.height,
        evidence=tuple(
            Evidence(start, end, f"{name} returned {code}", correlation_id)
            for start, end, correlation_id in calls.head(5)
            .select("start_ns", "end_ns", "correlation_id")
            .iter_rows()
        ),
        fix="ask for no more than persistingL2CacheMaxSize and "
        "accessPolicyMaxWindowSize of cudaDeviceProp, and check the result",
        identity=("refused", name, str(code)),
    )

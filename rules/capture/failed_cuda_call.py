"""Rule failed-cuda-call."""

from __future__ import annotations

import polars as pl

from streamlint.completeness import no_gpu_work
from streamlint.cuda_errors import (
    ASYNCHRONOUS,
    CAPTURE,
    NOT_READY,
    SUCCESS,
    error_name,
)
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.rule import Outcome, rule
from streamlint.steady import groups, in_scope
from streamlint.trace.model import Trace
from streamlint.where import locate, sites

_REPORTS = ("cudaGetLastError", "cudaPeekAtLastError")
"""They return the error of an earlier call."""
_ASKS = r"Get[A-Z]|Query|Is[A-Z]|CanAccess|Occupancy|ElapsedTime"
"""Calls that ask whether or what; no is an answer."""
_EXPECTED = (4, 704, 712, 910)
"""Shutting down, done already, or (910) update refused: programs go on after these."""
_NO_COST = Cost(Claim.NONE, None, None, "a fault of correctness, which costs no time")
_SANITIZE = "run it under compute-sanitizer, and once with CUDA_LAUNCH_BLOCKING=1"
_FIXES = {
    2: "check the result and free or reuse memory before asking for so much",
    9: "launch with a grid and a block that the GPU allows (at most 1024 threads)",
    98: "compile the kernel for this GPU (nvcc -arch), or register its module first",
    209: "compile the kernel for this GPU (nvcc -arch, with PTX for newer ones)",
    701: "use fewer threads, registers or shared memory per block "
    "(cudaFuncSetAttribute allows more than 48 KiB of shared memory)",
    906: "keep the legacy default stream out of the code that is captured: use a "
    "non-blocking stream everywhere",
    904: "let every stream that joined the capture rejoin its first stream by an event "
    "before cudaStreamEndCapture",
    910: "keep the topology of the graph, or instantiate it again where it changes",
    912: "use a cluster of at most 8 blocks (16 with "
    "cudaFuncAttributeNonPortableClusterSizeAllowed) that divides the grid",
}
_CAPTURE_FIX = (
    "keep waits, queries and the legacy default stream out of the code that is "
    "captured, and end the capture on the thread and stream that began it"
)


@rule(needs=("runtime_calls",), judges_capture=True)
def failed_cuda_call(trace: Trace) -> Outcome:
    """A CUDA call returned an error.

    What it does
        Lists calls with a return value other than success, over the whole process.
    Why it costs time
        It costs none; it makes results wrong. A launch that failed left no kernel, an
        allocation no memory. An error of work on the GPU ends the process's use of
        CUDA: every later call returns it.
    Evidence
        The return values. Errors of kernels and copies (cudaErrorIllegalAddress,
        cudaErrorLaunchFailure and the like) appear at a later call, mostly the next
        synchronization; the finding then names what was issued last on each stream.
    Exemptions
        cudaErrorNotReady. cudaGetLastError and cudaPeekAtLastError, which repeat
        the error of another call. Info only: calls that ask something
        (cudaFuncGetAttributes, cudaPointerGetAttributes) and errors that programs
        expect (peer access enabled already, memory registered already, graph update
        refused, runtime unloading).
    Fix
        Check the result of every call, and cudaGetLastError after launches; mend
        the first error, the others often follow from it.
    References
        CUDA Runtime API, "Data types used by CUDA Runtime", cudaError_t; CUDA C++
        Programming Guide, "Error checking" and "Stream capture".
    """
    calls = trace.runtime_calls.filter(~pl.col("nested"))
    if calls.height and calls["return_value"].null_count() == calls.height:
        return NotAssessed(
            "the export doesn't hold return values", "export again with nsys"
        )
    failed = calls.filter(
        ~pl.col("return_value").is_in((SUCCESS, NOT_READY)), in_scope(trace)
    )
    if failed.is_empty():
        return no_gpu_work(trace) or []
    reports = pl.col("name").is_in(_REPORTS)
    # A report counts only where the call that failed was not recorded.
    failed = failed.filter(
        ~reports | ~(~reports).any().over("pid", "return_value")
    ).with_columns(pl.col("return_value").is_in(list(ASYNCHRONOUS)).alias("late"))
    findings: list[Finding] = []
    late = failed.filter("late")
    for _, here in groups(late, "pid", "return_value"):
        findings.append(_late(trace, here))
    direct = failed.filter(~pl.col("late"))
    direct = direct.with_columns(sites(trace, direct))
    place = ("pid", "name", "return_value", "site")
    for key, here in groups(direct, *place):
        findings.append(_direct(trace, here, key[3]))
    return findings


def _late(trace: Trace, calls: pl.DataFrame) -> Finding:
    """An error of earlier work, which the first call and all later ones returned."""
    pid, name, code, at = calls.select("pid", "name", "return_value", "start_ns").row(0)
    issued = trace.gpu_ops.filter((pl.col("pid") == pid) & (pl.col("issue_ns") < at))
    last = issued.sort("issue_ns").unique("stream_id", keep="last", maintain_order=True)
    more = calls.height - 1
    return _finding(
        trace,
        calls,
        last,
        message=f"{error_name(code)} ({code}) appeared at {name}"
        + (f" and at {more} later call{'s' if more > 1 else ''}" if more else "")
        + ": GPU work issued before it failed",
        severity=Severity.ERROR,
        fix=f"find the kernel or copy that failed: {_SANITIZE}; then check the result "
        "of every call",
        identity=("late", str(code)),
    )


def _direct(trace: Trace, calls: pl.DataFrame, site: object) -> Finding:
    name, code = calls.select("name", "return_value").row(0)
    many = "1 call" if calls.height == 1 else f"{calls.height} calls"
    harmless = code in _EXPECTED or bool(
        calls["name"].cast(pl.String).str.contains(_ASKS).all()
    )
    if name in _REPORTS:
        message = f"{many} of {name} returned {error_name(code)} ({code}) of a call "
        message += "that was not recorded"
        harmless = False
    else:
        message = f"{many} of {name} failed with {error_name(code)} ({code})"
    fix = _FIXES.get(code, _CAPTURE_FIX if code in CAPTURE else "")
    return _finding(
        trace,
        calls,
        None,
        message=message,
        severity=Severity.INFO if harmless else Severity.ERROR,
        fix=f"{fix}; check the result of the call"
        if fix
        else "check the result of the "
        "call and mend its arguments; what depends on it did not happen",
        identity=(str(name), str(code), str(site or "")),
    )


def _finding(
    trace: Trace,
    calls: pl.DataFrame,
    ops: pl.DataFrame | None,
    *,
    message: str,
    severity: Severity,
    fix: str,
    identity: tuple[str, ...],
) -> Finding:
    return Finding(
        message=message,
        severity=severity,
        confidence=Confidence.HIGH,
        cost=_NO_COST,
        where=locate(trace, calls=calls, ops=ops),
        occurrences=calls.height,
        evidence=tuple(
            Evidence(start, end, f"{name} returned {code}", correlation_id)
            for start, end, name, code, correlation_id in calls.select(
                "start_ns", "end_ns", "name", "return_value", "correlation_id"
            )
            .head(5)
            .iter_rows()
        ),
        fix=fix,
        identity=identity,
    )

"""Rule unsynchronized-d2h-result."""

from __future__ import annotations

import polars as pl

from streamlint.copies import host_copies, memory_unknown, size_words
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding, Severity
from streamlint.rule import Outcome, rule
from streamlint.steady import groups, in_scope
from streamlint.trace.model import Trace
from streamlint.unwaited import cut_off, unwaited
from streamlint.where import calls_behind, locate, sites


@rule(needs=("memcpys", "runtime_calls"))
def unsynchronized_d2h_result(trace: Trace) -> Outcome:
    """Copies to page-locked host memory that nothing waits for before the end.

    What it does
        Finds asynchronous copies from the device to page-locked memory that no
        later call of the process waits for.
    Why it costs time
        It costs none; it is a matter of correctness. Such a copy returns at once,
        so the host can read the buffer while the old contents are still there, and
        a program that ends may end before the copy does.
    Evidence
        The copies, and that no synchronization of the device, the stream or an
        event after them, no copy that blocks the host, no answered query, no free
        and no host function follows, neither on their stream nor on one that waits
        for it. What the host reads is not in a trace: the race is possible, not
        seen.
    Exemptions
        Pageable memory (such copies block the host), synchronous copies, recordings
        that were cut off or lost events (not assessed). A program that watches the
        memory itself is accused wrongly.
    Fix
        Call cudaStreamSynchronize, or cudaEventSynchronize on an event recorded
        after the copy, before the host reads the buffer. The narrowest wait is
        enough; one for the whole device would stop other streams as well.
    References
        CUDA Runtime API, "API synchronization behavior", cudaMemcpyAsync and
        cudaStreamSynchronize.
    """
    copies = host_copies(trace).filter(
        (pl.col("direction") == "DtoH")
        & pl.col("host_kind").is_in(("pinned", "unknown"))
        & pl.col("issue_ns").is_not_null()
        & (pl.col("call_kind") != "sync memcpy")
        & in_scope(trace)
    )
    if not copies.height:
        return []
    key = ["pid", "correlation_id", "start_ns"]
    copies = copies.join(unwaited(trace), on=key, how="semi", maintain_order="left")
    if not copies.height:
        return []
    if unable := cut_off(trace) or memory_unknown(copies):
        return unable
    copies = copies.with_columns(sites(trace, copies))
    return [
        _finding(trace, here, site) for (_, site), here in groups(copies, "pid", "site")
    ]


def _finding(trace: Trace, copies: pl.DataFrame, site: object) -> Finding:
    ops = trace.gpu_ops.join(
        copies, on=["pid", "correlation_id", "start_ns"], how="semi"
    )
    calls = calls_behind(trace, copies)
    return Finding(
        message=f"no later call waits for {copies.height} asynchronous "
        f"cop{'y' if copies.height == 1 else 'ies'} to page-locked memory "
        f"({size_words(int(copies['size_bytes'].sum()))}): the host can't know when "
        "the data is there",
        severity=Severity.ERROR,
        # Calls that aren't recorded by default may tell the program.
        confidence=Confidence.MEDIUM if trace.capture.all_apis else Confidence.LOW,
        cost=Cost(Claim.NONE, None, None, "a possible race costs no time"),
        where=locate(trace, calls=calls, ops=ops),
        occurrences=copies.height,
        evidence=tuple(
            Evidence(
                row["start_ns"],
                row["end_ns"],
                f"DtoH copy of {size_words(row['size_bytes'])} on stream "
                f"{row['stream_id']}, never waited for",
                row["correlation_id"],
            )
            for row in copies.tail(5).iter_rows(named=True)
        ),
        fix="wait with cudaStreamSynchronize, or with cudaEventSynchronize on an event "
        "recorded after the copy, before the host reads the buffer",
        identity=("DtoH", str(site or "")),
    )

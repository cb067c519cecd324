"""Rule launch-blocking."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.blocking import (
    VARIABLE,
    launches_block,
    launches_with_kernels,
    said_by_environment,
)
from streamlint.changes import Change
from streamlint.copies import RETURN_NS
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding
from streamlint.intervals import union
from streamlint.replay import replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.steady import Region, column, regions
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

LAUNCH_NS = 5_600
"""A launch call that doesn't wait takes this long under nsys (H200)."""

_ISSUES = ("kernel launch", "graph launch", "async memcpy", "async memset")


@rule(needs=("kernels", "runtime_calls"))
def launch_blocking(trace: Trace) -> Outcome:
    """Every launch waits for its kernel: CUDA_LAUNCH_BLOCKING is on.

    What it does
        Finds processes in which launch calls return only when their kernel is done.
    Why it costs time
        CUDA_LAUNCH_BLOCKING=1 is for debugging. The host issues nothing while a
        kernel runs, so the GPU idles after each one and streams never overlap. All
        that other rules could say about streams and waits has this cause, and they
        stay silent.
    Evidence
        Nineteen in twenty launches return after the end of their kernel. With
        CUDA_LAUNCH_BLOCKING in the recorded environment all kernels count, at least
        three; without it (a program may set it itself) those of 20 us or more, at
        least 20. The cost is a replay of the run in which launches take 5.6 us and
        asynchronous copies and memsets 4 us, as they do when they don't wait.
    Exemptions
        The variable alone, when the launches show that it has no effect; kernels of
        graphs; other synchronizations, which are calls of their own.
    Fix
        Remove CUDA_LAUNCH_BLOCKING from the environment, scripts and code. Code that
        worked only because launches waited may then race: look for results that are
        read without a wait.
    References
        CUDA C++ Programming Guide, "Environment variables" and "Concurrent execution
        between host and device".
    """
    findings: list[Finding] = []
    for pid, region in regions(trace).items():
        if launches_block(trace, pid):
            launches = launches_with_kernels(trace, pid).filter("blocked")
            judged = launches.filter(region.holds())
            findings.append(
                _finding(trace, region, judged if len(judged) else launches)
            )
    return findings


def _finding(trace: Trace, region: Region, launches: pl.DataFrame) -> Finding:
    said = said_by_environment(trace)
    blocked = union(column(launches, "issue_ns"), column(launches, "issue_end_ns"))
    change = replayed(_change, trace, region)
    cost = _cost(trace, region, change, blocked.total_ns)
    longest = launches.sort(
        pl.col("issue_end_ns") - pl.col("issue_ns"),
        descending=True,
        maintain_order=True,
    ).head(5)
    cause = f"{VARIABLE} is set" if said else f"as {VARIABLE} makes them"
    return Finding(
        message=f"{launches.height} launches return only when their kernel is done "
        f"({cause}): they keep the host for {blocked.total_ns / 1e6:.2f} ms",
        severity=severity_of(cost),
        confidence=Confidence.HIGH if said else Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=calls_behind(trace, launches), ops=launches),
        occurrences=launches.height,
        evidence=tuple(
            Evidence(
                row["issue_ns"],
                row["issue_end_ns"],
                f"{row['call']} waits for {row['name']}",
                row["correlation_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix=f"remove {VARIABLE} from the environment, scripts and code; then look for "
        "results that are read without a wait, or they may race",
        identity=("launch blocking",),
        change=change,
    )


def _change(trace: Trace, region: Region) -> Change:
    """Calls that issue work return at once."""
    replay = replay_of(trace)
    own = trace.launches.filter(
        (pl.col("pid") == region.pid) & pl.col("kind").is_in(_ISSUES)
    )
    launching = pl.col("kind").is_in(("kernel launch", "graph launch"))
    calls = replay.calls_of(own)
    launches = np.isin(calls, replay.calls_of(own.filter(launching)))
    return Change(
        call_duration=(calls, np.where(launches, LAUNCH_NS, RETURN_NS)),
    )


def _cost(trace: Trace, region: Region, change: Change | None, blocked: int) -> Cost:
    return price_change(
        trace,
        region,
        change,
        Claim.WHAT_IF,
        "launches take 5.6 us, asynchronous copies and memsets 4 us",
        direct=price(
            Claim.DIRECT,
            min(blocked, region.duration_ns),
            region,
            "host time in launches that returned after the end of their kernel",
        ),
    )

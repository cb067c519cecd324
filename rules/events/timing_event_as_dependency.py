"""Rule timing-event-as-dependency."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.blocking import concurrent_regions
from streamlint.changes import Change
from streamlint.completeness import FIRST_ID, unrecorded_calls
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Evidence, Finding, Severity
from streamlint.replay import replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, groups, of_process
from streamlint.trace.model import Trace
from streamlint.where import locate, sites

MIN_RECORDS = Threshold(
    "min-records",
    50,
    "records",
    "Fewer records cost less than the 50 us that a finding is worth.",
)
RECORD_NS = 1_000
"""What keeping time adds to an event's record on the host, unrecorded (H200).

0.7 to 0.9 us in rows of records and where launches are the limit, 1.3 to 1.4 us between
kernels (docs/measurements.md).
"""


@rule(needs=("runtime_calls", "event_records"))
def timing_event_as_dependency(trace: Trace) -> Outcome:
    """Events that only order streams keep time, which makes each record dearer.

    What it does
        Finds events created with cudaEventCreate that are recorded at least fifty
        times and that only cudaStreamWaitEvent ever waits for.
    Why it costs time
        An event keeps time unless it is created with cudaEventDisableTiming. On an
        H200 a record of one that does costs the host about 1 us more, and the kernel
        that waits for it in another stream starts 2 us later.
    Evidence
        Events get their ids in the order of their creation until one is destroyed;
        later ones are left out. The cost is 1 us a record in the judged region,
        spent on the host. Where the replay shows that the host was not the limit,
        it delayed nothing and the finding is for information. The 2 us that each
        hand-over takes longer on the GPU, where that is the limit, are not counted.
    Exemptions
        Events that the host waits for or queries, events created with flags (which
        the trace doesn't show), processes that were not recorded from their start.
        Reading a time leaves no row by default; with unrecorded calls in the trace
        the confidence is low.
    Fix
        Create these events with cudaEventCreateWithFlags and cudaEventDisableTiming.
    References
        CUDA Runtime API, cudaEventCreateWithFlags: events without timing "provide
        the best performance when used with cudaStreamWaitEvent".
    """
    findings: list[Finding] = []
    calls = trace.runtime_calls
    plain = (pl.col("kind") == "event create") & (pl.col("name") == "cudaEventCreate")
    few = trace.event_waits.height < trace.limit(MIN_RECORDS)
    if not calls.filter(plain).height or few:
        return findings
    for pid, region in concurrent_regions(trace).items():
        ids = _ordering_events(trace, pid)
        records = trace.event_records.filter(
            region.holds() & pl.col("event_id").is_in(ids.implode())
        )
        made = calls.join(records, on=["pid", "correlation_id"], how="semi")
        made = made.filter(pl.col("kind") == "event record", ~pl.col("nested"))
        made = made.with_columns(sites(trace, made))
        for (site,), here in groups(made, "site"):
            if here.height >= trace.limit(MIN_RECORDS):
                findings.append(_finding(trace, region, here, records, site))
    return findings


def _ordering_events(trace: Trace, pid: int) -> pl.Series:
    """Ids of events that keep time and that only streams wait for."""
    none = pl.Series("event_id", [], dtype=pl.Int64)
    calls = trace.runtime_calls.filter(
        (pl.col("pid") == pid)
        & ~pl.col("nested")
        & (pl.col("return_value").fill_null(0) == 0)
    ).sort("start_ns")
    records = of_process(trace.event_records, pid)
    first = calls["correlation_id"].min()
    if not isinstance(first, int) or first > FIRST_ID:
        return none
    if records["context_id"].n_unique() > 1:
        return none
    created = calls.filter(
        pl.col("kind").is_in(("event create", "event destroy"))
    ).with_columns((pl.col("kind") == "event destroy").cum_max().alias("reused"))
    created = created.filter(~pl.col("reused")).with_row_index("event_id", offset=1)
    timing = created.filter(pl.col("name") == "cudaEventCreate")["event_id"]
    waited = of_process(trace.event_waits, pid)["event_id"]
    by_host = [
        of_process(frame, pid)["event_id"]
        for frame in (trace.synchronizations, trace.queries)
    ]
    ordering = waited.drop_nulls().unique()
    ordering = ordering.filter(ordering.is_in(timing.cast(pl.Int64).implode()))
    return ordering.filter(~ordering.is_in(pl.concat(by_host).implode()))


def _finding(
    trace: Trace,
    region: Region,
    calls: pl.DataFrame,
    records: pl.DataFrame,
    site: object,
) -> Finding:
    events = records.join(calls, on="correlation_id", how="semi")["event_id"].n_unique()
    change = replayed(_change, trace, calls)
    cost = price(
        Claim.DIRECT,
        RECORD_NS * calls.height,
        region,
        "1 us of host time a record (0.7 to 1.4 us on an H200, unrecorded)",
    )
    delayed = price_change(
        trace, region, change, Claim.WHAT_IF, "cheaper records", direct=cost
    )
    # Host time that nothing waited for costs the run nothing.
    delays = severity_of(delayed) is not Severity.INFO
    unsure = unrecorded_calls(trace) > 0
    return Finding(
        message=f"{calls.height} records of {events} event"
        f"{'s' if events > 1 else ''} that keep{'' if events > 1 else 's'} time, "
        "though only other streams wait for them",
        severity=severity_of(cost) if delays else Severity.INFO,
        confidence=Confidence.LOW if unsure else Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=calls),
        occurrences=calls.height,
        evidence=tuple(
            Evidence(start, end, f"{name} of an event that keeps time", correlation_id)
            for start, end, name, correlation_id in calls.head(5)
            .select("start_ns", "end_ns", "name", "correlation_id")
            .iter_rows()
        ),
        fix="create events that only order streams with cudaEventCreateWithFlags and "
        "cudaEventDisableTiming; cudaEventElapsedTime then fails for them",
        identity=("timing event", str(site or "")),
        change=change,
    )


def _change(trace: Trace, calls: pl.DataFrame) -> Change:
    replay = replay_of(trace)
    index = replay.calls_of(calls)
    shorter = (replay.graph.call_duration[index] - RECORD_NS).clip(0)
    return Change(call_duration=(index, shorter.astype(np.int64)))

"""Rule capture-not-evaluable."""

from __future__ import annotations

import polars as pl

from streamlint.completeness import Defect, defects, no_gpu_work
from streamlint.findings import Claim, Cost, Evidence, Finding, Severity, Where
from streamlint.rule import Outcome, rule
from streamlint.trace.model import Trace

_NO_COST = Cost(Claim.NONE, None, None, "a defect of the recording, not of the program")


@rule(judges_capture=True)
def capture_not_evaluable(trace: Trace) -> Outcome:
    """The recording lacks rows or distorts times that other rules judge by.

    What it does
        Lists what is wrong with the recording itself: calls, launches or GPU work
        without the rows that belong to them, losses that nsys reported, a part of
        the program only, and options that make launches look dear. Where no GPU
        work was recorded at all, no rule can be judged, and this one says why.
    Why it costs time
        It costs no time in the program. It costs trust: a rule that finds nothing
        in half a recording has not shown that there is nothing. So where 1 % of the
        rows that a rule needs may be missing, its findings are less certain; from
        10 % on, finding nothing counts as not assessed; from half on, all does.
    Evidence
        Counts of rows that lack their partner, holes in the correlation ids, and
        the messages of the profiler, which are known by their first words and
        never quoted. Factors of tracing come from one program traced and untraced
        on an H200.
    Exemptions
        The default settings of nsys, launches recorded into a graph by stream
        capture, losses of fewer than 3 rows or 1 % of them, the start-up of the
        runtime.
    Fix
        Record again with the option that each finding names.
    References
        Nsight Systems User Guide, "CLI Profile Command Switch Options" and
        "Troubleshooting".
    """
    unable = no_gpu_work(trace)
    if unable is not None:
        return unable
    return [_finding(trace, defect) for defect in defects(trace)]


def _finding(trace: Trace, defect: Defect) -> Finding:
    return Finding(
        message=defect.words,
        severity=Severity.INFO,
        confidence=defect.confidence,
        cost=_NO_COST,
        where=_where(trace),
        occurrences=defect.count,
        evidence=defect.evidence or (_recorded(trace),),
        fix=defect.recapture,
        identity=(defect.kind,),
    )


def _where(trace: Trace) -> Where:
    """The process, where the recording has only one."""
    if trace.processes.height != 1:
        return Where()
    pid, name = trace.processes.select("pid", "name").row(0)
    return Where(pid=pid, process=name)


def _recorded(trace: Trace) -> Evidence:
    """All of the GPU work, for what has no place of its own."""
    start, end = trace.gpu_ops.select(
        pl.col("start_ns").min(), pl.col("end_ns").max()
    ).row(0)
    return Evidence(start, end, "the GPU work that was recorded")

"""Text about a capture: what it holds, and what can be judged from it."""

from __future__ import annotations

from collections import Counter

import polars as pl

from streamlint.completeness import defects
from streamlint.engine import Report
from streamlint.escape import printable
from streamlint.intervals import union
from streamlint.reporters.text import Page, duration, not_assessed
from streamlint.steady import column
from streamlint.trace.model import Trace

_MAX_FACT = 4_000
"""Characters; the tables of the largest exports take 3,000."""


def render(trace: Trace, report: Report, width: int) -> str:
    """Everything that `streamlint info` shows."""
    page = Page(width, label_width=11)
    page.line(printable(trace.path.name), "bold")
    for label, value in _facts(trace, report):
        page.field(label, value)
    found = defects(trace)
    if found:
        page.line()
        page.line("what the recording lacks")
        for defect in found:
            page.field("lacks", defect.words)
            if defect.recapture:
                page.field("how", defect.recapture)
    judged = [
        j.rule.name
        for j in report.judgements
        if j.not_assessed is None and j.crashed is None and not j.rule.judges_capture
    ]
    page.line()
    page.line(f"can be judged ({len(judged)})", "green")
    if judged:
        page.field("rules", ", ".join(judged))
    if report.not_assessed:
        not_assessed(page, report.not_assessed)
    return page.text(color=False)


def _facts(trace: Trace, report: Report) -> list[tuple[str, str]]:
    facts, capture = report.overview, trace.capture
    gpus = Counter(facts.gpus)
    working = {*trace.gpu_ops["pid"].unique()}
    rows = [
        ("exporter", f"nsys {capture.exporter or 'unknown (before 2022)'}"),
        ("schema", capture.schema or "not stated"),
        (
            "GPU",
            ", ".join(f"{name} x{n}" if n > 1 else name for name, n in gpus.items()),
        ),
        (
            "processes",
            ", ".join(
                f"{name or '?'} ({pid}{'' if pid in working else ', no GPU work'})"
                for pid, name in facts.processes
            ),
        ),
        ("API calls", f"{facts.runtime_calls}, {_recorded_apis(capture.all_apis)}"),
        (
            "GPU work",
            f"{facts.kernels} kernels, {facts.memcpys} copies, {facts.memsets} memsets "
            f"and {trace.graph_traces.height} whole graphs (graph tracing: "
            f"{capture.graph_mode or 'not stated'})",
        ),
    ]
    if facts.span_ns is not None:
        rows.append(
            ("GPU span", f"{duration(facts.span_ns)}; {_busy(trace, facts.span_ns)}")
        )
    for pid, _, _, iterations, nvtx, lasting in facts.judged:
        how = (
            f"{iterations} NVTX ranges {printable(nvtx or '', 40)} after the first"
            if iterations
            else "the span of the GPU work, less a long start-up"
        )
        rows.append(("judged", f"pid {pid}: {duration(lasting)} ({how})"))
    if report.model is not None:
        rows.append(
            ("replay", f"off by {100 * report.model.error:+.1f} % of the GPU span")
        )
    stacks = {True: "recorded", False: "not recorded", None: "not stated"}
    rows.append(
        (
            "call stacks",
            f"native {stacks[capture.native_backtraces]}, "
            f"Python {stacks[capture.python_backtraces]}",
        )
    )
    rows.append(("memory use", stacks[capture.memory_usage]))
    rows.append(("forks", _forked(capture.forks_traced)))
    environment = ", ".join(f"{k}={v}" for k, v in capture.environment.items())
    rows.append(("environment", environment or "none of the variables that rules read"))
    if facts.invalid_rows:
        dropped = ", ".join(f"{n} of {name}" for name, n in facts.invalid_rows.items())
        rows.append(("dropped", f"rows without usable times: {dropped}"))
    warnings = trace.diagnostics.filter(pl.col("severity").is_in(("warning", "error")))
    if warnings.height:
        rows.append(("warnings", f"{warnings.height} by nsys, which it shows itself"))
    rows.append(("tables", ", ".join(_tables(trace))))
    return [(label, printable(value, _MAX_FACT)) for label, value in rows if value]


def _recorded_apis(all_apis: bool | None) -> str:
    words = {True: "all recorded", False: "some kinds not recorded (nsys default)"}
    return words[all_apis] if all_apis is not None else "not stated which are recorded"


def _forked(traced: bool | None) -> str:
    """Whether workers that are forked and run no other program are in the trace."""
    words = {True: "forked workers recorded", False: "forked workers not recorded"}
    return words[traced] if traced is not None else "not stated if workers are recorded"


def _busy(trace: Trace, span_ns: int) -> str:
    """Shares of the span with each engine busy on any device, as unions."""
    parts = []
    for engine in ("compute", "HtoD", "DtoH", "DtoD"):
        ops = trace.gpu_ops.filter(engine=engine)
        busy = union(column(ops, "start_ns"), column(ops, "end_ns")).total_ns
        if ops.height:
            parts.append(f"{engine} {100 * busy / max(1, span_ns):.1f} %")
    return "busy: " + ", ".join(parts)


def _tables(trace: Trace) -> list[str]:
    return [name for name in trace.table_names if not name.startswith("ENUM_")]

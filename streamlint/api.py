"""The Python interface: `streamlint.open`, `streamlint.lint` and what they return."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from streamlint.baseline import read as read_baseline
from streamlint.config import Config, load
from streamlint.engine import Report
from streamlint.engine import lint as lint_trace
from streamlint.errors import (
    BaselineError,
    ConfigError,
    RuleError,
    StreamlintError,
    TraceError,
    UsageError,
)
from streamlint.escape import printable
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Crashed,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
    Where,
)
from streamlint.overview import Overview
from streamlint.rule import Rule
from streamlint.settings import Scope
from streamlint.suppression import Suppressed
from streamlint.trace import open_trace
from streamlint.trace.capture import Capture
from streamlint.trace.model import Trace

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

__all__ = [
    "BaselineError",
    "Claim",
    "Confidence",
    "ConfigError",
    "Cost",
    "Crashed",
    "Evidence",
    "Finding",
    "NotAssessed",
    "Result",
    "Rule",
    "RuleError",
    "Scope",
    "Severity",
    "StreamlintError",
    "Suppressed",
    "Trace",
    "TraceError",
    "UsageError",
    "Where",
    "lint",
    "open",
]

_SHOWN = 20
"""Findings that a notebook shows."""


class Result:
    """What `streamlint.lint` says about one trace; the same as `streamlint lint`.

    All but `figure` work after the trace is closed.
    """

    def __init__(self, trace: Trace, report: Report) -> None:
        """Wrap what the engine reported about ``trace``."""
        self._trace = trace
        self._report = report

    @property
    def path(self) -> Path:
        """The trace, as it was named."""
        return self._report.path

    @property
    def findings(self) -> list[tuple[Rule, Finding]]:
        """Each with the rule that found it, the most severe and dearest first."""
        return self._report.findings

    @property
    def new(self) -> list[tuple[Rule, Finding]]:
        """The findings that the baseline doesn't know as they are; all without one."""
        return self._report.fresh

    @property
    def suppressed(self) -> list[tuple[Rule, Suppressed]]:
        """Findings that the configuration or the program allows, and why."""
        return self._report.suppressed

    @property
    def not_assessed(self) -> list[tuple[Rule, NotAssessed]]:
        """Rules that could not tell, why, and what to record. Not the same as clean."""
        return self._report.not_assessed

    @property
    def crashed(self) -> list[tuple[Rule, Crashed]]:
        """Rules that failed through a bug of theirs."""
        return self._report.crashed

    @property
    def overview(self) -> Overview:
        """The trace in a few numbers; times in ns."""
        return self._report.overview

    @property
    def capture(self) -> Capture:
        """What was recorded and by which nsys."""
        return self._report.capture

    def exit_code(self, fail_on: Severity | str = Severity.LOW) -> int:
        """0 clean, 1 findings as severe as ``fail_on``, 2 a crash, 3 none assessed.

        Findings that a baseline knows don't count. Raises `UsageError` for a text
        that is no severity.
        """
        try:
            return self._report.exit_code(Severity(fail_on))
        except ValueError as error:
            names = ", ".join(severity.value for severity in Severity)
            raise UsageError(
                f"fail_on can't be {fail_on}", hint=f"it is one of {names}"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """The document of `streamlint lint --format json`."""
        from streamlint.reporters.json import document

        return document([self._report])

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_polars(self) -> pl.DataFrame:
        """One row a finding.

        rule, family, severity, confidence, message, claim, cost_ns, cost_share (0 to
        1), occurrences, pid, process, device, streams, kernels, nvtx (lists), start_ns
        and end_ns of the strongest evidence, fix, fingerprint.
        """
        rows = [
            (
                *(rule.name, rule.family, finding.severity.value),
                *(finding.confidence.value, finding.message),
                *(finding.cost.claim.value, finding.cost.ns, finding.cost.share),
                *(finding.occurrences, finding.where.pid, finding.where.process),
                *(finding.where.device, list(finding.where.streams)),
                *(list(finding.where.kernels), list(finding.where.nvtx)),
                *(finding.evidence[0].start_ns, finding.evidence[0].end_ns),
                *(finding.fix, finding.fingerprint(rule.name)),
            )
            for rule, finding in self.findings
        ]
        return pl.DataFrame(rows, schema=_COLUMNS, orient="row")

    def to_pandas(self) -> pd.DataFrame:
        """`to_polars` for pandas."""
        return self.to_polars().to_pandas()

    def figure(self, start_ns: int | None = None, end_ns: int | None = None) -> Figure:
        """The timeline as a plotly figure, the evidence of the findings shaded.

        From ``start_ns`` to ``end_ns`` (as in the export), else all of it; where bars
        are too many to tell apart, zoom with these. Raises `TraceError` if the trace
        is closed.
        """
        from streamlint.reporters.figure import figure

        return figure(self._trace, self._report, start_ns, end_ns)

    def __repr__(self) -> str:
        from streamlint.reporters.text import verdict

        return f"<streamlint.Result {self.path.name}: {verdict(self._report)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: a line for the trace, a table, and the verdict."""
        from streamlint.reporters.text import by_reason, cost_words, head, verdict

        rows = [
            (
                finding.severity.value,
                rule.name,
                cost_words(finding.cost, finding),
                printable(finding.message),
                finding.fix,
            )
            for rule, finding in self.findings
        ]
        lines = [f"<p><b>{html.escape(head(self._report))}</b></p>"]
        if rows:
            cells = "".join(f"<th>{name}</th>" for name in _HEADINGS)
            lines.append(f"<table><thead><tr>{cells}</tr></thead><tbody>")
            for row in rows[:_SHOWN]:
                cells = "".join(
                    f'<td style="text-align:left">{html.escape(text)}</td>'
                    for text in row
                )
                lines.append(f"<tr>{cells}</tr>")
            lines.append("</tbody></table>")
        if len(rows) > _SHOWN:
            lines.append(
                f"<p>and {len(rows) - _SHOWN} more in <code>findings</code></p>"
            )
        lines.append(f"<p>{html.escape(verdict(self._report))}</p>")
        for why, names in by_reason(self.not_assessed).items():
            text = f"{', '.join(names)}: {printable(why.reason)}"
            text += f" ({printable(why.recapture)})"
            lines.append(f"<details><summary>not assessed: {len(names)}</summary>")
            lines.append(f"<p>{html.escape(text)}</p></details>")
        return "\n".join(lines)


_HEADINGS = ("severity", "rule", "cost", "what", "fix")
_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(
        ("rule", "family", "severity", "confidence", "message", "claim"), pl.String
    ),
    **{"cost_ns": pl.Int64, "cost_share": pl.Float64},
    **{"occurrences": pl.Int64, "pid": pl.Int64, "process": pl.String},
    **{"device": pl.Int64, "streams": pl.List(pl.Int64)},
    **{"kernels": pl.List(pl.String), "nvtx": pl.List(pl.String)},
    **{"start_ns": pl.Int64, "end_ns": pl.Int64},
    **{"fix": pl.String, "fingerprint": pl.String},
}


def open(path: str | os.PathLike[str]) -> Trace:
    """Open a `.sqlite` export of nsys, or a report (`.nsys-rep`), which is exported.

    Use it as a context manager, or close it. Raises `TraceError` for anything else.
    """
    return open_trace(Path(path))


def lint(
    trace: Trace,
    *,
    select: str | Iterable[str] = (),
    ignore: str | Iterable[str] = (),
    config: str | os.PathLike[str] | None = None,
    baseline: str | os.PathLike[str] | None = None,
    baseline_tolerance: float | None = None,
    scope: Scope | None = None,
    replay: bool | None = None,
    rules_dir: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] = (),
) -> Result:
    """Judge ``trace`` as `streamlint lint` does.

    ``select`` and ``ignore`` name rules and families; with ``select``, those of the
    configuration don't count. ``config`` names a streamlint.toml or pyproject.toml:
    unlike the command line, nothing is read that isn't named. ``baseline`` is a file
    of known findings, ``baseline_tolerance`` how much dearer they may be (0.1: 10 %).
    ``scope`` is the part of the trace to judge, instead of the configuration's.
    ``replay=False`` prices findings by what the trace shows directly, in less time.
    ``rules_dir`` names folders with more rules, whose code is run. Rules that can't be
    loaded are left out.

    Raises `UsageError` for a name that is no rule or family, `ConfigError` and
    `BaselineError` for files that can't be read as such, `RuleError` for a named rule
    that can't be loaded, and `TraceError` where the trace can't be read further.
    """
    folders = [rules_dir] if isinstance(rules_dir, str | os.PathLike) else rules_dir
    paths = [Path(folder).resolve() for folder in folders]
    if config is None:
        held = Config(rules_dir=tuple(paths))
    else:
        held = load(Path(), Path(config), paths)
    tolerance = baseline_tolerance
    if tolerance is None:
        tolerance = held.baseline_tolerance
    known = baseline and read_baseline(Path(baseline), tolerance)
    settings = held.settings
    if scope is not None:
        settings = replace(settings, scope=scope)
    if replay is not None:
        settings = replace(settings, replay=replay)
    report = lint_trace(
        trace,
        held.chosen(_names(select), _names(ignore)),
        with_model=True,
        settings=settings,
        policy=held.policy,
        known=held.catalog.names,
    )
    return Result(trace, report._replace(baseline=known or None))


def _names(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)

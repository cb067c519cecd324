"""Workflow commands that GitHub shows as annotations of a run and of its changes.

GitHub shows ten annotations of a level a step, so the costliest come first and those
beyond are plain lines of the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from streamlint.engine import Report
from streamlint.escape import printable, without_home
from streamlint.findings import Finding, Severity
from streamlint.reporters import Failure, View
from streamlint.reporters.text import cost_words, place_words, totals
from streamlint.rule import Rule

MAX_PER_LEVEL = 10
_LEVELS = {
    Severity.ERROR: "error",
    Severity.HIGH: "error",
    Severity.MEDIUM: "warning",
    Severity.LOW: "warning",
    Severity.INFO: "notice",
}


def render(reports: Sequence[Report], failures: Sequence[Failure], view: View) -> str:
    """One line an annotation, and the total."""
    left = dict.fromkeys(("error", "warning", "notice"), MAX_PER_LEVEL)
    lines: list[str] = []
    for level, properties, text in _annotations(reports, failures, view):
        left[level] -= 1
        if left[level] >= 0:
            listed = ",".join(f"{k}={_property(v)}" for k, v in properties.items())
            lines.append(f"::{level} {listed}::{_data(text)}")
        else:
            lines.append(_plain(f"{level}: {properties['title']}: {text}"))
    lines.append(_plain(f"streamlint: {totals(reports)}"))
    return "".join(f"{line}\n" for line in lines)


def _annotations(
    reports: Sequence[Report], failures: Sequence[Failure], view: View
) -> Iterator[tuple[str, dict[str, str], str]]:
    """Level, properties and text; what keeps streamlint from judging comes first."""
    for path, error in failures:
        title = "streamlint: trace not read"
        text = f"{path}: {error.message}; {error.hint}"
        yield "error", {"title": title}, without_home(text)
    for report in reports:
        for rule, crash in report.crashed:
            title = f"streamlint: {rule.name} crashed"
            yield "error", {"title": title}, f"{report.path.name}: {crash.summary}"
    found = [(report, *pair) for report in reports for pair in report.fresh]
    found.sort(key=lambda f: (f[2].severity.rank, -(f[2].cost.ns or 0)))
    for report, rule, finding in found:
        yield _finding(report, rule, finding, view)
    for report in reports:
        if report.not_assessed:
            names = ", ".join(rule.name for rule, _ in report.not_assessed)
            reasons = dict.fromkeys(why.reason for _, why in report.not_assessed)
            yield (
                "notice",
                {"title": f"streamlint: {len(report.not_assessed)} not assessed"},
                f"{report.path.name}: {names} ({'; '.join(reasons)})",
            )


def _finding(
    report: Report, rule: Rule, finding: Finding, view: View
) -> tuple[str, dict[str, str], str]:
    place = view.sources.place(finding)
    properties = {} if place is None else {"file": place.path, "line": f"{place.line}"}
    properties["title"] = f"streamlint: {rule.name} ({finding.severity.value})"
    text = "\n".join(
        [
            finding.message,
            f"cost: {cost_words(finding.cost, finding)}",
            f"where: {report.path.name}; {place_words(finding)}",
            f"fix: {finding.fix}",
        ]
    )
    return _LEVELS[finding.severity], properties, text


def _data(text: str) -> str:
    """Text of a command; its lines stay lines."""
    shown = "\n".join(printable(line) for line in text.split("\n"))
    return shown.replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _plain(text: str) -> str:
    """A line of the log that is no command: GitHub also reads "##[" inside a line."""
    line = printable(text.replace("\n", "; "))
    return line.replace("##[", "## [").replace("::", ": :")

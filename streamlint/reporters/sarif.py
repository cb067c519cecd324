"""SARIF 2.1.0, for code scanning on GitHub and for other viewers of findings.

One run for all traces: GitHub takes one run of a tool and category. Its limits are
those of "SARIF support for code scanning" in GitHub's documentation; what they leave
no room for is the cheapest, and the run says how much that is.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from streamlint import __version__
from streamlint.baseline import Standing
from streamlint.docs import page
from streamlint.engine import Report
from streamlint.escape import printable, without_home
from streamlint.findings import Evidence, Finding, NotAssessed, Severity
from streamlint.reporters import Failure, View
from streamlint.reporters.places import Place, SourceTree
from streamlint.reporters.text import cost_words, place_words
from streamlint.rule import Rule, sections
from streamlint.suppression import Suppressed

MAX_RESULTS = 25_000
MAX_GZIP_BYTES = 10_000_000
MAX_LOCATIONS = 100
MAX_TAGS = 20
MAX_DESCRIPTION = 1_024
_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/"
    "sarif-schema-2.1.0.json"
)
_LEVELS = {
    Severity.ERROR: "error",
    Severity.HIGH: "error",
    Severity.MEDIUM: "warning",
    Severity.LOW: "warning",
    Severity.INFO: "note",
}
_STATES = {
    Standing.NEW: "new",
    Standing.GROWN: "updated",
    Standing.KNOWN: "unchanged",
}
_LINK_OR_PLACEHOLDER = re.compile(r"\[(?=[^\]]*\]\()|\{(?=\d+\})")
_MAX_TEXT = 4_000


def render(reports: Sequence[Report], failures: Sequence[Failure], view: View) -> str:
    """The whole document."""
    rules = _rules(reports)
    index = {rule.name: number for number, rule in enumerate(rules)}
    results, total = _results(reports, view)
    for result in results:
        result["ruleIndex"] = index[result["ruleId"]]
    notes = _notifications(reports, failures)
    broken = bool(failures) or any(report.crashed for report in reports)
    shown = len(results)
    while True:
        text = _document(rules, results[:shown], total - shown, notes, broken)
        if len(text) <= MAX_GZIP_BYTES or not shown:
            return text
        size = len(gzip.compress(text.encode(), mtime=0))
        if size <= MAX_GZIP_BYTES:
            return text
        shown = int(shown * 0.9 * MAX_GZIP_BYTES / size)


def _document(
    rules: Sequence[Rule],
    results: list[dict[str, Any]],
    left_out: int,
    notes: list[dict[str, Any]],
    broken: bool,
) -> str:
    if left_out:
        words = (
            f"{left_out} results are left out, those that cost least: GitHub takes "
            f"{MAX_RESULTS} results and {MAX_GZIP_BYTES // 1_000_000} MB"
        )
        notes = [*notes, _notification("results-left-out", "warning", words)]
    run = {
        "tool": {
            "driver": {
                "name": "streamlint",
                "version": __version__,
                "rules": [_rule(rule) for rule in rules],
            }
        },
        "invocations": [
            {"executionSuccessful": not broken, "toolExecutionNotifications": notes}
        ],
        "columnKind": "unicodeCodePoints",
        "results": results,
        "properties": {"leftOut": left_out},
    }
    document = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=1) + "\n"


def _rules(reports: Sequence[Report]) -> list[Rule]:
    found = {j.rule.name: j.rule for report in reports for j in report.judgements}
    return list(found.values())


def _rule(rule: Rule) -> dict[str, Any]:
    try:
        told = sections(rule)
        full = f"{told['What it does']} {told['Why it costs time']}"
        explained = {"text": rule.doc, "markdown": page(rule)}
    except ValueError:  # a rule that isn't documented like ours
        full = rule.doc or rule.name
        explained = {"text": full}
    return {
        "id": rule.name,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": _cut(rule.summary or full, MAX_DESCRIPTION)},
        "fullDescription": {"text": _cut(full, MAX_DESCRIPTION)},
        "help": explained,
        "defaultConfiguration": {"level": "warning"},
        "properties": {
            "tags": ["performance", "cuda", rule.family][:MAX_TAGS],
            "origin": printable(rule.origin),
        },
    }


def _results(reports: Sequence[Report], view: View) -> tuple[list[dict[str, Any]], int]:
    """At most `MAX_RESULTS` of all results, and how many these are.

    Findings of all traces, the costliest first, then those that are
    allowed, then what could not be told.
    """
    found = [(report, *pair) for report in reports for pair in report.findings]
    found.sort(key=lambda f: (f[2].severity.rank, -(f[2].cost.ns or 0)))
    allowed = [(report, *pair) for report in reports for pair in report.suppressed]
    untold = [(report, *pair) for report in reports for pair in report.not_assessed]
    results = [
        _finding(report, rule, finding, view.sources)
        for report, rule, finding in found[:MAX_RESULTS]
    ]
    results += [
        _suppressed(report, rule, one, view.sources)
        for report, rule, one in allowed[: MAX_RESULTS - len(results)]
    ]
    results += [
        _open(report, rule, why, view.sources)
        for report, rule, why in untold[: MAX_RESULTS - len(results)]
    ]
    return results, len(found) + len(allowed) + len(untold)


def _finding(
    report: Report, rule: Rule, finding: Finding, sources: SourceTree
) -> dict[str, Any]:
    places = sources.places(finding)[: MAX_LOCATIONS + 1]
    mark = finding.fingerprint(rule.name)
    where, cost = finding.where, finding.cost
    sentences = [
        finding.message,
        f"Cost: {cost_words(cost, finding)}",
        f"Where: {place_words(finding)}, in {report.path.name}",
        f"Fix: {finding.fix}",
    ]
    result: dict[str, Any] = {
        "ruleId": rule.name,
        "kind": "fail",
        "level": _LEVELS[finding.severity],
        "message": {"text": _message(". ".join(sentences) + ".")},
        "locations": [
            _line(places[0]) if places else _trace(report, sources),
        ],
        "relatedLocations": [
            {"id": number, **_line(place), "message": {"text": "also from here"}}
            for number, place in enumerate(places[1:], start=1)
        ],
        # GitHub tells alerts apart by the first, other viewers by any.
        "partialFingerprints": {
            "primaryLocationLineHash": mark,
            "streamlint/v1": mark,
        },
        "occurrenceCount": max(1, finding.occurrences),
        "properties": {
            "severity": finding.severity.value,
            "confidence": finding.confidence.value,
            "claim": cost.claim.value,
            "costNs": cost.ns,
            "costShare": cost.share,
            "costBasis": cost.basis,
            "costMethod": cost.method,
            "trace": report.path.name,
            "pid": where.pid,
            "device": where.device,
            "streams": list(where.streams),
            "kernels": [printable(name) for name in where.kernels],
            "nvtx": [printable(text) for text in where.nvtx],
            "evidence": [_evidence(item) for item in finding.evidence],
        },
    }
    if cost.share is not None:
        result["rank"] = round(min(100.0, 100 * cost.share), 4)
    standing = report.standing(rule, finding)
    if standing is not None:
        result["baselineState"] = _STATES[standing]
    return result


def _suppressed(
    report: Report, rule: Rule, allowed: Suppressed, sources: SourceTree
) -> dict[str, Any]:
    result = _finding(report, rule, allowed.finding, sources)
    result.pop("baselineState", None)  # a baseline has only what is reported
    in_source = allowed.origin.startswith("NVTX range")
    why = f"{allowed.reason} ({allowed.origin})"
    result["suppressions"] = [
        {
            "kind": "inSource" if in_source else "external",
            "status": "accepted",
            "justification": printable(without_home(why), _MAX_TEXT),
        }
    ]
    return result


def _open(
    report: Report, rule: Rule, why: NotAssessed, sources: SourceTree
) -> dict[str, Any]:
    words = f"Not assessed: {why.reason}. To assess it: {why.recapture}."
    return {
        "ruleId": rule.name,
        "kind": "open",
        "level": "none",
        "message": {"text": _message(words)},
        "locations": [_trace(report, sources)],
    }


def _line(place: Place) -> dict[str, Any]:
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": quote(place.path), "uriBaseId": "%SRCROOT%"},
            "region": {"startLine": place.line},
        },
        "logicalLocations": [
            {"name": printable(place.function, 255), "kind": "function"}
        ],
    }


def _trace(report: Report, sources: SourceTree) -> dict[str, Any]:
    uri = quote(os.fsencode(sources.trace(report.path)))
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": uri, "uriBaseId": "%SRCROOT%"},
            # A trace has no lines, but GitHub shows no result without one.
            "region": {"startLine": 1},
        }
    }


def _evidence(item: Evidence) -> dict[str, Any]:
    return {
        "startNs": item.start_ns,
        "endNs": item.end_ns,
        "what": printable(item.what),
        "correlationId": item.correlation_id,
    }


def _notifications(
    reports: Sequence[Report], failures: Sequence[Failure]
) -> list[dict[str, Any]]:
    notes = [
        {
            **_notification("rule-crashed", "error", crash.summary),
            "associatedRule": {"id": rule.name},
        }
        for report in reports
        for rule, crash in report.crashed
    ]
    notes += [
        _notification(
            "unreadable-trace", "error", without_home(f"{error.message}: {error.hint}")
        )
        for _, error in failures
    ]
    return notes


def _notification(name: str, level: str, text: str) -> dict[str, Any]:
    return {
        "descriptor": {"id": name},
        "level": level,
        "message": {"text": _message(text)},
    }


def _message(text: str) -> str:
    """Plain text, with what SARIF would read as a link or placeholder escaped."""
    return _LINK_OR_PLACEHOLDER.sub(
        lambda match: "\\[" if match[0] == "[" else "{{", printable(text, _MAX_TEXT)
    )


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"

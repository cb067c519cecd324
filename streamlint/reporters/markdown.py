"""Markdown for a comment on a pull request, as GitHub and GitLab show it.

The first line is a mark that only machines see: a bot finds its own comment by it
and writes over it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from streamlint.baseline import Standing
from streamlint.engine import Report
from streamlint.escape import printable, without_home
from streamlint.findings import Finding, Severity
from streamlint.reporters import Failure, View
from streamlint.reporters.text import (
    brief_cost,
    by_reason,
    cost_words,
    duration,
    head,
    known_words,
    place_words,
    totals,
    verdict,
)
from streamlint.rule import Rule

MARK = "<!-- streamlint -->"
MAX_CHARACTERS = 65_000
"""GitHub takes comments of 65,536; the workflow may add a line."""
_SPECIAL = re.compile(r"[\\`*_{}\[\]~|]")
_MAX_MESSAGE = 600


def render(reports: Sequence[Report], failures: Sequence[Failure], view: View) -> str:
    """One comment about all traces; the cheapest findings go if it gets too long."""
    lengths = (n for r in reports for n in (len(r.fresh), len(r.suppressed)))
    count = max(lengths, default=0)
    while True:
        text = _comment(reports, failures, view, count)
        if len(text) <= MAX_CHARACTERS or not count:
            break
        count //= 2
    if len(text) > MAX_CHARACTERS:
        rest = "\n\nToo long for a comment: see the text of the run.\n"
        return f"{MARK}\n### streamlint: {totals(reports)}{rest}"
    return text


def _comment(
    reports: Sequence[Report], failures: Sequence[Failure], view: View, count: int
) -> str:
    lines = [MARK, f"### streamlint: {totals(reports)}"]
    for path, error in failures:
        lines += [
            "",
            f"**Not read:** {escaped(without_home(f'{path}: {error.message}'))}",
        ]
        lines += [f"({escaped(without_home(error.hint))})"]
    for report in reports:
        lines += _trace(report, view, count)
    return "\n".join(lines) + "\n"


def _trace(report: Report, view: View, count: int) -> list[str]:
    lines = ["", f"**{escaped(head(report))}**", ""]
    fresh = report.fresh
    if fresh[:count]:
        lines += ["| | Rule | What | Costs | Where |", "|---|---|---|---|---|"]
        lines += [_row(report, *pair, view) for pair in fresh[:count]]
        lines += [""]
    if fresh[count:]:
        lines += [f"{len(fresh[count:])} more findings, which cost less.", ""]
    # As in the text: info costs too little to act on.
    explained = [p for p in fresh[:count] if p[1].severity is not Severity.INFO]
    if explained:
        lines += ["<details><summary>Costs, places and fixes</summary>", ""]
        for rule, finding in explained:
            lines += _details(rule, finding)
        lines += ["</details>", ""]
    if report.not_assessed:
        lines += [
            f"<details><summary>Not assessed ({len(report.not_assessed)})</summary>",
            "",
        ]
        for why, names in by_reason(report.not_assessed).items():
            lines += [f"- {', '.join(map(_code, names))}"]
            lines += [f"  - **Why:** {escaped(why.reason)}"]
            lines += [f"  - **How to record it:** {escaped(why.recapture)}", ""]
        lines += ["</details>", ""]
    if report.suppressed[:count]:
        count_of = len(report.suppressed)
        lines += [f"<details><summary>Suppressed ({count_of})</summary>", ""]
        for rule, allowed in report.suppressed[:count]:
            reason = f"{allowed.reason} ({allowed.origin})"
            lines += [f"- {_code(rule.name)}: {escaped(reason, _MAX_MESSAGE)}"]
        lines += ["", "</details>", ""]
    for rule, crash in report.crashed:
        lines += [f"**Crashed:** {_code(rule.name)}: {escaped(crash.summary)}", ""]
    known = known_words(report)
    if known:
        lines += [f"{escaped(known)}.", ""]
    return [*lines, f"{escaped(verdict(report))}."]


def _row(report: Report, rule: Rule, finding: Finding, view: View) -> str:
    grown = report.standing(rule, finding) is Standing.GROWN
    place = view.sources.place(finding)
    where = place_words(finding) if place is None else f"{place.path}:{place.line}"
    cells = [
        finding.severity.value + (", grown" if grown else ""),
        _code(rule.name),
        escaped(finding.message, _MAX_MESSAGE),
        escaped(_cost(finding)),
        escaped(where, _MAX_MESSAGE) if place is None else _code(where),
    ]
    return f"| {' | '.join(cells)} |"


def _cost(finding: Finding) -> str:
    cost = finding.cost
    if cost.ns is None or cost.share is None:
        return "not priced"
    return brief_cost(cost.claim, cost.ns, cost.share)


def _details(rule: Rule, finding: Finding) -> list[str]:
    first = finding.evidence[0]
    look = (
        f"at {first.start_ns / 1e9:.6f} s for {duration(first.end_ns - first.start_ns)}"
        f": {first.what}"
    )
    return [
        f"- {_code(rule.name)}: {escaped(finding.message, _MAX_MESSAGE)}",
        f"  - **Cost:** {escaped(cost_words(finding.cost, finding))}",
        f"  - **Where:** {escaped(place_words(finding), _MAX_MESSAGE)}",
        f"  - **Look:** {escaped(look, _MAX_MESSAGE)}",
        f"  - **Fix:** {escaped(finding.fix)}",
        "",
    ]


def escaped(text: str, limit: int | None = None) -> str:
    """Text that shows as it is: no markup, mention, reference, emoji or table cell."""
    plain = html.escape(printable(text, limit), quote=False)
    plain = _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", plain)
    # These are looked for after entities are resolved; a comment keeps them apart.
    plain = re.sub(r"@(?=\w)|(?<!&)#(?=\d)|://", _apart, plain)
    return re.sub(r":(?=[\w+-]+:)", ":<!-- -->", plain)


def _apart(match: re.Match[str]) -> str:
    return f"{match[0][:1]}<!-- -->{match[0][1:]}"


def _code(text: str) -> str:
    return f"<code>{escaped(text)}</code>"

"""JUnit XML: a trace is a test suite, a rule is a test of it.

The form is that of Jenkins' `junit-10.xsd`, which GitLab and others read as well.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from streamlint.engine import Judgement, Report
from streamlint.escape import printable, without_home
from streamlint.findings import Finding
from streamlint.reporters import Failure, View
from streamlint.reporters.text import cost_words, place_words

_NOT_XML = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(reports: Sequence[Report], failures: Sequence[Failure], view: View) -> str:
    """The whole document."""
    root = ET.Element("testsuites", name="streamlint")
    for report in reports:
        _suite(root, report, view)
    for path, error in failures:
        suite = ET.SubElement(root, "testsuite", name=_text(without_home(path)))
        case = ET.SubElement(suite, "testcase", classname="streamlint", name="read")
        message, hint = without_home(error.message), without_home(error.hint)
        _outcome(case, "error", "unreadable trace", message, hint)
        _count(suite)
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: ET.Element, report: Report, view: View) -> None:
    name = _text(view.sources.trace(report.path))
    suite = ET.SubElement(root, "testsuite", name=name)
    fresh: dict[str, list[Finding]] = {}
    for rule, finding in report.fresh:
        fresh.setdefault(rule.name, []).append(finding)
    for judgement in report.judgements:
        found = fresh.get(judgement.rule.name, [])
        _case(suite, judgement, found, view)
    _count(suite)


def _case(
    suite: ET.Element, judgement: Judgement, fresh: list[Finding], view: View
) -> None:
    rule = judgement.rule
    case = ET.SubElement(
        suite,
        "testcase",
        classname=f"streamlint.{rule.family}",
        name=rule.name,
    )
    failing = [f for f in fresh if f.severity.at_least(view.fail_on)]
    if judgement.crashed is not None:
        _outcome(case, "error", "crashed", judgement.crashed.summary, "")
    elif judgement.not_assessed is not None:
        why = judgement.not_assessed
        _outcome(case, "skipped", "not assessed", why.reason, why.recapture)
    elif failing:
        worst = failing[0]
        message = worst.message
        if len(failing) > 1:
            message += f" (and {len(failing) - 1} more)"
        body = "\n\n".join(_words(finding, view) for finding in failing)
        _outcome(case, "failure", worst.severity.value, message, body)
    notes = [_words(finding, view) for finding in fresh if finding not in failing]
    notes += [
        f"suppressed: {allowed.reason} ({allowed.origin}): {allowed.finding.message}"
        for allowed in judgement.suppressed
    ]
    if notes:
        out = ET.SubElement(case, "system-out")
        out.text = _text("\n\n".join(notes))


def _words(finding: Finding, view: View) -> str:
    place = view.sources.place(finding)
    lines = [
        f"{finding.severity.value}: {finding.message}",
        f"cost: {cost_words(finding.cost, finding)}",
        f"where: {place_words(finding)}",
        f"fix: {finding.fix}",
    ]
    if place is not None:
        lines.insert(2, f"source: {place.path}:{place.line} {place.function}")
    return "\n".join(lines)


def _outcome(case: ET.Element, tag: str, kind: str, message: str, body: str) -> None:
    element = ET.SubElement(case, tag, type=kind, message=_text(message))
    element.text = _text(body)


def _count(suite: ET.Element) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for name, tag in (
        ("failures", "failure"),
        ("errors", "error"),
        ("skipped", "skipped"),
    ):
        suite.set(name, str(sum(case.find(tag) is not None for case in cases)))


def _text(text: str) -> str:
    """Text that XML can hold and that moves no cursor."""
    shown = "\n".join(printable(line) for line in text.split("\n"))
    return _NOT_XML.sub(lambda match: f"\\u{ord(match[0]):04x}", shown)

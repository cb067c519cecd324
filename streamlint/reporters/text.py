"""Text for a terminal: the dearest first, then what could not be told."""

from __future__ import annotations

import io
import textwrap
from collections import Counter
from collections.abc import Sequence

from streamlint.baseline import Standing
from streamlint.engine import Model, Report
from streamlint.escape import printable
from streamlint.findings import (
    UNPROFILED,
    Claim,
    Cost,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.reporters import Detail, Failure, View
from streamlint.rule import Rule
from streamlint.suppression import Suppressed
from streamlint.where import describe

STYLES = {
    Severity.ERROR: "bold red",
    Severity.HIGH: "red",
    Severity.MEDIUM: "yellow",
    Severity.LOW: "cyan",
    Severity.INFO: "dim",
}
CLAIMS = {
    Claim.WHAT_IF: "fixing it saves about {}",
    Claim.UPPER_BOUND: "costs at most {}",
    Claim.LOWER_BOUND: "costs at least {}",
    Claim.DIRECT: "takes {}",
}
_BRIEF_CLAIMS = {
    Claim.WHAT_IF: "about {}",
    Claim.UPPER_BOUND: "at most {}",
    Claim.LOWER_BOUND: "at least {}",
    Claim.DIRECT: "takes {}",
}
_MAX_NAME = 72
_MIN_WIDTH = 20
_NARROW = 60
_MAX_EVIDENCE = 20


def render(reports: Sequence[Report], failures: Sequence[Failure], view: View) -> str:
    """One section a trace and, for several, what they show together."""
    del failures  # the command line names them on stderr
    whole = ""
    for report in reports:
        whole += piece(report, view, first=not whole)
    return whole + ending(reports, view)


def piece(report: Report, view: View, *, first: bool) -> str:
    """What to say of one trace: its section, or a line of a brief text.

    Nothing, when quiet, of a trace without findings.
    """
    page = Page(view.width)
    clean = report.assessed_any and not report.crashed
    if view.detail is Detail.QUIET and clean and not _shown(report, view):
        return ""
    if view.brief:
        span = report.overview.span_ns
        facts = [] if span is None else [f"GPU span {duration(span)}"]
        page.line(" · ".join([printable(report.path.name), *facts, totals([report])]))
    else:
        if not first:
            page.line()
        _section(page, report, view)
    return page.text(color=view.color)


def ending(reports: Sequence[Report], view: View) -> str:
    """What comes after the traces; nothing after a single one."""
    if view.fleet is None or view.detail is Detail.QUIET:
        return ""
    from streamlint.reporters.fleet import summary

    page = Page(view.width)
    if reports:
        page.line()
    summary(page, view.fleet, detailed=view.brief)
    page.line()
    page.line(f"{len(reports)} traces: {totals(reports)}", "bold")
    return page.text(color=view.color)


def duration(ns: int) -> str:
    """A time with three significant digits and a unit."""
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= 0.9995 * factor:
            value = ns / factor
            digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{ns} ns"


class Page:
    """Lines of styled text, wrapped to a width with hanging indents."""

    def __init__(self, width: int, label_width: int = 6) -> None:
        """``width`` in columns, of which labels take ``label_width``."""
        self._width = max(_MIN_WIDTH, width)
        self._narrow = width < _NARROW
        self._label_width = label_width
        self._lines: list[tuple[str, str, int]] = []

    def line(self, text: str = "", style: str = "") -> None:
        """One line; on a narrow page as many as it needs."""
        text = printable(text)
        margin = " " * (len(text) - len(text.lstrip()))
        pieces = self._wrapped(text, "", margin) if self._narrow else []
        for piece in pieces or [text]:
            self._add(piece, style)

    def _add(self, text: str, style: str) -> None:
        self._lines.append((text, style, len(text)))

    def paragraph(self, text: str, style: str = "", *, indent: str = "") -> None:
        """A text that may be longer than a line."""
        for line in self._wrapped(text, indent, indent):
            self._add(line, style)

    def field(self, label: str, text: str) -> None:
        """A labelled text, wrapped under itself."""
        lead = f"    {label:<{self._label_width}} "
        margin = " " * len(lead)
        if self._narrow:  # a column of labels would leave none for the text
            lead, margin = f"  {label} ", "   "
        wrapped = self._wrapped(text, lead, margin)
        for number, line in enumerate(wrapped or [lead]):
            self._lines.append((line, "dim", 0 if number else len(lead)))

    def _wrapped(self, text: str, first: str, rest: str) -> list[str]:
        return textwrap.wrap(
            printable(text),  # whatever its author took care of
            self._width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=self._narrow,
            break_on_hyphens=self._narrow,
        )

    def text(self, *, color: bool) -> str:
        """All lines, with ANSI styles if wanted."""
        if not color:
            return "".join(f"{line}\n" for line, _, _ in self._lines)
        # Costs a quarter of a small lint: only where it is seen.
        from rich.console import Console
        from rich.text import Text

        buffer = io.StringIO()
        console = Console(
            file=buffer,
            force_terminal=True,
            color_system="standard",
            width=self._width,
            _environ={},  # who asks for colour here has seen to NO_COLOR
        )
        for line, style, styled in self._lines:
            shown = Text(line)
            shown.stylize(style, 0, styled)
            console.print(shown, soft_wrap=True)
        return buffer.getvalue()


def _shown(report: Report, view: View) -> list[tuple[Rule, Finding]]:
    """The findings to print; when quiet, those that cost something or fail."""
    if view.detail is not Detail.QUIET:
        return report.fresh
    least = max(Severity.LOW, view.fail_on, key=lambda severity: severity.rank)
    return [pair for pair in report.fresh if pair[1].severity.at_least(least)]


def _section(page: Page, report: Report, view: View) -> None:
    page.line(head(report), "bold")
    if report.scope.explicit:
        page.paragraph(f"judged: {_scope(report)}")
    by_severity: dict[Severity, list[tuple[Rule, Finding]]] = {}
    for rule, finding in _shown(report, view):
        by_severity.setdefault(finding.severity, []).append((rule, finding))
    for severity, pairs in by_severity.items():
        page.line()
        page.line(f"{severity.value} ({len(pairs)})", STYLES[severity])
        for rule, finding in pairs:
            _finding(page, report, rule, finding, view.detail)
    if view.show_suppressed and report.suppressed:
        page.line()
        page.line(f"suppressed ({len(report.suppressed)})", "dim")
        for rule, allowed in report.suppressed:
            _suppressed(page, rule, allowed)
    quiet = view.detail is Detail.QUIET
    if report.not_assessed and not quiet:
        not_assessed(page, report.not_assessed)
    for rule, crash in report.crashed:
        page.line()
        page.line(f"crashed: {rule.name}", "bold red")
        page.field(
            "bug",
            f"{crash.summary}; this is a bug in {printable(rule.origin)}, "
            "please report it",
        )
    if view.detail is Detail.VERBOSE:
        _workings(page, report)
    if quiet and by_severity:
        return
    page.line()
    if report.model is not None and not quiet:
        page.paragraph(_model(report.model), "dim")
    known = known_words(report)
    if known:
        page.paragraph(known)
    page.paragraph(verdict(report), "bold")


def _workings(page: Page, report: Report) -> None:
    """Which rules found nothing, and how each table was read."""
    silent = [j.rule.name for j in report.judgements if j.silent]
    if silent:
        page.line()
        page.line(f"found nothing ({len(silent)})", "green")
        page.paragraph(", ".join(silent), indent="  ")
    page.line()
    page.line(f"tables read ({len(report.tables)})", "dim")
    for table in report.tables:
        page.paragraph(f"{table.name}: {printable(table.outcome)}", indent="  ")


def head(report: Report) -> str:
    """The trace in one line: name, GPUs, nsys, and how long its GPU work took."""
    facts, capture = report.overview, report.capture
    gpus = Counter(facts.gpus)
    parts = [printable(report.path.name)]
    parts += [
        printable(name, 40) + (f" x{n}" if n > 1 else "") for name, n in gpus.items()
    ]
    parts += [f"nsys {printable(capture.exporter, 20)}"] if capture.exporter else []
    parts += (
        [f"GPU span {duration(facts.span_ns)}"] if facts.span_ns is not None else []
    )
    return " · ".join(parts)


def _scope(report: Report) -> str:
    """What the user asked to be judged, and how much time that is."""
    scope = report.scope
    parts = [f"NVTX {printable(scope.nvtx, _MAX_NAME)}"] if scope.nvtx else []
    parts += ["repeated iterations"] if scope.steady_state else []
    if scope.timed:
        start = 0 if scope.start_ns is None else scope.start_ns
        end = "the end" if scope.end_ns is None else f"{scope.end_ns / 1e9:.6g} s"
        parts.append(f"{start / 1e9:.6g} s to {end}")
    parts += [f"process {printable(scope.process, 40)}"] if scope.process else []
    parts += [f"device {scope.device}"] if scope.device is not None else []
    time = sum(judged.duration_ns for judged in report.overview.judged)
    return f"{'; '.join(parts)} ({duration(time)})"


def _finding(
    page: Page, report: Report, rule: Rule, finding: Finding, detail: Detail
) -> None:
    page.line(f"  {rule.name}{grown_words(report, rule, finding)}")
    page.field("what", printable(finding.message))
    if finding.severity is Severity.INFO and detail is not Detail.VERBOSE:
        return  # costs too little to act on: one look is enough
    page.field("cost", cost_words(finding.cost, finding))
    place = place_words(finding)
    if place:
        page.field("where", place)
    for frame in finding.where.source:
        page.field("source", printable(describe(frame), 160))
    if detail is Detail.VERBOSE:
        for frame in finding.where.stack:
            page.field("stack", printable(describe(frame), 160))
    shown = _MAX_EVIDENCE if detail is Detail.VERBOSE else 1
    for item in finding.evidence[:shown]:
        start, length = item.start_ns / 1e9, duration(item.end_ns - item.start_ns)
        what = printable(item.what, 100)
        page.field("look", f"at {start:.6f} s for {length}: {what}")
    page.field("fix", finding.fix)


def _suppressed(page: Page, rule: Rule, allowed: Suppressed) -> None:
    finding = allowed.finding
    page.line(f"  {rule.name}")
    page.field("what", printable(finding.message))
    place = place_words(finding)
    if place:
        page.field("where", place)
    for frame in finding.where.source:
        page.field("source", printable(describe(frame), 160))
    page.field("reason", printable(allowed.reason))
    page.field("by", printable(allowed.origin))


def cost_words(cost: Cost, finding: Finding) -> str:
    """What a fault costs, how that is known, and how surely."""
    sure = f"{finding.confidence.value} confidence"
    if cost.ns is None or cost.share is None:
        return f"no time claimed ({cost.method}); {sure}"
    amount = f"{duration(cost.ns)}, {100 * cost.share:.1f} % of the judged time"
    if cost.basis == UNPROFILED:
        amount += " of the unprofiled run"
    return f"{CLAIMS[cost.claim].format(amount)} ({cost.method}); {sure}"


def brief_cost(claim: Claim, ns: int, share: float) -> str:
    """A cost in a few words, for a table."""
    return f"{_BRIEF_CLAIMS[claim].format(duration(ns))} ({100 * share:.1f} %)"


def place_words(finding: Finding) -> str:
    """Process, device, streams, kernels and ranges of a finding, in one line."""
    where = finding.where
    parts: list[str] = []
    if where.pid is not None:
        name = printable(where.process, 40) + ", " if where.process else ""
        parts.append(f"{name}pid {where.pid}")
    parts += [f"device {where.device}"] if where.device is not None else []
    parts += [_some("stream", where.streams)] if where.streams else []
    parts += [_some("thread", where.threads)] if len(where.threads) > 1 else []
    parts += [_names("kernel", where.kernels)] if where.kernels else []
    parts += [_names("NVTX range", where.nvtx)] if where.nvtx else []
    return "; ".join(parts)


def _some(noun: str, ids: tuple[int, ...]) -> str:
    shown = ", ".join(str(i) for i in ids[:6])
    more = f" and {len(ids) - 6} more" if len(ids) > 6 else ""
    return f"{noun}{'s' if len(ids) > 1 else ''} {shown}{more}"


def _names(noun: str, names: tuple[str, ...]) -> str:
    shown = ", ".join(printable(name, _MAX_NAME) for name in names)
    return f"{noun}{'s' if len(names) > 1 else ''} {shown}"


def not_assessed(page: Page, pairs: list[tuple[Rule, NotAssessed]]) -> None:
    """The rules that could not tell, grouped by reason."""
    page.line()
    page.line(f"not assessed ({len(pairs)})", "magenta")
    for why, names in by_reason(pairs).items():
        if len(names) > 4:
            names = [*names[:3], f"and {len(names) - 3} more"]
        page.paragraph(", ".join(names), indent="  ")
        page.field("why", printable(why.reason))
        page.field("how", printable(why.recapture))


def by_reason(pairs: list[tuple[Rule, NotAssessed]]) -> dict[NotAssessed, list[str]]:
    """Names of the rules that could not tell, by why."""
    groups: dict[NotAssessed, list[str]] = {}
    for rule, why in pairs:
        groups.setdefault(why, []).append(rule.name)
    return groups


def _model(model: Model) -> str:
    words = f"replay: reproduces the GPU span within {100 * abs(model.error):.1f} %"
    if model.joint_ns is not None and model.joint_share is not None:
        words += (
            f"; the {model.joint_fixes} what-if fixes together save about "
            f"{duration(model.joint_ns)} ({100 * model.joint_share:.1f} %)"
        )
    return words


def grown_words(report: Report, rule: Rule, finding: Finding) -> str:
    """Of a finding that has grown, since when; else nothing."""
    if report.baseline is None:
        return ""
    if report.standing(rule, finding) is not Standing.GROWN:
        return ""
    before = report.baseline.entries[finding.fingerprint(rule.name)].measure
    if before.ns is None or finding.cost.ns is None:
        return f" (grown: {before.occurrences} times in the baseline)"
    return f" (grown: {duration(before.ns)} in the baseline)"


def known_words(report: Report) -> str:
    """How many findings are not shown, as the baseline has them; else nothing."""
    known = len(report.findings) - len(report.fresh)
    if not known:
        return ""
    return f"{known} known finding{'' if known == 1 else 's'} in the baseline"


def verdict(report: Report) -> str:
    """The result in one line."""
    if not report.assessed_any and not report.findings and not report.crashed:
        return "cannot be assessed: this trace neither shows nor rules out a fault"
    silent = sum(j.silent for j in report.judgements)
    rules = "rule" if silent == 1 else "rules"
    return f"{totals([report])}; {silent} {rules} found nothing"


def totals(reports: Sequence[Report]) -> str:
    """How many findings, not assessed and crashed, of all traces."""
    counts = Counter(f.severity for r in reports for _, f in r.fresh)
    total = sum(counts.values())
    parts = [f"{counts[s]} {s.value}" for s in Severity if counts[s]]
    fresh = "new or grown " if any(r.baseline is not None for r in reports) else ""
    words = f"{total} {fresh}finding{'' if total == 1 else 's'}"
    words += f" ({', '.join(parts)})" if parts else ""
    suppressed = sum(len(r.suppressed) for r in reports)
    words += f"; {suppressed} suppressed" if suppressed else ""
    below = sum(r.below for r in reports)
    words += f"; {below} below min-saving" if below else ""
    unable = sum(len(r.not_assessed) for r in reports)
    words += f"; {unable} not assessed" if unable else ""
    crashed = sum(len(r.crashed) for r in reports)
    return words + (f"; {crashed} crashed" if crashed else "")

"""What many traces show together, as text and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamlint.escape import printable, without_home
from streamlint.findings import Severity
from streamlint.fleet import Fleet, Group, Spread
from streamlint.reporters.text import CLAIMS, STYLES, Page, duration

_LISTED = 6


def summary(page: Page, fleet: Fleet, *, detailed: bool) -> None:
    """Findings over ranks, spread of spans, slow ranks, and those without a result.

    ``detailed`` says of each finding what it is: where no section of a trace does.
    """
    judged = len(fleet.ranks) - len(fleet.unassessed)
    page.line(f"fleet: {judged} of {len(fleet.ranks)} {fleet.noun} assessed", "bold")
    by_severity: dict[Severity, list[Group]] = {}
    for group in fleet.groups:
        by_severity.setdefault(group.severity, []).append(group)
    for severity, groups in by_severity.items():
        page.line()
        page.line(f"{severity.value} ({len(groups)})", STYLES[severity])
        for group in groups:
            _group(page, fleet, group, detailed=detailed)
    page.line()
    if fleet.span is not None:
        page.field("span", f"GPU span {_spread(fleet, fleet.span)}")
        if fleet.slowest:
            page.field("slow", _slowest(fleet, fleet.span))
    hosts = fleet.hosts()
    for host, members in hosts.items():
        page.field("host", _host(fleet, host, members))
    if fleet.unassessed:
        unable = [
            f"{fleet.ranks[i].label} ({fleet.ranks[i].status})"
            for i in fleet.unassessed
        ]
        page.field("unable", _listed([printable(name) for name in unable]))


def coverage(fleet: Fleet, group: Group) -> str:
    """On which ranks a finding is, of those where its rule could be judged."""
    noun, total = fleet.noun, len(group.assessed)
    if len(group.ranks) == total:
        return f"on {total} of {total} {noun}"
    if len(group.ranks) == 1:
        return f"only {fleet.ranks[group.ranks[0]].label}, of {total} {noun}"
    words = f"on {len(group.ranks)} of {total} {noun}"
    missing = sorted(set(group.assessed) - set(group.ranks))
    if len(missing) <= 3 < len(group.ranks):
        return f"{words}, not {_labels(fleet, missing)}"
    return f"{words}: {_labels(fleet, group.ranks)}"


def cost(fleet: Fleet, group: Group) -> str:
    """What it costs on the ranks that have it; never their sum."""
    if group.cost is None:
        return "no time claimed"
    return CLAIMS[group.finding.cost.claim].format(_spread(fleet, group.cost))


def document(fleet: Fleet) -> dict[str, Any]:
    """The JSON object; ranks are named by their position in ``ranks``."""
    return {
        "ranks": [
            {
                "label": without_home(rank.label),
                "rank": rank.rank,
                "host": rank.host,
                "path": without_home(rank.path),
                "pid": rank.pid,
                "status": rank.status,
                "span_ns": rank.span_ns,
            }
            for rank in fleet.ranks
        ],
        "findings": [
            {
                "fingerprint": group.fingerprint,
                "rule": group.rule,
                "severity": group.severity.value,
                "message": group.finding.message,
                "ranks": list(group.ranks),
                "assessed": list(group.assessed),
                "claim": group.finding.cost.claim.value,
                "cost": _spread_object(group.cost),
            }
            for group in fleet.groups
        ],
        "span": _spread_object(fleet.span),
        "slowest": list(fleet.slowest),
        "unassessed": list(fleet.unassessed),
    }


def _group(page: Page, fleet: Fleet, group: Group, *, detailed: bool) -> None:
    page.paragraph(f"{group.rule}  {printable(coverage(fleet, group))}", indent="  ")
    finding = group.finding
    if detailed:
        of = f"{fleet.ranks[group.dearest].label}: " if len(group.ranks) > 1 else ""
        page.field("what", printable(of + finding.message))
    if group.severity is Severity.INFO:
        return
    page.field("cost", printable(cost(fleet, group)))
    if detailed:
        page.field("fix", finding.fix)


def _spread(fleet: Fleet, spread: Spread) -> str:
    least, most = (fleet.ranks[index].label for index in spread.ranks)
    if spread.of == 1:
        return f"{duration(spread.median_ns)} ({printable(most)})"
    if spread.least_ns == spread.most_ns:
        return f"{duration(spread.median_ns)} on each"
    return (
        f"{duration(spread.median_ns)} in the median, {duration(spread.least_ns)} "
        f"({printable(least)}) to {duration(spread.most_ns)} ({printable(most)})"
    )


def _spread_object(spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    return {
        "min_ns": spread.least_ns,
        "median_ns": spread.median_ns,
        "max_ns": spread.most_ns,
        "min_rank": spread.ranks[0],
        "max_rank": spread.ranks[1],
    }


def _slowest(fleet: Fleet, span: Spread) -> str:
    parts = []
    for index in fleet.slowest:
        rank = fleet.ranks[index]
        over = 100 * ((rank.span_ns or 0) / max(1, span.median_ns) - 1)
        parts.append(
            f"{printable(rank.label)} {duration(rank.span_ns or 0)} ({over:+.1f} %)"
        )
    return ", ".join(parts)


def _host(fleet: Fleet, host: str, members: Sequence[int]) -> str:
    only = [g.rule for g in fleet.groups if set(g.ranks) <= set(members)]
    words = f"{printable(host)}: {_labels(fleet, members)}"
    return words + (f"; only there: {_listed(sorted(set(only)))}" if only else "")


def _labels(fleet: Fleet, indexes: Sequence[int]) -> str:
    """Names of ranks; of those with plain numbers, ranges."""
    ranks = [fleet.ranks[index] for index in indexes]
    numbers = sorted(r.rank for r in ranks if r.rank is not None)
    plain = fleet.named and len(numbers) == len(ranks)
    if not plain or len(set(numbers)) < len(numbers):
        return _listed([printable(rank.label) for rank in ranks])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown = runs[:_LISTED]
    words = ", ".join("-".join(map(str, run)) for run in shown)
    left = sum(number > shown[-1][-1] for number in numbers)
    more = f" and {left} more" if left else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {words}{more}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")

"""One self-contained page about many traces: rules by rank, and spreads over ranks."""

from __future__ import annotations

from typing import Any

from streamlint import __version__
from streamlint.escape import printable, without_home
from streamlint.findings import Severity
from streamlint.fleet import Fleet
from streamlint.reporters.fleet import cost, coverage
from streamlint.reporters.html import filled

_SILENT, _UNABLE, _NO_TRACE = "nothing", "not assessed", "no result"
LEVELS = (
    _SILENT,
    _UNABLE,
    _NO_TRACE,
    *(severity.value for severity in reversed(Severity)),
)
"""What a cell of the heat map says; the map holds positions in here."""
_MAX_TEXT = 600


def page(fleet: Fleet, plotlyjs: str = "inline") -> str:
    """The page; ``plotlyjs`` is "inline", "cdn" or the path of a plotly.js bundle."""
    title = f"streamlint: {len(fleet.ranks)} {fleet.noun}"
    return filled("fleet", title, document(fleet), plotlyjs)


def document(fleet: Fleet) -> dict[str, Any]:
    """What the page shows; every text in it is printable."""
    rules = [group.rule for group in fleet.groups]
    rules += [rule for rule in fleet.levels if rule not in rules]
    rows = list(dict.fromkeys(rules))
    return {
        "version": __version__,
        "noun": fleet.noun,
        "levels": LEVELS,
        "ranks": [
            {
                "label": printable(rank.label),
                "file": printable(without_home(rank.path)),
                "status": rank.status,
                "span": rank.span_ns,
            }
            for rank in fleet.ranks
        ],
        "rules": rows,
        "map": [
            [_cell(fleet, rule, i) for i in range(len(fleet.ranks))] for rule in rows
        ],
        "groups": [
            {
                "rule": group.rule,
                "severity": group.severity.value,
                "on": printable(coverage(fleet, group)),
                "cost": printable(cost(fleet, group)),
                "what": printable(group.finding.message, _MAX_TEXT),
                "of": printable(fleet.ranks[group.dearest].label),
                "fix": group.finding.fix,
                "claim": group.finding.cost.claim.value,
                "costs": sorted(group.costs.items()),
            }
            for group in fleet.groups
        ],
        "span": fleet.span
        and [fleet.span.least_ns, fleet.span.median_ns, fleet.span.most_ns],
        "slowest": fleet.slowest,
        "unassessed": fleet.unassessed,
    }


def _cell(fleet: Fleet, rule: str, index: int) -> int:
    if fleet.ranks[index].status == "error":
        return LEVELS.index(_NO_TRACE)
    level = fleet.levels[rule].get(index, _SILENT)
    if level is None:
        return LEVELS.index(_UNABLE)
    return LEVELS.index(level.value if isinstance(level, Severity) else level)

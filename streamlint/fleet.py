"""Many traces of one run seen together: what is everywhere, and what only somewhere.

Each trace, or each process of one where only processes tell, is a rank. Findings are
grouped by fingerprint. Costs are never added up: a group says the least, the middle
and the greatest of its ranks.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

from streamlint.engine import Report
from streamlint.errors import StreamlintError, UsageError
from streamlint.findings import Claim, Finding, Severity

_RANK = re.compile(r"(?<![a-z])(?:global[_-]?)?rank[_.-]?(?P<rank>\d{1,9})", re.I)
_SHORT = re.compile(
    r"(?<![a-z0-9])(?:r|pe|proc|procid|task|worker|gpu)[_-]?(?P<rank>\d{1,9})(?![a-z0-9])",
    re.I,
)
_TRAILING = re.compile(r"(?P<rest>.*[_.-])(?P<rank>\d{1,9})")
_SLOWEST = 3
_LATE = 1.01
"""How much longer than the median a span is that stands out."""
_SPARSE = 4
"""Trailing numbers beyond so many times the number of traces are no ranks: most often
process ids."""


class Rank(NamedTuple):
    """One rank: a trace, or of a trace with several ranks, one process.

    ``label`` names it alone among all. ``status`` is "judged", "not assessed" where no
    rule could be judged, "crashed" where one had a bug, or "error". ``span_ns`` is from
    the first GPU operation to the end of the last, None without any.
    """

    label: str
    rank: int | None
    host: str | None
    path: str
    pid: int | None
    status: str
    span_ns: int | None


class Spread(NamedTuple):
    """Least, middle and greatest ``of`` so many ranks, ns.

    ``ranks`` are the first ones with the least and with the greatest.
    """

    least_ns: int
    median_ns: int
    most_ns: int
    ranks: tuple[int, int]
    of: int


class Group(NamedTuple):
    """The findings that share a fingerprint; ranks are indexes into `Fleet.ranks`.

    ``severity`` is the worst, ``finding`` the dearest, of rank ``dearest``. ``ranks``
    have the finding, ``assessed`` are those where its rule could be judged. ``cost`` is
    of the findings that claim what the dearest does, by rank in ``costs``; None where
    no time is claimed.
    """

    fingerprint: str
    rule: str
    severity: Severity
    finding: Finding
    dearest: int
    ranks: tuple[int, ...]
    assessed: tuple[int, ...]
    costs: dict[int, int]
    cost: Spread | None


class Fleet(NamedTuple):
    """All ranks; of ``groups`` the most severe first, then the most widespread.

    ``levels`` holds by rule and rank the worst severity, None where the rule could not
    judge; what is missing was judged and silent. ``named`` says whether ranks have
    numbers; otherwise they are traces. ``slowest`` are the few that take clearly longer
    than the median.
    """

    ranks: tuple[Rank, ...]
    groups: tuple[Group, ...]
    levels: dict[str, dict[int, Severity | None]]
    span: Spread | None
    slowest: tuple[int, ...]
    unassessed: tuple[int, ...]
    named: bool

    @property
    def noun(self) -> str:
        """What a rank is called, in the plural."""
        return "ranks" if self.named else "traces"

    def hosts(self) -> dict[str, list[int]]:
        """Ranks by host, empty unless the user's expression names hosts."""
        found: dict[str, list[int]] = {}
        for index, rank in enumerate(self.ranks):
            if rank.host is not None:
                found.setdefault(rank.host, []).append(index)
        return found


class Named(NamedTuple):
    """What a trace's name says."""

    rank: int | None = None
    host: str | None = None


def rank_pattern(expression: str | None) -> re.Pattern[str] | None:
    """The user's expression; raises `UsageError` if it can't tell ranks."""
    if expression is None:
        return None
    hint = r"name the group: --rank-regex '(?P<host>\w+)/rank(?P<rank>\d+)'"
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise UsageError(
            f"--rank-regex is no regular expression ({error})", hint=hint
        ) from error
    if not {"rank", "host"} & set(pattern.groupindex):
        raise UsageError("--rank-regex has no group rank or host", hint=hint)
    return pattern


def fleet(
    outcomes: Sequence[tuple[str, Report | StreamlintError]],
    pattern: re.Pattern[str] | None = None,
) -> Fleet:
    """The traces, by name and in order, as one; ``pattern`` finds ranks in names.

    Findings that a baseline knows are left out.
    """
    names = [name for name, _ in outcomes]
    said = _ranks_in(names, pattern)
    ranks: list[Rank] = []
    found: list[list[tuple[str, Finding]]] = []
    unable: list[set[str]] = []
    rules: list[set[str]] = []
    for name, named, (_, outcome) in zip(names, said, outcomes, strict=True):
        if isinstance(outcome, StreamlintError):
            ranks.append(Rank("", named.rank, named.host, name, None, "error", None))
            found.append([])
            unable.append(set())
            rules.append(set())
            continue
        status = "judged" if outcome.assessed_any else "not assessed"
        status = "crashed" if outcome.crashed else status
        findings = [(rule.name, finding) for rule, finding in outcome.fresh]
        for pid, number, span in _processes(outcome, named):
            ranks.append(Rank("", number, named.host, name, pid, status, span))
            found.append([pair for pair in findings if _of(pid, pair[1])])
            unable.append({j.rule.name for j in outcome.judgements if not j.judged})
            rules.append({j.rule.name for j in outcome.judgements})
    named_all = _tell_apart([(rank.host, rank.rank) for rank in ranks])
    short = _short([rank.path for rank in ranks])
    labelled = tuple(
        rank._replace(label=_label(rank, path, named_all))
        for rank, path in zip(ranks, short, strict=True)
    )
    assessed = {
        rule: tuple(i for i, all_ in enumerate(rules) if rule in all_ - unable[i])
        for rule in set[str]().union(*rules)
    }
    spans = {i: r.span_ns for i, r in enumerate(ranks) if r.span_ns is not None}
    whole = _spread(spans)
    late = [i for i in spans if whole and spans[i] > _LATE * whole.median_ns]
    late.sort(key=lambda i: -spans[i])
    return Fleet(
        ranks=labelled,
        groups=_groups(found, assessed),
        levels=_levels(found, unable),
        span=whole,
        slowest=tuple(late[:_SLOWEST]),
        unassessed=tuple(i for i, r in enumerate(ranks) if r.status != "judged"),
        named=named_all,
    )


def _of(pid: int | None, finding: Finding) -> bool:
    """Whether a finding is of this process; one that names none is of each."""
    return pid is None or finding.where.pid in (None, pid)


def _groups(
    found: Sequence[Sequence[tuple[str, Finding]]], assessed: dict[str, tuple[int, ...]]
) -> tuple[Group, ...]:
    alike: dict[tuple[str, str], list[tuple[int, Finding]]] = defaultdict(list)
    for index, findings in enumerate(found):
        for rule, finding in findings:
            alike[finding.fingerprint(rule), rule].append((index, finding))
    groups = []
    for (fingerprint, rule), placed in alike.items():
        where, dearest = max(placed, key=lambda pair: pair[1].cost.ns or 0)
        costs: dict[int, int] = {}
        for index, finding in placed:
            same = finding.cost.claim is dearest.cost.claim
            if same and finding.cost.ns is not None:
                # Several processes of a rank may have it: the dearest stands for all.
                costs[index] = max(costs.get(index, 0), finding.cost.ns)
        groups.append(
            Group(
                fingerprint,
                rule,
                min((f.severity for _, f in placed), key=lambda s: s.rank),
                dearest,
                where,
                tuple(sorted({index for index, _ in placed})),
                assessed[rule],
                costs,
                None if dearest.cost.claim is Claim.NONE else _spread(costs),
            )
        )
    groups.sort(
        key=lambda g: (
            g.severity.rank,
            -len(g.ranks),
            -(g.finding.cost.ns or 0),
            g.rule,
            g.fingerprint,
        )
    )
    return tuple(groups)


def _levels(
    found: Sequence[Sequence[tuple[str, Finding]]], unable: Sequence[set[str]]
) -> dict[str, dict[int, Severity | None]]:
    levels: dict[str, dict[int, Severity | None]] = defaultdict(dict)
    for index, rules in enumerate(unable):
        for rule in sorted(rules):
            levels[rule][index] = None
    for index, findings in enumerate(found):
        for rule, finding in findings:
            worst = levels[rule].get(index)
            if worst is None or finding.severity.rank < worst.rank:
                levels[rule][index] = finding.severity
    return dict(levels)


def _spread(values: dict[int, int]) -> Spread | None:
    if not values:
        return None
    least = min(values, key=lambda index: (values[index], index))
    most = max(values, key=lambda index: (values[index], -index))
    middle = median_low(values.values())
    return Spread(values[least], middle, values[most], (least, most), len(values))


def _processes(
    report: Report, named: Named
) -> list[tuple[int | None, int | None, int | None]]:
    """(pid, rank, span) of a trace's ranks; pid is None for the trace as a whole."""
    facts = report.overview
    if named.rank is None:
        names = dict(facts.processes)
        ranks = {
            pid: int(seen["rank"])
            for pid in facts.process_spans
            if (seen := _RANK.search(names.get(pid) or ""))
        }
        distinct = len(set(ranks.values())) == len(ranks)
        if ranks and distinct and len(ranks) == len(facts.process_spans):
            spans = facts.process_spans
            if len(ranks) == 1:
                return [(None, next(iter(ranks.values())), facts.span_ns)]
            return [
                (pid, ranks[pid], spans[pid])
                for pid in sorted(ranks, key=ranks.__getitem__)
            ]
    return [(None, named.rank, facts.span_ns)]


def _ranks_in(names: Sequence[str], pattern: re.Pattern[str] | None) -> list[Named]:
    if pattern is not None:
        return [_by(pattern, name) for name in names]
    stems = [Path(name).name.rpartition(".")[0] or Path(name).name for name in names]
    said: list[Named] = []
    for name, stem in zip(names, stems, strict=True):
        folders = reversed(Path(name).parts[:-1])
        seen = _last(_RANK, stem) or _last(_SHORT, stem)
        seen = seen or next(
            filter(None, (_last(_RANK, part) for part in folders)), None
        )
        said.append(Named(int(seen["rank"])) if seen else Named())
    if any(named.rank is not None for named in said):
        return said
    ends = [_TRAILING.fullmatch(stem) for stem in stems]
    numbers = [int(end["rank"]) for end in ends if end]
    alike = len({end["rest"] for end in ends if end}) == 1
    whole = len(numbers) == len(names) == len(set(numbers))
    if alike and whole and max(numbers) < _SPARSE * len(names):
        return [Named(number) for number in numbers]
    return said


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match: "worker0_rank3" is rank 3."""
    return next(reversed(list(pattern.finditer(text))), None)


def _by(pattern: re.Pattern[str], name: str) -> Named:
    seen = pattern.search(name)
    if seen is None:
        return Named()
    groups = seen.groupdict()
    number = groups.get("rank") or ""
    return Named(int(number) if number.isdecimal() else None, groups.get("host"))


def _tell_apart(ranks: Sequence[tuple[str | None, int | None]]) -> bool:
    """Whether numbers name ranks alone: any are there, and none is there twice."""
    numbers = [pair for pair in ranks if pair[1] is not None]
    return bool(numbers) and len(set(numbers)) == len(numbers)


def _label(rank: Rank, short: str, named: bool) -> str:
    if not named or rank.rank is None:
        return short if rank.pid is None else f"{short}, pid {rank.pid}"
    return f"rank {rank.rank}" + (f" on {rank.host}" if rank.host is not None else "")


def _short(paths: Sequence[str]) -> list[str]:
    """Names of the files; with folders as far as needed to tell them apart."""
    names = [Path(path).name for path in paths]
    if len(set(names)) == len(set(paths)):
        return names
    try:
        common = os.path.commonpath([Path(path).parent for path in paths])
    except ValueError:  # absolute and relative paths
        common = ""
    return [os.path.relpath(path, common) if common else path for path in paths]

"""Two results of one program, before and after a change.

A side is one trace of the document that `lint --format json` writes, so a stored
result serves as well as a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from streamlint.baseline import DEFAULT_TOLERANCE, Measure, grown
from streamlint.findings import Claim, Severity


class Kind(str, Enum):
    """What became of a finding.

    `SUPPRESSED`: it is there, but allowed now; `UNTOLD`: its rule can't be judged any
    more.
    """

    NEW = "new"
    GROWN = "grown"
    SHRUNK = "shrunk"
    GONE = "gone"
    SUPPRESSED = "suppressed"
    UNTOLD = "untold"
    SAME = "same"


class Item(NamedTuple):
    """A finding of one side."""

    rule: str
    fingerprint: str
    severity: Severity
    message: str
    measure: Measure


class Device(NamedTuple):
    """What a GPU did within the span of a trace; times in ns."""

    gpu: int | None
    name: str | None
    busy_ns: int
    kernels_ns: int
    copies_ns: int
    idle_ns: int


class Side(NamedTuple):
    """One trace: its findings by fingerprint, and the rules that could be judged.

    ``rules`` is None in results of versions that don't name them: all that aren't
    among ``untold``, rules that could not tell or crashed, with why. ``suppressed``
    has the reasons of findings that are allowed, by fingerprint.
    """

    path: str
    span_ns: int | None
    devices: tuple[Device, ...]
    items: Mapping[str, Item]
    rules: frozenset[str] | None
    untold: Mapping[str, str]
    suppressed: Mapping[str, str]
    crashed: bool

    @property
    def judged_any(self) -> bool:
        """Whether this trace can tell about any rule."""
        return self.rules is None or bool(self.rules - set(self.untold))

    def judged(self, rule: str) -> bool:
        """Whether this trace can tell about a rule."""
        return rule not in self.untold and (self.rules is None or rule in self.rules)


class Fate(NamedTuple):
    """A finding of either side and what became of it."""

    kind: Kind
    before: Item | None
    after: Item | None
    note: str = ""

    @property
    def item(self) -> Item:
        """The finding as it is, or as it was last."""
        item = self.after or self.before
        assert item is not None
        return item


class Diff(NamedTuple):
    """Both sides, and every finding in the order of its kind, severity and cost."""

    before: Side
    after: Side
    fates: tuple[Fate, ...]

    def of(self, kind: Kind) -> list[Fate]:
        """The findings of which this became."""
        return [fate for fate in self.fates if fate.kind is kind]

    @property
    def comparable(self) -> bool:
        """Whether both sides could be judged at all."""
        return self.before.judged_any and self.after.judged_any

    def worse(self, fail_on: Severity) -> bool:
        """Whether anything of this severity or above is new or has grown."""
        return any(
            fate.kind in (Kind.NEW, Kind.GROWN) and fate.item.severity.at_least(fail_on)
            for fate in self.fates
        )


def side(trace: Mapping[str, Any]) -> Side:
    """A trace of a JSON result.

    Raises KeyError, TypeError or ValueError where it isn't one.
    """
    items: dict[str, Item] = {}
    for finding in trace["findings"]:
        item = _item(finding)
        other = items.get(item.fingerprint)
        # Processes that run one program share fingerprints: the dearest stands.
        if other is None or (other.measure.ns or 0) < (item.measure.ns or 0):
            items[item.fingerprint] = item
    untold = {str(n["rule"]): str(n["reason"]) for n in trace["not_assessed"]}
    crashed = {str(c["rule"]): str(c["summary"]) for c in trace["crashed"]}
    rules = trace.get("rules")
    return Side(
        path=str(trace["path"]),
        span_ns=None if trace["span_ns"] is None else int(trace["span_ns"]),
        devices=tuple(
            Device(
                gpu=device["gpu"],
                name=device["name"],
                busy_ns=int(device["busy_ns"]),
                kernels_ns=int(device["kernels_ns"]),
                copies_ns=int(device["copies_ns"]),
                idle_ns=int(device["idle_ns"]),
            )
            for device in trace.get("devices", ())
        ),
        items=items,
        rules=None if rules is None else frozenset(map(str, rules)),
        untold={**untold, **crashed},
        suppressed={
            str(allowed["finding"]["fingerprint"]): str(allowed["reason"])
            for allowed in trace.get("suppressed", ())
        },
        crashed=bool(crashed),
    )


def _item(finding: Mapping[str, Any]) -> Item:
    cost = finding["cost"]
    measure = Measure(
        claim=Claim(cost["claim"]).value,
        ns=None if cost["ns"] is None else int(cost["ns"]),
        share=None if cost["share"] is None else float(cost["share"]),
        occurrences=int(finding["occurrences"]),
    )
    return Item(
        rule=str(finding["rule"]),
        fingerprint=str(finding["fingerprint"]),
        severity=Severity(finding["severity"]),
        message=str(finding["message"]),
        measure=measure,
    )


def diff(before: Side, after: Side, tolerance: float = DEFAULT_TOLERANCE) -> Diff:
    """What became of the findings; ``tolerance`` as in `streamlint.baseline`."""
    marks = dict.fromkeys([*after.items, *before.items])
    fates = [
        _fate(before, after, before.items.get(mark), after.items.get(mark), tolerance)
        for mark in marks
    ]
    order = list(Kind)
    fates.sort(
        key=lambda fate: (
            order.index(fate.kind),
            fate.item.severity.rank,
            -(fate.item.measure.ns or 0),
            fate.item.rule,
        )
    )
    return Diff(before, after, tuple(fates))


def _fate(
    before: Side, after: Side, old: Item | None, new: Item | None, tolerance: float
) -> Fate:
    if old is None:
        assert new is not None
        note = "" if before.judged(new.rule) else "not assessed before"
        if new.fingerprint in before.suppressed:
            note = "suppressed before"
        return Fate(Kind.NEW, None, new, note)
    if new is None:
        if old.fingerprint in after.suppressed:
            return Fate(Kind.SUPPRESSED, old, None, after.suppressed[old.fingerprint])
        if after.judged(old.rule):
            return Fate(Kind.GONE, old, None)
        return Fate(Kind.UNTOLD, old, None, after.untold.get(old.rule, "not selected"))
    if grown(old.measure, new.measure, tolerance):
        return Fate(Kind.GROWN, old, new)
    if grown(new.measure, old.measure, tolerance):
        return Fate(Kind.SHRUNK, old, new)
    return Fate(Kind.SAME, old, new)

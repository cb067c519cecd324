"""Known findings: a file in the repository, so that only what is new or worse fails.

A finding is known by its fingerprint. It has grown when it costs more than the
tolerance allows, by more than the noise of a capture, and not because the recording
is longer: its part of the run, set against the rest of it, must have grown as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from streamlint.cost import MIN_SAVING_NS, MIN_SHARE
from streamlint.errors import BaselineError
from streamlint.findings import Claim, Finding
from streamlint.fingerprint import stable

FORMAT_VERSION = 1
DEFAULT_TOLERANCE = 0.1
"""By less do most costs differ from run to run (docs/ci.md)."""
_FIELDS = ("rule", "label", "fingerprint", "claim", "ns", "share", "occurrences")


class Standing(str, Enum):
    """A finding against a baseline."""

    KNOWN = "known"
    NEW = "new"
    GROWN = "grown"


class Measure(NamedTuple):
    """How much of a fault there is; ``ns`` and ``share`` are those of its cost."""

    claim: str
    ns: int | None
    share: float | None
    occurrences: int


class Entry(NamedTuple):
    """One known finding. ``label`` names its cause for people who read the file."""

    rule: str
    label: str
    fingerprint: str
    measure: Measure


class Baseline(NamedTuple):
    """Known findings by fingerprint, read from ``path``.

    ``tolerance`` is the part by which a known finding may cost more.
    """

    path: Path
    entries: Mapping[str, Entry]
    tolerance: float = DEFAULT_TOLERANCE

    def entry(self, rule: str, finding: Finding) -> Entry | None:
        """What is known of this finding."""
        return self.entries.get(finding.fingerprint(rule))

    def standing(self, rule: str, finding: Finding) -> Standing:
        """Whether this finding is known, new, or known and worse."""
        known = self.entry(rule, finding)
        if known is None:
            return Standing.NEW
        worse = grown(known.measure, measure(finding), self.tolerance)
        return Standing.GROWN if worse else Standing.KNOWN


def measure(finding: Finding) -> Measure:
    """How much of a fault a finding shows."""
    cost = finding.cost
    return Measure(cost.claim.value, cost.ns, cost.share, finding.occurrences)


def grown(before: Measure, after: Measure, tolerance: float) -> bool:
    """Whether there is more of a fault than a tolerance (0.1 for 10 %) allows.

    Costs of one claim are compared. Where there are none, the numbers of occurrences.
    """
    if (
        before.ns is None
        or after.ns is None
        or not before.share
        or not after.share
        or before.claim != after.claim
    ):
        return after.occurrences > before.occurrences * (1 + tolerance)
    added, judged = after.ns - before.ns, after.ns / after.share
    if added < max(MIN_SAVING_NS, MIN_SHARE * judged):
        return False
    if after.ns <= before.ns * (1 + tolerance):
        return False
    return before.share >= 1 or _rate(after) > _rate(before) * (1 + tolerance)


def _rate(of: Measure) -> float:
    """Time lost for each ns of the rest of the judged time."""
    share = of.share or 0.0
    return math.inf if share >= 1 else share / (1 - share)


def entries(found: Iterable[tuple[str, Finding]]) -> dict[str, Entry]:
    """Entries of a baseline for these findings of rules.

    Several processes or traces with one finding share an entry, of the dearest.
    """
    made: dict[str, Entry] = {}
    for rule, finding in found:
        label = ", ".join(dict.fromkeys(map(stable, filter(None, finding.identity))))
        entry = Entry(rule, label, finding.fingerprint(rule), measure(finding))
        other = made.get(entry.fingerprint)
        if other is None or _weight(other) < _weight(entry):
            made[entry.fingerprint] = entry
    return made


def _weight(entry: Entry) -> tuple[int, int]:
    return entry.measure.ns or 0, entry.measure.occurrences


def dump(known: Iterable[Entry]) -> str:
    """The text of a baseline file: one line a finding, in an order that stays."""
    lines = [
        json.dumps(
            {
                "rule": e.rule,
                "label": e.label,
                "fingerprint": e.fingerprint,
                "claim": e.measure.claim,
                "ns": e.measure.ns,
                "share": None if e.measure.share is None else round(e.measure.share, 6),
                "occurrences": e.measure.occurrences,
            }
        )
        for e in sorted(known, key=lambda e: (e.rule, e.label, e.fingerprint))
    ]
    inner = ",\n".join(f"    {line}" for line in lines)
    return (
        f'{{\n  "streamlint_baseline": {FORMAT_VERSION},\n  "findings": ['
        + (f"\n{inner}\n  " if lines else "")
        + "]\n}\n"
    )


def read(path: Path, tolerance: float = DEFAULT_TOLERANCE) -> Baseline:
    """The baseline in a file; raises `BaselineError` where it is none."""
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error.strerror or "no file") from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, "not JSON") from error
    version = document.get("streamlint_baseline") if _is(document, dict) else None
    if not _is(version, int):
        raise _unreadable(path, "not a baseline")
    if version != FORMAT_VERSION:
        raise _unreadable(path, f"format {version}, this version reads 1")
    rows = document.get("findings")
    if not _is(rows, list):
        raise _unreadable(path, "no list of findings")
    found = [_entry(row) for row in rows]
    for number, entry in enumerate(found, start=1):
        if entry is None:
            raise _unreadable(path, f"finding {number} is not one")
    return Baseline(path, {e.fingerprint: e for e in found if e}, tolerance)


def _entry(row: Any) -> Entry | None:
    if not _is(row, dict) or not set(_FIELDS) <= set(row):
        return None
    rule, label, mark, claim, ns, share, occurrences = (row[f] for f in _FIELDS)
    if not all(_is(text, str) for text in (rule, label, mark)):
        return None
    if claim not in [known.value for known in Claim] or not _is(occurrences, int):
        return None
    if not (ns is None or _is(ns, int)) or not (
        share is None or _is(share, int, float)
    ):
        return None
    return Entry(rule, label, mark, Measure(claim, ns, share, occurrences))


def _is(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _unreadable(path: Path, why: str) -> BaselineError:
    return BaselineError(
        f"{path} can't be read as a baseline ({why})",
        hint=f"write one: streamlint lint TRACE --write-baseline {path}",
    )


def parse_tolerance(text: str) -> float:
    """A tolerance as people write it, "10%" or "0.1"; raises ValueError."""
    number = text.strip()
    value = float(number.rstrip("% ")) / (100 if number.endswith("%") else 1)
    if not 0 <= value < math.inf:
        raise ValueError(text)
    return value

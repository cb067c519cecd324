"""Which findings are not reported, and why: too small, or allowed with a reason.

A finding groups all occurrences of one cause at one place. An allowance hides it only
if each of its matchers fits every one of them, so it never hides what it doesn't name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import date
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
import polars as pl

from streamlint.escape import without_home
from streamlint.findings import Claim, Finding, Rows, Severity, SourceFrame
from streamlint.intervals import Bools
from streamlint.steady import column
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, user_frames

_LINES = re.compile(r"(.+?):(\d+)(?:-(\d+))?")
_RANGE = re.compile(r"streamlint: allow\s*=\s*(\S*)\s*(.*)", re.DOTALL)


class Saving(NamedTuple):
    """The least that fixing a finding has to save, in ns or as a share (0 to 1)."""

    ns: int | None = None
    share: float | None = None

    def misses(self, finding: Finding) -> bool:
        """Whether ``finding`` costs less.

        Never a fault of correctness, nor one that no time is claimed for.
        """
        cost = finding.cost
        if finding.severity is Severity.ERROR or cost.claim is Claim.NONE:
            return False
        if cost.ns is not None and self.ns is not None:
            return cost.ns < self.ns
        if cost.share is not None and self.share is not None:
            return cost.share < self.share
        return False


NO_SAVING = Saving()


class Allowance(NamedTuple):
    """Findings of ``rule`` that a user allows, and why.

    ``origin`` says where that is written, ``until`` the last day on which it holds.
    The matchers are glob patterns; one with patterns fits if any of them does.
    ``problem`` says what is wrong with one that allows nothing.
    """

    rule: str
    reason: str
    origin: str
    until: date | None = None
    kernel: tuple[str, ...] = ()
    nvtx: tuple[str, ...] = ()
    thread: tuple[str, ...] = ()
    stream: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    problem: str | None = None


MATCHERS = ("kernel", "nvtx", "thread", "stream", "source")
"""The fields of an `Allowance` that are patterns."""


class Suppressed(NamedTuple):
    """A finding that is allowed, why, and where that is written."""

    finding: Finding
    reason: str
    origin: str


class Use(NamedTuple):
    """What became of an allowance in one trace.

    ``state`` is "matched" (``findings`` of them), "unmatched", "not judged" (the rule
    couldn't tell, or of a part of the trace only), "expired" or "invalid".
    """

    allowance: Allowance
    state: str
    findings: int = 0


class Policy(NamedTuple):
    """What becomes of findings.

    ``path_map`` has pairs of what recorded source paths begin with and what to put
    there; the first that fits holds.
    """

    min_saving: Saving = NO_SAVING
    path_map: tuple[tuple[str, str], ...] = ()
    allowances: tuple[Allowance, ...] = ()

    def placed(self, finding: Finding) -> Finding:
        """``finding`` with its source paths mapped, and without its rows."""
        source = tuple(map(self.mapped, finding.where.source))
        stack = tuple(map(self.mapped, finding.where.stack))
        where = finding.where._replace(source=source, stack=stack, rows=None)
        return replace(finding, where=where)

    def mapped(self, frame: SourceFrame) -> SourceFrame:
        """``frame`` with its path mapped."""
        for folder, new in self.path_map:
            old = without_home(folder)  # as all texts of a trace
            if frame.file == old or frame.file.startswith((f"{old}/", f"{old}\\")):
                rest = frame.file[len(old) :].replace("\\", "/").lstrip("/")
                folder = "" if new in ("", ".") else f"{new.rstrip('/')}/"
                return frame._replace(file=f"{folder}{rest}" if rest else new)
        return frame


class Gate:
    """Sorts the findings of one trace into reported and suppressed ones."""

    def __init__(self, trace: Trace, policy: Policy, rules: Iterable[str]) -> None:
        """``rules`` are the names of all rules that exist, judged or not."""
        self._trace = trace
        self._policy = policy
        today = date.today() if policy.allowances else date.min
        marked = _marked(trace, frozenset(rules))
        self._entries = [
            (entry, entry.until is not None and entry.until < today)
            for entry in policy.allowances
        ]
        self._marked = marked
        self._hits: dict[Allowance, int] = {}

    def suppressed(self, rule: str, finding: Finding) -> Suppressed | None:
        """Why ``finding`` is not reported; None where it is."""
        rows = finding.where.rows
        for entry, expired in self._entries:
            if entry.rule == rule and not expired and self._fits(entry, rows):
                self._hit(entry)
                return Suppressed(finding, entry.reason, entry.origin)
        here = [e for e in self._marked if e.rule == rule and not e.problem]
        if not here or rows is None:
            return None
        calls = self._calls(rows)
        inside = {entry: self._inside(calls, _in(entry.nvtx)) for entry in here}
        if not calls.height or not np.logical_or.reduce([*inside.values()]).all():
            return None
        used = [entry for entry in here if inside[entry].any()]
        for entry in used:
            self._hit(entry)
        reasons = dict.fromkeys(entry.reason for entry in used)
        origins = dict.fromkeys(entry.origin for entry in used)
        return Suppressed(finding, "; ".join(reasons), "; ".join(origins))

    def uses(self, judged: dict[str, bool]) -> tuple[Use, ...]:
        """What became of the allowances of these rules, by whether they could tell."""
        found: list[Use] = []
        for entry, expired in (*self._entries, *((e, False) for e in self._marked)):
            hits = self._hits.get(entry, 0)
            if entry.problem:
                found.append(Use(entry, "invalid"))
            elif entry.rule not in judged:
                continue
            elif expired:
                found.append(Use(entry, "expired"))
            elif hits:
                found.append(Use(entry, "matched", hits))
            else:
                state = "unmatched" if judged[entry.rule] else "not judged"
                found.append(Use(entry, state))
        return tuple(found)

    def _hit(self, entry: Allowance) -> None:
        self._hits[entry] = self._hits.get(entry, 0) + 1

    def _fits(self, entry: Allowance, rows: Rows | None) -> bool:
        """Whether every matcher of ``entry`` fits every place of a finding."""
        if not any(getattr(entry, matcher) for matcher in MATCHERS):
            return True
        if rows is None:
            return False
        calls = self._calls(rows)
        if entry.kernel and not _all(_kernels(rows), entry.kernel, fnmatchcase):
            return False
        if entry.stream and not _all(_streams(rows), entry.stream, fnmatchcase):
            return False
        if entry.thread and not self._of_threads(calls, entry.thread):
            return False
        if entry.source and not self._at(calls, entry.source):
            return False
        if not entry.nvtx:
            return True
        inside = self._inside(calls, lambda text: _any(text, entry.nvtx, fnmatchcase))
        return bool(len(inside)) and bool(inside.all())

    def _calls(self, rows: Rows) -> pl.DataFrame:
        """The calls of a finding, none where those of some operations are unknown."""
        calls = rows.calls
        ops = None if rows.ops is None else rows.ops.collect()
        if ops is None or not ops.height:
            return self._trace.runtime_calls.clear() if calls is None else calls
        if ops["issue_ns"].null_count():
            return self._trace.runtime_calls.clear()
        if calls is None or not calls.height:
            return calls_behind(self._trace, ops)
        return calls

    def _of_threads(self, calls: pl.DataFrame, patterns: tuple[str, ...]) -> bool:
        """Whether the number or the name of each thread fits."""
        names = {(pid, tid): name for pid, tid, name in self._trace.threads.iter_rows()}
        threads = set(calls.select("pid", "tid").iter_rows())
        return bool(threads) and all(
            _any(str(tid), patterns, fnmatchcase)
            or _any(names.get((pid, tid)) or "", patterns, fnmatchcase)
            for pid, tid in threads
        )

    def _at(self, calls: pl.DataFrame, patterns: tuple[str, ...]) -> bool:
        """Whether each call has a place in the user's code, and it fits."""
        keys = set(calls.select("pid", "correlation_id").iter_rows())
        frames = user_frames(self._trace, calls)
        places = {self._policy.mapped(frame) for frame in frames.values()}
        return keys <= frames.keys() and _all(places, patterns, _is_at)

    def _inside(self, calls: pl.DataFrame, wanted: Callable[[str], bool]) -> Bools:
        """For each call, whether a range with such a text on its thread holds it."""
        ranges = self._trace.nvtx_ranges.filter(~pl.col("mark"))
        ranges = pl.concat([ranges, self._trace.allow_ranges])
        texts = [text for text in ranges["text"].unique() if wanted(text)]
        ranges = ranges.filter(pl.col("text").is_in(texts)).sort("start_ns")
        inside = np.zeros(calls.height, dtype=np.bool_)
        calls = calls.with_row_index("row")
        for (pid, tid), here in calls.group_by("pid", "tid"):
            own = ranges.filter((pl.col("pid") == pid) & (pl.col("tid") == tid))
            if not own.height:
                continue
            before = np.searchsorted(
                column(own, "start_ns"), column(here, "start_ns"), side="right"
            )
            reach = np.maximum.accumulate(column(own, "end_ns"))
            held = reach[np.maximum(before - 1, 0)] >= column(here, "end_ns")
            inside[here["row"].to_numpy()] = (before > 0) & held
        return inside


def _marked(trace: Trace, rules: frozenset[str]) -> list[Allowance]:
    """What NVTX ranges of the program itself allow, one for each text."""
    found: list[Allowance] = []
    for text in trace.allow_ranges["text"].unique(maintain_order=True):
        parts = _RANGE.fullmatch(text)
        rule, reason = parts.groups() if parts else ("", "")
        problem = None
        if rule not in rules:
            problem = f"names no rule: {rule or 'nothing'}"
        elif not reason.strip():
            problem = "gives no reason"
        found.append(
            Allowance(
                rule=rule,
                reason=reason.strip(),
                origin=f"NVTX range {text.strip()}",
                nvtx=(text,),
                problem=problem,
            )
        )
    return found


def _in(texts: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda text: text in texts


def _kernels(rows: Rows) -> set[str]:
    if rows.ops is None:
        return set()
    kernels = rows.ops.filter(pl.col("kind") == "kernel").select("name").unique()
    return {*kernels.collect()["name"]}


def _streams(rows: Rows) -> set[str]:
    for frame in (None if rows.ops is None else rows.ops.collect(), rows.calls):
        if frame is not None and frame.height and "stream_id" in frame.columns:
            return {str(stream) for stream in frame["stream_id"].unique()}
    return set()


def _any(value: str, patterns: Iterable[str], fits: Callable[[str, str], bool]) -> bool:
    return any(fits(value, pattern) for pattern in patterns)


def _all(
    values: set[str] | set[SourceFrame],
    patterns: tuple[str, ...],
    fits: Callable[..., bool],
) -> bool:
    """Whether there are values and each fits a pattern."""
    return bool(values) and all(
        any(fits(value, pattern) for pattern in patterns) for value in values
    )


def _is_at(frame: SourceFrame, pattern: str) -> bool:
    """Whether ``frame`` is where "src/engine.py:120" (or :120-140, or no line) says.

    A path that doesn't begin with a slash fits below any folder.
    """
    lines = _LINES.fullmatch(pattern)
    path = lines[1] if lines else pattern
    file = frame.file.replace("\\", "/")
    if not fnmatchcase(file, path) and not fnmatchcase(file, f"*/{path}"):
        return False
    if lines is None:
        return True
    first, last = int(lines[2]), int(lines[3] or lines[2])
    return frame.line is not None and first <= frame.line <= last

"""Runs rules over a trace and turns whatever happens into outcomes."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import polars as pl

from streamlint.baseline import Baseline, Entry, Standing
from streamlint.changes import Change
from streamlint.completeness import mostly_lost, no_gpu_work, weighed
from streamlint.cost import trusted
from streamlint.errors import StreamlintError, TraceError
from streamlint.findings import (
    RECORDED,
    Claim,
    Crashed,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.fingerprint import natural
from streamlint.machine import free_memory
from streamlint.overview import Overview, overview
from streamlint.registry import catalog
from streamlint.replay import Replay, ReplayNeeded, replay_of
from streamlint.rule import Rule
from streamlint.settings import DEFAULTS, WHOLE, Scope, Settings
from streamlint.steady import regions
from streamlint.suppression import Gate, Policy, Suppressed, Use
from streamlint.trace.capture import Capture
from streamlint.trace.model import TableRead, Times, Trace
from streamlint.trace.part import MARGIN_NS
from streamlint.where import notes

_ALL = Policy()

ROW_BYTES, ROW_BYTES_NO_REPLAY = 620, 380
"""Memory of a lint at its peak for each row that it reads (`Trace.rows`).

Measured on generated traces of a million kernels (docs/benchmarks.md); of larger ones
each row takes less.
"""
ROW_BYTES_PASSED = 150
"""The same of rows that a time leaves out (`Trace.read_only`): 105 to 150 measured."""
TWO_FROM_ROWS = 200_000
"""Rows of a trace from which on a second thread is worth its start."""
_NEEDS_REPLAY = NotAssessed("needs the replay", "judge again without --no-replay")


class Judgement(NamedTuple):
    """What one rule said: findings, that it can't tell, a crash, or nothing.

    ``below`` are findings that save less than the policy asks for, ``suppressed``
    those that it allows.
    """

    rule: Rule
    findings: tuple[Finding, ...] = ()
    not_assessed: NotAssessed | None = None
    crashed: Crashed | None = None
    below: tuple[Finding, ...] = ()
    suppressed: tuple[Suppressed, ...] = ()

    @property
    def silent(self) -> bool:
        """Whether the rule was able to judge and found nothing."""
        found = self.findings or self.below or self.suppressed
        return self.judged and not found

    @property
    def judged(self) -> bool:
        """Whether the rule was able to judge."""
        return self.not_assessed is None and self.crashed is None


class Model(NamedTuple):
    """How well the replay fits a trace, and what all fixes save together.

    ``error`` is its GPU span over the recorded one, less 1. ``joint_ns`` is the
    time that fixing the ``joint_fixes`` what-if findings of the recorded run together
    saves, less than the sum of theirs; None where there are not two, or the error is
    too large.
    """

    error: float
    joint_fixes: int = 0
    joint_ns: int | None = None
    joint_share: float | None = None


class Report(NamedTuple):
    """Everything that was said about one trace; needs the trace no more.

    ``model`` is None where no cost was replayed, ``baseline`` where none was named;
    ``uses`` says what became of the allowances of the rules that were chosen, ``scope``
    which part was judged, ``tables`` how those that were needed came out, ``notes``
    what could not be had of what was asked for, ``url`` where the trace was fetched,
    None for a file.
    """

    path: Path
    capture: Capture
    overview: Overview
    judgements: tuple[Judgement, ...]
    model: Model | None = None
    baseline: Baseline | None = None
    uses: tuple[Use, ...] = ()
    scope: Scope = WHOLE
    notes: tuple[str, ...] = ()
    url: str | None = None
    tables: tuple[TableRead, ...] = ()

    @property
    def findings(self) -> list[tuple[Rule, Finding]]:
        """All findings, the most severe and then the dearest first."""
        pairs = [(j.rule, finding) for j in self.judgements for finding in j.findings]
        return sorted(
            pairs, key=lambda p: (p[1].severity.rank, -(p[1].cost.ns or 0), p[0].name)
        )

    def standing(self, rule: Rule, finding: Finding) -> Standing | None:
        """A finding against the baseline, None without one."""
        if self.baseline is None:
            return None
        return self.baseline.standing(rule.name, finding)

    @property
    def fresh(self) -> list[tuple[Rule, Finding]]:
        """The findings, in their order, that the baseline does not know as they are."""
        return [p for p in self.findings if self.standing(*p) is not Standing.KNOWN]

    @property
    def suppressed(self) -> list[tuple[Rule, Suppressed]]:
        """All findings that are allowed, in rule order."""
        return [(j.rule, one) for j in self.judgements for one in j.suppressed]

    @property
    def below(self) -> int:
        """How many findings save less than the policy asks for."""
        return sum(len(j.below) for j in self.judgements)

    @property
    def not_assessed(self) -> list[tuple[Rule, NotAssessed]]:
        """Rules that could not tell, in rule order."""
        return [
            (j.rule, j.not_assessed)
            for j in self.judgements
            if j.not_assessed is not None
        ]

    @property
    def crashed(self) -> list[tuple[Rule, Crashed]]:
        """Rules with a bug, in rule order."""
        return [(j.rule, j.crashed) for j in self.judgements if j.crashed is not None]

    @property
    def assessed_any(self) -> bool:
        """Whether any rule about the program could be judged."""
        judged = [j for j in self.judgements if not j.rule.judges_capture]
        if not judged:
            judged = list(self.judgements)
        return any(j.judged for j in judged)

    def exit_code(self, fail_on: Severity) -> int:
        """0 clean, 1 fresh findings from ``fail_on`` up, 2 a crash, 3 none assessed."""
        if self.crashed:
            return 2
        if any(f.severity.at_least(fail_on) for _, f in self.fresh):
            return 1
        return 0 if self.assessed_any or not self.judgements else 3


def gone(baseline: Baseline, reports: Sequence[Report]) -> list[Entry]:
    """Entries that no trace shows, though their rules were assessed in all of them.

    None where only a part of a trace was judged.
    """
    if any(report.scope.explicit for report in reports):
        return []
    judged = [{j.rule.name for j in r.judgements if j.judged} for r in reports]
    sure = set[str].intersection(*judged) if judged else set()
    seen = {
        finding.fingerprint(j.rule.name)
        for report in reports
        for j in report.judgements
        for finding in (*j.findings, *j.below, *(s.finding for s in j.suppressed))
    }
    return [
        entry
        for entry in baseline.entries.values()
        if entry.rule in sure and entry.fingerprint not in seen
    ]


def lint(
    trace: Trace,
    rules: Iterable[Rule],
    on_rule: Callable[[str], None] = lambda _: None,
    *,
    with_model: bool = False,
    settings: Settings = DEFAULTS,
    policy: Policy = _ALL,
    known: Collection[str] = (),
    partly: bool = False,
) -> Report:
    """Judge ``trace`` by every rule; ``on_rule`` is told each name before it runs.

    ``with_model`` replays the run even if no finding needs it, for its error (unless
    the settings want no replay).
    ``settings`` say how rules judge, ``policy`` what becomes of their findings;
    ``known`` names all rules that exist, if there are more than without loose files.
    """
    rules = tuple(rules)
    known = {*known, *(rule.name for rule in (*catalog().rules, *rules))}
    trace.settings = settings
    if partly:
        trace.read_only(settings.scope.time)
    _refuse_too_large(trace)
    trace.refuse_a_crowd()
    if settings.scope != WHOLE:
        regions(trace)  # before any rule: says what the trace lacks of it
    gate = Gate(trace, policy, known)
    judgements = [
        _sorted_out(judgement, policy, gate)
        for judgement in _judgements(trace, rules, on_rule)
    ]
    changes = [
        finding.change
        for judgement in judgements
        for finding in judgement.findings
        if finding.change is not None
        and finding.cost.claim is Claim.WHAT_IF
        # Their replay also takes out what recording adds: no part of the recorded run.
        and finding.cost.basis == RECORDED
    ]
    replayed = any(f.change is not None for j in judgements for f in j.findings)
    model = None
    if settings.replay and (replayed or with_model) and trace.gpu_ops.height:
        model = _model(replay_of(trace), changes)
    return Report(
        trace.path,
        trace.capture,
        overview(trace),
        tuple(judgements),
        model,
        uses=gate.uses(
            {
                # In a part of a trace, an allowance may just have nothing to allow.
                j.rule.name: j.judged and not settings.scope.explicit
                for j in judgements
            }
        ),
        scope=settings.scope,
        notes=notes(trace),
        tables=trace.tables_read,
    )


def _refuse_too_large(trace: Trace) -> None:
    """Raise `TraceError` if judging so many rows takes more memory than there is."""
    free = free_memory()
    need = _memory_need(trace, trace.time, replay=trace.settings.replay)
    if free is None or need <= free:
        return
    ways: list[str] = []
    if trace.settings.replay:
        least = _memory_need(trace, trace.time, replay=False)
        ways.append(f"lint with --no-replay, which takes {_gigabytes(least)}")
    shorter = _example_time(trace)
    some = _memory_need(trace, shorter, replay=trace.settings.replay)
    if shorter is not None and some < min(need, free):
        start, end = (f"{at / 1e9:.9f}".rstrip("0").rstrip(".") for at in shorter)
        ways.append(
            f"judge a part, such as --time {start}s:{end}s, "
            f"which takes {_gigabytes(some)}"
        )
    else:
        ways.append("export a part of the report: nsys export --times=START/END")
    raise TraceError(
        f"judging the {trace.rows:,} rows of {trace.path.name} takes about "
        f"{_gigabytes(need)} of memory, of which {_gigabytes(free)} is free",
        hint=", or ".join(ways),
    )


def _memory_need(trace: Trace, time: Times | None, *, replay: bool) -> int:
    """Bytes that judging ``trace`` takes at its peak if only ``time`` is read."""
    each = ROW_BYTES if replay else ROW_BYTES_NO_REPLAY
    if time is None:
        return trace.rows * each
    first, last = trace.call_times
    part = 1.0
    if first is not None and last is not None and last > first:
        start = first if time[0] is None else max(first, time[0] - MARGIN_NS)
        end = last if time[1] is None else min(last, time[1] + MARGIN_NS)
        part = max(0, end - start) / (last - first)
    return trace.rows * min(each, ROW_BYTES_PASSED + round(part * each))


def _example_time(trace: Trace) -> tuple[int, int] | None:
    """Some time in the middle of a trace, where times can be told and judged."""
    first, last = trace.call_times
    scope = trace.settings.scope
    if first is None or last is None or (scope.time is not None and trace.time is None):
        return None
    if scope._replace(start_ns=first, end_ns=last).time is None:
        return None
    # Whole thousandths of the trace are easy to read and to change.
    unit = 10 ** max(0, len(str(max(0, last - first))) - 3)
    start = (first + last) // 2 // unit * unit
    return start, start + max(1, (last - first) // 50 // unit) * unit


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def _sorted_out(judgement: Judgement, policy: Policy, gate: Gate) -> Judgement:
    """The findings by what the policy makes of them; an allowed one is just that."""
    kept: list[Finding] = []
    below: list[Finding] = []
    suppressed: list[Suppressed] = []
    for finding in judgement.findings:
        allowed = gate.suppressed(judgement.rule.name, finding)
        placed = policy.placed(finding)
        if allowed is not None:
            suppressed.append(allowed._replace(finding=placed))
        elif policy.min_saving.misses(finding):
            below.append(placed)
        else:
            kept.append(placed)
    return judgement._replace(
        findings=tuple(kept), below=tuple(below), suppressed=tuple(suppressed)
    )


def _model(replay: Replay, changes: list[Change]) -> Model:
    if len(changes) < 2 or not trusted(replay.error):
        return Model(replay.error)
    recorded = replay.span_ns(replay.recorded)
    saved = max(0, recorded - replay.span_ns(replay.run(changes)))
    return Model(replay.error, len(changes), saved, saved / max(1, recorded))


def _judgements(
    trace: Trace, rules: Sequence[Rule], on_rule: Callable[[str], None]
) -> Iterator[Judgement]:
    """What each rule says, in their order; of a large trace two are at work at a time.

    Half of their time, polars has work for one processor only. Of more rules at a time,
    each would wait for the interpreter, and what they hold would fill the memory.
    """

    def told(rule: Rule) -> Judgement:
        on_rule(rule.name)
        return _judge(trace, rule)

    if trace.rows < TWO_FROM_ROWS or pl.thread_pool_size() < 2 or len(rules) < 2:
        yield from map(told, rules)
        return
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(2)
    try:
        yield from pool.map(told, rules)
    except Exception:
        pool.shutdown(cancel_futures=True)  # the trace may be closed then
        raise
    finally:
        # Whoever interrupts a lint doesn't wait for the rules at work.
        pool.shutdown(wait=False, cancel_futures=True)


def _judge(trace: Trace, rule: Rule) -> Judgement:
    try:
        unable = None if rule.judges_capture else no_gpu_work(trace)
        for name in rule.needs:
            unable = unable or trace.missing(name)
        if unable is None and not rule.judges_capture:
            unable = mostly_lost(trace, rule.needs)
        if unable is not None:
            return Judgement(rule, not_assessed=unable)
        outcome = rule.check(trace)
        if not isinstance(outcome, NotAssessed) and not rule.judges_capture:
            outcome = weighed(trace, rule.needs, outcome)
        if isinstance(outcome, NotAssessed):
            return Judgement(rule, not_assessed=outcome)
        return Judgement(rule, findings=_told_apart(rule, outcome))
    except ReplayNeeded:
        return Judgement(rule, not_assessed=_NEEDS_REPLAY)
    except StreamlintError:
        raise  # the trace itself can't be read further
    # A bug in one rule must not hide the others; polars panics are BaseExceptions.
    except (Exception, pl.exceptions.PanicException) as error:
        summary = f"{type(error).__name__} in rule {rule.name}"
        return Judgement(rule, crashed=Crashed(summary, traceback.format_exc()))


def _told_apart(rule: Rule, findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, those of a process that would share a fingerprint counted."""
    if len(findings) < 2:
        return tuple(findings)
    alike: dict[tuple[int | None, str], list[int]] = defaultdict(list)
    for index, finding in enumerate(findings):
        alike[finding.where.pid, finding.fingerprint(rule.name)].append(index)
    told = list(findings)
    for indices in alike.values():
        # By their places in the code, which keep their order when lines move.
        indices.sort(key=lambda index: natural(findings[index].identity))
        for ordinal, index in enumerate(indices[1:], start=1):
            told[index] = replace(findings[index], ordinal=ordinal)
    return tuple(told)

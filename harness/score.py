"""Scores the rules on the recorded pairs: what they say against what was measured.

Needs no GPU. Costs are compared as shares: a rule's of the judged region of the
trace, which may leave out a first iteration, with the measured one of the whole
region. Profiling itself changes what a fault costs, so both savings stand side by
side; a cost is judged by that of the run that it is of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamlint.cost import MIN_SHARE
from streamlint.engine import Report, lint
from streamlint.errors import StreamlintError, UsageError
from streamlint.findings import RECORDED, UNPROFILED, Claim, Finding, Severity
from streamlint.harness.collect import PROVENANCE
from streamlint.harness.results import FULL, PLAIN
from streamlint.harness.workloads import VARIANTS, find
from streamlint.registry import all_rules
from streamlint.trace import open_trace

MAX_ERROR = 0.15
"""A what-if may be off by this part of the measured saving."""
_RUNS = {RECORDED: ("stored", FULL), UNPROFILED: (PLAIN, PLAIN)}
"""Which region times of a trace are the ones to go by, and which tell their range."""


@dataclass(frozen=True, slots=True)
class Saving:
    """A time saved, and which part of the region it is.

    A measured one lies between the shares ``low`` and ``high``: every bad run is
    compared with every fixed one.
    """

    us: float
    share: float
    low: float | None = None
    high: float | None = None

    @property
    def least(self) -> float:
        """The smallest share that was measured."""
        return self.share if self.low is None else self.low

    @property
    def most(self) -> float:
        """The largest share that was measured."""
        return self.share if self.high is None else self.high


@dataclass(frozen=True, slots=True)
class Row:
    """One pair: what the rule says of it, what was measured, what is wrong.

    ``basis`` is the run that the rule's cost is of, `RECORDED` or `UNPROFILED`.
    """

    pair: str
    rule: str
    fires: str
    fixed: tuple[str, ...]
    claim: str
    predicted: Saving | None
    basis: str
    profiled: Saving | None
    unprofiled: Saving | None
    silent: str
    problems: tuple[str, ...]

    @property
    def measured(self) -> Saving | None:
        """What was saved in the run that the rule's cost is of."""
        return self.unprofiled if self.basis == UNPROFILED else self.profiled

    @property
    def ratio(self) -> float | None:
        """Predicted over measured, where enough was saved to compare."""
        if self.predicted is None or self.measured is None:
            return None
        if self.measured.share < MIN_SHARE:
            return None
        return self.predicted.share / self.measured.share

    @property
    def proves(self) -> bool:
        """Whether the rule is shown to work by this pair."""
        return not self.problems and not self.silent


@dataclass(frozen=True, slots=True)
class Score:
    """All rows, and why the rules without one have none."""

    rows: tuple[Row, ...]
    unproven: dict[str, str] = field(default_factory=dict)
    recorded_with: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong with any pair."""
        return bool(self.rows) and not any(row.problems for row in self.rows)

    @property
    def proven(self) -> int:
        """How many rules some pair proves."""
        return len({row.rule for row in self.rows if row.proves})


def score(samples: Path, say: Callable[[str], None] = lambda _: None) -> Score:
    """Lint every pair below ``samples``; ``say`` is told each before.

    Raises `UsageError` if there are no pairs.
    """
    folders = sorted({file.parent for file in samples.rglob("bad.sqlite")})
    if not folders:
        raise UsageError(
            f"{samples} holds no pairs of traces",
            hint="record them with `streamlint harness run`, or name their folder",
        )
    rows, machines = [], set()
    for folder in folders:
        name = folder.relative_to(samples).as_posix()
        say(name)
        note = _provenance(folder)
        rows.append(_row(name, folder, note))
        if machine := _machine(note):
            machines.add(machine)
    proven = {row.rule for row in rows if row.proves or row.problems}
    reasons = _reasons(rows)
    unproven = {
        rule.name: "judges the recording, not a program"
        if rule.judges_capture
        else reasons.get(rule.name, "no pair is recorded")
        for rule in all_rules()
        if rule.name not in proven
    }
    return Score(tuple(rows), unproven, tuple(sorted(machines)))


def _row(name: str, folder: Path, note: dict[str, dict[str, Any]]) -> Row:
    rule = name.partition("/")[0]
    silent = str(note.get("bad", {}).get("silent") or "")
    problems: list[str] = []
    reports: dict[str, Report] = {}
    for variant in VARIANTS:
        try:
            reports[variant] = _lint(folder / f"{variant}.sqlite")
        except StreamlintError as error:
            problems.append(f"{variant}: {error.message}")
    fires = "-"
    found: list[Finding] = []
    if "bad" in reports:
        fires, found = _fires(rule, reports["bad"], reports.get("fixed"))
        if silent and fires == "yes":
            problems.append(f"fires on bad, though {silent}")
        if not silent and fires not in ("yes", "info"):
            problems.append(f"bad: {fires}")
    dirty = _above_info(reports["fixed"]) if "fixed" in reports else ()
    problems += [f"fixed: {what}" for what in dirty]
    claim, predicted, basis = _prediction(found)
    measured = {run: _measured(note, *keys) for run, keys in _RUNS.items()}
    if not note:
        problems.append(f"no {PROVENANCE} beside the traces")
    elif wrong := _wrong(claim, predicted, measured[basis]):
        problems.append(wrong)
    return Row(
        pair=name,
        rule=rule,
        fires=fires,
        fixed=dirty,
        claim=claim.value if claim else "-",
        predicted=predicted,
        basis=basis,
        profiled=measured[RECORDED],
        unprofiled=measured[UNPROFILED],
        silent=silent,
        problems=tuple(problems),
    )


def _lint(path: Path) -> Report:
    trace = open_trace(path)
    try:
        return lint(trace, all_rules())
    finally:
        trace.close()


def _fires(rule: str, bad: Report, fixed: Report | None) -> tuple[str, list[Finding]]:
    """Whether the rule speaks up, in a word, and its findings.

    A finding for information counts if the fixed twin has none: some rules only inform.
    """
    judgement = next((j for j in bad.judgements if j.rule.name == rule), None)
    if judgement is None:
        return "there is no such rule", []
    if judgement.crashed is not None:
        return "the rule crashed", []
    if judgement.not_assessed is not None:
        return f"not assessed: {judgement.not_assessed.reason}", []
    found = list(judgement.findings)
    loud = [f for f in found if f.severity is not Severity.INFO]
    if loud:
        return "yes", loud
    if not found:
        return "no finding", []
    quiet = fixed is not None and not any(r.name == rule for r, _ in fixed.findings)
    return ("info" if quiet else "informs on both"), found


def _above_info(report: Report) -> tuple[str, ...]:
    """The rules that find fault with a trace, with their severity."""
    found = [
        f"{rule.name} ({finding.severity.value})"
        for rule, finding in report.findings
        if finding.severity is not Severity.INFO
    ]
    found += [f"{rule.name} (crashed)" for rule, _ in report.crashed]
    return tuple(dict.fromkeys(found))


def _prediction(
    findings: Iterable[Finding],
) -> tuple[Claim | None, Saving | None, str]:
    """What fixing all findings of a rule saves, for the process that saves most.

    With the run that it is of. A what-if beside bounds of one kind sums up to such a
    bound; bounds of both kinds, and costs of different runs, to none.
    """
    sums: dict[int | None, tuple[float, float]] = {}
    claims, bases = set(), set()
    for finding in findings:
        if finding.cost.ns is None or finding.cost.share is None:
            continue
        us, share = sums.get(finding.where.pid, (0.0, 0.0))
        more = (us + finding.cost.ns / 1e3, share + finding.cost.share)
        sums[finding.where.pid] = more
        claims.add(finding.cost.claim)
        bases.add(finding.cost.basis)
    if not sums:
        return Claim.NONE, None, RECORDED
    bounds = claims - {Claim.WHAT_IF}
    one = len(bounds) < 2 and len(bases) < 2
    claim = next(iter(bounds), Claim.WHAT_IF) if one else None
    basis = UNPROFILED if bases == {UNPROFILED} else RECORDED
    return claim, Saving(*max(sums.values())), basis


def _measured(
    note: dict[str, dict[str, Any]], chosen: str, ranging: str
) -> Saving | None:
    """What the fix saved in these runs."""
    us: list[float] = []
    ranges: list[tuple[float, float]] = []
    for variant in VARIANTS:
        times = note.get(variant, {}).get("region_us", {})
        found, spread = times.get(chosen), times.get(ranging, {})
        if isinstance(found, dict):
            found = found.get("median")
        if not isinstance(found, int | float) or found <= 0:
            return None
        us.append(float(found))
        around = [float(spread.get(end, found)) for end in ("min", "max")]
        ranges.append((min(found, around[0]), max(found, around[1])))
    (bad_min, bad_max), (fixed_min, fixed_max) = ranges
    return Saving(
        us=us[0] - us[1],
        share=1 - us[1] / us[0],
        low=1 - fixed_max / bad_min,
        high=1 - fixed_min / bad_max,
    )


def _wrong(
    claim: Claim | None, predicted: Saving | None, measured: Saving | None
) -> str:
    """What is wrong with a prediction; nothing if it holds."""
    if predicted is None or claim not in (
        *(Claim.WHAT_IF, Claim.UPPER_BOUND, Claim.LOWER_BOUND),
    ):
        return ""
    if measured is None:
        return "the saving was not measured"
    share = predicted.share
    if claim is Claim.WHAT_IF:
        allowed = max(MAX_ERROR * abs(measured.share), MIN_SHARE)
        if abs(over := share - measured.share) > allowed:
            return f"the what-if is off by {_points(over)} of the region"
    if claim is Claim.UPPER_BOUND and (over := share - measured.least) < -MIN_SHARE:
        return f"the upper bound is {_points(over)} below what was saved"
    if claim is Claim.LOWER_BOUND and (over := share - measured.most) > MIN_SHARE:
        return f"the lower bound is {_points(over)} above what was saved"
    return ""


def _points(share: float) -> str:
    return f"{100 * abs(share):.1f} %"


def _provenance(folder: Path) -> dict[str, dict[str, Any]]:
    """What is known of both traces, by variant."""
    try:
        found = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))
        return {variant: dict(found[f"{variant}.sqlite"]) for variant in VARIANTS}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _machine(note: dict[str, dict[str, Any]]) -> str:
    facts = note.get("bad")
    if not facts:
        return ""
    return (
        f"{facts.get('gpu') or 'unknown GPU'}, driver {facts.get('driver') or '?'}, "
        f"CUDA {facts.get('cuda') or '?'}, nsys {facts.get('nsys_exporter') or '?'}"
    )


def _reasons(rows: Sequence[Row]) -> dict[str, str]:
    """Why rules have no pair that proves them, as their workloads say."""
    reasons: dict[str, str] = {}
    for workload in find()[0]:
        if workload.notes:
            reasons.setdefault(workload.rule, " ".join(workload.notes))
    return reasons | {row.rule: row.silent for row in rows if row.silent}


# Rendering ------------------------------------------------------------------------

_HEADS = (
    *("pair", "on bad", "on fixed", "claim", "predicted", "measured, profiled"),
    *("ratio", "measured, not profiled", "verdict"),
)


def _cells(row: Row) -> tuple[str, ...]:
    fires = {"yes": "fires", "info": "informs"}.get(row.fires, "silent")
    ratio = row.ratio
    return (
        row.pair,
        fires,
        "fires" if row.fixed else "silent",
        row.claim + (", not profiled" if row.basis == UNPROFILED else ""),
        _saving(row.predicted),
        _saving(row.profiled),
        "-" if ratio is None else f"{ratio:.2f}",
        _saving(row.unprofiled),
        "WRONG" if row.problems else "ok",
    )


def _saving(saving: Saving | None) -> str:
    if saving is None:
        return "-"
    share, low, high = (
        f"{100 * part:.1f}" for part in (saving.share, saving.least, saving.most)
    )
    words = f"{saving.us / 1e3:.2f} ms, {share} %"
    return words if low == high else f"{words} ({low} to {high})"


def _summary(result: Score) -> str:
    wrong = sum(bool(row.problems) for row in result.rows)
    return (
        f"Rules proven: {result.proven}, without proof: {len(result.unproven)}. "
        f"Pairs: {len(result.rows)}, wrong: {wrong}."
    )


def text(result: Score) -> str:
    """The table for a terminal."""
    rows = [_HEADS, *map(_cells, result.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    out = [line.rstrip() for line in lines]
    for row in result.rows:
        out += [f"WRONG {row.pair}: {problem}" for problem in row.problems]
    out += [f"no proof of {rule}: {why}" for rule, why in result.unproven.items()]
    return "\n".join([*out, _summary(result)]) + "\n"


def markdown(result: Score) -> str:
    """The page `docs/calibration.md`."""
    machines = result.recorded_with
    out = [
        "# What the rules say against what was measured",
        "",
        "Every rule is shown a pair of programs that differ in one fault. The table is "
        "what `streamlint harness score --markdown` prints: it lints both traces and "
        "compares the saving that the rule predicts with the one measured.",
        "",
        "- *Predicted* is what the findings of the rule on `bad` say together, and "
        "which part of the judged region that is.",
        "- *Measured* is the time of the region in `bad` less that in `fixed`: "
        "*profiled* in the runs that the traces show, *not profiled* the medians of "
        "all repeats in several processes without nsys. Recording slows calls down, "
        "so the two differ. Where runs differ, the smallest and largest share of any "
        "two follow.",
        "- *Ratio* compares the shares, predicted over measured: profiled, unless the "
        "claim is one of the run that is not profiled.",
        f"- A *what-if* must be within {MAX_ERROR:.0%} of the measured saving or "
        f"{MIN_SHARE:.0%} of the region; an *upper bound* must not be more than "
        f"{MIN_SHARE:.0%} below the smallest, a *lower bound* above the largest. "
        "*Direct* costs are times of calls, not savings.",
        "",
        *([f"Recorded on {'; on '.join(machines)}.", ""] if machines else []),
        _summary(result),
        "",
        "| " + " | ".join(head.capitalize() for head in _HEADS) + " |",
        "|" + " --- |" * len(_HEADS),
    ]
    out += ["| " + " | ".join(map(_escaped, _cells(row))) + " |" for row in result.rows]
    wrong = [
        f"- `{row.pair}`: {_escaped(problem)}"
        for row in result.rows
        for problem in row.problems
    ]
    if wrong:
        out += ["", "## What is wrong", "", *wrong]
    if result.unproven:
        out += ["", "## Rules without proof", ""]
        out += [f"- `{rule}`: {_escaped(why)}" for rule, why in result.unproven.items()]
    return "\n".join(out) + "\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")

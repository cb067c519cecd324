"""Scores the rules on the recorded pairs: what they say against what was measured.

Needs no GPU. Costs are compared as shares: a rule's of the judged region of the
trace, which may leave out a first iteration, with the measured one of the whole
region, both of the run that is in the trace. Profiling itself changes what a fault
costs, so the saving without it stands beside, unjudged.
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
from streamlint.findings import Claim, Finding, Severity
from streamlint.harness.collect import PROVENANCE
from streamlint.harness.workloads import VARIANTS, find
from streamlint.registry import all_rules
from streamlint.trace import open_trace

MAX_ERROR = 0.15
"""A what-if may be off by this part of the measured saving."""
_RUNS = {"profiled": "stored", "unprofiled": "plain"}


@dataclass(frozen=True, slots=True)
class Saving:
    """A time saved, and which part of the region it is."""

    us: float
    share: float


@dataclass(frozen=True, slots=True)
class Row:
    """One pair: what the rule says of it, what was measured, what is wrong."""

    pair: str
    rule: str
    fires: str
    fixed: tuple[str, ...]
    claim: str
    predicted: Saving | None
    profiled: Saving | None
    unprofiled: Saving | None
    silent: str
    problems: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """Predicted over measured, where enough was saved to compare."""
        if self.predicted is None or self.profiled is None:
            return None
        if self.profiled.share < MIN_SHARE:
            return None
        return self.predicted.share / self.profiled.share

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
    claim, predicted = _prediction(found)
    measured = {run: _measured(note, key) for run, key in _RUNS.items()}
    if not note:
        problems.append(f"no {PROVENANCE} beside the traces")
    elif wrong := _wrong(claim, predicted, measured["profiled"]):
        problems.append(wrong)
    return Row(
        pair=name,
        rule=rule,
        fires=fires,
        fixed=dirty,
        claim=claim.value if claim else "-",
        predicted=predicted,
        profiled=measured["profiled"],
        unprofiled=measured["unprofiled"],
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


def _prediction(findings: Iterable[Finding]) -> tuple[Claim | None, Saving | None]:
    """What fixing all findings of a rule saves, for the process that saves most.

    A what-if beside bounds of one kind sums up to such a bound; bounds of both kinds
    to none.
    """
    sums: dict[int | None, tuple[float, float]] = {}
    claims = set()
    for finding in findings:
        if finding.cost.ns is None or finding.cost.share is None:
            continue
        us, share = sums.get(finding.where.pid, (0.0, 0.0))
        more = (us + finding.cost.ns / 1e3, share + finding.cost.share)
        sums[finding.where.pid] = more
        claims.add(finding.cost.claim)
    if not sums:
        return Claim.NONE, None
    bounds = claims - {Claim.WHAT_IF}
    claim = next(iter(bounds), Claim.WHAT_IF) if len(bounds) < 2 else None
    return claim, Saving(*max(sums.values()))


def _measured(note: dict[str, dict[str, Any]], run: str) -> Saving | None:
    """What the fix saved in these runs."""
    us: list[float] = []
    for variant in VARIANTS:
        found = note.get(variant, {}).get("region_us", {}).get(run)
        if isinstance(found, dict):
            found = found.get("median")
        if not isinstance(found, int | float) or found <= 0:
            return None
        us.append(float(found))
    return Saving(us[0] - us[1], (us[0] - us[1]) / us[0])


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
    over = predicted.share - measured.share
    if claim is Claim.WHAT_IF:
        allowed = max(MAX_ERROR * abs(measured.share), MIN_SHARE)
        if abs(over) > allowed:
            return f"the what-if is off by {_points(over)} of the region"
    if claim is Claim.UPPER_BOUND and over < -MIN_SHARE:
        return f"the upper bound is {_points(over)} below what was saved"
    if claim is Claim.LOWER_BOUND and over > MIN_SHARE:
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
        row.claim,
        _saving(row.predicted),
        _saving(row.profiled),
        "-" if ratio is None else f"{ratio:.2f}",
        _saving(row.unprofiled),
        "WRONG" if row.problems else "ok",
    )


def _saving(saving: Saving | None) -> str:
    if saving is None:
        return "-"
    return f"{saving.us / 1e3:.2f} ms, {100 * saving.share:.1f} %"


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
        "seven repeats without nsys. Recording slows calls down, so the two differ.",
        "- *Ratio* compares the shares, predicted over measured and profiled.",
        f"- A *what-if* must be within {MAX_ERROR:.0%} of the measured saving or "
        f"{MIN_SHARE:.0%} of the region; an *upper bound* must not be below it, a "
        "*lower bound* not above. *Direct* costs are times of calls, not savings.",
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

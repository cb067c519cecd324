"""JSON for programs: one versioned document, described by `lint.schema.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamlint import __version__
from streamlint.baseline import Standing
from streamlint.engine import Model, Report, gone
from streamlint.errors import UsageError
from streamlint.escape import without_home
from streamlint.findings import Finding, Severity, SourceFrame
from streamlint.fleet import Fleet
from streamlint.reporters import Detail, Failure, View
from streamlint.reporters.fleet import document as fleet_object
from streamlint.rule import Rule
from streamlint.settings import Scope
from streamlint.suppression import Use

FORMAT_VERSION = 1
"""Grows when a reader of the document would have to change."""


def render(reports: Sequence[Report], failures: Sequence[Failure], view: View) -> str:
    """The whole document; of ``view`` its fleet, and whether there are call stacks."""
    stacks = view.detail is Detail.VERBOSE
    whole = document(reports, failures, view.fleet, stacks=stacks)
    return json.dumps(whole, indent=2, ensure_ascii=True) + "\n"


def document(
    reports: Sequence[Report],
    failures: Sequence[Failure] = (),
    fleet: Fleet | None = None,
    *,
    stacks: bool = False,
) -> dict[str, Any]:
    """The whole document, before it is text."""
    return {
        "format": FORMAT_VERSION,
        "tool": {"name": "streamlint", "version": __version__},
        "traces": [_trace(report, stacks) for report in reports],
        "errors": [
            {
                "path": without_home(path),
                "message": without_home(error.message),
                "hint": without_home(error.hint),
            }
            for path, error in failures
        ],
        "summary": _summary(reports),
        "fleet": None if fleet is None else fleet_object(fleet),
        "baseline": _baseline(reports, complete=not failures),
    }


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the document."""
    path = Path(__file__).with_name("lint.schema.json")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def stored(path: Path) -> list[dict[str, Any]] | None:
    """The traces of a document that was written to ``path``; None for another file.

    Raises `UsageError` for JSON that is no such document.
    """
    try:
        with path.open("rb") as file:
            if file.read(1) != b"{":
                return None
            loaded = json.loads(b"{" + file.read())
    except OSError:
        return None  # the reader of traces says what is wrong with it
    except (ValueError, RecursionError) as error:
        raise _no_result(path, "broken JSON") from error
    if not isinstance(loaded.get("traces"), list):
        raise _no_result(path, "other JSON")
    if loaded.get("format") != FORMAT_VERSION:
        version = loaded.get("format")
        raise _no_result(path, f"format {version}, this version reads {FORMAT_VERSION}")
    traces: list[dict[str, Any]] = loaded["traces"]
    return traces


def _no_result(path: Path, why: str) -> UsageError:
    return UsageError(
        f"{path} is no result of streamlint ({why})",
        hint="write one: streamlint lint TRACE --format json",
    )


def _trace(report: Report, stacks: bool) -> dict[str, Any]:
    facts, capture = report.overview, report.capture
    return {
        "path": without_home(report.url or str(report.path)),
        "capture": {
            "exporter": capture.exporter,
            "schema": capture.schema,
            "gpus": list(facts.gpus),
            "processes": [{"pid": pid, "name": name} for pid, name in facts.processes],
            "kernels": facts.kernels,
            "memcpys": facts.memcpys,
            "memsets": facts.memsets,
            "runtime_calls": facts.runtime_calls,
            "all_apis": capture.all_apis,
            "graph_mode": capture.graph_mode,
            "memory_usage": capture.memory_usage,
            "environment": capture.environment,
            "invalid_rows": facts.invalid_rows,
            "judged": [judged._asdict() for judged in facts.judged],
        },
        "scope": _scope(report.scope),
        "span_ns": facts.span_ns,
        "model": _model(report.model),
        "devices": [
            {
                "gpu": device.gpu,
                "name": device.name,
                "busy_ns": device.busy_ns,
                "kernels_ns": device.kernels_ns,
                "copies_ns": device.copies_ns,
                "idle_ns": device.idle_ns,
            }
            for device in facts.devices
        ],
        "rules": [judgement.rule.name for judgement in report.judgements],
        "findings": [
            _finding(rule, finding, report.standing(rule, finding), stacks)
            for rule, finding in report.findings
        ],
        "suppressed": [
            {
                "reason": allowed.reason,
                "origin": allowed.origin,
                "finding": _finding(rule, allowed.finding, None, stacks),
            }
            for rule, allowed in report.suppressed
        ],
        "allowances": [_use(use) for use in report.uses],
        "not_assessed": [
            {"rule": rule.name, "reason": why.reason, "recapture": why.recapture}
            for rule, why in report.not_assessed
        ],
        "crashed": [
            {"rule": rule.name, "origin": rule.origin, "summary": crash.summary}
            for rule, crash in report.crashed
        ],
    }


def _scope(scope: Scope) -> dict[str, Any] | None:
    if not scope.explicit:
        return None
    return {
        "nvtx": scope.nvtx,
        "start_ns": scope.start_ns,
        "end_ns": scope.end_ns,
        "process": scope.process,
        "device": scope.device,
        "steady_state": scope.steady_state,
    }


def _use(use: Use) -> dict[str, Any]:
    allowance = use.allowance
    return {
        "rule": allowance.rule,
        "reason": allowance.reason,
        "origin": allowance.origin,
        "until": None if allowance.until is None else allowance.until.isoformat(),
        "state": use.state,
        "findings": use.findings,
    }


def _model(model: Model | None) -> dict[str, Any] | None:
    if model is None:
        return None
    return {
        "error": round(model.error, 6),
        "joint": None
        if model.joint_ns is None or model.joint_share is None
        else {
            "fixes": model.joint_fixes,
            "ns": model.joint_ns,
            "share": round(model.joint_share, 6),
        },
    }


def _finding(
    rule: Rule, finding: Finding, standing: Standing | None, stacks: bool
) -> dict[str, Any]:
    where, cost = finding.where, finding.cost
    return {
        "rule": rule.name,
        "family": rule.family,
        "origin": rule.origin,
        "severity": finding.severity.value,
        "confidence": finding.confidence.value,
        "message": finding.message,
        "occurrences": finding.occurrences,
        "cost": {
            "claim": cost.claim.value,
            "ns": cost.ns,
            "share": None if cost.share is None else round(cost.share, 6),
            "method": cost.method,
            "basis": cost.basis,
        },
        "where": {
            "pid": where.pid,
            "process": where.process,
            "device": where.device,
            "context": where.context,
            "streams": list(where.streams),
            "threads": list(where.threads),
            "kernels": list(where.kernels),
            "nvtx": list(where.nvtx),
            "source": list(map(_frame, where.source)),
            **({"stack": list(map(_frame, where.stack))} if stacks else {}),
        },
        "evidence": [
            {
                "start_ns": item.start_ns,
                "end_ns": item.end_ns,
                "what": item.what,
                "correlation_id": item.correlation_id,
            }
            for item in finding.evidence
        ],
        "fix": finding.fix,
        "fingerprint": finding.fingerprint(rule.name),
        "baseline": None if standing is None else standing.value,
    }


def _frame(frame: SourceFrame) -> dict[str, Any]:
    return {"file": frame.file, "line": frame.line, "function": frame.function}


def _baseline(reports: Sequence[Report], *, complete: bool) -> dict[str, Any] | None:
    """How the findings stand against the baseline, which all reports share."""
    baseline = reports[0].baseline if reports else None
    if baseline is None:
        return None
    counts = Counter(r.standing(*pair) for r in reports for pair in r.findings)
    return {
        "path": without_home(str(baseline.path)),
        "tolerance": baseline.tolerance,
        **{standing.value: counts[standing] for standing in Standing},
        "gone": [
            {"rule": entry.rule, "label": entry.label, "fingerprint": entry.fingerprint}
            # A trace that wasn't read may show it.
            for entry in (gone(baseline, reports) if complete else ())
        ],
    }


def _summary(reports: Sequence[Report]) -> dict[str, Any]:
    severities = Counter(f.severity for r in reports for _, f in r.findings)
    return {
        "traces": len(reports),
        "findings": {s.value: severities[s] for s in Severity},
        "suppressed": sum(len(r.suppressed) for r in reports),
        "below_min_saving": sum(r.below for r in reports),
        "not_assessed": sum(len(r.not_assessed) for r in reports),
        "crashed": sum(len(r.crashed) for r in reports),
    }

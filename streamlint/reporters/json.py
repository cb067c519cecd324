"""JSON for programs: one versioned document, described by `lint.schema.json`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamlint import __version__
from streamlint.engine import Model, Report
from streamlint.escape import without_home
from streamlint.findings import Finding, Severity
from streamlint.reporters import Failure
from streamlint.rule import Rule

FORMAT_VERSION = 1
"""Grows when a reader of the document would have to change."""


def render(
    reports: Sequence[Report], failures: Sequence[Failure], color: bool, width: int
) -> str:
    """The whole document; ``color`` and ``width`` mean nothing here."""
    del color, width
    document = {
        "format": FORMAT_VERSION,
        "tool": {"name": "streamlint", "version": __version__},
        "traces": [_trace(report) for report in reports],
        "errors": [
            {
                "path": without_home(path),
                "message": without_home(error.message),
                "hint": without_home(error.hint),
            }
            for path, error in failures
        ],
        "summary": _summary(reports),
    }
    return json.dumps(document, indent=2, ensure_ascii=True) + "\n"


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the document."""
    path = Path(__file__).with_name("lint.schema.json")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def _trace(report: Report) -> dict[str, Any]:
    facts, capture = report.overview, report.capture
    return {
        "path": without_home(str(report.path)),
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
            "judged": [
                {
                    "pid": pid,
                    "start_ns": start,
                    "end_ns": end,
                    "iterations": iterations,
                    "nvtx": nvtx,
                }
                for pid, start, end, iterations, nvtx in facts.judged
            ],
        },
        "span_ns": facts.span_ns,
        "model": _model(report.model),
        "findings": [_finding(rule, finding) for rule, finding in report.findings],
        "not_assessed": [
            {"rule": rule.name, "reason": why.reason, "recapture": why.recapture}
            for rule, why in report.not_assessed
        ],
        "crashed": [
            {"rule": rule.name, "summary": crash.summary}
            for rule, crash in report.crashed
        ],
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


def _finding(rule: Rule, finding: Finding) -> dict[str, Any]:
    where, cost = finding.where, finding.cost
    return {
        "rule": rule.name,
        "family": rule.family,
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
            "source": [
                {"file": frame.file, "line": frame.line, "function": frame.function}
                for frame in where.source
            ],
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
    }


def _summary(reports: Sequence[Report]) -> dict[str, Any]:
    severities = Counter(f.severity for r in reports for _, f in r.findings)
    return {
        "traces": len(reports),
        "findings": {s.value: severities[s] for s in Severity},
        "below_min_saving": sum(r.below for r in reports),
        "not_assessed": sum(len(r.not_assessed) for r in reports),
        "crashed": sum(len(r.crashed) for r in reports),
    }

"""The JSON document: valid against its schema, countable, the same in every run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tracebuilder import TraceBuilder

from streamlint import __version__
from streamlint.engine import Report, lint
from streamlint.errors import TraceError
from streamlint.registry import all_rules
from streamlint.reporters import View
from streamlint.reporters.json import render, schema
from streamlint.trace import open_trace

SAMPLES = Path(__file__).parents[1] / "sample_traces"
TRACES = sorted(set(SAMPLES.rglob("*.sqlite")) - set(SAMPLES.glob("extra/aborted*")))
SEVERITIES = ["error", "high", "medium", "low", "info"]


def relative(path: Path) -> str:
    return path.relative_to(SAMPLES).as_posix()


def report(path: Path) -> Report:
    trace = open_trace(path)
    try:
        return lint(trace, all_rules())
    finally:
        trace.close()


def document(*reports: Report, failures: Any = ()) -> dict[str, Any]:
    text = render(reports, failures, View())
    assert text.isascii()
    assert text.endswith("}\n")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def validate(value: dict[str, Any]) -> None:
    Draft202012Validator(schema()).validate(value)


def objects(part: Any) -> Iterator[dict[str, Any]]:
    """Every subschema that describes an object."""
    if isinstance(part, dict):
        if part.get("type") == "object":
            yield part
        for value in part.values():
            yield from objects(value)
    elif isinstance(part, list):
        for value in part:
            yield from objects(value)


def test_schema_is_one_and_closed() -> None:
    Draft202012Validator.check_schema(schema())
    found = list(objects(schema()))
    assert len(found) > 10
    for part in found:
        if "properties" in part:
            assert part["additionalProperties"] is False
            assert set(part["required"]) <= set(part["properties"])


@pytest.mark.parametrize("path", TRACES, ids=relative)
def test_samples_are_valid(path: Path) -> None:
    found = document(report(path))
    validate(found)
    (trace,) = found["traces"]
    assert trace["crashed"] == []
    assert trace["path"] == str(path)
    for finding in trace["findings"]:
        cost = finding["cost"]
        assert finding["occurrences"] > 0
        assert (cost["ns"] is None) == (cost["claim"] == "none")
        own = ("launch-bound-kernels", "graph-reinstantiated")
        assert cost["basis"] == "recorded" or finding["rule"] in own
        if cost["ns"] is not None and finding["severity"] not in ("error", "info"):
            assert cost["ns"] >= 50_000
            assert cost["share"] >= 0.01
        for place in finding["evidence"]:
            assert 0 < place["start_ns"] <= place["end_ns"]
    prints = [(f["where"]["pid"], f["fingerprint"]) for f in trace["findings"]]
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("name", ["legacy", "misc", "forkp", "torchbt"])
def test_two_lints_of_one_trace_are_equal(name: str) -> None:
    path = SAMPLES / "extra" / f"{name}.sqlite"
    assert document(report(path)) == document(report(path))


def test_summary_counts_what_the_traces_hold() -> None:
    names = ("extra/legacy", "extra/misc", "extra/die9")
    error = TraceError("x is empty", hint="export it again")
    found = document(
        *(report(SAMPLES / f"{name}.sqlite") for name in names),
        failures=[("x.sqlite", error)],
    )
    validate(found)
    traces, summary = found["traces"], found["summary"]
    severities = Counter(f["severity"] for t in traces for f in t["findings"])
    assert summary["traces"] == 3
    assert list(summary["findings"]) == SEVERITIES
    assert summary["findings"] == {s: severities[s] for s in SEVERITIES}
    assert summary["not_assessed"] == sum(len(t["not_assessed"]) for t in traces)
    assert summary["not_assessed"] >= len(all_rules())
    assert summary["crashed"] == 0
    assert found["errors"] == [
        {"path": "x.sqlite", "message": "x is empty", "hint": "export it again"}
    ]
    assert found["format"] == 1
    assert found["tool"] == {"name": "streamlint", "version": __version__}


def test_numbers_of_the_capture_are_those_of_the_trace() -> None:
    (trace,) = document(report(SAMPLES / "extra" / "legacy.sqlite"))["traces"]
    assert trace["span_ns"] == 2_915_677
    capture = trace["capture"]
    assert capture["gpus"] == ["NVIDIA H200"]
    assert capture["processes"] == [{"pid": 467, "name": "w"}]
    assert (capture["kernels"], capture["memcpys"], capture["memsets"]) == (80, 0, 0)
    assert capture["exporter"] == "2025.3.2.0"
    assert capture["all_apis"] is False


# Fingerprints -----------------------------------------------------------------------


def program(
    path: Path, *, pid: int, streams: tuple[int, int], start: int, rounds: int
) -> Path:
    """One program, run again: other ids, times and number of iterations."""
    b = TraceBuilder(pid=pid, tid=pid + 1)
    for stream in streams:
        b.stream(stream)
    for i in range(rounds):
        at = start + 1000 * i
        for stream in streams:
            b.kernel(
                "step", stream=stream, start=at + 100, end=at + 300, issue=(at, at)
            )
        b.kernel("sum", stream=7, start=at + 301, end=at + 400, issue=(at + 9, at + 10))
        b.memcpy(
            "HtoD",
            1 << 20,
            src="pageable",
            stream=streams[0],
            start=at + 450,
            end=at + 690,
            issue=(at + 420, at + 700),
        )
        host = b.call("cudaHostAlloc", at + 710, 100)
        b.call("cudaFreeHost", at + 820, 60)
        b.backtrace(host, [("refill", "train.py", 12)])
    return b.write(path)


def fingerprints(path: Path) -> dict[str, str]:
    (trace,) = document(report(path))["traces"]
    return {finding["rule"]: finding["fingerprint"] for finding in trace["findings"]}


def test_fingerprints_survive_other_pids_streams_and_times(tmp_path: Path) -> None:
    once = fingerprints(
        program(tmp_path / "1.sqlite", pid=100, streams=(13, 14), start=1000, rounds=20)
    )
    again = fingerprints(
        program(
            tmp_path / "2.sqlite", pid=77_123, streams=(31, 27), start=90_000, rounds=28
        )
    )
    assert once == again
    assert set(once) >= {
        "legacy-null-stream-barrier",
        "pageable-async-copy",
        "resource-churn-in-loop",
    }


def test_fingerprints_of_real_runs_of_one_program_are_equal() -> None:
    one, two = (
        fingerprints(SAMPLES / "extra" / f"two_procs_{n}.sqlite")
        for n in ("one_gpu", "two_gpus")
    )
    assert one == two

"""A finding keeps its fingerprint from run to run, and two findings never share one."""

from __future__ import annotations

from pathlib import Path

import pytest
from second_run import another_run
from tracebuilder import TraceBuilder

from streamlint.engine import Report, lint
from streamlint.fingerprint import fingerprint, stable
from streamlint.registry import all_rules, select
from streamlint.trace import open_trace

SAMPLES = Path(__file__).parents[1] / "sample_traces"


def report(path: Path, *rules: str) -> Report:
    trace = open_trace(path)
    try:
        return lint(trace, select([*rules], []) if rules else all_rules())
    finally:
        trace.close()


def prints(path: Path, *rules: str) -> list[tuple[str, str]]:
    found = report(path, *rules).findings
    return sorted(
        (rule.name, finding.fingerprint(rule.name)) for rule, finding in found
    )


@pytest.mark.parametrize(
    "sample",
    [
        "legacy-null-stream-barrier/bad",
        "priority-without-effect/bad",
        "threads-share-legacy-stream/bad",
        "host-sync-drains-gpu/torch/bad",
        "resource-churn-in-loop/bad",
        "launch-bound-kernels/bad",
        "extra/torchbt",
        "extra/two_procs_one_gpu",
        "extra/probe",
    ],
)
def test_another_run_has_the_same_fingerprints(sample: str, tmp_path: Path) -> None:
    """Other pids, tids, streams, correlation ids, addresses, times, argument values."""
    first = SAMPLES / f"{sample}.sqlite"
    second = another_run(first, tmp_path / "second.sqlite")
    assert prints(first) == prints(second) != []
    pids = [
        {finding.where.pid for _, finding in report(path).findings} - {None}
        for path in (first, second)
    ]
    assert pids[0].isdisjoint(pids[1])


def test_two_captures_of_one_program_share_fingerprints() -> None:
    """Two real runs; the second recorded more kinds of calls, so it may say more."""
    fewer, more = (
        prints(SAMPLES / "extra" / f"apis_{n}.sqlite") for n in ("def", "all")
    )
    assert len(fewer) > 5
    assert set(fewer) <= set(more)


def churn(path: Path, lines: dict[int, float], folder: str = "/app") -> Path:
    """Pinned memory made and freed in each iteration, at these lines for so long."""
    b = TraceBuilder()
    b.stream(13)
    for i in range(30):
        at = 1000 + 2000 * i
        b.kernel("step", stream=13, start=at + 100, end=at + 600)
        for line, duration in lines.items():
            at += 500
            call = b.call("cudaHostAlloc", at + 110, duration)
            b.call("cudaFreeHost", at + 350, 60)
            b.backtrace(call, [("refill", f"{folder}/train.py", line)])
    return b.write(path)


def test_places_of_one_trace_are_told_apart(tmp_path: Path) -> None:
    rule = "resource-churn-in-loop"
    found = prints(churn(tmp_path / "t.sqlite", {12: 200.0, 40: 200.0}), rule)
    assert len(found) == len(set(found)) == 2


def test_lines_that_move_and_other_checkouts_keep_fingerprints(tmp_path: Path) -> None:
    """Ordered by place in the code, not by cost: 9 and 99 are 10 and 100 later."""
    rule = "resource-churn-in-loop"

    def by_line(path: Path) -> list[str]:
        pairs = report(path, rule).findings
        pairs.sort(key=lambda pair: pair[1].where.source[0].line or 0)
        return [finding.fingerprint(rule.name) for rule, finding in pairs]

    before = churn(tmp_path / "1.sqlite", {9: 200.0, 99: 150.0})
    after = churn(tmp_path / "2.sqlite", {10: 150.0, 100: 200.0}, "/home/me/src")
    assert by_line(before) == by_line(after)
    assert len(by_line(before)) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("add_kernel_0d1d2d3de", "add_kernel_0d1d2d3d"),
        ("add_kernel_0d1d2d3de", "add_kernel"),
        ("triton_poi_fused_add_12", "triton_poi_fused_add_7"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_64x32_nn"),
        ("void scale<float, 4>(float *, int)", "void scale<float, 8>(float *, int)"),
        ("add_241[abi:v1,cw51](Array<double, 1>)", "add_7[abi:v1,x](Array<float, 1>)"),
        ("/app/train.py:12 step", "/home/me/app/train.py:40 step"),
        ("C:\\app\\train.py:12 step", "train.py:1 step"),
        ("0x7f3a12bc (app)", "0x55aa01 (app)"),
    ],
)
def test_what_changes_from_run_to_run_is_left_out(one: str, other: str) -> None:
    assert stable(one) == stable(other) != ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cudaMemcpy2DAsync", "cudaMemcpy3DAsync"),
        ("1", "2"),
        ("/app/train.py:12 step", "/app/train.py:12 load"),
        ("/app/train.py:12 step", "/app/test.py:12 step"),
        ("void add<float>(float *)", "void scale<float>(float *)"),
    ],
)
def test_what_names_the_cause_stays(one: str, other: str) -> None:
    assert stable(one) != stable(other)


def test_kernels_that_differ_in_their_numbers_count_once() -> None:
    """How many variants of a kernel ran depends on the sizes of the data."""
    assert fingerprint("r", ("k", "gemm_64", "gemm_128")) == fingerprint(
        "r", ("k", "gemm_32")
    )

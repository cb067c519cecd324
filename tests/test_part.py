"""Reading a part of a trace: what is judged of it is what the whole trace shows."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from commandline import Run
from faults import FAULTS
from polars.testing import assert_frame_equal
from test_parquet import parquet_folder
from tracebuilder import TraceBuilder

from streamlint import engine
from streamlint.engine import Report, lint
from streamlint.errors import ScopeError
from streamlint.registry import catalog
from streamlint.settings import Scope, Settings
from streamlint.trace import open_trace, part, reader

SAMPLES = Path(__file__).parents[1] / "sample_traces"
SOME = [
    *(SAMPLES / "extra" / f"{name}.sqlite" for name in ("forkp", "legacy", "misc")),
    SAMPLES / "cross-context-serialization" / "bad.sqlite",
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


@pytest.fixture
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short traces would be read whole with their margin."""
    monkeypatch.setattr(part, "MARGIN_NS", 0)


def judged(
    path: Path, start_ns: int, end_ns: int, *, partly: bool, replay: bool = False
) -> tuple[Report | str, int]:
    """What is said of some time, and how many calls and operations were left out."""
    scope = Scope(start_ns=start_ns, end_ns=end_ns)
    with open_trace(path) as trace:
        try:
            report = lint(
                trace,
                catalog().rules,
                settings=Settings(scope=scope, replay=replay),
                partly=partly,
            )
        except ScopeError as error:
            return f"{error}: {error.hint}", 0
        return report, sum(trace.left_out.rows.values())


def told(report: Report | str, *, costs: bool = True) -> Any:
    """All that a report says of the program and the recording."""
    if isinstance(report, str):
        return report
    rules = {}
    for one in report.judgements:
        assert one.crashed is None, one.crashed
        found = [
            (
                finding.fingerprint(one.rule.name),
                finding.message,
                *(finding.severity, finding.confidence, finding.occurrences),
                (finding.cost, finding.evidence) if costs else finding.cost.claim,
                finding.where._replace(rows=None),
                finding.fix,
            )
            for finding in one.findings
        ]
        rules[one.rule.name] = one.not_assessed or found
    overview = report.overview
    return rules, overview._replace(invalid_rows={}), report.capture


def windows(path: Path) -> list[tuple[int, int]]:
    """Times that begin and end within operations, and between them."""
    with open_trace(path) as trace:
        ops = trace.gpu_ops
    middle = (ops["start_ns"] + ops["end_ns"]) // 2
    at = [middle[int(share * (ops.height - 1))] for share in (0.2, 0.45, 0.55, 0.8)]
    return [(at[0], at[1] + 1), (at[1], at[2] + 1), (at[2] + 1, at[3] + 1)]


def compare(path: Path) -> int:
    """How many rows are left out of a trace, in all its windows, to the same result."""
    left_out = 0
    for start, end in windows(path):
        whole, _ = judged(path, start, end, partly=False)
        some, left = judged(path, start, end, partly=True)
        assert told(some) == told(whole)
        left_out += left
    return left_out


@pytest.mark.parametrize("rule", FAULTS)
def test_a_fault_looks_the_same_from_a_part(
    tmp_path: Path, no_margin: None, rule: str
) -> None:
    b = TraceBuilder()
    FAULTS[rule](b)
    path = b.write(tmp_path / "t.sqlite")
    compare(path)


@pytest.mark.parametrize("path", SOME, ids=lambda path: path.parent.name + path.stem)
def test_a_sample_looks_the_same_from_a_part(path: Path, no_margin: None) -> None:
    assert compare(path)


# A long run, of which little is read --------------------------------------------------


def long_run(b: TraceBuilder, steps: int = 400) -> None:
    """Steps of 1 ms: a copy, two kernels, an event and a wait."""
    b.stream(13)
    b.stream(14, flag=2)
    for step in range(steps):
        now = 1_000 * (step + 1)
        b.memcpy(
            "HtoD", 1 << 20, stream=13, start=now + 20, end=now + 60,
            issue=(now, now + 8), src="pageable" if step % 3 else "pinned",
        )  # fmt: skip
        for i, name in enumerate((f"own_{step // 50}", "step")):
            at = now + 100 + 200 * i
            b.kernel(name, stream=13, start=at, end=at + 150, issue=(at - 20, at - 14))
        b.event_record(13, 1, now + 480)
        b.sync("cudaStreamSynchronize", stream=13, start=now + 490, end=now + 600)


MIDDLE = (200_500_000, 210_500_000)


def left_out(path: Path, *, replay: bool = False) -> int:
    """How many rows the middle does without, to the same result."""
    whole, _ = judged(path, *MIDDLE, partly=False, replay=replay)
    some, left = judged(path, *MIDDLE, partly=True, replay=replay)
    assert told(some, costs=not replay) == told(whole, costs=not replay)
    if replay and isinstance(some, Report) and isinstance(whole, Report):
        for (_, one), (_, other) in zip(some.findings, whole.findings, strict=True):
            if other.cost.ns is not None:
                assert one.cost.ns == pytest.approx(other.cost.ns, rel=0.03)
    return left


def names_found(path: Path) -> list[str]:
    """Rules that find something in the middle, of which a part is read."""
    report, _ = judged(path, *MIDDLE, partly=True)
    assert isinstance(report, Report)
    return [rule.name for rule, _ in report.findings]


def test_most_of_a_long_run_is_not_read(tmp_path: Path) -> None:
    b = TraceBuilder()
    long_run(b)
    path = b.write(tmp_path / "t.sqlite")
    with open_trace(path) as trace:
        rows = trace.gpu_ops.height + trace.runtime_calls.height
        waits = trace.synchronizations.height + trace.event_records.height
    # What waits for work, or is waited for, is read wherever it is.
    assert left_out(path, replay=True) > 0.85 * (rows - waits)


@pytest.mark.parametrize("waited", [True, False])
def test_a_wait_long_after_the_time_still_counts(
    tmp_path: Path, no_margin: None, waited: bool
) -> None:
    b = TraceBuilder()
    long_run(b)
    b.memcpy(
        "DtoH", 4096, stream=14, start=205_700, end=205_710, issue=(205_650, 205_660)
    )
    if waited:
        b.sync("cudaStreamSynchronize", stream=14, start=390_700, end=390_705)
    path = b.write(tmp_path / "t.sqlite")
    assert left_out(path) > 1_000
    assert ("unsynchronized-d2h-result" in names_found(path)) is not waited


@pytest.mark.parametrize("launches", [1, 5])
def test_a_graph_that_is_launched_again_after_the_time_was_worth_it(
    tmp_path: Path, no_margin: None, launches: int
) -> None:
    b = TraceBuilder()
    long_run(b)
    for graph in range(10, 14):
        at = 191_700.0 + 1_000 * graph
        b.call("cudaGraphInstantiate", at, 100)
        b.graph_node(graph << 32 | 1, at + 10, 1 << 32 | 1)
        for launch in range(launches):
            now = at + 110 + 20_000 * launch
            b.kernel(
                "node", stream=14, start=now + 20, end=now + 30,
                call=b.graph_launch(now), graph_node=graph << 32 | 1,
            )  # fmt: skip
    path = b.write(tmp_path / "t.sqlite")
    assert left_out(path) > 1_000
    assert ("graph-reinstantiated" in names_found(path)) is (launches == 1)


def test_a_wait_within_a_call_that_is_left_out_is_none(
    tmp_path: Path, no_margin: None
) -> None:
    b = TraceBuilder()
    long_run(b)
    for step in range(300, 340):
        at = 1_000 * step + 700
        call = b.memcpy(
            "DtoH", 64, stream=13, start=at + 10, end=at + 20, issue=(at, at + 40),
            api="cudaMemcpy", dst="pageable",
        )  # fmt: skip
        b.call("cuStreamSynchronize", at + 5, 10, correlation_id=call)
        b.call("cuStreamSynchronize", at + 20, 10)
    path = b.write(tmp_path / "t.sqlite")
    assert left_out(path) > 1_000
    with open_trace(path) as trace:
        nested = trace.runtime_calls.filter("nested").height
    with open_trace(path) as trace:
        trace.read_only(MIDDLE)
        assert trace.runtime_calls.filter("nested").height == nested == 80


def test_what_a_recording_lost_elsewhere_is_told_all_the_same(
    tmp_path: Path, no_margin: None
) -> None:
    b = TraceBuilder()
    b.option("CUDA_SKIP_SOME_API_CALLS", "false")
    long_run(b)
    for step in range(300, 380):
        at = 1_000 * step + 700
        b.call("cudaLaunchKernel", at)
        b.kernel("alone", stream=14, start=at + 10, end=at + 12, issue=None)
        b.new_id()
    path = b.write(tmp_path / "t.sqlite")
    assert left_out(path) > 1_000
    report, _ = judged(path, *MIDDLE, partly=True)
    assert isinstance(report, Report)
    said = [found.message for rule, found in report.findings if rule.judges_capture]
    for words in ("80 of 1280 launches", "80 of 1280 GPU", "79 API calls"):
        assert any(words in message for message in said), (words, said)


def test_every_format_and_reader_chooses_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = TraceBuilder()
    long_run(b)
    # Rows that aren't in the order of time.
    b.kernel("early", stream=14, start=150_500, end=150_510)
    path = b.write(tmp_path / "t.sqlite")
    folder = parquet_folder(path, tmp_path / "t_pqtdir")

    def calls_and_work(path: Path) -> tuple[pl.DataFrame, pl.DataFrame]:
        with open_trace(path) as trace:
            trace.read_only(MIDDLE)
            return trace.runtime_calls, trace.gpu_ops

    monkeypatch.setattr(reader, "_LARGE", 0)
    by_pages = calls_and_work(path)
    monkeypatch.setattr(reader, "_LARGE", 1 << 40)
    for others in (calls_and_work(path), calls_and_work(folder)):
        for some, other in zip(by_pages, others, strict=True):
            assert_frame_equal(some, other)


@pytest.mark.parametrize("lacking", ["globalTid", "correlationId"])
def test_what_does_not_tell_what_belongs_together_is_read_whole(
    tmp_path: Path, lacking: str
) -> None:
    b = TraceBuilder()
    long_run(b, 40)
    path = b.write(tmp_path / "t.sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME DROP COLUMN {lacking}")
        db.commit()
    with open_trace(path) as trace:
        trace.read_only((20_500_000, 21_500_000))
        assert trace.gpu_ops.height == 120
        assert trace.left_out == part.NOTHING


@pytest.mark.parametrize("marked", [True, False])
def test_a_program_that_controls_l2_is_read_whole(tmp_path: Path, marked: bool) -> None:
    b = TraceBuilder()
    long_run(b, 40)
    if marked:
        b.nvtx("l2.setaside bytes=1024", 500, 510)
    else:
        b.call("cudaCtxResetPersistingL2Cache", 39_900)
    with open_trace(b.write(tmp_path / "t.sqlite")) as trace:
        trace.read_only((20_500_000, 21_500_000))
        assert trace.gpu_ops.height == 120


# What a user sees ---------------------------------------------------------------------


def test_the_command_reads_a_part_and_says_so(run: Run, tmp_path: Path) -> None:
    b = TraceBuilder()
    long_run(b)
    path = b.write(tmp_path / "t.sqlite")
    done = run("lint", path, "--time=200.5ms:210.5ms", "--format=json")
    (trace,) = json.loads(done.out)["traces"]
    with open_trace(path) as opened:
        assert trace["capture"]["kernels"] == opened.kernels.height
        assert trace["capture"]["runtime_calls"] == opened.runtime_calls.height
    verbose = run("lint", path, "--time=200.5ms:210.5ms", "--verbose").out
    assert "outside of --time not read" in " ".join(verbose.split())
    assert "not read" not in run("lint", path, "--verbose").out
    # A page shows the whole run.
    page = f"--html={tmp_path / 'page.html'}"
    whole = run("lint", path, "--time=200.5ms:210.5ms", "--verbose", page)
    assert whole.code in (0, 1)
    assert "not read" not in whole.out


@pytest.mark.parametrize("scope", ["--nvtx=step", "--steady-state"])
def test_ranges_in_some_time_take_the_whole_trace(
    run: Run, tmp_path: Path, scope: str
) -> None:
    b = TraceBuilder()
    long_run(b, 40)
    for step in range(40):
        b.nvtx("step", 1_000 * step + 990, 1_000 * step + 1_900)
    path = b.write(tmp_path / "t.sqlite")
    verbose = run("lint", path, "--time=20ms:22ms", scope, "--verbose").out
    assert "judged: " in verbose
    assert "not read" not in verbose


def test_a_part_that_fits_into_memory_is_suggested(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = TraceBuilder()
    long_run(b)
    path = b.write(tmp_path / "t.sqlite")
    with open_trace(path) as trace:
        rows = trace.rows
    free = 250 * rows
    monkeypatch.setattr(engine, "free_memory", lambda: free)
    hint = run("lint", path, "--no-replay").err.splitlines()[1]
    option = hint.removeprefix("hint: judge a part, such as ").split(",")[0]
    assert option == "--time 0.2s:0.207s"
    assert run("lint", path, "--no-replay", *option.split()).code in (0, 1)

    some = run("lint", path, "--no-replay", "--time=0s:0.3s")
    assert some.code == 2
    assert f"hint: judge a part, such as {option}" in some.err
    nvtx = run("lint", path, "--no-replay", "--nvtx=step")
    assert "nsys export --times=START/END" in nvtx.err
    free = 100 * rows
    assert "nsys export --times=START/END" in run("lint", path).err

"""Judging a part of a trace: ranges, times, processes, devices, the steady state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from commandline import Run
from tracebuilder import TraceBuilder

from streamlint.engine import Report, lint
from streamlint.registry import find
from streamlint.reporters.json import schema
from streamlint.settings import Scope, Settings
from streamlint.trace import open_trace

RULE = "host-sync-drains-gpu"
FAILED = "failed-cuda-call"
SAMPLES = Path(__file__).parents[1] / "sample_traces"
CHURN = SAMPLES / "resource-churn-in-loop" / "bad.sqlite"
IDLE = 70.0
"""How long the GPU idles after each wait, in us."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def phase(
    b: TraceBuilder,
    now: float,
    *,
    name: str | None = None,
    step: str | None = None,
    steps: int = 5,
    stream: int = 13,
) -> float:
    """Steps of 100 us of work, a wait for it and 60 us on the host; returns the end."""
    begun = now
    for i in range(steps):
        start = now
        b.kernel(
            f"{name or 'plain'}_kernel", stream=stream, start=now + 6, end=now + 106,
            issue=(now, now + 4),
        )  # fmt: skip
        b.sync("cudaStreamSynchronize", stream=stream, start=now + 5, end=now + 110)
        now += 170
        if step is not None:
            b.nvtx(f"{step} {i}", start - 1, now - 1)
    if name is not None:
        b.nvtx(name, begun - 2, now - 0.5)
    return now


def two_phases(folder: Path) -> Path:
    b = TraceBuilder()
    b.stream(13)
    end = phase(b, 1_000, name="prefill", steps=5)
    phase(b, end + 100, name="decode", steps=10)
    return b.write(folder / "phases.sqlite")


def judged(run: Run, *args: str | Path, rule: str = RULE) -> dict[str, Any]:
    """The only trace of a JSON report, which keeps to its schema."""
    done = run("lint", *args, "--format=json", f"--select={rule}")
    assert done.code in (0, 1), done.err
    document = json.loads(done.out)
    jsonschema.validate(document, schema())
    (trace,) = document["traces"]
    assert isinstance(trace, dict)
    return trace


def only(trace: dict[str, Any]) -> dict[str, Any]:
    (finding,) = trace["findings"]
    assert isinstance(finding, dict)
    return finding


# NVTX ranges ------------------------------------------------------------------------


def test_ranges_limit_what_is_judged_and_what_it_costs(run: Run, folder: Path) -> None:
    path = two_phases(folder)
    whole = judged(run, path)
    assert whole["scope"] is None
    assert only(whole)["occurrences"] == 15

    decode = judged(run, path, "--nvtx", "decode")
    assert only(decode)["occurrences"] == 10
    assert only(decode)["where"]["kernels"] == ["decode_kernel"]
    assert decode["scope"]["nvtx"] == "decode"
    (part,) = decode["capture"]["judged"]
    assert part["nvtx"] == "decode"
    assert part["duration_ns"] == 10 * 170_000 + 1_500
    # The last wait ends the phase: what follows is outside.
    cost = only(decode)["cost"]
    assert cost["ns"] == pytest.approx(9 * IDLE * 1000, rel=0.02)
    assert cost["share"] == pytest.approx(cost["ns"] / part["duration_ns"], abs=1e-5)

    both = judged(run, path, "--nvtx", "*e*")
    assert only(both)["occurrences"] == 15
    lasting = [part["duration_ns"] for part in both["capture"]["judged"]]
    assert lasting == [15 * 170_000 + 2 * 1_500]  # without the gap between


def test_text_says_what_is_judged(run: Run, folder: Path) -> None:
    path = two_phases(folder)
    lines = run("lint", path, "--nvtx=decode", "--device=0", "--process=app").out
    assert lines.splitlines()[1] == (
        "judged: NVTX decode; process app; device 0 (1.70 ms)"
    )
    lines = run("lint", path, "--time=:1800us").out
    assert lines.splitlines()[1].startswith("judged: 0 s to 0.0018 s (")
    assert "judged:" not in run("lint", path).out


def test_work_counts_by_its_launch_not_by_when_it_runs(run: Run, folder: Path) -> None:
    b = TraceBuilder()
    b.stream(13)
    b.stream(14)
    # Launched before the range and on another thread, running within it.
    for i in range(40):
        at = 1_000 + 10 * i
        b.memcpy(
            "HtoD", 512, stream=13, start=at + 400, end=at + 401, issue=(at, at + 6)
        )
        with b.at(tid=102):
            b.memcpy(
                "DtoH", 512, stream=14, start=at + 403, end=at + 404,
                issue=(at + 400, at + 402),
            )  # fmt: skip
    b.nvtx("quiet", 1_399, 1_900)
    b.kernel("own", stream=13, start=1_850, end=1_950, issue=(1_840, 1_844))
    path = b.write(folder / "t.sqlite")
    storm = "small-copy-storm"
    assert only(judged(run, path, rule=storm))["occurrences"] == 80
    assert judged(run, path, "--nvtx=quiet", rule=storm)["findings"] == []
    # The operation that it launched ends after it and belongs to it.
    (part,) = judged(run, path, "--nvtx=quiet", rule=storm)["capture"]["judged"]
    assert part["end_ns"] == 1_950_000


def test_facts_from_outside_a_scope_still_count(run: Run) -> None:
    """Streams and events are created once; the calls that churn are in the loop."""
    whole = judged(run, CHURN, rule="resource-churn-in-loop")
    part = judged(run, CHURN, "--nvtx=iteration*", rule="resource-churn-in-loop")
    assert len(part["findings"]) == len(whole["findings"])
    ids = [finding["fingerprint"] for finding in whole["findings"]]
    assert [finding["fingerprint"] for finding in part["findings"]] == ids


def test_a_part_calls_no_entry_stale(run: Run, folder: Path) -> None:
    path = two_phases(folder)
    args = (path, f"--select={RULE}")
    assert run("lint", *args, "--write-baseline=known.json").code == 0
    entry = f'[[allow]]\nrule = "{RULE}"\nkernel = "prefill*"\nreason = "known"\n'
    (folder / "streamlint.toml").write_text(entry)
    done = run("lint", *args, "--baseline=known.json", "--min-saving=1s")
    assert "matches no finding" in done.err
    other = f"{entry}[rules.{RULE}]\nmin-calls = 100\n"
    (folder / "streamlint.toml").write_text(other)
    assert "no longer found" in run("lint", *args, "--baseline=known.json").err
    done = run("lint", *args, "--baseline=known.json", "--nvtx=decode")
    assert (done.code, done.err) == (0, "")
    (folder / "streamlint.toml").write_text(entry)
    done = run("lint", *args, "--nvtx=prefill")
    assert (done.code, done.err) == (0, "")
    assert "1 suppressed" in done.out


# Times ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "waits"),
    [
        ("0:1", 15),
        ("1ms:1.85ms", 5),
        ("1000us:", 15),
        (":0.00185", 5),
        ("1950us:1s", 10),
        ("1170us:1510us", 2),
        ("1.17ms:1510000ns", 2),
    ],
)
def test_times_limit_what_is_judged(
    run: Run, folder: Path, time: str, waits: int
) -> None:
    path = two_phases(folder)
    own = folder / "streamlint.toml"
    own.write_text(f"[rules.{RULE}]\nmin-calls = 1\n")
    trace = judged(run, path, f"--time={time}")
    assert only(trace)["occurrences"] == waits
    (part,) = trace["capture"]["judged"]
    start, end = trace["scope"]["start_ns"], trace["scope"]["end_ns"]
    assert start is None or part["start_ns"] >= start
    assert end is None or part["end_ns"] <= end
    for item in only(trace)["evidence"]:
        assert part["start_ns"] <= item["start_ns"] < part["end_ns"]


def test_a_fault_of_correctness_outside_the_scope_is_left_out(
    run: Run, folder: Path
) -> None:
    b = TraceBuilder()
    b.stream(13)
    b.call("cudaMalloc", 500, return_value=2)
    phase(b, 1_000, name="decode")
    b.call("cudaMemcpyAsync", 1_500, 1, return_value=1)
    path = b.write(folder / "t.sqlite")

    def failed(*args: str) -> int:
        return len(judged(run, path, *args, rule=FAILED)["findings"])

    assert failed() == 2
    assert failed("--nvtx=decode") == 1
    assert failed("--time=1ms:") == 1
    assert failed("--time=1ms:1.2ms") == 0


# Processes and devices --------------------------------------------------------------


def two_processes(folder: Path) -> Path:
    b = TraceBuilder(process="/opt/engine")
    b.stream(13)
    phase(b, 1_000, name="a", steps=5)
    b.process(200, "./router", device=1)
    with b.at(pid=200, tid=201, device=1):
        b.stream(13)
        phase(b, 1_003, name="b", steps=8)
    return b.write(folder / "two.sqlite")


@pytest.mark.parametrize(
    ("args", "pids"),
    [
        ([], [100, 200]),
        (["--process=100"], [100]),
        (["--process=engine"], [100]),
        (["--process=*r*"], [200]),
        (["--device=1"], [200]),
        (["--device=0"], [100]),
        (["--nvtx=b"], [200]),
        (["--process=router", "--device=1", "--nvtx=b", "--time=1ms:"], [200]),
    ],
)
def test_processes_and_devices_limit_what_is_judged(
    run: Run, folder: Path, args: list[str], pids: list[int]
) -> None:
    trace = judged(run, two_processes(folder), *args)
    assert sorted(f["where"]["pid"] for f in trace["findings"]) == pids
    assert [part["pid"] for part in trace["capture"]["judged"]] == pids


def test_a_device_of_several_in_one_process(run: Run, folder: Path) -> None:
    b = TraceBuilder(gpus=2)
    b.stream(13)
    b.row("TARGET_INFO_CUDA_DEVICE", gpuId=1, cudaId=1, pid=100)
    with b.at(device=1, context=2):
        b.context(2, null_stream=20, device=1)
        b.stream(23)
    for i in range(64):
        at = 1_000 + 8 * i
        b.memcpy("HtoD", 512, stream=13, start=at + 5, end=at + 6, issue=(at, at + 4))
    for i in range(48):
        at = 3_000 + 8 * i
        with b.at(device=1, context=2):
            b.memcpy(
                "HtoD", 512, stream=23, start=at + 5, end=at + 6, issue=(at, at + 4)
            )
    path = b.write(folder / "t.sqlite")
    for device, copies in ((0, 64), (1, 48)):
        trace = judged(run, path, f"--device={device}", rule="small-copy-storm")
        assert only(trace)["occurrences"] == copies
        assert only(trace)["where"]["device"] == device
        assert trace["capture"]["judged"][0]["duration_ns"] < 1_000_000


# The steady state -------------------------------------------------------------------


def test_steady_state_needs_iterations(run: Run, folder: Path) -> None:
    path = two_phases(folder)
    done = run("lint", path, "--steady-state")
    assert (done.code, done.out) == (2, "")
    assert (
        done.err.splitlines()
        == [
            "error: no NVTX ranges repeat and hold most of the GPU work",
            'hint: name them in steady-state-nvtx; seen: "decode", "prefill"',
        ]
        or '"prefill", "decode"' in done.err
    )
    b = TraceBuilder()
    b.stream(13)
    phase(b, 1_000, step="step", steps=6)
    trace = judged(run, b.write(folder / "steps.sqlite"), "--steady-state")
    (part,) = trace["capture"]["judged"]
    assert (part["nvtx"], part["iterations"]) == ("step #", 5)
    assert trace["scope"]["steady_state"] is True
    # The first one warms up.
    assert only(trace)["occurrences"] == 5


def test_the_configuration_names_the_iterations(run: Run, folder: Path) -> None:
    b = TraceBuilder()
    b.stream(13)
    end = phase(b, 1_000, step="warm", steps=12)
    phase(b, end + 100, step="serve", steps=6)
    path = b.write(folder / "t.sqlite")
    assert judged(run, path)["capture"]["judged"][0]["nvtx"] == "warm #"
    own = folder / "streamlint.toml"
    own.write_text('steady-state-nvtx = "serve *"\n')
    trace = judged(run, path)
    (part,) = trace["capture"]["judged"]
    assert (part["nvtx"], part["iterations"]) == ("serve *", 5)
    assert trace["scope"] is None
    # The last wait has no work after it.
    assert "after 4 of them the GPU ran dry" in only(trace)["message"]
    assert only(judged(run, path, "--steady-state"))["occurrences"] == 5
    out = run("config", "show").out
    assert 'steady-state-nvtx = "serve *"  # streamlint.toml' in out.splitlines()
    assert "judged" in run("info", path).out
    own.write_text('steady-state = true\nsteady-state-nvtx = "sevre *"\n')
    done = run("lint", path)
    assert done.code == 2
    assert done.err.splitlines()[0] == 'error: no NVTX range fits "sevre *"'
    assert '"serve ' in done.err.splitlines()[1]
    own.write_text('steady-state = "yes"\n')
    assert run("lint", path).code == 2
    own.write_text("steady-state = true\n")
    assert judged(run, path, "--nvtx=serve *")["scope"]["steady_state"] is False


# What isn't there -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["--nvtx=decod"], 'no NVTX range fits "decod"', 'there are "decode"'),
        (
            ["--nvtx=lone"],
            'nothing is launched within NVTX ranges "lone"',
            "there are ",
        ),
        (
            ["--process=engine"],
            "no process with GPU work is called engine",
            "there are ",
        ),
        (["--process=101"], "no process with GPU work is called 101", "there are app"),
        (["--device=3"], "nothing ran on device 3", "devices with work: 0"),
        (["--time=9s:10s"], "no GPU work starts in --time", "what is left runs from "),
        (["--time=1"], "--time can't be 1", "it is START:END since"),
        (["--time=2s:1s"], "--time can't be 2s:1s", "it is START:END since"),
        (["--time=1h:"], "--time can't be 1h:", "it is START:END since"),
        (["--time=:"], "--time can't be :", "it is START:END since"),
        (["--nvtx=a", "--steady-state"], "--nvtx and --steady-state both", "name the"),
    ],
)
def test_a_scope_that_is_not_there_is_an_error(
    run: Run, folder: Path, args: list[str], error: str, hint: str
) -> None:
    b = TraceBuilder()
    b.stream(13)
    end = phase(b, 1_000, name="decode")
    b.nvtx("lone", end + 10, end + 20)
    path = b.write(folder / "t.sqlite")
    done = run("lint", path, *args)
    assert (done.code, done.out) == (2, "")
    first, second = done.err.splitlines()
    assert first.startswith(f"error: {error}")
    assert second.startswith(f"hint: {hint}")


def test_a_trace_without_ranges_says_how_to_record_them(run: Run, folder: Path) -> None:
    b = TraceBuilder()
    b.stream(13)
    phase(b, 1_000)
    done = run("lint", b.write(folder / "t.sqlite"), "--nvtx=step")
    assert done.code == 2
    assert done.err.endswith("hint: record with -t cuda,nvtx and mark the ranges\n")


def test_a_trace_that_lacks_the_scope_does_not_hide_another(
    run: Run, folder: Path
) -> None:
    path = two_phases(folder)
    done = run("lint", two_processes(folder), path, "--nvtx=decode")
    assert done.code == 2
    assert 'no NVTX range fits "decode"' in done.err
    assert RULE in done.out


def test_a_trace_that_cannot_be_judged_stays_so_with_a_scope(run: Run) -> None:
    unassessable = SAMPLES / "extra" / "2022.4.2_no_cuda_rows.sqlite"
    assert run("lint", unassessable, "--nvtx=x", "--device=1").code == 3


FAULTS = sorted(path.parent.name for path in SAMPLES.glob("*/bad.sqlite"))


@pytest.mark.parametrize("name", FAULTS)
def test_every_rule_keeps_to_the_scope(name: str) -> None:
    """A scope around a fault keeps it; one of its middle shows no other time."""
    trace = open_trace(SAMPLES / name / "bad.sqlite")
    rule = find(name)

    def judge(scope: Scope) -> Report:
        report = lint(trace, [rule], settings=Settings(scope=scope))
        assert not report.crashed
        return report

    def prints(report: Report) -> list[str]:
        return [finding.fingerprint(name) for _, finding in report.findings]

    whole = judge(Scope())
    assert prints(judge(Scope(process="*"))) == prints(whole)

    start = min(part.start_ns for part in whole.overview.judged)
    end = max(part.end_ns for part in whole.overview.judged)
    quarter = (end - start) // 4
    start, end = start + quarter, end - quarter
    middle = judge(Scope(start_ns=start, end_ns=end, device=0))
    for _, finding in middle.findings:
        assert 0 <= (finding.cost.share or 0) <= 1
        inside = [e.start_ns < end and e.end_ns > start for e in finding.evidence]
        # What is held in L2 may have been put there long before.
        assert any(inside) if rule.family == "l2-cache" else all(inside)
    trace.close()

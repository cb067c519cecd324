"""`--no-replay`: findings priced by what the trace shows directly."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import Run

import streamlint
from streamlint import replay
from streamlint.engine import Report, lint
from streamlint.registry import all_rules
from streamlint.settings import Settings
from streamlint.trace import open_trace

SAMPLES = Path(__file__).parents[1] / "sample_traces"
PAIRS = sorted(path.parent for path in SAMPLES.rglob("bad.sqlite"))
COPIES = str(SAMPLES / "pageable-async-copy" / "bad.sqlite")
HOST_FUNCTIONS = str(SAMPLES / "host-function-stall" / "bad.sqlite")


@pytest.fixture
def no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a graph fails."""
    monkeypatch.delattr(replay, "build")


def found(report: Report) -> set[tuple[str, str, int]]:
    return {
        (rule.name, finding.fingerprint(rule.name), finding.occurrences)
        for rule, finding in report.findings
    }


@pytest.mark.parametrize("pair", PAIRS, ids=lambda path: path.name)
def test_finds_the_same_or_says_that_it_needs_the_replay(
    pair: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bad.sqlite", "fixed.sqlite"):
        with open_trace(pair / name) as trace:
            full = lint(trace, all_rules(), with_model=True)
            monkeypatch.delattr(replay, "build")
            quick = lint(
                trace, all_rules(), with_model=True, settings=Settings(replay=False)
            )
            monkeypatch.undo()
        assert quick.crashed == []
        assert quick.model is None
        unable = {rule.name for rule, _ in full.not_assessed}
        needing = {
            rule.name
            for rule, why in quick.not_assessed
            if why.reason == "needs the replay"
        }
        assert {rule.name for rule, _ in quick.not_assessed} == unable | needing
        assert found(quick) == {f for f in found(full) if f[0] not in needing}
        for _, finding in quick.findings:
            assert finding.change is None
            assert not finding.cost.method.startswith("replay")


def judged(run: Run, *arguments: str) -> dict[str, Any]:
    done = run("lint", "--format", "json", "--exit-zero", *arguments)
    assert done.code == 0
    document: dict[str, Any] = json.loads(done.out)["traces"][0]
    return document


@pytest.mark.usefixtures("no_graph")
def test_a_cost_says_that_nothing_was_replayed(run: Run) -> None:
    trace = judged(run, COPIES, "--isolated", "--no-replay")
    assert trace["model"] is None
    (cost,) = (f["cost"] for f in trace["findings"])
    assert cost["claim"] == "direct"
    assert cost["method"].startswith("not replayed, so: time in which a thread was")


@pytest.mark.usefixtures("no_graph")
def test_what_only_the_replay_shows_is_not_assessed(run: Run) -> None:
    done = run("lint", HOST_FUNCTIONS, "--isolated", "--no-replay")
    words = " ".join(done.out.split())
    assert "needs the replay" in words
    assert "without --no-replay" in words


def test_the_configuration_can_say_so_and_the_command_line_otherwise(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("streamlint.toml").write_text("replay = false\n")
    assert judged(run, COPIES)["model"] is None
    assert judged(run, COPIES, "--replay")["model"] is not None
    assert "replay = false  # streamlint.toml" in run("config", "show").out.splitlines()
    Path("streamlint.toml").write_text("replay = 0\n")
    done = run("lint", COPIES)
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: streamlint.toml: replay can't be 0",
        "hint: it is true or false",
    ]


@pytest.mark.usefixtures("no_graph")
def test_the_page_and_the_timeline_do_without(run: Run, tmp_path: Path) -> None:
    page, timeline = tmp_path / "page.html", tmp_path / "timeline.json.gz"
    written = ("--html", str(page), "--output", f"perfetto={timeline}")
    done = run("lint", COPIES, "--isolated", "--no-replay", "--exit-zero", *written)
    assert (done.code, done.err) == (0, "")
    assert "pageable-async-copy" in page.read_text("utf-8")
    assert json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]


@pytest.mark.usefixtures("no_graph")
def test_python_can_ask_for_it() -> None:
    with streamlint.open(COPIES) as trace:
        result = streamlint.lint(trace, replay=False)
    assert [rule.name for rule, _ in result.findings] == ["pageable-async-copy"]
    assert result.to_dict()["traces"][0]["model"] is None


def test_compiles_nothing() -> None:
    program = (
        "import sys, streamlint\n"
        f"trace = streamlint.open({COPIES!r})\n"
        "print(len(streamlint.lint(trace, replay=False).findings))\n"
        "print('numba' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "False"]

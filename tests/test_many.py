"""Many traces in one command: folders, worker processes, what they do when they die."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from commandline import Run, process
from killing_judge import dies_once, judge
from tracebuilder import TraceBuilder

from streamlint import machine, many
from streamlint.engine import Report, lint
from streamlint.errors import OtherDatabase, StreamlintError, TraceError
from streamlint.registry import all_rules
from streamlint.settings import Settings
from streamlint.sources import Source, sources_of
from streamlint.trace import open_trace

EXTRA = Path(__file__).parents[1] / "sample_traces" / "extra"
BAD, FIXED = EXTRA / "legacy.sqlite", EXTRA / "legacy_fix.sqlite"


def copies(folder: Path, *names: str, of: Path = BAD) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copy(of, folder / name)) for name in names]


def sources(*paths: Path) -> list[Source]:
    return [Source(str(path)) for path in paths]


# Which traces a folder holds -------------------------------------------------------


def test_folders_are_searched(tmp_path: Path) -> None:
    names = ("b/r10.sqlite", "b/r9.sqlite", "a.sqlite", "a.nsys-rep", "c.nsys-rep")
    hidden = (".cache/x.sqlite", "b/.x.sqlite", ".git/x.sqlite", "notes.txt")
    for name in (*names, *hidden):
        copies((tmp_path / name).parent, Path(name).name)
    (tmp_path / "b" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dir.sqlite").mkdir()
    (tmp_path / "dangling.sqlite").symlink_to(tmp_path / "none")
    for folder in ("a", "c", "d.parquetdir"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "StringIds.parquet").write_bytes(b"PAR1")

    found = sources_of([str(tmp_path)])

    assert [Path(s.named).relative_to(tmp_path).as_posix() for s in found] == [
        "a.sqlite",
        "b/r9.sqlite",
        "b/r10.sqlite",
        "c",
        "d.parquetdir",
    ]
    assert [s.named for s in sources_of([str(tmp_path / "c")])] == [str(tmp_path / "c")]
    one = str(tmp_path / "b" / "r9.sqlite")
    again = sources_of([one, str(tmp_path / "b"), str(tmp_path)])
    assert [s.named for s in again].count(one) == 1
    assert len(again) == 5


def test_other_databases_in_a_folder_are_left_out(run: Run, tmp_path: Path) -> None:
    first, second = copies(tmp_path, "r0.sqlite", "r1.sqlite")
    other = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE customers (id)")
    done = run("lint", tmp_path, "--format", "json")
    assert done.code == 1
    assert done.err == (
        "note: other.sqlite is a SQLite database but not an nsys export: left out\n"
    )
    traces = json.loads(done.out)["traces"]
    assert [trace["path"] for trace in traces] == [str(first), str(second)]
    assert run("lint", tmp_path, other).code == 2
    first.unlink()
    second.unlink()
    done = run("lint", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "is a directory without traces" in done.err


# Outcomes --------------------------------------------------------------------------


def test_reports_and_errors_come_through_a_pipe_small(tmp_path: Path) -> None:
    with closing(open_trace(EXTRA / "torch.sqlite")) as trace:
        report = lint(trace, all_rules(), with_model=True)
    packed = pickle.dumps(report)
    assert len(packed) < 64_000
    again = pickle.loads(packed)
    assert again.judgements[0].rule is report.judgements[0].rule
    prints = [f.fingerprint(rule.name) for rule, f in report.findings]
    assert [f.fingerprint(rule.name) for rule, f in again.findings] == prints
    assert any(f.change is not None for _, f in report.findings)
    assert all(f.change is None for _, f in again.findings)
    assert again._replace(judgements=()) == report._replace(judgements=())

    error = pickle.loads(pickle.dumps(OtherDatabase("what", hint="how")))
    assert (type(error), error.message, error.hint) == (OtherDatabase, "what", "how")


def test_thresholds_go_by_name() -> None:
    rule = next(rule for rule in all_rules() if rule.thresholds)
    settings = Settings({rule.thresholds[0]: 7})
    again = pickle.loads(pickle.dumps(partial(lint, rules=(rule,), settings=settings)))
    assert again.keywords["settings"].limit(rule.thresholds[0]) == 7


def test_workers_give_what_this_process_gives(tmp_path: Path) -> None:
    files = sources(*copies(tmp_path, *(f"r{i}.sqlite" for i in range(5))), EXTRA)
    here = dict(many.judged_here(judge, files))
    there = dict(many.judged_by_processes(judge, files, 2))
    assert sorted(there) == list(range(6))
    for index in range(5):
        mine, theirs = here[index], there[index]
        assert isinstance(mine, Report)
        assert isinstance(theirs, Report)
        assert theirs.path == mine.path
        assert theirs.overview == mine.overview
        assert [f.message for _, f in theirs.findings] == [
            f.message for _, f in mine.findings
        ]
    refused = there[5]
    assert isinstance(refused, StreamlintError)
    assert "directory without traces" in refused.message


def test_a_trace_that_kills_two_workers_is_an_error_the_others_finish(
    tmp_path: Path,
) -> None:
    names = ("r0.sqlite", "r1_kills.sqlite", "r2_once.sqlite", "r3.sqlite")
    paths = copies(tmp_path, *names, "r4_breaks.sqlite")
    outcomes = dict(many.judged_by_processes(dies_once, sources(*paths), 2))
    for index in (0, 2, 3):
        assert isinstance(outcomes[index], Report)
    for index, words in (
        (1, "r1_kills.sqlite crashed: it ended its worker twice (SIGKILL)"),
        (4, "r4_breaks.sqlite could not be judged: ZeroDivisionError in streamlint"),
    ):
        error = outcomes[index]
        assert isinstance(error, StreamlintError)
        assert error.message.startswith(words)
    assert "memory" in str(getattr(outcomes[1], "hint", ""))


def test_leaving_early_ends_the_workers(tmp_path: Path) -> None:
    import multiprocessing

    before = set(multiprocessing.active_children())
    paths = copies(tmp_path, *(f"r{i}.sqlite" for i in range(8)))
    outcomes = many.judged_by_processes(judge, sources(*paths), 2)
    next(outcomes)
    assert set(multiprocessing.active_children()) > before
    outcomes.close()
    assert set(multiprocessing.active_children()) == before


# Memory and CPUs -------------------------------------------------------------------


def sized(path: Path, size: int) -> Source:
    with path.open("wb") as file:
        file.truncate(size)
    return Source(str(path))


def test_no_more_workers_than_memory_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = [sized(tmp_path / f"{i}.sqlite", 64 << 20) for i in range(9)]
    monkeypatch.setattr(many, "cpus", lambda: 6)
    need = many.memory_need(large[0])
    for free, count in ((None, 6), (100 * need, 6), (4 * need, 3), (need // 2, 1)):
        monkeypatch.setattr(many, "free_memory", lambda free=free: free)
        assert many.workers_for(large, None) == count
    assert many.workers_for(large, 40) == 1
    monkeypatch.setattr(many, "free_memory", lambda: None)
    assert many.workers_for(large, 40) == 9
    assert many.workers_for(large[:1], 4) == 0
    small = [sized(tmp_path / f"small{i}.sqlite", 4096) for i in range(9)]
    assert many.workers_for(small, None) == 0
    assert many.workers_for(small, 2) == 2
    report = sized(tmp_path / "x.nsys-rep", 64 << 20)
    assert many.memory_need(report) > need
    assert many.memory_need(Source("s3://bucket/x.sqlite")) > 1 << 30


def test_traces_wait_until_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = copies(tmp_path, "r0.sqlite", "r1.sqlite", "r2.sqlite", "r3.sqlite")
    needs = {"r0.sqlite": 60, "r1.sqlite": 60, "r2.sqlite": 30, "r3.sqlite": 500}
    monkeypatch.setattr(many, "memory_need", lambda source: needs[source.path.name])
    monkeypatch.setattr(many, "free_memory", lambda: 125)  # 100 of it for traces
    at_once: list[set[int]] = []
    give = many._Pool.give

    def noting(pool: many._Pool, index: int, source: Source) -> None:
        give(pool, index, source)
        at_once.append({worker.index for worker in pool.busy})

    monkeypatch.setattr(many._Pool, "give", noting)
    outcomes = dict(many.judged_by_processes(judge, sources(*paths), 4))
    assert all(isinstance(outcome, Report) for outcome in outcomes.values())
    assert at_once[:2] == [{0}, {0, 2}]
    assert {0, 1} not in [running & {0, 1} for running in at_once]
    assert {3} in at_once


def test_limits_of_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("800\n")
    (tmp_path / "memory.stat").write_text("anon 700\ninactive_file 100\n")
    monkeypatch.setattr(machine, "_cgroups", lambda: [tmp_path])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert machine.cpus() == 2
    assert machine.free_memory() == 300
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.cpus() == 4
    free = machine.free_memory()
    assert free is None or free > 1000


# The command -----------------------------------------------------------------------


def test_order_of_documents_is_that_of_the_command_line(tmp_path: Path) -> None:
    names = [f"r{i}.sqlite" for i in range(5)]
    paths = copies(tmp_path, *names)
    (tmp_path / "r2.sqlite").write_bytes(BAD.read_bytes()[:20_000])
    once = process("lint", *paths, "--format", "json", "--jobs", "2", cwd=tmp_path)
    here = process("lint", *paths, "--format", "json", cwd=tmp_path)
    assert once.code == here.code == 2
    assert once.out == here.out
    assert once.err == here.err
    assert once.err.startswith("error: r2.sqlite is cut off")
    document = json.loads(once.out)
    assert [Path(t["path"]).name for t in document["traces"]] == [
        name for name in names if name != "r2.sqlite"
    ]
    assert [e["path"] for e in document["errors"]] == [str(paths[2])]


def test_few_traces_have_a_section_each_many_a_line(run: Run, tmp_path: Path) -> None:
    copies(tmp_path, *(f"r{i}.sqlite" for i in range(9)))
    brief = run("lint", tmp_path)
    assert brief.code == 1
    lines = brief.out.splitlines()
    assert lines[8].startswith("r8.sqlite · GPU span 2.92 ms · 1 finding (1 high)")
    assert lines[10] == "fleet: 9 of 9 ranks assessed"
    assert brief.out.count("fix  ") == 1
    whole = run("lint", tmp_path, "--verbose")
    assert whole.out.count("fix  ") == 9
    (tmp_path / "r8.sqlite").unlink()
    few = run("lint", tmp_path)
    assert few.out.count("fix  ") == 8
    assert "fleet: 8 of 8 ranks assessed" in few.out
    written = tmp_path / "all.txt"
    run("lint", tmp_path, "--output", written)
    assert written.read_text("utf-8") == few.out


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_interrupt_ends_all_processes(tmp_path: Path) -> None:
    copies(tmp_path, *(f"r{i}.sqlite" for i in range(400)))
    command = [sys.executable, "-m", "streamlint", "lint", str(tmp_path), "--jobs=2"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        assert b"GPU span" in started.stdout.readline()  # the first, long before all
        os.killpg(started.pid, signal.SIGINT)
        rest, errors = started.stdout.read(), started.stderr.read()
    assert started.returncode not in (0, 1, 3)
    assert b"Traceback" not in errors
    assert rest.count(b"\n") < 390
    for _ in range(100):
        try:
            os.killpg(started.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        raise AssertionError("a process was left")


# URLs ------------------------------------------------------------------------------


def test_urls_are_fetched_and_their_credentials_never_shown(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    memory = fsspec.filesystem("memory")
    memory.pipe("/fleet/r0.sqlite", BAD.read_bytes())
    done = run("lint", "memory://fleet/r0.sqlite", "--format", "json")
    assert done.code == 1, done.err
    document = json.loads(done.out)
    assert document["traces"][0]["path"] == "memory://fleet/r0.sqlite"
    assert document["traces"][0]["findings"]
    assert list(temporary.iterdir()) == []

    done = run("lint", "memory://user:secret@fleet/none.sqlite?token=secret")
    assert done.code == 2
    assert done.err == "error: memory://fleet/none.sqlite does not exist\n" + (
        "hint: check the URL\n"
    )
    urls = (f"file://{BAD}", "nowhere://user:secret@host/a.sqlite")
    done = run("lint", *urls, "--jobs", "1")
    assert done.code == 2
    assert "legacy.sqlite · NVIDIA H200" in done.out
    assert "secret" not in done.out + done.err
    assert "nowhere://host/a.sqlite" in done.err


def test_a_url_needs_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "distributed", None)
    for arguments, what in (
        (["s3://bucket/a.sqlite"], "s3://bucket/a.sqlite is a URL"),
        ([BAD, "--scheduler", "tcp://127.0.0.1:1"], "--scheduler needs Dask"),
    ):
        done = run("lint", *arguments)
        assert done.code == 2
        error, hint = done.err.splitlines()
        assert what in error
        assert "streamlint[distributed]" in hint


def test_a_url_that_does_not_fit_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/big.sqlite", BAD.read_bytes())
    monkeypatch.setattr("streamlint.sources._SPARE_BYTES", 1 << 60)
    done = run("lint", "memory://big.sqlite")
    assert done.code == 2
    assert "does not fit on the disk" in done.err


def test_an_empty_trace_is_no_bug(tmp_path: Path) -> None:
    path = TraceBuilder().write(tmp_path / "empty.sqlite")
    outcome = many.outcome_of(judge, Source(str(path)))
    assert isinstance(outcome, Report)
    missing = many.outcome_of(judge, Source(str(tmp_path / "none.sqlite")))
    assert isinstance(missing, TraceError)

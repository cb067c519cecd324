"""Traces on a real Dask cluster of this machine: two worker processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dask.config
import pytest
from commandline import Run, process
from distributed import LocalCluster
from killing_judge import dies_once, judge

from streamlint import __version__, cluster
from streamlint.cluster import judge_remotely, judged_by_cluster
from streamlint.engine import Report
from streamlint.errors import StreamlintError, UsageError
from streamlint.sources import Source, sources_of

EXTRA = Path(__file__).parents[1] / "sample_traces" / "extra"
TRACES = ("legacy", "legacy_fix", "pageable", "pinned")

# One worker starts the cluster, once.
pytestmark = pytest.mark.xdist_group("cluster")


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalCluster]:
    # Else a result that lay on a killed worker is asked for during half a minute.
    soon = dask.config.set({"distributed.comm.timeouts.connect": "3s"})
    with (
        soon,
        LocalCluster(
            n_workers=2,
            processes=True,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=60,  # it warns of the workers that are killed here
        ) as started,
    ):
        yield started


def laid_out(folder: Path, count: int) -> list[Path]:
    """Small traces of so many ranks, the one of rank 5 cut off."""
    paths = [folder / f"ddp_rank{number:02}.sqlite" for number in range(count)]
    for number, path in enumerate(paths):
        shutil.copy(EXTRA / f"{TRACES[number % len(TRACES)]}.sqlite", path)
    if count > 5:
        paths[5].write_bytes(paths[4].read_bytes()[:20_000])
    return paths


def test_the_result_is_that_of_one_process_though_a_worker_is_killed(
    workers: LocalCluster, tmp_path: Path
) -> None:
    paths = laid_out(tmp_path, 32)
    result = tmp_path / "cluster.json"
    command = ["lint", str(tmp_path), "--scheduler", workers.scheduler_address]
    with subprocess.Popen(
        [sys.executable, "-m", "streamlint", *command, f"--output=json={result}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        first = started.stdout.readline()
        assert "GPU span" in first
        os.kill(workers.workers[0].pid, signal.SIGKILL)
        rest, errors = started.stdout.read(), started.stderr.read()
    assert started.returncode == 2, errors
    lines = (first + rest).splitlines()
    assert {line.partition(" ")[0] for line in lines[:31]} == {
        path.name for path in paths if path != paths[5]
    }
    assert errors.splitlines()[0].startswith("error: ddp_rank05.sqlite is cut off")
    assert len(errors.splitlines()) == 2
    assert "fleet: 31 of 32 ranks assessed" in rest
    here = process("lint", str(tmp_path), "--format", "json", cwd=tmp_path)
    assert result.read_text("utf-8") == here.out
    assert here.code == 2
    unassessed = json.loads(here.out)["fleet"]["unassessed"]
    assert unassessed == [5]


def test_a_trace_that_kills_two_workers_is_an_error_the_others_finish(
    workers: LocalCluster, tmp_path: Path
) -> None:
    laid_out(tmp_path, 5)
    for name in ("rank5_kills", "rank6_once", "rank7_breaks"):
        shutil.copy(EXTRA / "legacy.sqlite", tmp_path / f"{name}.sqlite")
    files = [*sources_of([str(tmp_path)]), Source(str(tmp_path / "none.sqlite"))]
    files += [Source(f"file://{EXTRA / 'legacy.sqlite'}")]
    outcomes = {
        files[index].path.name: outcome
        for index, outcome in judged_by_cluster(
            dies_once, files, workers.scheduler_address
        )
    }
    assert len(outcomes) == len(files)
    refused = {n: o for n, o in outcomes.items() if isinstance(o, StreamlintError)}
    assert sorted(refused) == [
        "none.sqlite",
        "rank5_kills.sqlite",
        "rank7_breaks.sqlite",
    ]
    assert refused["rank5_kills.sqlite"].message == (
        "rank5_kills.sqlite crashed: it ended its worker twice"
    )
    assert "ZeroDivisionError" in refused["rank7_breaks.sqlite"].message
    assert "where a worker looked for it" in refused["none.sqlite"].message
    fetched = outcomes["legacy.sqlite"]
    assert isinstance(fetched, Report)
    assert fetched.url == f"file://{EXTRA / 'legacy.sqlite'}"
    retried = outcomes["rank6_once.sqlite"]
    assert isinstance(retried, Report)
    assert retried.path == tmp_path / "rank6_once.sqlite"


def test_workers_need_this_streamlint(
    workers: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sources_of([str(path) for path in laid_out(tmp_path, 2)])
    assert judge_remotely("0.0.0", b"", files[0], "mark") == (__version__, None)
    monkeypatch.setattr(cluster, "__version__", "99.0")
    with pytest.raises(
        UsageError, match=rf"another streamlint \({__version__}\)"
    ) as no:
        list(judged_by_cluster(judge, files, workers.scheduler_address))
    assert no.value.hint == "install streamlint 99.0 where the workers run"


def test_nobody_at_an_address(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_CONNECT_S", 0.2)
    for address in ("tcp://127.0.0.1:9", "nowhere://user:secret@x"):
        done = run("lint", EXTRA / "legacy.sqlite", "--scheduler", address)
        assert (done.code, done.out) == (2, "")
        error, hint = done.err.splitlines()
        assert error.startswith("error: no Dask scheduler answers at ")
        assert "secret" not in error
        assert hint.startswith("hint: start one with `dask scheduler`")


def test_workers_that_never_come_are_an_error(
    workers: LocalCluster, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_WAIT_S", 0.1)
    monkeypatch.setattr(cluster, "_NO_WORKER_S", 0.3)
    workers.scale(0)  # the last test here: nobody needs them any more
    until = time.monotonic() + 20
    while workers.scheduler_info["workers"] and time.monotonic() < until:
        time.sleep(0.05)
    files = laid_out(tmp_path, 2)
    done = run("lint", *files, "--scheduler", workers.scheduler_address)
    assert (done.code, done.out) == (2, "")
    assert "ddp_rank00.sqlite was not judged: nobody is left at" in done.err

"""The generator of large traces: valid, repeatable, with a schedule that fits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from streamlint.replay import Edge, replay_of
from streamlint.trace import open_trace
from streamlint.trace.model import Trace

MAKE_TRACE = Path(__file__).parents[1] / "benchmarks" / "make_trace.py"


def _made(path: Path, *options: str) -> Path:
    command = [sys.executable, str(MAKE_TRACE), str(path), *options]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path


@pytest.fixture(scope="module", params=["plain", "graphs"])
def trace(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Trace:
    options = ["--kernels", "2000"]
    if request.param == "graphs":
        options += ["--graphs", "--osrt", "--streams", "10", "--seed", "7"]
    return open_trace(_made(tmp_path_factory.mktemp("made") / "t.sqlite", *options))


def test_has_what_a_large_export_has(trace: Trace) -> None:
    kernels = trace.kernels
    assert kernels.height == 2000
    assert (trace.memcpys.height, trace.memsets.height) == (280, 160)
    assert trace.processes.height == 2
    assert kernels["stream_id"].n_unique() >= 6
    assert trace.gpu_ops["issue_ns"].null_count() == 0
    assert trace.runtime_calls["backtrace_ns"].count() > 200
    assert (trace.runtime_calls["kind"] == "noise").sum() > 1000
    assert (trace.runtime_calls["tid"].n_unique()) == 4
    assert trace.event_waits.height == 40
    assert trace.nvtx_ranges.height > 100
    assert not trace.invalid_rows
    ids = trace.runtime_calls.group_by("correlation_id").agg(pl.col("pid").n_unique())
    assert (ids["pid"] == 2).sum() > 1000
    assert kernels["graph_node_id"].count() in (0, 400)


def test_no_stream_or_copy_engine_does_two_things_at_once(trace: Trace) -> None:
    before = pl.col("end_ns").shift(1)
    copies = trace.memcpys.filter(pl.col("copy_kind").is_in(("HtoD", "DtoH")))
    for rows, place in (
        (trace.gpu_ops, ("pid", "stream_id")),
        (copies, ("pid", "copy_kind")),
    ):
        early = rows.filter(pl.col("start_ns") < before.over(place))
        assert not early.height


def test_replays_exactly_and_the_bare_model_comes_close(trace: Trace) -> None:
    replay = replay_of(trace)
    again = replay.run()
    for name in again._fields:
        assert np.array_equal(getattr(again, name), getattr(replay.recorded, name))
    assert abs(replay.error) < 0.10
    for kind in (Edge.STREAM, Edge.BARRIER, Edge.EVENT, Edge.ENGINE, Edge.WAIT):
        assert len(replay.constraints(kind))


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    options = ("--kernels", "500", "--seed", "3")
    first = _made(tmp_path / "first.sqlite", *options).read_bytes()
    assert first == _made(tmp_path / "second.sqlite", *options).read_bytes()
    other = _made(tmp_path / "other.sqlite", "--kernels", "500", "--seed", "4")
    assert first != other.read_bytes()

"""The replay: exact on what was recorded, right about what fixed twins saved."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tracebuilder import TraceBuilder

from streamlint.changes import Change
from streamlint.engine import lint
from streamlint.findings import Claim
from streamlint.registry import select
from streamlint.replay import Edge, Replay, replay_of, span_ns
from streamlint.replay import schedule as schedule_module
from streamlint.replay.graph import Graph
from streamlint.steady import regions
from streamlint.trace import open_trace
from streamlint.trace.model import Trace

SAMPLES = Path(__file__).parent.parent / "sample_traces"
MEASURED = {
    "misc": 0.05,
    "probe": 0.05,
    "torch": 0.05,
    "torchbt": 0.05,
    "l2": 0.05,
    "l2_use": 0.05,
    "two_procs_one_gpu": 0.05,
    "two_procs_two_gpus": 0.05,
    "2026.1.1_four_stream_pipeline": 0.05,
    "2026.1.1_single_final_sync": 0.05,
    "um": 0.05,
    "ctxs": 0.05,
    "ptds": 0.05,
}
PAIRS = {"legacy": "legacy_fix", "devsync": "pinned", "pageable": "pinned"}


def _trace(name: str) -> Trace:
    return open_trace(SAMPLES / "extra" / f"{name}.sqlite")


def _replay(name: str) -> Replay:
    return replay_of(_trace(name))


@pytest.mark.parametrize("name", MEASURED)
def test_unchanged_replay_is_the_recorded_schedule(name: str) -> None:
    replay = replay_of(_trace(name))
    again = replay.run()
    assert np.array_equal(again.op_start, replay.recorded.op_start)
    assert np.array_equal(again.call_start, replay.recorded.call_start)
    assert np.array_equal(again.call_end, replay.recorded.call_end)


@pytest.mark.parametrize("name", MEASURED)
def test_bare_model_is_within_its_limit(name: str) -> None:
    assert abs(replay_of(_trace(name)).error) <= MEASURED[name]


@pytest.mark.parametrize("name", [*PAIRS, *sorted(set(PAIRS.values()))])
def test_bare_model_is_within_5_percent_on_pairs(name: str) -> None:
    assert abs(_replay(name).error) <= 0.05


def _saved(name: str) -> int:
    fixed = _replay(PAIRS[name])
    return span_ns(_replay(name).recorded) - span_ns(fixed.recorded)


def test_dropping_barriers_predicts_what_the_fix_saved() -> None:
    replay = _replay("legacy")
    free = replay.run([Change(drop=replay.constraints(Edge.BARRIER))])
    predicted = span_ns(replay.recorded) - span_ns(free)
    assert predicted == pytest.approx(_saved("legacy"), rel=0.10)


def test_dropping_device_syncs_predicts_what_the_fix_saved() -> None:
    replay = _replay("devsync")
    syncs = replay.calls_of(replay.graph.calls.filter(pl.col("kind") == "device sync"))
    assert len(syncs) == 40
    free = replay.run([Change(drop=replay.constraints(Edge.WAIT, calls=syncs))])
    predicted = span_ns(replay.recorded) - span_ns(free)
    assert predicted == pytest.approx(_saved("devsync"), rel=0.10)


def test_pinning_pageable_memory_predicts_what_the_fix_saved() -> None:
    (judgement,) = lint(
        _trace("pageable"), select(["pageable-async-copy"], [])
    ).judgements
    (finding,) = judgement.findings
    assert finding.cost.claim is Claim.WHAT_IF
    assert finding.cost.ns == pytest.approx(_saved("pageable"), rel=0.10)


@st.composite
def programs(draw: st.DrawFn) -> TraceBuilder:
    """Small programs of one thread on three streams with a consistent schedule."""
    builder = TraceBuilder()
    _program(draw, builder)
    return builder


@st.composite
def several_programs(draw: st.DrawFn) -> TraceBuilder:
    """Two or three such programs at once, on GPUs of their own or shared ones."""
    builder = TraceBuilder(gpus=3)
    for number in range(draw(st.integers(2, 3))):
        pid = 100 + 10 * number
        if number:
            builder.process(pid, gpu=draw(st.integers(0, number)))
        with builder.at(pid=pid):
            _program(draw, builder)
    return builder


def _program(draw: st.DrawFn, builder: TraceBuilder) -> None:
    builder.stream(13, flag=1)
    builder.stream(14, flag=2)
    busy_until = {7: 0.0, 13: 0.0, 14: 0.0}
    now = 1_000.0
    for _ in range(draw(st.integers(1, 25))):
        now += draw(st.floats(0.5, 20.0))
        action = draw(
            st.sampled_from(["kernel", "kernel", "copy", "sync", "device sync"])
        )
        stream = draw(st.sampled_from([7, 13, 14]))
        if action in ("kernel", "copy"):
            lasting = draw(st.floats(1.0, 60.0))
            start = max(now + 3.0, busy_until[stream] + 1.0)
            if stream != 14:
                others = [busy_until[13]] if stream == 7 else [busy_until[7]]
                start = max(start, *(end + 1.0 for end in others))
            busy_until[stream] = start + lasting
            issue = (now, now + 2.0)
            if action == "kernel":
                builder.kernel(
                    "work",
                    stream=stream,
                    start=start,
                    end=start + lasting,
                    issue=issue,
                    grid=(8, 1, 1),
                )
            else:
                builder.memcpy(
                    "HtoD",
                    4096,
                    src="pinned",
                    dst="device",
                    stream=stream,
                    start=start,
                    end=start + lasting,
                    issue=issue,
                )
            now += 2.0
        elif action == "sync":
            end = max(now + 1.0, busy_until[stream] + 2.0)
            builder.sync("cudaStreamSynchronize", stream, now, end)
            now = end
        else:
            end = max(now + 1.0, *(t + 2.0 for t in busy_until.values()))
            builder.device_sync(now, end)
            now = end
    builder.kernel(
        "last",
        stream=14,
        start=max(now + 5.0, busy_until[14] + 1.0),
        end=max(now + 5.0, busy_until[14] + 1.0) + 10.0,
        issue=(now + 1.0, now + 2.0),
        grid=(8, 1, 1),
    )


@settings(max_examples=60)
@given(program=programs(), data=st.data())
def test_dropping_a_constraint_never_lengthens_the_run(
    program: TraceBuilder, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    replay = _built(program, tmp_path_factory)
    assert np.array_equal(replay.run().op_start, replay.recorded.op_start)
    total = len(replay.graph.kind)
    if total:
        dropped = data.draw(st.sets(st.integers(0, total - 1)))
        index = np.array(sorted(dropped), dtype=np.int64)
        free = replay.run([Change(drop=index)])
        assert (free.op_start <= replay.recorded.op_start).all()
        assert free.op_end.max() <= replay.recorded.op_end.max()
    every = np.arange(len(replay.graph.op_duration))
    halved = Change(op_duration=(every, replay.graph.op_duration // 2))
    assert (replay.run([halved]).op_start <= replay.recorded.op_start).all()


@settings(max_examples=40)
@given(program=programs())
def test_replay_of_a_replay_is_a_fixed_point(
    program: TraceBuilder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    replay = _built(program, tmp_path_factory)
    change = [Change(drop=replay.constraints(Edge.BARRIER))]
    once, twice = replay.run(change), replay.run(change * 2)
    assert np.array_equal(once.op_start, twice.op_start)
    assert np.array_equal(once.call_end, twice.call_end)


@settings(max_examples=30)
@given(program=several_programs(), seed=st.integers(0, 1 << 32))
def test_a_part_is_evaluated_as_the_whole_is(
    program: TraceBuilder, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    replay = _built(program, tmp_path_factory)
    graph, random = replay.graph, np.random.default_rng(seed)
    drop = np.flatnonzero(random.random(len(graph.kind)) < 0.2)
    one = random.integers(len(graph.op_start), size=1)
    change = Change(drop=drop[:3], op_duration=(one, graph.op_duration[one] // 2))
    # Alters nothing, everywhere.
    same = Change(op_duration=(np.arange(len(graph.op_start)), graph.op_duration))
    alone, whole = replay.run([change]), replay.run([change, same])
    for name in alone._fields:
        assert np.array_equal(getattr(alone, name), getattr(whole, name))


def test_processes_are_parts_unless_copies_share_an_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    for gpus, copying, parts in (
        ((0, 1, 2), (True, True, True), 3),
        ((0, 1, 0), (True, True, True), 2),
        ((0, 0, 0), (True, True, True), 1),
        ((0, 0, 0), (True, False, True), 2),
    ):
        builder = TraceBuilder(gpus=3)
        for number, (gpu, copies) in enumerate(zip(gpus, copying, strict=True)):
            at = 1_000.0 + 10 * number
            pid = 100 + 10 * number
            if number:
                builder.process(pid, gpu=gpu)
            with builder.at(pid=pid):
                if copies:
                    builder.memcpy(
                        "HtoD",
                        4096,
                        src="pinned",
                        dst="device",
                        stream=7,
                        start=at + 5,
                        end=at + 9,
                        issue=(at, at + 2),
                    )
                builder.device_sync(at + 20, at + 30)
        graph = _built(builder, tmp_path_factory).graph
        assert len(graph.event_bounds) == parts + 1
        assert graph.event_bounds[-1] == len(graph.event_kind)


def _built(program: TraceBuilder, folders: pytest.TempPathFactory) -> Replay:
    path = program.write(folders.mktemp("program") / "trace.sqlite")
    trace = open_trace(path)
    try:
        return replay_of(trace)
    finally:
        trace.close()


def _barrier_program(first: int, second: int, shift: float) -> TraceBuilder:
    builder = TraceBuilder()
    builder.stream(first, flag=1)
    builder.stream(second, flag=1)
    for turn in range(6):
        at = shift + 1_000 + 200.0 * turn
        for number, stream in enumerate((first, 7, second)):
            start = at + 10 + 51.0 * number
            builder.kernel(
                "work",
                stream=stream,
                start=start,
                end=start + 50,
                issue=(at + 2.0 * number, at + 2.0 * number + 1.5),
                grid=(8, 1, 1),
            )
    return builder


def test_renaming_streams_and_shifting_time_change_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    savings = []
    for first, second, shift in ((13, 14, 0.0), (21, 15, 0.0), (13, 14, 5e6)):
        replay = _built(_barrier_program(first, second, shift), tmp_path_factory)
        free = replay.run([Change(drop=replay.constraints(Edge.BARRIER))])
        savings.append((replay.error, span_ns(replay.recorded) - span_ns(free)))
    assert savings[0][1] > 0
    assert savings[0] == savings[1] == savings[2]


def test_compiled_and_plain_passes_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    replay = replay_of(_trace("misc"))
    change = [Change(drop=replay.constraints(Edge.WAIT, Edge.STREAM))]
    monkeypatch.setattr(schedule_module, "_is_prepared", False)
    monkeypatch.setattr(schedule_module, "COMPILED_FROM", 1 << 60)
    plain = replay.run(change)
    monkeypatch.setattr(schedule_module, "COMPILED_FROM", 0)
    compiled = replay.run(change)
    for name in ("op_start", "op_end", "call_start", "call_end"):
        assert np.array_equal(getattr(plain, name), getattr(compiled, name))


def test_passes_are_compiled_once_enough_was_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = replay_of(_trace("misc"))
    events = len(replay.graph.event_kind)
    compiled: list[int] = []

    def run(first: int, last: int, *columns: np.ndarray) -> None:
        assert len(columns) > 20
        compiled.append(last - first)

    made = Future[object]()
    made.set_result(run)
    monkeypatch.setattr(schedule_module, "_compiling", lambda: made)
    monkeypatch.setattr(schedule_module, "_interpreted", 0)
    monkeypatch.setattr(schedule_module, "_is_prepared", False)
    monkeypatch.setattr(schedule_module, "COMPILED_FROM", 3 * events)
    for _ in range(4):
        replay.run()
    assert compiled == [events, events]


def test_a_large_graph_is_compiled_from_the_first_pass_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = _trace("misc")
    asked: list[str] = []
    made = Future[object]()
    made.set_result(lambda *columns: asked.append("run"))

    def compiling() -> Future[object]:
        asked.append("compile")
        return made

    monkeypatch.setattr(schedule_module, "_compiling", compiling)
    monkeypatch.setattr(schedule_module, "_is_prepared", False)
    monkeypatch.setattr(schedule_module, "COMPILED_FROM", 1 << 60)
    nodes = trace.runtime_calls.height + trace.gpu_ops.height
    monkeypatch.setattr(schedule_module, "AHEAD_FROM", nodes + 1)
    _replay("misc").run()
    assert asked == []
    monkeypatch.setattr(schedule_module, "AHEAD_FROM", nodes)
    _replay("misc").run()
    assert asked == ["compile", "compile", "run"]


def test_only_what_can_change_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = replay_of(_trace("misc"))
    graph = replay.graph
    at = [*schedule_module._COLUMNS].index("op_duration")
    ran: list[tuple[int, int]] = []

    def run(first: int, last: int, *columns: np.ndarray) -> None:
        ran.append((first, last))
        # In a copy: another rule may ask the graph meanwhile.
        assert (columns[at] != graph.op_duration).sum() == 1

    made = Future[object]()
    made.set_result(run)
    monkeypatch.setattr(schedule_module, "_compiling", lambda: made)
    monkeypatch.setattr(schedule_module, "COMPILED_FROM", 0)
    for op in (0, len(graph.op_start) // 2):
        replay.run([Change(op_duration=(np.array([op]), np.array([0])))])
        (event,) = np.flatnonzero((graph.event_kind == 2) & (graph.event_index == op))
        ((first, last),) = ran
        assert event - 5 < first <= event < last == len(graph.event_kind)
        ran.clear()
    replay.run([Change()])
    assert ran == []


def test_rows_are_found_by_all_of_their_key(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    late = 2.0**60 / 1_000  # in us: ns that no float can hold
    program = _barrier_program(13, 14, late)
    replay = _built(program, tmp_path_factory)
    graph = replay.graph
    calls, ops = graph.calls, graph.ops
    some = pl.DataFrame({"start_ns": [None, *calls["start_ns"][2:4]]}).join(
        calls.select("pid", "tid", "start_ns"), on="start_ns", how="left"
    )
    assert replay.calls_of(some).tolist() == [2, 3]
    assert replay.calls_of(some.with_columns(pl.col("tid") + 1)).tolist() == []
    assert replay.calls_of(calls).tolist() == calls["call_index"].to_list()
    assert replay.ops_of(ops[[5, 1]]).tolist() == [1, 5]
    assert replay.ops_of(ops[[1]].with_columns(pl.col("start_ns") + 1)).tolist() == []
    issued = replay.ops_issued_by(np.array([4, 1]))
    assert issued.tolist() == np.flatnonzero(np.isin(graph.issue_call, (1, 4))).tolist()


def test_constraints_of_nodes_are_those_of_the_kinds() -> None:
    replay = _replay("misc")
    graph = replay.graph
    ops, calls = np.array([7, 3, 3, 11]), np.array([5, 2, 9])
    for kinds in ((Edge.STREAM,), (Edge.WAIT, Edge.COPY), tuple(Edge)):
        of_kinds = np.isin(graph.kind, kinds)
        for chosen, nodes in (
            (replay.constraints(*kinds), graph.node),
            (replay.constraints(*kinds, ops=ops), ops),
            (replay.constraints(*kinds, calls=calls), calls + graph.ops.height),
        ):
            expected = np.flatnonzero(of_kinds & np.isin(graph.node, nodes))
            assert chosen.tolist() == expected.tolist()


def test_every_constraint_points_back_in_time() -> None:
    for name in PAIRS:
        graph: Graph = _replay(name).graph
        assert graph.active.any()
        assert (graph.count[graph.active] > 0).all()


def test_region_saving_counts_only_its_operations() -> None:
    trace = _trace("legacy")
    replay = replay_of(trace)
    (region,) = regions(trace).values()
    assert replay.saving_ns(replay.recorded, region) == 0

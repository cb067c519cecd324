"""Rules about graphs, host functions, programmatic launches, small kernels and
events, on small built traces. `test_rules_allocation_launches.py` has the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tracebuilder import TraceBuilder

from streamlint.engine import Judgement, lint
from streamlint.findings import Claim, Confidence, Finding, Severity
from streamlint.registry import find
from streamlint.trace import open_trace

EXEC = "graph-exec-self-serialization"
PDL = "pdl-candidate"
UNDERFILLED = "underfilled-serial-kernels"
HOST_FUNCTION = "host-function-stall"
CARVEOUT = "carveout-switch-serialization"
PAGEABLE_GRAPH = "graph-blocked-by-pageable-copy"
TIMING = "timing-event-as-dependency"
UNRECORDED = "wait-on-unrecorded-event"
HAND_OVER = "host-mediated-dependency"


def judge(b: TraceBuilder, tmp_path: Path, rule: str) -> Judgement:
    trace = open_trace(b.write(tmp_path / "t.sqlite"))
    (judgement,) = lint(trace, [find(rule)]).judgements
    assert judgement.crashed is None, judgement.crashed
    return judgement


def findings(b: TraceBuilder, tmp_path: Path, rule: str) -> list[Finding]:
    judgement = judge(b, tmp_path, rule)
    assert judgement.not_assessed is None, judgement.not_assessed
    return list(judgement.findings)


def one(b: TraceBuilder, tmp_path: Path, rule: str) -> Finding:
    (finding,) = findings(b, tmp_path, rule)
    return finding


def cost_us(finding: Finding) -> float:
    assert finding.cost.ns is not None
    return finding.cost.ns / 1000


def builder(*streams: int, gpus: int = 1) -> TraceBuilder:
    """With these non-blocking streams, and a kernel before anything else."""
    b = TraceBuilder(gpus=gpus)
    add_streams(b, *streams)
    return b


def add_streams(b: TraceBuilder, *streams: int) -> None:
    for stream in streams:
        b.stream(stream, flag=2)
    b.kernel("init", stream=streams[0], start=85, end=90, grid=(2000, 1, 1))


# graph-exec-self-serialization ------------------------------------------------


def exec_turns(
    b: TraceBuilder,
    *,
    execs: tuple[int, int] = (2, 2),
    node_mode: bool = False,
    grid: int = 8,
    waits: bool = False,
    origin: float = 100.0,
) -> None:
    """Ten launches of 100 us, in two streams in turn; one executable graph in turn."""
    free = {13: origin, 14: origin}
    last = origin
    for i in range(10):
        at, stream, which = origin + 10 * i, 13 + i % 2, execs[i % 2]
        if waits:
            b.event_record(27 - stream, 1, at - 6)
            b.event_wait(stream, 1, at - 3)
        call = b.graph_launch(at)
        start = max(at + 6, free[stream] + 2)
        if execs[0] == execs[1]:
            start = max(start, last + 2)
        if node_mode:
            for node in range(2):
                b.kernel(
                    "node",
                    stream=stream,
                    start=start + 50 * node,
                    end=start + 50 * node + 49,
                    call=call,
                    grid=(grid, 1, 1),
                    graph_node=which << 32 | node,
                )
        else:
            b.graph_trace(
                stream=stream, start=start, end=start + 99, call=call, graph_exec=which
            )
        free[stream] = last = start + 99


@pytest.mark.parametrize("node_mode", [False, True])
def test_one_executable_graph_in_two_streams(node_mode: bool, tmp_path: Path) -> None:
    b = builder(13, 14)
    exec_turns(b, node_mode=node_mode)

    finding = one(b, tmp_path, EXEC)

    assert finding.occurrences == 9
    assert finding.cost.claim is Claim.UPPER_BOUND
    # Ten launches of 99 us in a row; with two executable graphs five.
    assert 490 < cost_us(finding) < 600
    assert finding.severity is Severity.HIGH
    assert finding.message == (
        "one executable graph is launched into 2 streams: 9 launches waited for the "
        "one before in another stream"
    )
    assert finding.where.streams == (13, 14)
    assert finding.change is not None
    assert len(finding.evidence) == 5


def test_launches_before_the_iterations_wait_too(tmp_path: Path) -> None:
    b = builder(13, 14)
    for origin in (100, 2000):
        exec_turns(b, node_mode=True, origin=origin)
    for i in range(5):
        b.nvtx(f"iteration {i}", 1998 + 20 * i, 2016 + 20 * i)

    finding = one(b, tmp_path, EXEC)

    # Each stream has five launches; the first of ten began before iteration 1.
    assert finding.occurrences == 9
    assert 490 < cost_us(finding) < 600
    assert "replay of the run" in finding.cost.method


def test_streams_keep_their_order_where_the_replay_is_off(tmp_path: Path) -> None:
    b = builder(13, 14)
    exec_turns(b)
    # The replay can't explain why the second of these starts so late.
    b.stream(15, flag=2)
    b.kernel("early", stream=15, start=1200, end=1300, issue=(1150, 1154))
    b.kernel("late", stream=15, start=2500, end=2510, issue=(1160, 1164))

    finding = one(b, tmp_path, EXEC)

    assert finding.cost.method.startswith("the replay is off by")
    assert cost_us(finding) == pytest.approx(5 * 99)


@pytest.mark.parametrize("node_mode", [False, True])
def test_an_executable_graph_for_each_stream(node_mode: bool, tmp_path: Path) -> None:
    b = builder(13, 14)
    exec_turns(b, execs=(2, 4), node_mode=node_mode)

    assert findings(b, tmp_path, EXEC) == []


def test_launches_that_an_event_orders(tmp_path: Path) -> None:
    b = builder(13, 14)
    exec_turns(b, waits=True)

    assert findings(b, tmp_path, EXEC) == []


def test_graphs_that_fill_the_gpu(tmp_path: Path) -> None:
    b = builder(13, 14)
    exec_turns(b, node_mode=True, grid=132 * 16)

    assert findings(b, tmp_path, EXEC) == []


def test_one_executable_graph_in_one_stream(tmp_path: Path) -> None:
    b = builder(13)
    for i in range(10):
        start = 106 + 101 * i
        b.graph_trace(
            stream=13, start=start, end=start + 99, issue=(100 + 10 * i, 105 + 10 * i)
        )

    assert findings(b, tmp_path, EXEC) == []


def test_launches_into_a_free_gpu(tmp_path: Path) -> None:
    b = builder(13, 14)
    for i in range(10):
        start = 106 + 150 * i
        b.graph_trace(
            stream=13 + i % 2,
            start=start,
            end=start + 99,
            issue=(start - 6, start - 1),
        )

    assert findings(b, tmp_path, EXEC) == []


# pdl-candidate ----------------------------------------------------------------


def chain(
    b: TraceBuilder,
    count: int = 200,
    *,
    gap: float = 1.0,
    lasting: float = 10.0,
    names: tuple[str, ...] = ("step",),
    every: float = 5.0,
    graph: bool = False,
    waits: bool = False,
) -> None:
    """Kernels ``gap`` us apart in stream 13, launched ``every`` us before."""
    call = b.graph_launch(50) if graph else None
    for i in range(count):
        start, at = 110 + i * (lasting + gap), 100 + i * every
        if waits:
            b.event_record(14, 1, at - 0.4)
            b.event_wait(13, 1, at - 0.2)
        b.kernel(
            names[i % len(names)],
            stream=13,
            start=start,
            end=start + lasting,
            issue=(at, at + 4),
            call=call,
            graph_node=2 << 32 | i if graph else None,
        )


def test_gaps_in_a_full_queue(tmp_path: Path) -> None:
    b = builder(13)
    chain(b)

    finding = one(b, tmp_path, PDL)

    # The second kernel's call returns just before the first one ends.
    assert finding.occurrences == 199
    assert finding.cost.claim is Claim.WHAT_IF
    assert cost_us(finding) == pytest.approx(199 * 1.24)
    assert finding.severity is Severity.HIGH
    assert finding.message == (
        "199 queued kernels start 1.0 us on average after the end of the one before "
        "in their stream"
    )
    assert finding.identity == ("gaps", "step")


def test_gaps_that_cost_little(tmp_path: Path) -> None:
    b = builder(13)
    chain(b, lasting=200)

    assert findings(b, tmp_path, PDL) == []


@pytest.mark.parametrize(("count", "fires"), [(100, False), (101, True)])
def test_a_hundred_gaps(count: int, fires: bool, tmp_path: Path) -> None:
    b = builder(13)
    chain(b, count)

    assert bool(findings(b, tmp_path, PDL)) is fires


def test_programmatic_launches_overlap(tmp_path: Path) -> None:
    b = builder(13)
    chain(b, gap=-2.0)

    assert findings(b, tmp_path, PDL) == []


def test_kernels_that_overlap_a_neighbour_elsewhere(tmp_path: Path) -> None:
    b = builder(13)
    # The second of each pair starts early; the first has its usual gap.
    for i in range(300):
        start = 110 + i * 20
        at = 100 + i * 10
        b.kernel("first", stream=13, start=start, end=start + 10, issue=(at, at + 4))
        b.kernel(
            "second", stream=13, start=start + 8, end=start + 19, issue=(at + 5, at + 9)
        )

    assert findings(b, tmp_path, PDL) == []


@pytest.mark.parametrize("gap", [0.3, 4.0])
def test_gaps_of_another_kind(gap: float, tmp_path: Path) -> None:
    b = builder(13)
    chain(b, gap=gap)

    assert findings(b, tmp_path, PDL) == []


def test_gaps_that_a_late_launch_makes(tmp_path: Path) -> None:
    b = builder(13)
    for i in range(200):
        start = 110 + i * 12
        b.kernel(
            "step", stream=13, start=start, end=start + 10, issue=(start - 3, start - 1)
        )

    assert findings(b, tmp_path, PDL) == []


def test_kernels_of_a_graph(tmp_path: Path) -> None:
    b = builder(13)
    chain(b, graph=True)

    assert findings(b, tmp_path, PDL) == []


def test_event_waits_between_the_kernels(tmp_path: Path) -> None:
    b = builder(13, 14)
    chain(b, waits=True)

    assert findings(b, tmp_path, PDL) == []


def test_gpus_that_cannot_launch_programmatically(tmp_path: Path) -> None:
    b = builder(13)
    b.rows["TARGET_INFO_GPU"][0]["computeMajor"] = 8
    chain(b)

    assert findings(b, tmp_path, PDL) == []


# underfilled-serial-kernels ---------------------------------------------------


def small_kernels(
    b: TraceBuilder,
    count: int = 40,
    *,
    streams: int = 1,
    grid: int = 420,
    every: float = 5.0,
    origin: float = 100,
    slower: float = 1.0,
    api: str = "cudaLaunchKernel",
) -> float:
    """Kernels of 50 us, side by side in that many streams; returns the last end."""
    free = dict.fromkeys(range(13, 13 + streams), origin)
    for i in range(count):
        stream, at = 13 + i % streams, origin + every * i
        start = max(at + 6, free[stream] + 1)
        free[stream] = end = start + 50 * slower
        b.kernel(
            "small",
            stream=stream,
            start=start,
            end=end,
            issue=(at, at + 4),
            grid=(grid, 1, 1),
            block=(16, 1, 1),
            api=api,
        )
    return max(free.values())


def test_small_kernels_in_a_row(tmp_path: Path) -> None:
    b = builder(13)
    small_kernels(b)

    finding = one(b, tmp_path, UNDERFILLED)

    assert finding.occurrences == 40
    assert finding.severity is Severity.INFO
    assert finding.confidence is Confidence.LOW
    assert finding.cost.claim is Claim.NONE
    assert finding.change is None
    assert finding.message == (
        "40 kernels that each ask for at most 10% of the GPU run one after another in "
        "1 run, 2.00 ms in all; none of this process ran side by side"
    )


def test_small_kernels_side_by_side(tmp_path: Path) -> None:
    b = builder(*range(13, 21))
    small_kernels(b, streams=8)

    assert findings(b, tmp_path, UNDERFILLED) == []


def test_a_gain_that_the_trace_shows_bounds_the_cost(tmp_path: Path) -> None:
    b = builder(13, 14)
    end = small_kernels(b)
    b.sync("cudaStreamSynchronize", stream=13, start=400, end=end + 3)
    small_kernels(b, streams=2, origin=end + 10)

    finding = one(b, tmp_path, UNDERFILLED)

    assert finding.occurrences == 40
    assert finding.severity is Severity.INFO
    assert finding.cost.claim is Claim.UPPER_BOUND
    # Two at a time took about half of the time of 40 in a row.
    assert 700 < cost_us(finding) < 1_000
    assert "side by side they were 2.0 times as fast" in finding.message
    assert finding.change is not None


def test_small_kernels_that_gain_nothing_side_by_side(tmp_path: Path) -> None:
    b = builder(13, 14)
    end = small_kernels(b)
    small_kernels(b, streams=2, origin=end + 100, slower=1.8)

    assert findings(b, tmp_path, UNDERFILLED) == []


def test_kernels_of_a_quarter_of_the_gpu(tmp_path: Path) -> None:
    b = builder(13)
    small_kernels(b, grid=132 * 8)

    assert findings(b, tmp_path, UNDERFILLED) == []


def test_small_kernels_that_the_host_launches_late(tmp_path: Path) -> None:
    b = builder(13)
    small_kernels(b, every=60)

    assert findings(b, tmp_path, UNDERFILLED) == []


def test_small_kernels_beside_a_large_one(tmp_path: Path) -> None:
    b = builder(13, 14)
    b.kernel("large", stream=14, start=50, end=3000, grid=(2000, 1, 1))
    small_kernels(b)

    assert findings(b, tmp_path, UNDERFILLED) == []


def test_small_kernels_that_take_little_of_the_time(tmp_path: Path) -> None:
    b = builder(13)
    end = small_kernels(b, 10)
    b.kernel("large", stream=13, start=end + 10, end=end + 9_000, grid=(2000, 1, 1))

    assert findings(b, tmp_path, UNDERFILLED) == []


def test_cooperative_kernels(tmp_path: Path) -> None:
    b = builder(13)
    small_kernels(b, api="cudaLaunchCooperativeKernel")

    assert findings(b, tmp_path, UNDERFILLED) == []


# host-function-stall ----------------------------------------------------------


def host_functions(
    b: TraceBuilder,
    rounds: int = 6,
    *,
    stall: float = 1_000,
    own_stream: bool = False,
    api: str = "cudaLaunchHostFunc",
    return_value: int = 0,
) -> None:
    """A kernel of 500 us, a host function, and so on, all issued at the start."""
    start = 150.0
    for i in range(rounds):
        at = 100 + 20 * i
        b.kernel("work", stream=13, start=start, end=start + 500, issue=(at, at + 4))
        if own_stream:
            b.event_record(13, 1, at + 5)
            b.event_wait(14, 1, at + 8)
        b.call(api, at + 12, 4, return_value=return_value)
        start += 501 + (0 if own_stream else stall)
    b.sync("cudaStreamSynchronize", stream=13, start=300, end=start + 10)


@pytest.mark.parametrize("api", ["cudaLaunchHostFunc", "cudaStreamAddCallback"])
def test_a_stream_waits_for_its_host_functions(api: str, tmp_path: Path) -> None:
    b = builder(13)
    host_functions(b, api=api)

    finding = one(b, tmp_path, HOST_FUNCTION)

    # Five kernels follow a host function.
    assert finding.occurrences == 5
    assert finding.cost.claim is Claim.UPPER_BOUND
    assert cost_us(finding) == pytest.approx(5_000, rel=0.02)
    assert finding.severity is Severity.HIGH
    assert finding.where.streams == (13,)
    assert finding.message == (
        f"a stream stood still 5 times after {api}, for 1.00 ms on average, until the "
        "host function had run"
    )
    assert finding.identity == ("host function", api, "")
    assert finding.change is not None
    first = min(finding.evidence, key=lambda e: e.start_ns)
    assert first.end_ns == 1_651_000
    assert first.end_ns - first.start_ns == pytest.approx(1_000_000, rel=0.01)


def test_host_functions_in_a_stream_of_their_own(tmp_path: Path) -> None:
    b = builder(13, 14)
    host_functions(b, own_stream=True)

    assert findings(b, tmp_path, HOST_FUNCTION) == []


def test_host_functions_that_take_no_time(tmp_path: Path) -> None:
    b = builder(13)
    host_functions(b, stall=15)

    assert findings(b, tmp_path, HOST_FUNCTION) == []


@pytest.mark.parametrize(("rounds", "fires"), [(3, False), (4, True)])
def test_three_stalls(rounds: int, fires: bool, tmp_path: Path) -> None:
    b = builder(13)
    host_functions(b, rounds)

    assert bool(findings(b, tmp_path, HOST_FUNCTION)) is fires


def test_host_functions_that_failed(tmp_path: Path) -> None:
    b = builder(13)
    host_functions(b, return_value=1)

    assert findings(b, tmp_path, HOST_FUNCTION) == []


def test_delays_in_a_stream_without_host_functions(tmp_path: Path) -> None:
    b = builder(13, 14)
    b.kernel("other", stream=14, start=90, end=95)
    for i in range(6):
        at = 100 + 20 * i
        start = 150 + i * 1_501
        b.kernel("work", stream=13, start=start, end=start + 500, issue=(at, at + 4))
        b.kernel("side", stream=14, start=at + 12, end=at + 13, issue=(at + 5, at + 9))
        b.call("cudaLaunchHostFunc", at + 12, 4)

    assert findings(b, tmp_path, HOST_FUNCTION) == []


# carveout-switch-serialization ------------------------------------------------


def two_configurations(
    b: TraceBuilder,
    *,
    executed: tuple[int, int] = (8 << 10, 100 << 10),
    together: bool = False,
    blocks: int = 132,
    waits: bool = False,
) -> None:
    """Kernels of 100 us of two streams with shared memory configurations, in turn."""
    free = {13: 100.0, 14: 100.0}
    last = 100.0
    for i in range(12):
        stream, at = 13 + i % 2, 100 + 10 * i
        if waits:
            b.event_record(27 - stream, 1, at - 6)
            b.event_wait(stream, 1, at - 3)
        start = max(at + 6, free[stream] + 1)
        if not together:
            start = max(start, last + 1)
        b.kernel(
            ("small", "big")[i % 2],
            stream=stream,
            start=start,
            end=start + 100,
            issue=(at, at + 4),
            grid=(blocks, 1, 1),
            block=(16, 1, 1),
            sharedMemoryExecuted=executed[i % 2],
        )
        free[stream] = last = start + 100


def test_two_configurations_take_turns(tmp_path: Path) -> None:
    b = builder(13, 14)
    two_configurations(b)

    finding = one(b, tmp_path, CARVEOUT)

    assert finding.occurrences == 11
    assert finding.severity is Severity.HIGH
    assert finding.confidence is Confidence.LOW
    assert finding.cost.claim is Claim.UPPER_BOUND
    assert 550 < cost_us(finding) < 660
    assert finding.message == (
        "11 kernels or their last blocks began only when one of another stream ended, "
        "though both fit: they run with 8 and 100 KiB of shared memory a multiprocessor"
    )


def test_two_configurations_overlap(tmp_path: Path) -> None:
    b = builder(13, 14)
    two_configurations(b, together=True)

    assert findings(b, tmp_path, CARVEOUT) == []


def test_one_configuration_takes_turns(tmp_path: Path) -> None:
    b = builder(13, 14)
    two_configurations(b, executed=(32 << 10, 32 << 10))

    assert findings(b, tmp_path, CARVEOUT) == []


def late_blocks(
    b: TraceBuilder,
    *,
    held: tuple[int, ...] = (1, 3, 5),
    early: float = 0.0,
    executed: tuple[int, int] = (8 << 10, 100 << 10),
) -> float:
    """Twelve small kernels of 40 us beside five big ones in a row of 100 us.

    The last blocks of the ``held`` ones begin as the next big kernel ends, or
    ``early`` us before. Returns how long they wait together.
    """

    def kernel(name: str, start: float, end: float, number: int) -> None:
        b.kernel(
            name,
            stream=14 if name == "big" else 13,
            start=start,
            end=end,
            issue=(100 + number, 101 + number),
            grid=(132, 1, 1),
            block=(16, 1, 1),
            sharedMemoryExecuted=executed[name == "big"],
        )

    for i in range(5):
        kernel("big", 200 + 100 * i, 299.5 + 100 * i, i)
    start, waited = 210.0, 0.0
    for i in range(12):
        last = start
        if i in held:
            last = 100 * (start // 100 + 1) - 0.5 - early
        kernel("small", start, last + 40, 10 + i)
        waited += last - start
        start = last + 41
    return waited


def test_last_blocks_wait_for_another_configuration(tmp_path: Path) -> None:
    b = builder(13, 14)
    waited = late_blocks(b)

    finding = one(b, tmp_path, CARVEOUT)

    assert finding.occurrences == 3
    assert cost_us(finding) == pytest.approx(waited, rel=0.05)
    assert finding.where.kernels == ("small",)
    longest = finding.evidence[0]
    assert longest.what == "blocks of small wait for stream 14"
    assert longest.end_ns % 100_000 == 99_500


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"held": (1, 3)}, id="twice"),
        pytest.param({"early": 15.0}, id="before the other one ends"),
        pytest.param({"executed": (32 << 10, 32 << 10)}, id="one configuration"),
    ],
)
def test_long_kernels_have_other_causes(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    b = builder(13, 14)
    late_blocks(b, **changes)

    assert findings(b, tmp_path, CARVEOUT) == []


def test_durations_that_vary_prove_nothing(tmp_path: Path) -> None:
    b = builder(13, 14)
    late_blocks(b)
    for i in range(12):
        at = 2000 + 200 * i
        for name, stream in (("small", 13), ("big", 14)):
            b.kernel(
                name,
                stream=stream,
                start=at,
                end=at + 110 + (17 * i) % 60,
                grid=(132, 1, 1),
                block=(16, 1, 1),
                sharedMemoryExecuted=(8 << 10, 100 << 10)[name == "big"],
            )

    assert findings(b, tmp_path, CARVEOUT) == []


def test_two_configurations_without_room(tmp_path: Path) -> None:
    b = builder(13, 14)
    two_configurations(b, blocks=132 * 20)

    assert findings(b, tmp_path, CARVEOUT) == []


def test_two_configurations_that_an_event_orders(tmp_path: Path) -> None:
    b = builder(13, 14)
    two_configurations(b, waits=True)

    assert findings(b, tmp_path, CARVEOUT) == []


# graph-blocked-by-pageable-copy -----------------------------------------------


def graph_copies(
    b: TraceBuilder,
    rounds: int = 8,
    *,
    host: str = "pageable",
    node_mode: bool = True,
    work: float = 400,
) -> None:
    """The host works, then launches a graph: copy of 50 us, kernel of 500, copy."""
    at, free = 100.0, 0.0
    for _ in range(rounds):
        call_end = at + 70 if host == "pinned" else at + 650
        call = b.graph_launch(at, call_end - at)
        start = max(at + 20, free + 2)
        free = start + 604
        if node_mode:
            b.memcpy(
                "HtoD",
                1 << 19,
                stream=13,
                start=start,
                end=start + 50,
                src=host,
                call=call,
                graph_node=2 << 32,
            )
            b.kernel(
                "work",
                stream=13,
                start=start + 52,
                end=start + 552,
                call=call,
                graph_node=2 << 32 | 1,
            )
            b.memcpy(
                "DtoH",
                1 << 19,
                stream=13,
                start=start + 554,
                end=start + 604,
                dst=host,
                call=call,
                graph_node=2 << 32 | 2,
            )
        else:
            b.graph_trace(stream=13, start=start, end=start + 604, call=call)
        at = call_end + work
    b.device_sync(at, max(at, free) + 5)


def test_a_launch_waits_for_pageable_copies(tmp_path: Path) -> None:
    b = builder(13)
    graph_copies(b)

    finding = one(b, tmp_path, PAGEABLE_GRAPH)

    assert finding.occurrences == 8
    assert finding.cost.claim is Claim.LOWER_BOUND
    # Rounds of 1050 us become rounds of 606 us.
    assert cost_us(finding) == pytest.approx(7 * 444, rel=0.05)
    assert finding.severity is Severity.HIGH
    assert finding.message == (
        "8 graph launches took 5.20 ms because they waited for 16 copies of pageable "
        "host memory"
    )
    assert finding.change is not None


def test_graphs_with_page_locked_copies(tmp_path: Path) -> None:
    b = builder(13)
    graph_copies(b, host="pinned")

    assert findings(b, tmp_path, PAGEABLE_GRAPH) == []


@pytest.mark.parametrize(("rounds", "fires"), [(4, False), (5, True)])
def test_three_blocked_launches(rounds: int, fires: bool, tmp_path: Path) -> None:
    """The first of so few rounds is start-up."""
    b = builder(13)
    graph_copies(b, rounds)

    assert bool(findings(b, tmp_path, PAGEABLE_GRAPH)) is fires


def test_long_launches_of_whole_graphs_cannot_be_judged(tmp_path: Path) -> None:
    b = builder(13)
    graph_copies(b, node_mode=False)

    unable = judge(b, tmp_path, PAGEABLE_GRAPH).not_assessed

    assert unable is not None
    assert unable.reason.startswith("8 graph launches returned after their graph")
    assert unable.recapture == "record with --cuda-graph-trace=node"


def test_short_launches_of_whole_graphs(tmp_path: Path) -> None:
    b = builder(13)
    graph_copies(b, host="pinned", node_mode=False)

    assert findings(b, tmp_path, PAGEABLE_GRAPH) == []


# timing-event-as-dependency ---------------------------------------------------


def ordering_events(
    b: TraceBuilder,
    *,
    create: str = "cudaEventCreate",
    events: int = 4,
    turns: int = 30,
    lasting: float = 4.0,
    host_wait: bool = False,
) -> None:
    """Two streams in turn, tied by events; the host needs 4 us for each of them."""
    for i in range(events):
        b.call(create, 10 + 3 * i)
    free = 100.0
    for turn in range(turns):
        at = 100 + turn * (6 + 5 * events)
        mine, other = 13 + turn % 2, 14 - turn % 2
        start = max(at + 6, free + 1)
        free = start + lasting
        b.kernel("step", stream=mine, start=start, end=free, issue=(at, at + 4))
        for event in range(1, events + 1):
            at_event = at + 5 * event
            b.event_record(mine, event, at_event)
            b.event_wait(other, event, at_event + 2.5)
    end = 150 + turns * (6 + 5 * events)
    b.kernel("last", stream=13, start=max(end, free + 1), end=max(end, free) + 10)
    if host_wait:
        end = 300 + turns * (6 + 5 * events)
        for event in range(1, events + 1):
            b.sync(
                "cudaEventSynchronize",
                start=end + 10 * event,
                end=end + 10 * event + 2,
                event=event,
            )


def test_events_that_keep_time_for_nothing(tmp_path: Path) -> None:
    b = builder(13, 14)
    ordering_events(b)

    finding = one(b, tmp_path, TIMING)

    assert finding.occurrences == 120
    assert finding.cost.claim is Claim.DIRECT
    assert cost_us(finding) == 120
    assert finding.severity is Severity.HIGH
    assert finding.confidence is Confidence.MEDIUM
    assert finding.message == (
        "120 records of 4 events that keep time, though only other streams wait for "
        "them"
    )
    assert finding.change is not None


@pytest.mark.parametrize(
    "create", ["cudaEventCreateWithFlags", "cuEventCreate"], ids=str
)
def test_events_created_with_flags(create: str, tmp_path: Path) -> None:
    b = builder(13, 14)
    ordering_events(b, create=create)

    assert findings(b, tmp_path, TIMING) == []


def test_events_that_the_host_waits_for(tmp_path: Path) -> None:
    b = builder(13, 14)
    ordering_events(b, host_wait=True)

    assert findings(b, tmp_path, TIMING) == []


@pytest.mark.parametrize(("turns", "fires"), [(49, False), (50, True)])
def test_fifty_records(turns: int, fires: bool, tmp_path: Path) -> None:
    b = builder(13, 14)
    ordering_events(b, events=1, turns=turns)

    assert bool(findings(b, tmp_path, TIMING)) is fires


def test_records_that_delay_nothing_are_for_information(tmp_path: Path) -> None:
    b = builder(13, 14)
    ordering_events(b, lasting=100)

    finding = one(b, tmp_path, TIMING)

    assert finding.severity is Severity.INFO
    assert cost_us(finding) == 120


def test_event_ids_after_a_destroyed_event_are_not_trusted(tmp_path: Path) -> None:
    b = builder(13, 14)
    b.call("cudaEventCreateWithFlags", 1)
    b.call("cudaEventDestroy", 4)
    ordering_events(b)

    assert findings(b, tmp_path, TIMING) == []


def test_a_late_recording_does_not_show_which_event_it_is(tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(20_000):
        b.new_id()
    ordering_events(b)

    assert findings(b, tmp_path, TIMING) == []


def test_unrecorded_calls_could_read_the_times(tmp_path: Path) -> None:
    b = builder(13, 14)
    ordering_events(b)
    b.new_id()
    b.kernel("later", stream=13, start=2_000, end=2_010)

    assert one(b, tmp_path, TIMING).confidence is Confidence.LOW


# wait-on-unrecorded-event -----------------------------------------------------


def pairs_of_kernels(
    b: TraceBuilder, rounds: int = 5, *, record: str = "never", wait: str = "stream"
) -> None:
    """A kernel on stream 13; stream 14 is meant to wait for it."""
    for i in range(rounds):
        at = 100 + 200 * i
        b.kernel("first", stream=13, start=at + 6, end=at + 106, issue=(at, at + 4))
        if record == "before":
            b.event_record(13, 1, at + 6)
        if wait == "stream":
            b.event_wait(14, 1, at + 10)
        else:
            name = "cudaEventSynchronize"
            b.sync(name, start=at + 10, end=at + 12, event=1)
        start = at + (112 if record == "before" else 22)
        b.kernel("second", stream=14, start=start, end=start + 60)
        if record == "after":
            b.event_record(13, 1, at + 30)


@pytest.mark.parametrize(
    ("wait", "name"),
    [("stream", "cudaStreamWaitEvent"), ("host", "cudaEventSynchronize")],
)
def test_an_event_that_is_never_recorded(wait: str, name: str, tmp_path: Path) -> None:
    b = builder(13, 14)
    pairs_of_kernels(b, wait=wait)

    finding = one(b, tmp_path, UNRECORDED)

    assert finding.severity is Severity.ERROR
    assert finding.confidence is Confidence.HIGH
    assert finding.cost.claim is Claim.NONE
    assert finding.cost.ns is None
    assert finding.occurrences == 5
    assert finding.message == (
        f"5 calls of {name} wait for 1 event that is never recorded: nothing is "
        "waited for"
    )
    assert finding.identity == ("unrecorded", name, "never", "")
    assert len(finding.evidence) == 5


def test_an_event_that_is_recorded(tmp_path: Path) -> None:
    b = builder(13, 14)
    pairs_of_kernels(b, record="before")

    assert findings(b, tmp_path, UNRECORDED) == []


def test_the_first_wait_of_a_loop_that_waits_for_the_one_before(tmp_path: Path) -> None:
    b = builder(13, 14)
    pairs_of_kernels(b, record="after")

    assert findings(b, tmp_path, UNRECORDED) == []


def test_recorded_after_the_only_wait_is_for_information(tmp_path: Path) -> None:
    b = builder(13, 14)
    pairs_of_kernels(b, 1, record="after")

    finding = one(b, tmp_path, UNRECORDED)

    assert finding.severity is Severity.INFO
    assert finding.confidence is Confidence.LOW
    assert finding.message == (
        "1 call of cudaStreamWaitEvent waits for 1 event that is not recorded before: "
        "nothing is waited for"
    )


def test_a_wait_that_is_captured(tmp_path: Path) -> None:
    b = builder(13, 14)
    b.call("cudaStreamBeginCapture", 90)
    pairs_of_kernels(b, 1)
    b.call("cudaStreamEndCapture", 190)

    assert findings(b, tmp_path, UNRECORDED) == []


def test_a_wait_after_a_capture(tmp_path: Path) -> None:
    b = builder(13, 14)
    b.call("cudaStreamBeginCapture", 70)
    b.call("cudaStreamEndCapture", 80)
    pairs_of_kernels(b, 1)

    assert one(b, tmp_path, UNRECORDED).severity is Severity.ERROR


def test_a_wait_with_nothing_going_on(tmp_path: Path) -> None:
    b = builder(13, 14)
    b.kernel("first", stream=13, start=106, end=120)
    b.event_wait(14, 1, 200)
    b.kernel("second", stream=14, start=210, end=220)

    assert findings(b, tmp_path, UNRECORDED) == []


def test_events_of_another_process(tmp_path: Path) -> None:
    b = builder(13, 14)
    b.call("cudaIpcOpenEventHandle", 20)
    pairs_of_kernels(b)

    assert findings(b, tmp_path, UNRECORDED) == []


def test_a_recording_that_began_late(tmp_path: Path) -> None:
    b = builder(13, 14)
    b.diagnostic("info", "Profiling started due to a range start.")
    pairs_of_kernels(b)

    unable = judge(b, tmp_path, UNRECORDED).not_assessed

    assert unable is not None
    assert unable.reason == "events recorded before the recording began can't be seen"


def test_an_export_without_record_numbers(tmp_path: Path) -> None:
    b = builder(13, 14)
    for table in ("SYNCHRONIZATION", "CUDA_EVENT"):
        columns = b.layout[f"CUPTI_ACTIVITY_KIND_{table}"]
        columns[:] = [c for c in columns if not c.startswith("eventSyncId")]
    pairs_of_kernels(b)

    unable = judge(b, tmp_path, UNRECORDED).not_assessed

    assert unable is not None
    assert "nsys 2025.1" in unable.recapture


def test_records_without_rows(tmp_path: Path) -> None:
    b = builder(13, 14)
    pairs_of_kernels(b)
    b.call("cudaEventRecord", 50)

    unable = judge(b, tmp_path, UNRECORDED).not_assessed

    assert unable is not None
    assert "1 event record calls succeeded" in unable.reason


# host-mediated-dependency -----------------------------------------------------


def hand_overs(
    b: TraceBuilder,
    rounds: int = 20,
    *,
    wait: str = "cudaStreamSynchronize",
    same_stream: bool = False,
    readback: bool = False,
    host: float = 1.0,
) -> None:
    """Kernels of 40 us in two streams in turn, each launched after a wait."""
    at = 100.0
    for i in range(rounds):
        stream = 13 if same_stream else 13 + i % 2
        b.kernel("step", stream=stream, start=at + 6, end=at + 46, issue=(at, at + 4))
        end = at + 46
        if readback:
            b.memcpy(
                "DtoH",
                4,
                stream=stream,
                start=end + 1,
                end=end + 2,
                issue=(at + 4.5, at + 5),
            )
            end += 2
        if wait == "cudaStreamSynchronize":
            b.sync(wait, stream=stream, start=at + 5, end=end + 5)
        elif wait == "cudaEventSynchronize":
            b.event_record(stream, 1, at + 5)
            sync_id = i + 1
            b.sync(wait, start=at + 8, end=end + 5, event=1, sync_id=sync_id)
        else:
            b.device_sync(at + 5, end + 5)
        at = end + 5 + host


@pytest.mark.parametrize("wait", ["cudaStreamSynchronize", "cudaEventSynchronize"])
def test_the_host_hands_over_between_streams(wait: str, tmp_path: Path) -> None:
    b = builder(13, 14)
    hand_overs(b, wait=wait)

    finding = one(b, tmp_path, HAND_OVER)

    # 12 us from the end of a kernel to the next start become 2 us.
    assert finding.occurrences == 19
    assert finding.cost.claim is Claim.WHAT_IF
    assert cost_us(finding) == pytest.approx(19 * 10, rel=0.05)
    assert finding.severity is Severity.HIGH
    assert finding.where.streams == (13, 14)
    assert finding.message == (
        f"19 times {wait} waits for one stream and the thread goes on with another at "
        "once; the GPU idles 12.0 us on average at these hand-overs"
    )
    assert finding.change is not None
    assert "cudaStreamWaitEvent" in finding.fix


def test_an_event_hands_over(tmp_path: Path) -> None:
    b = builder(13, 14)
    for i in range(20):
        stream, at, start = 13 + i % 2, 100 + 12 * i, 106 + 42 * i
        b.kernel("step", stream=stream, start=start, end=start + 40, issue=(at, at + 4))
        b.event_record(stream, 1 + i % 2, at + 5)
        b.event_wait(27 - stream, 1 + i % 2, at + 8)
    b.device_sync(400, 950)

    assert findings(b, tmp_path, HAND_OVER) == []


def test_waits_for_the_stream_that_goes_on(tmp_path: Path) -> None:
    b = builder(13, 14)
    hand_overs(b, same_stream=True)
    b.kernel("other", stream=14, start=5000, end=5010)

    assert findings(b, tmp_path, HAND_OVER) == []


def test_a_result_is_read_back(tmp_path: Path) -> None:
    b = builder(13, 14)
    hand_overs(b, readback=True)

    assert findings(b, tmp_path, HAND_OVER) == []


def test_the_host_works_in_between(tmp_path: Path) -> None:
    b = builder(13, 14)
    hand_overs(b, host=30)

    assert findings(b, tmp_path, HAND_OVER) == []


def test_device_wide_waits_are_another_matter(tmp_path: Path) -> None:
    b = builder(13, 14)
    hand_overs(b, wait="cudaDeviceSynchronize")

    assert findings(b, tmp_path, HAND_OVER) == []


def test_a_join_of_all_streams(tmp_path: Path) -> None:
    b = builder(13, 14)
    at = 100.0
    for _ in range(20):
        for k, stream in enumerate((13, 14)):
            b.kernel(
                "step",
                stream=stream,
                start=at + 6 + 5 * k,
                end=at + 46 + 10 * k,
                issue=(at + 5 * k, at + 5 * k + 4),
            )
        b.sync("cudaStreamSynchronize", stream=13, start=at + 10, end=at + 51)
        b.sync("cudaStreamSynchronize", stream=14, start=at + 52, end=at + 61)
        at += 62

    assert findings(b, tmp_path, HAND_OVER) == []


@pytest.mark.parametrize(("rounds", "fires"), [(3, False), (4, True)])
def test_three_hand_overs(rounds: int, fires: bool, tmp_path: Path) -> None:
    b = builder(13, 14)
    hand_overs(b, rounds)

    assert bool(findings(b, tmp_path, HAND_OVER)) is fires


def test_a_host_that_is_the_limit_gains_less(tmp_path: Path) -> None:
    b = builder(13, 14)
    at = 100.0
    for i in range(20):
        stream = 13 + i % 2
        for k in range(5):
            start = at + 6 * k + 5
            b.kernel(
                "tiny",
                stream=stream,
                start=start,
                end=start + 2,
                issue=(at + 6 * k, at + 6 * k + 4),
            )
        b.sync("cudaStreamSynchronize", stream=stream, start=at + 30, end=at + 36)
        at += 37

    finding = one(b, tmp_path, HAND_OVER)

    # 27 us of calls don't fit into a wait of 6 us.
    assert cost_us(finding) < 19 * 10


# every rule -------------------------------------------------------------------

PROGRAMS: dict[str, Callable[[TraceBuilder], object]] = {
    EXEC: exec_turns,
    PDL: chain,
    UNDERFILLED: small_kernels,
    HOST_FUNCTION: host_functions,
    CARVEOUT: two_configurations,
    PAGEABLE_GRAPH: graph_copies,
    TIMING: ordering_events,
    UNRECORDED: pairs_of_kernels,
    HAND_OVER: hand_overs,
}


@pytest.mark.parametrize("rule", PROGRAMS)
def test_processes_are_judged_apart(rule: str, tmp_path: Path) -> None:
    b = builder(13, 14, gpus=2)
    PROGRAMS[rule](b)
    b.process(200, "./other", gpu=1)
    with b.at(pid=200):
        add_streams(b, 13, 14)
        PROGRAMS[rule](b)

    found = findings(b, tmp_path, rule)

    assert sorted(f.where.pid or 0 for f in found) == [100, 200]
    assert found[0].cost == found[1].cost
    assert found[0].fingerprint(rule) == found[1].fingerprint(rule)


@pytest.mark.parametrize("rule", PROGRAMS)
def test_one_stream_with_one_kernel(rule: str, tmp_path: Path) -> None:
    assert findings(builder(13), tmp_path, rule) == []

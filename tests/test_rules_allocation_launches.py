"""Rules of the families allocation and launches, on small built traces."""

from __future__ import annotations

from pathlib import Path

import pytest
from tracebuilder import TraceBuilder

from streamlint.engine import lint
from streamlint.findings import UNPROFILED, Claim, Confidence, Finding, Severity
from streamlint.registry import find
from streamlint.trace import open_trace

CHURN = "resource-churn-in-loop"
LAUNCH_BOUND = "launch-bound-kernels"
REINSTANTIATED = "graph-reinstantiated"


def findings(b: TraceBuilder, tmp_path: Path, rule: str) -> list[Finding]:
    trace = open_trace(b.write(tmp_path / "t.sqlite"))
    (judgement,) = lint(trace, [find(rule)]).judgements
    assert judgement.crashed is None, judgement.crashed
    assert judgement.not_assessed is None
    return list(judgement.findings)


def one(b: TraceBuilder, tmp_path: Path, rule: str) -> Finding:
    (finding,) = findings(b, tmp_path, rule)
    return finding


# A lower bound leaves out the third by which processes differ.
CERTAIN = 2 / 3


def cost_us(finding: Finding) -> float:
    assert finding.cost.ns is not None
    return finding.cost.ns / 1000


# resource-churn-in-loop -------------------------------------------------------


def alternate(
    b: TraceBuilder,
    create: str,
    release: str,
    *,
    rounds: int = 12,
    each: int = 1,
    lasting: float = 100,
    period: float = 1000,
    origin: float = 1000,
) -> list[int]:
    """Rounds of creations, a kernel, releases; returns the creations' ids.

    A kernel runs from 500 to 520 in its round and the releases begin at 600.
    """
    created = []
    for at in (origin + i * period for i in range(rounds)):
        created += [b.call(create, at + 110 * k, lasting) for k in range(each)]
        b.kernel("step", stream=13, start=at + 500, end=at + 520)
        for k in range(each):
            b.call(release, at + 600 + 60 * k, lasting / 2)
    return created


def bounds(b: TraceBuilder, start: float = 500, end: float = 20_000) -> None:
    """Two kernels that widen the judged region."""
    b.kernel("first", stream=13, start=start, end=start + 10)
    b.kernel("last", stream=13, start=end - 10, end=end)


@pytest.mark.parametrize(
    ("create", "release", "resource"),
    [
        ("cudaMalloc", "cudaFree", "device memory"),
        ("cudaMallocManaged", "cudaFree", "device memory"),
        ("cudaHostAlloc", "cudaFreeHost", "pinned host memory"),
        ("cudaHostRegister", "cudaHostUnregister", "pinned host memory"),
        ("cudaStreamCreateWithFlags", "cudaStreamDestroy", "streams"),
        ("cudaEventCreateWithFlags", "cudaEventDestroy", "events"),
    ],
)
def test_create_and_release_in_a_loop(
    create: str, release: str, resource: str, tmp_path: Path
) -> None:
    b = TraceBuilder()
    bounds(b)
    alternate(b, create, release)

    finding = one(b, tmp_path, CHURN)

    assert finding.occurrences == 12
    assert finding.cost.claim is Claim.WHAT_IF
    assert cost_us(finding) == 12 * (100 + 50)
    assert finding.change is not None
    assert finding.cost.share == pytest.approx(1800 / 19_500)
    assert finding.severity is Severity.MEDIUM
    assert finding.confidence is Confidence.HIGH
    assert finding.identity == (resource, "")
    assert finding.message.startswith(resource)
    assert finding.message.endswith(
        f"by {create} and {release}, which takes 1.80 ms of host time"
    )
    assert "12 times" in finding.message
    assert len(finding.evidence) == 5
    assert {(e.what, e.end_ns - e.start_ns) for e in finding.evidence} == {
        (create, 100_000)
    }


@pytest.mark.parametrize(
    ("create", "release"),
    [("cudaMalloc", "cudaFree"), ("cudaHostAlloc", "cudaFreeHost")],
)
def test_hoisted_out_of_the_loop(create: str, release: str, tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    b.call(create, 600, 100)
    for i in range(12):
        b.kernel("step", stream=13, start=1000 + i * 1000, end=1020 + i * 1000)
    b.call(release, 19_000, 100)

    assert findings(b, tmp_path, CHURN) == []


@pytest.mark.parametrize(("rounds", "fires"), [(9, False), (10, True)])
def test_ten_pairs_are_a_loop(rounds: int, fires: bool, tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    alternate(b, "cudaMalloc", "cudaFree", rounds=rounds)

    assert bool(findings(b, tmp_path, CHURN)) is fires


def test_one_pair_an_nvtx_iteration_is_a_loop(tmp_path: Path) -> None:
    b = TraceBuilder()
    for i in range(5):
        b.nvtx(f"step {i}", 900 + i * 1000, 1800 + i * 1000)
    alternate(b, "cudaMalloc", "cudaFree", rounds=5)

    # The first iteration warms up; the region begins with the second.
    finding = one(b, tmp_path, CHURN)

    assert finding.occurrences == 4
    assert "0.60 ms" in finding.message
    # The first creation comes before the region's GPU work; the last free ends it.
    assert cost_us(finding) == 3 * 150 + 50


def test_a_free_costs_nothing_while_it_waits_for_the_gpu(tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    for i in range(10):
        at = 1000 + i * 1000
        b.call("cudaMalloc", at, 10)
        # Running when the call begins, and queued behind that.
        b.kernel(
            "long", stream=13, start=at + 20, end=at + 300, issue=(at + 11, at + 12)
        )
        b.kernel(
            "next", stream=13, start=at + 301, end=at + 400, issue=(at + 13, at + 14)
        )
        b.call("cudaFree", at + 100, 350)

    finding = one(b, tmp_path, CHURN)

    assert "takes 0.60 ms of host time" in finding.message
    # Reuse would do without the waits, too: a lower bound, less the replay's error.
    assert finding.cost.claim is Claim.LOWER_BOUND
    assert cost_us(finding) == pytest.approx(10 * (10 + 50), rel=0.1)


def test_a_free_that_ends_before_the_gpu_work_did_not_wait(
    tmp_path: Path,
) -> None:
    b = TraceBuilder()
    bounds(b)
    for i in range(10):
        at = 1000 + i * 1000
        b.call("cudaMalloc", at, 100)
        b.kernel("long", stream=13, start=at + 150, end=at + 900)
        b.call("cudaFree", at + 200, 30)

    assert cost_us(one(b, tmp_path, CHURN)) == 10 * (100 + 30)


def test_many_cheap_frees_are_info(tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b, end=500_000)
    alternate(b, "cuMemAlloc_v2", "cuMemFree_v2", rounds=404, lasting=0.34)

    finding = one(b, tmp_path, CHURN)

    assert finding.occurrences == 404
    assert cost_us(finding) == pytest.approx(404 * 0.51)
    assert finding.severity is Severity.INFO


def test_start_up_and_tear_down_between_gpu_work(tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    for i in range(12):
        b.call("cudaMalloc", 600 + i * 100, 50)
        b.memcpy("HtoD", 4096, stream=13, start=680 + i * 100, end=682 + i * 100)
        b.memcpy("DtoH", 4096, stream=13, start=10_080 + i * 100, end=10_082 + i * 100)
        b.call("cudaFree", 10_090 + i * 100, 5)

    assert findings(b, tmp_path, CHURN) == []


def test_buffers_that_last_are_not_counted_with_the_loop(tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    for i in range(12):
        b.call("cudaMalloc", 600 + i * 20, 10)
        b.call("cudaFree", 15_000 + i * 20, 10)
    alternate(b, "cudaMalloc", "cudaFree", rounds=10)

    finding = one(b, tmp_path, CHURN)

    assert finding.occurrences == 10
    assert cost_us(finding) == 10 * 150


def test_a_large_set_made_once_is_no_loop(tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    alternate(b, "cudaStreamCreate", "cudaStreamDestroy", rounds=1, each=4)
    alternate(b, "cudaStreamCreate", "cudaStreamDestroy", rounds=3, origin=3000)
    for i in range(16):
        b.call("cudaStreamCreate", 8000 + i * 20, 10)
        b.call("cudaStreamDestroy", 9000 + i * 20, 10)

    assert findings(b, tmp_path, CHURN) == []


def test_growth_of_a_caching_allocator(tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    for i in range(30):
        b.call("cudaMalloc", 1000 + i * 500, 100)
        if i in (10, 20):
            b.call("cudaFree", 1200 + i * 500, 100)

    assert findings(b, tmp_path, CHURN) == []


def test_stream_ordered_allocation_is_the_fix(tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    alternate(b, "cudaMallocAsync", "cudaFreeAsync")

    assert findings(b, tmp_path, CHURN) == []


def test_failed_allocations_have_no_pair(tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    for i in range(12):
        b.call("cudaMalloc", 1000 + i * 1000, 100, return_value=2)
        b.call("cudaFree", 1500 + i * 1000, 100)

    assert findings(b, tmp_path, CHURN) == []


def test_threads_share_one_finding_at_the_cost_of_the_slowest(tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    alternate(b, "cudaMalloc", "cudaFree")
    with b.at(tid=102):
        alternate(b, "cudaMalloc", "cudaFree", rounds=10, lasting=60, origin=1007)
    with b.at(tid=103):  # sets up and tears down only
        b.call("cudaMalloc", 1000, 100)
        b.call("cudaFree", 9000, 100)

    finding = one(b, tmp_path, CHURN)

    assert finding.occurrences == 22
    assert finding.where.threads == (101, 102)
    assert cost_us(finding) == 12 * 150


def test_one_finding_a_call_site(tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    for call in alternate(b, "cudaMalloc", "cudaFree", rounds=10, period=700):
        b.backtrace(call, [("forward", "model.py", 7), ("<module>", "run.py", 1)])
    later = alternate(b, "cudaMalloc", "cudaFree", rounds=11, origin=8000)
    for call in later:
        b.backtrace(call, [("evaluate", "eval.py", 9), ("<module>", "run.py", 2)])

    found = findings(b, tmp_path, CHURN)

    assert {(f.identity, f.occurrences) for f in found} == {
        (("device memory", "model.py:7 forward"), 10),
        (("device memory", "eval.py:9 evaluate"), 11),
    }
    assert {f.where.source[0].line for f in found} == {7, 9}


def test_device_memory_fix_says_when_stream_order_pays(tmp_path: Path) -> None:
    b = TraceBuilder()
    bounds(b)
    alternate(b, "cudaMalloc", "cudaFree")

    fix = one(b, tmp_path, CHURN).fix

    assert "cudaMallocAsync" in fix
    assert "9 to 13 ms" in fix
    assert "race" in fix


# launch-bound-kernels ---------------------------------------------------------


def launch_run(
    b: TraceBuilder,
    count: int = 40,
    *,
    lasting: float = 1,
    every: float = 10,
    origin: float = 100,
    stream: int = 13,
) -> float:
    """Kernels that start 2 us after their 4 us call; returns when the last ends."""
    for at in (origin + i * every for i in range(count)):
        start = at + 6
        b.kernel(
            "tiny", stream=stream, start=start, end=start + lasting, issue=(at, at + 4)
        )
    return origin + (count - 1) * every + 6 + lasting


def test_tiny_kernels_one_by_one(tmp_path: Path) -> None:
    b = TraceBuilder()
    launch_run(b)

    finding = one(b, tmp_path, LAUNCH_BOUND)

    # 39 intervals of 10 us less 1.9 us for tracing; in a graph kernel and gap.
    assert cost_us(finding) == pytest.approx(39 * 8.1 - 39 * 1.05)
    assert finding.cost.claim is Claim.WHAT_IF
    assert finding.cost.share == pytest.approx(39 * 7.05 / (39 * 8.1 + 1))
    assert "untraced" in finding.cost.method
    assert finding.cost.basis == UNPROFILED
    assert finding.change is not None
    assert finding.severity is Severity.HIGH
    assert finding.confidence is Confidence.MEDIUM
    assert finding.occurrences == 40
    assert finding.where.kernels == ("tiny",)
    assert finding.where.threads == (101,)
    assert finding.where.streams == (13,)
    assert finding.message == (
        "40 kernels of 1.0 us are launched one by one in 1 run, 10.0 us apart; "
        "the GPU is idle 90% of that time"
    )
    (evidence,) = finding.evidence
    assert (evidence.start_ns, evidence.end_ns) == (106_000, 497_000)
    assert evidence.what == "40 launches, the GPU idle 90%"
    assert evidence.correlation_id == 1
    assert "Python" in finding.fix


def test_same_kernels_as_a_graph(tmp_path: Path) -> None:
    b = TraceBuilder()
    for launch in range(3):
        call = b.graph_launch(100 + launch * 100)
        for i in range(40):
            start = 106 + launch * 100 + i * 1.3
            b.kernel(
                "tiny",
                stream=13,
                start=start,
                end=start + 1,
                call=call,
                graph_node=2 << 32 | i,
            )

    assert findings(b, tmp_path, LAUNCH_BOUND) == []


@pytest.mark.parametrize(("count", "fires"), [(19, False), (20, True)])
def test_twenty_kernels_are_a_run(count: int, fires: bool, tmp_path: Path) -> None:
    b = TraceBuilder()
    launch_run(b, count)

    assert bool(findings(b, tmp_path, LAUNCH_BOUND)) is fires


def test_a_full_queue_is_not_launch_bound(tmp_path: Path) -> None:
    b = TraceBuilder()
    for i in range(60):
        start = 106 + i * 21
        b.kernel(
            "long",
            stream=13,
            start=start,
            end=start + 20,
            issue=(100 + i * 10, 104 + i * 10),
        )

    assert findings(b, tmp_path, LAUNCH_BOUND) == []


def test_idle_time_that_only_tracing_adds(tmp_path: Path) -> None:
    b = TraceBuilder()
    # Idle 40 % as traced; without 1.9 us a launch 26 %.
    launch_run(b, lasting=6)

    assert findings(b, tmp_path, LAUNCH_BOUND) == []


def test_another_stream_keeps_the_gpu_busy(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.kernel("big", stream=14, start=50, end=600)
    launch_run(b)

    assert findings(b, tmp_path, LAUNCH_BOUND) == []


def test_two_streams_of_one_thread_are_one_run(tmp_path: Path) -> None:
    b = TraceBuilder()
    launch_run(b, 20, every=20)
    launch_run(b, 20, every=20, origin=110, stream=14)

    finding = one(b, tmp_path, LAUNCH_BOUND)

    assert finding.occurrences == 40
    assert finding.where.streams == (13, 14)
    # Branches of one graph run side by side, as the streams did.
    assert cost_us(finding) == pytest.approx(39 * 8.1 - 19 * 1.05 - 0.05)


def test_runs_of_two_threads_at_a_time_count_idle_time_once(tmp_path: Path) -> None:
    b = TraceBuilder()
    launch_run(b, 40, every=20)
    with b.at(tid=102):
        launch_run(b, 40, every=20, origin=110, stream=14)

    finding = one(b, tmp_path, LAUNCH_BOUND)

    assert finding.occurrences == 80
    assert finding.where.threads == (101, 102)
    assert cost_us(finding) == pytest.approx(39 * 18.1 - 39 * 1.05)


@pytest.mark.parametrize("wait", ["sync", "copy", "graph"])
def test_a_wait_or_graph_launch_ends_a_run(wait: str, tmp_path: Path) -> None:
    b = TraceBuilder()
    for i in range(4):
        end = launch_run(b, 15, origin=100 + i * 170)
        if wait == "sync":
            b.sync("cudaStreamSynchronize", stream=13, start=end, end=end + 3)
        elif wait == "copy":
            b.memcpy(
                "DtoH",
                4,
                stream=13,
                start=end + 3,
                end=end + 4,
                api="cudaMemcpy",
                issue=(end, end + 5),
            )
        else:
            b.graph_trace(stream=14, start=end + 3, end=end + 4)

    assert findings(b, tmp_path, LAUNCH_BOUND) == []


def test_pauses_of_the_host_are_not_counted(tmp_path: Path) -> None:
    b = TraceBuilder()
    for i in range(3):
        launch_run(b, 25, origin=100 + i * 2000)

    finding = one(b, tmp_path, LAUNCH_BOUND)

    assert finding.occurrences == 75
    assert "in 3 runs, 10.0 us apart" in finding.message
    # The host is done with a run after 1.25 us instead of 196.5, and then pauses.
    assert cost_us(finding) == pytest.approx(2 * 195.25 + 24 * 7.05)
    assert len(finding.evidence) == 3


def test_long_host_work_between_launches_is_another_matter(tmp_path: Path) -> None:
    b = TraceBuilder()
    launch_run(b, every=150)

    assert findings(b, tmp_path, LAUNCH_BOUND) == []


def test_batched_submission_is_the_drivers(tmp_path: Path) -> None:
    b = TraceBuilder()
    for i in range(60):
        issued = 100 + i * 10
        start = 300 + i // 5 * 50 + i % 5 * 4
        b.kernel(
            "tiny",
            stream=13,
            start=start,
            end=start + 1,
            issue=(issued, issued + 4),
        )

    assert findings(b, tmp_path, LAUNCH_BOUND) == []


def test_launches_into_a_capture_are_no_launches(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.kernel("first", stream=13, start=50, end=60)
    b.call("cudaStreamBeginCapture", 100)
    for i in range(40):
        b.call("cudaLaunchKernel", 110 + i * 10, 4)
    b.call("cudaStreamEndCapture", 600)
    b.kernel("last", stream=13, start=700, end=710)

    assert findings(b, tmp_path, LAUNCH_BOUND) == []


def test_profiler_overhead_is_no_idle_time(tmp_path: Path) -> None:
    b = TraceBuilder()
    launch_run(b, 20)
    launch_run(b, 20, origin=370)  # 80 us between the last two calls
    b.overhead("CUPTI Buffer flush", 305, 365)

    finding = one(b, tmp_path, LAUNCH_BOUND)

    assert finding.occurrences == 40
    assert cost_us(finding) == pytest.approx(38 * 8.1 + 18.1 - 39 * 1.05)


def test_recorded_call_stacks_lower_the_confidence(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.option("CUDA_BACKTRACE_OPTIONS:COLLECT_PYTHON_BACKTRACES", "true")
    launch_run(b)

    assert one(b, tmp_path, LAUNCH_BOUND).confidence is Confidence.LOW


def test_launches_that_block_are_another_matter(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.environment("CUDA_LAUNCH_BLOCKING", "1")
    for at in (100 + i * 10 for i in range(40)):
        b.kernel("tiny", stream=13, start=at + 5, end=at + 6, issue=(at, at + 8))

    assert findings(b, tmp_path, LAUNCH_BOUND) == []


def test_idle_time_bounds_the_cost_where_the_replay_is_off(tmp_path: Path) -> None:
    b = TraceBuilder()
    end = launch_run(b)
    with b.at(tid=102):
        b.kernel("first", stream=14, start=end + 5, end=end + 10)
        # Nothing in the trace says why this one starts so late.
        issue = (end + 5, end + 9)
        b.kernel("late", stream=14, start=end + 2000, end=end + 2010, issue=issue)

    finding = one(b, tmp_path, LAUNCH_BOUND)

    assert finding.cost.claim is Claim.UPPER_BOUND
    assert cost_us(finding) == pytest.approx(391 - 40 - 40 * 1.9)
    assert finding.cost.method.startswith("the replay is off by")


def test_gpu_idle_while_another_process_uses_it_is_not_idle(tmp_path: Path) -> None:
    b = TraceBuilder()
    launch_run(b)
    b.process(200, "./other")
    with b.at(pid=200):
        b.kernel("big", stream=13, start=50, end=600)

    assert findings(b, tmp_path, LAUNCH_BOUND) == []


# graph-reinstantiated ---------------------------------------------------------


def graph_loop(
    b: TraceBuilder,
    rounds: int = 5,
    *,
    launches: int = 1,
    nodes: tuple[int, ...] = (3,),
    node_mode: bool = True,
    destroy: bool = True,
) -> None:
    """Instantiates (100 us), launches and destroys (20 us) a graph each round."""
    b.kernel("init", stream=13, start=50, end=60)
    for i in range(rounds):
        at, count, executable = 1000 + i * 1000, nodes[i % len(nodes)], 2 + 2 * i
        instantiate(b, at, executable, count if node_mode else 0)
        for k in range(launches):
            launch_graph(b, at + 150 + 50 * k, executable, count, node_mode=node_mode)
        if destroy:
            b.call("cudaGraphExecDestroy", at + 800, 20)
    b.kernel("done", stream=13, start=9000, end=9010)


def instantiate(b: TraceBuilder, at: float, executable: int, nodes: int) -> None:
    b.call("cudaGraphInstantiate", at, 100)
    for node in range(nodes):
        for original in (None, executable - 1 << 32 | node):
            b.graph_node(executable << 32 | node, at + 10 + node, original)
    if nodes:  # the driver's own
        b.graph_node(executable << 32 | nodes, at + 90)


def unrecorded_us(nodes: int, recorded: float = 100.0) -> float:
    """An instantiation that took so long when its nodes were recorded."""
    return recorded - 2.6 * nodes


NODES = (1, 2, 3, 4, 5)
DESTROY_US = 20 / 1.4
"""Destroying, which takes 20 us recorded."""


def launch_graph(
    b: TraceBuilder, at: float, executable: int, nodes: int, *, node_mode: bool = True
) -> None:
    call = b.graph_launch(at)
    if not node_mode:
        b.graph_trace(
            stream=13, start=at + 6, end=at + 20, call=call, graph_exec=executable
        )
        return
    for node in range(nodes):
        start = at + 6 + 2 * node
        b.kernel(
            "node",
            stream=13,
            start=start,
            end=start + 1,
            call=call,
            graph_node=executable << 32 | node,
        )


def test_a_graph_instantiated_for_every_launch(tmp_path: Path) -> None:
    b = TraceBuilder()
    graph_loop(b)

    finding = one(b, tmp_path, REINSTANTIATED)

    assert finding.occurrences == 5
    assert finding.cost.claim is Claim.LOWER_BOUND
    # An update takes 0.15 us, and a launch without upload 3 instead of 5.
    each = unrecorded_us(3) + DESTROY_US - 0.15 + 2
    assert cost_us(finding) == pytest.approx(CERTAIN * 5 * each, abs=0.01)
    assert finding.cost.basis == UNPROFILED
    assert finding.severity is Severity.MEDIUM
    assert finding.change is not None
    assert finding.confidence is Confidence.MEDIUM
    assert finding.message == (
        "a graph of 3 nodes is instantiated 5 times for 5 launches"
    )
    assert finding.where.kernels == ("node",)
    assert finding.identity == ("instantiated", "", "node")
    assert [e.end_ns - e.start_ns for e in finding.evidence] == [100_000] * 5
    assert "cudaGraphExecUpdate" in finding.fix


def test_the_first_launch_uploads_the_graph(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.kernel("init", stream=13, start=50, end=60)
    for i in range(5):
        at = 1000 + i * 1000
        instantiate(b, at, 2 + 2 * i, 3)
        call = b.graph_launch(at + 150, 140)
        b.kernel(
            "node",
            stream=13,
            start=at + 292,
            end=at + 300,
            call=call,
            graph_node=2 + 2 * i << 32,
        )
    b.kernel("done", stream=13, start=9000, end=9010)

    finding = one(b, tmp_path, REINSTANTIATED)

    # Two are start-up. A first launch takes 1.1 us a node less.
    each = unrecorded_us(3) - 0.15 + 3.3
    assert cost_us(finding) == pytest.approx(CERTAIN * 3 * each, abs=0.01)


def test_recording_adds_no_more_than_a_call_takes(tmp_path: Path) -> None:
    b = TraceBuilder()
    graph_loop(b, nodes=(35,), rounds=8)

    finding = one(b, tmp_path, REINSTANTIATED)

    # 35 nodes take 42 us unrecorded, not 100 less 91; an update takes 1.75 us.
    assert cost_us(finding) == pytest.approx(
        CERTAIN * 8 * (42 + DESTROY_US - 1.75 + 2), abs=0.01
    )


def test_graph_that_is_updated(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.kernel("init", stream=13, start=50, end=60)
    instantiate(b, 500, 2, 3)
    for i in range(5):
        at = 1000 + i * 1000
        b.call("cudaStreamBeginCapture", at)
        b.call("cudaStreamEndCapture", at + 50)
        b.call("cudaGraphExecUpdate", at + 100, 10)
        launch_graph(b, at + 150, 2, 3)

    assert findings(b, tmp_path, REINSTANTIATED) == []


@pytest.mark.parametrize(("launches", "fires"), [(2, True), (3, False)])
def test_launched_more_than_twice(launches: int, fires: bool, tmp_path: Path) -> None:
    b = TraceBuilder()
    graph_loop(b, launches=launches)

    assert bool(findings(b, tmp_path, REINSTANTIATED)) is fires


@pytest.mark.parametrize(("rounds", "fires"), [(2, False), (3, True)])
def test_three_times_is_a_habit(rounds: int, fires: bool, tmp_path: Path) -> None:
    b = TraceBuilder()
    graph_loop(b, rounds)

    assert bool(findings(b, tmp_path, REINSTANTIATED)) is fires


def test_different_graphs_once_each(tmp_path: Path) -> None:
    b = TraceBuilder()
    graph_loop(b, nodes=NODES)

    assert findings(b, tmp_path, REINSTANTIATED) == []


def test_two_graphs_in_turn_are_two_findings(tmp_path: Path) -> None:
    b = TraceBuilder()
    graph_loop(b, 6, nodes=(2, 5))

    found = findings(b, tmp_path, REINSTANTIATED)

    assert sorted(f.message for f in found) == [
        "a graph of 2 nodes is instantiated 3 times for 3 launches",
        "a graph of 5 nodes is instantiated 3 times for 3 launches",
    ]
    one_of_each = [
        3 * (unrecorded_us(nodes) + DESTROY_US - 0.05 * nodes + 2) for nodes in (2, 5)
    ]
    lower = [CERTAIN * each for each in one_of_each]
    assert [cost_us(f) for f in found] == pytest.approx(lower, abs=0.01)


@pytest.mark.parametrize("node_mode", [True, False])
def test_graphs_prepared_before_use(node_mode: bool, tmp_path: Path) -> None:
    b = TraceBuilder()
    b.kernel("init", stream=13, start=50, end=60)
    for i in range(5):
        instantiate(b, 1000 + 200 * i, 2 + 2 * i, 3 if node_mode else 0)
    for i in range(5):
        launch_graph(b, 3000 + 100 * i, 2 + 2 * i, 3, node_mode=node_mode)

    assert findings(b, tmp_path, REINSTANTIATED) == []


@pytest.mark.parametrize("node_mode", [True, False])
def test_graphs_tried_once_and_used_later(node_mode: bool, tmp_path: Path) -> None:
    b = TraceBuilder()
    graph_loop(b, node_mode=node_mode, destroy=False)
    for i in range(20):
        launch_graph(b, 6500 + 100 * i, 2 + 2 * (i % 5), 3, node_mode=node_mode)

    assert findings(b, tmp_path, REINSTANTIATED) == []


def test_kept_graphs_are_less_sure(tmp_path: Path) -> None:
    b = TraceBuilder()
    graph_loop(b, destroy=False)

    finding = one(b, tmp_path, REINSTANTIATED)

    assert finding.confidence is Confidence.LOW
    each = unrecorded_us(3) - 0.15 + 2
    assert cost_us(finding) == pytest.approx(CERTAIN * 5 * each, abs=0.01)


def test_graph_mode_hides_the_topology(tmp_path: Path) -> None:
    b = TraceBuilder()
    graph_loop(b, node_mode=False)

    finding = one(b, tmp_path, REINSTANTIATED)

    assert finding.confidence is Confidence.LOW
    assert finding.message == "a graph is instantiated 5 times for 5 launches"
    # 55.6 us unrecorded are good for 46 nodes, which take 2.3 us to update.
    each = 100 / 1.8 + DESTROY_US - 2.3 + 2
    assert cost_us(finding) == pytest.approx(CERTAIN * 5 * each, abs=0.01)


def test_failed_updates_before_instantiating(tmp_path: Path) -> None:
    b = TraceBuilder()
    graph_loop(b, nodes=NODES)
    for i in range(1, 5):
        b.call("cudaGraphExecUpdate", 900 + i * 1000, 10, return_value=910)

    finding = one(b, tmp_path, REINSTANTIATED)

    assert finding.message == (
        "a graph is instantiated 5 times for 5 launches, after 4 failed updates"
    )
    each = [unrecorded_us(n) + DESTROY_US - 0.05 * n + min(2, 1.1 * n) for n in NODES]
    assert cost_us(finding) == pytest.approx(CERTAIN * sum(each), abs=0.01)
    assert "topology" in finding.fix


def test_start_up_instantiations_lie_outside_the_region(tmp_path: Path) -> None:
    b = TraceBuilder()
    for i in range(5):
        instantiate(b, 1000 + 200 * i, 2 + 2 * i, 3)
    for i in range(5):
        b.kernel("step", stream=13, start=3000 + 100 * i, end=3050 + 100 * i)

    assert findings(b, tmp_path, REINSTANTIATED) == []


# all three --------------------------------------------------------------------


@pytest.mark.parametrize("rule", [CHURN, LAUNCH_BOUND, REINSTANTIATED])
def test_fingerprint_is_the_same_in_another_run(rule: str, tmp_path: Path) -> None:
    def program(pid: int, stream: int, origin: float) -> TraceBuilder:
        b = TraceBuilder(pid=pid, tid=pid + 1)
        alternate(b, "cudaMalloc", "cudaFree", origin=20_000 + origin)
        launch_run(b, origin=40_000 + origin, stream=stream)
        graph_loop(b)
        return b

    first = one(program(100, 13, 0), tmp_path, rule)
    second = one(program(321, 22, 77), tmp_path, rule)

    assert first.fingerprint(rule) == second.fingerprint(rule)


@pytest.mark.parametrize("rule", [CHURN, LAUNCH_BOUND, REINSTANTIATED])
def test_processes_are_judged_apart(rule: str, tmp_path: Path) -> None:
    b = TraceBuilder(gpus=2)
    b.process(200, "./other", gpu=1)
    for pid in (100, 200):
        with b.at(pid=pid):
            alternate(b, "cudaMalloc", "cudaFree", origin=20_000)
            launch_run(b, origin=40_000)
            graph_loop(b)

    found = findings(b, tmp_path, rule)

    assert sorted(f.where.pid or 0 for f in found) == [100, 200]
    assert found[0].cost == found[1].cost

"""What the rules about streams and waits accuse, and what they leave alone.

Most traces here are made by small models of the hardware, so that a fault and its
cure are the same program: the cost must then be what the cure saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tracebuilder import TraceBuilder

from streamlint.engine import lint
from streamlint.findings import Claim, Confidence, Finding, NotAssessed, Severity
from streamlint.rule import Rule
from streamlint.rules.streams.cross_context_serialization import (
    cross_context_serialization,
)
from streamlint.rules.streams.depth_first_issue_order import depth_first_issue_order
from streamlint.rules.streams.priority_without_effect import priority_without_effect
from streamlint.rules.streams.stream_false_dependency import stream_false_dependency
from streamlint.rules.streams.threads_share_legacy_stream import (
    threads_share_legacy_stream,
)
from streamlint.rules.sync.busy_poll import busy_poll
from streamlint.rules.sync.device_sync_in_steady_state import (
    device_sync_in_steady_state,
)
from streamlint.rules.sync.host_sync_drains_gpu import host_sync_drains_gpu
from streamlint.rules.sync.stream_destroy_with_pending_work import (
    stream_destroy_with_pending_work,
)
from streamlint.rules.sync.unsynchronized_d2h_result import unsynchronized_d2h_result
from streamlint.trace import open_trace

MIB = 1 << 20
FULL = {"grid": (1056, 1, 1), "block": (256, 1, 1)}  # all blocks of an H200
SMALL = {"grid": (1, 1, 1), "block": (256, 1, 1)}
Judge = Callable[[Rule, TraceBuilder], list[Finding]]
Unable = Callable[[Rule, TraceBuilder], NotAssessed]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    def check(rule: Rule, builder: TraceBuilder) -> list[Finding]:
        trace = open_trace(builder.write(tmp_path / "t.sqlite"))
        (judgement,) = lint(trace, [rule]).judgements
        assert judgement.crashed is None, judgement.crashed
        assert judgement.not_assessed is None, judgement.not_assessed
        return list(judgement.findings)

    return check


@pytest.fixture
def unable(tmp_path: Path) -> Unable:
    def check(rule: Rule, builder: TraceBuilder) -> NotAssessed:
        trace = open_trace(builder.write(tmp_path / "t.sqlite"))
        (judgement,) = lint(trace, [rule]).judgements
        assert judgement.not_assessed is not None
        return judgement.not_assessed

    return check


# stream-false-dependency --------------------------------------------------------


def independent_streams(
    b: TraceBuilder,
    *,
    streams: int = 16,
    queues: int = 8,
    rounds: int = 3,
    took: float = 500.0,
    breadth_first: bool = False,
    one_at_a_time: bool = False,
) -> float:
    """Four kernels a stream and round; returns when the last one ends."""
    order = [
        (stream, part)
        for _ in range(rounds)
        for stream in range(streams)
        for part in range(4)
    ]
    if breadth_first:
        order.sort(key=lambda one: order.index(one) % 4)
        order = [(s, p) for p in range(4 * rounds) for s in range(streams)]
    done = dict.fromkeys(range(streams), 0.0)
    begun = dict.fromkeys(range(queues), 0.0)
    busy = 0.0
    for stream in range(streams):
        b.stream(13 + stream, flag=2)
    for number, (stream, _) in enumerate(order):
        issue = 1000 + 5 * number
        queue = stream % queues
        start = max(issue + 6, done[stream] + 1, begun[queue] + 1, busy)
        b.kernel(
            "step",
            stream=13 + stream,
            start=start,
            end=start + took,
            issue=(issue, issue + 4),
            **(FULL if one_at_a_time else SMALL),  # type: ignore[arg-type]
        )
        done[stream], begun[queue] = start + took, start
        busy = start + took + 1 if one_at_a_time else 0.0
    end = max(done.values())
    b.device_sync(issue + 5, end + 5)
    return end


def test_streams_that_share_queues_cost_what_more_queues_save(judge: Judge) -> None:
    b, fixed = TraceBuilder(), TraceBuilder()
    end = independent_streams(b)
    saved = end - independent_streams(fixed, queues=32)
    (finding,) = judge(stream_false_dependency, b)
    # Each time a queue comes to its other stream: 5 of 6 turns, in 8 queues.
    assert finding.occurrences == 40
    assert finding.cost.claim is Claim.UPPER_BOUND
    assert finding.cost.ns == pytest.approx(saved * 1000, rel=0.03)
    assert finding.severity is Severity.HIGH
    assert finding.confidence is Confidence.MEDIUM
    assert finding.change is not None
    assert len(finding.where.streams) == 16
    assert "16 streams share 8 work queues" in finding.message


def test_rounds_issued_far_ahead_cost_what_the_whole_run_loses(judge: Judge) -> None:
    b, fixed = TraceBuilder(), TraceBuilder()
    end = independent_streams(b)
    for number in range(3):
        b.nvtx(f"round {number}", 999 + 320 * number, 1318 + 320 * number)
    saved = end - independent_streams(fixed, queues=32)
    (finding,) = judge(stream_false_dependency, b)
    # The second round is issued when the first kernels run: all of it is judged.
    assert finding.cost.ns == pytest.approx(saved * 1000, rel=0.03)


def test_streams_of_the_start_up_alone_are_not_counted(judge: Judge) -> None:
    b = TraceBuilder()
    b.memset(16, stream=7, start=20, end=21)
    independent_streams(b)
    for number in range(3):
        b.nvtx(f"round {number}", 999 + 320 * number, 1318 + 320 * number)
    (finding,) = judge(stream_false_dependency, b)
    assert "16 streams share 8 work queues" in finding.message


def test_a_queue_for_each_stream_is_silent(judge: Judge) -> None:
    b = TraceBuilder()
    b.environment("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    independent_streams(b, queues=32)
    assert judge(stream_false_dependency, b) == []


def test_many_streams_that_never_wait_for_a_queue_are_silent(judge: Judge) -> None:
    b = TraceBuilder()
    independent_streams(b, queues=32)
    assert judge(stream_false_dependency, b) == []


def test_one_queue_for_a_few_streams_is_enough(judge: Judge) -> None:
    b = TraceBuilder()
    b.environment("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    independent_streams(b, streams=2, queues=1)
    (finding,) = judge(stream_false_dependency, b)
    assert finding.occurrences == 5
    assert "1 work queue:" in finding.message


def test_kernels_that_fill_the_gpu_wait_for_room(judge: Judge) -> None:
    b = TraceBuilder()
    independent_streams(b, one_at_a_time=True)
    assert judge(stream_false_dependency, b) == []


def test_events_that_were_recorded_lower_the_confidence(judge: Judge) -> None:
    b = TraceBuilder()
    b.event_record(13, 1, 900)
    independent_streams(b)
    (finding,) = judge(stream_false_dependency, b)
    assert finding.confidence is Confidence.LOW


# priority-without-effect ---------------------------------------------------------


def background_and_urgent(
    b: TraceBuilder,
    parts: int,
    *,
    iterations: int = 10,
    priorities: tuple[int, int] = (0, -5),
    size: dict[str, tuple[int, int, int]] = FULL,
    early_block: bool = False,
) -> float:
    """2 ms of background work an iteration, and a kernel that the host waits for.

    Returns when the last one ends. A running kernel is never interrupted, queued
    ones are overtaken. With ``early_block`` a first block of the urgent one gets in
    after 130 us: it starts then, and ends as soon as without.
    """
    b.stream(13, flag=2, priority=priorities[0])
    b.stream(14, flag=2, priority=priorities[1])
    now = 1000.0
    queue: list[tuple[float, float]] = []  # issue of background kernels to come
    free = 0.0

    def run(until: float) -> float:
        """Starts queued background kernels before ``until``; returns when free."""
        nonlocal free
        while queue and max(free, queue[0][1] + 5) < until:
            issue, end = queue.pop(0)
            start = max(free, end + 5)
            took = 2000 / parts
            b.kernel(
                "background",
                stream=13,
                start=start,
                end=start + took,
                issue=(issue, end),
                **size,  # type: ignore[arg-type]
            )
            free = start + took + 1
        return free

    for _ in range(iterations):
        for _ in range(parts):
            queue.append((now, now + 4))
            now += 5
        now += 100
        start = max(run(now + 9), now + 9) if size is FULL else now + 9
        b.kernel(
            "urgent",
            stream=14,
            start=min(start, now + 130) if early_block else start,
            end=start + 20,
            issue=(now, now + 4),
            **SMALL,  # type: ignore[arg-type]
        )
        free = max(free, start + 21) if size is FULL else free
        b.sync("cudaStreamSynchronize", stream=14, start=now + 5, end=start + 24)
        now = start + 1024
    run(1e9)
    b.device_sync(now, max(now + 2, free + 4))
    return free


def test_urgent_kernels_behind_long_ones_cost_what_shorter_ones_save(
    judge: Judge,
) -> None:
    b, fixed = TraceBuilder(), TraceBuilder()
    end = background_and_urgent(b, 1)
    saved = end - background_and_urgent(fixed, 10)
    (finding,) = judge(priority_without_effect, b)
    assert finding.occurrences == 10
    assert finding.cost.claim is Claim.UPPER_BOUND
    assert finding.cost.ns == pytest.approx(saved * 1000, rel=0.1)
    assert finding.severity is Severity.HIGH
    assert finding.where.kernels == ("urgent",)
    assert "by background" in finding.message
    assert judge(priority_without_effect, fixed) == []


def test_an_urgent_kernel_that_is_let_in_block_by_block_was_held_up(
    judge: Judge,
) -> None:
    b, fixed = TraceBuilder(), TraceBuilder()
    end = background_and_urgent(b, 1, early_block=True)
    saved = end - background_and_urgent(fixed, 10)
    (finding,) = judge(priority_without_effect, b)
    assert finding.occurrences == 10
    assert finding.cost.ns == pytest.approx(saved * 1000, rel=0.1)
    # From when it was ready to the end of the background kernel.
    assert "for 1.90 ms (median) by background" in finding.message
    assert finding.evidence[0].end_ns - finding.evidence[0].start_ns > 1_800_000


@pytest.mark.parametrize("priorities", [(0, 0), (-5, 0)])
def test_kernels_that_are_not_urgent_may_wait(
    judge: Judge, priorities: tuple[int, int]
) -> None:
    b = TraceBuilder()
    background_and_urgent(b, 1, priorities=priorities)
    assert judge(priority_without_effect, b) == []


def test_background_work_that_leaves_room_is_silent(judge: Judge) -> None:
    b = TraceBuilder()
    background_and_urgent(b, 1, size=SMALL)
    assert judge(priority_without_effect, b) == []


def test_without_the_table_of_streams_priorities_are_unknown(unable: Unable) -> None:
    b = TraceBuilder()
    background_and_urgent(b, 1)
    del b.rows["TARGET_INFO_CUDA_STREAM"]
    assert "TARGET_INFO_CUDA_STREAM" in unable(priority_without_effect, b).reason


# depth-first-issue-order -----------------------------------------------------------


def pieces(
    b: TraceBuilder,
    *,
    breadth_first: bool = False,
    engines: int = 1,
    compute: float = 100.0,
    behind_event: bool = False,
) -> float:
    """Four pieces of upload, kernel, download; returns when the last one ends.

    An engine serves copies in the order of their issue.
    """
    b.rows["TARGET_INFO_GPU"][0]["asyncEngines"] = engines
    steps = ("HtoD", "kernel", "DtoH")
    order = [(piece, step) for piece in range(4) for step in steps]
    if breadth_first:
        order = [(piece, step) for step in steps for piece in range(4)]
    done = dict.fromkeys(range(4), 0.0)
    free: dict[str, float] = {}
    for number, (piece, step) in enumerate(order):
        at = 1000 + 10 * number
        lane = "copy" if engines == 1 and step != "kernel" else step
        start = max(at + 8, done[piece] + 1, free.get(lane, 0) + 1)
        if behind_event and step == "HtoD" and piece:
            b.event_wait(13 + piece, piece, at - 4)
        end = start + (compute if step == "kernel" else 500)
        if step == "kernel":
            b.kernel(
                "step",
                stream=13 + piece,
                start=start,
                end=end,
                issue=(at, at + 4),
                **FULL,  # type: ignore[arg-type]
            )
        else:
            b.memcpy(
                step,
                MIB,
                stream=13 + piece,
                start=start,
                end=end,
                issue=(at, at + 4),
            )
            if behind_event and step == "DtoH":
                b.event_record(13 + piece, piece + 1, at + 5)
        done[piece] = free[lane] = end
    b.device_sync(2000, max(done.values()) + 5)
    return max(done.values())


def test_an_engine_that_idles_with_a_copy_ready_costs_that_idle(judge: Judge) -> None:
    b = TraceBuilder()
    pieces(b)
    (finding,) = judge(depth_first_issue_order, b)
    assert finding.occurrences == 3
    assert finding.cost.claim is Claim.DIRECT
    # Between two copies: 1 us to the kernel, 100 us of it, 1 us to the download.
    assert finding.cost.ns == 3 * 102_000
    assert finding.severity is Severity.MEDIUM
    assert finding.where.streams == (13, 14, 15)
    assert "stands" not in finding.message


def test_breadth_first_has_the_engine_busy_throughout(judge: Judge) -> None:
    b = TraceBuilder()
    pieces(b, breadth_first=True)
    assert judge(depth_first_issue_order, b) == []


def test_with_an_engine_for_each_direction_the_order_does_not_matter(
    judge: Judge,
) -> None:
    b = TraceBuilder()
    pieces(b, engines=3)
    assert judge(depth_first_issue_order, b) == []


def test_short_kernels_leave_a_gap_too_short_to_matter(judge: Judge) -> None:
    b = TraceBuilder()
    pieces(b, compute=20.0)
    (finding,) = judge(depth_first_issue_order, b)
    assert finding.severity is Severity.LOW
    pieces(b := TraceBuilder(), compute=5.0)
    assert judge(depth_first_issue_order, b) == []


def test_a_copy_that_waits_for_an_event_is_not_ready(judge: Judge) -> None:
    b = TraceBuilder()
    pieces(b, behind_event=True)
    assert judge(depth_first_issue_order, b) == []


# cross-context-serialization ---------------------------------------------------------


def wall(worked: float, turn: int, slice_us: float) -> float:
    """When a context has worked for so long that has every second time slice."""
    return (2 * (worked // slice_us) + turn) * slice_us + worked % slice_us


def two_processes(
    b: TraceBuilder,
    *,
    slices: float = 1000.0,
    kernels: int = 100,
    took: float = 99.0,
    size: dict[str, tuple[int, int, int]] = SMALL,
    gpus: tuple[int, int] = (0, 0),
) -> None:
    """Both queue all their kernels at once; ``slices`` 0 runs them side by side."""
    for turn, gpu in enumerate(gpus):
        b.process(200 + turn, gpu=gpu)
        with b.at(pid=200 + turn):
            for i in range(kernels):
                first, last = i * (took + 1), i * (took + 1) + took
                if slices:
                    first, last = (wall(t, turn, slices) for t in (first, last))
                b.kernel(
                    "work",
                    stream=13,
                    start=1010 + first,
                    end=1010 + last,
                    issue=(1000 + 5 * i, 1004 + 5 * i),
                    **size,  # type: ignore[arg-type]
                )


def test_processes_that_take_turns_cost_half_of_the_time(judge: Judge) -> None:
    b = TraceBuilder()
    two_processes(b)
    (finding,) = judge(cross_context_serialization, b)
    # Each is held at each of the slices of the other, the first one not at the last.
    assert finding.occurrences == 9 + 10
    assert finding.cost.claim is Claim.UPPER_BOUND
    assert finding.cost.ns == pytest.approx(10_000_000, rel=0.12)
    assert finding.severity is Severity.HIGH
    assert finding.where.pid is None
    assert "2 processes" in finding.message
    assert finding.where.kernels == ("work",)


def test_the_last_process_also_gets_back_what_it_lost_before(judge: Judge) -> None:
    b = TraceBuilder()
    # 3 ms against 10 ms of work: the long one is alone from 6 ms on, at 13 ms done.
    for turn, kernels in enumerate((30, 100)):
        b.process(200 + turn)
        with b.at(pid=200 + turn):
            for i in range(kernels):
                work = (i * 100.0, i * 100 + 99.0)
                first, last = (wall(t, turn, 500.0) for t in work)
                if turn and work[0] >= 3000:
                    first, last = (t + 3000 for t in work)
                b.kernel(
                    "work",
                    stream=13,
                    start=1010 + first,
                    end=1010 + last,
                    issue=(1000 + 5 * i, 1004 + 5 * i),
                    **SMALL,  # type: ignore[arg-type]
                )
    (finding,) = judge(cross_context_serialization, b)
    assert finding.cost.ns == pytest.approx(3_000_000, rel=0.05)


def test_a_time_slice_that_ends_within_kernels_suspends_them(judge: Judge) -> None:
    b = TraceBuilder()
    two_processes(b, slices=1037.0)
    (finding,) = judge(cross_context_serialization, b)
    assert finding.cost.ns == pytest.approx(10_000_000, rel=0.12)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"slices": 0.0}, id="side by side, as under MPS"),
        pytest.param({"size": FULL}, id="no room for both"),
        pytest.param({"gpus": (0, 1)}, id="a GPU for each"),
        pytest.param({"slices": 0.0, "took": 1.0}, id="tiny kernels with gaps"),
    ],
)
def test_processes_that_lose_nothing_are_silent(
    judge: Judge, changes: dict[str, object]
) -> None:
    b = TraceBuilder(gpus=2)
    two_processes(b, **changes)  # type: ignore[arg-type]
    assert judge(cross_context_serialization, b) == []


def test_one_process_after_the_other_is_silent(judge: Judge) -> None:
    b = TraceBuilder()
    for turn in range(2):
        b.process(200 + turn)
        with b.at(pid=200 + turn):
            for i in range(20):
                at = 1000 + 100 * i + 3000 * turn
                b.kernel("work", stream=13, start=at, end=at + 99)
    assert judge(cross_context_serialization, b) == []


def test_two_streams_of_one_process_are_silent(judge: Judge) -> None:
    b = TraceBuilder()
    for i in range(50):
        for stream in (13, 14):
            at = 1000 + 100 * i
            b.kernel("work", stream=stream, start=at, end=at + 99)
    assert judge(cross_context_serialization, b) == []


# threads-share-legacy-stream ---------------------------------------------------


def threads_launch(
    b: TraceBuilder,
    *,
    in_turn: bool = True,
    streams: Sequence[int] = (7, 7, 7, 7),
    size: dict[str, tuple[int, int, int]] = SMALL,
    at_once: bool = True,
) -> None:
    """Four threads with ten kernels of 100 us each; every one waits for its stream.

    ``in_turn`` issues one kernel of each thread after another, else all of one thread
    before those of the next. Unless ``at_once`` a thread begins when the one before
    has issued its work, and only the last one waits.
    """
    order = [(t, i) for i in range(10) for t in range(4)]
    if not in_turn:
        order.sort()
    free: dict[int, float] = {}
    for number, (thread, _) in enumerate(order):
        at = 1000 + 5 * number
        stream = streams[thread]
        start = max(at + 6, free.get(stream, 0) + 1)
        with b.at(tid=110 + thread):
            b.kernel(
                f"work{thread}",
                stream=stream,
                start=start,
                end=start + 100,
                issue=(at, at + 4),
                **size,  # type: ignore[arg-type]
            )
        free[stream] = start + 100
    for thread, stream in enumerate(streams):
        if at_once or thread == 3:
            with b.at(tid=110 + thread):
                name = "cudaStreamSynchronize"
                b.sync(name, stream=stream, start=1205 + thread, end=free[stream] + 5)


@pytest.mark.parametrize(("in_turn", "held"), [(True, 39), (False, 3)])
def test_threads_on_the_legacy_stream_cost_all_but_the_busiest_thread(
    judge: Judge, in_turn: bool, held: int
) -> None:
    b = TraceBuilder()
    threads_launch(b, in_turn=in_turn)
    (finding,) = judge(threads_share_legacy_stream, b)
    assert finding.occurrences == held
    assert finding.cost.claim is Claim.UPPER_BOUND
    # 4045 us from the first issue, and a thread runs 1000 us.
    assert finding.cost.ns == pytest.approx(3_000_000, rel=0.03)
    assert finding.severity is Severity.HIGH
    assert finding.where.streams == (7,)
    assert "4 threads launch 40 operations" in finding.message


def test_the_stream_runs_work_in_the_order_in_which_calls_return(judge: Judge) -> None:
    b = TraceBuilder()
    # The first call of each thread begins at once and returns after all others.
    calls = [(t, 1000.0 + t, 1300.0 + t) for t in range(4)]
    calls += [
        (t, 1310 + 40 * i + 5 * t, 1314 + 40 * i + 5 * t)
        for i in range(9)
        for t in range(4)
    ]
    for t in range(4, 8):
        calls += [(t, 1010.0 + 5 * i + t, 1012.0 + 5 * i + t) for i in range(10)]
    free = 0.0
    for thread, start, end in sorted(calls, key=lambda call: call[2]):
        free = max(free, end) + 1
        with b.at(tid=110 + thread):
            b.kernel(
                f"work{thread}",
                stream=7,
                start=free,
                end=free + 100,
                issue=(start, end),
                **SMALL,  # type: ignore[arg-type]
            )
        free += 100
    for thread in range(8):
        with b.at(tid=110 + thread):
            b.sync("cudaStreamSynchronize", stream=7, start=1700 + thread, end=free + 5)
    (finding,) = judge(threads_share_legacy_stream, b)
    assert "8 threads launch 80 operations" in finding.message
    assert finding.cost.ns == pytest.approx(7_000_000, rel=0.03)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"streams": (13, 14, 15, 16)}, id="a stream each"),
        pytest.param({"streams": (13, 13, 13, 13)}, id="another stream in common"),
        pytest.param({"size": FULL}, id="no room for both"),
        pytest.param({"at_once": False, "in_turn": False}, id="handed on"),
    ],
)
def test_threads_that_lose_nothing_are_silent(
    judge: Judge, changes: dict[str, object]
) -> None:
    b = TraceBuilder()
    threads_launch(b, **changes)  # type: ignore[arg-type]
    assert judge(threads_share_legacy_stream, b) == []


# host-sync-drains-gpu, device-sync-in-steady-state --------------------------------


def reads_each_value(
    b: TraceBuilder, *, wait: str = "cudaStreamSynchronize", copies: bool = True
) -> float:
    """20 iterations: 100 us of GPU work, a value read back, 60 us of host work on it.

    Returns what an iteration takes longer than its GPU work.
    """
    now = 1000.0
    for i in range(20):
        begun = now
        b.kernel("step", stream=13, start=now + 6, end=now + 106, issue=(now, now + 4))
        done, now = now + 106, now + 5
        if copies:
            b.memcpy(
                "DtoH", 4, stream=13, start=done + 6, end=done + 8, issue=(now, now + 3)
            )
            done, now = done + 8, now + 4
        if wait == "cudaDeviceSynchronize":
            b.kernel(
                "other", stream=14, start=now + 5, end=done - 1, issue=(now, now + 3)
            )
            b.device_sync(now + 4, done + 4)
        else:
            b.sync(wait, stream=13, start=now, end=done + 4)
        now = done + 64
        b.nvtx(f"iteration {i}", begun - 0.5, now - 1)
    return now - begun - 100


@pytest.mark.parametrize("copies", [True, False])
def test_waits_cost_all_but_the_work_of_the_gpu(judge: Judge, copies: bool) -> None:
    b = TraceBuilder()
    idle = reads_each_value(b, copies=copies)
    (finding,) = judge(host_sync_drains_gpu, b)
    assert finding.occurrences == 20
    assert finding.cost.claim is Claim.UPPER_BOUND
    # 19 iterations are judged, and the last wait must stay; the copies go as well.
    assert finding.cost.ns == pytest.approx(18 * idle * 1000, rel=0.02)
    assert ("copies before them" in finding.cost.method) == copies


def test_a_wait_for_the_device_costs_all_but_the_copies(judge: Judge) -> None:
    b = TraceBuilder()
    idle = reads_each_value(b, wait="cudaDeviceSynchronize")
    (finding,) = judge(device_sync_in_steady_state, b)
    assert finding.cost.claim is Claim.UPPER_BOUND
    # A copy takes 2 us, and 6 us before and after it.
    assert finding.cost.ns == pytest.approx(18 * (idle - 14) * 1000, rel=0.02)


def test_host_work_after_the_last_wait_is_hidden_too(judge: Judge) -> None:
    b = TraceBuilder()
    idle = reads_each_value(b, copies=False)
    b.kernel("verify", stream=13, start=9_000, end=9_001)
    (finding,) = judge(host_sync_drains_gpu, b)
    assert finding.cost.ns == pytest.approx(19 * idle * 1000, rel=0.02)


# busy-poll ---------------------------------------------------------------------------


def polling(
    b: TraceBuilder, *, steps: int = 5, queries: int = 200, every: float = 2.0
) -> None:
    for step in range(steps):
        at = 1000 + 1000 * step
        b.kernel("step", stream=13, start=at, end=at + 450)
        for i in range(queries):
            b.stream_query(13, at + 5 + every * i)


def test_queries_in_a_row_cost_the_host_that_time(judge: Judge) -> None:
    b = TraceBuilder()
    polling(b)
    (finding,) = judge(busy_poll, b)
    assert finding.occurrences == 1000
    assert finding.cost.claim is Claim.DIRECT
    assert finding.cost.ns == 5 * (199 * 2_000 + 800)
    assert finding.severity is Severity.LOW
    assert finding.where.streams == (13,)
    assert "cudaStreamQuery was called 1000 times in 5 runs" in finding.message


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"queries": 99}, id="few"),
        pytest.param({"every": 12.0, "steps": 1}, id="with other work between"),
    ],
)
def test_queries_now_and_then_are_what_they_are_for(
    judge: Judge, changes: dict[str, float]
) -> None:
    b = TraceBuilder()
    polling(b, **changes)  # type: ignore[arg-type]
    assert judge(busy_poll, b) == []


def test_event_queries_are_told_apart_and_name_their_thread(judge: Judge) -> None:
    b = TraceBuilder()
    polling(b)
    with b.at(tid=102):
        for i in range(120):
            b.sync("cudaEventQuery", start=1700 + 2 * i, end=1701 + 2 * i, event=5)
    by_stream, by_event = judge(busy_poll, b)
    assert (by_event.occurrences, by_stream.occurrences) == (120, 1000)
    assert by_event.where.threads == (102,)


def test_calls_count_where_queries_leave_no_other_row(judge: Judge) -> None:
    b = TraceBuilder()
    for step in range(5):
        at = 1000 + 1000 * step
        b.kernel("step", stream=13, start=at, end=at + 450)
        for i in range(200):
            b.call("cudaStreamQuery", at + 5 + 2 * i, 1.0, return_value=600)
    (finding,) = judge(busy_poll, b)
    assert finding.occurrences == 1000


def test_one_short_poll_in_a_long_run_is_info(judge: Judge) -> None:
    b = TraceBuilder()
    polling(b, steps=1, queries=100, every=1.0)
    b.kernel("long", stream=14, start=1000, end=60_000)
    (finding,) = judge(busy_poll, b)
    assert finding.severity is Severity.INFO


# stream-destroy-with-pending-work and unsynchronized-d2h-result ----------------------


def destroy_early(b: TraceBuilder, *, streams: int = 1, wait: bool = False) -> None:
    """Work of 1 ms on each stream, then the streams are destroyed within 10 us."""
    for i in range(streams):
        b.call("cudaStreamCreateWithFlags", 500 + 10 * i)
        b.kernel("step", stream=13 + i, start=1010, end=2000 + i, issue=(1000, 1004))
    if wait:
        for i in range(streams):
            name = "cudaStreamSynchronize"
            b.sync(name, stream=13 + i, start=1010 + i, end=2005 + i)
    at = 2100 if wait else 1100
    for i in range(streams):
        b.call("cudaStreamDestroy", at + 12 * i, 10)


def test_a_stream_destroyed_while_it_works_is_a_warning(judge: Judge) -> None:
    b = TraceBuilder()
    destroy_early(b)
    (finding,) = judge(stream_destroy_with_pending_work, b)
    assert finding.occurrences == 1
    assert finding.cost.claim is Claim.NONE
    assert finding.severity is Severity.MEDIUM
    assert finding.confidence is Confidence.HIGH
    assert finding.where.streams == (13,)
    assert "0.90 ms before" in finding.message


def test_streams_waited_for_before_are_silent(judge: Judge) -> None:
    b = TraceBuilder()
    destroy_early(b, streams=3, wait=True)
    assert judge(stream_destroy_with_pending_work, b) == []


def test_all_streams_destroyed_at_once_are_one_finding(judge: Judge) -> None:
    b = TraceBuilder()
    destroy_early(b, streams=3)
    (finding,) = judge(stream_destroy_with_pending_work, b)
    assert finding.occurrences == 3
    assert finding.confidence is Confidence.HIGH


def test_which_of_several_streams_was_destroyed_is_unknown(judge: Judge) -> None:
    b = TraceBuilder()
    b.call("cudaStreamCreate", 400)
    destroy_early(b)
    (finding,) = judge(stream_destroy_with_pending_work, b)
    assert finding.confidence is Confidence.LOW


def test_a_stream_that_gets_more_work_was_not_the_one(judge: Judge) -> None:
    b = TraceBuilder()
    destroy_early(b)
    b.kernel("later", stream=13, start=2010, end=2020)
    assert judge(stream_destroy_with_pending_work, b) == []


def copies_back(b: TraceBuilder, *, memory: str = "pinned", api: str = "") -> None:
    """A kernel and a copy to the host on stream 13, done at 1200 us."""
    b.stream(13, flag=1)
    b.kernel("step", stream=13, start=1010, end=1100, issue=(1000, 1004))
    b.memcpy(
        "DtoH",
        MIB,
        dst=memory,
        stream=13,
        start=1101,
        end=1200,
        issue=(1005, 1009 if not api else 1205),
        api=api or "cudaMemcpyAsync",
    )
    b.call("cudaStreamCreate", 900)
    b.call("cudaStreamDestroy", 1010, 10)


Wait = Callable[[TraceBuilder], object]


def wait_through_an_event(b: TraceBuilder) -> None:
    """Stream 14 waits for stream 13, and the host for stream 14."""
    b.event_record(13, 1, 1030)
    b.event_wait(14, 1, 1035)
    b.event_record(14, 2, 1040)
    b.sync("cudaEventSynchronize", start=1045, end=1210, event=2)


def wait_through_the_null_stream(b: TraceBuilder) -> None:
    b.memset(64, stream=7, start=1201, end=1202, issue=(1030, 1034))
    b.sync("cudaStreamSynchronize", stream=7, start=1040, end=1210)


def query_when_done(b: TraceBuilder) -> None:
    b.stream_query(13, 1300)


WAITS: list[Wait] = [
    lambda b: b.device_sync(1030, 1210),
    lambda b: b.sync("cudaStreamSynchronize", stream=13, start=1030, end=1210),
    lambda b: b.sync("cudaStreamSynchronize", start=1030, end=1210),
    wait_through_an_event,
    wait_through_the_null_stream,
    query_when_done,
    lambda b: b.call("cudaFreeHost", 1030, 250),
    lambda b: b.call("cudaLaunchHostFunc", 1030, 5),
    lambda b: b.memcpy(
        "DtoH", 4, dst="pageable", stream=13, start=1201, end=1202, issue=(1030, 1210)
    ),
]
NO_WAITS: list[Wait] = [
    lambda b: None,
    lambda b: b.sync("cudaStreamSynchronize", stream=14, start=1030, end=1032),
    lambda b: b.stream_query(13, 1030),
    lambda b: b.kernel("other", stream=14, start=1040, end=1500),
    lambda b: (b.event_record(13, 1, 1030), b.event_wait(14, 1, 1035)),
    lambda b: b.call("cudaMalloc", 1030, 100),
]


@pytest.mark.parametrize("wait", NO_WAITS)
def test_work_that_nothing_waits_for_is_found(judge: Judge, wait: Wait) -> None:
    b = TraceBuilder()
    copies_back(b)
    wait(b)
    (copied,) = judge(unsynchronized_d2h_result, b)
    assert copied.occurrences == 1
    assert copied.severity is Severity.ERROR
    assert copied.confidence is Confidence.LOW
    assert copied.cost.claim is Claim.NONE
    assert "1 asynchronous copy to page-locked memory (1.0 MiB)" in copied.message
    (destroyed,) = judge(stream_destroy_with_pending_work, b)
    assert destroyed.occurrences == 1


@pytest.mark.parametrize("wait", WAITS)
def test_work_that_something_waits_for_is_silent(judge: Judge, wait: Wait) -> None:
    b = TraceBuilder()
    copies_back(b)
    wait(b)
    assert judge(unsynchronized_d2h_result, b) == []
    assert judge(stream_destroy_with_pending_work, b) == []


@pytest.mark.parametrize(
    ("memory", "api"), [("pageable", "cudaMemcpyAsync"), ("pinned", "cudaMemcpy")]
)
def test_copies_that_block_the_host_need_no_wait(
    judge: Judge, memory: str, api: str
) -> None:
    b = TraceBuilder()
    copies_back(b, memory=memory, api=api)
    assert judge(unsynchronized_d2h_result, b) == []


def test_every_call_recorded_raises_the_confidence(judge: Judge) -> None:
    b = TraceBuilder()
    b.option("CUDA_SKIP_SOME_API_CALLS", "false")
    copies_back(b)
    (finding,) = judge(unsynchronized_d2h_result, b)
    assert finding.confidence is Confidence.MEDIUM


@pytest.mark.parametrize(
    "rule", [unsynchronized_d2h_result, stream_destroy_with_pending_work]
)
def test_a_recording_that_was_cut_off_can_not_tell(unable: Unable, rule: Rule) -> None:
    b = TraceBuilder()
    b.diagnostic("warning", "Not all CUDA events might have been collected.")
    copies_back(b)
    assert "missing" in unable(rule, b).reason

"""Rules about chunks, frees, pools, L2 limits, failed calls and loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tracebuilder import TraceBuilder

from streamlint.blocking import launches_block
from streamlint.copies import pinned_rates, return_ns
from streamlint.cuda_errors import error_name
from streamlint.findings import Claim, Confidence, Finding, NotAssessed, Severity
from streamlint.registry import find
from streamlint.rule import Outcome
from streamlint.trace import open_trace
from streamlint.trace.model import Trace

MIB = 1 << 20
FREE = "allocation-implicit-sync"
POOL = "mempool-trim-thrash"
CHUNKS = "pipeline-chunk-size"
NOT_RESET = "l2-persistence-not-reset"
CLAMPED = "l2-request-clamped-or-unsupported"
BLOCKING = "launch-blocking"
LOADS = "lazy-module-load-in-hot-path"
FAILED = "failed-cuda-call"

Judge = Callable[[str, TraceBuilder], Outcome]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[TraceBuilder], Trace]:
    return lambda builder: open_trace(builder.write(tmp_path / "t.sqlite"))


@pytest.fixture
def judge(opened: Callable[[TraceBuilder], Trace]) -> Judge:
    return lambda rule, builder: find(rule).check(opened(builder))


def only(outcome: Outcome) -> Finding:
    assert not isinstance(outcome, NotAssessed), outcome.reason
    assert len(outcome) == 1, [finding.message for finding in outcome]
    return outcome[0]


def not_assessed(outcome: Outcome) -> NotAssessed:
    assert isinstance(outcome, NotAssessed), outcome
    return outcome


def program(*, all_apis: bool = False) -> TraceBuilder:
    builder = TraceBuilder()
    if all_apis:
        builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    for stream in (13, 14, 15, 16):
        builder.stream(stream, flag=2)
    return builder


def cost_us(finding: Finding) -> float:
    assert finding.cost.ns is not None
    return finding.cost.ns / 1000


# Copies: what is known about pinned ones --------------------------------------


def test_the_pinned_rate_is_the_traces_own_where_it_has_large_copies(
    opened: Callable[[TraceBuilder], Trace],
) -> None:
    b = program()
    for i in range(3):
        at = 1000 + 200 * i
        b.memcpy("HtoD", MIB, stream=13, start=at, end=at + 100, issue=(at - 9, at - 2))
        b.memcpy("DtoH", 1000, stream=13, start=at + 110, end=at + 111)
    trace = opened(b)

    rates = dict(pinned_rates(trace).select("direction", "rate").iter_rows())

    # Small copies say nothing about the rate: that of an H200 was measured.
    assert rates == {"HtoD": MIB / 100_000, "DtoH": 51.8}
    assert return_ns(trace) == 4_500


def test_an_unmeasured_gpu_has_no_rate(
    opened: Callable[[TraceBuilder], Trace],
) -> None:
    b = program()
    b.rows["TARGET_INFO_GPU"][0].update(name="NVIDIA Unheard-of")
    b.memcpy("HtoD", MIB, stream=13, start=1000, end=1100, src="pageable")
    trace = opened(b)

    assert pinned_rates(trace).is_empty()
    assert return_ns(trace) == 4_000


def pageable_loop(b: TraceBuilder) -> None:
    """Uploads of 4 MiB that take 500 us; kernels of 100 us wait for them."""
    for i in range(10):
        at = 1000 + 700 * i
        b.memcpy(
            "HtoD",
            4 * MIB,
            src="pageable",
            stream=13,
            start=at + 20,
            end=at + 520,
            issue=(at, at + 510),
        )
        b.kernel(
            "step", stream=13, start=at + 530, end=at + 630, issue=(at + 515, at + 520)
        )


def test_pageable_copies_at_the_measured_rate_of_the_gpu(judge: Judge) -> None:
    b = program()
    pageable_loop(b)

    finding = only(judge("pageable-async-copy", b))

    # Each copy takes 81 us instead of 500, a round 194 on the host: 4 for the call.
    assert finding.cost.claim is Claim.WHAT_IF
    assert cost_us(finding) == pytest.approx(10 * 506, rel=0.03)


def test_without_a_known_rate_only_the_early_return_is_claimed(judge: Judge) -> None:
    b = program()
    b.rows["TARGET_INFO_GPU"][0].update(name="NVIDIA Unheard-of")
    pageable_loop(b)

    finding = only(judge("pageable-async-copy", b))

    # The copies stay as long as they are: a round is 500 + 10 + 100 us on the GPU.
    assert finding.cost.claim is Claim.LOWER_BOUND
    assert cost_us(finding) == pytest.approx(9 * 80, rel=0.1)


# allocation-implicit-sync -----------------------------------------------------


def freeing(
    b: TraceBuilder,
    name: str = "cudaFree",
    *,
    rounds: int = 12,
    waits: bool = True,
    own: float = 60.0,
    usage: bool = False,
    stream: int = 13,
) -> list[int]:
    """A kernel of 500 us and a free each round, streams 13 and 14 in turn."""
    calls = []
    at = 1000.0
    for i in range(rounds):
        start = at + 10
        b.kernel(
            "work",
            stream=stream + i % 2,
            start=start,
            end=start + 500,
            issue=(at, at + 5),
        )
        end = start + 500 + own if waits else at + 10 + own
        calls.append(b.call(name, at + 10, end - at - 10))
        if usage:
            b.memory_event("deallocation", MIB, end - own + 12, call=calls[-1])
        at = end + 10 if waits else start + 510
    return calls


def test_frees_that_wait_make_two_streams_take_turns(judge: Judge) -> None:
    b = program()
    calls = freeing(b)

    finding = only(judge(FREE, b))

    assert finding.occurrences == 12
    assert finding.cost.claim is Claim.WHAT_IF
    # Two kernels share the GPU: 580 us a round becomes half of 500.
    assert cost_us(finding) == pytest.approx(12 * 580 - 6 * 500, rel=0.05)
    assert finding.severity is Severity.HIGH
    assert finding.confidence is Confidence.MEDIUM
    assert finding.message == (
        "12 calls of cudaFree kept the host waiting for GPU work that was still "
        "running, 6.00 ms in all"
    )
    assert {e.correlation_id for e in finding.evidence} <= set(calls)
    assert finding.evidence[0].what == "cudaFree waits 500 us for the GPU"
    assert finding.change is not None
    assert "race" in finding.fix


@pytest.mark.parametrize("name", ["cudaFreeHost", "cuMemFree_v2", "cuMemFreeHost"])
def test_each_kind_of_free_waits(name: str, judge: Judge) -> None:
    b = program()
    freeing(b, name)

    assert only(judge(FREE, b)).occurrences == 12


def test_memory_usage_makes_it_certain(judge: Judge) -> None:
    b = program()
    freeing(b, usage=True)

    assert only(judge(FREE, b)).confidence is Confidence.HIGH


def test_memory_usage_shows_that_a_free_did_not_wait(judge: Judge) -> None:
    b = program()
    for call in freeing(b):
        b.memory_event("deallocation", MIB, 100, call=call)

    assert judge(FREE, b) == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rounds": 1}, id="one"),
        pytest.param({"waits": False}, id="returns while the work goes on"),
        pytest.param({"name": "cudaFreeAsync"}, id="stream ordered"),
        pytest.param({"name": "cudaMalloc"}, id="an allocation"),
        pytest.param({"name": "cudaHostUnregister"}, id="not known"),
    ],
)
def test_calls_that_do_not_wait_are_silent(
    changes: dict[str, object], judge: Judge
) -> None:
    b = program()
    b.kernel("last", stream=15, start=11_000, end=11_100)
    freeing(b, **changes)  # type: ignore[arg-type]

    assert judge(FREE, b) == []


def test_frees_of_an_idle_gpu_are_silent(judge: Judge) -> None:
    b = program()
    for i in range(10):
        at = 1000 + 200 * i
        b.kernel("work", stream=13, start=at, end=at + 50)
        b.call("cudaFree", at + 60, 100)

    assert judge(FREE, b) == []


def test_frees_of_pool_memory_never_wait(judge: Judge) -> None:
    b = program()
    for call in freeing(b):
        b.memory_event("deallocation", MIB, 9999, call=call, contextId=4_294_967_295)

    assert judge(FREE, b) == []


def test_work_that_goes_on_elsewhere_makes_it_unsure(judge: Judge) -> None:
    b = program()
    freeing(b)
    with b.at(tid=102):
        b.kernel("other", stream=15, start=1015, end=11_000, issue=(1014, 1016))

    # Issued after the first free began and before the others.
    assert judge(FREE, b) == []


def test_a_result_that_the_host_may_count_on_makes_it_a_bound(judge: Judge) -> None:
    b = program()
    freeing(b)
    b.memcpy("DtoH", MIB, stream=14, start=1100, end=1150, issue=(1006, 1009))

    assert only(judge(FREE, b)).cost.claim is Claim.UPPER_BOUND


def test_devices_are_told_apart_by_memory_usage_only(judge: Judge) -> None:
    b = program()
    freeing(b)
    with b.at(device=1):
        b.kernel("elsewhere", stream=15, start=1000, end=1010)

    assert judge(FREE, b) == []
    freeing(b, usage=True, rounds=0)
    calls = [
        row["correlationId"]
        for row in b.rows["CUPTI_ACTIVITY_KIND_RUNTIME"]
        if row["end"] - row["start"] > 500_000
    ]
    for call in calls:
        b.memory_event("deallocation", MIB, 9999, call=call)
    assert only(judge(FREE, b)).occurrences == 12


# mempool-trim-thrash ----------------------------------------------------------


def pooling(
    b: TraceBuilder,
    rounds: int = 6,
    *,
    grows: float = 200.0,
    trims: bool = True,
    left: int = 0,
    last_alloc: bool = True,
) -> None:
    """Allocation, kernel, free and wait each 1000 us; the wait trims the pool."""
    for i in range(rounds):
        at = 1000.0 + 1000 * i
        if last_alloc or i < rounds - 1:
            call = b.call("cudaMallocAsync", at, grows)
            if i == 0:
                b.pool_event("created", at + 1, call=call, size=64 * MIB)
        start = at + grows + 10
        b.kernel("use", stream=13, start=start, end=start + 100)
        b.call("cudaFreeAsync", start, 5)
        wait = b.sync(
            "cudaStreamSynchronize", 13, start + 20, start + 100 + 3 + 130 * trims
        )
        if trims:
            b.pool_event("trimmed", start + 230, call=wait, size=left)
    b.kernel("last", stream=13, start=1000 + 1000 * rounds, end=1100 + 1000 * rounds)


def test_a_pool_that_is_trimmed_at_each_wait(judge: Judge) -> None:
    b = program()
    b.option("COLLECT_GPU_MEMORY_USAGE", "true")
    pooling(b)

    finding = only(judge(POOL, b))

    # The last trim is followed by no allocation.
    assert finding.occurrences == 5
    assert finding.cost.claim is Claim.WHAT_IF
    # Five allocations of 200 us take 5; five waits return 130 us earlier.
    assert cost_us(finding) == pytest.approx(5 * (195 + 130), rel=0.02)
    assert finding.message == (
        "a memory pool gave memory back to the system at 5 calls of "
        "cudaStreamSynchronize and had to fetch it again: 5 allocations after that "
        "took 1.00 ms"
    )
    assert finding.evidence[0].what == "cudaStreamSynchronize trims the pool"
    assert finding.severity is Severity.HIGH
    assert "cudaMemPoolAttrReleaseThreshold" in finding.fix


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rounds": 3}, id="too few"),
        pytest.param({"trims": False}, id="never trimmed"),
        pytest.param({"left": 64 * MIB}, id="trimmed of nothing"),
    ],
)
def test_pools_that_keep_their_memory_are_silent(
    changes: dict[str, object], judge: Judge
) -> None:
    b = program()
    b.option("COLLECT_GPU_MEMORY_USAGE", "true")
    pooling(b, **changes)  # type: ignore[arg-type]

    assert judge(POOL, b) == []


def test_trims_by_other_calls_are_no_thrash(judge: Judge) -> None:
    b = program()
    b.option("COLLECT_GPU_MEMORY_USAGE", "true")
    pooling(b, trims=False)
    for i in range(6):
        at = 1400 + 1000 * i
        call = b.call("cudaMemPoolTrimTo", at, 50)
        b.pool_event("trimmed", at + 40, call=call)

    assert judge(POOL, b) == []


def test_pools_need_memory_usage(judge: Judge) -> None:
    b = program()
    pooling(b, trims=False)
    del b.rows["CUDA_GPU_MEMORY_POOL_EVENTS"]

    assert "--cuda-memory-usage=true" in not_assessed(judge(POOL, b)).recapture


def test_programs_without_pools_are_silent(judge: Judge) -> None:
    b = program()
    b.kernel("work", stream=13, start=1000, end=1100)
    b.call("cudaMalloc", 900, 50)

    assert judge(POOL, b) == []


# pipeline-chunk-size ----------------------------------------------------------


def pipeline(
    b: TraceBuilder,
    chunks: int = 64,
    *,
    size: int = 65_536,
    streams: int = 4,
    copying: float = 5.0,
    computing: float = 3.0,
    every: float = 14.0,
    memory: str = "pinned",
    wait_every: int = 0,
    api: str = "cudaMemcpyAsync",
) -> float:
    """Chunks dealt out to streams: three calls each, `every` us apart; returns the end.

    Each stream is in order, and so is each copy engine.
    """
    free = {13 + i: 0.0 for i in range(streams)}
    up = down = 0.0
    at = 1000.0
    third = every / 3
    for i in range(chunks):
        stream = 13 + i % streams
        start = max(at + third, free[stream], up)
        up = start + copying
        b.memcpy(
            "HtoD",
            size,
            src=memory,
            stream=stream,
            start=start,
            end=up,
            issue=(at, at + third - 0.3),
            api=api,
        )
        start = max(at + 2 * third, up + 1)
        b.kernel(
            "step",
            stream=stream,
            start=start,
            end=start + computing,
            issue=(at + third, at + 2 * third - 0.3),
        )
        start = max(at + every, start + computing + 1, down)
        down = free[stream] = start + copying
        b.memcpy(
            "DtoH",
            size,
            dst=memory,
            stream=stream,
            start=start,
            end=down,
            issue=(at + 2 * third, at + every - 0.3),
            api=api,
        )
        at += every
        if wait_every and (i + 1) % wait_every == 0:
            b.sync("cudaStreamSynchronize", stream, at, max(at, down) + 3)
            at = max(at, down) + 5
    return down


def test_small_chunks_cost_their_calls(judge: Judge) -> None:
    b = program()
    end = pipeline(b)

    finding = only(judge(CHUNKS, b))

    assert finding.occurrences == 64
    assert finding.cost.claim is Claim.UPPER_BOUND
    # One chunk of 4 MiB: 81 us up, 81 us down, and little else.
    assert cost_us(finding) == pytest.approx(end - 1005 - 130, rel=0.1)
    assert finding.severity is Severity.HIGH
    assert finding.confidence is Confidence.MEDIUM
    assert finding.message == (
        "64 chunks of 64.0 KiB are dealt out to 4 streams; issuing one takes 14.0 us "
        "and copying it 5.0 us"
    )
    assert finding.where.streams == (13, 14, 15, 16)
    assert finding.change is not None


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"size": 4 * MIB, "copying": 81.0, "every": 90.0}, id="good"),
        pytest.param({"chunks": 31}, id="few"),
        pytest.param({"streams": 1}, id="one stream"),
        pytest.param({"memory": "pageable"}, id="pageable"),
        pytest.param({"wait_every": 8}, id="the host waits between"),
        pytest.param({"copying": 30.0}, id="the bus is the limit"),
        pytest.param({"api": "cudaGraphLaunch"}, id="graphs"),
    ],
)
def test_other_pipelines_are_silent(changes: dict[str, object], judge: Judge) -> None:
    b = program()
    pipeline(b, **changes)  # type: ignore[arg-type]

    assert judge(CHUNKS, b) == []


def test_copies_without_kernels_are_no_pipeline(judge: Judge) -> None:
    b = program()
    for i in range(64):
        at = 1000 + 14 * i
        b.memcpy("HtoD", 65_536, stream=13 + i % 4, start=at + 5, end=at + 10)

    assert judge(CHUNKS, b) == []


def two_halves(b: TraceBuilder, chunks: int = 2, *, size: int = 64 * MIB) -> None:
    """Each chunk: 1300 us up, 500 us of kernel, 1300 us down; uploads in a row."""
    for i in range(chunks):
        stream, at = 13 + i, 1000 + 20 * i
        up = 1010 + 1300 * i
        b.memcpy(
            "HtoD", size, stream=stream, start=up, end=up + 1300, issue=(at, at + 4)
        )
        b.kernel(
            "step",
            stream=stream,
            start=up + 1301,
            end=up + 1801,
            issue=(at + 5, at + 9),
        )
        b.memcpy(
            "DtoH",
            size,
            stream=stream,
            start=up + 1802,
            end=up + 3102,
            issue=(at + 10, at + 14),
        )


def test_two_large_chunks_overlap_little(judge: Judge) -> None:
    b = program()
    two_halves(b)

    finding = only(judge(CHUNKS, b))

    assert finding.occurrences == 2
    assert finding.cost.claim is Claim.UPPER_BOUND
    assert finding.confidence is Confidence.LOW
    # 1301 us before the first kernel and 1301 after the last, less 1 of 64 MiB; at
    # most 4402 us less two copies.
    assert cost_us(finding) == pytest.approx(min(2602 * 63 / 64, 4402 - 2600))
    assert "2 chunks of up to 64.0 MiB in 1 pass" in finding.message


@pytest.mark.parametrize(
    ("chunks", "size"), [(4, 64 * MIB), (2, 16 * MIB)], ids=["four", "of 16 MiB"]
)
def test_enough_or_small_enough_chunks_are_silent(
    chunks: int, size: int, judge: Judge
) -> None:
    b = program()
    two_halves(b, chunks, size=size)

    assert judge(CHUNKS, b) == []


# L2 ---------------------------------------------------------------------------


def mark(b: TraceBuilder, text: str, at: float) -> None:
    b.nvtx(text, at, domain="streamlint", mark=True)


def window(
    b: TraceBuilder,
    start: float,
    end: float,
    *,
    size: int = MIB,
    prop: str = "persisting",
) -> None:
    text = f"l2.window base=4096 bytes={size} hit=1.0 hitProp={prop}"
    b.nvtx(text, start, end, domain="streamlint")


def walk(b: TraceBuilder, start: float, count: int = 20) -> None:
    """A kernel of 15 us every 20 us, issued 3 us before it starts."""
    for at in (start + 5 + 20 * i for i in range(count)):
        b.kernel("walk", stream=13, start=at, end=at + 15)


def persisting(size: int = 16 * MIB) -> TraceBuilder:
    b = program()
    mark(b, f"l2.setaside bytes={size}", 10)
    return b


def test_persisting_lines_that_outlive_their_window(judge: Judge) -> None:
    b = persisting()
    walk(b, 100, 40)
    window(b, 90, 300)  # ten kernels

    finding = only(judge(NOT_RESET, b))

    assert finding.occurrences == 30
    assert finding.message == (
        "30 kernels ran after the last one under a persisting window, and the "
        "persisting L2 lines were not reset"
    )
    assert (finding.cost.claim, finding.cost.ns) == (Claim.NONE, None)
    assert (finding.severity, finding.confidence) == (Severity.LOW, Confidence.MEDIUM)
    assert [e.what for e in finding.evidence] == [
        "walk, the last under a window",
        "30 kernels without a window",
    ]


@pytest.mark.parametrize("end", ["mark", "call", "no set-aside"])
def test_a_reset_after_the_window_is_the_fix(end: str, judge: Judge) -> None:
    b = persisting()
    walk(b, 100, 40)
    window(b, 90, 300)
    if end == "mark":
        mark(b, "l2.reset", 301)
    elif end == "call":
        b.call("cudaCtxResetPersistingL2Cache", 301)
    else:
        mark(b, "l2.setaside bytes=0", 301)

    assert judge(NOT_RESET, b) == []


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param([(90, 2000)], id="to the end"),
        pytest.param([(90, 300), (700, 830)], id="again near the end"),
        pytest.param([(90, 820)], id="few kernels after it"),
    ],
)
def test_windows_in_use_are_silent(spans: list[tuple[int, int]], judge: Judge) -> None:
    b = persisting()
    walk(b, 100, 40)
    for start, end in spans:
        window(b, start, end)

    assert judge(NOT_RESET, b) == []


def test_windows_that_keep_nothing_need_no_reset(judge: Judge) -> None:
    b = persisting()
    walk(b, 100, 40)
    window(b, 90, 300, prop="streaming")

    assert judge(NOT_RESET, b) == []


@pytest.mark.parametrize(
    ("resets", "later", "fires"), [(0, 500, True), (1, 500, False), (0, 110, False)]
)
def test_calls_tell_of_a_missing_reset_at_low_confidence(
    resets: int, later: float, fires: bool, judge: Judge
) -> None:
    b = program(all_apis=True)
    b.call("cudaDeviceSetLimit", 20)
    b.call("cudaStreamSetAttribute", 50)
    walk(b, 100, 40)
    b.call("cudaStreamSetAttribute", later)
    for _ in range(resets):
        b.call("cudaCtxResetPersistingL2Cache", later + 5)

    outcome = judge(NOT_RESET, b)

    if not fires:
        assert outcome == []
        return
    finding = only(outcome)
    assert (finding.severity, finding.confidence) == (Severity.INFO, Confidence.LOW)
    assert finding.occurrences == 20


@pytest.mark.parametrize("rule", [NOT_RESET, CLAMPED])
def test_default_apis_can_not_tell(rule: str, judge: Judge) -> None:
    b = program()
    walk(b, 100)

    assert "cudaDeviceSetLimit" in not_assessed(judge(rule, b)).reason


@pytest.mark.parametrize("rule", [NOT_RESET, CLAMPED])
def test_programs_without_l2_control_are_silent(rule: str, judge: Judge) -> None:
    b = program(all_apis=True)
    walk(b, 100)

    assert judge(rule, b) == []


def test_a_set_aside_above_what_the_gpu_grants(judge: Judge) -> None:
    b = program()
    mark(b, f"l2.props persistMax={16 * MIB} maxWindow={128 * MIB}", 5)
    mark(b, f"l2.setaside bytes={20 * MIB}", 10)
    walk(b, 100)

    finding = only(judge(CLAMPED, b))

    assert finding.message == (
        "20.0 MiB of L2 are asked for as set-aside, but this GPU grants at most 16.0 "
        "MiB; 20 kernels ran with less than they were made for"
    )
    assert finding.occurrences == 20
    assert finding.cost.claim is Claim.NONE
    assert (finding.severity, finding.confidence) == (Severity.LOW, Confidence.HIGH)
    assert finding.identity == ("set-aside", "walk")


def test_a_set_aside_that_was_refused_is_one_finding(judge: Judge) -> None:
    b = program()
    mark(b, f"l2.props persistMax={16 * MIB}", 5)
    b.call("cudaDeviceSetLimit", 6, return_value=1)
    mark(b, f"l2.setaside bytes={20 * MIB}", 10)
    walk(b, 100)

    assert "at most 16.0 MiB and refused the call;" in only(judge(CLAMPED, b)).message


def test_a_window_above_the_maximum_is_one_finding_with_its_refusal(
    judge: Judge,
) -> None:
    b = program()
    mark(b, f"l2.props persistMax={16 * MIB} maxWindow={128 * MIB}", 5)
    mark(b, f"l2.setaside bytes={16 * MIB}", 10)
    b.call("cudaStreamSetAttribute", 50, return_value=1)
    walk(b, 100)
    window(b, 90, 300, size=160 * MIB)

    finding = only(judge(CLAMPED, b))

    assert "window of 160.0 MiB is asked for" in finding.message
    assert finding.occurrences == 10


def test_requests_within_the_limits_are_silent(judge: Judge) -> None:
    b = program()
    mark(b, f"l2.props persistMax={16 * MIB} maxWindow={128 * MIB}", 5)
    mark(b, f"l2.setaside bytes={16 * MIB}", 10)
    walk(b, 100)
    window(b, 90, 300, size=128 * MIB)

    assert judge(CLAMPED, b) == []


@pytest.mark.parametrize("old", [True, False], ids=["old GPU", "MIG"])
def test_a_gpu_without_a_set_aside_grants_nothing(old: bool, judge: Judge) -> None:
    b = persisting()
    if old:
        b.rows["TARGET_INFO_GPU"][0].update(computeMajor=7, computeMinor=5)
    else:
        mark(b, "l2.props persistMax=0", 5)
    walk(b, 100)

    assert "grants no L2 at all" in only(judge(CLAMPED, b)).message


def test_marks_without_the_limits_of_the_gpu_can_not_be_judged(judge: Judge) -> None:
    b = persisting()
    walk(b, 100)

    assert "no l2.props mark" in not_assessed(judge(CLAMPED, b)).reason


def test_a_refused_call_without_marks_is_a_hint(judge: Judge) -> None:
    b = program()
    walk(b, 100)
    call = b.call("cudaStreamSetAttribute", 50, return_value=1)

    finding = only(judge(CLAMPED, b))

    assert finding.message == (
        "1 call of cudaStreamSetAttribute, perhaps for L2, failed with "
        "cudaErrorInvalidValue (1): what it asks for is not set"
    )
    assert (finding.severity, finding.confidence) == (Severity.INFO, Confidence.LOW)
    assert finding.evidence[0].correlation_id == call


def test_a_limit_without_marks_may_not_have_been_granted(judge: Judge) -> None:
    b = program(all_apis=True)
    walk(b, 100)
    b.call("cudaDeviceSetLimit", 50)

    assert (
        "may be less than what was asked for" in not_assessed(judge(CLAMPED, b)).reason
    )


# launch-blocking --------------------------------------------------------------


def blocking(
    b: TraceBuilder,
    launches: int = 30,
    *,
    lasting: float = 100.0,
    free: int = 0,
) -> None:
    """Launches in turn on three streams that wait; the last `free` of them don't."""
    at = 1000.0
    for i in range(launches):
        start = at + 4
        waits = i < launches - free
        done = start + lasting + 4 if waits else at + 3
        b.kernel(
            "work",
            stream=13 + i % 3,
            start=start,
            end=start + lasting,
            issue=(at, done),
        )
        at = done + 2


def test_launches_that_wait_for_their_kernels(judge: Judge) -> None:
    b = program()
    b.environment("CUDA_LAUNCH_BLOCKING", "1")
    blocking(b)

    finding = only(judge(BLOCKING, b))

    assert finding.occurrences == 30
    assert finding.cost.claim is Claim.WHAT_IF
    # Three streams share the GPU: ten rounds of a kernel instead of 30 of 110 us.
    assert cost_us(finding) == pytest.approx(30 * 110 - 10 * 101, rel=0.05)
    assert finding.severity is Severity.HIGH
    assert finding.confidence is Confidence.HIGH
    assert finding.message == (
        "30 launches return only when their kernel is done (CUDA_LAUNCH_BLOCKING is "
        "set): they keep the host for 3.24 ms"
    )


def test_a_program_may_set_the_variable_itself(judge: Judge) -> None:
    b = program()
    blocking(b)

    finding = only(judge(BLOCKING, b))

    assert finding.confidence is Confidence.MEDIUM
    assert "as CUDA_LAUNCH_BLOCKING makes them" in finding.message


@pytest.mark.parametrize(
    ("variable", "changes"),
    [
        pytest.param(None, {"launches": 19}, id="a small sample"),
        pytest.param(None, {"lasting": 10.0}, id="kernels that end at once anyway"),
        pytest.param(None, {"free": 2}, id="some launches don't wait"),
        pytest.param("1", {"free": 20}, id="set without effect"),
        pytest.param("0", {"launches": 19}, id="set to off"),
    ],
)
def test_launches_that_do_not_block_are_silent(
    variable: str | None,
    changes: dict[str, object],
    judge: Judge,
    opened: Callable[[TraceBuilder], Trace],
) -> None:
    b = program()
    if variable:
        b.environment("CUDA_LAUNCH_BLOCKING", variable)
    blocking(b, **changes)  # type: ignore[arg-type]

    assert judge(BLOCKING, b) == []
    assert not launches_block(opened(b), 100)


def test_short_kernels_count_where_the_environment_says_so(judge: Judge) -> None:
    b = program()
    b.environment("CUDA_LAUNCH_BLOCKING", "1")
    blocking(b, 5, lasting=3)

    assert only(judge(BLOCKING, b)).occurrences == 5


@pytest.mark.parametrize("rule", [CHUNKS, "pageable-async-copy", "small-copy-storm"])
def test_rules_about_copies_are_silent_where_launches_block(
    rule: str, judge: Judge
) -> None:
    b = program()
    if rule == CHUNKS:
        pipeline(b)
    elif rule == "small-copy-storm":
        for i in range(40):
            at = 1000 + 5 * i
            b.memcpy("HtoD", 64, stream=13, start=at + 4, end=at + 5)
    else:
        pageable_loop(b)
    assert len(list(judge(rule, b))) == 1

    with b.at(tid=102):
        blocking(b, 2000)

    assert judge(rule, b) == []


# lazy-module-load-in-hot-path -------------------------------------------------


def looping(
    b: TraceBuilder,
    rounds: int = 20,
    *,
    nvtx: bool = False,
    fresh: float = 0.0,
    fresh_from: int = 10,
) -> None:
    """Two kernels each 200 us; `fresh` us for the launch of a new one each round."""
    at = 1000.0
    for i in range(rounds):
        if nvtx:
            b.nvtx(f"iteration {i}", at - 2, at + 100)
        for k in range(2):
            b.kernel("old", stream=13, start=at + 6 + 20 * k, end=at + 20 + 20 * k)
        if fresh and i >= fresh_from:
            b.kernel(
                f"new<{i}>",
                stream=14,
                start=at + 62 + fresh,
                end=at + 70 + fresh,
                issue=(at + 60, at + 60 + fresh),
            )
            at += fresh
        at += 200


@pytest.mark.parametrize("nvtx", [True, False])
def test_first_launches_in_the_loop_load_code(nvtx: bool, judge: Judge) -> None:
    b = program()
    looping(b, nvtx=nvtx, fresh=150.0)

    finding = only(judge(LOADS, b))

    assert finding.occurrences == 10
    assert finding.cost.claim is Claim.UPPER_BOUND
    # Launches usually take 2 us.
    assert cost_us(finding) == pytest.approx(10 * 148, rel=0.02)
    assert finding.severity is Severity.HIGH
    assert finding.confidence is Confidence.MEDIUM
    assert finding.message == (
        "GPU code is loaded in repeated work (10 slow first launches), which takes "
        "1.50 ms of host time"
    )
    assert finding.evidence[0].what.startswith("the first launch loads new<")


def test_loads_and_queries_count_too(judge: Judge) -> None:
    b = program()
    looping(b)
    b.call("cuLibraryLoadData", 2050, 60)
    b.call("cudaFuncGetAttributes", 2450, 120)
    b.call("cudaFuncGetAttributes", 2850, 5)

    finding = only(judge(LOADS, b))

    assert finding.occurrences == 2
    assert finding.confidence is Confidence.HIGH
    assert "(1 module load, 1 slow first query), which takes 0.18" in finding.message


def test_a_load_row_within_a_first_launch_counts_once(judge: Judge) -> None:
    b = program()
    looping(b, fresh=150.0, fresh_from=19)
    b.call("cuLibraryLoadData", 1000 + 19 * 200 + 70, 100)

    finding = only(judge(LOADS, b))

    assert finding.occurrences == 1
    assert "0.15 ms" in finding.message


@pytest.mark.parametrize(
    ("changes", "load"),
    [
        pytest.param({}, 990, id="before the loop"),
        pytest.param({"fresh": 4.0}, None, id="ordinary first launches"),
        pytest.param({"fresh": 150.0, "fresh_from": 20}, None, id="nothing new"),
        pytest.param({"rounds": 2}, 1250, id="no loop"),
    ],
)
def test_warm_up_is_silent(
    changes: dict[str, object], load: float | None, judge: Judge
) -> None:
    b = program()
    looping(b, **changes)  # type: ignore[arg-type]
    if load is not None:
        b.call("cuLibraryLoadData", load, 60)

    assert judge(LOADS, b) == []


def test_loads_of_the_first_nvtx_iteration_are_warm_up(judge: Judge) -> None:
    b = program()
    looping(b, nvtx=True)
    b.call("cuLibraryLoadData", 1050, 100)

    assert judge(LOADS, b) == []


def test_a_first_launch_into_a_full_queue_waits_for_room(judge: Judge) -> None:
    b = program()
    for i in range(1100):
        issue = 1000 + 3 * i
        b.kernel(
            "old",
            stream=13,
            start=2000 + 20 * i,
            end=2019 + 20 * i,
            issue=(issue, issue + 2),
        )
    b.kernel("new", stream=13, start=30_000, end=30_010, issue=(5000, 9000))

    assert judge(LOADS, b) == []


# failed-cuda-call -------------------------------------------------------------


def test_failed_launches_are_an_error(judge: Judge) -> None:
    b = program()
    walk(b, 100)
    calls = [
        b.call("cudaLaunchKernelExC", 90 + 20 * i, 2, return_value=9) for i in range(7)
    ]

    finding = only(judge(FAILED, b))

    assert finding.message == (
        "7 calls of cudaLaunchKernelExC failed with cudaErrorInvalidConfiguration (9)"
    )
    assert finding.severity is Severity.ERROR
    assert finding.confidence is Confidence.HIGH
    assert (finding.cost.claim, finding.cost.ns) == (Claim.NONE, None)
    assert finding.occurrences == 7
    assert [e.correlation_id for e in finding.evidence] == calls[:5]
    assert "1024 threads" in finding.fix
    assert finding.identity == ("cudaLaunchKernelExC", "9", "")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        *((1, "InvalidValue"), (2, "MemoryAllocation"), (98, "InvalidDeviceFunction")),
        *((700, "IllegalAddress"), (719, "LaunchFailure"), (800, "NotPermitted")),
        *((900, "StreamCaptureUnsupported"), (904, "StreamCaptureUnjoined")),
        *((906, "StreamCaptureImplicit"), (910, "GraphExecUpdateFailure")),
        *((912, "InvalidClusterSize"), (999, "Unknown")),
    ],
)
def test_codes_have_the_names_of_the_runtime(
    code: int, name: str, judge: Judge
) -> None:
    b = program()
    walk(b, 100)
    b.call("cudaStreamSynchronize", 90, return_value=code)

    assert error_name(code) == f"cudaError{name}"
    assert f"cudaError{name} ({code})" in only(judge(FAILED, b)).message


def test_an_unknown_code_is_named_as_such() -> None:
    assert error_name(123_456) == "an unknown error"


def test_errors_of_gpu_work_appear_late_and_again(judge: Judge) -> None:
    b = program()
    walk(b, 100)
    b.kernel("culprit", stream=14, start=600, end=610)
    b.call("cudaStreamSynchronize", 620, return_value=700)
    b.call("cudaMalloc", 640, return_value=700)
    b.call("cudaMemcpyAsync", 660, return_value=700)

    finding = only(judge(FAILED, b))

    assert finding.message == (
        "cudaErrorIllegalAddress (700) appeared at cudaStreamSynchronize and at 2 "
        "later calls: GPU work issued before it failed"
    )
    assert finding.occurrences == 3
    assert set(finding.where.kernels) == {"walk", "culprit"}
    assert "compute-sanitizer" in finding.fix


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("cudaEventQuery", 600),
        ("cudaStreamQuery", 600),
        ("cudaStreamSynchronize", 0),
    ],
)
def test_success_and_not_ready_are_silent(name: str, code: int, judge: Judge) -> None:
    b = program()
    walk(b, 100)
    b.call(name, 90, return_value=code)

    assert judge(FAILED, b) == []


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("cudaFuncGetAttributes", 209),
        ("cudaPointerGetAttributes", 1),
        ("cudaDeviceEnablePeerAccess", 704),
        ("cudaHostRegister", 712),
        ("cudaGraphExecUpdate", 910),
        ("cudaFree", 4),
    ],
)
def test_answers_and_expected_errors_are_info(
    name: str, code: int, judge: Judge
) -> None:
    b = program()
    walk(b, 100)
    b.call(name, 90, return_value=code)

    assert only(judge(FAILED, b)).severity is Severity.INFO


def test_a_query_that_reports_a_broken_context_is_an_error(judge: Judge) -> None:
    b = program()
    walk(b, 100)
    b.call("cudaEventQuery", 600, return_value=719)

    assert only(judge(FAILED, b)).severity is Severity.ERROR


def test_the_last_error_is_that_of_another_call(judge: Judge) -> None:
    b = program()
    walk(b, 100)
    b.call("cudaMalloc", 80, return_value=2)
    b.call("cudaGetLastError", 90, return_value=2)

    assert only(judge(FAILED, b)).occurrences == 1


def test_the_last_error_speaks_for_a_call_that_was_not_recorded(judge: Judge) -> None:
    b = program()
    walk(b, 100)
    b.call("cudaGetLastError", 90, return_value=9)

    finding = only(judge(FAILED, b))

    assert finding.message.endswith("of a call that was not recorded")
    assert finding.severity is Severity.ERROR


def test_a_call_and_the_call_it_makes_fail_once(judge: Judge) -> None:
    b = program()
    walk(b, 100)
    b.call("cudaMalloc", 80, 10, return_value=2)
    b.call("cuMemAlloc_v2", 82, 5, return_value=2)

    assert only(judge(FAILED, b)).occurrences == 1


def test_one_finding_a_place(judge: Judge) -> None:
    b = program()
    walk(b, 100)
    for line in (3, 7):
        call = b.call("cudaMalloc", 80 + line, 1, return_value=2)
        b.backtrace(call, [("load", "/app/train.py", line)])

    outcome = judge(FAILED, b)

    assert not isinstance(outcome, NotAssessed)
    assert [f.where.source[0].line for f in outcome] == [3, 7]


def test_failures_are_told_where_nothing_reached_the_gpu(judge: Judge) -> None:
    b = program()
    for i in range(3):
        b.call("cudaLaunchKernel", 100 + 10 * i, return_value=209)

    assert find(FAILED).judges_capture
    assert "compile the kernel for this GPU" in only(judge(FAILED, b)).fix


def test_without_return_values_nothing_can_be_told(judge: Judge) -> None:
    b = program()
    walk(b, 100)
    b.layout["CUPTI_ACTIVITY_KIND_RUNTIME"].remove("returnValue!")

    assert "return values" in not_assessed(judge(FAILED, b)).reason

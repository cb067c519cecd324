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
        "a memory pool gave 64.0 MiB back to the system at 5 calls of "
        "cudaStreamSynchronize and fetched it again: 5 allocations after it took "
        "1.00 ms"
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

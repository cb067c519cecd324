"""What the rules about copies accuse, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tracebuilder import TraceBuilder

from streamlint.copies import size_words
from streamlint.findings import Claim, Confidence, Finding, NotAssessed, Severity
from streamlint.rule import Rule
from streamlint.rules.streams.copy_compute_not_overlapped import (
    copy_compute_not_overlapped,
)
from streamlint.rules.transfers.pageable_async_copy import pageable_async_copy
from streamlint.rules.transfers.small_copy_storm import small_copy_storm
from streamlint.rules.transfers.synchronous_memcpy_in_loop import (
    synchronous_memcpy_in_loop,
)
from streamlint.trace import open_trace

MIB = 1 << 20
Judge = Callable[[Rule, TraceBuilder], list[Finding]]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    def check(rule: Rule, builder: TraceBuilder) -> list[Finding]:
        outcome = rule.check(open_trace(builder.write(tmp_path / "t.sqlite")))
        assert not isinstance(outcome, NotAssessed), outcome.reason
        return list(outcome)

    return check


@pytest.fixture
def unable(tmp_path: Path) -> Callable[[Rule, TraceBuilder], NotAssessed]:
    def check(rule: Rule, builder: TraceBuilder) -> NotAssessed:
        outcome = rule.check(open_trace(builder.write(tmp_path / "t.sqlite")))
        assert isinstance(outcome, NotAssessed)
        return outcome

    return check


def gpu(builder: TraceBuilder, **columns: object) -> None:
    builder.rows["TARGET_INFO_GPU"][0].update(columns)


# pageable-async-copy ----------------------------------------------------------


def loop_of_copies(
    builder: TraceBuilder,
    rounds: int = 10,
    *,
    kind: str = "HtoD",
    size: int = MIB,
    memory: str = "pageable",
    in_call: float = 80.0,
    api: str = "cudaMemcpyAsync",
) -> list[int]:
    """A copy and a kernel every 200 us; the call lasts until the copy is done."""
    calls = []
    for i in range(rounds):
        at = 1000 + 200 * i
        calls.append(
            builder.memcpy(
                kind,
                size,
                src=memory if kind == "HtoD" else None,
                dst=memory if kind == "DtoH" else None,
                stream=13,
                start=at + 10,
                end=at + 60,
                issue=(at, at + in_call),
                api=api,
            )
        )
        builder.kernel("step", stream=13, start=at + 100, end=at + 190)
    return calls


def test_pageable_copies_are_one_finding_with_the_time_inside_the_calls(
    judge: Judge,
) -> None:
    b = TraceBuilder()
    calls = loop_of_copies(b)
    (finding,) = judge(pageable_async_copy, b)
    assert finding.occurrences == 10
    assert "for 0.80 ms of the judged region" in finding.message
    assert finding.cost.claim is Claim.WHAT_IF
    # 1980 us; without the waits 10 copies of 50 and kernels of 90 us with 1 us between.
    assert finding.cost.ns == 1_980_000 - (10 * 140_000 + 19 * 1000)
    assert finding.change is not None
    assert finding.severity is Severity.HIGH
    assert finding.where.pid == 100
    assert finding.where.streams == (13,)
    assert len(finding.evidence) == 5
    assert {e.correlation_id for e in finding.evidence} <= set(calls)
    assert "over 64 KiB" not in finding.message
    assert "once" in finding.fix


def test_small_pageable_copies_of_the_place_are_counted_but_do_not_decide(
    judge: Judge,
) -> None:
    b = TraceBuilder()
    loop_of_copies(b, 3)
    for i in range(7):
        at = 1700 + 20 * i
        b.memcpy("HtoD", 65_536, src="pageable", stream=13, start=at, end=at + 5)
    (finding,) = judge(pageable_async_copy, b)
    assert finding.occurrences == 10
    assert "3 of them over 64 KiB" in finding.message


@pytest.mark.parametrize(
    ("kind", "memory", "size", "api"),
    [
        pytest.param("HtoD", "pinned", MIB, "cudaMemcpyAsync", id="pinned upload"),
        pytest.param("DtoH", "pinned", MIB, "cudaMemcpyAsync", id="pinned download"),
        pytest.param("HtoD", "managed", MIB, "cudaMemcpyAsync", id="managed"),
        pytest.param("HtoD", "pageable", 65_536, "cudaMemcpyAsync", id="staged"),
        pytest.param("HtoD", "pageable", MIB, "cudaMemcpy", id="synchronous"),
        pytest.param("HtoD", "pageable", MIB, "cudaGraphLaunch", id="graph node"),
    ],
)
def test_copies_that_are_not_pageable_async_ones_stay_silent(
    judge: Judge, kind: str, memory: str, size: int, api: str
) -> None:
    b = TraceBuilder()
    loop_of_copies(b, kind=kind, memory=memory, size=size, api=api)
    assert judge(pageable_async_copy, b) == []


@pytest.mark.parametrize("name", ["cuMemcpyDtoHAsync_v2", "cudaMemcpy2DAsync"])
def test_a_small_pageable_copy_to_the_host_is_not_excused(
    judge: Judge, name: str
) -> None:
    b = TraceBuilder()
    loop_of_copies(b, kind="DtoH", size=4, api=name)
    (finding,) = judge(pageable_async_copy, b)
    assert finding.occurrences == 10
    assert "0 of them over 64 KiB" in finding.message


def test_a_call_and_the_call_it_makes_are_one_copy(judge: Judge) -> None:
    b = TraceBuilder()
    for call in loop_of_copies(b):
        at = 1000 + 200 * (call // 2)
        b.call("cuMemcpyHtoDAsync_v2", at + 1, 70, correlation_id=call)
    (finding,) = judge(pageable_async_copy, b)
    assert finding.occurrences == 10
    assert "0.80 ms" in finding.message


def test_a_single_long_pageable_copy_is_only_info(judge: Judge) -> None:
    b = TraceBuilder()
    loop_of_copies(b, 1, kind="DtoH", size=MIB)
    loop_of_copies(b, memory="pinned")
    (finding,) = judge(pageable_async_copy, b)
    assert finding.occurrences == 1
    assert finding.severity is Severity.INFO


def test_a_single_short_pageable_copy_is_silent(judge: Judge) -> None:
    b = TraceBuilder()
    loop_of_copies(b, memory="pinned")
    b.memcpy("DtoH", 4, dst="pageable", stream=13, start=1300, end=1302)
    assert judge(pageable_async_copy, b) == []


def test_each_call_site_is_judged_by_itself(judge: Judge) -> None:
    b = TraceBuilder()
    for call in loop_of_copies(b):
        b.backtrace(call, [("load", "/app/train.py", 12)])
    for i in range(10):
        at = 1070 + 200 * i
        call = b.memcpy(
            "HtoD", 1024, src="pageable", stream=13, start=at + 20, end=at + 21
        )
        b.backtrace(call, [("label", "/app/train.py", 13)])
    (finding,) = judge(pageable_async_copy, b)
    assert finding.occurrences == 10
    assert [frame.line for frame in finding.where.source] == [12]


def test_processes_with_the_same_correlation_ids_are_kept_apart(judge: Judge) -> None:
    b = TraceBuilder()
    loop_of_copies(b)
    b.process(200)
    with b.at(pid=200):
        loop_of_copies(b, memory="pinned")
    (finding,) = judge(pageable_async_copy, b)
    assert (finding.where.pid, finding.occurrences) == (100, 10)


def test_a_coherent_gpu_is_low_at_most(judge: Judge) -> None:
    b = TraceBuilder()
    gpu(b, name="NVIDIA GH200 480GB")
    loop_of_copies(b)
    (finding,) = judge(pageable_async_copy, b)
    assert finding.severity is Severity.LOW
    assert finding.confidence is Confidence.LOW


def test_an_integrated_gpu_is_left_alone(judge: Judge) -> None:
    b = TraceBuilder()
    gpu(b, isDiscrete=0, name="NVIDIA GB10")
    loop_of_copies(b)
    assert judge(pageable_async_copy, b) == []


def test_unknown_memory_is_not_assessed(
    unable: Callable[[Rule, TraceBuilder], NotAssessed],
) -> None:
    b = TraceBuilder()
    loop_of_copies(b)
    for row in b.rows["CUPTI_ACTIVITY_KIND_MEMCPY"]:
        row["srcKind"] = 7
    assert "10 asynchronous copies" in unable(pageable_async_copy, b).reason


def test_an_export_without_memory_kinds_is_not_assessed(
    unable: Callable[[Rule, TraceBuilder], NotAssessed],
) -> None:
    b = TraceBuilder()
    loop_of_copies(b)
    columns = b.layout["CUPTI_ACTIVITY_KIND_MEMCPY"]
    columns.remove("srcKind")
    columns.remove("dstKind")
    assert "memory" in unable(pageable_async_copy, b).reason


def test_unknown_memory_that_could_not_matter_is_no_obstacle(judge: Judge) -> None:
    b = TraceBuilder()
    loop_of_copies(b, memory="pinned")
    b.memcpy("HtoD", 64, stream=13, start=1300, end=1301, srcKind=7)
    assert judge(pageable_async_copy, b) == []


# synchronous-memcpy-in-loop ---------------------------------------------------


def synchronous_loop(builder: TraceBuilder, rounds: int = 10) -> None:
    """Upload, kernel, download, 200 us a round; the GPU idles 100 us of it."""
    for i in range(rounds):
        at = 1000 + 200 * i
        builder.memcpy(
            "HtoD",
            MIB,
            stream=7,
            start=at + 10,
            end=at + 30,
            issue=(at, at + 32),
            api="cudaMemcpy",
        )
        builder.kernel(
            "step", stream=7, start=at + 50, end=at + 110, issue=(at + 40, at + 44)
        )
        builder.memcpy(
            "DtoH",
            MIB,
            stream=7,
            start=at + 110,
            end=at + 130,
            issue=(at + 48, at + 140),
            api="cudaMemcpy",
        )


def test_synchronous_copies_in_a_loop_cost_the_idle_they_cause(judge: Judge) -> None:
    b = TraceBuilder()
    synchronous_loop(b)
    (finding,) = judge(synchronous_memcpy_in_loop, b)
    assert finding.occurrences == 20
    assert finding.cost.claim is Claim.UPPER_BOUND
    # 1920 us; without the waits 10 rounds of two copies of 20 us and a kernel of 60.
    assert finding.cost.ns == pytest.approx(1_920_000 - 10 * 100_000, abs=30_000)
    assert "blocked the host for 1.24 ms; the GPU idled 0.93 ms" in finding.message
    assert finding.severity is Severity.HIGH
    assert finding.where.threads == (101,)


def test_upload_compute_readback_is_no_loop(judge: Judge) -> None:
    b = TraceBuilder()
    for i in range(20):
        at = 1000 + 50 * i
        b.memcpy("HtoD", MIB, stream=7, start=at + 5, end=at + 25, api="cudaMemcpy")
    for i in range(10):
        b.kernel("step", stream=7, start=2000 + 100 * i, end=2090 + 100 * i)
    for i in range(20):
        at = 3000 + 50 * i
        b.memcpy("DtoH", 4, stream=7, start=at + 5, end=at + 6, api="cudaMemcpy")
    assert judge(synchronous_memcpy_in_loop, b) == []


@pytest.mark.parametrize(
    ("kind", "size", "memory", "api"),
    [
        pytest.param("DtoD", MIB, "device", "cudaMemcpy", id="between devices"),
        pytest.param("HtoD", 65_536, "pageable", "cudaMemcpy", id="staged"),
        pytest.param("HtoD", MIB, "pinned", "cudaMemcpyAsync", id="asynchronous"),
    ],
)
def test_copies_that_do_not_wait_stay_silent(
    judge: Judge, kind: str, size: int, memory: str, api: str
) -> None:
    b = TraceBuilder()
    for i in range(10):
        at = 1000 + 200 * i
        b.memcpy(kind, size, src=memory, stream=7, start=at + 5, end=at + 9, api=api)
        b.kernel("step", stream=7, start=at + 20, end=at + 60)
    assert judge(synchronous_memcpy_in_loop, b) == []


def test_a_small_pageable_upload_waits_where_work_is_outstanding(judge: Judge) -> None:
    b = TraceBuilder()
    for i in range(10):
        at = 1000 + 200 * i
        b.kernel("step", stream=7, start=at + 5, end=at + 90)
        b.memcpy(
            "HtoD",
            1024,
            src="pageable",
            stream=7,
            start=at + 95,
            end=at + 96,
            issue=(at + 10, at + 98),
            api="cudaMemcpy",
        )
    (finding,) = judge(synchronous_memcpy_in_loop, b)
    assert finding.occurrences == 10


def test_without_idle_the_finding_is_info(judge: Judge) -> None:
    b = TraceBuilder()
    b.kernel("long", stream=13, start=990, end=3100)
    synchronous_loop(b)
    (finding,) = judge(synchronous_memcpy_in_loop, b)
    assert finding.severity is Severity.INFO
    assert finding.cost.ns == 0


def test_one_copy_in_each_of_many_threads_is_no_loop(judge: Judge) -> None:
    b = TraceBuilder()
    for i in range(6):
        at = 1000 + 200 * i
        with b.at(tid=110 + i):
            b.kernel("step", stream=7, start=at + 5, end=at + 50)
            b.memcpy(
                "DtoH", MIB, stream=7, start=at + 60, end=at + 80, api="cudaMemcpy"
            )
    assert judge(synchronous_memcpy_in_loop, b) == []


# small-copy-storm -------------------------------------------------------------


def storm(
    builder: TraceBuilder,
    copies: int = 40,
    *,
    size: int = 64,
    every: float = 5.0,
    took: float = 1.0,
    start: float = 1000.0,
    kind: str = "HtoD",
    **more: object,
) -> None:
    for i in range(copies):
        at = start + every * i
        builder.memcpy(
            kind,
            size,
            stream=13,
            start=max(at + 3, start + 3 + took * i),
            end=max(at + 3, start + 3 + took * i) + took,
            issue=(at, at + 4),
            **more,  # type: ignore[arg-type]
        )


def around(builder: TraceBuilder) -> None:
    """Work at both ends that makes the judged region 1000 us."""
    builder.kernel("head", stream=14, start=900, end=1000)
    builder.kernel("tail", stream=14, start=1800, end=1900)


def test_a_run_of_small_copies_costs_at_most_its_calls_but_one(judge: Judge) -> None:
    b = TraceBuilder()
    around(b)
    storm(b)
    (finding,) = judge(small_copy_storm, b)
    assert finding.occurrences == 40
    assert finding.cost.claim is Claim.UPPER_BOUND
    assert finding.cost.ns == 39 * 5_000
    assert finding.cost.share == pytest.approx(0.195)
    assert "2.5 KiB" in finding.message
    assert finding.where.streams == (13,)


def test_runs_are_added_up(judge: Judge) -> None:
    b = TraceBuilder()
    around(b)
    storm(b)
    b.kernel("step", stream=13, start=1250, end=1290)
    storm(b, 35, start=1300, kind="DtoH")
    (finding,) = judge(small_copy_storm, b)
    assert finding.occurrences == 75
    assert finding.cost.ns == (39 + 34) * 5_000
    assert "2 runs" in finding.message


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"copies": 31}, id="too few"),
        pytest.param({"size": 65_536}, id="too large"),
        pytest.param({"every": 55.0}, id="far apart"),
        pytest.param({"took": 6.0}, id="copying takes longer than issuing"),
        pytest.param({"copyCount": 8}, id="batched"),
        pytest.param({"graph_node": 1 << 32}, id="graph nodes"),
        pytest.param({"kind": "DtoD"}, id="between devices"),
    ],
)
def test_copies_that_are_no_storm_stay_silent(
    judge: Judge, changes: dict[str, object]
) -> None:
    b = TraceBuilder()
    around(b)
    storm(b, **changes)  # type: ignore[arg-type]
    assert judge(small_copy_storm, b) == []


def test_copies_between_kernels_of_their_stream_are_no_storm(judge: Judge) -> None:
    b = TraceBuilder()
    for i in range(100):
        at = 1000 + 20 * i
        b.memcpy("HtoD", 64, stream=13, start=at + 3, end=at + 4, issue=(at, at + 2))
        b.kernel("step", stream=13, start=at + 5, end=at + 19)
    assert judge(small_copy_storm, b) == []


def test_copies_in_turn_to_both_sides_are_no_storm(judge: Judge) -> None:
    b = TraceBuilder()
    around(b)
    for i in range(100):
        kind = "HtoD" if i % 2 else "DtoH"
        b.memcpy(kind, 64, stream=13, start=1000 + 5 * i, end=1001 + 5 * i)
    assert judge(small_copy_storm, b) == []


# copy-compute-not-overlapped --------------------------------------------------


def chain(
    builder: TraceBuilder,
    rounds: int = 10,
    *,
    upload: float = 100.0,
    compute: float = 100.0,
    download: float = 100.0,
    streams: int = 1,
    memory: str = "pinned",
    size: int = MIB,
) -> None:
    """Upload, kernel and download one after another, round after round."""
    at = 1000.0
    for i in range(rounds):
        stream = 13 + i % streams
        if upload:
            builder.memcpy(
                "HtoD", size, src=memory, stream=stream, start=at, end=at + upload
            )
            at += upload
        if compute:
            builder.kernel("step", stream=stream, start=at, end=at + compute)
            at += compute
        if download:
            builder.memcpy(
                "DtoH", size, dst=memory, stream=stream, start=at, end=at + download
            )
            at += download


def test_a_serial_chain_costs_at_most_all_but_its_longest_part(judge: Judge) -> None:
    b = TraceBuilder()
    chain(b)
    (finding,) = judge(copy_compute_not_overlapped, b)
    assert finding.occurrences == 10
    assert finding.cost.claim is Claim.UPPER_BOUND
    # 3000 us less 1000 us of kernels, the first upload and the last download.
    assert finding.cost.ns == 1_800_000
    assert finding.severity is Severity.HIGH
    assert finding.confidence is Confidence.MEDIUM
    assert finding.where.streams == (13,)
    assert finding.where.kernels == ("step",)


def test_two_uploads_to_one_download_never_promise_a_third(judge: Judge) -> None:
    b = TraceBuilder()
    chain(b, upload=200, compute=10, download=100)
    (finding,) = judge(copy_compute_not_overlapped, b)
    # 3100 us less 2000 us of uploads and the last download: 1.5 times at best.
    assert finding.cost.ns == 1_000_000


def test_one_copy_engine_hides_only_the_kernels(judge: Judge) -> None:
    b = TraceBuilder()
    gpu(b, asyncEngines=1)
    chain(b)
    (finding,) = judge(copy_compute_not_overlapped, b)
    assert finding.cost.ns == 1_000_000


def test_one_copy_engine_and_no_kernels_to_hide_is_silent(judge: Judge) -> None:
    b = TraceBuilder()
    gpu(b, asyncEngines=1)
    chain(b, compute=5)
    assert judge(copy_compute_not_overlapped, b) == []
    gpu(b, asyncEngines=2)
    assert len(judge(copy_compute_not_overlapped, b)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"streams": 4}, id="several streams"),
        pytest.param({"memory": "pageable"}, id="pageable"),
        pytest.param({"upload": 5.0, "download": 5.0}, id="short copies"),
        pytest.param({"rounds": 1}, id="one small round"),
        pytest.param({"compute": 0.0}, id="copies only"),
    ],
)
def test_what_is_no_serial_chain_stays_silent(
    judge: Judge, changes: dict[str, object]
) -> None:
    b = TraceBuilder()
    chain(b, **changes)  # type: ignore[arg-type]
    assert judge(copy_compute_not_overlapped, b) == []


@pytest.mark.parametrize("columns", [{"asyncEngines": 0}, {"isDiscrete": 0}])
def test_a_gpu_that_can_not_overlap_is_left_alone(
    judge: Judge, columns: dict[str, object]
) -> None:
    b = TraceBuilder()
    gpu(b, **columns)
    chain(b)
    assert judge(copy_compute_not_overlapped, b) == []


def test_an_upload_before_many_kernels_is_no_chain(judge: Judge) -> None:
    b = TraceBuilder()
    b.memcpy("HtoD", 1 << 30, stream=13, start=1000, end=2000)
    for i in range(50):
        at = 2000 + 50 * i
        b.kernel("step", stream=13, start=at, end=at + 45)
        b.memcpy("DtoH", 4, stream=13, start=at + 46, end=at + 47)
    b.memcpy("DtoH", 1 << 30, stream=13, start=4600, end=5600)
    assert judge(copy_compute_not_overlapped, b) == []


def test_a_single_large_pass_can_be_cut_into_pieces(judge: Judge) -> None:
    b = TraceBuilder()
    chain(b, 1, upload=1000, compute=1000, download=1000, size=100 * MIB)
    (finding,) = judge(copy_compute_not_overlapped, b)
    assert finding.confidence is Confidence.LOW
    # Less one part and a piece of 1 of 100 MiB at each end.
    assert finding.cost.ns == 3_000_000 - 1_020_000


def test_copies_that_overlap_already_stay_silent(judge: Judge) -> None:
    b = TraceBuilder()
    for i in range(10):
        at = 1000 + 100 * i
        b.memcpy("HtoD", MIB, stream=13, start=at, end=at + 90)
        b.kernel("step", stream=13, start=at + 20, end=at + 95)
    assert judge(copy_compute_not_overlapped, b) == []


# sizes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (6 * MIB, "6.0 MiB"),
        (1 << 31, "2.0 GiB"),
    ],
)
def test_sizes_are_said_in_binary_units(size: int, words: str) -> None:
    assert size_words(size) == words

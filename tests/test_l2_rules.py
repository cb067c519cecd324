"""What NVTX marks say about L2, and what the rules about L2 make of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tracebuilder import TraceBuilder

from streamlint.findings import Claim, Confidence, Finding, NotAssessed, Severity
from streamlint.l2 import L2Marks, l2_marks
from streamlint.rule import Outcome, Rule
from streamlint.rules.l2_cache.l2_setaside_oversubscribed import (
    l2_setaside_oversubscribed,
)
from streamlint.rules.l2_cache.l2_setaside_unused import l2_setaside_unused
from streamlint.trace import open_trace

MIB = 1 << 20
RULES = (l2_setaside_unused, l2_setaside_oversubscribed)
Judge = Callable[[Rule, TraceBuilder], Outcome]
Read = Callable[[TraceBuilder], L2Marks]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    def check(rule: Rule, builder: TraceBuilder) -> Outcome:
        return rule.check(open_trace(builder.write(tmp_path / "t.sqlite")))

    return check


@pytest.fixture
def read(tmp_path: Path) -> Read:
    return lambda builder: l2_marks(open_trace(builder.write(tmp_path / "t.sqlite")))


def only(outcome: Outcome) -> Finding:
    assert not isinstance(outcome, NotAssessed), outcome.reason
    assert len(outcome) == 1, [finding.message for finding in outcome]
    return outcome[0]


def not_assessed(outcome: Outcome) -> NotAssessed:
    assert isinstance(outcome, NotAssessed), outcome
    return outcome


def program() -> TraceBuilder:
    builder = TraceBuilder()
    builder.stream(13, flag=2)
    builder.stream(14, flag=2)
    return builder


def mark(builder: TraceBuilder, text: str, at: float, value: int | None = None) -> None:
    builder.nvtx(text, at, domain="streamlint", mark=True, value=value)


def set_aside(builder: TraceBuilder, size: int, at: float = 10) -> None:
    mark(builder, f"l2.setaside bytes={size}", at)


def window(
    builder: TraceBuilder,
    size: int,
    start: float,
    end: float,
    *,
    hit: str = "1.0",
    prop: str = "persisting",
    base: int | None = 1 << 40,
) -> None:
    address = "" if base is None else f" base={base}"
    text = f"l2.window{address} bytes={size} hit={hit} hitProp={prop}"
    builder.nvtx(text, start, end, domain="streamlint")


def kernels(
    builder: TraceBuilder, start: float, count: int = 20, *, stream: int = 13
) -> list[int]:
    """A kernel of 15 us every 20 us, issued 3 us before it starts."""
    return [
        builder.kernel("walk", stream=stream, start=at, end=at + 15)
        for at in (start + 5 + 20 * i for i in range(count))
    ]


# Without marks ------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.name))
def test_default_capture_can_not_tell_and_names_the_flag(
    rule: Rule, judge: Judge
) -> None:
    builder = program()
    kernels(builder, 100)
    builder.call("cudaStreamSetAttribute", 50)

    unable = not_assessed(judge(rule, builder))

    assert "cudaDeviceSetLimit" in unable.reason
    assert "--cuda-trace-all-apis=true" in unable.recapture
    assert "docs/l2-marks.md" in unable.recapture


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.name))
def test_a_program_that_never_controls_l2_gets_silence(
    rule: Rule, judge: Judge
) -> None:
    builder = program()
    builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    kernels(builder, 100)

    assert judge(rule, builder) == []


@pytest.mark.parametrize(
    "name",
    [
        *("cudaDeviceSetLimit", "cuCtxSetLimit", "cudaStreamSetAttribute"),
        *("cudaGraphKernelNodeSetAttribute", "cudaCtxResetPersistingL2Cache"),
    ],
)
def test_calls_without_marks_do_not_tell_what_they_set(name: str, judge: Judge) -> None:
    builder = program()
    builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    kernels(builder, 100)
    builder.call(name, 50)

    unable = not_assessed(judge(l2_setaside_oversubscribed, builder))

    assert unable.reason.startswith(f"1 call may control L2 ({name})")
    assert "--cuda-trace-all-apis" not in unable.recapture


@pytest.mark.parametrize("name", ["cudaDeviceSetLimit", "cuCtxSetLimit"])
def test_a_limit_without_marks_and_without_a_window_is_a_hint(
    name: str, judge: Judge
) -> None:
    builder = program()
    builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    kernels(builder, 100)
    call = builder.call(name, 50)

    finding = only(judge(l2_setaside_unused, builder))

    assert finding.message == (
        f"if {name} reserved L2, 20 kernels ran without any call that sets an access "
        "policy window"
    )
    assert (finding.severity, finding.confidence) == (Severity.INFO, Confidence.LOW)
    assert finding.occurrences == 20
    assert [e.correlation_id for e in finding.evidence] == [call]


def test_a_reset_tells_that_the_limit_was_that_of_l2(judge: Judge) -> None:
    builder = program()
    builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    kernels(builder, 100)
    builder.call("cudaDeviceSetLimit", 50)
    builder.call("cudaCtxResetPersistingL2Cache", 700)

    finding = only(judge(l2_setaside_unused, builder))

    assert (finding.severity, finding.confidence) == (Severity.LOW, Confidence.LOW)


@pytest.mark.parametrize(
    "names",
    [
        ("cudaDeviceSetLimit", "cudaStreamSetAttribute"),
        ("cudaDeviceSetLimit", "cudaGraphKernelNodeSetAttribute"),
        ("cudaStreamSetAttribute",),
        ("cudaCtxResetPersistingL2Cache",),
    ],
)
def test_calls_that_may_use_the_limit_or_set_none_are_silent(
    names: tuple[str, ...], judge: Judge
) -> None:
    builder = program()
    builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    kernels(builder, 100)
    for i, name in enumerate(names):
        builder.call(name, 50 + 10 * i)

    assert judge(l2_setaside_unused, builder) == []


def test_a_call_that_failed_controls_nothing(judge: Judge) -> None:
    builder = program()
    builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    kernels(builder, 100)
    builder.call("cudaStreamSetAttribute", 50, return_value=1)

    assert judge(l2_setaside_unused, builder) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.name))
def test_gpus_without_a_set_aside_get_silence(rule: Rule, judge: Judge) -> None:
    builder = program()
    builder.rows["TARGET_INFO_GPU"][0].update(computeMajor=7, computeMinor=5)
    kernels(builder, 100)

    assert judge(rule, builder) == []


def test_the_default_limit_of_the_environment_is_a_set_aside(judge: Judge) -> None:
    name = "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT"
    builder = program()
    builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    builder.environment(name, "30")
    kernels(builder, 100)

    assert name in not_assessed(judge(l2_setaside_oversubscribed, builder)).reason
    finding = only(judge(l2_setaside_unused, builder))
    assert finding.message.startswith(f"{name} reserves L2, but 20 kernels ran")
    assert (finding.severity, finding.confidence) == (Severity.LOW, Confidence.LOW)


# The marks ----------------------------------------------------------------------


def test_marks_are_read(read: Read) -> None:
    builder = program()
    mark(builder, "l2.props maxWindow=134217728 l2=62914560 persistMax=39321600", 5)
    mark(builder, "l2.setaside", 10, value=16 * MIB)
    text = f"l2.window missProp=streaming hit=0.5 bytes={MIB} hitProp=persisting base=7"
    builder.nvtx(text, 20, 60, domain="streamlint", registered=True)
    mark(builder, "l2.reset", 70)
    call = builder.kernel("walk", stream=13, start=40, end=50)
    builder.kernel("walk", stream=13, start=80, end=90)

    marks = read(builder)

    assert marks.unreadable == 0
    assert marks.properties.rows() == [(100, 5000, 62914560, 39321600, 134217728)]
    assert marks.set_asides.select("start_ns", "bytes").rows() == [(10000, 16 * MIB)]
    assert marks.windows.rows() == [
        (0, 100, 101, 20000, 60000, 7, MIB, 0.5, "persisting", "streaming")
    ]
    assert marks.resets.rows() == [(100, 101, 70000)]
    columns = ("correlation_id", "window", "set_aside_bytes")
    assert marks.kernels.select(columns).rows() == [
        (call, 0, 16 * MIB),
        (call + 1, None, 16 * MIB),
    ]


def test_set_asides_hold_until_the_next_and_are_granted_up_to_the_limit(
    read: Read,
) -> None:
    builder = program()
    kernels(builder, 100)
    mark(builder, f"l2.props persistMax={4 * MIB}", 5)
    for at, size in ((10, 2 * MIB), (20, 2 * MIB), (30, 8 * MIB), (40, 0)):
        set_aside(builder, size, at)

    rows = read(builder).set_asides.select("start_ns", "end_ns", "bytes").rows()

    assert rows == [
        (10000, 30000, 2 * MIB),
        (30000, 40000, 4 * MIB),
        (40000, 2**63 - 1, 0),
    ]


def test_the_innermost_window_of_the_launching_thread_counts(read: Read) -> None:
    builder = program()
    window(builder, 1, 100, 300)
    window(builder, 2, 100, 200)
    window(builder, 3, 120, 140)
    window(builder, 4, 200, 220)
    with builder.at(tid=102):
        window(builder, 5, 50, 400)
    for at in (90, 100, 119, 120, 139, 140, 199, 200, 219, 220, 299, 300):
        builder.kernel("walk", stream=13, start=500, end=510, issue=(at, at + 0.5))

    marks = read(builder)
    sizes = dict(marks.windows.select("window", "bytes").iter_rows())
    issued = marks.kernels.sort("issue_ns")
    under = [sizes.get(number) for number in issued["window"]]

    assert under == [None, 2, 2, 3, 3, 2, 2, 4, 4, 1, 1, None]


@pytest.mark.parametrize(
    "text",
    [
        *("l2.setaside", "l2.setaside bytes=", "l2.setaside bytes=-1"),
        *("l2.setaside bytes=0x10", "l2.setaside  bytes=1", "l2.setaside bytes=1.5"),
        *("l2.setaside bytes=99999999999999999999", "l2.setaside bytes=1\n"),
        *("l2.setaside bytes=\u0661", "l2.setaside\tbytes=1", "l2.setaside bytes=1 x"),
        *("l2.set", "l2.", "l2.reset now", "l2.props l2=many", "l2.resets"),
        *("l2.window bytes=1 hit=1 hitProp=persisting",),
        "l2.setaside bytes=1" + " a=1" * 100_000,
    ],
)
def test_a_mark_that_does_not_parse_means_nothing(
    text: str, read: Read, judge: Judge
) -> None:
    builder = program()
    kernels(builder, 100)
    mark(builder, text, 10)

    marks = read(builder)

    assert marks.unreadable == 1
    frames = (marks.properties, marks.set_asides, marks.windows, marks.resets)
    assert [frame.height for frame in frames] == [0, 0, 0, 0]
    for rule in RULES:
        unable = not_assessed(judge(rule, builder))
        assert unable.reason == (
            "L2 marks of the NVTX domain streamlint that do not parse: 1"
        )


@pytest.mark.parametrize(
    "text",
    [
        *("l2.window", "l2.window bytes=1 hit=1", "l2.window hit=1 hitProp=normal"),
        *("l2.window bytes=1 hit=2 hitProp=persisting",),
        *("l2.window bytes=1 hit=1.5 hitProp=persisting",),
        *("l2.window bytes=1 hit=nan hitProp=persisting",),
        *("l2.window bytes=1 hit=1 hitProp=Persisting",),
        *("l2.window base=0xff bytes=1 hit=1 hitProp=persisting",),
        *("l2.window bytes=1 hit=1 hitProp=persisting missProp=x",),
        *("l2.setaside bytes=1", "l2.reset"),
    ],
)
def test_a_range_that_does_not_parse_means_nothing(text: str, read: Read) -> None:
    builder = program()
    kernels(builder, 100)
    builder.nvtx(text, 90, 600, domain="streamlint")

    marks = read(builder)

    assert (marks.unreadable, marks.windows.height) == (1, 0)


def test_other_domains_and_other_texts_are_not_ours(read: Read) -> None:
    builder = program()
    kernels(builder, 100)
    builder.nvtx("l2.setaside bytes=1", 10, mark=True)
    builder.nvtx("l2.setaside bytes=1", 10, mark=True, domain="other")
    builder.nvtx("iteration 1", 90, 600, domain="streamlint")

    marks = read(builder)

    assert not marks.any


@given(
    st.lists(
        st.tuples(
            st.text(max_size=40).map(lambda text: f"l2.window bytes=1 hit=1 {text}")
            | st.text(max_size=40).map(lambda text: f"l2.setaside bytes={text}")
            | st.text(max_size=40),
            st.booleans(),
            st.integers(-(2**63), 2**63 - 1) | st.none(),
        ),
        max_size=5,
    )
)
@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_hostile_texts_never_crash(
    tmp_path: Path, events: list[tuple[str, bool, int | None]]
) -> None:
    builder = program()
    kernels(builder, 100)
    for text, is_mark, value in events:
        clean = text.encode("utf-8", "replace").decode().replace("\0", "")
        end = None if is_mark else 300
        builder.nvtx(clean, 20, end, domain="streamlint", mark=is_mark, value=value)
    trace = open_trace(builder.write(tmp_path / "t.sqlite"))

    for rule in RULES:
        rule.check(trace)
    marks = l2_marks(trace)

    ours = [text for text, _, _ in events if text.startswith("l2.")]
    assert 0 <= marks.unreadable <= len(ours)


# l2-setaside-unused -------------------------------------------------------------


def test_a_set_aside_without_a_window_is_unused(judge: Judge) -> None:
    builder = program()
    set_aside(builder, 16 * MIB)
    calls = kernels(builder, 100)

    finding = only(judge(l2_setaside_unused, builder))

    assert finding.message == (
        "16.0 MiB of L2 are set aside for persisting accesses, but 20 kernels ran "
        "without any access policy window"
    )
    assert finding.occurrences == len(calls)
    assert finding.severity is Severity.LOW
    assert (finding.cost.claim, finding.cost.ns) == (Claim.NONE, None)
    assert finding.where.kernels == ("walk",)
    assert [(e.start_ns, e.end_ns) for e in finding.evidence] == [(105000, 500000)]
    assert finding.identity == ("unused", "walk")
    assert judge(l2_setaside_oversubscribed, builder) == []


def test_a_set_aside_with_a_window_is_used(judge: Judge) -> None:
    builder = program()
    set_aside(builder, 16 * MIB)
    kernels(builder, 100)
    window(builder, 8 * MIB, 90, 200)

    assert judge(l2_setaside_unused, builder) == []


@pytest.mark.parametrize(
    ("prop", "hit", "size"),
    [("streaming", "1", MIB), ("persisting", "0.0", MIB), ("persisting", "1", 0)],
)
def test_a_window_that_keeps_nothing_does_not_use_the_set_aside(
    prop: str, hit: str, size: int, judge: Judge
) -> None:
    builder = program()
    set_aside(builder, 16 * MIB)
    kernels(builder, 100)
    window(builder, size, 90, 600, prop=prop, hit=hit)

    assert only(judge(l2_setaside_unused, builder)).occurrences == 20


@pytest.mark.parametrize("at", [5, 300])
@pytest.mark.parametrize(
    "name", ["cudaStreamSetAttribute", "cudaGraphKernelNodeSetAttribute"]
)
def test_a_recorded_window_call_may_use_it(name: str, at: float, judge: Judge) -> None:
    builder = program()
    set_aside(builder, 16 * MIB)
    kernels(builder, 100)
    builder.call(name, at)

    assert judge(l2_setaside_unused, builder) == []


def test_only_kernels_launched_under_the_set_aside_count(judge: Judge) -> None:
    builder = program()
    kernels(builder, 100)  # until 500
    set_aside(builder, 16 * MIB, at=200)
    set_aside(builder, 16 * MIB, at=250)
    set_aside(builder, 0, at=301)

    finding = only(judge(l2_setaside_unused, builder))

    # Issued at 102, 122, ...: those from 202 to 282.
    assert finding.occurrences == 5
    assert [e.what for e in finding.evidence] == [
        "5 kernels with 16.0 MiB of L2 reserved"
    ]


def test_a_window_before_or_after_does_not_excuse(judge: Judge) -> None:
    builder = program()
    kernels(builder, 100, 60)  # until 1300
    set_aside(builder, 8 * MIB, at=50)
    window(builder, MIB, 90, 400)
    set_aside(builder, 16 * MIB, at=500)
    set_aside(builder, 8 * MIB, at=900)
    window(builder, MIB, 950, 1300)

    finding = only(judge(l2_setaside_unused, builder))

    assert finding.occurrences == 20
    assert finding.message.startswith("16.0 MiB")


def test_a_few_kernels_of_set_up_are_no_fault(judge: Judge) -> None:
    builder = program()
    kernels(builder, 100)
    set_aside(builder, 16 * MIB, at=430)  # 4 are issued after it

    assert judge(l2_setaside_unused, builder) == []


def test_kernels_that_hardly_matter_are_info(judge: Judge) -> None:
    builder = program()
    set_aside(builder, 16 * MIB)
    for i in range(6):
        builder.kernel("tiny", stream=13, start=100 + 400 * i, end=101 + 400 * i)

    assert only(judge(l2_setaside_unused, builder)).severity is Severity.INFO


def test_several_devices_can_not_be_told_apart(judge: Judge) -> None:
    builder = program()
    set_aside(builder, 16 * MIB)
    kernels(builder, 100)
    with builder.at(device=1):
        kernels(builder, 100)

    for rule in RULES:
        assert "several devices" in not_assessed(judge(rule, builder)).reason


def test_each_process_is_judged_by_its_own_marks(judge: Judge) -> None:
    builder = program()
    set_aside(builder, 16 * MIB)
    kernels(builder, 100)
    builder.process(200)
    with builder.at(pid=200):
        builder.stream(13, flag=2)
        set_aside(builder, 16 * MIB)
        kernels(builder, 100)
        window(builder, MIB, 90, 600)

    assert only(judge(l2_setaside_unused, builder)).where.pid == 100


# l2-setaside-oversubscribed -----------------------------------------------------


def test_a_window_larger_than_the_set_aside(judge: Judge) -> None:
    builder = program()
    set_aside(builder, 16 * MIB)
    calls = kernels(builder, 100)
    window(builder, 32 * MIB, 90, 600)

    finding = only(judge(l2_setaside_oversubscribed, builder))

    assert finding.message == (
        "20 kernels ran under a persisting window of 32.0 MiB at hit ratio 1, while "
        "16.0 MiB are set aside in L2"
    )
    assert "hitRatio to at most 0.50" in finding.fix
    assert finding.occurrences == 20
    assert finding.severity is Severity.LOW
    assert finding.cost.claim is Claim.NONE
    assert {e.correlation_id for e in finding.evidence} <= set(calls)
    assert finding.identity == ("window too large", "walk")


@pytest.mark.parametrize(
    ("size", "hit", "prop"),
    [
        (32 * MIB, "0.5", "persisting"),
        (32 * MIB, "0.505", "persisting"),
        (16 * MIB, "1.0", "persisting"),
        (32 * MIB, "1.0", "streaming"),
        (32 * MIB, "1.0", "normal"),
    ],
)
def test_a_window_that_fits_is_silent(
    size: int, hit: str, prop: str, judge: Judge
) -> None:
    builder = program()
    set_aside(builder, 16 * MIB)
    kernels(builder, 100)
    window(builder, size, 90, 600, hit=hit, prop=prop)

    assert judge(l2_setaside_oversubscribed, builder) == []


def test_the_worst_window_speaks_for_all(judge: Judge) -> None:
    builder = program()
    set_aside(builder, 16 * MIB)
    kernels(builder, 100)
    window(builder, 20 * MIB, 90, 300)
    window(builder, 64 * MIB, 301, 600, hit="0.75")

    finding = only(judge(l2_setaside_oversubscribed, builder))

    assert (
        "window of 64.0 MiB at hit ratio 0.75 (and 1 other window)" in finding.message
    )
    assert "at most 0.25" in finding.fix
    assert finding.occurrences == 20
    assert finding.evidence[0].what.endswith("asks for 48.0 MiB of L2")


def test_a_persisting_window_with_nothing_set_aside(judge: Judge) -> None:
    builder = program()
    set_aside(builder, 0)
    kernels(builder, 100)
    window(builder, 8 * MIB, 90, 600)

    finding = only(judge(l2_setaside_oversubscribed, builder))

    assert "while nothing is set aside in L2" in finding.message
    assert finding.fix.startswith("reserve L2 before the window is set")


def test_a_request_beyond_the_limit_of_the_device_is_cut_down(judge: Judge) -> None:
    builder = program()
    mark(builder, f"l2.props persistMax={16 * MIB}", 5)
    set_aside(builder, 48 * MIB)
    kernels(builder, 100)
    window(builder, 64 * MIB, 90, 600)

    message = only(judge(l2_setaside_oversubscribed, builder)).message

    assert message.endswith("while 16.0 MiB are set aside in L2")


def test_a_window_made_for_a_request_that_was_cut_down_is_no_excess(
    judge: Judge,
) -> None:
    builder = program()
    mark(builder, f"l2.props persistMax={16 * MIB}", 5)
    set_aside(builder, 48 * MIB)
    kernels(builder, 100)
    window(builder, 32 * MIB, 90, 600)

    assert judge(l2_setaside_oversubscribed, builder) == []


def test_windows_without_a_set_aside_mark_can_not_be_judged(judge: Judge) -> None:
    builder = program()
    kernels(builder, 100)
    window(builder, 32 * MIB, 90, 600)

    unable = not_assessed(judge(l2_setaside_oversubscribed, builder))

    assert "no l2.setaside mark precedes" in unable.reason
    assert judge(l2_setaside_unused, builder) == []


def two_streams(
    *, shift: float, hit: str = "1.0", bases: tuple[int | None, int | None]
) -> TraceBuilder:
    """Kernels of two threads and streams, each under a window of 12 MiB."""
    builder = program()
    set_aside(builder, 16 * MIB)
    kernels(builder, 100)
    window(builder, 12 * MIB, 90, 600, base=bases[0], hit=hit)
    with builder.at(tid=102):
        kernels(builder, 100 + shift, stream=14)
        window(builder, 12 * MIB, 90, 700, base=bases[1], hit=hit)
    return builder


FAR = (1 << 40, 1 << 41)


def test_windows_that_fit_alone_but_not_together(judge: Judge) -> None:
    builder = two_streams(shift=0, bases=FAR)

    finding = only(judge(l2_setaside_oversubscribed, builder))

    assert finding.message == (
        "40 kernels under 2 persisting windows ran at the same time and asked for up "
        "to 24.0 MiB of L2 together, while 16.0 MiB are set aside"
    )
    assert finding.fix.startswith("multiply the hit ratios by 0.66")
    assert finding.occurrences == 40
    assert finding.evidence[0].end_ns - finding.evidence[0].start_ns == 15000
    assert finding.identity == ("windows too large together", "walk")


@pytest.mark.parametrize(
    ("shift", "hit", "bases"),
    [
        pytest.param(0, "0.5", FAR, id="they fit together"),
        pytest.param(500, "1.0", FAR, id="one after the other"),
        pytest.param(394.5, "1.0", FAR, id="only a tail overlaps"),
        pytest.param(0, "1.0", (1 << 40, 1 << 40), id="the same data"),
        pytest.param(0, "1.0", (1 << 40, (1 << 40) + MIB), id="shared addresses"),
        pytest.param(0, "1.0", (None, None), id="addresses unknown"),
    ],
)
def test_windows_that_do_not_compete_are_silent(
    shift: float, hit: str, bases: tuple[int | None, int | None], judge: Judge
) -> None:
    builder = two_streams(shift=shift, hit=hit, bases=bases)

    assert judge(l2_setaside_oversubscribed, builder) == []

"""What a recording lacks, and when nothing can be judged from it."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from nsys_layout import NO_ID
from tracebuilder import TraceBuilder
from typer.testing import CliRunner

from streamlint.cli import app
from streamlint.completeness import Defect, defects, no_gpu_work, unrecorded_calls
from streamlint.engine import Judgement, lint
from streamlint.findings import Claim, Confidence, Finding, NotAssessed, Severity
from streamlint.registry import all_rules, find
from streamlint.rules.capture.capture_not_evaluable import capture_not_evaluable
from streamlint.trace import open_trace
from streamlint.trace.model import Trace

BLOCKING = "launch-blocking"  # any rule that these programs give no reason to speak
Open = Callable[[TraceBuilder], Trace]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    return lambda builder: open_trace(builder.write(tmp_path / "t.sqlite"))


def program(count: int = 20, schema: str = "2025.3") -> TraceBuilder:
    """A default capture of a loop of kernels on one stream, 20 us apart."""
    builder = TraceBuilder(schema)
    builder.stream(13, flag=2)
    builder.diagnostic("info", "Profiling has started.")
    builder.call("cuModuleGetLoadingMode", 1)
    for _ in range(116):
        builder.new_id()
    kernels(builder, 100, count)
    return builder


def kernels(builder: TraceBuilder, start: float, count: int) -> None:
    for at in (start + 20 * i for i in range(count)):
        builder.kernel("step", stream=13, start=at, end=at + 10)


def only(found: tuple[Defect, ...]) -> Defect:
    assert len(found) == 1, [defect.words for defect in found]
    return found[0]


def finding_of(trace: Trace) -> Finding:
    outcome = capture_not_evaluable.check(trace)
    assert not isinstance(outcome, NotAssessed)
    assert len(outcome) == 1
    return outcome[0]


# Nothing to judge ---------------------------------------------------------------


def test_calls_without_any_gpu_row_mute_every_rule(opened: Open) -> None:
    builder = TraceBuilder()
    builder.stream(13)
    for i in range(10):
        builder.call("cudaLaunchKernel", 100 + 10 * i)
    builder.diagnostic("warning", "Not all CUDA events might have been collected.")
    trace = opened(builder)

    report = lint(trace, all_rules())

    assert len(report.not_assessed) == len(all_rules())
    assert not report.assessed_any
    assert report.exit_code(Severity.INFO) == 3
    unable = capture_not_evaluable.check(trace)
    assert unable == no_gpu_work(trace)
    assert isinstance(unable, NotAssessed)
    assert unable.reason == (
        "10 calls issued GPU work, but no kernel or copy was recorded (nsys: "
        '"Not all CUDA events might have been collected")'
    )


@pytest.mark.parametrize(
    ("recorded", "reason"),
    [("NvtxEvents", "CUDA was not traced"), ("Cuda", "no CUDA activity was recorded")],
)
def test_no_cuda_rows_at_all(recorded: str, reason: str, opened: Open) -> None:
    builder = TraceBuilder()
    builder.option("CAPTURE_EVENT_TYPE", recorded)
    builder.string("")
    unable = no_gpu_work(opened(builder))

    assert unable is not None
    assert unable.reason == reason
    assert "-t cuda,nvtx" in unable.recapture


def test_a_lone_memset_is_no_gpu_work(opened: Open) -> None:
    builder = TraceBuilder()
    builder.memset(64, stream=7, start=10, end=12)

    unable = no_gpu_work(opened(builder))

    assert unable is not None
    assert unable.reason.startswith("1 CUDA calls were recorded, but none issued")


def test_one_kernel_is_gpu_work(opened: Open) -> None:
    assert no_gpu_work(opened(program(1))) is None


# The default --------------------------------------------------------------------


def test_a_default_capture_has_no_defect(opened: Open) -> None:
    builder = program()
    for _ in range(500):
        builder.new_id()  # what nsys skips by default
    builder.call("cudaStreamSynchronize", 600)
    builder.overhead("CUDA profiling initialization", 1, 90)
    trace = opened(builder)

    assert defects(trace) == ()
    assert capture_not_evaluable.check(trace) == []
    assert unrecorded_calls(trace) == 500


def test_every_finding_is_info_and_claims_no_cost(opened: Open) -> None:
    builder = program()
    builder.rows.pop("DIAGNOSTIC_EVENT")
    finding = finding_of(opened(builder))

    assert finding.severity is Severity.INFO
    assert finding.cost.claim is Claim.NONE
    assert finding.where.process == "app"
    assert [(e.start_ns, e.end_ns) for e in finding.evidence] == [(100000, 490000)]
    assert "nsys 2024.2 or newer" in finding.fix
    assert finding.identity == ("no messages of the profiler",)


# Holes in the correlation ids -----------------------------------------------------


def test_holes_are_a_loss_where_all_apis_were_traced(opened: Open) -> None:
    builder = program()
    builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    for _ in range(5):
        builder.new_id()
    builder.call("cudaMalloc", 600)

    defect = only(defects(opened(builder)))

    assert (defect.kind, defect.count) == ("unrecorded calls", 5)
    assert defect.words == (
        "at least 5 API calls were not recorded, although all APIs were traced"
    )


def test_a_hole_or_two_are_no_loss(opened: Open) -> None:
    builder = program()
    builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    builder.new_id()
    builder.new_id()
    builder.call("cudaMalloc", 600)

    assert defects(opened(builder)) == ()


def test_ids_of_queries_events_and_gpu_work_are_no_holes(opened: Open) -> None:
    builder = program()
    builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    for i in range(40):
        builder.stream_query(13, 500 + i)
    for i in range(5):
        builder.event_record(13, 1, 600 + 10 * i)
    builder.kernel("step", stream=13, start=700, end=710, issue=None)
    builder.call("cudaMalloc", 800)

    assert unrecorded_calls(opened(builder)) == 0


def test_queries_that_were_recorded_do_not_hide_holes(opened: Open) -> None:
    builder = program()
    for i in range(10):
        builder.sync("cudaEventQuery", None, 500 + 2 * i, 501 + 2 * i, event=1)
    for _ in range(7):
        builder.new_id()
    builder.call("cudaMalloc", 800)

    assert unrecorded_calls(opened(builder)) == 7


def test_ids_are_counted_by_process(opened: Open) -> None:
    builder = program()
    builder.process(200)
    with builder.at(pid=200):
        builder.stream(13)
        builder.call("cudaMalloc", 50)
        for _ in range(30):
            builder.new_id()
        kernels(builder, 100, 3)

    assert unrecorded_calls(opened(builder)) == 30


def test_unrecorded_calls_matter_to_who_controls_l2(opened: Open) -> None:
    builder = program()
    builder.new_id()
    call = builder.call("cudaStreamSetAttribute", 600)

    defect = only(defects(opened(builder)))

    assert defect.kind == "unrecorded calls beside L2 control"
    assert defect.words.startswith("at least 1 API call was not recorded")
    assert "--cuda-trace-all-apis=true" in defect.recapture
    assert [e.correlation_id for e in defect.evidence] == [call]

    builder.nvtx("l2.setaside bytes=0", 1, domain="streamlint", mark=True)
    assert defects(opened(builder)) == ()


# Rows without their partner -------------------------------------------------------


def test_launches_that_left_no_gpu_row(opened: Open) -> None:
    builder = program()
    lost = [builder.call("cudaLaunchKernel", 600 + 10 * i) for i in range(4)]

    defect = only(defects(opened(builder)))

    assert (defect.kind, defect.count) == ("launches without GPU rows", 4)
    assert defect.words == "4 of 24 launches and copies left no row of GPU work"
    assert [e.correlation_id for e in defect.evidence] == lost


@pytest.mark.parametrize("lost", [1, 2])
def test_one_or_two_launches_are_the_edge_of_the_capture(
    lost: int, opened: Open
) -> None:
    builder = program()
    for i in range(lost):
        builder.call("cudaLaunchKernel", 600 + 10 * i)

    assert defects(opened(builder)) == ()


def test_less_than_one_percent_lost_is_no_defect(opened: Open) -> None:
    builder = program(400)
    for i in range(4):
        builder.call("cudaLaunchKernel", 9000 + 10 * i)

    assert defects(opened(builder)) == ()


def test_launches_that_failed_or_were_captured_are_not_lost(opened: Open) -> None:
    builder = program()
    for i in range(10):
        builder.call("cudaLaunchKernel", 600 + 10 * i, return_value=98)
    builder.call("cudaStreamBeginCapture", 800)
    for i in range(10):
        builder.call("cudaLaunchKernel", 810 + 10 * i)
    with builder.at(tid=102):  # say, the thread of the backward pass
        for i in range(10):
            builder.call("cudaLaunchKernel", 815 + 10 * i)
    builder.call("cudaStreamEndCapture", 950)

    assert defects(opened(builder)) == ()


def test_another_process_does_not_capture_for_this_one(opened: Open) -> None:
    builder = program()
    for i in range(10):
        builder.call("cudaLaunchKernel", 810 + 10 * i)
    builder.process(200)
    with builder.at(pid=200):
        builder.call("cudaStreamBeginCapture", 800)
        builder.call("cudaStreamEndCapture", 950)

    assert only(defects(opened(builder))).count == 10


def test_graph_launches_that_left_nothing(opened: Open) -> None:
    builder = program()
    for i in range(5):
        builder.graph_launch(600 + 10 * i)
    builder.graph_trace(stream=13, start=700, end=720)

    defect = only(defects(opened(builder)))

    assert (defect.kind, defect.count) == ("graph launches without GPU rows", 5)
    assert defect.words == "5 of 6 graph launches left no row of GPU work"
    assert "--cuda-graph-trace=node" in defect.recapture


def test_gpu_rows_without_their_calls(opened: Open) -> None:
    builder = program()
    for i in range(4):
        at = 600 + 20 * i
        builder.kernel("step", stream=13, start=at, end=at + 5, issue=None)
    node = builder.new_id()
    for i in range(9):
        at = 700 + 20 * i
        builder.kernel(
            "node", stream=13, start=at, end=at + 5, call=node, graph_node=2 << 32 | i
        )

    defect = only(defects(opened(builder)))

    assert (defect.kind, defect.count) == ("GPU rows without calls", 4)
    assert defect.words.startswith("4 of 24 GPU operations have no row")


def test_rows_without_usable_times(opened: Open) -> None:
    builder = program()
    kernel = builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"][0]
    builder.row("CUPTI_ACTIVITY_KIND_KERNEL", **{**kernel, "start": 0, "end": 0})
    call = builder.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][0]
    for _ in range(2):
        builder.row("CUPTI_ACTIVITY_KIND_RUNTIME", **{**call, "start": 9, "end": 8})

    defect = only(defects(opened(builder)))

    assert (defect.kind, defect.count) == ("invalid rows", 3)
    assert defect.words.endswith("(1 of kernels, 2 of runtime calls)")


# Distorted times ------------------------------------------------------------------


@pytest.mark.parametrize(("length", "fires"), [(3, False), (3.8, False), (8, True)])
def test_overhead_of_more_than_one_percent(
    length: float, fires: bool, opened: Open
) -> None:
    builder = program()  # judged from 100 to 490 us
    builder.overhead("CUPTI Buffer flush", 200, 200 + length)
    builder.overhead("CUPTI Buffer flush", 200, 201)
    builder.overhead("CUPTI Buffer flush", 600, 900)
    with builder.at(tid=999):  # a thread of the profiler's own
        builder.overhead("CUPTI Buffer flush", 100, 400)

    found = defects(opened(builder))

    assert bool(found) is fires
    if fires:
        defect = only(found)
        assert (defect.kind, defect.count) == ("profiler overhead", 2)
        assert "0.01 ms of the judged time (2%)" in defect.words
        assert (defect.evidence[0].start_ns, defect.evidence[0].end_ns) == (
            200_000,
            208_000,
        )
        assert "--flush-on-cudaprofilerstop" not in defect.recapture


def test_graphs_traced_by_node_inflate_launches(opened: Open) -> None:
    builder = program()
    builder.option("CUDA_GRAPH_TRACE_OPTIONS:MODE", "Node")
    trace = opened(builder)
    assert defects(trace) == ()  # no graph was launched

    for i in range(3):
        call = builder.graph_launch(600 + 50 * i)
        at = 610 + 50 * i
        builder.kernel(
            "node", stream=13, start=at, end=at + 5, call=call, graph_node=2 << 32
        )
    defect = only(defects(opened(builder)))

    assert (defect.kind, defect.count) == ("graphs traced by node", 3)
    assert "30 to 40 times" in defect.words
    assert "--cuda-graph-trace=graph" in defect.recapture


def test_call_stacks_of_launches_inflate_them_those_of_waits_do_not(
    opened: Open,
) -> None:
    builder = program()
    native = [("main", "./app")]
    wait = builder.sync("cudaStreamSynchronize", 13, 600, 620)
    builder.backtrace(wait, native=native)
    assert defects(opened(builder)) == ()

    launches = [
        builder.kernel("step", stream=13, start=700 + 20 * i, end=705 + 20 * i)
        for i in range(4)
    ]
    for call in launches:
        builder.backtrace(call, native=native)
    defect = only(defects(opened(builder)))

    assert (defect.kind, defect.count) == ("call stacks of launches", 4)
    assert defect.words.startswith("call stacks were taken at 4 of 24 launches")


# What that means for the rules -----------------------------------------------------


def judged(trace: Trace, rule: str) -> Judgement:
    (judgement,) = lint(trace, [find(rule)]).judgements
    assert judgement.crashed is None, judgement.crashed
    return judgement


def without_gpu_rows(share: float, of: int = 100) -> TraceBuilder:
    """A loop of kernels of which that share left no row, spread over the run."""
    builder = program(of)
    rows = builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    lost = round(share * of)
    del rows[:: of // lost]
    assert len(rows) == of - lost
    return builder


@pytest.mark.parametrize(
    ("share", "reason"),
    [
        (0.05, None),
        (0.2, "nothing was found, but 20 of 100 launches and copies left no row"),
        (0.5, "50 of 100 launches and copies left no row of GPU work"),
    ],
)
def test_finding_nothing_counts_less_the_more_is_lost(
    share: float, reason: str | None, opened: Open
) -> None:
    unable = judged(opened(without_gpu_rows(share)), BLOCKING).not_assessed

    assert (unable is None) == (reason is None)
    if unable is not None:
        assert unable.reason.startswith(str(reason))
        assert "cudaProfilerStop" in unable.recapture


def test_rules_that_read_no_calls_do_not_miss_them(opened: Open) -> None:
    builder = program()
    for i in range(80):
        at = 600 + 20 * i
        builder.kernel("step", stream=13, start=at, end=at + 5, issue=None)
    trace = opened(builder)

    assert judged(trace, "copy-compute-not-overlapped").not_assessed is None
    unable = judged(trace, BLOCKING).not_assessed
    assert unable is not None
    assert unable.reason.startswith("80 of 100 GPU operations have no row of the API")


def pageable(builder: TraceBuilder) -> None:
    for i in range(10):
        at = 3000 + 200 * i
        builder.memcpy(
            "HtoD", 1 << 20, src="pageable", stream=13, start=at, end=at + 80,
            issue=(at - 9, at + 90),
        )  # fmt: skip


def certainty(trace: Trace) -> Confidence:
    (finding,) = judged(trace, "pageable-async-copy").findings
    return finding.confidence


LESS = [
    pytest.param(
        "CUPTI buffers: 45 of 50. Some CUPTI events might be missing.", id="10"
    ),
    pytest.param("Number of incomplete CUPTI events dropped: 9", id="dropped"),
    pytest.param("Couldn't allocate CUPTI bufer 4 times", id="not allocated"),
    pytest.param("Error when processing events: x", id="not read"),
    pytest.param(
        "Installed CUDA driver version (13.3) is not supported by this build", id="new"
    ),
]


@pytest.mark.parametrize("text", LESS)
def test_what_the_profiler_lost_makes_findings_less_certain(
    text: str, opened: Open
) -> None:
    builder = program()
    pageable(builder)
    assert certainty(opened(builder)) is Confidence.HIGH
    builder.diagnostic("warning", text)

    assert certainty(opened(builder)) is Confidence.MEDIUM


@pytest.mark.parametrize(
    "text",
    [
        "Number of CUPTI events produced: 31, CUPTI buffers: 50.",
        "Reached the size limit on recording trace events",
        "Not all CUDA events might have been collected.",
    ],
)
def test_what_ended_early_is_certain_until_then(text: str, opened: Open) -> None:
    builder = program()
    pageable(builder)
    builder.diagnostic("warning", text)

    assert certainty(opened(builder)) is Confidence.HIGH


@pytest.mark.parametrize(
    ("text", "tells"),
    [
        ("Error when processing events: x", False),
        ("Couldn't allocate CUPTI bufer 4 times", False),
        ("CUPTI buffers: 40 of 50. Some CUPTI events might be missing.", False),
        ("CUPTI buffers: 49 of 50. Some CUPTI events might be missing.", True),
        ("Number of incomplete CUPTI events dropped: 1", True),
        ("Number of incomplete CUPTI events dropped: 30", False),
    ],
)
def test_finding_nothing_beside_losses(text: str, tells: bool, opened: Open) -> None:
    builder = program()
    builder.diagnostic("warning", text)

    unable = judged(opened(builder), BLOCKING).not_assessed

    assert (unable is None) is tells
    if unable is not None:
        assert unable.reason.startswith("nothing was found, but nsys ")


@pytest.mark.parametrize(
    ("took", "certain"), [(10, Confidence.HIGH), (30, Confidence.MEDIUM)]
)
def test_time_of_the_profiler_blurs_costs(
    took: int, certain: Confidence, opened: Open
) -> None:
    builder = TraceBuilder()
    builder.diagnostic("info", "Profiling has started.")
    builder.stream(13, flag=2)
    pageable(builder)  # the GPU idles 120 of each 200 us
    for i in range(9):
        builder.overhead("CUPTI Buffer flush", 3095 + 200 * i, 3095 + took + 200 * i)

    assert certainty(opened(builder)) is certain


def test_time_of_the_profiler_beside_a_working_gpu_is_as_it_was(opened: Open) -> None:
    builder = program()
    builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"][-1]["end"] = 1_000_000
    builder.overhead("CUDA profiling data flush on cudaProfilerStop", 500, 990)
    trace = opened(builder)

    assert "(54%)" in only(defects(trace)).words
    assert judged(trace, BLOCKING).not_assessed is None


def test_mostly_the_time_of_the_profiler(opened: Open) -> None:
    builder = program()  # judged from 100 to 490 us, idle every other 10 us
    last = builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"][-1]
    last |= {"start": last["start"] + 1_000_000, "end": last["end"] + 1_000_000}
    builder.overhead("CUPTI Buffer flush", 500, 1400)

    unable = judged(opened(builder), BLOCKING).not_assessed

    assert unable is not None
    assert unable.reason.startswith("nothing was found, but the profiler itself took")


def test_invalid_rows_are_rows_that_a_rule_lacks(opened: Open) -> None:
    builder = program()
    rows = builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"]
    rows += [{**row, "end": row["start"] - 1} for row in rows[:3]]
    trace = opened(builder)

    unable = judged(trace, BLOCKING).not_assessed

    assert unable is not None
    assert "rows without usable times were left out (3 of kernels)" in unable.reason


def test_info_counts_the_warnings_of_nsys_and_quotes_none(tmp_path: Path) -> None:
    builder = program()
    path = builder.write(tmp_path / "t.sqlite")
    assert "warnings" not in CliRunner().invoke(app, ["info", str(path)]).output
    for severity in ("info", "warning", "error"):
        builder.diagnostic(severity, "/home/eve/secret is odd")

    done = CliRunner().invoke(app, ["info", str(builder.write(path))])

    assert "warnings    2 by nsys, which it shows itself" in done.output
    assert "secret" not in done.output


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("true", "forked workers recorded"),
        ("false", "forked workers not recorded"),
        (None, "not stated if workers are recorded"),
    ],
)
def test_info_says_who_is_not_in_the_trace(
    value: str | None, words: str, tmp_path: Path
) -> None:
    builder = program()
    builder.process(200, "./launcher")
    with builder.at(pid=200):
        builder.call("cudaGetDeviceCount", 50)
    builder.option("TRACE_AFTER_FORK_BEFORE_EXEC", value, plain=value is not None)
    path = builder.write(tmp_path / "t.sqlite")

    done = CliRunner().invoke(app, ["info", str(path)])

    assert words in done.output
    assert "app (100), launcher (200, no GPU work)" in done.output


# What the profiler said -------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "Error when processing events: ErrorText=/home/eve/x.cpp(1)",
            "events lost on import",
        ),
        (
            "Number of CUPTI events produced: 31, CUPTI buffers: 49 of 50. Some CUPTI "
            "events might be missing. To make sure, see /home/eve",
            "buffers not collected",
        ),
        ("Couldn't allocate CUPTI bufer 4 times", "buffers not allocated"),
        ("Reached the size limit on recording trace events", "size limit reached"),
        (
            "Installed CUDA driver version (13.3) is not supported by this build of "
            "Nsight Systems: /home/eve",
            "driver newer than nsys",
        ),
        ("Not all CUDA events might have been collected.", "events perhaps lost"),
    ],
)
def test_losses_that_the_profiler_reports_are_told_in_fixed_words(
    text: str, kind: str, opened: Open
) -> None:
    builder = program()
    builder.diagnostic("warning", text)
    builder.diagnostic("warning", text)
    trace = opened(builder)

    defect = only(defects(trace))

    assert (defect.kind, defect.count) == (kind, 2)
    finding = finding_of(trace)
    assert finding.occurrences == 2
    shown = f"{finding.message} {finding.fix} {finding.evidence}"
    assert "/home" not in shown


def test_the_profiler_counts_what_it_dropped(opened: Open) -> None:
    builder = program()
    builder.diagnostic("info", "Number of incomplete CUPTI events dropped: \t3")
    builder.diagnostic("info", "Number of incomplete CUPTI events dropped: 10.")

    defect = only(defects(opened(builder)))

    assert (defect.kind, defect.count) == ("incomplete events dropped", 13)


def test_everyday_messages_are_no_losses(opened: Open) -> None:
    builder = program()
    for text in (
        "No NVTX events collected. Does the process use NVTX?",
        "No CUDA events collected. Does the process use CUDA?",
        "CUDA profiling might have not been started correctly.",
        "Number of CUPTI events produced: 436, CUPTI buffers: 50.",
        "Number of CUDA events collected: 369.",
    ):
        builder.diagnostic("warning", text)

    assert defects(opened(builder)) == ()


def test_a_weak_hint_gives_way_to_a_clear_one(opened: Open) -> None:
    builder = program()
    builder.diagnostic("warning", "Not all CUDA events might have been collected.")
    assert only(defects(opened(builder))).confidence is Confidence.LOW

    builder.diagnostic("info", "Number of incomplete CUPTI events dropped: 3")
    assert only(defects(opened(builder))).kind == "incomplete events dropped"


# A part of the program --------------------------------------------------------------


def test_a_capture_range_is_partial_and_its_stop_is_planned(opened: Open) -> None:
    builder = program()
    builder.diagnostic(
        "info",
        "Profiling started due to cudaProfilerStart API invoked in the application.",
    )
    builder.diagnostic("warning", "Not all CUDA events might have been collected.")
    builder.overhead("CUDA profiling data flush on cudaProfilerStop", 300, 480)

    found = defects(opened(builder))

    assert [defect.kind for defect in found] == ["partial range", "profiler overhead"]
    assert "--flush-on-cudaprofilerstop=false" in found[1].recapture


def test_a_late_first_call_is_a_partial_range(opened: Open) -> None:
    builder = TraceBuilder()
    builder.diagnostic("info", "Profiling has started.")
    builder.stream(13)
    for _ in range(20_000):
        builder.new_id()
    kernels(builder, 100, 20)

    defect = only(defects(opened(builder)))

    assert (defect.kind, defect.count) == ("partial range", 1)
    assert defect.words.startswith("the recording does not begin with the program")


def test_unknown_ids_are_no_late_start(opened: Open) -> None:
    builder = program()
    for row in builder.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][:1]:
        row["correlationId"] = None
    builder.sync("cudaStreamSynchronize", NO_ID, 600, 610)

    assert defects(opened(builder)) == ()


@pytest.mark.parametrize(
    "name", ["EXPORT_PARAM_TABLES_TO_EXPORT", "EXPORT_PARAM_TIMES_TO_EXPORT"]
)
def test_a_filtered_export(name: str, tmp_path: Path) -> None:
    builder = program()
    builder.rows.pop("DIAGNOSTIC_EVENT")  # filtered, so its absence is explained
    path = builder.write(tmp_path / "t.sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE META_DATA_EXPORT SET value='x' WHERE name=?", (name,))
        db.commit()

    assert only(defects(open_trace(path))).kind == "filtered export"


def test_without_the_table_of_messages_nothing_is_certain(opened: Open) -> None:
    builder = program(schema="2022.4")
    builder.rows.pop("DIAGNOSTIC_EVENT")

    defect = only(defects(opened(builder)))

    assert defect.kind == "no messages of the profiler"
    assert defect.evidence == ()


def test_defects_of_a_trace_without_gpu_work_are_listed_too(opened: Open) -> None:
    builder = TraceBuilder()
    builder.call("cudaMalloc", 10)
    builder.diagnostic("warning", "Reached the size limit on recording trace events")

    assert only(defects(opened(builder))).kind == "size limit reached"

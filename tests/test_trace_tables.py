"""Facts about nsys exports that the tables must get right, old and new versions."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from tracebuilder import TraceBuilder

from streamlint.completeness import unrecorded_calls
from streamlint.trace import open_trace, reader
from streamlint.trace.calls import call_kind, plain_name
from streamlint.trace.model import Trace
from streamlint.trace.stacks import decode_blob, encode_blob, encode_json
from streamlint.trace.tables import GROWING, TABLES

SAMPLES = Path(__file__).parents[1] / "sample_traces"
FRAMES = (
    *("runtime_calls", "launches", "captures", "synchronizations", "event_waits"),
    *("event_records", "queries", "kernels", "memcpys", "migrations", "memsets"),
    *("graph_traces", "graph_nodes", "gpu_ops", "streams", "contexts", "gpus"),
    *("processes", "threads", "nvtx_ranges", "memory_events", "pool_events"),
    *("diagnostics", "profiler_overhead"),
)


def sample(name: str) -> Trace:
    return open_trace(SAMPLES / f"{name}.sqlite")


def built(builder: TraceBuilder, folder: Path) -> Trace:
    return open_trace(builder.write(folder / "trace.sqlite"))


# Calls ------------------------------------------------------------------------


def test_a_call_with_a_stack_is_one_call_and_keeps_its_stack() -> None:
    trace = sample("extra/torch")
    calls = trace.runtime_calls
    # 2795 rows of class 67, all but two beside a row of the call itself.
    assert calls.height == 3449 + 4162 + 2
    assert calls.select("pid", "tid", "start_ns").is_unique().all()
    assert calls["callchain_id"].drop_nulls().len() == 2795
    assert calls["backtrace_ns"].drop_nulls().len() == 2795

    syncs = trace.synchronizations
    assert syncs.height == 70
    assert syncs["kind"].unique().to_list() == ["stream sync"]
    assert syncs["callchain_id"].null_count() == 0


def test_copies_are_not_doubled_by_their_stacks() -> None:
    copies = sample("extra/torch").memcpys
    kinds = copies.group_by("copy_kind", "src_kind", "dst_kind").len().rows()
    assert sorted(kinds) == [
        ("DtoH", "device", "pinned", 64),
        ("HtoD", "pageable", "device", 134),
    ]


def test_a_stack_without_its_call_stands_for_the_call(tmp_path: Path) -> None:
    builder = TraceBuilder()
    call = builder.call("cuMemHostGetDevicePointer_v2", 10, 4)
    builder.backtrace(call, native=[("main", "app")])
    del builder.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][0]
    calls = built(builder, tmp_path).runtime_calls
    assert calls["name"].to_list() == ["cuMemHostGetDevicePointer"]
    assert calls["callchain_id"].to_list() == [0]


@pytest.mark.parametrize(
    ("recorded", "plain"),
    [
        ("cudaMalloc_v3020", "cudaMalloc"),
        ("cudaMemcpyAsync_ptsz_v7000", "cudaMemcpyAsync"),
        ("cudaMemcpy_ptds_v7000", "cudaMemcpy"),
        ("cuMemAlloc_v2", "cuMemAlloc"),
        ("cudaLaunchKernelExC_v11060", "cudaLaunchKernelExC"),
        ("cuStreamSynchronize", "cuStreamSynchronize"),
    ],
)
def test_names_lose_their_suffixes(recorded: str, plain: str) -> None:
    assert plain_name(recorded) == plain


@pytest.mark.parametrize("name", ["misc", "ptds", "apis_all", "torch", "probe"])
def test_no_recorded_name_has_a_suffix(name: str) -> None:
    names = sample(f"extra/{name}").runtime_calls["name"].unique()
    assert not names.cast(pl.String).str.contains(r"_v\d+$|_pt[sd][sz]").any()


def test_kinds_of_calls() -> None:
    kinds = {
        "cudaMemcpy2DAsync": "async memcpy",
        "cudaMemcpyPeer": "sync memcpy",
        "cudaGraphLaunch": "graph launch",
        "cuLaunchKernelEx": "kernel launch",
        "cudaLaunchHostFunc": "host func",
        "cuKernelGetName": "noise",
        "cudaFreeHost": "host free",
        "cudaFreeAsync": "async free",
        "cudaMemGetInfo": "other",
    }
    assert {name: call_kind(name) for name in kinds} == kinds


def test_a_call_inside_another_is_nested(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.call("cudaMalloc", 10, 20)
    builder.call("cuMemAlloc_v2", 12, 5)
    with builder.at(tid=102):
        builder.call("cudaMalloc", 14, 2)
    calls = built(builder, tmp_path).runtime_calls
    assert calls.select("name", "nested").rows() == [
        ("cudaMalloc", False),
        ("cuMemAlloc", True),
        ("cudaMalloc", False),
    ]


# Which call made which operation ----------------------------------------------


def test_correlation_ids_of_processes_are_kept_apart() -> None:
    trace = sample("extra/forkp")
    calls = trace.runtime_calls
    assert calls["pid"].n_unique() == 3
    assert calls["correlation_id"].n_unique() == 1120
    assert calls.select("pid", "correlation_id").n_unique() == calls.height == 1930
    ops = trace.gpu_ops
    assert ops.height == 40
    # No child runs threads but its main one, whose tid is the pid.
    assert (ops["tid"] == ops["pid"]).all()
    assert (ops["issue_ns"] < ops["start_ns"]).all()


def test_equal_ids_of_two_processes_join_their_own_call(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.kernel("a", stream=7, start=50, end=60, issue=(10, 12))
    builder.process(200, "./other")
    with builder.at(pid=200):
        builder.kernel("b", stream=7, start=55, end=65, issue=(30, 32))
    ops = built(builder, tmp_path).gpu_ops
    assert ops.select("pid", "tid", "correlation_id", "name", "issue_ns").rows() == [
        (100, 101, 1, "a", 10_000),
        (200, 201, 1, "b", 30_000),
    ]


def test_processes_on_one_device_id_are_told_apart_by_gpu() -> None:
    shared = sample("extra/two_procs_one_gpu").gpu_ops
    apart = sample("extra/two_procs_two_gpus").gpu_ops
    for ops in (shared, apart):
        assert ops["pid"].n_unique() == 2
        assert ops["device_id"].unique().to_list() == [0]
    assert shared["gpu_id"].n_unique() == 1
    assert apart["gpu_id"].n_unique() == 2


def test_captured_launches_are_no_launches() -> None:
    trace = sample("extra/misc")
    kernel_calls = trace.runtime_calls.filter(pl.col("kind") == "kernel launch")
    launches = trace.launches
    assert kernel_calls.height == 225
    # One capture of 4 kernels, whose graph is launched 5 times.
    assert trace.captures.height == 1
    captured = kernel_calls.join(
        launches, on=["pid", "correlation_id"], how="anti"
    ).height
    graph_kernels = trace.kernels["graph_node_id"].drop_nulls()
    graph_launches = launches.filter(pl.col("kind") == "graph launch")
    assert graph_launches.height == 5
    assert captured * 5 == graph_kernels.len()
    assert captured == graph_kernels.n_unique()
    assert trace.kernels.height == 225 - captured + captured * 5


def test_a_launch_during_a_capture_that_did_run_is_a_launch(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.call("cudaStreamBeginCapture", 10)
    builder.call("cudaLaunchKernel", 20)
    builder.kernel(stream=14, start=40, end=50, issue=(30, 32))
    builder.call("cudaStreamEndCapture", 60)
    builder.call("cudaLaunchKernel", 70)
    launches = built(builder, tmp_path).launches
    assert launches["start_ns"].to_list() == [30_000, 70_000]


def test_all_nodes_of_a_graph_launch_join_its_call(tmp_path: Path) -> None:
    builder = TraceBuilder()
    call = builder.graph_launch(10)
    for i in range(3):
        builder.kernel(
            stream=13, start=20 + i, end=20.5 + i, call=call, graph_node=2 << 32 | i
        )
    ops = built(builder, tmp_path).gpu_ops
    assert ops["call"].to_list() == ["cudaGraphLaunch"] * 3
    assert ops["graph_node_id"].to_list() == [2 << 32, (2 << 32) + 1, (2 << 32) + 2]


def test_orphan_rows_survive(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.kernel("alone", stream=13, start=20, end=30, issue=None)
    builder.call("cudaLaunchKernel", 40)
    builder.call("cudaStreamSynchronize", 50, 5)
    builder.row(
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
        **{"streamId": 13, "contextId": 1, "globalPid": 1 << 48 | 100 << 24},
        **{"eventId": 1, "eventSyncId": 1, "correlationId": 99},
    )
    trace = built(builder, tmp_path)
    assert trace.gpu_ops.select("name", "issue_ns", "stream_kind").rows() == [
        ("alone", None, "unknown")
    ]
    assert trace.launches.height == 1
    assert trace.synchronizations.select("stream_id", "context_id").rows() == [
        (None, None)
    ]
    assert trace.event_records.select("stream_id", "start_ns").rows() == [(13, None)]


def test_rows_without_usable_times_are_dropped_and_counted(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.kernel(stream=13, start=20, end=30)
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    good = builder.rows[table][0]
    builder.row(table, **{**good, "start": 40_000, "end": 39_999})
    builder.row(table, **{**good, "start": 0})
    builder.row(table, **{**good, "start": 50_000, "end": 50_000})
    trace = built(builder, tmp_path)
    assert trace.kernels["start_ns"].to_list() == [20_000, 50_000]
    assert trace.invalid_rows == {"kernels": 2}


def test_frames_are_sorted_by_start(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for start in (70, 30, 50):
        builder.kernel(stream=13, start=start, end=start + 5)
    trace = built(builder, tmp_path)
    for frame in (trace.kernels, trace.gpu_ops, trace.runtime_calls, trace.launches):
        assert frame["start_ns"].is_sorted()


def test_holes_in_correlation_ids_are_unrecorded_calls(tmp_path: Path) -> None:
    # cudaDeviceSetLimit is the one call that this capture skipped.
    assert unrecorded_calls(sample("extra/l2")) == 1
    assert unrecorded_calls(sample("extra/apis_all")) == 0
    assert unrecorded_calls(sample("extra/apis_def")) > 0

    builder = TraceBuilder()
    builder.call("cudaMalloc", 10)
    builder.new_id()
    builder.new_id()
    builder.call("cudaFree", 20)
    builder.stream_query(13, 30)
    builder.call("cudaMalloc", 40)
    assert unrecorded_calls(built(builder, tmp_path)) == 2


# Streams and memory -----------------------------------------------------------


def test_priorities_are_signed() -> None:
    streams = sample("extra/misc").streams
    assert sorted(set(streams["priority"])) == [-5, -3, 0]


def test_kind_of_a_stream_is_its_flag(tmp_path: Path) -> None:
    builder = TraceBuilder()
    for stream, flag in ((13, 1), (14, 2), (15, 0), (16, 9)):
        builder.stream(stream, flag=flag)
    kinds = built(builder, tmp_path).streams.select("stream_id", "kind").rows()
    assert dict(kinds) == {
        **{7: "null", 13: "blocking", 14: "non-blocking"},
        **{15: "unknown", 16: "unknown"},
    }


def test_each_context_has_its_own_null_stream() -> None:
    trace = sample("extra/ctxs")
    null = trace.streams.filter(pl.col("kind") == "null")
    assert sorted(null.select("context_id", "stream_id").rows()) == [
        (1, 7),
        (2, 14),
        (3, 21),
    ]
    assert trace.contexts.filter("is_green")["parent_context_id"].to_list() == [1]


@pytest.mark.parametrize("table", ["CONTEXT_INFO", "NULL_STREAM", "STREAM"])
def test_null_stream_comes_from_whichever_table_there_is(
    table: str, tmp_path: Path
) -> None:
    builder = TraceBuilder()
    rows = builder.rows
    del rows["TARGET_INFO_CUDA_CONTEXT_INFO"]
    rows["TARGET_INFO_CUDA_STREAM"].clear()
    builder.stream(7, flag=3 if table == "STREAM" else 0)
    builder.stream(13)
    ids = {"processId": 100, "contextId": 1}
    if table == "CONTEXT_INFO":
        builder.row("TARGET_INFO_CUDA_CONTEXT_INFO", **ids, nullStreamId=7)
    if table == "NULL_STREAM":
        builder.row("TARGET_INFO_CUDA_NULL_STREAM", **ids, streamId=7)
    kinds = built(builder, tmp_path).streams.select("stream_id", "kind").rows()
    assert dict(kinds) == {7: "null", 13: "blocking"}


def test_per_thread_streams_and_their_waits() -> None:
    trace = sample("extra/ptds")
    streams = trace.streams.filter(pl.col("kind") == "per-thread")
    assert sorted(streams["stream_id"]) == [13, 14, 15]
    # Each thread also launches one kernel on cudaStreamLegacy.
    on_null = pl.col("stream_kind") == "null"
    assert trace.gpu_ops.filter(on_null)["stream_id"].to_list() == [7, 7, 7]
    ops = trace.gpu_ops.filter(~on_null)
    assert ops["stream_kind"].unique().to_list() == ["per-thread"]
    own = dict(ops.select("tid", "stream_id").unique().rows())
    assert len(own) == 3
    # The export names stream 7, the legacy null stream, in all of these rows.
    waits = trace.synchronizations.filter(pl.col("kind") == "stream sync")
    assert waits.height == 18
    assert [own[tid] for tid in waits["tid"]] == waits["stream_id"].to_list()


def test_unified_memory_migrations_are_no_copies() -> None:
    trace = sample("extra/um")
    assert trace.memcpys.height == 0
    assert trace.migrations.height == 54
    assert set(trace.migrations["copy_kind"]) == {"HtoD", "DtoH"}
    assert set(trace.gpu_ops["kind"]) == {"kernel"}


def test_kind_of_a_wait_is_its_name_not_its_sync_type(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.sync("cudaStreamSynchronize", 13, 10, 20)
    builder.event_record(13, 1, 30)
    builder.sync("cudaEventSynchronize", event=1, start=40, end=50)
    builder.event_wait(14, 1, 60)
    builder.event_wait(14, 2, 70)
    builder.sync("cuCtxSynchronize", start=80, end=90)
    builder.device_sync(100, 110)
    for number, row in enumerate(builder.rows["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"]):
        row["syncType"] = number
    trace = built(builder, tmp_path)
    columns = ("stream_id", "event_id", "event_sync_id")
    assert trace.synchronizations.select("kind", *columns).rows() == [
        ("stream sync", 13, None, None),
        ("event sync", None, 1, 1),
        ("device sync", None, None, None),
        ("device sync", None, None, None),
    ]
    assert trace.event_waits.select(columns).rows() == [(14, 1, 1), (14, 2, 0)]


def test_stream_queries_are_counted_without_their_calls() -> None:
    skipped, recorded = sample("extra/apis_def"), sample("extra/apis_all")
    for trace in (skipped, recorded):
        by_event = trace.queries["event_id"].is_not_null().sum()
        calls = Counter(trace.runtime_calls["name"].to_list())
        assert by_event == calls["cudaEventQuery"] > 600
    assert "cudaStreamQuery" not in set(skipped.runtime_calls["name"])
    assert skipped.queries["stream_id"].is_not_null().sum() == 734
    assert recorded.queries["stream_id"].is_not_null().sum() == 664


def test_the_probe_run_shows_every_query_and_unrecorded_event() -> None:
    trace = sample("extra/probe")
    assert trace.queries["stream_id"].is_not_null().sum() == 1727
    assert trace.queries["event_id"].is_not_null().sum() == 1851
    assert trace.event_waits["event_sync_id"].to_list() == [0]
    assert trace.memcpys["copy_count"].max() == 512


# Call stacks ------------------------------------------------------------------


def test_python_stacks_lead_to_the_line() -> None:
    trace = sample("extra/torchbt")
    stacks = trace.python_stacks(trace.synchronizations)
    assert len(stacks) == 70
    assert sum(len(frames) for frames in stacks.values()) == 94
    outermost = Counter(
        (trace.string(frames[-1][1]), frames[-1][2], trace.string(frames[-1][0]))
        for frames in stacks.values()
    )
    assert outermost == {("t.py", 16, "<module>"): 64, ("t.py", 7, "<module>"): 6}


def test_native_stacks_reach_the_torch_operator() -> None:
    trace = sample("extra/torchbt")
    waits = trace.synchronizations
    stacks = trace.native_stacks(waits["callchain_id"])
    taken = [stacks[chain] for chain in waits["callchain_id"]]
    assert len(taken) == 70
    symbols = ["".join(frame.symbol for frame in stack) for stack in taken]
    assert sum("_local_scalar_dense_cuda" in text for text in symbols) == 64
    assert all(frame.module for stack in stacks.values() for frame in stack)


@pytest.mark.parametrize("as_json", [True, False])
def test_frames_are_the_same_from_json_and_blob(as_json: bool, tmp_path: Path) -> None:
    builder = TraceBuilder()
    call = builder.call("cudaStreamSynchronize", 10, 5)
    frames = [("item", "torch/a.py", 7), ("&lt;module&gt;", "train.py", 70_000)]
    builder.backtrace(call, frames, as_json=as_json)
    trace = built(builder, tmp_path)
    ((key, found),) = trace.python_stacks(trace.synchronizations).items()
    assert key == (100, call)
    named = [(trace.string(f), trace.string(file), line) for f, file, line in found]
    assert named == [("item", "torch/a.py", 7), ("<module>", "train.py", 70_000)]
    assert trace.nvtx_ranges.height == 0


def test_stacks_of_two_processes_with_equal_times_and_ids(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.process(200)
    for pid, line in ((100, 1), (200, 2)):
        with builder.at(pid=pid, tid=7):
            call = builder.call("cudaStreamSynchronize", 10, 5)
            builder.backtrace(call, [("f", "a.py", line)])
    trace = built(builder, tmp_path)
    stacks = trace.python_stacks(trace.synchronizations)
    assert {key: frames[0][2] for key, frames in stacks.items()} == {
        (100, 1): 1,
        (200, 1): 2,
    }


def test_payloads_of_another_shape_give_no_frames() -> None:
    blob = encode_blob([(1, 2, 3), (4, 5, 6)])
    assert decode_blob(blob) == [(1, 2, 3), (4, 5, 6)]
    for cut in range(len(blob)):
        assert decode_blob(blob[:cut]) == []
    assert encode_json([(1, 2, 3)]).startswith('{"Python Backtrace on CUDA"')


# Versions ---------------------------------------------------------------------

_PLACE = "deviceId! contextId! streamId! correlationId globalPid"
_CALL = "start! end! eventClass! globalTid correlationId nameId! returnValue!"
_KERNEL = (
    "registersPerThread! gridX! gridY! gridZ! blockX! blockY! blockZ! "
    "staticSharedMemory! dynamicSharedMemory! localMemoryPerThread! localMemoryTotal! "
    "gridId! sharedMemoryExecuted graphNodeId"
)
_SOURCES = "srcKind dstKind srcDeviceId srcContextId dstDeviceId dstContextId"
_SYNC = f"start! end! {_PLACE} syncType! eventId!"
_STREAM = "streamId! hwId! vmId! processId! contextId! priority! flag!"
_NULL = "streamId! hwId! vmId! processId! deviceId! contextId!"
NSYS_2020_3 = {
    "StringIds": "id! value:TEXT!",
    "PROFILER_OVERHEAD": "start! end! globalTid correlationId nameId! returnValue!",
    "CUPTI_ACTIVITY_KIND_RUNTIME": _CALL,
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"start! end! {_PLACE} bytes! copyKind! "
    f"deprecatedSrcId {_SOURCES} graphNodeId",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"start! end! {_PLACE} demangledName! shortName! "
    f"launchType cacheConfig {_KERNEL}",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": _SYNC,
    "ThreadNames": "nameId! priority globalTid",
    "TARGET_INFO_CUDA_NULL_STREAM": _NULL,
    "TARGET_INFO_CUDA_STREAM": _STREAM,
}
NSYS_2022_4 = {
    **{name: NSYS_2020_3[name] for name in ("StringIds", "ThreadNames")},
    **{name: NSYS_2020_3[name] for name in NSYS_2020_3 if "TARGET_INFO" in name},
    "PROCESSES": "globalPid pid name:TEXT",
    "PROFILER_OVERHEAD": "start! end! globalTid nameId! returnValue!",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": f"{_PLACE} eventId!",
    "CUPTI_ACTIVITY_KIND_RUNTIME": f"{_CALL} callchainId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"start! end! {_PLACE} bytes! copyKind! "
    f"deprecatedSrcId {_SOURCES} migrationCause graphNodeId virtualAddress",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"start! end! {_PLACE} demangledName! shortName! "
    f"mangledName launchType cacheConfig {_KERNEL} sharedMemoryLimitConfig",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": _SYNC,
    "CUDA_GRAPH_EVENTS": "start! end! eventClass! globalTid nameId! graphNodeId! "
    "originalGraphNodeId",
    "EXPORT_META_DATA": "name:TEXT! value:TEXT",
    "NVTX_EVENTS": "start! end eventType! rangeId category color text:TEXT globalTid "
    "endGlobalTid textId domainId uint64Value int64Value doubleValue:REAL uint32Value "
    "int32Value floatValue:REAL jsonTextId jsonText:TEXT",
    "TARGET_INFO_GPU": "vmId! id! name:TEXT busLocation:TEXT isDiscrete l2CacheSize "
    "totalMemory smCount",
}


def small_run() -> TraceBuilder:
    """Two streams, a copy, a wait, an event, a range."""
    builder = TraceBuilder()
    builder.stream(13, priority=-1)
    builder.nvtx("step", 1, 100, value=3)
    builder.memcpy("HtoD", 64, src="pageable", stream=13, start=20, end=21)
    builder.kernel("k<int>(int)", stream=13, start=30, end=40)
    builder.event_record(13, 1, 42)
    builder.sync("cudaStreamSynchronize", 13, 45, 50)
    builder.overhead("CUDA profiling data flush", 60, 70)
    builder.row("TARGET_INFO_CUDA_NULL_STREAM", processId=100, contextId=1, streamId=7)
    builder.thread("main")
    return builder


def columns_of(layout: dict[str, str]) -> dict[str, list[str]]:
    return {table: text.split() for table, text in layout.items()}


def test_an_export_of_2020_3_loads(tmp_path: Path) -> None:
    builder = small_run()
    for row in builder.rows["TARGET_INFO_CUDA_STREAM"]:
        row["flag"] = 0
    builder.layout = columns_of(NSYS_2020_3)
    trace = built(builder, tmp_path)
    assert trace.gpu_ops.select("name", "engine", "stream_kind", "issue_ns").rows() == [
        ("HtoD", "HtoD", "unknown", 17_000),
        ("k", "compute", "unknown", 27_000),
    ]
    streams = trace.streams.select("stream_id", "kind", "priority").rows()
    assert sorted(streams) == [(7, "null", 0), (13, "unknown", -1)]
    assert trace.synchronizations.select(
        "kind", "stream_id", "event_sync_id"
    ).rows() == [("stream sync", 13, None)]
    assert trace.memcpys.select("src_kind", "copy_count").rows() == [("pageable", None)]
    assert trace.processes.rows() == [(100, None)]
    assert trace.kernels["green_context_id"].to_list() == [None]
    assert trace.gpu_ops["sm_fraction"].to_list() == [None, None]
    assert trace.threads.rows() == [(100, 101, "main")]
    assert trace.profiler_overhead.height == 1
    assert (trace.capture.exporter, trace.capture.cuda_traced) == (None, None)
    for absent in ("gpus", "diagnostics", "processes", "event_records", "nvtx_events"):
        assert trace.missing(absent) is not None
    for present in ("kernels", "memcpys", "runtime_calls", "synchronizations"):
        assert trace.missing(present) is None


def test_an_export_of_2022_4_loads(tmp_path: Path) -> None:
    builder = small_run()
    builder.row("EXPORT_META_DATA", name="EXPORT_PRODUCT_VERSION", value="2022.4.2.1")
    builder.row("EXPORT_META_DATA", name="EXPORT_SCHEMA_VERSION", value="3.0.0")
    node = {"start": 5_000, "end": 5_000, "globalTid": 1 << 48 | 100 << 24 | 101}
    builder.row("CUDA_GRAPH_EVENTS", **node, graphNodeId=1 << 32)
    builder.layout = columns_of(NSYS_2022_4)
    trace = built(builder, tmp_path)
    assert (trace.capture.exporter, trace.capture.schema) == ("2022.4.2.1", "3.0.0")
    streams = trace.streams.select("stream_id", "kind").rows()
    assert sorted(streams) == [(7, "null"), (13, "blocking")]
    assert trace.gpu_ops["stream_kind"].to_list() == ["blocking", "blocking"]
    assert trace.event_records.select("event_id", "event_sync_id").rows() == [(1, None)]
    assert trace.graph_nodes.select("pid", "graph_node_id").rows() == [(100, 1 << 32)]
    assert trace.nvtx_ranges.select("text", "value").rows() == [("step", 3)]
    assert trace.processes.rows() == [(100, "app")]
    assert trace.graph_traces.height == 0
    assert trace.python_stacks(trace.runtime_calls) == {}


def test_an_export_of_2026_2_loads(tmp_path: Path) -> None:
    builder = small_run()
    builder.schema = "2026.2"
    kernels = builder.layout["CUPTI_ACTIVITY_KIND_KERNEL"]
    kernels[8:8] = ["graphId", "sharedMemoryRequestedPercentage:TEXT!"]
    builder.layout["CUPTI_ACTIVITY_KIND_CUDA_EVENT"].append("timestamp")
    builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"][0] |= {
        "sharedMemoryRequestedPercentage": "default"
    }
    trace = built(builder, tmp_path)
    assert trace.kernels["name"].to_list() == ["k"]
    assert trace.event_records.height == 1
    assert trace.capture.exporter == "2026.2.1.210"


def test_the_old_graph_table_is_not_mistaken_for_the_new_one(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.layout["CUDA_GRAPH_EVENTS"] = ["start!", "end!", "graphId", "graphExecId"]
    builder.row("CUDA_GRAPH_EVENTS", start=1, end=2, graphId=3, graphExecId=4)
    trace = built(builder, tmp_path)
    assert trace.graph_nodes.height == 0
    assert trace.missing("graph_nodes") is not None


@pytest.mark.parametrize("table", list(TABLES))
def test_a_missing_column_takes_away_only_what_needs_it(
    table: str, tmp_path: Path
) -> None:
    """Every column of every table in turn: nothing else changes, nothing fails."""
    spec = TABLES[table]
    whole = built(full_run(), tmp_path)
    expected = {name: getattr(whole, name).height for name in FRAMES}
    joined = ("gpu_ops", "synchronizations", "event_records", "queries", "processes")
    tells_copies_apart = ("eventClass", "correlationId") if "calls" in table else ()
    for column in spec.columns:
        builder = full_run()
        source = next(s for s in spec.sources if s in builder.layout)
        builder.layout[source] = [
            c
            for c in builder.layout[source]
            if c.rstrip("!").partition(":")[0] != column.source
        ]
        trace = built(builder, tmp_path)
        heights = {
            name: getattr(trace, name).height
            for name in FRAMES
            if name == table or name in joined
        }
        missing = trace.missing(table)
        if column.required:
            assert missing is not None
            assert source in missing.reason
        elif table in expected and column.source not in tells_copies_apart:
            assert missing is None
            assert heights[table] == expected[table]
        trace.close()


@pytest.mark.parametrize("table", list(TABLES))
def test_a_missing_table_takes_away_only_what_needs_it(
    table: str, tmp_path: Path
) -> None:
    builder = full_run()
    for source in TABLES[table].sources:
        builder.layout.pop(source, None)
    trace = built(builder, tmp_path)
    for name in FRAMES:
        frame = getattr(trace, name)
        if name == table:
            # These two also follow from the calls.
            assert frame.height == 0 or name in ("processes", "synchronizations")
    if table != "export_meta":
        assert trace.missing(table) is not None
    own = set(TABLES[table].sources)
    for other, spec in TABLES.items():
        if own.isdisjoint(spec.sources) and spec.sources[0] in builder.rows:
            reason = trace.missing(other)
            assert reason is None or "no table" not in reason.reason


def full_run() -> TraceBuilder:
    """Something in every table."""
    builder = small_run()
    call = builder.call("cudaFree", 110, 5)
    builder.backtrace(call, [("f", "a.py", 1)], native=[("main", "app")])
    builder.memset(16, stream=13, start=130, end=131)
    builder.graph_trace(stream=13, start=140, end=150)
    builder.graph_node(1 << 32, 120)
    builder.memory_event("allocation", 64, 125)
    builder.pool_event("created", 126)
    builder.diagnostic("info", "Profiling has started.")
    return builder


def test_a_column_that_nobody_has_is_null(tmp_path: Path) -> None:
    builder = small_run()
    layout = builder.layout["CUPTI_ACTIVITY_KIND_KERNEL"]
    for name in ("graphNodeId", "demangledName!", "sharedMemoryExecuted"):
        layout.remove(name)
    kernels = built(builder, tmp_path).kernels
    for name in ("graph_node_id", "full_name", "shared_executed_bytes"):
        assert kernels[name].to_list() == [None]
    assert kernels["name"].to_list() == ["k"]


@pytest.mark.parametrize("name", ["misc", "torch", "probe", "2026.1.1_cut_down_tables"])
def test_the_rows_of_a_trace_are_known_before_they_are_read(name: str) -> None:
    path = SAMPLES / "extra" / f"{name}.sqlite"
    sources = [source for table in GROWING for source in table.sources]
    with closing(sqlite3.connect(path)) as db:
        stored = {n for (n,) in db.execute("SELECT name FROM sqlite_master")}
        counted = sum(
            db.execute(f"SELECT count(*) FROM {source}").fetchone()[0]
            for source in stored.intersection(sources)
        )
    assert sample(f"extra/{name}").rows == counted > 0


def test_a_row_number_that_the_file_has_no_room_for_is_not_believed(
    tmp_path: Path,
) -> None:
    path = small_run().write(tmp_path / "t.sqlite")
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET rowid = 1 << 62")
        db.commit()
    with open_trace(path) as trace:
        assert 0 < trace.rows < path.stat().st_size


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(5, 7)), max_size=8), st.booleans()
)
def test_rows_come_by_start_and_end_and_else_as_they_are(
    times: list[tuple[int, int]], in_order: bool
) -> None:
    if in_order:
        times = sorted(times, key=lambda time: time[0])
    frame = pl.DataFrame(
        [(start, end, row) for row, (start, end) in enumerate(times)],
        schema={"start_ns": pl.Int64, "end_ns": pl.Int64, "row": pl.Int64},
        orient="row",
    )
    expected = frame.sort("start_ns", "end_ns", maintain_order=True)
    assert_frame_equal(reader._by_time(frame), expected)
    starts = frame.drop("end_ns")
    expected = starts.sort("start_ns", maintain_order=True)
    assert_frame_equal(reader._by_time(starts), expected)


def test_frames_of_many_rows_are_narrow() -> None:
    trace = sample("extra/misc")
    wide = {
        frame: [
            name
            for name, kind in getattr(trace, frame).schema.items()
            if kind == pl.String
            or (kind == pl.Int64 and not name.endswith(("_ns", "_bytes")))
        ]
        for frame in ("kernels", "runtime_calls", "gpu_ops")
    }
    assert wide == {
        "kernels": ["correlation_id", "graph_node_id"],
        "runtime_calls": ["correlation_id"],
        "gpu_ops": ["correlation_id", "graph_node_id"],
    }


def test_a_grid_of_2_to_the_31_blocks_fills_the_gpu(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.kernel(stream=7, start=100, end=101, grid=(65_536, 32_768, 1))
    builder.kernel(stream=7, start=200, end=201, grid=(1, 1, 1), block=(1, 1, 1))
    small, large = sorted(built(builder, tmp_path).gpu_ops["sm_fraction"].to_list())
    assert 0 < small < 0.001
    assert large == 1.0


def test_tables_cut_down_by_other_tools_load() -> None:
    trace = sample("extra/2026.1.1_cut_down_tables")
    # One kernel of 400 starts at time 0.
    assert trace.kernels.height == 399
    assert trace.invalid_rows == {"kernels": 1}
    assert trace.gpu_ops["call"].unique().to_list() == ["cudaLaunchKernel"]
    assert trace.gpu_ops["stream_kind"].unique().to_list() == ["unknown"]
    missing = trace.missing("streams")
    assert missing is not None
    assert missing.reason == "the export has no table TARGET_INFO_CUDA_STREAM"


SAMPLE_FILES = sorted(set(SAMPLES.glob("*/*.sqlite")) - set(SAMPLES.glob("*/abort*")))


@pytest.mark.parametrize("path", SAMPLE_FILES, ids=lambda path: path.stem)
def test_every_frame_of_every_sample_loads_with_its_types(path: Path) -> None:
    trace, empty = open_trace(path), open_trace(SAMPLES / "extra/nocuda.sqlite")
    for name in FRAMES:
        assert getattr(trace, name).schema == getattr(empty, name).schema, name


# What was recorded ------------------------------------------------------------


def test_capture_facts() -> None:
    capture = sample("extra/torchbt").capture
    assert capture.exporter == "2025.3.2.0"
    assert capture.schema == "3.20.3"
    assert capture.cuda_traced is True
    assert capture.all_apis is False
    assert capture.graph_mode == "node"
    assert capture.python_backtraces is True
    assert capture.native_backtraces is True
    assert sample("extra/apis_all").capture.all_apis is True
    assert sample("extra/nocuda").capture.cuda_traced is False
    # PROCESS_0:COLLECT_CUDA_TRACE is false in this version, whatever was traced.
    capture = sample("extra/2026.1.1_single_final_sync").capture
    assert (capture.cuda_traced, capture.all_apis) == (True, False)


def test_an_unprefixed_option_overrules(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.option("CUDA_SKIP_SOME_API_CALLS", "false")
    assert built(builder, tmp_path).capture.all_apis is True
    builder.option("CUDA_SKIP_SOME_API_CALLS", "true", plain=True)
    assert built(builder, tmp_path).capture.all_apis is False


def test_only_listed_environment_variables_are_read(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.environment("CUDA_LAUNCH_BLOCKING", '"1"')
    builder.environment("AWS_SECRET_ACCESS_KEY", '"hunter2"')
    builder.environment("MY_CUDA_LAUNCH_BLOCKING", '"0"')
    capture = built(builder, tmp_path).capture
    assert capture.environment == {"CUDA_LAUNCH_BLOCKING": "1"}


def test_nvtx_ranges_marks_domains_and_registered_names(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.nvtx("early", -20, 5)
    builder.nvtx("step", 10, 20, domain="app", registered=True)
    builder.nvtx("point", 12, mark=True)
    builder.nvtx("open", 15)
    ranges = built(builder, tmp_path).nvtx_ranges
    columns = ("text", "start_ns", "end_ns", "domain", "mark")
    assert ranges.select(columns).rows() == [
        ("early", -20_000, 5_000, None, False),
        ("step", 10_000, 20_000, "app", False),
        ("point", 12_000, 12_000, None, True),
    ]


# The file ---------------------------------------------------------------------


def test_nothing_is_written_to_a_trace_or_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    shutil.copyfile(SAMPLES / "extra/misc.sqlite", path)
    before = path.read_bytes()
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        trace = open_trace(path)
        for name in FRAMES:
            getattr(trace, name)
        trace.close()
    finally:
        tmp_path.chmod(0o755)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_with_a_write_ahead_log_is_read_from_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "trace.sqlite"
    builder = small_run()
    builder.write(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA wal_autocheckpoint=0")
        db.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT * FROM (SELECT * "
            "FROM CUPTI_ACTIVITY_KIND_KERNEL LIMIT 1)"
        )
        db.commit()
        files = {file.name: file.read_bytes() for file in tmp_path.glob("*-wal")}
        assert files
        trace = open_trace(path)
        assert trace.kernels.height == 2
        trace.close()
        assert {f.name: f.read_bytes() for f in tmp_path.glob("*-wal")} == files


def test_text_in_a_number_column_is_null_not_an_error(tmp_path: Path) -> None:
    builder = small_run()
    builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"][0]["gridX"] = "many"
    kernels = built(builder, tmp_path).kernels
    assert kernels["grid_x"].to_list() == [None]

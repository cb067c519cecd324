"""The tables and columns of an nsys SQLite export that streamlint reads.

Nothing outside this list is ever read from a trace. Names and their history are
in the export's own schema (`nsys export --type sqlite`), builds 2020.3 to 2026.4.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """How a column is stored and what it becomes."""

    INT = "INTEGER, becomes Int64"
    ID = "INTEGER of 32 bits, signed or not, becomes Int32"
    TEXT = "TEXT, becomes String"
    BLOB = "BLOB, becomes Binary"
    STRING_ID = "INTEGER key of StringIds, becomes its String"
    NAME = "INTEGER key of StringIds with few values, becomes a Categorical"


NAMED = (Kind.STRING_ID, Kind.NAME)
"""Kinds of which the export stores keys of StringIds."""
WHOLE = (Kind.INT, Kind.ID, *NAMED)
"""Kinds that are stored as whole numbers."""


class Column(NamedTuple):
    """One column: the name in the frame and in the export.

    ``required`` columns make the table unusable where the export lacks them;
    the others become null.
    """

    name: str
    source: str
    kind: Kind = Kind.INT
    required: bool = False


class TraceTable(NamedTuple):
    """One table: its names in the export (newest first) and how to record it."""

    name: str
    sources: tuple[str, ...]
    columns: tuple[Column, ...]
    recorded_by: str = "-t cuda"


def _int(name: str, source: str, *, required: bool = False) -> Column:
    return Column(name, source, Kind.INT, required)


def _id(name: str, source: str, *, required: bool = False) -> Column:
    return Column(name, source, Kind.ID, required)


_INTERVAL = (
    _int("start_ns", "start", required=True),
    _int("end_ns", "end", required=True),
)
_PLACE = (
    _int("global_pid", "globalPid"),
    _id("device_id", "deviceId"),
    _id("context_id", "contextId"),
    _id("green_context_id", "greenContextId"),
    _id("stream_id", "streamId", required=True),
    _int("correlation_id", "correlationId"),
)

KERNELS = TraceTable(
    "kernels",
    ("CUPTI_ACTIVITY_KIND_KERNEL",),
    (
        *_INTERVAL,
        *_PLACE,
        Column("name", "shortName", Kind.NAME),
        Column("full_name", "demangledName", Kind.NAME),
        _int("graph_node_id", "graphNodeId"),
        _id("registers_per_thread", "registersPerThread"),
        _id("grid_x", "gridX"),
        _id("grid_y", "gridY"),
        _id("grid_z", "gridZ"),
        _id("block_x", "blockX"),
        _id("block_y", "blockY"),
        _id("block_z", "blockZ"),
        _id("static_shared_bytes", "staticSharedMemory"),
        _id("dynamic_shared_bytes", "dynamicSharedMemory"),
        _id("shared_executed_bytes", "sharedMemoryExecuted"),
    ),
)
MEMCPYS = TraceTable(
    "memcpys",
    ("CUPTI_ACTIVITY_KIND_MEMCPY",),
    (
        *_INTERVAL,
        *_PLACE,
        _int("size_bytes", "bytes", required=True),
        _id("copy_kind", "copyKind", required=True),
        _id("src_kind", "srcKind"),
        _id("dst_kind", "dstKind"),
        _int("graph_node_id", "graphNodeId"),
        _id("copy_count", "copyCount"),
    ),
)
MEMSETS = TraceTable(
    "memsets",
    ("CUPTI_ACTIVITY_KIND_MEMSET",),
    (
        *_INTERVAL,
        *_PLACE,
        _int("size_bytes", "bytes"),
        _id("mem_kind", "memKind"),
        _int("graph_node_id", "graphNodeId"),
    ),
)
GRAPH_TRACES = TraceTable(
    "graph_traces",
    ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE",),
    (
        *_INTERVAL,
        *_PLACE,
        _id("graph_exec_id", "graphExecId"),
    ),
    "-t cuda --cuda-graph-trace=graph",
)
GRAPH_NODES = TraceTable(
    "graph_nodes",
    ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS"),
    (
        *_INTERVAL,
        _int("global_tid", "globalTid"),
        _int("graph_node_id", "graphNodeId", required=True),
        _int("original_graph_node_id", "originalGraphNodeId"),
    ),
    "-t cuda --cuda-graph-trace=node",
)
RUNTIME_CALLS = TraceTable(
    "runtime_calls",
    ("CUPTI_ACTIVITY_KIND_RUNTIME",),
    (
        *_INTERVAL,
        _id("event_class", "eventClass"),
        _int("global_tid", "globalTid"),
        _int("correlation_id", "correlationId"),
        Column("name", "nameId", Kind.NAME, required=True),
        _id("return_value", "returnValue"),
        _id("callchain_id", "callchainId"),
    ),
)
SYNCHRONIZATIONS = TraceTable(
    "synchronizations",
    ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",),
    (
        *_INTERVAL,
        *_PLACE,
        _id("event_id", "eventId"),
        _int("event_sync_id", "eventSyncId"),
    ),
)
EVENT_RECORDS = TraceTable(
    "event_records",
    ("CUPTI_ACTIVITY_KIND_CUDA_EVENT",),
    (
        *_PLACE,
        _id("event_id", "eventId", required=True),
        _int("event_sync_id", "eventSyncId"),
    ),
)
STREAMS = TraceTable(
    "streams",
    ("TARGET_INFO_CUDA_STREAM",),
    (
        _id("stream_id", "streamId", required=True),
        _id("pid", "processId", required=True),
        _id("context_id", "contextId", required=True),
        _id("priority", "priority"),
        _id("flag", "flag"),
    ),
)
CONTEXTS = TraceTable(
    "contexts",
    ("TARGET_INFO_CUDA_CONTEXT_INFO",),
    (
        _id("pid", "processId", required=True),
        _id("device_id", "deviceId"),
        _id("context_id", "contextId", required=True),
        _id("null_stream_id", "nullStreamId"),
        _id("parent_context_id", "parentContextId"),
        _id("is_green", "isGreenContext"),
    ),
)
NULL_STREAMS = TraceTable(
    "null_streams",
    ("TARGET_INFO_CUDA_NULL_STREAM",),
    (
        _id("pid", "processId", required=True),
        _id("device_id", "deviceId"),
        _id("context_id", "contextId", required=True),
        _id("null_stream_id", "streamId", required=True),
    ),
)
GPUS = TraceTable(
    "gpus",
    ("TARGET_INFO_GPU",),
    (
        _id("gpu_id", "id", required=True),
        Column("name", "name", Kind.TEXT),
        _id("is_discrete", "isDiscrete"),
        _int("l2_bytes", "l2CacheSize"),
        _id("sm_count", "smCount"),
        _id("async_engines", "asyncEngines"),
        _id("compute_major", "computeMajor"),
        _id("max_warps_per_sm", "maxWarpsPerSm"),
        _id("max_blocks_per_sm", "maxBlocksPerSm"),
        _id("max_registers_per_sm", "maxRegistersPerSm"),
        _id("max_shared_bytes_per_sm", "maxShmemPerSm"),
    ),
)
DEVICE_MAP = TraceTable(
    "device_map",
    ("TARGET_INFO_CUDA_DEVICE",),
    (
        _id("gpu_id", "gpuId"),
        _id("device_id", "cudaId", required=True),
        _id("pid", "pid", required=True),
    ),
)
PROCESSES = TraceTable(
    "processes",
    ("PROCESSES",),
    (_id("pid", "pid", required=True), Column("name", "name", Kind.TEXT)),
)
THREADS = TraceTable(
    "threads",
    ("ThreadNames",),
    (_int("global_tid", "globalTid"), Column("name", "nameId", Kind.STRING_ID)),
)
NVTX_EVENTS = TraceTable(
    "nvtx_events",
    ("NVTX_EVENTS",),
    (
        _int("start_ns", "start", required=True),
        _int("end_ns", "end"),
        _id("event_type", "eventType", required=True),
        Column("text", "text", Kind.TEXT),
        Column("registered_text", "textId", Kind.STRING_ID),
        _int("global_tid", "globalTid"),
        _int("domain_id", "domainId"),
        _int("uint64_value", "uint64Value"),
        _int("int64_value", "int64Value"),
    ),
    "-t nvtx",
)
NVTX_PAYLOADS = TraceTable(
    "nvtx_payloads",
    ("NVTX_EVENTS",),
    (
        _int("start_ns", "start", required=True),
        _id("event_type", "eventType", required=True),
        _int("global_tid", "globalTid"),
        _int("domain_id", "domainId"),
        Column("json_text", "jsonText", Kind.TEXT),
        Column("binary_data", "binaryData", Kind.BLOB),
    ),
    "--cudabacktrace=all --python-backtrace=cuda",
)
MEMORY_EVENTS = TraceTable(
    "memory_events",
    ("CUDA_GPU_MEMORY_USAGE_EVENTS",),
    (
        _int("start_ns", "start", required=True),
        _int("global_pid", "globalPid"),
        _id("device_id", "deviceId"),
        _id("context_id", "contextId"),
        _int("address", "address"),
        _int("size_bytes", "bytes"),
        _id("mem_kind", "memKind"),
        _id("operation", "memoryOperationType"),
        _int("correlation_id", "correlationId"),
        _id("stream_id", "streamId"),
    ),
    "--cuda-memory-usage=true",
)
POOL_EVENTS = TraceTable(
    "pool_events",
    ("CUDA_GPU_MEMORY_POOL_EVENTS",),
    (
        _int("start_ns", "start", required=True),
        _int("global_pid", "globalPid"),
        _id("device_id", "deviceId"),
        _int("address", "address"),
        _id("operation", "operationType"),
        _int("correlation_id", "correlationId"),
        _int("size_bytes", "localMemoryPoolSize"),
    ),
    "--cuda-memory-usage=true",
)
NATIVE_STACKS = TraceTable(
    "native_stacks",
    ("CUDA_CALLCHAINS",),
    (
        _id("callchain_id", "id", required=True),
        _id("depth", "stackDepth", required=True),
        Column("symbol", "symbol", Kind.STRING_ID),
        Column("module", "module", Kind.STRING_ID),
        _id("unresolved", "unresolved"),
        _int("address", "originalIP"),
    ),
    "--cudabacktrace=all -s process-tree",
)
DIAGNOSTICS = TraceTable(
    "diagnostics",
    ("DIAGNOSTIC_EVENT",),
    (
        _int("timestamp_ns", "timestamp"),
        _id("severity", "severity"),
        Column("text", "text", Kind.TEXT),
    ),
)
OVERHEAD = TraceTable(
    "profiler_overhead",
    ("PROFILER_OVERHEAD",),
    (
        *_INTERVAL,
        _int("global_tid", "globalTid"),
        Column("name", "nameId", Kind.STRING_ID),
    ),
)
EXPORT_META = TraceTable(
    "export_meta",
    ("META_DATA_EXPORT", "EXPORT_META_DATA"),
    (Column("name", "name", Kind.TEXT), Column("value", "value", Kind.TEXT)),
)

TABLES: dict[str, TraceTable] = {
    table.name: table
    for table in (
        KERNELS,
        MEMCPYS,
        MEMSETS,
        GRAPH_TRACES,
        GRAPH_NODES,
        RUNTIME_CALLS,
        SYNCHRONIZATIONS,
        EVENT_RECORDS,
        STREAMS,
        CONTEXTS,
        NULL_STREAMS,
        GPUS,
        DEVICE_MAP,
        PROCESSES,
        THREADS,
        NVTX_EVENTS,
        NVTX_PAYLOADS,
        MEMORY_EVENTS,
        POOL_EVENTS,
        NATIVE_STACKS,
        DIAGNOSTICS,
        OVERHEAD,
        EXPORT_META,
    )
}

GROWING = (
    *(KERNELS, MEMCPYS, MEMSETS, RUNTIME_CALLS, SYNCHRONIZATIONS, EVENT_RECORDS),
    NVTX_EVENTS,
)
"""Tables that get rows for as long as a program runs."""

NEWEST_SCHEMA = (3, 28)
"""Newest export schema, major and minor, of which the changes are known (2026.4)."""

CAPTURE_OPTIONS = (
    "COLLECT_CUDA_TRACE",
    "COLLECT_NVTX_TRACE",
    "CAPTURE_EVENT_TYPE",
    "CUDA_SKIP_SOME_API_CALLS",
    "CUDA_GRAPH_TRACE_OPTIONS:MODE",
    "COLLECT_GPU_MEMORY_USAGE",
    "CUDA_BACKTRACE_OPTIONS:COLLECT_KERNEL_BACKTRACES",
    "CUDA_BACKTRACE_OPTIONS:COLLECT_MEMORY_BACKTRACES",
    "CUDA_BACKTRACE_OPTIONS:COLLECT_SYNCHRONOIZATION_BACKTRACES",
    "CUDA_BACKTRACE_OPTIONS:COLLECT_PYTHON_BACKTRACES",
    "TRACE_AFTER_FORK_BEFORE_EXEC",
)
"""Rows of META_DATA_CAPTURE that are read; the rest holds people's systems."""
ENVIRONMENT_VARIABLES = (
    "CUDA_DEVICE_DEFAULT_PERSISTING_L2_CACHE_PERCENTAGE_LIMIT",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
"""Environment variables that a rule may judge; no other is ever read."""

COPY_KINDS = {
    0: "unknown",
    1: "HtoD",
    2: "DtoH",
    3: "HtoD",
    4: "DtoH",
    5: "DtoD",
    6: "DtoD",
    7: "DtoD",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
    11: "HtoD",
    12: "DtoH",
    13: "DtoD",
}
"""ENUM_CUDA_MEMCPY_OPER; array forms count as device memory."""
MIGRATION_COPY_KINDS = (11, 12, 13)
"""Unified-memory migrations: page movement by the driver, not copies."""
MEM_KINDS = {
    0: "pageable",
    1: "pinned",
    2: "device",
    3: "array",
    4: "managed",
    5: "device",
    6: "managed",
    7: "unknown",
}
STREAM_KINDS = {0: "unknown", 1: "blocking", 2: "non-blocking", 3: "null"}
"""ENUM_CUPTI_STREAM_TYPE."""
BACKTRACE_EVENT_CLASS = 67
"""RUNTIME rows that repeat a call to carry its call stack."""
NVTX_RANGES = (59, 60, 70, 71)
"""Push/pop and start/end ranges; 70 and 71 are older forms."""
NVTX_MARK = 34
NVTX_DOMAIN = 75
NO_ID = -1
"""CUPTI's "not applicable" for stream, event and context ids: 32 bits, all set."""

"""What an nsys export looks like: table layouts (2025.3), ids and enumerations."""

from __future__ import annotations

import json
import re
import sqlite3
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
NO_ID = 4_294_967_295
COPY_KINDS = {"HtoD": 1, "DtoH": 2, "DtoD": 8, "HtoH": 9, "PtoP": 10}
MEM_KINDS = {"pageable": 0, "pinned": 1, "device": 2, "array": 3, "managed": 4}
SEVERITIES = {"info": 1, "warning": 2, "error": 3}
PYTHON_DOMAIN = "Python Backtrace on CUDA"

# "!" is NOT NULL; TEXT and REAL where it says so, else INTEGER.
_WHERE = "deviceId! contextId! greenContextId streamId! correlationId globalPid"
LAYOUT = {
    "StringIds": "id! value:TEXT!",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"start! end! {_WHERE} demangledName! shortName! "
    "mangledName launchType cacheConfig registersPerThread! gridX! gridY! gridZ! "
    "blockX! blockY! blockZ! staticSharedMemory! dynamicSharedMemory! "
    "localMemoryPerThread! localMemoryTotal! gridId! sharedMemoryExecuted graphNodeId "
    "sharedMemoryLimitConfig",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"start! end! {_WHERE} bytes! copyKind! "
    "deprecatedSrcId srcKind dstKind srcDeviceId srcContextId dstDeviceId dstContextId "
    "migrationCause graphNodeId virtualAddress copyCount",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"start! end! {_WHERE} value! bytes! graphNodeId "
    "memKind",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"start! end! {_WHERE} graphId! graphExecId!",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start! end! eventClass! globalTid correlationId "
    "nameId! returnValue! callchainId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"start! end! {_WHERE} deprecatedSyncType "
    "syncType! eventId! eventSyncId",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": f"{_WHERE} eventId! eventSyncId",
    "CUDA_GRAPH_NODE_EVENTS": "start! end! eventClass! globalTid nameId! graphNodeId! "
    "originalGraphNodeId",
    "CUDA_GPU_MEMORY_USAGE_EVENTS": "start! globalPid! deviceId! contextId! address! "
    "pc! bytes! memKind! memoryOperationType! name:TEXT correlationId streamId "
    "localMemoryPoolAddress localMemoryPoolReleaseThreshold localMemoryPoolSize "
    "localMemoryPoolUtilizedSize importedMemoryPoolAddress importedMemoryPoolProcessId",
    "CUDA_GPU_MEMORY_POOL_EVENTS": "start! globalPid! deviceId! address! "
    "operationType! poolType! correlationId minBytesToKeep "
    "localMemoryPoolReleaseThreshold localMemoryPoolSize localMemoryPoolUtilizedSize",
    "CUDA_CALLCHAINS": "id! symbol! module! unresolved originalIP stackDepth!",
    "NVTX_EVENTS": "start! end eventType! rangeId category color text:TEXT globalTid "
    "endGlobalTid textId domainId uint64Value int64Value doubleValue:REAL uint32Value "
    "int32Value floatValue:REAL jsonTextId jsonText:TEXT binaryData:TEXT",
    "DIAGNOSTIC_EVENT": "timestamp! timestampType! source! severity! text:TEXT! "
    "globalPid",
    "PROFILER_OVERHEAD": "start! end! globalTid nameId! returnValue!",
    "PROCESSES": "globalPid pid name:TEXT",
    "ThreadNames": "nameId! priority globalTid",
    "TARGET_INFO_CUDA_STREAM": "streamId! hwId! vmId! processId! contextId! priority! "
    "flag!",
    "TARGET_INFO_CUDA_CONTEXT_INFO": "nullStreamId! hwId! vmId! processId! deviceId! "
    "contextId! parentContextId isGreenContext",
    "TARGET_INFO_CUDA_NULL_STREAM": "streamId! hwId! vmId! processId! deviceId! "
    "contextId!",
    "TARGET_INFO_CUDA_DEVICE": "gpuId cudaId! pid!",
    "TARGET_INFO_GPU": "vmId! id! name:TEXT busLocation:TEXT isDiscrete l2CacheSize "
    "totalMemory smCount uuid:TEXT chipName:TEXT maxShmemPerSm maxRegistersPerSm "
    "threadsPerWarp asyncEngines maxWarpsPerSm maxBlocksPerSm computeMajor "
    "computeMinor",
    "META_DATA_CAPTURE": "name:TEXT! value:TEXT",
    "META_DATA_EXPORT": "name:TEXT! value:TEXT",
}
H200 = {
    **{"name": "NVIDIA H200", "busLocation": "0000:00:06.0", "isDiscrete": 1},
    **{"l2CacheSize": 62_914_560, "totalMemory": 150_109_880_320, "smCount": 132},
    **{"uuid": "00000000-0000-0000-0000-000000000000", "chipName": "GH100"},
    **{"maxShmemPerSm": 233_472, "maxRegistersPerSm": 65_536, "threadsPerWarp": 32},
    **{"asyncEngines": 3, "maxWarpsPerSm": 64, "maxBlocksPerSm": 32},
    **{"computeMajor": 9, "computeMinor": 0},
}
VERSIONS = {
    "2022.4": ("2022.4.2.1", "3.0.0"),
    "2023.4": ("2023.4.4.54", "3.7.2"),
    "2024.2": ("2024.2.3.38", "3.11.1"),
    "2025.3": ("2025.3.2.0", "3.20.3"),
    "2026.2": ("2026.2.1.210", "3.25.0"),
}
_SUFFIXES = {
    "_v4000": r"cudaHost(Unr|R)egister|cudaMemcpyPeer|cudaPointerGetAttributes",
    "_v5000": r"cudaStreamCreateWithFlags|cudaStreamAddCallback",
    "_v5050": r"cudaStreamCreateWithPriority|cudaStreamDestroy",
    "_v6000": r"cudaMallocManaged",
    "_v7000": r"cudaLaunchKernel$",
    "_v9000": r"cudaLaunchCooperativeKernel|cudaFuncSetAttribute",
    "_v10000": r"cudaGraph(Launch|Destroy|ExecDestroy|Upload)|cudaLaunchHostFunc"
    r"|cudaStream(Begin|End|Is)Captur",
    "_v10020": r"cudaGraphExecUpdate",
    "_v11000": r"cudaStreamSetAttribute|cudaCtxResetPersistingL2Cache",
    "_v11010": r"cudaEventRecordWithFlags",
    "_v11020": r"cudaMallocAsync|cudaFreeAsync|cudaMallocFromPoolAsync|cudaMemPool",
    "_v11060": r"cudaLaunchKernelExC",
    "_v12000": r"cudaGraphInstantiate|cudaGetDeviceProperties",
    "_v12020": r"cudaMemPrefetchAsync",
    "_v12080": r"cudaEventElapsedTime",
    "_v13000": r"cudaMemcpyBatchAsync",
}


def api_name(name: str, *, per_thread: bool = False) -> str:
    """The name with the suffix that nsys records; one with a suffix stays."""
    if not name.startswith("cuda") or re.search(r"_v\d+$", name):
        return name
    if per_thread:
        waits = re.match(r"cuda(Memcpy|Memset)(?!.*Async)", name)
        return f"{name}_{'ptds' if waits else 'ptsz'}_v7000"
    found = (s for s, names in _SUFFIXES.items() if re.match(names, name))
    return name + next(found, "_v3020")


def python_payload(keys: Sequence[tuple[int, int, int]], *, as_json: bool) -> Row:
    """The columns of an NVTX event that hold Python frames."""
    size = 16 + 24 * len(keys)
    blob = struct.pack("<4QQII", 1, 4_294_967_301, size, 32, 1, 1, len(keys))
    # Real ones hold whatever was in memory in the last four bytes of a frame.
    blob += b"".join(
        struct.pack("<QQI", *frame) + b"\xc5\x03\x7f\x01" for frame in keys
    )
    if not as_json:
        return {"binaryData": blob}
    names = ("Function", "File", "Line")
    stack = {"Thread state ID": 1, "Thread state": "Running", "Frames count": len(keys)}
    frames = [dict(zip(names, frame, strict=True)) for frame in keys]
    text = json.dumps({PYTHON_DOMAIN: {**stack, "Frames": frames}})
    return {"jsonText": text, "binaryData": blob}


Layout = Mapping[str, Sequence[str]]


class Build(NamedTuple):
    """One nsys that exported: its schema, and its tables with their columns.

    Exports leave out tables without rows, so an old one may lack what its nsys knew.
    """

    product: str
    schema: str | None
    layout: Layout


def builds() -> dict[str, Build]:
    """Builds of nsys by product version, oldest first, from real exports."""
    path = Path(__file__).parent / "data/schema_columns.json"
    stored = json.loads(path.read_text("utf-8"))

    def columns(name: str) -> list[str]:
        table, _, variant = name.partition("#")
        text: str = stored["tables"][table][int(variant or 0)]
        return text.split()

    return {
        product: Build(
            product,
            build["schema"],
            {t.partition("#")[0]: columns(t) for t in build["tables"].split()},
        )
        for product, build in stored["builds"].items()
    }


def column_names(columns: Sequence[str]) -> list[str]:
    """The bare names of the columns of a layout."""
    return [re.split("[:!]", column)[0] for column in columns]


def write_tables(
    path: Path,
    layout: Layout,
    rows: Mapping[str, Sequence[Row]],
    *,
    empty: bool = False,
) -> None:
    """A database with the tables of ``layout`` that have rows, or with all of them."""
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA synchronous=OFF")
        for table, columns in layout.items():
            if empty or rows.get(table):
                _write_table(db, table, columns, rows.get(table, ()))
        db.commit()


def _default(column: str) -> int | str | None:
    if not column.endswith("!"):
        return None
    return "" if ":TEXT" in column else 0


def _write_table(
    db: sqlite3.Connection, table: str, columns: Sequence[str], rows: Sequence[Any]
) -> None:
    names = column_names(columns)
    declared = []
    for name, column in zip(names, columns, strict=True):
        kind = column.partition(":")[2].rstrip("!") or "INTEGER"
        null = " NOT NULL" if column.endswith("!") else ""
        key = " PRIMARY KEY" if (table, name) == ("StringIds", "id") else ""
        declared.append(f'"{name}" {kind}{null}{key}')
    empty = [_default(column) for column in columns]
    db.execute(f'CREATE TABLE "{table}" ({", ".join(declared)})')
    marks = ", ".join("?" * len(names))
    db.executemany(
        f'INSERT INTO "{table}" VALUES ({marks})',
        [[r.get(n, e) for n, e in zip(names, empty, strict=True)] for r in rows],
    )

"""Writes small nsys SQLite exports (2025.3 layout) for tests.

    b = TraceBuilder()                      # pid 100, tid 101, device 0, context 1
    b.stream(13)                            # flag 1 blocking, 2 non-blocking
    b.kernel("step", stream=13, start=20, end=60, issue=(10, 14))
    b.memcpy("HtoD", 4096, src="pageable", stream=13, start=70, end=72)
    b.sync("cudaStreamSynchronize", stream=13, start=30, end=75)
    with b.at(tid=102):                     # another thread (or pid=, context=)
        b.call("cudaMalloc", 80, 5)         # returns the correlation id
    trace = open_trace(b.write(tmp_path / "t.sqlite"))

Times are microseconds (ns in the file). An operation gets a call of its own: just
before it, at ``issue=(start, end)``, none with ``issue=None``, or that of ``call=id``.
Tables are written only if they have rows, and of a row only what the layout in
``b.layout`` has: change that for other versions; `row` adds anything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from nsys_layout import (
    COPY_KINDS,
    H200,
    LAYOUT,
    MEM_KINDS,
    NO_ID,
    PYTHON_DOMAIN,
    SEVERITIES,
    VERSIONS,
    Build,
    Row,
    api_name,
    python_payload,
    write_tables,
)

Span = tuple[float, float]
Issue = Span | Literal["before"] | None
Frame = tuple[str, str, int]


def ns(us: float) -> int:
    return round(us * 1000)


@dataclass(frozen=True)
class _Place:
    pid: int
    tid: int
    device: int
    context: int

    @property
    def global_pid(self) -> int:
        return 1 << 48 | self.pid << 24

    @property
    def global_tid(self) -> int:
        return self.global_pid | self.tid


@dataclass
class _Process:
    next_id: int = 1
    next_sync_id: int = 1
    domains: dict[str, int] = field(default_factory=dict)
    recorded: dict[int, int] = field(default_factory=dict)  # event id -> sync id


class TraceBuilder:
    def __init__(
        self,
        schema: str = "2025.3",
        *,
        pid: int = 100,
        tid: int = 101,
        process: str = "./app",
        gpus: int = 1,
    ) -> None:
        self.schema = schema
        self.layout = {table: text.split() for table, text in LAYOUT.items()}
        self.rows: dict[str, list[Row]] = {}
        self._strings: dict[str, int] = {}
        self._processes: dict[int, _Process] = {}
        self._here = _Place(pid, tid, 0, 1)
        self._options = {
            "COLLECT_CUDA_TRACE": "true",
            "COLLECT_NVTX_TRACE": "true",
            "CUDA_SKIP_SOME_API_CALLS": "true",
            "COLLECT_GPU_MEMORY_USAGE": "false",
            "CUDA_GRAPH_TRACE_OPTIONS:MODE": "Graph",
        }
        self.string("[Unknown]")  # no export is without strings
        for index in range(gpus):
            self.row("TARGET_INFO_GPU", **H200, vmId=1 << 48, id=index)
        self.process(pid, process)

    # Who and where ------------------------------------------------------------

    def process(
        self, pid: int, name: str | None = "./app", *, device: int = 0, gpu: int = 0
    ) -> None:
        """A process whose ``device`` is the physical ``gpu``, with context 1."""
        self._processes[pid] = _Process()
        with self.at(pid=pid, device=device):
            here = self._here
            if name is not None:
                self.row("PROCESSES", globalPid=here.global_pid, pid=pid, name=name)
            self.row("TARGET_INFO_CUDA_DEVICE", gpuId=gpu, cudaId=device, pid=pid)
            self.context(1, null_stream=7, device=device)

    def context(
        self, context: int, *, null_stream: int, device: int = 0, green: bool = False
    ) -> None:
        with self.at(device=device, context=context):
            self.row(
                "TARGET_INFO_CUDA_CONTEXT_INFO",
                **self._ids(context=context, device=device),
                nullStreamId=null_stream,
                parentContextId=1 if green else 0,
                isGreenContext=int(green),
            )
            self.stream(null_stream, flag=3)

    def stream(self, stream: int, *, flag: int = 1, priority: int = 0) -> None:
        """flag: 0 unknown, 1 blocking, 2 non-blocking, 3 null."""
        ids = self._ids(context=self._here.context)
        priority %= 1 << 32
        self.row(
            "TARGET_INFO_CUDA_STREAM",
            **{**ids, "streamId": stream, "priority": priority, "flag": flag},
        )

    @contextmanager
    def at(
        self,
        *,
        pid: int | None = None,
        tid: int | None = None,
        device: int | None = None,
        context: int | None = None,
    ) -> Iterator[TraceBuilder]:
        """Everything in the block belongs there; tid of another pid is pid + 1."""
        before = self._here
        if pid is not None and pid != before.pid:
            tid = pid + 1 if tid is None else tid
        given = {"pid": pid, "tid": tid, "device": device, "context": context}
        self._here = replace(
            before, **{k: v for k, v in given.items() if v is not None}
        )
        try:
            yield self
        finally:
            self._here = before

    def thread(self, name: str) -> None:
        self.row(
            "ThreadNames",
            nameId=self.string(name),
            priority=20,
            globalTid=self._here.global_tid,
        )

    # Host ---------------------------------------------------------------------

    def call(
        self,
        name: str,
        start: float,
        duration: float = 2.0,
        *,
        return_value: int = 0,
        correlation_id: int | None = None,
        per_thread: bool = False,
    ) -> int:
        """A CUDA API call; returns its correlation id."""
        if correlation_id is None:
            correlation_id = self.new_id()
        self._check(start, start + duration)
        self.row(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=ns(start),
            end=ns(start + duration),
            eventClass=0 if name.startswith("cuda") else 1,
            globalTid=self._here.global_tid,
            correlationId=correlation_id,
            nameId=self.string(api_name(name, per_thread=per_thread)),
            returnValue=return_value,
        )
        return correlation_id

    def new_id(self) -> int:
        """The next correlation id; also makes the hole of an unrecorded call."""
        process = self._processes[self._here.pid]
        process.next_id += 1
        return process.next_id - 1

    def sync(
        self,
        name: str,
        stream: int | None = None,
        start: float = 0.0,
        end: float = 0.0,
        *,
        event: int | None = None,
        sync_id: int | None = None,
        per_thread: bool = False,
    ) -> int:
        """A waiting call with its row: of a stream, of an event, else a context."""
        call = self.call(name, start, end - start, per_thread=per_thread)
        self._sync_row(call, start, end, stream, event, sync_id)
        return call

    def device_sync(self, start: float, end: float) -> int:
        """cudaDeviceSynchronize; it leaves no synchronization row."""
        return self.call("cudaDeviceSynchronize", start, end - start)

    def event_record(
        self, stream: int, event: int, at: float, sync_id: int | None = None
    ) -> int:
        call = self.call("cudaEventRecord", at)
        process = self._processes[self._here.pid]
        if sync_id is None:
            sync_id = process.next_sync_id
            process.next_sync_id += 1
        process.recorded[event] = sync_id
        self.row(
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
            **self._op_ids(stream, call),
            eventId=event,
            eventSyncId=sync_id,
        )
        return call

    def event_wait(
        self, stream: int, event: int, at: float, sync_id: int | None = None
    ) -> int:
        """cudaStreamWaitEvent for the latest record, or an unrecorded event (0)."""
        name = "cudaStreamWaitEvent"
        return self.sync(name, stream, at, at + 2, event=event, sync_id=sync_id)

    def stream_query(self, stream: int, at: float, duration: float = 1.0) -> None:
        """cudaStreamQuery: only a synchronization row, no call."""
        self._sync_row(self.new_id(), at, at + duration, stream, None, None)

    def backtrace(
        self,
        call: int,
        frames: Sequence[Frame] = (),
        *,
        native: Sequence[tuple[str, str]] = (),
        as_json: bool = True,
        chain: int | None = None,
    ) -> None:
        """Call stacks of a call, innermost first: (function, file, line), (symbol,
        module). Adds the class-67 row, the call chain and the NVTX payload."""
        here = self._here
        calls = self.rows["CUPTI_ACTIVITY_KIND_RUNTIME"]
        names = {key: text for text, key in self._strings.items()}
        row = next(
            r
            for r in calls
            if r["correlationId"] == call
            and r["globalTid"] >> 24 == here.global_pid >> 24
        )
        if chain is None:
            chain = len({r["id"] for r in self.rows.get("CUDA_CALLCHAINS", ())})
        copied = {**row, "start": row["start"] - 100, "end": row["end"] + 100}
        name = re.sub(r"(_ptsz|_ptds)?(_v\d+)?$", "", names[row["nameId"]])
        copied |= {"eventClass": 67, "nameId": self.string(name), "callchainId": chain}
        calls.append(copied)
        for depth, (symbol, module) in enumerate(native):
            self.row(
                "CUDA_CALLCHAINS",
                **{"id": chain, "stackDepth": depth, "unresolved": 0},
                symbol=self.string(symbol),
                module=self.string(module),
                originalIP=140_000_000_000_000 + depth,
            )
        if frames:
            self._options["CUDA_BACKTRACE_OPTIONS:COLLECT_PYTHON_BACKTRACES"] = "true"
            keys = [(self.string(f), self.string(p), line) for f, p, line in frames]
            self.row(
                "NVTX_EVENTS",
                start=copied["start"],
                eventType=34,
                globalTid=row["globalTid"],
                domainId=self._domain(PYTHON_DOMAIN),
                **python_payload(keys, as_json=as_json),
            )

    def nvtx(
        self,
        text: str,
        start: float,
        end: float | None = None,
        *,
        domain: str | None = None,
        mark: bool = False,
        value: int | None = None,
        registered: bool = False,
    ) -> None:
        """A push/pop range (open without ``end``) or, with ``mark``, a mark."""
        named = {"textId": self.string(text)} if registered else {"text": text}
        self.row(
            "NVTX_EVENTS",
            start=ns(start),
            end=None if mark or end is None else ns(end),
            eventType=34 if mark else 59,
            globalTid=self._here.global_tid,
            domainId=self._domain(domain) if domain else 0,
            uint64Value=value,
            **named,
        )

    # GPU ----------------------------------------------------------------------

    def kernel(
        self,
        name: str = "kernel",
        *,
        stream: int,
        start: float,
        end: float,
        issue: Issue = "before",
        call: int | None = None,
        api: str = "cudaLaunchKernel",
        grid: tuple[int, int, int] = (8, 1, 1),
        block: tuple[int, int, int] = (128, 1, 1),
        registers: int = 32,
        shared: tuple[int, int] = (0, 0),
        graph_node: int | None = None,
        **more: Any,
    ) -> int:
        """``shared`` is static and dynamic bytes; returns the correlation id."""
        call = self._issued(api, issue, call, start, end)
        short = re.sub(r"[<(].*", "", name)
        columns = {
            **{"demangledName": self.string(name), "shortName": self.string(short)},
            **{"launchType": 1, "cacheConfig": 1, "registersPerThread": registers},
            **dict(zip(("gridX", "gridY", "gridZ"), grid, strict=True)),
            **dict(zip(("blockX", "blockY", "blockZ"), block, strict=True)),
            **{"staticSharedMemory": shared[0], "dynamicSharedMemory": shared[1]},
            **{"sharedMemoryExecuted": 32_768, "graphNodeId": graph_node, **more},
        }
        self._op("KERNEL", stream, start, end, call, columns)
        return call

    def memcpy(
        self,
        kind: str,
        size: int,
        *,
        stream: int,
        start: float,
        end: float,
        src: str | None = None,
        dst: str | None = None,
        issue: Issue = "before",
        call: int | None = None,
        api: str = "cudaMemcpyAsync",
        graph_node: int | None = None,
        **more: Any,
    ) -> int:
        """Pinned on the host side unless ``src`` or ``dst`` say otherwise."""
        call = self._issued(api, issue, call, start, end)
        src = src or ("pinned" if kind in ("HtoD", "HtoH") else "device")
        dst = dst or ("pinned" if kind in ("DtoH", "HtoH") else "device")
        columns = {
            **{"bytes": size, "copyKind": COPY_KINDS[kind], "copyCount": 1},
            **{"srcKind": MEM_KINDS[src], "dstKind": MEM_KINDS[dst]},
            **{"graphNodeId": graph_node, **more},
        }
        self._op("MEMCPY", stream, start, end, call, columns)
        return call

    def memset(
        self,
        size: int,
        *,
        stream: int,
        start: float,
        end: float,
        kind: str = "device",
        issue: Issue = "before",
        call: int | None = None,
        api: str = "cudaMemsetAsync",
        graph_node: int | None = None,
    ) -> int:
        call = self._issued(api, issue, call, start, end, waits=False)
        columns = {"bytes": size, "memKind": MEM_KINDS[kind], "graphNodeId": graph_node}
        self._op("MEMSET", stream, start, end, call, columns)
        return call

    def graph_launch(self, start: float, duration: float = 5.0) -> int:
        """The call alone: its nodes are operations or a graph trace with this call."""
        return self.call("cudaGraphLaunch", start, duration)

    def graph_trace(
        self,
        *,
        stream: int,
        start: float,
        end: float,
        issue: Issue = "before",
        call: int | None = None,
        graph: int = 1,
        graph_exec: int = 2,
    ) -> int:
        call = self._issued("cudaGraphLaunch", issue, call, start, end)
        columns = {"graphId": graph, "graphExecId": graph_exec}
        self._op("GRAPH_TRACE", stream, start, end, call, columns)
        return call

    def graph_node(self, node: int, at: float, original: int | None = None) -> None:
        """The creation of a graph node; ``node`` is graph id << 32 | number."""
        self.row(
            "CUDA_GRAPH_NODE_EVENTS",
            **{"start": ns(at), "end": ns(at), "eventClass": 77},
            **{"graphNodeId": node, "originalGraphNodeId": original},
            globalTid=self._here.global_tid,
            nameId=self.string("CUDA Graph Node Creation"),
        )

    # Memory and the profiler ----------------------------------------------------

    def memory_event(
        self,
        operation: Literal["allocation", "deallocation"],
        size: int,
        at: float,
        *,
        call: int | None = None,
        kind: str = "device",
        stream: int | None = None,
        address: int = 0x7F00_0000_0000,
        **more: Any,
    ) -> None:
        self._options["COLLECT_GPU_MEMORY_USAGE"] = "true"
        here = self._here
        columns = {
            **{"start": ns(at), "globalPid": here.global_pid, "deviceId": here.device},
            **{"contextId": here.context, "address": address, "bytes": size},
            **{"memKind": MEM_KINDS[kind], "streamId": stream, "correlationId": call},
            **{"memoryOperationType": int(operation == "deallocation"), **more},
        }
        self.row("CUDA_GPU_MEMORY_USAGE_EVENTS", **columns)

    def pool_event(
        self,
        operation: Literal["created", "destroyed", "trimmed"],
        at: float,
        *,
        call: int | None = None,
        size: int = 0,
        used: int = 0,
        threshold: int = 0,
        address: int = 0x7E00_0000_0000,
    ) -> None:
        here = self._here
        kinds = {"created": 1, "destroyed": 2, "trimmed": 3}
        columns = {
            **{"start": ns(at), "globalPid": here.global_pid, "deviceId": here.device},
            **{"address": address, "operationType": kinds[operation], "poolType": 1},
            **{"correlationId": call, "localMemoryPoolReleaseThreshold": threshold},
            **{"localMemoryPoolSize": size, "localMemoryPoolUtilizedSize": used},
        }
        self.row("CUDA_GPU_MEMORY_POOL_EVENTS", **columns)

    def overhead(self, name: str, start: float, end: float) -> None:
        self.row(
            "PROFILER_OVERHEAD",
            **{"start": ns(start), "end": ns(end), "nameId": self.string(name)},
            globalTid=self._here.global_tid,
        )

    def diagnostic(self, severity: str | int, text: str, at: float = 0.0) -> None:
        level = severity if isinstance(severity, int) else SEVERITIES[severity]
        columns = {"timestamp": ns(at), "timestampType": 1, "source": 2, "text": text}
        self.row(
            "DIAGNOSTIC_EVENT",
            **{**columns, "severity": level, "globalPid": self._here.global_pid},
        )

    def option(self, name: str, value: str | None, *, plain: bool = False) -> None:
        """A capture option (None takes it out); ``plain`` is without PROCESS_0."""
        if plain:
            self.row("META_DATA_CAPTURE", name=name, value=value)
        else:
            self._options.pop(name, None)
            if value is not None:
                self._options[name] = value

    def environment(self, name: str, value: str) -> None:
        text = f"{name}={value}"
        self.option("PROCESS_0:ENVIRONMENT_VARIABLE", text, plain=True)

    # The file -------------------------------------------------------------------

    def row(self, table: str, **columns: Any) -> None:
        """A row as it is stored: export column names, nanoseconds."""
        self.rows.setdefault(table, []).append(columns)

    def string(self, text: str) -> int:
        """The StringIds key of a text."""
        return self._strings.setdefault(text, len(self._strings) + 16)

    def write(self, path: Path) -> Path:
        """Write the export; the builder stays usable."""
        product, version = VERSIONS[self.schema]
        write_tables(path, self.layout, self._all_rows(product, version))
        return path

    def write_as(self, build: Build, path: Path) -> Path:
        """Write the exact tables and columns of a build, with what fits of the rows."""
        rows = self._all_rows(build.product, build.schema or "")
        rows["EXPORT_META_DATA"] = rows["META_DATA_EXPORT"]
        rows["TARGET_INFO_CUDA_NULL_STREAM"] = [
            {**row, "streamId": row["nullStreamId"]}
            for row in rows["TARGET_INFO_CUDA_CONTEXT_INFO"]
        ]
        if "graphNodeId!" in build.layout.get("CUDA_GRAPH_EVENTS", ()):
            rows["CUDA_GRAPH_EVENTS"] = rows.get("CUDA_GRAPH_NODE_EVENTS", [])
        write_tables(path, build.layout, rows, empty=True)
        return path

    def _all_rows(self, product: str, version: str) -> dict[str, list[Row]]:
        export = {
            "EXPORT_PRODUCT_VERSION": product,
            "EXPORT_SCHEMA_VERSION": version,
            "EXPORT_PARAM_LAZY": "true",
            "EXPORT_PARAM_TABLES_TO_EXPORT": "",
            "EXPORT_PARAM_TIMES_TO_EXPORT": "",
        }
        kinds = ["NvtxEvents", "Cuda"]
        if "CAPTURE_EVENT_TYPE" in self._options:
            kinds = [self._options["CAPTURE_EVENT_TYPE"]]
        options = [("CAPTURE_EVENT_TYPE", kind) for kind in kinds]
        options += [(f"PROCESS_0:{k}", v) for k, v in self._options.items()]
        return {
            **self.rows,
            "StringIds": [{"id": k, "value": v} for v, k in self._strings.items()],
            "META_DATA_EXPORT": _pairs(export.items()),
            "META_DATA_CAPTURE": _pairs(options)
            + self.rows.get("META_DATA_CAPTURE", []),
        }

    def _ids(self, **more: int) -> dict[str, int]:
        ids = {"hwId": 0, "vmId": 1, "processId": self._here.pid}
        return {**ids, **{f"{name}Id": value for name, value in more.items()}}

    def _op_ids(self, stream: int, call: int) -> dict[str, int]:
        here = self._here
        return {
            **{"deviceId": here.device, "contextId": here.context, "streamId": stream},
            **{"greenContextId": 0, "globalPid": here.global_pid},
            "correlationId": call,
        }

    def _op(
        self,
        table: str,
        stream: int,
        start: float,
        end: float,
        call: int,
        columns: dict[str, Any],
    ) -> None:
        self._check(start, end)
        ids = {**self._op_ids(stream, call), "start": ns(start), "end": ns(end)}
        self.row(f"CUPTI_ACTIVITY_KIND_{table}", **{**ids, **columns})

    def _issued(
        self,
        api: str,
        issue: Issue,
        call: int | None,
        start: float,
        end: float,
        *,
        waits: bool = True,
    ) -> int:
        if call is not None:
            return call
        if issue is None:
            return self.new_id()
        if issue == "before":
            blocks = waits and re.match(r"cu(da)?Memcpy(?!.*Async)", api)
            issue = (start - 3, end + 2 if blocks else start - 1)
        return self.call(api, issue[0], issue[1] - issue[0])

    def _sync_row(
        self,
        call: int,
        start: float,
        end: float,
        stream: int | None,
        event: int | None,
        sync_id: int | None,
    ) -> None:
        recorded = self._processes[self._here.pid].recorded
        if sync_id is None:
            sync_id = NO_ID if event is None else recorded.get(event, 0)
        kinds = {(False, False): 4, (True, False): 2, (False, True): 1, (True, True): 2}
        self.row(
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
            **self._op_ids(NO_ID if stream is None else stream, call),
            **{"start": ns(start) + 100, "end": ns(end) - 100},
            syncType=kinds[stream is not None, event is not None],
            eventId=NO_ID if event is None else event,
            eventSyncId=sync_id,
        )

    def _domain(self, name: str) -> int:
        here = self._here
        domains = self._processes[here.pid].domains
        if name not in domains:
            domains[name] = len(domains) + 1
            columns = {"eventType": 75, "text": name, "domainId": domains[name]}
            self.row("NVTX_EVENTS", start=1, globalTid=here.global_tid, **columns)
        return domains[name]

    @staticmethod
    def _check(start: float, end: float) -> None:
        if not 0 < start <= end:
            raise ValueError(f"readers drop a row from {start} to {end}: use row()")


def _pairs(items: Any) -> list[Row]:
    return [{"name": name, "value": value} for name, value in items]

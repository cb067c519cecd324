"""Writes large nsys SQLite exports (2025.3 layout) with a schedule that makes sense.

    .venv/bin/python benchmarks/make_trace.py OUT.sqlite --kernels 1000000

Every process repeats an iteration: two host threads in turn issue work to several
streams, copy, record and await events, wait, and end with cudaDeviceSynchronize.
Operations start after their issue, their stream, the NULL-stream barriers, events
and copy engine; the kernels of all streams fit on the GPU together; host waits end
after what they wait for. Iterations start with an idle GPU, so all of them are
scheduled side by side, one numpy step an action. Each process has a GPU of its own
and counts its correlation ids from 1. The same arguments give the same file.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from nsys_layout import H200, LAYOUT, NO_ID, VERSIONS, api_name  # noqa: E402

Int64 = NDArray[np.int64]
Bools = NDArray[np.bool_]
Columns = Mapping[str, Any]
"""Of one table: arrays or lists of a length, and values that all rows share."""

COPIES, SETS, STREAM_SYNCS, EVENT_SYNCS = 0.14, 0.08, 0.02, 0.01
RECORDS, EVENT_WAITS = 0.03, 0.02
"""Actions a kernel."""
NAMED, TRACED_BACK = 0.75, 0.12
"""Launches with a cuKernelGetName before them; calls with a call stack."""
ACTIONS = 320
"""In an iteration; half of them from the second thread."""
RANGE = 20
"""Actions in an NVTX range."""
GRAPH = 8
"""Kernels of a CUDA graph; a group of this many actions is one graph or none."""
GRAPH_SHARE = 0.2
PAGEABLE = 0.1
"""Part of the copies to and from the host."""
EVENTS = 4
"""Event objects of a process."""
NULL_STREAM, FIRST_STREAM = 7, 13
FIRST_PID = 4_000
KERNELS = 24
STACKS, FRAMES = 48, 12
CHUNKS = 64
"""The tables grow in turns, as nsys writes them: their pages interleave."""

# What an action does.
NOTHING, KERNEL, GRAPH_NODE, HTOD, DTOH, DTOD, MEMSET = range(7)
RECORD, EVENT_WAIT, STREAM_SYNC, EVENT_SYNC, DEVICE_SYNC = range(7, 12)
CALLS = {
    KERNEL: "cudaLaunchKernel",
    GRAPH_NODE: "cudaGraphLaunch",
    HTOD: "cudaMemcpyAsync",
    DTOH: "cudaMemcpyAsync",
    DTOD: "cudaMemcpyAsync",
    MEMSET: "cudaMemsetAsync",
    RECORD: "cudaEventRecord",
    EVENT_WAIT: "cudaStreamWaitEvent",
    STREAM_SYNC: "cudaStreamSynchronize",
    EVENT_SYNC: "cudaEventSynchronize",
    DEVICE_SYNC: "cudaDeviceSynchronize",
}
CALL_NS = {
    **{KERNEL: 5_000, GRAPH_NODE: 9_000, MEMSET: 4_500, RECORD: 1_200},
    **{HTOD: 5_500, DTOH: 5_500, DTOD: 5_500, EVENT_WAIT: 1_100},
    **{STREAM_SYNC: 1_500, EVENT_SYNC: 1_400, DEVICE_SYNC: 2_000},
}
COPY_KINDS = {HTOD: 1, DTOH: 2, DTOD: 8}
THINK_NS, HANDOVER_NS = 2_500, 8_000
ISSUE_NS, GAP_NS, BARRIER_NS, EVENT_NS, ENGINE_NS = 900, 900, 1_300, 2_000, 1_000
RETURN_NS = 3_000
STAGED_BYTES = 1 << 20
COPY_BASE_NS, PINNED_RATE, PAGEABLE_RATE = 1_500, 50.0, 12.0
BLOCK_THREADS, BLOCKS_AT_ONCE = 256, 132 * 8


class Shape(NamedTuple):
    """What to generate."""

    kernels: int
    streams: int = 6
    processes: int = 2
    graphs: bool = False
    osrt: bool = False
    seed: int = 0


class Plan(NamedTuple):
    """What a process does; arrays of iterations by actions."""

    kind: Int64
    stream: Int64
    head: Bools
    think: Int64
    named: Bools
    call: Int64
    tail: Int64
    gap: Int64
    back: Int64
    duration: Int64
    size: Int64
    pageable: Bools
    event: Int64
    name: Int64


class Times(NamedTuple):
    """When it happens, ns from the start of the process."""

    call_start: Int64
    call_end: Int64
    start: Int64
    end: Int64


def write_trace(path: Path, shape: Shape) -> None:
    """Write the export; an older one of this name is replaced."""
    rng = np.random.default_rng(shape.seed)
    strings = Strings()
    parts = [_process(rng, shape, index, strings) for index in range(shape.processes)]
    tables: dict[str, Columns] = {
        name: _joined([part[name] for part in parts]) for name in parts[0]
    }
    tables.update(_small_tables(shape, strings))
    tables["StringIds"] = {"id": list(strings.ids.values()), "value": list(strings.ids)}
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA synchronous=OFF")
        db.execute("PRAGMA journal_mode=OFF")
        for name, columns in tables.items():
            _create(db, name, columns)
        for chunk in range(CHUNKS):
            for name, columns in tables.items():
                _insert(db, name, columns, chunk)
        db.commit()


# What happens --------------------------------------------------------------------


def _plan(rng: np.random.Generator, shape: Shape, kernels: int) -> Plan:
    kind = _kinds(rng, shape, kernels)
    size = kind.shape
    width = size[1]

    def around(usual: float, spread: float = 0.12) -> Int64:
        values: Int64 = (usual * rng.lognormal(0.0, spread, size)).astype(np.int64)
        return values

    # Stream 0 is the NULL stream; the first of the others gets most work.
    weights = np.array([0.1, *np.linspace(2.0, 0.5, shape.streams - 1)])
    stream = rng.choice(shape.streams, size, p=weights / weights.sum())
    in_graph = kind == GRAPH_NODE
    head = ~in_graph | (np.arange(width) % GRAPH == 0)
    leader = np.arange(width) // GRAPH * GRAPH
    stream = np.where(in_graph, np.maximum(stream, 1)[:, leader], stream)
    think = rng.exponential(THINK_NS, size).astype(np.int64) + 300
    think[:, (0, ACTIONS // 2)] += around(HANDOVER_NS)[:, :2]
    name = rng.integers(0, KERNELS, size)
    usual = np.exp(np.random.default_rng(1).uniform(np.log(4e3), np.log(8e4), KERNELS))
    log_bytes = rng.uniform(np.log(4 << 10), np.log(4 << 20), size)
    copied = np.exp(log_bytes).astype(np.int64) & ~255
    to_host = (kind == HTOD) | (kind == DTOH)
    pageable = to_host & (rng.random(size) < PAGEABLE)
    rate = np.where(pageable, PAGEABLE_RATE, PINNED_RATE)
    copying = COPY_BASE_NS + (copied / rate).astype(np.int64)
    is_kernel = (kind == KERNEL) | in_graph
    duration = np.where(is_kernel, usual[name], copying)
    duration = np.where(kind == MEMSET, 1_500, duration) * rng.lognormal(0, 0.1, size)
    lasting = np.array([CALL_NS.get(code, 0) for code in range(DEVICE_SYNC + 1)])
    return Plan(
        kind=kind,
        stream=stream,
        head=head & (kind != NOTHING),
        think=think,
        named=(kind == KERNEL) & (rng.random(size) < NAMED),
        call=(lasting[kind] * rng.lognormal(0.0, 0.12, size)).astype(np.int64),
        tail=around(ISSUE_NS),
        gap=around(GAP_NS),
        back=around(RETURN_NS),
        duration=duration.astype(np.int64),
        size=copied,
        pageable=pageable,
        event=rng.integers(0, EVENTS, size),
        name=name,
    )


def _kinds(rng: np.random.Generator, shape: Shape, kernels: int) -> Int64:
    """Iterations by actions in random order, with exactly so many kernels."""
    graphs = int(kernels * GRAPH_SHARE) // GRAPH if shape.graphs else 0
    copies = round(kernels * COPIES)
    sides = (int(copies * 0.6), int(copies * 0.25))
    singles = np.repeat(
        [KERNEL, HTOD, DTOH, DTOD, MEMSET, RECORD, EVENT_WAIT, STREAM_SYNC, EVENT_SYNC],
        [
            *(kernels - graphs * GRAPH, *sides, copies - sum(sides)),
            *(round(kernels * r) for r in (SETS, RECORDS, EVENT_WAITS)),
            *(round(kernels * r) for r in (STREAM_SYNCS, EVENT_SYNCS)),
        ],
    )
    singles = rng.permutation(singles)
    singles = np.append(singles, np.full(-len(singles) % GRAPH, NOTHING))
    groups = np.concatenate(
        [np.full((graphs, GRAPH), GRAPH_NODE), singles.reshape(-1, GRAPH)]
    )
    groups = rng.permutation(groups)
    rest = np.full((-len(groups) % (ACTIONS // GRAPH), GRAPH), NOTHING)
    kinds = np.concatenate([groups, rest]).reshape(-1, ACTIONS)
    last = np.full((len(kinds), 1), DEVICE_SYNC)
    joined: Int64 = np.concatenate([kinds, last], axis=1).astype(np.int64)
    return joined


class _Machine:
    """One GPU and one host, as they are in every iteration; times from its start."""

    def __init__(self, plan: Plan, streams: int) -> None:
        rows = len(plan.kind)
        self.plan = plan
        self.every = np.arange(rows)
        self.now = np.zeros(rows, dtype=np.int64)
        self.issued = np.zeros(rows, dtype=np.int64)
        self.busy = np.full((rows, streams), -GAP_NS)
        self.blocked = np.zeros((rows, streams), dtype=np.int64)
        self.null_done = np.full(rows, -BARRIER_NS)
        self.engine = np.full((rows, DTOD + 1), -ENGINE_NS)
        self.event = np.full((rows, EVENTS), -EVENT_NS)
        # Streams are by turns blocking and not; the NULL stream comes first.
        self.blocking = np.arange(streams) % 2 == 1

    def step(self, action: int) -> tuple[Int64, Int64, Int64, Int64]:
        """Start and end of the call and of the operation of this action."""
        plan, every = self.plan, self.every
        kind, stream = plan.kind[:, action], plan.stream[:, action]
        head = plan.head[:, action]
        # The name is asked for on the way.
        think = plan.think[:, action] + np.where(plan.named[:, action], 700, 0)
        call = self.now + np.where(head, think, 0)
        done = call + np.where(head, plan.call[:, action], 0)
        self.issued = np.where(head, done, self.issued)
        works = (kind >= KERNEL) & (kind <= MEMSET)
        at = self._earliest(kind, stream, action)
        end = at + plan.duration[:, action]
        recorded = kind == RECORD
        null = stream == 0
        barrier = recorded & null
        everything = self.busy.max(axis=1, where=self.blocking, initial=-GAP_NS)
        mark = np.maximum(self.busy[every, stream], call)
        mark = np.where(null, np.maximum(mark, everything), mark)
        self.event[every[recorded], plan.event[recorded, action]] = mark[recorded]
        self.busy[every[works], stream[works]] = end[works]
        copies = (kind == HTOD) | (kind == DTOH)
        self.engine[every[copies], kind[copies]] = end[copies]
        self.null_done = np.where(
            works & null, end, np.where(barrier, mark, self.null_done)
        )
        waits = kind == EVENT_WAIT
        self.blocked[every[waits], stream[waits]] = np.maximum(
            self.blocked[every[waits], stream[waits]],
            self.event[every[waits], plan.event[waits, action]] + EVENT_NS,
        )
        done = np.maximum(done, self._awaited(kind, stream, end, action))
        self.now = np.where(head, done, self.now)
        return call, done, at, end

    def _earliest(self, kind: Int64, stream: Int64, action: int) -> Int64:
        """When an operation can start."""
        plan, every = self.plan, self.every
        at: Int64 = self.issued + plan.tail[:, action]
        at = np.maximum(at, self.busy[every, stream] + plan.gap[:, action])
        at = np.maximum(at, self.blocked[every, stream])
        others = self.busy.max(axis=1, where=self.blocking, initial=-BARRIER_NS)
        at = np.where(stream == 0, np.maximum(at, others + BARRIER_NS), at)
        after = np.where(self.blocking[stream], self.null_done + BARRIER_NS, 0)
        at = np.maximum(at, after)
        copies = (kind == HTOD) | (kind == DTOH)
        free = self.engine[every, np.where(copies, kind, 0)] + ENGINE_NS
        return np.where(copies, np.maximum(at, free), at)

    def _awaited(self, kind: Int64, stream: Int64, end: Int64, action: int) -> Int64:
        """When a call can return at the earliest."""
        plan, every = self.plan, self.every
        back = plan.back[:, action]
        synchronous = plan.pageable[:, action] & (
            (kind == DTOH) | (plan.size[:, action] > STAGED_BYTES)
        )
        cases = (synchronous, kind == STREAM_SYNC, kind == EVENT_SYNC)
        untils = (
            end + back,
            self.busy[every, stream] + back,
            self.event[every, plan.event[:, action]] + back,
        )
        until = np.select(cases, untils, 0)
        all_done = self.busy.max(axis=1) + back
        chosen: Int64 = np.where(kind == DEVICE_SYNC, all_done, until)
        return chosen


def _schedule(plan: Plan, streams: int, start: int) -> Times:
    machine = _Machine(plan, streams)
    steps = [machine.step(action) for action in range(plan.kind.shape[1])]
    lasting = machine.now
    offset = start + np.concatenate([[0], np.cumsum(lasting)[:-1]])
    columns = (np.stack(part, axis=1) for part in zip(*steps, strict=True))
    return Times(*(column + offset[:, None] for column in columns))


# Rows ------------------------------------------------------------------------------


class Strings:
    """StringIds under construction."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {"[Unknown]": 16}

    def __call__(self, text: str) -> int:
        """The key of a text."""
        return self.ids.setdefault(text, len(self.ids) + 16)


def _process(
    rng: np.random.Generator, shape: Shape, index: int, strings: Strings
) -> dict[str, Columns]:
    """The rows of one process by table."""
    share = shape.kernels * (index + 1) // shape.processes
    share -= shape.kernels * index // shape.processes
    plan = _plan(rng, shape, share)
    times = _schedule(plan, shape.streams, 900_000_000 + 3_000_000 * index)
    return _Writer(rng, shape, index, strings, plan, times).tables()


class _Writer:
    """Turns what happened in one process into the columns of the export."""

    def __init__(
        self,
        rng: np.random.Generator,
        shape: Shape,
        index: int,
        strings: Strings,
        plan: Plan,
        times: Times,
    ) -> None:
        self.rng, self.shape, self.strings = rng, shape, strings
        self.iterations, self.width = plan.kind.shape
        # Row by row that is the order of the host's actions.
        self.plan = Plan(**{k: v.ravel() for k, v in plan._asdict().items()})
        self.times = Times(**{k: v.ravel() for k, v in times._asdict().items()})
        self.pid = FIRST_PID + 100 * index
        self.global_pid = 1 << 48 | self.pid << 24
        column = np.arange(len(self.plan.kind)) % self.width
        second = (column >= ACTIONS // 2) & (column < ACTIONS)
        self.thread = (self.global_pid | self.pid) + np.where(second, 7, 0)
        self.stream_id = np.where(
            self.plan.stream == 0, NULL_STREAM, FIRST_STREAM - 1 + self.plan.stream
        )
        holes = rng.random(len(self.plan.kind)) < 0.05
        used = self.plan.head.astype(np.int64) + self.plan.named + holes
        self.correlation = np.cumsum(used)
        self.instance, self.awaited = self._event_instances()

    def tables(self) -> dict[str, Columns]:
        """All tables of many rows."""
        found = {
            "CUPTI_ACTIVITY_KIND_KERNEL": self._kernels(),
            "CUPTI_ACTIVITY_KIND_MEMCPY": self._copies(),
            "CUPTI_ACTIVITY_KIND_MEMSET": self._sets(),
            "CUPTI_ACTIVITY_KIND_RUNTIME": self._calls(),
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": self._syncs(),
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT": self._records(),
            "NVTX_EVENTS": self._ranges(),
        }
        if self.shape.graphs:
            found["CUDA_GRAPH_NODE_EVENTS"] = self._graph_nodes()
        if self.shape.osrt:
            found["OSRT_API"] = self._system_calls()
        return found

    def _event_instances(self) -> tuple[Int64, Int64]:
        """Number of each record; the one that a wait waits for, 0 for none."""
        recorded = self.plan.kind == RECORD
        instance = np.where(recorded, np.cumsum(recorded), 0)
        awaited = np.zeros(len(recorded), dtype=np.int64)
        for event in range(EVENTS):
            mine = self.plan.event == event
            latest = np.maximum.accumulate(np.where(mine, instance, 0))
            awaited[mine] = latest[mine]
        return instance, awaited

    def _place(self, rows: Int64) -> dict[str, Any]:
        return {
            **{"deviceId": 0, "contextId": 1, "greenContextId": 0},
            **{"streamId": self.stream_id[rows], "globalPid": self.global_pid},
            "correlationId": self.correlation[self._leader()[rows]],
        }

    def _leader(self) -> Int64:
        """The action whose call an operation belongs to."""
        at = np.where(self.plan.head, np.arange(len(self.plan.head)), 0)
        return np.maximum.accumulate(at)

    def _ops(self, *kinds: int) -> tuple[Int64, dict[str, Any]]:
        rows = np.flatnonzero(np.isin(self.plan.kind, kinds))
        times = {"start": self.times.start[rows], "end": self.times.end[rows]}
        return rows, {**times, **self._place(rows)}

    def _kernels(self) -> Columns:
        rows, columns = self._ops(KERNEL, GRAPH_NODE)
        name = self.plan.name[rows]
        full = [self.strings(f"void op_{n}<float>(T1 *)") for n in range(KERNELS)]
        short = [self.strings(f"op_{n}") for n in range(KERNELS)]
        # No more blocks than fit beside those of all other streams.
        largest = BLOCKS_AT_ONCE // self.shape.streams
        node = self._node(rows)
        return {
            **columns,
            **{"demangledName": np.array(full)[name]},
            **{"shortName": np.array(short)[name], "mangledName": np.array(full)[name]},
            **{"launchType": 1, "cacheConfig": 1, "registersPerThread": 32},
            **{"gridX": (name * 37) % largest + 1, "gridY": 1, "gridZ": 1},
            **{"blockX": BLOCK_THREADS, "blockY": 1, "blockZ": 1},
            **{"staticSharedMemory": 0, "dynamicSharedMemory": 0},
            **{"localMemoryPerThread": 0, "localMemoryTotal": 163_184_640},
            **{"gridId": np.arange(len(rows)) + 1, "sharedMemoryExecuted": 32_768},
            **{"graphNodeId": node, "sharedMemoryLimitConfig": 0},
        }

    def _node(self, rows: Int64) -> list[int | None]:
        """Graph node of each of these operations, by stream and place."""
        if not self.shape.graphs:
            return [None] * len(rows)
        place = rows % self.width % GRAPH
        node = (100 + self.plan.stream[rows] << 32) + place + 1
        inside = self.plan.kind[rows] == GRAPH_NODE
        return [
            one if graph else None
            for one, graph in zip(node.tolist(), inside.tolist(), strict=True)
        ]

    def _copies(self) -> Columns:
        rows, columns = self._ops(HTOD, DTOH, DTOD)
        kind = self.plan.kind[rows]
        host = np.where(self.plan.pageable[rows], 0, 1)
        code = np.array([COPY_KINDS.get(one, 0) for one in range(DTOD + 1)])
        return {
            **columns,
            **{"bytes": self.plan.size[rows], "copyKind": code[kind], "copyCount": 1},
            "srcKind": np.where(kind == HTOD, host, 2),
            "dstKind": np.where(kind == DTOH, host, 2),
        }

    def _sets(self) -> Columns:
        rows, columns = self._ops(MEMSET)
        return {**columns, "value": 0, "bytes": self.plan.size[rows], "memKind": 2}

    def _syncs(self) -> Columns:
        """Rows of waits; cudaDeviceSynchronize leaves none."""
        kinds = (EVENT_WAIT, STREAM_SYNC, EVENT_SYNC)
        rows = np.flatnonzero(np.isin(self.plan.kind, kinds))
        kind = self.plan.kind[rows]
        of_event = kind != STREAM_SYNC
        place = self._place(rows)
        place["streamId"] = np.where(kind == EVENT_SYNC, NO_ID, place["streamId"])
        return {
            **place,
            **{"start": self.times.call_start[rows] + 100},
            **{"end": self.times.call_end[rows] - 100},
            "syncType": np.where(kind == EVENT_SYNC, 1, 2),
            "eventId": np.where(of_event, self.plan.event[rows] + 1, NO_ID),
            "eventSyncId": np.where(of_event, self.awaited[rows], NO_ID),
        }

    def _records(self) -> Columns:
        rows = np.flatnonzero(self.plan.kind == RECORD)
        event = {"eventId": self.plan.event[rows] + 1}
        return {**self._place(rows), **event, "eventSyncId": self.instance[rows]}

    def _calls(self) -> Columns:
        rows = np.flatnonzero(self.plan.head)
        kind, thread = self.plan.kind[rows], self.thread[rows]
        start, end = self.times.call_start[rows], self.times.call_end[rows]
        correlation = self.correlation[rows]
        calls = [CALLS.get(code, "[Unknown]") for code in range(DEVICE_SYNC + 1)]
        plain = [self.strings(call) for call in calls]
        full = [self.strings(api_name(call)) for call in calls]
        named = self.plan.named[rows]
        lasting = self.rng.integers(100, 400, len(rows))
        back = (self.rng.random(len(rows)) < TRACED_BACK) & (kind != RECORD)
        chain = (self.plan.name[rows] * 7 + kind) % STACKS
        parts: list[Columns] = [
            {
                **{"start": start, "end": end, "eventClass": 0, "globalTid": thread},
                **{"correlationId": correlation, "nameId": np.array(full)[kind]},
                "callchainId": [None] * len(rows),
            },
            {
                **{"start": (start - 600)[named], "globalTid": thread[named]},
                **{"end": (start - 600 + lasting)[named], "eventClass": 1},
                **{"correlationId": correlation[named] - 1},
                "nameId": self.strings("cuKernelGetName"),
                "callchainId": [None] * int(named.sum()),
            },
            {
                **{"start": (start - 80)[back], "end": (end + 110)[back]},
                **{"eventClass": 67, "globalTid": thread[back]},
                **{"correlationId": correlation[back]},
                "nameId": np.array(plain)[kind[back]],
                "callchainId": chain[back].tolist(),
            },
        ]
        return {**_joined(parts), "returnValue": 0}

    def _ranges(self) -> Columns:
        """A range an iteration and one every few actions; half are registered."""
        start = self.times.call_start.reshape(-1, self.width)
        end = self.times.call_end.reshape(-1, self.width)
        thread = self.thread.reshape(-1, self.width)
        first, last = start[:, :ACTIONS:RANGE], end[:, RANGE - 1 : ACTIONS : RANGE]
        steps = [f"step {number}" for number in range(self.iterations)]
        names = [self.strings(name) for name in ("attention", "mlp", "norm", "loss")]
        operators = np.tile(np.resize(names, first.shape[1]), len(first))
        return _joined(
            [
                {
                    **{"start": start[:, 0] - 200, "end": end[:, -1] + 200},
                    **{"globalTid": thread[:, 0], "text": steps},
                    "textId": [None] * len(steps),
                    **{"eventType": 59, "domainId": 0},
                },
                {
                    **{"start": first.ravel() - 100, "end": last.ravel() + 100},
                    **{"globalTid": thread[:, :ACTIONS:RANGE].ravel()},
                    **{"text": [None] * operators.size, "textId": operators},
                    **{"eventType": 59, "domainId": 0},
                },
            ]
        )

    def _graph_nodes(self) -> Columns:
        streams = np.arange(1, self.shape.streams)
        node = (100 + streams[:, None] << 32) + np.arange(1, GRAPH + 1)
        made = int(self.times.call_start[0]) - 500_000
        at = made + 1_000 * np.arange(node.size)
        return {
            **{"start": at, "end": at, "eventClass": 77, "globalTid": self.thread[0]},
            **{"nameId": self.strings("CUDA Graph Node Creation")},
            "graphNodeId": node.ravel(),
        }

    def _system_calls(self) -> Columns:
        """Half as many rows as kernels in a table that streamlint doesn't know."""
        first, last = self.times.call_start[0], self.times.call_end[-1]
        count = int((self.plan.kind <= GRAPH_NODE).sum()) // 2
        start = np.sort(self.rng.integers(first, last, count))
        end = start + self.rng.integers(1_000, 60_000, count)
        return {
            **{"start": start, "end": end, "eventClass": 27, "nestingLevel": 0},
            **{"globalTid": (self.global_pid | self.pid) + 11, "returnValue": 0},
            "nameId": self.strings("pthread_cond_wait"),
        }


def _small_tables(shape: Shape, strings: Strings) -> dict[str, Columns]:
    product, version = VERSIONS["2025.3"]
    pids = FIRST_PID + 100 * np.arange(shape.processes)
    number = np.arange(shape.processes)
    streams = np.arange(shape.streams)
    ids = np.where(streams == 0, NULL_STREAM, FIRST_STREAM - 1 + streams)
    flags = np.where(streams == 0, 3, np.where(streams % 2 == 1, 1, 2))
    depth, chain = np.arange(FRAMES), np.arange(STACKS)
    symbols = [strings(f"model::layer_{n}()") for n in range(STACKS)]
    place = {"hwId": 0, "vmId": 1, "contextId": 1}
    meta = {"EXPORT_PRODUCT_VERSION": product, "EXPORT_SCHEMA_VERSION": version}
    options = {
        "CAPTURE_EVENT_TYPE": "Cuda",
        "PROCESS_0:COLLECT_CUDA_TRACE": "true",
        "PROCESS_0:COLLECT_NVTX_TRACE": "true",
        "PROCESS_0:CUDA_SKIP_SOME_API_CALLS": "true",
        "PROCESS_0:COLLECT_GPU_MEMORY_USAGE": "false",
        "PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE": "Node" if shape.graphs else "Graph",
        "PROCESS_0:CUDA_BACKTRACE_OPTIONS:COLLECT_KERNEL_BACKTRACES": "true",
    }
    return {
        "PROCESSES": {
            "globalPid": 1 << 48 | pids << 24,
            **{"pid": pids, "name": "./model"},
        },
        "ThreadNames": {
            "nameId": np.tile([strings("main"), strings("backward")], len(pids)),
            "priority": 20,
            "globalTid": np.repeat(1 << 48 | pids << 24 | pids, 2)
            + np.tile([0, 7], len(pids)),
        },
        "TARGET_INFO_GPU": {**H200, "vmId": 1 << 48, "id": number},
        "TARGET_INFO_CUDA_DEVICE": {"gpuId": number, "cudaId": 0, "pid": pids},
        "TARGET_INFO_CUDA_CONTEXT_INFO": {
            **{**place, "processId": pids, "deviceId": 0},
            **{"nullStreamId": NULL_STREAM, "parentContextId": 0, "isGreenContext": 0},
        },
        "TARGET_INFO_CUDA_STREAM": {
            **{**place, "processId": np.repeat(pids, len(ids)), "priority": 0},
            **{"streamId": np.tile(ids, len(pids)), "flag": np.tile(flags, len(pids))},
        },
        "CUDA_CALLCHAINS": {
            "id": np.repeat(chain, FRAMES),
            "symbol": np.array(symbols)[np.add.outer(chain, depth).ravel() % STACKS],
            **{"module": strings("/usr/lib/libmodel.so"), "unresolved": 0},
            "originalIP": np.arange(STACKS * FRAMES) + (140_000_000_000 << 10),
            "stackDepth": np.tile(depth, STACKS),
        },
        **{
            table: {
                "id": np.arange(len(labels)),
                "name": [label.upper() for label in labels],
                "label": list(labels),
            }
            for table, labels in LABELS.items()
        },
        "META_DATA_EXPORT": {"name": list(meta), "value": list(meta.values())},
        "META_DATA_CAPTURE": {"name": list(options), "value": list(options.values())},
    }


# The file ------------------------------------------------------------------------

LABELS = {
    "ENUM_CUDA_MEM_KIND": (
        *("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static"),
        *("Managed Static", "Unknown"),
    ),
    "ENUM_CUDA_MEMCPY_OPER": (
        *("Unknown", "Host-to-Device", "Device-to-Host", "Host-to-Array"),
        *("Array-to-Host", "Array-to-Array", "Array-to-Device", "Device-to-Array"),
        *("Device-to-Device", "Host-to-Host", "Peer-to-Peer"),
        *("Unified Host-to-Device", "Unified Device-to-Host"),
        "Unified Device-to-Device",
    ),
}
"""Names of codes; `nsys analyze` skips rules where an export lacks them."""
LAYOUTS = {
    **LAYOUT,
    **dict.fromkeys(LABELS, "id! name:TEXT label:TEXT"),
    "OSRT_API": "start! end! eventClass! globalTid correlationId nameId! returnValue! "
    "nestingLevel callchainId",
}


def _joined(parts: Sequence[Columns]) -> dict[str, Any]:
    """Rows of several parts, by start where they have one; each value an array."""
    columns: dict[str, Any] = {}
    lengths = [_length(part) for part in parts]
    for name in parts[0]:
        values = [
            part[name]
            if isinstance(part[name], (np.ndarray, list))
            else np.full(length, part[name])
            for part, length in zip(parts, lengths, strict=True)
        ]
        plain = all(isinstance(v, np.ndarray) and v.dtype != object for v in values)
        columns[name] = np.concatenate(
            [v if plain else np.array(v, dtype=object) for v in values]
        )
    if "start" in columns:
        order = np.argsort(columns["start"], kind="stable")
        columns = {name: values[order] for name, values in columns.items()}
    return columns


def _length(columns: Columns) -> int:
    return max(len(v) for v in columns.values() if isinstance(v, (np.ndarray, list)))


def _create(db: sqlite3.Connection, table: str, columns: Columns) -> None:
    declared = []
    for column in LAYOUTS[table].split():
        name, _, kind = column.rstrip("!").partition(":")
        null = " NOT NULL" if column.endswith("!") else ""
        key = " PRIMARY KEY" if (table, name) == ("StringIds", "id") else ""
        declared.append(f'"{name}" {kind or "INTEGER"}{null}{key}')
    db.execute(f'CREATE TABLE "{table}" ({", ".join(declared)})')


def _insert(db: sqlite3.Connection, table: str, columns: Columns, chunk: int) -> None:
    length = _length(columns)
    first, last = length * chunk // CHUNKS, length * (chunk + 1) // CHUNKS
    values: list[Iterable[Any]] = []
    for column in LAYOUTS[table].split():
        name = column.rstrip("!").partition(":")[0]
        cells = columns.get(name, 0 if column.endswith("!") else None)
        if isinstance(cells, np.ndarray):
            values.append(cells[first:last].tolist())
        elif isinstance(cells, list):
            values.append(cells[first:last])
        else:
            values.append(repeat(cells, last - first))
    marks = ", ".join("?" * len(values))
    db.executemany(f'INSERT INTO "{table}" VALUES ({marks})', zip(*values, strict=True))


def main() -> int:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kernels", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--graphs", action="store_true", help="a fifth runs in graphs")
    parser.add_argument("--osrt", action="store_true", help="add an OSRT_API table")
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    out, shape = given.pop("out"), Shape(**given)
    if shape.streams < 2 or not 0 < shape.processes <= shape.kernels:
        parser.error("at least 2 streams and a kernel a process")
    write_trace(out, shape)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A trace as typed polars frames, one a logical table, loaded when first asked for.

Names: times in ns as the export has them, sizes in bytes. ``pid`` and ``tid`` are
decoded from nsys' serialized ids; correlation ids are unique per process only, so
every join is on (pid, correlation_id). A call that an export repeats to carry its
call stack is one row. Frames are sorted by start. Times, sizes and correlation ids
are Int64, ids and counts of 32 bits Int32, names of kernels and calls and what is told
in words Categorical: of millions of rows the rest would only take memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import polars as pl

from streamlint.arrays import as_series, ascending, earlier_max, numbered
from streamlint.errors import TraceError
from streamlint.escape import printable, without_home
from streamlint.findings import NotAssessed
from streamlint.once import Kept, once
from streamlint.settings import DEFAULTS, Settings, Threshold
from streamlint.trace.calls import GPU_WORK, HOST_WAITS, describe_names
from streamlint.trace.capture import Capture, read_capture
from streamlint.trace.lookup import first_rows, pid_of, with_first
from streamlint.trace.part import CHOSEN_FROM, NOTHING, LeftOut, Part, part_of
from streamlint.trace.reader import ExportFile, Unavailable
from streamlint.trace.stacks import (
    PYTHON_BACKTRACE_DOMAIN,
    Frame,
    decode_blob,
    decode_json,
)
from streamlint.trace.tables import (
    BACKTRACE_EVENT_CLASS,
    COPY_KINDS,
    GROWING,
    MEM_KINDS,
    MIGRATION_COPY_KINDS,
    NO_ID,
    NVTX_DOMAIN,
    NVTX_MARK,
    NVTX_RANGES,
    STREAM_KINDS,
    TABLES,
)

_T = TypeVar("_T")


def schema(*names: str, **others: type[pl.DataType]) -> dict[str, Any]:
    """Types of columns by name, for frames made beside those of a trace.

    Int32 for ids of 32 bits, as the trace's own frames have them, else Int64.
    """
    return {**{n: pl.Int32 if n in _IDS else pl.Int64 for n in names}, **others}


_IDS = ("pid", "tid", "gpu_id", "device_id", "context_id", "stream_id", "event_id")


class TableRead(NamedTuple):
    """How a table that was asked for came out: rows and where from, or why not."""

    name: str
    outcome: str


class NativeFrame(NamedTuple):
    """A frame of a native call stack.

    ``symbol`` is empty where nsys found none. ``address`` is in the recorded process
    and, but for the innermost frame, where the call returns to; 0 is unknown.
    """

    symbol: str
    module: str
    address: int = 0


_MOST_PROCESSES = 64
"""Ranks and workers of a large machine; ten ms each are most of a second."""
_ROWS_OF_A_PROCESS = 1_000
"""Starting CUDA up alone makes some hundred calls."""
_Number = TypeVar("_Number", int, float)
Times: TypeAlias = tuple[int | None, int | None]

_OP_COLUMNS = (
    "pid",
    "device_id",
    "context_id",
    "green_context_id",
    "stream_id",
    "correlation_id",
    "start_ns",
    "end_ns",
    "graph_node_id",
)


class Trace:
    """One nsys export. Frames are properties; see each for its columns."""

    def __init__(self, file: ExportFile) -> None:
        """Wrap an opened export; nothing is loaded yet."""
        self._file = file
        self._loaded, self._with_pids, self._derived = Kept(), Kept(), Kept()
        self._settings = DEFAULTS
        self._time: Times | None = None

    @property
    def settings(self) -> Settings:
        """How this trace is judged; setting it forgets what was derived before."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        if settings is not self._settings:
            self._settings = settings
            self._derived.clear()

    @property
    def time(self) -> Times | None:
        """The times, from and to, that alone can be judged; None for all of it."""
        return self._time

    def read_only(self, time: Times | None) -> None:
        """Load no more than judging what starts in ``time`` takes; before any frame.

        All frames but those of calls and GPU work are whole all the same.
        """
        if time != self._time:
            assert not any(name in self._loaded for name in CHOSEN_FROM)
            self._time = time

    @once
    def _part(self) -> Part | None:
        # Under which L2 window the last kernel of a run ran, all of it tells.
        if self._time is None or self._ranges["text"].str.starts_with("l2.").any():
            return None
        return part_of(self._file, *self._time)

    @property
    def left_out(self) -> LeftOut:
        """Rows of calls and GPU work that were not read, and what they count for."""
        return NOTHING if self._part is None else self._part.left_out

    def limit(self, threshold: Threshold[_Number]) -> _Number:
        """The value of a rule's threshold for this trace."""
        return self._settings.limit(threshold)

    def derived(self, analysis: Callable[[Trace], _T]) -> _T:
        """What ``analysis`` makes of this trace, computed once a trace."""
        return self._derived.get(analysis, lambda: analysis(self))

    def close(self) -> None:
        """Release the file; frames already loaded stay usable."""
        self._file.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<streamlint.Trace {without_home(str(self.path))}>"

    def _repr_html_(self) -> str:
        """What a notebook shows; loads no large table."""
        import html

        words = [without_home(str(self.path))]
        if self.capture.exporter:
            words.append(f"nsys {self.capture.exporter}")
        words += [name for name in self.gpus["name"].unique().sort() if name]
        shown = " · ".join(html.escape(printable(word, 200)) for word in words)
        return f"<p><b>Trace</b> {shown}</p>"

    @property
    def path(self) -> Path:
        """The export as it was named."""
        return self._file.path

    @property
    def table_names(self) -> tuple[str, ...]:
        """All tables of the export."""
        return self._file.table_names

    @property
    def invalid_rows(self) -> dict[str, int]:
        """Rows without usable times that were dropped, by table loaded so far."""
        return {k: n for k, n in self._file.invalid_rows.items() if n}

    @property
    def tables_read(self) -> tuple[TableRead, ...]:
        """All tables that were asked for so far."""
        read: list[TableRead] = []
        for name, loaded in sorted(self._loaded.items()):
            sources = [s for s in TABLES[name].sources if s in self.table_names]
            if isinstance(loaded, Unavailable):
                read.append(TableRead(name, loaded.reason))
                continue
            rows = f"{loaded.height} row{'' if loaded.height == 1 else 's'}"
            words = f"{rows} of {sources[0]}" if sources else "not in the export"
            beyond = self.left_out.of(name)
            words += f", {beyond} outside of --time not read" if beyond else ""
            dropped = self.invalid_rows.get(name)
            words += f", {dropped} without usable times left out" if dropped else ""
            read.append(TableRead(name, words))
        return tuple(read)

    @once
    def rows(self) -> int:
        """About how many rows a lint reads, none too few; reads none of them."""
        return sum(map(self._file.rows, GROWING))

    @once
    def call_times(self) -> Times:
        """About when the first and the last call was made; reads no others."""
        return self._file.times(TABLES["runtime_calls"]) or (None, None)

    def refuse_a_crowd(self) -> None:
        """Raise `TraceError` if far more processes used the GPU than could have.

        Each is judged by itself, which takes some ms even if it has next to no rows.
        """
        ops = self.gpu_ops
        processes = ops["pid"].n_unique()
        rows = ops.height + self.runtime_calls.height
        rows += self.left_out.work + self.left_out.of("runtime_calls")
        if processes > _MOST_PROCESSES + rows // _ROWS_OF_A_PROCESS:
            raise TraceError(
                f"{self.path.name} has {rows} GPU operations and calls of {processes} "
                "processes, too few of each to judge",
                hint="record fewer processes, each for some iterations of its work",
            )

    @once
    def capture(self) -> Capture:
        """What was recorded and by which nsys."""
        rows = self._frame("export_meta")
        meta = dict(zip(rows["name"], rows["value"], strict=True))
        return read_capture(
            {k: v for k, v in meta.items() if k and v}, self._file.options()
        )

    # Evidence -----------------------------------------------------------------

    def missing(self, name: str) -> NotAssessed | None:
        """Why the table of this name can't be judged; None where it can.

        A table without rows is no evidence of a fault in the recording unless
        something else in the trace proves that it should have rows: exports omit
        empty tables.
        """
        loaded = self._load(name)
        table = TABLES[name]
        if isinstance(loaded, Unavailable):
            reason = loaded.reason
            recapture = table.recorded_by
            if self._file.has_table(table):
                return NotAssessed(reason, f"export again with nsys, {recapture}")
        elif loaded.height:
            if name != "runtime_calls" or loaded["correlation_id"].count():
                return None
            return NotAssessed(
                f"{table.sources[0]} says of no call which GPU work it issued",
                "export again with nsys, all columns",
            )
        else:
            reason, recapture = f"{table.sources[0]} has no rows", table.recorded_by
        proofs = {
            "kernels": ("kernel launch",),
            "memcpys": ("async memcpy", "sync memcpy"),
            "memsets": ("async memset", "sync memset"),
            "synchronizations": ("stream sync", "event sync", "stream wait"),
            "event_records": ("event record",),
        }
        if name in proofs:
            if self.call_kinds.isdisjoint(proofs[name]):
                return None
            made = self.launches if name in _GPU_TABLES else self.runtime_calls
            made = made.filter(
                pl.col("kind").is_in(proofs[name])
                & (pl.col("return_value").fill_null(0) == 0)
            )
            if not made.height:
                return None
            return NotAssessed(
                f"{reason}, yet {made.height} {proofs[name][-1]} calls succeeded",
                f"let the program run to its end and record with {recapture}",
            )
        if name == "runtime_calls" and not self.gpu_ops.height:
            return None
        return NotAssessed(reason, f"record with {recapture}")

    def _load(self, name: str) -> pl.DataFrame | Unavailable:
        def load() -> pl.DataFrame | Unavailable:
            part = self._part if name in CHOSEN_FROM else None
            chosen = None if part is None else part.chosen.get(name)
            return self._file.load(name, chosen)

        return self._loaded.get(name, load)

    def _frame(self, name: str) -> pl.DataFrame:
        """The table, empty where it can't be had."""
        loaded = self._load(name)
        if isinstance(loaded, Unavailable):
            return self._file.empty(name)
        return loaded

    # Host ---------------------------------------------------------------------

    @once
    def runtime_calls(self) -> pl.DataFrame:
        """CUDA API calls, runtime and driver, one row a call.

        pid, tid, start_ns, end_ns, correlation_id, name (plain), kind (see
        `streamlint.trace.calls`), per_thread, return_value, callchain_id,
        backtrace_ns (start of the row that carried the call stack), nested (made
        by another recorded call of the same thread).
        """
        rows = self._frame("runtime_calls")
        if rows.height:
            # Of the table itself only its rows and their ids are asked after.
            self._loaded.put("runtime_calls", rows.select("correlation_id"))
        is_copy = rows["event_class"].eq_missing(BACKTRACE_EVENT_CLASS)
        rows = rows.select(
            *("start_ns", "end_ns", "correlation_id", "return_value", "callchain_id"),
            *_described(rows["name"]),
            *_split("global_tid"),
        )
        if rows["pid"].null_count():
            rows = rows.with_columns(pl.col("pid", "tid").fill_null(0))
        key = ["pid", "tid", "correlation_id"]
        if is_copy.any():
            copies, calls = rows.filter(is_copy), rows.filter(~is_copy)
            stacks = copies.select(
                *key,
                pl.col("callchain_id").alias("copied_callchain_id"),
                pl.col("start_ns").alias("backtrace_ns"),
            ).unique(key, keep="first", maintain_order=True)
            # Stacks are few: only the calls that may have one are joined.
            near = as_series(np.flatnonzero(first_rows(stacks, calls) >= 0))
            with_stacks = calls[near].join(
                stacks, on=key, how="left", validate="m:1", maintain_order="left"
            )
            calls = calls.with_columns(
                calls["callchain_id"].scatter(
                    near,
                    with_stacks["callchain_id"].fill_null(
                        with_stacks["copied_callchain_id"]
                    ),
                ),
                pl.repeat(None, calls.height, dtype=pl.Int64, eager=True)
                .scatter(near, with_stacks["backtrace_ns"])
                .alias("backtrace_ns"),
            )
            # A call that was skipped still leaves its stack: keep it as the call.
            alone = copies.join(with_stacks, on=key, how="anti").with_columns(
                pl.col("start_ns").alias("backtrace_ns")
            )
            if alone.height:
                calls = pl.concat([calls, alone], how="diagonal")
                calls = calls.sort("start_ns", "end_ns", maintain_order=True)
        else:
            calls = rows.with_columns(
                pl.lit(None, dtype=pl.Int64).alias("backtrace_ns")
            )
        reached = as_series(earlier_max(calls["end_ns"], calls["pid"], calls["tid"]))
        return calls.select(
            *("pid", "tid", "start_ns", "end_ns", "correlation_id", "name", "kind"),
            *("per_thread", "return_value", "callchain_id", "backtrace_ns"),
            (calls["end_ns"] <= reached).alias("nested"),
        )

    @once
    def call_kinds(self) -> frozenset[str]:
        """The kinds of `runtime_calls` that occur."""
        return frozenset(self.runtime_calls["kind"].unique())

    @once
    def call_names(self) -> frozenset[str]:
        """The plain names of `runtime_calls` that occur."""
        return frozenset(self.runtime_calls["name"].drop_nulls().unique())

    @once
    def launches(self) -> pl.DataFrame:
        """Calls that put work on the GPU: one row a (pid, correlation_id).

        Columns of `runtime_calls`. The outermost call counts where one makes
        another; calls recorded into a graph by stream capture are no launches.
        """
        calls = self.runtime_calls.filter(
            pl.col("kind").is_in(GPU_WORK) & pl.col("correlation_id").is_not_null()
        )
        outermost = first_rows(calls, calls) == np.arange(calls.height)
        if not outermost.all():
            calls = calls.filter(as_series(outermost))
        if not self.captures.height:
            return calls
        key = ["pid", "correlation_id"]
        ops = pl.concat([self._with_pid(name)[key] for name in _GPU_TABLES])
        captured = (
            calls.join_asof(
                self.captures.rename({"end_ns": "capture_end_ns"}),
                on="start_ns",
                by=["pid", "tid"],
                check_sortedness=False,
            )
            .filter(pl.col("start_ns") < pl.col("capture_end_ns"))
            .join(ops, on=key, how="anti")
        )
        return calls.join(captured, on=key, how="anti", maintain_order="left")

    @once
    def captures(self) -> pl.DataFrame:
        """Stream captures: pid, tid, start_ns, end_ns, from begin to end call."""
        if "begin capture" not in self.call_kinds:
            return self.runtime_calls.clear().select("pid", "tid", "start_ns", "end_ns")
        calls = self.runtime_calls.filter(
            pl.col("kind").is_in(("begin capture", "end capture"))
        )
        return (
            calls.with_columns(
                pl.col("end_ns", "kind")
                .shift(-1)
                .over("pid", "tid")
                .name.prefix("next_")
            )
            .filter(
                (pl.col("kind") == "begin capture")
                & (pl.col("next_kind") == "end capture")
            )
            .select("pid", "tid", "start_ns", pl.col("next_end_ns").alias("end_ns"))
        )

    @once
    def synchronizations(self) -> pl.DataFrame:
        """Calls that only wait for the GPU: one row a call.

        pid, tid, start_ns, end_ns, correlation_id, name, kind ("device sync",
        "stream sync", "event sync"), context_id, stream_id, event_id,
        event_sync_id (null where not of that kind or not recorded), callchain_id,
        backtrace_ns. The kind is from the call's name: the export's syncType is
        not portable.
        """
        calls = self.runtime_calls.filter(
            pl.col("kind").is_in(HOST_WAITS) & ~pl.col("nested")
        )
        waits = calls.join(
            self._sync_rows.drop("start_ns", "end_ns"),
            on=["pid", "correlation_id"],
            how="left",
            validate="m:1",
            maintain_order="left",
        )
        if calls["per_thread"].any():
            own = self._per_thread_streams.rename({"stream_id": "own_stream_id"})
            # The export names the null stream where the per-thread one was meant.
            wrong = pl.col("per_thread") & (
                pl.col("stream_id") == pl.col("null_stream_id")
            )
            waits = (
                waits.join(own, on=["pid", "tid"], how="left", validate="m:1")
                .join(self._null_streams, on=["pid", "context_id"], how="left")
                .with_columns(
                    pl.when(wrong)
                    .then("own_stream_id")
                    .otherwise("stream_id")
                    .alias("stream_id")
                )
            )
        return waits.select(
            *("pid", "tid", "start_ns", "end_ns", "correlation_id", "name"),
            *("kind", "context_id", "stream_id", "event_id", "event_sync_id"),
            *("callchain_id", "backtrace_ns"),
        ).sort("start_ns", "end_ns")

    @once
    def event_waits(self) -> pl.DataFrame:
        """`cudaStreamWaitEvent` calls: a stream waits, the host doesn't.

        pid, tid, start_ns, end_ns, correlation_id, name, context_id, stream_id,
        event_id, event_sync_id.
        """
        return (
            self.runtime_calls.filter(pl.col("kind") == "stream wait")
            .join(
                self._sync_rows.drop("start_ns", "end_ns"),
                on=["pid", "correlation_id"],
                how="left",
                validate="m:1",
                maintain_order="left",
            )
            .select(
                *("pid", "tid", "start_ns", "end_ns", "correlation_id", "name"),
                *("context_id", "stream_id", "event_id", "event_sync_id"),
            )
        )

    @once
    def event_records(self) -> pl.DataFrame:
        """Event records, in the order of their calls.

        pid, tid, start_ns, end_ns (of the call, null where unrecorded), context_id,
        device_id, stream_id, correlation_id, event_id, event_sync_id.
        """
        columns = (
            *("pid", "tid", "start_ns", "end_ns", "context_id", "device_id"),
            *("stream_id", "correlation_id", "event_id", "event_sync_id"),
        )
        rows = self._frame("event_records")
        if not rows.height:
            return pl.DataFrame(schema=schema(*columns))
        records = self._with_pid("event_records")
        calls = self._first_calls(records).select(
            *("pid", "correlation_id", "tid", "start_ns", "end_ns")
        )
        return (
            records.join(
                calls, on=["pid", "correlation_id"], how="left", validate="m:1"
            )
            .select(columns)
            .sort("start_ns", "correlation_id", nulls_last=True)
        )

    @once
    def queries(self) -> pl.DataFrame:
        """Stream and event queries: pid, start_ns, end_ns, stream_id, event_id.

        A query that the profiler skips leaves a synchronization row without call.
        """
        columns = ("pid", "start_ns", "end_ns", "stream_id", "event_id")
        rows = self._sync_rows
        if not rows.height:
            return rows.select(columns)
        key = ["pid", "correlation_id"]
        calls = self._first_calls(rows).select(*key, "kind")
        return (
            rows.join(calls, on=key, how="left", validate="1:1")
            .filter(
                (pl.col("kind") == "query")
                | (pl.col("kind").is_null() & pl.col("stream_id").is_not_null())
            )
            .select(columns)
        )

    def _first_calls(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The outermost call of each (pid, correlation_id) that these rows have."""
        first = first_rows(self.runtime_calls, rows)
        return self.runtime_calls[as_series(ascending(first[first >= 0]))]

    @once
    def _sync_rows(self) -> pl.DataFrame:
        cleaned = (
            pl.when(~pl.col(name).is_in(none)).then(name).alias(name)
            for name, none in (
                ("stream_id", (NO_ID,)),
                ("event_id", (NO_ID,)),
                ("event_sync_id", (NO_ID, NO_ID % 2**32)),
            )
        )
        return (
            self._with_pid("synchronizations")
            .select(
                *("pid", "correlation_id", "start_ns", "end_ns", "context_id"),
                *cleaned,
            )
            .unique(["pid", "correlation_id"], keep="first", maintain_order=True)
        )

    @once
    def _per_thread_streams(self) -> pl.DataFrame:
        """pid, tid, stream_id of each thread's own default stream."""
        key = ["pid", "correlation_id"]
        if not self.launches["per_thread"].any():
            return pl.DataFrame(schema=schema("pid", "tid", "stream_id"))
        calls = self.launches.filter("per_thread").select(*key, "tid")
        ops = pl.concat(
            [
                self._with_pid(name).select(*key, "stream_id", "context_id")
                for name in _GPU_TABLES
            ]
        ).join(calls, on=key, how="inner", validate="m:1")
        created = self.runtime_calls.filter(pl.col("kind") == "stream create").height
        flags = self._raw_streams.select("pid", "stream_id", "flag")
        candidates = (
            ops.join(flags, on=["pid", "stream_id"], how="left", validate="m:1")
            .join(self._null_streams, on=["pid", "context_id"], how="left")
            .filter(
                (pl.col("flag") == 1)
                & (pl.col("stream_id") != pl.col("null_stream_id"))
            )
            .group_by("pid", "tid", "stream_id")
            .len()
        )
        if created:
            # A created stream is used from any thread; a thread's own from one only.
            shared = (
                candidates.group_by("pid", "stream_id").len().filter(pl.col("len") > 1)
            )
            candidates = candidates.join(shared, on=["pid", "stream_id"], how="anti")
        return (
            candidates.sort("len", "stream_id", descending=[True, False])
            .unique(["pid", "tid"], keep="first", maintain_order=True)
            .select("pid", "tid", "stream_id")
        )

    # GPU ----------------------------------------------------------------------

    @once
    def kernels(self) -> pl.DataFrame:
        """Kernels: columns of `streamlint.trace.tables.KERNELS`, pid for global_pid."""
        return self._with_pid("kernels")

    @once
    def memcpys(self) -> pl.DataFrame:
        """Copies that the program asked for (no unified-memory migrations).

        Columns of MEMCPYS, pid for global_pid; copy_kind is "HtoD", "DtoH", "DtoD",
        "HtoH", "PtoP" or "unknown", src_kind and dst_kind "pageable", "pinned",
        "device", "managed", "array" or "unknown".
        """
        rows = self._with_pid("memcpys")
        return _with_words(
            rows.filter(~pl.col("copy_kind").is_in(MIGRATION_COPY_KINDS))
        )

    @once
    def migrations(self) -> pl.DataFrame:
        """Unified-memory page migrations, columns as `memcpys`."""
        rows = self._with_pid("memcpys")
        return _with_words(rows.filter(pl.col("copy_kind").is_in(MIGRATION_COPY_KINDS)))

    @once
    def memsets(self) -> pl.DataFrame:
        """Memsets: columns of MEMSETS, pid for global_pid; mem_kind in words."""
        rows = self._with_pid("memsets")
        return rows.with_columns(_words("mem_kind", MEM_KINDS))

    @once
    def graph_traces(self) -> pl.DataFrame:
        """Graphs launched as a whole: columns of GRAPH_TRACES, pid for global_pid."""
        return self._with_pid("graph_traces")

    @once
    def graph_nodes(self) -> pl.DataFrame:
        """Creation of graph nodes: columns of GRAPH_NODES with pid and tid."""
        return self._frame("graph_nodes").with_columns(*_split("global_tid"))

    @once
    def gpu_ops(self) -> pl.DataFrame:
        """Everything that ran on a GPU, sorted by start; one row an operation.

        pid, gpu_id (physical, null where unknown), device_id (as the process
        counts), context_id, green_context_id, stream_id, stream_kind (see
        `streams`), correlation_id, graph_node_id, start_ns, end_ns, kind
        ("kernel", "memcpy", "memset", "graph"), engine ("compute", "HtoD",
        "DtoH", "DtoD", "PtoP", "HtoH", "memset"), name, size_bytes, sm_fraction
        (part of the GPU's thread-block slots that a kernel asks for, at most 1;
        null where unknown); from the call that issued it, null where unrecorded:
        tid, issue_ns, issue_end_ns, call.
        """
        columns = list(_OP_COLUMNS)
        parts = [
            self._sized_kernels().select_seq(
                *columns,
                "sm_fraction",
                _word("kernel").alias("kind"),
                _word("compute").alias("engine"),
                pl.col("name").fill_null("kernel"),
                pl.lit(None, dtype=pl.Int64).alias("size_bytes"),
            )
        ]
        if self._frame("memcpys").height:
            parts.append(
                self.memcpys.select_seq(
                    *columns,
                    _word("memcpy").alias("kind"),
                    pl.col("copy_kind").alias("engine"),
                    pl.col("copy_kind").alias("name"),
                    "size_bytes",
                )
            )
        if self._frame("memsets").height:
            parts.append(
                self.memsets.select_seq(
                    *columns,
                    _word("memset").alias("kind"),
                    _word("memset").alias("engine"),
                    _word("memset").alias("name"),
                    "size_bytes",
                )
            )
        if self._frame("graph_traces").height:
            parts.append(
                self.graph_traces.with_columns(
                    pl.lit(None, dtype=pl.Int64).alias("graph_node_id")
                ).select_seq(
                    *columns,
                    _word("graph").alias("kind"),
                    _word("compute").alias("engine"),
                    _word("graph").alias("name"),
                    pl.lit(None, dtype=pl.Int64).alias("size_bytes"),
                )
            )
        calls = self.launches.select(
            "pid",
            "correlation_id",
            "tid",
            pl.col("start_ns").alias("issue_ns"),
            pl.col("end_ns").alias("issue_end_ns"),
            pl.col("name").alias("call"),
        )
        ops = pl.concat(parts, how="diagonal")
        kinds = self.streams.select(
            "pid", "stream_id", pl.col("kind").alias("stream_kind")
        )
        # Looked up once a stream: joins would copy all columns of the operations.
        key = ("pid", "device_id", "stream_id")
        stream, first = numbered(*(ops[name] for name in key))
        streams = (
            ops.select(key)[as_series(first)]
            .join(
                kinds,
                on=["pid", "stream_id"],
                how="left",
                validate="m:1",
                maintain_order="left",
            )
            .join(
                self._device_map,
                on=["pid", "device_id"],
                how="left",
                validate="m:1",
                maintain_order="left",
            )
            .select(pl.col("stream_kind").fill_null("unknown"), "gpu_id")
        )
        return (
            with_first(ops, calls)
            .hstack(streams[as_series(stream)])
            .sort("start_ns", "end_ns", maintain_order=True)
        )

    def _sized_kernels(self) -> pl.DataFrame:
        """Kernels with sm_fraction: blocks over the blocks that fit at once.

        Theoretical occupancy from warps, registers and shared memory, with 1 KiB of
        shared memory a block for the system, as on compute capability 8.0 and up.
        """
        if not self._frame("kernels").height:
            return self.kernels.with_columns(
                pl.lit(None, dtype=pl.Float64).alias("sm_fraction")
            )
        # 32 bits would overflow without a word.
        block = [pl.col(f"block_{axis}").cast(pl.Int64) for axis in "xyz"]
        threads = block[0] * block[1] * block[2]
        warps = (threads + 31) // 32
        registers = pl.col("registers_per_thread") * warps * 32
        shared = pl.col("static_shared_bytes").cast(pl.Int64) + 1024
        shared += pl.col("dynamic_shared_bytes")
        fitting = pl.min_horizontal(
            "max_blocks_per_sm",
            pl.col("max_warps_per_sm") // warps,
            pl.col("max_registers_per_sm") // registers.clip(1),
            pl.col("max_shared_bytes_per_sm") // shared,
        ).clip(1)
        grid = [pl.col(f"grid_{axis}").cast(pl.Int64) for axis in "xyz"]
        blocks = grid[0] * grid[1] * grid[2]
        return (
            self._with_limits(self.kernels)
            .select(
                *_OP_COLUMNS,
                "name",
                (blocks / (pl.col("sm_count") * fitting))
                .clip(0, 1)
                .alias("sm_fraction"),
            )
            .collect()
        )

    def _with_limits(self, kernels: pl.DataFrame) -> pl.LazyFrame:
        """Kernels with what their GPUs can hold, columns of `gpus`."""
        key = ["pid", "device_id"]
        limits = self._device_map.join(
            self.gpus.drop("name"), on="gpu_id", how="left", validate="m:1"
        )
        used = kernels.select(key).unique()
        alike = used.join(limits, on=key, how="left", validate="m:1")
        alike = alike.drop(*key, "gpu_id").unique()
        if alike.height == 1:  # most often; a join would copy all columns
            values = alike.row(0, named=True)
            return kernels.lazy().with_columns(
                pl.lit(value, dtype=alike.schema[name]).alias(name)
                for name, value in values.items()
            )
        return kernels.lazy().join(
            limits.lazy(), on=key, how="left", validate="m:1", maintain_order="left"
        )

    # The machine --------------------------------------------------------------

    @once
    def streams(self) -> pl.DataFrame:
        """Streams: pid, stream_id, context_id, kind, priority (signed).

        kind is "null", "blocking", "non-blocking", "per-thread" (a thread's own
        default stream, a blocking one) or "unknown". The driver lists streams that
        the program never made: take the used ones from `gpu_ops`.
        """
        rows = self._raw_streams
        null_ids = self._null_streams.with_columns(pl.lit(value=True).alias("is_null"))
        listed = rows.join(
            null_ids,
            left_on=["pid", "context_id", "stream_id"],
            right_on=["pid", "context_id", "null_stream_id"],
            how="left",
            validate="m:1",
        )
        is_own = pl.lit(value=False)
        if self._per_thread_streams.height:
            own = self._per_thread_streams.select("pid", "stream_id").unique()
            listed = listed.join(
                own.with_columns(pl.lit(value=True).alias("is_own")),
                on=["pid", "stream_id"],
                how="left",
                validate="m:1",
            )
            is_own = pl.col("is_own").is_not_null()
        return listed.select(
            "pid",
            "stream_id",
            "context_id",
            pl.when(pl.col("is_null").is_not_null())
            .then(_word("null"))
            .when(is_own)
            .then(_word("per-thread"))
            .otherwise(_words("flag", STREAM_KINDS))
            .alias("kind"),
            "priority",
        )

    @once
    def _raw_streams(self) -> pl.DataFrame:
        return self._frame("streams").unique(
            ["pid", "stream_id"], keep="first", maintain_order=True
        )

    @once
    def _null_streams(self) -> pl.DataFrame:
        """pid, context_id, null_stream_id from whichever table this version has."""
        columns = ["pid", "context_id", "null_stream_id"]
        known = [self._frame("contexts"), self._frame("null_streams")]
        if (self._raw_streams["flag"] == 3).any():
            known.append(
                self._raw_streams.filter(pl.col("flag") == 3).rename(
                    {"stream_id": "null_stream_id"}
                )
            )
        return (
            pl.concat([frame[columns] for frame in known])
            .drop_nulls()
            .unique(["pid", "context_id"], keep="first", maintain_order=True)
        )

    @once
    def contexts(self) -> pl.DataFrame:
        """Contexts: pid, device_id, context_id, null_stream_id, parent_context_id,
        is_green."""
        return self._frame("contexts").with_columns(pl.col("is_green") == 1)

    @once
    def gpus(self) -> pl.DataFrame:
        """Physical GPUs: columns of GPUS."""
        return self._frame("gpus").unique("gpu_id", keep="first", maintain_order=True)

    @once
    def devices(self) -> pl.DataFrame:
        """Devices that ran something: pid, device_id, gpu_id (null where unknown)."""
        used = self.gpu_ops.select("pid", "device_id", "gpu_id")
        _, first = numbered(*used.get_columns())
        return used[as_series(first)].sort("pid", "device_id", "gpu_id")

    @once
    def _device_map(self) -> pl.DataFrame:
        """pid, device_id, gpu_id: device ids count per process, GPUs don't."""
        known = (
            self._frame("device_map")
            .drop_nulls()
            .unique(["pid", "device_id"], keep="first", maintain_order=True)
        )
        if known.height or self.gpus.height != 1:
            return known.select("pid", "device_id", "gpu_id")
        used = pl.concat(
            [self._with_pid(name)["pid", "device_id"] for name in _GPU_TABLES]
        ).unique()
        only = self.gpus["gpu_id"][0]
        return used.drop_nulls().with_columns(
            pl.lit(only, dtype=pl.Int32).alias("gpu_id")
        )

    @once
    def processes(self) -> pl.DataFrame:
        """Processes that used CUDA: pid, name (base name of the program or null)."""
        pids = pl.concat([self.runtime_calls["pid"], self.gpu_ops["pid"]]).unique()
        names = (
            self._frame("processes")
            .with_columns(
                pl.col("name")
                .str.strip_chars()
                .str.extract(r"([^/\\]*)$")
                .alias("name")
            )
            .unique("pid", keep="first", maintain_order=True)
        )
        return (
            pids.to_frame()
            .join(names, on="pid", how="left", validate="1:1")
            .sort("pid")
        )

    @once
    def threads(self) -> pl.DataFrame:
        """Threads: pid, tid, name."""
        return (
            self._frame("threads")
            .with_columns(*_split("global_tid"))
            .select("pid", "tid", "name")
            .unique(["pid", "tid"], keep="first", maintain_order=True)
        )

    # Annotations and call stacks ----------------------------------------------

    @once
    def nvtx_ranges(self) -> pl.DataFrame:
        """NVTX ranges and marks with a text, open ranges left out.

        pid, tid, start_ns, end_ns (of a mark: its start), text, domain (null for
        the default one), mark, value (numeric payload or null). Ranges that start
        and end on different threads belong to the first. Without `allow_ranges`.
        """
        return self._ranges.filter(~_ALLOWS)

    @once
    def allow_ranges(self) -> pl.DataFrame:
        """NVTX ranges that say what streamlint shall not report; as `nvtx_ranges`.

        Their texts begin with "streamlint: allow".
        """
        return self._ranges.filter(_ALLOWS & ~pl.col("mark"))

    @once
    def _ranges(self) -> pl.DataFrame:
        """Columns of `nvtx_ranges`."""
        events = self._nvtx
        if not events.height:
            return pl.DataFrame(schema=_NVTX_RANGE_SCHEMA)
        mark = pl.col("event_type") == NVTX_MARK
        return (
            events.filter(
                (
                    pl.col("event_type").is_in(NVTX_RANGES)
                    & pl.col("end_ns").is_not_null()
                )
                | mark
            )
            .filter(pl.col("domain").ne_missing(PYTHON_BACKTRACE_DOMAIN))
            .with_columns(
                pl.coalesce("text", "registered_text").alias("text"),
                pl.when(mark).then("start_ns").otherwise("end_ns").alias("end_ns"),
                mark.alias("mark"),
                pl.coalesce("uint64_value", "int64_value").alias("value"),
            )
            .filter(
                pl.col("text").is_not_null() & (pl.col("end_ns") >= pl.col("start_ns"))
            )
            .select(
                *("pid", "tid", "start_ns", "end_ns", "text", "domain", "mark", "value")
            )
        )

    @once
    def _nvtx(self) -> pl.DataFrame:
        events = self._frame("nvtx_events").with_columns(*_split("global_tid"))
        if not events.height:
            return events.with_columns(pl.lit(None, pl.String).alias("domain"))
        domains = (
            events.filter(pl.col("event_type") == NVTX_DOMAIN)
            .select(
                "pid",
                "domain_id",
                pl.coalesce("text", "registered_text").alias("domain"),
            )
            .unique(["pid", "domain_id"], keep="first", maintain_order=True)
        )
        return events.join(
            domains,
            on=["pid", "domain_id"],
            how="left",
            validate="m:1",
            maintain_order="left",
        )

    def python_stacks(self, calls: pl.DataFrame) -> dict[tuple[int, int], list[Frame]]:
        """Python frames of the given calls by (pid, correlation id).

        ``calls`` needs pid, tid, correlation_id and backtrace_ns. A frame is the
        key of its function, the key of its file, and the line; innermost first;
        names come from `string`.
        """
        located = calls.filter(pl.col("backtrace_ns").is_not_null())
        if not located.height or not self._has_python_stacks:
            return {}
        payloads = self._frame("nvtx_payloads").with_columns(*_split("global_tid"))
        domains = (
            self._nvtx.filter(
                (pl.col("event_type") == NVTX_DOMAIN)
                & (pl.col("text") == PYTHON_BACKTRACE_DOMAIN)
            )
            .select("pid", "domain_id")
            .unique()
        )
        found = (
            payloads.filter(pl.col("event_type") == NVTX_MARK)
            .join(domains, on=["pid", "domain_id"], how="semi")
            .unique(["pid", "tid", "start_ns"], keep="first", maintain_order=True)
            .join(
                located.select("pid", "tid", "correlation_id", "backtrace_ns"),
                left_on=["pid", "tid", "start_ns"],
                right_on=["pid", "tid", "backtrace_ns"],
                how="inner",
            )
        )
        stacks: dict[tuple[int, int], list[Frame]] = {}
        columns = ("pid", "correlation_id", "json_text", "binary_data")
        for pid, correlation_id, text, blob in found.select(columns).iter_rows():
            frames = decode_json(text) if text else decode_blob(blob or b"")
            if frames:
                stacks[pid, correlation_id] = frames
        return stacks

    @once
    def _has_python_stacks(self) -> bool:
        events = self._nvtx
        return (
            events.filter(
                (pl.col("event_type") == NVTX_DOMAIN)
                & (pl.col("text") == PYTHON_BACKTRACE_DOMAIN)
            ).height
            > 0
        )

    @once
    def python_stacks_lost(self) -> bool:
        """Whether Python call stacks were recorded whose payloads weren't exported."""
        if not self._has_python_stacks:
            return False
        payloads = self._frame("nvtx_payloads")
        return all(
            payloads[column].null_count() == payloads.height
            for column in ("json_text", "binary_data")
        )

    def native_stacks(
        self, callchain_ids: Iterable[int]
    ) -> dict[int, list[NativeFrame]]:
        """Native frames by call chain id, innermost first."""
        wanted = pl.Series("callchain_id", list(callchain_ids), dtype=pl.Int32)
        rows = (
            self._frame("native_stacks")
            .filter(pl.col("callchain_id").is_in(wanted.implode()))
            .sort("callchain_id", "depth")
        )
        stacks: dict[int, list[NativeFrame]] = {}
        columns = ("callchain_id", "symbol", "module", "unresolved", "address")
        for chain, symbol, module, unknown, address in rows.select(columns).iter_rows():
            frame = NativeFrame(
                "" if unknown else symbol or "", module or "", max(address or 0, 0)
            )
            stacks.setdefault(chain, []).append(frame)
        return stacks

    @once
    def native_frames(self) -> pl.DataFrame:
        """The frames of all native call stacks, each once a process.

        pid, module, address, symbol (null where unknown), in this order.
        """
        return (
            self._frame("native_stacks")
            .join(
                self.runtime_calls.select("pid", "callchain_id").drop_nulls().unique(),
                on="callchain_id",
            )
            .with_columns(
                pl.when(pl.col("unresolved").fill_null(0) == 0).then("symbol")
            )
            .filter(pl.col("module").is_not_null() & (pl.col("address") > 0))
            .select("pid", "module", "address", "symbol")
            .unique()
            .sort("pid", "module", "address", "symbol")
        )

    def string(self, key: int) -> str:
        """The interned string of this key, as written in the source."""
        import html  # its table of names: 1 ms, for traces with Python stacks

        return html.unescape(self._file.string(key) or "?")

    # Allocation and the profiler ----------------------------------------------

    @once
    def memory_events(self) -> pl.DataFrame:
        """Allocations and frees: columns of MEMORY_EVENTS, pid for global_pid."""
        return self._with_pid("memory_events").with_columns(
            _words("mem_kind", MEM_KINDS),
            _words("operation", {0: "allocation", 1: "deallocation"}),
        )

    @once
    def pool_events(self) -> pl.DataFrame:
        """Memory pool events: columns of POOL_EVENTS, pid for global_pid."""
        return self._with_pid("pool_events").with_columns(
            _words("operation", {1: "created", 2: "destroyed", 3: "trimmed"})
        )

    @once
    def diagnostics(self) -> pl.DataFrame:
        """Messages of the profiler: timestamp_ns, severity, text."""
        severities = {1: "info", 2: "warning", 3: "error", 4: "verbose"}
        return self._frame("diagnostics").with_columns(_words("severity", severities))

    @once
    def profiler_overhead(self) -> pl.DataFrame:
        """Time that the profiler itself took: pid, tid, start_ns, end_ns, name."""
        rows = self._frame("profiler_overhead").with_columns(*_split("global_tid"))
        return rows.select("pid", "tid", "start_ns", "end_ns", "name")

    # Helpers ------------------------------------------------------------------

    def _with_pid(self, name: str) -> pl.DataFrame:
        return self._with_pids.get(name, lambda: self._made_with_pid(name))

    def _made_with_pid(self, name: str) -> pl.DataFrame:
        frame = self._frame(name)
        if frame["global_pid"].null_count():
            frame = frame.with_columns(
                pl.col("global_pid").fill_null(self._only_pid << 24)
            )
        frame = frame.with_columns(pid_of("global_pid")).drop("global_pid")
        if frame.height:
            self._loaded.put(name, frame)  # not twice in memory
        return frame

    @once
    def _only_pid(self) -> int:
        """The pid of rows in cut-down exports that don't say whose they are."""
        pids = self.runtime_calls["pid"].unique()
        return int(pids[0]) if len(pids) == 1 else 0


_ALLOWS = pl.col("text").str.starts_with("streamlint: allow")
_GPU_TABLES = ("kernels", "memcpys", "memsets", "graph_traces")
_NVTX_RANGE_SCHEMA = schema(
    *("pid", "tid", "start_ns", "end_ns"),
    **{"text": pl.String, "domain": pl.String, "mark": pl.Boolean, "value": pl.Int64},
)


def _split(column: str) -> list[pl.Expr]:
    return [pid_of(column), (pl.col(column) % 2**24).cast(pl.Int32).alias("tid")]


def _word(text: str) -> pl.Expr:
    return pl.lit(text, dtype=pl.Categorical)


def _described(names: pl.Series) -> list[pl.Series]:
    """name, kind and per_thread of calls by their raw names, as `describe_names`."""
    described = describe_names(names)
    # Found by their codes: a join would copy all columns of the calls.
    raw = described["raw_name"].to_physical().to_numpy()
    row = np.zeros(raw.max(initial=0) + 1, dtype=np.int32)
    row[raw] = np.arange(described.height)
    at = as_series(row[names.to_physical().fill_null(0).to_numpy()])
    if names.null_count():
        at = at.set(names.is_null(), None)
    found = [described[n].gather(at) for n in ("name", "kind", "per_thread")]
    return [found[0], found[1].fill_null("other"), found[2]]


def _words(column: str, words: dict[int, str]) -> pl.Expr:
    return pl.col(column).replace_strict(
        words, default="unknown", return_dtype=pl.Categorical
    )


def _with_words(copies: pl.DataFrame) -> pl.DataFrame:
    return copies.with_columns(
        _words("copy_kind", COPY_KINDS),
        _words("src_kind", MEM_KINDS),
        _words("dst_kind", MEM_KINDS),
    )

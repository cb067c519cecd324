"""Chooses the rows that judging some seconds of a trace takes.

Only calls and GPU work are chosen from: all other tables say what was before, or are
few rows. Of GPU work that which waits, runs or begins in the time stays, its neighbours
in the streams, and the first of each kind, which often is a special one. Of calls those
around the time, those that failed, and all whose effect lasts: waits, events,
allocations, streams, graphs. Rows without their partner stay, so that a recording
lacks what it lacks; of the others it is counted what defects of a recording are
measured by (`LeftOut`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import polars as pl
import polars.selectors as cs

from streamlint.arrays import as_series
from streamlint.intervals import Bools, Int64
from streamlint.trace.calls import GPU_WORK, L2_CALLS, call_kind, plain_name
from streamlint.trace.lookup import first_rows, pid_of
from streamlint.trace.pages import Chosen
from streamlint.trace.reader import ExportFile, usable_times
from streamlint.trace.tables import BACKTRACE_EVENT_CLASS, MIGRATION_COPY_KINDS, TABLES

MARGIN_NS = 10_000_000
"""Read before and after the time as well: rules look at neighbours some us away."""
FIRST_OF_A_KIND = 8
"""Launches of each kernel and each graph that stay wherever they are.

From the third on a kernel is warm and a graph was worth its instantiation.
"""
START_UP_IDS = 120
"""Correlation ids that the runtime spends on starting up, all in one go.

116 or 117 in every capture seen, of driver queries that are skipped by default.
"""
START_UP_HOLE = 100
"""A hole of this many ids is the start-up."""
_SHOWN = 5
"""Launches of each kind that stay as evidence of how they were recorded."""
_SLICE = 1 << 20
_OPS = ("kernels", "memcpys", "memsets", "graph_traces")
CHOSEN_FROM = ("runtime_calls", *_OPS)
"""Tables of which a part is read; the others are read whole."""
_PAGEABLE = 0
_ENDLESS = 1 << 61


class LeftOut(NamedTuple):
    """What was not read, all of it with its partner and without a fault.

    ``rows`` by table; ``ops`` is the GPU work that is no node of a graph; ``launches``
    the calls that issued work, ``graphs`` those that launched one, ``stacks`` those
    with a call stack; ``python_stacks`` all calls with one of Python. ``unrecorded`` is
    how many ids of a process have no row at all, None where everything was read.
    """

    rows: Mapping[str, int]
    ops: int = 0
    launches: int = 0
    graphs: int = 0
    stacks: int = 0
    python_stacks: int = 0
    unrecorded: Mapping[int, int] | None = None

    def of(self, *tables: str) -> int:
        """Rows of these tables."""
        return sum(self.rows.get(name, 0) for name in tables)

    @property
    def work(self) -> int:
        """Rows of GPU work."""
        return self.of(*_OPS)


NOTHING = LeftOut({})


class Part(NamedTuple):
    """The rows to read, by table, and what that leaves out."""

    chosen: Mapping[str, Chosen]
    left_out: LeftOut


def unrecorded_ids(ids: Int64) -> int:
    """How many ids are missing between these, which ascend, the start-up's aside."""
    steps = np.diff(ids)
    holes = steps[steps > 0] - 1
    start_up = np.flatnonzero(holes >= START_UP_HOLE)
    if len(start_up):
        holes[start_up[0]] = max(0, int(holes[start_up[0]]) - START_UP_IDS)
    return int(holes.sum())


def part_of(file: ExportFile, start_ns: int | None, end_ns: int | None) -> Part | None:
    """What to read for judging what starts from ``start_ns`` to ``end_ns``.

    None where the export doesn't tell well enough what belongs together: all of it.
    """
    start = -_ENDLESS if start_ns is None else start_ns
    end = _ENDLESS if end_ns is None else end_ns
    kinds = _Kinds(file)
    calls = _calls(file, kinds, start, end)
    # Under which L2 window the last kernel of a run ran, all of it tells.
    if calls is None or kinds.l2:
        return None
    work = _work(file)
    if work is None or not work.rows.height:
        return None
    choice = _Choice(calls, work, start, end)
    del calls, work
    return choice.part(_records(file))


# What there is --------------------------------------------------------------------


class _Scanned(NamedTuple):
    """Rows as far as they are looked at, in stored order, and which those are.

    ``others`` has pid and correlation_id of the rest.
    """

    rows: pl.DataFrame
    stored: dict[str, Chosen]
    others: pl.DataFrame


_NOISE, _OTHER, _LASTING, _WORK = 0, 1, 2, 3
"""Kinds of calls; from `_WORK` on those of `GPU_WORK`, in their order."""
_GRAPH = _WORK + GPU_WORK.index("graph launch")
_SYNC_COPY = _WORK + GPU_WORK.index("sync memcpy")


class _Kinds:
    """The kinds of calls by the keys of their names."""

    def __init__(self, file: ExportFile) -> None:
        self._file = file
        self._keys = np.empty(0, np.int64)
        self._kinds = np.empty(0, np.int8)
        self.l2 = False
        """Whether a call controls L2."""

    def of(self, keys: Int64) -> np.ndarray:
        """One number a key."""
        new = np.setdiff1d(keys, self._keys)
        if len(new):
            named = np.array([self._kind(int(key)) for key in new], np.int8)
            known = np.concatenate([self._keys, new])
            order = np.argsort(known)
            self._keys = known[order]
            self._kinds = np.concatenate([self._kinds, named])[order]
        return self._kinds[np.searchsorted(self._keys, keys)]

    def _kind(self, key: int) -> int:
        name = self._file.string(key) or ""
        kind = call_kind(plain_name(name))
        self.l2 |= kind in L2_CALLS
        if kind in GPU_WORK:
            return _WORK + GPU_WORK.index(kind)
        # An event of another process may be recorded there.
        if kind == "other" and "Ipc" not in name:
            return _OTHER
        return _NOISE if kind == "noise" else _LASTING


def _calls(
    file: ExportFile, kinds: _Kinds, start_ns: int, end_ns: int
) -> _Scanned | None:
    """Calls but those that the profiler made, unless these are near the time or odd.

    pid, tid, correlation_id, start_ns, end_ns, kind, failed, usable (has times and an
    id), copy (carries a call stack), twice (of a call that has a row of its own), chain
    (has a native call stack).
    """
    table = TABLES["runtime_calls"]
    if not all(file.has_column(table, n) for n in ("global_tid", "correlation_id")):
        return None

    def read(found: pl.DataFrame, first: int) -> tuple[pl.DataFrame, pl.DataFrame]:
        kind = kinds.of(found["name"].fill_null(-1).to_numpy())
        timed = usable_times(table, found)
        usable = timed & found["correlation_id"].is_not_null().to_numpy()
        rows = found.select_seq(
            pl.int_range(first, first + found.height, dtype=pl.Int64).alias("row"),
            pid_of("global_tid"),
            (pl.col("global_tid") % 2**24).cast(pl.Int32).alias("tid"),
            *("correlation_id", "start_ns", "end_ns"),
            as_series(kind, "kind"),
            (pl.col("return_value").fill_null(0) != 0).alias("failed"),
            as_series(usable, "usable"),
            pl.col("event_class").eq_missing(BACKTRACE_EVENT_CLASS).alias("copy"),
            pl.col("callchain_id").is_not_null().alias("chain"),
        )
        near = pl.col("end_ns") >= start_ns - MARGIN_NS
        near &= pl.col("start_ns") < end_ns + MARGIN_NS
        odd = pl.any_horizontal("failed", "copy", ~pl.col("usable"))
        odd |= pl.struct("pid", "tid").is_first_distinct()
        wanted = rows.select(near | odd | (pl.col("kind") != _NOISE)).to_series()
        return rows.filter(wanted), rows.select(_KEY).filter(~wanted)

    columns = (
        *("start_ns", "end_ns", "event_class", "global_tid", "correlation_id"),
        *("name", "return_value", "callchain_id"),
    )
    scanned = file.scan(table.name, columns, read)
    if scanned is None or not scanned[0]:
        return None
    read_rows, heights = scanned
    rows = _joined([kept for kept, _ in read_rows])
    others = _joined([left for _, left in read_rows])
    if rows["pid"].null_count() or others["pid"].null_count():
        return None
    stored = Chosen(rows.drop_in_place("row").to_numpy(), heights)
    twice = rows["copy"].to_numpy().copy()
    if twice.any():
        keys = rows.select(*_KEY, "copy")
        calls, copies = keys.filter(~pl.col("copy")), keys.filter("copy")
        twice[twice] = first_rows(calls, copies) >= 0
    rows = rows.with_columns(as_series(twice, "twice"))
    return _Scanned(rows, {table.name: stored}, others)


def _work(file: ExportFile) -> _Scanned | None:
    """All GPU work.

    pid, device_id, stream_id, correlation_id, start_ns, end_ns, table (number in
    `_OPS`), timed (has times), usable (and is the program's, not the driver's), node
    (of a graph), program (the kernel or the graph, null of other work), copy_kind,
    pageable (writes such memory).
    """
    parts: list[pl.DataFrame] = []
    stored: dict[str, Chosen] = {}
    for number, name in enumerate(_OPS):
        table = TABLES[name]
        if not file.has_table(table):
            continue
        columns = [c.name for c in table.columns if c.name in _SCANNED]
        scanned = file.scan(name, columns, partial(_work_of, number))
        if scanned is None:
            return None
        frames, heights = scanned
        parts += frames
        stored[name] = Chosen(np.arange(heights.sum(), dtype=np.int64), heights)
    if not parts:
        return None
    rows = _joined(parts)
    if rows["pid"].null_count():
        return None
    return _Scanned(rows, stored, rows.clear().select(_KEY))


def _joined(frames: list[pl.DataFrame]) -> pl.DataFrame:
    """The frames below each other; takes their columns away from them."""
    columns = [
        pl.concat([frame.drop_in_place(name) for frame in frames], rechunk=True)
        for name in frames[0].columns
    ]
    return pl.DataFrame(columns)


def _work_of(number: int, found: pl.DataFrame, first: int) -> pl.DataFrame:
    """Rows of one of `_OPS`."""
    name = _OPS[number]
    timed = usable_times(TABLES[name], found)
    usable = timed
    none = pl.lit(None, dtype=pl.Int64)
    node = pl.col("graph_node_id") if "graph_node_id" in found.columns else none
    program = pl.coalesce("full_name", "name") if name == "kernels" else none
    if name == "graph_traces":
        program = pl.col("graph_exec_id")
    copied, pageable = none, pl.lit(value=False)
    if name == "memcpys":
        copied = pl.col("copy_kind")
        moved = found["copy_kind"].is_in(MIGRATION_COPY_KINDS).fill_null(value=False)
        usable = timed & ~moved.to_numpy()
        pageable = pl.col("dst_kind").eq_missing(_PAGEABLE)
    program = pl.coalesce(node // 2**32, program)
    return found.select_seq(
        pid_of("global_pid"),
        *("device_id", "stream_id", "correlation_id", "start_ns", "end_ns"),
        pl.lit(number, dtype=pl.Int8).alias("table"),
        as_series(timed, "timed"),
        as_series(usable, "usable"),
        node.is_not_null().alias("node"),
        program.cast(pl.Int32, strict=False).alias("program"),
        copied.cast(pl.Int8, strict=False).alias("copy_kind"),
        pageable.alias("pageable"),
    )


_KEY = ("pid", "correlation_id")
_SCANNED = (
    *("start_ns", "end_ns", "global_pid", "device_id", "stream_id", "correlation_id"),
    *("graph_node_id", "name", "full_name", "copy_kind", "dst_kind", "graph_exec_id"),
)


def _records(file: ExportFile) -> pl.DataFrame:
    """pid and correlation_id of event records."""
    key = ("global_pid", "correlation_id")
    scanned = file.scan("event_records", key, lambda found, _: found)
    frames = [] if scanned is None else scanned[0]
    nothing = pl.DataFrame(schema={"pid": pl.Int32, "correlation_id": pl.Int64})
    ids = [found.select(pid_of("global_pid"), "correlation_id") for found in frames]
    return pl.concat([nothing, *ids])


# What is read of it ---------------------------------------------------------------


class _Choice:
    """Chooses. Operations and calls are told by their places in the scanned rows.

    ``ops`` are those of GPU work that are usable, with what launched them: tid, kind,
    issue_ns and issued_ns (from when until when), alone (nothing did; issued at its
    start). ``launches`` are the calls that issue work, one an id. Both are millions of
    rows: what isn't needed any more is dropped.
    """

    def __init__(
        self, calls: _Scanned, work: _Scanned, start_ns: int, end_ns: int
    ) -> None:
        self.start_ns, self.end_ns = start_ns, end_ns
        self.scanned_calls, self.scanned_work = calls, work
        self.calls = calls.rows
        launches = self.calls.lazy().with_row_index("call")
        launches = launches.filter(
            pl.col("usable") & ~pl.col("twice") & (pl.col("kind") >= _WORK)
        )
        if not self.calls["start_ns"].is_sorted():
            launches = launches.sort("start_ns", "end_ns", maintain_order=True)
        keys = launches.select("call", *_KEY).collect()
        first = first_rows(keys, keys) == np.arange(keys.height, dtype=np.int32)
        self.launches = keys if first.all() else keys.filter(as_series(first))
        keys = self.launches
        ops = work.rows.with_row_index("op")
        if not ops["usable"].all():
            ops = ops.filter("usable")
        by = as_series(first_rows(keys, ops))
        by = keys["call"].gather(by.set(by < 0, None))
        called = self.calls.select_seq(
            pl.col("tid").gather(by),
            pl.col("kind").gather(by),
            pl.col("start_ns").gather(by).alias("issue_ns"),
            pl.col("end_ns").gather(by).alias("issued_ns"),
        )
        self.ops = (
            ops.drop("timed", "usable")
            .hstack(called)
            .with_columns(
                pl.col("issue_ns").is_null().alias("alone"),
                pl.coalesce("issue_ns", "start_ns").alias("issue_ns"),
            )
        )
        self.made = first_rows(self.ops, keys)
        """For each launch its first operation, or -1."""

    def _forget_times(self) -> None:
        """Keep of GPU work what is looked at once it is known when all is read."""
        self.alone = self.ops.filter("alone").select(_KEY)
        self.ops = self.ops.select("op")
        rows = self.scanned_work.rows.select(*_KEY, "table", "usable", "node")
        self.scanned_work = self.scanned_work._replace(rows=rows)

    def part(self, records: pl.DataFrame) -> Part:
        """The rows to read; ``records`` are ids of event records."""
        since, until = self._around()
        ops = self._ops_kept(since, until)
        self._forget_times()
        calls = self._calls_kept(since, until, ops)
        chosen = {
            name: _some(stored, calls)
            for name, stored in self.scanned_calls.stored.items()
        }
        table = self.scanned_work.rows["table"].to_numpy()
        for name, stored in self.scanned_work.stored.items():
            chosen[name] = _some(stored, ops[table == _OPS.index(name)])
        return Part(chosen, self._left_out(calls, ops, records))

    def _around(self) -> tuple[int, int]:
        """From when until when everything is read.

        From the launch of what waits for its turn as the time begins, until the work
        that each thread goes on with after what it called in the time.
        """
        start, end = self.start_ns, self.end_ns
        late = pl.col("start_ns").is_between(start, end, closed="left")
        queued = self.ops.select(
            pl.col("issue_ns").filter(late & (pl.col("issue_ns") < start)).min()
        ).item()
        since = start - MARGIN_NS
        if queued is not None:
            since = min(since, queued)
        thread = ["pid", "tid"]
        done = (
            self.calls.lazy()
            .filter(late & pl.col("usable"))
            .group_by(thread)
            .agg(pl.col("end_ns").max().alias("done_ns"))
        )
        after = (
            self.ops.lazy()
            .filter(pl.col("issue_ns") >= start)
            .select(*thread, "issue_ns", "start_ns")
            .join(done, on=thread)
            .filter(pl.col("issue_ns") >= pl.col("done_ns"))
            .group_by(thread)
            .agg(pl.col("start_ns").get(pl.col("issue_ns").arg_min()))
        )
        until = [
            end,
            done.select(pl.col("done_ns").max()).collect().item(),
            after.select(pl.col("start_ns").max()).collect().item(),
        ]
        return since, max(at for at in until if at is not None) + MARGIN_NS

    def _ops_kept(self, since: int, until: int) -> Bools:
        """Which rows of GPU work are read, by what they themselves are."""
        issue, end = pl.col("issue_ns"), pl.col("end_ns")
        near = (issue < until) & (end >= since)
        judged = (issue < self.end_ns) & (end >= self.start_ns)
        place = ["table", "pid", "device_id", "stream_id", "copy_kind"]
        first = [pl.col("op").get(pl.col(at).arg_min()) for at in _TIMES]
        last = [pl.col("op").get(pl.col(at).arg_max()) for at in _TIMES]
        last_call = pl.col("op").get(pl.col("issued_ns").arg_max())

        def picked(ops: pl.LazyFrame) -> pl.Series:
            kept = [
                ops.filter(near | judged | (pl.col("alone") & ~pl.col("node"))),
                _first_of(ops.filter(~pl.col("node")), "table", "pid", "program"),
            ]
            # Neighbours of what is near; where all work of a kind begins and ends. Of
            # copies that block the host the last of a stream waits for all before it.
            blocking = (
                (pl.col("table") == _OPS.index("memcpys"))
                & (issue >= self.start_ns)
                & (pl.col("pageable") | (pl.col("kind") == _SYNC_COPY))
            )
            for some, by, ends in (
                (ops, place, [*first, *last]),
                (ops.filter(issue < since), place, last),
                (ops.filter(issue >= until), place, first),
                (ops.filter(issue < self.start_ns), ["pid", "tid"], last),
                (ops.filter(blocking), place, [last_call]),
            ):
                found = some.group_by(by).agg(
                    op.alias(f"op{number}") for number, op in enumerate(ends)
                )
                kept.append(found.unpivot(cs.starts_with("op"), value_name="op"))
            numbers = pl.concat([one.select("op") for one in kept])
            return numbers.drop_nulls().unique().sort("op").collect()["op"]

        # Slice by slice, then from what that leaves: sorting all takes much memory.
        slices = [picked(one.lazy()) for one in self.ops.iter_slices(_SLICE)]
        left = pl.concat(slices) if slices else self.ops["op"]
        places = as_series(np.searchsorted(self.ops["op"].to_numpy(), left.to_numpy()))
        kept = [picked(self.ops[places].lazy()).to_frame().lazy()]
        ops = self.ops.lazy()
        # All nodes of a graph, if one.
        nodes = ops.filter("node").select(*_KEY, "op", "program", "issue_ns")
        launched = nodes.unique([*_KEY, "program"], keep="first")
        of_kind = _first_of(launched, "pid", "program")
        graphs = [launched.join(of_kind, on="op", how="semi").select(_KEY)]
        graphs.append(ops.filter(judged & pl.col("node")).select(_KEY))
        kept.append(nodes.join(pl.concat(graphs), on=_KEY, how="semi"))
        rows = self.scanned_work.rows
        moved = ~pl.col("usable") & (pl.col("start_ns") < until) & (end >= since)
        chosen = rows.select(~pl.col("timed") | moved).to_series().to_numpy().copy()
        for found in kept:
            chosen[found.select("op").collect()["op"].drop_nulls().to_numpy()] = True
        return chosen

    def _calls_kept(self, since: int, until: int, ops: Bools) -> Bools:
        """Which rows of calls are read, given the work; adds the work of these."""
        often = pl.col("kind") != _LASTING
        odd = pl.col("failed") | ~pl.col("usable")
        near = (pl.col("start_ns") < until) & (pl.col("end_ns") >= since)
        calls = self.calls.lazy().with_row_index("call")
        kept: Bools = (
            calls.select(~often | odd | near).collect().to_series().to_numpy().copy()
        )
        launches = self.launches["call"].to_numpy()
        kept[launches[self.made < 0]] = True
        # What shows how launches were recorded, and how processes began.
        launched = calls.filter(pl.col("usable") & (pl.col("kind") >= _WORK))
        for some in (launched, launched.filter("chain")):
            shown = some.group_by("pid", "kind").agg(pl.col("call").head(_SHOWN))
            kept[shown.collect()["call"].explode().drop_nulls().to_numpy()] = True
        least = pl.col("call").get(pl.col("correlation_id").arg_min())
        first_ids = calls.filter("usable").group_by("pid", "tid").agg(least).collect()
        kept[first_ids["call"].drop_nulls().to_numpy()] = True
        for within in self._around_others():
            kept[within] = True
        # With a call all rows of its id, with work its call, and the other way round.
        work = self.scanned_work.rows.select(_KEY).filter(as_series(ops))
        ids = pl.concat([self.calls.select(_KEY).filter(as_series(kept)), work])
        kept |= first_rows(ids.unique(), self.calls) >= 0
        called = self.made[kept[launches] & (self.made >= 0)]
        ops[self.ops["op"].to_numpy()[called]] = True
        return kept

    def _around_others(self) -> Iterator[Int64]:
        """Calls within which others that are read were made; without they'd seem apart.

        Of those around one the call that reaches furthest.
        """
        thread = ["pid", "tid"]
        often = pl.col("kind") != _LASTING
        calls = self.calls.with_row_index("call").filter("usable")
        calls = calls.select(
            "call", *thread, "start_ns", "end_ns", often.alias("often")
        )
        if not calls["start_ns"].is_sorted():
            calls = calls.sort("start_ns", maintain_order=True)
        reach = pl.col("end_ns").cum_max().over(thread)
        furthest = calls.clear()
        for some in calls.iter_slices(_SLICE):
            outer = pl.concat([furthest, some.filter("often")])
            outer = outer.filter(pl.col("end_ns") >= reach)
            inner = some.filter(~pl.col("often")).select(
                *thread, "start_ns", pl.col("end_ns").alias("done_ns")
            )
            found = inner.join_asof(
                outer, on="start_ns", by=thread, check_sortedness=False
            )
            yield found.filter(pl.col("done_ns") <= pl.col("end_ns"))["call"].to_numpy()
            last = pl.all().get(pl.col("end_ns").arg_max())
            furthest = outer.group_by(thread).agg(last).select(outer.columns)
            furthest = furthest.sort("start_ns")

    def _left_out(self, calls: Bools, ops: Bools, records: pl.DataFrame) -> LeftOut:
        out = as_series(~calls)
        dropped = self.calls.select(*_KEY, "copy", "twice", "chain").filter(out)
        copies = dropped.filter("twice")
        dropped = dropped.filter(~pl.col("twice"))
        launches = self.launches["call"].filter(out.gather(self.launches["call"]))
        kinds = self.calls["kind"].gather(launches)
        chains = self.calls["chain"].gather(launches).to_numpy()
        keys = self.calls.select(_KEY)[launches]
        chains = chains | (first_rows(copies.filter("chain"), keys) >= 0)
        work = self.scanned_work.rows.select("table", "usable", "node")
        work = work.filter(as_series(~ops), pl.col("usable"))
        rows = {
            name: int((work["table"] == number).sum())
            for number, name in enumerate(_OPS)
        }
        rows["runtime_calls"] = dropped.height + self.scanned_calls.others.height
        stacks = int(dropped["copy"].sum()) + int(
            (first_rows(copies, dropped) >= 0).sum()
        )
        return LeftOut(
            rows,
            ops=work.filter(~pl.col("node")).height,
            launches=len(launches),
            graphs=int((kinds == _GRAPH).sum()),
            stacks=int(chains.sum()),
            python_stacks=stacks,
            unrecorded=self._unrecorded(records),
        )

    def _unrecorded(self, records: pl.DataFrame) -> dict[int, int]:
        """How many ids have no row, by process."""
        frames = [
            # All ids of launches are those of calls.
            self.alone,
            self.calls.filter("usable").select(_KEY),
            self.scanned_calls.others,
            records,
        ]
        pids = pl.concat([frame["pid"] for frame in frames]).unique().sort()
        found: dict[int, int] = {}
        for pid in pids.drop_nulls():
            own = [_of_process(frame, pid)["correlation_id"] for frame in frames]
            ids = np.concatenate([one.drop_nulls().to_numpy() for one in own])
            ids = ids[ids > 0]
            ids.sort(kind="stable")
            found[pid] = unrecorded_ids(ids)
        return found


_TIMES = ("issue_ns", "start_ns", "end_ns")


def _first_of(ops: pl.LazyFrame, *by: str) -> pl.LazyFrame:
    """The places of the first operations alike in these columns."""
    first = pl.col("op").sort_by("issue_ns").head(FIRST_OF_A_KIND)
    found = ops.filter(pl.col("program").is_not_null()).group_by(by)
    return found.agg(first).select("op").explode("op").drop_nulls()


def _of_process(frame: pl.DataFrame, pid: int) -> pl.DataFrame:
    return frame.filter(pl.col("pid") == pid)


def _some(stored: Chosen, kept: Bools) -> Chosen:
    return stored._replace(rows=stored.rows[np.flatnonzero(kept)])

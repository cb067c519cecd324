"""Places findings: streams, threads, kernels, NVTX ranges and source lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import polars as pl

from streamlint.findings import Rows, SourceFrame, Where
from streamlint.native import NativeLines
from streamlint.once import once
from streamlint.own import (
    in_own_code,
    is_cuda_function,
    is_python_module,
    is_system_module,
    module_name,
)
from streamlint.steady import Region, distinct, groups
from streamlint.trace.model import NativeFrame, Trace
from streamlint.trace.stacks import Frame

_MAX_NAMES = 3
_MAX_CALLS = 64
_MAX_STACK = 64
_OP_PLACE = (
    *("pid", "tid", "device_id", "context_id", "stream_id", "correlation_id"),
    *("start_ns", "end_ns", "issue_ns", "kind", "name"),
)


class Work(NamedTuple):
    """Operations and where they are, which takes a while to tell of many.

    ``rows`` have what allowances ask for. Tuples are as in `streamlint.findings.Where`.
    """

    rows: pl.LazyFrame
    pids: tuple[int, ...]
    devices: tuple[int, ...]
    contexts: tuple[int, ...]
    streams: tuple[int, ...]
    threads: tuple[int, ...]
    kernels: tuple[str, ...]


def work_of(
    trace: Trace, region: Region, streams: Iterable[int | None] | None = None
) -> Work:
    """The operations of a region in these streams, or in all.

    Several findings of a process may be about them: they are told once.
    """
    chosen = None
    if streams is not None:
        chosen = tuple(sorted({stream for stream in streams if stream is not None}))
    known = trace.derived(_known_work)
    if (region, chosen) not in known:
        ops = trace.gpu_ops.lazy().filter(region.holds()).select(_OP_PLACE)
        if chosen is not None:
            ops = ops.filter(pl.col("stream_id").is_in(chosen))
        known[region, chosen] = _work(ops.collect())._replace(rows=ops)
    return known[region, chosen]


def locate(
    trace: Trace,
    *,
    calls: pl.DataFrame | None = None,
    ops: pl.DataFrame | Work | None = None,
) -> Where:
    """Where these calls (rows of runtime_calls) and these operations are.

    Device and context are named only where all share one; kernels are the three
    that ran longest, NVTX ranges the three innermost ones seen most.
    """
    work = ops if isinstance(ops, Work) or ops is None else _work(ops)
    pids = {*_distinct(calls, "pid"), *(work.pids if work else ())}
    pid = pids.pop() if len(pids) == 1 else None
    names = [name for of, name in trace.processes.iter_rows() if of == pid]
    source, stack = _frames(trace, calls)
    return Where(
        pid=pid,
        process=names[0] if names else None,
        device=_only(work.devices) if work else None,
        context=_only(work.contexts) if work else None,
        streams=work.streams if work else (),
        threads=_distinct(calls, "tid") or (work.threads if work else ()),
        kernels=work.kernels if work else (),
        nvtx=_enclosing(trace, calls),
        source=source,
        stack=stack,
        rows=Rows(calls, work and work.rows),
    )


def _known_work(_: Trace) -> dict[tuple[Region, tuple[int, ...] | None], Work]:
    return {}


def _work(ops: pl.DataFrame) -> Work:
    ran = ops.select("kind", "name", "start_ns", "end_ns").filter(
        pl.col("kind") == "kernel"
    )
    kernels: tuple[str, ...] = ()
    if ran.height:
        longest = (
            ran.group_by("name")
            .agg((pl.col("end_ns") - pl.col("start_ns")).sum().alias("total"))
            .sort("total", "name", descending=[True, False])
            .head(_MAX_NAMES)
        )
        kernels = tuple(longest["name"])
    return Work(
        ops.lazy(),
        pids=_distinct(ops, "pid"),
        devices=_distinct(ops, "device_id"),
        contexts=_distinct(ops, "context_id"),
        streams=_distinct(ops, "stream_id"),
        threads=_distinct(ops, "tid"),
        kernels=kernels,
    )


def calls_behind(trace: Trace, ops: pl.DataFrame) -> pl.DataFrame:
    """The rows of launches that asked for these operations, in their order."""
    return _sharing_key(trace.launches, ops)


def ops_asked_by(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """The rows of gpu_ops that these calls asked for, in their order."""
    return _sharing_key(trace.gpu_ops, calls)


def _sharing_key(rows: pl.DataFrame, keys: pl.DataFrame) -> pl.DataFrame:
    on = ["pid", "correlation_id"]
    pids = distinct(keys, "pid")
    if len(pids) != 1:
        return rows.join(keys, on=on, how="semi", maintain_order="left")
    # A fifth of the time of a join by two columns.
    ids = keys["correlation_id"].unique().implode()
    return rows.filter((pl.col("pid") == pids[0]) & pl.col("correlation_id").is_in(ids))


def sites(trace: Trace, calls: pl.DataFrame) -> pl.Series:
    """The place in the user's code of each call, null where the trace has none.

    One string a call, "file:line function" (Python) or "function (module)": what
    binaries at hand tell beyond the trace doesn't change how findings are told apart.
    """
    found = _own(_stacks(trace, calls, trace.derived(_Recorded)))
    keys = zip(calls["pid"], calls["correlation_id"], strict=True)
    texts = [
        None if (frame := found.get(key)) is None else describe(frame) for key in keys
    ]
    return pl.Series("site", texts, dtype=pl.String)


def describe(frame: SourceFrame) -> str:
    """One line for a frame."""
    if frame.line is None:
        return f"{frame.function} ({frame.file})"
    return f"{frame.file}:{frame.line} {frame.function}"


def user_frames(
    trace: Trace, calls: pl.DataFrame
) -> dict[tuple[int, int], SourceFrame]:
    """The user's own innermost frame by (pid, correlation id)."""
    return _own(_stacks(trace, calls, trace.derived(_Lined)))


def notes(trace: Trace) -> tuple[str, ...]:
    """Why native frames have no lines although binaries were named."""
    if not trace.settings.symbols:
        return ()
    return tuple(trace.derived(NativeLines).notes)


class _Stack(NamedTuple):
    """A call stack, innermost frame first, and the innermost of the user's own.

    ``sure`` is False where ``own`` is only the best there is.
    """

    frames: tuple[SourceFrame, ...]
    own: SourceFrame | None
    sure: bool = True


_Stacks = dict[tuple[int, int], _Stack]


class _Recorded:
    """Native call stacks as a trace has them; keeps those that were asked for."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: dict[int, list[NativeFrame]] = {}
        self._made: dict[tuple[int, int], _Stack] = {}

    @once
    def _kernels(self) -> frozenset[tuple[str, ...]]:
        names = self._trace.kernels["full_name"].unique().drop_nulls()
        return frozenset(map(_words_of, names))

    def load(self, chains: pl.Series) -> None:
        """Read these call chains."""
        new = {*chains} - self._known.keys()
        if new:
            self._known.update(self._trace.native_stacks(new))

    def stack(self, pid: int, chain: int) -> _Stack | None:
        """A loaded call chain, of a call of this process; None if it is empty."""
        if chain not in self._known:
            return None
        if (pid, chain) not in self._made:
            self._made[pid, chain] = self._stack(pid, self._known[chain])
        return self._made[pid, chain]

    def _stack(self, pid: int, recorded: list[NativeFrame]) -> _Stack:
        frames: list[SourceFrame] = []
        own: SourceFrame | None = None
        for frame in recorded:
            if is_python_module(frame.module):
                break  # what it runs, the Python stack shows better
            system = is_system_module(frame.module)
            for at in self._at(pid, frame):
                frames.append(at)
                if own is None and not system and self._is_own(pid, frame.module, at):
                    own = at
        return _Stack(tuple(frames), own)

    def _at(self, pid: int, frame: NativeFrame) -> tuple[SourceFrame, ...]:
        """The functions at a frame, the innermost first."""
        del pid
        if not frame.symbol:
            return ()
        return (SourceFrame(module_name(frame.module), None, frame.symbol),)

    def _is_own(self, pid: int, module: str, frame: SourceFrame) -> bool:
        """Whether a frame of the user's binary is the user's, not linked into it."""
        if _words_of(frame.function) in self._kernels:
            return False  # nvcc's stub, which launches the kernel
        if frame.line is not None:
            return in_own_code(frame)
        return not is_cuda_function(frame.function) and not self._has_lines(pid, module)

    def _has_lines(self, pid: int, module: str) -> bool:
        del pid, module
        return False


def _words_of(signature: str) -> tuple[str, ...]:
    """The words of a signature, of which demanglers order some differently."""
    return tuple(sorted(re.findall(r"\w+|[^\w\s]", signature)))


class _Lined(_Recorded):
    """Native call stacks with source lines, as far as binaries at hand tell them."""

    @once
    def _lines(self) -> NativeLines:
        return self._trace.derived(NativeLines)

    def _at(self, pid: int, frame: NativeFrame) -> tuple[SourceFrame, ...]:
        return self._lines.at(pid, frame) or super()._at(pid, frame)

    def _has_lines(self, pid: int, module: str) -> bool:
        return self._lines.has_lines(pid, module)


def _own(stacks: _Stacks) -> dict[tuple[int, int], SourceFrame]:
    return {key: stack.own for key, stack in stacks.items() if stack.own is not None}


def _stacks(trace: Trace, calls: pl.DataFrame, native: _Recorded) -> _Stacks:
    """Call stacks by (pid, correlation id)."""
    if not calls.height:
        return {}
    made: dict[tuple[Frame, ...], _Stack] = {}
    found: _Stacks = {}
    for key, stack in _python_stacks(trace, calls).items():
        frames = tuple(stack)
        if frames not in made:
            made[frames] = _python_stack(trace, frames)
        found[key] = made[frames]
    if calls["callchain_id"].null_count() == calls.height:
        return found
    chained = calls.filter(pl.col("callchain_id").is_not_null())
    native.load(chained["callchain_id"].unique())
    columns = ("pid", "correlation_id", "callchain_id")
    for pid, correlation_id, chain in chained.select(columns).iter_rows():
        inner = native.stack(pid, chain)
        if inner is not None:
            outer = found.get((pid, correlation_id))
            found[pid, correlation_id] = inner if outer is None else _on(inner, outer)
    return found


def _on(native: _Stack, python: _Stack) -> _Stack:
    """A native stack above the Python stack that called it."""
    own = native.own if native.own and not python.sure else python.own
    return _Stack((*native.frames, *python.frames), own, python.sure)


def _python_stack(trace: Trace, frames: tuple[Frame, ...]) -> _Stack:
    named = tuple(
        SourceFrame(trace.string(file), line, trace.string(function))
        for function, file, line in frames
    )
    own = next(filter(in_own_code, named), None)
    return _Stack(named, own or named[0], own is not None)


def _python_stacks(
    trace: Trace, calls: pl.DataFrame
) -> dict[tuple[int, int], list[Frame]]:
    """`Trace.python_stacks`, which is dear, where these calls can have any."""
    if calls["backtrace_ns"].null_count() == calls.height:
        return {}
    return trace.python_stacks(calls)


def _frames(
    trace: Trace, calls: pl.DataFrame | None
) -> tuple[tuple[SourceFrame, ...], tuple[SourceFrame, ...]]:
    """The places of these calls, the most frequent first, and a stack to that."""
    if calls is None:
        return (), ()
    stacks = _stacks(trace, calls, trace.derived(_Lined))
    places = [f for f, _ in Counter(_own(stacks).values()).most_common(_MAX_NAMES)]
    if not places:
        return (), ()
    stack = next(s.frames for s in stacks.values() if s.own == places[0])
    return tuple(places), stack[:_MAX_STACK]


def _enclosing(trace: Trace, calls: pl.DataFrame | None) -> tuple[str, ...]:
    """Innermost NVTX ranges around the calls, the most frequent first.

    Looks at `_MAX_CALLS` calls spread over all of them.
    """
    if calls is None or not calls.height:
        return ()
    if not trace.nvtx_ranges.height:
        return ()
    ranges = trace.nvtx_ranges.filter(~pl.col("mark"))
    counts: Counter[str] = Counter()
    some = calls.gather_every(-(-calls.height // _MAX_CALLS))
    for (pid, tid), here in groups(some, "pid", "tid"):
        own = ranges.filter((pl.col("pid") == pid) & (pl.col("tid") == tid))
        starts, ends = own["start_ns"].to_numpy(), own["end_ns"].to_numpy()
        for at in here["start_ns"]:
            before = int(np.searchsorted(starts, at, side="right"))
            open_ranges = np.flatnonzero(ends[:before] > at)
            if len(open_ranges):
                counts[own["text"][int(open_ranges[-1])]] += 1
    return tuple(text for text, _ in counts.most_common(_MAX_NAMES))


def _distinct(frame: pl.DataFrame | None, name: str) -> tuple[int, ...]:
    if frame is None or name not in frame.columns:
        return ()
    return tuple(distinct(frame, name))


def _only(values: tuple[int, ...]) -> int | None:
    return values[0] if len(values) == 1 else None

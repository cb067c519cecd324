"""What a recording lacks: defects of the capture, apart from faults of the program.

All sentences are fixed: the profiler's own messages hold paths and are never quoted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import numpy as np
import polars as pl

from streamlint.arrays import as_series, ascending
from streamlint.findings import Claim, Confidence, Evidence, Finding, NotAssessed
from streamlint.intervals import union
from streamlint.l2 import l2_marks
from streamlint.steady import column, distinct, groups, of_process, regions
from streamlint.trace.calls import L2_CALLS
from streamlint.trace.lookup import first_rows
from streamlint.trace.model import Trace
from streamlint.trace.part import unrecorded_ids
from streamlint.trace.tables import NEWEST_SCHEMA

MIN_LOST = 3
"""Fewer rows without their partner are an edge of the capture, not a loss."""
MIN_LOST_SHARE = 0.01
"""Losses below 1 % of the rows can't change what a rule says."""
MUCH_LOST = 0.1
"""From this part of the rows on, finding nothing proves nothing."""
MOST_LOST = 0.5
"""From this part on, what is left (idle time, say) is not the program's any more."""
MIN_OVERHEAD_SHARE = 0.01
"""The profiler may take 1 % of the judged region, the error of any estimate."""
FIRST_ID = 10_000
"""A process whose first recorded call has a higher id was not recorded from its start.

Ids count from 1; programs that skip more calls before the first recorded one were
not seen.
"""
_MAX_EVIDENCE = 5


class Hidden(Enum):
    """What a defect keeps from the rules."""

    NOTHING = "rows are whole and their times are right"
    WORK = "GPU work without rows"
    CALLS = "API calls without rows"
    ANY = "rows of any kind"
    TIME = "all rows are there, with times that are not the program's"


@dataclass(frozen=True)
class Defect:
    """One way in which a recording is incomplete or distorted.

    ``kind`` names it in words that are the same in every run; ``count`` is of the
    rows, calls or messages concerned; ``words`` is one sentence, ``recapture`` says
    what mends it. ``evidence`` is empty where it has no place on the timeline.
    ``hides`` says what it keeps from the rules, and ``share`` which part of that: 1
    where the recording doesn't tell.
    """

    kind: str
    count: int
    words: str
    recapture: str
    evidence: tuple[Evidence, ...] = ()
    confidence: Confidence = Confidence.HIGH
    hides: Hidden = Hidden.NOTHING
    share: float = 0.0


def defects(trace: Trace) -> tuple[Defect, ...]:
    """Every distinct defect of the recording, what is missing first."""
    return trace.derived(_defects)


def no_gpu_work(trace: Trace) -> NotAssessed | None:
    """Why nothing can be judged, if the trace shows no GPU work worth judging."""
    return trace.derived(_no_gpu_work)


def mostly_lost(trace: Trace, needs: Collection[str]) -> NotAssessed | None:
    """Why a rule that needs these tables can't be judged from what is left."""
    for defect in _losses(trace, needs):
        # Of unknown losses, those that are seen say how much it may be.
        if defect.share >= MOST_LOST and defect.hides is not Hidden.ANY:
            return NotAssessed(defect.words, defect.recapture)
    return None


def weighed(
    trace: Trace, needs: Collection[str], found: Sequence[Finding]
) -> Sequence[Finding] | NotAssessed:
    """What a rule found, in view of what the recording lacks of its evidence.

    Findings are less certain; finding nothing proves nothing if much is missing.
    """
    losses = _losses(trace, needs)
    slow = [d for d in defects(trace) if d.hides is Hidden.TIME]
    if not found:
        much = [d for d in losses if d.share >= MUCH_LOST]
        much += [d for d in slow if d.share >= MOST_LOST]
        if not much:
            return found
        words, recapture = much[0].words, much[0].recapture
        return NotAssessed(f"nothing was found, but {words}", recapture)
    slowed = any(d.share >= MUCH_LOST for d in slow)
    return [
        replace(f, confidence=_less(f.confidence))
        if losses or (slowed and f.cost.claim is not Claim.NONE)
        else f
        for f in found
    ]


def _losses(trace: Trace, needs: Collection[str]) -> list[Defect]:
    """Defects that keep rows from a rule that needs these tables."""
    hidden = [Hidden.WORK, Hidden.ANY]
    if "runtime_calls" in needs:
        hidden.append(Hidden.CALLS)
    return [
        defect
        for defect in defects(trace)
        if defect.hides in hidden and defect.share >= MIN_LOST_SHARE
    ]


def _less(confidence: Confidence) -> Confidence:
    return Confidence.MEDIUM if confidence is Confidence.HIGH else Confidence.LOW


def sizes_unknown(kernels: pl.DataFrame) -> NotAssessed | None:
    """Why it can't be told which part of the GPU these kernels take.

    ``kernels`` are rows of `Trace.gpu_ops`; None where all sizes are known.
    """
    unknown = kernels.filter(pl.col("kind") == "kernel")["sm_fraction"].null_count()
    if not unknown:
        return None
    return NotAssessed(
        f"the export doesn't say how much of the GPU {unknown} kernels need",
        "export again with nsys 2021.3 or newer, all tables and columns",
    )


def graphs_unknown(trace: Trace) -> NotAssessed | None:
    """Why it can't be told which executable graph each launch ran."""
    launched = trace.launches.filter(pl.col("kind") == "graph launch")
    ran = trace.gpu_ops.join(launched, on=["pid", "correlation_id"], how="semi")
    told = (pl.col("kind") == "graph") | pl.col("graph_node_id").is_not_null()
    if not ran.height or ran.filter(told).height:
        return None
    return NotAssessed(
        "the export doesn't say which executable graph each launch ran",
        "export again with nsys, all columns",
    )


def unrecorded_calls(trace: Trace) -> int:
    """How many CUDA calls the trace can't show: holes in the correlation ids.

    Counted between the first and the last id of each process, without the
    runtime's start-up and without stream queries, which leave another row.
    """
    return trace.derived(_unrecorded_calls)


# Whether there is anything to judge ---------------------------------------------


def _no_gpu_work(trace: Trace) -> NotAssessed | None:
    work = trace.gpu_ops.filter(pl.col("kind") != "memset").height
    if work:
        return None
    calls = trace.runtime_calls.filter(pl.col("kind") != "noise").height
    launched = trace.launches.filter(
        ~pl.col("kind").is_in(("async memset", "sync memset"))
        & (pl.col("return_value").fill_null(0) == 0)
    ).height
    told = _told_by_profiler(trace)
    if launched:
        reason = f"{launched} calls issued GPU work, but no kernel or copy was recorded"
        recapture = "let the program end by itself; record with a current nsys, -t cuda"
    elif calls:
        reason = f"{calls} CUDA calls were recorded, but none issued a kernel or a copy"
        recapture = "record the part that uses the GPU, to its end, with -t cuda"
    elif trace.capture.cuda_traced is False:
        reason, recapture = "CUDA was not traced", "record with -t cuda,nvtx"
    else:
        reason = "no CUDA activity was recorded"
        recapture = (
            "record the process that uses the GPU with -t cuda,nvtx "
            "(--trace-fork-before-exec=true for forked workers)"
        )
    return NotAssessed(f"{reason}{told}", recapture)


_TELLING = (
    "Error when processing events",
    "CUDA profiling might have not been started correctly",
    "No CUDA events collected",
    "Not all CUDA events might have been collected",
)


def _told_by_profiler(trace: Trace) -> str:
    """What the profiler itself said about it; fixed texts only, never raw ones."""
    texts = trace.diagnostics["text"].drop_nulls()
    said = [text for text in _TELLING if texts.str.starts_with(text).any()]
    return f' (nsys: "{said[0]}")' if said else ""


# Rows without their partner -----------------------------------------------------


def _lost_work(trace: Trace) -> list[Defect]:
    """Launches that succeeded and left no row of GPU work."""
    calls = trace.launches.filter(pl.col("return_value").fill_null(0) == 0)
    alone = calls.filter(as_series(first_rows(trace.gpu_ops, calls) < 0))
    if alone.height < MIN_LOST:
        return []
    alone = alone.filter(~_during_capture(trace, alone))
    is_graph = pl.col("kind") == "graph launch"
    found: list[Defect] = []
    more = trace.left_out
    every = calls.height + more.launches
    launched = calls.filter(~is_graph).height + more.launches - more.graphs
    lost = alone.filter(~is_graph)
    if _matters(lost.height, launched):
        found.append(
            Defect(
                "launches without GPU rows",
                lost.height,
                f"{lost.height} of {launched} launches and copies left no row of "
                "GPU work",
                "let the program end by itself, or call cudaProfilerStop before it "
                "is stopped; record with a current nsys",
                _places(lost, "{} without a row of GPU work", "name"),
                hides=Hidden.WORK,
                share=lost.height / launched,
            )
        )
    graphs, lost = every - launched, alone.filter(is_graph)
    if _matters(lost.height, graphs):
        found.append(
            Defect(
                "graph launches without GPU rows",
                lost.height,
                f"{lost.height} of {graphs} graph launches left no row of GPU work",
                "record with --cuda-graph-trace=node, or with nsys 2024.2 or newer",
                _places(lost, "{} without a row of GPU work", "name"),
                hides=Hidden.WORK,
                # How much work a graph holds isn't known: a few at the end are little.
                share=lost.height
                / (graphs if graphs >= MIN_LOST_SHARE * every else every),
            )
        )
    return found


def _during_capture(trace: Trace, calls: pl.DataFrame) -> pl.Series:
    """Whether any thread of the process captured a stream as each call began.

    A thread may issue into a capture that another thread began.
    """
    during = np.zeros(calls.height, dtype=np.bool_)
    starts, pids = column(calls, "start_ns"), column(calls, "pid")
    for (pid,), here in groups(trace.captures, "pid"):
        open_ = union(column(here, "start_ns"), column(here, "end_ns"))
        during |= (pids == pid) & (open_.overlap_ns(starts, starts + 1) > 0)
    return as_series(during, "during")


def _lost_calls(trace: Trace) -> list[Defect]:
    """GPU work, not of graph nodes, without the call that issued it."""
    if trace.gpu_ops["issue_ns"].null_count() < MIN_LOST:
        return []
    ops = trace.gpu_ops.filter(pl.col("graph_node_id").is_null())
    alone = ops.filter(pl.col("issue_ns").is_null())
    total = ops.height + trace.left_out.ops
    if not _matters(alone.height, total):
        return []
    return [
        Defect(
            "GPU rows without calls",
            alone.height,
            f"{alone.height} of {total} GPU operations have no row of the API "
            "call that issued them",
            "record the program from its start to its end, and export all of it",
            _places(alone, "{} without its API call", "kind"),
            hides=Hidden.CALLS,
            share=alone.height / total,
        )
    ]


def _part_lost(trace: Trace, table: str, lost: int) -> float:
    kept: pl.DataFrame = getattr(trace, table)
    return lost / (lost + kept.height + trace.left_out.of(table))


def _matters(lost: int, total: int) -> bool:
    return lost >= MIN_LOST and lost >= MIN_LOST_SHARE * total


def _places(rows: pl.DataFrame, what: str, name: str) -> tuple[Evidence, ...]:
    columns = ("start_ns", "end_ns", name, "correlation_id")
    return tuple(
        Evidence(start, end, what.format(word), correlation_id)
        for start, end, word, correlation_id in rows.select(columns)
        .head(_MAX_EVIDENCE)
        .iter_rows()
    )


def _invalid_rows(trace: Trace) -> list[Defect]:
    # Rows are counted as their tables are loaded.
    _ = trace.gpu_ops, trace.synchronizations
    tables = (
        *("kernels", "memcpys", "memsets", "graph_traces"),
        *("runtime_calls", "synchronizations"),
    )
    dropped = {name: trace.invalid_rows.get(name, 0) for name in tables}
    total = sum(dropped.values())
    if not total:
        return []
    names = ", ".join(
        f"{n} of {name.replace('_', ' ')}" for name, n in dropped.items() if n
    )
    return [
        Defect(
            "invalid rows",
            total,
            f"rows without usable times were left out ({names})",
            "record again with a current nsys",
            hides=Hidden.ANY,
            share=max(
                _part_lost(trace, name, n) if n >= MIN_LOST else 0.0
                for name, n in dropped.items()
            ),
        )
    ]


def _holes(trace: Trace) -> list[Defect]:
    """Calls without a row, where that is more than the default of nsys."""
    missing = unrecorded_calls(trace)
    calls = trace.runtime_calls
    recorded = calls.height + trace.left_out.of("runtime_calls")
    if trace.capture.all_apis is True:
        if not _matters(missing, recorded):
            return []
        return [
            Defect(
                "unrecorded calls",
                missing,
                f"at least {missing} API calls were not recorded, although all APIs "
                "were traced",
                "record a shorter run, or with a current nsys",
                hides=Hidden.CALLS,
                share=missing / (missing + recorded),
            )
        ]
    if not missing or trace.call_kinds.isdisjoint(L2_CALLS) or l2_marks(trace).any:
        return []
    l2_calls = calls.filter(pl.col("kind").is_in(L2_CALLS))
    # Skipping is the default; it hides something only from who uses the L2 limit.
    return [
        Defect(
            "unrecorded calls beside L2 control",
            missing,
            f"at least {missing} API call{'s were' if missing > 1 else ' was'} not "
            "recorded; cudaDeviceSetLimit, which reserves L2, is never recorded by "
            "default",
            "record with --cuda-trace-all-apis=true",
            _places(l2_calls, "{} controls L2", "name"),
        )
    ]


def _unrecorded_calls(trace: Trace) -> int:
    key = ["pid", "correlation_id"]
    unrecorded = trace.left_out.unrecorded
    if unrecorded is None:
        frames = (trace.runtime_calls, trace.gpu_ops, trace.event_records)
        seen = pl.concat(
            frame[key].filter(pl.col("correlation_id") > 0) for frame in frames
        )
        pids, ids = column(seen, "pid"), column(seen, "correlation_id")
        unrecorded = {
            pid: unrecorded_ids(ascending(ids[pids == pid]))
            for pid in distinct(seen, "pid")
        }
    queries = dict(trace.queries["pid"].value_counts().iter_rows())
    named: dict[int, int] = {}
    if "query" in trace.call_kinds:
        polls = trace.runtime_calls.filter(pl.col("kind") == "query")
        named = dict(polls["pid"].value_counts().iter_rows())
    missing = 0
    for pid, holes in unrecorded.items():
        polled = queries.get(pid, 0) - named.get(pid, 0)
        missing += max(0, holes - max(0, polled))
    return missing


# Distorted times ----------------------------------------------------------------


def _overhead(trace: Trace) -> list[Defect]:
    """Judged time that the profiler took in threads that use CUDA."""
    rows = trace.profiler_overhead
    judged = regions(trace)
    if not rows.height:
        return []
    threads = trace.runtime_calls["pid", "tid"].unique()
    rows = rows.join(threads, on=["pid", "tid"], how="semi")
    worst: tuple[float, int] | None = None
    idle_share = 0.0
    parts: list[pl.DataFrame] = []
    for pid, region in judged.items():
        here = rows.filter(
            (pl.col("pid") == pid)
            & (pl.col("start_ns") < region.end_ns)
            & (pl.col("end_ns") > region.start_ns)
        )
        spans = union(column(here, "start_ns"), column(here, "end_ns"))
        spans = region.clip(spans)
        lost = spans.total_ns
        share = lost / max(1, region.duration_ns)
        if share <= MIN_OVERHEAD_SHARE:
            continue
        parts.append(here)
        worst = max(worst or (share, lost), (share, lost))
        # What the GPU did meanwhile is as it would have been.
        ops = of_process(trace.gpu_ops, pid)
        working = spans & union(column(ops, "start_ns"), column(ops, "end_ns"))
        idle = lost - working.total_ns
        idle_share = max(idle_share, idle / max(1, region.duration_ns))
    if worst is None:
        return []
    share, lost = worst
    hit = pl.concat(parts)
    longest = hit.sort(pl.col("end_ns") - pl.col("start_ns"), descending=True)
    return [
        Defect(
            "profiler overhead",
            hit.height,
            f"the profiler itself took {lost / 1e6:.2f} ms of the judged time "
            f"({share:.0%}) in threads that use CUDA"
            + (f", worst of {len(parts)} processes" if len(parts) > 1 else ""),
            "warm up all threads before the part to judge, and record more of it"
            + (
                "; flush later with --flush-on-cudaprofilerstop=false"
                if _messages(trace)[_RANGE]
                else ""
            ),
            tuple(
                Evidence(start, end, "the profiler was at work")
                for start, end in longest.select("start_ns", "end_ns")
                .head(_MAX_EVIDENCE)
                .iter_rows()
            ),
            hides=Hidden.TIME,
            share=idle_share,
        )
    ]


def _inflated_launches(trace: Trace) -> list[Defect]:
    """Options of the capture that make launches dearer than they are.

    The factors are of graphs of 50 nodes, traced and untraced, on an H200: launches
    30 to 40, updates 30 to 80. As whole graphs: launches 5 to 6, updates 1.7 to 2.4.
    """
    found: list[Defect] = []
    launches, more = trace.launches, trace.left_out
    graphs = launches.filter(pl.col("kind") == "graph launch")
    launched = graphs.height + more.graphs
    if trace.capture.graph_mode == "node" and launched >= MIN_LOST:
        found.append(
            Defect(
                "graphs traced by node",
                launched,
                "graphs were traced node by node: with 50 nodes cudaGraphLaunch takes "
                "30 to 40 times as long as untraced and cudaGraphExecUpdate 30 to 80 "
                "times (traced as whole graphs about 6 and 2 times)",
                "judge the cost of launches with --cuda-graph-trace=graph",
                _places(graphs, "{} traced by node", "name"),
            )
        )
    taken = launches["callchain_id"].count() + more.stacks
    every = launches.height + more.launches
    if _matters(taken, every):
        stacks = launches.filter(pl.col("callchain_id").is_not_null())
        found.append(
            Defect(
                "call stacks of launches",
                taken,
                f"call stacks were taken at {taken} of {every} "
                "launches and copies: launch-bound parts look slower than they are",
                "judge the cost of launches without call stacks of kernels and "
                "copies: --cudabacktrace=sync",
                _places(stacks, "{} with a call stack", "name"),
            )
        )
    return found


def _lost_stacks(trace: Trace) -> list[Defect]:
    """Python call stacks that the export leaves out."""
    if not trace.python_stacks_lost:
        return []
    taken = trace.runtime_calls["backtrace_ns"].count() + trace.left_out.python_stacks
    return [
        Defect(
            "Python call stacks not exported",
            taken,
            f"Python call stacks were recorded at {taken} calls, but the export lacks "
            "their payloads (nsys export --include-json=true): findings name no "
            "Python line",
            "export it again: nsys export --include-json=true --include-blobs=true",
        )
    ]


# What the profiler said ---------------------------------------------------------


class _Message(NamedTuple):
    """A message of the profiler, by a part of its text, and what it means.

    The number that the pattern captures is the count; without one, messages count.
    ``share`` of the rows may be missing, as far as the message alone tells.
    """

    pattern: str
    kind: str
    words: str
    recapture: str
    confidence: Confidence = Confidence.HIGH
    share: float = 1.0


_SMALLER = "record a shorter part of the run, and let the program end by itself"
_MESSAGES = (
    _Message(
        r"^Error when processing events",
        "events lost on import",
        "nsys could not read part of the recorded events",
        "record again with a current nsys; a shorter run loses less",
    ),
    _Message(
        r"^Number of incomplete CUPTI events dropped:\s*([0-9]{1,12})",
        "incomplete events dropped",
        "nsys dropped incomplete events: operations at the end are missing",
        "synchronize before the program ends, and let it end by itself",
    ),
    _Message(
        r"Some CUPTI events might be missing",
        "buffers not collected",
        "nsys did not collect all of its buffers: events may be missing",
        _SMALLER,
    ),
    _Message(
        r"^Couldn't allocate CUPTI buf",
        "buffers not allocated",
        "nsys could not allocate buffers: events are missing",
        _SMALLER,
    ),
    _Message(
        r"^Reached the size limit on recording trace events",
        "size limit reached",
        "nsys reached its size limit: later events are missing",
        _SMALLER,
        share=0.0,  # what was recorded until then is whole
    ),
    _Message(
        r"^Installed CUDA driver version .* is not supported by this build",
        "driver newer than nsys",
        "the CUDA driver is newer than this nsys supports: rows may be missing",
        "record with a current nsys",
        Confidence.MEDIUM,
        share=MIN_LOST_SHARE,
    ),
)
_BUFFERS = r"CUPTI buffers: (?<got>[0-9]{1,9}) of (?<of>[0-9]{1,9})\."
_INCOMPLETE = r"^Not all CUDA events might have been collected"
_RANGE = r"^Profiling started due to "


def _messages(trace: Trace) -> dict[str, int]:
    """How many messages of the profiler match each pattern."""
    return trace.derived(_count_messages)


def _count_messages(trace: Trace) -> dict[str, int]:
    patterns = [*(m.pattern for m in _MESSAGES), _INCOMPLETE, _RANGE]
    texts = trace.diagnostics.select("text")
    if not texts.height:
        return dict.fromkeys(patterns, 0)
    counts = texts.select(
        pl.col("text").str.contains(pattern).sum().alias(pattern)
        for pattern in patterns
    )
    return counts.row(0, named=True)


def _told(trace: Trace) -> list[Defect]:
    """Losses that the profiler reported."""
    messages = _messages(trace)
    texts = trace.diagnostics["text"]
    found = [
        Defect(
            m.kind,
            count,
            m.words,
            m.recapture,
            confidence=m.confidence,
            hides=Hidden.ANY,
            share=_share_told(trace, m, count),
        )
        for m in _MESSAGES
        if messages[m.pattern] and (count := _count(texts, m.pattern))
    ]
    incomplete = messages[_INCOMPLETE]
    # It says so at every planned stop of a range, too.
    if incomplete and not found and not messages[_RANGE]:
        found.append(
            Defect(
                "events perhaps lost",
                incomplete,
                "nsys is not sure that it collected all CUDA events",
                "let the program end by itself while it is being recorded",
                confidence=Confidence.LOW,
            )
        )
    return found


def _share_told(trace: Trace, message: _Message, count: int) -> float:
    """Which part of the rows a message says is missing, by its own numbers if any."""
    if message.kind == "incomplete events dropped":
        return count / (count + trace.gpu_ops.height + trace.left_out.work)
    if message.kind == "buffers not collected":
        collected = trace.diagnostics["text"].str.extract_groups(_BUFFERS).struct
        numbers = collected.unnest().drop_nulls().cast(pl.Int64)
        shares = numbers.select(1 - pl.col("got") / pl.col("of").clip(1))
        return max(0.0, *shares.to_series()) if shares.height else message.share
    return message.share


def _count(texts: pl.Series, pattern: str) -> int:
    matching = texts.filter(texts.str.contains(pattern))
    # Where the pattern has no group of its own, the empty one is the first.
    numbers = matching.str.extract(f"{pattern}()", 1).cast(pl.Int64, strict=False)
    return int(numbers.fill_null(1).sum())


def _partial(trace: Trace) -> list[Defect]:
    """Recordings and exports of a part of the program."""
    found: list[Defect] = []
    ranges = _messages(trace)[_RANGE]
    first = trace.runtime_calls.group_by("pid").agg(pl.col("correlation_id").min())
    late = first.filter(pl.col("correlation_id") > FIRST_ID).height
    if ranges or late:
        found.append(
            Defect(
                "partial range",
                max(ranges, late),
                "the recording does not begin with the program: what was created, "
                "recorded or launched before is missing",
                "record from the start of the program where that matters "
                "(--capture-range=none)",
            )
        )
    if trace.capture.filtered:
        found.append(
            Defect(
                "filtered export",
                1,
                "only chosen tables or times were exported",
                "export again without --tables and --times",
            )
        )
    elif "DIAGNOSTIC_EVENT" not in trace.table_names:
        found.append(
            Defect(
                "no messages of the profiler",
                1,
                "the export has no table DIAGNOSTIC_EVENT: losses that the profiler "
                "noticed can't be seen",
                "record and export with nsys 2024.2 or newer",
            )
        )
    return found


def _newer(trace: Trace) -> list[Defect]:
    """An export whose layout may hold more than streamlint reads."""
    version = re.match(r"([0-9]{1,9})\.([0-9]{1,9})", trace.capture.schema or "")
    if version is None or (int(version[1]), int(version[2])) <= NEWEST_SCHEMA:
        return []
    known = ".".join(str(number) for number in NEWEST_SCHEMA)
    return [
        Defect(
            "newer export",
            1,
            f"the export's schema {version[0]} is newer than {known}, the newest "
            "that streamlint knows: what is new in it was not read",
            "update streamlint, or export with the nsys of an older CUDA toolkit",
            confidence=Confidence.LOW,
        )
    ]


_CHECKS: tuple[Callable[[Trace], list[Defect]], ...] = (
    *(_lost_work, _lost_calls, _told, _invalid_rows, _holes, _partial),
    *(_overhead, _inflated_launches, _lost_stacks, _newer),
)


def _defects(trace: Trace) -> tuple[Defect, ...]:
    return tuple(defect for check in _CHECKS for defect in check(trace))

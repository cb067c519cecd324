"""Rule launch-bound-kernels."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl

from streamlint.arrays import as_series, earlier_max, in_order, numbered
from streamlint.blocking import launches_block
from streamlint.changes import Change
from streamlint.cost import price, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding
from streamlint.intervals import Intervals, union
from streamlint.replay import Edge, replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, of_process, regions
from streamlint.trace.model import Trace
from streamlint.untraced import (
    LAUNCH_ADDED_NS,
    price_untraced,
    shortened,
    untraced,
)
from streamlint.waits import device_busy, waiting_calls
from streamlint.where import calls_behind, locate

MIN_KERNELS = Threshold(
    "min-kernels",
    20,
    "kernels in a run",
    "Shorter runs save too little in a graph (rule catalogue).",
)
MIN_STARVED_SHARE = Threshold(
    "min-starved-share",
    0.9,
    "share",
    "Part of a run's kernels that found an empty queue. Loops of tiny kernels on an "
    "H200: 1.0; eager PyTorch with long kernels between: 0.4.",
)
MIN_IDLE_SHARE = Threshold(
    "min-idle-share",
    0.3,
    "share",
    "Part of a run in which the GPU is idle, the tracer's share taken off.",
)
PROMPT_NS = 10_000
"""A kernel that starts this soon after its launch call was awaited by the GPU.

Measured on an H200: 1.9 to 3.1 us after the end of the call.
"""
QUEUED_GAP_NS = 2_000
"""A kernel that was queued follows its predecessor within this time (0.6 to 1.8 us)."""
PAUSE_FACTOR = Threshold(
    "max-pause",
    10,
    "factor",
    "A pause of the host of more than so many usual launch intervals ends a run.",
)
MAX_INTERVAL_NS = Threshold(
    "max-interval",
    100_000,
    "ns",
    "A host that takes longer between two launches does other work than launching.",
)
NODE_GAP_NS = 50
"""From the recorded end of a kernel to the next of its graph, unrecorded (H200).

Kernels that last 1.11 and 0.96 us as recorded took 1.05 and 1.12 us each in a graph.
Recorded by node they are 0.06 and 0.26 us apart: 0.1 us of that is the recorder's.
"""
QUEUE_GAP_NS = 1_000
"""The same in a queue; the recorded gaps of a run show the host instead."""
NODE_LAUNCH_NS = 50
"""A kernel's part of the launch of its graph: 50 took 1.5 to 6.3 us (H200)."""
_CAPTURED = (
    *("kernel launch", "async memcpy", "async memset", "event record", "stream wait"),
)


@rule(needs=("kernels", "runtime_calls"))
def launch_bound_kernels(trace: Trace) -> Outcome:
    """The GPU waits for the host to launch one short kernel after another.

    What it does
        Finds runs of at least 20 kernels that one thread launches one by one, each
        shorter than the time between two launches, so the GPU keeps running dry.
    Why it costs time
        A launch takes the host 3 to 5 us (more in a framework's eager mode), a
        kernel of a CUDA graph starts within 0.2 us of its predecessor: 2000 kernels
        of 1 us took 7.5 to 9.6 ms as launches and 2.1 ms as a graph on an H200.
    Evidence
        Nine in ten kernels of the run start within 10 us of their launch call and
        more than 2 us after their predecessor, and the GPU is idle for more than
        30 % of the run. The cost is a what-if: each run replayed as one graph launch,
        its kernels 0.05 us apart, against the run without what recording adds (1.9 us
        a launch, and the profiler's own recorded time). It is of the unprofiled run;
        two recordings differ by more.
    Exemptions
        Full queues (launch calls that wait are a busy GPU), kernels of graphs and
        launches into a capture, launches more than 100 us apart (other host work),
        launches that block. A host wait, a graph launch or a long pause ends a run.
    Fix
        Capture the sequence into a CUDA graph and launch that, or fuse kernels. A
        graph pays where the sequence comes again: making it takes about 10 us a
        kernel once. It also removes the host's work between the launches.
        The graph keeps addresses and sizes: refill its buffers only after its last
        launch is done with them, or data may race.
    References
        CUDA C++ Programming Guide, "CUDA Graphs"; PyTorch, "CUDA Graphs".
    """
    findings: list[Finding] = []
    if trace.kernels.height < trace.limit(MIN_KERNELS):
        return findings
    busy = device_busy(trace)
    for region in regions(trace).values():
        if launches_block(trace, region.pid):
            continue
        kernels = _in_runs(trace, region)
        active = {
            device: running | _profiling(trace, region.pid)
            for (pid, device), running in busy.items()
            if pid == region.pid
        }
        runs = _launch_bound(trace, kernels, active)
        if runs.height:
            findings.append(_finding(trace, region, kernels, runs, active))
    return findings


def _in_runs(trace: Trace, region: Region) -> pl.DataFrame:
    """Kernels launched one by one, in issue order of each thread and device.

    Of runs that are long enough and starve the GPU. row (of gpu_ops), its tid,
    device_id, stream_id and times, interval_ns (since the launch before), begins (a
    run), run, starved (the queue was empty).
    """
    ops = trace.gpu_ops
    launched = (
        ops.lazy()
        .with_row_index("row")
        .filter(
            region.holds()
            & (pl.col("kind") == "kernel")
            & pl.col("graph_node_id").is_null()
            & pl.col("device_id").is_not_null()
            & pl.col("issue_ns").is_not_null()
        )
        .select(
            *("row", "tid", "device_id", "stream_id", "start_ns", "end_ns"),
            *("issue_ns", "issue_end_ns"),
        )
        .collect()
    )
    thread, _ = numbered(launched["tid"], launched["device_id"])
    order = in_order(column(launched, "issue_ns"), thread)
    kernels, thread = launched[as_series(order)], thread[order]
    issue, start = column(kernels, "issue_ns"), column(kernels, "start_ns")
    interval = np.diff(issue, prepend=0)
    begins = np.diff(thread, prepend=-1) != 0
    stops = _stops(trace, region.pid)
    for first, last in pairwise([*np.flatnonzero(begins).tolist(), len(thread)]):
        usual = np.median(interval[first + 1 : last]) if last > first + 1 else 0
        pause = trace.limit(PAUSE_FACTOR) * usual
        of_thread = stops.filter(pl.col("tid") == kernels["tid"][first]).sort("stop_ns")
        so_far = np.searchsorted(
            column(of_thread, "stop_ns"), issue[first:last], side="right"
        )
        stopped = np.diff(so_far, prepend=0) > 0
        begins[first + 1 : last] = ((interval[first:last] > pause) | stopped)[1:]
    before = earlier_max(ops["end_ns"], ops["pid"], ops["stream_id"])
    gap = start - before[kernels["row"].to_numpy()]  # far more for the first of all
    prompt = start - column(kernels, "issue_end_ns") <= PROMPT_NS
    starved = prompt & (gap > QUEUED_GAP_NS)
    firsts = np.flatnonzero(begins)
    run = np.cumsum(begins) - 1
    count = np.diff(firsts, append=len(run))
    share = np.bincount(run, starved, len(firsts)) / count
    telling = (count >= trace.limit(MIN_KERNELS)) & (
        share >= trace.limit(MIN_STARVED_SHARE)
    )
    return kernels.with_columns(
        as_series(interval, "interval_ns"),
        as_series(begins, "begins"),
        as_series(run, "run"),
        as_series(starved, "starved"),
    ).filter(as_series(telling[run]))


def _stops(trace: Trace, pid: int) -> pl.DataFrame:
    """Calls of a process that end a run: tid, stop_ns."""
    columns = ("tid", pl.col("start_ns").alias("stop_ns"))
    waits = of_process(waiting_calls(trace), pid).select(columns)
    kinds = ("graph launch", "begin capture")
    if trace.call_kinds.isdisjoint(kinds):
        return waits
    calls = of_process(trace.runtime_calls.filter(pl.col("kind").is_in(kinds)), pid)
    return pl.concat([waits, calls.select(columns)]).sort("stop_ns")


def _launch_bound(
    trace: Trace, kernels: pl.DataFrame, active: dict[int, Intervals]
) -> pl.DataFrame:
    """The runs that starve the GPU, one row a run, the idlest first."""
    lasting = pl.col("end_ns") - pl.col("start_ns")
    runs = (
        kernels.group_by("run", "tid", "device_id", maintain_order=True)
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("issue_ns").min(),
            pl.col("issue_ns").max().alias("last_issue_ns"),
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            pl.col("row").first(),
            lasting.median().alias("kernel_ns"),
            pl.col("interval_ns").filter(~pl.col("begins")).median(),
        )
        .filter(
            (pl.col("interval_ns") <= trace.limit(MAX_INTERVAL_NS))
            & (pl.col("kernel_ns") < pl.col("interval_ns"))
        )
    )
    idle = np.zeros(runs.height, dtype=np.int64)
    for device, used in active.items():
        here = (runs["device_id"] == device).to_numpy()
        start, end = column(runs, "start_ns")[here], column(runs, "end_ns")[here]
        idle[here] = end - start - used.overlap_ns(start, end)
    added = LAUNCH_ADDED_NS * pl.col("count")
    first = trace.gpu_ops["correlation_id"].gather(runs["row"])
    return (
        runs.with_columns(as_series(idle, "idle_ns"), first)
        .filter(
            pl.col("idle_ns") - added > trace.limit(MIN_IDLE_SHARE) * (lasting - added)
        )
        .sort("idle_ns", descending=True, maintain_order=True)
    )


def _finding(
    trace: Trace,
    region: Region,
    kernels: pl.DataFrame,
    runs: pl.DataFrame,
    active: dict[int, Intervals],
) -> Finding:
    launched = kernels.join(runs.select("run"), on="run", how="semi")
    launched = launched.hstack(
        trace.gpu_ops.select("pid", "context_id", "correlation_id", "kind", "name")[
            launched["row"]
        ]
    )
    inner = launched.filter(pl.int_range(pl.len()).over("run", "stream_id") > 0)
    changes = replayed(_changes, trace, region.pid, runs, inner)
    cost = price_untraced(
        trace,
        region,
        changes,
        "every run as one graph launch, its kernels 0.05 us apart",
        direct=_cost(runs, active, region),
    )
    calls = calls_behind(trace, launched)
    count = launched.height
    idle = column(runs, "idle_ns").sum()
    length = (column(runs, "end_ns") - column(runs, "start_ns")).sum()
    kernel = (launched["end_ns"] - launched["start_ns"]).median()
    interval = launched.filter(~pl.col("begins"))["interval_ns"].median()
    in_runs = "1 run" if runs.height == 1 else f"{runs.height} runs"
    evidence = tuple(
        Evidence(
            start, end, f"{n} launches, the GPU idle {idle / (end - start):.0%}", i
        )
        for start, end, n, idle, i in runs.head(5)
        .select("start_ns", "end_ns", "count", "idle_ns", "correlation_id")
        .iter_rows()
    )
    return Finding(
        message=f"{count} kernels of {_us(kernel)} are launched one by one in "
        f"{in_runs}, {_us(interval)} apart; the GPU is idle "
        f"{idle / length:.0%} of that time",
        severity=severity_of(cost),
        confidence=_confidence(trace),
        cost=cost,
        where=locate(trace, calls=calls, ops=launched),
        occurrences=count,
        evidence=evidence,
        fix=_FIX,
        identity=("launch-bound", *sorted(launched["name"].unique())[:8]),
        change=changes and changes[1],
    )


_FIX = (
    "capture the sequence into a CUDA graph and launch that (PyTorch: "
    "torch.cuda.CUDAGraph or torch.compile(mode='reduce-overhead')), or fuse the "
    "kernels; a graph pays where the sequence comes again, and also removes what the "
    "host does between launches, such as Python's work; refill its buffers only after "
    "its last launch is done with them, or data may race"
)


def _changes(
    trace: Trace, pid: int, runs: pl.DataFrame, inner: pl.DataFrame
) -> tuple[list[Change], Change]:
    """What takes out what recording adds, and what makes graphs of the runs."""
    without = [*untraced(trace, pid), _closer(trace, inner, QUEUE_GAP_NS)]
    return without, _as_graphs(trace, pid, runs, inner)


def _as_graphs(
    trace: Trace, pid: int, runs: pl.DataFrame, inner: pl.DataFrame
) -> Change:
    """Each run's calls become one graph launch, and its operations follow closely.

    ``inner`` are kernels that follow one of their run in their stream.
    """
    replay = replay_of(trace)
    graph = replay.graph
    calls = (
        of_process(graph.calls, pid)
        .join_asof(
            runs.sort("issue_ns").select("tid", "issue_ns", "last_issue_ns"),
            left_on="start_ns",
            right_on="issue_ns",
            by="tid",
            check_sortedness=False,
        )
        .filter(pl.col("start_ns") <= pl.col("last_issue_ns"))
    )
    captured = calls.filter(pl.col("kind").is_in(_CAPTURED))
    index = column(captured, "call_index")
    launch = np.minimum(graph.call_duration[index], NODE_LAUNCH_NS)
    once = shortened(replay, index, launch)
    later = column(calls.filter(pl.col("start_ns") > pl.col("issue_ns")), "call_index")
    ops, issue = once.issue_latency
    usual = int(np.median(issue)) if len(issue) else 0
    return Change(
        call_duration=once.call_duration,
        think=(later, np.zeros(len(later), dtype=np.int64)),
        latency=_closer(trace, inner, NODE_GAP_NS).latency,
        issue_latency=(ops, np.minimum(issue, usual)),
    )


def _closer(trace: Trace, kernels: pl.DataFrame, gap_ns: int) -> Change:
    """These kernels follow their predecessors within ``gap_ns`` where they can."""
    replay = replay_of(trace)
    order = replay.constraints(Edge.STREAM, ops=replay.ops_of(kernels))
    return Change(latency=(order, np.full(len(order), gap_ns)))


def _cost(runs: pl.DataFrame, active: dict[int, Intervals], region: Region) -> Cost:
    """Idle time of the device that idles most in its runs, without the tracer's."""
    idle = [0]
    for device, used in active.items():
        here = runs.filter(pl.col("device_id") == device)
        spans = union(column(here, "start_ns"), column(here, "end_ns"))
        added = LAUNCH_ADDED_NS * int(here["count"].sum())
        idle.append((spans - used).total_ns - added)
    return price(
        Claim.UPPER_BOUND,
        max(idle),
        region,
        "GPU idle time within the runs, less recorded profiler overhead and 1.9 us "
        "a launch for tracing",
    )


def _confidence(trace: Trace) -> Confidence:
    """Low where the profiler walked call stacks, which makes launches far longer."""
    walked = trace.capture.python_backtraces or trace.capture.native_backtraces
    return Confidence.LOW if walked else Confidence.MEDIUM


def _profiling(trace: Trace, pid: int) -> Intervals:
    """When the profiler itself kept the process busy."""
    rows = of_process(trace.profiler_overhead, pid)
    return union(column(rows, "start_ns"), column(rows, "end_ns"))


def _us(ns: object) -> str:
    assert isinstance(ns, float)
    return f"{ns / 1e3:.1f} us"

"""Rule lazy-module-load-in-hot-path."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.changes import Change
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Evidence, Finding, Severity
from streamlint.intervals import union
from streamlint.replay import replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, in_time, regions
from streamlint.trace.lookup import with_first
from streamlint.trace.model import Trace
from streamlint.trace.part import FIRST_OF_A_KIND
from streamlint.where import locate, ops_asked_by

LONG_FACTOR = Threshold(
    "min-first-launch",
    2.5,
    "factor",
    "A first launch this many times the median loaded code. Measured on an H200: 14 to "
    "26 us where launches take 4.5, and at most 9 with all code loaded before; up to 9 "
    "ms in PyTorch.",
)
LONG_QUERY_NS = Threshold(
    "min-query",
    100_000,
    "ns",
    "A query about a function this long loads it (0.2 to 60 ms seen).",
)
WARM_RUNS = Threshold(
    "min-runs",
    3,
    "runs of a kernel",
    "A kernel that runs less often is no part of a loop.",
)
WARM_SHARE = Threshold(
    "min-warm-share",
    0.9,
    "share",
    "Work repeats once the kernels of so many of the loop's launches ran three times.",
)
MIN_LOOP_SHARE = Threshold(
    "min-loop-share",
    0.5,
    "share",
    "Unless most launches are of kernels that run again, there is no loop.",
)
QUEUE_DEPTH = 512
"""With so much work outstanding, a launch may wait for room in the queue."""

_QUERIES = r"^cu(da)?(FuncGetAttribute|FuncSetAttribute|FuncSetCacheConfig|Occupancy)"


@rule(needs=("kernels", "runtime_calls"))
def lazy_module_load_in_hot_path(trace: Trace) -> Outcome:
    """GPU code is loaded in the middle of the repeated work.

    What it does
        Finds module loads, long first launches of a kernel and long first queries
        about a function in the judged region, after the work has begun to repeat.
    Why it costs time
        With CUDA_MODULE_LOADING=LAZY, the default, a kernel is loaded when it is
        first used. Loading takes a lock of the context, copies code to the GPU and
        may wait for running kernels: 10 to 100 us for a kernel on an H200, 10 ms
        and more for a library. The launching thread and others that load stand
        still meanwhile.
    Evidence
        Calls of cuModuleLoad and cuLibraryLoadData, first launches of a kernel that
        took 2.5 times the usual one, and calls about a function of 0.1 ms or more. A
        load has no row of its own when the code is in a library that is loaded
        already. The cost is an upper bound, a replay of the run in which loads take
        no time and first launches the usual one (a little less than they need).
    Exemptions
        Anything before the second NVTX iteration or, without iterations, before the
        kernels of nine in ten repeated launches ran three times; launches into a
        full queue; loads that cost less than 1 % of the region.
    Fix
        Load before the loop: run each kernel once in a warm-up, or start the process
        with CUDA_MODULE_LOADING=EAGER, which costs start-up time and memory. Keep
        modules and functions that the program loads itself.
    References
        CUDA C++ Programming Guide, "Lazy loading".
    """
    findings: list[Finding] = []
    for pid, region in regions(trace).items():
        launches = _launches(trace, pid)
        since = _warm_ns(trace, launches, region)
        if since is None or since >= region.end_ns:
            continue
        usual = int(np.median(column(launches, "took_ns"))) if launches.height else 0
        loads = _loads(trace, region, launches, usual).filter(
            pl.col("start_ns") >= since
        )
        # The replay can't save more than the calls take, and is dearer than this.
        most = int((loads["end_ns"] - loads["start_ns"]).sum())
        if severity_of(price(Claim.DIRECT, most, region, "")) is Severity.INFO:
            continue
        finding = _finding(trace, region, loads)
        if finding.severity is not Severity.INFO:
            findings.append(finding)
    return findings


def _launches(trace: Trace, pid: int) -> pl.DataFrame:
    """Launch calls of single kernels in order: kernel, took_ns, first, pending.

    row (of `Trace.launches`), pid, correlation_id, start_ns, end_ns.
    """
    key = ("pid", "correlation_id")
    names = (
        trace.kernels.lazy()
        .filter((pl.col("pid") == pid) & pl.col("graph_node_id").is_null())
        .select(
            *key,
            pl.coalesce("full_name", "name").fill_null("kernel").alias("kernel"),
            pl.col("end_ns").alias("done_ns"),
        )
        .collect()
    )
    calls = (
        trace.launches.lazy()
        .with_row_index("row")
        .filter((pl.col("pid") == pid) & (pl.col("kind") == "kernel launch"))
        .select("row", *key, "start_ns", "end_ns")
        .collect()
        .pipe(with_first, names)
        .filter(pl.col("kernel").is_not_null())
        .with_columns(
            (pl.col("end_ns") - pl.col("start_ns")).alias("took_ns"),
            pl.col("kernel").is_first_distinct().alias("first"),
        )
    )
    done = np.searchsorted(np.sort(column(calls, "done_ns")), column(calls, "start_ns"))
    pending = np.arange(calls.height) - done
    # Of a part of a run, what came before is only seen of the first few of a kernel.
    first = pl.int_range(pl.len()).over("kernel") < FIRST_OF_A_KIND
    return calls.with_columns(as_series(pending, "pending")).filter(
        in_time(trace) | first
    )


def _warm_ns(trace: Trace, launches: pl.DataFrame, region: Region) -> int | None:
    """From when on the work repeats; None where it doesn't."""
    if region.iterations:
        return region.start_ns
    repeated = (
        launches.group_by("kernel")
        .agg(
            pl.len().alias("runs"),
            pl.col("start_ns").sort().head(trace.limit(WARM_RUNS)).last(),
        )
        .filter(pl.col("runs") >= trace.limit(WARM_RUNS))
        .sort("start_ns")
    )
    covered = np.cumsum(column(repeated, "runs"))
    if not len(covered) or covered[-1] < trace.limit(MIN_LOOP_SHARE) * launches.height:
        return None
    warm = np.searchsorted(covered, trace.limit(WARM_SHARE) * covered[-1])
    return max(region.start_ns, int(column(repeated, "start_ns")[warm]))


def _loads(
    trace: Trace, region: Region, launches: pl.DataFrame, usual: int
) -> pl.DataFrame:
    """Calls of the region that loaded code, with what they are."""
    took = pl.col("end_ns") - pl.col("start_ns")
    columns = [*trace.runtime_calls.columns, "what"]
    loading = pl.col("kind") == "module load"
    calls = trace.runtime_calls.filter(
        region.holds()
        & ~pl.col("nested")
        & (loading | (took >= trace.limit(LONG_QUERY_NS)))
    )
    parts = []
    if calls.height:
        parts = [
            calls.filter(loading).with_columns(what=pl.col("name") + " loads a module"),
            calls.filter(
                pl.col("name").cast(pl.String).str.contains(_QUERIES)
            ).with_columns(what=pl.col("name") + " loads a function"),
        ]
    slow = launches.filter(
        region.holds()
        & pl.col("first")
        & (took >= trace.limit(LONG_FACTOR) * usual)
        & (pl.col("pending") < QUEUE_DEPTH)
    )
    parts.append(
        trace.launches[slow["row"]].with_columns(
            what="the first launch loads " + slow["kernel"]
        )
    )
    return pl.concat([part.select(columns) for part in parts]).sort("start_ns")


def _finding(trace: Trace, region: Region, loads: pl.DataFrame) -> Finding:
    spent = _host_ns(loads)
    change = replayed(_change, trace, loads)
    cost = price_change(
        trace,
        region,
        change,
        Claim.UPPER_BOUND,
        "loads and these first launches take no time",
        direct=price(
            Claim.DIRECT,
            min(spent, region.duration_ns),
            region,
            "time in which the thread with most of these calls was inside them",
        ),
    )
    modules = int((loads["kind"] == "module load").sum())
    first = int((loads["kind"] == "kernel launch").sum())
    counts = [
        _counted(modules, "module load", "module loads"),
        _counted(first, "slow first launch", "slow first launches"),
        _counted(
            loads.height - modules - first, "slow first query", "slow first queries"
        ),
    ]
    what = ", ".join(filter(None, counts))
    longest = loads.sort(
        pl.col("end_ns") - pl.col("start_ns"), descending=True, maintain_order=True
    ).head(5)
    return Finding(
        message=f"GPU code is loaded in repeated work ({what}), "
        f"which takes {spent / 1e6:.2f} ms of host time",
        severity=severity_of(cost),
        confidence=Confidence.HIGH if modules else Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=loads, ops=ops_asked_by(trace, loads)),
        occurrences=loads.height,
        evidence=tuple(
            Evidence(start, end, what, correlation_id)
            for start, end, what, correlation_id in longest.select(
                "start_ns", "end_ns", "what", "correlation_id"
            ).iter_rows()
        ),
        fix="load before the loop: run each kernel once in a warm-up, or start the "
        "process with CUDA_MODULE_LOADING=EAGER (more memory and a longer start); "
        "keep modules that the program loads itself",
        identity=("load", *sorted(loads["kind"].unique())),
        change=change,
    )


def _change(trace: Trace, loads: pl.DataFrame) -> Change:
    """Loads and first launches take no time, and the kernels start earlier.

    What a launch without a load would take is not deducted: right after one, even
    the next launches are slower (6 us against 3 to 4 us measured), so the usual time
    of this run would be too much for a bound.
    """
    replay = replay_of(trace)
    graph = replay.graph
    calls = replay.calls_of(loads)
    first = replay.calls_of(loads.filter(pl.col("kind") == "kernel launch"))
    ops = replay.ops_issued_by(first)
    saved = graph.call_duration[graph.issue_call[ops]]
    return Change(
        call_duration=(calls, np.zeros_like(calls)),
        issue_latency=(ops, (graph.issue_latency[ops] - saved).clip(0)),
    )


def _host_ns(calls: pl.DataFrame) -> int:
    """Time inside these calls of the thread that spends most in them."""
    return max(
        union(column(thread, "start_ns"), column(thread, "end_ns")).total_ns
        for _, thread in groups(calls, "tid")
    )


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}" if number else ""

"""Rule resource-churn-in-loop."""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.changes import Change
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding, Severity
from streamlint.replay import Edge, replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, done_before, groups, of_process, regions
from streamlint.trace.model import Trace
from streamlint.where import locate, sites

MIN_PAIRS = Threshold(
    "min-pairs",
    10,
    "pairs of creation and release",
    "Fewer pairs of creation and release are no loop, unless NVTX shows iterations.",
)
MIN_ITERATIONS = Threshold(
    "min-iterations",
    3,
    "NVTX iterations",
    "With at least this many NVTX iterations, one pair in each is enough.",
)
MIN_ROUNDS = Threshold(
    "min-rounds",
    3,
    "rounds",
    "Creating all and releasing all is one round; fewer are set-up and tear-down.",
)

_DEVICE, _PINNED, _STREAMS, _EVENTS = (
    *("device memory", "pinned host memory", "streams", "events"),
)
_CREATES = {
    **{"device alloc": _DEVICE, "managed alloc": _DEVICE},
    **{"host alloc": _PINNED, "host register": _PINNED},
    **{"stream create": _STREAMS, "event create": _EVENTS},
}
_RELEASES = {
    **{"device free": _DEVICE, "host free": _PINNED, "host unregister": _PINNED},
    **{"stream destroy": _STREAMS, "event destroy": _EVENTS},
}
_WAITING_RELEASES = ("device free", "host free", "host unregister")


@rule(needs=("runtime_calls",))
def resource_churn_in_loop(trace: Trace) -> Outcome:
    """Memory, streams or events are created and released again and again.

    What it does
        Finds device memory (managed memory included), pinned host memory, streams
        or events that one thread creates and releases at least 10 times in the
        judged region, or once in each NVTX iteration.
    Why it costs time
        The calls run on the host, take locks of the driver and talk to the
        system: on an H200 under nsys about 0.1 ms for cudaMalloc, 0.1 ms for
        cudaFree, 1 ms for cudaHostAlloc and 0.4 ms for cudaFreeHost of 1 MiB.
        Meanwhile the thread issues no work.
    Evidence
        Creations paired with the thread's releases, the last created first, that
        come in at least 3 rounds of creating and releasing. The cost is a replay of
        the run in which these calls take no time; frees still wait for the GPU work
        that they waited for (allocation-implicit-sync judges that), and where they
        waited for any the cost is a lower bound. The message says how much host time
        the calls take without such waits, in the thread with the most. Tracing
        lengthens the calls.
    Exemptions
        Start-up and tear-down, allocations that stay (the growth of a caching
        allocator), cudaMallocAsync and cudaFreeAsync. Cheap churn is info.
    Fix
        Create before the loop and reuse. Device memory whose size changes:
        cudaMallocAsync and cudaFreeAsync, which pay off only in long loops, as
        the first call creates the pool (9 to 13 ms on an H200). cudaFree and
        cudaFreeHost also wait for the GPU: where the program relied on that,
        reuse needs an event or a stream order instead, or data may race.
    References
        CUDA C++ Best Practices Guide, "Allocation"; CUDA C++ Programming Guide,
        "Stream-Ordered Memory Allocator".
    """
    findings: list[Finding] = []
    calls = _calls(trace)
    least = min(
        (_needed(trace, region) for region in regions(trace).values()),
        default=trace.limit(MIN_PAIRS),
    )
    if calls.height < 2 * least:
        return findings
    pairs = _pairs(trace, calls)
    for pid, region in regions(trace).items():
        needed = _needed(trace, region)
        judged = pairs.filter((pl.col("pid") == pid) & region.holds("released_ns"))
        for (resource, site), here in groups(judged, "resource", "site"):
            churn = pl.concat(
                [_recurring(trace, thread, needed) for _, thread in groups(here, "tid")]
            )
            if churn.height >= needed:
                identity = (str(resource), "" if site is None else str(site))
                findings.append(_finding(trace, region, calls, churn, identity))
    return findings


def _needed(trace: Trace, region: Region) -> int:
    """So many pairs are a loop."""
    least = trace.limit(MIN_PAIRS)
    looping = region.iterations >= trace.limit(MIN_ITERATIONS)
    return min(least, region.iterations) if looping else least


def _calls(trace: Trace) -> pl.DataFrame:
    """Successful creations and releases; resource, creates, row (their index)."""
    kinds = {**_CREATES, **_RELEASES}
    return (
        trace.runtime_calls.filter(
            pl.col("kind").is_in(list(kinds))
            & ~pl.col("nested")
            & (pl.col("return_value").fill_null(0) == 0)
        )
        .with_columns(
            pl.col("kind")
            .replace_strict(kinds, return_dtype=pl.String, default=None)
            .alias("resource"),
            pl.col("kind").is_in(list(_CREATES)).alias("creates"),
            pl.col("kind").is_in(_WAITING_RELEASES).alias("may_wait"),
        )
        .with_row_index("row")
    )


def _pairs(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """Each release with the thread's last creation that is still unmatched.

    pid, tid, resource, site (of the creation), created and released (rows of
    ``calls``), created_ns and released_ns (their starts).
    """
    key = ["pid", "tid", "resource"]
    step = pl.col("creates").cast(pl.Int64) * 2 - 1
    # A creation lifts the number alive to its level, a release drops it from there:
    # at one level, they take turns.
    level = step.cum_sum().over(key) + (~pl.col("creates")).cast(pl.Int64)
    before = pl.col("creates", "row", "start_ns").shift(1)
    pairs = (
        calls.with_columns(level.alias("level"))
        .with_columns(before.over([*key, "level"]).name.prefix("before_"))
        .filter(~pl.col("creates") & pl.col("before_creates"))
        .select(
            *key,
            pl.col("before_row").alias("created"),
            pl.col("row").alias("released"),
            pl.col("before_start_ns").alias("created_ns"),
            pl.col("start_ns").alias("released_ns"),
        )
    )
    return pairs.with_columns(sites(trace, calls[pairs["created"]]))


def _recurring(trace: Trace, pairs: pl.DataFrame, needed: int) -> pl.DataFrame:
    """The pairs of one thread that come round again and again; none if too few do.

    A round is a row of creations and the releases that follow it. Pairs that last
    for half of the rounds or more are no part of the loop.
    """
    created, released = column(pairs, "created_ns"), column(pairs, "released_ns")
    at = np.concatenate([created, released])
    creates = (np.arange(len(at)) < len(created))[order := np.argsort(at)]
    turns = np.cumsum(creates & ~np.concatenate([[False], creates[:-1]]))
    rounds = np.empty(len(at), dtype=np.int64)
    rounds[order] = turns
    first, last = rounds[: len(created)], rounds[len(created) :]
    total = int(turns[-1])
    local = last - first < total / 2
    sizes = np.unique(first[local], return_counts=True)[1]
    # One large set that is made once doesn't make a loop of a few pairs.
    usual = np.minimum(sizes, np.median(sizes)).sum() if len(sizes) else 0
    if total < trace.limit(MIN_ROUNDS) or usual < needed:
        return pairs.clear()
    return pairs.filter(as_series(local))


def _finding(
    trace: Trace,
    region: Region,
    calls: pl.DataFrame,
    pairs: pl.DataFrame,
    identity: tuple[str, str],
) -> Finding:
    resource = identity[0]
    rows = pl.concat([pairs["created"], pairs["released"]]).sort()
    calls = _with_own_time(trace, region, calls[rows])
    spent = _spent(calls, region)
    cost, change = spent, None
    if severity_of(spent) is not Severity.INFO:
        change = replayed(_change, trace, calls)
        cost = price_change(
            trace,
            region,
            change,
            # Reuse also does without the waits.
            Claim.LOWER_BOUND
            if change is not None and len(change.latency[0])
            else Claim.WHAT_IF,
            "these calls take no time, waits of frees stay",
            direct=spent,
        )
    memory = resource in (_DEVICE, _PINNED)
    verbs = "is allocated and freed" if memory else "are created and destroyed"
    longest = calls.sort("own_ns", descending=True, maintain_order=True).head(5)
    return Finding(
        message=f"{resource} {verbs} {pairs.height} times in repeated work, "
        f"by {' and '.join(_most(calls))}, which takes {(spent.ns or 0) / 1e6:.2f} ms "
        "of host time",
        severity=severity_of(cost),
        confidence=Confidence.HIGH,
        cost=cost,
        where=locate(trace, calls=calls),
        occurrences=pairs.height,
        evidence=tuple(
            Evidence(start, end, name, correlation_id)
            for start, end, name, correlation_id in longest.select(
                "start_ns", "end_ns", "name", "correlation_id"
            ).iter_rows()
        ),
        fix=_FIXES[resource],
        identity=identity,
        change=change,
    )


def _change(trace: Trace, calls: pl.DataFrame) -> Change:
    """The calls take no time of their own; frees return when their wait is over."""
    replay = replay_of(trace)
    made = replay.calls_of(calls)
    waits = replay.constraints(Edge.FREE, calls=made)
    return Change(
        call_duration=(made, np.zeros_like(made)),
        latency=(waits, np.zeros_like(waits)),
    )


def _spent(calls: pl.DataFrame, region: Region) -> Cost:
    """Host time that the calls take from the thread that spends most in them."""
    by_thread = calls.group_by("tid").agg(pl.col("own_ns").sum())
    return price(
        Claim.DIRECT,
        int(column(by_thread, "own_ns").max()),
        region,
        "host time in these calls in the judged region, less the wait of frees for "
        "earlier GPU work; of the thread with the most",
    )


def _with_own_time(trace: Trace, region: Region, calls: pl.DataFrame) -> pl.DataFrame:
    """The calls with own_ns: time in the region without waiting for the GPU."""
    start, end = column(calls, "start_ns"), column(calls, "end_ns")
    until = done_before(of_process(trace.gpu_ops, region.pid), start)
    # A free that returns while the work goes on did not wait for it.
    waits = calls["may_wait"].to_numpy() & (until <= end)
    begin = np.where(waits, np.maximum(start, until), start)
    inside = (start >= region.start_ns) & (start < region.end_ns)
    inside &= region.chosen(calls)
    own = np.where(inside, np.minimum(end, region.end_ns) - begin, 0).clip(0)
    return calls.with_columns(as_series(own, "own_ns"))


def _most(calls: pl.DataFrame) -> tuple[str, str]:
    """The call that creates most often, and the one that releases."""
    counts = calls.group_by("creates", "name").len()
    counts = counts.sort("len", "name", descending=[False, True])
    # Of each kind the last, which comes most often, stays.
    most = dict(zip(counts["creates"], counts["name"], strict=True))
    return most[True], most[False]


_FIXES = {
    _DEVICE: "allocate before the loop and reuse; for sizes that change use "
    "cudaMallocAsync and cudaFreeAsync with a release threshold (the first call "
    "creates the pool, 9 to 13 ms measured: a few dozen iterations gain nothing); "
    "where the code relied on cudaFree to wait for the GPU, keep the order with an "
    "event, or results may race",
    _PINNED: "pin a pool of buffers before the loop and reuse them; wait for an event "
    "after the last copy of a buffer before reusing it, or data may race",
    _STREAMS: "create the streams before the loop and reuse them; order work that must "
    "not overlap with events, as reused streams share their queue",
    _EVENTS: "create the events before the loop and record them again (with "
    "cudaEventDisableTiming if they are not timed); record one again only after its "
    "waits were issued",
}

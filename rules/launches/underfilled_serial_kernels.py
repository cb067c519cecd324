"""Rule underfilled-serial-kernels."""

from __future__ import annotations

import polars as pl

from streamlint.blocking import launches_block
from streamlint.changes import Change
from streamlint.completeness import sizes_unknown
from streamlint.cost import price, price_change
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.held import in_issue_order
from streamlint.intervals import union
from streamlint.replay import Edge, replay_of
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, in_time, regions
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

MAX_FRACTION = Threshold(
    "max-gpu-share",
    0.25,
    "share",
    "Kernels that ask for less of the GPU leave room for three more (rule catalogue).",
)
MIN_RUN = Threshold(
    "min-run",
    4,
    "kernels in a row",
    "So many small kernels in a row could fill it.",
)
MIN_SHARE = Threshold(
    "min-share",
    0.1,
    "share",
    "Runs that take less of the judged region aren't worth an independent proof.",
)
MIN_OVERLAPPED = Threshold(
    "min-overlapped",
    10,
    "kernels",
    "Fewer kernels that ran beside each other teach nothing.",
)
MIN_SPEED_UP = Threshold(
    "min-speed-up",
    1.25,
    "factor",
    "Kernels that gain less from running together are better left in a row. Three "
    "kernels of 0.24 of an H200 each, started together, took 86, 164 and 234 us.",
)


@rule(needs=("kernels", "runtime_calls"))
def underfilled_serial_kernels(trace: Trace) -> Outcome:
    """Small kernels run one after another on a GPU that has room for several.

    What it does
        Finds runs of at least four queued kernels of one stream that each ask for
        less than a quarter of the GPU and run with nothing beside them, where such
        runs take a tenth of the time.
    Why it costs time
        A stream runs its kernels one after another. The multiprocessors that a
        small kernel leaves free stay idle, unless other streams use them.
    Evidence
        Thread blocks over the blocks that fit on the GPU at once, by registers,
        warps and shared memory. Free room is no promise of speed, so what the trace
        shows elsewhere decides: where small kernels ran beside each other and gained
        little, the rule is silent; where they gained, the cost is an upper bound
        that gains no more; where none ever overlapped, no time is claimed. No trace
        shows whether the kernels depend on each other, so this is for information.
    Exemptions
        Kernels that start late (the host is the limit), run beside others, belong to
        graphs, overlap their neighbours in the stream, or are cooperative; streams
        that wait for events.
    Fix
        Launch independent kernels into streams of their own, or as branches of a
        graph, and join them with events; or give one kernel more work. Kernels that
        use each other's results would race.
    References
        CUDA C++ Programming Guide, "Concurrent kernel execution".
    """
    findings: list[Finding] = []
    unable: NotAssessed | None = None
    for pid, region in regions(trace).items():
        small = (pl.col("pid") == pid) & _small(trace)
        if not _matters(trace, trace.gpu_ops.filter(small & region.holds()), region):
            continue
        if launches_block(trace, pid):
            continue
        ordered = _with_neighbours(trace, in_issue_order(trace, pid))
        runs = _runs(trace, ordered).filter(region.holds())
        if not _matters(trace, runs, region):
            continue
        if unsized := sizes_unknown(runs):
            unable = unsized
        else:
            gain = _speed_up(trace, ordered)
            if gain is None or gain >= trace.limit(MIN_SPEED_UP):
                findings.append(_finding(trace, region, runs, gain))
    return [finding for finding in findings if finding.cost.ns != 0] or unable or []


def _small(trace: Trace) -> pl.Expr:
    """Kernels that leave room; those of unknown size do, for all that is known."""
    fraction = pl.col("sm_fraction").fill_null(0.0)
    return (pl.col("kind") == "kernel") & (fraction < trace.limit(MAX_FRACTION))


def _matters(trace: Trace, kernels: pl.DataFrame, region: Region) -> bool:
    lasting = int((kernels["end_ns"] - kernels["start_ns"]).sum())
    least = trace.limit(MIN_SHARE) * region.duration_ns
    return kernels.height >= trace.limit(MIN_RUN) and lasting >= least


def _with_neighbours(trace: Trace, ordered: pl.DataFrame) -> pl.DataFrame:
    """Adds small (a single kernel that leaves room) and alone (nothing beside it)."""
    after = pl.col("start_ns") >= pl.col("end_ns").cum_max().shift(1)
    before = pl.col("start_ns").shift(-1) >= pl.col("end_ns")
    alone = (
        ordered.select("start_ns", "end_ns", "device_id")
        .with_row_index("row")
        .sort("start_ns", "end_ns")
        .select(
            "row",
            (
                after.over("device_id").fill_null(value=True)
                & before.over("device_id").fill_null(value=True)
            ).alias("alone"),
        )
        .sort("row")["alone"]
    )
    cooperative = [name for name in trace.call_names if "Cooperative" in name]
    small = (
        _small(trace)
        & pl.col("graph_node_id").is_null()
        & ~pl.col("call").is_in(cooperative).fill_null(value=False)
    )
    return ordered.with_columns(small.alias("small"), alone)


def _runs(trace: Trace, ordered: pl.DataFrame) -> pl.DataFrame:
    """Kernels of runs, columns of gpu_ops with run, of at least `MIN_RUN` each."""
    stream = "stream_id"
    serial = pl.col("small") & pl.col("alone")
    queued = pl.col("issue_ns") < pl.col("end_ns").shift(1).over(stream)
    goes_on = serial & serial.shift(1).over(stream) & queued & ~pl.col("after_wait")
    return (
        ordered.with_columns(goes_on.fill_null(value=False).alias("goes_on"))
        .filter(serial)
        .sort("stream_id", maintain_order=True)
        .with_columns((~pl.col("goes_on")).cum_sum().alias("run"))
        .drop("goes_on")
        .filter(pl.len().over("run") >= trace.limit(MIN_RUN))
    )


def _speed_up(trace: Trace, ordered: pl.DataFrame) -> float | None:
    """How much faster small kernels were together than alone; None if unknown.

    Their usual times alone, by name and grid share, over the time that they took.
    """
    kind = ["name", "sm_fraction"]
    lasting = pl.col("end_ns") - pl.col("start_ns")
    kernels = ordered.filter("small", in_time(trace))
    alone = (
        kernels.filter("alone").group_by(kind).agg(lasting.median().alias("alone_ns"))
    )
    together = kernels.filter(~pl.col("alone")).join(
        alone, on=kind, how="inner", validate="m:1"
    )
    if (
        together.height < trace.limit(MIN_OVERLAPPED)
        or together["stream_id"].n_unique() < 2
    ):
        return None
    busy = union(column(together, "start_ns"), column(together, "end_ns"))
    return float(together["alone_ns"].sum()) / busy.total_ns


def _finding(
    trace: Trace, region: Region, runs: pl.DataFrame, gain: float | None
) -> Finding:
    change = None if gain is None else _change(trace, runs)
    if gain is None or change is None:
        cost = Cost(Claim.NONE, None, None, "nothing in the trace shows a gain")
    else:
        cost = _cost(trace, region, change, runs, gain)
    count = int(runs["run"].n_unique())
    largest = float(runs["sm_fraction"].cast(pl.Float64).to_numpy().max())
    total = int((runs["end_ns"] - runs["start_ns"]).sum())
    known = (
        "none of this process ran side by side"
        if gain is None
        else f"side by side they were {gain:.1f} times as fast"
    )
    calls = calls_behind(trace, runs)
    longest = (
        runs.group_by("run", "stream_id", maintain_order=True)
        .agg(
            pl.len().alias("count"),
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
            pl.col("correlation_id").first(),
        )
        .sort(pl.col("end_ns") - pl.col("start_ns"), descending=True)
        .head(5)
    )
    return Finding(
        message=f"{runs.height} kernels that each ask for at most {largest:.0%} of the "
        f"GPU run one after another in {count} run{'s' if count > 1 else ''}, "
        f"{total / 1e6:.2f} ms in all; {known}",
        severity=Severity.INFO,
        confidence=Confidence.LOW,
        cost=cost,
        where=locate(trace, calls=calls, ops=runs),
        occurrences=runs.height,
        evidence=tuple(
            Evidence(
                row["start_ns"],
                row["end_ns"],
                f"{row['count']} small kernels in a row on stream {row['stream_id']}",
                row["correlation_id"],
            )
            for row in longest.iter_rows(named=True)
        ),
        fix="launch kernels that don't depend on each other into several streams or as "
        "branches of a graph, and join them with events; those that use each other's "
        "results would race",
        identity=("underfilled", *sorted(runs["name"].unique())[:8]),
        change=change,
    )


def _change(trace: Trace, runs: pl.DataFrame) -> Change:
    """Kernels of a run no longer wait for each other, but for room on the GPU."""
    replay = replay_of(trace)
    later = runs.filter(pl.int_range(pl.len()).over("run") > 0)
    order = replay.constraints(Edge.STREAM, ops=replay.ops_of(later))
    return Change(drop=order)


def _cost(
    trace: Trace, region: Region, change: Change, runs: pl.DataFrame, gain: float
) -> Cost:
    """The replay packs by room; the gain that the trace shows bounds it further."""
    total = int((runs["end_ns"] - runs["start_ns"]).sum())
    least = f"{gain:.1f} times as fast at most"
    most = price(
        Claim.UPPER_BOUND,
        int(total * (1 - 1 / gain)),
        region,
        f"time of these kernels, {least}",
    )
    packed = price_change(
        trace,
        region,
        change,
        Claim.UPPER_BOUND,
        f"these kernels side by side as far as there is room, {least}",
        direct=most,
    )
    if (packed.ns or 0) <= (most.ns or 0):
        return packed
    return price(Claim.UPPER_BOUND, most.ns or 0, region, packed.method)

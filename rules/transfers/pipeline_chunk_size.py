"""Rule pipeline-chunk-size."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from streamlint.blocking import launches_block
from streamlint.changes import Change
from streamlint.copies import (
    BUS_RATE,
    at_pinned_rate,
    host_copies,
    memory_unknown,
    size_words,
)
from streamlint.cost import price, price_change, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding, Severity
from streamlint.intervals import Int64
from streamlint.replay import Edge, replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, regions
from streamlint.trace.model import Trace
from streamlint.waits import waiting_calls
from streamlint.where import calls_behind, locate

SMALL_CHUNK = Threshold(
    "min-chunk",
    1 << 20,
    "bytes",
    "Copies of less don't reach the rate of the bus: 49 of 52 GB/s at 1 MiB (H200).",
)
GOOD_CHUNK = 4 << 20
"""A chunk that copies far longer than it takes to issue: 80 us on an H200."""
LARGE_CHUNK = Threshold(
    "max-chunk",
    16 << 20,
    "bytes",
    "Above this, filling and draining the pipeline is felt (rule catalogue).",
)
MIN_ISSUE_SHARE = Threshold(
    "min-issue-share",
    0.5,
    "share",
    "Issuing a chunk takes at least this part of copying it, or the bus is the limit.",
)
MIN_CHUNKS = Threshold(
    "min-small-chunks",
    32,
    "small chunks",
    "Fewer small chunks cost less than 0.5 ms.",
)
FEW_CHUNKS = Threshold(
    "min-large-chunks",
    4,
    "large chunks",
    "With so many chunks or more, each is a small part of the whole.",
)
MIN_ENDS_SHARE = Threshold(
    "min-ends-share",
    0.1,
    "share",
    "Filling and draining matter from this part of the pass on.",
)

Floats: TypeAlias = npt.NDArray[np.float64]


@rule(needs=("runtime_calls", "memcpys"))
def pipeline_chunk_size(trace: Trace) -> Outcome:
    """The chunks of a copy and compute pipeline are too small, or too large.

    What it does
        Finds passes in which one thread deals out chunks of one size to several
        streams, each copied and computed on, without waiting in between: many
        chunks of less than 1 MiB, or two or three of more than 16 MiB.
    Why it costs time
        Each chunk costs its calls, some microseconds each, and small copies don't
        reach the rate of the bus (64 KiB at 12 GB/s, 1 MiB at 49, on an H200), so
        the copy engines wait for the host. With few large chunks, nothing overlaps
        with the first upload and the last download.
    Evidence
        Too small: at least 32 chunks in a pass, and issuing one takes at least half
        as long as copying it. The cost is an upper bound, a replay of the run with
        chunks of 4 MiB: as many times fewer calls, copies at the pinned rate,
        kernels that fill the GPU better. Too large: filling and draining take more
        than 10 % of the pass; the cost is an upper bound, that time less a chunk of
        1 MiB at each end, and at most the pass less its copies of one direction, at
        low confidence, as kernels may need a whole chunk.
    Exemptions
        One stream (copy-compute-not-overlapped, small-copy-storm), pageable memory,
        copies of graphs, chunks of different sizes, a host that waits between
        chunks, processes whose every launch blocks.
    Fix
        Measure a few sizes between 1 and 16 MiB and take the best. Larger chunks
        need larger buffers in each stream; keep a buffer untouched until its chunk
        is done, or data may race.
    References
        CUDA C++ Best Practices Guide, "Asynchronous and overlapping transfers with
        computation".
    """
    copies = host_copies(trace).filter(
        (pl.col("call_kind") == "async memcpy") & pl.col("graph_node_id").is_null()
    )
    pinned = pl.col("host_kind") == "pinned"
    findings = _judge(trace, copies.filter(pinned))
    unknown = None if findings else memory_unknown(copies)
    if unknown is None:
        return findings
    maybe = copies.filter(pinned | (pl.col("host_kind") == "unknown"))
    return unknown if _judge(trace, maybe) else findings


def _judge(trace: Trace, pinned: pl.DataFrame) -> list[Finding]:
    findings: list[Finding] = []
    for pid, region in regions(trace).items():
        copies = pinned.filter(region.holds())
        sizes = copies["size_bytes"]
        small = int((sizes < trace.limit(SMALL_CHUNK)).sum())
        # All chunks of a pass but its last are of one size.
        if (
            small < trace.limit(MIN_CHUNKS) - 1
            and not (sizes > trace.limit(LARGE_CHUNK)).any()
        ):
            continue
        if copies["stream_id"].n_unique() < 2 or launches_block(trace, pid):
            continue
        passes = _passes(trace, region, copies)
        found = []
        if (
            chunks := passes.filter(
                _too_small(
                    trace,
                )
            )
        ).height:
            found.append(_small(trace, region, chunks))
        if (
            chunks := passes.filter(
                _too_large(
                    trace,
                )
            )
        ).height:
            found.append(_large(trace, region, chunks))
        findings += [one for one in found if one.severity is not Severity.INFO]
    return findings


def _too_small(
    trace: Trace,
) -> pl.Expr:
    issuing = pl.col("every_ns") >= trace.limit(MIN_ISSUE_SHARE) * pl.col("copying_ns")
    size = pl.col("chunk_bytes") < trace.limit(SMALL_CHUNK)
    return size & issuing & (pl.col("copies") >= trace.limit(MIN_CHUNKS))


def _too_large(
    trace: Trace,
) -> pl.Expr:
    few = pl.col("chunks").is_between(2, trace.limit(FEW_CHUNKS) - 1)
    lasting = pl.col("end_ns") - pl.col("start_ns")
    ends = (
        pl.col("fill_ns") + pl.col("drain_ns") > trace.limit(MIN_ENDS_SHARE) * lasting
    )
    return (pl.col("chunk_bytes") > trace.limit(LARGE_CHUNK)) & few & ends


def _passes(trace: Trace, region: Region, copies: pl.DataFrame) -> pl.DataFrame:
    """Passes over chunks of one size on several streams, one row a pass.

    pid, run, tid, first_ns, until_ns (when its calls were made), chunk_bytes, copies
    (of the direction with most), every_ns and copying_ns (medians of the time
    between two of them, and of their durations), chunks (groups of kernels),
    start_ns, end_ns, fill_ns, drain_ns (copies alone at its ends).
    """
    runs = _runs(trace, region, copies)
    computes = pl.col("engine") == "compute"
    lasting = pl.col("end_ns") - pl.col("start_ns")
    goes_on = (computes & computes.shift(1)).over("run", "stream_id")
    seen = (
        _operations(trace, region, runs)
        .with_columns((computes & ~goes_on.fill_null(value=False)).alias("begins"))
        .group_by("run")
        .agg(
            pl.col("begins").sum().alias("chunks"),
            pl.col("stream_id").filter(computes).n_unique().alias("computing"),
            pl.col("start_ns", "issue_ns").min(),
            pl.col("end_ns").max(),
            pl.col("start_ns").filter(computes).min().alias("computed_ns"),
            pl.col("end_ns").filter(computes).max().alias("done_ns"),
            lasting.filter(pl.col("engine") == "HtoD").sum().alias("up_ns"),
            lasting.filter(pl.col("engine") == "DtoH").sum().alias("down_ns"),
        )
        .filter(pl.col("computing") > 1)
    )
    return (
        runs.join(seen, on="run", how="inner", validate="1:1")
        .with_columns(
            (pl.col("computed_ns") - pl.col("start_ns")).clip(0).alias("fill_ns"),
            (pl.col("end_ns") - pl.col("done_ns")).clip(0).alias("drain_ns"),
        )
        .sort("first_ns")
    )


def _runs(trace: Trace, region: Region, copies: pl.DataFrame) -> pl.DataFrame:
    """Copies of a thread to several streams without a wait between: a row a run."""
    uploads = copies.filter(pl.col("direction") == "HtoD")
    waits = (
        waiting_calls(trace)
        .filter(pl.col("pid") == region.pid)
        .select("tid", pl.col("start_ns").alias("wait_ns"))
        .sort("wait_ns")
    )
    before = pl.col("issue_ns").shift(1).over("tid")
    usual = pl.col("size_bytes") == pl.col("size_bytes").median()
    return (
        (uploads if uploads.height else copies)
        .sort("issue_ns")
        .join_asof(
            waits,
            left_on="issue_ns",
            right_on="wait_ns",
            by="tid",
            check_sortedness=False,
        )
        .sort("tid", "issue_ns", maintain_order=True)
        .with_columns(
            (before.is_null() | (pl.col("wait_ns") > before))
            .fill_null(value=False)
            .cum_sum()
            .alias("run")
        )
        .group_by("run", "tid", maintain_order=True)
        .agg(
            pl.col("pid").first(),
            pl.len().cast(pl.Int64).alias("copies"),
            usual.sum().alias("alike"),
            pl.col("stream_id").n_unique().alias("streams"),
            pl.col("size_bytes").median().cast(pl.Int64).alias("chunk_bytes"),
            pl.col("issue_ns").first().alias("first_ns"),
            pl.col("issue_ns").last().alias("last_ns"),
            pl.col("issue_ns").diff().median().alias("every_ns"),
            (pl.col("end_ns") - pl.col("start_ns")).median().alias("copying_ns"),
        )
        # The last piece of a buffer may be smaller.
        .filter((pl.col("streams") > 1) & (pl.col("copies") - pl.col("alike") <= 1))
        .with_columns(pl.int_range(pl.len()).alias("run"))
    )


def _operations(trace: Trace, region: Region, runs: pl.DataFrame) -> pl.DataFrame:
    """Operations of these passes, columns of `gpu_ops` and run, by issue."""
    # What the last chunk still needs is issued soon after it.
    more = (pl.col("last_ns") - pl.col("first_ns")) // (pl.col("copies") - 1)
    spans = runs.select(
        *("run", "tid", "first_ns"),
        (pl.col("last_ns") + 2 * more.clip(1)).alias("until_ns"),
    ).sort("first_ns")
    near = pl.col("issue_ns").is_between(
        spans["first_ns"].min(), spans["until_ns"].max()
    ) & pl.col("tid").is_in(spans["tid"].unique().implode())
    return (
        trace.gpu_ops.filter(region.holds() & near)
        .sort("issue_ns", maintain_order=True)
        .join_asof(
            spans,
            left_on="issue_ns",
            right_on="first_ns",
            by="tid",
            check_sortedness=False,
        )
        .filter(pl.col("issue_ns") <= pl.col("until_ns"))
    )


def _small(trace: Trace, region: Region, passes: pl.DataFrame) -> Finding:
    ops = _operations(trace, region, passes)
    change = replayed(_change, trace, passes, ops)
    copies = int(passes["copies"].sum())
    worst = passes.sort("copies", descending=True, maintain_order=True)
    size, every, copying = worst.select("chunk_bytes", "every_ns", "copying_ns").row(0)
    cost = price_change(
        trace,
        region,
        change,
        Claim.UPPER_BOUND,
        "chunks of 4 MiB: fewer calls, copies at the pinned rate, fuller kernels",
        direct=price(
            Claim.UPPER_BOUND,
            min(int(_issuing_ns(passes)), region.duration_ns),
            region,
            "time from the first to the last copy call of each pass, less that for "
            "chunks of 4 MiB",
        ),
    )
    return _finding(
        trace,
        passes,
        ops,
        message=f"{copies} chunks of {size_words(size)} are dealt out to "
        f"{ops['stream_id'].n_unique()} streams; issuing one takes {every / 1e3:.1f} "
        f"us and copying it {copying / 1e3:.1f} us",
        cost=cost,
        occurrences=copies,
        identity="small",
        change=change,
    )


def _issuing_ns(passes: pl.DataFrame) -> float:
    """Host time that chunks of 4 MiB would not need."""
    kept = pl.col("chunk_bytes") / GOOD_CHUNK
    issuing = pl.col("last_ns") - pl.col("first_ns")
    return float(passes.select((issuing * (1 - kept)).sum()).item())


def _change(trace: Trace, passes: pl.DataFrame, ops: pl.DataFrame) -> Change:
    """As many chunks taken together as make 4 MiB: each shares one chunk's costs."""
    replay = replay_of(trace)
    graph = replay.graph
    many = (GOOD_CHUNK / pl.col("chunk_bytes").clip(1)).alias("many")
    sized = ops.join(passes.select("run", many), on="run", how="left", validate="m:1")
    asked = sized.select("pid", "tid", "run", "many", start_ns="issue_ns")
    later = asked.filter(~pl.col("run").is_first_distinct())
    rows = replay.ops_of(sized)
    calls, thinks = replay.calls_of(asked), replay.calls_of(later)
    gaps = replay.constraints(Edge.STREAM, Edge.ENGINE, Edge.QUEUE, ops=rows)
    of_op = _spread(graph.ops, sized, ["pid", "correlation_id", "start_ns"])
    of_call = _spread(graph.calls, asked, ["pid", "tid", "start_ns"])
    return Change(
        op_duration=(rows, _together(trace, rows, of_op[rows])),
        call_duration=(calls, _part(graph.call_duration[calls], of_call[calls])),
        think=(thinks, _part(graph.think_ns[thinks], of_call[thinks])),
        latency=(gaps, _part(graph.latency[gaps].clip(0), of_op[graph.node[gaps]])),
        issue_latency=(rows, _part(graph.issue_latency[rows], of_op[rows])),
    )


def _spread(nodes: pl.DataFrame, rows: pl.DataFrame, key: list[str]) -> Floats:
    """For each node how many chunks its one goes with, 1 outside of the passes."""
    known = rows.select(*key, "many").unique(key, keep="first")
    many = nodes.join(known, on=key, how="left", maintain_order="left")["many"]
    return many.fill_null(1.0).to_numpy()


def _part(values: Int64, many: Floats) -> Int64:
    return (values / many).astype(np.int64)


def _together(trace: Trace, ops: Int64, many: Floats) -> Int64:
    """Durations of operations that ``many`` of the same kind make one of.

    A kernel that leaves most of the GPU idle grows without taking longer.
    """
    graph = replay_of(trace).graph
    rows = graph.ops[ops]
    copies = at_pinned_rate(trace, ops, unknown=BUS_RATE)
    filling = rows["sm_fraction"].fill_null(0.0).to_numpy()
    kernels = graph.op_duration[ops] * np.maximum(filling, 1 / many)
    is_copy = rows["engine"].is_in(("HtoD", "DtoH")).to_numpy()
    return np.where(is_copy, copies, kernels).astype(np.int64)


def _large(trace: Trace, region: Region, passes: pl.DataFrame) -> Finding:
    ops = _operations(trace, region, passes)
    ends = int((passes["fill_ns"] + passes["drain_ns"]).sum())
    chunks = int(passes["chunks"].sum())
    longest = passes.sort("chunk_bytes", descending=True, maintain_order=True)
    size = size_words(int(longest["chunk_bytes"][0]))
    passes_words = "1 pass" if passes.height == 1 else f"{passes.height} passes"
    return _finding(
        trace,
        passes,
        ops,
        message=f"{chunks} chunks of up to {size} in {passes_words} over several "
        f"streams: nothing overlaps with the first uploads and the last downloads, "
        f"{ends / 1e6:.2f} ms",
        cost=_ends(trace, region, passes),
        occurrences=chunks,
        identity="large",
        change=None,
    )


def _ends(trace: Trace, region: Region, passes: pl.DataFrame) -> Cost:
    left = trace.limit(SMALL_CHUNK) / pl.col("chunk_bytes")
    ends = (pl.col("fill_ns") + pl.col("drain_ns")) * (1 - left)
    lasting = pl.col("end_ns") - pl.col("start_ns")
    busiest = pl.max_horizontal("up_ns", "down_ns")
    most = pl.min_horizontal(ends, lasting - busiest).clip(0)
    return price(
        Claim.UPPER_BOUND,
        int(passes.select(most.sum()).item()),
        region,
        "time of each pass before its first and after its last kernel, less that of "
        "1 MiB of each chunk; at most the pass less its copies of one direction",
    )


def _finding(
    trace: Trace,
    passes: pl.DataFrame,
    ops: pl.DataFrame,
    *,
    message: str,
    cost: Cost,
    occurrences: int,
    identity: str,
    change: Change | None,
) -> Finding:
    longest = passes.sort(
        pl.col("end_ns") - pl.col("start_ns"), descending=True, maintain_order=True
    ).head(5)
    kernels = ops.filter(pl.col("kind") == "kernel")["name"]
    return Finding(
        message=message,
        severity=severity_of(cost),
        confidence=Confidence.LOW if identity == "large" else Confidence.MEDIUM,
        cost=cost,
        where=locate(trace, calls=calls_behind(trace, ops), ops=ops),
        occurrences=occurrences,
        evidence=tuple(
            Evidence(start, end, f"{number} copies of {size_words(size)} in one pass")
            for start, end, number, size in longest.select(
                "start_ns", "end_ns", "copies", "chunk_bytes"
            ).iter_rows()
        ),
        fix="measure chunks of a few sizes between 1 and 16 MiB and take the best; "
        "give each stream a buffer of its own and keep it untouched until its chunk is "
        "done, or data may race",
        identity=(identity, *sorted(kernels.unique())[:8]),
        change=change,
    )

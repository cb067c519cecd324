"""Rule copy-compute-not-overlapped."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import polars as pl

from streamlint.blocking import concurrent_regions
from streamlint.copies import host_copies, memory_unknown, size_words
from streamlint.cost import price, severity_of
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
)
from streamlint.intervals import Intervals, union
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups
from streamlint.trace.model import Trace
from streamlint.where import calls_behind, locate

MIN_CLASS_SHARE = Threshold(
    "min-share",
    0.10,
    "share",
    "Copies or kernels that fill less of the judged region aren't worth hiding.",
)
MAX_OVERLAP = Threshold(
    "max-overlap",
    0.10,
    "share",
    "Up to this part of the shorter class may overlap, at the seams of the chain.",
)
ONE_STREAM = Threshold(
    "min-stream-share",
    0.8,
    "share",
    "From this part of the work on, one stream is the chain; more are another fault.",
)
MIN_ROUNDS = Threshold(
    "min-rounds",
    2,
    "rounds",
    "Kernels between copies this often are a loop that can be pipelined.",
)
CHUNKABLE_BYTES = Threshold(
    "min-single-copy",
    32 << 20,
    "bytes",
    "A single pass with such a copy can be cut into pieces.",
)
MAX_PASS_KERNELS = Threshold(
    "max-pass-kernels",
    4,
    "kernels in a single pass",
    "A single pass of more kernels reads its input again and again: no pieces.",
)
MIN_CHUNK_BYTES = 1 << 20
"""Smallest piece at full copy rate: 1 MiB runs at 49 of 52 GB/s on an H200."""

_LANES = ("HtoD", "compute", "DtoH")


@rule(needs=("memcpys",))
def copy_compute_not_overlapped(trace: Trace) -> Outcome:
    """Copies and kernels take turns on one stream though the GPU can overlap them.

    What it does
        Finds devices on which a process puts most copies and kernels on one stream,
        so that uploads, kernels and downloads of round after round, or of one large
        pass, run strictly one after another.
    Why it costs time
        A stream runs its operations in order. The GPU has copy engines beside its
        multiprocessors; with several streams one piece is copied while another is
        computed, and uploads run beside downloads.
    Evidence
        At least two of uploads, kernels and downloads fill 10 % of the judged
        region each and overlap for less than 10 % of the shorter one. The cost is
        an upper bound: the time with any of them running, less the longest of the
        three plus the first upload and the last download, which nothing can hide
        (pieces of 1 MiB at best). It holds only if rounds don't depend on each
        other's results, which a trace can't show.
    Exemptions
        Work on several streams, mostly pageable copies (pageable-async-copy judges
        those), GPUs without copy engines, uploads against downloads where one
        engine serves both, integrated GPUs, unified-memory migrations, copies
        between GPUs, an upload before or a download after many kernels.
    Fix
        Cut the work into pieces, use two to four non-blocking streams, pinned
        buffers and cudaMemcpyAsync, with a buffer for each stream. Keep what one
        piece needs from another in order with an event, or results may race.
    References
        CUDA C++ Best Practices Guide, "Asynchronous and overlapping transfers with
        computation"; CUDA C++ Programming Guide, "Overlapping behavior".
    """
    findings: list[Finding] = []
    unable: NotAssessed | None = None
    copies = host_copies(trace)
    for region in concurrent_regions(trace).values():
        own = trace.gpu_ops.filter(region.holds())
        for (device,), ops in groups(own, "device_id"):
            if {*ops["engine"].unique()}.isdisjoint(("HtoD", "DtoH")):
                continue
            here = copies.filter(
                region.holds() & pl.col("device_id").eq_missing(device)
            )
            if here["integrated"].any() or _mostly(here, ("pageable",)):
                continue
            unknown = _mostly(here, ("pageable", "unknown"))
            chain = _chain(trace, ops, region, _copy_engines(trace, ops))
            if chain is not None:
                finding = _finding(trace, region, chain)
                if finding.severity is not Severity.INFO:
                    unable = memory_unknown(here) if unknown else unable
                    findings += [] if unknown else [finding]
    return findings or unable or []


class _Chain(NamedTuple):
    """Copies and kernels of one stream that take turns.

    ``ops`` has them with ``lane`` ("HtoD", "compute", "DtoH"); ``lanes`` are those
    worth overlapping; ``rounds`` counts the kernels, or groups of them, that copies
    set apart; ``looped`` tells that it is more than one pass.
    """

    ops: pl.DataFrame
    lanes: tuple[str, ...]
    engines: int
    rounds: int
    looped: bool


def _copy_engines(trace: Trace, ops: pl.DataFrame) -> int:
    """Copy engines of the device; 1 where the export doesn't tell."""
    used = {*ops["gpu_id"].unique()}
    engines = trace.gpus.select("gpu_id", "async_engines").iter_rows()
    known = (count for gpu, count in engines if gpu in used and count is not None)
    return next(known, 1)


def _mostly(copies: pl.DataFrame, kinds: tuple[str, ...]) -> bool:
    """Whether most copy time is that of these kinds of host memory."""
    took = pl.col("end_ns") - pl.col("start_ns")
    slow = pl.col("host_kind").is_in(kinds)
    all_ns, slow_ns = copies.select(
        took.sum().alias("all"), took.filter(slow).sum().alias("slow")
    ).row(0)
    return int(slow_ns) * 2 > int(all_ns)


def _chain(
    trace: Trace, ops: pl.DataFrame, region: Region, engines: int
) -> _Chain | None:
    """The chain on the device's main stream, None where there is none."""
    copy = pl.col("engine").is_in(("HtoD", "DtoH"))
    ops = ops.filter(~pl.col("engine").is_in(("PtoP", "HtoH"))).with_columns(
        pl.when(copy).then("engine").otherwise(pl.lit("compute")).alias("lane"),
        (pl.col("end_ns") - pl.col("start_ns")).alias("ns"),
    )
    main = _main_stream(trace, ops)
    if engines < 1 or main is None:
        return None
    chain = ops.filter(pl.col("stream_id") == main)
    for looped, part in ((True, _without_single_copies(chain)), (False, chain)):
        lanes = _serial_lanes(trace, ops, part, region, engines)
        turns = part.filter(pl.col("lane").is_in({*lanes, "compute"})).with_columns(
            pl.col("lane").rle_id().alias("turn")
        )
        kernels = turns.filter(pl.col("lane") == "compute")
        inner = (pl.col("turn") > 0) & (pl.col("turn") < turns["turn"].max())
        between = kernels.filter(inner)
        if looped:
            holds = between["turn"].n_unique() >= trace.limit(MIN_ROUNDS)
        else:
            large = pl.col("size_bytes") >= trace.limit(CHUNKABLE_BYTES)
            few = between.height <= trace.limit(MAX_PASS_KERNELS)
            holds = few and turns.filter(large).height > 0
        if lanes and between.height and holds:
            return _Chain(part, lanes, engines, kernels["turn"].n_unique(), looped)
    return None


def _without_single_copies(chain: pl.DataFrame) -> pl.DataFrame:
    """The chain less uploads at its start and downloads at its end, say.

    What takes more than half of its lane's time at once isn't part of a loop.
    """
    turns = chain.with_columns(pl.col("lane").rle_id().alias("turn"))
    at_once = pl.col("ns").sum().over("turn")
    single = at_once * 2 > pl.col("ns").sum().over("lane")
    return turns.filter((pl.col("lane") == "compute") | ~single)


def _serial_lanes(
    trace: Trace, ops: pl.DataFrame, chain: pl.DataFrame, region: Region, engines: int
) -> tuple[str, ...]:
    """The lanes worth overlapping, none if there's one or if they overlap already."""
    least = trace.limit(MIN_CLASS_SHARE) * region.duration_ns
    lanes = tuple(lane for lane in _LANES if _lane(chain, lane).total_ns >= least)
    pairs = [
        (_lane(ops, a), _lane(ops, b))
        for a, b in combinations(lanes, 2)
        if engines > 1 or "compute" in (a, b)
    ]
    serial = all(
        (a & b).total_ns < trace.limit(MAX_OVERLAP) * min(a.total_ns, b.total_ns)
        for a, b in pairs
    )
    return lanes if pairs and serial else ()


def _main_stream(trace: Trace, ops: pl.DataFrame) -> int | None:
    """The stream that holds most of the copies and most of the kernels, if one."""
    share = pl.col("ns") / pl.col("ns").sum().over("computes")
    most = (
        ops.group_by("stream_id", (pl.col("lane") == "compute").alias("computes"))
        .agg(pl.col("ns").sum())
        .filter(share >= trace.limit(ONE_STREAM))
    )["stream_id"]
    return int(most[0]) if most.len() == 2 and most.n_unique() == 1 else None


def _finding(trace: Trace, region: Region, chain: _Chain) -> Finding:
    cost = _cost(chain, region)
    copies = chain.ops.filter(pl.col("lane") != "compute")
    times = ", ".join(
        f"{'kernels' if lane == 'compute' else lane} "
        f"{_lane(chain.ops, lane).total_ns / 1e6:.2f} ms"
        for lane in _LANES
    )
    longest = copies.sort("ns", descending=True)
    calls = calls_behind(trace, chain.ops)
    kernels = chain.ops.filter(pl.col("lane") == "compute")["name"]
    return Finding(
        message=f"copies and kernels take turns on one stream for {chain.rounds} "
        f"round{'' if chain.rounds == 1 else 's'} ({times}), "
        "though the GPU can run them side by side",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM if chain.looped else Confidence.LOW,
        cost=cost,
        where=locate(trace, calls=calls, ops=chain.ops),
        occurrences=chain.rounds,
        evidence=tuple(
            Evidence(
                row["start_ns"],
                row["end_ns"],
                f"{row['lane']} copy of {size_words(row['size_bytes'])} in the "
                "stream of the kernels",
                row["correlation_id"],
            )
            for row in longest.head(5).iter_rows(named=True)
        ),
        fix="cut the work into pieces on two to four non-blocking streams with pinned "
        "buffers and cudaMemcpyAsync; order pieces that need each other with an event, "
        "or results may race",
        identity=("one stream", *chain.lanes, *sorted(kernels.unique())[:8]),
    )


def _cost(chain: _Chain, region: Region) -> Cost:
    """At best only the longest lane remains, and the first and last piece."""
    busy = union(column(chain.ops, "start_ns"), column(chain.ops, "end_ns")).total_ns
    time = {lane: _lane(chain.ops, lane).total_ns for lane in _LANES}
    first = _piece_ns(chain.ops.filter(pl.col("lane") == "HtoD").head(1))
    last = _piece_ns(chain.ops.filter(pl.col("lane") == "DtoH").tail(1))
    if chain.engines > 1:
        copying = max(time["HtoD"] + last, time["DtoH"] + first)
    else:
        copying = time["HtoD"] + time["DtoH"]
    least = max(time["compute"] + first + last, copying)
    return price(
        Claim.UPPER_BOUND,
        max(0, busy - least),
        region,
        "time with a copy or kernel of the chain running, less the longest of uploads, "
        "kernels and downloads with the first upload and last download",
    )


def _lane(ops: pl.DataFrame, lane: str) -> Intervals:
    here = ops.filter(pl.col("lane") == lane)
    return union(column(here, "start_ns"), column(here, "end_ns"))


def _piece_ns(copy: pl.DataFrame) -> int:
    """Time of the smallest piece that this copy (or none) can be cut into."""
    piece = pl.col("ns") * (MIN_CHUNK_BYTES / pl.col("size_bytes").clip(1)).clip(0, 1)
    return int(copy.select(piece.sum()).item())

"""Rule graph-reinstantiated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from streamlint.changes import Change
from streamlint.cost import price, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding
from streamlint.intervals import Int64
from streamlint.replay import replay_of
from streamlint.rule import Outcome, rule
from streamlint.steady import Region, column, regions
from streamlint.trace.model import Trace
from streamlint.untraced import (
    GRAPH_LAUNCH_NS,
    UPLOAD_NS,
    price_untraced,
    shortened,
    untraced,
)
from streamlint.where import locate, sites

MIN_INSTANTIATIONS = 3
"""Fewer are start-up (rule catalogue)."""
MAX_LAUNCHES = 2
"""An executable graph that is launched more often is worth its instantiation."""
INSTANTIATE_FACTOR = {"node": 1.4, "graph": 1.8}
"""How much longer a recorded instantiation takes, by graph mode; destroying too.

Recorded by node and as a whole 547 and 864 us, unrecorded 400 and 488 us (H200).
"""
INSTANTIATE_NODE_NS = 9_000
"""Of an unrecorded one, a node; for graphs whose nodes are not recorded."""
UPDATE_NODE_NS = 250
"""Of an unrecorded cudaGraphExecUpdate, a node (9.6 and 15.2 us for 50, H200)."""


@rule(needs=("runtime_calls",))
def graph_reinstantiated(trace: Trace) -> Outcome:
    """A CUDA graph is instantiated again instead of updated or launched again.

    What it does
        Finds at least three executable graphs of one shape that are instantiated,
        launched once or twice, and given up for the next one.
    Why it costs time
        Untraced on an H200, an instantiation takes 8 to 10 us a node and the first
        launch after it about 65 us more for the upload; cudaGraphExecUpdate takes
        0.2 to 0.3 us a node and needs no upload.
    Evidence
        Graph launches between one instantiation and the next, counted by
        executable graph over the whole process. Graphs with the same number of
        nodes have one shape; where nodes were not recorded (graph mode) that is
        assumed and the confidence is low. The cost is a what-if: the run replayed
        with an update for each instantiation, no upload and nothing destroyed, all
        with the times that these calls take unrecorded. Recording makes an update up
        to 16 times as long, so two recordings differ by less.
    Exemptions
        Executable graphs launched more often, or prepared and not launched before
        the next; graphs of different sizes; as many successful updates as
        instantiations.
    Fix
        Keep the executable graph. Launch it again where nothing changed; else
        update it with cudaGraphExecUpdate after capturing, or with
        cudaGraphExecKernelNodeSetParams and its like where few nodes change.
        Where updates fail, see their result: they need the same topology. Launches
        of one executable graph never overlap each other.
    References
        CUDA C++ Programming Guide, "Updating Instantiated Graphs"; CUDA Runtime
        API, cudaGraphExecUpdate.
    """
    findings: list[Finding] = []
    for region in regions(trace).values():
        made = _instantiations(trace, region.pid)
        if made.height < MIN_INSTANTIATIONS:
            continue
        of_process = trace.runtime_calls.filter(region.holds() & ~pl.col("nested"))
        updates = of_process.filter(pl.col("kind") == "graph update")["return_value"]
        failed = int((updates != 0).sum())
        uses = _uses(trace, region.pid)
        # A failed update tells that the program meant the same graph.
        shape = ["site"] if failed >= MIN_INSTANTIATIONS else ["site", "nodes"]
        for _, here in made.group_by(shape, maintain_order=True):
            judged = _with_launches(here, uses).filter(region.holds())
            churn = judged.filter(pl.col("launches").is_between(1, MAX_LAUNCHES))
            if churn.height < max(MIN_INSTANTIATIONS, judged.height / 2):
                continue
            if churn.height > updates.len() - failed:
                destroyed = _destroyed(of_process, made, churn)
                first = _first_launches(of_process, churn, uses)
                calls = _Churn(churn, destroyed, first)
                findings.append(_finding(trace, region, calls, failed))
    return findings


@dataclass(frozen=True, slots=True)
class _Churn:
    """Calls that a kept executable graph doesn't need, or not for so long.

    ``made`` are the instantiations, ``first`` the first launches after them.
    """

    made: pl.DataFrame
    destroyed: pl.DataFrame
    first: pl.DataFrame


def _instantiations(trace: Trace, pid: int) -> pl.DataFrame:
    """Columns of `runtime_calls`, row, site; nodes and exec, null if not recorded."""
    made = trace.runtime_calls.filter(
        (pl.col("pid") == pid)
        & (pl.col("kind") == "graph instantiate")
        & ~pl.col("nested")
        & (pl.col("return_value").fill_null(0) == 0)
    ).with_row_index("row")
    nodes = (
        trace.graph_nodes.filter(pl.col("pid") == pid)
        .sort("start_ns")
        .select("tid", "start_ns", "graph_node_id")
        .join_asof(
            made.select("tid", "start_ns", "row", pl.col("end_ns").alias("made_ns")),
            on="start_ns",
            by="tid",
            check_sortedness=False,
        )
        .filter(pl.col("start_ns") <= pl.col("made_ns"))
        .with_columns((pl.col("graph_node_id") // 2**32).alias("exec"))
        # An instantiation that makes several graphs makes the executable one last.
        .filter(pl.col("exec") == pl.col("exec").max().over("row"))
        .group_by("row", "exec")
        .agg(pl.col("graph_node_id").n_unique().alias("nodes"))
    )
    return made.with_columns(sites(trace, made)).join(
        nodes, on="row", how="left", validate="1:1", maintain_order="left"
    )


def _uses(trace: Trace, pid: int) -> pl.DataFrame:
    """Launched executable graphs: exec, first_ns (issue), launches; by first_ns."""
    key = ["pid", "correlation_id"]
    nodes = trace.gpu_ops.filter(pl.col("graph_node_id").is_not_null())
    launched = pl.concat(
        [
            nodes.select(*key, (pl.col("graph_node_id") // 2**32).alias("exec")),
            trace.graph_traces.select(*key, pl.col("graph_exec_id").alias("exec")),
        ]
    ).filter((pl.col("pid") == pid) & pl.col("exec").is_not_null())
    return (
        launched.unique()
        .join(trace.launches.select(*key, "start_ns"), on=key, how="inner")
        .group_by("exec")
        .agg(
            pl.col("start_ns").min().alias("first_ns"),
            pl.len().cast(pl.Int64).alias("launches"),
        )
        .sort("first_ns")
    )


def _with_launches(made: pl.DataFrame, uses: pl.DataFrame) -> pl.DataFrame:
    """How often the graph was launched that came into use before the next was made."""
    if not made["exec"].null_count():
        uses = uses.join(made.select("exec"), on="exec", how="semi")
    first = column(uses, "first_ns")
    made_by = np.searchsorted(column(made, "start_ns"), first, side="right") - 1
    launches = np.zeros(made.height, dtype=np.int64)
    launches[made_by[made_by >= 0]] = column(uses, "launches")[made_by >= 0]
    return made.with_columns(pl.Series("launches", launches))


def _destroyed(
    calls: pl.DataFrame, made: pl.DataFrame, churn: pl.DataFrame
) -> pl.DataFrame:
    """Calls that destroy an executable graph right after one of these was made."""
    return (
        calls.filter(pl.col("kind") == "graph exec destroy")
        .join_asof(
            made.select("start_ns", "row"), on="start_ns", check_sortedness=False
        )
        .join(churn.select("row"), on="row", how="semi")
    )


def _first_launches(
    calls: pl.DataFrame, made: pl.DataFrame, uses: pl.DataFrame
) -> pl.DataFrame:
    """The first launch of each of these executable graphs."""
    first = made.sort("start_ns").join_asof(
        uses.select("first_ns"),
        left_on="start_ns",
        right_on="first_ns",
        strategy="forward",
        check_sortedness=False,
    )
    return calls.filter(
        (pl.col("kind") == "graph launch")
        & pl.col("start_ns").is_in(first["first_ns"].drop_nulls().implode())
    )


def _finding(trace: Trace, region: Region, calls: _Churn, failed: int) -> Finding:
    made, destroyed = calls.made, calls.destroyed
    change = _kept(trace, calls)
    cost = price_untraced(
        trace,
        region,
        [
            *untraced(trace, region.pid, uploading=calls.first),
            _made_anew(trace, calls),
        ],
        change,
        "an update for every instantiation, no upload, nothing destroyed",
        direct=_cost(made, destroyed, region),
    )
    sizes = made["nodes"].unique()
    known = not sizes.null_count()
    of_nodes = f" of {sizes[0]} nodes" if known and len(sizes) == 1 else ""
    after = f", after {failed} failed updates" if failed else ""
    ops = trace.gpu_ops.filter(
        (pl.col("pid") == region.pid)
        & (pl.col("graph_node_id") // 2**32).is_in(made["exec"].drop_nulls().implode())
    )
    longest = made.sort(
        made["end_ns"] - made["start_ns"], descending=True, maintain_order=True
    ).head(5)
    if not known:
        confidence = Confidence.LOW
    elif 2 * destroyed.height >= made.height:
        confidence = Confidence.HIGH
    else:
        confidence = Confidence.MEDIUM
    return Finding(
        message=f"a graph{of_nodes} is instantiated {made.height} times for "
        f"{made['launches'].sum()} launches{after}",
        severity=severity_of(cost),
        confidence=confidence,
        cost=cost,
        where=locate(trace, calls=made, ops=ops),
        occurrences=made.height,
        evidence=tuple(
            Evidence(start, end, name, correlation_id)
            for start, end, name, correlation_id in longest.select(
                "start_ns", "end_ns", "name", "correlation_id"
            ).iter_rows()
        ),
        fix=_FIX_FAILED if failed >= MIN_INSTANTIATIONS else _FIX,
        identity=("instantiated", made["site"][0] or "", *sorted(set(ops["name"]))[:8]),
        change=change,
    )


def _made_anew(trace: Trace, calls: _Churn) -> Change:
    """The calls as they are, with the times that they take without recording."""
    launch = GRAPH_LAUNCH_NS + UPLOAD_NS
    made, destroyed = (
        _unrecorded(trace, calls.made),
        _unrecorded(trace, calls.destroyed),
    )
    return _with_durations(trace, calls, made, destroyed, launch)


def _kept(trace: Trace, calls: _Churn) -> Change:
    """One executable graph is kept and updated; times as without recording."""
    guessed = _unrecorded(trace, calls.made) // INSTANTIATE_NODE_NS
    nodes = np.where(
        calls.made["nodes"].is_null().to_numpy(),
        guessed,
        calls.made["nodes"].fill_null(0).to_numpy(),
    )
    none = np.zeros(calls.destroyed.height, dtype=np.int64)
    return _with_durations(trace, calls, UPDATE_NODE_NS * nodes, none, GRAPH_LAUNCH_NS)


def _unrecorded(trace: Trace, calls: pl.DataFrame) -> Int64:
    """How long these calls take when nothing records them."""
    factor = INSTANTIATE_FACTOR.get(trace.capture.graph_mode or "", 1.0)
    recorded = column(calls, "end_ns") - column(calls, "start_ns")
    shorter: Int64 = np.rint(recorded / factor).astype(np.int64)
    return shorter


def _with_durations(
    trace: Trace, calls: _Churn, made: Int64, destroyed: Int64, launch_ns: int
) -> Change:
    replay = replay_of(trace)
    every = (calls.made, calls.destroyed, calls.first)
    index = np.concatenate([replay.calls_of(some) for some in every])
    first = np.full(calls.first.height, launch_ns)
    to_ns = np.concatenate([made, destroyed, first])
    return shortened(
        replay, index, np.minimum(replay.graph.call_duration[index], to_ns)
    )


def _cost(made: pl.DataFrame, destroyed: pl.DataFrame, region: Region) -> Cost:
    """Host time of the calls, which a kept executable graph doesn't need."""
    spent = sum(
        int((column(calls, "end_ns") - column(calls, "start_ns")).sum())
        for calls in (made, destroyed)
    )
    return price(
        Claim.DIRECT,
        spent,
        region,
        f"host time of {made.height} instantiations and of destroying "
        f"{destroyed.height} of the graphs",
    )


_FIX = (
    "keep the executable graph: launch it again where nothing changed, else update it "
    "with cudaGraphExecUpdate or cudaGraphExecKernelNodeSetParams; launches of one "
    "executable graph wait for each other"
)
_FIX_FAILED = (
    "make the updates succeed: see the result of cudaGraphExecUpdate and keep the "
    "same nodes and edges in the same order (change parameters, not topology), or "
    "keep one executable graph for each topology; launches of one executable graph "
    "wait for each other"
)

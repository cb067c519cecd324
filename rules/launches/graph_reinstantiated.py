"""Rule graph-reinstantiated."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.changes import Change
from streamlint.completeness import graphs_unknown
from streamlint.cost import price, severity_of
from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding, NotAssessed
from streamlint.intervals import Int64
from streamlint.replay import replay_of, replayed
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.steady import Region, column, groups, regions
from streamlint.trace.model import Trace
from streamlint.untraced import (
    GRAPH_LAUNCH_NS,
    UPLOAD_NODE_NS,
    price_untraced,
    shortened,
    untraced,
)
from streamlint.where import locate, sites

MIN_INSTANTIATIONS = Threshold(
    "min-instantiations",
    3,
    "instantiations",
    "Fewer are start-up (rule catalogue).",
)
MAX_LAUNCHES = Threshold(
    "max-launches",
    2,
    "launches of one executable graph",
    "An executable graph that is launched more often is worth its instantiation.",
)
INSTANTIATE_ADDED_NS = 2_600
"""What recording by node adds to an instantiation, a node (H200).

50 nodes in a loop took 205 us recorded and 73 unrecorded, the first time 547 and 444.
"""
INSTANTIATE_FACTOR = 1.8
"""How much longer one recorded as a whole takes: 864, not 488 us, the first time."""
INSTANTIATE_NODE_NS = 1_200
"""Of an unrecorded one, a node: 11, 73 and 185 us for 10, 50 and 200 (H200)."""
DESTROY_FACTOR = 1.4
"""How much longer destroying takes recorded: 30 and 21 us for 50 nodes (H200)."""
CERTAIN = 2 / 3
"""Medians of one program's instantiations unprofiled, by process: 3.2 to 4.9 ms."""
UPDATE_NODE_NS = 50
"""Of an unrecorded cudaGraphExecUpdate, a node: 0.4, 2 and 7 us (H200)."""


@rule(needs=("runtime_calls",))
def graph_reinstantiated(trace: Trace) -> Outcome:
    """A CUDA graph is instantiated again instead of updated or launched again.

    What it does
        Finds at least three executable graphs of one shape that are instantiated,
        launched once or twice, and given up for the next one.
    Why it costs time
        Unrecorded on an H200, an instantiation takes 1 to 1.5 us a node (8 to 10 the
        first time), the first launch after it 1.1 us a node more for the upload and
        destroying it 0.4; cudaGraphExecUpdate takes 0.04 us a node, without upload.
    Evidence
        Graph launches between one instantiation and the next, counted by
        executable graph over the whole process. Graphs with the same number of
        nodes have one shape; where nodes were not recorded (graph mode) that is
        assumed and the confidence is low. The cost is a lower bound for the
        unprofiled run, replayed with an update for each instantiation, no upload and
        nothing destroyed, all with the times that these calls take unrecorded. Those
        are of one machine, and a run can differ by a third from the next, which the
        bound leaves out. Recording makes an update up to 80 times as long, so two
        recordings differ by less.
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
    unable: NotAssessed | None = None
    if "graph instantiate" not in trace.call_kinds:
        return findings
    for region in regions(trace).values():
        made = _instantiations(trace, region.pid)
        if made.height < trace.limit(MIN_INSTANTIATIONS):
            continue
        made = _with_nodes(trace, region.pid, made)
        of_process = trace.runtime_calls.filter(region.holds() & ~pl.col("nested"))
        updates = of_process.filter(pl.col("kind") == "graph update")["return_value"]
        failed = int((updates != 0).sum())
        uses = _uses(trace, region.pid)
        unable = unable or graphs_unknown(trace)
        # A failed update tells that the program meant the same graph.
        shape = (
            ["site"] if failed >= trace.limit(MIN_INSTANTIATIONS) else ["site", "nodes"]
        )
        for _, here in groups(made, *shape):
            judged = _with_launches(here, uses).filter(region.holds())
            churn = judged.filter(
                pl.col("launches").is_between(1, trace.limit(MAX_LAUNCHES))
            )
            if churn.height < max(trace.limit(MIN_INSTANTIATIONS), judged.height / 2):
                continue
            if churn.height > updates.len() - failed:
                destroyed = _destroyed(of_process, made, churn)
                nodes = _nodes(churn)
                first = _first_launches(of_process, churn, nodes, uses)
                calls = _Churn(churn, nodes, destroyed, first)
                findings.append(_finding(trace, region, calls, failed))
    return findings or unable or []


class _Churn(NamedTuple):
    """Calls that a kept executable graph doesn't need, or not for so long.

    ``made`` are the instantiations, of graphs of ``nodes``, and ``first`` the first
    launches after them, with upload_ns.
    """

    made: pl.DataFrame
    nodes: Int64
    destroyed: pl.DataFrame
    first: pl.DataFrame


def _instantiations(trace: Trace, pid: int) -> pl.DataFrame:
    """Columns of `runtime_calls`, row."""
    return trace.runtime_calls.filter(
        (pl.col("pid") == pid)
        & (pl.col("kind") == "graph instantiate")
        & ~pl.col("nested")
        & (pl.col("return_value").fill_null(0) == 0)
    ).with_row_index("row")


def _with_nodes(trace: Trace, pid: int, made: pl.DataFrame) -> pl.DataFrame:
    """The instantiations with site; nodes and exec, null if not recorded."""
    nodes = (
        # The driver adds a node of its own, which is no copy of one of the graph.
        trace.graph_nodes.filter(
            (pl.col("pid") == pid) & pl.col("original_graph_node_id").is_not_null()
        )
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
            trace.graph_traces.select(
                *key, pl.col("graph_exec_id").cast(pl.Int64).alias("exec")
            ),
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
    return made.with_columns(as_series(launches, "launches"))


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


def _nodes(made: pl.DataFrame) -> Int64:
    """How many nodes each graph has; a guess where they are not recorded."""
    guess = _duration(made) / (INSTANTIATE_FACTOR * INSTANTIATE_NODE_NS)
    unknown = made["nodes"].is_null().to_numpy()
    known = column(made.with_columns(pl.col("nodes").fill_null(0)), "nodes")
    return np.where(unknown, guess.astype(np.int64), known)


def _first_launches(
    calls: pl.DataFrame, made: pl.DataFrame, nodes: Int64, uses: pl.DataFrame
) -> pl.DataFrame:
    """The first launch of each of these executable graphs: + upload_ns."""
    first = (
        made.select("start_ns", as_series(UPLOAD_NODE_NS * nodes, "upload_ns"))
        .sort("start_ns")
        .join_asof(
            uses.select("first_ns"),
            left_on="start_ns",
            right_on="first_ns",
            strategy="forward",
            check_sortedness=False,
        )
        .select(pl.col("first_ns").alias("start_ns"), "upload_ns")
        .drop_nulls()
        .unique("start_ns", keep="last")
    )
    launches = calls.filter(pl.col("kind") == "graph launch")
    return launches.join(first, on="start_ns", how="inner", maintain_order="left")


def _finding(trace: Trace, region: Region, calls: _Churn, failed: int) -> Finding:
    made, destroyed = calls.made, calls.destroyed
    changes = replayed(_changes, trace, region.pid, calls)
    cost = price_untraced(
        trace,
        region,
        changes,
        "an update for every instantiation, no upload, nothing destroyed, less a "
        "third by which such calls differ between processes",
        direct=_cost(made, destroyed, region),
        certain=CERTAIN,
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
    given_up = 2 * destroyed.height >= made.height
    return Finding(
        message=f"a graph{of_nodes} is instantiated {made.height} times for "
        f"{made['launches'].sum()} launches{after}",
        severity=severity_of(cost),
        confidence=Confidence.MEDIUM if known and given_up else Confidence.LOW,
        cost=cost,
        where=locate(trace, calls=made, ops=ops),
        occurrences=made.height,
        evidence=tuple(
            Evidence(start, end, name, correlation_id)
            for start, end, name, correlation_id in longest.select(
                "start_ns", "end_ns", "name", "correlation_id"
            ).iter_rows()
        ),
        fix=_FIX_FAILED if failed >= trace.limit(MIN_INSTANTIATIONS) else _FIX,
        identity=(
            "instantiated",
            made["site"][0] or "",
            *sorted(ops["name"].unique())[:8],
        ),
        change=changes and changes[1],
    )


def _changes(trace: Trace, pid: int, calls: _Churn) -> tuple[list[Change], Change]:
    """What takes out what recording adds, and what keeps the graph."""
    without = untraced(trace, pid, uploading=calls.first)
    return [*without, _made_anew(trace, calls)], _kept(trace, calls)


def _made_anew(trace: Trace, calls: _Churn) -> Change:
    """The calls as they are, with the times that they take without recording."""
    recorded = _duration(calls.made)
    by_node = np.maximum(
        recorded - INSTANTIATE_ADDED_NS * calls.nodes,
        np.minimum(recorded, INSTANTIATE_NODE_NS * calls.nodes),
    )
    as_a_whole = np.rint(recorded / INSTANTIATE_FACTOR).astype(np.int64)
    made = np.where(calls.made["nodes"].is_null().to_numpy(), as_a_whole, by_node)
    destroyed = np.rint(_duration(calls.destroyed) / DESTROY_FACTOR).astype(np.int64)
    launch = GRAPH_LAUNCH_NS + column(calls.first, "upload_ns")
    return _with_durations(trace, calls, made, destroyed, launch)


def _kept(trace: Trace, calls: _Churn) -> Change:
    """One executable graph is kept and updated; times as without recording."""
    none = np.zeros(calls.destroyed.height, dtype=np.int64)
    launch = np.full(calls.first.height, GRAPH_LAUNCH_NS)
    return _with_durations(trace, calls, UPDATE_NODE_NS * calls.nodes, none, launch)


def _duration(calls: pl.DataFrame) -> Int64:
    """How long these calls took, as recorded."""
    return column(calls, "end_ns") - column(calls, "start_ns")


def _with_durations(
    trace: Trace, calls: _Churn, made: Int64, destroyed: Int64, launch: Int64
) -> Change:
    replay = replay_of(trace)
    every = (calls.made, calls.destroyed, calls.first)
    index = np.concatenate([replay.calls_of(some) for some in every])
    to_ns = np.concatenate([made, destroyed, launch])
    return shortened(
        replay, index, np.minimum(replay.graph.call_duration[index], to_ns)
    )


def _cost(made: pl.DataFrame, destroyed: pl.DataFrame, region: Region) -> Cost:
    """Host time of the calls, which a kept executable graph doesn't need."""
    spent = sum(int(_duration(calls).sum()) for calls in (made, destroyed))
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

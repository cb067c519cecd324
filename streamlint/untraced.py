"""What recording adds to calls, and prices without it.

Recording makes launches longer, and calls about graphs many times longer, so a trace
overstates what they cost. Measured on an H200 with and without nsys 2025.3, in loops
of graphs of 10, 50 and 200 kernels; the first of a kind takes up to six times as long.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from streamlint.changes import Change
from streamlint.cost import trusted, unreplayed
from streamlint.findings import UNPROFILED, Claim, Cost
from streamlint.intervals import Int64, union
from streamlint.replay import Replay, replay_of
from streamlint.steady import Region, column, groups, of_process
from streamlint.trace.model import Trace

LAUNCH_ADDED_NS = 1_900
"""What recording adds to a kernel launch."""
GRAPH_LAUNCH_NS = 3_000
"""An untraced launch of a graph that was launched before (1.3 to 6.3 us)."""
UPLOAD_NODE_NS = 1_100
"""What its first launch takes more, a node (12, 55 and 235 us)."""
UPDATE_FACTOR = {"node": 80.0, "graph": 2.4}
"""How much longer a recorded cudaGraphExecUpdate takes, by graph mode.

By node 163 to 188 us for 50 nodes, unrecorded 1.7 to 2.3; as a whole 23 instead of
9.6 us, the first time only.
"""


def shortened(replay: Replay, calls: Int64, to_ns: Int64) -> Change:
    """These calls take at most so long, and their operations come earlier by it."""
    graph = replay.graph
    cut = np.zeros(len(graph.call_duration), dtype=np.int64)
    cut[calls] = (graph.call_duration[calls] - to_ns).clip(0)
    ops = replay.ops_issued_by(np.flatnonzero(cut))
    issue = (graph.issue_latency[ops] - cut[graph.issue_call[ops]]).clip(0)
    return Change(call_duration=(calls, to_ns), issue_latency=(ops, issue))


def untraced(
    trace: Trace, pid: int, *, uploading: pl.DataFrame | None = None
) -> list[Change]:
    """Launches of a process, and all its host time, without what recording adds.

    ``uploading`` are launches of graphs that take ``upload_ns`` more for the upload.
    """
    replay = replay_of(trace)
    launches = _launches(trace, replay, pid, uploading)
    return [launches, *_without_profiler(trace, replay, pid)]


def _launches(
    trace: Trace, replay: Replay, pid: int, uploading: pl.DataFrame | None
) -> Change:
    graph = replay.graph
    key = ["pid", "tid", "start_ns"]
    chosen = graph.calls.filter(
        (pl.col("pid") == pid)
        & pl.col("kind").is_in(("kernel launch", "graph launch", "graph update"))
    ).with_columns(pl.lit(0).alias("upload_ns"))
    if uploading is not None:
        chosen = chosen.drop("upload_ns").join(
            uploading.select(*key, "upload_ns").unique(key),
            on=key,
            how="left",
            validate="1:1",
            maintain_order="left",
        )
    index = column(chosen, "call_index")
    launch = GRAPH_LAUNCH_NS + column(chosen.fill_null(0), "upload_ns")
    duration = graph.call_duration[index]
    factor = UPDATE_FACTOR.get(trace.capture.graph_mode or "", 1.0)
    to_ns = np.where(
        (chosen["kind"] == "graph launch").to_numpy(),
        np.minimum(duration, launch),
        np.where(
            (chosen["kind"] == "graph update").to_numpy(),
            np.rint(duration / factor).astype(np.int64),
            (duration - LAUNCH_ADDED_NS).clip(0),
        ),
    )
    return shortened(replay, index, to_ns)


def _without_profiler(trace: Trace, replay: Replay, pid: int) -> list[Change]:
    """Host time less what the profiler took of it, in its own words."""
    graph = replay.graph
    rows = of_process(trace.profiler_overhead, pid)
    made = dict(groups(of_process(graph.calls, pid), "tid")) if rows.height else {}
    changes: list[Change] = []
    for tid, overhead in groups(rows, "tid"):
        if tid not in made:
            continue
        index = column(made[tid], "call_index")
        busy = union(column(overhead, "start_ns"), column(overhead, "end_ns"))
        start, end = graph.call_first[index], graph.call_end[index]
        within = graph.call_duration[index] - busy.overlap_ns(start, end)
        think = graph.think_ns[index]
        before = think - busy.overlap_ns(start - think, start)
        changes.append(
            Change(call_duration=(index, within.clip(0)), think=(index, before))
        )
    return changes


def price_untraced(
    trace: Trace,
    region: Region,
    changes: tuple[list[Change], Change] | None,
    method: str,
    *,
    direct: Cost,
    certain: float = 1.0,
) -> Cost:
    """What a change saves in the run as it is when nothing records it.

    ``changes`` are those that take out what recording adds, and the one that is priced;
    the share is of the region without the former.
    A what-if, or with ``certain`` below 1 a lower bound of that part of it.
    ``direct``, where the replay can't tell, is of the recorded run.
    """
    if changes is None:
        return unreplayed(direct)
    replay = replay_of(trace)
    if not trusted(replay.error):
        return unreplayed(direct, replay.error)
    tracing, change = changes
    before = replay.saving_ns(replay.run(tracing), region)
    after = replay.saving_ns(replay.run([*tracing, change]), region)
    saving = max(0, round(certain * (after - before)))
    share = min(1.0, saving / max(1, region.duration_ns - before))
    method = f"replay of the run, untraced: {method}"
    claim = Claim.WHAT_IF if certain == 1.0 else Claim.LOWER_BOUND
    return Cost(claim, saving, share, method, UNPROFILED)

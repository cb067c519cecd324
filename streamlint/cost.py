"""Prices findings: the one home of claims, shares and severities.

A cost is what the replay says a fix would save, if the replay's own error allows;
otherwise what the trace shows directly. A share is a part of the judged region of
the process (`streamlint.steady`), not of the whole capture: start-up would make a
real fault look small.
"""

from __future__ import annotations

import polars as pl

from streamlint.changes import Change
from streamlint.findings import Claim, Cost, Severity
from streamlint.replay import Replay, replay_of
from streamlint.steady import Region
from streamlint.trace.model import Trace

MIN_SAVING_NS = 50_000
"""Savings below this are within the noise of a capture (rule catalogue)."""
MIN_SHARE = 0.01
"""Savings below 1 % of the judged region are within the error of the estimate."""
HIGH_SHARE, MEDIUM_SHARE = 0.10, 0.02
MAX_MODEL_ERROR = 0.10
"""A replay that is off by more than this says nothing about savings."""


def price(claim: Claim, ns: int, region: Region, method: str) -> Cost:
    """A cost of ``ns`` nanoseconds out of ``region``."""
    return Cost(claim, ns, min(1.0, ns / max(1, region.duration_ns)), method)


def price_change(
    trace: Trace,
    region: Region,
    change: Change,
    claim: Claim,
    method: str,
    *,
    direct: Cost,
) -> Cost:
    """What the replay saves with ``change`` made, or ``direct`` where it can't tell.

    Bounds carry the replay's own error: an upper bound is raised and a lower bound
    lowered by it, in proportion to the saving. Where the replay can't know which
    kernels fit on the GPU together, a what-if is an upper bound.
    """
    replay = replay_of(trace)
    if not trusted(replay):
        off = f"the replay is off by {100 * abs(replay.error):.0f} %"
        return Cost(
            direct.claim, direct.ns, direct.share, f"{off}, so: {direct.method}"
        )
    if claim is Claim.WHAT_IF and trace.derived(_overlap_unknown):
        claim = Claim.UPPER_BOUND
    saving = max(0, replay.saving_ns(replay.run([change]), region))
    margin = 2 * abs(replay.error) * saving
    if claim is Claim.UPPER_BOUND:
        saving += round(margin)
    elif claim is Claim.LOWER_BOUND:
        saving = max(0, round(saving - margin))
    return price(claim, saving, region, f"replay of the run: {method}")


def _overlap_unknown(trace: Trace) -> bool:
    """Whether kernels of unknown size run on several streams."""
    kernels = trace.gpu_ops.filter(pl.col("kind") == "kernel")
    streams = kernels.select(pl.struct("pid", "stream_id").n_unique()).item()
    return streams > 1 and kernels["sm_fraction"].null_count() > 0


def trusted(replay: Replay) -> bool:
    """Whether the replay reproduces the trace well enough to predict from."""
    return abs(replay.error) <= MAX_MODEL_ERROR


def severity_of(cost: Cost) -> Severity:
    """Severity by share; info where the cost is too small to act on."""
    if cost.ns is None or cost.share is None:
        return Severity.INFO
    if cost.ns < MIN_SAVING_NS or cost.share < MIN_SHARE:
        return Severity.INFO
    if cost.share >= HIGH_SHARE:
        return Severity.HIGH
    return Severity.MEDIUM if cost.share >= MEDIUM_SHARE else Severity.LOW

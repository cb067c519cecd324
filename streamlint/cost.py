"""Prices findings: the one home of claims, shares and severities.

A cost is what the replay says a fix would save, if there is one and its own error
allows; otherwise what the trace shows directly. A share is a part of the judged
region of the process (`streamlint.steady`), not of the whole capture: start-up would
make a real fault look small.
"""

from __future__ import annotations

import polars as pl

from streamlint.changes import Change
from streamlint.findings import Claim, Cost, Severity
from streamlint.replay import replay_of
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
    change: Change | None,
    claim: Claim,
    method: str,
    *,
    direct: Cost,
) -> Cost:
    """What the replay saves with ``change`` made, or ``direct`` where it can't tell.

    It can't without a change (see `replayed`), nor where it is off by too much.

    Bounds carry the replay's own error: an upper bound is raised and a lower bound
    lowered by it, in proportion to the saving. Where the replay can't know which
    kernels fit on the GPU together, a what-if is an upper bound.
    """
    if change is None:
        return unreplayed(direct)
    replay = replay_of(trace)
    if not trusted(replay.error):
        return unreplayed(direct, replay.error)
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
    is_kernel = pl.col("kind") == "kernel"
    kernels = trace.gpu_ops.select("pid", "stream_id", "kind", "sm_fraction")
    if not kernels.select((is_kernel & pl.col("sm_fraction").is_null()).any()).item():
        return False
    return kernels.filter(is_kernel).select("pid", "stream_id").n_unique() > 1


def trusted(error: float) -> bool:
    """Whether a replay that is off by so much predicts well enough."""
    return abs(error) <= MAX_MODEL_ERROR


def unreplayed(direct: Cost, error: float | None = None) -> Cost:
    """``direct``, with why it isn't the replay's: its error, or that there is none."""
    why = "not replayed"
    if error is not None:
        why = f"the replay is off by {100 * abs(error):.0f} %"
    return direct._replace(method=f"{why}, so: {direct.method}")


def severity_of(cost: Cost) -> Severity:
    """Severity by share; info where the cost is too small to act on."""
    if cost.ns is None or cost.share is None:
        return Severity.INFO
    if cost.ns < MIN_SAVING_NS or cost.share < MIN_SHARE:
        return Severity.INFO
    if cost.share >= HIGH_SHARE:
        return Severity.HIGH
    return Severity.MEDIUM if cost.share >= MEDIUM_SHARE else Severity.LOW

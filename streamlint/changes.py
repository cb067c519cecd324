"""What a fix would alter in a run, as the replay understands it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamlint.intervals import Int64

_NONE = np.empty(0, dtype=np.int64)
_PAIR = (_NONE, _NONE)


class Change(NamedTuple):
    """Indexes into a `streamlint.replay.Graph`, and new values in ns.

    ``drop`` are constraints that no longer hold. The others are (index, value):
    durations of operations and of calls, host time before calls, and latencies of
    constraints.
    """

    drop: Int64 = _NONE
    op_duration: tuple[Int64, Int64] = _PAIR
    call_duration: tuple[Int64, Int64] = _PAIR
    think: tuple[Int64, Int64] = _PAIR
    latency: tuple[Int64, Int64] = _PAIR
    issue_latency: tuple[Int64, Int64] = _PAIR

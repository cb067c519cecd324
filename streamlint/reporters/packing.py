"""Packs lanes for a page: exact, some four bytes an interval, quick to unpack.

Differences of starts, durations, detail numbers and correlation differences, each
column split into byte planes, all of a lane deflated together. A replayed lane is
what moved against the recorded one. Of a large trace a lane holds the parts near
findings, and the exact busy time of every bin.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from streamlint.intervals import Bools, Int64, union
from streamlint.reporters.lanes import KINDS, PARTS, U32, Details, Lane

MAX_WINDOWED = 1_500_000
"""Intervals around findings that a page of a larger trace holds."""
BINS = 4_096
"""Bins of the overview of a lane that isn't held in full; a wide screen's pixels."""


class Packer:
    """Packs lanes against one origin and remembers how much it kept."""

    def __init__(self, first: int, last: int) -> None:
        """Times reach from ``first`` to ``last``, in ns."""
        span = last - first
        bins = max(BINS, -(-span // 2**31))
        self.first = first
        self.bin_ns = max(1, -(-span // bins))
        self.bins = -(-span // self.bin_ns)
        self.detailed: Bools | None = None
        self.blobs: list[str] = []
        self.held = 0

    def keep(self, windows: Iterable[tuple[int, int]], lanes: Sequence[Lane]) -> None:
        """Hold only the intervals in the bins of ``windows``, as far as they fit."""
        detailed = np.zeros(self.bins, dtype=np.bool_)
        kept = 0
        edges = self.first + self.bin_ns * np.arange(self.bins + 1)
        per_bin = np.zeros(self.bins, dtype=np.int64)
        for lane in lanes:
            per_bin += np.diff(np.searchsorted(lane.starts, edges))
        for first, last in windows:
            low = max(0, (first - self.first) // self.bin_ns)
            high = min(self.bins, -(-(last - self.first) // self.bin_ns))
            new = ~detailed[low:high]
            cost = int(per_bin[low:high][new].sum())
            if kept + cost <= MAX_WINDOWED:
                kept += cost
                detailed[low:high] = True
        self.detailed = detailed

    def detailed_ranges(self) -> list[list[int]] | None:
        """First and past-the-last bin of every part held in full; None for all."""
        if self.detailed is None:
            return None
        steps = np.diff(np.concatenate([[0], self.detailed.astype(np.int8), [0]]))
        firsts, lasts = np.flatnonzero(steps > 0), np.flatnonzero(steps < 0)
        return [
            list(pair) for pair in zip(firsts.tolist(), lasts.tolist(), strict=True)
        ]

    def _about(self, lane: Lane) -> dict[str, Any]:
        return {
            "group": lane.group,
            "heading": lane.heading,
            "label": lane.label,
            "pid": lane.pid,
            "kind": KINDS.index(lane.kind),
            "depth": lane.depth,
            "merged": lane.merged,
            "all": len(lane.starts),
        }

    def lane(self, lane: Lane, *, overview: bool = False) -> dict[str, Any]:
        """The lane as JSON; its intervals become a blob.

        With ``overview`` its intervals are left out even where there is room.
        """
        packed = self._about(lane)
        columns: list[tuple[str, Int64]] = []
        chosen = np.arange(len(lane.starts))
        if self.detailed is not None or overview:
            edges = self.first + self.bin_ns * np.arange(self.bins + 1)
            covered = union(lane.starts, lane.ends)
            busy = covered.overlap_ns(edges[:-1], edges[1:])
            columns.append(("bins", busy))
            chosen = np.flatnonzero(self._inside(lane, edges, overview=overview))
        starts, ends = lane.starts[chosen], lane.ends[chosen]
        wide = bool(len(lane.code)) and int(lane.code.max()) >= 2**16
        delta = np.diff(starts, prepend=self.first)
        columns += [("starts", delta), ("durations", ends - starts)]
        columns.append(("codes4" if wide else "codes2", lane.code[chosen]))
        if lane.correlation is not None:
            step = np.diff(lane.correlation[chosen], prepend=0)
            columns.append(("correlations", _zigzag(step)))
        self.held += len(starts)
        packed["n"] = len(starts)
        packed["blob"], packed["columns"], packed["over"] = self._blob(columns)
        return packed

    def moved(
        self, lane: Lane, recorded: Lane, number: int, *, overview: bool
    ) -> dict[str, Any]:
        """A replayed lane; as its moves where it has the recorded one's order."""
        ordered = (
            lane.rows is not None
            and recorded.rows is not None
            and not overview
            and self.detailed is None
            and bool((np.diff(lane.rows) > 0).all())
            and bool(np.isin(lane.rows, recorded.rows).all())
        )
        if not ordered or lane.rows is None or recorded.rows is None:
            return {"of": number, **self.lane(lane, overview=overview)}
        kept = np.isin(recorded.rows, lane.rows)
        moves = lane.starts - recorded.starts[kept]
        grown = (lane.ends - lane.starts) - (recorded.ends - recorded.starts)[kept]
        columns = [
            ("kept2", kept.astype(np.int64)),
            ("moves", _zigzag(np.diff(moves, prepend=0))),
            ("grown", _zigzag(grown)),
        ]
        blob, names, over = self._blob(columns)
        self.held += len(lane.starts)
        return {
            **self._about(lane),
            "of": number,
            "n": len(lane.starts),
            "blob": blob,
            "columns": names,
            "over": over,
        }

    def _inside(self, lane: Lane, edges: Int64, *, overview: bool) -> Bools:
        if self.detailed is None or overview:
            return np.zeros(len(lane.starts), dtype=np.bool_)
        count = np.concatenate([[0], np.cumsum(self.detailed)])
        low = np.searchsorted(edges, lane.starts, side="right") - 1
        high = np.searchsorted(edges, lane.ends, side="left")
        low = low.clip(0, self.bins - 1)
        high = np.maximum(high, low + 1).clip(0, self.bins)
        inside: Bools = count[high] > count[low]
        return inside

    def details(self, details: Details) -> dict[str, Any]:
        """The table of details as JSON and a blob."""
        parts = np.array(details.parts, dtype=np.int64).reshape(-1, PARTS).T
        columns = [("codes4", np.array(details.name_ids, dtype=np.int64))]
        columns += [("codes2", np.array(details.kinds, dtype=np.int64))]
        columns += [("codes4", part) for part in parts]
        blob, names, over = self._blob(columns)
        return {
            "n": len(details.kinds),
            "names": list(details.names),
            "blob": blob,
            "columns": names,
            "over": over,
        }

    def _blob(
        self, columns: Sequence[tuple[str, Int64]]
    ) -> tuple[int, list[str], list[list[list[int]]]]:
        """One blob of several columns; values over 32 bits go into a list."""
        planes: list[bytes] = []
        over: list[list[list[int]]] = []
        for name, values in columns:
            large = np.flatnonzero(values >= U32)
            over.append([[int(i), int(values[i] // U32)] for i in large])
            width = 2 if name.endswith("2") else 4
            raw = (values % U32).astype(f"<u{width}").view(np.uint8)
            planes.append(raw.reshape(len(values), width).T.tobytes())
        packed = zlib.compress(b"".join(planes), 6)
        self.blobs.append(base64.b64encode(packed).decode("ascii"))
        return len(self.blobs) - 1, [name for name, _ in columns], over


def _zigzag(values: Int64) -> Int64:
    return np.where(values < 0, -2 * values - 1, 2 * values)

"""Exact algebra on half-open time intervals, in nanoseconds.

An `Intervals` is a set of instants: sorted, disjoint, non-empty, non-touching
half-open pieces ``[start, end)`` held as two int64 arrays of one length. Every
operation is a few numpy passes; nothing loops over intervals in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

_EMPTY: Int64 = np.empty(0, dtype=np.int64)


@dataclass(eq=False, repr=False)
class Intervals:
    """A set of instants; make one with `union`, never by hand."""

    starts: Int64
    ends: Int64

    def __len__(self) -> int:
        """Count the disjoint pieces."""
        return len(self.starts)

    def __eq__(self, other: object) -> bool:
        """Compare as sets of instants."""
        if not isinstance(other, Intervals):
            return NotImplemented
        return np.array_equal(self.starts, other.starts) and np.array_equal(
            self.ends, other.ends
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def total_ns(self) -> int:
        """Length of the set in ns."""
        return int((self.ends - self.starts).sum())

    def __or__(self, other: Intervals) -> Intervals:
        """Instants in either set."""
        return union(
            np.concatenate([self.starts, other.starts]),
            np.concatenate([self.ends, other.ends]),
        )

    def __and__(self, other: Intervals) -> Intervals:
        """Instants in both sets."""
        return _sweep(self, other, need=2)

    def __sub__(self, other: Intervals) -> Intervals:
        """Instants in this set but not in ``other``."""
        if not len(self):
            return self
        return self & other.gaps(int(self.starts[0]), int(self.ends[-1]))

    def gaps(self, start_ns: int, end_ns: int) -> Intervals:
        """Instants of ``[start_ns, end_ns)`` outside this set."""
        if end_ns <= start_ns:
            return Intervals(_EMPTY, _EMPTY)
        starts = np.concatenate([[start_ns], self.ends]).clip(start_ns, end_ns)
        ends = np.concatenate([self.starts, [end_ns]]).clip(start_ns, end_ns)
        keep = ends > starts
        return Intervals(starts[keep], ends[keep])

    def clip(self, start_ns: int, end_ns: int) -> Intervals:
        """Instants of this set inside ``[start_ns, end_ns)``."""
        starts = self.starts.clip(start_ns, end_ns)
        ends = self.ends.clip(start_ns, end_ns)
        keep = ends > starts
        return Intervals(starts[keep], ends[keep])

    def covered_before(self, instants: Int64) -> Int64:
        """How much of the set lies before each instant, in ns (shape kept)."""
        if not len(self):
            return np.zeros(instants.shape, dtype=np.int64)
        done = np.concatenate([[0], np.cumsum(self.ends - self.starts)])
        index = np.searchsorted(self.starts, instants, side="right")
        last_end = np.concatenate([[np.iinfo(np.int64).min], self.ends])[index]
        return done[index] - np.where(index > 0, (last_end - instants).clip(0), 0)

    def overlap_ns(self, starts: Int64, ends: Int64) -> Int64:
        """Length of the set inside each ``[start, end)``, in ns."""
        covered = self.covered_before(ends) - self.covered_before(starts)
        return np.where(ends > starts, covered, 0)


def union(starts: Int64, ends: Int64) -> Intervals:
    """Set of all instants in any ``[start, end)``; order and overlap are free."""
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return Intervals(_EMPTY, _EMPTY)
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return Intervals(starts[first], reach[last])


def _sweep(a: Intervals, b: Intervals, *, need: int) -> Intervals:
    points = np.concatenate([a.starts, b.starts, a.ends, b.ends])
    step = np.ones(len(points), dtype=np.int64)
    step[len(a) + len(b) :] = -1
    # At one instant, ends come before starts: the intervals are half-open.
    order = np.lexsort((step, points))
    points, depth = points[order], np.cumsum(step[order])
    inside = depth >= need
    opens = inside & ~np.concatenate([[False], inside[:-1]])
    closes = ~inside & np.concatenate([[False], inside[:-1]])
    return union(points[opens], points[closes])

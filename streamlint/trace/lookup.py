"""Finds rows by pid and correlation id, the key of every call and operation.

Ids almost count upwards: a table of them takes a tenth of the time of hashing two
columns, as a join does.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from streamlint.arrays import as_series, ascending

Rows: TypeAlias = npt.NDArray[np.int32]
Numbers: TypeAlias = npt.NDArray[Any]
_SPREAD = 16
"""A table of so many places for each row is fast to make and to look up."""
_SLICE = 1 << 20
_NONE = np.empty(0, dtype=np.int32)
_FEWER = 4
"""From so many times fewer ids on, the others are sorted out by them first."""


def pid_of(column: str) -> pl.Expr:
    """The pid in a serialized global id of nsys."""
    return ((pl.col(column) // 2**24) % 2**24).cast(pl.Int32).alias("pid")


def first_rows(frame: pl.DataFrame, wanted: pl.DataFrame) -> Rows:
    """For each row of ``wanted`` the first row of ``frame`` with its key, or -1.

    Both have pid and correlation_id. A row without an id is like no other.
    """
    rows, pids, ids = _keyed(frame)
    if len(rows) > _FEWER * wanted.height:
        _, _, wanted_ids = _keyed(wanted)
        some = np.flatnonzero(_among(ids, wanted_ids)) if len(wanted_ids) else _NONE
        rows, pids, ids = rows[some], pids[some], ids[some]
    if not len(rows):
        return np.full(wanted.height, -1, dtype=np.int32)
    first = _First(rows, pids, ids)
    slices = wanted.select("pid", "correlation_id").iter_slices(_SLICE)
    return np.concatenate([_NONE, *map(first.of, slices)])


class _First:
    """The first rows of keys."""

    def __init__(self, rows: Rows, pids: Numbers, ids: Numbers) -> None:
        most = _SPREAD * len(rows)
        self._pids, self._ids = _Ranks(pids, 1), _Ranks(ids, most)
        keys = self._key(pids, ids)
        self._keys = _Ranks(keys, most)
        self._rows = np.full(self._keys.count, -1, dtype=np.int32)
        # Of several the last one that is set stays.
        self._rows[self._keys.of(keys)[::-1]] = rows[::-1]

    def of(self, wanted: pl.DataFrame) -> Rows:
        """For each row of ``wanted`` the first one with its key, or -1."""
        found = np.full(wanted.height, -1, dtype=np.int32)
        rows, pids, ids = _keyed(wanted)
        ranks = self._keys.of(self._key(pids, ids))
        found[rows] = np.where(ranks < 0, -1, self._rows[ranks])
        return found

    def _key(self, pids: Numbers, ids: Numbers) -> Numbers:
        """One number a key, -1 where either is unknown."""
        pids, ids = self._pids.of(pids), self._ids.of(ids)
        keys: Numbers = np.where(
            (pids < 0) | (ids < 0), -1, pids * self._ids.count + ids
        )
        return keys


def _among(ids: Numbers, others: Numbers) -> Numbers:
    """Which of the ids are among these others, far fewer."""
    low, high = int(others.min()), int(others.max())
    if high - low >= _SPREAD * len(ids):
        return np.isin(ids, others)
    there = np.zeros(high - low + 1, dtype=np.bool_)
    there[others - low] = True
    near = (ids >= low) & (ids <= high)
    among: Numbers = near & there[np.where(near, ids, low) - low]
    return among


class _Ranks:
    """Some numbers as those from 0 to below ``count``, alike where they were.

    With holes between them if ``most`` are no more.
    """

    def __init__(self, values: Numbers, most: int) -> None:
        self._low = int(values.min())
        self._each: Numbers | None = None
        self.count = int(values.max()) - self._low + 1
        if self.count > most:
            self._each = ascending(values)
            self.count = len(self._each)

    def of(self, wanted: Numbers) -> Numbers:
        """The ranks of these, -1 for numbers that aren't among them."""
        if self._each is None:
            # What is not among them may be so far away that its difference overflows.
            among = (wanted >= self._low) & (wanted <= self._low + self.count - 1)
            return np.where(among, wanted.astype(np.int64) - self._low, -1)
        at = np.minimum(np.searchsorted(self._each, wanted), self.count - 1)
        return np.where(self._each[at] == wanted, at, -1)


def with_first(frame: pl.DataFrame, others: pl.DataFrame) -> pl.DataFrame:
    """``frame`` with all columns of the first row of ``others`` with its key, or null.

    A left join, in the order of ``frame``.
    """
    rows = first_rows(others, frame)
    row, lacking = as_series(rows), rows < 0
    if lacking.any():
        row = row.set(as_series(lacking), None)
    taken = others.drop("pid", "correlation_id").select(pl.all().gather(row))
    return frame.hstack(taken)


def _keyed(frame: pl.DataFrame) -> tuple[Rows, Numbers, Numbers]:
    """Row number, pid and correlation id of the rows that have both."""
    key = frame.select("pid", "correlation_id")
    row = np.arange(frame.height, dtype=np.int32)
    if any(key[name].null_count() for name in key.columns):
        has_both = key.select(
            pl.all_horizontal(pl.col("pid", "correlation_id").is_not_null())
        ).to_series()
        row, key = row[has_both.to_numpy()], key.filter(has_both)
    return row, key["pid"].to_numpy(), key["correlation_id"].to_numpy()

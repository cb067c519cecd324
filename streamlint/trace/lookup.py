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
_FEWER = 4
"""From so many times fewer ids on, the others are sorted out by them first."""


def first_rows(frame: pl.DataFrame, wanted: pl.DataFrame) -> Rows:
    """For each row of ``wanted`` the first row of ``frame`` with its key, or -1.

    Both have pid and correlation_id. A row without an id is like no other.
    """
    found = np.full(wanted.height, -1, dtype=np.int32)
    rows, pids, ids = _keyed(frame)
    wanted_rows, wanted_pids, wanted_ids = _keyed(wanted)
    if not len(rows) or not len(wanted_rows):
        return found
    if len(rows) > _FEWER * len(wanted_rows):
        some = _among(ids, wanted_ids)
        rows, pids, ids = rows[some], pids[some], ids[some]
    elif len(wanted_rows) > _FEWER * len(rows):
        some = _among(wanted_ids, ids)
        wanted_rows, wanted_pids, wanted_ids = (
            each[some] for each in (wanted_rows, wanted_pids, wanted_ids)
        )
    if not len(rows) or not len(wanted_rows):
        return found
    most = _SPREAD * len(rows)
    pids, wanted_pids, _ = _ranked(pids, wanted_pids, 1)
    ids, wanted_ids, count = _ranked(ids, wanted_ids, most)
    lacking = (wanted_pids < 0) | (wanted_ids < 0)
    keys, wanted_keys = pids * count + ids, wanted_pids * count + wanted_ids
    keys, wanted_keys, count = _ranked(keys, wanted_keys, most)
    first = np.full(count, -1, dtype=np.int32)
    first[keys[::-1]] = rows[::-1]  # of several the last one that is set stays
    lacking |= wanted_keys < 0
    found[wanted_rows] = np.where(lacking, -1, first[wanted_keys])
    return found


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


def _ranked(
    values: Numbers, wanted: Numbers, most: int
) -> tuple[Numbers, Numbers, int]:
    """Both as numbers from 0 to below the third, alike where they were; -1 for others.

    Those of ``values`` may have holes between them if ``most`` are no more.
    """
    low, high = int(values.min()), int(values.max())
    if high - low < most:
        among = (wanted >= low) & (wanted <= high)
        # What is not among them may be so far away that its difference overflows.
        ranks = np.where(among, wanted.astype(np.int64) - low, -1)
        return values.astype(np.int64) - low, ranks, high - low + 1
    each = ascending(values)
    at = np.minimum(np.searchsorted(each, wanted), len(each) - 1)
    ranks = np.where(each[at] == wanted, at, -1)
    return np.searchsorted(each, values), ranks, len(each)


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

"""Arrays as polars series."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import polars as pl

_TYPES: dict[str, type[pl.DataType]] = {
    "bool": pl.Boolean,
    "float64": pl.Float64,
    "int32": pl.Int32,
    "int64": pl.Int64,
}
_FEW = 4096


def as_series(values: npt.NDArray[Any], name: str = "") -> pl.Series:
    """Numbers or truth values; indexes and filters frames too.

    Few go as a list: for the first array, polars imports numpy.ma, which takes 7 ms.
    `numpy.unique` does so too.
    """
    dtype = _TYPES.get(values.dtype.name)
    if dtype is None or values.size >= _FEW:
        return pl.Series(name, values)
    return pl.Series(name, values.tolist(), dtype=dtype)

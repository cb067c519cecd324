"""Arrays become the series that polars makes of them, few values or many."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_series_equal

from streamlint.arrays import as_series


@pytest.mark.parametrize("rows", [0, 1, 5, 9_999])
@pytest.mark.parametrize("kind", [np.int64, np.float64, np.bool_])
def test_an_array_is_the_series_that_polars_makes_of_it(
    rows: int, kind: type[Any]
) -> None:
    values = (np.arange(rows) % 3).astype(kind)
    assert_series_equal(as_series(values, "x"), pl.Series("x", values))


def test_rows_are_taken_by_an_array() -> None:
    frame = pl.DataFrame({"x": [5, 6, 7]})
    assert frame[as_series(np.array([2, 0]))]["x"].to_list() == [7, 5]
    assert frame.filter(as_series(np.array([True, False, True])))["x"][1] == 7

"""Rows found by key, groups and running values, against what polars makes of them."""

from __future__ import annotations

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from streamlint.arrays import NOTHING, ascending, earlier_max
from streamlint.steady import distinct, groups
from streamlint.trace.lookup import first_rows, with_first

SMALL = st.integers(-1, 3)
WIDE = st.integers(-(2**63), 2**63 - 1)
KEYS = st.lists(st.tuples(SMALL | st.none(), SMALL | WIDE | st.none()), max_size=12)
SCHEMA = {"pid": pl.Int64, "correlation_id": pl.Int64}


def frame(keys: list[tuple[int | None, int | None]], name: str) -> pl.DataFrame:
    keyed = pl.DataFrame(keys, schema=SCHEMA, orient="row")
    return keyed.with_columns(pl.int_range(pl.len()).alias(name))


@given(KEYS, KEYS)
@settings(deadline=None)
def test_first_rows_are_those_of_a_join(
    here: list[tuple[int | None, int | None]],
    there: list[tuple[int | None, int | None]],
) -> None:
    wanted, others = frame(here, "row"), frame(there, "other")
    joined = wanted.join(
        others.unique(["pid", "correlation_id"], keep="first"),
        on=["pid", "correlation_id"],
        how="left",
        maintain_order="left",
    )
    assert with_first(wanted, others).equals(joined)
    assert (
        first_rows(others, wanted).tolist() == joined["other"].fill_null(-1).to_list()
    )


@given(st.lists(SMALL | WIDE | st.none()))
@settings(deadline=None)
def test_numbers_come_once_and_in_order(values: list[int | None]) -> None:
    numbers = sorted({value for value in values if value is not None})
    column = pl.DataFrame({"a": values}, schema={"a": pl.Int64})
    assert distinct(column, "a") == numbers
    given_ones = [value for value in values if value is not None]
    assert ascending(np.array(given_ones, dtype=np.int64)).tolist() == numbers


@given(st.lists(st.tuples(SMALL | st.none(), st.sampled_from(["x", "y", None]))))
@settings(deadline=None)
def test_groups_are_those_of_group_by(
    rows: list[tuple[int | None, str | None]],
) -> None:
    schema = {"a": pl.Int64, "b": pl.String}
    table = pl.DataFrame(rows, schema=schema, orient="row").with_row_index("row")
    for by in (("a",), ("b",), ("a", "b")):
        found = [(key, part["row"].to_list()) for key, part in groups(table, *by)]
        expected = table.group_by(by, maintain_order=True)
        assert found == [(key, part["row"].to_list()) for key, part in expected]


@given(st.lists(st.tuples(st.integers(0, 99), SMALL | WIDE | st.none(), SMALL)))
@settings(deadline=None)
def test_earlier_maxima_are_those_of_over(
    rows: list[tuple[int, int | None, int]],
) -> None:
    schema = {"at": pl.Int64, "a": pl.Int64, "b": pl.Int32}
    table = pl.DataFrame(rows, schema=schema, orient="row")
    for by in (("a",), ("b",), ("a", "b")):
        expected = table.select(pl.col("at").cum_max().shift(1).over(by))["at"]
        found = earlier_max(table["at"], *(table[name] for name in by))
        assert found.tolist() == expected.fill_null(NOTHING).to_list()

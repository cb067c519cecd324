"""Opens an nsys parquetdir export: a folder with one parquet file for each table.

nsys 2023.4 and newer write it (`nsys export --type parquetdir`). Tables, columns and
rows are those of a SQLite export of the same report; unsigned numbers are typed as
such there and come out signed, as SQLite has them. Payloads are missing unless the
export was made with --include-json=true.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import polars as pl

from streamlint.arrays import as_series
from streamlint.errors import TraceError
from streamlint.escape import without_home
from streamlint.trace.pages import Chosen
from streamlint.trace.reader import (
    ExportFile,
    Layout,
    narrow_series,
    without_homes,
)
from streamlint.trace.tables import (
    CAPTURE_OPTIONS,
    ENVIRONMENT_VARIABLES,
    NAMED,
    TABLES,
    Column,
    Kind,
    TraceTable,
)
from streamlint.trace.untrusted import MAX_TEXT, Identity, changed, identity

_T = TypeVar("_T")

_SUFFIX = ".parquet"
_SIGNS = ("StringIds", "META_DATA_EXPORT", "EXPORT_META_DATA")
_CAPTURE = "META_DATA_CAPTURE"
_REEXPORT = "export it again: nsys export --type parquetdir REPORT.nsys-rep"
_FREE_ROWS, _ROWS_PER_BYTE = 1 << 20, 64
"""A row of a table that grows takes a byte at least: more is damage."""
_DAMAGE = (
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
    OSError,
    MemoryError,
    OverflowError,
)


def is_parquet_folder(path: Path) -> bool:
    """Whether ``path`` is a folder with tables of an export, of whatever name."""
    return path.is_dir() and any(
        (path / f"{sign}{_SUFFIX}").is_file() for sign in _SIGNS
    )


class ParquetFolder(ExportFile):
    """An nsys parquetdir export, read as `ExportFile` reads SQLite.

    Raises `TraceError` on anything that is not one. Nothing is ever written there.
    """

    def __init__(self, path: Path) -> None:
        """Read which tables ``path`` holds and which columns they have."""
        self.path = path
        self.invalid_rows = {}
        try:
            self._files = {
                file.name.removesuffix(_SUFFIX): file
                for file in path.iterdir()
                if file.suffix == _SUFFIX and file.is_file()
            }
            self._before = self._identities()
        except OSError as error:
            raise TraceError(
                f"{path} can't be opened ({error.strerror})",
                hint="check the path and its permissions",
            ) from None
        self.size = sum(one.size for one in self._before.values())
        wanted = {source for table in TABLES.values() for source in table.sources}
        wanted |= {"StringIds", _CAPTURE}
        self._schemas: dict[str, pl.Schema] = {}
        self._heights: dict[str, int] = {}
        self._layouts = {}
        for name in self._files:
            columns: dict[str, int] = {}
            if name in wanted:
                self._schemas[name] = schema = self._checked_schema(name)
                columns = {column: at for at, column in enumerate(schema)}
            self._layouts[name] = Layout(0, columns, None, plain=False)
        self._refuse_other_databases(complete=True)

    def refuse_change(self) -> None:
        """Raise `TraceError` if a file was changed since the folder was opened."""
        try:
            same = self._identities() == self._before
        except OSError:
            same = False
        if not same:
            raise changed(self.path.name)

    def close(self) -> None:
        """Nothing is kept open."""

    def options(self) -> dict[str, list[str]]:
        """Values of the allow-listed capture options; see `ExportFile.options`."""
        found: dict[str, list[str]] = {}
        schema = self._schemas.get(_CAPTURE, pl.Schema())
        if not {"name", "value"} <= schema.keys():
            return found
        rows = [
            (name, value)
            for name, value in self._rows(_CAPTURE, "name", "value")
            if isinstance(name, str) and isinstance(value, str)
        ]
        for wanted in CAPTURE_OPTIONS:
            own = re.compile(rf"(?:PROCESS_[0-9].*:)?{re.escape(wanted)}")
            values = [row for row in rows if own.fullmatch(row[0])]
            # The plain row, where there is one, overrules the prefixed ones.
            values.sort(key=lambda row: row[0] != wanted)
            if values:
                found[wanted] = [without_home(value) for _, value in values]
        variable = re.compile(r"PROCESS_[0-9].*:ENVIRONMENT_VARIABLE")
        for wanted in ENVIRONMENT_VARIABLES:
            texts = [
                without_home(value.partition("=")[2].strip('"'))
                for name, value in rows
                if value.startswith(f"{wanted}=")
                and len(value) < 200
                and variable.fullmatch(name)
            ]
            if texts:
                found[f"ENVIRONMENT_VARIABLE:{wanted}"] = texts
        return found

    def rows(self, table: TraceTable) -> int:
        """How many rows a table has."""
        return self._heights.get(self._source(table) or "", 0)

    def times(self, table: TraceTable) -> tuple[int, int] | None:
        """When the first and the last row of a table begin, if it has some."""
        source = self._source(table)
        if source is None or "start" not in self._schemas[source]:
            return None
        starts = self._frame(source, ["start"])["start"]
        first, last = starts.min(), starts.max()
        if isinstance(first, int) and isinstance(last, int):
            return first, last
        return None

    def _identities(self) -> dict[str, Identity]:
        return {name: identity(file) for name, file in self._files.items()}

    def _checked(self, name: str, read: Callable[[Path], _T]) -> _T:
        """What ``read`` makes of the table's file, `TraceError` if it can't."""
        try:
            found = read(self._files[name])
        except _DAMAGE as error:
            self.refuse_change()
            # What polars says may quote the file.
            raise TraceError(
                f"{self.path.name}: table {name} is damaged or cut off", hint=_REEXPORT
            ) from error
        self.refuse_change()
        return found

    def _checked_schema(self, name: str) -> pl.Schema:
        def read(path: Path) -> pl.Schema:
            with path.open("rb") as file:
                table = pl.scan_parquet(file)
                rows = table.select(pl.len()).collect().item()
                size = self._before[name].size
                if rows > _FREE_ROWS + _ROWS_PER_BYTE * size:
                    raise MemoryError
                self._heights[name] = rows
                return table.collect_schema()

        return self._checked(name, read)

    def _frame(self, source: str, columns: Sequence[str]) -> pl.DataFrame:
        def read(path: Path) -> pl.DataFrame:
            # By file, not by name: a name may hold what polars takes for a pattern.
            with path.open("rb") as file:
                return pl.read_parquet(file, columns=list(columns))

        return self._checked(source, read)

    def _rows(self, source: str, *columns: str) -> list[tuple[object, ...]]:
        return self._frame(source, columns).select(columns).rows()

    def _string_rows(self) -> list[tuple[object, object]]:
        return [(key, value) for key, value in self._rows("StringIds", "id", "value")]

    def _is_empty(self, table: TraceTable) -> bool:
        source = str(self._source(table))
        first = next(iter(self._schemas[source]), None)
        return first is None or not self._rows(source, first)

    def _by_rows(self, source: str) -> bool:
        return True

    def _batches(
        self, source: str, columns: Sequence[Column]
    ) -> Iterator[tuple[int, list[pl.Series]]]:
        frame = self._frame(source, [c.source for c in columns])
        yield (
            frame.height,
            [_typed(frame[c.source], c.kind).alias(c.name) for c in columns],
        )

    def _takes_pages(self, layout: Layout, columns: Sequence[Column]) -> bool:
        return False

    def _read(
        self,
        source: str,
        layout: Layout,
        columns: Sequence[Column],
        chosen: Chosen | None,
    ) -> list[pl.Series]:
        schema = self._schemas[source]
        # nsys stores blobs as texts here, which keep no byte above 127.
        lost = {
            c.name
            for c in columns
            if c.kind is Kind.BLOB and schema[c.source] != pl.Binary
        }
        stored = [c.source for c in columns if c.name not in lost]
        frame = self._frame(source, list(dict.fromkeys(stored)))
        if chosen is not None:
            frame = frame[as_series(chosen.rows)]
        series: list[pl.Series] = []
        for column in columns:
            if column.name in lost:
                nothing = pl.repeat(None, frame.height, dtype=pl.Binary, eager=True)
                series.append(nothing.alias(column.name))
                continue
            values = _typed(frame[column.source], column.kind).alias(column.name)
            if column.kind in NAMED:
                values = self._named(values, column.kind)
            series.append(values)
        return series


def _typed(values: pl.Series, kind: Kind) -> pl.Series:
    """The values as SQLite would have stored them; null where they are of no use."""
    if kind in (Kind.TEXT, Kind.BLOB):
        wanted = pl.Binary if kind is Kind.BLOB else pl.String
        if values.dtype != wanted:
            return pl.repeat(None, len(values), dtype=wanted, eager=True)
        return values if kind is Kind.BLOB else without_homes(_bounded(values))
    if values.dtype == pl.UInt64:
        whole = values.reinterpret(signed=True)
    elif values.dtype.is_integer() or values.dtype == pl.Boolean:
        whole = values.cast(pl.Int64)
    else:
        whole = pl.repeat(None, len(values), dtype=pl.Int64, eager=True)
    return narrow_series(whole) if kind is Kind.ID else whole


def _bounded(texts: pl.Series) -> pl.Series:
    longest = texts.str.len_bytes().max()
    if isinstance(longest, int) and longest > MAX_TEXT:
        return texts.str.slice(0, MAX_TEXT)
    return texts

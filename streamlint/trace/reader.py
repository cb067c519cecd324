"""Opens an nsys SQLite export read-only and loads single tables as frames.

Whole-number columns of all but small files come through the vectorised page reader
(`streamlint.trace.pages`); whatever it does not take, and all text, comes through a
sqlite3 cursor (`streamlint.trace.untrusted`).
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
import polars as pl

from streamlint.arrays import as_series
from streamlint.errors import OtherDatabase, TraceError
from streamlint.escape import HOME_SIGN, without_home
from streamlint.intervals import Bools, Int64
from streamlint.once import once
from streamlint.trace.pages import (
    Chosen,
    IntColumn,
    PageFile,
    UnsupportedLayout,
    narrowed,
)
from streamlint.trace.tables import (
    CAPTURE_OPTIONS,
    ENVIRONMENT_VARIABLES,
    NAMED,
    TABLES,
    WHOLE,
    Column,
    Kind,
    TraceTable,
)
from streamlint.trace.untrusted import REEXPORT, Connection, is_plain_table

_T = TypeVar("_T")

_MAGIC = b"SQLite format 3\0"
_LFS = b"version https://git-lfs"
_MAX_TIME = 1 << 62
"""Times in ns beyond this, 146 years, are damage; differences of others fit 64 bits."""

_LARGE = 128 << 10
"""Bytes of a file from which on the page reader is faster than a cursor."""

_MOST_SPARSE = 16

_DTYPES: dict[Kind, type[pl.DataType]] = {
    Kind.INT: pl.Int64,
    Kind.ID: pl.Int32,
    Kind.TEXT: pl.String,
    Kind.STRING_ID: pl.String,
    Kind.NAME: pl.Categorical,
    Kind.BLOB: pl.Binary,
}


class Layout(NamedTuple):
    """Where a table's rows are and what its columns are called."""

    root_page: int
    columns: dict[str, int]
    rowid_alias: str | None
    plain: bool


class Unavailable(NamedTuple):
    """Why a table gives no rows at all; one line."""

    reason: str


class ExportFile:
    """An nsys SQLite export.

    Raises `TraceError` on anything that is not one. Nothing is ever written to
    the file or beside it.
    """

    def __init__(
        self, path: Path, *, named: Path | None = None, complete: bool = True
    ) -> None:
        """Check what kind of file ``path`` is and read its table list.

        ``named`` is what the user called it, where ``path`` is a conversion of it.
        ``complete=False`` takes an export that nsys never finished too.
        """
        self.path = named or path
        self.invalid_rows: dict[str, int] = {}
        self.size = 0
        """Bytes of the file."""
        self.by_pages = False
        """Whether whole numbers are read page by page, else all with a cursor."""
        _refuse_other_files(path, self.path.name)
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._readable = path
        if _has_side_file(path):
            # Reading through a WAL writes beside the file; read a copy instead.
            self._copy = _copied_with_side_files(path)
            self._readable = Path(self._copy.name) / path.name
        try:
            self.size = path.stat().st_size
            self.by_pages = self.size >= _LARGE
            self._connection = Connection(
                self._readable, self.uri, original=path, name=self.path.name
            )
        except BaseException:
            self._clean_up()
            raise
        try:
            self._layouts = self._read_layouts()
            self._refuse_other_databases(complete=complete)
        except BaseException:
            self.close()
            raise

    def refuse_change(self) -> None:
        """Raise `TraceError` if the file was changed since it was opened."""
        self._connection.refuse_change()

    def close(self) -> None:
        """Release the file."""
        self._connection.close()
        self._clean_up()

    def _clean_up(self) -> None:
        if self._copy is not None:
            self._copy.cleanup()

    @property
    def uri(self) -> str:
        """SQLite's name of the file; nothing is written through it or beside it."""
        location = quote(os.fsencode(self._readable.resolve()))
        options = "mode=ro" if self._copy else "mode=ro&immutable=1"
        return f"file:{location}?{options}"

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the export's tables, sorted."""
        return tuple(sorted(self._layouts))

    def has_column(self, table: TraceTable, name: str) -> bool:
        """Whether the export stores the column of this name in the frame."""
        source = self._source(table)
        if source is None:
            return False
        stored = self._layouts[source].columns
        return any(c.name == name and c.source in stored for c in table.columns)

    def options(self) -> dict[str, list[str]]:
        """Values of the allow-listed capture options by name, without prefix.

        Environment variables come as ``ENVIRONMENT_VARIABLE:NAME``, allow-listed
        too; every other row of META_DATA_CAPTURE stays unread.
        """
        found: dict[str, list[str]] = {}
        if "META_DATA_CAPTURE" not in self._layouts:
            return found
        if not {"name", "value"} <= self._layouts["META_DATA_CAPTURE"].columns.keys():
            return found
        with self._connection.reading():
            for wanted in CAPTURE_OPTIONS:
                rows = self._connection.rows(
                    "SELECT name, value FROM META_DATA_CAPTURE "
                    "WHERE name = ?1 OR name GLOB 'PROCESS_[0-9]*:' || ?1",
                    (wanted,),
                )
                # The plain row, where there is one, overrules the prefixed ones.
                rows.sort(key=lambda row: str(row[0]) != wanted)
                if rows:
                    found[wanted] = [without_home(str(value)) for _, value in rows]
            for wanted in ENVIRONMENT_VARIABLES:
                rows = self._connection.rows(
                    "SELECT value FROM META_DATA_CAPTURE WHERE name GLOB ?1 "
                    "AND substr(value, 1, length(?2)) = ?2 AND length(value) < 200",
                    ("PROCESS_[0-9]*:ENVIRONMENT_VARIABLE", f"{wanted}="),
                )
                if rows:
                    values = [str(row[0]).partition("=")[2] for row in rows]
                    values = [without_home(value.strip('"')) for value in values]
                    found[f"ENVIRONMENT_VARIABLE:{wanted}"] = values
        return found

    def has_table(self, table: TraceTable) -> bool:
        """Whether the export holds the table, with rows or without."""
        return self._source(table) is not None

    def empty(self, name: str) -> pl.DataFrame:
        """The table of this name without rows."""
        return pl.DataFrame(
            schema={c.name: _DTYPES[c.kind] for c in TABLES[name].columns}
        )

    def rows(self, table: TraceTable) -> int:
        """About how many rows a table has, without reading it: none too few.

        Rows are numbered from 1; one takes 8 bytes at least, whatever a damaged file
        says.
        """
        source = self._source(table)
        if source is None:
            return 0
        most = self.size // 8
        query = f"SELECT rowid FROM {_quoted(source)} ORDER BY rowid DESC LIMIT 1"
        try:
            with self._connection.reading():
                last = self._connection.rows(query)
        except TraceError:  # damaged, or without row numbers
            return most
        return min(last[0][0], most) if last and isinstance(last[0][0], int) else 0

    def times(self, table: TraceTable) -> tuple[int, int] | None:
        """When the first and the last stored row of a table begin, if it tells.

        As rows are sorted by time in what nsys exports, about when all of it was.
        """
        source = self._source(table)
        column = next((c.source for c in table.columns if c.name == "start_ns"), None)
        if source is None or column not in self._layouts[source].columns:
            return None
        query = f"SELECT {_quoted(column)} FROM {_quoted(source)} ORDER BY rowid"
        try:
            with self._connection.reading():
                ends = [
                    self._connection.rows(f"{query} {way} LIMIT 1")
                    for way in ("ASC", "DESC")
                ]
        except TraceError:  # damaged, or without row numbers
            return None
        found = [row[0] for rows in ends for row in rows if isinstance(row[0], int)]
        return (found[0], found[1]) if len(found) == 2 else None

    def string(self, key: int) -> str | None:
        """The value of this key in StringIds."""
        known, values = self._strings
        at = int(np.searchsorted(known, key)) if abs(key) < 1 << 63 else len(known)
        if at == len(known) or known[at] != key:
            return None
        value: str | None = values[at]
        return value

    def scan(
        self, name: str, columns: Sequence[str], make: Callable[[pl.DataFrame, int], _T]
    ) -> tuple[list[_T], Int64] | None:
        """What ``make`` gives for some columns of a table, as stored, batch by batch.

        It is told the number of the first row, as rows are stored. And how many rows
        each batch has, for `Chosen`. Names come as keys of StringIds, columns that the
        export lacks as null. None where the table is missing or can't be read row by
        row.
        """
        table = TABLES[name]
        source = self._source(table)
        if source is None or not self._by_rows(source):
            return None
        layout = self._layouts[source]
        present = [c for c in table.columns if c.source in layout.columns]
        asked = [c for c in present if c.name in columns]
        if any(c.kind not in WHOLE for c in asked) or any(
            c.required and c not in present for c in table.columns
        ):
            return None
        lacking = {
            c.name: pl.lit(None, dtype=_storage(c.kind))
            for c in table.columns
            if c.name in columns and c not in asked
        }

        def made(batches: Iterable[tuple[int, list[pl.Series]]]) -> list[_T]:
            first, found = 0, []
            heights.clear()
            for height, series in batches:
                frame = pl.DataFrame(series).with_columns(**lacking).select(columns)
                found.append(make(frame, first))
                heights.append(height)
                first += height
            return found

        heights: list[int] = []
        found = None
        if self._takes_pages(layout, present):
            with suppress(UnsupportedLayout, OSError):
                found = made(self._page_batches(layout, asked))
            self._connection.refuse_change()
        if found is None:
            found = made(self._batches(source, asked))
        return found, np.array(heights, np.int64)

    def load(
        self, name: str, chosen: Chosen | None = None
    ) -> pl.DataFrame | Unavailable:
        """One table as a frame with the columns of `TABLES`, sorted by start.

        Columns that this export lacks are null. Rows without a usable time
        (end before start, or start 0) are dropped and counted in `invalid_rows`.
        With ``chosen``, of these rows only.
        """
        table = TABLES[name]
        source = self._source(table)
        if source is None:
            return Unavailable(f"the export has no table {table.sources[0]}")
        layout = self._layouts[source]
        for column in table.columns:
            if column.required and column.source not in layout.columns:
                return Unavailable(f"{source} has no column {column.source}")
        present = [c for c in table.columns if c.source in layout.columns]
        read = self._read(source, layout, present, chosen)
        found = {column.name: column for column in read}
        rows = len(next(iter(found.values())))
        frame = pl.DataFrame(
            [
                found[c.name] if c.name in found else _nulls(c, rows)
                for c in table.columns
            ]
        )
        return self._drop_invalid(table, frame)

    def _drop_invalid(self, table: TraceTable, frame: pl.DataFrame) -> pl.DataFrame:
        if "start_ns" not in frame.columns:
            return frame
        usable = usable_times(table, frame)
        kept = frame if usable.all() else frame.filter(as_series(usable))
        self.invalid_rows[table.name] = frame.height - kept.height
        return _by_time(kept)

    @once
    def _strings(self) -> tuple[Int64, pl.Series]:
        """Keys of StringIds, ascending and distinct, and their values."""
        rows: list[tuple[object, object]] = []
        layout = self._layouts.get("StringIds")
        if layout is not None and {"id", "value"} <= layout.columns.keys():
            rows = self._string_rows()
        first: dict[int, str | None] = {}
        for key, value in rows:
            if isinstance(key, int):
                first.setdefault(key, value if isinstance(value, str) else None)
        keys = np.array(sorted(first), dtype=np.int64)
        values = pl.Series([first[key] for key in sorted(first)], dtype=pl.String)
        return keys, without_homes(values)

    def _string_rows(self) -> list[tuple[object, object]]:
        """Keys and values of StringIds."""
        with self._connection.reading():
            return self._connection.rows("SELECT id, value FROM StringIds")

    def _named(self, keys: pl.Series, kind: Kind) -> pl.Series:
        """The strings of these keys; null where there is none."""
        known, values = self._strings
        if not len(known) or not len(keys):
            return pl.repeat(None, len(keys), dtype=_DTYPES[kind], eager=True).alias(
                keys.name
            )
        wanted = _filled(keys, 0)
        at = _places(known, wanted)
        missing = known[at] != wanted
        if kind is Kind.NAME:
            # Of the many strings of a trace only the names become categories.
            used = np.flatnonzero(np.bincount(at))
            number = np.zeros(len(known), np.int64)
            number[used] = np.arange(len(used))
            values, at = values[as_series(used)].cast(_DTYPES[kind]), number[at]
        named = values[as_series(at)].alias(keys.name)
        if keys.null_count():
            missing |= keys.is_null().to_numpy()
        return only(named, ~missing) if missing.any() else named

    def _read(
        self,
        source: str,
        layout: Layout,
        columns: Sequence[Column],
        chosen: Chosen | None,
    ) -> list[pl.Series]:
        whole = [c for c in columns if c.kind in WHOLE]
        other = [c for c in columns if c not in whole]
        series: dict[str, pl.Series] = {}
        paged = self.by_pages and not other
        taken = self._read_pages(layout, whole, chosen) if paged else None
        if taken is not None:
            for column in whole:
                # Nothing is twice in memory for longer than its turn.
                series[column.name] = _as_series(column.name, taken.pop(0))
        else:
            # One cursor pass for all, so that the columns stay in step.
            rows = None if chosen is None else chosen.rows
            series.update(self._read_cursor(source, [*whole, *other], rows))
        for column in whole:
            if column.kind in NAMED:
                series[column.name] = self._named(series[column.name], column.kind)
        return [series[c.name] for c in columns]

    def _by_rows(self, source: str) -> bool:
        """Whether the rows of a table have numbers, in whose order they are read."""
        return self._layouts[source].plain

    def _page_batches(
        self, layout: Layout, columns: Sequence[Column]
    ) -> Iterator[tuple[int, list[pl.Series]]]:
        with PageFile(self._readable) as pages:
            places = _positions(layout, columns)
            for height, found in pages.batches(layout.root_page, *places):
                yield (
                    height,
                    [
                        _as_series(c.name, one).cast(_storage(c.kind))
                        for c, one in zip(columns, found, strict=True)
                    ],
                )

    def _batches(
        self, source: str, columns: Sequence[Column]
    ) -> Iterator[tuple[int, list[pl.Series]]]:
        """Columns of a table, as `scan` has them, in the order of the rows."""
        for series in self._cursor_chunks(source, columns, in_order=True):
            yield len(series[0]), series

    def _takes_pages(self, layout: Layout, columns: Sequence[Column]) -> bool:
        """Whether the page reader may be able to read these columns."""
        return (
            self.by_pages
            and layout.plain
            and all(c.kind in WHOLE and c.source != layout.rowid_alias for c in columns)
        )

    def _read_pages(
        self, layout: Layout, columns: Sequence[Column], chosen: Chosen | None
    ) -> list[IntColumn] | None:
        if not self._takes_pages(layout, columns):
            return None
        try:
            with PageFile(self._readable) as pages:
                return pages.read_int_columns(
                    layout.root_page, *_positions(layout, columns), chosen
                )
        except (UnsupportedLayout, OSError):
            return None  # the cursor says what is wrong
        finally:
            self._connection.refuse_change()

    def _read_cursor(
        self, source: str, columns: Sequence[Column], rows: Int64 | None
    ) -> dict[str, pl.Series]:
        parts: list[list[pl.Series]] = [
            [pl.Series(c.name, [], dtype=_storage(c.kind))] for c in columns
        ]
        first = 0
        in_order = rows is not None
        for found in self._cursor_chunks(source, columns, in_order=in_order):
            height = len(found[0])
            if rows is not None:
                a, b = np.searchsorted(rows, [first, first + height])
                kept = as_series(rows[a:b] - first)
                found = [series.gather(kept) for series in found]
            first += height
            for part, series in zip(parts, found, strict=True):
                part.append(series)
        return {c.name: pl.concat(part) for c, part in zip(columns, parts, strict=True)}

    def _cursor_chunks(
        self, source: str, columns: Sequence[Column], *, in_order: bool
    ) -> Iterator[list[pl.Series]]:
        """Columns some thousands of rows at a time, ``in_order`` of their numbers."""
        names = ", ".join(_quoted(c.source) for c in columns)
        query = f"SELECT {names} FROM {_quoted(source)}"
        if in_order:
            query += " ORDER BY rowid"
        with self._connection.reading():
            for rows in self._connection.chunks(query):
                yield [
                    _clean_series(column, values)
                    for column, values in zip(
                        columns, zip(*rows, strict=True), strict=True
                    )
                ]

    def _source(self, table: TraceTable) -> str | None:
        return next((s for s in table.sources if s in self._layouts), None)

    def _read_layouts(self) -> dict[str, Layout]:
        layouts: dict[str, Layout] = {}
        wanted = {s for t in TABLES.values() for s in t.sources}
        wanted |= {"StringIds", "META_DATA_CAPTURE"}
        with self._connection.reading():
            found = self._connection.rows(
                "SELECT name, type, rootpage, sql FROM sqlite_master "
                "WHERE type NOT IN ('index', 'trigger')"
            )
            for name, kind, root_page, sql in found:
                if name not in wanted:
                    if kind == "table" and isinstance(name, str):
                        layouts[name] = Layout(0, {}, None, plain=False)
                    continue
                if not is_plain_table(kind, name, sql):
                    raise TraceError(
                        f"{self.path.name} has no table {name} but something else of "
                        "that name, which nsys never writes",
                        hint=REEXPORT,
                    )
                layouts[name] = self._layout(name, root_page, str(sql))
        return layouts

    def _layout(self, name: str, root_page: object, sql: str) -> Layout:
        info = self._connection.rows(f"PRAGMA table_xinfo({_quoted(name)})")
        keys = [row for row in info if row[5]]
        alias = (
            keys[0][1]
            if len(keys) == 1 and str(keys[0][2]).upper() == "INTEGER"
            else None
        )
        plain = "WITHOUT" not in sql.upper().rpartition(")")[2]
        # SQLite makes fractions of the whole numbers in a REAL column.
        plain = plain and not any(row[6] or _is_real(str(row[2])) for row in info)
        # A generated column is an expression that the file brings along: left alone.
        columns = {row[1]: row[0] for row in info if not row[6]}
        root = root_page if isinstance(root_page, int) else 0
        return Layout(root, columns, alias, plain)

    def _refuse_other_databases(self, *, complete: bool) -> None:
        names = set(self._layouts)
        name = self.path.name
        if {"StringTable", "Version"} <= names or (
            "CUPTI_ACTIVITY_KIND_DRIVER" in names and "StringIds" not in names
        ):
            raise OtherDatabase(
                f"{name} is an nvprof or Visual Profiler database",
                hint="capture with Nsight Systems: streamlint reads nsys exports",
            )
        if "StringIds" not in names and not any(n.startswith("CUPTI_") for n in names):
            raise OtherDatabase(
                f"{name} is a SQLite database but not an nsys export",
                hint="make one with: nsys export --type sqlite REPORT.nsys-rep",
            )
        meta = TABLES["export_meta"]
        if complete and self._source(meta) and self._is_empty(meta):
            raise TraceError(
                f"{name} is an incomplete export: nsys never finished writing it",
                hint=REEXPORT,
            )

    def _is_empty(self, table: TraceTable) -> bool:
        query = f"SELECT 1 FROM {_quoted(str(self._source(table)))} LIMIT 1"
        with self._connection.reading():
            return not self._connection.rows(query)


def _refuse_other_files(path: Path, name: str) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise TraceError(
            f"{path} does not exist", hint="name a .sqlite export or a .nsys-rep report"
        ) from None
    except OSError as error:
        raise TraceError(
            f"{path} can't be opened ({error.strerror})",
            hint="check the path and its permissions",
        ) from None
    if stat.S_ISDIR(mode):
        raise TraceError(
            f"{path} is a directory and no parquetdir export",
            hint="name the trace files: streamlint lint DIR/*",
        )
    if not stat.S_ISREG(mode):
        raise TraceError(f"{path} is not a regular file", hint="name a file on disk")
    try:
        with path.open("rb") as file:
            head = file.read(100)
    except OSError as error:
        raise TraceError(
            f"{path} can't be read ({error.strerror})",
            hint="check its permissions",
        ) from None
    if not head:
        raise TraceError(f"{name} is empty", hint=REEXPORT)
    if head.startswith(_LFS):
        raise TraceError(
            f"{name} is a Git LFS pointer, not the trace itself",
            hint="fetch the file first: git lfs pull",
        )
    if not head.startswith(_MAGIC):
        raise TraceError(
            f"{name} is not a SQLite file",
            hint="name a .sqlite export or a .nsys-rep report of Nsight Systems",
        )
    if len(head) < 100:
        raise TraceError(f"{name} is damaged or cut off", hint=REEXPORT)
    page_size = int.from_bytes(head[16:18], "big")
    page_size = 65_536 if page_size == 1 else page_size
    pages = int.from_bytes(head[28:32], "big")
    counted = head[24:28] == head[92:96]  # else the header's page count is stale
    size, whole = path.stat().st_size, pages * page_size
    if counted and size < whole:
        raise TraceError(
            f"{name} is cut off: it has {size} of {whole} bytes",
            hint="copy it again, or " + REEXPORT,
        )


def _side_files(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in ("-wal", "-journal")]


def _has_side_file(path: Path) -> bool:
    return any(side.exists() and side.stat().st_size for side in _side_files(path))


def _copied_with_side_files(path: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="streamlint-")
        try:
            for file in (path, *_side_files(path)):
                if file.exists():
                    shutil.copyfile(file, Path(folder.name) / file.name)
        except BaseException:
            folder.cleanup()
            raise
    except OSError as error:
        raise TraceError(
            f"{path.name} has a journal beside it and can't be copied to be read "
            f"({error.strerror})",
            hint="set TMPDIR to a folder with free space, or " + REEXPORT,
        ) from error
    return folder


def _positions(
    layout: Layout, columns: Sequence[Column]
) -> tuple[list[int], list[int]]:
    """Where these columns are in their table, and which of them are narrow."""
    return (
        [layout.columns[c.source] for c in columns],
        [layout.columns[c.source] for c in columns if c.kind is Kind.ID],
    )


def usable_times(table: TraceTable, frame: pl.DataFrame) -> Bools:
    """Which rows have usable times; ``frame`` has start_ns, and end_ns if at all."""
    # Arrays rather than expressions: an expression costs a small table more
    # than its rows, and most tables need neither the filter nor the sort.
    start = _filled(frame["start_ns"], _MAX_TIME)
    # Not abs(): the least number has no positive counterpart.
    usable = (start < _MAX_TIME) & (start > -_MAX_TIME)
    if "end_ns" in frame.columns:
        needed = any(c.name == "end_ns" and c.required for c in table.columns)
        end = _filled(frame["end_ns"], _MAX_TIME if needed else 0)
        usable &= (end < _MAX_TIME) & (end > -_MAX_TIME)
        if needed:
            usable &= (start != 0) & (end >= start)
    return usable


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _storage(kind: Kind) -> type[pl.DataType]:
    return pl.Int64 if kind in NAMED else _DTYPES[kind]


def _clean_series(column: Column, values: Sequence[object]) -> pl.Series:
    """Values of one column; whatever isn't of the column's type becomes null."""
    wanted: type = {Kind.TEXT: str, Kind.BLOB: bytes}.get(column.kind, int)
    dtype = pl.Int64 if column.kind in WHOLE else _DTYPES[column.kind]
    try:
        clean = pl.Series(column.name, values, dtype=dtype, strict=True)
    except (TypeError, OverflowError, pl.exceptions.PolarsError):
        kept = [v if isinstance(v, wanted) else None for v in values]
        clean = pl.Series(column.name, kept, dtype=dtype)
    if column.kind is Kind.ID:
        return narrow_series(clean)
    return without_homes(clean) if column.kind is Kind.TEXT else clean


def narrow_series(numbers: pl.Series) -> pl.Series:
    """Whole numbers as Int32, null where they don't fit (`narrowed`)."""
    narrow = numbers.cast(pl.Int32, strict=False)
    if narrow.null_count() == numbers.null_count():
        return narrow
    values, fits = narrowed(_filled(numbers, 0))
    narrow = as_series(values, numbers.name)
    if numbers.null_count():
        narrow = only(narrow, numbers.is_not_null().to_numpy())
    return narrow if fits is None else only(narrow, fits)


def only(series: pl.Series, valid: Bools) -> pl.Series:
    """The series with null for what isn't valid; `scatter` takes 500 times as long."""
    nothing = pl.Series([None], dtype=series.dtype)
    return series.zip_with(as_series(valid), nothing)


def without_homes(texts: pl.Series) -> pl.Series:
    """The texts with ``~`` for home folders: no user's name leaves this module."""
    found = texts.str.contains(HOME_SIGN)
    if not found.any():
        return texts
    at = as_series(np.flatnonzero(found.fill_null(value=False).to_numpy()))
    return texts.scatter(at, [without_home(text) for text in texts.gather(at)])


def _places(known: Int64, wanted: Int64) -> Int64:
    """Where in ``known``, ascending, each number is; anywhere if it isn't there."""
    least, span = int(known[0]), int(known[-1]) - int(known[0]) + 1
    if span > _MOST_SPARSE * len(known):
        return np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    # Numbered almost without gaps, as nsys does: a table is three times as fast.
    table = np.zeros(span, dtype=np.int64)
    table[known - least] = np.arange(len(known))
    return table[np.clip(wanted, least, least + span - 1) - least]


def _filled(series: pl.Series, null: int) -> Int64:
    """Whole numbers as an array, with this one for nulls."""
    return (series.fill_null(null) if series.null_count() else series).to_numpy()


def _is_real(declared: str) -> bool:
    """Whether a column of this declared type has SQLite's REAL affinity."""
    declared = declared.upper()
    if any(word in declared for word in ("INT", "CHAR", "CLOB", "TEXT", "BLOB")):
        return False
    return any(word in declared for word in ("REAL", "FLOA", "DOUB"))


def _nulls(column: Column, rows: int) -> pl.Series:
    nothing = pl.repeat(None, rows, dtype=_DTYPES[column.kind], eager=True)
    return nothing.alias(column.name)


def _by_time(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame sorted by start and end, otherwise in the order that it has."""
    start = frame["start_ns"].to_numpy()
    later = start[1:] > start[:-1]
    if later.all():
        return frame  # as nsys exports nearly all tables
    keys = [c for c in ("start_ns", "end_ns") if c in frame.columns]
    same = start[1:] == start[:-1]
    if not (later | same).all() or len(keys) < 2 or frame["end_ns"].null_count():
        return frame.sort(keys, maintain_order=True)
    # Only rows that start together may change places.
    tied = np.zeros(len(start), np.bool_)
    tied[1:] = same
    tied[:-1] |= same
    rows = np.flatnonzero(tied)
    by_end = rows[np.lexsort((frame["end_ns"].to_numpy()[rows], start[rows]))]
    if (by_end == rows).all():
        return frame
    order = np.arange(len(start))
    order[rows] = by_end
    return frame[as_series(order)]


def _as_series(name: str, column: IntColumn) -> pl.Series:
    series = pl.Series(name, column.values)
    return series if column.valid is None else only(series, column.valid)

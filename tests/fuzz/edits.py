"""Turns bytes into a damaged copy of a stored sample: the input of every fuzzer.

The first byte chooses the sample; the rest is read as a list of edits, of the rows
and the schema through SQLite first, then of the file's pages. A few bytes are a whole
test case, so seeds stay small, and any bytes are one, so nothing is rejected.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parents[2] / "sample_traces"
BASES = ("misc", "l2_use", "range", "ptds", "2026.1.1_cut_down_tables")
PAGE = 1024
MAX_EDITS = 24
MAX_STEPS = 300_000

TABLES = (
    *("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"),
    *("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"),
    *("StringIds", "TARGET_INFO_CUDA_STREAM", "CUPTI_ACTIVITY_KIND_CUDA_EVENT"),
    *("TARGET_INFO_GPU", "PROCESSES", "META_DATA_CAPTURE", "META_DATA_EXPORT"),
    *("CUDA_GPU_MEMORY_USAGE_EVENTS", "CUDA_GRAPH_NODE_EVENTS", "DIAGNOSTIC_EVENT"),
    "TARGET_INFO_CUDA_CONTEXT_INFO",
)
# What a whole column or a single field becomes: SQL, so that types differ.
VALUES = (
    *("NULL", "0", "1", "-1", "2147483647", "4294967295", "4294967296"),
    *("9223372036854775807", "-9223372036854775807 - 1", "4611686018427387904"),
    *("1e300", "-1e300", "9e999", "0.5", "'7'", "'9223372036854775808'", "''"),
    *(
        "'a' || char(0) || 'b'",
        "char(27) || '[31m'",
        "x'ff00'",
        "CAST(x'ff80' AS TEXT)",
    ),
    *("'[red]</script>' || char(8238, 155, 10)", "zeroblob(3000)"),
    *("printf('%.3000c', 'x')", "'{\"' || printf('%.900c', '[')", "16777216", "256"),
)
SCHEMA = (
    'DROP TABLE "{0}"',
    'ALTER TABLE "{0}" RENAME TO "{0} ""quoted"""',
    'ALTER TABLE "{0}" ADD COLUMN "extra;--" TEXT DEFAULT \'x\'',
    'CREATE TABLE copied AS SELECT * FROM "{0}"; DROP TABLE "{0}"; '
    'CREATE VIEW "{0}" AS SELECT * FROM copied',
    'DROP TABLE "{0}"; CREATE VIEW "{0}" AS WITH RECURSIVE n(i) AS (SELECT 1 UNION '
    "ALL SELECT i + 1 FROM n) SELECT i AS start, i + 1 AS end, i AS id, i AS value "
    "FROM n",
    'CREATE TRIGGER "t {0}" AFTER INSERT ON "{0}" BEGIN SELECT 1; END',
    'CREATE INDEX "i {0}" ON "{0}" (rowid % 2)',
    'INSERT INTO "{0}" SELECT * FROM "{0}" WHERE rowid < 9',
    'DELETE FROM "{0}"',
    'DELETE FROM "{0}" WHERE rowid % 3',
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET rootpage = (SELECT rootpage "
    "FROM sqlite_master WHERE name = 'StringIds') WHERE name = '{0}'",
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET rootpage = 1 "
    "WHERE name = '{0}'",
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = "
    "replace(sql, 'INTEGER', 'REAL') WHERE name = '{0}'",
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = "
    "replace(sql, ')', ') WITHOUT ROWID') WHERE name = '{0}'",
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = "
    "'CREATE VIEW \"{0}\" AS SELECT 1 AS start, 2 AS end' WHERE name = '{0}'",
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = "
    "'CREATE VIRTUAL TABLE \"{0}\" USING fts3(start, end)' WHERE name = '{0}'",
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET sql = "
    "replace(sql, '(', '(g INTEGER AS (zeroblob(900000000)), ') WHERE name = '{0}'",
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET name = 'x' || name "
    "WHERE name = '{0}'",
    "PRAGMA writable_schema=ON; UPDATE sqlite_master SET type = 'view' "
    "WHERE name = '{0}'",
)
BYTES = (0, 1, 2, 4, 5, 7, 10, 13, 15, 127, 128, 129, 255)
VARINTS = (
    *(b"\x00", b"\x01", b"\x7f", b"\x81\x00", b"\xff\x7f", b"\x87\xff\xff\xff\x7f"),
    *(b"\xff" * 9, b"\x8f\xff\xff\xff\x7f", b"\x80\x80\x01", b"\x83\x74"),
)


class Input:
    """Reads numbers off a byte string; zeros once it is used up."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._at = 0

    @property
    def left(self) -> bool:
        return self._at < len(self._raw)

    def number(self, below: int) -> int:
        """A number in [0, below) from as few bytes as can tell."""
        if below <= 1:
            return 0
        size = ((below - 1).bit_length() + 7) // 8
        part = self._raw[self._at : self._at + size]
        self._at += size
        return int.from_bytes(part, "little") % below


@cache
def base(number: int) -> bytes:
    return (SAMPLES / "extra" / f"{BASES[number]}.sqlite").read_bytes()


def build(raw: bytes, path: Path) -> None:
    """Write the damaged trace that ``raw`` describes to ``path``."""
    given = Input(raw)
    data = base(given.number(len(BASES)))
    sql: list[str] = []
    later: list[Callable[[bytearray], None]] = []
    for _ in range(MAX_EDITS):
        if not given.left:
            break
        kind = given.number(len(KINDS))
        edit = KINDS[kind](given)
        if isinstance(edit, str):
            sql.append(edit)
        else:
            later.append(edit)
    path.write_bytes(data)
    if sql:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode=OFF")
            db.execute("PRAGMA synchronous=OFF")
            for statement in sql:
                # One edit's view may have no end for the next one.
                db.set_progress_handler(_budget(), 1_000)
                with suppress(sqlite3.Error):
                    db.executescript(statement)
        data = path.read_bytes()
    if later:
        damaged = bytearray(data)
        for change in later:
            if len(damaged) > PAGE:
                change(damaged)
        path.write_bytes(damaged)


Change = Callable[[bytearray], None]


def _budget() -> Callable[[], bool]:
    steps = iter(range(MAX_STEPS // 1_000))
    return lambda: next(steps, None) is None


def _page(data: bytearray, number: int) -> int:
    return number % max(1, len(data) // PAGE) * PAGE


def _set(data: bytearray, at: int, value: bytes) -> None:
    if at >= 0 and at + len(value) <= len(data):
        data[at : at + len(value)] = value


def _cells(data: bytearray, page: int) -> tuple[int, int]:
    """Where a page's cell pointers start, and how many it says it has."""
    head = page + (100 if page == 0 else 0)
    interior = data[head] in (2, 5)
    count = int.from_bytes(data[head + 3 : head + 5], "big")
    return head + (12 if interior else 8), min(count, PAGE // 2)


def _flip(given: Input) -> Change:
    at, mask = given.number(1 << 17), 1 << given.number(8)

    def change(data: bytearray) -> None:
        data[at % len(data)] ^= mask

    return change


def _write(given: Input) -> Change:
    at, value, length = given.number(1 << 17), given.number(13), given.number(9)

    def change(data: bytearray) -> None:
        _set(data, at % len(data), bytes([BYTES[value]]) * length)

    return change


def _cut(given: Input) -> Change:
    at = given.number(1 << 17)

    def change(data: bytearray) -> None:
        del data[max(100, at % len(data)) :]

    return change


def _copy_page(given: Input) -> Change:
    source, target = given.number(128), given.number(128)

    def change(data: bytearray) -> None:
        start = _page(data, source)
        _set(data, _page(data, target), bytes(data[start : start + PAGE]))

    return change


def _header(given: Input) -> Change:
    number, at, value = given.number(128), given.number(16), given.number(256)

    def change(data: bytearray) -> None:
        page = _page(data, number)
        data[page + at + (100 if page == 0 else 0)] = value

    return change


def _file_header(given: Input) -> Change:
    at, value = given.number(100), given.number(13)

    def change(data: bytearray) -> None:
        data[at] = BYTES[value]

    return change


def _cell_pointer(given: Input) -> Change:
    number, cell, value = given.number(128), given.number(64), given.number(1 << 16)
    same = given.number(2)

    def change(data: bytearray) -> None:
        page = _page(data, number)
        array, count = _cells(data, page)
        other = data[array : array + 2]
        at = array + 2 * (cell % max(1, count))
        _set(data, at, bytes(other) if same else value.to_bytes(2, "big"))

    return change


def _link(given: Input) -> Change:
    """Point a page's right child, a cell's child or an overflow chain elsewhere."""
    number, cell, target = given.number(128), given.number(64), given.number(256)

    def change(data: bytearray) -> None:
        page = _page(data, number)
        link = (target if target < 250 else target << 24).to_bytes(4, "big")
        array, count = _cells(data, page)
        if cell >= count:
            _set(data, array - 4, link)
            return
        at = array + 2 * cell
        _set(data, page + int.from_bytes(data[at : at + 2], "big"), link)

    return change


def _varint(given: Input) -> Change:
    """Overwrite the payload length, the rowid or a serial type of a cell."""
    number, cell = given.number(128), given.number(64)
    skip, value = given.number(24), given.number(len(VARINTS))

    def change(data: bytearray) -> None:
        page = _page(data, number)
        array, count = _cells(data, page)
        at = array + 2 * (cell % max(1, count))
        start = page + int.from_bytes(data[at : at + 2], "big")
        _set(data, start + skip, VARINTS[value])

    return change


def _schema(given: Input) -> str:
    table = TABLES[given.number(len(TABLES))]
    return SCHEMA[given.number(len(SCHEMA))].format(table)


def _value(given: Input) -> str:
    """Set a column, in one row or in all, to one of `VALUES`."""
    table = TABLES[given.number(len(TABLES))]
    column, value = given.number(32), VALUES[given.number(len(VALUES))]
    row = given.number(256)
    names = _columns(table)
    name = names[column % len(names)] if names else "id"
    where = "" if row == 0 else f" WHERE rowid = {row}"
    return f'UPDATE OR IGNORE "{table}" SET "{name}" = {value}{where}'


@cache
def _columns(table: str) -> tuple[str, ...]:
    """Columns of the table in the first sample that has it."""
    for name in BASES:
        uri = f"file:{SAMPLES / 'extra' / name}.sqlite?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as db:
            info: list[Any] = db.execute(f"PRAGMA table_info({table})").fetchall()
        if info:
            return tuple(str(row[1]) for row in info)
    return ()


KINDS: tuple[Callable[[Input], Change | str], ...] = (
    *(_flip, _write, _cut, _copy_page, _header, _file_header, _cell_pointer),
    *(_link, _varint, _varint, _schema, _schema, _value, _value, _value, _value),
)

"""Reads SQLite files that nobody vouches for: safely, and at a bounded price.

SQLite alone follows whatever a file says: one page can be the child of a thousand
others and one long text the value of every row, so that a megabyte becomes more rows
than anybody can wait for. Standard library alone.
"""

from __future__ import annotations

import re
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple

from streamlint.errors import TraceError

REEXPORT = "export it again: nsys export --type sqlite REPORT.nsys-rep"

MAX_TEXT = 1 << 20
"""Bytes of a text that are read: call stacks in JSON are the longest, half of this."""
MIN_ROW_BYTES = 6
"""What a row takes at least: a cell of 4 bytes and its pointer."""
_FREE_CPU_S = 0.5
_CPU_S_PER_BYTE = 0.8e-6
"""Fifteen times what reading every table of a large export by cursor takes."""
_FREE_BYTES = 1 << 20
_CHUNK_BYTES = 64 << 20
_STEPS = 1_000

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ})
_FUNCTIONS = frozenset({"count", "glob", "length", "substr"})
_PRAGMAS = frozenset({"table_xinfo"})
_SETTINGS = ("query_only=ON", "trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0")


_TABLE = re.compile(r"CREATE\s+TABLE\s+[\"'`\[]?", re.IGNORECASE)
_COLUMNS = re.compile(r"[\"'`\]]?\s*\(")
_DAMAGE = (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError)


class _TooDear(sqlite3.DatabaseError):
    """The file asks for more time or memory than a sound one of its size."""


class Identity(NamedTuple):
    """What tells a file from another one, or from itself after a change."""

    device: int
    inode: int
    size: int
    changed_ns: int


def identity(path: Path) -> Identity:
    """The identity of a file now; raises `OSError` if there is none."""
    status = path.stat()
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class Connection:
    """A read-only connection to the file ``path``, which SQLite names by ``uri``.

    ``original`` is the file that must not change meanwhile, ``path`` a copy of it or
    itself. Everything is read inside `reading`, which raises `TraceError`.
    """

    def __init__(self, path: Path, uri: str, *, original: Path, name: str) -> None:
        """Open the file; its schema is not read yet."""
        self._original, self._name = original, name
        self._before: Identity | None = None
        self._is_closed = False
        self._lock = RLock()  # one thread reads at a time
        try:
            self._before, size = identity(original), path.stat().st_size
        except OSError:
            self.refuse_change()  # it was there a moment ago
            raise
        self._max_bytes = _FREE_BYTES + 2 * size
        self._max_rows = size // MIN_ROW_BYTES
        self._chunk = min(4_096, max(16, _CHUNK_BYTES // max(1, size)))
        self._max_cpu_s = _FREE_CPU_S + size * _CPU_S_PER_BYTE
        self._cpu_s = self._entered = 0.0
        self._bytes = 0
        with self.reading():
            self._db = sqlite3.connect(uri, uri=True, check_same_thread=False)
            try:
                self._secure(size)
            except BaseException:
                self._db.close()
                raise

    def _secure(self, size: int) -> None:
        for setting in _SETTINGS:
            self._db.execute(f"PRAGMA {setting}")
        if sys.version_info >= (3, 11):
            for limit, most in (
                # No value is longer than the file; a schema may say so.
                (sqlite3.SQLITE_LIMIT_LENGTH, min(size, 1 << 30) + _FREE_BYTES),
                (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 1 << 20),
                (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
                (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 3),
                (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
                (sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 1),
                (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
            ):
                self._db.setlimit(limit, most)
        self._db.text_factory = self._text
        self._db.set_authorizer(authorize)
        self._db.set_progress_handler(self._is_too_dear, _STEPS)

    def close(self) -> None:
        """Release the file."""
        self._db.close()
        self._is_closed = True

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Whatever is wrong with the file becomes a `TraceError`.

        So does a file that was changed since it was opened: nothing that was read of
        it is then used.
        """
        if self._is_closed:
            raise TraceError(
                f"{self._name} is closed", hint="read a trace before it is closed"
            )
        with self._lock:
            self._entered, self._bytes = time.thread_time(), 0
            try:
                yield
            except _DAMAGE as error:
                self.refuse_change()
                # What SQLite says may quote the file, bytes and all.
                dear = isinstance(error, (_TooDear, MemoryError)) or self._is_too_dear()
                raise TraceError(
                    f"{self._name} is damaged: it asks for more time or memory than "
                    "a sound file of its size"
                    if dear
                    else f"{self._name} is damaged or cut off",
                    hint=REEXPORT,
                ) from error
            self._cpu_s += time.thread_time() - self._entered
            self.refuse_change()

    def rows(self, query: str, values: tuple[object, ...] = ()) -> list[Any]:
        """All rows of a query."""
        return [row for chunk in self.chunks(query, values) for row in chunk]

    def chunks(
        self, query: str, values: tuple[object, ...] = ()
    ) -> Iterator[list[Any]]:
        """The rows of a query, some thousands at a time."""
        cursor = self._db.execute(query, values)
        rows: list[Any] = []
        count = 0
        while part := cursor.fetchmany(self._chunk):
            for column in zip(*part, strict=True):
                if bytes in map(type, column):
                    self._count(sum(len(v) for v in column if isinstance(v, bytes)))
            rows += part
            count += len(part)
            if count > self._max_rows:
                raise _TooDear
            if len(rows) >= 65_536:
                yield rows
                rows = []
        if rows:
            yield rows

    def _text(self, raw: bytes) -> str:
        self._count(len(raw))
        return raw[:MAX_TEXT].decode("utf-8", "replace")

    def _count(self, read: int) -> None:
        self._bytes += read
        if self._bytes > self._max_bytes:
            raise _TooDear

    def _is_too_dear(self) -> bool:
        spent = self._cpu_s + time.thread_time() - self._entered
        return spent > self._max_cpu_s

    def refuse_change(self) -> None:
        """Raise `TraceError` if the file is not the one that was opened."""
        try:
            same = identity(self._original) == self._before
        except OSError:
            same = False
        if not same:
            raise changed(self._name)


def changed(name: str) -> TraceError:
    """The error for a trace that was written to while it was read."""
    return TraceError(
        f"{name} was changed while it was read",
        hint="wait until it is written, then run streamlint again",
    )


def authorize(
    action: int, what: str | None, function: str | None, _: str | None, via: str | None
) -> int:
    """Allow reading plain tables and nothing else: for `set_authorizer`.

    ``via`` is the view or trigger that an access comes from.
    """
    if via is None and (
        action in _READING
        or (action == sqlite3.SQLITE_FUNCTION and function in _FUNCTIONS)
        or (action == sqlite3.SQLITE_PRAGMA and what in _PRAGMAS)
    ):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def is_plain_table(kind: object, name: str, sql: object) -> bool:
    """Whether a row of sqlite_master is a table and nothing that passes for one."""
    text = str(sql)
    begin = _TABLE.match(text)
    if kind != "table" or begin is None:
        return False
    # No pattern with the name in it: compiling one a table takes milliseconds.
    end = begin.end() + len(name)
    named = text[begin.end() : end].lower() == name.lower()
    return named and _COLUMNS.match(text, end) is not None

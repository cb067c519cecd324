"""Read integer columns of a SQLite table from its pages, without a cursor.

A cursor makes one Python object per value, which is most of the time a large trace
takes to load. The file format is fixed and small, so numpy decodes whole batches of
leaf pages. What is not of the plain shape raises `UnsupportedLayout`, and the caller
takes a cursor. The file is untrusted: no offset is followed unchecked.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from streamlint.machine import cpus

if TYPE_CHECKING:
    from concurrent.futures import Future

_Array = npt.NDArray[Any]
_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]

_T = TypeVar("_T")

_INTERIOR, _LEAF = 5, 13
_MAX_DEPTH = 20
# About the size of an L2 cache: every column of a batch reads it again.
_BATCH_BYTES = 2 << 20
_BATCHES_A_THREAD = 4
_MOST_THREADS = 8
# Two 9-byte varints and an 8-byte load from the last byte of a page end within this.
_PADDING = 32

_NULL, _REAL, _ONE, _BLOB = 0, 7, 9, 12
# Bytes in the record body for each one-byte serial type.
_WIDTH = np.array(
    [
        0,
        1,
        2,
        3,
        4,
        6,
        8,
        8,
        0,
        0,
        0,
        0,
        *((t - _BLOB) // 2 for t in range(_BLOB, 128)),
    ],
    np.uint8,
)
# Moves a field, with its sign, down from the top of an 8-byte load.
_SHIFT = np.array([63, 56, 48, 40, 32, 16, 0, 0, 63, 63], np.int64)


class UnsupportedLayout(Exception):
    """The file or table is not of the plain shape; use a sqlite3 cursor instead."""


class IntColumn(NamedTuple):
    """One column, rows in rowid order.

    `values` is int64 or int32 of shape (rows,), 0 where NULL. `valid` is bool of the
    same shape, or None if no row is NULL.
    """

    values: _Array
    valid: npt.NDArray[np.bool_] | None


class Chosen(NamedTuple):
    """Rows of a table: their numbers from 0, ascending, and how many rows there are.

    ``heights`` has the latter for each batch of leaves, as `PageFile` reads them.
    """

    rows: _Ints
    heights: _Ints


def narrowed(values: _Array) -> tuple[_Array, npt.NDArray[np.bool_] | None]:
    """The integers as int32, and which of them fit; None if all do.

    Unsigned ones of 32 bits fit too and come out with the same bits.
    """
    narrow = values.astype(np.int32, copy=False)
    same = narrow == values
    if same.all():
        return narrow, None
    same |= narrow.view(np.uint32) == values
    return narrow, None if same.all() else same


class PageFile:
    """A SQLite file, opened read-only and read page by page.

    Not mapped: the system ends a process that touches a mapped page which another
    one has cut off.
    """

    def __init__(self, path: Path, *, immutable: bool = False) -> None:
        """Open `path`; `immutable` vouches that a WAL-mode file has no writer.

        Raises UnsupportedLayout if this is no plain SQLite file or a WAL or journal
        lies beside it, OSError if it cannot be read.
        """
        _require(stat.S_ISREG(path.stat().st_mode), "not a regular file")
        # SQLite follows symlinks before it names the journal.
        path = path.resolve()
        for suffix in ("-wal", "-journal"):
            beside = path.with_name(path.name + suffix)
            with suppress(FileNotFoundError):
                _require(beside.stat().st_size == 0, f"{beside.name} is not empty")
        self._lock = Lock()
        self._file = path.open("rb", buffering=0)
        try:
            header = self._file.read(100)
            self._size, self._usable = _page_size(header, immutable=immutable)
            present = os.fstat(self._file.fileno()).st_size // self._size
            count = int.from_bytes(header[28:32], "big")
            # A writer older than SQLite 3.7 leaves the page count stale.
            if count == 0 or header[24:28] != header[92:96]:
                count = present
            _require(0 < count <= present, "file shorter than its page count")
            self._count = count
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> PageFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; columns already read stay usable."""
        self._file.close()

    def read_int_columns(
        self,
        root_page: int,
        columns: Sequence[int],
        narrow: Collection[int] = (),
        chosen: Chosen | None = None,
    ) -> list[IntColumn]:
        """Read integer columns of the table whose b-tree starts at `root_page`.

        Those in `narrow` come out as int32, NULL where they don't fit (`narrowed`).
        Of rows that aren't `chosen` nothing is decoded, and of pages without such rows
        nothing is read.

        A column is its position in CREATE TABLE. Never ask for an INTEGER PRIMARY KEY
        (stored as NULL, so it reads as NULL), for a column declared REAL (whole numbers
        are stored as integers there), or in a table with VIRTUAL generated columns
        (not stored, so they shift the others).

        Raises UnsupportedLayout if a cell holds anything but an integer or NULL, spills
        to an overflow page or lacks the column, or if the pages are damaged.
        """
        parts = _Parts(columns, narrow)
        for _, found in self.batches(root_page, columns, narrow, chosen):
            parts.add(found)
        return parts.joined()

    def batches(
        self,
        root_page: int,
        columns: Sequence[int],
        narrow: Collection[int] = (),
        chosen: Chosen | None = None,
    ) -> Iterator[tuple[int, list[IntColumn]]]:
        """As `read_int_columns`, some thousands of rows at a time.

        With how many rows there are where these come from, ``heights`` of `Chosen`.
        Values that aren't narrow may be of fewer bits than 64.
        """
        if self._file.closed or min(columns, default=0) < 0:
            raise ValueError("closed file or negative column")
        if not columns:
            return
        leaves = self._leaves(root_page)
        at = 100 if leaves[0] == 0 else 0
        most = max(1, _BATCH_BYTES // self._size)
        batches = [_Batch(leaves[i : i + most]) for i in range(0, leaves.size, most)]
        if chosen is not None:
            _require(len(chosen.heights) == len(batches), "other pages than before")
            first = np.cumsum(chosen.heights) - chosen.heights
            bounds = np.searchsorted(
                chosen.rows, np.append(first, chosen.heights.sum())
            )
            batches = [
                batch._replace(rows=chosen.rows[a:b] - start, height=height)
                for batch, start, height, (a, b) in zip(
                    batches, first, chosen.heights, pairwise(bounds), strict=True
                )
                if a < b
            ]
        yield from _mapped(
            lambda batch: self._batch(batch, at, columns, narrow), batches
        )

    def _batch(
        self, batch: _Batch, at: int, columns: Sequence[int], narrow: Collection[int]
    ) -> tuple[int, list[IntColumn]]:
        """How many rows these leaves have, and their columns."""
        numbers, size = batch.leaves, self._size
        buffer = np.zeros(numbers.size * size + _PADDING, np.uint8)
        pages = buffer[: numbers.size * size].reshape(-1, size)
        self._read(numbers, pages)
        counts = _cell_counts(pages, _LEAF, at, self._usable)
        height = int(counts.sum())
        # A row takes a pointer, three lengths and a byte per column, so damaged
        # counts cannot ask for more than 8 bytes per byte of the file.
        spent = height * (max(columns) + 6)
        _require(spent <= numbers.size * self._usable, "too many cells")
        starts = _cell_starts(pages, counts, at + 8, self._usable)
        if batch.rows is not None:
            _require(height == batch.height, "other rows than before")
            starts = starts[batch.rows]
        found: dict[int, IntColumn] = {}
        for column, kind, data in _fields(buffer, starts, size, self._usable, columns):
            some = kind != _NULL if kind.min() == _NULL else None
            if column in narrow:
                data, fits = narrowed(data)
                if fits is not None:
                    some = fits if some is None else fits & some
            found[column] = IntColumn(data, some)
        nothing = IntColumn(np.empty(0, np.int64), None)
        return height, [found.get(column, nothing) for column in columns]

    def _read(self, numbers: _Ints, pages: _Bytes) -> None:
        """Read the pages of these numbers, from 0, into the rows of `pages`."""
        view = pages.data.cast("B")
        ends = [*(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        first = 0
        for end, number in zip(ends, numbers[[0, *ends[:-1]]].tolist(), strict=True):
            part = view[first * self._size : end * self._size]
            with self._lock:
                self._file.seek(number * self._size)
                read = self._file.readinto(part)
            _require(read == len(part), "file cut off")
            first = end

    def _leaves(self, root: int) -> _Ints:
        """Return a table's leaves in key order, as page numbers from 0.

        Goes down level by level: in a b-tree all leaves have the same depth. Of the
        leaves only the first is looked at.
        """
        level, at = np.array([root - 1]), 100 if root == 1 else 0
        levels: list[_Ints] = []
        for _ in range(_MAX_DEPTH):
            inside = level.min() >= 0 and level.max() < self._count
            _require(inside, "page number out of range")
            levels.append(level)
            seen = np.concatenate(levels)
            _require(np.unique(seen).size == seen.size, "page linked twice")
            first = np.zeros((1, self._size), np.uint8)
            self._read(level[:1], first)
            if first[0, at] == _LEAF:
                return level
            children: list[_Ints] = []
            total = seen.size
            one = np.zeros((1, self._size), np.uint8)
            for i in range(level.size):
                self._read(level[i : i + 1], one)
                counts = _cell_counts(one, _INTERIOR, at, self._usable)
                total += int(counts[0]) + 1
                _require(total <= self._count, "too many pages")
                links = _cell_starts(one, counts, at + 12, self._usable)
                links = np.append(links, at + 8)[:, None] + np.arange(4)
                children.append(one[0, links].view(">u4")[:, 0])
            level, at = np.concatenate(children).astype(np.int64) - 1, 0
        raise UnsupportedLayout("b-tree too deep")


def _page_size(header: bytes, *, immutable: bool) -> tuple[int, int]:
    """Return the size of a page and how much of it is used."""
    _require(len(header) == 100, "no SQLite header")
    _require(header.startswith(b"SQLite format 3\0"), "no SQLite header")
    size = int.from_bytes(header[16:18], "big")
    size = 65536 if size == 1 else size
    _require(size >= 512 and size & (size - 1) == 0, "bad page size")
    usable = size - header[20]
    _require(usable >= 480, "bad reserved size")
    versions = {1, 2} if immutable else {1}
    _require(versions.issuperset(header[18:20]), "WAL mode or unknown version")
    _require(header[21:24] == b"\x40\x20\x20", "bad payload fractions")
    return size, usable


class _Batch(NamedTuple):
    """Leaves to read at once: page numbers; the wanted rows, None for all `height`."""

    leaves: _Ints
    rows: _Ints | None = None
    height: int = 0


class _Parts:
    """Columns of batches, put together at the end."""

    def __init__(self, columns: Sequence[int], narrow: Collection[int]) -> None:
        self._types = [np.int32 if c in narrow else np.int64 for c in columns]
        # Parts in the width that they are stored in, or None where all are valid.
        self._values: list[list[_Array]] = [[] for _ in columns]
        self._valid: list[list[tuple[int, _Array | None]]] = [[] for _ in columns]

    def add(self, found: list[IntColumn]) -> None:
        """The columns of the next batch."""
        for values, valid, (data, some) in zip(
            self._values, self._valid, found, strict=True
        ):
            values.append(data)
            valid.append((len(data), some))

    def joined(self) -> list[IntColumn]:
        """All of each column."""
        columns: list[IntColumn] = []
        for dtype, valid in zip(self._types, self._valid, strict=True):
            # Nothing is twice in memory for longer than its turn.
            columns.append(
                IntColumn(_joined(self._values.pop(0), dtype), _all_valid(valid))
            )
        return columns


def _mapped(make: Callable[[_Batch], _T], batches: Sequence[_Batch]) -> Iterable[_T]:
    """What ``make`` gives for each batch, in their order; in threads if that pays.

    Nearly all of the time is numpy's, which works side by side.
    """
    threads = min(_MOST_THREADS, cpus(), len(batches) // _BATCHES_A_THREAD)
    if threads < 2:
        yield from map(make, batches)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        made: deque[Future[_T]] = deque()
        try:
            for batch in batches:
                made.append(pool.submit(make, batch))
                # What is not taken as fast as it is made would fill the memory.
                if len(made) > 2 * threads:
                    yield made.popleft().result()
            while made:
                yield made.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _joined(parts: list[_Array], dtype: type[np.signedinteger[Any]]) -> _Array:
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype)


def _all_valid(
    parts: list[tuple[int, _Array | None]],
) -> npt.NDArray[np.bool_] | None:
    """Join the parts; None if every value is valid."""
    if all(some is None for _, some in parts):
        return None
    return np.concatenate(
        [np.ones(rows, np.bool_) if some is None else some for rows, some in parts]
    )


def _require(holds: bool | np.bool_, problem: str) -> None:
    if not holds:
        raise UnsupportedLayout(problem)


def _cell_counts(pages: _Bytes, kind: int, at: int, usable: int) -> _Ints:
    """Return how many cells each page has; all must be of this kind."""
    head = pages[:, at : at + 5]
    _require((head[:, 0] == kind).all(), "not a page of a rowid table")
    counts: _Ints = head[:, 3].astype(np.int64) << 8 | head[:, 4]
    # A cell is at least 4 bytes, and 2 for its pointer.
    _require(at + 8 + 6 * counts.max() <= usable, "too many cells")
    return counts


def _cell_starts(pages: _Bytes, counts: _Ints, array: int, usable: int) -> _Ints:
    """Return the offsets of all cells in the flattened `pages`, page by page."""
    size, most = pages.shape[1], int(counts.max())
    pointers = pages[:, array : array + 2 * most].view(">u2")
    starts = pointers[np.arange(most) < counts[:, None]].astype(np.int64)
    _require(starts.min(initial=array) >= array, "cell in the page header")
    _require(starts.max(initial=0) <= usable - 4, "cell off the page")
    starts += np.repeat(np.arange(0, pages.size, size), counts)
    return starts


def _fields(
    buffer: _Bytes, starts: _Ints, size: int, usable: int, wanted: Collection[int]
) -> Iterator[tuple[int, _Bytes, _Array]]:
    """Yield each wanted column of these cells with its serial types and values."""
    if not starts.size:
        return
    words = np.ndarray((buffer.size - 7,), ">i8", buffer, 0, (1,))
    payload, length = _varints(buffer, words, starts)
    _require(payload.max() <= usable - 35, "overflow page")
    record = starts + length
    record += _varint_lengths(words[record])
    header, length = _varints(buffer, words, record)
    end, body, at = record + payload, record + header, record + length
    _require((end <= (starts & -size) + usable).all(), "record off its page")
    _require((body <= end).all(), "record header longer than the record")
    last = max(wanted)
    _require((at + last < body).all(), "record with too few columns")
    field = body.copy()
    for column in range(last + 1):
        kind = buffer.take(at)
        most = kind.max()
        if most < 128:
            at += 1
            width = _WIDTH[most] if kind.min() == most else _WIDTH.take(kind)
        else:
            types, length = _varints(buffer, words, at)
            at += length
            _require((at + last - column <= body).all(), "record with too few columns")
            small = _WIDTH.take(types, mode="clip")
            width = np.where(types < _BLOB, small, (types - _BLOB) >> 1)
        if column in wanted:
            plain = most <= _ONE and not (kind == _REAL).any()
            _require(plain, f"more than integers in column {column}")
            _require((field + width <= end).all(), "field off its record")
            yield column, kind, _integers(buffer, words, field, kind, width)
        field += width


def _integers(
    buffer: _Bytes, words: _Array, field: _Ints, kind: _Bytes, width: _Array
) -> _Array:
    """Return the integers of these serial types at these offsets."""
    one: _Array = kind == _ONE
    if width.max() == 0:
        return one
    if width.max() == 1:
        data: _Array = buffer.view(np.int8).take(field)
    else:
        data = words[field] >> (_SHIFT.take(kind) if width.ndim else _SHIFT[kind[0]])
    return data if width.min() else np.where(width == 0, one, data)


def _varints(buffer: _Bytes, words: _Array, at: _Ints) -> tuple[_Ints, _Ints]:
    """Return the values of the varints at these offsets and their lengths in bytes."""
    values = buffer.take(at).astype(np.int64)
    lengths = np.ones_like(values)
    wide = np.flatnonzero(values >= 128)
    if wide.size:
        word = words[at[wide]]
        lengths[wide] = length = _varint_lengths(word)
        # Nothing on a page of 65536 bytes needs more.
        _require(length.max() <= 4, "varint too large")
        value = np.zeros_like(length)
        for i in range(4):
            digit = word >> (56 - 8 * i) & 127
            value = np.where(i < length, value << 7 | digit, value)
        values[wide] = value
    return values, lengths


def _varint_lengths(word: _Array) -> _Ints:
    """Return the length of the varint at the top of each big-endian word."""
    stops = ~word.view(">u8") & np.uint64(0x8080808080808080)
    lengths = np.ones(word.size, np.int64)
    for shift in range(63, 0, -8):
        more = stops < np.uint64(1 << shift)
        if not more.any():
            break
        lengths += more
    return lengths

"""Read integer columns of a SQLite table from its pages, without a cursor.

A cursor makes one Python object per value, which is most of the time a large trace
takes to load. The file format is fixed and small, so numpy decodes whole batches of
leaf pages. What is not of the plain shape raises `UnsupportedLayout`, and the caller
takes a cursor. The file is untrusted: no offset is followed unchecked.
"""

from __future__ import annotations

import mmap
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]
_Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]

_INTERIOR, _LEAF = 5, 13
_MAX_DEPTH = 20
# About the size of an L2 cache: every column of a batch reads it again.
_BATCH_BYTES = 2 << 20
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

    `values` is int64 of shape (rows,), 0 where NULL. `valid` is bool of the same
    shape, or None if no row is NULL.
    """

    values: _Ints
    valid: npt.NDArray[np.bool_] | None


class PageFile:
    """A SQLite file, mapped read-only; nobody may truncate it while it is open."""

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
        with path.open("rb") as file:
            header = file.read(100)
            _require(len(header) == 100, "no SQLite header")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        _require(header.startswith(b"SQLite format 3\0"), "no SQLite header")
        size = int.from_bytes(header[16:18], "big")
        size = 65536 if size == 1 else size
        _require(size >= 512 and size & (size - 1) == 0, "bad page size")
        self._usable = size - header[20]
        _require(self._usable >= 480, "bad reserved size")
        versions = {1, 2} if immutable else {1}
        _require(versions.issuperset(header[18:20]), "WAL mode or unknown version")
        _require(header[21:24] == b"\x40\x20\x20", "bad payload fractions")
        count, present = int.from_bytes(header[28:32], "big"), len(self._map) // size
        # A writer older than SQLite 3.7 leaves the page count stale.
        if count == 0 or header[24:28] != header[92:96]:
            count = present
        _require(0 < count <= present, "file shorter than its page count")
        flat = np.frombuffer(self._map, np.uint8, count * size)
        self._pages: _Bytes | None = flat.reshape(count, size)

    def __enter__(self) -> PageFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; columns already read stay usable."""
        self._pages = None
        # A traceback in flight may hold a view; the map is then freed with it.
        with suppress(BufferError):
            self._map.close()

    def read_int_columns(
        self, root_page: int, columns: Sequence[int]
    ) -> list[IntColumn]:
        """Read integer columns of the table whose b-tree starts at `root_page`.

        A column is its position in CREATE TABLE. Never ask for an INTEGER PRIMARY KEY
        (stored as NULL, so it reads as NULL), for a column declared REAL (whole numbers
        are stored as integers there), or in a table with VIRTUAL generated columns
        (not stored, so they shift the others).

        Raises UnsupportedLayout if a cell holds anything but an integer or NULL, spills
        to an overflow page or lacks the column, or if the pages are damaged.
        """
        if self._pages is None or min(columns, default=0) < 0:
            raise ValueError("closed file or negative column")
        if not columns:
            return []
        leaves, cells = _leaves(self._pages, self._usable, root_page)
        rows, size = int(cells.sum()), self._pages.shape[1]
        # A row takes a pointer, three lengths and a byte per column, so damaged counts
        # cannot ask for more than 8 bytes per byte of the file.
        spent = rows * (max(columns) + 6)
        _require(spent <= leaves.size * self._usable, "too many cells")
        values = {column: np.empty(rows, np.int64) for column in columns}
        valid: dict[int, npt.NDArray[np.bool_]] = {}
        batch = min(_BATCH_BYTES // size, leaves.size)
        buffer = np.zeros(batch * size + _PADDING, np.uint8)
        array = 108 if leaves[0] == 0 else 8
        row = 0
        for i in range(0, leaves.size, batch):
            counts = cells[i : i + batch]
            pages = buffer[: counts.size * size].reshape(-1, size)
            self._pages.take(leaves[i : i + batch], axis=0, out=pages, mode="clip")
            if hasattr(mmap, "MADV_DONTNEED"):
                # Pages read once would else count as resident memory until close.
                self._map.madvise(mmap.MADV_DONTNEED)
            starts = _cell_starts(pages, counts, array, self._usable)
            now = slice(row, row + starts.size)
            for column, kind, data in _fields(
                buffer, starts, size, self._usable, values
            ):
                values[column][now] = data
                if kind.min() == _NULL:
                    if column not in valid:
                        valid[column] = np.ones(rows, np.bool_)
                    valid[column][now] = kind != _NULL
            row += starts.size
        return [IntColumn(values[column], valid.get(column)) for column in columns]


def _require(holds: bool | np.bool_, problem: str) -> None:
    if not holds:
        raise UnsupportedLayout(problem)


def _leaves(pages: _Bytes, usable: int, root: int) -> tuple[_Ints, _Ints]:
    """Return a table's leaves in key order, as rows of `pages`, and their cell counts.

    Goes down level by level: in a b-tree all leaves have the same depth.
    """
    seen = np.zeros(len(pages), np.bool_)
    level, at, total = np.array([root - 1]), 100 if root == 1 else 0, 0
    for _ in range(_MAX_DEPTH):
        inside = level.min() >= 0 and level.max() < len(pages)
        _require(inside, "page number out of range")
        seen[level] = True
        total += level.size
        _require(np.count_nonzero(seen) == total, "page linked twice")
        head = pages[level, at : at + 5]
        cells = head[:, 3].astype(np.int64) << 8 | head[:, 4]
        leaf = bool((head[:, 0] == _LEAF).all())
        plain = leaf or (head[:, 0] == _INTERIOR).all()
        _require(plain, "not a page of a rowid table")
        # A cell is at least 4 bytes, and 2 for its pointer.
        _require(at + 8 + 6 * cells.max() <= usable, "too many cells")
        if leaf:
            return level, cells
        _require(total + cells.sum() + level.size <= len(pages), "too many pages")
        children = []
        for i, page in enumerate(level.tolist()):
            one = pages[page : page + 1]
            links = _cell_starts(one, cells[i : i + 1], at + 12, usable)
            links = np.append(links, at + 8)[:, None] + np.arange(4)
            children.append(one[0, links].view(">u4")[:, 0])
        level, at = np.concatenate(children).astype(np.int64) - 1, 0
    raise UnsupportedLayout("b-tree too deep")


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

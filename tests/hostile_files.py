"""Files of a megabyte that ask a reader, a rule or a reporter for far more."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from tracebuilder import TraceBuilder

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
SYNCS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
PAGE = 1024
MEGABYTE = 1_000_000
PID = 100
GLOBAL_PID = 1 << 48 | PID << 24
Maker = Callable[[Path], None]


def trace(path: Path) -> Path:
    """A sound trace of a few kernels with a wait, names and ranges."""
    builder = TraceBuilder()
    builder.stream(13)
    builder.stream(14, flag=2)
    for i in range(20):
        builder.kernel(
            f"step{i % 3}", stream=13 + i % 2, start=20 + 10 * i, end=25 + 10 * i
        )
    builder.sync("cudaStreamSynchronize", stream=13, start=230, end=240)
    builder.nvtx("train", 10, 300)
    return builder.write(path)


def change(path: Path, *statements: str) -> None:
    """Run these scripts on the file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.executescript(statement)


def fill(path: Path, table: str, columns: str, rows: Iterable[tuple[Any, ...]]) -> None:
    """Replace the table by one of these columns alone, which makes rows short."""
    names = columns.split()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"DROP TABLE IF EXISTS {table}")
        declared = ", ".join(f'"{name}" INTEGER' for name in names)
        db.execute(f"CREATE TABLE {table} ({declared})")
        marks = ", ".join("?" * len(names))
        db.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        db.commit()
        db.execute("VACUUM")


def small_pages(path: Path) -> bytearray:
    """The file in pages of `PAGE` bytes."""
    change(path, f"PRAGMA page_size={PAGE}; VACUUM")
    return bytearray(path.read_bytes())


def root_of(path: Path, table: str) -> int:
    """Where the table's root page starts."""
    with closing(sqlite3.connect(path)) as db:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        return (int(db.execute(query, (table,)).fetchone()[0]) - 1) * PAGE


def write(path: Path, data: bytearray) -> None:
    """Write the pages, with their number in the file's head."""
    data[28:32] = (len(data) // PAGE).to_bytes(4, "big")
    path.write_bytes(data)


def explode(path: Path, table: str, depth: int, fan_out: int = 120) -> None:
    """Make a table's tree a tower of pages, each the only child of the one above.

    Each is its parent's child ``fan_out`` times, so that rows are repeated
    ``fan_out ** depth`` times.
    """
    data = small_pages(path)
    root = leaf = root_of(path, table)
    while data[leaf] == 5:
        leaf = (int.from_bytes(data[leaf + 8 : leaf + 12], "big") - 1) * PAGE
    last = bytes(data[leaf : leaf + PAGE])
    first = len(data) // PAGE + 1
    for level in range(depth):
        page = bytearray(PAGE)
        page[PAGE - 5 :] = cell = (first + level).to_bytes(4, "big") + b"\x01"
        page[:12] = b"\x05\0\0" + fan_out.to_bytes(2, "big") + b"\0\0\0" + cell[:4]
        page[12 : 12 + 2 * fan_out] = (PAGE - 5).to_bytes(2, "big") * fan_out
        if level == 0:
            data[root : root + PAGE] = page
        else:
            data += page
    write(path, data + last)


def share_text(path: Path, length: int = 800_000) -> None:
    """Many rows whose texts are on the same overflow pages."""
    change(
        path,
        "DROP TABLE StringIds; CREATE TABLE StringIds (id INTEGER, value TEXT)",
        f"INSERT INTO StringIds VALUES (1, printf('%.{length}c', 'x'))",
    )
    data = small_pages(path)
    page, rows = root_of(path, "StringIds"), 150
    data[page + 3 : page + 5] = rows.to_bytes(2, "big")
    data[page + 8 : page + 8 + 2 * rows] = data[page + 8 : page + 10] * rows
    write(path, data)


def share_blob(path: Path) -> None:
    """The same with blobs, where rules look for call stacks."""
    change(
        path,
        "DROP TABLE NVTX_EVENTS; CREATE TABLE NVTX_EVENTS (start INTEGER, eventType "
        "INTEGER, text TEXT, binaryData BLOB)",
        "INSERT INTO NVTX_EVENTS VALUES (1, 34, 'x', zeroblob(700000))",
    )
    data = small_pages(path)
    page, rows = root_of(path, "NVTX_EVENTS"), 150
    data[page + 3 : page + 5] = rows.to_bytes(2, "big")
    data[page + 8 : page + 8 + 2 * rows] = data[page + 8 : page + 10] * rows
    write(path, data)


def _many_tables(path: Path) -> None:
    change(path, *(f"CREATE TABLE t{i} (a)" for i in range(100)))
    names = (
        f"('table', 'x{i}', 'x{i}', 2, 'CREATE TABLE x{i} (a)')" for i in range(6000)
    )
    change(
        path,
        "PRAGMA writable_schema=ON; INSERT INTO sqlite_master VALUES "
        + ", ".join(names),
    )


def _endless_view(path: Path) -> None:
    change(
        path,
        f"DROP TABLE {KERNELS}; CREATE VIEW {KERNELS} AS WITH RECURSIVE n(i) AS "
        "(SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS start, i AS end, "
        "7 AS streamId FROM n",
    )


def _generated(path: Path) -> None:
    change(
        path,
        f"ALTER TABLE {KERNELS} RENAME COLUMN shortName TO other",
        f"ALTER TABLE {KERNELS} ADD COLUMN shortName AS "
        "(length(hex(zeroblob(300000000))))",
    )


def _deep_json(path: Path) -> None:
    text = '{\\"Python Backtrace on CUDA\\":' + "[" * 400_000
    with closing(sqlite3.connect(path)) as db:
        for kind in (34, 75):
            db.execute(
                "INSERT INTO NVTX_EVENTS (start, eventType, text, domainId, globalTid, "
                "jsonText) VALUES (5, ?, 'Python Backtrace on CUDA', 3, ?, ?)",
                (kind, GLOBAL_PID | 101, text),
            )
        db.commit()


def _long_names(path: Path) -> None:
    name = "\x1b[31m\u202e<b>" * 60_000
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "UPDATE StringIds SET value = ? WHERE value LIKE 'step%'", (name[:1],)
        )
        db.execute(
            "UPDATE StringIds SET value = ? WHERE id = (SELECT min(shortName) FROM "
            f"{KERNELS})",
            (name,),
        )
        db.commit()


def _kernels(count: int, *, streams: int = 1, pids: int = 1, length: int = 5) -> Maker:
    """Short rows of kernels; ``length`` over 10 lets them run at once."""

    def make(path: Path) -> None:
        rows = (
            (
                10 * i + 5,
                10 * i + 5 + length,
                i % streams,
                GLOBAL_PID + (i % pids << 24),
            )
            for i in range(count)
        )
        fill(path, KERNELS, "start end streamId globalPid", rows)

    return make


def _launches(
    count: int, *, streams: int = 1, threads: int = 1, pids: int = 1
) -> Maker:
    """Kernels with the calls that launched them, and a wait for every eighth."""

    def make(path: Path) -> None:
        with closing(sqlite3.connect(path)) as db:
            names = dict(db.execute("SELECT value, id FROM StringIds"))
        launch = next(k for n, k in names.items() if n.startswith("cudaLaunchKernel"))
        wait = next(k for n, k in names.items() if n.startswith("cudaStreamSync"))
        owner = [GLOBAL_PID + (i % pids << 24) for i in range(count)]
        kernels = (
            (20 * i + 9, 20 * i + 60, i % streams, i, owner[i]) for i in range(count)
        )
        calls = (
            (
                *(20 * i + 1, 20 * i + 8, owner[i] | 101 + i % threads, i),
                *(wait if i % 8 == 0 else launch, 0, 0),
            )
            for i in range(count)
        )
        columns = "start end globalTid correlationId nameId returnValue eventClass"
        fill(path, KERNELS, "start end streamId correlationId globalPid", kernels)
        fill(path, CALLS, columns, calls)

    return make


def _ranges(count: int) -> Maker:
    """NVTX ranges, each inside the one before."""

    def make(path: Path) -> None:
        _launches(3_000)(path)
        rows = ((i, 10**9 - i, 59, GLOBAL_PID | 101, 2 + i % 20) for i in range(count))
        fill(path, "NVTX_EVENTS", "start end eventType globalTid textId", rows)

    return make


def _messages(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "CREATE TABLE IF NOT EXISTS DIAGNOSTIC_EVENT (timestamp INTEGER, severity "
            "INTEGER, text TEXT)"
        )
        rows = ((i, 3, f"\x1b[31m {i} CUDA [/] events lost") for i in range(20_000))
        db.executemany(
            "INSERT INTO DIAGNOSTIC_EVENT (timestamp, severity, text) VALUES (?, ?, ?)",
            rows,
        )
        db.commit()


FILES: dict[str, Maker] = {
    "many-tables": _many_tables,
    "endless-view": _endless_view,
    "generated-column": _generated,
    "exploding-tree": lambda path: explode(path, KERNELS, 15),
    "exploding-strings": lambda path: explode(path, "StringIds", 3),
    "shared-text": share_text,
    "shared-blob": share_blob,
    "deep-json": _deep_json,
    "long-names": _long_names,
    "messages": _messages,
    "kernels": _kernels(40_000),
    "kernels-at-once": _kernels(40_000, streams=50, length=100_000),
    "streams": _kernels(40_000, streams=40_000),
    "streams-at-once": _kernels(40_000, streams=40_000, length=10**6),
    "processes": _kernels(30_000, pids=30_000),
    "some-processes": _launches(10_000, pids=80),
    "launches": _launches(12_000),
    "launches-on-streams": _launches(12_000, streams=14_000),
    "launches-by-threads": _launches(12_000, threads=14_000),
    "nested-ranges": _ranges(20_000),
}


def make(kind: str, path: Path) -> Path:
    """Write the file of this kind; at most about a megabyte."""
    FILES[kind](trace(path))
    return path

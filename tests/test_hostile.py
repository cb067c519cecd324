"""Files made to break a reader: each ends in an error, or in what it truly holds."""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tracebuilder import TraceBuilder

from streamlint.errors import TraceError
from streamlint.trace import open_trace
from streamlint.trace.contents import contents
from streamlint.trace.pages import PageFile, UnsupportedLayout
from streamlint.trace.reader import ExportFile, Unavailable
from streamlint.trace.redact import redact
from streamlint.trace.stacks import (
    PYTHON_BACKTRACE_DOMAIN,
    decode_blob,
    decode_json,
    encode_blob,
    encode_json,
)
from streamlint.trace.untrusted import MAX_TEXT, Connection

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
STREAMS = "TARGET_INFO_CUDA_STREAM"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sound trace of a few kernels with names and ranges."""
    builder = TraceBuilder()
    builder.stream(13)
    for i in range(20):
        builder.kernel(f"step{i % 3}", stream=13, start=20 + 10 * i, end=25 + 10 * i)
    builder.nvtx("train", 10, 300)
    return builder.write(tmp_path / "trace.sqlite")


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            db.executescript(statement)


def rows(path: Path, name: str) -> list[tuple[object, ...]]:
    """What the page reader and a cursor both read."""
    with closing(ExportFile(path)) as file:
        file.by_pages = True
        loaded = file.load(name)
        file.by_pages = False
        again = file.load(name)
    assert not isinstance(loaded, Unavailable)
    assert not isinstance(again, Unavailable)
    assert again.rows() == loaded.rows()
    return loaded.rows()


def refusal(path: Path, name: str = "kernels") -> TraceError:
    with pytest.raises(TraceError) as caught:
        rows(path, name)
    assert caught.value.hint
    assert path.name in caught.value.message
    return caught.value


# Something else where nsys writes a table --------------------------------------------


def schema(new: str) -> str:
    text = new.replace("'", "''")
    return (
        "PRAGMA writable_schema=ON; UPDATE sqlite_master SET "
        f"sql = '{text}' WHERE name = '{KERNELS}'"
    )


@pytest.mark.parametrize(
    "statement",
    [
        f"ALTER TABLE {KERNELS} RENAME TO k; CREATE VIEW {KERNELS} AS SELECT * FROM k",
        f"DROP TABLE {KERNELS}; CREATE VIRTUAL TABLE {KERNELS} USING fts4(start, end)",
        schema(f"CREATE VIEW {KERNELS} AS SELECT 1 AS start, 2 AS end"),
        schema(f"CREATE VIRTUAL TABLE {KERNELS} USING fts4(start)"),
        schema("CREATE TABLE other (start INTEGER)"),
        f"PRAGMA writable_schema=ON; UPDATE sqlite_master SET type = 'view' "
        f"WHERE name = '{KERNELS}'",
    ],
    ids=["view", "virtual", "hidden-view", "hidden-virtual", "other-name", "type"],
)
def test_what_passes_for_a_table_is_refused(path: Path, statement: str) -> None:
    change(path, statement)
    message = refusal(path).message
    # SQLite finds some of them itself, depending on its version.
    if "is damaged" not in message:
        assert f"no table {KERNELS} but something else" in message


def test_a_generated_column_is_never_computed(path: Path) -> None:
    change(
        path,
        f"DROP TABLE {STREAMS}; CREATE TABLE {STREAMS} (streamId INTEGER, processId "
        "INTEGER, contextId INTEGER, flag AS (length(zeroblob(900000000))), "
        "priority INTEGER)",
        f"INSERT INTO {STREAMS} VALUES (13, 100, 1, 5)",
    )
    assert rows(path, "streams") == [(13, 100, 1, 5, None)]


def test_triggers_and_indexes_change_nothing(path: Path) -> None:
    before = rows(path, "kernels")
    change(
        path,
        f"CREATE TRIGGER x AFTER INSERT ON {KERNELS} BEGIN DELETE FROM StringIds; END",
        f"CREATE INDEX y ON {KERNELS} (start % 7)",
        f'CREATE TRIGGER "{KERNELS}" AFTER INSERT ON StringIds BEGIN SELECT 1; END',
    )
    assert rows(path, "kernels") == before


def test_names_that_need_quoting(path: Path) -> None:
    before = rows(path, "kernels")
    names = ('a"b', "a'; DROP TABLE StringIds; --", "a]b`c", "\x1b[31m", "ü\n")
    quoted = ['"' + name.replace('"', '""') + '"' for name in names]
    change(path, *(f"CREATE TABLE {name} ({name} TEXT)" for name in quoted))
    change(path, *(f"ALTER TABLE {KERNELS} ADD COLUMN {name}" for name in quoted))
    assert rows(path, "kernels") == before
    with closing(ExportFile(path)) as file:
        assert set(names) < set(file.table_names)


# What the connection lets a file do ---------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "ATTACH 'other.sqlite' AS other",
        "SELECT load_extension('x')",
        "SELECT randomblob(10)",
        "SELECT printf('%.*c', 900000000, 'x')",
        "PRAGMA writable_schema=ON",
        "PRAGMA query_only=OFF",
        "PRAGMA trusted_schema=ON",
        f"DELETE FROM {KERNELS}",
        "CREATE TEMP TABLE x (y)",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n) SELECT i FROM n",
        "SELECT * FROM v",
        "SELECT * FROM pragma_table_info('StringIds')",
    ],
)
def test_nothing_but_reading_tables_is_allowed(path: Path, query: str) -> None:
    change(path, f"CREATE VIEW v AS SELECT start FROM {KERNELS}")
    uri = f"file:{path}?mode=ro"
    with closing(Connection(path, uri, original=path, name="it")) as connection:
        with pytest.raises(TraceError, match="it is damaged"), connection.reading():
            connection.rows(query)
        with connection.reading():
            assert connection.rows("SELECT 1") == [(1,)]


# Trees and lengths that lie -----------------------------------------------------------

PAGE = 512


def pages(path: Path) -> tuple[bytearray, int]:
    """The file in small pages, and where the root page of the kernels starts."""
    change(path, f"PRAGMA page_size={PAGE}; VACUUM")
    with closing(sqlite3.connect(path)) as db:
        (root,) = db.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = ?", (KERNELS,)
        ).fetchone()
    return bytearray(path.read_bytes()), (root - 1) * PAGE


def write(path: Path, data: bytearray) -> None:
    data[28:32] = (len(data) // PAGE).to_bytes(4, "big")
    path.write_bytes(data)


def explode(data: bytearray, root: int, depth: int, fan_out: int = 60) -> None:
    """Make the root a tower of pages, each many times the parent of the next."""
    leaf = bytes(data[root : root + PAGE])
    first = len(data) // PAGE + 1
    for level in range(depth):
        page = bytearray(PAGE)
        cell = (first + level).to_bytes(4, "big") + b"\x01"
        page[PAGE - 5 :] = cell
        page[:12] = b"\x05\0\0" + fan_out.to_bytes(2, "big") + b"\0\0\0" + cell[:4]
        page[12 : 12 + 2 * fan_out] = (PAGE - 5).to_bytes(2, "big") * fan_out
        if level == 0:
            data[root : root + PAGE] = page
        else:
            data += page
    data += leaf


@pytest.mark.parametrize("depth", [3, 12, 30])
def test_a_page_that_is_many_pages_child(path: Path, depth: int) -> None:
    data, root = pages(path)
    if data[root] == 5:  # its first leaf will do
        child = int.from_bytes(data[root + 8 : root + 12], "big")
        data[root : root + PAGE] = data[(child - 1) * PAGE : child * PAGE]
    explode(data, root, depth)
    write(path, data)
    assert "is damaged" in refusal(path).message
    if depth > 3:
        with pytest.raises(TraceError, match="is damaged"):
            contents(path)


def test_a_page_that_is_its_own_child(path: Path) -> None:
    data, root = pages(path)
    own = (root // PAGE + 1).to_bytes(4, "big")
    data[root : root + 12] = b"\x05\0\0\0\0\0\0\0" + own
    write(path, data)
    assert "is damaged" in refusal(path).message


def test_one_long_text_in_every_row(path: Path) -> None:
    """Every cell names the same overflow pages: 64 KiB of file, megabytes of text."""
    change(
        path, "DROP TABLE StringIds; CREATE TABLE StringIds (id INTEGER, value TEXT)"
    )
    long = "x" * 60_000
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA page_size={PAGE}")
        db.execute("INSERT INTO StringIds VALUES (1, ?)", (long,))
        db.commit()
    data, _ = pages(path)
    with closing(sqlite3.connect(path)) as db:
        (root,) = db.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'StringIds'"
        ).fetchone()
    page = (root - 1) * PAGE
    data[page + 3 : page + 5] = (70).to_bytes(2, "big")
    data[page + 8 : page + 8 + 140] = data[page + 8 : page + 10] * 70
    write(path, data)
    assert "more time or memory" in refusal(path).message


def test_a_default_that_every_short_row_repeats(path: Path) -> None:
    text = "y" * 50_000
    change(
        path,
        f"ALTER TABLE PROCESSES ADD COLUMN extra TEXT DEFAULT '{text}'",
        "ALTER TABLE PROCESSES RENAME COLUMN name TO old",
        "ALTER TABLE PROCESSES RENAME COLUMN extra TO name",
        *("INSERT INTO PROCESSES (globalPid, pid) VALUES (1, 1)" for _ in range(3)),
    )
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA writable_schema=ON")
        db.execute("DELETE FROM PROCESSES")
        db.commit()
    # A record of two columns takes the default for the rest.
    change(
        path,
        "ALTER TABLE PROCESSES RENAME TO p; CREATE TABLE PROCESSES (globalPid "
        "INTEGER, pid INTEGER); INSERT INTO PROCESSES SELECT 1, value FROM "
        "(WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 FROM n "
        "LIMIT 300) SELECT value FROM n); "
        f"ALTER TABLE PROCESSES ADD COLUMN name TEXT DEFAULT '{text}'",
    )
    assert "more time or memory" in refusal(path, "processes").message


@pytest.mark.parametrize("length", [b"\xff\xff\xff\xff\x7f", b"\xff" * 9])
def test_a_length_larger_than_the_file(path: Path, length: bytes) -> None:
    data, root = pages(path)
    if data[root] == 5:
        root = (int.from_bytes(data[root + 8 : root + 12], "big") - 1) * PAGE
    cell = root + int.from_bytes(data[root + 8 : root + 10], "big")
    data[cell : cell + len(length)] = length
    write(path, data)
    assert "is damaged" in refusal(path).message


# Values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "becomes"),
    [
        ("0.5", None),
        ("9223372036854775808", None),  # beyond 64 bits: SQLite stores a REAL
        ("9223372036854775807", None),  # beyond 32 bits
        ("'seven'", None),
        ("x'07'", None),
    ],
)
def test_a_number_that_is_none(path: Path, value: str, becomes: int | None) -> None:
    change(path, f"UPDATE {STREAMS} SET priority = {value}")
    assert {row[3] for row in rows(path, "streams")} == {becomes}


def test_whole_numbers_in_a_real_column_are_read_one_way(path: Path) -> None:
    """SQLite stores them as integers and returns fractions."""
    change(
        path,
        f"DROP TABLE {STREAMS}; CREATE TABLE {STREAMS} "
        "(streamId INTEGER, processId INTEGER, contextId INTEGER, priority REAL)",
        f"INSERT INTO {STREAMS} VALUES (13, 100, 1, 5)",
    )
    assert rows(path, "streams") == [(13, 100, 1, None, None)]


@pytest.mark.parametrize("column", ["start", "end"])
@pytest.mark.parametrize("time", [1 << 62, (1 << 63) - 1, -(1 << 62), -(1 << 63)])
def test_times_that_no_clock_shows_are_dropped(
    path: Path, column: str, time: int
) -> None:
    before = rows(path, "kernels")
    change(path, f'UPDATE {KERNELS} SET "{column}" = {time} WHERE rowid = 3')
    with closing(ExportFile(path)) as file:
        loaded = file.load("kernels")
        assert not isinstance(loaded, Unavailable)
        assert loaded.rows() == [*before[:2], *before[3:]]
        assert file.invalid_rows == {"kernels": 1}


def test_texts_that_are_none(path: Path) -> None:
    change(
        path,
        "INSERT INTO PROCESSES (globalPid, pid, name) VALUES "
        "(0, 1, CAST(x'61ff62' AS TEXT)), (0, 2, 'a' || char(0) || 'b'), "
        "(0, 3, x'6162')",
    )
    assert rows(path, "processes")[1:] == [
        (1, "a\ufffdb"),
        (2, "a\0b"),
        (3, None),
    ]


def test_a_text_of_100_mb_is_cut(path: Path) -> None:
    change(
        path,
        "INSERT INTO PROCESSES (globalPid, pid, name) "
        "VALUES (0, 1, replace(hex(zeroblob(50000000)), '0', 'n'))",
    )
    assert path.stat().st_size > 100_000_000
    assert rows(path, "processes")[-1] == (1, "n" * MAX_TEXT)


@pytest.mark.parametrize("key", [1 << 63, (1 << 64) - 1, -1, 1 << 40, -(1 << 63)])
def test_a_key_that_no_string_has(path: Path, key: int) -> None:
    with closing(open_trace(path)) as trace:
        assert trace.string(key) == "?"


BOMBS = (
    "[" * 100_000,
    '{"a":' * 100_000,
    "[" * 500 + "]" * 500,
    "9" * 100_000,
    encode_json([(1, 2, 3)] * 5_000),
    encode_json([(1 << 63, 2, 3)]),
    encode_json([(1, 2, 1 << 40)]),
    encode_json([(1, -2, 3)]),
    encode_json([(1, 2, 3)]).replace("3", "1e999"),
    encode_json([(1, 2, 3)]).replace("3", "NaN"),
    f'{{"{PYTHON_BACKTRACE_DOMAIN}": {{"Frames": "abc"}}}}',
    f'{{"{PYTHON_BACKTRACE_DOMAIN}": {{"Frames": {{"a": 1}}}}}}',
    "\0",
    "",
)


@pytest.mark.parametrize("text", BOMBS, ids=range(len(BOMBS)))
def test_json_that_is_no_stack(text: str) -> None:
    assert decode_json(text) == []


def test_blobs_that_are_no_stack() -> None:
    whole = encode_blob([(1, 2, 3), (4, 5, 6)])
    assert decode_blob(whole) == [(1, 2, 3), (4, 5, 6)]
    assert decode_blob(encode_blob([(1 << 63, 2, 3)])) == []
    for length in range(len(whole)):
        assert decode_blob(whole[:length]) == []
    for at in range(8, 48):
        for value in (0x00, 0x7F, 0xFF):
            damaged = bytearray(whole)
            damaged[at] = value
            assert len(decode_blob(bytes(damaged))) <= 2


# The file itself ----------------------------------------------------------------------


def test_a_link_to_a_trace_is_read(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.sqlite"
    link.symlink_to(path)
    assert rows(link, "kernels") == rows(path, "kernels")


@pytest.mark.parametrize("name", [b"\xff\xfe.sqlite", b"a%20?#b.sqlite", b"\x1b[0m\n"])
def test_a_file_of_any_name(path: Path, tmp_path: Path, name: bytes) -> None:
    other = tmp_path / os.fsdecode(name)
    path.rename(other)
    assert len(rows(other, "kernels")) == 20


def test_a_socket_and_a_device(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        for odd in (path, Path("/dev/zero"), Path("/dev/null")):
            with pytest.raises(TraceError, match="not a regular file"):
                open_trace(odd)


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2_000)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0" * 4096)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 0))


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    status = path.stat()
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("table", ["kernels", "processes", "nvtx_events"])
@pytest.mark.parametrize("act", [cut, grow, touch, replace, Path.unlink])
def test_a_file_changed_while_it_is_read(
    path: Path, act: Callable[[Path], None], table: str
) -> None:
    with closing(ExportFile(path)) as file:
        file.by_pages = True
        file.load("runtime_calls")
        act(path)
        with pytest.raises(TraceError, match="was changed while it was read") as caught:
            file.load(table)
    assert "run streamlint again" in caught.value.hint


def test_a_file_cut_off_under_the_page_reader(path: Path) -> None:
    """A mapped file would end the process here, with SIGBUS."""
    _, root = pages(path)
    with PageFile(path) as file:
        cut(path)
        with pytest.raises(UnsupportedLayout, match="cut off"):
            file.read_int_columns(root // PAGE + 1, [0])


# Copies -------------------------------------------------------------------------------


def test_a_copy_of_a_tree_without_end_is_refused(path: Path, tmp_path: Path) -> None:
    data, root = pages(path)
    if data[root] == 5:
        child = int.from_bytes(data[root + 8 : root + 12], "big")
        data[root : root + PAGE] = data[(child - 1) * PAGE : child * PAGE]
    explode(data, root, 12)
    write(path, data)
    with pytest.raises(TraceError, match="is damaged"):
        redact(path, tmp_path / "copy.sqlite")
    assert not (tmp_path / "copy.sqlite").exists()


def test_a_copy_knows_no_more_people_than_there_can_be(
    path: Path, tmp_path: Path
) -> None:
    people = ", ".join(f"('EXPORT_USER', 'someone{i}')" for i in range(20_000))
    change(path, f"INSERT INTO META_DATA_EXPORT (name, value) VALUES {people}")
    with pytest.raises(TraceError, match="too many to be true"):
        redact(path, tmp_path / "copy.sqlite")

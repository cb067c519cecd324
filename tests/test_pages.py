"""The page reader agrees with sqlite3 or refuses; damage never gets further."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamlint.trace import pages
from streamlint.trace.pages import Chosen, PageFile, UnsupportedLayout

PAGE_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
# Both ends of every storage width, and the values stored without a body.
EDGES = sorted(
    {0, 1, -1, 2, 127, 128}
    | {sign * (1 << bits) for bits in (7, 15, 23, 31, 47, 62) for sign in (1, -1)}
    | {(1 << bits) - 1 for bits in (7, 15, 23, 31, 47, 63)}
    | {-(1 << bits) - 1 for bits in (7, 15, 23, 31, 47)}
    | {-(1 << 63)}
)


@contextmanager
def connect(path: Path, page_size: int = 4096) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA page_size={page_size}")
        db.execute("PRAGMA journal_mode=MEMORY")
        db.execute("PRAGMA synchronous=OFF")
        yield db
        db.commit()


def root(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as db:
        found = db.execute("SELECT rootpage FROM sqlite_master WHERE name=?", (table,))
        return int(found.fetchone()[0])


def fast(path: Path, table: str, columns: Sequence[int]) -> list[list[int | None]]:
    page = root(path, table)
    with PageFile(path) as file:
        read = file.read_int_columns(page, columns)
    for column in read:
        assert column.values.dtype == np.int64
        if column.valid is not None:
            assert not column.valid.all()
            assert not column.values[~column.valid].any()
    return [
        [
            value if column.valid is None or column.valid[i] else None
            for i, value in enumerate(column.values.tolist())
        ]
        for column in read
    ]


def slow(path: Path, table: str, columns: Sequence[int]) -> list[list[Any]]:
    with closing(sqlite3.connect(path)) as db:
        db.text_factory = bytes
        rows = db.execute(f"SELECT * FROM {table} ORDER BY rowid").fetchall()
    return [[row[column] for row in rows] for column in columns]


def agrees(path: Path, table: str, columns: Sequence[int]) -> bool:
    """Whether the fast path took the table; fails if it took it and was wrong."""
    try:
        got = fast(path, table, columns)
    except UnsupportedLayout:
        return False
    want = slow(path, table, columns)
    # 2.0 == 2 and a blob is no integer: a wrong type is a wrong value.
    assert {type(v) for column in want for v in column} <= {int, type(None)}
    assert got == want
    return True


def edge_rows(count: int) -> list[tuple[Any, ...]]:
    rng = random.Random(count)
    return [
        (
            rng.choice(EDGES),
            rng.choice(["", "kernel", "n" * 57, "n" * 58, "é" * 60]),
            rng.choice([*EDGES, None]),
            rng.choice([0.5, None, 3.0]),
            rng.choice([0, 1]),
            rng.choice([b"", b"\xff" * 63, b"\x80" * 70, None]),
            i,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("count", [0, 1, 3000])
def test_reads_every_width_between_other_columns(
    tmp_path: Path, page_size: int, count: int
) -> None:
    path = tmp_path / "t.sqlite"
    with connect(path, page_size) as db:
        db.execute("CREATE TABLE t(a INT, s TEXT, b INT, r REAL, c INT, x BLOB, d INT)")
        db.execute("CREATE TABLE other(a INT)")
        for row in edge_rows(count):
            db.execute("INSERT INTO t VALUES (?,?,?,?,?,?,?)", row)
            # Interleaves the pages of both tables.
            db.execute("INSERT INTO other VALUES (?)", row[:1])
    # On a small page the longest rows overflow.
    assert agrees(path, "t", [0, 2, 4, 6]) or (page_size == 512 and count > 1)
    assert agrees(path, "other", [0])
    for column in (0, 2, 4, 6):
        agrees(path, "t", [column])
    for column in (1, 3, 5):
        assert not agrees(path, "t", [column]) or count < 2


def test_reads_columns_in_the_order_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with connect(path) as db:
        db.execute("CREATE TABLE t(a INT, b INT, c INT)")
        db.execute("INSERT INTO t VALUES (1, 2, 3)")
    assert fast(path, "t", [2, 0, 2]) == [[3], [1], [3]]
    assert fast(path, "t", []) == []


@pytest.mark.parametrize("page_size", [512, 4096])
def test_reads_a_deep_tree(tmp_path: Path, page_size: int) -> None:
    path = tmp_path / "t.sqlite"
    with connect(path, page_size) as db:
        db.execute("CREATE TABLE t(a INT, b INT)")
        rows = ((1 << 40 | i, i % 3 or None) for i in range(60_000))
        db.executemany("INSERT INTO t VALUES (?,?)", rows)
    assert agrees(path, "t", [0, 1])


@pytest.mark.parametrize("vacuum", ["NONE", "FULL", "INCREMENTAL"])
def test_reads_after_deletes_and_odd_rowids(tmp_path: Path, vacuum: str) -> None:
    path = tmp_path / "t.sqlite"
    with connect(path, 1024) as db:
        db.execute(f"PRAGMA auto_vacuum={vacuum}")
        db.execute("CREATE TABLE t(id INTEGER PRIMARY KEY, a INT)")
        rng = random.Random(1)
        ids = {rng.choice(EDGES) + rng.randrange(5000) for _ in range(5000)}
        rows = [(i, i >> 3) for i in ids if i < 1 << 63]
        db.executemany("INSERT INTO t VALUES (?,?)", rows)
        db.execute("DELETE FROM t WHERE a % 3 = 0")
        db.execute("UPDATE t SET a = -a WHERE a % 5 = 0")
    assert agrees(path, "t", [1])
    assert set(fast(path, "t", [0])[0]) == {None}


def test_reads_more_than_126_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with connect(path) as db:
        db.execute(f"CREATE TABLE t({', '.join(f'c{i} INT' for i in range(300))})")
        row = [EDGES[i % len(EDGES)] for i in range(300)]
        db.executemany(f"INSERT INTO t VALUES ({','.join('?' * 300)})", [row] * 20)
    assert agrees(path, "t", list(range(300)))


def test_reads_the_schema_table(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with connect(path, 512) as db:
        for i in range(100):
            db.execute(f"CREATE TABLE t{i}(a INT, a_rather_long_column_name_{i} INT)")
    with PageFile(path) as file:
        (got,) = file.read_int_columns(1, [3])
    assert [got.values.tolist()] == slow(path, "sqlite_master", [3])


@pytest.mark.parametrize(
    "sql",
    [
        "CREATE TABLE t(k TEXT PRIMARY KEY, a INT) WITHOUT ROWID",
        "CREATE TABLE t(k TEXT, a INT); INSERT INTO t VALUES ('x', 1); "
        "ALTER TABLE t ADD COLUMN b INT DEFAULT 7",
        "CREATE TABLE t(k INT, a INT, b INT); INSERT INTO t VALUES (1, 2, 'x')",
        "CREATE TABLE t(k INT, a INT, b INT); INSERT INTO t VALUES (1, 2, x'00')",
        "CREATE TABLE t(k INT, a INT, b INT); INSERT INTO t VALUES (1, 2, 0.5)",
        "CREATE TABLE t(k, a INT, b INT); INSERT INTO t VALUES (zeroblob(5000), 1, 2)",
    ],
    ids=["without-rowid", "added-column", "text", "blob", "real", "overflow"],
)
def test_refuses_what_is_not_plain(tmp_path: Path, sql: str) -> None:
    path = tmp_path / "t.sqlite"
    with connect(path) as db:
        db.executescript(sql)
    with pytest.raises(UnsupportedLayout):
        fast(path, "t", [1, 2])


def test_refuses_an_index(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with connect(path) as db:
        db.executescript("CREATE TABLE t(a INT); CREATE INDEX i ON t(a)")
    with pytest.raises(UnsupportedLayout, match="rowid table"):
        fast(path, "i", [0])


integers = st.one_of(st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1))
anything = st.one_of(
    integers,
    st.none(),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=80),
    st.binary(max_size=200),
)
VALUES = {
    "INTEGER": st.one_of(integers, st.none()),
    "INT DEFAULT 7": st.one_of(integers, integers, integers, anything),
    "TEXT": anything,
    "REAL": anything,
    "BLOB": anything,
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[tuple[Any, ...]]]:
    types = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=6))
    row = st.tuples(*(VALUES[kind] for kind in types))
    return types, draw(st.lists(row, max_size=25))


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    table=tables(),
    page_size=st.sampled_from(PAGE_SIZES),
    vacuum=st.integers(0, 2),
    key=st.sampled_from(["", "", "k INTEGER PRIMARY KEY", "k INT PRIMARY KEY"]),
    without_rowid=st.booleans(),
    repeat=st.sampled_from([1, 1, 5, 40]),
    first=st.sampled_from([-(2**63), -3, 1, 2**40, 2**62]),
    deleted=st.sampled_from([0, 2, 3, 10]),
    added=st.sampled_from([None, "INT", "INT DEFAULT 9", "TEXT"]),
)
def test_agrees_with_sqlite_or_refuses(
    tmp_path_factory: pytest.TempPathFactory,
    table: tuple[list[str], list[tuple[Any, ...]]],
    page_size: int,
    vacuum: int,
    key: str,
    without_rowid: bool,
    repeat: int,
    first: int,
    deleted: int,
    added: str | None,
) -> None:
    types, rows = table
    path = tmp_path_factory.mktemp("fuzz") / "t.sqlite"
    without_rowid = without_rowid and bool(key)
    names = [f"c{i}" for i in range(len(types))]
    columns = [f"{name} {kind}" for name, kind in zip(names, types, strict=True)]
    wanted = [i for i, kind in enumerate(types, bool(key)) if kind != "REAL"]
    if key == "k INT PRIMARY KEY" and not without_rowid:
        wanted.append(0)
    slots = ", ".join("?" * (len(types) + 1))
    insert = f"({'k' if key else 'rowid'}, {', '.join(names)}) VALUES ({slots})"
    with connect(path, page_size) as db:
        db.execute(f"PRAGMA auto_vacuum={vacuum}")
        db.execute(
            f"CREATE TABLE t({', '.join([*([key] if key else []), *columns])})"
            + (" WITHOUT ROWID" if without_rowid else "")
        )
        every = [(first + i, *row) for i, row in enumerate(rows * repeat)]
        half = len(every) // 2 if added else len(every)
        db.executemany(f"INSERT INTO t {insert}", every[:half])
        if deleted:
            db.execute(f"DELETE FROM t WHERE {'k' if key else 'rowid'} % {deleted} = 0")
        if added:
            db.execute(f"ALTER TABLE t ADD COLUMN z {added}")
            wanted.append(len(types) + bool(key))
        db.executemany(f"INSERT INTO t {insert}", every[half:])
    if without_rowid:
        with pytest.raises(UnsupportedLayout):
            fast(path, "t", wanted or [0])
        return
    agrees(path, "t", wanted)
    for column in wanted:
        took = agrees(path, "t", [column])
        short = added is not None and column == len(types) + bool(key)
        if page_size == 65536 and not short and types[column - bool(key)] == "INTEGER":
            assert took


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with a deep and a shallow table."""
    path = tmp_path_factory.mktemp("sound") / "t.sqlite"
    with connect(path, 512) as db:
        db.execute("CREATE TABLE t(a INT, s TEXT, b INT, c INT)")
        db.execute("CREATE TABLE u(a INT, b INT)")
        for row in edge_rows(1500):
            db.execute("INSERT INTO t VALUES (?,?,?,?)", row[:3] + row[4:5])
        db.execute("INSERT INTO u SELECT a, c FROM t LIMIT 5")
    assert agrees(path, "t", [0, 2, 3])
    assert agrees(path, "u", [0, 1])
    return path


def damage(rng: random.Random, data: bytearray) -> None:
    style = rng.randrange(4)
    if style == 0:
        del data[rng.randrange(len(data)) :]
    elif style == 1:
        for _ in range(rng.randint(1, 60)):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 128, 255])
    elif style == 2:
        for _ in range(rng.randint(1, 5)):
            # Page headers and the first cell pointers.
            page = rng.randrange(len(data) // 512)
            data[page * 512 + rng.randrange(24)] = rng.randrange(256)
    else:
        size = 512 * rng.randint(1, 20)
        at, to = (rng.randrange(0, len(data) - size, 512) for _ in range(2))
        data[to : to + size] = data[at : at + size]


@pytest.mark.parametrize("seed", range(20))
def test_damage_is_refused_or_read_within_bounds(
    sound: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    roots = [1, root(sound, "t"), root(sound, "u")]
    whole = sound.read_bytes()
    path = tmp_path / "t.sqlite"
    for _ in range(30):
        data = bytearray(whole)
        damage(rng, data)
        path.write_bytes(data)
        for page in [*roots, rng.randrange(-2, len(data) // 512 + 2)]:
            try:
                with PageFile(path) as file:
                    read = file.read_int_columns(page, [0, 2, 3])
            except UnsupportedLayout:
                continue
            assert sum(column.values.nbytes for column in read) <= 8 * len(data)


def patched(source: Path, path: Path, change: Callable[[bytearray], None]) -> Path:
    data = bytearray(source.read_bytes())
    change(data)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, b"sqlite", "no SQLite header"),
        (16, b"\x02\x01", "page size"),
        (16, b"\x00\x00", "page size"),
        (18, b"\x02\x02", "WAL"),
        (18, b"\x01\x09", "version"),
        (20, b"\xff", "reserved"),
        (21, b"\x41", "fractions"),
        (28, b"\x00\x01\x00\x00", "shorter"),
    ],
)
def test_refuses_a_bad_file_header(
    sound: Path, tmp_path: Path, at: int, value: bytes, match: str
) -> None:
    def change(data: bytearray) -> None:
        data[at : at + len(value)] = value

    path = patched(sound, tmp_path / "t.sqlite", change)
    with pytest.raises(UnsupportedLayout, match=match):
        PageFile(path)


# Offsets are in the root of the shallow table, a single leaf.
@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, b"\x0a", "rowid table"),
        (3, b"\xff\xff", "too many cells"),
        (3, b"\x00\x55", "too many cells"),
        (8, b"\x01\xff", "off the page"),
        (8, b"\x00\x04", "in the page header"),
        (8, b"\x01\x00\xff\x7f", "overflow page|off the page"),
    ],
)
def test_refuses_a_bad_leaf(
    sound: Path, tmp_path: Path, at: int, value: bytes, match: str
) -> None:
    page = root(sound, "u")

    def change(data: bytearray) -> None:
        start = (page - 1) * 512 + at
        data[start : start + len(value)] = value

    path = patched(sound, tmp_path / "t.sqlite", change)
    with PageFile(path) as file, pytest.raises(UnsupportedLayout, match=match):
        file.read_int_columns(page, [0])


def first_cell(page: int, offset: int, value: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        start = (page - 1) * 512
        data[start + int.from_bytes(data[start + 8 : start + 10], "big") + offset] = (
            value
        )

    return change


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [
        (0, 1, "header longer"),
        (2, 100, "header longer"),
        (2, 2, "too few columns"),
        (2, 0, "too few columns"),
        (3, 7, "more than integers"),
        (3, 10, "more than integers"),
        (3, 127, "more than integers"),
    ],
)
def test_refuses_a_bad_record(
    sound: Path, tmp_path: Path, offset: int, value: int, match: str
) -> None:
    page = root(sound, "u")
    path = patched(sound, tmp_path / "t.sqlite", first_cell(page, offset, value))
    with PageFile(path) as file, pytest.raises(UnsupportedLayout, match=match):
        file.read_int_columns(page, [0, 1])


def test_refuses_a_field_that_runs_off_its_record(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with connect(path, 512) as db:
        db.execute("CREATE TABLE t(a INT, b INT)")
        db.execute("INSERT INTO t VALUES (0, 1)")
    page = root(path, "t")
    patched(path, path, first_cell(page, 4, 6))
    with PageFile(path) as file, pytest.raises(UnsupportedLayout, match="off its"):
        file.read_int_columns(page, [1])


def chain(path: Path, links: Sequence[int]) -> None:
    """Write interior pages 2, 3, … that each have only a right child; 1 is a leaf."""
    with connect(path, 512) as db:
        db.execute("CREATE TABLE t(a INT)")
        db.execute("DROP TABLE t")
    data = bytearray(path.read_bytes()[:512])
    for link in links:
        data += (b"\5\0\0\0\0\2\0\0" + link.to_bytes(4, "big")).ljust(512, b"\0")
    data += b"\x0d\0\0\0\0\2\0\0".ljust(512, b"\0")
    data[28:32] = (len(data) // 512).to_bytes(4, "big")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("links", "match"),
    [
        ([2], "linked twice"),
        ([3, 2], "linked twice"),
        ([0], "out of range"),
        ([99], "out of range"),
        ([0xFFFFFFFF], "out of range"),
        ([1], "rowid table"),
        (range(3, 24), "too deep"),
    ],
    ids=["self", "cycle", "zero", "past-the-end", "maximum", "page-1", "deep"],
)
def test_refuses_a_bad_tree(tmp_path: Path, links: Sequence[int], match: str) -> None:
    path = tmp_path / "t.sqlite"
    chain(path, links)
    with PageFile(path) as file, pytest.raises(UnsupportedLayout, match=match):
        file.read_int_columns(2, [0])


@pytest.mark.parametrize("page", [-(2**63), -1, 0, 5, 2**63])
def test_refuses_a_root_out_of_range(tmp_path: Path, page: int) -> None:
    path = tmp_path / "t.sqlite"
    chain(path, [3])
    with PageFile(path) as file:
        assert file.read_int_columns(2, [0])[0].values.shape == (0,)
        with pytest.raises(UnsupportedLayout, match="out of range"):
            file.read_int_columns(page, [0])


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
def test_refuses_a_live_wal_or_journal(
    sound: Path, tmp_path: Path, suffix: str
) -> None:
    path, link = tmp_path / "t.sqlite", tmp_path / "elsewhere.sqlite"
    path.write_bytes(sound.read_bytes())
    link.symlink_to(path)
    beside = tmp_path / f"t.sqlite{suffix}"
    beside.touch()
    PageFile(path).close()
    beside.write_bytes(b"x")
    for opened in (path, link):
        with pytest.raises(UnsupportedLayout, match=suffix):
            PageFile(opened, immutable=True)


def test_wal_mode_needs_immutable(tmp_path: Path) -> None:
    path = tmp_path / "t.sqlite"
    with connect(path) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE t(a INT)")
        db.execute("INSERT INTO t VALUES (5)")
    page = root(path, "t")
    with pytest.raises(UnsupportedLayout, match="WAL"):
        PageFile(path)
    with PageFile(path, immutable=True) as file:
        assert file.read_int_columns(page, [0])[0].values.tolist() == [5]


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"x" * 4096])
def test_refuses_what_is_no_database(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.sqlite"
    path.write_bytes(content)
    with pytest.raises(UnsupportedLayout):
        PageFile(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        PageFile(tmp_path / "none.sqlite")
    with pytest.raises(UnsupportedLayout, match="regular"):
        PageFile(tmp_path)


def test_columns_outlive_the_file(sound: Path) -> None:
    page = root(sound, "u")
    with PageFile(sound) as file:
        (column,) = file.read_int_columns(page, [0])
        with pytest.raises(ValueError, match="negative"):
            file.read_int_columns(page, [-1])
    assert column.values.tolist() == slow(sound, "u", [0])[0]
    with pytest.raises(ValueError, match="closed"):
        file.read_int_columns(page, [0])


@pytest.mark.parametrize("threads", [1, 3])
def test_batches_join_up(
    sound: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(pages, "_BATCH_BYTES", 512 * 7)
    monkeypatch.setattr(pages, "cpus", lambda: threads)
    assert agrees(sound, "t", [0, 2, 3])


def test_damage_that_one_of_several_threads_meets_is_refused(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_BATCH_BYTES", 512 * 7)
    monkeypatch.setattr(pages, "cpus", lambda: 3)
    with PageFile(sound) as file:
        leaves = file._leaves(root(sound, "t"))
    assert len(leaves) > 7 * 3 * pages._BATCHES_A_THREAD
    data = bytearray(sound.read_bytes())
    data[int(leaves[-20]) * 512] = 2  # an index page
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(data)
    with (
        PageFile(damaged) as file,
        pytest.raises(UnsupportedLayout, match="not a page"),
    ):
        file.read_int_columns(root(sound, "t"), [0])


@pytest.mark.parametrize("part", [0, 1, 7, 400, 3_000])
def test_reads_the_chosen_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(pages, "_BATCH_BYTES", 4_096)
    path = tmp_path / "t.sqlite"
    rows = [(i * 7_919, None if i % 3 else i - 1_500) for i in range(3_000)]
    with connect(path, 512) as db:
        db.execute("CREATE TABLE t (a INT, b INT)")
        db.executemany("INSERT INTO t VALUES (?, ?)", rows)
    wanted = np.sort(np.random.default_rng(part).permutation(3_000)[:part])
    page = root(path, "t")
    with PageFile(path) as file:
        heights = np.array([height for height, _ in file.batches(page, [0, 1])])
        assert len(heights) > 4
        assert heights.sum() == 3_000
        read = file.read_int_columns(page, [0, 1], [1], Chosen(wanted, heights))
        whole = file.read_int_columns(page, [0, 1], [1])
        for some, every in zip(read, whole, strict=True):
            assert some.values.dtype == every.values.dtype
            assert (some.values == every.values[wanted]).all()
            valid = np.ones(3_000, np.bool_) if every.valid is None else every.valid
            known = np.ones(part, np.bool_) if some.valid is None else some.valid
            assert (known == valid[wanted]).all()
        for others in (heights[1:], heights + 1):
            if part:
                with pytest.raises(UnsupportedLayout, match="than before"):
                    file.read_int_columns(page, [0], (), Chosen(wanted, others))

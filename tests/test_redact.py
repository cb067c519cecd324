"""A redacted copy tells nothing about people and machines, and lints the same."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest
from nsys_layout import LAYOUT
from tracebuilder import TraceBuilder

from streamlint.engine import lint
from streamlint.errors import TraceError, UsageError
from streamlint.registry import all_rules
from streamlint.trace import open_trace
from streamlint.trace.redact import redact
from streamlint.trace.tables import (
    CAPTURE_OPTIONS,
    ENVIRONMENT_VARIABLES,
    TABLES,
    Kind,
)

SAMPLES = Path(__file__).parents[1] / "sample_traces"
COMPLETE = sorted(set(SAMPLES.rglob("*.sqlite")) - set(SAMPLES.glob("*/abort*")))
SECRET = "s3cr3t"
USER, HOST = "annabel", "deepthought"
PATHS = (
    f"/home/{USER}/{SECRET}/train.py",
    f"/home/{USER}",
    f"~/{SECRET}/train.py",
    f"../../home/{USER}/{SECRET}/train.py",
    f"C:\\Users\\{USER}\\{SECRET}\\train.py",
    f"\\\\{HOST}\\{SECRET}\\train.py",
    f"/mnt/{SECRET}/dir with spaces {SECRET}/train.py",
    f"https://{HOST}.example.org/{SECRET}?user={USER}",
    f"could not open /data/{SECRET}/x.bin and '/home/{USER}/x': failed",
    f"{HOST}: /scratch/{SECRET}/x",
    f"--config=/etc/{SECRET}/x --out=home/{USER}/out",
)


def _pair(path: Path) -> str:
    return path.relative_to(SAMPLES).with_suffix("").as_posix()


def words_in(path: Path) -> set[str]:
    """Which of the planted words a file holds, in any of SQLite's encodings."""
    content = path.read_bytes().lower()
    return {
        word
        for word in (SECRET, USER, HOST)
        for encoding in ("utf-8", "utf-16-le", "utf-16-be")
        if word.encode(encoding) in content
    }


def planted() -> TraceBuilder:
    """An ordinary run, with private words wherever a text can be."""
    builder = TraceBuilder(process=f"/home/{USER}/{SECRET}/app")
    builder.thread("worker")
    builder.stream(13)
    builder.kernel("step", stream=13, start=20, end=30)
    call = builder.call("cudaStreamSynchronize", 40, 5)
    frames = [("f", path, 1) for path in PATHS]
    builder.backtrace(call, frames, native=[("main", path) for path in PATHS])
    builder.memory_event("allocation", 8, 50, name=f"{SECRET}_buffer")
    names = [PATHS[0], HOST, USER, f"run of {USER} on {HOST}.example.org"]
    for i, text in enumerate((*PATHS, *names)):
        builder.nvtx(text, 60 + i, 61 + i)
        builder.nvtx(text, 60 + i, 61 + i, registered=True)
        builder.diagnostic("info", text)
        builder.overhead(text, 60 + i, 61 + i)
        builder.kernel(f"k{i}<{text}>", stream=13, start=80 + i, end=80.5 + i)
    builder.process(200, f"/opt/{SECRET}/idle")
    with builder.at(pid=200):
        builder.thread(f"{SECRET}-thread")
    for row in builder.rows["TARGET_INFO_GPU"]:
        row |= {"uuid": SECRET, "busLocation": SECRET, "chipName": SECRET}
    for name, value in (
        ("USER", USER),
        ("HOME", f"/home/{USER}"),
        ("HOSTNAME", f"{HOST}.example.org"),
        ("API_TOKEN", SECRET),
        ("CUDA_LAUNCH_BLOCKING", "0"),
        ("CUDA_MODULE_LOADING", f"/home/{USER}/{SECRET}"),
    ):
        builder.environment(name, f'"{value}"')
    for name in ("COMMAND", "ARGUMENT_0", "WORKING_DIR", "PID", f"{SECRET}:COLLECT"):
        builder.option(name, f"/srv/{SECRET}")
    builder.option("USER_NAME", USER)
    builder.option(f"PROCESS_0{SECRET}:COLLECT_CUDA_TRACE", "true", plain=True)
    builder.option("COLLECT_NVTX_TRACE", f"true /{SECRET}", plain=True)
    builder.option("DEVICE_DISPLAY_NAME", HOST, plain=True)
    return builder


def add_everywhere(path: Path) -> None:
    """Unread text columns, unread tables, other facts of the export, free pages."""
    secret = f"{SECRET} /home/{USER}/x"
    with closing(sqlite3.connect(path)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master")]
        for table in tables:
            db.execute(f'ALTER TABLE "{table}" ADD COLUMN comment TEXT')
            db.execute(f'ALTER TABLE "{table}" ADD COLUMN "{SECRET}/x" TEXT')
            db.execute(f'UPDATE "{table}" SET comment = ?', (secret,))
        for name, value in (
            ("EXPORT_HOST", f"{HOST}.example.org"),
            ("EXPORT_USER", USER),
            ("EXPORT_PARAM_INPUT_PATH_ABS", f"/home/{USER}/{SECRET}.nsys-rep"),
            ("EXPORT_PARAM_TABLES_TO_EXPORT", f"/home/{USER}/{SECRET}"),
            ("EXPORT_TIME_UTC", SECRET),
        ):
            db.execute(
                "INSERT INTO META_DATA_EXPORT (name, value) VALUES (?, ?)",
                (name, value),
            )
        for table in ("TARGET_INFO_SYSTEM_ENV", "ANALYSIS_FILE", "OSRT_API"):
            db.execute(f"CREATE TABLE {table} (name TEXT, value TEXT)")
            db.execute(f"INSERT INTO {table} VALUES ('Hostname', ?)", (HOST,))
        db.execute("CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER, name TEXT)")
        db.execute("INSERT INTO ENUM_CUDA_MEM_KIND VALUES (1, ?)", (PATHS[0],))
        db.execute(f"CREATE VIEW {SECRET} AS SELECT '{secret}'")
        db.execute(f"CREATE INDEX {SECRET}_index ON PROCESSES (name)")
        # A number column may hold anything in SQLite.
        db.execute(
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET cacheConfig = ?, gridZ = ?",
            (secret, secret.encode()),
        )
        db.execute("INSERT INTO StringIds VALUES (9999, ?, '', '')", (SECRET,))
        event = "INSERT INTO NVTX_EVENTS (start, eventType, jsonText, binaryData) "
        db.execute(event + "VALUES (1, 34, ?, ?)", (f'{{"{SECRET}": 1}}', SECRET))
        db.execute(event + "VALUES (1, 34, NULL, ?)", (SECRET.encode(),))
        db.execute(f"CREATE TABLE gone AS SELECT '{secret}' AS x")
        db.execute("DROP TABLE gone")
        db.commit()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = planted().write(tmp_path / f"{SECRET}.sqlite")
    add_everywhere(path)
    assert words_in(path) == {SECRET, USER, HOST}
    return path


def test_no_private_word_is_left(private: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy.sqlite"
    redact(private, target)
    with closing(sqlite3.connect(target)) as db:
        lines = [line for line in db.iterdump() if SECRET in line or USER in line]
    assert lines == []
    assert words_in(target) == set()


def test_what_rules_read_is_left(private: Path, tmp_path: Path) -> None:
    redact(private, tmp_path / "copy.sqlite")
    trace = open_trace(tmp_path / "copy.sqlite")
    assert trace.gpu_ops.height == 1 + len(PATHS) + 4
    assert trace.kernels["name"][0] == "step"
    assert trace.processes.rows() == [(100, "app")]
    assert trace.threads.rows() == [(100, 101, "worker")]
    assert trace.capture.cuda_traced is True
    assert trace.capture.exporter == "2025.3.2.0"
    assert trace.capture.environment == {"CUDA_LAUNCH_BLOCKING": "0"}
    assert trace.gpus.select("name", "sm_count").rows() == [("NVIDIA H200", 132)]
    (frames,) = trace.python_stacks(trace.runtime_calls).values()
    files = [trace.string(file) for _, file, _ in frames]
    assert files[:5] == ["train.py", "home", "train.py", "train.py", "train.py"]
    (stack,) = trace.native_stacks([0]).values()
    assert [frame.symbol for frame in stack] == ["main"] * len(PATHS)


def test_what_was_removed_is_counted(private: Path, tmp_path: Path) -> None:
    removed = redact(private, tmp_path / "copy.sqlite").removed
    assert removed["tables"] == 4
    assert removed["processes"] == removed["threads"] == 1
    assert removed["environment variables"] == 5
    assert removed["export facts"] == 5
    assert removed["strings"] >= 1
    assert removed["payloads"] == 2
    assert min(removed.values()) > 0


def test_a_text_encoding_that_nsys_never_writes_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source.sqlite"
    planted().write(tmp_path / "plain.sqlite")
    with closing(sqlite3.connect(source)) as db:
        db.execute("PRAGMA encoding='UTF-16le'")
        with closing(sqlite3.connect(tmp_path / "plain.sqlite")) as plain:
            db.executescript("".join(plain.iterdump()))
    assert SECRET in words_in(source)
    with pytest.raises(TraceError, match="encoding"):
        redact(source, tmp_path / "copy.sqlite")
    assert not (tmp_path / "copy.sqlite").exists()


def test_names_of_programs_go_if_asked(tmp_path: Path) -> None:
    builder = TraceBuilder(process=f"/x/{SECRET}")
    builder.thread(SECRET)
    builder.nvtx(f"{SECRET} step", 1, 2)
    builder.kernel("kernel", stream=7, start=20, end=30)
    source = builder.write(tmp_path / "source.sqlite")
    removed = redact(source, tmp_path / "copy.sqlite", programs=False).removed
    assert removed["programs"] == removed["threads"] == 1
    assert words_in(tmp_path / "copy.sqlite") == set()
    trace = open_trace(tmp_path / "copy.sqlite")
    assert trace.processes.rows() == [(100, None)]
    assert trace.nvtx_ranges["text"].to_list() == ["NAME step"]


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("void step<int, (char)47>(T1 *, T2)", "void step<int, (char)47>(T1 *, T2)"),
        ("epoch 3/10, loss 1/2", "epoch 3/10, loss 1/2"),
        ("aten::copy_", "aten::copy_"),
        ("&lt;module&gt;", "&lt;module&gt;"),
        ("operator/(A, B)", "operator/(A, B)"),
        ("a / b", "a / b"),
        ("/x/lib/python3.12/site-packages/torch/a.py", None),
        ("/x/site-packages/torch/a.py", "site-packages/torch/a.py"),
        ("D:\\py\\dist-packages\\cupy\\a.py", "dist-packages/cupy/a.py"),
        ("/home/me/.local/lib/python3.12/site-packages/torch/a.py", None),
        ("/usr/lib/python3.12/threading.py", "/usr/lib/python3.12/threading.py"),
        ("/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib/libc.so.6"),
        ("/opt/cuda/lib64/libcudart.so.13", "/usr/lib/libcudart.so.13"),
        ("/build/out/libmine.so", "libmine.so"),
        ("0x7f3a12c4", "0x0"),
    ],
)
def test_texts_keep_what_is_not_private(
    text: str, clean: str | None, tmp_path: Path
) -> None:
    builder = TraceBuilder()
    builder.nvtx(text, 1, 2)
    redact(builder.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite")
    expected = text[text.index("lib/") :] if clean is None else clean
    assert open_trace(tmp_path / "b.sqlite").nvtx_ranges["text"].to_list() == [expected]


def test_messages_of_the_profiler_stay_readable(tmp_path: Path) -> None:
    builder = TraceBuilder()
    known = "CUDA legacy/software instrumented trace was collected."
    builder.diagnostic("info", known)
    builder.diagnostic("info", "Loaded CUPTI library: /opt/x/libcupti.so.13")
    builder.diagnostic("info", "see private/legacy/software or me@home")
    redact(builder.write(tmp_path / "a.sqlite"), tmp_path / "b.sqlite")
    assert open_trace(tmp_path / "b.sqlite").diagnostics["text"].to_list() == [
        known,
        "Loaded CUPTI library: PATH",
        "see PATH or PATH",
    ]


def test_payloads_lose_uninitialised_memory(tmp_path: Path) -> None:
    for as_json in (True, False):
        builder = TraceBuilder()
        call = builder.call("cudaStreamSynchronize", 10)
        builder.backtrace(call, [("f", "a.py", 3)], as_json=as_json)
        source = builder.write(tmp_path / "source.sqlite")
        target = tmp_path / f"{as_json}.sqlite"
        redact(source, target)
        assert b"\xc5\x03\x7f\x01" in source.read_bytes()
        assert b"\xc5\x03\x7f\x01" not in target.read_bytes()
        before, after = open_trace(source), open_trace(target)
        calls = before.runtime_calls
        assert after.python_stacks(calls) == before.python_stacks(calls) != {}


def test_equal_call_stacks_are_stored_once(tmp_path: Path) -> None:
    builder = TraceBuilder()
    symbols = ["one", "two", "one", "two", "two"]
    for i, symbol in enumerate(symbols):
        call = builder.call("cudaStreamSynchronize", 10 * (i + 1))
        native = [("inner", "app"), (symbol, "app")]
        builder.backtrace(call, [("f", "a.py", i)], native=native)
    source = builder.write(tmp_path / "source.sqlite")
    redact(source, tmp_path / "copy.sqlite")
    before, after = open_trace(source), open_trace(tmp_path / "copy.sqlite")
    chains = after.runtime_calls["callchain_id"].drop_nulls()
    assert chains.n_unique() == 2
    stacks = after.native_stacks(chains.unique())
    assert [stacks[chain][1][0] for chain in chains] == symbols
    (recorded,), (kept,) = (
        trace.native_stacks([0]).values() for trace in (before, after)
    )
    assert [frame[:2] for frame in recorded] == [frame[:2] for frame in kept]
    with closing(sqlite3.connect(tmp_path / "copy.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM CUDA_CALLCHAINS").fetchone() == (4,)


# The copy -----------------------------------------------------------------------


def findings(path: Path) -> list[str]:
    """Each finding in full, as text."""
    trace = open_trace(path)
    report = lint(trace, all_rules())
    assert not report.crashed
    trace.close()
    return [f"{rule.name}: {finding!r}" for rule, finding in report.findings]


@pytest.mark.parametrize("path", sorted(SAMPLES.rglob("bad.sqlite")))
def test_a_redacted_copy_lints_the_same(path: Path, tmp_path: Path) -> None:
    once, twice = tmp_path / "once.sqlite", tmp_path / "twice.sqlite"
    redact(path, once)
    redact(once, twice)
    assert findings(path) == findings(twice)


@pytest.mark.parametrize("path", COMPLETE, ids=_pair)
def test_redaction_of_a_redacted_trace_changes_nothing(
    path: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again.sqlite"
    removed = redact(path, again).removed
    assert set(removed) <= {"payloads"}
    with (
        closing(sqlite3.connect(path)) as one,
        closing(sqlite3.connect(again)) as other,
    ):
        assert list(one.iterdump()) == list(other.iterdump())


def test_columns_and_types_are_those_of_the_source(tmp_path: Path) -> None:
    source = planted().write(tmp_path / "source.sqlite")
    redact(source, tmp_path / "copy.sqlite")
    with (
        closing(sqlite3.connect(source)) as one,
        closing(sqlite3.connect(tmp_path / "copy.sqlite")) as other,
    ):
        for table in LAYOUT:
            query = f"PRAGMA table_info({table})"
            assert one.execute(query).fetchall() == other.execute(query).fetchall()


def test_the_source_is_left_alone(tmp_path: Path) -> None:
    source = tmp_path / "source.sqlite"
    shutil.copyfile(SAMPLES / "extra/misc.sqlite", source)
    before = source.read_bytes()
    redact(source, tmp_path / "copy.sqlite")
    assert source.read_bytes() == before
    assert {f.name for f in tmp_path.iterdir()} == {"source.sqlite", "copy.sqlite"}


def test_an_existing_target_is_refused(tmp_path: Path) -> None:
    source = SAMPLES / "extra/misc.sqlite"
    target = tmp_path / "copy.sqlite"
    target.write_text("mine")
    with pytest.raises(TraceError, match="exists already"):
        redact(source, target)
    assert target.read_text() == "mine"
    with pytest.raises(TraceError, match="exists already"):
        redact(source, source)


def test_a_failure_leaves_no_half_copy(tmp_path: Path) -> None:
    target = tmp_path / "copy.sqlite"
    with pytest.raises(UsageError, match="can't be written"):
        redact(SAMPLES / "extra/misc.sqlite", tmp_path / "no" / "copy.sqlite")
    with pytest.raises(TraceError, match="does not exist"):
        redact(tmp_path / "no.sqlite", target)
    damaged = tmp_path / "damaged.sqlite"
    content = bytearray((SAMPLES / "extra/misc.sqlite").read_bytes())
    content[30_000:60_000] = bytes(30_000)
    damaged.write_bytes(content)
    with pytest.raises(TraceError, match=r"damaged|can't be copied"):
        redact(damaged, target)
    assert not target.exists()


def test_an_unfinished_export_can_be_redacted(tmp_path: Path) -> None:
    source = SAMPLES / "extra/aborted_export_2024.2.3.sqlite"
    redact(source, tmp_path / "copy.sqlite")
    with pytest.raises(TraceError, match="incomplete export"):
        open_trace(tmp_path / "copy.sqlite")


# Names ----------------------------------------------------------------------------


def counts(path: Path) -> list[tuple[object, ...]]:
    """What every finding says apart from names."""
    trace = open_trace(path)
    report = lint(trace, all_rules())
    assert not report.crashed
    trace.close()
    return sorted(
        (
            *(rule.name, finding.severity, finding.cost, finding.occurrences),
            *(finding.where.pid, finding.where.streams, finding.where.threads),
            sorted(frame.line or -1 for frame in finding.where.source),
        )
        for rule, finding in report.findings
    )


def names_in(path: Path) -> set[str]:
    """Names of kernels, ranges, files and functions that can't be there by chance."""
    strings = "SELECT value FROM StringIds JOIN"
    queries = {
        "CUPTI_ACTIVITY_KIND_KERNEL": f"{strings} CUPTI_ACTIVITY_KIND_KERNEL k "
        "ON StringIds.id IN (k.shortName, k.demangledName)",
        "CUDA_CALLCHAINS": f"{strings} CUDA_CALLCHAINS c "
        "ON StringIds.id IN (c.symbol, c.module)",
        "NVTX_EVENTS": "SELECT text FROM NVTX_EVENTS WHERE eventType != 75",
        "StringIds": "SELECT value FROM StringIds WHERE value LIKE '%.py'",
    }
    found: set[str] = set()
    with closing(sqlite3.connect(path)) as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
        for table, query in queries.items():
            if table in tables:
                found |= {text for (text,) in db.execute(query) if text}
        calls = "SELECT value FROM StringIds JOIN CUPTI_ACTIVITY_KIND_RUNTIME "
        kept = {v for (v,) in db.execute(calls + "ON StringIds.id = nameId")}
    return {
        name
        for name in found - {"0x0", "&lt;module&gt;", "<module>"}
        if not any(name in call for call in kept)
        and not name.startswith(("python3", "l2."))
    }


@pytest.mark.parametrize(
    "name",
    [
        *("extra/torchbt", "extra/misc", "extra/torch", "extra/jax_lossy_capture"),
        *("pageable-async-copy/torch/bad", "busy-poll/bad", "pdl-candidate/bad"),
        *("l2-setaside-oversubscribed/bad", "host-sync-drains-gpu/bad"),
        *("lazy-module-load-in-hot-path/bad",),
    ],
)
def test_a_copy_without_names_lints_the_same(name: str, tmp_path: Path) -> None:
    source = SAMPLES / f"{name}.sqlite"
    target = tmp_path / "copy.sqlite"
    assert redact(source, target, names=True).removed["names"] > 0
    assert counts(source) == counts(target)
    content = target.read_bytes()
    words = names_in(source)
    assert words
    assert {w for w in words if len(w) > 4 and w.encode() in content} == set()


def test_a_name_has_one_replacement(tmp_path: Path) -> None:
    builder = TraceBuilder(process="/x/myapplication")
    builder.thread("myapplication")
    with builder.at(tid=102):
        builder.thread("CUPTI worker thread")
    with builder.at(tid=103):
        builder.thread("loader")
    for i, name in enumerate(("mine<int>", "mine<float>", "other", "mine<int>")):
        builder.kernel(name, stream=7, start=20 + i, end=20.5 + i)
    for i, text in enumerate(("step 7", "step 8", "eval 7", "a3b4", "step 7")):
        builder.nvtx(text, i, i + 1, registered=i == 4)
    builder.nvtx("l2.reset", 8, 9)
    builder.nvtx("l2.reset", 9, domain="streamlint", mark=True)
    builder.nvtx("mine", 10, 11, domain="mylib")
    builder.nvtx("ncclAllReduce", 12, 13, domain="NCCL")
    call = builder.call("cudaStreamSynchronize", 40, 5)
    frames = [
        *(("load", "/x/train.py", 3), ("go", "/x/site-packages/torch/a.py", 4)),
        *(("other", "/x/train.py", 5), ("<module>", "<string>", 1)),
    ]
    native = [
        ("cudaStreamSynchronize", "/opt/lib/libcudart.so.13"),
        ("go", "/x/myapplication"),
    ]
    builder.backtrace(call, frames, native=native)
    source = builder.write(tmp_path / "source.sqlite")
    redact(source, tmp_path / "copy.sqlite", names=True)
    trace = open_trace(tmp_path / "copy.sqlite")
    before = open_trace(source)
    known = dict(zip(before.kernels["name"], trace.kernels["name"], strict=True))
    assert list(known.values()) == [f"kernel_{i + 1}" for i in range(len(known))]
    assert trace.kernels["name"].to_list() == [known[n] for n in before.kernels["name"]]
    full = trace.kernels["full_name"]
    assert full.n_unique() == before.kernels["full_name"].n_unique()
    ranges = trace.nvtx_ranges.sort("start_ns")
    assert ranges["text"].to_list() == [
        *("range_a 7", "range_a 8", "range_b 7", "range_c 3 4", "range_a 7"),
        *("range_d 2", "l2.reset", "range_e", "range_f"),
    ]
    assert ranges["domain"].to_list()[-3:] == ["streamlint", "domain_1", "NCCL"]
    (stack,) = trace.python_stacks(trace.runtime_calls).values()
    named = [(trace.string(f), trace.string(file), n) for f, file, n in stack]
    (chain,) = trace.native_stacks([0]).values()
    program = trace.processes["name"][0]
    threads = trace.threads.sort("tid")["name"].to_list()
    assert threads == [program, "CUPTI worker thread", "thread_1"]
    assert chain[1][1] == program
    files = dict.fromkeys(file for _, file, _ in named)
    assert len(files) == 3
    assert named[0][1] == named[2][1]
    assert [line for *_, line in named] == [3, 4, 5, 1]
    assert named[0][1].startswith("file_")
    assert named[0][1].endswith(".py")
    assert named[1][1].startswith("site-packages/file_")
    assert named[3][0] == "<module>"
    assert named[3][1].startswith("<file_")
    assert named[1][0] == chain[1][0]
    assert chain[0][1].startswith("/usr/lib/file_")
    assert set(trace.runtime_calls["name"]) == set(before.runtime_calls["name"])


# The samples ----------------------------------------------------------------------

ALLOWED_TABLES = {source for table in TABLES.values() for source in table.sources}
ALLOWED_TABLES |= {"StringIds", "META_DATA_CAPTURE"}


@pytest.mark.parametrize("path", sorted(SAMPLES.rglob("*.sqlite")), ids=_pair)
def test_samples_are_redacted(path: Path) -> None:
    texts = {
        table: {c.source for c in spec.columns if c.kind in (Kind.TEXT, Kind.BLOB)}
        for spec in TABLES.values()
        for table in spec.sources
    }
    texts["NVTX_EVENTS"] |= {"text"}
    with closing(sqlite3.connect(path)) as db:
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master")]
        for table in tables:
            assert table in ALLOWED_TABLES
            for _, column, declared, *_ in db.execute(f"PRAGMA table_info({table})"):
                if declared != "TEXT" or column in texts.get(table, {"value", "name"}):
                    continue
                query = f"SELECT DISTINCT {column} FROM {table}"
                assert {row[0] for row in db.execute(query)} <= {None, ""}
        if "META_DATA_CAPTURE" in tables:
            rows = db.execute("SELECT name, value FROM META_DATA_CAPTURE").fetchall()
            for name, value in rows:
                option = name.removeprefix("PROCESS_0:")
                if option == "ENVIRONMENT_VARIABLE":
                    assert value.partition("=")[0] in ENVIRONMENT_VARIABLES
                else:
                    assert option in CAPTURE_OPTIONS
        content = "\n".join(db.iterdump())
    for folder in ("/home", "/root", "/tmp", "/Users", "/opt", "/mnt"):
        assert f"{folder}/" not in content


def test_each_sample_has_its_provenance() -> None:
    for folder in {path.parent for path in SAMPLES.rglob("*.sqlite")}:
        facts = pl.read_json(folder / "provenance.json")
        assert set(facts.columns) == {path.name for path in folder.glob("*.sqlite")}
    size = sum(path.stat().st_size for path in SAMPLES.rglob("*") if path.is_file())
    assert size < 20_000_000

"""No output tells more about people and machines than it must.

A trace gets a word of its own in every text that it can hold. Each output is searched
for all of them, packed parts too; which ones may be there, and why, is said below.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import re
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from commandline import Run
from nsys_layout import PYTHON_DOMAIN
from tracebuilder import TraceBuilder

from streamlint.cli import DiffFormat, OutputFormat
from streamlint.escape import without_home
from streamlint.trace.redact import redact

FIXED = Path(__file__).parents[1] / "sample_traces" / "extra" / "legacy_fix.sqlite"
WORD = re.compile(r"(?i)leak\d{3}")


class Words:
    """A word of its own for everything that is planted."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def __getitem__(self, what: str) -> str:
        return self._words.setdefault(what, f"leak{len(self._words):03}")

    def all(self) -> set[str]:
        return set(self._words.values())

    def named(self, *names: str) -> set[str]:
        return {self._words[name] for name in names}

    def meanings(self, words: set[str]) -> list[str]:
        return sorted(name for name, word in self._words.items() if word in words)


# What a report is for: it names the work, the place in the code and the machine's kind.
SHOWN = (
    "kernel",  # which kernel is slow
    "full kernel name",  # the timeline tells instances of a template apart
    "range",  # NVTX names are what the program calls its parts
    "registered range",
    "domain",
    "thread",  # the name of a lane
    "program",  # its file name; the folder is not shown
    "project",  # the user's own frame, as a path below ~ ...
    "source file",
    "function",  # ... with line and function
    "module",  # the same of a native frame, without its folder
    "symbol",
    "GPU",
    "CUDA_MODULE_LOADING",  # an environment variable that rules judge
    "EXPORT_PRODUCT_VERSION",
    "EXPORT_SCHEMA_VERSION",
)
# What a redacted copy keeps, so that it lints the same: no folders, no frames' paths.
KEPT = (
    *{*SHOWN} - {"project"},
    "library file",  # of other frames, file and function names
    "library function",
    "other module",
    "other symbol",
    "overhead",  # what the profiler was doing, in nsys' words
    "diagnostic",  # nsys' messages, without paths and addresses
)
KEPT_WITHOUT_NAMES = (
    *("GPU", "CUDA_MODULE_LOADING", "EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION"),
    *("overhead", "diagnostic"),
)

# Tables that streamlint doesn't read, of all nsys from 2020 to 2026: their texts.
OTHER_TABLES = {
    "ANALYSIS_DETAILS": "name value",
    "ANALYSIS_FILE": "filename content",
    "CUPTI_ACTIVITY_KIND_WARP_PHASE_TRACE": "WarpEventIds WarpEventTimestampOffsets",
    "ENUM_NSYS_EVENT_TYPE": "name label",
    "ETW_EVENTS": "data",
    "ETW_PROVIDERS": "guid",
    "GENERIC_EVENTS": "data",
    "GENERIC_EVENT_SOURCES": "data hyperType hyperVersion hyperStructPrefix "
    "hyperMacroPrefix hyperDomain",
    "GENERIC_EVENT_TYPES": "data hyperComment ftraceFormat etwGuid",
    "GENERIC_EVENT_TYPE_FIELDS": "hyperTypeName hyperFormat hyperComment ftracePrefix "
    "ftraceSuffix",
    "GENERIC_EVENT_TYPE_FIELD_MAP": "name",
    "MPI_COMMUNICATORS": "members",
    "NET_IB_DEVICE_INFO": "name des",
    "NET_IB_DEVICE_PORT_INFO": "portLabel",
    "NVTX_PAYLOAD_ENUMS": "name",
    "NVTX_PAYLOAD_ENUM_ENTRIES": "name",
    "NVTX_PAYLOAD_SCHEMAS": "name",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES": "name description",
    "NVTX_SCOPES": "path",
    "NV_LOAD_BALANCE_EVENTS": "task",
    "NV_LOAD_BALANCE_MASTER_EVENTS": "task",
    "OSRT_FILE_ACCESS_DESCRIPTORS": "filePath",
    "OSRT_FILE_ACCESS_EVENTS": "context",
    "PMU_EVENT_REQUESTS": "event_name",
    "ProcessStreams": "content",
    "SLI_P2P": "logSurfaceNames transferFuncName regimeName debugName bindType",
    "TARGET_INFO_COMPONENT": "name",
    "TARGET_INFO_CUDA_GPU": "name pciBusId",
    "TARGET_INFO_GPU_METRICS": "typeName metricName",
    "TARGET_INFO_NETWORK_METRICS": "name description unit",
    "TARGET_INFO_NIC_INFO": "stateName name",
    "TARGET_INFO_NVTX_CUDA_CONTEXT": "name",
    "TARGET_INFO_NVTX_CUDA_DEVICE": "name",
    "TARGET_INFO_NVTX_CUDA_STREAM": "name",
    "TARGET_INFO_PERF_METRIC": "name description unit",
    "TARGET_INFO_PROCESS": "openGlVersion",
    "TARGET_INFO_SESSION_START_TIME": "utcTime localTime",
    "TARGET_INFO_SOC_METRICS": "typeName metricName",
    "TARGET_INFO_SYSTEM_ENV": "devStateName name value",
    "TARGET_INFO_WDDM_CONTEXTS": "friendlyName",
    "TARGET_INFO_XMC_SPEC": "type name groupId",
    "UnwindMethodType": "name",
}
ENVIRONMENT = ("USER", "LOGNAME", "HOSTNAME", "API_TOKEN", "LD_LIBRARY_PATH", "PWD")
CAPTURE_FACTS = ("COMMAND", "ARGUMENT_0", "WORKING_DIR", "USER_NAME", "SESSION_NAME")
EXPORT_FACTS = (
    *("EXPORT_HOST", "EXPORT_USER", "EXPORT_TIME_UTC", "EXPORT_PARAM_INPUT_PATH_ABS"),
    *("EXPORT_PARAM_OUTPUT_PATH", "EXPORT_PRODUCT_NAME", "EXPORT_BUILD"),
)


def planted(words: Words) -> TraceBuilder:
    """A training loop that waits for a copy of pageable memory, with call stacks."""
    home = f"/home/{words['user']}"
    builder = TraceBuilder(process=f"{home}/{words['folder']}/{words['program']}")
    builder.thread(words["thread"])
    builder.stream(13)
    frames = [
        (
            words["library function"],
            f"{home}/lib/python3.12/site-packages/{words['library file']}.py",
            7,
        ),
        (words["function"], f"{home}/{words['project']}/{words['source file']}.py", 16),
    ]
    native = [
        (words["other symbol"], f"/usr/lib/{words['other module']}.so"),
        (words["symbol"], f"{home}/{words['module']}"),
    ]
    short = words["kernel"]
    for i in range(12):
        at = 1000.0 * (i + 1)
        name = f"{short}<{words['full kernel name']}>({home}/x.cu)"
        builder.nvtx(f"{words['range']} {home}/x {i}", at - 50, at + 900)
        builder.kernel(name, stream=13, start=at + 20, end=at + 100)
        issue = (at + 105, at + 500)
        copy = builder.memcpy(
            *("HtoD", 8 << 20),
            stream=13,
            start=at + 110,
            end=at + 490,
            src="pageable",
            issue=issue,
        )
        builder.backtrace(copy, frames, native=native, as_json=i % 2 == 0)
        builder.kernel(name, stream=13, start=at + 520, end=at + 600)
        sync = builder.sync("cudaStreamSynchronize", 13, at + 525, at + 605)
        builder.backtrace(sync, native=native)
    builder.nvtx(f"{words['registered range']} {home}", 1, 9, registered=True)
    builder.nvtx("x", 2, 3, domain=words["domain"])
    builder.overhead(words["overhead"], 14_000, 14_001)
    builder.diagnostic("info", f"{words['diagnostic']} {home}/{words['message']}")
    builder.process(200, f"/opt/{words['idle program']}")
    with builder.at(pid=200):
        builder.thread(words["thread of an idle program"])
    builder.memory_event("allocation", 8, 50, name=words["memory event"])
    for row in builder.rows["TARGET_INFO_GPU"]:
        row["name"] = f"NVIDIA {words['GPU']}"
        row |= {name: words[name] for name in ("uuid", "busLocation", "chipName")}
    for row in builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"]:
        row["mangledName"] = builder.string(words["mangled name"])
    builder.string(words["unused string"])
    builder.string("long " + words["long unused string"] * 3000)  # overflow pages
    for name in ENVIRONMENT:
        builder.environment(name, f'"{words[name]}"')
    builder.environment("HOME", f'"{home}"')
    builder.environment("CUDA_MODULE_LOADING", words["CUDA_MODULE_LOADING"])
    for name in CAPTURE_FACTS:
        builder.option(name, words[name])
    builder.option("COLLECT_NVTX_TRACE", f"true /{words['option']}", plain=True)
    return builder


def plant_by_hand(path: Path, words: Words) -> None:
    """What the builder can't: other tables and columns, and rows that are gone."""
    with closing(sqlite3.connect(path)) as db:
        for name in ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION"):
            change = "UPDATE META_DATA_EXPORT SET value = ? WHERE name = ?"
            db.execute(change, (f"2025.3.{words[name]}", name))
        for name in EXPORT_FACTS:
            db.execute(
                "INSERT INTO META_DATA_EXPORT VALUES (?, ?)", (name, words[name])
            )
        event = "INSERT INTO NVTX_EVENTS (start, eventType, jsonText, binaryData) "
        payload = f'{{"{PYTHON_DOMAIN}": {{"Frames": "{words["payload"]}"}}}}'
        db.execute(f"{event} VALUES (1, 34, ?, ?)", (payload, words["text as blob"]))
        blob = words["blob"].encode()
        db.execute(f"{event} VALUES (1, 34, NULL, ?)", (blob,))
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master")]
        for table in tables:
            db.execute(f"ALTER TABLE {table} ADD COLUMN comment TEXT")
            word = words[f"{table}.comment"]
            db.execute(f"UPDATE {table} SET comment = ?", (word,))
            db.execute(f"ALTER TABLE {table} ADD COLUMN extra")
            word = words[f"{table}.extra"]
            db.execute(f"UPDATE {table} SET extra = ?", (word.encode(),))
        for table, columns in OTHER_TABLES.items():
            names = columns.split()
            declared = ", ".join(f"{name} TEXT" for name in names)
            db.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {declared})")
            marks = ", ".join("?" * (len(names) + 1))
            insert = f"INSERT INTO {table} VALUES ({marks})"
            texts = [words[f"{table}.{name}"] for name in names]
            db.execute(insert, (1, *texts))
            blobs = [words[f"blob of {table}.{name}"].encode() for name in names]
            db.execute(insert, (2, *blobs))
        fact = "INSERT INTO TARGET_INFO_SYSTEM_ENV (name, value) VALUES (?, ?)"
        db.execute(fact, ("Hostname", words["host"]))
        db.execute(f"CREATE VIEW seen AS SELECT '{words['view']}'")
        db.execute(f"CREATE INDEX {words['index']} ON PROCESSES (name)")
        db.execute("CREATE TABLE serial (id INTEGER PRIMARY KEY AUTOINCREMENT, x TEXT)")
        db.execute("INSERT INTO serial (x) VALUES (?)", (words["sequence"],))
        db.execute("ANALYZE")  # sqlite_stat1 has the index's name
        # Rows that are gone leave their bytes in the file.
        db.execute("PRAGMA secure_delete=OFF")
        db.execute("CREATE TABLE gone (x)")
        text = words["dropped table"] * 2000
        db.executemany("INSERT INTO gone VALUES (?)", [(text,)] * 20)
        db.execute("DROP TABLE gone")
        long = words["deleted string"] * 2000
        db.execute("INSERT INTO StringIds (id, value) VALUES (9998, ?)", (long,))
        db.execute("DELETE FROM StringIds WHERE id = 9998")
        db.commit()
        assert db.execute("PRAGMA freelist_count").fetchone()[0] > 10


@pytest.fixture(scope="module")
def words() -> Words:
    return Words()


@pytest.fixture(scope="module")
def trace(words: Words, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The planted trace, in the home folder of the one who reads it."""
    folder = tmp_path_factory.mktemp("privacy") / "home" / words["reader"] / "runs"
    folder.mkdir(parents=True)
    path = planted(words).write(folder / "run.sqlite")
    plant_by_hand(path, words)
    assert words_in(path.read_bytes()) == words.all() - words.named("reader")
    assert len(words.all()) > 190
    return path


# Searching --------------------------------------------------------------------------

BASE64 = re.compile(rb"[A-Za-z0-9+/]{24,}={0,2}")


def layers(content: bytes) -> Iterator[bytes]:
    """The bytes themselves and what is packed in them, at any depth."""
    if not content:
        return
    yield content
    for inflate in (gzip.decompress, zlib.decompress):
        try:
            yield from layers(inflate(content))
        except (OSError, EOFError, zlib.error):
            continue
    for packed in BASE64.findall(content):
        try:
            raw = base64.b64decode(packed, validate=True)
        except binascii.Error:
            continue
        try:
            yield from layers(zlib.decompress(raw))
        except zlib.error:
            yield raw


def words_in(content: bytes) -> set[str]:
    """The planted words in any encoding; no escaping changes their characters."""
    found: set[str] = set()
    for layer in layers(content):
        texts = (layer, layer.replace(b"\0", b""))  # the second for UTF-16
        found |= {word.lower() for text in texts for word in in_text(text)}
    return found


def in_text(text: bytes) -> list[str]:
    return WORD.findall(text.decode("latin-1"))


def test_packed_words_are_found() -> None:
    packed = base64.b64encode(zlib.compress(bytes(range(200)) + b"LEAK007"))
    page = b"<script>" + packed + b"</script>" + "leak008".encode("utf-16")
    assert words_in(gzip.compress(page)) == {"leak007", "leak008"}


# Reports ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", [form.value for form in OutputFormat])
def test_a_format_shows_what_it_must_and_no_more(
    form: str, run: Run, trace: Path, words: Words, tmp_path: Path
) -> None:
    done = run("lint", trace, "--format", form, "-o", tmp_path / "report")
    assert (done.code, done.out, done.err) == (1, "", "")
    found = words_in((tmp_path / "report").read_bytes())
    assert words.meanings(found - words.named(*SHOWN)) == []


@pytest.mark.parametrize("form", [form.value for form in DiffFormat])
def test_a_comparison_shows_what_it_must_and_no_more(
    form: str, run: Run, trace: Path, words: Words, tmp_path: Path
) -> None:
    done = run("diff", FIXED, trace, "--format", form, "-o", tmp_path / "changes")
    found = words_in((tmp_path / "changes").read_bytes())
    found |= words_in(f"{done.out}{done.err}".encode())
    assert words.meanings(found - words.named(*SHOWN)) == []
    assert found >= words.named("GPU")  # findings without their places


def test_a_baseline_holds_what_it_must_and_no_more(
    run: Run, trace: Path, words: Words, tmp_path: Path
) -> None:
    known = tmp_path / "known.json"
    assert run("lint", trace, "--write-baseline", known).code == 0
    assert "pageable-async-copy" in known.read_text()
    found = words_in(known.read_bytes())
    assert words.meanings(found - words.named(*SHOWN)) == []


def test_formats_show_what_findings_are_about(
    run: Run, trace: Path, words: Words
) -> None:
    """Else nothing could leak from them, and the tests above would prove nothing."""
    found = words_in(run("lint", trace, "--format", "json").out.encode())
    wanted = set(SHOWN) - {"full kernel name", "registered range", "domain", "thread"}
    assert words.meanings(found) == sorted(wanted)
    text = run("lint", trace).out
    project, file = words["project"], words["source file"]
    assert f"~/{project}/{file}.py:16 {words['function']}" in text


@pytest.mark.parametrize("command", ["lint --html", "report", "report, compared"])
def test_a_page_shows_what_it_must_and_no_more(
    command: str, run: Run, trace: Path, words: Words, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    traces = (trace, trace) if "compared" in command else (trace,)
    if command == "lint --html":
        done = run("lint", trace, "--html", page)
    else:
        done = run("report", *traces, "-o", page)
    found = words_in(page.read_bytes()) | words_in(f"{done.out}{done.err}".encode())
    assert words.meanings(found - words.named(*SHOWN)) == []
    assert found >= words.named("kernel", "range", "thread", "domain", "program")


def test_info_shows_what_it_must_and_no_more(
    run: Run, trace: Path, words: Words
) -> None:
    done = run("info", trace)
    assert (done.code, done.err) == (0, "")
    found = words_in(done.out.encode())
    assert words.meanings(found - words.named(*SHOWN)) == []
    assert found >= words.named("program", "GPU", "CUDA_MODULE_LOADING")


def damaged(path: Path, how: str) -> Path:
    if how == "schema":
        with closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA writable_schema=ON")
            sql = "CREATE TABLE leak999 (leak998"
            db.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'seen'", (sql,))
            db.commit()
    else:
        content = path.read_bytes()
        half = len(content) // 2
        head = content[: 4 * 4096]  # the list of tables
        lost = head + bytes(half) + content[len(head) + half :]
        path.write_bytes(lost if how == "pages" else content[:half])
    return path


@pytest.mark.parametrize("how", ["schema", "pages", "cut off"])
@pytest.mark.parametrize("command", ["lint", "lint --format json", "report", "redact"])
def test_an_error_tells_nothing_of_the_trace(
    command: str, how: str, run: Run, trace: Path, words: Words, tmp_path: Path
) -> None:
    folder = tmp_path / "home" / words["reader"]
    folder.mkdir(parents=True)
    bad = folder / "bad.sqlite"
    bad.write_bytes(trace.read_bytes())
    damaged(bad, how)
    out = tmp_path / "out.html"
    options = () if command == "lint" else ("-o", out)
    if command == "redact":
        done = run("redact", bad, out)
    else:
        done = run(*command.split(), bad, *options)
    assert done.code == 2
    assert words_in(done.out.encode()) == set()
    # It names the file as the user did, and nothing that is in it.
    assert words_in(done.err.encode()) <= words.named("reader")
    assert not out.exists()


def test_json_names_failed_traces_without_the_home_folder(
    run: Run, trace: Path, words: Words
) -> None:
    done = run("lint", trace, trace.with_name("missing.sqlite"), "--format", "json")
    assert words["reader"] not in done.out
    assert f"home/~/runs/{trace.name}" in done.out
    assert "home/~/runs/missing.sqlite does not exist" in done.out


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/a.py", "~/a.py"),
        ("/home/ann", "~"),
        ("/Users/ann/a.py", "~/a.py"),
        (r"C:\Users\Ann Lee\a.py", r"~\a.py"),
        ("/mnt/nfs/home/ann/a.py", "/mnt/nfs/home/~/a.py"),
        ("/data/users/ann/a.py", "/data/users/~/a.py"),
        ("~ann/a.py", "~/a.py"),
        ("open '/home/ann/x' or /home/bob, failed", "open '~/x' or ~, failed"),
        ("--path=/home/ann/x:/home/bob/y", "--path=~/x:~/y"),
        ("file:///home/ann/x", "file:~/x"),
        ("/usr/lib/x.so", "/usr/lib/x.so"),
        ("site-packages/users/models.py", "site-packages/users/models.py"),
        ("a ~b home/x c", "a ~b home/x c"),
    ],
)
def test_a_home_folder_is_shown_without_its_name(text: str, shown: str) -> None:
    assert without_home(text) == shown
    assert without_home(shown) == shown


# Redacted copies --------------------------------------------------------------------


@pytest.mark.parametrize("names", [False, True], ids=["", "--names"])
def test_a_redacted_copy_holds_what_it_must_and_no_more(
    names: bool, run: Run, trace: Path, words: Words, tmp_path: Path
) -> None:
    target = tmp_path / "copy.sqlite"
    done = run("redact", trace, target, *(["--names"] if names else []))
    assert words_in(f"{done.out}{done.err}".encode()) == set()
    found = words_in(target.read_bytes())
    kept = KEPT_WITHOUT_NAMES if names else KEPT
    assert words.meanings(found) == sorted(kept)
    with closing(sqlite3.connect(target)) as db:
        assert db.execute("PRAGMA freelist_count").fetchone() == (0,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_programs_and_threads_go_if_asked(
    run: Run, trace: Path, words: Words, tmp_path: Path
) -> None:
    target = tmp_path / "copy.sqlite"
    run("redact", trace, target, "--names", "--no-programs")
    found = words_in(target.read_bytes())
    assert words.meanings(found) == sorted(KEPT_WITHOUT_NAMES)


def test_what_a_journal_holds_is_redacted_too(
    trace: Path, words: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, made = tmp_path / "source.sqlite", tmp_path / "made.sqlite"
    made.write_bytes(trace.read_bytes())
    spare = tmp_path / "tmp"
    spare.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spare))
    with closing(sqlite3.connect(made)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("INSERT INTO StringIds (id, value) VALUES (9999, 'leak990')")
        db.execute("UPDATE PROCESSES SET name = '/home/leak991/app'")
        db.execute("UPDATE StringIds SET value = 'leak992' WHERE id = 9999")
        db.commit()
        for suffix in ("", "-wal"):
            content = made.with_name(made.name + suffix).read_bytes()
            source.with_name(source.name + suffix).write_bytes(content)
    assert {"leak991", "leak992"} <= words_in(
        source.with_name("source.sqlite-wal").read_bytes()
    )
    target = tmp_path / "out" / "copy.sqlite"
    target.parent.mkdir()
    redact(source, target)
    found = words_in(target.read_bytes())
    assert found == words.named(*KEPT) - words.named("program")
    assert list(target.parent.iterdir()) == [target]
    assert not list(spare.iterdir())

"""Whatever is not a readable export ends in one line of cause and one of advice."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tracebuilder import TraceBuilder

from streamlint.errors import TraceError
from streamlint.trace import convert, open_trace
from streamlint.trace.model import Trace

SAMPLES = Path(__file__).parents[1] / "sample_traces"
MISC = SAMPLES / "extra/misc.sqlite"
FRAMES = (
    *("gpu_ops", "synchronizations", "event_records", "event_waits", "queries"),
    *("nvtx_ranges", "processes", "threads", "contexts", "memory_events"),
    *("pool_events", "diagnostics", "profiler_overhead", "graph_nodes", "capture"),
)


def refusal(path: Path) -> TraceError:
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    error = caught.value
    assert error.exit_code == 2
    for line in (error.message, error.hint):
        assert line
        assert "\n" not in line
        assert not line.endswith(".")
    assert path.name in error.message
    return error


def database(path: Path, *tables: str) -> Path:
    with closing(sqlite3.connect(path)) as db:
        for table in tables:
            db.execute(f"CREATE TABLE {table} (id INTEGER, value TEXT)")
        db.commit()
    return path


def test_a_missing_file(tmp_path: Path) -> None:
    error = refusal(tmp_path / "no.sqlite")
    assert "does not exist" in error.message
    assert "does not exist" in refusal(tmp_path / "no.nsys-rep").message


def test_a_directory(tmp_path: Path) -> None:
    assert "is a directory" in refusal(tmp_path).message


def test_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe.sqlite"
    os.mkfifo(path)
    assert "not a regular file" in refusal(path).message


def test_a_link_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "loop.sqlite"
    path.symlink_to(path)
    assert "can't be opened" in refusal(path).message


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.sqlite"
    path.touch()
    error = refusal(path)
    assert "is empty" in error.message
    assert "nsys export" in error.hint


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    path = tmp_path / "pointer.sqlite"
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    error = refusal(path)
    assert "Git LFS pointer" in error.message
    assert "git lfs pull" in error.hint


def test_random_bytes(tmp_path: Path) -> None:
    path = tmp_path / "random.sqlite"
    path.write_bytes(random.Random(1).randbytes(10_000))
    assert "not a SQLite file" in refusal(path).message


@pytest.mark.parametrize("size", [10, 20, 99, 100, 1000, 20_000, 50_000])
def test_a_truncated_export(size: int, tmp_path: Path) -> None:
    path = tmp_path / "cut.sqlite"
    path.write_bytes(MISC.read_bytes()[:size])
    error = refusal(path)
    expected = "not a SQLite file" if size < 16 else "cut off"
    assert expected in error.message
    if size >= 16:
        assert "export" in error.hint


def test_an_export_whose_head_is_fine_and_whose_pages_are_not(tmp_path: Path) -> None:
    path = tmp_path / "damaged.sqlite"
    content = bytearray(MISC.read_bytes())
    content[1024:] = random.Random(2).randbytes(len(content) - 1024)
    path.write_bytes(content)
    with pytest.raises(TraceError, match="damaged or cut off"):
        load_everything(open_trace(path))


def load_everything(trace: Trace) -> None:
    for name in FRAMES:
        getattr(trace, name)
    trace.close()


@pytest.mark.parametrize("seed", range(60))
def test_damage_anywhere_is_no_crash(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    path = tmp_path / "damaged.sqlite"
    content = bytearray(MISC.read_bytes())
    for _ in range(chance.choice([1, 5, 50])):
        length = chance.choice([1, 8, 300])
        at = chance.randrange(16, len(content) - length)
        content[at : at + length] = chance.randbytes(length)
    path.write_bytes(content)
    with contextlib.suppress(TraceError):
        load_everything(open_trace(path))


def test_an_nvprof_database(tmp_path: Path) -> None:
    path = tmp_path / "nvprof.sqlite"
    database(path, "StringTable", "Version", "CUPTI_ACTIVITY_KIND_KERNEL")
    error = refusal(path)
    assert "nvprof" in error.message
    assert "Nsight Systems" in error.hint
    other = database(tmp_path / "nvvp.sqlite", "CUPTI_ACTIVITY_KIND_DRIVER")
    assert "nvprof" in refusal(other).message


def test_another_sqlite_database(tmp_path: Path) -> None:
    error = refusal(database(tmp_path / "other.sqlite", "people"))
    assert "not an nsys export" in error.message
    assert "nsys export" in error.hint
    assert "not an nsys" in refusal(database(tmp_path / "none.db", "x")).message


def test_an_export_that_nsys_did_not_finish() -> None:
    error = refusal(SAMPLES / "extra/aborted_export_2024.2.3.sqlite")
    assert "incomplete export" in error.message
    assert "export it again" in error.hint


def test_a_file_with_a_foreign_name_is_judged_by_its_content(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.kernel(stream=7, start=20, end=30)
    trace = open_trace(builder.write(tmp_path / "trace.db"))
    assert trace.kernels.height == 1


# Reports --------------------------------------------------------------------------


@pytest.fixture
def no_nsys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without nsys, and a home of its own for the cache."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(home))
    for name in ("NSYS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(convert, "_INSTALL_FOLDERS", ())


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(b"a report")
    return path


def fake_nsys(folder: Path, script: str, *, options: str = "") -> Path:
    """An nsys that answers ``export --help`` and runs ``script`` else."""
    folder.mkdir(exist_ok=True)
    path = folder / "nsys"
    path.write_text(
        f'#!/bin/sh\nif [ "$2" = --help ]; then echo "{options}"; exit; fi\n'
        f'echo "$@" >> {folder}/calls\n'
        'while [ "$#" -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done\n'
        f"{script}\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("suffix", ["nsys-rep", "qdrep", "QDREP"])
@pytest.mark.usefixtures("no_nsys")
def test_a_report_without_nsys(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"run.{suffix}"
    path.write_bytes(b"a report")
    error = refusal(path)
    assert "no nsys was found" in error.message
    assert f"nsys export --type sqlite run.{suffix}" in error.hint


@pytest.mark.usefixtures("no_nsys")
def test_nsys_names_a_file_that_is_not_there(
    report: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSYS", "/nowhere/nsys")
    assert "no nsys was found" in refusal(report).message


@pytest.mark.usefixtures("no_nsys")
def test_a_report_is_exported_once_and_then_taken_from_the_cache(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = fake_nsys(
        tmp_path / "tool",
        f'/bin/cp {MISC} "$out"',
        options="--include-json --include-blobs",
    )
    monkeypatch.setenv("NSYS", str(tool))
    for _ in range(2):
        trace = open_trace(report)
        assert trace.path == report
        assert trace.kernels.height == 245
    (call,) = (tmp_path / "tool/calls").read_text().splitlines()
    assert call.startswith("export --type sqlite")
    assert "--include-json=true" in call
    assert "--include-blobs=true" in call
    assert {path.name for path in tmp_path.iterdir()} == {
        *("home", "tool", "run.nsys-rep")
    }
    assert len(list((tmp_path / "home/.cache/streamlint").iterdir())) == 1

    report.write_bytes(b"a newer report")
    open_trace(report)
    assert len((tmp_path / "tool/calls").read_text().splitlines()) == 2


@pytest.mark.usefixtures("no_nsys")
def test_options_that_an_nsys_lacks_are_not_used(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "tool"))
    fake_nsys(tmp_path / "tool", f'/bin/cp {MISC} "$out"')
    open_trace(report)
    assert "--include" not in (tmp_path / "tool/calls").read_text()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo 'error while loading shared libraries: libfoo.so.2: cannot open "
            "shared object file' >&2; exit 127",
            "lacks the library libfoo.so.2",
        ),
        ("echo 'file was created by a newer version' >&2; exit 1", "a newer nsys"),
        ("echo secret; exit 1", "could not export"),
        ("exit 0", "could not export"),
        ('echo "not a database" > "$out"', "not a SQLite file"),
        ('echo half > "$out"; exit 1', "could not export"),
    ],
)
@pytest.mark.usefixtures("no_nsys")
def test_an_export_that_fails(
    script: str,
    message: str,
    report: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NSYS", str(fake_nsys(tmp_path / "tool", script)))
    error = refusal(report)
    assert message in error.message
    assert "secret" not in error.message + error.hint
    if message != "not a SQLite file":
        assert not list((tmp_path / "home/.cache/streamlint").iterdir())

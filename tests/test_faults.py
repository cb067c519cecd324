"""Full disks, folders that can't be written, signals, and two runs at once."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from commandline import Run

from streamlint.cli import DiffFormat, OutputFormat
from streamlint.errors import TraceError
from streamlint.trace import convert, open_trace
from streamlint.trace import redact as redaction

SAMPLES = Path(__file__).parents[1] / "sample_traces"
BAD = SAMPLES / "extra" / "legacy.sqlite"
OLD = "the report of yesterday"
NOBODY = 65_534
WRITERS = {
    **{
        f"lint --format {form.value}": ("lint", BAD, "--format", form.value, "-o")
        for form in OutputFormat
    },
    **{
        f"diff --format {form.value}": ("diff", BAD, BAD, "--format", form.value, "-o")
        for form in DiffFormat
    },
    "lint --write-baseline": ("lint", BAD, "--write-baseline"),
    "lint --html": ("lint", BAD, "--html"),
    "report": ("report", BAD, "-o"),
    "redact": ("redact", BAD),
    "redact --names": ("redact", "--names", BAD),
}
"""Every command that writes a file whose name comes last."""


def one_error(text: str) -> bool:
    return [line.split()[0] for line in text.splitlines()] == ["error:", "hint:"]


def before(folder: Path, writer: str) -> Path:
    """The file to write, as it was; a redacted copy never replaces one."""
    target = folder / "out.html"
    if not writer.startswith("redact"):
        target.write_text(OLD)
    return target


def untouched(folder: Path, writer: str) -> bool:
    found = {path.name: path.read_text() for path in folder.iterdir()}
    return found == ({} if writer.startswith("redact") else {"out.html": OLD})


# A full disk ------------------------------------------------------------------------


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file grows beyond this: a full disk that needs no disk of its own."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    run: Run, tmp_path: Path, writer: str
) -> None:
    target = before(tmp_path, writer)
    with files_end_at(200):
        done = run(*WRITERS[writer], target)
    assert done.code == 2
    beside = writer in ("lint --html", "lint --write-baseline")
    assert bool(done.out) == beside  # the text went its own way
    assert one_error(done.err)
    assert f"{target} can't be written" in done.err
    assert "space" in done.err
    assert untouched(tmp_path, writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device here")
def test_an_output_to_a_full_disk_is_no_bug_and_no_finding() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "streamlint", "lint", BAD],
            stdout=full,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
    assert done.returncode == 2
    assert one_error(done.stderr)


def test_a_journal_that_cannot_be_copied(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = with_journal(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    with files_end_at(200):
        done = run("lint", trace)
    assert done.code == 2
    assert one_error(done.err)
    assert "TMPDIR" in done.err
    assert not list((tmp_path / "tmp").iterdir())


def with_journal(folder: Path) -> Path:
    """A trace with a write-ahead log beside it that holds a part of it."""
    made, trace = folder / "made.sqlite", folder / "trace.sqlite"
    shutil.copy(BAD, made)
    with closing(sqlite3.connect(made)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("UPDATE PROCESSES SET name = 'from the journal'")
        db.commit()
        for suffix in ("", "-wal"):
            shutil.copy(f"{made}{suffix}", f"{trace}{suffix}")
    return trace


# Signals ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)],
)
@pytest.mark.parametrize("writer", ["lint --format json", "lint --html", "report"])
def test_a_signal_while_writing_leaves_the_old_file(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writer: str,
    number: signal.Signals,
    code: int,
) -> None:
    def half(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        signal.raise_signal(number)

    target = before(tmp_path, writer)
    monkeypatch.setattr(Path, "write_bytes", half)
    done = run(*WRITERS[writer], target)
    assert (done.code, done.out, done.err) == (code, "", "")
    assert untouched(tmp_path, writer)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_while_redacting_leaves_no_copy(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    """It comes in a function that SQLite calls, which hides what that raises."""
    base = redaction._base

    def interrupted(path: str) -> str:
        signal.raise_signal(number)
        return base(path)

    monkeypatch.setattr(redaction, "_base", interrupted)
    done = run("redact", BAD, tmp_path / "copy.sqlite")
    assert (done.code, done.out, done.err) == (code, "", "")
    assert not list(tmp_path.iterdir())


# Folders and files that can only be read --------------------------------------------


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's rights, to whom no permission applies."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="streamlint-test-"))
    folder.chmod(0o755)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("journal", [False, True])
def test_a_read_only_trace_in_a_read_only_folder(
    run: Run, open_folder: Path, journal: bool
) -> None:
    trace = open_folder / "trace.sqlite"
    if journal:
        with_journal(open_folder)
    else:
        shutil.copy(BAD, trace)
    expected = run("lint", trace)  # also loads what needs root to be read
    for path in open_folder.iterdir():
        path.chmod(0o444)
    open_folder.chmod(0o555)
    names = sorted(path.name for path in open_folder.iterdir())
    with as_nobody():
        assert not os.access(open_folder, os.W_OK, effective_ids=True)
        assert run("lint", trace) == expected
        assert run("info", trace).code == 0
        denied = run("lint", trace, "-o", open_folder / "report.txt")
    assert expected.code == 1
    assert ("from the journal" in expected.out) == journal
    assert denied.code == 2
    assert one_error(denied.err)
    assert sorted(path.name for path in open_folder.iterdir()) == names


def test_a_trace_that_may_not_be_read(run: Run, open_folder: Path) -> None:
    trace = open_folder / "trace.sqlite"
    shutil.copy(BAD, trace)
    trace.chmod(0)
    run("lint", BAD)
    with as_nobody():
        done = run("lint", trace)
    assert done.code == 2
    assert one_error(done.err)
    assert "Permission denied" in done.err


# Reports: the cache -----------------------------------------------------------------

NSYS = r"""#!/bin/sh
if [ "$2" = --help ]; then exit; fi
while [ "$#" -gt 1 ]; do [ "$1" = -o ] && out=$2; shift; done
head -c 20000 {bad} > "$out"
echo $$ >> {folder}/started
while [ ! -e {folder}/go ]; do sleep 0.05; done
cp {bad} "$out"
"""


class Machine:
    """A report, an nsys that waits in the middle of its export, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = folder / "run.nsys-rep"
        self.report.write_bytes(b"a report")
        self.nsys = folder / "nsys"
        self.nsys.write_text(NSYS.format(bad=BAD, folder=folder))
        self.nsys.chmod(0o755)
        self.env = {**os.environ, "HOME": str(folder), "NSYS": str(self.nsys)}
        self.env.pop("XDG_CACHE_HOME", None)
        self.cache = folder / ".cache" / "streamlint"

    def lint(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "streamlint", "lint", self.report],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def go(self) -> None:
        (self.folder / "go").touch()

    def exports(self) -> list[Path]:
        return sorted(self.cache.glob("*.sqlite"))

    def wait_for(self, exports: int) -> list[int]:
        """Wait until so many exports have begun; their process ids."""
        started = self.folder / "started"
        until(lambda: started.exists() and len(started.read_text().split()) == exports)
        return [int(pid) for pid in started.read_text().split()]


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_two_lints_of_one_report_at_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    lints = [machine.lint(), machine.lint()]
    machine.wait_for(2)
    assert not machine.exports()  # half of each is there, under no name of the cache
    machine.go()
    outputs = [lint.communicate(timeout=60) for lint in lints]
    assert outputs[0] == outputs[1]
    assert outputs[0][0].startswith("run.nsys-rep")
    assert [lint.returncode for lint in lints] == [1, 1]
    assert machine.exports() == list(machine.cache.iterdir())
    assert len(machine.exports()) == 1


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_export_is_never_used(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    lint = machine.lint()
    (nsys,) = machine.wait_for(1)
    lint.send_signal(number)
    out, err = lint.communicate(timeout=60) if number == signal.SIGTERM else ("", "")
    if number == signal.SIGTERM:
        assert (lint.returncode, out, err) == (143, "", "")
        assert not list(machine.cache.iterdir())
        until(lambda: not alive(nsys))
    else:
        # Nothing can tidy up: what is left has no name that is ever looked for.
        os.kill(nsys, signal.SIGKILL)
        lint.communicate(timeout=60)
        (left,) = machine.cache.iterdir()
        assert next(left.iterdir()).stat().st_size == 20_000
        os.utime(left, (1, 1))
    assert not machine.exports()
    machine.go()
    for name in ("HOME", "NSYS"):
        monkeypatch.setenv(name, machine.env[name])
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with closing(open_trace(machine.report)) as trace:
        assert trace.kernels.height
    assert machine.exports() == list(machine.cache.iterdir())


def test_an_export_that_cannot_be_read_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    machine.go()
    monkeypatch.setenv("NSYS", str(machine.nsys))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    open_trace(machine.report).close()
    (export,) = machine.exports()
    export.write_bytes(export.read_bytes()[:5000])
    with pytest.raises(TraceError, match=r"run\.nsys-rep is cut off"):
        open_trace(machine.report)
    with closing(open_trace(machine.report)) as trace:
        assert trace.kernels.height


@pytest.mark.parametrize("home", [None, "/proc/no-home"])
def test_without_a_home_the_cache_is_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    machine = Machine(tmp_path)
    machine.go()
    monkeypatch.setenv("NSYS", str(machine.nsys))
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = tmp_path / f"streamlint-{os.geteuid()}"
    open_trace(machine.report).close()
    assert len(list(cache.iterdir())) == 1
    assert cache.stat().st_mode & 0o777 == 0o700

    shutil.rmtree(cache)
    (tmp_path / "theirs").mkdir()
    cache.symlink_to(tmp_path / "theirs")  # made by someone who waits for us
    with pytest.raises(TraceError, match="belongs to someone else"):
        convert.exported(machine.report)


# Two at once ------------------------------------------------------------------------


def test_two_reports_to_one_file_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    command = [sys.executable, "-m", "streamlint", "lint", str(BAD), "--format=json"]
    alone = subprocess.run(command, capture_output=True).stdout
    both = [subprocess.Popen([*command, "-o", str(target)]) for _ in range(2)]
    assert [one.wait(timeout=60) for one in both] == [1, 1]
    assert target.read_bytes() == alone
    assert list(tmp_path.iterdir()) == [target]

"""The command on a terminal: completion, colours, widths, how much it says, --watch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from commandline import Done, Run

SAMPLES = Path(__file__).parents[1] / "sample_traces"
BAD = SAMPLES / "pageable-async-copy" / "bad.sqlite"
FIXED = SAMPLES / "pageable-async-copy" / "fixed.sqlite"
STACKS = SAMPLES / "extra" / "torchbt.sqlite"
LOSSY = SAMPLES / "extra" / "misc.sqlite"
COMMAND = Path(sys.executable).with_name("streamlint")
RULE = "pageable-async-copy"


def environment(**more: str) -> dict[str, str]:
    unwanted = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TERM")
    kept = {k: v for k, v in os.environ.items() if k not in unwanted}
    kept["PATH"] = f"{COMMAND.parent}{os.pathsep}{kept['PATH']}"
    return {"TERM": "xterm", "PYTHONIOENCODING": "utf-8", **kept, **more}


def read(terminal: int, until: str | None, seconds: float = 60) -> str:
    """What comes until this text, or the end."""
    got, end = b"", time.monotonic() + seconds
    while until is None or until not in got.decode(errors="replace"):
        assert time.monotonic() < end, got.decode(errors="replace")
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # how Linux says that the other side has closed
                break
            if not piece:
                break
            got += piece
    return got.decode(errors="replace").replace("\r\n", "\n")


def on_terminal(
    *args: str | Path, variables: dict[str, str], columns: int = 100
) -> Done:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-m", "streamlint", *args],
        env=environment(**variables),
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    text = read(ours, None)
    os.close(ours)
    return Done(child.wait(), text, "")


# Completion ---------------------------------------------------------------------

COMPLETED = [
    (("explain", "pageable-a"), [RULE]),
    (("lint", "--format", "sar"), ["sarif"]),
    (("lint", "--select", "sync,small"), ["sync,small-copy-storm"]),
    (("lint", "--ignore", "transf"), ["transfers"]),
    (("lint", "--watc"), ["--watch"]),
]
FEW = COMPLETED[1:3]
"""For shells that need a second or more for each."""


def test_bash_completes() -> None:
    ask = "\n".join(
        f"COMP_WORDS=(streamlint {' '.join(words)}); COMP_CWORD={len(words)}; "
        '_streamlint_completion streamlint; echo "${COMPREPLY[*]}"'
        for words, _ in COMPLETED
    )
    script = f'eval "$(_STREAMLINT_COMPLETE=source_bash streamlint)"\n{ask}\n'
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [line.split() for line in done.stdout.splitlines()]
    assert answers == [wanted for _, wanted in COMPLETED]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(tmp_path: Path) -> None:
    ask = "; ".join(
        f'complete -C "streamlint {" ".join(words)}"; echo .' for words, _ in FEW
    )
    script = f"_STREAMLINT_COMPLETE=source_fish streamlint | source; {ask}"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        env=environment(HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [part.strip().splitlines() for part in done.stdout.split("\n.\n")[:-1]]
    names = [[line.split("\t")[0] for line in answer] for answer in answers]
    assert names == [wanted for _, wanted in FEW]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(tmp_path: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        variables = environment(HOME=str(tmp_path), TERM="dumb", PS1="> ")
        os.execvpe("zsh", ["zsh", "-f", "-i"], variables)
    try:
        load = "autoload -U compinit; compinit -u -D; "
        load += 'eval "$(_STREAMLINT_COMPLETE=source_zsh streamlint)"; '
        os.write(terminal, f"{load}echo $((6 * 7))\n".encode())
        read(terminal, "\n42")
        for words, (answer,) in FEW:
            os.write(terminal, f"streamlint {' '.join(words)}\t".encode())
            read(terminal, answer)
            os.write(terminal, b"\x15")  # kills the line
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


# Colours and widths ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "option", "colored"),
    [
        ({}, "auto", True),
        ({"NO_COLOR": "1"}, "auto", False),
        ({"NO_COLOR": ""}, "auto", True),
        ({"TERM": "dumb"}, "auto", False),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, "auto", False),
        ({"NO_COLOR": "1", "TERM": "dumb"}, "always", True),
        ({"FORCE_COLOR": "1"}, "never", False),
    ],
)
def test_a_terminal_has_colours_unless_somebody_objects(
    variables: dict[str, str], option: str, colored: bool
) -> None:
    args = ("lint", BAD, "--select", RULE, "--color", option)
    done = on_terminal(*args, variables=variables)
    assert ("\x1b[31m" in done.out) is colored
    assert RULE in done.out


def test_a_pipe_has_colours_only_if_forced(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain = run("lint", BAD, "--select", RULE).out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    forced = run("lint", BAD, "--select", RULE).out
    assert re.sub(r"\x1b\[[\d;]*m", "", forced) == plain != forced


@pytest.mark.parametrize("columns", [20, 33, 60, 80, 200])
def test_lines_fit_the_terminal_and_lose_nothing(columns: int) -> None:
    args = ("lint", BAD, "--select", RULE, "--isolated")
    done = on_terminal(*args, columns=columns, variables={"NO_COLOR": "1"})
    assert done.code == 1
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= max(columns, 20)
    whole = on_terminal(*args, columns=200, variables={"NO_COLOR": "1"}).out
    assert "".join(done.out.split()) == "".join(whole.split())


@pytest.mark.parametrize("columns", [40, 70, 200])
def test_the_list_of_rules_fits_the_terminal(columns: int) -> None:
    done = on_terminal("rules", columns=columns, variables={})
    assert max(map(len, done.out.splitlines())) <= columns
    assert done.out.count("\n  pageable-async-copy ") == 1


# How much it says ------------------------------------------------------------------


def test_quiet_has_findings_only_and_the_same_code(run: Run) -> None:
    plain, quiet = run("lint", BAD), run("lint", BAD, "--quiet")
    assert plain.code == quiet.code == 1
    assert set(quiet.out.splitlines()) < set(plain.out.splitlines())
    assert RULE in quiet.out
    assert "found nothing" not in quiet.out
    assert "replay:" not in quiet.out
    clean = run("lint", FIXED, "--quiet", "--symbols", BAD.parent)
    assert clean == Done(0, "", "")
    both = run("lint", FIXED, BAD, "-q")
    assert both == quiet
    info = run("lint", LOSSY, "--select", "capture-not-evaluable", "-q")
    assert info == Done(0, "", "")
    judged = ("lint", LOSSY, "--select", "capture-not-evaluable", "-q")
    failing = run(*judged, "--fail-on", "info")
    assert failing.code == 1
    assert "capture-not-evaluable" in failing.out
    nothing = SAMPLES / "extra" / "nocuda.sqlite"
    unable = run("lint", nothing, "-q")
    assert unable.code == 3
    assert "cannot be assessed" in unable.out
    wrong = run("lint", BAD, "--quiet", "--verbose")
    assert (wrong.code, wrong.out) == (2, "")


def test_verbose_has_stacks_evidence_silent_rules_and_tables(run: Run) -> None:
    plain = run("lint", STACKS)
    verbose = run("lint", STACKS, "--verbose")
    assert plain.code == verbose.code
    assert set(plain.out.splitlines()) <= set(verbose.out.splitlines())
    assert re.search(r"stack +\S*t\.py:\d+ <module>", verbose.out)
    assert verbose.out.count("\n    look ") > plain.out.count("\n    look ")
    assert re.search(r"found nothing \(\d+\)\n  \S+", verbose.out)
    assert re.search(r"\n  runtime_calls: \d+ rows of CUPTI_ACTIVITY", verbose.out)
    assert "the export has no table" in verbose.out


# Watching ---------------------------------------------------------------------------


class Watch:
    """`streamlint lint --watch`, and what it has written so far."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "streamlint", "lint", "--watch", folder, *options],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.until("watching")

    def _read(self) -> None:
        assert self._child.stdout is not None
        self._lines.extend(iter(self._child.stdout.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def until(self, text: str, times: int = 1) -> None:
        end = time.monotonic() + 60
        while self.text.count(text) < times:
            assert time.monotonic() < end, self.text
            assert self._child.poll() is None, self.text
            time.sleep(0.05)

    def end(self, number: signal.Signals) -> int:
        self._child.send_signal(number)
        code = self._child.wait(30)
        self._reader.join()
        assert self._child.stdout is not None
        self._child.stdout.close()
        return code


@contextlib.contextmanager
def watching(folder: Path, *options: str) -> Iterator[Watch]:
    watch = Watch(folder, *options)
    try:
        yield watch
    finally:
        watch.end(signal.SIGKILL)


def land(pieces: Sequence[bytes], target: Path, pause_s: float) -> None:
    with target.open("wb", buffering=0) as file:
        for piece in pieces:
            file.write(piece)
            time.sleep(pause_s)


def test_each_trace_that_lands_is_judged_once_it_is_whole(tmp_path: Path) -> None:
    shutil.copy(BAD, tmp_path / "old.sqlite")
    with watching(tmp_path, "--select", RULE, "--isolated") as watch:
        assert "1 trace there already" in watch.text
        (tmp_path / "broken.sqlite").write_bytes(b"SQLite format 3\0 and no more")
        (tmp_path / "notes.txt").write_text("no trace")
        whole = BAD.read_bytes()
        slow = tmp_path / "slow.sqlite"
        land([whole[:20_000], whole[20_000:]], slow, 2.5)
        watch.until("slow.sqlite · ")
        assert watch.text.count("slow.sqlite") == 1  # never as a broken file
        shutil.copy(FIXED, tmp_path / "next")
        (tmp_path / "next").replace(slow)
        watch.until("slow.sqlite · ", times=2)
        watch.until("error: broken.sqlite")
        watch.until("1 rule found nothing")
        shutil.copy(FIXED, tmp_path / "last.sqlite")
        watch.until("last.sqlite · ")
        assert "old.sqlite" not in watch.text
        assert watch.end(signal.SIGINT) == 130
        assert "Traceback" not in watch.text
        assert "Abort" not in watch.text


def test_a_watch_needs_a_folder_and_writes_no_file(run: Run, tmp_path: Path) -> None:
    gone = run("lint", "--watch", tmp_path / "gone")
    assert gone.code == 2
    assert "can't be watched" in gone.err
    for more in ([BAD], ["-o", tmp_path / "x"], ["--format", "perfetto"]):
        wrong = run("lint", "--watch", tmp_path, *more)
        assert wrong.code == 2
        assert wrong.err.startswith("error: --watch takes no TRACE")
    none = run("lint")
    assert none.code == 2
    assert none.err.startswith("error: no trace is named\nhint: ")

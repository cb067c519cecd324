"""The command as a user meets it: what it prints, where, and its exit code."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import unicodedata
from contextlib import ExitStack, closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from commandline import Done, Run, process
from tracebuilder import TraceBuilder

from streamlint import __version__, cli, engine
from streamlint.registry import all_rules
from streamlint.rule import Rule
from streamlint.trace import open_trace
from streamlint.trace.model import Trace

SAMPLES = Path(__file__).parents[1] / "sample_traces"
BAD = SAMPLES / "extra" / "legacy.sqlite"
MISC = SAMPLES / "extra" / "misc.sqlite"
FIXED = SAMPLES / "extra" / "legacy_fix.sqlite"
UNASSESSABLE = SAMPLES / "extra" / "2022.4.2_no_cuda_rows.sqlite"
CORE = (
    "--select=legacy-null-stream-barrier,device-sync-in-steady-state",
    "--select=l2-setaside-oversubscribed,l2-setaside-unused",
)
"""Rules enough for the form of a report; whole reports grow with every new rule."""
ABORTED = SAMPLES / "extra" / "aborted_export_2024.2.3.sqlite"


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def raw_control_characters(text: str) -> set[str]:
    bad = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    return {c for c in text if c != "\n" and unicodedata.category(c) in bad}


# Exit codes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "code"),
    [
        pytest.param([FIXED], 0, id="clean"),
        pytest.param([BAD], 1, id="findings"),
        pytest.param(["no.sqlite"], 2, id="error"),
        pytest.param([UNASSESSABLE], 3, id="nothing assessed"),
        pytest.param([FIXED, BAD], 1, id="findings in one of two"),
        pytest.param([BAD, UNASSESSABLE], 1, id="findings and nothing assessed"),
        pytest.param([FIXED, UNASSESSABLE], 3, id="clean and nothing assessed"),
        pytest.param([FIXED, "no.sqlite"], 2, id="clean and error"),
        pytest.param([BAD, "no.sqlite"], 2, id="findings and error"),
        pytest.param([BAD, "--exit-zero"], 0, id="exit zero"),
        pytest.param([UNASSESSABLE, "--exit-zero"], 3, id="exit zero, not assessed"),
        pytest.param(["no.sqlite", "--exit-zero"], 2, id="exit zero, error"),
        pytest.param([BAD, "--fail-on", "error"], 0, id="none as severe"),
        pytest.param([BAD, "--fail-on", "high"], 1, id="just as severe"),
        pytest.param([BAD, "--fail-on", "info"], 1, id="any"),
        pytest.param([], 2, id="no trace named"),
        pytest.param([BAD, "--format", "xml"], 2, id="no such format"),
        pytest.param([BAD, "--fail-on", "fatal"], 2, id="no such severity"),
    ],
)
def test_exit_code_of_lint(run: Run, args: list[str | Path], code: int) -> None:
    assert run("lint", *args).code == code


@pytest.mark.parametrize("form", ["text", "json"])
def test_exit_codes_of_the_process(form: str) -> None:
    assert process("lint", FIXED, "--format", form).code == 0
    assert process("lint", BAD, "--format", form).code == 1
    assert process("lint", ABORTED, "--format", form).code == 2
    assert process("lint", UNASSESSABLE, "--format", form).code == 3


# Text -------------------------------------------------------------------------------


def test_text_names_cause_cost_place_and_fix(run: Run) -> None:
    lines = run("lint", BAD).out.splitlines()
    head = lines[0].split(" · ")
    assert head[:3] == ["legacy.sqlite", "NVIDIA H200", "nsys 2025.3.2.0"]
    assert head[3] == "GPU span 2.92 ms"

    at = lines.index("high (1)")
    assert lines[at - 1] == ""
    assert lines[at + 1] == "  legacy-null-stream-barrier"
    end = lines.index("", at)
    labels = re.findall(r"^    (\w+) +\S", "\n".join(lines[at:end]), re.MULTILINE)
    assert labels == ["what", "cost", "where", "look", "fix"]
    text = " ".join(" ".join(lines[at:end]).split())
    assert re.search(r"cost .* [\d.]+ m?s, [\d.]+ % of the judged time", text)
    assert "device 0; streams 7, 13, 14; kernel spin" in text
    assert "cudaStreamNonBlocking" in text


def test_text_says_of_which_run_a_cost_is(run: Run) -> None:
    rules = "launch-bound-kernels,device-sync-in-steady-state"
    bad = {
        name: SAMPLES / name / "bad.sqlite"
        for name in ("launch-bound-kernels", "device-sync-in-steady-state")
    }
    for name, path in bad.items():
        text = " ".join(run("lint", path, f"--select={rules}").out.split())
        unprofiled = name == "launch-bound-kernels"
        assert ("% of the judged time of the unprofiled run (" in text) == unprofiled
        assert ("% of the judged time (" in text) != unprofiled


def test_text_says_what_was_not_assessed_and_how_to_record_it(run: Run) -> None:
    lines = run("lint", BAD, *CORE).out.splitlines()
    at = lines.index("not assessed (2)")
    assert lines[at + 1] == "  l2-setaside-oversubscribed, l2-setaside-unused"
    text = "\n".join(lines[at:])
    assert re.search(r"^    why +cudaDeviceSetLimit", text, re.MULTILINE)
    assert re.search(r"^    how +.*--cuda-trace-all-apis=true", text, re.MULTILINE)
    assert lines.index("high (1)") < at
    assert lines[-1] == "1 finding (1 high); 2 not assessed; 1 rule found nothing"


def test_text_groups_by_severity_the_worst_first(run: Run) -> None:
    lines = run("lint", SAMPLES / "extra" / "misc.sqlite").out.splitlines()
    groups = [line for line in lines if re.fullmatch(r"[a-z]+ \(\d+\)", line)]
    order = ["error", "high", "medium", "low", "info"]
    names = [group.split()[0] for group in groups]
    assert names == sorted(names, key=order.index)
    assert len(names) > 1
    total = sum(int(n) for n in re.findall(r"\((\d+)\)", " ".join(groups)))
    assert lines[-1].startswith(f"{total} findings (")


def test_text_names_the_source_line_where_the_trace_has_it(run: Run) -> None:
    out = run("lint", SAMPLES / "extra" / "torchbt.sqlite").out
    assert re.search(r"^    source t\.py:16 ", out, re.MULTILINE)


def test_text_of_a_clean_trace_counts_the_silent_rules(run: Run) -> None:
    last = run("lint", FIXED, *CORE).out.splitlines()[-1]
    assert last == "0 findings; 2 not assessed; 2 rules found nothing"


def test_a_trace_that_cannot_be_assessed_is_not_called_clean(run: Run) -> None:
    done = run("lint", UNASSESSABLE)
    assert done.out.splitlines()[-1].startswith("cannot be assessed: ")
    assert "0 findings" not in done.out
    assert "record the process that uses the GPU" in done.out


def test_text_has_no_line_wider_than_the_page(run: Run) -> None:
    for path in (BAD, UNASSESSABLE, SAMPLES / "extra" / "misc.sqlite"):
        for line in (run("lint", path).out + run("info", path).out).splitlines():
            assert len(line) <= 100


def test_color_is_added_on_demand_and_changes_no_word(run: Run) -> None:
    colored = run("lint", BAD, "--color", "always").out
    never = run("lint", BAD, "--color", "never").out
    assert "\x1b[" in colored
    assert "\x1b" not in never
    assert plain(colored) == never
    assert run("lint", BAD).out == never  # no terminal here


def test_a_terminal_gets_color_unless_the_user_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert cli._use_color(cli.Color.AUTO, on_screen=True)
    assert not cli._use_color(cli.Color.AUTO, on_screen=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not cli._use_color(cli.Color.AUTO, on_screen=True)
    assert cli._use_color(cli.Color.ALWAYS, on_screen=True)


def test_progress_goes_to_a_terminal_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "_PROGRESS_AFTER_S", 0.0)
    for is_terminal in (True, False):
        screen = StringIO()
        monkeypatch.setattr(screen, "isatty", lambda is_=is_terminal: is_)
        monkeypatch.setattr(sys, "stderr", screen)
        with cli._progress("t\x1b[31m.sqlite") as told:
            while is_terminal and not screen.getvalue():
                told("slow-rule")
        assert bool(screen.getvalue()) is is_terminal
        assert "\x1b[31m.sqlite" not in screen.getvalue()


def test_progress_says_how_many_rows_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "_PROGRESS_AFTER_S", 0.0)
    screen = StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    with open_trace(BAD) as trace, cli._progress("legacy.sqlite", trace) as told:
        while "slow-rule" not in screen.getvalue():
            told("slow-rule")
        assert f"legacy.sqlite, {trace.rows:,} rows: slow-rule" in screen.getvalue()


def test_what_does_not_fit_into_memory_is_refused_before_it_is_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_trace(BAD) as trace:
        rows = trace.rows
    for free, code in ((rows * engine.ROW_BYTES, 1), (rows * engine.ROW_BYTES - 1, 2)):
        monkeypatch.setattr(engine, "free_memory", lambda free=free: free)
        done = run("lint", BAD)
        assert done.code == code
    assert done.out == ""
    error, hint = done.err.splitlines()
    assert error.startswith(f"error: judging the {rows:,} rows of legacy.sqlite takes")
    assert hint.startswith("hint: lint with --no-replay, which takes ")
    assert ", or judge a part, such as --time " in hint
    assert run("lint", BAD, "--no-replay").code == 1
    monkeypatch.setattr(engine, "free_memory", lambda: 0)
    done = run("lint", BAD, "--no-replay")
    assert done.code == 2
    assert "--no-replay" not in done.err


# Several traces ---------------------------------------------------------------------


def test_several_traces_give_a_section_each_and_a_total(run: Run) -> None:
    done = run("lint", BAD, FIXED, BAD, *CORE)
    heads = [line for line in done.out.splitlines() if " · nsys " in line]
    assert [head.split(" · ")[0] for head in heads] == [
        "legacy.sqlite",
        "legacy_fix.sqlite",
        "legacy.sqlite",
    ]
    assert done.out.splitlines()[-1] == (
        "3 traces: 2 findings (2 high); 6 not assessed"
    )


def test_a_bad_file_does_not_hide_the_good_ones(run: Run) -> None:
    done = run("lint", BAD, ABORTED, FIXED)
    assert done.code == 2
    heads = [line for line in done.out.splitlines() if " · nsys " in line]
    assert len(heads) == 2
    assert done.err.count("error: ") == 1
    assert ABORTED.name in done.err


def test_a_bad_file_is_named_in_json(run: Run) -> None:
    done = run("lint", BAD, "no.sqlite", "--format", "json")
    assert done.code == 2
    document = json.loads(done.out)
    assert [trace["path"] for trace in document["traces"]] == [str(BAD)]
    (error,) = document["errors"]
    assert error["path"] == "no.sqlite"
    assert done.err == f"error: {error['message']}\nhint: {error['hint']}\n"


# Choosing rules ---------------------------------------------------------------------


def judged(done: Done) -> set[str]:
    (trace,) = json.loads(done.out)["traces"]
    return {f["rule"] for f in trace["findings"] + trace["not_assessed"]}


def test_select_and_ignore_take_rules_and_families(run: Run) -> None:
    def lint(*args: str) -> Done:
        return run("lint", BAD, "--format", "json", *args)

    l2 = {rule.name for rule in all_rules() if rule.family == "l2-cache"}
    barrier = {"legacy-null-stream-barrier"}
    assert judged(lint()) >= l2 | barrier
    assert judged(lint("--select", "streams")) == barrier
    assert judged(lint("--select", "streams,l2-cache")) == l2 | barrier
    assert judged(lint("--select", "streams", "--select", "l2-cache")) == l2 | barrier
    assert judged(lint("--ignore", "l2-cache")) & (l2 | barrier) == barrier
    assert judged(lint("--ignore", *barrier)) & (l2 | barrier) == l2
    assert judged(lint("--select", "streams", "--ignore", *barrier)) == set()
    assert lint("--ignore", "streams").code == 0
    assert lint("--select", "l2-cache").code == 3


@pytest.mark.parametrize(
    ("args", "error", "hint"),
    [
        (["--select", "stream"], "stream", "did you mean streams?"),
        (["--ignore", "pagable-copy"], "pagable-copy", "mean pageable-async-copy?"),
        (["--select", "xyzzy"], "xyzzy", "`streamlint rules` lists them"),
        (["--select", "sync", "--ignore", "sync"], "no rule", "streamlint rules"),
    ],
)
def test_an_unknown_rule_is_an_error_with_a_suggestion(
    run: Run, args: list[str], error: str, hint: str
) -> None:
    done = run("lint", BAD, *args)
    assert (done.code, done.out) == (2, "")
    first, second = done.err.splitlines()
    assert first.startswith("error: ")
    assert error in first
    assert second.startswith("hint: ")
    assert hint in second


# Output files -----------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "json"])
def test_output_holds_what_stdout_would(run: Run, tmp_path: Path, form: str) -> None:
    target = tmp_path / "report"
    done = run("lint", BAD, "--format", form, "--output", target)
    assert (done.code, done.out, done.err) == (1, "", "")
    assert target.read_text("utf-8") == run("lint", BAD, "--format", form).out
    assert list(tmp_path.iterdir()) == [target]


def test_output_replaces_an_older_report_and_keeps_links(
    run: Run, tmp_path: Path
) -> None:
    target, link = tmp_path / "report", tmp_path / "latest"
    target.write_text("old")
    link.symlink_to(target)
    run("lint", FIXED, "-o", link)
    assert target.read_text("utf-8").startswith("legacy_fix.sqlite")
    assert link.is_symlink()


def test_nothing_is_written_when_no_trace_could_be_read(
    run: Run, tmp_path: Path
) -> None:
    target = tmp_path / "report"
    target.write_text("old")
    assert run("lint", ABORTED, "-o", target).code == 2
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_nothing_is_left_when_writing_fails(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "report"
    target.write_text("old")
    monkeypatch.setattr(Path, "replace", disk_full)
    done = run("lint", BAD, "-o", target)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines() == [
        f"error: {target} can't be written (No space left on device)",
        "hint: free some space, or name a file on another disk",
    ]
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("target", ["no/such/folder/report", "."])
def test_output_that_cannot_be_written_is_an_error(
    run: Run, tmp_path: Path, target: str
) -> None:
    done = run("lint", BAD, "--output", tmp_path / target)
    assert (done.code, done.out) == (2, "")
    assert [line.split()[0] for line in done.err.splitlines()] == ["error:", "hint:"]


def test_output_never_overwrites_a_trace(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "mine.sqlite"
    shutil.copy(BAD, trace)
    before = trace.read_bytes()
    done = run("lint", "--output", trace, BAD)
    assert (done.code, done.out) == (2, "")
    assert "names a trace" in done.err
    assert trace.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no such device here")
def test_output_may_be_a_device() -> None:
    done = process("lint", BAD, "--format", "json", "-o", "/dev/stdout")
    assert done.code == 1
    assert json.loads(done.out)["format"] == 1


# Other commands ---------------------------------------------------------------------


def test_rules_lists_every_rule_once_below_its_family(run: Run) -> None:
    done = run("rules")
    assert (done.code, done.err) == (0, "")
    families = [line[:-1] for line in done.out.splitlines() if line.endswith(":")]
    assert families == sorted({rule.family for rule in all_rules()})
    for rule in all_rules():
        (line,) = re.findall(rf"^  {rule.name} .*", done.out, re.MULTILINE)
        assert line.endswith(rule.summary)


def test_explain_shows_the_page_of_a_rule(run: Run) -> None:
    done = run("explain", "legacy-null-stream-barrier")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "# legacy-null-stream-barrier"
    assert [line for line in lines if line.startswith("## ")] == [
        "## What it does",
        "## Why it costs time",
        "## Evidence",
        "## Exemptions",
        "## Fix",
        "## References",
        "## Thresholds",
    ]


def test_explain_suggests_the_rule_that_was_meant(run: Run) -> None:
    done = run("explain", "legacy-null-stream")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "error: no rule is called legacy-null-stream\n"
        "hint: did you mean legacy-null-stream-barrier?\n"
    )


def test_info_shows_the_capture_and_what_can_be_judged(run: Run) -> None:
    done = run("info", SAMPLES / "extra" / "l2.sqlite")
    assert (done.code, done.err) == (0, "")
    for shown in (
        "nsys 2025.3.2.0",
        "3.20.3",
        "NVIDIA H200",
        "w (828)",
        "20 kernels, 0 copies",
        "337 us",
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "can be judged (",
        "not assessed (",
        "--cuda-trace-all-apis=true",
    ):
        assert shown in done.out


def test_info_of_a_trace_without_gpu_work_says_what_is_lacking(run: Run) -> None:
    done = run("info", UNASSESSABLE)
    assert done.code == 0
    assert "can be judged (0)" in done.out
    assert "no CUDA activity was recorded" in done.out


def test_version(run: Run) -> None:
    assert run("--version") == Done(0, f"streamlint {__version__}\n", "")
    assert process("--version").out == f"streamlint {__version__}\n"


def test_help_names_every_command_and_the_exit_codes(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    for shown in ("lint", "rules", "explain", "info", "2 error"):
        assert shown in done.out


UNUSED = ["numpy.ma", "pandas", "plotly", "pyarrow"]
HEAVY = ["numpy", "pandas", "plotly", "polars", "pyarrow", "rich"]


@pytest.mark.parametrize(
    ("args", "heavy"),
    [
        (("--help",), HEAVY),
        (("lint", "--help"), HEAVY),
        (("--version",), HEAVY),
        (("lint", "--exit-zero", str(BAD)), UNUSED),
        (("lint", "--exit-zero", str(MISC)), UNUSED),
    ],
)
def test_starts_without_the_packages_it_does_not_need(
    args: tuple[str, ...], heavy: list[str]
) -> None:
    code = (
        "import atexit, sys\n"
        f"heavy = {heavy}\n"
        "atexit.register(lambda: print(*(set(heavy) & set(sys.modules)), "
        "file=sys.stderr))\n"
        f"sys.argv = ['streamlint', *{args}]\n"
        "from streamlint.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    assert done.stdout
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("thread", [False, True])
def test_the_end_at_once_leaves_nothing_out(thread: bool) -> None:
    code = (
        "import atexit, sys, threading, time\n"
        "from streamlint.cli import run\n"
        "atexit.register(print, 'cleared up')\n"
        f"sys.argv = ['streamlint', 'lint', {str(BAD)!r}]\n"
        "late = lambda: (time.sleep(2), print('waited for'))\n"
        f"{thread} and threading.Thread(target=late).start()\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8"
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "\n1 finding" in done.stdout
    assert done.stdout.endswith("cleared up\n")
    assert ("waited for\n" in done.stdout) == thread


@pytest.mark.skipif(sys.platform != "linux", reason="has no affinity to CPUs")
@pytest.mark.parametrize("taken", [False, True])
def test_of_small_lints_one_at_a_time_stays_on_a_cpu(
    run: Run, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    import fcntl

    before, during, judge = os.sched_getaffinity(0), [], engine.lint

    def judged(*args: Any, **options: Any) -> engine.Report:
        during.append(os.sched_getaffinity(0))
        return judge(*args, **options)

    monkeypatch.setattr(engine, "lint", judged)
    with ExitStack() as held:
        for cpu in before if taken else ():
            folder = os.open(f"/sys/devices/system/cpu/cpu{cpu}", os.O_RDONLY)
            held.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        run("lint", FIXED)
    (there,) = during
    assert there <= before
    assert len(there) == (len(before) if taken else 1)
    assert os.sched_getaffinity(0) == before


def test_a_reader_that_goes_away_is_no_crash() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "streamlint", "lint", BAD],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 1  # as if it had been read


def test_a_terminal_that_knows_only_ascii_gets_escapes() -> None:
    env = dict(os.environ, PYTHONIOENCODING="ascii")
    done = process("lint", BAD, env=env)
    assert (done.code, done.err) == (1, "")
    assert "legacy.sqlite \\xb7 NVIDIA H200" in done.out


# Bad input --------------------------------------------------------------------------


def database(path: Path, *tables: str) -> Path:
    with closing(sqlite3.connect(path)) as db:
        for table in tables:
            db.execute(f"CREATE TABLE {table} (id INTEGER, value TEXT)")
        db.commit()
    return path


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def bad_inputs(folder: Path) -> dict[str, tuple[Path, str]]:
    """By kind: the path, and what the error has to say."""
    whole = BAD.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    noise = bytes((i * i * 31 + i // 7) % 256 for i in range(5000))
    holed = whole[:2048] + noise + whole[2048 + len(noise) :]
    other = database(folder / "other.sqlite", "customers", "orders")
    nvprof = database(folder / "nvprof.sqlite", "StringTable", "Version")
    (folder / "without").mkdir()
    return {
        "missing": (folder / "none.sqlite", "does not exist"),
        "missing report": (folder / "none.nsys-rep", "does not exist"),
        "directory": (folder / "without", "is a directory"),
        "empty": (written(folder / "empty.sqlite", b""), "is empty"),
        "LFS pointer": (written(folder / "lfs.sqlite", pointer), "Git LFS pointer"),
        "random bytes": (written(folder / "x.sqlite", noise), "not a SQLite file"),
        "only a header": (written(folder / "head.sqlite", whole[:100]), "cut off"),
        "truncated": (written(folder / "half.sqlite", whole[:30_000]), "cut off"),
        "damaged": (written(folder / "holed.sqlite", holed), "damaged"),
        "nvprof": (nvprof, "nvprof"),
        "other database": (other, "not an nsys export"),
        "aborted export": (ABORTED, "never finished"),
        "report": (written(folder / "r.nsys-rep", noise), "no nsys was found"),
        "old report": (written(folder / "r.qdrep", noise), "no nsys was found"),
    }


KINDS = (
    *("missing", "missing report", "directory", "empty", "LFS pointer"),
    *("random bytes", "only a header", "truncated", "damaged", "nvprof"),
    *("other database", "aborted export", "report", "old report"),
)


def without_nsys(folder: Path) -> dict[str, str]:
    # NSYS names the one to use, so one in an install folder isn't looked for.
    return {"PATH": "", "HOME": str(folder / "home"), "NSYS": str(folder / "none")}


@pytest.mark.parametrize("command", ["lint", "info"])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_input_is_one_error_and_one_hint(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, command: str
) -> None:
    for name, value in without_nsys(tmp_path).items():
        monkeypatch.setenv(name, value)
    path, said = bad_inputs(tmp_path)[kind]
    done = run(command, path)
    assert (done.code, done.out) == (2, "")
    first, second = done.err.splitlines()
    assert re.match(r"error: \S", first)
    assert re.match(r"hint: \S", second)
    assert said in first
    assert path.name in first


def test_every_bad_input_at_once_in_a_process(tmp_path: Path) -> None:
    inputs = bad_inputs(tmp_path)
    assert set(inputs) == set(KINDS)
    before = sorted(tmp_path.rglob("*"))
    paths = [path for path, _ in inputs.values()]
    env = {**without_nsys(tmp_path), "PYTHONIOENCODING": "utf-8"}
    done = process("lint", *paths, "--format", "json", cwd=tmp_path, env=env)
    assert (done.code, done.out) == (2, "")
    lines = done.err.splitlines()
    assert len(lines) == 2 * len(paths)
    assert all(line.startswith("error: ") for line in lines[::2])
    assert all(line.startswith("hint: ") for line in lines[1::2])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_report_without_any_environment_is_an_error(tmp_path: Path) -> None:
    report = written(tmp_path / "r.qdrep", b"QuadD")
    done = process("lint", report, cwd=tmp_path, env={})
    assert (done.code, done.out) == (2, "")
    assert [line.split()[0] for line in done.err.splitlines()] == ["error:", "hint:"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_refused_without_waiting_for_it(run: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sqlite")
    done = run("lint", tmp_path / "pipe.sqlite")
    assert done.code == 2
    assert "not a regular file" in done.err


# Bugs -------------------------------------------------------------------------------


def crash(trace: Trace) -> list[object]:
    """Breaks."""
    raise ValueError("spin\x1b[31m")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_crashed_rule_is_told_beside_the_other_findings(
    run: Run, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    rules = (Rule("broken", "fakes", crash, (), False), *all_rules())  # type: ignore[arg-type]
    monkeypatch.setattr("streamlint.config.Config.chosen", lambda *_: rules)
    done = run("lint", BAD, "--format", form)
    assert done.code == 2
    assert "legacy-null-stream-barrier" in done.out
    assert "ValueError in rule broken" in done.out
    assert "ValueError: spin\\x1b[31m" in done.err  # the traceback, to report
    assert raw_control_characters(done.out + done.err) == set()


def test_a_bug_elsewhere_does_not_exit_like_findings(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamlint.engine.lint", crash)
    done = run("lint", BAD)
    assert (done.code, done.out) == (2, "")
    assert "this is a bug in streamlint" in done.err.splitlines()[-2]


# Hostile names ----------------------------------------------------------------------

HOSTILE = (
    "k\x1b[31m\x1b]0;owned\x07[bold red]x[/bold red]\r\n\x00\x9b2J\u202egnp\u2066."
    "\u200b\u2028\u00ad{0}%s</script>"
)


def hostile_trace(folder: Path) -> Path:
    """A trace with findings whose every name tries to get at the terminal."""
    builder = TraceBuilder(process=f"./{HOSTILE}")
    builder.rows["TARGET_INFO_GPU"][0]["name"] = HOSTILE
    builder.stream(13)
    builder.stream(14)
    builder.thread(HOSTILE)
    builder.diagnostic("error", HOSTILE)
    builder.environment("CUDA_LAUNCH_BLOCKING", HOSTILE)
    for i in range(20):
        at = 1000 + 1000 * i
        for stream in (13, 14):
            builder.kernel(
                HOSTILE,
                stream=stream,
                start=at + 100,
                end=at + 300,
                issue=(at + 2 * stream, at + 2 * stream + 1),
            )
        builder.kernel(
            HOSTILE, stream=7, start=at + 301, end=at + 400, issue=(at + 40, at + 42)
        )
        call = builder.memcpy(
            "HtoD",
            1 << 20,
            src="pageable",
            stream=13,
            start=at + 450,
            end=at + 690,
            issue=(at + 420, at + 700),
        )
        builder.backtrace(call, [(HOSTILE, HOSTILE, 16)], native=[(HOSTILE, HOSTILE)])
        builder.nvtx(HOSTILE, at, at + 900)
    return builder.write(folder / "t\x1b[31m\n\u202e.sqlite")


@pytest.mark.parametrize(
    "args",
    [["lint"], ["lint", "--color", "always"], ["info"], ["lint", "--format=json"]],
)
def test_no_name_in_a_trace_reaches_the_terminal_raw(
    run: Run, tmp_path: Path, args: list[str]
) -> None:
    done = run(*args, hostile_trace(tmp_path))
    assert raw_control_characters(plain(done.out) + done.err) == set()
    if args == ["info"]:
        return
    assert done.code == 1
    assert "\\x1b[31m" in done.out or "\\u001b[31m" in done.out
    assert "[bold red]x[/bold red]" in done.out
    assert "legacy-null-stream-barrier" in done.out
    assert "pageable-async-copy" in done.out


@pytest.mark.parametrize(
    "form", ["text", "json", "sarif", "github", "markdown", "junit", "perfetto", "html"]
)
def test_no_name_in_a_trace_or_of_it_is_raw_in_a_file(
    run: Run, tmp_path: Path, form: str
) -> None:
    name = os.fsdecode(b"\xff\x1b[31m</title>[/].sqlite").replace("/", "\u2044")
    source = hostile_trace(tmp_path).rename(tmp_path / name)
    target = tmp_path / "out"
    if form == "html":
        done = run("report", source, "--plotlyjs", "cdn", "-o", target)
    else:
        done = run("lint", source, "--exit-zero", "--format", form, "-o", target)
    assert done.code == 0, done.err
    content = target.read_bytes()
    text = (gzip.decompress(content) if form == "perfetto" else content).decode()
    assert raw_control_characters(text + done.err) <= {"\t"}
    if form == "html":
        assert text.count("</title>") == 1
        assert HOSTILE[-12:] not in text  # it ends the script element
    if form in ("json", "sarif", "perfetto"):
        json.loads(text)


def test_no_name_in_an_error_reaches_the_terminal_raw(run: Run, tmp_path: Path) -> None:
    named = tmp_path / "t\x1b[31m\n\u202e.sqlite"
    for args in (["lint", named], ["explain", HOSTILE], ["lint", "--select", HOSTILE]):
        done = run(*args, *([BAD] if "--select" in args else []))
        assert (done.code, done.out) == (2, "")
        assert len(done.err.splitlines()) == 2
        assert raw_control_characters(done.err) == set()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_glibc_takes_one_heap_for_all_threads() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from streamlint import cli; print(cli._share_one_heap())",
        ],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert done.stdout == "True\n"

"""The harness with a fake nsys: a script that a test puts on PATH."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tracebuilder import TraceBuilder

from streamlint import registry
from streamlint.errors import StreamlintError, UsageError
from streamlint.findings import UNPROFILED, Claim, Finding
from streamlint.harness import collect, nsys, runner, score, workloads
from streamlint.harness.__main__ import main
from streamlint.harness.nsys import Detail, Nsys
from streamlint.harness.runner import Settings, Status

ROOT = Path(__file__).parents[1]
PAIR = "legacy-null-stream-barrier"

FAKE_NSYS = """\
import os, pathlib, shutil, signal, subprocess, sys

mode = os.environ.get("FAKE_MODE", "")
version = os.environ.get("FAKE_VERSION", "2025.3.1")
options = os.environ.get("FAKE_OPTIONS", "").split()
traces = pathlib.Path(os.environ["FAKE_TRACES"])
arguments = sys.argv[1:]
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(" ".join(arguments) + "\\n")

if arguments == ["--version"]:
    print(f"NVIDIA Nsight Systems version {version}.90-253135822126v0")
elif arguments[-1] == "--help":
    print("usage: nsys", *options)
elif arguments[0] == "export":
    if mode == "export lacks library":
        sys.exit("nsys: error while loading shared libraries: libdw.so.1: "
                 "cannot open shared object file: No such file or directory")
    report = pathlib.Path(arguments[-1]).read_text()
    shutil.copy(traces / f"{report}.sqlite", arguments[arguments.index("-o") + 1])
else:
    base = arguments[arguments.index("-o") + 1]
    command = arguments[arguments.index("-o") + 2:]
    if mode == "disk full":
        sys.exit("could not write: No space left on device")
    target = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = target.wait()
    if mode == "import lacks library":
        pathlib.Path(base + ".qdstrm").write_text("raw")
        sys.exit(1)
    kind = mode or ("fixed" if "fixed" in command else "bad")
    pathlib.Path(base + ".nsys-rep").write_text(kind)
    sys.exit(code if code >= 0 else 128 - code)
"""

WORKLOAD = """\
# harness: rule {rule}
import os, sys

variant, repeat = sys.argv[2], int(sys.argv[4])
with open(os.environ["FAKE_LOG"], "a") as log:
    log.write(f"workload {rule} {{variant}} x{{repeat}}\\n")
{body}
for i in range(repeat):
    print("REGION_US", {{"bad": 2000, "fixed": 1000}}[variant] + i)
print("CHECK ok")
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an nsys in `bin`, what it exports in `traces`, and its `log`."""
    script = tmp_path / "pkg" / "target-linux-x64" / "nsys"
    executable(script, FAKE_NSYS)
    (tmp_path / "traces").mkdir()
    for kind in ("bad", "fixed"):
        builder = TraceBuilder()
        builder.stream(13)
        builder.kernel("step", stream=13, start=20, end=60)
        builder.write(tmp_path / "traces" / f"{kind}.sqlite")
    builder = TraceBuilder()
    builder.call("cudaMalloc", 10, 5)
    builder.write(tmp_path / "traces" / "calls only.sqlite")
    builder = TraceBuilder()
    builder.nvtx("setup", 1, 2)
    builder.write(tmp_path / "traces" / "nothing.sqlite")
    monkeypatch.setenv("NSYS", str(script))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAKE_TRACES", str(tmp_path / "traces"))
    monkeypatch.setattr(nsys, "gpu_visible", lambda: True)
    return tmp_path


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable} -S\n{text}")
    path.chmod(0o755)


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def logged(folder: Path, word: str) -> list[str]:
    lines = (folder / "log").read_text().splitlines()
    return [line for line in lines if line.startswith(word)]


def capture(folder: Path, *command: str) -> nsys.Recording:
    return nsys.capture(
        command, folder / "report", folder / "out.sqlite", lambda _: None
    )


# Flags ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "lacking"),
    [
        ((2022, 4, 2), {"--cuda-trace-all-apis", "--cuda-event-trace"}),
        ((2024, 2, 3), {"--cuda-trace-all-apis", "--cuda-event-trace"}),
        ((2025, 3, 1), set()),
        ((2026, 4), set()),
    ],
)
def test_only_flags_that_the_version_has(
    version: tuple[int, ...], lacking: set[str]
) -> None:
    wanted = {
        "--trace": "cuda,nvtx",
        "--sample": "none",
        "--cpuctxsw": "none",
        "--cuda-trace-all-apis": "true",
        "--cuda-graph-trace": "node",
        "--cuda-memory-usage": "true",
        "--cuda-event-trace": "false",
    }
    arguments, missed = nsys.flags(Nsys(Path("nsys"), version, ""))
    given = dict(argument.split("=", 1) for argument in arguments)
    assert given == {n: v for n, v in wanted.items() if n not in lacking}
    assert ("every CUDA call" in missed) == ("--cuda-trace-all-apis" in lacking)


def test_help_decides_between_versions_that_were_looked_at() -> None:
    between = Nsys(Path("nsys"), (2025, 1, 1), "  --cuda-trace-all-apis=true,false\n")
    assert "--cuda-trace-all-apis=true" in nsys.flags(between)[0]
    assert not between.has("--cuda-trace-all")


def test_light_and_default_flags_record_less() -> None:
    tool = Nsys(Path("nsys"), (2025, 3, 1), "")
    light = nsys.flags(tool, Detail.LIGHT)[0]
    assert "--cuda-graph-trace=graph" in light
    assert not [flag for flag in light if "all-apis" in flag or "memory" in flag]
    default = nsys.flags(tool, Detail.DEFAULT)[0]
    assert default == ["--sample=none", "--cpuctxsw=none"]


def test_call_stacks_need_sampling() -> None:
    given = nsys.flags(Nsys(Path("nsys"), (2025, 3, 1), ""), call_stacks=True)[0]
    assert {"--sample=process-tree", "--cudabacktrace=all:0"} <= set(given)
    assert "--python-backtrace=cuda" in given
    assert "--sample=none" not in given
    _, missed = nsys.flags(Nsys(Path("nsys"), (2022, 4), ""), call_stacks=True)
    assert "Python call stacks" in missed


def test_the_version_is_asked_for(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VERSION", "2024.2.3")
    tool = nsys.locate()
    assert tool.version == (2024, 2, 3)
    assert tool.version_text == "2024.2.3"
    assert not tool.has("--cuda-trace-all-apis")


# Recording ------------------------------------------------------------------------


def test_a_program_is_recorded_and_exported_with_payloads(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_OPTIONS", "--include-json --include-blobs")
    recording = capture(fake, *python("pass"))
    assert recording.exit_code == 0
    assert nsys.failure(recording) is None
    assert recording.report.name == "report.nsys-rep"
    assert (fake / "out.sqlite").is_file()
    assert (
        "--include-blobs=true --include-json=true" in logged(fake, "export --type")[0]
    )


@pytest.mark.parametrize(
    ("code", "exit_code", "how"),
    [
        ("raise SystemExit(7)", 7, "exit code 7"),
        ("import os; os.kill(os.getpid(), 11)", 139, "signal 11"),
    ],
)
def test_exit_code_of_the_program_is_kept(
    fake: Path, code: str, exit_code: int, how: str
) -> None:
    recording = capture(fake, *python(code))
    failed = nsys.failure(recording)
    assert failed is not None
    assert failed.exit_code == exit_code
    assert how in failed.message
    assert (fake / "out.sqlite").is_file()


def test_capture_command_ends_with_the_exit_code_of_the_program(fake: Path) -> None:
    command = (sys.executable, "-m", "streamlint.harness", "capture", "-o", fake / "x")
    done = subprocess.run(
        [*command, "--", *python("raise SystemExit(7)")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 7, done.stderr
    assert "error: the program failed (exit code 7)\nhint:" in done.stderr
    assert (fake / "x.sqlite").is_file()


def test_ctrl_c_ends_the_program_and_keeps_what_was_captured(fake: Path) -> None:
    target = (
        "import pathlib, sys, time\n"
        f"folder = pathlib.Path({str(fake)!r})\n"
        "try: (folder / 'ready').touch(); time.sleep(60)\n"
        "except KeyboardInterrupt: (folder / 'interrupted').touch(); sys.exit(1)\n"
    )
    command = (sys.executable, "-m", "streamlint.harness", "capture", "-o", fake / "x")
    with subprocess.Popen(
        [*command, "--", *python(target)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        wait_for((fake / "ready").exists)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert (fake / "interrupted").exists()
    assert (fake / "x.sqlite").is_file()
    assert "interrupted" in errors


def wait_for(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_gone(pid_file: Path) -> bool:
    """Ended, even if nobody has asked how."""
    try:
        stat = Path(f"/proc/{pid_file.read_text()}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_a_program_that_takes_too_long_is_ended(fake: Path) -> None:
    pid_file = fake / "pid"
    code = (
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    tool = nsys.locate()
    with pytest.raises(StreamlintError, match="did not end within 2 s"):
        nsys.record(tool, python(code), fake / "late", [], timeout_s=2)
    wait_for(lambda: is_gone(pid_file))


def test_output_is_refused_if_it_exists(fake: Path) -> None:
    (fake / "x.sqlite").touch()
    with pytest.raises(UsageError, match="exists already"):
        main(["capture", "-o", str(fake / "x"), "--", "true"], lambda _: None)


# Errors ---------------------------------------------------------------------------


def test_no_nsys(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS", str(fake / "none"))
    with pytest.raises(StreamlintError, match="which is no program"):
        nsys.locate()


def test_no_program(fake: Path) -> None:
    with pytest.raises(UsageError, match="can't be run"):
        capture(fake, str(fake / "none"))


@pytest.mark.parametrize("importer", [False, True])
def test_importer_without_a_library_names_it(
    fake: Path, monkeypatch: pytest.MonkeyPatch, importer: bool
) -> None:
    monkeypatch.setenv("FAKE_MODE", "import lacks library")
    if importer:
        lost = "libdw.so.1: cannot open shared object file: No such file"
        executable(
            fake / "pkg" / "host-linux-x64" / "QdstrmImporter",
            f"raise SystemExit({f'error while loading shared libraries: {lost}'!r})",
        )
    with pytest.raises(StreamlintError) as caught:
        capture(fake, *python("pass"))
    if importer:
        assert caught.value.message.endswith("lacks the library libdw.so.1")
        assert "libdw1 on Debian" in caught.value.hint
    assert "report.qdstrm" in caught.value.hint


def test_export_without_a_library_names_it(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "export lacks library")
    with pytest.raises(StreamlintError, match=r"lacks the library libdw\.so\.1"):
        capture(fake, *python("pass"))


def test_disk_full(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_MODE", "disk full")
    tool = nsys.locate()
    with pytest.raises(StreamlintError, match="no space is left"):
        nsys.record(tool, python("pass"), fake / "x", [], on_line=lambda _: None)


@pytest.mark.parametrize(
    ("mode", "gpu", "message", "hint"),
    [
        ("calls only", True, "1 CUDA calls were captured, but no GPU work", "_exit"),
        ("nothing", True, "no CUDA call in the processes", "--follow-forks"),
        ("nothing", False, "no NVIDIA GPU or driver", "where the GPU is"),
    ],
)
def test_nothing_captured_says_why(
    fake: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    gpu: bool,
    message: str,
    hint: str,
) -> None:
    monkeypatch.setenv("FAKE_MODE", mode)
    monkeypatch.setattr(nsys, "gpu_visible", lambda: gpu)
    with pytest.raises(nsys.NothingCaptured) as caught:
        capture(fake, *python("pass"))
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_nothing_captured_of_a_program_that_failed_is_its_failure(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "nothing")
    with pytest.raises(nsys.TargetFailed) as caught:
        capture(fake, *python("raise SystemExit(3)"))
    assert caught.value.exit_code == 3


def test_a_missing_gpu_is_only_a_warning(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsys, "gpu_visible", lambda: False)
    said: list[str] = []
    nsys.capture(python("pass"), fake / "x", fake / "x.sqlite", said.append)
    assert said == ["warning: no NVIDIA GPU or driver is visible here"]


# A bare node ----------------------------------------------------------------------


def test_recording_needs_the_standard_library_alone(fake: Path) -> None:
    """-S: no site-packages, so an import of anything else fails."""
    command = (sys.executable, "-S", "-m", "streamlint.harness")
    for arguments in (
        ("capture", "-o", str(fake / "x"), "--", *python("pass")),
        ("list",),
        ("run", "--help"),
    ):
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert (fake / "x.sqlite").is_file()


def test_the_harness_does_not_import_what_it_may_lack() -> None:
    code = (
        "import sys, streamlint.harness.__main__, streamlint.trace.convert\n"
        "heavy = {'polars', 'numpy', 'typer', 'rich', 'pandas', 'plotly'}\n"
        "print(heavy & {name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stderr


# Workloads ------------------------------------------------------------------------


def test_every_workload_has_a_header_that_can_be_read() -> None:
    found, problems = workloads.find()
    assert [problem.message for problem in problems] == []
    names = [pair.name for workload in found for pair in workload.pairs]
    assert len(names) == len(set(names))


def test_header_says_how_to_run(tmp_path: Path) -> None:
    source = tmp_path / "busy_poll.cu"
    source.write_text(
        "// harness: rule busy-poll\n"
        "// harness: env bad CUDA_LAUNCH_BLOCKING=1\n"
        "// harness: nvcc -Xcompiler '-pthread -g'\n"
        "// harness: arch-min 90\n"
        "// harness: cause event stream\n"
        "int main() {}\n"
    )
    workload = workloads.read(source)
    assert workload.variables("bad") == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert workload.variables("fixed") == {}
    assert workload.nvcc == ("-Xcompiler", "-pthread -g")
    assert workload.arch_min == 90
    pairs = [pair.name for pair in workload.pairs]
    assert pairs == ["busy-poll", "busy-poll/event", "busy-poll/stream"]
    line = workloads.command(workload.pairs[1], Path("x"), "bad", 7)
    assert line == [*("x", "--variant", "bad", "--repeat", "7", "--cause", "event")]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("rule other", "must say `rule busy-poll`"),
        ("rule busy-poll\n// harness: colour red", "does not know `colour`"),
        ("rule busy-poll\n// harness: env X=1", "not `env bad NAME=VALUE`"),
        ("rule busy-poll\n// harness: arch-min x", "which is no number"),
    ],
)
def test_wrong_header(tmp_path: Path, header: str, message: str) -> None:
    source = tmp_path / "busy_poll.cu"
    source.write_text(f"// harness: {header}\n")
    with pytest.raises(UsageError, match=message):
        workloads.read(source)


def test_programs_are_built_once_until_a_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    executable(
        tmp_path / "bin" / "nvcc",
        f"import pathlib, sys\n"
        f"if '--version' in sys.argv: sys.exit(print('release 13.0, V13.0.1'))\n"
        f"with open({str(log)!r}, 'a') as log: print(*sys.argv, file=log)\n"
        f"if 'BROKEN' in pathlib.Path(sys.argv[-1]).read_text():\n"
        f"    sys.exit('/some/where/busy_poll.cu(3): error: expected a `;`')\n"
        f"pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).touch()\n",
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    source = tmp_path / "busy_poll.cu"
    source.write_text("// harness: rule busy-poll\n")
    workload = workloads.read(source)
    builder = workloads.Builder.here(tmp_path / "build", 90)
    assert builder.build(workload) == builder.build(workload)
    assert log.read_text().count("-arch=sm_90") == 1
    source.write_text("// harness: rule busy-poll\n// BROKEN\n")
    error = builder.build_all([workload])[workload]
    assert isinstance(error, workloads.BuildError)
    assert error.message.endswith(
        "does not compile: busy_poll.cu(3): error: expected a `;`"
    )


def test_building_without_nvcc_or_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(tmp_path / "nvcc", "pass")
    monkeypatch.setattr(workloads, "find_nvcc", lambda: None)
    with pytest.raises(workloads.BuildError, match="no nvcc found"):
        workloads.Builder.here(tmp_path, 90)
    monkeypatch.setattr(workloads, "find_nvcc", lambda: tmp_path / "nvcc")
    with pytest.raises(workloads.BuildError, match="no GPU found to build for"):
        workloads.Builder.here(tmp_path, None)


@pytest.mark.parametrize("text", ["90", "9.0", "sm_90", "sm_90a"])
def test_architectures(text: str) -> None:
    assert workloads.arch_number(text) == 90


# The runner -----------------------------------------------------------------------


def add_workload(folder: Path, rule: str, body: str = "") -> None:
    source = folder / "sources" / f"{rule.replace('-', '_')}__fake.py"
    source.parent.mkdir(exist_ok=True)
    source.write_text(WORKLOAD.format(rule=rule, body=body))


def settings(folder: Path, **more: object) -> Settings:
    given = {"raw": folder / "raw", "sources": folder / "sources", "rounds": 1} | more
    return Settings(**given)  # type: ignore[arg-type]


def statuses(outcomes: list[runner.Outcome]) -> dict[str, Status]:
    return {outcome.name: outcome.status for outcome in outcomes}


def test_run_times_and_records_both_variants(fake: Path) -> None:
    add_workload(fake, "busy-poll")
    said: list[str] = []
    outcomes = runner.run([], settings(fake), said.append)
    assert statuses(outcomes) == {"busy-poll/fake": Status.DONE}
    assert sorted(logged(fake, "workload")) == [
        *("workload busy-poll bad x1", "workload busy-poll bad x1"),
        *("workload busy-poll bad x7", "workload busy-poll fixed x1"),
        *("workload busy-poll fixed x1", "workload busy-poll fixed x7"),
    ]
    raw = fake / "raw" / "busy-poll__fake"
    assert {path.name for path in raw.iterdir()} == {
        *("result.json", "bad.full.sqlite", "fixed.full.sqlite"),
        *("bad.default.sqlite", "fixed.default.sqlite"),
    }
    timed = "[1/1] busy-poll/fake: timed: bad 2003 us, fixed 1003 us, 2.00 times"
    assert timed in said


def test_a_second_run_does_only_what_is_left(fake: Path) -> None:
    add_workload(fake, "busy-poll")
    runner.run([], settings(fake), lambda _: None)
    before = len(logged(fake, "workload"))
    assert statuses(runner.run([], settings(fake), lambda _: None)) == {
        "busy-poll/fake": Status.KEPT
    }
    assert len(logged(fake, "workload")) == before

    (fake / "raw" / "busy-poll__fake" / "bad.full.sqlite").unlink()
    add_workload(fake, "launch-bound-kernels")
    runner.run([], settings(fake), lambda _: None)
    lines = logged(fake, "workload")[before:]
    assert lines.count("workload busy-poll bad x1") == 1
    assert len(lines) == 1 + 6

    runner.run(["busy-poll"], settings(fake, again=True), lambda _: None)
    assert len(logged(fake, "workload")) == before + 7 + 6


def test_a_source_that_changed_is_run_again(fake: Path) -> None:
    add_workload(fake, "busy-poll")
    runner.run([], settings(fake), lambda _: None)
    add_workload(fake, "busy-poll", "# changed\n")
    outcomes = runner.run([], settings(fake), lambda _: None)
    assert statuses(outcomes) == {"busy-poll/fake": Status.DONE}
    assert len(logged(fake, "workload")) == 12
    add_workload(fake, "busy-poll", "# changed\n# harness: note another sentence\n")
    outcomes = runner.run([], settings(fake), lambda _: None)
    assert statuses(outcomes) == {"busy-poll/fake": Status.KEPT}


@pytest.mark.parametrize(
    ("body", "status", "detail"),
    [
        ("sys.exit('no memory')", Status.FAILED, "failed with exit code 1: no memory"),
        ("print('y[3] is 4'); sys.exit(1)", Status.FAILED, "exit code 1: y[3] is 4"),
        ("repeat = 0", Status.FAILED, "printed no REGION_US"),
        ("import no_such_module", Status.UNSUPPORTED, "needs the Python module"),
        ("# harness: needs no_such", Status.UNSUPPORTED, "needs the Python module"),
        ("# harness: arch-min 100", Status.UNSUPPORTED, "needs compute capability 100"),
    ],
)
def test_one_that_fails_does_not_stop_the_others(
    fake: Path, body: str, status: Status, detail: str
) -> None:
    add_workload(fake, "busy-poll", body)
    add_workload(fake, "launch-bound-kernels")
    (fake / "sources" / "other_rule.cu").write_text("// harness: colour red\n")
    outcomes = runner.run([], settings(fake, arch=90), lambda _: None)
    assert statuses(outcomes) == {
        "other_rule.cu": Status.FAILED,
        "busy-poll/fake": status,
        "launch-bound-kernels/fake": Status.DONE,
    }
    (why,) = (o.detail for o in outcomes if o.name == "busy-poll/fake")
    assert detail in why


def test_nothing_is_begun_after_the_budget(fake: Path) -> None:
    add_workload(fake, "busy-poll")
    outcomes = runner.run([], settings(fake, budget_s=0.0), lambda _: None)
    assert statuses(outcomes) == {"busy-poll/fake": Status.POSTPONED}


def test_variables_that_change_the_result_come_from_the_header_alone(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    body = (
        "# harness: env bad CUDA_MODULE_LOADING=EAGER\n"
        "names = ('CUDA_LAUNCH_BLOCKING', 'CUDA_MODULE_LOADING')\n"
        "with open(os.environ['FAKE_LOG'], 'a') as log:\n"
        "    log.write(f'seen {variant} {[os.environ.get(n) for n in names]}\\n')\n"
    )
    add_workload(fake, "busy-poll", body)
    runner.run([], settings(fake), lambda _: None)
    assert set(logged(fake, "seen")) == {
        "seen bad [None, 'EAGER']",
        "seen fixed [None, None]",
    }


def test_a_probe_keeps_its_answers(fake: Path) -> None:
    source = fake / "sources" / "sweep__fake.py"
    source.parent.mkdir()
    source.write_text(
        "# harness: probe sweep\nprint('PROBE free us=3')\nprint('CHECK ok')\n"
    )
    outcomes = runner.run([], settings(fake), lambda _: None)
    assert statuses(outcomes) == {"sweep/fake": Status.DONE}
    raw = fake / "raw" / "sweep__fake"
    assert (raw / "probe.plain.txt").read_text() == "PROBE free us=3\n"
    assert (raw / "probe.full.sqlite").is_file()
    assert collect.collect(fake / "raw", fake / "samples", lambda _: None) == []


def test_ctrl_c_in_a_run_keeps_what_is_done_and_leaves_nothing_behind(
    fake: Path,
) -> None:
    slow = (
        f"if variant == 'fixed':\n"
        f"    import time\n"
        f"    open({str(fake / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        f"    open({str(fake / 'ready')!r}, 'w').close()\n"
        f"    time.sleep(60)\n"
    )
    add_workload(fake, "busy-poll", slow)
    code = (
        "import pathlib, sys\n"
        "from streamlint.harness import runner\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "settings = runner.Settings(raw=folder / 'raw', sources=folder / 'sources')\n"
        "try: runner.run([], settings, print)\n"
        "except KeyboardInterrupt: sys.exit(130)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, fake], cwd=ROOT) as child:
        wait_for((fake / "ready").exists)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 130
    wait_for(lambda: is_gone(fake / "pid"))
    result = json.loads((fake / "raw/busy-poll__fake/result.json").read_text())
    assert list(result["steps"]) == ["bad.plain"]


# The command line -----------------------------------------------------------------


def streamlint(*arguments: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "streamlint", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(cwd)},
        capture_output=True,
        text=True,
    )


def test_profile_records_and_judges(fake: Path) -> None:
    (fake / "work").mkdir()
    done = streamlint("profile", "--", *python("print('hello')"), cwd=fake / "work")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hello\n")
    assert "rules" in done.stdout
    assert not any((fake / "work").iterdir())


def test_profile_keeps_the_report_and_the_exit_code(fake: Path) -> None:
    (fake / "work").mkdir()
    script = fake / "train.py"
    script.write_text("import sys; sys.exit(int(sys.argv[2]))")
    options = ["--keep", "--light", "--format", "json"]
    command = [sys.executable, str(script), "--steps", "7"]
    for _ in range(2):
        done = streamlint("profile", *options, *command, cwd=fake / "work")
        assert done.returncode == 7, done.stderr
        assert json.loads(done.stdout)
        assert "error: the program failed (exit code 7)" in done.stderr
    assert {path.name for path in (fake / "work").iterdir()} == {
        *("train.nsys-rep", "train.sqlite", "train-2.nsys-rep", "train-2.sqlite"),
    }
    assert "--cuda-graph-trace=graph" in logged(fake, "profile")[1]


def test_profile_writes_a_page(fake: Path) -> None:
    (fake / "work").mkdir()
    command = ["--", *python("print('hello')")]
    done = streamlint("profile", "--html", "a.html", *command, cwd=fake / "work")
    assert done.returncode == 0, done.stderr
    assert "rules" in done.stdout
    assert [path.name for path in (fake / "work").iterdir()] == ["a.html"]
    assert "<html" in (fake / "work/a.html").read_text(encoding="utf-8")
    done = streamlint("profile", "--html", "a.sqlite", *command, cwd=fake / "work")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: --html names a trace, a.sqlite" in done.stderr


def test_profile_keeps_raw_data_that_could_not_be_imported(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "import lacks library")
    (fake / "work").mkdir()
    done = streamlint("profile", "--", *python("pass"), cwd=fake / "work")
    assert done.returncode == 2
    assert "what nsys wrote is in" in done.stderr
    assert len(list((fake / "work").glob("streamlint-*/*.qdstrm"))) == 1


def test_harness_command_passes_everything_on(fake: Path) -> None:
    arguments = ["capture", "-o", str(fake / "x"), "--"]
    arguments += python("raise SystemExit(4)")
    done = streamlint("harness", *arguments, cwd=fake)
    assert done.returncode == 4, done.stderr
    assert (fake / "x.sqlite").is_file()
    assert "collect" in streamlint("harness", "--help", cwd=fake).stdout
    failed = streamlint("harness", "build", "no-such-rule", cwd=fake)
    assert failed.returncode == 2
    assert "error: no workload is called no-such-rule" in failed.stderr


def test_redact_command_writes_a_copy_and_says_what_it_removed(fake: Path) -> None:
    builder = TraceBuilder()
    builder.stream(13)
    builder.kernel("step", stream=13, start=20, end=60)
    builder.environment("SECRET", "swordfish")
    source = builder.write(fake / "in.sqlite")
    done = streamlint("redact", source, fake / "out.sqlite", cwd=fake)
    assert done.returncode == 0, done.stderr
    assert "1 environment variables" in done.stdout
    assert b"swordfish" in source.read_bytes()
    assert b"swordfish" not in (fake / "out.sqlite").read_bytes()
    again = streamlint("redact", source, source, cwd=fake)
    assert again.returncode == 2
    assert "exists already" in again.stderr


# Samples and their score ----------------------------------------------------------


def test_collect_stores_redacted_pairs_with_their_provenance(fake: Path) -> None:
    add_workload(fake, "busy-poll")
    add_workload(fake, "launch-bound-kernels", "if variant == 'fixed': sys.exit(1)")
    runner.run([], settings(fake, takes=3, rounds=2), lambda _: None)
    samples = fake / "samples"
    found = collect.collect(fake / "raw", samples, lambda _: None)
    assert [(pair.name, pair.changed) for pair in found] == [
        ("busy-poll/fake", True),
        ("launch-bound-kernels/fake", False),
    ]
    assert "not timed and recorded yet" in found[1].problem
    folder = samples / "busy-poll" / "fake"
    text = (folder / "provenance.json").read_text()
    facts = json.loads(text)
    assert set(facts) == {"bad.sqlite", "fixed.sqlite"}
    assert {path.name for path in folder.iterdir()} == {*facts, "provenance.json"}
    bad = facts["bad.sqlite"]
    assert bad["nsys_exporter"] == "2025.3.1"
    assert bad["source"] == "harness/workloads/busy_poll__fake.py"
    assert bad["region_us"]["plain"] == {
        **{"runs": 14, "processes": 2, "median": 2003.0},
        **{"min": 2000.0, "max": 2006.0},
    }
    assert bad["region_us"]["full"]["processes"] == 3
    assert bad["region_us"]["stored"] == 2000.0
    assert str(fake) not in text
    again = collect.collect(fake / "raw", samples, lambda _: None)
    assert not again[0].changed


def test_all_first_processes_come_before_all_second_ones(fake: Path) -> None:
    add_workload(fake, "busy-poll")
    add_workload(fake, "launch-blocking")
    chosen = settings(fake, rounds=2, takes=0, default_flags=False)
    outcomes = runner.run([], chosen, lambda _: None)
    assert set(statuses(outcomes).values()) == {Status.DONE}
    one = [
        f"{w} {v}" for w in ("busy-poll", "launch-blocking") for v in workloads.VARIANTS
    ]
    assert [line.split(" ", 1)[1] for line in logged(fake, "workload")] == [
        f"{run} x7" for run in [*one, *one]
    ]


SAME = "{} of {} medians lie in the earlier range, {} at most 1% outside, {} further"


def test_compare_says_which_medians_left_the_range(
    fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_workload(fake, "busy-poll")
    for name in ("one", "two"):
        chosen = settings(fake, raw=fake / name, takes=0, default_flags=False)
        runner.run([], chosen, lambda _: None)
    said: list[str] = []
    arguments = ["compare", str(fake / "one"), str(fake / "two")]
    assert main(arguments, said.append) == 0
    assert said[-1] == SAME.format(2, 2, 0, 0)
    file = next((fake / "two").rglob("result.json"))
    result = json.loads(file.read_text())
    slow = result["steps"]["bad.plain"]
    us = slow["region_us"]
    slow["region_us"] = [max(us) * 1.005] * len(us)
    file.write_text(json.dumps(result))
    assert main(arguments, said.append) == 0
    assert said[-1] == SAME.format(1, 2, 1, 0)
    slow["region_us"] = [max(us) * 2] * len(us)
    file.write_text(json.dumps(result))
    assert main(arguments, said.append) == 1
    assert said[-2].startswith("busy-poll/fake bad")
    assert said[-2].endswith("us  100.0% outside")
    assert said[-1] == SAME.format(1, 2, 0, 1)
    assert main([*arguments[:2], *arguments[1:]], said.append) == 1
    assert main(["compare", *arguments[:0:-1], arguments[2]], said.append) == 0
    file.write_text(json.dumps(result | {"gpu": "another"}))
    assert main(arguments, said.append) == 1
    assert said[-1] == SAME.format(0, 0, 0, 0)


def test_collect_needs_results(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no results"):
        collect.collect(tmp_path, tmp_path / "samples", lambda _: None)


@pytest.fixture
def one_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score by this rule alone: what others make of its pair is their tests' affair."""
    monkeypatch.setattr(score, "all_rules", lambda: (registry.find(PAIR),))


def sample_pair(folder: Path, saved: float | None, fixed: str = "fixed") -> Path:
    """A stored pair in a folder of its own; ``saved`` is the share measured."""
    target = folder / "samples" / PAIR
    target.mkdir(parents=True, exist_ok=True)
    for variant, source in (("bad", "bad"), ("fixed", fixed)):
        stored = ROOT / "sample_traces" / PAIR / f"{source}.sqlite"
        (target / f"{variant}.sqlite").write_bytes(stored.read_bytes())
    if saved is not None:
        us = {"bad": 10_000.0, "fixed": 10_000.0 * (1 - saved)}
        facts = {
            f"{v}.sqlite": {"region_us": {"stored": us[v], "plain": {"median": us[v]}}}
            for v in us
        }
        (target / "provenance.json").write_text(json.dumps(facts))
    return folder / "samples"


def predicted_share(folder: Path) -> float:
    (row,) = score.score(sample_pair(folder, 0.5)).rows
    assert row.predicted is not None
    return row.predicted.share


@pytest.mark.usefixtures("one_rule")
def test_score_passes_a_rule_that_tells_the_truth(tmp_path: Path) -> None:
    share = predicted_share(tmp_path)
    result = score.score(sample_pair(tmp_path, share))
    (row,) = result.rows
    assert (row.fires, row.fixed, row.problems) == ("yes", (), ())
    assert row.ratio == pytest.approx(1)
    assert result.passed
    assert result.proven == 1
    assert result.unproven == {}
    said: list[str] = []
    samples = str(tmp_path / "samples")
    assert main(["score", "--samples", samples], said.append) == 0
    assert said[0].splitlines()[1].split()[:3] == [PAIR, "fires", "silent"]


def test_the_stored_samples_prove_the_rules_and_the_docs_say_so() -> None:
    result = score.score(ROOT / "sample_traces")
    assert [(row.pair, row.problems) for row in result.rows if row.problems] == []
    assert result.passed
    # Made with `streamlint harness score --markdown > docs/calibration.md`.
    stored = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")
    assert stored.rstrip("\n") == score.markdown(result).rstrip("\n")


@pytest.mark.usefixtures("one_rule")
def test_score_fails_a_fixed_twin_with_a_finding(tmp_path: Path) -> None:
    share = predicted_share(tmp_path)
    result = score.score(sample_pair(tmp_path, share, fixed="bad"))
    assert result.rows[0].fixed
    assert not result.passed
    assert "What is wrong" in score.markdown(result)
    samples = str(tmp_path / "samples")
    assert main(["score", "--samples", samples], lambda _: None) == 1


@pytest.mark.usefixtures("one_rule")
def test_score_fails_a_pair_that_was_not_measured(tmp_path: Path) -> None:
    result = score.score(sample_pair(tmp_path, None))
    assert result.rows[0].problems == ("no provenance.json beside the traces",)


@pytest.mark.usefixtures("one_rule")
def test_score_fails_a_rule_that_misses(tmp_path: Path) -> None:
    samples = sample_pair(tmp_path, 0.1)
    bad, fixed = (samples / PAIR / f"{v}.sqlite" for v in ("bad", "fixed"))
    bad.write_bytes(fixed.read_bytes())
    result = score.score(samples)
    assert result.rows[0].problems == ("bad: no finding",)


@pytest.mark.parametrize(
    ("claim", "predicted", "measured", "right"),
    [
        (Claim.WHAT_IF, 0.50, 0.45, True),
        (Claim.WHAT_IF, 0.50, 0.40, False),
        (Claim.WHAT_IF, 0.02, 0.012, True),
        (Claim.WHAT_IF, 0.10, 0.0, False),
        (Claim.UPPER_BOUND, 0.50, 0.20, True),
        (Claim.UPPER_BOUND, 0.20, 0.50, False),
        (Claim.LOWER_BOUND, 0.20, 0.50, True),
        (Claim.LOWER_BOUND, 0.50, 0.20, False),
        (Claim.DIRECT, 0.90, 0.20, True),
    ],
)
def test_claims_are_held_to_what_they_say(
    claim: Claim, predicted: float, measured: float, right: bool
) -> None:
    wrong = score._wrong(claim, score.Saving(1, predicted), score.Saving(1, measured))
    assert (wrong == "") == right


@pytest.mark.parametrize(
    ("claim", "predicted", "right"),
    [
        (Claim.UPPER_BOUND, 0.295, True),
        (Claim.UPPER_BOUND, 0.285, False),
        (Claim.LOWER_BOUND, 0.605, True),
        (Claim.LOWER_BOUND, 0.615, False),
        (Claim.WHAT_IF, 0.35, False),
        (Claim.WHAT_IF, 0.45, True),
    ],
)
def test_bounds_may_lie_where_some_run_does(
    claim: Claim, predicted: float, right: bool
) -> None:
    measured = score.Saving(1, 0.5, low=0.3, high=0.6)
    wrong = score._wrong(claim, score.Saving(1, predicted), measured)
    assert (wrong == "") == right


def test_a_saving_has_the_range_of_its_runs() -> None:
    def times(stored: float, low: float, high: float) -> dict[str, object]:
        spread = {"median": stored, "min": low, "max": high}
        return {"region_us": {"stored": stored, "full": spread, "plain": spread}}

    note = {"bad": times(100, 80, 200), "fixed": times(50, 40, 60)}
    for keys in (("stored", "full"), ("plain", "plain")):
        saving = score._measured(note, *keys)
        assert saving == score.Saving(50, 0.5, low=0.25, high=0.8)
        assert score._saving(saving) == "0.05 ms, 50.0 % (25.0 to 80.0)"
    assert score._saving(score.Saving(50, 0.5)) == "0.05 ms, 50.0 %"


@pytest.mark.usefixtures("one_rule")
def test_costs_of_the_unprofiled_run_are_compared_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = predicted_share(tmp_path)
    samples = sample_pair(tmp_path, share)
    note = samples / PAIR / "provenance.json"
    facts = json.loads(note.read_text())
    facts["fixed.sqlite"]["region_us"]["stored"] = 100.0
    note.write_text(json.dumps(facts))
    (row,) = score.score(samples).rows
    assert "% below what was saved" in row.problems[0]

    told = score._prediction

    def unprofiled(findings: list[Finding]) -> tuple[object, object, str]:
        return (*told(findings)[:2], UNPROFILED)

    monkeypatch.setattr(score, "_prediction", unprofiled)
    (row,) = score.score(samples).rows
    assert row.problems == ()
    assert row.ratio == pytest.approx(1)
    assert score._cells(row)[3].endswith(", not profiled")


@pytest.mark.usefixtures("one_rule")
def test_markdown_is_one_table_with_every_pair(tmp_path: Path) -> None:
    page = score.markdown(score.score(sample_pair(tmp_path, 0.3)))
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert len({line.count("|") for line in table}) == 1
    assert os.fspath(tmp_path) not in page

"""Findings name lines of the user's own code, in Python and in native programs."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from commandline import Run
from tracebuilder import TraceBuilder

from streamlint.settings import Settings
from streamlint.trace import open_trace
from streamlint.where import sites, user_frames

DATA = Path(__file__).parent / "data" / "native"
TOOLS = [tool for tool in ("llvm-symbolizer", "addr2line") if shutil.which(tool)]
needs_a_tool = pytest.mark.skipif(not TOOLS, reason="no symbolizer is installed")
RULE = "pageable-async-copy"
LINES = {"app.cu": {5, 8, 14, 15}, "work.cu": {9, 10}}
"""Each CUDA call of the program; the kernel's stub is where it is launched."""


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with traces, and in bin the binaries."""
    folder = tmp_path_factory.mktemp("native")
    for packed in DATA.glob("*.xz"):
        binary = packed.stem if packed.stem.endswith("sqlite") else f"bin/{packed.stem}"
        (folder / "bin").mkdir(exist_ok=True)
        (folder / binary).write_bytes(lzma.decompress(packed.read_bytes()))
    return folder


def only_tool(name: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    if name is not None:
        path = shutil.which(name)
        assert path is not None
        (folder / name).symlink_to(path)
    monkeypatch.setenv("PATH", str(folder))


def where(run: Run, trace: Path, *options: str | Path) -> tuple[dict[str, Any], str]:
    done = run("lint", trace, "--select", RULE, "--format", "json", "-v", *options)
    assert done.code == 1
    (found,) = json.loads(done.out)["traces"][0]["findings"]
    place: dict[str, Any] = found["where"]
    return place, done.err


def told(frames: list[dict[str, Any]]) -> list[str]:
    return [f"{f['file']}:{f['line']} {f['function'].split('(')[0]}" for f in frames]


@needs_a_tool
@pytest.mark.parametrize("kind", ["full", "stripped"])
@pytest.mark.parametrize("tool", TOOLS)
def test_binaries_give_lines_inlined_functions_and_the_chain(
    native: Path,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    tool: str,
) -> None:
    only_tool(tool, tmp_path / "tools", monkeypatch)
    place, notes = where(run, native / f"{kind}.sqlite", "--symbols", native / "bin")
    assert notes == ""
    # GNU's calls an inlined function by the name of the one that it was inlined into.
    inlined = "main" if tool == "addr2line" else "step_forward"
    assert told(place["source"]) == [f"/tmp/nat/app.cu:8 {inlined}"]
    assert told(place["stack"]) == [
        "app:None cudaMemcpyAsync",
        f"/tmp/nat/app.cu:8 {inlined}",
        "/tmp/nat/app.cu:17 main",
        "libc.so.6:None __libc_start_main",
        "app:None _start",
    ]


@needs_a_tool
@pytest.mark.parametrize("kind", ["full", "stripped"])
def test_each_call_of_the_program_has_its_line(native: Path, kind: str) -> None:
    trace = open_trace(native / f"{kind}.sqlite")
    trace.settings = Settings(symbols=(native / "bin",))
    frames = user_frames(trace, trace.runtime_calls).values()
    lines: dict[str, set[int | None]] = {}
    for frame in frames:
        lines.setdefault(Path(frame.file).name, set()).add(frame.line)
    assert lines == LINES


def test_without_binaries_the_users_function_is_named(native: Path, run: Run) -> None:
    place, notes = where(run, native / "full.sqlite")
    assert told(place["source"]) == ["app:None main"]  # not cudaMemcpyAsync, in app too
    assert notes == ""
    trace = open_trace(native / "full.sqlite")
    named = set(sites(trace, trace.runtime_calls).drop_nulls())
    # The stub of the kernel `scale` is no place in the user's code.
    assert named == {"main (app)", "work_launch(float*, float*, int) (libwork.so)"}


@needs_a_tool
def test_lines_leave_fingerprints_and_baselines_alone(
    native: Path, tmp_path: Path, run: Run
) -> None:
    baseline = tmp_path / "known.json"
    trace = native / "full.sqlite"
    run("lint", trace, "--isolated", "--write-baseline", baseline)
    lined = ("--symbols", native / "bin")
    done = run("lint", trace, "--isolated", "--baseline", baseline, *lined)
    assert done.code == 0


@needs_a_tool
def test_lines_go_through_the_path_map_into_annotations(
    native: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mapped = ("--symbols", native / "bin", "--path-map", "/tmp/nat=src")
    done = run(
        "lint", native / "full.sqlite", "--format", "sarif", "--select", RULE, *mapped
    )
    (result,) = [
        r for r in json.loads(done.out)["runs"][0]["results"] if r["kind"] == "fail"
    ]
    physical = result["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"]["uri"] == "src/app.cu"
    assert physical["region"]["startLine"] == 8
    done = run("lint", native / "full.sqlite", "--verbose", *mapped)
    assert "source src/app.cu:8 " in done.out
    assert "stack  src/app.cu:17 main" in done.out


@needs_a_tool
def test_a_binary_where_it_was_recorded_is_used_unless_rebuilt(
    native: Path, tmp_path: Path, run: Run
) -> None:
    trace, binary = tmp_path / "run.sqlite", tmp_path / "app"
    shutil.copy(native / "full.sqlite", trace)
    shutil.copy(native / "bin" / "app", binary)
    with closing(sqlite3.connect(trace)) as db, db:
        set_module = "UPDATE StringIds SET value = ? WHERE value = 'app' AND id IN "
        db.execute(f"{set_module} (SELECT module FROM CUDA_CALLCHAINS)", [str(binary)])
    os.utime(binary, (1_000, 1_000))
    place, _ = where(run, trace)
    assert [f["line"] for f in place["source"]] == [8]
    later = trace.stat().st_mtime + 10
    os.utime(binary, (later, later))
    place, _ = where(run, trace)
    assert told(place["source"]) == ["app:None main"]


@needs_a_tool
def test_another_build_gives_no_line(native: Path, tmp_path: Path, run: Run) -> None:
    for kind, bend in (("full", 0x8C20), ("stripped", 0x8C20)):
        other = tmp_path / kind / "app"
        other.parent.mkdir()
        code = bytearray((native / "bin" / "app").read_bytes())
        # As though an instruction had been added in main: what follows moves by 3.
        code[bend + 3 : 0x8E00] = code[bend : 0x8E00 - 3]
        other.write_bytes(code)
        place, notes = where(run, native / f"{kind}.sqlite", "--symbols", other.parent)
        assert "app.cu" not in str(place)
        assert "app: it can't be shown to be the build that was recorded" in notes
    (tmp_path / "stripped" / "libwork.so").write_bytes(
        (native / "bin" / "app").read_bytes()
    )
    trace = open_trace(native / "stripped.sqlite")
    trace.settings = Settings(symbols=(tmp_path / "stripped",))
    frames = user_frames(trace, trace.runtime_calls).values()
    assert {frame.line for frame in frames} == {None}


@needs_a_tool
def test_debugging_files_without_code_serve_where_names_are_recorded(
    native: Path, tmp_path: Path, run: Run
) -> None:
    objcopy = shutil.which("objcopy")
    if objcopy is None:
        pytest.skip("objcopy is not installed")
    debug = tmp_path / "app.debug"
    os.spawnl(
        os.P_WAIT, objcopy, objcopy, "--only-keep-debug", native / "bin" / "app", debug
    )
    place, notes = where(run, native / "full.sqlite", "--symbols", debug)
    assert [f["line"] for f in place["source"]] == [8]
    assert notes == "note: no source lines: no file is named libwork.so\n"
    place, notes = where(run, native / "stripped.sqlite", "--symbols", debug)
    assert place["source"] == []  # nothing shows where it was loaded
    assert "app.debug: it can't be shown" in notes


def test_what_keeps_lines_away_is_one_note_and_no_failure(
    native: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("lint", native / "full.sqlite", "--symbols", tmp_path / "none")
    assert done.code == 2
    assert "does not exist" in done.err
    assert "hint: " in done.err
    _, notes = where(run, native / "full.sqlite", "--symbols", tmp_path)
    assert notes.splitlines() == [
        "note: no source lines: no file is named app",
        "note: no source lines: no file is named libwork.so",
    ]
    only_tool(None, tmp_path / "tools", monkeypatch)
    place, notes = where(run, native / "full.sqlite", "--symbols", native / "bin")
    assert told(place["source"]) == ["app:None main"]
    assert notes == (
        "note: no source lines: neither llvm-symbolizer nor addr2line is installed\n"
    )


def test_hostile_modules_and_files_are_neither_run_nor_waited_for(
    native: Path, tmp_path: Path, run: Run
) -> None:
    trace, bin_ = tmp_path / "run.sqlite", tmp_path / "bin"
    shutil.copy(native / "full.sqlite", trace)
    bin_.mkdir()
    with closing(sqlite3.connect(trace)) as db, db:
        for name, hostile in (
            ("app", "/x/$(touch pwned);\x1b[31m-e"),
            ("libwork.so", "../../../proc/self/mem"),
        ):
            db.execute(
                "UPDATE StringIds SET value = ? WHERE value = ?", (hostile, name)
            )
    os.mkfifo(bin_ / "$(touch pwned);\x1b[31m-e")
    (bin_ / "mem").write_bytes(b"\x7fELF\x02\x01" + os.urandom(10) + b"\xff" * 4000)
    done = run("lint", trace, "--symbols", bin_, "--verbose")
    assert done.code == 1
    assert "\x1b" not in done.out + done.err
    assert "it is no file" in done.err
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("seed", range(40))
def test_damaged_binaries_are_refused(native: Path, tmp_path: Path, seed: int) -> None:
    code = bytearray((native / "bin" / "app").read_bytes())
    at = 16 + seed * 13 % 600  # headers of the file and of its segments
    code[at : at + 8] = struct.pack("<Q", (1 << 63) - 1 if seed % 2 else 1 << 40)
    (tmp_path / "app").write_bytes(code[: 1000 if seed % 5 == 0 else None])
    trace = open_trace(native / "full.sqlite")
    trace.settings = Settings(symbols=(tmp_path,))
    frames = user_frames(trace, trace.runtime_calls).values()
    assert frames
    assert {frame.line for frame in frames if "app" in frame.file} <= {
        None,
        *LINES["app.cu"],
    }


@needs_a_tool
def test_redacting_moves_addresses_and_keeps_lines(
    native: Path, tmp_path: Path, run: Run
) -> None:
    source, copy = tmp_path / "source.sqlite", tmp_path / "copy.sqlite"
    shutil.copy(native / "full.sqlite", source)
    loaded = 0x559B4B1FA000
    with closing(sqlite3.connect(source)) as db, db:
        db.execute("UPDATE CUDA_CALLCHAINS SET originalIP = originalIP + ?", [loaded])
    run("redact", source, copy)
    with closing(sqlite3.connect(copy)) as db:
        query = "SELECT min(originalIP), max(originalIP) FROM CUDA_CALLCHAINS"
        least, most = db.execute(query).fetchone()
    assert 4096 <= least <= most < loaded
    symbols = ("--symbols", native / "bin")
    assert where(run, source, *symbols) == where(run, copy, *symbols)
    run("redact", "--names", source, tmp_path / "named.sqlite")
    with closing(sqlite3.connect(tmp_path / "named.sqlite")) as db:
        query = "SELECT DISTINCT originalIP FROM CUDA_CALLCHAINS"
        assert db.execute(query).fetchall() == [(0,)]


@pytest.mark.parametrize(
    ("python", "expected"),
    [
        (["/v/site-packages/torch/a.py", "/w/train.py"], "/w/train.py:2 f"),
        (["/v/site-packages/torch/a.py"], "step (ops.so)"),
        ([], "step (ops.so)"),
    ],
)
def test_the_users_python_comes_before_native_code_and_both_before_libraries(
    tmp_path: Path, python: list[str], expected: str
) -> None:
    builder = TraceBuilder()
    call = builder.call("cudaStreamSynchronize", 10)
    native = [
        ("cupti", "/opt/nvidia/nsight/libcupti.so.13"),
        ("cudaStreamSynchronize", "/w/ops.so"),
        ("at::cuda::sync", "/v/site-packages/torch/lib/libtorch_cuda.so"),
        ("step", "/w/ops.so"),
        ("_PyEval_EvalFrameDefault", "/usr/bin/python3.12"),
        ("main", "/usr/bin/python3.12"),
    ]
    frames = [("f", file, line) for line, file in enumerate(python, start=1)]
    builder.backtrace(call, frames, native=native)
    trace = open_trace(builder.write(tmp_path / "t.sqlite"))
    assert list(sites(trace, trace.runtime_calls)) == [expected]

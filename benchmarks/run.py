"""Loading and linting large traces beside SQLite, `nsys analyze` and parquet.

    .venv/bin/python benchmarks/run.py [--kernels N ...] [--rounds 5] [--nsys PATH]

Makes the traces (in build/benchmark), runs every contender in a process of its own,
in turns, so that a busy machine slows all of them, and writes docs/benchmarks.md:
medians, ratios and the peak of resident memory. Needs a C compiler and libsqlite3;
`nsys analyze` takes part where an nsys is found (PATH, NSYS or ``--nsys``).
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from make_trace import Shape, write_trace

from streamlint import __version__
from streamlint.trace.reader import ExportFile
from streamlint.trace.tables import TABLES, WHOLE

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "benchmark"
PAGE = ROOT / "docs" / "benchmarks.md"
LOADED = ("kernels", "runtime_calls", "memcpys", "memsets", "synchronizations")
"""The tables that grow with the work on the GPU."""
FIVE = "cuda_memcpy_async,cuda_memcpy_sync,cuda_memset_sync,cuda_api_sync,gpu_gaps"
SIX = f"{FIVE},gpu_time_util"
SIX_MOST = 100_000
"""Kernels up to which gpu_time_util, superlinear, takes part."""

LOAD, STEP, PARQUET = "streamlint, load", "libsqlite3 in C, load", "parquet, load"
LINT = "streamlint lint, all rules"
PLAIN = "streamlint lint --no-replay"
SMALL, IMPORT = "streamlint lint, small trace", "python -c 'import polars'"
SMALL_TRACE = ROOT / "sample_traces" / "extra" / "torch.sqlite"
NSYS_FIVE, NSYS_SIX = "nsys analyze, 5 rules", "nsys analyze, 6 rules"

# A child counts the memory that its parent had when it was forked: from a small one.
_RUN = """
import os, subprocess, sys, tempfile, time
with tempfile.TemporaryFile() as output:
    start = time.perf_counter()
    process = subprocess.Popen(sys.argv[1:], stdout=output, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    size = output.seek(0, 2)
    output.seek(0)
    print(output.read().decode() if size < 50 else "")
    print(status, seconds, used.ru_maxrss / 1024)
"""
_LOAD = """
import sys, time
from pathlib import Path
from streamlint.trace.reader import ExportFile
start = time.perf_counter()
file = ExportFile(Path(sys.argv[1]))
frames = [file.load(name) for name in sys.argv[2:]]
print(time.perf_counter() - start)
"""
_PARQUET = """
import sys, time
import polars as pl
start = time.perf_counter()
frames = [pl.read_parquet(path) for path in sys.argv[1:]]
print(time.perf_counter() - start)
"""
_STEP = r"""
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Steps each query and stores every value as an integer, as a loader in C would. */
int main(int argc, char **argv) {
  struct timespec a, b;
  clock_gettime(CLOCK_MONOTONIC, &a);
  sqlite3 *db;
  if (sqlite3_open_v2(argv[1], &db, SQLITE_OPEN_READONLY, 0)) return 1;
  for (int query = 2; query < argc; query++) {
    sqlite3_stmt *found;
    if (sqlite3_prepare_v2(db, argv[query], -1, &found, 0)) return 1;
    int columns = sqlite3_column_count(found);
    long long **values = calloc(columns, sizeof *values);
    size_t rows = 0, room = 0;
    while (sqlite3_step(found) == SQLITE_ROW) {
      if (rows == room) {
        room = room ? 2 * room : 4096;
        for (int c = 0; c < columns; c++)
          values[c] = realloc(values[c], room * sizeof **values);
      }
      for (int c = 0; c < columns; c++)
        values[c][rows] = sqlite3_column_int64(found, c);
      rows++;
    }
    sqlite3_finalize(found);
  }
  clock_gettime(CLOCK_MONOTONIC, &b);
  printf("%.6f\n", b.tv_sec - a.tv_sec + 1e-9 * (b.tv_nsec - a.tv_nsec));
}
"""


class Contender(NamedTuple):
    """A command; ``tells`` if it prints its seconds, without its own start-up."""

    name: str
    command: Sequence[str]
    tells: bool = False
    environment: dict[str, str] | None = None


class Trial(NamedTuple):
    """One run: seconds and peak of resident memory in MB."""

    seconds: float
    peak: float


def run(contender: Contender) -> Trial:
    """Run it once; raises RuntimeError if it fails."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", _RUN, *contender.command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=contender.environment,
        check=True,
    )
    *told, status, seconds, peak = done.stdout.split()
    if status != "0":
        raise RuntimeError(f"{contender.name} ended with {status}")
    return Trial(float(told[0] if contender.tells else seconds), float(peak))


def stepper() -> Path:
    """Build the C program."""
    source, program = FOLDER / "step.c", FOLDER / "step"
    source.write_text(_STEP)
    subprocess.run(
        ["cc", "-O2", "-o", str(program), str(source), "-lsqlite3"], check=True
    )
    return program


def contenders(trace: Path, kernels: int, nsys: list[str] | None) -> list[Contender]:
    """All that run on a trace of this size."""
    file = ExportFile(trace)
    queries = [
        "SELECT "
        + ", ".join(
            f'"{c.source}"'
            for c in TABLES[name].columns
            if c.kind in WHOLE and file.has_column(TABLES[name], c.name)
        )
        + f' FROM "{TABLES[name].sources[0]}"'
        for name in LOADED
    ]
    parquet = []
    for name in LOADED:
        path = trace.with_name(f"{trace.stem}.{name}.parquet")
        if not path.exists():
            frame = file.load(name)
            assert not isinstance(frame, tuple)
            frame.write_parquet(path)
        parquet.append(str(path))
    file.close()
    python, text = sys.executable, str(trace)
    lint = (python, "-m", "streamlint", "lint", "--exit-zero", "--isolated")
    found = [
        Contender(LOAD, (python, "-c", _LOAD, text, *LOADED), tells=True),
        Contender(STEP, (str(stepper()), text, *queries), tells=True),
        Contender(PARQUET, (python, "-c", _PARQUET, *parquet), tells=True),
        Contender(LINT, (*lint, text)),
        Contender(PLAIN, (*lint, "--no-replay", text)),
    ]
    if nsys is not None:
        program, *settings = nsys
        surroundings = {**os.environ, **dict(s.split("=", 1) for s in settings)}
        rules = [(NSYS_FIVE, FIVE)]
        if kernels <= SIX_MOST:
            rules.append((NSYS_SIX, SIX))
        for name, chosen in rules:
            command = (program, "analyze", "-q", "-r", chosen, text)
            found.append(Contender(name, command, environment=surroundings))
    return found


def measure(all_of: Sequence[Contender], rounds: int) -> dict[str, Trial]:
    """Medians of ``rounds`` turns after one that fills the caches."""
    trials: dict[str, list[Trial]] = {one.name: [] for one in all_of}
    for turn in range(rounds + 1):
        for one in all_of:
            trial = run(one)
            if turn:
                trials[one.name].append(trial)
    return {
        name: Trial(
            statistics.median(trial.seconds for trial in made),
            statistics.median(trial.peak for trial in made),
        )
        for name, made in trials.items()
    }


RATIOS = (
    (LOAD, STEP, "loading"),
    (LOAD, PARQUET, "loading"),
    (LINT, NSYS_FIVE, "whole process"),
    (PLAIN, NSYS_FIVE, "whole process"),
    (LINT, NSYS_SIX, "whole process"),
    (PLAIN, NSYS_SIX, "whole process"),
)


def rows_of(trace: Path) -> int:
    """Rows of the loaded tables."""
    with closing(sqlite3.connect(trace)) as db:
        return sum(
            db.execute(f'SELECT count(*) FROM "{TABLES[name].sources[0]}"').fetchone()[
                0
            ]
            for name in LOADED
        )


def small_contenders() -> list[Contender]:
    """A lint of a small trace, which is mostly start-up, and its floor."""
    command = (sys.executable, "-m", "streamlint", "lint", "--exit-zero", "--isolated")
    return [
        Contender(SMALL, (*command, str(SMALL_TRACE))),
        Contender(IMPORT, (sys.executable, "-c", "import polars")),
    ]


def page(
    found: dict[int, dict[str, Trial]],
    rows: dict[int, int],
    small: dict[str, Trial],
    rounds: int,
    nsys: str,
) -> str:
    """docs/benchmarks.md."""
    lines = [
        "# Benchmarks",
        "",
        "What `benchmarks/run.py` measured: every contender in a process of its own,",
        f"in turns, medians of {rounds}. Compare the ratios: the seconds are of one",
        "machine.",
        "",
        f"{os.cpu_count()} processors ({platform.machine()}), Python "
        f"{platform.python_version()}, streamlint {__version__}, {nsys}.",
        "",
        "*Load* reads the five tables that grow with the work on the GPU, without the",
        "program's own start; the C program reads the same columns. The rest is of",
        "whole processes. Traces come from `benchmarks/make_trace.py`.",
    ]
    for kernels, trials in found.items():
        lines += [
            "",
            f"## {kernels:,} kernels, {rows[kernels]:,} rows",
            "",
            "| | seconds | peak memory, MB |",
            "| --- | ---: | ---: |",
        ]
        lines += [
            f"| {name} | {trial.seconds:.2f} | {trial.peak:.0f} |"
            for name, trial in trials.items()
        ]
        lines.append("")
        for one, other, what in RATIOS:
            if one in trials and other in trials:
                ratio = trials[one].seconds / trials[other].seconds
                lines.append(f"- {what}: {one} takes {ratio:.2f} of {other}.")
        for name in (LINT, PLAIN):
            each = (trials[name].peak - 100) * 1e6 / rows[kernels]
            lines.append(
                f"- memory: {name} peaks at 100 MB and {each:.0f} bytes a loaded row."
            )
    sizes = sorted(found)
    if len(sizes) > 1:
        lines += ["", "## Growth", ""]
        lines += [
            f"- {name}: {large:,} kernels take "
            f"{found[large][name].seconds / found[less][name].seconds:.1f} times as "
            f"long as {less:,}."
            for less, large in pairwise(sizes)
            for name in (LINT, PLAIN)
        ]
    ratio = small[SMALL].seconds / small[IMPORT].seconds
    lines += [
        "",
        "## A small trace",
        "",
        f"{SMALL_TRACE.name}, {SMALL_TRACE.stat().st_size / 1e6:.1f} MB: {SMALL} takes "
        f"{ratio:.2f} of {IMPORT} ({small[IMPORT].seconds:.2f} s).",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--nsys",
        default=os.environ.get("NSYS") or shutil.which("nsys"),
        help="nsys to compare with; environment for it may follow: PATH NAME=VALUE",
    )
    parser.add_argument("--output", type=Path, default=PAGE)
    given = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    nsys = given.nsys.split() if given.nsys else None
    version = "without nsys"
    if nsys:
        program, *settings = nsys
        told = subprocess.run(
            [program, "--version"],
            capture_output=True,
            text=True,
            env={**os.environ, **dict(s.split("=", 1) for s in settings)},
            check=True,
        )
        version = "nsys " + told.stdout.split("version")[-1].strip()
    found, rows = {}, {}
    for kernels in given.kernels:
        trace = FOLDER / f"{kernels}.sqlite"
        if not trace.exists():
            write_trace(trace, Shape(kernels))
        rows[kernels] = rows_of(trace)
        found[kernels] = measure(contenders(trace, kernels, nsys), given.rounds)
        for name, trial in found[kernels].items():
            print(
                f"{kernels:>9,}  {name:<28} {trial.seconds:8.2f} s {trial.peak:7.0f} MB"
            )
    small = measure(small_contenders(), given.rounds)
    given.output.write_text(page(found, rows, small, given.rounds, version))
    return 0


if __name__ == "__main__":
    sys.exit(main())

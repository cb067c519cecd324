"""What judging a thousand small traces costs beyond the linting itself.

    .venv/bin/python benchmarks/fleet.py [TRACES]

Judges copies of stored samples one after the other in one process, then through the
pool of local processes with one worker, then on a local Dask cluster with one and with
two workers. Start-up is left out: each way judges some traces before the clock starts.
Ends with 1 if one worker takes over 10 ms a trace more than the plain loop; means
something only on a quiet machine.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from distributed import LocalCluster

from streamlint import many
from streamlint.cluster import judged_by_cluster
from streamlint.engine import Report, lint
from streamlint.registry import all_rules
from streamlint.sources import Source

ROOT = Path(__file__).parents[1]
SAMPLES = ("legacy", "legacy_fix", "pageable", "pinned", "devsync", "ptds")
LIMIT_S = 0.010
ROUND = 50

Way = Callable[[list[Source]], Iterator[tuple[int, many.Outcome]]]


def main() -> int:
    """Measure, print and judge."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    judge = partial(lint, rules=all_rules())
    with tempfile.TemporaryDirectory() as folder, local(1) as one, local(2) as two:
        sources = laid_out(Path(folder), count)
        ways: dict[str, Way] = {
            "one process": lambda part: many.judged_here(judge, part),
            "--jobs 1": lambda part: many.judged_by_processes(judge, part, 1),
            "Dask, 1 worker": lambda part: judged_by_cluster(
                judge, part, one.scheduler_address
            ),
            "Dask, 2 workers": lambda part: judged_by_cluster(
                judge, part, two.scheduler_address
            ),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for start in range(0, count, ROUND):
            # In turns, so that a busy machine slows all of them.
            for name, way in ways.items():
                taken[name].append(seconds(way, sources[start : start + ROUND]))
    plain = taken["one process"]
    over = {
        name: statistics.median(t - p for t, p in zip(times, plain, strict=True))
        for name, times in taken.items()
    }
    for name, times in taken.items():
        each = statistics.median(times)
        print(f"{name:16} {1e3 * each:6.1f} ms a trace, {1e3 * over[name]:+6.1f} ms")
    worst = max(over["--jobs 1"], over["Dask, 1 worker"])
    print(f"overhead {1e3 * worst:.1f} ms a trace, at most {1e3 * LIMIT_S:.0f}")
    return int(worst > LIMIT_S)


def laid_out(folder: Path, count: int) -> list[Source]:
    """So many copies of the samples, as one run would name them."""
    made = []
    for number, sample in zip(range(count), itertools.cycle(SAMPLES), strict=False):
        path = folder / f"rank{number}.sqlite"
        shutil.copy(ROOT / "sample_traces" / "extra" / f"{sample}.sqlite", path)
        made.append(Source(str(path)))
    return made


def local(workers: int) -> LocalCluster:
    """A Dask cluster of processes on this machine."""
    return LocalCluster(
        n_workers=workers,
        processes=True,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
    )


def seconds(way: Way, sources: list[Source]) -> float:
    """Time a trace from the first outcome to the last: without what starting takes."""
    began, number = 0.0, 0
    for number, (_, outcome) in enumerate(way(sources)):
        if not isinstance(outcome, Report):
            raise outcome
        if number == 0:
            began = time.perf_counter()
    return (time.perf_counter() - began) / number


if __name__ == "__main__":
    sys.exit(main())

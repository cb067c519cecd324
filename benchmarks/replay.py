"""How long the replay of a large trace takes beside loading what it needs.

    .venv/bin/python benchmarks/replay.py [TRACE | --kernels 1000000]

Without a trace it generates one, and one of a tenth of the size to show how times
grow. Loading, building the graph and replaying it are measured in turns, so that a
busy machine slows all of them. Ends with 1 if building and one replay together take
more than three times as long as loading.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from make_trace import Shape, write_trace

from streamlint.replay import Replay
from streamlint.replay.graph import build
from streamlint.trace import open_trace

MAX_RATIO = 3.0


STEPS = ("load", "build", "replay")
Seconds = tuple[float, float, float]
"""Of each step."""


class Trial(NamedTuple):
    """One round: seconds of each step, by the wall clock and of the processor."""

    wall: Seconds
    processor: Seconds
    operations: int
    calls: int


def measure(path: Path) -> Trial:
    """Load, build and replay once, from a file opened anew."""
    gc.collect()
    instants = [(time.perf_counter(), time.process_time())]

    def step() -> None:
        instants.append((time.perf_counter(), time.process_time()))

    trace = open_trace(path)
    calls = trace.runtime_calls.height
    for frame in (
        trace.gpu_ops,
        trace.synchronizations,
        trace.event_waits,
        trace.event_records,
    ):
        assert frame.width
    step()
    replay = Replay(build(trace))
    step()
    replay.run()
    step()
    trace.close()
    (w0, p0), (w1, p1), (w2, p2), (w3, p3) = instants
    wall, processor = (w1 - w0, w2 - w1, w3 - w2), (p1 - p0, p2 - p1, p3 - p2)
    return Trial(wall, processor, replay.graph.ops.height, calls)


def median(rounds: list[Trial]) -> Trial:
    """The median of each time."""

    def middle(times: list[Seconds]) -> Seconds:
        load, build, replay = (
            statistics.median(step) for step in zip(*times, strict=True)
        )
        return load, build, replay

    return rounds[0]._replace(
        wall=middle([trial.wall for trial in rounds]),
        processor=middle([trial.processor for trial in rounds]),
    )


def ratio(times: Seconds) -> float:
    """Building and replaying over loading."""
    return (times[1] + times[2]) / times[0]


def report(usual: list[Trial], first: Trial) -> None:
    """Print the table."""
    print("operations      calls   load s  build s  replay s  ratio  (processor time)")
    for trial in usual:
        load, build, replay = trial.wall
        print(
            f"{trial.operations:10,} {trial.calls:10,} {load:8.2f} {build:8.2f} "
            f"{replay:9.3f} {ratio(trial.wall):6.2f}  ({ratio(trial.processor):.2f})"
        )
    print(f"first replay of this process, compiling included: {first.wall[2]:.2f} s")
    if len(usual) > 1:
        small, large = usual[0], usual[-1]
        grown = large.operations / small.operations
        n_log_n = grown * math.log(large.operations) / math.log(small.operations)
        print(f"{grown:.1f} times the operations (n log n is {n_log_n:.1f}):")
        for number, name in enumerate(STEPS):
            print(
                f"  {name:6} {large.wall[number] / small.wall[number]:5.1f} times "
                f"({large.processor[number] / small.processor[number]:.1f})"
            )
    print(f"ratio {ratio(usual[-1].wall):.2f}, at most {MAX_RATIO}")


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--kernels", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5, help="at least 3")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [given.trace] if given.trace else []
        if not paths:
            for kernels in (given.kernels // 10, given.kernels):
                paths.append(Path(folder) / f"{kernels}.sqlite")
                write_trace(paths[-1], Shape(kernels))
        first = measure(paths[-1])
        rounds: list[list[Trial]] = [[] for _ in paths]
        for _ in range(max(3, given.rounds)):
            for path, trials in zip(paths, rounds, strict=True):
                trials.append(measure(path))
    usual = [median(trials) for trials in rounds]
    report(usual, first)
    return int(ratio(usual[-1].wall) > MAX_RATIO)


if __name__ == "__main__":
    sys.exit(main())

"""How long `streamlint lint` takes beside `import polars, typer`, its floor.

    .venv/bin/python benchmarks/startup.py

Both are measured in turns, in an empty folder, so that no configuration is read. Ends
with 1 if lint takes more than twice as long; means something only on a quiet machine,
at the priority that people have.
"""

from __future__ import annotations

import compileall
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACES = ("legacy", "pinned", "devsync", "misc")
ROUNDS = 11
MAX_RATIO = 2.0
FLOOR = "import polars, typer"


def seconds(folder: str, *command: str) -> float:
    """Wall time of one run of python with these arguments in that folder."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - start


def main() -> int:
    """Measure, print and judge."""
    for folder in ("streamlint", "rules", "harness"):
        # As an installed package is; an editable one under PYTHONDONTWRITEBYTECODE
        # would be compiled in every run.
        compileall.compile_dir(ROOT / folder, quiet=1)
    commands: dict[str, tuple[str, ...]] = {"floor": ("-c", FLOOR)}
    for trace in TRACES:
        path = ROOT / f"sample_traces/extra/{trace}.sqlite"
        commands[trace] = ("-m", "streamlint", "lint", "--exit-zero", str(path))
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as empty:
        for command in commands.values():
            seconds(empty, *command)  # fills the caches
        for _ in range(ROUNDS):
            for name, command in commands.items():
                times[name].append(seconds(empty, *command))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    floor = medians.pop("floor")
    print(f"{floor * 1e3:6.0f} ms        python -c '{FLOOR}'")
    for name, median in medians.items():
        print(f"{median * 1e3:6.0f} ms  {median / floor:.2f}  lint {name}")
    ratio = max(medians.values()) / floor
    print(f"ratio {ratio:.2f}, at most {MAX_RATIO}")
    return int(ratio > MAX_RATIO)


if __name__ == "__main__":
    sys.exit(main())

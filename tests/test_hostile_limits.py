"""A megabyte of hostile file costs a lint at most 2 s of CPU and 300 MB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import hostile_files
import pytest

MAX_CPU_S = 2.0
MAX_BYTES = 300 << 20
FREE_CPU_S = 1.0
"""A plain lint takes half a second here; of a slower machine, what it has more."""

TRIES = 3
"""Programs beside it that share the caches make a lint take half as much again."""

pytestmark = pytest.mark.skipif(
    not hasattr(os, "wait4"), reason="the system doesn't tell what a child used"
)


# A child's memory counts from its parent's: only a small parent can measure it.
MEASURE = """
import json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-m", "streamlint", "lint", sys.argv[1]])
_, status, used = os.wait4(child.pid, 0)
child.returncode = code = os.waitstatus_to_exitcode(status)
figures = code, used.ru_utime + used.ru_stime, used.ru_maxrss
with open("figures.json", "w") as file:
    json.dump(figures, file)
"""


def cost(path: Path, folder: Path) -> tuple[int, float, int, str, str]:
    """Exit code, CPU seconds, bytes of memory at most and both outputs of a lint."""
    command = [sys.executable, "-I", "-c", MEASURE, str(path)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, timeout=300
    )
    code, seconds, most = json.loads((folder / "figures.json").read_text())
    unit = 1 if sys.platform == "darwin" else 1024
    return code, seconds, most * unit, done.stdout, done.stderr


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> float:
    """How many times slower than it should be a plain lint is here; at least 1."""
    folder = tmp_path_factory.mktemp("plain")
    path = hostile_files.trace(folder / "plain.sqlite")
    seconds = min(cost(path, folder)[1] for _ in range(2))
    return max(1.0, seconds / FREE_CPU_S)


@pytest.mark.parametrize("kind", hostile_files.FILES)
def test_a_hostile_file_is_cheap(kind: str, tmp_path: Path, slower: float) -> None:
    path = hostile_files.make(kind, tmp_path / "t.sqlite")
    assert path.stat().st_size < 1.3 * hostile_files.MEGABYTE
    for _ in range(TRIES):
        code, seconds, most, out, error = cost(path, tmp_path)
        if seconds <= MAX_CPU_S * slower:
            break
    assert code in (0, 1, 2, 3)
    assert "\x1b" not in out + error
    if code == 2:
        assert [line.partition(": ")[0] for line in error.splitlines()] == [
            *("error", "hint")
        ]
    else:
        assert not error
        assert len(out) < 100_000
    assert seconds <= MAX_CPU_S * slower
    assert most <= MAX_BYTES

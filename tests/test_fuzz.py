"""Any damage to a real trace ends in an error or in what sqlite3 reads (see fuzz/)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import edits, oracle
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

FOLDER = Path(__file__).with_name("fuzz")
SEEDS = sorted((FOLDER / "seeds").iterdir())
# One edit leaves most of a trace to be judged, more of them lead to odder files.
SCRIPTS = st.one_of(
    st.binary(min_size=4, max_size=8), st.binary(min_size=9, max_size=32)
)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda path: path.name)
def test_what_once_broke_something(seed: Path, tmp_path: Path) -> None:
    edits.build(seed.read_bytes(), tmp_path / "input.sqlite")
    oracle.check(tmp_path / "input.sqlite")


@pytest.mark.parametrize("number", range(len(edits.BASES)))
def test_the_samples_themselves_pass(number: int, tmp_path: Path) -> None:
    path = tmp_path / "input.sqlite"
    edits.build(bytes([number]), path)
    assert path.read_bytes() == edits.base(number)
    assert oracle.check(path).startswith("exit")


@settings(
    max_examples=60,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(script=SCRIPTS)
@example(script=b"")
def test_damage_is_refused_or_read_as_sqlite_does(
    script: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz-input.sqlite"
    edits.build(script, path)
    oracle.check(path)


@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not installed"
)
def test_a_short_guided_run(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER), "--runs", "40", "--seed", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list(tmp_path.glob("crash-*"))

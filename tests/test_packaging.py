"""The wheel and the sdist hold every rule, and an installed wheel works.

`rules/` and `harness/` enter the package through a map in pyproject.toml. When such a
map misses a folder, the build still succeeds, so the result is looked at here.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
NOT_SOURCE = {"build", "dist", "demo", "nsys", "__pycache__"}

# One worker builds once for all tests here.
pytestmark = pytest.mark.xdist_group("packaging")


class Built(NamedTuple):
    sdist: Path
    wheel: Path


def run_python(*args: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def not_source(folder: str, names: list[str]) -> set[str]:
    return {
        name
        for name in names
        if name == "__pycache__"
        or name.startswith(".")
        or name.endswith(".egg-info")
        or (Path(folder) == ROOT and name in NOT_SOURCE)
    }


def files_below(folder: str, pattern: str) -> set[str]:
    """Relative paths of the matching files; folders behind symlinks are left out."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob(pattern)
        if path.is_file() and path.resolve() == path
    }


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def rule_files() -> set[str]:
    return {
        path
        for path in files_below("rules", "*.py")
        if not path.rpartition("/")[2].startswith("_")
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    source = tmp_path_factory.mktemp("packaging") / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=not_source)
    out = source.parent / "dist"
    run_python(
        *("-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", out, "."),
        cwd=source,
    )
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return Built(sdist, wheel)


def test_wheel_holds_every_module_and_data_file(built: Built) -> None:
    names = names_in_wheel(built.wheel)
    modules = files_below("streamlint", "*.py") | {
        f"streamlint/{path}"
        for folder in ("rules", "harness")
        for path in files_below(folder, "*.py")
    }
    schemas = files_below("streamlint/reporters", "*.schema.json")
    assert rule_files()
    assert schemas
    assert {name for name in names if name.endswith(".py")} == modules
    assert names >= schemas | {"streamlint/py.typed"}


def test_wheel_has_one_top_level_package(built: Built) -> None:
    tops = {name.partition("/")[0] for name in names_in_wheel(built.wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"streamlint"}


def test_sdist_holds_sources_samples_and_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "LICENSE", "Makefile"}
    for folder in ("streamlint", "rules", "harness", "tests"):
        wanted |= files_below(folder, "*.py")
    wanted |= files_below("sample_traces", "*.sqlite")
    assert wanted - names == set()


def test_wheel_from_sdist_is_the_same(built: Built, tmp_path: Path) -> None:
    run_python(
        *("-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"),
        *("--no-build-isolation", "--wheel-dir", tmp_path, built.sdist),
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert names_in_wheel(wheel) == names_in_wheel(built.wheel)


def test_installed_wheel_lists_every_rule(built: Built, tmp_path: Path) -> None:
    site = tmp_path / "site"
    run_python(
        *("-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
        *("--target", site, built.wheel),
        cwd=tmp_path,
    )
    origins = run_python(
        "-c",
        "import streamlint.harness, streamlint.rules\n"
        "for module in streamlint, streamlint.harness, streamlint.rules:\n"
        "    print(module.__file__)",
        cwd=tmp_path,
        PYTHONPATH=str(site),
    )
    assert all(Path(line).is_relative_to(site) for line in origins.splitlines())

    streamlint = ("-m", "streamlint")
    env = {"PYTHONPATH": str(site), "COLUMNS": "200"}
    assert "lint" in run_python(*streamlint, "--help", cwd=tmp_path, **env)
    listed = run_python(*streamlint, "rules", cwd=tmp_path, **env)
    rules = {Path(path).stem.replace("_", "-") for path in rule_files()}
    assert {rule for rule in rules if rule not in listed} == set()

"""The wheel and the sdist hold every rule, and an installed wheel works, offline too.

`rules/` and `harness/` enter the package through a map in pyproject.toml. When such a
map misses a folder, the build still succeeds, so the result is looked at here. What
tests install is locked: the lock is held against pyproject.toml.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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


@pytest.fixture(scope="module")
def site(built: Built) -> Path:
    """Where the wheel is installed, beside nothing else."""
    folder = built.wheel.parent / "site"
    run_python(
        *("-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
        *("--target", folder, built.wheel),
        cwd=built.wheel.parent,
    )
    return folder


def test_installed_wheel_lists_every_rule(site: Path, tmp_path: Path) -> None:
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


# Python runs a module of this name before anything else; "socket." events include the
# look-up of names, this machine's own among them.
NO_NETWORK = """
import sys

def refuse(event, arguments):
    if event.startswith("socket."):
        sys.stderr.write(f"NETWORK: {event}\\n")
        raise RuntimeError("there is no network")

sys.addaudithook(refuse)
"""


def test_an_installed_wheel_needs_no_network(site: Path, tmp_path: Path) -> None:
    guard = tmp_path / "guard"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(NO_NETWORK)
    env = {**os.environ, "PYTHONPATH": f"{guard}{os.pathsep}{site}"}

    def offline(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8"
        )

    for attempt in ("socket.socket()", "socket.gethostname()"):
        done = offline("-c", f"import socket; {attempt}")
        assert done.returncode
        assert "NETWORK" in done.stderr
    trace = ROOT / "sample_traces" / "extra" / "legacy.sqlite"
    commands: list[tuple[int, list[str | Path]]] = [
        (1, ["lint", trace]),
        (1, ["lint", trace, "--format", "json", "--html", "page.html"]),
        (0, ["report", trace]),
        (0, ["info", trace]),
        (0, ["redact", trace, "copy.sqlite"]),
    ]
    for code, arguments in commands:
        done = offline("-m", "streamlint", *arguments)
        assert (done.returncode, "NETWORK" in done.stderr) == (code, False), done.stderr


# The lock -----------------------------------------------------------------------------


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def locked() -> dict[str, str]:
    """Name and version of what the lock has for this Python."""
    text = (ROOT / "requirements-test.lock").read_text("utf-8")
    pins = [entry for entry in re.split(r"\n(?! )", text) if entry[:1] not in ("#", "")]
    found: dict[str, str] = {}
    for pin in pins:
        wanted, *hashes = (part.strip() for part in pin.split("\\\n"))
        assert hashes
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes)
        requirement = Requirement(wanted)
        if requirement.marker is None or requirement.marker.evaluate():
            (version,) = requirement.specifier
            assert version.operator == "=="
            found[canonicalize_name(requirement.name)] = version.version
    return found


def test_the_lock_holds_what_tests_need_and_no_more() -> None:
    """A dependency that changes in pyproject.toml changes the lock: `make lock`."""
    facts, lock = project(), locked()
    texts = [
        *facts["project"]["dependencies"],
        *facts["project"]["optional-dependencies"]["test"],
        *facts["build-system"]["requires"],
    ]
    needed: set[tuple[str, str]] = set()
    todo = [(text, "") for text in texts]
    while todo:
        text, extra = todo.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        version = lock.get(name)
        assert version, f"{name} is not locked: make lock"
        assert requirement.specifier.contains(version, prereleases=True), (
            f"{name} {version} is locked, {requirement} is wanted: make lock"
        )
        for extra in {"", *requirement.extras}:
            if (name, extra) not in needed:
                needed.add((name, extra))
                todo += [
                    (more, extra) for more in importlib.metadata.requires(name) or ()
                ]
    assert {name for name, _ in needed} == set(lock)


def test_runtime_dependencies_have_lower_bounds_and_one_known_break() -> None:
    capped = set()
    for text in project()["project"]["dependencies"]:
        requirement = Requirement(text)
        operators = {one.operator for one in requirement.specifier}
        assert ">=" in operators
        if operators != {">="}:
            capped.add(requirement.name)
    assert capped == {"typer"}  # pyproject.toml says why


def test_project_files_name_no_registry() -> None:
    for name in ("requirements-test.lock", "pyproject.toml", "Makefile", ".ci/run"):
        text = (ROOT / name).read_text("utf-8")
        assert not re.search(r"--(extra-)?index-url|--find-links|pypi", text)
        assert "://" not in text

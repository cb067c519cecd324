"""Rules that streamlint doesn't bring: loose files, packages, and new ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from commandline import Done, Run, process
from jsonschema import Draft202012Validator

import streamlint
from streamlint import registry, scaffold
from streamlint.registry import all_rules
from streamlint.reporters.json import schema

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "sample_traces" / "pageable-async-copy" / "bad.sqlite"

RULE = '''"""Rule {name}."""

from streamlint.findings import Claim, Confidence, Cost, Evidence, Finding
from streamlint.findings import Severity, Where
from streamlint.rule import Outcome, rule
from streamlint.settings import Threshold
from streamlint.trace.model import Trace

MIN_KERNELS = Threshold("min-kernels", 1, "kernels", "One is enough.")


@rule(needs=("kernels",))
def {module}(trace: Trace) -> Outcome:
    """The program has kernels.

    What it does
        Looks for kernels.
    Why it costs time
        It does not.
    Evidence
        The first kernel.
    Exemptions
        None.
    Fix
        None is needed.
    References
        None.
    """
    first = trace.kernels.row(0, named=True)
    if trace.kernels.height < trace.limit(MIN_KERNELS):
        return []
    return [
        Finding(
            message="it has kernels",
            severity=Severity.MEDIUM,
            confidence=Confidence.HIGH,
            cost=Cost(Claim.NONE, None, None, "no time"),
            where=Where(),
            occurrences=trace.kernels.height,
            evidence=(Evidence(first["start_ns"], first["end_ns"], "a kernel"),),
            fix="leave it",
            identity=("kernels",),
        )
    ]
'''


def write_rule(folder: Path, name: str, text: str = RULE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace('-', '_')}.py"
    module = name.replace("-", "_")
    path.write_text(text.replace("{name}", name).replace("{module}", module))
    return path


@pytest.fixture
def loose(tmp_path: Path) -> Path:
    """A folder with a rule of no family and one of the family `house`."""
    folder = tmp_path / "my rules"
    write_rule(folder, "has-kernels")
    write_rule(folder / "house", "in-house")
    write_rule(folder, "_helper", "raise SystemExit(7)\n")
    write_rule(folder, "test_has_kernels", "raise SystemExit(8)\n")
    return folder


# Loose files ------------------------------------------------------------------------


def test_loose_files_are_rules_like_any_other(run: Run, loose: Path) -> None:
    done = run("lint", TRACE, "--rules-dir", loose, "--format", "json")
    assert done.code == 1
    assert done.err == ""
    document = json.loads(done.out)
    Draft202012Validator(schema()).validate(document)
    found = {f["rule"]: f for f in document["traces"][0]["findings"]}
    assert found["has-kernels"]["family"] == "local"
    assert found["in-house"]["family"] == "house"
    assert found["has-kernels"]["origin"] == str(loose / "has_kernels.py")
    assert found["pageable-async-copy"]["origin"] == "streamlint"

    chosen = run("lint", TRACE, "--rules-dir", loose, "--select", "house")
    assert "in-house" in chosen.out
    assert "has-kernels" not in chosen.out
    assert "pageable" not in chosen.out.replace("pageable_async_copy", "")
    without = run("lint", TRACE, "--select", "house")
    assert without.code == 2
    assert "no rule or family is called house" in without.err


def test_rules_and_explain_name_the_origin(run: Run, loose: Path) -> None:
    listed = run("rules", "--rules-dir", loose).out
    assert "house:\n  in-house" in listed
    assert listed.count(" from /") == 2
    assert f"from {loose / 'house' / 'in_house.py'}" in listed
    assert " from /" not in run("rules").out
    told = run("explain", "in-house", "--rules-dir", loose).out
    assert told.startswith("# in-house\n\nThe program has kernels.\n")
    assert f"From: {loose / 'house' / 'in_house.py'}" in told
    assert "`min-kernels`, 1 kernels: One is enough." in told


def test_sarif_names_the_origin(run: Run, loose: Path) -> None:
    done = run("lint", TRACE, "--rules-dir", loose, "--format", "sarif")
    rules = json.loads(done.out)["runs"][0]["tool"]["driver"]["rules"]
    origins = {rule["id"]: rule["properties"]["origin"] for rule in rules}
    assert origins["in-house"].endswith("in_house.py")
    assert origins["busy-poll"] == "streamlint"


def test_every_command_takes_them(run: Run, loose: Path, tmp_path: Path) -> None:
    write_rule(loose, "is-broken", "1 / 0\n")
    page = tmp_path / "page.html"
    for args in (
        ("report", TRACE, "-o", page),
        ("info", TRACE),
        ("diff", TRACE, TRACE),
        ("config", "show"),
        ("explain", "in-house"),
    ):
        done = run(*args, "--rules-dir", loose)
        assert done.code == 0, done.err
        assert "is_broken.py is skipped: ZeroDivisionError" in done.err
        if args[0] == "info":
            assert "in-house" in done.out
        if args[0] == "config":
            assert "[rules.in-house]\n" in done.out
            assert "min-kernels = 1" in done.out
            assert f'rules-dir = ["{loose}"]' in done.out


def test_a_configuration_names_folders_beside_itself(
    run: Run, loose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "streamlint.toml").write_text(
        'select = ["house"]\nrules-dir = ["my rules"]\n'
        "[rules.in-house]\nmin-kernels = 1000\n"
        '[[allow]]\nrule = "has-kernels"\nreason = "it should"\n'
    )
    below = tmp_path / "src"
    below.mkdir()
    monkeypatch.chdir(below)
    assert run("lint", TRACE).code == 0
    assert run("lint", TRACE, "--select", "has-kernels").code == 0
    assert run("lint", TRACE, "--isolated", "--select", "house").code == 2
    assert "in-house" in run("rules").out
    assert "in-house" not in run("rules", "--isolated").out
    (tmp_path / "streamlint.toml").write_text('ignore = ["houses"]\n')
    assert run("rules").code == 0  # what the hint of the other command says to run
    (tmp_path / "streamlint.toml").write_text("rules-dir = 7\n")
    done = run("lint", TRACE)
    assert done.code == 2
    assert "rules-dir can't be 7" in done.err
    assert "a list of folders" in done.err


def test_a_folder_that_is_missing_is_an_error(run: Run, tmp_path: Path) -> None:
    done = run("lint", TRACE, "--rules-dir", tmp_path / "none")
    assert done.code == 2
    assert done.err == (
        f"error: {tmp_path / 'none'} is no folder\nhint: name one that has rules\n"
    )


def test_python_takes_them_too(loose: Path) -> None:
    with streamlint.open(TRACE) as trace:
        result = streamlint.lint(trace, rules_dir=loose, select="house")
        assert [rule.name for rule, _ in result.findings] == ["in-house"]
        with pytest.raises(streamlint.RuleError, match="is no folder"):
            streamlint.lint(trace, rules_dir=[str(loose / "none")])


def test_worker_processes_have_them(loose: Path, tmp_path: Path) -> None:
    (tmp_path / "streamlint.toml").write_text(
        'rules-dir = ["my rules"]\n[rules.in-house]\nmin-kernels = 2\n'
    )
    for name in ("a", "b"):
        shutil.copy(TRACE, tmp_path / f"{name}.sqlite")
    done = process(
        *("lint", "a.sqlite", "b.sqlite", "--jobs", "2", "--select", "house"),
        *("--format", "json"),
        cwd=tmp_path,
    )
    assert done.code == 1, done.err
    traces = json.loads(done.out)["traces"]
    assert [t["findings"][0]["rule"] for t in traces] == ["in-house", "in-house"]


# What can't be used -----------------------------------------------------------------


BROKEN = {
    "an import fails": "import no_such_module\n",
    "it ends the process": "raise SystemExit(3)\n",
    "syntax": "def (:\n",
    "no rule": "def is_broken(trace): return []\n",
    "another name": RULE.replace("def {module}", "def other"),
    "no such table": RULE.replace('"kernels",', '"colonels",'),
    "no sections": RULE.replace("Exemptions", "Exceptions"),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_is_named_and_skipped(run: Run, loose: Path, text: str) -> None:
    path = write_rule(loose / "house", "is-broken", text)
    done = run("lint", TRACE, "--rules-dir", loose)
    assert done.code == 1
    assert re.fullmatch(
        rf"warning: {re.escape(str(path))} is skipped: \w+Error: .+\n"
        rf"|warning: {re.escape(str(path))} is skipped: SystemExit: 3\n",
        done.err,
    )
    assert "in-house" in done.out
    assert "is-broken" not in done.out
    assert run("rules", "--rules-dir", loose).err == done.err
    ignored = run("lint", TRACE, "--rules-dir", loose, "--ignore", "is-broken")
    assert ignored.code == 1


@pytest.mark.parametrize("chosen", ["is-broken", "house"])
def test_a_broken_rule_that_is_selected_is_an_error(
    run: Run, loose: Path, chosen: str
) -> None:
    path = write_rule(loose / "house", "is-broken", BROKEN["an import fails"])
    done = run("lint", TRACE, "--rules-dir", loose, "--select", chosen)
    assert done.code == 2
    assert done.out == ""
    assert f"error: {path} can't be used: ModuleNotFoundError" in done.err
    assert "hint: correct it, or don't select it" in done.err
    told = run("explain", "is-broken", "--rules-dir", loose)
    assert told.code == 2
    assert "can't be used" in told.err


def test_settings_of_a_broken_rule_are_no_error(
    run: Run, loose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rule(loose, "is-broken", BROKEN["syntax"])
    (tmp_path / "streamlint.toml").write_text(
        'rules-dir = ["my rules"]\n[rules.is-broken]\nmin-x = 3\n'
    )
    monkeypatch.chdir(tmp_path)
    assert run("lint", TRACE).code == 1


@pytest.mark.parametrize(
    ("folder", "name", "both"),
    [
        ("", "busy-poll", "streamlint and {file} both have a rule busy-poll"),
        ("house", "has-kernels", "both have a rule has-kernels"),
        ("", "sync", "streamlint has a family and {file} a rule sync"),
        (
            "busy_poll",
            "any-name",
            "{file} has a family and streamlint a rule busy-poll",
        ),
    ],
)
def test_two_of_one_name_are_an_error(
    run: Run, loose: Path, folder: str, name: str, both: str
) -> None:
    file = write_rule(loose / folder, name)
    done = run("lint", TRACE, "--rules-dir", loose)
    assert done.code == 2
    assert both.format(file=file) in done.err
    assert "hint: rename one of them" in done.err


def test_a_crash_says_whose_bug_it_is(run: Run, tmp_path: Path) -> None:
    crashing = RULE.replace("    first = ", "    1 / 0\n    first = ")
    path = write_rule(tmp_path / "rules", "is-crashing", crashing)
    done = run("lint", TRACE, "--rules-dir", path.parent)
    assert done.code == 2
    assert f"this is a bug in {path}," in " ".join(done.out.split())


# Installed packages -----------------------------------------------------------------


Install = Callable[[str, str], None]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


@pytest.fixture
def install(site: Path) -> Install:
    """Puts a package with rules where `installed` looks, as pip would."""

    def put(name: str, points: str) -> None:
        package = site / f"{name}_rules"
        write_rule(package, "has-kernels")
        write_rule(package / "house", "in-house")
        for folder in (package, package / "house"):
            (folder / "__init__.py").write_text("")
        info = site / f"{name}_rules-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}-rules\nVersion: 1.2\n"
        )
        (info / "entry_points.txt").write_text(points)

    return put


def installed(site: Path, *args: str | Path) -> Done:
    paths = os.pathsep.join([str(site), str(ROOT)])
    return process(*args, env={**os.environ, "PYTHONPATH": paths})


def test_installed_packages_bring_rules(site: Path, install: Install) -> None:
    install("acme", "[streamlint.rules]\nacme = acme_rules\n")
    listed = installed(site, "rules")
    assert listed.err == ""
    assert "house:\n  in-house" in listed.out
    assert "acme-rules:\n  has-kernels" in listed.out
    assert listed.out.count("from acme-rules 1.2") == 2
    done = installed(site, "lint", TRACE, "--select", "in-house", "--format", "json")
    assert done.code == 1
    (found,) = json.loads(done.out)["traces"][0]["findings"]
    assert (found["rule"], found["origin"]) == ("in-house", "acme-rules 1.2")


def test_a_broken_package_is_named_and_skipped(site: Path, install: Install) -> None:
    install(
        "acme",
        "[streamlint.rules]\nacme = acme_rules\ngone = no_such_package.rules\n",
    )
    write_rule(site / "acme_rules", "is-broken", "1 / 0\n")
    done = installed(site, "lint", TRACE)
    assert done.code == 1
    assert done.err.splitlines() == [
        "warning: acme-rules 1.2 is skipped: acme_rules.is_broken: "
        "ZeroDivisionError: division by zero",
        "warning: acme-rules 1.2 is skipped: no_such_package.rules: "
        "ModuleNotFoundError: No module named 'no_such_package'",
    ]
    for chosen in ("gone", "is-broken"):
        done = installed(site, "lint", TRACE, "--select", chosen)
        assert done.code == 2
        assert "error: acme-rules 1.2 can't be used" in done.err


def test_packages_are_asked_only_where_one_may_bring_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    # A library that other tests import may have brought a finder of its own.
    monkeypatch.setattr(sys, "meta_path", [PathFinder])
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "missing")])
    assert not registry._may_be_installed()
    points = info / "entry_points.txt"
    points.write_text("[console_scripts]\nother = other:main\n")
    assert not registry._may_be_installed()
    points.write_text("[streamlint.rules]\nother = other_rules\n")
    assert registry._may_be_installed()
    points.unlink()
    (tmp_path / "packed.zip").write_bytes(b"PK")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packed.zip")])
    assert registry._may_be_installed()  # can't be told: ask

    class Finder:
        __name__ = "Finder"

        def find_distributions(self) -> None: ...

        def find_spec(self, *_: object) -> None: ...

    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [Finder()])
    assert registry._may_be_installed()


# New rules --------------------------------------------------------------------------


def tool(*args: str | Path, cwd: Path, path: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_loose_rule_works_as_written(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "rules"
    for args in (("small-memsets",), ("many-memsets", "--family", "my-io")):
        done = run("new-rule", *args, "--rules-dir", folder)
        assert done.code == 0, done.err
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    assert files == {
        *("small_memsets.py", "test_small_memsets.py"),
        *("my_io/many_memsets.py", "my_io/test_many_memsets.py"),
    }
    assert len(done.out.splitlines()) == 2
    strict = ("--isolated", "--select", "E,F,I,B,UP,SIM,RUF,PTH,PT")
    tool("ruff", "check", *strict, ".", cwd=folder)
    tool("ruff", "format", "--isolated", "--check", ".", cwd=folder)
    # The cache is that of `make test`: all but these files is checked already.
    tool(
        *("mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir"),
        *(ROOT / ".mypy_cache", "--explicit-package-bases"),
        *(folder / "small_memsets.py", folder / "test_small_memsets.py"),
        cwd=ROOT,
    )
    told = tool(
        "pytest", "-q", "-p", "no:cacheprovider", ".", cwd=folder, path=str(ROOT)
    )
    assert "4 passed" in told
    assert "small-memsets" in run("rules", "--rules-dir", folder).out


def checkout(folder: Path, *tests: str) -> Path:
    """A copy of this checkout, as far as a new rule needs it."""
    for name in ("streamlint", "rules", "harness"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    (folder / "tests").mkdir()
    helpers = ("conftest.py", "commandline.py", "tracebuilder.py", "nsys_layout.py")
    for name in (*helpers, *tests):
        shutil.copy(ROOT / "tests" / name, folder / "tests")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_a_new_rule_of_a_checkout_works_as_written(tmp_path: Path) -> None:
    below, path = checkout(tmp_path) / "rules", str(tmp_path)
    new = ("streamlint", "new-rule", "small-memsets", "--family", "l2-cache")
    told = tool(*new, cwd=below, path=path)
    assert told.splitlines() == [
        "wrote l2_cache/small_memsets.py",
        "wrote ../harness/workloads/small_memsets.cu",
        "wrote ../tests/test_small_memsets.py",
    ]
    files = [line.removeprefix("wrote ") for line in told.splitlines()]
    ours = [file for file in files if file.endswith(".py")]
    tool("ruff", "check", *ours, cwd=below)
    tool("ruff", "format", "--check", *ours, cwd=below)
    tests = ("pytest", "-q", "-p", "no:cacheprovider", "tests/test_small_memsets.py")
    assert "3 passed" in tool(*tests, cwd=tmp_path, path=path)
    listed = tool("streamlint", "harness", "list", cwd=tmp_path, path=path)
    assert re.search(r"^\s*small-memsets\b", listed, re.MULTILINE)


def test_the_steps_for_contributors_work(tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    steps = re.findall(r"^ {7}(\S.*)$", page, re.MULTILINE)
    names = {"<rule-name>": "small-memsets", "<family>": "transfers"}
    root = checkout(tmp_path, "test_samples.py", "test_docs.py")
    samples = root / "sample_traces" / "small-memsets"
    (root / "docs").mkdir()
    said = {}
    for step in steps:
        words = [names.get(word, word) for word in step.split()]
        program = words[0].removeprefix(".venv/bin/")
        match (program, *words[1:3]):
            case ["make", "pages"]:
                words = ["streamlint.docs"]
            case ["make", "test"]:
                tests = ("test_small_memsets.py", "test_samples.py", "test_docs.py")
                words = [
                    "pytest",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "-k",
                    "small-memsets",
                ]
                words += [f"tests/{name}" for name in tests]
            case ["streamlint", "harness", "run"]:  # has no GPU here
                pair(samples, root)
                continue
            case _:
                assert program == "streamlint"
                words = [program, *words[1:]]
                words = [word.replace("<rule-name>", "small-memsets") for word in words]
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            encoding="utf-8",
        )
        said[" ".join(words[:2])] = (done.returncode, done.stdout + done.stderr)
    assert list(said) == [
        *("streamlint new-rule", "streamlint.docs", "pytest -q"),
        *("streamlint explain", "streamlint lint"),
    ]
    assert [code for code, _ in said.values()] == [0, 0, 0, 0, 1], said
    assert (root / "docs" / "rules" / "small-memsets.md").exists()
    assert re.search(r"\b[1-9]\d* passed", said["pytest -q"][1])
    assert "# small-memsets" in said["streamlint explain"][1]
    assert "256 memsets of less than 64 KiB" in said["streamlint lint"][1]


def pair(folder: Path, root: Path) -> None:
    """What the harness makes of the two programs, by the helper of the new test."""
    folder.mkdir(parents=True)
    (folder.parent / "README.md").write_text("# Samples\n")
    facts = {"shows": "a test", "redacted": "by streamlint.trace.redact"}
    traces = {"bad.sqlite": (256, 1024), "fixed.sqlite": (1, 256 * 1024)}
    note = json.dumps(dict.fromkeys(traces, facts))
    (folder / "provenance.json").write_text(note)
    for name, memsets in traces.items():
        code = (
            "from pathlib import Path; from test_small_memsets import memsets; "
            f"memsets(*{memsets}).write(Path('{name}'))"
        )
        path = os.pathsep.join([str(root), str(root / "tests")])
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONPATH": path},
            check=True,
        )
        tool("streamlint", "redact", name, folder / name, cwd=root, path=str(root))
        (root / name).unlink()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("storm",), "a rule can't be called storm"),
        (("Small-Copies",), "a rule can't be called Small-Copies"),
        (("../../x-y",), "a rule can't be called"),
        (("busy-poll",), "there is a rule or family busy-poll already"),
        (("new-one", "--family", "../x"), "a family can't be called ../x"),
        (("new-one", "--family", "busy-poll"), "a family can't be called busy-poll"),
    ],
)
def test_a_bad_name_writes_nothing(
    run: Run, tmp_path: Path, args: tuple[str, ...], error: str
) -> None:
    done = run("new-rule", *args, "--rules-dir", tmp_path / "rules")
    assert done.code == 2
    assert error in done.err
    assert list(tmp_path.rglob("*")) == []


def test_nothing_is_overwritten(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "test_small_memsets.py"
    mine.write_text("# mine\n")
    done = run("new-rule", "small-memsets", "--rules-dir", tmp_path)
    assert done.code == 2
    assert f"error: {mine} exists already" in done.err
    assert [path.name for path in tmp_path.iterdir()] == [mine.name]
    assert mine.read_text() == "# mine\n"


def test_outside_a_checkout_a_folder_must_be_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("new-rule", "small-memsets")
    assert done.code == 2
    assert "error: this is no checkout of streamlint" in done.err
    assert "--rules-dir DIR" in done.err


def test_a_checkout_has_its_families(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workloads = tmp_path / "harness" / "workloads"
    workloads.mkdir(parents=True)
    (workloads / "common.cuh").write_text("")
    (tmp_path / "rules" / "sync").mkdir(parents=True)
    (tmp_path / "rules" / "sync" / "__init__.py").write_text("")
    monkeypatch.chdir(workloads)
    assert scaffold.checkout(Path.cwd()) == tmp_path
    done = run("new-rule", "small-memsets")
    assert "error: a rule needs a family\nhint: say --family with one of sync\n" in (
        done.err
    )
    done = run("new-rule", "small-memsets", "--family", "io")
    assert "error: no family io here" in done.err
    assert done.code == 2


def test_built_in_rules_say_so() -> None:
    assert {rule.origin for rule in all_rules()} == {"streamlint"}

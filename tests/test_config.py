"""A project's configuration: where it is found, what it changes, what it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, process

from streamlint.config import load
from streamlint.engine import lint
from streamlint.registry import all_rules
from streamlint.rule import Rule
from streamlint.settings import Settings
from streamlint.trace import open_trace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SAMPLES = Path(__file__).parents[1] / "sample_traces"
STORM = SAMPLES / "small-copy-storm" / "bad.sqlite"
FIXED = SAMPLES / "small-copy-storm" / "fixed.sqlite"
SYNC = SAMPLES / "device-sync-in-steady-state" / "bad.sqlite"
STACKS = SAMPLES / "extra" / "torchbt.sqlite"
TUNABLE = [rule for rule in all_rules() if rule.thresholds]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; nothing above it is configured."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def own(text: str, folder: Path = Path()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "streamlint.toml").write_text(text, "utf-8")


def project(text: str, folder: Path = Path()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(text, "utf-8")


def found(out: str) -> list[str]:
    """The rules that a JSON report's findings are of."""
    document: dict[str, Any] = json.loads(out)
    (trace,) = document["traces"]
    return [finding["rule"] for finding in trace["findings"]]


# Where it is found ------------------------------------------------------------------


def test_a_project_can_ignore_a_rule_in_its_pyproject(run: Run) -> None:
    assert run("lint", STORM).code == 1
    project('[tool.streamlint]\nignore = ["small-copy-storm"]\n')
    done = run("lint", STORM)
    assert done.code == 0
    assert "0 findings" in done.out


def test_the_configuration_of_a_folder_holds_below_it(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own('ignore = ["small-copy-storm"]')
    below = folder / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    assert run("lint", STORM).code == 0
    own('fail-on = "info"', below)  # the nearer one, whole
    assert run("lint", STORM).code == 1


def test_streamlint_toml_comes_before_pyproject(run: Run) -> None:
    project('[tool.streamlint]\nfail-on = "error"\n')
    assert run("lint", STORM).code == 0
    own('fail-on = "high"')
    assert run("lint", STORM).code == 1


def test_a_pyproject_of_others_is_passed_over(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own('ignore = ["transfers"]')
    below = folder / "package"
    project('[project]\nname = "x"\ndependencies = ["streamlint"]\n', below)
    monkeypatch.chdir(below)
    assert run("lint", STORM).code == 0
    project("[tool.ruff\n", below)  # broken, and not ours
    assert run("lint", STORM).code == 0


def test_a_named_file_and_isolation_replace_the_nearest(run: Run, folder: Path) -> None:
    own('ignore = ["small-copy-storm"]')
    assert run("lint", STORM, "--isolated").code == 1
    own('fail-on = "error"', folder / "ci")
    assert run("lint", STORM, "--config", "ci/streamlint.toml").code == 0
    project("[tool.streamlint]\n", folder / "ci")
    assert run("lint", STORM, "--config", "ci/pyproject.toml").code == 1
    done = run("lint", STORM, "--isolated", "--config", "ci/pyproject.toml")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --config names a file and --isolated says")


# What it changes --------------------------------------------------------------------


def test_the_command_line_comes_before_the_file(run: Run) -> None:
    own('select = ["sync"]\nignore = ["transfers"]\nfail-on = "error"')
    assert run("lint", STORM).code == 0
    assert run("lint", STORM, "--fail-on", "low").code == 0  # still not selected
    assert run("lint", STORM, "--select", "transfers").code == 0  # still error
    done = run("lint", STORM, "--select", "transfers", "--fail-on", "low")
    assert done.code == 1


def test_ignore_on_the_command_line_adds_to_the_file(run: Run) -> None:
    own('ignore = ["small-copy-storm"]')
    assert run("lint", SYNC, "--ignore", "launches").code == 1
    assert run("lint", SYNC, "--ignore", "sync").code == 0
    assert run("lint", STORM, "--ignore", "sync").code == 0


def test_a_file_that_leaves_no_rule_is_an_error(run: Run) -> None:
    own('select = ["busy-poll"]\nignore = ["sync"]')
    done = run("lint", STORM)
    assert done.code == 2
    assert "streamlint.toml leave no rule" in done.err


def test_a_threshold_decides_what_a_rule_finds(run: Run) -> None:
    own("[rules.small-copy-storm]\nmin-copies = 2000\n")
    assert found(run("lint", STORM, "--format", "json").out) == []
    own("[rules.small-copy-storm]\nmin-copies = 300\n")
    assert found(run("lint", STORM, "--format", "json").out) == ["small-copy-storm"]
    own('[rules.small-copy-storm]\nmax-size = "2KiB"\n')
    assert found(run("lint", STORM, "--format", "json").out) == []


def test_report_and_info_take_the_configuration_too(run: Run, folder: Path) -> None:
    own('ignore = ["small-copy-storm"]\n[rules.small-copy-storm]\nmin-copies = 9\n')
    assert run("report", STORM).code == 0
    page = (folder / "report.html").read_text("utf-8")
    assert "one pinned buffer" not in page
    assert run("report", STORM, "--isolated").code == 0
    assert "one pinned buffer" in (folder / "report.html").read_text("utf-8")
    own("[rules.small-copy-storm]\nmin-copies = 0\n")
    assert run("info", STORM).code == 2
    assert run("info", STORM, "--isolated").code == 0


def test_findings_below_the_least_saving_are_counted_only(run: Run) -> None:
    own('min-saving = "1s"')
    done = run("lint", STORM)
    assert done.code == 0
    last = done.out.splitlines()[-1]
    assert last == "0 findings; 1 below min-saving; 37 rules found nothing"
    document = json.loads(run("lint", STORM, "--format", "json").out)
    assert document["traces"][0]["findings"] == []
    assert document["summary"]["below_min_saving"] == 1
    assert run("lint", STORM, "--min-saving", "1us").code == 1
    assert run("lint", STORM, "--min-saving", "99%").code == 0
    assert run("lint", STORM, "--min-saving", "90 %").code == 1
    done = run("lint", STORM, "--min-saving", "lots")
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: --min-saving can't be lots",
        'hint: it is a time such as "1ms", or a part of the judged time such as "0.5%"',
    ]


@pytest.mark.parametrize("rule", ["wait-on-unrecorded-event", "failed-cuda-call"])
def test_no_least_saving_hides_a_fault_of_correctness(run: Run, rule: str) -> None:
    own('min-saving = "100%"')
    done = run("lint", SAMPLES / rule / "bad.sqlite", "--format", "json")
    assert rule in found(done.out)
    assert done.code == 1


def test_source_paths_are_mapped(run: Run) -> None:
    def files() -> set[str]:
        document = json.loads(run("lint", STACKS, "--format", "json").out)
        findings = document["traces"][0]["findings"]
        return {s["file"] for f in findings for s in f["where"]["source"]}

    def prints() -> set[str]:
        document = json.loads(run("lint", STACKS, "--format", "json").out)
        return {f["fingerprint"] for f in document["traces"][0]["findings"]}

    assert "t.py" in files()
    before = prints()
    own('[path-map]\n"t.py" = "src/train.py"\n"t" = "wrong"\n')
    assert "src/train.py" in files()
    assert not any(file.startswith(("t.py", "wrong")) for file in files())
    assert prints() == before


@pytest.mark.parametrize("rule", TUNABLE, ids=[rule.name for rule in TUNABLE])
def test_no_value_of_a_threshold_crashes_a_rule(rule: Rule) -> None:
    with_sample = SAMPLES / rule.name / "bad.sqlite"
    path = with_sample if with_sample.is_file() else SYNC
    least = {"ns": 0, "bytes": 1, "share": 0.0, "factor": 0.001}
    most = {"ns": 2**62 - 1, "bytes": 2**62 - 1, "share": 1.0, "factor": 1e300}
    trace = open_trace(path)
    for values, otherwise in ((least, 1), (most, 2**31 - 1)):
        limits = {t: values.get(t.unit, otherwise) for t in rule.thresholds}
        report = lint(trace, [rule], settings=Settings(limits))
        assert not report.crashed
    trace.close()


# Showing it -------------------------------------------------------------------------


def test_config_show_says_where_each_value_comes_from(run: Run) -> None:
    project(
        '[tool.streamlint]\nfail-on = "high"\nmin-saving = "0.50 %"\n'
        'path-map = {"/build/x" = "."}\n'
        '[tool.streamlint.rules.busy-poll]\nmin-queries = 7\nmax-gap = "0.5ms"\n'
    )
    done = run("config", "show")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "# Configuration: pyproject.toml"
    assert "select = []  # default; []: every rule" in lines
    assert 'fail-on = "high"  # pyproject.toml' in lines
    assert 'min-saving = "0.5%"  # pyproject.toml' in lines
    assert '"/build/x" = "."  # pyproject.toml' in lines
    at = lines.index("[rules.busy-poll]")
    assert (
        "min-queries = 7  # pyproject.toml; default 100; queries in a row"
        in lines[at : at + 8]
    )
    assert 'max-gap = "500us"  # pyproject.toml; default "10us"' in lines[at : at + 8]
    assert run("config", "show", "--isolated").out.startswith("# No configuration file")


def test_what_config_show_prints_is_a_configuration(run: Run, folder: Path) -> None:
    own(
        'ignore = ["l2-cache"]\nmin-saving = "2ms"\n'
        '[path-map]\n"/a \\"b\\\\" = "é\\u0007"\n'
        "[rules.launch-bound-kernels]\nmin-idle-share = 0.123\nmax-pause = 2.5\n"
    )
    text = run("config", "show").out
    shown = folder / "shown.toml"
    shown.write_text(text, "utf-8")
    before, after = load(folder), load(folder, shown)
    assert before.limits.items() <= after.limits.items()
    for rule in all_rules():
        for threshold in rule.thresholds:
            value = after.limits[threshold]
            assert value == before.limits.get(threshold, threshold.default)
    assert (after.ignore, after.min_saving) == (("l2-cache",), before.min_saving)
    assert after.path_map == before.path_map == (('/a "b\\', "é\a"),)
    assert run("config", "show", "--config", "shown.toml").code == 0


def test_every_threshold_is_documented_with_unit_default_and_origin(run: Run) -> None:
    shown = tomllib.loads(run("config", "show").out)["rules"]
    assert set(shown) == {rule.name for rule in TUNABLE}
    for rule in TUNABLE:
        explained = " ".join(run("explain", rule.name).out.split())
        for threshold in rule.thresholds:
            assert re.fullmatch(r"(min|max)(-[a-z]+)+", threshold.name)
            assert shown[rule.name][threshold.name] is not None
            assert threshold.origin.endswith(".")
            default = threshold.text(threshold.default).strip('"')
            amount = f"{default} {threshold.counted}".strip()
            assert f"`{threshold.name}`, {amount}: " in explained
            assert threshold.origin in explained


@pytest.mark.parametrize(
    "page", ["README.md", "docs/configuration.md", "docs/false-positives.md"]
)
def test_examples_in_a_page_are_configurations(run: Run, page: str) -> None:
    text = (SAMPLES.parent / page).read_text("utf-8")
    examples = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        project(example)
        done = run("config", "show")
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith("# Configuration: pyproject.toml")


# What it refuses --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('fail_on = "low"', "there is no key fail_on", "did you mean fail-on?"),
        ("colour = 1", "there is no key colour", "known: "),
        ('fail-on = "severe"', 'fail-on can\'t be "severe"', "it is one of error, "),
        ("fail-on = []", "fail-on can't be a list", "it is one of error, "),
        ("min-saving = 5", "min-saving can't be 5", "it is a time such as "),
        ('min-saving = "101%"', "min-saving can't be ", "it is a time such as "),
        ('select = "sync"', 'select can\'t be "sync"', "it is a list of rules and "),
        ('select = ["snyc"]', "select names snyc, no ", "did you mean sync?"),
        ("ignore = [1]", "ignore can't be 1", "it is a list of rules and "),
        ('rules = "all"', 'rules can\'t be "all"', "it is a table: [rules]"),
        (
            "[rules.busy_poll]",
            "rules names no rule: busy_poll",
            "did you mean busy-poll?",
        ),
        ("[rules]\nbusy-poll = 3", "rules.busy-poll can't be 3", "it is a table: "),
        (
            "[rules.busy-poll]\nmin_query = 3",
            "there is no threshold rules.busy-poll.min_query",
            "did you mean min-queries?",
        ),
        (
            "[rules.failed-cuda-call]\nmin-calls = 3",
            "there is no threshold rules.failed-cuda-call.min-calls",
            "there are none here",
        ),
        (
            "[rules.busy-poll]\nmin-queries = 0",
            "rules.busy-poll.min-queries can't be 0",
            "it is a whole number of queries in a row from 1, such as 100",
        ),
        ("[rules.busy-poll]\nmin-queries = true", "can't be true", "it is a whole"),
        ("[rules.busy-poll]\nmin-queries = 2.5", "can't be 2.5", "it is a whole"),
        ('[rules.busy-poll]\nmax-gap = "9"', 'can\'t be "9"', "it is a time such as "),
        ("[rules.busy-poll]\nmax-gap = -1", "can't be -1", "it is a time such as "),
        (
            "[rules.launch-bound-kernels]\nmin-idle-share = 30",
            "can't be 30",
            'it is a share such as "30%" or 0.3',
        ),
        (
            "[rules.launch-bound-kernels]\nmax-pause = nan",
            "can't be nan",
            "it is a factor above 0, such as 10",
        ),
        ("[path-map]\n'/' = 'x'", 'path-map can\'t be "/"', "it is by folder"),
        ("[path-map]\nsrc = 3", "path-map.src can't be 3", "it is the folder to "),
        ("fail-on = ", "is no valid TOML (Invalid value (at ", "correct that line"),
        ("a = " + "[" * 5000, "is no valid TOML", "correct that line"),
    ],
)
def test_unknown_keys_and_bad_values_are_errors(
    run: Run, text: str, message: str, hint: str
) -> None:
    own(text)
    for args in (("lint", STORM), ("config", "show")):
        done = run(*args)
        assert (done.code, done.out) == (2, "")
        error, advice = done.err.splitlines()
        assert error.startswith("error: streamlint.toml")
        assert message in error
        assert advice.startswith(f"hint: {hint}")


def test_a_file_that_cannot_be_read_is_an_error(run: Run, folder: Path) -> None:
    done = run("lint", STORM, "--config", "no.toml")
    assert done.code == 2
    assert done.err.startswith("error: no.toml can't be read (No such file")
    done = run("lint", STORM, "--config", folder)
    assert done.code == 2
    assert "can't be read (Is a directory)" in done.err
    (folder / "streamlint.toml").write_bytes(b"fail-on = '\xff'")
    done = run("lint", STORM)
    assert done.code == 2
    assert done.err.splitlines()[0] == "error: streamlint.toml isn't UTF-8"
    project('[project]\nname = "streamlint"\n', folder / "other")
    done = run("lint", STORM, "--config", "other/pyproject.toml")
    assert done.code == 2
    assert "has no table tool.streamlint" in done.err
    project("tool.streamlint = 3", folder / "other")
    done = run("lint", STORM, "--config", "other/pyproject.toml")
    assert done.code == 2
    assert "tool.streamlint is no table" in done.err


def test_a_process_finds_the_file_of_its_working_folder(folder: Path) -> None:
    project('[tool.streamlint]\nfail-on = "error"\n')
    below = folder / "below"
    below.mkdir()
    assert process("lint", str(STORM), cwd=below).code == 0
    assert process("lint", str(STORM), "--isolated", cwd=below).code == 1

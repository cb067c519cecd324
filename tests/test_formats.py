"""SARIF, GitHub annotations, Markdown and JUnit XML, as their readers take them."""

from __future__ import annotations

import gzip
import html
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import xmlschema
from commandline import Run
from jsonschema import Draft4Validator
from markdown_it import MarkdownIt
from tracebuilder import TraceBuilder

from streamlint.escape import without_home
from streamlint.registry import all_rules
from streamlint.reporters import github, markdown, sarif
from streamlint.reporters.places import SourceTree
from streamlint.rule import Rule
from streamlint.trace.model import Trace

DATA = Path(__file__).parent / "data"
SAMPLES = Path(__file__).parents[1] / "sample_traces"
BAD = SAMPLES / "extra" / "legacy.sqlite"
MISC = SAMPLES / "extra" / "misc.sqlite"
TORCH = SAMPLES / "extra" / "torchbt.sqlite"
UNASSESSABLE = SAMPLES / "extra" / "2022.4.2_no_cuda_rows.sqlite"
FORMATS = ["sarif", "github", "markdown", "junit"]
HOSTILE = (
    "k[a](b){0}|`*_<img src=x>&@user #12 :smile: "
    "\x1b[31m\r\n::error::x ##[error]y %0A,:\x00\ufffe -->"
)


@pytest.fixture(scope="module")
def sarif_schema() -> Draft4Validator:
    text = (DATA / "sarif-2.1.0-rtm.5.json").read_text(encoding="utf-8")
    return Draft4Validator(json.loads(text))


@pytest.fixture(scope="module")
def junit_schema() -> xmlschema.XMLSchema10:
    return xmlschema.XMLSchema10(DATA / "junit-10.xsd")


def program(
    path: Path,
    *,
    file: str = "/workspace/app/train.py",
    name: str = "step",
    places: int = 1,
) -> Path:
    """Pinned memory made and freed in each iteration, at these places of a file."""
    b = TraceBuilder(process=f"./{name}")
    b.stream(13)
    for i in range(30):
        at = 1000.0 + 2500 * i
        b.kernel(name, stream=13, start=at + 1500, end=at + 2400)
        for place in range(places):
            at += 60
            call = b.call("cudaHostAlloc", at + 10, 30 - place / 2)
            b.call("cudaFreeHost", at + 45, 10)
            b.backtrace(
                call,
                [
                    ("alloc", "/usr/lib/python3.12/site-packages/torch/cuda.py", 3),
                    (f"refill{place}", file, 12 + place),
                    ("<module>", file, 99),
                ],
            )
    return b.write(path)


def log(run: Run, *args: str | Path) -> dict[str, Any]:
    done = run("lint", *args, "--format", "sarif")
    loaded: dict[str, Any] = json.loads(done.out)
    return loaded


def results(document: dict[str, Any], rule: str | None = None) -> list[dict[str, Any]]:
    (one,) = document["runs"]
    return [r for r in one["results"] if rule in (None, r["ruleId"])]


def place(result: dict[str, Any]) -> tuple[str, int]:
    (location,) = result["locations"]
    physical = location["physicalLocation"]
    return physical["artifactLocation"]["uri"], physical["region"]["startLine"]


def crash(trace: Trace) -> list[object]:
    """Breaks."""
    raise ValueError


@pytest.fixture
def broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (Rule("broken", "fakes", crash, (), False), *all_rules())  # type: ignore[arg-type]
    monkeypatch.setattr("streamlint.config.Config.chosen", lambda *_: rules)


# SARIF --------------------------------------------------------------------------------


def test_sarif_is_valid_with_every_kind_of_outcome(
    run: Run, sarif_schema: Draft4Validator, broken_rule: None, tmp_path: Path
) -> None:
    hostile = program(tmp_path / "h.sqlite", name=HOSTILE, file=f"/w/{HOSTILE}.py")
    document = log(run, TORCH, MISC, UNASSESSABLE, hostile, "no.sqlite")
    sarif_schema.validate(document)
    (one,) = document["runs"]
    assert {r["kind"] for r in one["results"]} == {"fail", "open"}
    (told,) = one["invocations"]
    assert told["executionSuccessful"] is False
    names = [note["descriptor"]["id"] for note in told["toolExecutionNotifications"]]
    assert names == ["rule-crashed"] * 3 + ["unreadable-trace"]
    for result in one["results"]:
        rule = one["tool"]["driver"]["rules"][result["ruleIndex"]]
        assert rule["id"] == result["ruleId"]
        assert len(result["locations"]) == 1


def test_sarif_agrees_with_json(run: Run) -> None:
    document = log(run, MISC)
    (trace,) = json.loads(run("lint", MISC, "--format", "json").out)["traces"]
    levels = {"error": "error", "high": "error", "medium": "warning", "low": "warning"}
    failed = [r for r in results(document) if r["kind"] == "fail"]
    assert len(failed) == len(trace["findings"]) > 3
    for result, finding in zip(failed, trace["findings"], strict=True):
        assert result["ruleId"] == finding["rule"]
        assert result["level"] == levels.get(finding["severity"], "note")
        assert set(result["partialFingerprints"].values()) == {finding["fingerprint"]}
        assert result["properties"]["claim"] == finding["cost"]["claim"]
        assert result["properties"]["costNs"] == finding["cost"]["ns"]
        share = finding["cost"]["share"]
        assert result.get("rank", 0) == pytest.approx(100 * (share or 0), abs=1e-3)
        assert finding["message"] in result["message"]["text"]
    opened = [r for r in results(document) if r["kind"] == "open"]
    assert [r["ruleId"] for r in opened] == [n["rule"] for n in trace["not_assessed"]]
    assert {r["level"] for r in opened} <= {"none"}


def test_sarif_rules_explain_themselves(run: Run) -> None:
    (one,) = log(run, BAD)["runs"]
    rules = one["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [rule.name for rule in all_rules()]
    for rule in rules:
        assert run("explain", rule["id"]).out == rule["help"]["markdown"]
        assert "Fix" in rule["help"]["text"]
        assert 0 < len(rule["shortDescription"]["text"]) <= 1024
        assert 0 < len(rule["fullDescription"]["text"]) <= 1024
        assert len(rule["name"]) <= 255
        assert len(rule["properties"]["tags"]) <= 20
        assert "security-severity" not in rule["properties"]


@pytest.mark.parametrize(
    ("file", "path_map", "expected"),
    [
        pytest.param("{here}/src/a b.py", (), ("src/a%20b.py", 12), id="below here"),
        pytest.param("src/train.py", (), ("src/train.py", 12), id="relative"),
        pytest.param("/workspace/app/train.py", (), ("t.sqlite", 1), id="elsewhere"),
        pytest.param(
            "/workspace/app/train.py",
            ("--path-map", "/workspace/app=."),
            ("train.py", 12),
            id="mapped",
        ),
        pytest.param(
            "/workspace/app/train.py",
            ("--path-map=/workspace=old", "--path-map=/workspace/app/=src"),
            ("src/train.py", 12),
            id="the longest that fits",
        ),
        pytest.param(
            "/workspace/application/train.py",
            ("--path-map", "/workspace/app=."),
            ("t.sqlite", 1),
            id="a folder, not a prefix",
        ),
        pytest.param(
            "/home/ann/app/train.py",
            ("--path-map", "/home/ann/app=src"),
            ("src/train.py", 12),
            id="mapped from a home",
        ),
        pytest.param("../../etc/passwd", (), ("t.sqlite", 1), id="out of the tree"),
        pytest.param(
            "C:\\work\\app\\train.py",
            ("--path-map", "C:\\work\\app=src"),
            ("src/train.py", 12),
            id="Windows",
        ),
        pytest.param("<frozen importlib>", (), ("t.sqlite", 1), id="no file"),
    ],
)
def test_sarif_points_at_the_users_own_line(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    path_map: tuple[str, ...],
    expected: tuple[str, int],
) -> None:
    """The innermost line outside libraries, or else the trace."""
    monkeypatch.chdir(tmp_path)
    program(Path("t.sqlite"), file=file.format(here=tmp_path))
    document = log(run, "t.sqlite", *path_map)
    (found,) = results(document, "resource-churn-in-loop")
    assert place(found) == expected


def test_paths_start_at_the_root_of_the_repository(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    program(Path("t.sqlite"), file=f"{tmp_path}/sub/train.py")
    document = log(run, "t.sqlite", "--ignore=resource-churn-in-loop")
    assert {place(r)[0] for r in results(document)} == {"sub/t.sqlite"}
    (found,) = results(log(run, "t.sqlite"), "resource-churn-in-loop")
    assert place(found) == ("sub/train.py", 12)


@pytest.mark.parametrize("root", ["/home/runner/work/app", "/Users/ann/app"])
def test_checkouts_in_a_home_are_recognized(root: str) -> None:
    """Texts of a trace have ~ for a home folder; so must what they are compared to."""
    tree = SourceTree(Path(root))
    assert tree.relative(without_home(f"{root}/src/train.py")) == "src/train.py"
    assert tree.relative(without_home("/home/runner/else/train.py")) is None
    assert tree.trace(Path(f"{root}/t.sqlite")) == "t.sqlite"


def test_sarif_keeps_the_costliest_results(
    run: Run, monkeypatch: pytest.MonkeyPatch, sarif_schema: Draft4Validator
) -> None:
    assert (sarif.MAX_RESULTS, sarif.MAX_GZIP_BYTES) == (25_000, 10_000_000)
    whole = results(log(run, MISC, TORCH))
    monkeypatch.setattr(sarif, "MAX_RESULTS", 4)
    document = log(run, MISC, TORCH)
    sarif_schema.validate(document)
    assert results(document) == whole[:4]
    (one,) = document["runs"]
    assert one["properties"]["leftOut"] == len(whole) - 4
    (note,) = one["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"].startswith(f"{len(whole) - 4} results are left out")


def test_sarif_fits_into_githubs_size(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = run("lint", MISC, TORCH, "--format", "sarif").out
    whole, limit = results(json.loads(text)), len(gzip.compress(text.encode())) - 500
    monkeypatch.setattr(sarif, "MAX_GZIP_BYTES", limit)
    document = run("lint", MISC, TORCH, "--format", "sarif").out
    kept = results(json.loads(document))
    assert len(gzip.compress(document.encode())) <= limit
    assert 0 < len(kept) < len(whole)
    assert kept == whole[: len(kept)]


def test_sarif_text_is_no_link_or_placeholder(run: Run, tmp_path: Path) -> None:
    trace = program(tmp_path / "h.sqlite", name=HOSTILE)
    (found,) = results(log(run, trace), "resource-churn-in-loop")
    text = found["message"]["text"]
    assert "\\[a](b)" in text
    assert "{{0}" in text


def test_what_is_allowed_is_told_and_does_not_fail(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sarif_schema: Draft4Validator,
    junit_schema: xmlschema.XMLSchema10,
) -> None:
    monkeypatch.chdir(tmp_path)
    rule, reason = "legacy-null-stream-barrier", "the | barrier is <meant>"
    (tmp_path / "streamlint.toml").write_text(
        f'[[allow]]\nrule = "{rule}"\nreason = "{reason}"\n'
    )
    document = log(run, BAD)
    sarif_schema.validate(document)
    (result,) = results(document, rule)
    (suppression,) = result["suppressions"]
    assert (suppression["kind"], suppression["status"]) == ("external", "accepted")
    assert suppression["justification"].startswith(reason)
    done = run("lint", BAD, "--format=junit")
    assert done.code == 0
    junit_schema.validate(done.out)
    (case,) = ET.fromstring(done.out).iterfind(f".//testcase[@name='{rule}']")
    assert case.find("failure") is None
    assert reason in case.findtext("system-out", "")
    page = shown(run("lint", BAD, "--format=markdown").out)
    assert reason in page.text
    assert page.tags <= OWN_TAGS
    (annotation,) = commands(run("lint", BAD, "--format=github").out)
    assert annotation[1]["title"] == "streamlint: 4 not assessed"


# GitHub -------------------------------------------------------------------------------


def commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Level, properties and message of each command, as GitHub's runner reads them."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line)
        if match is None:
            assert "::" not in line
            assert "##[" not in line
            continue
        pairs = (pair.partition("=") for pair in match[2].split(","))
        properties = {k: _unescaped(v) for k, _, v in pairs}
        found.append((match[1], properties, _unescaped(match[3])))
    return found


def _unescaped(text: str) -> str:
    for code, character in (("%2C", ","), ("%3A", ":"), ("%0A", "\n"), ("%25", "%")):
        text = text.replace(code, character)
    return text


def test_github_annotates_lines_of_the_repository(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program(Path("t.sqlite"), file="/workspace/app/a,b:c%.py")
    done = run(
        "lint", "t.sqlite", "--format=github", "--path-map=/workspace/app=src", MISC
    )
    found = commands(done.out)
    (churn,) = [c for c in found if c[1].get("file")]
    level, properties, text = churn
    assert (level, properties["file"], properties["line"]) == (
        "warning",
        "src/a,b:c%.py",
        "12",
    )
    assert properties["title"].startswith("streamlint: resource-churn-in-loop (")
    assert "\nfix: " in text
    order = [level for level, _, _ in found]
    assert order == sorted(order, key=["error", "warning", "notice"].index)


def test_github_shows_no_more_than_it_can(run: Run, tmp_path: Path) -> None:
    trace = program(tmp_path / "t.sqlite", places=14)
    done = run("lint", trace, "--format=github", "--select=resource-churn-in-loop")
    levels = [level for level, _, _ in commands(done.out)]
    (level,) = set(levels)
    assert len(levels) == github.MAX_PER_LEVEL
    rest = [x for x in done.out.splitlines() if x.startswith(f"{level}: streamlint")]
    assert len(rest) == 4
    assert done.out.splitlines()[-1].startswith("streamlint: 14 findings")


def test_names_give_github_no_commands(run: Run, tmp_path: Path) -> None:
    trace = program(tmp_path / "h.sqlite", name=HOSTILE, places=12)
    found = commands(run("lint", trace, "--format=github", "no.sqlite").out)
    assert {level for level, _, _ in found} <= {"error", "warning", "notice"}
    assert all(p["title"].startswith("streamlint: ") for _, p, _ in found)
    assert found[0][1]["title"] == "streamlint: trace not read"


def test_github_tells_what_crashed(run: Run, broken_rule: None) -> None:
    first = commands(run("lint", BAD, "--format=github").out)[0]
    assert first[0] == "error"
    assert first[1]["title"] == "streamlint: broken crashed"


# Markdown -----------------------------------------------------------------------------


class Seen(HTMLParser):
    """Tags of a page, and the text of its table cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self._in_cell = False
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "td":
            self._in_cell = True
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell &= tag != "td"

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self.cells[-1] += data


OWN_TAGS = {
    *("h3", "p", "strong", "code", "ul", "li", "details", "summary"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}


def shown(text: str) -> Seen:
    """What a reader sees of Markdown with tables and HTML, as on GitHub."""
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    return Seen(reader.render(text))


def test_markdown_shows_findings_and_what_was_not_assessed(run: Run) -> None:
    done = run("lint", TORCH, MISC, "--format=markdown")
    assert done.code == 1
    assert done.out.startswith(f"{markdown.MARK}\n### streamlint: ")
    page = shown(done.out)
    assert page.tags == OWN_TAGS
    documents = json.loads(run("lint", TORCH, MISC, "--format=json").out)["traces"]
    findings = [f for trace in documents for f in trace["findings"]]
    rows = [page.cells[i : i + 5] for i in range(0, len(page.cells), 5)]
    assert [row[:3] for row in rows] == [
        [f["severity"], f["rule"], f["message"]] for f in findings
    ]
    assert rows[1][3:] == ["at most 40.5 ms (9.2 %)", "t.py:16"]
    for trace in documents:
        for finding in trace["findings"]:
            # What costs too little to act on comes without advice.
            assert (finding["fix"] in page.text) == (finding["severity"] != "info")
        for unable in trace["not_assessed"]:
            assert unable["reason"] in page.text
            assert unable["recapture"] in page.text


def test_names_give_markdown_no_markup(run: Run, tmp_path: Path) -> None:
    trace = program(tmp_path / "h.sqlite", name=HOSTILE)
    out = run("lint", trace, "--format=markdown", "no.sqlite").out
    page = shown(out)
    assert page.tags <= OWN_TAGS
    assert "<img src=x>&" in page.text
    assert "[a](b){0}|`*_" in page.text
    # What GitHub makes of text after that: mentions, references, emoji.
    apart = html.unescape(re.sub(r"<!--.*?-->", "\0", out))
    assert "@user" not in apart
    assert "#12" not in apart
    assert ":smile:" not in apart


def test_markdown_fits_into_a_comment(run: Run, tmp_path: Path) -> None:
    trace = program(tmp_path / "t.sqlite", places=40)
    rule = "--select=resource-churn-in-loop"
    whole = run("lint", trace, "--format=markdown", rule).out
    assert len(whole) < 65_536
    many = [trace] * 6
    cut = run("lint", *many, "--format=markdown", rule).out
    assert len(cut) < 65_536
    assert "more findings, which cost less" in cut
    assert shown(cut).tags <= OWN_TAGS


def test_a_comment_on_too_many_traces_keeps_the_total(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(markdown, "MAX_CHARACTERS", 300)
    out = run("lint", MISC, "--format=markdown").out
    assert len(out) <= 300
    assert re.search(r"streamlint: \d+ findings", out)


# JUnit --------------------------------------------------------------------------------


def test_junit_is_valid_with_every_kind_of_outcome(
    run: Run, junit_schema: xmlschema.XMLSchema10, broken_rule: None, tmp_path: Path
) -> None:
    hostile = program(tmp_path / "h.sqlite", name=HOSTILE)
    out = run("lint", MISC, UNASSESSABLE, hostile, "no.sqlite", "--format=junit").out
    junit_schema.validate(out)
    root = ET.fromstring(out)
    suites = root.findall("testsuite")
    assert len(suites) == 4
    for suite in suites[:3]:
        assert suite.get("tests") == str(len(suite)) == str(len(all_rules()) + 1)
        (broken,) = suite.findall("testcase[@name='broken']")
        judged = suite is not suites[1]
        assert (broken.find("error") is not None) == judged
        assert suite.get("errors") == str(int(judged))
    assert int(suites[1].get("skipped", "0")) > len(all_rules()) - 4
    (unread,) = suites[3].findall("testcase/error")
    assert unread.get("message", "").startswith("no.sqlite")


@pytest.mark.parametrize("fail_on", ["low", "high", "info"])
def test_junit_fails_where_the_command_fails(run: Run, fail_on: str) -> None:
    done = run("lint", MISC, "--format=junit", "--fail-on", fail_on)
    (trace,) = json.loads(run("lint", MISC, "--format=json").out)["traces"]
    severities = ["error", "high", "medium", "low", "info"]
    failing = severities[: severities.index(fail_on) + 1]
    rules = {f["rule"] for f in trace["findings"] if f["severity"] in failing}
    root = ET.fromstring(done.out)
    failed = {
        c.get("name") for c in root.iter("testcase") if c.find("failure") is not None
    }
    skipped = {
        c.get("name") for c in root.iter("testcase") if c.find("skipped") is not None
    }
    assert failed == rules
    assert skipped == {n["rule"] for n in trace["not_assessed"]}
    assert root.get("failures") == str(len(rules))
    assert done.code == (1 if rules else 0)


# Several at once ----------------------------------------------------------------------


def test_one_lint_writes_several_formats(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from streamlint import engine

    judged: list[str] = []
    original = engine.lint

    def counted(trace: Trace, *args: Any, **more: Any) -> engine.Report:
        judged.append(trace.path.name)
        return original(trace, *args, **more)

    alone = {form: run("lint", MISC, "--format", form).out for form in FORMATS}
    monkeypatch.setattr("streamlint.engine.lint", counted)
    files = {form: tmp_path / f"out.{form}" for form in FORMATS}
    done = run("lint", MISC, *(f"--output={form}={f}" for form, f in files.items()))
    assert judged == ["misc.sqlite"]
    assert done.out == run("lint", MISC).out
    assert {form: f.read_text("utf-8") for form, f in files.items()} == alone


def test_a_plain_output_file_takes_the_place_of_stdout(
    run: Run, tmp_path: Path
) -> None:
    text, listed = tmp_path / "x=y.txt", tmp_path / "c.sarif"
    done = run("lint", BAD, "-o", text, "-o", f"sarif={listed}")
    assert done.out == ""
    assert "legacy-null-stream-barrier" in text.read_text("utf-8")
    assert json.loads(listed.read_text("utf-8"))["version"] == "2.1.0"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "a", "-o", "b"], "names two files"),
        (["-o", "sarif=a", "-o", "junit=a"], "twice"),
        (["-o", "sarif=t.sqlite"], "names a trace"),
        (["-o", "sarif=no/such/folder/a"], "can't be written"),
        (["--path-map", "/app"], "is not FROM=TO"),
    ],
)
def test_bad_options_are_told(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("lint", BAD, *args)
    assert done.code == 2
    assert message in done.err
    assert done.err.splitlines()[-1].startswith("hint: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("form", FORMATS)
def test_a_trace_that_cannot_be_read_is_in_the_file(
    run: Run, tmp_path: Path, form: str
) -> None:
    done = run("lint", "no.sqlite", "-o", f"{form}={tmp_path / 'out'}")
    assert done.code == 2
    assert "no.sqlite" in (tmp_path / "out").read_text("utf-8")

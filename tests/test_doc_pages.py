"""What pages of the documentation show is true: commands, fields, limits."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from commandline import Run

from streamlint.registry import GROUP
from streamlint.reporters import diff, sarif
from streamlint.reporters import json as json_reporter

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "sample_traces"
sys.path.insert(0, str(ROOT / "docs"))

import console  # noqa: E402
import marked  # noqa: E402
import schema_tables  # noqa: E402


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8")


# Commands ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", console.PAGES)
def test_commands_print_what_the_page_shows(name: str) -> None:
    """Renewed by: .venv/bin/python docs/console.py"""
    text = page(name)
    # A short path, for lines that hold it break where they are too long.
    with tempfile.TemporaryDirectory() as folder:
        for block in console.steps(text, console.checkout(Path(folder))):
            for step in block:
                assert step.true, f"$ {step.command}\n{step.printed}\n\n{step.shown}"
    assert text.count("\n$ ") > text.count("```console") > 3


def test_code_in_the_page_about_rules_is_what_new_rule_writes(
    run: Run, tmp_path: Path
) -> None:
    name = "small-memset-storm"
    assert run("new-rule", name, "--rules-dir", tmp_path).code == 0
    written = "".join(path.read_text("utf-8") for path in tmp_path.glob("*.py"))
    text = page("writing-rules.md")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) > 5
    assert [block for block in blocks if block not in written] == []
    (package,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    assert tomllib.loads(package)["project"]["entry-points"] == {
        GROUP: {"acme": "acme_rules"}
    }


def test_another_output_is_not_true() -> None:
    step = console.Step("c", "a\n...\nb\n3 rules found nothing\n", "")
    assert step._replace(printed="a\nx\ny\nb\n4 rules found nothing\n").true
    assert step._replace(printed="a\nb\n3 rules found nothing\n").true
    for wrong in ("a\nx\n3 rules found nothing\n", "a\nb\n3 rules found", ""):
        assert not step._replace(printed=wrong).true


def test_pages_are_renewed_with_what_is_printed(tmp_path: Path) -> None:
    fails = "```console\n$ false\n$ echo $?\n1\n```\n"
    page = "x\n```console\n$ echo 1\n{}```\ny\n" + fails
    assert console.renewed(page.format(""), tmp_path) == page.format("1\n")


def test_the_tutorial_tells_what_was_measured() -> None:
    folder = SAMPLES / "pageable-async-copy" / "torch"
    facts = json.loads((folder / "provenance.json").read_text("utf-8"))
    bad, fixed = (facts[f"{v}.sqlite"]["region_us"]["plain"] for v in ("bad", "fixed"))
    told = (
        f"{bad['median'] / 1e3:.1f} ms\nbefore and {fixed['median'] / 1e3:.1f} ms after"
    )
    assert f"{told}, medians of {bad['runs']} runs" in page("tutorial.md")


# JSON -------------------------------------------------------------------------------


def test_tables_of_json_are_those_of_the_schemas() -> None:
    """Renewed by: .venv/bin/python docs/schema_tables.py"""
    text = page("json.md")
    for name, table in schema_tables.tables().items():
        assert marked.part(text, name) == table


@pytest.mark.parametrize("schema", [json_reporter.schema(), diff.schema()])
def test_every_field_says_what_it_means(schema: dict[str, Any]) -> None:
    parts = [schema, *schema["$defs"].values()]
    parts = [part.get("oneOf", [part])[-1] for part in parts]
    fields = [field for part in parts for field in schema_tables.fields(part, "")]
    assert len(fields) > 30
    assert [name for name, _, words in fields if not words] == []


def test_the_example_of_json_runs(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = SAMPLES / "busy-poll" / "bad.sqlite"
    assert run("lint", trace, "--format", "json", "--output", "report.json").code == 1
    (code,) = re.findall(r"```python\n(.*?)```", page("json.md"), re.DOTALL)
    exec(compile(code, "json.md", "exec"), {})
    assert " busy-poll 15" in capsys.readouterr().out


# SARIF ------------------------------------------------------------------------------


def test_sarif_has_what_the_page_names_and_no_more(run: Run, tmp_path: Path) -> None:
    text = page("sarif.md")
    trace = SAMPLES / "pageable-async-copy" / "torch" / "bad.sqlite"
    (tmp_path / "streamlint.toml").write_text(
        '[[allow]]\nrule = "capture-not-evaluable"\nreason = "a test"\n'
    )
    known = tmp_path / "known.json"
    options = ("--config", tmp_path / "streamlint.toml")
    assert run("lint", trace, "--write-baseline", known, *options).code == 0
    unknown = SAMPLES / "extra" / "apis_def.sqlite"
    done = run(
        *("lint", trace, unknown, "none.sqlite", "--format", "sarif", *options),
        *("--baseline", known),
    )
    (one,) = json.loads(done.out)["runs"]
    kinds = {result["kind"] for result in one["results"]}
    assert kinds == set(
        re.findall(r"^\| [a-z ]+ \| `(\w+)` \|.*\|.*\|$", text, re.MULTILINE)
    )
    used = {key for result in one["results"] for key in result} - {"kind", "level"}
    used = {"message.text" if key == "message" else key for key in used}
    assert used == named(text, "of a result")
    properties = [result.get("properties", {}) for result in one["results"]]
    inner = {key for found in properties for key in found}
    assert inner == named(text, "of `properties`")
    for rule in one["tool"]["driver"]["rules"]:
        assert {"shortDescription", "fullDescription", "help"} <= rule.keys()
        assert rule["properties"].keys() == {"tags", "origin"}
        assert rule["properties"]["tags"][:2] == ["performance", "cuda"]


def named(text: str, head: str) -> set[str]:
    """What stands in the first column of the table with this head."""
    table = text[text.index(f"| {head} | ") :].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    return set(re.findall(r"`([\w.]+)`", " ".join(rows)))


def test_levels_and_limits_are_those_of_sarif() -> None:
    text = page("sarif.md")
    for severity, level in sarif._LEVELS.items():
        assert re.search(
            rf"^\|.*`{severity.value}`.*\| `{level}` \|$", text, re.MULTILINE
        )
    for limit in (
        f"| results | {sarif.MAX_RESULTS:,}:",
        f"| {sarif.MAX_GZIP_BYTES // 1_000_000} MB |",
        f"| locations of a result | {sarif.MAX_LOCATIONS} beside the first |",
        f"| tags of a rule | {sarif.MAX_TAGS} |",
        f"| description of a rule | {sarif.MAX_DESCRIPTION:,} characters |",
        f"| message | {sarif._MAX_TEXT:,} characters |",
    ):
        assert limit in text

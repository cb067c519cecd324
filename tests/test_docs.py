"""The documentation agrees with the code: one source, no stale path, a true picture."""

from __future__ import annotations

import html
import inspect
import re
import shlex
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import typer

from streamlint import cli, docs
from streamlint.registry import all_rules
from streamlint.rule import SECTIONS, Check, Outcome, Rule, sections
from streamlint.trace.model import Trace

ROOT = Path(__file__).parents[1]
RULES = all_rules()
NAMES = [rule.name for rule in RULES]
PAGES = ("README.md", "CONTRIBUTING.md", "sample_traces/README.md")


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


# Rules ------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_function_module_and_rule_have_one_name(rule: Rule) -> None:
    file = Path(inspect.getsourcefile(rule.check) or "")
    name = rule.name.replace("-", "_")
    assert rule.check.__name__ == name
    assert rule.check.__module__.endswith(f".{rule.family.replace('-', '_')}.{name}")
    assert file.stem == name
    assert file.parent.name == rule.family.replace("-", "_")
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.name)


def test_no_two_rules_or_families_share_a_name() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert not set(NAMES) & {rule.family for rule in RULES}


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_docstring_has_all_sections_in_order(rule: Rule) -> None:
    found = sections(rule)
    assert tuple(found) == SECTIONS
    assert all(found.values())
    assert rule.summary.endswith(".")
    assert len(rule.summary) <= 88
    assert (sys.modules[rule.check.__module__].__doc__ or "").strip()


def check(trace: Trace) -> Outcome:
    """Looks at nothing."""
    return []


@pytest.mark.parametrize(
    "wrong",
    [
        "Says nothing more.",
        "Swapped.\n\nEvidence\n    b\nWhat it does\n    a\n",
        "Unknown.\n\n" + "".join(f"{s}\n    x\n" for s in (*SECTIONS, "Notes")),
    ],
)
def test_a_docstring_without_its_sections_is_refused(wrong: str) -> None:
    def documented(trace: Trace) -> Outcome:
        return []

    documented.__doc__ = wrong
    made: Check = documented
    with pytest.raises(ValueError, match="fake documents"):
        sections(Rule("fake", "fakes", made, (), False))


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_page_of_a_rule_is_up_to_date(rule: Rule) -> None:
    page = ROOT / "docs" / "rules" / f"{rule.name}.md"
    assert page.exists(), "run: .venv/bin/python -m streamlint.docs"
    assert page.read_text("utf-8") == docs.page(rule)


def test_index_is_up_to_date_and_no_page_is_left_over() -> None:
    pages = docs.pages(RULES)
    found = {path.name for path in (ROOT / "docs" / "rules").iterdir()}
    assert found == set(pages)
    assert text("docs/rules/README.md") == pages["README.md"]


def test_writing_pages_removes_those_of_rules_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "old-rule.md").write_text("# old-rule\n")
    (tmp_path / "notes.txt").write_text("mine\n")
    docs.write(tmp_path)
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {*docs.pages(RULES), "notes.txt"}


def test_a_page_breaks_no_word_at_its_hyphens() -> None:
    for page in docs.pages(RULES).values():
        assert not re.search(r"\w-$", page, re.MULTILINE)


# README and CONTRIBUTING ------------------------------------------------------------


def commands(page: str) -> list[list[str]]:
    """The indented lines of a page, which are commands, as words."""
    lines = re.findall(r"^(?: {4}| {7})(\S.*)$", text(page), re.MULTILINE)
    return [shlex.split(line) for line in lines]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", text("Makefile"), re.MULTILINE))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_commands_in_a_page_exist(page: str) -> None:
    known = typer.main.get_command(cli.app)
    subcommands = getattr(known, "commands", {})
    seen: Counter[str] = Counter()
    for words in commands(page):
        program = words[0].removeprefix(".venv/bin/")
        seen[program] += 1
        if program == "make":
            assert words[1] in make_targets()
        elif program == "streamlint":
            options = {o for p in subcommands[words[1]].params for o in p.opts}
            assert {w for w in words[2:] if w.startswith("--")} <= options
        else:
            assert program in {"nsys", "python", "cp", "mkdir"}
    assert seen["make"]
    assert seen["streamlint"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.stem
)
def test_options_in_the_documentation_exist(path: Path) -> None:
    content = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
    shown = re.findall(r"^ {4}(streamlint [a-z].*)$", content, re.MULTILINE)
    shown += re.findall(r"`(streamlint [a-z][^`]*)`", content)
    subcommands = getattr(typer.main.get_command(cli.app), "commands", {})
    for line in shown:
        words = line.split("#")[0].split()
        options = {o for p in subcommands[words[1]].params for o in p.opts}
        options |= {o for p in subcommands[words[1]].params for o in p.secondary_opts}
        if words[1] not in ("harness", "config"):  # have commands of their own
            assert {w.split("=")[0] for w in words if w[:2] == "--"} <= options, line


def test_readme_gives_both_make_commands() -> None:
    assert ["make", "demo"] in commands("README.md")
    assert ["make", "test"] in commands("README.md")
    assert {"demo", "test"} <= make_targets()


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_a_page_exist(page: str) -> None:
    content = text(page)
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#]+)\)", content)
    for link in links:
        if not link.startswith("https://"):
            assert (folder / link).exists(), link
    spans = re.findall(r"`([^`\n]+)`", content)
    words = [word for span in spans for word in span.split()]
    words += [word for line in commands(page) for word in line]
    tops = {path.name for path in ROOT.iterdir()} - {".venv", ".git"}
    named = [
        word
        for word in words
        if word.partition("/")[0] in tops and not re.search(r"[<*]|:$", word)
    ]
    assert [word for word in named if not (ROOT / word).exists()] == []


def test_readme_tells_every_exit_code() -> None:
    codes = re.findall(r"^\| (\d) \|", text("README.md"), re.MULTILINE)
    assert [int(code) for code in codes] == [
        cli.EXIT_CLEAN,
        cli.EXIT_FINDINGS,
        cli.EXIT_ERROR,
        cli.EXIT_NOT_ASSESSED,
    ]


def test_screenshot_is_the_true_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Renewed by: .venv/bin/python docs/screenshot.py"""
    trace = "sample_traces/legacy-null-stream-barrier/bad.sqlite"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["streamlint", "lint", trace])
    with pytest.raises(SystemExit):
        cli.main()
    shown = f"$ streamlint lint {trace}\n" + capsys.readouterr().out

    parts: dict[int, list[str]] = defaultdict(list)
    for number, part in re.findall(
        r'clip-path="url\(#lint-line-(\d+)\)">([^<]*)<',
        text("docs/screenshot-lint.svg"),
    ):
        parts[int(number)].append(html.unescape(part))
    drawn = "\n".join("".join(parts[n]) for n in range(max(parts) + 1))
    # A new rule need not renew the picture.
    counted = re.compile(r"\d+\srules\sfound\snothing")
    assert counted.sub("", drawn).split() == counted.sub("", shown).split()
    assert "docs/screenshot-lint.svg" in text("README.md")

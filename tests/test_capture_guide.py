"""The tables of docs/capture.md are what the rules say today.

Renewed by: .venv/bin/python docs/capture_tables.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from streamlint.registry import all_rules
from streamlint.rule import Rule
from streamlint.trace.tables import TABLES

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import capture_tables  # noqa: E402
import marked  # noqa: E402

PAGE = capture_tables.PAGE.read_text("utf-8")
TABLE = marked.part(PAGE, "rules")
RULES = all_rules()


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_a_rule_says_what_the_guide_says_of_it(rule: Rule) -> None:
    row = capture_tables.row(rule)
    assert capture_tables.line(row) in TABLE.splitlines()
    asked = re.findall(rf"^- [^*]*\b{rule.name}\b[^*]*: \*(.*)\*$", TABLE, re.MULTILINE)
    assert sorted(asked) == sorted(row.recaptures)


def test_the_guide_has_every_rule_once_and_no_other() -> None:
    named = re.findall(r"^\| \[([\w-]+)\]", TABLE, re.MULTILINE)
    assert named == [rule.name for rule in RULES]
    needed = {TABLES[name].recorded_by for rule in RULES for name in rule.needs}
    assert needed == {"-t cuda"}
    assert "What a rule can't do without is recorded by `-t cuda`." in TABLE


def test_overheads_are_those_of_the_samples() -> None:
    table = marked.part(PAGE, "overhead")
    assert table == capture_tables.overhead_table()
    assert len(capture_tables.overheads()) == 86

"""Finds the rules: every module below `streamlint.rules` is one."""

from __future__ import annotations

import copyreg
import importlib
import pkgutil
from functools import cache
from typing import Any

import streamlint.rules
from streamlint.errors import UsageError
from streamlint.rule import Rule
from streamlint.settings import Threshold


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, sorted by family and name."""
    rules: list[Rule] = []
    for info in pkgutil.walk_packages(
        streamlint.rules.__path__, prefix=f"{streamlint.rules.__name__}."
    ):
        if info.ispkg:
            continue
        module = importlib.import_module(info.name)
        found = getattr(module, info.name.rpartition(".")[2], None)
        if not isinstance(found, Rule):
            raise TypeError(f"{info.name} does not define its rule")
        rules.append(found)
    return tuple(sorted(rules, key=lambda rule: (rule.family, rule.name)))


def select(chosen: list[str], ignored: list[str]) -> tuple[Rule, ...]:
    """Rules named by ``chosen`` (all if empty) less ``ignored``.

    Names are rules or families. Raises `UsageError` for one that is neither.
    """
    rules = all_rules()
    known = {rule.name for rule in rules} | {rule.family for rule in rules}
    for name in (*chosen, *ignored):
        if name not in known:
            raise UsageError(f"no rule or family is called {name}", hint=near(name))
    return tuple(
        rule
        for rule in rules
        if (not chosen or {rule.name, rule.family} & set(chosen))
        and not {rule.name, rule.family} & set(ignored)
    )


def find(name: str) -> Rule:
    """The rule of that name; raises `UsageError`."""
    for rule in all_rules():
        if rule.name == name:
            return rule
    raise UsageError(f"no rule is called {name}", hint=near(name))


def near(name: str) -> str:
    """A hint for a name that is no rule or family."""
    import difflib

    names = [rule.name for rule in all_rules()]
    names += sorted({rule.family for rule in all_rules()})
    close = difflib.get_close_matches(name.replace("_", "-"), names, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return "`streamlint rules` lists them all"


def _threshold(rule: str, name: str) -> Threshold[Any]:
    return next(t for t in find(rule).thresholds if t.name == name)


def _reduced_rule(rule: Rule) -> tuple[Any, ...]:
    return find, (rule.name,)


def _reduced_threshold(threshold: Threshold[Any]) -> tuple[Any, ...]:
    owner = next(r for r in all_rules() if threshold in r.thresholds)
    return _threshold, (owner.name, threshold.name)


# Between processes rules and thresholds go by name: each is one object in each.
copyreg.pickle(Rule, _reduced_rule)
copyreg.pickle(Threshold, _reduced_threshold)

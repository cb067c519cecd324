"""Finds the rules: those in `streamlint.rules`, of installed packages, and loose files.

All three have one form: a module that defines the rule of its own name, in a folder
named after the family.
"""

from __future__ import annotations

import copyreg
import importlib
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlint.rules
from streamlint.errors import RuleError, UsageError
from streamlint.escape import without_home
from streamlint.rule import Rule, sections
from streamlint.settings import Threshold

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "streamlint.rules"
"""The entry points of packages that bring rules."""
LOOSE_FAMILY = "local"
"""The family of loose files that are in no folder of a family."""
_others: list[Rule] = []
"""Rules that were loaded and aren't streamlint's."""
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class Broken(NamedTuple):
    """Rules that can't be used: from where, why, and what a user may call them."""

    origin: str
    reason: str
    names: tuple[str, ...]


class Catalog(NamedTuple):
    """The rules at hand, sorted by family and name, and those that can't be used."""

    rules: tuple[Rule, ...]
    broken: tuple[Broken, ...] = ()

    @property
    def names(self) -> set[str]:
        """Names of all rules and families."""
        return {n for rule in self.rules for n in (rule.name, rule.family)}

    @property
    def hidden(self) -> set[str]:
        """What rules that can't be used may be called."""
        return {name for broken in self.broken for name in broken.names}

    def select(
        self, chosen: Sequence[str] = (), ignored: Sequence[str] = ()
    ) -> tuple[Rule, ...]:
        """Rules named by ``chosen`` (all if empty) less ``ignored``.

        Names are rules or families. Raises `UsageError` for one that is neither,
        `RuleError` where a rule that is named can't be used.
        """
        for broken in self.broken:
            if {*broken.names} & ({*chosen} - {*ignored}):
                raise RuleError(
                    f"{broken.origin} can't be used: {broken.reason}",
                    hint="correct it, or don't select it",
                )
        for name in (*chosen, *ignored):
            if name not in self.names | self.hidden:
                raise UsageError(
                    f"no rule or family is called {name}", hint=self.near(name)
                )
        return tuple(
            rule
            for rule in self.rules
            if (not chosen or {rule.name, rule.family} & set(chosen))
            and not {rule.name, rule.family} & set(ignored)
        )

    def find(self, name: str) -> Rule:
        """The rule of that name; raises `UsageError`, or `RuleError` if it's broken."""
        for rule in self.rules:
            if rule.name == name:
                return rule
        if name in self.hidden:
            self.select([name])
        raise UsageError(f"no rule is called {name}", hint=self.near(name))

    def near(self, name: str) -> str:
        """A hint for a name that is no rule or family."""
        import difflib

        names = [*[rule.name for rule in self.rules], *sorted(self.names)]
        close = difflib.get_close_matches(name.replace("_", "-"), names, n=1)
        if close:
            return f"did you mean {close[0]}?"
        return "`streamlint rules` lists them all"


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule that streamlint brings, sorted by family and name."""
    package = streamlint.rules
    found = [_rule_of(importlib.import_module(name)) for name in _modules(package)]
    return _sorted(found)


@cache
def catalog(folders: tuple[Path, ...] = ()) -> Catalog:
    """All rules: streamlint's, those of installed packages, and loose ones.

    Modules in ``folders`` and those that packages name are run. Raises `RuleError`
    where two rules have one name, or a folder is missing.
    """
    loose = [one for path in dict.fromkeys(folders) for one in _loose(path)]
    both = (*_installed(), *loose)
    found = [*all_rules(), *(one for one in both if isinstance(one, Rule))]
    known: dict[str, Rule] = {}
    families = {rule.family: rule for rule in reversed(found)}
    for rule in found:
        other = known.setdefault(rule.name, rule)
        if other is not rule:
            raise RuleError(
                f"{other.origin} and {rule.origin} both have a rule {rule.name}",
                hint="rename one of them",
            )
        if rule.name in families:
            raise RuleError(
                f"{families[rule.name].origin} has a family and {rule.origin} a rule "
                f"{rule.name}",
                hint="rename one of them",
            )
    broken = tuple(one for one in both if isinstance(one, Broken))
    return Catalog(_sorted(found), broken)


def select(chosen: Sequence[str], ignored: Sequence[str]) -> tuple[Rule, ...]:
    """`Catalog.select` without loose files."""
    return catalog().select(chosen, ignored)


def find(name: str) -> Rule:
    """`Catalog.find` without loose files."""
    return catalog().find(name)


def _sorted(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(sorted(rules, key=lambda rule: (rule.family, rule.name)))


def _modules(package: ModuleType) -> list[str]:
    """Names of all modules below a package, or of the module that is none."""
    if not hasattr(package, "__path__"):
        return [package.__name__]
    prefix = f"{package.__name__}."

    def failed(name: str) -> None:
        names.append(name)  # is imported once more, for its error

    names: list[str] = []
    for info in pkgutil.walk_packages(package.__path__, prefix, onerror=failed):
        if not info.ispkg:
            names.append(info.name)
    return names


def _rule_of(module: ModuleType) -> Rule:
    name = module.__name__.rpartition(".")[2]
    found = getattr(module, name, None)
    if not isinstance(found, Rule):
        raise TypeError(f"{name} is not defined as a rule: decorate a function with it")
    return found


def _used(module: ModuleType, origin: str, folder: Path | None = None) -> Rule:
    """The rule of a module that isn't streamlint's; raises ValueError or TypeError."""
    found = _rule_of(module)
    if not found.family:
        raise ValueError("its module is in no package, whose name is the family")
    for name in (found.name, found.family):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name} is no name: a-z, 0-9 and underscores")
    sections(found)
    used = found._replace(origin=origin, folder=folder)
    _others.append(used)
    return used


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return without_home(f"{type(error).__name__}: {text}" if text else repr(error))


# Installed packages -----------------------------------------------------------------


@cache
def _installed() -> tuple[Rule | Broken, ...]:
    if not _may_be_installed():
        return ()
    from importlib.metadata import entry_points

    entries = sorted(entry_points(group=GROUP), key=lambda e: (e.name, e.value))
    return tuple(found for entry in entries for found in _of_entry(entry))


def _may_be_installed() -> bool:
    """Whether any installed package may name `GROUP`; half as dear as asking for real.

    That is certain only of plain folders; where anything else is imported from, True.
    """
    for finder in sys.meta_path:
        if finder is not PathFinder and hasattr(finder, "find_distributions"):
            return True
    for folder in sys.path:
        try:
            with os.scandir(folder or ".") as entries:
                for entry in entries:
                    if entry.name.endswith((".dist-info", ".egg-info")):
                        path = f"{entry.path}/entry_points.txt"
                        if _holds(path, GROUP.encode()):
                            return True
                    elif entry.name.endswith(".egg"):
                        return True
        except FileNotFoundError:
            continue
        except OSError:  # a zip file, most likely
            return True
    return False


def _holds(path: str, text: bytes) -> bool:
    try:
        return text in Path(path).read_bytes()
    except OSError:
        return False


def _of_entry(entry: EntryPoint) -> Iterator[Rule | Broken]:
    origin = entry.value
    if entry.dist is not None:
        origin = f"{entry.dist.metadata['Name']} {entry.dist.version}"
    own = (entry.name.replace("_", "-"), *_called(entry.module))
    try:
        package = entry.load()
        if not isinstance(package, ModuleType):
            raise TypeError(f"{entry.value} is no module or package")
        modules = _modules(package)
    except (Exception, SystemExit) as error:
        yield Broken(origin, f"{entry.value}: {_reason(error)}", own)
        return
    for name in modules:
        try:
            yield _used(importlib.import_module(name), origin)
        except (Exception, SystemExit) as error:
            yield Broken(origin, f"{name}: {_reason(error)}", _called(name))


def _called(module: str) -> tuple[str, ...]:
    """The rule's and family's names that a module's name gives."""
    *_, family, rule = ("", *module.split("."))
    return tuple(name.replace("_", "-") for name in (rule, family) if name)


# Loose files ------------------------------------------------------------------------


@cache
def _loose(folder: Path) -> tuple[Rule | Broken, ...]:
    """The rules of a folder; raises `RuleError` where there is none."""
    if not folder.is_dir():
        raise RuleError(
            f"{without_home(str(folder))} is no folder", hint="name one that has rules"
        )
    found: list[Rule | Broken] = []
    for pattern in ("*.py", "*/*.py"):
        for file in sorted(folder.glob(pattern)):
            inside = file.parent == folder or file.parent.name.isidentifier()
            other = file.name.startswith(("_", ".", "test_", "conftest."))
            if inside and not other:
                found.append(_of_file(file, folder))
    return tuple(found)


def _of_file(file: Path, folder: Path) -> Rule | Broken:
    family = file.parent.name if file.parent != folder else LOOSE_FAMILY
    origin = without_home(str(file))
    # One that no import can mean, whatever the folder is called.
    name = f"loose rules of {folder}.{family}.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
        return _used(module, origin, folder)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        return Broken(origin, _reason(error), _called(f"{family}.{file.stem}"))


# Between processes ------------------------------------------------------------------


def _same_rule(name: str, folders: tuple[Path, ...]) -> Rule:
    return catalog(folders).find(name)


def _same_threshold(rule: str, folders: tuple[Path, ...], name: str) -> Threshold[Any]:
    found = _same_rule(rule, folders).thresholds
    return next(threshold for threshold in found if threshold.name == name)


def _reduced_rule(rule: Rule) -> tuple[Any, ...]:
    return _same_rule, (rule.name, () if rule.folder is None else (rule.folder,))


def _reduced_threshold(threshold: Threshold[Any]) -> tuple[Any, ...]:
    rules = (*all_rules(), *_others)
    owner = next(rule for rule in rules if threshold in rule.thresholds)
    _, (name, folders) = _reduced_rule(owner)
    return _same_threshold, (name, folders, threshold.name)


# Rules and thresholds go by name: each is one object in each process.
copyreg.pickle(Rule, _reduced_rule)
copyreg.pickle(Threshold, _reduced_threshold)

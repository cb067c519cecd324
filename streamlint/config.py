"""A project's configuration: `streamlint.toml`, or `pyproject.toml`'s tool.streamlint.

The file nearest to the working folder holds, upwards; in one folder `streamlint.toml`
comes first, and a `pyproject.toml` without the table is passed over. The keys are
described in docs/configuration.md.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from streamlint.baseline import DEFAULT_TOLERANCE, parse_tolerance
from streamlint.errors import ConfigError
from streamlint.escape import without_home
from streamlint.findings import Severity
from streamlint.registry import Catalog, catalog
from streamlint.rule import Rule
from streamlint.settings import WHOLE, Scope, Settings, Threshold
from streamlint.suppression import MATCHERS, NO_SAVING, Allowance, Policy, Saving
from streamlint.units import bytes_of, ns_of, share_of

OWN_FILE, PROJECT_FILE = "streamlint.toml", "pyproject.toml"


@dataclass(frozen=True, slots=True)
class Config:
    """What holds for a run of streamlint, and where it was said.

    ``path`` is the file, None without one; ``given`` has the keys that it sets
    ("fail-on", "rules.busy-poll.min-queries"), the others are defaults. ``path_map``
    has pairs of what recorded source paths begin with and what to put there.
    ``rules_dir`` are folders with more rules.
    """

    path: Path | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: Severity = Severity.LOW
    min_saving: Saving = NO_SAVING
    baseline_tolerance: float = DEFAULT_TOLERANCE
    path_map: tuple[tuple[str, str], ...] = ()
    limits: Mapping[Threshold[Any], int | float] = field(default_factory=dict)
    allowances: tuple[Allowance, ...] = ()
    scope: Scope = WHOLE
    replay: bool = True
    rules_dir: tuple[Path, ...] = ()
    given: frozenset[str] = frozenset()

    @property
    def origin(self) -> str:
        """The file as a message names it: relative where that is shorter."""
        if self.path is None:
            return "default"
        return _shown(self.path)

    @property
    def catalog(self) -> Catalog:
        """All rules at hand; raises `RuleError`."""
        return catalog(self.rules_dir)

    def chosen(
        self, select: Sequence[str] = (), ignore: Sequence[str] = ()
    ) -> tuple[Rule, ...]:
        """The rules to judge by, where ``select`` comes before the file.

        Raises `UsageError` and `RuleError` as `Catalog.select` does.
        """
        if not select:
            select, ignore = self.select, (*self.ignore, *ignore)
        return self.catalog.select(select, ignore)

    @property
    def settings(self) -> Settings:
        """What the rules need to know."""
        return Settings(self.limits, self.scope, replay=self.replay)

    @property
    def policy(self) -> Policy:
        """What becomes of findings."""
        return Policy(self.min_saving, self.path_map, self.allowances)


def load(
    folder: Path, named: Path | None = None, rules_dir: Sequence[Path] = ()
) -> Config:
    """The configuration that holds in ``folder``, or that of the file ``named``.

    Rules of ``rules_dir`` may be named in it. Raises `ConfigError` where the file
    can't be read or isn't understood, `RuleError` where rules can't be loaded.
    """
    found = _nearest(folder, named)
    rules_dir = tuple(path.resolve() for path in rules_dir)
    if found is None:
        return Config(rules_dir=rules_dir)
    return _read(*found, rules_dir)


def rules_dirs(folder: Path, named: Path | None = None) -> tuple[Path, ...]:
    """The folders with more rules that such a file names; all else is not checked."""
    found = _nearest(folder, named)
    if found is None or "rules-dir" not in found[1]:
        return ()
    path, table = found
    return _rules_dir(_Reader(path), Config(path), table["rules-dir"]).rules_dir


def _nearest(folder: Path, named: Path | None) -> tuple[Path, dict[str, Any]] | None:
    if named is not None:
        table = _table(named, named.name == PROJECT_FILE)
        if table is None:
            raise ConfigError(
                f"{_shown(named)} has no table tool.streamlint",
                hint="add [tool.streamlint], or name a streamlint.toml",
            )
        return named, table
    folder = folder.resolve()
    for here in (folder, *folder.parents):
        for name in (OWN_FILE, PROJECT_FILE):
            path = here / name
            if path.is_file():
                table = _table(path, name == PROJECT_FILE)
                if table is not None:
                    return path, table
    return None


def _shown(path: Path) -> str:
    text = str(path)
    try:
        short = os.path.relpath(path)
    except ValueError:  # another drive
        return text
    return min(short, text, key=len)


def _table(path: Path, project: bool) -> dict[str, Any] | None:
    """The table of streamlint in a file; None where a pyproject.toml has none."""
    shown = _shown(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{shown} can't be read ({error.strerror})",
            hint="name a TOML file that exists, or use --isolated to read none",
        ) from error
    if project and b"streamlint" not in raw:
        return None
    # Imported only where there is a file: most runs have none.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table: Any = tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown} isn't UTF-8", hint="save it as UTF-8") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "nested too deeply"
        raise ConfigError(
            f"{shown} is no valid TOML ({reason})", hint="correct that line"
        ) from error
    if not project:
        assert isinstance(table, dict)
        return table
    tools = table.get("tool", {})
    if not isinstance(tools, dict) or "streamlint" not in tools:
        return None
    own = tools["streamlint"]
    if not isinstance(own, dict):
        raise ConfigError(
            f"{shown}: tool.streamlint is no table", hint="write [tool.streamlint]"
        )
    return own


class _Reader:
    """Checks the values of one file; every error names the file and the key."""

    def __init__(self, path: Path) -> None:
        self._shown = _shown(path)
        self.catalog = Catalog(())

    def wrong(self, key: str, value: object, expected: str) -> ConfigError:
        text = str(value) if isinstance(value, int | float | bool) else f'"{value}"'
        if isinstance(value, dict | list):
            text = "a table" if isinstance(value, dict) else "a list"
        if isinstance(value, bool):
            text = text.lower()
        return ConfigError(
            f"{self._shown}: {key} can't be {text[:80]}", hint=f"it is {expected}"
        )

    def unknown(self, key: str, kind: str, known: Iterable[str]) -> ConfigError:
        return ConfigError(
            f"{self._shown}: there is no {kind} {key}", hint=_suggest(key, known)
        )

    def table(self, key: str, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(key, value, f"a table: [{key}]")
        return value

    def text(self, key: str, value: object, expected: str) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, value, expected)
        return value

    def names(self, key: str, value: object) -> tuple[str, ...]:
        """Rules and families."""
        expected = 'a list of rules and families, such as ["sync", "busy-poll"]'
        if not isinstance(value, list):
            raise self.wrong(key, value, expected)
        known = self.catalog.names | self.catalog.hidden
        for name in value:
            if not isinstance(name, str):
                raise self.wrong(key, name, expected)
            if name not in known:
                raise ConfigError(
                    f"{self._shown}: {key} names {name}, no rule or family",
                    hint=self.catalog.near(name),
                )
        return tuple(value)

    def patterns(self, key: str, value: object) -> tuple[str, ...]:
        """Glob patterns; a single one, or a number, may stand alone."""
        if value is None:
            return ()
        expected = "a glob pattern or a list of them"
        values = value if isinstance(value, list) else [value]
        for one in values:
            number = isinstance(one, int) and not isinstance(one, bool)
            if not number and not (isinstance(one, str) and one):
                raise self.wrong(key, one, expected)
        if not values:
            raise self.wrong(key, value, expected)
        # As all texts of a trace, they name no home.
        return tuple(without_home(str(one)) for one in values)

    def day(self, key: str, value: object) -> date | None:
        """A date, as one of TOML or as text."""
        if value is None or (isinstance(value, date) and type(value) is date):
            return value
        try:
            return date.fromisoformat(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            expected = "the last day on which it holds, such as 2027-01-31"
            raise self.wrong(key, value, expected) from None

    def rule(self, key: str, value: object) -> Rule | None:
        """The rule of that name, None for one that can't be used."""
        name = self.text(key, value, "the name of a rule")
        for rule in self.catalog.rules:
            if rule.name == name:
                return rule
        if name in self.catalog.hidden:
            return None
        raise ConfigError(
            f"{self._shown}: {key} names no rule: {name}", hint=self.catalog.near(name)
        )


def _suggest(name: str, known: Iterable[str]) -> str:
    import difflib

    known = sorted(known)
    last = re.split(r"[. ]", name)[-1].replace("_", "-")
    close = difflib.get_close_matches(last, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(known)}" if known else "there are none here: drop it"


def _read(path: Path, table: dict[str, Any], rules_dir: tuple[Path, ...]) -> Config:
    reader = _Reader(path)
    config = Config(path=path)
    if "rules-dir" in table:
        config = _rules_dir(reader, config, table["rules-dir"])
    config = replace(config, rules_dir=(*rules_dir, *config.rules_dir))
    reader.catalog = config.catalog  # the other keys name rules
    for key, value in table.items():
        if key not in _KEYS:
            raise reader.unknown(key, "key", _KEYS)
        if key != "rules-dir":
            config = _KEYS[key](reader, config, value)
        config = replace(config, given=config.given | {key})
    return config


def _select(reader: _Reader, config: Config, value: object) -> Config:
    return replace(config, select=reader.names("select", value))


def _ignore(reader: _Reader, config: Config, value: object) -> Config:
    return replace(config, ignore=reader.names("ignore", value))


def _fail_on(reader: _Reader, config: Config, value: object) -> Config:
    names = [severity.value for severity in Severity]
    if value not in names:
        raise reader.wrong("fail-on", value, f"one of {', '.join(names)}")
    return replace(config, fail_on=Severity(value))


def _min_saving(reader: _Reader, config: Config, value: object) -> Config:
    saving = saving_of(value) if isinstance(value, str) else None
    if saving is None:
        raise reader.wrong("min-saving", value, SAVING_FORM)
    return replace(config, min_saving=saving)


SAVING_FORM = 'a time such as "1ms", or a part of the judged time such as "0.5%"'


def saving_of(text: str) -> Saving | None:
    """The least saving that ``text`` names, None where it names none."""
    ns, share = ns_of(text), share_of(text)
    return None if ns is None and share is None else Saving(ns, share)


def _baseline_tolerance(reader: _Reader, config: Config, value: object) -> Config:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        if not number and not isinstance(value, str):
            raise ValueError
        return replace(config, baseline_tolerance=parse_tolerance(str(value)))
    except ValueError as error:
        expected = 'a share from 0, such as "10%" or 0.1'
        raise reader.wrong("baseline-tolerance", value, expected) from error


def _replay(reader: _Reader, config: Config, value: object) -> Config:
    if not isinstance(value, bool):
        raise reader.wrong("replay", value, "true or false")
    return replace(config, replay=value)


def _steady_state(reader: _Reader, config: Config, value: object) -> Config:
    if not isinstance(value, bool):
        raise reader.wrong("steady-state", value, "true or false")
    return replace(config, scope=config.scope._replace(steady_state=value))


def _steady_state_nvtx(reader: _Reader, config: Config, value: object) -> Config:
    expected = 'the text of the ranges around iterations, such as "step *"'
    pattern = reader.text("steady-state-nvtx", value, expected)
    return replace(config, scope=config.scope._replace(steady_nvtx=pattern))


def _path_map(reader: _Reader, config: Config, value: object) -> Config:
    pairs: list[tuple[str, str]] = []
    for old, new in reader.table("path-map", value).items():
        if not old.strip("/"):
            raise reader.wrong("path-map", old, 'by folder: "/build/src" = "src"')
        if not isinstance(new, str):
            raise reader.wrong(f"path-map.{old}", new, "the folder to put there")
        pairs.append((old.rstrip("/"), new))
    # The longest prefix holds.
    pairs.sort(key=lambda pair: -len(pair[0]))
    return replace(config, path_map=tuple(pairs))


def _rules_dir(reader: _Reader, config: Config, value: object) -> Config:
    expected = 'a list of folders, such as ["tools/rules"]'
    if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
        raise reader.wrong("rules-dir", value, expected)
    assert config.path is not None
    base = config.path.resolve().parent
    return replace(config, rules_dir=tuple((base / name).resolve() for name in value))


def _rules(reader: _Reader, config: Config, value: object) -> Config:
    limits: dict[Threshold[Any], int | float] = {}
    given: set[str] = set()
    for name, table in reader.table("rules", value).items():
        section = f"rules.{name}"
        rule = reader.rule("rules", name)
        if rule is None:
            continue
        thresholds = {t.name: t for t in rule.thresholds}
        for key, number in reader.table(section, table).items():
            if key not in thresholds:
                raise reader.unknown(f"{section}.{key}", "threshold", thresholds)
            limits[thresholds[key]] = _number(
                reader, f"{section}.{key}", thresholds[key], number
            )
            given.add(f"{section}.{key}")
    return replace(config, limits=limits, given=config.given | given)


def _form(threshold: Threshold[Any]) -> str:
    example = threshold.text(threshold.default)
    if threshold.unit == "ns":
        return f"a time such as {example}"
    if threshold.unit == "bytes":
        return f"a size such as {example}"
    if threshold.unit == "share":
        return f"a share such as {example} or {threshold.default:g}"
    if threshold.unit == "factor":
        return f"a factor above 0, such as {example}"
    return f"a whole number of {threshold.unit} from 1, such as {example}"


def _number(
    reader: _Reader, key: str, threshold: Threshold[Any], value: object
) -> int | float:
    parsed: object = value
    if isinstance(value, str):
        readers = {"ns": ns_of, "bytes": bytes_of, "share": share_of}
        parsed = readers.get(threshold.unit, lambda _: None)(value)
    number = isinstance(parsed, int | float) and not isinstance(parsed, bool)
    fits: Callable[[Any], bool] = {
        "ns": lambda n: isinstance(n, int) and 0 <= n < 2**62,
        "bytes": lambda n: isinstance(n, int) and 1 <= n < 2**62,
        "share": lambda n: 0 <= n <= 1,
        "factor": lambda n: 0 < n < math.inf,
    }.get(threshold.unit, lambda n: isinstance(n, int) and 1 <= n < 2**31)
    if not number or not fits(parsed):
        raise reader.wrong(key, value, _form(threshold))
    assert isinstance(parsed, int | float)
    return parsed


def _allow(reader: _Reader, config: Config, value: object) -> Config:
    if not isinstance(value, list):
        raise reader.wrong("allow", value, "a list of tables: [[allow]]")
    found: list[Allowance] = []
    for number, entry in enumerate(value, 1):
        key = f"allow {number}"
        if not isinstance(entry, dict):
            raise reader.wrong(key, entry, "a table: [[allow]]")
        known = ("rule", "reason", "until", *MATCHERS)
        for name in entry:
            if name not in known:
                raise reader.unknown(f"{key}: {name}", "key", known)
        for name in ("rule", "reason"):
            if name not in entry:
                raise ConfigError(
                    f"{config.origin}: {key} has no {name}",
                    hint="name the rule and say why its finding is allowed",
                )
        reader.rule(f"{key}: rule", entry["rule"])
        found.append(
            Allowance(
                rule=entry["rule"],
                reason=reader.text(
                    f"{key}: reason", entry["reason"], "why the finding is allowed"
                ).strip(),
                origin=f"{config.origin}, {key}",
                until=reader.day(f"{key}: until", entry.get("until")),
                kernel=reader.patterns(f"{key}: kernel", entry.get("kernel")),
                nvtx=reader.patterns(f"{key}: nvtx", entry.get("nvtx")),
                thread=reader.patterns(f"{key}: thread", entry.get("thread")),
                stream=reader.patterns(f"{key}: stream", entry.get("stream")),
                source=reader.patterns(f"{key}: source", entry.get("source")),
            )
        )
    return replace(config, allowances=tuple(found))


_KEYS: dict[str, Callable[[_Reader, Config, object], Config]] = {
    "select": _select,
    "ignore": _ignore,
    "fail-on": _fail_on,
    "min-saving": _min_saving,
    "baseline-tolerance": _baseline_tolerance,
    "replay": _replay,
    "steady-state": _steady_state,
    "steady-state-nvtx": _steady_state_nvtx,
    "rules-dir": _rules_dir,
    "path-map": _path_map,
    "rules": _rules,
    "allow": _allow,
}

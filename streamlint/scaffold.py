"""Writes the files of a new rule: one that works, for its author to change."""

from __future__ import annotations

import re
from pathlib import Path

from streamlint.errors import UsageError
from streamlint.files import replacing, unwritable
from streamlint.registry import LOOSE_FAMILY, Catalog

TEMPLATES = Path(__file__).with_name("templates")
_FORM = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)+")
_MAX_NAME = 60
"""A longer one makes lines of the templates too long."""


def new_rule(
    name: str, family: str | None, folder: Path | None, here: Path, known: Catalog
) -> list[Path]:
    """Write the rule ``name`` and return its files.

    With ``folder`` it is a loose file and a test beside it; without, ``here`` must be
    in a checkout of streamlint, which gets the rule, its test and its pair of programs.
    Raises `UsageError` for a bad name, and where a file exists already.
    """
    if not _FORM.fullmatch(name) or len(name) > _MAX_NAME:
        raise UsageError(
            f"a rule can't be called {name}",
            hint="say what is wrong in two or more words, such as small-memset-storm",
        )
    if name in known.names:
        raise UsageError(
            f"there is a rule or family {name} already", hint="find another name"
        )
    if family is not None and (
        not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", family)
        or family in {rule.name for rule in known.rules}
    ):
        raise UsageError(f"a family can't be called {family}", hint="say sync, or io")
    module = name.replace("-", "_")
    # Import sorters set streamlint apart only in its own checkout.
    gap = "\n" if folder is None else ""
    values = {"@NAME@": name, "@MODULE@": module, "@UP@": "", "@GAP@": gap}
    if folder is None:
        files = _in_checkout(module, family, here, known)
    else:
        values["@UP@"] = "" if family in (None, LOOSE_FAMILY) else ".parent"
        inside = folder
        if values["@UP@"] and family is not None:
            inside = folder / family.replace("-", "_")
        files = {
            inside / f"{module}.py": "rule.py",
            inside / f"test_{module}.py": "test_loose.py",
        }
    _write(files, values)
    return list(files)


def _in_checkout(
    module: str, family: str | None, here: Path, known: Catalog
) -> dict[Path, str]:
    root = checkout(here)
    if root is None:
        raise UsageError(
            "this is no checkout of streamlint",
            hint="say where to write the rule: --rules-dir DIR",
        )
    families = sorted(
        path.name.replace("_", "-")
        for path in (root / "rules").iterdir()
        if (path / "__init__.py").is_file()
    )
    if family not in families:
        raise UsageError(
            "a rule needs a family" if family is None else f"no family {family} here",
            hint=f"say --family with one of {', '.join(families)}",
        )
    return {
        root / "rules" / family.replace("-", "_") / f"{module}.py": "rule.py",
        root / "harness" / "workloads" / f"{module}.cu": "workload.cu",
        root / "tests" / f"test_{module}.py": "test_rule.py",
    }


def checkout(folder: Path) -> Path | None:
    """The checkout of streamlint that ``folder`` is in."""
    for root in (folder, *folder.parents):
        if (root / "harness" / "workloads" / "common.cuh").is_file():
            return root
    return None


def _write(files: dict[Path, str], values: dict[str, str]) -> None:
    """All files or none, and none that exists."""
    for path in files:
        if path.exists():
            raise UsageError(
                f"{path} exists already", hint="none is overwritten: move it away"
            )
    written: list[Path] = []
    try:
        for path, template in files.items():
            text = (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")
            for key, value in values.items():
                text = text.replace(key, value)
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as part:
                part.write_text(text, encoding="utf-8")
            written.append(path)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise unwritable(path, error) from error

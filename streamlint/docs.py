"""Rule documentation, made from the docstrings of the checks.

`python -m streamlint.docs` writes it to docs/rules/ of the checkout.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from streamlint.rule import BUILT_IN, Rule, sections


def page(rule: Rule) -> str:
    """One rule as Markdown."""
    lines = [f"# {rule.name}", "", rule.summary, "", f"Family: {rule.family}"]
    if rule.origin != BUILT_IN:
        lines += ["", f"From: {rule.origin}"]
    for heading, text in sections(rule).items():
        lines += ["", f"## {heading}", "", _wrapped(text)]
    if rule.thresholds:
        where = (
            f"Keys of `rules.{rule.name}` in the configuration, with their defaults."
        )
        lines += ["", "## Thresholds", "", _wrapped(where), ""]
    for threshold in rule.thresholds:
        default = threshold.text(threshold.default).strip('"')
        amount = f"{default} {threshold.counted}".strip()
        text = f"`{threshold.name}`, {amount}: {threshold.origin}"
        lines.append(_wrapped(text, "- ", "  "))
    return "\n".join(lines) + "\n"


def pages(rules: Iterable[Rule]) -> dict[str, str]:
    """Every rule's page and their index, README.md, by file name."""
    rules = tuple(rules)
    index = ["# Rules", "", "`python -m streamlint.docs` makes these pages."]
    family = None
    for rule in rules:
        if rule.family != family:
            family = rule.family
            index += ["", f"## {family}", ""]
        entry = f"[{rule.name}]({rule.name}.md): {rule.summary}"
        index.append(_wrapped(entry, "- ", "  "))
    found = {f"{rule.name}.md": page(rule) for rule in rules}
    return {"README.md": "\n".join(index) + "\n", **found}


def _wrapped(text: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        text,
        79,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def write(folder: Path) -> None:
    """Make ``folder`` hold these pages and no page of a rule that is gone."""
    from streamlint.registry import all_rules

    made = pages(all_rules())
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[1] / "docs" / "rules")

"""Lists the pages of the rules in the site, by family; mkdocs calls it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mkdocs.config.defaults import MkDocsConfig

from streamlint.registry import all_rules


def on_config(config: MkDocsConfig) -> None:
    """Put the families and their rules in the place of ``rules/``."""
    families: dict[str, list[str]] = defaultdict(list)
    for rule in all_rules():
        families[rule.family].append(f"rules/{rule.name}.md")
    pages: list[Any] = ["rules/README.md"]
    pages += [{family: found} for family, found in families.items()]
    for entry in config.nav or []:
        for title in entry if isinstance(entry, dict) else ():
            if entry[title] == "rules/":
                entry[title] = pages

"""Writes the tables of docs/json.md from the JSON Schemas of the package.

.venv/bin/python docs/schema_tables.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import marked

from streamlint.reporters import diff, json

PAGE = marked.DOCS / "json.md"
Node = dict[str, Any]


def tables() -> dict[str, str]:
    """The text of each part of the page."""
    lint, changes = json.schema(), diff.schema()
    trace = lint["properties"]["traces"]["items"]
    return {
        "document": table(lint, leave=("traces", "fleet", "baseline")),
        "trace": table(trace),
        "finding": table(lint["$defs"]["finding"]),
        "fleet": table(lint["properties"]["fleet"]),
        "baseline": table(lint["properties"]["baseline"]),
        "diff": table(changes),
        "side": table(changes["$defs"]["side"]),
        "measure": table(changes["$defs"]["measure"]["oneOf"][1]),
    }


def table(node: Node, leave: tuple[str, ...] = ()) -> str:
    """The fields of an object, those of its parts below it."""
    lines = ["| field | value | |", "|---|---|---|"]
    for name, value, words in fields(node, "", leave):
        lines.append(f"| `{name}` | {value} | {words} |")
    return "\n".join(lines)


def fields(
    node: Node, above: str, leave: tuple[str, ...] = ()
) -> Iterator[tuple[str, str, str]]:
    """Path, kind of value and meaning of every field below a node."""
    for name, field in node["properties"].items():
        words = field.get("description", "")
        if name not in node["required"]:
            words = f"{words}; may be missing" if words else "may be missing"
        yield above + name, _value(field), words
        below, path = field, f"{above}{name}."
        if "items" in field:
            below, path = field["items"], f"{above}{name}[]."
        if "properties" in below and not (above == "" and name in leave):
            yield from fields(below, path)


def _value(field: Node) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        words = [f"`{v}`" for v in field["enum"] if v is not None]
        return ", ".join(words) + (" or null" if None in field["enum"] else "")
    kinds = [field["type"]] if isinstance(field["type"], str) else [*field["type"]]
    if "items" in field:
        kinds[kinds.index("array")] = f"list of {_value(field['items'])}"
    elif "additionalProperties" in field and "properties" not in field:
        kinds = [f"object, name to {_value(field['additionalProperties'])}"]
    return " or ".join(kinds)


if __name__ == "__main__":
    marked.write(PAGE, tables())

"""Parts of pages that a script writes, between two comments."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).resolve().parent


def part(page: str, name: str) -> str:
    """What stands in the page between ``<!-- name: ... -->`` and its end."""
    return page[slice(*_bounds(page, name))].strip()


def write(path: Path, parts: dict[str, str]) -> None:
    """Put each text into the part of its name."""
    page = path.read_text(encoding="utf-8")
    for name, text in parts.items():
        begin, end = _bounds(page, name)
        page = f"{page[:begin]}\n\n{text.strip()}\n\n{page[end:]}"
    path.write_text(page, encoding="utf-8")


def _bounds(page: str, name: str) -> tuple[int, int]:
    begin = page.index(" -->", page.index(f"<!-- {name}: ")) + len(" -->")
    return begin, page.index(f"<!-- end of {name} -->", begin)

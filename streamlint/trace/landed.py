"""Tells whether an export that somebody else writes has been written to its end."""

from __future__ import annotations

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

_HEADER = struct.Struct(">16s H 10x I I 60x I 4x")
_FACTS = ("META_DATA_EXPORT", "EXPORT_META_DATA")
"""nsys fills these after all other tables."""


def is_complete(path: Path) -> bool:
    """Whether an export is whole: all its pages are there, and the facts about it."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            return False
        magic, page, changes, pages, valid_for = _HEADER.unpack(head)
        if magic != b"SQLite format 3\0":
            return False
        size = (65536 if page == 1 else page) * pages
        if changes == valid_for and size != path.stat().st_size:
            return False
        if any(
            path.with_name(path.name + end).exists() for end in ("-journal", "-wal")
        ):
            return False
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as db:
            query = "SELECT name FROM sqlite_master WHERE type = 'table'"
            names = {name for (name,) in db.execute(query)}
            return any(
                db.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone()
                for name in _FACTS
                if name in names
            )
    except (OSError, sqlite3.Error):
        return False

"""Says in a moment whether an export holds GPU work; standard library alone."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from streamlint.trace.untrusted import Connection, is_plain_table

_CALLS = ("CUPTI_ACTIVITY_KIND_RUNTIME",)
_OPERATIONS = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
)


class Contents(NamedTuple):
    """How many CUDA calls and GPU operations an export holds."""

    calls: int
    operations: int


def contents(export: Path) -> Contents:
    """Count the CUDA rows of ``export``; raises `TraceError` if it is none."""
    uri = f"file:{quote(os.fsencode(export.resolve()))}?mode=ro&immutable=1"
    connection = Connection(export, uri, original=export, name=export.name)
    with closing(connection) as db, db.reading():
        found = db.rows("SELECT name, type, sql FROM sqlite_master")
        stored = {n for n, kind, sql in found if is_plain_table(kind, str(n), sql)}
        calls, operations = (
            # Not count(*): SQLite counts a damaged tree's rows without an end.
            sum(db.rows(f"SELECT count(start) FROM {n}")[0][0] for n in names)
            for names in ({*_CALLS} & stored, {*_OPERATIONS} & stored)
        )
    return Contents(calls, operations)

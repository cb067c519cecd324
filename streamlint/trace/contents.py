"""Says in a moment whether an export holds GPU work; standard library alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from streamlint.errors import TraceError

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
    uri = f"file:{quote(str(export.resolve()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as db:
            rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            stored = {str(name) for (name,) in rows}
            calls, operations = (
                sum(
                    int(db.execute(f"SELECT count(*) FROM {name}").fetchone()[0])
                    for name in names
                    if name in stored
                )
                for names in (_CALLS, _OPERATIONS)
            )
    except sqlite3.Error as error:
        raise TraceError(
            f"{export.name} can't be read as an nsys export",
            hint="export it again: nsys export --type sqlite REPORT.nsys-rep",
        ) from error
    return Contents(calls, operations)

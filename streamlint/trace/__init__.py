"""Typed tables of one trace; the only package that reads SQLite."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamlint.trace.model import Trace


def open_trace(path: Path) -> Trace:
    """Open a `.sqlite` export, or export a report (`.nsys-rep`) and open that.

    Raises `TraceError`, with advice, on anything else.
    """
    from streamlint.errors import TraceError
    from streamlint.trace.convert import REPORT_SUFFIXES, exported
    from streamlint.trace.model import Trace
    from streamlint.trace.reader import ExportFile

    if path.suffix.lower() in REPORT_SUFFIXES and path.is_file():
        export = exported(path)
        try:
            return Trace(ExportFile(export, named=path))
        except TraceError:
            export.unlink(missing_ok=True)  # next time a new one is made
            raise
    return Trace(ExportFile(path))

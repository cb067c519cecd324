"""Typed tables of one trace; the only package that reads SQLite and parquet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamlint.trace.model import Trace


def open_trace(path: Path) -> Trace:
    """Open an export, or export a report (`.nsys-rep`) and open that.

    An export is a `.sqlite` file or a parquetdir folder.
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
    if path.is_dir():
        from streamlint.trace.parquet import ParquetFolder, is_parquet_folder

        if is_parquet_folder(path):
            return Trace(ParquetFolder(path))
    return Trace(ExportFile(path))

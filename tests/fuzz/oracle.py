"""What must hold for any file: an error of two lines, or what sqlite3 reads."""

from __future__ import annotations

import gzip
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

from streamlint import reporters
from streamlint.engine import Report, lint
from streamlint.errors import StreamlintError
from streamlint.escape import printable
from streamlint.findings import Severity
from streamlint.registry import all_rules
from streamlint.reporters import View, renderer
from streamlint.reporters.html import in_script
from streamlint.reporters.info import render as render_info
from streamlint.reporters.perfetto import render as render_perfetto
from streamlint.reporters.timeline import capture
from streamlint.trace import open_trace
from streamlint.trace.model import Trace
from streamlint.trace.reader import ExportFile, Unavailable
from streamlint.trace.tables import NAMED, TABLES, Kind
from streamlint.trace.untrusted import MAX_TEXT

MAX_SECONDS = 20.0
"""CPU time of one input, with instrumented code on a slow machine."""
_STEPS = 3_000_000


def check(path: Path) -> str:
    """Everything that must hold for the file; says what came of it."""
    started = time.process_time()
    try:
        check_rows(path)
        judged = check_lint(path)
    finally:
        spent = time.process_time() - started
    assert spent < MAX_SECONDS, f"took {spent:.1f} s"
    return "refused" if judged is None else f"exit {judged.exit_code(Severity.LOW)}"


def check_rows(path: Path) -> None:
    """What can be read of the file's tables, either way, is what sqlite3 reads."""
    with _refusals(), closing(ExportFile(path)) as file:
        for name in TABLES:
            for file.by_pages in (True, False):
                with _refusals():
                    loaded = file.load(name)
                    if not isinstance(loaded, Unavailable):
                        _compare(path, name, loaded.rows())


def check_lint(path: Path) -> Report | None:
    """The report on the file, None where it is refused; every output is sound."""
    with _refusals():
        trace = open_trace(path)
        with closing(trace):
            report = lint(trace, all_rules(), with_model=True)
            for _, crash in report.crashed:
                raise AssertionError(crash.traceback)
            _check_outputs(trace, report)
            return report
    return None


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except StreamlintError as refused:
        error = refused
    else:
        return
    assert error.exit_code == 2
    for line in (error.message, error.hint):
        assert line
        assert "\n" not in line


def _check_outputs(trace: Trace, report: Report) -> None:
    shown = {name: renderer(name)([report], [], View()) for name in reporters.FORMATS}
    shown["info"] = render_info(trace, report, 100)
    for name, text in shown.items():
        for line in text.split("\n"):
            assert printable(line) == line, f"{name} unescaped: {line!r}"
    for text in (
        *(shown["json"], shown["sarif"]),
        gzip.decompress(render_perfetto(trace, report)).decode("ascii"),
    ):
        json.loads(text, parse_constant=_no_number)
    ElementTree.fromstring(shown["junit"])
    page = in_script(capture(trace, report).head)
    assert "<" not in page
    json.loads(page, parse_constant=_no_number)


def _no_number(text: str) -> NoReturn:
    raise AssertionError(f"{text} is no JSON")


def _compare(path: Path, name: str, got: list[tuple[Any, ...]]) -> None:
    want = _expected(path, name)
    if want is not None:
        assert sorted(map(repr, got)) == sorted(map(repr, want)), name


def _expected(path: Path, name: str) -> list[tuple[Any, ...]] | None:
    """The rows of a table as sqlite3 reads them; None where the file is unsound."""
    table = TABLES[name]
    try:
        with closing(_connected(path)) as db:
            if db.execute("PRAGMA integrity_check(1)").fetchall() != [("ok",)]:
                return None
            stored = dict(
                db.execute("SELECT name, rootpage FROM sqlite_master WHERE rootpage")
            )
            source = next(s for s in table.sources if s in stored)
            info = {r[1] for r in db.execute(f'PRAGMA table_info("{source}")')}
            columns = [c for c in table.columns if c.source in info]
            strings: dict[Any, Any] = {}
            if "StringIds" in stored:
                for key, value in db.execute("SELECT id, value FROM StringIds"):
                    if isinstance(key, int):
                        known = value if isinstance(value, str) else None
                        strings.setdefault(key, known)
            quoted = ", ".join(f'"{c.source}"' for c in columns)
            found = db.execute(f'SELECT {quoted} FROM "{source}"').fetchall()
    except (sqlite3.Error, OverflowError, UnicodeDecodeError, StopIteration):
        return None
    rows = []
    for values in found:
        row: dict[str, Any] = {c.name: None for c in table.columns}
        for column, value in zip(columns, values, strict=True):
            wanted: type = {Kind.TEXT: str, Kind.BLOB: bytes}.get(column.kind, int)
            kept = value if isinstance(value, wanted) else None
            if column.kind in NAMED:
                kept = strings.get(kept)
            if column.kind is Kind.ID and isinstance(kept, int):
                fits = -(1 << 31) <= kept < 1 << 32
                kept = (kept + (1 << 31)) % (1 << 32) - (1 << 31) if fits else None
            row[column.name] = kept
        if _usable(row, any(c.name == "end_ns" and c.required for c in table.columns)):
            rows.append(tuple(row.values()))
    return rows


def _usable(row: dict[str, Any], interval: bool) -> bool:
    if "start_ns" not in row:
        return True
    start, end = row["start_ns"], row.get("end_ns")
    if start is None or any(abs(t) >= 1 << 62 for t in (start, end) if t is not None):
        return False
    return not interval or (start != 0 and end is not None and end >= start)


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    db.text_factory = lambda raw: raw[:MAX_TEXT].decode("utf-8", "replace")
    steps = 0

    def budget() -> int:
        nonlocal steps
        steps += 1
        return int(steps > _STEPS // 1000)

    db.set_progress_handler(budget, 1000)
    return db

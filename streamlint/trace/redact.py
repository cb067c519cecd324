"""Copies an export without what tells about people and machines.

Everything is left out unless a rule reads it: tables, rows, texts. What stays is
numbers, names of kernels, calls and ranges, and file names without their folders.
A kept table keeps its columns, so the copy lints like the original.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from streamlint.errors import TraceError
from streamlint.files import replacing, unwritable
from streamlint.trace.reader import ExportFile
from streamlint.trace.rename import DOMAIN, OWN, OWN_DOMAIN, RANGE, Names
from streamlint.trace.stacks import (
    Frame,
    decode_blob,
    decode_json,
    encode_blob,
    encode_json,
)
from streamlint.trace.tables import (
    CAPTURE_OPTIONS,
    ENVIRONMENT_VARIABLES,
    NAMED,
    NVTX_DOMAIN,
    TABLES,
    Kind,
)
from streamlint.trace.untrusted import MAX_TEXT, REEXPORT

_ACTIVITY = (
    *("kernels", "memcpys", "memsets", "graph_traces", "runtime_calls"),
    *("synchronizations", "event_records"),
)
_KINDS: dict[str, dict[str, Kind]] = {}
for _table in TABLES.values():
    for _source in _table.sources:
        _columns = _KINDS.setdefault(_source, {})
        _columns.update({c.source: c.kind for c in _table.columns})
_ADDRESSES = frozenset({"originalIP", "pc", "virtualAddress", "luid"})
_CLEANERS = {
    ("PROCESSES", "name"): "clean_program",
    ("DIAGNOSTIC_EVENT", "text"): "clean_message",
    ("NVTX_EVENTS", "jsonText"): "clean_json",
}
"""SQL functions for columns whose text needs more than `clean`."""

_FREE_CPU_S, _CPU_S_PER_BYTE = 1.0, 10e-6
"""CPU time that copying may take: many times what it takes of sound exports."""
_MAX_PEOPLE = 1_000
_SMALL_FILE = 8 << 20
"""Bytes below which most pages hold a single short table: smaller pages save half."""

_FULL = re.compile("disk is full|disk I/O error")
"""What SQLite says of a disk or a quota that is used up."""

_OPTION = re.compile(rf"(PROCESS_\d+:)?({'|'.join(map(re.escape, CAPTURE_OPTIONS))})")
_ENVIRONMENT = re.compile(r"PROCESS_\d+:ENVIRONMENT_VARIABLE")
_VARIABLE = re.compile(rf"({'|'.join(ENVIRONMENT_VARIABLES)})=[^/\\]{{0,100}}", re.S)
_EXPORT_FACT = re.compile(
    r"EXPORT_(PRODUCT_VERSION|SCHEMA_VERSION(_MAJOR|_MINOR|_MICRO)?|CONFIG_TIME_SHIFT"
    r"|PARAM_(LAZY|TIME_NORMALIZE|TIME_SHIFT|TABLES_TO_EXPORT|TIMES_TO_EXPORT))"
)
_PLAIN_VALUE = re.compile(r"[\w.,:; +-]{0,400}")

_NAMES_SOMEONE = re.compile(
    r"EXPORT_HOST|EXPORT_USER|DEVICE_DISPLAY_NAME|(.*[:_])?(HOST|USER)_?NAME", re.I
)
_NAMING_VARIABLE = re.compile(r'(?:USER|USERNAME|LOGNAME|HOSTNAME|HOST)="?([^"]+)')
_HOME = re.compile(r"(?<![^/\\\s\"'=:])(?:home|Users)[/\\]+([^/\\\s\"']+)[/\\]*")
_NO_NAMES = re.compile(r"root|user|admin|ubuntu|nvidia|python[\d.]*|local(host)?")
"""Words that are a user or host name too often to mean anyone."""

_URL = re.compile(r"(?<![\w+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://\S*")
_WHOLE_PATH = re.compile(r"(~[\w-]*|\.{1,2}|[A-Za-z]:)?[/\\].*[/\\].*", re.S)
_PART = r"[^\s/\\\"'<>|:;,()\[\]{}*?]+"
# Only the last part of a path in a text ends at a space: folders may have some.
_PATH = re.compile(
    r"(?<![\w/\\-])(?:~[\w-]*|\.{1,2}|[A-Za-z]:)?"
    rf"(?:[/\\]+(?:{_PART}(?: {_PART})*(?=[/\\])|{_PART}))+[/\\]?"
)
_WORD = re.compile(r"\S+")
_PATH_SIGN = re.compile(r"[/\\@]")
_NO_PATH = re.compile(r"^(legacy/software|IP/backtrace|SLI/NVLink)$")
"""Words of nsys' own messages that look like one."""
_PACKAGE = re.compile(
    r"(?<![^/\\])(?:(?:site|dist)-packages|lib[/\\]python\d[\d.]*)[/\\].*", re.S
)
# Recognised as such where a stack is searched for the user's own frame.
_SYSTEM = re.compile(r"/(usr/)?lib|.*/lib(cu|nv|torch|c10|python)[^/]*$", re.S)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class Redaction:
    """What a redacted copy lacks: how many of each kind were left out or rewritten."""

    removed: dict[str, int]


def redact(
    source: Path, target: Path, *, programs: bool = True, names: bool = False
) -> Redaction:
    """Write a copy of the export ``source`` without private data to ``target``.

    ``target`` must not exist. ``programs=False`` leaves out the names of programs
    and threads as well; ``names=True`` replaces those of kernels, NVTX ranges, files
    and functions by numbered ones, each the same everywhere. Raises `TraceError` if
    ``source`` is no nsys export.
    """
    file = ExportFile(source, complete=False)
    try:
        _refuse_existing(target)
        with replacing(target) as part:
            with closing(sqlite3.connect(part, uri=True, isolation_level=None)) as db:
                small = file.size < _SMALL_FILE
                db.execute(f"PRAGMA page_size={1024 if small else 4096}")
                done = _Copy(db, file, programs=programs, names=names).run()
                file.refuse_change()
            _refuse_existing(target)
        return done
    except OSError as error:
        raise unwritable(target, error) from error
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        # What SQLite says may quote the file, bytes and all.
        if _FULL.search(str(error)):
            raise TraceError(
                f"{target} can't be written: no space is left",
                hint="free some there and in TMPDIR, or name a file on another disk",
            ) from error
        why = "has a text encoding that nsys never writes"
        if "text encoding" not in str(error):
            why = "is damaged and can't be copied"
        raise TraceError(
            f"{source.name} {why}",
            hint="export it again: nsys export --type sqlite REPORT.nsys-rep",
        ) from error
    finally:
        file.close()


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise TraceError(
            f"{target} exists already", hint="name a new file; none is overwritten"
        )


class _Copy:
    """One run: fills an empty database from an export."""

    def __init__(
        self,
        db: sqlite3.Connection,
        file: ExportFile,
        *,
        programs: bool,
        names: bool,
    ) -> None:
        self._db = db
        self._programs = programs
        self._removed: Counter[str] = Counter()
        self._strings: set[int] = set()
        db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        db.execute("PRAGMA journal_mode=OFF")  # leaves nothing beside the target
        db.execute("PRAGMA trusted_schema=OFF")
        db.execute("ATTACH ? AS source", (file.uri,))
        # A damaged tree has rows without an end; see `streamlint.trace.untrusted`.
        end = time.thread_time() + _FREE_CPU_S + file.size * _CPU_S_PER_BYTE
        db.set_progress_handler(lambda: time.thread_time() > end, 1_000)
        stored = db.execute(
            "SELECT name FROM source.sqlite_master WHERE type = 'table' "
            "AND rootpage > 0 ORDER BY rowid"
        )
        self._stored = [str(name) for (name,) in stored]
        self._clean = lru_cache(maxsize=100_000)(_cleaner(self._people()))
        functions: dict[str, Callable[[bytes], str | None]] = {
            "clean": self._text,
            "clean_program": self._program,
            "clean_message": self._message,
            "clean_json": self._json,
        }
        for name, function in functions.items():
            db.create_function(name, 1, function)
        db.create_function("clean_blob", 2, self._blob)
        self._names = self._renaming() if names else None

    def run(self) -> Redaction:
        """Copy everything that may stay."""
        kept = [
            name
            for name in self._stored
            if name in _KINDS or name in ("StringIds", "META_DATA_CAPTURE")
        ]
        self._db.execute("BEGIN")
        for name in kept:
            self._create_table(name)
            if name == "StringIds":
                continue
            if name.endswith(("META_DATA_CAPTURE", "META_DATA_EXPORT")) or (
                name == "EXPORT_META_DATA"
            ):
                self._copy_facts(name)
            else:
                self._copy_rows(name)
        if {"CUDA_CALLCHAINS", "CUPTI_ACTIVITY_KIND_RUNTIME"} <= set(kept):
            self._share_stacks()
        if "StringIds" in kept:
            self._copy_strings()
        self._db.execute("COMMIT")
        self._db.execute("DETACH source")
        self._db.execute("VACUUM")
        self._removed["tables"] = len(self._stored) - len(kept)
        return Redaction({kind: n for kind, n in self._removed.items() if n})

    # Tables -------------------------------------------------------------------

    def _columns(self, table: str) -> list[tuple[str, str, bool, bool]]:
        """Name, declared type, whether NOT NULL, whether the key, of each column."""
        info = self._db.execute(f"PRAGMA source.table_xinfo({_quoted(table)})")
        rows = [row for row in info if not row[6] and re.fullmatch(r"\w+", row[1])]
        keys = sum(bool(row[5]) for row in rows)
        return [
            (
                str(row[1]),
                str(row[2]) if re.fullmatch(r"[A-Za-z]*", str(row[2])) else "",
                bool(row[3]),
                bool(row[5]) and keys == 1,
            )
            for row in rows
        ]

    def _create_table(self, table: str) -> None:
        columns = [
            f"{_quoted(name)} {declared}{' NOT NULL' * not_null}{' PRIMARY KEY' * key}"
            for name, declared, not_null, key in self._columns(table)
        ]
        self._db.execute(f"CREATE TABLE main.{_quoted(table)} ({', '.join(columns)})")

    def _copy_rows(self, table: str) -> None:
        columns = self._columns(table)
        kinds = _KINDS.get(table, {})
        renaming = self._renamed_columns(table, {name for name, *_ in columns})
        chosen, blanked = [], []
        for name, declared, not_null, _ in columns:
            kind = kinds.get(name)
            texts = kind is Kind.TEXT or kind is Kind.BLOB
            empty = "NULL" if not not_null else "''" if declared == "TEXT" else "0"
            renamed = renaming.get((table, name))
            chosen.append(
                f"CASE typeof({_quoted(name)}) WHEN '{renamed[0]}' "
                f"THEN {renamed[1]} ELSE {empty} END"
                if renamed
                else _expression(table, name, declared, kind, empty)
            )
            if (table, name) == (
                "CUDA_CALLCHAINS",
                "originalIP",
            ) and self._names is None:
                chosen[-1] = self._in_module({c for c, *_ in columns}, empty)
            elif name in _ADDRESSES or (declared in ("TEXT", "BLOB") and not texts):
                blanked.append(_quoted(name))
        where = self._condition(table, {name for name, *_ in columns})
        self._db.execute(
            f"INSERT INTO main.{_quoted(table)} SELECT {', '.join(chosen)} "
            f"FROM source.{_quoted(table)} WHERE {where}"
        )
        self._count_blanked(table, blanked)

    def _in_module(self, columns: set[str], empty: str) -> str:
        """SQL for where in its binary a native frame is, not where that was loaded.

        An address keeps its distance from the page of the binary's first one, as
        though that were the second page of all.
        """
        if "module" not in columns:
            return empty
        known = "typeof(originalIP) = 'integer' AND originalIP > 0"
        rows = self._db.execute(
            "SELECT module, min(originalIP) FROM source.CUDA_CALLCHAINS "
            f"WHERE {known} GROUP BY module"
        )
        pages = {module: first // 4096 * 4096 - 4096 for module, first in rows}
        self._db.create_function("page_of", 1, pages.get, deterministic=True)
        return (
            f"CASE WHEN {known} THEN originalIP - page_of(module) "
            f"WHEN originalIP IS NULL THEN {empty} ELSE 0 END"
        )

    def _condition(self, table: str, columns: set[str]) -> str:
        """The rows of a table that are kept: all but those about other processes."""
        if table not in ("PROCESSES", "ThreadNames"):
            return "1"
        pids = ", ".join(map(str, sorted(self._cuda_pids()))) or "NULL"
        if table == "PROCESSES":
            kept = f"pid IN ({pids})" if "pid" in columns else "0"
            what = "processes"
        else:
            known = self._programs and "globalTid" in columns
            kept = f"{_PID_OF.format('globalTid')} IN ({pids})" if known else "0"
            what = "threads"
        query = f"SELECT count(*) FROM source.{table} WHERE ({kept}) IS NOT 1"
        self._removed[what] += self._db.execute(query).fetchone()[0]
        return kept

    def _count_blanked(self, table: str, columns: list[str]) -> None:
        filled = (f"({c} IS NOT NULL AND {c} NOT IN ('', 0))" for c in columns)
        for condition in filled:
            query = f"SELECT count(*) FROM source.{_quoted(table)} WHERE {condition}"
            self._removed["values"] += self._db.execute(query).fetchone()[0]

    def _cuda_pids(self) -> set[int]:
        """Processes with rows in the activity tables."""
        found: set[int] = set()
        for source in (s for name in _ACTIVITY for s in TABLES[name].sources):
            if source not in self._stored:
                continue
            names = {name for name, *_ in self._columns(source)}
            for column in names & {"globalPid", "globalTid"}:
                query = f"SELECT DISTINCT {_PID_OF.format(column)} FROM source.{source}"
                rows = self._db.execute(query)
                found.update(row[0] for row in rows if row[0] is not None)
        return found

    def _copy_facts(self, table: str) -> None:
        """Copy the allow-listed rows of a metadata table, name and value."""
        query = f"SELECT name, value FROM source.{_quoted(table)} ORDER BY rowid"
        kept = []
        for name, value in self._db.execute(query).fetchall():
            name, value = str(name), "" if value is None else str(value)
            if _ENVIRONMENT.fullmatch(name):
                known, what = _VARIABLE.fullmatch(value), "environment variables"
            elif table == "META_DATA_CAPTURE":
                known, what = _OPTION.fullmatch(name), "capture settings"
                known = known and _PLAIN_VALUE.fullmatch(value)
            else:
                known, what = _EXPORT_FACT.fullmatch(name), "export facts"
                known = known and _PLAIN_VALUE.fullmatch(value)
            if known:
                kept.append((name, self._clean(value)))
            else:
                self._removed[what] += 1
        insert = f"INSERT INTO main.{_quoted(table)} (name, value) VALUES (?, ?)"
        self._db.executemany(insert, kept)

    def _share_stacks(self) -> None:
        """Keep one of the native call stacks that have the same frames.

        nsys stores the stack of every call: they can be half of an export.
        """
        stacks, calls = "main.CUDA_CALLCHAINS", "main.CUPTI_ACTIVITY_KIND_RUNTIME"
        names = {name for name, *_ in self._columns("CUDA_CALLCHAINS")}
        called = {name for name, *_ in self._columns("CUPTI_ACTIVITY_KIND_RUNTIME")}
        if "id" not in names or "callchainId" not in called:
            return
        quoted = (f"quote({_quoted(name)})" for name in sorted(names - {"id"}))
        columns = " || ' ' || ".join(quoted)
        frames = (
            f"SELECT id, {columns} AS frame FROM {stacks} "
            "WHERE typeof(id) = 'integer' ORDER BY id, frame"
        )
        whole = f"SELECT id, group_concat(frame) AS frames FROM ({frames}) GROUP BY id"
        repeated = "SELECT id FROM temp.stacks WHERE id != kept"
        for statement in (
            "CREATE TEMP TABLE stacks (id INTEGER PRIMARY KEY, kept INTEGER)",
            "INSERT INTO temp.stacks "
            f"SELECT id, min(id) OVER (PARTITION BY frames) FROM ({whole})",
            f"UPDATE {calls} SET callchainId = (SELECT kept FROM temp.stacks "
            f"WHERE id = callchainId) WHERE callchainId IN ({repeated})",
            f"DELETE FROM {stacks} WHERE id IN ({repeated})",
            "DROP TABLE temp.stacks",
        ):
            self._db.execute(statement)

    def _copy_strings(self) -> None:
        """Copy the strings that a copied row refers to."""
        wanted = set(self._strings)
        for table, kinds in _KINDS.items():
            if table not in self._stored:
                continue
            names = {name for name, *_ in self._columns(table)}
            for column in names & {n for n, k in kinds.items() if k in NAMED}:
                query = f"SELECT DISTINCT {_quoted(column)} FROM main.{_quoted(table)}"
                wanted.update(row[0] for row in self._db.execute(query))
        rows = self._db.execute("SELECT id, value FROM source.StringIds").fetchall()
        kept = [
            (key, self._text(value.encode()))
            for key, value in rows
            if key in wanted and isinstance(value, str)
        ]
        self._removed["strings"] += len(rows) - len(kept)
        if self._names is not None:
            kept += self._names.strings
            self._removed["names"] += self._names.count
        self._db.executemany(
            "INSERT INTO main.StringIds (id, value) VALUES (?, ?)", kept
        )

    # Names --------------------------------------------------------------------

    def _renaming(self) -> Names:
        """Replacements for the names of the source, and SQL functions for them."""
        texts: dict[int, str] = {}
        if "StringIds" in self._stored:
            rows = self._db.execute("SELECT id, value FROM source.StringIds")
            texts = {key: self._clean(v) for key, v in rows if isinstance(v, str)}
        programs: set[str] = set()
        if "PROCESSES" in self._stored:
            rows = self._db.execute("SELECT name FROM source.PROCESSES")
            programs = {self._clean(_base(str(name))) for (name,) in rows if name}
        names = Names(texts, programs)
        for name, arguments, function in (
            ("kernel_key", 1, names.kernel_key),
            ("full_kernel_key", 2, names.full_kernel_key),
            ("function_key", 1, names.function_key),
            ("file_key", 1, names.file_key),
            ("thread_key", 1, names.thread_key),
            ("nvtx_key", 2, names.nvtx_key),
            ("nvtx_text", 2, self._nvtx_text),
        ):
            self._db.create_function(name, arguments, function)
        return names

    def _renamed_columns(
        self, table: str, columns: set[str]
    ) -> dict[tuple[str, str], tuple[str, str]]:
        """Type and SQL of the columns with names, by table and column."""
        if self._names is None:
            return {}
        kernels, stacks = "CUPTI_ACTIVITY_KIND_KERNEL", "CUDA_CALLCHAINS"
        short = "shortName" if "shortName" in columns else "-1"
        kind = self._nvtx_kind(columns) if table == "NVTX_EVENTS" else ""
        return {
            (kernels, "shortName"): ("integer", "kernel_key(shortName)"),
            (kernels, "demangledName"): (
                "integer",
                f"full_kernel_key({short}, demangledName)",
            ),
            (stacks, "symbol"): ("integer", "function_key(symbol)"),
            (stacks, "module"): ("integer", "file_key(module)"),
            ("ThreadNames", "nameId"): ("integer", "thread_key(nameId)"),
            ("NVTX_EVENTS", "text"): (
                "text",
                f"nvtx_text(CAST(text AS BLOB), {kind})",
            ),
            ("NVTX_EVENTS", "textId"): ("integer", f"nvtx_key(textId, {kind})"),
        }

    def _nvtx_kind(self, columns: set[str]) -> str:
        """SQL for what the text of a row of NVTX is: RANGE, OWN or DOMAIN."""
        if "eventType" not in columns:
            return f"'{RANGE}'"
        kinds = f"WHEN eventType = {NVTX_DOMAIN} THEN '{DOMAIN}'"
        if {"globalTid", "domainId"} <= columns:
            pid = _PID_OF.format("globalTid")
            texts = ["text"] if "text" in columns else []
            if "textId" in columns and "StringIds" in self._stored:
                texts += ["(SELECT value FROM source.StringIds WHERE id = textId)"]
            own = (
                f"SELECT {pid}, domainId FROM source.NVTX_EVENTS "
                f"WHERE eventType = {NVTX_DOMAIN} "
                f"AND '{OWN_DOMAIN}' IN ({', '.join(texts)})"
            )
            kinds += f" WHEN ({pid}, domainId) IN ({own}) THEN '{OWN}'"
        return f"CASE {kinds} ELSE '{RANGE}' END"

    def _people(self) -> set[str]:
        """Names of users and hosts, and of programs if they must go."""
        found: set[str] = set()
        tables = {"META_DATA_CAPTURE", "META_DATA_EXPORT", "EXPORT_META_DATA"}
        tables |= {"TARGET_INFO_SYSTEM_ENV"}
        for table in sorted(tables & set(self._stored)):
            columns = {name for name, *_ in self._columns(table)}
            if not {"name", "value"} <= columns:
                continue
            for name, value in self._db.execute(
                f"SELECT name, value FROM source.{table}"
            ):
                text = str(value)
                if _NAMES_SOMEONE.fullmatch(str(name)):
                    found |= {text, text.partition(".")[0]}
                if variable := _NAMING_VARIABLE.match(text):
                    found |= {variable[1], variable[1].partition(".")[0]}
                found |= set(_HOME.findall(text))
        if not self._programs and "PROCESSES" in self._stored:
            names = self._db.execute("SELECT name FROM source.PROCESSES").fetchall()
            found |= {_base(str(name)) for (name,) in names if name}
        people = {
            name
            for name in map(str.strip, found)
            if len(name) > 2 and not _NO_NAMES.fullmatch(name.lower())
        }
        if len(people) > _MAX_PEOPLE:
            raise TraceError(
                f"the export names {len(people)} users and hosts, too many to be true",
                hint=REEXPORT,
            )
        return people

    # Values: called by SQLite, which passes text as bytes ---------------------

    def _text(self, raw: bytes) -> str:
        return self._counted(raw, self._clean)

    def _program(self, raw: bytes) -> str | None:
        if not self._programs:
            self._removed["programs"] += 1
            return None

        def change(text: str) -> str:
            program = self._clean(_base(text))
            return program if self._names is None else self._names.file(program)

        return self._counted(raw, change)

    def _nvtx_text(self, raw: bytes, kind: str) -> str:
        assert self._names is not None
        return self._names.nvtx(self._text(raw), kind)

    def _message(self, raw: bytes) -> str:
        def hidden(word: re.Match[str]) -> str:
            text = word[0]
            return "PATH" if _PATH_SIGN.search(_NO_PATH.sub("", text)) else text

        return self._counted(raw, lambda text: self._clean(_WORD.sub(hidden, text)))

    def _counted(self, raw: bytes, change: Callable[[str], str]) -> str:
        text = raw[:MAX_TEXT].decode("utf-8", "replace")
        changed = change(text)
        self._removed["texts"] += changed != text
        return changed

    def _json(self, raw: bytes) -> str | None:
        frames = decode_json(raw.decode("utf-8", "replace"))
        frames = self._kept(frames)
        return encode_json(frames) if frames else None

    def _blob(self, text: bytes | None, blob: bytes) -> bytes | None:
        """The payload without uninitialised memory, nothing if JSON has it all."""
        self._removed["payloads"] += 1
        if text and decode_json(text.decode("utf-8", "replace")):
            return None
        frames = decode_blob(blob)
        frames = self._kept(frames)
        return encode_blob(frames) if frames else None

    def _kept(self, frames: list[Frame]) -> list[Frame]:
        if (names := self._names) is not None:
            return [
                (names.function_key(function), names.file_key(file), line)
                for function, file, line in frames
            ]
        for function, file, _ in frames:
            self._strings |= {function, file}
        return frames


_PID_OF = "({} >> 24 & 16777215)"


def _expression(
    table: str, name: str, declared: str, kind: Kind | None, empty: str
) -> str:
    """SQL for what is copied of a column; ``empty`` where nothing is."""
    column = _quoted(name)
    if name in _ADDRESSES:
        return f"CASE WHEN {column} IS NULL THEN {empty} ELSE 0 END"
    if kind is Kind.TEXT:
        cleaner = _CLEANERS.get((table, name), "clean")
        cleaned = f"{cleaner}(CAST({column} AS BLOB))"
        return f"CASE typeof({column}) WHEN 'text' THEN {cleaned} ELSE {empty} END"
    if kind is Kind.BLOB:
        cleaned = f"clean_blob(CAST(jsonText AS BLOB), {column})"
        return f"CASE typeof({column}) WHEN 'blob' THEN {cleaned} ELSE {empty} END"
    if declared in ("TEXT", "BLOB"):
        return empty
    number = f"typeof({column}) IN ('integer', 'real')"
    return f"CASE WHEN {number} THEN {column} ELSE {empty} END"


def _cleaner(people: set[str]) -> Callable[[str], str]:
    """A function that takes folders, addresses and these names out of a text."""
    longest_first = sorted(people, key=lambda name: (-len(name), name))
    names = "|".join(map(re.escape, longest_first)) or r"(?!)"
    someone = re.compile(rf"(?<![A-Za-z0-9])(?:{names})(?![A-Za-z0-9])")

    def clean(text: str) -> str:
        if _ADDRESS.fullmatch(text):
            return "0x0"
        text = _URL.sub("URL", text)
        if _WHOLE_PATH.fullmatch(text):
            text = _tail(text)
        else:
            text = _PATH.sub(lambda match: _tail(match[0]), text)
        return someone.sub("NAME", _HOME.sub("", text))

    return clean


def _tail(path: str) -> str:
    """The end of a path that says which file it is but not whose."""
    package = _PACKAGE.search(path)
    if package:
        tail = package[0].replace("\\", "/")
        return f"/usr/{tail}" if path.startswith(("/usr/lib", "/lib")) else tail
    parts = [part for part in re.split(r"[/\\]+", path) if part]
    if len(parts) < 2 and path.startswith("~"):
        return "home"
    if len(parts) > 1 and parts[-2] in ("home", "Users"):
        return "home"
    base = parts[-1] if parts else "PATH"
    return f"/usr/lib/{base}" if _SYSTEM.match(path) else base


def _base(path: str) -> str:
    return re.split(r"[/\\]", path.strip())[-1]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

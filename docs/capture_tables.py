"""Writes the tables of docs/capture.md from the sample traces.

.venv/bin/python docs/capture_tables.py
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeAlias

import marked

from streamlint import engine
from streamlint.findings import Confidence, Finding, NotAssessed
from streamlint.registry import all_rules
from streamlint.rule import Rule
from streamlint.trace import open_trace
from streamlint.trace.calls import plain_name
from streamlint.trace.tables import TABLES

PAGE = marked.DOCS / "capture.md"
SAMPLES = marked.DOCS.parent / "sample_traces"
MUCH = 0.15
"""Overheads above this are listed one by one."""
SKIPPED = (
    *("cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetCount", "cuDeviceGetName"),
    *("cuDeviceGetUuid", "cuDeviceTotalMem", "cudaDeviceGetAttribute"),
    *("cudaDeviceGetLimit", "cudaDeviceGetStreamPriorityRange", "cudaDeviceSetLimit"),
    *("cudaFuncSetAttribute", "cudaGetLastError", "cudaGraphAddKernelNode"),
    *("cudaGraphAddMemcpyNode1D", "cudaGraphCreate"),
    *("cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", "cudaStreamQuery"),
)
"""Calls seen in recordings of all APIs (nsys 2025.3, H200) and never in others."""
Said: TypeAlias = Sequence[Finding] | NotAssessed
_GPU_TABLES = ("KERNEL", "MEMCPY", "MEMSET")


# Traces without something ------------------------------------------------------


def without_nvtx(db: sqlite3.Connection) -> None:
    """As recorded without ``-t nvtx``."""
    db.execute("DROP TABLE IF EXISTS NVTX_EVENTS")


def without_all_apis(db: sqlite3.Connection) -> None:
    """As recorded without ``--cuda-trace-all-apis=true``."""
    names = db.execute("SELECT id, value FROM StringIds").fetchall()
    ids = [(key,) for key, name in names if plain_name(name) in SKIPPED]
    db.executemany("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE nameId = ?", ids)
    _option(db, "CUDA_SKIP_SOME_API_CALLS", "true")


def without_memory_usage(db: sqlite3.Connection) -> None:
    """As recorded without ``--cuda-memory-usage=true``."""
    for what in ("USAGE", "POOL"):
        db.execute(f"DROP TABLE IF EXISTS CUDA_GPU_MEMORY_{what}_EVENTS")
    _option(db, "COLLECT_GPU_MEMORY_USAGE", "false")


def without_graph_nodes(db: sqlite3.Connection) -> None:
    """As recorded without ``--cuda-graph-trace=node``: a graph is one operation."""
    place = "globalPid, deviceId, contextId, streamId, correlationId"
    tables = [f"CUPTI_ACTIVITY_KIND_{name}" for name in _GPU_TABLES]
    tables = [name for name in tables if _has(db, name)]
    rows = " UNION ALL ".join(
        f"SELECT start, end, {place}, graphNodeId FROM {name} "
        "WHERE graphNodeId IS NOT NULL"
        for name in tables
    )
    db.execute(
        "CREATE TABLE IF NOT EXISTS CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, "
        "end INTEGER, globalPid INTEGER, deviceId INTEGER, contextId INTEGER, streamId "
        "INTEGER, correlationId INTEGER, graphId INTEGER, graphExecId INTEGER)"
    )
    db.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start, end, globalPid, deviceId, "
        "contextId, streamId, correlationId, graphId, graphExecId) "
        "SELECT MIN(start), MAX(end), globalPid, deviceId, contextId, MIN(streamId), "
        f"correlationId, graphNodeId >> 32, graphNodeId >> 32 FROM ({rows}) "
        "GROUP BY globalPid, deviceId, contextId, correlationId"
    )
    for name in tables:
        db.execute(f"DELETE FROM {name} WHERE graphNodeId IS NOT NULL")
    _option(db, "CUDA_GRAPH_TRACE_OPTIONS:MODE", "Graph")


def _has(db: sqlite3.Connection, table: str) -> bool:
    found = db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,))
    return found.fetchone() is not None


def _option(db: sqlite3.Connection, name: str, value: str) -> None:
    db.execute(
        "UPDATE META_DATA_CAPTURE SET value = ? WHERE name LIKE ?", (value, f"%{name}")
    )


class Cut(NamedTuple):
    """Takes something away, which concerns rules that read one of these tables."""

    take: Callable[[sqlite3.Connection], None]
    tables: frozenset[str] = frozenset(TABLES)


WITHOUT = {
    "without NVTX": Cut(without_nvtx),
    "without all APIs": Cut(without_all_apis),
    "without memory usage": Cut(
        without_memory_usage, frozenset({"memory_events", "pool_events"})
    ),
    "graphs as a whole": Cut(without_graph_nodes),
}
ALONE = "`-t cuda` alone"


# Rules -------------------------------------------------------------------------


class Row(NamedTuple):
    """What a rule says of its sample, and what changes with less evidence."""

    rule: str
    whole: str
    cells: tuple[str, ...]
    recaptures: tuple[str, ...]


def row(rule: Rule) -> Row:
    """Judge the rule's own sample as recorded, and without each part."""
    sample = SAMPLES / rule.name / "bad.sqlite"
    if rule.judges_capture and not sample.exists():
        return Row(rule.name, "judges the recording", ("",) * (len(WITHOUT) + 1), ())
    whole, read, graphs = _said(rule, sample, ())
    found: list[Said] = []
    for cut in WITHOUT.values():
        concerned = not read.isdisjoint(cut.tables)
        if cut.take is without_graph_nodes:
            concerned = graphs
        found.append(_said(rule, sample, (cut,))[0] if concerned else whole)
    found.append(_said(rule, sample, tuple(WITHOUT.values()))[0])
    return Row(
        rule.name,
        _words(whole),
        tuple(_changed(whole, less) for less in found),
        tuple(dict.fromkeys(o.recapture for o in found if isinstance(o, NotAssessed))),
    )


def _said(
    rule: Rule, sample: Path, cuts: Sequence[Cut]
) -> tuple[Said, frozenset[str], bool]:
    """The outcome, the tables that were read, and whether any row is of a graph."""
    with tempfile.TemporaryDirectory() as folder:
        path = sample
        if cuts:
            path = Path(folder) / "less.sqlite"
            shutil.copyfile(sample, path)
            with closing(sqlite3.connect(path)) as db, db:
                for cut in cuts:
                    cut.take(db)
        with open_trace(path) as trace:
            (judgement,) = engine.lint(trace, [rule]).judgements
            read = frozenset(table.name for table in trace.tables_read)
            graphs = trace.gpu_ops["graph_node_id"].count() > 0
    if judgement.crashed is not None:
        raise RuntimeError(judgement.crashed.traceback)
    return judgement.not_assessed or judgement.findings, read, graphs


def _words(said: Said) -> str:
    if isinstance(said, NotAssessed):
        return "not assessed"
    if not said:
        return "nothing"
    return f"{said[0].severity.value}{_share(said[0])}"


def _share(finding: Finding) -> str:
    share = finding.cost.share
    return "" if share is None else f", {share:.0%}".replace("%", " %")


def _changed(whole: Said, less: Said) -> str:
    """What is different; empty where nothing is."""
    if isinstance(whole, NotAssessed) or isinstance(less, NotAssessed) or not less:
        return "" if _words(less) == _words(whole) else _words(less)
    ranks = list(Confidence)
    words = [] if _words(less) == _words(whole) else [_words(less)]
    if ranks.index(less[0].confidence) > ranks.index(whole[0].confidence):
        words.append("less certain")
    return ", ".join(words)


def rules_table(rows: Sequence[Row]) -> str:
    """The rows, and what the rules ask for where they can't tell."""
    needed = {TABLES[name].recorded_by for rule in all_rules() for name in rule.needs}
    flags = ", ".join(f"`{flag}`" for flag in sorted(needed))
    lines = [
        f"What a rule can't do without is recorded by {flags}.",
        "",
        "| rule | all recorded | " + " | ".join((*WITHOUT, ALONE)) + " |",
        "|---" * (len(WITHOUT) + 3) + "|",
    ]
    asked: dict[str, list[str]] = defaultdict(list)
    for one in rows:
        lines.append(line(one))
        for recapture in one.recaptures:
            asked[recapture].append(one.rule)
    lines += ["", "What those that can't tell then ask for:", ""]
    lines += [f"- {', '.join(names)}: *{asks}*" for asks, names in asked.items()]
    return "\n".join(lines)


def line(one: Row) -> str:
    """The row as a line of the table."""
    name = f"[{one.rule}](rules/{one.rule}.md)"
    return f"| {' | '.join((name, one.whole, *one.cells))} |"


# Overhead ----------------------------------------------------------------------


class Overhead(NamedTuple):
    """Times of a sample's program, us, unprofiled and recorded in two ways."""

    program: str
    plain: float
    default: float
    full: float

    @property
    def added(self) -> tuple[float, float]:
        """What recording adds, as parts of the unprofiled time."""
        return self.default / self.plain - 1, self.full / self.plain - 1


def overheads() -> list[Overhead]:
    """One entry a program, from `provenance.json` beside the samples."""
    found = []
    for path in sorted(SAMPLES.rglob("provenance.json")):
        for name, facts in json.loads(path.read_text(encoding="utf-8")).items():
            times = facts.get("region_us", {})
            if {"plain", "default", "full"} <= times.keys():
                folder = path.parent.relative_to(SAMPLES).as_posix()
                medians = (
                    times[mode]["median"] for mode in ("plain", "default", "full")
                )
                program = f"{folder} {name.removesuffix('.sqlite')}"
                found.append(Overhead(program, *medians))
    return found


def overhead_table() -> str:
    """How many programs suffer how much, and those that suffer most."""
    found = overheads()
    lines = [
        "| recording adds | nothing set | everything |",
        "|---|---|---|",
        _counts(found, "less than 2 %", -1, 0.02),
        _counts(found, "2 to 5 %", 0.02, 0.05),
        _counts(found, f"5 to {MUCH:.0%}".replace("%", " %"), 0.05, MUCH),
        _counts(found, f"more than {MUCH:.0%}".replace("%", " %"), MUCH, 1e9),
        "| median | " + " | ".join(_percent(m) for m in _medians(found)) + " |",
        "",
        f"Programs for which it adds more than {MUCH:.0%}:".replace("%", " %"),
        "",
        "| program | unprofiled | nothing set | everything |",
        "|---|---|---|---|",
    ]
    for one in sorted(found, key=lambda one: -max(one.added)):
        if max(one.added) > MUCH:
            added = " | ".join(_percent(part) for part in one.added)
            lines.append(f"| {one.program} | {one.plain / 1e3:.2f} ms | {added} |")
    return "\n".join(lines)


def _counts(found: Sequence[Overhead], words: str, low: float, high: float) -> str:
    counts = [sum(low <= one.added[mode] < high for one in found) for mode in (0, 1)]
    return f"| {words} | {counts[0]} programs | {counts[1]} programs |"


def _medians(found: Sequence[Overhead]) -> tuple[float, float]:
    return tuple(median(one.added[mode] for one in found) for mode in (0, 1))  # type: ignore[return-value]


def _percent(part: float) -> str:
    return f"{100 * part:+.1f} %" if abs(part) < 0.1 else f"{100 * part:+.0f} %"


if __name__ == "__main__":
    rules = rules_table([row(rule) for rule in all_rules()])
    marked.write(PAGE, {"rules": rules, "overhead": overhead_table()})

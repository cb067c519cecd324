"""Every build of nsys that was seen: each rule says of a known fault what it says on
the newest layout, wherever the build's tables hold the evidence."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from faults import FAULTS
from nsys_layout import Build, builds, column_names
from tracebuilder import TraceBuilder
from typer.testing import CliRunner

from streamlint.cli import app
from streamlint.engine import lint
from streamlint.registry import all_rules, find
from streamlint.trace import open_trace
from streamlint.trace.tables import TABLES

BUILDS = builds()
NEWEST = list(BUILDS)[-1]
READ = {source: table for table in TABLES.values() for source in table.sources}

NO_WORK = "no CUDA activity was recorded"
ALL_LOST = "calls issued GPU work, but no kernel or copy was recorded"
# Which table or column a rule can't do without, and the reason that it gives.
NEEDS = {
    "carveout-switch-serialization": ("GPU.smCount", "how much of the GPU"),
    "cross-context-serialization": ("GPU.id", "which of the contexts ran on one GPU"),
    "depth-first-issue-order": ("GPU.asyncEngines", "how many copy engines"),
    "graph-exec-self-serialization": ("GRAPH_TRACE", "10 of 10 graph launches left no"),
    "l2-persistence-not-reset": ("NVTX_EVENTS", "not among the recorded APIs"),
    "l2-request-clamped-or-unsupported": ("NVTX_EVENTS", "not among the recorded APIs"),
    "l2-setaside-oversubscribed": ("NVTX_EVENTS", "not among the recorded APIs"),
    "l2-setaside-unused": ("NVTX_EVENTS", "not among the recorded APIs"),
    "mempool-trim-thrash": ("POOL_EVENTS", "no table CUDA_GPU_MEMORY_POOL_EVENTS"),
    "pdl-candidate": ("GPU.computeMajor", "which compute capability"),
    "priority-without-effect": ("GPU.smCount", "how much of the GPU"),
    "threads-share-legacy-stream": ("GPU.smCount", "how much of the GPU"),
    "timing-event-as-dependency": ("CUDA_EVENT", "120 event record calls succeeded"),
    "underfilled-serial-kernels": ("GPU.smCount", "how much of the GPU"),
    "wait-on-unrecorded-event": ("SYNC.eventSyncId", "which record a wait is for"),
}
# What a rule says less surely without a table or column that helps it.
HELPS: dict[str, tuple[str, dict[str, object]]] = {
    # Whether two kernels fit on the GPU together decides what a replay saves.
    "allocation-implicit-sync": ("GPU.smCount", {"claim": "upper-bound"}),
    "host-mediated-dependency": ("GPU.smCount", {"claim": "upper-bound"}),
    "launch-blocking": ("GPU.smCount", {"claim": "upper-bound"}),
    "legacy-null-stream-barrier": ("GPU.smCount", {"confidence": "low"}),
    "stream-false-dependency": ("GPU.smCount", {"confidence": "low"}),
    # The model of the GPU tells the rate of pinned copies.
    "pageable-async-copy": ("GPU.id", {"claim": "lower-bound"}),
    # Without the nodes two graphs of one place may be different ones.
    "graph-reinstantiated": ("GRAPH_NODES", {"confidence": "low"}),
    # Without NVTX the first iteration counts as well.
    "device-sync-in-steady-state": ("NVTX_EVENTS", {"occurrences": 20}),
}
NICKNAMES = {
    "CUDA_EVENT": ("CUPTI_ACTIVITY_KIND_CUDA_EVENT",),
    "GPU": ("TARGET_INFO_GPU",),
    "GRAPH_NODES": ("CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS"),
    "GRAPH_TRACE": ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE",),
    "POOL_EVENTS": ("CUDA_GPU_MEMORY_POOL_EVENTS",),
    "SYNC": ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",),
}


class Said(NamedTuple):
    """What a finding claims, as far as the evidence for it is the same."""

    severity: str
    occurrences: int
    claim: str
    confidence: str


def has(build: Build, what: str) -> bool:
    """Whether a build has a table, or a column of one ("SYNC.eventSyncId")."""
    nickname, _, column = what.partition(".")
    for table in NICKNAMES.get(nickname, (nickname,)):
        if table in build.layout:
            columns = column_names(build.layout[table])
            # The older graph table of that name is about something else.
            wanted = "graphNodeId" if nickname == "GRAPH_NODES" else column
            if not wanted or wanted in columns:
                return True
    return False


def newest() -> Build:
    """The newest build with every table that any build has, as its last one has it."""
    layout = {
        table: c for build in BUILDS.values() for table, c in build.layout.items()
    }
    return BUILDS[NEWEST]._replace(layout=layout)


def outcome(rule: str, program: TraceBuilder, build: Build, path: Path) -> object:
    """What the rule says of the program in that build: a reason, or findings."""
    trace = open_trace(program.write_as(build, path))
    (judgement,) = lint(trace, [find(rule)]).judgements
    trace.close()
    assert judgement.crashed is None, judgement.crashed
    if judgement.not_assessed is not None:
        return judgement.not_assessed.reason
    return [
        Said(f.severity.value, f.occurrences, f.cost.claim.value, f.confidence.value)
        for f in judgement.findings
    ]


def known_part(build: Build, program: TraceBuilder) -> object:
    """All of a build that can matter: what streamlint reads of tables with rows."""
    return frozenset(
        (source, column.source)
        for source, table in READ.items()
        if source in build.layout
        for column in table.columns
        if column.source in column_names(build.layout[source])
        and any(program.rows.get(name) for name in (source, *table.sources))
    )


def expected(rule: str, said: list[Said], build: Build) -> object:
    """What the rule has to say in that build, by what the build lacks."""
    gpu = [t for t in build.layout if t.startswith("CUPTI_ACTIVITY_KIND_")]
    if "CUPTI_ACTIVITY_KIND_RUNTIME" not in gpu:
        return NO_WORK
    if "CUPTI_ACTIVITY_KIND_KERNEL" not in gpu and rule != "failed-cuda-call":
        return ALL_LOST
    if rule in NEEDS and not has(build, NEEDS[rule][0]):
        return NEEDS[rule][1]
    if rule == "capture-not-evaluable" and not has(build, "DIAGNOSTIC_EVENT"):
        return [*said, Said("info", 1, "none", "high")]
    if rule in HELPS and not has(build, HELPS[rule][0]):
        return [one._replace(**HELPS[rule][1]) for one in said]  # type: ignore[arg-type]
    return said


def test_every_rule_has_a_fault() -> None:
    assert set(FAULTS) == {rule.name for rule in all_rules()}
    assert set(NEEDS) | set(HELPS) < set(FAULTS)


@pytest.mark.parametrize("rule", FAULTS)
def test_a_fault_is_judged_alike_in_every_build(rule: str, tmp_path: Path) -> None:
    program = TraceBuilder()
    program.diagnostic("info", "Profiling has started.")
    FAULTS[rule](program)
    path = tmp_path / "t.sqlite"
    said = outcome(rule, program, newest(), path)
    assert isinstance(said, list), said
    assert said

    # Builds that differ in nothing that is read share one file.
    seen: dict[object, object] = {}
    for product, build in BUILDS.items():
        part = known_part(build, program)
        if part not in seen:
            seen[part] = outcome(rule, program, build, path)
        wanted, got = expected(rule, said, build), seen[part]
        if isinstance(wanted, str):
            assert isinstance(got, str), (product, got)
            assert wanted in got, product
        else:
            assert got == wanted, product


@pytest.mark.parametrize("product", BUILDS)
def test_the_exact_tables_of_every_build_are_read(product: str, tmp_path: Path) -> None:
    """All tables and columns, with rows or without, and all rules."""
    program = TraceBuilder()
    FAULTS["pageable-async-copy"](program)
    program.thread("main")
    program.memory_event("allocation", 64, 125)
    program.overhead("CUPTI Buffer flush", 60, 70)
    path = program.write_as(BUILDS[product], tmp_path / "t.sqlite")
    trace = open_trace(path)
    assert set(trace.table_names) == set(BUILDS[product].layout)
    assert (trace.capture.exporter or product) == product
    trace.close()

    done = CliRunner().invoke(app, ["lint", str(path)])

    no_work = not has(BUILDS[product], "CUPTI_ACTIVITY_KIND_KERNEL")
    assert done.exit_code == (3 if no_work else 1), done.output
    assert (
        "pageable-async-copy" in done.output.partition("not assessed")[0]
    ) != no_work


# As another tool left them: sample_traces/extra/2026.1.1_cut_down_tables.sqlite.
CUT_DOWN = {
    "StringIds": "id! value:TEXT",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start end deviceId streamId correlationId shortName "
    "demangledName gridX gridY gridZ blockX blockY blockZ",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end correlationId globalTid nameId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start end deviceId streamId correlationId copyKind "
    "bytes",
    "META_DATA_EXPORT": "name:TEXT value:TEXT",
    "TARGET_INFO_GPU": "id name:TEXT",
}


@pytest.mark.parametrize("rule", [rule for rule in FAULTS if rule != "busy-poll"])
def test_no_fault_is_called_clean_in_cut_down_tables(rule: str, tmp_path: Path) -> None:
    """(Unfinished queries leave nothing in these tables that could be missed.)"""
    program = TraceBuilder()
    FAULTS[rule](program)
    layout = {table: columns.split() for table, columns in CUT_DOWN.items()}
    build = BUILDS[NEWEST]._replace(layout=layout)

    assert outcome(rule, program, build, tmp_path / "t.sqlite")


# Newer ones -----------------------------------------------------------------------


def note(schema: str, tmp_path: Path) -> str:
    """What `streamlint info` says of an export of that schema."""
    program = TraceBuilder()
    program.diagnostic("info", "Profiling has started.")
    FAULTS["pageable-async-copy"](program)
    newer = newest()._replace(product="2027.1.0.1", schema=schema)
    done = CliRunner().invoke(
        app, ["info", str(program.write_as(newer, tmp_path / "t.sqlite"))]
    )
    assert done.exit_code == 0
    assert "pageable-async-copy" in done.output.partition("can be judged")[2]
    return " ".join(done.output.split())


@pytest.mark.parametrize("schema", ["3.101.2", "4.0.0"])
def test_a_newer_schema_loads_with_a_note(schema: str, tmp_path: Path) -> None:
    assert (
        f"the export's schema {schema.rpartition('.')[0]} is newer than 3.28"
        in note(schema, tmp_path)
    )


@pytest.mark.parametrize("schema", ["3.28.99", "", "new"])
def test_known_and_unstated_schemas_load_without_one(
    schema: str, tmp_path: Path
) -> None:
    assert "is newer than" not in note(schema, tmp_path)


def test_unknown_tables_and_columns_are_ignored(tmp_path: Path) -> None:
    program = TraceBuilder()
    FAULTS["pageable-async-copy"](program)
    known = newest()
    layout = {
        table: ["before:TEXT!", *columns, "after!"]
        for table, columns in known.layout.items()
    }
    layout["CUPTI_ACTIVITY_KIND_TELEPORT"] = ["start!", "end!", "where:TEXT"]
    program.row("CUPTI_ACTIVITY_KIND_TELEPORT", start=1, end=2, where="there")
    rule, path = "pageable-async-copy", tmp_path / "t.sqlite"

    strange = outcome(rule, program, known._replace(layout=layout), path)

    assert strange == outcome(rule, program, known, path)
    assert strange

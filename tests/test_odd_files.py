"""Odd recordings: what each real one has to say, and files like those that are rarer.

Each expectation was checked against the rows of the file, not taken from the tool.
"""

from __future__ import annotations

import lzma
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import test_samples as samples
from faults import FAULTS
from tracebuilder import TraceBuilder
from typer.testing import CliRunner

from streamlint.cli import app
from streamlint.completeness import defects
from streamlint.engine import Report, lint
from streamlint.errors import TraceError
from streamlint.findings import Finding, Severity
from streamlint.registry import all_rules, find
from streamlint.trace import open_trace

EXTRA = Path(__file__).parents[1] / "sample_traces/extra"
ODD = Path(__file__).parent / "data/odd"
MAX_BYTES = 3_000_000

FAILED = ("failed-cuda-call", 1)
LIMIT = "cudaDeviceSetLimit, which reserves L2, is not among the recorded APIs"
NO_ACTIVITY = "no CUDA activity was recorded"
NOT_STARTED = 'nsys: "CUDA profiling might have not been started correctly"'
PERHAPS = 'nsys: "Not all CUDA events might have been collected"'


class Says(NamedTuple):
    """What a file has to say: its findings above info, as (rule, occurrences).

    ``reasons`` are parts of the reasons why rules can't judge it, by rule; "*" stands
    for every rule about the program. ``lacks`` are the kinds of its defects.
    """

    exit_code: int
    alarms: tuple[tuple[str, int], ...] = ()
    reasons: dict[str, str] = {"l2-setaside-unused": LIMIT}  # noqa: RUF012
    lacks: tuple[str, ...] = ()


def nothing(*reasons: str, lacks: tuple[str, ...] = ()) -> Says:
    return Says(3, (), dict.fromkeys(reasons and ("*",), reasons[0]), lacks)


APIS = (FAILED, FAILED, FAILED)
SAYS = {
    # shared/traces/schema -----------------------------------------------------------
    # Three calls fail on purpose (returnValue 1, 1, 2); the program polls an event and
    # a stream until a kernel of 0.5 ms is done. Graphs were traced as a whole.
    "apis_def": Says(1, (*APIS, ("busy-poll", 733), ("busy-poll", 746))),
    "all_tables_2025.3.2": Says(1, (*APIS, ("busy-poll", 733), ("busy-poll", 746))),
    # The same with all APIs recorded, and its three graph launches by node.
    "apis_all": Says(
        1,
        (*APIS, ("busy-poll", 663), ("busy-poll", 684)),
        {"l2-request-clamped-or-unsupported": "a limit of the device is set"},
        ("graphs traced by node",),
    ),
    # The same in two forked processes whose correlation ids collide (1120 of 1930);
    # their parent makes one call, of no work.
    "forkp": Says(
        1,
        (*APIS, *APIS, *(("busy-poll", n) for n in (736, 738, 748, 1025))),
    ),
    # Three contexts and a green one, each with its own NULL stream (7, 14, 21), and
    # kernels of 1 us that never overlap.
    "ctxs": Says(0, lacks=("profiler overhead",)),
    # Killed, and ended by _exit, before CUPTI flushed: one call of 50 launches is left.
    "die9": nothing(f"{NO_ACTIVITY} ({PERHAPS})", lacks=("events perhaps lost",)),
    "dieexit": nothing(f"{NO_ACTIVITY} ({PERHAPS})", lacks=("events perhaps lost",)),
    "nocuda": nothing("CUDA was not traced"),
    # Three threads with default streams of their own (13 to 15) and one kernel each on
    # the legacy one (7), after all of theirs.
    "ptds": Says(0, lacks=("profiler overhead",)),
    # 13 kernels between cudaProfilerStart and Stop; the flush of 50 ms runs beside the
    # last three, which take 47 ms.
    "range": Says(0, lacks=("partial range", "profiler overhead")),
    # 54 page migrations, no copy; two kernels.
    "um": Says(0),
    # Full sets of tables without a row of CUDA.
    "all_tables_empty_2022.4.2": nothing(
        NO_ACTIVITY, lacks=("no messages of the profiler",)
    ),
    "all_tables_empty_2023.4.4": nothing(
        "CUDA was not traced", lacks=("no messages of the profiler",)
    ),
    "all_tables_empty_2024.2.3": nothing("CUDA was not traced"),
    # shared/traces/public ------------------------------------------------------------
    "2022.4.2_no_cuda_rows": nothing(
        NO_ACTIVITY, lacks=("no messages of the profiler",)
    ),
    "2023.1.2_gtls_profile": nothing(f"{NO_ACTIVITY} ({NOT_STARTED})"),
    # 23 419 kernels, all on the NULL stream, which is the only one; the GPU is busy for
    # 2.21 of 2.28 s. Copies are small, pinned or on the device.
    "2024.6.2_gtls_null_stream_only": Says(0, lacks=("no messages of the profiler",)),
    # cuInit, cuCtxSetCurrent and cuStreamCreate are all that is left; 49 of 50 buffers
    # came back, and the driver is newer than that nsys.
    "2025.1.3_gemm": nothing(
        f"none issued a kernel or a copy ({PERHAPS})",
        lacks=("buffers not collected", "driver newer than nsys"),
    ),
    # Allocates and creates 16 streams, and issues a memset only.
    "2025.5.1_api_rows_without_gpu_rows": nothing(
        "22 CUDA calls were recorded, but none issued a kernel or a copy"
    ),
    # Cut down by another tool to 400 kernels of one stream and their launches, with
    # times from the first kernel on, which therefore seems to have none.
    "2026.1.1_cut_down_tables": Says(
        0,
        (),
        {
            "failed-cuda-call": "doesn't hold return values",
            "priority-without-effect": "no table TARGET_INFO_CUDA_STREAM",
        },
        ("invalid rows", "no messages of the profiler"),
    ),
    "2026.1.1_four_stream_pipeline": Says(0),
    # One copy engine: each upload stands behind a download that waits for its kernel.
    "2026.1.1_single_final_sync": Says(1, (("depth-first-issue-order", 3),)),
    # Cut out of a run 400 ms deep in its queue: the calls of the first half of the GPU
    # work are missing, and the GPU work of the second half of the calls.
    "2026.2.1_two_rank_trimmed": Says(
        3,
        (),
        {
            "host-sync-drains-gpu": "2280 of 4372 launches and copies left no row",
            "cross-context-serialization": "2280 of 4372 launches",
            "wait-on-unrecorded-event": "236 event record calls succeeded",
        },
        ("launches without GPU rows", "GPU rows without calls", "partial range"),
    ),
    "2026.x_julia_async": nothing(f"{NO_ACTIVITY} ({NOT_STARTED})"),
    # shared/traces/h200x2 ------------------------------------------------------------
    # 333 calls, no work: nsys failed on import.
    "jax_lossy_capture": nothing(
        'none issued a kernel or a copy (nsys: "Error when processing events")',
        lacks=("events lost on import",),
    ),
    # Each process launches from four threads into its legacy stream, all at once; they
    # share a GPU, or have one each, which both call device 0.
    "two_procs_one_gpu": Says(
        1, (("threads-share-legacy-stream", 3),) * 2, {}, ("profiler overhead",)
    ),
    "two_procs_two_gpus": Says(
        1, (("threads-share-legacy-stream", 3),) * 2, {}, ("profiler overhead",)
    ),
}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a name, from the samples or unpacked from the tests' own."""
    folder = tmp_path_factory.mktemp("odd")

    def path(name: str) -> Path:
        packed = ODD / f"{name}.sqlite.xz"
        if not packed.exists():
            return EXTRA / f"{name}.sqlite"
        target = folder / f"{name}.sqlite"
        target.write_bytes(lzma.decompress(packed.read_bytes()))
        return target

    return path


def report(path: Path) -> Report:
    trace = open_trace(path)
    found = lint(trace, all_rules())
    trace.close()
    assert found.crashed == []
    return found


def above_info(found: Report) -> list[tuple[str, int]]:
    return sorted(
        (rule.name, finding.occurrences)
        for rule, finding in found.findings
        if finding.severity is not Severity.INFO
    )


@pytest.mark.parametrize("name", SAYS)
def test_a_real_file_says_what_is_in_it(
    name: str, unpacked: Callable[[str], Path]
) -> None:
    says, path = SAYS[name], unpacked(name)
    found = report(path)

    assert above_info(found) == sorted(says.alarms)
    assert found.exit_code(Severity.LOW) == says.exit_code
    reasons = {rule.name: why.reason for rule, why in found.not_assessed}
    wanted = dict(says.reasons)
    if "*" in wanted:
        of_all = wanted.pop("*")
        program = [rule.name for rule in all_rules() if not rule.judges_capture]
        wanted |= dict.fromkeys(program, of_all)
    for rule, part in wanted.items():
        assert part in reasons.get(rule, "assessed"), rule
    assert tuple(d.kind for d in defects(open_trace(path))) == says.lacks


def test_an_aborted_export_is_refused() -> None:
    with pytest.raises(TraceError, match="never finished"):
        open_trace(EXTRA / "aborted_export_2024.2.3.sqlite")


def test_the_stored_files_are_small_and_tell_nothing_about_anyone(
    unpacked: Callable[[str], Path],
) -> None:
    packed = sorted(ODD.iterdir())
    assert {path.name.removesuffix(".sqlite.xz") for path in packed} <= set(SAYS)
    assert sum(path.stat().st_size for path in packed) < MAX_BYTES
    for path in packed:
        whole = unpacked(path.name.removesuffix(".sqlite.xz"))
        assert samples._FOLDER.search(whole.read_bytes()) is None, path.name
        cells = (
            cell
            for table in samples.tables(whole)
            for row in samples.rows(whole, f'SELECT * FROM "{table}"')
            for cell in row
            if isinstance(cell, str)
        )
        found = {m[0] for cell in cells for m in samples._SOMEONE.finditer(cell)}
        assert found <= {samples._NOBODY}, path.name


# Made here: rarer than the ones above -------------------------------------------------


def said(path: Path, rule: str) -> list[tuple[object, ...]]:
    """What the findings of a rule claim, without times of the trace."""
    trace = open_trace(path)
    (judgement,) = lint(trace, [find(rule)]).judgements
    trace.close()
    assert judgement.crashed is None, judgement.crashed
    assert judgement.not_assessed is None, judgement.not_assessed

    def claims(f: Finding) -> tuple[object, ...]:
        return (f.severity, f.confidence, f.occurrences, f.cost, f.message)

    assert judgement.findings
    return [claims(finding) for finding in judgement.findings]


def shift(builder: TraceBuilder, by_ns: int) -> None:
    """Other zero: nsys shifts everything but its own messages."""
    for table, rows in builder.rows.items():
        for row in rows:
            for column in {"start", "end"} & set(row):
                if table != "DIAGNOSTIC_EVENT" and row[column] is not None:
                    row[column] += by_ns


@pytest.mark.parametrize(
    "rule", [rule for rule in FAULTS if not rule.startswith("l2-")]
)
def test_times_may_be_negative_or_those_of_the_wall_clock(
    rule: str, tmp_path: Path
) -> None:
    """``--ts-normalize=true`` adds the time since 1970, 61 bits of ns."""
    builder = TraceBuilder()
    FAULTS[rule](builder)
    at_zero = said(builder.write(tmp_path / "t.sqlite"), rule)

    shift(builder, -2_000_000_000)
    assert said(builder.write(tmp_path / "t.sqlite"), rule) == at_zero
    shift(builder, 2_000_000_000 + 1_795_000_000_123_456_789)
    assert said(builder.write(tmp_path / "t.sqlite"), rule) == at_zero


def exported_with(path: Path, **options: str) -> Path:
    with closing(sqlite3.connect(path)) as db:
        for name, value in options.items():
            db.execute(
                "UPDATE META_DATA_EXPORT SET value=? WHERE name=?",
                (value, f"EXPORT_PARAM_{name}_TO_EXPORT"),
            )
        db.commit()
    return path


def program(rule: str, **more: Any) -> TraceBuilder:
    builder = TraceBuilder(**more)
    builder.diagnostic("info", "Profiling has started.")
    FAULTS[rule](builder)
    return builder


def test_an_export_of_chosen_tables(tmp_path: Path) -> None:
    """Of the GPU's tables alone: what needs calls isn't assessed."""
    builder = program("copy-compute-not-overlapped")
    kept = "CUPTI_ACTIVITY_KIND_KERNEL,CUPTI_ACTIVITY_KIND_MEMCPY"
    for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "DIAGNOSTIC_EVENT"):
        del builder.rows[table]
    path = exported_with(builder.write(tmp_path / "t.sqlite"), TABLES=kept)

    found = report(path)

    assert ("copy-compute-not-overlapped", 10) in above_info(found)
    needy = {rule.name for rule in all_rules() if "runtime_calls" in rule.needs}
    assert needy <= {rule.name for rule, _ in found.not_assessed}
    lacks = [defect.kind for defect in defects(open_trace(path))]
    assert lacks == ["GPU rows without calls", "filtered export"]


def test_an_export_of_a_chosen_time(tmp_path: Path) -> None:
    """The middle of a loop: the fault is there, in as many rounds as were exported."""
    builder = program("pageable-async-copy")
    for table, rows in builder.rows.items():
        if table.startswith("CUPTI"):
            builder.rows[table] = [
                row
                for row in rows
                if row["start"] >= 1_400_000 and row["end"] < 2_500_000
            ]
    path = exported_with(builder.write(tmp_path / "t.sqlite"), TIMES="1.4ms-2.5ms")

    found = report(path)

    assert above_info(found) == [("pageable-async-copy", 6)]
    lacks = [defect.kind for defect in defects(open_trace(path))]
    assert lacks == ["filtered export"]


def test_a_filtered_export_hides_the_wait_that_would_clear(tmp_path: Path) -> None:
    builder = program("unsynchronized-d2h-result")
    path = exported_with(builder.write(tmp_path / "t.sqlite"), TIMES="1ms-2ms")

    reasons = {rule.name: why.reason for rule, why in report(path).not_assessed}

    assert "only chosen tables or times" in reasons["unsynchronized-d2h-result"]


@pytest.mark.parametrize("ends", ["null", "before start", "zero"])
def test_rows_that_never_ended_are_left_out_and_said(ends: str, tmp_path: Path) -> None:
    builder = program("pageable-async-copy")
    whole = said(builder.write(tmp_path / "t.sqlite"), "pageable-async-copy")
    table = "CUPTI_ACTIVITY_KIND_KERNEL"
    builder.layout[table] = [c.rstrip("!") for c in builder.layout[table]]
    first = builder.rows[table][0]
    bad: dict[str, Any] = {
        "null": {"end": None},
        "before start": {"end": first["start"] - 1},
        "zero": {"start": 0, "end": 0},
    }[ends]
    builder.row(table, **{**first, **bad, "correlationId": builder.new_id()})
    builder.nvtx("never closed", 5)
    path = builder.write(tmp_path / "t.sqlite")

    assert said(path, "pageable-async-copy") == whole
    done = CliRunner().invoke(app, ["info", str(path)])
    assert "rows without usable times: 1 of kernels" in " ".join(done.output.split())


def test_green_contexts_share_a_gpu_by_intent(tmp_path: Path) -> None:
    """T27: kernels of two green contexts that take turns are no fault."""
    rule = "cross-context-serialization"
    builder = program(rule)
    assert said(builder.write(tmp_path / "t.sqlite"), rule)
    for row in builder.rows["CUPTI_ACTIVITY_KIND_KERNEL"]:
        row["greenContextId"] = 2

    assert above_info(report(builder.write(tmp_path / "t.sqlite"))) == []


def test_processes_on_two_gpus_that_both_call_device_0(tmp_path: Path) -> None:
    """T20: what takes turns by chance on two GPUs is no fault."""
    builder = program("cross-context-serialization", gpus=2)
    for row in builder.rows["TARGET_INFO_CUDA_DEVICE"]:
        row["gpuId"] = row["pid"] % 2

    assert above_info(report(builder.write(tmp_path / "t.sqlite"))) == []
    for row in builder.rows["TARGET_INFO_CUDA_DEVICE"]:
        row["gpuId"] = 1
    found = report(builder.write(tmp_path / "t.sqlite"))
    assert ("cross-context-serialization", 19) in above_info(found)


@pytest.mark.parametrize("rule", ["pageable-async-copy", "host-sync-drains-gpu"])
def test_a_second_process_with_the_same_ids_changes_nothing(
    rule: str, tmp_path: Path
) -> None:
    builder = program(rule, gpus=2)
    alone = said(builder.write(tmp_path / "t.sqlite"), rule)
    builder.process(200, gpu=1)
    with builder.at(pid=200):  # ids from 1, times of the same microseconds
        for i in range(60):
            at = 1000 + 100 * i
            builder.kernel("other", stream=13, start=at, end=at + 40)

    assert said(builder.write(tmp_path / "t.sqlite"), rule) == alone


def test_graphs_traced_as_a_whole_are_work(tmp_path: Path) -> None:
    """T21: a GPU that runs graphs alone is not idle, and launches are no kernels."""
    builder = TraceBuilder()
    builder.diagnostic("info", "Profiling has started.")
    builder.stream(13, flag=2)
    for i in range(20):
        call = builder.graph_launch(1000 + 10 * i)
        start = 1010 + 500 * i
        builder.graph_trace(stream=13, start=start, end=start + 498, call=call)
    builder.sync("cudaStreamSynchronize", 13, 1206, 11_012)
    path = builder.write(tmp_path / "t.sqlite")

    found = report(path)

    assert above_info(found) == []
    assert found.exit_code(Severity.LOW) == 0
    assert defects(open_trace(path)) == ()


def test_graphs_that_left_no_rows_are_not_an_idle_gpu(tmp_path: Path) -> None:
    """As nsys before 2024.2 exports them: the GPU seems idle between two kernels."""
    builder = TraceBuilder("2022.4")
    builder.stream(13, flag=2)
    for i in range(20):
        at = 1000 + 500 * i
        builder.kernel("small", stream=13, start=at + 4, end=at + 6)
        builder.graph_launch(at + 8)
        builder.sync("cudaStreamSynchronize", 13, at + 14, at + 494)

    found = report(builder.write(tmp_path / "t.sqlite"))

    assert above_info(found) == []
    assert found.exit_code(Severity.LOW) == 3
    reasons = {rule.name: why for rule, why in found.not_assessed}
    why = reasons["host-sync-drains-gpu"]
    assert why.reason == "20 of 20 graph launches left no row of GPU work"
    assert "--cuda-graph-trace=node" in why.recapture

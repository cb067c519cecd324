"""parquetdir exports: the same findings as from SQLite, and nothing from bad ones.

The typed columns are those of nsys 2025.3.2, compared by hand with a real folder.
"""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from tracebuilder import TraceBuilder

from streamlint.trace import open_trace
from streamlint.trace.pages import UnsupportedLayout

SAMPLES = Path(__file__).parents[1] / "sample_traces"
UNSIGNED = {
    *("globalPid", "globalTid", "endGlobalTid", "contextId", "streamId", "nameId"),
    *("greenContextId", "bytes", "address", "pid", "graphNodeId", "domainId"),
    *("demangledName", "shortName", "uint64Value", "size"),
}
SMALL = {"deviceId", "correlationId", "eventType", "returnValue", "copyKind", "textId"}
FLAGS = {"isDiscrete", "unresolved", "isGreenContext"}


def parquet_folder(export: Path, folder: Path, *, payloads: bool = True) -> Path:
    """What nsys would have exported as parquetdir, by a SQLite export."""
    folder.mkdir()
    with closing(sqlite3.connect(export)) as db:
        names = db.execute("SELECT name FROM sqlite_master WHERE type='table'")
        for (name,) in names.fetchall():
            cursor = db.execute(f'SELECT * FROM "{name}"')
            columns = [column[0] for column in cursor.description]
            rows = cursor.fetchall()
            frame = pl.DataFrame(
                {c: _column(c, [r[i] for r in rows]) for i, c in enumerate(columns)}
            )
            if not payloads and name == "NVTX_EVENTS":
                lost = [c for c in ("jsonText", "binaryData") if c in columns]
                frame = frame.with_columns(
                    pl.lit(None, pl.String).alias(c) for c in lost
                )
            frame.write_parquet(folder / f"{name}.parquet")
    return folder


def _column(name: str, values: list[object]) -> pl.Series:
    if any(isinstance(value, bytes) for value in values):
        # As nsys does: a text, cut off where it is none.
        texts = [
            value.decode("ascii", "ignore") if isinstance(value, bytes) else None
            for value in values
        ]
        return pl.Series(texts, dtype=pl.String)
    if any(isinstance(value, str) for value in values):
        return pl.Series(values, dtype=pl.String)
    if any(isinstance(value, float) for value in values):
        return pl.Series(values, dtype=pl.Float64)
    series = pl.Series(values, dtype=pl.Int64)
    if name in UNSIGNED:
        return series.reinterpret(signed=False)
    if name in SMALL and (series.drop_nulls() >= 0).all():
        return series.cast(pl.UInt32)
    return series.cast(pl.Boolean) if name in FLAGS else series


def test_ids_of_32_bits_may_be_signed_or_not_and_others_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [7, -5, 2**32 - 5, -(2**31), 2**31, 2**32, -(2**31) - 1, 2**62]
    builder = TraceBuilder()
    for number in range(len(ids)):
        builder.kernel(stream=7, start=100 + 10 * number, end=101 + 10 * number)
    export = builder.write(tmp_path / "t.sqlite")
    with closing(sqlite3.connect(export)) as db:
        sql = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = ? WHERE rowid = ?"
        db.executemany(sql, [(one, row) for row, one in enumerate(ids, start=1)])
        db.commit()
    by_pages = open_trace(export).kernels
    by_parquet = open_trace(parquet_folder(export, tmp_path / "t_pqtdir")).kernels

    def refuse(*_: object, **__: object) -> None:
        raise UnsupportedLayout

    monkeypatch.setattr("streamlint.trace.reader.PageFile", refuse)
    by_cursor = open_trace(export).kernels
    least = -(2**31)
    assert by_pages["stream_id"].to_list() == [7, -5, -5, least, least, *[None] * 3]
    assert by_pages.schema["stream_id"] == pl.Int32
    assert_frame_equal(by_pages, by_cursor)
    assert_frame_equal(by_pages, by_parquet)


def test_rows_are_known_before_they_are_read(tmp_path: Path) -> None:
    export = SAMPLES / "extra" / "torch.sqlite"
    folder = parquet_folder(export, tmp_path / "t_pqtdir")
    assert open_trace(folder).rows == open_trace(export).rows


def streamlint(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "streamlint", *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def judged(trace: Path) -> dict[str, object]:
    done = streamlint("lint", "--isolated", "--exit-zero", "--format", "json", trace)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)["traces"][0]
    del found["path"]
    return found


@pytest.mark.parametrize(
    "sample",
    [
        *("extra/legacy", "extra/torchbt", "extra/misc", "extra/devsync"),
        *("failed-cuda-call/bad", "resource-churn-in-loop/bad"),
        *("cross-context-serialization/bad", "l2-setaside-unused/bad"),
    ],
)
def test_same_findings_as_from_sqlite(sample: str, tmp_path: Path) -> None:
    export = SAMPLES / f"{sample}.sqlite"
    folder = parquet_folder(export, tmp_path / "t_pqtdir")
    before = {file: file.read_bytes() for file in folder.iterdir()}
    assert judged(folder) == judged(export)
    assert {file: file.read_bytes() for file in folder.iterdir()} == before


def test_says_that_payloads_are_missing(tmp_path: Path) -> None:
    export = SAMPLES / "extra" / "torchbt.sqlite"
    folder = parquet_folder(export, tmp_path / "t_pqtdir", payloads=False)
    done = streamlint("lint", "--isolated", "--exit-zero", folder)
    text = " ".join(done.stdout.split())
    assert "the export lacks their payloads" in text
    assert "--include-json=true" in text
    assert "train.py" not in done.stdout
    assert "lacks their payloads" not in streamlint("lint", export).stdout


def test_info_reads_a_folder(tmp_path: Path) -> None:
    export = SAMPLES / "extra" / "legacy.sqlite"
    folder = parquet_folder(export, tmp_path / "legacy_pqtdir")
    told = [
        streamlint("info", path).stdout.splitlines()[1:] for path in (folder, export)
    ]
    assert told[0] == told[1]


def _cut(folder: Path) -> None:
    file = folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet"
    file.write_bytes(file.read_bytes()[:-200])


def _garbage(folder: Path) -> None:
    (folder / "StringIds.parquet").write_bytes(b"PAR1" + os.urandom(500) + b"PAR1")


def _bomb(folder: Path) -> None:
    rows = pl.repeat(1, 200_000_000, dtype=pl.Int64, eager=True).alias("start")
    frame = rows.to_frame().with_columns(pl.lit(2).alias("end"))
    frame.write_parquet(folder / "CUPTI_ACTIVITY_KIND_RUNTIME.parquet")


def _unfinished(folder: Path) -> None:
    file = folder / "META_DATA_EXPORT.parquet"
    pl.read_parquet(file).clear().write_parquet(file)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_cut, "table CUPTI_ACTIVITY_KIND_KERNEL is damaged or cut off"),
        (_garbage, "table StringIds is damaged or cut off"),
        (_bomb, "table CUPTI_ACTIVITY_KIND_RUNTIME is damaged or cut off"),
        (_unfinished, "is an incomplete export"),
    ],
)
def test_damaged_folders_are_errors(harm: object, says: str, tmp_path: Path) -> None:
    folder = parquet_folder(SAMPLES / "extra" / "legacy.sqlite", tmp_path / "bad")
    assert callable(harm)
    harm(folder)
    done = streamlint("lint", folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert done.stderr.count("hint: ") == 1
    assert "Traceback" not in done.stderr


def test_other_folders_are_no_traces(tmp_path: Path) -> None:
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "a.parquet")
    done = streamlint("lint", tmp_path)
    assert done.returncode == 2
    assert "error: " in done.stderr


def test_a_folder_with_a_pattern_in_its_name(tmp_path: Path) -> None:
    export = SAMPLES / "extra" / "legacy.sqlite"
    folder = parquet_folder(export, tmp_path / "[a]*_pqtdir")
    assert judged(folder) == judged(export)


def test_columns_of_other_types_are_null(tmp_path: Path) -> None:
    folder = parquet_folder(SAMPLES / "extra" / "legacy.sqlite", tmp_path / "odd")
    file = folder / "CUPTI_ACTIVITY_KIND_RUNTIME.parquet"
    pl.read_parquet(file).with_columns(
        pl.lit("x").alias("returnValue"), pl.lit(0.5).alias("callchainId")
    ).write_parquet(file)
    assert judged(folder)["findings"]

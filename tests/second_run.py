"""A trace as another run of the same program would have recorded it.

Other process, thread, stream and correlation ids, addresses and times; kernels are
specialized for other argument values, which JIT compilers write into their names.
"""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

_PID_SHIFT = 24
_PID, _TID = 0xFFFFFF << _PID_SHIFT, 0xFFFFFF
_IDS = {
    "correlationId": 5_000,
    "address": 1 << 33,
    "virtualAddress": 1 << 33,
    "start": 987_654_321,
    "end": 987_654_321,
    "timestamp": 987_654_321,
}


def another_run(source: Path, target: Path) -> Path:
    """Write ``target``, as a second capture of ``source``'s program."""
    shutil.copyfile(source, target)
    with closing(sqlite3.connect(target)) as db, db:
        columns = {
            table: {row[1] for row in db.execute(f'PRAGMA table_info("{table}")')}
            for (table,) in db.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table'"
            ).fetchall()
        }
        null_streams = {
            row[0]
            for table, names in columns.items()
            if "nullStreamId" in names
            for row in db.execute(f'SELECT nullStreamId FROM "{table}"')
        }
        db.create_function("pid_", 1, _other_id)
        db.create_function("global_", 1, _other_global)
        db.create_function(
            "stream_",
            1,
            lambda s: 900 - s if s not in {None, *null_streams} and 0 < s < 900 else s,
        )
        for table, names in columns.items():
            sets = [f"{n} = {n} + {_IDS[n]}" for n in sorted(names & set(_IDS))]
            for name in sorted(names):
                if name in ("globalTid", "globalPid", "endGlobalTid"):
                    sets.append(f"{name} = global_({name})")
                elif name in ("pid", "processId"):
                    sets.append(f"{name} = pid_({name})")
                elif name == "streamId":
                    sets.append(f"{name} = stream_({name})")
            if sets:
                db.execute(f'UPDATE "{table}" SET {", ".join(sets)}')
        if "CUPTI_ACTIVITY_KIND_KERNEL" in columns:
            db.execute(
                "UPDATE StringIds SET value = value || '_0d1d2de' || (id % 3) "
                "WHERE id IN (SELECT shortName FROM CUPTI_ACTIVITY_KIND_KERNEL)"
            )
    return target


def _other_global(value: int | None) -> int | None:
    if not value:
        return value
    pid, tid = (value & _PID) >> _PID_SHIFT, value & _TID
    kept = value & ~(_PID | _TID)
    return kept | (_other_id(pid) or 0) << _PID_SHIFT | (_other_id(tid) or 0)


def _other_id(value: int | None) -> int | None:
    return (value + 70_001) % (1 << 22) if value else value

"""What this process may use: CPUs and memory, also inside a container."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60


def cpus() -> int:
    """CPUs that this process may run on, bounded by its cgroup; at least 1."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        count = os.cpu_count() or 1
    for folder in _cgroups():
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdecimal():
            count = min(count, round(int(words[0]) / int(words[1])))
    return max(1, count)


def free_memory() -> int | None:
    """Bytes that can be had without swapping, None where the system doesn't say."""
    free: list[int] = []
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) << 10)
    for folder in _cgroups():
        limit = _number(folder / "memory.max")
        used = _number(folder / "memory.current")
        if limit is not None and used is not None:
            free.append(limit - used + _cached(folder / "memory.stat"))
    version1 = _CGROUP / "memory"
    limit = _number(version1 / "memory.limit_in_bytes")
    used = _number(version1 / "memory.usage_in_bytes")
    if limit is not None and used is not None and limit < _NO_LIMIT:
        free.append(limit - used + _cached(version1 / "memory.stat"))
    return max(0, min(free)) if free else None


def _cgroups() -> list[Path]:
    """The folders of this process's group (version 2) and of those around it."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            own = _CGROUP / line[3:].lstrip("/")
            around = [own, *own.parents]
            return [folder for folder in around if folder.is_relative_to(_CGROUP)]
    return []


def _cached(stat: Path) -> int:
    """Bytes of files that the kernel drops when memory is asked for."""
    for line in _read(stat).splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""

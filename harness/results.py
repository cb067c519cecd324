"""What a run measured: kept beside its raw traces, so that a run can go on later."""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from streamlint.errors import UsageError
from streamlint.files import replacing

FILE = "result.json"
PLAIN, FULL, DEFAULT = "plain", "full", "default"
"""Ways to run a variant: without profiler, with our flags, with nsys's own."""


@dataclass(frozen=True, slots=True)
class Step:
    """One way in which one variant is run; ``take`` counts from 1."""

    variant: str
    mode: str
    take: int = 1

    @property
    def name(self) -> str:
        """Its name in results, and that of its export."""
        take = f".{self.take}" if self.take > 1 else ""
        return f"{self.variant}.{self.mode}{take}"


@dataclass(frozen=True, slots=True)
class Times:
    """Region times in microseconds: of ``runs`` repeats in ``processes`` in all."""

    runs: int
    processes: int
    median: float
    min: float
    max: float

    @classmethod
    def of(cls, processes: list[list[float]]) -> Times:
        """Median and range of all repeats, given by process."""
        regions = [us for process in processes for us in process]
        return cls(
            runs=len(regions),
            processes=len(processes),
            median=round(statistics.median(regions), 2),
            min=min(regions),
            max=max(regions),
        )

    def as_dict(self) -> dict[str, float]:
        """As JSON has it."""
        return asdict(self)


class Result:
    """The steps of one pair that are done; every change is on disk at once.

    ``facts`` is what will be known of how it was measured, ``keys`` has a text for
    every step that changes whenever the step must be done again.
    """

    def __init__(
        self, folder: Path, facts: dict[str, Any], keys: dict[Step, str], *, again: bool
    ) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._facts = facts
        self._keys = keys
        known = {} if again else read(folder).get("steps", {})
        valid = {step.name: key for step, key in keys.items()}
        self._steps: dict[str, dict[str, Any]] = {
            name: step
            for name, step in known.items()
            if step.get("key") == valid.get(name)
            and (step["export"] is None or (folder / step["export"]).is_file())
        }

    def regions(self, step: Step) -> list[float] | None:
        """The region times of ``step``, if it is done."""
        with self._lock:
            found = self._steps.get(step.name)
        return None if found is None else [float(us) for us in found["region_us"]]

    def add(self, step: Step, regions: list[float], export: str | None) -> None:
        """Note that ``step`` is done."""
        with self._lock:
            self._steps[step.name] = {
                "key": self._keys[step],
                "mode": step.mode,
                "variant": step.variant,
                "region_us": regions,
                "export": export,
            }
            text = json.dumps({**self._facts, "steps": self._steps}, indent=1)
            with replacing(self.folder / FILE) as part:
                part.write_text(text + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """The stored result of one pair; nothing if there is none that can be read."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def stored(raw: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and result of every pair below ``raw``; raises `UsageError` if none."""
    files = sorted(raw.rglob(FILE))
    if not files:
        raise UsageError(
            f"{raw} holds no results of a run",
            hint="name the folder that `streamlint harness run --raw` wrote",
        )
    for file in files:
        if found := read(file.parent):
            yield file.parent, found


def processes(result: dict[str, Any], variant: str, mode: str) -> list[list[float]]:
    """Region times of ``variant`` in every process that ran it in ``mode``."""
    return [
        step["region_us"]
        for step in result.get("steps", {}).values()
        if step["mode"] == mode and step["variant"] == variant and step["region_us"]
    ]


def times(result: dict[str, Any], variant: str, mode: str) -> Times | None:
    """Region times of ``variant`` over all takes of ``mode``."""
    found = processes(result, variant, mode)
    return Times.of(found) if found else None


def median_export(result: dict[str, Any], variant: str) -> tuple[str, float] | None:
    """The fully recorded take of ``variant`` whose region time is the median one."""
    takes = sorted(
        (statistics.median(step["region_us"]), str(step["export"]))
        for step in result.get("steps", {}).values()
        if step["mode"] == FULL and step["variant"] == variant
    )
    if not takes:
        return None
    us, export = takes[(len(takes) - 1) // 2]
    return export, us

"""Holds the region times of a run of the harness against those of earlier ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamlint.harness.results import PLAIN, Times, processes, stored
from streamlint.harness.workloads import VARIANTS

BEYOND = 0.01
"""How far outside the range a median may lie: `score` judges no smaller share."""
_SAME = ("source_sha256", "gpu", "driver", "cuda")
"""Facts without which two times are not of the same thing."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Unprofiled times of one variant, in the earlier runs and in the last."""

    name: str
    before: Times
    last: Times

    @property
    def beyond(self) -> float:
        """How far the last median lies outside the earlier range; 0 inside."""
        median, low, high = self.last.median, self.before.min, self.before.max
        return max(1 - median / low, median / high - 1, 0.0)

    @property
    def differs(self) -> bool:
        """Whether the last run does not repeat what was measured before."""
        return self.beyond > BEYOND


def compare(runs: Sequence[Path]) -> list[Compared]:
    """Every variant that the last run timed and an earlier one, built the same.

    Raises `UsageError` for a folder without results.
    """
    *earlier, last = runs
    before: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for folder in earlier:
        for _, result in stored(folder):
            before[str(result["pair"])].append(result)
    compared: list[Compared] = []
    for _, result in stored(last):
        known = [
            one
            for one in before[str(result["pair"])]
            if all(one.get(fact) == result.get(fact) for fact in _SAME)
        ]
        for variant in VARIANTS:
            old = [run for one in known for run in processes(one, variant, PLAIN)]
            new = processes(result, variant, PLAIN)
            if old and new:
                name = f"{result['pair']} {variant}"
                compared.append(Compared(name, Times.of(old), Times.of(new)))
    return compared


def text(compared: Sequence[Compared]) -> Iterator[str]:
    """One line a variant, those furthest outside last, and how many there are."""
    width = max((len(one.name) for one in compared), default=0)
    for one in sorted(compared, key=lambda one: one.beyond):
        outside = f"  {one.beyond:.1%} outside" if one.beyond else ""
        yield (
            f"{one.name:<{width}}  {one.before.median:>10.0f} us "
            f"({one.before.min:.0f} to {one.before.max:.0f})  "
            f"{one.last.median:>10.0f} us{outside}"
        )
    inside = sum(not one.beyond for one in compared)
    differ = sum(one.differs for one in compared)
    yield (
        f"{inside} of {len(compared)} medians lie in the earlier range, "
        f"{len(compared) - inside - differ} at most {BEYOND:.0%} outside, "
        f"{differ} further"
    )

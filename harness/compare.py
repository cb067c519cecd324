"""Holds the region times of two runs of the harness against each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamlint.harness.results import PLAIN, Times, stored, times
from streamlint.harness.workloads import VARIANTS

_SAME = ("source_sha256", "gpu", "driver", "cuda")
"""Facts without which two times are not of the same thing."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Unprofiled times of one variant in both runs."""

    name: str
    first: Times
    second: Times

    @property
    def change(self) -> float:
        """Of the median, as a share of the first."""
        return self.second.median / self.first.median - 1

    @property
    def within(self) -> bool:
        """Whether the second median lies in the range of the first run."""
        return self.first.min <= self.second.median <= self.first.max


def compare(first: Path, second: Path) -> list[Compared]:
    """Every variant that both runs timed, of the same source on the same machine kind.

    Raises `UsageError` for a folder without results.
    """
    before = {result["pair"]: result for _, result in stored(first)}
    return [
        compared
        for _, result in stored(second)
        if (known := before.get(result["pair"]))
        and all(known.get(fact) == result.get(fact) for fact in _SAME)
        for compared in _variants(known, result)
    ]


def _variants(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Compared]:
    for variant in VARIANTS:
        before, after = times(first, variant, PLAIN), times(second, variant, PLAIN)
        if before and after:
            yield Compared(f"{first['pair']} {variant}", before, after)


def text(compared: Sequence[Compared]) -> Iterator[str]:
    """One line a variant, those outside the range last, and how many there are."""
    width = max((len(one.name) for one in compared), default=0)
    for one in sorted(compared, key=lambda one: (not one.within, abs(one.change))):
        yield (
            f"{one.name:<{width}}  {one.first.median:>10.0f} us "
            f"({one.first.min:.0f} to {one.first.max:.0f})  "
            f"{one.second.median:>10.0f} us  {one.change:>+7.1%}"
            f"{'' if one.within else '  outside'}"
        )
    inside = sum(one.within for one in compared)
    yield f"{inside} of {len(compared)} medians lie in the range of the first run"

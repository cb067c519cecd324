"""Numbers with units as people write them: "20us", "64KiB", "0.5%"."""

from __future__ import annotations

import re
from decimal import Decimal

_NS = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NUMBER = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(\S*)\s*", re.ASCII)


def ns_of(text: str) -> int | None:
    """Nanoseconds of "20us" or "1.5 s", None where it is no time with a unit."""
    return _scaled(text, _NS)


def bytes_of(text: str) -> int | None:
    """Bytes of "64KiB", None where it is no size with a unit."""
    return _scaled(text, _BYTES)


def share_of(text: str) -> float | None:
    """0.005 for "0.5%", None where it is no percentage from 0 to 100."""
    found = _NUMBER.fullmatch(text)
    if found is None or found[2] != "%" or Decimal(found[1]) > 100:
        return None
    return float(Decimal(found[1]) / 100)


def ns_text(ns: int) -> str:
    """Exactly this many nanoseconds, in the largest unit without a fraction."""
    return _exact(ns, {"ns": 1, "us": 1_000, "ms": 1_000_000, "s": 1_000_000_000})


def bytes_text(size: int) -> str:
    """Exactly this many bytes, in the largest unit without a fraction."""
    return _exact(size, _BYTES)


def share_text(share: float) -> str:
    """A share of 1 in per cent."""
    return f"{100 * share:.10g}%"


def _scaled(text: str, units: dict[str, int]) -> int | None:
    found = _NUMBER.fullmatch(text)
    if found is None or found[2] not in units:
        return None
    return round(Decimal(found[1]) * units[found[2]])


def _exact(value: int, units: dict[str, int]) -> str:
    unit = max((n, name) for name, n in units.items() if n == 1 or value % n == 0)
    n, name = unit if value else (1, next(iter(units)))
    return f"{value // n}{name}"

"""What a rule can say about a trace: findings, or that it cannot tell."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from streamlint.changes import Change
from streamlint.fingerprint import fingerprint

if TYPE_CHECKING:
    import polars as pl


class Severity(str, Enum):
    """How much a finding matters; `ERROR` is a correctness fault."""

    ERROR = "error"
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    INFO = "info"

    @property
    def rank(self) -> int:
        """0 for the most severe."""
        return list(Severity).index(self)

    def at_least(self, other: Severity) -> bool:
        """Whether this is as severe as ``other`` or more."""
        return self.rank <= other.rank


class Confidence(str, Enum):
    """How sure the evidence makes the finding."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


class Claim(str, Enum):
    """What kind of statement a cost is."""

    WHAT_IF = "what-if"
    UPPER_BOUND = "upper-bound"
    LOWER_BOUND = "lower-bound"
    DIRECT = "direct"
    NONE = "none"


RECORDED, UNPROFILED = "recorded", "unprofiled"
"""The run that a cost is of: as the trace shows it, or as it is without recording."""


class Cost(NamedTuple):
    """Time that a fault costs.

    ``ns`` is nanoseconds and ``share`` its part of the judged region (0 to 1);
    both are None for `Claim.NONE`. ``method`` says in one line how to recompute
    it from the trace, ``basis`` of which run both are: `RECORDED` or `UNPROFILED`.
    """

    claim: Claim
    ns: int | None
    share: float | None
    method: str
    basis: str = RECORDED


class Evidence(NamedTuple):
    """One place on the timeline to look at; times as in the export, ns."""

    start_ns: int
    end_ns: int
    what: str
    correlation_id: int | None = None


class SourceFrame(NamedTuple):
    """A place in code; ``file`` is the module where ``line`` is None.

    That is so for native frames, unless a binary at hand told their lines.
    """

    file: str
    line: int | None
    function: str


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """All calls and operations that a finding is about, as far as it has any.

    Rows of `Trace.runtime_calls` and `Trace.gpu_ops`, or with some of their columns.
    """

    calls: pl.DataFrame | None
    ops: pl.LazyFrame | None


class Where(NamedTuple):
    """Where a finding holds. Empty tuples and None mean "not one place".

    ``source`` are the user's own lines, the most frequent first, and ``stack`` is a
    call stack to the first of them, innermost frame first.
    ``rows`` are what the rest is a summary of; a report doesn't keep them.
    """

    pid: int | None = None
    process: str | None = None
    device: int | None = None
    context: int | None = None
    streams: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    kernels: tuple[str, ...] = ()
    nvtx: tuple[str, ...] = ()
    source: tuple[SourceFrame, ...] = ()
    stack: tuple[SourceFrame, ...] = ()
    rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause at one place.

    ``identity`` names the cause in words that are the same in every run of the
    same program (no ids, addresses or times); the fingerprint is made from it.
    ``change`` is what the fix would alter in the replay of the run. ``ordinal``
    counts findings of one rule and process whose fingerprints would be equal.
    """

    message: str
    severity: Severity
    confidence: Confidence
    cost: Cost
    where: Where
    occurrences: int
    evidence: tuple[Evidence, ...]
    fix: str
    identity: tuple[str, ...]
    change: Change | None = None
    ordinal: int = 0

    def __post_init__(self) -> None:
        """Refuse a finding that shows nothing."""
        if not self.evidence:
            raise ValueError("a finding needs at least one piece of evidence")

    def __reduce__(self) -> tuple[object, ...]:
        """Travel between processes without the change, which a replay indexes."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self), tuple((values | {"change": None}).values())

    def fingerprint(self, rule: str) -> str:
        """16 hex digits, equal over runs of one program (other pids and streams)."""
        return fingerprint(rule, self.identity, self.ordinal)


class NotAssessed(NamedTuple):
    """The trace can't show the fault; ``recapture`` says what would record it."""

    reason: str
    recapture: str


class Crashed(NamedTuple):
    """A bug in a rule; ``summary`` is one line without data from the trace."""

    summary: str
    traceback: str

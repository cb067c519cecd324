"""What a user can set about how a trace is judged: thresholds, and which part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

from streamlint.units import bytes_text, ns_text, share_text

_T = TypeVar("_T", int, float)
_UNITS = ("ns", "bytes", "share", "factor")


@dataclass(frozen=True, slots=True, eq=False)
class Threshold(Generic[_T]):
    """A number that a rule judges by, a module constant beside the check.

    ``name`` is its key in a configuration file. ``unit`` is "ns", "bytes", "share"
    (of 1), "factor" or, for a count, what is counted. ``origin`` says in one sentence
    or two why the ``default`` is what it is.
    """

    name: str
    default: _T
    unit: str
    origin: str

    def text(self, value: int | float) -> str:
        """A value of this threshold as TOML."""
        if self.unit == "ns":
            return f'"{ns_text(int(value))}"'
        if self.unit == "bytes":
            return f'"{bytes_text(int(value))}"'
        if self.unit == "share":
            return f'"{share_text(value)}"'
        return repr(value)

    @property
    def counted(self) -> str:
        """What a count counts, empty for a threshold whose values carry their unit."""
        return "" if self.unit in _UNITS else self.unit


class Scope(NamedTuple):
    """Which part of a trace is judged, instead of what streamlint picks by itself.

    ``nvtx``, ``process`` and ``steady_nvtx`` are glob patterns; ``process`` may be a
    pid. ``start_ns`` and ``end_ns`` count from the start of the recording, as all
    times of an export. ``device`` is as the process counts. ``steady_state`` asks for
    repeated iterations; ``steady_nvtx`` says which ranges they are.
    """

    nvtx: str | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    process: str | None = None
    device: int | None = None
    steady_state: bool = False
    steady_nvtx: str | None = None

    @property
    def timed(self) -> bool:
        """Whether it names times."""
        return self.start_ns is not None or self.end_ns is not None

    @property
    def time(self) -> tuple[int | None, int | None] | None:
        """The times that alone need to be read, None where all does.

        Which iterations repeat, and what lies in NVTX ranges, the whole trace tells.
        """
        if not self.timed or self.nvtx is not None or self.steady_state:
            return None
        return self.start_ns, self.end_ns

    @property
    def explicit(self) -> bool:
        """Whether it leaves out anything, not only says what iterations are."""
        return self._replace(steady_nvtx=None) != WHOLE


WHOLE = Scope()


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """How a trace is judged; without arguments as streamlint does by itself.

    ``symbols`` are files and folders with the binaries of the recorded program, for
    source lines of native code. Without ``replay`` costs are what the trace shows
    directly.
    """

    limits: Mapping[Threshold[Any], int | float] = field(default_factory=dict)
    scope: Scope = WHOLE
    symbols: tuple[Path, ...] = ()
    replay: bool = True

    def limit(self, threshold: Threshold[_T]) -> _T:
        """The value of ``threshold`` that holds."""
        return cast(_T, self.limits.get(threshold, threshold.default))


DEFAULTS = Settings()

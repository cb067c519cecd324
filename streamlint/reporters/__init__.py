"""Turn reports into text; nothing here prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from streamlint.findings import Severity
from streamlint.reporters.places import SourceTree

if TYPE_CHECKING:
    from streamlint.engine import Report
    from streamlint.errors import StreamlintError
    from streamlint.fleet import Fleet


class Detail(Enum):
    """How much text says."""

    QUIET = 0
    NORMAL = 1
    VERBOSE = 2


class View(NamedTuple):
    """How to show reports: colour, columns, what fails, and where the sources are.

    Text lists suppressed findings if ``show_suppressed``; annotations have none, the
    other formats always have them. Text of ``detail`` `QUIET` has findings only, of
    `VERBOSE` also call stacks, all evidence, and what each rule and table came to. A
    ``fleet`` is there for several traces; text that is ``brief`` has a line of each.
    """

    color: bool = False
    width: int = 100
    fail_on: Severity = Severity.LOW
    sources: SourceTree = SourceTree()
    show_suppressed: bool = False
    detail: Detail = Detail.NORMAL
    fleet: Fleet | None = None
    brief: bool = False


Failure: TypeAlias = "tuple[str, StreamlintError]"
"""A trace that could not be read: its path and why."""
Render: TypeAlias = "Callable[[Sequence[Report], Sequence[Failure], View], str]"

FORMATS = ("text", "json", "sarif", "github", "markdown", "junit")


def renderer(name: str) -> Render:
    """The renderer of this format, imported only now."""
    if name == "json":
        from streamlint.reporters.json import render
    elif name == "sarif":
        from streamlint.reporters.sarif import render
    elif name == "github":
        from streamlint.reporters.github import render
    elif name == "markdown":
        from streamlint.reporters.markdown import render
    elif name == "junit":
        from streamlint.reporters.junit import render
    else:
        from streamlint.reporters.text import render
    return render

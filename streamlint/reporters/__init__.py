"""Turn reports into text; nothing here prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from streamlint.engine import Report
    from streamlint.errors import StreamlintError

Failure: TypeAlias = "tuple[str, StreamlintError]"
"""A trace that could not be read: its path and why."""
Render: TypeAlias = "Callable[[Sequence[Report], Sequence[Failure], bool, int], str]"
"""From reports, failures, whether to colour, and the width in columns."""

FORMATS = ("text", "json")


def renderer(name: str) -> Render:
    """The renderer of this format, imported only now."""
    if name == "json":
        from streamlint.reporters.json import render
    else:
        from streamlint.reporters.text import render
    return render

"""The rule interface: a decorated function from a trace to an outcome."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from streamlint.findings import Finding, NotAssessed
from streamlint.settings import Threshold
from streamlint.trace.model import Trace
from streamlint.trace.tables import TABLES

Outcome: TypeAlias = Sequence[Finding] | NotAssessed
Check: TypeAlias = Callable[[Trace], Outcome]

BUILT_IN = "streamlint"
"""The origin of the rules that streamlint brings."""
SECTIONS = (
    "What it does",
    "Why it costs time",
    "Evidence",
    "Exemptions",
    "Fix",
    "References",
)
"""The sections of every rule's docstring, in order."""


class Rule(NamedTuple):
    """A check and what the engine and the documentation need to know of it.

    ``origin`` says who brings it: `BUILT_IN`, a package and its version, or a file;
    a loose file was found through ``folder``.
    """

    name: str
    family: str
    check: Check
    needs: tuple[str, ...]
    judges_capture: bool
    thresholds: tuple[Threshold[Any], ...] = ()
    origin: str = BUILT_IN
    folder: Path | None = None

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return self.doc.partition("\n")[0]

    @property
    def doc(self) -> str:
        """The whole docstring, unindented."""
        return inspect.getdoc(self.check) or ""


def sections(rule: Rule) -> dict[str, str]:
    """The docstring's sections by heading, each one paragraph of running text.

    Raises ValueError where a section is missing, unknown or out of order.
    """
    parts = re.split(r"^(\S.*)$", rule.doc.partition("\n")[2], flags=re.MULTILINE)
    headings = tuple(part.strip() for part in parts[1::2])
    if headings != SECTIONS:
        raise ValueError(f"{rule.name} documents {headings}, not {SECTIONS}")
    texts = [" ".join(textwrap.dedent(text).split()) for text in parts[2::2]]
    return dict(zip(headings, texts, strict=True))


def rule(
    *, needs: Sequence[str] = (), judges_capture: bool = False
) -> Callable[[Check], Rule]:
    """Turn a function into a rule.

    Its name (in kebab case) is the rule's name and must be the module's name; the
    folder of the module is the family. ``needs`` names the trace tables that must
    be recorded: the engine answers `NotAssessed` where one is not, before the
    check runs. The `Threshold` constants of the module are what users can set; the
    check reads them with `Trace.limit`. ``judges_capture`` rules speak about the
    recording, not about the program; they run even if no GPU work was recorded.
    """

    def wrap(check: Check) -> Rule:
        package, _, module = check.__module__.rpartition(".")
        if check.__name__ != module:
            raise ValueError(f"rule {check.__name__} lives in module {module}")
        unknown = [name for name in needs if name not in TABLES]
        if unknown:
            raise ValueError(
                f"rule {check.__name__} needs {unknown[0]}, no table of a trace"
            )
        family = package.rpartition(".")[2]
        return Rule(
            name=check.__name__.replace("_", "-"),
            family=family.replace("_", "-"),
            check=check,
            needs=tuple(needs),
            judges_capture=judges_capture,
            thresholds=tuple(
                value
                for value in check.__globals__.values()
                if isinstance(value, Threshold)
            ),
        )

    return wrap

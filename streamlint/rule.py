"""The rule interface: a decorated function from a trace to an outcome."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from streamlint.findings import Finding, NotAssessed
from streamlint.settings import Threshold
from streamlint.trace.model import Trace

Outcome: TypeAlias = Sequence[Finding] | NotAssessed
Check: TypeAlias = Callable[[Trace], Outcome]


class Rule(NamedTuple):
    """A check and what the engine and the documentation need to know of it."""

    name: str
    family: str
    check: Check
    needs: tuple[str, ...]
    judges_capture: bool
    thresholds: tuple[Threshold[Any], ...] = ()

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return self.doc.partition("\n")[0]

    @property
    def doc(self) -> str:
        """The whole docstring, unindented."""
        return inspect.getdoc(self.check) or ""


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

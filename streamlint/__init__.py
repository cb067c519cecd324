"""A linter for Nsight Systems traces: what is wrong, what it costs, how to fix it.

    with streamlint.open("run.sqlite") as trace:
        result = streamlint.lint(trace)

`import streamlint` loads nothing else; what is used is imported then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamlint.api import (
        BaselineError,
        Claim,
        Confidence,
        ConfigError,
        Cost,
        Crashed,
        Evidence,
        Finding,
        NotAssessed,
        Result,
        Rule,
        RuleError,
        Scope,
        Severity,
        StreamlintError,
        Suppressed,
        Trace,
        TraceError,
        UsageError,
        Where,
        lint,
        open,
    )

__version__ = "0.1.0"

__all__ = [
    "BaselineError",
    "Claim",
    "Confidence",
    "ConfigError",
    "Cost",
    "Crashed",
    "Evidence",
    "Finding",
    "NotAssessed",
    "Result",
    "Rule",
    "RuleError",
    "Scope",
    "Severity",
    "StreamlintError",
    "Suppressed",
    "Trace",
    "TraceError",
    "UsageError",
    "Where",
    "__version__",
    "lint",
    "open",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streamlint import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

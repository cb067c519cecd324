"""Errors that end a command with one line of cause and one line of advice."""

from __future__ import annotations


class StreamlintError(Exception):
    """What is wrong with which input, and what to do about it.

    ``message`` and ``hint`` are single lines in lower case; ``exit_code`` is the
    process exit code that the command line uses.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str) -> None:
        """Keep the cause and the advice apart, for `error:` and `hint:`."""
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        """Let it come back from another process."""
        return _rebuilt, (type(self), self.message, self.hint)


def _rebuilt(kind: type[StreamlintError], message: str, hint: str) -> StreamlintError:
    return kind(message, hint=hint)


class TraceError(StreamlintError):
    """A trace file can't be read as an nsys export."""


class OtherDatabase(TraceError):
    """A sound SQLite database that something else than nsys wrote."""


class BaselineError(StreamlintError):
    """A file can't be read as a baseline."""


class UsageError(StreamlintError):
    """The command line names something that doesn't exist."""


class ConfigError(StreamlintError):
    """A configuration file can't be read, or says what streamlint doesn't know."""


class ScopeError(StreamlintError):
    """A trace has nothing of what was asked to be judged."""


class RuleError(StreamlintError):
    """A rule of a package or a loose file can't be used."""

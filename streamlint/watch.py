"""Waits for exports and reports that are written into a folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from streamlint.errors import UsageError
from streamlint.trace.convert import REPORT_SUFFIXES
from streamlint.trace.landed import is_complete

POLL_S = 1.0
PATIENCE_S = 5.0
"""How long an export may stand still half written before it is taken for broken."""


class _State(NamedTuple):
    size: int
    modified_ns: int
    inode: int


class Folder:
    """A folder into which traces are written. Those there at first are not new."""

    def __init__(self, path: Path) -> None:
        """Raises `UsageError` for what is no folder."""
        self._path = path
        self._done = self._look()
        self._seen: dict[Path, tuple[_State, float]] = {}

    @property
    def traces(self) -> int:
        """How many are there and done with."""
        return len(self._done)

    def landed(self) -> Iterator[Path]:
        """Each trace that is new or changed, once it is whole; never ends.

        It is whole when it has stood still for a poll and, for an export, has all its
        pages and facts; or has stood still for long: the reader says what is wrong.
        """
        while True:
            now = time.monotonic()
            there = self._look()
            for path, state in sorted(there.items()):
                if self._done.get(path) == state:
                    continue
                before, since = self._seen.get(path, (None, now))
                if before != state:
                    self._seen[path] = (state, now)
                    continue
                still = now - since
                report = path.suffix.lower() in REPORT_SUFFIXES
                if still >= PATIENCE_S or report or is_complete(path):
                    self._done[path] = state
                    del self._seen[path]
                    yield path
            for gone in self._done.keys() - there.keys():
                del self._done[gone]
            time.sleep(POLL_S)

    def _look(self) -> dict[Path, _State]:
        """The traces in the folder now, those with a dot in front aside."""
        found: dict[Path, _State] = {}
        try:
            for path in self._path.iterdir():
                suffix = path.suffix.lower()
                if suffix != ".sqlite" and suffix not in REPORT_SUFFIXES:
                    continue
                try:
                    status = path.stat()
                except OSError:
                    continue  # renamed or removed meanwhile
                if path.is_file() and not path.name.startswith("."):
                    found[path] = _State(
                        status.st_size, status.st_mtime_ns, status.st_ino
                    )
        except OSError as error:
            raise UsageError(
                f"{self._path} can't be watched ({error.strerror})",
                hint="name a folder into which traces are written",
            ) from error
        return found

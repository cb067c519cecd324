"""Paths of a recorded program as paths in the repository at hand."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import NamedTuple

from streamlint.escape import without_home
from streamlint.findings import Finding
from streamlint.own import in_own_code

_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


class Place(NamedTuple):
    """A line of a file in the repository; ``path`` is relative, with slashes."""

    path: str
    line: int
    function: str


class SourceTree(NamedTuple):
    """A checkout at ``root``.

    A recorded path is in it where it lies below ``root`` or is relative: those of
    other folders are relative by now if the configuration's path map names them.
    """

    root: Path = Path()

    @classmethod
    def around(cls, folder: Path) -> SourceTree:
        """The repository that holds ``folder``, or the folder itself."""
        folder = folder.resolve()
        for root in (folder, *folder.parents):
            if (root / ".git").exists():
                return cls(root)
        return cls(folder)

    def place(self, finding: Finding) -> Place | None:
        """The innermost line of the user's own code that is in the repository."""
        places = self.places(finding)
        return places[0] if places else None

    def places(self, finding: Finding) -> list[Place]:
        """All such lines, the one with most of the finding's calls first."""
        found = [
            Place(path, max(1, frame.line), frame.function)
            for frame in finding.where.source
            if in_own_code(frame)
            and frame.line is not None
            and (path := self.relative(frame.file)) is not None
        ]
        return list(dict.fromkeys(found))

    def relative(self, file: str) -> str | None:
        """A recorded path in the repository, None for one outside."""
        return self._inside(_with_slashes(file))

    def trace(self, path: Path) -> str:
        """A trace's path in the repository, or its name where it lies elsewhere."""
        inside = self._inside(_with_slashes(without_home(str(path.absolute()))))
        return inside or path.name

    def _inside(self, path: str) -> str | None:
        """``path``, relative to the root or with ~ for home, as one below the root."""
        root = _with_slashes(without_home(str(self.root.absolute())))
        whole = posixpath.normpath(posixpath.join(root, path))
        if path.startswith("~/"):
            whole = posixpath.normpath(path)
        rest = _below(whole, posixpath.normpath(root))
        return None if rest in (None, "", ".") else rest


def _with_slashes(path: str) -> str:
    return path.replace("\\", "/") if _DRIVE.match(path) or "/" not in path else path


def _below(path: str, folder: str) -> str | None:
    folder = folder.rstrip("/")
    if path == folder:
        return ""
    return path[len(folder) + 1 :] if path.startswith(f"{folder}/") else None

"""Which findings are not reported, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from streamlint.escape import without_home
from streamlint.findings import Claim, Finding, Severity, SourceFrame


class Saving(NamedTuple):
    """The least that fixing a finding has to save, in ns or as a share (0 to 1)."""

    ns: int | None = None
    share: float | None = None

    def misses(self, finding: Finding) -> bool:
        """Whether ``finding`` costs less.

        Never a fault of correctness, nor one that no time is claimed for.
        """
        cost = finding.cost
        if finding.severity is Severity.ERROR or cost.claim is Claim.NONE:
            return False
        if cost.ns is not None and self.ns is not None:
            return cost.ns < self.ns
        if cost.share is not None and self.share is not None:
            return cost.share < self.share
        return False


NO_SAVING = Saving()


class Policy(NamedTuple):
    """What becomes of findings.

    ``path_map`` has pairs of what recorded source paths begin with and what to put
    there; the first that fits holds.
    """

    min_saving: Saving = NO_SAVING
    path_map: tuple[tuple[str, str], ...] = ()

    def placed(self, finding: Finding) -> Finding:
        """``finding`` with its source paths mapped."""
        if not self.path_map or not finding.where.source:
            return finding
        source = tuple(map(self._mapped, finding.where.source))
        return replace(finding, where=finding.where._replace(source=source))

    def _mapped(self, frame: SourceFrame) -> SourceFrame:
        for folder, new in self.path_map:
            old = without_home(folder)  # as all texts of a trace
            if frame.file == old or frame.file.startswith((f"{old}/", f"{old}\\")):
                rest = frame.file[len(old) :].replace("\\", "/").lstrip("/")
                folder = "" if new in ("", ".") else f"{new.rstrip('/')}/"
                return frame._replace(file=f"{folder}{rest}" if rest else new)
        return frame

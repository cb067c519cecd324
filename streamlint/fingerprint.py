"""Names a finding alike in every run of a program, whatever changes between runs.

Between two runs differ process, stream and correlation ids, addresses, times, the
folder of a checkout, lines that an edit above moved, and what compilers write into
the names of kernels: template arguments, specializations for argument values
(Triton), signatures (Numba), tile sizes and numbers of generated code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

_SITE = re.compile(r"(?:.*[/\\])?(?P<file>[^/\\]+):\d+ (?P<function>.+)", re.DOTALL)
_CALL = re.compile(r"cu(da)?[A-Z]\w*|\d+")
_ARGUMENTS = re.compile(r"(\[abi:[^\]]*\].*|<.*>|\(.*\))$", re.DOTALL)
_SPECIALIZED = re.compile(r"_(\d+[cde]{1,2})+\d*$")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def fingerprint(rule: str, identity: Sequence[str], ordinal: int = 0) -> str:
    """16 hex digits for a rule's finding with this identity.

    ``ordinal`` tells findings apart that are otherwise named alike.
    """
    parts = [rule, *dict.fromkeys(map(stable, identity))]
    parts += [f"#{ordinal}"] if ordinal else []
    text = "\0".join(parts)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def stable(part: str) -> str:
    """What of an identity's part is the same in every run.

    A place in code ("/app/train.py:12 step") loses folder and line, a kernel its
    arguments and numbers; CUDA's own names and codes stay as they are.
    """
    place = _SITE.fullmatch(part)
    if place is not None:
        return f"{place['file']} {place['function']}"
    if _CALL.fullmatch(part):
        return part
    bare = _SPECIALIZED.sub("", _ARGUMENTS.sub("", part) or part)
    return _NUMBER.sub("#", bare)


def natural(identity: Sequence[str]) -> list[tuple[tuple[str, int], ...]]:
    """A sort key by which line 9 comes before line 10."""
    return [
        tuple(
            ("", int(piece)) if piece.isdecimal() else (piece, 0)
            for piece in re.split(r"(\d{1,18})", part)
        )
        for part in identity
    ]

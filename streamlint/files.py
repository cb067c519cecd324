"""Writes files whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeGuard

from streamlint.errors import UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new file beside ``target`` to write to, which becomes ``target`` at the end.

    Until then, and after any error or signal that Python sees, ``target`` is what it
    was and nothing is left beside it. Raises `OSError`.
    """
    target = target.resolve()
    part = target.with_name(f".streamlint-{os.urandom(8).hex()}")
    try:
        part.open("xb").close()  # with the permissions that any new file gets
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def out_of_space(error: Exception) -> TypeGuard[OSError]:
    """Whether a disk, a quota or a limit on the size of files is what stopped it."""
    return isinstance(error, OSError) and error.errno in _FULL


def unwritable(target: Path | str, error: OSError) -> UsageError:
    """The error of a command that can't write ``target``."""
    hint = "name a file in a folder that exists and can be written"
    if out_of_space(error):
        hint = "free some space, or name a file on another disk"
    return UsageError(f"{target} can't be written ({error.strerror})", hint=hint)

"""Which traces a command names: files, folders of files, and URLs."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from streamlint.errors import StreamlintError, TraceError, UsageError
from streamlint.fingerprint import natural
from streamlint.trace import open_trace
from streamlint.trace.convert import REPORT_SUFFIXES, export, find_nsys

if TYPE_CHECKING:
    from streamlint.trace.model import Trace

_EXPORT_SUFFIX = ".sqlite"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")
_USER = re.compile(r"(//)[^/@]*@")
_CHUNK = 1 << 20
_SPARE_BYTES = 256 << 20
"""What a download leaves free on the disk of temporary files."""


class Source(NamedTuple):
    """One trace: a path or an fsspec URL; ``searched`` if a folder was named."""

    named: str
    searched: bool = False

    @property
    def is_url(self) -> bool:
        """Whether it is no local path."""
        return _URL.match(self.named) is not None

    @property
    def path(self) -> Path:
        """The path; of a URL what follows the protocol, without credentials."""
        return Path(_URL.sub("", self.shown).rpartition("://")[2])

    @property
    def shown(self) -> str:
        """What may be printed: no user, password or signature of a URL."""
        return without_credentials(self.named) if self.is_url else self.named

    @property
    def url(self) -> str | None:
        """A URL as it may be printed, None of a path."""
        return self.shown if self.is_url else None

    @property
    def size(self) -> int | None:
        """Bytes of a local trace, None where that is unknown."""
        path = Path(self.named)
        try:
            if self.is_url:
                return None
            if path.is_dir():
                return sum(file.stat().st_size for file in path.glob("*.parquet"))
            return path.stat().st_size
        except OSError:
            return None


def without_credentials(url: str) -> str:
    """A URL without user, password, query and fragment."""
    return _USER.sub(r"\1", re.split(r"[?#]", url, maxsplit=1)[0])


def sources_of(names: Sequence[str]) -> list[Source]:
    """The traces that these names stand for, each once, in order.

    Folders are searched (see `traces_below`), unless they are parquetdir exports; one
    without traces stays, for `opened` to refuse.
    """
    found: list[Source] = []
    for name in names:
        source = Source(name)
        if source.is_url or not Path(name).is_dir() or _is_export(Path(name)):
            found.append(source)
            continue
        below = [Source(str(path), True) for path in traces_below(Path(name))]
        found += below or [source]
    named = {os.path.realpath(s.named) for s in found if not s.searched}
    seen: set[str] = set()
    kept = []
    for source in found:
        real = os.path.realpath(source.named)
        if source.searched and (real in named or real in seen):
            continue
        seen.add(real)
        kept.append(source)
    return kept


def no_traces(folder: str) -> UsageError:
    """The error of a folder without traces."""
    return UsageError(
        f"{folder} is a directory without traces",
        hint="name .sqlite exports or .nsys-rep reports, or a folder that holds some",
    )


def traces_below(folder: Path) -> list[Path]:
    """Exports and reports in a folder and those below it, in natural order.

    Hidden files and folders are left out. Of a report and its exports side by side one
    counts: the SQLite export, else the parquetdir one.
    Links to folders are followed, each folder is entered once.
    """
    entered: set[tuple[int, int]] = set()
    found: list[Path] = []
    for root, folders, files in os.walk(folder, followlinks=True):
        status = Path(root).stat()
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inner = [Path(root, name) for name in folders]
        parquet = [path for path in inner if _is_export(path)]
        folders[:] = [path.name for path in inner if path not in parquet]
        here = [Path(root, name) for name in files if not name.startswith(".")]
        here = [path for path in here if path.is_file()]
        exports = {p.stem for p in here if p.suffix.lower() == _EXPORT_SUFFIX}
        found += [path for path in parquet if path.stem not in exports]
        exports |= {path.stem for path in parquet}
        for path in here:
            suffix = path.suffix.lower()
            report = suffix in REPORT_SUFFIXES and path.stem not in exports
            if suffix == _EXPORT_SUFFIX or report:
                found.append(path)
    return sorted(found, key=lambda path: natural([str(path)]))


def _is_export(folder: Path) -> bool:
    """Whether a folder is one trace, a parquetdir export."""
    if next(folder.glob("*.parquet"), None) is None:
        return False
    from streamlint.trace.parquet import is_parquet_folder

    return is_parquet_folder(folder)


@contextmanager
def opened(source: Source) -> Iterator[Trace]:
    """The trace of ``source``, fetched first where it is a URL.

    Raises `StreamlintError`.
    """
    with ExitStack() as stack:
        path = Path(source.named)
        if path.is_dir() and not _is_export(path):
            raise no_traces(source.named)
        if source.is_url:
            folder = tempfile.TemporaryDirectory(prefix="streamlint-")
            path = _fetched(source, Path(stack.enter_context(folder)))
        trace = open_trace(path)
        try:
            yield trace
        finally:
            trace.close()


def _fetched(source: Source, folder: Path) -> Path:
    """A local copy of a URL's file in ``folder``; of a report, its export."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(
            f"{source.shown} is a URL, and fsspec is not installed to read it",
            hint="pip install 'streamlint[distributed]'",
        ) from error
    target = folder / (source.path.name or "trace")
    try:
        file = fsspec.open(source.named, "rb")
        with file as stream, target.open("xb") as copy:
            _copy(stream, copy, source)
    except StreamlintError:
        raise
    except FileNotFoundError as error:
        raise TraceError(
            f"{source.shown} does not exist", hint="check the URL"
        ) from error
    except ImportError as error:
        raise UsageError(
            f"{source.shown} can't be read: its protocol needs another package",
            hint="install the one that fsspec names for it, such as s3fs or gcsfs",
        ) from error
    # Each protocol has errors of its own, whose texts may hold what signs a URL.
    except Exception as error:
        raise TraceError(
            f"{source.shown} can't be fetched ({type(error).__name__})",
            hint="check the URL, and the credentials where the lint runs",
        ) from error
    if target.suffix.lower() not in REPORT_SUFFIXES:
        return target
    nsys = find_nsys()
    if nsys is None:
        return target  # whose error says what is missing
    made = target.with_suffix(_EXPORT_SUFFIX)
    export(nsys, target, made)
    return made


def _copy(stream: IO[bytes], copy: IO[bytes], source: Source) -> None:
    """Copy all of ``stream`` while the disk has space to spare."""
    while chunk := stream.read(_CHUNK):
        if shutil.disk_usage(tempfile.gettempdir()).free < _SPARE_BYTES + len(chunk):
            raise TraceError(
                f"{source.shown} does not fit on the disk of temporary files",
                hint="set TMPDIR to a folder with more free space",
            )
        copy.write(chunk)

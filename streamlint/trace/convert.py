"""Finds the nsys that is installed and exports its reports to SQLite.

Imports the standard library alone: the harness records on machines without more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from streamlint.errors import TraceError

REPORT_SUFFIXES = (".nsys-rep", ".qdrep")

_INSTALL_FOLDERS = (
    "/opt/nvidia/nsight-systems/*/bin",
    "/opt/nvidia/nsight-systems/*/target-linux-*",
    "/opt/nvidia/nsight-systems-cli/*/bin",
    "/opt/nvidia/nsight-compute/*/host/target-linux-*",
    "/usr/local/cuda*/bin",
    "/usr/lib/nsight-systems/bin",
)
_TIMEOUT_S = 3_600
_UNFINISHED = "export-"


def find_nsys() -> Path | None:
    """The nsys to use: $NSYS, on PATH, or the newest in the install folders."""
    named = os.environ.get("NSYS")
    if named:
        return Path(named) if os.access(named, os.X_OK) else None
    on_path = shutil.which("nsys")
    if on_path:
        return Path(on_path)
    found = [
        folder / "nsys"
        for pattern in _INSTALL_FOLDERS
        for folder in Path("/").glob(pattern.lstrip("/"))
        if os.access(folder / "nsys", os.X_OK)
    ]
    return max(found, key=_numbers_in, default=None)


def exported(report: Path) -> Path:
    """The SQLite export of ``report``, made now or taken from the cache.

    The cache is ``$XDG_CACHE_HOME/streamlint`` (else ``~/.cache``, else one of this
    user's own in the temporary folder); its key is the report's path, size and
    change time and the nsys used. An export appears there only when it is complete,
    also where several make the same one at once. Raises `TraceError`.
    """
    nsys = find_nsys()
    name = report.name
    if nsys is None:
        raise TraceError(
            f"{name} is an nsys report and no nsys was found to export it",
            hint="install Nsight Systems or set NSYS, or export it where it was "
            f"recorded: nsys export --type sqlite {shlex.quote(name)}",
        )
    status = report.stat()
    parts = (report.resolve(), status.st_size, status.st_mtime_ns, nsys.resolve())
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
    try:
        cache = _cache_folder()
        target = cache / f"{key}.sqlite"
        if not target.exists():
            _sweep(cache)
            export(nsys, report, target, overwrite=False)
    except OSError as error:
        raise TraceError(
            f"{name} can't be exported ({error.strerror})",
            hint="set XDG_CACHE_HOME to a folder with free space",
        ) from error
    return target


def export(nsys: Path, report: Path, target: Path, *, overwrite: bool = True) -> None:
    """Export ``report`` with call stacks and payloads, all or nothing.

    ``overwrite=False`` keeps a target that somebody else has made meanwhile: others
    may be reading it.
    Raises `TraceError` if nsys can't, `OSError` if the folder can't be written.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_UNFINISHED) as folder:
        output = Path(folder) / "export.sqlite"
        command = [nsys, "export", "--type", "sqlite", "-q", "true"]
        command += _payload_options(nsys)
        command += ["-o", output, report.resolve()]
        done = _run([str(part) for part in command], report)
        if done.returncode or not output.exists():
            raise _refusal(report, done.stdout + done.stderr)
        with output.open("rb+") as file:
            os.fsync(file.fileno())  # else a crash may leave the name without the bytes
        if overwrite or not _linked(output, target):
            output.replace(target)


def _linked(output: Path, target: Path) -> bool:
    """Whether ``target`` is there now: ``output``, or what it was before."""
    try:
        target.hardlink_to(output)
    except FileExistsError:
        pass
    except OSError:
        return False  # the file system has no links
    return True


def _sweep(cache: Path) -> None:
    """Take away what exports that were killed have left."""
    for folder in cache.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_mtime < time.time() - 2 * _TIMEOUT_S:
                shutil.rmtree(folder, ignore_errors=True)


def _payload_options(nsys: Path) -> list[str]:
    """The flags that export call stacks and payloads, where this nsys has them."""
    text = _run([str(nsys), "export", "--help"], nsys).stdout
    wanted = ("--include-blobs", "--include-json")
    return [f"{option}=true" for option in wanted if option in text]


def _run(command: list[str], about: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TraceError(
            f"nsys could not be run for {about.name} ({type(error).__name__})",
            hint="check that this command works: nsys --version",
        ) from error


def missing_library(output: str) -> str | None:
    """The shared library that the dynamic linker says it could not load."""
    lost = re.search(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object", output)
    return lost[1] if lost else None


def out_of_space(output: str) -> bool:
    """Whether a program says that it ended because a disk is full."""
    return bool(re.search(r"no space left on device|disk (is )?full", output, re.I))


def _refusal(report: Path, output: str) -> TraceError:
    library = missing_library(output)
    if library:
        return TraceError(
            f"nsys can't export {report.name}: it lacks the library {library}",
            hint=f"install {library}, or export the report where it was recorded",
        )
    if out_of_space(output):
        return TraceError(
            f"{report.name} can't be exported: no space is left",
            hint="free some, or set XDG_CACHE_HOME and TMPDIR to folders with space",
        )
    if re.search(
        r"newer|not supported by this version|unsupported.*version", output, re.I
    ):
        return TraceError(
            f"{report.name} was recorded by a newer nsys than the one installed here",
            hint="update Nsight Systems, or export the report where it was recorded",
        )
    return TraceError(
        f"nsys could not export {report.name}",
        hint=f"see what it says: nsys export --type sqlite {shlex.quote(report.name)}",
    )


def _cache_folder() -> Path:
    home = os.environ.get("HOME")
    base = os.environ.get("XDG_CACHE_HOME") or (home and str(Path(home) / ".cache"))
    if base:
        folder = Path(base) / "streamlint"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    folder = Path(tempfile.gettempdir()) / f"streamlint-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    # Anyone may have made it there, to read what we export or to make us read theirs.
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(None, f"{folder} belongs to someone else")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _numbers_in(path: Path) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", str(path)))

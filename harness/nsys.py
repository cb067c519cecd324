"""Records a program with nsys, using the flags that the installed nsys has.

Imports the standard library alone, so that it runs on a bare GPU node.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from streamlint.errors import StreamlintError, UsageError
from streamlint.harness import processes
from streamlint.trace.contents import contents
from streamlint.trace.convert import (
    REPORT_SUFFIXES,
    export,
    find_nsys,
    missing_library,
    out_of_space,
)

Say = Callable[[str], None]
EXIT_INTERRUPTED = 130

_SINCE = {
    "--sample": (2020, 3),
    "--cpuctxsw": (2022, 4),
    "--cuda-graph-trace": (2022, 4),
    "--cuda-memory-usage": (2022, 4),
    "--cudabacktrace": (2022, 4),
    "--trace-fork-before-exec": (2022, 4),
    "--python-backtrace": (2023, 4),
    "--cuda-trace-all-apis": (2025, 3),
    "--cuda-event-trace": (2025, 3),
}
"""The first version known to have an option; a version between two that were looked
at may have it as well, then its help lists it."""
_RECORDS = {
    "--cuda-trace-all-apis": "every CUDA call",
    "--cuda-graph-trace": "the nodes of CUDA graphs",
    "--cuda-memory-usage": "memory pools and sizes",
    "--cudabacktrace": "call stacks",
    "--python-backtrace": "Python call stacks",
    "--trace-fork-before-exec": "forked processes",
}
_LOW_SPACE = 64 << 20
"""With less free bytes than this, a recording that failed ran out of space."""
_IMPORT_TIMEOUT_S = 3_600
_GPU_SIGNS = ("dev/nvidia*", "dev/dxg", "dev/nvgpu*", "proc/driver/nvidia/version")
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
_MAX_PARANOID = 2
"""Above this the kernel lets only root sample a process, which stacks need."""


class ProfileError(StreamlintError):
    """A program could not be recorded."""


class TargetFailed(ProfileError):
    """The program itself failed; its exit code becomes ours."""

    def __init__(self, message: str, *, hint: str, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


class NothingCaptured(ProfileError):
    """The recording holds no GPU work."""


class Detail(str, Enum):
    """How much to record."""

    FULL = "full"
    DEFAULT = "default"
    LIGHT = "light"


@dataclass(frozen=True, slots=True)
class Nsys:
    """The nsys to use; ``version`` is () where it does not say."""

    path: Path
    version: tuple[int, ...]
    help_text: str

    @property
    def version_text(self) -> str:
        """As people write it."""
        return ".".join(map(str, self.version)) or "of unknown version"

    def has(self, option: str) -> bool:
        """Whether this nsys takes ``option``."""
        listed = re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", self.help_text)
        since = _SINCE.get(option)
        return bool(listed) or (since is not None and self.version >= since)


@dataclass(frozen=True, slots=True)
class Recording:
    """A report on disk and how the program in it ended."""

    report: Path
    exit_code: int
    interrupted: bool
    output: str


def locate() -> Nsys:
    """The nsys to use; raises `ProfileError` if there is none that runs."""
    path = find_nsys()
    if path is None:
        named = os.environ.get("NSYS")
        raise ProfileError(
            f"NSYS names {named}, which is no program" if named else "no nsys found",
            hint="install the package nsight-systems or the CUDA toolkit "
            "(https://developer.nvidia.com/nsight-systems), or set NSYS to the program",
        )
    said = _ask(path, "--version")
    found = re.search(r"version\s+(\d+(?:\.\d+){1,2})", said, re.I)
    version = tuple(map(int, found[1].split("."))) if found else ()
    return Nsys(path, version, _ask(path, "profile", "--help"))


def flags(
    nsys: Nsys,
    detail: Detail = Detail.FULL,
    *,
    call_stacks: bool = False,
    follow_forks: bool = False,
) -> tuple[list[str], list[str]]:
    """Arguments for `nsys profile`, and what this nsys can't record of the wanted.

    ``Detail.DEFAULT`` leaves all about CUDA as nsys has it; CPU sampling is off
    everywhere, for no rule reads it, unless call stacks need it.
    """
    wanted = {"--sample": "none", "--cpuctxsw": "none"}
    if detail is not Detail.DEFAULT:
        # Event timestamps add dependencies between streams that the program hasn't.
        wanted |= {"--cuda-graph-trace": "graph", "--cuda-event-trace": "false"}
    if detail is Detail.FULL:
        wanted |= {
            "--cuda-trace-all-apis": "true",
            "--cuda-graph-trace": "node",
            "--cuda-memory-usage": "true",
        }
    if call_stacks:
        # nsys drops the stacks without a word unless it samples; 0 ns: of every call.
        wanted |= {
            "--sample": "process-tree",
            "--cudabacktrace": "all:0",
            "--python-backtrace": "cuda",
        }
    if follow_forks:
        wanted["--trace-fork-before-exec"] = "true"
    arguments = [] if detail is Detail.DEFAULT else ["--trace=cuda,nvtx"]
    arguments += [f"{name}={v}" for name, v in wanted.items() if nsys.has(name)]
    lacking = [n for n in wanted if n in _RECORDS and not nsys.has(n)]
    return arguments, [_RECORDS[name] for name in lacking]


def warnings(nsys: Nsys, lacking: Sequence[str], *, call_stacks: bool) -> list[str]:
    """What to tell before recording, one line each."""
    found = []
    if lacking:
        what = ", ".join(lacking)
        found.append(f"nsys {nsys.version_text} can't record {what}")
    if not gpu_visible():
        found.append("no NVIDIA GPU or driver is visible here")
    if call_stacks and not _may_sample():
        found.append(
            "the kernel forbids sampling, so call stacks may be missing "
            f"(as root: sysctl kernel.perf_event_paranoid={_MAX_PARANOID})"
        )
    return found


def gpu_visible() -> bool:
    """Whether anything shows that an NVIDIA driver is there."""
    return any(path for sign in _GPU_SIGNS for path in Path("/").glob(sign))


def record(
    nsys: Nsys,
    command: Sequence[str],
    base: Path,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
    children: processes.Children | None = None,
) -> Recording:
    """Run ``command`` under nsys into a report called ``base`` and a suffix.

    See `processes.run` for the other arguments. A program that fails or is ended by
    Ctrl-C is recorded none the less. Raises `StreamlintError`.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"{command[0]} can't be run",
            hint="name a program on PATH, or a path to a file that is executable",
        )
    # nsys expands %p, %h and more in names.
    name = str(base).replace("%", "%%")
    options = [*arguments, "--force-overwrite=true", "-o", name]
    try:
        ended = processes.run(
            [str(nsys.path), "profile", *options, *command],
            environment=environment,
            on_line=on_line,
            timeout_s=timeout_s,
            children=children,
        )
    except OSError as error:
        raise ProfileError(
            f"nsys could not be started ({error.strerror})",
            hint=f"check that this command works: {nsys.path} --version",
        ) from error
    report = _report(base) or _imported(nsys, base, ended.output)
    if report is None:
        raise _no_report(base, ended, timeout_s)
    if ended.timed_out:
        raise _too_long(timeout_s)
    return Recording(report, ended.exit_code, ended.interrupted, ended.output)


def export_checked(nsys: Nsys, recording: Recording, target: Path) -> None:
    """Export to ``target``; raises `StreamlintError`, also if no GPU work is in it."""
    try:
        export(nsys.path, recording.report, target)
    except OSError as error:
        raise _disk_error(target, error) from error
    found = contents(target)
    if found.operations:
        return
    code = recording.exit_code
    if code and not recording.interrupted:
        raise TargetFailed(
            f"the program failed ({_how(code)}) and did no GPU work",
            hint="make it run without the profiler first",
            exit_code=code,
        )
    if not gpu_visible():
        raise NothingCaptured(
            "nothing was captured: no NVIDIA GPU or driver is visible here",
            hint="run it where the GPU is; in a container, pass the GPU through",
        )
    if found.calls:
        raise NothingCaptured(
            f"{found.calls} CUDA calls were captured, but no GPU work: the program "
            "ended before CUDA handed over its records",
            hint="let it return from main instead of _exit or a signal, or call "
            "cudaDeviceSynchronize and cudaProfilerStop before",
        )
    raise NothingCaptured(
        "nothing was captured: no CUDA call in the processes that were followed",
        hint="if a forked process uses the GPU, add --follow-forks; if the program "
        "calls cudaProfilerStop or ends early, profile a run that does GPU work",
    )


def capture(
    command: Sequence[str],
    base: Path,
    target: Path,
    say: Say,
    *,
    detail: Detail = Detail.FULL,
    call_stacks: bool = False,
    follow_forks: bool = False,
    timeout_s: float | None = None,
) -> Recording:
    """Record ``command``, on our terminal, as report ``base`` and export ``target``.

    `failure` tells whether the program failed. Raises `StreamlintError`.
    """
    nsys = locate()
    arguments, lacking = flags(
        nsys, detail, call_stacks=call_stacks, follow_forks=follow_forks
    )
    for line in warnings(nsys, lacking, call_stacks=call_stacks):
        say(f"warning: {line}")
    recording = record(nsys, command, base, arguments, timeout_s=timeout_s)
    export_checked(nsys, recording, target)
    return recording


@dataclass(slots=True)
class Workspace:
    """Where one recording lies until it is judged; see `workspace`."""

    command: Sequence[str]
    folder: Path
    keep_in: Path
    say: Say
    name: str
    export: Path

    def capture(
        self, detail: Detail, *, call_stacks: bool, follow_forks: bool, keep: bool
    ) -> Recording:
        """Record and export; what was cut short by Ctrl-C is always kept."""
        recording = capture(
            self.command,
            self.folder / self.name,
            self.export,
            self.say,
            detail=detail,
            call_stacks=call_stacks,
            follow_forks=follow_forks,
        )
        if keep or recording.interrupted:
            self._keep(recording)
        return recording

    def _keep(self, recording: Recording) -> None:
        names = [self.name, *(f"{self.name}-{n}" for n in range(2, 10_000))]
        suffixes = (recording.report.suffix, ".sqlite")
        base = next(
            self.keep_in / name
            for name in names
            if not any((self.keep_in / f"{name}{s}").exists() for s in suffixes)
        )
        report, export = (Path(f"{base}{suffix}") for suffix in suffixes)
        try:
            shutil.move(recording.report, report)
            shutil.move(self.export, export)
        except OSError as error:
            raise _disk_error(report, error) from error
        self.export = export
        self.say(f"kept {report.name} and {export.name}")


@contextlib.contextmanager
def workspace(command: Sequence[str], keep_in: Path, say: Say) -> Iterator[Workspace]:
    """A temporary folder to record ``command`` in, gone at the end.

    If nsys recorded but nothing could be made of it, the folder stays and is named.
    """
    script = next((part for part in command if part.endswith(".py")), command[0])
    name = Path(script).stem or "program"
    folder = Path(tempfile.mkdtemp(prefix="streamlint-"))
    stays = False
    try:
        yield Workspace(command, folder, keep_in, say, name, folder / f"{name}.sqlite")
    except StreamlintError:
        stays = any(folder.glob("*.qdstrm"))
        if stays:
            say(f"what nsys wrote is in {folder}")
        raise
    finally:
        if not stays:
            shutil.rmtree(folder, ignore_errors=True)


def failure(recording: Recording) -> TargetFailed | None:
    """The error that says how the program failed, if it did."""
    if recording.interrupted:
        return TargetFailed(
            "the program was interrupted; what was captured until then is kept",
            hint="judge with care: the end of the run is missing",
            exit_code=EXIT_INTERRUPTED,
        )
    if recording.exit_code:
        return TargetFailed(
            f"the program failed ({_how(recording.exit_code)})",
            hint="what it did until then was captured; see its own output for why",
            exit_code=recording.exit_code,
        )
    return None


def _how(code: int) -> str:
    return f"signal {code - 128}" if code > 128 else f"exit code {code}"


def _report(base: Path) -> Path | None:
    candidates = (Path(f"{base}{suffix}") for suffix in REPORT_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def _imported(nsys: Nsys, base: Path, output: str) -> Path | None:
    """Import again what nsys recorded but could not import, to learn what it lacks."""
    raw = Path(f"{base}.qdstrm")
    if not raw.is_file():
        return None
    library = missing_library(output)
    importer = _importer(nsys.path)
    if library is None and importer is not None:
        said = _ask(importer, "-i", str(raw), timeout_s=_IMPORT_TIMEOUT_S)
        if report := _report(base):
            return report
        library = missing_library(said)
        output += said
    if out_of_space(output):
        raise _no_space(raw.parent)
    if library is not None:
        raise ProfileError(
            f"nsys recorded, but its importer lacks the library {library}",
            hint=f"install it ({_package(library)}) or add its folder to "
            f"LD_LIBRARY_PATH, and record again; the raw data is {raw.name}",
        )
    raise ProfileError(
        "nsys recorded, but could not make a report of it",
        hint=f"open {raw.name} with the Nsight Systems that recorded it, elsewhere",
    )


def _importer(nsys: Path) -> Path | None:
    """The program that makes reports: beside the folder of nsys, in its package."""
    real = nsys.resolve()
    for folder in real.parents[1:3]:
        found = sorted(folder.glob("*/QdstrmImporter"))
        if found:
            return found[0]
    return None


def _package(library: str) -> str:
    if library.startswith(("libdw.", "libelf.")):
        name = library.partition(".")[0]
        return f"{name}1 on Debian and Ubuntu, elfutils-libs on Fedora and RHEL"
    return "the package that holds it"


def _no_report(
    base: Path, ended: processes.Ended, timeout_s: float | None
) -> StreamlintError:
    if ended.timed_out:
        return _too_long(timeout_s)
    if ended.interrupted:
        return TargetFailed(
            "interrupted before anything was captured",
            hint="let the program do some GPU work first",
            exit_code=EXIT_INTERRUPTED,
        )
    full = [f for f in (base.parent, Path(tempfile.gettempdir())) if _is_full(f)]
    if full or out_of_space(ended.output):
        return _no_space(full[0] if full else base.parent)
    library = missing_library(ended.output)
    if library is not None:
        return ProfileError(
            f"nsys lacks the library {library}",
            hint=f"install it ({_package(library)}) or set LD_LIBRARY_PATH",
        )
    return ProfileError(
        f"nsys wrote no report ({_how(ended.exit_code)})",
        hint="see what it says above; `nsys status --environment` checks this machine",
    )


def _too_long(timeout_s: float | None) -> ProfileError:
    return ProfileError(
        f"the program did not end within {timeout_s or 0:.0f} s",
        hint="allow more with --timeout, or make it do less",
    )


def _no_space(folder: Path) -> ProfileError:
    return ProfileError(
        f"no space is left in {folder}",
        hint="free some, or set TMPDIR to a folder on a disk with space",
    )


def _disk_error(target: Path, error: OSError) -> ProfileError:
    if _is_full(target.parent):
        return _no_space(target.parent)
    return ProfileError(
        f"{target} can't be written ({error.strerror})",
        hint="name a file in a folder that exists and can be written",
    )


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _LOW_SPACE
    except OSError:
        return False


def _may_sample() -> bool:
    try:
        allowed = int(_PARANOID.read_text()) <= _MAX_PARANOID
    except (OSError, ValueError):
        return True
    return allowed or os.geteuid() == 0


def _ask(program: Path, *arguments: str, timeout_s: float = 60) -> str:
    """All that a program prints; its exit code does not matter."""
    try:
        done = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProfileError(
            f"{program} could not be run ({type(error).__name__})",
            hint=f"check that this command works: {program} {' '.join(arguments)}",
        ) from error
    return done.stdout

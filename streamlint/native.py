"""Native call stacks with source lines, where the binaries are at hand."""

from __future__ import annotations

import time
from pathlib import Path

from streamlint.escape import without_home
from streamlint.findings import SourceFrame
from streamlint.own import is_system_module, module_name
from streamlint.symbols import Lines, NoLines, Tool, files_named, lines_of
from streamlint.trace.model import NativeFrame, Trace

_LIMIT_S = 30.0
_MAX_MODULES = 32


class NativeLines:
    """Source lines of a trace's native frames.

    A binary is looked for by its name in `Settings.symbols`, then where it was when
    recorded. ``notes`` say, of what was asked for, why it has no lines.
    """

    def __init__(self, trace: Trace) -> None:
        """Look every module of the user's up, once."""
        self._places = trace.settings.symbols
        self._path = trace.path
        self._found: dict[tuple[int, str], Lines] = {}
        self.notes: list[str] = []
        frames = trace.native_frames
        modules = [m for m in frames["module"].unique() if not is_system_module(m)]
        if not modules:
            self._note("the trace has no call stacks of native code (--cudabacktrace)")
            return
        modules = sorted(modules)[:_MAX_MODULES]
        files = self._files(modules)
        tool = Tool.installed() if any(files.values()) else None
        if any(files.values()) and tool is None:
            self._note("neither llvm-symbolizer nor addr2line is installed")
            return
        deadline = time.monotonic() + _LIMIT_S
        own = frames.filter(frames["module"].is_in(modules))
        for (pid, module), here in own.group_by("pid", "module", maintain_order=True):
            if not isinstance(pid, int) or not isinstance(module, str):
                continue
            named = dict(here.select("address", "symbol").sort("address").iter_rows())
            wanted = {ip: symbol or "" for ip, symbol in named.items()}
            if tool is not None and files[module]:
                found = self._best(tool, module, files[module], wanted, deadline)
                self._found[pid, module] = found
            elif not files[module]:
                self._note(f"no file is named {module_name(module)}")

    def _files(self, modules: list[str]) -> dict[str, list[Path]]:
        """Files that a module may have been read from, by module."""
        asked = files_named({module_name(m) for m in modules}, self._places)
        found: dict[str, list[Path]] = {}
        for module in modules:
            recorded = Path(module).expanduser() if module[:2] == "~/" else Path(module)
            found[module] = list(asked.get(module_name(module), ()))
            if not found[module] and self._is_recorded(recorded):
                found[module] = [recorded]
        return found

    def _is_recorded(self, file: Path) -> bool:
        """Whether a file is where a module was and not built since."""
        try:
            built = file.stat().st_mtime if file.is_absolute() else None
            return built is not None and built <= self._path.stat().st_mtime
        except (OSError, ValueError):
            return False

    def _best(
        self,
        tool: Tool,
        module: str,
        files: list[Path],
        wanted: dict[int, str],
        deadline: float,
    ) -> Lines:
        """What the files that fit agree on; nothing where they don't."""
        reasons: list[str] = []
        results: list[Lines] = []
        for file in files:
            try:
                lines = lines_of(tool, file, wanted, deadline)
            except NoLines as error:
                reasons.append(f"{without_home(str(file))}: {error}")
                continue
            if not _any_line(lines):
                reasons.append(f"{without_home(str(file))}: it was built without -g")
            results.append(lines)
        lined = [lines for lines in results if _any_line(lines)] or results
        if not lined:
            self._note(reasons[0])
            return {}
        if any(lines != lined[0] for lines in lined):
            self._note(f"several files named {module_name(module)} fit and disagree")
            return {}
        if not _any_line(lined[0]):
            self._note(reasons[0])
        return lined[0]

    def _note(self, why: str) -> None:
        note = f"no source lines: {why}"
        if self._places and note not in self.notes:
            self.notes.append(note)

    def at(self, pid: int, frame: NativeFrame) -> tuple[SourceFrame, ...]:
        """The functions at a frame, inlined ones first; empty where unknown.

        Without a line, the file is the module's name.
        """
        lines = self._found.get((pid, frame.module), {}).get(frame.address, ())
        return tuple(
            SourceFrame(
                without_home(line.file) if line.line else module_name(frame.module),
                line.line,
                without_home(line.function or frame.symbol or "?"),
            )
            for line in lines
        )

    def has_lines(self, pid: int, module: str) -> bool:
        """Whether the functions of this module that have no line are a library's."""
        return _any_line(self._found.get((pid, module), {}))


def _any_line(lines: Lines) -> bool:
    return any(line.line for here in lines.values() for line in here)

"""Source lines of code addresses, from the binaries of a recorded program.

A trace names modules and addresses, not where a module was loaded nor which build it
was. Both are proven from the binary before any line is believed: see `lines_of`.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import stat
import struct
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_PAGE = 4096
_MAX_BASES = 1 << 16
_MAX_ADDRESSES = 2_000
_MAX_QUERIES = 20_000
_MAX_ENTRIES = 200_000
_MAX_TEXT = 1_000
_MAX_INLINED = 32
_SURE_CALLS = 4
"""Return addresses that must all follow a call where no name is known: at another
base a few in a hundred do by chance, so one of some hundred bases fits all four in a
thousandth of the cases."""
_SURE_NAMES = 3
"""Addresses in functions of known names, where there is no code to look for calls."""
_X86_64, _AARCH64 = 62, 183
_LOAD, _EXECUTABLE = 1, 1
_HEADER = struct.Struct("<4sBB10xHHIQQQIHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_ENVIRONMENT = ("PATH", "SYSTEMROOT", "TMPDIR")
"""What the tools get of it: not DEBUGINFOD_URLS, with which they ask the network."""


class Line(NamedTuple):
    """A function, and the place in its source where that is known."""

    function: str
    file: str
    line: int | None


Lines = Mapping[int, tuple[Line, ...]]
"""By address, the functions there: inlined ones first, the innermost of all first."""


class NoLines(Exception):
    """Why a binary says nothing about the addresses."""


class Tool(NamedTuple):
    """A program that finds lines, by the options that both kinds have."""

    command: tuple[str, ...]

    @classmethod
    def installed(cls) -> Tool | None:
        """LLVM's, which knows the names of inlined functions, else GNU's."""
        path = shutil.which("llvm-symbolizer")
        if path is not None:
            return cls((path, "--output-style=GNU"))
        path = shutil.which("addr2line")
        return None if path is None else cls((path,))

    def lines(self, binary: Path, addresses: Iterable[int], timeout_s: float) -> Lines:
        """What is at these addresses of a file; raises `NoLines`."""
        wanted = sorted(set(addresses))
        command = [*self.command, "-a", "-f", "-i", "-C", "-e", str(binary.absolute())]
        try:
            done = subprocess.run(
                command,
                input="".join(f"{address:#x}\n" for address in wanted),
                env={k: v for k, v in os.environ.items() if k in _ENVIRONMENT}
                | {"LC_ALL": "C"},
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=max(0.1, timeout_s),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NoLines(f"{Path(command[0]).name} took too long") from error
        except OSError as error:
            raise NoLines(f"{Path(command[0]).name} can't be run") from error
        return _parsed(done.stdout, wanted)


def _parsed(output: str, wanted: Sequence[int]) -> Lines:
    """An address, then pairs of a function's line and a place's, for each address."""
    found: dict[int, tuple[Line, ...]] = {}
    rows = [row for row in output.splitlines() if row]
    at = 0
    for index, address in enumerate(wanted):
        wanted_next = wanted[index + 1 : index + 2]
        if at >= len(rows) or _number(rows[at]) != address:
            break
        at += 1
        here: list[Line] = []
        while at + 1 < len(rows) and _number(rows[at]) not in wanted_next:
            here.append(_line(rows[at], rows[at + 1]))
            at += 2
        found[address] = tuple(here[:_MAX_INLINED])
    return found


def _number(row: str) -> int | None:
    return int(row, 16) if re.fullmatch(r"0x[0-9a-f]{1,16}", row) else None


def _line(function: str, place: str) -> Line:
    file, _, number = re.sub(r" \(discriminator \d+\)$", "", place).rpartition(":")
    function = "" if function == "??" else function[:_MAX_TEXT]
    if file in ("", "??") or not number.isdecimal() or not int(number[:9]) > 0:
        return Line(function, "", None)
    return Line(function, posixpath.normpath(file)[:_MAX_TEXT], int(number[:9]))


# Which file, and where it was loaded ---------------------------------------------


def files_named(names: set[str], places: Iterable[Path]) -> dict[str, list[Path]]:
    """Files of these names (or with .debug behind) among and below ``places``."""
    wanted = {ending: name for name in names for ending in (name, f"{name}.debug")}
    found: dict[str, list[Path]] = {}
    left = _MAX_ENTRIES
    for place in places:
        if not place.is_dir():
            if place.name in wanted:
                found.setdefault(wanted[place.name], []).append(place)
            continue
        for folder, folders, files in os.walk(place):
            folders.sort()
            left -= len(folders) + len(files)
            for file in sorted(wanted.keys() & set(files)):
                found.setdefault(wanted[file], []).append(Path(folder, file))
            if left < 0:
                break
    return found


def lines_of(
    tool: Tool, binary: Path, frames: Mapping[int, str], deadline: float
) -> Lines:
    """Lines of return addresses, by address; the call is just before each.

    ``frames`` has the recorded name of the function at each address, empty where
    unknown. `NoLines` unless ``binary`` is the build that was recorded: it must have
    one single load address, a multiple of the page size, such that every address lies
    in code and behind a call, and in the function of its name. At least one name or
    four calls must have said so, or three names where the file has no code. A build
    that differs in lines alone fits as well. ``deadline`` is on `time.monotonic`.
    """
    addresses = sorted(frames)[:_MAX_ADDRESSES]
    with _Binary(binary) as code:
        bases = code.bases(addresses)
        checked = code.has_text
    if len(bases) * len(addresses) > _MAX_QUERIES:
        raise NoLines("its load address can't be told")
    queries = {ip - base - 1 for base in bases for ip in addresses}
    found = tool.lines(binary, queries, deadline - time.monotonic()) if queries else {}
    fitting: list[dict[int, tuple[Line, ...]]] = []
    for base in bases:
        here = {ip: found.get(ip - base - 1, ()) for ip in addresses}
        named = [ip for ip in addresses if frames[ip]]
        sure = len(named) >= (1 if checked else _SURE_NAMES)
        sure |= checked and len(addresses) >= _SURE_CALLS
        if sure and all(_is_in(frames[ip], here[ip]) for ip in named):
            fitting.append(here)
    if not fitting:
        raise NoLines("it can't be shown to be the build that was recorded")
    if len(fitting) > 1:
        raise NoLines("its load address can't be told")
    return fitting[0]


def _is_in(name: str, lines: Sequence[Line]) -> bool:
    """Whether the function that has the address, inlined ones aside, has this name."""
    if not lines:
        return False
    function = lines[-1].function
    # nsys calls nvcc's stub of a kernel by the kernel's name.
    return function.startswith("__device_stub__") or _bare(name) == _bare(function)


def _bare(name: str) -> str:
    """A function's name without what demanglers write differently."""
    name = re.sub(r" \[clone [^\]]*\]|@.*$|\s", "", name)
    name = re.sub(r"(\.(cold|part|constprop|isra|lto_priv|llvm)|\.\d+)+$", "", name)
    return name.partition("(")[0] or name


class _Binary:
    """The code of a 64-bit ELF file; raises `NoLines` for any other file."""

    def __init__(self, path: Path) -> None:
        try:
            # A pipe or a device must not be waited for.
            flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
            self._file = os.open(path, flags | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise NoLines("it can't be read") from error
        try:
            self._read()
        except (struct.error, OSError) as error:
            self.__exit__()
            raise NoLines("it is no binary of Linux") from error
        except NoLines:
            self.__exit__()
            raise

    def __enter__(self) -> _Binary:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def _read(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise NoLines("it is no file")
        head = _HEADER.unpack(self._at(0, _HEADER.size))
        magic, bits, order, _, self._machine, _, _, table, _, _, _, size, count = head
        if (magic, bits, order) != (b"\x7fELF", 2, 1):
            raise NoLines("it is no binary of Linux")
        self._code: list[tuple[int, int, int]] = []
        self.has_text = self._machine in (_X86_64, _AARCH64)
        for number in range(count):
            kind, flags, offset, start, _, stored, length, _ = _SEGMENT.unpack(
                self._at(table + number * size, _SEGMENT.size)
            )
            if kind == _LOAD and flags & _EXECUTABLE:
                self._code.append((start, start + length, offset))
                # Files with only the debugging part have no code.
                self.has_text &= stored == length

    def _at(self, offset: int, size: int) -> bytes:
        if not 0 <= offset < 1 << 62:
            return b""
        os.lseek(self._file, offset, os.SEEK_SET)
        return os.read(self._file, size)

    def bases(self, addresses: Sequence[int]) -> list[int]:
        """Load addresses at which every return address can be one."""
        if not addresses:
            return []
        first = addresses[0] - 1
        found: list[int] = []
        for start, end, _ in self._code:
            if (end - start) // _PAGE > _MAX_BASES:
                raise NoLines("its code is too large")
            lowest = -(-(first - end + 1) // _PAGE) * _PAGE
            for base in range(lowest, first - start + 1, _PAGE):
                if all(self._can_return(ip - base) for ip in addresses):
                    found.append(base)
        return sorted(set(found))

    def _can_return(self, at: int) -> bool:
        for start, end, offset in self._code:
            if start < at <= end:
                if not self.has_text:
                    return True
                before = min(8, at - start)
                code = self._at(offset + at - start - before, before)
                return self._is_call(code.rjust(8, b"\0"), at)
        return False

    def _is_call(self, code: bytes, end: int) -> bool:
        """Whether these 8 bytes end with a call, at the address ``end``."""
        if self._machine == _AARCH64:
            (word,) = struct.unpack("<I", code[-4:])
            return bool(word >> 26 == 0b100101 or word & 0xFFFFFC1F == 0xD63F0000)
        if code[-5] == 0xE8:
            target = end + struct.unpack("<i", code[-4:])[0]
            if any(start <= target < limit for start, limit, _ in self._code):
                return True
        return any(
            code[-size] == 0xFF and _is_indirect_call(code[-size + 1 :], size)
            for size in (2, 3, 4, 6, 7)
        )


def _is_indirect_call(operand: bytes, size: int) -> bool:
    """Whether 0xFF with this operand is an x86-64 call of ``size`` bytes in all."""
    mode, code, register = operand[0] >> 6, operand[0] >> 3 & 7, operand[0] & 7
    scaled = mode != 3 and register == 4
    length = 2 + scaled + (0, 1, 4, 0)[mode]
    if mode == 0 and register == 5:
        length += 4
    if mode == 0 and scaled and len(operand) > 1 and operand[1] & 7 == 5:
        length += 4
    return code == 2 and length == size

"""Names that stand for the real ones in a redacted copy, the same everywhere.

The copy has to lint like the original: iterations are recognised by texts that differ
in digits alone, library frames by their folder, so these survive.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from string import ascii_lowercase

from streamlint.trace.stacks import PYTHON_BACKTRACE_DOMAIN

OWN_DOMAIN = "streamlint"
"""The NVTX domain in which a program tells streamlint something."""
RANGE, OWN, DOMAIN = "range", "own", "domain"
"""What an NVTX text is: of an event, of an event of `OWN_DOMAIN`, of a domain."""

_OWN_TEXT = re.compile(r"l2\.|streamlint:")
_KNOWN_DOMAINS = frozenset(
    (
        *(OWN_DOMAIN, PYTHON_BACKTRACE_DOMAIN.lower(), "cuda", "cupti", "nccl"),
        *("nvshmem", "cublas", "cublaslt", "cudnn", "cufft", "curand", "cusolver"),
        *("cusparse", "cutensor", "tensorrt", "nvjpeg", "cccl", "cub", "thrust"),
    )
)
_DIGITS = re.compile(r"\d+")
_PYTHON = re.compile(r"python[\d.]*")
_FOLDERS = tuple(
    map(
        re.compile,
        (r"(?:^|/)(lib/python\d[\d.]*/)", r"(?:^|/)((?:site|dist)-packages/)"),
    )
)
_SYSTEM = re.compile(r"/(usr/)?lib|.*/lib(cu|nv|torch|c10|python)[^/]*$", re.S)
_SUFFIX = re.compile(r"\.(pyx?|ipynb|so|dll|exe|cuh?|cpp|cc|c|hpp|h)(\.\d+)*$")
_NO_FUNCTION = re.compile(r"0x0|<(module|lambda|(list|dict|set)comp|genexpr)>|")
_KNOWN_THREAD = re.compile(
    r"\[NSys.*\]|\*2CommsProcesso|cuda-EvtHandlr|cuda[\da-f]{11}|CUPTI worker thread"
    r"|python[\d.]*"
)
"""Threads of nsys, CUPTI and the driver."""
_THREAD_NAME = 15
"""Characters of a thread's name that Linux keeps."""


class Names:
    """Gives each name its replacement, and each replacement a key of StringIds."""

    def __init__(self, texts: dict[int, str], programs: set[str]) -> None:
        """``texts``: the strings by key; ``programs``: names without folders."""
        self._texts = texts
        self._programs = {name[:_THREAD_NAME]: name for name in sorted(programs)}
        self._numbers: dict[str, dict[str, int]] = {}
        self._keys: dict[str, int] = {}
        self._known: dict[tuple[str, int, int], int] = {}
        self._next = max(texts, default=0) + 1

    @property
    def strings(self) -> list[tuple[int, str]]:
        """Key and text of every replacement that was given a key."""
        return [(key, text) for text, key in self._keys.items()]

    @property
    def count(self) -> int:
        """How many names were replaced."""
        return sum(map(len, self._numbers.values()))

    def kernel_key(self, key: int) -> int:
        """For a kernel's short name."""
        return self._replaced("kernel", key, 0, self._kernel)

    def full_kernel_key(self, short: int, full: int) -> int:
        """For a kernel's full name; ``short`` is the key of its short one."""
        name = self._texts.get(short, "")
        return self._replaced(
            "full", full, short, lambda text: self._full_kernel(name, text)
        )

    def function_key(self, key: int) -> int:
        """For a function of a call stack."""
        return self._replaced("function", key, 0, self._function)

    def file_key(self, key: int) -> int:
        """For a file or module of a call stack."""
        return self._replaced("file", key, 0, self.file)

    def thread_key(self, key: int) -> int:
        """For a thread's name: most are called like their program."""
        return self._replaced("thread", key, 0, self._thread)

    def nvtx_key(self, key: int, kind: str) -> int:
        """For a registered text of NVTX."""
        return self._replaced(kind, key, 0, lambda text: self.nvtx(text, kind))

    def nvtx(self, text: str, kind: str) -> str:
        """For a text of NVTX; ``kind`` says of what."""
        if kind == DOMAIN:
            known = text.lower() in _KNOWN_DOMAINS
            return text if known else f"domain_{self._number('domain', text)}"
        if not text or (kind == OWN and _OWN_TEXT.match(text)):
            return text
        # Letters: a number of its own would make all ranges iterations of one loop.
        word = _letters(self._number("range", _DIGITS.sub("#", text)))
        return " ".join((f"range_{word}", *_DIGITS.findall(text)))

    def file(self, path: str) -> str:
        """For a file or program: its kind and whether it is a library's survive."""
        path = html.unescape(path)
        if not path or _PYTHON.fullmatch(path.rpartition("/")[2]):
            return path
        folders = [found[1] for one in _FOLDERS if (found := one.search(path))]
        if folders and path.startswith(("/usr/lib", "/lib")):
            folders.insert(0, "/usr/")
        elif not folders and _SYSTEM.match(path):
            folders = ["/usr/lib/"]
        suffix = found[0] if (found := _SUFFIX.search(path)) else ""
        name = f"file_{self._number('file', path)}{suffix}"
        if path.startswith("<"):
            name = f"<{name}>"
        elif path.startswith("["):
            name = f"[{name}]"
        return "".join(folders) + name

    def _kernel(self, name: str) -> str:
        return f"kernel_{self._number('kernel', name)}"

    def _full_kernel(self, short: str, full: str) -> str:
        name = self._kernel(short or full)
        if full in (short, ""):
            return name
        number = self._number(f"full name of {name}", full)
        return name if number == 1 else f"{name}_{number}"

    def _function(self, name: str) -> str:
        plain = html.unescape(name)
        if _NO_FUNCTION.fullmatch(plain):
            return name
        return f"function_{self._number('function', plain)}"

    def _thread(self, name: str) -> str:
        program = self._programs.get(name[:_THREAD_NAME])
        if program is not None:
            return self.file(program)
        known = not name or _KNOWN_THREAD.fullmatch(name)
        return name if known else f"thread_{self._number('thread', name)}"

    def _number(self, kind: str, name: str) -> int:
        numbers = self._numbers.setdefault(kind, {})
        return numbers.setdefault(name, len(numbers) + 1)

    def _replaced(
        self, kind: str, key: int, beside: int, replace: Callable[[str], str]
    ) -> int:
        """The key of what replaces the string ``key``; unknown ones stay.

        A string may be a kernel's name here and a function's there: each use gets
        a key of its own.
        """
        which = (kind, key, beside)
        if which not in self._known:
            text = self._texts.get(key)
            self._known[which] = key if text is None else self._key(replace(text))
        return self._known[which]

    def _key(self, text: str) -> int:
        if text not in self._keys:
            self._keys[text] = self._next
            self._next += 1
        return self._keys[text]


def _letters(number: int) -> str:
    """1 is a, 26 is z, 27 is aa."""
    word = ""
    while number:
        number, letter = divmod(number - 1, len(ascii_lowercase))
        word = ascii_lowercase[letter] + word
    return word

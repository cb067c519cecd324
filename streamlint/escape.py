"""Makes text from a trace safe to show: no control characters, no home folders."""

from __future__ import annotations

import re
import unicodedata

HOME_SIGN = r"(?i)[/\\](?:homes?|users)[/\\]|~[^/\\]"
"""What every text with a home folder in it matches; for polars and for Python.

Polars compiles it in a third of the time that it takes with ``\\w``.
"""

_SOME_HOME = re.compile(HOME_SIGN)
_PART = r"""[^/\\\s"'<>|:;,()\[\]{}]"""
# Windows has names with spaces; elsewhere a space may end the path.
_USER = rf"(?:{_PART}(?:{_PART}| ){{0,60}}(?=\\)|{_PART}+)"
# Texts, which `re` compiles when first needed: most traces have no home folder.
_HOME = (
    r"(?i)(?<![^\s\"'=:(\[{<>|;,])(?:[A-Z]:)?[/\\]+(?:homes?|users)[/\\]+"
    rf"{_USER}|(?<![\w/\\~.-])~[\w.-]+(?=[/\\])"
)
_DEEP_HOME = rf"(?i)(?<=[/\\])((?:homes?|users)[/\\]+){_USER}(?=[/\\])"


def without_home(text: str) -> str:
    """``text`` with ``~`` for home folders, whose names are mostly those of users.

    ``/home/ann/a.py`` and ``C:\\Users\\ann\\a.py`` become ``~/a.py``; where the folder
    of homes is below another, only the name goes: ``/data/users/~/a.py``.
    """
    if not _SOME_HOME.search(text):
        return text
    return re.sub(_DEEP_HOME, r"\1~", re.sub(_HOME, "~", text))


def printable(text: str, limit: int | None = None) -> str:
    """``text`` with every invisible character escaped, cut to ``limit`` characters.

    Control, format, surrogate and line-separator characters become ``\\xNN`` or
    ``\\uNNNN``, so that a kernel's name can't move the cursor or hide a line.
    """
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
    if text.isprintable():
        return text
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    if character == "\N{SOFT HYPHEN}" or unicodedata.category(character) in (
        "Cc",
        "Cf",
        "Cs",
        "Co",
        "Zl",
        "Zp",
    ):
        code = ord(character)
        if code < 0x100:
            return f"\\x{code:02x}"
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    return character

"""Makes text from a trace safe to show: no control or direction characters."""

from __future__ import annotations

import unicodedata


def printable(text: str, limit: int | None = None) -> str:
    """``text`` with every invisible character escaped, cut to ``limit`` characters.

    Control, format, surrogate and line-separator characters become ``\\xNN`` or
    ``\\uNNNN``, so that a kernel's name can't move the cursor or hide a line.
    """
    if limit is not None and len(text) > limit:
        text = text[: limit - 1] + "…"
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

"""One self-contained page about a trace, or about two captures side by side.

A browser needs nothing but the file: plotly's bundle, the data and the code are in
it. A policy in its head forbids every other script and all network access; strings
from the trace only ever become text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path

from streamlint import __version__
from streamlint.errors import UsageError
from streamlint.reporters.lanes import KINDS, MEMORY
from streamlint.reporters.timeline import Capture

PAGE = Path(__file__).with_name("page")
_CDN = "https://cdn.plot.ly"
_MIN_BUNDLE = 200_000
"""The smallest plotly.js bundle has a megabyte; less is some other file."""


def page(captures: Sequence[Capture], plotlyjs: str = "inline") -> str:
    """The page; ``plotlyjs`` is "inline", "cdn" or the path of a plotly.js bundle."""
    document = {
        "version": __version__,
        "kinds": KINDS,
        "memory": MEMORY,
        "captures": [capture.head for capture in captures],
    }
    blobs = "\n".join(
        f'<script type="text/plain" id="blob-{number}-{i}">{blob}</script>'
        for number, capture in enumerate(captures)
        for i, blob in enumerate(capture.blobs)
    )
    files = " and ".join(str(capture.head["file"]) for capture in captures)
    return filled("report", f"streamlint: {files}", document, plotlyjs, blobs)


def filled(
    name: str, title: str, document: object, plotlyjs: str, blobs: str = ""
) -> str:
    """The page of this name with its data, its code and plotly's in it."""
    script = _read(f"{name}.js")
    source, plotly = _plotly(plotlyjs)
    values = {
        "CSP": _policy(source, _hash(script)),
        "TITLE": html.escape(title),
        "FOOTER": html.escape(f"streamlint {__version__} · one file, loads nothing"),
        "CSS": _read("report.css"),
        "DATA": in_script(document),
        "BLOBS": blobs,
        "PLOTLY": plotly,
        "JS": script,
    }
    if plotlyjs == "cdn":
        values["FOOTER"] = html.escape(f"streamlint {__version__}")
    # Split once: what a value holds is never searched for placeholders.
    parts = (_read("top.html") + _read(f"{name}.html")).split("@")
    return "".join(values.get(part, part) for part in parts)


def in_script(document: object) -> str:
    """JSON that can't end the script element around it, nor open a comment."""
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(*scripts: str) -> str:
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(scripts),
        # plotly.js sets styles; no text of the trace becomes one.
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _plotly(plotlyjs: str) -> tuple[str, str]:
    """What the policy must allow, and the element that loads plotly.js."""
    # Imported late: half a second that no other report needs.
    from plotly.offline import (
        get_plotlyjs,
        get_plotlyjs_version,
    )

    if plotlyjs == "cdn":
        url = f"{_CDN}/plotly-{get_plotlyjs_version()}.min.js"
        digest = _hash(get_plotlyjs()).strip("'")
        return (
            f"'{digest}' {url}",
            f'<script src="{url}" integrity="{digest}" '
            'crossorigin="anonymous"></script>',
        )
    text = get_plotlyjs() if plotlyjs == "inline" else _bundle(Path(plotlyjs))
    # The parser of a page changes these before it takes the hash.
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd")
    return _hash(text), f"<script>{text}</script>"


def _bundle(path: Path) -> str:
    hint = "name a plotly.js bundle such as plotly-cartesian.min.js, or inline or cdn"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} can't be read as plotly.js", hint=hint) from error
    if "</script" in text.lower() or "<!--" in text:
        raise UsageError(f"{path} can't be put into a page", hint=hint)
    if len(text) < _MIN_BUNDLE or "plotly" not in text[:2_000].lower():
        raise UsageError(f"{path} is no plotly.js bundle", hint=hint)
    return text


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")

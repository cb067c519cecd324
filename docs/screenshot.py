"""Draws docs/screenshot-lint.svg: what `streamlint lint` shows for a sample.

.venv/bin/python docs/screenshot.py
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "screenshot-lint.svg"
TRACE = "sample_traces/legacy-null-stream-barrier/bad.sqlite"
WIDTH = 101


def output() -> str:
    """The command's real output, with the colours of a terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "streamlint", "lint", TRACE, "--color", "always"],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return done.stdout


def svg(text: str) -> str:
    """A terminal window with this text."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(f"$ streamlint lint {TRACE}"), style="bold")
    console.print(Text.from_ansi(text))
    drawn = console.export_svg(
        title="streamlint", theme=MONOKAI, unique_id="lint", font_aspect_ratio=0.61
    )
    # Fonts from the network are no use in a README; the fallback is monospace.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    return drawn.replace(
        "Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace"
    )


if __name__ == "__main__":
    PICTURE.write_text(svg(output()), encoding="utf-8")

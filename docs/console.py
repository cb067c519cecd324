"""Runs the commands that pages show, and writes what they print.

A page has them in blocks of the language `console`: a line after `$ ` is a command,
lines after `> ` go on with it, the lines below are what it prints. A line `...` stands
for lines that the page leaves out.

.venv/bin/python docs/console.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("tutorial.md", "writing-rules.md")
LEFT_OUT = "..."
FOLDER = "/home/me/project"
"""What pages call the folder in which commands run."""
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_MARK = "-- next command --"


class Step(NamedTuple):
    """A command, what a page says that it prints, and what it does print."""

    command: str
    shown: str
    printed: str

    @property
    def true(self) -> bool:
        """Whether the page is right, but for the number of rules and for times."""
        pattern = re.escape(_normal(self.shown)).replace(
            re.escape(f"{LEFT_OUT}\n"), "(?:.*\n)*?"
        )
        return re.fullmatch(pattern, _normal(self.printed)) is not None


def _normal(text: str) -> str:
    text = re.sub(r"\d+ rules found nothing", "N rules found nothing", text)
    return re.sub(r"passed in [\d.]+s", "passed in N s", text)


def steps(page: str, folder: Path) -> Iterator[list[Step]]:
    """Run a page's blocks in ``folder``, one after another; each is one shell."""
    for block in _BLOCK.findall(page):
        parts = re.split(r"^\$ (.*(?:\n>.*)*)\n", block, flags=re.MULTILINE)
        assert parts[0] == "", f"no command comes before: {parts[0]}"
        printed = _run(parts[1::2], folder)
        told = zip(parts[1::2], parts[2::2], printed, strict=True)
        yield [Step(*step) for step in told]


def _run(commands: list[str], folder: Path) -> list[str]:
    script = "".join(
        re.sub("\n> ?", "\n", command) + f'\ncode=$?; echo "{_MARK}"; (exit $code)\n'
        for command in commands
    )
    environment = {
        **{n: v for n, v in os.environ.items() if not n.startswith("STREAMLINT")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder.parent),
        "PYTHONIOENCODING": "utf-8",
        "NO_COLOR": "1",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    return done.stdout.replace(str(folder), FOLDER).split(f"{_MARK}\n")[:-1]


def checkout(folder: Path) -> Path:
    """A folder in ``folder`` with what the commands of a page find in a checkout."""
    folder = folder / "project"
    folder.mkdir()
    for name in ("sample_traces", "harness"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def renewed(page: str, folder: Path) -> str:
    """The page with what its commands print now; what is true stays as it is."""
    blocks = steps(page, folder)

    def block(_: re.Match[str]) -> str:
        told = "".join(
            f"$ {step.command}\n{step.shown if step.true else step.printed}"
            for step in next(blocks)
        )
        return f"```console\n{told}```"

    return _BLOCK.sub(block, page)


def main() -> None:
    """Renew every page."""
    for name in PAGES:
        path = ROOT / "docs" / name
        with tempfile.TemporaryDirectory() as folder:
            page = renewed(path.read_text(encoding="utf-8"), checkout(Path(folder)))
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

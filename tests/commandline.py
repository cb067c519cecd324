"""Runs the command as a user does: in this process, or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from streamlint import cli


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Run:
    """Calls the command in this process, as its entry point does."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *args: str | Path) -> Done:
        argv = ["streamlint", *map(str, args)]
        self._monkeypatch.setattr(sys, "argv", argv)
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Done(code, *self._capsys.readouterr())


def process(
    *args: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> Done:
    """The command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "streamlint", *args],
        cwd=cwd,
        env=dict(os.environ, PYTHONIOENCODING="utf-8") if env is None else env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
    )
    return Done(done.returncode, done.stdout, done.stderr)

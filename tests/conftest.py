"""Fixtures of several files; lets tests import the helpers beside them."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# pytest's importlib mode does not.
sys.path.insert(0, str(Path(__file__).parent))

from commandline import Run

# How long an example takes depends on what else the machine does.
settings.register_profile("streamlint", deadline=None)
settings.load_profile("streamlint")


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """The command, called in this process; its signal handlers don't stay."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield Run(monkeypatch, capsys)
    for number, handler in before.items():
        signal.signal(number, handler)

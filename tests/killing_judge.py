"""Judges for tests of many traces: some end the process that runs them."""

from __future__ import annotations

import os
import signal

from streamlint.engine import Report, lint
from streamlint.registry import select
from streamlint.trace.model import Trace


def judge(trace: Trace) -> Report:
    """Judge a trace by one rule, or die with it if its name says so."""
    if "kills" in trace.path.name:
        os.kill(os.getpid(), signal.SIGKILL)
    if "breaks" in trace.path.name:
        raise ZeroDivisionError(trace.path.name)
    return lint(trace, select(["legacy-null-stream-barrier"], []))


def dies_once(trace: Trace) -> Report:
    """Die at the first trace whose mark is not there yet, which leaves it."""
    mark = trace.path.with_suffix(".died")
    if "once" in trace.path.name and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return judge(trace)

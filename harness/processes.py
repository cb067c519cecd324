"""Runs programs so that none outlives us and Ctrl-C reaches them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

GRACE_S = 10.0
"""How long a program may take to end once asked to."""
_MAX_LINES = 20_000
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""What the first, second and third Ctrl-C send."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended; ``exit_code`` as a shell gives it, 128 + N for signal N.

    ``output`` is empty unless it was captured.
    """

    exit_code: int
    output: str
    interrupted: bool
    timed_out: bool


class Children:
    """The programs that run at the moment; `stop` ends them and refuses new ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self.stopped = False

    def stop(self) -> None:
        """End every program, and every program started after this."""
        with self._lock:
            self.stopped = True
            running = list(self._running)
        threads = [threading.Thread(target=end, args=(child,)) for child in running]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @contextlib.contextmanager
    def _holding(self, child: subprocess.Popen[str]) -> Iterator[None]:
        with self._lock:
            self._running.add(child)
            stopped = self.stopped
        if stopped:
            end(child)
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(child)


def run(
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
    children: Children | None = None,
) -> Ended:
    """Run ``command`` to its end.

    With ``on_line`` its output is captured and passed on line by line; without, it
    uses our terminal. In the main thread, Ctrl-C and SIGTERM are passed on to it
    instead of ending us.
    """
    captured = on_line is not None
    pipe = subprocess.PIPE if captured else None
    # A session of its own: what we pass on is then all that it gets.
    child = subprocess.Popen(
        [str(part) for part in command],
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL if captured else None,
        stdout=pipe,
        stderr=subprocess.STDOUT if captured else None,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: deque[str] = deque(maxlen=_MAX_LINES)
    late = threading.Event()

    def too_late() -> None:
        late.set()
        end(child)

    timer = threading.Timer(timeout_s or 0, too_late)
    timer.daemon = True
    if timeout_s is not None:
        timer.start()
    holding = (children or Children())._holding(child)
    with holding, _passing_on(child) as passed:
        try:
            for line in child.stdout or ():
                lines.append(line)
                if on_line is not None:
                    on_line(line)
            child.wait()
        finally:
            timer.cancel()
            if late.is_set():
                timer.join()
            if child.poll() is None:
                end(child)
            if child.stdout is not None:
                child.stdout.close()
    code = child.returncode
    return Ended(
        exit_code=code if code >= 0 else 128 - code,
        output="".join(lines),
        interrupted=bool(passed) or bool(children and children.stopped),
        timed_out=late.is_set(),
    )


def end(child: subprocess.Popen[str], grace_s: float = GRACE_S) -> None:
    """End ``child`` and whatever it started: asked first, then forced."""
    below = _descendants(child.pid)
    _signal_group(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    _signal_group(child.pid, signal.SIGKILL)
    # Some leave the group: nsys may put its target into one of its own.
    for pid, started in below.items():
        if _stat(pid)[1] == started:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _passing_on(child: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Passes Ctrl-C and SIGTERM on to ``child``; yields the list of those that came."""
    passed: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield passed
        return

    def pass_on(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupts = passed.count(signal.SIGINT)
            number = _SIGNALS[min(interrupts, len(_SIGNALS) - 1)]
            passed.append(signal.SIGINT)
        else:
            passed.append(number)
        _signal_group(child.pid, number)

    before = {s: signal.signal(s, pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield passed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, number)


def _descendants(pid: int) -> dict[int, int]:
    """Processes below ``pid`` as far as /proc tells, each with its start time."""
    children: dict[int, dict[int, int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        parent, started = _stat(int(folder.name))
        children.setdefault(parent, {})[int(folder.name)] = started
    found: dict[int, int] = {}
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), {})
        todo += below
        found.update(below)
    return found


def _stat(pid: int) -> tuple[int, int]:
    """Parent and start time of a process; zeros if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return int(fields[1]), int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0, 0

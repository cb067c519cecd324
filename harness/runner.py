"""Times and records the workloads on a GPU; standard library alone."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from streamlint.errors import StreamlintError, UsageError
from streamlint.files import replacing
from streamlint.harness import nsys as nsys_module
from streamlint.harness import processes
from streamlint.harness.machine import cuda_release, find_nvcc, look
from streamlint.harness.nsys import Detail, Say
from streamlint.harness.results import DEFAULT, FULL, PLAIN, Result, Step
from streamlint.harness.workloads import (
    BUILD,
    SOURCES,
    VARIANTS,
    Builder,
    BuildError,
    Pair,
    Workload,
    command,
    find,
    select,
    source_hash,
)

REPEAT = 7
"""Unprofiled repeats of one process; enough for a median and a range."""
ROUNDS = 5
"""Processes that time each variant. Repeats in one process spread less than
processes do, which differ in where memory lies and when they run."""
TIMEOUT_S = 120.0
JOBS = 6
"""Recordings in work at a time; one has the GPU, the others are imported."""
_SWITCHES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
)
"""Variables that change what a workload shows: only its header may set them."""
_REGION = re.compile(r"^REGION_US[ \t]+(\d+(?:\.\d+)?)\s*$", re.M)
_PROBED = re.compile(r"^PROBE .*$", re.M)
_PASSED = re.compile(r"^CHECK ok\s*$", re.M)
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_MAX_QUOTE = 200


class Status(str, Enum):
    """How a pair fared."""

    DONE = "done"
    KEPT = "kept"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"
    POSTPONED = "postponed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one pair; ``detail`` says why it is not done."""

    name: str
    status: Status
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run: where things are and go, and how much to do.

    ``rounds`` is how many processes time each variant, ``takes`` how often it is
    recorded with full flags. After ``budget_s`` nothing new is begun. ``jobs``
    recordings are exported at a time while the next runs.
    """

    raw: Path
    sources: Path = SOURCES
    build: Path = BUILD
    arch: int | None = None
    again: bool = False
    default_flags: bool = True
    rounds: int = ROUNDS
    takes: int = 1
    timeout_s: float = TIMEOUT_S
    budget_s: float | None = None
    jobs: int = JOBS


class _Unsupported(Exception):
    """Why a workload can't run here."""


class _Postponed(Exception):
    """No time is left to begin a step."""


def build(
    names: Sequence[str], settings: Settings, say: Say
) -> list[tuple[Workload, Path | BuildError]]:
    """Build the CUDA workloads of ``names``; says each program or what is wrong."""
    workloads = {pair.workload: None for pair in _pairs(names, settings, {})}
    sources = [workload for workload in workloads if workload.is_cuda]
    builder = Builder.here(settings.build, settings.arch or look().arch)
    built = builder.build_all(sources)
    for workload, program in built.items():
        if isinstance(program, BuildError):
            say(f"{workload.rule}: {program.message}; {program.hint}")
        else:
            say(f"{workload.rule}: {program}")
    return list(built.items())


def run(names: Sequence[str], settings: Settings, say: Say) -> list[Outcome]:
    """Time and record the pairs of ``names``; see `_Run`. Raises `StreamlintError`."""
    with _termination_interrupts():
        return _Run(names, settings, say).run()


def _pairs(
    names: Sequence[str], settings: Settings, outcomes: dict[str, Outcome]
) -> list[Pair]:
    """The chosen pairs; sources with a wrong header are outcomes already."""
    workloads, problems = find(settings.sources)
    for problem in problems:
        name = problem.message.partition(":")[0]
        if not names or Path(name).stem.partition("__")[0].replace("_", "-") in names:
            outcomes[name] = Outcome(name, Status.FAILED, problem.message)
    if not workloads and not outcomes:
        raise UsageError(
            f"{settings.sources} holds no workloads",
            hint="run it in a checkout of the repository, which has them",
        )
    return select(workloads, names) if workloads else []


class _Run:
    """One run: first all timing, undisturbed; then all recording.

    While a recording is imported and exported on the CPU, the next one has the GPU.
    """

    def __init__(self, names: Sequence[str], settings: Settings, say: Say) -> None:
        self._settings = settings
        self._say = say
        self._outcomes: dict[str, Outcome] = {}
        self._pairs = _pairs(names, settings, self._outcomes)
        self._nsys = nsys_module.locate()
        self._machine = look()
        self._nvcc = find_nvcc()
        self._cuda = cuda_release(self._nvcc) if self._nvcc else None
        self._gpu = threading.Lock()
        self._children = processes.Children()
        self._began = time.monotonic()
        self._programs: dict[Workload, Path] = {}
        self._results: dict[Pair, Result] = {}
        self._did: set[Pair] = set()

    def run(self) -> list[Outcome]:
        for line in nsys_module.warnings(self._nsys, [], call_stacks=False):
            self._say(f"warning: {line}")
        for pair in self._pairs:
            if reason := self._unsupported(pair.workload):
                self._settle(pair, Status.UNSUPPORTED, reason)
        self._build()
        try:
            self._phase(PLAIN, 1)
            self._phase(FULL, self._settings.jobs)
            if self._settings.default_flags:
                self._phase(DEFAULT, self._settings.jobs)
        except KeyboardInterrupt:
            self._say("stopped; the steps that are done are kept")
            raise
        for pair in self._left():
            did = pair in self._did
            self._settle(pair, Status.DONE if did else Status.KEPT, "")
        return list(self._outcomes.values())

    # Before -------------------------------------------------------------------

    def _unsupported(self, workload: Workload) -> str | None:
        arch = self._settings.arch or self._machine.arch
        if arch is not None and arch < workload.arch_min:
            return f"needs compute capability {workload.arch_min}, this GPU has {arch}"
        for module in workload.needs:
            if importlib.util.find_spec(module) is None:
                return f"needs the Python module {module}"
        return None

    def _build(self) -> None:
        todo: dict[Workload, None] = {}
        for pair in self._left():
            if pair.workload.is_cuda:
                todo[pair.workload] = None
            else:
                self._programs[pair.workload] = pair.workload.source
        built: dict[Workload, Path | BuildError] = {}
        if todo:
            self._say(f"building {len(todo)} workloads")
            try:
                arch = self._settings.arch or self._machine.arch
                built = Builder.here(self._settings.build, arch).build_all(todo)
            except BuildError as error:
                built = dict.fromkeys(todo, error)
        for workload, program in built.items():
            if isinstance(program, Path):
                self._programs[workload] = program
                continue
            for pair in [pair for pair in self._left() if pair.workload == workload]:
                self._settle(pair, Status.FAILED, f"{program.message}; {program.hint}")
        for pair in self._left():
            folder = self._settings.raw / pair.name.replace("/", "__")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"{folder} can't be made ({error.strerror})",
                    hint="name a folder that can be written: --raw",
                ) from error
            facts = self._facts(pair)
            keys = {step: self._key(facts, step) for step in self._steps(pair)}
            again = self._settings.again
            self._results[pair] = Result(folder, facts, keys, again=again)

    def _facts(self, pair: Pair) -> dict[str, object]:
        """All that the provenance of a pair will say but its times."""
        workload = pair.workload
        return {
            "rule": workload.rule,
            "pair": pair.name,
            "probe": workload.is_probe,
            "shows": list(workload.expects),
            "source": f"harness/workloads/{workload.source.name}",
            "source_sha256": source_hash(workload),
            "recorded": time.strftime("%Y-%m-%d", time.gmtime()),
            "gpu": self._machine.gpu,
            "compute_capability": self._machine.compute_capability,
            "driver": self._machine.driver,
            "cuda": self._cuda,
            "nsys": self._nsys.version_text,
            "nsys_flags": {mode: self._flags(pair, mode) for mode in (FULL, DEFAULT)},
            "nvcc_flags": list(workload.nvcc),
            "options": ["--cause", pair.cause] if pair.cause else [],
            "environment": {v: workload.variables(v) for v in workload.variants},
            "silent": workload.silent,
        }

    def _flags(self, pair: Pair, mode: str) -> list[str]:
        stacks = pair.workload.call_stacks and mode == FULL
        return nsys_module.flags(self._nsys, Detail(mode), call_stacks=stacks)[0]

    def _steps(self, pair: Pair, *modes: str) -> list[Step]:
        """The steps of a pair in these modes, in all without any."""
        rounds = 1 if pair.workload.is_probe else self._settings.rounds
        times = {PLAIN: rounds, FULL: self._settings.takes, DEFAULT: 1}
        return [
            Step(variant, mode, take + 1)
            for mode in modes or times
            for take in range(times[mode])
            for variant in pair.workload.variants
        ]

    @staticmethod
    def _key(facts: dict[str, object], step: Step) -> str:
        """Changes whenever ``step`` must be done again."""
        told = {"recorded", "silent", "shows"}
        if step.mode == PLAIN:
            told |= {"nsys", "nsys_flags"}
        facts = {n: v for n, v in facts.items() if n not in told}
        facts["step"] = asdict(step)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    # Phases -------------------------------------------------------------------

    def _left(self) -> list[Pair]:
        return [pair for pair in self._pairs if pair.name not in self._outcomes]

    def _settle(self, pair: Pair, status: Status, detail: str) -> None:
        self._outcomes[pair.name] = Outcome(pair.name, status, detail)
        if detail:
            self._say(f"{pair.name}: {status.value}: {detail}")

    def _phase(self, mode: str, jobs: int) -> None:
        """Run every pair in ``mode``, ``jobs`` steps at a time.

        All first takes come before all second ones: takes of one variant are far
        apart, so that a machine that drifts shows in their range.
        """
        pool = ThreadPoolExecutor(jobs)
        try:
            waiting: dict[Pair, list[Future[list[float]]]] = {
                pair: [] for pair in self._left()
            }
            steps = [(pair, s) for pair in waiting for s in self._steps(pair, mode)]
            for pair, step in sorted(steps, key=lambda pair_step: pair_step[1].take):
                waiting[pair].append(pool.submit(self._step, pair, step))
            owner = {f: pair for pair, futures in waiting.items() for f in futures}
            of = len(waiting)
            for future in as_completed(owner):
                pair = owner[future]
                if pair in waiting and all(f.done() for f in waiting[pair]):
                    futures = waiting.pop(pair)
                    self._conclude(pair, mode, futures, f"{of - len(waiting)}/{of}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            self._children.stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _conclude(
        self, pair: Pair, mode: str, futures: list[Future[list[float]]], progress: str
    ) -> None:
        """Say what came of a pair in a phase; only what is left goes on."""
        for future in futures:
            try:
                future.result()
            except _Postponed:
                self._settle(pair, Status.POSTPONED, "no time is left; run it again")
            except _Unsupported as reason:
                self._settle(pair, Status.UNSUPPORTED, str(reason))
            except StreamlintError as error:
                self._settle(pair, Status.FAILED, f"{error.message}; {error.hint}")
            except OSError as error:
                self._settle(pair, Status.FAILED, f"{error.strerror}: {error.filename}")
            else:
                continue
            return
        way = {PLAIN: "timed", FULL: "recorded", DEFAULT: "recorded by default flags"}
        variants = pair.workload.variants
        regions = [
            [us for future in futures[i :: len(variants)] for us in future.result()]
            for i in range(len(variants))
        ]
        self._say(f"[{progress}] {pair.name}: {way[mode]}{_compared(regions)}")

    # Steps --------------------------------------------------------------------

    def _step(self, pair: Pair, step: Step) -> list[float]:
        result = self._results[pair]
        known = result.regions(step)
        if known is not None:
            return known
        work = self._timed if step.mode == PLAIN else self._recorded
        output, export = work(pair, step)
        regions = [float(us) for us in _REGION.findall(output)]
        if self._children.stopped:
            raise _Postponed
        if pair.workload.is_probe:
            answers = "".join(f"{line}\n" for line in _PROBED.findall(output))
            with replacing(result.folder / f"{step.name}.txt") as part:
                part.write_text(answers, encoding="utf-8")
        result.add(step, regions, export)
        self._did.add(pair)
        return regions

    def _begin(self) -> None:
        budget = self._settings.budget_s
        late = budget is not None and time.monotonic() - self._began > budget
        if late or self._children.stopped:
            raise _Postponed

    def _timed(self, pair: Pair, step: Step) -> tuple[str, None]:
        self._begin()
        ended = processes.run(
            command(pair, self._programs[pair.workload], step.variant, REPEAT),
            environment=self._environment(pair, step.variant),
            on_line=lambda _: None,
            timeout_s=self._settings.timeout_s,
            children=self._children,
        )
        if ended.timed_out:
            raise StreamlintError(
                f"{step.name} did not end within {self._settings.timeout_s:.0f} s",
                hint="allow more with --timeout",
            )
        _check(pair, step, ended.exit_code, ended.output)
        return ended.output, None

    def _recorded(self, pair: Pair, step: Step) -> tuple[str, str]:
        folder = self._results[pair].folder
        base = folder / f"report.{step.name}"
        with _released_once(self._gpu, self._begin) as release:
            recording = nsys_module.record(
                self._nsys,
                command(pair, self._programs[pair.workload], step.variant, 1),
                base,
                self._flags(pair, step.mode),
                environment=self._environment(pair, step.variant),
                on_line=lambda line: release() if line.startswith("CHECK ") else None,
                timeout_s=self._settings.timeout_s,
                children=self._children,
            )
        part = folder / f".{step.name}.part.sqlite"
        try:
            _check(pair, step, recording.exit_code, recording.output)
            nsys_module.export_checked(self._nsys, recording, part)
            part.replace(folder / f"{step.name}.sqlite")
        finally:
            part.unlink(missing_ok=True)
            recording.report.unlink(missing_ok=True)
        return recording.output, f"{step.name}.sqlite"

    def _environment(self, pair: Pair, variant: str) -> dict[str, str]:
        kept = {n: v for n, v in os.environ.items() if n not in _SWITCHES}
        return kept | pair.workload.variables(variant)


def _check(pair: Pair, step: Step, exit_code: int, output: str) -> None:
    """Raise unless a workload passed its check and printed its region times."""
    timed = pair.workload.is_probe or _REGION.search(output)
    if not exit_code and timed and _PASSED.search(output):
        return
    if missing := _NO_MODULE.search(output):
        raise _Unsupported(f"needs the Python module {missing[1]}")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(("REGION_US", "CHECK ok"))]
    last = said[-1][:_MAX_QUOTE] if said else "it printed nothing"
    if exit_code:
        what = f"{step.name} failed with exit code {exit_code}: {last}"
    elif not timed:
        what = f"{step.name} printed no REGION_US: {last}"
    else:
        what = f"{step.name} did not print `CHECK ok`: {last}"
    raise StreamlintError(what, hint="run it by hand to see all that it says")


def _compared(regions: list[list[float]]) -> str:
    """The medians of bad and fixed, in words; nothing for a probe."""
    if len(regions) != len(VARIANTS) or not all(regions):
        return ""
    bad, fixed = map(statistics.median, regions)
    times = bad / max(fixed, 0.01)
    return f": bad {bad:.0f} us, fixed {fixed:.0f} us, {times:.2f} times"


@contextlib.contextmanager
def _released_once(
    lock: threading.Lock, begin: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """Holds ``lock`` until the block ends or the yielded function is called."""
    lock.acquire()
    held = [lock]

    def release() -> None:
        with contextlib.suppress(IndexError):
            held.pop().release()

    try:
        begin()
        yield release
    finally:
        release()


@contextlib.contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does, so that no workload is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

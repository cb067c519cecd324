"""Finds the workloads and builds them; standard library alone.

A workload is a source in `harness/workloads/`: `<rule_module>.cu` or
`<rule_module>__<label>.py`, with the variants bad and fixed, or a probe, which proves
no rule and has no variants. Lines `// harness: KEY VALUE` (`#` in Python) tell the
runner the rest; `KEYS` explains them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from streamlint.errors import StreamlintError, UsageError
from streamlint.harness.machine import cuda_release, find_nvcc

SOURCES = Path(__file__).parent / "workloads"
INCLUDE = Path(__file__).parent / "include"
BUILD = Path("build") / "harness"
"""Below the working directory: an installed package may be read-only."""
VARIANTS = ("bad", "fixed")
PROBE = "probe"
"""In place of a variant, for workloads that have none."""
KEYS = {
    "rule": "the rule that it proves",
    "probe": "instead of a rule: it measures something and prints lines `PROBE ...`",
    "env": "bad|fixed NAME=VALUE: a variable that this variant runs with",
    "nvcc": "more flags for nvcc",
    "arch-min": "the least compute capability, such as 90",
    "cause": "one more pair of traces, run with --cause NAME",
    "call-stacks": "record call stacks as well",
    "needs": "Python modules that must be there",
    "processes": "how many processes it starts itself",
    "silent": "why no finding is right, on this GPU, for bad either",
    "note": "a sentence, such as why some GPU can't show the fault",
    "expect": "a sentence on what the pair should show",
}
_HEADER = re.compile(r"^\s*(?://|#)\s*harness:\s*([\w-]+)[ \t]*(.*?)\s*$", re.M)
_TOLD = re.compile(rb"^.*harness:\s*(?:note|expect|silent)\b.*\n", re.M)
_NVCC_FLAGS = ("-std=c++17", "-O2", "-lineinfo")
_TIMEOUT_S = 600


class BuildError(StreamlintError):
    """A workload can't be compiled."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One source; ``label`` tells several of one rule apart.

    A probe proves no ``rule`` but has its own name there.
    """

    source: Path
    rule: str
    label: str = ""
    is_probe: bool = False
    environment: tuple[tuple[str, str, str], ...] = ()
    nvcc: tuple[str, ...] = ()
    arch_min: int = 0
    causes: tuple[str, ...] = ()
    call_stacks: bool = False
    needs: tuple[str, ...] = ()
    processes: int = 1
    silent: str = ""
    notes: tuple[str, ...] = ()
    expects: tuple[str, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """Whether nvcc must build it."""
        return self.source.suffix == ".cu"

    def variables(self, variant: str) -> dict[str, str]:
        """Environment variables that ``variant`` runs with."""
        return {name: value for v, name, value in self.environment if v == variant}

    @property
    def variants(self) -> tuple[str, ...]:
        """What it is run as."""
        return (PROBE,) if self.is_probe else VARIANTS

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The pairs of traces that it makes."""
        return tuple(Pair(self, cause) for cause in ("", *self.causes))


@dataclass(frozen=True, slots=True)
class Pair:
    """A workload with all its variants; ``cause`` as its option --cause takes it."""

    workload: Workload
    cause: str = ""

    @property
    def name(self) -> str:
        """The rule's name, or below it what tells this pair from others: its folder."""
        below = "-".join(filter(None, (self.workload.label, self.cause)))
        return f"{self.workload.rule}/{below}" if below else self.workload.rule


def find(sources: Path = SOURCES) -> tuple[list[Workload], list[StreamlintError]]:
    """Every workload, and what is wrong with those that can't be used."""
    workloads: list[Workload] = []
    problems: list[StreamlintError] = []
    for source in sorted((*sources.glob("*.cu"), *sources.glob("*__*.py"))):
        try:
            workloads.append(read(source))
        except StreamlintError as error:
            problems.append(error)
    return workloads, problems


def select(workloads: Iterable[Workload], names: Iterable[str]) -> list[Pair]:
    """The pairs that ``names`` mean: rules, rule modules or pairs; all if empty."""
    pairs = [pair for workload in workloads for pair in workload.pairs]
    chosen: list[Pair] = []
    for name in names:
        found = [
            p for p in pairs if name.replace("_", "-") in (p.name, p.workload.rule)
        ]
        if not found:
            raise UsageError(
                f"no workload is called {name}",
                hint="`streamlint harness list` shows them",
            )
        chosen += [pair for pair in found if pair not in chosen]
    return chosen or pairs


def read(source: Path) -> Workload:
    """The workload in ``source``; raises `UsageError` on a header that is wrong."""
    text = source.read_text(encoding="utf-8")
    module, _, label = source.stem.partition("__")
    values: dict[str, list[str]] = {}
    for key, value in _HEADER.findall(text):
        if key not in KEYS:
            raise _wrong(source, f"does not know `{key}`")
        values.setdefault(key, []).append(value)
    probes = values.get("probe", [])
    name = module.replace("_", "-")
    if not probes and values.get("rule", []) != [name]:
        raise _wrong(source, f"must say `rule {name}`, once")
    environment: list[tuple[str, str, str]] = []
    for value in values.get("env", []):
        found = re.fullmatch(r"(bad|fixed)\s+(\w+)=(.*)", value)
        if found is None:
            raise _wrong(source, f"has `env {value}`, not `env bad NAME=VALUE`")
        environment.append((found[1], found[2], found[3]))
    return Workload(
        source=source,
        rule=probes[0].replace("_", "-") if probes else name,
        label=label.replace("_", "-"),
        is_probe=bool(probes),
        environment=tuple(environment),
        nvcc=tuple(f for value in values.get("nvcc", []) for f in shlex.split(value)),
        arch_min=_number(source, values, "arch-min", 0),
        causes=tuple(c for value in values.get("cause", []) for c in value.split()),
        call_stacks="call-stacks" in values,
        needs=tuple(n for value in values.get("needs", []) for n in value.split()),
        processes=_number(source, values, "processes", 1),
        silent=" ".join(values.get("silent", [])),
        notes=tuple(values.get("note", [])),
        expects=tuple(values.get("expect", [])),
    )


def _number(source: Path, values: dict[str, list[str]], key: str, default: int) -> int:
    value = values.get(key, [str(default)])[-1]
    if not value.isdigit():
        raise _wrong(source, f"has `{key} {value}`, which is no number")
    return int(value)


def _wrong(source: Path, what: str) -> UsageError:
    return UsageError(
        f"{source.name}: its `harness:` header {what}",
        hint=f"the keys are {', '.join(KEYS)}",
    )


def source_hash(workload: Workload) -> str:
    """SHA-256 over the source and the headers that it may include.

    Sentences in its own header are left out: they don't change what it does.
    """
    digest = hashlib.sha256()
    headers: list[Path] = []
    if workload.is_cuda:
        headers = [*workload.source.parent.glob("*.cuh"), *INCLUDE.glob("*.h")]
    for path in (workload.source, *sorted(headers)):
        text = _TOLD.sub(b"", path.read_bytes())
        digest.update(path.name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()


def arch_number(text: str) -> int:
    """90 for 90, 9.0, sm_90 or sm_90a; raises `UsageError`."""
    found = re.fullmatch(r"(?:sm_|compute_)?(\d+)\.?(\d?)[a-z]?", text)
    if found is None:
        raise UsageError(f"{text} is no architecture", hint="for an H200: --arch 90")
    return int(found[1] + found[2])


@dataclass(frozen=True, slots=True)
class Builder:
    """Builds workloads into ``folder`` for the architecture ``arch``."""

    folder: Path
    arch: int
    nvcc: Path

    @classmethod
    def here(cls, folder: Path, arch: int | None) -> Builder:
        """With the nvcc of this machine; raises `BuildError` if it can't build."""
        nvcc = find_nvcc()
        if nvcc is None:
            raise BuildError(
                "no nvcc found",
                hint="install the CUDA toolkit, or set CUDA_HOME to its folder",
            )
        if arch is None:
            raise BuildError(
                "no GPU found to build for", hint="name its architecture: --arch 90"
            )
        return cls(folder, arch, nvcc)

    def flags(self, workload: Workload) -> list[str]:
        """The options that nvcc builds ``workload`` with."""
        return [*_NVCC_FLAGS, f"-arch=sm_{self.arch}", *workload.nvcc]

    def program(self, workload: Workload) -> Path:
        """Where `build` puts it."""
        return self.folder / f"{workload.source.stem}-sm_{self.arch}"

    def build(self, workload: Workload) -> Path:
        """Compile unless what is there is up to date; raises `BuildError`."""
        program = self.program(workload)
        stamp = program.with_suffix(".stamp")
        # No paths: programs that were built elsewhere and copied here will do.
        release = cuda_release(self.nvcc) or ""
        facts = [source_hash(workload), release, *self.flags(workload)]
        current = hashlib.sha256("\0".join(facts).encode()).hexdigest()
        try:
            if program.is_file() and stamp.read_text() == current:
                return program
        except OSError:
            pass
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = program.with_suffix(".part")
            flags = self.flags(workload)
            done = subprocess.run(
                [self.nvcc, *flags, "-I", INCLUDE, "-o", part, workload.source],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
            log = program.with_suffix(".log")
            log.write_text(done.stdout + done.stderr, encoding="utf-8")
            if done.returncode:
                raise _not_compiled(workload, log, done.stdout + done.stderr)
            part.replace(program)
            stamp.write_text(current)
        except subprocess.TimeoutExpired as error:
            raise BuildError(
                f"{workload.source.name} did not compile within {_TIMEOUT_S} s",
                hint="try nvcc by hand",
            ) from error
        except OSError as error:
            raise BuildError(
                f"{self.folder} can't be written ({error.strerror})",
                hint="name a folder that can be: --build-dir",
            ) from error
        return program

    def build_all(
        self, workloads: Iterable[Workload]
    ) -> dict[Workload, Path | BuildError]:
        """Build several at once: for each the program or why there is none."""

        def attempt(workload: Workload) -> Path | BuildError:
            try:
                return self.build(workload)
            except BuildError as error:
                return error

        todo = list(workloads)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return dict(zip(todo, pool.map(attempt, todo), strict=True))


def _not_compiled(workload: Workload, log: Path, output: str) -> BuildError:
    errors = [line for line in output.splitlines() if "error" in line.lower()]
    why = re.sub(r"\S*/", "", errors[0])[:160] if errors else "nvcc failed"
    return BuildError(
        f"{workload.source.name} does not compile: {why.strip()}", hint=f"see {log}"
    )


def command(pair: Pair, program: Path, variant: str, repeat: int) -> list[str]:
    """The command line of one variant."""
    start = [str(program)] if pair.workload.is_cuda else [sys.executable, str(program)]
    if pair.workload.is_probe:
        return start
    options = ["--variant", variant, "--repeat", str(repeat)]
    return [*start, *options, *(["--cause", pair.cause] if pair.cause else [])]

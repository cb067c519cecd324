"""`python3 -m streamlint.harness`: the harness on a machine with Python alone.

`streamlint harness` runs this too. What records needs the standard library only;
`collect` and `score` need the rest of streamlint and import it when they start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from streamlint.errors import StreamlintError, UsageError
from streamlint.harness import nsys, workloads
from streamlint.harness.collect import PROVENANCE, SAMPLES, can_redact, collect
from streamlint.harness.compare import compare, text
from streamlint.harness.nsys import EXIT_INTERRUPTED, Detail, Say
from streamlint.harness.runner import (
    JOBS,
    ROUNDS,
    TIMEOUT_S,
    Outcome,
    Settings,
    Status,
    build,
    run,
)
from streamlint.trace.convert import REPORT_SUFFIXES

_RAW = workloads.BUILD / "raw"


def main(
    arguments: Sequence[str],
    say: Say,
    *,
    program: str = "python3 -m streamlint.harness",
) -> int:
    """Run one command and return the exit code; ``say`` is given each line.

    Raises `StreamlintError`.
    """
    parser = _parser(program)
    options, command = parser.parse_known_args(_before_dashes(arguments))
    if command:
        parser.error(f"unrecognized arguments: {' '.join(command)}")
    try:
        return int(options.action(options, list(_after_dashes(arguments)), say))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _before_dashes(arguments: Sequence[str]) -> list[str]:
    given = list(arguments)
    return given[: given.index("--")] if "--" in given else given


def _after_dashes(arguments: Sequence[str]) -> list[str]:
    given = list(arguments)
    return given[given.index("--") + 1 :] if "--" in given else []


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Prove the rules on a GPU: build, time and record the workloads.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add = commands.add_parser("capture", help="record a program: [options] -- CMD...")
    add.add_argument("-o", "--output", type=Path, help="name of the report and export")
    add.add_argument(
        *("--flags", "-f"),
        type=Detail,
        choices=list(Detail),
        default=Detail.FULL,
        metavar="{full,light,default}",
        help="how much to record; default: what nsys records by itself",
    )
    add.add_argument("--call-stacks", action="store_true", help="record call stacks")
    add.add_argument("--follow-forks", action="store_true", help="follow forks")
    add.add_argument("--force", action="store_true", help="overwrite the output")
    add.add_argument(
        "--timeout", type=float, metavar="S", help="end it after S seconds"
    )
    add.set_defaults(action=_capture)

    add = commands.add_parser("list", help="show the workloads and their samples")
    _add_names(add)
    _add_samples(add)
    add.set_defaults(action=_list)

    add = commands.add_parser("build", help="build the workloads with nvcc")
    _add_names(add)
    _add_build(add)
    add.set_defaults(action=_build)

    add = commands.add_parser("run", help="time and record the workloads")
    _add_names(add)
    _add_build(add)
    _add_samples(add)
    add.add_argument(
        "--raw", type=Path, help="keep raw results in this folder and store no samples"
    )
    add.add_argument("--again", action="store_true", help="repeat what is done")
    add.add_argument(
        *("--rounds",),
        type=int,
        default=ROUNDS,
        metavar="N",
        help="time each in N processes (default: %(default)s)",
    )
    add.add_argument(
        "--takes",
        type=int,
        default=1,
        metavar="N",
        help="record each N times; 0: only time",
    )
    add.add_argument(
        "--no-default-flags",
        action="store_true",
        help="don't record with nsys's own flags as well",
    )
    add.add_argument(
        *("--timeout",),
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help="end a workload that takes longer (default: %(default).0f)",
    )
    add.add_argument(
        "--budget", type=float, metavar="S", help="begin nothing after S seconds"
    )
    add.add_argument(
        *("--jobs",),
        type=int,
        default=JOBS,
        metavar="N",
        help="recordings in work at a time (default: %(default)s)",
    )
    add.set_defaults(action=_run)

    add = commands.add_parser("collect", help="redact raw results into samples")
    add.add_argument("raw", type=Path, help="what `run --raw` wrote")
    add.add_argument("--again", action="store_true", help="replace stored samples")
    _add_samples(add)
    add.set_defaults(action=_collect)

    add = commands.add_parser("compare", help="does a run repeat earlier ones?")
    add.add_argument("earlier", type=Path, nargs="+", help="what `run --raw` wrote")
    add.add_argument("last", type=Path, help="the same of the run to judge")
    add.set_defaults(action=_compare)

    add = commands.add_parser("score", help="compare the rules with what was measured")
    add.add_argument("--markdown", action="store_true", help="write a Markdown page")
    _add_samples(add)
    add.set_defaults(action=_score)
    return parser


def _add_names(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="rules (default: all)")


def _add_samples(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        *("--samples",),
        type=Path,
        default=SAMPLES,
        help="folder of the samples (default: %(default)s)",
    )


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", help="GPU architecture, such as 90")
    parser.add_argument(
        *("--build-dir",),
        type=Path,
        default=workloads.BUILD,
        help="folder of the programs (default: %(default)s)",
    )


def _capture(options: argparse.Namespace, command: list[str], say: Say) -> int:
    if not command:
        raise UsageError(
            "no program to record",
            hint="name it after two dashes: capture -- ./program",
        )
    base = options.output or Path(Path(command[0]).name)
    for suffix in (*REPORT_SUFFIXES, ".sqlite"):
        base = base.with_suffix("") if base.suffix == suffix else base
    export = Path(f"{base}.sqlite")
    taken = [p for s in REPORT_SUFFIXES if (p := Path(f"{base}{s}")).exists()]
    if not options.force and (taken or export.exists()):
        raise UsageError(
            f"{(*taken, export)[0]} exists already",
            hint="name another with -o, or overwrite with --force",
        )
    captured = nsys.capture(
        command,
        base,
        export,
        say,
        detail=options.flags,
        call_stacks=options.call_stacks,
        follow_forks=options.follow_forks,
        timeout_s=options.timeout,
    )
    say(f"recorded {captured.report} and {export}")
    say(f"judge it where streamlint is installed: streamlint lint {export}")
    if failed := nsys.failure(captured):
        raise failed
    return 0


def _list(options: argparse.Namespace, _: list[str], say: Say) -> int:
    found, problems = workloads.find()
    pairs = workloads.select(found, options.names)
    width = max((len(pair.name) for pair in pairs), default=0)
    for pair in pairs:
        stored = options.samples / pair.name / PROVENANCE
        state = "recorded" if stored.is_file() else "not recorded"
        told = (*pair.workload.expects, *pair.workload.notes)
        say(f"{pair.name:<{width}}  {state:<12}  {'; '.join(told)}".rstrip())
    for problem in problems:
        say(f"error: {problem.message}; {problem.hint}")
    return 1 if problems else 0


def _settings(options: argparse.Namespace) -> Settings:
    arch = workloads.arch_number(options.arch) if options.arch else None
    return Settings(raw=_RAW, build=options.build_dir, arch=arch)


def _build(options: argparse.Namespace, _: list[str], say: Say) -> int:
    built = build(options.names, _settings(options), say)
    return 0 if all(isinstance(program, Path) for _, program in built) else 1


def _run(options: argparse.Namespace, _: list[str], say: Say) -> int:
    from dataclasses import replace

    settings = replace(
        _settings(options),
        raw=options.raw or _RAW,
        again=options.again,
        default_flags=options.takes > 0 and not options.no_default_flags,
        rounds=max(1, options.rounds),
        takes=max(0, options.takes),
        timeout_s=options.timeout,
        budget_s=options.budget,
        jobs=max(1, options.jobs),
    )
    outcomes = run(options.names, settings, say)
    say(_counts(outcomes))
    if options.raw is None and can_redact():
        collect(settings.raw, options.samples, say)
    elif any(outcome.status is Status.DONE for outcome in outcomes):
        say(
            f"raw results, with private data, are in {settings.raw}; where streamlint "
            f"is installed: streamlint harness collect {settings.raw}"
        )
    bad = {Status.FAILED, Status.POSTPONED}
    return 1 if any(outcome.status in bad for outcome in outcomes) else 0


def _counts(outcomes: Sequence[Outcome]) -> str:
    counted = {
        status: sum(outcome.status is status for outcome in outcomes)
        for status in Status
    }
    return ", ".join(f"{n} {status.value}" for status, n in counted.items() if n)


def _collect(options: argparse.Namespace, _: list[str], say: Say) -> int:
    if not can_redact():
        raise UsageError(
            "traces can't be redacted here: polars or numpy is missing",
            hint="copy the folder to where streamlint is installed and collect there",
        )
    found = collect(options.raw, options.samples, say, again=options.again)
    return 1 if any(pair.problem for pair in found) else 0


def _compare(options: argparse.Namespace, _: list[str], say: Say) -> int:
    compared = compare([*options.earlier, options.last])
    for line in text(compared):
        say(line)
    return int(not compared or any(one.differs for one in compared))


def _score(options: argparse.Namespace, _: list[str], say: Say) -> int:
    from streamlint.harness import score

    result = score.score(options.samples)
    render = score.markdown if options.markdown else score.text
    say(render(result).rstrip("\n"))
    return 0 if result.passed else 1


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], _say))
    except StreamlintError as error:
        sys.stderr.write(f"error: {error.message}\nhint: {error.hint}\n")
        sys.exit(error.exit_code)

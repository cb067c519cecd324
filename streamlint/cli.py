"""The command line; the only module that prints or exits."""

from __future__ import annotations

import atexit
import gc
import io
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from copy import copy
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, NoReturn

import typer
from typer.main import get_command_name

from streamlint import __version__
from streamlint.errors import OtherDatabase, StreamlintError, UsageError
from streamlint.escape import printable, without_home
from streamlint.files import out_of_space, replacing, unwritable

if TYPE_CHECKING:
    from streamlint.baseline import Baseline
    from streamlint.config import Config
    from streamlint.diff import Side
    from streamlint.engine import Report
    from streamlint.findings import Severity
    from streamlint.many import Judge, Outcome
    from streamlint.registry import Catalog
    from streamlint.reporters import View
    from streamlint.settings import Scope, Settings
    from streamlint.sources import Source
    from streamlint.suppression import Allowance
    from streamlint.trace.model import Trace

EXIT_CLEAN, EXIT_FINDINGS, EXIT_ERROR, EXIT_NOT_ASSESSED = 0, 1, 2, 3
_PROGRESS_AFTER_S = 2.0
_FILE_WIDTH = 100
_TINY_BYTES, _SMALL_BYTES = 1 << 20, 16 << 20
_AT_IMPORT = {
    "OPENBLAS_NUM_THREADS": "1",
    # As measured with 1e6 kernels. Pages are kept for 10 s: a third of the page faults.
    # They are kept for all threads and sizes alike: a quarter less memory.
    "_RJEM_MALLOC_CONF": "dirty_decay_ms:10000,muzzy_decay_ms:10000,narenas:1,"
    "oversize_threshold:0",
}
_M_ARENA_MAX = -8
"""mallopt's name for how many heaps there may be (glibc, malloc.h)."""
_BRIEF_FROM = 9
"""Sections of so many traces would be read by nobody."""
_TRACE_SUFFIXES = (".sqlite", ".nsys-rep", ".qdrep")
_PLOTLYJS_HELP = (
    "Where a page has plotly.js from: inline (works offline), cdn, or a bundle's file."
)
_ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Use this configuration, not the nearest streamlint.toml or "
        "pyproject.toml.",
    ),
]
_IsolatedOption = Annotated[
    bool, typer.Option("--isolated", help="Use no configuration file.")
]
_RulesDirOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--rules-dir",
        metavar="DIR",
        help="Use the rules in this folder too; runs their code (repeatable).",
    ),
]
_OutputOption = Annotated[
    list[str] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="[FORMAT=]FILE",
        help="Write to this file instead of stdout; with FORMAT=, write that as well "
        "(repeatable).",
    ),
]
_SymbolsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--symbols",
        metavar="DIR|FILE",
        help="Where the program's binaries are, for source lines of native code "
        "(repeatable).",
    ),
]
_HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", help="Also write a page with a timeline, as `report` does."),
]

app = typer.Typer(
    name="streamlint",
    help="Find what makes a CUDA program slow or wrong in a captured Nsight Systems "
    "trace: the cause, the place, the cost and the fix.",
    epilog="Exit codes: 0 clean, 1 findings, 2 error, 3 nothing could be assessed.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(
    help="Show the configuration.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(config_app, name="config")


class OutputFormat(str, Enum):
    """What `lint` writes."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"
    MARKDOWN = "markdown"
    JUNIT = "junit"
    PERFETTO = "perfetto"


_NEEDS_A_TRACE = (OutputFormat.TEXT, OutputFormat.JSON)
"""Formats that say nothing without one; the others tell a machine what failed."""


_ONE_FILE = (OutputFormat.PERFETTO,)
"""Formats that are no text."""


class DiffFormat(str, Enum):
    """What `diff` writes."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


class FailOn(str, Enum):
    """Severities, the most severe first; those of `streamlint.findings`."""

    ERROR = "error"
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"
    INFO = "info"


class Color(str, Enum):
    """When to colour text."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


def _rule_names(incomplete: str) -> list[tuple[str, str]]:
    """Rules that begin so, for a shell to complete."""
    from streamlint.registry import all_rules

    return [
        (rule.name, rule.summary)
        for rule in all_rules()
        if rule.name.startswith(incomplete)
    ]


def _selectors(incomplete: str) -> list[tuple[str, str]]:
    """Rules and families that continue a comma-separated list."""
    from streamlint.registry import all_rules

    before, comma, last = incomplete.rpartition(",")
    families = dict.fromkeys(rule.family for rule in all_rules())
    known = [(family, f"all rules of {family}") for family in families]
    known += _rule_names("")
    return [
        (f"{before}{comma}{name}", words)
        for name, words in known
        if name.startswith(last)
    ]


def main() -> None:
    """Run the command line; errors become one `error:` and one `hint:` line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name in a trace may not exist in the terminal's encoding.
            stream.reconfigure(errors="backslashreplace")
    came = _end_on_signals()
    try:
        _narrowed(sys.argv[1:])()
    except StreamlintError as error:
        if came:  # SQLite makes an error of its own of what ends a callback
            sys.exit(128 + came[0])
        _show_error(error)
        sys.exit(error.exit_code)
    except Exception as error:  # Python's own exit code, 1, would read as findings
        if out_of_space(error):
            _show_error(unwritable("a file", error))
            sys.exit(EXIT_ERROR)
        _show_traceback(traceback.format_exc())
        _show_error(
            StreamlintError(
                "this is a bug in streamlint", hint="report it with the lines above"
            )
        )
        sys.exit(EXIT_ERROR)


def run() -> NoReturn:
    """`main`, and the end of the process, in order but at once.

    Python would take all modules apart first, a fortieth of a small lint.
    """
    try:
        main()
    except SystemExit as ended:
        if isinstance(ended.code, int) and threading.active_count() == 1:
            atexit._run_exitfuncs()
            with suppress(OSError):  # Python has a code of its own for it
                for stream in filter(None, (sys.stdout, sys.stderr)):
                    stream.flush()
                os._exit(ended.code)
        raise
    sys.exit(EXIT_CLEAN)


def _narrowed(arguments: list[str]) -> typer.Typer:
    """The app with no command but the one named first: making all takes 8 ms.

    All of it where none is, so that help and suggestions know them.
    """
    named = [
        info
        for info in app.registered_commands
        if info.callback is not None
        and (info.name or get_command_name(info.callback.__name__)) in arguments[:1]
    ]
    if not named:
        return app
    narrow = copy(app)
    narrow.registered_commands, narrow.registered_groups = named, []
    return narrow


def _end_on_signals() -> list[int]:
    """Lets signals end the command in order: half-written files go, then it exits.

    Returns the list of those that came. What was ignored before, stays ignored.
    """
    came: list[int] = []

    def end(number: int, frame: object) -> None:
        del frame
        came.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    return came


def _version(value: bool) -> None:
    if value:
        _write(f"streamlint {__version__}\n", None)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def lint(
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TRACE...",
            help="Exports (.sqlite, parquetdir), reports (.nsys-rep), folders of them.",
        ),
    ] = None,
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="What to write.")
    ] = OutputFormat.TEXT,
    output: _OutputOption = None,
    select: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=_selectors,
            help="Only these rules or families (comma-separated, repeatable), "
            "whatever the configuration selects and ignores.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            autocompletion=_selectors,
            help="Not these rules or families (comma-separated, repeatable).",
        ),
    ] = None,
    fail_on: Annotated[
        FailOn | None,
        typer.Option(
            help="Exit with 1 on findings of this severity or above (default: low)."
        ),
    ] = None,
    min_saving: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|SHARE",
            help="Leave out findings that cost less: 1ms, or 0.5% of the judged time.",
        ),
    ] = None,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit with 0 in spite of findings.")
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Report and fail on what is new or grown since this."
        ),
    ] = None,
    write_baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write all findings there, as known; exit with 0."
        ),
    ] = None,
    baseline_tolerance: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="How much dearer a known finding may be: 10% or 0.1."
        ),
    ] = None,
    path_map: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FROM=TO",
            help="A recorded folder of sources and where it is here (repeatable).",
        ),
    ] = None,
    nvtx: Annotated[
        str | None,
        typer.Option(
            metavar="RANGE",
            help="Judge calls within NVTX ranges whose text fits this glob pattern, "
            "and the work that they launch.",
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="START:END",
            help="Judge what starts in this time of the recording: 1.5s:2s, 200ms:.",
        ),
    ] = None,
    process: Annotated[
        str | None,
        typer.Option(metavar="PID|NAME", help="Judge this process (name: a pattern)."),
    ] = None,
    device: Annotated[
        int | None,
        typer.Option(min=0, help="Judge the work on this device of each process."),
    ] = None,
    steady_state: Annotated[
        bool,
        typer.Option(
            "--steady-state", help="Judge repeated iterations; fail without any."
        ),
    ] = False,
    replay: Annotated[
        bool | None,
        typer.Option(
            "--replay/--no-replay",
            help="Price findings by a replay of the run (default), or in half the time "
            "by what the trace shows directly.",
        ),
    ] = None,
    symbols: _SymbolsOption = None,
    show_suppressed: Annotated[
        bool,
        typer.Option("--show-suppressed", help="List what is allowed, and why."),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Add call stacks, all evidence, and how rules and tables came out.",
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet", "-q", help="Print findings only, nothing about a clean trace."
        ),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            help="Judge so many traces at a time (default: as CPUs and memory allow).",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Judge on the Dask cluster of this scheduler."
        ),
    ] = None,
    rank_regex: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Finds ranks in the names of traces: groups named rank and host.",
        ),
    ] = None,
    watch: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Judge each trace that is written into this folder, until Ctrl-C.",
        ),
    ] = None,
    rules_dir: _RulesDirOption = None,
    config: _ConfigOption = None,
    isolated: _IsolatedOption = False,
    color: Annotated[Color, typer.Option(help="Colour the text.")] = Color.AUTO,
    html: _HtmlOption = None,
    plotlyjs: Annotated[str, typer.Option(help=_PLOTLYJS_HELP)] = "inline",
) -> None:
    """Judge traces by every rule."""
    if watch is not None:
        given = {name: value for name, value in locals().items() if name != "watch"}
        written = (output, html, write_baseline)
        if traces or any(path for path in written) or output_format in _ONE_FILE:
            raise UsageError(
                "--watch takes no TRACE and writes no file",
                hint="say only how to judge and print what lands in the folder",
            )
        _watch(
            watch, lambda path: lint(**{**given, "traces": [str(path)]}), quiet=quiet
        )
    if not traces:
        raise UsageError(
            "no trace is named",
            hint="name some: streamlint lint run.sqlite; or a folder to --watch",
        )
    from streamlint.sources import no_traces, opened, sources_of

    sources = sources_of(traces)
    with _quick_imports(sources):
        from streamlint.engine import Report
        from streamlint.engine import lint as lint_trace
        from streamlint.findings import Severity
        from streamlint.reporters import Detail, View, renderer
        from streamlint.reporters.places import SourceTree

        held = _configuration(config, isolated, rules_dir, min_saving)
        pairs = [*_pairs("--path-map", path_map), *held.path_map]
        pairs.sort(key=lambda pair: -len(pair[0]))
        held = replace(held, path_map=tuple(pairs))
        scope = _scope(held.scope, nvtx, time, process, device, steady_state)
        held = replace(held, scope=scope)
        if replay is not None:
            held = replace(held, replay=replay)
        rules = held.chosen(_names(select), _names(ignore))
    if not rules:
        raise UsageError(
            "--select and --ignore leave no rule"
            if held.path is None
            else f"--select, --ignore and {held.origin} leave no rule",
            hint="`streamlint rules` lists them",
        )
    if quiet and verbose:
        raise UsageError("--quiet and --verbose", hint="leave one of them out")
    detail = Detail.QUIET if quiet else Detail.VERBOSE if verbose else Detail.NORMAL
    settings = _with_symbols(held.settings, symbols)
    least = held.fail_on if fail_on is None else Severity(fail_on.value)
    outputs = _outputs(output_format, output)
    _not_a_trace("--html", html)
    _not_a_trace("--write-baseline", write_baseline)
    as_perfetto = OutputFormat.PERFETTO in [wanted for wanted, _ in outputs]
    alone = len(sources) == 1 and scheduler is None
    if as_perfetto and not alone:
        raise UsageError(
            "--format perfetto takes one trace, judged here", hint="name one"
        )
    if (OutputFormat.PERFETTO, None) in outputs and sys.stdout.isatty():
        raise UsageError(
            "a Perfetto trace is no text for a terminal",
            hint="add --output FILE.json.gz and open it in ui.perfetto.dev",
        )
    known = _baseline(baseline, baseline_tolerance, held.baseline_tolerance)
    with_model = OutputFormat.JSON in [f for f, _ in outputs]
    judge = partial(
        lint_trace,
        # A timeline shows the whole run.
        partly=not as_perfetto and not (html is not None and alone),
        rules=rules,
        with_model=with_model or (html is not None and alone),
        settings=settings,
        policy=held.policy,
        known=held.catalog.names,
    )
    tree, brief = SourceTree.around(Path.cwd()), len(sources) >= _BRIEF_FROM
    timeline = b""
    outcomes: list[tuple[str, Outcome]] = []
    streamed = (OutputFormat.TEXT, None) in outputs and not alone

    def view_of(file: Path | None) -> View:
        on_screen = file is None and sys.stdout.isatty()
        return View(
            color=file is None and _use_color(color, on_screen),
            width=_width(on_screen),
            fail_on=least,
            sources=tree,
            show_suppressed=show_suppressed,
            detail=detail,
            brief=brief and detail is Detail.NORMAL,
        )

    if alone:
        (source,) = sources
        try:
            with (
                opened(source) as trace,
                _on_one_cpu(source),
                _progress(source.path.name, trace) as told,
            ):
                report = judge(trace, on_rule=told)._replace(
                    path=source.path, url=source.url, baseline=known
                )
                outcomes.append((source.shown, report))
                if html is not None:
                    told("the page")
                    _write(_page([(trace, report)], plotlyjs), html)
                if as_perfetto:
                    from streamlint.reporters.perfetto import render as perfetto

                    timeline = perfetto(trace, report)
        except StreamlintError as error:
            if isinstance(error, OtherDatabase) and source.searched:
                raise no_traces(str(Path(source.named).parent)) from error
            _show_error(error)
            outcomes.append((source.shown, error))
    else:
        from streamlint.fleet import fleet, rank_pattern
        from streamlint.reporters import text

        pattern, first = rank_pattern(rank_regex), True

        def show(report: Report) -> None:
            nonlocal first
            piece = text.piece(report, view_of(None), first=first) if streamed else ""
            if piece:
                _write(piece, None)
                first = False

        how = _How(jobs, scheduler, known, on_stdout=streamed)
        outcomes = _judged(judge, sources, how, show)
        whole = fleet(outcomes, pattern)
        if html is not None and any(isinstance(o, Report) for _, o in outcomes):
            from streamlint.reporters.fleet_page import page as fleet_page

            _write(fleet_page(whole, plotlyjs), html)
    reports = [o for _, o in outcomes if isinstance(o, Report)]
    failures = [(name, o) for name, o in outcomes if isinstance(o, StreamlintError)]
    for report in reports:
        for _, crash in report.crashed:
            _show_traceback(crash.traceback)
    if not quiet:
        _tell_uses(reports)
        _tell_notes(reports)
    for wanted, file in outputs:
        view = view_of(file)._replace(fleet=None if alone else whole)
        if wanted is OutputFormat.PERFETTO:
            if reports:
                _write(timeline, file)
        elif wanted is OutputFormat.TEXT and file is None and streamed:
            if reports and not quiet:
                _write(text.ending(reports, view), None)
        elif reports or (failures and wanted not in _NEEDS_A_TRACE):
            rendered = renderer(wanted.value)(reports, failures, view)
            if rendered or file is not None:
                _write(rendered, file)
    code = _exit_code(reports, bool(failures), least, exit_zero=exit_zero)
    # A trace that wasn't read may show it.
    if known is not None and not failures and not quiet:
        _tell_gone(known, reports)
    if write_baseline is not None:
        code = _write_baseline(write_baseline, known, reports, code)
    sys.exit(code)


@app.command()
def report(
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...",
            help="A trace; two, before and after a change; or more, seen together.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page to write.")
    ] = Path("report.html"),
    plotlyjs: Annotated[str, typer.Option(help=_PLOTLYJS_HELP)] = "inline",
    symbols: _SymbolsOption = None,
    rules_dir: _RulesDirOption = None,
    config: _ConfigOption = None,
    isolated: _IsolatedOption = False,
) -> None:
    """Write a page for a browser: findings, timeline, and the run once fixed."""
    from streamlint.engine import Report
    from streamlint.engine import lint as lint_trace
    from streamlint.registry import select as select_rules
    from streamlint.sources import opened, sources_of

    _not_a_trace("--output", output)
    sources = sources_of(traces)
    held = _configuration(config, isolated, rules_dir)
    settings = _with_symbols(held.settings, symbols)
    judge = partial(
        lint_trace,
        rules=select_rules([*held.select], [*held.ignore]),
        with_model=len(sources) < 3,
        settings=settings,
        policy=held.policy,
    )
    failed = False
    if len(sources) > 2:
        from streamlint.fleet import fleet
        from streamlint.reporters.fleet_page import page as fleet_page

        outcomes = _judged(judge, sources, _How(), lambda _: None)
        found = [outcome for _, outcome in outcomes if isinstance(outcome, Report)]
        failed = len(found) < len(outcomes)
        if not found:
            sys.exit(EXIT_ERROR)
        text = fleet_page(fleet(outcomes), plotlyjs)
    else:
        with ExitStack() as stack:
            judged: list[tuple[Trace, Report]] = []
            for source in sources:
                trace = stack.enter_context(opened(source))
                with _progress(source.path.name, trace) as told:
                    made = judge(trace, on_rule=told)
                judged.append((trace, made._replace(path=source.path, url=source.url)))
            found = [report for _, report in judged]
            with _progress(sources[0].path.name):
                text = _page(judged, plotlyjs)
    for report in found:
        for _, crash in report.crashed:
            _show_traceback(crash.traceback)
    _tell_notes(found)
    _write(text, output)
    _say(f"wrote {output}")
    if failed or any(report.crashed for report in found):
        sys.exit(EXIT_ERROR)


@app.command()
def diff(
    before: Annotated[
        Path, typer.Argument(help="A trace, or a result of lint --format json.")
    ],
    after: Annotated[Path, typer.Argument(help="The same, after a change.")],
    output_format: Annotated[
        DiffFormat, typer.Option("--format", help="What to write.")
    ] = DiffFormat.TEXT,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write to this file instead of stdout."),
    ] = None,
    fail_on: Annotated[
        FailOn | None,
        typer.Option(
            help="Exit with 1 if findings of this severity or above are new or have "
            "grown (default: low)."
        ),
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Changes of costs up to this are none (default: 10%)."
        ),
    ] = None,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit with 0 in spite of findings.")
    ] = False,
    rules_dir: _RulesDirOption = None,
    config: _ConfigOption = None,
    isolated: _IsolatedOption = False,
    color: Annotated[Color, typer.Option(help="Colour the text.")] = Color.AUTO,
) -> None:
    """Compare two traces of a program: findings gone, new, grown and shrunk."""
    from streamlint.diff import diff as compare
    from streamlint.findings import Severity
    from streamlint.reporters import View
    from streamlint.reporters.diff import renderer

    _not_a_trace("--output", output)
    held = _configuration(config, isolated, rules_dir)
    share = held.baseline_tolerance
    if tolerance is not None:
        share = _tolerance("--tolerance", tolerance)
    found = compare(_side(before, held), _side(after, held), share)
    on_screen = output is None and sys.stdout.isatty()
    colored = output is None and _use_color(color, on_screen)
    view = View(colored, _width(on_screen))
    _write(renderer(output_format.value)(found, view), output)
    least = held.fail_on if fail_on is None else Severity(fail_on.value)
    if found.before.crashed or found.after.crashed:
        sys.exit(EXIT_ERROR)
    if found.worse(least) and not exit_zero:
        sys.exit(EXIT_FINDINGS)
    if not found.comparable:
        sys.exit(EXIT_NOT_ASSESSED)


def _side(path: Path, held: Config) -> Side:
    """One side of a comparison: a trace is judged, a result is read."""
    from streamlint.diff import side
    from streamlint.reporters.json import document, stored

    results = stored(path)
    if results is None:
        from streamlint.engine import lint as lint_trace
        from streamlint.suppression import NO_SAVING

        rules = held.chosen()
        # What falls below min-saving has shrunk; it isn't gone.
        policy = replace(held, min_saving=NO_SAVING).policy
        with _opened(path) as trace, _progress(path.name, trace) as told:
            report = lint_trace(
                trace, rules, told, settings=held.settings, policy=policy
            )
        for _, crash in report.crashed:
            _show_traceback(crash.traceback)
        results = document([report])["traces"]
    if len(results) != 1:
        raise UsageError(
            f"{path} is a result of {len(results)} traces",
            hint="compare results of one trace each",
        )
    try:
        return side(results[0])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} is no result of streamlint",
            hint="write one: streamlint lint TRACE --format json",
        ) from error


@app.command()
def rules(
    rules_dir: _RulesDirOption = None,
    config: _ConfigOption = None,
    isolated: _IsolatedOption = False,
) -> None:
    """List every rule with its family, what it finds, and who brings it."""
    from streamlint.rule import BUILT_IN

    found = _catalog(config, isolated, rules_dir).rules
    width = max(len(rule.name) for rule in found)
    family = None
    lines: list[str] = []
    for rule in found:
        if rule.family != family:
            family = rule.family
            lines.append(f"{family}:\n")
        lead = f"  {rule.name:<{width}}  "
        lines.append(f"{lead}{_under(lead, rule.summary)}\n")
        if rule.origin != BUILT_IN:
            lines.append(f"  {'':<{width}}  from {printable(rule.origin)}\n")
    _write("".join(lines), None)


def _under(lead: str, text: str) -> str:
    """A text for behind ``lead``, wrapped below itself where a terminal is narrow."""
    if not sys.stdout.isatty():
        return text
    import textwrap

    columns = shutil.get_terminal_size().columns
    margin = len(lead) if columns - len(lead) >= 30 else 4
    lines = textwrap.wrap(text, max(16, columns - margin))
    separator = f"\n{' ' * margin}"
    wrapped = separator.join(lines)
    return wrapped if margin == len(lead) else f"{separator}{wrapped}"


@app.command()
def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="RULE", help="A rule's name.", autocompletion=_rule_names
        ),
    ],
    rules_dir: _RulesDirOption = None,
    config: _ConfigOption = None,
    isolated: _IsolatedOption = False,
) -> None:
    """Explain a rule: what it finds, why that costs time, and the fix."""
    from streamlint.docs import page

    _write(page(_catalog(config, isolated, rules_dir).find(name)), None)


@app.command()
def new_rule(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="What is wrong, as in small-copies.")
    ],
    family: Annotated[
        str | None, typer.Option(metavar="FAMILY", help="The family that it is of.")
    ] = None,
    rules_dir: Annotated[
        Path | None,
        typer.Option(
            "--rules-dir",
            metavar="DIR",
            help="Write a loose file and its test there, not into a checkout.",
        ),
    ] = None,
) -> None:
    """Write a new rule that works, its test and, in a checkout, its two programs."""
    from streamlint.registry import catalog
    from streamlint.scaffold import new_rule as write_rule

    folders = (rules_dir.resolve(),) if rules_dir and rules_dir.is_dir() else ()
    files = write_rule(name, family, rules_dir, Path.cwd(), catalog(folders))
    _write("".join(f"wrote {os.path.relpath(file)}\n" for file in files), None)


@app.command()
def info(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A .sqlite export or .nsys-rep.")
    ],
    rules_dir: _RulesDirOption = None,
    config: _ConfigOption = None,
    isolated: _IsolatedOption = False,
) -> None:
    """Show what a trace holds, and what can and cannot be judged from it."""
    from streamlint.engine import lint as lint_trace
    from streamlint.reporters.info import render

    held = _configuration(config, isolated, rules_dir)
    with _opened(trace) as opened, _progress(trace.name, opened) as told:
        report = lint_trace(
            opened, held.catalog.rules, told, with_model=True, settings=held.settings
        )
        text = render(opened, report, _width(sys.stdout.isatty()))
    _write(text, None)


@app.command(context_settings={"allow_interspersed_args": False})
def profile(
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="The program to record.")
    ],
    call_stacks: Annotated[
        bool,
        typer.Option("--call-stacks", help="Record CUDA and Python call stacks; slow."),
    ] = False,
    light: Annotated[
        bool, typer.Option("--light", help="Record less, to disturb the program less.")
    ] = False,
    follow_forks: Annotated[
        bool,
        typer.Option("--follow-forks", help="Record forked processes; may hang some."),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the report and its export here.")
    ] = False,
    output_format: Annotated[
        OutputFormat, typer.Option("--format", help="What to write.")
    ] = OutputFormat.TEXT,
    output: _OutputOption = None,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit with 0 in spite of findings.")
    ] = False,
    html: _HtmlOption = None,
    rules_dir: _RulesDirOption = None,
    config: _ConfigOption = None,
    isolated: _IsolatedOption = False,
) -> None:
    """Record a program with nsys, judge the trace, exit with the program's code."""
    from streamlint.harness import nsys

    _outputs(output_format, output)
    _not_a_trace("--html", html)
    detail = nsys.Detail.LIGHT if light else nsys.Detail.FULL
    with nsys.workspace(command, Path.cwd(), _say) as work:
        recording = work.capture(
            detail, call_stacks=call_stacks, follow_forks=follow_forks, keep=keep
        )
        failed = nsys.failure(recording)
        try:
            lint(
                [str(work.export)],
                output_format,
                output,
                exit_zero=exit_zero,
                html=html,
                rules_dir=rules_dir,
                config=config,
                isolated=isolated,
            )
        except SystemExit:
            if failed is not None:
                raise failed from None
            raise


@app.command(
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
    },
    add_help_option=False,
)
def harness(context: typer.Context) -> None:
    """Prove the rules on a GPU: list, build, run, collect, score, capture."""
    from streamlint.harness.__main__ import main as run_harness

    def say(line: str) -> None:
        _write(f"{line}\n", None)

    sys.exit(run_harness(context.args, say, program="streamlint harness"))


@app.command()
def redact(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A .sqlite export or .nsys-rep.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The copy; must not exist.")
    ],
    programs: Annotated[
        bool, typer.Option(help="Keep the names of programs and threads.")
    ] = True,
    names: Annotated[
        bool,
        typer.Option(
            "--names", help="Replace names of kernels, ranges, files and functions too."
        ),
    ] = False,
) -> None:
    """Copy a trace without what tells about people and machines."""
    from streamlint.trace.convert import REPORT_SUFFIXES, exported
    from streamlint.trace.redact import redact as redact_trace

    if source.suffix.lower() in REPORT_SUFFIXES and source.is_file():
        source = exported(source)
    removed = redact_trace(source, target, programs=programs, names=names).removed
    lines = [f"removed or rewritten: {n} {what}\n" for what, n in removed.items()]
    lines += [f"look through {printable(str(target))} before you pass it on\n"]
    _write("".join(lines), None)


@config_app.command()
def show(
    rules_dir: _RulesDirOption = None,
    config: _ConfigOption = None,
    isolated: _IsolatedOption = False,
) -> None:
    """Print every setting that holds here, and where it comes from, as TOML."""
    from streamlint.reporters.config import render

    typer.echo(render(_configuration(config, isolated, rules_dir)), nl=False)


def _watch(path: Path, judge: Callable[[Path], None], *, quiet: bool) -> NoReturn:
    """Judge what lands in a folder until a signal ends that."""
    from streamlint.watch import Folder

    # Else the first trace, if it is small, would leave one thread to all others.
    os.environ.setdefault("POLARS_MAX_THREADS", str(os.cpu_count() or 1))
    folder = Folder(path)
    if not quiet:
        there = f"{folder.traces} trace{'' if folder.traces == 1 else 's'}"
        _say(f"watching {path} ({there} there already); Ctrl-C ends it")
    try:
        for landed in folder.landed():
            try:
                judge(landed)
            except StreamlintError as error:
                _show_error(error)
            except SystemExit as ended:
                if isinstance(ended.code, int) and ended.code > 128:
                    raise  # a signal's
            if not quiet:
                _write("\n", None)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    raise AssertionError("a watch has no end of its own")


def _catalog(
    named: Path | None, isolated: bool, rules_dir: list[Path] | None
) -> Catalog:
    """All rules at hand, whatever else the configuration says."""
    from streamlint.config import Config, rules_dirs

    _one_of(named, isolated)
    folders = [path.resolve() for path in rules_dir or ()]
    folders += () if isolated else rules_dirs(Path.cwd(), named)
    return _told(Config(rules_dir=tuple(folders)).catalog)


def _told(catalog: Catalog) -> Catalog:
    """Warn of rules that can't be used."""
    for broken in catalog.broken:
        _say(f"warning: {broken.origin} is skipped: {broken.reason}")
    return catalog


def _one_of(named: Path | None, isolated: bool) -> None:
    if isolated and named is not None:
        raise UsageError(
            "--config names a file and --isolated says to use none",
            hint="leave one of them out",
        )


def _configuration(
    named: Path | None,
    isolated: bool,
    rules_dir: list[Path] | None,
    min_saving: str | None = None,
) -> Config:
    """The file's configuration with what the command line says instead."""
    from streamlint.config import SAVING_FORM, Config, load, saving_of

    _one_of(named, isolated)
    if isolated:
        held = Config(rules_dir=tuple(path.resolve() for path in rules_dir or ()))
    else:
        held = load(Path.cwd(), named, rules_dir or ())
    _told(held.catalog)
    if min_saving is None:
        return held
    saving = saving_of(min_saving)
    if saving is None:
        raise UsageError(
            f"--min-saving can't be {min_saving}", hint=f"it is {SAVING_FORM}"
        )
    return replace(held, min_saving=saving)


def _tell_uses(reports: list[Report]) -> None:
    """Warn of allowances that allow nothing: they may hide something later."""
    states: dict[Allowance, set[str]] = {}
    for report in reports:
        for use in report.uses:
            states.setdefault(use.allowance, set()).add(use.state)
    for allowance, seen in states.items():
        words = f"{allowance.origin} ({allowance.rule})"
        if "invalid" in seen:
            _say(f"warning: {allowance.origin} {allowance.problem}: it allows nothing")
        elif "expired" in seen:
            _say(f"warning: {words} expired on {allowance.until}: it allows nothing")
        elif "unmatched" in seen and "matched" not in seen:
            _say(f"warning: {words} matches no finding: remove it if that is fixed")


def _scope(
    known: Scope,
    nvtx: str | None,
    time: str | None,
    process: str | None,
    device: int | None,
    steady_state: bool,
) -> Scope:
    """What the configuration says is judged, and what the command line says."""
    if nvtx is not None and steady_state:
        raise UsageError(
            "--nvtx and --steady-state both say which ranges are judged",
            hint="name the iterations in the configuration: steady-state-nvtx",
        )
    start, end = (None, None) if time is None else _times(time)
    return known._replace(
        nvtx=nvtx,
        start_ns=start,
        end_ns=end,
        process=process,
        device=device,
        steady_state=steady_state or (known.steady_state and nvtx is None),
    )


def _times(text: str) -> tuple[int | None, int | None]:
    """The ns of START:END, seconds where no unit is said; either may be left out."""
    from streamlint.units import ns_of

    wrong = UsageError(
        f"--time can't be {text}",
        hint="it is START:END since the recording began, such as 1.5s:2s or 200ms:",
    )
    parts = [part.strip() for part in text.split(":")]
    if len(parts) != 2 or not any(parts):
        raise wrong
    times: list[int | None] = []
    for part in parts:
        ns = ns_of(part)
        ns = ns_of(f"{part}s") if ns is None else ns
        if part and ns is None:
            raise wrong
        times.append(ns if part else None)
    start, end = times
    if start is not None and end is not None and start >= end:
        raise wrong
    return start, end


def _tell_notes(reports: list[Report]) -> None:
    for note in dict.fromkeys(note for report in reports for note in report.notes):
        _say(f"note: {note}")


def _with_symbols(settings: Settings, places: list[Path] | None) -> Settings:
    for place in places or ():
        if not place.exists():
            raise UsageError(
                f"--symbols {place} does not exist",
                hint="name the folder that holds the program's binaries, or one itself",
            )
    return replace(settings, symbols=tuple(places or ()))


class _How(NamedTuple):
    """How many traces are judged, and what is known of them before."""

    jobs: int | None = None
    scheduler: str | None = None
    known: Baseline | None = None
    on_stdout: bool = False


def _judged(
    judge: Judge, sources: list[Source], how: _How, show: Callable[[Report], None]
) -> list[tuple[str, Outcome]]:
    """Outcomes of many traces by name, in their order; each is shown when it is there.

    Errors go to stderr. What a search of folders has found and is no trace is left
    out, with a note.
    """
    from streamlint import many
    from streamlint.sources import no_traces

    if how.scheduler is not None:
        from streamlint.cluster import judged_by_cluster

        came = judged_by_cluster(judge, sources, how.scheduler)
    elif count := many.workers_for(sources, how.jobs):
        came = many.judged_by_processes(judge, sources, count)
    else:
        came = many.judged_here(judge, sources)
    outcomes: dict[int, Outcome] = {}
    with ExitStack() as stack:
        stack.enter_context(closing(came))
        tell = None
        if not (how.on_stdout and sys.stdout.isatty()):  # else what comes tells
            tell = stack.enter_context(_progress("traces"))
        for index, outcome in came:
            source = sources[index]
            if isinstance(outcome, OtherDatabase) and source.searched:
                _say(f"note: {outcome.message}: left out")
                continue
            if isinstance(outcome, StreamlintError):
                outcomes[index] = outcome
                _show_error(outcome)
            else:
                outcomes[index] = report = outcome._replace(baseline=how.known)
                show(report)
            if tell is not None:
                tell(f"{len(outcomes)} of {len(sources)}")
    if not outcomes:
        raise no_traces(os.path.commonpath([s.named for s in sources]))
    return [(sources[index].shown, outcomes[index]) for index in sorted(outcomes)]


def _page(judged: list[tuple[Trace, Report]], plotlyjs: str) -> str:
    from streamlint.reporters.html import page
    from streamlint.reporters.timeline import capture

    return page([capture(trace, found) for trace, found in judged], plotlyjs)


def _not_a_trace(option: str, path: Path | None) -> None:
    if path is not None and path.suffix.lower() in _TRACE_SUFFIXES:
        raise UsageError(
            f"{option} names a trace, {path}", hint="name another file to write to"
        )


def _outputs(
    output_format: OutputFormat, values: list[str] | None
) -> list[tuple[OutputFormat, Path | None]]:
    """What to write where: first what `--format` names, then each FORMAT=FILE."""
    formats = {known.value: known for known in OutputFormat}
    plain: list[Path] = []
    named: list[tuple[OutputFormat, Path | None]] = []
    for value in values or ():
        name, equals, rest = value.partition("=")
        if equals and name in formats:
            named.append((formats[name], Path(rest)))
        else:
            plain.append(Path(value))
    if len(plain) > 1:
        raise UsageError(
            "--output names two files",
            hint="say what the others are for: --output sarif=FILE",
        )
    wanted = [(output_format, plain[0] if plain else None), *named]
    files = [file for _, file in wanted if file is not None]
    for file in files:
        _not_a_trace("--output", file)
        if files.count(file) > 1:
            raise UsageError(
                f"--output names {file} twice", hint="name a file for each format"
            )
    return wanted


def _pairs(option: str, values: list[str] | None) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for value in values or ():
        before, equals, after = value.partition("=")
        if not before or not equals:
            raise UsageError(
                f"{option} {value} is not FROM=TO",
                hint=f"say {option} /workspace/app=.",
            )
        pairs.append((before.rstrip("/\\"), after))
    return pairs


def _baseline(
    path: Path | None, tolerance: str | None, share: float
) -> Baseline | None:
    from streamlint.baseline import read

    if tolerance is not None:
        share = _tolerance("--baseline-tolerance", tolerance)
    if path is None:
        if tolerance is not None:
            raise UsageError(
                "--baseline-tolerance without --baseline", hint="add --baseline FILE"
            )
        return None
    return read(path, share)


def _tolerance(option: str, text: str) -> float:
    from streamlint.baseline import parse_tolerance

    try:
        return parse_tolerance(text)
    except ValueError as error:
        raise UsageError(
            f"{option} {text} is no share", hint="say 10% or 0.1"
        ) from error


def _tell_gone(baseline: Baseline, reports: list[Report]) -> None:
    from streamlint.engine import gone

    count = len(gone(baseline, reports))
    if count:
        entries = "entry is" if count == 1 else "entries are"
        _say(
            f"note: {count} baseline {entries} no longer found: rewrite it with "
            f"--write-baseline {baseline.path}"
        )


def _write_baseline(
    path: Path, known: Baseline | None, reports: list[Report], code: int
) -> int:
    """Write what was found; what could not be assessed now stays known as it was."""
    from streamlint.baseline import dump, entries
    from streamlint.engine import gone

    if code == EXIT_ERROR:
        _say(f"note: {path} is not written: a baseline needs all traces and rules")
        return code
    found = entries((rule.name, f) for r in reports for rule, f in r.findings)
    if known is not None:
        dropped = {entry.fingerprint for entry in gone(known, reports)}
        kept = {k: e for k, e in known.entries.items() if k not in dropped}
        found = {**kept, **found}
    _write(dump(found.values()), path)
    _say(f"wrote {len(found)} known finding{'' if len(found) == 1 else 's'} to {path}")
    return EXIT_NOT_ASSESSED if code == EXIT_NOT_ASSESSED else EXIT_CLEAN


def _say(line: str) -> None:
    sys.stderr.write(f"{printable(line)}\n")


@contextmanager
def _on_one_cpu(source: Source) -> Iterator[None]:
    """Saves a seventh of a lint of half a second, where a thread may stay on a CPU.

    polars hands each step to a thread of its own. To wake it on another CPU, which
    may be asleep, takes longer than the step. Of several lints only one stays on a
    CPU, and holds the lock on the CPU's own folder meanwhile; the others go anywhere.
    """
    if sys.platform != "linux" or (source.size or 0) >= _TINY_BYTES:
        yield
        return
    import fcntl

    allowed = os.sched_getaffinity(0)
    with ExitStack() as held:
        with suppress(OSError, ValueError):
            # The 39th field; the second, the program's name, may hold anything.
            stat = Path("/proc/thread-self/stat").read_bytes().rpartition(b")")[2]
            cpu = int(stat.split()[36])
            folder = os.open(f"/sys/devices/system/cpu/cpu{cpu}", os.O_RDONLY)
            held.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.sched_setaffinity(0, {cpu})
            held.callback(os.sched_setaffinity, 0, allowed)
        yield


@contextmanager
def _quick_imports(sources: list[Source]) -> Iterator[None]:
    """Saves a tenth of a small lint: imports leave no garbage, BLAS goes unused.

    And a sixth of a large one: frames come and go, and polars' allocator would give
    their memory back at once, to get it zeroed again. What is set for both is read as
    numpy and polars load; programs that are started later, such as a profiled one, must
    not see it. Small traces are judged on one thread: handing their few rows to another
    costs more than the work.
    """
    if all((source.size or 0) < _SMALL_BYTES for source in sources):
        os.environ.setdefault("POLARS_MAX_THREADS", "1")
    else:
        _share_one_heap()
    ours = {name: v for name, v in _AT_IMPORT.items() if name not in os.environ}
    os.environ.update(ours)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        for name in ours:
            del os.environ[name]


def _share_one_heap() -> bool:
    """Let all threads allocate numpy's arrays from one heap, where the C library can.

    Each would keep what it freed to itself: a tenth of the memory of a large lint.
    """
    if sys.platform != "linux":
        return False
    import ctypes  # numpy does so too

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_ARENA_MAX, 1) == 1


@contextmanager
def _opened(path: Path) -> Iterator[Trace]:
    from streamlint.trace import open_trace

    trace = open_trace(path)
    try:
        yield trace
    finally:
        trace.close()


@contextmanager
def _progress(name: str, trace: Trace | None = None) -> Iterator[Callable[[str], None]]:
    """Says on a terminal's stderr what is going on, once it takes over 2 s."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.status import Status
    from rich.text import Text

    name = printable(name)
    if trace is not None:
        name = f"{name}, {trace.rows:,} rows"
    status = Status(Text(f"reading {name}"), console=Console(stderr=True))
    timer = threading.Timer(_PROGRESS_AFTER_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda rule: status.update(Text(f"{name}: {rule}"))
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def _names(values: list[str] | None) -> list[str]:
    parts = [name.strip() for value in values or () for name in value.split(",")]
    return [name for name in parts if name]


def _exit_code(
    reports: list[Report], failed: bool, fail_on: Severity, *, exit_zero: bool
) -> int:
    codes = {report.exit_code(fail_on) for report in reports}
    if failed or EXIT_ERROR in codes:
        return EXIT_ERROR
    if EXIT_FINDINGS in codes:
        return EXIT_CLEAN if exit_zero else EXIT_FINDINGS
    return EXIT_NOT_ASSESSED if EXIT_NOT_ASSESSED in codes else EXIT_CLEAN


def _use_color(color: Color, on_screen: bool) -> bool:
    """NO_COLOR and FORCE_COLOR are as no-color.org and force-color.org say."""
    if color is not Color.AUTO:
        return color is Color.ALWAYS
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return on_screen and os.environ.get("TERM") != "dumb"


def _width(on_screen: bool) -> int:
    if not on_screen:
        return _FILE_WIDTH
    return min(_FILE_WIDTH, shutil.get_terminal_size().columns)


def _write(content: str | bytes, output: Path | None) -> None:
    """Write all or nothing: a file appears under its name only when complete."""
    raw = content if isinstance(content, bytes) else content.encode("utf-8")
    if output is None:
        try:
            if isinstance(content, bytes):
                sys.stdout.buffer.write(content)
            else:
                sys.stdout.write(content)
            sys.stdout.flush()
        except OSError as error:
            # What Python still holds can't be written: it must not complain at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):  # else our reader has gone
                raise UsageError(
                    f"the output can't be written ({error.strerror})",
                    hint="see where it goes to: most often to a file on a full disk",
                ) from error
        return
    try:
        if output.exists() and not output.is_file():
            output.write_bytes(raw)  # /dev/stdout or a pipe
            return
        with replacing(output) as part:
            part.write_bytes(raw)
    except OSError as error:
        raise unwritable(output, error) from error


def _show_traceback(text: str) -> None:
    lines = without_home(text).splitlines()
    sys.stderr.writelines(f"{printable(line)}\n" for line in lines)


def _show_error(error: StreamlintError) -> None:
    sys.stderr.write(f"error: {printable(error.message)}\n")
    sys.stderr.write(f"hint: {printable(error.hint)}\n")

"""What the engine makes of rules that find, cannot tell, or crash."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import polars as pl
import pytest
from tracebuilder import TraceBuilder

from streamlint import engine
from streamlint.changes import Change
from streamlint.engine import Report, lint
from streamlint.errors import TraceError
from streamlint.findings import (
    RECORDED,
    UNPROFILED,
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
    Where,
)
from streamlint.registry import all_rules
from streamlint.reporters.json import document
from streamlint.rule import Check, Outcome, Rule, rule
from streamlint.trace import open_trace
from streamlint.trace.model import Trace

SAMPLES = Path(__file__).parents[1] / "sample_traces"
UNABLE = NotAssessed("the colour of kernels is not recorded", "record in colour")


def finding(severity: Severity = Severity.LOW, ns: int | None = 10) -> Finding:
    return Finding(
        message="something is slow",
        severity=severity,
        confidence=Confidence.HIGH,
        cost=Cost(Claim.DIRECT, ns, None if ns is None else 0.5, "by looking"),
        where=Where(),
        occurrences=1,
        evidence=(Evidence(1, 2, "here"),),
        fix="make it fast",
        identity=("something",),
    )


def fake(
    name: str,
    outcome: Outcome | BaseException = (),
    *,
    needs: Sequence[str] = (),
    judges_capture: bool = False,
) -> Rule:
    def check(trace: Trace) -> Outcome:
        """Says what the test wants."""
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return Rule(name, "fakes", check, tuple(needs), judges_capture)


Judge = Callable[..., Report]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    def run(*rules: Rule, builder: TraceBuilder | None = None) -> Report:
        if builder is None:
            builder = TraceBuilder()
            builder.kernel(stream=7, start=20, end=60)
        return lint(open_trace(builder.write(tmp_path / "t.sqlite")), rules)

    return run


def without_gpu_work() -> TraceBuilder:
    builder = TraceBuilder()
    builder.call("cudaMalloc", 10)
    return builder


# Crashes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        ValueError("secret"),
        KeyError("secret"),
        pl.exceptions.ColumnNotFoundError("secret"),
        # polars derives it from BaseException
        pl.exceptions.PanicException("secret"),
        RecursionError("secret"),
        AssertionError(),
    ],
)
def test_a_crash_is_reported_and_the_other_rules_go_on(
    judge: Judge, error: BaseException
) -> None:
    report = judge(fake("first"), fake("broken", error), fake("last", [finding()]))
    ((rule, crash),) = report.crashed
    assert rule.name == "broken"
    assert crash.summary == f"{type(error).__name__} in rule broken"
    assert "Traceback" in crash.traceback
    assert [rule.name for rule, _ in report.findings] == ["last"]
    assert report.exit_code(Severity.LOW) == 2


def test_a_crash_outweighs_findings_and_assesses_nothing(judge: Judge) -> None:
    broken = fake("broken", ValueError())
    assert judge(broken, fake("a", [finding()])).exit_code(Severity.LOW) == 2
    assert not judge(broken).assessed_any


def test_a_trace_that_turns_out_unreadable_ends_the_run(judge: Judge) -> None:
    with pytest.raises(TraceError, match="cut off"):
        judge(fake("reader", TraceError("t is cut off", hint="export it again")))


def test_a_user_can_interrupt_a_rule(judge: Judge) -> None:
    with pytest.raises(KeyboardInterrupt):
        judge(fake("slow", KeyboardInterrupt()))


# Two at a time ------------------------------------------------------------------


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small traces are judged as large ones, on a machine with two processors."""
    monkeypatch.setattr(engine, "TWO_FROM_ROWS", 0)
    monkeypatch.setattr(pl, "thread_pool_size", lambda: 2)


@pytest.mark.usefixtures("together")
def test_of_a_large_trace_two_rules_are_at_work_at_a_time(judge: Judge) -> None:
    meeting = Barrier(2, timeout=60)

    def meet(trace: Trace) -> Outcome:
        """Goes on when another rule is here too."""
        meeting.wait()
        return [finding()]

    rules = [
        Rule(f"rule-{number}", "fakes", meet, (), judges_capture=False)
        for number in range(6)
    ]
    report = judge(*rules)
    assert [j.rule.name for j in report.judgements] == [rule.name for rule in rules]
    assert not report.crashed
    assert len(report.findings) == 6


@pytest.mark.usefixtures("together")
def test_a_crash_beside_another_rule_is_its_own(judge: Judge) -> None:
    report = judge(fake("a", [finding()]), fake("b", ValueError()), fake("c"))
    assert [rule.name for rule, _ in report.crashed] == ["b"]
    assert [rule.name for rule, _ in report.findings] == ["a"]


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize(
    "error", [TraceError("cut off", hint="-"), KeyboardInterrupt()]
)
def test_what_ends_the_run_leaves_later_rules_alone(
    judge: Judge, error: BaseException
) -> None:
    done: list[str] = []

    def rule_at(number: int) -> Rule:
        def check(trace: Trace) -> Outcome:
            """Takes a moment."""
            time.sleep(0.02)
            done.append("done")
            return []

        return Rule(f"rule-{number}", "fakes", check, (), judges_capture=False)

    rules = [fake("broken", error), *map(rule_at, range(100))]
    with pytest.raises(type(error)):
        judge(*rules)
    assert len(done) < 50


@pytest.mark.parametrize(
    "sample",
    [
        "legacy-null-stream-barrier",
        "device-sync-in-steady-state",
        "pageable-async-copy",
    ],
)
def test_two_at_a_time_say_the_same(
    sample: str, request: pytest.FixtureRequest
) -> None:
    def judged() -> Report:
        with open_trace(SAMPLES / sample / "bad.sqlite") as trace:
            return lint(trace, all_rules())

    alone = judged()
    request.getfixturevalue("together")
    both = judged()
    assert alone.findings
    assert document([both], ()) == document([alone], ())


# Not assessed -------------------------------------------------------------------


def test_a_rule_whose_table_is_not_recorded_is_not_run(judge: Judge) -> None:
    never = fake("never", AssertionError("was run"), needs=["memory_events"])
    report = judge(never, fake("other"))
    ((rule, why),) = report.not_assessed
    assert rule.name == "never"
    assert why.reason
    assert "--cuda-memory-usage=true" in why.recapture
    assert report.exit_code(Severity.LOW) == 0


def test_a_rule_whose_tables_are_recorded_is_run(judge: Judge) -> None:
    report = judge(fake("runs", [finding()], needs=["kernels", "runtime_calls"]))
    assert len(report.findings) == 1
    assert report.not_assessed == []


def test_a_rule_may_say_itself_that_it_cannot_tell(judge: Judge) -> None:
    report = judge(fake("modest", UNABLE), fake("sure"))
    assert [(rule.name, why) for rule, why in report.not_assessed] == [
        ("modest", UNABLE)
    ]
    assert report.exit_code(Severity.LOW) == 0


def test_nothing_assessed_is_not_clean(judge: Judge) -> None:
    report = judge(fake("one", UNABLE), fake("two", UNABLE))
    assert not report.assessed_any
    assert report.exit_code(Severity.LOW) == 3


def test_without_gpu_work_no_rule_about_the_program_runs(judge: Judge) -> None:
    report = judge(
        fake("one", AssertionError()), fake("two"), builder=without_gpu_work()
    )
    reasons = {why.reason for _, why in report.not_assessed}
    assert len(reasons) == 1
    assert report.crashed == []
    assert report.exit_code(Severity.LOW) == 3


# Rules about the capture ----------------------------------------------------------


def test_a_rule_about_the_capture_runs_without_gpu_work(judge: Judge) -> None:
    about_capture = fake("lossy", [finding()], judges_capture=True)
    report = judge(about_capture, fake("one"), builder=without_gpu_work())
    assert [rule.name for rule, _ in report.findings] == ["lossy"]
    assert report.exit_code(Severity.LOW) == 1


def test_a_silent_rule_about_the_capture_does_not_make_it_assessed(
    judge: Judge,
) -> None:
    silent = fake("lossy", judges_capture=True)
    report = judge(silent, fake("one"), builder=without_gpu_work())
    assert report.exit_code(Severity.LOW) == 3
    assert judge(silent, fake("one", UNABLE)).exit_code(Severity.LOW) == 3


def test_a_rule_about_the_capture_chosen_alone_decides(judge: Judge) -> None:
    silent = fake("lossy", judges_capture=True)
    assert judge(silent).exit_code(Severity.LOW) == 0
    unable = fake("lossy", UNABLE, judges_capture=True)
    assert judge(unable).exit_code(Severity.LOW) == 3


# Findings -----------------------------------------------------------------------


def test_findings_come_by_severity_then_cost(judge: Judge) -> None:
    report = judge(
        fake("a", [finding(Severity.INFO, None), finding(Severity.HIGH, 1)]),
        fake("b", [finding(Severity.ERROR, None), finding(Severity.HIGH, 7)]),
        fake("c", [finding(Severity.MEDIUM, 900)]),
    )
    assert [(r.name, f.severity.value) for r, f in report.findings] == [
        ("b", "error"),
        ("b", "high"),
        ("a", "high"),
        ("c", "medium"),
        ("a", "info"),
    ]


@pytest.mark.parametrize(
    ("found", "fail_on", "code"),
    [
        (Severity.INFO, Severity.LOW, 0),
        (Severity.INFO, Severity.INFO, 1),
        (Severity.LOW, Severity.LOW, 1),
        (Severity.MEDIUM, Severity.HIGH, 0),
        (Severity.HIGH, Severity.HIGH, 1),
        (Severity.HIGH, Severity.ERROR, 0),
        (Severity.ERROR, Severity.ERROR, 1),
    ],
)
def test_exit_code_by_severity(
    judge: Judge, found: Severity, fail_on: Severity, code: int
) -> None:
    assert judge(fake("one", [finding(found)])).exit_code(fail_on) == code


def test_a_finding_needs_evidence() -> None:
    with pytest.raises(ValueError, match="evidence"):
        Finding(
            message="",
            severity=Severity.LOW,
            confidence=Confidence.LOW,
            cost=Cost(Claim.NONE, None, None, ""),
            where=Where(),
            occurrences=1,
            evidence=(),
            fix="",
            identity=(),
        )


def test_only_savings_of_the_recorded_run_are_added_up(judge: Judge) -> None:
    def fixable(claim: Claim, basis: str) -> Finding:
        cost = Cost(claim, 10, 0.5, "by looking", basis)
        return replace(finding(), cost=cost, change=Change())

    what_if = fixable(Claim.WHAT_IF, RECORDED)
    others = [
        fixable(Claim.WHAT_IF, UNPROFILED),
        fixable(Claim.UPPER_BOUND, RECORDED),
        replace(what_if, change=None),
    ]

    report = judge(fake("two", [what_if, what_if, *others]))
    assert report.model is not None
    assert (report.model.joint_fixes, report.model.joint_ns) == (2, 0)

    report = judge(fake("one", [what_if, *others]))
    assert report.model is not None
    assert report.model.joint_ns is None


def test_every_rule_is_announced_before_it_runs(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.kernel(stream=7, start=20, end=60)
    told: list[str] = []
    trace = open_trace(builder.write(tmp_path / "t.sqlite"))
    lint(trace, [fake("one"), fake("two", ValueError())], told.append)
    assert told == ["one", "two"]


# The decorator --------------------------------------------------------------------


def named(name: str, module: str) -> Check:
    def check(trace: Trace) -> Outcome:
        """Looks at nothing."""
        return []

    check.__name__, check.__module__ = name, module
    return check


def test_a_rule_takes_its_names_from_where_it_lives() -> None:
    made = rule(needs=["kernels"])(
        named("too_slow", "streamlint.rules.l2_cache.too_slow")
    )
    assert (made.name, made.family) == ("too-slow", "l2-cache")
    assert made.summary == "Looks at nothing."
    assert made.needs == ("kernels",)


def test_a_rule_is_called_like_its_module() -> None:
    with pytest.raises(ValueError, match="too_slow lives in module slow"):
        rule()(named("too_slow", "streamlint.rules.sync.slow"))

"""Many traces seen together: ranks, coverage, spreads, and the documents of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commandline import Run
from jsonschema import Draft202012Validator

from streamlint.engine import Judgement, Report
from streamlint.errors import StreamlintError, TraceError, UsageError
from streamlint.findings import (
    Claim,
    Confidence,
    Cost,
    Evidence,
    Finding,
    NotAssessed,
    Severity,
    Where,
)
from streamlint.fleet import Fleet, fleet, rank_pattern
from streamlint.overview import Overview
from streamlint.registry import all_rules, find
from streamlint.reporters.fleet import cost, coverage
from streamlint.reporters.fleet_page import LEVELS, document, page
from streamlint.reporters.json import schema
from streamlint.trace.capture import Capture

EXTRA = Path(__file__).parents[1] / "sample_traces" / "extra"
BARRIER, COPY = find("legacy-null-stream-barrier"), find("pageable-async-copy")


def finding(
    ns: int | None = 1_000_000,
    severity: Severity = Severity.HIGH,
    *,
    pid: int | None = None,
    identity: str = "step",
    message: str = "held back",
    claim: Claim = Claim.DIRECT,
) -> Finding:
    return Finding(
        message=message,
        severity=severity,
        confidence=Confidence.HIGH,
        cost=Cost(claim, ns, None if ns is None else 0.1, "measured"),
        where=Where(pid=pid),
        occurrences=1,
        evidence=(Evidence(0, 1, "here"),),
        fix="do it otherwise",
        identity=(identity,),
    )


def report(
    *findings: Finding,
    span: int | None = 10_000_000,
    unable: bool = False,
    processes: tuple[tuple[int, str], ...] = (),
    spans: dict[int, int] | None = None,
) -> Report:
    facts = Overview((), processes, span, 1, 0, 0, 1, {}, (), (), spans or {})
    why = NotAssessed("not recorded", "record it")
    judgements = (
        Judgement(BARRIER, findings, why if unable else None),
        Judgement(COPY, not_assessed=why if unable else None),
    )
    return Report(Path("x.sqlite"), Capture(), facts, judgements)


def of(names: list[str], expression: str | None = None) -> Fleet:
    reports: list[tuple[str, Report | StreamlintError]]
    reports = [(name, report()) for name in names]
    return fleet(reports, rank_pattern(expression))


# Ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["ddp_rank0.sqlite", "ddp_rank1bad.sqlite"], ["rank 0", "rank 1"]),
        (["a.rank_07.sqlite", "a.rank-12.nsys-rep"], ["rank 7", "rank 12"]),
        (["node3.rank12.sqlite", "node4.rank13.sqlite"], ["rank 12", "rank 13"]),
        (["local_rank1_rank9.sqlite", "l_rank0_rank8.sqlite"], ["rank 9", "rank 8"]),
        (["run/r3.sqlite", "run/r4.sqlite"], ["rank 3", "rank 4"]),
        (["rank0/t.sqlite", "rank1/t.sqlite"], ["rank 0", "rank 1"]),
        (["prof_0.sqlite", "prof_1.sqlite"], ["rank 0", "rank 1"]),
        (["p_40312.sqlite", "p_40313.sqlite"], ["p_40312.sqlite", "p_40313.sqlite"]),
        (["before_1.sqlite", "after_1.sqlite"], ["before_1.sqlite", "after_1.sqlite"]),
        (["n1/rank0.db", "n2/rank0.db"], ["n1/rank0.db", "n2/rank0.db"]),
        (["rank0.sqlite", "other.sqlite"], ["rank 0", "other.sqlite"]),
        (["frank1.sqlite", "frank2.sqlite"], ["frank1.sqlite", "frank2.sqlite"]),
        (["report1.sqlite", "report2.sqlite"], ["report1.sqlite", "report2.sqlite"]),
    ],
)
def test_ranks_are_found_in_names(names: list[str], labels: list[str]) -> None:
    assert [rank.label for rank in of(names).ranks] == labels
    assert of(names).hosts() == {}


def test_an_expression_names_ranks_and_hosts() -> None:
    names = ["n1/p0.sqlite", "n1/p1.sqlite", "n2/p0.sqlite", "odd.sqlite"]
    seen = of(names, r"(?P<host>n\d)/p(?P<rank>\d+)")
    labels = ["rank 0 on n1", "rank 1 on n1", "rank 0 on n2", "odd.sqlite"]
    assert [rank.label for rank in seen.ranks] == labels
    assert seen.hosts() == {"n1": [0, 1], "n2": [2]}
    for expression in ("(", r"rank(\d+)"):
        with pytest.raises(UsageError, match="--rank-regex"):
            rank_pattern(expression)


def test_ranks_are_found_in_names_of_processes() -> None:
    both = report(
        finding(pid=1),
        finding(pid=2, identity="other"),
        processes=((1, "trainer:rank4"), (2, "trainer:rank5"), (3, "launcher")),
        spans={1: 7_000_000, 2: 9_000_000},
    )
    one = report(processes=((9, "worker rank 6"), (8, "rank7")), spans={8: 5_000_000})
    seen = fleet([("a.sqlite", both), ("b.sqlite", one)])
    assert [(r.label, r.pid) for r in seen.ranks] == [
        *(("rank 4", 1), ("rank 5", 2), ("rank 7", None))
    ]
    assert [r.span_ns for r in seen.ranks] == [7_000_000, 9_000_000, 10_000_000]
    assert sorted(group.ranks for group in seen.groups) == [(0,), (1,)]


# Findings over ranks ---------------------------------------------------------------


def many() -> Fleet:
    outcomes: list[tuple[str, Report | StreamlintError]] = []
    for number in range(10):
        seen = [finding(1_000_000 + number)] if number != 4 else []
        seen += [finding(5, Severity.INFO, identity="b")] if number == 7 else []
        span = 10_000_000 + (30_000_000 if number == 7 else number)
        made = report(*seen, span=span, unable=False)
        outcomes.append((f"rank{number}.sqlite", made))
    outcomes[8] = ("rank8.sqlite", report(unable=True, span=None))
    outcomes[9] = ("rank9.sqlite", TraceError("rank9.sqlite is cut off", hint="copy"))
    return fleet(outcomes)


def test_findings_are_grouped_by_fingerprint_over_assessed_ranks() -> None:
    seen = many()
    assert seen.unassessed == (8, 9)
    first, second = seen.groups
    assert first.ranks == (0, 1, 2, 3, 5, 6, 7)
    assert first.assessed == tuple(range(8))
    assert coverage(seen, first) == "on 7 of 8 ranks, not rank 4"
    assert coverage(seen, second) == "only rank 7, of 8 ranks"
    assert first.cost == (1_000_000, 1_000_003, 1_000_007, (0, 7), 7)
    assert cost(seen, first) == (
        "takes 1.00 ms in the median, 1.00 ms (rank 0) to 1.00 ms (rank 7)"
    )
    assert seen.slowest == (7,)
    assert seen.span is not None
    assert seen.span.most_ns == 40_000_000


def test_one_cost_of_a_rank_and_one_claim_of_a_group() -> None:
    two = report(finding(3_000_000), finding(2_000_000))
    other = report(finding(9_000, claim=Claim.UPPER_BOUND))
    free = report(finding(None, claim=Claim.NONE, identity="free"))
    seen = fleet(
        [("rank0.sqlite", two), ("rank1.sqlite", other), ("rank2.sqlite", free)]
    )
    costly, without = sorted(seen.groups, key=lambda group: group.costs == {})
    assert costly.costs == {0: 3_000_000}
    assert costly.ranks == (0, 1)
    assert cost(seen, costly) == "takes 3.00 ms (rank 0)"
    assert (without.cost, cost(seen, without)) == (None, "no time claimed")


def test_long_lists_of_ranks_are_ranges() -> None:
    outcomes: list[tuple[str, Report | StreamlintError]] = [
        (f"rank{n}.sqlite", report(*[finding()] * (n % 3 != 0))) for n in range(40)
    ]
    seen = fleet(outcomes)
    (group,) = seen.groups
    assert coverage(seen, group) == (
        "on 26 of 40 ranks: ranks 1-2, 4-5, 7-8, 10-11, 13-14, 16-17 and 14 more"
    )
    assert cost(seen, group) == "takes 1.00 ms on each"
    assert seen.slowest == ()


# Documents -------------------------------------------------------------------------


def lay_out(folder: Path, count: int) -> None:
    for number in range(count):
        name = ("legacy.sqlite", "legacy_fix.sqlite")[number == 1]
        shutil.copy(EXTRA / name, folder / f"node{number // 2}.rank{number}.sqlite")


def test_json_has_a_fleet(run: Run, tmp_path: Path) -> None:
    lay_out(tmp_path, 4)
    (tmp_path / "node1.rank3.sqlite").write_bytes(b"SQLite format 3\0")
    hosts = r"(?P<host>node\d+)\.rank(?P<rank>\d+)"
    done = run("lint", tmp_path, "--format", "json", "--rank-regex", hosts)
    assert done.code == 2
    whole: dict[str, Any] = json.loads(done.out)
    Draft202012Validator(schema()).validate(whole)
    assert [r["label"] for r in whole["fleet"]["ranks"]] == [
        *("rank 0 on node0", "rank 1 on node0", "rank 2 on node1", "rank 3 on node1")
    ]
    barrier = whole["fleet"]["findings"][0]
    assert barrier["rule"] == "legacy-null-stream-barrier"
    assert (barrier["ranks"], barrier["assessed"]) == ([0, 2], [0, 1, 2])
    assert barrier["fingerprint"] == whole["traces"][0]["findings"][0]["fingerprint"]
    assert whole["fleet"]["unassessed"] == [3]
    assert whole["fleet"]["slowest"] == []

    text = run("lint", tmp_path, "--rank-regex", hosts).out
    assert "host   node0: ranks 0-1; only there: underfilled-serial-kernels" in text
    assert "unable rank 3 on node1 (error)" in text
    alone = run("lint", EXTRA / "legacy.sqlite", "--format", "json")
    assert json.loads(alone.out)["fleet"] is None


def test_the_page_is_the_same_in_every_run() -> None:
    why = NotAssessed("not recorded", "record it")
    unable = [Judgement(rule, not_assessed=why) for rule in all_rules()]
    lost = report()._replace(judgements=tuple(unable))
    rules = document(fleet([("rank0.sqlite", lost), ("rank1.sqlite", lost)]))["rules"]
    assert len(rules) > 30
    assert rules == sorted(rules)


def test_the_page_holds_the_map_and_escapes_names(run: Run, tmp_path: Path) -> None:
    seen = document(many())
    row = seen["map"][seen["rules"].index(BARRIER.name)]
    assert [LEVELS[cell] for cell in row] == [
        *(["high"] * 4 + ["nothing"] + ["high"] * 3 + ["not assessed", "no result"])
    ]
    name = "</script><img src=x onerror=alert(1)>\x1b"
    hostile = report(finding(message=name))
    text = page(fleet([(f"{name}/rank0.sqlite", hostile), ("rank1.sqlite", hostile)]))
    assert "<img src=x" not in text
    assert "\x1b" not in text
    lay_out(tmp_path, 3)
    target = tmp_path / "fleet.html"
    assert run("lint", tmp_path, "--html", target).code == 1
    assert "legacy-null-stream-barrier" in target.read_text("utf-8")
    again = tmp_path / "report.html"
    assert run("report", tmp_path, "-o", again).code == 0
    assert again.read_text("utf-8") == target.read_text("utf-8")

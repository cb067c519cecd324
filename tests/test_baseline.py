"""Known findings stay quiet; what is new or has grown is reported and fails."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from commandline import Run
from jsonschema import Draft202012Validator
from second_run import another_run
from tracebuilder import TraceBuilder

from streamlint.baseline import Measure, grown, parse_tolerance
from streamlint.reporters.json import schema

SAMPLES = Path(__file__).parents[1] / "sample_traces"
BAD = SAMPLES / "legacy-null-stream-barrier" / "bad.sqlite"
FIXED = SAMPLES / "legacy-null-stream-barrier" / "fixed.sqlite"
MISC = SAMPLES / "extra" / "misc.sqlite"
UNASSESSABLE = SAMPLES / "extra" / "2022.4.2_no_cuda_rows.sqlite"
RULE = "legacy-null-stream-barrier"


def churn(
    path: Path, *, us: float = 100, rounds: int = 30, kernel_us: float = 1_000
) -> Path:
    """Pinned memory made and freed in every round, for so long."""
    b = TraceBuilder()
    b.stream(13)
    for i in range(rounds):
        at = 1000 + (kernel_us + us + 100) * i
        host = b.call("cudaHostAlloc", at, us)
        b.call("cudaFreeHost", at + us + 1, 20)
        b.kernel("step", stream=13, start=at + us + 50, end=at + us + 50 + kernel_us)
        b.backtrace(host, [("refill", "train.py", 12)])
    return b.write(path)


def document(run: Run, *args: str | Path) -> dict[str, Any]:
    done = run("lint", *args, "--format", "json")
    loaded: dict[str, Any] = json.loads(done.out)
    Draft202012Validator(schema()).validate(loaded)
    return loaded


def test_another_run_has_only_known_findings(run: Run, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    wrote = run("lint", MISC, "--write-baseline", known)
    findings = document(run, MISC)["traces"][0]["findings"]
    assert wrote.code == 0
    assert wrote.out == run("lint", MISC).out
    assert wrote.err == f"wrote {len(findings)} known findings to {known}\n"

    again = another_run(MISC, tmp_path / "again.sqlite")
    done = run("lint", again, "--baseline", known)
    assert (done.code, done.err) == (0, "")
    assert f"\n{len(findings)} known findings in the baseline\n" in done.out
    assert "0 new or grown findings" in done.out
    assert "resource-churn-in-loop" not in done.out
    found = document(run, again, "--baseline", known)
    standings = {f["baseline"] for f in found["traces"][0]["findings"]}
    assert standings == {"known"}
    assert found["baseline"] == {
        "path": str(known),
        "tolerance": 0.1,
        "known": len(findings),
        "new": 0,
        "grown": 0,
        "gone": [],
    }
    assert run("lint", again).code == 1


def test_a_new_finding_fails(run: Run, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    run("lint", FIXED, "--write-baseline", known)
    assert run("lint", FIXED, "--baseline", known).code == 0
    done = run("lint", BAD, "--baseline", known)
    assert done.code == 1
    assert f"  {RULE}\n" in done.out
    assert "1 new or grown finding (1 high)" in done.out
    assert run("lint", BAD, "--baseline", known, "--fail-on", "error").code == 0
    (finding,) = document(run, BAD, "--baseline", known)["traces"][0]["findings"]
    assert finding["baseline"] == "new"


def test_a_grown_finding_fails(run: Run, tmp_path: Path) -> None:
    known, before = tmp_path / "known.json", churn(tmp_path / "1.sqlite")
    worse = churn(tmp_path / "2.sqlite", us=200)
    run("lint", before, "--write-baseline", known)
    done = run("lint", worse, "--baseline", known)
    assert done.code == 1
    assert "  resource-churn-in-loop (grown: " in done.out
    assert " in the baseline)\n" in done.out
    wide = ("--baseline", known, "--baseline-tolerance")
    assert run("lint", worse, *wide, "200%").code == 0
    assert run("lint", worse, *wide, "1.9").code == 0
    marks = [
        f["baseline"]
        for f in document(run, worse, "--baseline", known)["traces"][0]["findings"]
        if f["rule"] == "resource-churn-in-loop"
    ]
    assert marks == ["grown"]
    (result,) = [
        r
        for r in json.loads(
            run("lint", worse, "--baseline", known, "--format", "sarif").out
        )["runs"][0]["results"]
        if r["ruleId"] == "resource-churn-in-loop"
    ]
    assert result["baselineState"] == "updated"


def test_the_tolerance_can_be_configured(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before, worse = churn(Path("1.sqlite")), churn(Path("2.sqlite"), us=200)
    run("lint", before, "--write-baseline", "known.json")
    args = ("lint", worse, "--baseline", "known.json")
    assert run(*args).code == run("diff", before, worse).code == 1
    Path("streamlint.toml").write_text('baseline-tolerance = "200 %"')
    assert run(*args).code == run("diff", before, worse).code == 0
    assert 'baseline-tolerance = "200%"  # streamlint.toml' in run("config", "show").out
    assert run(*args, "--baseline-tolerance", "10%").code == 1
    assert run("diff", before, worse, "--tolerance", "0.1").code == 1
    for bad in ('"much"', "-1", "true", "[]"):
        Path("streamlint.toml").write_text(f"baseline-tolerance = {bad}")
        done = run(*args)
        assert done.code == 2
        assert "baseline-tolerance can't be " in done.err


def test_what_falls_below_min_saving_is_neither_gone_nor_unchanged(
    run: Run, tmp_path: Path
) -> None:
    known = tmp_path / "known.json"
    run("lint", BAD, "--write-baseline", known)
    done = run("lint", BAD, "--baseline", known, "--min-saving", "1s")
    assert (done.code, done.err) == (0, "")
    assert "1 below min-saving" in done.out


def test_a_longer_recording_grows_nothing(run: Run, tmp_path: Path) -> None:
    known, short = tmp_path / "known.json", churn(tmp_path / "1.sqlite", rounds=30)
    run("lint", short, "--write-baseline", known)
    longer = churn(tmp_path / "2.sqlite", rounds=90)
    done = run("lint", longer, "--baseline", known)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("form", ["github", "markdown", "junit", "text"])
def test_reports_leave_known_findings_out(run: Run, tmp_path: Path, form: str) -> None:
    known = tmp_path / "known.json"
    run("lint", BAD, "--write-baseline", known)
    assert RULE in run("lint", BAD, f"--format={form}").out
    out = run("lint", BAD, "--baseline", known, f"--format={form}").out
    if form == "junit":
        assert 'failures="0"' in out
    else:
        assert RULE not in out


def test_what_is_gone_is_told_and_dropped(run: Run, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    run("lint", BAD, "--write-baseline", known)
    done = run("lint", FIXED, "--baseline", known)
    assert done.code == 0
    assert done.err == (
        "note: 1 baseline entry is no longer found: rewrite it with "
        f"--write-baseline {known}\n"
    )
    gone = document(run, FIXED, "--baseline", known)["baseline"]["gone"]
    assert [entry["rule"] for entry in gone] == [RULE]
    run("lint", FIXED, "--baseline", known, "--write-baseline", known)
    assert json.loads(known.read_text())["findings"] == []


@pytest.mark.parametrize(
    "args",
    [
        pytest.param([UNASSESSABLE], id="not assessed"),
        pytest.param([FIXED, "--ignore", RULE], id="not selected"),
        pytest.param([FIXED, UNASSESSABLE], id="assessed in one of two"),
    ],
)
def test_what_was_not_judged_is_not_gone(
    run: Run, tmp_path: Path, args: list[str | Path]
) -> None:
    """Its entry stays, and stays in a baseline that is written anew."""
    known = tmp_path / "known.json"
    run("lint", BAD, "--write-baseline", known)
    before = known.read_text()
    done = run("lint", *args, "--baseline", known, "--write-baseline", known)
    assert "no longer found" not in done.err
    assert known.read_text() == before


def test_what_a_trace_that_was_not_read_may_show_is_not_gone(
    run: Run, tmp_path: Path
) -> None:
    known = tmp_path / "known.json"
    run("lint", BAD, "--write-baseline", known)
    done = run("lint", FIXED, "no.sqlite", "--baseline", known)
    assert done.code == 2
    assert "no longer found" not in done.err
    found = document(run, FIXED, "no.sqlite", "--baseline", known)
    assert found["baseline"]["gone"] == []


def test_the_file_is_made_for_version_control(run: Run, tmp_path: Path) -> None:
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    run("lint", MISC, BAD, "--write-baseline", one)
    run("lint", BAD, MISC, "--write-baseline", two)
    text = one.read_text(encoding="utf-8")
    assert text == two.read_text(encoding="utf-8")
    lines = text.splitlines()[3:-2]
    entries = [json.loads(line.rstrip(",")) for line in lines]
    assert json.loads(text) == {"streamlint_baseline": 1, "findings": entries}
    assert entries == sorted(entries, key=lambda e: (e["rule"], e["label"]))
    (barrier,) = [e for e in entries if e["rule"] == RULE]
    assert barrier["label"] == "barrier, DtoH, memset, spin"
    assert barrier["ns"] == 6_097_183
    assert barrier["occurrences"] == 117


def test_processes_that_share_a_finding_share_an_entry(
    run: Run, tmp_path: Path
) -> None:
    known = tmp_path / "known.json"
    ranks = SAMPLES / "extra" / "two_procs_one_gpu.sqlite"
    run("lint", ranks, "--write-baseline", known)
    entries = json.loads(known.read_text())["findings"]
    assert len({e["fingerprint"] for e in entries}) == len(entries)
    found = document(run, ranks)["traces"][0]["findings"]
    assert len(found) > len(entries)
    (shared,) = [e for e in entries if e["rule"] == "threads-share-legacy-stream"]
    costs = [f["cost"]["ns"] for f in found if f["rule"] == shared["rule"]]
    assert shared["ns"] == max(costs)
    assert run("lint", ranks, "--baseline", known).code == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a baseline"),
        ('{"format": 1}', "not a baseline"),
        (
            '{"streamlint_baseline": 2, "findings": []}',
            "format 2, this version reads 1",
        ),
        ('{"streamlint_baseline": 1}', "no list of findings"),
        ('{"streamlint_baseline": 1, "findings": [{}]}', "finding 1 is not one"),
        (
            '{"streamlint_baseline": 1, "findings": [{"rule": "r", "label": "", '
            '"fingerprint": "f", "claim": "direct", "ns": "1", "share": null, '
            '"occurrences": 1}]}',
            "finding 1 is not one",
        ),
    ],
)
def test_a_bad_baseline_is_told(
    run: Run, tmp_path: Path, text: str | None, why: str
) -> None:
    known = tmp_path / "known.json"
    if text is not None:
        known.write_text(text)
    done = run("lint", BAD, "--baseline", known)
    assert (done.code, done.out) == (2, "")
    error, hint = done.err.splitlines()
    assert error == f"error: {known} can't be read as a baseline ({why})" or (
        text is None and why in error
    )
    assert hint == f"hint: write one: streamlint lint TRACE --write-baseline {known}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--baseline-tolerance", "1"], "without --baseline"),
        (["--baseline=k", "--baseline-tolerance=much"], "is no share"),
        (["--baseline=k", "--baseline-tolerance=-5%"], "is no share"),
        (["--write-baseline", "t.sqlite"], "names a trace"),
    ],
)
def test_bad_options_are_told(run: Run, args: list[str], message: str) -> None:
    done = run("lint", BAD, *args)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def test_no_baseline_of_a_run_with_errors(run: Run, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    done = run("lint", BAD, "no.sqlite", "--write-baseline", known)
    assert done.code == 2
    assert "is not written: a baseline needs all traces and rules" in done.err
    assert not known.exists()


def test_nothing_assessed_is_still_no_success(run: Run, tmp_path: Path) -> None:
    known = tmp_path / "known.json"
    assert run("lint", UNASSESSABLE, "--write-baseline", known).code == 3
    assert run("lint", UNASSESSABLE, "--baseline", known).code == 3


MS = 1_000_000


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param((10, 100, 5), (10.9, 100.9, 5), False, id="within the tolerance"),
        pytest.param((10, 100, 5), (12, 102, 5), True, id="above it"),
        pytest.param((10, 100, 5), (20, 200, 9), False, id="a longer recording"),
        pytest.param((90, 100, 5), (180, 190, 5), True, id="most of the run"),
        pytest.param((0.1, 100, 5), (0.9, 100.8, 5), False, id="below 1 % of the run"),
        pytest.param((0.01, 0.1, 5), (0.04, 0.13, 5), False, id="below 50 us"),
        pytest.param((10, 100, 5), (5, 95, 50), False, id="more calls that cost less"),
        pytest.param((100, 100, 5), (200, 200, 5), True, id="all of the run"),
    ],
)
def test_growth_is_more_than_noise(
    before: tuple[float, float, int], after: tuple[float, float, int], expected: bool
) -> None:
    """Pairs of cost and judged time in ms, and the occurrences."""

    def measured(ms: float, judged_ms: float, occurrences: int) -> Measure:
        return Measure("what-if", round(ms * MS), ms / judged_ms, occurrences)

    assert grown(measured(*before), measured(*after), 0.1) is expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (Measure("none", None, None, 20), Measure("none", None, None, 22), False),
        (Measure("none", None, None, 20), Measure("none", None, None, 23), True),
        (Measure("none", None, None, 1), Measure("none", None, None, 2), True),
        # Costs of two kinds can't be compared.
        (Measure("direct", MS, 0.1, 5), Measure("what-if", 9 * MS, 0.9, 5), False),
        (Measure("direct", MS, 0.1, 5), Measure("none", None, None, 6), True),
    ],
)
def test_without_comparable_costs_occurrences_count(
    before: Measure, after: Measure, expected: bool
) -> None:
    assert grown(before, after, 0.1) is expected


def test_tolerances_are_shares() -> None:
    assert [parse_tolerance(t) for t in ("10%", "0.1", " 10 % ", "0")] == [0.1] * 3 + [
        0
    ]
    for text in ("", "x", "-1%", "nan", "inf", "10 % more"):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_tolerance(text)
    assert math.isclose(parse_tolerance("250%"), 2.5)

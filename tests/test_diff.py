"""`streamlint diff`: what became of findings, and of the time of the GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commandline import Run
from jsonschema import Draft202012Validator
from second_run import another_run

from streamlint.reporters.diff import schema
from streamlint.reporters.markdown import MAX_CHARACTERS

SAMPLES = Path(__file__).parents[1] / "sample_traces"
BAD = SAMPLES / "legacy-null-stream-barrier" / "bad.sqlite"
FIXED = SAMPLES / "legacy-null-stream-barrier" / "fixed.sqlite"
MISC = SAMPLES / "extra" / "misc.sqlite"
UNASSESSABLE = SAMPLES / "extra" / "2022.4.2_no_cuda_rows.sqlite"
RULE = "legacy-null-stream-barrier"


def document(run: Run, *args: str | Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(run("diff", *args, "--format", "json").out)
    Draft202012Validator(schema()).validate(loaded)
    return loaded


def changes(found: dict[str, Any]) -> dict[str, list[str]]:
    listed: dict[str, list[str]] = {}
    for finding in found["findings"]:
        listed.setdefault(finding["change"], []).append(finding["rule"])
    counts = {kind: count for kind, count in found["summary"].items() if count}
    assert counts == {kind: len(rules) for kind, rules in listed.items()}
    return listed


def test_a_fixed_program_has_lost_its_finding(run: Run) -> None:
    done = run("diff", BAD, FIXED)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "bad.sqlite -> fixed.sqlite"
    rows = [" ".join(line.split()) for line in lines]
    assert "GPU span 38.3 ms 24.4 ms -13.9 ms (-36.2 %)" in rows
    assert "NVIDIA H200: busy 75.3 % 68.9 % -6.4 points" in rows
    assert "gone (1)" in lines
    assert f"  {RULE} (high)" in lines
    assert lines[-1] == "0 new, 0 grown, 0 shrunk, 1 gone, 0 unchanged"


def test_a_broken_program_fails(run: Run) -> None:
    assert run("diff", FIXED, BAD).code == 1
    assert run("diff", FIXED, BAD, "--fail-on", "error").code == 0
    assert run("diff", FIXED, BAD, "--exit-zero").code == 0
    found = document(run, FIXED, BAD)
    assert changes(found) == {"new": [RULE]}
    (finding,) = found["findings"]
    assert finding["before"] is None
    assert finding["after"]["ns"] == 6_097_183


def test_times_are_those_of_the_traces(run: Run) -> None:
    found = document(run, BAD, FIXED)
    for name, path in (("before", BAD), ("after", FIXED)):
        (trace,) = json.loads(run("lint", path, "--format", "json").out)["traces"]
        side = found[name]
        assert side["span_ns"] == trace["span_ns"]
        (device,) = side["devices"]
        assert device["busy_ns"] + device["idle_ns"] == side["span_ns"]
        assert max(device["kernels_ns"], device["copies_ns"]) <= device["busy_ns"]
        assert device["busy_ns"] <= device["kernels_ns"] + device["copies_ns"]
        assert device["busy_share"] == round(device["busy_ns"] / side["span_ns"], 6)


def test_another_run_has_changed_nothing(run: Run, tmp_path: Path) -> None:
    again = another_run(MISC, tmp_path / "again.sqlite")
    found = document(run, MISC, again)
    assert set(changes(found)) == {"same"}
    assert found["before"]["devices"] == found["after"]["devices"]


def test_results_serve_as_well_as_traces(run: Run, tmp_path: Path) -> None:
    stored = tmp_path / "before.json"
    run("lint", MISC, "--format", "json", "--output", stored)
    traces, results = document(run, MISC, BAD), document(run, stored, BAD)
    assert results == traces
    assert changes(results)["new"] == [RULE]


def edited(run: Run, path: Path, **edits: Any) -> Path:
    """A stored result of `BAD`, its trace and its one finding edited."""
    result = json.loads(run("lint", BAD, "--format", "json").out)
    (trace,) = result["traces"]
    (finding,) = trace["findings"]
    for key, value in edits.items():
        part = trace if key in trace else finding["cost"]
        part[key] = value
    path.write_text(json.dumps(result))
    return path


@pytest.mark.parametrize(
    ("ns", "share", "there", "back"),
    [
        (12_000_000, 0.6, "grown", "shrunk"),
        (6_500_000, 0.45, "same", "same"),
        (12_000_000, 0.429, "same", "same"),  # the recording is longer
    ],
)
def test_costs_grow_and_shrink(
    run: Run, tmp_path: Path, ns: int, share: float, there: str, back: str
) -> None:
    other = edited(run, tmp_path / "other.json", ns=ns, share=share)
    assert changes(document(run, BAD, other)) == {there: [RULE]}
    assert changes(document(run, other, BAD)) == {back: [RULE]}
    assert run("diff", BAD, other).code == int(there == "grown")
    assert run("diff", BAD, other, "--tolerance", "200%").code == 0
    if there == "grown":
        text = run("diff", BAD, other).out
        assert "at most 6.10 ms (42.9 %) before, now at most 12.0 ms (60.0 %)" in text


def test_what_can_not_be_told_any_more_is_not_gone(run: Run, tmp_path: Path) -> None:
    untold = {"rule": RULE, "reason": "streams are unknown", "recapture": "all"}
    after = edited(run, tmp_path / "a.json", findings=[], not_assessed=[untold])
    found = document(run, BAD, after)
    assert changes(found) == {"untold": [RULE]}
    assert found["findings"][0]["note"] == "streams are unknown"
    text = run("diff", BAD, after)
    assert text.code == 0
    assert "can't be told any more (1)" in text.out
    assert "streams are unknown" in text.out

    rules = ["pageable-async-copy"]
    ignored = edited(run, tmp_path / "i.json", findings=[], rules=rules)
    (finding,) = document(run, BAD, ignored)["findings"]
    assert (finding["change"], finding["note"]) == ("untold", "not selected")

    (new,) = document(run, after, BAD)["findings"]
    assert (new["change"], new["note"]) == ("new", "not assessed before")


def test_what_is_suppressed_now_is_not_gone(run: Run, tmp_path: Path) -> None:
    (finding,) = json.loads(run("lint", BAD, "--format", "json").out)["traces"][0][
        "findings"
    ]
    allowed = {"reason": "by design", "origin": "a file", "finding": finding}
    after = edited(run, tmp_path / "a.json", findings=[], suppressed=[allowed])
    (found,) = document(run, BAD, after)["findings"]
    assert (found["change"], found["note"]) == ("suppressed", "by design")
    assert "suppressed now (1)" in run("diff", BAD, after).out
    (found,) = document(run, after, BAD)["findings"]
    assert (found["change"], found["note"]) == ("new", "suppressed before")


def test_nothing_to_compare_is_no_success(run: Run) -> None:
    assert run("diff", BAD, UNASSESSABLE).code == 3
    assert run("diff", UNASSESSABLE, UNASSESSABLE).code == 3
    assert run("diff", UNASSESSABLE, BAD).code == 1


def test_markdown_is_a_comment(run: Run, tmp_path: Path) -> None:
    done = run("diff", FIXED, BAD, "--format", "markdown", "-o", tmp_path / "c.md")
    assert (done.code, done.out) == (1, "")
    text = (tmp_path / "c.md").read_text(encoding="utf-8")
    assert text.startswith("<!-- streamlint diff -->\n### streamlint: 1 new, 0 grown")
    assert "| GPU span | 24.4 ms | 38.3 ms | +13.9 ms (+56.8 %) |" in text
    assert f"| new | high | {RULE} | work on the legacy default stream" in text


def test_names_give_markdown_no_markup(run: Run, tmp_path: Path) -> None:
    result = json.loads(run("lint", BAD, "--format", "json").out)
    (finding,) = result["traces"][0]["findings"]
    finding["message"] = "<img src=x> | `a` @user"
    many = [dict(finding, fingerprint=f"{i:016x}") for i in range(900)]
    result["traces"][0]["findings"] = many
    (tmp_path / "r.json").write_text(json.dumps(result))
    text = run("diff", FIXED, tmp_path / "r.json", "--format", "markdown").out
    assert "<img" not in text
    assert "@user" not in text
    assert len(text) <= MAX_CHARACTERS
    assert " more.\n" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "broken JSON"),
        ("{" + '"a":[' * 100_000, "broken JSON"),
        ("{}", "other JSON"),
        ('{"format": 9, "traces": []}', "format 9, this version reads 1"),
        ('{"format": 1, "traces": []}', "a result of 0 traces"),
        ('{"format": 1, "traces": [{}]}', "no result of streamlint"),
        ('{"format": 1, "traces": [3]}', "no result of streamlint"),
        ("[1]", "is not"),
    ],
)
def test_a_bad_result_is_told(
    run: Run, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    done = run("diff", BAD, path)
    assert (done.code, done.out) == (2, "")
    error, hint = done.err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    "args",
    [
        (BAD, "no.sqlite"),
        (BAD,),
        (BAD, FIXED, "--tolerance", "much"),
        (BAD, FIXED, "-o", "x.sqlite"),
    ],
)
def test_bad_usage_is_told(run: Run, args: tuple[str | Path, ...]) -> None:
    done = run("diff", *args)
    assert (done.code, done.out) == (2, "")
    assert done.err

"""Findings that are allowed with a reason: hidden where all of them is, never more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from commandline import Run, process
from tracebuilder import TraceBuilder

from streamlint.reporters.json import schema

RULE = "device-sync-in-steady-state"
LINES = {"sample": 120, "sync_tokens": 208, "swap_blocks": 77}
FILE = "/workspace/vllm/src/engine.py"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def serving(
    *functions: str,
    stacks: bool = True,
    allow: dict[str, str] | None = None,
    iterations: int = 6,
    tid: int = 101,
) -> TraceBuilder:
    """Decoding steps in which each of these functions waits for the whole device.

    ``allow`` has texts of NVTX ranges to put around the waits of a function.
    """
    b = TraceBuilder(tid=tid)
    b.stream(13)
    b.stream(14)
    now = 1000.0
    for step in range(iterations):
        begun = now
        for function in functions:
            b.kernel(
                f"{function}_kernel", stream=13, start=now + 6, end=now + 106,
                issue=(now, now + 4),
            )  # fmt: skip
            b.kernel(
                "gather", stream=14, start=now + 9, end=now + 100,
                issue=(now + 5, now + 8),
            )  # fmt: skip
            waited = (now + 10, now + 110)
            if allow and function in allow:
                b.nvtx(allow[function], waited[0] - 1, waited[1] + 1)
            b.nvtx(f"{function} part", now - 0.2, now + 169)
            call = b.device_sync(*waited)
            if stacks:
                b.backtrace(call, [(function, FILE, LINES[function])])
            now += 170
        b.nvtx(f"step {step}", begun - 0.5, now - 0.5)
    return b


def allow(*entries: str, settings: str = "") -> None:
    tables = "".join(f'[[allow]]\nrule = "{RULE}"\n{entry}\n' for entry in entries)
    Path("streamlint.toml").write_text(f"{settings}\n{tables}", "utf-8")


def judged(run: Run, *args: str | Path) -> dict[str, Any]:
    """The only trace of a JSON report that keeps to its schema."""
    document = json.loads(run("lint", *args, "--format=json", f"--select={RULE}").out)
    jsonschema.validate(document, schema())
    (trace,) = document["traces"]
    assert isinstance(trace, dict)
    summary = document["summary"]
    assert summary["suppressed"] == len(trace["suppressed"])
    assert sum(summary["findings"].values()) == len(trace["findings"])
    return trace


def lines(findings: Sequence[dict[str, Any]]) -> set[int]:
    found = [finding.get("finding", finding) for finding in findings]
    return {s["line"] for f in found for s in f["where"]["source"]}


# The story of a project that knows two of its waits ---------------------------------


def test_ci_fails_on_a_third_wait_when_two_are_allowed(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(
        '[tool.streamlint]\nselect = ["sync"]\n'
        '[tool.streamlint.path-map]\n"/workspace/vllm" = "."\n'
        "[[tool.streamlint.allow]]\n"
        f'rule = "{RULE}"\nsource = "src/engine.py:120"\n'
        'reason = "the sampler needs its logits on the host"\nuntil = 9999-12-31\n'
        "[[tool.streamlint.allow]]\n"
        f'rule = "{RULE}"\nsource = "src/engine.py:200-210"\n'
        'reason = "detokenizer, tracked in #421"\n'
    )
    serving("sample", "sync_tokens").write(folder / "main.sqlite")
    serving("sample", "sync_tokens", "swap_blocks").write(folder / "pr.sqlite")

    done = process("lint", "main.sqlite", cwd=folder)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1].startswith("0 findings; 2 suppressed; ")

    comment = ("--output", "markdown=comment.md")
    done = process("lint", "pr.sqlite", *comment, cwd=folder)
    assert done.code == 1
    assert "src/engine.py:77 swap_blocks" in done.out
    assert "src/engine.py:120" not in done.out
    assert "1 finding (1 high); 2 suppressed; " in done.out.splitlines()[-1]
    text = (folder / "comment.md").read_text("utf-8")
    assert "<code>src/engine.py:77</code>" in text
    assert "engine.py:120" not in text
    assert "1 finding (1 high); 2 suppressed" in text

    done = process("lint", "pr.sqlite", "--show-suppressed", cwd=folder)
    assert done.code == 1
    shown = done.out.splitlines()
    at = shown.index("suppressed (2)")
    text = "\n".join(shown[at:])
    assert "    source src/engine.py:120 sample" in text
    assert "    reason the sampler needs its logits on the host" in text
    assert "    by     pyproject.toml, allow 1" in text
    assert "    reason detokenizer, tracked in #421" in text
    assert "engine.py:77" not in text

    done = process("lint", "pr.sqlite", "--isolated", "--select=sync", cwd=folder)
    assert "3 findings (" in done.out


def test_suppressed_findings_are_data_with_their_reason(run: Run, folder: Path) -> None:
    path = serving("sample", "swap_blocks").write(folder / "t.sqlite")
    allow('source = "engine.py:77"\nreason = "swapping must be done"')
    trace = judged(run, path)
    (hidden,), (left,) = trace["suppressed"], trace["findings"]
    assert hidden["reason"] == "swapping must be done"
    assert hidden["origin"] == "streamlint.toml, allow 1"
    assert (lines([hidden]), lines([left])) == ({77}, {120})
    assert trace["allowances"] == [
        {
            "rule": RULE,
            "reason": "swapping must be done",
            "origin": "streamlint.toml, allow 1",
            "until": None,
            "state": "matched",
            "findings": 1,
        }
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace with two findings, at lines 77 and 120."""
    b = serving("sample", "swap_blocks")
    b.thread("main loop")
    return b.write(tmp_path_factory.mktemp("served") / "t.sqlite")


# Matchers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("matcher", "hidden"),
    [
        ("", {77, 120}),
        ('source = "engine.py"', {77, 120}),
        ('source = "src/eng*.py"', {77, 120}),
        ('source = "/workspace/vllm/src/engine.py:120"', {120}),
        ('source = "*/src/engine.py:1-120"', {77, 120}),
        ('source = ["other.py", "engine.py:77"]', {77}),
        ('source = "ngine.py"', set()),
        ('source = "src/engine.py:121"', set()),
        ('nvtx = "step *"', {77, 120}),
        ('nvtx = "sample part"', {120}),
        ('nvtx = "s[aw]*part"', {77, 120}),
        ('nvtx = "step 3"', set()),  # not all of its places
        ("thread = 101", {77, 120}),
        ('thread = "main*"', {77, 120}),
        ('thread = "1"', set()),
        ('kernel = "*"', {77, 120}),
        ('kernel = ["*_kernel", "gather"]', {77, 120}),
        ('kernel = "gather"', set()),  # not all of its kernels
        ("stream = [13, 14]", {77, 120}),
        ('stream = "1?"', {77, 120}),
        ("stream = 13", set()),
        ('nvtx = "sample part"\nsource = "engine.py:77"', set()),
        ('nvtx = "sample part"\nsource = "engine.py:120"\nstream = "*"', {120}),
    ],
)
def test_an_entry_hides_a_finding_all_of_whose_places_fit(
    run: Run, served: Path, matcher: str, hidden: set[int]
) -> None:
    allow(f'{matcher}\nreason = "known"')
    trace = judged(run, served)
    assert lines(trace["suppressed"]) == hidden
    assert lines(trace["findings"]) == {77, 120} - hidden


def test_a_finding_of_two_places_is_not_hidden_by_one(run: Run, folder: Path) -> None:
    path = serving("sample", "swap_blocks", stacks=False).write(folder / "t.sqlite")
    allow('nvtx = "sample part"\nreason = "known"')
    trace = judged(run, path)
    assert (len(trace["findings"]), trace["suppressed"]) == (1, [])
    allow('nvtx = ["sample part", "swap_blocks part"]\nreason = "known"')
    trace = judged(run, path)
    assert (trace["findings"], len(trace["suppressed"])) == ([], 1)


def test_more_places_than_a_report_names_all_have_to_fit(
    run: Run, folder: Path
) -> None:
    b = serving("sample", iterations=12, stacks=False)
    path = b.write(folder / "t.sqlite")
    assert len(judged(run, path)["findings"][0]["where"]["nvtx"]) <= 3
    allow('nvtx = ["step ?"]\nreason = "known"')  # steps 10 and 11 don't fit
    assert judged(run, path)["suppressed"] == []
    allow('nvtx = ["step ?", "step 1?"]\nreason = "known"')
    assert len(judged(run, path)["suppressed"]) == 1


def test_a_call_without_a_known_place_is_not_allowed_by_source(
    run: Run, folder: Path
) -> None:
    path = serving("sample", stacks=False).write(folder / "t.sqlite")
    allow('source = "*"\nreason = "known"')
    assert judged(run, path)["suppressed"] == []


# What the program itself allows ------------------------------------------------------


def test_a_range_of_the_program_allows_what_lies_within(run: Run, folder: Path) -> None:
    ranges = {"sample": f"streamlint: allow={RULE} logits go to the host"}
    b = serving("sample", "swap_blocks", allow=ranges)
    trace = judged(run, b.write(folder / "t.sqlite"))
    assert lines(trace["findings"]) == {77}
    (hidden,) = trace["suppressed"]
    assert hidden["reason"] == "logits go to the host"
    assert hidden["origin"] == f"NVTX range {ranges['sample']}"
    assert not any("streamlint" in name for name in hidden["finding"]["where"]["nvtx"])
    assert run("lint", folder / "t.sqlite", f"--select={RULE}").code == 1


def test_a_range_allows_no_wait_outside_it(run: Run, folder: Path) -> None:
    text = f"streamlint: allow={RULE} known"
    merged = serving("sample", "swap_blocks", stacks=False, allow={"sample": text})
    assert judged(run, merged.write(folder / "merged.sqlite"))["suppressed"] == []
    both = serving(
        *("sample", "swap_blocks"),
        stacks=False,
        allow={"sample": text, "swap_blocks": f"streamlint: allow={RULE} swapping"},
    )
    (hidden,) = judged(run, both.write(folder / "both.sqlite"))["suppressed"]
    assert hidden["reason"] == "known; swapping"


def test_a_range_on_another_thread_or_for_another_rule_allows_nothing(
    run: Run, folder: Path
) -> None:
    b = serving("sample", allow={"sample": "streamlint: allow=busy-poll known"})
    with b.at(tid=102):
        b.nvtx(f"streamlint: allow={RULE} elsewhere", 0, 1e6)
    trace = judged(run, b.write(folder / "t.sqlite"))
    assert (len(trace["findings"]), trace["suppressed"]) == (1, [])


def test_a_range_that_cuts_a_wait_off_does_not_allow_it(run: Run, folder: Path) -> None:
    b = serving("sample")
    for step in range(6):
        begun = 1000 + 170 * step
        b.nvtx(f"streamlint: allow={RULE} early", begun, begun + 50)
        b.nvtx(f"streamlint: allow={RULE} late", begun + 50, begun + 160)
    assert judged(run, b.write(folder / "t.sqlite"))["suppressed"] == []


def test_ranges_that_allow_are_no_iterations(run: Run, folder: Path) -> None:
    plain = serving("sample").write(folder / "plain.sqlite")
    b = serving("sample", allow={"sample": f"streamlint: allow={RULE} known"})
    marked = b.write(folder / "marked.sqlite")
    assert (
        judged(run, plain)["capture"]["judged"]
        == judged(run, marked)["capture"]["judged"]
    )


# What is reported about entries ------------------------------------------------------


def test_entries_that_match_nothing_are_reported(run: Run, folder: Path) -> None:
    path = serving("sample").write(folder / "t.sqlite")
    allow('source = "gone.py"\nreason = "known"', 'source = "engine.py"\nreason = "k"')
    done = run("lint", path, f"--select={RULE}")
    assert done.code == 0
    assert done.err.splitlines() == [
        f"warning: streamlint.toml, allow 1 ({RULE}) matches no finding: "
        "remove it if that is fixed"
    ]
    assert [use["state"] for use in judged(run, path)["allowances"]] == [
        *("unmatched", "matched")
    ]
    # Of a rule that wasn't asked, nothing is known.
    assert run("lint", path, "--select=busy-poll").err == ""


def test_an_entry_needs_to_match_in_one_of_several_traces(
    run: Run, folder: Path
) -> None:
    one = serving("sample").write(folder / "one.sqlite")
    two = serving("swap_blocks").write(folder / "two.sqlite")
    allow(
        'source = "engine.py:120"\nreason = "k"', 'source = "engine.py:77"\nreason="k"'
    )
    done = run("lint", one, two, f"--select={RULE}")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "2 traces: 0 findings; 2 suppressed"


def test_an_entry_of_a_rule_that_cannot_tell_is_not_called_stale(
    run: Run, folder: Path
) -> None:
    allow('reason = "known"')
    b = TraceBuilder()
    b.call("cudaMalloc", 10)
    path = b.write(folder / "t.sqlite")
    assert [use["state"] for use in judged(run, path)["allowances"]] == ["not judged"]
    done = run("lint", path)
    assert (done.code, done.err) == (3, "")


def test_an_expired_entry_hides_nothing_and_is_reported(run: Run, folder: Path) -> None:
    path = serving("sample").write(folder / "t.sqlite")
    allow('reason = "until the rewrite"\nuntil = 2020-02-29')
    done = run("lint", path, f"--select={RULE}")
    assert done.code == 1
    assert done.err.splitlines() == [
        f"warning: streamlint.toml, allow 1 ({RULE}) expired on 2020-02-29: "
        "it allows nothing"
    ]
    (use,) = judged(run, path)["allowances"]
    assert (use["state"], use["until"]) == ("expired", "2020-02-29")
    allow('reason = "until the rewrite"\nuntil = "9999-12-31"')
    done = run("lint", path, f"--select={RULE}")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"streamlint: allow={RULE}", "gives no reason"),
        ("streamlint: allow=device-sync it is fine", "names no rule: device-sync"),
        ("streamlint: allow", "names no rule: nothing"),
    ],
)
def test_a_range_that_is_wrong_allows_nothing_and_is_reported(
    run: Run, folder: Path, text: str, problem: str
) -> None:
    path = serving("sample", allow={"sample": text}).write(folder / "t.sqlite")
    done = run("lint", path, f"--select={RULE}")
    assert done.code == 1
    assert done.err.splitlines() == [
        f"warning: NVTX range {text} {problem}: it allows nothing"
    ]
    (use,) = judged(run, path)["allowances"]
    assert use["state"] == "invalid"


def test_text_of_a_range_cannot_reach_the_terminal_raw(run: Run, folder: Path) -> None:
    text = f"streamlint: allow={RULE} because\x1b[31m\nof \u202e that"
    path = serving("sample", allow={"sample": text}).write(folder / "t.sqlite")
    done = run("lint", path, "--show-suppressed", f"--select={RULE}")
    assert done.code == 0
    assert "reason because" in done.out
    assert not {"\x1b", "\u202e"} & set(done.out + done.err)


def test_an_allowed_finding_is_not_counted_as_below_the_least_saving(
    run: Run, folder: Path
) -> None:
    path = serving("sample", "swap_blocks").write(folder / "t.sqlite")
    allow('source = "engine.py:77"\nreason = "known"', settings='min-saving = "1s"')
    last = run("lint", path, f"--select={RULE}").out.splitlines()[-1]
    assert last.startswith("0 findings; 1 suppressed; 1 below min-saving")


@pytest.mark.parametrize(
    ("entry", "message", "hint"),
    [
        ('source = "a.py"', "allow 1 has no reason", "name the rule and say why"),
        ('reason = " "', 'allow 1: reason can\'t be " "', "it is why the finding"),
        (
            'reason = "x"\nkernels = "a"',
            "there is no key allow 1: kernels",
            "did you mean kernel?",
        ),
        ('reason = "x"\nkernel = []', "allow 1: kernel can't be a list", "it is a "),
        ('reason = "x"\nstream = 1.5', "allow 1: stream can't be 1.5", "it is a glob"),
        (
            'reason = "x"\nuntil = "soon"',
            'allow 1: until can\'t be "soon"',
            "it is the last day on which it holds, such as 2027-01-31",
        ),
        ('reason = "x"\nuntil = 2027', "allow 1: until can't be 2027", "it is the la"),
    ],
)
def test_a_wrong_entry_is_an_error(
    run: Run, served: Path, entry: str, message: str, hint: str
) -> None:
    allow(entry)
    done = run("lint", served)
    assert (done.code, done.out) == (2, "")
    error, advice = done.err.splitlines()
    assert error.startswith(f"error: streamlint.toml: {message}")
    assert advice.startswith(f"hint: {hint}")


def test_an_entry_for_an_unknown_rule_is_an_error(run: Run) -> None:
    text = '[[allow]]\nrule = "device-sync-in-steady"\nreason = "x"\n'
    Path("streamlint.toml").write_text(text)
    done = run("config", "show")
    assert done.code == 2
    assert done.err.splitlines() == [
        "error: streamlint.toml: allow 1: rule names no rule: device-sync-in-steady",
        f"hint: did you mean {RULE}?",
    ]


def test_config_show_shows_entries(run: Run) -> None:
    allow('source = "a.py:3"\nstream = 7\nreason = "q\\"x"\nuntil = 2027-01-31')
    out = run("config", "show").out
    assert out.endswith(
        f'[[allow]]  # streamlint.toml\nrule = "{RULE}"\nreason = "q\\U00000022x"\n'
        'until = 2027-01-31\nstream = ["7"]\nsource = ["a.py:3"]\n'
    )
    Path("shown.toml").write_text(out)
    again = run("config", "show", "--config", "shown.toml").out
    assert (
        again.replace("shown.toml", "streamlint.toml").split("[[allow]]")[1]
        == (out.split("[[allow]]")[1])
    )

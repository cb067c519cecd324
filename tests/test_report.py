"""What a report page holds, seen without a browser."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import Run
from hypothesis import given
from hypothesis import strategies as st
from tracebuilder import TraceBuilder

from streamlint import engine, intervals
from streamlint.errors import UsageError
from streamlint.registry import all_rules
from streamlint.replay import replay_of
from streamlint.reporters import html, lanes, packing, perfetto, timeline
from streamlint.reporters.lanes import KINDS, Lane, depths
from streamlint.reporters.packing import Packer
from streamlint.reporters.timeline import Capture, capture
from streamlint.steady import column
from streamlint.trace import open_trace
from streamlint.trace.model import Trace

SAMPLES = Path(__file__).parents[1] / "sample_traces" / "extra"
LEGACY, FIXED = SAMPLES / "legacy.sqlite", SAMPLES / "legacy_fix.sqlite"
HOSTILE = (
    "</script><script>document.title='run'</script>",
    "<img src=x onerror=\"document.title='run'\">",
    "<!--<script>",
    "quote\" ' & %{x} <b>bold</b>",
    "line\nbreak \x1b[31m\u202e",
    "template<" + "std::tuple<int, float>, " * 2_000 + ">",
)


class Page(HTMLParser):
    """Scripts and everything that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.policy = ""
        self.loads: list[str] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._inside = tag == "script"
        if tag == "script":
            self.scripts.append((found, ""))
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        self.loads += [found[name] or "" for name in ("src", "href") if name in found]

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


@contextmanager
def judged(path: Path) -> Iterator[tuple[Trace, engine.Report]]:
    trace = open_trace(path)
    try:
        yield trace, engine.lint(trace, all_rules())
    finally:
        trace.close()


def captured(path: Path) -> Capture:
    with judged(path) as (trace, report):
        return capture(trace, report)


def unpacked(packed: dict[str, Any], blobs: list[str], **lengths: int) -> Any:
    """Columns of a blob, as the page reads them."""
    raw = zlib.decompress(base64.b64decode(blobs[packed["blob"]]))
    columns: dict[str, list[Any]] = {}
    at = 0
    for name, over in zip(packed["columns"], packed["over"], strict=True):
        n = lengths.get(name, packed["n"])
        width = 2 if name.endswith("2") else 4
        planes = np.frombuffer(raw, np.uint8, n * width, at).reshape(width, n)
        at += n * width
        values = np.zeros(n, np.int64)
        for i, plane in enumerate(planes):
            values += plane.astype(np.int64) << 8 * i
        for i, high in over:
            values[i] += high << 32
        columns.setdefault(name, []).append(values)
    assert at == len(raw)
    return columns


def signed(values: Any) -> Any:
    return np.where(values % 2, -(values + 1) // 2, values // 2)


def decoded(
    head: dict[str, Any], blobs: list[str], packed: dict[str, Any]
) -> dict[str, Any]:
    base = head["lanes"][packed["of"]] if "of" in packed else None
    lengths = {"bins": head["bins"], "kept2": base["n"] if base else 0}
    columns = unpacked(packed, blobs, **lengths)
    if "moves" in columns:
        assert base is not None
        before = decoded(head, blobs, base)
        kept = columns["kept2"][0] == 1
        starts = before["starts"][kept] + np.cumsum(signed(columns["moves"][0]))
        lengths_ns = (before["ends"] - before["starts"])[kept]
        ends = starts + lengths_ns + signed(columns["grown"][0])
        return {"starts": starts, "ends": ends, "codes": before["codes"][kept]}
    starts = head["first"] + np.cumsum(columns["starts"][0])
    found = {"starts": starts, "ends": starts + columns["durations"][0]}
    found["codes"] = columns["codes2" if "codes2" in columns else "codes4"][0]
    if "correlations" in columns:
        found["correlations"] = np.cumsum(signed(columns["correlations"][0]))
    if "bins" in columns:
        found["bins"] = columns["bins"][0]
    return found


# Data -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["legacy", "pageable", "torch"])
def test_packed_lanes_hold_the_trace_exactly(name: str) -> None:
    path = SAMPLES / f"{name}.sqlite"
    if not path.exists():
        pytest.skip(f"{path.name} is no sample")
    with judged(path) as (trace, report):
        head, blobs = capture(trace, report)
        shown = [
            (group, start, end, correlation)
            for lane in head["lanes"]
            for group in [lane["group"]]
            if group in ("gpu", "host")
            for found in [decoded(head, blobs, lane)]
            for start, end, correlation in zip(
                *(found[key].tolist() for key in ("starts", "ends", "correlations")),
                strict=True,
            )
        ]
        columns = ("start_ns", "end_ns", "correlation_id")
        true = [("gpu", *row) for row in trace.gpu_ops.select(columns).iter_rows()]
        true += [
            ("host", *row) for row in trace.runtime_calls.select(columns).iter_rows()
        ]
    assert sorted(shown) == sorted(true)
    assert sum(lane["n"] for lane in head["lanes"]) == head["intervals"]


def test_rows_of_a_lane_never_overlap_and_names_are_kept() -> None:
    head, blobs = captured(LEGACY)
    table = unpacked(head["details"], blobs)
    names, kinds = table["codes4"][0], table["codes2"][0]
    shown = set()
    for lane in head["lanes"]:
        found = decoded(head, blobs, lane)
        assert (found["starts"][1:] >= found["ends"][:-1]).all()
        for code in found["codes"].tolist():
            shown.add((KINDS[kinds[code]], head["details"]["names"][names[code]]))
    assert {("launch", "cudaLaunchKernel"), ("wait", "cudaStreamSynchronize")} <= shown
    assert any(kind == "kernel" and "spin" in name for kind, name in shown)


def test_a_hover_has_grid_bytes_and_memory_kinds(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.stream(13, flag=2)
    b.memcpy("HtoD", 5 * 2**30, src="pageable", stream=13, start=70, end=172)
    b.kernel("step", stream=13, start=220, end=260, grid=(7, 2, 1), block=(64, 1, 1))
    head, blobs = captured(b.write(tmp_path / "t.sqlite"))
    table = unpacked(head["details"], blobs)
    kinds = [KINDS[kind] for kind in table["codes2"][0]]
    parts = np.array(table["codes4"][1:])
    copy, kernel = parts[:, kinds.index("HtoD")], parts[:, kinds.index("kernel")]
    assert copy[0] + copy[1] * 2**32 == 5 * 2**30
    assert [lanes.MEMORY[i] for i in copy[2:4]] == ["pageable", "device"]
    assert kernel[:6].tolist() == [7, 2, 1, 64, 1, 1]


def test_busy_shares_are_unions_and_idle_time_is_the_rest() -> None:
    with judged(LEGACY) as (trace, report):
        head, _ = capture(trace, report)
        ops = trace.gpu_ops
        starts, ends = column(ops, "start_ns"), column(ops, "end_ns")
        union = intervals.union(starts, ends).total_ns
        assert union < (ends - starts).sum()  # streams do overlap
    (device,) = head["facts"]["devices"]
    assert device["busy_ns"]["any"] == union
    assert all(ns <= device["span_ns"] for ns in device["busy_ns"].values())
    assert sum(device["idle_ns"].values()) == device["span_ns"] - union


def test_idle_gaps_tell_what_the_host_did(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.stream(13, flag=2)
    b.kernel("a", stream=13, start=20, end=60, issue=(10, 14))
    b.sync("cudaStreamSynchronize", stream=13, start=30, end=75)
    b.call("cudaMalloc", 80, 10)
    b.kernel("b", stream=13, start=112, end=130, issue=(100, 104))
    b.kernel("c", stream=13, start=140, end=150, issue=None)
    head, _ = captured(b.write(tmp_path / "t.sqlite"))
    (device,) = head["facts"]["devices"]
    assert device["idle_ns"] == {
        "idle-wait": 15_000,
        "idle-call": 10_000,
        "idle-host": 15_000,
        "idle-queued": 12_000,
        "idle-unknown": 10_000,
    }


@pytest.mark.parametrize("name", ["legacy", "pageable", "torch"])
def test_replayed_lanes_are_the_replay(name: str) -> None:
    path = SAMPLES / f"{name}.sqlite"
    if not path.exists():
        pytest.skip(f"{path.name} is no sample")
    with judged(path) as (trace, report):
        head, blobs = capture(trace, report)
        by_message = {f.message: f for _, f in report.findings}
        assert head["replays"]
        for replay in head["replays"]:
            finding = by_message[head["findings"][replay["finding"]]["message"]]
            assert finding.change is not None
            after = replay_of(trace).run([finding.change])
            count = trace.gpu_ops.height
            true = sorted(
                zip(after.op_start[:count], after.op_end[:count], strict=True)
            )
            shown = [
                pair
                for lane in replay["lanes"]
                if lane["group"] == "gpu"
                for found in [decoded(head, blobs, lane)]
                for pair in zip(found["starts"], found["ends"], strict=True)
            ]
            assert sorted(shown) == true


def test_the_replay_of_legacy_saves_a_millisecond() -> None:
    head, _ = captured(LEGACY)
    first = head["findings"][0]
    assert first["rule"] == "legacy-null-stream-barrier"
    (replay,) = [r for r in head["replays"] if r["finding"] == 0]
    assert 0.9e6 < replay["saved"] < 1.1e6


def test_evidence_marks_the_held_operation_its_call_and_the_barrier() -> None:
    head, _ = captured(LEGACY)
    evidence = head["findings"][0]["evidence"][0]
    roles = {mark["role"]: mark for mark in evidence["marks"]}
    held, barrier = roles["held-back operation"], roles["held it back"]
    assert held["start"] == evidence["end"]
    assert evidence["start"] < barrier["end"] <= held["start"]
    assert "NULL" in head["lanes"][barrier["lane"]]["label"]
    assert head["lanes"][roles["host call that issued it"]["lane"]]["group"] == "host"


def test_evidence_of_a_wait_marks_both_sides(tmp_path: Path) -> None:
    b = TraceBuilder()
    b.stream(13, flag=2)
    for i in range(40):
        at = 1_000 * i
        b.kernel("a", stream=13, start=at + 20, end=at + 600, issue=(at + 10, at + 14))
        b.sync("cudaDeviceSynchronize", start=at + 30, end=at + 605)
    path = b.write(tmp_path / "t.sqlite")
    head, _ = captured(path)
    found = [
        {mark["role"] for mark in item["marks"]}
        for finding in head["findings"]
        for item in finding["evidence"]
    ]
    wanted = {"host call that waits", "the call waited for it", "waited for the call"}
    assert any(wanted <= roles for roles in found)


def test_findings_are_sorted_by_cost_with_errors_first() -> None:
    head, _ = captured(SAMPLES.parent / "legacy-null-stream-barrier" / "bad.sqlite")
    costs = [f["ns"] or -1 for f in head["findings"] if f["severity"] != "error"]
    assert costs == sorted(costs, reverse=True)
    errors = [f["severity"] == "error" for f in head["findings"]]
    assert errors == sorted(errors, reverse=True)


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=60),
)
def test_depths_never_overlap(pairs: list[tuple[int, int]]) -> None:
    pairs.sort()
    starts = np.array([start for start, _ in pairs], dtype=np.int64)
    ends = starts + np.array([length for _, length in pairs], dtype=np.int64)
    depth = depths(starts, ends)
    for level in range(int(depth.max(initial=-1)) + 1):
        own = depth == level
        assert own.any()
        assert (starts[own][1:] >= ends[own][:-1]).all()


@given(
    st.lists(
        st.tuples(st.integers(0, 2**36), st.integers(0, 2**35), st.integers(0, 2**17)),
        min_size=1,
        max_size=40,
    ),
    st.integers(-(2**40), 2**40),
)
def test_packing_is_exact_for_any_times(
    rows: list[tuple[int, int, int]], origin: int
) -> None:
    starts, at = [], origin
    for gap, length, _ in rows:
        starts.append(at + gap)
        at += gap + length
    begin = np.array(starts, dtype=np.int64)
    end = begin + np.array([length for _, length, _ in rows], dtype=np.int64)
    code = np.array([code for _, _, code in rows], dtype=np.int64)
    packer = Packer(origin, int(end[-1]) + 1)
    lane = Lane("gpu", "h", "l", "kernel", begin, end, code, correlation=code[::-1])
    packed = packer.lane(lane)
    head = {"first": origin, "bins": packer.bins, "lanes": [packed]}
    found = decoded(head, packer.blobs, packed)
    assert np.array_equal(found["starts"], begin)
    assert np.array_equal(found["ends"], end)
    assert np.array_equal(found["codes"], code)
    assert np.array_equal(found["correlations"], code[::-1])


def test_a_large_trace_keeps_findings_in_full_and_exact_bins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, whole_blobs = captured(LEGACY)
    monkeypatch.setattr(timeline, "MAX_DETAIL", 50)
    monkeypatch.setattr(packing, "MAX_WINDOWED", 60)
    head, blobs = captured(LEGACY)
    assert head["detailed"]
    assert 0 < sum(lane["n"] for lane in head["lanes"]) < whole["intervals"]
    assert head["intervals"] == whole["intervals"]
    edges = head["first"] + head["bin_ns"] * np.arange(head["bins"] + 1)
    kept_bins = np.zeros(head["bins"], dtype=bool)
    for low, high in head["detailed"]:
        kept_bins[low:high] = True
    item = head["findings"][0]["evidence"][0]
    inside = (edges[:-1] < item["end"]) & (edges[1:] > item["start"])
    assert kept_bins[inside].all()
    for packed, full in zip(head["lanes"], whole["lanes"], strict=True):
        found = decoded(head, blobs, packed)
        true = decoded(whole, whole_blobs, full)
        covered = intervals.union(true["starts"], true["ends"])
        assert np.array_equal(found["bins"], covered.overlap_ns(edges[:-1], edges[1:]))
        # Every interval that reaches into a bin held in full is there.
        for low, high in head["detailed"]:
            touches = (true["starts"] < edges[high]) & (true["ends"] > edges[low])
            assert np.isin(true["starts"][touches], found["starts"]).all()


def test_too_many_rows_are_merged_and_counted(tmp_path: Path) -> None:
    b = TraceBuilder()
    for i in range(12):
        b.nvtx(f"range {i}", 100 + i, 900 - i)
    b.kernel("a", stream=7, start=200, end=300)
    head, blobs = captured(b.write(tmp_path / "t.sqlite"))
    ranges = [lane for lane in head["lanes"] if lane["group"] == "nvtx"]
    assert len(ranges) == lanes.MAX_DEPTH
    assert ranges[-1]["merged"] == 12 - lanes.MAX_DEPTH + 1
    found = decoded(head, blobs, ranges[-1])
    assert found["starts"].tolist() == [105_000]


@pytest.mark.parametrize(
    "path", sorted(SAMPLES.glob("*.sqlite")), ids=lambda path: path.stem
)
def test_every_sample_makes_a_page(path: Path) -> None:
    try:
        text = html.page([captured(path)])
    except Exception as error:
        if type(error).__name__ == "TraceError":
            pytest.skip(f"no trace: {error}")
        raise
    assert text.count("<script") >= 4


# Safety -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    b = TraceBuilder()
    b.stream(13)
    for i, name in enumerate(HOSTILE):
        b.kernel(name, stream=13, start=20 + 50 * i, end=60 + 50 * i)
        b.nvtx(name, 10 + 50 * i, 50 + 50 * i)
    path = tmp_path_factory.mktemp("hostile") / "<b>&'.sqlite"
    return html.page([captured(b.write(path))])


def test_hostile_names_stay_inside_the_data(hostile_page: str) -> None:
    page = Page(hostile_page)
    kinds = [attributes.get("type") for attributes, _ in page.scripts]
    code = [text for attributes, text in page.scripts if "type" not in attributes]
    assert kinds.count("application/json") == 1
    assert set(kinds) == {"application/json", "text/plain", None}
    assert len(code) == 2  # plotly.js and the page's own
    (data,) = [t for a, t in page.scripts if a.get("type") == "application/json"]
    names = json.loads(data)["captures"][0]["details"]["names"]
    assert HOSTILE[0] in names
    assert "\x1b" not in "".join(names)
    assert "\u202e" not in "".join(names)
    assert max(map(len, names)) <= 6 * lanes.MAX_NAME
    assert "<b>" not in re.sub(r"(?s)<script.*?</script>", "", hostile_page)


def test_the_policy_allows_the_pages_own_scripts_and_no_network(
    hostile_page: str,
) -> None:
    page = Page(hostile_page)
    rules = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert rules["default-src"] == "'none'"
    hashes = {
        "'sha256-"
        + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        + "'"
        for attributes, text in page.scripts
        if "type" not in attributes
    }
    assert set(rules["script-src"].split()) == hashes
    assert "unsafe" not in rules["script-src"]
    assert not {"connect-src", "frame-src", "font-src", "media-src"} & set(rules)
    assert page.policy in hostile_page.partition("<style")[0]


def test_nothing_of_ours_names_an_address(hostile_page: str) -> None:
    page = Page(hostile_page)
    assert set(page.loads) <= {"data:,", "#findings"}
    plotly = max((text for _, text in page.scripts), key=len)
    rest = hostile_page.replace(plotly, "")
    assert not re.search(r"(?:https?:)?//[\w.-]+\.\w", rest)


def test_plotlyjs_can_come_from_the_cdn_or_a_file(tmp_path: Path) -> None:
    found = captured(LEGACY)
    page = Page(html.page([found], "cdn"))
    (source,) = [url for url in page.loads if "cdn" in url]
    assert source.startswith("https://cdn.plot.ly/plotly-")
    assert source in page.policy
    (attributes,) = [a for a, _ in page.scripts if "src" in a]
    assert (attributes["integrity"] or "").startswith("sha256-")
    bundle = tmp_path / "plotly.js"
    bundle.write_text("/* plotly.js */\r\n" + " " * html._MIN_BUNDLE)
    page = Page(html.page([found], str(bundle)))
    assert "cdn" not in page.policy
    for text in ("nothing", "/* plotly.js */ </script>" + " " * html._MIN_BUNDLE):
        bundle.write_text(text)
        with pytest.raises(UsageError):
            html.page([found], str(bundle))
    with pytest.raises(UsageError):
        html.page([found], str(tmp_path / "missing.js"))


# The command --------------------------------------------------------------------


def test_report_writes_a_page(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = run("report", LEGACY, "-o", page)
    assert done.code == 0
    assert done.out == ""
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert stat.S_IMODE(page.stat().st_mode) & 0o600 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_report_of_two_captures_holds_both(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert run("report", LEGACY, FIXED, "-o", page).code == 0
    (data,) = [
        text
        for attributes, text in Page(page.read_text(encoding="utf-8")).scripts
        if attributes.get("type") == "application/json"
    ]
    before, after = json.loads(data)["captures"]
    spans = [c["work"][1] - c["work"][0] for c in (before, after)]
    assert 0.9e6 < spans[0] - spans[1] < 1.1e6
    gone = {f["fingerprint"] for f in before["findings"]}
    gone -= {f["fingerprint"] for f in after["findings"]}
    rules = {f["rule"] for f in before["findings"] if f["fingerprint"] in gone}
    assert "legacy-null-stream-barrier" in rules


def test_an_old_report_stays_if_writing_fails(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "report.html"
    page.write_text("old")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    done = run("report", LEGACY, "-o", page)
    assert done.code == 2
    assert "No space left" in done.err
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_lint_writes_a_page_beside_its_text(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    done = run("lint", LEGACY, "--html", page)
    assert done.code == 1
    assert "legacy-null-stream-barrier" in done.out
    assert "legacy-null-stream-barrier" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", LEGACY, "-o", FIXED),
        ("report", LEGACY, "-o", "{tmp}/x.html", "--plotlyjs", "{tmp}/missing.js"),
        ("lint", LEGACY, FIXED, "--format", "perfetto"),
        ("lint", LEGACY, "--html", FIXED),
    ],
)
def test_wrong_usage_is_an_error(
    run: Run, tmp_path: Path, arguments: tuple[str | Path, ...]
) -> None:
    before = FIXED.read_bytes()
    done = run(*(str(a).replace("{tmp}", str(tmp_path)) for a in arguments))
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert not list(tmp_path.iterdir())
    assert FIXED.read_bytes() == before


# Perfetto -----------------------------------------------------------------------


def test_a_perfetto_trace_has_every_interval_and_the_findings(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json.gz"
    assert run("lint", LEGACY, "--format", "perfetto", "-o", path).code == 1
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    with judged(LEGACY) as (trace, report):
        head, _ = capture(trace, report)
        assert gzip.decompress(perfetto.render(trace, report)) == gzip.decompress(
            path.read_bytes()
        )
        evidence = sum(len(f.evidence) for _, f in report.findings)
        ops = trace.gpu_ops
        wanted = {
            (f"{start / 1e3:.3f}", f"{(end - start) / 1e3:.3f}")
            for start, end in ops.select("start_ns", "end_ns").iter_rows()
        }
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == head["intervals"] + evidence
    shown = {(f"{e['ts']:.3f}", f"{e['dur']:.3f}") for e in slices}
    assert wanted <= shown
    processes = {
        event["args"]["name"]: event["pid"]
        for event in events
        if event["name"] == "process_name"
    }
    own = [e for e in slices if e["pid"] == processes["streamlint findings"]]
    assert len(own) == evidence
    assert all(e["args"]["fix"] for e in own)

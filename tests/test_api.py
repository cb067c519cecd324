"""The Python interface as a script or a notebook uses it."""

from __future__ import annotations

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pandas as pd
import plotly.graph_objects as go
import pytest
from commandline import Run
from jsonschema import Draft202012Validator
from nbclient import NotebookClient
from tracebuilder import TraceBuilder

import streamlint
from streamlint.reporters import figure as figures
from streamlint.reporters.json import schema

ROOT = Path(__file__).parents[1]
BAD = ROOT / "sample_traces" / "pageable-async-copy" / "bad.sqlite"
FIXED = BAD.with_name("fixed.sqlite")


@pytest.fixture(scope="module")
def result() -> streamlint.Result:
    with streamlint.open(BAD) as trace:
        result = streamlint.lint(trace)
        result.figure()  # what it needs stays usable
    return result


def python(script: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Import -----------------------------------------------------------------------------


def test_importing_the_package_loads_nothing_else(tmp_path: Path) -> None:
    loaded = python(
        "import sys; before = set(sys.modules); import streamlint\n"
        "print(*sorted(set(sys.modules) - before))",
        tmp_path,
    ).split()
    tops = {name.partition(".")[0] for name in loaded}
    assert tops - sys.stdlib_module_names == {"streamlint"}
    assert not [name for name in loaded if name.startswith("streamlint.")]


def test_using_the_package_loads_no_plotly(tmp_path: Path) -> None:
    script = (
        "import sys, streamlint\n"
        f"with streamlint.open({str(BAD)!r}) as trace:\n"
        "    result = streamlint.lint(trace)\n"
        "result._repr_html_(), result.to_dict(), result.to_polars()\n"
        "print({'plotly', 'pandas', 'pyarrow', 'typer'} & set(sys.modules))"
    )
    assert python(script, tmp_path).strip() == "set()"


def test_every_public_name_is_there() -> None:
    assert set(streamlint.__all__) <= set(dir(streamlint))
    for name in streamlint.__all__:
        assert getattr(streamlint, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'lints'"):
        streamlint.lints  # noqa: B018


# The same as the command line -------------------------------------------------------


def test_a_result_is_what_the_command_says(result: streamlint.Result, run: Run) -> None:
    done = run("lint", BAD, "--format", "json")
    document = json.loads(done.out)
    assert result.to_dict() == document
    assert json.loads(result.to_json()) == document
    assert result.exit_code() == done.code == 1
    Draft202012Validator(schema()).validate(result.to_dict())


def test_options_are_those_of_the_command(run: Run, tmp_path: Path) -> None:
    held = tmp_path / "streamlint.toml"
    held.write_text('ignore = ["transfers"]\nmin-saving = "1s"\n')
    known = tmp_path / "known.json"
    run("lint", BAD, "--write-baseline", known)
    with streamlint.open(BAD) as trace:
        assert streamlint.lint(trace, config=held).findings == []
        assert streamlint.lint(trace, ignore="transfers").exit_code() == 0
        chosen = streamlint.lint(trace, select=["transfers", "busy-poll"])
        assert {rule.name for rule, _ in chosen.findings} == {"pageable-async-copy"}
        told = streamlint.lint(trace, baseline=str(known))
        start = trace.gpu_ops["start_ns"][0]
        part = streamlint.lint(trace, scope=streamlint.Scope(end_ns=start + 3_000_000))
        whole = chosen.overview.judged[0].duration_ns
        assert part.overview.judged[0].duration_ns < whole
    assert [rule.name for rule, _ in told.findings] == ["pageable-async-copy"]
    assert told.new == []
    assert told.exit_code() == 0


def test_no_configuration_is_read_that_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "streamlint.toml").write_text('ignore = ["transfers"]\n')
    monkeypatch.chdir(tmp_path)
    with streamlint.open(BAD) as trace:
        assert streamlint.lint(trace).findings


def test_what_could_not_be_assessed_is_no_clean_result() -> None:
    path = ROOT / "sample_traces" / "extra" / "nocuda.sqlite"
    with streamlint.open(path) as trace:
        result = streamlint.lint(trace)
    assert result.exit_code() == 3
    assert len(result.not_assessed) > 30
    assert result.crashed == []
    assert "not assessed" in result._repr_html_()


# Frames and figures -----------------------------------------------------------------


def test_findings_become_frames(result: streamlint.Result) -> None:
    table = result.to_polars()
    (rule, finding), *_ = result.findings
    assert table.height == len(result.findings)
    row = table.row(0, named=True)
    assert (row["rule"], row["cost_ns"]) == (rule.name, finding.cost.ns)
    assert row["streams"] == list(finding.where.streams)
    pandas = result.to_pandas()
    assert isinstance(pandas, pd.DataFrame)
    assert list(pandas.columns) == table.columns
    with streamlint.open(FIXED) as trace:
        clean = streamlint.lint(trace, select="busy-poll")
        assert trace.kernels.to_pandas().shape == trace.kernels.shape
    assert clean.to_polars().schema == table.schema
    assert clean.to_pandas().empty


def test_the_timeline_shows_every_lane_and_the_evidence(
    result: streamlint.Result,
) -> None:
    figure = result.figure()
    assert isinstance(figure, go.Figure)
    names = {bars.name for bars in figure.data}
    assert {"kernel", "HtoD", "DtoH", "call that waits"} <= names
    lanes = figure.layout.yaxis.ticktext
    assert any("stream" in lane for lane in lanes)
    assert len({bars.marker.color for bars in figure.data}) >= 4
    evidence = [item for _, finding in result.findings for item in finding.evidence]
    assert len(figure.layout.shapes) == len(evidence)
    shown = [bars for bars in figure.data if bars.showlegend]
    assert len(shown) == len(names)

    first = evidence[0]
    part = result.figure(first.start_ns, first.end_ns)
    low, high = part.layout.xaxis.range
    assert high - low == pytest.approx((first.end_ns - first.start_ns) / 1e6)
    bars = sum(len(bars.x) for bars in figure.data)
    assert 0 < sum(len(bars.x) for bars in part.data) < bars


def test_near_bars_of_a_long_row_are_drawn_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "BARS", 10)
    b = TraceBuilder()
    b.stream(13, flag=2)
    for i in range(40):
        b.kernel("<b>step</b>", stream=13, start=100 + 10 * i, end=104 + 10 * i)
    with streamlint.open(b.write(tmp_path / "t.sqlite")) as trace:
        figure = streamlint.lint(trace).figure()
        (kernels,) = [bars for bars in figure.data if bars.name == "kernel"]
        assert list(kernels.customdata) == ["40 intervals"]
        assert kernels.x[0] == pytest.approx(0.424 - 0.03, abs=0.05)
        part = streamlint.lint(trace).figure(100_000, 150_000)
    (kernels,) = [bars for bars in part.data if bars.name == "kernel"]
    assert set(kernels.customdata) == {"&lt;b&gt;step&lt;/b&gt;"}


# Notebooks --------------------------------------------------------------------------


def test_names_of_a_trace_stay_text_in_a_notebook(tmp_path: Path) -> None:
    b = TraceBuilder(process="<script>alert(1)</script>")
    b.stream(13, flag=2)
    for i in range(6):
        at = 1000.0 * i + 10
        b.memcpy(
            "DtoH", 1 << 20, dst="pageable", stream=13, start=at + 5, end=at + 600,
            issue=(at, at + 610),
        )  # fmt: skip
        b.kernel("<img src=x>", stream=13, start=at + 620, end=at + 700)
    path = b.write(tmp_path / "<i>.sqlite")
    with streamlint.open(path) as trace:
        shown = trace._repr_html_()
        result = streamlint.lint(trace)
        shown += result._repr_html_()
        drawn = result.figure().to_json()
    assert "pageable-async-copy" in shown
    assert "&lt;i&gt;.sqlite" in shown
    for text in ("<i>", "<img", "<script"):
        assert text not in shown
        assert text not in drawn
    assert "streamlint.Result" in repr(result)


def test_the_example_notebook_runs() -> None:
    path = ROOT / "docs" / "example.ipynb"
    notebook = nbformat.reads(path.read_text("utf-8"), as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=60, resources=where).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    shown = [out.data for out in outputs if "data" in out]
    printed = "".join(out.text for out in outputs if out.output_type == "stream")
    assert "pageable-async-copy high what-if" in printed
    assert re.search(r"iterations: \d\d\.\d ms\n\d+ iterations: \d\.\d ms", printed)
    assert any("<table>" in data.get("text/html", "") for data in shown)
    assert any("application/vnd.plotly.v1+json" in data for data in shown)


# Errors -----------------------------------------------------------------------------


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(streamlint.TraceError, match="missing"):
        streamlint.open(tmp_path / "missing.sqlite")
    with streamlint.open(BAD) as trace:
        with pytest.raises(streamlint.UsageError, match="no rule or family") as error:
            streamlint.lint(trace, select="bussy-poll")
        assert "busy-poll" in error.value.hint
        with pytest.raises(streamlint.ConfigError, match="can't be read"):
            streamlint.lint(trace, config=tmp_path / "none.toml")
        with pytest.raises(streamlint.BaselineError, match="can't be read"):
            streamlint.lint(trace, baseline=tmp_path / "none.json")
        result = streamlint.lint(trace, select="busy-poll")
        with pytest.raises(streamlint.UsageError, match="fail_on can't be awful"):
            result.exit_code("awful")


def test_a_closed_trace_says_so() -> None:
    with streamlint.open(BAD) as trace:
        pass
    with pytest.raises(streamlint.TraceError, match=r"bad\.sqlite is closed"):
        streamlint.lint(trace)


# Documentation ----------------------------------------------------------------------


def test_the_examples_of_the_page_are_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "python-api.md").read_text("utf-8")
    parts = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(parts) == page.count("```python") >= 5
    (tmp_path / "sample_traces").symlink_to(ROOT / "sample_traces")
    (tmp_path / "README.md").write_text("# Not a trace\n" * 20)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    checker = doctest.OutputChecker()
    for code, wanted in parts:
        exec(compile(code, "python-api.md", "exec"), names)
        printed = capsys.readouterr().out
        assert checker.check_output(wanted, printed, doctest.ELLIPSIS), printed
    assert (tmp_path / "timeline.html").stat().st_size > 1_000_000


def test_the_page_names_every_option_and_property() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text("utf-8")
    members = [name for name in vars(streamlint.Result) if not name.startswith("_")]
    options = streamlint.lint.__kwdefaults__ or {}
    assert [n for n in (*members, *options) if f"`{n}" not in page] == ["path"]

"""The GitHub action and the GitLab job: their scripts run here, on sample traces."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from streamlint.reporters.markdown import MARK

ROOT = Path(__file__).parents[1]
SAMPLES = ROOT / "sample_traces"
BAD = SAMPLES / "extra" / "legacy.sqlite"
FIXED = SAMPLES / "extra" / "legacy_fix.sqlite"
TORCH = SAMPLES / "extra" / "torchbt.sqlite"
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
STEPS: dict[str, dict[str, Any]] = {
    step.get("name", step.get("uses")): step for step in ACTION["runs"]["steps"]
}
EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


class Step(NamedTuple):
    code: int
    out: str
    outputs: dict[str, str]
    summary: str


class Runner:
    """Runs a step as GitHub does, with a python that records pip instead of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "pip.txt"
        programs = folder / "bin"
        programs.mkdir()
        python = programs / "python"
        python.write_text(
            "#!/bin/bash\n"
            f'if [ "$2" = pip ]; then printf "%s\\n" "$@" >> "{self.calls}"; exit; fi\n'
            f'exec "{sys.executable}" "$@"\n'
        )
        python.chmod(0o755)
        self._env = {
            **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "RUNNER_TEMP": str(folder),
            "GITHUB_OUTPUT": str(folder / "output"),
            "GITHUB_STEP_SUMMARY": str(folder / "summary"),
            "PYTHONIOENCODING": "utf-8",
        }

    def __call__(self, name: str, known: dict[str, str]) -> Step:
        step = STEPS[name]
        assert step["shell"] == "bash"
        defaults = {
            f"inputs.{key}": str(given.get("default", ""))
            for key, given in ACTION["inputs"].items()
        }
        values = {**defaults, **known}
        env = {
            key: EXPRESSION.sub(lambda m: values[m[1]], value)
            for key, value in step["env"].items()
        }
        files = {n: self.folder / n for n in ("output", "summary")}
        for file in files.values():
            file.write_text("")
        script = self.folder / "script.sh"
        script.write_text(step["run"], encoding="utf-8")
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", script],
            env={**self._env, **env},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
        pairs = (
            line.partition("=") for line in files["output"].read_text().split("\n")
        )
        outputs = {key: value for key, _, value in pairs if key}
        summary = files["summary"].read_text(encoding="utf-8")
        return Step(done.returncode, done.stdout, outputs, summary)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def test_the_action_is_one_that_github_takes() -> None:
    assert {"name", "description", "inputs", "outputs", "runs"} <= set(ACTION)
    assert ACTION["runs"]["using"] == "composite"
    for given in ACTION["inputs"].values():
        assert given["description"]
        assert given.get("required") or "default" in given
    for step in ACTION["runs"]["steps"]:
        assert ("run" in step) != ("uses" in step)
        assert ("shell" in step) == ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w/-]+@v\d+", step["uses"])
    used = set(
        re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text("utf-8"))
    )
    assert used == set(ACTION["inputs"])


def test_no_input_becomes_part_of_a_script() -> None:
    scripts = [step["run"] for step in ACTION["runs"]["steps"] if "run" in step]
    scripts += [STEPS["Comment"]["with"]["script"]]
    assert len(scripts) == 4
    for script in scripts:
        assert "${{" not in script


def test_the_documented_inputs_exist() -> None:
    text = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \|", text.partition("## GitLab")[0], re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", "".join(rows))) == set(ACTION["inputs"])
    workflow = yaml.safe_load(blocks(text)[0])
    for step in workflow["jobs"]["lint"]["steps"]:
        if step["uses"].startswith("OWNER/"):
            assert set(step["with"]) <= set(ACTION["inputs"])


def test_install_takes_the_action_itself(runner: Runner) -> None:
    done = runner("Install streamlint", {"github.action_path": "/actions/a b/$(x)"})
    assert done.code == 0
    assert runner.calls.read_text().splitlines()[-1] == "/actions/a b/$(x)"
    assert (ROOT / "pyproject.toml").is_file()


def test_lint_annotates_summarizes_and_writes_sarif(runner: Runner) -> None:
    done = runner("Lint", {"inputs.traces": f"{BAD}\n{TORCH}\n"})
    assert done.code == 0  # the last step fails, once everything is uploaded
    assert done.outputs["exit-code"] == "1"
    assert "legacy.sqlite · NVIDIA H200" in done.out  # text in the log
    assert "::error title=streamlint%3A legacy-null-stream-barrier (high)::" in done.out
    assert "::warning file=t.py,line=16,title=" in done.out
    text = Path(done.outputs["markdown"]).read_text(encoding="utf-8")
    assert text.startswith(MARK)
    assert done.summary == text
    log = json.loads(Path(done.outputs["sarif"]).read_text(encoding="utf-8"))
    assert {result["kind"] for result in log["runs"][0]["results"]} == {"fail"}


def test_code_scanning_gets_no_suppressed_findings(
    runner: Runner, tmp_path: Path
) -> None:
    (tmp_path / "streamlint.toml").write_text(
        '[[allow]]\nrule = "legacy-null-stream-barrier"\nreason = "by design"\n'
    )
    done = runner("Lint", {"inputs.traces": f"{BAD}"})
    assert done.outputs["exit-code"] == "0"
    log = json.loads(Path(done.outputs["sarif"]).read_text(encoding="utf-8"))
    assert log["runs"][0]["results"] == []
    assert "by design" in done.summary


def test_lint_passes_inputs_on(runner: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "traces of $(touch owned)"
    (folder / "deep" / "er").mkdir(parents=True)
    shutil.copy(BAD, folder / "a b.sqlite")
    shutil.copy(FIXED, folder / "deep" / "er" / "c.sqlite")
    written = runner(
        "Lint",
        {
            "inputs.traces": "\n*/**/*.sqlite\n",
            "inputs.args": "--write-baseline=known all.json\n--select=streams",
        },
    )
    assert written.outputs["exit-code"] == "0"
    assert "2 traces: " in written.out
    known = runner(
        "Lint",
        {"inputs.traces": "*/**/*.sqlite", "inputs.baseline": "known all.json"},
    )
    assert "1 known finding in the baseline" in known.out
    less = runner("Lint", {"inputs.traces": f"{BAD}", "inputs.fail-on": "error"})
    assert less.outputs["exit-code"] == "0"
    assert list(tmp_path.rglob("owned")) == []


@pytest.mark.parametrize(
    "inputs",
    [
        {"inputs.traces": "; touch owned #"},
        {"inputs.traces": "$(touch owned)", "inputs.fail-on": "`touch owned`"},
        {"inputs.traces": "--help"},
        {"inputs.traces": f"{BAD}", "inputs.args": '"; touch owned; "'},
        {"inputs.traces": ""},
    ],
)
def test_bad_inputs_are_errors_and_nothing_else(
    runner: Runner, tmp_path: Path, inputs: dict[str, str]
) -> None:
    done = runner("Lint", inputs)
    assert done.code == 0
    assert done.outputs["exit-code"] == "2"
    assert list(tmp_path.rglob("owned")) == []


@pytest.mark.parametrize(("given", "code"), [("1", 1), ("3", 3), ("", 2)])
def test_the_result_is_that_of_the_lint(runner: Runner, given: str, code: int) -> None:
    assert runner("Result", {"steps.lint.outputs.exit-code": given}).code == code


STUBS = """
const comments = JSON.parse(process.env.COMMENTS), calls = [];
const issues = { listComments: 'list' };
for (const name of ['createComment', 'updateComment'])
  issues[name] = async (what) => calls.push([name, what]);
const github = {
  rest: { issues },
  paginate: async (what, issue) => what === 'list' && issue.issue_number === 7
    ? comments : [],
};
const context = { repo: { owner: 'o', repo: 'r' }, issue: { number: 7 } };
(async () => { %s })().then(() => console.log(JSON.stringify(calls)));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, as GitHub has")
@pytest.mark.parametrize(
    ("comments", "call"),
    [
        ([], "createComment"),
        ([("User", "<!-- streamlint gpu -->")], "createComment"),
        ([("Bot", "hello"), ("Bot", "<!-- streamlint gpu2 -->")], "createComment"),
        ([("Bot", "hello"), ("Bot", "<!-- streamlint gpu -->\nold")], "updateComment"),
    ],
)
def test_one_comment_is_kept_up_to_date(
    tmp_path: Path, comments: list[tuple[str, str]], call: str
) -> None:
    (tmp_path / "c.md").write_text(f"{MARK}\n$& it costs $1\n", encoding="utf-8")
    script = STUBS % STEPS["Comment"]["with"]["script"]
    listed = [
        {"id": i, "user": {"type": kind}, "body": body}
        for i, (kind, body) in enumerate(comments)
    ]
    done = subprocess.run(
        ["node", "-e", script],
        env={
            **os.environ,
            "COMMENTS": json.dumps(listed),
            "MARKDOWN": str(tmp_path / "c.md"),
            "CATEGORY": "gpu",
        },
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    ((name, what),) = json.loads(done.stdout)
    assert name == call
    assert what["body"] == "<!-- streamlint gpu -->\n$& it costs $1\n"
    if call == "updateComment":
        assert what["comment_id"] == 1
    else:
        assert what["issue_number"] == 7


# GitLab -------------------------------------------------------------------------------


def blocks(text: str) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


JOB: dict[str, Any] = yaml.safe_load(
    blocks((ROOT / "docs" / "ci.md").read_text(encoding="utf-8"))[1]
)["streamlint"]


class Notes(BaseHTTPRequestHandler):
    """A merge request's notes, two a page."""

    kept: list[dict[str, Any]]
    calls: list[tuple[str, str, Any]]

    def _answer(self, value: Any, following: str = "") -> None:
        raw = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("X-Next-Page", following)
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        page = int(re.findall(r"[?&]page=(\d+)", self.path)[0])
        shown = self.kept[2 * page - 2 : 2 * page]
        self._answer(shown, str(page + 1) if len(self.kept) > 2 * page else "")

    def do_PUT(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.headers["PRIVATE-TOKEN"] == "secret"
        self.calls.append((self.command, self.path, sent))
        self._answer({})

    do_POST = do_PUT

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def notes() -> Iterator[tuple[type[Notes], str]]:
    handler = type("Handler", (Notes,), {"kept": [], "calls": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}
    )
    thread.start()
    try:
        yield handler, f"http://127.0.0.1:{server.server_port}/api/v4"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("before", ["none", "own"])
def test_the_gitlab_job_lints_and_writes_its_note(
    tmp_path: Path, notes: tuple[type[Notes], str], before: str
) -> None:
    handler, url = notes
    handler.kept += [{"id": i, "body": "other"} for i in range(3)]
    if before == "own":
        handler.kept.append({"id": 42, "body": f"{MARK}\nold"})
    shutil.copy(BAD, tmp_path / "run.sqlite")
    bin_folder = Path(sys.executable).parent
    env = {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "CI_API_V4_URL": url,
        "CI_PROJECT_ID": "5",
        "CI_MERGE_REQUEST_IID": "9",
        "STREAMLINT_TOKEN": "secret",
        "NO_PROXY": "127.0.0.1",
    }

    def sh(script: str) -> int:
        done = subprocess.run(["bash", "-ec", script], env=env, cwd=tmp_path)
        return done.returncode

    install, lint = JOB["script"]
    assert install.startswith("pip install ")
    assert sh(lint) == 1
    assert [sh(script) for script in JOB["after_script"]] == [0]
    ((method, path, sent),) = handler.calls
    place = "/api/v4/projects/5/merge_requests/9/notes"
    if before == "own":
        assert (method, path) == ("PUT", f"{place}/42")
    else:
        assert (method, path) == ("POST", place)
    assert sent["body"] == (tmp_path / "streamlint.md").read_text(encoding="utf-8")
    for kept in (*JOB["artifacts"]["paths"], JOB["artifacts"]["reports"]["junit"]):
        assert (tmp_path / kept).stat().st_size > 0

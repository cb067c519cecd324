"""Imports go one way; pyproject.toml holds the contracts."""

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lint_imports(folder: Path) -> "subprocess.CompletedProcess[str]":
    command = Path(sysconfig.get_path("scripts")) / "lint-imports"
    return subprocess.run(
        [command, "--no-cache", "--no-logo"],
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "COLUMNS": "200"},
        capture_output=True,
        encoding="utf-8",
    )


def test_imports_go_one_way() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_that_reads_sqlite_breaks_the_contract(tmp_path: Path) -> None:
    for folder in ("streamlint", "rules", "harness"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    rule = tmp_path / "rules" / "streams" / "reads_sqlite.py"
    rule.write_text('"""Reads the file itself."""\n\nimport sqlite3\n')

    done = lint_imports(tmp_path)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "streamlint.rules.streams.reads_sqlite -> sqlite3" in done.stdout

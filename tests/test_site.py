"""The documentation as a site: it builds without a warning and loads nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamlint.registry import all_rules

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.xdist_group("site")


def build(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", *args],
        cwd=ROOT,
        env=dict(os.environ, NO_MKDOCS_2_WARNING="1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = build("--site-dir", folder)
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    return folder


def test_dead_links_and_pages_outside_the_menu_fail(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text(
        "# A\n\n[1](lost.md) [2](b.md#lost) [3](/b.md) [4](b.md#b)\n"
    )
    (pages / "b.md").write_text("# B\n")
    (pages / "c.md").write_text("# C\n")
    (tmp_path / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: pages\nhooks: []\n"
        "nav: [index.md, b.md]\n"
    )
    done = build("--config-file", tmp_path / "mkdocs.yml", "--site-dir", tmp_path / "s")
    assert done.returncode == 1
    warnings = [line for line in done.stdout.splitlines() if "WARNING" in line]
    for told in ("'lost.md'", "'#lost'", "'/b.md'", "not included in the"):
        assert told in done.stdout, done.stdout
    assert len(warnings) == 4, done.stdout


def test_every_page_is_built_and_no_script_of_ours(site: Path) -> None:
    pages = {
        path.relative_to(ROOT / "docs").with_suffix(".html")
        for path in (ROOT / "docs").rglob("*.md")
    }
    built = {path.relative_to(site) for path in site.rglob("*.html")}
    assert {Path("rules/index.html") if p.stem == "README" else p for p in pages} <= (
        built
    )
    assert not [*site.rglob("*.py")]
    assert (site / "example.ipynb").exists()


def test_the_menu_has_every_rule_below_its_family(site: Path) -> None:
    page = (site / "rules" / "index.html").read_text("utf-8")
    shown = re.findall(r'<span class="md-ellipsis">\s*(\S+)\s*</span>', page)
    wanted: list[str] = []
    for rule in all_rules():
        wanted += [] if rule.family in wanted else [rule.family]
        wanted.append(rule.name)
    assert wanted == [name for name in dict.fromkeys(shown) if name in {*wanted}]


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|link|source|object)\b[^>]*?"
        r"""\b(?:src|href|data)=["']?(?:https?:)?//[^>]*>"""
    )
    for page in site.rglob("*.html"):
        found = loads.findall(page.read_text("utf-8"))
        assert [tag for tag in found if 'rel="canonical"' not in tag] == [], page
    for sheet in site.rglob("*.css"):
        text = sheet.read_text("utf-8")
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", text), sheet

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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A dead link or anchor, or a page outside the menu, fails."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=dict(os.environ, NO_MKDOCS_2_WARNING="1"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout
    return folder


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

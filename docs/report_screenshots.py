"""Takes the pictures of report pages that the README shows.

.venv/bin/python docs/report_screenshots.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import chrome, open_page, wait_for  # noqa: E402

from streamlint import engine  # noqa: E402
from streamlint.registry import all_rules  # noqa: E402
from streamlint.reporters import html  # noqa: E402
from streamlint.reporters.timeline import capture  # noqa: E402
from streamlint.trace import open_trace  # noqa: E402

WIDTH = 1200
DRAWS = "document.getElementById('plot').dataset.draws"


class Shot(NamedTuple):
    """A sample, what to press after choosing its first finding, and how to show it."""

    sample: str
    press: str
    scheme: str
    height: int


SHOTS = (
    Shot("legacy", "savings", "light", 1180),
    Shot("pageable", "evidence", "dark", 1240),
    Shot("torch", "evidence", "light", 1420),
)


def main() -> None:
    """Write docs/report-SAMPLE.png."""
    browser = chrome(WIDTH, 900)
    with tempfile.TemporaryDirectory() as folder:
        for shot in SHOTS:
            path = ROOT / "sample_traces" / "extra" / f"{shot.sample}.sqlite"
            trace = open_trace(path)
            report = engine.lint(trace, all_rules(), with_model=True)
            page = Path(folder) / "page.html"
            page.write_text(html.page([capture(trace, report)]), encoding="utf-8")
            trace.close()
            feature = [{"name": "prefers-color-scheme", "value": shot.scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
            size = {"width": WIDTH, "height": shot.height}
            size |= {"deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            open_page(browser, page)
            for button in ("#findings-table tbody button", f"#{shot.press}"):
                before = browser.execute_script(f"return {DRAWS}")
                press = f"document.querySelector('{button}').click()"
                browser.execute_script(press)
                wait_for(browser, f"return {DRAWS} !== '{before}'")
            browser.execute_script("document.activeElement.blur(); scrollTo(0, 0)")
            browser.save_screenshot(str(ROOT / "docs" / f"report-{shot.sample}.png"))
    browser.quit()


if __name__ == "__main__":
    main()

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
from streamlint.fleet import Fleet, fleet  # noqa: E402
from streamlint.registry import all_rules  # noqa: E402
from streamlint.reporters import fleet_page, html  # noqa: E402
from streamlint.reporters.timeline import capture  # noqa: E402
from streamlint.trace import open_trace  # noqa: E402

WIDTH = 1200
RANKS = ("legacy", "legacy_fix", "pageable")
DRAWS = "document.getElementById('plot').dataset.draws"


class Shot(NamedTuple):
    """A picture of a sample: what to press after choosing its first finding."""

    name: str
    sample: str
    press: str
    scheme: str
    height: int


SHOTS = (
    Shot("legacy", "extra/legacy", "savings", "light", 1180),
    Shot("pageable", "extra/pageable", "evidence", "dark", 1240),
    Shot("torch", "extra/torch", "evidence", "light", 1420),
    Shot("tutorial", "pageable-async-copy/torch/bad", "evidence", "light", 1300),
)


def main() -> None:
    """Write docs/report-NAME.png and docs/fleet.png."""
    browser = chrome(WIDTH, 900)
    with tempfile.TemporaryDirectory() as folder:
        for shot in SHOTS:
            path = ROOT / "sample_traces" / f"{shot.sample}.sqlite"
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
            browser.save_screenshot(str(ROOT / "docs" / f"report-{shot.name}.png"))
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        size = {"width": WIDTH, "height": 1340, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        page.write_text(fleet_page.page(ranks()), encoding="utf-8")
        open_page(browser, page)
        browser.save_screenshot(str(ROOT / "docs" / "fleet.png"))
    browser.quit()


def ranks() -> Fleet:
    """Stored samples as if they were the ranks of one run."""
    judged: dict[str, engine.Report] = {}
    for sample in RANKS:
        trace = open_trace(ROOT / "sample_traces" / "extra" / f"{sample}.sqlite")
        judged[sample] = engine.lint(trace, all_rules())
        trace.close()
    samples = [RANKS[(number % 8 == 5) + 2 * (number == 19)] for number in range(32)]
    return fleet([(f"rank{n}.sqlite", judged[s]) for n, s in enumerate(samples)])


if __name__ == "__main__":
    main()

"""Size, loading time and zoom times of report pages, in headless Chromium.

    .venv/bin/python benchmarks/report.py [--dir DIR]

Makes traces of 1e4 and 1e6 kernels (kept in --dir), writes their pages, and loads
both in turns. "ready" is from navigation to the first drawn and decoded timeline; a
zoom is from the end of a drag to the frame that shows its result. Ends with 1 if a
goal is missed; times mean something only on a quiet machine with two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from selenium import webdriver

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from browser import chrome, open_page  # noqa: E402

SIZES = (10_000, 1_000_000)
ROUNDS = 5
ZOOMS = 24
MAX_BASE, MAX_PER_INTERVAL = 5.5e6, 7.0
MAX_READY = 2.0
MAX_ZOOM_MEDIAN, MAX_ZOOM_WORST = 100.0, 250.0
ZOOM = """
const [from, to, done] = arguments;
const plot = document.getElementById("plot");
const box = plot.getBoundingClientRect(), before = plot.dataset.draws;
const side = 264, inner = box.width - side - 16;
const send = (type, share) => plot.dispatchEvent(new MouseEvent(type, {
  bubbles: true, button: 0,
  clientX: box.left + side + share * inner, clientY: box.top + 60,
}));
const began = performance.now();
if (from === null) {
  plot.dispatchEvent(new KeyboardEvent("keydown", { key: "0", bubbles: true }));
} else {
  send("mousedown", from);
  send("mousemove", to);
  send("mouseup", to);
}
const look = () => plot.dataset.draws === before
  ? setTimeout(look, 1)
  : requestAnimationFrame(() => setTimeout(() => done(performance.now() - began), 0));
look();
"""


class Measured(NamedTuple):
    """One page: bytes, intervals in it, and times in ms."""

    size: int
    intervals: int
    ready: list[float]
    zooms: list[float]
    heap_mb: float


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="where to keep traces and pages")
    folder = parser.parse_args().dir or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    pages = {size: _page(folder, size) for size in SIZES}
    ready: dict[int, list[float]] = {size: [] for size in SIZES}
    zooms: dict[int, list[float]] = {size: [] for size in SIZES}
    heap = dict.fromkeys(SIZES, 0.0)
    for _ in range(ROUNDS):
        for size, page in pages.items():
            browser = chrome()
            try:
                open_page(browser, page, seconds=120)
                root = "return Number(document.documentElement.dataset.ready)"
                ready[size].append(browser.execute_script(root))
                if len(ready[size]) == ROUNDS:
                    zooms[size] = _zooms(browser)
                    used = "return performance.memory.usedJSHeapSize"
                    heap[size] = browser.execute_script(used) / 1e6
            finally:
                browser.quit()
    results = {
        size: Measured(
            page.stat().st_size, _held(page), ready[size], zooms[size], heap[size]
        )
        for size, page in pages.items()
    }
    missed = 0
    for size, found in results.items():
        limit = MAX_BASE + MAX_PER_INTERVAL * found.intervals
        median, worst = statistics.median(found.zooms), max(found.zooms)
        print(
            f"{size:>9,} kernels: {found.size / 1e6:.2f} MB with {found.intervals:,} "
            f"intervals (at most {limit / 1e6:.2f}), ready "
            f"{statistics.median(found.ready):,.0f} ms, zoom median {median:.0f} ms, "
            f"worst {worst:.0f} ms, heap {found.heap_mb:.0f} MB"
        )
        missed += found.size > limit
        missed += median > MAX_ZOOM_MEDIAN or worst > MAX_ZOOM_WORST
    small, large = (statistics.median(results[size].ready) for size in SIZES)
    print(f"ready ratio {large / small:.2f}, at most {MAX_READY}")
    return int(missed + (large > MAX_READY * small) > 0)


def _page(folder: Path, size: int) -> Path:
    trace, page = folder / f"{size}.sqlite", folder / f"{size}.html"
    if not trace.exists():
        _run("benchmarks/make_trace.py", str(trace), "--kernels", str(size))
    _run("-m", "streamlint", "report", str(trace), "-o", str(page))
    return page


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True)


def _held(page: Path) -> int:
    """Intervals in the page, those of replayed schedules included."""
    text = page.read_text(encoding="utf-8")
    head = text.partition('id="data">')[2].partition("</script>")[0]
    return sum(capture["held"] for capture in json.loads(head)["captures"])


def _zooms(browser: webdriver.Chrome) -> list[float]:
    """Drags over a quarter of the view, down to microseconds, and back to all."""
    times: list[float] = []
    for number in range(ZOOMS):
        start = (0.1, 0.35, 0.6)[number // 8]
        back = number % 8 == 7
        places = (None, None) if back else (start, start + 0.25)
        times.append(float(browser.execute_async_script(ZOOM, *places)))
    return times


if __name__ == "__main__":
    sys.exit(main())

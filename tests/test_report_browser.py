"""Report pages in a real browser: headless Chrome or Chromium, without network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chrome, found, open_page, wait_for
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from tracebuilder import TraceBuilder

from streamlint import engine
from streamlint.errors import TraceError
from streamlint.fleet import fleet
from streamlint.registry import all_rules
from streamlint.reporters import fleet_page, html, packing, timeline
from streamlint.reporters.timeline import capture
from streamlint.suppression import Allowance, Policy, Saving
from streamlint.trace import open_trace

SAMPLES = Path(__file__).parents[1] / "sample_traces" / "extra"
LEGACY, FIXED = SAMPLES / "legacy.sqlite", SAMPLES / "legacy_fix.sqlite"
SIDE, EDGE, AXIS, ROW = 264, 16, 30, 22
"""Where the page draws its rows, in pixels."""
TIMES = "\N{MULTIPLICATION SIGN}"

pytestmark = [
    # One worker starts one browser for all tests here.
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(
        found() is None and not os.environ.get("CI"),
        reason="no Chrome or Chromium is installed here",
    ),
    # selenium leaves its connection to the driver to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    driver = chrome()
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0}
    offline |= {"downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    yield driver
    driver.quit()


def write_page(target: Path, *traces: Path) -> Path:
    captures = []
    for path in traces:
        trace = open_trace(path)
        captures.append(capture(trace, engine.lint(trace, all_rules())))
        trace.close()
    target.write_text(html.page(captures), encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def legacy(pages: Path) -> Path:
    return write_page(pages / "legacy.html", LEGACY)


def no_messages(driver: Chrome) -> None:
    assert driver.get_log("browser") == []  # type: ignore[no-untyped-call]


def view(driver: Chrome) -> tuple[float, float]:
    text = driver.find_element(By.ID, "plot").get_attribute("data-view")
    assert text
    first, last = map(float, text.split())
    return first, last


def settled(driver: Chrome, action: Any) -> None:
    """Do something and wait until the timeline is drawn again."""
    plot = "document.getElementById('plot').dataset.draws"
    before = driver.execute_script(f"return {plot}")
    action()
    wait_for(driver, f"return {plot} !== '{before}'")


def choose(driver: Chrome, number: int = 0) -> None:
    buttons = driver.find_elements(By.CSS_SELECTOR, "#findings-table tbody button")
    settled(driver, buttons[number].click)


def data(driver: Chrome) -> Any:
    text = driver.execute_script("return document.getElementById('data').textContent")
    return json.loads(text)["captures"][0]


def row_of(driver: Chrome, label: str) -> int:
    rows = driver.find_elements(By.CSS_SELECTOR, "#labels > div")
    return next(i for i, row in enumerate(rows) if label in (row.text or ""))


def hover(driver: Chrome, row: int, time: float) -> str:
    """The tooltip at a time in a row."""
    plot = driver.find_element(By.ID, "plot")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    first, last = view(driver)
    width = plot.size["width"] - SIDE - EDGE
    x = SIDE + width * (time - first) / (last - first) - plot.size["width"] / 2
    y = AXIS + ROW * (row + 0.5) - plot.size["height"] / 2
    ActionChains(driver).move_to_element_with_offset(plot, round(x), round(y)).perform()
    return driver.find_element(By.ID, "tip").text


def test_it_loads_offline_without_a_message(browser: Chrome, legacy: Path) -> None:
    open_page(browser, legacy)
    no_messages(browser)
    assert browser.execute_script("return navigator.onLine") is False
    assert "legacy-null-stream-barrier" in browser.find_element(By.ID, "findings").text
    loaded = "return performance.getEntriesByType('resource').map(e => e.name)"
    names = browser.execute_script(loaded)
    assert [name for name in names if not name.startswith(("data:", "blob:"))] == []


def test_the_first_finding_zooms_to_a_barrier(browser: Chrome, legacy: Path) -> None:
    open_page(browser, legacy)
    whole = view(browser)
    choose(browser)
    first, last = view(browser)
    assert last - first < (whole[1] - whole[0]) / 3
    trace = open_trace(LEGACY)
    null = trace.gpu_ops.filter(stream_kind="null")
    inside = null.filter((null["start_ns"] >= first) & (null["end_ns"] <= last))
    trace.close()
    assert inside.height >= 1
    evidence = data(browser)["findings"][0]["evidence"][0]
    assert first <= evidence["start"] < evidence["end"] <= last
    marks = browser.execute_script(
        "return document.getElementById('plot').layout.shapes"
        ".filter(s => s.type === 'rect' && s.yref === 'y' && s.line.width > 2)"
        ".map(s => [s.x0, s.x1])"
    )
    assert [evidence["end"]] == [x0 for x0, _ in marks if x0 == evidence["end"]]
    panel = browser.find_element(By.ID, "chosen").text
    assert "held-back operation" in panel
    assert "host call that issued it" in panel
    assert "held it back" in panel
    no_messages(browser)


def test_nothing_of_the_former_view_stays(browser: Chrome, legacy: Path) -> None:
    open_page(browser, legacy)
    count = (
        "const plot = document.getElementById('plot');"
        "return [plot.querySelectorAll('.shapelayer path').length,"
        " plot.layout.shapes.length]"
    )
    choose(browser)
    for button in ("savings", "evidence"):
        settled(browser, browser.find_element(By.ID, button).click)
        drawn, wanted = browser.execute_script(count)
        assert drawn == wanted


def test_before_and_after_of_legacy_show_a_millisecond(
    browser: Chrome, legacy: Path
) -> None:
    open_page(browser, legacy)
    choose(browser)
    labels = browser.find_element(By.ID, "labels").text
    assert "replayed without legacy-null-stream-barrier" in labels
    assert labels.count("stream 13") == 2
    settled(browser, browser.find_element(By.ID, "savings").click)
    note = browser.execute_script(
        "return document.getElementById('plot').layout.annotations"
        ".map(a => a.text).find(t => t.includes('saved'))"
    )
    amount = float(note.removeprefix("<b>").split(" ms saved")[0])
    assert 0.9 <= amount <= 1.1
    assert f"{amount:.2f} ms saved" in browser.find_element(By.ID, "chosen").text
    first, last = view(browser)
    start, end = data(browser)["work"]
    assert first < start < end < last


def test_two_captures_share_an_axis(browser: Chrome, pages: Path) -> None:
    open_page(browser, write_page(pages / "two.html", LEGACY, FIXED))
    table = browser.find_element(By.ID, "findings-table")
    assert ["gone", "legacy-null-stream-barrier"] in [
        [row.text.split()[0], row.find_element(By.TAG_NAME, "button").text]
        for row in table.find_elements(By.CSS_SELECTOR, "tbody tr")
    ]
    labels = browser.find_element(By.ID, "labels").text
    assert "before: legacy.sqlite" in labels
    assert "after: legacy_fix.sqlite" in labels
    notes = browser.execute_script(
        "return document.getElementById('plot').layout.annotations.map(a => a.text)"
    )
    assert any("1.0" in note and "ms saved" in note for note in notes)
    choose(browser)
    no_messages(browser)


def test_hovering_tells_everything_about_an_operation(
    browser: Chrome, pages: Path, tmp_path: Path
) -> None:
    b = TraceBuilder()
    b.stream(13, flag=2)
    launch = b.new_id()
    b.memcpy("HtoD", 4 * 2**20, src="pageable", stream=13, start=100, end=300)
    b.kernel(
        "step<int>(float *)",
        stream=13,
        start=400,
        end=600,
        grid=(7, 2, 1),
        block=(64, 1, 1),
        issue=(380, 385),
    )
    page = write_page(pages / "hover.html", b.write(tmp_path / "t.sqlite"))
    open_page(browser, page)
    row = row_of(browser, "stream 13")
    copy = hover(browser, row, 200_000)
    assert "HtoD" in copy
    assert "200.000 us" in copy
    assert "4.00 MiB, 20.97 GB/s" in copy
    assert "pageable memory to device memory" in copy
    kernel = hover(browser, row, 500_000)
    assert "step<int>(float *)" in kernel
    assert "grid 7 x 2 x 1, block 64 x 1 x 1" in kernel.replace(TIMES, "x")
    assert "200.000 us" in kernel
    assert f"correlation {launch + 2}: cudaLaunchKernel on thread 101" in kernel
    no_messages(browser)


def test_hostile_names_are_text(browser: Chrome, pages: Path, tmp_path: Path) -> None:
    names = (
        "</script><script>window.hacked=1</script>",
        "<img src=x onerror='window.hacked=1'>",
        "<a href='javascript:window.hacked=1'>x</a><b>bold</b>&lt;i&gt;",
    )
    b = TraceBuilder()
    b.stream(13)
    for i, name in enumerate(names, start=1):
        b.kernel(name, stream=13, start=1_000 * i, end=1_000 * i + 900)
        b.kernel(name, stream=7, start=1_000 * i + 900, end=1_000 * i + 990)
        b.nvtx(name, 1_000 * i, 1_000 * i + 995)
    page = write_page(pages / "hostile.html", b.write(tmp_path / "<i>&.sqlite"))
    open_page(browser, page)
    row = row_of(browser, "stream 13")
    for i, name in enumerate(names, start=1):
        assert name in hover(browser, row, 1_000_000 * i + 400_000)
    browser.find_element(By.CSS_SELECTOR, "#list summary").click()
    wait_for(browser, "return document.querySelector('#list table') !== null")
    assert names[0] in browser.find_element(By.ID, "list").text
    if browser.find_elements(By.CSS_SELECTOR, "#findings-table tbody button"):
        choose(browser)
    assert browser.execute_script("return window.hacked") is None
    assert browser.find_elements(By.CSS_SELECTOR, "main img, main b, svg a") == []
    drawn = browser.execute_script(
        "return [...document.querySelectorAll('#plot .textpoint')]"
        ".map(t => t.textContent)"
    )
    assert any("</script>" in text or "<img" in text for text in drawn)
    no_messages(browser)


def test_the_keyboard_reaches_everything(browser: Chrome, legacy: Path) -> None:
    open_page(browser, legacy)
    button = browser.find_element(By.CSS_SELECTOR, "#findings-table tbody button")
    for _ in range(12):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        if browser.switch_to.active_element == button:
            break
    assert browser.switch_to.active_element == button
    settled(browser, lambda: ActionChains(browser).send_keys(Keys.ENTER).perform())
    assert button.get_attribute("aria-pressed") == "true"
    evidence = view(browser)
    plot = browser.find_element(By.ID, "plot")
    browser.execute_script("arguments[0].focus()", plot)
    settled(browser, lambda: ActionChains(browser).send_keys("-").perform())
    wide = view(browser)
    assert wide[1] - wide[0] == pytest.approx(2 * (evidence[1] - evidence[0]))
    keys = (Keys.ARROW_RIGHT, "0", "e")
    for key in keys:
        settled(browser, lambda key=key: ActionChains(browser).send_keys(key).perform())
    assert view(browser) == pytest.approx(evidence)
    said = browser.find_element(By.ID, "view")
    assert said.get_attribute("role") == "status"
    assert "drawn one by one" in said.text
    table = browser.find_element(By.CSS_SELECTOR, "#findings-table table")
    heads = [cell.text for cell in table.find_elements(By.CSS_SELECTOR, "th")]
    assert heads == ["Severity", "Finding", "Costs", "Share", "Where"]


def test_dragging_zooms_and_a_double_click_goes_back(
    browser: Chrome, legacy: Path
) -> None:
    open_page(browser, legacy)
    whole = view(browser)
    plot = browser.find_element(By.ID, "plot")
    width = plot.size["width"] - SIDE - EDGE
    left = SIDE - plot.size["width"] / 2

    def drag() -> None:
        chain = ActionChains(browser)
        chain.move_to_element_with_offset(plot, round(left + 0.25 * width), 0)
        chain.click_and_hold()
        chain.move_to_element_with_offset(plot, round(left + 0.75 * width), 0)
        chain.release().perform()

    settled(browser, drag)
    first, last = view(browser)
    assert last - first == pytest.approx((whole[1] - whole[0]) / 2, rel=0.02)
    settled(browser, lambda: ActionChains(browser).double_click(plot).perform())
    assert view(browser) == pytest.approx(whole)


def test_busy_shares_are_exact_where_bars_are_too_many(
    browser: Chrome, pages: Path, tmp_path: Path
) -> None:
    b = TraceBuilder()
    b.stream(13, flag=2)
    # Busy 30 % of every 10 us in the first half, 60 % in the second.
    spans: list[tuple[int, int]] = []
    for i in range(4_000):
        length = 3 if i < 2_000 else 6
        start, end = 10 * i + 5, 10 * i + 5 + length
        b.kernel("k", stream=13, start=start, end=end, issue=None)
        spans.append((1_000 * start, 1_000 * end))
    page = write_page(pages / "many.html", b.write(tmp_path / "many.sqlite"))
    open_page(browser, page)
    said = browser.find_element(By.ID, "view").text
    assert "exact busy share of every pixel column" in said
    assert "for 7,999 intervals" in said  # kernels and the gaps between them
    row = row_of(browser, "stream 13")
    first, last = view(browser)
    columns = browser.find_element(By.ID, "plot").size["width"] - SIDE - EDGE
    step = (last - first) / columns
    for time, share in ((10_000_000, 0.3), (30_000_000, 0.6)):
        words = hover(browser, row, time)
        shown = float(words.split(" %")[0])
        place = round((time - first) / step)
        possible = []
        for column in range(place - 2, place + 3):
            left = first + column * step
            busy = sum(
                max(0, min(end, left + step) - max(start, left)) for start, end in spans
            )
            possible.append(round(100 * busy / step, 1))
        assert shown in possible
        assert abs(shown - 100 * share) < 12
    browser.find_element(By.CSS_SELECTOR, "#list summary").click()
    wait_for(browser, "return document.querySelector('#list table') !== null")
    line = next(
        text
        for text in browser.find_element(By.ID, "list").text.splitlines()
        if "stream 13" in text
    )
    assert "18.0 ms" in line
    no_messages(browser)


def test_a_huge_trace_shows_an_overview_and_its_findings_in_full(
    browser: Chrome, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "MAX_DETAIL", 50)
    monkeypatch.setattr(packing, "MAX_WINDOWED", 60)
    monkeypatch.setattr(packing, "BINS", 512)
    open_page(browser, write_page(pages / "huge.html", LEGACY))
    assert (
        "an overview, the busy time in bins of"
        in browser.find_element(By.ID, "view").text
    )
    assert "around the findings" in browser.find_element(By.ID, "notes").text
    choose(browser)
    recorded = [row for row in browser.find_elements(By.CSS_SELECTOR, "#labels .lane")]
    assert len(recorded) > 4
    assert hover(browser, row_of(browser, "stream 7"), sum(view(browser)) / 2) or True
    no_messages(browser)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_and_print_draw(
    browser: Chrome, legacy: Path, scheme: str
) -> None:
    feature = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": feature})
    open_page(browser, legacy)
    ground = "return getComputedStyle(document.body).backgroundColor"
    red = int(browser.execute_script(ground).split("(")[1].split(",")[0])
    assert (red > 128) is (scheme == "light")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    wait_for(browser, "return matchMedia('print').matches")
    assert browser.execute_script(ground) == "rgb(255, 255, 255)"
    assert not browser.find_element(By.ID, "tools").is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    no_messages(browser)


def test_findings_that_are_not_shown_are_counted(browser: Chrome, pages: Path) -> None:
    known = Allowance("legacy-null-stream-barrier", "known", "a test")
    captures = []
    for policy in (Policy(allowances=(known,)), Policy(Saving(share=1.0))):
        trace = open_trace(LEGACY)
        captures.append(capture(trace, engine.lint(trace, all_rules(), policy=policy)))
        trace.close()
    page = pages / "hidden.html"
    page.write_text(html.page(captures), encoding="utf-8")
    open_page(browser, page)
    text = browser.find_element(By.TAG_NAME, "body").text
    assert "found nothing; 1 finding suppressed" in text
    assert "found nothing; 1 finding below min-saving" in text
    no_messages(browser)


# Many traces -----------------------------------------------------------------------


def test_the_page_of_many_ranks(browser: Chrome, pages: Path) -> None:
    reports: list[tuple[str, engine.Report | TraceError]] = []
    name = "<i>t&amp;"
    for number, path in enumerate((LEGACY, FIXED, LEGACY)):
        trace = open_trace(path)
        reports.append((f"{name}{number}.sqlite", engine.lint(trace, all_rules())))
        trace.close()
    reports.append((f"{name}3.sqlite", TraceError("cut off", hint="copy it again")))
    target = pages / "fleet.html"
    target.write_text(fleet_page.page(fleet(reports)), encoding="utf-8")
    open_page(browser, target)
    no_messages(browser)
    text = browser.find_element(By.TAG_NAME, "body").text
    assert "on 2 of 3 traces: <i>t&amp;0.sqlite, <i>t&amp;2.sqlite" in text
    assert "<i>t&amp;3.sqlite (<i>t&amp;3.sqlite): error" in text
    assert browser.find_element(By.ID, "map").get_dom_attribute("data-rows") == "2"
    ticks = browser.find_elements(By.CSS_SELECTOR, "#map .xtick text")
    assert [tick.text for tick in ticks] == [f"{name}{n}.sqlite" for n in range(4)]
    assert browser.find_elements(By.CSS_SELECTOR, "#chosen .plotly")
    browser.find_elements(By.CSS_SELECTOR, "#findings-table button")[1].click()
    chosen = browser.find_element(By.ID, "chosen").text
    assert chosen.startswith("underfilled-serial-kernels: only <i>t&amp;1.sqlite")
    assert not browser.find_elements(By.CSS_SELECTOR, "#chosen .plotly")
    no_messages(browser)

"""Headless Chrome or Chromium for tests and benchmarks of report pages."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from selenium import webdriver

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def found() -> str | None:
    """The browser that is installed here, if any."""
    named = os.environ.get("CHROME")
    return named or next(filter(None, map(shutil.which, BROWSERS)), None)


def chrome(width: int = 1400, height: int = 1100, *arguments: str) -> webdriver.Chrome:
    """A fresh headless browser that keeps its console's messages."""
    options = webdriver.ChromeOptions()
    for argument in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        f"--window-size={width},{height}",
        *arguments,
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    binary = found()
    assert binary is not None
    options.binary_location = binary
    driver = shutil.which("chromedriver")
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def open_page(browser: webdriver.Chrome, page: Path, seconds: float = 60) -> None:
    """Load a report page and wait until its timeline is drawn."""
    browser.get(page.as_uri())
    ready = "return document.documentElement.dataset.ready !== undefined"
    wait_for(browser, ready, seconds)


def wait_for(browser: webdriver.Chrome, script: str, seconds: float = 20) -> None:
    """Wait until a script returns something true."""
    until = time.monotonic() + seconds
    while not browser.execute_script(script):
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds:.0f} s: {script}")
        time.sleep(0.02)

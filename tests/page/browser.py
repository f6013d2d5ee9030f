"""A real Chromium for the page's tests: Playwright drives the one that is installed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NARROW = {"width": 360, "height": 740}
WIDE = {"width": 1100, "height": 900}


def missing() -> str | None:
    """Why there is no browser; None if there is."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "the extra sgl-kvc[page] is not installed"
    return None if _path() else "no Chromium is installed"


def _path() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium, as Playwright's `Browser`."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_path(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def compare(page: Any) -> None:
    """Press *Ask* and wait until every column has answered."""
    page.click("#ask")
    page.wait_for_selector("#compare-status:has-text(' answered.')")


def look(page: Any) -> None:
    """Open *What was kept*, ask, and wait until it is drawn."""
    page.click("#tab-kept")
    page.click("#look")
    page.wait_for_selector("#kept-result", state="visible")


def live(page: Any) -> None:
    """Open *Live* and wait for the first numbers."""
    page.click("#tab-live")
    page.wait_for_selector("#numbers dd")


def looked(page: Any, name: str) -> Any:
    """What the view of what was kept remembers by `name`."""
    return page.evaluate("""async name => (await import("./page/kept.js")).looked[name]""", name)

"""Screenshots of the page for the docs: ``python -m tests.page.screenshots URL FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from tests.page.browser import NARROW, chromium, compare, live, look


def main(url: str, folder: Path) -> None:
    with chromium() as browser:
        wide = {"width": 800, "height": 760}
        for name, step, options in (
            ("page-compare", compare, {"viewport": wide}),
            ("page-kept", look, {"viewport": wide, "color_scheme": "dark"}),
            ("page-live", live, {"viewport": NARROW}),
        ):
            page = browser.new_page(**options)
            page.goto(url)
            page.wait_for_selector("#server:has-text('Serving')")
            step(page)
            path = folder / f"{name}.png"
            page.screenshot(path=path, full_page=True)
            page.close()
            Image.open(path).quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""The gateway's page, driven in Chromium, with the real model behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kvc_server.page import FILES

from sgl_kvc.spec import WORKER_KEYS
from tests.gateways import Gateway, serve
from tests.page import browser
from tests.page.browser import NARROW, WIDE, compare, live, look, looked
from tests.server.tenants import Keys
from tests.sgl_kvc.test_explain import kept_positions

needs_browser = pytest.mark.skipif(browser.missing() is not None, reason=browser.missing() or "")
CODE = "tango seven kilo"


@pytest.mark.parametrize("path", FILES)
def test_files_need_nothing_from_elsewhere(gateway: Gateway, path: str) -> None:
    answer = httpx.get(gateway.url + path)
    assert answer.headers["content-type"].startswith(FILES[path][1])
    assert answer.headers["content-security-policy"].startswith("default-src 'none'; ")
    assert not re.search(r"https?:|//\w+\.|<style|style=|onclick=|innerHTML|eval\(", answer.text)
    assert httpx.head(gateway.url + path).status_code == 200


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.chromium() as running:
        yield running


@pytest.fixture
def opened(gateway: Gateway, chromium: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, of the colour scheme and width that the test asks for; it may not complain."""
    options = {"viewport": WIDE} | getattr(request, "param", {})
    page = chromium.new_page(**options)
    complaints: list[str] = []
    page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    asked: list[str] = []
    page.on("request", lambda each: asked.append(each.url))
    page.goto(gateway.url)
    page.wait_for_selector("#server:has-text('Serving')")
    yield page
    page.close()
    assert complaints == []
    assert asked
    assert [url for url in asked if not url.startswith((gateway.url, "data:", "blob:"))] == []


def held(card: str) -> list[float]:
    """KiB of memory before and after, as a card says them."""
    units = {"KiB": 1, "MiB": 1024}
    found = re.findall(r"memory (?:before|after)\s+([\d.,]+) (\w+)", card)
    return [float(number.replace(",", "")) * units[unit] for number, unit in found]


@needs_browser
def test_the_first_click_compares(opened: Any) -> None:
    compare(opened)
    assert opened.inner_text("#compare-status") == "4 of 4 answered."
    cards = [card.inner_text() for card in opened.query_selector_all("#answers article")]
    full, eighth, recent, high = cards
    assert full.startswith("uncompressed")
    for card in (full, eighth, high):
        assert CODE in card
    assert CODE not in recent, "the newest KVs alone do not hold what is asked for"
    assert len(set(held(full))) == 1
    before, after = held(eighth)
    assert before == held(full)[0]
    assert before / after == pytest.approx(8, rel=0.2)
    for card in cards:
        assert re.search(r"first token\s+[\d.]+ m?s", card)
        assert re.search(r"tokens per second\s+[\d,]+", card)


@needs_browser
def test_what_was_kept_is_drawn_from_the_report(opened: Any) -> None:
    look(opened)
    assert CODE in opened.inner_text("#kept-status")
    explain = looked(opened, "explain")
    cells = opened.query_selector_all("#map [role=gridcell]")
    assert len(cells) == explain["layers"] * explain["heads"] == len(explain["kept"])
    tokens = opened.query_selector_all("#tokens span")
    assert len(tokens) == len(looked(opened, "tokens")) > explain["end"]
    outside = [*range(explain["begin"]), *range(explain["end"], len(tokens))]
    positions = kept_positions(explain)
    for head in (0, len(cells) - 1):
        cells[head].click()
        assert cells[head].get_attribute("aria-selected") == "true"
        shaded = opened.evaluate(
            "[...document.querySelectorAll('#tokens span')].flatMap((e, i) => "
            "e.className === 'k8' ? [i] : [])"
        )
        assert shaded == sorted(positions[head] + outside)
    opened.click("#all-heads")
    counts = opened.evaluate(
        "[...document.querySelectorAll('#tokens span')].map(e => +e.dataset.told.split(' ')[2])"
    )
    assert sum(counts) == sum(explain["kept"]) + len(outside) * len(cells)
    words = [text.strip() for text in looked(opened, "tokens")]
    code = words.index("tango")
    assert sum(counts[code : code + 3]) / 3 > sum(counts) / len(counts), "the answer is kept more"


@needs_browser
def test_live_numbers_are_the_metrics(opened: Any, gateway: Gateway) -> None:
    compare(opened)
    live(opened)
    numbers = dict(
        zip(
            opened.locator("#numbers dt").all_inner_texts(),
            opened.locator("#numbers dd").all_inner_texts(),
            strict=True,
        )
    )
    assert numbers["worker"] == "serves"
    assert re.fullmatch(r"[1-9][\d.,]* [KMG]iB", numbers["freed"])
    opened.wait_for_timeout(2500)
    assert opened.inner_text("#live-status").startswith("Read every two seconds")


@needs_browser
def test_it_works_from_the_keyboard(opened: Any) -> None:
    opened.focus("#tab-compare")
    opened.keyboard.press("ArrowRight")
    assert opened.is_visible("#kept")
    look(opened)
    opened.focus("#map [role=gridcell]")
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("Enter")
    assert looked(opened, "head") == looked(opened, "explain")["heads"]
    assert opened.evaluate("document.activeElement.dataset.head") == str(looked(opened, "head"))
    opened.focus("#tab-kept")
    opened.keyboard.press("Home")
    assert opened.is_visible("#compare")


@needs_browser
@pytest.mark.parametrize(
    "opened",
    [{}, {"color_scheme": "dark"}, {"viewport": NARROW}],
    ids=["light", "dark", "narrow"],
    indirect=True,
)
def test_everybody_can_read_it(opened: Any) -> None:
    axe_module = pytest.importorskip("axe_playwright_python.sync_playwright")
    axe, faults = axe_module.Axe(), []
    for step in (compare, look, live):
        step(opened)
        width = opened.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert width <= 0, f"{step.__name__}: {width} px to scroll sideways"
        for fault in axe.run(opened).response["violations"]:
            faults.append((step.__name__, fault["impact"], fault["id"], fault["nodes"][0]["html"]))
    assert faults == []


@pytest.fixture
def guarded(gateway: Gateway, tmp_path: Path) -> Iterator[tuple[Gateway, Keys]]:
    """A gateway with keys, before the same worker."""
    keys = Keys(tmp_path / "keys", someone={}, operator={"operator": True})
    worker_key = gateway.worker_headers()["Authorization"].removeprefix("Bearer ")
    env = {WORKER_KEYS["api_key"]: worker_key}
    arguments = ("--worker-url", gateway.worker_url(), "--keys", str(keys.path))
    with serve(tmp_path / "log", *arguments, **env) as running:
        running.wait_ready()
        yield running, keys


@needs_browser
def test_where_there_are_keys_it_asks_for_one(chromium: Any, guarded: tuple[Gateway, Keys]) -> None:
    gateway, keys = guarded
    page = chromium.new_page()
    page.goto(gateway.url)
    page.wait_for_selector("#server:has-text('asks for an API key')")
    for key, told in (("wrong", "asks for"), (keys.keys["someone"], "Serving")):
        page.fill("#key", key)
        page.press("#key", "Enter")
        page.wait_for_selector(f"#server:has-text('{told}')")
    assert page.is_hidden("#key-form")
    compare(page)
    assert page.inner_text("#compare-status") == "4 of 4 answered."
    look(page)
    page.click("#tab-live")
    page.wait_for_selector("#live-status:has-text('may not read metrics')")
    kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie.length]")
    assert kept == [0, 0, 0]
    page.reload()
    page.wait_for_selector("#server:has-text('asks for an API key')")
    page.fill("#key", keys.keys["operator"])
    page.press("#key", "Enter")
    live(page)
    page.wait_for_selector("#pool-kinds dd")
    kinds = page.locator("#pool-kinds dt").all_inner_texts()
    assert {"tree", "segment", "tail", "free"} <= set(kinds)
    page.close()


@needs_browser
@pytest.mark.parametrize("opened", [{"color_scheme": "dark"}], indirect=True)
def test_dark_is_dark(opened: Any) -> None:
    colour = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", colour)[:3])) < 64


@needs_browser
def test_eight_thousand_tokens_of_a_large_model_are_drawn_at_once(opened: Any) -> None:
    """32 layers with 8 heads; a click has to be answered within a second."""
    took = opened.evaluate(
        """async () => {
          const { looked, drawMap, drawTokens } = await import("./page/kept.js");
          const [layers, heads, end] = [32, 8, 8192];
          Object.assign(looked, {
            explain: { layers, heads, begin: 0, end, kept: Array(256).fill(1024) },
            width: end / 8, bits: new Uint8Array(256 * end / 8).fill(17),
            tokens: Array(end).fill(" token"), head: null,
          });
          document.getElementById("tab-kept").click();
          document.getElementById("kept-result").hidden = false;
          const begin = performance.now();
          drawMap(); drawTokens(); document.getElementById("tokens").offsetHeight;
          return performance.now() - begin;
        }"""
    )
    assert opened.locator("#tokens span").count() == 8192
    assert took < 1000

"""Light and dark, wide and narrow, with and without eyes: computed by a real browser."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.service.web.conftest import NewContext, Site, Watch, drawn

pytestmark = pytest.mark.browser
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, ground) => top.slice(0, 3).map((v, i) => v * top[3] + ground[i] * (1 - top[3]));
  const ground = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.unshift(rgba(getComputedStyle(e).backgroundColor));
    return layers.reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || element.closest("script, noscript, canvas, datalist")) continue;
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const behind = ground(element);
    const [a, b] = [light(over(rgba(getComputedStyle(element).color), behind)), light(behind)].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), element.className + ": " + texts.currentNode.textContent.trim().slice(0, 40)]);
  }
  return found;
}"""
NAMELESS = """() => [...document.querySelectorAll(
    "a, button, input:not([type=hidden]), select, summary, meter, [role=img], [role=region]")]
  .filter((e) => e.checkVisibility())
  .filter((e) => !(e.textContent.trim() || e.getAttribute("aria-label") || e.labels?.length || e.caption))
  .map((e) => e.outerHTML.slice(0, 120))"""

FOCUSED = """() => {
  const focused = document.activeElement;
  return [focused.id || focused.textContent.trim(), getComputedStyle(focused).outlineStyle];
}"""


@pytest.fixture
def busy(site: Site) -> Site:
    """Everything that has a colour: both severities, a command, a silence, a healthy run."""
    site.step(1, {"reward.mean": 0.5, "entropy.mean": 0.3}, "math/healthy")
    site.step(1, {"reward.mean": 0.5, "grad.norm": 0.2, "length.mean": 100.0})
    incident = site.fall_ill()
    site.propose()
    body = {"run": "math/q", "rule": "silent_run", "for_s": 3600}
    assert site.http.post("/v1/silences", json=body).is_success
    site.fall_ill("math/warned")
    with site.rooms.store.write() as session:
        session.connection().exec_driver_sql("UPDATE runs SET verdict = 'warning' WHERE name = 'math/warned'")
        session.connection().exec_driver_sql(f"UPDATE incidents SET severity = 'warning' WHERE id <> '{incident}'")
    return site


PAGES = ("/", "/runs/math/q", "/runs/math/q/steps/2", "/runs/no/such", "/login", "/?q=nothing")


def open_page(page: Page, path: str) -> None:
    page.goto(path)
    if path == "/runs/math/q":
        drawn(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_stands_out_from_its_ground(busy: Site, new_context: NewContext, watch: Watch, theme: str) -> None:
    watch.expected.append("404")
    page = new_context(color_scheme=theme).new_page()
    seen = 0
    for path in PAGES:
        open_page(page, path)
        measured = page.evaluate(CONTRAST)
        seen += len(measured)
        assert [m for m in measured if m[0] < 4.5] == [], path
    assert seen > 150
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) == (theme == "dark")


def test_the_theme_is_chosen_kept_and_given_back_to_the_system(busy: Site, new_context: NewContext) -> None:
    page = new_context(color_scheme="light").new_page()
    open_page(page, "/runs/math/q")

    def paper() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    bright = paper()
    page.click("#theme")
    expect(page.locator("#theme")).to_have_text("theme: light")
    page.keyboard.press("t")
    expect(page.locator("#theme")).to_have_text("theme: dark")
    dark = paper()
    assert dark != bright
    page.goto("/")
    assert paper() == dark, "it was forgotten"
    page.keyboard.press("t")
    expect(page.locator("#theme")).to_have_text("theme: system")
    assert paper() == bright


@pytest.mark.parametrize("path", PAGES)
def test_a_narrow_screen_needs_no_sideways_scrolling(
    busy: Site, new_context: NewContext, watch: Watch, path: str
) -> None:
    watch.expected.append("404")
    page = new_context(width=360, height=740, has_touch=True, is_mobile=True).new_page()
    open_page(page, path)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    outside = page.evaluate(
        """() => [...document.querySelectorAll("main *")]
          .filter((e) => e.checkVisibility() && !e.closest(".scroll, pre, svg, thead, .unseen"))
          .filter((e) => e.getBoundingClientRect().right > 361).map((e) => e.outerHTML.slice(0, 100))"""
    )
    assert outside == []


@pytest.mark.parametrize("path", PAGES)
def test_everything_has_a_name_for_whoever_hears_the_page(busy: Site, page: Page, watch: Watch, path: str) -> None:
    watch.expected.append("404")
    open_page(page, path)
    assert page.evaluate(NAMELESS) == []
    assert page.locator("h1").count() == 1
    assert page.locator("main").count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids)), "an id twice"


def test_the_focus_goes_through_the_page_in_its_order_and_is_seen(busy: Site, page: Page) -> None:
    page.goto("/")
    order = []
    for _ in range(14):
        page.keyboard.press("Tab")
        order.append(page.evaluate(FOCUSED))
    names = [name for name, _ in order]
    assert names[:4] == ["Skip to the content", "Foreshock", "theme", "keys"]
    assert names.index("q") < names.index("status") < names.index("sort")
    assert all(outline != "none" for _, outline in order)

"""How quick the page is: `python -m benchmarks.pictures.speed`. Real service on SQLite, real Chromium, one machine.

For each page the median of `--times` visits: until the server had answered, until the first content was painted, until
every chart was drawn, and from a zoom until the new window was drawn. In milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page

from benchmarks.pictures.browser import browser
from benchmarks.pictures.life import TESTS
from foreshock_service.demo.processes import Service
from foreshock_service.store import migrate
from foreshock_service.store.engine import Store

sys.path.insert(0, str(TESTS / "service" / "web"))
from stored import add_run

RUNS, LONG = 200, 100_000
PAINT = """() => {
  const [visit] = performance.getEntriesByType("navigation");
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  return { answer: visit.responseEnd, paint: paint ? paint.startTime : NaN, bytes: visit.transferSize };
}"""
DRAWN = "#charts[data-state=drawn]"


def fill(path: Path) -> None:
    """200 runs of 120 steps and one of 100,000."""
    store = Store(f"sqlite:///{path}")
    migrate.upgrade(store)
    for i in range(RUNS - 1):
        add_run(store, f"fleet/run-{i:03}", 120, verdict=("critical", "warning", "healthy", "healthy")[i % 4])
    add_run(store, "math/long", LONG)
    store.close()


def visit(chromium: Browser, url: str, path: str) -> dict[str, float]:
    """One visit by somebody who was never here."""
    page = chromium.new_page(viewport={"width": 1440, "height": 900})
    try:
        page.goto(url + path)
        found: dict[str, float] = {}
        if path != "/":
            page.wait_for_selector(DRAWN)
            found["charts"] = float(page.get_attribute("#charts", "data-ms") or "nan")
            found["zoom"] = zoom(page)
        page.wait_for_timeout(150)
        return {**page.evaluate(PAINT), **found}
    finally:
        page.close()


def zoom(page: Page) -> float:
    """Into the middle tenth."""
    page.evaluate("document.getElementById('charts').dataset.ms = ''")
    last = int(page.get_attribute("#about", "data-last") or 0)
    page.fill("#from", str(round(0.45 * last)))
    page.fill("#to", str(round(0.55 * last)))
    page.locator("#to").blur()
    page.wait_for_selector("#charts:not([data-ms=''])")
    return float(page.get_attribute("#charts", "data-ms") or "nan")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        fill(Path(folder) / "foreshock.db")
        service = Service(Path(folder))
        service.start()
        try:
            for what, path in (
                (f"fleet of {RUNS}", "/"),
                ("120 steps", "/runs/fleet/run-001"),
                (f"{LONG:,} steps", "/runs/math/long"),
            ):
                visits = [visit(chromium, service.url, path) for _ in range(times)]
                row: dict[str, Any] = {k: statistics.median(v[k] for v in visits) for k in visits[0]}
                print(f"{what:>14}: " + ", ".join(f"{k} {round(v)}" for k, v in row.items()))
        finally:
            service.stop()


if __name__ == "__main__":
    main()

"""The pictures in the documentation: `make pictures`, about six minutes on two cores.

    python -m benchmarks.pictures train     # lab jobs, watched by a service on PostgreSQL and a Prometheus (once)
    python -m benchmarks.pictures shoot     # two more jobs under way, then the page and the boards (again and again)

Both without a word: one after the other. Exit status 1 where a panel of a board had nothing to show that should have.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page

from benchmarks.pictures import boards
from benchmarks.pictures.browser import browser
from benchmarks.pictures.life import Life
from dashboards import build

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
MAX_BYTES = 200_000
MAY_BE_EMPTY = {"pipeline": 1}
"""Losses: nothing was lost."""
MAX_HEIGHT = 1700
"""A taller board is cut at its rows."""
WIDE, TALL, NARROW = (1440, 900), (1440, 1560), (360, 740)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="benchmarks.pictures", description=__doc__)
    parser.add_argument("stage", nargs="?", choices=("train", "shoot"))
    parser.add_argument("--folder", type=Path, default=Path("/tmp/foreshock-pictures"), help="a short path")
    parser.add_argument("--seconds", type=float, default=1e9, help="train: begin no further job after so long")
    parser.add_argument("--out", type=Path, default=PICTURES)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with Life(given.folder) as life:
        if given.stage != "shoot" and not life.train(given.seconds):
            print("not all jobs were begun: call it again")
            return 1
        if given.stage == "train":
            return 0
        life.begin()
        with browser() as chromium:
            _page(life, chromium, given.out)
            poor = _boards(life, chromium, given.out)
    return 1 if poor else 0


def _page(life: Life, chromium: Browser, out: Path) -> None:
    for theme in ("light", "dark"):
        for page in _tab(life, chromium, theme, WIDE):
            page.goto("/")
            page.wait_for_selector("#live.on")
            page.wait_for_timeout(600)
            save(page.screenshot(), out / f"page-fleet-{theme}.png")
        for page in _tab(life, chromium, theme, TALL):
            _run(page, "demo/treated" if theme == "dark" else "demo/untreated")
            save(page.screenshot(), out / f"page-run-{theme}.png")
    for page in _tab(life, chromium, "light", WIDE):
        _run(page, "lab/stale-engine")
        save(page.screenshot(), out / "page-decide.png")
    for page in _tab(life, chromium, "light", NARROW):
        page.goto("/")
        page.wait_for_selector("#live.on")
        save(page.screenshot(), out / "page-fleet-narrow.png")
        _run(page, "demo/treated")
        page.evaluate("document.getElementById('charts').scrollIntoView({ block: 'start' })")
        page.wait_for_timeout(200)
        save(page.screenshot(), out / "page-run-narrow.png")


def _tab(life: Life, chromium: Browser, theme: str, size: tuple[int, int]) -> Iterator[Page]:
    context = chromium.new_context(
        base_url=life.service.url,
        color_scheme=theme,  # type: ignore[arg-type]
        viewport={"width": size[0], "height": size[1]},
    )
    yield context.new_page()
    context.close()


def _run(page: Page, name: str) -> None:
    page.goto(f"/runs/{name}")
    page.wait_for_selector("#charts[data-state=drawn]")
    page.wait_for_selector("#live.on")
    page.wait_for_timeout(400)


def _boards(life: Life, chromium: Browser, out: Path) -> bool:
    """True where a board had more empty panels than it may."""
    answers = boards.Answers(life)
    poor = False
    try:
        for name in build.BOARDS:
            text, empty = boards.document(name, answers)
            page = chromium.new_page(viewport={"width": 1540, "height": 900})
            page.set_content(text)
            page.wait_for_selector("body[data-ready]")
            for number, (top, height) in enumerate(_cuts(page), start=1):
                clip = {"x": 0.0, "y": top, "width": 1540.0, "height": height}
                png = page.screenshot(full_page=True, clip=clip)  # type: ignore[arg-type]
                save(png, out / f"board-{name.replace('_', '-')}{f'-{number}' if number > 1 else ''}.png")
            page.close()
            print(f"{name}: {empty} panels without data")
            poor |= empty > MAY_BE_EMPTY.get(name, 0)
    finally:
        answers.close()
    return poor


def _cuts(page: Page) -> list[tuple[float, float]]:
    """(top, height) of each part of the page that is not taller than MAX_HEIGHT, cut above rows of panels."""
    whole = float(page.evaluate("document.documentElement.scrollHeight"))
    rows = [float(y) for y in page.evaluate("[...document.querySelectorAll('.panel.row')].map((e) => e.offsetTop - 4)")]
    cuts = [0.0]
    for row, following in pairwise([*rows, whole]):
        if following - cuts[-1] > MAX_HEIGHT and row > cuts[-1]:
            cuts.append(row)
    return [(top, bottom - top) for top, bottom in pairwise([*cuts, whole])]


def save(png: bytes, path: Path) -> None:
    """With as many colours as fit into MAX_BYTES; of smaller size only where even few colours do not."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for scale in (1.0, 0.8, 0.65, 0.5):
        size = (round(image.width * scale), round(image.height * scale))
        scaled = image.resize(size, Image.Resampling.LANCZOS) if scale < 1 else image
        for colours in (None, 256, 96, 48):
            target = io.BytesIO()
            fewer = scaled if colours is None else scaled.quantize(colours, dither=Image.Dither.NONE)
            fewer.save(target, "PNG", optimize=True)
            if target.tell() <= MAX_BYTES:
                path.write_bytes(target.getvalue())
                print(f"{path.name}: {scaled.width} x {scaled.height}, {target.tell() // 1024} KiB")
                return
    raise RuntimeError(f"{path.name} does not fit into {MAX_BYTES} bytes")


if __name__ == "__main__":
    sys.exit(main())

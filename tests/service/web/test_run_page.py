"""A run's page in a real browser: curves with events on the step axis, zooming, following, words for each."""

from __future__ import annotations

import re
import time

import pytest
from playwright.sync_api import Page, expect

from foreshock_service.store.models import Checkpoint
from tests.service.web.conftest import Site, Watch, drawn, live
from tests.service.web.stored import SPIKE_AT, add_run

pytestmark = pytest.mark.browser
LABEL = "#chart-policy-kl_k2 .plot"


def label(page: Page, selector: str = LABEL) -> str:
    """What a screen reader says of a chart."""
    return page.locator(selector).get_attribute("aria-label") or ""


def test_every_chart_is_drawn_and_told_in_words_and_numbers(site: Site, page: Page) -> None:
    for step in range(1, 6):
        site.step(step, {"reward.mean": step / 10, "grad.norm": 0.5, "host.own": 3.0})
    page.goto("/runs/math/q?signal=host.own")
    drawn(page)
    for plot in page.locator(".plot").all():
        assert plot.get_attribute("role") == "img"
        assert "steps 1 to 5" in (plot.get_attribute("aria-label") or "")
        assert plot.locator("canvas").count() == 1
    words = label(page, "#chart-reward-mean .plot")
    assert "last 0.5, lowest 0.1 at step 1, highest 0.5 at step 5" in words
    assert page.locator("#chart-host-own").count() == 1
    page.click("#chart-reward-mean summary")
    expect(page.locator("#chart-reward-mean-numbers tbody tr")).to_have_count(5)
    page.locator("#chart-reward-mean-numbers a").first.click()
    page.wait_for_url("**/runs/math/q/steps/5?attempt=1")
    expect(page.get_by_role("row", name=re.compile("host.own"))).to_contain_text("3")


def test_new_steps_are_drawn_as_they_come(site: Site, page: Page) -> None:
    site.step(1, {"reward.mean": 0.5})
    site.step(2, {"reward.mean": 0.5})
    page.goto("/runs/math/q")
    drawn(page)
    live(page)
    site.step(3, {"reward.mean": 0.75})
    told = re.compile("highest 0.75 at step 3")
    expect(page.locator("#chart-reward-mean .plot")).to_have_attribute("aria-label", told)
    expect(page.locator("#about [data-step]")).to_have_text("3")


def test_a_nan_is_shown_and_told(site: Site, page: Page) -> None:
    site.step(1, {"reward.mean": 0.5, "loss": 0.1})
    site.fall_ill()
    page.goto("/runs/math/q")
    drawn(page)
    assert "not finite at 1 steps" in label(page, "#chart-loss .plot"), "the accused signal has a chart of its own"
    card = page.locator(".card.critical")
    expect(card).to_contain_text("non_finite")
    card.locator(".evidence summary").click()
    expect(card.locator(".evidence")).to_contain_text("NaN")


def test_attempts_are_drawn_apart(site: Site, page: Page) -> None:
    for step in range(1, 6):
        site.step(step, {"reward.mean": 0.1 * step})
    site.trainers["math/q"].generation = 1
    for step in (3, 4):
        site.step(step, {"reward.mean": 0.9})
    page.goto("/runs/math/q")
    drawn(page)
    plot = page.locator("#chart-reward-mean .plot")
    expected = {"1": "steps 1 to 5.*last 0.5, ", "2": "steps 3 to 4.*last 0.9, ", "": "steps 1 to 5.*last 0.9"}
    for attempt, told in expected.items():
        page.select_option("#attempt", attempt)
        expect(plot).to_have_attribute("aria-label", re.compile(told))
    assert "attempt" not in page.url


def test_differences_of_any_size_are_drawn(site: Site, page: Page) -> None:
    for step, size in enumerate((0.0, 1e-300, 3e-17, 1e-5, 1e300), start=1):
        site.step(step, {"grad.norm": size, "policy.abs_q50": 3e-17, "reward.mean": 0.0})
    page.goto("/runs/math/q")
    drawn(page)
    assert "lowest 0 at step 1, highest 1.00e300 at step 5" in label(page, "#chart-grad-norm .plot")
    page.locator("#chart-grad-norm .plot").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#chart-grad-norm .reading")).to_contain_text("step 1: 0")


def test_incidents_commands_and_checkpoints_are_on_the_step_axis(site: Site, page: Page) -> None:
    site.step(1, {"reward.mean": 0.5})
    site.fall_ill()
    command = site.propose()
    run = site.run("math/q")
    with site.rooms.store.write() as session:
        session.add(
            Checkpoint(
                id="c1", run_id=1, attempt=run["attempt"], step=1, path="/ckpt/1", path_hash="x", status="healthy",
                registered_at=time.time(),
            )
        )  # fmt: skip
    page.goto("/runs/math/q")
    drawn(page)
    marks = page.evaluate("ForeshockMarks.read().map((m) => `${m.mark} ${m.from} ${m.label}`)")
    assert marks[0] == "incident 2 non_finite"
    assert "command 2 scale_lr proposed" in marks
    assert marks[-1] == "checkpoint 1 checkpoint, healthy"
    plot = page.locator("#chart-reward-mean .plot")
    plot.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#chart-reward-mean .reading")).to_contain_text("step 2: 0.5 · non_finite, ")
    page.click(f"#approve-{command}")
    expect(page.locator(f"#command-{command}")).to_contain_text("approved")


def test_a_hundred_thousand_steps_load_and_zoom_with_their_one_spike(site: Site, page: Page) -> None:
    add_run(site.rooms.store, "math/long", 100_000, extra=4)
    page.goto("/runs/math/long")
    drawn(page)
    assert f"highest 1 at step {SPIKE_AT}" in label(page), "a spike of one step must survive the thinning"
    assert "steps 1 to 100000" in label(page)
    assert page.evaluate("document.querySelectorAll('.plot canvas').length") >= 8
    page.fill("#from", "61000")
    page.fill("#to", "62000")
    page.keyboard.press("Enter")
    page.locator("#to").blur()
    expect(page.locator(LABEL)).to_have_attribute("aria-label", re.compile(r"steps 61000 to 62000.*step 61803"))
    assert "from=61000&to=62000" in page.url
    box = page.locator(f"{LABEL} .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 30, steps=5)
    page.mouse.up()
    expect(page.locator(LABEL)).to_have_attribute("aria-label", re.compile(r"steps 61[56]\d\d to 61[89]\d\d"))
    drawn(page)
    assert "step 61803" in label(page)
    page.dblclick(f"{LABEL} .u-over")
    expect(page.locator(LABEL)).to_have_attribute("aria-label", re.compile("steps 1 to 100000"))
    page.click("text=last 100 >> nth=0")
    expect(page.locator(LABEL)).to_have_attribute("aria-label", re.compile("steps 99901 to 100000"))
    page.locator(LABEL).focus()
    page.keyboard.press("-")
    expect(page.locator(LABEL)).to_have_attribute("aria-label", re.compile(r"steps 9985\d to 100000"))
    page.reload()
    drawn(page)
    assert "steps 9985" in label(page), "a window is part of the address"


def test_when_the_signals_cannot_be_read_it_says_so_and_offers_to_try_again(
    site: Site, page: Page, watch: Watch
) -> None:
    site.step(1, {"reward.mean": 0.5})
    watch.expected.append("503")
    problem = '{"title": "Not available now", "detail": "The database does not answer."}'
    page.route("**/series?**", lambda route: route.fulfill(status=503, body=problem))
    page.goto("/runs/math/q")
    expect(page.get_by_role("alert")).to_contain_text("The database does not answer.")
    assert page.locator("#chart-reward-mean svg.curve").count() == 1, "the server's drawing stays"
    page.unroute("**/series?**")
    page.get_by_role("button", name="try again").click()
    drawn(page)
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_run_and_a_step_that_do_not_exist_have_a_page_that_says_so(site: Site, page: Page, watch: Watch) -> None:
    watch.expected.append("404")
    site.step(1, {"reward.mean": 0.5})
    for path, words in (
        ("/runs/no/such", "No run named no/such"),
        ("/runs/no%20/such", "No run has such a name"),
        ("/runs/math/q/steps/99", "No completed step 99"),
        ("/runs/math/q/steps/x", "No such step"),
    ):
        answer = page.goto(path)
        assert answer is not None
        assert answer.status == 404
        expect(page.get_by_role("alert")).to_contain_text(words)
        expect(page.get_by_role("link", name="All runs")).to_be_visible()

"""The first page in a real browser: runs appear and change by themselves, buttons and keys work, a filter filters."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from foreshock_service.demo.processes import Service
from tests.servers import wait_for
from tests.service.web.conftest import NewContext, Site, Watch, live
from tests.service.web.stored import add_run

pytestmark = pytest.mark.browser


def test_an_empty_service_says_which_lines_to_add(site: Site, page: Page) -> None:
    page.goto("/")
    expect(page.get_by_text("No runs yet")).to_be_visible()
    expect(page.locator("pre")).to_contain_text(f"FORESHOCK_URL={site.url}")
    expect(page.locator("pre")).to_contain_text("foreshock.init(run=")


def test_a_run_its_steps_and_its_illness_appear_without_a_reload(site: Site, page: Page) -> None:
    page.goto("/")
    live(page)
    site.step(1, {"reward.mean": 0.5})
    row = page.locator('tr[data-run="math/q"]')
    expect(row).to_be_visible()
    page.evaluate("window.stillHere = true")
    incident = site.fall_ill()
    expect(row.locator(".health")).to_have_text("critical")
    expect(page.locator(f"#incident-{incident}")).to_contain_text("non_finite")
    expect(page).to_have_title(re.compile(r"^\(1\)"))
    site.step(3, {"reward.mean": 0.5})
    expect(row.locator("[data-step]")).to_have_text("3")
    assert page.evaluate("window.stillHere"), "it was reloaded"


def test_what_somebody_else_resolved_goes_away(site: Site, page: Page) -> None:
    incident = site.fall_ill()
    page.goto("/")
    live(page)
    expect(page.locator(f"#incident-{incident}")).to_be_visible()
    assert site.http.post(f"/v1/incidents/{incident}/resolve").is_success
    expect(page.locator(f"#incident-{incident}")).to_have_count(0)


def test_acknowledging_is_one_press_and_keeps_the_focus_near(site: Site, page: Page) -> None:
    incident = site.fall_ill()
    page.goto("/")
    page.locator(f"#acknowledge-{incident}").focus()
    page.keyboard.press("Enter")
    expect(page.locator(f"#incident-{incident}")).to_contain_text("acknowledged by loopback")
    expect(page.locator("#said")).to_have_text("acknowledge: done")
    assert site.http.get(f"/v1/incidents/{incident}").json()["status"] == "acknowledged"
    inside = page.evaluate("document.querySelector('.attention').contains(document.activeElement)")
    assert inside, "the focus was lost"


@pytest.mark.parametrize(("verb", "state"), [("approve", "approved"), ("reject", "rejected")])
def test_a_command_is_decided_by_one_press(site: Site, page: Page, verb: str, state: str) -> None:
    site.step(1, {"reward.mean": 0.5})
    command = site.propose()
    page.goto("/")
    card = page.locator(f"#command-{command}")
    expect(card).to_contain_text("scale_lr factor=0.5")
    expect(card).to_contain_text("the gradient grew")
    page.click(f"#{verb}-{command}")
    expect(page.locator("#said")).to_have_text(f"{verb}: done")
    assert site.http.get(f"/v1/commands/{command}").json()["state"] == state


def test_a_press_that_comes_too_late_says_why(site: Site, page: Page, watch: Watch) -> None:
    site.step(1, {"reward.mean": 0.5})
    command = site.propose()
    page.add_init_script(
        "window.SharedWorker = undefined; window.EventSource = class { addEventListener() {} close() {} }"
    )
    page.goto("/")
    assert site.http.post(f"/v1/commands/{command}/reject").is_success
    watch.expected.append("409")
    page.click(f"#approve-{command}")
    expect(page.locator("#said")).to_contain_text("Not done: ")
    expect(page.locator(f"#command-{command}")).to_have_count(0)
    assert site.http.get(f"/v1/commands/{command}").json()["state"] == "rejected"


def test_a_rule_is_silenced_on_a_run_and_the_silence_is_ended(site: Site, page: Page) -> None:
    incident = site.fall_ill()
    page.goto("/")
    page.click(f"#silencing-{incident} summary")
    page.select_option(f"#for-{incident}", "28800")
    page.click(f"#silence-{incident}")
    expect(page.locator(".silences")).to_contain_text("non_finite on math/q")
    (silence,) = site.http.get("/v1/silences").json()["silences"]
    assert (silence["run"], silence["rule"]) == ("math/q", "non_finite")
    assert silence["until_at"] - silence["created_at"] == pytest.approx(28_800)
    page.get_by_role("button", name="end", exact=True).click()
    expect(page.locator(".silences")).to_have_count(0)
    assert site.http.get("/v1/silences").json()["silences"] == []


def test_searching_filtering_and_sorting_narrow_two_hundred_runs(site: Site, page: Page) -> None:
    for i in range(200):
        add_run(site.rooms.store, f"fleet/run-{i:03}", 2, extra=0, verdict="warning" if i % 50 == 0 else "healthy")
    site.fall_ill("math/odd")
    page.goto("/")
    rows = page.locator("tbody tr")
    expect(rows.first).to_contain_text("math/odd")
    expect(page.get_by_text("sheet 1 of 2")).to_be_visible()
    page.fill("#q", "run-1")
    expect(rows).to_have_count(100)
    assert page.url.endswith("/?q=run-1")
    page.fill("#q", "non_fin")
    expect(rows).to_have_count(1)
    page.fill("#q", "no such thing")
    expect(page.get_by_text("No run fits this filter")).to_be_visible()
    page.fill("#q", "")
    expect(page.get_by_text("sheet 1 of 2")).to_be_visible()
    page.select_option("#sort", "name")
    expect(rows.first).to_contain_text("fleet/run-000")
    page.get_by_role("link", name=re.compile("warning")).click()
    expect(rows).to_have_count(4)
    assert "verdict=warning" in page.url


def test_keys_reach_everything(site: Site, page: Page) -> None:
    site.step(1, {"reward.mean": 0.5}, "math/a")
    site.fall_ill("math/b")
    page.goto("/")
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#help")).to_be_hidden()
    page.keyboard.press("/")
    expect(page.locator("#q")).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    expect(page.locator(".card .actions button").first).to_be_focused()
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator('[data-run="math/a"] a')).to_be_focused()
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url("**/runs/math/b")
    page.keyboard.press("h")
    page.wait_for_url(site.url + "/")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()


def test_eight_tabs_share_one_stream_and_all_hear(site: Site, new_context: NewContext) -> None:
    site.step(1, {"reward.mean": 0.5})
    context = new_context()
    tabs = [context.new_page() for _ in range(8)]
    for tab in tabs:
        tab.goto("/")
        live(tab)
    assert site.rooms.waiters.taken == 1
    site.fall_ill()
    for tab in tabs:
        tab.bring_to_front()
        expect(tab.locator('[data-run="math/q"] .health')).to_have_text("critical")
    context.close()
    wait_for(lambda: site.rooms.waiters.taken == 0)


def test_after_the_service_was_away_the_page_catches_up(chromium: Browser, tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.start()
    page = chromium.new_page(base_url=service.url)
    try:
        page.goto("/")
        live(page)
        service.kill()
        expect(page.locator("#live")).to_contain_text("not connected")
        service.start()
        frame = {"sequence": 1, "step": 1, "role": "trainer", "rank": 0, "sealed_s": 1.0, "scalars": {"loss": "nan"}}
        envelope = {"protocol": 1, "client": "c" * 32, "sequence": 1, "run": "math/q", "launch": "one"}
        with httpx.Client(base_url=service.url, trust_env=False) as http:
            assert http.post("/v1/ingest", json={**envelope, "frames": [frame]}).is_success
        expect(page.locator("#live")).to_have_text("live")
        expect(page.locator('[data-run="math/q"] .health')).to_have_text("critical")
    finally:
        page.close()
        service.stop()


def test_a_login_in_the_browser_acts_within_its_scopes(site: Site, new_context: NewContext) -> None:
    incident = site.fall_ill()
    object.__setattr__(site.rooms.settings, "trust_loopback", False)
    page = new_context().new_page()
    page.goto("/")
    page.wait_for_url("**/login")
    page.fill("#token", site.token("read"))
    page.keyboard.press("Enter")
    page.wait_for_url(site.url + "/")
    expect(page.locator(f"#incident-{incident}")).to_be_visible()
    expect(page.locator(".card button")).to_have_count(0)
    (cookie,) = page.context.cookies()
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="log out").click()
    page.wait_for_url("**/login")
    page.fill("#token", site.token("operate"))
    page.keyboard.press("Enter")
    page.click(f"#acknowledge-{incident}")
    expect(page.locator(f"#incident-{incident}")).to_contain_text("acknowledged by token:t")


def test_without_scripts_it_is_read_and_pressed_all_the_same(site: Site, new_context: NewContext) -> None:
    incident = site.fall_ill()
    page = new_context(java_script_enabled=False).new_page()
    page.goto("/")
    expect(page.locator('[data-run="math/q"]')).to_be_visible()
    assert page.locator('[data-run="math/q"] svg.curve[aria-label^="reward.mean"]').count() == 1
    page.fill("#q", "nothing of the kind")
    page.click("#apply")
    expect(page.get_by_text("No run fits this filter")).to_be_visible()
    page.goto("/runs/math/q")
    expect(page.locator("#chart-reward-mean svg.curve")).to_be_visible()
    page.click("#chart-reward-mean summary")
    expect(page.locator("#chart-reward-mean-numbers")).to_contain_text("0.5")
    page.click(f"#acknowledge-{incident}")
    page.wait_for_url("**/runs/math/q")
    expect(page.locator(f"#incident-{incident}")).to_contain_text("acknowledged")

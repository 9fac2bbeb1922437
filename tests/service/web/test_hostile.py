"""Whatever clients and people have stored under a name, a reason or a path is shown, and never runs."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import update

from foreshock_service.store.models import (
    Attempt,
    Checkpoint,
    Client,
    CommandRow,
    Incident,
    Point,
    Run,
    SignalName,
    Silence,
)
from tests.service.web.conftest import Site, Watch, drawn
from tests.service.web.stored import add_run

pytestmark = pytest.mark.browser
EVIL = (
    '</script></title><img src=x onerror="window.caught=1"><script>window.caught=2</script>\'">'
    "<svg onload=window.caught=3>"
)
LINK = "javascript:window.caught=4"


@pytest.fixture
def poisoned(site: Site) -> Site:
    """Markup in every text column, past every check at the door."""
    store = site.rooms.store
    run_id = add_run(store, "math/q", 30, labels={EVIL: EVIL}, capabilities=[EVIL], mode="approve", verdict="critical")
    add_run(store, f"evil/{EVIL}", 3)
    now = time.time()
    evidence = [
        {"signal": EVIL, "value": 1.0, "expected": "nan", "bound": None, "rank": 0, "sentence": EVIL, "step": 30}
    ]
    fact = {"sentence": EVIL, "value": 1.0, "weight": 1.0}
    cause = {"name": EVIL, "title": EVIL, "score": 0.9, "pair": EVIL, "speaks_for": [fact], "speaks_against": [fact],
             "decided_by": [EVIL]}  # fmt: skip
    token = {"seq": EVIL, "position": EVIL, "token": EVIL, "a": -1.0, "b": EVIL}
    common = {"run_id": run_id, "attempt": 1}
    with store.write() as session:
        session.add(SignalName(run_id=run_id, position=900, name=EVIL))
        session.add(
            Incident(
                id="i1", **common, rule=EVIL, severity="critical", status="acknowledged", opened_at=now, opened_step=20,
                onset_step=19, last_step=30, message=EVIL, edge=EVIL, evidence=evidence, acknowledged_by=EVIL,
                diagnosis={"sentence": EVIL, "causes": [cause]},
            )
        )  # fmt: skip
        session.add(
            CommandRow(
                id="c1", **common, kind=EVIL, actions=[{"kind": EVIL, "arguments": {EVIL: EVIL}}], state="proposed",
                reason=EVIL, requested_by=EVIL, decided_by=EVIL, created_at=now, expires_at=now + 900, issued_step=20,
            )
        )  # fmt: skip
        session.add(Checkpoint(id="k1", **common, step=10, path=LINK, path_hash="1", reason=EVIL, registered_at=now))
        session.add(Checkpoint(id="k2", **common, step=11, path=EVIL, path_hash="2", reason=EVIL, registered_at=now))
        client = {"id": "x", "launch": EVIL, "role": EVIL[:16], "rank": 0, "losses": {EVIL: 3}, "sdk": EVIL[:64]}
        session.add(Client(run_id=run_id, **client, first_seen_at=now, last_seen_at=now))
        session.add(Attempt(run_id=run_id, ordinal=2, launch=EVIL, generation=7, started_at=now, reason=EVIL[:64]))
        session.add(
            Silence(id="s1", run="math/q", rule=EVIL, until_at=now + 900, created_at=now, created_by=EVIL, reason=EVIL)
        )
        poison = {"worst": {EVIL: [1.0, EVIL]}, "evidence": {EVIL: [token]}, "missing": {EVIL: EVIL}}
        session.execute(update(Point).where(Point.run_id == run_id, Point.step == 30).values(**poison))
        session.execute(update(Run).where(Run.id == run_id).values(status=EVIL[:16]))
    return site


@pytest.mark.parametrize(
    "path", ["/", "/runs/math/q", "/runs/math/q/steps/30", f"/?q={EVIL}", f"/runs/math/q?signal={EVIL}"]
)
def test_markup_in_every_field_stays_text(poisoned: Site, page: Page, path: str) -> None:
    page.goto(path)
    if path.startswith("/runs/math/q?") or path == "/runs/math/q":
        drawn(page)
    page.wait_for_timeout(300)
    assert page.evaluate("window.caught") is None
    assert page.locator("main img, main script, main [onerror], main [onload]").count() == 0
    assert page.locator("a[href^='javascript']").count() == 0
    if path == "/":
        expect(page.locator("#incident-i1 .why")).to_have_text(EVIL)
        expect(page.locator("#command-c1 .why")).to_have_text(EVIL)
        expect(page.locator(".row .name").filter(has_text="evil/")).to_contain_text(EVIL)


def test_the_policy_forbids_what_an_escape_that_was_forgotten_would_run(site: Site, page: Page, watch: Watch) -> None:
    watch.expected += ["Content Security Policy", "violates", "Refused", "404"]
    page.goto("/")
    page.evaluate(
        """() => {
          const markup = "<img src=x onerror='window.caught=1'><b style='color:red'>x</b>";
          document.body.insertAdjacentHTML("beforeend", markup);
          const script = document.createElement("script");
          script.textContent = "window.caught=2";
          document.body.append(script);
          const far = document.createElement("script");
          far.src = "https://evil.example/x.js";
          document.body.append(far);
        }"""
    )
    page.wait_for_timeout(300)
    assert page.evaluate("window.caught") is None
    assert any("Content Security Policy" in c for c in watch.complaints)
    watch.expected.append("request: https://evil.example")

"""The pages as they leave the server, on both databases."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.service.web.conftest import Site


@pytest.fixture
def either(migrated_url: str) -> Iterator[Site]:
    """A service on SQLite and on PostgreSQL in turn, with a run that has rolled back."""
    site = Site(migrated_url)
    for step in range(1, 6):
        site.step(step, {"reward.mean": step / 10, "loss": 0.5})
    site.trainers["math/q"].generation = 1
    site.step(3, {"reward.mean": 0.9})
    yield site
    site.http.close()
    site.stop()


def test_the_curves_are_the_stored_numbers_over_all_attempts(either: Site) -> None:
    fleet = either.http.get("/").text
    assert "reward.mean, last 6 steps: now 0.9, lowest 0.1, highest 0.9" in fleet
    assert "attempt 2" in fleet
    again = either.http.get("/").text
    assert re.findall("<svg.*?</svg>", again) == re.findall("<svg.*?</svg>", fleet), "the kept drawing is another"
    page = either.http.get("/runs/math/q").text
    assert "loss, last 6 steps: now 0.5" not in page, "a signal that nobody wished for"
    assert "loss, last 6 steps: now 0.5" in either.http.get("/runs/math/q?signal=loss").text
    assert either.http.get("/runs/math/q/steps/5").status_code == 200
    assert either.http.get("/runs/math/q/steps/5?attempt=2").status_code == 404


def test_searching_and_every_order_work(either: Site) -> None:
    verdict = either.run("math/q")["verdict"]
    other = "critical" if verdict != "critical" else "healthy"
    orders = [f"/?sort={order}" for order in ("heard", "name", "started", "step")]
    for address in ("/?q=MATH", "/?q=q", f"/?verdict={verdict}", *orders):
        assert 'data-run="math/q"' in either.http.get(address).text, address
    for address in ("/?q=%25", "/?q=_", f"/?verdict={other}", "/?status=over", "/?page=2"):
        assert "No run fits this filter" in either.http.get(address).text, address


def test_files_are_kept_by_their_hash_and_asked_for_again_without(either: Site) -> None:
    (style,) = re.findall(r'href="(/static/page.css\?v=\w+)"', either.http.get("/").text)
    kept = either.http.get(style)
    assert "immutable" in kept.headers["cache-control"]
    assert "connect-src 'self'" in kept.headers["content-security-policy"]
    plain = either.http.get("/static/page.css")
    assert plain.headers["cache-control"] == "no-cache"
    same = either.http.get("/static/page.css", headers={"If-None-Match": plain.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    assert "MIT License" in either.http.get("/static/vendor/uPlot.LICENSE").text

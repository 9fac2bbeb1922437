"""Foreshock's eye on its own outbox: what lags, what is dead, and what only waits for the morning."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.alerts.story import Story
from foreshock_service.alerts.base import Later, Message, Never
from foreshock_service.alerts.delivery import DeliveryWorker
from foreshock_service.alerts.hours import parse
from foreshock_service.api import fleet
from foreshock_service.store.engine import Store
from tests.service.alerts.test_order import Ear

NOW = 1_800_000_000.0
MakeRun = Callable[..., int]


def shown(store: Store, now: float) -> dict[tuple[str, ...], float]:
    """(metric, *labels) → value, of what tells of the outbox."""
    with store.read() as session:
        families = list(fleet.families(session, None, 10, now))
    wanted = ("foreshock_outbox_lag_seconds", "foreshock_deliveries")
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples if s.name in wanted}


def test_an_alert_that_is_retried_shows_as_lag_and_a_dead_one_as_a_dead_letter(store: Store, make_run: MakeRun) -> None:
    story, now = Story(store, ("ear",)), [NOW]
    story.happen(make_run("lab/a"), "open", NOW)
    story.happen(make_run("lab/b"), "open", NOW, rule="non_finite")

    def mood(message: Message) -> Exception:
        return Never("answered 400") if message.payload["run"] == "lab/b" else Later("answered 500")

    DeliveryWorker(store, {"ear": Ear(mood)}, clock=lambda: now[0]).once()
    found = shown(store, NOW + 400)
    assert found["foreshock_outbox_lag_seconds",] == 400
    assert found["foreshock_deliveries", "ear", "pending"] == 1
    assert found["foreshock_deliveries", "ear", "dead"] == 1


def test_what_quiet_hours_hold_is_counted_and_is_no_lag(store: Store, make_run: MakeRun) -> None:
    story = Story(store, ("ear",))
    story.happen(make_run(), "open", NOW, severity="warning")
    quiet = parse("ear=00:00-00:00 UTC")
    DeliveryWorker(store, {"ear": Ear()}, clock=lambda: NOW, quiet=quiet).once()
    found = shown(store, NOW + 4000)
    assert found["foreshock_outbox_lag_seconds",] == 0
    assert found["foreshock_deliveries", "ear", "held"] == 1

"""A storm is few messages and loses nothing; an hour's outage loses nothing and mixes nothing up. Simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks.alerts.simulation import outage, storm
from benchmarks.alerts.story import Story
from foreshock_service.alerts.base import Message
from foreshock_service.alerts.delivery import DeliveryWorker
from foreshock_service.store.engine import Store
from tests.service.alerts.test_order import Ear

MakeRun = Callable[..., int]


def test_500_incidents_in_a_minute_are_at_most_five_slack_messages_and_all_are_shown(
    store: Store, make_run: MakeRun
) -> None:
    figures = {f.channel: f for f in storm(store, make_run)}
    for told in figures.values():
        assert (told.alerts, told.arrived, told.visible, told.in_order) == (500, 500, 500, True)
    assert figures["slack_app"].messages <= 5
    assert figures["slack_webhook"].messages <= 5
    assert max(f.longest_wait_s for f in figures.values()) <= 61


def test_in_a_storm_two_replicas_do_not_send_a_digest_each(store: Store, make_run: MakeRun) -> None:
    story, now, ear = Story(store, ("people",)), [1_000.0], People()
    for i in range(8):
        story.happen(make_run(f"lab/run-{i}"), "open", now[0])
    first, second = (DeliveryWorker(store, {"people": ear}, clock=lambda: now[0]) for _ in range(2))

    def meanwhile() -> None:
        for i in range(8, 16):
            story.happen(make_run(f"lab/run-{i}"), "open", now[0])
        assert second.once() == 0

    ear.meanwhile = meanwhile
    assert first.once() == 8
    now[0] += 59
    assert second.once() == 0
    now[0] += 2
    assert second.once() == 8
    assert ear.digests == [8, 8]


class People(Ear):
    """A channel of people: at most one digest a minute. `meanwhile` happens while the first one is on its way."""

    name = "people"
    digest_every_s = 60.0

    def __init__(self) -> None:
        super().__init__()
        self.digests: list[int] = []
        self.meanwhile: Callable[[], None] | None = None

    def send_digest(self, messages: Sequence[Message], now: float) -> None:
        self.digests.append(len(messages))
        if self.meanwhile is not None:
            doing, self.meanwhile = self.meanwhile, None
            doing()


@pytest.mark.slow
def test_after_an_hour_of_outage_everything_arrives_under_its_id_and_in_order_per_incident(
    store: Store, make_run: MakeRun
) -> None:
    for told in outage(store, make_run):
        assert (told.alerts, told.arrived, told.visible, told.in_order) == (90, 90, 90, True)
        assert told.after_return_s < 300
        # Patient: a receiver that is away is asked about once a minute, not by every alert for itself.
        assert told.requests < 150

"""A storm is few messages and loses nothing; an hour's outage loses nothing and mixes nothing up. Simulated time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.alerts.simulation import outage, storm
from foreshock_service.store.engine import Store

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


@pytest.mark.parametrize("seed", [0, 1])
def test_after_an_hour_of_outage_everything_arrives_under_its_id_and_in_order_per_incident(
    store: Store, make_run: MakeRun, seed: int
) -> None:
    for told in outage(store, make_run, seed=seed):
        assert (told.alerts, told.arrived, told.visible, told.in_order) == (90, 90, 90, True)
        assert told.after_return_s < 900
        # Patient: a receiver that is away is asked about once a minute, not by every alert for itself.
        assert told.requests < 250

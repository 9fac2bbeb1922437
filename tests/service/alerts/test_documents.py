"""docs/alerts.md says what channels there are, how they are set up, and what a webhook is given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foreshock_service.alerts.outbox import COMMAND_EVENTS, INCIDENT_EVENTS
from foreshock_service.alerts.payload import payload
from foreshock_service.alerts.registry import CHANNELS
from foreshock_service.settings import Settings
from foreshock_service.store.models import CommandRow, Incident, Run

PAGE = (Path(__file__).parents[3] / "docs/alerts.md").read_text()


@pytest.mark.parametrize("channel", sorted(CHANNELS))
def test_each_channel_is_in_the_table(channel: str) -> None:
    assert f"| `{channel}` |" in PAGE


def test_each_setting_that_is_named_exists() -> None:
    known = {f"FORESHOCK_{name.upper()}" for name in Settings.model_fields}
    assert set(re.findall(r"FORESHOCK_[A-Z_]+", PAGE)) <= known


def test_the_webhooks_members_are_the_documented_ones() -> None:
    run = Run(name="a/b", project="a", mode="auto", config={"api_key": "s3cret"}, labels={"token": "s3cret"})
    incident = Incident(id="i", rule="non_finite", evidence=[], diagnosis={}, message="")
    command = CommandRow(id="c", kind="pause", state="proposed", reason="", detail={})
    made = payload(run, incident, [(command, "proposed")], 0.0)
    section = PAGE[PAGE.index("## Webhook") : PAGE.index("## Foreshock watches")]
    documented = set(re.findall(r"`([a-z_]+)`", section))
    for member in (*made, *made["incident"], *made["commands"][0], *INCIDENT_EVENTS, *COMMAND_EVENTS):
        assert member in documented, member
    assert "s3cret" not in str(made), "what a run is configured with is nobody's news"

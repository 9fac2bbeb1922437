"""Quiet hours: what can wait waits until morning and comes as one digest; what cannot brings its history along."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from benchmarks.alerts.story import Story
from foreshock_service.alerts.delivery import DeliveryWorker
from foreshock_service.alerts.hours import parse
from foreshock_service.alerts.registry import AlertConfigError, quiet_hours
from foreshock_service.settings import Settings
from foreshock_service.store.engine import Store
from tests.service.alerts.test_order import Ear

MakeRun = Callable[..., int]
EVENING, MORNING = 22.5, 7.0


def at(hour: float, day: int = 14) -> float:
    """Epoch seconds of an hour of January in Berlin (UTC+1)."""
    return datetime(2030, 1, day, tzinfo=UTC).timestamp() + (hour - 1) * 3600


class Digests(Ear):
    """Counts digests as well."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: list[int] = []

    def send_digest(self, messages, now) -> None:  # type: ignore[no-untyped-def]
        self.digests.append(len(messages))
        super().send_digest(messages, now)


def worker(store: Store, ear: Ear, now: list[float]) -> DeliveryWorker:
    quiet = parse("ear=22:00-07:00 Europe/Berlin")
    return DeliveryWorker(store, {"ear": ear}, clock=lambda: now[0], quiet=quiet, digest_over=100)


def test_warnings_wait_until_morning_and_come_as_one_digest(store: Store, make_run: MakeRun) -> None:
    story, now, ear = Story(store, ("ear",)), [at(EVENING)], Digests()
    sending = worker(store, ear, now)
    for i in range(4):
        story.happen(make_run(f"lab/run-{i}"), "open", now[0], severity="warning")
    for hour in (23, 25, 30.9):
        now[0] = at(hour)
        sending.once()
        assert ear.heard == []
    assert {(row.state, row.last_error) for row in story.rows()} == {("pending", "held by quiet hours")}
    now[0] = at(31)
    sending.once()
    assert (ear.digests, len(ear.heard)) == ([4], 4)
    assert {(row.state, row.attempts) for row in story.rows()} == {("sent", 1)}


def test_a_critical_incident_is_told_at_once_and_its_good_end_in_the_morning(store: Store, make_run: MakeRun) -> None:
    story, now, ear = Story(store, ("ear",)), [at(EVENING)], Digests()
    sending, run = worker(store, ear, now), make_run()
    story.happen(run, "open", now[0])
    sending.once()
    assert ear.events() == ["incident.opened"]
    story.happen(run, "close", now[0])
    sending.once()
    assert ear.events() == ["incident.opened"]
    now[0] = at(24 + MORNING)
    sending.once()
    assert ear.events() == ["incident.opened", "incident.resolved"]


def test_what_turns_critical_in_the_night_brings_its_history_along_in_order(store: Store, make_run: MakeRun) -> None:
    story, now, ear = Story(store, ("ear",)), [at(EVENING)], Digests()
    sending, run = worker(store, ear, now), make_run()
    story.happen(run, "open", now[0], severity="warning")
    story.happen(make_run("lab/other"), "open", now[0], severity="warning")
    sending.once()
    now[0] += 3600
    story.happen(run, "escalate", now[0])
    sending.once()
    assert ear.events() == ["incident.opened", "incident.escalated"]
    assert [row.state for row in story.rows()] == ["sent", "pending", "sent"]


def test_outside_quiet_hours_nothing_is_held(store: Store, make_run: MakeRun) -> None:
    story, now, ear = Story(store, ("ear",)), [at(12)], Digests()
    story.happen(make_run(), "open", now[0], severity="warning")
    worker(store, ear, now).once()
    assert ear.events() == ["incident.opened"]


@pytest.mark.parametrize(
    ("text", "moment", "ends"),
    [
        ("x=22:00-07:00 Europe/Berlin", at(23), at(31)),
        ("x=22:00-07:00 Europe/Berlin", at(6.9), at(7)),
        ("x=22:00-07:00 Europe/Berlin", at(7), None),
        ("x=12:00-13:00 Europe/Berlin", at(12.5), at(13)),
        ("x=12:00-13:00 Europe/Berlin", at(13), None),
        ("x=00:00-00:00 UTC", at(12), at(25)),
        # In the night of 31 March 2030 Berlin goes from 02:00 to 03:00: seven o'clock comes an hour sooner.
        (
            "x=22:00-07:00 Europe/Berlin",
            datetime(2030, 3, 30, 22, 0, tzinfo=UTC).timestamp(),
            datetime(2030, 3, 31, 5, 0, tzinfo=UTC).timestamp(),
        ),
    ],
)
def test_quiet_hours_end_by_the_clock_on_the_wall(text: str, moment: float, ends: float | None) -> None:
    assert parse(text)["x"].until(moment) == ends


@pytest.mark.parametrize(
    "text", ["email", "email=22-7 UTC", "email=22:00-07:00", "email=25:00-07:00 UTC", "email=22:00-07:00 Moon/Base",
             "pigeon=22:00-07:00 UTC"],
)  # fmt: skip
def test_quiet_hours_that_cannot_be_read_are_refused_by_name(text: str) -> None:
    with pytest.raises(AlertConfigError, match="FORESHOCK_QUIET_HOURS"):
        quiet_hours(Settings(quiet_hours=text))

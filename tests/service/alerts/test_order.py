"""In order per incident: nothing overtakes what is being retried, and no incident holds up another."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import httpx
import pytest
from sqlalchemy import update

from benchmarks.alerts.sink import Sink
from benchmarks.alerts.story import Story
from foreshock_service.alerts.alertmanager import Alertmanager
from foreshock_service.alerts.base import Channel, Later, Message, Never, new_client
from foreshock_service.alerts.claims import MAX_TRIES, back_off, due, take
from foreshock_service.alerts.delivery import DeliveryWorker
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Delivery, Silence

NOW = 1_000.0
MakeRun = Callable[..., int]


class Ear(Channel):
    """A channel that notes what arrives, and refuses what it is told to."""

    name = "ear"
    digest_every_s = 0.0

    def __init__(self, refuse: Callable[[Message], Exception | None] = lambda _: None) -> None:
        self.refuse = refuse
        self.heard: list[Message] = []
        self.tried: list[str] = []
        self._lock = threading.Lock()

    def send(self, message: Message, now: float) -> None:
        with self._lock:
            self.tried.append(message.event)
            error = self.refuse(message)
            if error is not None:
                raise error
            self.heard.append(message)

    def send_digest(self, messages: Sequence[Message], now: float) -> None:
        for message in messages:
            self.send(message, now)

    def events(self, line: str | None = None) -> list[str]:
        return [m.event for m in self.heard if line in (None, m.line)]


def worker(store: Store, channel: Channel, now: list[float], digest_over: int = 1000) -> DeliveryWorker:
    return DeliveryWorker(store, {channel.name: channel}, clock=lambda: now[0], digest_over=digest_over)


def test_a_resolution_waits_for_the_opening_that_is_being_retried(store: Store, make_run: MakeRun, sink: Sink) -> None:
    story, now = Story(store, ("alertmanager",)), [NOW]
    run = make_run()
    with httpx.Client() as client:
        sending = worker(store, Alertmanager(client, sink.url), now)
        sink.answers = [503]
        story.happen(run, "open", now[0])
        sending.once()
        now[0] += 1
        story.happen(run, "close", now[0])
        assert sending.once() == 0
        now[0] += back_off(1)
        sending.once()
        sending.once()
    ends = [alerts[0]["endsAt"] for alerts in sink.bodies()]
    assert len(ends) == 3
    assert ends[0] == ends[1] or ends[0] < ends[1]
    assert ends[2] < ends[1]
    assert story.states() == [("incident.opened", "sent"), ("incident.resolved", "sent")]


def test_other_incidents_are_not_held_up(store: Store, make_run: MakeRun) -> None:
    story, now = Story(store, ("ear",)), [NOW]
    ill, other = make_run("lab/ill"), make_run("lab/other")
    stuck, _ = story.happen(ill, "open", NOW)
    free, _ = story.happen(other, "open", NOW)
    story.happen(ill, "close", NOW)
    story.happen(other, "close", NOW)
    ear = Ear(lambda m: Later("answered 500") if m.line == stuck else None)
    worker(store, ear, now).once()
    assert ear.events(free) == ["incident.opened", "incident.resolved"]
    assert ear.tried.count("incident.resolved") == 1
    assert [row.attempts for row in story.rows(line=stuck)] == [1, 0]


def test_a_dead_letter_releases_its_line(store: Store, make_run: MakeRun) -> None:
    story, now = Story(store, ("ear",)), [NOW]
    run = make_run()
    story.happen(run, "open", NOW)
    story.happen(run, "close", NOW)
    ear = Ear(lambda m: Never("answered 400") if m.event == "incident.opened" else None)
    worker(store, ear, now).once()
    assert story.states() == [("incident.opened", "dead"), ("incident.resolved", "sent")]


def test_a_line_whose_head_is_given_up_goes_on(store: Store, make_run: MakeRun) -> None:
    story, now = Story(store, ("ear",)), [NOW]
    run = make_run()
    story.happen(run, "open", NOW)
    story.happen(run, "close", NOW)
    sending = worker(store, Ear(lambda m: Later("answered 500") if m.event == "incident.opened" else None), now)
    for _ in range(MAX_TRIES + 1):
        sending.once()
        now[0] += 601
    assert story.states() == [("incident.opened", "dead"), ("incident.resolved", "sent")]


def test_a_dead_letter_that_is_revived_says_that_it_is_late(store: Store, make_run: MakeRun, sink: Sink) -> None:
    story, now = Story(store, ("alertmanager",)), [NOW]
    run = make_run()
    story.happen(run, "open", NOW)
    sink.answers = [400]
    with new_client() as client:
        sending = worker(store, Alertmanager(client, sink.url), now)
        sending.once()
        story.happen(run, "close", NOW)
        sending.once()
        with store.write() as session:
            session.execute(update(Delivery).where(Delivery.state == "dead").values(state="pending", attempts=0))
        assert sending.once() == 1
    # It must not fire anew after its end: nothing is posted for it, and it counts as told.
    assert len(sink.got) == 2
    assert story.states() == [("incident.opened", "sent"), ("incident.resolved", "sent")]


def test_what_is_sent_by_another_replica_is_not_overtaken_here(store: Store, make_run: MakeRun) -> None:
    story, now = Story(store, ("ear",)), [NOW]
    run = make_run()
    story.happen(run, "open", NOW)
    story.happen(run, "close", NOW)
    with store.write() as session:
        first = update(Delivery).where(Delivery.event == "incident.opened")
        session.execute(first.values(state="sending", lease_until=NOW + 120, attempts=1))
    ear = Ear()
    sending = worker(store, ear, now)
    assert sending.once() == 0
    now[0] += 121
    sending.once()
    assert ear.events() == ["incident.opened", "incident.resolved"]


def test_two_replicas_at_the_same_moment_do_not_part_a_line(store: Store, make_run: MakeRun) -> None:
    story = Story(store, ("ear",))
    run = make_run()
    story.happen(run, "open", NOW)
    story.happen(run, "close", NOW)
    taken: list[str] = []

    def other() -> None:
        with store.write() as session:
            rows = due(session, "ear", NOW, 10)
            taken.extend(m.event for m in take(session, rows, NOW))

    replica = threading.Thread(target=other)
    with store.write() as session:
        opened = due(session, "ear", NOW, 1)
        assert [m.event for m in take(session, opened, NOW)] == ["incident.opened"]
        replica.start()
        # Time for the other one to read, on PostgreSQL, and to wait for the row; SQLite lets it in afterwards.
        replica.join(0.3)
    replica.join()
    assert taken == []


def test_a_silenced_alert_does_not_block_and_a_resolution_always_reaches_alertmanager(
    store: Store, make_run: MakeRun, sink: Sink
) -> None:
    story, now = Story(store, ("alertmanager", "ear")), [NOW]
    run = make_run()
    story.happen(run, "open", NOW)
    ear = Ear()
    with new_client() as client:
        both = [worker(store, Alertmanager(client, sink.url), now), worker(store, ear, now)]
        for sending in both:
            sending.once()
        with store.write() as session:
            session.add(Silence(id="s", run="lab/run", until_at=NOW + 60, created_at=NOW, created_by="ada"))
        story.happen(run, "escalate", NOW)
        story.happen(run, "close", NOW)
        for sending in both:
            sending.once()
    assert ear.events() == ["incident.opened"]
    assert len(sink.got) == 2
    assert [(r.channel, r.event, r.state) for r in story.rows() if r.channel == "alertmanager"][-1] == (
        "alertmanager",
        "incident.resolved",
        "sent",
    )


@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_each_line_arrives_in_order_and_whole(store: Store, make_run: MakeRun, seed: int) -> None:
    chance = random.Random(seed)
    story, now = Story(store, ("ear",)), [NOW]
    runs = [make_run(f"lab/run-{i}") for i in range(4)]

    def moody(message: Message) -> Exception | None:
        if chance.random() > 0.5:
            return None
        return chance.choice(
            [Later("answered 500"), Later("no answer", whole_channel=True), Later("answered 429", 7.0)]
        )

    ear = Ear(moody)
    replicas = [worker(store, ear, now, digest_over=chance.choice([1, 3, 1000])) for _ in range(2)]
    open_ = dict.fromkeys(runs, False)
    for _ in range(60):
        run = chance.choice(runs)
        story.happen(run, "close" if open_[run] else "open", now[0])
        open_[run] = not open_[run]
        chance.choice(replicas).once()
        now[0] += chance.choice([0.5, 3.0, 30.0])
    ear.refuse = lambda _: None
    for _ in range(40):
        for sending in replicas:
            sending.once()
        now[0] += 61.0
    assert {row.state for row in story.rows()} == {"sent"}
    for line in {row.line for row in story.rows()}:
        written = [row.id for row in story.rows(line=line)]
        heard = list(dict.fromkeys(m.delivery_id for m in ear.heard if m.line == line))
        assert heard == written

"""A storm and an outage, on simulated time: real store, outbox, workers and HTTP; the receivers are the tests' own.

`storm`: 500 incidents of 100 runs within a minute. `outage`: every receiver away for an hour in which incidents go on.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.alerts import fake_slack
from benchmarks.alerts.fake_slack import CHANNEL, TOKEN, FakeSlack, all_text
from benchmarks.alerts.sink import Sink
from benchmarks.alerts.story import Story
from foreshock_service.alerts.base import Channel, new_client
from foreshock_service.alerts.delivery import DeliveryWorker
from foreshock_service.alerts.slack_api import SlackApi
from foreshock_service.alerts.slack_app import SlackApp
from foreshock_service.alerts.slack_webhook import SlackWebhook
from foreshock_service.alerts.webhook import Webhook
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Delivery

BEGIN = 1_800_000_000.0
RULES = ("rollout_mismatch", "non_finite", "gradient_spike", "entropy_collapse", "kl_blowup")
STALL_S = 0.3
"""How long a receiver that stalls is waited for: real time, so it is short."""
MakeRun = Callable[[str], int]
_ID = re.compile(r"(?:delivery|digest) ([0-9a-f]{32})")


@dataclass
class Figures:
    """What one channel did."""

    channel: str
    alerts: int
    requests: int
    """Requests that reached the receiver, those in vain among them."""
    messages: int
    """What people see appear: heads and digests; for a webhook, posts."""
    arrived: int
    visible: int
    """Runs and rules that the receiver was shown, of those that there were."""
    in_order: bool
    longest_wait_s: float
    """From writing to arrival, simulated."""
    after_return_s: float = 0.0


class World:
    """One store, three channels, a clock."""

    def __init__(self, store: Store, patience_s: float) -> None:
        self.now = BEGIN
        self.slack, self.hook, self.sink = FakeSlack(), Sink(), Sink()
        self.client = new_client(patience_s)
        self.channels: list[Channel] = [
            SlackApp(self.client, SlackApi(TOKEN, self.slack.url, patience_s), store, CHANNEL),
            SlackWebhook(self.client, self.hook.url),
            Webhook(self.client, self.sink.url, "s3cret"),
        ]
        self.story = Story(store, tuple(c.name for c in self.channels))
        self.workers = [DeliveryWorker(store, {c.name: c}, clock=lambda: self.now, name=c.name) for c in self.channels]
        self.requests = dict.fromkeys((c.name for c in self.channels), 0)

    def second(self) -> None:
        """One second passes: each worker looks once."""
        for worker in self.workers:
            worker.once()
        self.now += 1.0

    def drained(self) -> bool:
        """Nothing waits."""
        return not any(row.state in ("pending", "sending") for row in self.story.rows())

    def close(self) -> None:
        for server in (self.slack, self.hook, self.sink):
            server.close()
        self.client.close()

    def figures(self, channel: str, returned_at: float | None = None) -> Figures:
        """What came of it, by what the receiver got and by the rows."""
        rows = self.story.rows(channel=channel)
        heard = self._heard(channel, rows)
        words = self._words(channel)
        shown = sum(row.payload["run"] in words and row.payload["incident"]["rule"] in words for row in rows)
        places = {delivery: place for place, delivery in reversed(list(enumerate(heard)))}
        lines: dict[str | None, list[int]] = {}
        for row in rows:
            lines.setdefault(row.line, []).append(places.get(row.id, -1))
        messages = {
            "slack_app": len(self.slack.heads), "slack_webhook": len(self.hook.got), "webhook": len(self.sink.got)
        }[channel]  # fmt: skip
        return Figures(
            channel=channel,
            alerts=len(rows),
            requests=self.requests[channel] + messages,
            messages=messages,
            arrived=sum(row.id in places for row in rows),
            visible=shown,
            in_order=all(found == sorted(found) for found in lines.values()),
            longest_wait_s=max((row.sent_at or float("inf")) - row.created_at for row in rows),
            after_return_s=max((row.sent_at or float("inf")) - (returned_at or row.sent_at or 0.0) for row in rows),
        )

    def _heard(self, channel: str, rows: list[Delivery]) -> list[str]:
        """Delivery ids in the order of arrival; a digest stands for the alerts whose rows name it."""
        if channel == "webhook":
            return [a["delivery_id"] for body in self.sink.bodies() for a in body.get("alerts", [body])]
        told = self.slack.told if channel == "slack_app" else [all_text(b["blocks"]) for b in self.hook.bodies()]
        by_digest: dict[str, list[str]] = {}
        for row in rows:
            by_digest.setdefault(row.left_in or "", []).append(row.id)
        ids = [found for words in told for found in _ID.findall(words)]
        return [one for found in ids for one in by_digest.get(found, [found])]

    def _words(self, channel: str) -> str:
        if channel == "slack_app":
            return "\n".join(self.slack.told)
        bodies = (self.hook if channel == "slack_webhook" else self.sink).bodies()
        return "\n".join(all_text(body.get("blocks", [])) or str(body) for body in bodies)


def storm(store: Store, make_run: MakeRun, *, runs: int = 100, incidents: int = 500) -> list[Figures]:
    """`incidents` over `runs`, evenly within a minute; then until everything is out."""
    with _world(store) as world:
        ids = [make_run(f"storm/run-{i:03d}") for i in range(runs)]
        for second in range(60):
            for n in range(second * incidents // 60, (second + 1) * incidents // 60):
                rule = RULES[n // runs % len(RULES)]
                world.story.happen(ids[n % runs], "open", world.now, rule=rule)
            world.second()
        for _ in range(300):
            world.second()
            if world.drained():
                break
        return [world.figures(c.name) for c in world.channels]


def outage(
    store: Store, make_run: MakeRun, *, seconds: int = 3600, incidents: int = 30, seed: int = 0
) -> list[Figures]:
    """Receivers that refuse, reset, stall and rate-limit for an hour, while incidents open, escalate and end."""
    chance = random.Random(seed)
    with _world(store, STALL_S) as world:
        ids = [make_run(f"outage/run-{i:03d}") for i in range(incidents)]
        moments: dict[int, list[tuple[int, str]]] = {}
        for run in ids:
            begin = chance.randrange(0, seconds - 600)
            for transition in ("open", "escalate", "close"):
                moments.setdefault(begin, []).append((run, transition))
                begin += chance.randrange(1, 300)
        troubles = [fake_slack.status(503), fake_slack.status(500), fake_slack.reset, fake_slack.rate_limited(20),
                    fake_slack.stall(2 * STALL_S)]  # fmt: skip

        def away(channel: str) -> Callable[[object], None]:
            def trouble(handler: object) -> None:
                world.requests[channel] += 1
                chance.choice(troubles)(handler)

            return trouble

        world.slack.refuse["*"] = away("slack_app")
        world.hook.trouble, world.sink.trouble = away("slack_webhook"), away("webhook")
        for second in range(seconds):
            for run, transition in moments.get(second, ()):
                severity = "warning" if transition == "open" else "critical"
                world.story.happen(run, transition, world.now, severity=severity)
            world.second()
        returned_at = world.now
        world.slack.refuse.clear()
        world.hook.trouble = world.sink.trouble = None
        for _ in range(1800):
            world.second()
            if world.drained():
                break
        return [world.figures(c.name, returned_at) for c in world.channels]


@contextmanager
def _world(store: Store, patience_s: float = 10.0) -> Iterator[World]:
    world = World(store, patience_s)
    try:
        yield world
    finally:
        time.sleep(2 * STALL_S)  # handlers that still stall end before their server does
        world.close()

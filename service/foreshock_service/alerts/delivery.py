"""The delivery worker: takes alerts from the outbox under a lease, sends them outside any transaction, notes what came.

At least once: a worker that dies after sending and before noting lets its lease run out, and the next one sends the
same `delivery_id` again. Retries back off from 5 s to ten minutes for about a day; then an alert is dead, and is shown
as such. When more messages would appear on a channel than it should carry in a minute, they leave as one digest a
minute. What quiet hours held leaves as one digest when they end. Order: `claims.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock_service.alerts import claims
from foreshock_service.alerts.base import Channel, ChannelError, Later, Message, Never, digest_id
from foreshock_service.alerts.hours import QuietHours
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Delivery

logger = logging.getLogger(__name__)

EVERY_S: Final = 1.0
DIGEST_OVER: Final = 3
"""Messages a minute and channel; more leave as digests."""
MAX_PAUSE_S: Final = 60.0


@dataclass
class _Pause:
    """A channel that did not answer, or asked for patience: nothing is tried before `until`."""

    until: float = 0.0
    failures: int = 0


@dataclass(frozen=True)
class _Round:
    """What leaves now: some alone, the rest as one. `threads` are the lines whose alerts are no new message."""

    alone: Sequence[Message] = ()
    together: Sequence[Message] = ()
    threads: frozenset[str] = frozenset()
    counts: bool = False
    """A single message that stands for a digest: the next one waits as after a digest."""


class DeliveryWorker:
    """A worker, one a channel in the service. `once()` sends what is due; returns how many alerts it dealt with."""

    def __init__(
        self,
        store: Store,
        channels: Mapping[str, Channel],
        *,
        digest_over: int = DIGEST_OVER,
        quiet: Mapping[str, QuietHours] | None = None,
        clock: Callable[[], float] = time.time,
        name: str = "alerts",
    ) -> None:
        self.name = name
        self._store = store
        self._channels = dict(channels)
        self._digest_over = digest_over
        self._quiet = dict(quiet or {})
        self._clock = clock
        self._pauses = {name: _Pause() for name in channels}
        self._woken = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """Looks once a second until `stop` is set."""
        while not stop.is_set():
            if not self.once():
                self._woken.wait(EVERY_S)

    def interrupt(self) -> None:
        """Lets `run` see that it shall stop."""
        self._woken.set()

    def once(self) -> int:
        """One round over all channels."""
        return sum(self._deliver(name, channel) for name, channel in self._channels.items())

    def _deliver(self, name: str, channel: Channel) -> int:
        now = self._clock()
        if now < self._pauses[name].until or not self._anything(name):
            return 0
        hours = self._quiet.get(name)
        with self._store.write() as session:
            rows = claims.due(session, name, now, channel.batch, hours.until(now) if hours else None)
            leaving = self._plan(session, channel, rows, now)
        if leaving.together:
            self._send_together(name, channel, leaving.together)
        return len(leaving.together) + self._send_alone(name, channel, leaving, now)

    def _anything(self, name: str) -> bool:
        """A look without a lock, for most rounds find nothing."""
        waiting = select(Delivery.id).where(Delivery.channel == name, Delivery.state.in_(("pending", "sending")))
        with self._store.read() as session:
            return session.scalar(waiting.limit(1)) is not None

    def _plan(self, session: Session, channel: Channel, rows: Sequence[Delivery], now: float) -> _Round:
        if not rows:
            return _Round()
        if sum(row.held_at is not None and row.next_at <= now for row in rows) > 1:
            return _Round(together=claims.take(session, rows, now))
        threads = frozenset(channel.in_thread(session, {row.line for row in rows if row.line}))
        fresh = [row for row in rows if row.line not in threads]
        # A line that gets a thread appears once, however much is told in it.
        new = len({row.line or row.id for row in fresh}) if channel.follows else len(fresh)
        if new <= self._digest_over - claims.messages_lately(session, channel.name, now):
            return _Round(alone=claims.take(session, rows, now), threads=threads)
        wait = self._just_told(session, channel, now)
        directly = claims.take(session, [row for row in rows if row.line in threads], now)
        if wait:
            return _Round(alone=directly, threads=threads)
        taken = claims.take(session, fresh, now)
        if len(taken) == 1:
            return _Round(alone=[*directly, *taken], threads=threads, counts=True)
        return _Round(alone=directly, together=taken, threads=threads)

    @staticmethod
    def _just_told(session: Session, channel: Channel, now: float) -> bool:
        if channel.digest_every_s <= 0:
            return False
        before = claims.last_digest_at(session, channel.name)
        recently = before is not None and now < before + channel.digest_every_s
        return recently or claims.elsewhere(session, channel.name, now)

    def _send_together(self, name: str, channel: Channel, messages: Sequence[Message]) -> Exception | None:
        """As one; as two halves where the receiver refuses what is in it, so that one alert does not take all along."""
        error = self._tried(name, messages[0], lambda: channel.send_digest(messages, self._clock()))
        if isinstance(error, Never) and error.content and len(messages) > 1:
            middle = len(messages) // 2
            first = self._send_together(name, channel, messages[:middle])
            if not isinstance(first, Later):
                return self._send_together(name, channel, messages[middle:])
            messages, error = messages[middle:], first
        now, digest = self._clock(), digest_id(messages)
        with self._store.write() as session:
            for message in messages:
                claims.note(session, message.delivery_id, error, now, digest)
        return error

    def _send_alone(self, name: str, channel: Channel, leaving: _Round, started: float) -> int:
        """One after the other. What is behind a failure in its line goes back, and so does what the lease is too
        short for, and everything once the channel as a whole does not take more."""
        stuck, begun, back = set[str](), set[str](), list[str]()
        for message in leaving.alone:
            paused = self._pauses[name].until > self._clock()
            if paused or message.line in stuck or self._clock() > started + claims.LEASE_S / 2:
                stuck.add(message.line)
                back.append(message.delivery_id)
                continue
            error = self._tried(name, message, lambda m=message: channel.send(m, self._clock()))  # type: ignore[misc]
            if isinstance(error, Later):
                stuck.add(message.line)
            in_thread = message.line in leaving.threads or (channel.follows and message.line in begun)
            begun.add(message.line)
            left_in = claims.IN_THREAD if in_thread else (message.delivery_id if leaving.counts else None)
            with self._store.write() as session:
                claims.note(session, message.delivery_id, error, self._clock(), left_in)
        if back:
            with self._store.write() as session:
                claims.give_back(session, back)
        return len(leaving.alone) - len(back)

    def _tried(self, name: str, message: Message, send: Callable[[], None]) -> Exception | None:
        pause = self._pauses[name]
        try:
            send()
        except ChannelError as failed:
            if isinstance(failed, Later) and failed.whole_channel:
                pause.failures += 1
                wait_s = failed.after_s or min(MAX_PAUSE_S, claims.back_off(pause.failures))
                pause.until = self._clock() + wait_s
            return failed
        except Exception as failed:
            # A defect of a channel must not stop the others; its alerts are tried again like any failure.
            logger.exception("channel failed on %s", message.delivery_id)
            return Later(f"{type(failed).__name__} in the channel")
        if pause.failures:
            pause.failures = 0
            with self._store.write() as session:
                claims.hasten(session, name, self._clock())
        return None

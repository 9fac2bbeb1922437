"""The delivery worker: takes alerts from the outbox under a lease, sends them outside any transaction, notes what came.

At least once: a worker that dies after sending and before noting lets its lease run out, and the next one sends the
same `delivery_id` again. Retries back off from 5 s to an hour; after twelve an alert is dead, and is shown as such.
When more alerts wait for a channel than it should carry in a minute, they leave as one digest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import CursorResult, func, or_, select, update
from sqlalchemy.orm import Session

from foreshock_service.alerts.base import Channel, ChannelError, Later, Message
from foreshock_service.alerts.outbox import silenced
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Delivery, Incident, Run

logger = logging.getLogger(__name__)

LEASE_S: Final = 120.0
MAX_TRIES: Final = 12
FIRST_RETRY_S: Final = 5.0
LAST_RETRY_S: Final = 3600.0
BATCH: Final = 200
EVERY_S: Final = 1.0
MINUTE_S: Final = 60.0
DIGEST_OVER: Final = 10
"""Alerts a minute and channel; more leave as one digest."""


class DeliveryWorker:
    """A worker. `once()` sends what is due and returns how many alerts it dealt with."""

    name = "alerts"

    def __init__(
        self,
        store: Store,
        channels: Mapping[str, Channel],
        *,
        digest_over: int = DIGEST_OVER,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._channels = dict(channels)
        self._digest_over = digest_over
        self._clock = clock
        self._woken = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """Looks once a second until `stop` is set; without channels it only waits."""
        while not stop.is_set():
            if not self._channels or not self.once():
                self._woken.wait(EVERY_S if self._channels else 60.0)

    def interrupt(self) -> None:
        """Lets `run` see that it shall stop."""
        self._woken.set()

    def once(self) -> int:
        """One round over all channels."""
        return sum(self._deliver(name, channel) for name, channel in self._channels.items())

    def _deliver(self, name: str, channel: Channel) -> int:
        now = self._clock()
        with self._store.write() as session:
            messages = claim(session, name, now)
            storm = len(messages) + _sent_lately(session, name, now) > self._digest_over
        if storm and len(messages) > 1:
            self._settle(messages, lambda: channel.send_digest(messages, self._clock()))
        else:
            for message in messages:
                self._settle([message], lambda m=message: channel.send(m, self._clock()))  # type: ignore[misc]
        return len(messages)

    def _settle(self, messages: Sequence[Message], send: Callable[[], None]) -> None:
        error: Exception | None = None
        try:
            send()
        except ChannelError as failed:
            error = failed
        except Exception as failed:
            # A defect of a channel must not stop the others; its alerts are tried again like any failure.
            logger.exception("channel failed on %s", messages[0].delivery_id)
            error = Later(f"{type(failed).__name__} in the channel")
        now = self._clock()
        with self._store.write() as session:
            for message in messages:
                note(session, message.delivery_id, error, now)


def claim(session: Session, channel: str, now: float) -> list[Message]:
    """Takes up to 200 due alerts of a channel under a lease; what was silenced meanwhile is suppressed instead."""
    due = or_(
        (Delivery.state == "pending") & (Delivery.next_at <= now),
        (Delivery.state == "sending") & (Delivery.lease_until <= now),
    )
    query = select(Delivery).where(Delivery.channel == channel, due).order_by(Delivery.created_at, Delivery.id)
    rows = session.scalars(query.limit(BATCH), execution_options={"populate_existing": True}).all()
    taken = []
    for row in rows:
        quiet = _silenced(session, row, now)
        values: dict[str, Any] = (
            {"state": "suppressed", "last_error": "silenced"}
            if quiet
            else {"state": "sending", "lease_until": now + LEASE_S, "attempts": row.attempts + 1}
        )
        # Conditional on what was read, or two workers would send the same alert.
        statement = update(Delivery).where(
            Delivery.id == row.id, Delivery.state == row.state, Delivery.lease_until == row.lease_until
        )
        result = session.execute(statement.values(**values), execution_options={"synchronize_session": False})
        assert isinstance(result, CursorResult)
        if result.rowcount == 1 and not quiet:
            taken.append(Message(delivery_id=row.id, event=row.event, payload=row.payload, created_at=row.created_at))
    return taken


def note(session: Session, delivery_id: str, error: Exception | None, now: float) -> None:
    """Writes what came of a try: sent, pending again after the back-off, or dead."""
    row = session.get(Delivery, delivery_id, populate_existing=True)
    if row is None or row.state != "sending":
        return  # deleted with its run, or settled by a worker that took over
    row.lease_until = 0.0
    if error is None:
        row.state, row.sent_at, row.last_error = "sent", now, ""
        return
    row.last_error = str(error)[:500]
    if isinstance(error, Later) and row.attempts < MAX_TRIES:
        row.state = "pending"
        row.next_at = now + max(back_off(row.attempts), error.after_s or 0.0)
        return
    row.state = "dead"
    logger.warning("alert %s on %s is dead after %d tries: %s", row.id, row.channel, row.attempts, row.last_error)


def back_off(tries: int) -> float:
    """Seconds until the next try: 5, 10, 20, … up to an hour."""
    return float(min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** max(0, tries - 1)))


def _sent_lately(session: Session, channel: str, now: float) -> int:
    query = select(func.count()).select_from(Delivery)
    query = query.where(Delivery.channel == channel, Delivery.state == "sent", Delivery.sent_at > now - MINUTE_S)
    return session.scalar(query) or 0


def _silenced(session: Session, row: Delivery, now: float) -> bool:
    run = session.get(Run, row.run_id) if row.run_id is not None else None
    if run is None:
        return False
    incident = session.get(Incident, row.incident_id) if row.incident_id else None
    return silenced(session, run, incident.rule if incident else None, now)

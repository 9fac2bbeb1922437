"""The rows of the outbox on their way out: which are due, taken under a lease, noted, given back.

**In order.** Of one channel and one line (an incident, or a command of its own) a later alert never leaves before an
earlier one is sent, dead or suppressed: not by a retry, not on another replica. Other lines are not held up. What quiet
hours hold does not block; when something urgent of its line comes, it goes along in front of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Final

from sqlalchemy import CursorResult, and_, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from foreshock_service.alerts.base import Later, Message
from foreshock_service.alerts.hours import urgent
from foreshock_service.alerts.silences import in_force
from foreshock_service.store.models import Delivery

logger = logging.getLogger(__name__)

LEASE_S: Final = 120.0
FIRST_RETRY_S: Final = 5.0
LAST_RETRY_S: Final = 600.0
MAX_TRIES: Final = 150
"""With the back-off above about a day: whoever is away for a night gets everything in the morning."""
MINUTE_S: Final = 60.0
IN_THREAD: Final = "thread"
HELD: Final = "held by quiet hours"
_UNSYNCED: Final = {"synchronize_session": False}


def due(session: Session, channel: str, now: float, most: int, quiet_until: float | None = None) -> list[Delivery]:
    """The alerts that may leave now, each line in order and from its head.

    What a silence matches is suppressed here, what quiet hours hold is put off until they end.
    """
    rows = _ready(session, channel, now, most)
    silences = in_force(session, now)
    left = []
    for row in rows:
        told = row.payload
        rule = (told.get("incident") or {}).get("rule")
        if silences.match(channel, row.event, told.get("project", ""), told.get("run", ""), rule):
            _change(session, row, state="suppressed", last_error="silenced")
        else:
            left.append(row)
    return left if quiet_until is None else _awake(session, channel, left, now, quiet_until)


def take(session: Session, rows: Sequence[Delivery], now: float) -> list[Message]:
    """Leases those rows that nobody else took since they were read; as messages, in the order given.

    Where another replica has just taken a line's head, the rest of the line is left to it as well.
    """
    last = _last_sent(session, rows)
    taken, lost = [], set[str]()
    for row in rows:
        line = row.line or row.id
        if line in lost:
            continue
        message = Message(
            delivery_id=row.id,
            event=row.event,
            payload=row.payload,
            created_at=row.created_at,
            line=line,
            attempt=row.attempts + 1,
            late=last.get((row.channel, line), -1) > row.ordinal,
        )
        if _change(session, row, state="sending", lease_until=now + LEASE_S, attempts=row.attempts + 1, held_at=None):
            taken.append(message)
        else:
            lost.add(line)
    return taken


def give_back(session: Session, ids: Collection[str]) -> None:
    """What was taken and never tried: due again at once, and no try is counted."""
    session.execute(
        update(Delivery)
        .where(Delivery.id.in_(ids), Delivery.state == "sending")
        .values(state="pending", lease_until=0.0, attempts=Delivery.attempts - 1),
        execution_options=_UNSYNCED,
    )


def note(session: Session, delivery_id: str, error: Exception | None, now: float, left_in: str | None = None) -> None:
    """Writes what came of a try: sent, pending again after the back-off, or dead."""
    row = session.get(Delivery, delivery_id, populate_existing=True)
    if row is None or row.state != "sending":
        return  # deleted with its run, or settled by a worker that took over
    row.lease_until = 0.0
    if error is None:
        row.state, row.sent_at, row.last_error, row.left_in = "sent", now, "", left_in
        return
    row.last_error = str(error)[:500]
    if isinstance(error, Later) and row.attempts < MAX_TRIES:
        row.state = "pending"
        row.next_at = now + max(back_off(row.attempts), error.after_s or 0.0)
        return
    row.state = "dead"
    logger.warning("alert %s on %s is dead after %d tries: %s", row.id, row.channel, row.attempts, row.last_error)


def hasten(session: Session, channel: str, now: float) -> None:
    """The receiver is back: what waits out its back-off is due now."""
    session.execute(
        update(Delivery)
        .where(
            Delivery.channel == channel, Delivery.state == "pending", Delivery.next_at > now, Delivery.held_at.is_(None)
        )
        .values(next_at=now),
        execution_options=_UNSYNCED,
    )


def back_off(tries: int) -> float:
    """Seconds until the next try: 5, 10, 20, … up to ten minutes."""
    return float(min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(16, max(0, tries - 1))))


def messages_lately(session: Session, channel: str, now: float) -> int:
    """Messages that people saw appear in the last minute: a digest is one, what went into a thread none."""
    query = select(func.count(func.distinct(func.coalesce(Delivery.left_in, Delivery.id)))).where(
        Delivery.channel == channel,
        Delivery.state == "sent",
        Delivery.sent_at > now - MINUTE_S,
        func.coalesce(Delivery.left_in, "") != IN_THREAD,
    )
    return session.scalar(query) or 0


def last_digest_at(session: Session, channel: str) -> float | None:
    """When a digest left last."""
    query = select(func.max(Delivery.sent_at)).where(
        Delivery.channel == channel, Delivery.left_in.is_not(None), Delivery.left_in != IN_THREAD
    )
    return session.scalar(query)


def elsewhere(session: Session, channel: str, now: float) -> bool:
    """True while a replica is sending on this channel: it may be a digest, whose end is not noted yet."""
    sending = select(Delivery.id).where(
        Delivery.channel == channel, Delivery.state == "sending", Delivery.lease_until > now
    )
    return session.scalar(sending.limit(1)) is not None


def _ready(session: Session, channel: str, now: float, most: int) -> Sequence[Delivery]:
    earlier = aliased(Delivery)
    waits = or_(
        and_(earlier.state == "pending", earlier.next_at > now, earlier.held_at.is_(None)),
        and_(earlier.state == "sending", earlier.lease_until > now),
    )
    blocked = exists().where(
        earlier.channel == channel, earlier.line == Delivery.line, earlier.ordinal < Delivery.ordinal, waits
    )
    ready = or_(
        and_(Delivery.state == "pending", Delivery.next_at <= now),
        and_(Delivery.state == "sending", Delivery.lease_until <= now),
    )
    query = select(Delivery).where(Delivery.channel == channel, ready, ~blocked)
    query = query.order_by(Delivery.ordinal, Delivery.created_at, Delivery.id).limit(most)
    return session.scalars(query, execution_options={"populate_existing": True}).all()


def _awake(session: Session, channel: str, rows: Sequence[Delivery], now: float, quiet_until: float) -> list[Delivery]:
    """In quiet hours: what is urgent, behind everything earlier of its line. The rest is held until they end."""
    last_urgent: dict[str | None, int] = {}
    for row in rows:
        if urgent(row.event, row.payload):
            last_urgent[row.line] = row.ordinal
    leaving = [row for row in rows if row.ordinal <= last_urgent.get(row.line, -1)]
    staying = [row for row in rows if row.ordinal > last_urgent.get(row.line, -1)]
    for row in staying:
        _change(session, row, state="pending", next_at=quiet_until, held_at=row.held_at or now, last_error=HELD)
    if last_urgent:
        held = select(Delivery).where(
            Delivery.channel == channel,
            Delivery.line.in_([line for line in last_urgent if line is not None]),
            Delivery.state == "pending",
            Delivery.held_at.is_not(None),
            Delivery.id.not_in([row.id for row in rows]),
        )
        leaving += [r for r in session.scalars(held) if r.ordinal < last_urgent[r.line]]
    return sorted(leaving, key=lambda r: (r.ordinal, r.id))


def _last_sent(session: Session, rows: Sequence[Delivery]) -> dict[tuple[str, str], int]:
    lines = {row.line for row in rows if row.line is not None}
    if not lines:
        return {}
    query = (
        select(Delivery.channel, Delivery.line, func.max(Delivery.ordinal))
        .where(Delivery.channel == rows[0].channel, Delivery.line.in_(lines), Delivery.state == "sent")
        .group_by(Delivery.channel, Delivery.line)
    )
    return {(channel, str(line)): ordinal for channel, line, ordinal in session.execute(query)}


def _change(session: Session, row: Delivery, **values: object) -> bool:
    """Conditional on what was read, or two workers would send the same alert."""
    statement = update(Delivery).where(
        Delivery.id == row.id,
        Delivery.state == row.state,
        Delivery.lease_until == row.lease_until,
        Delivery.attempts == row.attempts,
    )
    result = session.execute(statement.values(**values), execution_options=_UNSYNCED)
    assert isinstance(result, CursorResult)
    return result.rowcount == 1

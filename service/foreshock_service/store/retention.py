"""What is kept for days only: frames (partitions made ahead and dropped, on SQLite rows in chunks), deliveries.

A partition holds a day; where less than three days are kept, a smaller span, so that little more is kept than asked.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from sqlalchemy import delete, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from foreshock_service.store.engine import Store
from foreshock_service.store.models import Delivery

logger = logging.getLogger(__name__)

DAY_S = 86_400
SPANS_S = (DAY_S, 6 * 3600, 3600, 600, 60, 10)
"""What a partition may hold; each divides those before it."""
CHUNK, PAUSE_S = 500, 0.005
"""Rows of one transaction on SQLite, some 8 ms, and the pause in which those go on who wait to store frames."""
LOCK_WAIT_S, TRIES, BETWEEN_S = 0.2, 10, 0.3
"""How long a lock of all frames is waited for (whoever stores or reads frames waits behind whoever waits for it), how
often, and with what pause, in which those go on."""
NOT_AVAILABLE = "55P03"
Span = tuple[float, float]
T = TypeVar("T")


def unless_in_use(do: Callable[[], T]) -> T | None:
    """What `do` returns, tried again where others hold a lock for longer than `LOCK_WAIT_S`; None where they always do.

    A backup reads for hours: had this waited for it, every frame would have waited too.
    """
    for tried in range(TRIES):
        if tried:
            time.sleep(BETWEEN_S)
        try:
            return do()
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) != NOT_AVAILABLE:
                raise
    return None


def span_s(keep_days: float, every_s: float) -> int:
    """How much a partition holds: a third of what is kept or less, a day at most, and no less than is made ahead."""
    fitting = [span for span in SPANS_S if every_s <= span <= keep_days * DAY_S / 3]
    return max(fitting, default=min((span for span in SPANS_S if span >= every_s), default=DAY_S))


def partition_name(begin: float) -> str:
    """`frames_pYYYYMMDD` of a partition that begins with a day, UTC; else the time behind it, as `t063000`."""
    at = datetime.fromtimestamp(begin, UTC)
    return f"frames_p{at:%Y%m%d}" + ("" if begin % DAY_S == 0 else f"t{at:%H%M%S}")


def ensure_partitions(session: Session, now: float, *, ahead: int = 3, span: int = DAY_S) -> list[str]:
    """Makes the present span's and the next `ahead` spans' partitions where they are missing; returns the new names.

    Rows that went to the default partition meanwhile are moved. Larger partitions make room where they are empty, and
    stay where they are not. Nothing to do on SQLite. Raises SQLAlchemy's `OperationalError` where somebody else holds a
    lock for longer than `LOCK_WAIT_S`.
    """
    if session.get_bind().dialect.name != "postgresql":
        return []
    first = int(now // span) * span
    whole = (float(first), float(first + (ahead + 1) * span))
    if not _in_the_way(session, first, span) and not list(_gaps(whole, _partitions(session).values(), span)):
        return []
    session.execute(text(f"SET LOCAL lock_timeout = {int(1000 * LOCK_WAIT_S)}"))
    # An empty partition stays empty while it is dropped only if nobody can write to any.
    mode = "ACCESS EXCLUSIVE" if _in_the_way(session, first, span) else "SHARE UPDATE EXCLUSIVE"
    session.execute(text(f"LOCK TABLE frames IN {mode} MODE"))
    for name in _in_the_way(session, first, span) if mode == "ACCESS EXCLUSIVE" else ():
        session.execute(text(f"DROP TABLE {name}"))
    made = []
    for low, high in list(_gaps(whole, _partitions(session).values(), span)):
        _make(session, partition_name(low), low, high)
        made.append(partition_name(low))
    return made


def _in_the_way(session: Session, first: float, span: int) -> list[str]:
    """Partitions from `first` on that are larger than `span` and empty."""
    larger = [name for name, (low, high) in _partitions(session).items() if high - low > span and high > first]
    return [n for n in larger if session.scalar(text(f"SELECT 1 FROM {n} LIMIT 1")) is None]  # a time's name # nosec B608


def _gaps(whole: Span, taken: Iterable[Span], span: int) -> Iterator[Span]:
    """What no partition covers of the spans in `whole`, span by span."""
    for begin in range(int(whole[0]), int(whole[1]), span):
        low, high = float(begin), float(begin + span)
        for there in sorted(taken):
            if there[1] <= low or there[0] >= high:
                continue
            if there[0] > low:
                yield low, there[0]
            low = max(low, there[1])
        if low < high:
            yield low, high


def _partitions(session: Session) -> dict[str, Span]:
    """Name → [from, to) of every partition but the default one."""
    asked = text(
        "SELECT c.oid::regclass::text, pg_get_expr(c.relpartbound, c.oid) FROM pg_inherits i"
        " JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'frames'::regclass"
    )
    found = {}
    for name, bound in session.execute(asked):
        span = re.fullmatch(r"FOR VALUES FROM \('?([^')]+)'?\) TO \('?([^')]+)'?\)", bound)
        if span:
            found[name] = (float(span[1]), float(span[2]))
    return found


def _make(session: Session, name: str, low: float, high: float) -> None:
    session.execute(
        text(f"CREATE TABLE {name} (LIKE frames INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE)")
    )
    # Frames of up to four a page stay in their row, uncompressed: see migration 0004.
    session.execute(text(f"ALTER TABLE {name} SET (toast_tuple_target = 8160)"))
    session.execute(
        text(
            f"WITH moved AS (DELETE FROM frames_default WHERE received_at >= {low} AND received_at < {high}"
            f" RETURNING *) INSERT INTO {name} SELECT * FROM moved"  # a time's name # nosec B608
        )
    )
    session.execute(text(f"ALTER TABLE frames ATTACH PARTITION {name} FOR VALUES FROM ({low}) TO ({high})"))


def drop_old_frames(store: Store, now: float, keep_days: float) -> int:
    """Deletes frames received more than `keep_days` before `now`; returns rows (SQLite) or partitions (PostgreSQL).

    Whole partitions only on PostgreSQL, so that up to one span more is kept. Points, incidents and commands stay.
    """
    if store.dialect == "postgresql":
        return _drop_partitions(store, now, keep_days)
    cut = now - keep_days * DAY_S
    total = 0
    while True:
        # One process inserts in order of time, so the oldest rows have the lowest rowids and no index is needed.
        # Nobody waits for the disk: what a power cut brings back goes with the next upkeep.
        with store.write(durable=False) as session:
            deleted: int = (
                session.connection()
                .execute(
                    text(
                        "DELETE FROM frames WHERE rowid IN (SELECT rowid FROM frames ORDER BY rowid LIMIT :chunk)"
                        " AND received_at < :cut"
                    ),
                    {"chunk": CHUNK, "cut": cut},
                )
                .rowcount
            )
        total += deleted
        if deleted < CHUNK:
            return total
        time.sleep(PAUSE_S)


def drop_old_deliveries(store: Store, now: float, keep_days: float) -> int:
    """Deletes deliveries made more than `keep_days` before `now` that are over; returns how many.

    What still waits or is being sent stays, however old.
    """
    cut = now - keep_days * DAY_S
    over = ("sent", "suppressed", "dead")
    oldest = select(Delivery.id).where(Delivery.state.in_(over), Delivery.created_at < cut).limit(CHUNK)
    total = 0
    while True:
        with store.write() as session:
            done = session.connection().execute(delete(Delivery).where(Delivery.id.in_(oldest)))
        total += done.rowcount
        if done.rowcount < CHUNK:
            return total


def _drop_partitions(store: Store, now: float, keep_days: float) -> int:
    cut = now - keep_days * DAY_S
    with store.read() as session:
        stale = [name for name, (_, high) in _partitions(session).items() if high <= cut]
    dropped = 0
    for name in stale:
        if unless_in_use(partial(_drop, store, name)) is None:
            logger.warning("%s is old enough to go but in use: tried again with the next upkeep", name)
            break
        dropped += 1
    with store.write() as session:
        session.execute(text("DELETE FROM frames_default WHERE received_at < :cut"), {"cut": cut})
    return dropped


def _drop(store: Store, name: str) -> bool:
    with store.write() as session:
        session.execute(text(f"SET LOCAL lock_timeout = {int(1000 * LOCK_WAIT_S)}"))
        session.execute(text(f"DROP TABLE IF EXISTS {name}"))
    return True

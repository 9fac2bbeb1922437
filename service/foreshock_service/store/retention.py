"""What is kept for days only: frames (partitions made ahead and dropped, on SQLite rows in chunks), deliveries."""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import delete, select, text
from sqlalchemy.orm import Session

from foreshock_service.store.engine import Store
from foreshock_service.store.models import Delivery

DAY_S = 86_400
CHUNK = 2_000


def partition_name(day: int) -> str:
    """`frames_pYYYYMMDD` for the day that begins `day` days after the epoch, UTC."""
    return f"frames_p{datetime.fromtimestamp(day * DAY_S, UTC):%Y%m%d}"


def ensure_partitions(session: Session, now: float, *, ahead: int = 3) -> list[str]:
    """Makes today's and the next `ahead` days' partitions where they are missing; returns the new names.

    Rows that went to the default partition meanwhile are moved. Nothing to do on SQLite.
    """
    if session.get_bind().dialect.name != "postgresql":
        return []
    made = []
    for day in range(int(now // DAY_S), int(now // DAY_S) + ahead + 1):
        name, low, high = partition_name(day), day * DAY_S, (day + 1) * DAY_S
        if session.scalar(text("SELECT to_regclass(:name)"), {"name": name}) is not None:
            continue
        session.execute(text("LOCK TABLE frames IN SHARE UPDATE EXCLUSIVE MODE"))
        if session.scalar(text("SELECT to_regclass(:name)"), {"name": name}) is not None:
            continue
        session.execute(
            text(f"CREATE TABLE {name} (LIKE frames INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE)")
        )
        # Frames of up to four a page stay in their row, uncompressed: see migration 0004.
        session.execute(text(f"ALTER TABLE {name} SET (toast_tuple_target = 8160)"))
        session.execute(
            text(
                f"WITH moved AS (DELETE FROM frames_default WHERE received_at >= {low} AND received_at < {high}"
                f" RETURNING *) INSERT INTO {name} SELECT * FROM moved"  # a day's name # nosec B608
            )
        )
        session.execute(text(f"ALTER TABLE frames ATTACH PARTITION {name} FOR VALUES FROM ({low}) TO ({high})"))
        made.append(name)
    return made


def drop_old_frames(store: Store, now: float, keep_days: float) -> int:
    """Deletes frames received more than `keep_days` before `now`; returns rows (SQLite) or partitions (PostgreSQL).

    Whole days only on PostgreSQL, so that up to one day more is kept. Points, incidents and commands stay.
    """
    if store.dialect == "postgresql":
        return _drop_partitions(store, now, keep_days)
    cut = now - keep_days * DAY_S
    total = 0
    while True:
        # One process inserts in order of time, so the oldest rows have the lowest rowids and no index is needed.
        with store.write() as session:
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
    oldest = partition_name(int((now - keep_days * DAY_S) // DAY_S))
    with store.read() as session:
        names = session.scalars(
            text("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'frames'::regclass")
        ).all()
    stale = [name for name in names if name.startswith("frames_p") and name < oldest]
    for name in stale:
        with store.write() as session:
            session.execute(text(f"DROP TABLE IF EXISTS {name}"))
    with store.write() as session:
        session.execute(text("DELETE FROM frames_default WHERE received_at < :cut"), {"cut": now - keep_days * DAY_S})
    return len(stale)

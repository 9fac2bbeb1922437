"""Which message stands for which line of alerts: one head, edited, and the thread below it. For all replicas."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from foreshock_service.store.engine import Store
from foreshock_service.store.models import AlertThread, Delivery
from foreshock_service.store.upsert import insert_new


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """Where a line's head message stands, and what was told in it last."""

    conversation: str
    ts: str
    last_delivery: str


class ThreadBook:
    """The threads of one channel. Each call is one short transaction."""

    def __init__(self, store: Store, channel: str) -> None:
        self._store = store
        self._channel = channel

    def known(self, session: Session, lines: Collection[str]) -> set[str]:
        """Those of `lines` that have a thread."""
        query = select(AlertThread.line).where(AlertThread.channel == self._channel, AlertThread.line.in_(lines))
        return set(session.scalars(query))

    def find(self, line: str) -> Thread | None:
        """The thread of a line."""
        with self._store.read() as session:
            row = session.get(AlertThread, (self._channel, line))
            if row is None:
                return None
            return Thread(conversation=row.conversation, ts=row.ts, last_delivery=row.last_delivery)

    def begin(self, line: str, conversation: str, ts: str, delivery_id: str, now: float) -> None:
        """Keeps a new head. Where another replica was faster (two heads then stand there) its one stays."""
        with self._store.write() as session:
            told = session.get(Delivery, delivery_id)
            row = {"channel": self._channel, "line": line, "run_id": told.run_id if told else None}
            insert_new(
                session,
                AlertThread,
                [{**row, "conversation": conversation, "ts": ts, "last_delivery": delivery_id, "at": now}],
            )

    def told(self, line: str, delivery_id: str, now: float) -> None:
        """Notes what was told in the thread last."""
        with self._store.write() as session:
            session.execute(
                update(AlertThread)
                .where(AlertThread.channel == self._channel, AlertThread.line == line)
                .values(last_delivery=delivery_id, at=now)
            )

    def forget(self, line: str) -> None:
        """The head is gone: the next alert of the line begins anew."""
        with self._store.write() as session:
            session.execute(delete(AlertThread).where(AlertThread.channel == self._channel, AlertThread.line == line))

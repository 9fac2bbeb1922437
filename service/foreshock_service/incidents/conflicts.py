"""Inserts that lose a race quietly: the unique constraint decides which replica wrote the row."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from sqlalchemy import Insert, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from foreshock_service.store.models import Base


def insert_ignoring(session: Session, model: type[Base], values: dict[str, Any]) -> bool:
    """Inserts one row unless a unique constraint already holds its like. True where this call wrote it.

    On PostgreSQL it waits for a concurrent insert of the same key and then answers False; on SQLite writers queue.
    Raises sqlalchemy's errors for anything but a unique conflict.
    """
    statement = _insert(model, session.get_bind().dialect.name)
    return session.execute(statement, values).first() is not None


@lru_cache
def _insert(model: type[Base], dialect: str) -> Insert:
    table = model.__table__
    assert isinstance(table, Table)
    make = postgresql.insert if dialect == "postgresql" else sqlite.insert
    # RETURNING, for psycopg's row count of an insert is not to be relied on.
    return make(table).on_conflict_do_nothing().returning(*table.primary_key)

"""Inserts that leave alone what is there, on both databases."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Insert
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from foreshock_service.store.models import Base


def insert_new(session: Session, model: type[Base], rows: Sequence[dict[str, Any]]) -> int:
    """Inserts those `rows` that meet no unique constraint; returns how many. All rows have the same keys.

    On PostgreSQL it waits for another transaction that is inserting the same key. Column defaults are applied.
    """
    if not rows:
        return 0
    # Rows as parameters, not in VALUES, whose SQL would be compiled anew for every number of rows. An INSERT's rowcount
    # is not kept unless asked for: it reads -1.
    statement = _insert(model, session.get_bind().dialect.name)
    done = session.connection().execute(statement, list(rows), execution_options={"preserve_rowcount": True})
    return done.rowcount


@lru_cache
def _insert(model: type[Base], dialect: str) -> Insert:
    make = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return make(model).on_conflict_do_nothing()

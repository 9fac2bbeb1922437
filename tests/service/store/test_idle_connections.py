from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import select

from foreshock_service.store import engine as module
from foreshock_service.store.engine import Store
from foreshock_service.store.models import Run

CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = %s"


@pytest.fixture
def store(migrated_postgres_url: str) -> Iterator[Store]:
    opened = Store(migrated_postgres_url)
    yield opened
    opened.close()


def cut(store: Store) -> None:
    """The server ends every connection of the store, as a restart would."""
    with psycopg.connect(store.url.set(drivername="postgresql").render_as_string(hide_password=False)) as connection:
        connection.execute(CUT, (store.url.database,))


def test_connections_that_died_while_idle_are_made_anew_and_nobody_notices(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.0)
    with store.read() as first, store.read() as second:  # two connections in the pool
        assert first.scalars(select(Run)).all() == second.scalars(select(Run)).all() == []
    cut(store)
    for _ in range(3):
        with store.read() as session:
            assert session.scalars(select(Run)).all() == []


def test_a_connection_in_use_a_moment_ago_is_not_asked_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(store.engine.dialect, "do_ping", asked.append)
    for _ in range(3):
        with store.read() as session:
            session.scalars(select(Run)).all()
    assert asked == []

from __future__ import annotations

import threading

import pytest
from sqlalchemy import inspect, text

from foreshock_service.store import migrate
from foreshock_service.store.engine import Store


@pytest.fixture
def empty(database_url: str):
    store = Store(database_url)
    yield store
    store.close()


def test_migrations_and_metadata_agree(empty: Store) -> None:
    assert migrate.current(empty) is None
    migrate.upgrade(empty)
    assert migrate.differences(empty) == []


def test_downgrade_leaves_nothing_and_upgrade_works_again(empty: Store) -> None:
    migrate.upgrade(empty)
    migrate.downgrade(empty, "base")
    left = set(inspect(empty.engine).get_table_names()) | set(inspect(empty.engine).get_view_names())
    assert left <= {"alembic_version", "sqlite_sequence"}
    migrate.upgrade(empty)
    assert migrate.differences(empty) == []


def test_an_unmigrated_database_is_refused_with_the_remedy(empty: Store) -> None:
    with pytest.raises(migrate.SchemaMismatchError, match="foreshock db upgrade"):
        migrate.require(empty)
    migrate.upgrade(empty)
    migrate.require(empty)


def test_replicas_that_migrate_at_once_do_not_collide(postgres_url: str) -> None:
    stores = [Store(postgres_url) for _ in range(3)]
    reached: list[str] = []
    threads = [threading.Thread(target=lambda s=s: reached.append(migrate.upgrade(s))) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(reached)) == 1
    assert len(reached) == 3
    assert reached[0] == max(migrate.accepted())
    for store in stores:
        store.close()


def test_grafana_role_reads_the_views_and_nothing_else(postgres_url: str) -> None:
    store = Store(postgres_url)
    migrate.upgrade(store)
    names = [name for name in inspect(store.engine).get_view_names() if name.startswith("grafana_")]
    assert len(names) == 12
    with store.engine.connect() as connection:
        connection.execute(text("SET ROLE foreshock_grafana"))
        for name in names:
            connection.execute(text(f"SELECT * FROM {name}"))
        with pytest.raises(Exception, match="permission denied"):
            connection.execute(text("SELECT * FROM tokens"))
    store.close()

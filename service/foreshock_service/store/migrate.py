"""Migrations, run in-process: `upgrade(store)` brings a database to head, one replica at a time.

PostgreSQL: under an advisory lock, in one transaction. SQLite: the store's file lock and one write transaction.
Replicas accept head and head - 1 (`accepted`), so that a rolling upgrade expands first and contracts later.
"""

from __future__ import annotations

import re
import time
from typing import Any

from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from alembic import command
from foreshock_service.shipped import shipped
from foreshock_service.store.engine import Store, StoreError
from foreshock_service.store.models import Base

ADVISORY_LOCK = 0x666F7265  # "fore"
PARTITION = re.compile(r"^frames_(p\d{8}|default)\Z")


class SchemaMismatchError(StoreError):
    """The database is at a revision that this version of Foreshock does not work with."""


def belongs(_object: Any, name: str | None, kind: str, _reflected: bool, _compare_to: Any) -> bool:
    """False for the partitions of `frames`, which the metadata does not name."""
    return not (kind == "table" and name is not None and PARTITION.match(name))


def upgrade(store: Store, revision: str = "head") -> str:
    """Migrates up to `revision` and makes the coming days' partitions. Returns the revision reached."""
    return _run(store, "upgrade", revision)


def downgrade(store: Store, revision: str) -> str:
    """Migrates down to `revision` ("base": an empty database). Data of dropped tables is gone."""
    return _run(store, "downgrade", revision)


def current(store: Store) -> str | None:
    """The database's revision, or None before the first migration."""
    with store.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def accepted() -> frozenset[str]:
    """Head and head - 1: the revisions this version works with. Head alone where its migration says `needed`."""
    scripts = ScriptDirectory.from_config(_config(None))
    head = scripts.get_revision("head")
    assert head is not None
    below = None if getattr(head.module, "needed", False) else head.down_revision
    return frozenset({head.revision, *([below] if isinstance(below, str) else [])})


def require(store: Store) -> None:
    """Raises `SchemaMismatchError`, saying what to run, unless the database's revision is accepted."""
    found = current(store)
    if found not in accepted():
        raise SchemaMismatchError(f"the database is at revision {found or 'none'}: run `foreshock db upgrade`")


def differences(store: Store) -> list[Any]:
    """What autogenerate would still change: empty where the metadata and the migrations agree."""
    with store.engine.connect() as connection:
        options = {"include_object": belongs, "compare_type": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata))


def _config(connection: Connection | None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(shipped("alembic")).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _run(store: Store, direction: str, revision: str) -> str:
    from foreshock_service.store.retention import ensure_partitions

    with store.engine.begin() as connection:
        if store.dialect == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
        getattr(command, direction)(_config(connection), revision)
        if direction == "upgrade":
            ensure_partitions(Session(bind=connection, join_transaction_mode="rollback_only"), time.time())
        return MigrationContext.configure(connection).get_current_revision() or "base"

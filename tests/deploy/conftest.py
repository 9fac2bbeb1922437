"""The service's fixtures, for tests of what is shipped around it."""

from __future__ import annotations

from tests.service.api.conftest import house
from tests.service.conftest import (
    migrated_postgres,
    migrated_postgres_url,
    new_trainer,
    postgres_server,
    postgres_url,
    sqlite_url,
)

__all__ = [
    "house",
    "migrated_postgres",
    "migrated_postgres_url",
    "new_trainer",
    "postgres_server",
    "postgres_url",
    "sqlite_url",
]

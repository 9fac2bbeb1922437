"""alembic's entry: runs on the connection that `store.migrate` hands over, for developers on FORESHOCK_DATABASE_URL."""

from __future__ import annotations

import os
from typing import Any

from alembic import context
from foreshock_service.store.engine import Store
from foreshock_service.store.migrate import belongs
from foreshock_service.store.models import Base


def run(connection: Any) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        include_object=belongs,
        compare_type=True,
        render_as_batch=connection.dialect.name == "sqlite",
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    store = Store(os.environ["FORESHOCK_DATABASE_URL"])
    with store.engine.begin() as connection:
        run(connection)
    store.close()

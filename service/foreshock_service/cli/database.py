"""The store as the commands that run beside it open it: same settings, no lock, no migration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from foreshock_service.cli.out import say

if TYPE_CHECKING:
    from foreshock_service.store.engine import Store

DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="Instead of FORESHOCK_DATABASE_URL.", show_default=False)
]


@contextmanager
def opened(database_url: str | None, *, exclusive: bool) -> Iterator[Store]:
    """The store; exits 2 with one line when it cannot be opened. `exclusive` False works beside a running service."""
    from sqlalchemy.exc import SQLAlchemyError

    from foreshock_service.settings import Settings
    from foreshock_service.store.engine import Store, StoreError

    url = database_url or Settings().database_url.get_secret_value()
    try:
        store = Store(url, pool_size=2, exclusive=exclusive)
        try:
            yield store
        finally:
            store.close()
    except StoreError as error:
        say(f"foreshock: {error}", err=True)
        raise typer.Exit(2) from None
    except SQLAlchemyError as error:
        # Its text may hold the connection string: the kind of error is enough.
        say(f"foreshock: the database does not answer as it should ({type(error).__name__})", err=True)
        raise typer.Exit(2) from None

"""`foreshock db`."""

from __future__ import annotations

import typer

from foreshock_service.cli.database import DatabaseUrl, opened
from foreshock_service.cli.out import say

app = typer.Typer(help="Migrate the database, show its revision.", no_args_is_help=True, add_completion=False)


@app.command()
def upgrade(database_url: DatabaseUrl = None) -> None:
    """Migrate to head. Safe beside running replicas on PostgreSQL: one migrates, the others wait."""
    from foreshock_service.store import migrate

    with opened(database_url, exclusive=True) as store:
        say(f"at revision {migrate.upgrade(store)}")


@app.command()
def current(database_url: DatabaseUrl = None) -> None:
    """The database's revision, and whether this version accepts it."""
    from foreshock_service.store import migrate

    with opened(database_url, exclusive=False) as store:
        found = migrate.current(store)
        accepted = found in migrate.accepted()
    say(f"at revision {found or 'none'}, {'accepted' if accepted else 'not accepted: run foreshock db upgrade'}")
    if not accepted:
        raise typer.Exit(1)

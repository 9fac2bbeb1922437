"""`foreshock token`: works on the database itself, for the first token there is no other way in."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from foreshock_service.cli.client import JsonFlag, show
from foreshock_service.cli.database import DatabaseUrl, opened
from foreshock_service.cli.out import say

app = typer.Typer(help="Create, list and revoke bearer tokens.", no_args_is_help=True, add_completion=False)
SCOPES = ("ingest", "read", "operate", "admin")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What it is for, as `trainer`.")],
    scope: Annotated[list[str], typer.Option("--scope", help=f"Of {', '.join(SCOPES)}; repeat for several.")],
    project: Annotated[str | None, typer.Option(help="Bind it to one project.")] = None,
    days: Annotated[float | None, typer.Option(min=0.01, help="Days until it expires; default: never.")] = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a token and print its secret, once. The database keeps only its hash."""
    from foreshock_service.api import tokens
    from foreshock_service.api.rooms import valid_name
    from foreshock_service.store import migrate

    unknown = [s for s in scope if s not in SCOPES]
    if unknown:
        raise typer.BadParameter(f"unknown scope {unknown[0]!r}; there are {', '.join(SCOPES)}")
    for what, word in (("name", name), ("project", project)):
        if word is not None and not valid_name(word):
            raise typer.BadParameter(f"{what} must be 1-128 letters, digits, '.', '_' or '-'")
    with opened(database_url, exclusive=False) as store:
        if migrate.current(store) is None:
            migrate.upgrade(store)
        migrate.require(store)
        with store.write() as session:
            row, secret = tokens.create(
                session,
                name=name,
                scopes=sorted(set(scope)),
                project=project,
                expires_at=time.time() + days * 86_400 if days is not None else None,
                actor="cli",
            )
            token_id = row.id
    say(f"id {token_id}; the secret is shown only now:", err=True)
    say(secret)


@app.command("list")
def list_tokens(database_url: DatabaseUrl = None, as_json: JsonFlag = False) -> None:
    """All tokens, without their secrets."""
    from sqlalchemy import select

    from foreshock_service.api.encoding import iso
    from foreshock_service.store.models import Token

    with opened(database_url, exclusive=False) as store, store.read() as session:
        rows = [
            {
                "id": t.id,
                "name": t.name,
                "scopes": ",".join(t.scopes),
                "project": t.project,
                "created": iso(t.created_at),
                "expires": iso(t.expires_at),
                "revoked": iso(t.revoked_at),
                "last_used": iso(t.last_used_at),
            }
            for t in session.scalars(select(Token).order_by(Token.created_at))
        ]
    columns = ("id", "name", "scopes", "project", "created", "expires", "revoked", "last_used")
    show(rows, columns, as_json, "no tokens")


@app.command()
def revoke(
    token: Annotated[str, typer.Argument(help="Its id, from `foreshock token list`.")], database_url: DatabaseUrl = None
) -> None:
    """Revoke a token for good. Running services honour it for at most FORESHOCK_TOKEN_CACHE_S more seconds."""
    from foreshock_service.api import tokens

    with opened(database_url, exclusive=False) as store, store.write() as session:
        done = tokens.revoke(session, token, actor="cli")
    if not done:
        say("foreshock: no live token has that id", err=True)
        raise typer.Exit(1)
    say(f"{token}: revoked")

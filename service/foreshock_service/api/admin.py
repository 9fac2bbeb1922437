"""Tokens by REST, for administrators. `foreshock token` does the same beside the database."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from foreshock_service.api import tokens
from foreshock_service.api.access import Admin
from foreshock_service.api.encoding import Body
from foreshock_service.api.paging import Cursor, Limit, newest_first, split
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import ID_PATTERN, NAME_PATTERN, InRooms
from foreshock_service.errors import Conflict, Forbidden, NotFound
from foreshock_service.store.models import Token

router = APIRouter(prefix="/v1/tokens", tags=["tokens"])


class TokenBody(Body):
    """A token, without its secret, which nobody has but its holder."""

    id: str
    name: str
    project: str | None = Field(description="null: every project")
    scopes: list[str]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None = Field(description="To about a minute.")


class TokenCreated(TokenBody):
    """A new token with its secret: shown here, once."""

    secret: str = Field(examples=["fsk_…"])


class TokensPage(Body):
    tokens: list[TokenBody]
    next: str | None


class TokenAsked(BaseModel):
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"name": "trainer", "scopes": ["ingest"], "project": "math"}]}
    )

    name: str = Field(pattern=NAME_PATTERN)
    scopes: list[Literal["ingest", "read", "operate", "admin"]] = Field(min_length=1, max_length=4)
    project: str | None = Field(None, pattern=NAME_PATTERN, description="null: every project.")
    days: float | None = Field(None, gt=0, le=3650, description="Days until it expires; null: never.")


@router.get("", responses=documented())
def list_tokens(rooms: InRooms, caller: Admin, limit: Limit = 100, cursor: Cursor = None) -> TokensPage:
    """Tokens, newest first, revoked ones too."""
    query = select(Token)
    if caller.project is not None:
        query = query.where(Token.project == caller.project)
    with rooms.store.read() as session:
        rows = session.scalars(newest_first(query, Token.created_at, Token.id, cursor, limit)).all()
        page, following = split(list(rows), limit, "created_at")
        return TokensPage(tokens=[TokenBody.model_validate(row) for row in page], next=following)


@router.post("", status_code=201, responses=documented())
def create_token(rooms: InRooms, caller: Admin, asked: TokenAsked) -> TokenCreated:
    """Makes a token. To rotate: make a second, hand it out, revoke the first; both work meanwhile."""
    if not caller.covers(asked.project or ""):
        raise Forbidden("This token is bound to a project and makes tokens only for it.")
    expires_at = time.time() + asked.days * 86_400 if asked.days is not None else None
    with rooms.store.write() as session:
        row, secret = tokens.create(
            session,
            name=asked.name,
            scopes=sorted(set(asked.scopes)),
            project=asked.project,
            expires_at=expires_at,
            actor=caller.name,
        )
        return TokenCreated(**TokenBody.model_validate(row).__dict__, secret=secret)


@router.delete("/{token_id}", status_code=204, responses=documented(404, 409))
def revoke_token(rooms: InRooms, caller: Admin, token_id: Annotated[str, Path(pattern=ID_PATTERN)]) -> Response:
    """Revokes for good: here at once, on other replicas within `FORESHOCK_TOKEN_CACHE_S`."""
    with rooms.store.write() as session:
        row = session.get(Token, token_id)
        if row is None or not caller.covers(row.project or ""):
            raise NotFound("No such token.")
        if not tokens.revoke(session, token_id, actor=caller.name):
            raise Conflict("It was revoked before.")
    rooms.tokens.forget()
    return Response(status_code=204)

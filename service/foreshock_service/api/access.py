"""Who may call what: each route depends on one of these, and the OpenAPI document says which scopes it takes."""

from __future__ import annotations

from collections.abc import Sequence
from hmac import compare_digest
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import Depends, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from starlette.requests import Request

from foreshock_service.api.principal import (
    COOKIE,
    CSRF_HEADER,
    LOOPBACK,
    SAFE_METHODS,
    Principal,
    csrf_of,
    is_local,
    same_origin,
)
from foreshock_service.api.rooms import Rooms, rooms_of
from foreshock_service.errors import Forbidden, Unauthenticated

scheme = HTTPBearer(
    auto_error=False,
    scheme_name="token",
    description="A bearer token. Any one of the scopes listed at a route suffices; a loopback client needs none.",
)


async def _from_token(rooms: Rooms, secret: str) -> Principal | None:
    known = rooms.tokens.cached(secret)
    if isinstance(known, bool):
        return await run_in_threadpool(rooms.tokens.look_up, secret)
    return known


async def recognise(request: Request, rooms: Rooms, secret: str | None) -> Principal | None:
    """The caller, None for an unknown one. A bearer wins over a cookie, and both over being on loopback.

    A bad bearer is refused even on loopback: a job that was given a token should learn that it does not work.
    Raises `Forbidden` for a request that another site's page caused.
    """
    if secret:
        return await _from_token(rooms, secret)
    unsafe = request.method not in SAFE_METHODS
    cookie = request.cookies.get(COOKIE)
    if cookie:
        principal = await _from_token(rooms, cookie)
        if principal is not None:
            csrf = csrf_of(cookie)
            if unsafe and not (same_origin(request) and compare_digest(await _csrf_sent(request), csrf)):
                raise Forbidden("The CSRF value of this login is missing or wrong.")
            return Principal(principal.name, principal.scopes, principal.project, csrf)
    if rooms.settings.trust_loopback and is_local(request):
        if unsafe and not same_origin(request):
            raise Forbidden("Sent by another site's page.")
        return LOOPBACK
    return None


async def _csrf_sent(request: Request) -> str:
    return request.headers.get(CSRF_HEADER) or (await form_of(request)).get("csrf", "")


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a urlencoded form, the first value of each; empty for anything else."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        return {}
    try:
        fields = parse_qs((await request.body()).decode(), max_num_fields=20)
    except ValueError:
        return {}
    return {name: values[0] for name, values in fields.items()}


async def identify(
    request: Request,
    scopes: SecurityScopes,
    rooms: Annotated[Rooms, Depends(rooms_of)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(scheme)],
) -> Principal:
    """The caller with one of the route's scopes, within its project where the path names one."""
    return await admitted(request, rooms, scopes.scopes, credentials.credentials if credentials else None)


async def admitted(request: Request, rooms: Rooms, scopes: Sequence[str], secret: str | None) -> Principal:
    """`identify` for a route that resolves no dependencies, for speed. Raises `Unauthenticated`, `Forbidden`."""
    principal = await recognise(request, rooms, secret)
    if principal is None:
        raise Unauthenticated("A token that is known, not revoked and not expired is needed.")
    if not principal.may(*scopes):
        raise Forbidden(f"Needs one of these scopes: {', '.join(scopes)}.")
    project = request.path_params.get("project")
    if project is not None:
        principal.check_project(project)
    return principal


Trainer = Annotated[Principal, Security(identify, scopes=["ingest", "read"])]
Acker = Annotated[Principal, Security(identify, scopes=["ingest", "operate"])]
Reader = Annotated[Principal, Security(identify, scopes=["read"])]
Operator = Annotated[Principal, Security(identify, scopes=["operate"])]
Admin = Annotated[Principal, Security(identify, scopes=["admin"])]

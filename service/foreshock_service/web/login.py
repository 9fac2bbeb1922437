"""The log-in: the bearer token itself goes into an HttpOnly, SameSite=Strict cookie.

Nothing to forge for whoever reads the database, which holds only hashes; revoking the token ends every log-in made
with it.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import RedirectResponse
from starlette.requests import Request

from foreshock_service.api.access import form_of, recognise
from foreshock_service.api.principal import COOKIE, Principal, same_origin
from foreshock_service.api.rooms import InRooms, Rooms, rooms_of
from foreshock_service.errors import Forbidden, Unauthenticated
from foreshock_service.web.rendering import html

router = APIRouter(include_in_schema=False)


async def _visitor(request: Request, rooms: Annotated[Rooms, Depends(rooms_of)]) -> Principal | None:
    """Who looks at the page: by cookie, or on loopback. None: must log in. A bearer does not open pages."""
    principal = await recognise(request, rooms, None)
    return principal if principal is not None and principal.may("read") else None


async def _operator(visitor: Annotated[Principal | None, Depends(_visitor)]) -> Principal:
    if visitor is None:
        raise Unauthenticated("Log in first.")
    if not visitor.may("operate"):
        raise Forbidden("Needs the scope operate.")
    return visitor


Visitor = Annotated[Principal | None, Depends(_visitor)]
Operator = Annotated[Principal, Depends(_operator)]


@router.get("/login")
async def show_login(rooms: InRooms) -> Response:
    """The form."""
    return html("login.html", None, wrong=False)


@router.post("/login")
async def log_in(request: Request, rooms: InRooms) -> Response:
    """Takes a token of scope `read` or more and sets the cookie."""
    if not same_origin(request):
        raise Forbidden("Sent by another site's page.")
    secret = (await form_of(request)).get("token", "").strip()
    principal = await run_in_threadpool(rooms.tokens.look_up, secret) if secret else None
    if principal is None or not principal.may("read"):
        return html("login.html", None, 401, wrong=True)
    answer = RedirectResponse("/", 303)
    answer.set_cookie(
        COOKIE,
        secret,
        max_age=round(rooms.settings.login_hours * 3600),
        path="/",
        secure=request.url.scheme == "https" or rooms.settings.public_url.startswith("https:"),
        httponly=True,
        samesite="strict",
    )
    return answer


@router.post("/logout")
async def log_out(request: Request, visitor: Visitor) -> Response:
    """Forgets the cookie. `visitor` has checked its CSRF value."""
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
    return answer

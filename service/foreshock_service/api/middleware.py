"""What surrounds every request, as one plain ASGI layer: rate, body size, security headers, access log, counters.

What trainers do all day, posting envelopes, is answered from here: the way through routing and dependencies costs three
times as much as everything else that a small envelope needs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreshock_service.api.headers import quick
from foreshock_service.api.limits import Buckets
from foreshock_service.api.principal import bearer, digest
from foreshock_service.api.problems import answer_to, problem_response
from foreshock_service.api.telemetry import Telemetry
from foreshock_service.errors import TooLarge, TooMany
from foreshock_service.settings import MIB, Settings

access = logging.getLogger("foreshock.access")

SMALL_BODY = MIB
"""Everything but ingest is small."""
INGEST = "/v1/ingest"
LEFT = 499
"""What is counted where a caller went away before it had sent its request; nginx's number."""
UNLIMITED = ("/healthz", "/readyz")
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}
"""A page that needs more says so in its own Content-Security-Policy."""
_RAW = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
_NO_STORE = (b"cache-control", b"no-store")
Direct = Mapping[tuple[str, str], Callable[[Request], Awaitable[Response]]]
"""(method, path) → the handler that answers it without routing. It finds its rooms and its caller by itself."""


class BodyTooLarge(HTTPException):
    """Raised out of `receive`. FastAPI turns any other error while it reads a body into 400."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"The body is larger than {limit} bytes.")


class BodyTooSlow(HTTPException):
    """As `BodyTooLarge`: whoever drips a body holds a place for ever."""

    def __init__(self, seconds: float) -> None:
        super().__init__(408, f"The body was not here within {seconds:g} s.", {"Connection": "close"})


class Boundary:
    """See the module."""

    def __init__(
        self, app: ASGIApp, settings: Settings, telemetry: Telemetry, direct: Direct = MappingProxyType({})
    ) -> None:
        self._app = app
        self._settings = settings
        self._telemetry = telemetry
        self._direct = direct
        self._ingest = Buckets(settings.ingest_rate_per_s, settings.rate_burst_s)
        self._other = Buckets(settings.request_rate_per_s, settings.rate_burst_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = _completed(list(message.get("headers", ())), scope["path"])
            await send(message)

        try:
            await self._guarded(scope, receive, sending)
        except ClientDisconnect:
            status = LEFT  # in the middle of its body: nobody is there to be answered
        finally:
            self._note(scope, status, time.perf_counter() - started)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        request = quick(scope)
        ingest = path == INGEST
        if path not in UNLIMITED:
            wait_s = (self._ingest if ingest else self._other).take(_caller(request))
            if wait_s > 0:
                self._telemetry.rate_limited.inc()
                problem = TooMany("Slow down.", retry_after_s=wait_s)
                await problem_response(problem)(scope, receive, send)
                return
        limit = self._settings.max_body_bytes if ingest else min(SMALL_BODY, self._settings.max_body_bytes)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > limit:
            problem_ = TooLarge(f"The body is larger than {limit} bytes.", limit=limit)
            await problem_response(problem_)(scope, receive, send)
            return
        receive = _counted(receive, limit, self._settings.request_timeout_s)
        handler = self._direct.get((scope["method"], path))
        if handler is None:
            await self._app(scope, receive, send)
            return
        scope["direct"] = path
        request = quick(scope, receive)
        try:
            response = await handler(request)
        except Exception as error:
            response = await answer_to(request, error)
        await response(scope, receive, send)

    def _note(self, scope: MutableMapping[str, Any], status: int, seconds: float) -> None:
        route = str(scope.get("direct") or getattr(scope.get("route"), "path", "unmatched"))
        self._telemetry.request(scope["method"], route, status, seconds)
        if not self._settings.access_log or route in UNLIMITED:
            return
        # What trainers do all day is no news while it works.
        level = logging.DEBUG if status < 400 and route.endswith(("/ingest", "/health")) else logging.INFO
        if not access.isEnabledFor(level):
            return
        # The query is left out: it may hold what someone pasted by mistake.
        path = _UNPRINTABLE.sub("?", scope["path"])[:300]
        access.log(level, "%s %s %d %.1fms", scope["method"], path, status, 1000 * seconds)


def _completed(headers: list[tuple[bytes, bytes]], path: str) -> list[tuple[bytes, bytes]]:
    """The answer's headers with those that every answer has, where it has none of its own by that name."""
    given = {name.lower() for name, _ in headers}
    headers += [pair for pair in _RAW if pair[0] not in given]
    if path.startswith("/v1/") and _NO_STORE[0] not in given:
        headers.append(_NO_STORE)
    return headers


def _caller(request: Request) -> str:
    """Rates are per client address and token: one busy job never starves its neighbours, and guessing is slow."""
    host = request.client.host if request.client else ""
    secret = bearer(request)
    return f"{host} {digest(secret)[:16]}" if secret else host


def _counted(receive: Receive, limit: int, timeout_s: float) -> Receive:
    seen, until, whole = 0, time.monotonic() + timeout_s, False

    async def receiving() -> Message:
        nonlocal seen, whole
        if whole:
            return await receive()  # waits for the caller to leave: an event stream does so for hours
        try:
            async with asyncio.timeout(until - time.monotonic()):
                message = await receive()
        except TimeoutError:
            raise BodyTooSlow(timeout_s) from None
        if message["type"] == "http.request":
            whole = not message.get("more_body", False)
            seen += len(message.get("body", b""))
            if seen > limit:
                raise BodyTooLarge(limit)
        return message

    return receiving

"""Requests at the least cost: headers looked up in a dictionary, where Starlette decodes and compares them all at every
look; a body that comes in one piece taken as it is."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request, empty_receive
from starlette.types import Receive, Scope


class QuickHeaders(Headers):
    """The headers of a request. As with Starlette's, of a header that was sent twice `get` tells the first."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(self.raw)}

    def __getitem__(self, key: str) -> str:
        return self._first[key.lower()]

    def __contains__(self, key: object) -> bool:
        return str(key).lower() in self._first


def quick(scope: Scope, receive: Receive = empty_receive) -> Request:
    """The request of an ASGI scope, whose names of headers are in lower case as ASGI has them."""
    request = Request(scope, receive)
    known = scope.get("foreshock_headers")
    if known is None:
        known = scope["foreshock_headers"] = QuickHeaders(scope)
    request._headers = known
    return request


async def whole_body(request: Request) -> bytes:
    """`request.body()`, once. Raises `ClientDisconnect`, and whatever the layer that counts and times it raises."""
    parts, more = [], True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)

"""`POST /v1/ingest`: frames in, commands out. A 200 means that everything up to `acknowledged` is on disk.

`middleware.py` calls the route's function by itself; the route tells the OpenAPI document of it.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from foreshock.wire import Envelope
from foreshock.wire.codec import JSON, MSGPACK, decode_envelope, encode, media
from foreshock.wire.errors import WireError
from foreshock_service.api.access import admitted
from foreshock_service.api.headers import whole_body
from foreshock_service.api.principal import bearer
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import Rooms
from foreshock_service.errors import BadRequest, Problem, TooLarge, UnsupportedMedia, UpgradeRequired

router = APIRouter(prefix="/v1", tags=["trainer"])

SCOPES = ("ingest",)
IN_THREAD_ABOVE = 64 * 1024
"""Bytes above which decoding leaves the event loop: some 50 µs of work."""
_PROBLEMS: dict[int, type[Problem]] = {
    400: BadRequest,
    413: TooLarge,
    415: UnsupportedMedia,
    426: UpgradeRequired,
}
_EXAMPLE = {
    "protocol": 1,
    "client": "0123456789abcdef0123456789abcdef",
    "sequence": 1,
    "run": "math/qwen-7b-rlvr",
    "launch": "2025-01-01T00:00:00-node1",
    "frames": [
        {"sequence": 1, "step": 12, "role": "trainer", "rank": 0, "sealed_s": 1.0, "scalars": {"reward.mean": 0.31}}
    ],
}
_BODY = {
    "description": "One envelope (`docs/rest.md`, `foreshock.wire.Envelope`); unknown members are ignored. "
    "`Content-Encoding: zstd` is understood.",
    "required": True,
    "content": {
        MSGPACK: {"schema": {"type": "string", "format": "binary"}},
        JSON: {
            "schema": {
                "type": "object",
                "required": ["protocol", "client", "sequence", "run", "launch"],
                "properties": {
                    "protocol": {"type": "integer", "minimum": 1},
                    "client": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
                    "sequence": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
                    "run": {
                        "type": "string",
                        "pattern": r"^(?!\.+/)[A-Za-z0-9._-]{1,128}/(?!\.+$)[A-Za-z0-9._-]{1,128}$",
                    },
                    "launch": {"type": "string", "minLength": 1, "maxLength": 128},
                    "sdk": {"type": "string", "maxLength": 64},
                    "role": {"type": "string", "pattern": "^[A-Za-z][A-Za-z0-9_.-]{0,15}$"},
                    "rank": {"type": "integer", "minimum": 0},
                    "sent_s": {"type": ["number", "null"]},
                    "controller": {"type": "boolean"},
                    "losses": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
                    "frames": {"type": "array", "items": {"type": "object"}},
                    "notices": {"type": "array", "items": {"type": "object"}},
                },
            },
            "example": _EXAMPLE,
        },
    },
}
_REPLY = {
    "description": "The reply, in the media type of the request.",
    "content": {
        MSGPACK: {"schema": {"type": "string", "format": "binary"}},
        JSON: {
            "schema": {
                "type": "object",
                "required": ["acknowledged"],
                "properties": {
                    "acknowledged": {"type": "integer"},
                    "run_verdict": {"type": "string"},
                    "attempt": {"type": ["integer", "null"]},
                    "mode": {"type": "string"},
                    "commands": {"type": "array", "items": {"type": "object"}},
                    "warnings": {"type": "array", "items": {"type": "string"}},
                },
            },
            "example": {"acknowledged": 1, "run_verdict": "healthy", "attempt": 1},
        },
    },
}


@router.post(
    "/ingest",
    response_class=Response,
    openapi_extra={"requestBody": _BODY, "security": [{"token": list(SCOPES)}]},
    responses={**documented(409, 415, 426), 200: _REPLY},
)
async def ingest(request: Request) -> Response:
    """Stores one envelope, whole or not at all, and returns what waits for its sender.

    4xx: nothing was stored and repeating it is useless (but for 401, 403, 408 and 429). 5xx: keep it and come again.
    """
    # Looked up by hand: resolving dependencies costs a third of a small envelope's time on the event loop.
    rooms: Rooms = request.app.state.rooms
    caller = await admitted(request, rooms, SCOPES, bearer(request))
    try:
        envelope, kind, size = await _decoded(request, rooms)
        caller.check_project(envelope.run.partition("/")[0])
        reply = await rooms.writer.store(envelope, size=size)
    except Problem as problem:
        rooms.telemetry.outcome("failed" if problem.status >= 500 else "refused").inc()
        raise
    rooms.telemetry.outcome("stored").inc()
    rooms.telemetry.items.inc(len(envelope.frames) + len(envelope.notices))
    return Response(encode(reply, kind), media_type=kind)


async def _decoded(request: Request, rooms: Rooms) -> tuple[Envelope, str, int]:
    """The envelope, the media type of the reply and the body's bytes. `middleware.py` capped it as it came in."""
    content_type = request.headers.get("content-type", "")
    encoding = request.headers.get("content-encoding", "")
    try:
        kind = media(content_type)
        body = await whole_body(request)
        rooms.telemetry.ingest_bytes.inc(len(body))
        arguments = (body, content_type, encoding, rooms.wire_limits)
        if encoding or len(body) > IN_THREAD_ABOVE:
            return await run_in_threadpool(decode_envelope, *arguments), kind, len(body)
        return decode_envelope(*arguments), kind, len(body)
    except WireError as error:
        raise _PROBLEMS.get(error.status, BadRequest)(str(error)) from None

"""Server-sent events for the live page: runs, incidents and commands as they change, within the token's project."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from sqlalchemy import select

from foreshock.wire import TERMINAL_STATES
from foreshock_service.api.access import Reader
from foreshock_service.api.encoding import to_json
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import RUN_PATTERN, InRooms, Rooms
from foreshock_service.errors import Forbidden
from foreshock_service.store.models import CommandRow, Incident, Run
from foreshock_service.workers.hub import ANY_RUN

router = APIRouter(prefix="/v1", tags=["events"])

REFRESH_S = 5.0
DEBOUNCE_S = 0.25
"""A busy fleet changes many times a second; a page need not."""
MAX_RUNS = 500
Key = tuple[str, str]
_EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "enum": ["run", "incident", "command"]},
        "data": {"type": "string", "description": "JSON"},
        "retry": {"type": "integer"},
    },
}


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={
        **documented(),
        200: {
            "description": "Events `run`, `incident` and `command`, each with the JSON of what changed. The first ones "
            "tell how things stand; of an incident resolved or a command over, `gone` is told. A comment at least "
            "every few seconds keeps proxies from closing the stream.",
            "content": {"text/event-stream": {"schema": _EVENT}},
        },
    },
)
async def stream_events(
    rooms: InRooms,
    caller: Reader,
    run: Annotated[str | None, Query(pattern=RUN_PATTERN, description="Only this run.")] = None,
    for_s: Annotated[float, Query(gt=0, le=86_400, description="End the stream after so many seconds.")] = 3600.0,
) -> StreamingResponse:
    """Changes as they happen, of the 500 runs heard last."""
    if run is not None and not caller.covers(run.partition("/")[0]):
        raise Forbidden("This token is bound to another project.")
    rooms.waiters.check()  # a full house is answered 503 and not by a broken stream

    async def stream() -> AsyncIterator[bytes]:
        # The place is taken here: a client that left before the first byte never starts this, nor would it end it.
        with rooms.waiters.place():
            async for event in _changes(rooms, caller.project, run, min(for_s, rooms.settings.max_stream_s)):
                yield event

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def _changes(rooms: Rooms, project: str | None, run: str | None, for_s: float) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + for_s
    known: dict[Key, dict[str, Any]] = {}
    yield b"retry: 2000\n\n"
    while True:
        version = rooms.hub.version(ANY_RUN)
        now = await run_in_threadpool(_state, rooms, project, run)
        changed = [(kind, body) for (kind, _), body in now.items() if known.get((kind, str(body["id"]))) != body]
        for kind, body in changed:
            yield b"event: " + kind.encode() + b"\ndata: " + to_json(body) + b"\n\n"
        gone = [(key, body) for key, body in known.items() if key not in now and key[0] != "run"]
        for (kind, _), body in gone:
            ended = {"id": body["id"], "run": body["run"], "gone": True}
            yield b"event: " + kind.encode() + b"\ndata: " + to_json(ended) + b"\n\n"
        if not changed and not gone:
            yield b": still here\n\n"
        known = now
        left = deadline - loop.time()
        if left <= 0 or not rooms.ready():
            return
        # A step that changes no verdict wakes nobody: last steps are looked up at leisure.
        await rooms.hub.wait(ANY_RUN, version, min(REFRESH_S, left))
        await asyncio.sleep(DEBOUNCE_S)


def _state(rooms: Rooms, project: str | None, name: str | None) -> dict[Key, dict[str, Any]]:
    """(kind, id) → what a page shows of it."""
    with rooms.store.read() as session:
        query = select(Run).order_by(Run.last_seen_at.desc()).limit(MAX_RUNS)
        if project is not None:
            query = query.where(Run.project == project)
        if name is not None:
            query = query.where(Run.name == name)
        runs = {run.id: run for run in session.scalars(query)}
        found: dict[Key, dict[str, Any]] = {}
        for run in runs.values():
            found["run", run.name] = {"id": run.name, **_take(run, "verdict", "status", "mode", "attempt", "last_step")}
        open_incidents = select(Incident).where(Incident.run_id.in_(runs), Incident.status != "resolved")
        for incident in session.scalars(open_incidents.order_by(Incident.opened_at)):
            body = _take(incident, "id", "rule", "severity", "status", "opened_step", "last_step", "message", "edge")
            found["incident", incident.id] = {"run": runs[incident.run_id].name, **body}
        pending = select(CommandRow).where(CommandRow.run_id.in_(runs), CommandRow.state.not_in(TERMINAL_STATES))
        for command in session.scalars(pending.order_by(CommandRow.created_at)):
            body = _take(command, "id", "kind", "state", "reason", "issued_step")
            found["command", command.id] = {"run": runs[command.run_id].name, **body}
    return found


def _take(row: object, *names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}

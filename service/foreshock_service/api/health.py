"""The trainer's question: how is my run, and is there anything to do? Long-polled, without a connection held."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import Field
from sqlalchemy import select

from foreshock_service.api.access import Trainer
from foreshock_service.api.bodies import CommandBody, IncidentBody, command_body, incident_body
from foreshock_service.api.encoding import Body, Plain, to_json
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import InRooms, Name, Project, Rooms, find_run
from foreshock_service.commands import protocol
from foreshock_service.errors import NotFound
from foreshock_service.incidents import book

router = APIRouter(prefix="/v1/runs/{project}/{name}", tags=["trainer"])


class HealthAnswer(Body):
    """The verdict on a run, what is open, and what its controller should do."""

    run: str
    verdict: str = Field(description="healthy · warning · critical · unknown", examples=["healthy"])
    status: str = Field(examples=["running"])
    mode: str = Field(examples=["observe"])
    attempt: int
    last_step: int | None
    last_seen_at: float
    seen: str = Field(description="Fingerprint of what can change; send it back as `seen` to wait for news.")
    incidents: list[IncidentBody] = Field(description="Incidents not resolved, oldest first.")
    commands: list[Plain] = Field(description="For the run's controller only: commands to try to accept.")
    pending: list[CommandBody] = Field(description="Every command that is not over, for people.")


@router.get("/health", response_model=HealthAnswer, responses=documented(404))
async def read_health(
    rooms: InRooms,
    _: Trainer,
    project: Project,
    name: Name,
    wait: Annotated[float, Query(ge=0, description="Seconds to wait for news; cut to the service's own limit.")] = 0.0,
    client: Annotated[str | None, Query(max_length=64, description="The caller's client id, for its commands.")] = None,
    seen: Annotated[str | None, Query(max_length=64, description="`seen` of the last answer.")] = None,
) -> Response:
    """Answers at once, or with `wait` when there are commands for this client or something differs from `seen`.

    Without `seen` the answer comes when something changes from now on. 503 with Retry-After when too many wait.
    """

    async def look() -> tuple[int, dict[str, Any]]:
        return await _kept_look(rooms, project, name, client)

    if wait <= 0 and (told := rooms.looks.told(f"{project}/{name}", look)) is not None:
        return Response(told, media_type="application/json")
    deadline = asyncio.get_running_loop().time() + min(wait, rooms.settings.max_wait_s)
    run_id, answer = await look()
    seen = answer["seen"] if seen is None and wait > 0 else seen
    if wait > 0 and not answer["commands"] and answer["seen"] == seen:
        with rooms.waiters.place():
            answer = await _wait(rooms, project, name, client, run_id, answer, deadline)
    return Response(to_json(answer), media_type="application/json")


async def _kept_look(rooms: Rooms, project: str, name: str, client: str | None) -> tuple[int, dict[str, Any]]:
    """`_look` in a thread, kept for whoever asks next where nothing is open or pending."""
    full = f"{project}/{name}"
    version = rooms.looks.version(full)
    try:
        run_id, answer = await run_in_threadpool(_look, rooms, project, name, client)
    except NotFound:
        rooms.looks.forget(full)
        raise
    quiet = not answer["incidents"] and not answer["pending"] and not answer["commands"]
    rooms.looks.keep(full, run_id, version, to_json(answer) if quiet else None)
    return run_id, answer


async def _wait(
    rooms: Rooms, project: str, name: str, client: str | None, run_id: int, first: dict[str, Any], deadline: float
) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    answer = first
    while True:
        # Read before the database is, so that a change between the two is not slept through.
        version = rooms.hub.version(run_id)
        _, answer = await run_in_threadpool(_look, rooms, project, name, client)
        left = deadline - loop.time()
        if answer["commands"] or answer["seen"] != first["seen"] or left <= 0:
            return answer
        if await rooms.hub.wait(run_id, version, left) == version:
            return answer  # the time is over, or the service stops


def _look(rooms: Rooms, project: str, name: str, client: str | None) -> tuple[int, dict[str, Any]]:
    """The run's id and the answer as plain data. Delivers waiting commands to the controller."""
    now = time.time()
    with rooms.store.read() as session:
        run = find_run(session, project, name)
        incidents = book.incidents(session, run.id, book.ACTIVE)
        pending = protocol.pending(session, run.id)
        states = [(c.id, c.state) for c in pending]
        mine = client is not None and client == run.controller_client
        waiting = mine and any(state in ("approved", "delivered") for _, state in states)
        # The state a trainer is told of is no news to it, so approved and delivered count as one.
        told = [(i, "approved" if s == "delivered" else s) for i, s in states]
        parts = [
            run.verdict,
            run.status,
            run.mode,
            run.attempt,
            [(i.id, i.status, i.severity) for i in incidents],
            told,
        ]
        answer = HealthAnswer(
            run=run.name,
            verdict=run.verdict,
            status=run.status,
            mode=run.mode or rooms.settings.default_mode,
            attempt=run.attempt,
            last_step=run.last_step,
            last_seen_at=run.last_seen_at,
            seen=hashlib.sha256(repr(parts).encode()).hexdigest()[:24],
            incidents=[incident_body(incident, run.name) for incident in incidents],
            commands=[],
            pending=[command_body(command, run.name) for command in pending],
        ).model_dump(mode="json")
        run_id = run.id
    if waiting and client is not None:
        # Not waited for on the disk: who may execute is decided by the acceptance, and that is.
        with rooms.store.write(durable=False) as session:
            answer["commands"] = msgspec.to_builtins(protocol.deliver(session, run_id, client, now))
    return run_id, answer


def control_answer(rooms: Rooms, run_id: int, client: str) -> list[Any]:
    """Commands waiting for this client, for the reply to its envelope. One read; a write only where there are any."""
    with rooms.store.read() as session:
        waiting = session.scalar(
            select(protocol.CommandRow.id)
            .where(protocol.CommandRow.run_id == run_id, protocol.CommandRow.state.in_(("approved", "delivered")))
            .limit(1)
        )
    if waiting is None:
        return []
    with rooms.store.write(durable=False) as session:
        return protocol.deliver(session, run_id, client, time.time())

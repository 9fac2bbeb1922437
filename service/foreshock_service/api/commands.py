"""Commands: what is asked of a trainer, who agreed, what came of it. `commands/protocol.py` writes."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.wire import COMMAND_KINDS, STATES, Ack, Action
from foreshock_service.api.access import Acker, Operator, Reader
from foreshock_service.api.bodies import CommandBody, command_body
from foreshock_service.api.encoding import Body, finite
from foreshock_service.api.paging import Cursor, Limit, newest_first, split
from foreshock_service.api.principal import Principal
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import ID_PATTERN, InRooms, Name, Project, Rooms, find_run
from foreshock_service.commands import protocol, requests
from foreshock_service.errors import NotFound, Unprocessable
from foreshock_service.store.models import CommandRow, Run

router = APIRouter(prefix="/v1", tags=["commands"])

CommandId = Annotated[str, Path(pattern=ID_PATTERN)]
Kind = Literal[
    "enable_is_correction",
    "disable_is_correction",
    "rollback",
    "resync_trainer",
    "resync_engine",
    "scale_lr",
    "skip_update",
    "pause",
    "resume",
    "stop",
    "checkpoint_now",
    "probe",
]
assert set(COMMAND_KINDS) == set(Kind.__args__)  # type: ignore[attr-defined]
MAX_ARGUMENT_BYTES = 4096


class CommandsPage(Body):
    """Commands of one run, newest first."""

    commands: list[CommandBody]
    next: str | None


class ActionAsked(BaseModel):
    """One thing to do."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    arguments: dict[str, Any] = Field({}, max_length=16)


class CommandAsked(BaseModel):
    """A command that a person asks for. It waits for approval like any other, unless `approve` is set."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"actions": [{"kind": "scale_lr", "arguments": {"factor": 0.5}}], "reason": "entropy falls"}]
        },
    )

    actions: list[ActionAsked] = Field(min_length=1, max_length=8)
    reason: str = Field("", max_length=1000)
    at_step: int | None = Field(None, ge=0, le=2**63 - 1)
    approve: bool = Field(False, description="Approve at once; the caller is then the one who decided.")


class Decision(BaseModel):
    """Why, in the decider's own words."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=1000)


class AckAsked(BaseModel):
    """The controller's answer. Unknown members are ignored."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"state": "accepted", "client": "a" * 32, "attempt": 1}]})

    state: Literal["accepted", "done", "failed", "refused"]
    client: str = Field(max_length=64)
    attempt: int = Field(ge=0, le=2**31 - 1)
    step: int | None = Field(None, ge=0, le=2**63 - 1)
    detail: dict[str, Any] = Field({}, max_length=64)


class AckAnswer(Body):
    """Where the command stands after the answer was taken."""

    state: str = Field(examples=["accepted"])


@router.get("/runs/{project}/{name}/commands", responses=documented(404))
def list_commands(
    rooms: InRooms,
    _: Reader,
    project: Project,
    name: Name,
    state: Annotated[str | None, Query(pattern=f"^({'|'.join(STATES)})$")] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> CommandsPage:
    """The run's commands, newest first."""
    with rooms.store.read() as session:
        run = find_run(session, project, name)
        query = select(CommandRow).where(CommandRow.run_id == run.id)
        if state is not None:
            query = query.where(CommandRow.state == state)
        rows = session.scalars(newest_first(query, CommandRow.created_at, CommandRow.id, cursor, limit)).all()
        page, following = split(list(rows), limit, "created_at")
        return CommandsPage(commands=[command_body(row, run.name) for row in page], next=following)


@router.post("/runs/{project}/{name}/commands", status_code=201, responses=documented(404, 409, 410))
def propose_command(rooms: InRooms, caller: Operator, project: Project, name: Name, asked: CommandAsked) -> CommandBody:
    """Proposes a command; the run must have announced every kind in it.

    A `rollback` without a checkpoint goes to the newest healthy one. Correction is refused over stale weights.
    """
    if any(len(str(a.arguments)) > MAX_ARGUMENT_BYTES for a in asked.actions):
        raise Unprocessable(f"Arguments of one action are larger than {MAX_ARGUMENT_BYTES} bytes.")
    actions = [Action(kind=a.kind, arguments=finite(a.arguments)) for a in asked.actions]
    now = time.time()
    with rooms.store.write() as session:
        run = find_run(session, project, name)
        ready, detail = requests.prepared(session, run, actions, limits=rooms.limits)
        change = protocol.propose(
            session,
            run,
            ready,
            now,
            reason=asked.reason,
            requested_by=caller.name,
            issued_step=run.last_step,
            at_step=asked.at_step,
            detail=detail,
            limits=rooms.limits,
        )
        assert change is not None  # only policy's evidence can have led to it before
        changes = [change]
        if asked.approve:
            # In the same transaction: a proposal whose approval is refused is not left behind.
            changes.append(protocol.approve(session, change.command.id, caller.name, now, limits=rooms.limits))
        return _settled(rooms, session, run, changes, now)


@router.get("/commands/{command_id}", responses=documented(404))
def read_command(rooms: InRooms, caller: Reader, command_id: CommandId) -> CommandBody:
    """One command."""
    with rooms.store.read() as session:
        command, run = _covered(session, caller, command_id)
        return command_body(command, run.name)


@router.post("/commands/{command_id}/approve", responses=documented(404, 409, 410))
def approve_command(rooms: InRooms, caller: Operator, command_id: CommandId) -> CommandBody:
    """A person agrees: the trainer gets it at its next question."""
    with rooms.store.write() as session:
        now = time.time()
        _, run = _covered(session, caller, command_id)
        change = protocol.approve(session, command_id, caller.name, now, limits=rooms.limits)
        return _settled(rooms, session, run, [change], now)


@router.post("/commands/{command_id}/reject", responses=documented(404, 409, 410))
def reject_command(
    rooms: InRooms, caller: Operator, command_id: CommandId, decision: Decision | None = None
) -> CommandBody:
    """A person declines a proposal."""
    with rooms.store.write() as session:
        now = time.time()
        _, run = _covered(session, caller, command_id)
        change = protocol.reject(session, command_id, caller.name, now, decision.reason if decision else "")
        return _settled(rooms, session, run, [change], now)


@router.post("/commands/{command_id}/cancel", responses=documented(404, 409, 410))
def cancel_command(
    rooms: InRooms, caller: Operator, command_id: CommandId, decision: Decision | None = None
) -> CommandBody:
    """Takes back a command that no trainer has accepted yet."""
    with rooms.store.write() as session:
        now = time.time()
        _, run = _covered(session, caller, command_id)
        change = protocol.cancel(session, command_id, caller.name, now, decision.reason if decision else "")
        return _settled(rooms, session, run, [change], now)


@router.post("/commands/{command_id}/ack", responses=documented(404, 409, 410))
def ack_command(rooms: InRooms, caller: Acker, command_id: CommandId, asked: AckAsked) -> AckAnswer:
    """The trainer's answer. Only `accepted` with 200 allows it to execute; the same answer may be repeated."""
    answer = Ack(
        state=asked.state, client=asked.client, attempt=asked.attempt, step=asked.step, detail=finite(asked.detail)
    )
    with rooms.store.write() as session:
        now = time.time()
        _, run = _covered(session, caller, command_id)
        change = protocol.ack(session, command_id, answer, now, limits=rooms.limits)
        rooms.announce(session, run, [], [change], now)
        rooms.after_commit(session, run.id)
        return AckAnswer(state=change.command.state)


def _covered(session: Session, caller: Principal, command_id: str) -> tuple[CommandRow, Run]:
    """The command and its run; `NotFound` also for another project's, whose existence is nobody's business."""
    command = session.get(CommandRow, command_id)
    run = session.get(Run, command.run_id) if command else None
    if command is None or run is None or not caller.covers(run.project):
        raise NotFound("No such command.")
    return command, run


def _settled(
    rooms: Rooms, session: Session, run: Run, changes: list[protocol.CommandChange], now: float
) -> CommandBody:
    rooms.announce(session, run, [], changes, now)
    session.flush()
    body = command_body(protocol.find(session, changes[-1].command.id), run.name)
    rooms.after_commit(session, run.id)
    return body

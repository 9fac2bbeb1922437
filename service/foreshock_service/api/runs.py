"""Runs: list, look at, change what an operator may change, delete."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field, field_validator
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from foreshock.wire import COMMAND_KINDS, MODES, TERMINAL_STATES
from foreshock_service.api.access import Admin, Operator, Reader
from foreshock_service.api.bodies import (
    CheckpointBody,
    Mode,
    RunBody,
    RunDetail,
    checkpoint_body,
    fields_of,
    run_body,
)
from foreshock_service.api.encoding import Body
from foreshock_service.api.paging import Cursor, Limit, decode, encode
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import NAME_PATTERN, InRooms, Name, Project, find_run
from foreshock_service.errors import Unprocessable
from foreshock_service.rules.pack import PackError
from foreshock_service.store.models import Attempt, Audit, Checkpoint, Client, CommandRow, FrameRow, Incident, Run

router = APIRouter(prefix="/v1/runs", tags=["runs"])

MAX_LABELS = 32
MAX_OVERRIDES_BYTES = 64 * 1024


class RunsPage(Body):
    """Runs, newest first."""

    runs: list[RunBody]
    next: str | None = Field(description="Cursor of the next page; null on the last.")


class AttemptBody(Body):
    """One launch, or one completed rollback."""

    ordinal: int
    launch: str
    generation: int
    started_at: float
    ended_at: float | None
    reason: str
    first_step: int | None


class ClientBody(Body):
    """One process that posts, and what it lost."""

    id: str
    role: str
    rank: int
    sdk: str
    last_step: int | None
    first_seen_at: float
    last_seen_at: float
    losses: dict[str, int] = Field(description="Items lost so far, by reason.")


class RunAnswer(RunDetail):
    """A run with its attempts and the processes heard last."""

    attempts: list[AttemptBody]
    clients: list[ClientBody]


class CheckpointsPage(Body):
    """Checkpoints, latest registered first."""

    checkpoints: list[CheckpointBody]


class Budget(BaseModel):
    """How much policy may do to a run. Counts that were spent stay as they are."""

    model_config = ConfigDict(extra="forbid")

    limit: int | None = Field(None, ge=0, le=10_000, description="Commands in all; null: the service's setting.")
    kinds: dict[str, Annotated[int, Field(ge=0, le=10_000)]] = Field({}, description="Most of each kind.")

    @field_validator("kinds")
    @classmethod
    def _known(cls, kinds: dict[str, int]) -> dict[str, int]:
        for kind in kinds:
            if kind not in COMMAND_KINDS:
                raise ValueError(f"unknown command kind {kind!r}")
        return kinds


class RunChange(BaseModel):
    """What an operator changes; what is absent stays."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"mode": "approve", "labels": {"team": "reasoning"}}]},
    )

    mode: Mode | None = None
    labels: dict[Annotated[str, Field(pattern=NAME_PATTERN)], Annotated[str, Field(max_length=256)]] | None = Field(
        None, max_length=MAX_LABELS, description="Replaces the labels."
    )
    rules: dict[str, dict[str, Any]] | None = Field(None, description="Replaces this run's overrides of the rule pack.")
    budget: Budget | None = None


@router.get("", responses=documented())
def list_runs(
    rooms: InRooms,
    caller: Reader,
    limit: Limit = 100,
    cursor: Cursor = None,
    project: Annotated[str | None, Query(pattern=NAME_PATTERN)] = None,
    verdict: Annotated[str | None, Query(pattern="^(healthy|warning|critical|unknown)$")] = None,
    status: Annotated[str | None, Query(pattern="^(running|paused|finished|crashed|silent)$")] = None,
) -> RunsPage:
    """The runs that the token covers, newest first."""
    query = select(Run)
    for column, wanted in ((Run.project, caller.project), (Run.project, project), (Run.verdict, verdict)):
        if wanted is not None:
            query = query.where(column == wanted)
    if status is not None:
        query = query.where(Run.status == status)
    if cursor is not None:
        (before,) = decode(cursor, int)
        query = query.where(Run.id < before)
    with rooms.store.read() as session:
        rows = session.scalars(query.order_by(Run.id.desc()).limit(limit + 1)).all()
        page = rows[:limit]
        return RunsPage(runs=[run_body(run) for run in page], next=encode(page[-1].id) if len(rows) > limit else None)


@router.get("/{project}/{name}", responses=documented(404))
def read_run(rooms: InRooms, _: Reader, project: Project, name: Name) -> RunAnswer:
    """One run: what it announced, its attempts, the processes heard last, what is open and pending."""
    with rooms.store.read() as session:
        return _answer(session, find_run(session, project, name))


def _answer(session: Session, run: Run) -> RunAnswer:
    attempts = session.scalars(
        select(Attempt).where(Attempt.run_id == run.id).order_by(Attempt.ordinal.desc()).limit(100)
    )
    clients = session.scalars(
        select(Client).where(Client.run_id == run.id).order_by(Client.last_seen_at.desc()).limit(100)
    )
    incidents = select(func.count()).where(Incident.run_id == run.id, Incident.status != "resolved")
    commands = select(func.count()).where(CommandRow.run_id == run.id, CommandRow.state.not_in(TERMINAL_STATES))
    return RunAnswer(
        **{
            **fields_of(run, RunDetail),
            "attempts": [AttemptBody.model_validate(a) for a in attempts],
            "clients": [ClientBody.model_validate(c) for c in clients],
            "open_incidents": session.scalar(incidents) or 0,
            "pending_commands": session.scalar(commands) or 0,
        }
    )


@router.patch("/{project}/{name}", responses=documented(404))
def change_run(rooms: InRooms, caller: Operator, project: Project, name: Name, change: RunChange) -> RunAnswer:
    """Sets the mode, labels, rule overrides or budget. Each change is kept in the audit log."""
    _check(rooms, change)
    with rooms.store.write() as session:
        run = find_run(session, project, name)
        for field, value in change.model_dump(exclude_unset=True).items():
            if value is not None or field == "budget":
                _change(session, run, field, value, caller.name)
        session.flush()
        rooms.after_commit(session, run.id)
        return _answer(session, run)


def _change(session: Session, run: Run, field: str, value: Any, actor: str) -> None:
    was = getattr(run, field)
    if field == "budget":
        value = {**{k: n for k, n in was.items() if k not in ("limit", "kinds")}, **(value or {})}
    if was == value:
        return
    setattr(run, field, value)
    if field == "mode":
        run.mode_by = actor
    session.add(
        Audit(
            at=time.time(),
            run_id=run.id,
            subject="run",
            subject_id=str(run.id),
            was=was if field == "mode" else None,
            became=value if field == "mode" else f"{field} changed",
            actor=actor,
            detail={"field": field, "was": was, "became": value},
        )
    )


def _check(rooms: InRooms, change: RunChange) -> None:
    allowed = MODES.index(rooms.settings.max_mode)
    if change.mode is not None and MODES.index(change.mode) > allowed:
        raise Unprocessable(f"This service allows no bolder mode than {rooms.settings.max_mode}.")
    if change.rules is not None:
        if len(json.dumps(change.rules)) > MAX_OVERRIDES_BYTES:
            raise Unprocessable(f"The overrides are larger than {MAX_OVERRIDES_BYTES} bytes.")
        try:
            rooms.pack().with_overrides(change.rules)
        except PackError as error:
            raise Unprocessable(str(error)) from None


@router.delete("/{project}/{name}", status_code=204, responses=documented(404, 409))
def delete_run(rooms: InRooms, caller: Admin, project: Project, name: Name) -> Response:
    """Deletes a run and everything stored of it, for good. A trainer that still posts makes it anew."""
    with rooms.store.write() as session:
        run = find_run(session, project, name)
        rooms.after_commit(session, run.id)
        session.execute(delete(FrameRow).where(FrameRow.run_id == run.id))
        session.execute(delete(Run).where(Run.id == run.id))
        session.add(
            Audit(
                at=time.time(),
                run_id=run.id,
                subject="run",
                subject_id=str(run.id),
                was=run.status,
                became="deleted",
                actor=caller.name,
                detail={"name": run.name},
            )
        )
    return Response(status_code=204)


@router.get("/{project}/{name}/checkpoints", responses=documented(404))
def list_checkpoints(
    rooms: InRooms,
    _: Reader,
    project: Project,
    name: Name,
    status: Annotated[str | None, Query(pattern="^(candidate|healthy|quarantined)$")] = None,
    limit: Limit = 100,
) -> CheckpointsPage:
    """The newest checkpoints that the run registered."""
    with rooms.store.read() as session:
        run = find_run(session, project, name)
        query = select(Checkpoint).where(Checkpoint.run_id == run.id)
        if status is not None:
            query = query.where(Checkpoint.status == status)
        rows = session.scalars(query.order_by(Checkpoint.registered_at.desc(), Checkpoint.id).limit(limit))
        return CheckpointsPage(checkpoints=[checkpoint_body(row) for row in rows])

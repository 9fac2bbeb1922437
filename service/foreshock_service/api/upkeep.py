"""Upkeep of alerts: silences and deliveries."""

from __future__ import annotations

import time
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Select, select, update
from sqlalchemy.orm import Session

from foreshock_service.api.access import Operator, Reader
from foreshock_service.api.encoding import Body
from foreshock_service.api.paging import Cursor, Limit, newest_first, split
from foreshock_service.api.principal import Principal
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import ID_PATTERN, NAME_PATTERN, RUN_PATTERN, InRooms
from foreshock_service.errors import Conflict, Forbidden, NotFound, Unprocessable
from foreshock_service.store.models import Delivery, Run, Silence

router = APIRouter(prefix="/v1", tags=["alerts"])

MAX_SILENCE_S = 366 * 86_400
RowId = Annotated[str, Path(pattern=ID_PATTERN)]


class SilenceBody(Body):
    """No alerts that match every part named here, until then. Incidents still open."""

    id: str
    project: str | None
    run: str | None
    rule: str | None
    until_at: float
    created_at: float
    created_by: str
    reason: str


class SilencesPage(Body):
    silences: list[SilenceBody]
    next: str | None


class SilenceAsked(BaseModel):
    """At least one of project, run and rule; a token bound to a project silences only there."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"run": "math/qwen-7b", "rule": "silent_run", "for_s": 3600, "reason": "moving"}]
        },
    )

    project: str | None = Field(None, pattern=NAME_PATTERN)
    run: str | None = Field(None, pattern=RUN_PATTERN)
    rule: str | None = Field(None, pattern=r"^[a-z0-9_]{1,64}$")
    for_s: float = Field(gt=0, le=MAX_SILENCE_S, description="Seconds from now.")
    reason: str = Field("", max_length=1000)


class DeliveryBody(Body):
    """One alert on its way to one channel."""

    id: str = Field(description="The stable `delivery_id` that receivers see.")
    run: str | None
    incident_id: str | None
    channel: str
    event: str
    state: str = Field(description="pending · sending · sent · suppressed · dead")
    attempts: int
    next_at: float
    created_at: float
    sent_at: float | None
    last_error: str
    left_in: str | None = Field(description="How it left: the id of a digest, `thread`, or null for a message alone.")


class DeliveriesPage(Body):
    deliveries: list[DeliveryBody]
    next: str | None


@router.get("/silences", responses=documented())
def list_silences(
    rooms: InRooms,
    caller: Reader,
    active: Annotated[bool, Query(description="Only those not over yet.")] = True,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> SilencesPage:
    """Silences, newest first."""
    query = select(Silence)
    if caller.project is not None:
        mine = Silence.run.startswith(f"{caller.project}/", autoescape=True)
        query = query.where((Silence.project == caller.project) | mine)
    if active:
        query = query.where(Silence.until_at > time.time())
    with rooms.store.read() as session:
        rows = session.scalars(newest_first(query, Silence.created_at, Silence.id, cursor, limit)).all()
        page, following = split(list(rows), limit, "created_at")
        return SilencesPage(silences=[SilenceBody.model_validate(row) for row in page], next=following)


@router.post("/silences", status_code=201, responses=documented())
def create_silence(rooms: InRooms, caller: Operator, asked: SilenceAsked) -> SilenceBody:
    """Silences alerts for a while."""
    if asked.project is None and asked.run is None and asked.rule is None:
        raise Unprocessable("Name a project, a run or a rule: silencing everything is not offered.")
    project = asked.run.partition("/")[0] if asked.run else asked.project
    if asked.project is not None and project != asked.project:
        raise Unprocessable("The run does not belong to the project.")
    if caller.project is not None and project != caller.project:
        raise Forbidden("This token is bound to a project; name it, or a run of it.")
    now = time.time()
    with rooms.store.write() as session:
        row = Silence(
            id=uuid4().hex,
            project=asked.project,
            run=asked.run,
            rule=asked.rule,
            until_at=now + asked.for_s,
            created_at=now,
            created_by=caller.name,
            reason=asked.reason,
        )
        session.add(row)
        session.flush()
        return SilenceBody.model_validate(row)


@router.delete("/silences/{silence_id}", status_code=204, responses=documented(404))
def end_silence(rooms: InRooms, caller: Operator, silence_id: RowId) -> Response:
    """Ends a silence now; it stays listed as over."""
    with rooms.store.write() as session:
        row = session.get(Silence, silence_id)
        if row is None or not caller.covers(row.project or (row.run or "").partition("/")[0]):
            raise NotFound("No such silence.")
        row.until_at = min(row.until_at, time.time())
    return Response(status_code=204)


@router.get("/deliveries", responses=documented())
def list_deliveries(
    rooms: InRooms,
    caller: Reader,
    state: Annotated[str | None, Query(pattern="^(pending|sending|sent|suppressed|dead)$")] = None,
    channel: Annotated[str | None, Query(max_length=64)] = None,
    incident_id: Annotated[str | None, Query(pattern=ID_PATTERN)] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> DeliveriesPage:
    """Alerts on their way, sent and dead, newest first. Payloads and secrets are not shown."""
    query: Select[Any, Any] = select(Delivery, Run.name).outerjoin(Run, Run.id == Delivery.run_id)
    filters = ((Run.project, caller.project), (Delivery.state, state), (Delivery.channel, channel))
    for column, value in (*filters, (Delivery.incident_id, incident_id)):
        if value is not None:
            query = query.where(column == value)
    with rooms.store.read() as session:
        rows = session.execute(newest_first(query, Delivery.created_at, Delivery.id, cursor, limit)).all()
        names = {delivery.id: run for delivery, run in rows}
        page, following = split([delivery for delivery, _ in rows], limit, "created_at")
        return DeliveriesPage(deliveries=[_delivery(row, names[row.id]) for row in page], next=following)


@router.post("/deliveries/{delivery_id}/retry", responses=documented(404, 409))
def retry_delivery(rooms: InRooms, caller: Operator, delivery_id: RowId) -> DeliveryBody:
    """Sends a dead delivery again, under the same `delivery_id`."""
    with rooms.store.write() as session:
        run = _delivery_run(session, caller, delivery_id)
        revived = session.execute(
            update(Delivery)
            .where(Delivery.id == delivery_id, Delivery.state == "dead")
            .values(state="pending", attempts=0, next_at=time.time(), last_error="")
        )
        if revived.rowcount != 1:  # type: ignore[attr-defined]
            raise Conflict("Only a dead delivery can be retried.")
        row = session.get(Delivery, delivery_id, populate_existing=True)
        assert row is not None
        return _delivery(row, run)


def _delivery_run(session: Session, caller: Principal, delivery_id: str) -> str | None:
    row = session.get(Delivery, delivery_id)
    run = session.get(Run, row.run_id) if row and row.run_id else None
    if row is None or not caller.covers(run.project if run else ""):
        raise NotFound("No such delivery.")
    return run.name if run else None


def _delivery(row: Delivery, run: str | None) -> DeliveryBody:
    fields = {n: getattr(row, n) for n in DeliveryBody.model_fields if n != "run"}
    return DeliveryBody(**fields, run=run)

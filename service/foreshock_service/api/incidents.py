"""Incidents: list, look at, acknowledge, resolve."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock_service.api.access import Operator, Reader
from foreshock_service.api.bodies import IncidentBody, incident_body, run_names
from foreshock_service.api.encoding import Body
from foreshock_service.api.paging import Cursor, Limit, newest_first, split
from foreshock_service.api.principal import Principal
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import ID_PATTERN, NAME_PATTERN, RUN_PATTERN, InRooms
from foreshock_service.errors import NotFound
from foreshock_service.incidents import book
from foreshock_service.store.models import Incident, Run

router = APIRouter(prefix="/v1/incidents", tags=["incidents"])

IncidentId = Annotated[str, Path(pattern=ID_PATTERN)]


class IncidentsPage(Body):
    """Incidents, newest first."""

    incidents: list[IncidentBody]
    next: str | None = Field(description="Cursor of the next page; null on the last.")


@router.get("", responses=documented())
def list_incidents(
    rooms: InRooms,
    caller: Reader,
    run: Annotated[str | None, Query(pattern=RUN_PATTERN)] = None,
    project: Annotated[str | None, Query(pattern=NAME_PATTERN)] = None,
    rule: Annotated[str | None, Query(pattern=r"^[a-z0-9_]{1,64}$")] = None,
    severity: Annotated[str | None, Query(pattern="^(warning|critical)$")] = None,
    status: Annotated[
        str | None,
        Query(
            pattern="^(open|acknowledged|mitigated|resolved|unresolved)$", description="unresolved: all but resolved"
        ),
    ] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> IncidentsPage:
    """The incidents that the token covers, newest first."""
    query = select(Incident).join(Run, Run.id == Incident.run_id)
    wanted = ((Run.project, caller.project), (Run.project, project), (Run.name, run))
    for column, value in (*wanted, (Incident.rule, rule), (Incident.severity, severity)):
        if value is not None:
            query = query.where(column == value)
    if status == "unresolved":
        query = query.where(Incident.status != "resolved")
    elif status is not None:
        query = query.where(Incident.status == status)
    with rooms.store.read() as session:
        rows = session.scalars(newest_first(query, Incident.opened_at, Incident.id, cursor, limit)).all()
        page, following = split(list(rows), limit, "opened_at")
        names = run_names(session, (row.run_id for row in page))
        return IncidentsPage(incidents=[incident_body(row, names[row.run_id]) for row in page], next=following)


@router.get("/{incident_id}", responses=documented(404))
def read_incident(rooms: InRooms, caller: Reader, incident_id: IncidentId) -> IncidentBody:
    """One incident with its evidence."""
    with rooms.store.read() as session:
        incident, run = _covered(session, caller, incident_id)
        return incident_body(incident, run.name)


@router.post("/{incident_id}/acknowledge", responses=documented(404, 409))
def acknowledge_incident(rooms: InRooms, caller: Operator, incident_id: IncidentId) -> IncidentBody:
    """Someone is looking at it. It stays open."""
    with rooms.store.write() as session:
        _, run = _covered(session, caller, incident_id)
        now = time.time()
        change = book.acknowledge(session, incident_id, caller.name, now)
        rooms.announce(session, run, [change], [], now)
        rooms.after_commit(session, run.id)
        return incident_body(change.incident, run.name)


@router.post("/{incident_id}/resolve", responses=documented(404, 409))
def resolve_incident(rooms: InRooms, caller: Operator, incident_id: IncidentId) -> IncidentBody:
    """A person says it is over. The rule may open it again when it still sees the illness."""
    with rooms.store.write() as session:
        _, run = _covered(session, caller, incident_id)
        now = time.time()
        change = book.resolve(session, incident_id, caller.name, now)
        # The evaluator sets it at the next step; a run that has ended has no next step.
        run.verdict = book.verdict(session, run.id, calibrated=run.verdict != "unknown")
        rooms.announce(session, run, [change], [], now)
        rooms.after_commit(session, run.id)
        return incident_body(change.incident, run.name)


def _covered(session: Session, caller: Principal, incident_id: str) -> tuple[Incident, Run]:
    incident = session.get(Incident, incident_id)
    run = session.get(Run, incident.run_id) if incident else None
    if incident is None or run is None or not caller.covers(run.project):
        raise NotFound("No such incident.")
    return incident, run

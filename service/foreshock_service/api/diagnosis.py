"""Why a run is as it is: the causes that its last steps speak for, with the numbers for and against."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import select

from foreshock_service.api.access import Reader
from foreshock_service.api.encoding import Body, Object, Plain
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import InRooms, Name, Project, find_run
from foreshock_service.diagnosis.probed import read as read_probe
from foreshock_service.diagnosis.signature import diagnose
from foreshock_service.diagnosis.window import recent_steps
from foreshock_service.errors import NotFound
from foreshock_service.store.models import CommandRow, Notice

router = APIRouter(prefix="/v1/runs/{project}/{name}", tags=["runs"])

MAX_NOTICES = 200
MAX_PROBES = 5


class DiagnosisAnswer(Body):
    """Ranked causes, best first; none where nothing fits."""

    run: str
    attempt: int
    from_step: int
    to_step: int
    sentence: str = Field(description="The diagnosis in words.")
    edge: str | None = Field(description="The pass at fault: training_pass · scoring_pass · engine · undecided")
    abstains: bool = Field(description="Nothing fits.")
    undecided_between: list[str] = Field(description="Causes that these numbers do not separate.")
    causes: list[Plain] = Field(description="name, title, score in [0, 1], facts for and against, what would decide.")
    location: Object
    probes: list[Plain] = Field(description="The attempt's last probes: variants, which moved, and what it means.")


@router.get("/diagnosis", responses=documented(404))
def read_diagnosis(
    rooms: InRooms,
    _: Reader,
    project: Project,
    name: Name,
    step: Annotated[
        int | None, Query(ge=0, le=2**63 - 1, description="The last step looked at; absent: the newest.")
    ] = None,
    steps: Annotated[int, Query(ge=1, le=256, description="How many steps before it are looked at.")] = 16,
    attempt: Annotated[int | None, Query(ge=1, le=2**31 - 1, description="Absent: the current one.")] = None,
) -> DiagnosisAnswer:
    """The signature of the last steps, computed now."""
    with rooms.store.read() as session:
        run = find_run(session, project, name)
        past = recent_steps(session, run.id, attempt or run.attempt, upto=step, steps=steps)
        if not past:
            raise NotFound("No completed step there.")
        noted = session.execute(
            select(Notice.kind, Notice.step, Notice.role, Notice.rank, Notice.data)
            .where(Notice.run_id == run.id, Notice.attempt == past[-1].attempt)
            .order_by(Notice.id.desc())
            .limit(MAX_NOTICES)
        )
        notices = [row._asdict() for row in noted][::-1]
        settings = run.settings
        asked = session.execute(
            select(CommandRow.id, CommandRow.done_step, CommandRow.detail)
            .where(CommandRow.run_id == run.id, CommandRow.attempt == past[-1].attempt)
            .where(CommandRow.kind == "probe", CommandRow.state == "done")
            .order_by(CommandRow.finished_at.desc())
            .limit(MAX_PROBES)
        ).all()
    found = diagnose(
        [p.values for p in past],
        bands=past[-1].bands,
        missing=past[-1].missing,
        settings=settings,
        notices=notices,
        evidence=past[-1].evidence,
    )
    return DiagnosisAnswer(
        run=f"{project}/{name}",
        attempt=past[-1].attempt,
        from_step=past[0].step,
        to_step=past[-1].step,
        sentence=found.sentence,
        edge=found.edge,
        abstains=found.abstains,
        undecided_between=list(found.undecided_between),
        causes=msgspec.to_builtins(found.causes),
        location=msgspec.to_builtins(found.location),
        probes=[msgspec.to_builtins(p) for p in (read_probe(*row) for row in asked) if p is not None],
    )

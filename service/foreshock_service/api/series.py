"""Signals over steps: down-sampled on the server with min and max kept, and single steps in full."""

from __future__ import annotations

import math
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from foreshock.frames.catalogue import find, valid_name
from foreshock_service.api.access import Reader
from foreshock_service.api.encoding import Body, Number, Object, Plain, to_json
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import InRooms, Name, Project, find_run
from foreshock_service.errors import NotFound, TooLarge, Unprocessable
from foreshock_service.store.models import Point, Run, SignalName
from foreshock_service.store.types import read_value, value_at

router = APIRouter(prefix="/v1/runs/{project}/{name}", tags=["runs"])

BIGINT = 2**63 - 1
StepNumber = Annotated[int, Query(ge=0, le=BIGINT)]


class SeriesPoint(Body):
    """One kept step of one signal."""

    attempt: int
    step: int
    at: float = Field(description="Epoch seconds of the event.")
    value: Number
    band: list[Number] | None = Field(None, description="Baseline as of this step: low, centre, high.")


class Series(Body):
    """One signal. Steps where it is missing have no point: missing is not zero."""

    signal: str = Field(examples=["policy.kl_k2"])
    unit: str | None = Field(description="null: a host's own scalar", examples=["nats"])
    stored: int = Field(description="Points that the window holds.")
    points: list[SeriesPoint]


class SeriesAnswer(Body):
    """The asked signals over one window of steps."""

    run: str
    from_step: int | None
    to_step: int | None
    series: list[Series]


class SignalsAnswer(Body):
    """Every signal that the run has sent."""

    signals: list[str]


class StepAnswer(Body):
    """One completed step, in full."""

    run: str
    attempt: int
    step: int
    at: float
    reported: int
    expected: int
    segment: int
    flagged: bool = Field(description="Incomplete, replayed or flagged by ingest.")
    values: dict[str, Number]
    missing: dict[str, str]
    worst: dict[str, list[Plain]] = Field(description="signal → [worst rank's value, rank]")
    bands: dict[str, list[Number]]
    evidence: Object


def thin(points: list[tuple[float, ...]], most: int) -> list[int]:
    """Positions to keep of (…, value) rows, at most `most` of them (`most` >= 5), in order.

    The window is cut into equal buckets; of each, the rows with the least and the greatest value stay (infinities are
    values), and its first NaN, which would hide both if it were compared. First and last row always stay.
    """
    if len(points) <= most:
        return list(range(len(points)))
    buckets = max(1, (most - 2) // 3)
    kept = {0, len(points) - 1}
    for b in range(buckets):
        window = range(b * len(points) // buckets, (b + 1) * len(points) // buckets)
        numbers = [i for i in window if not math.isnan(points[i][-1])]
        if numbers:
            kept.add(min(numbers, key=lambda i: points[i][-1]))
            kept.add(max(numbers, key=lambda i: points[i][-1]))
        if len(numbers) < len(window):
            kept.add(next(i for i in window if math.isnan(points[i][-1])))
    return sorted(kept)


@router.get("/signals", responses=documented(404))
def list_signals(rooms: InRooms, _: Reader, project: Project, name: Name) -> SignalsAnswer:
    """Names of the signals that the run has sent, in alphabetical order."""
    with rooms.store.read() as session:
        run = find_run(session, project, name)
        names = session.scalars(select(SignalName.name).where(SignalName.run_id == run.id).order_by(SignalName.name))
        return SignalsAnswer(signals=list(names))


@router.get("/series", response_model=SeriesAnswer, responses=documented(404))
def read_series(
    rooms: InRooms,
    _: Reader,
    project: Project,
    name: Name,
    signal: Annotated[list[str], Query(description="Repeat for several.", examples=[["policy.kl_k2"]], min_length=1)],
    from_step: StepNumber | None = None,
    to_step: StepNumber | None = None,
    attempt: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
    max_points: Annotated[int, Query(ge=10, description="Per signal; cut to the service's own limit.")] = 1000,
    bands: Annotated[bool, Query(description="Baseline bands beside the values.")] = False,
) -> Response:
    """The signals over the window, thinned to `max_points` each with every bucket's least and greatest value kept."""
    settings = rooms.settings
    if len(signal) > settings.max_series_signals:
        raise Unprocessable(f"At most {settings.max_series_signals} signals in one request.")
    for wanted in signal:
        if not valid_name(wanted):
            raise Unprocessable("A signal's name is not valid.")
    with rooms.store.read() as session:
        run = find_run(session, project, name)
        window = [Point.run_id == run.id]
        if attempt is not None:
            window.append(Point.attempt == attempt)
        if from_step is not None:
            window.append(Point.step >= from_step)
        if to_step is not None:
            window.append(Point.step <= to_step)
        stored = session.scalar(select(func.count()).select_from(Point).where(*window)) or 0
        if stored > settings.max_series_steps:
            raise TooLarge(f"The window holds {stored} steps; at most {settings.max_series_steps} are read at once.")
        most = min(max_points, settings.max_series_points)
        wanted_names = list(dict.fromkeys(signal))
        series = [_one(session, rooms.store.dialect, run, s, window, most, bands) for s in wanted_names]
    answer = {"run": run.name, "from_step": from_step, "to_step": to_step, "series": series}
    # Encoded here: a model per point would cost ten times the query.
    return Response(to_json(answer), media_type="application/json")


def _one(
    session: Session, dialect: str, run: Run, signal: str, window: list[Any], most: int, bands: bool
) -> dict[str, Any]:
    known = find(signal)
    answer: dict[str, Any] = {"signal": signal, "unit": known.unit if known else None, "stored": 0, "points": []}
    position = session.scalar(select(SignalName.position).where(SignalName.run_id == run.id, SignalName.name == signal))
    if position is None:
        return answer
    value = value_at(Point.values.expression, position, dialect)
    query = select(Point.attempt, Point.step, Point.at, value).where(*window).order_by(Point.attempt, Point.step)
    rows = [(a, s, at, v) for a, s, at, raw in session.execute(query) if (v := read_value(raw)) is not None]
    kept = [rows[i] for i in thin(rows, most)]
    points = [{"attempt": a, "step": s, "at": at, "value": v} for a, s, at, v in kept]
    if bands and points:
        _add_bands(session, signal, window, points)
    return {**answer, "stored": len(rows), "points": points}


def _add_bands(session: Session, signal: str, window: list[Any], points: list[dict[str, Any]]) -> None:
    by_step = {(p["attempt"], p["step"]): p for p in points}
    query = select(Point.attempt, Point.step, Point.bands[signal]).where(*window)
    for attempt, step, band in session.execute(query):
        point = by_step.get((attempt, step))
        if point is not None:
            point["band"] = band


@router.get("/steps/{step}", responses=documented(404))
def read_step(
    rooms: InRooms,
    _: Reader,
    project: Project,
    name: Name,
    step: Annotated[int, Path(ge=0, le=BIGINT)],
    attempt: Annotated[int | None, Query(ge=1, le=2**31 - 1, description="Absent: the latest that has it.")] = None,
) -> StepAnswer:
    """One completed step: every value, what is missing and why, the worst ranks, the worst tokens."""
    with rooms.store.read() as session:
        run = find_run(session, project, name)
        query = select(Point).where(Point.run_id == run.id, Point.step == step)
        if attempt is not None:
            query = query.where(Point.attempt == attempt)
        point = session.scalars(query.order_by(Point.attempt.desc()).limit(1)).first()
        if point is None:
            raise NotFound(f"No completed step {step}.")
        names = session.execute(select(SignalName.position, SignalName.name).where(SignalName.run_id == run.id))
        values = {n: point.values[p - 1] for p, n in names if p <= len(point.values)}
        return StepAnswer(
            run=run.name,
            attempt=point.attempt,
            step=point.step,
            at=point.at,
            reported=point.reported,
            expected=point.expected,
            segment=point.segment,
            flagged=point.flag,
            values={n: v for n, v in sorted(values.items()) if v is not None},
            missing=point.missing,
            worst=point.worst,
            bands=point.bands,
            evidence=point.evidence,
        )

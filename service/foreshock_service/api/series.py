"""Signals over steps: down-sampled on the server with min and max kept, and single steps in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Query, Response
from numpy.typing import NDArray
from pydantic import Field
from sqlalchemy import func, select, type_coerce
from sqlalchemy.orm import Session
from sqlalchemy.types import NullType

from foreshock.frames.catalogue import find, valid_name
from foreshock_service.api.access import Reader
from foreshock_service.api.encoding import Body, Number, Object, Plain, to_json
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import InRooms, Name, Project, find_run
from foreshock_service.errors import NotFound, TooLarge, Unprocessable
from foreshock_service.store.models import Point, Run, SignalName
from foreshock_service.store.types import Packed, value_at

router = APIRouter(prefix="/v1/runs/{project}/{name}", tags=["runs"])

BIGINT = 2**63 - 1
BANDS_AT_ONCE = 500
Column = tuple[NDArray[np.float64], NDArray[np.intp]]
NOTHING: Column = (np.empty(0), np.empty(0, dtype=np.intp))
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


def thin(points: Sequence[tuple[float, ...]], most: int) -> list[int]:
    """Positions to keep of (…, value) rows, at most `most` of them (`most` >= 5), in order.

    The window is cut into equal buckets; of each, the rows with the least and the greatest value stay (infinities are
    values), and its first NaN, which would hide both if it were compared. First and last row always stay.
    """
    return thin_values(np.array([row[-1] for row in points], dtype=np.float64), most)


def thin_values(values: NDArray[np.float64], most: int) -> list[int]:
    """`thin` for a column; some 5 µs a bucket and 5 ns a value."""
    if len(values) <= most:
        return list(range(len(values)))
    buckets = max(1, (most - 2) // 3)
    edges = [b * len(values) // buckets for b in range(buckets + 1)]
    nans = np.isnan(values)
    holed = bool(nans.any())
    low, high = (np.where(nans, np.inf, values), np.where(nans, -np.inf, values)) if holed else (values, values)
    kept = {0, len(values) - 1}
    for begin, end in pairwise(edges):
        unknown = nans[begin:end] if holed else None
        if unknown is None or not unknown.all():
            kept.add(begin + int(low[begin:end].argmin()))
            kept.add(begin + int(high[begin:end].argmax()))
        if unknown is not None and unknown.any():
            kept.add(begin + int(unknown.argmax()))
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
        series = _read(session, rooms.store.dialect, run, wanted_names, window, most)
        if bands:
            _add_bands(session, series, window)
    answer = {"run": run.name, "from_step": from_step, "to_step": to_step, "series": series}
    # Encoded here: a model per point would cost ten times the query.
    return Response(to_json(answer), media_type="application/json")


def _read(
    session: Session, dialect: str, run: Run, names: Sequence[str], window: list[Any], most: int
) -> list[dict[str, Any]]:
    """All signals in one scan of the window: the rows are large, and reading them is what costs."""
    wanted = select(SignalName.name, SignalName.position).where(SignalName.run_id == run.id, SignalName.name.in_(names))
    positions: dict[str, int] = dict(session.execute(wanted).all())
    # SQLite hands the whole packed row over faster than it cuts four values out of it.
    whole = type_coerce(Point.values.expression, NullType())
    cut = [value_at(Point.values.expression, p, dialect) for p in positions.values()]
    columns = [whole] if dialect == "sqlite" else cut
    query = select(Point.attempt, Point.step, Point.at, *columns).where(*window).order_by(Point.attempt, Point.step)
    rows = session.connection().execute(query).all() if positions else []
    if dialect == "sqlite":
        table = Packed([row[3] for row in rows])
        read = {name: table.column(position) for name, position in positions.items()}
    else:
        read = {name: _present([row[i] for row in rows]) for i, name in enumerate(positions, start=3)}
    series = []
    for name in names:
        known = find(name)
        values, where = read.get(name, NOTHING)
        kept = [(rows[where[i]], float(values[i])) for i in thin_values(values, most)]
        points = [{"attempt": row[0], "step": row[1], "at": row[2], "value": value} for row, value in kept]
        unit = known.unit if known else None
        series.append({"signal": name, "unit": unit, "stored": len(values), "points": points})
    return series


def _present(raw: Sequence[float | None]) -> Column:
    """The values that are there, and the positions of their rows."""
    there = np.array([i for i, value in enumerate(raw) if value is not None], dtype=np.intp)
    return np.array([value for value in raw if value is not None], dtype=np.float64), there


def _add_bands(session: Session, series: Sequence[dict[str, Any]], window: list[Any]) -> None:
    """The baselines of the points that are shown, in chunks: the others' are never read, and no step's twice."""
    shown: dict[tuple[int, int], list[tuple[str, dict[str, Any]]]] = {}
    for one in series:
        for point in one["points"]:
            point["band"] = None
            shown.setdefault((point["attempt"], point["step"]), []).append((one["signal"], point))
    for chunk in batched(sorted({step for _, step in shown}), BANDS_AT_ONCE):
        query = select(Point.attempt, Point.step, Point.bands).where(*window, Point.step.in_(chunk))
        for attempt, step, bands in session.connection().execute(query):
            for signal, point in shown.get((attempt, step), ()):
                point["band"] = bands.get(signal)


def batched(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """`items` in slices of `size`."""
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


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

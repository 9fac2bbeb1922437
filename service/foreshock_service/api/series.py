"""Signals over steps: down-sampled on the server with min and max kept, and single steps in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Path, Query, Response
from numpy.typing import NDArray
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.frames.catalogue import find, valid_name
from foreshock_service.api.access import Reader
from foreshock_service.api.encoding import Body, Number, Object, Plain, spell, spelled_to_json
from foreshock_service.api.problems import documented
from foreshock_service.api.rooms import InRooms, Name, Project, find_run
from foreshock_service.errors import NotFound, TooLarge, Unprocessable
from foreshock_service.store.columns import STEP_MAX as BIGINT
from foreshock_service.store.columns import Values, Window, read_columns
from foreshock_service.store.models import Point, SignalName

router = APIRouter(prefix="/v1/runs/{project}/{name}", tags=["runs"])

BANDS_AT_ONCE = 500
NOTHING: Values = (np.empty(0), np.empty(0, dtype=np.intp))
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


def thin_values(values: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Positions to keep, at most `most` of them (`most` >= 5), in order; some 30 ns a value.

    The window is cut into equal buckets; of each, the least and the greatest value stay (infinities are values), and
    its first NaN, which would hide both if it were compared. First and last value always stay.
    """
    if len(values) <= most:
        return np.arange(len(values))
    buckets = max(1, (most - 2) // 3)
    edges = np.arange(buckets + 1) * len(values) // buckets
    sizes = np.diff(edges)
    bucket = np.repeat(np.arange(buckets), sizes)
    nans = np.isnan(values)
    known = np.flatnonzero(~nans)
    kept = [np.array([0, len(values) - 1]), _firsts(np.flatnonzero(nans), bucket)]
    for least in (np.fmin.reduceat(values, edges[:-1]), np.fmax.reduceat(values, edges[:-1])):
        kept.append(_firsts(known[values[known] == np.repeat(least, sizes)[known]], bucket))
    return np.unique(np.concatenate(kept))


def _firsts(places: NDArray[np.intp], bucket: NDArray[np.intp]) -> NDArray[np.intp]:
    """Of each bucket the first of these ascending places."""
    of = bucket[places]
    return places[np.flatnonzero(np.diff(of, prepend=-1))]


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
    steps = Window(0, attempt, from_step or 0, BIGINT if to_step is None else to_step)
    with rooms.store.read() as session:
        run = find_run(session, project, name)
        window = dataclasses.replace(steps, run_id=run.id)
        most = min(max_points, settings.max_series_points)
        names = list(dict.fromkeys(signal))
        series = _read(session, window, names, most, settings.max_series_steps)
        if bands:
            _add_bands(session, series, window)
    answer = {"run": run.name, "from_step": from_step, "to_step": to_step, "series": series}
    # Encoded here: a model per point would cost ten times the query.
    return Response(spelled_to_json(answer), media_type="application/json")


class _Shown(msgspec.Struct, gc=False):
    """A `SeriesPoint` on its way out; what is not finite is spelled."""

    attempt: int
    step: int
    at: float | str
    value: float | str
    band: list[float | str] | msgspec.UnsetType | None = msgspec.UNSET


def _read(session: Session, window: Window, names: Sequence[str], most: int, most_steps: int) -> list[dict[str, Any]]:
    """All signals in one scan of the window: the rows are large, and reading them is what costs.

    Raises `TooLarge` where the window holds more than `most_steps`.
    """
    asked = select(SignalName.name, SignalName.position).where(SignalName.run_id == window.run_id)
    places: dict[str, int] = dict(session.execute(asked.where(SignalName.name.in_(names))).all())
    read = read_columns(session, window, list(places.values()), most_steps + 1)
    if len(read) > most_steps:
        raise TooLarge(f"The window holds more than {most_steps} steps, the most that are read at once.")
    values = dict(zip(places, read.values, strict=True))
    series = []
    for name in names:
        known = find(name)
        column, where = values.get(name, NOTHING)
        kept = thin_values(column, most)
        rows = where[kept]
        numbers = read.attempt[rows], read.step[rows]
        figures = _spelled(read.at[rows]), _spelled(column[kept])
        points = list(map(_Shown, *(n.tolist() for n in numbers), *figures))
        unit = known.unit if known else None
        series.append({"signal": name, "unit": unit, "stored": len(column), "points": points})
    return series


def _spelled(figures: NDArray[np.float64]) -> list[float | str]:
    """As JSON shows them; nearly always all are finite."""
    plain: list[float | str] = figures.tolist()
    for i in np.flatnonzero(~np.isfinite(figures)).tolist():
        plain[i] = spell(float(figures[i]))
    return plain


def _add_bands(session: Session, series: Sequence[dict[str, Any]], window: Window) -> None:
    """The baselines of the points that are shown, in chunks: the others' are never read, and no step's twice."""
    shown: dict[tuple[int, int], list[tuple[str, _Shown]]] = {}
    for one in series:
        for point in one["points"]:
            point.band = None
            shown.setdefault((point.attempt, point.step), []).append((one["signal"], point))
    asked = select(Point.attempt, Point.step, Point.bands).where(Point.run_id == window.run_id)
    for chunk in batched(sorted({step for _, step in shown}), BANDS_AT_ONCE):
        for attempt, step, bands in session.connection().execute(asked.where(Point.step.in_(chunk))):
            for signal, point in shown.get((attempt, step), ()):
                point.band = bands.get(signal)


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

"""The last steps of a run as columns, for curves that are drawn on the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import bindparam, select, type_coerce
from sqlalchemy.orm import Session
from sqlalchemy.types import NullType

from foreshock_service.store.models import Point, SignalName
from foreshock_service.store.types import Packed, value_at

Column = list[float | None]

# Built once: building a statement costs as much as running it.
_STEPS: Final[Any] = (
    select(Point.attempt, Point.step)
    .where(Point.run_id == bindparam("b_run"))
    .order_by(Point.attempt.desc(), Point.step.desc())
    .limit(bindparam("b_steps"))
)
# SQLite hands the whole packed row over faster than it cuts four values out of it.
_WHOLE: Final[Any] = _STEPS.add_columns(type_coerce(Point.values.expression, NullType()))


class Recent(NamedTuple):
    """Oldest first, all of one length: missing is None."""

    steps: list[tuple[int, int]]
    """(attempt, step)"""
    columns: Mapping[str, Column]


def positions(session: Session, run_ids: Sequence[int], names: Sequence[str]) -> dict[int, dict[str, int]]:
    """run id → signal → its place in the packed rows. One query."""
    found: dict[int, dict[str, int]] = {run_id: {} for run_id in run_ids}
    query = select(SignalName.run_id, SignalName.name, SignalName.position)
    for run_id, name, position in session.execute(
        query.where(SignalName.run_id.in_(run_ids), SignalName.name.in_(names))
    ):
        found[run_id][name] = position
    return found


def recent(session: Session, dialect: str, run_id: int, places: Mapping[str, int], steps: int) -> Recent:
    """The last `steps` steps of all attempts: after a rollback the curve goes on with the new one. One query."""
    which = {"b_run": run_id, "b_steps": steps}
    if dialect == "sqlite":
        query = _WHOLE
    else:
        cut = [value_at(Point.values.expression, p, dialect) for p in places.values()]
        query = _STEPS.add_columns(*cut)
    rows = session.connection().execute(query, which).all()[::-1]
    columns: dict[str, Column] = {}
    table = Packed([row[2] for row in rows]) if dialect == "sqlite" else None
    for i, (name, position) in enumerate(places.items(), start=2):
        if table is None:
            columns[name] = [row[i] for row in rows]
            continue
        column: Column = [None] * len(rows)
        for value, where in zip(*table.column(position), strict=True):
            column[where] = float(value)
        columns[name] = column
    return Recent([(row[0], row[1]) for row in rows], columns)

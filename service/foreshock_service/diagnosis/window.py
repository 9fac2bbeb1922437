"""Reads the last evaluated steps of a run, for diagnosis and for judging commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from foreshock_service.store.models import Point, SignalName

NO_STEP = 2**63 - 1
# Built once: building a statement costs as much as running it.
_NAMES = select(SignalName.position, SignalName.name).where(SignalName.run_id == bindparam("b_run"))
_PAST = (
    select(Point.step, Point.values, Point.missing, Point.bands, Point.evidence)
    .where(
        Point.run_id == bindparam("b_run"), Point.attempt == bindparam("b_attempt"), Point.step <= bindparam("b_upto")
    )
    .order_by(Point.step.desc())
    .limit(bindparam("b_most"))
)
_BANDS = select(Point.bands).where(
    Point.run_id == bindparam("b_run"), Point.attempt == bindparam("b_attempt"), Point.step == bindparam("b_step")
)
Bands = Mapping[str, tuple[float, float, float]]


class PastStep(msgspec.Struct, frozen=True, kw_only=True):
    """One stored step: what was measured, and the baselines as of then."""

    attempt: int
    step: int
    values: Mapping[str, float]
    missing: Mapping[str, str] = {}
    bands: Bands = {}
    evidence: Mapping[str, Any] = {}


def recent_steps(
    session: Session, run_id: int, attempt: int, *, upto: int | None = None, steps: int = 16
) -> list[PastStep]:
    """The last `steps` stored steps of an attempt, not beyond `upto`, oldest first. Two queries."""
    names = dict(session.connection().execute(_NAMES, {"b_run": run_id}).all())
    which = {"b_run": run_id, "b_attempt": attempt, "b_upto": NO_STEP if upto is None else upto, "b_most": steps}
    rows = session.connection().execute(_PAST, which).all()
    return [
        PastStep(
            attempt=attempt,
            step=step,
            values={names[i]: v for i, v in enumerate(values, start=1) if v is not None and i in names},
            missing=missing or {},
            bands=as_bands(bands),
            evidence=evidence or {},
        )
        for step, values, missing, bands, evidence in reversed(rows)
    ]


def bands_at(session: Session, run_id: int, attempt: int, step: int) -> Bands:
    """The baselines as of one stored step; empty where the step is not stored."""
    which = {"b_run": run_id, "b_attempt": attempt, "b_step": step}
    return as_bands(session.connection().execute(_BANDS, which).scalar())


def as_bands(stored: Mapping[str, Any] | None) -> Bands:
    """signal → (low, centre, high), from JSON, where non-finite numbers are spelled out."""
    return {s: (float(b[0]), float(b[1]), float(b[2])) for s, b in (stored or {}).items() if len(b) == 3}

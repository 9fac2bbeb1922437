"""Reads the last evaluated steps of a run, for diagnosis and for judging commands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock_service.store.models import Point, SignalName

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
    names_of = select(SignalName.position, SignalName.name).where(SignalName.run_id == run_id)
    names = dict(session.execute(names_of).all())
    query = select(Point.step, Point.values, Point.missing, Point.bands, Point.evidence)
    query = query.where(Point.run_id == run_id, Point.attempt == attempt)
    if upto is not None:
        query = query.where(Point.step <= upto)
    rows = session.execute(query.order_by(Point.step.desc()).limit(steps)).all()
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
    query = select(Point.bands).where(Point.run_id == run_id, Point.attempt == attempt, Point.step == step)
    return as_bands(session.scalar(query))


def as_bands(stored: Mapping[str, Any] | None) -> Bands:
    """signal → (low, centre, high), from JSON, where non-finite numbers are spelled out."""
    return {s: (float(b[0]), float(b[1]), float(b[2])) for s, b in (stored or {}).items() if len(b) == 3}

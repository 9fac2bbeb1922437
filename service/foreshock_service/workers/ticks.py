"""Ticks: what time itself tells the rules. A few times a minute, for every run that is not finished."""

from __future__ import annotations

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from foreshock_service.rules.interface import Tick
from foreshock_service.store.models import Client, EvaluationState, Run

FORGET_S = 7 * 86_400.0
"""Runs that nothing was heard of for so long get no more ticks; their incidents stay as they are."""
SILENT_RANK_S = 30.0


def runs_to_tick(session: Session, owner: str, now: float, tick_s: float) -> list[int]:
    """Runs whose last tick is long enough ago and whose lease is free or this replica's.

    A finished run gets one more tick, so that rules can close what its silence had opened.
    """
    ended = Run.status.in_(("finished", "crashed"))
    query = (
        select(Run.id)
        .join(EvaluationState, EvaluationState.run_id == Run.id)
        .where(
            Run.last_seen_at > now - FORGET_S,
            or_(EvaluationState.ticked_at.is_(None), EvaluationState.ticked_at <= now - tick_s),
            ~ended | EvaluationState.ticked_at.is_(None) | (EvaluationState.ticked_at <= Run.finished_at),
            or_(EvaluationState.owner == owner, EvaluationState.owner.is_(None), EvaluationState.lease_until < now),
        )
        .order_by(Run.id)
    )
    return list(session.scalars(query))


def tick_of(session: Session, run: Run, step: int | None, now: float) -> Tick:
    """The tick as rules see it; `silent_ranks` are those of the current attempt not heard of for 30 s or more."""
    query = select(Client.role, Client.rank, Client.last_seen_at, Client.finished_at).where(
        Client.run_id == run.id, Client.last_attempt == run.attempt
    )
    heard: dict[tuple[str, int], float] = {}
    for role, rank, last_seen_at, finished_at in session.execute(query):
        at = now if finished_at is not None else last_seen_at
        heard[(role, rank)] = max(at, heard.get((role, rank), 0.0))
    threshold = max(SILENT_RANK_S, run.median_step_s or 0.0)
    return Tick(
        run=run.name,
        attempt=run.attempt,
        step=step,
        silent_s=max(0.0, now - run.last_seen_at),
        median_step_s=run.median_step_s,
        silent_ranks=[(*who, now - at) for who, at in sorted(heard.items()) if now - at >= threshold],
        finished=run.status in ("finished", "crashed"),
        paused=run.status == "paused",
    )

"""Which ranks reported a step, and which were expected to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from foreshock_service.store.flags import Flag
from foreshock_service.store.models import FrameRow, Step

Rank = tuple[str, int]
Reported = dict[int, dict[Rank, str]]
"""step → (role, rank) → the first client that claimed it."""
RECENT_STEPS = 3
"""Without a declared world size, the ranks of so many steps before are expected: pools are elastic."""

# Built once: building a statement costs as much as running it.
_REPORTED = select(FrameRow.step, FrameRow.role, FrameRow.rank, FrameRow.client_id).where(
    FrameRow.run_id == bindparam("b_run"),
    FrameRow.attempt == bindparam("b_attempt"),
    FrameRow.step.in_(bindparam("b_steps", expanding=True)),
    FrameRow.received_at >= bindparam("b_since"),
    FrameRow.flags.bitwise_and(int(Flag.DUPLICATE_RANK)) == 0,
)
_BEFORE = (
    select(Step.step, Step.first_at)
    .where(Step.run_id == bindparam("b_run"), Step.attempt == bindparam("b_attempt"), Step.step < bindparam("b_step"))
    .order_by(Step.step.desc())
    .limit(RECENT_STEPS)
)


def reported(session: Session, run_id: int, attempt: int, steps: Collection[int], since: float) -> Reported:
    """Who reported these steps, in frames received at or after `since` (which spares PostgreSQL the other days)."""
    which = {"b_run": run_id, "b_attempt": attempt, "b_steps": list(steps), "b_since": since}
    found: Reported = {step: {} for step in steps}
    for step, role, rank, client in session.connection().execute(_REPORTED, which):
        found[step].setdefault((role, rank), client)
    return found


def steps_before(session: Session, run_id: int, attempt: int, step: int) -> dict[int, float]:
    """The `RECENT_STEPS` steps of the attempt before `step`, with when their first frame came."""
    which = {"b_run": run_id, "b_attempt": attempt, "b_step": step}
    return dict(session.connection().execute(_BEFORE, which).all())


def expected(step: int, declared: Mapping[str, Any], seen: Reported) -> frozenset[Rank]:
    """The ranks awaited in `step`: as declared, else those of the last three steps in `seen`; empty: nobody knows."""
    if declared:
        return frozenset((role, rank) for role, world in declared.items() for rank in range(int(world)))
    before = sorted((s for s in seen if s < step and seen[s]), reverse=True)[:RECENT_STEPS]
    return frozenset(rank for s in before for rank in seen[s])


def absent(awaited: Iterable[Rank], present: Collection[Rank]) -> list[Rank]:
    """The awaited ranks that did not report, in order."""
    return sorted(set(awaited) - set(present))

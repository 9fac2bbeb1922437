"""Frames into the store, and each step's row brought up to date: who reported, who is awaited, when it is due."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.orm import Session

from foreshock.wire import Frame
from foreshock_service.ingest.arrivals import Answer, Item, encode_frame
from foreshock_service.ingest.identities import RunInGroup
from foreshock_service.store import completeness
from foreshock_service.store.flags import SENTENCES, Flag
from foreshock_service.store.models import FrameRow, Step
from foreshock_service.store.upsert import insert_new

GRACE_S = 1.0

# Built once: building a statement costs as much as running it.
_STEPS = select(Step.step, Step.first_at, Step.due_at, Step.flags, Step.evaluated_at).where(
    Step.run_id == bindparam("b_run"),
    Step.attempt == bindparam("b_attempt"),
    Step.step.in_(bindparam("b_steps", expanding=True)),
)
_FRAME = insert(FrameRow.__table__)  # type: ignore[arg-type]
_HURRY = (
    update(Step.__table__)  # type: ignore[arg-type]
    .where(
        Step.run_id == bindparam("b_run"),
        Step.attempt == bindparam("b_attempt"),
        Step.step < bindparam("b_newest"),
        Step.evaluated_at.is_(None),
        Step.due_at > bindparam("b_now"),
    )
    .values(due_at=bindparam("b_now"))
)


@dataclass(frozen=True)
class Placed:
    """One frame with everything that its row needs."""

    client_id: str
    item: Item
    received_at: float
    answer: Answer

    @property
    def frame(self) -> Frame:
        assert isinstance(self.item.body, Frame)
        return self.item.body


def store_frames(
    session: Session, entry: RunInGroup, frames: Sequence[Placed], now: float, watermark_min_s: float
) -> bool:
    """Stores a run's frames of one group; True where a step may now be due. The run's row is held by the caller."""
    by_attempt: dict[int, list[Placed]] = defaultdict(list)
    for placed in frames:
        by_attempt[placed.item.attempt].append(placed)
    due = False
    for attempt, some in by_attempt.items():
        due |= _store_attempt(session, entry, attempt, some, now, watermark_min_s)
    return due


def _store_attempt(
    session: Session, entry: RunInGroup, attempt: int, frames: list[Placed], now: float, watermark_min_s: float
) -> bool:
    run_id = entry.run.id
    steps = sorted({placed.frame.step for placed in frames})
    watermark_s = max(watermark_min_s, (entry.run.median_step_s or 0.0) / 2)
    rows = _step_rows(session, run_id, attempt, frames, steps, now + watermark_s)
    declared = entry.by_ordinal[attempt].expected_ranks
    before = {} if declared else completeness.steps_before(session, run_id, attempt, steps[0])
    since = min([*before.values(), *(row["first_at"] for row in rows.values())]) - GRACE_S
    seen = completeness.reported(session, run_id, attempt, [*before, *steps], since)
    flags: dict[int, Flag] = defaultdict(lambda: Flag(0))
    for placed in frames:
        _flag(placed, seen, late=rows[placed.frame.step]["evaluated_at"] is not None)
        flags[placed.frame.step] |= placed.item.flags
    session.connection().execute(_FRAME, [_frame_row(run_id, placed) for placed in frames])
    return _update_steps(session, run_id, attempt, rows, seen, flags, declared, now)


def _step_rows(
    session: Session, run_id: int, attempt: int, frames: list[Placed], steps: list[int], due_at: float
) -> dict[int, Any]:
    """The steps' rows, made where new."""
    which = {"b_run": run_id, "b_attempt": attempt, "b_steps": steps}
    rows = {row.step: dict(row._mapping) for row in session.connection().execute(_STEPS, which)}
    fresh: dict[int, dict[str, Any]] = {}
    for placed in frames:
        if placed.frame.step not in rows:
            fresh.setdefault(
                placed.frame.step,
                {
                    "run_id": run_id,
                    "attempt": attempt,
                    "step": placed.frame.step,
                    "first_at": placed.received_at,
                    "event_at": placed.item.event_at,
                    "due_at": due_at,
                    "reported": 0,
                    "expected": 0,
                    "flags": 0,
                    "evaluated_at": None,
                },
            )
    insert_new(session, Step, list(fresh.values()))
    return {**rows, **fresh}


def _flag(placed: Placed, seen: completeness.Reported, *, late: bool) -> None:
    """Adds what only the other frames of the step can tell, and puts the finding into words for the reply."""
    frame, item = placed.frame, placed.item
    first = seen[frame.step].setdefault((frame.role, frame.rank), placed.client_id)
    if first != placed.client_id:
        item.flags |= Flag.DUPLICATE_RANK
    if late:
        item.flags |= Flag.LATE
    for flag, sentence in SENTENCES.items():
        if item.flags & flag:
            placed.answer.warn(sentence.format(step=frame.step, role=frame.role, rank=frame.rank))


def _frame_row(run_id: int, placed: Placed) -> dict[str, Any]:
    frame = placed.frame
    return {
        "run_id": run_id,
        "attempt": placed.item.attempt,
        "step": frame.step,
        "role": frame.role,
        "rank": frame.rank,
        "client_id": placed.client_id,
        "sequence": frame.sequence,
        "received_at": placed.received_at,
        "event_at": placed.item.event_at,
        "flags": int(placed.item.flags),
        "body": encode_frame(frame),
    }


_UPDATE = (
    update(Step.__table__)  # type: ignore[arg-type]
    .where(Step.run_id == bindparam("b_run"), Step.attempt == bindparam("b_attempt"), Step.step == bindparam("b_step"))
    .values(
        reported=bindparam("b_reported"),
        expected=bindparam("b_expected"),
        flags=bindparam("b_flags"),
        due_at=bindparam("b_due"),
    )
)


def _update_steps(
    session: Session,
    run_id: int,
    attempt: int,
    rows: dict[int, Any],
    seen: completeness.Reported,
    flags: dict[int, Flag],
    declared: dict[str, Any],
    now: float,
) -> bool:
    changes, newest, due = [], -1, False
    for step, row in rows.items():
        awaited = completeness.expected(step, declared, seen)
        complete = bool(awaited) and not completeness.absent(awaited, seen[step])
        urgent = complete or bool(flags[step] & Flag.NON_FINITE)
        changes.append(
            {
                "b_run": run_id,
                "b_attempt": attempt,
                "b_step": step,
                "b_reported": len(seen[step]),
                "b_expected": len(awaited | seen[step].keys()) if awaited else len(seen[step]),
                "b_flags": int(Flag(row["flags"]) | (flags[step] & ~Flag.LATE)),
                "b_due": min(now, row["due_at"]) if urgent else row["due_at"],
            }
        )
        due |= urgent and row["evaluated_at"] is None
        newest = max(newest, step) if urgent else newest
    session.connection().execute(_UPDATE, changes)
    if newest > 0:
        # Steps are evaluated in order, so those before must not be waited for. Where the step is complete nothing is
        # lost by it: each client sends in order, and whoever reported this step will report no earlier one.
        which = {"b_run": run_id, "b_attempt": attempt, "b_newest": newest, "b_now": now}
        session.connection().execute(_HURRY, which)
    return due

"""Frames into the store, and each step's row brought up to date: who reported, who is awaited, when it is due."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import bindparam, select, text, update
from sqlalchemy.orm import Session

from foreshock.wire import Frame
from foreshock_service.ingest.arrivals import Answer, Item, encode_frame
from foreshock_service.ingest.identities import RunInGroup
from foreshock_service.store import completeness
from foreshock_service.store.bulk import insert_rows
from foreshock_service.store.flags import SENTENCES, Flag
from foreshock_service.store.models import FrameRow, Step

GRACE_S = 1.0
NON_FINITE, LATE, DUPLICATE_RANK = int(Flag.NON_FINITE), int(Flag.LATE), int(Flag.DUPLICATE_RANK)
_SPOKEN_OF = sum(int(flag) for flag in SENTENCES)

# Built once: building a statement costs as much as running it.
_STEPS = select(
    Step.step, Step.first_at, Step.event_at, Step.due_at, Step.flags, Step.reported, Step.evaluated_at
).where(
    Step.run_id == bindparam("b_run"),
    Step.attempt == bindparam("b_attempt"),
    Step.step.in_(bindparam("b_steps", expanding=True)),
)
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
_UPDATE_MANY = text(
    "UPDATE steps SET reported = new.reported, expected = new.expected, flags = new.flags, due_at = new.due_at"
    " FROM unnest(CAST(:step AS bigint[]), CAST(:reported AS int[]), CAST(:expected AS int[]), CAST(:flags AS int[]),"
    " CAST(:due_at AS float8[])) AS new (step, reported, expected, flags, due_at)"
    " WHERE steps.run_id = :run_id AND steps.attempt = :attempt AND steps.step = new.step"
)
"""PostgreSQL's: one statement for all steps."""


class Seen:
    """Who reported the steps of late, as this writer saw it; what it holds of a step is used while the row agrees.

    A step's row counts its ranks and never loses one, and the run is locked: the same count is the same ranks.
    """

    MOST = 8192

    def __init__(self) -> None:
        self._by_step: OrderedDict[tuple[int, int, int], dict[completeness.Rank, str]] = OrderedDict()

    def of(self, run_id: int, attempt: int, counts: dict[int, int]) -> completeness.Reported | None:
        """Who reported these steps (step → ranks that the row counts); None where the frames must be asked."""
        found: completeness.Reported = {}
        for step, count in counts.items():
            ranks = self._by_step.get((run_id, attempt, step), {} if not count else None)
            if ranks is None or len(ranks) != count:
                return None
            found[step] = ranks
        return found

    def keep(self, run_id: int, attempt: int, seen: completeness.Reported) -> None:
        """Remembers what the transaction stored; the oldest go."""
        for step, ranks in seen.items():
            self._by_step[(run_id, attempt, step)] = ranks
        while len(self._by_step) > self.MOST:
            self._by_step.popitem(last=False)

    def forget(self) -> None:
        """After a transaction that did not commit."""
        self._by_step.clear()


@dataclass(frozen=True, slots=True)
class Placed:
    """One frame with everything that its row needs."""

    client_id: str
    frame: Frame
    item: Item
    received_at: float
    answer: Answer


def store_frames(
    session: Session, entry: RunInGroup, frames: Sequence[Placed], now: float, watermark_min_s: float, seen: Seen
) -> bool:
    """Stores a run's frames of one group; True where a step may now be due. The run's row is held by the caller."""
    by_attempt: dict[int, list[Placed]] = defaultdict(list)
    for placed in frames:
        by_attempt[placed.item.attempt].append(placed)
    due = False
    for attempt, some in by_attempt.items():
        due |= _store_attempt(session, entry, attempt, some, now, watermark_min_s, seen)
    return due


def _store_attempt(
    session: Session,
    entry: RunInGroup,
    attempt: int,
    frames: list[Placed],
    now: float,
    watermark_min_s: float,
    memory: Seen,
) -> bool:
    run_id = entry.run.id
    steps = sorted({placed.frame.step for placed in frames})
    watermark_s = max(watermark_min_s, (entry.run.median_step_s or 0.0) / 2)
    rows, fresh = _step_rows(session, run_id, attempt, frames, steps, now + watermark_s)
    declared = entry.by_ordinal[attempt].expected_ranks
    seen = _seen(session, memory, run_id, attempt, rows, known=bool(declared))
    flags: dict[int, int] = defaultdict(int)
    for placed in frames:
        _flag(placed, seen, late=rows[placed.frame.step]["evaluated_at"] is not None)
        flags[placed.frame.step] |= placed.item.flags
    memory.keep(run_id, attempt, seen)
    due, newest = _renew(rows, seen, flags, declared, now)
    insert_rows(session, Step, [rows[step] for step in fresh])
    _update_steps(session, run_id, attempt, [row for step, row in rows.items() if step not in fresh])
    insert_rows(session, FrameRow, [_frame_row(run_id, placed) for placed in frames])
    if newest > 0:
        # Steps are evaluated in order, so those before must not be waited for. Where the step is complete nothing is
        # lost by it: each client sends in order, and whoever reported this step will report no earlier one.
        which = {"b_run": run_id, "b_attempt": attempt, "b_newest": newest, "b_now": now}
        session.connection().execute(_HURRY, which)
    return due


def _step_rows(
    session: Session, run_id: int, attempt: int, frames: list[Placed], steps: list[int], due_at: float
) -> tuple[dict[int, dict[str, Any]], set[int]]:
    """The steps' rows by step, and which of them are new and still to be written. The run's lock keeps others away."""
    which = {"b_run": run_id, "b_attempt": attempt, "b_steps": steps}
    rows = {row.step: dict(row._mapping) for row in session.connection().execute(_STEPS, which)}
    fresh = set()
    for placed in frames:
        step = placed.frame.step
        if step not in rows:
            fresh.add(step)
            rows[step] = {
                "run_id": run_id,
                "attempt": attempt,
                "step": step,
                "first_at": placed.received_at,
                "event_at": placed.item.event_at,
                "due_at": due_at,
                "reported": 0,
                "expected": 0,
                "flags": 0,
                "evaluated_at": None,
            }
    return rows, fresh


def _seen(
    session: Session, memory: Seen, run_id: int, attempt: int, rows: dict[int, dict[str, Any]], *, known: bool
) -> completeness.Reported:
    """Who reported these steps before; where the world is not `known`, the last steps before them too."""
    before = {} if known else completeness.steps_before(session, run_id, attempt, min(rows))
    counts = {step: row["reported"] for step, row in rows.items()}
    if not before:
        remembered = memory.of(run_id, attempt, counts)
        if remembered is not None:
            return remembered
    asked = [step for step, count in counts.items() if count]
    since = min([*before.values(), *(rows[step]["first_at"] for step in asked)], default=0.0) - GRACE_S
    if not before and not asked:
        return {step: {} for step in rows}
    found = completeness.reported(session, run_id, attempt, [*before, *asked], since)
    return {**{step: {} for step in rows}, **found}


def _flag(placed: Placed, seen: completeness.Reported, *, late: bool) -> None:
    """Adds what only the other frames of the step can tell, and puts the finding into words for the reply."""
    frame, item = placed.frame, placed.item
    first = seen[frame.step].setdefault((frame.role, frame.rank), placed.client_id)
    if first != placed.client_id:
        item.flags |= DUPLICATE_RANK
    if late:
        item.flags |= LATE
    if not item.flags & _SPOKEN_OF:
        return
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
        "flags": placed.item.flags,
        "body": encode_frame(frame),
    }


def _renew(
    rows: dict[int, dict[str, Any]],
    seen: completeness.Reported,
    flags: dict[int, int],
    declared: dict[str, Any],
    now: float,
) -> tuple[bool, int]:
    """Brings the rows up to date; whether one may now be due, and the newest step that need not be waited for."""
    newest, due = -1, False
    world = completeness.expected(0, declared, {}) if declared else frozenset()
    for step, row in rows.items():
        here = seen[step]
        awaited = world or completeness.expected(step, declared, seen)
        complete = bool(awaited) and len(here) >= len(awaited) and here.keys() >= awaited
        urgent = complete or bool(flags[step] & NON_FINITE)
        row["reported"] = len(here)
        row["expected"] = len(here) if complete or not awaited else len(awaited | here.keys())
        row["flags"] |= flags[step] & ~LATE
        row["due_at"] = min(now, row["due_at"]) if urgent else row["due_at"]
        due |= urgent and row["evaluated_at"] is None
        newest = max(newest, step) if urgent else newest
    return due, newest


def _update_steps(session: Session, run_id: int, attempt: int, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    connection = session.connection()
    names = ("step", "reported", "expected", "flags", "due_at")
    if connection.dialect.name == "postgresql":
        columns = {name: [row[name] for row in rows] for name in names}
        connection.execute(_UPDATE_MANY, {"run_id": run_id, "attempt": attempt, **columns})
        return
    changes: Iterable[dict[str, Any]] = (
        {"b_run": run_id, "b_attempt": attempt, "b_due": row["due_at"], **{f"b_{n}": row[n] for n in names[:-1]}}
        for row in rows
    )
    connection.execute(_UPDATE, list(changes))

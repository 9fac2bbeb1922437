"""Frames into the store, and each step's row brought up to date: who reported, who is awaited, when it is due."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import bindparam, select, update
from sqlalchemy.orm import Session

from foreshock.wire import Frame
from foreshock_service.ingest.arrivals import Answer, Item, encode_frame
from foreshock_service.ingest.identities import RunInGroup
from foreshock_service.store import completeness
from foreshock_service.store.bulk import change_rows, insert_rows, read_rows, update_rows
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
_COLUMNS = ("run_id", "attempt", "step", "first_at", "event_at", "due_at", "flags", "reported", "evaluated_at")
_STEPS_OF_MANY = (
    "SELECT steps.run_id, steps.attempt, steps.step, steps.first_at, steps.event_at, steps.due_at, steps.flags,"
    " steps.reported, steps.evaluated_at"
    " FROM unnest(%s::bigint[], %s::int[], %s::bigint[]) AS wanted (run_id, attempt, step)"
    " CROSS JOIN LATERAL (SELECT * FROM steps WHERE steps.run_id = wanted.run_id AND steps.attempt = wanted.attempt"
    " AND steps.step = wanted.step LIMIT 1) AS steps"
)
"""PostgreSQL's: one statement for the steps of all runs, by their key whatever the planner thinks of the table."""
_HURRY_MANY = (
    "UPDATE steps SET due_at = %s"
    " FROM unnest(%s::bigint[], %s::int[], %s::bigint[]) AS told (run_id, attempt, newest)"
    " WHERE steps.run_id = told.run_id AND steps.attempt = told.attempt AND steps.step < told.newest"
    " AND steps.evaluated_at IS NULL AND steps.due_at > %s"
)
_KEY = ("run_id", "attempt", "step")
_CHANGING = ("reported", "expected", "flags", "due_at")


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


@dataclass(slots=True)
class _Part:
    """The frames of one attempt of one run, and the rows of their steps."""

    entry: RunInGroup
    attempt: int
    frames: list[Placed]
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    fresh: set[int] = field(default_factory=set)
    """Steps whose rows are still to be written."""
    newest: int = -1
    """The newest step that need not be waited for."""

    @property
    def run_id(self) -> int:
        return self.entry.run.id


def store_frames(
    session: Session,
    of_runs: Sequence[tuple[RunInGroup, Sequence[Placed]]],
    now: float,
    watermark_min_s: float,
    memory: Seen,
) -> set[int]:
    """Stores a group's frames, by run; returns the runs of which a step may now be due.

    The runs' rows are held by the caller. The number of statements does not depend on the number of runs, on SQLite
    but for reads, which cost little there.
    """
    by_attempt: dict[tuple[int, int], _Part] = {}
    for entry, frames in of_runs:
        for placed in frames:
            key = (entry.run.id, placed.item.attempt)
            if key not in by_attempt:
                by_attempt[key] = _Part(entry, placed.item.attempt, [])
            by_attempt[key].frames.append(placed)
    parts = list(by_attempt.values())
    _find_steps(session, parts)
    due = {part.run_id for part in parts if _bring_up(session, part, now, watermark_min_s, memory)}
    insert_rows(session, Step, [part.rows[step] for part in parts for step in part.fresh])
    old = [row for part in parts for step, row in part.rows.items() if step not in part.fresh]
    update_rows(session, Step, _KEY, _CHANGING, old)
    insert_rows(session, FrameRow, [_frame_row(part.run_id, placed) for part in parts for placed in part.frames])
    _hurry(session, [part for part in parts if part.newest > 0], now)
    return due


def _find_steps(session: Session, parts: Sequence[_Part]) -> None:
    """Fills in the rows of the parts' steps that are there. The runs' locks keep others away."""
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        by_key = {(part.run_id, part.attempt): part for part in parts}
        keys = [(*key, step) for key, part in by_key.items() for step in {placed.frame.step for placed in part.frames}]
        for row in (
            read_rows(session, _STEPS_OF_MANY, [list(column) for column in zip(*keys, strict=True)]) if keys else ()
        ):
            by_key[(row[0], row[1])].rows[row[2]] = dict(zip(_COLUMNS, row, strict=True))
        return
    for part in parts:
        wanted = sorted({placed.frame.step for placed in part.frames})
        asked = {"b_run": part.run_id, "b_attempt": part.attempt, "b_steps": wanted}
        key = {"run_id": part.run_id, "attempt": part.attempt}
        part.rows = {row.step: {**key, **row._mapping} for row in connection.execute(_STEPS, asked)}


def _bring_up(session: Session, part: _Part, now: float, watermark_min_s: float, memory: Seen) -> bool:
    """The part's rows as its frames leave them, the frames flagged; True where a step may now be due."""
    watermark_s = max(watermark_min_s, (part.entry.run.median_step_s or 0.0) / 2)
    _add_fresh(part, now + watermark_s)
    declared = part.entry.by_ordinal[part.attempt].expected_ranks
    seen = _seen(session, memory, part.run_id, part.attempt, part.rows, known=bool(declared))
    flags: dict[int, int] = defaultdict(int)
    for placed in part.frames:
        _flag(placed, seen, late=part.rows[placed.frame.step]["evaluated_at"] is not None)
        flags[placed.frame.step] |= placed.item.flags
    memory.keep(part.run_id, part.attempt, seen)
    due, part.newest = _renew(part.rows, seen, flags, declared, now)
    return due


def _add_fresh(part: _Part, due_at: float) -> None:
    """Rows for the steps that have none yet."""
    for placed in part.frames:
        step = placed.frame.step
        if step not in part.rows:
            part.fresh.add(step)
            part.rows[step] = {
                "run_id": part.run_id,
                "attempt": part.attempt,
                "step": step,
                "first_at": placed.received_at,
                "event_at": placed.item.event_at,
                "due_at": due_at,
                "reported": 0,
                "expected": 0,
                "flags": 0,
                "evaluated_at": None,
            }


def _hurry(session: Session, parts: Sequence[_Part], now: float) -> None:
    """Makes due what lies before a step that need not be waited for: steps are evaluated in order.

    Where that step is complete nothing is lost by it: each client sends in order, and whoever reported it will report
    no earlier one.
    """
    if not parts:
        return
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        told = [(part.run_id, part.attempt, part.newest) for part in parts]
        change_rows(session, _HURRY_MANY, [now, *(list(column) for column in zip(*told, strict=True)), now])
        return
    for part in parts:
        which = {"b_run": part.run_id, "b_attempt": part.attempt, "b_newest": part.newest, "b_now": now}
        connection.execute(_HURRY, which)


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

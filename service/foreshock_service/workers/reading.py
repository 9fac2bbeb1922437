"""What an evaluation reads of the store, for many runs at once: one statement each on PostgreSQL, one a run on SQLite.

PostgreSQL's go by key whatever the planner thinks of the tables (`LATERAL … OFFSET 0`), and are prepared once, since
their text does not depend on how many runs there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from foreshock_service.store.bulk import read_rows
from foreshock_service.store.models import FrameRow, Notice, Step

BATCH = 32
"""Due steps of one run in one transaction, when there is a backlog."""
Key = tuple[int, int, int]
"""Run, attempt, step."""

# Built once: building a statement costs as much as running it.
_DUE = (
    select(
        Step.run_id,
        Step.attempt,
        Step.step,
        Step.first_at,
        Step.event_at,
        Step.due_at,
        Step.flags,
        Step.reported,
        Step.expected,
    )
    .where(Step.run_id == bindparam("b_run"), Step.evaluated_at.is_(None))
    .order_by(Step.attempt, Step.step)
    .limit(bindparam("b_most"))
)
_DUE_OF_MANY = (
    "SELECT due.* FROM unnest(%s::bigint[]) AS wanted (run_id) CROSS JOIN LATERAL"
    " (SELECT run_id, attempt, step, first_at, event_at, due_at, flags, reported, expected FROM steps"
    " WHERE steps.run_id = wanted.run_id AND evaluated_at IS NULL ORDER BY attempt, step LIMIT %s) AS due"
    " ORDER BY run_id, attempt, step"
)
_OF_STEPS = (
    FrameRow.run_id == bindparam("b_run"),
    FrameRow.attempt == bindparam("b_attempt"),
    FrameRow.step.in_(bindparam("b_steps", expanding=True)),
    FrameRow.received_at >= bindparam("b_since"),
)
_FRAMES = (
    select(
        FrameRow.run_id, FrameRow.attempt, FrameRow.step, FrameRow.role, FrameRow.rank, FrameRow.flags, FrameRow.body
    )
    .where(*_OF_STEPS)
    .order_by(FrameRow.received_at, FrameRow.sequence)
)
_COUNTS = (
    select(FrameRow.run_id, FrameRow.attempt, FrameRow.step, func.count()).where(*_OF_STEPS).group_by(FrameRow.step)
)
_WANTED = (
    "unnest(%s::bigint[], %s::int[], %s::bigint[]) AS wanted (run_id, attempt, step)"
    " CROSS JOIN LATERAL (SELECT {columns} FROM frames WHERE frames.run_id = wanted.run_id"
    " AND frames.attempt = wanted.attempt AND frames.step = wanted.step AND frames.received_at >= %s OFFSET 0)"
)
# Put together from constants of this module alone.
_FRAMES_OF_MANY = (
    "SELECT found.run_id, found.attempt, found.step, found.role, found.rank, found.flags, found.body FROM "  # nosec B608
    + _WANTED.format(columns="*")
    + " AS found ORDER BY found.received_at, found.sequence"
)
_COUNTS_OF_MANY = (
    "SELECT wanted.run_id, wanted.attempt, wanted.step, found.frames FROM "  # nosec B608
    + _WANTED.format(columns="count(*) AS frames")
    + " AS found"
)
_NOTICES = (
    select(Notice.run_id, Notice.id, Notice.attempt, Notice.step, Notice.kind, Notice.role, Notice.rank, Notice.data)
    .where(Notice.run_id.in_(bindparam("b_runs", expanding=True)), Notice.consumed.is_(False))
    .order_by(Notice.id)
)


class DueStep(NamedTuple):
    """A step to be evaluated."""

    run_id: int
    attempt: int
    step: int
    first_at: float
    event_at: float
    due_at: float
    flags: int
    reported: int
    expected: int

    @property
    def key(self) -> Key:
        return self.run_id, self.attempt, self.step


class StoredFrame(NamedTuple):
    """A frame as it lies in the store."""

    run_id: int
    attempt: int
    step: int
    role: str
    rank: int
    flags: int
    body: bytes


def due_steps(session: Session, run_ids: Sequence[int], now: float, most: int = BATCH) -> dict[int, list[DueStep]]:
    """Run → its steps to evaluate now, `most` at most: in order of (attempt, step), up to the first that is still
    waited for. Runs without any are left out."""
    if not run_ids:
        return {}
    connection = session.connection()
    if connection.dialect.name == "postgresql":
        rows = read_rows(session, _DUE_OF_MANY, (list(run_ids), most))
    else:
        rows = [tuple(r) for i in run_ids for r in connection.execute(_DUE, {"b_run": i, "b_most": most})]
    found: dict[int, list[DueStep]] = defaultdict(list)
    waits: set[int] = set()
    for row in map(DueStep._make, rows):
        if row.due_at > now:
            waits.add(row.run_id)
        elif row.run_id not in waits:
            found[row.run_id].append(row)
    return dict(found)


def frames_of(session: Session, steps: Sequence[DueStep]) -> dict[Key, list[StoredFrame]]:
    """The frames of these steps, in the order in which they came."""
    found: dict[Key, list[StoredFrame]] = defaultdict(list)
    for row in _of_steps(session, steps, _FRAMES, _FRAMES_OF_MANY):
        found[(row[0], row[1], row[2])].append(StoredFrame._make(row))
    return found


def counts_of(session: Session, steps: Sequence[DueStep]) -> dict[Key, int]:
    """How many frames there are of these steps."""
    return {(row[0], row[1], row[2]): row[3] for row in _of_steps(session, steps, _COUNTS, _COUNTS_OF_MANY)}


def _of_steps(session: Session, steps: Sequence[DueStep], one: Any, many: str) -> Iterator[Any]:
    if not steps:
        return
    connection = session.connection()
    since = min(step.first_at for step in steps) - 1.0
    if connection.dialect.name == "postgresql":
        keys = zip(*((s.run_id, s.attempt, s.step) for s in steps), strict=True)
        yield from read_rows(session, many, [*map(list, keys), since])
        return
    by_attempt: dict[tuple[int, int], list[int]] = defaultdict(list)
    for step in steps:
        by_attempt[(step.run_id, step.attempt)].append(step.step)
    for (run_id, attempt), numbers in by_attempt.items():
        yield from connection.execute(
            one, {"b_run": run_id, "b_attempt": attempt, "b_steps": numbers, "b_since": since}
        ).all()


def notices_of(session: Session, run_ids: Sequence[int]) -> dict[int, list[Any]]:
    """The runs' notices that no rule has seen yet, in order."""
    found: dict[int, list[Any]] = defaultdict(list)
    for row in session.connection().execute(_NOTICES, {"b_runs": list(run_ids)}):
        found[row.run_id].append(row)
    return found

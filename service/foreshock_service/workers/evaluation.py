"""One evaluation of some runs, inside one transaction: their due steps in order, or a tick, under their fenced leases.

Many runs together, because what a transaction costs by itself is what ten steps cost. What needs no lock is done
before (`workers.folding`).
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sqlalchemy import bindparam, select, update
from sqlalchemy.orm import Session

from foreshock_service.rules.interface import Observation, Outcome, StepView
from foreshock_service.store import completeness
from foreshock_service.store.bulk import Encoded, insert_encoded, update_rows
from foreshock_service.store.flags import Flag
from foreshock_service.store.models import Attempt, Notice, Point, Step
from foreshock_service.store.points import Positions
from foreshock_service.workers.folding import Folded, Ready, encode_point, enter, make_ready, view_of
from foreshock_service.workers.holding import Held
from foreshock_service.workers.reading import DueStep, Key, counts_of, notices_of
from foreshock_service.workers.rooms import Rooms

logger = logging.getLogger(__name__)

MEDIAN_OVER = 16
_REPLAYED = int(Flag.REPLAYED)

# Built once: building a statement costs as much as running it.
_CONSUME = (
    update(Notice.__table__)  # type: ignore[arg-type]
    .where(Notice.id.in_(bindparam("b_ids", expanding=True)))
    .values(consumed=True)
)
_EXPECTED = select(Attempt.expected_ranks).where(
    Attempt.run_id == bindparam("b_run"), Attempt.ordinal == bindparam("b_attempt")
)
_TIMES = (
    select(Point.step, Point.at)
    .where(Point.run_id == bindparam("b_run"), Point.attempt == bindparam("b_attempt"))
    .order_by(Point.step.desc())
    .limit(MEDIAN_OVER + 1)
)


def _still_ready(session: Session, steps: Sequence[DueStep], ready: dict[Key, Ready]) -> dict[Key, Ready]:
    """What is ready of these steps, those made ready anew to which frames have come since. The runs are locked."""
    counts = counts_of(session, steps)
    stale = [s for s in steps if s.key not in ready or len(ready[s.key].rows) != counts.get(s.key, 0)]
    return {**ready, **make_ready(session, stale)} if stale else ready


def evaluate_steps(
    session: Session,
    rooms: Rooms,
    work: Sequence[tuple[Held, Sequence[DueStep]]],
    now: float,
    most: int,
    ready: dict[Key, Ready],
) -> None:
    """Folds each run's steps through the rules and writes points, incidents, commands, alerts.

    `ready`: steps read and merged before the runs were locked; what has changed since is read again.
    """
    every = [step for _, steps in work for step in steps]
    ready = _still_ready(session, every, ready)
    notices = notices_of(session, [held.run.id for held, _ in work])
    consumed: list[int] = []
    points = _Points(session)
    for held, steps in work:
        consumed += _evaluate_run(session, rooms, held, steps, now, most, ready, notices.get(held.run.id, []), points)
    points.write()
    if consumed:
        session.connection().execute(_CONSUME, {"b_ids": consumed})
    done = [{"run_id": s.run_id, "attempt": s.attempt, "step": s.step, "evaluated_at": now} for s in every]
    update_rows(session, Step, ("run_id", "attempt", "step"), ("evaluated_at",), done)
    for held, steps in work:
        _learn_pace(session, held, steps)


def _evaluate_run(
    session: Session,
    rooms: Rooms,
    held: Held,
    steps: Sequence[DueStep],
    now: float,
    most: int,
    ready: dict[Key, Ready],
    notices: list[Any],
    points: _Points,
) -> list[int]:
    """One run's part of `evaluate_steps`; returns the ids of the notices that its rules have now seen."""
    run, row = held.run, held.row
    consumed: list[int] = []
    positions = Positions(session, run.id, most, held.memory.positions)
    held.memory.positions = positions.known
    ranks = _Ranks(session, run.id)
    held.quiet_for = None
    # What was folded before the lock stands as long as nothing is found to be different here.
    ahead = {} if notices else {one.step.key: one for one in held.memory.ahead}
    for step in steps:
        at_hand = ready[step.key]
        one = ahead.get(step.key)
        if one is None or one.step != step or one.ready is not at_hand:
            ahead = {}
            due = [n for n in notices if (n.attempt, -1 if n.step is None else n.step) <= (step.attempt, step.step)]
            if due:
                notices = [n for n in notices if n not in due]
                consumed += [n.id for n in due]
            enter(row, step, due)
            view = view_of(run.name, row, step, at_hand, due, ranks.awaited(step))
            state, outcome = held.engine.evaluate(held.state, view, now)
            point = encode_point(session.get_bind().dialect.name, positions, step, view, outcome)
            one = Folded(step, at_hand, view, outcome, state, row.segment, point)
        row.segment = one.segment
        take(held, one.state, one.outcome)
        points.add(one.point)
        if step.attempt == run.attempt:
            held.change(last_step=step.step)
        if not quiet(session, rooms, held, one.view, one.outcome):
            # Before the others look: what judges a step also reads its baselines.
            points.write()
            follow(session, rooms, held, one.view, one.outcome, now, may_command=not step.flags & _REPLAYED)
        row.attempt, row.step = step.attempt, step.step
    return consumed


def take(held: Held, state: Any, outcome: Outcome) -> None:
    """The rules' state after an observation, and what it says of the run."""
    held.state = state
    held.calibrated = held.calibrated or bool(outcome.bands)


def quiet(session: Session, rooms: Rooms, held: Held, seen: Observation, outcome: Outcome) -> bool:
    """True where nothing follows from an outcome. One query, and for the further quiet steps of a transaction none:

    the run's row is locked, and whoever writes to a run locks it first.
    """
    silent = "silent_run" in outcome.firing and held.run.status == "running"
    if outcome.findings or silent:
        held.quiet = False
    elif held.quiet_for is None or held.quiet_for != seen.attempt:
        held.quiet = rooms.quiet(session, held.run, seen)
    held.quiet_for = seen.attempt if held.quiet and isinstance(seen, StepView) else None
    return held.quiet


def follow(
    session: Session, rooms: Rooms, held: Held, seen: Observation, outcome: Outcome, now: float, *, may_command: bool
) -> None:
    """What follows from an outcome that is not quiet: incidents, commands, alerts."""
    run = held.run
    if "silent_run" in outcome.firing and run.status == "running":
        held.change(status="silent")
        held.notify = True
        held.quiet = not outcome.findings and rooms.quiet(session, run, seen)
        if held.quiet:
            return
    changes = rooms.incidents(session, run, seen, outcome, now)
    commands = rooms.commands(session, run, seen, changes, now, may_command)
    if changes or commands:
        rooms.alerts(session, run, changes, commands, now)
        held.notify = True


class _Ranks:
    """Who was awaited in a step, worked out once per attempt and step."""

    def __init__(self, session: Session, run_id: int) -> None:
        self._session = session
        self._run_id = run_id
        self._declared: dict[int, dict[str, Any]] = {}

    def awaited(self, step: DueStep) -> frozenset[completeness.Rank]:
        if step.reported >= step.expected:
            return frozenset()  # ingest saw everyone come
        if step.attempt not in self._declared:
            which = {"b_run": self._run_id, "b_attempt": step.attempt}
            self._declared[step.attempt] = self._session.connection().execute(_EXPECTED, which).scalar() or {}
        declared = self._declared[step.attempt]
        if declared:
            return completeness.expected(step.step, declared, {})
        before = completeness.steps_before(self._session, self._run_id, step.attempt, step.step)
        if not before:
            return frozenset()
        since = min(before.values()) - 1.0
        seen = completeness.reported(self._session, self._run_id, step.attempt, list(before), since)
        return completeness.expected(step.step, {}, seen)


class _Points:
    """The rows of the steps evaluated so far, written together."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rows: list[Encoded] = []

    def add(self, row: Encoded) -> None:
        self._rows.append(row)

    def write(self) -> None:
        insert_encoded(self._session, Point, self._rows)
        self._rows = []


def _learn_pace(session: Session, held: Held, steps: Sequence[DueStep]) -> None:
    """The median time between the run's last steps, for the watermark of the next ones."""
    run, attempt = held.run, steps[-1].attempt
    if held.memory.times is not None and held.memory.times[0] == attempt:
        times = held.memory.times[1] + [(s.step, s.event_at) for s in steps if s.attempt == attempt]
    else:
        found = session.connection().execute(_TIMES, {"b_run": run.id, "b_attempt": attempt})
        times = [(step, at) for step, at in found]
    times = sorted(times)[-MEDIAN_OVER - 1 :]
    held.memory.times = (attempt, times)
    gaps = [later - earlier for (_, earlier), (_, later) in pairwise(times) if later > earlier]
    if gaps:
        held.change(median_step_s=statistics.median(gaps))

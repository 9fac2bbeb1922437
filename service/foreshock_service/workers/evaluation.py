"""One evaluation of one run, inside one transaction: due steps in order, or a tick, under the run's fenced lease."""

from __future__ import annotations

import logging
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from sqlalchemy import CursorResult, insert, or_, select, update
from sqlalchemy.orm import Session

from foreshock.wire import Frame
from foreshock_service.rules.interface import Observation, Outcome, StepView
from foreshock_service.store import completeness
from foreshock_service.store.flags import Flag, names
from foreshock_service.store.models import Attempt, EvaluationState, FrameRow, Notice, Point, Run, Step
from foreshock_service.store.points import Positions
from foreshock_service.workers.merging import Merged, merge_frames
from foreshock_service.workers.rooms import Engine, Rooms

logger = logging.getLogger(__name__)

BATCH = 32
"""Due steps of one run in one transaction, when there is a backlog."""
MEDIAN_OVER = 16
decode_frame = msgspec.msgpack.Decoder(Frame).decode


class LeaseLostError(Exception):
    """Another replica took the run over: everything of this transaction must be rolled back."""


@dataclass
class Held:
    """A run under this replica's lease, its row locked, its rules' state loaded."""

    run: Run
    row: EvaluationState
    engine: Engine
    pack_hash: str
    state: Any
    calibrated: bool = False
    notify: bool = False
    """Incidents, commands or the verdict changed: long-polls must wake after the commit."""


def hold(session: Session, rooms: Rooms, run_id: int, owner: str, now: float, lease_s: float) -> Held | None:
    """Claims or renews the run's lease and locks run and state until the commit; None where another replica has it.

    Where another transaction is at it this very moment, its lock is not waited for.
    """
    row = session.scalars(
        select(EvaluationState)
        .where(
            EvaluationState.run_id == run_id,
            or_(EvaluationState.owner == owner, EvaluationState.owner.is_(None), EvaluationState.lease_until < now),
        )
        .with_for_update(skip_locked=True, key_share=True)
    ).first()
    if row is None:
        return None
    run = session.scalars(select(Run).where(Run.id == run_id).with_for_update(key_share=True)).first()
    if run is None:
        return None
    if row.owner != owner:
        row.owner, row.fence = owner, row.fence + 1
    row.lease_until = now + lease_s
    engine, pack_hash = rooms.engine(run.rules)
    return Held(run, row, engine, pack_hash, engine.load(row.state))


def due_steps(session: Session, run_id: int, now: float, most: int = BATCH) -> list[Any]:
    """The steps to evaluate now: in order of (attempt, step), up to the first that is still waited for."""
    query = (
        select(Step.attempt, Step.step, Step.first_at, Step.event_at, Step.due_at, Step.flags)
        .where(Step.run_id == run_id, Step.evaluated_at.is_(None))
        .order_by(Step.attempt, Step.step)
        .limit(most)
    )
    found = []
    for row in session.execute(query):
        if row.due_at > now:
            break
        found.append(row)
    return found


def evaluate_steps(session: Session, rooms: Rooms, held: Held, steps: Sequence[Any], now: float, most: int) -> None:
    """Folds these steps through the rules and writes points, incidents, commands, alerts and the new state."""
    run, row = held.run, held.row
    frames = _load_frames(session, run.id, steps)
    notices = list(
        session.scalars(select(Notice).where(Notice.run_id == run.id, Notice.consumed.is_(False)).order_by(Notice.id))
    )
    positions = Positions(session, run.id, most)
    ranks = _Ranks(session, run.id)
    for step in steps:
        due = [n for n in notices if (n.attempt, -1 if n.step is None else n.step) <= (step.attempt, step.step)]
        notices = [n for n in notices if n not in due]
        _enter(held, step, due)
        rows = frames[(step.attempt, step.step)]
        merged = merge_frames(_first_claimants(rows))
        view = _view(held, step, merged, rows, due, ranks)
        outcome = observe(session, rooms, held, view, now, may_command=not Flag(step.flags) & Flag.REPLAYED)
        _insert_point(session, held, step, merged, view, outcome, positions)
        row.attempt, row.step = step.attempt, step.step
        for notice in due:
            notice.consumed = True
    _finish_steps(session, held, steps, now)


def observe(session: Session, rooms: Rooms, held: Held, seen: Observation, now: float, *, may_command: bool) -> Outcome:
    """One observation through the rules, and what follows from it: incidents, commands, alerts."""
    held.state, outcome = held.engine.evaluate(held.state, seen, now)
    run = held.run
    changes = rooms.incidents(session, run, seen, outcome, now)
    commands = rooms.commands(session, run, seen, changes, now, may_command)
    if changes or commands:
        rooms.alerts(session, run, changes, commands, now)
        held.notify = True
    held.calibrated = held.calibrated or bool(outcome.bands)
    if "silent_run" in outcome.firing and run.status == "running":
        run.status, held.notify = "silent", True
    return outcome


def commit_state(session: Session, rooms: Rooms, held: Held, owner: str, now: float) -> None:
    """Writes state and verdict on the condition that the lease is still this replica's. Raises `LeaseLostError`."""
    run, row = held.run, held.row
    session.flush()
    verdict = rooms.verdict(session, run.id, held.calibrated)
    if verdict != run.verdict:
        run.verdict, held.notify = verdict, True
        session.flush()
    done = session.execute(
        update(EvaluationState)
        .where(EvaluationState.run_id == run.id, EvaluationState.owner == owner, EvaluationState.fence == row.fence)
        .values(state=held.engine.dump(held.state), pack_hash=held.pack_hash, evaluated_at=now)
        .execution_options(synchronize_session=False)
    )
    assert isinstance(done, CursorResult)
    if done.rowcount == 0:
        raise LeaseLostError(f"run {run.id}")


def _load_frames(session: Session, run_id: int, steps: Sequence[Any]) -> dict[tuple[int, int], list[Any]]:
    wanted: dict[int, list[int]] = defaultdict(list)
    for step in steps:
        wanted[step.attempt].append(step.step)
    since = min(step.first_at for step in steps) - 1.0
    found: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for attempt, numbers in wanted.items():
        query = (
            select(FrameRow.step, FrameRow.role, FrameRow.rank, FrameRow.flags, FrameRow.body)
            .where(
                FrameRow.run_id == run_id,
                FrameRow.attempt == attempt,
                FrameRow.step.in_(numbers),
                FrameRow.received_at >= since,
            )
            .order_by(FrameRow.received_at, FrameRow.sequence)
        )
        for row in session.execute(query):
            found[(attempt, row.step)].append(row)
    return found


def _first_claimants(rows: Sequence[Any]) -> list[Frame]:
    """The frames, without those of a second client that claims a rank: it would count twice."""
    return [decode_frame(row.body) for row in rows if not row.flags & Flag.DUPLICATE_RANK]


def _enter(held: Held, step: Any, notices: Sequence[Notice]) -> None:
    """Begins a new segment where the attempt is new or a setting changed."""
    row = held.row
    settings = dict(row.settings)
    for notice in notices:
        told = notice.data.get("settings") if notice.kind == "started" else notice.data
        if notice.kind in ("started", "settings") and isinstance(told, dict):
            settings.update(told)
    changed = settings != row.settings and row.step is not None
    if changed or step.attempt != row.attempt:
        row.segment += 1
    if settings != row.settings:
        row.settings = settings


class _Ranks:
    """Who was awaited in a step, worked out once per attempt and step."""

    def __init__(self, session: Session, run_id: int) -> None:
        self._session = session
        self._run_id = run_id
        self._declared: dict[int, dict[str, Any]] = {}

    def awaited(self, step: Any) -> frozenset[completeness.Rank]:
        if step.attempt not in self._declared:
            self._declared[step.attempt] = (
                self._session.scalar(
                    select(Attempt.expected_ranks).where(
                        Attempt.run_id == self._run_id, Attempt.ordinal == step.attempt
                    )
                )
                or {}
            )
        declared = self._declared[step.attempt]
        if declared:
            return completeness.expected(step.step, declared, {})
        before = completeness.steps_before(self._session, self._run_id, step.attempt, step.step)
        if not before:
            return frozenset()
        since = min(before.values()) - 1.0
        seen = completeness.reported(self._session, self._run_id, step.attempt, list(before), since)
        return completeness.expected(step.step, {}, seen)


def _view(
    held: Held, step: Any, merged: Merged, rows: Sequence[Any], notices: Sequence[Notice], ranks: _Ranks
) -> StepView:
    present = {(row.role, row.rank) for row in rows}
    awaited = ranks.awaited(step)
    flags = Flag(step.flags)
    for row in rows:
        flags |= Flag(row.flags)
    return StepView(
        run=held.run.name,
        attempt=step.attempt,
        step=step.step,
        values=merged.values,
        worst=merged.worst,
        missing=merged.missing,
        reported=len(present),
        expected=len(awaited | present),
        absent_ranks=completeness.absent(awaited, present),
        segment=held.row.segment,
        settings=held.row.settings,
        notices=[{"kind": n.kind, "step": n.step, "role": n.role, "rank": n.rank, "data": n.data} for n in notices],
        flags=names(flags),
        evidence=merged.evidence,
    )


def _insert_point(
    session: Session, held: Held, step: Any, merged: Merged, view: StepView, outcome: Outcome, positions: Positions
) -> None:
    values, left_out = positions.row(merged.values)
    if left_out:
        logger.warning("run %s has too many signals: %d are not kept as series", held.run.name, len(left_out))
    odd = Flag(step.flags) & ~(Flag.LATE | Flag.NON_FINITE)
    session.execute(
        insert(Point).values(
            run_id=held.run.id,
            attempt=step.attempt,
            step=step.step,
            at=step.event_at,
            values=values,
            missing=merged.missing,
            worst=merged.worst,
            evidence=merged.evidence,
            reported=view.reported,
            expected=view.expected,
            segment=held.row.segment,
            bands=dict(outcome.bands),
            flag=bool(odd) or view.reported < view.expected,
        )
    )
    if step.attempt == held.run.attempt:
        held.run.last_step = step.step


def _finish_steps(session: Session, held: Held, steps: Sequence[Any], now: float) -> None:
    run = held.run
    for attempt in {step.attempt for step in steps}:
        session.execute(
            update(Step)
            .where(
                Step.run_id == run.id,
                Step.attempt == attempt,
                Step.step.in_([s.step for s in steps if s.attempt == attempt]),
            )
            .values(evaluated_at=now)
            .execution_options(synchronize_session=False)
        )
    query = select(Point.at).where(Point.run_id == run.id, Point.attempt == steps[-1].attempt)
    times = list(session.scalars(query.order_by(Point.step.desc()).limit(MEDIAN_OVER + 1)))
    gaps = [later - earlier for later, earlier in pairwise(times) if later > earlier]
    if gaps:
        run.median_step_s = statistics.median(gaps)

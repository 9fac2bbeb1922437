"""One evaluation of some runs, inside one transaction: their due steps in order, or a tick, under their fenced leases.

Many runs together, because what a transaction costs by itself is what ten steps cost.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import bindparam, select, update
from sqlalchemy.orm import Session

from foreshock.wire import Frame
from foreshock_service.rules.interface import Observation, Outcome, StepView
from foreshock_service.store import completeness
from foreshock_service.store.bulk import insert_rows, update_rows
from foreshock_service.store.flags import Flag, names
from foreshock_service.store.models import Attempt, Notice, Point, Step
from foreshock_service.store.points import Positions
from foreshock_service.workers.holding import Held
from foreshock_service.workers.merging import Merged, merge_steps
from foreshock_service.workers.reading import Key, counts_of, frames_of, notices_of
from foreshock_service.workers.rooms import Rooms

logger = logging.getLogger(__name__)

MEDIAN_OVER = 16
_DUPLICATE_RANK = int(Flag.DUPLICATE_RANK)
_REPLAYED = int(Flag.REPLAYED)
_NOT_ODD = int(Flag.LATE | Flag.NON_FINITE)
decode_frame = msgspec.msgpack.Decoder(Frame).decode

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


@dataclass(frozen=True)
class Ready:
    """A step's frames, read and merged before anything was locked; `rows` are without their bodies."""

    rows: Sequence[Any]
    merged: Merged


def make_ready(session: Session, steps: Sequence[Any]) -> dict[Key, Ready]:
    """Reads and merges the frames of these steps: most of an evaluation's time, and none of it needs a lock."""
    frames = frames_of(session, steps)
    keys = [_key(step) for step in steps]
    merged = merge_steps([_first_claimants(frames.get(key, ())) for key in keys])
    return {
        key: Ready([_Reported(r.role, r.rank, r.flags) for r in frames.get(key, ())], one)
        for key, one in zip(keys, merged, strict=True)
    }


def _key(step: Any) -> Key:
    return step.run_id, step.attempt, step.step


def _still_ready(session: Session, steps: Sequence[Any], ready: dict[Key, Ready]) -> dict[Key, Ready]:
    """What is ready of these steps, those made ready anew to which frames have come since. The runs are locked."""
    counts = counts_of(session, steps)
    stale = [s for s in steps if (key := _key(s)) not in ready or len(ready[key].rows) != counts.get(key, 0)]
    return {**ready, **make_ready(session, stale)} if stale else ready


def evaluate_steps(
    session: Session,
    rooms: Rooms,
    work: Sequence[tuple[Held, Sequence[Any]]],
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
    steps: Sequence[Any],
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
    for step in steps:
        at_hand = ready[_key(step)]
        due = [n for n in notices if (n.attempt, -1 if n.step is None else n.step) <= (step.attempt, step.step)]
        if due:
            notices = [n for n in notices if n not in due]
            consumed += [n.id for n in due]
        _enter(held, step, due)
        view = _view(held, step, at_hand.merged, at_hand.rows, due, ranks)
        outcome = fold(held, view, now)
        points.add(held, positions, step, at_hand.merged, view, outcome)
        if not quiet(session, rooms, held, view, outcome):
            # Before the others look: what judges a step also reads its baselines.
            points.write()
            follow(session, rooms, held, view, outcome, now, may_command=not step.flags & _REPLAYED)
        row.attempt, row.step = step.attempt, step.step
    return consumed


def fold(held: Held, seen: Observation, now: float) -> Outcome:
    """One observation through the rules."""
    held.state, outcome = held.engine.evaluate(held.state, seen, now)
    held.calibrated = held.calibrated or bool(outcome.bands)
    return outcome


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


def _first_claimants(rows: Sequence[Any]) -> list[Frame]:
    """The frames, without those of a second client that claims a rank: it would count twice."""
    return [decode_frame(row.body) for row in rows if not row.flags & _DUPLICATE_RANK]


def _enter(held: Held, step: Any, notices: Sequence[Any]) -> None:
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


class _Reported(NamedTuple):
    role: str
    rank: int
    flags: int


class _Ranks:
    """Who was awaited in a step, worked out once per attempt and step."""

    def __init__(self, session: Session, run_id: int) -> None:
        self._session = session
        self._run_id = run_id
        self._declared: dict[int, dict[str, Any]] = {}

    def awaited(self, step: Any) -> frozenset[completeness.Rank]:
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


def _view(
    held: Held, step: Any, merged: Merged, rows: Sequence[Any], notices: Sequence[Any], ranks: _Ranks
) -> StepView:
    present = {(row.role, row.rank) for row in rows}
    awaited = ranks.awaited(step)
    flags = step.flags
    for row in rows:
        flags |= row.flags
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


class _Points:
    """The rows of the steps evaluated so far, written together."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rows: list[dict[str, Any]] = []

    def add(
        self, held: Held, positions: Positions, step: Any, merged: Merged, view: StepView, outcome: Outcome
    ) -> None:
        values, left_out = positions.row(merged.values)
        if left_out:
            logger.warning("run %s has too many signals: %d are not kept as series", held.run.name, len(left_out))
        odd = step.flags & ~_NOT_ODD
        row = {
            "run_id": held.run.id,
            "attempt": step.attempt,
            "step": step.step,
            "at": step.event_at,
            "values": values,
            "missing": merged.missing,
            "worst": merged.worst,
            "evidence": merged.evidence,
            "reported": view.reported,
            "expected": view.expected,
            "segment": held.row.segment,
            "bands": dict(outcome.bands),
            "flag": bool(odd) or view.reported < view.expected,
        }
        self._rows.append(row)
        if step.attempt == held.run.attempt:
            held.change(last_step=step.step)

    def write(self) -> None:
        insert_rows(self._session, Point, self._rows)
        self._rows = []


def _learn_pace(session: Session, held: Held, steps: Sequence[Any]) -> None:
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

"""What an evaluation does before it locks anything: frames merged, steps folded through the rules, rows encoded.

Whoever sends frames of a run waits while an evaluation holds the run's row, so as little as can be is done there. What
was worked out ahead is used only where the row says, once locked, that nothing has changed since (`holding.Memory`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
from sqlalchemy.orm import Session

from foreshock.wire import Frame
from foreshock_service.rules.interface import Outcome, StepView
from foreshock_service.store import completeness
from foreshock_service.store.bulk import Encoded, encode_row
from foreshock_service.store.flags import Flag, names
from foreshock_service.store.models import Point
from foreshock_service.store.points import Places
from foreshock_service.workers.merging import Merged, merge_steps
from foreshock_service.workers.reading import DueStep, Key, frames_of
from foreshock_service.workers.rooms import Engine

logger = logging.getLogger(__name__)

_DUPLICATE_RANK = int(Flag.DUPLICATE_RANK)
_NOT_ODD = int(Flag.LATE | Flag.NON_FINITE)
decode_frame = msgspec.msgpack.Decoder(Frame).decode


@dataclass
class Fold:
    """The row of `evaluations` as it was read, and what of it this transaction has changed."""

    owner: str | None
    fence: int
    pack_hash: str
    attempt: int
    step: int | None
    segment: int
    settings: dict[str, Any]
    evaluated_at: float | None
    ticked_at: float | None

    def marks(self) -> tuple[Any, ...]:
        """What differs after any evaluation that somebody else committed, or that the database lost again."""
        return (self.fence, self.owner, self.attempt, self.step, self.segment, self.evaluated_at, self.ticked_at)


class Reported(NamedTuple):
    """Who sent a frame, and its flags."""

    role: str
    rank: int
    flags: int


@dataclass(frozen=True)
class Ready:
    """A step's frames, read and merged; `rows` are without their bodies."""

    rows: Sequence[Reported]
    merged: Merged


@dataclass(frozen=True, slots=True)
class Folded:
    """A step through the rules: what they saw and said, their state and the run's segment after it, its row."""

    step: DueStep
    ready: Ready
    view: StepView
    outcome: Outcome
    state: Any
    segment: int
    point: Encoded


def make_ready(session: Session, steps: Sequence[DueStep]) -> dict[Key, Ready]:
    """Reads and merges the frames of these steps: half of an evaluation's time, and none of it needs a lock."""
    frames = frames_of(session, steps)
    merged = merge_steps([_first_claimants(frames.get(step.key, ())) for step in steps])
    return {
        step.key: Ready([Reported(r.role, r.rank, r.flags) for r in frames.get(step.key, ())], one)
        for step, one in zip(steps, merged, strict=True)
    }


def fold_ahead(
    dialect: str, name: str, engine: Engine, state: Any, row: Fold, known: Mapping[str, int],
    steps: Sequence[DueStep], ready: Mapping[Key, Ready], now: float,
) -> list[Folded]:  # fmt: skip
    """The first of a run's due steps through the rules, as far as everything that they need is at hand.

    `state`, `row`, `known` (signal → position): what the last evaluation left; nothing of it is changed. It ends at
    the first step that not everybody reported, for who is missing is in the store, and at one with a new signal.
    """
    row, places = replace(row), Places(known)
    found: list[Folded] = []
    for step in steps:
        at_hand = ready[step.key]
        if step.reported < step.expected or not known.keys() >= at_hand.merged.values.keys():
            break
        enter(row, step, ())
        view = view_of(name, row, step, at_hand, (), frozenset())
        state, outcome = engine.evaluate(state, view, now)
        point = encode_point(dialect, places, step, view, outcome)
        found.append(Folded(step, at_hand, view, outcome, state, row.segment, point))
        row.attempt, row.step = step.attempt, step.step
    return found


def enter(row: Fold, step: DueStep, notices: Sequence[Any]) -> None:
    """Begins a new segment where the attempt is new or a setting changed."""
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


def view_of(
    name: str, row: Fold, step: DueStep, ready: Ready, notices: Sequence[Any], awaited: Collection[completeness.Rank]
) -> StepView:
    """What the rules see of a step. `awaited`: the ranks that were waited for, beside those that came."""
    merged = ready.merged
    present = {(reported.role, reported.rank) for reported in ready.rows}
    flags = step.flags
    for reported in ready.rows:
        flags |= reported.flags
    return StepView(
        run=name,
        attempt=step.attempt,
        step=step.step,
        values=merged.values,
        worst=merged.worst,
        missing=merged.missing,
        reported=len(present),
        expected=len(present.union(awaited)),
        absent_ranks=completeness.absent(awaited, present),
        segment=row.segment,
        settings=row.settings,
        notices=[{"kind": n.kind, "step": n.step, "role": n.role, "rank": n.rank, "data": n.data} for n in notices],
        flags=names(flags),
        evidence=merged.evidence,
    )


def encode_point(dialect: str, places: Places, step: DueStep, view: StepView, outcome: Outcome) -> Encoded:
    """The step's row of `points`, as its database takes it."""
    values, left_out = places.row(view.values)
    if left_out:
        logger.warning("run %s has too many signals: %d are not kept as series", view.run, len(left_out))
    row = {
        "run_id": step.run_id,
        "attempt": step.attempt,
        "step": step.step,
        "at": step.event_at,
        "values": values,
        "missing": view.missing,
        "worst": view.worst,
        "evidence": view.evidence,
        "reported": view.reported,
        "expected": view.expected,
        "segment": view.segment,
        "bands": dict(outcome.bands),
        "flag": bool(step.flags & ~_NOT_ODD) or view.reported < view.expected,
    }
    return encode_row(dialect, Point, row)


def _first_claimants(rows: Sequence[Any]) -> list[Frame]:
    """The frames, without those of a second client that claims a rank: it would count twice."""
    return [decode_frame(row.body) for row in rows if not row.flags & _DUPLICATE_RANK]

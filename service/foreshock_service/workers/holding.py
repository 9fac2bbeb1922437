"""A run in this replica's hands: claimed under its fenced lease, its rules' state at hand, saved on condition.

What a replica remembers of a run between evaluations is used only while the row says that nobody, and no power cut,
came between: same fence, same owner, same marks of the last evaluation. Else it is read again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import CursorResult, bindparam, or_, select, update
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from foreshock_service.store.models import EvaluationState, Run
from foreshock_service.workers.rooms import Engine, Rooms

REMEMBERED = 2048
"""Runs whose state is kept in memory; tens of kB each."""

# Built once: building a statement costs as much as running it.
_MINE = or_(
    EvaluationState.owner == bindparam("b_owner"),
    EvaluationState.owner.is_(None),
    EvaluationState.lease_until < bindparam("b_now"),
)
_ROW = (
    select(
        EvaluationState.owner,
        EvaluationState.fence,
        EvaluationState.pack_hash,
        EvaluationState.attempt,
        EvaluationState.step,
        EvaluationState.segment,
        EvaluationState.settings,
        EvaluationState.evaluated_at,
        EvaluationState.ticked_at,
    )
    .where(EvaluationState.run_id == bindparam("b_run"), _MINE)
    .with_for_update(skip_locked=True, key_share=True)
)
_FREE = select(EvaluationState.run_id).where(EvaluationState.run_id == bindparam("b_run"), _MINE)
_STATE = select(EvaluationState.state).where(EvaluationState.run_id == bindparam("b_run"))
_RUN = select(Run).where(Run.id == bindparam("b_run")).with_for_update(key_share=True)
_SAVE = update(EvaluationState.__table__).where(  # type: ignore[arg-type]
    EvaluationState.run_id == bindparam("b_run"), EvaluationState.fence == bindparam("b_fence"), _MINE
)
_SAVE_RUN = update(Run.__table__).where(Run.id == bindparam("b_run"))  # type: ignore[arg-type]


class LeaseLostError(Exception):
    """Another replica took the run over: everything of this transaction must be rolled back."""


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


@dataclass
class Memory:
    """What one evaluation leaves for the next one of the same run."""

    marks: tuple[Any, ...] = ()
    pack_hash: str = ""
    state: Any = None
    positions: dict[str, int] | None = None
    """Signal → position; only the holder of the lease adds some."""
    times: tuple[int, list[tuple[int, float]]] | None = None
    """Attempt, and (step, event time) of its last evaluated steps."""


class Memories:
    """By run, the last used kept. Take one out to use it, put it back only after a commit."""

    def __init__(self) -> None:
        self._by_run: OrderedDict[int, Memory] = OrderedDict()

    def take(self, run_id: int) -> Memory:
        """The run's memory, or an empty one; it is no longer here."""
        return self._by_run.pop(run_id, None) or Memory()

    def keep(self, run_id: int, memory: Memory) -> None:
        self._by_run[run_id] = memory
        while len(self._by_run) > REMEMBERED:
            self._by_run.popitem(last=False)


@dataclass
class Held:
    """A run under this replica's lease, its row locked, its rules' state loaded."""

    run: Run
    row: Fold
    engine: Engine
    pack_hash: str
    state: Any
    memory: Memory
    before: Any = None
    """The state as it was loaded."""
    fence: int = 0
    """As it was read; `row.fence` is one more where the run changed hands."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Columns of the run to be written."""
    calibrated: bool = False
    quiet: bool = False
    """The last observation found nothing open, pending or new."""
    quiet_for: int | None = None
    """The attempt for which this transaction has asked and heard that nothing is open or pending."""
    notify: bool = False
    """Incidents, commands or the verdict changed: long-polls must wake after the commit."""

    def change(self, **columns: Any) -> None:
        """Changes the run, here at once and in the database with `save`."""
        for name, value in columns.items():
            if getattr(self.run, name) != value:
                set_committed_value(self.run, name, value)
                self.changed[name] = value


def may_hold(session: Session, run_id: int, owner: str, now: float) -> bool:
    """True where the run's lease is free or `owner`'s, as far as one can tell without locking it."""
    which = {"b_run": run_id, "b_owner": owner, "b_now": now}
    return session.connection().execute(_FREE, which).first() is not None


def hold(
    session: Session, rooms: Rooms, run_id: int, owner: str, now: float, memory: Memory | None = None
) -> Held | None:
    """Claims the run and locks it and its state until the commit; None where another replica has it.

    Where another transaction is at it this very moment, its lock is not waited for. `save` writes the claim.
    """
    connection = session.connection()
    found = connection.execute(_ROW, {"b_run": run_id, "b_owner": owner, "b_now": now}).first()
    if found is None:
        return None
    run = session.scalars(_RUN, {"b_run": run_id}).first()
    if run is None:
        return None
    row = Fold(*found)
    engine, pack_hash = rooms.engine(run.rules)
    if memory is None or memory.marks != row.marks() or memory.pack_hash != pack_hash or row.owner != owner:
        state = engine.load(connection.execute(_STATE, {"b_run": run_id}).scalar())
        memory = Memory(state=state)
    held = Held(run, row, engine, pack_hash, memory.state, memory, before=memory.state, fence=row.fence)
    if row.owner != owner:
        row.owner, row.fence = owner, row.fence + 1
    return held


def save(session: Session, rooms: Rooms, held: Held, owner: str, now: float, lease_s: float) -> None:
    """Writes run, lease, state and verdict on the condition that nobody took the run over. Raises `LeaseLostError`.

    Afterwards, once committed, `held.memory` is what to remember.
    """
    run, row = held.run, held.row
    session.flush()
    if held.quiet:
        verdict = "healthy" if held.calibrated else "unknown"
    else:
        verdict = rooms.verdict(session, run.id, held.calibrated)
    held.notify |= verdict != run.verdict
    held.change(verdict=verdict)
    row.pack_hash, row.evaluated_at = held.pack_hash, now
    connection = session.connection()
    if held.changed:
        connection.execute(_SAVE_RUN, {"b_run": run.id, **held.changed})
    columns = {
        "owner": owner,
        "fence": row.fence,
        "lease_until": now + lease_s,
        "pack_hash": row.pack_hash,
        "attempt": row.attempt,
        "step": row.step,
        "segment": row.segment,
        "settings": row.settings,
        "evaluated_at": row.evaluated_at,
        "ticked_at": row.ticked_at,
        "state": held.engine.dump(held.state),
    }
    conditions = {"b_run": run.id, "b_fence": held.fence, "b_owner": owner, "b_now": now}
    done = connection.execute(_SAVE, {**columns, **conditions})
    assert isinstance(done, CursorResult)
    if done.rowcount == 0:
        raise LeaseLostError(f"run {run.id}")
    held.memory.marks, held.memory.pack_hash, held.memory.state = row.marks(), held.pack_hash, held.state

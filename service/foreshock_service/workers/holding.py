"""A run in this replica's hands: claimed under its fenced lease, its rules' state at hand, saved on condition.

What a replica remembers of a run between evaluations is used only while the row says that nobody, and no power cut,
came between: same fence, same owner, same marks of the last evaluation. Else it is read again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import CursorResult, bindparam, or_, select, update
from sqlalchemy.orm import Session, defer
from sqlalchemy.orm.attributes import set_committed_value

from foreshock_service.store.bulk import update_rows
from foreshock_service.store.models import EvaluationState, Run
from foreshock_service.workers.folding import Fold, Folded, Ready, fold_ahead
from foreshock_service.workers.reading import DueStep, Key
from foreshock_service.workers.rooms import Engine, Rooms

REMEMBERED = 2048
"""Runs whose state is kept in memory; tens of kB each."""

# Built once: building a statement costs as much as running it.
_MINE = or_(
    EvaluationState.owner == bindparam("b_owner"),
    EvaluationState.owner.is_(None),
    EvaluationState.lease_until < bindparam("b_now"),
)
_AMONG = EvaluationState.run_id.in_(bindparam("b_runs", expanding=True))
_ROWS = (
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
        EvaluationState.run_id,
    )
    .where(_AMONG, _MINE)
    .order_by(EvaluationState.run_id)
    .with_for_update(skip_locked=True, key_share=True)
)
_FREE = select(EvaluationState.run_id).where(_AMONG, _MINE).order_by(EvaluationState.run_id)
_STATE = select(EvaluationState.state).where(EvaluationState.run_id == bindparam("b_run"))
_RUNS = (
    select(Run)
    .where(Run.id.in_(bindparam("b_runs", expanding=True)))
    .order_by(Run.id)
    # A host's whole configuration is not parsed an evaluation; whoever looks at it then reads it.
    .options(*(defer(column) for column in (Run.config, Run.settings, Run.labels)))
    .with_for_update(key_share=True)
)
_SAVE = update(EvaluationState.__table__).where(  # type: ignore[arg-type]
    EvaluationState.run_id == bindparam("b_run"), EvaluationState.fence == bindparam("b_fence"), _MINE
)


class LeaseLostError(Exception):
    """Another replica took the run over: everything of this transaction must be rolled back."""


@dataclass
class Memory:
    """What one evaluation leaves for the next one of the same run."""

    row: Fold | None = None
    """As that evaluation saved it."""
    name: str = ""
    engine: Engine | None = None
    pack_hash: str = ""
    state: Any = None
    positions: dict[str, int] | None = None
    """Signal → position; only the holder of the lease adds some."""
    times: tuple[int, list[tuple[int, float]]] | None = None
    """Attempt, and (step, event time) of its last evaluated steps."""
    ahead: Sequence[Folded] = ()
    """Its next steps, folded from here on before anything was locked. Forgotten with the rest where the row differs."""
    calm: bool = True
    """Nothing was open or pending after that evaluation, and the steps ahead are complete and bring nothing new."""

    def fold_ahead(self, dialect: str, steps: Sequence[DueStep], ready: Mapping[Key, Ready], now: float) -> None:
        """Folds the run's due steps from here on, if there is anything remembered of it."""
        if self.row is not None and self.engine is not None and self.positions is not None:
            self.ahead = fold_ahead(
                dialect, self.name, self.engine, self.state, self.row, self.positions, steps, ready, now
            )
            foreseen = len(self.ahead) == len(steps)
            self.calm &= foreseen and not any(one.outcome.findings for one in self.ahead)

    def stands(self, row: Fold, pack_hash: str, owner: str) -> bool:
        """Whether the row, as it is read now, says that nobody came between."""
        known = self.row is not None and self.row.marks() == row.marks()
        return known and self.pack_hash == pack_hash and row.owner == owner


class Memories:
    """By run, the last used kept. Take one out to use it, put it back only after a commit."""

    def __init__(self) -> None:
        self._by_run: OrderedDict[int, Memory] = OrderedDict()

    def take(self, run_id: int) -> Memory:
        """The run's memory, or an empty one; it is no longer here."""
        return self._by_run.pop(run_id, None) or Memory()

    def calm(self, run_id: int) -> bool:
        """Whether nothing is known to follow from the run's next steps."""
        memory = self._by_run.get(run_id)
        return memory is None or memory.calm

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


def may_hold(session: Session, run_ids: Sequence[int], owner: str, now: float) -> list[int]:
    """Those of the runs whose lease is free or `owner`'s, as far as one can tell without locking them."""
    which = {"b_runs": list(run_ids), "b_owner": owner, "b_now": now}
    return list(session.connection().execute(_FREE, which).scalars())


def hold(session: Session, rooms: Rooms, memories: Mapping[int, Memory], owner: str, now: float) -> dict[int, Held]:
    """Claims the runs and locks them and their states until the commit, in the order of their ids; those that another
    replica has are left out. `memories`: run → what is remembered of it.

    Where another transaction is at one this very moment, its lock is not waited for. `save` writes the claims.
    """
    connection = session.connection()
    found = connection.execute(_ROWS, {"b_runs": list(memories), "b_owner": owner, "b_now": now}).all()
    if not found:
        return {}
    runs = {run.id: run for run in session.scalars(_RUNS, {"b_runs": [row.run_id for row in found]})}
    held = {}
    for *columns, run_id in found:
        if run_id not in runs:
            continue  # deleted meanwhile
        run, row, memory = runs[run_id], Fold(*columns), memories[run_id]
        engine, pack_hash = rooms.engine(run.rules)
        if not memory.stands(row, pack_hash, owner):
            state = engine.load(connection.execute(_STATE, {"b_run": run_id}).scalar())
            memory = Memory(state=state)
        held[run_id] = Held(run, row, engine, pack_hash, memory.state, memory, before=memory.state, fence=row.fence)
        if row.owner != owner:
            row.owner, row.fence = owner, row.fence + 1
    return held


def save(session: Session, rooms: Rooms, held: Collection[Held], owner: str, now: float, lease_s: float) -> None:
    """Writes runs, leases, states and verdicts on the condition that nobody took one of the runs over.

    Raises `LeaseLostError` then. Afterwards, once committed, each `memory` is what to remember.
    """
    session.flush()
    for one in held:
        verdict = _verdict(session, rooms, one)
        one.notify |= verdict != one.run.verdict
        one.change(verdict=verdict)
        one.row.pack_hash, one.row.evaluated_at = one.pack_hash, now
    _save_runs(session, held)
    done = session.connection().execute(
        _SAVE,
        [
            {
                "owner": owner,
                "fence": one.row.fence,
                "lease_until": now + lease_s,
                "pack_hash": one.row.pack_hash,
                "attempt": one.row.attempt,
                "step": one.row.step,
                "segment": one.row.segment,
                "settings": one.row.settings,
                "evaluated_at": one.row.evaluated_at,
                "ticked_at": one.row.ticked_at,
                "state": one.engine.dump(one.state),
                "b_run": one.run.id,
                "b_fence": one.fence,
                "b_owner": owner,
                "b_now": now,
            }
            for one in held
        ],
        execution_options={"preserve_rowcount": True},
    )
    assert isinstance(done, CursorResult)
    if done.rowcount != len(held):
        raise LeaseLostError(f"of runs {[one.run.id for one in held]}")
    for one in held:
        memory = one.memory
        memory.row, memory.name, memory.engine, memory.ahead = one.row, one.run.name, one.engine, ()
        memory.pack_hash, memory.state, memory.calm = one.pack_hash, one.state, one.quiet


def _verdict(session: Session, rooms: Rooms, held: Held) -> str:
    if held.quiet:
        return "healthy" if held.calibrated else "unknown"
    return rooms.verdict(session, held.run.id, held.calibrated)


def _save_runs(session: Session, held: Collection[Held]) -> None:
    """Writes what changed of the runs, those together of which the same columns did."""
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in held:
        if one.changed:
            alike.setdefault(tuple(sorted(one.changed)), []).append({"id": one.run.id, **one.changed})
    for columns, rows in alike.items():
        update_rows(session, Run, ("id",), columns, rows)

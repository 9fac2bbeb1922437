"""Runs, clients and attempts of a group: found or made, each locked before it is read, in the order of their ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sqlalchemy import bindparam, func, select
from sqlalchemy.orm import Session

from foreshock.wire import MODES, Envelope
from foreshock_service.errors import Unavailable
from foreshock_service.ingest.arrivals import Item
from foreshock_service.ingest.checks import IngestLimits
from foreshock_service.store.models import Attempt, Audit, Client, EvaluationState, Run
from foreshock_service.store.upsert import insert_new

# Built once: building a statement costs as much as running it.
_RUNS = (
    select(Run)
    .where(Run.name.in_(bindparam("b_names", expanding=True)))
    .order_by(Run.id)
    .with_for_update(key_share=True)
    .execution_options(populate_existing=True)
)
_CLIENTS = (
    select(Client)
    .where(Client.run_id.in_(bindparam("b_runs", expanding=True)), Client.id.in_(bindparam("b_ids", expanding=True)))
    .order_by(Client.run_id, Client.id)
    .with_for_update(key_share=True)
    .execution_options(populate_existing=True)
)
_ATTEMPTS = (
    select(Attempt)
    .join(Run, Run.id == Attempt.run_id)
    .where(
        Attempt.run_id.in_(bindparam("b_runs", expanding=True)),
        Attempt.launch.in_(bindparam("b_launches", expanding=True)) | (Attempt.ordinal == Run.attempt),
    )
)


@dataclass
class RunInGroup:
    """One run, locked, with the attempts that the group names."""

    run: Run
    attempts: dict[tuple[str, int], Attempt] = field(default_factory=dict)
    by_ordinal: dict[int, Attempt] = field(default_factory=dict)
    changed: bool = False
    """Something that long-polls show has changed."""


def hold_runs(session: Session, names: Iterable[str], now: float, limits: IngestLimits) -> dict[str, RunInGroup]:
    """The runs by name, made where new, their rows locked until the commit (SQLite: the whole database is).

    Whoever writes to a run locks its row first, so that ingest, evaluation and commands of one run queue instead of
    deadlocking. A run beyond `limits.max_runs` is left out.
    """
    wanted = sorted(set(names))
    runs = list(session.scalars(_RUNS, {"b_names": wanted}))
    missing = [name for name in wanted if name not in {run.name for run in runs}]
    if missing:
        room = limits.max_runs - (session.scalar(select(func.count()).select_from(Run)) or 0)
        _make_runs(session, missing[: max(0, room)], now)
        runs = list(session.scalars(_RUNS, {"b_names": wanted}))
    return {run.name: RunInGroup(run) for run in runs}


def _make_runs(session: Session, names: list[str], now: float) -> None:
    rows = [
        {
            "name": name,
            "project": name.partition("/")[0],
            "created_at": now,
            "last_seen_at": now,
            **{k: {} for k in ("settings", "config", "labels", "rules", "budget")},
            "capabilities": [],
            "status": "running",
            "verdict": "unknown",
            "attempt": 0,
        }
        for name in names
    ]
    insert_new(session, Run, rows)
    ids = session.scalars(select(Run.id).where(Run.name.in_(names)).order_by(Run.id)).all()
    states = [
        {"run_id": i, "lease_until": 0.0, "fence": 0, "pack_hash": "", "attempt": 0, "segment": 0, "settings": {}}
        for i in ids
    ]
    insert_new(session, EvaluationState, states)


def too_many_runs(limits: IngestLimits) -> Unavailable:
    """What an envelope of a run beyond the limit is answered."""
    return Unavailable(f"this service keeps {limits.max_runs} runs at most; delete some", retry_after_s=60)


def hold_clients(
    session: Session, held: dict[str, RunInGroup], envelopes: Iterable[Envelope], now: float
) -> dict[tuple[int, str], Client]:
    """The clients by (run id, client id), made where new, locked in that order."""
    firsts: dict[tuple[int, str], Envelope] = {}
    for envelope in envelopes:
        firsts.setdefault((held[envelope.run].run.id, envelope.client), envelope)
    keys = sorted(firsts)
    found = _lock_clients(session, keys)
    rows = [
        {
            "run_id": key[0],
            "id": key[1],
            "launch": firsts[key].launch,
            "role": firsts[key].role,
            "rank": firsts[key].rank,
            "last_sequence": 0,
            "losses": {},
            "sdk": "",
            "first_seen_at": now,
            "last_seen_at": now,
            "last_attempt": 0,
        }
        for key in keys
        if key not in found
    ]
    if rows:
        insert_new(session, Client, rows)
        found = _lock_clients(session, keys)
    return found


def _lock_clients(session: Session, keys: list[tuple[int, str]]) -> dict[tuple[int, str], Client]:
    runs, ids = {k[0] for k in keys}, {k[1] for k in keys}
    rows = session.scalars(_CLIENTS, {"b_runs": list(runs), "b_ids": list(ids)})
    return {(row.run_id, row.id): row for row in rows}


def load_attempts(session: Session, held: dict[str, RunInGroup], launches: Iterable[str]) -> None:
    """Fills in the attempts of these launches, and the current one of each run."""
    by_id = {entry.run.id: entry for entry in held.values()}
    for attempt in session.scalars(_ATTEMPTS, {"b_runs": list(by_id), "b_launches": list(set(launches))}):
        _remember(by_id[attempt.run_id], attempt)


def _remember(entry: RunInGroup, attempt: Attempt) -> None:
    entry.attempts[(attempt.launch, attempt.generation)] = attempt
    entry.by_ordinal[attempt.ordinal] = attempt


def place_item(session: Session, entry: RunInGroup, launch: str, item: Item) -> bool:
    """Gives the item its attempt, numbered as first seen; True where that attempt has just begun to be the current one.

    Leftovers of an earlier launch that were spooled meanwhile get a number but never become current.
    """
    key = (launch, item.body.generation)
    attempt = entry.attempts.get(key)
    if attempt is None:
        last = session.scalar(select(func.max(Attempt.ordinal)).where(Attempt.run_id == entry.run.id)) or 0
        attempt = Attempt(
            run_id=entry.run.id,
            ordinal=last + 1,
            launch=launch,
            generation=item.body.generation,
            started_at=item.event_at,
            reason="rollback" if item.body.generation else "launch",
            first_step=item.body.step,
            expected_ranks={},
        )
        session.add(attempt)
        session.flush()
        _remember(entry, attempt)
    item.attempt = attempt.ordinal
    current = entry.by_ordinal.get(entry.run.attempt)
    if attempt.ordinal <= entry.run.attempt:
        return False
    if current is not None and (not item.age_known or item.event_at < current.started_at):
        return False
    if current is not None:
        current.ended_at = item.event_at
    entry.run.attempt = attempt.ordinal
    entry.changed = True
    session.flush()
    return True


def set_mode(session: Session, run: Run, wanted: object, limits: IngestLimits, now: float) -> str | None:
    """The mode that the host's configuration asks for, cut down to `max_mode`, unless a person has set one.

    Returns a warning where the wish was not granted.
    """
    if wanted is not None and wanted not in MODES:
        return f"mode must be one of {', '.join(MODES)}"
    if run.mode_by not in (None, "client"):
        return f"mode stays {run.mode}: {run.mode_by} set it" if wanted not in (None, run.mode) else None
    asked = str(wanted) if wanted is not None else (run.mode or limits.default_mode)
    granted = MODES[min(MODES.index(asked), MODES.index(limits.max_mode))]
    if granted != run.mode:
        session.add(
            Audit(
                at=now,
                run_id=run.id,
                subject="run",
                subject_id=str(run.id),
                was=run.mode,
                became=granted,
                actor="client",
                detail={"field": "mode", "asked": asked},
            )
        )
        run.mode, run.mode_by = granted, "client"
    return None if granted == asked else f"mode {asked} is not allowed here; the run's mode is {granted}"

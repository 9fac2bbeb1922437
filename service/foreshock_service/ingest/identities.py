"""Runs, clients and attempts of a group: found or made, each locked before it is read, in the order of their ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import bindparam, func, select, update
from sqlalchemy.orm import Session, defer
from sqlalchemy.orm.attributes import set_committed_value

from foreshock.wire import MODES, Envelope
from foreshock_service.errors import Unavailable
from foreshock_service.ingest.arrivals import Item
from foreshock_service.ingest.checks import IngestLimits
from foreshock_service.store.bulk import read_rows, update_rows
from foreshock_service.store.models import Attempt, Audit, Client, EvaluationState, Run
from foreshock_service.store.upsert import insert_new

# Built once: building a statement costs as much as running it.
_RUNS = (
    select(Run)
    .where(Run.name.in_(bindparam("b_names", expanding=True)))
    .order_by(Run.id)
    # What only launches look at is read when they do: a host's whole configuration is not parsed a group.
    .options(*(defer(column) for column in (Run.config, Run.settings, Run.labels, Run.rules, Run.budget)))
    .with_for_update(key_share=True)
    .execution_options(populate_existing=True)
)
_FREE_RUNS = _RUNS.with_for_update(key_share=True, skip_locked=True)
_KNOWN = select(Run.name).where(Run.name.in_(bindparam("b_names", expanding=True)))
_CLIENTS = select(
    Client.run_id, Client.id, Client.launch, Client.role, Client.rank, Client.last_sequence, Client.losses, Client.sdk,
    Client.last_seen_at, Client.last_step, Client.last_attempt, Client.finished_at,
).where(
    Client.run_id.in_(bindparam("b_runs", expanding=True)), Client.id.in_(bindparam("b_ids", expanding=True))
)  # fmt: skip
_CLIENTS_OF_MANY = (
    "SELECT run_id, id, launch, role, rank, last_sequence, losses, sdk, last_seen_at, last_step, last_attempt,"
    " finished_at FROM clients WHERE run_id = ANY(%s::bigint[]) AND id = ANY(%s::text[])"
)
_CHANGING = (
    "launch", "role", "rank", "last_sequence", "sdk", "last_seen_at", "last_step", "last_attempt", "finished_at",
)  # fmt: skip
_LOSSES = (
    update(Client.__table__)  # type: ignore[arg-type]
    .where(Client.run_id == bindparam("b_run"), Client.id == bindparam("b_id"))
    .values(losses=bindparam("b_losses"))
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

    def heard(self, at: float) -> None:
        """Whoever of the run said something at `at`. `save_runs` writes it, without a flush of the session."""
        if at > self.run.last_seen_at:
            set_committed_value(self.run, "last_seen_at", at)


def hold_runs(
    session: Session, names: Iterable[str], now: float, limits: IngestLimits, *, wait: bool = True
) -> tuple[dict[str, RunInGroup], set[str]]:
    """The runs by name, made where new, their rows locked until the commit (SQLite: the whole database is).

    Whoever writes to a run locks its row first, so that ingest, evaluation and commands of one run queue instead of
    deadlocking. A run beyond `limits.max_runs` is left out. Without `wait` so are those whose rows are locked now:
    their names are the second answer.
    """
    wanted, busy = sorted(set(names)), set[str]()
    runs = list(session.scalars(_RUNS if wait else _FREE_RUNS, {"b_names": wanted}))
    missing = [name for name in wanted if name not in {run.name for run in runs}]
    if missing and not wait:
        busy.update(session.scalars(_KNOWN, {"b_names": missing}))
        wanted = [name for name in wanted if name not in busy]
        missing = [name for name in missing if name not in busy]
    if missing:
        room = limits.max_runs - (session.scalar(select(func.count()).select_from(Run)) or 0)
        _make_runs(session, missing[: max(0, room)], now)
        runs = list(session.scalars(_RUNS, {"b_names": wanted}))
    return {run.name: RunInGroup(run) for run in runs}, busy


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


@dataclass(slots=True)
class Sender:
    """A row of `clients` while its run is held, and what the group changes of it: `save_clients` writes it."""

    run_id: int
    id: str
    launch: str
    role: str
    rank: int
    last_sequence: int
    losses: dict[str, Any]
    sdk: str
    last_seen_at: float
    last_step: int | None
    last_attempt: int
    finished_at: float | None
    lost_more: bool = False
    """`losses` has changed."""


Senders = dict[tuple[int, str], Sender]


def hold_clients(session: Session, held: dict[str, RunInGroup], envelopes: Iterable[Envelope], now: float) -> Senders:
    """The clients by (run id, client id), made where new. Their runs' locks keep every other writer away."""
    firsts: dict[tuple[int, str], Envelope] = {}
    for envelope in envelopes:
        firsts.setdefault((held[envelope.run].run.id, envelope.client), envelope)
    keys = sorted(firsts)
    found = _find_clients(session, keys)
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
        found = _find_clients(session, keys)
    return found


def _find_clients(session: Session, keys: list[tuple[int, str]]) -> Senders:
    runs, ids = list({k[0] for k in keys}), list({k[1] for k in keys})
    if session.get_bind().dialect.name == "postgresql":
        return {(row[0], row[1]): Sender(*row) for row in read_rows(session, _CLIENTS_OF_MANY, (runs, ids))}
    rows = session.connection().execute(_CLIENTS, {"b_runs": runs, "b_ids": ids})
    return {(row[0], row[1]): Sender(*row) for row in rows}


def save_clients(session: Session, clients: Senders) -> None:
    """Writes every client of the group, in one statement where none has lost anything more."""
    rows = [
        {"run_id": c.run_id, "id": c.id, **{name: getattr(c, name) for name in _CHANGING}} for c in clients.values()
    ]
    update_rows(session, Client, ("run_id", "id"), _CHANGING, rows)
    losses = [{"b_run": c.run_id, "b_id": c.id, "b_losses": c.losses} for c in clients.values() if c.lost_more]
    if losses:
        session.connection().execute(_LOSSES, losses)


def save_runs(session: Session, held: Iterable[RunInGroup]) -> None:
    """Writes when the runs were last heard of; what else changed of them the session knows."""
    rows = [{"id": entry.run.id, "last_seen_at": entry.run.last_seen_at} for entry in held]
    update_rows(session, Run, ("id",), ("last_seen_at",), rows)


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

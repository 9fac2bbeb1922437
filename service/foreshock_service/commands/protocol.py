"""The only writer of `commands`, and of their audit log: a state machine of conditional updates.

    proposed ─→ approved ─→ delivered ─→ accepted ─→ done | failed | refused
        └→ rejected   └──────────┴→ refused, expired, cancelled      └→ lost

Each change is `UPDATE … WHERE id = … AND state = <the state that was read>`, so of two that race one wins and the other
is told. What makes a command unique across replicas is `evidence_key`; what keeps one in flight is the run's row, held
from the check to the approval. Sessions belong to the caller, who commits; whatever raises here must be rolled back.

Errors are in `ledger.py` and are raised from here by these names.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Row, bindparam, or_, select, update
from sqlalchemy.orm import Session

from foreshock.wire.commands import ACK_STATES, TERMINAL_STATES, Ack, Action, Command
from foreshock_service.commands.ledger import (
    IN_FLIGHT,
    POLICY,
    TRANSITIONS,
    Busy,
    CommandChange,
    CommandError,
    Expired,
    Forbidden,
    NotFound,
    Refused,
    WrongAttempt,
    WrongState,
    audit,
    find,
    hold_run,
    move,
    record_verdict,
)
from foreshock_service.commands.limits import DEFAULTS, Limits
from foreshock_service.incidents.conflicts import insert_ignoring
from foreshock_service.store.models import Attempt, CommandRow, Run
from foreshock_service.store.types import clean

__all__ = [
    "IN_FLIGHT", "POLICY", "TRANSITIONS", "Attempt", "Busy", "CommandChange", "CommandError", "CommandRow", "Expired",
    "Forbidden", "NotFound", "Refused", "WrongAttempt", "WrongState", "ack", "approve", "as_wire", "cancel",
    "close_run", "deliver", "expire_due", "find", "in_flight", "lose_accepted", "pending", "propose", "record_verdict",
    "reject", "waiting",
]  # fmt: skip

# Built once: building a statement costs as much as running it.
_FOR_CONTROLLER = (
    select(CommandRow, Run.name)
    .join(Run, Run.id == CommandRow.run_id)
    .where(
        CommandRow.run_id == bindparam("b_run"),
        CommandRow.state.in_(("approved", "delivered")),
        CommandRow.attempt == Run.attempt,
        CommandRow.expires_at > bindparam("b_now"),
        Run.controller_client == bindparam("b_client"),
    )
    .order_by(CommandRow.created_at)
    .execution_options(populate_existing=True)
)
_WAITING = (
    select(CommandRow.run_id)
    .where(CommandRow.run_id.in_(bindparam("b_runs", expanding=True)), CommandRow.state.in_(("approved", "delivered")))
    .distinct()
)
_PENDING = (
    select(CommandRow)
    .where(CommandRow.run_id == bindparam("b_run"), CommandRow.state.not_in(TERMINAL_STATES))
    .order_by(CommandRow.created_at)
    .execution_options(populate_existing=True)
)
_IN_FLIGHT = (
    select(CommandRow)
    .where(CommandRow.run_id == bindparam("b_run"), CommandRow.state.in_(IN_FLIGHT))
    .limit(1)
    .execution_options(populate_existing=True)
)
_BUDGET = select(Run.budget).where(Run.id == bindparam("b_run"))
_SPEND = update(Run.__table__).where(Run.id == bindparam("b_run"))  # type: ignore[arg-type]


def propose(
    session: Session,
    run: Run,
    actions: Sequence[Action],
    now: float,
    *,
    reason: str,
    requested_by: str = POLICY,
    incident_id: str | None = None,
    evidence_key: str | None = None,
    issued_step: int | None = None,
    at_step: int | None = None,
    detail: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULTS,
) -> CommandChange | None:
    """Writes a proposal to the run's current attempt; None where the same evidence has already led to it.

    Raises Forbidden for a kind that the run did not announce, ValueError without actions.
    """
    if not actions:
        raise ValueError("a command needs at least one action")
    absent = sorted({action.kind for action in actions} - set(run.capabilities or ()))
    if absent:
        raise Forbidden(f"the run did not announce {', '.join(absent)}")
    values = {
        "id": uuid.uuid4().hex,
        "run_id": run.id,
        "attempt": run.attempt,
        "kind": actions[0].kind,
        "actions": [{"kind": a.kind, "arguments": a.arguments} for a in actions],
        "state": "proposed",
        "reason": clean(reason),
        "incident_id": incident_id,
        "evidence_key": evidence_key,
        "requested_by": requested_by,
        "created_at": now,
        "expires_at": now + limits.proposal_expiry_s,
        "issued_step": issued_step,
        "at_step": at_step,
        "detail": dict(detail or {}),
        "verdict_detail": {},
    }
    if not insert_ignoring(session, CommandRow, values):
        return None
    row = find(session, str(values["id"]))
    audit(session, row, None, "proposed", now, requested_by, {"reason": reason})
    return CommandChange(row, None, "proposed", now, requested_by)


def approve(session: Session, command_id: str, by: str, now: float, *, limits: Limits = DEFAULTS) -> CommandChange:
    """`proposed` → `approved`; from now on it counts as in flight and must be accepted within `command_expiry_s`.

    Raises NotFound, Expired, WrongAttempt, Forbidden (the run only observes), Busy (one in flight), WrongState.
    """
    row = find(session, command_id)
    run = hold_run(session, row.run_id)
    row = find(session, command_id)
    if row.state == "proposed":
        if row.expires_at <= now:
            raise Expired(f"the proposal expired {now - row.expires_at:.0f} s ago")
        if row.attempt != run.attempt:
            raise WrongAttempt(f"asked of attempt {row.attempt}; the run is in attempt {run.attempt}")
        if (run.mode or "observe") == "observe":
            raise Forbidden("the run's mode is observe: nothing is sent to the trainer")
        other = in_flight(session, row.run_id)
        if other is not None:
            raise Busy(f"{other.kind} {other.id} is in flight ({other.state})")
    return move(session, row, "approved", now, by, {}, decided_by=by, expires_at=now + limits.command_expiry_s)


def reject(session: Session, command_id: str, by: str, now: float, reason: str = "") -> CommandChange:
    """`proposed` → `rejected`. Raises NotFound, WrongState."""
    note = {"rejected": reason} if reason else {}
    return move(session, find(session, command_id), "rejected", now, by, note, decided_by=by, finished_at=now)


def cancel(session: Session, command_id: str, by: str, now: float, reason: str = "") -> CommandChange:
    """Takes back what was not accepted yet. Raises NotFound, WrongState (an accepted command cannot be recalled)."""
    note = {"cancelled": reason} if reason else {}
    return move(session, find(session, command_id), "cancelled", now, by, note, finished_at=now)


def deliver(session: Session, run_id: int, client_id: str, now: float) -> list[Command]:
    """The commands that the run's controller should try to accept; marks them `delivered`. Empty for anyone else.

    May hand out the same command many times until it is accepted: only the accept decides who executes, and once.
    """
    waiting = session.execute(_FOR_CONTROLLER, {"b_run": run_id, "b_client": client_id, "b_now": now}).all()
    sent = []
    for row, name in waiting:
        if row.state == "approved":
            try:
                move(session, row, "delivered", now, client_id, {}, delivered_at=now)
            except WrongState:
                continue  # cancelled, or expired by the sweep, between the read and the update
        sent.append(as_wire(row, name, now))
    return sent


def waiting(session: Session, run_ids: Collection[int]) -> set[int]:
    """Those of these runs for whose controller `deliver` may have something: one look for many runs."""
    return set(session.connection().execute(_WAITING, {"b_runs": list(run_ids)}).scalars())


def ack(session: Session, command_id: str, answer: Ack, now: float, *, limits: Limits = DEFAULTS) -> CommandChange:
    """The trainer's answer. `accepted` is won by the run's controller, in the command's attempt, before it expires.

    Repeating the answer that was already taken, from the same client, is confirmed again and changes nothing, so a
    lost reply costs nothing: whoever got no answer has not executed. Raises NotFound, Forbidden, WrongAttempt, Expired,
    WrongState, ValueError for a state that is no answer.
    """
    if answer.state not in ACK_STATES:
        raise ValueError(f"state must be one of {', '.join(sorted(ACK_STATES))}, not {answer.state!r}")
    row = find(session, command_id)
    run = hold_run(session, row.run_id)
    row = find(session, command_id)
    if answer.client not in (run.controller_client, row.accepted_by):
        raise Forbidden("only the run's controller answers its commands")
    if row.state == answer.state and row.accepted_by in (None, answer.client):
        return CommandChange(row, row.state, row.state, now, answer.client)
    if answer.state == "accepted":
        return _accept(session, row, run, answer, now)
    if answer.attempt not in (row.attempt, run.attempt):
        raise WrongAttempt(f"asked of attempt {row.attempt}, answered from attempt {answer.attempt}")
    note = {answer.state: answer.detail} if answer.detail else {}
    return move(session, row, answer.state, now, answer.client, note, finished_at=now, done_step=answer.step)


def lose_accepted(
    session: Session, run_id: int, attempt: int, now: float, completed: str | None = None
) -> list[CommandChange]:
    """A new attempt began: what earlier attempts had accepted is `lost`, what they had not is `cancelled`.

    `completed` names the rollback that led into this attempt: it stays accepted and waits for its `done`. Where nobody
    said, an attempt that continues the launch of the one before spares its accepted rollback. May be called again.
    """
    rows = session.scalars(
        select(CommandRow).where(
            CommandRow.run_id == run_id,
            CommandRow.attempt < attempt,
            CommandRow.state.in_(("proposed", *IN_FLIGHT)),
        ),
        execution_options={"populate_existing": True},
    ).all()
    if not rows:
        return []
    continues = completed is None and _same_launch(session, run_id, attempt)
    note = {"reason": f"attempt {attempt} began"}
    changes = []
    for row in rows:
        spared = row.id == completed or (continues and row.attempt == attempt - 1 and _rolls_back(row))
        if row.state == "accepted" and spared:
            continue
        became = "lost" if row.state == "accepted" else "cancelled"
        changes.append(move(session, row, became, now, POLICY, {became: note["reason"]}, finished_at=now))
    return changes


def close_run(session: Session, run_id: int, now: float, reason: str) -> list[CommandChange]:
    """The run has ended or is deleted: nothing waits for it any longer."""
    rows = session.scalars(
        select(CommandRow).where(CommandRow.run_id == run_id, CommandRow.state.not_in(TERMINAL_STATES)),
        execution_options={"populate_existing": True},
    ).all()
    changes = []
    for row in rows:
        became = "lost" if row.state == "accepted" else "cancelled"
        changes.append(move(session, row, became, now, POLICY, {became: reason}, finished_at=now))
    return changes


def expire_due(session: Session, now: float, *, limits: Limits = DEFAULTS) -> list[CommandChange]:
    """The sweep, over all runs: what was not accepted in time is `expired`, what never answered again is `lost`."""
    waiting = CommandRow.state.in_(("proposed", "approved", "delivered")) & (CommandRow.expires_at <= now)
    hanging = (CommandRow.state == "accepted") & (CommandRow.accepted_at <= now - limits.accepted_limit_s)
    rows = session.scalars(
        select(CommandRow).where(or_(waiting, hanging)), execution_options={"populate_existing": True}
    ).all()
    changes = []
    for row in rows:
        became = "lost" if row.state == "accepted" else "expired"
        try:
            changes.append(move(session, row, became, now, "sweep", {}, finished_at=now))
        except WrongState:
            continue  # accepted or answered between the read and the update: the trainer won
    return changes


def pending(session: Session, run_id: int) -> list[CommandRow]:
    """Everything that is not over, oldest first: for pages, the CLI and `health`."""
    return list(session.scalars(_PENDING, {"b_run": run_id}))


def in_flight(session: Session, run_id: int) -> CommandRow | None:
    """The one command of the run that is approved, delivered or accepted, if any."""
    return session.scalars(_IN_FLIGHT, {"b_run": run_id}).first()


def as_wire(row: CommandRow, run_name: str, now: float) -> Command:
    """The command as it travels: the time left instead of a wall-clock time."""
    return Command(
        id=row.id,
        run=run_name,
        attempt=row.attempt,
        actions=[Action(kind=a["kind"], arguments=a.get("arguments", {})) for a in row.actions],
        issued_step=row.issued_step,
        at_step=row.at_step,
        expires_in_s=max(0.0, row.expires_at - now),
        reason=row.reason,
        incident=row.incident_id,
    )


def _accept(session: Session, row: CommandRow, run: Row[Any], answer: Ack, now: float) -> CommandChange:
    if answer.client != run.controller_client:
        raise Forbidden("only the run's controller accepts its commands")
    if row.state == "expired" or (row.state not in TERMINAL_STATES and row.expires_at <= now):
        raise Expired("too late: the command has expired")
    if not answer.attempt == row.attempt == run.attempt:
        raise WrongAttempt(
            f"asked of attempt {row.attempt}, answered from {answer.attempt}; the run is in attempt {run.attempt}"
        )
    change = move(session, row, "accepted", now, answer.client, {}, accepted_at=now, accepted_by=answer.client)
    spent = dict(session.execute(_BUDGET, {"b_run": row.run_id}).scalar_one() or {})
    for action in row.actions:
        spent[action["kind"]] = spent.get(action["kind"], 0) + 1
    session.connection().execute(_SPEND, {"b_run": row.run_id, "budget": spent})
    return change


def _same_launch(session: Session, run_id: int, attempt: int) -> bool:
    """True where the attempt began by a rollback: its launch is that of the attempt before, a generation later."""
    query = select(Attempt.launch).where(Attempt.run_id == run_id, Attempt.ordinal.in_((attempt - 1, attempt)))
    launches = session.scalars(query).all()
    return len(launches) == 2 and launches[0] == launches[1]


def _rolls_back(row: CommandRow) -> bool:
    return any(action["kind"] == "rollback" for action in row.actions)

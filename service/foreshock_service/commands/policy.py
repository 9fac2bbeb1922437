"""Decides what to ask of the trainer after each evaluated step, within what the run announced and its mode allows.

- `observe` (the default): proposals are recorded with `detail.advisory`, for people to read; nothing can approve them.
- `approve`: the same proposals wait for a person.
- `auto`: proposals that pass the gates are approved at once; `pause` and `stop` still wait for a person.

One rung at a time: a kind is tried once on the same evidence (`evidence_key`: kind, incident, how often it was opened,
try), its verdict is awaited, and only when it did not help comes the next rung of `routes.ladder`. A replayed backlog
(`may_command=False`) judges and keeps books, and proposes and approves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import bindparam, exists, select
from sqlalchemy.orm import Session

from foreshock.wire.commands import TERMINAL_STATES, Action
from foreshock_service.commands import checkpoints, facts, gates, protocol, verdicts
from foreshock_service.commands.facts import Look
from foreshock_service.commands.limits import DEFAULTS, Limits
from foreshock_service.commands.protocol import CommandChange
from foreshock_service.commands.routes import Facts, ladder, next_kind
from foreshock_service.commands.verdicts import Before
from foreshock_service.diagnosis.window import bands_at, recent_steps
from foreshock_service.incidents import book
from foreshock_service.incidents.book import IncidentChange
from foreshock_service.incidents.causes import upstream_first
from foreshock_service.rules.interface import Observation, StepView
from foreshock_service.store.models import Checkpoint, CommandRow, Incident, Run

IS_CAP: Final = 2.0
"""Cap of the truncated importance weights that `enable_is_correction` asks for."""
ROLLBACK_SCOPE: Final = ("weights", "optimizer", "scheduler", "rng", "data")
AUTO: Final = "policy:auto"
"""Who `decided_by` names where policy approved."""

# Built once: building a statement costs as much as running it.
_UNSETTLED = select(CommandRow.id).where(
    CommandRow.run_id == bindparam("b_run"),
    CommandRow.state.not_in(TERMINAL_STATES) | ((CommandRow.state == "done") & CommandRow.verdict.is_(None)),
)
_UNSETTLED_ONE = _UNSETTLED.limit(1)
_PROPOSED = (
    select(CommandRow)
    .where(
        CommandRow.run_id == bindparam("b_run"),
        CommandRow.state == "proposed",
        CommandRow.requested_by == protocol.POLICY,
        CommandRow.attempt == bindparam("b_attempt"),
        CommandRow.expires_at > bindparam("b_now"),
    )
    .order_by(CommandRow.created_at)
)
_CHECKPOINT = select(Checkpoint.id).where(Checkpoint.run_id == bindparam("b_run"))
_STANDING = select(
    exists(select(Incident.id).where(Incident.run_id == bindparam("b_run"), Incident.status.in_(book.ACTIVE))),
    exists(_UNSETTLED),
    exists(_CHECKPOINT.where(Checkpoint.attempt == bindparam("b_attempt"), Checkpoint.status == "candidate")),
    exists(_CHECKPOINT.where(Checkpoint.status != "quarantined")),
)


def consider(
    session: Session,
    run: Run,
    seen: Observation,
    changes: Sequence[IncidentChange],
    now: float,
    may_command: bool = True,
    *,
    limits: Limits = DEFAULTS,
) -> list[CommandChange]:
    """Everything about commands that one evaluated step brings, in the evaluation's transaction.

    Loses and cancels what earlier attempts left, keeps the checkpoints' books, judges carried-out commands, and (where
    `may_command`) proposes, and in `auto` approves. Ticks change nothing. A quiet step costs four small queries.
    """
    if not isinstance(seen, StepView):
        return []
    done: list[CommandChange] = []
    unsettled = _unsettled(session, run)
    if unsettled:
        done += protocol.lose_accepted(session, run.id, run.attempt, now, _completed(seen))
    _keep_checkpoints(session, run, seen, changes, limits)
    if unsettled:
        bands = bands_at(session, run.id, seen.attempt, seen.step)
        done += verdicts.judge(session, run, seen, bands, now, limits=limits)
    if not may_command or seen.attempt != run.attempt or run.status in ("finished", "crashed"):
        return done
    at = facts.look(session, run, seen)
    if unsettled:
        done += _withdraw(session, run, {i.id for i in at.active}, now)
    for incident in sorted(at.active, key=lambda i: upstream_first(i.rule)):
        change = _propose_next(session, run, at, incident, now, limits)
        if change is not None:
            done.append(change)
    done += _ask_first_checkpoint(session, run, at, now, limits)
    if (unsettled or done) and mode(run) == "auto":
        done += _approve_waiting(session, run, seen, now, limits)
    return done


def idle(session: Session, run: Run, seen: Observation) -> bool:
    """True where, without findings, neither incidents nor commands nor checkpoints of this run need a look: one query.

    `book.apply` and `consider` would then write nothing, and the verdict has no incident to speak of.
    """
    which = {"b_run": run.id, "b_attempt": seen.attempt}
    active, unsettled, candidate, known = session.connection().execute(_STANDING, which).one()
    if active or not isinstance(seen, StepView):
        return not active
    return not unsettled and not candidate and (known or not _wants_checkpoint(run))


def mode(run: Run) -> str:
    """The run's mode; `observe` until anyone says otherwise."""
    return run.mode or "observe"


def _unsettled(session: Session, run: Run) -> bool:
    """True where a command of the run is not over, or is done and not judged."""
    return session.connection().execute(_UNSETTLED_ONE, {"b_run": run.id}).first() is not None


def _keep_checkpoints(
    session: Session, run: Run, seen: StepView, changes: Sequence[IncidentChange], limits: Limits
) -> None:
    for change in changes:
        if change.kind in ("opened", "escalated"):
            checkpoints.quarantine(
                session, run, change.incident, change.incident.attempt, change.incident.onset_step, limits=limits
            )
        elif change.kind == "reopened" and change.finding is not None:
            # What was promoted while the illness was away stays healthy.
            checkpoints.quarantine(
                session, run, change.incident, seen.attempt, change.finding.onset_step, limits=limits
            )
    checkpoints.settle(session, run, seen, limits=limits)


def _withdraw(session: Session, run: Run, active: set[str], now: float) -> list[CommandChange]:
    """Proposals of policy whose incident is over are taken back; what was approved runs its course."""
    query = select(CommandRow).where(
        CommandRow.run_id == run.id,
        CommandRow.state == "proposed",
        CommandRow.incident_id.is_not(None),
        CommandRow.requested_by == protocol.POLICY,
    )
    withdrawn = []
    for row in session.scalars(query).all():
        if row.incident_id not in active:
            try:
                withdrawn.append(protocol.cancel(session, row.id, protocol.POLICY, now, "the incident is over"))
            except protocol.WrongState:
                continue  # a person decided between the read and the update
    return withdrawn


def _propose_next(
    session: Session, run: Run, at: Look, incident: Incident, now: float, limits: Limits
) -> CommandChange | None:
    if limits.act_on == "critical" and incident.severity != "critical":
        return None
    known = facts.gather(session, run, at, incident, limits=limits)
    kind = next_kind(known)
    if kind is None or (kind == "rollback" and _restoring(session, run)):
        return None
    checkpoint = facts.rollback_target(session, run, incident, limits=limits) if kind == "rollback" else None
    detail: dict[str, Any] = {
        "before": msgspec.to_builtins(_before(session, run, at, incident, checkpoint)),
        "route": {"edge": known.edge, "ladder": list(ladder(known)), "reward_gone": known.reward_gone},
    }
    if kind == "enable_is_correction":
        detail["masks"] = gates.masked_by_correction(at.seen.values, at.bands)
    if mode(run) == "observe":
        detail["advisory"] = True
    tried = facts.tries(session, run, kind, incident)
    return protocol.propose(
        session,
        run,
        [Action(kind=kind, arguments=_arguments(at.seen, kind, checkpoint))],
        now,
        reason=_reason(kind, incident, known),
        incident_id=incident.id,
        evidence_key=f"{facts.evidence_prefix(kind, incident)}{tried}",
        issued_step=at.seen.step,
        detail=detail,
        limits=limits,
    )


def _ask_first_checkpoint(session: Session, run: Run, at: Look, now: float, limits: Limits) -> list[CommandChange]:
    """Act modes need something to roll back to: without a checkpoint after a few steps, one is asked for."""
    if not _wants_checkpoint(run) or at.active or checkpoints.any_known(session, run.id):
        return []
    past = recent_steps(session, run.id, run.attempt, upto=at.seen.step, steps=limits.checkpoint_grace_steps + 1)
    if len(past) <= limits.checkpoint_grace_steps:
        return []
    change = protocol.propose(
        session,
        run,
        [Action(kind="checkpoint_now")],
        now,
        reason="No checkpoint is known yet: without one there is nothing to roll back to.",
        evidence_key=f"checkpoint_now:start:{run.attempt}",
        issued_step=at.seen.step,
        limits=limits,
    )
    return [change] if change else []


def _wants_checkpoint(run: Run) -> bool:
    return {"rollback", "checkpoint_now"} <= set(run.capabilities or ()) and mode(run) != "observe"


def _approve_waiting(session: Session, run: Run, seen: StepView, now: float, limits: Limits) -> list[CommandChange]:
    """In `auto`: the oldest proposal of policy that passes the gates; the others wait for a later step or a person."""
    which = {"b_run": run.id, "b_attempt": run.attempt, "b_now": now}
    for row in session.scalars(_PROPOSED, which).all():
        try:
            gates.check(session, run, row, seen.step, limits=limits)
            return [protocol.approve(session, row.id, AUTO, now, limits=limits)]
        except protocol.Busy:
            return []
        except protocol.CommandError:
            continue
    return []


def _restoring(session: Session, run: Run) -> bool:
    """True while another incident's rollback is on its way or not judged yet: one restores the run for all."""
    query = select(CommandRow.id).where(
        CommandRow.run_id == run.id,
        CommandRow.kind == "rollback",
        CommandRow.verdict.is_(None),
        CommandRow.state.in_(("proposed", *protocol.IN_FLIGHT, "done")),
    )
    return session.execute(query.limit(1)).first() is not None


def _before(session: Session, run: Run, at: Look, incident: Incident, checkpoint: Checkpoint | None) -> Before:
    """How things stand; for a rollback also how the rewards stood at the checkpoint that it goes back to."""
    onset = incident.onset_step
    calm = [p for p in at.past if onset is None or p.step < onset]
    if checkpoint is not None:
        calm = recent_steps(session, run.id, checkpoint.attempt, upto=checkpoint.step, steps=10) or calm
    return verdicts.before(
        incident,
        at.seen,
        at.bands,
        validation=facts.last_value(at.past, "reward.validation"),
        reward_level=facts.level_of(calm, "reward.mean"),
        validation_level=facts.last_value(calm, "reward.validation"),
    )


def _arguments(seen: StepView, kind: str, checkpoint: Checkpoint | None) -> dict[str, Any]:
    if kind == "rollback" and checkpoint is not None:
        return {
            "checkpoint": checkpoint.path,
            "step": checkpoint.step,
            "skip_until_step": seen.step,
            "scope": list(checkpoint.scope or ROLLBACK_SCOPE),
        }
    arguments: dict[str, dict[str, Any]] = {
        "skip_update": {"steps": 1},
        "enable_is_correction": {"cap": IS_CAP},
        "probe": {"name": "rescore"},
    }
    return arguments.get(kind, {})


def _completed(seen: StepView) -> str | None:
    """The command that an attempt's notice says it completed."""
    for notice in seen.notices:
        if notice.get("kind") == "attempt":
            command = (notice.get("data") or {}).get("command")
            if isinstance(command, str) and command:
                return command
    return None


def _reason(kind: str, incident: Incident, known: Facts) -> str:
    where = {
        "training_pass": "the training pass is the odd one out",
        "scoring_pass": "the scoring pass is the odd one out",
        "engine": "the engine is the odd one out",
        "undecided": "which pass is at fault is undecided",
    }
    parts = [f"{incident.rule} since step {incident.onset_step}"]
    if known.wrong_rows:
        parts.append("labels or rows seem to belong elsewhere")
    elif known.edge is not None:
        parts.append(where[known.edge])
    if known.upstream is not None:
        parts.append(f"after {known.upstream}")
    if known.reward_gone:
        parts.append("the reward has left its range")
    tried = [tried_kind for tried_kind, trial in known.trials.items() if trial == "over"]
    if tried:
        parts.append(f"{', '.join(tried)} did not help")
    return f"{kind}: {'; '.join(parts)}."

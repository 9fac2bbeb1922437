"""What people ask for: arguments checked, a rollback's target filled in, no correction over stale weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.wire.commands import Action
from foreshock_service.commands import checkpoints, gates, protocol
from foreshock_service.commands.limits import DEFAULTS, Limits
from foreshock_service.commands.protocol import CommandChange, Refused
from foreshock_service.commands.routes import Facts, Trial, correction_allowed
from foreshock_service.diagnosis.signature import diagnose
from foreshock_service.diagnosis.window import recent_steps
from foreshock_service.errors import Unprocessable
from foreshock_service.store.models import CommandRow, Run

MAX_SKIPPED_UPDATES: Final = 100


def request(
    session: Session,
    run: Run,
    actions: Sequence[Action],
    by: str,
    now: float,
    *,
    reason: str = "",
    at_step: int | None = None,
    incident_id: str | None = None,
    approve: bool = True,
    force: bool = False,
    limits: Limits = DEFAULTS,
) -> CommandChange:
    """Proposes what a person asks for and, with `approve`, approves it at once.

    Raises what `prepared`, `protocol.propose` and `protocol.approve` raise; the caller then rolls back, so that no
    proposal is left behind whose approval was refused.
    """
    ready, detail = prepared(session, run, actions, force=force, limits=limits)
    proposed = protocol.propose(
        session,
        run,
        ready,
        now,
        reason=reason or f"asked for by {by}",
        requested_by=by,
        incident_id=incident_id,
        issued_step=run.last_step,
        at_step=at_step,
        detail=detail,
        limits=limits,
    )
    assert proposed is not None, "without an evidence key nothing can be there already"
    if not approve:
        return proposed
    return protocol.approve(session, proposed.command.id, by, now, limits=limits)


def prepared(
    session: Session, run: Run, actions: Sequence[Action], *, force: bool = False, limits: Limits = DEFAULTS
) -> tuple[list[Action], dict[str, Any]]:
    """The actions as they may be proposed, and what to keep with the command.

    A `rollback` without a checkpoint goes to the newest healthy one. Raises Unprocessable for arguments that cannot be,
    Refused where there is no checkpoint to go to or a stale-weights signature forbids correction (with how much of the
    mismatch it would mask) and `force` does not override it. Budgets and cool-downs bind policy, not people.
    """
    ready = [_with_arguments(session, run, action, limits) for action in actions]
    if not any(action.kind == "enable_is_correction" for action in ready):
        return ready, {}
    allowed, masks = correction_gate(session, run)
    if not allowed and not force:
        raise Refused("a stale-weights signature is present: correction would hide it", masks=masks)
    return ready, {"masks": masks, "forced": not allowed}


def correction_gate(session: Session, run: Run) -> tuple[bool, dict[str, Any]]:
    """Whether IS correction may be switched on, and how much of the mismatch it would hide now.

    A re-sync of this attempt that was carried out (or failed on differing digests) and did not help excludes stale
    weights.
    """
    past = recent_steps(session, run.id, run.attempt, steps=6)
    if not past:
        return True, {}
    last = past[-1]
    found = diagnose([p.values for p in past], bands=last.bands, missing=last.missing, settings=run.settings)
    resyncs = select(CommandRow.state, CommandRow.verdict).where(
        CommandRow.run_id == run.id,
        CommandRow.kind == "resync_engine",
        CommandRow.attempt == run.attempt,
        CommandRow.state.in_(("done", "failed")),
    )
    tried: dict[str, Trial] = {}
    if any(state == "failed" or verdict in ("no_effect", "worse") for state, verdict in session.execute(resyncs)):
        tried["resync_engine"] = "over"
    known = Facts(rule="rollout_mismatch", stale_engine=found.names("stale_engine"), trials=tried)
    return correction_allowed(known), gates.masked_by_correction(last.values, last.bands)


def _with_arguments(session: Session, run: Run, action: Action, limits: Limits) -> Action:
    given = action.arguments
    if action.kind == "scale_lr" and not _number_within(given.get("factor"), 0.0, 1.0):
        raise Unprocessable("scale_lr needs a factor above 0 and at most 1")
    if action.kind == "skip_update" and not _number_within(given.get("steps", 1), 0, MAX_SKIPPED_UPDATES):
        raise Unprocessable(f"skip_update takes 1 to {MAX_SKIPPED_UPDATES} steps")
    if action.kind == "enable_is_correction" and not _number_within(given.get("cap", 1.0), 0.0, 1e6):
        raise Unprocessable("the cap of a correction is a positive number")
    if action.kind != "rollback":
        return action
    if "checkpoint" not in given:
        target = checkpoints.target(session, run, limits=limits)
        if target is None:
            raise Refused("no healthy checkpoint is known to roll back to")
        return Action(
            kind="rollback",
            arguments={**given, "checkpoint": target.path, "step": target.step, "scope": list(target.scope)},
        )
    try:
        checkpoints.checked_path(given["checkpoint"])
    except checkpoints.BadPath as error:
        raise Unprocessable(str(error)) from error
    return action


def _number_within(value: Any, above: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value <= most

"""Commands that a person asks for: announced kinds only, never in `observe`, and no correction over stale weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from foreshock.wire.commands import Action
from foreshock_service.commands import gates, protocol
from foreshock_service.commands.limits import DEFAULTS, Limits
from foreshock_service.commands.protocol import CommandChange, Forbidden, Refused
from foreshock_service.commands.routes import Facts, Trial, correction_allowed
from foreshock_service.diagnosis.signature import diagnose
from foreshock_service.diagnosis.window import recent_steps
from foreshock_service.store.models import CommandRow, Run


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
    force: bool = False,
    limits: Limits = DEFAULTS,
) -> CommandChange:
    """Proposes and, since a person asks, approves at once. Budgets and cool-downs bind policy, not people.

    Raises Forbidden (mode `observe`, or not announced), Busy, Refused (correction while a stale-weights signature is
    present, with how much it would mask; `force` overrides), ValueError without actions.
    """
    if (run.mode or "observe") == "observe":
        raise Forbidden("the run's mode is observe: nothing is sent to the trainer")
    detail: dict[str, Any] = {}
    if any(action.kind == "enable_is_correction" for action in actions):
        allowed, masks = correction_gate(session, run)
        if not allowed and not force:
            raise Refused("a stale-weights signature is present: correction would hide it", masks=masks)
        detail = {"masks": masks, "forced": not allowed}
    proposed = protocol.propose(
        session,
        run,
        actions,
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
    return protocol.approve(session, proposed.command.id, by, now, limits=limits)


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
    resyncs = select(CommandRow.verdict).where(
        CommandRow.run_id == run.id,
        CommandRow.kind == "resync_engine",
        CommandRow.attempt == run.attempt,
        CommandRow.state.in_(("done", "failed")),
    )
    tried: dict[str, Trial] = {}
    if any(verdict != "helped" for verdict in session.scalars(resyncs)):
        tried["resync_engine"] = "over"
    known = Facts(rule="rollout_mismatch", stale_engine=found.names("stale_engine"), trials=tried)
    return correction_allowed(known), gates.masked_by_correction(last.values, last.bands)

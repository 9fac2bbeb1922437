"""What policy must pass before it approves by itself: budget, cool-down, one in flight. People pass by saying so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import bindparam, or_, select
from sqlalchemy.orm import Session

from foreshock_service.commands.limits import DEFAULTS, Limits
from foreshock_service.commands.protocol import IN_FLIGHT, POLICY, Busy, Refused, in_flight
from foreshock_service.commands.routes import NEEDS_PERSON
from foreshock_service.store.models import CommandRow, Run

SPENT: Final = (*IN_FLIGHT, "done", "failed", "lost")
HOUSEKEEPING: Final = frozenset({"checkpoint_now", "probe", "resume"})
"""Changes nothing of the training; has its own budget per kind and leaves the run's alone."""

# Built once: building a statement costs as much as running it.
_SPENT = select(CommandRow.actions).where(
    CommandRow.run_id == bindparam("b_run"), CommandRow.requested_by == POLICY, CommandRow.state.in_(SPENT)
)
_SAME_KIND = select(CommandRow.done_step, CommandRow.issued_step).where(
    CommandRow.run_id == bindparam("b_run"),
    CommandRow.attempt == bindparam("b_attempt"),
    CommandRow.kind == bindparam("b_kind"),
    CommandRow.id != bindparam("b_id"),
    or_(CommandRow.state.in_(SPENT), CommandRow.state == "refused"),
)


def spent(session: Session, run_id: int) -> Counter[str]:
    """Action kinds that policy has had approved on this run, with how often."""
    rows = session.scalars(_SPENT, {"b_run": run_id})
    return Counter(action["kind"] for actions in rows for action in actions)


def budget_of(run: Run, limits: Limits) -> tuple[int, Mapping[str, int]]:
    """Commands in all and per kind: the service's limits, with what an operator set for this run (`PATCH` budget)."""
    said = run.budget or {}
    whole = said.get("limit")
    return limits.budget_per_run if whole is None else int(whole), {**limits.budget_per_kind, **said.get("kinds", {})}


def check(session: Session, run: Run, row: CommandRow, step: int, *, limits: Limits = DEFAULTS) -> None:
    """Raises Busy while another command is in flight, Refused (with the numbers) for what policy may not approve."""
    kinds = [action["kind"] for action in row.actions]
    by_person = sorted(NEEDS_PERSON.intersection(kinds))
    if by_person:
        raise Refused(f"{by_person[0]} waits for a person", kind=by_person[0])
    other = in_flight(session, run.id)
    if other is not None:
        raise Busy(f"{other.kind} {other.id} is in flight ({other.state})")
    used = spent(session, run.id)
    total = sum(n for kind, n in used.items() if kind not in HOUSEKEEPING)
    whole, by_kind = budget_of(run, limits)
    if total >= whole and not HOUSEKEEPING.issuperset(kinds):
        raise Refused(f"the run's budget of {whole} commands is spent", spent=dict(used))
    for kind in kinds:
        allowed = by_kind.get(kind, whole)
        if used[kind] >= allowed:
            raise Refused(f"the budget of {allowed} x {kind} is spent", spent=dict(used))
    _check_cooldown(session, row, step, limits)


def masked_by_correction(
    values: Mapping[str, float], bands: Mapping[str, tuple[float, float, float]]
) -> dict[str, Any]:
    """How much of the mismatch a correction would hide: now, and above the run's own floor, in nats a token."""
    figures: dict[str, Any] = {}
    for signal in ("mismatch.kl_k3", "mismatch.abs_mean", "mismatch.ess_token"):
        if signal in values:
            figures[signal] = values[signal]
    if "mismatch.kl_k3" in values and "mismatch.kl_k3" in bands:
        figures["mismatch.kl_k3 above the floor"] = values["mismatch.kl_k3"] - bands["mismatch.kl_k3"][1]
    return figures


def _check_cooldown(session: Session, row: CommandRow, step: int, limits: Limits) -> None:
    which = {"b_run": row.run_id, "b_attempt": row.attempt, "b_kind": row.kind, "b_id": row.id}
    for done, issued in session.execute(_SAME_KIND, which):
        last = done if done is not None else issued
        if last is not None and step - last < limits.cooldown_steps:
            raise Refused(f"{row.kind} was tried at step {last}: cool-down of {limits.cooldown_steps} steps", last=last)

"""The rows of the command protocol: read, locked, moved from state to state, audited. `protocol.py` is the way in.

CommandError
├── NotFound        no such command
├── WrongState      the state machine has no such step from where the command is
│   ├── Busy        another command of the run is in flight
│   └── Expired     too late: its time has passed
├── WrongAttempt    asked of another attempt than the one that answers
├── Forbidden       not the controller; the run only observes; not announced by the host
└── Refused         a gate: budget, cool-down, correction over stale weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import CursorResult, Row, bindparam, insert, select, update
from sqlalchemy.orm import Session

from foreshock.wire.commands import STATES
from foreshock_service.store.models import Audit, CommandRow, Run

POLICY: Final = "policy"
"""Who `requested_by` names where no person asked."""
IN_FLIGHT: Final = frozenset({"approved", "delivered", "accepted"})
TRANSITIONS: Final[Mapping[str, frozenset[str]]] = {
    "proposed": frozenset({"approved", "rejected", "expired", "cancelled"}),
    "approved": frozenset({"delivered", "expired", "cancelled"}),
    "delivered": frozenset({"accepted", "refused", "expired", "cancelled"}),
    "accepted": frozenset({"done", "failed", "refused", "lost"}),
}


# Built once: building a statement costs as much as running it.
_FIND = select(CommandRow).where(CommandRow.id == bindparam("b_id")).execution_options(populate_existing=True)
_HOLD_RUN = (
    select(Run.id, Run.name, Run.mode, Run.attempt, Run.status, Run.controller_client, Run.capabilities)
    .where(Run.id == bindparam("b_run"))
    .with_for_update()
)
_UPDATE = update(CommandRow.__table__).where(  # type: ignore[arg-type]
    CommandRow.id == bindparam("b_id"), CommandRow.state == bindparam("b_was")
)
_AUDIT = insert(Audit.__table__)  # type: ignore[arg-type]


class CommandError(Exception):
    """What a command cannot do. The message may be shown to the caller."""


class NotFound(CommandError):  # noqa: N818
    """No command of that id."""


class WrongState(CommandError):  # noqa: N818
    """The command is not where this step could start."""


class Busy(WrongState):
    """Another command of the same run is in flight."""


class Expired(WrongState):
    """Its time has passed: it will never be executed."""


class WrongAttempt(CommandError):  # noqa: N818
    """The command was asked of another attempt of the run."""


class Forbidden(CommandError):  # noqa: N818
    """Not the controller, not in this mode, or not announced."""


class Refused(CommandError):  # noqa: N818
    """A gate said no; `detail` holds its numbers."""

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.detail = detail


@dataclass(frozen=True)
class CommandChange:
    """One change of a command, as alerts and long-polls learn of it. `became` is a state, or `verdict:<verdict>`."""

    command: CommandRow
    was: str | None
    became: str
    at: float
    actor: str


def find(session: Session, command_id: str) -> CommandRow:
    """The command as the database holds it now. Raises NotFound."""
    row = session.scalars(_FIND, {"b_id": command_id}).first()
    if row is None:
        raise NotFound(f"no command {command_id}")
    return row


def hold_run(session: Session, run_id: int) -> Row[Any]:
    """Locks the run's row until the transaction ends and returns its fresh id, mode, attempt, status and controller.

    Every check that must still be true at commit (one in flight, budget) happens behind it. SQLite has no row locks and
    needs none: `Store.write` lets one writer in. Raises NotFound.
    """
    row = session.execute(_HOLD_RUN, {"b_run": run_id}).first()
    if row is None:
        raise NotFound(f"no run {run_id}")
    return row


def record_verdict(
    session: Session, row: CommandRow, verdict: str | None, step: int | None, detail: Mapping[str, Any], now: float
) -> CommandChange | None:
    """Notes what is known of a command's effect; with `verdict` None only the progress. A verdict is given once."""
    values: dict[str, Any] = {"verdict_detail": dict(detail)}
    if verdict is not None:
        values |= {"verdict": verdict, "verdict_step": step}
    if not update_if(session, row, row.state, CommandRow.verdict.is_(None), **values):
        return None
    row = find(session, row.id)
    if verdict is None:
        return None
    audit(session, row, row.state, f"verdict:{verdict}", now, POLICY, dict(detail))
    return CommandChange(row, row.state, f"verdict:{verdict}", now, POLICY)


def move(
    session: Session, row: CommandRow, became: str, now: float, actor: str, note: Mapping[str, Any], **columns: Any
) -> CommandChange:
    """One step of the machine, in the database only if nobody else moved the command since it was read."""
    was = row.state
    if became not in TRANSITIONS.get(was, frozenset()):
        raise WrongState(f"a command that is {was} cannot become {became}")
    detail = {**row.detail, **note}
    if not update_if(session, row, was, state=became, detail=detail, **columns):
        fresh = find(session, row.id)
        raise WrongState(f"a command that is {fresh.state} cannot become {became}")
    row = find(session, row.id)
    audit(session, row, was, became, now, actor, note)
    return CommandChange(row, was, became, now, actor)


def update_if(session: Session, row: CommandRow, was: str, /, *conditions: Any, **values: Any) -> bool:
    statement = _UPDATE.where(*conditions) if conditions else _UPDATE
    result = session.connection().execute(statement, {"b_id": row.id, "b_was": was, **values})
    assert isinstance(result, CursorResult)
    return result.rowcount == 1


def audit(
    session: Session, row: CommandRow, was: str | None, became: str, now: float, actor: str, note: Mapping[str, Any]
) -> None:
    assert became.partition(":")[0] in (*STATES, "verdict")
    session.connection().execute(
        _AUDIT,
        {
            "at": now,
            "run_id": row.run_id,
            "subject": "command",
            "subject_id": row.id,
            "was": was,
            "became": became,
            "actor": actor,
            "detail": {"kind": row.kind, **note},
        },
    )

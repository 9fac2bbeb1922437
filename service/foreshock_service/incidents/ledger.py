"""The rows of the incident book: read, moved from status to status, audited. `book.py` is the way in.

    open ─→ acknowledged ─→ resolved          `mitigated`: a command masks it, the cause remains; a worse turn opens it
      └──→ mitigated ──────→ resolved ─→ open (again, within the cool-down: the same incident)

Every change is a conditional update on the status that was read, so a person and two replicas cannot overrun each
other.

IncidentError
├── NotFound     no such incident
└── WrongState   not open to this step any longer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import CursorResult, bindparam, func, insert, select, update
from sqlalchemy.orm import Session

from foreshock_service.rules.interface import Finding
from foreshock_service.store.models import Audit, Incident

ACTIVE: Final = ("open", "acknowledged", "mitigated")
RULES: Final = "rules"
"""Who resolved, in the audit log, where no person did."""

# Built once: building a statement costs as much as running it.
_FRESH: Final[dict[str, Any]] = {"populate_existing": True}
_OF_RUN = (
    select(Incident)
    .where(Incident.run_id == bindparam("b_run"))
    .order_by(Incident.opened_at, Incident.id)
    .execution_options(**_FRESH)
)
_OF_RUN_IN = _OF_RUN.where(Incident.status.in_(bindparam("b_statuses", expanding=True)))
_STANDING = select(Incident.severity, Incident.status).where(
    Incident.run_id == bindparam("b_run"), Incident.status.in_(ACTIVE)
)
_FIND = select(Incident).where(Incident.id == bindparam("b_id")).execution_options(**_FRESH)
_COUNT = (
    select(func.count())
    .select_from(Incident)
    .where(Incident.run_id == bindparam("b_run"), Incident.rule == bindparam("b_rule"))
)
_LATEST = (
    select(Incident)
    .where(Incident.run_id == bindparam("b_run"), Incident.rule == bindparam("b_rule"))
    .order_by(Incident.opened_at.desc(), Incident.id)
    .limit(1)
    .execution_options(**_FRESH)
)
_UPDATE = update(Incident.__table__).where(  # type: ignore[arg-type]
    Incident.id == bindparam("b_id"), Incident.status == bindparam("b_was")
)
_AUDIT = insert(Audit.__table__)  # type: ignore[arg-type]

Kind = Literal["opened", "updated", "escalated", "resolved", "reopened", "acknowledged", "mitigated"]


class IncidentError(Exception):
    """What an incident cannot do. The message may be shown to the caller."""


class NotFound(IncidentError):  # noqa: N818
    """No incident of that id."""


class WrongState(IncidentError):  # noqa: N818
    """The incident is not in a status that this step could start from."""


@dataclass(frozen=True)
class IncidentChange:
    """One change of an incident, as commands and alerts learn of it. `finding` is None where no rule spoke."""

    incident: Incident
    kind: Kind
    severity: str
    at: float
    finding: Finding | None = None


def incidents(session: Session, run_id: int, statuses: Sequence[str] = ()) -> list[Incident]:
    """The run's incidents in these statuses (all when empty), oldest first, as the database holds them now."""
    if not statuses:
        return list(session.scalars(_OF_RUN, {"b_run": run_id}))
    return list(session.scalars(_OF_RUN_IN, {"b_run": run_id, "b_statuses": tuple(statuses)}))


def verdict(session: Session, run_id: int, *, calibrated: bool) -> str:
    """`critical` or `warning` by the worst open incident, else `healthy`; `unknown` until baselines are calibrated.

    What is mitigated still warns: its cause is there, only masked.
    """
    active = session.execute(_STANDING, {"b_run": run_id}).all()
    if any(severity == "critical" and status != "mitigated" for severity, status in active):
        return "critical"
    if active:
        return "warning"
    return "healthy" if calibrated else "unknown"


def find(session: Session, incident_id: str) -> Incident:
    """The incident as the database holds it now. Raises NotFound."""
    incident = session.scalars(_FIND, {"b_id": incident_id}).first()
    if incident is None:
        raise NotFound(f"no incident {incident_id}")
    return incident


def last_attempt(incident: Incident) -> int:
    """The attempt in which it was seen last."""
    return max([incident.attempt, *(int(e["attempt"]) for e in incident.evidence if "attempt" in e)])


def count(session: Session, run_id: int, rule: str) -> int:
    """How many incidents of a rule the run has had."""
    return session.scalar(_COUNT, {"b_run": run_id, "b_rule": rule}) or 0


def latest(session: Session, run_id: int, rule: str) -> Incident | None:
    """The rule's newest incident of the run."""
    return session.scalars(_LATEST, {"b_run": run_id, "b_rule": rule}).first()


def resolved_by_rules(session: Session, incident: Incident) -> bool:
    """True where no person moved it last."""
    query = select(Audit.actor).where(Audit.subject == "incident", Audit.subject_id == incident.id)
    return session.scalar(query.order_by(Audit.id.desc()).limit(1)) == RULES


def move(
    session: Session,
    incident: Incident,
    status: str,
    now: float,
    actor: str,
    note: Mapping[str, Any] | None = None,
    **columns: Any,
) -> None:
    """Updates only if the status is still what was read. Raises WrongState where somebody was faster."""
    was = incident.status
    result = session.connection().execute(_UPDATE, {"b_id": incident.id, "b_was": was, "status": status, **columns})
    assert isinstance(result, CursorResult)
    find(session, incident.id)
    if result.rowcount != 1:
        raise WrongState(f"incident {incident.id} is {incident.status}")
    if status != was or note or actor != RULES:
        audit(session, incident, was, status, now, actor, note)


def audit(
    session: Session,
    incident: Incident,
    was: str | None,
    became: str,
    now: float,
    actor: str,
    note: Mapping[str, Any] | None = None,
) -> None:
    session.connection().execute(
        _AUDIT,
        {
            "at": now,
            "run_id": incident.run_id,
            "subject": "incident",
            "subject_id": incident.id,
            "was": was,
            "became": became,
            "actor": actor,
            "detail": {"rule": incident.rule, **(note or {})},
        },
    )

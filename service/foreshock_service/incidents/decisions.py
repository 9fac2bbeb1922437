"""What people and commands do to an incident: acknowledge it, call it over, mask it, make it worse."""

from __future__ import annotations

from sqlalchemy.orm import Session

from foreshock_service.incidents.ledger import ACTIVE, IncidentChange, WrongState, find, move
from foreshock_service.store.models import Incident


def acknowledge(session: Session, incident_id: str, by: str, now: float) -> IncidentChange:
    """A person has seen it. Raises NotFound, WrongState where it is resolved or acknowledged already."""
    incident = find(session, incident_id)
    status = "acknowledged" if incident.status == "open" else incident.status
    if incident.status == "resolved" or incident.acknowledged_by is not None:
        raise WrongState(f"incident {incident_id} is {incident.status}")
    move(session, incident, status, now, by, acknowledged_by=by)
    return IncidentChange(incident, "acknowledged", incident.severity, now)


def resolve(session: Session, incident_id: str, by: str, now: float) -> IncidentChange:
    """A person calls it over. The same illness stays quiet until it worsens or clears and comes again.

    Raises NotFound, WrongState where it is resolved already.
    """
    incident = find(session, incident_id)
    if incident.status == "resolved":
        raise WrongState(f"incident {incident_id} is resolved")
    move(session, incident, "resolved", now, by, resolved_at=now, resolved_step=incident.last_step)
    return IncidentChange(incident, "resolved", incident.severity, now)


def mitigate(session: Session, incident: Incident, by: str, now: float) -> IncidentChange | None:
    """A command masks or has cured it; the rule decides when it is over. None where it is not open any longer."""
    if incident.status not in ("open", "acknowledged"):
        return None
    move(session, incident, "mitigated", now, by)
    return IncidentChange(incident, "mitigated", incident.severity, now)


def escalate(session: Session, incident: Incident, by: str, now: float) -> IncidentChange | None:
    """A command did not help: critical, and open again if it was mitigated. None where it is resolved."""
    if incident.status not in ACTIVE:
        return None
    status = "open" if incident.status == "mitigated" else incident.status
    move(session, incident, status, now, by, severity="critical", note={"escalated": by})
    return IncidentChange(incident, "escalated", "critical", now)

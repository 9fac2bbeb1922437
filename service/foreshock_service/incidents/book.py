"""The incident book: one illness of a run is one incident, however long it lasts and however often it is seen.

`apply` turns the findings of one evaluation into rows: opened, updated, escalated, closed, or reopened within the
cool-down; and links each new incident to the earlier one that can have led to it. People acknowledge and resolve.

    open ─→ acknowledged ─→ resolved          `mitigated`: a command masks it, the cause remains; a worse turn opens it
      └──→ mitigated ──────→ resolved ─→ open (again, within the cool-down: the same incident)

Every change is a conditional update on the status that was read, so a person and two replicas cannot overrun each
other.

IncidentError
├── NotFound     no such incident
└── WrongState   not open to this step any longer
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import CursorResult, bindparam, func, insert, select, update
from sqlalchemy.orm import Session

from foreshock_service.diagnosis.signature import diagnose
from foreshock_service.diagnosis.window import recent_steps
from foreshock_service.incidents.causes import can_cause, upstream_first
from foreshock_service.incidents.conflicts import insert_ignoring
from foreshock_service.rules.interface import Finding, Observation, Outcome, StepView
from foreshock_service.store.models import Audit, Incident, Run
from foreshock_service.store.types import clean

ACTIVE: Final = ("open", "acknowledged", "mitigated")
PRECURSOR_STEPS: Final = 50
PRECURSOR_S: Final = 7200.0
"""A resolved incident counts as precursor of one that opens within so many steps (other attempt: seconds)."""
DIAGNOSED: Final = frozenset(
    {"onpolicy_disagreement", "rollout_mismatch", "stale_weights", "stale_cache", "is_degeneracy", "outlier_sequences"}
)
"""Illnesses of the log-prob pairs, which have signatures."""
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


def apply(session: Session, run: Run, seen: Observation, outcome: Outcome, now: float) -> list[IncidentChange]:
    """Writes what one evaluation found. Costs one query a step while nothing happens.

    Findings are taken causes first, so that two which open together are linked. An active incident whose rule says
    that nothing fires any longer (its state was lost to a new attempt or another rule pack) is closed as well.
    """
    active = {i.rule: i for i in incidents(session, run.id, ACTIVE)}
    changes: list[IncidentChange] = []
    for incident in active.values():
        _note_attempt(session, incident, seen)
    for finding in sorted(outcome.findings, key=lambda f: upstream_first(f.rule)):
        try:
            change = _take(session, run, seen, finding, active.get(finding.rule), now)
        except WrongState:  # a person moved it since it was read: look again, once
            again = {i.rule: i for i in incidents(session, run.id, ACTIVE)}
            change = _take(session, run, seen, finding, again.get(finding.rule), now)
        if change is not None:
            changes.append(change)
            active[finding.rule] = change.incident
            if change.kind != "resolved":
                _explain(session, change.incident, seen, outcome)
    changes += _close_forgotten(session, active, seen, outcome, now)
    return changes


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


def acknowledge(session: Session, incident_id: str, by: str, now: float) -> IncidentChange:
    """A person has seen it. Raises NotFound, WrongState where it is resolved or acknowledged already."""
    incident = find(session, incident_id)
    status = "acknowledged" if incident.status == "open" else incident.status
    if incident.status == "resolved" or incident.acknowledged_by is not None:
        raise WrongState(f"incident {incident_id} is {incident.status}")
    _move(session, incident, status, now, by, acknowledged_by=by)
    return IncidentChange(incident, "acknowledged", incident.severity, now)


def resolve(session: Session, incident_id: str, by: str, now: float) -> IncidentChange:
    """A person calls it over. The same illness stays quiet until it worsens or clears and comes again.

    Raises NotFound, WrongState where it is resolved already.
    """
    incident = find(session, incident_id)
    if incident.status == "resolved":
        raise WrongState(f"incident {incident_id} is resolved")
    _move(session, incident, "resolved", now, by, resolved_at=now, resolved_step=incident.last_step)
    return IncidentChange(incident, "resolved", incident.severity, now)


def mitigate(session: Session, incident: Incident, by: str, now: float) -> IncidentChange | None:
    """A command masks or has cured it; the rule decides when it is over. None where it is not open any longer."""
    if incident.status not in ("open", "acknowledged"):
        return None
    _move(session, incident, "mitigated", now, by)
    return IncidentChange(incident, "mitigated", incident.severity, now)


def escalate(session: Session, incident: Incident, by: str, now: float) -> IncidentChange | None:
    """A command did not help: critical, and open again if it was mitigated. None where it is resolved."""
    if incident.status not in ACTIVE:
        return None
    status = "open" if incident.status == "mitigated" else incident.status
    _move(session, incident, status, now, by, severity="critical", note={"escalated": by})
    return IncidentChange(incident, "escalated", "critical", now)


def find(session: Session, incident_id: str) -> Incident:
    """The incident as the database holds it now. Raises NotFound."""
    incident = session.scalars(_FIND, {"b_id": incident_id}).first()
    if incident is None:
        raise NotFound(f"no incident {incident_id}")
    return incident


def last_attempt(incident: Incident) -> int:
    """The attempt in which it was seen last."""
    return max([incident.attempt, *(int(e["attempt"]) for e in incident.evidence if "attempt" in e)])


def _take(
    session: Session,
    run: Run,
    seen: Observation,
    finding: Finding,
    incident: Incident | None,
    now: float,
) -> IncidentChange | None:
    if finding.transition == "close":
        return _close(session, incident, finding.step, now, finding) if incident else None
    if incident is not None:
        return _update(session, incident, seen, finding, now)
    last = _latest(session, run.id, finding.rule)
    if last is not None and last.status == "resolved":
        if finding.transition == "update" and not resolved_by_rules(session, last):
            return None  # a person called it over while the rule still fires
        if finding.transition != "open" or finding.reopens:
            return _reopen(session, last, seen, finding, now)
    return _open(session, run, seen, finding, now)


def _open(session: Session, run: Run, seen: Observation, finding: Finding, now: float) -> IncidentChange | None:
    ordinal = session.scalar(_COUNT, {"b_run": run.id, "b_rule": finding.rule})
    # The id is made of what makes it unique, so that two replicas that open the same illness collide on it.
    key = f"{run.id}:{run.created_at}:{finding.rule}:{ordinal}"
    values: dict[str, Any] = {
        "id": hashlib.sha256(key.encode()).hexdigest()[:32],
        "run_id": run.id,
        "rule": finding.rule,
        "severity": finding.severity,
        "status": "open",
        "attempt": seen.attempt,
        "opened_at": now,
        "opened_step": finding.step,
        "onset_step": finding.onset_step if finding.onset_step is not None else finding.step,
        "last_step": finding.step,
        "message": clean(finding.message),
        "edge": finding.edge,
        "evidence": _evidence(finding, seen),
        "diagnosis": {},
        "precursor_id": _precursor(session, run.id, seen, finding, now),
        "times_opened": 1,
    }
    if not insert_ignoring(session, Incident, values):
        return None
    incident = find(session, str(values["id"]))
    _audit(session, incident, None, "open", now, RULES)
    return IncidentChange(incident, "opened", finding.severity, now, finding)


def _update(
    session: Session, incident: Incident, seen: Observation, finding: Finding, now: float
) -> IncidentChange | None:
    worse = finding.transition == "escalate" or (finding.severity == "critical" and incident.severity == "warning")
    status = "open" if worse and incident.status == "mitigated" else incident.status
    _move(
        session, incident, status, now, RULES,
        severity=finding.severity if worse else incident.severity,
        last_step=finding.step if finding.step is not None else incident.last_step,
        message=clean(finding.message) or incident.message,
        edge=finding.edge or incident.edge,
        evidence=_evidence(finding, seen, incident.evidence),
    )  # fmt: skip
    return IncidentChange(incident, "escalated" if worse else "updated", incident.severity, now, finding)


def _reopen(session: Session, incident: Incident, seen: Observation, finding: Finding, now: float) -> IncidentChange:
    _move(
        session, incident, "open", now, RULES,
        severity=finding.severity,
        resolved_at=None,
        resolved_step=None,
        acknowledged_by=None,
        last_step=finding.step,
        message=clean(finding.message) or incident.message,
        edge=finding.edge or incident.edge,
        evidence=_evidence(finding, seen, incident.evidence),
        times_opened=incident.times_opened + 1,
    )  # fmt: skip
    return IncidentChange(incident, "reopened", incident.severity, now, finding)


def _close(
    session: Session, incident: Incident, step: int | None, now: float, finding: Finding | None
) -> IncidentChange | None:
    if incident.status not in ACTIVE:
        return None
    message = clean(finding.message if finding else "") or incident.message
    _move(session, incident, "resolved", now, RULES, resolved_at=now, resolved_step=step, message=message)
    return IncidentChange(incident, "resolved", incident.severity, now, finding)


def _close_forgotten(
    session: Session, active: Mapping[str, Incident], seen: Observation, outcome: Outcome, now: float
) -> list[IncidentChange]:
    """Ticks say nothing of rules that do not want them, so only a step may close what no rule holds open."""
    if not isinstance(seen, StepView):
        return []
    held = set(outcome.firing) | {f.rule for f in outcome.findings}
    closed = [_close(session, i, seen.step, now, None) for rule, i in active.items() if rule not in held]
    return [change for change in closed if change is not None]


def _explain(session: Session, incident: Incident, seen: Observation, outcome: Outcome) -> None:
    """Keeps the ranked causes as of this look with an incident of the pairs, over the steps since its onset."""
    if incident.rule not in DIAGNOSED or not isinstance(seen, StepView):
        return
    past = recent_steps(session, incident.run_id, seen.attempt, upto=seen.step)
    onset = incident.onset_step if incident.onset_step is not None else seen.step
    window = [p.values for p in past if onset <= p.step < seen.step]
    found = diagnose(
        [*window, seen.values],
        bands=outcome.bands,
        missing=seen.missing,
        settings=seen.settings,
        notices=seen.notices,
        evidence=seen.evidence,
    )
    _move(session, incident, incident.status, incident.opened_at, RULES, diagnosis=msgspec.to_builtins(found))


def _note_attempt(session: Session, incident: Incident, seen: Observation) -> None:
    """Open incidents outlive a new attempt; their evidence says when it began."""
    if seen.attempt <= last_attempt(incident):
        return
    note = {"event": "attempt", "attempt": seen.attempt, "step": seen.step, "sentence": f"attempt {seen.attempt} began"}
    _move(session, incident, incident.status, incident.opened_at, RULES, evidence=[*incident.evidence, note])


def _evidence(finding: Finding, seen: Observation, before: Sequence[Any] = ()) -> list[Any]:
    """The numbers of this look, first; the events (new attempts) of earlier ones are kept."""
    where = {"attempt": seen.attempt, "step": finding.step}
    numbers = [{**msgspec.to_builtins(item), **where} for item in finding.evidence]
    return [*numbers, *(item for item in before if isinstance(item, dict) and "event" in item)]


def _precursor(session: Session, run_id: int, seen: Observation, finding: Finding, now: float) -> str | None:
    """The earliest-opened incident that can have led here, still active or resolved a short while ago."""
    for earlier in incidents(session, run_id):
        near = earlier.status in ACTIVE or _recent(earlier, seen, now, PRECURSOR_STEPS, PRECURSOR_S)
        if near and earlier.rule != finding.rule and can_cause(earlier.rule, finding.rule):
            return earlier.id
    return None


def _recent(incident: Incident, seen: Observation, now: float, steps: int, seconds: float) -> bool:
    if last_attempt(incident) == seen.attempt and incident.resolved_step is not None and seen.step is not None:
        return seen.step - incident.resolved_step <= steps
    return incident.resolved_at is not None and now - incident.resolved_at <= seconds


def _latest(session: Session, run_id: int, rule: str) -> Incident | None:
    return session.scalars(_LATEST, {"b_run": run_id, "b_rule": rule}).first()


def resolved_by_rules(session: Session, incident: Incident) -> bool:
    query = select(Audit.actor).where(Audit.subject == "incident", Audit.subject_id == incident.id)
    return session.scalar(query.order_by(Audit.id.desc()).limit(1)) == RULES


def _move(
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
        _audit(session, incident, was, status, now, actor, note)


def _audit(
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

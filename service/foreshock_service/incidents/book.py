"""The incident book: one illness of a run is one incident, however long it lasts and however often it is seen.

`apply` turns the findings of one evaluation into rows: opened, updated, escalated, closed, or reopened within the
cool-down; and links each new incident to the earlier one that can have led to it. What people and commands do to one is
in `decisions.py`, the rows and their errors in `ledger.py`; both are called by the book's names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy.orm import Session

from foreshock_service.diagnosis.signature import diagnose
from foreshock_service.diagnosis.window import recent_steps
from foreshock_service.incidents.causes import can_cause, upstream_first
from foreshock_service.incidents.conflicts import insert_ignoring
from foreshock_service.incidents.decisions import acknowledge, escalate, mitigate, resolve
from foreshock_service.incidents.ledger import (
    ACTIVE,
    RULES,
    IncidentChange,
    IncidentError,
    NotFound,
    WrongState,
    audit,
    count,
    find,
    incidents,
    last_attempt,
    latest,
    move,
    resolved_by_rules,
    verdict,
)
from foreshock_service.rules.interface import Finding, Observation, Outcome, StepView
from foreshock_service.store.models import Incident, Run
from foreshock_service.store.types import clean

__all__ = [
    "ACTIVE", "RULES", "IncidentChange", "IncidentError", "NotFound", "WrongState", "acknowledge", "apply", "escalate",
    "find", "incidents", "last_attempt", "mitigate", "resolve", "resolved_by_rules", "verdict",
]  # fmt: skip

PRECURSOR_STEPS: Final = 50
PRECURSOR_S: Final = 7200.0
"""A resolved incident counts as precursor of one that opens within so many steps (other attempt: seconds)."""
DIAGNOSED: Final = frozenset(
    {"onpolicy_disagreement", "rollout_mismatch", "stale_weights", "stale_cache", "is_degeneracy", "outlier_sequences"}
)
"""Illnesses of the log-prob pairs, which have signatures."""


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
    last = latest(session, run.id, finding.rule)
    if last is not None and last.status == "resolved":
        if finding.transition == "update" and not resolved_by_rules(session, last):
            return None  # a person called it over while the rule still fires
        if finding.transition != "open" or finding.reopens:
            return _reopen(session, last, seen, finding, now)
    return _open(session, run, seen, finding, now)


def _open(session: Session, run: Run, seen: Observation, finding: Finding, now: float) -> IncidentChange | None:
    ordinal = count(session, run.id, finding.rule)
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
    audit(session, incident, None, "open", now, RULES)
    return IncidentChange(incident, "opened", finding.severity, now, finding)


def _update(
    session: Session, incident: Incident, seen: Observation, finding: Finding, now: float
) -> IncidentChange | None:
    worse = finding.transition == "escalate" or (finding.severity == "critical" and incident.severity == "warning")
    status = "open" if worse and incident.status == "mitigated" else incident.status
    move(
        session, incident, status, now, RULES,
        severity=finding.severity if worse else incident.severity,
        last_step=finding.step if finding.step is not None else incident.last_step,
        message=clean(finding.message) or incident.message,
        edge=finding.edge or incident.edge,
        evidence=_evidence(finding, seen, incident.evidence),
    )  # fmt: skip
    return IncidentChange(incident, "escalated" if worse else "updated", incident.severity, now, finding)


def _reopen(session: Session, incident: Incident, seen: Observation, finding: Finding, now: float) -> IncidentChange:
    move(
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
    move(session, incident, "resolved", now, RULES, resolved_at=now, resolved_step=step, message=message)
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
    move(session, incident, incident.status, incident.opened_at, RULES, diagnosis=msgspec.to_builtins(found))


def _note_attempt(session: Session, incident: Incident, seen: Observation) -> None:
    """Open incidents outlive a new attempt; their evidence says when it began."""
    if seen.attempt <= last_attempt(incident):
        return
    note = {"event": "attempt", "attempt": seen.attempt, "step": seen.step, "sentence": f"attempt {seen.attempt} began"}
    move(session, incident, incident.status, incident.opened_at, RULES, evidence=[*incident.evidence, note])


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

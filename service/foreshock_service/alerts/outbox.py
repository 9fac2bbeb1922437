"""The transactional outbox: an alert is a row written with the change that it tells of, or not at all.

What is told: incidents opened, reopened, escalated, mitigated and resolved, with the commands of the same step;
commands that wait for a person, that ended badly (failed, refused, expired, lost), that were carried out, and verdicts.
The dedupe key is made of what changed, so the same change is one alert per channel whichever replica writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from foreshock_service.commands.protocol import CommandChange
from foreshock_service.incidents.book import IncidentChange
from foreshock_service.incidents.conflicts import insert_ignoring
from foreshock_service.store.models import Delivery, Incident, Run, Silence

INCIDENT_EVENTS: Final = frozenset({"opened", "reopened", "escalated", "mitigated", "resolved"})
COMMAND_EVENTS: Final = frozenset({"proposed", "done", "failed", "refused", "expired", "lost"})
SHOWN_CAUSES: Final = 3


class Outbox:
    """Knows which channels there are; `enqueue` is what evaluator and API call, inside their transactions."""

    def __init__(self, channels: Iterable[str]) -> None:
        self.channels = tuple(channels)

    def __call__(
        self,
        session: Session,
        run: Run,
        changes: Sequence[IncidentChange],
        commands: Sequence[CommandChange],
        now: float,
    ) -> int:
        """The same as `enqueue`."""
        return self.enqueue(session, run, changes, commands, now)

    def enqueue(
        self,
        session: Session,
        run: Run,
        changes: Sequence[IncidentChange],
        commands: Sequence[CommandChange],
        now: float,
    ) -> int:
        """Writes the alerts of these changes and returns how many are new. Without channels it costs nothing."""
        if not self.channels:
            return 0
        told = set[str]()
        written = 0
        for change in changes:
            if change.kind not in INCIDENT_EVENTS:
                continue
            incident = change.incident
            of_incident = [c for c in commands if c.command.incident_id == incident.id]
            told.update(c.command.id for c in of_incident)
            key = f"incident:{incident.id}:{incident.times_opened}:{change.kind}:{change.severity}"
            payload = _payload(run, incident, of_incident, now)
            written += self._write(session, run, incident, f"incident.{change.kind}", key, payload, now)
        for command in commands:
            event = _command_event(command, told)
            if event is None:
                continue
            about = session.get(Incident, command.command.incident_id) if command.command.incident_id else None
            key = f"command:{command.command.id}:{command.became}"
            written += self._write(session, run, about, event, key, _payload(run, about, [command], now), now)
        return written

    def _write(
        self, session: Session, run: Run, incident: Incident | None, event: str, key: str, payload: Any, now: float
    ) -> int:
        quiet = silenced(session, run, incident.rule if incident else None, now)
        written = 0
        for channel in self.channels:
            values = {
                # The id is made of what makes it unique, and stays the same at every try.
                "id": hashlib.sha256(f"{channel}:{key}".encode()).hexdigest()[:32],
                "run_id": run.id,
                "incident_id": incident.id if incident else None,
                "channel": channel,
                "event": event,
                "dedupe_key": key[:160],
                "payload": payload,
                "state": "suppressed" if quiet else "pending",
                "attempts": 0,
                "next_at": now,
                "lease_until": 0.0,
                "created_at": now,
                "last_error": "silenced" if quiet else "",
            }
            written += insert_ignoring(session, Delivery, values)
        return written


def silenced(session: Session, run: Run, rule: str | None, now: float) -> bool:
    """True where a silence in force matches: each part that it names must match, and it must name one."""
    query = select(Silence).where(
        Silence.until_at > now,
        or_(Silence.project.is_(None), Silence.project == run.project),
        or_(Silence.run.is_(None), Silence.run == run.name),
        Silence.rule.is_(None) if rule is None else or_(Silence.rule.is_(None), Silence.rule == rule),
    )
    return session.scalars(query.limit(1)).first() is not None


def _command_event(change: CommandChange, told: set[str]) -> str | None:
    became, _, verdict = change.became.partition(":")
    if verdict:
        return f"command.{verdict}" if verdict != "undecided" else None
    if became not in COMMAND_EVENTS or change.was == change.became:
        return None
    # A proposal is news by itself only where a person must act and its incident was not just told of.
    if became == "proposed" and (change.command.id in told or change.command.state != "proposed"):
        return None
    return f"command.{became}"


def _payload(run: Run, incident: Incident | None, commands: Sequence[CommandChange], now: float) -> dict[str, Any]:
    """What every channel is given; it holds no secret and no text of the training data."""
    latest = {c.command.id: c for c in commands}
    return {
        "run": run.name,
        "project": run.project,
        "at": now,
        "mode": run.mode or "observe",
        "path": f"/runs/{run.name}",
        "incident": _incident(incident) if incident is not None else None,
        "cause": (incident.diagnosis or {}).get("sentence") if incident is not None else None,
        "commands": [_command(c) for c in latest.values()],
    }


def _incident(incident: Incident) -> dict[str, Any]:
    causes = (incident.diagnosis or {}).get("causes") or []
    return {
        "id": incident.id,
        "rule": incident.rule,
        "severity": incident.severity,
        "status": incident.status,
        "attempt": incident.attempt,
        "onset_step": incident.onset_step,
        "opened_step": incident.opened_step,
        "resolved_step": incident.resolved_step,
        "message": incident.message,
        "edge": incident.edge,
        "evidence": list(incident.evidence)[:16],
        "causes": [{k: c.get(k) for k in ("name", "score", "title")} for c in causes[:SHOWN_CAUSES]],
        "precursor_id": incident.precursor_id,
    }


def _command(change: CommandChange) -> dict[str, Any]:
    row = change.command
    return {
        "id": row.id,
        "kind": row.kind,
        "became": change.became,
        "state": row.state,
        "reason": row.reason,
        "advisory": bool((row.detail or {}).get("advisory")),
        "step": row.issued_step,
        "done_step": row.done_step,
        "verdict": row.verdict,
    }

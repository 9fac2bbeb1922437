"""The transactional outbox: an alert is a row written with the change that it tells of, or not at all.

What is told: incidents opened, reopened, escalated, mitigated and resolved, with the commands of the same step;
commands that wait for a person, that ended badly (failed, refused, expired, lost), that were carried out, and verdicts.
Channels that show the present state (`follows`) are also told what people decided. The dedupe key is made of what
changed, so the same change is one alert per channel whichever replica writes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from foreshock_service.alerts.payload import payload
from foreshock_service.alerts.silences import in_force
from foreshock_service.commands.protocol import POLICY, CommandChange
from foreshock_service.incidents.book import IncidentChange
from foreshock_service.incidents.conflicts import insert_ignoring
from foreshock_service.store.models import Delivery, Incident, Run

INCIDENT_EVENTS: Final = frozenset({"opened", "reopened", "escalated", "mitigated", "resolved"})
COMMAND_EVENTS: Final = frozenset({"proposed", "done", "failed", "refused", "expired", "lost"})
DECISIONS: Final = frozenset({"approved", "rejected", "cancelled"})
FOLLOWED: Final = frozenset({"incident.acknowledged", *(f"command.{became}" for became in DECISIONS)})
"""Told only to channels that follow: who decided is no news, but what they show would be wrong without it."""


class Outbox:
    """Knows which channels there are; `enqueue` is what evaluator and API call, inside their transactions."""

    def __init__(self, channels: Iterable[str], followers: Collection[str] = ()) -> None:
        self.channels = tuple(channels)
        self._followers = tuple(c for c in self.channels if c in followers)

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
            event = f"incident.{change.kind}"
            if change.kind not in INCIDENT_EVENTS and event not in FOLLOWED:
                continue
            incident = change.incident
            of_incident = [(c.command, c.became) for c in commands if c.command.incident_id == incident.id]
            told.update(row.id for row, _ in of_incident)
            key = f"incident:{incident.id}:{incident.times_opened}:{change.kind}:{change.severity}"
            written += self._write(
                session, run, incident, incident.id, event, key, payload(run, incident, of_incident, now), now
            )
        for command in commands:
            found = _command_event(command, told)
            if found is None:
                continue
            about = session.get(Incident, command.command.incident_id) if command.command.incident_id else None
            body = payload(run, about, [(command.command, command.became)], now)
            line = about.id if about is not None else command.command.id
            key = f"command:{command.command.id}:{command.became}"
            written += self._write(session, run, about, line, found, key, body, now)
        return written

    def _write(
        self,
        session: Session,
        run: Run,
        incident: Incident | None,
        line: str,
        event: str,
        key: str,
        body: dict[str, Any],
        now: float,
    ) -> int:
        channels = self._followers if event in FOLLOWED else self.channels
        silences = in_force(session, now) if channels else None
        written = 0
        for channel in channels:
            rule = incident.rule if incident is not None else None
            quiet = silences is not None and silences.match(channel, event, run.project, run.name, rule)
            values = {
                # The id is made of what makes it unique, and stays the same at every try.
                "id": hashlib.sha256(f"{channel}:{key}".encode()).hexdigest()[:32],
                "run_id": run.id,
                "incident_id": incident.id if incident else None,
                "line": line,
                "ordinal": _next_ordinal(session),
                "channel": channel,
                "event": event,
                "dedupe_key": key[:160],
                "payload": body,
                "state": "suppressed" if quiet else "pending",
                "attempts": 0,
                "next_at": now,
                "lease_until": 0.0,
                "created_at": now,
                "last_error": "silenced" if quiet else "",
            }
            written += insert_ignoring(session, Delivery, values)
        return written


def _next_ordinal(session: Session) -> int:
    """Higher than any before. PostgreSQL counts in a sequence; SQLite lets one writer in, who may look."""
    if session.get_bind().dialect.name == "postgresql":
        return int(session.execute(text("SELECT nextval('deliveries_ordinal')")).scalar_one())
    return (session.scalar(select(func.max(Delivery.ordinal))) or 0) + 1


def _command_event(change: CommandChange, told: set[str]) -> str | None:
    became, _, verdict = change.became.partition(":")
    if verdict:
        return f"command.{verdict}" if verdict != "undecided" else None
    if change.was == change.became:
        return None
    if became in DECISIONS:
        # What policy decides is told with the incident, and what it takes back nobody has to know.
        return f"command.{became}" if change.actor != POLICY and change.command.id not in told else None
    if became not in COMMAND_EVENTS:
        return None
    # A proposal is news by itself only where a person must act and its incident was not just told of.
    if became == "proposed" and (change.command.id in told or change.command.state != "proposed"):
        return None
    return f"command.{became}"

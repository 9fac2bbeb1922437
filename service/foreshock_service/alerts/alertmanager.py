"""`alertmanager`: alerts as Prometheus Alertmanager takes them, `POST /api/v2/alerts`.

An incident is one alert: its labels stay the same from opening to resolution, so a repeat changes nothing. Alertmanager
lets an alert end by itself where it is not sent again; Foreshock tells of changes only, so an open incident is posted
with an end far away and a resolved one with its end now. Severity is a label (routes need it); on a change of severity
the alert under the other one ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import httpx

from foreshock_service.alerts.base import Channel, Message, post
from foreshock_service.alerts.words import headline, paragraphs
from foreshock_service.store.types import dump_json

PATH: Final = "/api/v2/alerts"
INCIDENT_HOLD_S: Final = 7 * 86_400.0
"""How long an open incident stays firing if its resolution never arrives."""
COMMAND_HOLD_S: Final = 3600.0
"""How long a command that waits or ended badly is shown; nothing resolves it."""
SETTLED: Final = frozenset({"command.done", "command.helped"})
SEVERITIES: Final = ("warning", "critical")


class Alertmanager(Channel):
    """`url` is Alertmanager's base; a user and password in it are sent as basic authentication."""

    name = "alertmanager"
    digest_every_s = 0.0

    def __init__(self, client: httpx.Client, url: str, public_url: str = "") -> None:
        super().__init__(client, public_url)
        self._url = url.rstrip("/") + PATH

    def send(self, message: Message, now: float) -> None:
        """One alert."""
        self._post(list(self._alerts(message, now)))

    def send_digest(self, messages: Sequence[Message], now: float) -> None:
        """Many alerts in one request, whole: grouping them is what Alertmanager is for. Of one alert, the newest."""
        latest: dict[str, dict[str, Any]] = {}
        for message in sorted(messages, key=lambda m: m.created_at):
            for alert in self._alerts(message, now):
                latest[dump_json(alert["labels"])] = alert
        self._post(list(latest.values()))

    def _post(self, alerts: list[dict[str, Any]]) -> None:
        if alerts:
            post(self.client, self._url, dump_json(alerts).encode(), {})

    def _alerts(self, message: Message, now: float) -> Iterator[dict[str, Any]]:
        payload = message.payload
        if message.late:
            return  # it was dead, and a later word on the same incident stands by now
        common = {"run": str(payload.get("run", "")), "project": str(payload.get("run", "")).partition("/")[0]}
        if message.event.startswith("command."):
            for command in payload.get("commands") or ():
                yield self._command(message, command, common, now)
            return
        incident: Mapping[str, Any] = payload.get("incident") or {}
        labels = {**common, "alertname": str(incident.get("rule", "")), "incident": str(incident.get("id", ""))}
        resolved = message.event == "incident.resolved"
        severity = str(incident.get("severity") or "warning")
        ends_at = now if resolved else now + INCIDENT_HOLD_S
        yield self._alert(message, {**labels, "severity": severity}, ends_at, over=resolved)
        if resolved or message.event == "incident.escalated":
            for other in SEVERITIES:
                if other != severity:
                    yield self._alert(message, {**labels, "severity": other}, now, over=True)

    def _command(
        self, message: Message, command: Mapping[str, Any], common: Mapping[str, str], now: float
    ) -> dict[str, Any]:
        labels = {
            **common,
            "alertname": "foreshock_command",
            "command": str(command.get("id", "")),
            "kind": str(command.get("kind", "")),
            "severity": "warning",
        }
        settled = message.event in SETTLED
        return self._alert(message, labels, now if settled else now + COMMAND_HOLD_S, over=settled)

    def _alert(self, message: Message, labels: Mapping[str, str], ends_at: float, *, over: bool) -> dict[str, Any]:
        annotations = {"summary": headline(message), "delivery_id": message.delivery_id}
        annotations |= {title.lower().replace(" ", "_"): text for title, text in paragraphs(message)}
        alert: dict[str, Any] = {
            "labels": {k: v for k, v in labels.items() if v},
            "annotations": annotations,
            "endsAt": _rfc3339(ends_at),
        }
        if not over:
            # An ended alert without a start takes its end for it; Alertmanager keeps the earlier start it knows.
            alert["startsAt"] = _rfc3339(message.created_at)
        if link := self.link(message.payload):
            alert["generatorURL"] = link
        return alert


def _rfc3339(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()

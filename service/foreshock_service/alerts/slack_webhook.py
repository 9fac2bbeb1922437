"""`slack_webhook`: a Block Kit message through an incoming webhook, which can neither edit nor thread nor upload.

What, since when, the likely cause, the evidence, what Foreshock did or proposes, and a link.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from foreshock_service.alerts.base import Channel, Message, post
from foreshock_service.store.types import dump_json

TEXT_LIMIT = 2900
"""Slack takes 3000 characters in one text block."""
SHOWN_NUMBERS = 5
SHOWN_ALERTS = 15
MARKS = {"critical": ":rotating_light:", "warning": ":warning:"}


class SlackWebhook(Channel):
    """The URL is the secret: it is in no message, error or log."""

    name = "slack_webhook"

    def __init__(self, client: httpx.Client, url: str, public_url: str = "") -> None:
        super().__init__(client, public_url)
        self._url = url

    def send(self, message: Message, now: float) -> None:
        """One alert."""
        blocks = list(_blocks(message, self.link(message.payload)))
        self._post(_headline(message), blocks)

    def send_digest(self, messages: Sequence[Message], now: float) -> None:
        """Many alerts as one list, the first fifteen by name."""
        counts = Counter(m.event for m in messages)
        title = f"{len(messages)} alerts: " + ", ".join(f"{n} x {event}" for event, n in counts.most_common())
        lines = [f"• {_headline(m)}" for m in messages[:SHOWN_ALERTS]]
        if len(messages) > SHOWN_ALERTS:
            lines.append(f"… and {len(messages) - SHOWN_ALERTS} more")
        self._post(title, [_header(title), _section("\n".join(lines))])

    def _post(self, text: str, blocks: list[dict[str, Any]]) -> None:
        post(self.client, self._url, dump_json({"text": text, "blocks": blocks}).encode(), {})


def escaped(text: object) -> str:
    """Slack's three control characters, so that a run's name or message never becomes a link or a mention."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _headline(message: Message) -> str:
    payload = message.payload
    incident: Mapping[str, Any] = payload.get("incident") or {}
    run = escaped(payload.get("run", ""))
    verb = message.event.partition(".")[2].replace("_", " ")
    if message.event.startswith("command."):
        command: Mapping[str, Any] = (payload.get("commands") or [{}])[0]
        about = f" for {escaped(incident['rule'])}" if incident else ""
        return f"{run}: command {escaped(command.get('kind', ''))} {verb}{about}"
    mark = MARKS.get(str(incident.get("severity")), "") if verb != "resolved" else ":white_check_mark:"
    return f"{mark} {run}: {escaped(incident.get('rule', ''))} {verb}".strip()


def _blocks(message: Message, link: str | None) -> Sequence[dict[str, Any]]:
    payload = message.payload
    incident: Mapping[str, Any] = payload.get("incident") or {}
    blocks = [_header(_headline(message))]
    if incident:
        since = f"since step {incident.get('onset_step')}, seen at step {incident.get('opened_step')}"
        where = f", attempt {incident.get('attempt')}"
        blocks.append(
            _section(f"*{escaped(incident.get('severity'))}* {since}{where}\n{escaped(incident.get('message'))}")
        )
    if cause := payload.get("cause"):
        blocks.append(_section(f"*Likely cause*\n{escaped(cause)}"))
    if numbers := [e for e in incident.get("evidence", ()) if "signal" in e][:SHOWN_NUMBERS]:
        blocks.append(_section("*Evidence*\n" + "\n".join(_number(e) for e in numbers)))
    if commands := payload.get("commands"):
        blocks.append(_section("*Foreshock*\n" + "\n".join(_command(c) for c in commands)))
    if link:
        blocks.append(_section(f"<{link}|Open in Foreshock>"))
    return blocks


def _number(evidence: Mapping[str, Any]) -> str:
    value, expected = evidence.get("value"), evidence.get("expected")
    shown = f"{value:.3g}" if isinstance(value, float) else str(value)
    usual = f" (usual: {expected:.3g})" if isinstance(expected, float) else ""
    return f"• `{escaped(evidence['signal'])}` = {shown}{usual}"


def _command(command: Mapping[str, Any]) -> str:
    advice = "would do (the run only observes)" if command.get("advisory") else escaped(command.get("became"))
    return f"• `{escaped(command.get('kind'))}`: {advice}. {escaped(command.get('reason', ''))}"


def _header(text: str) -> dict[str, Any]:
    return {"type": "header", "text": {"type": "plain_text", "text": text[:150], "emoji": True}}


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:TEXT_LIMIT]}}

"""An alert as plain text: one line for a subject, a few for a body. Shared by the channels that carry no markup."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from foreshock_service.alerts.base import Message

SHOWN_NUMBERS = 8


def headline(message: Message) -> str:
    """One line without line breaks: severity, run, what happened."""
    payload = message.payload
    incident: Mapping[str, Any] = payload.get("incident") or {}
    run = str(payload.get("run", ""))
    verb = message.event.partition(".")[2].replace("_", " ")
    if message.event.startswith("command."):
        about = f" for {incident['rule']}" if incident else ""
        return _line(f"{run}: command {_first(payload).get('kind', '')} {verb}{about}")
    severity = f"{incident.get('severity')}: " if verb != "resolved" else ""
    return _line(f"{severity}{run}: {incident.get('rule', '')} {verb}")


def paragraphs(message: Message) -> Iterator[tuple[str, str]]:
    """(title, text) of each part that the alert has: what, cause, evidence, what Foreshock did or proposes."""
    payload = message.payload
    incident: Mapping[str, Any] = payload.get("incident") or {}
    if incident:
        since = f"since step {incident.get('onset_step')}, seen at step {incident.get('opened_step')}"
        yield "What", f"{incident.get('message')} ({since}, attempt {incident.get('attempt')})"
    if cause := payload.get("cause"):
        yield "Likely cause", str(cause)
    if numbers := [number(e) for e in incident.get("evidence", ()) if "signal" in e][:SHOWN_NUMBERS]:
        yield "Evidence", "\n".join(numbers)
    if commands := payload.get("commands"):
        yield "Foreshock", "\n".join(command(c) for c in commands)


def number(evidence: Mapping[str, Any]) -> str:
    """`mismatch.kl_k3 = 0.125 (usual: 0.0005)`."""
    value, expected = evidence.get("value"), evidence.get("expected")
    shown = f"{value:.3g}" if isinstance(value, float) else str(value)
    usual = f" (usual: {expected:.3g})" if isinstance(expected, float) else ""
    return f"{evidence['signal']} = {shown}{usual}"


def command(told: Mapping[str, Any]) -> str:
    """`resync_engine: proposed. Why.`"""
    what = "would do (the run only observes)" if told.get("advisory") else told.get("became")
    return f"{told.get('kind')}: {what}. {told.get('reason', '')}".rstrip()


def _first(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    commands = payload.get("commands") or [{}]
    first: Mapping[str, Any] = commands[0]
    return first


def _line(text: str) -> str:
    return " ".join(text.split())

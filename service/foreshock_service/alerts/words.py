"""An alert as plain text: one line for a subject, a few for a body. Shared by the channels.

Names of runs and signals come from clients, reasons from people: `tame` takes from them what a mail reader, a chat or a
template behind Alertmanager would act on.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from foreshock_service.alerts.base import Message

SHOWN_NUMBERS = 8
_SLACK_CONTROL: Final = re.compile(r"<(?=[!@#]|[a-zA-Z][a-zA-Z0-9+.-]*:)")
_SCHEME: Final = re.compile(r"://|(?<=\bmailto):|(?<=\bjavascript):", re.IGNORECASE)
_AT_ALL: Final = re.compile(r"@(?=(?:channel|here|everyone|all)\b)", re.IGNORECASE)
BREAK: Final = "\u200b"
"""Zero width: shows as nothing, and stops readers from making links and mentions."""


def headline(message: Message) -> str:
    """One line without line breaks: severity, run, what happened."""
    payload = message.payload
    incident: Mapping[str, Any] = payload.get("incident") or {}
    run = str(payload.get("run", ""))
    verb = verb_of(message.event)
    if message.event.startswith("command."):
        about = f" for {incident['rule']}" if incident else ""
        return one_line(f"{run}: command {_first(payload).get('kind', '')} {verb}{about}")
    severity = f"{incident.get('severity')}: " if verb != "resolved" else ""
    return one_line(f"{severity}{run}: {incident.get('rule', '')} {verb}")


def paragraphs(message: Message) -> Iterator[tuple[str, str]]:
    """(title, text) of each part that the alert has: what, cause, evidence, what Foreshock did or proposes."""
    payload = message.payload
    incident: Mapping[str, Any] = payload.get("incident") or {}
    if incident:
        since = f"since step {incident.get('onset_step')}, seen at step {incident.get('opened_step')}"
        yield "What", tame(f"{incident.get('message')} ({since}, attempt {incident.get('attempt')})")
    if cause := payload.get("cause"):
        yield "Likely cause", tame(str(cause))
    if numbers := [number(e) for e in incident.get("evidence", ()) if "signal" in e][:SHOWN_NUMBERS]:
        yield "Evidence", "\n".join(tame(n) for n in numbers)
    if commands := payload.get("commands"):
        yield "Foreshock", "\n".join(tame(command(c)) for c in commands)


def verb_of(event: str) -> str:
    """`no effect` of `command.no_effect`."""
    return event.partition(".")[2].replace("_", " ")


def number(evidence: Mapping[str, Any], name: Callable[[Any], str] = str, text: Callable[[Any], str] = str) -> str:
    """`mismatch.kl_k3 = 0.125 (usual: 0.0005)`; `name` and `text` write the signal and a value that is no number."""
    value, expected = evidence.get("value"), evidence.get("expected")
    shown = f"{value:.3g}" if isinstance(value, float) else text(value)
    usual = f" (usual: {expected:.3g})" if isinstance(expected, float) else ""
    return f"{name(evidence['signal'])} = {shown}{usual}"


def command(told: Mapping[str, Any]) -> str:
    """`resync_engine: proposed. Why.`"""
    what = "would do (the run only observes)" if told.get("advisory") else told.get("became")
    return f"{told.get('kind')}: {what}. {told.get('reason', '')}".rstrip()


def tame(text: str) -> str:
    """Text that nothing acts on: no Slack control sequence, link, mention of everyone, or invisible character."""
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf"))
    text = _SLACK_CONTROL.sub("‹", text)
    text = _SCHEME.sub(lambda m: m[0][:1] + BREAK + m[0][1:], text)
    return _AT_ALL.sub(f"@{BREAK}", text)


def one_line(text: str) -> str:
    """Tamed, and on one line."""
    return tame(" ".join(text.split()))


def _first(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    commands = payload.get("commands") or [{}]
    first: Mapping[str, Any] = commands[0]
    return first

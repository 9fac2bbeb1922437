"""Clicks that come back from Slack: is it Slack, who is it, what do they want, may they.

https://docs.slack.dev/authentication/verifying-requests-from-slack: HMAC-SHA256 of `v0:timestamp:body` with the app's
signing secret; five minutes old at most, compared in constant time (by Slack's own verifier). A click that is sent
again within the five minutes changes nothing: the command is then not where the first one found it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs

from slack_sdk.signature import Clock, SignatureVerifier

from foreshock_service.alerts.slack_blocks import APPROVE, REJECT

SCOPES: Final = ("commands:approve", "commands:reject", "operate")
VERBS: Final = {APPROVE: "approve", REJECT: "reject"}
_SECONDS: Final = re.compile(r"[0-9]{1,12}")
_SIGNATURE: Final = re.compile(r"v0=[0-9a-f]{64}")
_USER: Final = re.compile(r"([UW][A-Z0-9]{2,20})(?:@([A-Za-z0-9._-]{1,128}))?\s*=\s*([a-z: ]+)")
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class SlackUser:
    """What one person may do by clicking, in one project or (None) in all."""

    id: str
    scopes: frozenset[str]
    project: str | None = None

    @property
    def name(self) -> str:
        """As the audit log has it."""
        return f"slack:{self.id}"

    def may(self, verb: str, project: str) -> bool:
        covered = self.project is None or self.project == project
        return covered and not self.scopes.isdisjoint({f"commands:{verb}", "operate"})


@dataclass(frozen=True, slots=True)
class Click:
    """One button pressed by one person."""

    user: str
    verb: str
    command_id: str
    conversation: str
    thread_ts: str | None


def users(text: str) -> dict[str, SlackUser]:
    """`U0AAA=commands:approve commands:reject; U0BBB@math=operate` as Slack id → person. Raises ValueError."""
    found: dict[str, SlackUser] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        match = _USER.fullmatch(entry)
        scopes = frozenset(match[3].split()) if match else frozenset[str]()
        if match is None or not scopes or not scopes.issubset(SCOPES):
            raise ValueError(f"Slack user {entry!r}: write `U0123=commands:approve`, scopes are {', '.join(SCOPES)}")
        found[match[1]] = SlackUser(match[1], scopes, match[2])
    return found


class _Clock(Clock):
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock()


class Clicks:
    """One Slack app's signing secret and the people it knows."""

    def __init__(self, signing_secret: str, known: Mapping[str, SlackUser], clock: Callable[[], float] = time.time):
        self._verifier = SignatureVerifier(signing_secret, _Clock(clock))
        self._known = dict(known)

    def genuine(self, body: bytes, timestamp: str | None, signature: str | None) -> bool:
        """True where Slack signed this body within the last five minutes."""
        if not (timestamp and signature and _SECONDS.fullmatch(timestamp) and _SIGNATURE.fullmatch(signature)):
            return False
        try:
            return self._verifier.is_valid(body, timestamp, signature)
        except UnicodeDecodeError:
            return False

    def person(self, user: str) -> SlackUser | None:
        """Who is behind a Slack id, if the settings know them."""
        return self._known.get(user)

    @staticmethod
    def read(body: bytes) -> Click | None:
        """The button that was pressed; None for anything else that Slack sends here. Raises ValueError."""
        fields = parse_qs(body.decode(), max_num_fields=10)
        payload: Any = json.loads(fields.get("payload", ["null"])[0])
        if not isinstance(payload, dict):
            raise ValueError("no payload")
        actions = payload.get("actions")
        if payload.get("type") != "block_actions" or not isinstance(actions, list) or not actions:
            return None
        action, user = actions[0], payload.get("user")
        if not isinstance(action, dict) or not isinstance(user, dict) or action.get("action_id") not in VERBS:
            return None
        command, place = str(action.get("value", "")), payload.get("container") or {}
        if not _ID.fullmatch(command):
            raise ValueError("no command")
        message = payload.get("message") or {}
        thread = message.get("thread_ts") or place.get("thread_ts") or place.get("message_ts")
        return Click(
            user=str(user.get("id", "")),
            verb=VERBS[action["action_id"]],
            command_id=command,
            conversation=str(place.get("channel_id") or (payload.get("channel") or {}).get("id") or ""),
            thread_ts=str(thread) if thread else None,
        )

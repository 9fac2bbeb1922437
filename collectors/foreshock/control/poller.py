"""The controller's second daemon thread: asks for commands by long-poll, also while the trainer is paused."""

from __future__ import annotations

import random
import threading
import time
from logging import getLogger
from typing import Any
from urllib.parse import urlencode

import msgspec

from foreshock.control.acceptance import Acceptance
from foreshock.guard import Guard
from foreshock.settings import Settings
from foreshock.transport.http import Answer, Http
from foreshock.wire.commands import Command

_log = getLogger("foreshock")


class Health(msgspec.Struct, kw_only=True):
    """What the poller reads of `GET /v1/runs/{run}/health`."""

    verdict: str = "unknown"
    seen: str | None = None
    """What the service can tell news by; sent back with the next question."""
    commands: list[msgspec.Raw] = []


class Poller:
    """Asks until closed. An early answer without news slows it down, so that no service can make it spin."""

    def __init__(self, settings: Settings, run: str, client: str, acceptance: Acceptance, guard: Guard) -> None:
        self._settings = settings
        self._path = f"/v1/runs/{run}/health"
        self._client = client
        self._acceptance = acceptance
        self._guard = guard
        self._http = Http(settings)
        self._random = random.Random()
        self._closed = threading.Event()
        self._nudge = threading.Event()
        """Ends a pause early."""
        self._thread: threading.Thread | None = None
        self._seen: str | None = None
        self._failures = 0

    def ensure_thread(self) -> None:
        """Starts the thread, or starts it again if it died."""
        if self._closed.is_set() or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._run, name="foreshock-poller", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # interpreter shutdown
            self._thread = None

    def close(self) -> None:
        """Takes no further command; does not wait for the thread."""
        self._acceptance.open = False
        self._closed.set()
        self._nudge.set()

    def hurry(self) -> None:
        """The service has just answered another question: what failed before is worth asking again now."""
        if self._failures:
            self._nudge.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                pause = self._ask()
            except Exception as error:
                self._guard.caught_in_thread("poller", error)
                pause = 1.0
            if pause:
                self._nudge.wait(pause)
            self._nudge.clear()

    def _ask(self) -> float:
        """Asks once; returns how long to pause before the next time, in seconds."""
        query: dict[str, Any] = {"wait": self._settings.poll_s, "client": self._client}
        if self._seen is not None:
            query["seen"] = self._seen
        began = time.monotonic()
        answer = self._http.get(
            f"{self._path}?{urlencode(query)}", timeout_s=self._settings.poll_s + self._settings.timeout_s
        )
        if not answer.ok:
            return self._failed(answer)
        health = _health(answer.body)
        if health is None:
            return self._failed(answer)
        self._failures = 0
        news = health.seen is not None and health.seen != self._seen
        self._seen = health.seen
        taken = self._acceptance.offer(_commands(health), self._http)
        if taken or (news and not health.commands) or time.monotonic() - began > 0.5:
            return 0.0
        return 0.1

    def _failed(self, answer: Answer) -> float:
        self._failures += 1
        longest = self._settings.backoff_max_s
        pause = min(longest, self._settings.backoff_s * 2.0 ** min(self._failures - 1, 20))
        pause *= self._random.uniform(0.5, 1.0)
        if answer.status == 404:
            pause = min(pause, 1.0)  # the run is not known before its first envelope
        return max(pause, min(answer.retry_after_s or 0.0, self._settings.retry_after_max_s))


def _health(body: bytes) -> Health | None:
    try:
        return msgspec.json.decode(body, type=Health)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _commands(health: Health) -> list[Command]:
    """Those that can be read: one from a newer service spoils itself alone."""
    commands = []
    for raw in health.commands:
        try:
            commands.append(msgspec.json.decode(raw, type=Command))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            _log.warning("foreshock: a command cannot be read: %s", error)
    return commands

"""From a command that the service offers to one that waits in the inbox: checked, claimed, accepted.

Only a command of this run, this attempt and announced kinds is taken. Its acceptance must be confirmed by the service
before it is queued: no answer, no execution.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

import msgspec

from foreshock.control.inbox import Inbox, Pending
from foreshock.transport.clock import boot_s
from foreshock.transport.http import Answer, Http
from foreshock.transport.losses import Losses
from foreshock.wire.commands import COMMAND_KINDS, Ack, Command

ACCEPT_S = 5.0
"""Longest wait for the answer to an acceptance."""
PAUSE_S = 0.2
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


class Acceptance:
    """Shared by the threads that hear of commands; each brings its own `Http`."""

    def __init__(
        self,
        run: str,
        client: str,
        inbox: Inbox,
        losses: Losses,
        capabilities: Callable[[], Collection[str]],
        answer: Callable[[str, Ack], None],
    ) -> None:
        self._run = run
        self._client = client
        self._inbox = inbox
        self._losses = losses
        self._capabilities = capabilities
        self._answer = answer
        self.attempt: int | None = None
        """The service's number of this process's attempt; None until it said so, and then nothing is taken."""
        self.open = True

    def offer(self, commands: list[Command], http: Http) -> int:
        """Takes what may be taken; returns how many were. The expiry of each counts from now."""
        received_s = boot_s()
        return sum(self._take(command, received_s, http) for command in commands)

    def _take(self, command: Command, received_s: float, http: Http) -> bool:
        if not self.open or self.attempt is None:
            return False  # offered again later, if it is still wanted
        if not self._inbox.claim(command.id):
            return False
        if not self._ours(command):
            self._losses.add("command_ignored")
            return False
        unannounced = [action.kind for action in command.actions if action.kind not in self._capabilities()]
        if unannounced:
            self._losses.add("command_ignored")
            self._refuse(command, f"{unannounced[0]} was not announced")
            return False
        expires_s = received_s + command.expires_in_s
        ack = Ack(state="accepted", client=self._client, attempt=command.attempt)
        answer = self._accept(command, ack, http)
        if answer.ok and boot_s() < expires_s:
            self._inbox.put(Pending(command, expires_s))
            return True
        if answer.ok or answer.keep:
            # It may have been accepted without our knowing. It will not be executed, and the service shall know.
            self._refuse(command, "expired before it was accepted" if answer.ok else "the acceptance was not answered")
        return False

    def _accept(self, command: Command, ack: Ack, http: Http) -> Answer:
        """Asks a second time where the first was not answered: the service confirms a repeated acceptance."""
        body = msgspec.json.encode(ack)
        for last in (False, True):
            answer = http.post(f"/v1/commands/{command.id}/ack", body, {"Content-Type": "application/json"}, ACCEPT_S)
            if not answer.keep or last:
                break
            time.sleep(PAUSE_S)
        return answer

    def _ours(self, command: Command) -> bool:
        return (
            command.run == self._run
            and command.attempt == self.attempt
            and bool(command.actions)
            and all(action.kind in COMMAND_KINDS for action in command.actions)
            and 0 < len(command.id) <= 64
            and set(command.id) <= _SAFE
            and command.expires_in_s > 0
        )

    def _refuse(self, command: Command, why: str) -> None:
        self._answer(
            command.id, Ack(state="refused", client=self._client, attempt=command.attempt, detail={"reason": why})
        )

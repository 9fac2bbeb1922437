"""Commands that were accepted and wait for a step boundary. Filled by threads, emptied by the training loop."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

from foreshock.transport.clock import boot_s
from foreshock.wire.commands import Command

REMEMBERED = 10_000


class Pending(NamedTuple):
    """An accepted command and when it expires, on the boot clock."""

    command: Command
    expires_s: float

    @property
    def expired(self) -> bool:
        return boot_s() >= self.expires_s


class Inbox:
    """At most once: an id is claimed by the first who sees it and remembered for the life of the process."""

    def __init__(self) -> None:
        self._arrived = threading.Condition(threading.Lock())
        self._pending: list[Pending] = []
        self._claimed: OrderedDict[str, None] = OrderedDict()

    def claim(self, command_id: str) -> bool:
        """Whether this is the first claim of the id."""
        with self._arrived:
            if command_id in self._claimed:
                return False
            self._claimed[command_id] = None
            while len(self._claimed) > REMEMBERED:
                self._claimed.popitem(last=False)
            return True

    def put(self, pending: Pending) -> None:
        """Queues an accepted command."""
        with self._arrived:
            self._pending.append(pending)
            self._arrived.notify_all()

    def take(self, step: int | None) -> list[Pending]:
        """Removes and returns what is due at the end of `step`, in the order of arrival; expired ones included."""
        if not self._pending:  # the common case costs no lock
            return []
        with self._arrived:
            due = [p for p in self._pending if _due(p, step)]
            self._pending = [p for p in self._pending if not _due(p, step)]
            return due

    def wait(self, seconds: float) -> None:
        """Waits until something is queued, at most `seconds`."""
        with self._arrived:
            if not self._pending:
                self._arrived.wait(seconds)

    def __len__(self) -> int:
        return len(self._pending)


def _due(pending: Pending, step: int | None) -> bool:
    at = pending.command.at_step
    return pending.expired or at is None or step is None or at <= step

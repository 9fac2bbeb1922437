"""What was lost, by reason, cumulative over a client's life. Travels in every envelope.

`queue_full` memory was full · `spool_full` · `disk_full` · `spool_unwritable` · `corrupt` a spooled record failed its
check sum · `refused` the service refused it for good · `too_large` · `unencodable` · `invalid_signal` a scalar with a
bad name or value · `command_ignored` a command for another run or attempt, or of a kind that was never announced ·
`dump_memory`, `dump_disk`, `dump_failed`, `dump_unwritten` observations or steps that a token dump has not.
"""

from __future__ import annotations

import threading
from logging import getLogger

_log = getLogger("foreshock")


class Losses:
    """Counts by reason; each reason is logged once."""

    def __init__(self, counts: dict[str, int] | None = None) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = dict(counts or {})

    def add(self, reason: str, count: int = 1) -> None:
        """Counts `count` more for `reason`."""
        if count <= 0:
            return
        with self._lock:
            first = reason not in self._counts
            self._counts[reason] = self._counts.get(reason, 0) + count
        if first:
            _log.warning("foreshock: %d lost: %s (logged once, the count travels)", count, reason)

    def counts(self) -> dict[str, int]:
        """A copy."""
        with self._lock:
            return dict(self._counts)

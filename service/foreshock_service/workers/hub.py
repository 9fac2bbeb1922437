"""Who waits for what: long-polls wait for a run to change, the evaluator for runs that have new steps.

All in this process; on PostgreSQL `workers.channel` carries the two words to the other replicas and back. A lost
word costs time and nothing else: the evaluator looks by itself every second, and long-polls end by their timeout.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Literal

Word = Literal["stepped", "changed"]
ANY_RUN = 0
"""`wait(ANY_RUN, …)` wakes on a change of whichever run: for pages and event streams."""


class Hub:
    """Versions per run, waiters on them, the set of runs with new steps. Every method is safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._versions: dict[int, int] = {}
        self._waiters: dict[int, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._stepped: set[int] = set()
        self._closed = False
        self.forward: Callable[[Word, int], None] | None = None
        """Set by `workers.channel.Channel`: tells the other replicas; must not block."""

    def stepped(self, run_id: int) -> None:
        """Steps of the run were stored (call after the commit): wakes the evaluator, here and elsewhere."""
        self.hear("stepped", run_id)
        if self.forward is not None:
            self.forward("stepped", run_id)

    def changed(self, run_id: int) -> None:
        """The run's verdict, incidents or commands changed (call after the commit): wakes its long-polls everywhere."""
        self.hear("changed", run_id)
        if self.forward is not None:
            self.forward("changed", run_id)

    def hear(self, word: Word, run_id: int) -> None:
        """What `stepped` and `changed` do in this process, for a word that came from another replica."""
        with self._lock:
            if word == "stepped":
                self._stepped.add(run_id)
                self._lock.notify_all()
                return
            for key in (run_id, ANY_RUN):
                self._versions[key] = self._versions.get(key, 0) + 1
            waiters = [w for key in (run_id, ANY_RUN) for w in self._waiters.get(key, ())]
        for loop, event in waiters:
            _set(loop, event)

    def version(self, run_id: int) -> int:
        """Rises with every change heard of. Read it before reading the database, then `wait` for more than it."""
        with self._lock:
            return self._versions.get(run_id, 0)

    def wait_stepped(self, timeout: float) -> set[int]:
        """Blocks until a run has new steps or `timeout` seconds pass; returns and forgets those runs."""
        with self._lock:
            if not self._stepped and not self._closed:
                self._lock.wait(max(0.0, timeout))
            found, self._stepped = self._stepped, set()
            return found

    async def wait(self, run_id: int, seen: int, timeout: float) -> int:  # noqa: ASYNC109 - a long-poll ends, not fails
        """Waits until the run's version is above `seen`, `timeout` seconds pass or the hub closes; returns the version.

        Holds no database connection and no thread.
        """
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            if self._closed or self._versions.get(run_id, 0) > seen:
                return self._versions.get(run_id, 0)
            self._waiters.setdefault(run_id, set()).add(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter[1].wait()
        except TimeoutError:
            pass
        finally:
            with self._lock:
                waiting = self._waiters.get(run_id, set())
                waiting.discard(waiter)
                if not waiting:
                    self._waiters.pop(run_id, None)
        return self.version(run_id)

    @property
    def waiting(self) -> int:
        """Long-polls that wait now."""
        with self._lock:
            return sum(len(w) for w in self._waiters.values())

    def close(self) -> None:
        """Wakes everyone, for good: the service stops."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            waiters = [w for group in self._waiters.values() for w in group]
        for loop, event in waiters:
            _set(loop, event)


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:  # that loop is closed: nobody waits there any more
        return

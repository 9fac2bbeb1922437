"""Bounds on what one caller may ask for: token buckets, long-poll slots."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from foreshock_service.errors import Unavailable

MAX_CALLERS = 10_000


class Buckets:
    """One token bucket per caller, in memory: `rate` per second, `rate * burst_s` saved up at most.

    Bounded: beyond `MAX_CALLERS` the caller unseen for longest is forgotten, and would start again with a full bucket.
    """

    def __init__(self, rate: float, burst_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._full = max(1.0, rate * burst_s)
        self._clock = clock
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> float:
        """0.0 where the request may pass, else the seconds until the next one may."""
        now = self._clock()
        level, at = self._levels.pop(caller, (self._full, now))
        level = min(self._full, level + (now - at) * self._rate)
        wait_s = 0.0 if level >= 1.0 else (1.0 - level) / self._rate
        self._levels[caller] = (level - 1.0 if wait_s == 0.0 else level, now)
        while len(self._levels) > MAX_CALLERS:
            self._levels.popitem(last=False)
        return wait_s


class Slots:
    """A fixed number of places for requests that take long. Used from the event loop only."""

    def __init__(self, limit: int, what: str) -> None:
        self.limit = limit
        self.taken = 0
        self._what = what

    @contextmanager
    def place(self) -> Iterator[None]:
        """Holds a place; raises `Unavailable` with Retry-After when none is free."""
        self.check()
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    def check(self) -> None:
        """Raises as `place` does, and holds nothing."""
        if self.taken >= self.limit:
            raise Unavailable(f"All {self.limit} places for {self._what} are taken.", retry_after_s=5)

"""Upkeep by the clock, on one replica at a time: partitions ahead of time; what is old enough goes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from foreshock_service.store import leases
from foreshock_service.store.engine import Store
from foreshock_service.store.retention import (
    drop_old_deliveries,
    drop_old_frames,
    ensure_partitions,
    span_s,
    unless_in_use,
)

logger = logging.getLogger(__name__)

EVERY_S = 3600.0
LEASE_S = 900.0


class Upkeep:
    """A worker. `once()` does one round."""

    name = "upkeep"

    def __init__(
        self,
        store: Store,
        keep_days: float,
        *,
        deliveries_days: float = 30.0,
        every_s: float = EVERY_S,
        owner: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._keep_days = keep_days
        self._deliveries_days = deliveries_days
        self._every_s = every_s
        self._owner = owner or leases.owner_name()
        self._clock = clock
        self._woken = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """A round at the start and then every `every_s`, until `stop` is set."""
        while not stop.is_set():
            self.once()
            self._woken.wait(self._every_s)

    def interrupt(self) -> None:
        """Lets `run` see that it shall stop."""
        self._woken.set()

    def once(self) -> bool:
        """Makes the coming partitions and drops what is too old; False where another replica is at it."""
        now = self._clock()
        with self._store.write() as session:
            if leases.claim(session, "upkeep", self._owner, now, LEASE_S) is None:
                return False
        made = self._partitions(now)
        dropped = drop_old_frames(self._store, now, self._keep_days)
        told = drop_old_deliveries(self._store, now, self._deliveries_days)
        if made or dropped or told:
            logger.info("upkeep: partitions made %s, dropped: %d old frames, %d old deliveries", made, dropped, told)
        return True

    def _partitions(self, now: float) -> list[str]:
        def make() -> list[str]:
            with self._store.write() as session:
                return ensure_partitions(session, now, span=span_s(self._keep_days, self._every_s))

        made = unless_in_use(make)
        if made is None:
            logger.warning("partitions not made now, the table is in use: tried again with the next upkeep")
        return made or []

"""The last look at a run while nothing was wrong with it: asked again, the service need not ask the database.

Only quiet answers are kept (nothing open, nothing pending), and only while the hub has heard of no change of the run: a
verdict, an incident or a command is never told late by this. `last_step` and `last_seen_at` may be `FRESH_S` old, and
older by one look at the database, which then is under way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from foreshock_service.workers.hub import Hub

log = logging.getLogger(__name__)

FRESH_S = 0.25
KEPT_S = 1.0
"""Beyond it a look is not told any more, however quiet: words of other replicas can get lost."""
MOST = 4096


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of a run, and the run's version in the hub as it was before that."""

    run_id: int
    version: int
    at: float
    body: bytes | None
    """The answer; None where it must be asked for anew."""


class Looks:
    """By run name, the last used kept. Used from the event loop only."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._by_name: OrderedDict[str, Look] = OrderedDict()
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def version(self, name: str) -> int | None:
        """The run's version, to be read before the database is; None for a run not looked at before."""
        known = self._by_name.get(name)
        return self._hub.version(known.run_id) if known is not None else None

    def keep(self, name: str, run_id: int, version: int | None, body: bytes | None) -> None:
        """Keeps what was seen, `version` as it was before; `body` None where the answer is not a quiet one."""
        self._by_name[name] = Look(run_id, version or 0, time.monotonic(), body if version is not None else None)
        self._by_name.move_to_end(name)
        while len(self._by_name) > MOST:
            self._by_name.popitem(last=False)

    def forget(self, name: str) -> None:
        """After the run was not found."""
        self._by_name.pop(name, None)

    def told(self, name: str, again: Callable[[], Awaitable[object]]) -> bytes | None:
        """The kept answer, if it still holds. One that is no longer fresh is looked for `again` in the background."""
        look = self._by_name.get(name)
        if look is None or look.body is None or look.version != self._hub.version(look.run_id):
            return None
        age = time.monotonic() - look.at
        if age > KEPT_S:
            return None
        if age > FRESH_S and name not in self._under_way:
            task = asyncio.ensure_future(self._renew(again))
            self._under_way[name] = task
            task.add_done_callback(lambda _: self._under_way.pop(name, None))
        return look.body

    async def _renew(self, again: Callable[[], Awaitable[object]]) -> None:
        try:
            await again()
        except Exception as error:
            # Whoever asks next looks for himself, and is told what is the matter.
            log.debug("a look in the background failed: %r", error)

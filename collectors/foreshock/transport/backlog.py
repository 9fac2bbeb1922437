"""Encoded records in one order, the oldest on disk, the newest in memory. Bounded in both."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from foreshock.transport.items import Record
from foreshock.transport.losses import Losses
from foreshock.transport.spool import Spool, SpoolError

RETRY_S = 30.0
"""A spool that could not be written is tried again after this."""


class Backlog:
    """A FIFO. While the service answers nothing touches the disk; `shelve` moves what waits onto it.

    `open_spool` is called at the first need and raises SpoolError. Where there is no spool (or it cannot be written),
    memory holds at most `max_items` and `max_bytes`; beyond them the oldest records are dropped and counted by why the
    spool did not take them.
    """

    def __init__(self, open_spool: Callable[[], Spool] | None, losses: Losses, max_items: int, max_bytes: int) -> None:
        self.spool: Spool | None = None
        self._open_spool = open_spool
        self._losses = losses
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._memory: deque[Record] = deque()
        self._memory_bytes = 0
        self._why = "queue_full"
        self._retry_at = 0.0

    @classmethod
    def of(cls, spool: Spool) -> Backlog:
        """An adopted spool, to be read only."""
        backlog = cls(None, spool.losses, 0, 0)
        backlog.spool = spool
        return backlog

    def __len__(self) -> int:
        return len(self._memory) + (len(self.spool) if self.spool is not None else 0)

    def push(self, record: Record) -> None:
        """Appends a record."""
        self._memory.append(record)
        self._memory_bytes += len(record.payload)
        if len(self._memory) > self._max_items or self._memory_bytes > self._max_bytes:
            self.shelve()

    def peek(self, items: int, size: int) -> list[Record]:
        """The oldest records, at least one if there is any. Never mixes disk and memory."""
        if self.spool is not None and len(self.spool):
            taken = self.spool.peek(items, size)
            if taken:
                return taken
        taken, total = [], 0
        for record in self._memory:
            if taken and (len(taken) >= items or total + len(record.payload) > size):
                break
            taken.append(record)
            total += len(record.payload)
        return taken

    def commit(self, count: int) -> None:
        """Forgets the `count` oldest records: those of the last `peek`."""
        if self.spool is not None and len(self.spool):
            self.spool.commit(count)
            return
        for _ in range(count):
            self._memory_bytes -= len(self._memory.popleft().payload)

    def shelve(self) -> None:
        """Moves everything in memory to the disk; what the disk does not take stays, within bounds."""
        if self._memory:
            self._try_spool()
        if self.spool is not None:
            self.spool.save_losses(self._losses.counts())
        while self._memory and (len(self._memory) > self._max_items or self._memory_bytes > self._max_bytes):
            self._memory_bytes -= len(self._memory.popleft().payload)
            self._losses.add(self._why)

    def close(self) -> None:
        """Shelves the rest and gives the spool up; what still is in memory then is lost and counted."""
        self._retry_at = 0.0
        self.shelve()
        if self._memory:
            self._losses.add(self._why, len(self._memory))
            self._memory.clear()
        if self.spool is not None:
            self.spool.save_losses(self._losses.counts())
            self.spool.close()

    def _try_spool(self) -> None:
        if self._open_spool is None or time.monotonic() < self._retry_at:
            return
        try:
            if self.spool is None:
                self.spool = self._open_spool()
            while self._memory:
                written = self.spool.append(list(self._memory))
                for _ in range(written):
                    self._memory_bytes -= len(self._memory.popleft().payload)
            self._why = "queue_full"
        except SpoolError as error:
            self._why = error.reason
            self._retry_at = time.monotonic() + RETRY_S

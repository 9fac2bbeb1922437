"""The group writer: one thread turns whatever envelopes wait into one transaction and answers each after the commit.

Alone, an envelope waits for nothing but its own commit. Under load groups begin no sooner than `GATHER_S` one after the
other, for what a group costs by itself (a dozen statements, an fsync) is what fifty envelopes cost. A run whose row is
held (an evaluation follows what an ill step asks for, another replica writes) holds up no other: its envelopes are set
aside for the next group. A group that fails is tried again envelope by envelope, so that a bad one fails alone. The
queue is bounded: when it is full, `submit` raises `Unavailable` and the client keeps its items.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError, OperationalError

from foreshock.wire import Envelope, Reply
from foreshock_service.errors import Problem, Unavailable, Unprocessable
from foreshock_service.ingest.arrivals import Arrival
from foreshock_service.ingest.checks import IngestLimits, check_envelope
from foreshock_service.ingest.group import Stored, store_group
from foreshock_service.ingest.hooks import Hooks
from foreshock_service.ingest.steps import Seen
from foreshock_service.store.engine import Store
from foreshock_service.workers.hub import Hub

logger = logging.getLogger(__name__)

RETRIES = 3
"""Times that a deadlock or a serialisation failure is tried again before it counts."""
RETRYABLE = frozenset({"40001", "40P01"})
SQLITE_OUTAGES = frozenset({5, 6, 8, 10, 11, 13, 14, 26})
"""Busy, locked, read-only, I/O error, corrupt, full, cannot open, not a database."""
POSTGRES_OUTAGES = frozenset({"08", "25", "53", "55", "57", "58"})
"""SQLSTATE classes: connection, read-only, resources, not available, operator intervention, system error."""
MAX_GROUP_BYTES = 64 * 1024 * 1024
GATHER_S = 0.012
PATIENCE = 3
"""Groups in a row that set envelopes aside before one waits for whatever it needs, so that nobody starves."""
CROWD, FULL = 4, 64
"""A group of more envelopes than this and of fewer frames than that makes the next one wait: more than a few envelopes
at once is load, and so many frames are worth a group."""


@dataclass
class Counts:
    """What the writer did since it was made; read by `/metrics`."""

    envelopes: int = 0
    frames: int = 0
    repeated: int = 0
    groups: int = 0
    failed: int = 0
    refused_full: int = 0


Promise = Future[Reply] | asyncio.Future[Reply]


@dataclass(frozen=True, slots=True)
class _Waiting:
    arrival: Arrival
    size: int
    future: Promise


class GroupWriter:
    """Stores envelopes. A worker: `run(stop)` is its thread; `submit` may be called from anywhere."""

    name = "writer"

    def __init__(
        self,
        store: Store,
        hub: Hub,
        hooks: Hooks | None = None,
        limits: IngestLimits | None = None,
        *,
        queue_size: int = 2048,
        group_size: int = 256,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._hub = hub
        self._hooks = hooks or Hooks()
        self._limits = limits or IngestLimits()
        self._queue: queue.Queue[_Waiting | None] = queue.Queue(queue_size)
        self._group_size = group_size
        self._clock = clock
        self._closed = False
        self._seen = Seen()
        self._aside: list[_Waiting] = []
        """Of runs that were held when the last group was stored: the first of the next one."""
        self._set_aside = 0
        """Groups in a row that set some aside."""
        self._not_before = 0.0
        """By the monotonic clock, when the next group may begin."""
        self.counts = Counts()

    @property
    def waiting(self) -> int:
        """Envelopes in the queue now."""
        return self._queue.qsize() + len(self._aside)

    @property
    def capacity(self) -> int:
        """Envelopes that the queue takes."""
        return self._queue.maxsize

    def lag_s(self) -> float:
        """Age of the oldest envelope that waits in the queue; 0 where none does."""
        with self._queue.mutex:
            first = next((waiting for waiting in (*self._aside, *self._queue.queue) if waiting is not None), None)
        return max(0.0, self._clock() - first.arrival.received_at) if first is not None else 0.0

    def submit(self, envelope: Envelope, *, size: int = 0) -> Future[Reply]:
        """Queues a decoded envelope; the future resolves after its commit. `size`: its bytes, to bound a group.

        Raises `Unprocessable`, `TooLarge`, `UpgradeRequired` for what cannot be stored and `Unavailable` when the queue
        is full or closed; the future raises `Unavailable` when the database failed. Then nothing of it was stored.
        """
        future: Future[Reply] = Future()
        self._enqueue(envelope, size, future)
        return future

    async def store(self, envelope: Envelope, *, size: int = 0) -> Reply:
        """`submit` for an event loop, which a group wakes once for all envelopes of it. Raises what the future would.

        A caller that is cancelled goes away alone: its envelope is stored.
        """
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._enqueue(envelope, size, future)
        return await future

    def _enqueue(self, envelope: Envelope, size: int, future: Promise) -> None:
        check_envelope(envelope, self._limits)
        if self._closed:
            raise Unavailable("the service is stopping", retry_after_s=5)
        try:
            self._queue.put_nowait(_Waiting(Arrival(envelope, self._clock()), size, future))
        except queue.Full:
            self.counts.refused_full += 1
            raise Unavailable("too many envelopes wait to be stored") from None

    def run(self, stop: threading.Event) -> None:
        """Stores groups until `stop` is set and the queue is empty."""
        while not (stop.is_set() and self._queue.empty() and not self._aside):
            group = self._next_group()
            if group:
                self._store_or_split(group)

    def interrupt(self) -> None:
        """Refuses new envelopes and lets `run` see that it shall stop, once it has stored what waits."""
        self._closed = True
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return

    def _next_group(self) -> list[_Waiting]:
        group, self._aside = self._aside, []
        if not group:
            try:
                first = self._queue.get(timeout=0.5)
            except queue.Empty:
                return []
            group = [first] if first is not None else []
        early = self._not_before - time.monotonic()
        if early > 0 and not self._closed:
            time.sleep(early)
        began = time.monotonic()
        size = sum(waiting.size for waiting in group)
        while len(group) < self._group_size and size < MAX_GROUP_BYTES:
            try:
                found = self._queue.get_nowait()
            except queue.Empty:
                break
            if found is not None:
                group.append(found)
                size += found.size
        small = len(group) > CROWD and sum(len(one.arrival.envelope.frames) for one in group) < FULL
        self._not_before = began + GATHER_S if small else 0.0
        return group

    def _store_or_split(self, group: list[_Waiting]) -> None:
        try:
            stored = self._commit(group)
        except Exception as error:
            if len(group) == 1 or _is_outage(error):
                self._fail(group, error)
                return
            logger.warning("a group of %d envelopes failed, storing one by one: %s", len(group), _brief(error))
            for waiting in group:
                self._store_or_split([waiting])
            return
        self._answer(group, stored)

    def _commit(self, group: Sequence[_Waiting]) -> Stored:
        wait = len(group) == 1 or self._set_aside >= PATIENCE
        for remaining in reversed(range(RETRIES)):
            try:
                with self._store.write() as session:
                    arrivals = [waiting.arrival for waiting in group]
                    return store_group(
                        session, arrivals, self._hooks, self._limits, self._clock(), self._seen, wait=wait
                    )
            except BaseException as error:
                self._seen.forget()
                if not isinstance(error, DBAPIError):
                    raise
                if not remaining or getattr(error.orig, "sqlstate", None) not in RETRYABLE:
                    raise
        raise AssertionError("unreachable")

    def _answer(self, group: list[_Waiting], stored: Stored) -> None:
        answers = list(zip(group, stored.replies, strict=True))
        self._aside = [waiting for waiting in group if waiting.arrival.envelope.run in stored.busy]
        self._set_aside = self._set_aside + 1 if self._aside else 0
        if self._aside:
            answers = [(w, reply) for w, reply in answers if w.arrival.envelope.run not in stored.busy]
            if not answers and self._queue.empty():
                self._set_aside = PATIENCE  # nothing else to do than wait for them
        counts = self.counts
        counts.groups += 1
        counts.envelopes += len(answers)
        counts.frames += stored.frames
        counts.repeated += stored.repeated
        for run_id in stored.stepped:
            self._hub.stepped(run_id)
        for run_id in stored.changed:
            self._hub.changed(run_id)
        _resolve([(waiting.future, reply) for waiting, reply in answers])

    def _fail(self, group: list[_Waiting], error: Exception) -> None:
        self.counts.failed += len(group)
        problem: Problem
        if isinstance(error, DBAPIError) and not _is_outage(error):
            logger.error("an envelope of run %s cannot be stored: %s", group[0].arrival.envelope.run, _brief(error))
            problem = Unprocessable("the envelope holds a value that cannot be stored")
        else:
            logger.error("%d envelopes not stored", len(group), exc_info=error)
            problem = Unavailable("the database cannot be written to now", retry_after_s=2)
        _resolve([(waiting.future, problem) for waiting in group])


def _resolve(answers: Sequence[tuple[Promise, Reply | Problem]]) -> None:
    """Keeps the promises; those of an event loop all in one call, for waking a loop costs more than an answer."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Reply], Reply | Problem]]] = {}
    for future, answer in answers:
        if isinstance(future, asyncio.Future):
            by_loop.setdefault(future.get_loop(), []).append((future, answer))
        elif future.set_running_or_notify_cancel():
            _settle(future, answer)
    for loop, some in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle_all, some)
        except RuntimeError:
            continue  # that loop is closed: nobody waits there any more


def _settle_all(answers: Sequence[tuple[asyncio.Future[Reply], Reply | Problem]]) -> None:
    for future, answer in answers:
        if not future.done():  # the caller went away; its items are stored all the same
            _settle(future, answer)


def _settle(future: Promise, answer: Reply | Problem) -> None:
    if isinstance(answer, Problem):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _is_outage(error: Exception) -> bool:
    """True where the database itself is at fault (down, full, locked), so that trying singly would not help."""
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated:
        return True
    if isinstance(error.orig, sqlite3.Error):
        return isinstance(error, OperationalError) and error.orig.sqlite_errorcode & 0xFF in SQLITE_OUTAGES
    state = getattr(error.orig, "sqlstate", None)
    return isinstance(error, OperationalError) and (state is None or state[:2] in POSTGRES_OUTAGES)


def _brief(error: Exception) -> str:
    return str(getattr(error, "orig", error)).splitlines()[0][:300] if str(error) else type(error).__name__

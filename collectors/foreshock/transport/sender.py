"""The daemon thread that sends: queue → encode → backlog → one request in flight → the service.

The host's thread only appends to a deque. Everything slow happens here: reading device figures, encoding, compressing,
the network, the disk. The thread is started at the first item, again if it died, and anew after a fork.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from foreshock.guard import Guard
from foreshock.settings import Settings
from foreshock.transport import clock
from foreshock.transport.delivery import Delivery
from foreshock.transport.http import Http
from foreshock.transport.items import Item
from foreshock.transport.losses import Losses
from foreshock.transport.spool import MAX_RECORD, Header
from foreshock.transport.stream import Extras
from foreshock.wire.envelope import Reply

DEVICE_POLL_S = 0.005
"""How often a device that still owes figures is asked."""


class Sender:
    """Owns the queue and the thread.

    `on_reply(reply, generation)` runs on the thread; `generation` is −1 where it is not sure which the reply speaks of.
    Two locks: `_wake` for the queue, which the host's thread takes for an append; `_work` for all else, never held
    during a request.
    """

    def __init__(
        self,
        settings: Settings,
        header: Header,
        extras: Extras,
        losses: Losses,
        guard: Guard,
        on_reply: Callable[[Reply, int], None],
    ) -> None:
        self._settings = settings
        self._losses = losses
        self._guard = guard
        self._on_reply = on_reply
        self._delivery = Delivery(settings, header, extras, losses)
        self._items: deque[Item] = deque()
        self._wake = threading.Condition(threading.Lock())
        self._work = threading.Lock()
        self._idle = threading.Event()
        self._thread: threading.Thread | None = None
        self._sequence = 0
        self._generation = 0
        self._poked = False
        self._closed = False

    @property
    def http(self) -> Http:
        """The thread's own connection, for what it does on the side."""
        return self._delivery.http

    @property
    def waiting(self) -> int:
        """Items that are not yet acknowledged (approximate: no lock is taken)."""
        return len(self._items) + len(self._delivery.own.backlog)

    # --- the host's side -----------------------------------------------------------------------------------------

    def put(self, make: Callable[[int], Item]) -> None:
        """Appends the item that `make(sequence)` gives; costs microseconds, waits for no more than a deque's lock."""
        with self._wake:
            if self._closed:
                return
            self._sequence += 1
            self._append(make(self._sequence))
        self._ensure_thread()

    def put_unnumbered(self, item: Item) -> None:
        """Appends an acknowledgement, which is no part of the client's sequence."""
        with self._wake:
            if self._closed:
                return
            self._append(item)
        self._ensure_thread()

    def flush(self, timeout_s: float) -> bool:
        """Waits until all is sent, at most `timeout_s`; whether it was. Tries at once, whatever the back-off."""
        if self._closed:
            return False
        with self._wake:
            self._delivery.hurry_until = time.monotonic() + timeout_s
            self._delivery.retry_at = 0.0
            self._idle.clear()
            self._poke()
        return self._ensure_thread() and self._idle.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flushes, shelves the rest on disk and ends. Bounded by `timeout_s` plus what the disk takes."""
        sent = self.flush(timeout_s)
        with self._wake:
            if self._closed:
                return sent
            self._closed = True
            self._poke()
        # The thread may hang in a request: what it is sending is shelved too, and stored once all the same.
        if self._work.acquire(timeout=1.0):
            try:
                self._encode(waited=False)
                self._delivery.close()
            finally:
                self._work.release()
        return sent

    def abandon(self) -> None:
        """After a fork, in the child: lets the parent's descriptors go and touches nothing else of the parent's."""
        self._closed = True
        self._delivery.abandon()

    def _append(self, item: Item) -> None:
        while len(self._items) >= self._settings.queue_items:
            self._items.popleft()
            self._losses.add("queue_full")
        self._items.append(item)
        self._idle.clear()
        self._poke()

    def _poke(self) -> None:
        """Wakes the thread, or keeps it from falling asleep; called under the lock."""
        self._poked = True
        self._wake.notify()

    def _ensure_thread(self) -> bool:
        thread = self._thread
        if thread is not None and thread.is_alive():
            return True
        self._thread = threading.Thread(target=self._run, name="foreshock-sender", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # interpreter shutdown: no new threads; close() shelves
            self._thread = None
            return False
        return True

    # --- the thread's side ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._work:
                self._delivery.adopt()
        except Exception as error:
            self._guard.caught_in_thread("adoption", error)
        wait = 0.0
        while not self._closed:
            with self._wake:
                if wait > 0 and not self._poked:
                    self._wake.wait(wait)
                self._poked = False
            try:
                wait = self._turn()
            except Exception as error:
                self._guard.caught_in_thread("sender", error)
                wait = 1.0

    def _turn(self) -> float:
        """One step of the work; returns how long there is nothing to do, in seconds."""
        delivery = self._delivery
        with self._work:
            if self._closed:
                return 0.0
            self._encode(waited=True)
            now = time.monotonic()
            if now < delivery.retry_at:
                delivery.own.backlog.shelve()
                return self._until(delivery.retry_at - now)
            stream = delivery.next_stream()
            heartbeat_in = delivery.last_sent + self._settings.heartbeat_s - now
            if stream is None and heartbeat_in > 0:
                self._tell_idle()
                return self._until(heartbeat_in)
            stream = stream or delivery.own
            records = delivery.batch(stream)
            if not records and not stream.own:
                return 0.0
        answer = delivery.post(stream, records)
        with self._work:
            if self._closed:
                return 0.0
            reply = delivery.settle(stream, records, answer)
            # With items still unsent the reply may speak of an earlier attempt than the last encoded one.
            generation = -1 if len(delivery.own.backlog) else self._generation
        if reply is not None and stream.own:
            self._on_reply(reply, generation)
        return 0.0

    def _tell_idle(self) -> None:
        with self._wake:
            if not self._items:
                self._idle.set()

    def _until(self, seconds: float) -> float:
        """`seconds`, or less while a device is still on its way."""
        return max(0.0, min(seconds, DEVICE_POLL_S) if self._items else seconds)

    def _encode(self, waited: bool) -> None:
        """Moves ready items from the queue to the backlog, in order; with `waited` False also what is not ready."""
        while True:
            with self._wake:
                if not self._items:
                    return
                item, followed = self._items[0], len(self._items) > 1
            now = clock.boot_s()
            late = now - item.sealed_s > self._settings.settle_s
            hurried = time.monotonic() < self._delivery.hurry_until
            if waited and not late and not item.ready(now, followed or hurried):
                return
            with self._wake:
                if not self._items or self._items[0] is not item:
                    continue  # dropped meanwhile, because the queue was full
                self._items.popleft()
            self._encode_one(item, waited and not late)

    def _encode_one(self, item: Item, waited: bool) -> None:
        try:
            record = item.encode(waited)
        except Exception as error:
            self._losses.add("unencodable")
            self._guard.caught_in_thread("encoding", error)
            return
        if len(record.payload) > MAX_RECORD:
            self._losses.add("too_large")
            return
        self._generation = item.generation
        self._delivery.own.backlog.push(record)

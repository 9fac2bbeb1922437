"""The daemon thread that sends: queue → encode → backlog → one envelope in flight → the service.

The host's thread only appends to a deque. Everything slow happens here: reading device figures, encoding, compressing,
the network, the disk. The thread is started at the first item, again if it died, and anew after a fork.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from logging import getLogger
from pathlib import Path

import msgspec

from foreshock.guard import Guard
from foreshock.settings import Settings
from foreshock.transport import clock
from foreshock.transport.adopt import adopt
from foreshock.transport.backlog import Backlog
from foreshock.transport.http import Answer, Http
from foreshock.transport.items import ACK, Item, Record, StoredAck
from foreshock.transport.losses import Losses
from foreshock.transport.spool import MAX_RECORD, Header, Spool
from foreshock.transport.stream import Extras, Stream
from foreshock.wire.codec import MSGPACK, compress, decode_reply
from foreshock.wire.envelope import Reply
from foreshock.wire.errors import WireError

_log = getLogger("foreshock")
_BY_CONTENT = (400, 413, 422)
"""Answers that may be one item's fault: the envelope is halved before anything is dropped."""
_POLL_S = 0.005
_stored_ack = msgspec.msgpack.Decoder(StoredAck)


class Sender:
    """Owns the queue, the thread, the own stream and the adopted ones.

    `on_reply(reply, generation)` runs on the thread; `generation` is −1 where it is not sure which the reply speaks of.
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
        self.settings = settings
        self.losses = losses
        self._guard = guard
        self._on_reply = on_reply
        self._boot = clock.boot_id()
        header.boot = self._boot
        self._root = Path(settings.spool_root)
        backlog = Backlog(
            lambda: Spool.create(self._root, header, settings.spool_bytes, losses),
            losses, settings.queue_items, settings.queue_bytes,
        )  # fmt: skip
        self._own = Stream(header, backlog, losses, self._boot, extras)
        self._adopted: deque[Stream] = deque()
        self.http = Http(settings)
        self._random = random.Random()  # never the host's generator: its stream belongs to the training run
        self._items: deque[Item] = deque()
        self._wake = threading.Condition(threading.Lock())
        self._work = threading.Lock()
        self._idle = threading.Event()
        self._thread: threading.Thread | None = None
        self._sequence = 0
        self._generation_sent = 0
        self._failures = 0
        self._retry_at = 0.0
        self._last_sent = time.monotonic()
        self._turn_of_adopted = True
        self._compress = True
        self._hurry_until = 0.0
        self._poked = False
        self._closed = False

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
            self._hurry_until = time.monotonic() + timeout_s
            self._retry_at = 0.0
            self._idle.clear()
            self._poke()
        if not self._ensure_thread():
            return False
        return self._idle.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flushes, shelves the rest on disk and ends. Bounded by `timeout_s` plus what the disk takes."""
        sent = self.flush(timeout_s)
        with self._wake:
            if self._closed:
                return sent
            self._closed = True
            self._poke()
        # The thread may hang in a request: then what it is sending is shelved too, and stored once all the same.
        if self._work.acquire(timeout=1.0):
            try:
                self._encode(waited=False)
                for stream in (self._own, *self._adopted):
                    stream.backlog.close()
            finally:
                self._work.release()
        return sent

    def abandon(self) -> None:
        """After a fork, in the child: lets the parent's descriptors go and touches nothing else of the parent's."""
        self._closed = True
        for stream in (self._own, *self._adopted):
            if stream.backlog.spool is not None:
                stream.backlog.spool.abandon()

    @property
    def waiting(self) -> int:
        """Items that are not yet acknowledged (approximate: no lock is taken)."""
        return len(self._items) + len(self._own.backlog)

    def _append(self, item: Item) -> None:
        while len(self._items) >= self.settings.queue_items:
            self._items.popleft()
            self.losses.add("queue_full")
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
            self._adopt()
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
        with self._work:
            if self._closed:
                return 0.0
            self._encode(waited=True)
            now = time.monotonic()
            if now < self._retry_at:
                self._own.backlog.shelve()
                return self._until(self._retry_at - now)
            stream = self._next_stream()
            heartbeat_in = self._last_sent + self.settings.heartbeat_s - now
            if stream is None and heartbeat_in > 0:
                if not self._items:
                    self._idle.set()
                return self._until(heartbeat_in)
            stream = stream or self._own
            records = stream.batch(self.settings.batch_items, self.settings.batch_bytes)
            if not records and not stream.own:
                return 0.0
        answer = self._post(stream, records)
        reply = None
        with self._work:
            if not self._closed:
                self._last_sent = time.monotonic()
                reply = self._settle(stream, records, answer)
        if reply is not None and stream.own:
            # With items still unsent the reply may speak of an earlier attempt than the last encoded one.
            self._on_reply(reply, -1 if len(self._own.backlog) else self._generation_sent)
        return 0.0

    def _until(self, seconds: float) -> float:
        """`seconds`, or less while a device is still on its way."""
        if not self._items:
            return max(0.0, seconds)
        return max(0.0, min(seconds, _POLL_S))

    def _encode(self, waited: bool) -> None:
        """Moves ready items from the queue to the backlog, in order."""
        while True:
            with self._wake:
                if not self._items:
                    return
                item, followed = self._items[0], len(self._items) > 1
            now = clock.boot_s()
            late = now - item.sealed_s > self.settings.settle_s
            if waited and not late and not item.ready(now, followed or now_hurries(self._hurry_until)):
                return
            with self._wake:
                if not self._items or self._items[0] is not item:
                    continue  # dropped meanwhile, because the queue was full
                self._items.popleft()
            try:
                record = item.encode(waited and not late)
            except Exception as error:
                self.losses.add("unencodable")
                self._guard.caught_in_thread("encoding", error)
                continue
            if len(record.payload) > MAX_RECORD:
                self.losses.add("too_large")
                continue
            self._generation_sent = item.generation
            self._own.backlog.push(record)

    def _next_stream(self) -> Stream | None:
        """Own and adopted streams take turns, so that a long backlog does not hold up a living run."""
        while self._adopted and not len(self._adopted[0].backlog):
            self._adopted.popleft().backlog.close()
        own = self._own if len(self._own.backlog) else None
        adopted = self._adopted[0] if self._adopted else None
        if own and adopted:
            self._turn_of_adopted = not self._turn_of_adopted
            return adopted if self._turn_of_adopted else own
        return own or adopted

    def _post(self, stream: Stream, records: list[Record]) -> Answer:
        timeout_s = self.settings.timeout_s
        hurry = self._hurry_until - time.monotonic()
        if hurry > 0:
            timeout_s = min(timeout_s, max(0.05, hurry))
        if records and records[0].kind == ACK:
            stored = _stored_ack.decode(records[0].payload)
            body = msgspec.json.encode(stored.ack)
            headers = {"Content-Type": "application/json"}
            return self.http.post(f"/v1/commands/{stored.command}/ack", body, headers, timeout_s)
        body, headers = stream.envelope(records), {}
        if self._compress:
            body, headers = compress(body)
        return self.http.post("/v1/ingest", body, {"Content-Type": MSGPACK} | headers, timeout_s)

    def _settle(self, stream: Stream, records: list[Record], answer: Answer) -> Reply | None:
        """What an answer means for the records that were sent; the reply where they were stored."""
        if answer.ok and records and records[0].kind == ACK:
            stream.backlog.commit(1)
            self._succeeded()
        elif answer.ok:
            return self._stored(stream, records, answer)
        elif answer.keep:
            self._failed(stream, answer.error or f"status {answer.status}", answer.retry_after_s)
        elif records and records[0].kind == ACK:
            stream.backlog.commit(1)  # the service knows better what became of the command
            self._succeeded()
        elif answer.status == 415 and self._compress:
            self._compress = False
        elif answer.status in _BY_CONTENT and len(records) > 1:
            stream.halve(records)
        else:
            _log.warning("foreshock: an envelope was refused for good: status %d %r", answer.status, answer.body[:300])
            stream.drop(records, "refused")
            self._succeeded()
        return None

    def _stored(self, stream: Stream, records: list[Record], answer: Answer) -> Reply | None:
        try:
            reply = decode_reply(answer.body)
        except WireError as error:
            self._failed(stream, str(error), None)
            return None
        if stream.acknowledged(records, reply.acknowledged):
            self._succeeded()
        else:
            self._failed(stream, f"acknowledged only up to {reply.acknowledged}", None)
        return reply

    def _succeeded(self) -> None:
        if self._failures:
            _log.info("foreshock: the service answers again")
        self._failures, self._retry_at = 0, 0.0

    def _failed(self, stream: Stream, why: str, retry_after_s: float | None) -> None:
        """Nothing was stored: everything goes to the disk, and the next attempt waits."""
        if not self._failures:
            _log.warning("foreshock: the service at %s does not take data, it is kept: %s", self.settings.url, why)
        longest = self.settings.backoff_max_s
        pause = min(longest, self.settings.backoff_s * 2.0 ** min(self._failures, 20)) * self._random.uniform(0.5, 1.0)
        if retry_after_s is not None:
            pause = max(pause, min(retry_after_s, self.settings.retry_after_max_s))
        if now_hurries(self._hurry_until):
            pause = min(pause, 0.2)
        self._failures += 1
        self._retry_at = time.monotonic() + pause
        self._own.backlog.shelve()

    def _adopt(self) -> None:
        """Takes over what dead clients of this run left."""
        chosen = self.settings
        for spool in adopt(self._root, self._own.header.run, chosen.url, chosen.spool_bytes, chosen.spool_keep_s):
            with self._work:
                self._adopted.append(Stream(spool.header, Backlog.of(spool), spool.losses, self._boot, None))


def now_hurries(until: float) -> bool:
    """Whether somebody waits in `flush`."""
    return time.monotonic() < until


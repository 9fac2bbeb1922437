"""Records → the service: whose turn it is, one request at a time, and what its answer means for what was sent."""

from __future__ import annotations

import random
import time
from collections import deque
from logging import getLogger
from pathlib import Path

import msgspec

from foreshock.settings import Settings
from foreshock.transport import clock
from foreshock.transport.adopt import adopt
from foreshock.transport.backlog import Backlog
from foreshock.transport.http import Answer, Http
from foreshock.transport.items import ACK, Record, StoredAck
from foreshock.transport.losses import Losses
from foreshock.transport.spool import Header, Spool
from foreshock.transport.stream import Extras, Stream
from foreshock.wire.codec import MSGPACK, compress, decode_reply
from foreshock.wire.envelope import Reply
from foreshock.wire.errors import WireError

_log = getLogger("foreshock")
_BY_CONTENT = (400, 413, 422)
"""Answers that may be one item's fault: the envelope is halved before anything is dropped."""
HURRIED_PAUSE_S = 0.2
_stored_ack = msgspec.msgpack.Decoder(StoredAck)


class Delivery:
    """The own stream, the adopted ones and the back-off. All but `post` is called under the sender's lock."""

    def __init__(self, settings: Settings, header: Header, extras: Extras, losses: Losses) -> None:
        self.http = Http(settings)
        self.retry_at = 0.0
        """No request before this, on the monotonic clock."""
        self.hurry_until = 0.0
        """Somebody waits in `flush` until then: pauses and requests are short."""
        self.last_sent = time.monotonic()
        self._settings = settings
        self._boot = clock.boot_id()
        self._root = Path(settings.spool_root)
        header.boot = self._boot
        backlog = Backlog(
            lambda: Spool.create(self._root, header, settings.spool_bytes, losses),
            losses, settings.queue_items, settings.queue_bytes,
        )  # fmt: skip
        self.own = Stream(header, backlog, losses, self._boot, extras)
        self._adopted: deque[Stream] = deque()
        self._adopted_next = False
        self._random = random.Random()  # never the host's generator: its stream belongs to the training run
        self._failures = 0
        self._compress = True

    def adopt(self) -> None:
        """Takes over what dead clients of this run left."""
        chosen = self._settings
        for spool in adopt(self._root, self.own.header.run, chosen.url, chosen.spool_bytes, chosen.spool_keep_s):
            self._adopted.append(Stream(spool.header, Backlog.of(spool), spool.losses, self._boot, None))

    def next_stream(self) -> Stream | None:
        """Own and adopted streams take turns, so that a long backlog does not hold up a living run."""
        while self._adopted and not len(self._adopted[0].backlog):
            self._adopted.popleft().backlog.close()
        own = self.own if len(self.own.backlog) else None
        adopted = self._adopted[0] if self._adopted else None
        if own and adopted:
            self._adopted_next = not self._adopted_next
            return adopted if self._adopted_next else own
        return own or adopted

    def batch(self, stream: Stream) -> list[Record]:
        """What the next request carries."""
        return stream.batch(self._settings.batch_items, self._settings.batch_bytes)

    def post(self, stream: Stream, records: list[Record]) -> Answer:
        """One request: an acknowledgement, or an envelope (without records: a sign of life)."""
        timeout_s = self._settings.timeout_s
        hurry_s = self.hurry_until - time.monotonic()
        if hurry_s > 0:
            timeout_s = min(timeout_s, max(0.05, hurry_s))
        if _is_ack(records):
            stored = _stored_ack.decode(records[0].payload)
            path, body = f"/v1/commands/{stored.command}/ack", msgspec.json.encode(stored.ack)
            return self.http.post(path, body, {"Content-Type": "application/json"}, timeout_s)
        body = stream.envelope(records)
        body, headers = compress(body) if self._compress else (body, {})
        return self.http.post("/v1/ingest", body, {"Content-Type": MSGPACK} | headers, timeout_s)

    def settle(self, stream: Stream, records: list[Record], answer: Answer) -> Reply | None:
        """Forgets, keeps, halves or drops what was sent; returns the reply where it was stored."""
        self.last_sent = time.monotonic()
        if answer.keep:
            self._failed(answer.error or f"status {answer.status}", answer.retry_after_s)
        elif _is_ack(records):
            stream.backlog.commit(1)  # refused: the service knows better what became of the command
            self._succeeded()
        elif answer.ok:
            return self._stored(stream, records, answer)
        elif answer.status == 415 and self._compress:
            self._compress = False
        elif answer.status in _BY_CONTENT and len(records) > 1:
            stream.halve(records)
        else:
            _log.warning("foreshock: an envelope was refused for good: status %d %r", answer.status, answer.body[:300])
            stream.drop(records, "refused")
            self._succeeded()
        return None

    def close(self) -> None:
        """Leaves what was not sent to a successor."""
        for stream in (self.own, *self._adopted):
            stream.backlog.close()

    def abandon(self) -> None:
        """In a forked child: lets the parent's descriptors go."""
        for stream in (self.own, *self._adopted):
            if stream.backlog.spool is not None:
                stream.backlog.spool.abandon()

    def _stored(self, stream: Stream, records: list[Record], answer: Answer) -> Reply | None:
        try:
            reply = decode_reply(answer.body)
        except WireError as error:
            self._failed(str(error), None)
            return None
        if stream.acknowledged(records, reply.acknowledged):
            self._succeeded()
        else:
            self._failed(f"acknowledged only up to {reply.acknowledged}", None)
        return reply

    def _succeeded(self) -> None:
        if self._failures:
            _log.info("foreshock: the service answers again")
        self._failures, self.retry_at = 0, 0.0

    def _failed(self, why: str, retry_after_s: float | None) -> None:
        """Nothing was stored: everything goes to the disk, and the next attempt waits."""
        chosen = self._settings
        if not self._failures:
            _log.warning("foreshock: the service at %s does not take data, it is kept: %s", chosen.url, why)
        pause = min(chosen.backoff_max_s, chosen.backoff_s * 2.0 ** min(self._failures, 20))
        pause *= self._random.uniform(0.5, 1.0)
        if retry_after_s is not None:
            pause = max(pause, min(retry_after_s, chosen.retry_after_max_s))
        now = time.monotonic()
        if now < self.hurry_until:
            pause = min(pause, HURRIED_PAUSE_S)
        self._failures += 1
        self.retry_at = now + pause
        self.own.backlog.shelve()


def _is_ack(records: list[Record]) -> bool:
    return bool(records) and records[0].kind == ACK

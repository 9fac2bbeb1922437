"""One client's stream of items towards the service: its own, or a dead client's that was adopted."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from foreshock.transport.backlog import Backlog
from foreshock.transport.clock import boot_s
from foreshock.transport.items import ACK, FRAME, Record
from foreshock.transport.losses import Losses
from foreshock.transport.spool import Header
from foreshock.wire.codec import encode_raw_envelope


class Extras(NamedTuple):
    """What only a living client's envelope says."""

    controller: bool = False
    expected_ranks: dict[str, int] | None = None


class Stream:
    """A backlog with its owner's name. `limit` is how many items the next envelope may hold.

    An envelope that is refused for its content is halved until the item that spoils it is alone; then only that one is
    dropped, and the envelopes grow again.
    """

    def __init__(self, header: Header, backlog: Backlog, losses: Losses, boot: str, extras: Extras | None) -> None:
        self.header = header
        self.backlog = backlog
        self.losses = losses
        self.extras = extras
        self.limit = 1 << 30
        self.highest = 0
        self._clock_known = bool(boot) and header.boot == boot

    @property
    def own(self) -> bool:
        return self.extras is not None

    def batch(self, items: int, size: int) -> list[Record]:
        """The next records to send together: one acknowledgement, or items up to the next acknowledgement."""
        records = self.backlog.peek(min(items, self.limit), size)
        for index, record in enumerate(records):
            if record.kind == ACK:
                return records[: max(1, index)]
        return records

    def envelope(self, records: list[Record]) -> bytes:
        """The body of an envelope with `records`; without any it is a sign of life."""
        extras = self.extras or Extras()
        return encode_raw_envelope(
            client=self.header.client,
            sequence=max((record.sequence for record in records), default=self.highest),
            run=self.header.run,
            launch=self.header.launch,
            sdk=self.header.sdk,
            role=self.header.role,
            rank=self.header.rank,
            sent_s=boot_s() if self.own or self._clock_known else None,
            controller=extras.controller,
            expected_ranks=extras.expected_ranks,
            losses=self.losses.counts(),
            frames=[msgspec.Raw(record.payload) for record in records if record.kind == FRAME],
            notices=[msgspec.Raw(record.payload) for record in records if record.kind != FRAME],
        )

    def acknowledged(self, records: list[Record], up_to: int) -> bool:
        """Forgets the records up to sequence `up_to`; whether that was all of them."""
        stored = sum(1 for record in records if record.sequence <= up_to)
        self.backlog.commit(stored)
        if stored:
            self.highest = max(self.highest, records[stored - 1].sequence)
            self.limit = min(1 << 30, self.limit * 2)
        return stored == len(records)

    def drop(self, records: list[Record], reason: str) -> None:
        """Forgets records that the service will never take."""
        self.backlog.commit(len(records))
        self.highest = max([self.highest, *(record.sequence for record in records)])
        self.losses.add(reason, len(records))
        self.limit = min(1 << 30, self.limit * 2)

    def halve(self, records: list[Record]) -> None:
        """The next envelope holds half as many."""
        self.limit = max(1, len(records) // 2)

"""What waits to be sent: items as the host's thread sealed them, and records as the sender's thread encoded them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from foreshock.frames.builder import SealedStep
from foreshock.stats.packed import pack
from foreshock.stats.record import PairRecord
from foreshock.wire.commands import Ack
from foreshock.wire.envelope import Notice

FRAME: Final = b"f"
NOTICE: Final = b"n"
ACK: Final = b"a"
_encoder = msgspec.msgpack.Encoder()


class Record(NamedTuple):
    """One encoded item. `sequence` is 0 for an acknowledgement, which is no part of the client's stream."""

    kind: bytes
    sequence: int
    payload: bytes


class Item:
    """A sealed item, not yet encoded."""

    __slots__ = ("generation", "sealed_s", "sequence")
    kind: bytes

    def __init__(self, sequence: int, generation: int, sealed_s: float) -> None:
        self.sequence = sequence
        self.generation = generation
        self.sealed_s = sealed_s

    def ready(self, now_s: float, followed: bool) -> bool:
        """Whether it can be encoded without waiting; `followed`: another item waits behind it."""
        return True

    def encode(self, waited: bool) -> Record:
        """Encodes it. `waited` False: what a device still owes is sent as missing."""
        raise NotImplementedError


class StepItem(Item):
    """A step's frame."""

    __slots__ = ("rank", "role", "sealed")
    kind = FRAME

    def __init__(
        self, sequence: int, generation: int, sealed_s: float, sealed: SealedStep, role: str, rank: int
    ) -> None:
        super().__init__(sequence, generation, sealed_s)
        self.sealed = sealed
        self.role = role
        self.rank = rank

    def ready(self, now_s: float, followed: bool) -> bool:
        return self.sealed.ready()

    def encode(self, waited: bool) -> Record:
        frame = self.sealed.build(
            sequence=self.sequence,
            generation=self.generation,
            role=self.role,
            rank=self.rank,
            sealed_s=self.sealed_s,
            waited=waited,
        )
        frame.pairs = {name: pack(pair) if isinstance(pair, PairRecord) else pair for name, pair in frame.pairs.items()}
        return Record(FRAME, self.sequence, _encoder.encode(frame))


class NoticeItem(Item):
    """A notice; `data` may be a function that is asked at encoding, held back until `hold_until_s` or a follower."""

    __slots__ = ("data", "hold_until_s", "notice_kind", "rank", "role", "step")
    kind = NOTICE

    def __init__(
        self,
        sequence: int,
        generation: int,
        sealed_s: float,
        notice_kind: str,
        data: dict[str, Any] | Callable[[], dict[str, Any]],
        step: int | None,
        role: str,
        rank: int,
        hold_until_s: float = 0.0,
    ) -> None:
        super().__init__(sequence, generation, sealed_s)
        self.notice_kind = notice_kind
        self.data = data
        self.step = step
        self.role = role
        self.rank = rank
        self.hold_until_s = hold_until_s

    def ready(self, now_s: float, followed: bool) -> bool:
        return followed or now_s >= self.hold_until_s

    def encode(self, waited: bool) -> Record:
        notice = Notice(
            sequence=self.sequence,
            kind=self.notice_kind,
            sealed_s=self.sealed_s,
            generation=self.generation,
            step=self.step,
            role=self.role,
            rank=self.rank,
            data=self.data() if callable(self.data) else self.data,
        )
        return Record(NOTICE, self.sequence, _encoder.encode(notice))


class StoredAck(msgspec.Struct):
    """An acknowledgement with the command that it answers."""

    command: str
    ack: Ack


class AckItem(Item):
    """The answer to a command, in the same queue: what was sealed before it arrives before it."""

    __slots__ = ("stored",)
    kind = ACK

    def __init__(self, generation: int, sealed_s: float, command: str, ack: Ack) -> None:
        super().__init__(0, generation, sealed_s)
        self.stored = StoredAck(command, ack)

    def encode(self, waited: bool) -> Record:
        return Record(ACK, 0, _encoder.encode(self.stored))

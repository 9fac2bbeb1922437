"""One envelope as it arrived, and what its items say without the database: when they happened, what is odd."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from foreshock.frames.catalogue import valid_name
from foreshock.stats.packed import has_nonfinite
from foreshock.wire import Envelope, Frame, Notice
from foreshock_service.store.flags import Flag

REPLAYED_S = 60.0
REPLAYED = int(Flag.REPLAYED)
ABSURD_S = 30 * 86_400.0
AHEAD_S = 1.0
"""An item may seem sealed so long after its envelope was sent: the two clocks are read at different moments."""

_is_name = lru_cache(65_536)(valid_name)


@lru_cache(4096)
def _all_names(names: tuple[str, ...]) -> bool:
    return all(map(_is_name, names))


encode_frame = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class Arrival:
    """An envelope and the service's clock when it was received."""

    envelope: Envelope
    received_at: float


@dataclass
class Item:
    """One frame or notice on its way into the store."""

    body: Frame | Notice
    event_at: float
    flags: int
    """Bits of `Flag`, as a plain number: arithmetic on an IntFlag costs a microsecond."""
    age_known: bool
    attempt: int = 0


@dataclass
class Answer:
    """What the reply will say, gathered while the group is stored."""

    acknowledged: int = 0
    attempt: int | None = None
    warnings: list[str] = field(default_factory=list)

    def warn(self, sentence: str) -> None:
        """Adds a warning, at most sixteen."""
        if len(self.warnings) < 16 and sentence not in self.warnings:
            self.warnings.append(sentence)


def fresh_items(arrival: Arrival, above: int) -> list[Item]:
    """The items with a sequence above `above`, in the order of their sequences, each once."""
    envelope = arrival.envelope
    bodies: list[Frame | Notice] = [*envelope.frames, *envelope.notices]
    items = []
    for body in sorted(bodies, key=lambda b: b.sequence):
        if body.sequence > above:
            above = body.sequence
            items.append(_dated(body, envelope.sent_s, arrival.received_at))
    return items


def _dated(body: Frame | Notice, sent_s: float | None, received_at: float) -> Item:
    """Event time is receipt minus the age that the client's own clock gives; an absurd age counts as none."""
    if sent_s is None:
        return Item(body, received_at, REPLAYED, age_known=False)
    age = sent_s - body.sealed_s
    if not math.isfinite(age) or age < -AHEAD_S or age > ABSURD_S:
        return Item(body, received_at, int(Flag.ABSURD_CLOCK), age_known=True)
    flags = REPLAYED if age > REPLAYED_S else 0
    return Item(body, received_at - max(0.0, age), flags, age_known=True)


def is_non_finite(frame: Frame) -> bool:
    """True where the frame holds NaN or infinities, or counted some."""
    # NaN and infinities survive an addition, so that one look at the sum clears nearly every frame.
    if not math.isfinite(sum(frame.scalars.values())) and not all(map(math.isfinite, frame.scalars.values())):
        return True
    return frame.scalars.get("grad.nonfinite", 0.0) > 0 or any(map(has_nonfinite, frame.pairs.values()))


def bad_names(frame: Frame) -> list[str]:
    """Signals that cannot become series: they stay in the frame and nowhere else."""
    names = (*frame.scalars, *frame.pairs)
    return [] if _all_names(names) else [name for name in names if not _is_name(name)]

"""What an alias is, and notes that several frameworks share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec


class Alias(msgspec.Struct, frozen=True):
    """`signal` = offset + scale · value; no signal: it cannot be translated, and `note` says why."""

    signal: str | None
    note: str = ""
    scale: float = 1.0
    offset: float = 0.0
    least: float | None = None
    """What is smaller is taken as this."""
    may_be_nan: bool = False
    """NaN is how the host says that there is no value."""

    def value(self, logged: float) -> float:
        """The signal's value for the logged one."""
        value = self.offset + self.scale * logged
        return self.least if self.least is not None and value < self.least else value


def to(signal: str, note: str = "", *, scale: float = 1.0, offset: float = 0.0) -> Alias:
    """A translation."""
    return Alias(signal, note, scale, offset)


def no(reason: str) -> Alias:
    """A name that is shown and not read."""
    return Alias(None, reason)


Table = Mapping[str, Alias]

BOTH_SIDES: Final = "share clipped on either side"
ALL_UPDATES: Final = "over all mini-batches, so of the update and not of its first step"
POST_CLIP: Final = "taken after the correction truncated or masked the ratios: cannot show how far they went"
LENGTHS: Final = "product over a sequence: grows with its length"
ENGINE_OR_UPDATE: Final = "current weights against the engine: holds the update as well"
KL_LOSS: Final = "against the reference; the estimator is the configured one, usually k3"
AFTER_CORRECTION: Final = "after the correction; its mean is 1 before it, what is missing was dropped"

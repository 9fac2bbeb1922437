"""What ingest noticed about a frame: stored as a bit set beside it, told to the rules by name, refused never."""

from __future__ import annotations

from enum import IntFlag
from functools import lru_cache


class Flag(IntFlag):
    """Bits of `frames.flags` and `steps.flags` (the union over a step's frames)."""

    STEP_BACKWARDS = 1
    """The client's step fell within one attempt."""
    DUPLICATE_RANK = 2
    """Two clients claim the same role and rank in one step; the first to come counts."""
    ABSURD_CLOCK = 4
    """The item's age is negative, above 30 days or not a number; the receipt stands in as event time."""
    REPLAYED = 8
    """More than 60 s old at receipt, or of unknown age: it may open incidents, never commands."""
    NON_FINITE = 16
    """Holds NaN or infinities, or counts some: its step is evaluated at once."""
    LATE = 32
    """Came after its step was evaluated: stored, not evaluated."""
    EVALUATION_FAILED = 64
    """The evaluator raised on this step; it was passed over so that the run goes on."""


SENTENCES: dict[Flag, str] = {
    Flag.STEP_BACKWARDS: "step {step} follows a later one in the same attempt",
    Flag.DUPLICATE_RANK: "another client already reported as {role} {rank} in step {step}",
    Flag.ABSURD_CLOCK: "the age of step {step} is absurd; receipt time is used",
}
"""Words for `Reply.warnings`; the other flags are no fault of the client's."""


@lru_cache(512)
def names(bits: int) -> tuple[str, ...]:
    """The flags in `bits`, in lower case and in the order of their bits."""
    return tuple(str(flag.name).lower() for flag in Flag if flag & bits)

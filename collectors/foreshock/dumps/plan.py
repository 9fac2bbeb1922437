"""Which steps are kept: a sampled share, and those around an incident. The same steps on every rank."""

from __future__ import annotations

import zlib
from typing import NamedTuple

ILL = frozenset({"warning", "critical"})
"""Verdicts of the service that open a look back."""


class Place(NamedTuple):
    """Whose step it is."""

    run: str
    launch: str
    generation: int
    attempt: int | None
    role: str
    rank: int


def sampled(run: str, step: int, share: float) -> bool:
    """Whether `step` is one of the sampled `share`; by a hash, so that all ranks choose alike without a word."""
    return zlib.crc32(f"{run}:{step}".encode()) < share * 2**32


class Watch:
    """Turns what the service says into spells of keeping: the ring before, and `after` steps from the word on.

    One spell an illness: it opens when the verdict leaves health (or worsens to critical) and when the host asks.
    """

    def __init__(self, after: int) -> None:
        self._after = after
        self._left = 0
        self._verdict = ""
        self.reason = ""
        self.verdict = ""

    @property
    def open(self) -> bool:
        return self._left > 0

    def told(self, verdict: str) -> bool:
        """The service's verdict on the run; True where it opens a spell."""
        before, self._verdict = self._verdict, verdict
        if verdict not in ILL or before in (verdict, "critical"):
            return False
        return self.begin("incident", verdict)

    def begin(self, reason: str, verdict: str = "") -> bool:
        """Opens a spell; False where one of the same reason is open."""
        if self.open and reason == self.reason:
            return False
        self._left, self.reason, self.verdict = max(1, self._after), reason, verdict
        return True

    def step_ended(self) -> None:
        """One step of the spell is over."""
        self._left = max(0, self._left - 1)

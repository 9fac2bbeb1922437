"""What every reader shares: a row, what could not be read, and notes about the log for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

import msgspec


class Unreadable(Exception):  # noqa: N818 - the word of the verdict
    """The log cannot be judged. The message says why and what would help; it is shown as it is."""


class Row(msgspec.Struct, frozen=True):
    """Part of one step under the framework's own names; several rows may belong to one step."""

    step: int | None
    """None where the log has no step numbers."""
    values: dict[str, float]


MAX_NOTES: Final = 50


class Notes:
    """Sentences about the log, each with how often it was true. Bounded."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, sentence: str) -> None:
        """Counts a sentence; new ones beyond the fiftieth are dropped."""
        if sentence in self._counts or len(self._counts) < MAX_NOTES:
            self._counts[sentence] += 1

    def sentences(self) -> list[str]:
        """In the order of first occurrence, with counts above one."""
        return [f"{s} ({n} times)" if n > 1 else s for s, n in self._counts.items()]


Reader = Callable[[BinaryIO, Notes], Iterator[Row]]
"""Reads a stream to its end. Raises Unreadable and nothing else; what is damaged is skipped with a note."""

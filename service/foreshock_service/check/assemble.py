"""Rows of a log become steps: partial rows of one step are joined, missing numbers counted, restarts seen.

A step that comes again after later ones, with series that it already had, is a restart: a new attempt begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from foreshock_service.check.aliases import has_holes, is_training
from foreshock_service.check.readers.base import Notes, Row, Unreadable

WINDOW = 3
"""Steps kept open for rows that come late: evaluations are logged after the step that follows them began."""


UNDECIDED = 8
"""Rows without a number after which a log has none."""


DISORDER = 3
"""A log is in no order if a step in so many, or more, is below the one before it."""
AT_LEAST = 8
"""Rows without which neither that nor a step number that stands still is told."""


class RawStep(msgspec.Struct, frozen=True):
    """All that was logged of one step, under the framework's names."""

    attempt: int
    step: int
    values: dict[str, float]


class Assembler:
    """One log. Memory: the open steps."""

    def __init__(self, notes: Notes, interval: int = 1) -> None:
        self._notes = notes
        self._interval = interval
        self._open: dict[int, dict[str, float]] = {}
        self._attempt = 1
        self._numbered: bool | None = None
        self._counted = 0
        self._carried: dict[str, float] = {}
        self._undecided: list[Row] = []
        self._steps, self._overwritten = 0, 0
        self._last: dict[str, float] = {}
        self._varies = False

    def feed(self, row: Row) -> Iterator[RawStep]:
        """The steps that a row completes."""
        if has_holes(row.values):
            # In such a row a NaN of illness cannot be told from a hole.
            self._notes.add(
                "NaN stands for missing in some rows (a learning rate or length is NaN): NaNs left out there."
            )
            row = Row(row.step, {name: value for name, value in row.values.items() if not math.isnan(value)})
            if not row.values:
                return
        if self._numbered is None:
            # Whether a log has step numbers shows only after a few rows: slime's begins with a rollout, which has none.
            self._undecided.append(row)
            if row.step is not None or len(self._undecided) >= UNDECIDED:
                yield from self._decide(row.step is not None)
            return
        if row.step is None:
            yield from self._unnumbered(row)
            return
        yield from self._place(row.step, row.values)

    def flush(self) -> Iterator[RawStep]:
        """What is still open, at the end of the log."""
        yield from self._decide(False)
        if self._carried and self._open:
            newest = max(self._open)
            self._open[newest] = {**self._carried, **self._open[newest]}
            self._carried = {}
        yield from self._complete(0)
        if self._steps == 1 and self._overwritten >= AT_LEAST:
            raise Unreadable(f"all {self._overwritten + 1} rows bear the same step number: it counts something else")
        if self._attempt > AT_LEAST and self._attempt * DISORDER >= self._steps:
            raise Unreadable("its steps are in no order, or in reverse: sort the rows by step")

    def _decide(self, numbered: bool) -> Iterator[RawStep]:
        rows, self._undecided = self._undecided, []
        if self._numbered is None:
            self._numbered = numbered
            if not numbered and rows:
                self._notes.add(f"No step numbers: step = line × {self._interval}.")
        for row in rows:
            yield from self.feed(row)

    def _unnumbered(self, row: Row) -> Iterator[RawStep]:
        if self._numbered:
            # An evaluation, or slime's rollout line: it belongs to the step that comes.
            self._carried.update(row.values)
            return
        if not is_training(row.values):
            if self._open:
                newest = self._open[max(self._open)]
                for name, value in row.values.items():
                    newest.setdefault(name, value)
            return
        if self._varies and len(row.values) > 2 and row.values == self._last:
            self._notes.add("A line that says what the one before it said (another rank's) was left out.")
            return
        self._varies = self._varies or bool(self._last and row.values != self._last)
        self._last = row.values
        self._counted += self._interval
        yield from self._place(self._counted, row.values)

    def _place(self, step: int, values: dict[str, float]) -> Iterator[RawStep]:
        here = self._open.get(step)
        newest = max(self._open, default=-1)
        if here is not None and (step == newest or not here.keys() & values.keys()):
            self._overwritten += bool(here.keys() & values.keys())
            _join(here, values)
            return
        if self._open and step <= newest:
            latest = self._open[newest]
            if not is_training(values) or not latest.keys() & values.keys():
                self._notes.add("Rows that came after later steps, without series of those, were left out.")
                return
            yield from self._complete(0)
            self._attempt += 1
            self._notes.add(f"Step numbers go back (to {step}): a restart or another run; a new attempt begins there.")
        self._open[step] = {**self._carried, **values}
        self._carried = {}
        yield from self._complete(WINDOW)

    def _complete(self, keep: int) -> Iterator[RawStep]:
        while len(self._open) > keep:
            step = min(self._open)
            self._steps += 1
            yield RawStep(self._attempt, step, self._open.pop(step))


def _join(here: dict[str, float], values: dict[str, float]) -> None:
    """The last value counts, but one that is not finite stays: it happened."""
    for name, value in values.items():
        if name not in here or math.isfinite(here[name]):
            here[name] = value

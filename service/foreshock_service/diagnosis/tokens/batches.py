"""What readers hand over: the tokens of one observation (one micro-batch of one rank), whole sequences end to end.

Legend: S sequences, N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foreshock.dumps.schema import PAIR_SIDES, About

Array = npt.NDArray[Any]


class DumpError(Exception):
    """A dump that cannot be read or is of another make; the message names the file."""


class StepKey(NamedTuple):
    """A step of an attempt."""

    launch: str
    generation: int
    step: int


class Unit(NamedTuple):
    """What is read in one go: a file, or a span of its row groups."""

    path: Path
    format: str
    start: int = 0
    end: int = -1
    """Row groups [start, end); −1: all of the file."""


@dataclass(slots=True)
class Batch:
    """`columns` holds what is there, by the names of `foreshock.dumps.schema`; a log-prob that is absent is not null
    but missing. `edges` [S + 1]."""

    key: StepKey
    role: str
    rank: int
    optimizer_step: int
    edges: Array
    columns: dict[str, Array]
    about: About
    old_source: str = ""
    clip: tuple[float, float] | None = None
    piece: bool = False

    @property
    def who(self) -> str:
        """The rank by name."""
        return f"{self.role} {self.rank}"

    def sides(self, pair: str) -> tuple[Array, Array] | None:
        """The log-probs a and b [N] of a pair; None where this batch is none of its."""
        later = self.optimizer_step > 0
        if later != (pair == "update") and pair != "reference":
            return None
        left, right = PAIR_SIDES[pair]
        if left not in self.columns or right not in self.columns:
            return None
        return self.columns[left], self.columns[right]

    def counted(self, pair: str) -> Counted | None:
        """The masked, finite tokens of a pair, by sequence; None where there is none."""
        sides = self.sides(pair)
        if sides is None:
            return None
        a, b = (side.astype(np.float64) for side in sides)
        keep = self.columns["mask"] & np.isfinite(a) & np.isfinite(b) & (a > -9998) & (b > -9998)
        if not keep.any():
            return None
        sequence = np.repeat(np.arange(self.edges.size - 1), np.diff(self.edges))
        position = np.cumsum(self.columns["mask"]) - 1
        begins = np.concatenate([[0], np.cumsum(self.columns["mask"])])[self.edges[:-1]]
        position = position - np.repeat(begins, np.diff(self.edges))
        lengths = np.add.reduceat(self.columns["mask"].astype(np.int64), self.edges[:-1])
        return Counted(a[keep], b[keep], sequence[keep], position[keep], lengths, keep)


@dataclass(slots=True)
class Counted:
    """Tokens that count: a, b, sequence and position within the response [N]; sampled tokens per sequence [S]."""

    a: Array
    b: Array
    sequence: Array
    position: Array
    lengths: Array
    keep: Array = field(repr=False)
    """[tokens of the batch] which they are"""

    @property
    def delta(self) -> Array:
        difference: Array = self.a - self.b
        return difference

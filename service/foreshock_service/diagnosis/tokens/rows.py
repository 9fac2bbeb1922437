"""Do the log-probs of a row fit another row better than its own? Rows that were permuted, or belong to an earlier step.

By content alone: the first tokens of each row's a are held against the first tokens of other rows' b. How near two
unrelated rows come by chance is read from b among itself, so alike rows (the samples of one prompt) prove nothing.

Legend: R rows, L tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from foreshock_service.diagnosis.tokens.batches import Array, Batch, Counted

KEPT_ROWS: Final = 256
"""Of each step and rank, the first."""
KEPT_TOKENS: Final = 32
MIN_TOKENS: Final = 4
FITS: Final = 0.3
"""Another row fits where it is nearer than this share of the row's own distance and of what chance gives."""
APART: Final = 1e-2
"""Nats: rows nearer than this to their own are in order."""


@dataclass
class Rows:
    """The first rows of one step on one rank."""

    a: list[Array] = field(default_factory=list)
    b: list[Array] = field(default_factory=list)
    row: list[int] = field(default_factory=list)

    def add(self, counted: Counted, batch: Batch) -> None:
        """Keeps the first tokens of a batch's rows while there is room."""
        ends = np.cumsum(np.bincount(counted.sequence, minlength=batch.edges.size - 1))
        for index, end in enumerate(ends):
            start = 0 if index == 0 else int(ends[index - 1])
            if len(self.a) >= KEPT_ROWS:
                return
            if end - start >= MIN_TOKENS:
                cut = slice(start, min(int(end), start + KEPT_TOKENS))
                self.a.append(counted.a[cut].astype(np.float32))
                self.b.append(counted.b[cut].astype(np.float32))
                self.row.append(len(self.row))

    def absorb(self, other: Rows) -> None:
        """Adds another part, while there is room."""
        room = max(0, KEPT_ROWS - len(self.a))
        self.a += other.a[:room]
        self.b += other.b[:room]
        self.row = list(range(len(self.a)))


class Fit(NamedTuple):
    """`moved` of `tellable` rows fit another row; `earlier` of those, one of the step before; `shifted` fit their own
    row one place further."""

    rows: int
    tellable: int
    moved: int
    earlier: int
    shifted: int


def fit(steps: Sequence[tuple[Rows, Rows | None]]) -> Fit:
    """Over steps, each with the one before it on the same rank, if that is there."""
    total = np.zeros(5, dtype=np.int64)
    for rows, before in steps:
        total += _fit(rows, before)
    return Fit(*(int(x) for x in total))


def _fit(rows: Rows, before: Rows | None) -> tuple[int, int, int, int, int]:
    if len(rows.a) < 2:
        return 0, 0, 0, 0, 0
    a, b = _padded(rows.a), _padded(rows.b)
    own = np.nanmean(np.abs(a - b), axis=1)
    others = _distances(a, b)
    chance = _distances(b, b)
    np.fill_diagonal(others, np.inf)
    np.fill_diagonal(chance, np.inf)
    nearest, by_chance = others.min(axis=1), chance.min(axis=1)
    earlier = np.full(own.size, np.inf)
    if before is not None and before.b:
        # Either side may be the one that lags: a against the b of then, b against the a of then.
        a_then, b_then = _padded(before.a), _padded(before.b)
        earlier = np.minimum(_distances(a, b_then).min(axis=1), _distances(b, a_then).min(axis=1))
        by_chance = np.minimum(by_chance, _distances(b, b_then).min(axis=1))
    shifted = np.array([_shift_distance(x, y) for x, y in zip(rows.a, rows.b, strict=True)])
    apart = own > APART
    tellable = apart & (by_chance > APART)
    bound = FITS * np.minimum(own, by_chance)
    from_before = tellable & (earlier < bound) & (earlier < nearest)
    moved = tellable & ((nearest < bound) | from_before)
    slid = apart & (shifted < FITS * own) & ~moved
    return own.size, int(tellable.sum()), int(moved.sum()), int(from_before.sum()), int(slid.sum())


def _padded(rows: Sequence[Array]) -> Array:
    """[R, KEPT_TOKENS], NaN beyond a row's end."""
    out = np.full((len(rows), KEPT_TOKENS), np.nan, dtype=np.float32)
    for index, row in enumerate(rows):
        out[index, : row.size] = row
    return out


def _distances(x: Array, y: Array) -> Array:
    """Mean |x_i − y_j| over the tokens that both have [R, R]; rows of other lengths are no rivals (∞)."""
    length_x, length_y = (~np.isnan(x)).sum(axis=1), (~np.isnan(y)).sum(axis=1)
    total = np.zeros((x.shape[0], y.shape[0]))
    for place in range(KEPT_TOKENS):
        difference = np.abs(x[:, place, None] - y[None, :, place])
        total += np.where(np.isnan(difference), 0.0, difference)
    shared = np.minimum(length_x[:, None], length_y[None, :])
    # A row that was permuted before its forward keeps its length; so does one of an earlier tensor, up to padding.
    return np.where(shared >= MIN_TOKENS, total / np.maximum(shared, 1), np.inf)


def _shift_distance(a: Array, b: Array) -> float:
    if a.size <= MIN_TOKENS:
        return float("inf")
    forth, back = np.abs(a[1:] - b[:-1]).mean(), np.abs(a[:-1] - b[1:]).mean()
    return float(min(forth, back))

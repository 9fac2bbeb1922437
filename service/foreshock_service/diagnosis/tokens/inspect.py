"""What only tokens can tell, over the ill steps of one pair: sums by place, token, length, rank, chunk and lag.

Everything adds: parts of any division give the same sums. Bounded whatever the dump's size: logarithmic bins, the
vocabulary, and the first rows of each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from foreshock_service.diagnosis.tokens.batches import Array, Batch, Counted, StepKey
from foreshock_service.diagnosis.tokens.rows import Rows

BINS: Final = 24
"""Bin 0 is place 0 (or length 0), bin k is [2^(k−1), 2^k)."""
CHUNKS: Final = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
UNLIKELY: Final = np.log(1e-3)
NOTHING: Final = 1e-3
"""Nats: below this a difference has no sign."""


def bin_of(values: Array) -> Array:
    """Logarithmic bin of integers ≥ 0."""
    bins: Array = np.minimum(np.frexp(values.astype(np.float64))[1], BINS - 1)
    return bins


@dataclass
class Sums:
    """Of one pair over steps. Tables are [bins, 3]: tokens, Σ|δ|, Σδ²."""

    positions: Array = field(default_factory=lambda: np.zeros((BINS, 3)))
    lengths: Array = field(default_factory=lambda: np.zeros((BINS, 3)))
    """by the length of the token's response"""
    ends: Array = field(default_factory=lambda: np.zeros((3, 3)))
    """first tokens, last tokens, all"""
    chunks: Array = field(default_factory=lambda: np.zeros((len(CHUNKS), 3)))
    """tokens at multiples of each size, without place 0"""
    signs: Array = field(default_factory=lambda: np.zeros(3))
    """tokens with δ > NOTHING, δ < −NOTHING, and b < UNLIKELY"""
    least: float = 0.0
    """smallest b"""
    token_ids: Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    token_sums: Array = field(default_factory=lambda: np.zeros((0, 3)))
    lags: dict[int, Array] = field(default_factory=dict)
    groups: dict[tuple[StepKey, int], GroupSums] = field(default_factory=dict)
    rows: dict[tuple[StepKey, str], Rows] = field(default_factory=dict)

    def add(self, pair: str, batch: Batch) -> None:
        """Adds a batch of the pair."""
        counted = batch.counted(pair)
        if counted is None:
            return
        absolute = np.abs(counted.delta)
        weights = np.stack([np.ones_like(absolute), absolute, absolute * absolute], axis=1)
        self.positions += _binned(bin_of(counted.position), weights)
        self.lengths += _binned(bin_of(counted.lengths[counted.sequence]), weights)
        self._add_ends(counted, weights)
        self._add_signs(counted)
        for index, size in enumerate(CHUNKS):
            self.chunks[index] += weights[(counted.position % size == 0) & (counted.position > 0)].sum(axis=0)
        if "token" in batch.columns:
            tokens = np.nan_to_num(batch.columns["token"][counted.keep], nan=-1).astype(np.int64)
            self._add_tokens(*_by_id(tokens, weights))
        if "version_lag" in batch.columns:
            lag = np.nan_to_num(batch.columns["version_lag"][counted.keep], nan=-1).astype(np.int64)
            for value, sums in zip(*_by_id(lag, weights), strict=True):
                self.lags[int(value)] = self.lags.get(int(value), np.zeros(3)) + sums
        self._add_groups(batch)
        kept = self.rows.setdefault((batch.key, batch.who), Rows())
        kept.add(counted, batch)

    def absorb(self, other: Sums) -> None:
        """Adds another part."""
        for name in ("positions", "lengths", "ends", "chunks", "signs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.least = min(self.least, other.least)
        self._add_tokens(other.token_ids, other.token_sums)
        for lag, sums in other.lags.items():
            self.lags[lag] = self.lags.get(lag, np.zeros(3)) + sums
        for key, group in other.groups.items():
            self.groups.setdefault(key, GroupSums()).absorb(group)
        for where, rows in other.rows.items():
            self.rows.setdefault(where, Rows()).absorb(rows)

    def _add_ends(self, counted: Counted, weights: Array) -> None:
        self.ends[0] += weights[counted.position == 0].sum(axis=0)
        self.ends[1] += weights[counted.position == counted.lengths[counted.sequence] - 1].sum(axis=0)
        self.ends[2] += weights.sum(axis=0)

    def _add_signs(self, counted: Counted) -> None:
        d = counted.delta
        self.signs += [(d > NOTHING).sum(), (d < -NOTHING).sum(), (counted.b < UNLIKELY).sum()]
        self.least = min(self.least, float(counted.b.min()))

    def _add_tokens(self, ids: Array, sums: Array) -> None:
        if not ids.size:
            return
        both = np.concatenate([self.token_ids, ids])
        self.token_ids, self.token_sums = _by_id(both, np.concatenate([self.token_sums, sums]))

    def _add_groups(self, batch: Batch) -> None:
        if "group" not in batch.columns:
            return
        first = batch.edges[:-1]
        for name, default in (("prompt", -1.0), ("advantage", np.nan)):
            if name not in batch.columns:
                batch.columns[name] = np.full(batch.columns["mask"].size, default)
        columns = [batch.columns[name][first].astype(np.float64) for name in ("group", "prompt", "advantage")]
        for group, prompt, advantage in zip(*columns, strict=True):
            if np.isfinite(group):
                sums = self.groups.setdefault((batch.key, int(group)), GroupSums())
                sums.add(int(np.nan_to_num(prompt, nan=-1)), float(advantage))


@dataclass
class GroupSums:
    """One advantage group of one step."""

    sequences: int = 0
    prompts: set[int] = field(default_factory=set)
    """at most three of them"""
    advantage: float = 0.0
    squares: float = 0.0

    def add(self, prompt: int, advantage: float) -> None:
        """Adds a sequence."""
        self.sequences += 1
        if prompt >= 0 and len(self.prompts) < 3:
            self.prompts.add(prompt)
        if np.isfinite(advantage):
            self.advantage += advantage
            self.squares += advantage * advantage

    def absorb(self, other: GroupSums) -> None:
        """Adds another part."""
        self.sequences += other.sequences
        self.prompts = set(sorted(self.prompts | other.prompts)[:3])
        self.advantage += other.advantage
        self.squares += other.squares


def inspect(batches: Iterable[Batch], pair: str, steps: Collection[StepKey]) -> Sums:
    """The sums of a pair over some steps."""
    sums = Sums()
    for batch in batches:
        if batch.key in steps:
            sums.add(pair, batch)
    return sums


def merged(parts: Iterable[Sums]) -> Sums:
    """One for all, in the order of the parts."""
    whole = Sums()
    for part in parts:
        whole.absorb(part)
    return whole


def _binned(bins: Array, weights: Array) -> Array:
    return np.stack([np.bincount(bins, weights=weights[:, i], minlength=BINS) for i in range(3)], axis=1)


def _by_id(ids: Array, weights: Array) -> tuple[Array, Array]:
    """Sums per distinct id, ids ascending."""
    unique, inverse = np.unique(ids, return_inverse=True)
    sums = np.stack([np.bincount(inverse, weights=weights[:, i], minlength=unique.size) for i in range(3)], axis=1)
    return unique, sums

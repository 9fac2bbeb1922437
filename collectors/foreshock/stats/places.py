"""Where packed host tokens stand: their sequence, their position within the response, its decile; and the worst of
them.

A token's position is its index among the sampled (masked) tokens of its sequence; its decile ⌊10 · position /
length⌋.

Legend: S sequences, N tokens, W worst tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from foreshock.stats import sketch
from foreshock.stats.layout import Array, IntArray, Reduction
from foreshock.stats.record import DECILES, EVIDENCE_TOKENS
from foreshock.stats.shapes import Batch

_OCTAVES = 4  # below the largest value, within which its 16 rivals are counted for
_SEARCHED = 512  # below it a search of all is quicker
_FEW = 2 * EVIDENCE_TOKENS  # candidates that the record may as well sort itself
_MINUS_STEPS = -np.arange(DECILES + 1)

Buckets = tuple[npt.NDArray[np.int32], IntArray]
"""the dense sketch bucket of each token [N], and the counts of all [D]"""


@dataclass(slots=True)
class Spans:
    """Sequences as spans of tokens packed end to end."""

    masked: IntArray
    """[S] masked tokens"""
    counts: IntArray
    """[S] those of them that count: without holes, the same"""
    starts: IntArray
    """[S] index of each span's first token"""
    total: int
    """tokens in all spans together"""
    all_filled: bool
    """whether no span is empty"""
    positions: IntArray | None = None
    """[N] positions within the response, where they do not simply run on"""
    runs: list[tuple[int, int, int]] | None = None
    """of each padded row, if without a gap: where its masked tokens begin in the flat batch, end, and go"""
    origin: IntArray | None = None
    """[N] index among the masked tokens, where some have been taken out"""

    @classmethod
    def of(cls, masked: IntArray) -> Spans:
        ends = np.cumsum(masked)
        return cls(masked, masked, ends - masked, int(ends[-1]) if ends.size else 0, bool(masked.all()))

    def sequence_of(self, index: IntArray) -> IntArray:
        return (self.starts + self.counts).searchsorted(index, side="right")

    def without(self, valid_N: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> Spans:
        """The spans of the valid tokens alone, which keep their positions."""
        sequence = np.repeat(np.arange(self.masked.size), self.masked)
        positions = self.positions
        if positions is None:
            positions = np.arange(self.total) - self.starts[sequence]
        left = Spans.of(np.bincount(sequence[valid_N], minlength=self.masked.size))
        left.masked, left.positions, left.origin = self.masked, positions[valid_N], np.flatnonzero(valid_N)
        return left

    def rectangle(self) -> tuple[int, int] | None:
        """[S, T] where all spans are equally long."""
        count = self.counts.size
        return (count, self.total // count) if (self.counts == self.counts[0]).all() else None

    def sums(self, x: Array) -> Array:
        """Σ of x [N] per sequence."""
        if self.all_filled:
            sums: Array = np.add.reduceat(x, self.starts)
            return sums
        return between(x, self.starts)


def between(values: Array, starts: IntArray) -> Array:
    """Sums of values from each start to the next (the last to the end); starts ascend, equal ones give 0."""
    size = values.size
    if starts[-1] < size:
        sums: Array = np.add.reduceat(values, starts)
    else:  # spans that begin behind the last value: reduceat takes no such start
        inside = int(np.searchsorted(starts, size))
        sums = np.zeros(starts.size)
        if inside:
            sums[:inside] = np.add.reduceat(values, starts[:inside])
    sums[:-1][starts[1:] <= starts[:-1]] = 0.0
    return sums


def add_places(
    into: Reduction,
    batch: Batch,
    spans: Spans,
    abs_N: Array,
    values: tuple[Array, Array],
    kept: torch.Tensor | None,
    buckets: Buckets,
    largest: float,
    base: int,
) -> Array:
    """Adds first tokens, deciles and the worst tokens of |δ| = abs_N [N] to `into`; returns Σ|δ| per sequence [S].

    `values` are δ and b [N]; `kept` is the mask by which tokens were packed, `buckets` those of abs_N, `largest` the
    maximum of abs_N.
    """
    _add_worst(into, batch, spans, abs_N, values, kept, buckets, largest, base)
    if not batch.placed:
        return spans.sums(abs_N)
    if spans.positions is None:
        starts = spans.starts if spans.all_filled else spans.starts[spans.counts > 0]
        into.first[0] += starts.size
        into.first[1] += np.add.reduce(abs_N[starts])
        # Of each decile the rank of its first token, ⌈k · length / 10⌉, negative to have // round up.
        minus_S11 = spans.counts[:, None] * _MINUS_STEPS // DECILES
        edges_S10 = spans.starts[:, None] - minus_S11[:, :-1]
        sums_S10 = between(abs_N, edges_S10.reshape(-1)).reshape(-1, DECILES)
        minus_11 = np.add.reduce(minus_S11, axis=0)
        into.deciles[0] += minus_11[:-1] - minus_11[1:]
        into.deciles[1] += np.add.reduce(sums_S10, axis=0)
        result: Array = np.add.reduce(sums_S10, axis=1)
        return result
    sequence = np.repeat(np.arange(spans.counts.size), spans.counts)
    decile = np.clip(spans.positions * DECILES // _lengths(batch, spans, sequence)[sequence], 0, DECILES - 1)
    into.deciles[0] += np.bincount(decile, minlength=DECILES)
    into.deciles[1] += np.bincount(decile, weights=abs_N, minlength=DECILES)
    first = spans.positions == 0
    into.first += (np.count_nonzero(first), abs_N[first].sum())
    return spans.sums(abs_N)


def _lengths(batch: Batch, spans: Spans, sequence: IntArray) -> IntArray:
    """[S] lengths of the responses, at least 1: the host's, else what the positions imply, else the masked tokens."""
    if batch.lengths is not None:
        given: IntArray = np.maximum(batch.lengths.numpy(), 1)
        return given
    lengths = np.maximum(spans.masked, 1)
    if batch.positions is not None and spans.positions is not None:
        lengths = np.ones_like(lengths)
        np.maximum.at(lengths, sequence, spans.positions + 1)
    return lengths


def _add_worst(
    into: Reduction,
    batch: Batch,
    spans: Spans,
    abs_N: Array,
    values: tuple[Array, Array],
    kept: torch.Tensor | None,
    buckets: Buckets,
    largest: float,
    base: int,
) -> None:
    worst = _worst(abs_N, buckets, largest)
    sequence = spans.sequence_of(worst)
    ids = np.empty((worst.size, 3), dtype=np.int64)
    ids[:, 0] = sequence + base if batch.seq_ids is None else np.asarray(batch.seq_ids)[sequence]
    ids[:, 1] = worst - spans.starts[sequence] if spans.positions is None else spans.positions[worst]
    ids[:, 2] = -1
    if batch.token_ids is not None:
        tokens = batch.token_ids.reshape(-1).numpy()
        tokens = tokens if kept is None else tokens[kept.numpy().reshape(-1)]
        # Holes have left the spans, not the tokens.
        ids[:, 2] = tokens[worst if spans.origin is None else spans.origin[worst]]
    into.worst_ids.append(ids)
    pairs = np.empty((worst.size, 2))
    pairs[:, 1] = values[1][worst]
    pairs[:, 0] = pairs[:, 1] + values[0][worst]
    into.worst_logps.append(pairs)


def _worst(abs_N: Array, buckets: Buckets, largest: float) -> IntArray:
    """Indices of the largest values and perhaps a few more, found through their counts per dense sketch bucket: only
    the top buckets matter."""
    if abs_N.size <= _SEARCHED:
        candidates: IntArray = np.arange(abs_N.size)
    else:
        bucket_N, dense = buckets
        bucket = sketch.bucket_of(largest)
        floor, above = max(0, bucket - _OCTAVES * 32), dense.item(bucket)
        while above < EVIDENCE_TOKENS and bucket > floor:
            bucket -= 1
            above += dense.item(bucket)
        candidates = (bucket_N >= bucket).nonzero()[0]
    if candidates.size <= _FEW:
        return candidates
    return candidates[np.argpartition(abs_N[candidates], -EVIDENCE_TOKENS)[-EVIDENCE_TOKENS:]]

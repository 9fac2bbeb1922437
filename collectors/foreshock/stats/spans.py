"""Which host tokens count, and where they stand once packed end to end: a mask [S, T] or edges [S + 1] → spans.

Legend: S sequences, T positions, N packed tokens.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foreshock.stats.layout import Array, IntArray
from foreshock.stats.record import DECILES
from foreshock.stats.shapes import Batch

_FEW_ROWS = 64
_MINUS_STEPS = -np.arange(DECILES + 1)


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
    _deciles: tuple[IntArray, IntArray, IntArray] | None = None

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

    def deciles(self) -> tuple[IntArray, IntArray, IntArray]:
        """Where positions run on: index of each sequence's first token, of each decile's [S · 10], tokens of each."""
        if self._deciles is None:
            starts = self.starts if self.all_filled else self.starts[self.counts > 0]
            # Of each decile the rank of its first token, ⌈k · length / 10⌉, negative to have // round up.
            minus_S11 = self.counts[:, None] * _MINUS_STEPS // DECILES
            edges_S10 = self.starts[:, None] - minus_S11[:, :-1]
            minus_11 = np.add.reduce(minus_S11, axis=0)
            self._deciles = starts, edges_S10.reshape(-1), minus_11[:-1] - minus_11[1:]
        return self._deciles

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


def spans_of(batch: Batch) -> tuple[Spans, torch.Tensor | None]:
    """Where each sequence's masked tokens lie once packed, and the mask to pack by (None: they already are)."""
    if batch.cu_seqlens is None:
        sequences, length = batch.a.shape
        if batch.mask is None:
            return Spans.of(np.full(sequences, length, dtype=np.int64)), None
        spans = _MASKED.spans(batch.mask.numpy())
        return spans, None if spans.total == batch.mask.numel() else batch.mask
    edges, size = batch.cu_seqlens.numpy(), batch.a.shape[0]
    if edges[0] < 0 or edges[-1] > size or np.any(np.diff(edges) < 0):
        raise ValueError(f"cu_seqlens must ascend within 0..{size}, got {edges[:8].tolist()}…")
    if (edges[0], edges[-1]) == (0, size) and (batch.mask is None or batch.mask.numpy().all()):
        return Spans.of(np.diff(edges)), None
    mask = np.ones(size, dtype=bool) if batch.mask is None else batch.mask.numpy().copy()
    mask[: edges[0]] = False
    mask[edges[-1] :] = False
    running = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(mask, dtype=np.int64)))
    return Spans.of(np.diff(running[edges])), torch.from_numpy(mask)


class _Masked(threading.local):
    """The spans of the last mask, by its content: the pairs of a micro-batch have theirs in common."""

    KEPT_TOKENS = 1 << 16

    def __init__(self) -> None:
        self._last: tuple[tuple[int, ...], bytes, Spans] | None = None

    def spans(self, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Spans:
        """Of a mask [S, T]; not to be written to."""
        sequences, length = mask.shape
        if not length or not 0 < sequences <= _FEW_ROWS:
            return Spans.of(np.count_nonzero(mask, axis=1))
        flags = mask.tobytes()  # whose search is several times quicker than argmax
        if self._last is not None and self._last[0] == mask.shape and self._last[1] == flags:
            return self._last[2]
        spans = _run_spans(mask, flags) or Spans.of(np.count_nonzero(mask, axis=1))
        self._last = (mask.shape, flags, spans) if mask.size <= self.KEPT_TOKENS else None
        return spans


_MASKED = _Masked()


def _run_spans(mask: np.ndarray[Any, np.dtype[np.bool_]], flags: bytes) -> Spans | None:
    """The spans where each row's masked tokens stand together, as sampled responses do; None where they do not.

    From first to last masked token there are at least as many positions as masked tokens: the sums are equal only
    where no row has a gap and none is empty.
    """
    length = mask.shape[1]
    runs, masked, total = [], [], 0
    for row in range(0, len(flags), length):
        first = flags.find(1, row, row + length)
        if first < 0:
            return None
        end = flags.rfind(1, row, row + length) + 1
        runs.append((first, end, total))
        masked.append(end - first)
        total += end - first
    if total != np.count_nonzero(mask):
        return None
    masked_S, starts_S = np.array(masked), np.array([start for _, _, start in runs])
    return Spans(masked_S, masked_S, starts_S, total, all_filled=True, runs=runs)

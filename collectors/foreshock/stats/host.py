"""Tensors in host memory → sums per sequence: the quick path for CPU tensors, same numbers as `device`.

Everything is computed in float64 in reused buffers that stay in the second-level cache; each pass over [8, 4096] costs some
five microseconds, so the passes are counted. It may look at values and branch, which the device path must not.

Legend: S sequences, T positions, N tokens (S·T padded, or packed). p = e^b, e = e^a − e^b, x = e^δ − 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from foreshock.stats.layout import (
    COLUMNS,
    LN2,
    OVERFLOW_DELTA,
    SENTINEL_FLOOR,
    TOTALS,
    Array,
    IntArray,
    Reduction,
)
from foreshock.stats.record import DECILES, EVIDENCE_TOKENS
from foreshock.stats.shapes import Batch, sentinel_of
from foreshock.stats.sketch import DENSE_BUCKETS, SHIFT

_SUSPECT = -9000.0  # nothing at or above it is a sentinel, in any dtype's rounding of −9999
_BLOCK = 64

_vecdot: Any = getattr(np, "vecdot", None) or (lambda x, y: np.einsum("st,st->s", x, y))  # numpy < 2.0


class Workspace:
    """Float64 buffers reused between calls, so that no pass pays for fresh pages."""

    BUFFERS = 7

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.float64)

    def take(self, shape: torch.Size) -> list[torch.Tensor]:
        size = shape.numel()
        if self._flat.numel() < self.BUFFERS * size:
            self._flat = torch.empty(self.BUFFERS * size, dtype=torch.float64)
        return [self._flat[i * size : (i + 1) * size].view(shape) for i in range(self.BUFFERS)]


@dataclass(slots=True)
class _Rows:
    """How tokens lie in sequences: rows [S, T], or spans of a flat [N]."""

    starts_S: IntArray
    lengths_S: IntArray
    padded: bool

    def dot(self, x: Array, y: Array) -> Array:
        if self.padded:
            result: Array = _vecdot(x, y)
            return result
        return self.sum(x * y)

    def sum(self, x: Array) -> Array:
        if self.padded:
            return np.add.reduce(x, axis=1)
        sums = np.zeros(len(self.starts_S))
        filled = self.lengths_S > 0
        if filled.any():
            sums[filled] = np.add.reduceat(x, self.starts_S[filled])
        return sums


@dataclass(slots=True)
class _Cleaned:
    """Log-probs in float64 with 0 at every token that does not count, and where those are."""

    a: torch.Tensor
    b: torch.Tensor
    d: torch.Tensor
    kept: torch.Tensor | None
    """1.0 on tokens that count; None where all do"""
    low: float
    high: float
    lowest_b: float
    nonfinite: int
    sentinels: int


def reduce(batch: Batch, into: Reduction, work: Workspace, base: int) -> Array:
    """Adds a batch's totals, extremes, sketch, deciles and evidence to `into`; returns its table [S, K].

    `base` numbers the batch's first sequence where the host gave no ids.
    """
    if batch.a.numel() == 0:
        return np.zeros((batch.sequences, len(COLUMNS)))
    rows = _rows(batch)
    buffers = work.take(batch.a.shape)
    clean = _clean(batch, buffers)
    kept = None if clean.kept is None else clean.kept.numpy()
    n_S = rows.lengths_S.astype(np.float64) if kept is None else rows.sum(kept)
    masked_S = n_S
    if clean.nonfinite or clean.sentinels:
        masked_S = (
            rows.sum(batch.mask.numpy().astype(np.float64))
            if batch.mask is not None
            else rows.lengths_S.astype(np.float64)
        )
    absolute = torch.abs(clean.d, out=buffers[4])
    count = int(n_S.sum())
    _add_totals(into, clean, absolute, count, batch.clip_range)
    _add_sketch(into, absolute, count)
    _add_places(
        into, batch, rows, absolute.numpy(), kept if clean.nonfinite or clean.sentinels else None, masked_S, base
    )
    table, e_max = _table(clean, absolute, rows, n_S, masked_S, buffers)
    into.extremes[2] = max(into.extremes[2], e_max)
    return table


def trimmed(batch: Batch) -> Batch:
    """A packed batch cut to the tokens that its sequences cover. Raises ValueError where cu_seqlens does not ascend within it."""
    if batch.cu_seqlens is None:
        return batch
    edges = batch.cu_seqlens.numpy()
    if edges[0] < 0 or edges[-1] > batch.a.shape[0] or np.any(np.diff(edges) < 0):
        raise ValueError(f"cu_seqlens must ascend within 0..{batch.a.shape[0]}, got {edges[:8].tolist()}…")
    start, end = int(edges[0]), int(edges[-1])
    if (start, end) == (0, batch.a.shape[0]):
        return batch

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[start:end]

    return replace(
        batch,
        a=batch.a[start:end],
        b=batch.b[start:end],
        mask=cut(batch.mask),
        cu_seqlens=batch.cu_seqlens - start,
        token_ids=cut(batch.token_ids),
        positions=cut(batch.positions),
    )


def _rows(batch: Batch) -> _Rows:
    if batch.cu_seqlens is None:
        sequences, positions = batch.a.shape
        return _Rows(np.arange(sequences) * positions, np.full(sequences, positions), padded=True)
    edges = batch.cu_seqlens.numpy()
    return _Rows(edges[:-1], np.diff(edges), padded=False)


def _clean(batch: Batch, buffers: list[torch.Tensor]) -> _Cleaned:
    a, b, d, kept = buffers[0].copy_(batch.a), buffers[1].copy_(batch.b), buffers[2], None
    if batch.mask is not None:
        kept = buffers[3].copy_(batch.mask)
    torch.sub(a, b, out=d)
    if kept is not None:
        d.mul_(kept)
    low, high = (float(v) for v in torch.aminmax(d))
    lowest_a, lowest_b = float(batch.a.amin()), float(batch.b.amin())
    nonfinite = sentinels = 0
    # One comparison that NaN fails, wherever it sits: holes are rare, and a pass that looks for them token by token is not free.
    if not (lowest_a > _SUSPECT and lowest_b > _SUSPECT and low > -math.inf and high < math.inf):
        good, nonfinite, sentinels = _holes(batch, a, b)
        kept = buffers[3].copy_(good)
        a.masked_fill_(~good, 0.0)
        b.masked_fill_(~good, 0.0)
        torch.sub(a, b, out=d)
        low, high = (float(v) for v in torch.aminmax(d))
        lowest_b = float(b.amin())
    if kept is not None and (low >= 0.0 or high <= 0.0):
        # The zeros of masked tokens are no measurements.
        counted = d[kept != 0]
        low, high = (float(v) for v in torch.aminmax(counted)) if counted.numel() else (math.inf, -math.inf)
    return _Cleaned(a, b, d, kept, low, high, lowest_b, nonfinite, sentinels)


def _holes(batch: Batch, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Tokens that count, and how many masked ones were not finite or an engine's sentinel."""
    finite = torch.isfinite(a) & torch.isfinite(b)
    marked = (
        (a == sentinel_of(batch.a.dtype))
        | (a <= SENTINEL_FLOOR)
        | (b == sentinel_of(batch.b.dtype))
        | (b <= SENTINEL_FLOOR)
    )
    mask = torch.ones_like(finite) if batch.mask is None else batch.mask
    nonfinite = int((mask & ~finite).sum())
    sentinels = int((mask & finite & marked).sum())
    return mask & finite & ~marked, nonfinite, sentinels


def _add_totals(
    into: Reduction, clean: _Cleaned, absolute: torch.Tensor, count: int, clip: tuple[float, float] | None
) -> None:
    d = clean.d.numpy()
    positives = np.count_nonzero(d > 0)
    totals = dict.fromkeys(TOTALS, 0)
    totals.update(nonfinite=clean.nonfinite, sentinels=clean.sentinels, positives=positives)
    totals["zeros"] = count - positives - np.count_nonzero(d < 0)
    if max(-clean.low, clean.high) > LN2:
        totals["tail"] = np.count_nonzero(absolute.numpy() > LN2)
    if clean.high > OVERFLOW_DELTA:
        totals["overflow"] = np.count_nonzero(d > OVERFLOW_DELTA)
    if clip is not None:
        totals["clip_tokens"] = count
        totals["clip_low"] = np.count_nonzero(d < clip[0])
        totals["clip_high"] = np.count_nonzero(d > clip[1])
    into.totals += np.fromiter(totals.values(), dtype=np.int64, count=len(TOTALS))
    into.extremes[0] = min(into.extremes[0], clean.low)
    into.extremes[1] = max(into.extremes[1], clean.high)


def _add_sketch(into: Reduction, absolute: torch.Tensor, count: int) -> None:
    dense = torch.bincount(absolute.float().view(-1).view(torch.int32) >> SHIFT, minlength=DENSE_BUCKETS).numpy()
    into.dense_D += dense
    into.dense_D[0] -= absolute.numel() - count


def _table(
    clean: _Cleaned, absolute: torch.Tensor, rows: _Rows, n_S: Array, masked_S: Array, buffers: list[torch.Tensor]
) -> tuple[Array, float]:
    """Table [S, K] of sums and the largest |e|."""
    a, b, d, kept = clean.a, clean.b, clean.d, clean.kept
    D, Q = d.numpy(), absolute.numpy()
    p, w, e = buffers[5], buffers[6], buffers[0]
    torch.exp(b, out=p)
    torch.exp(d.clamp(max=OVERFLOW_DELTA) if clean.high > OVERFLOW_DELTA else d, out=w)
    if kept is not None:
        p.mul_(kept)
    # e = p·x keeps its relative precision where a ≈ b; where p could underflow the plain difference is as good.
    plain = clean.high > 50.0 or clean.lowest_b < -600.0
    if plain:
        torch.exp(a, out=e)
        if kept is not None:
            e.mul_(kept)
        e.sub_(p)
        x_S = rows.sum((w - 1.0).numpy())
    else:
        torch.sub(w, 1.0, out=e)
        x_S = rows.sum(e.numpy())
        e.mul_(p)
    if kept is not None:
        w.mul_(kept)
    P, E, W = p.numpy(), e.numpy(), w.numpy()
    sums = {"w": rows.sum(W), "ww": rows.dot(W, W), "p": rows.sum(P), "pp": rows.dot(P, P), "e": rows.sum(E)}
    sums |= {"pe": rows.dot(P, E), "ee": rows.dot(E, E), "abs": rows.sum(Q), "d": rows.sum(D), "dd": rows.dot(D, D)}
    e.abs_()
    sums["eabs"] = rows.sum(E)
    squared = torch.mul(d, d, out=p).numpy()
    sums |= {"ddd": rows.dot(squared, D), "dddd": rows.dot(squared, squared)}
    pivot = (
        float(b.sum()) / max(1.0, float(n_S.sum()))
        if kept is None
        else float(torch.dot(b.view(-1), kept.view(-1))) / max(1.0, float(n_S.sum()))
    )
    b.sub_(pivot)
    if kept is not None:
        b.mul_(kept)
    B = b.numpy()
    sums |= {"b": rows.sum(B), "bb": rows.dot(B, B), "bd": rows.dot(B, D)}
    # Below 1e-3 the series is exact and e^δ − 1 − δ would cancel.
    small = max(-clean.low, clean.high) < 1e-3
    sums["k3"] = sums["dd"] / 2 + sums["ddd"] / 6 + sums["dddd"] / 24 if small else x_S - sums["d"]
    sums |= {"masked": masked_S, "n": n_S, "pivot": np.full(len(n_S), pivot)}
    return np.stack([sums[name] for name in COLUMNS], axis=1), float(e.amax())


def _add_places(
    into: Reduction, batch: Batch, rows: _Rows, absolute: Array, kept: Array | None, masked_S: Array, base: int
) -> None:
    """First tokens, deciles of relative position, and the worst tokens."""
    places = _Places(batch, rows, masked_S)
    flat = absolute.reshape(-1)
    counted = None if kept is None else kept.reshape(-1)
    if batch.placed:
        places.add_deciles(into, flat, counted)
    worst = _worst(flat)
    worst = worst[flat[worst] > 0]
    if worst.size:
        sequence, position = places.locate(worst)
        ids = np.empty((worst.size, 3), dtype=np.int64)
        ids[:, 0] = sequence + base if batch.seq_ids is None else np.asarray(batch.seq_ids)[sequence]
        ids[:, 1] = position
        ids[:, 2] = -1 if batch.token_ids is None else batch.token_ids.reshape(-1).numpy()[worst]
        index = torch.from_numpy(worst)
        into.worst_ids.append(ids)
        into.worst_logps.append(
            torch.stack((batch.a.reshape(-1)[index].double(), batch.b.reshape(-1)[index].double()), dim=1).numpy()
        )


def _worst(flat: Array) -> IntArray:
    """Indices of the largest values: only the blocks with the largest maxima can hold them."""
    size = flat.size
    if size > 64 * _BLOCK:
        blocks = size // _BLOCK
        maxima = torch.from_numpy(flat[: blocks * _BLOCK]).view(blocks, _BLOCK).amax(1).numpy()
        chosen = np.argpartition(maxima, -EVIDENCE_TOKENS)[-EVIDENCE_TOKENS:]
        candidates = (chosen[:, None] * _BLOCK + np.arange(_BLOCK)).reshape(-1)
        if size % _BLOCK:
            candidates = np.concatenate((candidates, np.arange(blocks * _BLOCK, size)))
    else:
        candidates = np.arange(size)
    if candidates.size <= EVIDENCE_TOKENS:
        return candidates
    return candidates[np.argpartition(flat[candidates], -EVIDENCE_TOKENS)[-EVIDENCE_TOKENS:]]


class _Places:
    """Where a token stands within its response: its index among the masked tokens of its sequence."""

    def __init__(self, batch: Batch, rows: _Rows, masked_S: Array) -> None:
        self.rows = rows
        self.masked_S = masked_S.astype(np.int64)
        self.positions = None if batch.positions is None else batch.positions.reshape(-1).numpy()
        self.lengths_S = None if batch.lengths is None else batch.lengths.numpy()
        self.mask = None if batch.mask is None else batch.mask.reshape(-1).numpy()
        self.first_S = rows.starts_S
        self.running: IntArray | None = None
        if self.mask is not None and not self._contiguous(batch):
            self.running = np.cumsum(self.mask, dtype=np.int64)
            before = np.concatenate((np.zeros(1, dtype=np.int64), self.running))
            self.before_S = before[rows.starts_S]
            self.first_S = np.minimum(np.searchsorted(self.running, self.before_S + 1), self.mask.size - 1)

    def _contiguous(self, batch: Batch) -> bool:
        """Whether each row's masked tokens are one run, as responses are; then its start says everything."""
        if not self.rows.padded or batch.mask is None:
            return False
        mask = batch.mask.numpy()
        first = mask.argmax(axis=1)
        last = mask.shape[1] - mask[:, ::-1].argmax(axis=1)
        self.first_S = self.rows.starts_S + first
        return bool(np.all((last - first == self.masked_S) | (self.masked_S == 0)))

    def locate(self, index: IntArray) -> tuple[IntArray, IntArray]:
        """Sequence and position of tokens, given flat."""
        sequence = np.searchsorted(self.rows.starts_S + self.rows.lengths_S, index, side="right")
        if self.positions is not None:
            return sequence, self.positions[index]
        if self.running is None:
            return sequence, index - self.first_S[sequence]
        return sequence, self.running[index] - 1 - self.before_S[sequence]

    def add_deciles(self, into: Reduction, flat: Array, counted: Array | None) -> None:
        """Adds |δ| of first tokens and by decile. `counted` is 1 on valid tokens, None where every masked one is."""
        if self.positions is not None:
            self._add_given(into, flat, counted)
            return
        has = self.masked_S > 0
        valid_first = has if counted is None else has & (counted[np.minimum(self.first_S, flat.size - 1)] > 0)
        into.first += (np.count_nonzero(valid_first), flat[self.first_S[valid_first]].sum())
        ranks_S10 = -(-np.arange(DECILES) * self.masked_S[:, None] // DECILES)
        if self.running is None:
            starts = (self.first_S[:, None] + ranks_S10).reshape(-1)
        else:
            starts = np.searchsorted(self.running, (self.before_S[:, None] + ranks_S10 + 1).reshape(-1))
        starts = np.maximum.accumulate(starts)
        into.deciles[1] += _between(flat, starts).reshape(-1, DECILES).sum(axis=0)
        if counted is None:
            into.deciles[0] += np.diff(ranks_S10, axis=1, append=self.masked_S[:, None]).sum(axis=0)
        else:
            into.deciles[0] += _between(counted, starts).reshape(-1, DECILES).sum(axis=0)

    def _add_given(self, into: Reduction, flat: Array, counted: Array | None) -> None:
        """The same with positions given by the host, for slices of responses."""
        positions = self.positions
        assert positions is not None
        valid = np.ones(flat.size) if self.mask is None else self.mask.astype(np.float64)
        if counted is not None:
            valid = counted
        sequence = np.repeat(np.arange(len(self.rows.lengths_S)), self.rows.lengths_S)
        lengths_S = self.lengths_S
        if lengths_S is None:
            lengths_S = np.zeros(len(self.rows.lengths_S), dtype=np.int64)
            np.maximum.at(lengths_S, sequence, np.where(valid > 0, positions + 1, 0))
        decile = np.clip(positions * DECILES // np.maximum(lengths_S[sequence], 1), 0, DECILES - 1)
        into.deciles[0] += np.bincount(decile, weights=valid, minlength=DECILES)
        into.deciles[1] += np.bincount(decile, weights=flat, minlength=DECILES)
        first = (positions == 0) & (valid > 0)
        into.first += (np.count_nonzero(first), flat[first].sum())


def _between(values: Array, starts: IntArray) -> Array:
    """Sums of values from each start to the next (the last to the end); starts ascend, equal ones give 0."""
    lengths = np.diff(starts, append=values.size)
    sums: Array = np.add.reduceat(values, np.minimum(starts, values.size - 1))
    sums[lengths <= 0] = 0.0
    return sums

"""Quantile sketch of non-negative values: counts in logarithmic buckets, read off the float32 bit pattern.

The exponent and the top five mantissa bits of a float32 number its *dense* bucket (32 an octave, 8192 in all), which
costs one shift where a comparison against edges costs a binary search. On the host the 32 are gathered into 8 *kept*
buckets an octave, cut so that no bucket is wider than a factor 1.1021: the harmonic midpoint is then within 4.9 % of
every value in it. Zero and everything below 2⁻¹²⁶ share bucket 0, which stands for exactly 0. Counts merge by
adding.

Legend: D dense buckets, K kept buckets.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

SHIFT = 18
DENSE_BUCKETS = 1 << 13
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INFINITY_BUCKET = 255 << 5
_CUTS = (0, 3, 6, 9, 13, 17, 22, 27)
_PER_OCTAVE = len(_CUTS)
KEPT_BUCKETS = 256 * _PER_OCTAVE
_STARTS_K: IntArray = (np.arange(256)[:, None] * 32 + np.array(_CUTS)).reshape(-1)

_KEPT_OF_D: IntArray = np.repeat(np.arange(KEPT_BUCKETS), np.diff(_STARTS_K, append=DENSE_BUCKETS))
_KEPT_OF_D[_KEPT_OF_D < _PER_OCTAVE] = 0


def dense_index(values: npt.ArrayLike) -> IntArray:
    """Dense bucket of each value (any shape, ≥ 0, no NaN); values above float32's range fall into the bucket of
    infinity."""
    with np.errstate(over="ignore", under="ignore"):
        single = np.asarray(values, dtype=np.float32, order="C")
    return (single.view(np.int32) >> SHIFT).astype(np.int64)


def bucket_of(value: float) -> int:
    """Dense bucket of one value ≥ 0."""
    packed: int = struct.unpack("<i", struct.pack("<f", min(value, _FLOAT32_MAX)))[0]
    return packed >> SHIFT if value <= _FLOAT32_MAX else _INFINITY_BUCKET


def keep(dense_D: IntArray) -> IntArray:
    """Dense counts [D] gathered into kept counts [K]."""
    filled = dense_D.nonzero()[0]
    # Float64 carries the counts of fewer than 2⁵³ tokens exactly.
    return np.bincount(_KEPT_OF_D[filled], weights=dense_D[filled], minlength=KEPT_BUCKETS).astype(np.int64)


def of_values(values: npt.ArrayLike) -> IntArray:
    """Kept counts [K] of values ≥ 0."""
    return np.bincount(_KEPT_OF_D[dense_index(values).reshape(-1)], minlength=KEPT_BUCKETS).astype(np.int64, copy=False)


def pack(kept_K: IntArray) -> list[int]:
    """Counts as [first bucket, count, count, −gap, count, …]: a negative number skips that many empty buckets; empty
    is []."""
    filled = kept_K.nonzero()[0]
    if filled.size == 0:
        return []
    packed = [int(filled[0])]
    expected = packed[0]
    for index, count in zip(filled.tolist(), kept_K[filled].tolist(), strict=True):
        if index > expected:
            packed.append(expected - index)
        packed.append(count)
        expected = index + 1
    return packed


def unpack(packed: Sequence[int]) -> IntArray:
    """Counts [K] from `pack`'s list. Raises ValueError where a bucket lies outside the sketch."""
    kept_K = np.zeros(KEPT_BUCKETS, dtype=np.int64)
    if not packed:
        return kept_K
    entries = np.array(packed[1:], dtype=np.int64)
    counts = entries >= 0
    moves = np.where(counts, 1, -entries)
    at = (packed[0] + np.cumsum(moves) - moves)[counts]
    if at.size and not (at[0] >= 0 and at[-1] < KEPT_BUCKETS and (moves > 0).all()):
        outside = next((int(i) for i in at if not 0 <= i < KEPT_BUCKETS), "?")
        raise ValueError(f"sketch bucket {outside} outside 0..{KEPT_BUCKETS - 1}")
    kept_K[at] = entries[counts]
    return kept_K


def total(many: Iterable[Sequence[int]]) -> IntArray:
    """Counts [K] of several packed sketches together."""
    kept_K = np.zeros(KEPT_BUCKETS, dtype=np.int64)
    for packed in many:
        if packed:
            kept_K += unpack(packed)
    return kept_K


def _edge(bucket: int) -> float:
    octave, part = divmod(bucket, _PER_OCTAVE)
    return math.inf if octave >= 255 else math.ldexp(_CUTS[part] + 32.0, octave - 127 - 5)


def midpoint(bucket: int) -> float:
    """The value that stands for a bucket: harmonic mean of its edges, within 4.9 % of all that it holds; 0 for
    bucket 0."""
    if bucket < _PER_OCTAVE:
        return 0.0
    low, high = _edge(bucket), _edge(bucket + 1)
    return low if math.isinf(high) else 2.0 * low * high / (low + high)


def quantile(kept_K: IntArray, share: float) -> float:
    """Smallest value with at least `share` of the counts at or below it, to 4.9 %; NaN of an empty sketch."""
    count = int(kept_K.sum())
    if count == 0:
        return math.nan
    rank = min(count, max(1, math.ceil(share * count - 1e-9)))
    return midpoint(int(np.searchsorted(np.cumsum(kept_K), rank)))


def share_above(kept_K: IntArray, value: float) -> float:
    """Share of the counts in buckets whose midpoint exceeds `value`; NaN of an empty sketch."""
    count = int(kept_K.sum())
    if count == 0:
        return math.nan
    filled = np.flatnonzero(kept_K).tolist()
    return float(sum(int(kept_K[i]) for i in filled if midpoint(i) > value)) / count

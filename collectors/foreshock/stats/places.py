"""Where packed host tokens stand: their sequence, their position within the response, its decile; and the worst of
them.

A token's position is its index among the sampled (masked) tokens of its sequence; its decile ⌊10 · position /
length⌋.

Legend: S sequences, N tokens, W worst tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from foreshock.stats import sketch
from foreshock.stats.layout import Array, IntArray, Reduction
from foreshock.stats.record import DECILES, EVIDENCE_TOKENS
from foreshock.stats.shapes import Batch
from foreshock.stats.spans import Spans, between

_OCTAVES = 4  # below the largest value, within which its 16 rivals are counted for
FEW_TOKENS = 4096
"""Up to it a search of all is quicker than counts of this call's tokens alone, with 8192 buckets to clear and add."""
_FEW = 2 * EVIDENCE_TOKENS  # candidates that the record may as well sort itself

Buckets = tuple[npt.NDArray[np.int32], IntArray | None]
"""the dense sketch bucket of each token [N], and the counts of all [D], None for few tokens"""


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
        starts, edges, counts_10 = spans.deciles()
        into.first[0] += starts.size
        into.first[1] += np.add.reduce(abs_N[starts])
        sums_S10 = between(abs_N, edges).reshape(-1, DECILES)
        into.deciles[0] += counts_10
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
    bucket_N, dense = buckets
    if dense is None:
        if abs_N.size <= _FEW:
            return np.arange(abs_N.size)
        largest_W: IntArray = np.argpartition(abs_N, -EVIDENCE_TOKENS)[-EVIDENCE_TOKENS:]
        return largest_W
    bucket = sketch.bucket_of(largest)
    floor, above = max(0, bucket - _OCTAVES * 32), dense.item(bucket)
    while above < EVIDENCE_TOKENS and bucket > floor:
        bucket -= 1
        above += dense.item(bucket)
    candidates: IntArray = (bucket_N >= bucket).nonzero()[0]
    if candidates.size <= _FEW:
        return candidates
    return candidates[np.argpartition(abs_N[candidates], -EVIDENCE_TOKENS)[-EVIDENCE_TOKENS:]]

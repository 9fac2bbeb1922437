"""Tensors on any device → sums per sequence, without ever waiting for the device.

No value is looked at: no `.item()`, no branch on a tensor, no data-dependent shape; all results stay where they are
until `collect`. Numbers equal `host`'s. Cost: some hundred small kernels a call and about ten float64 buffers of the
batch, which is taken in slices of at most `SLICE_TOKENS`.

Legend: S sequences, T positions, N tokens, W worst tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from foreshock.stats.layout import CALL_SUMS, COLUMNS, LN2, OVERFLOW_DELTA, SENTINEL_FLOOR, SERIES_DELTA, TOTALS
from foreshock.stats.record import DECILES, EVIDENCE_TOKENS
from foreshock.stats.shapes import Batch, integers, sentinel_of
from foreshock.stats.sketch import DENSE_BUCKETS, SHIFT

SLICE_TOKENS = 1 << 20
_BLOCK = 64
_F64 = torch.float64
_I64 = torch.int64


@dataclass(slots=True)
class DeviceState:
    """The accumulators of one pair on its device."""

    device: torch.device
    totals: torch.Tensor = field(init=False)
    extremes: torch.Tensor = field(init=False)
    places: torch.Tensor = field(init=False)
    """[2, 11] tokens and Σ|δ|: ten deciles, then first tokens"""
    dense: torch.Tensor = field(init=False)
    """one bucket more than the sketch: the tokens that do not count"""
    calls: list[torch.Tensor] = field(default_factory=list)
    worst_ids: list[torch.Tensor] = field(default_factory=list)
    worst_logps: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.totals = torch.zeros(len(TOTALS), dtype=_I64, device=self.device)
        self.extremes = torch.zeros(3, dtype=_F64, device=self.device)
        self.extremes[0].fill_(torch.inf)
        self.extremes[1].fill_(-torch.inf)
        self.places = torch.zeros(2, DECILES + 1, dtype=_F64, device=self.device)
        self.dense = torch.zeros(DENSE_BUCKETS + 1, dtype=_I64, device=self.device)


@dataclass(slots=True)
class _Rows:
    """How tokens lie in sequences. `segment` [N] is None for padded rows [S, T]; segment S holds what belongs to
    none."""

    sequences: int
    segment: torch.Tensor | None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.segment is None:
            return x.sum(1)
        return x.new_zeros(self.sequences + 1).index_add_(0, self.segment, x)[:-1]

    def dot(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.sum(x * y)

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """A value per sequence [S] given to each of its tokens."""
        if self.segment is None:
            return per_sequence[:, None]
        return F.pad(per_sequence, (0, 1)).index_select(0, self.segment)


def reduce(batch: Batch, state: DeviceState, base: int, *, centred: bool) -> torch.Tensor:
    """Adds a batch to `state`; returns its table [S, K] on the device. `centred` takes b about a pivot (see
    `COLUMNS`)."""
    if batch.a.numel() == 0:
        return torch.zeros(batch.sequences, len(COLUMNS), dtype=_F64, device=state.device)
    if batch.cu_seqlens is not None:
        return _reduce_slice(batch, state, base, centred)
    height = max(1, SLICE_TOKENS // batch.a.shape[1])
    tables = []
    for top in range(0, batch.sequences, height):
        tables.append(_reduce_slice(_rows_of(batch, top, top + height), state, base + top, centred))
    return torch.cat(tables)


def _rows_of(batch: Batch, top: int, end: int) -> Batch:
    if top == 0 and end >= batch.sequences:
        return batch

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[top:end]

    return replace(
        batch,
        a=batch.a[top:end],
        b=batch.b[top:end],
        mask=cut(batch.mask),
        seq_ids=None if batch.seq_ids is None else batch.seq_ids[top:end],
        token_ids=cut(batch.token_ids),
        positions=cut(batch.positions),
        lengths=cut(batch.lengths),
    )


def _reduce_slice(batch: Batch, state: DeviceState, base: int, centred: bool) -> torch.Tensor:
    rows, mask = _layout(batch)
    a, b = batch.a.to(_F64), batch.b.to(_F64)
    finite = torch.isfinite(a) & torch.isfinite(b)
    marked = (a == sentinel_of(batch.a.dtype)) | (b == sentinel_of(batch.b.dtype))
    marked = finite & (marked | (a <= SENTINEL_FLOOR) | (b <= SENTINEL_FLOOR))
    valid = mask & finite & ~marked
    a, b = torch.where(valid, a, 0.0), torch.where(valid, b, 0.0)
    d = a - b
    absolute = d.abs()
    kept = valid.to(_F64)
    _add_totals(state, batch, mask, finite, marked, valid, d, absolute)
    _add_sketch(state, valid, absolute)
    masked_S = rows.sum(mask.to(_F64))
    position = _add_places(state, batch, rows, mask, kept, absolute, masked_S)
    _add_worst(state, batch, rows, position, valid, a, b, absolute, base)
    return _table(state, rows, a, b, d, kept, absolute, masked_S, centred)


def _layout(batch: Batch) -> tuple[_Rows, torch.Tensor]:
    mask = torch.ones_like(batch.a, dtype=torch.bool) if batch.mask is None else batch.mask
    if batch.cu_seqlens is None:
        return _Rows(batch.sequences, None), mask
    index = torch.arange(batch.a.shape[0], device=batch.a.device)
    segment = torch.searchsorted(batch.cu_seqlens[1:].contiguous(), index, right=True)
    mask = mask & (segment < batch.sequences) & (index >= batch.cu_seqlens[0])
    return _Rows(batch.sequences, segment), mask


def _add_totals(
    state: DeviceState,
    batch: Batch,
    mask: torch.Tensor,
    finite: torch.Tensor,
    marked: torch.Tensor,
    valid: torch.Tensor,
    d: torch.Tensor,
    absolute: torch.Tensor,
) -> None:
    none = torch.zeros((), dtype=_I64, device=state.device)
    clip = batch.clip_range
    counts = {
        "nonfinite": (mask & ~finite).sum(),
        "sentinels": (mask & marked).sum(),
        "overflow": (d > OVERFLOW_DELTA).sum(),
        "zeros": (valid & (d == 0)).sum(),
        "positives": (d > 0).sum(),
        "tail": (absolute > LN2).sum(),
        "clip_tokens": none if clip is None else valid.sum(),
        "clip_low": none if clip is None else (d < clip[0]).sum(),
        "clip_high": none if clip is None else (d > clip[1]).sum(),
    }
    state.totals += torch.stack([counts[name] for name in TOTALS])
    lowest = torch.where(valid, d, torch.inf).amin()
    highest = torch.where(valid, d, -torch.inf).amax()
    state.extremes[0].copy_(torch.minimum(state.extremes[0], lowest))
    state.extremes[1].copy_(torch.maximum(state.extremes[1], highest))


def _add_sketch(state: DeviceState, valid: torch.Tensor, absolute: torch.Tensor) -> None:
    bucket = (absolute.to(torch.float32).view(torch.int32) >> SHIFT).to(_I64)
    bucket = torch.where(valid, bucket, DENSE_BUCKETS).reshape(-1)
    state.dense.scatter_add_(0, bucket, torch.ones_like(bucket))


def _add_places(
    state: DeviceState,
    batch: Batch,
    rows: _Rows,
    mask: torch.Tensor,
    kept: torch.Tensor,
    absolute: torch.Tensor,
    masked_S: torch.Tensor,
) -> torch.Tensor:
    """Adds first tokens and deciles of relative position; returns each token's position within its response."""
    lengths_S = masked_S.to(_I64)
    if batch.positions is not None:
        position = batch.positions.to(_I64)
        lengths_S = _given_lengths(batch, rows, position, kept)
    else:
        position = mask.to(_I64).cumsum(-1) - 1
        if rows.segment is not None:
            before = lengths_S.cumsum(0) - lengths_S
            position = position - rows.spread(before)
    if not batch.placed:
        return position
    decile = (position * DECILES // rows.spread(lengths_S).clamp(min=1)).clamp(0, DECILES - 1)
    # A row of ten counters a sequence: one row for all would have every token wait for the same ten addresses.
    row = rows.segment if rows.segment is not None else torch.arange(rows.sequences, device=state.device)[:, None]
    slot = (row * DECILES + decile).reshape(-1)
    first = (position == 0) & (kept > 0)
    for line, values in enumerate((kept, absolute)):
        sums = torch.zeros((rows.sequences + 1) * DECILES, dtype=_F64, device=state.device)
        sums.scatter_add_(0, slot, values.reshape(-1))
        state.places[line, :DECILES] += sums.view(-1, DECILES).sum(0)
        state.places[line, DECILES] += torch.where(first, values, 0.0).sum()
    return position


def _given_lengths(batch: Batch, rows: _Rows, position: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Response lengths [S]: the host's, else one more than the last position that counts here."""
    if batch.lengths is not None:
        return batch.lengths.to(_I64)
    ends = torch.where(kept > 0, position + 1, 0)
    if rows.segment is None:
        return ends.amax(1)
    blank = torch.zeros(rows.sequences + 1, dtype=_I64, device=ends.device)
    return blank.scatter_reduce_(0, rows.segment, ends, "amax")[:-1]


def _add_worst(
    state: DeviceState,
    batch: Batch,
    rows: _Rows,
    position: torch.Tensor,
    valid: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    absolute: torch.Tensor,
    base: int,
) -> None:
    score = torch.where(valid, absolute, -1.0).reshape(-1)
    size = score.shape[0]
    if size > EVIDENCE_TOKENS * _BLOCK:
        # Only the blocks with the largest maxima can hold the largest values: a small top-k instead of a sort of all.
        blocks = F.pad(score, (0, -size % _BLOCK), value=-1.0).view(-1, _BLOCK)
        chosen = blocks.amax(1).topk(EVIDENCE_TOKENS).indices
        candidates = (chosen[:, None] * _BLOCK + torch.arange(_BLOCK, device=score.device)).reshape(-1)
        top = blocks.index_select(0, chosen).reshape(-1).topk(EVIDENCE_TOKENS).indices
        index = candidates.index_select(0, top).clamp(max=size - 1)
    else:
        index = score.topk(min(EVIDENCE_TOKENS, size)).indices

    def pick(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1).index_select(0, index)

    sequence = index // batch.a.shape[1] if rows.segment is None else pick(rows.segment)
    ids = sequence + base
    if batch.seq_ids is not None:
        known = integers(batch.seq_ids, state.device)
        ids = known.index_select(0, sequence.clamp(max=rows.sequences - 1))
    token = torch.full_like(index, -1) if batch.token_ids is None else pick(batch.token_ids).to(_I64)
    state.worst_ids.append(torch.stack((ids, pick(position), token), dim=1))
    state.worst_logps.append(torch.stack((pick(a), pick(b)), dim=1))


def _table(
    state: DeviceState,
    rows: _Rows,
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    kept: torch.Tensor,
    absolute: torch.Tensor,
    masked_S: torch.Tensor,
    centred: bool,
) -> torch.Tensor:
    n_S = rows.sum(kept)
    sums = {"masked": masked_S, "n": n_S, "abs": rows.sum(absolute), "d": rows.sum(d)}
    squared = d * d
    sums |= {"dd": rows.sum(squared)}
    pivot = b.sum() / n_S.sum().clamp(min=1.0) if centred else torch.zeros((), dtype=_F64, device=state.device)
    about = (b - pivot) * kept
    sums |= {"b": rows.sum(about), "bb": rows.dot(about, about), "bd": rows.dot(about, d)}
    sums["pivot"] = pivot.expand_as(n_S)
    x = torch.expm1(d.clamp(max=OVERFLOW_DELTA))
    series = squared * (0.5 + d * (1 / 6 + d / 24))
    sums["k3"] = rows.sum(torch.where(absolute < SERIES_DELTA, series, x - d))
    # e^δ itself, not 1 + x: that would lose the weights far below 1.
    w = torch.exp(d.clamp(max=OVERFLOW_DELTA)) * kept
    p = torch.exp(b) * kept
    e = torch.where(absolute < 1.0, p * x, torch.exp(a) * kept - p)
    distance = e.abs()
    state.extremes[2].copy_(torch.maximum(state.extremes[2], distance.amax()))
    call = {"n": kept, "d": d, "dd": squared, "ddd": squared * d, "dddd": squared * squared, "w": w, "ww": w * w}
    call |= {"p": p, "e": e, "pp": p * p, "pe": p * e, "ee": e * e, "eabs": distance}
    state.calls.append(torch.stack([call[name].sum() for name in CALL_SUMS]))
    return torch.stack([sums[name] for name in COLUMNS], dim=1)

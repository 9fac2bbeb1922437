"""Many records as columns: what `merge` pools and every formula reads, at a few numpy calls for all records together.

Legend: N records, G groups, R members of the largest group, F float columns, K buckets in use, T evidence tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from foreshock.stats.record import EVIDENCE_TOKENS, PairRecord
from foreshock.stats.sketch import KEPT_BUCKETS

Element = TypeVar("Element", bound=np.generic)
IntArray = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]

COUNTS = (
    "masked", "tokens", "nonfinite", "sentinels", "overflow", "zeros", "positives", "tail", "clip_tokens", "clip_low",
    "clip_high", "sequences", "seq_zeros", "split", "unplaced", "first_tokens",
)  # fmt: skip
_counts_of = attrgetter(*COUNTS)
SKETCHES = ("abs_sketch", "seq_abs_sketch", "seq_corr_sketch")
WIDTHS = {
    "logp": 7, "prob": 5, "sums": 5, "extremes": 3, "seq_sums": 5, "seq_weights": 3, "first_abs": 1, "decile_abs": 10,
}  # fmt: skip
_ENDS = np.cumsum([0, *WIDTHS.values()]).tolist()
COLUMN = {name: slice(low, high) for name, low, high in zip(WIDTHS, _ENDS[:-1], _ENDS[1:], strict=True)}
F = _ENDS[-1]
_Z3, _Z5, _Z7, _Z10 = [0.0] * 3, [0.0] * 5, [0.0] * 7, [0.0] * 10
_TOKEN_LENGTHS = (7, 5, 5, 3)
_DECILE_LENGTHS = ((0, 0), (10, 10))
_lists_of = attrgetter(
    "logp", "prob", "sums", "extremes", "seq_sums", "seq_weights", "decile_abs", "decile_tokens", "evidence_ids",
    "evidence_logps",
)  # fmt: skip


@dataclass
class Sketches:
    """One kind of sketch of N records, sparse: `count` of record `row` in `bucket`."""

    row: IntArray
    bucket: IntArray
    count: IntArray

    def dense(self, group_N: IntArray, groups: int) -> tuple[IntArray, IntArray]:
        """Counts [G, K] of the records' groups, and the K buckets that any of them uses, ascending."""
        present = np.zeros(KEPT_BUCKETS, dtype=bool)
        present[self.bucket] = True
        used_K = np.flatnonzero(present)
        place = np.cumsum(present) - 1
        at = group_N[self.row] * used_K.size + place[self.bucket]
        flat = np.bincount(at, weights=self.count, minlength=groups * used_K.size)
        return flat.astype(np.int64).reshape(groups, used_K.size), used_K


@dataclass
class Tokens:
    """Evidence tokens: [T] record and [T, 3] sequence, position, token id; [T, 2] a and b."""

    row: IntArray
    ids: IntArray
    logps: npt.NDArray[np.float32]


@dataclass
class Stack:
    """N records: `counts` holds `COUNTS` by name, [N] each; `floats` [N, F] as `COLUMN` says, zero where none is."""

    counts: dict[str, IntArray]
    decile_tokens: IntArray
    floats: Array
    sequenced: npt.NDArray[np.bool_]
    """[N] the record holds sequence sums"""
    sketches: dict[str, Sketches]
    evidence: Tokens
    missing: list[dict[str, str]]

    def __len__(self) -> int:
        return len(self.missing)

    def __getitem__(self, name: str) -> Array:
        """The columns [N, width] of a record's float field."""
        return self.floats[:, COLUMN[name]]


def stack(records: Sequence[PairRecord]) -> tuple[Stack, list[int]]:
    """The readable ones of `records` as columns, in order, and the indices of those that contradict themselves."""
    rows, bad = [], []
    for index, record in enumerate(records):
        if _fits(record):
            rows.append(record)
        else:
            bad.append(index)
    try:
        return _columns(rows), bad
    except (ValueError, OverflowError, TypeError):
        if len(rows) == 1:
            return _columns([]), list(range(len(records)))
    # One of them: look at each alone, which only a malformed one costs.
    bad = [index for index, record in enumerate(records) if not _fits(record) or not _readable(record)]
    return _columns([record for index, record in enumerate(records) if index not in bad]), bad


def _fits(r: PairRecord) -> bool:
    lengths = tuple(map(len, _lists_of(r)))
    if lengths[:4] != _TOKEN_LENGTHS and r.tokens:
        return False
    if lengths[4:6] != (5, 3) and (lengths[4] or r.sequences):
        return False
    deciles = lengths[6:8] in _DECILE_LENGTHS
    return deciles and r.tokens >= 0 and r.sequences >= 0 and 8 * lengths[8] == 3 * lengths[9]


def _readable(record: PairRecord) -> bool:
    try:
        _columns([record])
    except (ValueError, OverflowError, TypeError):
        return False
    return True


def _float_row(r: PairRecord) -> list[float]:
    tokens = r.tokens
    return [
        *(r.logp if tokens else _Z7),
        *(r.prob if tokens else _Z5),
        *(r.sums if tokens else _Z5),
        *(r.extremes if tokens else _Z3),
        *(r.seq_sums or _Z5),
        *(r.seq_weights if r.seq_sums else _Z3),
        r.first_abs,
        *(r.decile_abs or _Z10),
    ]


def _columns(records: Sequence[PairRecord]) -> Stack:
    n = len(records)
    floats = np.fromiter(chain.from_iterable(map(_float_row, records)), dtype=np.float64, count=n * F).reshape(n, F)
    counts = _ints(chain.from_iterable(map(_counts_of, records)), n * len(COUNTS)).reshape(n, len(COUNTS)).T
    by_name = dict(zip(COUNTS, np.ascontiguousarray(counts), strict=True))
    zeros = [0] * 10
    return Stack(
        counts=by_name,
        decile_tokens=_ints(chain.from_iterable(r.decile_tokens or zeros for r in records), 10 * n).reshape(n, 10),
        floats=floats,
        sequenced=np.array([bool(r.seq_sums) for r in records], dtype=bool),
        sketches={name: _sparse([getattr(r, name) for r in records]) for name in SKETCHES},
        evidence=_tokens(records),
        missing=[r.missing for r in records],
    )


def _ints(values: Iterable[int], count: int) -> IntArray:
    return np.fromiter(values, dtype=np.int64, count=count)


def _sparse(packed: list[list[int]]) -> Sketches:
    """Packed sketches (`sketch.pack`) of N records unpacked together. Raises ValueError for a bucket outside."""
    lengths = _ints(map(len, packed), len(packed))
    entries = _ints(chain.from_iterable(packed), int(lengths.sum()))
    row = np.repeat(np.arange(len(packed)), lengths)
    starts = np.cumsum(lengths) - lengths
    filled = lengths > 0
    heads = np.zeros(len(entries), dtype=bool)
    heads[starts[filled]] = True
    counts = (entries >= 0) & ~heads
    moves = np.where(counts, 1, np.where(heads, 0, -entries))
    if entries.size and (moves.max() > KEPT_BUCKETS or ((moves <= 0) & ~heads).any()):
        raise ValueError("a sketch's gap is too wide")
    passed = np.cumsum(moves) - moves
    base = np.zeros(len(packed), dtype=np.int64)
    base[filled] = entries[starts[filled]] - passed[starts[filled]]
    bucket = (passed + base[row])[counts]
    if bucket.size and not (bucket.min() >= 0 and bucket.max() < KEPT_BUCKETS):
        raise ValueError(f"sketch bucket outside 0..{KEPT_BUCKETS - 1}")
    return Sketches(row[counts], bucket, entries[counts])


def _tokens(records: Sequence[PairRecord]) -> Tokens:
    lengths = [len(r.evidence_ids) for r in records]
    ids = _ints(chain.from_iterable(r.evidence_ids for r in records), sum(lengths)).reshape(-1, 3)
    logps = np.frombuffer(b"".join([r.evidence_logps for r in records]), dtype="<f4").reshape(-1, 2)
    row = np.repeat(np.arange(len(records)), np.array(lengths, dtype=np.int64) // 3)
    return Tokens(row, ids, logps)


def pool(many: Stack, group_N: IntArray, groups: int) -> Stack:
    """The records of each group as one, in any order: [G] from [N], `group_N` numbering the group of each record.

    Counts add, extremes are max or min, moments are re-centred (Pébay, SAND2008-6212), and every sum of floats carries
    its rounding error along (two-sum trees), so that it comes out as exactly rounded as `math.fsum` makes it.
    """
    tokens_N = many.counts["tokens"]
    spread = Spread.of(group_N, groups)
    floats = _pooled_floats(many, spread, tokens_N)
    return Stack(
        counts={name: spread.added(column) for name, column in many.counts.items()},
        decile_tokens=spread.added(many.decile_tokens),
        floats=floats,
        sequenced=np.bincount(group_N[many.sequenced], minlength=groups) > 0,
        sketches={name: Sketches(group_N[kept.row], kept.bucket, kept.count) for name, kept in many.sketches.items()},
        evidence=_worst(many.evidence, group_N, groups),
        missing=_reasons(many, group_N, groups),
    )


@dataclass
class Spread:
    """Puts rows [N, …] into their places of a rectangle [G, R, …], the rows of a group in their order."""

    group: IntArray
    slot: IntArray
    sizes: IntArray

    @staticmethod
    def of(group_N: IntArray, groups: int) -> Spread:
        order = np.argsort(group_N, kind="stable")
        sizes = np.bincount(group_N, minlength=groups)
        slot = np.empty(len(group_N), dtype=np.int64)
        slot[order] = np.arange(len(group_N)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return Spread(group_N, slot, sizes)

    def filled(self, rows: npt.NDArray[Element], empty: float) -> npt.NDArray[Element]:
        shape = (len(self.sizes), int(self.sizes.max(initial=1)), *rows.shape[1:])
        placed = np.full(shape, empty, dtype=rows.dtype)
        placed[self.group, self.slot] = rows
        return placed

    def added(self, rows: IntArray) -> IntArray:
        total: IntArray = self.filled(rows, 0).sum(axis=1)
        return total

    def summed(self, rows: Array) -> Array:
        return exact_sum(self.filled(rows, 0.0))

    def highest(self, rows: Array) -> Array:
        top: Array = self.filled(rows, -np.inf).max(axis=1)
        return top


def exact_sum(rows_GR: Array) -> Array:
    """Sums over axis 1 to the rounding of a float64, whatever the order; NaN where infinities of both signs meet."""
    high, low = rows_GR, np.zeros_like(rows_GR)
    with np.errstate(invalid="ignore", over="ignore"):
        while high.shape[1] > 1:
            odd = high.shape[1] % 2
            left, right = high[:, : high.shape[1] - odd : 2], high[:, 1::2]
            both = left + right
            part = both - left
            lost = (left - (both - part)) + (right - part)
            carried = low[:, : low.shape[1] - odd : 2] + low[:, 1::2] + lost
            high = np.concatenate([both, high[:, -1:]], axis=1) if odd else both
            low = np.concatenate([carried, low[:, -1:]], axis=1) if odd else carried
        total = high[:, 0] + low[:, 0]
    return np.where(np.isfinite(high[:, 0]), total, high[:, 0])


def _pooled_floats(many: Stack, spread: Spread, tokens_N: IntArray) -> Array:
    pooled = np.zeros((len(spread.sizes), F))
    n_N = tokens_N.astype(np.float64)[:, None]
    count_G = np.maximum(spread.summed(n_N), 1.0)
    with np.errstate(invalid="ignore", over="ignore"):
        for name in ("logp", "prob"):
            pooled[:, COLUMN[name]] = _moments(many[name], n_N, count_G, spread)
        pooled[:, COLUMN["sums"]] = spread.summed(many["sums"])
        empty = (tokens_N == 0)[:, None]
        extremes = np.where(empty, -np.inf, many["extremes"] * np.array([-1.0, 1.0, 1.0]))
        top = spread.highest(extremes) * np.array([-1.0, 1.0, 1.0])
        pooled[:, COLUMN["extremes"]] = np.where(np.isinf(top) & (spread.added(tokens_N) == 0)[:, None], 0.0, top)
        _pool_sequences(pooled, many, spread)
        pooled[:, COLUMN["first_abs"]] = spread.summed(many["first_abs"])
        pooled[:, COLUMN["decile_abs"]] = spread.summed(many["decile_abs"])
    return pooled


def _moments(rows: Array, n_N: Array, count_G: Array, spread: Spread) -> Array:
    means = spread.summed(n_N * rows[:, :2]) / count_G
    d = np.where(n_N > 0, rows[:, :2] - means[spread.group], 0.0)
    n, dx, dy, yy = n_N[:, 0], d[:, 0], d[:, 1], rows[:, 4]
    parts = [rows[:, 2] + n * dx * dx, rows[:, 3] + n * dx * dy, yy + n * dy * dy]
    if rows.shape[1] > 5:
        m3, m4 = rows[:, 5], rows[:, 6]
        parts.append(m3 + 3 * dy * yy + n * dy**3)
        parts.append(m4 + 4 * dy * m3 + 6 * dy**2 * yy + n * dy**4)
    return np.concatenate([means, spread.summed(np.stack(parts, axis=1))], axis=1)


def _pool_sequences(pooled: Array, many: Stack, spread: Spread) -> None:
    sums, weights, there = many["seq_sums"], many["seq_weights"], many.sequenced
    any_G = spread.filled(there, False).any(axis=1)
    largest_G = np.where(any_G, spread.highest(np.where(there, sums[:, 4], -np.inf)), 0.0)
    pooled[:, COLUMN["seq_sums"]] = np.concatenate([spread.summed(sums[:, :4]), largest_G[:, None]], axis=1)
    top_G = np.where(any_G, spread.highest(np.where(there, weights[:, 0], -np.inf)), 0.0)
    scale = np.where(there, np.exp(np.minimum(0.0, weights[:, 0] - top_G[spread.group])), 0.0)
    scaled = spread.summed(np.stack([scale * weights[:, 1], scale * scale * weights[:, 2]], axis=1))
    pooled[:, COLUMN["seq_weights"]] = np.concatenate([top_G[:, None], scaled], axis=1)


def _worst(tokens: Tokens, group_N: IntArray, groups: int) -> Tokens:
    """The `EVIDENCE_TOKENS` worst of each group by |a − b|, worst first, in an order that does not depend on theirs."""
    group_T = group_N[tokens.row]
    with np.errstate(invalid="ignore"):
        size_T = np.abs(tokens.logps[:, 0].astype(np.float64) - tokens.logps[:, 1])
    size_T = np.where(np.isnan(size_T), -1.0, size_T)
    kept = np.arange(len(group_T))
    spread = Spread.of(group_T, groups)
    if spread.sizes.max(initial=0) > 2 * EVIDENCE_TOKENS:
        # Only those at or above the group's sixteenth largest need sorting by every key.
        edge = np.partition(spread.filled(size_T, -2.0), -EVIDENCE_TOKENS, axis=1)[:, -EVIDENCE_TOKENS]
        kept = np.flatnonzero(size_T >= edge[group_T])
    ids = tokens.ids[kept]
    keys = (tokens.logps[kept, 0], ids[:, 2], ids[:, 1], ids[:, 0], -size_T[kept], group_T[kept])
    kept = kept[np.lexsort(keys)]
    kept = kept[Spread.of(group_T[kept], groups).slot < EVIDENCE_TOKENS]
    return Tokens(group_T[kept], tokens.ids[kept], tokens.logps[kept])


def _reasons(many: Stack, group_N: IntArray, groups: int) -> list[dict[str, str]]:
    """Named reasons stay; that one record had nothing at all (`*`) no longer matters once another has measured."""
    found: list[dict[str, str]] = [{} for _ in range(groups)]
    named = [(int(group_N[row]), reasons) for row, reasons in enumerate(many.missing) if reasons]
    if not named:
        return found
    measured = np.bincount(group_N[many.counts["tokens"] > 0], minlength=groups) > 0
    everything: dict[int, list[tuple[str, str]]] = {}
    for group, reasons in named:
        everything.setdefault(group, []).extend(reasons.items())
    for group, items in everything.items():
        for name, reason in sorted(items, reverse=True):
            if name != "*" or not measured[group]:
                found[group][name] = reason
    return found

"""Many records as columns: what `pool` pools and every formula reads, at a few numpy calls for all records together.

Legend: N records, F float columns, C counts, M runs, K sketch entries, T evidence tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from foreshock.stats.packed import (
    BUCKETS,
    COUNT_BELOW,
    COUNTS,
    FLOATS,
    HEAD,
    INTEGERS,
    SEQUENCED,
    SHAPE,
    SKETCHES,
    WIDTH,
    Shape,
    pack,
    reasons_of,
    shape_of,
)
from foreshock.stats.record import PairRecord
from foreshock.stats.sketch import KEPT_BUCKETS

IntArray = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_ENDS = np.cumsum([0, *FLOATS.values()]).tolist()
COLUMN = {name: slice(low, high) for name, low, high in zip(FLOATS, _ENDS[:-1], _ENDS[1:], strict=True)}
_COUNT = {name: place for place, name in enumerate(COUNTS)}
_TOKENS, _SEQUENCES = _COUNT["tokens"], _COUNT["sequences"]
_SIZES = np.dtype([("shape", f"V{SHAPE}"), ("runs", "<u2"), ("counts", "<u2"), ("missing", "<u2")])
_NOTHING: dict[str, str] = {}


@dataclass
class Sketches:
    """The sketches of N records, sparse: `count` (whole numbers) in `bucket`, record by record, kind by kind.

    The entries of kind k of record n are those from `bounds[n * kinds + k]` to the next bound, ascending.
    """

    bucket: IntArray
    count: Array
    bounds: IntArray

    @staticmethod
    def bounds_of(row: IntArray, bucket: IntArray, size: IntArray, rows: int) -> IntArray:
        """The bounds where `size` entries of one kind lie from `bucket` on, for each `row` and bucket given."""
        kind = row * len(SKETCHES) + bucket // KEPT_BUCKETS
        sizes = np.bincount(kind, weights=size, minlength=rows * len(SKETCHES))
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes).astype(np.int64)])

    def within(self, name: str) -> tuple[IntArray, IntArray]:
        """Where the entries of one kind of sketch begin and end, [N] each."""
        kind = SKETCHES.index(name)
        return self.bounds[kind : -1 : len(SKETCHES)], self.bounds[kind + 1 :: len(SKETCHES)]

    def pooled(self, group_N: IntArray, groups: int) -> Sketches:
        """Those of the records of each group added up."""
        present = np.zeros(BUCKETS, dtype=bool)
        present[self.bucket] = True
        used = np.flatnonzero(present)
        place = np.cumsum(present) - 1
        at = np.repeat(group_N * used.size, np.diff(self.bounds[:: len(SKETCHES)])) + place[self.bucket]
        flat = np.asarray(np.bincount(at, self.count, groups * used.size), dtype=np.float64)
        filled = np.flatnonzero(flat)
        row, column = np.divmod(filled, max(1, used.size))
        bucket = used[column]
        return Sketches(bucket, flat[filled], self.bounds_of(row, bucket, np.ones(len(row), np.int64), groups))


@dataclass
class Tokens:
    """Evidence tokens: [T] record and [T, 3] sequence, position, token id; [T, 2] a and b."""

    row: IntArray
    ids: IntArray
    logps: npt.NDArray[np.float32]


@dataclass
class Stack:
    """N records: `integers` [N, C] holds `COUNTS` and the deciles' tokens; `floats` [N, F] as `COLUMN` says."""

    integers: IntArray
    floats: Array
    sequenced: Mask
    """[N] the record holds sequence sums"""
    sketches: Sketches
    evidence: Tokens
    missing: list[dict[str, str]]
    """Not to be changed."""

    def __len__(self) -> int:
        return len(self.missing)

    def __getitem__(self, name: str) -> Array:
        """The columns [N, width] of a record's float field; zero where there is none."""
        return self.floats[:, COLUMN[name]]

    def count(self, name: str) -> IntArray:
        """One of `COUNTS`, [N]."""
        return self.integers[:, _COUNT[name]]

    @property
    def decile_tokens(self) -> IntArray:
        return self.integers[:, len(COUNTS) :]


def stack(pairs: Sequence[PairRecord | bytes]) -> tuple[Stack, list[int]]:
    """The readable ones of `pairs` as columns, in order, and the indices of those that contradict themselves.

    A record that is no block yet is made one first, at some 25 µs.
    """
    blocks = [pair if isinstance(pair, bytes) else _packed(pair) for pair in pairs]
    where = list(range(len(blocks)))
    bad: list[int] = []
    while True:
        found = _read(blocks)
        if isinstance(found, Stack):
            return found, sorted(bad)
        wrong = set(np.flatnonzero(found).tolist())
        bad += [where[n] for n in wrong]
        where = [index for n, index in enumerate(where) if n not in wrong]
        blocks = [block for n, block in enumerate(blocks) if n not in wrong]


def _packed(record: PairRecord) -> bytes:
    try:
        return pack(record)
    except (ValueError, TypeError):
        return b""


@lru_cache(1024)
def _row_of(shape: Shape) -> np.dtype[Any]:
    """All but the sketches of a block, as one numpy record."""
    ids = ("sequence", shape.sequence_bytes), ("position", shape.position_bytes), ("token", shape.token_bytes)
    fields: list[Any] = [
        ("head", f"V{HEAD.size}"),
        ("floats", "<f8", (shape.floats,)),
        ("counts", f"<i{shape.count_bytes}", (shape.counts,)),
        ("logps", "<f4", (shape.evidence, 2)),
        *((name, f"<i{width}", (shape.evidence,)) for name, width in ids),
    ]
    return np.dtype(fields)


def _read(blocks: list[bytes]) -> Stack | Mask:
    """All blocks as columns; or, where some cannot be read, which of them: [N]."""
    n = len(blocks)
    first = [block[:SHAPE] for block in blocks]
    shapes = {key: shape for key in set(first) if (shape := shape_of(key)) is not None}
    if len(shapes) < len(set(first)):
        return np.array([key not in shapes for key in first])
    heads = b"".join([block[: HEAD.size] for block in blocks])
    if len(heads) != n * HEAD.size:
        return np.array([len(block) < HEAD.size for block in blocks])
    sizes = np.frombuffer(heads, dtype=_SIZES)
    fixed, widths = (_ints([per[key] for key in first]) for per in _per_shape(shapes))
    runs_end = fixed + 4 * sizes["runs"].astype(np.int64)
    counts_end = runs_end + widths * sizes["counts"]
    wrong: Mask = counts_end + sizes["missing"] != _ints(list(map(len, blocks)))
    if wrong.any():
        return wrong
    sketches = _sketches(blocks, sizes, (fixed, runs_end, counts_end), widths)
    if not isinstance(sketches, Sketches):
        return sketches
    missing = [_NOTHING] * n
    for row in np.flatnonzero(sizes["missing"]).tolist():
        try:
            missing[row] = reasons_of(blocks[row])
        except ValueError:
            wrong[row] = True
    many = _columns(blocks, first, shapes, sketches, missing)
    integers, sequenced = many.integers, many.sequenced
    wrong |= ((integers < 0) | (integers >= COUNT_BELOW)).any(axis=1)
    wrong |= (integers[:, _SEQUENCES] > 0) & ~sequenced
    bare = np.array([not key[1] for key in first], dtype=bool)
    wrong |= bare & (sequenced | (integers[:, _TOKENS] > 0))
    return wrong if wrong.any() else many


def _ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def _per_shape(shapes: dict[bytes, Shape]) -> tuple[dict[bytes, int], dict[bytes, int]]:
    """Bytes before the sketches, and the width of the sketches' counts."""
    return {key: s.size for key, s in shapes.items()}, {key: s.sketch_bytes for key, s in shapes.items()}


def _columns(
    blocks: list[bytes],
    first: list[bytes],
    shapes: dict[bytes, Shape],
    sketches: Sketches,
    missing: list[dict[str, str]],
) -> Stack:
    n = len(blocks)
    integers, floats, sequenced = np.empty((n, INTEGERS), dtype=np.int64), np.zeros((n, WIDTH)), np.zeros(n, dtype=bool)
    evidence = []
    for key, shape in shapes.items():
        members = slice(None) if len(shapes) == 1 else np.flatnonzero([other == key for other in first])
        some = blocks if len(shapes) == 1 else [blocks[row] for row in members.tolist()]  # type: ignore[union-attr]
        rows = np.frombuffer(b"".join([block[: shape.size] for block in some]), dtype=_row_of(shape))
        integers[members] = rows["counts"][:, :INTEGERS]
        if shape.floats:
            floats[members] = rows["floats"][:, :WIDTH]
        sequenced[members] = bool(shape.flags & SEQUENCED)
        ids = np.empty((len(rows), shape.evidence, 3), dtype=np.int64)
        for place, name in enumerate(("sequence", "position", "token")):
            ids[:, :, place] = rows[name]
        row = np.arange(n)[members].repeat(shape.evidence)
        evidence.append(Tokens(row, ids.reshape(-1, 3), rows["logps"].reshape(-1, 2)))
    return Stack(integers, floats, sequenced, sketches, _together(evidence), missing)


def _together(parts: list[Tokens]) -> Tokens:
    """By record, as each had them."""
    if len(parts) == 1:
        return parts[0]
    nothing = Tokens(np.zeros(0, np.int64), np.zeros((0, 3), np.int64), np.zeros((0, 2), np.float32))
    parts = parts or [nothing]
    row = np.concatenate([part.row for part in parts])
    order = np.argsort(row, kind="stable")
    ids, logps = np.concatenate([part.ids for part in parts]), np.concatenate([part.logps for part in parts])
    return Tokens(row[order], ids[order], logps[order])


def _sketches(
    blocks: list[bytes], sizes: npt.NDArray[Any], places: tuple[IntArray, IntArray, IntArray], widths: IntArray
) -> Sketches | Mask:
    """The sketches of all blocks; or which blocks hold buckets that are none, or counts that are none."""
    n = len(blocks)
    lows, middles, highs = (place.tolist() for place in places)
    joined = b"".join([block[low:high] for block, low, high in zip(blocks, lows, middles, strict=True)])
    start, length = np.frombuffer(joined, dtype="<u2").astype(np.int64).reshape(-1, 2).T
    run_row = np.repeat(np.arange(n), sizes["runs"])
    wrong: Mask = np.bincount(run_row, weights=length, minlength=n) != sizes["counts"]
    outside = (start % KEPT_BUCKETS + length > KEPT_BUCKETS) | (start >= BUCKETS)
    outside[1:] |= (run_row[1:] == run_row[:-1]) & (start[1:] < (start + length)[:-1])
    wrong[run_row[outside]] = True
    if wrong.any():
        return wrong
    count = _widened([block[low:high] for block, low, high in zip(blocks, middles, highs, strict=True)], widths)
    if count.size and not (count.min() >= 0 and count.max() < COUNT_BELOW):
        odd = np.repeat(np.arange(n), sizes["counts"])[(count < 0) | (count >= COUNT_BELOW)]
        wrong[odd] = True
        return wrong
    bucket = np.repeat(start + length - np.cumsum(length), length) + np.arange(len(count))
    return Sketches(bucket, count, Sketches.bounds_of(run_row, start, length, n))


def _widened(pieces: list[bytes], widths: IntArray) -> Array:
    """Integers of `widths` bytes, one width a piece, as float64 end to end."""
    kinds = np.unique(widths).tolist()
    if len(kinds) == 1:
        return np.frombuffer(b"".join(pieces), dtype=f"<i{kinds[0]}").astype(np.float64)
    lengths = np.array(list(map(len, pieces)), dtype=np.int64) // widths
    width_of = np.repeat(widths, lengths)
    values = np.empty(len(width_of))
    for width in kinds:
        some = b"".join([piece for piece, w in zip(pieces, widths.tolist(), strict=True) if w == width])
        values[width_of == width] = np.frombuffer(some, dtype=f"<i{width}")
    return values

"""A pair record as one block of bytes: what travels and is stored. Its reader (`stack`) takes many blocks at once.

A block is little-endian, without padding; R runs, K sketch counts and E evidence tokens are as its head says:

    head     `HEAD`: layout, floats, counts, E, flags, five widths, R, K, bytes of `missing`
    floats   float64: the columns of `FLOATS` in order; none at all where nothing was measured
    counts   `COUNTS`, then the ten deciles' tokens
    logps    float32 [E, 2]: a and b of the worst tokens
    ids      sequence [E], position [E], token id [E]
    runs     uint16 [R, 2]: first bucket and length of a run of buckets that lie side by side
    counts   of the buckets [K], run after run; the three sketches follow each other, `KEPT_BUCKETS` each
    missing  msgpack map, statistic → reason; empty where nothing is missing

Integers are as wide (1, 2, 4 or 8 bytes, signed) as the head says of them: of the counts, the three ids, the sketch
counts. A later writer may append floats and counts; a reader takes those that it knows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from foreshock.stats.record import DECILES, PairRecord
from foreshock.stats.sketch import KEPT_BUCKETS

LAYOUT: Final = 1
HEAD: Final = struct.Struct("<10B3H")
SHAPE: Final = 10
_sizes_of = struct.Struct("<3H").unpack_from
SEQUENCED: Final = 1
"""Flag: the record holds sums over sequences."""
COUNT_BELOW: Final = 1 << 40
"""No count of one record is as large: sums of millions of them stay exact."""

COUNTS: Final = (
    "masked", "tokens", "nonfinite", "sentinels", "overflow", "zeros", "positives", "tail", "clip_tokens", "clip_low",
    "clip_high", "sequences", "seq_zeros", "split", "unplaced", "first_tokens",
)  # fmt: skip
INTEGERS: Final = len(COUNTS) + DECILES
FLOATS: Final = {
    "logp": 7, "prob": 5, "sums": 5, "extremes": 3, "seq_sums": 5, "seq_weights": 3, "first_abs": 1,
    "decile_abs": DECILES,
}  # fmt: skip
"""The record's float fields in order, each with its width."""
WIDTH: Final = sum(FLOATS.values())
SKETCHES: Final = ("abs_sketch", "seq_abs_sketch", "seq_corr_sketch")
BUCKETS: Final = len(SKETCHES) * KEPT_BUCKETS

_BRIDGED = 2
"""Empty buckets that cost less as zeros than as the end of a run."""
_NONFINITE = COUNTS.index("nonfinite")
_FORMATS = {1: "b", 2: "h", 4: "i", 8: "q"}
_DECILE_LENGTHS = ((0, 0), (DECILES, DECILES))
_lengths_of = attrgetter(
    "logp", "prob", "sums", "extremes", "seq_sums", "seq_weights", "decile_abs", "decile_tokens", "evidence_ids",
    "evidence_logps",
)  # fmt: skip
_counts_of = attrgetter(*COUNTS)
_pack_floats = struct.Struct(f"<{WIDTH}d").pack
_NOTHING: dict[str, str] = {}
_reasons = msgspec.msgpack.Decoder(dict[str, str])
_encode = msgspec.msgpack.Encoder().encode
_Z3, _Z5, _Z7, _Z10 = [0.0] * 3, [0.0] * 5, [0.0] * 7, [0.0] * 10


class Shape(NamedTuple):
    """What the first `SHAPE` bytes of a block say: how all but the sketches lies."""

    layout: int
    floats: int
    counts: int
    evidence: int
    flags: int
    count_bytes: int
    sequence_bytes: int
    position_bytes: int
    token_bytes: int
    sketch_bytes: int

    @property
    def size(self) -> int:
        """Bytes before the sketches, with the head."""
        ids = self.sequence_bytes + self.position_bytes + self.token_bytes
        return HEAD.size + 8 * self.floats + self.counts * self.count_bytes + self.evidence * (8 + ids)


@lru_cache(1024)
def shape_of(first: bytes) -> Shape | None:
    """The shape of blocks that begin with these `SHAPE` bytes; None where this reader does not understand them."""
    if len(first) != SHAPE:
        return None
    shape = Shape(*first)
    known = shape.layout == LAYOUT and shape.counts >= INTEGERS and (not shape.floats or shape.floats >= WIDTH)
    return shape if known and all(width in _FORMATS for width in shape[5:]) else None


def pack(record: PairRecord) -> bytes:
    """The record as a block. Raises ValueError where it contradicts itself or a number does not fit."""
    _check(record)
    runs, buckets = _runs(record)
    counts = [*_counts_of(record), *(record.decile_tokens or [0] * DECILES)]
    ids = record.evidence_ids
    floats = _floats(record)
    missing = _encode(record.missing) if record.missing else b""
    try:
        parts = [_integers(values) for values in (counts, ids[::3], ids[1::3], ids[2::3], buckets)]
        head = HEAD.pack(
            LAYOUT, len(floats) // 8, len(counts), len(ids) // 3, SEQUENCED if record.seq_sums else 0,
            *(width for width, _ in parts), len(runs) // 2, len(buckets), len(missing),
        )  # fmt: skip
    except struct.error as error:
        raise ValueError(f"a number of the record does not fit: {error}") from None
    packed = [part for _, part in parts]
    ends = struct.pack(f"<{len(runs)}H", *runs)
    return b"".join((head, floats, packed[0], record.evidence_logps, *packed[1:4], ends, packed[4], missing))


def reasons_of(block: bytes) -> dict[str, str]:
    """What the block says is missing. Raises ValueError for bytes that are no block, by head and length; costs 1 µs."""
    shape = shape_of(block[:SHAPE])
    if shape is None or len(block) < HEAD.size:
        raise ValueError(f"a pair's block of a layout that is not known here: {block[:SHAPE].hex()}")
    runs, counts, missing = _sizes_of(block, SHAPE)
    size = shape.size + 4 * runs + counts * shape.sketch_bytes + missing
    if size != len(block):
        raise ValueError(f"a pair's block of {len(block)} bytes that should have {size}")
    if not missing:
        return _NOTHING
    try:
        return _reasons.decode(block[size - missing :])
    except msgspec.MsgspecError as error:
        raise ValueError(f"what a pair's block is missing cannot be read: {error}") from None


def has_nonfinite(pair: PairRecord | bytes) -> bool:
    """Whether tokens were NaN or infinite; False of bytes that are no block."""
    if isinstance(pair, PairRecord):
        return pair.nonfinite > 0
    if len(pair) < HEAD.size:
        return False
    width = pair[5]
    at = HEAD.size + 8 * pair[1] + _NONFINITE * width
    return pair.count(0, at, at + width) < width


def _check(r: PairRecord) -> None:
    lengths = tuple(map(len, _lengths_of(r)))
    token_sums = tuple(FLOATS.values())[:4]
    if (
        (r.tokens and lengths[:4] != token_sums)
        or ((lengths[4] or r.sequences) and lengths[4:6] != (5, 3))
        or lengths[6:8] not in _DECILE_LENGTHS
        or 8 * lengths[8] != 3 * lengths[9]
        or r.tokens < 0
        or r.sequences < 0
    ):
        raise ValueError("a pair record that contradicts itself")


def _floats(r: PairRecord) -> bytes:
    tokens = r.tokens
    if not (tokens or r.seq_sums or r.decile_abs or r.first_abs):
        return b""
    return _pack_floats(
        *(r.logp if tokens else _Z7),
        *(r.prob if tokens else _Z5),
        *(r.sums if tokens else _Z5),
        *(r.extremes if tokens else _Z3),
        *(r.seq_sums or _Z5),
        *(r.seq_weights if r.seq_sums else _Z3),
        r.first_abs,
        *(r.decile_abs or _Z10),
    )


def _integers(values: Sequence[int]) -> tuple[int, bytes]:
    """The narrowest width that holds them all, and the values in it."""
    low, high = (min(values), max(values)) if values else (0, 0)
    width = next((w for w in (1, 2, 4) if -(1 << 8 * w - 1) <= low and high < 1 << 8 * w - 1), 8)
    return width, struct.pack(f"<{len(values)}{_FORMATS[width]}", *values)


def _runs(record: PairRecord) -> tuple[list[int], list[int]]:
    """Runs (first bucket, length, …) and counts of the three sketches, from `sketch.pack`'s lists."""
    runs: list[int] = []
    counts: list[int] = []
    for number, name in enumerate(SKETCHES):
        packed = getattr(record, name)
        if not packed:
            continue
        bucket, begun = packed[0], len(counts)
        if bucket < 0:
            raise ValueError(f"sketch bucket outside 0..{KEPT_BUCKETS - 1}")
        for entry in packed[1:]:
            if entry >= 0:
                counts.append(entry)
            elif entry >= -_BRIDGED:
                counts += [0] * -entry
            else:
                _close(runs, bucket, len(counts) - begun, number)
                bucket, begun = bucket + len(counts) - begun - entry, len(counts)
        _close(runs, bucket, len(counts) - begun, number)
    return runs, counts


def _close(runs: list[int], bucket: int, length: int, number: int) -> None:
    if bucket + length > KEPT_BUCKETS:
        raise ValueError(f"sketch bucket outside 0..{KEPT_BUCKETS - 1}")
    if length:
        runs += (bucket + number * KEPT_BUCKETS, length)

"""A record survives its block to the last bit; bytes that are no block are named, and never spoil their neighbours."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.stats import sketch
from foreshock.stats.merge import merge, record_of, statistics
from foreshock.stats.packed import COUNT_BELOW, HEAD, SHAPE, has_nonfinite, pack, reasons_of
from foreshock.stats.pair import PairAccumulator
from foreshock.stats.record import EvidenceToken, PairRecord
from foreshock.stats.stack import stack


def real(seed: int, sequences: int = 3, length: int = 40, **where: Any) -> PairRecord:
    generator = torch.Generator().manual_seed(seed)
    b = -3 * torch.rand(sequences, length, generator=generator)
    accumulator = PairAccumulator()
    accumulator.observe(b + 0.05 * torch.randn(b.shape, generator=generator), b, clip_range=(0.8, 1.2), **where)
    return accumulator.record()


def spelt(record: PairRecord) -> bytes:
    """Every field, NaN and signs of zero too."""
    return msgspec.msgpack.encode(record)


floats = st.floats(allow_nan=True, allow_infinity=True)
counts = st.integers(0, COUNT_BELOW - 1)


@st.composite
def records(draw: st.DrawFn) -> PairRecord:
    record = PairRecord(missing=draw(st.dictionaries(st.sampled_from(["*", "kl_k3"]), st.just("overflow"))))
    for name in ("masked", "tokens", "nonfinite", "overflow", "clip_tokens", "split", "first_tokens"):
        setattr(record, name, draw(counts))
    for name, width in (("logp", 7), ("prob", 5), ("sums", 5), ("extremes", 3)) if record.tokens else ():
        setattr(record, name, draw(st.lists(floats, min_size=width, max_size=width)))
    if record.tokens and draw(st.booleans()):
        record.sequences = draw(counts)
        record.seq_sums = draw(st.lists(floats, min_size=5, max_size=5))
        record.seq_weights = draw(st.lists(floats, min_size=3, max_size=3))
    if draw(st.booleans()):
        record.decile_tokens = [draw(st.integers(1, COUNT_BELOW - 1)), *[0] * 9]
        record.decile_abs = draw(st.lists(floats, min_size=10, max_size=10))
    for name in ("abs_sketch", "seq_abs_sketch", "seq_corr_sketch"):
        kept = np.zeros(sketch.KEPT_BUCKETS, dtype=np.int64)
        for bucket, count in draw(st.dictionaries(st.integers(0, sketch.KEPT_BUCKETS - 1), counts)).items():
            kept[bucket] = count
        setattr(record, name, sketch.pack(kept))
    ids = st.integers(-(2**63), 2**63 - 1)
    worst = draw(st.lists(st.tuples(ids, ids, ids), max_size=3))
    record.set_evidence([EvidenceToken(*token, -float(n), 0.5) for n, token in enumerate(worst)])
    return record


@given(records())
@settings(max_examples=200, deadline=None)
def test_a_record_survives_its_block(record: PairRecord) -> None:
    block = pack(record)
    assert reasons_of(block) == record.missing
    assert has_nonfinite(block) == has_nonfinite(record) == (record.nonfinite > 0)
    assert spelt(record_of(block)) == spelt(record)


@pytest.mark.parametrize("where", [{}, {"split": True}])
def test_what_was_observed_survives_its_block(where: dict[str, Any]) -> None:
    record = real(1, 8, 500, **where)
    block = pack(record)
    assert spelt(record_of(block)) == spelt(record)
    assert len(block) < 850
    assert statistics(block) == statistics(record)


def test_blocks_of_unlike_shapes_and_records_merge_as_if_all_were_alike() -> None:
    some = [real(seed, 1 + seed % 4, 30 * seed + 5) for seed in range(9)]
    some[3] = PairRecord(missing={"*": "detached"})
    some[5] = PairRecord(masked=7, nonfinite=7)
    for number in (1, 6):
        some[number].evidence_ids[0] = 1 << 40  # wider than the others'
    shapes = {pack(record)[:SHAPE] for record in some}
    assert len(shapes) > 3
    mixed = [pack(record) if n % 2 else record for n, record in enumerate(some)]
    assert spelt(merge(mixed)) == spelt(merge(some))
    many, bad = stack(mixed)
    assert bad == []
    assert many.count("tokens").tolist() == [record.tokens for record in some]
    assert many.missing[3] == {"*": "detached"}
    assert [many.evidence.ids[many.evidence.row == n].reshape(-1).tolist() for n in range(9)] == [
        record.evidence_ids for record in some
    ]


def test_non_finite_numbers_are_carried() -> None:
    record = real(2)
    record.sums[2], record.extremes[1], record.logp[0] = math.inf, -math.inf, math.nan
    assert spelt(record_of(pack(record))) == spelt(record)
    values = statistics(pack(record))
    assert values.missing["b_mean"] == "overflow"
    assert math.isfinite(values.values["abs_mean"])


@pytest.mark.parametrize(
    "spoilt",
    [
        {"logp": [0.0]}, {"sequences": 3, "seq_sums": [], "seq_weights": []}, {"decile_abs": [1.0]},
        {"abs_sketch": [5000, 1]}, {"abs_sketch": [-1, 1]}, {"abs_sketch": [1, -(2**62), 3]}, {"evidence_ids": [1]},
        {"tokens": 2**63}, {"tokens": -1},
    ],
)  # fmt: skip
def test_a_record_that_contradicts_itself_is_not_packed(spoilt: dict[str, Any]) -> None:
    record = real(3)
    for name, value in spoilt.items():
        setattr(record, name, value)
    with pytest.raises(ValueError, match=r"record|bucket"):
        pack(record)


GOOD = pack(real(4))


def changed(at: int, value: bytes) -> bytes:
    return GOOD[:at] + value + GOOD[at + len(value) :]


@pytest.mark.parametrize(
    ("block", "at_the_door"),
    [
        (b"", True),
        (GOOD[: HEAD.size - 1], True),
        (GOOD[:-1], True),
        (GOOD + b"\0", True),
        (changed(0, b"\x09"), True),
        (changed(1, b"\x01"), True),
        (changed(2, b"\x00"), True),
        (changed(5, b"\x03"), True),
        (changed(SHAPE, b"\xff\xff"), True),
        (changed(4, b"\x00"), False),  # sequences without their sums
        (changed(HEAD.size + 8 * 39, b"\xff\xff"), False),  # a negative count
        (changed(len(GOOD) - 2, b"\xff\xff"), False),  # a negative count in a sketch
    ],
)
def test_bytes_that_are_no_block_are_refused_and_their_neighbours_kept(block: bytes, at_the_door: bool) -> None:
    if at_the_door:
        with pytest.raises(ValueError, match="block"):
            reasons_of(block)
    many, bad = stack([GOOD, block, GOOD])
    assert bad == [1]
    assert len(many) == 2
    assert statistics(merge([GOOD, GOOD])).values["tokens"] == many.count("tokens").sum()
    with pytest.raises(ValueError, match="contradicts itself"):
        record_of(block)


@pytest.mark.parametrize(
    "runs",
    [
        [(6143, 2)],  # beyond the last bucket
        [(10, 1), (10, 1)],  # the same bucket twice
        [(10, 1), (5, 1)],  # backwards
        [(10, 3)],  # more than there are counts
    ],
)
def test_runs_that_overlap_or_leave_the_sketch_are_no_block(runs: list[tuple[int, int]]) -> None:
    block = pack(PairRecord(masked=1, abs_sketch=[0, 1, -9, 1]))
    assert block[SHAPE : SHAPE + 4] == bytes([2, 0, 2, 0])
    assert len(block) == 16 + 26 + 8 + 2
    ends = b"".join(first.to_bytes(2, "little") + length.to_bytes(2, "little") for first, length in runs)
    head = block[:SHAPE] + len(runs).to_bytes(2, "little") + block[SHAPE + 2 : HEAD.size]
    _, bad = stack([GOOD, head + block[16:42] + ends + block[50:], GOOD])
    assert bad == [1]


def test_counts_too_large_to_be_added_exactly_are_no_block() -> None:
    assert stack([pack(PairRecord(masked=COUNT_BELOW - 1))])[1] == []
    assert stack([pack(PairRecord(masked=COUNT_BELOW))])[1] == [0]
    assert stack([pack(PairRecord(abs_sketch=[3, COUNT_BELOW]))])[1] == [0]


def test_a_later_writer_may_append_floats_and_counts() -> None:
    record = real(5)
    block = pack(record)
    width = block[5]
    counts_at = HEAD.size + 8 * 39
    later = bytes([1, 40, 27]) + block[3:counts_at] + b"\1" * 8 + block[counts_at:]
    ends = counts_at + 8 + 26 * width
    later = later[:ends] + b"\1" * width + later[ends:]
    assert reasons_of(later) == {}
    assert spelt(record_of(later)) == spelt(record)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_blocks_are_read_or_named_and_never_raise(data: st.DataObject) -> None:
    block = bytearray(GOOD)
    chance = random.Random(data.draw(st.integers(0, 1 << 30)))
    for _ in range(chance.randrange(1, 6)):
        block[chance.randrange(len(block) if chance.random() < 0.5 else HEAD.size)] = chance.randrange(256)
    block = block[: chance.randrange(len(block))] if chance.random() < 0.2 else block
    many, bad = stack([GOOD, bytes(block), GOOD])
    assert bad in ([], [1])
    assert len(many) == 3 - len(bad)
    if not bad:
        statistics(bytes(block))
        merge([GOOD, bytes(block)])

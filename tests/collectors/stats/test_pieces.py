"""Context parallelism, callers and bad input: what `observe` promises beside the numbers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch

from foreshock.stats.merge import PLACED_STATISTICS, SEQUENCE_STATISTICS, STATISTICS, merge, statistics
from foreshock.stats.pair import PairAccumulator
from foreshock.stats.record import PairRecord
from tests.collectors.stats.test_pair import PATHS, assert_close, record_of


def streams(sequences: int = 6, positions: int = 80) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    b = -3 * torch.rand(sequences, positions)
    lengths = torch.randint(30, positions + 1, (sequences, 1))
    return b + 0.1 * torch.randn(sequences, positions), b, torch.arange(positions)[None] < lengths


@PATHS
def test_completed_pieces_give_what_whole_sequences_give(on_device: bool) -> None:
    a, b, mask = streams()
    whole = statistics(record_of(a, b, mask, on_device))
    positions = torch.arange(80).expand(6, 80)
    # Two ranks of a group hold the ends and the middle, as zig-zag sharding deals them.
    middle = torch.zeros(80, dtype=torch.bool)
    middle[20:60] = True
    ranks = [[x[:, ~middle], x[:, middle]] for x in (a, b, mask, positions)]
    tables: list[torch.Tensor] = []
    for a_r, b_r, mask_r, positions_r in zip(*ranks, strict=True):
        spy = PairAccumulator(on_device=on_device)
        spy.observe(a_r, b_r, mask_r, positions=positions_r, sequence_sums=lambda t: tables.append(t.clone()) or t)
    total = torch.stack(tables).sum(0)
    records = []
    for rank, (a_r, b_r, mask_r, positions_r) in enumerate(zip(*ranks, strict=True)):
        accumulator = PairAccumulator(on_device=on_device)
        accumulator.observe(
            a_r, b_r, mask_r, positions=positions_r, lengths=mask.sum(1), sequence_sums=lambda t: total,
            counts_sequences=rank == 0,
        )  # fmt: skip
        records.append(accumulator.record())
    assert_close(statistics(merge(records)), whole)


@PATHS
def test_pieces_that_nobody_completes_are_missing_as_split_sequence(on_device: bool) -> None:
    a, b, mask = streams()
    found = statistics(merge([record_of(a, b, mask, on_device, split=True), record_of(a, b, mask, on_device)]))
    for name in (*SEQUENCE_STATISTICS, *PLACED_STATISTICS):
        assert found.missing[name] == "split_sequence"
    assert found.values["tokens"] == 2 * int(mask.sum())
    placed = {"positions": torch.arange(80).expand(6, 80), "lengths": mask.sum(1)}
    found = statistics(record_of(a, b, mask, on_device, split=True, **placed))
    whole = statistics(record_of(a, b, mask, on_device))
    for name in PLACED_STATISTICS:
        assert found.values[name] == pytest.approx(whole.values[name], rel=1e-12)


@PATHS
def test_a_record_survives_the_wire(on_device: bool) -> None:
    a, b, mask = streams()
    record = record_of(a, b, mask, on_device, clip_range=(0.9, 1.1), token_ids=torch.ones(6, 80, dtype=torch.int64))
    for codec in (msgspec.msgpack, msgspec.json):
        again = codec.decode(codec.encode(record), type=PairRecord)
        assert again == record
        assert statistics(again) == statistics(record)
    newer = [*msgspec.to_builtins(record), "a field of a later version"]
    assert msgspec.convert(newer, PairRecord) == record
    assert msgspec.convert(newer[:12], PairRecord).tokens == record.tokens


def test_a_record_of_a_micro_batch_stays_below_a_kilobyte() -> None:
    torch.manual_seed(0)
    b = -3 * torch.rand(8, 4096)
    a, tokens = b + 0.05 * torch.randn(8, 4096), torch.randint(0, 150_000, (8, 4096))
    assert len(msgspec.msgpack.encode(record_of(a, b, None, False, token_ids=tokens))) < 1000


def test_named_reasons_reach_every_statistic() -> None:
    detached = statistics(PairRecord(missing={"*": "detached"}))
    assert detached.missing == dict.fromkeys(STATISTICS, "detached")
    a, b, mask = streams()
    measured = statistics(merge([PairRecord(missing={"*": "no_rollout_logprobs"}), record_of(a, b, mask, False)]))
    assert measured.values["tokens"] == int(mask.sum())
    assert statistics(merge([])).values["tokens"] == 0


@PATHS
def test_autograd_inference_mode_and_strides_make_no_difference(on_device: bool) -> None:
    a, b, mask = streams()
    plain = statistics(record_of(a, b, mask, on_device))
    assert_close(statistics(record_of(a.requires_grad_(), b, mask, on_device)), plain)
    accumulator = PairAccumulator(on_device=on_device)
    with torch.inference_mode():
        accumulator.observe(a.detach()[:3].clone(), b[:3].clone(), mask[:3].clone())
    accumulator.observe(a.detach()[3:].t().contiguous().t(), b[3:].repeat(1, 2)[:, :80], mask[3:].float())
    assert_close(statistics(accumulator.record()), plain)


@PATHS
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"b": torch.zeros(6, 79)}, "b has shape"),
        ({"mask": torch.zeros(6)}, "mask has shape"),
        ({"a": torch.zeros(6, 80, dtype=torch.int64)}, "floating-point"),
        ({"a": torch.zeros(480), "b": torch.zeros(480), "mask": None}, "sequences, positions"),
        ({"cu_seqlens": [0, 80]}, "packed rows"),
        ({"seq_ids": [1, 2]}, "2 seq_ids for 6"),
        ({"token_ids": torch.zeros(6, 1)}, "token_ids has shape"),
        ({"clip_range": (1.2, 0.8)}, "clip_range"),
        ({"lengths": [3]}, "1 lengths for 6"),
    ],
)
def test_a_wrong_shape_is_named(on_device: bool, change: dict[str, Any], says: str) -> None:
    a, b, mask = streams()
    arguments: dict[str, Any] = {"a": a, "b": b, "mask": mask} | change
    with pytest.raises(ValueError, match=says):
        PairAccumulator(on_device=on_device).observe(**arguments)


def test_sequence_edges_outside_the_tokens_are_refused_where_values_can_be_seen() -> None:
    for edges in ([0, 9], [0, 3, 2], [-1, 4]):
        with pytest.raises(ValueError, match="ascend"):
            PairAccumulator().observe(torch.zeros(5), torch.zeros(5), cu_seqlens=edges)


@PATHS
def test_a_collected_step_takes_no_more_tokens(on_device: bool) -> None:
    accumulator = PairAccumulator(on_device=on_device)
    assert not accumulator.ready()
    accumulator.observe(torch.zeros(1, 2), torch.zeros(1, 2))
    accumulator.collect()
    assert accumulator.ready()
    with pytest.raises(RuntimeError, match="after collect"):
        accumulator.observe(torch.zeros(1, 2), torch.zeros(1, 2))
    assert accumulator.record() is accumulator.record()


def test_the_service_reads_records_without_torch() -> None:
    code = "import sys, foreshock.stats.merge, foreshock.stats.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

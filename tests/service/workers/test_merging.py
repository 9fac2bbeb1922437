"""Steps merged together give what each gives alone."""

from __future__ import annotations

import math
import random
from dataclasses import asdict

import pytest

from foreshock.stats.record import PairRecord
from foreshock.wire import Frame
from foreshock_service.workers.merging import merge_steps


def pair(seed: int) -> PairRecord:
    dice = random.Random(seed)
    tokens = dice.randint(1, 50)
    return PairRecord(
        masked=tokens, tokens=tokens, sequences=1, logp=[-dice.random(), 0.01, 1.0, 0.1, 0.5, 0.0, 0.6],
        prob=[0.5, 0.0, 0.1, 0.0, 0.1], sums=[dice.random(), 0.1, tokens, tokens, 0.2],
        extremes=[-dice.random(), 0.3, 0.1],
        seq_sums=[0.0, 0.1, 0.1, dice.random(), 0.2], seq_weights=[0.1, 1.0, 1.0], abs_sketch=[800 + seed, tokens],
        seq_abs_sketch=[800, 1], evidence_ids=[0, seed, -1], evidence_logps=bytes(8),
    )  # fmt: skip


def step(number: int, ranks: int) -> list[Frame]:
    return [
        Frame(
            sequence=1, step=number, role="trainer", rank=rank, sealed_s=0.0, step_s=1.0 + rank,
            scalars={"loss": number + rank / 3, "lr": 0.1, **({"odd": math.nan} if number % 2 else {})},
            pairs={"policy": pair(10 * number + rank), **({"mismatch": pair(rank)} if rank else {})},
            missing={"mismatch": "not_reported"} if not rank else {},
        )
        for rank in range(ranks)
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 4])
def test_steps_merged_together_give_what_each_gives_alone(ranks: int) -> None:
    steps = [step(number, ranks + number % 2) for number in range(5)] + [[]]
    for together, frames in zip(merge_steps(steps), steps, strict=True):
        (alone,) = merge_steps([frames])
        for name, found in asdict(together).items():
            assert repr(sorted(found.items())) == repr(sorted(asdict(alone)[name].items())), name


def test_a_value_of_a_scalar_that_is_no_number_spoils_that_scalar_of_that_step_alone() -> None:
    even, odd = merge_steps([step(2, 2), step(3, 2)])
    assert "odd" not in even.values
    assert math.isnan(odd.values["odd"])
    assert odd.values["loss"] == pytest.approx(3 + 1 / 6)
    assert odd.values["time.step_s"] == 2.0

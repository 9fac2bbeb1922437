"""Many records pooled at once give what each group gives alone; sums are rounded as if they were exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.stats.merge import Statistics, merge, statistics
from foreshock.stats.pair import PairAccumulator
from foreshock.stats.pooling import exact_sum, pool
from foreshock.stats.record import PairRecord
from foreshock.stats.stack import stack

FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e150, max_value=1e150)


def record_of(seed: int, sequences: int) -> PairRecord:
    generator = torch.Generator().manual_seed(seed)
    b = -3 * torch.rand(sequences, 50, generator=generator)
    accumulator = PairAccumulator()
    accumulator.observe(b + 0.05 * torch.randn(b.shape, generator=generator), b, clip_range=(0.8, 1.2))
    return accumulator.record()


@given(st.lists(FLOATS, min_size=1, max_size=70))
@settings(max_examples=200)
def test_a_sum_is_that_of_fsum(values: list[float]) -> None:
    found = float(exact_sum(np.array([values]))[0])
    size = math.fsum(map(abs, values))
    assert found == pytest.approx(math.fsum(values), rel=1e-15, abs=size * 1e-28)


def test_infinities_and_nan_stay_what_they_are() -> None:
    rows = np.array([[1.0, math.inf, 2.0], [math.inf, -math.inf, 0.0], [math.nan, 1.0, 2.0]])
    assert exact_sum(rows).tolist()[0] == math.inf
    assert np.isnan(exact_sum(rows)[1:]).all()


def test_groups_pooled_together_give_what_each_gives_alone() -> None:
    groups = [[record_of(7 * g + r, 1 + r % 3) for r in range(size)] for g, size in enumerate((1, 8, 3, 5))]
    groups[1].append(PairRecord(missing={"*": "no_rollout_logprobs"}))
    groups.append([PairRecord(missing={"*": "detached"}), PairRecord()])
    order = np.random.default_rng(0).permutation(sum(map(len, groups)))
    flat = [(number, record) for number, members in enumerate(groups) for record in members]
    many, bad = stack([flat[i][1] for i in order])
    whole = pool(many, np.array([flat[i][0] for i in order]), len(groups))
    together = Statistics.of(whole)
    assert bad == []
    for number, members in enumerate(groups):
        alone = statistics(merge(members))
        values, missing = together.row(number)
        assert missing == alone.missing
        assert values == pytest.approx(alone.values, rel=1e-14, abs=1e-300)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"logp": [0.0]},
        {"seq_sums": []},
        {"decile_abs": [1.0]},
        {"abs_sketch": [5000, 1]},
        {"abs_sketch": [1, -(2**62), 3]},
        {"evidence_ids": [1]},
        {"tokens": 2**63},
        {"tokens": -1},
    ],
)
def test_a_record_that_contradicts_itself_is_named_and_the_others_are_kept(spoilt: dict[str, object]) -> None:
    good, bad = record_of(1, 2), record_of(2, 2)
    for name, value in spoilt.items():
        setattr(bad, name, value)
    many, indices = stack([good, bad, good])
    assert indices == [1]
    assert len(many) == 2
    with pytest.raises(ValueError, match="contradicts itself"):
        statistics(bad)

"""The quantile sketch: relative error, packing, merging."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.stats import sketch
from tests.collectors.stats.reference import inverted_cdf

values = st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e30)), min_size=1, max_size=200)


@given(values=values, share=st.floats(0.0, 1.0))
def test_a_quantile_is_within_five_percent(values: list[float], share: float) -> None:
    right = inverted_cdf(values, share)
    assert sketch.quantile(sketch.of_values(values), share) == pytest.approx(right, rel=0.05, abs=0)


@given(values=values)
def test_packing_loses_nothing(values: list[float]) -> None:
    kept = sketch.of_values(values)
    assert np.array_equal(sketch.unpack(sketch.pack(kept)), kept)
    assert kept.sum() == len(values)


@given(left=values, right=values)
def test_sketches_of_parts_add_up_to_that_of_the_whole(left: list[float], right: list[float]) -> None:
    parts = [sketch.pack(sketch.of_values(part)) for part in (left, right, [])]
    assert np.array_equal(sketch.total(parts), sketch.of_values(left + right))


def test_no_bucket_is_wider_than_it_promises() -> None:
    for bucket in range(8, sketch.KEPT_BUCKETS - 16):
        value = sketch.midpoint(bucket)
        assert int(np.flatnonzero(sketch.of_values([value]))[0]) == bucket
        beside = [int(np.flatnonzero(sketch.of_values([value * factor]))[0]) for factor in (0.9, 1.1)]
        assert beside[0] < bucket < beside[1] or value > 1e38


def test_an_empty_sketch_has_no_quantile_and_a_bucket_outside_is_refused() -> None:
    assert math.isnan(sketch.quantile(sketch.unpack([]), 0.5))
    for packed in ([sketch.KEPT_BUCKETS, 1], [-1, 1]):
        with pytest.raises(ValueError, match="outside"):
            sketch.unpack(packed)

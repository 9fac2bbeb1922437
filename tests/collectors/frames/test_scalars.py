"""Scalars fold by the catalogue's rule, odd ones are counted and left out, and no value is ever waited for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreshock.frames.scalars import DeviceCopy, Folded, Scalars


def folded(*calls: dict[str, Any], most: int = 512) -> dict[str, float]:
    scalars = Scalars(most)
    for call in calls:
        scalars.add(call)
    return scalars.seal().values()


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("reward.mean", [1.0, 2.0, 6.0], 3.0),
        ("reward.min", [2.0, 1.0, 3.0], 1.0),
        ("grad.norm", [2.0, 5.0, 3.0], 5.0),
        ("lr", [1e-6, 2e-6, 3e-6], 3e-6),
        ("my/own.metric", [1.0, 3.0], 2.0),
        ("grad.norm", [1.0, math.nan, 2.0], math.nan),
        ("reward.min", [math.nan, 1.0], math.nan),
        ("reward.mean", [math.inf, math.inf, math.inf], math.inf),
        ("lr", [math.nan, 1.0], 1.0),
    ],
)
def test_repeated_names_fold_by_their_merge_rule(name: str, values: list[float], expected: float) -> None:
    assert folded(*({name: value} for value in values))[name] == pytest.approx(expected, nan_ok=True)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_a_mean_of_many_calls_is_their_mean(values: list[float]) -> None:
    assert folded(*({"loss": value} for value in values))["loss"] == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)


def test_numbers_of_every_kind_are_taken() -> None:
    taken = folded({"a": 1, "b": True, "c": np.float32(2.5), "d": np.int64(3), "e": np.array(4.0),
                    "f": torch.tensor([5.0]), "g": torch.tensor(6),
                    "h": torch.tensor(7.0, requires_grad=True)})  # fmt: skip
    assert taken == {"a": 1.0, "b": 1.0, "c": 2.5, "d": 3.0, "e": 4.0, "f": 5.0, "g": 6.0, "h": 7.0}
    assert all(type(value) is float for value in taken.values())


def test_what_is_no_signal_is_counted_and_named_once() -> None:
    scalars = Scalars(512)
    bad = {
        "two words": 1.0,
        7: 1.0,
        "x" * 200: 1.0,
        "text": "1.0",
        "none": None,
        "vector": torch.zeros(3),
        "complex": 1j,
    }
    scalars.add(bad)
    scalars.add(bad)
    assert scalars.seal().values() == {}
    assert scalars.rejections == 2 * len(bad)
    assert len(scalars.newly_rejected()) == len(bad)
    assert scalars.newly_rejected() == []


def test_a_step_and_a_process_have_a_bounded_number_of_names() -> None:
    scalars = Scalars(10)
    scalars.add({f"s{i}": 1.0 for i in range(30)})
    assert len(scalars.seal().values()) == 10
    for step in range(5000):
        scalars.add({f"step_{step}": 1.0})
        scalars.seal()
    assert len(scalars._rules) <= 4096


def test_a_sealed_step_is_not_touched_by_the_next() -> None:
    scalars = Scalars(10)
    scalars.add({"loss": 1.0})
    first = scalars.seal()
    scalars.add({"loss": 9.0})
    assert (first.values(), scalars.seal().values()) == ({"loss": 1.0}, {"loss": 9.0})


class Late(DeviceCopy):
    """A copy that has not arrived."""

    arrived = False

    def ready(self) -> bool:
        return self.arrived


def test_device_values_fold_in_when_they_arrive_and_are_left_out_before() -> None:
    copy = Late(["grad.norm", "loss"], [torch.tensor(5.0), torch.tensor(3.0)])
    step = Folded({"grad.norm": 2.0, "lr": 1.0}, [copy])
    assert not step.ready()
    assert step.values(waited=False) == {"grad.norm": 2.0, "lr": 1.0}
    copy.arrived = True
    assert step.ready()
    assert step.values() == {"grad.norm": 5.0, "lr": 1.0, "loss": 3.0}

"""Each variant is held against the unchanged forward; ranks add up; a variant that fails does not hide the others."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from foreshock.probes import experiment

MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
BASE = torch.tensor([[-1.0, -2.0, -9.0], [-3.0, -9.0, -9.0]])


def score(variant: str) -> Any:
    if variant == "fp32":
        raise RuntimeError("no such kernel")
    shift = {"base": 0.0, "repeat": 0.0, "other_mode": 0.2, "no_padding": float("nan")}[variant]
    moved = BASE.clone()
    moved[0, 0] += shift
    moved[MASK == 0] += 5.0 if variant == "repeat" else 0.0
    return moved


def test_the_repeat_is_the_floor_and_a_change_is_measured_over_masked_tokens_only() -> None:
    found = experiment.merged([experiment.run(score, MASK, ("repeat", "other_mode"))])["probe"]
    assert (found["repeat"]["kl_k2"], found["repeat"]["moved"]) == (0.0, 0.0)
    assert found["other_mode"]["kl_k2"] == pytest.approx(0.5 * 0.2**2 / 3, rel=1e-5)
    assert found["other_mode"]["abs_mean"] == pytest.approx(0.2 / 3, rel=1e-5)
    assert found["other_mode"]["abs_max"] == pytest.approx(0.2, rel=1e-5)
    assert found["other_mode"]["moved"] == pytest.approx(1 / 3)
    assert found["other_mode"]["tokens"] == 3


def test_ranks_add_up_to_the_whole() -> None:
    whole = experiment.merged([experiment.run(score, MASK, ("other_mode",))])
    rows = []
    for row in (0, 1):
        part = experiment.run(lambda v, row=row: score(v)[row : row + 1], MASK[row : row + 1], ("other_mode",))
        rows.append(part)
    assert experiment.merged(rows)["probe"]["other_mode"] == pytest.approx(whole["probe"]["other_mode"])


def test_a_variant_that_raises_is_reported_and_the_others_run() -> None:
    found = experiment.merged([experiment.run(score, MASK, ("fp32", "other_mode"))])["probe"]
    assert found["fp32"] == {"error": "RuntimeError: no such kernel"}
    assert found["other_mode"]["kl_k2"] > 0


def test_a_stage_without_log_probs_takes_part_and_adds_nothing() -> None:
    asked: list[str] = []
    silent = experiment.run(asked.append, MASK, ("repeat",))
    assert asked == ["base", "repeat"]
    found = experiment.merged([silent, experiment.run(score, MASK, ("repeat",))])["probe"]
    assert found["repeat"]["tokens"] == 3


def test_a_nan_stays_one() -> None:
    found = experiment.merged([experiment.run(score, MASK, ("no_padding",))])["probe"]
    assert math.isnan(found["no_padding"]["kl_k2"])
    assert math.isnan(found["no_padding"]["abs_max"])


def test_an_unknown_variant_is_named() -> None:
    with pytest.raises(ValueError, match="unknown variant 'magic'"):
        experiment.run(score, MASK, ("magic",))

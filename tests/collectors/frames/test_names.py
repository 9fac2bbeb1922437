"""The frameworks' names, as adapters use them in the host's process."""

from __future__ import annotations

import pytest

from foreshock.frames.catalogue import SCALARS
from foreshock.frames.names import FRAMEWORKS, scalars


def test_scalars_come_under_our_names_and_the_first_in_a_table_wins() -> None:
    logged = {"critic/rewards/mean": 0.1, "critic/score/mean": 0.3, "timing_s/step": 4.0, "perf/mfu/actor": 0.4}
    assert scalars("verl", logged) == {"reward.mean": 0.3, "time.step_s": 4.0}


def test_figures_of_pairs_are_left_to_the_exact_measurement() -> None:
    assert scalars("verl", {"rollout_corr/k3_kl": 0.1, "actor/ppo_kl": 0.2}) == {}
    assert scalars("slime", {"train/train_rollout_logprob_abs_diff": 0.1}) == {}


def test_what_the_adapter_measures_itself_is_left_out() -> None:
    assert scalars("verl", {"actor/grad_norm": 1.0, "actor/lr": 1e-6}, without={"grad.norm"}) == {"lr": 1e-6}


def test_validation_is_found_by_its_pattern() -> None:
    assert scalars("verl", {"val-core/gsm8k/acc/mean@4": 0.5}) == {"reward.validation": 0.5}


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_only_catalogued_scalars_come_out(framework: str) -> None:
    every = dict.fromkeys(FRAMEWORKS[framework], 1.0)
    assert set(scalars(framework, every)) <= set(SCALARS)

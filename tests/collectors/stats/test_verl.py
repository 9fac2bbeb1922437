"""verl, from PyPI, as the oracle for the mismatch figures that it defines itself."""

from __future__ import annotations

import warnings

import pytest
import torch

from foreshock.stats.merge import statistics
from foreshock.stats.pair import PairAccumulator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.protocol import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics, compute_rollout_correction_weights
    from verl.utils.debug.metrics import calculate_debug_metrics
    from verl.utils.torch_functional import masked_mean

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(params=[0.002, 0.05, 0.5])
def streams(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(11)
    rollout = -3 * torch.rand(8, 500)
    lengths = torch.randint(100, 501, (8, 1))
    return rollout + request.param * torch.randn(8, 500), rollout, (torch.arange(500)[None] < lengths).float()


def found(streams: tuple[torch.Tensor, ...]) -> dict[str, float]:
    old, rollout, mask = streams
    accumulator = PairAccumulator()
    accumulator.observe(old, rollout, mask)
    return statistics(accumulator.record()).values


def test_mismatch_equals_compute_offpolicy_metrics(streams: tuple[torch.Tensor, ...]) -> None:
    old, rollout, mask = streams
    ours, theirs = found(streams), compute_offpolicy_metrics(old, rollout, mask)
    assert ours["kl_k1"] == pytest.approx(theirs["kl"], abs=1e-7)
    assert ours["kl_k3"] == pytest.approx(theirs["k3_kl"], rel=1e-4, abs=1e-8)
    assert ours["chi2_token"] == pytest.approx(theirs["chi2_token"], rel=1e-4, abs=1e-6)
    assert ours["kl_k1_seqmean"] == pytest.approx(theirs["log_ppl_diff"], abs=1e-6)


def test_mismatch_equals_calculate_debug_metrics(streams: tuple[torch.Tensor, ...]) -> None:
    old, rollout, mask = streams
    tensors = {"old_log_probs": old, "rollout_log_probs": rollout, "response_mask": mask, "responses": mask.long()}
    ours, theirs = found(streams), calculate_debug_metrics(DataProto.from_dict(tensors=tensors))
    assert ours["prob_abs_mean"] == pytest.approx(theirs["training/rollout_probs_diff_mean"], rel=1e-5)
    assert ours["prob_abs_max"] == pytest.approx(theirs["training/rollout_probs_diff_max"], rel=1e-5)
    assert ours["prob_pearson"] == pytest.approx(theirs["training/rollout_actor_probs_pearson_corr"], abs=1e-5)


def test_kl_estimators_equal_kl_penalty(streams: tuple[torch.Tensor, ...]) -> None:
    old, rollout, mask = streams
    ours = found(streams)
    # verl's estimators are of KL(first ‖ second) over tokens of the first: the rollout's.
    for name, kind in (("kl_k1", "k1"), ("kl_k2", "k2"), ("kl_k3", "k3"), ("abs_mean", "abs")):
        theirs = float(masked_mean(core_algos.kl_penalty(rollout, old, kind), mask))
        assert ours[name] == pytest.approx(theirs, rel=1e-4, abs=1e-7), name


def test_effective_sample_size_equals_the_unclipped_weights(streams: tuple[torch.Tensor, ...]) -> None:
    old, rollout, mask = streams
    _, theirs = compute_rollout_correction_weights(old - rollout, mask, "token", 1e9)
    assert found(streams)["ess_token"] == pytest.approx(theirs["rollout_is_eff_sample_size"], rel=1e-4)

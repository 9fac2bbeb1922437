"""Names become signals with the right sign, unit and estimator; what cannot be translated is not read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from foreshock.frames import catalogue
from foreshock.frames.names import FRAMEWORKS, GENERIC, PATTERNS
from foreshock.frames.names.base import to
from foreshock_service.check.alias_page import page
from foreshock_service.check.aliases import Translator, guess, meaning

ALL = [*(a for t in FRAMEWORKS.values() for a in t.items()), *GENERIC.items(), *PATTERNS]


def told(rows: list[dict[str, float]]) -> dict[str, float]:
    """The last row's signals."""
    translator = Translator()
    values: dict[str, float] = {}
    for row in rows:
        values, _ = translator.translate(row)
    return values


@pytest.mark.parametrize(("name", "alias"), ALL, ids=lambda x: x if isinstance(x, str) else "")
def test_every_alias_leads_to_a_catalogued_signal_or_says_why_not(name, alias):
    if alias.signal is None:
        assert alias.note
    else:
        assert catalogue.find(alias.signal) is not None, alias.signal


@pytest.mark.parametrize(
    ("row", "signal", "value"),
    [
        ({"actor/policykl": 0.02, "actor_train/grad_norm": 1.0, "critic/score/mean": 0.5}, "policy.kl_k1", -0.02),
        ({"actor/approxkl": 0.02, "actor_train/grad_norm": 1.0, "critic/score/mean": 0.5}, "policy.kl_k2", 0.02),
        ({"approx_kl/avg": -0.01, "task_reward/avg": 0.5, "entropy/avg": 0.3}, "update.kl_k1", 0.01),
        ({"behave_approx_kl/avg": -0.01, "task_reward/avg": 0.5, "entropy/avg": 0.3}, "mismatch.kl_k1", 0.01),
        ({"actor/ppo_kl": 0.01, "actor/grad_norm": 1.0, "actor/pg_loss": 0.1}, "update.kl_k1", 0.01),
        (
            {"training/rollout_probs_diff_mean": 0.004, "actor/grad_norm": 1.0, "actor/pg_loss": 0.1},
            "mismatch.prob_abs_mean", 0.004,
        ),
        ({"rollout_corr/k3_kl": 0.002, "actor/grad_norm": 1.0, "actor/pg_loss": 0.1}, "mismatch.kl_k3", 0.002),
        ({"rollout_corr/kl": 0.002, "actor/grad_norm": 1.0, "actor/pg_loss": 0.1}, "mismatch.kl_k1", 0.002),
        (
            {"sampling/sampling_logp_difference/mean": 0.01, "frac_reward_zero_std": 0.2, "reward": 0.5},
            "mismatch.abs_mean", 0.01,
        ),
        (
            {"sampling/importance_sampling_ratio/mean": 0.3, "frac_reward_zero_std": 0.2, "reward": 0.5},
            "is_weight.mean", 0.3,
        ),
        (
            {"sampling/importance_sampling_ratio/mean": 1.1, "frac_reward_zero_std": 0.2, "reward": 0.5},
            "is_weight.masked", None,
        ),
        ({"token_mult_prob_error": 1.02, "gen_kl_error": 0.001, "avg_reward": 0.5}, "mismatch.kl_k3", 0.001),
        ({"token_mult_prob_error": 1.02, "avg_reward": 0.5, "approx_entropy": 0.5}, "mismatch.abs_mean", 0.02),
        ({"vllm_kl": 0.003, "ppo_kl": 0.001, "policy_loss": 0.1}, "mismatch.kl_k1", 0.003),
        ({"train/train_rollout_logprob_abs_diff": 0.011, "train/ppo_kl": 0.0, "rollout/raw_reward": 0.5},
         "mismatch.abs_mean", 0.011),
        ({"mismatch_kl/all/mean": 0.002, "reward/all/mean": 0.4, "optim/lr": 0.1}, "mismatch_current.kl_k3", 0.002),
        ({"rollout_correction/k3_kl": 0.002, "rollout_correction/ess": 0.9, "reward": 0.5, "entropy/mean": 0.3},
         "mismatch.kl_k3", 0.002),
        ({"policy/rollout_train_logprobs_abs_diff_mean": 0.01, "policy/policy_entropy": 0.3, "policy/policy_lr": 1.0},
         "mismatch.abs_mean", 0.01),
        ({"policy/approxkl_avg": 0.2, "objective/scores": -0.1, "policy/entropy_avg": 0.3}, "update.kl_k2", 0.2),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)  # fmt: skip
def test_sign_and_estimator_are_translated(row, signal, value):
    got = told([row])
    assert got.get(signal) == (pytest.approx(value) if value is not None else None)


def test_a_name_whose_meaning_is_not_known_is_not_read():
    """`approx_kl` alone has three meanings and two signs."""
    translator = Translator()
    values, _ = translator.translate({"approx_kl": 0.01, "some_loss": 1.0})
    assert not [s for s in values if s.startswith(("policy.", "update.", "mismatch."))]
    assert "approx_kl" in translator.untranslated


@pytest.mark.parametrize(
    ("name", "signal"),
    [
        ("mean_reward", "reward.mean"), ("train/reward_mean", "reward.mean"), ("Avg Reward", "reward.mean"),
        ("entropy_avg", "entropy.mean"), ("policy/entropy/mean", "entropy.mean"), ("avg_response_len", "length.mean"),
        ("Grad_Norm", "grad.norm"), ("kl_mean", "reference.kl_k3"), ("seq_len_mean", "length.mean"),
    ],
)  # fmt: skip
def test_trainers_that_nobody_knows_are_read_by_plain_names(name, signal):
    assert told([{name: 0.5}]) == {signal: 0.5}


def test_names_of_our_own_catalogue_are_themselves():
    row = {"policy.kl_k2": 1e-6, "reward.mean": 0.4, "mismatch.kl_k3": 1e-3}
    assert told([row]) == row


def test_a_clip_fraction_that_is_always_zero_is_missing_until_it_is_not():
    row = {"reward": 0.5, "entropy": 0.3, "clip_ratio/low_mean": 0.0, "frac_reward_zero_std": 0.0}
    translator = Translator()
    values, missing = translator.translate(row)
    assert "update.clip_low" not in values
    assert missing["update.clip_low"] == "not_reported"
    assert values["group.zero_std"] == 0.0, "zero is a measurement where the host measures it"
    assert translator.always_zero == ["update.clip_low"]
    values, _ = translator.translate(row | {"clip_ratio/low_mean": 0.01})
    assert values["update.clip_low"] == 0.01
    values, missing = translator.translate(row)
    assert values["update.clip_low"] == 0.0, "once it was measured, zero is a measurement"
    assert not missing
    assert translator.always_zero == []


def test_a_policy_pair_that_is_zero_throughout_is_detached():
    _, missing = Translator().translate({"actor/approxkl": 0.0, "actor_train/grad_norm": 1.0, "critic/score/mean": 0.5})
    assert missing["policy.kl_k2"] == "detached"


def test_a_nan_under_an_unknown_name_is_kept():
    values = told([{"critic/vf_loss": math.nan, "actor/pg_loss": 0.1, "actor/grad_norm": 1.0}])
    assert math.isnan(values["host.critic/vf_loss"])


def test_an_unknown_name_cannot_pass_for_a_signal():
    values = told([{"how good": 1.0, "x" * 500: 2.0, "重み": 3.0}])
    assert all(s.startswith("host.") for s in values)
    assert all(len(s) <= catalogue.MAX_NAME for s in values)


def test_the_framework_is_told_from_all_names_together():
    assert guess(["train/loss", "train/reward", "train/frac_reward_zero_std", "train/kl"]) == "trl"
    assert guess(["actor/entropy", "actor/pg_loss", "critic/score/mean", "response_length/mean"]) == "verl"
    assert guess(["actor/approxkl", "actor/policykl", "critic/score/mean", "actor_train/grad_norm"]) == "roll"
    assert guess(["train/ppo_kl", "rollout/raw_reward", "train/train_rollout_logprob_abs_diff"]) == "slime"
    assert guess(["approx_kl/avg", "behave_approx_kl/avg", "task_reward/avg"]) == "areal"
    assert guess(["ppo_actor/update/approx_kl/avg", "ppo_actor/task_reward/avg", "ppo_actor/entropy/avg"]) == "areal"
    assert guess(["foo", "loss"]) is None


def test_the_page_of_names_is_current():
    path = Path(__file__).parents[3] / "docs" / "aliases.md"
    assert path.read_text(encoding="utf-8") == page(), "python -m foreshock_service.check.alias_page docs/aliases.md"


def test_a_lone_name_is_read_only_where_all_who_have_it_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    meaning.cache_clear()
    alone = meaning("critic/score/mean", None)
    assert alone is not None
    assert alone.signal == "reward.mean"
    meaning.cache_clear()
    monkeypatch.setitem(FRAMEWORKS, "other", {"critic/score/mean": to("reward.mean", scale=-1.0)})
    torn = meaning("critic/score/mean", None)
    assert torn is None or torn.signal is None
    meaning.cache_clear()

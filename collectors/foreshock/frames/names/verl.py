"""verl (1dda039)."""

from __future__ import annotations

from typing import Final

from foreshock.frames.names.base import (
    AFTER_CORRECTION,
    ALL_UPDATES,
    BOTH_SIDES,
    KL_LOSS,
    LENGTHS,
    POST_CLIP,
    Table,
    no,
    to,
)

TABLE: Final[Table] = {
    "critic/score/mean": to("reward.mean", "before any KL penalty"),
    "critic/rewards/mean": to("reward.mean", "after the KL penalty"),
    "critic/score/max": to("reward.max"),
    "critic/score/min": to("reward.min"),
    "critic/advantages/mean": to("advantage.mean"),
    "critic/advantages/max": to("advantage.abs_max", "positive side only"),
    "actor/entropy": to("entropy.mean", "full vocabulary"),
    "actor/entropy_loss": to("entropy.mean", "the entropy itself, not its loss term"),
    "actor/grad_norm": to("grad.norm", "mean over mini-batches, before clipping"),
    "actor/lr": to("lr"),
    "actor/pg_loss": to("loss", "policy loss"),
    "actor/kl_loss": to("reference.kl_k3", KL_LOSS),
    "actor/ppo_kl": to("update.kl_k1", "−mean(clamp(cur − old, ±20)), " + ALL_UPDATES),
    "actor/pg_clipfrac": to("update.clip_high", BOTH_SIDES),
    "actor/pg_clipfrac_lower": no("dual clip (c = 3), a third bound"),
    "response_length/mean": to("length.mean"),
    "response_length/max": to("length.max"),
    "response_length/clip_ratio": to("length.truncated"),
    "rollout_corr/k3_kl": to("mismatch.kl_k3"),
    "rollout_corr/kl": to("mismatch.kl_k1"),
    "rollout_corr/chi2_token": to("mismatch.chi2_token"),
    "rollout_corr/chi2_seq": no(LENGTHS),
    "rollout_corr/rollout_is_eff_sample_size": to("mismatch.ess_token", "of truncated weights: an upper bound"),
    "rollout_corr/rollout_rs_masked_fraction": to("is_weight.masked"),
    "rollout_corr/rollout_is_mean": to("is_weight.mean", AFTER_CORRECTION),
    "rollout_corr/rollout_is_max": no(POST_CLIP),
    "rollout_corr/ppl_ratio": no("ratio of per-sequence perplexities"),
    "rollout_corr/log_ppl_abs_diff": to("mismatch.abs_mean_seqmean", "|mean δ| of a sequence: a lower bound"),
    "training/rollout_probs_diff_mean": to("mismatch.prob_abs_mean", "probability space, not nats"),
    "training/rollout_probs_diff_max": to("mismatch.prob_abs_max", "probability space, not nats"),
    "training/rollout_probs_diff_std": no("probability space"),
    "training/rollout_actor_probs_pearson_corr": to("mismatch.prob_pearson"),
    "timing_s/step": to("time.step_s"),
    "perf/time_per_step": to("time.step_s"),
    "training/off_policy/trajectory_staleness/mean": to("staleness.mean", "by the freshest weights of a trajectory"),
    "training/off_policy/trajectory_staleness_worst/max": to("staleness.max", "by its oldest weights"),
    "rollout/moe/max_vio": to("expert.max_violation"),
}

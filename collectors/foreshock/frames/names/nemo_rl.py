"""NeMo-RL (7ea279a): as it logs, and as it prints."""

from __future__ import annotations

from typing import Final

from foreshock.frames.names.base import ALL_UPDATES, KL_LOSS, Table, no, to

TABLE: Final[Table] = {
    "train/reward": to("reward.mean"),
    "avg_reward": to("reward.mean"),
    "train/gen_kl_error": to("mismatch.kl_k3", "KL(engine‖trainer)"),
    "gen_kl_error": to("mismatch.kl_k3", "KL(engine‖trainer)"),
    "generation_kl_error": to("mismatch.kl_k3", "KL(engine‖trainer), as printed"),
    "train/policy_kl_error": no("KL(trainer‖engine), the other direction; gen_kl_error is read"),
    "train/js_divergence_error": no("Jensen–Shannon divergence"),
    "train/token_mult_prob_error": to("mismatch.abs_mean", "mean(e^|δ|) − 1: an upper bound of mean |δ|", offset=-1.0),
    "token_mult_prob_error": to("mismatch.abs_mean", "mean(e^|δ|) − 1: an upper bound of mean |δ|", offset=-1.0),
    "train/sampling_importance_ratio": to("mismatch.ratio_mean"),
    "train/approx_entropy": to("entropy.mean", "importance-weighted sample, not the full vocabulary"),
    "approx_entropy": to("entropy.mean", "importance-weighted sample, not the full vocabulary"),
    "train/probs_ratio": to("update.ratio_mean", ALL_UPDATES),
    "train/kl_penalty": to("reference.kl_k3", KL_LOSS),
    "train/loss": to("loss"),
    "train/grad_norm": to("grad.norm"),
    "train/lr": to("lr"),
    "train/mean_gen_tokens_per_sample": to("length.mean"),
    "mean_generation_length": to("length.mean"),
    "train/is_oob_ratio": to("is_weight.masked"),
    "validation/accuracy": to("reward.validation"),
}

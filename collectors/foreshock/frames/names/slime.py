"""slime (624b824); figures are means of sequence means unless it is told otherwise."""

from __future__ import annotations

from typing import Final

from foreshock.frames.names.base import ALL_UPDATES, BOTH_SIDES, KL_LOSS, LENGTHS, Table, no, to

TABLE: Final[Table] = {
    "rollout/raw_reward": to("reward.mean"),
    "rollout/rewards": no("normalised within groups: always about 0"),
    "train/entropy_loss": to("entropy.mean", "the entropy itself, full vocabulary"),
    "train/grad_norm": to("grad.norm"),
    "train/lr-pg_0": to("lr"),
    "train/loss": to("loss"),
    "train/pg_loss": to("loss", "policy loss"),
    "train/kl_loss": to("reference.kl_k3", KL_LOSS),
    "train/ppo_kl": to("update.kl_k1", "mean(old − cur), mean of sequence means, " + ALL_UPDATES),
    "train/pg_clipfrac": to("update.clip_high", BOTH_SIDES),
    "train/train_rollout_logprob_abs_diff": to("mismatch.abs_mean", "mean of sequence means by default"),
    "train/ois": no("exp(−ppo_kl): says the same"),
    "train/tis": to("mismatch.ratio_mean", "before truncation"),
    "train/tis_clipfrac": to("is_weight.masked", "share of truncated weights"),
    "train/mis_k3_kl": to("mismatch.kl_k3"),
    "train/mis_kl": to("mismatch.kl_k1"),
    "train/mis_chi2_token": to("mismatch.chi2_token"),
    "train/mis_chi2_seq": no(LENGTHS),
    "rollout/response_len/mean": to("length.mean"),
    "rollout/response_lengths": to("length.mean"),
    "rollout/response_len/max": to("length.max"),
    "rollout/truncated_ratio": to("length.truncated"),
    "rollout/truncated": to("length.truncated"),
    "rollout/repetition_frac": to("length.repetition"),
    "rollout/log_probs": to("mismatch.a_mean"),
    "rollout/rollout_log_probs": to("mismatch.b_mean"),
}

"""SkyRL (a956457)."""

from __future__ import annotations

from typing import Final

from foreshock.frames.names.base import BOTH_SIDES, ENGINE_OR_UPDATE, KL_LOSS, POST_CLIP, Table, no, to

TABLE: Final[Table] = {
    "reward/avg_raw_reward": to("reward.mean"),
    "reward/mean_positive_reward": no("of positive rewards only"),
    "policy/policy_entropy": to("entropy.mean"),
    "policy/raw_grad_norm": to("grad.norm"),
    "policy/grad_norm": to("grad.norm"),
    "policy/policy_lr": to("lr"),
    "policy/policy_loss": to("loss", "policy loss"),
    "policy/final_loss": to("loss"),
    "policy/policy_kl": to("reference.kl_k3", KL_LOSS),
    "policy/rollout_train_logprobs_abs_diff_mean": to("mismatch.abs_mean"),
    "policy/rollout_train_logprobs_abs_diff_max": to("mismatch.abs_max"),
    "policy/minibatch_rollout_logprobs_abs_diff_mean": to("mismatch_current.abs_mean", ENGINE_OR_UPDATE),
    "loss_metrics/clip_ratio": to("update.clip_high", BOTH_SIDES),
    "policy/loss_metrics/clip_ratio": to("update.clip_high", BOTH_SIDES),
    "loss_metrics/is_ratio_min": no("includes padding as zeros"),
    "loss_metrics/is_ratio_std": no("includes padding as zeros"),
    "loss_metrics/is_ratio_mean": no(POST_CLIP),
    "generate/avg_num_tokens": to("length.mean"),
    "generate/max_num_tokens": to("length.max"),
}

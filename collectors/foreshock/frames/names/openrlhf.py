"""OpenRLHF (3c3be62)."""

from __future__ import annotations

from typing import Final

from foreshock.frames.names.base import ALL_UPDATES, BOTH_SIDES, KL_LOSS, Table, no, to

TABLE: Final[Table] = {
    "train/reward": to("reward.mean"),
    "reward": to("reward.mean"),
    "rollout/reward_mean": to("reward.mean"),
    "rollout/reward_std": to("reward.std"),
    "group_reward_std": to("reward.std", "within groups"),
    "train/return": no("return, of reward and KL penalty"),
    "return": no("return, of reward and KL penalty"),
    "policy_loss": to("loss", "policy loss"),
    "train/policy_loss": to("loss", "policy loss"),
    "entropy_loss": to("entropy.mean", "the entropy itself"),
    "train/entropy_loss": to("entropy.mean", "the entropy itself"),
    "actor_grad_norm": to("grad.norm"),
    "train/actor_grad_norm": to("grad.norm"),
    "actor_lr": to("lr"),
    "train/actor_lr": to("lr"),
    "ppo_kl": to("update.kl_k1", "−mean(cur − old), " + ALL_UPDATES),
    "train/ppo_kl": to("update.kl_k1", "−mean(cur − old), " + ALL_UPDATES),
    "ppo_clip_ratio": to("update.clip_high", BOTH_SIDES),
    "train/ppo_clip_ratio": to("update.clip_high", BOTH_SIDES),
    "vllm_kl": to("mismatch.kl_k1", "engine minus old"),
    "train/vllm_kl": to("mismatch.kl_k1", "engine minus old"),
    "kl": to("reference.kl_k3", KL_LOSS),
    "train/kl": to("reference.kl_k3", KL_LOSS),
    "logprobs_diff": no("difference to the initial model, sign and estimator configured"),
    "response_length": to("length.mean"),
    "train/response_length": to("length.mean"),
    "rollout/response_length_mean": to("length.mean"),
    "rollout/truncated_rate": to("length.truncated"),
    "truncated": to("length.truncated"),
    "train/truncated": to("length.truncated"),
}

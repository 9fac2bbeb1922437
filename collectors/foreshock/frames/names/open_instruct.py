"""open-instruct."""

from __future__ import annotations

from typing import Final

from foreshock.frames.names.base import ALL_UPDATES, BOTH_SIDES, Table, to

TABLE: Final[Table] = {
    "scores": to("reward.mean"),
    "objective/verifiable_reward": to("reward.mean"),
    "objective/scores": to("reward.mean"),
    "policy/entropy_avg": to("entropy.mean"),
    "policy/approxkl_avg": to("update.kl_k2", ALL_UPDATES),
    "policy/clipfrac_avg": to("update.clip_high", BOTH_SIDES),
    "objective/kl3_avg": to("reference.kl_k3"),
    "objective/kl2_avg": to("reference.kl_k2"),
    "objective/kl_avg": to("reference.kl_k1", "current minus reference"),
    "debug/vllm_vs_local_logprob_diff_mean": to("mismatch.abs_mean"),
    "debug/vllm_vs_local_logprob_diff_max": to("mismatch.abs_max"),
    "val/ratio": to("update.ratio_mean", ALL_UPDATES),
    "val/sequence_lengths": to("length.mean"),
    "val/stop_rate": to("length.truncated", "1 minus it", scale=-1.0, offset=1.0),
    "loss/policy_avg": to("loss", "policy loss"),
    "optim/grad_norm": to("grad.norm"),
    "lr": to("lr"),
}

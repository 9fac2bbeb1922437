"""ROLL (8eb27cc)."""

from __future__ import annotations

from typing import Final

from foreshock.frames.names.base import BOTH_SIDES, LENGTHS, Table, no, to

TABLE: Final[Table] = {
    "critic/score/mean": to("reward.mean"),
    "actor/approxkl": to("policy.kl_k2", "k2 over all mini-batches, mean of sequence means: the invariant holds only "
                         "where there is one update a rollout"),
    "actor/policykl": to("policy.kl_k1", "cur − old: the other sign, mean of sequence means", scale=-1.0),
    "actor/ppo_ratio_low_clipfrac": to("update.clip_low"),
    "actor/ppo_ratio_high_clipfrac": to("update.clip_high"),
    "actor/ppo_ratio_clipfrac": no("sum of low and high"),
    "actor/clipfrac": to("update.clip_high", BOTH_SIDES),
    "actor/ratio_mean": to("policy.ratio_mean"),
    "actor/ratio_max": to("policy.ratio_max"),
    "actor/ratio_min": to("policy.ratio_min"),
    "actor/kl_loss": to("reference.kl_k3"),
    "actor/entropy": to("entropy.mean"),
    "actor/entropy_loss": to("entropy.mean", "the entropy itself"),
    "actor/pg_loss": to("loss", "policy loss"),
    "actor/total_loss": to("loss"),
    "actor/lr": to("lr"),
    "actor_train/grad_norm": to("grad.norm"),
    "actor/train_infer_ratio_token_mean": to("mismatch.ratio_mean"),
    "actor/train_infer_ratio_sequence_mean": no(LENGTHS),
    "actor/train_infer_diff_token_mean": no("exp(old) − exp(engine), signed, in probability space"),
    "actor/train_infer_final_mask_mean": to("is_weight.masked", "1 minus what is kept", scale=-1.0, offset=1.0),
    "tokens/response_length/mean": to("length.mean"),
    "tokens/response_length/max": to("length.max"),
    "critic/response_length/mean": to("length.mean"),
    "time/step_total": to("time.step_s"),
}  # fmt: skip

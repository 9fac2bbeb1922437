"""The tinker cookbook."""

from __future__ import annotations

from typing import Final

from foreshock.frames.names.base import Table, to

TABLE: Final[Table] = {
    "env/all/reward/total": to("reward.mean"),
    "optim/entropy": to("entropy.mean", "of sampled tokens"),
    "optim/kl_sample_train_v1": to("mismatch_current.kl_k1", "sampler minus trainer"),
    "optim/kl_sample_train_v2": to("mismatch_current.kl_k2"),
    "optim/lr": to("lr"),
    "env/all/ac_tokens_per_turn": to("length.mean", "of a turn"),
    "env/all/by_group/frac_mixed": to("group.zero_std", "1 minus it", scale=-1.0, offset=1.0),
    "kl_policy_base": to("reference.kl_k1"),
}

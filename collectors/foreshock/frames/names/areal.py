"""AReaL (4aef98d), of whose statistics the averages are read."""

from __future__ import annotations

from typing import Final

from foreshock.frames.names.base import BOTH_SIDES, POST_CLIP, Table, no, to

TABLE: Final[Table] = {
    "task_reward/avg": to("reward.mean"),
    "final_reward/avg": no("after scaling and KL penalty"),
    "entropy/avg": to("entropy.mean"),
    "grad_norm": to("grad.norm"),
    "actor_loss/avg": to("loss"),
    "approx_kl/avg": to("update.kl_k1", "cur − prox: the other sign; where prox is the engine's it holds the mismatch",
                        scale=-1.0),
    "importance_weight/avg": to("update.ratio_mean"),
    "behave_approx_kl/avg": to("mismatch.kl_k1", "prox − behave: the other sign", scale=-1.0),
    "behave_imp_weight/avg": no(POST_CLIP),
    "clip_ratio/avg": to("update.clip_high", BOTH_SIDES),
    "seq_len/avg": no("prompt and response together"),
    "no_eos_ratios/avg": to("length.truncated", "responses without an end token"),
    "rs_filtered_fraction/avg": to("is_weight.masked"),
    "version_stats/sample_staleness_avg": to("staleness.mean"),
    "version_stats/sample_staleness_max": to("staleness.max"),
    "update_successful": to("update.skipped", "1 minus it", scale=-1.0, offset=1.0),
}  # fmt: skip

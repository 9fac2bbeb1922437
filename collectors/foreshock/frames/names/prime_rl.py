"""prime-rl (559b447)."""

from __future__ import annotations

from typing import Final

from foreshock.frames.names.base import ENGINE_OR_UPDATE, Table, no, to

TABLE: Final[Table] = {
    "reward/all/mean": to("reward.mean"),
    "reward/mean": to("reward.mean"),
    "mismatch_kl/all/mean": to("mismatch_current.kl_k3", ENGINE_OR_UPDATE),
    "mismatch_kl/mean": to("mismatch_current.kl_k3", ENGINE_OR_UPDATE),
    "mismatch_kl": to("mismatch_current.kl_k3", ENGINE_OR_UPDATE),
    "entropy/all/mean": to("entropy.mean"),
    "entropy/mean": to("entropy.mean"),
    "is_masked/all/mean": to("is_weight.masked"),
    "is_masked/mean": to("is_weight.masked"),
    "kl_ent_ratio/mean": no("mismatch_kl over entropy"),
    "loss/mean": to("loss"),
    "optim/grad_norm": to("grad.norm"),
    "optim/lr": to("lr"),
    "seq_len/all/mean": no("prompt and response together"),
    "max_vio/mean": to("expert.max_violation"),
}

"""ms-swift (3602360): its own, then TRL's."""

from __future__ import annotations

from typing import Final

from foreshock.frames.names.base import AFTER_CORRECTION, Table, no, to
from foreshock.frames.names.trl import TABLE as TRL

TABLE: Final[Table] = {
    "rollout_correction/k3_kl": to("mismatch.kl_k3"),
    "rollout_correction/kl": to("mismatch.kl_k1"),
    "rollout_correction/chi2_token": to("mismatch.chi2_token"),
    "rollout_correction/chi2_seq": no("of the geometric mean, unlike verl's"),
    "rollout_correction/ess": to("mismatch.ess_token", "of weights clamped to [1/t, t]: an upper bound"),
    "rollout_correction/is_weight_mean": to("is_weight.mean", AFTER_CORRECTION),
    "rollout_correction/clipped_frac": to("is_weight.masked", "share of clipped weights"),
    **TRL,
}

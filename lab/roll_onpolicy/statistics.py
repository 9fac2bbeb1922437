"""The ladder's figures for one pair of log-probs, by the SDK's own statistics (``foreshock.stats``)."""

from __future__ import annotations

from typing import Any

import torch

from foreshock.stats.merge import statistics
from foreshock.stats.pair import PairAccumulator

#: what the ladder's table shows of a pair; SIGNALS names, nats
SHOWN = (
    "tokens", "delta_mean", "delta_std", "abs_mean", "abs_max", "kl_k1", "kl_k2", "kl_k2_seqmean", "kl_k3",
    "zero_share", "ess_token", "clip_low", "clip_high", "seq_abs_max", "logp_pearson",
)  # fmt: skip


def pair_statistics(a_BT: torch.Tensor, b_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, Any]:
    """Statistics of a − b over masked tokens, [sequences, positions]; a missing one is its reason as a string."""
    accumulator = PairAccumulator()
    accumulator.observe(a_BT, b_BT, mask_BT)
    values = statistics(accumulator.record()).values
    return {name: values[name] for name in SHOWN if name in values}

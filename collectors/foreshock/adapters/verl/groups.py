"""Rewards by prompt, from the batch whose advantages verl is about to compute on the driver."""

from __future__ import annotations

from typing import Any


def values(data: Any) -> dict[str, float]:
    """`reward.std` and `group.zero_std` over rows that are no padding; nothing where the batch names no prompts."""
    import numpy as np

    if "token_level_scores" not in data.batch or "uid" not in data.non_tensor_batch:
        return {}
    uids = np.asarray(data.non_tensor_batch["uid"]).astype(str)
    real = ~np.char.startswith(uids, "pad")  # verl names the prompts of its padding rows so
    scores = data.batch["token_level_scores"].sum(-1).double().cpu().numpy()[real]
    if not scores.size:
        return {}
    found = {"reward.std": float(scores.std())}
    _, prompt, count = np.unique(uids[real], return_inverse=True, return_counts=True)
    if (count > 1).any():
        low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
        np.minimum.at(low, prompt, scores)
        np.maximum.at(high, prompt, scores)
        found["group.zero_std"] = float((low == high)[count > 1].mean())
    return found

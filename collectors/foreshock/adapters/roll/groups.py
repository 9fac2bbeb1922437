"""`group.mixed`, rewards and lengths, from the rows that one rank trains on.

A group's normalised rewards sum to zero over its own answers. So, over all ranks, the normalised rewards of the
answers to one prompt must sum to zero; where they do not, the group that was normalised held other prompts. Told from
the rows as they arrive at the trainer: no knowledge of the driver is needed, and none of ROLL's version.
"""

from __future__ import annotations

from typing import Any

TOLERANCE = 1e-3


class Rows:
    """Small per-row figures of a step, on the device until `values`."""

    def __init__(self) -> None:
        self._parts: list[Any] = []

    def add(self, batch: Any) -> None:
        """Notes prompt key, reward, normalised reward, length and truncation of each row of a mini-batch."""
        import torch

        rows = batch.batch
        keys = set(rows.keys())
        if not {"input_ids", "response_mask", "attention_mask"} <= keys:
            return
        response_BS = rows["response_mask"] > 0
        if "origin_response_mask" in keys:
            response_BS = rows["origin_response_mask"] > 0
        prompt_BS = (rows["attention_mask"] > 0) & ~response_BS
        # The prompt is what comes before the first response token: later holes (tools) are not part of it.
        prompt_BS = prompt_BS & (response_BS.long().cumsum(-1) == 0)
        place = prompt_BS.long().cumsum(-1)
        key_B = (((rows["input_ids"].long() + 1) * (place * 2654435761 + 40503)) * prompt_BS).sum(-1) & 0xFFFFFFFFFFF
        length_B = response_BS[:, 1:].sum(-1)
        nothing = torch.full_like(length_B, float("nan"), dtype=torch.float64)
        score_B = rows["scores"].double() if "scores" in keys else nothing
        normal_B = rows["response_level_rewards"].double() if "response_level_rewards" in keys else nothing
        limit = rows["responses"].shape[-1] if "responses" in keys else -1
        self._parts.append(
            torch.stack([key_B.double(), score_B, normal_B, length_B.double(), (length_B == limit).double()], 1)
        )

    def read(self) -> Any:
        """This rank's rows, [rows, 5] on the host; None without any. One copy a step."""
        import torch

        return torch.cat(self._parts).cpu() if self._parts else None


def values(every: list[Any], config: Any) -> dict[str, float]:
    """Scalars over the rows of all ranks."""
    import torch

    parts = [rows for rows in every if rows is not None]
    if not parts:
        return {}
    key, score, normal, length, cut = torch.cat(parts).unbind(1)
    found = {
        "length.mean": float(length.mean()), "length.max": float(length.max()), "length.truncated": float(cut.mean()),
    }  # fmt: skip
    if torch.isfinite(score).all():
        found |= {
            "reward.mean": float(score.mean()), "reward.std": float(score.std(unbiased=False)),
            "reward.min": float(score.min()), "reward.max": float(score.max()),
        }  # fmt: skip
    return found | grouped(key, score, normal, config)


def grouped(key: Any, score: Any, normal: Any, config: Any) -> dict[str, float]:
    """`group.zero_std`, and `group.mixed` where rewards are normalised by group and nothing clips them after."""
    import torch

    size = int(config.actor_infer.generating_args.num_return_sequences or 1)
    estimator = getattr(config, "adv_estimator", "")
    by_group = estimator == "grpo" or getattr(config, "norm_mean_type", None) == "group"
    if size <= 1 or not by_group:
        return {}
    _, prompt = key.unique(return_inverse=True)
    count = torch.bincount(prompt)
    whole = count % size == 0  # a group that lost rows tells nothing
    found: dict[str, float] = {}
    if not whole.any():
        return found
    if torch.isfinite(score).all():
        mean = torch.zeros_like(count, dtype=torch.float64).scatter_add_(0, prompt, score) / count
        square = torch.zeros_like(mean).scatter_add_(0, prompt, (score - mean[prompt]) ** 2)
        found["group.zero_std"] = float((square[whole] == 0).double().mean())
    if torch.isfinite(normal).all() and not getattr(config, "reward_clip", None):
        total = torch.zeros_like(count, dtype=torch.float64).scatter_add_(0, prompt, normal)
        found["group.mixed"] = float(((total / count).abs() > TOLERANCE)[whole].double().mean())
    return found

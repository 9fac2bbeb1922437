"""Our own equivalent of ROLL's trainer path, written from its behaviour; equal to it by ``test_real_source``.

Sources: roll/utils/dynamic_batching.py, roll/utils/functionals.py (reward_norm, masked_whiten, agg_loss),
roll/pipeline/rlvr/rlvr_pipeline.py (the order of the phases), roll/pipeline/rlvr/actor_pg_worker.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab.roll_onpolicy.path import Advantages, LossInput, LossOutput, MicroBatch, Partition, Rows, Settings


def sorted_order(lengths_N: Tensor, ranks: int) -> Tensor:
    """Rows by length, ties as they came, dealt to ranks in turn: the order that ``dynamic_batching_shard`` leaves."""
    by_length = torch.sort(lengths_N, stable=True).indices
    return torch.cat([by_length[rank::ranks] for rank in range(ranks)])


class OwnPath:
    """See ``path.Path``."""

    name = "own"

    def partition(self, rows: Rows, budget: int, settings: Settings) -> Partition:
        """Micro-batches of at most ``budget`` padded tokens, cut at the same places on every rank."""
        lengths = rows.attention_NS.sum(1).long()
        order = sorted_order(lengths, settings.ranks).view(settings.ranks, -1)
        longest = lengths[order].max(0).values
        padded = [-(-int(x) // settings.round_to) * settings.round_to for x in longest]
        if max(padded) > budget:
            raise ValueError(f"a sequence of {max(padded)} padded tokens exceeds the micro-batch budget of {budget}")
        cuts, tallest = [0], settings.round_to
        for place, size in enumerate(padded):
            tallest = max(tallest, size)
            if (place + 1 - cuts[-1]) * tallest > budget:
                cuts.append(place)
                tallest = size
        bounds = list(zip(cuts, [*cuts[1:], len(padded)], strict=True))
        return [[MicroBatch(order[rank, a:b], max([settings.round_to, *padded[a:b]])) for a, b in bounds]
                for rank in range(settings.ranks)]  # fmt: skip

    def log_probs(self, logits: Tensor, ids: Tensor, response: Tensor) -> Tensor:
        """Log-prob of each sampled token [B, L − 1], 0 off the response."""
        labels = ids[:, 1:] * (response[:, 1:] > 0)
        scored = torch.log_softmax(logits.float(), -1)[:, :-1].gather(-1, labels[..., None])[..., 0]
        return scored * response[:, 1:]

    def advantages(self, rows: Rows, settings: Settings) -> Advantages:
        """GRPO advantages with ROLL's masking and whitening, in the row order that the version had at that point."""
        count, group = rows.scores_N.numel(), settings.group
        order = torch.arange(count)
        if settings.groups == "mixed":  # sorted twice, for the reference pass and for the old log-probs
            lengths = rows.attention_NS.sum(1).long()
            order = sorted_order(lengths, settings.ranks)
            order = order[sorted_order(lengths[order], settings.ranks)]
        blocks = rows.scores_N[order].view(-1, group)
        spread = blocks.std(1, keepdim=True)
        normalised = torch.empty(count)
        normalised[order] = ((blocks - blocks.mean(1, keepdim=True)) / (spread + 1e-6)).flatten()
        prompts = (order // group).view(-1, group)
        mixed = float((prompts != prompts[:, :1]).any(1).float().mean())
        response = rows.response_NS[:, 1:]
        keep = response.sum(1) != rows.response_length if settings.mask_truncated else torch.ones(count) > 0
        final = response * keep[:, None]
        values = normalised[:, None] * final
        if settings.whiten and final.sum() > 1:
            total = final.sum()
            mean = (values * final).sum() / total
            variance = ((values - mean).square() * final).sum() / total * total / (total - 1)
            values = (values - mean) * torch.rsqrt(variance + 1e-8)
        return Advantages(values * final, final, mixed)

    def loss(self, part: LossInput, settings: Settings) -> LossOutput:
        """The PPO loss of ``ActorPGWorker.loss_func`` for ``pg_variant: ppo``, no dual clip, KL or entropy terms."""
        response = part.response[:, 1:]
        logp = self.log_probs(part.logits, part.ids, part.response)
        ratio = (logp - part.old_logp).exp()
        clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        surrogate = -torch.min(ratio * part.advantages, clipped * part.advantages)
        square = 0.5 * (logp - part.old_logp).detach().square()
        if settings.normalisation == "global":
            scale = part.micro_batches * part.ranks
            loss = _row_means(surrogate, part.final).sum() / (part.valid_final + 1e-8) * scale
            approxkl = _row_means(square, response).sum() / (part.total_rows + 1e-8)
        else:
            loss = _row_means(surrogate, part.final).sum() / ((part.final.sum(1) > 0).sum() + 1e-8)
            approxkl = _row_means(square, response).sum() / ((response.sum(1) > 0).sum() + 1e-8)
        return LossOutput(loss, logp, float(approxkl))


def _row_means(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum(1) / (mask.sum(1) + 1e-8) * (mask.sum(1) > 0)

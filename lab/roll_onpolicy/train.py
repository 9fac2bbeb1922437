"""One on-policy run of a rung: rollout, scoring, advantages, one optimizer step; the pairs measured at every step.

Shapes: N rows, S positions, T = S − 1. The trainer holds float32 masters; a pass computes on copies of them, rounded
and aged as the rung says. Gradients of the pass's copies are applied to the masters, as a distributed optimizer does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lab.roll_onpolicy import engine, policy, problems
from lab.roll_onpolicy.path import LossInput, MicroBatch, Partition, Path, Rows, Settings
from lab.roll_onpolicy.policy import Weights
from lab.roll_onpolicy.rungs import Rung
from lab.roll_onpolicy.statistics import pair_statistics
from lab.roll_onpolicy.warmup import STEPS, warm_weights

#: steps of nothing but truncated rows after which a run is dead and ends
DEAD = 12


@dataclass(frozen=True)
class Plan:
    """Length and size of a run. 16 prompts × 8 responses stand for the seed's 64 × 8."""

    steps: int = 100
    prompts: int = 16
    rate: float = 1.5e-3
    warmup_steps: int = 5
    warm_steps: int = STEPS
    clip: float = 1.0
    settings: Settings = field(default_factory=Settings)


class Run:
    """One rung at one seed. ``history`` holds the masters after each step, newest last."""

    def __init__(self, rung: Rung, path: Path, seed: int, plan: Plan):
        self.rung, self.path, self.plan, self.seed = rung, path, plan, seed
        self.settings = replace(plan.settings, normalisation=rung.normalisation, groups=rung.groups,
                                mask_truncated=rung.mask_truncated)  # fmt: skip
        self.masters = {name: w.clone().requires_grad_() for name, w in warm_weights(seed % 3, plan.warm_steps).items()}
        self.optimizer = torch.optim.Adam(list(self.masters.values()), plan.rate)
        longest = 1 + max(rung.stale_scoring, rung.stale_training, rung.engine_lag)
        self.history: deque[Weights] = deque(maxlen=longest)
        self.draw = torch.Generator().manual_seed(90_000 + seed)
        self.previous_old: Tensor | None = None

    def run(self) -> list[dict[str, Any]]:
        """Every step's figures. Deterministic in (rung, seed, plan, path)."""
        torch.manual_seed(1_000_000 + self.seed)
        lines = []
        for step in range(self.plan.steps):
            self.history.append({name: w.detach().clone() for name, w in self.masters.items()})
            lines.append(self.step(step))
            if len(lines) >= DEAD and all(line["truncated"] > 0.98 for line in lines[-DEAD:]):
                break  # every row is cut off and masked: no gradient is left, nothing can change any more
        return lines

    def aged(self, lag: int) -> Weights:
        """The masters of ``lag`` steps ago (the oldest kept, early in a run)."""
        return self.history[max(0, len(self.history) - 1 - lag)]

    def step(self, step: int) -> dict[str, Any]:
        rung, settings = self.rung, self.settings
        asked = problems.draw(self.plan.prompts, 7_000 * (self.seed + 1) + step).repeated(settings.group)
        rollout = engine.generate(self.aged(rung.engine_lag), asked, self.draw, rung.engine, rung.top_k)
        tokens = rollout.ids_NS[:, problems.PROMPT :]
        scores = problems.reward(tokens, rollout.length_N, rollout.ended_N, asked)
        attention = rollout.response_mask_NS.clone()
        attention[:, : problems.PROMPT] = 1
        rows = Rows(rollout.ids_NS, attention, rollout.response_mask_NS, scores, problems.RESPONSE)
        training = self.path.partition(rows, settings.budget_train, settings)
        scoring = self.path.partition(rows, settings.budget_infer, settings) if rung.seed_partitions else training
        old = self.old_log_probs(rows, scoring)
        advantages = self.path.advantages(rows, settings)
        current, approxkl, grad_norm, loss = self.update(step, rows, training, old, advantages)
        mask = rollout.response_mask_NS[:, 1:]
        learnable = asked.kind_N == 0
        return {
            "step": step, "reward": _mean(scores[learnable]), "reward_all": _mean(scores),
            "length": float(rollout.length_N.float().mean()), "truncated": _mean(1 - rollout.ended_N.float()),
            "policy": pair_statistics(current, old, mask), "mismatch": pair_statistics(old, rollout.logp_NT, mask),
            "entropy": -float((rollout.logp_NT * mask).sum() / mask.sum()), "approxkl": approxkl,
            "grad_norm": grad_norm, "loss": loss, "mixed": advantages.mixed,
        }  # fmt: skip

    @torch.no_grad()
    def old_log_probs(self, rows: Rows, partition: Partition) -> Tensor:
        """The scoring pass, [N, T], and what the rung does to its result."""
        rung = self.rung
        weights = policy.as_numerics(self.aged(rung.stale_scoring), rung.scoring)
        old = torch.zeros(rows.ids_NS.shape[0], rows.ids_NS.shape[1] - 1)
        for micro in (m for rank in partition for m in rank):
            length = rows.ids_NS.shape[1] if rung.pad_scoring else micro.length
            ids, response = rows.ids_NS[micro.rows_B, :length], rows.response_NS[micro.rows_B, :length]
            logits = policy.forward(weights, ids, rung.scoring)
            if rung.unfused:
                shifted = logits - logits.max(-1, keepdim=True).values
                chosen = shifted[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
                scored = (chosen - shifted[:, :-1].exp().sum(-1).log()) * response[:, 1:]
            else:
                scored = self.path.log_probs(logits, ids, response)
            old[micro.rows_B, : length - 1] = scored
        if rung.old_from == "misordered":
            old = old[torch.cat([m.rows_B for rank in partition for m in rank])]
        if rung.old_from == "zeros":
            old = torch.zeros_like(old)
        if rung.old_from == "previous":
            old, self.previous_old = (old if self.previous_old is None else self.previous_old), old
        return old

    def training_weights(self, rank: int) -> tuple[Weights, Weights]:
        """(leaves that collect the gradient, the weights that the forward uses) of one rank."""
        rung = self.rung
        held = {name: w.detach() for name, w in self.masters.items()}
        if rung.stale_training and not (rung.stale_share == "rank1" and rank == 0):
            stale, half = self.aged(rung.stale_training), len(held) // 2
            for place, name in enumerate(held):
                own = (place < half) == (rank == 0)
                if rung.stale_share != "half" or not own:
                    held[name] = stale[name]
        leaves = {name: w.clone().requires_grad_() for name, w in held.items()}
        return leaves, policy.as_numerics(leaves, rung.training)

    def update(self, step: int, rows: Rows, partition: Partition, old: Tensor, advantages: Any) -> tuple[Any, ...]:
        """The training pass and the optimizer step. (current log-probs [N, T], approxkl, gradient norm, loss)."""
        current = torch.zeros_like(old)
        totals = {"approxkl": 0.0, "loss": 0.0}
        gradients = {name: torch.zeros_like(w) for name, w in self.masters.items()}
        ranks = len(partition)
        for rank, micros in enumerate(partition):
            leaves, weights = self.training_weights(rank)
            for micro in micros:
                self._micro_batch(rows, micro, weights, old, advantages, current, totals, len(micros), ranks)
            for name, leaf in leaves.items():
                if leaf.grad is not None:
                    gradients[name] += leaf.grad / ranks
        approxkl = totals["approxkl"]
        if self.settings.normalisation == "micro_batch":
            approxkl /= ranks * len(partition[0])
        norm = self._apply(step, gradients)
        return current, approxkl, norm, totals["loss"] / ranks

    def _micro_batch(self, rows: Rows, micro: MicroBatch, weights: Weights, old: Tensor, advantages: Any,
                     current: Tensor, totals: dict[str, float], count: int, ranks: int) -> None:  # fmt: skip
        length, at = micro.length, micro.rows_B
        ids = rows.ids_NS[at, :length]
        logits = policy.forward(weights, ids, self.rung.training)
        final = advantages.final_NT
        part = LossInput(
            logits, ids, rows.response_NS[at, :length], old[at, : length - 1], advantages.values_NT[at, : length - 1],
            final[at, : length - 1], rows.ids_NS.shape[0], int(rows.response_NS[:, 1:].sum()),
            int((final.sum(1) > 0).sum()), count, ranks,
        )  # fmt: skip
        out = self.path.loss(part, self.settings)
        # the copies' rounding graph is shared by the micro-batches
        (out.loss / count).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        current[at, : length - 1] = out.logp.detach()
        totals["approxkl"] += out.approxkl
        totals["loss"] += float(out.loss.detach()) / count

    def _apply(self, step: int, gradients: Weights) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate * min(1.0, (step + 1) / self.plan.warmup_steps)
        for name, master in self.masters.items():
            master.grad = gradients[name]
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.plan.clip))
        if self.rung.frozen_after < 0 or step < self.rung.frozen_after:
            self.optimizer.step()
        return norm


def _mean(values: Tensor) -> float:
    return float(values.mean()) if values.numel() else float("nan")

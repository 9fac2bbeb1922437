"""GRPO on the sorting task, one step at a time, every phase a method.

Shapes: N prompts, G samples each, B = N × G sequences, R response positions, V vocabulary.

A step: push weights → rollout → reward and advantage → scoring pass (old log-probs) → two mini-batches of the
training pass (current log-probs) → optimizer. The scoring pass takes micro-batches of 64 rows in order, the training
pass of 32 rows shuffled. Log-probs are observed before any clamp.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import foreshock

from . import engine as lab_engine
from .channel import WeightChannel
from .engine import Engine, Rollout, Sampling, checksum
from .measure import StepRecord
from .model import Weights, forward
from .monitoring import Monitor
from .parameters import Parameters
from .task import END, RESPONSE_LENGTH, Prompts, reward, training_prompts, validation_prompts

PROMPTS, SAMPLES = 16, 8
ROWS = PROMPTS * SAMPLES
SCORING_ROWS, TRAINING_ROWS, MINI_BATCHES = 64, 32, 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
IS_CAP = 2.0
GRADIENT_CLIP = 1.0
VALIDATION_EVERY, VALIDATION_PROMPTS = 5, 128

SEMANTICS = foreshock.Semantics(
    engine=lab_engine.NAME,
    version=lab_engine.VERSION,
    temperature=1.0,
    truncation="none",
    normaliser="full_vocabulary",
    source="decode",
    dtype="bfloat16",
)


@dataclass
class Schedule:
    """Learning rate: five steps of warm-up, then flat, times a factor that `scale_lr` multiplies."""

    base: float = 3e-4
    warmup_steps: int = 5
    factor: float = 1.0
    steps: int = 0

    @property
    def rate(self) -> float:
        """Of the next update."""
        return self.base * self.factor * min(1.0, (self.steps + 1) / self.warmup_steps)


@dataclass
class Batch:
    """One rollout with what the trainer made of it."""

    ids_BS: Tensor
    labels_BR: Tensor
    rollout: Rollout
    advantages_B: Tensor
    old_BR: Tensor
    sequence_ids_B: Tensor


@dataclass
class UpdateFigures:
    """Over the mini-batches of a step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Trainer:
    """The whole state of a job. What a checkpoint holds of it is in checkpoints.py."""

    def __init__(self, weights: Weights, seed: int) -> None:
        torch.manual_seed(seed + 77)
        self.seed = seed
        self.schedule = Schedule()
        self.parameters = Parameters(weights, self.schedule.base)
        self.engine = Engine()
        self.channel = WeightChannel(self.engine)
        self.generator = torch.Generator().manual_seed(seed + 4242)
        self.data_position = 0
        self.version = 0
        self.is_cap: float | None = None
        self.skips_left = 0
        self.sampling = Sampling()
        self.label_shift = 0
        self.training_dropout = 0.0
        self.old_lag = 0
        self._old_kept: deque[Tensor] = deque(maxlen=2)

    # --- what commands ask ---------------------------------------------------------------------------------------

    def resync_trainer(self) -> dict[str, Any]:
        """Master to model, cached views dropped and never read again. Raises RuntimeError if a pass still differs."""
        self.parameters.resync()
        return {"version": self.version, "checksum": f"{checksum(self.parameters.master):08x}"}

    def resync_engine(self) -> dict[str, Any]:
        """Pushes past the channel's ring and flushes. Raises RuntimeError if the checksums still differ."""
        self.channel.resync(self.parameters.master, self.version)
        return {"version": self.version, "checksum": f"{self.engine.checksum:08x}"}

    # --- one step ------------------------------------------------------------------------------------------------

    def step(self, step: int, monitor: Monitor) -> dict[str, float]:
        """Runs one step, tells the monitor, and returns the scalars it logged with the lab's own pair figures."""
        record = StepRecord()
        self.channel.push(self.parameters.master, self.version)
        prompts = training_prompts(self.seed, self.data_position, PROMPTS)
        rollout = self.engine.generate(prompts, SAMPLES, self.generator, self.sampling)
        rewards_B = reward(rollout.tokens_BR, rollout.mask_BR, rollout.truncated_B, prompts.repeated(SAMPLES))
        batch, entropy = self._scored(prompts, rollout, rewards_B)
        self._observe(record, monitor, "mismatch", batch.old_BR, batch, slice(None), semantics=SEMANTICS)
        scalars = self._scalars(rollout, rewards_B, batch.advantages_B)
        scalars["entropy.mean"] = entropy
        skipped = self.skips_left > 0
        updates = self._update(batch, record, monitor, skipped)
        scalars["loss"] = sum(updates.losses) / len(updates.losses)
        scalars["grad.norm"] = sum(updates.norms) / len(updates.norms)
        scalars["grad.nonfinite"] = float(sum(not math.isfinite(norm) for norm in updates.norms))
        scalars["update.skipped"] = float(skipped)
        self.data_position += 1
        if skipped:
            self.skips_left -= 1
        else:
            self.schedule.steps += 1
            self.version += 1
        if step % VALIDATION_EVERY == 0:
            scalars["reward.validation"] = self.validate(step)
        monitor.log(scalars)
        return scalars | record.figures()

    @torch.no_grad()
    def validate(self, step: int) -> float:
        """Mean reward of the master weights at temperature 1, through an engine of their own."""
        engine = Engine()
        engine.load(self.parameters.master, self.version)
        prompts = validation_prompts(step, VALIDATION_PROMPTS)
        rollout = engine.generate(prompts, 1, torch.Generator().manual_seed(5000 + step), Sampling())
        return float(reward(rollout.tokens_BR, rollout.mask_BR, rollout.truncated_B, prompts).mean())

    @torch.no_grad()
    def _scored(self, prompts: Prompts, rollout: Rollout, rewards_B: Tensor) -> tuple[Batch, float]:
        """The scoring pass: old log-probs by the trainer's own forward, and the mean full-vocabulary entropy."""
        ids = torch.cat([prompts.ids_NP.repeat_interleave(SAMPLES, 0), rollout.tokens_BR], 1)
        labels = self._labels(rollout.tokens_BR)
        views = self.parameters.scoring_views.views(self.parameters.master)
        old, entropies = [], []
        for rows in torch.split(torch.arange(ROWS), SCORING_ROWS):
            logp_RV = F.log_softmax(forward(views, ids[rows], RESPONSE_LENGTH), -1)
            old.append(logp_RV.gather(2, labels[rows][:, :, None])[:, :, 0])
            entropies.append(-(logp_RV.exp() * logp_RV).sum(-1))
        self._old_kept.append(torch.cat(old))
        mask = rollout.mask_BR
        entropy = float((torch.cat(entropies) * mask).sum() / mask.sum())
        grouped = rewards_B.view(PROMPTS, SAMPLES)
        advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        sequence_ids = torch.arange(ROWS) + self.data_position * ROWS
        old_BR = self._old_kept[max(0, len(self._old_kept) - 1 - self.old_lag)]
        return Batch(ids, labels, rollout, advantages.view(-1), old_BR, sequence_ids), entropy

    def _labels(self, tokens_BR: Tensor) -> Tensor:
        """The tokens whose log-probs are taken: those sampled, unless the labels are shifted."""
        if self.label_shift == 0:
            return tokens_BR
        return torch.cat([tokens_BR[:, 1:], torch.full_like(tokens_BR[:, :1], END)], 1)

    def _update(self, batch: Batch, record: StepRecord, monitor: Monitor, skipped: bool) -> UpdateFigures:
        figures = UpdateFigures()
        order = torch.randperm(ROWS, generator=self.generator)
        for optimizer_step, mini in enumerate(order.chunk(MINI_BATCHES)):
            views = self.parameters.training_views.views(self.parameters.master)
            leaves = {name: w.detach().requires_grad_() for name, w in views.items()}
            tokens = batch.rollout.mask_BR[mini].sum()
            loss = 0.0
            for rows in torch.split(mini, TRAINING_ROWS):
                part = self._micro_batch(leaves, batch, rows, optimizer_step, record, monitor) / tokens
                part.backward()  # type: ignore[no-untyped-call]
                loss += float(part.detach())
            figures.losses.append(loss)
            figures.norms.append(self._apply(leaves, skipped))
        return figures

    def _micro_batch(
        self, leaves: Weights, batch: Batch, rows: Tensor, optimizer_step: int, record: StepRecord, monitor: Monitor
    ) -> Tensor:
        """The training pass over some rows: observes, and returns the sum of the clipped token losses."""
        logits = forward(leaves, batch.ids_BS[rows], RESPONSE_LENGTH, self.training_dropout)
        logp_BR = F.log_softmax(logits, -1).gather(2, batch.labels_BR[rows][:, :, None])[:, :, 0]
        detached = logp_BR.detach()
        self._observe(
            record, monitor, "policy", detached, batch, rows,
            optimizer_step=optimizer_step, clip_range=(CLIP_LOW, CLIP_HIGH),
        )  # fmt: skip
        if optimizer_step == 0:
            self._observe(record, monitor, "mismatch_current", detached, batch, rows, semantics=SEMANTICS)
        ratio = (logp_BR - batch.old_BR[rows]).clamp(-20, 20).exp()
        advantage = batch.advantages_B[rows][:, None]
        loss_BR = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
        if self.is_cap is not None:
            weight = (batch.old_BR[rows] - batch.rollout.log_probs_BR[rows]).clamp(-20, 20).exp()
            loss_BR = loss_BR * weight.clamp(max=self.is_cap)
        return (loss_BR * batch.rollout.mask_BR[rows]).sum()

    def _apply(self, leaves: Weights, skipped: bool) -> float:
        """Hands the gradients to the optimizer, steps and gathers; returns the norm before clipping."""
        optimized = self.parameters.optimized
        for tensor, leaf in zip(optimized, leaves.values(), strict=True):
            tensor.grad = leaf.grad
        norm = float(torch.nn.utils.clip_grad_norm_(optimized, GRADIENT_CLIP))
        if not skipped:
            for group in self.parameters.optimizer.param_groups:
                group["lr"] = self.schedule.rate
            self.parameters.optimizer.step()
            self.parameters.gather()
        return norm

    def _observe(
        self, record: StepRecord, monitor: Monitor, pair: str, a_BR: Tensor, batch: Batch, rows: Any, **where: Any
    ) -> None:
        b_BR = (batch.old_BR if pair == "policy" else batch.rollout.log_probs_BR)[rows]
        mask_BR = batch.rollout.mask_BR[rows]
        record.add("update" if where.get("optimizer_step", 0) else pair, a_BR, b_BR, mask_BR)
        monitor.observe(
            pair, a=a_BR, b=b_BR, mask=mask_BR,
            seq_ids=batch.sequence_ids_B[rows], token_ids=batch.rollout.tokens_BR[rows], **where,
        )  # fmt: skip

    def _scalars(self, rollout: Rollout, rewards_B: Tensor, advantages_B: Tensor) -> dict[str, float]:
        lengths = rollout.mask_BR.sum(1)
        grouped = rewards_B.view(PROMPTS, SAMPLES)
        staleness = float(self.version - self.engine.version)
        return {
            "reward.mean": float(rewards_B.mean()),
            "reward.std": float(rewards_B.std()),
            "reward.min": float(rewards_B.min()),
            "reward.max": float(rewards_B.max()),
            "group.zero_std": float((grouped.amax(1) == grouped.amin(1)).float().mean()),
            "advantage.mean": float(advantages_B.mean()),
            "advantage.std": float(advantages_B.std()),
            "advantage.abs_max": float(advantages_B.abs().max()),
            "length.mean": float(lengths.mean()),
            "length.max": float(lengths.max()),
            "length.truncated": float(rollout.truncated_B.float().mean()),
            "lr": self.schedule.rate,
            "staleness.mean": staleness,
            "staleness.max": staleness,
            "weights.version": float(self.version),
            "weights.changed_share": self.parameters.changed_share(),
        }
